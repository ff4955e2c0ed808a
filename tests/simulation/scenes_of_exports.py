"""Scenes with exports, and a worker, a link or a reload that comes in their middle."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from .scenes import end
from .steps import Step

if TYPE_CHECKING:
    from .plan import Plan


def broken(plan: Plan, random: Random, device: int) -> list[Step]:
    """The link breaks in the middle of a large batch, perhaps twice."""
    service = random.choice((plan.sink, plan.sink, "s3"))
    family = "kin" if service != "s3" else random.choice(("safe", "ring"))
    breaks = [Step("breaks", (random.randrange(4), service), 0.6) for _ in range(random.choice((1, 2)))]
    return [
        Step("link", (True,)),
        Step("publish", (device, 300, family, 1)),
        Step("publish", ((device + 1) % 3, 300, family, 1), 0.5),
        *breaks,
        Step("link", (False,), 0.3),
    ]


def both(plan: Plan, random: Random, device: int) -> list[Step]:
    """Two exports have rejected records: the worker ends while one is being kept, and the next cannot be."""
    plan.sink, plan.threads = "kinesis", max(plan.threads, 2)
    return [
        Step("drain", (), 0.1),
        Step("lag", (15, "/dead")),
        Step("publish", (device, 120, "kin", 1), random.choice((0.5, 1, 2))),
        Step("worker", (0, "s later")),
        Step("refuse", (9, "/dead")),
        Step("publish", ((device + 1) % 3, 20, "odd", 1), random.choice((9, 15))),
        Step("repair", (), 1.0),
        Step("drain"),
    ]


def sampled(plan: Plan, random: Random, device: int) -> list[Step]:
    """A sample is sent in batches that the link cuts, and some of whose records are refused."""
    breaks = [Step("breaks", (random.randrange(3), "kinesis"), 0.6) for _ in range(random.choice((1, 2)))]
    return [
        Step("publish", (device, random.choice((5, 20)), "odd", 1), 0.1),
        *(breaks if random.random() < 0.5 else [Step("faults", (0.1,))]),
        Step("publish", ((device + 1) % 3, 20, "odd", 1), 0.6),
        *([Step("worker", (random.choice((3, 8)), "calls of the system later"), 0.6)][: random.randrange(2)]),
        end(plan, random),
        Step("repair", (), 0.3),
        Step("faults", (0.0,), 0.5),
        Step("drain"),
    ]


def keyed(plan: Plan, random: Random, device: int) -> list[Step]:
    """Kinesis throttles some records of a batch, whose keys have others in it."""
    plan.sink, plan.keyed = "kinesis", True
    return [
        Step("link", (True,)),
        Step("publish", (device, 120, "kin", 1)),
        Step("publish", ((device + 1) % 3, 120, "kin", 1), 0.4),
        Step("faults", (random.choice((0.05, 0.1)),)),
        Step("link", (False,), random.choice((0.5, 1.0))),
        Step("faults", (0.0,), 0.3),
    ]


def paused(plan: Plan, random: Random, device: int) -> list[Step]:
    """An operator pauses exports; they start over, or the gateway ends, and still they rest."""
    family = random.choice(("kin", "safe"))
    changes = [
        Step("redefine", (family, random.choice((0.0, 0.5))), 0.2),
        Step("update", (), 0.2),
        end(plan, random),
    ]
    return [
        Step("publish", (device, 20, family, 1), random.choice((0.02, 0.5))),
        Step("rest", (family,), 0.1),
        *random.sample(changes, random.choice((1, 2))),
        Step("pause", (2,)),
        Step("publish", ((device + 1) % 3, 5, family, 1), 0.5),
        *([end(plan, random)] if random.random() < 0.5 else []),
        Step("resume", (), 0.3),
    ]


def moved(plan: Plan, random: Random, device: int) -> list[Step]:
    """An export starts over while it sends, and the stream is full and must free what was sent."""
    moves = [Step("redefine", ("kin", random.choice((0.0, 0.5))))]
    if random.random() < 0.3:
        moves = [Step("shrink", (random.choice((0.0, 0.5)),))]
    elif random.random() < 0.3:  # and back, perhaps before the worker has heard of it
        moves = [Step("redefine", ("kin", 0.0), random.choice((0.001, 0.05, 0.3)))] * 2
    return [
        Step("publish", (device, 300, "kin", 1), random.choice((0.3, 0.6, 1.0))),
        Step("publish", ((device + 1) % 3, 120, "kin", 1), random.random() * 0.5),
        *moves,
        Step("publish", ((device + 2) % 3, 120, "kin", 1), 0.3),
    ]
