"""Payloads as values: JSON or CBOR to Python, and Python back to JSON text.

`decoded` gives the exact value of a payload, or raises `Misfit` with the reason. Nothing of a value is lost:

* A number with a fraction or an exponent is a float if that prints the same number, else a Decimal.
* An integer is an int; one of thousands of digits is a `Huge`.
* A payload is refused if an object in it has a key twice (RFC 8259, section 4, leaves open which one counts),
  or if its text has an unpaired surrogate, which UTF-8 cannot express.

A payload that is larger than `MAX_TEXT` or nested deeper than `MAX_DEPTH`, as CBOR or as JSON, is refused
too, and so is CBOR whose parts refer to each other, or that is slow to decode: numbers of very many bytes,
and sets and keys of maps whose hashes a payload could choose. CBOR's byte strings become base64, its times
ISO 8601, its other keys text.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from bridge.ingest.bounds import deeper

MAX_TEXT = 16 << 20  # bytes of a payload or of its JSON: a worker holds several copies of each in memory
MAX_DEPTH = 100  # of nesting: later readers of JSON and VARIANT recurse once per level
TAG = 6
REFERENCES = frozenset((25, 28, 29, 256))  # tags: stringref, shareable, sharedref, stringref namespace
BIGNUMS = frozenset((2, 3))  # tags
SET = 258  # tag
MAX_BIGNUM = 1786  # bytes: no longer integer has the 4,300 digits at most that Python converts to text
BREAK = 0xFF  # ends an item of indefinite length
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Misfit(Exception):  # noqa: N818  (named for what happened)
    """Raised for a payload, or a value in it, that has no place; the message is the reason."""


class Huge(Decimal):
    """An integer with more digits than Python converts to an int."""


def decoded(payload: bytes, form: str = "json") -> Any:
    """Return the value of a payload in the format `form`, "json" or "cbor"; raises Misfit."""
    if len(payload) > MAX_TEXT:
        raise Misfit(f"larger than {MAX_TEXT >> 20} MiB")
    if not payload:
        raise Misfit("empty")
    return parsed(_from_cbor(payload), _NUMBERS) if form == "cbor" else parsed(payload, {})


def parsed(text: bytes, constants: Mapping[str, float]) -> Any:
    """Return the value of JSON text; `constants` are the names of numbers that JSON lacks. Raises Misfit."""
    if len(text) > MAX_DEPTH and deeper(text, MAX_DEPTH):
        raise Misfit(f"nested deeper than {MAX_DEPTH} levels")
    try:
        plain = text.decode()
        try:
            value = (_decoder(constants) if constants else _DECODER).decode(plain)
        except ValueError as error:
            if isinstance(error, json.JSONDecodeError):
                raise
            value = _decoder(constants, _integer).decode(plain)
    except (ValueError, LookupError, RecursionError):
        raise Misfit("not JSON") from None
    if _SURROGATE.search(plain):
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise Misfit("its text has an unpaired surrogate") from None
    return value


def text_of(value: Any) -> str:
    """Return a value as compact JSON. NaN and the infinities, which CBOR may have, become strings."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError):  # a Decimal or one of these is in it
        return _exact(value)


def _exact(value: Any) -> str:
    match value:
        case dict():
            return "{" + ",".join(f"{text_of(key)}:{_exact(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_exact, value)) + "]"
        case Decimal():
            return str(value)
        case float() if not math.isfinite(value):
            return f'"{_NAMES[str(value)]}"'
        case _:
            return json.dumps(value, ensure_ascii=False)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Misfit("an object has a key twice")
    return found


def _number(text: str) -> float | Decimal:
    found = float(text)
    return found if repr(found) == text else Decimal(text)


def _integer(text: str) -> int | Huge:
    return int(text) if len(text) < 100 else Huge(text)


_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NAMES = {str(value): name for name, value in _NUMBERS.items()}


def _decoder(constants: Mapping[str, float], integer: Callable[[str], Any] | None = None) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_object,
        parse_float=_number,
        parse_int=integer,
        parse_constant=constants.__getitem__,
    )


_DECODER = _decoder({})


def _from_cbor(payload: bytes) -> bytes:
    """Return CBOR as JSON text."""
    import cbor2

    try:
        entries = _entries(payload)  # first: a reference could expand without limit
        value = cbor2.loads(payload)
        if _count(value) != entries:
            raise Misfit("an object has a key twice")
        text = json.dumps(value, default=_plain).encode()
    except Misfit:
        raise
    # a hostile payload can raise nearly anything in a decoder, and must not stop the other rows
    except Exception:
        raise Misfit("not CBOR") from None
    if len(text) > MAX_TEXT:
        raise Misfit(f"larger than {MAX_TEXT >> 20} MiB as JSON")
    return text


def _entries(payload: bytes) -> int:
    """Return the number of map entries, on all levels, of the one data item that fills the payload.

    Goes from one head to the next (RFC 8949, section 3); linear in the length. Raises Misfit for a reference
    between parts of the payload, for what is slow to decode and for bytes after the item, and IndexError if
    it is truncated.
    """
    entries = pos = 0
    # items left, or -1 and less until a break; whether it is a map; whether it is a number of many bytes
    levels: list[tuple[list[int], bool, bool]] = [([1], False, False)]
    while levels:
        level, is_map, is_bignum = levels[-1]
        if not level[0]:
            levels.pop()
            continue
        major, info = payload[pos] >> 5, payload[pos] & 31
        pos += 1
        if payload[pos - 1] == BREAK and level[0] < 0:
            entries += is_map * (-1 - level[0]) // 2
            levels.pop()
            continue
        # a device could choose such keys so that all of their hashes are the same; those of text are random
        if is_map and level[0] % 2 == (level[0] < 0) and major in (4, 5, TAG):
            raise Misfit("a key is a list, an object or a tagged value")
        level[0] -= 1
        number = info
        if 24 <= info < 28:
            width = 1 << info - 24
            number = int.from_bytes(payload[pos : pos + width], "big")
            pos += width
        if is_bignum and major == 2 and (info == 31 or number > MAX_BIGNUM):
            raise Misfit(f"a number of more than {MAX_BIGNUM} bytes")
        if major in (2, 3, 4, 5) and info == 31:
            levels.append(([-1], major == 5, False))
        elif major in (2, 3):
            pos += number
        elif major in (4, 5):
            entries += number * (major - 4)
            levels.append(([number * (major - 3)], major == 5, False))
        elif major == TAG:
            if number in REFERENCES:
                raise Misfit("CBOR whose parts refer to each other")
            if number == SET:
                raise Misfit("a set")
            levels.append(([1], False, is_bignum or number in BIGNUMS))
    if pos != len(payload):
        raise Misfit("not CBOR")
    return entries


def _count(value: Any) -> int:
    """Return the number of entries of all maps in a decoded value."""
    if isinstance(value, Mapping):
        return len(value) + sum(map(_count, value)) + sum(map(_count, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return sum(map(_count, value))
    return _count(value.value) if hasattr(value, "tag") else 0  # a CBORTag


def _plain(value: Any) -> Any:
    """Convert a CBOR value that JSON lacks."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, date | datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)
