"""Scenes of the lake: runs of the ingest job beside what harms its objects, and beside operators.

They come in addition to the other `scenes` of a world. Between any two steps of a run, the world goes on
(`lake`).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from .steps import Step

if TYPE_CHECKING:
    from .plan import Plan

Scene = Callable[["Plan", Random, int], list[Step]]
UPLOADED = ("safe", "safe", "plain", "ring")  # streams
SHARE = 0.6  # of the worlds have such a scene
ASKED = 0.5  # of these scenes have a streaming query beside the runs
HARM = ("delete", "delete", "damage", "tear")


def lake_scene(plan: Plan) -> list[Step]:
    """One that is drawn, or none."""
    random = Random(f"lake scene {plan.seed}")
    if random.random() > SHARE:
        return []
    made = random.choices(list(SCENES), list(SCENES.values()))[0](plan, random, random.randrange(3))
    if random.random() < ASKED:
        made = [one for step in made for one in ([step, Step("query")] if random.random() < 0.4 else [step])]
    return [Step("repair"), *made]


def _uploaded(random: Random, device: int) -> Step:
    """Messages, and the time in which they are uploaded."""
    return Step("publish", (device, random.choice((2, 20)), random.choice(UPLOADED), 1), 0.6)


def _harm(random: Random) -> Step:
    return Step("harm", (random.choice(HARM),))


def first(plan: Plan, random: Random, device: int) -> list[Step]:
    """Objects are harmed before any run has seen them."""
    return [_uploaded(random, device), _uploaded(random, device), _harm(random), _harm(random),
            Step("ingest"), _uploaded(random, device), Step("ingest")]  # fmt: skip


def again(plan: Plan, random: Random, device: int) -> list[Step]:
    """What was harmed comes again in other objects, and somebody tends table and prefix."""
    family = random.choice(("safe", "safe", "plain"))
    return [
        Step("publish", (device, 20, family, 1), 0.6),
        *[_harm(random) for _ in range(random.choice((1, 2)))],
        Step("ingest"),
        Step("redefine", (family, 0.0), 0.6),
        Step("ingest"),
        Step("prune"),
        Step("prune"),
        _uploaded(random, device),
        Step("ingest"),
    ]


def busy(plan: Plan, random: Random, device: int) -> list[Step]:
    """Runs follow each other while messages come, and somebody tends the table."""
    steps = []
    for number in range(random.choice((2, 4))):
        more = [Step("prune")] if random.random() < 0.3 else []
        steps += [_uploaded(random, (device + number) % 3), *more, Step("ingest")]
    return steps


SCENES: dict[Scene, float] = {first: 1, again: 2, busy: 3}
