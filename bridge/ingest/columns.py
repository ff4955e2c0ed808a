"""The columns of exported objects and of the table."""

from __future__ import annotations

import pyarrow as pa

TIME = pa.timestamp("us", tz="UTC")
BASE = pa.schema(
    [
        ("gateway", pa.string()),
        ("stream", pa.string()),
        ("epoch", pa.string()),
        ("sequence_number", pa.int64()),
        ("ingest_time", TIME),
        ("topic", pa.string()),
        ("payload", pa.binary()),
    ]
)
MESSAGES = BASE.append(pa.field("object_key", pa.string()))
# every table of the job has these, the refined ones too: they say which message a row is, and when it came
IDENTITY = pa.schema([field for field in BASE if field.name not in ("topic", "payload")])
VARIANT = pa.struct([pa.field("value", pa.binary(), False), pa.field("metadata", pa.binary(), False)])
PARTITIONS = ("ingest_date", "ingest_day")  # the sinks' own columns and partitions: no column has such a name
MAX_EXTRAS = 100  # columns that objects may add to the table, all together


def is_variant(kind: pa.DataType) -> bool:
    """Whether this is Spark's VARIANT: in Arrow a struct, marked at one of its fields."""
    return pa.types.is_struct(kind) and any(
        (field.metadata or {}).get(b"variant") == b"true" for field in kind
    )


def has_variant(kind: pa.DataType) -> bool:
    """Whether it is one or has one within."""
    return is_variant(kind) or any(has_variant(kind.field(at).type) for at in range(kind.num_fields))
