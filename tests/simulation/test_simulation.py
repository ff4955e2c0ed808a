"""The simulation: a minute of new worlds, and what it says of itself. About 80 s."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False, timeout=600)


def test_whatever_fails_when_no_promise_is_broken() -> None:
    ended = simulate("--minutes", "1")
    print(ended.stdout)  # with the seed, which is new each time, and how to see a broken promise again
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("seed ")
    found = re.search(r"(\d+) worlds, (\d+) crashes with a restart, (\d+) messages", ended.stdout)
    assert found is not None
    assert all(int(number) > 0 for number in found.groups())


def test_a_seed_gives_the_same_story_again_also_among_others() -> None:
    alone = simulate("--worlds", "1", "--seed", "8", "--story").stdout.splitlines()
    among = simulate("--worlds", "2", "--seed", "7", "--story").stdout.splitlines()
    story = alone[1:-1]
    assert len(story) > 50
    assert among[-1 - len(story) : -1] == story


CAUGHT = """
from pathlib import Path

import pytest
from tests.simulation import boundary
boundary.install()
boundary.MACHINE.here = f"{Path.cwd()}/"
from tests.simulation import runs
from tests.simulation.plan import draw
runs.prepare()
from tests.simulation.world import World
from tests.simulation.exports import ExportChecks
ExportChecks.upload = lambda self, *_: self._checks.broken("this promise")
print(runs.one(lambda: World(draw(1), Path())).error)
"""


def test_a_promise_that_is_found_broken_during_an_upload_ends_the_world(tmp_path: Path) -> None:
    # The exporter takes what the checker raises for a failed upload, and goes on.
    ended = subprocess.run(
        [sys.executable, "-c", CAUGHT], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(TREE)},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert ended.stdout.strip() == "BrokenError: this promise", ended.stderr


@pytest.mark.slow(seconds=60)
def test_hundreds_of_exports_and_a_leap_year_of_them_lose_nothing_and_nothing_comes_late() -> None:
    ended = simulate("--large")
    print(ended.stdout)  # with the seed, which is new each time
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [line.partition(",")[0] for line in ended.stdout.splitlines()] == [
        "hundreds of exports", "a year", "a year of clock steps",
    ]  # fmt: skip
