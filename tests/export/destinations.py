"""A fake of each destination, behind a forwarder that counts, cuts and forgets."""

from __future__ import annotations

import functools
import gzip
import io
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import cbor2
import msgspec

from benchmarks.soak.services import payloads
from benchmarks.testbed.aws import Answer, FakeAws, Request, error, partial, reset
from benchmarks.testbed.forwarder import Forwarder
from benchmarks.testbed.objectstore import Server
from benchmarks.testbed.uplink import Answering
from benchmarks.testbed.web import Refusing, Web
from tests.export.harness import certificate


def payload(number: int) -> bytes:
    """200 bytes of JSON that do not compress well."""
    return b'{"n":%d,"v":"%s"}' % (number, os.urandom(90).hex().encode())


def entry(number: int) -> bytes:
    value = {"value": {"integerValue": number}, "timestamp": {"timeInSeconds": int(time.time())}}
    return msgspec.json.encode({"entryId": "e", "propertyAlias": f"/{number}", "propertyValues": [value]})


Fault = Callable[[], AbstractContextManager[object]]


class Destinations:
    """What exports send to. `forwarder`, `arrived` and `faults` are of the one that was made last."""

    def __init__(self, stack: ExitStack, root: Path) -> None:
        self._stack, self._root = stack, root
        self.forwarder: Forwarder
        self.arrived: Callable[[], list[int]]  # the numbers of the messages, in order of arrival
        self.faults: list[Fault] = []

    def exports(self, kind: str) -> dict[str, list[dict[str, Any]]]:
        """The export definition for a kind, such as `kinesis` or `kinesis gzip`."""
        name, _, variant = kind.partition(" ")
        made = getattr(self, f"_{name}")(variant)
        return {name: [{"identifier": "up", **made}]}

    def _behind(self, url: str) -> str:
        self.forwarder = Forwarder(url)
        self._stack.callback(self.forwarder.close)
        return self.forwarder.url

    def _refusing(self, *statuses: int) -> list[Fault]:
        """All answers are errors."""

        @contextmanager
        def answering(status: int) -> Iterator[None]:
            with closing(Refusing()) as server:
                server.status = status
                server.server.handle_error = lambda *_: None  # type: ignore[method-assign]
                with self.forwarder.leading_to(server.port):
                    yield

        return [functools.partial(answering, status) for status in statuses]

    # --- AWS

    def _aws(self, partly: Callable[[FakeAws], Any]) -> tuple[FakeAws, dict[str, Any]]:
        fake = FakeAws()
        fake.server.handle_error = lambda *_: None  # type: ignore[method-assign] - the forwarder resets
        self._stack.callback(fake.close)
        faults = (
            error(400, "ThrottlingException"),
            error(500, "InternalFailure"),
            error(400, "ExpiredTokenException"),
            reset,
            partly(fake),
        )
        self.faults = [functools.partial(fake.broken, fault) for fault in faults]
        return fake, {"endpointUrl": self._behind(fake.url)}

    def _kinesis(self, variant: str) -> dict[str, Any]:
        def partly(fake: FakeAws) -> Any:
            return partial(fake, lambda n, _: n % 3 == 1, "ProvisionedThroughputExceededException")

        fake, where = self._aws(partly)
        self.arrived = lambda: [number_of(one) for r in fake.taken for one in unpacked(r["Data"])]
        more = {"compression": "gzip"} if "gzip" in variant else {}
        more |= {"partitionKey": "{topic}"} if "keys" in variant else {}
        return {**where, "kinesisStreamName": "plant", **more}

    def _firehose(self, _: str) -> dict[str, Any]:
        fake, where = self._aws(
            lambda fake: partial(fake, lambda n, _: n % 3 == 1, "ServiceUnavailableException")
        )
        self.arrived = lambda: [number_of(one) for r in fake.taken for one in r["Data"].splitlines()]
        return {**where, "deliveryStreamName": "plant"}

    def _iotAnalytics(self, _: str) -> dict[str, Any]:  # noqa: N802
        return {**self._firehose(""), "iotChannel": "plant"}

    def _IotSitewise(self, _: str) -> dict[str, Any]:  # noqa: N802
        fake, where = self._aws(_entries_fail)
        self.arrived = lambda: [int(one["propertyAlias"][1:]) for one in fake.taken]
        return where

    def _s3(self, _: str) -> dict[str, Any]:
        store = Server()
        store.handle_error = lambda *_: None  # type: ignore[method-assign] - the forwarder resets
        thread = threading.Thread(target=store.serve_forever, args=(0.02,))
        thread.start()
        self._stack.callback(store.server_close)
        self._stack.callback(thread.join)
        self._stack.callback(store.shutdown)
        times = {"timeHintMillis": 50, "reportIntervalMillis": 20}
        url = self._behind(f"http://127.0.0.1:{store.server_port}")
        return {"bucket": "plant", "endpointUrl": url, "sizeHintBytes": 200_000, **times}

    # --- others

    def _http(self, variant: str) -> dict[str, Any]:
        web = Web()
        web.server.handle_error = lambda *_: None  # type: ignore[method-assign] - the forwarder resets
        self._stack.callback(web.close)
        self.arrived = lambda: [number_of(one) for body in web.bodies for one in payloads(body)]
        self.faults = self._refusing(429, 500, 503, 401)
        more = {"exportFormat": 1} if variant == "lists" else {}
        if variant != "TLS":
            return {"uri": f"{self._behind(web.url)}/in", **more}
        key, cert = certificate(self._root, "web")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        web.server.socket = context.wrap_socket(web.server.socket, server_side=True)
        return {"uri": f"{self._behind(web.url).replace('http:', 'https:')}/in", "caFile": str(cert)}

    def _mqtt(self, variant: str) -> dict[str, Any]:
        broker = self._stack.enter_context(Answering())
        self.arrived = lambda: [number_of(one) for one in broker.payloads]

        @contextmanager
        def answering(code: int | None) -> Iterator[None]:
            broker.code = lambda message: code
            try:
                yield
            finally:
                broker.code = lambda message: 0

        self.faults = [functools.partial(answering, code) for code in (0x97, 0x80, None)]
        return {
            "timeoutMillis": 1000 if variant == "impatient" else 30_000,
            "url": self._behind(broker.url).replace("http:", "mqtt:"),
        }


def number_of(data: bytes) -> int:
    """The number of a payload."""
    return int(data[len(b'{"n":') : data.index(b",")])


def unpacked(data: bytes) -> list[Any]:
    """The items of a packed record, as the page about the exporter shows; otherwise the record itself."""
    if not data.startswith(b"\x1f\x8b"):
        return [data]
    content, items = io.BytesIO(gzip.decompress(data)), []
    while content.tell() < len(content.getbuffer()):
        items.append(cbor2.load(content))
    return items


def _entries_fail(fake: FakeAws) -> Any:
    """Two of the entries of each request fail."""

    def fault(request: Request) -> Answer:
        wrong = [{"errorCode": "InternalFailureException", "errorMessage": "no", "timestamps": []}]
        entries = request.parameters["entries"]
        fake.taken += entries[2:]
        return 200, {"errorEntries": [{"entryId": e["entryId"], "errors": wrong} for e in entries[:2]]}

    return fault
