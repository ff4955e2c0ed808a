"""The two systems of the consumer benchmark: servers with streams and consumers, and a client for each.

A client has `fetch(most)`, which returns what came at once, and `ack(deliveries)`, which returns when that is
confirmed, if the system confirms it. Both are sockets with raw bytes, so no client library is measured.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks import peers
from benchmarks.operations import CHECKOUT, Mqtt
from benchmarks.testbed.nats import NatsServer

QUEUE = "queue"  # the stream that is a work queue
PENDING = 1000  # unacknowledged messages of a consumer at most: the default of both
GROUP = 1000  # messages that are appended at a time
START_TIMEOUT = 60


class Delivery(NamedTuple):
    """A message that was fetched: its number, how often it was delivered, and what acknowledges it."""

    number: int
    deliveries: int
    handle: Any


class Client(Protocol):
    """A worker's connection."""

    def fetch(self, most: int) -> list[Delivery]:
        """Fetch at most so many messages, and do not wait for more."""

    def ack(self, some: list[Delivery]) -> None:
        """Acknowledge them."""

    def fill(self, stream: str, number: int, size: int) -> None:
        """Append so many messages of so many bytes."""


class Server(Protocol):
    """A running server."""

    port: int
    process: subprocess.Popen[Any]

    def stop(self) -> None:
        """Kill it."""


class System(NamedTuple):
    """One row. `kind` names its client, `settings` are lines of JetStream's configuration.

    `place` is where its files are, if not in the output directory.
    """

    name: str
    kind: str
    settings: str = ""
    place: Path | None = None


SYSTEMS = (
    System("streambridge", "streambridge"),
    System("JetStream, sync always, ack confirmed", "confirmed", "  sync_interval: always\n"),
    System("JetStream, sync always, plain ack", "plain", "  sync_interval: always\n"),
    System("JetStream, ack confirmed", "confirmed"),
    System("JetStream, plain ack", "plain"),
    System("streambridge, files in memory", "streambridge", place=Path("/dev/shm")),
)


class Streambridge:
    """streambridge run, with streams and consumers as {stream: consumers}."""

    CONFIG = (
        '[gateway]\ndata_dir = "data"\n[mqtt]\nlisten = ["tcp://127.0.0.1:0"]\nmax_packet = "16MiB"\n'
        '[greengrass]\nlisten = ""\n[http]\nlisten = ""\n'
    )

    def __init__(self, directory: Path, streams: dict[str, list[str]], deadline: float) -> None:
        text = self.CONFIG
        for stream, consumers in streams.items():
            text += f'[streams.{stream}]\nretention = "{"exported" if stream == QUEUE else "limits"}"\n'
            for consumer in consumers:
                text += f'[[streams.{stream}.export.consumer]]\nidentifier = "{consumer}"\n'
                text += f"ack_deadline_millis = {deadline * 1000:.0f}\nmax_unacknowledged = {PENDING}\n"
        (directory / "bench.toml").write_text(text)
        log = directory / "log"
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bridge", "run", "-c", str(directory / "bench.toml")],
                env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
                stderr=out,
            )
        ends = time.monotonic() + START_TIMEOUT
        while (found := re.search(r"msg=ready.*mqtt://127.0.0.1:(\d+)", log.read_text())) is None:
            if self.process.poll() is not None or time.monotonic() > ends:
                self.stop()
                raise SystemExit(f"the service does not start: {log.read_text()[-1000:]}")
            time.sleep(0.02)
        self.port = int(found[1])

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class StreambridgeClient(Mqtt):
    """Requests over MQTT, in CBOR."""

    def __init__(self, port: int, name: str, stream: str, consumer: str) -> None:
        self.connect(port, name)
        self.asked = {"name": stream, "consumer": consumer}

    def fetch(self, most: int) -> list[Delivery]:
        self.request(b"fetchMessages", self.asked | {"maxMessageCount": most})
        return [
            Delivery(one["sequenceNumber"], one["deliveries"], one["sequenceNumber"])
            for one in self.reply()["messages"]
        ]

    def ack(self, some: list[Delivery]) -> None:
        self.request(b"ackMessages", self.asked | {"ack": [one.handle for one in some]})
        self.reply()

    def fill(self, stream: str, number: int, size: int) -> None:
        self.stream = stream
        for first in range(0, number, GROUP):
            self.append([os.urandom(size) for _ in range(min(GROUP, number - first))])


class JetStream(NatsServer):
    """nats-server, with streams and consumers as {stream: consumers}; those that are there stay."""

    def __init__(
        self, directory: Path, streams: dict[str, list[str]], deadline: float, settings: str
    ) -> None:
        super().__init__(directory, settings)
        with JetStreamClient(self.port, "", "", "", confirmed=True) as client:
            for stream, consumers in streams.items():
                retention = "workqueue" if stream == QUEUE else "limits"
                config = {"name": stream, "subjects": [f"in.{stream}"], "retention": retention}
                client.call(f"STREAM.CREATE.{stream}", config | {"storage": "file"})
                for consumer in consumers:
                    own = {
                        "durable_name": consumer,
                        "ack_policy": "explicit",
                        "ack_wait": int(deadline * 1e9),
                        "max_ack_pending": PENDING,
                    }
                    body = {"stream_name": stream, "config": own}
                    client.call(f"CONSUMER.DURABLE.CREATE.{stream}.{consumer}", body)


class JetStreamClient(peers.Wire):
    """A pull consumer with explicit acknowledgements, which are confirmed (`ack_sync`) or not."""

    def __init__(self, port: int, name: str, stream: str, consumer: str, *, confirmed: bool) -> None:
        super().__init__(port)
        self.confirmed = confirmed
        self.next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}".encode()
        self.inbox = b"_INBOX.%d-%s" % (os.getpid(), name.encode())
        self.line()
        connect = b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n'
        self.socket.sendall(connect + b"SUB %s.> 1\r\nPING\r\n" % self.inbox)
        while self.line() != b"PONG\r\n":
            pass

    def __enter__(self) -> JetStreamClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.socket.close()

    def call(self, what: str, body: object) -> None:
        """A request of JetStream's API."""
        data = json.dumps(body).encode()
        self.socket.sendall(
            b"PUB $JS.API.%s %s.api %d\r\n%s\r\n" % (what.encode(), self.inbox, len(data), data)
        )
        _, _, answer = self._message()
        assert b'"error"' not in answer, answer

    def _message(self) -> tuple[bytes, bytes, bytes]:
        """Where an answer goes to, headers, body of the next message."""
        while True:
            words = self.line().split()
            if words[0] == b"MSG":
                return words[3] if len(words) == 5 else b"", b"", self.file.read(int(words[-1]) + 2)[:-2]
            if words[0] == b"HMSG":
                data, end = self.file.read(int(words[-1]) + 2)[:-2], int(words[-2])
                return words[3] if len(words) == 6 else b"", data[:end], data[end:]
            if words[0] == b"PING":
                self.socket.sendall(b"PONG\r\n")
            elif words[0] == b"-ERR":
                raise ConnectionError(words)

    def fetch(self, most: int) -> list[Delivery]:
        body = b'{"batch":%d,"no_wait":true}' % most
        self.socket.sendall(b"PUB %s %s.next %d\r\n%s\r\n" % (self.next, self.inbox, len(body), body))
        found: list[Delivery] = []
        while len(found) < most:
            handle, headers, _ = self._message()
            if headers.startswith(b"NATS/1.0 4"):
                break  # there are no more
            parts = handle.split(b".")  # $JS.ACK.stream.consumer.deliveries.number...
            found.append(Delivery(int(parts[5]) - 1, int(parts[4]), handle))
        return found

    def ack(self, some: list[Delivery]) -> None:
        reply = b"%s.ack " % self.inbox if self.confirmed else b""
        self.socket.sendall(b"".join(b"PUB %s %s4\r\n+ACK\r\n" % (one.handle, reply) for one in some))
        for _ in some if self.confirmed else ():
            self._message()

    def fill(self, stream: str, number: int, size: int) -> None:
        head = b"PUB in.%s %s.fill %d\r\n" % (stream.encode(), self.inbox, size)
        for first in range(0, number, GROUP):
            group = min(GROUP, number - first)
            self.socket.sendall(b"".join(head + os.urandom(size) + b"\r\n" for _ in range(group)))
            for _ in range(group):
                self._message()


def serve(system: System, directory: Path, streams: dict[str, list[str]], deadline: float) -> Server:
    """Start the server of a system."""
    if system.kind == "streambridge":
        return Streambridge(directory, streams, deadline)
    return JetStream(directory, streams, deadline, system.settings)


def connect(kind: str, port: int, name: str, stream: str, consumer: str) -> Client:
    """Connect a worker."""
    if kind == "streambridge":
        return StreambridgeClient(port, name, stream, consumer)
    return JetStreamClient(port, name, stream, consumer, confirmed=kind == "confirmed")
