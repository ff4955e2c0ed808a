"""Stream definitions as tables of the configuration: the inverse of reading them.

Settings that have their default are left out. Sizes and durations have a unit if that is exact, enums are
names, and keys are those of the file. What is printed can be put into a configuration, or given to
`streambridge streams create` as KEY=VALUE.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import Any

import msgspec
from msgspec import Struct

from bridge.config.settings import RENAMED, is_map, type_on_wire
from bridge.config.tomlstruct import dotted, keys_of, snake, struct_in, unit_of
from bridge.enums import named
from bridge.model import MessageStreamDefinition, segment_for
from bridge.plugin.api import Exporter
from bridge.settingtypes import Bytes, second_names
from bridge.units import DURATIONS, SIZES, parse_duration, parse_size

NOT_SETTINGS = ("name", "export_definition", "delivery")  # the last is the Firehose API's alone
Exporters = Mapping[str, type[Exporter]]


def stream_table(definition: MessageStreamDefinition, exporters: Exporters) -> str:
    """A definition as the tables [streams.NAME] and [[streams.NAME.export.KIND]]."""
    name = dotted((definition.name,))
    lines = [f"[streams.{name}]"]
    lines += [f"{key} = {value}" for key, value in stream_settings(definition)]
    for kind, configs in definition.export_definition.items():
        struct = exporters[kind].Config if kind in exporters else None
        for config in configs:
            lines += ["", f"[[streams.{name}.export.{dotted((kind,))}]]"]
            first = {} if struct is None else {stored: name for name, stored in second_names(struct).items()}
            options = _export(struct, config)
            lines += [f"{_key(snake(first.get(key, key)))} = {text}" for key, text in options]
    return "\n".join(lines) + "\n"


def stream_settings(definition: MessageStreamDefinition) -> Iterator[tuple[str, str]]:
    """The settings of a stream that differ from their defaults, without its exports: keys and TOML values.

    What only the Firehose API may change is no setting.
    """
    default = MessageStreamDefinition(
        name=definition.name,
        strategy_on_full=type(definition.strategy_on_full)(0),
        max_size=definition.max_size,
        stream_segment_size=segment_for(definition.max_size),
        retention="exported",
        flush_on_write=True,
    )
    usual = MessageStreamDefinition.__struct_defaults__[0]
    for key, field in keys_of(MessageStreamDefinition, RENAMED).items():
        value = getattr(definition, field.name)
        known = usual if field.name == "max_size" else getattr(default, field.name)
        if field.name not in NOT_SETTINGS and value != known:
            yield key, _value(field.type, value)


def _export(struct: type[Struct] | None, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The options of an export, by their keys on the wire."""
    for key, value in (config if struct is None else named(struct, config)).items():
        if value is not None:
            yield key, _option(struct, key, value)


def _option(struct: type[Struct] | None, key: str, value: Any) -> str:
    kind = type_on_wire(struct, key)
    inner = struct_in(kind)
    of = None if inner is None else inner[0]
    if isinstance(value, Mapping) and not is_map(kind):
        return _inline((snake(one), text) for one, text in _export(of, value))
    if isinstance(value, list) and of is not None:
        return f"[{', '.join(_inline((snake(k), v) for k, v in _export(of, one)) for one in value)}]"
    return _value(kind, value)


def _value(kind: Any, value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, IntEnum):
        return _text(value.name)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and (unit := unit_of(kind)) is not None:
        return (
            _quantity(value, SIZES, parse_size)
            if unit is Bytes
            else _quantity(value, DURATIONS, parse_duration)
        )
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Struct):
        fields = keys_of(type(value)).items()
        given = ((key, field.type, getattr(value, field.name), field.default) for key, field in fields)
        return _inline((key, _value(of, one)) for key, of, one, default in given if one != default)
    if isinstance(value, Mapping):
        return _inline((key, _value(None, one)) for key, one in value.items())
    if isinstance(value, list):
        return f"[{', '.join(_value(None, one) for one in value)}]"
    return msgspec.json.encode(value).decode()


def _quantity(value: int, units: Mapping[str, int], parse: Callable[[str], int]) -> str:
    """A number with the largest unit in which it is whole."""
    for unit, length in sorted(units.items(), key=lambda pair: -pair[1]):
        text = f"{value // length}{unit}"
        if length > 1 and value and value % length == 0 and parse(text) == value:
            return f'"{text}"'
    return str(value)


def _inline(entries: Any) -> str:
    found = ", ".join(f"{_key(key)} = {text}" for key, text in entries)
    return f"{{ {found} }}" if found else "{}"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
