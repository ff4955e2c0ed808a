"""The link: the bandwidth ceiling counts bytes on the wire, and a forgotten connection is soon replaced."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.forwarder import Forwarder, swallow
from benchmarks.testbed.web import Web
from bridge import Context
from bridge.plugin import discovery
from bridge.plugin.api import convert_config
from bridge.plugin.link import Link
from bridge.plugin.testing import attempt, make_batch
from tests.export.destinations import Destinations, entry, payload
from tests.export.harness import drop_in, running, until

CEILING = 400_000  # bits per second
WINDOW = 6.0  # seconds: what an idle link has saved is a twentieth of it
EXPORTERS = discovery.load().exporters


@pytest.fixture
def destinations(tmp_path: Path) -> Iterator[Destinations]:
    with ExitStack() as stack:
        yield Destinations(stack, tmp_path)


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    yield server
    server.close()


class Lateness:
    """How much of the time this machine did not have for us: how late short sleeps end, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._over.wait(0.02):
            now = time.monotonic()
            self.seconds += max(now - before - 0.03, 0)
            before = now

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.slow
def test_exports_of_one_priority_share_the_ceiling(tmp_path: Path) -> None:
    kinds = ["s3", "kinesis", "http", "mqtt"]

    async def scenario(stack: ExitStack) -> tuple[float, list[float], float]:
        async with running(tmp_path, max_bandwidth=CEILING) as gateway:
            forwarders = []
            for kind in kinds:
                destinations = Destinations(stack, tmp_path)
                gateway.create(kind, destinations.exports(kind))
                forwarders.append(destinations.forwarder)
            began = time.monotonic()
            for kind in kinds:
                await gateway.append(kind, *(payload(number) for number in range(4_000)))
            await until(lambda: all(one.sent > 20_000 for one in forwarders))
            lateness = Lateness()
            before, now = [one.sent for one in forwarders], time.monotonic()
            await until(lambda: time.monotonic() - now > WINDOW)
            lateness.close()
            took = time.monotonic() - now
            shares = [(one.sent - b) * 8 / CEILING / took for one, b in zip(forwarders, before, strict=True)]
            highest = sum(one.sent for one in forwarders) * 8 / CEILING / (time.monotonic() - began)
            return highest, shares, lateness.seconds

    with ExitStack() as stack:
        highest, shares, late = asyncio.run(scenario(stack))
    print(f"{sum(shares):.3f} of the ceiling: {[round(share, 2) for share in shares]}, {late:.1f} s late")
    assert highest <= 1.1
    assert late > WINDOW / 20 or (sum(shares) >= 0.9 and min(shares) >= 0.1)


class Direct:
    """An exporter without a worker, over a link of its own."""

    def __init__(self, kind: str, link: Link, **options: Any) -> None:
        context = Context(link=link)
        self._exporter = EXPORTERS[kind](convert_config(EXPORTERS[kind], options), context)

    def deliver(self, number: int, content: bytes = b"", attempts: int = 1000) -> list[str]:
        """Deliver a message; return the errors of the attempts that failed."""
        errors: list[str] = []
        batch = make_batch([content or payload(number)], number)
        while len(errors) < attempts and (outcome := attempt(self._exporter, batch)).retry:
            errors.append(outcome.error)
        return errors

    def close(self) -> None:
        self._exporter.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "s3",
        "kinesis",
        "kinesis gzip",
        "firehose",
        "iotAnalytics",
        "IotSitewise",
        "http",
        "http TLS",
        "mqtt",
    ],
)
def test_the_bandwidth_ceiling_counts_bytes_on_the_wire(
    tmp_path: Path, destinations: Destinations, kind: str
) -> None:
    async def scenario() -> tuple[float, float, float]:
        make = entry if kind == "IotSitewise" else payload
        async with running(tmp_path, max_bandwidth=CEILING) as gateway:
            exports = destinations.exports(kind)
            gateway.create("a", exports)
            began = time.monotonic()
            await gateway.append("a", *(make(number) for number in range(12_000)))
            forwarder = destinations.forwarder
            await until(lambda: forwarder.sent)
            first, before = time.monotonic(), forwarder.sent
            lateness = Lateness()
            try:
                await until(lambda: time.monotonic() - first > WINDOW)
            finally:
                lateness.close()
            sent, now = forwarder.sent, time.monotonic()
            assert not gateway.status("a").error_message
            assert gateway.store.streams["a"].next_sequence == 12_000
            highest = sent * 8 / CEILING / (now - began)
            return highest, (sent - before) * 8 / CEILING / (now - first), lateness.seconds

    highest, ratio, late = asyncio.run(scenario())
    print(f"{kind}: {ratio:.3f} of the ceiling, {late:.1f} s late")
    assert highest <= 1.1
    assert ratio >= 0.9 or late > WINDOW / 20


@pytest.mark.parametrize("kind", ["http", "http TLS", "mqtt"])
def test_no_time_out_runs_while_a_request_waits_for_its_turn(destinations: Destinations, kind: str) -> None:
    """One message, which takes twice as long as an answer may take: each attempt would fail.

    On a machine that stands still, a few do.
    """
    ((name, (options,)),) = destinations.exports(kind).items()
    export = Direct(name, Link(CEILING), **options | {"timeoutMillis": 1500})
    try:
        began = time.monotonic()
        assert len(export.deliver(0, bytes(150_000), attempts=5)) < 5
        took = time.monotonic() - began
    finally:
        export.close()
    assert took > 0.9 * 150_000 * 8 / CEILING  # in one burst it would take no time


@pytest.mark.slow
def test_an_urgent_export_goes_beside_a_large_batch_and_a_less_urgent_one_behind_it(
    tmp_path: Path, web: Web
) -> None:
    async def scenario() -> None:
        async with running(tmp_path, max_bandwidth=CEILING) as gateway:
            for name, priority in (("large", 5), ("urgent", 1), ("later", 9)):
                export = {"identifier": "up", "uri": web.url, "priority": priority}
                gateway.create(name, {"http": [export]})
            forwarder = Forwarder(web.url)
            stack.callback(forwarder.close)
            large = {"identifier": "up", "uri": f"{forwarder.url}/in", "priority": 5}
            gateway.update("large", {"http": [large]})
            await gateway.append("large", bytes(250_000))  # 5 s
            await until(lambda: forwarder.sent > 20_000)
            await gateway.append("later", b"later")
            await gateway.append("urgent", b"urgent")
            await gateway.exported("urgent", 0)
            assert gateway.status("large").last_exported_sequence_number == -1
            await gateway.exported("later", 0)
            is_behind = gateway.status("large").last_exported_sequence_number == 0
            assert is_behind or lateness.seconds > 0.2  # a machine that is late leaves the link free

    with ExitStack() as stack:
        lateness = Lateness()
        stack.callback(lateness.close)
        asyncio.run(scenario())


OWN = """
    from bridge import ACCEPTED, BatchedConfig, Exporter, hookimpl

    class Own(Exporter):
        kind = "own"
        Config = BatchedConfig

        def export(self, batch):
            for _ in range(4):
                self.context.throttle(25_000)
            return ACCEPTED

    @hookimpl
    def register_exporters(register):
        register(Own)
"""


def test_a_plugin_with_connections_of_its_own_waits_for_what_it_throttles(tmp_path: Path) -> None:
    drop_in(tmp_path, "own", OWN)

    async def scenario() -> float:
        async with running(tmp_path, max_bandwidth=CEILING) as gateway:  # 50 kB/s
            gateway.create("a", {"own": [{"identifier": "up"}]})
            began = time.monotonic()
            await gateway.append("a", b"x")
            await gateway.exported("a", 0)
            return time.monotonic() - began

    assert asyncio.run(scenario()) > 1.2  # 100 kB, of which the last quarter may wait


# --- connections that are forgotten


@pytest.mark.parametrize("kind", ["s3", "kinesis", "firehose", "http", "http TLS", "mqtt"])
def test_a_connection_that_a_nat_has_forgotten_is_soon_replaced(
    destinations: Destinations, kind: str
) -> None:
    ((name, (options,)),) = destinations.exports(kind).items()
    export = Direct(name, Link(patience=1.0), **options)
    try:
        export.deliver(0)
        destinations.forwarder.forget()
        began = time.monotonic()
        errors = export.deliver(1)
        took = time.monotonic() - began
    finally:
        export.close()
    assert errors
    assert 0.9 <= took < 25, errors  # and not the time-out for answers, of 30 s or more
    print(f"{kind}: {took:.1f} s: {errors[0]}")


@pytest.mark.slow
def test_a_forgotten_connection_costs_an_export_less_than_20_seconds(tmp_path: Path) -> None:
    kinds = ["s3", "kinesis", "firehose", "IotSitewise", "http", "mqtt"]

    async def scenario(stack: ExitStack) -> dict[str, float]:
        forwarders, took = {}, {}
        lateness = Lateness()
        stack.callback(lateness.close)
        async with running(tmp_path) as gateway:
            for kind in kinds:
                destinations = Destinations(stack, tmp_path)
                gateway.create(kind, destinations.exports(kind))
                forwarders[kind] = destinations.forwarder
                await gateway.append(kind, (entry if kind == "IotSitewise" else payload)(0))
            for kind in kinds:
                await gateway.exported(kind, 0)
            for forwarder in forwarders.values():
                forwarder.forget()
            began = time.monotonic()
            for kind in kinds:
                await gateway.append(kind, (entry if kind == "IotSitewise" else payload)(1))

            def done() -> bool:
                for kind in kinds:
                    if gateway.status(kind).last_exported_sequence_number == 1:
                        took.setdefault(kind, time.monotonic() - began)
                return len(took) == len(kinds)

            await until(done, within=120)
            print({kind: round(seconds, 1) for kind, seconds in took.items()})
            assert max(took.values()) < 20 + lateness.seconds
        return took

    with ExitStack() as stack:
        took = asyncio.run(scenario(stack))
    assert min(took.values()) > 10, "nothing was forgotten"


def test_a_destination_that_vanishes_while_its_answer_is_awaited_is_soon_noticed() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    context = Context(link=Link(patience=1.0))
    uri = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    config = {"identifier": "up", "uri": uri, "timeoutMillis": 600_000}
    exporter = EXPORTERS["http"](convert_config(EXPORTERS["http"], config), context)

    def serve() -> None:
        connection, _ = listener.accept()
        got = b""
        while b"message" not in got:
            got += connection.recv(10_000)
        swallow(connection)
        over.wait()
        connection.close()

    over = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        outcome = attempt(exporter, make_batch([b"message"]))
    finally:
        over.set()
        thread.join()
        exporter.close()
        listener.close()
    assert outcome.retry


def test_a_slow_answer_is_awaited_for_longer_than_a_sign_of_life() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    context = Context(link=Link(patience=1.0))
    uri = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    exporter = EXPORTERS["http"](convert_config(EXPORTERS["http"], {"identifier": "up", "uri": uri}), context)

    def serve() -> None:
        connection, _ = listener.accept()
        got = b""
        while b"message" not in got:
            got += connection.recv(10_000)
        time.sleep(3)
        connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        outcome = attempt(exporter, make_batch([b"message"]))
    finally:
        thread.join()
        exporter.close()
        listener.close()
    assert not outcome.retry


def test_a_connection_that_was_idle_for_long_is_not_used_again(web: Web) -> None:
    for idle, connections in ((60.0, 1), (0.0, 2)):
        export = Direct("http", Link(idle=idle), identifier="up", uri=web.url)
        before = len(web.peers)
        for number in range(2):
            assert export.deliver(number) == []
        export.close()
        assert len(web.peers) - before == connections
