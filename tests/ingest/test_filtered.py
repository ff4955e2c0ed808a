"""Objects that declare numbers as left out: what they say is checked, counted, and never called missing."""

from __future__ import annotations

import base64
import json
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from bridge.filtered import declaration
from bridge.ingest.decode import decode
from bridge.ingest.errors import BadObject, IngestError, Unreadable
from bridge.ingest.job import Summary, ingest
from bridge.ingest.repair import accept_rows, repair
from bridge.ingest.report import survey
from bridge.ingest.source import ObjectReader
from bridge.ingest.store import StorageLocation
from bridge.ingest.upkeep import prune
from bridge.objectkeys import ObjectKey, data_key, parse_key
from tests.ingest.gateway import EPOCH, Gateway, ndjson, parquet, reported, rows
from tests.ingest.test_sinks import numbers
from tests.ingest.test_stream_reader import Query
from tests.ingest.test_verdict import InProcess, append, delete

Sink = Callable[[], Any]
FORMS = {"ndjson.gz": ndjson, "parquet": parquet}
CHUNK = 1 << 20


def run(landing: StorageLocation, sink: Any) -> Summary:
    return ingest(InProcess, landing, sink, full_every=0)


def key(form: str, first: int, last: int) -> ObjectKey:
    found = parse_key(data_key("gw-a", "s0", EPOCH, first, last, EPOCH, form))
    assert found is not None
    return found


def read(form: str, present: list[int], declared: bytes, first: int = 0, last: int = 9) -> list[int]:
    """What the job takes of an object."""
    content = FORMS[form](rows("gw-a", "s0", present), declared)
    return list(decode(content, key(form, first, last), {})["sequence_number"].to_pylist())


# -- one object -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(10))
def test_the_rows_of_an_object_are_exactly_those_that_it_does_not_declare(form: str, seed: int) -> None:
    chance = random.Random(seed)
    first = chance.choice([0, 7, 2**20 - 5, 2**62])
    last = first + chance.randint(1, 200)
    kept = sorted(chance.sample(range(first, last + 1), chance.randint(1, last - first)))
    given = rows("gw-a", "s0", kept, step_ms=0)
    declared = declaration(first, last, kept)
    table = decode(FORMS[form](given, declared), key(form, first, last), {})
    assert table["sequence_number"].to_pylist() == kept
    assert table["payload"].to_pylist() == [row["payload"] for row in given]
    for other in (kept[1:], [*kept[:-1], kept[-1] + 1], kept[::-1] if len(kept) > 1 else []):
        content = FORMS[form](rows("gw-a", "s0", other, step_ms=0) or given[:0] or given * 2, declared)
        with pytest.raises(BadObject):
            decode(content, key(form, first, last), {})


def packed(count: int, bitmap: bytes, version: int = 1) -> bytes:
    return struct.pack(">BI", version, count) + zlib.compress(bitmap)


KEPT = [0, 2, 4, 6, 8]
GOOD = declaration(0, 9, KEPT)
BITS = b"\xaa\x02"  # of 1, 3, 5, 7, 9


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        (packed(4, BITS), "4 of 10"),
        (packed(6, b"\xaa\x06"), "6 of 10"),  # a bit behind the last number
        (packed(5, b"\xaa"), "one bit for each"),
        (packed(5, BITS + b"\0"), "one bit for each"),
        (packed(5, bytes(50_000_000)), "one bit for each"),
        (packed(5, BITS) + b"more", "one bit for each"),
        (packed(10, b"\xff\x03"), "10 of 10"),
        (GOOD[:-3], "one bit for each"),
        (GOOD[:4], "cut off"),
        (GOOD[:5] + b"\0" + GOOD[6:], "damaged"),
        (packed(5, b"\x55\x01"), "not 0..9"),  # the others
    ],
)
def test_a_declaration_that_is_wrong_is_refused_with_the_reason(
    form: str, declared: bytes, reason: str
) -> None:
    assert read(form, KEPT, packed(5, BITS)) == KEPT
    with pytest.raises(BadObject, match=reason):
        read(form, KEPT, declared)


@pytest.mark.parametrize("form", FORMS)
def test_a_declaration_of_a_later_version_is_for_a_later_reader(form: str) -> None:
    with pytest.raises(Unreadable, match=r"version 2, and 1 is known here; upgrade streambridge"):
        read(form, KEPT, packed(5, BITS, version=2))


@pytest.mark.parametrize("form", FORMS)
def test_without_a_declaration_fewer_rows_are_what_they_always_were(form: str) -> None:
    with pytest.raises(BadObject, match="5 rows, but the key promises 10"):
        read(form, KEPT, b"")


def test_an_extra_field_may_hold_other_things_and_is_checked() -> None:
    plain = ndjson(rows("gw-a", "s0", KEPT))

    def field(*subfields: bytes) -> bytes:
        content = b"".join(subfields)
        return plain[:3] + b"\x04" + plain[4:10] + struct.pack("<H", len(content)) + content + plain[10:]

    ours, other = b"SB" + struct.pack("<H", len(GOOD)) + GOOD, b"XY\x03\x00abc"
    there = key("ndjson.gz", 0, 9)
    assert decode(field(other, ours), there, {})["sequence_number"].to_pylist() == KEPT
    for content in (field(ours, ours), field(ours + b"S"), field(ours[:-1]), field(ours)[:20]):
        with pytest.raises(BadObject):
            decode(content, there, {})
    with pytest.raises(BadObject, match="5 rows, but the key promises 10"):
        decode(field(other), there, {})


def test_metadata_that_is_there_twice_or_is_no_base64_is_refused() -> None:
    good = parquet(rows("gw-a", "s0", KEPT), GOOD)
    text = base64.b64encode(GOOD)
    assert good.count(text) == 1
    for other in (b"*" * len(text), text[:-4] + b"!!!!"):
        with pytest.raises(BadObject):
            decode(good.replace(text, other), key("parquet", 0, 9), {})


# -- the table --------------------------------------------------------------------------------------


def lacking(chance: random.Random, first: int, last: int, share: float) -> set[int]:
    """Some numbers of first..last, but not all."""
    chosen = {number for number in range(first, last + 1) if chance.random() < share}
    return chosen if len(chosen) <= last - first else chosen - {first}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_left_out_is_filtered_and_never_missing(
    landing: StorageLocation, sink: Sink, form: str
) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 99, form=form, lacks=range(1, 100, 3))
    gateway.export(100, 199, form=form)
    gateway.export(200, 299, form=form, lacks=range(200, 250))
    gateway.report(reported(299))
    summary = run(landing, sink())
    assert summary.rows == 300 - 33 - 50
    (stream,) = summary.report.streams
    assert summary.report.complete
    assert (stream.first, stream.last, stream.rows) == (0, 299, 217)
    assert (stream.trimmed, stream.missing, stream.waiting) == (83, 0, 0)
    (hole,) = summary.report.to_json()["streams"][0]["holes"]
    assert (hole["kind"], hole["reason"], hole["count"]) == ("trimmed", "filtered", 83)
    assert len(numbers(sink())) == 217
    again = run(landing, sink())
    assert not again.rounds
    assert again.report.complete


def test_a_number_that_no_object_covers_is_missing_among_those_that_are_left_out(
    landing: StorageLocation, sink: Sink
) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 49, lacks=range(10, 50))
    gateway.export(60, 99, lacks=range(60, 90))
    gateway.report(reported(99))
    report = run(landing, sink()).report
    (stream,) = report.streams
    assert not report.complete
    assert (stream.missing, stream.trimmed, stream.rows) == (10, 70, 20)


def test_an_object_without_a_right_declaration_is_quarantined_and_counts_as_such(
    landing: StorageLocation, sink: Sink
) -> None:
    gateway = Gateway(landing)
    given = rows("gw-a", "s0", KEPT)
    gateway.export(0, 9, data=ndjson(given))  # as an earlier reader sees it
    gateway.report(reported(9))
    report = run(landing, sink()).report
    assert (report.streams[0].quarantined, report.complete) == (10, False)
    assert "5 rows, but the key promises 10" in report.refused[0]["reason"]
    gateway.export(0, 9, data=ndjson(given, GOOD))
    report = run(landing, sink()).report
    assert (report.complete, report.streams[0].rows, report.streams[0].trimmed) == (True, 5, 5)


@pytest.mark.parametrize("seed", range(6))
def test_objects_that_overlap_and_lack_different_numbers_add_up(
    landing: StorageLocation, sink: Sink, seed: int
) -> None:
    chance = random.Random(seed)
    gateway, newest = Gateway(landing), {"a": -1, "b": -1}
    for _ in range(4):
        for _ in range(chance.randint(1, 4)):
            stream = chance.choice(["a", "b"])
            first = max(0, CHUNK - 60 + chance.randint(0, 100))
            last = first + chance.choice([0, 3, 10, 40])
            form = chance.choice([*FORMS])
            lacks = lacking(chance, first, last, chance.choice([0, 0.1, 0.9]))
            gateway.export(first, last, stream, form, step_ms=0, lacks=lacks)
            newest[stream] = max(newest[stream], last)
        summary = run(landing, sink())
        for found in summary.report.streams:
            outside = found.missing + found.quarantined + found.waiting
            assert found.first is not None
            assert found.last == newest[found.stream]
            assert found.rows + found.trimmed + outside == found.last - found.first + 1
            assert not found.quarantined
        assert len(numbers(sink())) == summary.report.total("rows")
        assert not summary.report.differs


def state_of(sink: Any) -> dict[str, Any]:
    version = sink.pointer()
    found: dict[str, Any] = json.loads(sink.state().open().get(f"{version:020d}.json"))
    return found


def test_the_state_has_a_format_of_its_own_only_where_something_is_left_out(
    landing: StorageLocation, sink: Sink
) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 9)
    gateway.report(reported(9))
    run(landing, sink())
    before = state_of(sink())
    assert (before["format"], "filtered" in before["streams"][0]) == (1, False)
    first, last = CHUNK - 4, CHUNK + 5
    gateway.export(10, first - 1, data=b"")
    gateway.export(first, last, step_ms=0, lacks=[first, last, last - 1])
    run(landing, sink())
    now = state_of(sink())
    assert (now["format"], now["streams"][0]["filtered"]) == (3, [[0, 1], [1, 2]])


def test_a_state_of_a_later_format_is_refused_and_not_taken_for_an_empty_one(
    landing: StorageLocation, sink: Sink
) -> None:
    Gateway(landing).export(0, 9, lacks=[3])
    run(landing, sink())
    here = sink()
    path = f"{here.pointer():020d}.json"
    here.state().open().put(path, json.dumps(state_of(here) | {"format": 4}).encode())
    with pytest.raises(IngestError, match="format 4 is not supported"):
        run(landing, sink())


# -- what others do to the table ----------------------------------------------------------------------


@pytest.fixture
def thinned(landing: StorageLocation, sink: Sink) -> Sink:
    """A table of 0..119 in which every third number is left out."""
    for first in (0, 40, 80):
        Gateway(landing).export(first, first + 39, lacks=range(0, 120, 3))
    Gateway(landing).report(reported(119))
    assert run(landing, sink()).report.complete
    return sink


def test_a_table_that_has_its_rows_needs_no_repair(thinned: Sink) -> None:
    done = repair(thinned(), dry_run=False)
    assert (done.differs, done.streams, done.rows) == ([], [], 80)


def test_rows_that_others_delete_are_taken_again_and_what_is_left_out_is_learnt_again(
    landing: StorageLocation, thinned: Sink
) -> None:
    delete(thinned(), "sequence_number < 20")
    report = survey(landing, thinned())[1]
    assert not report.complete
    assert repair(thinned(), dry_run=False).committed
    summary = run(landing, thinned())
    assert summary.report.complete
    assert (summary.report.total("rows"), summary.report.total("trimmed")) == (80, 40)
    assert numbers(thinned()) == [n for n in range(120) if n % 3]
    assert state_of(thinned())["streams"][0]["covered"][0][:2] == [0, 119]


def test_rows_that_others_delete_may_be_accepted(landing: StorageLocation, thinned: Sink) -> None:
    delete(thinned(), "sequence_number < 20")
    assert accept_rows(thinned(), dry_run=False).committed
    summary = run(landing, thinned())
    assert not summary.rounds
    assert summary.report.complete
    assert summary.report.total("rows") + summary.report.total("trimmed") == 120
    assert repair(thinned(), dry_run=False).differs == []


def test_a_row_that_others_add_for_a_number_that_is_left_out_is_noticed(
    landing: StorageLocation, thinned: Sink
) -> None:
    append(thinned(), rows("gw-a", "s0", [3]))
    assert not survey(landing, thinned())[1].complete
    assert repair(thinned(), dry_run=False).committed
    summary = run(landing, thinned())
    assert summary.report.complete
    assert (summary.report.total("rows"), summary.report.total("trimmed")) == (81, 39)


def test_objects_whose_numbers_are_in_the_table_or_left_out_can_be_deleted(
    landing: StorageLocation, thinned: Sink
) -> None:
    assert prune(landing, thinned(), 0, dry_run=False, trust_state=False).deleted == 3
    report = survey(landing, thinned())[1]
    assert report.complete
    assert (report.total("rows"), report.total("trimmed")) == (80, 40)


# -- queries ----------------------------------------------------------------------------------------


def uploads(place: StorageLocation, chance: random.Random, taken: set[int], settled: set[int]) -> None:
    """Upload an object; add what a reader takes of it, by the order of names."""
    first = max(settled, default=-1) + 1 - chance.choice([0, 0, 3])
    first = max(first, 0)
    last = first + chance.choice([5, 20])
    lacks = lacking(chance, first, last, chance.choice([0, 0.5]))
    Gateway(place).export(first, last, form=chance.choice([*FORMS]), lacks=lacks)
    fresh = set(range(first, last + 1)) - settled
    taken |= fresh - lacks
    settled |= fresh


@pytest.mark.parametrize("seed", range(5))
def test_both_readers_of_the_data_source_give_each_row_once(tmp_path: Path, seed: int) -> None:
    chance, place = random.Random(seed), StorageLocation(str(tmp_path / "landing"))
    query = Query(tmp_path / "landing", tmp_path / "checkpoint", maxObjectsPerTrigger="2")
    taken: set[int] = set()
    settled: set[int] = set()
    for _ in range(6):
        uploads(place, chance, taken, settled)
        while query.trigger():
            pass
        assert [number for *_, number in query.rows()] == sorted(taken)
    columns = StructType([StructField("sequence_number", LongType())])
    reader = ObjectReader(place, columns, skip=False)
    found = [
        row["sequence_number"]
        for part in reader.partitions()
        for batch in reader.read(part)
        for row in batch.to_pylist()
    ]
    assert sorted(found) == sorted(taken)
