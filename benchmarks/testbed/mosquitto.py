"""A real Mosquitto on a free port."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from pathlib import Path

from benchmarks.testbed.local import free_port, tool


class Mosquitto:
    """A Mosquitto in a directory; `extra` are lines of its configuration."""

    def __init__(self, root: Path, extra: str = "") -> None:
        self.program = tool("mosquitto")
        self.port = free_port()
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o777)  # Mosquitto started by root gives its rights up
        self.config = root / "mosquitto.conf"
        self.config.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\nmax_queued_messages 0\n"
            f"persistence true\npersistence_location {root}/\nuser root\n{extra}\n"
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen([self.program, "-c", self.config], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert time.monotonic() < deadline, "mosquitto does not listen"
            time.sleep(0.02)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)
            self.process = None

    def __enter__(self) -> Mosquitto:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
