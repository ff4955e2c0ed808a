"""The peers of the store benchmark: SQLite, Redis Streams and NATS JetStream, behind the same two calls.

A peer has `append(payloads)`, which returns when all of them are acknowledged, and `read(start, count)`,
which returns how many it got. Servers run on a free port and a new directory, and are stopped afterwards.
"""

from __future__ import annotations

import json
import shutil
import socket
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import uvloop

from benchmarks.testbed import nats as nats_server
from benchmarks.testbed.local import free_port

TOPIC = "sensors/room1/temperature"


class Peer(Protocol):
    """What is measured."""

    def append(self, payloads: list[bytes]) -> None:
        """Store the payloads as one group; return when all are acknowledged."""

    def read(self, start: int, count: int) -> int:
        """Read `count` messages from the one at position `start` on; return how many came."""


class Sqlite:
    """A table in WAL mode, one transaction a group; `synchronous` FULL syncs at every commit."""

    def __init__(self, directory: Path, sync: bool, *, check_same_thread: bool = True) -> None:
        self.db = sqlite3.connect(
            directory / "messages.db", isolation_level=None, check_same_thread=check_same_thread
        )
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute(f"PRAGMA synchronous={'FULL' if sync else 'OFF'}")
        self.db.execute("CREATE TABLE m (n INTEGER PRIMARY KEY, at INTEGER, topic TEXT, payload BLOB)")

    def append(self, payloads: list[bytes]) -> None:
        now = time.time_ns()
        self.db.execute("BEGIN")
        self.db.executemany(
            "INSERT INTO m (at, topic, payload) VALUES (?, ?, ?)", [(now, TOPIC, p) for p in payloads]
        )
        self.db.execute("COMMIT")

    def read(self, start: int, count: int) -> int:
        rows = self.db.execute("SELECT * FROM m WHERE n > ? ORDER BY n LIMIT ?", (start, count)).fetchall()
        return len(rows)


class SqliteAside(Sqlite):
    """SQLite as a service on an event loop uses it (aiosqlite does): each transaction in a worker thread."""

    def __init__(self, directory: Path, sync: bool) -> None:
        super().__init__(directory, sync, check_same_thread=False)
        self.loop = uvloop.new_event_loop()
        self.thread = ThreadPoolExecutor(1)

    async def many(self, payloads: list[bytes], until: float) -> int:
        """Append groups one after the other on the loop."""
        groups = 0
        while time.perf_counter() < until:
            await self.loop.run_in_executor(self.thread, self.append, payloads)
            groups += 1
        return groups


class Wire:
    """A socket that reads lines and exact sizes."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.socket.makefile("rb", 1 << 20)

    def line(self) -> bytes:
        return self.file.readline()

    def ask(self, start: int, count: int) -> None:
        """Ask for `count` messages from position `start` on, without waiting for them."""
        raise NotImplementedError

    def take(self, count: int) -> int:
        """Wait for what was asked for first; return how many came."""
        raise NotImplementedError

    def read(self, start: int, count: int) -> int:
        self.ask(start, count)
        return self.take(count)


class Redis(Wire):
    """XADD in a pipeline; XRANGE to read."""

    last = b"-"

    @staticmethod
    def command(*words: bytes) -> bytes:
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)

    def append(self, payloads: list[bytes]) -> None:
        topic = TOPIC.encode()
        self.socket.sendall(
            b"".join(self.command(b"XADD", b"m", b"*", b"t", topic, b"p", payload) for payload in payloads)
        )
        for _ in payloads:
            size = self.line()
            assert size[:1] == b"$", size
            self.line()

    def ask(self, start: int, count: int) -> None:
        begin = b"-" if start == 0 else b"(" + self.last
        self.socket.sendall(self.command(b"XRANGE", b"m", begin, b"+", b"COUNT", b"%d" % count))

    def take(self, count: int) -> int:
        number = int(self.line()[1:])
        for _ in range(number):
            self.line()
            self.last = self._bulk()
            for _ in range(int(self.line()[1:])):
                self._bulk()
        return number

    def _bulk(self) -> bytes:
        return self.file.read(int(self.line()[1:]) + 2)[:-2]


class Nats(Wire):
    """JetStream: publish with an acknowledgement each, in a pipeline; a pull consumer to read."""

    consumer = 0

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.line()
        self.socket.sendall(b'CONNECT {"verbose":false,"headers":true}\r\nSUB in.> 1\r\nPING\r\n')
        while self.line() != b"PONG\r\n":
            pass
        config = {"name": "M", "subjects": ["m.>"], "storage": "file", "retention": "limits"}
        self._request("$JS.API.STREAM.CREATE.M", config)

    def _request(self, subject: str, body: object) -> bytes:
        data = json.dumps(body).encode()
        self.socket.sendall(b"PUB %s in.api %d\r\n%s\r\n" % (subject.encode(), len(data), data))
        answer = self._message()
        assert b'"error"' not in answer, answer
        return answer

    def _message(self) -> bytes:
        while True:
            head = self.line().split()
            if head[0] == b"PING":
                self.socket.sendall(b"PONG\r\n")
            elif head[0] in (b"MSG", b"HMSG"):
                return self.file.read(int(head[-1]) + 2)[:-2]

    def append(self, payloads: list[bytes]) -> None:
        subject = b"m." + TOPIC.replace("/", ".").encode()
        self.socket.sendall(b"".join(b"PUB %s in.ack %d\r\n%s\r\n" % (subject, len(p), p) for p in payloads))
        for _ in payloads:
            self._message()

    def ask(self, start: int, count: int) -> None:
        if start == 0:
            self.consumer += 1  # each begins at the first message
            config = {"durable_name": f"C{self.consumer}", "ack_policy": "none", "deliver_policy": "all"}
            subject = f"$JS.API.CONSUMER.DURABLE.CREATE.M.C{self.consumer}"
            self._request(subject, {"stream_name": "M", "config": config})
        request = json.dumps({"batch": count}).encode()
        self.socket.sendall(
            b"PUB $JS.API.CONSUMER.MSG.NEXT.M.C%d in.next %d\r\n%s\r\n"
            % (self.consumer, len(request), request)
        )

    def take(self, count: int) -> int:
        for _ in range(count):
            self._message()
        return count


@contextmanager
def server(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline, f"{command[0]} does not start"
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def redis(directory: Path, sync: bool) -> Iterator[Redis]:
    """Redis with an append-only file, synced at every turn or every second."""
    port = free_port()
    when = "always" if sync else "everysec"
    options = ["--save", "", "--appendonly", "yes", "--appendfsync", when, "--bind", "127.0.0.1"]
    with server(["redis-server", "--port", str(port), "--dir", str(directory), *options], port):
        yield Redis(port)


@contextmanager
def nats(directory: Path, sync: bool) -> Iterator[Nats]:
    """NATS with JetStream, synced at every message or, as by default, every two minutes."""
    started = nats_server.NatsServer(directory, "sync_interval: always\n" if sync else "")
    try:
        yield Nats(started.port)
    finally:
        started.stop()


@contextmanager
def sqlite(directory: Path, sync: bool) -> Iterator[Sqlite]:
    """SQLite in this process."""
    peer = Sqlite(directory, sync)
    try:
        yield peer
    finally:
        peer.db.close()


@contextmanager
def sqlite_aside(directory: Path, sync: bool) -> Iterator[SqliteAside]:
    """SQLite behind a thread of this process."""
    peer = SqliteAside(directory, sync)
    try:
        yield peer
    finally:
        peer.thread.shutdown()
        peer.loop.close()
        peer.db.close()


def installed() -> dict[str, tuple[Callable[..., object], tuple[bool, ...]]]:
    """The peers that this machine has, each with the sync modes it knows."""
    found: dict[str, tuple[Callable[..., object], tuple[bool, ...]]] = {
        "sqlite inline": (sqlite, (False, True)),
        "sqlite in a thread": (sqlite_aside, (False, True)),
    }
    if shutil.which("redis-server"):
        found["redis"] = (redis, (False, True))
    if nats_server.installed():
        found["nats"] = (nats, (False, True))
    return found
