"""Converts payloads to columns with Arrow's JSON reader, for batches in which every payload is plain.

Plain means that the result is the same as that of `typed`: each payload is an object with only keys of the
schema, none of them twice, and each value has the type of its column. The reader refuses a batch that is not
plain: it stops at another key, a repeated key, a value of another type, an integer that the column cannot
hold, and text that is not JSON. This module finds payloads that the reader would accept and `typed` would
not:

* To the reader, payloads are lines. So each must begin with `{`, and there must be as many rows as payloads.
  No object can continue on the next line, because the reader refuses a newline within text, and no value may
  be an object.
* It does not check UTF-8.
* It accepts NaN and the infinities, and rounds integers beyond 2^53 in a DOUBLE column. So a batch with such
  a large number is not plain.

Only columns of numbers, text and booleans can be read this way.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from bridge.ingest.schema import EXACT

KINDS = (pa.float64(), pa.bool_(), pa.string(), pa.int8(), pa.int16(), pa.int32(), pa.int64())
MAX_BYTES = 16 << 20  # of the payloads of a batch
TWICE = pa.array([b'{"a":1,"a":2}'], pa.binary())


class FlatReader:
    """Reads payloads whose keys have columns of these types."""

    def __init__(self, keys: Sequence[str], types: pa.Schema) -> None:
        fields = [pa.field(key, field.type) for key, field in zip(keys, types, strict=True)]
        self._schema = pa.schema(fields)
        self.usable = bool(fields) and all(field.type in KINDS for field in fields) and _refuses_twice()

    def columns(self, payloads: pa.Array) -> list[pa.Array] | None:
        """Return a column for each key; None if a payload is not plain."""
        if not len(payloads) or payloads.null_count or payloads.nbytes > MAX_BYTES:
            return None
        if not pc.all(pc.starts_with(payloads, b"{")).as_py():
            return None
        try:
            table = _read(payloads, self._schema)
        except (pa.ArrowException, UnicodeDecodeError):
            return None
        if table.num_rows != len(payloads):
            return None
        columns = [table[field.name].combine_chunks() for field in self._schema]
        for column in columns:
            if column.type == pa.float64():
                exact = pc.less(pc.abs(column), float(EXACT))  # false for NaN
                if not pc.all(exact, skip_nulls=True).as_py():
                    return None
        return columns


def _read(payloads: pa.Array, schema: pa.Schema) -> pa.Table:
    all_of_them = pa.ListArray.from_arrays(pa.array([0, len(payloads)], pa.int32()), payloads)
    lines = pc.binary_join(all_of_them, b"\n")[0].as_buffer()
    str(memoryview(lines), "utf-8")
    return pyarrow.json.read_json(
        pa.BufferReader(lines),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error"),
    )


def _refuses_twice() -> bool:
    """Return whether this version of Arrow refuses an object with a key twice."""
    try:
        _read(TWICE, pa.schema([("a", pa.int64())]))
    except pa.ArrowException:
        return True
    return False
