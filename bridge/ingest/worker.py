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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bridge.ingest.errors import BadObject, Unreadable, Vanished
from bridge.ingest.planner import Work
from bridge.ingest.store import StorageLocation, read, shared
from bridge.objectkeys import parse_key

if TYPE_CHECKING:
    import pyarrow as pa

STATUS = "kind string, body string"
AHEAD = 2  # objects fetched while one is decoded
# The largest object that the s3 exporter writes: 256 MiB of payloads and topics (the maximum of
# `sizeHintBytes`; gzip undoes the growth by base64), the rest of 100,000 lines (two names of at most 255
# characters, epoch, number, time and keys), and 2 % that gzip adds to what it cannot compress. A larger one
# is refused unread: three objects are in memory at once.
MAX_OBJECT = (256 * 1024 * 1024 + 100_000 * 700) * 102 // 100


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how to write the data files of a table. It travels to the executors."""

    location: StorageLocation
    folder: str
    schema: bytes  # serialized Arrow schema, which every version of pyarrow can read
    extras: tuple[str, ...]  # columns of the table in addition to the required ones
    label: str = ""  # prefix of the file names, by which the leftovers of a round are found


def pack(work: Sequence[Work]) -> bytes:
    """Serialize the work of one task, small enough to travel in the closure: keys compress well."""
    rows = [(one.item.key, one.item.etag, one.item.size, one.fresh) for one in work]
    return zlib.compress(json.dumps(rows).encode())


def task(
    parts: list[bytes], source: StorageLocation, target: Target, *, isolated: bool = False
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Return the function for `spark.range(len(parts)).mapInArrow`: each id is one part.

    With `isolated`, the first attempt too reads objects in child processes.
    """

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        from bridge.ingest.isolated import one_by_one

        pa.set_cpu_count(1)  # Spark has a task per core already
        number = attempt()
        take = one_by_one if isolated or number else process
        for batch in batches:
            for part in batch.column(0).to_pylist():
                rows = list(take(json.loads(zlib.decompress(parts[part])), source, target))
                rows.append(("attempt", {"number": number}))
                yield pa.record_batch(
                    {"kind": [kind for kind, _ in rows], "body": [json.dumps(body) for _, body in rows]},
                    schema=pa.schema([("kind", pa.string()), ("body", pa.string())]),
                )

    return run


def attempt() -> int:
    """Return how many attempts of this task were made before."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.attemptNumber() if context else 0


def process(work: list[Any], source: StorageLocation, target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read, check and write the objects of one task."""
    import pyarrow as pa

    from bridge.ingest.files import DayFiles

    schema = pa.ipc.read_schema(pa.py_buffer(target.schema))
    with DayFiles(target.location, schema, target.folder, target.label) as files:
        for key, etag, fresh, fetched in _fetch(work, source):
            yield (
                "object",
                {"key": key, "etag": etag, **_take(key, fresh, fetched, files, schema, target.extras)},
            )
    for file in files.written:
        yield "file", asdict(file)


def _fetch(
    work: list[Any], source: StorageLocation
) -> Iterator[tuple[str, str, list[list[int]], Future[bytes]]]:
    """Yield the objects in order, while the next ones are being fetched."""
    store = shared(source)
    with ThreadPoolExecutor(AHEAD) as pool:
        coming: list[Future[bytes]] = []
        for index, (key, etag, _, fresh) in enumerate(work):
            while len(coming) <= AHEAD and index + len(coming) < len(work):
                ahead, _, size, _ = work[index + len(coming)]
                coming.append(pool.submit(read, store, ahead, size, MAX_OBJECT))
            yield key, etag, fresh, coming.pop(0)


def _take(
    key: str,
    fresh: list[list[int]],
    fetched: Future[bytes],
    files: Any,
    schema: pa.Schema,
    extras: tuple[str, ...],
) -> dict[str, Any]:
    import pyarrow as pa

    from bridge.ingest.decode import NewColumns, decode

    name = parse_key(key)
    assert name is not None, key  # the planner plans no other key
    try:
        table = decode(fetched.result(), name, {extra: schema.field(extra).type for extra in extras})
    except BadObject as error:
        return {"status": "bad", "reason": str(error)}
    except Vanished as error:
        return {"status": "gone", "reason": str(error)}
    except Unreadable as error:
        return {"status": "unreadable", "reason": str(error)}
    except NewColumns as new:
        found = pa.schema(list(new.columns.items()))
        return {"status": "columns", "columns": base64.b64encode(found.serialize()).decode()}
    if not fresh:
        return {"status": "good"}
    pieces = []
    for first, last in fresh:
        part = table.slice(first - name.first, last - first + 1)
        part = part.append_column("object_key", pa.repeat(pa.scalar(key), part.num_rows))
        files.add(part)
        times = part["ingest_time"].cast(pa.int64())
        pieces.append([first, last, times[0].as_py() // 1000, times[-1].as_py() // 1000])
    return {"status": "taken", "pieces": pieces, "rows": name.last - name.first + 1}
