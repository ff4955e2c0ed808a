"""Goes through the states of a recording under a model, starts each and collects what is wrong."""

from __future__ import annotations

import contextlib
import itertools
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import uvloop

from . import check
from .check import Found, Promised, Run
from .filesystem import FileSystem, State, digest
from .record import Recording
from .trace import Call

FIRST = 3  # states that are tried at each point
TRIES = 200  # drawn states at one point of which most were met before


EXAMPLES = 20
WAYS = {
    "journal": (False, True),
    "upgrade": (True, True),
}  # whether the store is opened; whether clients talk


class Result(NamedTuple):
    """What came of it. `defects`: what was wrong first, and in how many states."""

    points: int  # at which a crash was tried
    states: int  # that differ
    judged: int  # points at which they were met
    defects: dict[str, int]
    examples: list[str]


class Moment(NamedTuple):
    """A call has an effect: it begins, or, for a sync, has returned."""

    line: int
    returned: bool
    call: Call


def moments(calls: list[Call]) -> list[Moment]:
    """All that changes what may be on the disk, or what was promised, in order."""
    found = []
    for call in calls:
        if call.name in ("fsync", "fdatasync"):
            found.append(Moment(call.end, True, call))
        else:
            found.append(Moment(call.begin, False, call))
    return sorted(found, key=lambda moment: (moment.line, moment.returned))


def explore(
    recording: Recording,
    model: str,
    number: int,
    seed: int,
    *,
    first: bool = False,
    service: bool = False,
    every: int = 1,
) -> Result:
    """Try about `number` states, of all points of the recording alike; the same ones for the same seed.

    At each point at least the first three of `FileSystem.states`. `first`: until one is wrong.
    `service`: the service itself is run on one of them. `every`: one point of so many is looked at.
    """
    before = logging.root.manager.disable
    logging.disable()  # what is repaired is logged, for each state
    try:
        draw = Random(f"{seed} {recording.area} {model}")
        return uvloop.run(_explore(recording, model, number, draw, first=first, service=service, every=every))
    finally:
        logging.disable(before)


async def _explore(
    recording: Recording, model: str, number: int, draw: Random, *, first: bool, service: bool, every: int
) -> Result:
    run = Run(recording)
    files, promised = FileSystem(recording.initial, model, at=recording.disk), Promised(run, model)
    steps = [moment for moment in moments(recording.calls) if _matters(files, moment.call)]
    trial = _Trial(run, promised)
    seen: set[bytes] = set()
    defects: dict[str, int] = {}
    examples: list[str] = []
    judged = 0
    served: State | None = None
    with tempfile.TemporaryDirectory(prefix="cs-", dir=_memory()) as place:
        trial.names = (Path(place) / str(n) for n in itertools.count())
        for at, moment in enumerate(steps, 1):
            if moment.returned:
                files.sync(moment.call)
            else:
                files.apply(moment.call)
                promised.apply(moment.call)
            if draw.randrange(every):
                continue
            for state in _some(files.states(draw), seen, number * at // len(steps)):
                judged += 1
                if draw.randrange(judged) == 0:  # each is as likely as any other to be the one
                    served = state
                if problems := await trial.problems(state):
                    defects[_kind(problems[0])] = defects.get(_kind(problems[0]), 0) + 1
                    if len(examples) < EXAMPLES:
                        examples.append(
                            f"{recording.area}, {model}, after line {moment.line} ({_text(moment)}): "
                            + "; ".join(problems)
                        )
                    if first:
                        return Result(at, len(seen), judged, defects, examples)
        if service and served is not None:
            for problem in check.serve(served, next(trial.names), run):
                defects[_kind(problem)] = defects.get(_kind(problem), 0) + 1
                examples.append(f"{recording.area}, {model}: {problem}")
    return Result(len(steps), len(seen), judged, defects, examples)


class _Trial:
    """Starts on states, each once, and judges them by what is promised now."""

    names: Iterator[Path]

    def __init__(self, run: Run, promised: Promised) -> None:
        self._run, self._promised = run, promised
        self._found: dict[object, Found] = {}
        self._starts, self._talks = WAYS.get(run.recording.area, (True, False))

    async def problems(self, state: State) -> list[str]:
        """What is wrong with a state."""
        problems: list[str] = []
        name, promised = digest(state), self._promised
        if self._starts:
            if name not in self._found:
                self._found[name] = await check.start(state, next(self.names), self._run, promised.model)
            problems += check.judge(self._found[name], promised)
        if self._talks:
            key = name, promised.under_way(), frozenset(promised.used)
            if key not in self._found:
                self._found[key] = await check.converse(state, next(self.names), promised)
            problems += check.judge_sessions(self._found[key], promised)
        return problems


def _matters(files: FileSystem, call: Call) -> bool:
    """Whether a call changes the disk, or what was promised."""
    if call.name == "send":
        return True
    if call.name == "open" and "O_CREAT" not in call.flags and "O_TRUNC" not in call.flags:
        return False
    return files.within(call.path) or "/told" in call.path


def _some(states: Iterator[State], seen: set[bytes], allowed: int) -> Iterator[State]:
    """The first ones, and then new ones as long as there may be more, and some are found."""
    vain = 0
    for turn, state in enumerate(states):
        name = digest(state)
        if turn >= FIRST and (len(seen) >= allowed or vain > TRIES):
            return
        if turn >= FIRST and name in seen:
            vain += 1
            continue
        seen.add(name)
        yield state


def _kind(problem: str) -> str:
    """A problem without its numbers."""
    return "".join("#" if letter.isdigit() else letter for letter in problem)[:160]


def _text(moment: Moment) -> str:
    call = moment.call
    return f"{call.name} {call.path or call.peer} {'returned' if moment.returned else ''}".strip()


def _memory() -> str | None:
    with contextlib.suppress(OSError):
        if Path("/dev/shm").is_dir():
            return "/dev/shm"
    return None
