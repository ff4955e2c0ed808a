"""Compaction: merge the small data files of an Iceberg table.

Each round leaves one file per task and day. `merge` merges small files of a day in tasks, sorted by stream
and number, and replaces them in one commit. `compact` does so with all small files, and a run, after its
rounds, with those that are due (`due`). Other runs may continue at the same time; the one that commits later
checks again. A kill before the commit leaves unused files; after it, nothing is left to do. Nothing is
replaced if the number of rows changes. Three kinds of files are left as they are: those in which another
engine has deleted rows without rewriting them (a merge would bring these rows back), those with a column that
was dropped from the table (a rollback could not restore its values), and those whose partitions are not days.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bridge.ingest.columns import IDENTITY
from bridge.ingest.errors import CommitConflict, IngestError
from bridge.ingest.files import DataFile, DayFiles, Target, labelled, sweep, sweep_on_error
from bridge.ingest.planner import grouped
from bridge.ingest.sinks.base import Compacted, LiveFile, discard
from bridge.ingest.sinks.due import SMALL, bins
from bridge.ingest.store import StorageLocation
from bridge.ingest.stored import footer, names, opened, undamaged
from bridge.ingest.tasks import SparkTasks, Tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bridge.ingest.sinks.iceberg import IcebergSink

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
    done = merge(SparkTasks(spark), sink, list(bins(files)))
    done.left += sum(file.has_deletes or (not file.day and file.size < SMALL) for file in files)
    return done


def merge(tasks: Tasks, sink: IcebergSink, groups: Sequence[Sequence[LiveFile]]) -> Compacted:
    """Replace each group of files by one or more, sorted, in one commit. Raises CommitConflict."""
    parts = [[file.path for file in group] for group in groups]
    if not parts:
        return Compacted()
    target = labelled(sink.layout(IDENTITY))
    with sweep_on_error(target):
        rows = tasks.each("compact", len(parts), lambda part: _merge(parts[part], target))
    old, written = set(rows["old"]), [DataFile(**body) for body in rows["file"]]
    removed = [file for group in groups for file in group if file.path in old]
    done = Compacted(len(removed), len(written), sum(file.rows for file in written), len(rows["left"]))
    if done.rows != sum(file.rows for file in removed):
        sweep(target)
        raise IngestError(
            f"{sink.name}: {done.rows} rows were written for {sum(file.rows for file in removed)}, so "
            "nothing was replaced; please report this"
        )
    if removed:
        try:
            sink.replace(removed, written)
        except CommitConflict:
            discard(sink, written)
            raise
    return done


def _merge(paths: list[str], target: Target) -> Iterator[tuple[str, Any]]:
    """Merge files. Yields the status rows `file` (written), `old` (replaced) and `left` (unchanged)."""
    schema = target.arrow()
    suitable: list[_File] = []
    for path in paths:
        file = _inspect(target.location, path, schema)
        if file is None:
            yield "left", path
        else:
            suitable.append(file)
    for group in grouped(suitable, lambda file: file.unpacked, UNPACKED):
        if len(group) == 1:
            continue
        yield from (("file", asdict(written)) for written in _merged(group, target, schema))
        yield from (("old", file.path) for file in group)


def _inspect(location: StorageLocation, path: str, schema: pa.Schema) -> _File | None:
    """Read the footer of a file; None if the table lacks one of the file's columns."""
    with undamaged(path):
        found = footer(*opened(location, path))
    columns = found.schema.to_arrow_schema()
    known = names(columns, schema)
    if len(known) < len(columns):
        return None
    encoded = sum(found.row_group(index).total_byte_size for index in range(found.num_row_groups))
    # numbers and offsets take 8 bytes in memory, however short they are in the file
    return _File(path, encoded + 8 * found.num_rows * len(columns), known, _repeating(found, columns, known))


def _repeating(found: pq.FileMetaData, columns: pa.Schema, known: dict[str, str]) -> frozenset[str]:
    text = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
    groups = (found.row_group(index) for index in range(found.num_row_groups))
    chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
    once = {chunk.path_in_schema for chunk in chunks if chunk.has_dictionary_page}
    return frozenset(
        known[field.name]
        for field in columns
        if field.name in once and any(is_a(field.type) for is_a in text)
    )


def _merged(group: list[_File], target: Target, schema: pa.Schema) -> list[DataFile]:
    """Write the rows of some files into new ones, sorted."""
    repeating = frozenset().union(*(file.repeating for file in group))
    tables = [_read(target.location, file, repeating, schema) for file in group]
    # older files have fewer columns
    table = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries().combine_chunks()
    del tables
    keys = pa.table({name: table[name].cast(schema.field(name).type) for name in ORDER})
    order = pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in ORDER])
    del keys
    with DayFiles(target) as files:
        for start in range(0, table.num_rows, SLICE_ROWS):
            files.add(table.take(order.slice(start, SLICE_ROWS)))
    return files.written


def _read(location: StorageLocation, file: _File, repeating: frozenset[str], schema: pa.Schema) -> pa.Table:
    """Read a file under the table's column names; `repeating` columns stay dictionary-encoded."""
    once = [name for name, known in file.names.items() if known in repeating]
    store, key = opened(location, file.path)
    source = pa.BufferReader(store.get(key))
    with undamaged(file.path):
        table = pq.read_table(
            source, use_threads=False, read_dictionary=once, page_checksum_verification=True
        )
    columns = {}
    for name, known in file.names.items():
        column = table[name]
        if known in repeating:
            column = column.cast(pa.dictionary(pa.int32(), schema.field(known).type))
        columns[known] = column
    return pa.table(columns)
