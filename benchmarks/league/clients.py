"""The clients of the league: each publishes with acknowledgements, and reads everything back.

Every message has a number and a payload that is made of it alone, so that a wrong one is found. All
clients do the same: groups of `GROUP` messages on one connection, the next when all are acknowledged.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

SIZE = 128
GROUP = 100
QUIET = 6.0  # seconds without a message after which there are no more, where a server does not say so
PATIENCE = 10.0  # seconds for an answer


def payload(number: int, size: int = SIZE) -> bytes:
    """The payload of a message, of `size` bytes."""
    return (b"%010d" % number * (size // 10 + 1))[:size]


class Client(Protocol):
    """One connection to a contender. All methods raise OSError or ValueError if it fails."""

    size: int  # of payloads, in bytes

    def prepare(self, *, again: bool = False) -> None:
        """Make what stores messages, and be ready to publish; `again`: it should be there."""

    def publish(self, numbers: range) -> Iterator[int]:
        """Publish messages; yields the number of each when it is acknowledged."""

    def read(self) -> list[bytes]:
        """All payloads that are stored, in order."""

    def close(self) -> None:
        """End the connection."""


class Wire:
    """A socket with a deadline for each answer."""

    size = SIZE

    def __init__(self, port: int) -> None:
        self.port = port
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = bytearray()

    def close(self) -> None:
        """Close it."""
        self.socket.close()

    def take(self, size: int) -> bytes:
        """So many bytes; raises ConnectionError at the end, TimeoutError after `PATIENCE`."""
        while len(self.buffer) < size:
            self._more()
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        return data

    def line(self) -> bytes:
        """Up to the next line feed, without it and a carriage return before it."""
        while (end := self.buffer.find(b"\n")) < 0:
            self._more()
        return self.take(end + 1).rstrip(b"\r\n")

    def _more(self) -> None:
        data = self.socket.recv(1 << 18)
        if not data:
            raise ConnectionError("closed by the server")
        self.buffer += data


class Mqtt(Wire):
    """MQTT 3.1.1 at QoS 1; a persistent session, away meanwhile, has the messages kept."""

    def prepare(self, *, again: bool = False) -> None:
        """Have the session subscribe, and connect as the publisher."""
        if not again:
            self._connect(b"keeper", clean=False)
            self.socket.sendall(b"\x82\x0c\0\1\0\7bench/#\1")
            if self.take(5) != b"\x90\3\0\1\1":
                raise ValueError("not subscribed")
            self.socket.sendall(b"\xe0\0")
            self.close()
            Wire.__init__(self, self.port)
        self._connect(b"device", clean=True)

    def __init__(self, port: int) -> None:
        super().__init__(port)

    def _connect(self, name: bytes, *, clean: bool) -> bytes:
        head = b"\0\4MQTT\4" + bytes((clean << 1, 0, 0)) + struct.pack(">H", len(name)) + name
        self.socket.sendall(b"\x10" + bytes((len(head),)) + head)
        answer = self.take(4)
        if answer[:2] != b"\x20\2" or answer[3]:
            raise ValueError(f"CONNACK {answer!r}")
        return answer

    def publish(self, numbers: range) -> Iterator[int]:
        """As `Client`."""
        topic = b"\0\7bench/a"
        length = len(topic) + 2 + self.size
        head = b"\x32" + bytes((length & 0x7F | 0x80, length >> 7)) + topic
        ids = {number % 60_000 + 1: number for number in numbers}
        self.socket.sendall(
            b"".join(
                head + struct.pack(">H", packet_id) + payload(n, self.size) for packet_id, n in ids.items()
            )
        )
        for _ in ids:
            answer = self.take(4)
            if answer[:2] != b"\x40\2":
                raise ValueError(f"not acknowledged: {answer!r}")
            yield ids[int.from_bytes(answer[2:], "big")]

    def read(self) -> list[bytes]:
        """As `Client`: what the session is sent."""
        self._connect(b"keeper", clean=False)
        self.socket.settimeout(QUIET)
        found: list[bytes] = []
        try:
            while True:
                head = self.take(1)[0]
                length = shift = 0
                while True:
                    byte = self.take(1)[0]
                    length |= (byte & 0x7F) << shift
                    shift += 7
                    if byte < 0x80:
                        break
                body = self.take(length)
                if head & 0xF0 == 0x30:
                    at = 2 + int.from_bytes(body[:2], "big")
                    self.socket.sendall(b"\x40\2" + body[at : at + 2])
                    found.append(body[at + 2 :])
        except TimeoutError:
            return found


class Ours(Mqtt):
    """As MQTT; the messages are in a stream, and read by the command."""

    def __init__(self, port: int, config: Path) -> None:
        super().__init__(port)
        self.config = config

    def prepare(self, *, again: bool = False) -> None:
        """Only connect: the configuration declares the stream."""
        self._connect(b"device", clean=True)

    def read(self) -> list[bytes]:
        """As `Client`."""
        command = [
            sys.executable,
            "-m",
            "bridge",
            "streams",
            "read",
            "bench",
            "--json",
            "--count",
            "10000000",
        ]
        done = subprocess.run([*command, "-c", str(self.config)], capture_output=True, text=True, check=False)
        rows = map(json.loads, done.stdout.splitlines())
        return [str(row["payload"]).encode() for row in rows]


class Redis(Wire):
    """XADD in a pipeline; XRANGE to read."""

    def prepare(self, *, again: bool = False) -> None:
        """Nothing: the first XADD makes the stream. But a server that still loads its file is waited for."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self._send(b"PING")
            answer = self.line()
            if answer == b"+PONG":
                return
            if time.monotonic() > deadline:
                raise ValueError(answer.decode())
            time.sleep(0.05)

    def _send(self, *words: bytes) -> None:
        self.socket.sendall(self._command(*words))

    @staticmethod
    def _command(*words: bytes) -> bytes:
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)

    def publish(self, numbers: range) -> Iterator[int]:
        """As `Client`."""
        self.socket.sendall(b"".join(self._command(b"XADD", b"m", b"*", b"p", payload(n)) for n in numbers))
        for number in numbers:
            head = self.line()
            if head[:1] != b"$":
                raise ValueError(head.decode())
            self.line()
            yield number

    def read(self) -> list[bytes]:
        """As `Client`."""
        self.prepare()
        found: list[bytes] = []
        last = b"-"
        while True:
            self._send(b"XRANGE", b"m", last, b"+", b"COUNT", b"1000")
            head = self.line()
            if head[:1] != b"*":
                raise ValueError(head.decode())
            if not int(head[1:]):
                return found
            for _ in range(int(head[1:])):
                self.line()
                last = b"(" + self._bulk()
                fields = [self._bulk() for _ in range(int(self.line()[1:]))]
                found.append(fields[1])

    def _bulk(self) -> bytes:
        return self.take(int(self.line()[1:]) + 2)[:-2]


class Nats(Wire):
    """JetStream: publish with an acknowledgement each, in a pipeline; a pull consumer to read."""

    def prepare(self, *, again: bool = False) -> None:
        """Make the stream, or find it."""
        self.line()
        self.socket.sendall(b'CONNECT {"verbose":false,"headers":true}\r\nSUB in.> 1\r\nPING\r\n')
        while self.line() != b"PONG":
            pass
        self._ask("$JS.API.STREAM.CREATE.M", {"name": "M", "subjects": ["m.>"], "storage": "file"})

    def _ask(self, subject: str, body: object) -> bytes:
        data = json.dumps(body).encode()
        self.socket.sendall(b"PUB %s in.api %d\r\n%s\r\n" % (subject.encode(), len(data), data))
        answer = self._message()[2]
        if b'"error"' in answer:
            raise ValueError(answer.decode())
        return answer

    def _message(self) -> tuple[bytes, bytes, bytes]:
        """Subject, headers, body of the next message."""
        while True:
            words = self.line().split()
            if words[0] == b"PING":
                self.socket.sendall(b"PONG\r\n")
            elif words[0] == b"MSG":
                return words[1], b"", self.take(int(words[-1]) + 2)[:-2]
            elif words[0] == b"HMSG":
                data, headers = self.take(int(words[-1]) + 2)[:-2], int(words[-2])
                return words[1], data[:headers], data[headers:]

    def publish(self, numbers: range) -> Iterator[int]:
        """As `Client`."""
        self.socket.sendall(
            b"".join(
                b"PUB m.a in.ack.%d %d\r\n%s\r\n" % (n, self.size, payload(n, self.size)) for n in numbers
            )
        )
        for _ in numbers:
            subject, _, body = self._message()
            if b'"error"' in body or b'"seq"' not in body:
                raise ValueError(body.decode())
            yield int(subject.rpartition(b".")[2])

    def read(self) -> list[bytes]:
        """As `Client`."""
        self.prepare()
        config = {"durable_name": "C", "ack_policy": "none", "deliver_policy": "all"}
        self._ask("$JS.API.CONSUMER.DURABLE.CREATE.M.C", {"stream_name": "M", "config": config})
        found: list[bytes] = []
        while True:
            request = json.dumps({"batch": 500, "no_wait": True}).encode()
            self.socket.sendall(
                b"PUB $JS.API.CONSUMER.MSG.NEXT.M.C in.next %d\r\n%s\r\n" % (len(request), request)
            )
            for _ in range(500):
                _, headers, body = self._message()
                if headers.startswith(b"NATS/1.0 4"):
                    return found
                found.append(body)


class Amqp(Wire):
    """AMQP 0-9-1 with publisher confirms, persistent messages on a durable queue of some type."""

    def __init__(self, port: int, kind: str) -> None:
        super().__init__(port)
        self.kind, self.confirmed = kind, 0

    def prepare(self, *, again: bool = False) -> None:
        """Log in, declare the queue, ask for confirms."""
        self.socket.sendall(b"AMQP\0\0\x09\1")
        self._expect(10, 10)
        self._method(0, 10, 11, _table({}) + _short("PLAIN") + _long(b"\0guest\0guest") + _short("en_US"))
        tune = self._expect(10, 30)
        self._method(0, 10, 31, tune[:6] + b"\0\0")
        self._method(0, 10, 40, _short("/") + b"\0\0")
        self._expect(10, 41)
        self._method(1, 20, 10, b"\0")
        self._expect(20, 11)
        self._method(1, 50, 10, b"\0\0" + _short("bench") + b"\2" + _table({"x-queue-type": self.kind}))
        self._expect(50, 11)
        self._method(1, 85, 10, b"\0")
        self._expect(85, 11)

    def _method(self, channel: int, group: int, number: int, body: bytes) -> None:
        self.socket.sendall(_frame(1, channel, struct.pack(">HH", group, number) + body))

    def _next(self) -> tuple[int, bytes]:
        """Type and body of the next frame."""
        kind, _, size = struct.unpack(">BHI", self.take(7))
        return kind, self.take(size + 1)[:-1]

    def _expect(self, group: int, number: int) -> bytes:
        kind, body = self._next()
        if kind != 1 or struct.unpack(">HH", body[:4]) != (group, number):
            raise ValueError(f"unexpected answer {body[:200]!r}")
        return body[4:]

    def publish(self, numbers: range) -> Iterator[int]:
        """As `Client`; a confirm may stand for all up to it."""
        method = _frame(1, 1, struct.pack(">HHH", 60, 40, 0) + b"\0" + _short("bench") + b"\0")
        header = _frame(2, 1, struct.pack(">HHQHB", 60, 0, SIZE, 0x1000, 2))
        self.socket.sendall(b"".join(method + header + _frame(3, 1, payload(n)) for n in numbers))
        first, waiting = self.confirmed + 1, set(numbers)
        self.confirmed += len(numbers)
        while waiting:
            tag, multiple = struct.unpack(">QB", self._expect(60, 80))
            number = numbers[tag - first]
            for done in sorted(n for n in waiting if n == number or (multiple & 1 and n < number)):
                waiting.discard(done)
                yield done

    def read(self) -> list[bytes]:
        """As `Client`."""
        self.prepare()
        self._method(1, 60, 10, struct.pack(">IHB", 0, 1000, 0))
        self._expect(60, 11)
        offset = _table({"x-stream-offset": "first"} if self.kind == "stream" else {})
        self._method(1, 60, 20, b"\0\0" + _short("bench") + b"\0\0" + offset)
        self._expect(60, 21)
        self.socket.settimeout(QUIET)
        found: list[bytes] = []
        try:
            while True:
                delivery = self._expect(60, 60)
                tag = delivery[1 + delivery[0] :][:8]
                _, header = self._next()
                size, data = int.from_bytes(header[4:12], "big"), b""
                while len(data) < size:
                    data += self._next()[1]
                found.append(data)
                if len(found) % 100 == 0:
                    self._method(1, 60, 80, tag + b"\1")
        except TimeoutError:
            return found


def _frame(kind: int, channel: int, body: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(body)) + body + b"\xce"


def _short(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


def _long(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _table(fields: dict[str, str]) -> bytes:
    return _long(b"".join(_short(name) + b"S" + _long(value.encode()) for name, value in fields.items()))
