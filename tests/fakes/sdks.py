"""Programs that nobody here has written, each installed from its registry into a directory of its own."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

INSTALLED = Path(__file__).parents[2] / ".sdks"
MQTT_JS = "mqtt@5.16.0"


def installed(name: str, requirements: Path, command: Callable[[Path], list[str]]) -> Path:
    """The directory with a client, installed by a command once per content of its requirements.

    Skips the test if that is impossible, for example without a network.
    """
    content = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:12]
    target = INSTALLED / f"{name}-{content}"
    with _alone():
        if not target.is_dir():
            unfinished = INSTALLED / f"{name}-{os.getpid()}"
            unfinished.mkdir(exist_ok=True)
            try:
                done = subprocess.run(
                    command(unfinished), capture_output=True, text=True, timeout=240, cwd=unfinished
                )
                why = done.stderr if done.returncode else ""
            except (OSError, subprocess.TimeoutExpired) as error:
                why = str(error)
            if why:
                shutil.rmtree(unfinished)
                pytest.skip(f"{name} cannot be installed: {why[-500:]}")
            unfinished.rename(target)
    return target


@contextmanager
def _alone() -> Iterator[None]:
    """Of the processes that run the tests, one installs at a time; the others find what it has installed."""
    INSTALLED.mkdir(exist_ok=True)
    with (INSTALLED / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def node_modules(package: str) -> Path:
    """Where Node.js finds a package, `name@version`. Skips the test if it cannot be installed."""
    if shutil.which("npm") is None:
        pytest.skip("npm is missing: apt-get install npm")
    place = INSTALLED / package
    modules = place / "node_modules"
    with _alone():
        if not (modules / package.partition("@")[0]).is_dir():
            place.mkdir(exist_ok=True)
            command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", place, package]
            try:
                subprocess.run(command, check=True, timeout=240, stdin=subprocess.DEVNULL)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                pytest.skip(f"{package} cannot be installed: {error}")
    return modules
