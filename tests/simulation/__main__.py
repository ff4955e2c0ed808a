"""Run worlds: see the package's docstring."""

from __future__ import annotations

import argparse
import ctypes
import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

HASHES = "PYTHONHASHSEED"
ADDR_NO_RANDOMIZE = 0x0040000


def main() -> int:
    """Run worlds for some minutes, or one; returns the exit status: 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="of the first world; drawn if left out")
    parser.add_argument("--worlds", type=int, help="so many worlds instead of minutes")
    parser.add_argument("--all", action="store_true", help="go on after a broken promise, and say only which")
    parser.add_argument(
        "--shrink", type=float, default=60.0, metavar="SECONDS", help="spent on a shorter story"
    )
    parser.add_argument(
        "--large", action="store_true", help="hundreds of exports, and a year, instead of worlds"
    )
    parser.add_argument("--story", action="store_true", help="print each world's story")
    given = parser.parse_args()
    if os.environ.get(HASHES) != "0":  # the order of sets is part of a run
        ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
                  os.environ | {HASHES: "0"})  # fmt: skip
    # Threads take turns, so that a second processor would only make each turn slower.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    from . import boundary

    boundary.install()
    from . import runs

    seed = secrets.SystemRandom().randrange(10**9) if given.seed is None else given.seed
    place = Path(tempfile.mkdtemp(prefix="simulation-", dir="/dev/shm"))
    try:
        if given.large:
            from . import large

            return large.run(seed, place)
        seconds = given.minutes * 60
        patience = None if given.all else given.shrink
        return runs.run(seed, seconds, place, worlds=given.worlds, story=given.story, patience=patience)
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
