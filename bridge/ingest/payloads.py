"""Payloads as JSON text, and the schema of typed columns.

`texts` runs in the executors: it makes JSON text of every payload, for Spark's `from_json` to type. A
payload that is not JSON text (UTF-8) or not CBOR gives None. So does one that is larger than `MAX_TEXT` or
nested deeper than `MAX_DEPTH`, as CBOR or as JSON, and CBOR whose parts refer to each other.

A schema is Spark DDL ("temp DOUBLE, unit STRING"), given or inferred from a sample: whole numbers are
BIGINT, numbers DOUBLE, lists ARRAY, objects STRUCT; what is not the same in all samples is STRING, which
takes any JSON value as its text. So is an object within the payload whose keys cannot be fields: they differ
in case only, which engines tell apart or not, or are empty or hold a backtick; and what is nested too deep.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from datetime import date, datetime
from typing import Any

from bridge.ingest.columns import PARTITIONS
from bridge.ingest.nesting import deeper

MAX_TEXT = 16 << 20  # bytes of a payload or of its JSON: Spark has each of them in memory several times
MAX_DEPTH = 100  # of nesting: what reads JSON or VARIANT later on recurses once for each level
MAX_FIELDS = 1000  # of an inferred schema, on all levels: any device may add to it
TAG = 6
REFERENCES = frozenset((25, 28, 29, 256))  # tags: stringref, shareable, sharedref, stringref namespace
# what may be the head of one of them, in any width; it may be a part of other data as well
_REFERENCE = re.compile(
    rb"\xd8[\x19\x1c\x1d]|\xd9(?:\x00[\x19\x1c\x1d]|\x01\x00)|\xda\x00\x00|\xdb\x00\x00\x00\x00\x00\x00"
)
LEVELS = 32  # of nesting that become types: engines read schemas recursively
KEYS = ("gateway", "stream", "epoch", "sequence_number", "ingest_time", "topic")

Shape = str | dict[str, Any] | list[Any]  # a DDL type, a struct, or [shape of the elements]


def texts(payloads: Iterable[bytes], form: str) -> list[str | None]:
    """JSON text of each payload, or None."""
    return [_cbor(payload) if form == "cbor" else _utf8(payload) for payload in payloads]


def _utf8(payload: bytes) -> str | None:
    if len(payload) > MAX_TEXT or (len(payload) > MAX_DEPTH and deeper(payload, MAX_DEPTH)):
        return None
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return None


def _cbor(payload: bytes) -> str | None:
    import cbor2

    if len(payload) > MAX_TEXT or (_REFERENCE.search(payload) and _refers(payload)):
        return None
    try:
        text = json.dumps(cbor2.loads(payload), default=_plain)
    # a hostile payload can raise nearly anything in a decoder, and it is one row of many
    except Exception:
        return None
    if len(text) > MAX_TEXT or (len(text) > MAX_DEPTH and deeper(text.encode(), MAX_DEPTH)):
        return None
    return text


def _refers(payload: bytes) -> bool:
    """Whether something in it is a reference to another part: a few bytes could stand for any number.

    Goes from head to head (RFC 8949, section 3), whatever is nested in what; linear in the length.
    """
    pos = 0
    while pos < len(payload):
        major, info = payload[pos] >> 5, payload[pos] & 31
        pos += 1
        number = info
        if 24 <= info < 28:
            width = 1 << info - 24
            number = int.from_bytes(payload[pos : pos + width], "big")
            pos += width
        if major == TAG and number in REFERENCES:
            return True
        if major in (2, 3) and info < 28:  # a string; of one in pieces the pieces have heads of their own
            pos += number
    return False


def _plain(value: Any) -> Any:
    """What CBOR has and JSON has not."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, date | datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def infer(sample: Iterable[str | None]) -> str:
    """The DDL that fits all samples that are JSON objects; empty when these have no keys."""
    merged: dict[str, Any] = {}
    for text in sample:
        try:
            value = json.loads(text or "")
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            more = _merge_structs(merged, _shape(value))
            if (
                _fields(more) <= MAX_FIELDS
            ):  # what has more keys than a table should have columns teaches none
                merged = more
    # here keys may differ in case only: each becomes a column with a name of its own
    return ", ".join(f"{_quoted(name)} {_ddl(shape)}" for name, shape in merged.items() if name)


def _fields(shape: Any) -> int:
    if isinstance(shape, dict):
        return len(shape) + sum(map(_fields, shape.values()))
    return _fields(shape[0]) if isinstance(shape, list) else 0


def _shape(value: Any, levels: int = LEVELS) -> Any:
    match value:
        case bool():
            return "BOOLEAN"
        case int():
            return "BIGINT" if -(2**63) <= value < 2**63 else "STRING"
        case float():
            return "DOUBLE"
        case dict() if levels:
            return {name: _shape(item, levels - 1) for name, item in value.items()}
        case list() if value and levels:
            shape = _shape(value[0], levels - 1)
            for item in value[1:]:
                shape = _merge(shape, _shape(item, levels - 1))
            return [shape]
        case None:
            return None
        case _:
            return "STRING"


def _merge(one: Any, other: Any) -> Any:
    if one is None or other is None or one == other:
        return other if one is None else one
    if {str(one), str(other)} == {"BIGINT", "DOUBLE"}:
        return "DOUBLE"
    if isinstance(one, dict) and isinstance(other, dict):
        return _merge_structs(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return [_merge(one[0], other[0])]
    return "STRING"


def _merge_structs(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _merge(one.get(name), other.get(name)) for name in [*one, *(n for n in other if n not in one)]
    }


def _ddl(shape: Any) -> str:
    match shape:
        case dict():
            names = {name.lower() for name in shape if name and "`" not in name}
            if not names or len(names) < len(shape):
                return "STRING"
            return "STRUCT<" + ", ".join(f"`{name}`: {_ddl(item)}" for name, item in shape.items()) + ">"
        case list():
            return f"ARRAY<{_ddl(shape[0])}>"
        case _:
            return shape or "STRING"


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def column_names(
    fields: Iterable[str], taken: Iterable[str] = (*KEYS, *PARTITIONS, "payload", "reason", "fits")
) -> dict[str, str]:
    """A column for each field of the payload: lower case and plain, for Athena, and no name twice."""
    used = set(taken)
    names: dict[str, str] = {}
    for field in fields:
        plain = re.sub(r"\W", "_", field.lower(), flags=re.ASCII) or "_"
        name = f"payload_{plain}" if plain in taken else plain
        number = 2
        while name in used:
            name = f"{plain}_{number}"
            number += 1
        used.add(name)
        names[field] = name
    return names
