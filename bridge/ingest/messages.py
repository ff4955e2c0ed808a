"""The messages of one object in the columns that a query wants, for both readers of the data source."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from bridge.ingest.columns import MESSAGES, shaped
from bridge.ingest.decode import NewColumns, decode
from bridge.ingest.numbers import Numbered
from bridge.ingest.session import arrow_schema
from bridge.objectkeys import ObjectKey

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

BATCH_ROWS = 10_000


def wanted_columns(schema: StructType) -> pa.Schema:
    """Return the exact schema that Spark expects of the batches: times in us of UTC, everything nullable."""
    return pa.schema([(field.name, field.type) for field in arrow_schema(schema)])


def decoded(data: bytes, name: ObjectKey, key: str, wanted: pa.Schema) -> Numbered:
    """Return the messages of an object in the wanted columns; raises what `decode` raises, but NewColumns."""
    extras = {field.name: field.type for field in wanted if field.name not in MESSAGES.names}
    try:
        table = decode(data, name, extras)
    except NewColumns as new:  # the query does not ask for them
        table = decode(data, name, extras | new.columns)
    numbers = table["sequence_number"]
    table = table.append_column("object_key", pa.repeat(pa.scalar(key), table.num_rows))
    return Numbered(shaped(table, wanted).combine_chunks(), numbers)
