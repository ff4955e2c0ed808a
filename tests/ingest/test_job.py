"""The whole chain: objects in, table out. Each test reads the table back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest

from bridge.ingest.errors import IngestError
from bridge.ingest.job import run
from bridge.ingest.planner import RoundLimits
from bridge.ingest.state import Quarantined, StateStore, TableState
from bridge.ingest.store import Entry, LocalStore, StorageLocation
from bridge.ingest.upkeep import accept
from tests.ingest.conftest import Intercepted
from tests.ingest.gateway import EPOCH, Gateway, ndjson, reported, rows

pytestmark = pytest.mark.spark
Sink = Callable[[], Any]


def taken(sink: Any) -> Counter[tuple[str, str, str, int]]:
    table = sink.read(["gateway", "stream", "epoch", "sequence_number"])
    return Counter(tuple(row.values()) for row in table.to_pylist())  # type: ignore[misc]


def numbers(sink: Any) -> list[int]:
    return sorted(sink.read(["sequence_number"])["sequence_number"].to_pylist())


def test_every_message_of_both_formats_is_in_the_table_unchanged(
    spark: Any, bucket: StorageLocation, sink: Sink
) -> None:
    gateway = Gateway(bucket)
    gateway.export(0, 99)
    gateway.export(100, 199, form="parquet")
    summary = run(spark, bucket, sink())
    assert (summary.rows, summary.objects, summary.report.complete) == (200, 2, True)
    table = sink().read().sort_by("sequence_number")
    row = table.slice(150, 1).to_pylist()[0]
    assert row["ingest_time"].isoformat() == "2026-11-18T11:09:10+00:00"
    for name in ("ingest_time", "ingest_date"):  # the second is Delta's partition
        row.pop(name, None)
    assert row == {
        "gateway": "gw-a",
        "stream": "s0",
        "epoch": str(EPOCH),
        "sequence_number": 150,
        "topic": "plant/gw-a/s0",
        "payload": b'{"n":150,"temp":20.00}',
        "object_key": row["object_key"],
    }
    assert row["object_key"].endswith("/00000000000000000100-00000000000000000199.parquet")
    assert table["payload"].to_pylist()[7] == b'{"n":7,"temp":20.70}'


def test_a_second_run_with_nothing_new_adds_nothing(spark: Any, landing: StorageLocation, sink: Sink) -> None:
    Gateway(landing).export(0, 99)
    run(spark, landing, sink())
    before = sink().pointer()
    summary = run(spark, landing, sink())
    assert (summary.rows, summary.rounds, sink().pointer()) == (0, [], before)
    assert numbers(sink()) == list(range(100))


def test_only_new_objects_are_read(spark: Any, landing: StorageLocation, sink: Sink) -> None:
    gateway = Gateway(landing)
    old = gateway.export(0, 99)
    run(spark, landing, sink())
    gateway.store.put(old, b"whoever reads this again would quarantine it")
    gateway.export(100, 149)
    summary = run(spark, landing, sink())
    assert (summary.rows, summary.objects, summary.quarantined) == (50, 1, 0)
    assert numbers(sink()) == list(range(150))


def test_duplicates_of_all_kinds_are_stored_once(spark: Any, landing: StorageLocation, sink: Sink) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 99)
    gateway.export(0, 99, form="parquet")  # the same range in another object
    gateway.export(0, 99, hour_of=90_000)  # and under another hour
    gateway.export(50, 149)  # an overlap
    gateway.export(100, 109)  # the same numbers cut elsewhere
    gateway.export(110, 160)
    gateway.export(0, 160, form="parquet")  # one that swallows all
    summary = run(spark, landing, sink(), RoundLimits(objects=2))
    assert numbers(sink()) == list(range(161))
    assert summary.report.streams[0].duplicates == 100 * 4 + 10 + 51 + 161 - 161
    assert summary.report.complete


def test_bad_objects_are_quarantined_with_a_reason_and_stop_nothing(
    spark: Any, bucket: StorageLocation, sink: Sink
) -> None:
    gateway = Gateway(bucket)
    gateway.export(0, 99)
    good = gateway.store.get(gateway.export(100, 199, form="parquet"))
    truncated = gateway.export(100, 199, form="parquet", data=good[:-50])
    packed = gateway.store.get(gateway.export(200, 299))
    cut = gateway.export(200, 299, data=packed[: len(packed) // 2])
    empty = gateway.export(300, 399, data=b"")
    lying = gateway.export(400, 499, data=gateway.store.get(gateway.export(400, 450)))
    gateway.store.delete([gateway.export(400, 450)])
    foreign = Gateway(bucket, "gw-b").export(0, 99, data=packed)
    gateway.export(500, 509)
    gateway.store.put("notes.txt", b"hello")
    summary = run(spark, bucket, sink())
    assert numbers(sink()) == [*range(100), *range(500, 510)]
    reasons = {document["key"]: document["reason"] for document in summary.report.refused}
    assert set(reasons) == {truncated, cut, empty, lying, foreign}
    assert reasons[cut] == "truncated: the gzip stream has no end"
    assert reasons[empty] == "empty: 0 bytes"
    assert reasons[lying] == "51 rows, but the key promises 100"
    assert reasons[foreign] == "sequence numbers are not 0..99 in order"
    assert summary.report.foreign == ["notes.txt"]
    assert (summary.report.total("missing"), summary.report.total("quarantined")) == (0, 500)
    assert run(spark, bucket, sink()).rounds == []  # not read again

    gateway.export(200, 299)  # uploaded again: another ETag
    summary = run(spark, bucket, sink())
    assert (summary.rows, summary.report.total("quarantined")) == (100, 400)
    assert cut not in {document["key"] for document in summary.report.refused}
    assert numbers(sink()) == [*range(100), *range(200, 300), *range(500, 510)]


def test_a_bad_object_with_long_content_leaves_little_in_the_state(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    much = "x" * 1_000_000
    gateway = Gateway(landing)
    gateway.export(0, 0, data=ndjson(rows(much, "s0", [0])))
    gateway.export(1, 1, form="parquet", **{much: 1})
    summary = run(spark, landing, iceberg())
    reasons = [document["reason"] for document in summary.report.refused]
    assert [reason[:20] for reason in reasons] == ["gateway is 'xxxxxxxx", "column 'xxxxxxxxxxxx"]
    assert max(map(len, reasons)) <= 200
    assert sum(entry.size for entry in iceberg().state().open().list()) < 2000


def test_a_stream_made_again_under_its_name_is_another_one(
    spark: Any, landing: StorageLocation, sink: Sink
) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 99)
    run(spark, landing, sink())
    gateway.export(0, 49, epoch=EPOCH + 5)
    summary = run(spark, landing, sink())
    assert [(s.epoch, s.rows) for s in summary.report.streams] == [(EPOCH, 100), (EPOCH + 5, 50)]
    assert sum(taken(sink()).values()) == len(taken(sink())) == 150


def test_rounds_are_bounded_and_each_is_committed(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    for name in ("gw-a", "gw-b", "gw-c"):
        for first in range(0, 50, 10):
            Gateway(landing, name).export(first, first + 9)
    seen: list[int] = []
    summary = run(
        spark, landing, iceberg(), RoundLimits(objects=4), lambda done: seen.append(len(taken(iceberg())))
    )
    assert [done.objects for done in summary.rounds] == [4, 4, 4, 3]
    assert seen == [40, 80, 120, 150]


def test_a_gap_that_is_filled_late_is_taken_once_and_counted_late(
    spark: Any, landing: StorageLocation, sink: Sink
) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 9)
    gateway.export(30, 39)
    report = run(spark, landing, sink()).report
    hole = report.streams[0].to_json()["holes"][0]
    assert (hole["first"], hole["last"], hole["kind"]) == (10, 29, "missing")
    assert (hole["after"], hole["before"]) == ("2026-11-18T11:06:49.000Z", "2026-11-18T11:07:10.000Z")
    gateway.export(5, 34)
    report = run(spark, landing, sink()).report
    assert numbers(sink()) == list(range(40))
    assert (report.streams[0].missing, report.streams[0].late_rows, report.streams[0].late_objects) == (
        0,
        20,
        1,
    )


def test_gateway_reports_show_the_lost_tail_the_pending_and_the_dropped_on_purpose(
    spark: Any, landing: StorageLocation, sink: Sink
) -> None:
    gateway = Gateway(landing)
    gateway.export(100, 199)
    dropped = [[0, 79, "overwritten"], [80, 89, "damaged"]]
    gateway.report(reported(259, exported=219, dropped=dropped), reported(9, stream="s1", epoch=str(EPOCH)))
    report = run(spark, landing, sink()).report
    first, second = report.streams
    assert (first.trimmed, first.missing, first.waiting) == (80, 10 + 10 + 20, 40)
    assert [(hole.first, hole.last, hole.kind, hole.reason) for hole in first.holes] == [
        (0, 79, "trimmed", "overwritten"),
        (80, 89, "missing", "damaged"),
        (90, 99, "missing", ""),
        (200, 219, "missing", ""),
        (220, 259, "waiting", ""),
    ]
    assert (second.stream, second.rows, second.missing) == ("s1", 0, 10)


def test_the_tail_of_a_gateway_that_was_replaced_is_missing_until_it_is_accepted(
    spark: Any, landing: StorageLocation, sink: Sink
) -> None:
    gateway, new = Gateway(landing), EPOCH + 10**9
    gateway.export(5, 89)
    gone = reported(99, exported=89, dropped=[[0, 4, "overwritten"]])
    gateway.report(gone, reported(9, exported=-1, stream="never exported"))
    assert run(spark, landing, sink()).report.total("waiting") == 20
    gateway.export(0, 9, epoch=new)
    gateway.report(reported(9, epoch=new), updated=new)  # its disk died: an empty one, under the same id
    report = run(spark, landing, sink()).report
    assert (report.total("waiting"), report.total("missing"), report.complete) == (0, 20, False)
    with pytest.raises(
        IngestError, match="gw-a/s1: this stream is not known to be gone; these are: gw-a/never"
    ):
        accept(landing, sink(), ["gw-a/s0", "gw-a/s1"])
    assert accept(landing, sink(), ["gw-a/s0"]) == {"gw-a/s0": 10}
    assert accept(landing, sink(), ["gw-a/never exported"]) == {"gw-a/never exported": 10}
    gateway.export(10, 19, epoch=new)
    gateway.report(reported(19, epoch=new), updated=new + 1)
    report = run(spark, landing, sink()).report  # it is in the state now, and stays there
    assert (report.total("trimmed"), report.total("missing"), report.complete) == (5 + 20, 0, True)
    reasons = {hole.reason for stream in report.streams for hole in stream.holes}
    assert reasons == {"accepted", "overwritten"}
    assert numbers(sink()) == sorted([*range(5, 90), *range(20)])


def test_what_is_uploaded_while_a_run_looks_is_never_missing(
    spark: Any, landing: StorageLocation, iceberg: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, listed, uploads = Gateway(landing), LocalStore.under, iter(range(10, 1000, 10))
    gateway.export(0, 9)
    gateway.report(reported(9))

    def busy(store: LocalStore, prefix: str, after: str = "") -> Iterator[Entry]:
        found = list(listed(store, prefix, after))
        if store.root == Path(landing.url):
            first = next(uploads)  # after each look there is one object more
            gateway.export(first, first + 9)
            gateway.report(reported(first + 9), updated=EPOCH + first)
        return iter(found)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "under", busy)
        for _ in range(2):
            report = run(spark, landing, iceberg()).report
            assert (report.total("missing"), report.complete) == (0, True)
    report = run(spark, landing, iceberg()).report
    assert (report.total("waiting"), report.complete) == (0, True)


def test_an_object_that_vanishes_after_the_listing_is_missing_and_not_waiting(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 9)
    second = gateway.export(10, 19)
    gateway.report(reported(19))

    def delete_and_open() -> Any:  # called between plan and work
        gateway.store.delete([second])
        return spark

    summary = run(delete_and_open, landing, iceberg())
    assert (summary.rounds[0].vanished, summary.report.total("missing")) == (1, 10)
    assert summary.report.total("waiting") == 0


def test_an_archived_object_is_reported_stops_nothing_and_is_tried_again(
    spark: Any, bucket: StorageLocation, sink: Sink
) -> None:
    archived = Gateway(bucket).export(0, 9)
    Gateway(bucket, "gw-b").export(0, 9)
    name, _, prefix = bucket.url.removeprefix("s3://").partition("/")
    s3, data = boto3.client("s3", endpoint_url=bucket.endpoint), bucket.open().get(archived)
    s3.put_object(Bucket=name, Key=f"{prefix}/{archived}", Body=data, StorageClass="GLACIER")
    for count in (10, 0):  # the second run has nothing but this object to do, and is no failure
        summary = run(spark, bucket, sink())
        assert (summary.rows, summary.rounds[0].unreadable, summary.quarantined) == (count, 1, 0)
        (document,) = summary.report.unreadable
        assert document["key"] == archived
        assert document["reason"].startswith("InvalidObjectState: The operation is not valid")
        totals = {name: summary.report.total(name) for name in ("unreadable", "waiting", "missing")}
        assert (totals, summary.report.complete) == ({"unreadable": 10, "waiting": 0, "missing": 0}, False)
    s3.put_object(
        Bucket=name, Key=f"{prefix}/{archived}", Body=data
    )  # restored: the same bytes, the same ETag
    summary = run(spark, bucket, sink())
    assert (summary.rows, summary.report.complete, summary.report.unreadable) == (10, True, [])


def test_quarantined_objects_are_read_again_on_request(
    spark: Any, landing: StorageLocation, sink: Sink
) -> None:
    gateway = Gateway(landing)
    good, bad = gateway.export(0, 9), gateway.export(10, 19, data=b"")
    gateway.export(20, 29)
    known, table = TableState(), sink()
    for entry in landing.open().list():
        if entry.key in (good, bad):
            known.quarantine[entry.key, entry.etag] = Quarantined(entry.size, "by a version that erred")
    table.target()  # makes the table
    table.commit(None, StateStore(table.state()).save(known, None), [])
    assert run(spark, landing, sink()).rows == 10
    assert run(spark, landing, sink()).rounds == []
    summary = run(spark, landing, sink(), RoundLimits(objects=1), retry_quarantined=True)
    assert (summary.rows, summary.quarantined) == (10, 1)
    assert [(document["key"], document["reason"]) for document in summary.report.refused] == [
        (bad, "empty: 0 bytes")
    ]
    assert numbers(sink()) == [*range(10), *range(20, 30)]


def test_columns_that_objects_add_later_are_added_to_the_table(
    spark: Any, landing: StorageLocation, sink: Sink
) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 9)
    run(spark, landing, sink())
    gateway.export(10, 19, client_id=lambda n: f"dev-{n}", qos=1)
    gateway.export(20, 29, form="parquet", qos=2, retained=True, level=0.5)
    gateway.export(30, 39, qos="not a number")  # does not fit what the table has by now
    gateway.export(40, 49)
    summary = run(spark, landing, sink())
    rows = sink().read().sort_by("sequence_number").to_pylist()
    assert [row["sequence_number"] for row in rows] == [*range(30), *range(40, 50)]
    pick = [(row["client_id"], row["qos"], row["retained"], row["level"]) for row in rows]
    assert (pick[0], pick[15], pick[25]) == ((None,) * 4, ("dev-15", 1, None, None), (None, 2, True, 0.5))
    assert summary.report.refused[0]["reason"].startswith("column qos does not fit int64")


def test_an_object_with_a_column_that_a_table_keeps_for_itself_is_quarantined(
    spark: Any, landing: StorageLocation, sink: Sink
) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 9)
    reserved = [gateway.export(10, 19, ingest_date="2026-01-01"), gateway.export(20, 29, ingest_day=1)]
    summary = run(spark, landing, sink())
    assert numbers(sink()) == list(range(10))
    reasons = {document["key"]: document["reason"] for document in summary.report.refused}
    assert set(reasons) == set(reserved)
    assert all("its partition has this name" in reason for reason in reasons.values())


def test_messages_of_many_days_land_in_a_file_for_each_day(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    Gateway(landing).export(0, 9, step_ms=12 * 3_600_000)
    summary = run(spark, landing, iceberg())
    files = iceberg().table().inspect.files()
    assert summary.rounds[0].files == files.num_rows == 5
    assert numbers(iceberg()) == list(range(10))
    one_day = iceberg().table().scan("ingest_time >= '2026-11-20T00:00:00+00:00' and gateway = 'gw-a'")
    assert len(list(one_day.plan_files())) < 5  # the bounds in the manifest prune


def test_two_runs_at_once_store_everything_once(spark: Any, landing: StorageLocation, sink: Sink) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 99)
    mine = sink()
    others: list[int] = []

    def after_another(*commit: Any) -> None:
        if not others:  # another run does all of it between this plan and this commit
            gateway.export(100, 149)
            others.append(run(spark, landing, sink()).rows)
        mine.commit(*commit)

    gateway.export(200, 249)
    summary = run(spark, landing, Intercepted(mine, commit=after_another))
    assert others == [200]
    assert summary.rows == 0  # its round was thrown away, and what was left to plan had been done
    assert numbers(sink()) == [*range(150), *range(200, 250)]


def test_a_run_that_is_stopped_ends_its_own_jobs_and_none_of_others_in_the_session(
    spark: Any, landing: StorageLocation, tmp_path: Path, iceberg: Sink
) -> None:
    started, go = tmp_path / "started", tmp_path / "go"

    def slow(batches: Iterator[Any]) -> Iterator[Any]:
        started.touch()
        while not go.exists():
            time.sleep(0.05)
        yield from batches

    def stop(*_: Any) -> None:
        raise InterruptedError

    def stop_in_the_task() -> None:
        with held.open("wb"):  # waits for the task that reads it
            os.kill(os.getpid(), signal.SIGUSR1)
            stopped.wait(60)

    held, stopped = Path(landing.url) / Gateway(landing).export(0, 9), threading.Event()
    held.unlink()
    os.mkfifo(held)
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(spark.range(0, 3, 1, 1).mapInArrow(slow, "id bigint").collect)
            while not started.exists():
                time.sleep(0.05)
            pool.submit(stop_in_the_task)
            with pytest.raises(InterruptedError):
                run(spark, landing, iceberg())
            stopped.set()
            go.touch()
            assert [row.id for row in other.result(60)] == [0, 1, 2]
    finally:
        go.touch()
        stopped.set()
        signal.signal(signal.SIGUSR1, before)


def test_the_last_numbers_are_in_the_table_and_its_report(
    spark: Any, landing: StorageLocation, sink: Sink
) -> None:
    """BIGINT ends with 2^63 - 1, and so do the numbers of a stream."""
    gateway, last = Gateway(landing), 2**63 - 1
    gateway.export(last - 5, last - 3, step_ms=0)
    gateway.export(last - 4, last, form="parquet", step_ms=0)
    gateway.report(reported(last, oldest=last - 5, dropped=[[0, last - 6, "before_start"]]))
    summary = run(spark, landing, sink())
    assert numbers(sink()) == list(range(last - 5, last + 1))
    (stream,) = summary.report.streams
    assert (stream.first, stream.last, stream.trimmed, stream.duplicates) == (last - 5, last, last - 5, 2)
    assert summary.report.complete
    assert run(spark, landing, sink()).rows == 0
