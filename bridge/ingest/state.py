"""What the table holds, as one small document per commit.

    <state>/<version, 20 digits>.json
    {"format": 1, "version": v, "previous": v0, "streams": [{"gateway", "stream", "epoch",
     "covered": [[first, last, ms of first, ms of last], ...], "late": [objects, rows], "head": {...}}],
     "quarantine": [[key, etag, size, reason], ...], "notes": {...}}

A document is written under a new name before the commit, and the commit of the table carries its
version: the commit decides which document is true, and one that was never committed is never read. It
costs O(streams + holes), not O(objects). Versions grow, and hold when they were made (ms in the upper bits).
Earlier ones may be one or two folders up, where other tables may have theirs: they are read there, and stay.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge.ingest.errors import StateMissing, Vanished, line
from bridge.ingest.heads import Head
from bridge.ingest.planner import StreamId
from bridge.ingest.ranges import Pair, Ranges
from bridge.ingest.store import Place

if TYPE_CHECKING:
    from bridge.ingest.sinks.base import Sink

FORMAT = 1
KEEP_MS = 7 * 24 * 3600 * 1000  # a table may be rolled back by as much
RANDOM_BITS = 20  # two drivers in the same ms still get versions of their own


class Piece(NamedTuple):
    """Numbers taken from one object, and the ingest times (ms) of the first and the last of them."""

    first: int
    last: int
    first_ms: int
    last_ms: int


@dataclass(slots=True)
class StreamState:
    """What the table holds of one stream."""

    covered: Ranges = field(default_factory=Ranges)
    times: dict[int, int] = field(default_factory=dict)  # of the first and last number of each interval
    late_objects: int = 0
    late_rows: int = 0
    head: Head | None = None

    def take(self, pieces: Iterable[Piece], *, known_last: int) -> None:
        """Add what one object brought; `known_last` is how far the stream went before this round."""
        late = 0
        for piece in pieces:
            self.covered.add(piece.first, piece.last)
            self.times[piece.first] = piece.first_ms
            self.times[piece.last] = piece.last_ms
            late += piece.last - piece.first + 1 if piece.last < known_last else 0
        self.late_objects += 1 if late else 0
        self.late_rows += late

    def tidy(self) -> None:
        """Forget the times of numbers that no longer bound an interval."""
        self.times = {
            number: self.times[number] for pair in self.covered for number in pair if number in self.times
        }


class Quarantined(NamedTuple):
    """Why an object was refused."""

    size: int
    reason: str


@dataclass(slots=True)
class State:
    """The content of one state document."""

    version: int | None = None
    streams: dict[StreamId, StreamState] = field(default_factory=dict)
    quarantine: dict[tuple[str, str], Quarantined] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def covered(self) -> dict[StreamId, Ranges]:
        return {stream: state.covered for stream, state in self.streams.items()}

    def rows(self) -> int:
        """How many rows the table has if nobody else changed it."""
        return sum(stream.covered.count() for stream in self.streams.values())

    def of(self, stream: StreamId) -> StreamState:
        return self.streams.setdefault(stream, StreamState())


class StateStore:
    """The documents under one URL."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._store = place.open()

    def load(self, version: int | None) -> State:
        """Read the document that the table points to; no pointer is an empty table."""
        if version is None:
            return State()
        raw = self._known(version)
        try:
            return self._parsed(version, raw)
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise self._damaged(version, error) from error

    def _parsed(self, version: int, raw: dict[str, Any]) -> State:
        if raw.get("format") != FORMAT:
            raise StateMissing(
                f"{self.place.url}/{_name(version)}: format {raw.get('format')!r} is not known here"
            )
        state = State(version)
        for stream in raw["streams"]:
            name = StreamId(stream["gateway"], stream["stream"], stream["epoch"])
            state.streams[name] = _stream_from_json(stream)
        state.notes = raw["notes"]
        state.quarantine = {  # earlier versions did not cut the reasons
            (key, etag): Quarantined(size, line(why)) for key, etag, size, why in raw["quarantine"]
        }
        return state

    def previous(self, version: int) -> int | None:
        """The version that the round of this one was planned from; None: it was the first."""
        found = self._known(version).get("previous")
        if not isinstance(found, int | None):
            raise self._damaged(version, found)
        return found

    def _known(self, version: int) -> dict[str, Any]:
        try:
            return self._read(version)
        except Vanished as error:
            raise StateMissing(
                f"{self.place.url}/{_name(version)}: the table points to this state and it is gone; "
                "restore it, or roll the table back to a snapshot whose state is there"
            ) from error

    def _read(self, version: int) -> dict[str, Any]:
        for store in (self._store, *map(Place.open, _above(self.place))):
            with suppress(Vanished):
                data = store.get(_name(version))
                try:
                    document = json.loads(data)
                except (ValueError, RecursionError) as error:
                    raise self._damaged(version, error) from error
                if not isinstance(document, dict):
                    raise self._damaged(version, type(document).__name__)
                return document
        raise Vanished(f"{_name(version)}: no such document")

    def _damaged(self, version: int, why: object) -> StateMissing:
        return StateMissing(
            f"{self.place.url}/{_name(version)}: not a state document ({line(why)}); restore it, or roll the "
            "table back to a snapshot whose state is good"
        )

    def save(self, state: State, previous: int | None) -> int:
        """Write the state as a new document and return its version; it counts once the table points to it."""
        fresh = (time.time_ns() // 1_000_000) << RANDOM_BITS | random.getrandbits(RANDOM_BITS)
        version = max(fresh, (previous or 0) + 1)
        document = {
            "format": FORMAT,
            "version": version,
            "previous": previous,
            "streams": [_stream_to_json(name, state.streams[name]) for name in sorted(state.streams)],
            "notes": state.notes,
            "quarantine": [[*name, *entry] for name, entry in sorted(state.quarantine.items())],
        }
        self._store.put(_name(version), json.dumps(document, separators=(",", ":")).encode())
        return version

    def prune(self, current: int) -> None:
        """Remove documents that nobody needs who rolls the table back by a week.

        A week ago the table pointed to what the first document since then was planned from, however old that
        is. The newest of the older ones need not be it: it may be of a run that was killed before its commit.
        """
        oldest = time.time_ns() // 1_000_000 - KEEP_MS
        names = sorted(entry.key for entry in self._store.list() if entry.key.endswith(".json"))
        versions = [int(name[:20]) for name in names if re.fullmatch("[0-9]{20}[.]json", name)]
        old = [version for version in versions if version >> RANDOM_BITS < oldest]
        since = versions[len(old) :]
        try:
            needed = {current, self.previous(since[0]) if old and since else None}
        except StateMissing:  # somebody else wrote there: what is needed cannot be known
            return
        self._store.delete(_name(version) for version in old if version not in needed)


def load_state(sink: Sink) -> State:
    """The state that the table points to; an empty one if there is no table, or nothing was committed."""
    version = sink.pointer()  # first: a table that another run makes meanwhile has its state elsewhere
    return StateStore(sink.state()).load(version)


def _above(place: Place) -> Iterator[Place]:
    """The folders one and two levels up, as far as there are such."""
    url = place.url.rstrip("/")
    for _ in range(2):
        url = url.rpartition("/")[0]
        if url and not url.endswith("/"):
            yield Place(url, place.endpoint)


def _name(version: int) -> str:
    return f"{version:020d}.json"


def _stream_to_json(name: StreamId, state: StreamState) -> dict[str, Any]:
    state.tidy()
    return {
        **name._asdict(),
        "covered": [[low, high, state.times.get(low), state.times.get(high)] for low, high in state.covered],
        "late": [state.late_objects, state.late_rows],
        "head": state.head.to_json() if state.head else None,
    }


def _stream_from_json(data: dict[str, Any]) -> StreamState:
    pairs: list[Pair] = [(low, high) for low, high, _, _ in data["covered"]]
    times: dict[int, int] = {}
    for low, high, low_ms, high_ms in data["covered"]:
        times |= {number: ms for number, ms in ((low, low_ms), (high, high_ms)) if ms is not None}
    head = Head.from_json(data["head"], data["head"]["updated"]) if data["head"] else None
    late_objects, late_rows = data["late"]
    return StreamState(Ranges(pairs), times, late_objects, late_rows, head)
