"""The Python workers of a refine round.

    typing   data files of the table -> rows that are not refined yet, with their typed columns or a reason
    writing  such rows -> data files of the typed table and of its rejects, and status rows

One task does both, in one pass: `refining`. Only VARIANT takes Spark's own expressions in between; it is
still one stage, with no shuffle and nothing on the driver. The last row of a task has only a note (JSON) of
its findings: the numbers that it has seen, keys without a column, missing columns.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bridge.ingest.columns import BASE, is_variant
from bridge.ingest.files import DayFiles, Target
from bridge.ingest.payloads import Misfit, decoded, text_of
from bridge.ingest.planner import StreamId
from bridge.ingest.schema import NOTE
from bridge.ingest.stored import named, opened, undamaged
from bridge.ingest.topicpattern import TopicPattern
from bridge.ingest.typed import Rules, Typing
from bridge.ingest.worker import Function, attempt, status
from bridge.ranges import Ranges

BATCH_ROWS = 10_000
SAMPLE = 1000  # payloads from which a schema is inferred, at most
SAMPLE_TEXT = 64 << 10  # characters of a payload: the sample is held by the driver
REASONS = 1000  # different ones that a task reports
Fresh = dict[StreamId, Ranges]
REJECTS = pa.schema([*BASE, ("reason", pa.string())])


def pack_fresh(fresh: Fresh) -> bytes:
    """Serialize the numbers per stream, small enough to travel in the closure."""
    return zlib.compress(json.dumps([[*stream, list(ranges)] for stream, ranges in fresh.items()]).encode())


@dataclass(frozen=True, slots=True)
class Input:
    """What the tasks read: each has a part, a list of paths of data files of `table`.

    `fresh` are the packed numbers to take; None takes all. `pattern` is that of `--topic`.
    """

    parts: list[list[str]]
    table: Target
    fresh: bytes | None
    pattern: TopicPattern

    def rows(self, part: int, seen: dict[tuple[str, str, str], Ranges]) -> Iterator[pa.Table]:
        """Yield the rows to take; adds the numbers of these and of other topics to `seen`."""
        fresh = None if self.fresh is None else _unpacked(self.fresh)
        for batch in stored_rows(self.parts[part], self.table, BASE):
            rows = pa.Table.from_batches([batch])
            if fresh is not None:
                rows = _fresh_rows(rows, fresh)
            for stream, first, last, _ in runs(rows):
                seen.setdefault(stream, Ranges()).add(first, last)
            rows = _of_topics(rows, self.pattern)
            if rows.num_rows:
                yield rows.combine_chunks()


def stored_rows(paths: Iterable[str], table: Target, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield these columns of data files, at most one row group at a time: its size is bounded."""
    schema = table.arrow()
    for path in paths:
        store, key = opened(table.location, path)
        content = store.get(key)
        with undamaged(path):
            file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
            names = named(path, file.schema_arrow, schema, columns.names)
            for group in range(file.num_row_groups):
                for rows in file.iter_batches(BATCH_ROWS, [group], names, use_threads=False):
                    arrays = [
                        rows.column(name).cast(field.type) for name, field in zip(names, columns, strict=True)
                    ]
                    yield pa.RecordBatch.from_arrays(arrays, schema=columns)


def sampling(source: Input, form: str) -> Function:
    """Return the function that gives the first payloads of each part as JSON, in the column `text`."""

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        pa.set_cpu_count(1)
        for batch in batches:
            for part in batch.column(0).to_pylist():
                texts: list[str] = []
                for rows in source.rows(part, {}):
                    texts += _texts(rows["payload"].to_pylist(), form)
                    if len(texts) >= SAMPLE:
                        break
                yield pa.record_batch({"text": pa.array(texts[:SAMPLE], pa.string())})

    return run


def reading(source: Input, columns: pa.Schema) -> Function:
    """Return the function that gives these columns of all rows of each part."""

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        pa.set_cpu_count(1)
        for batch in batches:
            for part in batch.column(0).to_pylist():
                yield from stored_rows(source.parts[part], source.table, columns)

    return run


def typing(source: Input, rules: Rules) -> Function:
    """Return the function that gives the typed rows of each part, and the note."""
    schema = typed_schema(source, rules)

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        pa.set_cpu_count(1)
        typed = Typing(rules)
        seen: dict[tuple[str, str, str], Ranges] = {}
        for batch in batches:
            for part in batch.column(0).to_pylist():
                for rows in source.rows(part, seen):
                    for each in rows.to_batches():
                        columns, reasons = typed.columns(each["payload"])
                        arrays = [*each.columns, *columns, pa.array(reasons, pa.string())]
                        arrays.append(pa.nulls(each.num_rows, pa.string()))
                        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        found = typed.found
        note = {
            "seen": [[*stream, list(ranges)] for stream, ranges in seen.items()],
            "extra": [found.extra_rows, found.keys],
            "wider": sorted(found.wider),
        }
        last = [pa.nulls(1, field.type) for field in schema][:-1]
        yield pa.RecordBatch.from_arrays([*last, pa.array([json.dumps(note)])], schema=schema)

    return run


def typed_schema(source: Input, rules: Rules) -> pa.Schema:
    """Return the columns between `typing` and `writing`; VARIANT is JSON text."""
    levels = [(name, pa.string()) for name in source.pattern.names]
    columns = [pa.field(f.name, pa.string() if is_variant(f.type) else f.type) for f in rules.columns()]
    return pa.schema([*BASE, *levels, *columns, ("reason", pa.string()), (NOTE, pa.string())])


def refining(source: Input, rules: Rules, targets: dict[str, Target]) -> Function:
    """Return the function that types and writes the rows of each part."""
    first, then = typing(source, rules), writing(targets)
    return lambda batches: then(first(batches))


def writing(targets: dict[str, Target]) -> Function:
    """Return the function that writes the rows: those with a reason are rejects."""

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        pa.set_cpu_count(1)
        notes: list[Any] = []
        reasons: Counter[str] = Counter()
        with ExitStack() as stack:
            files = {kind: stack.enter_context(DayFiles(target)) for kind, target in targets.items()}
            for batch in batches:
                rows = pa.Table.from_batches([batch])
                if NOTE in rows.column_names:
                    notes += map(json.loads, pc.drop_null(rows[NOTE]).to_pylist())
                    rows = rows.filter(pc.is_null(rows[NOTE])).drop_columns([NOTE])
                for each in pc.value_counts(pc.drop_null(rows["reason"])).to_pylist():
                    if each["values"] in reasons or len(reasons) < REASONS:
                        reasons[each["values"]] += each["counts"]
                rejected = pc.is_valid(rows["reason"])
                for kind, of in (("typed", pc.invert(rejected)), ("rejects", rejected)):
                    chosen = rows.filter(of) if kind in files else rows.slice(0, 0)
                    if chosen.num_rows:
                        files[kind].add(chosen)
        yield status(
            [
                *((kind, asdict(file)) for kind, into in files.items() for file in into.written),
                ("attempt", {"number": attempt()}),
                ("reasons", reasons),
                *(("note", note) for note in notes),
            ]
        )

    return run


def _texts(payloads: Sequence[bytes], form: str) -> list[str]:
    found = []
    for payload in payloads:
        try:
            text = text_of(decoded(payload, form))
        except Misfit:
            continue
        if len(text) <= SAMPLE_TEXT:
            found.append(text)
    return found


def _unpacked(packed: bytes) -> dict[tuple[str, str, str], Ranges]:
    return {
        (gateway, stream, str(epoch)): Ranges(pairs)
        for gateway, stream, epoch, pairs in json.loads(zlib.decompress(packed))
    }


def _fresh_rows(table: pa.Table, fresh: dict[tuple[str, str, str], Ranges]) -> pa.Table:
    """Return the rows whose numbers are not refined yet; runs of contiguous numbers are sliced."""
    slices = []
    for stream, first, last, start in runs(table):
        slices += [
            table.slice(start + low - first, high - low + 1)
            for low, high in fresh.get(stream, Ranges()).common(first, last)
        ]
    return pa.concat_tables(slices) if slices else table.slice(0, 0)


def _of_topics(table: pa.Table, pattern: TopicPattern) -> pa.Table:
    """Return the rows whose topics match, with the columns from topic levels."""
    if pattern == TopicPattern.parse(""):
        return table
    topics = table["topic"].combine_chunks().dictionary_encode()
    found = [pattern.match(topic) for topic in topics.dictionary.to_pylist()]
    rows = pc.take(pa.array([each is not None for each in found], pa.bool_()), topics.indices)
    for at, name in enumerate(pattern.names):
        levels = pa.array([None if each is None else each[at] for each in found], pa.string())
        table = table.append_column(pa.field(name, pa.string()), pc.take(levels, topics.indices))
    return table.filter(rows)


def runs(table: pa.Table) -> Iterator[tuple[tuple[str, str, str], int, int, int]]:
    """Yield the runs of contiguous numbers of one stream: (stream, first, last, index of the first row)."""
    count = table.num_rows
    if not count:
        return
    names = ("gateway", "stream", "epoch")
    breaks = pc.not_equal(pc.subtract(table["sequence_number"][1:], table["sequence_number"][:-1]), 1)
    for name in names:
        breaks = pc.or_(breaks, pc.not_equal(table[name][1:], table[name][:-1]))
    starts = [0, *(index + 1 for index in pc.indices_nonzero(breaks).to_pylist())]
    for start, end in zip(starts, [*starts[1:], count], strict=True):
        stream = tuple(table[name][start].as_py() for name in names)
        first = table["sequence_number"][start].as_py()
        yield stream, first, first + end - start - 1, start
