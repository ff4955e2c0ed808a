"""The cloud of the simulation: runs of the real ingest job on a bucket and a table in memory, and checkers.

`ingest_run` drives `bridge.ingest.job.ingest` without Spark, threads or a clock. Between any two of its steps
it calls `at` with the name of what comes next: a request to a store (`list`, `get KEY`, `put KEY`,
`put done KEY`, `delete KEY`), a call of the table (`pointer`, `commit`, `committed`, ...), a task (`task`,
`task done`). Whoever drives the simulation may do there what the rest of the world does at that moment:
upload, harm an object, let another run work, from its beginning to its end. It may raise `Killed` (SIGKILL of
the driver), `TaskKilled` (of the Python worker, inside a task) or an error of botocore; `put done` and
`committed` come when it has happened, so an error there is a lost answer. After a kill nothing of that
process happens any more, and none of its clean-up.

`CloudCheck` holds what must be true of the table, the state and the verdicts, at any time.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError, ConnectionClosedError

from bridge.filtered import from_extra, left_out
from bridge.ingest.errors import CommitConflict, IngestError
from bridge.ingest.files import Target
from bridge.ingest.job import Summary, ingest
from bridge.ingest.numbers import CHUNK_BITS
from bridge.ingest.planner import RoundLimits, StreamId
from bridge.ingest.report import UPLOADED, Hole
from bridge.ingest.state import StreamState, load_state
from bridge.ingest.store import StorageLocation
from bridge.ingest.worker import process, unpack
from bridge.objectkeys import JOINED, LOSSES, REPORTS, ObjectKey, parse_key
from bridge.ranges import Ranges, size

from .bucket import ENDPOINT, At, Bucket, Place, nowhere
from .table import LostAnswer, Table

if TYPE_CHECKING:
    from .iceberg import Iceberg

ATTEMPTS = 4  # at a task, as Spark makes them
T = TypeVar("T")
Row = tuple[str, str, int, int]  # gateway, stream, epoch, number


class Killed(BaseException):
    """The driver is dead."""


class TaskKilled(BaseException):
    """The Python worker of a task is dead."""


class TaskError(Exception):
    """All attempts at a task failed, so the run ends."""


@dataclass(frozen=True)
class RunFaults:
    """How often, 0 to 1: of the steps of a run, but for `repeated` (of the tasks) and `unanswered`."""

    killed: float = 0.0  # the driver
    task_killed: float = 0.0  # of a task's steps
    failed: float = 0.0  # a request fails, or its answer is lost
    unreadable: float = 0.0  # an object cannot be read, for a reason of its own
    repeated: float = 0.0  # two attempts at a task come to their end, and the answer of the first is lost
    unanswered: float = 0.0  # of commits: the answer is lost, and it is tried again


@dataclass
class Ended:
    """How a run ended: with a summary, or with an error, which may be `Killed`."""

    summary: Summary | None = None
    error: BaseException | None = None
    reports: dict[str, bytes] = field(default_factory=dict)  # the gateway reports that it read, by key
    unreadable: set[str] = field(default_factory=set)  # keys that it could not read
    since: int = 0  # length of the bucket's log when it began


def ingest_run(
    bucket: Bucket,
    table: Table | Iceberg,
    random: Random,
    at: At = nowhere,
    *,
    faults: RunFaults = RunFaults(),
    limits: RoundLimits | None = None,
    prefix: str = "",
    retry_quarantined: bool = False,
    full_every: float = 0,
) -> Ended:
    """Run the ingest job once. Raises what is no fault of the world, such as StateMissing."""
    ended = Ended(since=len(bucket.log))
    driver = _Driver(bucket, random, at, faults, prefix, ended)
    try:
        ended.summary = ingest(
            lambda: _LocalTasks(driver),
            bucket.place(prefix, driver.at),
            table.sink(driver.at),
            limits,
            retry_quarantined=retry_quarantined,
            full_every=full_every,
            clock=lambda: int(bucket.now() * 1_000_000_000),
        )
    except (Killed, TaskError, CommitConflict, BotoCoreError, ClientError) as error:
        ended.error = error
    return ended


def tend(
    bucket: Bucket,
    table: Table | Iceberg,
    random: Random,
    faults: RunFaults,
    work: Callable[[Any, Any, Any], T],
) -> T | None:
    """Let an operator do some work, given the bucket's location, a sink and tasks; None if it has failed."""
    process = driver(bucket, random, faults)
    with suppress(Killed, TaskError, IngestError, BotoCoreError, ClientError):
        return work(bucket.place("", process.at), table.sink(process.at), _LocalTasks(process))
    return None


def driver(bucket: Bucket, random: Random, faults: RunFaults) -> _Driver:
    """A process that is at work in the cloud: its `at` may raise what `ingest_run` lets happen to a run."""
    return _Driver(bucket, random, nowhere, faults, "", Ended())


class _Driver:
    """The process of a run."""

    def __init__(
        self, bucket: Bucket, random: Random, at: At, faults: RunFaults, prefix: str, ended: Ended
    ) -> None:
        self.bucket, self.random, self.faults, self.ended = bucket, random, faults, ended
        self.prefix = f"{prefix}/" if prefix else ""
        self._outer, self._dead = at, False
        self._has_listed = False  # objects

    def at(self, point: str) -> None:
        """Come to a point; raises Killed, also whenever it is called again."""
        if self._dead:
            raise Killed(point)
        try:
            self._outer(point)
        except Killed:
            self._dead = True
            raise
        if self.random.random() < self.faults.killed:
            self._dead = True
            raise Killed(point)
        if point == "committed" and self.random.random() < self.faults.unanswered:
            raise LostAnswer(point)
        self._request(point)

    def _request(self, point: str) -> None:
        verb, _, key = point.partition(" ")
        self._has_listed |= verb == "list" and key != REPORTS
        if self.random.random() < self.faults.failed:
            raise ConnectionClosedError(endpoint_url=ENDPOINT)
        if verb != "get":
            return
        found = self.bucket.objects.get(self.prefix + key) if key.startswith(REPORTS) else None
        if found and not self._has_listed:  # a later one is only looked at for what may go ahead
            self.ended.reports[key] = found.body
        if parse_key(key) and self.random.random() < self.faults.unreadable:
            self.ended.unreadable.add(key)
            answer: Any = {"Error": {"Code": "AccessDenied", "Message": "not yours"}}
            raise ClientError(answer, "GetObject")


class _LocalTasks:
    """Tasks in this process, one after the other; see `bridge.ingest.tasks`."""

    def __init__(self, driver: _Driver) -> None:
        self.driver, self.random = driver, driver.random

    def slots(self) -> int:
        return self.random.randint(1, 3)

    def work(
        self, what: str, parts: Sequence[bytes], source: StorageLocation, target: Target
    ) -> dict[str, list[Any]]:
        assert isinstance(source, Place)
        assert isinstance(target.location, Place)

        def part(number: int, at: At) -> list[tuple[str, Any]]:
            there = replace(target, location=replace(target.location, at=at))
            return list(process(unpack(parts[number]), replace(source, at=at), there))

        return self._all(len(parts), part)

    def each(
        self, what: str, count: int, work: Callable[[int], Iterator[tuple[str, Any]]]
    ) -> dict[str, list[Any]]:
        return self._all(count, lambda number, at: list(work(number)))

    def _all(self, count: int, work: Callable[[int, At], list[tuple[str, Any]]]) -> dict[str, list[Any]]:
        bodies: dict[str, list[Any]] = defaultdict(list)
        for number in range(count):
            for kind, body in self._task(partial(work, number)):
                bodies[kind].append(json.loads(json.dumps(body)))  # as it comes from Spark
        return bodies

    def _task(self, work: Callable[[At], list[tuple[str, Any]]]) -> list[tuple[str, Any]]:
        lost = self.random.random() < self.driver.faults.repeated
        for number in range(ATTEMPTS):
            worker = _Worker(self.driver)
            with suppress(TaskKilled, BotoCoreError, ClientError):
                worker.at("task")
                found = work(worker.at)
                worker.at("task done")
                if lost:
                    lost = False
                    continue
                return [*found, ("attempt", {"number": number})]
        raise TaskError(f"{ATTEMPTS} attempts failed")


class _Worker:
    """The process of one attempt at a task."""

    def __init__(self, driver: _Driver) -> None:
        self.driver, self._dead = driver, False

    def at(self, point: str) -> None:
        if self._dead:
            raise TaskKilled(point)
        try:
            self.driver.at(point)
            if self.driver.random.random() < self.driver.faults.task_killed:
                raise TaskKilled(point)
        except TaskKilled:
            self._dead = True
            raise


class CloudError(AssertionError):
    """The cloud is not as it must be."""


@dataclass
class _Claim:
    """What a gateway says of a stream."""

    exported: int
    newest: int
    dropped: list[tuple[int, int, str]]
    ahead: list[tuple[int, int]]  # numbers above the newest may be pending, too

    def pending(self, number: int) -> bool:
        """Whether it has not said of a number that it is uploaded or dropped."""
        return number > self.exported and not any(low <= number <= high for low, high in self.ahead)

    def explains(self, number: int) -> bool:
        """Whether it says that a number was dropped, legally; for joined ranges see `joined`."""
        return any(
            low <= number <= high and why not in LOSSES and not why.startswith(JOINED)
            for low, high, why in self.dropped
        )

    def joined(self) -> Iterator[tuple[int, int, int]]:
        for low, high, why in self.dropped:
            if why.startswith(JOINED):
                yield low, high, int(why.removeprefix(JOINED))


Excused = Callable[[StreamId, int], bool]


def absent(name: ObjectKey, body: bytes) -> set[int]:
    """The numbers of an object that it declares as left out."""
    declared = from_extra(body)
    if declared is None:
        return set()
    bits = int.from_bytes(left_out(declared, name.first, name.last).bitmap, "little")
    return {number for number in range(name.first, name.last + 1) if bits >> number - name.first & 1}


def nothing(stream: StreamId, number: int) -> bool:
    """The gateway has lost and dropped nothing."""
    return False


class CloudCheck:
    """What must be true. `appended` has the payload of every row that a gateway has ever appended.

    `left_out` are the numbers whose messages the filters of its export leave out: they never become rows.
    All methods raise CloudError. Each data file is read once, so that a check costs what is new.
    """

    def __init__(
        self,
        bucket: Bucket,
        table: Table | Iceberg,
        appended: Mapping[Row, bytes],
        prefix: str = "",
        left_out: Mapping[StreamId, Ranges] | None = None,
    ) -> None:
        self.left_out = {} if left_out is None else left_out
        self.bucket, self.the_table, self.appended = bucket, table, appended
        self.prefix = f"{prefix}/" if prefix else ""
        self.rows = 0
        self.numbers: dict[StreamId, Ranges] = {}  # that are in the table
        self._files: dict[str, Counter[Row]] = {}
        self._vanished: set[str] = set()  # keys of files of the table

    def vanish(self, path: str) -> list[Row]:
        """Somebody deletes a data file of the table; returns its rows, which are to come back."""
        key = f"{self.the_table.name}/{path}"
        self._vanished.add(key)
        self.the_table.bucket.remove(key)
        rows = list(self._files.pop(path))
        for *name, number in rows:
            self.numbers[StreamId(*name)].take(number, number)
        self.rows -= len(rows)
        return rows

    def table(self) -> None:
        """Every row was appended, with its payload, and is there once; no row has gone; so says the state."""
        if gone := self.the_table.needed() - self.the_table.bucket.objects.keys() - self._vanished:
            raise CloudError(f"{min(gone)} is used by the table, and has gone")
        now = {file.path: file for file in self.the_table.now.files}
        removed = [self._files.pop(path) for path in self._files.keys() - now.keys()]
        before = Counter[Row]()  # what a compaction has merged must be in the new files
        for gone in removed:
            before.update(gone)
        for path in now.keys() - self._files.keys():
            found = self._files[path] = self._content(path)
            if sum(found.values()) != now[path].rows:
                raise CloudError(f"{path} has {sum(found.values())} rows, the table says {now[path].rows}")
            for row, count in found.items():
                if before[row]:
                    before[row] -= count
                    continue
                stream, number = StreamId(*row[:3]), row[3]
                known = self.numbers.setdefault(stream, Ranges())
                if count > 1 or known.covers(number, number):
                    raise CloudError(f"{row} is in the table more than once")
                known.add(number, number)
                self.rows += 1
        if lost := [row for row, count in before.items() if count > 0]:
            raise CloudError(f"rows have left the table: {lost[:5]}")
        if any(count < 0 for count in before.values()):
            raise CloudError("rows were doubled by a compaction")
        self._state()

    def _content(self, path: str) -> Counter[Row]:
        names = ["gateway", "stream", "epoch", "sequence_number", "payload"]
        columns = self.the_table.content(path, names).to_pydict()
        rows: Counter[Row] = Counter()
        for *name, epoch, number, payload in zip(*(columns[name] for name in names), strict=True):
            row = (*name, int(epoch), number)
            if row not in self.appended:
                raise CloudError(f"{row} was never appended")
            if self.appended[row] != payload:
                raise CloudError(f"{row} has another payload than was appended: {payload[:100]!r}")
            rows[row] += 1
        return rows

    def _state(self) -> None:
        """The state covers the rows of the table, and numbers that were left out; it counts those."""
        state = load_state(self.the_table.sink())
        for stream in state.streams.keys() | self.numbers.keys():
            known = state.streams[stream] if stream in state.streams else StreamState()
            there = self.numbers.get(stream, Ranges())
            absent = [hole for pair in known.covered for hole in there.missing(*pair)]
            surplus = [hole for pair in there for hole in known.covered.missing(*pair)]
            if surplus or size(absent) != sum(known.filtered.values()):
                raise CloudError(f"the state covers {known.covered} of {stream}, the table has {there}")
            counts = Counter(n >> CHUNK_BITS for low, high in absent for n in range(low, high + 1))
            if counts != known.filtered:
                raise CloudError(f"{stream}: {counts} are left out, and the state says {known.filtered}")
            if wrong := [pair for pair in absent if not self._left_out(stream).covers(*pair)]:
                raise CloudError(f"{stream}: {wrong} is called left out, and was not")

    def _left_out(self, stream: StreamId) -> Ranges:
        return self.left_out.get(stream, Ranges())

    def run(self, ended: Ended, excused: Excused = nothing, *, alone: bool = False) -> None:
        """The verdict of a run is true, given the gateway reports that it read.

        A run that says "incomplete" has a reason: somebody has harmed an object, it could not be read, it
        came after the run had begun, and was passed over by another one (not if the run was `alone`), or
        `excused` says that the gateway has dropped or lost the number, whether it has reported that or not.
        It says something of each number that a gateway has and the table lacks.
        """
        if ended.summary is None:
            return
        report = ended.summary.report
        # What no report promises, or was put back, is found by the next full listing.
        since = ended.since if report.in_full else 0
        harmed = self._harmed(since)
        claims = dict(_claims(ended.reports))
        # not in its listing, but perhaps in that of another run, which has skipped it and taken later ones
        came = {self._relative(each.key) for each in self.bucket.log[since:] if each.what == "put"}
        came = set() if alone else came
        # a refused object that was put back, or harmed again, is known until a run has read it again
        ever = {self._relative(each.key) for each in self.bucket.log if each.what.endswith("by somebody")}
        for document in report.refused:
            if document["key"] not in ever:
                raise CloudError(f"{document} was refused, and nobody has harmed it")
        for document in report.unreadable:
            # a bit that was harmed may name a later version, whose objects wait for an upgrade
            later = document["key"] in ever and "upgrade streambridge" in document["reason"]
            if document["key"] not in ended.unreadable and not later:
                raise CloudError(f"{document} could be read")
        for found in report.streams:
            stream = StreamId(found.gateway, found.stream, found.epoch)
            gone, late, claim = _numbers(harmed, stream), _numbers(came, stream), claims.get(stream)
            # overwritten while a listing went on, which has the old one and the new one
            changed = _numbers({key for key in harmed if self.prefix + key in self.bucket.objects}, stream)
            for hole in found.holes:
                if hole.number is not None:  # of some; `table` looks at which
                    most = size(self._left_out(stream).common(hole.first, hole.last))
                    if (hole.kind, hole.reason) != ("trimmed", "filtered") or hole.count > most:
                        raise CloudError(f"{stream}: {most} are left out, and it says {hole}")
                    continue
                for number in range(hole.first, hole.last + 1):
                    named = claim is not None and claim.explains(number)
                    pending = claim is None or claim.pending(number)
                    reason = (
                        gone.covers(number, number)
                        or excused(stream, number)
                        or (pending and late.covers(number, number))
                    )
                    # The next run takes it: a repair took it out of the table with a file that had
                    # vanished, or no run has read its object as it is now.
                    waits = bool(self._vanished) or changed.covers(number, number)
                    waits = waits and hole.reason == UPLOADED
                    # A power cut took it from the gateway, which says so, and then its object was harmed.
                    skipped = hole.reason == "skipped" and gone.covers(number, number)
                    if (
                        (hole.kind == "missing" and (named or not reason))
                        or (hole.kind == "trimmed" and not (skipped or excused(stream, number)))
                        or (hole.kind == "waiting" and not pending and not waits)
                    ):
                        raise CloudError(f"{stream}: {number} is called {hole.kind}, and is not: {hole}")
            if claim is not None:
                self._all_is_said(stream, claim, found.holes)
        if report.complete:
            for stream, claim in claims.items():
                self._complete(stream, claim)
        elif report.files.damages:
            raise CloudError(
                f"a run says of files that they are damaged, and nobody has: {report.files.damages}"
            )
        elif (
            report.streams
            and not any(map(report.total, ("missing", "quarantined", "unreadable")))
            and (
                not report.files.unseen  # a request has failed
            )
        ):
            raise CloudError("a run says that something is missing, and not what")

    def _all_is_said(self, stream: StreamId, claim: _Claim, holes: Sequence[Hole]) -> None:
        """A verdict has each number that the gateway has and the table lacks, but for those left out."""
        said = self._left_out(stream).copy()
        for hole in holes:
            if hole.number is None:
                said.add(hole.first, hole.last)
        absent = self.numbers.get(stream, Ranges()).missing(0, claim.newest)
        if unsaid := [rest for pair in absent for rest in said.missing(*pair)]:
            raise CloudError(f"{stream}: the table lacks {unsaid}, and the verdict says nothing of them")

    def _complete(self, stream: StreamId, claim: _Claim) -> None:
        """All that the gateway says it has uploaded is in the table."""
        there = self.numbers.get(stream, Ranges())
        said = [(0, claim.exported), *claim.ahead]
        absent = {n for pair in said for low, high in there.missing(*pair) for n in range(low, high + 1)}
        known = self._left_out(stream)
        absent = {n for n in absent if not (claim.explains(n) or known.covers(n, n))}
        for low, high, count in claim.joined():
            within = {number for number in absent if low <= number <= high}
            absent -= within if len(within) <= count else set()
        if absent:
            raise CloudError(f"{stream}: called complete, and these are not there: {sorted(absent)[:10]}")

    def has(self, name: ObjectKey) -> bool:
        """Whether the table has all numbers of an object, but for those that were left out."""
        stream = StreamId.of(name)
        there = Ranges([*self.numbers.get(stream, Ranges()), *self._left_out(stream)])
        return there.covers(name.first, name.last)

    def _harmed(self, since: int) -> set[str]:
        """The keys of objects that somebody has harmed; those put back since then count too."""
        back = {each.key for each in self.bucket.log[since:] if each.what == "uploaded again"}
        return {self._relative(key) for key in self.bucket.harmed | back}

    def _relative(self, key: str) -> str:
        return key.removeprefix(self.prefix)

    def everything(self, rows: Mapping[Row, bytes], excused: Excused = nothing) -> None:
        """All of these rows are in the table, but for those that are excused or were harmed."""
        harmed = self._harmed(len(self.bucket.log))
        streams = {StreamId(*row[:3]) for row in rows}
        gone = {stream: _numbers(harmed, stream) for stream in streams}
        for row in rows:
            stream, number = StreamId(*row[:3]), row[3]
            known = self.numbers.get(stream)
            if not (
                (known and known.covers(number, number))
                or gone[stream].covers(number, number)
                or excused(stream, number)
            ):
                raise CloudError(f"{row} is not in the table")


def _claims(reports: Mapping[str, bytes]) -> Iterator[tuple[StreamId, _Claim]]:
    for body in reports.values():
        with suppress(ValueError):  # damaged by somebody
            document = json.loads(body)
            for stream in document["streams"]:
                name = StreamId(document["gateway"], stream["stream"], int(stream["epoch"]))
                yield (
                    name,
                    _Claim(stream["exported"], stream["newest"], stream["dropped"], stream.get("ahead", [])),
                )


def _numbers(keys: set[str], stream: StreamId) -> Ranges:
    found = Ranges()
    for key in keys:
        name = parse_key(key)
        if name and StreamId.of(name) == stream:
            found.add(name.first, name.last)
    return found
