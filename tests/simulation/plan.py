"""What happens in a world: drawn from its seed before it begins, so that steps can be left out.

A step is what is done, with its arguments, and how long the world waits after it. `words` says it as a person
would.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

DEVICES = 3
FAMILIES = ("safe", "plain", "both", "ring", "memory", "kin", "live", "aged")


class Step(NamedTuple):
    """One step; `wait` in seconds after it."""

    do: str
    arguments: tuple[Any, ...]
    wait: float

    def words(self) -> str:
        text = WORDS[self.do]
        return text.format(*self.arguments)


WORDS = {
    "publish": "device {0} publishes {1} messages on {2} with QoS {3}",
    "append": "client asks to append {0} messages with ids to the stream ids, again after a lost answer: {1}",
    "drop": "the connection of device {0} breaks",
    "leave": "device {0} goes away (with DISCONNECT: {1})",
    "come": "device {0} comes back",
    "subscriber": "the subscriber goes away or comes back",
    "kill": "the service is killed {0} {1}",
    "cut": "the power is cut {0} {1}",
    "stop": "the service is stopped, and started",
    "worker": "the export worker is killed {0} {1}",
    "link": "the link to the cloud is down: {0}",
    "faults": "{0:.0%} of the requests to the cloud fail, of each kind",
    "late": "a request that was under way arrives",
    "syncs": "the next {0} syncs fail (of files with '{1}' in their path)",
    "refuse": "the disk has no room for the next {0} writes (to files with '{1}' in their path)",
    "lie": "syncs do nothing: {0}",
    "full": "the disk is full: {0}",
    "backup": "the data directory is copied",
    "restore": "the service is killed, and its data directory is what was copied",
    "clock": "the wall clock jumps by {0:.0f} s",
    "revoke": "a reload takes the rights of device {0} on {1}, or gives them back",
    "purge": "a client purges the stream both",
    "drain": "a client purges what it has read of the dead letter stream",
    "repeat": "client asks again to append {0} messages that were answered long ago",
    "off": "the service ends ({1}), and nothing happens for {0:.0f} s",
    "recreate": "a client deletes the stream fresh, and creates it",
    "ntp": "the wall clock is set right",
    "pause": "nothing happens for {0:.0f} s, and somebody looks",
    "span": "something begins whose time is limited ({0}), {1} after {2:.0%} of it, and a look at {3:.0%}",
    "room": "the disk works, and a client fills the stream exact until it takes no more",
    "retain": "device {0} publishes {1} retained messages",
    "fill": "a client fills the stream exact with {0} messages, or purges it",
    "update": "a reload changes the limits of the stream ring, and an export",
    "passwords": "a reload changes the password of device {0}",
    "ingest": "an ingest run",
    "harm": "somebody harms an object: {0}",
}


@dataclass
class Plan:
    """A world's settings and steps."""

    seed: int
    sync_interval: int  # ms
    strict: bool
    segment: int  # bytes
    linger: int  # ms, of exports
    batch: int  # bytes, of exports
    ring: int  # messages
    threads: int
    window: int  # s, in which the stream ids knows an id
    v5: list[bool]
    lying: bool
    restored: bool  # whether an old copy of the data directory comes back
    cuts: bool  # whether the power is ever cut: without, more is promised
    ntp: bool  # whether the wall clock is right from the start of each boot, and known to be
    steps: list[Step] = field(default_factory=list)

    @property
    def wanted(self) -> dict[str, list[str]]:
        """The `topics` of the exports of streams to S3; a stream that is not in it exports all."""
        few = {"plain": ["plain/both/#", "plain/1"], "ring": ["ring/0"]}
        return {name: topics for n, (name, topics) in enumerate(few.items()) if self.seed % 4 in (n, 3)}

    @property
    def newest_first(self) -> bool:
        """Whether exports send the newest messages first."""
        return self.seed % 3 == 1

    @property
    def age(self) -> int:
        """Seconds that messages of the stream aged live, by a limit or by a time to live (whole segments)."""
        return 4 if self.seed % 2 else 60


def draw(seed: int, steps: int = 60) -> Plan:
    """The plan of a seed."""
    random = Random(f"plan {seed}")
    plan = Plan(
        seed=seed,
        sync_interval=random.choice((200, 1000)),
        strict=random.random() < 0.7,
        segment=random.choice((1024, 4096, 65536)),
        linger=random.choice((1, 100, 400)),
        batch=random.choice((500, 4000, 100_000)),
        ring=random.choice((5, 40, 200)),
        threads=random.choice((1, 2, 5)),
        window=random.choice((4, 20, 600)),
        v5=[random.random() < 0.5 for _ in range(DEVICES)],
        lying=random.random() < 0.05,
        restored=random.random() < 0.05,
        cuts=random.random() < 0.65,
        ntp=random.random() < 0.7,
    )
    # A world has a few kinds of trouble, so that each happens often in some worlds.
    troubles = [name for name in TROUBLES if random.random() < 0.4]
    weights = [TROUBLES[name] for name in troubles]
    for _ in range(steps):
        wait = random.choice((0.0, random.random() * 0.01, random.random() * 0.2, random.random() * 1.5))
        if random.random() < 0.55 or not troubles:
            plan.steps.append(_publish(random, wait))
        else:
            trouble = _trouble(random, random.choices(troubles, weights)[0], wait, plan)
            plan.steps.append(trouble)
            if trouble.do in ("syncs", "refuse"):
                plan.steps.append(_use(random, trouble.arguments[1], wait))
                if trouble.arguments[1] == "exact":
                    plan.steps.append(Step("room", (), wait))
        if random.random() < 0.16:
            plan.steps.append(_crash(random, plan))
    if plan.restored:
        first, second = sorted(random.sample(range(len(plan.steps)), 2))
        plan.steps.insert(second, Step("restore", (), 0.3))
        plan.steps.insert(first, Step("backup", (), 0.0))
    return plan


TROUBLES = {
    "drop": 4, "leave": 2, "subscriber": 2, "stop": 1, "worker": 3, "link": 2, "faults": 2, "late": 2,
    "syncs": 3, "refuse": 2, "full": 1, "clock": 1, "revoke": 2, "update": 2, "passwords": 1, "append": 6,
    "ingest": 2, "purge": 2, "fill": 3, "harm": 0.5, "lie": 1, "drain": 2, "repeat": 3, "off": 3, "pause": 3,
    "retain": 3, "room": 3, "span": 4, "recreate": 2, "ntp": 1,
}  # fmt: skip


def _publish(random: Random, wait: float) -> Step:
    number = random.choice((1, 2, 5, 20, 80, 300))
    family = random.choices(FAMILIES, (6, 5, 3, 3, 1, 3, 2, 1))[0]
    return Step(
        "publish", (random.randrange(DEVICES), number, family, random.choice((0, 1, 1, 1, 2, 2))), wait
    )


def _use(random: Random, stream: str, wait: float) -> Step:
    """A step that writes to a stream."""
    match stream:
        case "exact":
            return Step("fill", (random.choice((3, 12)),), wait)
        case "ids":
            return Step("append", (random.choice((1, 3, 10)), random.random() < 0.5), wait)
        case _:
            step = _publish(random, wait)
            family = stream if stream in FAMILIES else step.arguments[2]
            return step._replace(arguments=(*step.arguments[:2], family, step.arguments[3]))


def _crash(random: Random, plan: Plan) -> Step:
    what = random.choice(("kill", "kill", "cut") if plan.cuts else ("kill",))
    if random.random() < 0.6:
        return Step(what, (random.choice((0, 1, 2, 3, 5, 9, 20, 60)), "calls of the system later"), 0.3)
    return Step(what, (round(random.random() * random.choice((0.002, 0.05, 0.5)), 6), "s later"), 0.3)


def _trouble(random: Random, what: str, wait: float, plan: Plan) -> Step:
    device = random.randrange(DEVICES)
    match what:
        case "leave":
            return Step(random.choice(("leave", "come")), (device, random.random() < 0.5), wait)
        case "drop" | "passwords":
            return Step(what, (device,), wait)
        case "revoke":
            return Step(what, (device, random.choice(("safe", "plain", "live"))), wait)
        case "worker":
            return Step(what, (random.choice((0, 1, 3, 8, 20)), "calls of the system later"), wait)
        case "link" | "full":
            return Step(what, (random.random() < 0.5,), wait)
        case "lie":
            return Step(what, (plan.lying and random.random() < 0.7,), wait)
        case "faults":
            return Step(what, (random.choice((0.0, 0.02, 0.1)),), wait)
        case "syncs" | "refuse":
            where = random.choice(("", "", "sessions", "exact", "exact", "ids", *FAMILIES))
            return Step(what, (random.choice((1, 1, 2, 3, 4)), where), 0.0)
        case "clock":
            return Step(what, (random.choice((-1, 1)) * random.choice((1, 60, 86_400 * 400)),), wait)
        case "append":
            return Step(what, (random.choice((1, 3, 10)), random.random() < 0.5), wait)
        case "repeat":
            return Step(what, (random.choice((1, 3)),), wait)
        case "retain":
            return Step(what, (device, random.choice((1, 3))), wait)
        case "off":
            seconds = random.choice((0.5, 2, 3, 30, 50, 100, 3000))
            return Step(what, (seconds, random.choice(("stop", "kill"))), wait)
        case "span":
            limited, how = random.choice(("ids", "aged", "session")), random.choice(("stop", "kill"))
            return Step(what, (limited, how, 0.1 + 0.8 * random.random(), random.choice((0.9, 1.0))), wait)
        case "pause":
            return Step(what, (random.choice((2, 5, 20)),), wait)
        case "fill":
            return Step(what, (random.choice((0, 3, 12)),), wait)
        case "harm":
            return Step(what, (random.choice(("delete", "damage", "tear")),), wait)
        case _:
            return Step(what, (), wait)
