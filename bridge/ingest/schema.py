"""The columns of a refined table: types inferred from a sample, names, and wider columns.

A schema is Spark DDL ("temp DOUBLE, unit STRING"), given or inferred from a sample: numbers are DOUBLE, but
BIGINT if all are integers and some are beyond 2^53; lists are ARRAY, objects STRUCT. A value whose type
differs between samples is STRING, which takes any JSON value as text. So is a value that is nested too deep,
and an object within the payload whose keys cannot all be fields: keys that are empty, hold a backtick, or
differ only in case, which some engines ignore.

A `Layout` says which column a key has. It only ever grows, and is kept with the state of the table, so a
key's column depends neither on the order of a later schema nor on that of the messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from typing import Any

from bridge.ingest.columns import KEYS, PARTITIONS
from bridge.ingest.payloads import Huge, Misfit, parsed

MAX_FIELDS = 1000  # of an inferred schema, on all levels: any device can add to it
NUMBERS = ("INTEGER", "BIGINT", "DOUBLE")  # shapes: a column of the last holds values of the others
LEVELS = 32  # of nesting that become types: engines read a schema recursively
EXACT = 2**53  # a DOUBLE holds every integer up to this one
VALUE = "value"  # the key of a payload that is a single number, string or boolean
EXTRA = "extra"  # the column for keys without a column
NOTE = "_note"  # the findings that a task reports besides its rows
RESERVED = (*KEYS, *PARTITIONS, "payload", "reason", "fits", EXTRA, NOTE)
MAX_WIDER = 100  # wider columns of a table: any device can cause one

Shape = str | dict[str, Any] | list[Any]  # a DDL type, a struct, or [shape of the elements]


@dataclass(slots=True)
class Layout:
    """Which columns the keys of the payload have; `topic` is the pattern of the topics that are refined."""

    topic: str = ""
    columns: dict[str, str] = field(default_factory=dict)  # by key
    wider: dict[str, dict[str, str]] = field(default_factory=dict)  # by key, then by type

    @classmethod
    def from_note(cls, note: str | None) -> Layout:
        return cls(**json.loads(note)) if note else cls()

    def note(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    def add(self, keys: Iterable[str], levels: Collection[str]) -> None:
        """Name a column for each new key; `levels` are the columns from topic levels."""
        new = [key for key in keys if key not in self.columns]
        self.columns |= column_names(new, (*RESERVED, *levels), self._taken())

    def widen(self, key: str, kind: str, taken: Collection[str]) -> str | None:
        """Return the column for values of `kind` of this key, or None if there are too many.

        A new one gets a name that is not `taken` by the columns of the table.
        """
        if kind not in self.wider.get(key, {}):
            if not self.has_room():
                return None
            wanted = f"{self.columns[key]}_{kind}"
            name = column_names([wanted], RESERVED, {*self._taken(), *taken})[wanted]
            self.wider.setdefault(key, {})[kind] = name
        return self.wider[key][kind]

    def has_room(self) -> bool:
        return sum(map(len, self.wider.values())) < MAX_WIDER

    def _taken(self) -> set[str]:
        return {*self.columns.values(), *(name for kinds in self.wider.values() for name in kinds.values())}


def infer(sample: Iterable[str | None]) -> str:
    """Return the DDL that fits all samples that are rows (objects, scalars); empty if these have no keys."""
    merged: dict[str, Any] = {}
    for text in sample:
        try:
            value = parsed((text or "").encode(), {})
        except Misfit:
            continue
        if is_scalar(value):
            value = {VALUE: value}
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
        case int() if -EXACT <= value <= EXACT:
            return "INTEGER"
        case int():
            return "BIGINT" if -(2**63) <= value < 2**63 else "STRING"
        case Huge():
            return "STRING"
        case float() | Decimal():
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
    if one in NUMBERS and other in NUMBERS:
        return max(one, other, key=NUMBERS.index)
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
        case "INTEGER":
            return "DOUBLE"
        case _:
            return shape or "STRING"


def is_scalar(value: Any) -> bool:
    """Return whether a value is a single number, string or boolean."""
    return not isinstance(value, dict | list | None)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def column_names(
    fields: Iterable[str], taken: Collection[str] = RESERVED, used: Iterable[str] = ()
) -> dict[str, str]:
    """Name a column for each field of the payload: lower case and plain, for Athena, and unique.

    `taken` are the names of the table's own columns, `used` those of other fields.
    """
    others = {*taken, *used}
    names: dict[str, str] = {}
    for key in fields:
        plain = re.sub(r"\W", "_", key.lower(), flags=re.ASCII) or "_"
        name = f"payload_{plain}" if plain in taken else plain
        number = 2
        while name in others:
            name = f"{plain}_{number}"
            number += 1
        others.add(name)
        names[key] = name
    return names
