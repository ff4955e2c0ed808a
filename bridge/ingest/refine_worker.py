"""The Python workers of a refine round, before and after Spark types the payloads.

    reading: data files of the table -> rows that are not refined yet, with the payload as JSON text
    writing: typed rows -> data files of the typed table and of its rejects, and status rows

Both, and Spark's own expressions between them, are one stage: no shuffle, nothing on the driver.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bridge.ingest.files import DayFiles, Target
from bridge.ingest.payloads import KEYS, texts
from bridge.ingest.planner import StreamId
from bridge.ingest.ranges import Ranges
from bridge.ingest.store import shared
from bridge.ingest.stored import named, undamaged
from bridge.ingest.worker import Function, attempt, status

ROWS = (
    "gateway string, stream string, epoch string, sequence_number bigint, ingest_time timestamp, topic string"
)
READ = f"{ROWS}, payload binary, text string"
BATCH_ROWS = 10_000
Fresh = dict[StreamId, Ranges]


def pack_fresh(fresh: Fresh) -> bytes:
    """Serialize the numbers per stream, small enough to travel in the closure."""
    return zlib.compress(json.dumps([[*stream, list(ranges)] for stream, ranges in fresh.items()]).encode())


def reading(parts: list[list[str]], messages: Target, packed: bytes, form: str) -> Function:
    """Return the function for `spark.range(len(parts)).mapInArrow`: each id is one part, a list of paths."""

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        wanted, schema = [*KEYS, "payload"], messages.arrow()
        pa.set_cpu_count(1)
        fresh = {
            (gateway, stream, str(epoch)): Ranges(pairs)
            for gateway, stream, epoch, pairs in json.loads(zlib.decompress(packed))
        }
        store = shared(messages.location)
        for batch in batches:
            for part in batch.column(0).to_pylist():
                for path in parts[part]:
                    content = store.get(path)
                    with undamaged(path):
                        file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
                        columns = named(path, file.schema_arrow, schema, wanted)
                        for rows in file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
                            batch_of = pa.RecordBatch.from_arrays(
                                [rows.column(name) for name in columns], wanted
                            )
                            kept = _fresh_rows(batch_of, fresh)
                            if kept.num_rows:
                                text = pa.array(texts(kept["payload"].to_pylist(), form), pa.string())
                                yield from kept.append_column("text", text).combine_chunks().to_batches()

    return run


def _fresh_rows(batch: pa.RecordBatch, fresh: dict[tuple[str, str, str], Ranges]) -> pa.Table:
    """Return the rows whose numbers are not refined yet; runs of contiguous numbers are sliced."""
    table = pa.Table.from_batches([batch])
    slices = []
    for stream, first, last, start in runs(table):
        slices += [
            table.slice(start + low - first, high - low + 1)
            for low, high in fresh.get(stream, Ranges()).common(first, last)
        ]
    return pa.concat_tables(slices) if slices else table.slice(0, 0)


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


def writing(targets: dict[str, Target]) -> Function:
    """Return the function for `mapInArrow` over typed rows; the column `fits` selects the table."""

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        pa.set_cpu_count(1)
        seen: dict[tuple[str, str, str], Ranges] = {}
        with ExitStack() as stack:
            files = {kind: stack.enter_context(DayFiles(target)) for kind, target in targets.items()}
            for batch in batches:
                table = pa.Table.from_batches([batch])
                for stream, first, last, _ in runs(table):
                    seen.setdefault(stream, Ranges()).add(first, last)
                fits = table["fits"]
                for kind, rows in (("typed", table.filter(fits)), ("rejects", table.filter(pc.invert(fits)))):
                    if kind in files and rows.num_rows:
                        files[kind].add(rows)
        yield status(
            [
                *((kind, asdict(file)) for kind, into in files.items() for file in into.written),
                ("attempt", {"number": attempt()}),
                *(("seen", [*stream, list(ranges)]) for stream, ranges in seen.items()),
            ]
        )

    return run
