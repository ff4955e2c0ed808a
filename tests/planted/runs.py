"""Runs the tests, or the simulation, on a copy of the project with one defect.

The copy has the files that git knows, as they are in the work tree. It comes first on the path of every
process that a run starts: the service, its worker, Spark's workers. The virtual environment is shared.

A test counts as having found a defect if it fails twice with the defect and passes without it.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from .defects import ROOT, Defect

# As many worlds as one processor runs in two minutes, so that the result is that of a quiet machine.
WORLDS = 75
SIMULATION = ("-m", "tests.simulation", "--worlds", str(WORLDS), "--shrink", "0", "--seed")  # and the seed
SIMULATION_LIMIT = 3600.0  # seconds: it ends by itself, unless the defect makes it hang
TESTS_LIMIT = 1800.0  # seconds, for all test files of a room
FLAKY = 5  # tests that fail for other reasons, until a run is given up
NICE = 10
OPTIONS = ("-q", "-m", "not slow", "-p", "no:cacheprovider")  # of pytest

# Where the tests are that can reach a room, without the slow ones.
REACH = {
    "store": (
        "tests/streams",
        "tests/test_manager.py",
        "tests/mqtt/test_exactly_once.py",
        "tests/mqtt/test_crash.py",
        "tests/export/test_retention.py",
    ),
    "broker": ("tests/mqtt", "tests/operations"),
    "export": ("tests/export", "tests/test_manager.py"),
    "ingest": ("tests/ingest",),
    "consumers": ("tests/consumers",),
    "frontends": ("tests/http", "tests/firehose", "tests/operations"),
}


REACHED = Path(__file__).with_name("reach.json")


_processors: SimpleQueue[int] = SimpleQueue()
for _each in sorted(os.sched_getaffinity(0)):
    _processors.put(_each)


@dataclass(frozen=True, slots=True)
class Found:
    """What a run has found: `by` is a test or what the simulation said, empty if nothing was found."""

    by: str
    seconds: float


@contextmanager
def tree(defect: Defect | None) -> Iterator[Path]:
    """A copy of the project with the defect, or without any."""
    with tempfile.TemporaryDirectory(prefix="streambridge-planted-") as place:
        copy = Path(place).resolve() / "tree"
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            if not os.path.lexists(ROOT / name):
                continue  # deleted, and not committed yet
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        if defect is not None:
            (copy / defect.file).write_text(defect.plant())
        yield copy


def by_tests(defect: Defect) -> Found:
    """Run the tests that can reach a defect, the likeliest first, until one finds it."""
    began = time.monotonic()
    flaky: list[str] = []
    files = likeliest_first(defect)
    if not files:
        return Found("", 0)  # no test reaches it
    with tree(defect) as copy, tree(None) as clean:
        while len(flaky) < FLAKY:
            failed = first_failed(copy, files, flaky)
            if not failed:
                break
            took = time.monotonic() - began
            if first_failed(copy, [failed]) and not first_failed(clean, [failed]):
                return Found(failed, took)
            flaky.append(failed)
    return Found("", time.monotonic() - began)


def by_simulation(defect: Defect, seed: int) -> Found:
    """Run the simulation on a defect."""
    with tree(defect) as copy:
        return simulate(copy, seed)


def simulate(place: Path, seed: int) -> Found:
    """Run the simulation in a tree; what counts of what it says is the error, at its end."""
    processor = _processors.get()  # it uses one of those that it may use: each gets its own
    began = time.monotonic()
    try:
        command = ["taskset", "--cpu-list", str(processor), sys.executable, *SIMULATION, str(seed)]
        status, said = run(command, place, SIMULATION_LIMIT)
    finally:
        _processors.put(processor)
    lines = [line for line in said.splitlines() if line.strip()]
    error = next((line for line in reversed(lines) if "Error" in line), (lines or ["it failed"])[-1])
    return Found(error.strip()[:300] if status else "", time.monotonic() - began)


def reached() -> dict[str, list[str]]:
    """The test files that reach the line of each defect, by its name, as `reach` has measured it.

    `*` has all files that were measured: whether later ones reach anything is not known.
    """
    return json.loads(REACHED.read_text()) if REACHED.exists() else {}


def likeliest_first(defect: Defect) -> list[str]:
    """The test files that can reach a defect; those that share its rarer words come first."""
    files = test_files(defect.room)
    measured = reached()
    if defect.name in measured:
        others = set(measured["*"]) - set(measured[defect.name])
        files = {name: words for name, words in files.items() if name not in others}
    common = Counter(word for words in files.values() for word in words)
    mine = _words(f"{defect.name} {defect.harm} {Path(defect.file).stem} {defect.old}")

    def weight(file: str) -> float:
        shared = sum(math.log(len(files) / common[word]) for word in mine & files[file])
        return shared / math.sqrt(len(files[file]))  # a long file shares words with everything

    return sorted(files, key=weight, reverse=True)


@cache
def test_files(room: str) -> dict[str, set[str]]:
    """The test files that can reach a room, with their words."""
    places = [ROOT / place for place in REACH[room]]
    found = [file for place in places for file in (sorted(place.rglob("test_*.py")) or [place])]
    return {str(file.relative_to(ROOT)): _words(file.read_text()) for file in found}


def _words(text: str) -> set[str]:
    return set(re.findall("[a-z]{4,}", text.lower()))


def first_failed(
    place: Path, tests: Iterable[str], without: Iterable[str] = (), limit: float = TESTS_LIMIT
) -> str:
    """The first test that fails in a tree, as pytest names it without parameters; empty if none does.

    Raises RuntimeError if pytest fails and names none, also after `limit` seconds.
    """
    report = place / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-x", *OPTIONS, *tests]
    command += [f"--junitxml={report}"]
    status, said = run(command + [f"--deselect={name}" for name in without], place, limit)
    if status == 0:
        return ""
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                return _name_of(place, case.get("classname", ""), case.get("name", ""))
    raise RuntimeError(f"pytest ended with {status}, and names no test:\n{said[-2000:]}")


def _name_of(place: Path, outer: str, name: str) -> str:
    """A test as pytest takes it, without parameters; `outer` is its module and class, with dots."""
    parts = outer.split(".")
    end = next(n for n in range(len(parts), 0, -1) if Path(place, *parts[:n]).with_suffix(".py").exists())
    file = Path(*parts[:end]).with_suffix(".py")
    return "::".join([str(file), *parts[end:], name.partition("[")[0]])


def pytest(place: Path, tests: Iterable[str]) -> str:
    """Run tests in a tree to their end; returns what pytest says."""
    return run([sys.executable, "-m", "pytest", *OPTIONS, *tests], place, 2 * TESTS_LIMIT)[1]


def run(command: list[str], place: Path, limit: float) -> tuple[int, str]:
    """Run a command in a tree; a run that takes longer than `limit` seconds has failed."""
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        ["nice", "-n", str(NICE), *command],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        said, _ = process.communicate()
        return 124, f"{said}\nit took longer than {limit:.0f} s"
    except BaseException:
        os.killpg(process.pid, 9)
        raise
    return process.returncode, said
