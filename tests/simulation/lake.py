"""Runs of the ingest job and of its operators' commands in a world, and what must be true after each.

What a run may meet between any two of its steps: the gateway goes on, another run begins and ends, somebody
harms an object that has been listed, or tends the table. Mostly little happens there. But some moments last,
where a run begins to do something else: enough for messages to come, to be uploaded and reported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructType

from bridge.ingest.planner import StreamId
from bridge.ingest.repair import repair
from bridge.ingest.source import ObjectReader
from bridge.ingest.state import load_state
from bridge.ingest.upkeep import accept, prune
from bridge.objectkeys import parse_key, report_key
from bridge.ranges import Ranges

from .cloud import CloudCheck, CloudError, Ended, RunFaults, absent, ingest_run, tend
from .query import Query

if TYPE_CHECKING:
    from .checks import Checks
    from .world import World

AT_ONCE = 2  # runs
LASTS = 0.07  # of the moments of a run, so many last
LATE = 3  # messages of the stream late
READ = StructType().add("stream", "string").add("epoch", "string").add("sequence_number", "long")


class LakeChecks:
    """The truth about the lake of one world."""

    def __init__(self, world: World, checks: Checks) -> None:
        self.world, self._checks, self._random = world, checks, world.cloud_random
        self.cloud = CloudCheck(world.bucket, world.table, checks.appended, left_out=checks.left_out)
        self.query = Query(world, checks)
        self._running = 0
        self._begun = 0  # runs
        self._used = False

    # -- runs

    def ingest(self) -> None:
        """One run, with faults; the world goes on meanwhile."""
        if self._running >= AT_ONCE or self._checks.lied:
            return
        self._running += 1
        self._used = True
        self._begun += 1
        number = self._begun
        faults = RunFaults(0.002, 0.005, 0.002, 0.002, 0.05, unanswered=0.3)
        try:
            ended = self._run(faults=faults, full_every=self._random.choice((0, 0, 20)))
            self._is_right(ended, alone=self._begun == number)
        finally:
            self._running -= 1

    def _run(self, **options: Any) -> Ended:
        world, last = self.world, ""

        def meanwhile(point: str) -> None:
            nonlocal last
            before, last = last, _kind(point)
            if self._running > 1:
                return
            if last == "commit again" and self._random.random() < 0.8:  # it takes long to be given up
                self._long_meanwhile(("run", "run", "run, and tend"))
            elif last != before and self._random.random() < LASTS:
                self._long_meanwhile(("run", "run", "run", "tend", "tend", "harm", ""))
            else:
                self._meanwhile()

        return ingest_run(world.bucket, world.table, self._random, meanwhile, **options)

    def _meanwhile(self) -> None:
        drawn = self._random.random()
        if drawn < 0.05:
            self.world.kernel.pass_time(self._random.random() * 0.05)
        elif drawn < 0.06:
            self.world.harm(self._random.choice(("delete", "delete", "damage")))
        elif drawn < 0.07:
            self.ingest()

    def _long_meanwhile(self, then: Sequence[str]) -> None:
        """Messages come and are uploaded; then another run begins and ends, or somebody does something."""
        what = self._random.choice(then)
        self.world.ensure()
        self._publish(self._random.choice(("safe", "safe", "plain")), self._random.choice((1, 3)))
        self.world.kernel.pass_time(1.0 + self._random.random() * 0.5)
        if "run" in what:
            self.ingest()
        if "tend" in what:
            self.tend()
        if "harm" in what:
            self.world.harm(self._random.choice(("delete", "damage")))

    def _publish(self, family: str, number: int) -> None:
        device = self.world.devices[0]
        for _ in range(number):
            device.publish(f"{family}/0", f"{device.name} {len(device.messages)} for the lake".encode(), 1)

    def _is_right(self, ended: Ended, *, alone: bool) -> None:
        try:
            self.cloud.table()
            if self._running == 1:  # what else happened is known to the outer one alone
                self.cloud.run(ended, self._lost_at_gateway, alone=alone)
        except CloudError as error:
            self._checks.broken(f"the table: {error}")

    def _lost_at_gateway(self, stream: Any, number: int) -> bool:
        checks = self._checks
        payload = checks.seen[stream.stream].get(number)
        if stream.stream in self.world.plan.wanted and not (
            payload and checks.wanted(stream.stream, payload)
        ):
            return True
        before_start = number < checks.exports.latest_start(stream.stream)
        lost = bool(checks.losses) and payload is None
        return stream.stream == "ring" or before_start or lost

    def at_rest(self) -> None:
        """Nothing fails any more: the table gets everything. Not in all worlds, which saves time."""
        world, checks = self.world, self._checks
        if not (
            self._used
            or self.query.used
            or world.plan.replaced
            or world.export_starts
            or world.plan.seed % 3 == 0
        ):
            return
        for key in sorted(world.bucket.harmed):
            world.bucket.upload_again(key)
        self._running = 1
        ended = ingest_run(world.bucket, world.table, self._random, retry_quarantined=True)
        self._is_right(ended, alone=True)
        self._running = 0
        rows = {
            ("g", name, checks.epochs[name], number): payload
            for name, exported in checks.exported.items()
            for number, payload in exported.items()
        }
        try:
            self.cloud.everything(rows)
        except CloudError as error:
            checks.broken(f"the table: {error}")
        if world.export_starts:
            self._read_at_once()
        self.query.at_rest()

    def _read_at_once(self) -> None:
        """A DataFrame over the landing prefix has each number once, however the objects overlap."""
        reader = ObjectReader(self.world.bucket.place(), READ, skip=False)
        seen: set[tuple[str, str, int]] = set()
        for part in reader.partitions():
            for batch in reader.read(part):
                columns = batch.to_pydict()
                for row in zip(*(columns[name] for name in READ.names), strict=True):
                    if row in seen:
                        self._checks.broken(f"a DataFrame over the landing prefix has {row} twice")
                    seen.add(row)
        for key in self.world.bucket.keys:
            name = parse_key(key)
            if name is None:
                continue
            there = set(range(name.first, name.last + 1)) - absent(name, self.world.bucket.objects[key].body)
            for number in sorted(there):
                if (name.stream, str(name.epoch), number) not in seen:
                    self._checks.broken(f"a DataFrame over the landing prefix lacks number {number} of {key}")

    # -- upkeep

    def tend(self) -> None:
        """An operator prunes the landing prefix, or merges small files, or expires old versions.

        While a run is under way, files of the last day stay: they may be those of the run.
        """
        if self._checks.lied or self.world.table.schema is None:
            return
        days = 1 if self._running else 0
        try:
            match self._random.randrange(3 if self._running else 4):
                case 0:
                    self._work(lambda place, sink, tasks: sink.compact(tasks))
                case 1:
                    self._work(lambda place, sink, tasks: (sink.expire(days), sink.orphans(days)))
                case 3:
                    self._vanish()
                case _:
                    self._prune()
            self.cloud.table()
        except CloudError as error:
            self._checks.broken(f"the table: {error}")

    def _work(self, work: Callable[[Any, Any, Any], Any]) -> None:
        tend(self.world.bucket, self.world.table, self._random, RunFaults(killed=0.01, failed=0.002), work)

    def _vanish(self) -> None:
        """A data file of the table vanishes: a run says so, and a repair and a run bring its rows back once.

        Not if an object that the state relies on has gone or is harmed: what was in it cannot come back.
        """
        world, files = self.world, self.world.table.now.files
        self.cloud.table()
        there: dict[StreamId, Ranges] = defaultdict(Ranges)
        for name in map(parse_key, set(world.bucket.keys) - world.bucket.harmed):
            if name is not None:
                there[StreamId.of(name)].add(name.first, name.last)
        known = load_state(self._sink()).covered()
        if not files or any(there[name].missing(*pair) for name, pairs in known.items() for pair in pairs):
            return
        self.cloud.vanish(self._random.choice(files).path)
        ended = ingest_run(world.bucket, world.table, self._random)
        if ended.summary is None or ended.summary.report.complete or not ended.summary.report.files.damages:
            self._checks.broken("a file of the table has vanished, and a run says nothing of it")
        source = world.bucket.place()
        while repair(self._sink(), source, dry_run=True).damaged:
            self._work(lambda place, sink, tasks: repair(sink, place, dry_run=False))
        self.cloud.table()
        again = ingest_run(world.bucket, world.table, self._random)
        self._is_right(again, alone=True)

    def _prune(self) -> None:
        bucket = self.world.bucket
        before = {key: bucket.objects[key].etag for key in bucket.keys}
        refused = load_state(self._sink()).quarantine.keys()
        self._work(lambda place, sink, tasks: prune(place, sink, 0, dry_run=False, trust_state=False))
        self.cloud.table()
        for key in before.keys() - bucket.objects.keys():
            name = parse_key(key)
            if name is None or (key, before[key]) in refused:
                self._checks.broken(f"pruning has deleted {key}, which is no object that the table has taken")
            if not self.cloud.has(name):
                self._checks.broken(f"pruning has deleted {key}, and the table lacks some of it")
            bucket.harmed.discard(key)

    def _sink(self) -> Any:
        """The table's sink; nothing here needs the method `replace`, which it lacks."""
        return self.world.table.sink()

    # -- the end of a gateway

    def replace_gateway(self) -> None:
        """The gateway's disk dies, and another one takes its place: what was not uploaded is missing.

        It stays missing until an operator accepts that, and nothing else is.
        """
        world, checks = self.world, self._checks
        device = world.devices[0]
        world.advance_clock()  # a report from before the last one, by its clock, would not count
        for family in ("late", "safe"):
            self._publish(family, LATE)
        if not world.kernel.run(lambda: device.idle, 10) or not world.kernel.run(checks.exports_are_done, 20):
            checks.broken("a client or an export is not served before the gateway is replaced")
        world.kernel.pass_time(2.0)  # its report
        epoch = world.service._manager.store.streams["late"].epoch
        before = self._missing()  # what a power cut has taken
        checks.over = True
        world.replace_disk()
        self._publish("safe", 1)
        if not world.kernel.run(lambda: str(epoch) not in self._report(), 60):
            checks.broken("the report of a gateway with a new disk has its old streams")
        after = self._missing()
        if after != before | {("late", epoch): LATE}:
            checks.broken(f"before the gateway was replaced {before} was missing, and afterwards {after}")
        accept(world.bucket.place(), self._sink(), ["g/late"])
        if self._missing() != before:
            checks.broken("the loss of a stream was accepted, and its messages are missing")

    def _report(self) -> str:
        """The gateway report that is in the bucket."""
        return self.world.bucket.objects[report_key("g")].body.decode()

    def _missing(self) -> dict[tuple[str, int], int]:
        """How many messages of each stream and epoch a run calls missing."""
        ended = ingest_run(self.world.bucket, self.world.table, self._random)
        assert ended.summary is not None, ended.error
        report = ended.summary.report
        found = {(each.stream, each.epoch): each.missing for each in report.streams if each.missing}
        if report.complete and found:
            self._checks.broken(f"a verdict says complete, and {found} is missing")
        return found


def _kind(point: str) -> str:
    """What a run does at a point: the request or call, and the first folder of a key."""
    verb, _, key = point.partition(" ")
    return point if verb == "commit" else f"{verb} {key.partition('/')[0].partition('=')[0]}"
