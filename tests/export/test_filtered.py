"""Filters of exports that write objects: an object declares what they leave out, in each attempt the same."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bridge import ExportConfig, Record, TransformState, objectkeys
from bridge.errors import InvalidDefinition
from bridge.export.wire import Tuning
from bridge.filtered import PARQUET_KEY, from_extra, left_out
from bridge.ingest.job import ingest
from bridge.ingest.report import Report
from bridge.ingest.store import StorageLocation
from bridge.ingest.table import TableOptions, open_sink
from bridge.operations.manager import committed
from bridge.plugin import discovery
from bridge.plugin.reduction import Reduction
from bridge.topics import matches
from tests.export.harness import Bucket, Gateway, drop_in, running, until
from tests.export.test_reduce import MORTAL, RULES, attempts, readings, transformed
from tests.ingest.test_verdict import InProcess

QUICK = Tuning(beat=0.1, silence=20.0, first_backoff=0.02, max_backoff=0.05, drain=1.0)


async def publish(gateway: Gateway, name: str, rows: Sequence[tuple[str, bytes]]) -> None:
    """Append a message for each, in one commit group."""
    stream = gateway.store.streams[name]
    for topic, payload in rows:
        stream.append(topic.encode(), payload)
    await committed(stream)


def topics(*names: str) -> list[tuple[str, bytes]]:
    return [(name, b"x") for name in names]


def lacking(bucket: Bucket, key: str) -> list[int]:
    """The numbers that an object declares as left out."""
    name = objectkeys.parse_key(key)
    assert name is not None
    body = bucket.body(key)
    if name.format == "parquet":
        metadata = pq.ParquetFile(pa.BufferReader(body)).metadata.metadata
        declared = base64.b64decode(metadata[PARQUET_KEY]) if PARQUET_KEY in metadata else None
    else:
        declared = from_extra(body)
    if declared is None:
        return []
    bits = int.from_bytes(left_out(declared, name.first, name.last).bitmap, "little")
    return [number for number in range(name.first, name.last + 1) if bits >> number - name.first & 1]


def present(bucket: Bucket, key: str) -> list[int]:
    if key.endswith(".parquet"):
        table = pq.read_table(pa.BufferReader(bucket.body(key)), columns=["sequence_number"])
        return list(table["sequence_number"].to_pylist())
    return [row["sequence_number"] for row in bucket.rows(key)]


def spans(bucket: Bucket) -> list[tuple[int, int]]:
    """What the objects cover, after a look at whether they hold what they do not declare."""
    found = []
    for key in sorted(bucket.data_keys()):
        name = objectkeys.parse_key(key)
        assert name is not None
        everything = range(name.first, name.last + 1)
        assert sorted([*present(bucket, key), *lacking(bucket, key)]) == list(everything)
        found.append((name.first, name.last))
    return sorted(found)


def reported(bucket: Bucket) -> list[list[Any]]:
    """What the gateway report says was never uploaded."""
    dropped: list[list[Any]] = bucket.report()["streams"][0]["dropped"]
    return dropped


def table_of(bucket: Bucket, root: Path) -> Report:
    """The report of a run of the ingest job on the bucket."""
    sink = open_sink(TableOptions(warehouse=str(root / "lake")))
    source = StorageLocation(f"s3://{bucket.name}/raw", bucket.url)
    return ingest(InProcess, source, sink, full_every=0).report


@pytest.mark.parametrize("form", ["ndjson", "parquet"])
def test_an_object_has_the_messages_of_its_topics_and_declares_the_others(
    tmp_path: Path, bucket: Bucket, form: str
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            config = bucket.config(topics=["wanted/#"], format=form)
            gateway.create("a", {"s3": [config | {"disabled": True}]})
            await publish(gateway, "a", topics("other", "wanted/1", "other", "other", "wanted/2", "other"))
            gateway.update("a", {"s3": [config]})
            await gateway.exported("a", 5)
            assert gateway.status("a").exported_messages_count == 2
            assert gateway.status("a").skipped_messages_count == 4
            await until(lambda: bucket.reported_exported() == [5])

    asyncio.run(scenario())
    assert spans(bucket) == [(0, 5)]
    (key,) = bucket.data_keys()
    assert (present(bucket, key), lacking(bucket, key)) == ([1, 4], [0, 2, 3, 5])
    assert reported(bucket) == []
    report = table_of(bucket, tmp_path)
    assert (report.complete, report.total("rows"), report.total("trimmed")) == (True, 2, 4)


def test_without_filters_an_object_declares_nothing(tmp_path: Path, bucket: Bucket) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("a", {"s3": [bucket.config(topics=["#"])]})
            await publish(gateway, "a", topics(*"abc"))
            await gateway.exported("a", 2)

    asyncio.run(scenario())
    (key,) = bucket.data_keys()
    assert from_extra(bucket.body(key)) is None


def test_what_has_no_message_of_the_topics_makes_no_object_and_is_one_range_of_the_report(
    tmp_path: Path, bucket: Bucket
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            config = bucket.config(topics=["wanted"])
            gateway.create("a", {"s3": [config]}, retention="exported")
            for n in range(3):
                await publish(gateway, "a", topics(*["other"] * 10))
                await gateway.exported("a", 10 * n + 9)
            assert gateway.exports.exported_upto("a") == 30
            await publish(gateway, "a", topics("other", "wanted"))
            await gateway.exported("a", 31)
            await until(lambda: bucket.reported_exported() == [31])

    asyncio.run(scenario())
    found = spans(bucket)
    assert found[-1][1] == 31
    assert [reason for *_, reason in reported(bucket)] == ["filtered"]
    assert reported(bucket)[0][:2] == [0, found[0][0] - 1]
    report = table_of(bucket, tmp_path)
    assert (report.complete, report.total("rows"), report.total("trimmed")) == (True, 1, 31)


def test_few_messages_among_many_make_few_objects(tmp_path: Path, bucket: Bucket) -> None:
    names = ["wanted" if n % 1000 == 7 else "other" for n in range(50_000)]

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("a", {"s3": [bucket.config(topics=["wanted"], disabled=True)]})
            await publish(gateway, "a", topics(*names))
            gateway.update("a", {"s3": [bucket.config(topics=["wanted"])]})
            await gateway.exported("a", 49_999)

    asyncio.run(scenario())
    assert spans(bucket) == [(0, 49_999)]


def test_an_object_still_ends_where_messages_were_dropped_and_these_are_reported_as_such(
    tmp_path: Path, bucket: Bucket
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            config = bucket.config(topics=["wanted"])
            gateway.create("a", {"s3": [{**config, "disabled": True}]})
            for group in range(3):
                rows = [
                    ("wanted" if n % 2 else "other", b"message-%02d" % (10 * group + n)) for n in range(10)
                ]
                await publish(gateway, "a", rows)
            gateway.flip("a", b"message-15")
            gateway.update("a", {"s3": [config]})
            await gateway.exported("a", 29)
            await until(lambda: bucket.reported_exported() == [29])

    asyncio.run(scenario())
    assert spans(bucket) == [(0, 9), (20, 29)]
    assert reported(bucket) == [[10, 19, "damaged"]]
    report = table_of(bucket, tmp_path)
    assert (report.complete, report.total("missing"), report.total("trimmed")) == (False, 10, 10)


def test_other_topics_apply_from_the_next_object_on(tmp_path: Path, bucket: Bucket) -> None:
    """An object that waits is sent with the topics of its first attempt."""
    bucket.remove()

    async def scenario() -> None:
        async with running(tmp_path, tuning=QUICK) as gateway:
            gateway.create("a", {"s3": [bucket.config(topics=["one"])]})
            await publish(gateway, "a", topics("one", "two", "one", "two"))
            await until(lambda: gateway.status("a").error_message)
            gateway.update("a", {"s3": [bucket.config(topics=["two"])]})
        async with running(tmp_path, tuning=QUICK) as gateway:
            await until(lambda: gateway.status("a").error_message)
            bucket.make()
            await gateway.exported("a", 3)
            await publish(gateway, "a", topics("one", "two"))
            await gateway.exported("a", 5)

    asyncio.run(scenario())
    assert spans(bucket) == [(0, 3), (4, 5)]
    assert [present(bucket, key) for key in sorted(bucket.data_keys())] == [[0, 2], [5]]


def test_a_shorter_object_after_a_smaller_hint_declares_what_it_lacks(tmp_path: Path, bucket: Bucket) -> None:
    bucket.remove()

    async def scenario() -> None:
        async with running(tmp_path, tuning=QUICK) as gateway:
            gateway.create("a", {"s3": [bucket.config(topics=["w"])]})
            rows = [("w" if n % 3 else "other", bytes(100)) for n in range(30)]
            await publish(gateway, "a", rows)
            await until(lambda: gateway.status("a").error_message)
            gateway.update("a", {"s3": [bucket.config(topics=["w"], sizeHintBytes=450)]})
        async with running(tmp_path, tuning=QUICK) as gateway:
            await until(lambda: gateway.status("a").error_message)
            bucket.make()
            await gateway.exported("a", 29)

    asyncio.run(scenario())
    found = spans(bucket)
    assert len(found) > 3
    assert [first for first, _ in found[1:]] == [last + 1 for _, last in found[:-1]]


def test_rules_make_one_object_and_not_one_for_each_run_of_messages(tmp_path: Path, bucket: Bucket) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            config = bucket.config(reduce=RULES)
            gateway.create("a", {"s3": [config | {"disabled": True}]})
            await publish(gateway, "a", readings(2000))
            gateway.update("a", {"s3": [config]})
            await gateway.exported("a", 1999)

    asyncio.run(scenario())
    assert len(spans(bucket)) < 10  # the first ones are smaller than the hint
    report = table_of(bucket, tmp_path)
    assert report.complete
    assert 100 < report.total("rows") < 1500
    assert report.total("rows") + report.total("trimmed") == 2000


# -- the same objects in every attempt -----------------------------------------------------------

OBJECTS = MORTAL.replace(
    "        Config = Config\n",
    "        Config = Config\n"
    "        limits = BatchLimits(records=8, contiguous=True, declares_filtered=True)\n",
)
TOPICS = ["s/0", "s/3", "s/4"]


def kept(records: list[Record]) -> list[tuple[int, str]]:
    """What topics and rules leave."""
    config = ExportConfig(identifier="m", reduce=[Reduction(**_snake(rule)) for rule in RULES])
    wanted = [record for record in records if any(matches(one, record.topic) for one in TOPICS)]
    return [
        (record.sequence_number, record.payload.decode())
        for record in transformed(wanted, config, TransformState())
    ]


def _snake(rule: dict[str, Any]) -> dict[str, Any]:
    return {("longest_silence_millis" if key == "longestSilenceMillis" else key): rule[key] for key in rule}


def killed_at_every(step: int, root: Path, count: int) -> None:
    """The worker dies at its step 1, 2, 3 ... (times `step`), and each object is what it should be."""
    drop_in(root, "mortal", OBJECTS.replace("{root}", str(root)).replace("{every}", str(step)))
    rows = readings(count)

    async def scenario() -> list[int]:
        async with running(root, tuning=QUICK) as gateway:
            export = {"identifier": "m", "path": str(root / "out"), "topics": TOPICS, "reduce": RULES}
            gateway.create("a", {"mortal": [{**export, "lingerMillis": 1}]})
            for at in range(0, count, 40):
                await publish(gateway, "a", rows[at : at + 40])
            await gateway.exported("a", count - 1, 300)
            status = gateway.status("a")
            assert status.exported_messages_count + status.skipped_messages_count == count
            with closing(gateway.store.streams["a"].reader()) as reader:
                found = reader.read(0, end=count, max_messages=count, max_bytes=2**30)
            return [row.ingest_time for row in found]

    times = asyncio.run(scenario())
    assert (root / "lives").stat().st_size > 3
    found: dict[int, tuple[int, list[tuple[int, str]]]] = {}
    for first, last, sent in attempts(root / "out"):
        assert found.setdefault(first, (last, sent)) == (last, sent), "a retry was another object"
    records = [Record(n, times[n], topic, payload) for n, (topic, payload) in enumerate(rows)]
    ordered = sorted((first, *rest) for first, rest in found.items())
    assert [row for _, _, sent in ordered for row in sent] == kept(records)
    for (_, last, _), (following, _, _) in pairwise(ordered):
        assert last < following
    for first, last, sent in ordered:
        assert first <= sent[0][0] <= sent[-1][0] <= last


def test_a_worker_that_is_killed_sends_the_same_objects_again(tmp_path: Path) -> None:
    killed_at_every(11, tmp_path, 120)


@pytest.mark.slow
def test_a_worker_that_is_killed_at_every_step_sends_the_same_objects_again(tmp_path: Path) -> None:
    killed_at_every(1, tmp_path, 240)


# -- definitions -----------------------------------------------------------------------------------


def test_topics_that_do_not_fit_with_the_position_are_refused() -> None:
    registry = discovery.load()
    base = {"identifier": "x", "bucket": "bucket"}
    assert registry.config("s3", {**base, "topics": ["a/+", "#"]}).topics == ["a/+", "#"]
    with pytest.raises(InvalidDefinition) as error:
        registry.config("s3", {**base, "topics": [f"{n}/" + "x" * 100 for n in range(200)]})
    assert "may have 16384" in error.value.sentence("")


def test_a_kind_that_cannot_declare_what_is_left_out_takes_no_topics(tmp_path: Path) -> None:
    drop_in(tmp_path, "mortal", OBJECTS.replace(", declares_filtered=True", ""))
    registry = discovery.load([tmp_path / "plugins"])
    with pytest.raises(InvalidDefinition) as error:
        registry.config("mortal", {"identifier": "x", "path": "x", "topics": ["a"]})
    assert "an export of the kind mortal has all messages of its stream" in error.value.sentence("")


def test_the_report_of_the_gateway_and_the_objects_never_disagree(tmp_path: Path, bucket: Bucket) -> None:
    """Objects, passed numbers and drops together are all numbers, each once."""

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("a", {"s3": [bucket.config(topics=["w"], timeHintMillis=5)]})
            for n in range(60):
                await publish(
                    gateway, "a", topics(*["w" if n % 7 == 3 and m == 4 else "o" for m in range(9)])
                )
                if n % 10 == 0:
                    await gateway.exported("a", 9 * n + 8)
            await gateway.exported("a", 539)
            await until(lambda: bucket.reported_exported() == [539])

    asyncio.run(scenario())
    parts = [*spans(bucket), *((first, last) for first, last, _ in reported(bucket))]
    assert sorted(n for first, last in parts for n in range(first, last + 1)) == list(range(540))
    assert json.dumps(reported(bucket)).count("filtered") == len(reported(bucket))
    assert table_of(bucket, tmp_path).complete


def test_after_a_power_cut_no_message_gets_a_number_that_an_export_has_passed(
    tmp_path: Path, bucket: Bucket
) -> None:
    """Otherwise it would never be exported: the position is behind it."""
    export = {"s3": [bucket.config(topics=["wanted"], timeHintMillis=5)]}

    async def before() -> tuple[Path, int]:
        async with running(tmp_path) as gateway:
            gateway.create("a", export)
            await publish(gateway, "a", topics("other"))
            (segment,) = gateway.store.streams["a"].directory.glob("*.seg")
            size = segment.stat().st_size
            await publish(gateway, "a", topics(*["other"] * 4))
            await gateway.exported("a", 4)
            return segment, size

    async def after() -> int:
        async with running(tmp_path) as gateway:
            await publish(gateway, "a", topics("wanted"))
            number = gateway.store.streams["a"].next_sequence - 1
            await gateway.exported("a", number)
            return number

    segment, size = asyncio.run(before())
    with segment.open("r+b") as file:
        file.truncate(size)
    number = asyncio.run(after())
    assert number == 5
    assert [present(bucket, key) for key in bucket.data_keys()] == [[5]]
