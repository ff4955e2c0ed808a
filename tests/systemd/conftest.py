"""A Debian package built once, and a machine for each test that asks for one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from sysconfig import get_path

import pytest

from tests.systemd.machine import Machine, why_not

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Debian package of this tree."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("package")
    built = subprocess.run([CHECKOUT / ".ci/deb", directory], capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stderr
    (found,) = directory.glob("*.deb")
    return found


@pytest.fixture
def machine(tmp_path: Path, package: Path) -> Iterator[Machine]:
    """A booted machine without streambridge, but with its package and what this environment has of Spark."""
    booted = Machine(tmp_path, {package: "/srv/streambridge.deb", Path(get_path("purelib")): "/srv/python"})
    yield booted
    booted.close()
