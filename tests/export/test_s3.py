"""The `s3` exporter against moto's server: the object contract, retries, the gateway report."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import random
import re
import signal
import threading
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from benchmarks.testbed.forwarder import Forwarder
from bridge import Context, Exporter, objectkeys
from bridge.errors import StreamFull
from bridge.export.cursor import Cursor, CursorFile, stream_directory
from bridge.export.wire import Tuning
from bridge.ingest.decode import decode
from bridge.ingest.errors import BadObject
from bridge.model import MIB
from bridge.operations.reading import ReadMessagesOptions
from bridge.plugin import discovery
from bridge.plugin.api import Progress, convert_config
from bridge.plugin.testing import make_batch
from bridge.streams.drops import DropReason
from tests.export.harness import Bucket, running, until


def test_every_message_is_in_exactly_the_object_that_its_name_promises(
    tmp_path: Path, bucket: Bucket
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("plant 1", {"s3": [bucket.config()]})
            for n in range(5):
                await gateway.append("plant 1", *(f"{n}-{i}".encode() for i in range(40)))
            await gateway.exported("plant 1", 199)

    asyncio.run(scenario())
    found = []
    for key in bucket.data_keys():
        name = objectkeys.parse_key(key)
        assert name is not None
        assert key.startswith("raw/gateway=gw-1/stream=plant%201/")
        rows = bucket.rows(key)
        assert [row["sequence_number"] for row in rows] == list(range(name.first, name.last + 1))
        assert {row["epoch"] for row in rows} == {str(name.epoch)}
        assert {(row["gateway"], row["stream"]) for row in rows} == {("gw-1", "plant 1")}
        found += rows
    assert sorted(row["sequence_number"] for row in found) == list(range(200))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found[0]["ingest_time"])
    payloads = [base64.b64decode(r["payload"]) for r in sorted(found, key=lambda r: r["sequence_number"])]
    assert payloads == [f"{n}-{i}".encode() for n in range(5) for i in range(40)]
    assert found[0]["topic"] == "streams/plant 1"


def test_objects_are_smaller_than_asked_for_where_the_worker_may_not_grow_so_much(
    tmp_path: Path, bucket: Bucket
) -> None:
    small = Tuning(beat=0.05, max_memory=144 * MIB)  # (144 - 96) / 3

    async def scenario() -> None:
        path = stream_directory(tmp_path / "data", "plant") / "up.cursor"
        async with running(tmp_path) as gateway:
            gateway.create("plant", {"s3": [bucket.config(sizeHintBytes=256 * MIB, disabled=True)]})
            await until(lambda: path.exists() and CursorFile.read(path))
        cursor = CursorFile.read(path)
        assert cursor is not None
        file = CursorFile(path)
        file.write(
            msgspec.structs.replace(cursor, limit=0)
        )  # an export that has learned that its link is fast
        file.close()
        async with running(tmp_path, tuning=small, threads=1) as gateway:
            for _ in range(40):
                await gateway.append("plant", os.urandom(MIB))
            gateway.update("plant", {"s3": [bucket.config(sizeHintBytes=256 * MIB)]})
            await gateway.exported("plant", 39)
            assert gateway.exports.restarts == 0

    asyncio.run(scenario())
    assert len(bucket.data_keys()) == 3


def test_parquet_objects_have_the_same_columns(tmp_path: Path, bucket: Bucket) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("plant", {"s3": [bucket.config(format="parquet")]})
            await gateway.append("plant", b"\x00\xff", b"two")
            await gateway.exported("plant", 1)

    asyncio.run(scenario())
    (key,) = bucket.data_keys()
    table = pq.read_table(io.BytesIO(bucket.body(key)), partitioning=None)
    assert table.column_names == [
        *("gateway", "stream", "epoch", "sequence_number", "ingest_time", "topic", "payload")
    ]
    assert table.column("payload").to_pylist() == [b"\x00\xff", b"two"]
    assert str(table.schema.field("ingest_time").type) == "timestamp[us, tz=UTC]"


@pytest.mark.parametrize("form", ["ndjson", "parquet"])
def test_no_flipped_bit_of_an_object_gives_a_wrong_value(tmp_path: Path, bucket: Bucket, form: str) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("plant", {"s3": [bucket.config(format=form)]})
            await gateway.append("plant", *(b"%d %d" % (n, n % 7) for n in range(50)))
            await gateway.exported("plant", 49)

    asyncio.run(scenario())
    key = max(bucket.data_keys(), key=lambda key: len(bucket.body(key)))
    name = objectkeys.parse_key(key)
    assert name is not None
    data = bucket.body(key)
    good = decode(data, name, {})
    reasons = []
    chosen = random.Random(1)
    for _ in range(1500):
        position = chosen.randrange(len(data))
        flipped = bytearray(data)
        flipped[position] ^= 1 << chosen.randrange(8)
        try:
            assert decode(bytes(flipped), name, {}).equals(good), position
        except BadObject as error:  # it would be quarantined with this reason
            reasons.append(str(error))
    assert len(reasons) > 1000
    assert form == "ndjson" or sum("CRC checksum verification failed" in why for why in reasons) > 200


def test_after_sigkill_the_batch_is_sent_again_under_the_same_name(tmp_path: Path, bucket: Bucket) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("plant", {"s3": [bucket.config(timeHintMillis=20)]})
            for n in range(60):
                await gateway.append("plant", *(b"%d" % i for i in range(10)))
                if n % 20 == 10:
                    await until(lambda: gateway.exports.pid)
                    assert gateway.exports.pid
                    os.kill(gateway.exports.pid, signal.SIGKILL)
                await asyncio.sleep(0.02)
            await gateway.exported("plant", 599)
            await until(lambda: gateway.exports.restarts >= 3)

    asyncio.run(scenario())
    names = [name for key in bucket.data_keys() if (name := objectkeys.parse_key(key))]
    covered = [n for name in names for n in range(name.first, name.last + 1)]
    assert sorted(covered) == list(range(600))  # no hole, and no overlap: boundaries stayed the same


def test_a_restarted_gateway_resumes_where_it_was(tmp_path: Path, bucket: Bucket) -> None:
    async def part(create: bool, last: int) -> None:
        async with running(tmp_path) as gateway:
            if create:
                gateway.create("plant", {"s3": [bucket.config()]})
            await gateway.append("plant", b"a", b"b")
            await gateway.exported("plant", last)

    asyncio.run(part(True, 1))
    before = bucket.data_keys()
    asyncio.run(part(False, 3))
    assert len(bucket.data_keys()) == len(before) + 1


def test_an_object_is_due_by_size_or_by_time_whichever_comes_first(tmp_path: Path, bucket: Bucket) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("plant", {"s3": [bucket.config(sizeHintBytes=10_000, timeHintMillis=600_000)]})
            await gateway.append("plant", *(bytes(1000) for _ in range(5)))
            await asyncio.sleep(0)
            await gateway.append("plant", *(bytes(1000) for _ in range(20)))
            await gateway.exported("plant", 8)
            await until(lambda: len(bucket.data_keys()) == 2)

    asyncio.run(scenario())
    names = [name for key in bucket.data_keys() if (name := objectkeys.parse_key(key))]
    assert sorted((name.first, name.last) for name in names) == [(0, 8), (9, 17)]  # 18 to 24 wait for time


def test_dropped_messages_split_objects_and_are_in_the_gateway_report(tmp_path: Path, bucket: Bucket) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            config = bucket.config(disabled=True)
            gateway.create("plant", {"s3": [config]})
            await gateway.append("plant", *(b"%d" % n for n in range(10)))
            stream = gateway.store.streams["plant"]
            stream.drop([(0, 1), (4, 5)], DropReason.PURGED)
            await gateway.manager.refresh()
            gateway.update("plant", {"s3": [{**config, "disabled": False}]})
            await gateway.exported("plant", 9)
            await until(lambda: bucket.reported_exported() == [9])

    asyncio.run(scenario())
    names = [name for key in bucket.data_keys() if (name := objectkeys.parse_key(key))]
    assert sorted((name.first, name.last) for name in names) == [(2, 3), (6, 9)]
    (stream,) = bucket.report()["streams"]
    assert stream["dropped"] == [[0, 1, "purged"], [4, 5, "purged"]]
    assert (stream["stream"], stream["oldest"], stream["newest"]) == ("plant", 2, 9)


def test_the_gateway_report_lists_all_streams_with_the_same_destination(
    tmp_path: Path, bucket: Bucket
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            for name in ("a", "b"):
                gateway.create(name, {"s3": [bucket.config()]})
            gateway.create("c", {"s3": [bucket.config(prefix="elsewhere")]})
            for name in ("a", "b", "c"):
                await gateway.append(name, b"x")
                await gateway.exported(name, 0)

    asyncio.run(scenario())
    report = bucket.report()
    assert [(s["stream"], s["exported"]) for s in report["streams"]] == [("a", 0), ("b", 0)]
    assert report["gateway"] == "gw-1"


def test_drops_without_an_upload_are_in_the_gateway_report(tmp_path: Path, bucket: Bucket) -> None:
    async def scenario() -> None:
        forwarder = Forwarder(bucket.url)
        try:
            async with running(tmp_path) as gateway:
                config = bucket.config(endpointUrl=forwarder.url)
                gateway.create("plant", {"s3": [config]}, timeToLiveMillis=60_000)
                await gateway.append("plant", b"0", b"1")
                await until(lambda: bucket.reported_exported() == [1])
                with forwarder.shut():
                    await gateway.append("plant", *(b"%d" % n for n in range(2, 12)))
                    await until(lambda: gateway.status("plant").error_message)
                    in_a_minute = gateway.store.clock.now() + 61_000
                    gateway.store.streams["plant"].maintain(in_a_minute)
                    await gateway.manager.refresh()
                await until(lambda: bucket.reported_exported() == [11], describe=lambda: str(bucket.report()))
                (stream,) = bucket.report()["streams"]
                assert stream["dropped"] == [[2, 11, "expired"]]
                assert stream["newest"] == 11
        finally:
            forwarder.close()

    asyncio.run(scenario())


def test_a_deleted_stream_is_not_in_the_gateway_report(tmp_path: Path, bucket: Bucket) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            for name in ("a", "b"):
                gateway.create(name, {"s3": [bucket.config()]})
                await gateway.append(name, b"x")
            await until(lambda: bucket.reported_exported() == [0, 0])
            gateway.manager.delete("a")
            await until(lambda: [s["stream"] for s in bucket.report()["streams"]] == ["b"])
            gateway.update("b", {})
            await until(lambda: not bucket.report()["streams"])

    asyncio.run(scenario())


def test_what_is_before_the_start_of_an_export_is_not_taken_for_lost(tmp_path: Path, bucket: Bucket) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            config = bucket.config(startSequenceNumber=7, disabled=True)
            gateway.create("plant", {"s3": [config]})
            await gateway.append("plant", *(b"%d" % n for n in range(10)))
            gateway.store.streams["plant"].drop([(8, 8)], DropReason.PURGED)
            await gateway.manager.refresh()
            gateway.update("plant", {"s3": [{**config, "disabled": False}]})
            await until(lambda: bucket.reported_exported() == [9])
            (stream,) = bucket.report()["streams"]
            assert stream["dropped"] == [[0, 6, "before_start"], [8, 8, "purged"]]
            # The start moves: what is in between is in objects already, which counts.
            await gateway.append("plant", b"10", b"11")
            gateway.update("plant", {"s3": [{**config, "disabled": False, "startSequenceNumber": 9}]})
            wanted = [[0, 7, "before_start"], [8, 8, "purged"]]
            await until(lambda: bucket.report()["streams"][0]["dropped"] == wanted)

    asyncio.run(scenario())


def test_storage_options_are_passed_on(tmp_path: Path, bucket: Bucket) -> None:
    options = {
        "storageClass": "STANDARD_IA",
        "serverSideEncryption": "aws:kms",
        "kmsKeyId": "alias/key",
        "checksumAlgorithm": "SHA256",
    }

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("plant", {"s3": [bucket.config(**options)]})
            await gateway.append("plant", b"x")
            await gateway.exported("plant", 0)

    asyncio.run(scenario())
    (key,) = bucket.data_keys()
    found = bucket.client.head_object(Bucket=bucket.name, Key=key, ChecksumMode="ENABLED")
    assert found["StorageClass"] == "STANDARD_IA"
    assert found["ServerSideEncryption"] == "aws:kms"
    assert "ChecksumSHA256" in found


def test_an_export_sends_the_last_number_and_reports_it(tmp_path: Path, bucket: Bucket) -> None:
    """The cursor says that all numbers before were sent, as that of a very old gateway would."""
    last = objectkeys.MAX_SEQUENCE

    async def scenario() -> None:
        exports = {"s3": [bucket.config(startSequenceNumber=last - 2)]}
        async with running(tmp_path) as gateway:
            gateway.create("plant", exports)
            await until(lambda: (tmp_path / "data/exports/plant/up.cursor").exists())
            epoch = gateway.store.streams["plant"].epoch
        file = CursorFile(tmp_path / "data/exports/plant/up.cursor")
        known = Cursor(epoch=epoch, kind="s3", start=last - 2, position=last - 2, reached=last - 3)
        file.write(known)
        file.close()
        async with running(tmp_path) as gateway:
            await gateway.append("plant", b"a", b"b", b"c")
            await gateway.exported("plant", last)
            with pytest.raises(StreamFull, match="last sequence number"):
                await gateway.append("plant", b"d")
            status = gateway.manager.describe("plant").storage_status
            assert (status.oldest_sequence_number, status.newest_sequence_number) == (last - 2, last)
            (row,) = await gateway.manager.read(
                "plant", ReadMessagesOptions(desired_start_sequence_number=last)
            )
            assert (row.sequence_number, row.payload) == (last, b"c")
            await until(lambda: bucket.reported_exported() == [last])
        async with running(tmp_path) as gateway:
            assert gateway.store.streams["plant"].next_sequence == last + 1
            await gateway.exported("plant", last)

    asyncio.run(scenario())
    assert [row["sequence_number"] for key in bucket.data_keys() for row in bucket.rows(key)] == [
        last - 2, last - 1, last,
    ]  # fmt: skip
    (stream,) = bucket.report()["streams"]
    assert (stream["newest"], stream["dropped"]) == (last, [[0, last - 3, "before_start"]])


def test_the_gateway_report_is_written_while_a_backlog_goes_out(bucket: Bucket) -> None:
    """The ingest job looks for new objects where a report says so, and a backlog may take days."""

    class Busy(Context):
        time = 1000.0
        sent = -1
        exporter: Exporter

        def monotonic(self) -> float:
            return self.time

        def exports(self) -> list[Progress]:
            config = self.exporter.config
            return [
                Progress(
                    stream="stream",
                    epoch=1,
                    identifier="up",
                    config=config,
                    oldest=0,
                    newest=99,
                    exported=self.sent,
                    skipped=[],
                )
            ]

    context, kind = Busy("gw-1", "stream", 1), discovery.load().exporters["s3"]
    config = convert_config(kind, bucket.config(reportIntervalMillis=10_000))
    context.exporter = kind(config, context)
    seen = []
    for number in range(5):
        context.exporter.export(make_batch([b"x"], first=number))
        context.sent = number
        context.time += 25
        seen.append(bucket.reported_exported())
    assert seen == [[], [], [], [2], [2]]  # a minute after the start, without the batch of the moment
    assert bucket.report()["version"]


def test_what_is_uploaded_while_the_gateway_report_is_written_is_in_the_next_one(bucket: Bucket) -> None:
    class Racing(Context):
        time = 1000.0
        sent = -1
        late: threading.Thread | None = None  # is idle while the first report is written

        def monotonic(self) -> float:
            now = self.time
            if threading.current_thread() is self.late:
                entered.set()
            return now

        def exports(self) -> list[Progress]:
            exported = self.sent
            if self.late is None:
                self.sent, self.time = 0, 1001.0
                self.late = threading.Thread(target=other.idle)
                self.late.start()
                assert entered.wait(60)
                self.time = 1002.0
            return [
                Progress(
                    stream="stream",
                    epoch=1,
                    identifier="up",
                    config=config,
                    oldest=0,
                    newest=0,
                    exported=exported,
                    skipped=[],
                )
            ]

    context, kind, entered = Racing("gw-1", "stream", 1), discovery.load().exporters["s3"], threading.Event()
    config = convert_config(kind, bucket.config(reportIntervalMillis=10_000))
    one, other = kind(config, context), kind(config, context)
    one.idle()
    assert context.late is not None
    context.late.join()
    assert bucket.reported_exported() == [-1]
    context.time += 20
    other.idle()
    assert bucket.reported_exported() == [0]
