"""The bytes of one object to a checked Arrow table; no Spark, no S3.

The name of an object is a promise: rows of that gateway, stream and epoch, numbered exactly first..last.
Whatever does not keep it (truncated, foreign, empty, lying) raises `BadObject`, and none of its rows
is used. What the process lacks (memory, a module, a codec that its Arrow was built without) is no fault of
the object and raises `Unreadable`.

Both formats give the same seven columns, all required. Further columns are kept when they have a plain
name and a simple type: `extras` says which ones the table has already, and `NewColumns` is raised for
others, so that the driver adds them before any row is written.

NDJSON is parsed by msgspec where it is installed (three times as fast) and by Arrow's reader where it
is not, as on a cluster without compiled extras, and for objects with further columns.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet as pq

from bridge.deflate import GZIP, decompressobj
from bridge.ingest.columns import BASE, MAX_EXTRAS, MESSAGES, PARTITIONS, TIME
from bridge.ingest.errors import BadObject, Unreadable, line
from bridge.objectkeys import ObjectKey

try:
    import msgspec
except ImportError:
    msgspec = None  # type: ignore[assignment]

MAX_UNPACKED = (
    512 << 20
)  # an object that unpacks to more is refused: one task must not take the executor down
PLAIN_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}\Z")

YEARS = (0, 253_402_300_800_000_000)  # us of 1970 and of 10000: no calendar has what is outside

Extras = Mapping[str, pa.DataType]


class NewColumns(Exception):  # noqa: N818 # not an error: a question to the driver
    """Raised when an object is good and has columns that the table does not have yet."""

    def __init__(self, columns: dict[str, pa.DataType]) -> None:
        super().__init__(", ".join(columns))
        self.columns = columns


def decode(data: bytes, key: ObjectKey, extras: Extras) -> pa.Table:
    """Read and check an object; the result has the columns of BASE and those of `extras` that it holds."""
    if not data:
        raise BadObject("empty: 0 bytes")
    try:
        table = _parquet(data) if key.format == "parquet" else _ndjson(_gunzip(data), key)
        found = set(table.column_names)
        if absent := [name for name in BASE.names if name not in found]:
            raise BadObject(f"column {absent[0]} is missing")
        columns = {name: _cast(table, name, BASE.field(name).type) for name in BASE.names}
        _check(columns, key)
        more = [name for name in table.column_names if name not in columns]
        new = {name: _plain(table, name, extras) for name in more if name not in extras}
        if new and len(new) + len(extras) > MAX_EXTRAS:
            raise BadObject(f"{len(new)} new columns would make more than {MAX_EXTRAS}")
        if new:
            raise NewColumns(new)
        columns |= {name: _cast(table, name, extras[name]) for name in more}
        return pa.table(columns)
    except (BadObject, NewColumns, Unreadable):
        raise
    except (MemoryError, ImportError) as error:
        raise Unreadable(f"{type(error).__name__}: {line(error)}") from error
    # Arrow, zlib and msgspec raise their own kinds, and a damaged file can raise any of them
    except Exception as error:
        raise BadObject(f"{type(error).__name__}: {line(error)}") from error


def _check(columns: dict[str, pa.ChunkedArray], key: ObjectKey) -> None:
    numbers = columns["sequence_number"]
    promised = key.last - key.first + 1
    if len(numbers) != promised:
        raise BadObject(f"{len(numbers)} rows, but the name promises {promised}")
    for name, column in columns.items():
        if column.null_count:
            raise BadObject(f"null in column {name}")
    steps = pc.all(pc.equal(pc.subtract(numbers[1:], numbers[:-1]), 1)).as_py() if promised > 1 else True
    if numbers[0].as_py() != key.first or not steps:
        raise BadObject(f"sequence numbers are not {key.first}..{key.last} in order")
    ends = pc.min_max(columns["ingest_time"].cast(pa.int64())).as_py()
    if ends["min"] < YEARS[0] or ends["max"] >= YEARS[1]:
        raise BadObject("ingest_time is not between the years 1970 and 9999")
    for name, expected in (("gateway", key.gateway), ("stream", key.stream), ("epoch", str(key.epoch))):
        values = pc.unique(columns[name]).to_pylist()
        if values != [expected]:
            raise BadObject(f"{name} is {values[0]!r} in the rows and {expected!r} in the name")


def _cast(table: pa.Table, name: str, wanted: pa.DataType) -> pa.ChunkedArray:
    column = table[name]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    try:
        column = column if column.type == wanted else column.cast(wanted)
        column.validate(full=True)  # text must be UTF-8, or the whole table could not be read any more
    except pa.ArrowInvalid as error:
        raise BadObject(f"column {name} does not fit {wanted}: {line(error)}") from error
    return column


def _plain(table: pa.Table, name: str, extras: Extras) -> pa.DataType:
    """The type that a new column gets in the table."""
    if not PLAIN_NAME.match(name) or name in MESSAGES.names:
        raise BadObject(f"column {name!r} cannot be added to the table: not a plain name")
    if name in PARTITIONS:
        raise BadObject(f"column {name!r} cannot be added to the table: its partition has that name")
    if same := [known for known in extras if known.lower() == name]:  # one column to most engines
        raise BadObject(f"column {name!r} cannot be added to the table: it has {same[0]!r}, another case")
    found = table[name].type
    if pa.types.is_dictionary(found):
        found = found.value_type
    if pa.types.is_integer(found):
        return pa.int64()
    if pa.types.is_floating(found):
        return pa.float64()
    if pa.types.is_timestamp(found):
        return TIME
    for kind, wanted in (
        (pa.types.is_boolean, pa.bool_()),
        (pa.types.is_string, pa.string()),
        (pa.types.is_large_string, pa.string()),
        (pa.types.is_binary, pa.binary()),
    ):
        if kind(found):
            return wanted
    raise BadObject(f"column {name} cannot be added to the table: it holds {found}")


def _parquet(data: bytes) -> pa.Table:
    file = pq.ParquetFile(pa.BufferReader(data))
    groups = (file.metadata.row_group(index) for index in range(file.metadata.num_row_groups))
    if sum(group.total_byte_size for group in groups) > MAX_UNPACKED:
        raise BadObject(f"unpacks to more than {MAX_UNPACKED} bytes")
    try:
        return file.read(use_threads=False)
    except pa.ArrowNotImplementedError as error:  # another build or version of Arrow can read it
        raise Unreadable(f"{type(error).__name__}: {line(error)}") from error


def _gunzip(data: bytes) -> bytes:
    parts: list[bytes] = []
    room = MAX_UNPACKED
    while data:  # several members one after the other are one legal file
        unpacker = decompressobj(wbits=GZIP)
        parts.append(unpacker.decompress(data, room))
        room -= len(parts[-1])
        if room <= 0 and (not unpacker.eof or unpacker.unused_data):
            raise BadObject(f"unpacks to more than {MAX_UNPACKED} bytes")
        if not unpacker.eof:
            raise BadObject("truncated: the gzip stream has no end")
        data = unpacker.unused_data
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _ndjson(lines: bytes, key: ObjectKey) -> pa.Table:
    if msgspec is not None:
        try:
            return _by_msgspec(lines, key)
        except msgspec.ValidationError:
            pass  # further columns, most likely; the other reader names what is wrong if it is something else
    return _by_arrow(lines)


@lru_cache(maxsize=1024)
def _decoder(gateway: str, stream: str, epoch: str) -> Any:
    """Decode rows of one stream; a literal is compared in place, which costs much less than a new string."""
    row = msgspec.defstruct(
        "Row",
        [
            ("gateway", Literal[gateway]),
            ("stream", Literal[stream]),
            ("epoch", Literal[epoch]),
            ("sequence_number", int),
            ("ingest_time", str),
            ("topic", str),
            ("payload", bytes),
        ],
        forbid_unknown_fields=True,
        gc=False,
    )
    return msgspec.json.Decoder(row)


def _by_msgspec(lines: bytes, key: ObjectKey) -> pa.Table:
    epoch = str(key.epoch)
    rows = _decoder(key.gateway, key.stream, epoch).decode_lines(lines)
    constant = {"gateway": key.gateway, "stream": key.stream, "epoch": epoch}
    return pa.table(
        {
            **{name: pa.repeat(pa.scalar(value), len(rows)) for name, value in constant.items()},
            "sequence_number": pa.array([row.sequence_number for row in rows], pa.int64()),
            "ingest_time": _times(pa.array([row.ingest_time for row in rows], pa.string())),
            "topic": pa.array([row.topic for row in rows], pa.string()),
            "payload": pa.array([row.payload for row in rows], pa.binary()),
        }
    )


_TEXT = {name: pa.string() for name in ("gateway", "stream", "epoch", "ingest_time", "topic", "payload")}


def _by_arrow(lines: bytes) -> pa.Table:
    types = {**_TEXT, "sequence_number": pa.int64()}
    table = _read_json(lines, types)
    # Arrow takes text that looks like a time for one, and another object may hold other text there
    guessed = {f.name: pa.string() for f in table.schema if pa.types.is_timestamp(f.type)}
    if guessed:
        table = _read_json(lines, types | guessed)
    columns: dict[str, Any] = {name: table[name] for name in table.column_names}
    columns["ingest_time"] = _times(table["ingest_time"])
    columns["payload"] = pa.array([_unbase64(text) for text in table["payload"].to_pylist()], pa.binary())
    return pa.table(columns)


def _read_json(lines: bytes, types: dict[str, pa.DataType]) -> pa.Table:
    return pyarrow.json.read_json(
        pa.BufferReader(lines),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=pa.schema(list(types.items()))),
    )


def _times(text: Any) -> Any:
    return text.cast(TIME)


def _unbase64(text: str | None) -> bytes | None:
    return None if text is None else binascii.a2b_base64(text, strict_mode=True)
