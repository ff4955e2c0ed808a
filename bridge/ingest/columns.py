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
KEYS = tuple(field.name for field in BASE if field.name != "payload")
MESSAGES = BASE.append(pa.field("object_key", pa.string()))
# every table of the job has these, refined ones too: they identify the message, and say when it was stored
IDENTITY = pa.schema([field for field in BASE if field.name not in ("topic", "payload")])
VARIANT = pa.struct([pa.field("value", pa.binary(), False), pa.field("metadata", pa.binary(), False)])
PARTITIONS = ("ingest_date", "ingest_day")  # reserved by the sinks: no column of an object may use them
MAX_EXTRAS = 100  # columns that all objects together may add to the table


def shaped(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table with exactly the columns of the schema; missing ones are null."""
    have = set(table.column_names)
    columns = [
        table[field.name].cast(field.type) if field.name in have else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def is_variant(kind: pa.DataType) -> bool:
    """Return whether this is Spark's VARIANT: in Arrow, a struct with a marker on one of its fields."""
    return pa.types.is_struct(kind) and any(
        (field.metadata or {}).get(b"variant") == b"true" for field in kind
    )


def has_variant(kind: pa.DataType) -> bool:
    """Return whether the type is a VARIANT or contains one."""
    return is_variant(kind) or any(has_variant(kind.field(at).type) for at in range(kind.num_fields))
