"""What holds for all tests."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and so would all that it starts; tests press it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
        pytest.skip("cannot mount a tmpfs here (needs root)")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
