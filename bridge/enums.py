"""Enums in definitions: numbers on the wire, as the SDK sends them, and names for people.

Requests and the configuration take either. What is stored and sent has numbers; what commands print has
names. A value that is neither stays as it is: reading the struct then reports it.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct


def numbered(struct: type[Struct], raw: Mapping[str, Any]) -> dict[str, Any]:
    """A struct as a map of the wire, with numbers for the names of enums."""
    return _changed(struct, raw, _number)


def named(struct: type[Struct], raw: Mapping[str, Any]) -> dict[str, Any]:
    """A struct as a map of the wire, with names for the numbers of enums."""
    return _changed(struct, raw, _name)


def choices(struct: type[Struct], path: Sequence[str | int]) -> str:
    """What an enum at a path may be, as a remedy; empty if there is none."""
    for key in path:
        if isinstance(key, int):
            continue
        enums, structs = _fields(struct)
        if key in enums:
            return "give " + " or ".join(f'"{member.name}" ({member.value})' for member in enums[key])
        if key not in structs:
            break
        struct = structs[key]
    return ""


def _changed(
    struct: type[Struct], raw: Mapping[str, Any], change: Callable[[type[IntEnum], Any], Any]
) -> dict[str, Any]:
    enums, structs = _fields(struct)
    changed = dict(raw)
    for key in raw.keys() & enums.keys():
        changed[key] = change(enums[key], raw[key])
    for key in raw.keys() & structs.keys():
        value = raw[key]
        if isinstance(value, Mapping):
            changed[key] = _changed(structs[key], value, change)
        elif isinstance(value, list):
            changed[key] = [
                _changed(structs[key], one, change) if isinstance(one, Mapping) else one for one in value
            ]
    return changed


def _number(enum: type[IntEnum], value: Any) -> Any:
    return enum[value].value if isinstance(value, str) and value in enum.__members__ else value


def _name(enum: type[IntEnum], value: Any) -> Any:
    return enum(value).name if type(value) is not bool and value in list(enum) else value


@cache
def _fields(struct: type[Struct]) -> tuple[dict[str, type[IntEnum]], dict[str, type[Struct]]]:
    """The fields of a struct with an enum, and those with structs, by their names on the wire."""
    enums: dict[str, type[IntEnum]] = {}
    structs: dict[str, type[Struct]] = {}
    for field in msgspec.structs.fields(struct):
        for part in _parts(field.type):
            if issubclass(part, IntEnum):
                enums[field.encode_name] = part
            elif issubclass(part, Struct):
                structs[field.encode_name] = part
    return enums, structs


def _parts(kind: Any) -> Iterator[type]:
    """The classes in a type."""
    if isinstance(kind, type) and typing.get_origin(kind) is None:
        yield kind
    for inner in typing.get_args(kind):
        yield from _parts(inner)
