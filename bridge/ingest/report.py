"""The completeness report: what is in the table, and what is not, by stream.

It comes from the state, the names of the objects and the gateways' head objects; the table's rows are never
read, so it costs the same at a thousand messages and at a billion. Numbers that are not in the table are,
in this order of precedence:

* trimmed      the gateway declared that it dropped them (overwritten, expired, purged)
* quarantined  an object that should hold them was refused
* waiting      the gateway has not uploaded them yet
* missing      none of these, or the gateway says that they were damaged or are gone unexplained: lost

Of drops long ago a gateway keeps ranges with a count (`joined:<count>`). Where no more numbers than that
are neither in the table nor explained otherwise, they are those that it dropped: trimmed. Where there are
more, something was lost; which ones cannot be told, so all of them are missing.

A stream starts at 0 where its gateway's head is known, else at the first number that is in the table; it
ends at the newest that anybody knows of. Without a head a lost tail is not seen, so that is said.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.ingest.heads import Head, Heads
from bridge.ingest.planner import Inventory, StreamId, Tally
from bridge.ingest.ranges import Pair, Ranges, size
from bridge.ingest.state import State, StreamState
from bridge.objectkeys import HEADS, parse_key

KINDS = ("trimmed", "quarantined", "waiting", "missing")
SHOWN = 5  # gateways named in one line
JOINED = "joined:"
ILLEGAL = ("damaged", "unknown")  # reasons of a gateway that are losses, as in its head object


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
    waiting: int = 0
    duplicates: int = 0
    late_objects: int = 0
    late_rows: int = 0
    newest_ms: int | None = None
    head_ms: int | None = None  # when the gateway last said how far it is
    lag_seconds: float | None = None
    holes: list[Hole] = field(default_factory=list)

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
    foreign: list[str]  # objects that are not named like data
    problems: list[str]  # why what it says may not be all

    def total(self, figure: str) -> int:
        return sum(getattr(stream, figure) for stream in self.streams)

    @property
    def complete(self) -> bool:
        """Whether all is there; where nothing is known, nothing is proven."""
        return bool(self.streams) and not (self.total("missing") or self.total("quarantined"))

    def to_json(self) -> dict[str, Any]:
        figures = ("rows", *KINDS, "duplicates", "late_objects", "late_rows")
        return {
            "table": self.table,
            "complete": self.complete,
            "total": {name: self.total(name) for name in figures},
            "streams": [stream.to_json() for stream in self.streams],
            "quarantined_objects": self.refused,
            "foreign_objects": {"count": len(self.foreign), "first": self.foreign[:20]},
            "problems": self.problems,
        }


def build(state: State, inventory: Inventory, heads: Heads, table: str, rows: int) -> Report:
    """Put the report together; reads nothing. `rows` is what the table itself says it has."""
    tallies = inventory.tally(state.quarantine)
    refused: dict[StreamId, Ranges] = defaultdict(Ranges)
    listed = (
        {(item.key, item.etag) for items in inventory.streams.values() for item in items}
        if state.quarantine
        else ()
    )
    documents = []
    for (key, etag), entry in sorted(state.quarantine.items()):
        name = parse_key(key)
        assert name is not None, key  # only such keys are ever read
        refused[StreamId(name.gateway, name.stream, name.epoch)].add(name.first, name.last)
        documents.append(
            {"key": key, "size": entry.size, "reason": entry.reason, "present": (key, etag) in listed}
        )
    names = set(state.streams) | set(heads.streams) | set(refused)
    now = time.time_ns() // 1_000_000
    streams = [
        _stream(
            name,
            state.streams.get(name, StreamState()),
            heads.streams.get(name),
            refused.get(name, Ranges()),
            tallies.get(name, Tally()),
            now,
        )
        for name in sorted(names)
    ]
    problems = [*heads.problems, *_unseen(streams, inventory)]
    if rows != state.rows():
        problems.append(f"{table} has {rows} rows and its state says {state.rows()}: it was changed")
    return Report(table, streams, documents, sorted(inventory.foreign), problems)


def _unseen(streams: list[StreamReport], inventory: Inventory) -> Iterator[str]:
    """Where the heads are missing that would show a lost tail."""
    below = {key.partition(f"/{HEADS}")[0] for key in inventory.foreign if f"/{HEADS}" in key}
    for prefix in sorted(below):
        yield f"the heads of gateways are in {prefix}/: end --source with it, or lost tails are not seen"
    silent = sorted({stream.gateway for stream in streams if stream.head_ms is None})
    if silent:
        more = f" and {len(silent) - SHOWN} more" if len(silent) > SHOWN else ""
        yield f"no head of {', '.join(silent[:SHOWN])}{more}: a lost tail would not be seen"


def _stream(
    name: StreamId, state: StreamState, head: Head | None, refused: Ranges, tally: Tally, now: int
) -> StreamReport:
    head = head or state.head
    covered = state.covered
    report = StreamReport(*name, duplicates=tally.rows - tally.distinct)
    report.head_ms = head.updated if head else None
    report.late_objects, report.late_rows = state.late_objects, state.late_rows
    if covered:
        report.first, report.last, report.rows = covered.first, covered.last, covered.count()
        report.newest_ms = state.times.get(covered.last)
        report.lag_seconds = (
            round((now - report.newest_ms) / 1000, 3) if report.newest_ms is not None else None
        )
    ends = [given.last for given in (covered, refused) if given] + ([head.newest] if head else [])
    starts = [0] if head else [given.first for given in (covered, refused) if given]
    if not starts or not ends:
        return report
    for first, last in covered.missing(min(starts), max(ends)):
        after, before = state.times.get(first - 1), state.times.get(last + 1)
        report.holes += [
            Hole(low, high, kind, reason, after, before)
            for low, high, kind, reason in _explain((first, last), head, refused)
        ]
    if head:
        report.holes = _judge(report.holes, head)
    for kind in KINDS:
        setattr(report, kind, sum(hole.count for hole in report.holes if hole.kind == kind))
    return report


def _explain(hole: Pair, head: Head | None, refused: Ranges) -> list[tuple[int, int, str, str]]:
    """Cut a hole by why it is there."""
    causes: list[tuple[str, str, Ranges]] = []
    joined = []
    for first, last, reason in head.dropped if head else ():
        if reason.startswith(JOINED):
            joined.append((JOINED, reason, Ranges([(first, last)])))
            continue
        causes.append(("missing" if reason in ILLEGAL else "trimmed", reason, Ranges([(first, last)])))
    causes.append(("quarantined", "", refused))
    if head and head.newest > head.exported:
        causes.append(("waiting", "", Ranges([(head.exported + 1, head.newest)])))
    causes += joined  # last: what is explained otherwise does not count there
    rest: list[Pair] = [hole]
    found: list[tuple[int, int, str, str]] = []
    for kind, reason, numbers in causes:
        explained = [part for pair in rest for part in numbers.common(*pair)]
        found += [(first, last, kind, reason) for first, last in explained]
        if size(explained):
            rest = _without(rest, explained)
    return sorted(found + [(first, last, "missing", "") for first, last in rest])


def _judge(holes: list[Hole], head: Head) -> list[Hole]:
    """Decide of what lies in joined ranges whether it is no more than what was dropped there."""
    judged = [hole for hole in holes if hole.kind != JOINED]
    for first, last, reason in dict.fromkeys(head.dropped):
        if reason.startswith(JOINED):
            inside = [
                h for h in holes if h.kind == JOINED and first <= h.first <= last and h.reason == reason
            ]
            text, gone = reason.removeprefix(JOINED), sum(hole.count for hole in inside)
            dropped = int(text) if re.fullmatch("[0-9]{1,20}", text) else 0
            kind = "trimmed" if gone <= dropped else "missing"
            why = "joined" if gone <= dropped else f"{dropped} of these {gone} were dropped"
            judged += [replace(hole, kind=kind, reason=why) for hole in inside]
    return sorted(judged, key=lambda hole: hole.first)


def _without(pairs: Iterable[Pair], taken: Iterable[Pair]) -> list[Pair]:
    gone = Ranges(taken)
    return [part for pair in pairs for part in gone.missing(*pair)]


def _iso(ms: int | None) -> str | None:
    if ms is None:
        return None
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(ms // 1000)) + f".{ms % 1000:03d}Z"
