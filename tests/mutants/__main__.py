"""Tries mutants, and prints those that no test sees, with a table of the packages.

python -m tests.mutants [--only bridge/streams] [--sample 50] [--seed N] [--jobs 1]
python -m tests.mutants --changed [--base REVISION]     mutants of the lines that changed since main
python -m tests.mutants --record [tests/streams ...]    note anew which tests reach what

A run notes each result in `build/mutants`. The same command goes on where it was stopped, as long as the file
of a mutant is the same. `equivalent.toml` has the survivors that no user could notice, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import re
import subprocess
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.planted import runs
from tests.planted.defects import ROOT

from . import operators
from .operators import Mutant
from .reached import PLACES, Reached, sources

RESULTS = ROOT / "build/mutants"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
MISSED = 100  # lines without a mutant, until the sample is as large as it gets
NEW = 8  # changed tests for one mutant
SECONDS = 30.0  # of tests for one mutant, as they were recorded
LIMIT = 45.0  # seconds for a run of them, besides thrice what was recorded


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant. `by` is the test that sees it; empty if it survived."""

    mutant: str
    package: str
    old: str
    new: str
    by: str
    tests: int  # that were tried
    seconds: float
    equivalent: str = ""  # the reason


def sample(lines: dict[str, set[int]], count: int, seed: int) -> Iterator[Mutant]:
    """Some mutants of these lines of files, by chance: each line is as likely as any other."""
    names = sorted(name for name in lines if lines[name])
    chance, missed = random.Random(seed), 0
    seen: set[tuple[str, int]] = set()
    while names and len(seen) < count and missed < MISSED:
        name = chance.choices(names, [len(lines[name]) for name in names])[0]
        chosen, code = chance.random(), (ROOT / name).read_text()
        numbers = [number for number, line in enumerate(operators.lines(code)) if line in lines[name]]
        number = numbers[int(chosen * len(numbers))] if numbers else -1
        mutant = operators.mutant(name, code, number) if numbers and (name, number) not in seen else None
        missed += mutant is None
        if mutant is not None:
            seen.add((name, number))
            yield mutant


def all_lines(only: str) -> dict[str, set[int]]:
    """All lines of the files whose path begins so."""
    files = [name for name in sources() if name.startswith(only)]
    return {name: set(range(1, (ROOT / name).read_text().count("\n") + 1)) for name in files}


def changed_lines(base: str, *places: str) -> dict[str, set[int]]:
    """The lines that differ from a revision, in the Python files of these places."""
    lines: dict[str, set[int]] = defaultdict(set)
    name = ""
    for line in _git("diff", "--unified=0", base, "--", *(f"{place}/*.py" for place in places)).splitlines():
        if line.startswith("+++ "):
            name = line.removeprefix("+++ b/")
        elif found := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            first, size = int(found[1]), int(found[2] or 1)
            lines[name] |= set(range(first, first + size))
    return {name: found for name, found in lines.items() if (ROOT / name).exists()}


def changed_tests(base: str) -> list[str]:
    """The tests that differ from a revision: the record may not know them."""
    return [
        f"{name}::{node.name}"
        for name, lines in changed_lines(base, "tests").items()
        if Path(name).name.startswith("test_")
        for node in ast.walk(ast.parse((ROOT / name).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        if lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    ]


class Trial:
    """Runs the tests of mutants, each job in a tree of its own."""

    def __init__(
        self, record: Reached, new: Iterable[str] = (), seconds: float = SECONDS, root: Path = ROOT
    ) -> None:
        self._record, self._seconds, self._root = record, seconds, root
        self._new = list(new)  # tests that the record may not know
        self._reasons = {
            (entry["file"], entry["old"].strip("\n"), entry["new"].strip("\n")): entry["why"]
            for entry in tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
        }

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that are worth their time for a mutant: the quick ones of those that reach it."""
        known = {
            test.partition("::")[0]
            for tests in self._record.blocks.get(mutant.file, {}).values()
            for test in tests
        }
        chosen = [name for name in self._new if not known or name.partition("::")[0] in known][:NEW]
        left = self._seconds
        for name in self._record.reaching(mutant.file, (self._root / mutant.file).read_text(), mutant.line):
            left -= self._record.tests[name]
            there = (self._root / name.partition("::")[0]).exists()
            if (left > 0 or not chosen) and name not in chosen and there:
                chosen.append(name)
        return chosen

    def run(self, mutant: Mutant, tree: Path, clean: Path) -> Verdict:
        """Try one mutant in a tree. A test sees it that fails with it, and passes without it."""
        tests, by, began = self.tests_of(mutant), "", time.monotonic()
        file = tree / mutant.file
        plain = file.read_text()
        limit = LIMIT + 3 * sum(self._record.tests.get(name, 0) for name in tests)
        without: list[str] = []
        try:
            file.write_text(mutant.code)
            while tests and len(without) < runs.FLAKY:
                try:
                    failed = runs.first_failed(tree, tests, without, limit)
                    flaky = failed and runs.first_failed(clean, [failed], limit=limit)
                except RuntimeError as error:
                    failed, flaky = f"no single test: {str(error).splitlines()[-1]}", ""
                if not flaky:
                    by = failed
                    break
                without.append(failed)
        finally:
            file.write_text(plain)
        package = "/".join(mutant.file.split("/")[: 2 if mutant.file.startswith("bridge") else 1])
        reason = self._reasons.get((mutant.file, mutant.old.strip("\n"), mutant.new.strip("\n")), "")
        took = time.monotonic() - began
        return Verdict(mutant.name, package, mutant.old, mutant.new, by, len(tests), round(took, 1), reason)


def try_all(
    mutants: Iterable[Mutant], trial: Trial, jobs: int, until: float, results: Path | None
) -> list[Verdict]:
    """Try mutants until a time of the monotonic clock; those in `results` are known already."""
    known = {}
    if results is not None and results.exists():
        known = {
            key: Verdict(**verdict) for key, verdict in map(json.loads, results.read_text().splitlines())
        }
    trees: SimpleQueue[tuple[Path, Path]] = SimpleQueue()

    def one(mutant: Mutant) -> Verdict | None:
        key = hashlib.sha256(f"{mutant.file}\0{mutant.code}".encode()).hexdigest()[:16]
        if key in known:
            return known[key]
        if time.monotonic() > until:
            return None
        tree, clean = trees.get()
        try:
            verdict = trial.run(mutant, tree, clean)
        finally:
            trees.put((tree, clean))
        print(
            f"{'found   ' if verdict.by else 'SURVIVED'} {verdict.mutant} {verdict.by} {verdict.seconds} s",
            flush=True,
        )
        if results is not None:
            results.parent.mkdir(parents=True, exist_ok=True)
            with results.open("a") as file:
                file.write(json.dumps([key, asdict(verdict)]) + "\n")
        return verdict

    with runs.tree(None) as clean, ThreadPoolExecutor(jobs) as pool:
        copies = [runs.tree(None) for _ in range(jobs)]
        try:
            for copy in copies:
                trees.put((copy.__enter__(), clean))
            return [verdict for verdict in pool.map(one, mutants) if verdict is not None]
        finally:
            for copy in copies:
                copy.__exit__(None, None, None)


def table(verdicts: list[Verdict]) -> str:
    """The survivors, and how many were found in each package."""
    text = []
    for verdict in verdicts:
        if not verdict.by:
            tried = f"survived {verdict.tests} tests" if verdict.tests else "no recorded test reaches it"
            text.append(f"\n{verdict.mutant}: {tried}")
            text.append(f"equivalent: {verdict.equivalent}" if verdict.equivalent else "")
            text += [f"- {line}" for line in verdict.old.splitlines()]
            text += [f"+ {line}" for line in verdict.new.splitlines()]
    text.append(f"\n{'package':24}{'tried':>7}{'found':>7}{'equivalent':>12}{'of the rest':>13}")
    packages = sorted({verdict.package for verdict in verdicts})
    for name in [*packages, "all"]:
        mine = [verdict for verdict in verdicts if name in (verdict.package, "all")]
        found, same = sum(bool(v.by) for v in mine), sum(not v.by and bool(v.equivalent) for v in mine)
        share = f"{100 * found / (len(mine) - same):.0f} %" if len(mine) > same else "-"
        text.append(f"{name:24}{len(mine):7}{found:7}{same:12}{share:>13}")
    return "\n".join(text)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="files whose path begins so: bridge/streams")
    parser.add_argument("--sample", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=24 * 60.0)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of tests, for one mutant")
    parser.add_argument("--changed", action="store_true")
    parser.add_argument("--base", default="")
    parser.add_argument("--record", nargs="*", metavar="TESTS")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    record = Reached.load()
    if options.record is not None:
        record.record(options.record or ["tests"], options.jobs)
        record.save()
        return
    print(f"seed {options.seed}", flush=True)
    if options.changed:
        base = options.base or _base()
        if not base:
            print("there is nothing to compare with: no main, and no commit before this one")
            return
        trial, results = Trial(record, changed_tests(base), options.seconds), None
        lines = changed_lines(base, *PLACES)
    else:
        trial, results = Trial(record, (), options.seconds), RESULTS / f"{options.seed}.jsonl"
        lines = all_lines(options.only)
    mutants = sample(lines, options.sample, options.seed)
    verdicts = try_all(mutants, trial, options.jobs, until, results)
    print(table(verdicts))


def _base() -> str:
    """Where this work left main; on main itself, the commit before."""
    for name in ("origin/main", "main", "HEAD~1"):
        found = subprocess.run(["git", "merge-base", "HEAD", name], cwd=ROOT, capture_output=True, text=True)
        if found.returncode == 0 and found.stdout.strip() != _git("rev-parse", "HEAD").strip():
            return found.stdout.strip()
    return ""


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    os.nice(5)
    main()
