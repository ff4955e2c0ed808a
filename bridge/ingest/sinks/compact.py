"""Small data files of an Iceberg table into large ones.

Rounds leave a file for each task and day. `compact` puts the small files of a day together, sorted by
stream and number, in Spark tasks; one commit replaces them. It may run beside an ingest run: whichever
commits later looks again. Rows are counted before and after, and a difference stops it. Files are left alone
in which another engine has marked rows as deleted (in a file put together these would be back), or that
hold a column which the table has no more (its values would be gone when the table is rolled back), or whose
partitions are not days.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from bridge.ingest.columns import IDENTITY
from bridge.ingest.errors import IngestError
from bridge.ingest.files import DataFile
from bridge.ingest.session import watched
from bridge.ingest.sinks.base import Compacted, LiveFile, labelled, swept
from bridge.ingest.worker import STATUS, Target

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.sql import SparkSession

    from bridge.ingest.sinks.iceberg import IcebergSink
    from bridge.ingest.store import Store

T = TypeVar("T")
FILE_BYTES = 64 << 20
SMALL = FILE_BYTES // 2
UNPACKED = 256 << 20  # of the files that are sorted in memory at once: these bytes may be packed into few
SLICE_ROWS = 2000  # written at once: only there repeated values are as many as rows
ORDER = ("gateway", "stream", "epoch", "sequence_number")


@dataclass(frozen=True, slots=True)
class _Found:
    """A file as its footer describes it."""

    path: str
    unpacked: int  # bytes that it takes in memory
    names: dict[str, str]  # what the table calls its columns
    repeating: frozenset[str]  # the table's names of columns of text whose values it has only once


def compact(spark: SparkSession, sink: IcebergSink) -> Compacted:
    """Replace the small files of each day by large ones, in one commit."""
    files = sink.files()
    apart = [file for file in files if file.marked or (not file.day and file.size < SMALL)]
    bins = list(_bins([file for file in files if file.day and not file.marked]))
    parts = [[file.path for file in group] for group in bins]
    rows: list[Any] = []
    if parts:
        frame = spark.range(0, len(parts), 1, len(parts))
        target = labelled(sink.layout(IDENTITY))
        work: Any = frame.mapInArrow(_task(parts, target), STATUS)
        with swept(target):
            rows = watched(spark, "compact", work.collect)
    bodies = {
        kind: [json.loads(row.body) for row in rows if row.kind == kind] for kind in ("file", "old", "left")
    }
    old, written = set(bodies["old"]), [DataFile(**body) for body in bodies["file"]]
    removed = [file for file in files if file.path in old]
    left = len(apart) + len(bodies["left"])
    done = Compacted(len(removed), len(written), sum(file.rows for file in written), left)
    if done.rows != sum(file.rows for file in removed):
        raise IngestError(f"{sink.name}: {done.rows} rows were written for {sum(f.rows for f in removed)}")
    if removed:
        sink.replace(removed, written)
    return done


def _bins(files: Sequence[LiveFile]) -> Iterator[list[LiveFile]]:
    """Small files of one day, up to the size of a large one; a file alone stays as it is."""
    days: dict[str, list[LiveFile]] = {}
    for file in files:
        if file.size < SMALL:
            days.setdefault(file.day, []).append(file)
    for small in days.values():
        yield from _filled(small, lambda file: file.size, FILE_BYTES)


def _filled(files: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Groups of at most so many bytes, of two files at least."""
    group: list[T] = []
    filled = 0
    for file in files:
        if group and filled + size(file) > limit:
            if len(group) > 1:
                yield group
            group, filled = [], 0
        group.append(file)
        filled += size(file)
    if len(group) > 1:
        yield group


def _task(parts: list[list[str]], target: Target) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def run(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        pa.set_cpu_count(1)
        for batch in batches:
            for part in batch.column(0).to_pylist():
                rows = list(_work(parts[part], target))
                yield pa.record_batch(
                    {"kind": [kind for kind, _ in rows], "body": [json.dumps(body) for _, body in rows]},
                    schema=pa.schema([("kind", pa.string()), ("body", pa.string())]),
                )

    return run


def _work(paths: list[str], target: Target) -> Iterator[tuple[str, Any]]:
    """Put files together: rows of the kinds file (written), old (replaced by these) and left (alone)."""
    import pyarrow as pa

    from bridge.ingest.store import shared

    schema = pa.ipc.read_schema(pa.py_buffer(target.schema))
    store = shared(target.place)
    fitting: list[_Found] = []
    for path in paths:
        found = _look(store, path, schema)
        if found is None:
            yield "left", path
        else:
            fitting.append(found)
    for group in _filled(fitting, lambda file: file.unpacked, UNPACKED):
        yield from (("file", asdict(file)) for file in _joined(store, group, target, schema))
        yield from (("old", file.path) for file in group)


def _look(store: Store, path: str, schema: pa.Schema) -> _Found | None:
    """What the footer of a file says; None if the table lacks one of its columns."""
    from bridge.ingest.stored import footer, names

    found = footer(store, path)
    columns = found.schema.to_arrow_schema()
    known = names(columns, schema)
    if len(known) < len(columns):
        return None
    encoded = sum(found.row_group(index).total_byte_size for index in range(found.num_row_groups))
    # numbers and the places of values are 8 bytes in memory, however short they are in the file
    return _Found(path, encoded + 8 * found.num_rows * len(columns), known, _repeating(found, columns, known))


def _repeating(found: pq.FileMetaData, columns: pa.Schema, known: dict[str, str]) -> frozenset[str]:
    import pyarrow as pa

    text = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
    groups = (found.row_group(index) for index in range(found.num_row_groups))
    chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
    once = {chunk.path_in_schema for chunk in chunks if chunk.has_dictionary_page}
    return frozenset(
        known[field.name]
        for field in columns
        if field.name in once and any(is_a(field.type) for is_a in text)
    )


def _joined(store: Store, group: list[_Found], target: Target, schema: pa.Schema) -> list[DataFile]:
    """Write the rows of some files into new ones, in order."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from bridge.ingest.files import DayFiles

    repeating = frozenset().union(*(file.repeating for file in group))
    tables = [_read(store, file, repeating, schema) for file in group]
    # older files have fewer columns
    table = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries().combine_chunks()
    del tables
    keys = pa.table({name: table[name].cast(schema.field(name).type) for name in ORDER})
    order = pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in ORDER])
    del keys
    with DayFiles(target.place, schema, target.folder, target.label) as files:
        for start in range(0, table.num_rows, SLICE_ROWS):
            files.add(table.take(order.slice(start, SLICE_ROWS)))
    return files.written


def _read(store: Store, file: _Found, repeating: frozenset[str], schema: pa.Schema) -> pa.Table:
    """A file with the table's names for its columns; values that it has only once stay so in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    once = [name for name, known in file.names.items() if known in repeating]
    source = pa.BufferReader(store.get(file.path))
    table = pq.read_table(source, use_threads=False, read_dictionary=once)
    columns = {}
    for name, known in file.names.items():
        column = table[name]
        if known in repeating:
            column = column.cast(pa.dictionary(pa.int32(), schema.field(known).type))
        columns[known] = column
    return pa.table(columns)
