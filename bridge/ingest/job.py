"""The job: list, plan, work in the executors, commit, until nothing is new.

Crash anywhere and run again: before the commit there are unused data files and perhaps a state document
that nothing points to; after it the round is done. Nothing is ever cleaned up by a later run in order
to be right. A round that loses against another run is thrown away, with its files, and planned again on
top of what the other one did.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.ingest.columns import MAX_EXTRAS
from bridge.ingest.errors import Moved
from bridge.ingest.files import DataFile
from bridge.ingest.heads import Heads, read_heads
from bridge.ingest.planner import Inventory, Limits, Plan, StreamId, Work, plan
from bridge.ingest.report import Name, Report, build
from bridge.ingest.session import watched
from bridge.ingest.sinks.base import Sink, discard, labelled, sweep, swept
from bridge.ingest.state import Piece, Quarantined, State, StateStore
from bridge.ingest.store import Place
from bridge.ingest.worker import STATUS, Target, pack, task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_BYTES = 32 << 20  # of objects, compressed: what one task reads
DEAD_WORKER = re.compile(
    "Python worker exited unexpectedly|Python worker failed to connect|ExecutorLostFailure"
)
LOSSES = 5  # rounds lost in a row before a run gives way


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
    """What a run did, and what the table holds now."""

    rounds: list[Round]
    rows: int
    objects: int
    bytes: int
    quarantined: int
    listed: int
    list_seconds: float
    seconds: float
    report: Report

    def to_json(self) -> dict[str, Any]:
        figures = {
            name: getattr(self, name) for name in ("rows", "objects", "bytes", "quarantined", "listed")
        }
        return {
            **figures,
            "list_seconds": round(self.list_seconds, 3),
            "seconds": round(self.seconds, 3),
            "rounds": [asdict(done) for done in self.rounds],
            "report": self.report.to_json(),
        }


Tell = Callable[[Round], None]
Aside = tuple[Work, str | None]  # an object that could not be read and why; None: it is there no more


def run(
    spark: SparkSession | Callable[[], SparkSession],
    source: Place,
    sink: Sink,
    limits: Limits | None = None,
    tell: Tell = lambda done: None,
    *,
    retry_quarantined: bool = False,
) -> Summary:
    """Bring the table up to date with the objects under `source`; `tell` is called after every commit.

    With `retry_quarantined` the objects that earlier runs refused are read once more.
    `spark` may be a function that opens the session: it is not called when there is nothing new.
    """
    began = time.monotonic()
    store = source.open()
    heads = read_heads(store)
    inventory = Inventory(store.list())
    listed = time.monotonic() - began
    states: StateStore | None = None
    pending = inventory.pending()
    rounds: list[Round] = []
    vanished: set[Name] = set()
    unreadable: dict[Name, Quarantined] = {}
    retry: set[Name] | None = None if retry_quarantined else set()  # None: all that the state has
    losses = 0
    doubtful: set[StreamId] = set()  # with an object that this run has refused
    while True:
        start = time.monotonic()
        version = sink.pointer()  # before its place: a table that is made meanwhile has its own
        known = states or StateStore(sink.state())
        state = known.load(version)
        if retry is None:
            retry = set(state.quarantine)
        refused = state.quarantine.keys() - retry
        todo = plan(pending, state.covered(), refused, limits or Limits(), doubtful)
        if not todo.work:
            break
        target = sink.target()
        states = StateStore(sink.state()) if version is None else known  # the table is made by now
        done = Round(len(rounds) + 1, plan_seconds=time.monotonic() - start)
        try:
            session = spark() if callable(spark) else spark
            aside = _one(session, source, sink, target, states, state, todo, heads, done)
        except Moved:
            losses += 1
            if losses == LOSSES:
                raise
            # the other run may have taken any of it, and lost objects may be needed again
            pending = inventory.pending()
            continue
        losses = 0
        doubtful |= {work.stream for work in todo.work if (work.item.key, work.item.etag) in state.quarantine}
        retry -= {(work.item.key, work.item.etag) for work in todo.work}
        for work, reason in aside:  # not to be planned again in this run
            items = [item for item in pending.get(work.stream, ()) if item.key != work.item.key]
            pending[work.stream] = items
            if reason is None:
                vanished.add((work.item.key, work.item.etag))
            else:
                unreadable[work.item.key, work.item.etag] = Quarantined(work.item.size, reason)
        rounds.append(done)
        tell(done)
    if state.version is not None:
        known.prune(state.version)
    return Summary(
        rounds,
        rows=sum(done.rows for done in rounds),
        objects=sum(done.objects for done in rounds),
        bytes=sum(done.bytes for done in rounds),
        quarantined=sum(done.quarantined for done in rounds),
        listed=inventory.objects,
        list_seconds=listed,
        seconds=time.monotonic() - began,
        report=build(state, inventory, heads, sink.name, sink.rows(), vanished, unreadable),
    )


def _one(
    spark: SparkSession,
    source: Place,
    sink: Sink,
    target: Target,
    states: StateStore,
    state: State,
    todo: Plan,
    heads: Heads,
    done: Round,
) -> list[Aside]:
    """Work and commit one plan; returns what could be neither taken nor refused."""
    start = time.monotonic()
    target = labelled(target)
    with swept(target):
        parts = split(todo, _slots(spark))
        done.tasks = len(parts)
        rows = _work(spark, [pack(part) for part in parts], source, target, f"round {done.number}")
        outcomes = {body["key"]: body for body in _bodies(rows, "object")}
        files = [DataFile(**body) for body in _bodies(rows, "file")]
        if any(body["number"] for body in _bodies(rows, "attempt")):
            sweep(target, keep=files)
        done.work_seconds = time.monotonic() - start

        start = time.monotonic()
        aside = _apply(state, todo.work, outcomes, done)
        for stream, head in heads.streams.items():  # also where nothing was uploaded: it may be lost before
            state.of(stream).head = head
        if done.new_columns:
            sink.add_columns(_columns(outcomes, MAX_EXTRAS - len(target.extras)))
        done.files, done.rows = len(files), sum(file.rows for file in files)
        commits = bool(done.objects or done.quarantined)
        previous = state.version
        version = states.save(state, previous) if commits else 0
    if commits:
        try:
            sink.commit(previous, version, files)
        except Moved:
            discard(sink, files)
            raise
        done.version = version
    done.commit_seconds = time.monotonic() - start
    return aside


def _work(spark: SparkSession, parts: list[bytes], source: Place, target: Target, what: str) -> list[Any]:
    """The status rows of the tasks; if a worker died and no attempt is left, once more, each object alone."""

    def rows(*, alone: bool) -> list[Any]:
        frame: Any = spark.range(0, len(parts), 1, len(parts))
        frame = frame.mapInArrow(task(parts, source, target, alone=alone), STATUS)
        found: list[Any] = watched(spark, what, frame.collect)
        return found

    try:
        return rows(alone=False)
    except Exception as error:  # of pyspark or py4j, by version
        if not DEAD_WORKER.search(str(error)):
            raise
    sweep(target)
    return rows(alone=True)


def _apply(
    state: State, work: Sequence[Work], outcomes: dict[str, dict[str, Any]], done: Round
) -> list[Aside]:
    """Bring the state up to what the tasks report."""
    aside: list[Aside] = []
    columns: set[str] = set()
    known_last: dict[Any, int] = {}
    once_bad: dict[str, list[Name]] = defaultdict(list)  # each upload of an object has an ETag of its own
    for refused in state.quarantine:
        once_bad[refused[0]].append(refused)
    for piece_of in work:
        outcome = outcomes[piece_of.item.key]
        match outcome["status"]:
            case "taken":
                stream = state.of(piece_of.stream)
                last = known_last.setdefault(piece_of.stream, stream.covered.last if stream.covered else -1)
                stream.take([Piece(*piece) for piece in outcome["pieces"]], known_last=last)
                for cured in once_bad.pop(piece_of.item.key, ()):  # uploaded again, and good now
                    del state.quarantine[cured]
                done.objects += 1
                done.bytes += piece_of.item.size
            case "bad":
                name = piece_of.item.key, piece_of.item.etag
                for earlier in once_bad.pop(name[0], ()):  # which is there no more
                    del state.quarantine[earlier]
                state.quarantine[name] = Quarantined(piece_of.item.size, outcome["reason"])
                done.quarantined += 1
            case "gone":
                done.vanished += 1
                aside.append((piece_of, None))
            case "unreadable":
                done.unreadable += 1
                aside.append((piece_of, outcome["reason"]))
            case "columns":
                columns |= set(_schema_of(outcome).names)
    done.new_columns = sorted(columns)
    return aside


def _columns(outcomes: dict[str, dict[str, Any]], room: int) -> dict[str, Any]:
    """The new columns; where objects disagree on a type the first one counts, the others are quarantined."""
    found: dict[str, Any] = {}
    for outcome in outcomes.values():
        if outcome["status"] == "columns":
            for column in _schema_of(outcome):
                if len(found) < room:
                    found.setdefault(column.name, column.type)
    return found


def _schema_of(outcome: dict[str, Any]) -> Any:
    import pyarrow as pa

    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(outcome["columns"])))


def _bodies(rows: Sequence[Any], kind: str) -> list[dict[str, Any]]:
    return [json.loads(row.body) for row in rows if row.kind == kind]


def split(todo: Plan, slots: int) -> list[list[Work]]:
    """Cut the work into tasks of about the same bytes, in order: at least one for every slot."""
    per = max(1, min(TASK_BYTES, -(-todo.bytes // slots)))
    parts: list[list[Work]] = [[]]
    filled = 0
    for work in todo.work:
        if parts[-1] and filled + work.item.size > per:
            parts.append([])
            filled = 0
        parts[-1].append(work)
        filled += work.item.size
    return parts


def _slots(spark: SparkSession) -> int:
    """How many tasks run at once; Spark Connect does not say, so there it is a usual size."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # Connect has no sparkContext, and each version says so in another way
        return 16
