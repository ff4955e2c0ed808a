"""The completeness report: what is in the table, and what is not, by stream.

It comes from the state, the names of the objects and the gateways' head objects; the table's rows are never
read, so it costs the same at a thousand messages and at a billion. Numbers that are not in the table are,
in this order of precedence:

* waiting      they are in an object that no run has taken yet
* trimmed      the gateway declared that it dropped them (overwritten, expired, purged)
* quarantined  an object that should hold them was refused
* unreadable   an object that should hold them could not be read in this run; the next one tries it again
* waiting      the gateway has not uploaded them yet
* missing      none of these, or the gateway says that they were damaged or are gone unexplained: lost

Of drops long ago a gateway keeps ranges with a count (`joined:<count>`). Where no more numbers than that
are neither in the table nor explained otherwise, they are those that it dropped: trimmed. Where there are
more, something was lost; which ones cannot be told, so all of them are missing.

A stream starts at 0 where its gateway's head is known, else at the first number that is in the table or in an
object; it ends at the newest that anybody knows of. Without a head a lost tail is not seen, so that is said.

A stream that its gateway's head no longer lists was deleted, is no longer exported, or its disk was replaced.
What waited there according to the last head in the state comes no more: missing, unless somebody accepts it.
"""

from __future__ import annotations

import re
import shlex
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.ingest.heads import Head, Heads, read_heads
from bridge.ingest.planner import Inventory, StreamId, Tally
from bridge.ingest.ranges import Pair, Ranges, size
from bridge.ingest.state import Quarantined, State, StreamState, load_state
from bridge.ingest.store import Store
from bridge.objectkeys import JOINED, LOSSES, REPORTS, parse_key

if TYPE_CHECKING:
    from bridge.ingest.sinks.base import Sink

KINDS = ("trimmed", "quarantined", "unreadable", "waiting", "missing")
SHOWN = 5  # gateways named in one line
Name = tuple[str, str]  # of an object: key and ETag
Cause = tuple[str, str, Iterable[Pair]]  # kind of hole, reason, and the numbers that it explains
Part = tuple[int, int, str, str]  # of a gap: first and last number, kind and reason
GONE = "its stream is gone"
UPLOADED = "uploaded, not taken yet"


@dataclass(frozen=True, slots=True)
class Hole:
    """Numbers that are not in the table, and the ingest times (ms) of their neighbours that are."""

    first: int
    last: int
    kind: str
    reason: str = ""
    after_ms: int | None = None
    before_ms: int | None = None

    @property
    def count(self) -> int:
        return self.last - self.first + 1


@dataclass(slots=True)
class StreamReport:
    """One stream of one gateway."""

    gateway: str
    stream: str
    epoch: int
    first: int | None = None
    last: int | None = None
    rows: int = 0
    missing: int = 0
    trimmed: int = 0
    quarantined: int = 0
    unreadable: int = 0
    waiting: int = 0
    duplicates: int = 0
    late_objects: int = 0
    late_rows: int = 0
    newest_ms: int | None = None
    head_ms: int | None = None  # when the gateway last said how far it is
    lag_seconds: float | None = None
    holes: list[Hole] = field(default_factory=list)

    @property
    def path(self) -> str:
        """What people call the stream, whatever its epoch."""
        return f"{self.gateway}/{self.stream}"

    def to_json(self) -> dict[str, Any]:
        names = [name for name in self.__slots__ if name not in ("holes", "newest_ms", "head_ms")]
        holes = [
            {
                "first": hole.first,
                "last": hole.last,
                "count": hole.count,
                "kind": hole.kind,
                "reason": hole.reason,
                "after": _iso(hole.after_ms),
                "before": _iso(hole.before_ms),
            }
            for hole in self.holes
        ]
        return {name: getattr(self, name) for name in names} | {
            "newest": _iso(self.newest_ms),
            "head": _iso(self.head_ms),
            "holes": holes,
        }


@dataclass(slots=True)
class Report:
    """All streams, and what is not about one stream."""

    table: str
    streams: list[StreamReport]
    refused: list[dict[str, Any]]  # quarantined objects
    unreadable: list[dict[str, Any]]  # objects that the run of this report could not read
    foreign: list[str]  # objects that are not named like data
    problems: list[str]  # why what it says may not be all

    def total(self, figure: str) -> int:
        return sum(getattr(stream, figure) for stream in self.streams)

    @property
    def complete(self) -> bool:
        """Whether all is there; where nothing is known, nothing is proven."""
        return bool(self.streams) and not any(map(self.total, ("missing", "quarantined", "unreadable")))

    def to_json(self) -> dict[str, Any]:
        figures = ("rows", *KINDS, "duplicates", "late_objects", "late_rows")
        return {
            "table": self.table,
            "complete": self.complete,
            "total": {name: self.total(name) for name in figures},
            "streams": [stream.to_json() for stream in self.streams],
            "quarantined_objects": self.refused,
            "unreadable_objects": self.unreadable,
            "foreign_objects": {"count": len(self.foreign), "first": self.foreign[:20]},
            "problems": self.problems,
        }


def survey(store: Store, sink: Sink) -> tuple[State, Report]:
    """Report on the table and the prefix as they are, without a run."""
    heads = read_heads(store)
    inventory = Inventory(store.list())
    state = load_state(sink)
    return state, build(state, inventory, heads, sink.name, sink.rows())


def build(
    state: State,
    inventory: Inventory,
    heads: Heads,
    table: str,
    rows: int,
    vanished: Iterable[Name] = (),
    unreadable: Mapping[Name, Quarantined] | None = None,
) -> Report:
    """Put the report together; reads nothing. `rows` is what the table itself says it has.

    Of the listed objects, `vanished` are those that a run has found to be there no more, `unreadable` those
    that it could not read, and why.
    """
    unreadable = unreadable or {}
    tallies = inventory.tally(state.quarantine.keys() | unreadable.keys() | set(vanished))
    listed = (
        {(item.key, item.etag) for items in inventory.streams.values() for item in items}
        if state.quarantine
        else ()
    )
    refused, held = _numbers(state.quarantine), _numbers(unreadable)
    listing = {name for name, tally in tallies.items() if tally.numbers}
    names = set(state.streams) | set(heads.streams) | set(refused) | set(held) | listing
    now = time.time_ns() // 1_000_000
    streams = [
        _stream(
            name,
            state.streams.get(name, StreamState()),
            heads,
            tallies.get(name, Tally()),
            refused.get(name, Ranges()),
            held.get(name, Ranges()),
            now,
        )
        for name in sorted(names)
    ]
    problems = [*heads.problems, *_gone(streams), *_unseen(streams, inventory, heads)]
    if rows != state.rows():
        problems.append(f"{table} has {rows} rows and its state says {state.rows()}: it was changed")
    documents = [
        {"key": key, "size": entry.size, "reason": entry.reason, "present": (key, etag) in listed}
        for (key, etag), entry in sorted(state.quarantine.items())
    ]
    others = [{"key": key, **entry._asdict()} for (key, _), entry in sorted(unreadable.items())]
    return Report(table, streams, documents, others, sorted(inventory.foreign), problems)


def _numbers(objects: Iterable[Name]) -> dict[StreamId, Ranges]:
    """The numbers that objects promise by their names."""
    found: dict[StreamId, Ranges] = defaultdict(Ranges)
    for key, _ in objects:
        name = parse_key(key)
        assert name is not None, key  # only such keys are ever read
        found[StreamId(name.gateway, name.stream, name.epoch)].add(name.first, name.last)
    return found


def _gone(streams: list[StreamReport]) -> Iterator[str]:
    """The streams whose gateway no longer has what waited there, and what to do about it."""
    gone = sorted({stream.path for stream in streams if any(hole.reason == GONE for hole in stream.holes)})
    if gone:
        more = f" and {len(gone) - SHOWN} more" if len(gone) > SHOWN else ""
        yield (
            f"no longer listed by its gateway: {', '.join(gone[:SHOWN])}{more}; what waited there is lost, "
            "unless the export is set up again; if the stream was deleted on purpose, say so: "
            f"streambridge ingest accept {shlex.join(gone[:SHOWN])} with these options"
        )


def _unseen(streams: list[StreamReport], inventory: Inventory, heads: Heads) -> Iterator[str]:
    """Where the heads are missing that would show a lost tail."""
    below = {key.partition(f"/{REPORTS}")[0] for key in inventory.foreign if f"/{REPORTS}" in key}
    for prefix in sorted(below):
        yield f"the heads of gateways are in {prefix}/: end --source with it, or lost tails are not seen"
    now = {name.gateway for name in heads.streams} | set(heads.gateways)
    silent = sorted({s.gateway for s in streams if s.head_ms is None or s.gateway not in now})
    if silent:
        more = f" and {len(silent) - SHOWN} more" if len(silent) > SHOWN else ""
        yield f"no head of {', '.join(silent[:SHOWN])}{more}: a lost tail would not be seen"


def _stream(
    name: StreamId, state: StreamState, heads: Heads, tally: Tally, refused: Ranges, held: Ranges, now: int
) -> StreamReport:
    head = heads.streams.get(name, state.head)
    # a run that began later may have left a head in the state that is newer than the one read here
    gone = (
        name not in heads.streams
        and head is not None
        and heads.gateways.get(name.gateway, -1) >= head.updated
    )
    covered = state.covered
    report = StreamReport(*name, duplicates=tally.duplicates)
    report.head_ms = head.updated if head else None
    report.late_objects, report.late_rows = state.late_objects, state.late_rows
    if covered:
        report.first, report.last, report.rows = covered.first, covered.last, covered.count()
        report.newest_ms = state.times.get(covered.last)
        report.lag_seconds = (
            round((now - report.newest_ms) / 1000, 3) if report.newest_ms is not None else None
        )
    known = [given for given in (covered, refused, held, tally.numbers) if given]
    ends = [given.last for given in known] + ([head.newest] if head else [])
    starts = [0] if head else [given.first for given in known]
    if not starts or not ends:
        return report
    gaps = covered.missing(min(starts), max(ends))
    causes = _causes(head, tally.numbers, refused, held, gone=gone)
    report.holes = list(_holes(gaps, _explain(gaps, causes), state.times))
    for kind in KINDS:
        setattr(report, kind, sum(hole.count for hole in report.holes if hole.kind == kind))
    return report


def _causes(
    head: Head | None, uploaded: Ranges, refused: Ranges, held: Ranges, *, gone: bool
) -> Iterator[Cause]:
    """Why numbers may be missing; the first cause counts."""
    dropped = head.dropped if head else ()
    joined = [drop for drop in dropped if drop[2].startswith(JOINED)]
    yield "waiting", UPLOADED, uploaded
    for first, last, reason in dropped:
        if not reason.startswith(JOINED):
            yield "missing" if reason in LOSSES else "trimmed", reason, [(first, last)]
    yield "quarantined", "", refused
    yield "unreadable", "", held
    if head and head.newest > head.exported:
        kind, reason = ("missing", GONE) if gone else ("waiting", "")
        yield kind, reason, [(head.exported + 1, head.newest)]
    for first, last, reason in joined:  # last: what is explained otherwise does not count there
        yield JOINED, reason, [(first, last)]


def _explain(gaps: Iterable[Pair], causes: Iterable[Cause]) -> list[Part]:
    """Cut what is missing by why it is; each range of a cause costs a search, however many gaps there are."""
    rest = Ranges(gaps)
    found: list[Part] = []
    for kind, reason, numbers in causes:
        if not rest:
            break
        parts = [part for pair in numbers for part in rest.take(*pair)]
        why = _judge(reason, size(parts)) if kind == JOINED else (kind, reason)
        found += [(first, last, *why) for first, last in parts]
    return sorted(found + [(first, last, "missing", "") for first, last in rest])


def _judge(reason: str, gone: int) -> tuple[str, str]:
    """Whether what is gone in a joined range is no more than what was dropped there."""
    text = reason.removeprefix(JOINED)
    dropped = int(text) if re.fullmatch("[0-9]{1,20}", text) else 0
    if gone <= dropped:
        return "trimmed", "joined"
    return "missing", f"{dropped} of these {gone} were dropped"


def _holes(gaps: list[Pair], parts: Iterable[Part], times: Mapping[int, int]) -> Iterator[Hole]:
    """The parts of the gaps, both in order, with the times of their neighbours."""
    following = iter(gaps)
    first = last = -1
    for part in parts:
        while part[0] > last:
            first, last = next(following)
        yield Hole(*part, times.get(first - 1), times.get(last + 1))


def _iso(ms: int | None) -> str | None:
    if ms is None:
        return None
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(ms // 1000)) + f".{ms % 1000:03d}Z"
