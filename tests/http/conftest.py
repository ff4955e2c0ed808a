"""A running service with its HTTP listener, and Chromium."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import paho.mqtt.client as paho
import pytest

from tests.cli.conftest import COMMAND, environment
from tests.http.chromium import Browser

MQTT = 'listen = ["tcp://127.0.0.1:0"]'
CONFIG = """
[gateway]
id = "plant-7"
data_dir = "data"
memory_dir = "memory"
[mqtt]
listen = ["tcp://127.0.0.1:0"]
[greengrass]
listen = ""
[http]
listen = "127.0.0.1:0"
"""
Found = TypeVar("Found")


class Service:
    """A service process, and clients of it."""

    def __init__(
        self,
        directory: Path,
        config: str,
        listen: str = "127.0.0.1:0",
        mqtt: str = MQTT,
        disk: str = "disk",
    ) -> None:
        self.directory = directory
        text = CONFIG.replace('[http]\nlisten = "127.0.0.1:0"', f'[http]\nlisten = "{listen}"')
        text = text.replace(MQTT, mqtt)
        (directory / "bridge.toml").write_text(text + config)
        (directory / "disk").mkdir(mode=0o700)
        self.mount(disk)
        self.log = directory / "log"
        self.start()

    def start(self) -> None:
        """Start it; also again, after it has ended."""
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "run", "-c", str(self.directory / "bridge.toml")], env=environment(), stderr=log
            )
        self.mqtt_port = int(eventually(lambda: self.logged(r"msg=ready .*mqtts?://\S+:(\d+)"))[1])
        http = self.logged(r"ready.*http://[\d.]+:(\d+)/")
        self.port = int(http[1]) if http else 0

    def mount(self, target: str) -> None:
        """Have the data directory be this one from now on."""
        (self.directory / "next").symlink_to(target)
        (self.directory / "next").replace(self.directory / "data")

    def logged(self, pattern: str) -> re.Match[str] | None:
        """Where the log matches; fails if the service has ended."""
        assert self.process.poll() is None, self.log.read_text()
        return re.search(pattern, self.log.read_text())

    def request(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        """A document, whatever the status."""
        return json.loads(self.request(path)[2])

    def publish(self, *messages: tuple[str, bytes]) -> None:
        """Publish at QoS 1 and wait for all PUBACKs."""
        with self.device("sender") as client:
            sent = [client.publish(topic, payload, qos=1) for topic, payload in messages]
            for message in sent:
                message.wait_for_publish(timeout=30)

    @contextmanager
    def device(self, client_id: str) -> Iterator[paho.Client]:
        """A connected MQTT client."""
        client = paho.Client(paho.CallbackAPIVersion.VERSION2, client_id)
        client.connect("127.0.0.1", self.mqtt_port)
        client.loop_start()
        try:
            yield client
        finally:
            client.disconnect()
            client.loop_stop()

    def stop(self) -> int:
        """Stop it as systemd does."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


def eventually(look: Callable[[], Found | None], seconds: float = 120, pause: float = 0.02) -> Found:
    """What `look` gives as soon as it gives something."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if found := look():
            return found
        time.sleep(pause)
    raise AssertionError("it did not come about")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Service]]:
    """A function that starts a service with more configuration."""
    started: list[Service] = []

    def start_it(config: str, **options: str) -> Service:
        started.append(Service(tmp_path_factory.mktemp("service"), config, **options))
        return started[-1]

    yield start_it
    for service in started:
        if service.process.poll() is None:
            service.process.kill()
            service.process.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium with a profile of its own."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("chromium is missing; install it: sudo apt-get install chromium")
    running = Browser(program, tmp_path_factory.mktemp("profile"))
    try:
        yield running
    finally:
        running.close()
