"""The tasks that run in the Python workers of the executors.

A task gets the keys of its objects and returns status rows (`STATUS`). Messages go from S3 through Arrow into
data files, and never reach the JVM or the driver. The kinds of rows, each with a JSON body:

* object: {key, etag, status, reason, rows, pieces}. The status is taken, good (only checked), bad, gone,
  unreadable, or columns (good, but the table needs the columns of `columns` first).
* file:   a `DataFile` that the task has written.
* attempt: {number}, 0 for the first. An earlier attempt may have left files.

An object that breaks the promise of its key gives a row, never an exception, so that it does not stop the
others. The same holds for one that S3 does not return (archived, no right to it or to its encryption key), or
that this process cannot unpack. That may change while the object stays the same, so it is `unreadable`, and
the next run tries it again. Failures that concern no single object (network, throttling, credentials) are
raised, and Spark retries the task. If an object kills its worker, the next attempt reads objects one by one
in child processes (`isolated`).
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bridge.ingest.decode import Extras, NewColumns, decode
from bridge.ingest.errors import BadObject, Unreadable, Vanished
from bridge.ingest.files import DayFiles, Target
from bridge.ingest.numbers import Numbered
from bridge.ingest.planner import Work
from bridge.ingest.session import watched
from bridge.ingest.store import StorageLocation, ahead, read, shared
from bridge.objectkeys import parse_key

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STATUS = "kind string, body string"
Rows = Iterable[tuple[str, Any]]
Function = Callable[[Iterable[Any]], Iterator[Any]]
AHEAD = 2  # objects fetched while one is decoded
# The largest object that the s3 exporter writes: 256 MiB of payloads and topics (the maximum of
# `sizeHintBytes`; gzip undoes the growth by base64), the rest of 100,000 lines (two names of at most 255
# characters, epoch, number, time and keys), and 2 % that gzip adds to what it cannot compress. A larger one
# is refused unread: three objects are in memory at once.
MAX_OBJECT = (256 * 1024 * 1024 + 100_000 * 700) * 102 // 100


def status(rows: Rows) -> pa.RecordBatch:
    """Return status rows as Spark takes them."""
    pairs = [(kind, json.dumps(body)) for kind, body in rows]
    columns = {"kind": [kind for kind, _ in pairs], "body": [body for _, body in pairs]}
    return pa.record_batch(columns, pa.schema([("kind", pa.string()), ("body", pa.string())]))


def collected(spark: SparkSession, what: str, frame: DataFrame, function: Function) -> dict[str, list[Any]]:
    """Run the function over the frame and return the bodies of its status rows by kind; `what` names it."""
    bodies: dict[str, list[Any]] = defaultdict(list)
    for row in watched(spark, what, frame.mapInArrow(function, STATUS).collect):
        bodies[row.kind].append(json.loads(row.body))
    return bodies


def numbered(spark: SparkSession, parts: Sequence[Any]) -> DataFrame:
    """Return a frame with the index of each part, every one in a task of its own."""
    return spark.range(0, len(parts), 1, len(parts))


def each_part(work: Callable[[int], Rows]) -> Function:
    """Return the function for `mapInArrow` that gives the status rows of `work` for each number."""

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        pa.set_cpu_count(1)  # Spark has a task per core already
        for batch in batches:
            for part in batch.column(0).to_pylist():
                yield status(work(part))

    return run


def pack(work: Sequence[Work]) -> bytes:
    """Serialize the work of one task, small enough to travel in the closure: keys compress well."""
    rows = [(one.item.key, one.item.etag, one.item.size, one.fresh) for one in work]
    return zlib.compress(json.dumps(rows).encode())


def unpack(part: bytes) -> list[Any]:
    """Return what `process` takes, from what `pack` has returned."""
    work: list[Any] = json.loads(zlib.decompress(part))
    return work


def task(
    parts: Sequence[bytes], source: StorageLocation, target: Target, *, isolated: bool = False
) -> Function:
    """Return the function that takes the objects of each part.

    With `isolated`, the first attempt too reads objects in child processes.
    """

    def work(part: int) -> Rows:
        from bridge.ingest.isolated import one_by_one

        take = one_by_one if isolated or attempt() else process
        yield from take(unpack(parts[part]), source, target)
        yield "attempt", {"number": attempt()}

    return each_part(work)


def attempt() -> int:
    """Return how many attempts of this task were made before."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.attemptNumber() if context else 0


def process(work: list[Any], source: StorageLocation, target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read, check and write the objects of one task."""
    with DayFiles(target) as files:
        extras = {name: files.schema.field(name).type for name in target.extras}
        store = shared(source)
        fetches = [partial(read, store, key, size, MAX_OBJECT) for key, _, size, _ in work]
        coming = ahead(fetches, min(AHEAD, store.ahead))
        for (key, etag, _, fresh), fetched in zip(work, coming, strict=True):
            yield "object", {"key": key, "etag": etag, **_take(key, fresh, fetched, files, extras)}
    for file in files.written:
        yield "file", asdict(file)


def _take(
    key: str, fresh: list[list[int]], fetched: Callable[[], bytes], files: DayFiles, extras: Extras
) -> dict[str, Any]:
    name = parse_key(key)
    assert name is not None, key  # the planner plans no other key
    try:
        table = decode(fetched(), name, extras)
    except BadObject as error:
        return {"status": "bad", "reason": str(error)}
    except Vanished as error:
        return {"status": "gone", "reason": str(error)}
    except Unreadable as error:
        return {"status": "unreadable", "reason": str(error)}
    except NewColumns as new:
        if taken := sorted(files.target.reserved & new.columns.keys()):
            reason = f"column {taken[0]!r} cannot be added to the table: one of its partitions has this name"
            return {"status": "bad", "reason": reason}
        found = pa.schema(list(new.columns.items()))
        return {"status": "columns", "columns": base64.b64encode(found.serialize()).decode()}
    if not fresh:
        return {"status": "good"}
    rows, pieces = Numbered(table, table["sequence_number"]), []
    times = table["ingest_time"].cast(pa.int64())
    for first, last in fresh:
        part = rows.part(first, last)
        if part.num_rows:
            files.add(part.append_column("object_key", pa.repeat(pa.scalar(key), part.num_rows)))
        low, high = (times[at].as_py() // 1000 for at in rows.nearest(first, last))
        pieces.append([first, last, low, high, rows.left_out(first, last)])
    return {"status": "taken", "pieces": pieces, "rows": table.num_rows}
