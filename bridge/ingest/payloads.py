"""Payloads as JSON text, and the schema of typed columns.

`texts` runs in the executors: it converts every payload to JSON text, which Spark's `from_json` then types. A
payload that is not UTF-8 or not CBOR gives None. So does one that is larger than `MAX_TEXT` or nested deeper
than `MAX_DEPTH`, as CBOR or as JSON, and CBOR whose parts refer to each other.

A schema is Spark DDL ("temp DOUBLE, unit STRING"), given or inferred from a sample: integers are BIGINT,
other numbers DOUBLE, lists ARRAY, objects STRUCT. A value whose type differs between samples is STRING, which
takes any JSON value as text. So is a value that is nested too deep, and an object within the payload whose
keys cannot all be fields: keys that are empty, hold a backtick, or differ only in case, which some engines
ignore.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from datetime import date, datetime
from typing import Any

from bridge.ingest.bounds import deeper
from bridge.ingest.columns import PARTITIONS

MAX_TEXT = 16 << 20  # bytes of a payload or of its JSON: Spark holds several copies of each in memory
MAX_DEPTH = 100  # of nesting: later readers of JSON and VARIANT recurse once per level
MAX_FIELDS = 1000  # of an inferred schema, on all levels: any device can add to it
TAG = 6
REFERENCES = frozenset((25, 28, 29, 256))  # tags: stringref, shareable, sharedref, stringref namespace
# bytes that may be the head of such a tag, in any width; other data may contain them too
_REFERENCE = re.compile(
    rb"\xd8[\x19\x1c\x1d]|\xd9(?:\x00[\x19\x1c\x1d]|\x01\x00)|\xda\x00\x00|\xdb\x00\x00\x00\x00\x00\x00"
)
LEVELS = 32  # of nesting that become types: engines read a schema recursively
KEYS = ("gateway", "stream", "epoch", "sequence_number", "ingest_time", "topic")

Shape = str | dict[str, Any] | list[Any]  # a DDL type, a struct, or [shape of the elements]


def texts(payloads: Iterable[bytes], form: str) -> list[str | None]:
    """Return the JSON text of each payload, or None."""
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
    # a hostile payload can raise nearly anything in a decoder, and must not stop the other rows
    except Exception:
        return None
    if len(text) > MAX_TEXT or (len(text) > MAX_DEPTH and deeper(text.encode(), MAX_DEPTH)):
        return None
    return text


def _refers(payload: bytes) -> bool:
    """Return whether the payload has a reference between its parts: a few bytes could expand without limit.

    Goes from one data item head to the next (RFC 8949, section 3), at all levels; linear in the length.
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
        if major in (2, 3) and info < 28:  # a string; in one of indefinite length each chunk has a head
            pos += number
    return False


def _plain(value: Any) -> Any:
    """Convert a CBOR value that JSON lacks."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, date | datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def infer(sample: Iterable[str | None]) -> str:
    """Return the DDL that fits all samples that are JSON objects; empty if these have no keys."""
    merged: dict[str, Any] = {}
    for text in sample:
        try:
            value = json.loads(text or "")
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            more = _merge_structs(merged, _shape(value))
            if _fields(more) <= MAX_FIELDS:  # else the sample is ignored
                merged = more
    # keys of the payload itself may differ only in case: each becomes a column with its own name
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
    """Name a column for each field of the payload: lower case and plain, for Athena, and unique."""
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
