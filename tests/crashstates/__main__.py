"""Records all areas, tries their crash states, and prints how many there were; exits 1 if one is wrong.

python -m tests.crashstates [--states 800] [--seed S] [--area NAME] [--model NAME]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from .explore import explore
from .filesystem import MODELS
from .record import AREAS, record

WIDTH = 20


def main() -> int:
    """Do as the command line says; returns the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--states", type=int, default=800, help="about so many for each area and model")
    arguments.add_argument("--seed", type=int, default=None, help="draw the states of an earlier run again")
    arguments.add_argument("--area", choices=list(AREAS), action="append")
    arguments.add_argument("--model", choices=MODELS, action="append")
    given = arguments.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    began, total, wrong = time.monotonic(), 0, list[str]()
    models = given.model or MODELS
    print(f"{'':{WIDTH}}{'points':>10}" + "".join(f"{model:>14}" for model in models), flush=True)
    for area in given.area or AREAS:
        with tempfile.TemporaryDirectory(prefix="crash-states-") as place:
            recording = record(area, Path(place))
            results = []
            for model in models:
                results.append(explore(recording, model, given.states, seed, service=True))
                wrong += results[-1].examples
        total += sum(result.states for result in results)
        cells = "".join(f"{result.states:>14,}" for result in results)
        print(f"{area:{WIDTH}}{results[0].points:>10,}{cells}", flush=True)
    took = time.monotonic() - began
    busy = time.process_time()
    print(f"{total:,} states in {took:.0f} s, {total / busy:.0f} per second of processor time")
    print(f"{len(wrong)} defects", flush=True)
    for one in wrong:
        print(one)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
