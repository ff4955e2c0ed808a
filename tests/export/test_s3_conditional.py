"""What the `s3` exporter does where an object of its name is there already: it overwrites nothing."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from botocore.response import StreamingBody
from typer.testing import CliRunner

from bridge import Batch, Context, Exporter, Record, Retry, Stopped, objectkeys
from bridge.cli import app
from bridge.export.cursor import stream_directory
from bridge.plugin import discovery
from bridge.plugin.api import convert_config
from bridge.plugin.testing import attempt, deliver, make_batch
from tests.export.harness import Bucket, Gateway, running, until

CLS = discovery.load().exporters["s3"]


def doubled(root: Path) -> Path:
    """A copy of a gateway's data directory, in a root of its own."""
    other = root / "other"
    other.mkdir()
    shutil.copytree(root / "data", other / "data", symlinks=True)
    return other


async def exported(gateway: Gateway, config: dict[str, Any], *payloads: bytes) -> None:
    gateway.update("plant", {"s3": [config]})
    await gateway.append("plant", *payloads)


def make(bucket: Bucket, context: Context | None = None, **more: Any) -> Exporter:
    config = {"identifier": "up", "bucket": bucket.name, "endpointUrl": bucket.url, **more}
    return CLS(convert_config(CLS, config), context or Context())


def other_rows(batch: Batch) -> Batch:
    """A batch of the same name with other messages."""
    fresh = make_batch([b"other"] * len(batch.records), batch.first)
    times = [record.ingest_time for record in batch.records]
    records = [
        Record(r.sequence_number, t, r.topic, r.payload) for r, t in zip(fresh.records, times, strict=True)
    ]
    return Batch(batch.gateway, batch.stream, batch.epoch, batch.first, batch.last, records)


def test_a_doubled_data_directory_overwrites_nothing_and_stops_until_it_is_redefined(
    tmp_path: Path, bucket: Bucket
) -> None:
    async def first() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("plant", {"s3": [bucket.config(disabled=True)]})
        doubled(tmp_path)
        async with running(tmp_path) as gateway:
            await exported(gateway, bucket.config(), b"a0", b"a1")
            await gateway.exported("plant", 1)

    async def second() -> None:
        async with running(tmp_path / "other") as gateway:
            await exported(gateway, bucket.config(), b"b0", b"b1")
            await until(lambda: gateway.status("plant").stopped)
            status = gateway.status("plant")
            assert "nothing was overwritten" in (status.error_message or "")
            assert status.last_exported_sequence_number == -1
            # Neither a new worker nor a new service makes another attempt.
            assert gateway.exports.pid is not None
            os.kill(gateway.exports.pid, signal.SIGKILL)
            await until(lambda: gateway.exports.restarts == 1)
            await gateway.append("plant", b"b2")
        async with running(tmp_path / "other") as gateway:
            await gateway.append("plant", b"b3")
            gateway.create("probe", {"s3": [bucket.config(identifier="p", prefix="probe")]})
            await gateway.append("probe", b"x")
            await gateway.exported("probe", 0)
            assert gateway.status("plant").stopped
            assert gateway.status("plant").last_export_time == status.last_export_time
        looked = CliRunner().invoke(app, ["exports", "--json", "--data-dir", str(tmp_path / "other/data")])
        (row,) = (row for row in json.loads(looked.output) if row["stream"] == "plant")
        assert (row["stopped"], row["errorMessage"]) == (True, status.error_message)
        toml = tmp_path / "other.toml"
        export = f'identifier = "up"\nbucket = "{bucket.name}"\nregion = "eu-west-1"\n'
        export += f'prefix = "raw"\nendpoint_url = "{bucket.url}"\n'
        export += "time_hint_millis = 50\nreport_interval_millis = 20\n"
        gateway_table = f'[gateway]\ndata_dir = "{tmp_path / "other/data"}"\nid = "gw-1"\n'
        where = "[streams.plant]\n[[streams.plant.export.s3]]\n"
        for changed, found in ((export, False), (export.replace('region = "eu-west-1"\n', ""), True)):
            toml.write_text(gateway_table + where + changed, encoding="utf-8")
            checked = CliRunner().invoke(app, ["check", "-c", str(toml)])
            assert ("has stopped" in checked.output) is found, checked.output
        async with running(tmp_path / "other") as gateway:
            gateway.update("plant", {"s3": [bucket.config(prefix="copy")]})
            await gateway.exported("plant", 3)
            assert not gateway.status("plant").stopped
            assert gateway.status("plant").error_message is None

    def rows() -> list[bytes]:
        return [bucket.body(key) for key in bucket.data_keys() if key.startswith("raw/")]

    asyncio.run(first())
    before = rows()
    asyncio.run(second())
    assert rows() == before


def test_a_batch_that_had_arrived_counts_as_delivered_also_with_other_bytes(
    tmp_path: Path, bucket: Bucket
) -> None:
    async def part(create: bool) -> None:
        async with running(tmp_path) as gateway:
            if create:
                gateway.create("plant", {"s3": [bucket.config()]})
                await gateway.append("plant", b"a", b"b")
            await gateway.exported("plant", 1)

    asyncio.run(part(create=True))
    (key,) = bucket.data_keys()
    metadata = bucket.client.head_object(Bucket=bucket.name, Key=key)["Metadata"]
    repacked = gzip.compress(gzip.decompress(bucket.body(key)), 1) + gzip.compress(b"")
    bucket.client.put_object(Bucket=bucket.name, Key=key, Body=repacked, Metadata=metadata)
    for path in stream_directory(tmp_path / "data", "plant").glob("*.cursor"):
        path.unlink()  # as if the worker had died before its note
    asyncio.run(part(create=False))
    assert bucket.body(key) == repacked


@pytest.mark.parametrize("form", ["ndjson", "parquet"])
def test_the_digest_is_that_of_the_rows_in_every_format(bucket: Bucket, form: str) -> None:
    record = Record(7, 1_767_225_600_123, "plant/ü", b"\x00\xff", b"")
    batch = Batch("gw 1", "plant", 1_767_225_600_000, 7, 7, [record])
    deliver(make(bucket, format=form), batch)
    (key,) = bucket.data_keys()
    found = bucket.client.head_object(Bucket=bucket.name, Key=key)["Metadata"]
    line = (
        '{"gateway":"gw 1","stream":"plant","epoch":"1767225600000","sequence_number":7,'
        '"ingest_time":"2026-01-01T00:00:00.123Z","topic":"plant/ü","payload":"AP8="}\n'
    )
    assert found == {"rows-sha256": hashlib.sha256(line.encode()).hexdigest()}
    if form == "ndjson":
        assert gzip.decompress(bucket.body(key)).decode() == line


def test_an_object_without_a_digest_or_of_other_rows_stops_the_export(bucket: Bucket) -> None:
    exporter, batch = make(bucket), make_batch([b"x", b"y"])
    deliver(exporter, batch)
    (key,) = bucket.data_keys()
    with pytest.raises(Stopped, match="other messages"):
        exporter.export(other_rows(batch))
    bucket.client.put_object(Bucket=bucket.name, Key=key, Body=b"of an older version")
    with pytest.raises(Stopped, match="without a digest"):
        exporter.export(batch)
    assert bucket.body(key) == b"of an older version"


def test_an_object_that_an_operator_names_is_replaced_and_no_other(bucket: Bucket) -> None:
    batch = make_batch([b"x", b"y"])
    deliver(make(bucket), batch)
    (key,) = bucket.data_keys()
    etag = bucket.client.put_object(Bucket=bucket.name, Key=key, Body=b"cut short")["ETag"]
    with pytest.raises(Stopped):
        make(bucket, replaceEtag='"0123"').export(batch)
    deliver(make(bucket, replaceEtag=etag.strip('"')), batch)
    assert len(gzip.decompress(bucket.body(key)).splitlines()) == 2
    with pytest.raises(Stopped):  # it was for that one object
        make(bucket, replaceEtag=etag).export(other_rows(batch))


def test_for_stores_without_conditional_requests_objects_are_overwritten(bucket: Bucket) -> None:
    batch = make_batch([b"x"])
    for one in (batch, other_rows(batch)):
        deliver(make(bucket, conditionalPut=False), one)
    (key,) = bucket.data_keys()
    assert b'"b3RoZXI="' in gzip.decompress(bucket.body(key))
    with pytest.raises(ValueError, match="replaceEtag"):
        make(bucket, conditionalPut=False, replaceEtag="0123")


class Refusing(Context):
    """A context whose S3 client fails a call once with an error of the service."""

    def __init__(self, operation: str, status: int, code: str) -> None:
        super().__init__()
        self.fault = operation, status, code

    def client(self, service: str, config: Any, **options: Any) -> Any:
        client = super().client(service, config, **options)
        operation, status, code = self.fault
        return _Faulty(client, operation, status, code)


class _Faulty:
    def __init__(self, client: Any, operation: str, status: int, code: str) -> None:
        self._client, self._left = client, [operation]
        self._answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in self._left:
            self._left.remove(name)
            raise ClientError(self._answer, name)
        call: Callable[..., Any] = getattr(self._client, name)
        return call


def test_a_conflict_of_two_requests_is_tried_again(bucket: Bucket) -> None:
    exporter = make(bucket, Refusing("put_object", 409, "ConditionalRequestConflict"))
    outcome = attempt(exporter, make_batch([b"x"]))
    assert "ConditionalRequestConflict" in outcome.error
    deliver(exporter, make_batch([b"x"]))


def test_without_the_right_to_read_the_error_names_it_and_the_export_waits(bucket: Bucket) -> None:
    batch = make_batch([b"x"])
    exporter = make(bucket, Refusing("head_object", 403, "403"))
    deliver(exporter, batch)
    assert "s3:GetObject" in attempt(exporter, batch).error
    deliver(exporter, batch)


def test_a_store_without_conditional_requests_is_named_with_the_remedy(bucket: Bucket) -> None:
    exporter = make(bucket, Refusing("put_object", 501, "NotImplemented"))
    with pytest.raises(Retry, match="conditional_put = false"):
        exporter.export(make_batch([b"x"]))


def test_the_gateway_report_is_rewritten(tmp_path: Path, bucket: Bucket) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("plant", {"s3": [bucket.config()]})
            for n in range(2):
                await gateway.append("plant", b"x")
                await until(lambda n=n: bucket.reported_exported() == [n])  # type: ignore[misc]

    asyncio.run(scenario())
    assert "raw/" + objectkeys.report_key("gw-1") in bucket.names()


def renumbered(batch: Batch, first: int, last: int, shift: int = 0, payload: bytes | None = None) -> Batch:
    """Messages of a batch as a batch of their own; `shift` is added to their ingest times."""
    records = [
        Record(r.sequence_number, r.ingest_time + shift, r.topic, r.payload if payload is None else payload)
        for r in batch.records
        if first <= r.sequence_number <= last
    ]
    return Batch(batch.gateway, batch.stream, batch.epoch, first, last, records)


@pytest.mark.parametrize("kind", ["ndjson", "parquet"])
@pytest.mark.parametrize(("first", "last"), [(0, 3), (3, 7), (8, 12), (0, 12)])
@pytest.mark.parametrize("days", [0, 1, 40])
def test_a_copy_stops_wherever_its_batches_begin_and_end(
    bucket: Bucket, kind: str, first: int, last: int, days: int
) -> None:
    """Its messages of the same numbers came later, perhaps on another day, so no name is there twice."""
    whole = make_batch([b"%d" % n for n in range(13)], 0)
    make(bucket, format=kind).export(renumbered(whole, 0, 9))
    before = bucket.data_keys()
    copy = renumbered(whole, first, last, shift=86_400_000 * days + 1)
    with pytest.raises(Stopped, match="another gateway has the id"):
        make(bucket, format=kind).export(copy)
    with pytest.raises(Stopped, match="another gateway has the id"):
        make(bucket, format=kind).export(renumbered(whole, first, last, payload=b"other"))
    assert bucket.data_keys() == before


@pytest.mark.parametrize("kind", ["ndjson", "parquet"])
def test_an_export_that_starts_over_may_cut_the_same_messages_otherwise(bucket: Bucket, kind: str) -> None:
    whole = make_batch([b"%d" % n for n in range(13)], 0)
    make(bucket, format=kind).export(renumbered(whole, 0, 9))
    again = make(bucket, format=kind)
    for first, last in ((0, 3), (4, 12)):
        again.export(renumbered(whole, first, last))
    assert len(bucket.data_keys()) == 3


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda body: b"",
    "torn": lambda body: body[: len(body) // 2],
    "a bit": lambda body: body[:-3] + bytes([body[-3] ^ 64]) + body[-2:],
    "no gzip": lambda body: b"x" * 100,
    "no rows": lambda body: gzip.compress(b"[1]\n"),
    "no text": lambda body: gzip.compress(b"\xff\n"),
    "another time": lambda body: gzip.compress(b'{"ingest_time": "9", "sequence_number": 1}\n'),
    "deep": lambda body: gzip.compress(b"[" * 100_000 + b"\n"),
}


@pytest.mark.parametrize("kind", ["ndjson", "parquet"])
@pytest.mark.parametrize("harm", HARMS)
def test_an_object_that_cannot_be_read_is_named_and_neither_stops_the_export_nor_is_changed(
    bucket: Bucket, kind: str, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make_batch([b"%d" % n for n in range(13)], 0)
    make(bucket, format=kind).export(renumbered(whole, 0, 9))
    (key,) = bucket.data_keys()
    harmed = HARMS[harm](bucket.client.get_object(Bucket=bucket.name, Key=key)["Body"].read())
    bucket.client.put_object(Bucket=bucket.name, Key=key, Body=harmed)
    make(bucket, format=kind).export(renumbered(whole, 4, 12))
    assert len(bucket.data_keys()) == 2
    assert bucket.client.get_object(Bucket=bucket.name, Key=key)["Body"].read() == harmed
    (warning,) = (record.message for record in caplog.records if "cannot be read" in record.message)
    assert f"s3://{bucket.name}/{key} has some of the numbers 4 to 12" in warning


@pytest.mark.parametrize("kind", ["ndjson", "parquet"])
def test_an_object_whose_answer_is_cut_off_is_compared_again(bucket: Bucket, kind: str) -> None:
    class Cut(Context):
        cut = True

        def client(self, service: str, config: Any, **options: Any) -> Any:
            client = super().client(service, config, **options)

            def cut(parsed: dict[str, Any], **_: Any) -> None:
                if self.cut:
                    size = int(parsed["ContentLength"])
                    parsed["Body"] = StreamingBody(io.BytesIO(parsed["Body"].read(size // 2)), size)

            client.meta.events.register("after-call.s3.GetObject", cut)
            return client

    whole, context = make_batch([b"%d" % n for n in range(13)], 0), Cut()
    make(bucket, format=kind).export(renumbered(whole, 0, 9))
    again = make(bucket, context, format=kind)
    with pytest.raises(Retry, match="comparing with"):
        again.export(renumbered(whole, 4, 12, payload=b"other"))
    context.cut = False
    with pytest.raises(Stopped, match="another gateway has the id"):
        again.export(renumbered(whole, 4, 12, payload=b"other"))
    assert len(bucket.data_keys()) == 1


def test_an_object_in_which_a_bit_has_changed_is_not_taken_for_one_of_another_gateway(bucket: Bucket) -> None:
    whole = make_batch([b"%d" % n for n in range(13)], 0)
    make(bucket).export(renumbered(whole, 0, 9))
    (key,) = bucket.data_keys()
    body = bucket.client.get_object(Bucket=bucket.name, Key=key)["Body"].read()
    for place in range(0, len(body), 7):
        harmed = body[:place] + bytes([body[place] ^ 4]) + body[place + 1 :]
        bucket.client.put_object(Bucket=bucket.name, Key=key, Body=harmed)
        make(bucket).export(renumbered(whole, 4, 12))


def test_an_object_that_is_deleted_after_it_was_listed_stops_nothing(bucket: Bucket) -> None:
    whole = make_batch([b"%d" % n for n in range(13)], 0)
    make(bucket).export(renumbered(whole, 0, 9))
    (key,) = bucket.data_keys()
    again = make(bucket)
    again.export(renumbered(whole, 10, 10))  # the list is of before
    bucket.client.delete_object(Bucket=bucket.name, Key=key)
    again.export(renumbered(whole, 4, 9))
    assert len(bucket.data_keys()) == 2


class Listing(Context):
    """A context whose S3 client lists by a function, and whose time a test turns."""

    def __init__(self, lists: Callable[..., dict[str, Any]]) -> None:
        super().__init__()
        self.lists, self.time = lists, 1000.0

    def monotonic(self) -> float:
        return self.time

    def client(self, service: str, config: Any, **options: Any) -> Any:
        return _Listing(super().client(service, config, **options), self.lists)  # that one is shared


class _Listing:
    def __init__(self, client: Any, lists: Callable[..., dict[str, Any]]) -> None:
        self._client, self._lists = client, lists

    def list_objects_v2(self, **options: Any) -> dict[str, Any]:
        return self._lists(self._client, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class Pages:
    """Lists a bucket in pages of one entry, and notes what of."""

    def __init__(self) -> None:
        self.of: list[str] = []

    def __call__(self, client: Any, **options: Any) -> dict[str, Any]:
        self.of.append(options["Prefix"])
        page: dict[str, Any] = client.list_objects_v2(MaxKeys=1, **options)
        return page


def test_without_the_right_to_list_an_export_goes_on_and_says_what_it_cannot_notice(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    def deny(client: Any, **_: Any) -> None:
        raise ClientError({"Error": {"Code": "AccessDenied"}}, "ListObjectsV2")

    exporter = make(bucket, Listing(deny))
    for first in range(3):
        exporter.export(make_batch([b"x"], first))
    assert len(bucket.data_keys()) == 3
    assert sum(record.message.count("s3:ListBucket") for record in caplog.records) == 1


DAY_MILLIS = 86_400_000


@pytest.mark.parametrize(
    ("days", "first"),
    [
        ([0, 0, 0, 1, 1], 5),  # several objects on a day
        ([2, 1, 0, 0, 0], 25),  # the clock was set back, and two days beyond have lower numbers
        ([0, 1, 2, 3, 4], 45),  # the newest day
    ],
)
def test_a_copy_stops_on_whatever_page_and_day_the_other_object_is(
    bucket: Bucket, days: list[int], first: int
) -> None:
    whole, first_gateway = make_batch([b"%d" % n for n in range(60)], 0), make(bucket)
    for number, day in enumerate(days):
        first_gateway.export(renumbered(whole, 10 * number, 10 * number + 9, shift=DAY_MILLIS * day))
    folder = objectkeys.epoch_prefix(whole.gateway, whole.stream, whole.epoch)
    for day in range(1, 4):  # that have files of others only
        bucket.client.put_object(Bucket=bucket.name, Key=f"{folder}date=2999-01-0{day}/README", Body=b"")
    copy = make(bucket, Listing(Pages()))
    with pytest.raises(Stopped, match=f"number {first}"):
        copy.export(renumbered(whole, first, first + 4, shift=DAY_MILLIS * 9 + 1))
    assert len(bucket.data_keys()) == len(days)
    copy.export(renumbered(whole, 50, 59))  # the numbers of no other object
    assert len(bucket.data_keys()) == len(days) + 1


def test_a_bucket_is_listed_again_every_ten_minutes_and_back_to_days_with_lower_numbers_only(
    bucket: Bucket,
) -> None:
    whole = make_batch([b"%d" % n for n in range(60)], 0)
    other, pages = make(bucket), Pages()
    for number in range(8):
        other.export(renumbered(whole, number, number, shift=DAY_MILLIS * number))
    context = Listing(pages)
    exporter = make(bucket, context)
    exporter.export(renumbered(whole, 20, 20, shift=DAY_MILLIS * 9))
    days = {prefix for prefix in pages.of if "date=" in prefix}
    assert len(days) == 3, "two more than the first day with lower numbers"
    listed = len(pages.of)
    other.export(renumbered(whole, 21, 25, shift=DAY_MILLIS * 9 + 1))  # after the list
    for minutes in (1, 8):
        context.time += 60 * minutes
        exporter.export(renumbered(whole, 30 + minutes, 30 + minutes))
    assert len(pages.of) == listed
    context.time += 60
    with pytest.raises(Stopped, match="number 24"):
        exporter.export(renumbered(whole, 24, 26))
    assert len(pages.of) > listed
    listed = len(pages.of)
    exporter.export(renumbered(whole, 50, 50))
    assert len(pages.of) == listed, "ten minutes begin anew"


def test_an_object_of_another_name_that_an_operator_names_does_not_count_and_no_other(bucket: Bucket) -> None:
    whole, other = make_batch([b"%d" % n for n in range(20)], 0), make(bucket)
    for first in (0, 10):
        other.export(renumbered(whole, first, first + 9))
    mine = renumbered(whole, 5, 9, payload=b"mine")
    with pytest.raises(Stopped, match="ETag") as stopped:
        make(bucket).export(mine)
    etag = str(stopped.value).rpartition("ETag ")[2]
    with pytest.raises(Stopped, match="number 5"):
        make(bucket, replaceEtag=f"{etag}0").export(mine)
    with pytest.raises(Stopped, match="number 10"):
        make(bucket, replaceEtag=etag).export(renumbered(whole, 5, 14, payload=b"mine"))
    make(bucket, replaceEtag=etag).export(mine)
    assert len(bucket.data_keys()) == 3


def test_an_object_that_adjoins_is_not_compared_and_one_that_shares_a_number_is(bucket: Bucket) -> None:
    whole = make_batch([b"%d" % n for n in range(21)], 0)
    make(bucket).export(renumbered(whole, 5, 14))
    exporter = make(bucket, Refusing("get_object", 500, "InternalError"))
    for first, last in ((0, 4), (15, 20)):
        exporter.export(renumbered(whole, first, last, payload=b"other"))
    assert len(bucket.data_keys()) == 3
    for first, last, shared in ((1, 5, 5), (14, 18, 14)):
        with pytest.raises(Stopped, match=f"number {shared}"):
            make(bucket).export(renumbered(whole, first, last, payload=b"other"))
