"""The completeness report: what is in the table and what is not, by stream.

It is made from the state, the object keys and the gateway reports, never from the table's rows. So it costs
the same for a thousand messages and for a billion. A number that is not in the table is, in this order of
precedence:

* trimmed      deleted from the table on purpose, which an operator has accepted
* trimmed      left out by a filter of the export, as an object in the table's state declares (`filtered`)
* waiting      in an object that no run has taken yet
* quarantined  in an object that was refused
* unreadable   in an object that this run could not read; the next run tries it again
* trimmed      dropped by the gateway, on purpose (overwritten, expired, purged, filtered)
* waiting      not uploaded by the gateway yet
* missing      none of these, or damaged or dropped without explanation according to the gateway: lost

A gateway merges old drops into ranges with a count (`joined:<count>`). If such a range has at most that many
numbers that are not in the table and not explained otherwise, the gateway dropped them: they are trimmed. If
it has more, some were lost. It is unknown which, so all of them count as missing.

Numbers that objects declare as left out are one range of a stream, with their count: they lie between others
that are in the table, and the state only counts them.

A stream starts at 0 if its gateway has reported it, otherwise at the first number in the table or in an
object. It ends at the highest known number. Without a gateway report a lost tail would go unnoticed, and a
note says so.

If a gateway's report no longer lists a stream, the stream was deleted, is no longer exported, or was on a
disk that was replaced. Its pending messages, according to the last report in the state, will never arrive:
they are missing, unless an operator accepts that.
"""

from __future__ import annotations

import re
import shlex
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bridge.ingest import intact
from bridge.ingest.gateway_reports import GatewayReports, ReportedStream
from bridge.ingest.listing import DAY, Listing, look_around
from bridge.ingest.numbers import within
from bridge.ingest.planner import Inventory, StreamId, Tally
from bridge.ingest.state import Quarantined, StreamState, TableState, load_state
from bridge.ingest.store import StorageLocation
from bridge.ingest.verdict import look, reasons
from bridge.objectkeys import JOINED, LOSSES, REPORTS, parse_key
from bridge.ranges import Pair, Ranges, size

if TYPE_CHECKING:
    from bridge.ingest.sinks.base import Sink

KINDS = ("trimmed", "quarantined", "unreadable", "waiting", "missing")
SHOWN = 5  # gateways or streams named in one line
Name = tuple[str, str]  # of an object: key and ETag
Cause = tuple[str, str, Iterable[Pair]]  # kind of hole, reason, and the numbers that it explains
Part = tuple[int, int, str, str]  # of a gap: first and last number, kind, reason
GONE = "its stream is gone"
UPLOADED = "uploaded, not taken yet"
ACCEPTED = "accepted"
FILTERED = "filtered"


@dataclass(frozen=True, slots=True)
class Hole:
    """Numbers that are not in the table, and the ingest times (ms) of the nearest rows before and after.

    `number` is how many of first..last these are; None: all.
    """

    first: int
    last: int
    kind: str
    reason: str = ""
    after_ms: int | None = None
    before_ms: int | None = None
    number: int | None = None

    @property
    def count(self) -> int:
        return self.last - self.first + 1 if self.number is None else self.number

    @property
    def after(self) -> str | None:
        return iso(self.after_ms)

    @property
    def before(self) -> str | None:
        return iso(self.before_ms)


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
    reported_ms: int | None = None  # time of the gateway report
    lag_seconds: float | None = None
    holes: list[Hole] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The name of the stream for users, without its epoch."""
        return f"{self.gateway}/{self.stream}"

    def to_json(self) -> dict[str, Any]:
        names = [name for name in self.__slots__ if name not in ("holes", "newest_ms", "reported_ms")]
        shown = ("first", "last", "count", "kind", "reason", "after", "before")
        holes = [{name: getattr(hole, name) for name in shown} for hole in self.holes]
        return {name: getattr(self, name) for name in names} | {
            "newest": iso(self.newest_ms),
            "head": iso(self.reported_ms),
            "holes": holes,
        }


@dataclass(slots=True)
class Report:
    """All streams, and the findings that concern no single stream."""

    table: str
    streams: list[StreamReport]
    refused: list[dict[str, Any]]  # quarantined objects
    unreadable: list[dict[str, Any]]  # objects that this run could not read
    foreign: list[str]  # keys that are not those of data objects: of a full listing all, else the first
    problems: list[str]  # why the report may be incomplete
    differs: bool = False  # from its state: the figures of the streams are those of the state
    foreign_count: int = 0
    full_ms: int | None = None  # when the last full listing began
    in_full: bool = True  # this report is made from a full listing
    made_ms: int = 0  # Unix time
    versions: dict[str, str] = field(default_factory=dict)  # of the gateways that have reported theirs
    files: intact.Look = field(default_factory=intact.Look)  # what is known of the table's files
    elsewhere: bool = False  # the source has nothing of what the table has

    def total(self, figure: str) -> int:
        return sum(getattr(stream, figure) for stream in self.streams)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing, and the table has the rows of its state in files that are there.

        A report without any stream proves nothing and is not complete.
        """
        missing = any(map(self.total, ("missing", "quarantined", "unreadable")))
        right = not self.differs and not self.elsewhere and self.files.whole
        return bool(self.streams) and not missing and right

    def to_json(self) -> dict[str, Any]:
        figures = ("rows", *KINDS, "duplicates", "late_objects", "late_rows")
        return {
            "table": self.table,
            "complete": self.complete,
            "differs": self.differs,
            "total": {name: self.total(name) for name in figures},
            "streams": [stream.to_json() for stream in self.streams],
            "quarantined_objects": self.refused,
            "unreadable_objects": self.unreadable,
            "foreign_objects": {"count": self.foreign_count, "first": self.foreign[:20]},
            "full_listing": iso(self.full_ms),
            "files": {
                "compared": iso(self.files.full),
                "damaged": [asdict(damage) | {"why": damage.why} for damage in self.files.damages],
                "unseen": self.files.unseen,
            },
            "elsewhere": self.elsewhere,
            "problems": self.problems,
        }


def survey(
    source: StorageLocation, sink: Sink, full_every: float = DAY, *, deep: bool = False
) -> tuple[TableState, Report]:
    """Return the state and the report of the table and the prefix as they are, without a run.

    Everything is listed if the last full listing that a run has recorded is `full_every` seconds old. With
    `deep`, all files of the table are compared (`bridge.ingest.intact`).
    """
    now = time.time_ns() // 1_000_000
    listing = look_around(source.open(), source.url, load_state(sink), now, full_every)
    state, standing = look(sink)  # after the listing, because listed objects may be in the table by now
    inventory, reports, changes = listing.inventory, listing.reports, standing.changes
    files = intact.look(sink, state) if deep else intact.recorded(sink)
    return state, build(
        state, inventory, reports, sink.name, standing.rows, changes=changes, listing=listing, files=files
    )


def build(
    state: TableState,
    inventory: Inventory,
    reports: GatewayReports,
    table: str,
    rows: int,
    vanished: Iterable[Name] = (),
    unreadable: Mapping[Name, Quarantined] | None = None,
    changes: Sequence[str] = (),
    listing: Listing | None = None,
    files: intact.Look | None = None,
) -> Report:
    """Build the report; reads nothing. `rows` is the number of rows according to the table's metadata.

    `changes` are the commits of others that may have changed rows (see `bridge.ingest.verdict`). Of the
    listed objects, `vanished` are those that no longer existed when the run came to them, `unreadable` those
    that it could not read, with the reason. `listing` is where inventory and reports are from; without one,
    they are of a full listing. `files` is what is known of the table's files.
    """
    unreadable = unreadable or {}
    tallies = inventory.tally(state.quarantine.keys() | unreadable.keys() | set(vanished))
    listed = (
        {(item.key, item.etag) for items in inventory.streams.values() for item in items}
        if state.quarantine
        else ()
    )
    refused, held = _numbers(state.quarantine), _numbers(unreadable)
    uploaded = {name for name, tally in tallies.items() if tally.numbers}
    names = set(state.streams) | set(reports.streams) | set(refused) | set(held) | uploaded
    now = time.time_ns() // 1_000_000
    streams = [
        _stream(
            name,
            state.streams.get(name, StreamState()),
            reports,
            tallies.get(name, Tally()),
            refused.get(name, Ranges()),
            held.get(name, Ranges()),
            now,
        )
        for name in sorted(names)
    ]
    if listing is not None and not listing.full:
        for name, stream in zip(sorted(names), streams, strict=True):
            if name not in listing.whole:
                stream.duplicates = state.streams[name].duplicates if name in state.streams else 0
    problems = [*reports.problems, *_gone(streams), *_unseen(streams, inventory, reports)]
    differs = reasons(table, state, rows, changes)
    files = files or intact.Look()
    lacks = lacking_source(state, listing) if listing else ""
    problems += [*([lacks] if lacks else ()), *differs, *_damaged(table, files)]
    documents = [
        {"key": key, "size": entry.size, "reason": entry.reason, "present": (key, etag) in listed}
        for (key, etag), entry in sorted(state.quarantine.items())
    ]
    others = [{"key": key, **entry._asdict()} for (key, _), entry in sorted(unreadable.items())]
    foreign = listing.foreign if listing else sorted(inventory.foreign)
    return Report(
        table,
        streams,
        documents,
        others,
        foreign,
        problems,
        bool(differs),
        listing.foreign_count if listing else len(foreign),
        listing.full_at if listing else None,
        listing is None or listing.full,
        now,
        dict(reports.versions),
        files,
        bool(lacks),
    )


def lacking_source(state: TableState, listing: Listing) -> str:
    """Return why the source cannot be that of the table; empty if it can.

    It has a report or an object of a gateway whose rows the table has, or it is the source of the last run,
    whose objects may have been pruned since.
    """
    known = {name.gateway for name, stream in state.streams.items() if stream.covered}
    last = state.listed.source if state.listed else None
    same = last is not None and intact.spellings(last) == intact.spellings(listing.source)
    if (
        not known
        or same
        or known & {*listing.reports.times, *(name[0] for name in listing.inventory.streams)}
    ):
        return ""
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    return (
        f"{listing.source} has nothing of what the table has, which is of {', '.join(sorted(known)[:SHOWN])}"
        f"{more}{f', from {last}' if last else ''}: check --source; if the table is to take the objects of "
        "other gateways from there, begin with `streambridge ingest --new-source`"
    )


def _damaged(table: str, files: intact.Look) -> Iterator[str]:
    """Name the files whose rows cannot be read, and the numbers of these rows."""
    for damage in files.damages[:SHOWN]:
        pairs = [f"{gateway}/{stream} {first}..{last}" for gateway, stream, _, first, last in damage.numbers]
        more = f" and {len(pairs) - SHOWN} more ranges" if len(pairs) > SHOWN else ""
        some = "" if damage.exact else f"{damage.rows} of " if damage.rows else "rows of "
        where = f": {some}{', '.join(pairs[:SHOWN])}{more} cannot be read" if pairs else ""
        yield f"{table}: the {damage.kind} {damage.path} {damage.why}{where}"
    if len(files.damages) > SHOWN:
        yield f"{table}: {len(files.damages) - SHOWN} more files are damaged (--json lists them)"
    if files.damages:
        yield "to take their rows again: streambridge ingest repair, with the options of this table"
    for unseen in files.unseen[:SHOWN]:
        yield f"{table}: a file cannot be looked at: {unseen}"
    if len(files.unseen) > SHOWN:
        yield f"{table}: {len(files.unseen) - SHOWN} more files cannot be looked at (--json lists them)"


def _numbers(objects: Iterable[Name]) -> dict[StreamId, Ranges]:
    """Return the numbers that the object keys promise, by stream."""
    found: dict[StreamId, Ranges] = defaultdict(Ranges)
    for key, _ in objects:
        name = parse_key(key)
        assert name is not None, key  # the planner plans no other key
        found[StreamId.of(name)].add(name.first, name.last)
    return found


def _gone(streams: list[StreamReport]) -> Iterator[str]:
    """Name the streams that are gone with pending messages, and the remedy."""
    gone = sorted({stream.path for stream in streams if any(hole.reason == GONE for hole in stream.holes)})
    if gone:
        more = f" and {len(gone) - SHOWN} more" if len(gone) > SHOWN else ""
        yield (
            f"no longer listed by its gateway: {', '.join(gone[:SHOWN])}{more}; its pending messages are "
            "lost, unless the export is set up again; if the stream was deleted on purpose, accept that: "
            f"streambridge ingest accept {shlex.join(gone[:SHOWN])} with these options"
        )


def _unseen(streams: list[StreamReport], inventory: Inventory, reports: GatewayReports) -> Iterator[str]:
    """Name the prefixes and gateways whose lost tails would go unnoticed, for lack of a gateway report."""
    below = {key.partition(f"/{REPORTS}")[0] for key in inventory.foreign if f"/{REPORTS}" in key}
    for prefix in sorted(below):
        yield f"the gateway reports are in {prefix}/: end --source with it, or lost tails go unnoticed"
    now = {name.gateway for name in reports.streams} | set(reports.times)
    silent = sorted({s.gateway for s in streams if s.reported_ms is None or s.gateway not in now})
    if silent:
        more = f" and {len(silent) - SHOWN} more" if len(silent) > SHOWN else ""
        yield f"no report of {', '.join(silent[:SHOWN])}{more}: a lost tail would go unnoticed"


def _stream(
    name: StreamId,
    state: StreamState,
    reports: GatewayReports,
    tally: Tally,
    refused: Ranges,
    held: Ranges,
    now: int,
) -> StreamReport:
    reported = reports.streams.get(name, state.reported)
    if reported and reported.ahead is None and state.reported and state.reported.ahead is not None:
        reported = replace(reported, ahead=())  # the state is newer
    # a run that started later may have saved a newer report in the state than the one read here
    gone = (
        name not in reports.streams
        and reported is not None
        and name.gateway in reports.times
        and reports.times[name.gateway] >= reported.time
    )
    covered = state.covered
    report = StreamReport(*name, duplicates=tally.duplicates)
    report.reported_ms = reported.updated if reported else None
    report.late_objects, report.late_rows = state.late_objects, state.late_rows
    if covered:
        report.first, report.last, report.rows = covered.first, covered.last, state.rows
        report.newest_ms = state.newest(now)
        report.lag_seconds = (
            round((now - report.newest_ms) / 1000, 3) if report.newest_ms is not None else None
        )
    known = [given for given in (covered, state.removed, refused, held, tally.numbers) if given]
    ends = [given.last for given in known] + ([reported.newest] if reported else [])
    starts = [0] if reported else [given.first for given in known]
    if not starts or not ends:
        return report
    gaps = covered.missing(min(starts), max(ends))
    causes = _causes(reported, state.removed, tally.numbers, refused, held, gone=gone)
    report.holes = [*_holes(gaps, _explain(gaps, causes), state.times), *_left_out(state)]
    for kind in KINDS:
        setattr(report, kind, sum(hole.count for hole in report.holes if hole.kind == kind))
    return report


def _left_out(state: StreamState) -> Iterator[Hole]:
    """Yield the numbers that objects have declared as left out, as one range."""
    if state.filtered:
        first, _ = within(min(state.filtered), state.covered.first, state.covered.last)
        _, last = within(max(state.filtered), state.covered.first, state.covered.last)
        yield Hole(first, last, "trimmed", FILTERED, number=sum(state.filtered.values()))


def _causes(
    reported: ReportedStream | None,
    removed: Ranges,
    uploaded: Ranges,
    refused: Ranges,
    held: Ranges,
    *,
    gone: bool,
) -> Iterator[Cause]:
    """Yield the possible causes for missing numbers; the first match counts."""
    dropped = reported.dropped if reported else ()
    joined = [drop for drop in dropped if drop[2].startswith(JOINED)]
    yield "trimmed", ACCEPTED, removed
    # An object counts before the gateway's report: the gateway may have lost what it had uploaded, or left it
    # out when an export began again.
    yield "waiting", UPLOADED, uploaded
    yield "quarantined", "", refused
    yield "unreadable", "", held
    for first, last, reason in dropped:
        if not reason.startswith(JOINED):
            yield "missing" if reason in LOSSES else "trimmed", reason, [(first, last)]
    if reported and (pending := reported.pending()):
        kind, reason = ("missing", GONE) if gone else ("waiting", "")
        yield kind, reason, pending
    for first, last, reason in joined:  # last: numbers explained otherwise do not count here
        yield JOINED, reason, [(first, last)]


def _explain(gaps: Iterable[Pair], causes: Iterable[Cause]) -> list[Part]:
    """Split the gaps by cause. Each range of a cause costs one search, however many gaps there are."""
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
    """Return kind and reason for a joined range: trimmed if no more numbers are gone than were dropped."""
    text = reason.removeprefix(JOINED)
    dropped = int(text) if re.fullmatch("[0-9]{1,20}", text) else 0
    if gone <= dropped:
        return "trimmed", "joined"
    return "missing", f"{dropped} of these {gone} were dropped"


def _holes(gaps: list[Pair], parts: Iterable[Part], times: Mapping[int, int]) -> Iterator[Hole]:
    """Yield the parts of the gaps, both sorted, with the times of the rows around each gap."""
    following = iter(gaps)
    first = last = -1
    for part in parts:
        while part[0] > last:
            first, last = next(following)
        yield Hole(*part, times.get(first - 1), times.get(last + 1))


def iso(ms: int | None) -> str | None:
    """Return Unix time in ms as text, in UTC."""
    if ms is None:
        return None
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(ms // 1000)) + f".{ms % 1000:03d}Z"
