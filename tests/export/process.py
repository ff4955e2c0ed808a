"""`streambridge run` as a process that a test kills and starts again."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0


class Running:
    """A service with a configuration in a directory of its own; it listens on `port` once it is up."""

    def __init__(self, directory: Path, config: str, port: int) -> None:
        directory.mkdir()
        self.port = port
        self.config = directory / "streambridge.toml"
        self.config.write_text(config)
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Running:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        command = [sys.executable, "-m", "bridge", "run", "-c", str(self.config)]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT)
        deadline = time.monotonic() + DEADLINE
        while True:
            assert self.process.poll() is None, f"it ended; run {' '.join(command)}"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        status, self.process = self.process.wait(DEADLINE), None
        return status

    def read(self, stream: str) -> list[dict[str, Any]]:
        """All messages of a stream; the service runs or not."""
        command = [sys.executable, "-m", "bridge", "streams", "read", stream, "--count", "1000000", "--json"]
        done = subprocess.run([*command, "-c", str(self.config)], capture_output=True, check=True, cwd=ROOT)
        return [json.loads(line) for line in done.stdout.splitlines()]
