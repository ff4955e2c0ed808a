"""A Debian package built once, and a machine for each test that asks for one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from sysconfig import get_path

import pytest

from tests.systemd.machine import Machine, why_not

CHECKOUT = Path(__file__).parents[2]
BUILD = 800.0  # seconds; a minute, unless the machine is busy


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Debian package of this tree."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("package")
    log = directory / "build.log"
    with log.open("wb") as output:
        build = subprocess.Popen(
            [CHECKOUT / ".ci/deb", directory], stdout=output, stderr=output, start_new_session=True
        )
        try:
            assert build.wait(BUILD) == 0, log.read_text()
        finally:
            if build.poll() is None:
                os.killpg(build.pid, signal.SIGKILL)
                build.wait()
    (found,) = directory.glob("*.deb")
    return found


@pytest.fixture
def machine(tmp_path: Path, package: Path) -> Iterator[Machine]:
    """A booted machine without streambridge, but with its package and what this environment has of Spark."""
    booted = Machine(tmp_path, {package: "/srv/streambridge.deb", Path(get_path("purelib")): "/srv/python"})
    yield booted
    booted.close()
