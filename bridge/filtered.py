"""The declaration of an exported object: the numbers that filters have left out.

An object covers all numbers first..last of its name. Numbers that the export's `topics` or `reduce`, or a
plugin, has left out have no row. The object declares them, so that they do not count as lost. Its rows are
exactly the other numbers. An object from which nothing was left out has no declaration.

    declaration = version u8 (1) | count u32 (big-endian) | bitmap, compressed (zlib, RFC 1950)

The bitmap has one bit for each number of first..last, padded to a whole byte with 0. Bit n % 8 of byte n // 8
(bit 0 is the lowest) is 1 if the number first + n was left out. `count` is the number of such bits. The
declaration is in

* `ndjson.gz`: the subfield `SB` of the extra field in the header of the first gzip member (RFC 1952, section
  2.3.1.1), which every gzip reader skips;
* `parquet`: the key-value metadata `streambridge.filtered`, in base64 (RFC 4648, section 4).

The extra field holds at most 65,535 bytes. An object with a declaration covers at most `MAX_SPAN` numbers.
Their bitmap takes half of that space even if it cannot be compressed.

This module has no dependencies, because Spark executors import it too.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

MAX_SPAN = 1 << 18  # numbers that an exporter's object covers if it lacks some
PARQUET_KEY = b"streambridge.filtered"
_VERSION = 1
_HEAD = struct.Struct(">BI")
_ID = b"SB"
_MAGIC = b"\x1f\x8b"
_HEADER = 10  # bytes of a gzip header up to the extra field
_FLAGS, _FEXTRA = 3, 4  # where the flags are, and the one of an extra field


class LaterVersionError(ValueError):
    """Raised for a declaration of a later version."""


class LeftOut(NamedTuple):
    """The numbers that an object lacks: how many, and their bits."""

    number: int
    bitmap: bytes


def declaration(first: int, last: int, present: Sequence[int]) -> bytes:
    """The declaration of an object first..last with the rows `present`, ascending; empty if it lacks none.

    Raises ValueError if it lacks some and covers more than `MAX_SPAN` numbers.
    """
    span = last - first + 1
    if len(present) == span:
        return b""
    if span > MAX_SPAN:
        raise ValueError(f"an object that lacks numbers covers at most {MAX_SPAN}, not {span}")
    digits = bytearray(b"1") * span  # the last number first, as in any binary number
    for number in present:
        digits[last - number] = 48
    bitmap = int(digits, 2).to_bytes((span + 7) // 8, "little")
    return _HEAD.pack(_VERSION, span - len(present)) + zlib.compress(bitmap)


def left_out(declared: bytes, first: int, last: int) -> LeftOut:
    """Read the declaration of an object first..last; nothing in it is trusted.

    Takes at most one bit of memory for each number. Raises LaterVersionError, and ValueError for anything
    that `declaration` cannot have made of these numbers.
    """
    span = last - first + 1
    if not declared:
        raise ValueError("its declaration of left-out numbers is empty")
    if declared[0] != _VERSION:
        raise LaterVersionError(
            f"its declaration of left-out numbers has version {declared[0]}, and {_VERSION} is known here; "
            "upgrade streambridge"
        )
    if len(declared) < _HEAD.size:
        raise ValueError("its declaration of left-out numbers is cut off")
    count = _HEAD.unpack_from(declared)[1]
    size = (span + 7) // 8
    unpacker = zlib.decompressobj()
    try:
        bitmap = unpacker.decompress(declared[_HEAD.size :], size + 1)
    except zlib.error as error:
        raise ValueError(f"its declaration of left-out numbers is damaged ({error})") from None
    if len(bitmap) != size or not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"its declaration of left-out numbers has not one bit for each of {span} numbers")
    bits = int.from_bytes(bitmap, "little")
    if bits >> span or bits.bit_count() != count or not 0 < count < span:
        raise ValueError(f"its declaration of left-out numbers says {count} of {span}, and its bits do not")
    return LeftOut(count, bitmap)


def with_extra(content: bytes, declared: bytes) -> bytes:
    """Put a declaration into the header of a gzip file that has no extra field."""
    field = _ID + struct.pack("<H", len(declared)) + declared
    flags = bytes([content[_FLAGS] | _FEXTRA])
    head = content[:_FLAGS] + flags + content[_FLAGS + 1 : _HEADER] + struct.pack("<H", len(field))
    return head + field + content[_HEADER:]


def from_extra(content: bytes) -> bytes | None:
    """The declaration in a gzip file, or None. Raises ValueError for a malformed extra field."""
    if content[:2] != _MAGIC or len(content) < _HEADER + 2 or not content[_FLAGS] & _FEXTRA:
        return None
    at = _HEADER + 2
    end = at + int.from_bytes(content[_HEADER:at], "little")
    found: bytes | None = None
    if end > len(content):
        raise ValueError("truncated: its extra field has no end")
    while at < end:
        start = at + 4
        name, size = content[at : at + 2], int.from_bytes(content[at + 2 : start], "little")
        at = start + size
        if start > end or at > end:
            raise ValueError("its extra field is malformed")
        if name == _ID:
            if found is not None:
                raise ValueError("it declares left-out numbers twice")
            found = content[start:at]
    return found
