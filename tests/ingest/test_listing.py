"""Nothing is listed that is known, and what this misses is found by the next full listing at the latest."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bridge.ingest.errors import WrongSource
from bridge.ingest.gateway_reports import ReportedStream, ReportTime
from bridge.ingest.job import Summary, ingest
from bridge.ingest.listing import DAY, look_around, start_after
from bridge.ingest.planner import RoundLimits, StreamId, plan
from bridge.ingest.repair import repair
from bridge.ingest.report import survey
from bridge.ingest.state import KnownReport, Listed, Piece, TableState, load_state
from bridge.ingest.store import Entry, LocalStore, S3Store, StorageLocation, Top
from bridge.objectkeys import data_key, report_key
from tests.ingest.conftest import Intercepted
from tests.ingest.gateway import EPOCH, START, Gateway, reported
from tests.ingest.test_verdict import InProcess

Sink = Callable[[], Any]
HOUR = 3600
NOW = START + 1_000_000


class Watched(LocalStore):
    """A directory that notes each request of a listing."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[tuple[str, str]] = []
        self.read: list[str] = []

    def list(self) -> Iterator[Entry]:
        self.asked.append(("everything", ""))
        return super().under("")

    def top(self) -> Top:
        self.asked.append(("top", ""))
        return super().top()

    def under(self, prefix: str, after: str = "") -> Iterator[Entry]:
        self.asked.append((prefix, after))
        return super().under(prefix, after)

    def get(self, key: str, most: int | None = None) -> bytes:
        self.read.append(key)
        return super().get(key, most)


class Place(StorageLocation):
    """A local prefix whose listings are noted."""

    stores: ClassVar[list[Watched]] = []

    def open(self) -> Watched:
        self.stores.append(Watched(Path(self.url)))
        return self.stores[-1]


@pytest.fixture
def landing(tmp_path: Path) -> Place:
    Place.stores = []
    return Place(str(tmp_path / "landing"))


def run(landing: StorageLocation, sink: Any, at: float = 0, **options: Any) -> Summary:
    """Run the job `at` seconds after the start; see `ingest` for the options."""
    return ingest(InProcess, landing, sink, clock=lambda: int((NOW + at * 1000) * 1_000_000), **options)


def last() -> Watched:
    """Return the store that the last run has listed."""
    return [store for store in Place.stores if store.asked][-1]


def asked() -> list[str]:
    """Return which prefixes the last run has listed."""
    return [prefix for prefix, _ in last().asked]


def upload(gateway: Gateway, first: int, last: int, **more: Any) -> str:
    """Upload an object, then a report that says so."""
    key = gateway.export(first, last, **more)
    gateway.report(reported(last), updated=START + last)
    return key


def test_a_run_lists_only_what_a_report_promises_and_the_table_lacks(landing: Place, sink: Sink) -> None:
    news, quiet = Gateway(landing, "gw-news"), Gateway(landing, "gw-quiet")
    upload(news, 0, 99)
    upload(quiet, 0, 99)
    assert run(landing, sink()).report.in_full
    upload(news, 100, 149)
    summary = run(landing, sink(), at=HOUR)
    assert (summary.rows, summary.listed, summary.report.complete) == (50, 1, True)
    store = last()
    assert sorted(store.asked) == [
        ("_gateway/", ""),
        (
            f"gateway=gw-news/stream=s0/epoch={EPOCH}/",
            data_key("gw-news", "s0", EPOCH, 99, 0, START + 99_000, "x").rpartition("-")[0],
        ),
        ("top", ""),
    ]
    assert store.read == [report_key("gw-news")]
    assert run(landing, sink(), at=2 * HOUR).rounds == []
    assert asked() == ["_gateway/", "top"]
    assert {(s.gateway, s.rows) for s in summary.report.streams} == {("gw-news", 150), ("gw-quiet", 100)}


def test_the_report_says_when_all_was_listed_the_last_time(landing: Place, sink: Sink) -> None:
    upload(Gateway(landing), 0, 99)
    full = run(landing, sink()).report
    assert (full.in_full, full.full_ms) == (True, NOW)
    later = run(landing, sink(), at=DAY - 1).report
    assert (later.in_full, later.to_json()["full_listing"]) == (False, full.to_json()["full_listing"])
    again = run(landing, sink(), at=DAY).report
    assert (again.in_full, again.full_ms) == (True, NOW + DAY * 1000)
    assert not run(landing, sink(), at=DAY + 1).report.in_full


@pytest.mark.parametrize("back", [1, DAY])
def test_a_clock_that_was_set_back_hides_nothing(landing: Place, sink: Sink, back: float) -> None:
    gateway = Gateway(landing)
    upload(gateway, 90_000, 90_099)  # a day after the start
    gateway.report(reported(90_099, oldest=90_000, dropped=[[0, 89_999, "expired"]]), updated=START + 1)
    run(landing, sink())
    gateway.export(90_100, 90_149, hour_of=int(90_000 - back))
    gateway.report(reported(90_149, oldest=90_000, dropped=[[0, 89_999, "expired"]]), updated=START + 2)
    summary = run(landing, sink(), at=1)
    assert (summary.rows, summary.report.complete) == (50, True)


def test_an_upload_that_is_cut_differently_is_found_at_once(landing: Place, sink: Sink) -> None:
    gateway = Gateway(landing)
    upload(gateway, 0, 99)
    run(landing, sink())
    upload(gateway, 50, 149)
    assert (run(landing, sink(), at=1).rows, run(landing, sink(), at=2).rows) == (50, 0)


def test_a_listing_begins_before_the_first_gap(landing: Place, sink: Sink) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 99)
    upload(gateway, 7200, 7299)
    assert run(landing, sink()).report.total("missing") == 7100
    gateway.export(100, 7199)
    upload(gateway, 7300, 7399)
    summary = run(landing, sink(), at=1)
    assert (summary.rows, summary.report.complete) == (7200, True)


def test_what_is_lost_is_looked_for_again_and_not_in_the_whole_stream(landing: Place, sink: Sink) -> None:
    gateway, name = Gateway(landing), StreamId("gw-a", "s0", EPOCH)
    gateway.export(0, 99)
    upload(gateway, 200, 299)
    run(landing, sink())
    upload(gateway, 300, 309)
    assert run(landing, sink(), at=1).report.total("missing") == 100
    before_it = [start_after(name, load_state(sink()).streams[name], None)]
    assert [after for prefix, after in last().asked if prefix.startswith("gateway=")] == before_it
    assert run(landing, sink(), at=2).report.total("missing") == 100
    assert [after for prefix, after in last().asked if prefix.startswith("gateway=")] == before_it
    gateway.export(100, 149)  # without news from the gateway
    assert run(landing, sink(), at=3).rows == 50
    gateway.export(150, 199)
    found = run(landing, sink(), at=4)
    assert (found.rows, found.report.complete) == (50, True)
    run(landing, sink(), at=5)
    assert asked() == ["_gateway/", "top"]


def test_only_the_full_listing_finds_what_no_report_promises(landing: Place, sink: Sink) -> None:
    gateway = Gateway(landing)
    upload(gateway, 0, 99)
    run(landing, sink())
    gateway.export(0, 49, epoch=EPOCH + 1)  # a stream that was created and deleted in between
    gateway.export(0, 49, stream="other")
    gateway.store.put("gateway=gw-a/notes.txt", b"")
    assert run(landing, sink(), at=1).rows == 0
    found = run(landing, sink(), at=DAY)
    assert (found.rows, found.report.foreign) == (100, ["gateway=gw-a/notes.txt"])
    later = run(landing, sink(), at=DAY + 1)
    assert (later.report.in_full, later.report.foreign) == (False, ["gateway=gw-a/notes.txt"])


def test_objects_of_a_stream_that_was_deleted_since_are_taken(landing: Place, sink: Sink) -> None:
    gateway = Gateway(landing)
    upload(gateway, 0, 99)
    run(landing, sink())
    gateway.export(100, 149)
    gateway.report(reported(9, stream="new"), updated=START + 1_000_000)
    gateway.export(0, 9, stream="new")
    assert run(landing, sink(), at=1).rows == 60


def test_a_gateway_without_a_valid_report_is_listed_in_every_run(landing: Place, sink: Sink) -> None:
    upload(Gateway(landing, "gw-good"), 0, 9)
    silent = Gateway(landing, "gw-silent")
    silent.export(0, 9)
    broken = Gateway(landing, "gw-broken")
    broken.export(0, 9)
    broken.store.put(report_key("gw-broken"), b"[]")
    assert run(landing, sink()).rows == 30
    silent.export(10, 19)
    broken.export(10, 19)
    Gateway(landing, "gw-new").export(0, 9)
    broken.store.put("copies/gateway=gw-old/" + data_key("x", "s", 1, 0, 0, 0, "parquet"), b"")
    summary = run(landing, sink(), at=1)
    assert (summary.rows, len(summary.report.foreign)) == (30, 1)


@pytest.mark.parametrize("data", [b"not gzip", b""])
def test_a_quarantined_object_is_taken_as_soon_as_it_is_uploaded_again(
    landing: Place, sink: Sink, data: bytes
) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 99, data=data)
    upload(gateway, 100, 199)
    assert run(landing, sink()).report.total("quarantined") == 100
    gateway.export(0, 99)
    summary = run(landing, sink(), at=1)
    assert (summary.rows, summary.report.complete) == (100, True)
    assert f"gateway=gw-a/stream=s0/epoch={EPOCH}/" in asked()
    run(landing, sink(), at=2)
    assert asked() == ["_gateway/", "top"]


def test_a_run_that_ends_before_all_is_taken_forgets_nothing(landing: Place, sink: Sink) -> None:
    gateway, other = Gateway(landing), Gateway(landing, "gw-b")
    upload(gateway, 0, 9)
    upload(other, 0, 9)
    run(landing, sink())
    upload(gateway, 10, 19)
    upload(other, 10, 19)

    def killed(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(landing, sink(), at=1, limits=RoundLimits(objects=1), on_round=killed)
    assert run(landing, sink(), at=2).rows == 10
    assert survey(landing, sink())[1].complete


def test_another_source_and_a_repaired_table_are_listed_in_full(
    landing: Place, tmp_path: Path, sink: Sink
) -> None:
    upload(Gateway(landing), 0, 99)
    run(landing, sink())
    elsewhere = Place(str(tmp_path / "elsewhere"))
    upload(Gateway(elsewhere, "gw-else"), 0, 9)
    assert run(elsewhere, sink(), at=1, new_source=True).rows == 10
    state = load_state(sink())
    assert state.listed is not None
    assert state.listed.source == elsewhere.url
    state.differs = "somebody was here"
    with_difference = Intercepted(sink())
    from bridge.ingest.state import StateStore

    version = StateStore(with_difference.state()).save(state, state.version)
    with_difference.commit(state.version, version, [])
    assert repair(sink(), dry_run=False).committed
    after = load_state(sink()).listed
    assert after is not None
    assert (after.source, after.full) == (elsewhere.url, 0)
    assert run(elsewhere, sink(), at=2).report.in_full


def test_a_stale_run_does_not_undo_that_a_repair_wants_a_full_listing(landing: Place) -> None:
    upload(Gateway(landing), 0, 99)
    state = TableState(listed=Listed(landing.url, NOW, {}))
    listing = look_around(landing.open(), landing.url, state, NOW + 1)
    assert not listing.full
    repaired = TableState()
    listing.record(repaired, ())
    assert repaired.listed is None


def test_a_stale_run_does_not_bring_back_an_older_report(landing: Place) -> None:
    """A faster run has saved a newer one; if the gateway is gone then, only that names its last messages."""
    gateway = Gateway(landing)
    gateway.report(reported(9, exported=-1), updated=START)
    slow = look_around(landing.open(), landing.url, TableState(), NOW)
    gateway.report(reported(99, exported=-1), updated=START + 1)
    fast = look_around(landing.open(), landing.url, TableState(), NOW)
    state = TableState()
    for listing in (fast, slow):
        listing.save_reports(state)
    (stream,) = state.streams.values()
    assert stream.reported is not None
    assert (stream.reported.newest, stream.reported.updated) == (99, START + 1)


def report_at(gateway: Gateway, second: int, updated: int, *streams: dict[str, Any]) -> None:
    """Upload a report in this second of the clock of the storage."""
    gateway.report(*streams, updated=updated)
    assert isinstance(gateway.store, LocalStore)
    path = gateway.store.root / "_gateway" / f"{gateway.name}.json"
    os.utime(path, (second, second))


@pytest.mark.parametrize("full_every", [0.0, DAY])
def test_a_newer_report_counts_although_its_gateway_has_set_its_clock_back(
    landing: Place, sink: Sink, full_every: float
) -> None:
    gateway, fast = Gateway(landing), START + 10 * 365 * 86_400_000
    gateway.export(0, 9)
    report_at(gateway, 1000, fast, reported(9), reported(99, exported=-1, stream="s1"))
    assert run(landing, sink()).report.total("waiting") == 100
    gateway.export(10, 19)
    report_at(gateway, 2000, START, reported(29))
    for _ in range(2):
        found = run(landing, sink(), full_every=full_every).report
        holes = {
            stream.stream: [(hole.kind, hole.count) for hole in stream.holes] for stream in found.streams
        }
        assert holes == {"s0": [("missing", 10)], "s1": [("missing", 100)]}


def test_a_report_in_a_state_of_an_earlier_version_is_older_than_any_other(
    landing: Place, sink: Sink
) -> None:
    """It has no time of S3's clock, and says nothing about when the reports in it were uploaded."""
    gateway, fast = Gateway(landing), START + 10 * 365 * 86_400_000
    gateway.export(0, 9)
    report_at(gateway, 1000, fast, reported(9), reported(99, exported=-1, stream="s1"))
    run(landing, sink())
    ((key, document),) = [
        (entry.key, json.loads(sink().state().open().get(entry.key)))
        for entry in sink().state().open().list()
        if entry.key.endswith(f"{sink().pointer()}.json")
    ]
    for stream in document["streams"]:
        del stream["head"]["stored"]
    listing = document.pop("listing")
    known = {
        name: [etag, updated, version] for name, (etag, (_, updated), version) in listing["gateways"].items()
    }
    document["listed"] = listing | {"gateways": known}
    sink().state().open().put(key, json.dumps(document).encode())
    report_at(gateway, 2000, START, reported(29))
    found = run(landing, sink(), at=1).report
    assert (found.in_full, found.total("missing")) == (True, 120)
    assert not run(landing, sink(), at=2).report.in_full


@pytest.mark.parametrize("full_every", [0.0, DAY])
def test_a_quarantined_object_that_was_deleted_is_forgotten_by_a_retry(
    landing: Place, sink: Sink, full_every: float
) -> None:
    gateway = Gateway(landing)
    upload(gateway, 0, 9)
    deleted = gateway.export(0, 49, stream="of-nobody", data=b"")
    there = gateway.export(0, 4, stream="other", data=b"")
    run(landing, sink())
    gateway.store.delete([deleted])
    assert run(landing, sink(), at=1, full_every=full_every).report.total("quarantined") == 55
    elsewhere = StorageLocation(f"{landing.url}/elsewhere")
    with pytest.raises(WrongSource):
        run(elsewhere, sink(), at=2, retry_quarantined=True)
    run(landing, sink(), at=3)
    for retry in (True, False):
        found = run(landing, sink(), at=4, full_every=full_every, retry_quarantined=retry).report
        assert [entry["key"] for entry in found.refused] == [there]
        assert found.total("quarantined") == 5
    gateway.store.delete([there])
    upload(gateway, 10, 19)
    assert run(landing, sink(), at=5, full_every=full_every, retry_quarantined=True).report.complete
    assert run(landing, sink(), at=6, full_every=full_every).report.complete


def test_streams_that_never_had_a_message_are_forgotten_when_their_gateway_no_longer_lists_them(
    landing: Place, sink: Sink
) -> None:
    gateway = Gateway(landing)
    for cycle in range(3):
        gateway.export(10 * cycle, 10 * cycle + 9)
        empty = [reported(-1, stream=f"empty-{cycle}-{number}") for number in range(4)]
        pending = reported(9, exported=-1, stream=f"pending-{cycle}")
        gateway.report(reported(10 * cycle + 9), pending, *empty, updated=START + cycle)
        found = run(landing, sink(), at=cycle).report
        names = {name.stream for name in load_state(sink()).streams}
        kept = {f"empty-{cycle}-{number}" for number in range(4)} | {f"pending-{n}" for n in range(cycle + 1)}
        assert names == {"s0", *kept}
        assert (found.total("waiting"), found.total("missing")) == (10, 10 * cycle)
        assert {stream.stream for stream in found.streams} == names


def test_the_state_keeps_what_the_next_run_need_not_list(landing: Place, sink: Sink) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 99)
    gateway.export(0, 99, form="parquet")
    gateway.store.put("notes.txt", b"")
    upload(gateway, 200, 299)
    run(landing, sink())
    state = load_state(sink())
    (stream,) = state.streams.values()
    assert state.listed is not None
    assert (list(stream.absent), stream.open, stream.duplicates) == ([(100, 199)], False, 100)
    assert (state.listed.full, state.listed.foreign, list(state.listed.gateways)) == (
        NOW,
        ["notes.txt"],
        ["gw-a"],
    )
    later = run(landing, sink(), at=1).report
    assert (later.total("duplicates"), later.total("missing"), later.foreign) == (100, 100, ["notes.txt"])


def fleet(size: int, rows: int = 100) -> tuple[TableState, dict[str, bytes]]:
    """The state of a fleet whose gateways have uploaded `rows` messages each, and their reports."""
    import hashlib

    state, reports, gateways, time = TableState(), {}, {}, ReportTime(START, START)
    for number in range(size):
        name = f"gw-{number:05d}"
        document = {"gateway": name, "updated": START, "streams": [reported(rows - 1)]}
        reports[name] = json.dumps(document).encode()
        stream = state.of(StreamId(name, "s0", EPOCH))
        stream.take([Piece(0, rows - 1, START, START + rows * 1000)], known_last=-1)
        stream.reported = ReportedStream.from_json(reported(rows - 1), time)
        gateways[name] = KnownReport(hashlib.md5(reports[name], usedforsecurity=False).hexdigest(), time)
    state.listed = Listed("s3://fleet/site", NOW, gateways)
    return state, reports


@pytest.mark.usefixtures("credentials")
def test_fifty_news_of_ten_thousand_gateways_take_two_hundred_requests_at_most() -> None:
    """Requests as boto3 sends them; the objects are put straight into moto's memory."""
    from moto import mock_aws
    from moto.s3.models import s3_backends

    size, changed = 10_000, 50
    state, reports = fleet(size)
    with mock_aws():
        bucket = s3_backends["123456789012"]["aws"]
        bucket.create_bucket("fleet", "us-east-1")
        for number, (name, report) in enumerate(reports.items()):
            gateway = {"gateway": name, "updated": START + 1, "streams": [reported(149)]}
            bucket.put_object("fleet", f"site/{data_key(name, 's0', EPOCH, 0, 99, START, 'parquet')}", b"old")
            if number % (size // changed) == 0:
                report = json.dumps(gateway).encode()
                key = data_key(name, "s0", EPOCH, 100, 149, START + 101_000, "parquet")
                bucket.put_object("fleet", f"site/{key}", b"new")
            bucket.put_object("fleet", f"site/{report_key(name)}", report)
        store = StorageLocation("s3://fleet/site").open()
        assert isinstance(store, S3Store)
        sent: Counter[str] = Counter()
        store.client.meta.events.register(
            "before-send.s3", lambda request, **_: sent.update([request.method])
        )
        listing = look_around(store, "s3://fleet/site", state, NOW + 60_000)
    work = plan(listing.inventory.pending(), state.settled(), (), RoundLimits()).work
    assert [one.fresh for one in work] == [[(100, 149)]] * changed
    assert listing.inventory.objects == changed
    assert len(listing.reports.streams) == size
    assert sum(sent.values()) + len(work) <= 200, sent  # each object is read once
