"""The exported objects as a stream: `spark.readStream.format("streambridge").load("s3://bucket/prefix")`.

Every message comes once, whatever is killed, if the sink of the query is exactly-once too. The checkpoint of
the query is all the state there is; see `offsets`. The driver lists the objects at each trigger, and starts a
batch only if there is something new. A task reads the objects of its part of the batch.

A bad object stops the query and names its key; once it is uploaded again, the query continues. With the
option `quarantine`, a folder to which driver and tasks can write, the query skips the object, writes a record
with the reason there, and takes the object once it is uploaded again. An object that kills its worker stops
the query in any case; `streambridge ingest` can handle that.

Spark 4.2 and newer hand the last offset and a limit to the source, and know available-now for it. Spark 4.0
and 4.1 do neither, so the option `checkpoint` has to name the checkpoint location of the query: the source
reads its last offset there. With their available-now trigger a query takes one batch, at most.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from bridge.ingest.deletes import delete
from bridge.ingest.errors import BadObject, BadOption, IngestError, Unreadable, Vanished
from bridge.ingest.messages import BATCH_ROWS, decoded, wanted_columns
from bridge.ingest.offsets import BAD, GONE, UNREADABLE, Planned, Position, record_name
from bridge.ingest.planner import Inventory, RoundLimits, grouped
from bridge.ingest.store import ObjectStore, StorageLocation, ahead, read, shared
from bridge.ingest.worker import MAX_OBJECT
from bridge.objectkeys import parse_key

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxFiles, SupportsTriggerAvailableNow

    GIVES_START = True
except ImportError:  # before Spark 4.2
    GIVES_START = False
    SupportsTriggerAvailableNow = object  # type: ignore[assignment,misc]

PART_BYTES = 16 << 20  # of objects in one task
PART_OBJECTS = 64  # in one task: each small one costs a round trip
LIMITS = RoundLimits(objects=1000, bytes=1 << 30)  # of a batch; its plan is in the offset, 40 bytes an object


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options of a stream, checked."""

    location: StorageLocation
    quarantine: StorageLocation | None = None
    checkpoint: StorageLocation | None = None
    limits: RoundLimits = LIMITS

    @property
    def source(self) -> str:
        """The name of the source in offsets: its URL, however it is written."""
        parsed = urlparse(self.location.url)
        if self.location.is_s3:
            return f"s3://{parsed.netloc}{parsed.path.rstrip('/')}"
        return str(Path(unquote(parsed.path) if parsed.scheme else self.location.url).absolute())

    @classmethod
    def of(cls, location: StorageLocation, options: Mapping[str, str]) -> StreamOptions:
        """Read the options, in lower case; raises BadOption."""
        quarantine, checkpoint = options.get("quarantine"), options.get("checkpoint")
        if options.get("badobjects", "fail") != "fail":
            raise BadOption(
                "streambridge: badObjects is for batch queries; a stream passes over bad objects with the "
                "option quarantine, a folder for its records of them"
            )
        if checkpoint is None and not GIVES_START:
            raise BadOption(
                "streambridge: the option checkpoint is missing: on Spark before 4.2 it must be the "
                "checkpointLocation of the query"
            )
        return cls(
            location,
            StorageLocation(quarantine, location.endpoint) if quarantine else None,
            StorageLocation(checkpoint, location.endpoint) if checkpoint else None,
            RoundLimits(
                _positive(options, "maxObjectsPerTrigger", LIMITS.objects),
                _positive(options, "maxBytesPerTrigger", LIMITS.bytes),
            ),
        )


def _positive(options: Mapping[str, str], name: str, default: int) -> int:
    given = options.get(name.lower(), str(default))
    if not given.isascii() or not given.isdecimal() or not int(given):
        raise BadOption(f"streambridge: {name} is {given!r}; use a whole number from 1 on")
    return int(given)


@dataclass
class StreamPart(InputPartition):
    """The objects of one task; `records` is the folder of its query in the quarantine folder."""

    records: str
    batch: int
    work: list[Planned]


class ObjectStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans batches in a process of the driver, and reads them in the tasks."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self.options, self.columns = options, schema
        self._stores: dict[StorageLocation, ObjectStore] = {}
        self._target: Inventory | None = None  # all there is for a query with the available-now trigger
        self._settled: Position | None = None
        self._started = False
        self._resolved: list[tuple[int, str]] = []  # records to delete once this batch is done

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - the names are Spark's
        return Position(self.options.source).offset()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Take only the objects that are there now."""
        self._target = self._list()

    def getDefaultReadLimit(self) -> Any:  # noqa: N802
        return ReadMaxFiles(self.options.limits.objects)

    def latestOffset(  # noqa: N802
        self, start: dict[str, Any] | None = None, limit: Any = None
    ) -> dict[str, Any]:
        """Plan the batch after `start`; `start` itself if nothing is new. Spark before 4.2 gives neither."""
        if start is None:
            start, ended = self._last_offset()
            if not ended:  # available-now asks first, and then repeats the interrupted batch
                return start
        limits = self.options.limits
        if GIVES_START and isinstance(limit, ReadAllAvailable):
            limits = RoundLimits(objects=1 << 62, bytes=1 << 62)
        before = self._settle(Position.parse(start, self.options.source))
        after = before.next(self._target or self._list(), limits, retry=not self._started)
        if after is None:
            return start
        self._started = True
        for key, held in before.quarantine.items():
            if after.quarantine.get(key) != held:
                name = f"{before.query}/{record_name(held.batch, key, held.etag)}.{held.kind}"
                self._resolved.append((after.batch, name))
        return after.offset()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Cut the batch that ends with `end` into tasks; its plan is in `end`."""
        if start == end:
            return []
        before, after = (Position.parse(offset, self.options.source) for offset in (start, end))
        if after.batch != before.batch + 1:
            raise IngestError(
                f"the checkpoint has batch {after.batch} of {self.options.source} after batch "
                f"{before.batch}: it is damaged; start the query with a new one"
            )
        share = PART_BYTES // PART_OBJECTS
        parts = grouped(after.work, lambda planned: max(planned.size, share), PART_BYTES)
        return [StreamPart(after.query, after.batch, part) for part in parts]

    def commit(self, end: dict[str, Any]) -> None:
        """Delete the records of quarantined objects that this batch or one before it has taken."""
        if self.options.quarantine is None:
            return
        done = [name for batch, name in self._resolved if batch <= end["batch"]]
        self._resolved = [(batch, name) for batch, name in self._resolved if batch > end["batch"]]
        delete(self.options.quarantine, done, tuple)  # this query's own records: nothing refers to them

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the objects of a task."""
        assert isinstance(partition, StreamPart)
        pa.set_cpu_count(1)
        records = None if self.options.quarantine is None else shared(self.options.quarantine)
        known: set[str] = set()
        if records is not None:
            known = set(_records(records, partition.records, partition.batch))
        wanted = wanted_columns(self.columns)
        store = shared(self.options.location)
        work = []
        for planned in partition.work:
            name = record_name(partition.batch, planned.key, planned.etag)
            if not any(f"{name}.{kind}" in known for kind in (BAD, UNREADABLE, GONE)):
                work.append((name, planned))
        fetches = [partial(read, store, one.key, one.size, MAX_OBJECT) for _, one in work]
        for (name, planned), fetched in zip(work, ahead(fetches, store.ahead), strict=True):
            described = parse_key(planned.key)
            assert described is not None, planned.key  # the planner plans no other key
            try:
                rows = decoded(fetched(), described, planned.key, wanted)
            except (BadObject, Unreadable, Vanished) as error:
                if records is None:
                    raise IngestError(
                        f"{planned.key}: {error}; upload it again, or pass over it with the option quarantine"
                    ) from error
                kind = _kind(error)
                record = {"key": planned.key, "etag": planned.etag, "size": planned.size, "kind": kind}
                content = json.dumps(record | {"reason": str(error)}, indent=1)
                records.put(f"{partition.records}/{name}.{kind}", content.encode())
                continue
            for part in rows.parts(planned.fresh):
                yield from part.to_batches(max_chunksize=BATCH_ROWS)

    def _list(self) -> Inventory:
        return Inventory(self._open(self.options.location).list())

    def _open(self, location: StorageLocation) -> ObjectStore:
        """Return the store of the location; only here, as a reader is pickled for the tasks before that."""
        if location not in self._stores:
            self._stores[location] = location.open()
        return self._stores[location]

    def _settle(self, position: Position) -> Position:
        """Apply the records of the position's batch, which has ended; they are read once."""
        if self._settled is None or self._settled.batch != position.batch:
            self._settled = position
            if self.options.quarantine is not None and position.work:
                found = _records(self._open(self.options.quarantine), position.query, position.batch)
                self._settled = position.settle(found)
                gone = [name for name in found if name.endswith(f".{GONE}")]
                self._resolved += [(position.batch + 1, f"{position.query}/{name}") for name in gone]
        return self._settled

    def _last_offset(self) -> tuple[dict[str, Any], bool]:
        """Return the offset of this source in the newest batch in the checkpoint, and whether that has ended.

        `offsets/N` is lines: a version, JSON about batch N, and an offset or `-` for each source. `commits/N`
        is written when the batch has ended.
        """
        assert self.options.checkpoint is not None
        store = self._open(self.options.checkpoint)
        planned, ended = _batches(store, "offsets/"), _batches(store, "commits/")
        if planned:
            for line in store.get(f"offsets/{max(planned)}").decode().splitlines()[2:]:
                found = json.loads(line) if line.startswith("{") else {}
                if found.get("source") == self.options.source:
                    return dict(found), max(planned) in ended
        return self.initialOffset(), not planned or max(planned) in ended


def _batches(store: ObjectStore, log: str) -> set[int]:
    """Return the numbers of the batches in a log of a checkpoint."""
    names = (entry.key.removeprefix(log) for entry in store.under(log))
    return {int(name) for name in names if name.isascii() and name.isdecimal()}


def _kind(error: Exception) -> str:
    if isinstance(error, BadObject):
        return BAD
    return UNREADABLE if isinstance(error, Unreadable) else GONE


def _records(store: ObjectStore, query: str, batch: int) -> list[str]:
    """Return the names of the records of a batch, as `record_name` gives them, with their kinds."""
    return [entry.key.removeprefix(f"{query}/") for entry in store.under(f"{query}/{batch}/")]
