"""Bounds on the nesting of JSON and the memory of Parquet, known before a library decodes any of it.

Arrow trusts a file: it recurses once per level of the schema, allocates the size that a page header gives,
and repeats a dictionary value as often as rows refer to it. The sizes in the footer bound none of this,
because Arrow does not compare them with the pages. So this module reads the headers where Arrow reads them,
in Thrift's compact protocol: the footer (`FileMetaData` of parquet.thrift), and the header of every page. It
bounds the footer and these headers, the depth and number of columns, the number of pages, and the size that
they unpack to. Only a dictionary can make values larger than their pages; `check_parquet` returns the number
of rows that can be decoded together and still fit.

Encodings whose output is not bounded by the size of the page (DELTA_LENGTH_BYTE_ARRAY, DELTA_BYTE_ARRAY) are
refused; no gateway writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeVar

from bridge.ingest.errors import BadObject

MAGIC = b"PAR1"
END = 8  # bytes: the length of the footer, and the magic
MAX_FOOTER = 4 << 20  # bytes: 1,000 row groups of seven columns take a quarter of it
MAX_ELEMENTS = 1000  # of a schema: columns, and the fields nested in them
MAX_DEPTH = 16  # of a schema, and of Thrift's structs
MAX_PAGES = 100_000
MAX_HEADER = 64 << 10  # bytes of the header of a page: Arrow writes 4 KiB of bounds at most
MAX_HEADERS = 16 << 20  # bytes of all of them
BYTE_ARRAYS = (6, 7)  # physical types: BYTE_ARRAY, FIXED_LEN_BYTE_ARRAY
DICTIONARY_PAGE = 2
INDEX_PAGE = 1
# PLAIN, PLAIN_DICTIONARY, RLE, BIT_PACKED, DELTA_BINARY_PACKED, RLE_DICTIONARY, BYTE_STREAM_SPLIT
ENCODINGS = frozenset({0, 2, 3, 4, 5, 8, 9})

T = TypeVar("T")
Struct = dict[int, Any]  # the fields of a Thrift struct by their ids
# in text without escapes; an unterminated string extends to the end of its line
_STRING = re.compile(rb'"[^"\n]*"?')
_OTHERS = bytes(byte for byte in range(256) if byte not in b"{}[]\n")


def deeper(text: bytes, levels: int) -> bool:
    """Return whether any line is nested deeper, or has brackets that do not match. Linear in the length.

    A parser that stops at an error has never gone deeper than this function reports.
    """
    if text.count(b"{") + text.count(b"[") <= levels:
        return False
    # escapes from the left: a quote after an even number of backslashes ends its string
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = _STRING.sub(b"", plain).translate(None, _OTHERS)
    for _ in range(levels):
        before = len(brackets)
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
        if len(brackets) == before:
            break
    return bool(brackets.strip())


class Footer:
    """The footer of a Parquet file; raises BadObject if there is none, or it is too large."""

    def __init__(self, data: bytes) -> None:
        if len(data) < len(MAGIC) + END or data[:4] != MAGIC or data[-4:] != MAGIC:
            raise BadObject("truncated, or not Parquet: the magic bytes are missing")
        length = int.from_bytes(data[-END:-4], "little")
        self.data, self.start = data, len(data) - END - length
        if length > MAX_FOOTER or self.start < len(MAGIC):
            raise BadObject(f"its footer of {length} bytes is larger than {MAX_FOOTER}, or than the object")
        self.fields: Struct = _Reader(data, len(data) - END).struct(self.start)[0]

    def metadata(self, key: bytes) -> bytes | None:
        """Return a value of the key-value metadata; None if it is not there."""
        pairs = _list(self.fields, 5) if 5 in self.fields else []
        found = [bytes(_field(pair, 2, memoryview)) for pair in pairs if pair.get(1) == key]
        if len(found) > 1:
            raise BadObject(f"its metadata has {key.decode()} twice")
        return found[0] if found else None


def check_parquet(footer: Footer, rows: int, budget: int) -> int:
    """Return how many rows can be decoded together within `budget` bytes, whatever the pages hold.

    Raises BadObject unless the file has exactly `rows` rows, and its pages unpack to at most `budget` bytes.
    """
    data, start = footer.data, footer.start
    groups = _list(footer.fields, 4)
    columns = _check_schema(_list(footer.fields, 2))
    counted = [_int(footer.fields, 3), sum(_int(group, 3) for group in groups)]
    if any(found != rows for found in counted) or any(_int(group, 3) < 0 for group in groups):
        found = " or ".join(map(str, dict.fromkeys(counted)))
        raise BadObject(f"{found} rows, but the key promises {rows}")
    if rows * columns * 8 > budget:
        raise BadObject(f"unpacks to more than {budget} bytes: {rows} rows of {columns} columns")
    left, pages, headers, repeated = budget, MAX_PAGES, MAX_HEADERS, 0
    for group in groups:
        values = 0  # bytes: the largest dictionary values that one row of this group can refer to
        for column in _list(group, 1):
            if 1 in column:
                raise BadObject("a column is in another file")
            meta = _struct(column, 3)
            largest = 0
            for kind, size, header in _pages(data, meta, start):
                pages -= 1
                left -= size
                headers -= header
                if pages < 0 or left < 0:
                    limit = f"{MAX_PAGES} pages" if pages < 0 else f"{budget} bytes"
                    raise BadObject(f"unpacks to more than {limit}")
                if headers < 0:
                    raise BadObject(f"the headers of its pages have more than {MAX_HEADERS} bytes")
                if kind == DICTIONARY_PAGE and _int(meta, 1) in BYTE_ARRAYS:
                    largest = max(largest, size)
            values += largest
        repeated = max(repeated, values)
    if repeated * rows <= budget:
        return rows
    return max(1, budget // 8 // repeated)  # the batches read before are in memory as well


def _check_schema(elements: list[Any]) -> int:
    """Return the number of columns; raises BadObject if the schema is too deep, too large, or not a tree."""
    if not 2 <= len(elements) <= MAX_ELEMENTS:
        raise BadObject(f"its schema has {len(elements)} elements, not 2 to {MAX_ELEMENTS}")
    open_groups: list[int] = []  # how many children each group still lacks
    leaves = 0
    for at, element in enumerate(elements):
        if at and not open_groups:
            raise BadObject("its schema is not a tree")
        children = _int(element, 5) if 5 in element else 0
        leaves += not children
        if open_groups:
            open_groups[-1] -= 1
        if children < 0 or len(open_groups) >= MAX_DEPTH:
            raise BadObject(f"its schema is nested deeper than {MAX_DEPTH}")
        open_groups.append(children)
        while open_groups and not open_groups[-1]:
            open_groups.pop()
    if open_groups:
        raise BadObject("its schema is not a tree")
    return leaves


def _pages(data: bytes, meta: Struct, end_of_pages: int) -> Iterator[tuple[int, int, int]]:
    """Yield the type, the unpacked size and the size of the header of each page of a column chunk."""
    pos, length = _int(meta, 9), _int(meta, 7)
    if 11 in meta and 0 < _int(meta, 11) < pos:  # the dictionary comes before the data
        pos = _int(meta, 11)
    end = pos + length
    if pos < 0 or length < 0 or end > end_of_pages:
        raise BadObject("truncated: a column reaches beyond the object")
    while pos < end:
        began = pos
        header, pos = _Reader(data, min(end, began + MAX_HEADER)).struct(began)
        used = pos - began
        kind, size, packed = _int(header, 1), _int(header, 2), _int(header, 3)
        if size < 0 or not 0 <= packed <= end - pos:
            raise BadObject("truncated: a page reaches beyond its column")
        pos += packed
        if kind != INDEX_PAGE:
            inner = _struct(header, {0: 5, DICTIONARY_PAGE: 7, 3: 8}.get(kind, 5))
            encoding = _int(inner, 4 if kind == 3 else 2)
            if encoding not in ENCODINGS:
                raise BadObject(f"a page has the encoding {encoding}, whose output has no bound")
        yield kind, size, used


def _field(fields: Struct, name: int, kind: type[T]) -> T:
    value = fields.get(name)
    if not isinstance(value, kind):
        raise BadObject(f"its headers are not Parquet's: field {name} is not of type {kind.__name__}")
    return value


def _int(fields: Struct, name: int) -> int:
    return _field(fields, name, int)


def _struct(fields: Struct, name: int) -> Struct:
    return _field(fields, name, dict)


def _list(fields: Struct, name: int) -> list[Struct]:
    items = _field(fields, name, list)
    if not all(isinstance(item, dict) for item in items):
        raise BadObject(f"its headers are not Parquet's: field {name} is not a list of structs")
    return items


class _Reader:
    """Thrift's compact protocol, as far as Parquet uses it; raises BadObject for anything else."""

    def __init__(self, data: bytes, end: int) -> None:
        self._data, self._end = data, end
        self._view = memoryview(data)

    def struct(self, pos: int, depth: int = 0) -> tuple[Struct, int]:
        """Return the struct at `pos` and its end. Repeated fields are refused: Arrow would use the last."""
        if depth > MAX_DEPTH:
            raise BadObject(f"its headers are nested deeper than {MAX_DEPTH}")
        fields: Struct = {}
        name = 0
        while True:
            head, pos = self._byte(pos)
            if not head:
                return fields, pos
            if head >> 4:
                name += head >> 4
            else:
                name, pos = self._signed(pos)
            kind = head & 15
            if name in fields:
                raise BadObject(f"its headers have the field {name} twice")
            if kind in (1, 2):  # the type itself holds a boolean
                fields[name] = kind == 1
            else:
                fields[name], pos = self._value(kind, pos, depth)

    def _value(self, kind: int, pos: int, depth: int) -> tuple[Any, int]:
        match kind:
            case 4 | 5 | 6:
                return self._signed(pos)
            case 1 | 2 | 3:
                return self._byte(pos)
            case 8:
                length, pos = self._varint(pos)
                end = self._skip(pos, length)
                return self._view[pos:end], end  # most are not needed: names and statistics
            case 12:
                return self.struct(pos, depth + 1)
            case 9 | 10:
                head, pos = self._byte(pos)
                length, of = head >> 4, head & 15
                if length == 15:
                    length, pos = self._varint(pos)
                items = []
                for _ in range(length):
                    item, pos = self._value(of, pos, depth + 1)
                    items.append(item)
                return items, pos
            case 7:
                return None, self._skip(pos, 8)
        raise BadObject(f"its headers are not Parquet's: type {kind}")

    def _skip(self, pos: int, length: int) -> int:
        if length > self._end - pos:
            raise self._cut()
        return pos + length

    @staticmethod
    def _cut() -> BadObject:
        return BadObject("truncated, or a header is too large: its headers end too early")

    def _byte(self, pos: int) -> tuple[int, int]:
        if pos >= self._end:
            raise self._cut()
        return self._data[pos], pos + 1

    def _varint(self, pos: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte, pos = self._byte(pos)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value, pos
            if shift > 63:
                raise BadObject("its headers are not Parquet's: a number is too long")

    def _signed(self, pos: int) -> tuple[int, int]:
        value, pos = self._varint(pos)
        return value >> 1 ^ -(value & 1), pos
