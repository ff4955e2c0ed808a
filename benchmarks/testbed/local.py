"""Programs and ports of this machine."""

from __future__ import annotations

import shutil
import socket
from unittest import SkipTest


def find(program: str) -> str | None:
    """The path of a program, or None if it is not installed. Servers may be on root's PATH only."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")


def tool(program: str) -> str:
    """The path of a program. Without it raises SkipTest, for which pytest skips the test."""
    path = find(program)
    if path is None:
        raise SkipTest(f"{program} is not installed; .ci/tools lists the packages")
    return path


def free_port() -> int:
    """A TCP port on loopback that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
