"""Small data files of an Iceberg table into large ones.

Rounds leave a file for each task and day. `compact` puts the small files of a day together, sorted by
stream and number, in Spark tasks; one commit replaces them. It may run beside an ingest run: whichever
commits later looks again. Rows are counted before and after, and a difference stops it. Files in which
another engine has marked rows as deleted are left alone: in a file put together these would be back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bridge.ingest.errors import IngestError
from bridge.ingest.files import DataFile
from bridge.ingest.session import watched
from bridge.ingest.sinks.base import Compacted, LiveFile
from bridge.ingest.worker import STATUS, Target

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bridge.ingest.sinks.iceberg import IcebergSink

FILE_BYTES = 64 << 20  # a task sorts as much in memory, unpacked
SMALL = FILE_BYTES // 2


def compact(spark: SparkSession, sink: IcebergSink) -> Compacted:
    """Replace the small files of each day by large ones, in one commit."""
    files = sink.files()
    left = sum(file.marked for file in files)
    bins = list(_bins([file for file in files if not file.marked]))
    removed = [file for group in bins for file in group]
    if not removed:
        return Compacted(left=left)
    parts = [[file.path for file in group] for group in bins]
    frame = spark.range(0, len(parts), 1, len(parts))
    work: Any = frame.mapInArrow(_task(parts, sink.target()), STATUS)
    rows = watched(spark, "compact", work.collect)
    written = [DataFile(**json.loads(row.body)) for row in rows]
    done = Compacted(len(removed), len(written), sum(file.rows for file in written), left)
    if done.rows != sum(file.rows for file in removed):
        raise IngestError(f"{sink.name}: {done.rows} rows were written for {sum(f.rows for f in removed)}")
    sink.replace(removed, written)
    return done


def _bins(files: Sequence[LiveFile]) -> Iterator[list[LiveFile]]:
    """Small files of one day, up to the size of a large one; a file alone stays as it is."""
    days: dict[str, list[LiveFile]] = {}
    for file in files:
        if file.size < SMALL:
            days.setdefault(file.day, []).append(file)
    for small in days.values():
        group: list[LiveFile] = []
        for file in small:
            if group and sum(known.size for known in group) + file.size > FILE_BYTES:
                if len(group) > 1:
                    yield group
                group = []
            group.append(file)
        if len(group) > 1:
            yield group


def _task(parts: list[list[str]], target: Target) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def run(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from bridge.ingest.files import DayFiles
        from bridge.ingest.store import shared

        pa.set_cpu_count(1)
        schema = pa.ipc.read_schema(pa.py_buffer(target.schema))
        store = shared(target.place)
        for batch in batches:
            for part in batch.column(0).to_pylist():
                tables = [
                    pq.read_table(pa.BufferReader(store.get(path)), use_threads=False) for path in parts[part]
                ]
                table = pa.concat_tables(
                    tables, promote_options="permissive"
                )  # older files have fewer columns
                del tables
                order = [(name, "ascending") for name in ("gateway", "stream", "epoch", "sequence_number")]
                with DayFiles(target.place, schema, target.folder) as files:
                    files.add(table.sort_by(order))
                bodies = [json.dumps(asdict(file)) for file in files.written]
                yield pa.record_batch({"kind": ["file"] * len(bodies), "body": bodies})

    return run
