"""Objects that were made to bring an ingest run down: a few hundred bytes to some 100 KB each."""

from __future__ import annotations

import gzip
import io
import json
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.ingest.gateway import EPOCH, TIME, rows

DEEP = 100_000
Rows = list[dict[str, Any]]


def content(count: int = 10) -> Rows:
    return rows("gw-a", "s0", range(count))


def lines(count: int = 10) -> list[bytes]:
    """Good rows of NDJSON, without their line feeds."""
    good = [row | {"ingest_time": "2026-11-18T11:06:40.000Z", "payload": "QUJD"} for row in content(count)]
    return [json.dumps(row).encode() for row in good]


def with_field(line: bytes, field: bytes) -> bytes:
    return line[:-1] + b"," + field + b"}"


def packed(*text: bytes) -> bytes:
    return gzip.compress(b"\n".join(text) + b"\n")


def deep_object() -> bytes:
    """Nested in an unknown column; a few hundred bytes when packed."""
    return packed(with_field(lines(1)[0], b'"a":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP))


def deep_list() -> bytes:
    return packed(with_field(lines(1)[0], b'"a":' + b"[" * DEEP + b"]" * DEEP))


def deep_later() -> bytes:
    """The first row is flat, and the second one is deep."""
    first, second = lines(2)
    return packed(first, with_field(second, b'"a":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP))


def deep_behind_a_quote() -> bytes:
    """Strings that end where a careless scan would not see it."""
    field = rb'"q":"\\","z":"\\\"{","a":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP
    return packed(with_field(lines(1)[0], field))


def deep_in_a_known_column() -> bytes:
    return packed(lines(1)[0].replace(b'"QUJD"', b'{"a":' * DEEP + b"1" + b"}" * DEEP))


def unbalanced() -> bytes:
    return packed(with_field(lines(1)[0], b'"a":' + b'{"a":' * DEEP))


def long_line() -> bytes:
    """One row of a column of 100 MB."""
    return packed(b'{"a":"' + b"x" * 100_000_000 + b'"}')


def many_columns() -> bytes:
    """A million names, each of which would become a column."""
    return packed(b"{" + b",".join(b'"c%d":1' % number for number in range(1_000_000)) + b"}")


def columns_of_their_own() -> bytes:
    """Each row has a name that no other has: the table would have the square of them as cells."""
    return packed(*(with_field(line, b'"c%d":1' % at) for at, line in enumerate(lines(20_000))))


def names_with_colons() -> bytes:
    """As `columns_of_their_own`, with names that look like what stands between two strings."""
    return packed(*(with_field(line, b'":%d":1' % at) for at, line in enumerate(lines(20_000))))


def bomb() -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([*(packer.compress(b"\n" * (8 << 20)) for _ in range(75)), packer.flush()])


def members() -> bytes:
    """A million empty members: to copy what is behind each of them takes hours."""
    return gzip.compress(b"") * 1_000_000


def member_bombs() -> bytes:
    return gzip.compress(b"\n" * (8 << 20), 9) * 100


def number(text: str) -> bytes:
    return packed(lines(1)[0].replace(b'"sequence_number": 0', b'"sequence_number": ' + text.encode()))


def bad_utf8() -> bytes:
    return packed(lines(1)[0].replace(b"plant", b"\xff\xfe"))


def surrogates() -> bytes:
    return packed(lines(1)[0].replace(b"plant", rb"\ud800"))


# -- Parquet -------------------------------------------------------------------


def table(count: int) -> pa.Table:
    numbers = pa.array(range(count), pa.int64())
    constant = {"gateway": "gw-a", "stream": "s0", "epoch": str(EPOCH), "topic": "t"}
    columns = {name: pa.repeat(pa.scalar(value), count) for name, value in constant.items()}
    times = pa.repeat(pa.scalar(EPOCH * 1000, pa.int64()), count).cast(pa.timestamp("us")).cast(TIME)
    payload = pa.repeat(pa.scalar(b"x"), count)
    names = ("gateway", "stream", "epoch", "sequence_number", "ingest_time", "topic", "payload")
    found = columns | {"sequence_number": numbers, "ingest_time": times, "payload": payload}
    return pa.table({name: found[name] for name in names})


def written(data: pa.Table, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(data, file, **{"compression": "zstd", **options})
    return file.getvalue()


def dictionary_bomb(rows: int = 100_000, *, typed: bool = False) -> bytes:
    """One value of 1 MB, and an index of each row to it: 100 GB of payloads.

    `typed`: its column is of Arrow's dictionary type too, which keeps it small until it is cast.
    """
    data = table(rows)
    large = pa.DictionaryArray.from_arrays(
        pa.repeat(pa.scalar(0, pa.int32()), rows), pa.array([b"x" * 1_000_000], pa.binary())
    )
    return written(
        data.set_column(6, "payload", large),
        use_dictionary=["payload"],
        dictionary_pagesize_limit=4 << 20,
        store_schema=typed,
    )


def constant_rows(rows: int = 20_000_000) -> bytes:
    """All columns but the numbers are runs of one value."""
    return written(
        table(rows),
        use_dictionary=["gateway", "stream", "epoch", "topic", "payload"],
        column_encoding={"sequence_number": "DELTA_BINARY_PACKED", "ingest_time": "DELTA_BINARY_PACKED"},
    )


@cache
def page_bomb() -> bytes:
    """One payload of 530 MB of the same byte."""
    data = table(1)
    return written(data.set_column(6, "payload", pa.array([b"x" * (530 << 20)])), use_dictionary=False)


def without_bounds() -> bytes:
    """Each value repeats the one before it: the encoding needs a byte or two for that."""
    large = pa.array([b"x" * 1_000_000] * 1_000)
    data = table(1_000).set_column(6, "payload", large)
    return written(data, use_dictionary=False, column_encoding={"payload": "DELTA_BYTE_ARRAY"})


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def zigzag(value: int) -> bytes:
    return varint(value << 1 ^ value >> 63)


def footer(elements: list[bytes], rows: int = 10, groups: bytes = b"\x19\x0c") -> bytes:
    """A file of a footer alone: version, schema, rows, row groups."""
    size = bytes((len(elements) << 4 | 12,)) if len(elements) < 15 else b"\xfc" + varint(len(elements))
    meta = b"\x15\x02\x19" + size + b"".join(elements) + b"\x16" + zigzag(rows) + groups + b"\x00"
    return b"PAR1" + meta + struct.pack("<I", len(meta)) + b"PAR1"


def element(children: int | None) -> bytes:
    """A group `a` of so many children, or a column of INT32."""
    if children is None:
        return b"\x15\x02\x25\x00\x18\x01a\x00"
    return b"\x35\x00\x18\x01a\x15" + zigzag(children) + b"\x00"


def deep_schema() -> bytes:
    return footer([element(1)] * DEEP + [element(None)])


def wide_schema() -> bytes:
    return footer([element(DEEP)] + [element(None)] * DEEP)


def deep_headers() -> bytes:
    """Structs within structs that no reader knows."""
    meta = b"\xfc\x01" + b"\x1c" * DEEP
    return b"PAR1" + meta + struct.pack("<I", len(meta)) + b"PAR1"


def padded_pages(count: int, padding: int) -> bytes:
    """Pages of nothing, each with a header of so many bytes that no reader needs."""
    header = (
        b"\x15\x00" * 3 + b"\x2c\x15\x02\x15\x00\x00" + b"\x49\xf3" + varint(padding) + bytes(padding + 1)
    )
    length = zigzag(count * len(header))
    meta = b"\x15\x02\x35\x00\x16\x02\x16" + length + b"\x16" + length + b"\x26\x08\x00"
    groups = b"\x19\x1c\x19\x1c\x26\x08\x1c" + meta + b"\x00\x16" + length + b"\x16" + zigzag(10) + b"\x00"
    data = footer([element(1), element(None)], groups=groups)
    return data[:4] + header * count + data[4:]


def patched(data: bytes, old: bytes, new: bytes) -> bytes:
    """The same file with other bytes at one place of its footer, of the same length."""
    assert len(old) == len(new)
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    assert data.count(old, start) >= 1
    return data[:start] + data[start:].replace(old, new, 1)


def lying_rows() -> bytes:
    """The footer has 10 rows, its row group a million."""
    data = written(table(1_000_000), use_dictionary=False)
    # the length of a number is part of its encoding: a longer one of the same value keeps the offsets
    return patched(data, zigzag(1_000_000), b"\x94\x80\x00")


def lying_size() -> bytes:
    """The footer gives a few bytes for a column of 530 MB."""
    data = page_bomb()
    meta = pq.read_metadata(io.BytesIO(data)).row_group(0)
    old, total = zigzag(meta.column(6).total_uncompressed_size), zigzag(meta.total_byte_size)
    small = b"\x80" * (len(old) - 1) + b"\x00"
    data = patched(data, old, small)
    return data if total == old else patched(data, total, b"\x80" * (len(total) - 1) + b"\x00")


def typed_fixed() -> bytes:
    """Null values of a width of 1 MB: there is nothing of them in the file."""
    data = table(10).append_column("wide", pa.nulls(10, pa.binary(1 << 20)))
    return written(data)


Make = Callable[[], bytes]
NDJSON: dict[str, tuple[Make, int, str]] = {  # object, rows that its key promises, reason
    "nested objects": (deep_object, 1, "nested deeper than 16"),
    "nested lists": (deep_list, 1, "nested deeper than 16"),
    "nested in a later row": (deep_later, 2, "nested deeper than 16"),
    "nested behind quotes": (deep_behind_a_quote, 1, "nested deeper than 16"),
    "nested in a known column": (deep_in_a_known_column, 1, "nested deeper than 16"),
    "brackets that stay open": (unbalanced, 1, "nested deeper than 16"),
    "a line of 100 MB": (long_line, 1, "null in column gateway"),
    "a million columns": (many_columns, 1, "too many columns"),
    "columns of one row each": (columns_of_their_own, 20_000, "too many columns"),
    "columns that look like separators": (names_with_colons, 20_000, "too many columns"),
    "a gzip bomb": (bomb, 10, "unpacks to more than"),
    "a million gzip members": (members, 10, "more gzip members than the 10 rows"),
    "members that are bombs": (member_bombs, 200, "unpacks to more than"),
    "a number of 200,000 digits": (lambda: number("1" * 200_000), 1, ""),
    "a number of a large exponent": (lambda: number("1e999999999"), 1, ""),
    "not a number": (lambda: number("NaN"), 1, ""),
    "infinity": (lambda: number("-Infinity"), 1, ""),
    "bytes that are not UTF-8": (bad_utf8, 1, ""),
    "half a surrogate pair": (surrogates, 1, ""),
}
PARQUET: dict[str, tuple[Make, int, str]] = {
    "a dictionary of one value": (dictionary_bomb, 100_000, "unpacks to more than"),
    "a column of Arrow's dictionary type": (
        lambda: dictionary_bomb(typed=True),
        100_000,
        "unpacks to more than",
    ),
    "rows that cost nothing": (constant_rows, 20_000_000, "promises 20000000 rows"),
    "a page bomb": (page_bomb, 1, "unpacks to more than"),
    "a repeating encoding": (without_bounds, 1_000, "whose output has no bound"),
    "a deep schema": (deep_schema, 10, "its schema has 100001 elements"),
    "a schema of 500 levels": (
        lambda: footer([element(1)] * 500 + [element(None)]),
        10,
        "its schema is nested deeper than 16",
    ),
    "a wide schema": (wide_schema, 10, "its schema has 100001 elements"),
    "deep headers": (deep_headers, 10, "its headers are nested deeper than 16"),
    "a large header of a page": (lambda: padded_pages(1, 1 << 20), 10, "a header is too large"),
    "large headers of many pages": (
        lambda: padded_pages(300, 60_000),
        10,
        "the headers of its pages have more",
    ),
    "a footer that lies about its rows": (lying_rows, 10, "rows"),
    "a footer that lies about a size": (lying_size, 1, "unpacks to more than"),
    "wide nulls": (typed_fixed, 10, "it holds fixed_size_binary"),
}
