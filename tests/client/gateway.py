"""A service in a process of its own that is killed and started again on the same ports."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Self

from benchmarks.testbed.local import free_port
from tests.cli.conftest import COMMAND, environment
from tests.http.conftest import eventually

CONFIG = """
[gateway]
id = "gw"
data_dir = "data"
memory_dir = "memory"
[mqtt]
listen = ["tcp://127.0.0.1:{mqtt}"]
[greengrass]
listen = "127.0.0.1:{stream_manager}"
[http]
listen = ""
"""


class Gateway:
    """Its configuration, and its process while it runs."""

    def __init__(self, directory: Path, config: str = "") -> None:
        self.mqtt_port, self.stream_manager_port = free_port(), free_port()
        self._log, self._config = directory / "log", directory / "bridge.toml"
        text = CONFIG.format(mqtt=self.mqtt_port, stream_manager=self.stream_manager_port)
        self._config.write_text(text + config)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()

    @property
    def urls(self) -> dict[str, str]:
        """The addresses of the two transports of the client."""
        return {
            "mqtt": f"mqtt://127.0.0.1:{self.mqtt_port}",
            "streammanager": f"streammanager://127.0.0.1:{self.stream_manager_port}",
        }

    def start(self) -> None:
        """Start it and wait until it is ready."""
        with self._log.open("w") as log:
            command = [*COMMAND, "run", "-c", str(self._config)]
            self.process = subprocess.Popen(command, env=environment(), stderr=log)
        eventually(lambda: "msg=ready" in self._running())

    def _running(self) -> str:
        text = self._log.read_text()
        assert self.process.poll() is None, text
        return text

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop it as systemd does."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=60) == 0, self._log.read_text()
