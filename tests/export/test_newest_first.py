"""`order = "newest first"`: new messages go before a backlog, and nothing else changes."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec import Struct

from bridge.errors import InvalidDefinition, InvalidRequest
from bridge.export.cursor import MAX_AHEAD, SLOT, Cursor, CursorFile, Skipped
from bridge.export.order import Order
from bridge.export.planning import Plan, Planner, Source
from bridge.export.sizing import SLICE, Slices
from bridge.export.wire import Tuning
from bridge.model import ExportStatus
from bridge.objectkeys import parse_key
from bridge.plugin import discovery
from bridge.plugin.api import BatchedConfig, ExportConfig, Progress
from bridge.plugin.reports import gateway_report
from bridge.ranges import Ranges
from tests.export.harness import Bucket, Gateway, drop_in, recorded, running, until
from tests.simulation.bucket import Bucket as Landing
from tests.simulation.cloud import CloudCheck, ingest_run
from tests.simulation.table import Table

QUICK = Tuning(beat=0.1, silence=60.0, first_backoff=0.02, max_backoff=0.05, drain=1.0, behind=0.05)
REGISTRY = discovery.load()
NEWEST = BatchedConfig(identifier="x", order="newest first")
OLDEST = BatchedConfig(identifier="x")

# Appends its batches to a file. While there is a file `down`, it writes there what the newest message is.
GATE = """
    import json, os, time
    from bridge import *
    from bridge import hookimpl

    class Config(BatchedConfig, frozen=True):
        path: str
        down: str
        seconds: float = 0.0

    class Gate(Exporter):
        kind = "gate"
        Config = Config
        limits = BatchLimits(records=10)
        any_order = True

        def export(self, batch):
            if os.path.exists(self.config.down):
                with open(self.config.down, "w") as out:
                    out.write(str(self.context.exports()[0].newest))
                raise Retry("the link is down", cut=True)
            time.sleep(self.config.seconds)
            numbers = [record.sequence_number for record in batch.records]
            with open(self.config.path, "a") as out:
                out.write(json.dumps([batch.first, batch.last, numbers, batch.stream]) + chr(10))
            return ACCEPTED

    class InOrder(Gate):
        kind = "in order"
        any_order = False

    @hookimpl
    def register_exporters(register):
        register(Gate)
        register(InOrder)
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A data root with the exporter `gate`."""
    drop_in(tmp_path, "gate", GATE)
    return tmp_path


def config(root: Path, **more: Any) -> dict[str, list[dict[str, Any]]]:
    base = {"identifier": "x", "path": str(root / "out"), "down": str(root / "down")}
    return {"gate": [{**base, "order": "newest first", **more}]}


def on_disk(root: Path) -> Cursor:
    found = CursorFile.read(root / "data" / "exports" / "a" / "x.cursor")
    assert found is not None
    return found


async def knows(root: Path, newest: int) -> None:
    """Wait until the worker knows of a message; the link is down."""
    await until(lambda: (root / "down").read_text() == str(newest))


async def age() -> None:
    """Wait until what is pending is too old to count as new."""
    since = time.time()
    await until(lambda: time.time() > since + 3 * QUICK.behind)


# -- through a gateway ----------------------------------------------------------------------------


def test_after_an_outage_new_messages_go_before_the_backlog_and_each_is_sent_once(gate: Path) -> None:
    async def scenario() -> None:
        (gate / "down").touch()
        async with running(gate, tuning=QUICK) as gateway:
            gateway.create("a", config(gate))
            await gateway.append("a", *(b"old" for _ in range(300)))
            await until(lambda: gateway.status("a").error_message)
            await age()
            await gateway.append("a", b"new")
            await knows(gate, 300)
            (gate / "down").unlink()
            await gateway.exported("a", 300)
            assert gateway.status("a").exported_ahead == []
            assert gateway.status("a").exported_messages_count == 301
            assert gateway.status("a").skipped_messages_count == 0

    asyncio.run(scenario())
    sent = [number for batch in recorded(gate / "out") for number in batch[2]]
    assert sorted(sent) == list(range(301))
    # One batch was planned already.
    assert sent.index(300) < sent.index(20)
    backlog = [number for number in sent if number < 290]
    assert backlog == sorted(backlog)
    assert on_disk(gate).ahead is msgspec.UNSET


def test_while_a_backlog_goes_out_new_messages_go_before_what_is_left_of_it(gate: Path) -> None:
    async def scenario() -> None:
        async with running(gate, tuning=QUICK) as gateway:
            gateway.create("a", config(gate, disabled=True))
            await gateway.append("a", *(b"old" for _ in range(3000)))
            await age()
            gateway.update("a", config(gate))
            while gateway.status("a").last_exported_sequence_number < 2999:
                newest = gateway.store.streams["a"].next_sequence
                await gateway.append("a", b"new")
                await until(lambda newest=newest: any(b[0] <= newest <= b[1] for b in recorded(gate / "out")))
            await gateway.exported("a", gateway.store.streams["a"].next_sequence - 1)

    asyncio.run(scenario())
    sent = [number for batch in recorded(gate / "out") for number in batch[2]]
    assert sorted(sent) == list(range(len(sent)))
    assert any(a > 3000 and b < 2999 for a, b in itertools.pairwise(sent))


def test_new_messages_of_an_export_go_before_the_backlogs_of_the_others(gate: Path) -> None:
    names = [f"s{n}" for n in range(12)]
    waited = []

    async def scenario() -> None:
        async with running(gate, tuning=QUICK, threads=1) as gateway:
            for name in names:
                gateway.create(name, config(gate, disabled=True))
                await gateway.append(name, *(b"old" for _ in range(1000)))
            await age()
            for name in names:
                gateway.update(name, config(gate, seconds=0.03))
            await until(lambda: len({batch[3] for batch in recorded(gate / "out")}) == len(names))
            for _ in range(5):
                before = recorded(gate / "out")
                name = before[-1][3]  # in turn, it would be the last
                newest = gateway.store.streams[name].next_sequence
                await gateway.append(name, b"new")
                new = lambda batch, name=name, newest=newest: batch[3] == name and batch[1] == newest  # noqa: E731
                await until(lambda new=new: any(map(new, recorded(gate / "out"))))
                waited.append([*map(new, recorded(gate / "out"))].index(True) - len(before))

    asyncio.run(scenario())
    assert min(waited) < len(names) - 3, waited


def settled(cursor: Cursor) -> Ranges:
    return Ranges([(0, cursor.position - 1), *cursor.ranges] if cursor.position else cursor.ranges)


def test_whenever_the_worker_is_killed_no_message_is_lost_and_the_position_never_leads(gate: Path) -> None:
    chance = random.Random(3)

    async def scenario() -> None:
        async with running(gate, tuning=QUICK) as gateway:
            gateway.create("a", config(gate))
            for _ in range(4):
                (gate / "down").touch()
                await gateway.append("a", *(b"x" for _ in range(chance.randrange(50, 300))))
                await age()
                (gate / "down").unlink()
                before = len(recorded(gate / "out"))
                some = before + chance.randrange(4)
                await until(
                    lambda some=some: (
                        len(recorded(gate / "out")) >= some
                        or gateway.status("a").last_exported_sequence_number + 1
                        == gateway.store.streams["a"].next_sequence
                    )
                )
                pid = gateway.exports.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                known = settled(on_disk(gate))  # before the file of what was sent is read
                for first, last in known:
                    sent = Ranges((batch[0], batch[1]) for batch in recorded(gate / "out"))
                    assert sent.covers(first, last)
                await until(lambda pid=pid: gateway.exports.pid not in (pid, None), 60)
            await gateway.exported("a", gateway.store.streams["a"].next_sequence - 1, 60)

    asyncio.run(scenario())
    batches = {(batch[0], batch[1]) for batch in recorded(gate / "out")}
    numbers = [number for first, last in batches for number in range(first, last + 1)]
    assert sorted(numbers) == list(range(len(numbers)))  # what was sent twice had the same boundaries


def test_when_the_order_is_changed_what_was_sent_is_not_sent_again(gate: Path) -> None:
    async def scenario() -> None:
        (gate / "down").touch()
        async with running(gate, tuning=QUICK) as gateway:
            gateway.create("a", config(gate, seconds=0.05))  # the backlog takes a while
            await gateway.append("a", *(b"old" for _ in range(500)))
            await until(lambda: gateway.status("a").error_message)
            await age()
            (gate / "down").unlink()
            await until(lambda: gateway.status("a").exported_ahead)
            gateway.update("a", config(gate, order="oldest first"))
            await gateway.exported("a", 499)

    asyncio.run(scenario())
    sent = [number for batch in recorded(gate / "out") for number in batch[2]]
    assert sorted(sent) == list(range(500))


def test_messages_that_were_dropped_from_the_backlog_are_passed(gate: Path) -> None:
    async def scenario() -> None:
        (gate / "down").touch()
        async with running(gate, tuning=QUICK) as gateway:
            gateway.create("a", config(gate), limits={"maxMessages": 100})
            for _ in range(3):
                await gateway.append("a", *(b"x" for _ in range(100)))
                await age()
            (gate / "down").unlink()
            await gateway.exported("a", 299)
            status = gateway.status("a")
            assert status.exported_messages_count + status.skipped_messages_count == 300

    asyncio.run(scenario())


def test_after_outages_and_kills_the_table_is_exact_and_the_verdict_true_at_each_moment(
    bucket: Bucket, tmp_path: Path
) -> None:
    """The real exporter, worker and ingest job; the table is in memory."""
    chance = random.Random(5)
    landing = Landing(chance, time.time)
    table = Table(landing)
    appended: dict[tuple[str, str, int, int], bytes] = {}
    check = CloudCheck(landing, table, appended, "raw")
    complete = []

    def ingest(*, full: bool) -> None:
        report = bucket.names()  # the reports before the objects, as the job reads them
        for key in sorted(report, key=lambda key: "_gateway" not in key):
            if key not in landing.objects or "_gateway" in key:
                landing.store(key, bucket.body(key), "put")
        ended = ingest_run(landing, table, chance, prefix="raw", full_every=0 if full else 10**6)
        assert ended.error is None
        assert ended.summary is not None
        check.table()
        check.run(ended)
        assert not any(stream.missing for stream in ended.summary.report.streams)
        complete.append(ended.summary.report.complete)

    def export(**more: Any) -> dict[str, list[dict[str, Any]]]:
        return {"s3": [bucket.config(order="newest first", sizeHintBytes=3000, timeHintMillis=1, **more)]}

    async def put(gateway: Gateway, count: int) -> None:
        stream = gateway.store.streams["a"]
        for number in range(stream.next_sequence, stream.next_sequence + count):
            appended["gw-1", "a", stream.epoch, number] = b"%d" % number * 20
        first = stream.next_sequence
        await gateway.append("a", *(b"%d" % number * 20 for number in range(first, first + count)))

    async def scenario() -> None:
        async with running(tmp_path, tuning=QUICK) as gateway:
            gateway.create("a", export())
            for outage in range(3):
                gateway.update("a", export(disabled=True))
                await put(gateway, 400)
                await age()
                gateway.update("a", export())
                for _ in range(3):
                    await put(gateway, 3)
                    objects = len(bucket.data_keys())
                    await until(lambda objects=objects: len(bucket.data_keys()) >= objects + 2)
                    ingest(full=bool(outage % 2))
                pid = gateway.exports.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                await until(lambda pid=pid: gateway.exports.pid not in (pid, None), 60)
            newest = gateway.store.streams["a"].next_sequence - 1
            await gateway.exported("a", newest, 60)
            await until(lambda: bucket.reported_exported() == [newest])

    asyncio.run(scenario())
    arrived = [object_key.first for key in bucket.arrivals() if (object_key := parse_key(key))]
    assert arrived != sorted(arrived)  # newer messages went before the backlog
    ingest(full=False)
    ingest(full=True)
    check.everything(appended)
    assert complete[-1]
    bucket.remove()


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "mistake"),
    [
        ("s3", {"bucket": "landing", "reduce": [{"sample": 2}]}, "reduce"),
        ("s3TaskExecutor", {}, "in the order of their numbers"),
        ("consumer", {}, "in the order of their numbers"),
        ("kinesis", {"kinesisStreamName": "s", "partitionKey": "{topic}"}, "orderPerKey"),
        ("mqtt", {"url": "mqtt://hub"}, "cannot tell a payload alone"),
        ("mqtt", {"url": "mqtt://hub", "record": "json", "retain": "always"}, "the retained message"),
        ("kinesis", {"kinesisStreamName": "s", "order": "backwards"}, "order"),
    ],
)
def test_it_is_refused_where_the_order_is_a_promise(kind: str, options: dict[str, Any], mistake: str) -> None:
    with pytest.raises((InvalidRequest, InvalidDefinition), match=mistake):
        REGISTRY.config(kind, {"identifier": "x", "order": "newest first", **options})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("s3", {"bucket": "landing"}),
        ("firehose", {"deliveryStreamName": "s"}),
        ("http", {"uri": "https://example.com"}),
        ("IotSitewise", {}),
        ("iotAnalytics", {"iotChannel": "c"}),
        ("kinesis", {"kinesisStreamName": "s"}),
        ("kinesis", {"kinesisStreamName": "s", "partitionKey": "{topic}", "orderPerKey": False}),
        ("mqtt", {"url": "mqtt://hub", "record": "json"}),
    ],
)
def test_it_is_taken_where_the_destination_does_not_rely_on_the_order(
    kind: str, options: dict[str, Any]
) -> None:
    assert REGISTRY.config(kind, {"identifier": "x", "order": "newest first", **options}).newest_first


def test_a_plugin_that_was_promised_batches_in_order_gets_them_in_order(gate: Path) -> None:
    found = discovery.load([gate / "plugins"])
    (raw,) = config(gate)["gate"]
    assert found.config("gate", raw).newest_first
    with pytest.raises(InvalidRequest, match="in the order of their numbers"):
        found.config("in order", raw)


# -- the position ---------------------------------------------------------------------------------


class Before(Struct, kw_only=True):
    """A cursor as versions without ranges know it."""

    epoch: int
    kind: str
    start: int = 0
    position: int = 0
    planned: tuple[int, int] | None = None
    messages: int = 0
    size: int = 0
    rejected: int = 0
    skipped: int = 0
    last_time: int = 0
    error: str | None = None
    state: bytes = b""
    transform: bytes = b""
    reached: int = -1
    stopped: bytes = b""
    limit: int = 0
    error_since: int = 0


def test_a_position_without_ranges_is_written_as_before(tmp_path: Path) -> None:
    values: dict[str, Any] = {"epoch": 7, "kind": "s3", "position": 40, "planned": (40, 49), "messages": 40}
    now, before = Cursor(**values), Before(**values)
    assert msgspec.msgpack.encode(now) == msgspec.msgpack.encode(before)
    now.unplan()
    now.settle(60, 69)  # and when they are gone
    now.settle(40, 59)
    before = Before(**{**values, "planned": None, "position": 70})
    assert msgspec.msgpack.encode(now) == msgspec.msgpack.encode(before)


def test_a_version_that_does_not_know_ranges_skips_nothing() -> None:
    cursor = Cursor(epoch=7, kind="s3", position=40)
    cursor.settle(60, 69)
    cursor.plan(70, 79)
    cursor.unplan()
    cursor.settle(70, 79)
    cursor.plan(90, 99)
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(cursor), type=Before)
    assert (old.position, old.planned, old.reached) == (40, None, 99)
    cursor.unplan()
    cursor.plan(40, 49)
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(cursor), type=Before)
    assert (old.position, old.planned) == (40, (40, 49))


def test_whatever_is_settled_in_whatever_order_exactly_that_is_settled() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        cursor, done = Cursor(epoch=7, kind="k"), set[int]()
        while len(done) < 60:
            first, last = chance.choice(cursor.pending(60))
            first = chance.randint(first, last)
            last = chance.randint(first, last)
            cursor.settle(first, last)
            done |= set(range(first, last + 1))
            assert cursor.position == next(n for n in range(61) if n not in done)
            assert {n for a, b in settled(cursor) for n in range(a, b + 1)} == done
            assert cursor.front == max(done) + 1 if done else 0
        assert cursor.ahead is msgspec.UNSET


def test_the_largest_position_fits_in_its_slot(tmp_path: Path) -> None:
    top = 2**63 - 1
    ahead = [(top - 4 * n - 1, top - 4 * n) for n in range(MAX_AHEAD)][::-1]
    cursor = Cursor(
        epoch=top, kind="k" * 64, start=top, position=top - 1000, planned_ahead=(top - 1, top), messages=top,
        size=top, rejected=top, skipped=top, last_time=top, error="\u20ac" * 166, state=bytes(2000),
        reached=top, stopped=bytes(16), limit=top, ahead=ahead,
    )  # fmt: skip
    file = CursorFile(tmp_path / "c.cursor")
    file.write(cursor)
    file.close()
    assert (tmp_path / "c.cursor").stat().st_size == 2 * SLOT
    found = CursorFile.read(tmp_path / "c.cursor")
    assert found is not None
    assert (found.ranges, found.batch) == (ahead, (top - 1, top))


def test_ranges_with_pending_numbers_between_them_are_not_joined(tmp_path: Path) -> None:
    skipped = Skipped(tmp_path / "x.skipped")
    backlog = [(5000, 5999)]
    for begin in (*range(0, 5000, 500), *range(6000, 12_000, 500)):
        skipped.add([(n, n, "limits") for n in range(begin, begin + 500, 2)], backlog)
    assert len(skipped.ranges) < 2100
    assert skipped.ranges[0] == (0, 4998, "joined:2500")
    assert skipped.ranges[1][0] == 6000
    skipped.add([(5000, 5099, "limits")], [(5100, 5999)])
    assert (5000, 5099, "limits") in Skipped(tmp_path / "x.skipped").ranges


def test_what_was_exported_ahead_is_not_pending() -> None:
    status = ExportStatus(
        export_config_identifier="x", last_exported_sequence_number=9, exported_ahead=[(20, 29), (40, 49)]
    )
    assert (status.first_pending(0), status.pending(0, 60)) == (10, 30)
    assert (status.first_pending(15), status.pending(15, 50)) == (15, 15)
    assert (status.first_pending(25), status.pending(25, 50)) == (30, 10)  # a limit has dropped the others
    assert (status.first_pending(45), status.pending(45, 50)) == (50, 0)
    assert (status.first_pending(60), status.pending(60, 60)) == (60, 0)


def test_a_gateway_report_without_ranges_is_as_before() -> None:
    base: dict[str, Any] = {"stream": "a", "epoch": 7, "identifier": "x", "config": OLDEST, "oldest": 0}
    plain = Progress(**base, newest=9, exported=3, skipped=[])
    (stream,) = msgspec.json.decode(gateway_report("g", 0, [plain]))["streams"]
    assert list(stream) == ["stream", "epoch", "oldest", "newest", "exported", "dropped"]
    for order, ahead in ((OLDEST, [(6, 7)]), (NEWEST, [(6, 7)]), (NEWEST, [])):
        ranged = msgspec.structs.replace(plain, config=order, exported_ahead=ahead)
        (stream,) = msgspec.json.decode(gateway_report("g", 0, [ranged]))["streams"]
        assert stream["ahead"] == [list(pair) for pair in ahead]


# -- where the next batch begins ------------------------------------------------------------------


class Pending:
    """Stands in for a planner: batches of up to ten messages, of which those from `fresh` on are new."""

    def __init__(self, source: Source, chance: random.Random) -> None:
        self.source, self.chance, self.fresh = source, chance, 0

    def recent(self, position: int, millis: int) -> int:
        if position >= self.source.next:
            return position
        return max(position, min(self.fresh, self.source.next - 1))

    def due(self, position: int) -> float:
        return 0.0

    def plan(self, position: int, config: ExportConfig, upto: int | None = None) -> Plan | None:
        end = min(position + self.chance.randint(1, 10), upto or self.source.next)
        if position >= end or (upto is None and self.chance.random() < 0.3):
            return None
        return Plan(position, end - 1, list(range(position, end)), [])  # type: ignore[arg-type]


def steps(seed: int, config: BatchedConfig) -> Iterator[tuple[Cursor, Order, int, int]]:
    """Batches of an export while messages come faster than they go, and then no more."""
    chance = random.Random(seed)
    source = Source("a", Path(), 7)
    planner = Pending(source, chance)
    cursor, order = Cursor(epoch=7, kind="k"), Order(source, cast("Planner", planner), 5)
    for step in range(20_000):
        if step < 2000:
            source.next += chance.choice((0, 3, 30))
            if chance.random() < 0.3:  # what is pending has become old
                planner.fresh = source.next
        elif cursor.position == source.next:
            return
        if chance.random() < 0.01:  # a new worker
            order = Order(source, cast("Planner", planner), 5)
        order.look(cursor, config)
        _, plan = order.plan(cursor, config)
        if plan is not None:
            first, last = cast("int", plan.records[0]), cast("int", plan.records[-1])
            yield cursor, order, first, last
            cursor.settle(first, last)
    raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("seed", range(5))
def test_on_a_link_that_is_always_too_slow_the_ranges_are_bounded_and_each_message_is_sent_once(
    seed: int,
) -> None:
    sent, most = set[int](), 0
    for cursor, _, first, last in steps(seed, NEWEST):
        numbers = set(range(first, last + 1))
        assert not sent & numbers
        sent |= numbers
        most = max(most, len(cursor.ranges))
    assert sent == set(range(len(sent)))
    assert most == MAX_AHEAD


def test_oldest_first_the_numbers_ascend() -> None:
    at = 0
    for cursor, order, first, last in steps(1, OLDEST):
        assert first == at
        assert not order.has_backlog(cursor)
        at = last + 1


def test_a_request_is_as_large_as_the_link_moves_in_a_slice_of_time() -> None:
    for rate in (8000, 125_000, 3_000_000):  # bytes per second
        slices = Slices()
        for _ in range(30):
            slices.delivered(slices.size, 0.03 + slices.size / rate)
        assert 0.9 * rate * SLICE < slices.size <= rate * SLICE
        slices.delivered(100, 0.2)  # a small one says nothing
        assert slices.size > 0.9 * rate * SLICE
        for _ in range(2):  # the link is slower now
            slices.delivered(slices.size, 0.03 + slices.size / 4000)
        assert slices.size <= 4000 * SLICE
