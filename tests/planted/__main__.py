"""Plants each defect in a copy of the project, and notes what finds it.

python -m tests.planted [--only WORDS] [--simulation | --tests] [--missed] [--jobs N] [--seed S]

The results are in `tests/planted/results.json`, and their summary is in `docs/proof.md`. Without an option,
each defect is given to the simulation (75 worlds at most) and to the tests of its room (some minutes).
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

from . import runs, table
from .defects import Defect, load


def main() -> int:
    """Run; returns the exit status: 1 if the code without a defect fails the simulation."""
    asked = argparse.ArgumentParser(prog="python -m tests.planted")
    asked.add_argument(
        "--only", default="", metavar="WORDS", help="defects whose number is this, or whose name has it"
    )
    way = asked.add_mutually_exclusive_group()
    way.add_argument("--simulation", action="store_true", help="only the simulation")
    way.add_argument("--tests", action="store_true", help="only the other tests")
    asked.add_argument("--missed", action="store_true", help="only what was not found before, or not tried")
    asked.add_argument("--jobs", type=int, default=1, metavar="N", help="defects at a time")
    asked.add_argument("--seed", type=int, default=int(time.time()), help="of the simulation")
    given = asked.parse_args()
    ways = ["simulation"] if given.simulation else ["tests"] if given.tests else ["simulation", "tests"]
    known, defects = table.read(), load()
    todo = [
        (defect, each)
        for each in ways
        for defect in defects
        if _is_meant(defect, given.only) and not (given.missed and _is_found(known, defect, each))
    ]
    if "simulation" in ways:
        print(f"seed {given.seed}", flush=True)
        with runs.tree(None) as clean:
            if broken := runs.simulate(clean, given.seed).by:
                print(f"the simulation fails without any defect: {broken}", file=sys.stderr)
                return 1
    with ThreadPoolExecutor(given.jobs) as pool:
        started = {pool.submit(_found, defect, each, given.seed): (defect, each) for defect, each in todo}
        for done in as_completed(started):
            defect, each = started[done]
            try:
                found = done.result()
            except (RuntimeError, OSError) as error:  # the others go on
                print(f"{defect}\n    NOT TRIED by {each}: {error}", file=sys.stderr, flush=True)
                continue
            table.keep(defect, each, found)
            what = f"{each} in {found.seconds:.0f} s: {found.by}" if found.by else f"NOT FOUND by {each}"
            print(f"{defect}\n    {what}", flush=True)
    table.write()
    return 0


def _is_meant(defect: Defect, words: str) -> bool:
    return words == str(defect.number) if words.isdecimal() else words.lower() in defect.name.lower()


def _is_found(known: table.Results, defect: Defect, way: str) -> bool:
    found = known.get(defect.name, {}).get(way)
    return found is not None and bool(found.by)


def _found(defect: Defect, way: str, seed: int) -> runs.Found:
    return runs.by_simulation(defect, seed) if way == "simulation" else runs.by_tests(defect)


if __name__ == "__main__":
    sys.exit(main())
