"""The embedded broker for the client to talk to, and a line that a test can cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from bridge.access.logins import Access
from bridge.client import StreamManagerClient
from bridge.mqtt import MqttFrontEnd
from bridge.mqtt.settings import MqttConfig
from tests.greengrass.conftest import PYTHON_SDKS, Sdk
from tests.greengrass.harness import Server


class Broker(Server):
    """The same, with the MQTT front end."""

    def __init__(self, root: Path, *, mqtt_port: int = 0, **mqtt: Any) -> None:
        super().__init__(root)
        self.mqtt = MqttConfig(listen=[f"tcp://127.0.0.1:{mqtt_port}"], **mqtt)

    def front_end(self) -> MqttFrontEnd:
        return MqttFrontEnd(self.mqtt, self.operations, Access(self.mqtt))


class Line:
    """A TCP relay. `lose_replies` cuts the line at the next bytes that come from the server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.lose_replies = False
        self.cuts = 0
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        """Cut what goes through now."""
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._port))
                except OSError:
                    client.close()
                    continue
                self._open += [client, server]
                for args in ((client, server, False), (server, client, True)):
                    self._threads.append(threading.Thread(target=self._pump, args=args))
                    self._threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket, replies: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if replies and self.lose_replies:
                    self.lose_replies = False
                    self.cuts += 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path) as running:
        yield running


@pytest.fixture
def connect(broker: Broker) -> Iterator[Callable[..., StreamManagerClient]]:
    """A function that makes a client."""
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> StreamManagerClient:
            fast = {"port": broker.port, "reconnect_delay": (0.05, 0.2)}
            return stack.enter_context(StreamManagerClient(**fast | options))

        yield make


@pytest.fixture
def client(connect: Callable[..., StreamManagerClient]) -> StreamManagerClient:
    return connect()


@pytest.fixture(scope="session")
def sdk() -> Sdk:
    """The AWS SDK, to compare with."""
    return Sdk(PYTHON_SDKS[0])
