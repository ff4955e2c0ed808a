"""The job: list, plan, run the tasks and commit, until nothing is new.

A run can crash at any point. Before the commit it leaves unused data files, and perhaps a state document that
no table points to. After the commit the round is done. Later runs need not clean up to be correct. If another
run commits first, the round is discarded with its files, and planned again on top of that commit.
"""

from __future__ import annotations

import base64
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge.ingest.columns import MAX_EXTRAS
from bridge.ingest.errors import CommitConflict, IngestError, WrongSource
from bridge.ingest.files import DataFile, Target, labelled, sweep, sweep_on_error
from bridge.ingest.intact import share
from bridge.ingest.listing import DAY, Listing, look_around
from bridge.ingest.planner import Item, Plan, RoundLimits, StreamId, Work, grouped, plan
from bridge.ingest.report import Name, Report, build, lacking_source
from bridge.ingest.sinks.base import Compacted, Sink, discard, tidied
from bridge.ingest.state import Piece, Quarantined, StateStore, TableState, load_state
from bridge.ingest.store import StorageLocation
from bridge.ingest.tasks import SparkTasks, Tasks
from bridge.ingest.verdict import weigh
from bridge.ingest.worker import pack

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bridge.ingest.notifications import Notifications

TASK_BYTES = 32 << 20  # of objects, compressed, that one task reads
CONFLICTS = 5  # rounds in a row that lost against other runs, before this run gives up


@dataclass(slots=True)
class Round:
    """The figures of one round."""

    number: int = 0
    objects: int = 0
    rows: int = 0
    bytes: int = 0
    files: int = 0
    tasks: int = 0
    quarantined: int = 0
    vanished: int = 0
    unreadable: int = 0
    new_columns: list[str] = field(default_factory=list)
    version: int = 0
    plan_seconds: float = 0.0
    work_seconds: float = 0.0
    commit_seconds: float = 0.0


@dataclass(slots=True)
class Summary:
    """The figures of a run, and the report on the table after it."""

    rounds: list[Round]
    rows: int
    objects: int
    bytes: int
    quarantined: int
    listed: int
    list_seconds: float
    seconds: float
    report: Report
    compacted: Compacted = field(default_factory=Compacted)

    def to_json(self) -> dict[str, Any]:
        figures = {
            name: getattr(self, name) for name in ("rows", "objects", "bytes", "quarantined", "listed")
        }
        return {
            **figures,
            "list_seconds": round(self.list_seconds, 3),
            "seconds": round(self.seconds, 3),
            "rounds": [asdict(done) for done in self.rounds],
            "compacted": asdict(self.compacted),
            "report": self.report.to_json(),
        }


Skipped = tuple[Work, str | None]  # an object that could not be read, and why; None: it no longer exists


def run(
    spark: SparkSession | Callable[[], SparkSession],
    source: StorageLocation,
    sink: Sink,
    limits: RoundLimits | None = None,
    on_round: Callable[[Round], None] = lambda done: None,
    *,
    retry_quarantined: bool = False,
    full_every: float = DAY,
    notifications: Notifications | None = None,
    new_source: bool = False,
) -> Summary:
    """`ingest` with tasks in Spark. `spark` may be a function that opens the session."""

    def tasks() -> Tasks:
        return SparkTasks(spark() if callable(spark) else spark)

    return ingest(
        tasks,
        source,
        sink,
        limits,
        on_round,
        retry_quarantined=retry_quarantined,
        full_every=full_every,
        notifications=notifications,
        new_source=new_source,
    )


def ingest(
    tasks: Callable[[], Tasks],
    source: StorageLocation,
    sink: Sink,
    limits: RoundLimits | None = None,
    on_round: Callable[[Round], None] = lambda done: None,
    *,
    retry_quarantined: bool = False,
    full_every: float = DAY,
    notifications: Notifications | None = None,
    new_source: bool = False,
    clock: Callable[[], int] = time.time_ns,
) -> Summary:
    """Bring the table up to date with the objects under `source`; calls `on_round` after every round.

    With `retry_quarantined`, the objects that earlier runs quarantined are read once more, and those that
    were deleted since are forgotten. `tasks` is called for every round, and not if there is nothing new;
    `clock` gives the Unix time in ns. Everything is listed if the last full listing is `full_every` seconds
    old (see `listing`), and otherwise nothing that `notifications` name.
    Raises WrongSource if the source has nothing of what the table has, unless it is a `new_source`;
    IngestError, also for a table with rows of which no run knows; CommitConflict after five rounds in a row
    that lost against other runs, and whatever the tasks and the libraries raise.
    """
    began = time.monotonic()
    before = load_state(sink)
    listing = look_around(source.open(), source.url, before, clock() // 1_000_000, full_every, notifications)
    if not new_source and (wrong := lacking_source(before, listing)):
        raise WrongSource(f"{wrong}; nothing was done")
    inventory = listing.inventory
    listed = time.monotonic() - began
    states: StateStore | None = None
    pending = inventory.pending()
    rounds: list[Round] = []
    vanished: set[Name] = set()
    unreadable: dict[Name, Quarantined] = {}
    retry: set[Name] | None = None if retry_quarantined else set()  # None: all quarantined in the state
    conflicts = 0
    doubtful: set[StreamId] = set()  # streams with an object that this run has quarantined
    while True:
        start = time.monotonic()
        version = sink.pointer()  # before its location, which changes when another run creates the table
        known = states or StateStore(sink.state(), clock)
        state = known.load(version)
        standing = sink.standing(state.checked, state.rows())
        if standing.pointer != version:  # another run has committed in between
            conflicts += 1
            if conflicts == CONFLICTS:
                raise CommitConflict(f"{sink.name}: other runs kept committing")
            continue
        if version is None and standing.rows:
            raise IngestError(
                f"{sink.name}: it has {standing.rows} rows, and no run has ever added any; nothing was "
                "added, because messages that it has would be there twice; let `streambridge ingest repair` "
                "count them first"
            )
        forgotten = retry_quarantined and listing.forget_deleted(state)
        recorded = state.differs
        differs = weigh(sink.name, state, standing)
        if retry is None:
            retry = set(state.quarantine)
        refused = state.quarantine.keys() - retry
        todo = plan(pending, state.settled(), refused, limits or RoundLimits(), doubtful)
        if not todo.work:
            break
        target = sink.target()
        states = StateStore(sink.state(), clock) if version is None else known  # the table exists now
        done = Round(len(rounds) + 1, plan_seconds=time.monotonic() - start)
        try:
            skipped = _round(
                tasks(),
                source,
                sink,
                target,
                states,
                state,
                todo,
                listing,
                pending,
                unreadable.keys(),
                done,
            )
        except CommitConflict:
            conflicts += 1
            if conflicts == CONFLICTS:
                raise
            # the other run may have taken any of these objects, and skipped ones may be needed again
            pending = inventory.pending()
            continue
        conflicts = 0
        doubtful |= {work.stream for work in todo.work if (work.item.key, work.item.etag) in state.quarantine}
        retry -= {(work.item.key, work.item.etag) for work in todo.work}
        pending = _without(pending, skipped)
        for work, reason in skipped:
            if reason is None:
                vanished.add((work.item.key, work.item.etag))
            else:
                unreadable[work.item.key, work.item.etag] = Quarantined(work.item.size, reason)
        rounds.append(done)
        on_round(done)
    unlisted = listing.full and full_every > 0 and listing.is_news(state) and version is not None
    if (differs and not recorded) or unlisted or forgotten:
        with suppress(IngestError):  # the next run finds it again
            listing.save_reports(state)
            listing.record(state, unreadable.keys())
            sink.commit(version, known.save(state, version), [])
    if state.version is not None:
        known.prune(state.version)
    if notifications is not None:
        kept = listing.written is not None and state.listed == listing.written
        notifications.done({key for key, _ in unreadable}, recorded=kept)
    compacted = tidied(tasks, sink) if rounds else Compacted()
    files = share(sink, state, clock() // 1_000_000) if state.version is not None else None
    return Summary(
        rounds,
        rows=sum(done.rows for done in rounds),
        objects=sum(done.objects for done in rounds),
        bytes=sum(done.bytes for done in rounds),
        quarantined=sum(done.quarantined for done in rounds),
        listed=inventory.objects,
        list_seconds=listed,
        seconds=time.monotonic() - began,
        report=build(
            state,
            inventory,
            listing.reports,
            sink.name,
            standing.rows,
            vanished,
            unreadable,
            standing.changes,
            listing,
            files,
        ),
        compacted=compacted,
    )


def _round(
    tasks: Tasks,
    source: StorageLocation,
    sink: Sink,
    target: Target,
    states: StateStore,
    state: TableState,
    todo: Plan,
    listing: Listing,
    pending: Mapping[StreamId, list[Item]],
    unreadable: Set[Name],
    done: Round,
) -> list[Skipped]:
    """Carry out and commit one plan; returns the objects that were neither taken nor quarantined."""
    start = time.monotonic()
    target = labelled(target)
    with sweep_on_error(target):
        parts = split(todo, tasks.slots())
        done.tasks = len(parts)
        rows = tasks.work(f"round {done.number}", [pack(part) for part in parts], source, target)
        outcomes = {body["key"]: body for body in rows["object"]}
        files = [DataFile(**body) for body in rows["file"]]
        if any(body["number"] for body in rows["attempt"]):
            sweep(target, keep=files)
        done.work_seconds = time.monotonic() - start

        start = time.monotonic()
        skipped = _apply(state, todo.work, outcomes, done)
        listing.save_reports(state)
        left = _without(pending, skipped)
        if not plan(left, state.settled(), state.quarantine.keys(), RoundLimits(objects=1)).work:
            unread = {(work.item.key, work.item.etag) for work, reason in skipped if reason is not None}
            listing.record(state, unreadable | unread)
        if done.new_columns:
            sink.add_columns(_columns(outcomes, MAX_EXTRAS - len(target.extras)))
        done.files, done.rows = len(files), sum(file.rows for file in files)
        commits = bool(done.objects or done.quarantined)
        previous = state.version
        version = states.save(state, previous) if commits else 0
    if commits:
        try:
            sink.commit(previous, version, files)
        except CommitConflict:
            discard(sink, files)
            raise
        done.version = version
    done.commit_seconds = time.monotonic() - start
    return skipped


def _without(
    pending: Mapping[StreamId, list[Item]], skipped: Sequence[Skipped]
) -> dict[StreamId, list[Item]]:
    """Return the pending objects without those that this run is not to plan again."""
    left = dict(pending)
    for work, _ in skipped:
        left[work.stream] = [item for item in left.get(work.stream, ()) if item.key != work.item.key]
    return left


def _apply(
    state: TableState, work: Sequence[Work], outcomes: dict[str, dict[str, Any]], done: Round
) -> list[Skipped]:
    """Update the state with the outcomes of the tasks."""
    skipped: list[Skipped] = []
    columns: set[str] = set()
    known_last: dict[Any, int] = {}
    once_bad: dict[str, list[Name]] = defaultdict(list)  # by key: each upload has its own ETag
    for refused in state.quarantine:
        once_bad[refused[0]].append(refused)
    for planned in work:
        item, outcome = planned.item, outcomes[planned.item.key]
        match outcome["status"]:
            case "taken":
                stream = state.of(planned.stream)
                last = known_last.setdefault(planned.stream, stream.covered.last if stream.covered else -1)
                stream.take([Piece(*piece) for piece in outcome["pieces"]], known_last=last)
                for earlier in once_bad.pop(item.key, ()):  # uploaded again, and good now
                    del state.quarantine[earlier]
                done.objects += 1
                done.bytes += item.size
            case "bad":
                for earlier in once_bad.pop(item.key, ()):  # that upload no longer exists
                    del state.quarantine[earlier]
                state.quarantine[item.key, item.etag] = Quarantined(item.size, outcome["reason"])
                done.quarantined += 1
            case "gone":
                done.vanished += 1
                skipped.append((planned, None))
            case "unreadable":
                done.unreadable += 1
                skipped.append((planned, outcome["reason"]))
            case "columns":
                columns |= set(_schema_of(outcome).names)
    done.new_columns = sorted(columns)
    return skipped


def _columns(outcomes: dict[str, dict[str, Any]], room: int) -> dict[str, Any]:
    """Return the new columns. If objects disagree on a type, the first wins; the others are quarantined."""
    found: dict[str, Any] = {}
    for outcome in outcomes.values():
        if outcome["status"] == "columns":
            for column in _schema_of(outcome):
                if len(found) < room:
                    found.setdefault(column.name, column.type)
    return found


def _schema_of(outcome: dict[str, Any]) -> Any:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(outcome["columns"])))


def split(todo: Plan, slots: int) -> list[list[Work]]:
    """Split the work into tasks of about the same bytes, in order, with at least one for each slot."""
    limit = max(1, min(TASK_BYTES, -(-todo.bytes // slots)))
    return grouped(todo.work, lambda work: work.item.size, limit)
