"""Links that are up for short whiles: what an attempt may cost, and what is sent twice."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from benchmarks.testbed.forwarder import Forwarder
from bridge import objectkeys
from bridge.export.sizing import FIRST, Sizing
from bridge.export.wire import Tuning
from tests.export.harness import Bucket, drop_in, numbers, recorded, running, until
from tests.fakes.proxy import Link

RATE = 500_000  # bytes per second
UP, DOWN = 2.0, 1.0  # seconds; as 30 and 15 at 32 kB a second
OBJECT = 1_200_000  # bytes: more than a window lets through
TUNING = Tuning(beat=0.1, silence=20.0, first_backoff=0.03, max_backoff=20.0, drain=2.0)
MESSAGE = 2000


@contextmanager
def link(url: str, up: float, down: float) -> Iterator[Link]:
    made = Link(url, RATE, up, down)
    try:
        yield made
    finally:
        made.close()


def ranges(bucket: Bucket) -> list[tuple[int, int]]:
    names = [name for key in bucket.data_keys() if (name := objectkeys.parse_key(key))]
    return sorted((name.first, name.last) for name in names)


def test_objects_longer_than_a_window_arrive_and_little_is_sent_twice(tmp_path: Path, bucket: Bucket) -> None:
    count = 1600  # 3.2 MB

    async def delivered(name: str, up: float, down: float) -> tuple[float, int]:
        """Seconds until all has arrived, and bytes that were sent."""
        root = tmp_path / name
        root.mkdir()
        with link(bucket.url, up, down) as slow:
            async with running(root, tuning=TUNING) as gateway:
                where = {"prefix": name, "endpointUrl": slow.url, "reportIntervalMillis": 60_000}
                config = bucket.config(**where, sizeHintBytes=OBJECT)
                gateway.create(name, {"s3": [{**config, "disabled": True}]})
                await gateway.append(name, *(os.urandom(MESSAGE) for _ in range(count)))
                began = time.monotonic()
                gateway.update(name, {"s3": [config]})
                await gateway.exported(name, count - 1, within=90)
                return time.monotonic() - began, slow.sent

    async def scenario(number: int) -> tuple[float, float]:
        """How fast the windows were, beside a steady link, and which share of the bytes was sent twice."""
        (steady, needed), (seconds, sent) = await asyncio.gather(
            delivered(f"steady{number}", UP, 0), delivered(f"windows{number}", UP, DOWN)
        )
        # The first window teaches how long windows are. Neither its time nor what was sent in it counts.
        up = (seconds - UP - DOWN) * UP / (UP + DOWN)
        print(f"{steady:.1f} s of a steady link took {up:.1f} s of windows; {sent} bytes for {needed}")
        return steady / up, (sent - needed - RATE * UP) / needed

    for number in range(3):  # a machine that stands still lets windows pass
        speed, twice = asyncio.run(scenario(number))
        if speed >= 0.6 and twice <= 0.1:
            break
    assert speed >= 0.6
    assert twice <= 0.1
    for name in (f"steady{number}", f"windows{number}"):
        keys = [key for key in bucket.data_keys() if key.startswith(f"{name}/")]
        covered = [n for key in keys if (o := objectkeys.parse_key(key)) for n in range(o.first, o.last + 1)]
        assert sorted(covered) == list(range(count)), name  # no hole, and no two objects of one number


def test_the_first_window_of_a_new_export_delivers(tmp_path: Path, bucket: Bucket) -> None:
    async def scenario() -> None:
        async with running(tmp_path, tuning=TUNING) as gateway:
            gateway.create("plant", {"s3": [bucket.config(disabled=True)]})
            await gateway.append("plant", *(os.urandom(MESSAGE) for _ in range(3000)))
            with link(bucket.url, 8, 600) as slow:
                # The size hint is more than this window lets through.
                gateway.update(
                    "plant", {"s3": [bucket.config(endpointUrl=slow.url, sizeHintBytes=5_000_000)]}
                )
                await until(lambda: gateway.status("plant").error_message)
                assert gateway.status("plant").exported_bytes_from_stream >= slow.sent / 2

    asyncio.run(scenario())


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("rate", [10_000, 32_000, 1_000_000])
@pytest.mark.parametrize(("up", "down"), [(30.0, 15.0), (5.0, 60.0)])
def test_the_size_of_an_attempt_follows_the_windows_of_a_link(rate: int, up: float, down: float) -> None:
    """At true rates and times, without a link: what it moves, and what of that was in vain."""
    clock, most, delay = Clock(), int(rate * up * 1.25), 0.05
    sizing = Sizing(FIRST, clock)
    good = vain = first = 0.0
    for window in range(20):
        ends = clock.now + up
        while clock.now < ends:
            size = sizing.limit or most
            takes = size / rate + delay
            if clock.now + takes <= ends:
                clock.now += takes
                sizing.delivered(size, takes, most)
                good += size * (window > 0)
                first += size * (window == 0)
            else:
                vain += (ends - clock.now) * rate * (window > 0)
                takes, clock.now = ends - clock.now, ends
                sizing.cut(size, takes)
        clock.now += down
    assert vain <= 0.1 * (good + vain)
    assert good >= 0.8 * 19 * up * rate
    assert first >= 0.6 * up * rate
    clock.now += up
    for _ in range(10_000):  # the link has become a steady one
        takes = (sizing.limit or most) / rate
        clock.now += takes
        sizing.delivered(sizing.limit or most, takes, most)
    assert sizing.limit is None


def test_a_fast_link_has_no_limit_after_two_small_requests() -> None:
    clock, rate, delay, most = Clock(), 10_000_000, 0.02, 5_000_000
    sizing = Sizing(FIRST, clock)
    sizes = []
    while (size := sizing.limit) is not None:
        sizes.append(size)
        clock.now += size / rate + delay
        sizing.delivered(size, size / rate + delay, most)
    assert len(sizes) == 2
    assert sum(sizes) < most / 5


def test_a_connection_that_broke_after_long_good_times_changes_no_size() -> None:
    clock = Clock()
    sizing = Sizing(clock=clock)
    for _ in range(100):
        clock.now += 1
        sizing.delivered(1_000_000, 1.0, 1_000_000)
    sizing.cut(1_000_000, 0.01)
    assert sizing.limit is None


LOSSY = """
    import os
    from bridge import Retry, hookimpl
    from bridge.plugin import discovery

    S3 = discovery.load().exporters["s3"]

    class Lossy(S3):
        kind = "lossy"

        def export(self, batch):
            outcome = super().export(batch)
            if self.config.size_hint_bytes > 5000:
                raise Retry("the answer is lost", cut=True)
            return outcome

    @hookimpl
    def register_exporters(register):
        register(Lossy)
"""


def test_a_batch_whose_answer_was_lost_keeps_its_name_whatever_is_wanted_by_then(
    tmp_path: Path, bucket: Bucket
) -> None:
    drop_in(tmp_path, "lossy", LOSSY)

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("plant", {"lossy": [bucket.config(sizeHintBytes=10**6)]})
            await gateway.append("plant", *(bytes(1000) for _ in range(10)))
            await gateway.exported("plant", 9)
            assert gateway.status("plant").exported_messages_count == 10
            assert ranges(bucket) == [(0, 9)]
            await gateway.append("plant", *(bytes(1000) for _ in range(10)))
            gateway.update("plant", {"lossy": [bucket.config(sizeHintBytes=2100)]})
            await gateway.exported("plant", 19)

    asyncio.run(scenario())
    found = ranges(bucket)
    assert found[0] == (0, 9)
    covered = [n for first, last in found for n in range(first, last + 1)]
    assert covered == list(range(20))


CUT = """
    from bridge import Retry, hookimpl
    from bridge.plugin import discovery

    S3 = discovery.load().exporters["s3"]

    class Cut(S3):
        kind = "cut"

        def export(self, batch):
            if self.config.size_hint_bytes > 5000:
                raise Retry("the link broke", cut=True)
            return super().export(batch)

    @hookimpl
    def register_exporters(register):
        register(Cut)
"""


def test_an_object_of_another_gateway_stops_a_batch_that_the_link_has_cut(
    tmp_path: Path, bucket: Bucket
) -> None:
    """It is neither taken for the gateway's own, nor avoided by a shorter batch under another name."""
    drop_in(tmp_path, "cut", CUT)

    async def scenario() -> str:
        async with running(tmp_path) as gateway:
            gateway.create("plant", {"cut": [bucket.config(sizeHintBytes=10**6)]})
            await gateway.append("plant", *(bytes(1000) for _ in range(10)))
            await until(lambda: "broke" in (gateway.status("plant").error_message or ""))
            stream = gateway.store.streams["plant"]
            with closing(stream.reader()) as reader:
                (first,) = reader.read(0, end=1, max_messages=1, max_bytes=1)
            name = objectkeys.data_key("gw-1", "plant", stream.epoch, 0, 9, first.ingest_time, "ndjson.gz")
            theirs = {"Key": f"raw/{name}", "Body": b"", "Metadata": {"rows-sha256": "0" * 64}}
            bucket.client.put_object(Bucket=bucket.name, **theirs)
            gateway.update("plant", {"cut": [bucket.config(sizeHintBytes=2100)]})
            await until(lambda: gateway.status("plant").stopped)
            assert gateway.status("plant").last_exported_sequence_number == -1
            return f"raw/{name}"

    key = asyncio.run(scenario())
    assert bucket.data_keys() == [key]
    assert bucket.body(key) == b""


def test_a_smaller_size_counts_for_a_batch_that_has_not_arrived(tmp_path: Path, bucket: Bucket) -> None:
    async def scenario() -> None:
        forwarder = Forwarder(bucket.url)
        try:
            with forwarder.shut():
                async with running(tmp_path) as gateway:
                    gateway.create("plant", {"s3": [bucket.config(endpointUrl=forwarder.url)]})
                    await gateway.append("plant", *(bytes(1000) for _ in range(10)))
                    await until(lambda: gateway.status("plant").error_message)
                    # The forwarder stays shut: only with the new configuration anything arrives.
                    gateway.update("plant", {"s3": [bucket.config(sizeHintBytes=2100)]})
                    await gateway.exported("plant", 9)
        finally:
            forwarder.close()

    asyncio.run(scenario())
    assert ranges(bucket) == [(n, n + 1) for n in range(0, 10, 2)]


FRAGILE = """
    import json
    from bridge import *
    from bridge import hookimpl

    class Config(BatchedConfig, frozen=True):
        path: str

    class Fragile(Exporter):
        kind = "fragile"
        Config = Config

        def export(self, batch):
            if sum(len(record.payload) for record in batch.records) > 5_000:
                raise Retry("the link is gone", cut=True)
            numbers = [record.sequence_number for record in batch.records]
            with open(self.config.path, "a") as out:
                out.write(json.dumps([batch.first, batch.last, numbers, 0]) + chr(10))
            return ACCEPTED

    @hookimpl
    def register_exporters(register):
        register(Fragile)
"""


def test_without_names_a_batch_keeps_its_boundaries_and_goes_in_parts(tmp_path: Path) -> None:
    drop_in(tmp_path, "fragile", FRAGILE)

    async def scenario() -> None:
        async with running(tmp_path, tuning=TUNING) as gateway:
            config = {"identifier": "x", "path": str(tmp_path / "out"), "batchSize": 100}
            gateway.create("a", {"fragile": [{**config, "lingerMillis": 60_000}]})
            await gateway.append("a", *(bytes(120) for _ in range(100)))
            await gateway.exported("a", 99)
            assert gateway.status("a").exported_messages_count == 100
            assert gateway.status("a").skipped_messages_count == 0

    asyncio.run(scenario())
    assert numbers(tmp_path / "out") == list(range(100))
    assert {(first, last) for first, last, _, _ in recorded(tmp_path / "out")} == {(0, 99)}


BUSY = """
    from bridge import ACCEPTED, ExportConfig, Exporter, Retry, hookimpl

    class BusyConfig(ExportConfig, kw_only=True, frozen=True):
        pass

    class Busy(Exporter):
        kind = "busy"
        Config = BusyConfig
        attempts = 0

        def export(self, batch):
            self.attempts += 1
            if self.attempts <= 14:
                raise Retry("no connection", unsent=True, cut=True)
            if self.attempts == 15:
                raise Retry("busy for a moment")
            return ACCEPTED

    @hookimpl
    def register_exporters(register):
        register(Busy)
"""


def test_a_server_that_is_busy_after_an_outage_is_asked_again_soon(tmp_path: Path) -> None:
    drop_in(tmp_path, "busy", BUSY)
    tuning = Tuning(beat=0.1, silence=20.0, first_backoff=0.01, max_backoff=300.0, drain=2.0)

    async def scenario() -> None:
        async with running(tmp_path, tuning=tuning) as gateway:
            gateway.create("a", {"busy": [{"identifier": "x"}]})
            await gateway.append("a", b"1")
            await gateway.exported("a", 0, within=60)  # 15 failures in a row would mean at least 80 s

    asyncio.run(scenario())
