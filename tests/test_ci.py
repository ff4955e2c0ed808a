"""What continuous integration does beyond `make test`: no skips, and a share of the slow tests each day."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
SLOW = """
import pytest
@pytest.mark.slow(seconds=120)
def test_a(): pass
@pytest.mark.slow(seconds=60)
def test_b(): pass
@pytest.mark.slow(seconds=60)
def test_c(): pass
@pytest.mark.slow
def test_that_takes_an_hour(): pass
def test_that_is_fast(): pass
"""


def run_tests(directory: Path, source: str, *options: str, ci: bool = False) -> str:
    """What pytest says of a file of tests with the hooks of our conftest."""
    (directory / "test_them.py").write_text(source)
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"PYTHONPATH": str(CHECKOUT)} | ({"CI": "true"} if ci else {})
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-q", "-rA"]
    return subprocess.run(
        [*command, *options], cwd=directory, env=environment, capture_output=True, text=True, timeout=240
    ).stdout


@pytest.mark.parametrize(
    "source",
    [
        "import pytest\ndef test_a(): pytest.skip('no tool')",
        "import pytest\n@pytest.mark.skipif(True, reason='no tool')\ndef test_a(): pass",
        "import pytest\n@pytest.fixture\ndef it(): pytest.skip('no tool')\ndef test_a(it): pass",
        "import pytest\npytest.skip('no tool', allow_module_level=True)",
    ],
    ids=["test", "mark", "fixture", "file"],
)
def test_a_skip_is_a_failure_in_ci_and_nowhere_else(tmp_path: Path, source: str) -> None:
    assert "1 skipped" in run_tests(tmp_path, source)
    told = run_tests(tmp_path, source, ci=True)
    assert "skipped" not in told.splitlines()[-1]
    assert "no tool (in CI a skip is a failure)" in told


def test_shares_of_the_slow_tests_are_bounded_and_take_turns(tmp_path: Path) -> None:
    chosen = []
    for day in range(20_001, 20_005):
        told = run_tests(tmp_path, SLOW, "--share", str(day))
        chosen.append([line.partition("::")[2] for line in told.splitlines() if line.startswith("PASSED")])
    assert chosen == [["test_a"], ["test_b", "test_c"]] * 2


def test_ci_runs_the_command_of_the_readme_and_a_share_of_the_slow_tests() -> None:
    assert (CHECKOUT / ".ci/run").read_text().splitlines()[-1] == "exec make test </dev/null"
    for ci, expected in (({}, False), ({"CI": "true"}, True)):
        environment = {name: value for name, value in os.environ.items() if name != "CI"} | ci
        told = subprocess.run(
            ["make", "--dry-run", "test"], cwd=CHECKOUT, env=environment, capture_output=True, text=True
        ).stdout
        assert ("-m slow --share " in told) is expected
