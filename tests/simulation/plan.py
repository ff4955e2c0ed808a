"""What happens in a world: drawn from its seed before it begins, so that steps can be left out.

A step is what is done, with its arguments, and how long the world waits after it. Most are drawn one by one;
some come as scenes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from .deck import dealt
from .lake_scenes import lake_scene
from .scenes import TRIED, copied, copy
from .shared_scenes import shared_scene
from .steps import Step

DEVICES = 3
FAMILIES = ("safe", "plain", "both", "ring", "memory", "kin", "live", "aged", "work", "few", "share")


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
    open: bool  # whether there are no rules: clients of other machines may do what rules do not speak of
    sink: str  # the exporter of the stream kin
    keyed: bool  # whether Kinesis gets a partition key, and so an order
    replaced: bool  # whether the gateway's disk dies in the end
    newest_first: bool  # whether exports send the newest messages first
    tight: bool  # whether the broker keeps little for a subscriber, and few retained messages
    steps: list[Step] = field(default_factory=list)

    @property
    def wanted(self) -> dict[str, list[str]]:
        """The `topics` of the exports of streams to S3; a stream that is not in it exports all."""
        few = {"plain": ["plain/both/#", "plain/1"], "ring": ["ring/0"]}
        return {name: topics for n, (name, topics) in enumerate(few.items()) if self.seed % 4 in (n, 3)}

    @property
    def frugal(self) -> int:
        """The device that always takes the lowest packet id, as small clients do."""
        return -self.seed % DEVICES

    @property
    def iceberg(self) -> bool:
        """Whether the table is one of Iceberg."""
        return self.seed % 2 == 1

    @property
    def encrypted(self) -> bool:
        """Whether the streams that sync before they acknowledge, and `both`, are encrypted."""
        return self.seed % 5 == 1

    @property
    def deliveries(self) -> int:
        """How often a message is delivered to workers at most; 0: as often as it takes."""
        return (0, 2, 4)[self.seed % 3]

    @property
    def age(self) -> int:
        """Seconds that messages of the stream aged live, by a limit or by a time to live (whole segments)."""
        return 4 if self.seed % 2 else 60


def draw(seed: int, steps: int = 30, scenes: int = 10) -> Plan:
    """The plan of a seed."""
    random = Random(f"plan {seed}")
    plan = Plan(
        seed=seed,
        sync_interval=random.choice((200, 1000, 1000)),
        strict=random.random() < 0.7,
        segment=random.choice((1024, 4096, 65536)),
        linger=random.choice((1, 100, 400)),
        batch=random.choice((500, 4000, 100_000)),
        ring=random.choice((5, 40, 200)),
        threads=random.choice((1, 2, 5)),
        window=random.choice((4, 20, 600)),
        v5=[random.random() < 0.5 for _ in range(DEVICES)],
        lying=random.random() < 0.05,
        restored=random.random() < 0.08,
        cuts=random.random() < 0.65,
        ntp=random.random() < 0.7,
        open=random.random() < 0.2,
        sink=random.choice(("kinesis", "kinesis", "firehose")),
        keyed=random.random() < 0.5,
        newest_first=seed % 3 == 1,
        tight=random.random() < 0.6,
        replaced=random.random() < 0.12,
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
        if random.random() < 0.35:
            plan.steps.append(_crash(random, plan))
    for number, scene in enumerate(dealt(seed, scenes)):
        at = random.randrange(len(plan.steps) + 1)
        if plan.restored and number < 4:
            scene = (copy, copied)[number % 2]  # little is promised afterwards
        plan.steps[at:at] = [Step("repair"), *scene(plan, random, random.randrange(DEVICES))]
    for more in (lake_scene(plan), shared_scene(plan)):
        at = random.randrange(len(plan.steps) + 1)
        plan.steps[at:at] = more
    return plan


TROUBLES = {
    "drop": 4, "leave": 2, "subscriber": 2, "stop": 1, "worker": 3, "link": 2, "faults": 2, "late": 2,
    "syncs": 3, "refuse": 2, "full": 1, "clock": 1, "revoke": 2, "update": 2, "passwords": 1, "append": 6,
    "ingest": 1, "purge": 2, "fill": 3, "harm": 0.5, "lie": 1, "drain": 2, "repeat": 3, "off": 3, "pause": 3,
    "retain": 3, "room": 3, "span": 4, "recreate": 2, "ntp": 1, "slow": 1, "attempt": 1, "prune": 0.5,
    "redefine": 0.5, "hire": 1.5, "member": 1.5,
}  # fmt: skip


def _publish(random: Random, wait: float) -> Step:
    number = random.choice((1, 2, 5, 20, 120, 500))
    family = random.choices(FAMILIES, (6, 5, 3, 3, 1, 3, 2, 1, 2, 1, 1))[0]
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
            where = random.choice(("", "", "sessions", "exact", "exact", "ids", "consumers", *FAMILIES))
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
        case "hire" | "member":
            return Step(what, (random.randrange(2),), wait)
        case "fill":
            return Step(what, (random.choice((0, 3, 12)),), wait)
        case "slow":
            return Step(what, (random.choice((0, 0.05, 0.5)),), wait)
        case "attempt":
            return Step(what, (random.choice(TRIED),), wait)
        case "redefine":
            return Step(what, (random.choice(("safe", "plain", "ring")), random.random()), wait)
        case "harm":
            return Step(what, (random.choice(("delete", "damage", "tear")),), wait)
        case _:
            return Step(what, (), wait)
