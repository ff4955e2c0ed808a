"""Scenes of what several clients share: consumers, and members of a shared subscription.

They come in addition to the other `scenes` of a world.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from .steps import Step

if TYPE_CHECKING:
    from .plan import Plan

Scene = Callable[["Plan", Random, int], list[Step]]
SHARE = 0.5  # of the worlds have such a scene
CALLS = (3, 9, 20, 60)


def shared_scene(plan: Plan) -> list[Step]:
    """One that is drawn, or none."""
    random = Random(f"shared scene {plan.seed}")
    if random.random() > SHARE:
        return []
    made = random.choices(list(SCENES), list(SCENES.values()))[0](plan, random, random.randrange(3))
    return [Step("repair"), *made]


def _end(plan: Plan, random: Random, cuts: float) -> Step:
    what = "cut" if plan.cuts and random.random() < cuts else "kill"
    if random.random() < 0.5:
        return Step(what, (random.choice(CALLS), "calls of the system later"), 0.3)
    return Step(what, (round(random.random() * 0.3, 6), "s later"), 0.5)


def heirs(plan: Plan, random: Random, device: int) -> list[Step]:
    """All members are away, the session of one ends, and the gateway too: another one has its messages."""
    return [
        Step("members", (True,), 0.1),
        Step("publish", (device, 5, "share", 1), 0.1),
        Step("members", (False,), 0.1),
        Step("publish", (device, random.choice((5, 20)), "share", 1), 0.3),
        Step("pause", (random.choice((5, 7)),)),
        *([_end(plan, random, 0.2)] if random.random() < 0.8 else []),
        Step("members", (True,), 0.5),
    ]


def one_is_away(plan: Plan, random: Random, device: int) -> list[Step]:
    """Messages come on a topic in use while one member is away: more than the other can take at once."""
    who = random.randrange(2)
    return [
        Step("members", (True,), 0.6),
        Step("publish", (device, 5, "share", 1), 0.2),
        Step("member", (who,), 0.2),
        Step("publish", (device, random.choice((20, 120, 300)), "share", 1), random.choice((0.6, 2.0))),
        Step("member", (who,), 0.5),
    ]


def crowded(plan: Plan, random: Random, device: int) -> list[Step]:
    """A large group has a topic in use, and nearly all of its members go away."""
    who = random.randrange(2)
    return [
        Step("members", (True,), 0.1),
        Step("crowd", (True,), 0.6),
        Step("publish", (device, 5, "share", 1), 0.2),
        Step("crowd", (False,), 0.1),
        Step("member", (who,), 0.2),
        Step("publish", (device, random.choice((20, 60)), "share", 1), 0.6),
        Step("member", (who,), 0.3),
        Step("crowd", (True,), 0.5),
    ]


def soon(plan: Plan, random: Random, device: int) -> list[Step]:
    """The gateway ends again soon after a start, or after new messages, while workers are busy with them."""
    return [
        Step("publish", (device, random.choice((5, 20)), "work", 1), random.choice((0.1, 0.3))),
        _end(plan, random, 0.7),
        Step("publish", (device, 2, "work", 1), random.choice((0.02, 0.1))),
        _end(plan, random, 0.7),
        Step("pause", (3,)),
    ]


def unsaved(plan: Plan, random: Random, device: int) -> list[Step]:
    """What consumers change cannot be saved for a while."""
    failing = Step(random.choice(("syncs", "refuse")), (random.choice((2, 4, 9)), "consumers"))
    return [
        Step("publish", (device, random.choice((5, 20)), "work", 1), 0.05),
        failing,
        Step("publish", (device, 20, "work", 1), 0.5),
        Step("pause", (random.choice((1, 3)),)),
    ]


def letters(plan: Plan, random: Random, device: int) -> list[Step]:
    """Messages are rejected, and their dead letters cannot be stored at first."""
    return [
        Step("publish", (device, 20, "work", 1), random.choice((0.1, 1.0))),
        Step(random.choice(("syncs", "refuse")), (random.choice((3, 6, 9)), "/fate")),
        Step("pause", (random.choice((3, 5)),)),
        *([_end(plan, random, 0.4)] if random.random() < 0.5 else []),
        Step("repair", (), 0.5),
    ]


def begun(plan: Plan, random: Random, device: int) -> list[Step]:
    """A reload moves the start of the consumer, workers go on, and the gateway ends."""
    return [
        Step("publish", (device, 20, "work", 1), 0.1),
        Step("pause", (random.choice((1, 2)),)),
        Step("rehire", (), random.choice((0.3, 0.6))),
        *([Step("publish", (device, 5, "work", 1), 0.3)] if random.random() < 0.5 else []),
        Step("kill", (random.random() * 0.3, "s later"), 0.3),
        Step("pause", (3,)),
    ]


SCENES: dict[Scene, float] = {
    heirs: 1.5,
    one_is_away: 1,
    crowded: 1.5,
    soon: 1.5,
    unsaved: 1.5,
    letters: 1.5,
    begun: 1,
}
