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
MAX_EXTRAS = 100  # columns that objects may add to the table, all together
