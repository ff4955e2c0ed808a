"""A gateway with all its ports open, a device that publishes all the time, and an attacker's sockets.

The gateway is a process of its own, as the service runs. After each attack the device must still be
connected and acknowledged, the process must be the same, and its log must hold no internal error.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.testbed.certificates import Authority
from benchmarks.testbed.mqtt import connect, publish
from bridge.access.users import hash_password
from tests.cli.conftest import COMMAND, environment
from tests.http.conftest import eventually

CONFIG = """
[gateway]
id = "plant-7"
data_dir = "data"
[mqtt]
listen = ["tcp://127.0.0.1:0", "ws://127.0.0.1:0", "tls://127.0.0.1:0"]
users_file = "users"
allow_anonymous = false
[mqtt.tls]
cert = "{cert}"
key = "{key}"
[[mqtt.acl]]
user = "*"
publish = ["sensors/%u/#", "streambridge/%c/+"]
subscribe = ["commands/%u/#"]
[greengrass]
listen = "127.0.0.1:0"
tokens_file = "tokens"
[http]
listen = "127.0.0.1:0"
[firehose]
listen = "127.0.0.1:0"
access_keys_file = "keys"
[streams.readings]
topics = ["sensors/#"]
flush_on_write = true
"""
READY = re.compile(
    r"msg=ready listen=http://[\d.]+:(?P<http>\d+)/,tcp://[\d.]+:(?P<greengrass>\d+),"
    r"http://[\d.]+:(?P<firehose>\d+)/,unix://\S+?,"
    r"mqtt://[\d.]+:(?P<mqtt>\d+),ws://[\d.]+:(?P<ws>\d+),mqtts://[\d.]+:(?P<mqtts>\d+)"
)
PASSWORD = b"right"
TOKENS = {name: f"token-of-{name}-on-8088" for name in ("pump-7", "pump-8")}
CLOSED = (ConnectionError, BrokenPipeError, ssl.SSLError)


class Attacker:
    """A socket of somebody who means harm."""

    def __init__(self, port: int, *, tls: bool = False) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        if tls:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self.socket = context.wrap_socket(self.socket)

    def send(self, data: bytes) -> None:
        """Send, whether the gateway still takes it or not."""
        with contextlib.suppress(*CLOSED):
            self.socket.sendall(data)

    def read(self, size: int) -> bytes:
        """So many bytes, or those that come before the end."""
        data = b""
        with contextlib.suppress(*CLOSED):
            while len(data) < size and (more := self.socket.recv(size - len(data))):
                data += more
        return data

    def rest(self) -> bytes:
        """Everything up to the end, which must come."""
        return self.read(1 << 30)

    def packet(self) -> tuple[int, bytes]:
        """The next MQTT packet: its first byte and its body; (0, b"") at the end."""
        head = self.read(2)
        if len(head) < 2:
            return 0, b""
        length, shift, last = head[1] & 0x7F, 7, head[1]
        while last & 0x80:
            last = self.read(1)[0]
            length |= (last & 0x7F) << shift
            shift += 7
        return head[0], self.read(length)

    def log_in(self, client_id: str = "", user: str = "pump-8", **options: Any) -> None:
        """An attacker with a password of its own: a device that was taken over."""
        self.send(connect(client_id, user=user, password=PASSWORD, **options))
        head, body = self.packet()
        assert (head, body[1:2]) == (0x20, b"\0"), body

    def close(self) -> None:
        self.socket.close()


class Device(threading.Thread):
    """A device that publishes one message after the other at QoS 1, and notes how long each took."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._attacker = Attacker(port)
        self._attacker.log_in("pump-7", "pump-7")
        self._end, self.took, self.lost = threading.Event(), list[float](), ""

    def run(self) -> None:
        number = 0
        while not self._end.wait(0.002):
            number = number % 65_535 + 1
            began = time.monotonic()
            self._attacker.send(publish("sensors/pump-7/temperature", b"%d" % number, 1, number))
            if self._attacker.packet() != (0x40, number.to_bytes(2, "big")):
                self.lost = f"message {number} was not acknowledged"
                return
            self.took.append(time.monotonic() - began)

    def next(self, count: int = 5) -> list[float]:
        """How long the next messages take."""
        begin = len(self.took)
        eventually(lambda: len(self.took) >= begin + count or self.lost or None, 60)
        assert not self.lost, self.lost
        return self.took[begin : begin + count]

    def close(self) -> None:
        self._end.set()
        self.join()
        self._attacker.close()


class Gateway:
    """The service, its ports, and what it has logged."""

    def __init__(self, directory: Path) -> None:
        pair = Authority(directory).issue("gateway")
        (directory / "gateway.toml").write_text(CONFIG.format(cert=pair.cert, key=pair.key))
        lines = {"users": [f"{name}:{hash_password(PASSWORD)}" for name in ("pump-7", "pump-8", "operator")]}
        lines["keys"] = ["AKIDEXAMPLE wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY pump-7"]
        lines["tokens"] = [f"{name} {token}" for name, token in TOKENS.items()]
        for name, content in lines.items():
            (directory / name).touch(0o600)
            (directory / name).write_text("\n".join(content) + "\n")
        self.data, self._log = directory / "data", directory / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "run", "-c", str(directory / "gateway.toml")], env=environment(), stderr=log
            )
        ready = eventually(lambda: READY.search(self.log()))
        self.port = {name: int(port) for name, port in ready.groupdict().items()}
        self.device = Device(self.port["mqtt"])
        self.device.start()

    def log(self) -> str:
        assert self.process.poll() is None, self._log.read_text()
        return self._log.read_text()

    def memory(self) -> int:
        """Resident bytes of the service, without its worker."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def attack(self, name: str = "mqtt") -> Attacker:
        """A socket to a port."""
        return Attacker(self.port[name], tls=name == "mqtts")

    def check(self) -> None:
        """Whether the device goes on, in the same process, and nothing went wrong inside."""
        self.device.next()
        log = self.log()
        assert not re.search(r"Traceback|internal error|RecursionError", log), log

    def close(self) -> None:
        self.device.close()
        self.process.terminate()
        if self.process.wait(60):
            raise AssertionError(self._log.read_text())


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path_factory.mktemp("gateway"))
    try:
        yield gateway
    finally:
        gateway.close()


@pytest.fixture
def gateway(running: Gateway) -> Iterator[Gateway]:
    """The gateway, unharmed before and after."""
    running.check()
    yield running
    running.check()
