"""Programs and ports of this machine."""

from __future__ import annotations

import random
import shutil
import socket
from pathlib import Path
from unittest import SkipTest

LOWEST = 10_000  # servers with a well-known port are mostly below


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
    """A TCP port on loopback that is free at this moment.

    It is below those that the kernel hands out itself, if there are any: nothing else on the machine gets it
    while a server that had it is down.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    choose = random.SystemRandom()
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", choose.randrange(LOWEST, lowest) if lowest > 2 * LOWEST else 0))
            except OSError:
                continue
            return int(probe.getsockname()[1])
