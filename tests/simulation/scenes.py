"""Scenes: a few steps that belong together, drawn into a plan.

A step alone seldom meets the failure that would show what it does wrong. A scene is a use of a feature with a
failure in the middle of it: what one stream of two has while the other fails, what is under way while a
snapshot is written, what was sent before an export starts over. It says what comes together; which stream,
how many, how long and how it ends is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from .steps import Step

if TYPE_CHECKING:
    from .plan import Plan

Scene = Callable[["Plan", Random, int], list[Step]]
SOON = (0.0, 0.002, 0.01, 0.05)  # s
CALLS = (0, 1, 2, 3, 5, 9, 20, 60)
PLACES_OF_WORK = ("consumers", "consumers", "/work")
SYNCED = ("safe", "kin")  # streams that sync before they acknowledge


def end(plan: Plan, random: Random, *, cuts: float = 0.4) -> Step:
    """How the service ends; with a probability of `cuts` the power is cut, if it ever is."""
    what = "cut" if plan.cuts and random.random() < cuts else random.choice(("kill", "kill", "stop"))
    if what == "stop":
        return Step(what, (), 0.3)
    if random.random() < 0.5:
        return Step(what, (random.choice(CALLS), "calls of the system later"), 0.3)
    return Step(what, (round(random.random() * random.choice((0.002, 0.05)), 6), "s later"), 0.3)


def _publish(random: Random, device: int, family: str, qos: int | None = None) -> Step:
    """A few messages, and little time."""
    qos = random.choice((1, 2)) if qos is None else qos
    return Step("publish", (device, random.choice((2, 5, 20)), family, qos), random.choice(SOON))


def release(plan: Plan, random: Random, device: int) -> list[Step]:
    """The journal cannot be written while packet ids are in use, and they are used again after the end."""
    family = random.choice(("safe", "safe", "live", "plain"))
    failing = random.choice(("refuse", "refuse", "syncs"))
    if random.random() < 0.5:
        # At each moment some ids are about to be released.
        begun = Step("publish", (plan.frugal, random.choice((1, 2, 5)), family, 2), random.random() * 0.001)
        return [
            *[begun] * 10,
            Step("refuse", (1, "sessions"), random.choice((0.005, 0.02, 0.1))),
            Step("kill", (random.random() * 0.05, "s later"), 0.3),
            Step("publish", (plan.frugal, 20, family, 2), 0.1),
        ]
    return [
        _publish(random, device, family, 2),
        Step(failing, (random.choice((1, 2, 4)), "sessions"), random.choice((0.005, 0.01, 0.03, 0.1, 1.1))),
        _publish(random, device, family, 2),
        end(plan, random),
        _publish(random, device, family, 2),
    ]


def half(plan: Plan, random: Random, device: int) -> list[Step]:
    """One stream of two fails, and the service ends before the message comes again."""
    family = random.choice(("safe", "plain"))
    failing = random.choice((family, "both", "both"))
    return [
        Step(random.choice(("refuse", "refuse", "syncs")), (random.choice((2, 4, 9)), f"/{failing}")),
        Step("publish", (device, 20, family, 2), random.choice((0.01, 0.03, 0.1))),
        end(plan, random, cuts=0.1),
        _publish(random, device, family),
    ]


def back(plan: Plan, random: Random, device: int) -> list[Step]:
    """A client comes back while a slow disk still commits what it sent before, and fails at that."""
    family = random.choice(SYNCED)
    return [
        Step("slow", (random.choice((0.2, 0.5)),)),
        Step("syncs", (random.choice((2, 2, 3, 4)), f"/{random.choice((family, family, 'both'))}")),
        _publish(random, device, family, random.choice((1, 2, 2, 2)))._replace(
            wait=random.choice((0.002, 0.01))
        ),
        Step("drop", (device,), random.choice((0.1, 0.5, 1.5))),
        _publish(random, device, family),
        Step("slow", (0,), 0.1),
    ]


def again(plan: Plan, random: Random, device: int) -> list[Step]:
    """All attempts of a group fail; what comes next is acknowledged, and the power goes."""
    family = random.choice((*SYNCED, "both"))
    return [
        Step("syncs", (random.choice((1, 2, 2, 3)), f"/{family}")),
        _publish(random, device, family, 1)._replace(wait=random.choice((0.05, 0.2, 0.4))),
        _publish(random, device, family, 1)._replace(wait=0.05),
        end(plan, random, cuts=0.8),
    ]


def purged(plan: Plan, random: Random, device: int) -> list[Step]:
    """A purge is confirmed, perhaps after its record could not be synced, and the power goes."""
    failing = Step("syncs", (random.choice((1, 2)), "/both"))
    return [
        _publish(random, device, "both", 1)._replace(wait=0.5),
        *([failing] if random.random() < 0.5 else []),
        Step("purge", (), random.choice((0.05, 0.2))),
        end(plan, random, cuts=0.9),
    ]


def twice(plan: Plan, random: Random, device: int) -> list[Step]:
    """The service is killed in a purge, perhaps after its record could not be synced; it is purged again."""
    failing = Step("syncs", (1, "/both"))
    return [
        _publish(random, device, "both", 1)._replace(wait=1.5),
        Step("pause", (0,)),
        *([failing] if random.random() < 0.5 else []),
        Step("kill", (random.randrange(12), "calls of the system later")),
        Step("purge", (), 0.05),
        Step("purge", (), random.choice((0.02, 0.1))),
        Step("cut" if plan.cuts else "kill", (random.random() * 0.05, "s later"), 0.3),
        Step("pause", (0,)),
    ]


def stepped(plan: Plan, random: Random, device: int) -> list[Step]:
    """The wall clock is set; that is noted, and the power goes: no message is older for it."""
    return [
        Step("clock", (random.choice((-1, 1)) * 86_400 * 400,)),
        Step("pause", (15,)),
        Step("publish", (device, 5, "aged", 1), 1.7),
        Step("cut" if plan.cuts else "kill", (0.0, "s later"), 0.1),
        Step("pause", (0,)),
    ]


def calm(plan: Plan, random: Random, device: int) -> list[Step]:
    """Much is published during slow syncs in the background; long after, the power goes."""
    family = random.choice(("plain", "plain", "ring", "aged"))
    return [
        Step("slow", (random.choice((0.05, 0.2)),)),
        *[
            Step("publish", (n % 3, random.choice((5, 20)), family, 1), random.random() * 0.15)
            for n in range(device, device + 14)
        ],
        Step("slow", (0,)),
        Step("pause", (4,)),
        end(plan, random, cuts=0.9),
    ]


def failed(plan: Plan, random: Random, device: int) -> list[Step]:
    """A sync in the background fails; nothing else is published, and long after, the power goes."""
    family = random.choice(("plain", "ring", "aged"))
    return [
        Step("pause", (2,)),
        Step("publish", (device, random.choice((5, 20)), family, 1), random.choice((0.01, 0.05))),
        Step("syncs", (1, f"/{family}"), 3.0),
        end(plan, random, cuts=0.9),
    ]


def soon(plan: Plan, random: Random, device: int) -> list[Step]:
    """The power goes soon after a start."""
    what = "cut" if plan.cuts else "kill"
    when = random.choice(((random.choice((20, 60, 200)), "calls of the system later"), (0.3, "s later")))
    return [
        _publish(random, device, "live"),
        Step("pause", (3,)),
        Step("stop", (), 0.01),
        Step(what, when, 0.4),
    ]


def snapshot(plan: Plan, random: Random, device: int) -> list[Step]:
    """The journal's snapshot is written while a slow disk commits messages, and the service ends."""
    family = random.choice(SYNCED)
    return [
        Step("slow", (random.choice((0.3, 0.6)),)),
        Step("refuse", (1, "sessions")),
        _publish(random, device, "live", 2)._replace(wait=0.7 + random.random() * 0.3),
        Step("publish", ((device + 1) % 3, 5, family, 2), random.random() * 0.3),
        end(plan, random),
        Step("publish", ((device + 1) % 3, 5, family, 2), 0.1),
        Step("slow", (0,)),
    ]


def behind(plan: Plan, random: Random, device: int) -> list[Step]:
    """A message waits behind a slow sync of its stream, the journal begins anew, and the service ends."""
    family, other = random.choice(SYNCED), (device + 1) % 3
    return [
        Step("lag", (random.choice((2, 4)), f"/{family}")),
        Step("publish", (other, 2, family, 1), random.choice((0.01, 0.1))),
        Step("publish", (device, 5, family, 2), random.choice((0.01, 0.1))),
        Step("refuse", (1, "sessions")),
        _publish(random, (device + 2) % 3, "live", 2)._replace(wait=1.0 + random.random() * 0.3),
        end(plan, random, cuts=0.2),
        Step("lag", (0, "")),
        _publish(random, device, family, 2),
    ]


def rotation(plan: Plan, random: Random, device: int) -> list[Step]:
    """The journal grows until it is replaced; much happens meanwhile, and the service ends."""
    return [
        *[Step("subscriber")] * random.randrange(2),
        Step("slow", (random.choice((0.1, 0.5)),)),
        Step("publish", ((device + 1) % 3, 5, random.choice(SYNCED), 2)),
        Step("churn", (device, 7), random.choice((0.0, 0.005, 0.02))),
        _publish(random, (device + 1) % 3, "live"),
        _publish(random, (device + 2) % 3, random.choice(("safe", "plain")), 2),
        Step("retain", ((device + 1) % 3, 1), random.choice((0.05, 0.5, 1.5))),
        end(plan, random, cuts=0.2),
        Step("slow", (0,)),
        _publish(random, (device + 2) % 3, "safe", 2),
    ]


def tail(plan: Plan, random: Random, device: int) -> list[Step]:
    """What no sync has covered is sent; the export starts over, and the power takes the tail."""
    family = random.choice(("plain", "plain", "ring"))
    plan.sync_interval, plan.cuts = random.choice((plan.sync_interval, 5000, 5000)), True
    return [
        Step("publish", (device, 80, family, 1)),
        Step("pause", (2,)),
        _publish(random, device, family, 1)._replace(wait=plan.linger / 1000 + random.choice((0.1, 0.15))),
        Step("link", (True,)),
        Step("redefine", (family, random.choice((0.0, 0.5))), random.choice((0.15, 0.25))),
        Step("cut", (random.random() * 0.05, "s later"), 0.3),
        _publish(random, device, family, 1)._replace(wait=0.2),
        Step("link", (False,)),
    ]


def over(plan: Plan, random: Random, device: int) -> list[Step]:
    """An export starts over, while the stream frees what was exported and has little room."""
    before = random.choice(([Step("link", (True,))], [Step("pause", (1,))], [], []))
    return [
        Step("publish", (device, 200, "kin", 1), random.choice((0.03, 0.1, 0.3, 0.6))),
        *before,
        random.choice((Step("shrink", (0.0,)), Step("shrink", (0.5,)), Step("redefine", ("kin", 0.0)))),
        Step("publish", ((device + 1) % 3, 80, "kin", 1), 0.2),
        *([end(plan, random)] if random.random() < 0.5 else []),
        Step("link", (False,)),
    ]


def backlog(plan: Plan, random: Random, device: int) -> list[Step]:
    """The link was down for long: what has gathered goes out while requests fail."""
    family = random.choice(("kin", "kin", "safe", "ring"))
    return [
        Step("link", (True,)),
        Step("publish", (device, 300, family, 1)),
        Step("publish", ((device + 1) % 3, 300, family, 1), 0.4),
        *([Step("publish", (device, 20, "ring", 1), 0.1)] if random.random() < 0.5 else []),
        Step("faults", (random.choice((0.02, 0.1)),)),
        Step("link", (False,), random.random()),
        *(
            [Step("worker", (random.choice((3, 8, 20)), "calls of the system later"), 1.0)][
                : random.randrange(2)
            ]
        ),
        Step("faults", (0.0,), 0.3),
    ]


def dead(plan: Plan, random: Random, device: int) -> list[Step]:
    """Records are rejected while the dead letter stream is slow or fails, and the worker ends."""
    return [
        Step("slow", (random.choice((0, 0.5, 3)),)),
        Step("publish", (device, 80, "kin", 1), random.random() * 0.5),
        Step(random.choice(("syncs", "refuse")), (random.choice((1, 2, 3)), "/dead")),
        Step("worker", (random.choice((0, 3, 8)), "calls of the system later"), random.random() * 3),
        Step("syncs", (random.choice((2, 3)), "/dead"), 1.0),
        Step("slow", (0,)),
        Step("drain"),
    ]


def labour(plan: Plan, random: Random, device: int) -> list[Step]:
    """Workers are busy when the disk fails, or one of them goes, and the gateway ends."""
    failing = Step(
        random.choice(("syncs", "refuse")), (random.choice((1, 2, 4)), random.choice(PLACES_OF_WORK))
    )
    return [
        Step("publish", (device, random.choice((5, 20, 40)), "work", 1), random.choice((0.1, 0.5, 1.5))),
        random.choice((failing, Step("hire", (random.randrange(2),), 0.1), Step("pause", (1,)))),
        Step("pause", (random.choice((0, 1)),), random.random()),
        end(plan, random, cuts=0.5),
        _publish(random, device, "work"),
        Step("pause", (3,)),
    ]


def shared(plan: Plan, random: Random, device: int) -> list[Step]:
    """A member of a shared subscription goes with messages that it has not acknowledged, or for good."""
    who = random.randrange(2)
    gone = Step("member", (who,), random.choice((0.0, 0.002, 0.05)))
    some = Step("publish", (device, 20, "share", random.choice((1, 1, 2))), random.choice((0.0, 0.002, 0.05)))
    ended = [end(plan, random)] if random.random() < 0.5 else []
    return [
        *([some, gone] if random.random() < 0.5 else [gone, some]),
        *ended,
        _publish(random, (device + 1) % 3, "share"),
        Step("pause", (random.choice((1, 7)),)),
        *([end(plan, random)] if random.random() < 0.5 else []),
        gone,
    ]


def topical(plan: Plan, random: Random, device: int) -> list[Step]:
    """Streams with several limits at once take more than these allow, while commits fail."""
    failing = Step(random.choice(("syncs", "refuse")), (random.choice((1, 2, 3)), "/few"))
    return [
        Step("publish", (device, 120, "few", 1), random.choice(SOON)),
        failing,
        Step("publish", ((device + 1) % 3, 120, "few", random.choice((1, 2))), 0.2),
        *([end(plan, random)] if random.random() < 0.5 else []),
        Step("publish", (device, 20, "few", 1), 0.2),
        Step("pause", (1,)),
    ]


def flood(plan: Plan, random: Random, device: int) -> list[Step]:
    """A subscriber is too slow, goes, and comes back for what came meanwhile; perhaps that happens again."""
    slow = [
        Step("stall", (True,)),
        Step("flood", (device, random.choice((40, 60))), 0.1),
        Step("slowly", (), 0.02),
    ]
    return [
        *(step for _ in range(random.randrange(3)) for step in (*slow, Step("slowly", (), 0.1))),
        *slow,
        _publish(random, device, "flood", 1),
        *([end(plan, random)] if random.random() < 0.3 else []),
        Step("slowly", (), 0.1),
    ]


def withdrawn(plan: Plan, random: Random, device: int) -> list[Step]:
    """A client with a will goes, or is connected, when its password changes."""
    gone = [Step("leave", (device, False), 0.1)] if random.random() < 0.5 else []
    ended = [end(plan, random)] if random.random() < 0.3 else []
    return [Step("come", (device, False), 0.1), *gone, Step("passwords", (device,), 0.1), *ended,
            Step("pause", (2,)), Step("come", (device, False), 0.1)]  # fmt: skip


def copy(plan: Plan, random: Random, device: int) -> list[Step]:
    """An old copy of the data directory comes back, and uploads what was uploaded otherwise."""
    some = [
        Step("publish", (n % 3, 1, "safe", 1), 0.6) for n in range(device, device + random.choice((2, 5)))
    ]
    others = [Step("publish", (n % 3, 1, "safe", 1), 0.6) for n in range(device, device + 3)]
    lost = [Step("faults", (0.1,))] if random.random() < 0.5 else []
    return [Step("backup"), *some, Step("restore", (), 0.5), *lost, *others, Step("faults", (0.0,))]


def copied(plan: Plan, random: Random, device: int) -> list[Step]:
    """An old copy comes back, and the link breaks while it uploads other messages under the same numbers."""
    plan.batch, plan.linger = 100_000, random.choice((100, 400))
    many = Step("publish", (device, 120, "safe", 1), 1.2)
    return [
        Step("pause", (2,)),
        Step("backup"),
        many,
        Step("restore", (), 0.5),
        Step("breaks", (random.randrange(2), "s3")),
        many._replace(wait=1.0),
        Step("breaks", (random.randrange(2), "s3"), 0.5),
        Step("link", (False,), 1.0),
    ]


def rights(plan: Plan, random: Random, device: int) -> list[Step]:
    """What a client may not do it may not do after a reload, a start, or a new connection either."""
    change = random.choice((Step("update"), Step("passwords", (device,)), Step("revoke", (device, "plain"))))
    tries = [Step("attempt", (random.choice(TRIED),), 0.05) for _ in range(3)]
    return [tries[0], change._replace(wait=0.1), *tries[1:]]


def room(plan: Plan, random: Random, device: int) -> list[Step]:
    """Appends to a stream with limits fail, and it has as much room as before."""
    failing = Step(random.choice(("syncs", "refuse")), (random.choice((2, 3, 4)), "/exact"))
    return [Step("fill", (0,), 0.05), failing, Step("fill", (random.choice((3, 12)),), 0.2), Step("room")]


def hoard(plan: Plan, random: Random, device: int) -> list[Step]:
    """More retained messages than the limit allows."""
    return [Step("hoard", (device, random.choice((5, 15, 30))), random.choice(SOON)),
            *([end(plan, random)] if random.random() < 0.5 else [])]  # fmt: skip


def missing(plan: Plan, random: Random, device: int) -> list[Step]:
    """A plugin cannot be loaded at a start, and can at the next."""
    return [
        Step("publish", (device, 20, "kin", 1), 0.5),
        Step("pause", (4,)),
        Step("plugin", (True,)),
        Step("stop", (), 1.0),
        _publish(random, device, "kin", 1),
        Step("pause", (3,)),
        Step("plugin", (False,)),
        Step("stop", (), 1.0),
    ]


def lake(plan: Plan, random: Random, device: int) -> list[Step]:
    """Objects are harmed and taken, come again in other objects, and old ones are deleted."""
    some = [Step("publish", (device, 20, random.choice(("safe", "plain")), 1), 0.6) for _ in range(2)]
    harm = Step("harm", (random.choice(("delete", "damage", "tear")),))
    return [*some, harm, Step("ingest"), Step("redefine", ("safe", 0.0), 0.5), Step("ingest"), Step("prune"),
            some[0], Step("ingest")]  # fmt: skip


TRIED = (
    "createMessageStream", "updateMessageStream", "deleteMessageStream", "purgeMessageStream",
    "describeMessageStream", "readMessages", "appendMessage", "appendMessages", "fetchMessages",
    "ackMessages", "listStreams", "PUBLISH", "SUBSCRIBE",
)  # fmt: skip
SCENES: dict[Scene, float] = {
    release: 2, half: 2, back: 2, again: 2, calm: 1.5, purged: 1, twice: 1, stepped: 1, failed: 1, soon: 1,
    snapshot: 1, behind: 1, rotation: 2, tail: 1.5, over: 2,
    backlog: 2, dead: 1.5, flood: 1.5, withdrawn: 1.5, rights: 1.5, hoard: 1, room: 1,
    labour: 2.5, shared: 2, topical: 1, missing: 1, lake: 2,
}  # fmt: skip
