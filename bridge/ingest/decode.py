"""Decode one object into a checked Arrow table; no Spark, no S3.

An object key is a promise: rows of this gateway, stream and epoch, numbered exactly first..last, except those
that the object declares as left out (`bridge.filtered`). An object that breaks it (truncated, foreign, empty,
wrong count) raises `BadObject`, and none of its rows is used. If the process lacks something (memory, a
module, a codec that its Arrow was built without, a later version of declarations), the object is not at
fault, and `Unreadable` is raised.

Every object is hostile input: a few hundred bytes can expand without limit, and a crashed process would stop
the run for all objects. So rows are counted first, and memory and nesting depth are bounded before a library
decodes anything. Rows are flat; they need no depth.

Both formats give the same seven columns, all required. Additional columns are kept if they have a plain name
and a simple type. `extras` are those that the table already has; for others `NewColumns` is raised, so that
the driver adds them before any row is written.

NDJSON is parsed by msgspec if it is installed, which is three times as fast. Arrow's reader is used without
it, for example on a cluster without compiled packages, and for objects with additional columns.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet as pq

from bridge.deflate import GZIP, decompressobj
from bridge.filtered import PARQUET_KEY, LaterVersionError, LeftOut, from_extra, left_out
from bridge.ingest.bounds import Footer, check_parquet, deeper
from bridge.ingest.columns import BASE, MAX_EXTRAS, MESSAGES, PARTITIONS, TIME
from bridge.ingest.errors import BadObject, Unreadable, line
from bridge.ingest.planner import MAX_ROWS
from bridge.objectkeys import ObjectKey

try:
    import msgspec
except ImportError:
    msgspec = None  # type: ignore[assignment]

MAX_UNPACKED = 512 << 20  # bytes: one object must not exhaust the memory of an executor
CHUNK = 32 << 20  # bytes of lines that are Python objects at the same time
MEMBER_CHUNK = 64 << 10  # bytes given at a time to the decoder of each gzip member after the first
FIRST_ROW = 1 << 20  # bytes: the columns of a longer first row are not guessed
MAX_DEPTH = 16  # nesting of a line: rows are flat, and a shallower one is refused by its column's type
PLAIN_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}\Z")

TEXT = re.compile(rb'"([^"\n]*)"(\s*:)?')  # in lines without escapes; before a colon it is a column name

MAX_DAYS = 10_000  # in one object: each takes a data file, and a gateway that sends one row a day 27 years
DAY = 86_400_000_000  # us
YEARS = (0, 253_402_300_800_000_000)  # us: the years 1970 to 9999, as far as calendars reach

KINDS = (  # of additional columns, and their types in the table
    (pa.types.is_integer, pa.int64()),
    (pa.types.is_floating, pa.float64()),
    (pa.types.is_timestamp, TIME),
    (pa.types.is_boolean, pa.bool_()),
    (pa.types.is_string, pa.string()),
    (pa.types.is_large_string, pa.string()),
    (pa.types.is_binary, pa.binary()),
)

Extras = Mapping[str, pa.DataType]


class NewColumns(Exception):  # noqa: N818 # not an error: a question to the driver
    """Raised when an object is good, but has columns that the table does not have yet."""

    def __init__(self, columns: dict[str, pa.DataType]) -> None:
        super().__init__(", ".join(columns))
        self.columns = columns


def decode(data: bytes, key: ObjectKey, extras: Extras, budget: int = MAX_UNPACKED) -> pa.Table:
    """Decode and check an object; the result has the columns of BASE, and those of `extras` that it holds.

    `budget` is the most bytes that it may take when unpacked. Raises BadObject, Unreadable or NewColumns, and
    nothing else.
    """
    if not data:
        raise BadObject("empty: 0 bytes")
    promised = key.last - key.first + 1
    if promised > MAX_ROWS:
        raise BadObject(f"the key promises {promised} rows, an object may have {MAX_ROWS}")
    absent: LeftOut | None = None
    try:
        footer = Footer(data) if key.format == "parquet" else None
        absent = _left_out(data, footer, key)
        rows = promised - (absent.number if absent else 0)
        if footer is not None:
            table = _parquet(data, footer, rows, extras, budget)
        else:
            table = _ndjson(data, key, rows, extras, budget)
        new = _new_columns(table.schema, extras)
        columns = {name: _cast(table, name, BASE.field(name).type) for name in BASE.names}
        _check(columns, key, absent)
        if new:
            raise NewColumns(new)
        more = [name for name in table.column_names if name not in columns]
        columns |= {name: _cast(table, name, extras[name]) for name in more}
        return pa.table(columns)
    except (NewColumns, Unreadable):
        raise
    except BadObject as error:
        if absent is None:
            raise
        raise BadObject(
            f"{error}; it declares {absent.number} of its {promised} numbers as left out"
        ) from None
    except (MemoryError, ImportError) as error:
        raise Unreadable(f"{type(error).__name__}: {line(error)}") from error
    # Arrow, zlib and msgspec raise their own exceptions, and a damaged file can raise any of them
    except Exception as error:
        raise BadObject(f"{type(error).__name__}: {line(error)}") from error


def _left_out(data: bytes, footer: Footer | None, key: ObjectKey) -> LeftOut | None:
    """Return which numbers the object declares as left out; None if it lacks none."""
    try:
        if footer is None:
            declared = from_extra(data)
        else:
            text = footer.metadata(PARQUET_KEY)
            declared = None if text is None else base64.b64decode(text, validate=True)
        return None if declared is None else left_out(declared, key.first, key.last)
    except LaterVersionError as error:
        raise Unreadable(str(error)) from None
    except ValueError as error:
        raise BadObject(line(error)) from None


def _new_columns(found: pa.Schema, extras: Extras) -> dict[str, pa.DataType]:
    """Return the columns to be added to the table.

    Raises BadObject for a column that the table cannot have, for a required column that is missing, and for
    a type that no cast can convert.
    """
    known = set(found.names)
    if absent := [name for name in BASE.names if name not in known]:
        raise BadObject(f"column {absent[0]} is missing")
    more = [field for field in found if field.name not in BASE.names]
    for field in found:
        wanted = BASE.field(field.name).type if field.name in BASE.names else extras.get(field.name)
        if wanted is not None and not _is_simple(field.type):
            raise BadObject(f"column {field.name} does not fit {wanted}: it holds {field.type}")
    new = {field.name: _plain(field, extras) for field in more if field.name not in extras}
    if new and len(new) + len(extras) > MAX_EXTRAS:
        raise BadObject(f"{len(new)} new columns would make more than {MAX_EXTRAS}")
    return new


def _is_simple(kind: pa.DataType) -> bool:
    """Return whether values are flat and take 8 bytes, or their own length: the bounds assume it."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return (pa.types.is_primitive(kind) and kind.bit_width <= 64) or any(
        is_a(kind) for is_a in (*text, pa.types.is_null)
    )


def _check(columns: dict[str, pa.ChunkedArray], key: ObjectKey, absent: LeftOut | None) -> None:
    numbers = columns["sequence_number"]
    promised = key.last - key.first + 1 - (absent.number if absent else 0)
    if len(numbers) != promised:
        raise BadObject(f"{len(numbers)} rows, but the key promises {promised}")
    for name, column in columns.items():
        if column.null_count:
            raise BadObject(f"null in column {name}")
    if absent is not None:
        is_right = numbers.combine_chunks().equals(_present(key, absent))
    else:
        steps = promised == 1 or pc.all(pc.equal(pc.subtract(numbers[1:], numbers[:-1]), 1)).as_py()
        is_right = numbers[0].as_py() == key.first and steps
    if not is_right:
        raise BadObject(f"sequence numbers are not {key.first}..{key.last} in order")
    ends = pc.min_max(columns["ingest_time"].cast(pa.int64())).as_py()
    if ends["min"] < YEARS[0] or ends["max"] >= YEARS[1]:
        raise BadObject("ingest_time is not between the years 1970 and 9999")
    if ends["max"] // DAY - ends["min"] // DAY >= MAX_DAYS:
        days = len(pc.unique(pc.divide(columns["ingest_time"].cast(pa.int64()), DAY)))
        if days > MAX_DAYS:
            raise BadObject(f"its rows are of {days} days, an object may have {MAX_DAYS}")
    for name, expected in (("gateway", key.gateway), ("stream", key.stream), ("epoch", str(key.epoch))):
        values = pc.unique(columns[name]).to_pylist()
        if values != [expected]:
            raise BadObject(f"{name} is {values[0]!r} in the rows and {expected!r} in the key")


def _present(key: ObjectKey, absent: LeftOut) -> pa.Array:
    """Return the numbers that the object has."""
    bits = pa.Array.from_buffers(
        pa.bool_(), key.last - key.first + 1, [None, pa.py_buffer(absent.bitmap)]
    )  # Arrow counts bits from the lowest, as declarations do
    return pc.add(pc.indices_nonzero(pc.invert(bits)).cast(pa.int64()), key.first)


def _cast(table: pa.Table, name: str, wanted: pa.DataType) -> pa.ChunkedArray:
    column = table[name]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    try:
        column = column if column.type == wanted else column.cast(wanted)
        column.validate(full=True)  # text that is not UTF-8 would make the whole table unreadable
    except pa.ArrowInvalid as error:
        raise BadObject(f"column {name} does not fit {wanted}: {line(error)}") from error
    return column


def _plain(field: pa.Field, extras: Extras) -> pa.DataType:
    """Return the type of a new column in the table; raises BadObject if the table cannot have it."""
    name, found = field.name, field.type
    if not PLAIN_NAME.match(name) or name in MESSAGES.names:
        raise BadObject(f"column {name!r} cannot be added to the table: not a plain name")
    if name in PARTITIONS:
        raise BadObject(f"column {name!r} cannot be added to the table: its partition has this name")
    if same := [known for known in extras if known.lower() == name]:  # most engines ignore the case
        raise BadObject(f"column {name!r} cannot be added to the table: it has {same[0]!r} in another case")
    if pa.types.is_dictionary(found):
        found = found.value_type
    for is_a, wanted in KINDS:
        if is_a(found):
            return wanted
    raise BadObject(f"column {name} cannot be added to the table: it holds {found}")


def _parquet(data: bytes, footer: Footer, rows: int, extras: Extras, budget: int) -> pa.Table:
    at_once = check_parquet(footer, rows, budget)
    file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    _new_columns(file.schema_arrow, extras)  # before anything is decoded
    # the footer has no checksum, and one flipped bit in it makes 1970 of any time
    times = file.schema_arrow.field("ingest_time").type
    if pa.types.is_timestamp(times) and times.unit != TIME.unit:
        raise BadObject(f"column ingest_time holds {times}, not {TIME}")
    try:
        if at_once >= rows:
            return file.read(use_threads=False)
        return _in_batches(file, at_once, budget)
    except pa.ArrowNotImplementedError as error:  # another build or version of Arrow may read it
        raise Unreadable(f"{type(error).__name__}: {line(error)}") from error


def _in_batches(file: pq.ParquetFile, rows: int, budget: int) -> pa.Table:
    """Read so many rows at a time: expanding all dictionaries at once could exceed the budget."""
    tables: list[pa.Table] = []
    room = budget
    for batch in file.iter_batches(rows, use_threads=False):
        table = pa.Table.from_batches([batch])
        for at, field in enumerate(table.schema):
            if pa.types.is_dictionary(field.type):
                table = table.set_column(at, field.name, table[at].cast(field.type.value_type))
        room -= table.nbytes
        if room < 0:
            raise BadObject(f"unpacks to more than {budget} bytes")
        tables.append(table)
    return pa.concat_tables(tables)


def _gunzip(data: bytes, rows: int, budget: int) -> bytes:
    """Unpack a gzip file. It may have several members, but not more than rows.

    zlib copies all input after the end of a member, so only the first member is given the whole input.
    """
    parts: list[bytes] = []
    view = memoryview(data)
    room, members, start, step = budget, 0, 0, len(data)
    while start < len(data):
        unpacker = decompressobj(wbits=GZIP)
        members += 1
        if members > rows:
            raise BadObject(f"more gzip members than the {rows} rows that the key promises")
        while not unpacker.eof and start < len(data):
            given = view[start : start + step]
            part = unpacker.decompress(given, room + 1)  # 0 would mean no limit
            room -= len(part)
            if room < 0:
                raise BadObject(f"unpacks to more than {budget} bytes")
            parts.append(part)
            start += len(given) - len(unpacker.unused_data)
        if not unpacker.eof:
            raise BadObject("truncated: the gzip stream has no end")
        step = MEMBER_CHUNK
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _ndjson(data: bytes, key: ObjectKey, promised: int, extras: Extras, budget: int) -> pa.Table:
    lines = _gunzip(data, promised, budget)
    if msgspec is not None:
        try:
            return _by_msgspec(lines, key, promised)
        except msgspec.ValidationError:
            pass  # additional columns, most likely; for anything else the other reader names the mistake
    return _by_arrow(lines, promised, extras, budget)


def _chunks(lines: bytes) -> Iterator[bytes]:
    """Split the lines into chunks of about `CHUNK` bytes, since their rows become Python objects."""
    if len(lines) <= CHUNK:
        yield lines
        return
    start = 0
    while start < len(lines):
        end = lines.find(b"\n", start + CHUNK) + 1 or len(lines)
        yield lines[start:end]
        start = end


@lru_cache(maxsize=1024)
def _decoder(gateway: str, stream: str, epoch: str) -> Any:
    """Return a decoder for rows of one stream. A literal is compared in place, which saves a new string."""
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


def _by_msgspec(lines: bytes, key: ObjectKey, rows: int) -> pa.Table:
    """Decode rows that have exactly the seven columns, so nothing in them can be nested."""
    tables: list[pa.Table] = []
    for chunk in _chunks(lines):
        tables.append(_rows(chunk, key))
        rows -= tables[-1].num_rows
        if rows < 0:
            break  # too many: `_check` reports it
    return pa.concat_tables(tables)


def _rows(lines: bytes, key: ObjectKey) -> pa.Table:
    epoch = str(key.epoch)
    rows = _decoder(key.gateway, key.stream, epoch).decode_lines(lines)
    constant = {"gateway": key.gateway, "stream": key.stream, "epoch": epoch}
    return pa.table(
        {
            **{name: pa.repeat(pa.scalar(value), len(rows)) for name, value in constant.items()},
            "sequence_number": pa.array([row.sequence_number for row in rows], pa.int64()),
            "ingest_time": pa.array([row.ingest_time for row in rows], pa.string()).cast(TIME),
            "topic": pa.array([row.topic for row in rows], pa.string()),
            "payload": pa.array([row.payload for row in rows], pa.binary()),
        }
    )


_TEXT = {name: pa.string() for name in ("gateway", "stream", "epoch", "ingest_time", "topic", "payload")}


def _by_arrow(lines: bytes, rows: int, extras: Extras, budget: int) -> pa.Table:
    """Decode rows with additional columns.

    When Arrow infers columns, it recurses once per level and creates a column for every name. So it is first
    given the columns of the first row, which usually are those of all rows; it infers them only if that
    fails, and after depth and names have been checked.
    """
    if lines[-2:].isspace():  # rstrip copies
        lines = lines.rstrip()
    found = lines.count(b"\n") + (not lines.endswith(b"\n")) if lines else 0
    if found != rows:
        raise BadObject(f"{found} rows, but the key promises {rows}")
    types = {**_TEXT, "sequence_number": pa.int64()}
    try:
        table = _read_json(lines, _of_first_row(lines, extras) | types, "error")
    except pa.ArrowInvalid:
        if deeper(lines, MAX_DEPTH):
            raise BadObject(f"nested deeper than {MAX_DEPTH}") from None
        _check_names(lines, rows, extras, budget)
        table = _read_json(lines, types, "infer")
        # Arrow infers a time from text that looks like one, and another object may have other text there
        guessed = {f.name: pa.string() for f in table.schema if pa.types.is_timestamp(f.type)}
        if guessed:
            table = _read_json(lines, types | guessed, "infer")
    columns: dict[str, Any] = {name: table[name] for name in table.column_names}
    columns["ingest_time"] = table["ingest_time"].cast(TIME)
    columns["payload"] = pa.array([_unbase64(text) for text in table["payload"].to_pylist()], pa.binary())
    return pa.table(columns)


def _of_first_row(lines: bytes, extras: Extras) -> dict[str, pa.DataType]:
    """Return the additional columns of the first row, with the types of their values."""
    kinds: dict[type, pa.DataType] = {
        bool: pa.bool_(),
        int: pa.int64(),
        float: pa.float64(),
        str: pa.string(),
    }
    try:
        row = json.loads(lines[: min(lines.find(b"\n") + 1 or len(lines), FIRST_ROW)])
    except (ValueError, RecursionError):
        return {}  # cut or malformed: the readers report it
    if not isinstance(row, dict) or len(row) > len(BASE) + len(extras) + MAX_EXTRAS:
        return {}
    return {
        name: kinds[type(value)]
        for name, value in row.items()
        if name not in BASE.names and type(value) in kinds
    }


def _check_names(lines: bytes, rows: int, extras: Extras, budget: int) -> None:
    """Raise BadObject if the rows have more names than a table may have columns, or than fit in memory."""
    names: set[bytes] = set()
    most = len(BASE) + len(extras) + 2 * MAX_EXTRAS
    for found in TEXT.finditer(lines.replace(b"\\\\", b"").replace(b'\\"', b"")):
        if not found[2]:
            continue
        names.add(found[1])
        if len(names) > most or rows * len(names) * 8 > budget:
            raise BadObject(f"its {rows} rows have too many columns: {len(names)} or more")


def _read_json(lines: bytes, types: dict[str, pa.DataType], unknown: str) -> pa.Table:
    return pyarrow.json.read_json(
        pa.BufferReader(lines),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=pa.schema(list(types.items())), unexpected_field_behavior=unknown
        ),
    )


def _unbase64(text: str | None) -> bytes | None:
    return None if text is None else binascii.a2b_base64(text, strict_mode=True)
