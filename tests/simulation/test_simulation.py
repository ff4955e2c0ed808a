"""The simulation: a minute of the worlds of the day, and what it says of itself. About 75 s."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False, timeout=600)


def test_whatever_fails_when_no_promise_is_broken() -> None:
    # New seeds each day: a run that fails can be repeated with the same worlds. `make simulate` draws others.
    ended = simulate("--minutes", "1", "--seed", str(datetime.now(UTC).toordinal() * 1000))
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"(\d+) worlds, (\d+) crashes with a restart, (\d+) messages", ended.stdout)
    assert found is not None
    assert all(int(number) > 0 for number in found.groups())


def test_a_seed_gives_the_same_story_again_also_among_others() -> None:
    alone = simulate("--worlds", "1", "--seed", "8", "--story").stdout.splitlines()
    among = simulate("--worlds", "2", "--seed", "7", "--story").stdout.splitlines()
    story = alone[1:-1]
    assert len(story) > 50
    assert among[-1 - len(story) : -1] == story
