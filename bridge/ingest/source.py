"""The exported objects as a DataFrame: `spark.read.format("streambridge").load("s3://bucket/prefix")`.

    from bridge.ingest.source import register
    register(spark)
    frame = spark.read.format("streambridge").option("endpoint", "http://...").load("s3://bucket/prefix")

For jobs that read the landing prefix themselves; no table of `streambridge ingest` is needed. Every number
comes once, as in the table: one task reads objects that overlap, in order, and takes from each only the
numbers that are still missing; an object without any is not read. An object that breaks the promise of its
key fails the query, or is skipped with `badObjects` = `skip`. Additional columns are read if the query's
schema has them. Options: path, endpoint, badObjects.

Spark 4.0 or newer (Python data sources); on Spark 3.5 use the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from bridge.ingest.columns import MESSAGES, shaped
from bridge.ingest.decode import NewColumns, decode
from bridge.ingest.errors import BadObject, BadOption, IngestError, Vanished
from bridge.ingest.planner import Inventory, Item, grouped
from bridge.ingest.ranges import Ranges
from bridge.ingest.session import arrow_schema
from bridge.ingest.store import StorageLocation, shared
from bridge.ingest.worker import MAX_OBJECT
from bridge.objectkeys import ObjectKey, parse_key

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

SCHEMA = (
    "gateway string, stream string, epoch string, sequence_number bigint, ingest_time timestamp, "
    "topic string, payload binary, object_key string"
)
PART_BYTES = 16 << 20  # of objects in one partition
BATCH_ROWS = 10_000


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
        options = {name.lower(): value for name, value in self.options.items()}
        if "path" not in options:
            raise BadOption('streambridge: the path is missing: .load("s3://bucket/prefix")')
        bad = options.get("badobjects", "fail")
        if bad not in ("fail", "skip"):
            raise BadOption(f"streambridge: badObjects is {bad!r}; use fail or skip")
        return ObjectReader(
            StorageLocation(options["path"], options.get("endpoint")), schema, skip=bad == "skip"
        )


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
        wanted = _arrow(self.columns)
        for keys in partition.groups:
            given = Ranges()
            for key in keys:
                name = parse_key(key)
                assert name is not None, key
                fresh = given.missing(name.first, name.last)
                if not fresh:
                    continue
                try:
                    table = self._decode(store.get(key, MAX_OBJECT), name, key, wanted)
                except (BadObject, Vanished) as error:
                    if self.skip:
                        continue
                    raise IngestError(f"{key}: {error}; option badObjects = skip skips it") from error
                given.update(fresh)
                for low, high in fresh:
                    part = table.slice(low - name.first, high - low + 1)
                    yield from part.to_batches(max_chunksize=BATCH_ROWS)

    def _decode(self, data: bytes, name: ObjectKey, key: str, wanted: pa.Schema) -> pa.Table:
        extras = {field.name: field.type for field in wanted if field.name not in MESSAGES.names}
        try:
            table = decode(data, name, extras)
        except NewColumns as new:  # the query does not ask for them
            table = decode(data, name, extras | new.columns)
        table = table.append_column("object_key", pa.repeat(pa.scalar(key), table.num_rows))
        return shaped(table, wanted).combine_chunks()


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


def _arrow(schema: StructType) -> pa.Schema:
    """Return the exact schema that Spark expects of the batches: times in us of UTC, everything nullable."""
    return pa.schema([(field.name, field.type) for field in arrow_schema(schema)])
