"""Compaction: merge the small data files of an Iceberg table.

Each round leaves one file per task and day. `compact` merges the small files of a day in Spark tasks, sorted
by stream and number, and replaces them in one commit. It may run beside an ingest run: whichever commits
later checks again. It stops if the number of rows changes. Three kinds of files are left as they are: those
in which another engine has deleted rows without rewriting them (a merge would bring these rows back), those
with a column that was dropped from the table (a rollback could not restore its values), and those whose
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
from bridge.ingest.sinks.base import Compacted, LiveFile, labelled, sweep_on_error
from bridge.ingest.worker import STATUS, Target

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.sql import SparkSession

    from bridge.ingest.sinks.iceberg import IcebergSink
    from bridge.ingest.store import ObjectStore

T = TypeVar("T")
FILE_BYTES = 64 << 20
SMALL = FILE_BYTES // 2
UNPACKED = 256 << 20  # bytes in memory of the files that are sorted together, however small they are on disk
SLICE_ROWS = 2000  # rows written at once: only these are expanded from their dictionaries
ORDER = ("gateway", "stream", "epoch", "sequence_number")


@dataclass(frozen=True, slots=True)
class _File:
    """A data file as its footer describes it."""

    path: str
    unpacked: int  # bytes in memory
    names: dict[str, str]  # its columns, and the table's names for them
    repeating: frozenset[str]  # the table's names of its dictionary-encoded text and binary columns


def compact(spark: SparkSession, sink: IcebergSink) -> Compacted:
    """Replace the small files of each day by large ones, in one commit.

    Raises CommitConflict if another run or engine replaced one of the files or deleted rows in it.
    """
    files = sink.files()
    unsuitable = [file for file in files if file.has_deletes or (not file.day and file.size < SMALL)]
    bins = list(_bins([file for file in files if file.day and not file.has_deletes]))
    parts = [[file.path for file in group] for group in bins]
    rows: list[Any] = []
    if parts:
        frame = spark.range(0, len(parts), 1, len(parts))
        target = labelled(sink.layout(IDENTITY))
        work: Any = frame.mapInArrow(_task(parts, target), STATUS)
        with sweep_on_error(target):
            rows = watched(spark, "compact", work.collect)
    bodies = {
        kind: [json.loads(row.body) for row in rows if row.kind == kind] for kind in ("file", "old", "left")
    }
    old, written = set(bodies["old"]), [DataFile(**body) for body in bodies["file"]]
    removed = [file for file in files if file.path in old]
    left = len(unsuitable) + len(bodies["left"])
    done = Compacted(len(removed), len(written), sum(file.rows for file in written), left)
    if done.rows != sum(file.rows for file in removed):
        raise IngestError(
            f"{sink.name}: {done.rows} rows were written for {sum(file.rows for file in removed)}, so "
            "nothing was replaced; please report this"
        )
    if removed:
        sink.replace(removed, written)
    return done


def _bins(files: Sequence[LiveFile]) -> Iterator[list[LiveFile]]:
    """Group the small files of each day, up to the size of a large file. A single file stays as it is."""
    days: dict[str, list[LiveFile]] = {}
    for file in files:
        if file.size < SMALL:
            days.setdefault(file.day, []).append(file)
    for small in days.values():
        yield from _filled(small, lambda file: file.size, FILE_BYTES)


def _filled(files: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Group files up to so many bytes; groups of one file are left out."""
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
    """Merge files. Yields the status rows `file` (written), `old` (replaced) and `left` (unchanged)."""
    import pyarrow as pa

    from bridge.ingest.store import shared

    schema = pa.ipc.read_schema(pa.py_buffer(target.schema))
    store = shared(target.location)
    suitable: list[_File] = []
    for path in paths:
        file = _inspect(store, path, schema)
        if file is None:
            yield "left", path
        else:
            suitable.append(file)
    for group in _filled(suitable, lambda file: file.unpacked, UNPACKED):
        yield from (("file", asdict(written)) for written in _merged(store, group, target, schema))
        yield from (("old", file.path) for file in group)


def _inspect(store: ObjectStore, path: str, schema: pa.Schema) -> _File | None:
    """Read the footer of a file; None if the table lacks one of the file's columns."""
    from bridge.ingest.stored import footer, names

    found = footer(store, path)
    columns = found.schema.to_arrow_schema()
    known = names(columns, schema)
    if len(known) < len(columns):
        return None
    encoded = sum(found.row_group(index).total_byte_size for index in range(found.num_row_groups))
    # numbers and offsets take 8 bytes in memory, however short they are in the file
    return _File(path, encoded + 8 * found.num_rows * len(columns), known, _repeating(found, columns, known))


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


def _merged(store: ObjectStore, group: list[_File], target: Target, schema: pa.Schema) -> list[DataFile]:
    """Write the rows of some files into new ones, sorted."""
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
    with DayFiles(target.location, schema, target.folder, target.label) as files:
        for start in range(0, table.num_rows, SLICE_ROWS):
            files.add(table.take(order.slice(start, SLICE_ROWS)))
    return files.written


def _read(store: ObjectStore, file: _File, repeating: frozenset[str], schema: pa.Schema) -> pa.Table:
    """Read a file under the table's column names; `repeating` columns stay dictionary-encoded."""
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
