"""Runs worlds one after the other, and makes the plan of one that fails smaller."""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from . import boundary
from . import kernel as kernels
from .boundary import CHILDREN, MACHINE
from .disk import REAL
from .kernel import Killed
from .plan import Plan, draw
from .world import World, prepare

clock = time.perf_counter


class Result(msgspec.Struct):
    """How a world ended."""

    error: str = ""
    story: list[str] = []
    crashes: int = 0
    acknowledged: int = 0
    trace: str = ""


def one(make: Callable[[], World]) -> Result:
    """Run one world, which `make` makes."""
    result = Result()
    world = None
    try:
        world = make()
        world.run()
    except (Exception, Killed) as error:
        result.error = f"{type(error).__name__}: {error}"
        if world is not None and world.checks.first:
            result.error = f"BrokenError: {world.checks.first}"
        result.trace = traceback.format_exc()
    finally:
        if world is not None:
            result.story, result.crashes = world.story, world.crashes
            result.acknowledged = world.acknowledged
            if world.process is not None:
                world.kernel.kill(world.process, -9)
        CHILDREN.clear()
        kernels.use(None)
        MACHINE.disk = None
    return result


def apart(make: Callable[[], World]) -> Result:
    """Run a world in a process of its own, so that what other worlds have left in memory cannot matter.

    The order of a set of objects depends on their addresses: `__main__` has them given alike.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            result = one(make)
            REAL["write"](writing, msgspec.msgpack.encode(result))
        finally:
            boundary.leave()
    REAL["close"](writing)
    with open(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return msgspec.msgpack.decode(data, type=Result) if data else Result("the process has ended")


def ready(place: Path) -> None:
    """Make this the directory of worlds, and import all that they need."""
    os.chdir(place)
    MACHINE.here = f"{Path.cwd()}/"
    prepare()


def _planned(plan: Plan) -> Callable[[], World]:
    return lambda: World(plan, Path())


def run(
    seed: int,
    seconds: float,
    place: Path,
    *,
    worlds: int | None = None,
    story: bool = False,
    patience: float | None = 60.0,
) -> int:
    """Run worlds from a seed on; returns 1 if one is broken.

    That ends the run, with a story that is made shorter for `patience` seconds; None goes on instead.
    """
    ready(place)
    one(_planned(draw(0)))  # what is imported and made once is there, then, in the child of each world
    boundary.real_collect()
    boundary.real_freeze()
    began, before = clock(), _processor()
    crashes = acknowledged = number = broken = 0
    print(f"seed {seed}", flush=True)
    while (number < worlds) if worlds is not None else (clock() - began < seconds):
        result = apart(_planned(draw(seed + number)))
        crashes, acknowledged = crashes + result.crashes, acknowledged + result.acknowledged
        if story:
            print("\n".join(result.story))
        if result.error:
            if patience is not None:
                report(seed + number, result, patience)
                return 1
            broken += 1
            print(f"seed {seed + number}: {result.error[-400:]}", flush=True)
        number += 1
    spent, used = clock() - began, _processor() - before
    each = [round(count * 60 / used) for count in (crashes, acknowledged)]
    print(
        f"{number} worlds, {crashes} crashes with a restart, {acknowledged} messages acknowledged in "
        f"{spent:.0f} s, {used:.0f} s of them on the processor: {each[0]} crashes and {each[1]} messages a "
        "minute of it"
    )
    return 1 if broken else 0


def _processor() -> float:
    """Seconds of processor time of this process and of the worlds that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def report(seed: int, result: Result, patience: float) -> None:
    """Print what is broken in a world, and the shortest story that still breaks it."""
    print(result.trace)
    print(f"seed {seed}: {result.error}", flush=True)
    plan = draw(seed)
    if not patience:
        return
    shorter = shrink(plan, result, patience)
    short = apart(_planned(shorter))
    print(f"\n{len(shorter.steps)} of its {len(plan.steps)} steps are enough:\n")
    print("\n".join(short.story))
    print(f"\n{short.error}\n\nthe same again: python -m tests.simulation --worlds 1 --seed {seed}")


def shrink(plan: Plan, result: Result, patience: float) -> Plan:
    """Leave out steps as long as the world is still broken in the same way, for at most so many seconds."""
    until = clock() + patience
    kind = _kind(result.error)
    size = len(plan.steps) // 2
    while size and clock() < until:
        at = 0
        while at < len(plan.steps) and clock() < until:
            fewer = replace(plan, steps=plan.steps[:at] + plan.steps[at + size :])
            if _kind(apart(_planned(fewer)).error) == kind:
                plan = fewer
            else:
                at += size
        size //= 2
    return plan


def _kind(error: str) -> str:
    """An error without its numbers and names."""
    return re.sub(r"[0-9]+|b'[^']*'", "", error)[:60]
