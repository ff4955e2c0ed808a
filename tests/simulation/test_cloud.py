"""The cloud alone, from one seed: gateways with the real s3 exporter, the real ingest job, faults everywhere.

The gateways are simple: they append, drop, plan a batch, send it until it is accepted, crash in between, and
report. What the rest of a gateway does to its messages is not of interest here.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from botocore.exceptions import ConnectionClosedError

from bridge import Batch, Context, Exporter, Record, Retry
from bridge.ingest.errors import CommitConflict
from bridge.ingest.files import DataFile
from bridge.ingest.planner import RoundLimits, StreamId
from bridge.plugin import discovery
from bridge.plugin.api import Progress, convert_config
from bridge.ranges import Ranges

from .bucket import ENDPOINT, Bucket, Faults
from .cloud import CloudCheck, CloudError, Ended, Killed, Row, RunFaults, ingest_run
from .table import Table, TableSink

CLS = discovery.load().exporters["s3"]
NOON = 1_795_000_000.0  # Unix time in seconds when a world begins


class Clock:
    """Time that passes when the world says so; seconds."""

    def __init__(self) -> None:
        self.time = NOON

    def now(self) -> float:
        return self.time


class Link(Context):
    """What the exporters of one gateway may call."""

    def __init__(self, gateway: Gateway, stream: str, epoch: int) -> None:
        super().__init__(gateway.name, stream, epoch)
        self._gateway = gateway

    def client(self, service: str, config: Any, **options: Any) -> Any:
        assert service == "s3"
        return self._gateway.client

    def now(self) -> float:
        return self._gateway.clock.time

    monotonic = now

    def exports(self) -> list[Progress]:
        return [stream.progress() for stream in self._gateway.streams]


class Stream:
    """A stream of a gateway and its export. All that is here survives a crash, but for the exporter."""

    order = "oldest first"

    def __init__(self, gateway: Gateway, name: str, epoch: int) -> None:
        self.gateway, self.name, self.epoch = gateway, name, epoch
        self.records: list[Record] = []
        self.exported = -1
        self.tried = -1  # the last number of the batch that was begun
        self.dropped: list[tuple[int, int, str]] = []
        self.ahead = Ranges()  # that are exported, too
        self.context: Link | None = None

    def start(self) -> None:
        """Make the exporter anew."""
        config = {
            "identifier": "up",
            "bucket": "landing",
            "endpointUrl": ENDPOINT,
            "reportIntervalMillis": 2000,
            "order": self.order,
        }
        before, self.context = self.context, Link(self.gateway, self.name, self.epoch)
        if before is not None:
            self.context.state = before.state
        self.exporter: Exporter = CLS(convert_config(CLS, config), self.context)

    def progress(self) -> Progress:
        return Progress(
            stream=self.name, epoch=self.epoch, identifier="up", config=self.exporter.config, oldest=0,
            newest=len(self.records) - 1, exported=self.exported, skipped=sorted(self.dropped),
            exported_ahead=list(self.ahead),
        )  # fmt: skip

    def append(self, random: Random, appended: dict[Row, bytes], left_out: dict[StreamId, Ranges]) -> None:
        """Append messages; of one stream most are of topics that its export does not want."""
        name = StreamId(self.gateway.name, self.name, self.epoch)
        for _ in range(random.randint(1, 40)):
            number, payload = len(self.records), random.randbytes(random.randrange(20))
            when = int(self.gateway.clock.time * 1000)
            wanted = self.name == "readings" or random.random() < 0.2
            topic = f"plant/{self.name}" if wanted else "other"
            self.records.append(Record(number, when, topic, payload))
            if wanted:
                appended[*name, number] = payload
            else:
                left_out.setdefault(name, Ranges()).add(number, number)

    def drop(self, random: Random) -> None:
        """Drop the oldest pending messages; they may be of a batch that was tried."""
        last = min(self.exported + random.randint(1, 60), len(self.records) - 1)
        if last > self.exported:
            self.dropped.append((self.exported + 1, last, "overwritten"))
            self.exporter.dropped(self.exported + 1, last, "overwritten")
            self.exported, self.tried = last, -1

    def export(self, random: Random) -> None:
        """Make one attempt at a batch; crash before its position is stored, perhaps."""
        first, newest = self.exported + 1, len(self.records) - 1
        if first > newest:
            return
        if self.tried < first:
            self.tried = min(first + random.randint(0, 60), newest)
        if self.send(random, first, self.tried):
            self.exported = self.tried

    def send(self, random: Random, first: int, last: int) -> bool:
        """Make one attempt; return whether it has succeeded, and the gateway still knows."""
        wanted = [record for record in self.records[first : last + 1] if record.topic != "other"]
        if not wanted:
            self.dropped.append((first, last, "filtered"))
            self.exporter.dropped(*self.dropped[-1])
            return True
        batch = Batch(self.gateway.name, self.name, self.epoch, first, last, wanted)
        try:
            self.exporter.export(batch)
        except Retry:
            return False
        if random.random() < 0.1:
            self.gateway.start()
            return False
        return True

    def has_dropped(self, number: int) -> bool:
        return any(low <= number <= high for low, high, _ in self.dropped)


class NewestFirst(Stream):
    """Sends batches from anywhere in what is pending."""

    order = "newest first"
    batch: tuple[int, int] | None = None

    def drop(self, random: Random) -> None:
        """Drop the oldest pending messages, as far as the first range goes."""
        first, _ = next(iter(self.ahead), (len(self.records), 0))
        last = min(self.exported + random.randint(1, 60), first - 1)
        if last > self.exported:
            self.dropped.append((self.exported + 1, last, "overwritten"))
            self.exporter.dropped(self.exported + 1, last, "overwritten")
            self.batch = None
            self._settle(self.exported + 1, last)

    def export(self, random: Random) -> None:
        pending = self.ahead.missing(self.exported + 1, len(self.records) - 1)
        if self.batch is None:
            if not pending:
                return
            first, last = random.choice(pending)
            first = random.choice((first, random.randint(first, last)))
            self.batch = first, min(first + random.randint(0, 60), last)
        if self.send(random, *self.batch):
            self._settle(*self.batch)
            self.batch = None

    def _settle(self, first: int, last: int) -> None:
        self.ahead.add(first, last)
        low, high = next(iter(self.ahead))
        if low == self.exported + 1:
            self.ahead.take(low, high)
            self.exported = high


class Gateway:
    """A gateway with some streams."""

    def __init__(self, name: str, bucket: Bucket, clock: Clock, kind: type[Stream]) -> None:
        self.name, self.bucket, self.clock = name, bucket, clock
        self.streams = [kind(self, stream, int(clock.time)) for stream in ("readings", "a/b c")]
        self.start()

    def start(self) -> None:
        """Start a process, as after a crash."""
        self.client = self.bucket.client()
        for stream in self.streams:
            stream.start()

    def idle(self) -> None:
        """Write the report, if it is old."""
        for stream in self.streams:
            try:
                stream.exporter.idle()
            except Retry:
                return


class World:
    """Some gateways, a bucket, a table, and what happens from one seed.

    The kinds of what it is made of are given, so that a test can plant a mistake in one.
    """

    def __init__(
        self,
        seed: int,
        sink: type[TableSink] = TableSink,
        bucket: type[Bucket] = Bucket,
        stream: type[Stream] = Stream,
    ) -> None:
        self.random, self.clock = Random(seed), Clock()
        self.bucket = bucket(self.random, self.clock.now, Faults.all(0.03))
        self.lake = Bucket(self.random, self.clock.now, name="lake")
        self.table = Table(self.lake, kind=sink)
        self.appended: dict[Row, bytes] = {}
        self.left_out: dict[StreamId, Ranges] = {}
        self.check = CloudCheck(self.bucket, self.table, self.appended, left_out=self.left_out)
        self.gateways = [Gateway(name, self.bucket, self.clock, stream) for name in ("gw-a", "gw-b")]
        self.faults = RunFaults(0.002, 0.005, 0.002, 0.002, 0.1)
        self.runs: list[Ended] = []
        self.depth = 0

    def step(self) -> None:
        """Let something happen."""
        random = self.random
        self.clock.time += random.random()
        stream = random.choice(random.choice(self.gateways).streams)
        chance = random.random()
        if chance < 0.3:
            stream.append(random, self.appended, self.left_out)
        elif chance < 0.8:
            stream.export(random)
        elif chance < 0.82:
            stream.drop(random)
        elif chance < 0.92:
            stream.gateway.idle()
        elif chance < 0.94:
            self.bucket.late()
        elif chance < 0.95:
            self.bucket.down = not self.bucket.down
        elif chance < 0.955:
            self.harm()
        elif chance < 0.96 and self.bucket.harmed:
            self.bucket.upload_again(random.choice(sorted(self.bucket.harmed)))
        elif chance > 0.985:
            self.ingest()

    def harm(self) -> None:
        """Somebody harms an object."""
        data = [key for key in self.bucket.keys if key.startswith("gateway=")]
        if data:
            do = self.random.choice([self.bucket.delete, self.bucket.damage, self.bucket.tear])
            do(self.random.choice(data))

    def ingest(self) -> None:
        """Let an ingest run work; meanwhile other things happen, another run too."""
        if self.depth == 2:
            return
        self.depth += 1
        limits = RoundLimits(objects=self.random.choice([2, 10, 1000]))
        again = self.random.random() < 0.2
        ended = ingest_run(
            self.bucket, self.table, self.random, self.at, faults=self.faults, limits=limits,
            retry_quarantined=again, full_every=self.random.choice([0, 60, 86_400]),
        )  # fmt: skip
        self.depth -= 1
        self.runs.append(ended)
        self.check.table()
        self.check.run(ended, self.excused)
        if self.random.random() < 0.1:
            self.table.sink().compact(None)
            self.check.table()

    def at(self, point: str) -> None:
        """Do what happens between two steps of a run; the narrow places are made wider."""
        random, faulty = self.random, self.faults.killed > 0
        verb, _, key = point.partition(" ")
        if random.random() < (0.2 if verb == "list" else 0.03):
            for _ in range(random.choice([1, 3, 40])):
                self.step()
        if random.random() < (0.1 if verb in ("task", "commit") else 0.002):
            self.ingest()
        if verb == "get" and key in self.bucket.objects and random.random() < 0.01:
            self.bucket.delete(key)
        if faulty and verb in ("commit", "committed") and random.random() < 0.1:
            broken = ConnectionClosedError(endpoint_url=ENDPOINT)
            raise random.choice([Killed(point), broken, CommitConflict("refused when it was repeated")])

    def excused(self, stream: StreamId, number: int) -> bool:
        """Whether the gateway has dropped it."""
        return any(
            (gateway.name, one.name, one.epoch) == stream and one.has_dropped(number)
            for gateway in self.gateways
            for one in gateway.streams
        )

    def settle(self) -> Ended:
        """End all faults, put everything back, let all arrive; then one run."""
        self.bucket.down, self.bucket.faults, self.faults = False, Faults(), RunFaults()
        while self.bucket.late():
            pass
        for key in sorted(self.bucket.harmed):
            self.bucket.upload_again(key)
        for gateway in self.gateways:
            for stream in gateway.streams:
                while stream.exported < len(stream.records) - 1:
                    stream.export(self.random)
            self.clock.time += 10
            gateway.start()  # the report that arrived late may be an old one
            gateway.idle()
        ended = ingest_run(self.bucket, self.table, self.random, retry_quarantined=True)
        self.check.table()
        self.check.run(ended, self.excused)
        self.check.everything(self.appended, self.excused)
        return ended


def played(seed: int, steps: int = 1000, **kinds: Any) -> tuple[World, Ended]:
    """Play a world to its end; raises what its checks raise."""
    world = World(seed, **kinds)
    for _ in range(steps):
        world.step()
    ended = world.settle()
    assert ended.summary is not None
    if not ended.summary.report.complete or ended.summary.report.refused:
        raise CloudError(f"not complete, though all is settled: {ended.summary.report.to_json()}")
    return world, ended


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 60), marks=pytest.mark.slow(seconds=100))], ids=["few", "many"]
)
def test_whatever_happens_the_table_has_every_row_once_and_verdicts_are_true(seeds: Sequence[int]) -> None:
    for seed in seeds:
        world, _ = played(seed)
        assert world.check.rows > 3000, seed


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 60), marks=pytest.mark.slow(seconds=150))], ids=["few", "many"]
)
def test_with_the_newest_first_what_is_still_to_come_is_never_called_missing(seeds: Sequence[int]) -> None:
    for seed in seeds:
        world, _ = played(seed, stream=NewestFirst)
        assert world.check.rows > 3000, seed


@pytest.mark.parametrize("known", [0, 1], ids=["known gateway", "new gateway"])
def test_what_goes_ahead_after_the_reports_were_read_and_before_the_listing_leaves_nothing_missing(
    known: int,
) -> None:
    world = World(1, stream=NewestFirst)
    world.bucket.faults = Faults()
    stream, hidden = world.gateways[0].streams[0], world.gateways[0].streams.pop(0)
    assert isinstance(stream, NewestFirst)
    other = world.gateways[known].streams[-1]  # there is a report, and it is about this stream
    other.append(world.random, world.appended, world.left_out)
    other.exporter.dropped(0, 0, "expired")
    other.gateway.idle()
    world.gateways[0].streams.append(hidden)
    while len(stream.records) < 100:
        stream.append(world.random, world.appended, world.left_out)
    lists = []

    def at(point: str) -> None:
        lists.extend([point] if point.startswith("list") else [])
        if len(lists) == 2 and not stream.ahead:
            stream.batch = (50, 60)
            while stream.batch:
                stream.export(world.random)

    ended = ingest_run(world.bucket, world.table, world.random, at)
    world.check.table()
    world.check.run(ended)
    assert ended.summary is not None
    (found,) = (one for one in ended.summary.report.streams if one.path == "gw-a/readings")
    assert (found.rows, found.waiting, found.missing) == (11, 50, 0)
    ended = ingest_run(world.bucket, world.table, world.random)
    world.check.run(ended)
    assert ended.summary is not None
    assert ended.summary.report.complete


def test_a_seed_gives_the_same_world_again() -> None:
    def story() -> object:
        world, _ = played(11, 400)
        # names of states and files are drawn elsewhere: a kill says at which it came
        ends = [(str(run.error).partition(" ")[0], run.since, sorted(run.reports)) for run in world.runs]
        return world.bucket.log, ends, world.check.rows, world.table.commits

    assert story() == story()


class Blind(TableSink):
    """Commits without looking whether another run was first."""

    def commit(self, previous: int | None, version: int, files: Sequence[DataFile]) -> None:
        super().commit(self.memory.now.pointer, version, files)


class InTwo(TableSink):
    """Commits the files first, and then the pointer."""

    def commit(self, previous: int | None, version: int, files: Sequence[DataFile]) -> None:
        self.add(previous, self.memory.now.files, files)
        super().commit(previous, version, [])


class Lossy(TableSink):
    """Forgets a file when there are many."""

    def commit(self, previous: int | None, version: int, files: Sequence[DataFile]) -> None:
        super().commit(previous, version, files[:2])


class Stale(TableSink):
    """Answers with the pointer of the commit before, and takes it for the current one.

    Not before there are two: a run refuses a table that has rows and no pointer.
    """

    def pointer(self) -> int | None:
        before = self.memory.versions[-2].pointer if len(self.memory.versions) > 1 else None
        return self.memory.now.pointer if before is None else before

    def commit(self, previous: int | None, version: int, files: Sequence[DataFile]) -> None:
        super().commit(self.memory.now.pointer, version, files)


class Hasty(Stream):
    """Takes an attempt without an answer for delivered."""

    def export(self, random: Random) -> None:
        super().export(random)
        self.exported = max(self.exported, self.tried)


class Forgetful(Stream):
    """Drops messages and does not report it."""

    def drop(self, random: Random) -> None:
        super().drop(random)
        self.dropped.clear()


class Silent(Stream):
    """Leaves messages out and does not say so: the numbers that it declares are those of other messages."""

    def export(self, random: Random) -> None:
        hidden = random.randrange(len(self.records)) if self.records else 0
        if self.name == "readings" and hidden > self.exported and random.random() < 0.1:
            self.records[hidden] = msgspec.structs.replace(self.records[hidden], topic="other")
        super().export(random)


class Unannounced(NewestFirst):
    """Uploads the newest messages first, and does not say so before."""

    order = "oldest first"


class Leaky(Bucket):
    """Stores less of an object than it was given."""

    def store(self, key: str, body: bytes, what: str, metadata: dict[str, str] | None = None) -> str:
        if what == "put" and self.random.random() < 0.02:
            body = body[:-1]
        return super().store(key, body, what, metadata)


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ({"sink": Blind}, "more than once|the state covers|doubled by a compaction"),
        ({"sink": InTwo}, "more than once|the state covers|doubled by a compaction"),
        ({"sink": Lossy}, "the state covers"),
        ({"sink": Stale}, "more than once|the state covers|is used by the table, and has gone"),
        ({"stream": Hasty}, "called missing"),
        ({"stream": Forgetful}, "called missing"),
        ({"stream": Silent}, "left out, and was not"),
        ({"stream": Unannounced}, "called missing"),
        ({"bucket": Leaky}, "nobody has harmed it"),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_a_mistake_that_is_planted_is_found(kinds: dict[str, Any], found: str) -> None:
    with pytest.raises(CloudError, match=found):
        for seed in range(20):
            played(seed, 500, **kinds)
