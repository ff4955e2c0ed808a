"""The exported objects as a DataFrame: `spark.read.format("streambridge").load("s3://bucket/prefix")`.

    from bridge.ingest.source import register
    register(spark)
    frame = spark.read.format("streambridge").option("endpoint", "http://...").load("s3://bucket/prefix")

For jobs that read the landing prefix themselves; no table of `streambridge ingest` is needed. Every number
comes once, as in the table: one task reads objects that overlap, in order, and takes from each only the
numbers that are still missing; an object without any is not read. An object that breaks the promise of its
key fails the query, or is skipped with `badObjects` = `skip`. Additional columns are read if the query's
schema has them. Options: path, endpoint, badObjects. `spark.readStream` is in `stream_reader`.

Spark 4.0 or newer (Python data sources); on Spark 3.5 use the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from bridge.ingest.errors import BadObject, BadOption, IngestError, NotInstalled, Vanished
from bridge.ingest.messages import BATCH_ROWS, decoded, wanted_columns
from bridge.ingest.planner import Inventory, Item, grouped
from bridge.ingest.store import StorageLocation, shared
from bridge.ingest.worker import MAX_OBJECT
from bridge.objectkeys import parse_key
from bridge.ranges import Ranges

try:
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
except ImportError as error:
    raise NotInstalled(
        'format("streambridge") needs Spark 4.0 or newer, which knows data sources in Python; '
        "on Spark 3.5 read the table of `streambridge ingest`"
    ) from error

from bridge.ingest.stream_reader import ObjectStreamReader, StreamOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

SCHEMA = (
    "gateway string, stream string, epoch string, sequence_number bigint, ingest_time timestamp, "
    "topic string, payload binary, object_key string"
)
PART_BYTES = 16 << 20  # of objects in one partition


@dataclass
class Part(InputPartition):
    """The objects of one task: groups of keys whose numbers overlap."""

    groups: list[list[str]]


class StreamBridgeSource(DataSource):
    """The data source `streambridge`."""

    @classmethod
    def name(cls) -> str:
        return "streambridge"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> ObjectReader:
        options = self._given()
        bad = options.get("badobjects", "fail")
        if bad not in ("fail", "skip"):
            raise BadOption(f"streambridge: badObjects is {bad!r}; use fail or skip")
        return ObjectReader(self._location(), schema, skip=bad == "skip")

    def streamReader(self, schema: StructType) -> ObjectStreamReader:  # noqa: N802 - the name is Spark's
        return ObjectStreamReader(StreamOptions.of(self._location(), self._given()), schema)

    def _given(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.options.items()}

    def _location(self) -> StorageLocation:
        options = self._given()
        if "path" not in options:
            raise BadOption('streambridge: the path is missing: .load("s3://bucket/prefix")')
        return StorageLocation(options["path"], options.get("endpoint"))


class ObjectReader(DataSourceReader):
    """Plans on the driver, reads in the tasks."""

    def __init__(self, location: StorageLocation, schema: StructType, *, skip: bool) -> None:
        self.location, self.columns, self.skip = location, schema, skip

    def partitions(self) -> Sequence[InputPartition]:
        streams = Inventory(self.location.open().list()).streams
        groups = [group for stream in sorted(streams) for group in _overlapping(streams[stream])]
        parts = grouped(groups, lambda group: sum(item.size for item in group), PART_BYTES)
        return [Part([[item.key for item in group] for group in part]) for part in parts or [[]]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Part)
        pa.set_cpu_count(1)
        store = shared(self.location)
        wanted = wanted_columns(self.columns)
        for keys in partition.groups:
            given = Ranges()
            for key in keys:
                name = parse_key(key)
                assert name is not None, key
                fresh = given.missing(name.first, name.last)
                if not fresh:
                    continue
                try:
                    rows = decoded(store.get(key, MAX_OBJECT), name, key, wanted)
                except (BadObject, Vanished) as error:
                    if self.skip:
                        continue
                    raise IngestError(f"{key}: {error}; option badObjects = skip skips it") from error
                given.update(fresh)
                for part in rows.parts(fresh):
                    yield from part.to_batches(max_chunksize=BATCH_ROWS)


def _overlapping(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Group the sorted objects of a stream so that objects of different groups never overlap."""
    group: list[Item] = []
    last = -1
    for item in items:
        if group and item.first > last:
            yield group
            group = []
        group.append(item)
        last = max(last, item.last)
    if group:
        yield group


def register(spark: SparkSession) -> None:
    """Make `format("streambridge")` known to the session."""
    spark.dataSource.register(StreamBridgeSource)
