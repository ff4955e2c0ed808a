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

Before, all files of the table are compared with what is there (`bridge.ingest.intact`). `accept` refuses a
table with damaged files; `repair` takes them out. What is lost then are the numbers of the state that the
remaining files do not have, whether these are deleted there or not: so no deleted row comes back. If the
table was not as its state says before, only numbers that the damaged files may have had are lost. Rows of
these may have been deleted by others; if that leaves open which, `repair` refuses until somebody decides.

The new state takes effect with one commit, without files or without the damaged ones. If another run commits
first, nothing is done (CommitConflict). If another engine does, its commit is newer than the examined
version, so the next run checks it.

If a file of another engine has repeated and missing numbers whose count still matches its bounds, it is
assumed to have them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bridge.ingest import stored
from bridge.ingest.columns import IDENTITY
from bridge.ingest.errors import BadOption, CommitConflict, IngestError, Vanished
from bridge.ingest.intact import Look, compared, concerned, lacking, named, record, single, spellings
from bridge.ingest.numbers import within
from bridge.ingest.planner import Inventory, StreamId
from bridge.ingest.sinks.base import (
    DATA,
    DELETES,
    MANIFEST,
    MANIFEST_LIST,
    MANIFEST_OF_DELETES,
    Content,
    Held,
    Part,
    Sink,
    Standing,
)
from bridge.ingest.state import Piece, StateStore, StreamState, TableState
from bridge.ingest.store import StorageLocation
from bridge.ingest.verdict import look, weigh
from bridge.objectkeys import MAX_SEQUENCE, epoch_prefix
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

    @property
    def name(self) -> tuple[str, str, int]:
        return self.gateway, self.stream, self.epoch


@dataclass(slots=True)
class Repaired:
    """What was found, and whether it was committed. `differs` are the reasons before.

    `damaged` are the files that are, and `hopeless` the lost numbers that no object has, as [gateway, stream,
    epoch, first, last].
    """

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
    damaged: list[str] = field(default_factory=list)
    hopeless: list[list[Any]] = field(default_factory=list)


def repair(
    sink: Sink,
    source: StorageLocation | None = None,
    *,
    dry_run: bool,
    deleted: str | None = None,
    give_up: bool = False,
) -> Repaired:
    """Adapt the state to the table; the next run ingests lost rows again. Raises CommitConflict.

    Damaged files are taken out of the table, and then only their rows count as lost. `source` is where the
    objects are, by default as for the last run. Raises IngestError if rows that others have deleted might
    come back, unless `deleted` says what becomes of the rows of these files (`out`, `back`), or if rows may
    be there that no object has, unless `give_up`.
    """
    return _settle(sink, dry_run, _How(source, deleted, give_up))


def accept_rows(sink: Sink, *, dry_run: bool) -> Repaired:
    """Accept the table as it is: lost rows were deleted on purpose. Raises CommitConflict.

    Raises IngestError if its files are damaged: what these have lost was not deleted on purpose.
    """
    return _settle(sink, dry_run, None)


class _How(NamedTuple):
    """How to repair damaged files, see `repair`."""

    source: StorageLocation | None
    deleted: str | None
    give_up: bool


def _settle(sink: Sink, dry_run: bool, how: _How | None) -> Repaired:
    state, standing = look(sink)
    differs = weigh(sink.name, state, standing)
    at, _, place, found = sink.parts()
    parts = list(found)
    damage = compared(parts, place, state, Look())
    if at != standing.at:
        raise CommitConflict(f"{sink.name}: it was changed meanwhile")
    out = _taken_out(damage, parts, how)
    content = _left(sink, place, standing, parts, out) if out else sink.content()
    if content.pointer != state.version:
        raise CommitConflict(f"{sink.name}: another run committed first")
    stock = take_stock(content)
    changes = _changes(state, stock)
    to_removed = how is None
    if out and how:
        changes = _only_damaged(changes, state, parts, out, differs=bool(differs))
        to_removed = _stay_out(sink.name, changes, parts, out, how) if differs else False
    done = Repaired(
        differs,
        changes,
        sum(size(change.lost) for change in changes),
        sum(size(change.found) for change in changes),
        0 if out else stock.surplus,
        stock.rows,
        len(content.files),
        stock.files_read,
        dry_run,
        damaged=[f"{one.path} {one.why}" for one in damage.damages],
    )
    if out and how and not to_removed:
        done.hopeless = _hopeless(changes, state, how.source, place.endpoint)
        if any(one.kind != DATA for one in damage.damages) and not (how.give_up or dry_run):
            _spare(sink.name, done.hopeless)
    if dry_run or not (differs or changes or out):
        return done
    for change in changes:
        _apply(change, state.of(StreamId(*change.name)), stock, to_removed=to_removed)
    state.others = stock.surplus if how is None else min(state.others, stock.surplus)
    if not out:
        state.checked, state.differs = content.at, ""
    if state.listed:
        state.listed = replace(state.listed, full=0)  # the next run lists everything, to find lost rows
    previous = state.version
    version = StateStore(sink.state()).save(state, previous)
    if out:
        sink.take_out(previous, version, out, standing.at)
        record(sink, Look())
    else:
        sink.commit(previous, version, [])
    done.committed = True
    return done


def _apply(change: StreamChange, stream: StreamState, stock: Stock, *, to_removed: bool) -> None:
    """Give the state of a stream the numbers of the table."""
    for pair in change.lost:
        stream.covered.take(*pair)
    stream.covered.update(change.found)
    stream.filtered = {chunk: stream.filtered[chunk] for chunk in change.filtered}
    stream.times = stock.times[StreamId(*change.name)] | stream.times
    for pair in stream.covered:
        stream.removed.take(*pair)
    if to_removed:
        stream.removed.update(change.lost)


def _taken_out(damage: Look, parts: list[Part], how: _How | None) -> set[str]:
    """Return the files to take out of the table: the damaged, and those whose deletes are no longer known."""
    if damage.unseen:
        raise IngestError(f"{damage.unseen[0]}; nothing was done: see that it can be looked at")
    for one in damage.damages:
        if how is None:
            raise IngestError(
                f"{one.path} {one.why}; nothing was done: `streambridge ingest repair` comes first"
            )
        if one.kind == MANIFEST_LIST:
            raise IngestError(
                f"{one.path} {one.why}; nothing was done: without its manifest list nobody knows the files "
                "of this version. Restore it from the versions of its bucket, or roll the table back"
            )
    paths = {one.path for one in damage.damages}
    for lost in [part for part in parts if part.path in paths]:
        paths.update(part.path for part in concerned(lost, parts))
    return paths | {part.path for part in parts if part.of in paths}


def _left(
    sink: Sink, place: StorageLocation, standing: Standing, parts: list[Part], out: set[str]
) -> Content:
    """Return what the table has without some files; what is read includes rows that others have deleted."""
    left = {part.path: part for part in parts if part.kind == DATA and part.path not in out}
    columns = sink.target().arrow()

    def read(paths: Collection[str]) -> Iterator[pa.Table]:
        for path in paths:
            for bucket, key in spellings(path):
                store = replace(place, url=f"s3://{bucket}" if bucket else "/").open()
                with suppress(Vanished), stored.undamaged(path):
                    source = pa.PythonFile(stored.RangedFile(store, key, left[path].size or 0), mode="r")
                    file = pq.ParquetFile(source, page_checksum_verification=True)
                    known = stored.named(path, file.schema_arrow, columns, IDENTITY.names)
                    for batch in file.iter_batches(columns=known, use_threads=False):
                        yield pa.Table.from_batches([batch]).select(known).rename_columns(IDENTITY.names)
                    break

    files = [Held(part.path, part.rows, part.bounds) for part in left.values()]
    return Content(standing.pointer, standing.at, files, read)


def _only_damaged(
    changes: list[StreamChange], state: TableState, parts: list[Part], out: set[str], *, differs: bool
) -> list[StreamChange]:
    """Return what is lost with the files that are taken out.

    If the table had the rows of its state, this is all that is absent; otherwise, what these may have had.
    """
    gone = [part for part in parts if part.path in out and part.kind in (DATA, MANIFEST)]
    for change in changes:
        change.found = []  # deleted rows that are still in a file
        if differs:
            may = Ranges()
            for part in gone:
                may.update(lacking(state, part, {}).get(StreamId(*change.name), Ranges()))
            change.lost = [pair for first, last in change.lost for pair in may.common(first, last)]
    return [change for change in changes if change.lost]


def _stay_out(name: str, changes: list[StreamChange], parts: list[Part], out: set[str], how: _How) -> bool:
    """Return whether the lost numbers stay out of a table that others have changed.

    Raises IngestError if some of them may be those of deleted rows, and nobody has decided.
    """
    gone = [part for part in parts if part.path in out and part.kind in (DATA, MANIFEST)]
    deletes = [
        part
        for part in parts
        if part.kind == DELETES or (part.kind == MANIFEST_OF_DELETES and part.path in out)
    ]
    touched = {one.path for part in deletes for one in concerned(part, parts)}
    clear = not any(
        part.deletes or part.path in touched or (part.kind == MANIFEST and deletes != []) for part in gone
    )
    if clear and sum(part.rows for part in gone) == sum(size(change.lost) for change in changes):
        return False
    if how.deleted is None:
        raise IngestError(
            f"{name}: others have deleted rows, perhaps of its damaged files, and nobody has accepted that; "
            "it cannot be known which, so nothing was done. With --deleted out no row of these files comes "
            "back, with --deleted back all do"
        )
    return how.deleted == "out"


def _spare(name: str, hopeless: list[list[Any]]) -> None:
    """Raise IngestError if files that are there would go, and no object has their rows."""
    if hopeless:
        gateway, stream, _, first, last = hopeless[0]
        more = f" and {len(hopeless) - 1} more ranges" if len(hopeless) > 1 else ""
        raise IngestError(
            f"{name}: no object has {gateway}/{stream} {first}..{last}{more}, and the table would lose files "
            "that may have them; nothing was done. Restore what is damaged from the versions of its bucket, "
            "or give them up with --give-up"
        )


def _hopeless(
    changes: list[StreamChange], state: TableState, source: StorageLocation | None, endpoint: str | None
) -> list[list[Any]]:
    """Return the lost numbers that no object has, as [gateway, stream, epoch, first, last]."""
    if source is None:
        if state.listed is None:
            raise BadOption(
                "--source is missing: s3://bucket/prefix or a directory, to see what objects have"
            )
        source = StorageLocation(state.listed.source, endpoint)
    found: list[list[Any]] = []
    for change in changes:
        rest = Ranges(change.lost)
        for item in Inventory(source.open().under(epoch_prefix(*change.name))).streams.get(
            StreamId(*change.name), ()
        ):
            if (item.key, item.etag) not in state.quarantine:
                rest.take(item.first, item.last)
        found += [[*change.name, *pair] for pair in rest]
    return found


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
