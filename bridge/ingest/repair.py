"""Adapts the state to the table after others have changed the table: `repair`, and `accept --rows`.

Both determine which numbers of which stream one version of the table has. If the statistics of a data file
name one stream, and as many rows as there are numbers between its bounds, the file has exactly these numbers.
In cases of doubt, the columns that identify a message are read: if a file has several streams, missing or
deleted rows or no statistics, or if its numbers overlap those of another file.

Numbers of the state that the table no longer has are lost. After `repair` the state does not have them
either, and the next run takes them again from the objects. After `accept` they count as deleted on purpose,
and no run takes them. After either, the state has numbers that only the table had. Rows that are no messages,
or that the table has more than once, are `surplus`: no repair removes them, and the table differs from its
state until they are gone or accepted.

For numbers that objects have declared as left out, the state knows only their count in each chunk of 2^20. If
the table lacks that many numbers of a chunk, these are the ones. Otherwise it is unknown which were left out
and which are lost, so all that are absent there count as lost: after `repair`, the next run reads the objects
again and finds out; after `accept`, all of them count as deleted on purpose.

The new state takes effect with one commit without files, like that of a round. If another run commits first,
nothing is done (CommitConflict). If another engine does, its commit is newer than the examined version, so
the next run checks it.

If a file of another engine has repeated and missing numbers whose count still matches its bounds, it is
assumed to have them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from bridge.ingest.columns import IDENTITY
from bridge.ingest.errors import CommitConflict
from bridge.ingest.intact import named, single
from bridge.ingest.numbers import within
from bridge.ingest.planner import StreamId
from bridge.ingest.sinks.base import Content, Held, Sink
from bridge.ingest.state import Piece, StateStore, TableState
from bridge.ingest.verdict import look, weigh
from bridge.objectkeys import MAX_SEQUENCE
from bridge.ranges import Pair, Ranges, size

ORDER = [(name, "ascending") for name in IDENTITY.names if name != "ingest_time"]


@dataclass(slots=True)
class Stock:
    """What a version of the table holds: the numbers of each stream, and all its rows."""

    streams: dict[StreamId, Ranges] = field(default_factory=lambda: defaultdict(Ranges))
    times: dict[StreamId, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))  # ms
    rows: int = 0
    files_read: int = 0

    def add(self, stream: StreamId, piece: Piece) -> None:
        self.streams[stream].add(piece.first, piece.last)
        self.times[stream] |= {piece.first: piece.first_ms, piece.last: piece.last_ms}

    @property
    def surplus(self) -> int:
        """Rows that are no messages, and those that are there more than once."""
        return self.rows - sum(ranges.count() for ranges in self.streams.values())


@dataclass(slots=True)
class StreamChange:
    """What differs in one stream: numbers that are lost, and numbers that only the table has.

    `filtered` are the chunks whose left-out numbers are still known.
    """

    gateway: str
    stream: str
    epoch: int
    lost: list[Pair]
    found: list[Pair]
    filtered: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Repaired:
    """What was found, and whether it was committed. `differs` are the reasons before."""

    differs: list[str]
    streams: list[StreamChange]
    lost: int
    found: int
    surplus: int
    rows: int
    files: int
    files_read: int
    dry_run: bool
    committed: bool = False


def repair(sink: Sink, *, dry_run: bool) -> Repaired:
    """Adapt the state to the table; the next run ingests lost rows again. Raises CommitConflict."""
    return _settle(sink, dry_run=dry_run, accept=False)


def accept_rows(sink: Sink, *, dry_run: bool) -> Repaired:
    """Accept the table as it is: lost rows were deleted on purpose. Raises CommitConflict."""
    return _settle(sink, dry_run=dry_run, accept=True)


def _settle(sink: Sink, *, dry_run: bool, accept: bool) -> Repaired:
    state, standing = look(sink)
    differs = weigh(sink.name, state, standing)
    content = sink.content()
    if content.pointer != state.version:
        raise CommitConflict(f"{sink.name}: another run committed first")
    stock = take_stock(content)
    changes = _changes(state, stock)
    done = Repaired(
        differs,
        changes,
        sum(size(change.lost) for change in changes),
        sum(size(change.found) for change in changes),
        stock.surplus,
        stock.rows,
        len(content.files),
        stock.files_read,
        dry_run,
    )
    if dry_run or not (differs or changes):
        return done
    for change in changes:
        name = StreamId(change.gateway, change.stream, change.epoch)
        stream = state.of(name)
        for pair in change.lost:
            stream.covered.take(*pair)
        stream.covered.update(change.found)
        stream.filtered = {chunk: stream.filtered[chunk] for chunk in change.filtered}
        stream.times = stock.times[name] | stream.times
        for pair in stream.covered:
            stream.removed.take(*pair)
        if accept:
            stream.removed.update(change.lost)
    state.others = stock.surplus if accept else min(state.others, stock.surplus)
    state.checked, state.differs = content.at, ""
    state.listed = None  # the next run lists everything, to find lost rows
    sink.commit(state.version, StateStore(sink.state()).save(state, state.version), [])
    done.committed = True
    return done


def take_stock(content: Content) -> Stock:
    """Return which numbers the table holds, from statistics of its files or, in doubt, from their rows."""
    stock = Stock()
    clear: dict[StreamId, list[tuple[int, int, Held]]] = defaultdict(list)
    doubtful: list[str] = []
    for file in content.files:
        stream = single(file)
        if stream is None:
            doubtful.append(file.path)
        else:
            assert file.bounds is not None
            clear[stream].append((*file.bounds["sequence_number"], file))
    for stream, files in clear.items():
        for first, last, file, overlaps in _overlapping(files):
            if overlaps:
                doubtful.append(file.path)
                continue
            assert file.bounds is not None
            low, high = (time // 1000 for time in file.bounds["ingest_time"])
            stock.add(stream, Piece(first, last, low, high))
            stock.rows += file.rows
    stock.files_read = len(doubtful)
    for rows in content.read(doubtful) if doubtful else ():
        stock.rows += rows.num_rows
        for stream, piece in _messages(rows.select(IDENTITY.names).cast(IDENTITY)):
            stock.add(stream, piece)
    return stock


def _overlapping(files: list[tuple[int, int, Held]]) -> Iterator[tuple[int, int, Held, bool]]:
    """Yield the files of a stream, by first number, with whether their numbers overlap those of another."""
    files.sort(key=lambda file: file[:2])
    reach = -1
    for at, (first, last, file) in enumerate(files):
        follows = at + 1 < len(files) and files[at + 1][0] <= last
        yield first, last, file, first <= reach or follows
        reach = max(reach, last)


def _messages(rows: pa.Table) -> Iterator[tuple[StreamId, Piece]]:
    """Yield the runs of contiguous numbers; rows that are no messages are left out."""
    rows = rows.filter(pc.is_valid(rows["sequence_number"])).sort_by(ORDER).combine_chunks()
    count = rows.num_rows
    if not count:
        return
    numbers = rows["sequence_number"]
    breaks = pc.not_equal(pc.subtract(numbers[1:], numbers[:-1]), 1)
    for name in IDENTITY.names[:3]:
        # a comparison with null is null
        breaks = pc.or_(breaks, pc.fill_null(pc.not_equal(rows[name][1:], rows[name][:-1]), True))
    starts = [0, *(index + 1 for index in pc.indices_nonzero(breaks).to_pylist())]
    times = pc.fill_null(rows["ingest_time"].cast(pa.int64()), 0)
    for start, end in zip(starts, [*starts[1:], count], strict=True):
        stream = named(*(rows[name][start].as_py() for name in IDENTITY.names[:3]))
        first, last = numbers[start].as_py(), numbers[end - 1].as_py()
        if stream is not None and 0 <= first <= last <= MAX_SEQUENCE:
            low, high = (times[at].as_py() // 1000 for at in (start, end - 1))
            yield stream, Piece(first, last, low, high)


def _changes(state: TableState, stock: Stock) -> list[StreamChange]:
    """Return the streams whose numbers in the table are not those of the state."""
    covered: Mapping[StreamId, Ranges] = state.covered()
    filtered = {name: stream.filtered for name, stream in state.streams.items()}
    changes = []
    for name in sorted(covered.keys() | stock.streams.keys()):
        before, now = covered.get(name, Ranges()), stock.streams[name]
        lost = [hole for pair in before for hole in now.missing(*pair)]
        found = [hole for pair in now for hole in before.missing(*pair)]
        known: list[int] = []
        if counts := filtered.get(name):
            lost, known = _lost(lost, counts)
        if lost or found or len(known) < len(counts or ()):
            changes.append(StreamChange(*name, lost, found, known))
    return changes


def _lost(absent: list[Pair], filtered: Mapping[int, int]) -> tuple[list[Pair], list[int]]:
    """Return which of the absent numbers are lost, and the chunks in which as many are absent as left out."""
    rest = Ranges(absent)
    known = []
    for chunk, count in filtered.items():
        whole = within(chunk, 0, MAX_SEQUENCE)
        if size(rest.common(*whole)) == count:
            rest.take(*whole)
            known.append(chunk)
    return list(rest), known
