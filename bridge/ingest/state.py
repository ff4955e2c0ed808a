"""The state of a table: which numbers it holds, as one small document per commit.

    <state>/<version, 20 digits>.json
    {"format": 1, "version": v, "previous": v0, "streams": [{"gateway", "stream", "epoch",
     "covered": [[first, last, ms of first, ms of last], ...], "late": [objects, rows], "head": {...},
     "removed": [[first, last], ...], "absent": [[first, last], ...], "open": true, "duplicates": rows,
     "filtered": [[chunk, count], ...]}],
     "quarantine": [[key, etag, size, reason], ...], "notes": {...},
     "table": {"checked": version of the table, "differs": reason, "others": rows},
     "listing": {"source": URL, "full": ms, "foreign": [count, key, ...],
                 "gateways": {id: [ETag, [stored, updated] of its report, version]}}}

`removed` and `table` are of `bridge.ingest.verdict`, `absent`, `open`, `duplicates` and `listing` of
`bridge.ingest.listing`; those of a stream are left out if they are empty. A document with `removed` has
format 2: earlier versions of the job would take these numbers again. Earlier versions wrote `listed`, which
orders reports by the clocks of gateways: it is ignored, and without `listing` a run lists everything.

`covered` includes numbers that objects declare as left out (`bridge.filtered`): they are settled, and have no
row. `filtered` counts them, by chunks of 2^20 numbers (`bridge.ingest.numbers`); which they are, only the
objects say. A document with `filtered` has format 3: earlier versions would expect these rows in the table.

A document is written under a new name before the commit, and the table's commit carries its version. So the
commit decides which document is current, and one that was never committed is never read. A document takes
O(streams + holes), not O(objects). Versions increase, and contain their time (ms in the upper bits). Earlier
versions of the job wrote documents one or two folders up, where other tables may have theirs too: they are
read there, and never deleted.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge.ingest.deletes import delete
from bridge.ingest.errors import StateMissing, Vanished, line
from bridge.ingest.gateway_reports import ReportedStream, ReportTime
from bridge.ingest.planner import StreamId
from bridge.ingest.store import StorageLocation
from bridge.ranges import Pair, Ranges

if TYPE_CHECKING:
    from bridge.ingest.sinks.base import Sink

FORMAT, REMOVED_FORMAT, FILTERED_FORMAT = 1, 2, 3
KEEP_MS = 7 * 24 * 3600 * 1000  # documents are kept for a rollback of up to a week
AHEAD_MS = 3_600_000  # that the clock of a gateway may be ahead of ours
RANDOM_BITS = 20  # two drivers get different versions in the same ms


class Piece(NamedTuple):
    """Numbers taken from one object, and the ingest times (ms) of their first and last row.

    If none has a row, that of the row before them. `filtered` is how many have none, by chunk.
    """

    first: int
    last: int
    first_ms: int
    last_ms: int
    filtered: Sequence[Sequence[int]] = ()

    @property
    def rows(self) -> int:
        return self.last - self.first + 1 - sum(count for _, count in self.filtered)


@dataclass(slots=True)
class StreamState:
    """The numbers of one stream that are in the table or left out, and its last report by the gateway."""

    covered: Ranges = field(default_factory=Ranges)
    times: dict[int, int] = field(default_factory=dict)  # of the first and last number of each interval
    late_objects: int = 0
    late_rows: int = 0
    reported: ReportedStream | None = None
    removed: Ranges = field(default_factory=Ranges)  # deleted from the table on purpose
    absent: Ranges = field(default_factory=Ranges)  # promised by its gateway, and in no object
    open: bool = False  # it has objects that could not be read
    duplicates: int = 0  # rows that objects have more than once, when the stream was last listed whole
    filtered: dict[int, int] = field(default_factory=dict)  # how many of `covered` are left out, by chunk

    @property
    def rows(self) -> int:
        """How many of its rows the table has."""
        return self.covered.count() - sum(self.filtered.values())

    @property
    def is_empty(self) -> bool:
        """Whether neither the table nor a report has any number of the stream."""
        numbers = bool(self.covered or self.removed or self.absent or self.open)
        return not numbers and (self.reported is None or self.reported.is_empty)

    def take(self, pieces: Iterable[Piece], *, known_last: int) -> None:
        """Add the numbers of one object; `known_last` is the stream's highest number before this round."""
        late = 0
        for piece in pieces:
            self.covered.add(piece.first, piece.last)
            self.times[piece.first] = piece.first_ms
            self.times[piece.last] = piece.last_ms
            for chunk, count in piece.filtered:
                self.filtered[chunk] = self.filtered.get(chunk, 0) + count
            late += piece.rows if piece.last < known_last else 0
        self.late_objects += 1 if late else 0
        self.late_rows += late

    def newest(self, now: int) -> int | None:
        """Return the ingest time of the newest row, as far as it is known; both are Unix time in ms.

        A time more than an hour after `now` is that of a wrong clock, and does not count.
        """
        last = self.times.get(self.covered.last) if self.covered else None
        if last is None or last <= now + AHEAD_MS:
            return last
        return max((ms for ms in self.times.values() if ms <= now + AHEAD_MS), default=None)

    def tidy(self) -> None:
        """Drop the times of numbers that no longer bound an interval."""
        self.times = {
            number: self.times[number] for pair in self.covered for number in pair if number in self.times
        }


class Quarantined(NamedTuple):
    """The size of a quarantined object, and the reason."""

    size: int
    reason: str


class KnownReport(NamedTuple):
    """The ETag of a gateway report, its time, and the version of its gateway, or ""."""

    etag: str
    time: ReportTime
    version: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """What the state knows of the bucket; see `bridge.ingest.listing`.

    `full` is when the last full listing began (Unix time in ms). `gateways` has each valid gateway report,
    `foreign` the first of the foreign keys.
    """

    source: str
    full: int
    gateways: dict[str, KnownReport]
    foreign_count: int = 0
    foreign: list[str] = field(default_factory=list)


@dataclass(slots=True)
class TableState:
    """The content of one state document."""

    version: int | None = None
    streams: dict[StreamId, StreamState] = field(default_factory=dict)
    quarantine: dict[tuple[str, str], Quarantined] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    checked: str | None = None  # the version of the table that had the rows of the state before this one
    differs: str = ""  # why the table may have other rows; empty: it has these
    others: int = 0  # rows of others that an operator has accepted
    listed: Listed | None = None

    def covered(self) -> dict[StreamId, Ranges]:
        return {stream: state.covered for stream, state in self.streams.items()}

    def settled(self) -> dict[StreamId, Ranges]:
        """Return the numbers that no run takes: those in the table, and those deleted on purpose."""
        found = self.covered()
        for stream, state in self.streams.items():
            if state.removed:
                found[stream] = state.covered.copy()
                found[stream].update(state.removed)
        return found

    def rows(self) -> int:
        """Return how many rows the table has if nothing else has changed it."""
        return self.others + sum(stream.rows for stream in self.streams.values())

    def of(self, stream: StreamId) -> StreamState:
        return self.streams.setdefault(stream, StreamState())


class StateStore:
    """The state documents at one location; `clock` gives the Unix time in ns."""

    def __init__(self, location: StorageLocation, clock: Callable[[], int] = time.time_ns) -> None:
        self.location, self._clock = location, clock
        self._store = location.open()

    def load(self, version: int | None) -> TableState:
        """Read the document that the table points to; None is an empty table. Raises StateMissing."""
        if version is None:
            return TableState()
        raw = self._read(version)
        try:
            return self._parsed(version, raw)
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise self._damaged(version, error) from error

    def _parsed(self, version: int, raw: dict[str, Any]) -> TableState:
        if raw.get("format") not in (FORMAT, REMOVED_FORMAT, FILTERED_FORMAT):
            raise StateMissing(
                f"{self.location.url}/{_name(version)}: format {raw.get('format')!r} is not supported; "
                "use the version of streambridge that wrote it"
            )
        state = TableState(version)
        for stream in raw["streams"]:
            name = StreamId(stream["gateway"], stream["stream"], stream["epoch"])
            state.streams[name] = _stream_from_json(stream)
        state.notes = raw["notes"]
        table = raw.get("table", {})
        state.checked, state.differs = table.get("checked"), line(table.get("differs", ""))
        state.others = int(table.get("others", 0))
        if raw.get("listing"):
            state.listed = _listed_from_json(raw["listing"])
        state.quarantine = {  # earlier versions did not cut the reasons
            (key, etag): Quarantined(size, line(why)) for key, etag, size, why in raw["quarantine"]
        }
        return state

    def previous(self, version: int) -> int | None:
        """Return the version from which the round of this one was planned; None for the first."""
        found = self._read(version).get("previous")
        if not isinstance(found, int | None):
            raise self._damaged(version, found)
        return found

    def _read(self, version: int) -> dict[str, Any]:
        for place in (None, *_above(self.location)):
            with suppress(Vanished):
                try:
                    document = json.loads((place.open() if place else self._store).get(_name(version)))
                except (ValueError, RecursionError) as error:
                    raise self._damaged(version, error) from error
                if not isinstance(document, dict):
                    raise self._damaged(version, type(document).__name__)
                return document
        raise StateMissing(
            f"{self.location.url}/{_name(version)}: the table points to this state, which is gone; "
            "restore it, or roll the table back to a snapshot whose state exists"
        )

    def _damaged(self, version: int, why: object) -> StateMissing:
        return StateMissing(
            f"{self.location.url}/{_name(version)}: not a state document ({line(why)}); restore it, or roll "
            "the table back to a snapshot whose state is good"
        )

    def save(self, state: TableState, previous: int | None) -> int:
        """Write the state as a new document and return its version. It counts once the table points to it."""
        # The clock may be behind that of the run before. The random part must differ then too: a sink takes
        # the commit of another run with the same version for its own.
        ms = max(self._clock() // 1_000_000, ((previous or 0) >> RANDOM_BITS) + 1)
        version = ms << RANDOM_BITS | random.getrandbits(RANDOM_BITS)
        streams = state.streams.values()
        lowest = REMOVED_FORMAT if any(stream.removed for stream in streams) else FORMAT
        document = {
            "format": FILTERED_FORMAT if any(stream.filtered for stream in streams) else lowest,
            "version": version,
            "previous": previous,
            "streams": [_stream_to_json(name, state.streams[name]) for name in sorted(state.streams)],
            "notes": state.notes,
            "quarantine": [[*name, *entry] for name, entry in sorted(state.quarantine.items())],
            "table": {"checked": state.checked, "differs": state.differs, "others": state.others},
            "listing": _listed_to_json(state.listed) if state.listed else None,
        }
        self._store.put(_name(version), json.dumps(document, separators=(",", ":")).encode())
        return version

    def prune(self, current: int) -> None:
        """Delete documents that are not needed for a rollback of up to a week.

        A week ago the table pointed to the document from which the first newer one was planned, however old
        that is. It need not be the newest of the old ones: that may be of a run that was killed before its
        commit.
        """
        oldest = self._clock() // 1_000_000 - KEEP_MS
        names = sorted(entry.key for entry in self._store.list() if entry.key.endswith(".json"))
        versions = [int(name[:20]) for name in names if re.fullmatch("[0-9]{20}[.]json", name)]
        old = [version for version in versions if version >> RANDOM_BITS < oldest]
        since = versions[len(old) :]
        try:
            needed = {current, self.previous(since[0]) if old and since else None}
        except StateMissing:  # something else wrote there, so which documents are needed is unknown
            return
        kept = [self.location.join(_name(version)).url for version in needed if version is not None]
        delete(self.location, map(_name, old), lambda: kept)


def load_state(sink: Sink) -> TableState:
    """Return the state that the table points to; an empty one if there is no table, or no commit yet."""
    version = sink.pointer()  # before the location, which changes when another run creates the table
    return StateStore(sink.state()).load(version)


def _above(location: StorageLocation) -> Iterator[StorageLocation]:
    """Yield the folders one and two levels up, if they exist."""
    above = location.above()
    for _ in range(2):
        if above is not None:
            yield above
            above = above.above()


def _name(version: int) -> str:
    return f"{version:020d}.json"


def _stream_to_json(name: StreamId, state: StreamState) -> dict[str, Any]:
    state.tidy()
    more = {
        "removed": list(state.removed),
        "absent": list(state.absent),
        "open": state.open,
        "duplicates": state.duplicates,
        "filtered": sorted(state.filtered.items()),
    }
    return {
        **name._asdict(),
        "covered": [[low, high, state.times.get(low), state.times.get(high)] for low, high in state.covered],
        "late": [state.late_objects, state.late_rows],
        "head": asdict(state.reported) if state.reported else None,
        **{what: value for what, value in more.items() if value},
    }


def _stream_from_json(data: dict[str, Any]) -> StreamState:
    pairs: list[Pair] = [(low, high) for low, high, _, _ in data["covered"]]
    times: dict[int, int] = {}
    for low, high, low_ms, high_ms in data["covered"]:
        times |= {number: ms for number, ms in ((low, low_ms), (high, high_ms)) if ms is not None}
    reported = None
    if head := data["head"]:
        time = ReportTime(int(head.get("stored", 0)), head["updated"])
        reported = ReportedStream.from_json(head, time)
    late_objects, late_rows = data["late"]
    return StreamState(
        Ranges(pairs),
        times,
        late_objects,
        late_rows,
        reported,
        Ranges(data.get("removed", ())),
        Ranges(data.get("absent", ())),
        bool(data.get("open")),
        int(data.get("duplicates", 0)),
        {int(chunk): int(count) for chunk, count in data.get("filtered", ())},
    )


def _listed_to_json(listed: Listed) -> dict[str, Any]:
    return {
        "source": listed.source,
        "full": listed.full,
        "gateways": listed.gateways,
        "foreign": [listed.foreign_count, *listed.foreign],
    }


def _listed_from_json(data: dict[str, Any]) -> Listed:
    gateways = {
        str(name): KnownReport(str(etag), ReportTime(int(stored), int(updated)), str(version))
        for name, (etag, (stored, updated), version) in data["gateways"].items()
    }
    count, *keys = data["foreign"]
    return Listed(str(data["source"]), int(data["full"]), gateways, int(count), list(map(str, keys)))
