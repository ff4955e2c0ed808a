"""What holds for all tests: a skip in CI is a failure, and slow tests can be run in shares."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from bridge import books

# How long an example takes says something of the machine, which may be busy or stand still for seconds.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

SHARE = 150.0  # seconds
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and so would all that it starts; tests press it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--share N`: the Nth share of the slow tests, counted round; any day or number of a build will do."""
    parser.addoption("--share", type=int, metavar="N", help="run one share of the slow tests only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of one share, see `shares`."""
    number: int | None = config.getoption("share")
    if number is None:
        return
    found = shares(items)
    share = found[(number - 1) % len(found)] if found else []
    config.hook.pytest_deselected(items=[item for item in items if item not in share])
    items[:] = share
    if share:
        names = ", ".join(dict.fromkeys(item.path.name for item in share))
        print(f"share {(number - 1) % len(found) + 1} of {len(found)} of the slow tests: {names}")


def shares(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """The slow tests that say their `seconds`, in lists that take at most `SHARE` seconds each.

    Tests of one file stay together as long as they fit, since they share what is slow to make. A test that
    says no seconds takes longer than a share, or needs the internet.
    """
    found: list[list[pytest.Item]] = []
    left = 0.0
    costly = [item for item in items if item.get_closest_marker("slow")]
    for path in dict.fromkeys(item.path for item in costly):
        mine = [(item, _seconds(item)) for item in costly if item.path == path]
        mine = [(item, seconds) for item, seconds in mine if seconds is not None]
        if mine and sum(seconds for _, seconds in mine) > left:
            found.append([])
            left = SHARE
        for item, seconds in mine:
            if seconds > left:
                found.append([])
                left = SHARE
            found[-1].append(item)
            left -= seconds
    return found


def _seconds(item: pytest.Item) -> float | None:
    marker = item.get_closest_marker("slow")
    return None if marker is None else marker.kwargs.get("seconds")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What is skipped on a laptop fails in CI."""
    return _failed_in_ci((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """So does a whole file that is skipped."""
    return _failed_in_ci((yield))


def _failed_in_ci(report: Report) -> Report:
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"{why} (in CI a skip is a failure)"
    return report


@pytest.fixture(autouse=True)
def _a_broken_pipe_is_an_error() -> Iterator[None]:
    """A command that a test calls in this process lets SIGPIPE end it; that is not for the tests after it."""
    yield
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


@pytest.fixture(autouse=True)
def _the_books_balance() -> Iterator[None]:
    """Every counter of what this test has opened in this process is right at its end (`bridge.books`)."""
    books.keep(set())
    yield
    try:
        books.check()
    finally:
        books.keep(set())


@pytest.fixture(scope="session", autouse=True)
def _services_keep_books() -> None:
    """A service in a process of its own ends with an error if a counter is wrong."""
    os.environ[books.VARIABLE] = "1"


@pytest.fixture(scope="session", autouse=True)
def _memory_streams_leave_nothing_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Services that are killed leave their directory for memory streams; let it be one of the tests' own."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))
    yield
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB of its own, where the machine lets us mount one."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", place], capture_output=True
    ).returncode:
        assert not os.environ.get("CI"), "cannot mount a tmpfs (needs root)"
        pytest.skip("cannot mount a tmpfs here (needs root)")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
