"""The messages of one object in the columns that a query wants, for both readers of the data source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from bridge.ingest.columns import MESSAGES, shaped
from bridge.ingest.decode import NewColumns, decode
from bridge.ingest.session import arrow_schema
from bridge.objectkeys import ObjectKey
from bridge.ranges import Pair

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

BATCH_ROWS = 10_000


def wanted_columns(schema: StructType) -> pa.Schema:
    """Return the exact schema that Spark expects of the batches: times in us of UTC, everything nullable."""
    return pa.schema([(field.name, field.type) for field in arrow_schema(schema)])


def decoded(data: bytes, name: ObjectKey, key: str, wanted: pa.Schema) -> pa.Table:
    """Return the messages of an object in the wanted columns; raises what `decode` raises, but NewColumns."""
    extras = {field.name: field.type for field in wanted if field.name not in MESSAGES.names}
    try:
        table = decode(data, name, extras)
    except NewColumns as new:  # the query does not ask for them
        table = decode(data, name, extras | new.columns)
    table = table.append_column("object_key", pa.repeat(pa.scalar(key), table.num_rows))
    return shaped(table, wanted).combine_chunks()


def pieces(table: pa.Table, first: int, fresh: Iterable[Pair]) -> Iterator[pa.RecordBatch]:
    """Yield the rows with the numbers of `fresh` from a table whose first row has the number `first`."""
    for low, high in fresh:
        yield from table.slice(low - first, high - low + 1).to_batches(max_chunksize=BATCH_ROWS)
