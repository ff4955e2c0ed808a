"""The report as people read it."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bridge.ingest.gateway_reports import GatewayReports, ReportedStream, ReportTime, read_gateway_reports
from bridge.ingest.planner import Inventory, StreamId
from bridge.ingest.render import show
from bridge.ingest.report import KINDS, Report, build
from bridge.ingest.state import Piece, Quarantined, TableState
from bridge.ingest.store import Entry, StorageLocation
from bridge.objectkeys import data_key
from tests.ingest.gateway import Gateway, reported

EPOCH = 1_795_000_000_000
REPORTED = ReportedStream(
    EPOCH, oldest=0, newest=2_000_000_999, exported=2_000_000_499, dropped=((90, 99, "expired"),)
)


def report(**reports: ReportedStream) -> Report:
    """Two streams, one of a gateway with a long name that has everything that can be wrong."""
    bad, good = "gateway-of-building-seven", "gw-b"
    entries = [
        Entry(data_key(bad, "readings/of/all/machines", EPOCH, first, last, EPOCH, "parquet"), 1, "e", 0)
        for first, last in ((0, 89), (50, 89), (100, 149), (160, 2_000_000_399))
    ]
    state = TableState()
    for number, (gateway, stream, pieces) in enumerate(
        [
            (bad, "readings/of/all/machines", [(0, 89), (160, 2_000_000_399)]),
            (good, "s0", [(0, 99)]),
        ]
    ):
        for first, last in pieces:
            known = 200 if first == 0 and not number else -1
            state.of(StreamId(gateway, stream, EPOCH)).take(
                [Piece(first, last, EPOCH, EPOCH)], known_last=known
            )
    state.quarantine[entries[2].key, "e"] = Quarantined(0, "empty: 0 bytes")
    known = {
        StreamId(gateway, "readings/of/all/machines" if gateway == bad else "s0", EPOCH): stream_report
        for gateway, stream_report in zip((bad, good), reports.values(), strict=False)
    }
    return build(state, Inventory(entries), GatewayReports(known), "lake.messages", state.rows())


def printed(found: Report, width: int) -> list[str]:
    out = io.StringIO()
    show(found, Console(file=out, width=width))
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 160])
def test_every_figure_is_in_the_table_at_any_width(width: int) -> None:
    lines = printed(report(bad=REPORTED, good=ReportedStream(EPOCH, 0, 99, 99)), width)
    text = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= width
    for part in ("0..2000000399", "2,000,000,330", "110 missing", "10 trimmed", "50 quarantined"):
        assert part in text, text
    for part in ("500 waiting", "40 duplicates", "90 late"):
        assert part in text, text
    (healthy,) = [line for line in lines if line.startswith("gw-b")]
    assert healthy.split()[:4] == ["gw-b", "s0", "0..99", "100"]
    assert "0 missing" not in healthy


@pytest.mark.parametrize(
    ("reports", "note"),
    [
        ({}, "note: no report of gateway-of-building-seven, gw-b: a lost tail would go unnoticed"),
        ({"bad": REPORTED}, "note: no report of gw-b: a lost tail would go unnoticed"),
    ],
)
def test_a_gateway_without_a_report_is_named_because_its_tail_could_be_lost(
    reports: dict[str, Any], note: str
) -> None:
    assert note in printed(report(**reports), 160)


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[" * 100_000,
        b"[]",
        b'{"gateway":"gw-a","updated":1e999,"streams":[]}',
        b'{"gateway":"gw-a","updated":1,"streams":[{"stream":"s","epoch":1,"newest":null}]}',
        b'{"gateway":"gw-a","updated":1000000000000000000,"streams":[{"stream":"s","epoch":1,"newest":1}]}',
        b'{"gateway":"gw-a","updated":1,"streams":[{"stream":"s","epoch":1,"newest":99999999999999999999}]}',
        b'{"gateway":"gw-a","updated":1,"streams":[{"stream":"s","epoch":1,"newest":1,"dropped":[1]}]}',
    ],
)
def test_a_malformed_gateway_report_is_a_note_and_stops_nothing(tmp_path: Path, document: bytes) -> None:
    (tmp_path / "_gateway").mkdir()
    (tmp_path / "_gateway" / "gw-a.json").write_bytes(document)
    reports = read_gateway_reports(StorageLocation(str(tmp_path)).open())
    found = build(TableState(), Inventory([]), reports, "lake.messages", 0)
    assert found.streams == []
    assert found.problems[0].startswith("_gateway/gw-a.json: not a gateway report")


def test_a_long_gateway_report_is_shown_and_stored_in_short(tmp_path: Path) -> None:
    much = "x" * 1_000_000
    landing = StorageLocation(str(tmp_path))
    Gateway(landing).report(reported(9, dropped=[[0, 4, much]]))
    other = {"gateway": much, "updated": 1, "streams": []}
    (tmp_path / "_gateway" / "other.json").write_text(json.dumps(other))
    reports = read_gateway_reports(landing.open())
    assert [len(reason) for _, _, reason in reports.streams[StreamId("gw-a", "s0", EPOCH)].dropped] == [200]
    assert max(map(len, reports.problems)) < 300


def test_an_object_without_the_key_of_its_gateways_report_is_not_taken_for_one(tmp_path: Path) -> None:
    landing = StorageLocation(str(tmp_path))
    older, newer = Gateway(landing), Gateway(landing)
    older.report(reported(9))
    copies = [tmp_path / "_gateway" / name for name in ("gw-a.json.bak", "gw-b.json", "old/gw-a.json")]
    for copy in copies:
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes((tmp_path / "_gateway" / "gw-a.json").read_bytes())
    newer.report(reported(99), updated=EPOCH + 1)
    reports = read_gateway_reports(landing.open())
    assert reports.streams[StreamId("gw-a", "s0", EPOCH)].newest == 99
    assert {gateway: time.updated for gateway, time in reports.times.items()} == {"gw-a": EPOCH + 1}
    assert sorted(problem.partition(":")[0] for problem in reports.problems) == sorted(
        str(copy.relative_to(tmp_path)) for copy in copies
    )


def test_where_nothing_is_known_nothing_is_complete() -> None:
    assert not build(TableState(), Inventory([]), GatewayReports(), "lake.messages", 0).complete


@pytest.mark.parametrize(
    ("reason", "kind"), [("expired", "trimmed"), ("damaged", "missing"), ("unknown", "missing")]
)
def test_what_the_gateway_cannot_explain_is_lost_and_not_trimmed(reason: str, kind: str) -> None:
    stream, state = StreamId("gw-a", "s0", EPOCH), TableState()
    state.of(stream).take([Piece(10, 99, EPOCH, EPOCH)], known_last=-1)
    reports = GatewayReports({stream: ReportedStream(EPOCH, 10, 99, 99, ((0, 9, reason),))})
    found = build(state, Inventory([]), reports, "lake.messages", state.rows())
    assert found.total(kind) == 10
    assert found.complete == (kind == "trimmed")


@pytest.mark.parametrize(
    ("lost", "trimmed", "missing"), [((), 21, 0), ((39,), 21, 1), ((11,), 11, 11), ((11, 39), 11, 12)]
)
def test_a_range_that_a_gateway_has_joined_hides_no_loss_and_invents_none(
    lost: tuple[int, ...], trimmed: int, missing: int
) -> None:
    """The even ones below 41 were dropped. 11 lies in a joined range, whose holes are alike then."""
    stream, state = StreamId("gw-a", "s0", EPOCH), TableState()
    there = [Piece(n, n, EPOCH, EPOCH) for n in range(1, 40, 2) if n not in lost]
    state.of(stream).take([*there, Piece(41, 99, EPOCH, EPOCH)], known_last=-1)
    dropped = ((0, 18, "joined:10"), (20, 38, "joined:10"), (40, 40, "filtered"))
    reports = GatewayReports({stream: ReportedStream(EPOCH, 100, 99, 99, dropped)})
    found = build(state, Inventory([]), reports, "lake.messages", state.rows())
    assert (found.total("trimmed"), found.total("missing")) == (trimmed, missing)
    assert found.complete == (not lost)
    first = [hole for hole in found.streams[0].holes if hole.first <= 18]
    assert {hole.reason for hole in first} == ({"10 of these 11 were dropped"} if 11 in lost else {"joined"})


@pytest.mark.parametrize("reason", ["expired", "joined:9"])
def test_a_report_on_many_dropped_ranges_costs_what_they_are_and_not_their_square(reason: str) -> None:
    def calls(ranges: int) -> int:
        stream, state = StreamId("gw-a", "s0", EPOCH), TableState()
        there = [Piece(n, n, EPOCH, EPOCH) for n in range(9, 10 * ranges, 10)]
        state.of(stream).take(there, known_last=-1)
        dropped = tuple((n, n + 8, reason) for n in range(0, 10 * ranges, 10))
        reports = GatewayReports(
            {stream: ReportedStream(EPOCH, 0, 10 * ranges - 1, 10 * ranges - 1, dropped)}
        )
        counted: Counter[str] = Counter()
        sys.setprofile(lambda frame, event, value: counted.update([event]))
        try:
            found = build(state, Inventory([]), reports, "lake.messages", state.rows())
        finally:
            sys.setprofile(None)
        assert (found.total("trimmed"), len(found.streams[0].holes)) == (9 * ranges, ranges)
        return counted.total()

    assert calls(200) < 5 * calls(50)


NEWER = ReportTime(EPOCH + 1000, EPOCH - 9)  # its gateway has set its clock back


def of_a_stream_that_was(waiting: int, now: GatewayReports) -> Report:
    """A stream with 0..89 in the table, whose gateway reported so many more as pending at EPOCH."""
    stream, state = StreamId("gw-a", "s0", EPOCH), TableState()
    state.of(stream).take([Piece(0, 89, EPOCH, EPOCH)], known_last=-1)
    state.of(stream).reported = ReportedStream(EPOCH, 0, 89 + waiting, 89, stored=EPOCH)
    return build(state, Inventory([]), now, "lake.messages", state.rows())


def test_pending_messages_of_a_stream_that_its_gateway_no_longer_has_are_missing() -> None:
    replaced = GatewayReports(
        {StreamId("gw-a", "s0", EPOCH + 9): ReportedStream(EPOCH + 9, 0, -1, -1)}, {"gw-a": NEWER}
    )
    deleted = GatewayReports({}, {"gw-a": NEWER})
    for now in (replaced, deleted):
        found = of_a_stream_that_was(10, now)
        (hole,) = found.streams[0].holes
        assert (hole.first, hole.last, hole.kind, hole.reason) == (90, 99, "missing", "its stream is gone")
        assert (found.total("waiting"), found.complete) == (0, False)
        (note,) = found.problems
        assert note.startswith("no longer listed by its gateway: gw-a/s0; its pending messages are lost")
        assert "streambridge ingest accept gw-a/s0" in note
        drained = of_a_stream_that_was(0, now)  # everything was uploaded before it was deleted
        assert (drained.complete, drained.problems) == (True, [])


def test_an_older_or_absent_gateway_report_makes_no_stream_gone() -> None:
    older = of_a_stream_that_was(
        10, GatewayReports({}, {"gw-a": ReportTime(EPOCH - 1000, EPOCH + 9)})
    )  # another run has read a newer one
    assert (older.total("waiting"), older.complete, older.problems) == (10, True, [])
    none = of_a_stream_that_was(10, GatewayReports())
    assert (none.total("waiting"), none.complete) == (10, True)
    assert none.problems == ["no report of gw-a: a lost tail would go unnoticed"]


def uploaded(*pairs: tuple[int, int]) -> Inventory:
    return Inventory(
        Entry(data_key("gw-a", "s0", EPOCH, first, last, EPOCH, "parquet"), 1, "e", 0)
        for first, last in pairs
    )


def test_what_is_uploaded_and_not_taken_yet_waits_and_is_not_lost() -> None:
    stream, state = StreamId("gw-a", "s0", EPOCH), TableState()
    state.of(stream).take([Piece(0, 49, EPOCH, EPOCH)], known_last=-1)
    reports = GatewayReports(
        {stream: ReportedStream(EPOCH, 60, 109, 99, ((50, 54, "expired"), (70, 79, "damaged")))}
    )
    found = build(state, uploaded((0, 49), (50, 79), (85, 99)), reports, "lake.messages", state.rows())
    assert [(hole.first, hole.last, hole.kind, hole.reason) for hole in found.streams[0].holes] == [
        (50, 79, "waiting", "uploaded, not taken yet"),  # what is in an object counts, also if it was dropped
        (80, 84, "missing", ""),
        (85, 99, "waiting", "uploaded, not taken yet"),
        (100, 109, "waiting", ""),
    ]


@pytest.mark.parametrize("lost", range(5))
@pytest.mark.parametrize("taken", [False, True])
def test_whichever_part_of_a_stream_is_lost_is_missing(lost: int, taken: bool) -> None:
    """Also the first and the last, whether the rest is in the table or only in objects."""
    stream, state = StreamId("gw-a", "s0", EPOCH), TableState()
    parts = [(first, first + 9) for first in range(0, 50, 10)]
    there = [part for at, part in enumerate(parts) if at != lost]
    if taken:
        state.of(stream).take([Piece(*part, EPOCH, EPOCH) for part in there], known_last=-1)
    reports = GatewayReports({stream: ReportedStream(EPOCH, 0, 49, 49)}, {"gw-a": ReportTime(0, EPOCH)})
    found = build(state, uploaded(*there), reports, "lake.messages", state.rows())
    missing = [(hole.first, hole.last) for hole in found.streams[0].holes if hole.kind == "missing"]
    assert missing == [parts[lost]]
    assert not found.complete


def test_objects_of_which_nothing_else_is_known_are_in_the_report() -> None:
    found = build(TableState(), uploaded((10, 19), (30, 39)), GatewayReports(), "lake.messages", 0)
    (stream,) = found.streams
    assert (stream.rows, stream.waiting, stream.missing) == (0, 20, 10)


def test_the_numbers_of_a_refused_or_vanished_object_are_not_waiting() -> None:
    stream, state, inventory = (
        StreamId("gw-a", "s0", EPOCH),
        TableState(),
        uploaded((0, 9), (10, 19), (20, 29)),
    )
    reports = GatewayReports({stream: ReportedStream(EPOCH, 0, 29, 29)})
    items = [(item.key, item.etag) for item in inventory.streams[stream]]
    state.quarantine[items[0]] = Quarantined(0, "empty: 0 bytes")
    found = build(state, inventory, reports, "lake.messages", 0, vanished={items[1]})
    assert [(hole.first, hole.last, hole.kind) for hole in found.streams[0].holes] == [
        (0, 9, "quarantined"),
        (10, 19, "missing"),
        (20, 29, "waiting"),
    ]


def test_numbers_of_an_unreadable_object_are_neither_waiting_nor_missing_and_not_complete() -> None:
    stream, inventory = StreamId("gw-a", "s0", EPOCH), uploaded((0, 9))
    (item,) = inventory.streams[stream]
    reports = GatewayReports({stream: ReportedStream(EPOCH, 0, 9, 9)}, {"gw-a": ReportTime(0, EPOCH)})
    denied = {(item.key, item.etag): Quarantined(1, "AccessDenied: Access Denied")}
    found = build(TableState(), inventory, reports, "lake.messages", 0, unreadable=denied)
    assert ([found.total(kind) for kind in KINDS], found.complete) == ([0, 0, 10, 0, 0], False)
    lines = printed(found, 200)
    assert f"unreadable object {item.key}: AccessDenied: Access Denied" in lines
    assert lines[-1] == "NOT complete: 0 rows, missing 0, quarantined 0, unreadable 10, trimmed 0, waiting 0"


@pytest.mark.parametrize("reason", ["damaged", "skipped", "before_start", "expired"])
def test_an_object_that_was_refused_or_not_read_counts_whatever_its_gateway_dropped_since(
    reason: str,
) -> None:
    stream, state, inventory = StreamId("gw-a", "s0", EPOCH), TableState(), uploaded((0, 9), (10, 19))
    refused, unread = ((item.key, item.etag) for item in inventory.streams[stream])
    state.quarantine[refused] = Quarantined(0, "empty: 0 bytes")
    denied = {unread: Quarantined(1, "AccessDenied: Access Denied")}
    reports = GatewayReports(
        {stream: ReportedStream(EPOCH, 0, 29, 29, ((0, 29, reason),))}, {"gw-a": ReportTime(0, EPOCH)}
    )
    found = build(state, inventory, reports, "lake.messages", 0, unreadable=denied)
    assert [(hole.first, hole.last, hole.kind) for hole in found.streams[0].holes] == [
        (0, 9, "quarantined"),
        (10, 19, "unreadable"),
        (20, 29, "missing" if reason == "damaged" else "trimmed"),
    ]
    assert not found.complete
