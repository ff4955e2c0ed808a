"""The services that exports go to, and what they have received.

Kinesis, Firehose, HTTP and the broker of the exports `mqtt` are fakes of `benchmarks.testbed`; S3 is moto (a
separate process that `world` starts). `Broken` replaces any of them during an outage.
"""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.testbed.aws import FakeAws
from benchmarks.testbed.uplink import Answering
from benchmarks.testbed.web import Web

GZIP = b"\x1f\x8b"
MESSAGE = re.compile(rb'{"d":(\d+),"n":(\d+)[,}]')


def identify(payload: bytes) -> tuple[int, int]:
    """Which device's message a payload is, and which of its messages."""
    found = MESSAGE.match(payload)
    assert found is not None, payload[:80]
    return int(found[1]), int(found[2])


def payloads(data: bytes) -> list[bytes]:
    """What devices have sent, in a record or a body: payloads in lines, or objects with a payload each."""
    if data.startswith(GZIP):
        data = gzip.decompress(data)
    if data.startswith(b"["):
        return [base64.b64decode(message["payload"]) for message in json.loads(data)]
    lines = data.splitlines()
    if lines and lines[0].startswith(b'{"gateway"'):
        return [base64.b64decode(json.loads(line)["payload"]) for line in lines]
    return lines


class Delivered:
    """Which messages have arrived, by kind of export: for each device how often each of its messages has."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[int, bytearray]] = {"kinesis": {}, "firehose": {}, "http": {}, "mqtt": {}}

    def add(self, kind: str, payloads: Iterable[bytes]) -> None:
        for payload in payloads:
            device, number = identify(payload)
            seen = self.counts[kind].setdefault(device, bytearray())
            if number >= len(seen):
                seen.extend(bytes(number + 1024 - len(seen)))
            seen[number] = min(seen[number] + 1, 255)


class Services:
    """The fakes. What they take is counted and forgotten every now and then: `collect`."""

    def __init__(self, delivered: Delivered) -> None:
        self.delivered = delivered
        self.fakes = {"kinesis": FakeAws(), "firehose": FakeAws()}
        self.web, self.broker = Web(), Answering()
        urls = {kind: fake.url for kind, fake in self.fakes.items()}
        for server in (*(fake.server for fake in self.fakes.values()), self.web.server):
            server.handle_error = lambda *_: None  # type: ignore[method-assign]  # links that are cut
        self.urls = {**urls, "http": self.web.url.removesuffix("/in"), "mqtt": self.broker.url}

    def collect(self) -> None:
        for kind, fake in self.fakes.items():
            with fake.lock:
                taken, fake.taken = fake.taken, []
                fake.requests.clear()
                fake.keys.clear()
            self.delivered.add(kind, (payload for one in taken for payload in payloads(one["Data"])))
        while self.web.bodies:
            self.delivered.add("http", payloads(self.web.bodies.pop()))
        self.web.headers.clear()
        while self.broker.published:
            self.delivered.add("mqtt", [self.broker.published.pop().payload])

    def close(self) -> None:
        for fake in self.fakes.values():
            fake.close()
        self.web.close()
        self.broker.close()


class Broken:
    """A service that takes nothing: it throttles, fails, refuses credentials, hangs a little, or hangs up."""

    def __init__(self) -> None:
        broken = self
        self.ended = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                """Nothing."""

            def answer(self) -> None:
                self.close_connection = True
                status = random.choice([500, 503, 429, 403, 0, 0])
                if status:
                    self.send_response(status)
                    self.send_header("Content-Length", "0")
                    self.send_header("Connection", "close")
                    self.end_headers()
                else:
                    broken.ended.wait(random.choice([0, 2]))

            do_GET = do_PUT = do_POST = do_HEAD = answer  # noqa: N815

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()
        self.port = self.server.server_port

    def close(self) -> None:
        self.ended.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
