"""Reads tables of a TOML document into msgspec structs, and collects every mistake as one line.

* The key of a field is its name without `_millis`: a duration's unit is part of its value.
* The type says how a value is read: `Bytes` and `Millis` may be texts with a unit, enums are given by name,
  and a relative `Path` is relative to the document's directory.
* A struct may check itself in `__post_init__`. Each line of its error is a mistake, and the first key in
  backticks gives the position that is reported.
* Reading continues after a mistake, without the key in question, so one run finds all mistakes.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import msgspec
from msgspec import Struct

from bridge import units
from bridge.config.tomlfile import Document, Keys, Problem
from bridge.errors import StreamBridgeError
from bridge.model import MAX_INT64, MAX_MILLIS, mistake
from bridge.plugin.failures import failed
from bridge.printable import without_credentials
from bridge.settingtypes import Bytes, Means, Millis, meanings, second_names

# No setting is a secret: secrets are in files. This is for unknown keys, which have no type.
_SECRET = re.compile(r"(^|_)(password|secret|token)(_key)?$")
VARIABLE = re.compile(r"\$\{(STREAMBRIDGE_[A-Z0-9_]+|CREDENTIALS_DIRECTORY)\}")

HINTED = 100  # mistakes with a similar key; to search for it takes long
MOST_PROBLEMS = 1000

S = TypeVar("S", bound=Struct)


def keys_of(cls: type[Struct], renamed: Mapping[str, str] = {}) -> dict[str, msgspec.structs.FieldInfo]:
    """The fields of a struct by their keys in TOML; `renamed` gives the keys that do not follow the rule."""
    return {renamed.get(field.name, field.name.removesuffix("_millis")): field for field in fields_of(cls)}


@cache
def fields_of(cls: type[Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The fields of a struct. msgspec evaluates the annotations in each call, which takes 2 ms."""
    return msgspec.structs.fields(cls)


@cache
def former_keys(options: type[Struct]) -> dict[str, str]:
    """The former keys of an export's options, with those of today."""
    return {snake(stored): snake(name) for name, stored in second_names(options).items()}


class Reader:
    """Builds structs from one document and collects its mistakes in `problems`.

    `broken` are the keys whose values are unknown because of a mistake. A mistake that was `reported` before
    is not reported again. With `full_names` a key is the whole name of its field, and an enum may be a number
    too, as in an export's options.
    """

    def __init__(
        self, document: Document, reported: Collection[Keys] = (), *, full_names: bool = False
    ) -> None:
        self.document, self._reported, self._full_names = document, reported, full_names
        self.broken = set(reported)
        self.base = document.path.absolute().parent
        self.problems: list[Problem] = []

    def problem(self, keys: Keys, what: str) -> None:
        """Report a mistake in the value at `keys`. Of very many, only the first are kept."""
        if len(self.problems) >= MOST_PROBLEMS:
            return
        value = self._shown(keys)
        self.broken.add(keys)
        position = self.document.position(keys)
        self.problems += (Problem(position, f"{dotted(keys)}{value}: {one}") for one in what.splitlines())

    def report(self) -> str:
        """All mistakes, by file and line, each in one line."""
        found = sorted(self.problems, key=lambda one: self.document.order(one.position))
        return "\n".join(map(str, found))

    def unknown(self, keys: Keys, known: Iterable[str], inside: Sequence[str] = ()) -> None:
        """Report an unknown key, with those of this name `inside` tables, or the most similar known one."""
        *_, key = keys
        known = sorted(known)
        wanted = str(key).lower().replace("-", "_")[:80]
        near = difflib.get_close_matches(wanted, known, n=1) if len(self.problems) < HINTED else []
        meant = inside or [f"`{one}`" for one in near]
        hint = f"did you mean {' or '.join(meant)}?" if meant else f"valid keys: {', '.join(known)}"
        if near and not self._shown((*keys[:-1], near[0])):  # that one was meant
            self.broken.add((*keys[:-1], near[0]))
        self.problem(keys, f"unknown key; {hint}")

    def is_table(self, value: object, keys: Keys) -> TypeGuard[dict[str, Any]]:
        """Return whether `value` is a table; report it if not."""
        if not isinstance(value, dict):
            self.problem(keys, f"must be a table, [{dotted(keys)}]")
        return isinstance(value, dict)

    def struct(
        self,
        cls: type[S],
        table: object,
        keys: Keys,
        *,
        renamed: Mapping[str, str] = {},
        fixed: Mapping[str, Any] = {},
    ) -> S | None:
        """Build a struct from a table, without the wrong values; None if that is impossible.

        `renamed` is as in `keys_of`; `fixed` has the values of fields that cannot be in the table.
        """
        if not self.is_table(table, keys):
            return None
        if self._full_names:
            renamed = {name: name for name in cls.__struct_fields__}
        fields = {key: field for key, field in keys_of(cls, renamed).items() if field.name not in fixed}
        former = former_keys(cls) if self._full_names else {}
        values = dict(fixed)
        for key, raw in table.items():
            field = fields.get(former.get(key, key))
            if (*keys, key) in self._reported:
                continue
            if former.get(key) in table:
                self.problem((*keys, key), f"the former name of `{former[key]}`; remove one of the two")
                continue
            if field is None:
                inside = [
                    f"`{name}.{key}`"
                    for name, one in fields.items()
                    for part in (one.type, *typing.get_args(one.type))
                    if isinstance(part, type) and issubclass(part, Struct) and key in keys_of(part, renamed)
                ]
                for near in difflib.get_close_matches(key, former, n=1):
                    inside.append(f"`{former[near]}`")
                    self.broken.add((*keys, former[near]))  # that one was meant
                if key == "max_age" and "time_to_live" in fields:
                    inside.append("`time_to_live` (whole segments)")
                self.unknown((*keys, key), fields, inside)
            else:
                before = len(self.problems)
                value = self.value(field.type, raw, (*keys, key))
                if len(self.problems) == before or self._is_kept(value):
                    values[field.name] = value
        for key, field in fields.items():
            given = key in table or any(new == key and old in table for old, new in former.items())
            if field.required and not given and (*keys, key) not in self.broken:
                _, container = struct_in(field.type) or (None, None)
                add = f"[[{re.sub(r'.[0-9]+.', '', dotted(keys))}.{key}]]" if container else f"{key} = ..."
                self.problem(keys, f"`{key}` is missing; add {add}")
        try:
            return cls(**values)
        except (ValueError, StreamBridgeError) as error:
            return self._without_mistakes(cls, values, str(error), table, keys, fields)
        except (Exception, SystemExit) as error:
            if any(field.required and field.name not in values for field in fields.values()):
                return None  # which is reported
            if not _is_of_a_plugin(cls):
                raise
            self.problem(keys, failed(error))
            return None

    def _is_kept(self, value: object) -> bool:
        """Whether a value counts though parts of it are mistakes: a table, or a list of tables."""
        if isinstance(value, list) and not self._full_names:
            return all(isinstance(one, Struct) for one in value)
        return isinstance(value, Struct)

    def _without_mistakes(
        self, cls: type[S], values: dict[str, Any], found: str, table: dict[str, Any], keys: Keys,
        fields: Mapping[str, Any],
    ) -> S | None:  # fmt: skip
        """Report the mistakes that a struct has found in itself, and build it without the keys in them."""
        unknown = {
            str(at[len(keys)]) for at in self.broken if len(at) > len(keys) and at[: len(keys)] == keys
        }
        for line in found.splitlines():
            if unknown & set(re.findall(r"\w+", line)):
                continue  # it may follow from a mistake that is reported already
            named = [key for key in re.findall(r"`(\w+)`", line) if key in table]
            self.problem((*keys, *named[:1]), line.removeprefix(f"`{named[0]}`: ") if named else line)
            if named:
                values.pop(fields[named[0]].name, None)
        try:
            return cls(**values)
        except (Exception, SystemExit) as error:
            if not (_is_of_a_plugin(cls) or isinstance(error, (TypeError, ValueError, StreamBridgeError))):
                raise
            self.broken.add(keys)
            return None

    def value(self, kind: Any, raw: Any, keys: Keys) -> Any:
        """Read one value as type `kind`; after a reported mistake the result has no meaning."""
        inner = struct_in(kind)
        if inner is not None:
            struct, container = inner
            if container is None:
                return self.struct(struct, raw, keys)
            if container is dict and isinstance(raw, dict):
                return {key: self.struct(struct, table, (*keys, key)) for key, table in raw.items()}
            if container is not dict and isinstance(raw, list):
                return container(self.struct(struct, table, (*keys, n)) for n, table in enumerate(raw))
        try:
            return msgspec.convert(self._prepared(kind, raw), kind, dec_hook=self._path)
        except msgspec.ValidationError as error:
            path, what = mistake(error)
            self.problem(keys, f"{dotted(path)}{': ' if path else ''}{_plainly(what, kind, raw)}")
        except ValueError as error:
            self.problem(keys, str(error))
        return None

    def expand(self, text: str) -> str:
        """Replace `${STREAMBRIDGE_...}` with values from the environment."""

        def replacement(found: re.Match[str]) -> str:
            value = os.environ.get(found[1])
            if value is None:
                raise ValueError(
                    f"the environment variable {found[1]} is not set; set it for this process (systemd sets "
                    "it only for the service)"
                )
            return value

        return VARIABLE.sub(replacement, text)

    def _prepared(self, kind: Any, raw: Any) -> Any:
        """The raw value with units, names of enums and environment variables resolved."""
        unit = unit_of(kind)
        if isinstance(raw, str) and unit is not None:
            raw = units.parse_size(raw) if unit is Bytes else units.parse_duration(raw)
        most = MAX_MILLIS if unit is Millis else MAX_INT64
        if isinstance(raw, int) and raw > most:  # tomllib takes more than the 64 bits of TOML
            raise ValueError(f"must be at most {most}{_unit(kind, str(most))}")
        enum = next((member for member in _members(kind) if _is_enum(member)), None)
        if enum is not None and self._full_names:
            if isinstance(raw, str) and raw in enum.__members__:
                return enum[raw]
            if type(raw) is not int or raw not in list(enum):
                raise ValueError(
                    "must be " + " or ".join(f'"{member.name}" ({member.value})' for member in enum)
                )
            return enum(raw)
        if enum is not None:
            if not isinstance(raw, str) or raw not in enum.__members__:
                raise ValueError(_one_of(enum.__members__, raw))
            return enum[raw]
        return _deep(self.expand, raw)

    def _path(self, kind: type, value: object) -> object:
        if kind is Path and isinstance(value, str) and value:
            return self.path(value)
        raise ValueError("must be a path in quotes")

    def path(self, text: str) -> Path:
        """The path that a text names, relative to the document's directory; raises ValueError."""
        if "\0" in text:
            raise ValueError("no path contains the character NUL; remove it")
        try:
            return self.base / Path(text).expanduser()
        except RuntimeError:  # no such user, or a user without an entry, as in a container
            home = Path(text).parts[0]
            raise ValueError(f"the home directory {home} is unknown; write the path without {home}") from None

    def _shown(self, keys: Keys) -> str:
        """The value as the file has it, cut if it is long; empty if it is a table or may be secret.

        URLs have no credentials.
        """
        value: Any = self.document.data
        try:
            for key in keys:
                value = value[key]
        except (KeyError, IndexError, TypeError):
            return ""
        if isinstance(value, dict) or (keys and isinstance(keys[-1], str) and _SECRET.search(keys[-1])):
            return ""
        text = without_credentials(_toml(value))
        return f" = {text if len(text) <= 60 else text[:57] + '...'}"


_KINDS = {
    "str": "a text in quotes",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_ONE = {"characters": "character", "entries": "entry"}


def _plainly(what: str, kind: Any, raw: object) -> str:
    """What is wrong with the value `raw` of type `kind`, in the terms of TOML.

    msgspec reports a mistake as a sentence and has no fields. This is the one place that takes it apart.
    """
    choices = _choices(kind)
    if choices and "enum value" in what:
        return _one_of(choices, raw)
    if (pattern := re.search(r"matching regex '(.*)'$", what)) is not None:
        return f"must be {_in_words(pattern[1])}"
    found = re.match(r"Expected `([\w |]+)`(?:, got `(\w+)`)?( of length)?(?: ([<>]=?) (\S+))?$", what)
    if found is None:
        return what[0].lower() + what[1:]
    wanted, given, length, bound, limit = found.groups()
    if bound and length:
        parts = "characters" if "str" in wanted else "entries"
        return f"must have {_BOUNDS[bound]} {limit} {parts if limit != '1' else _ONE[parts]}"
    if bound:
        return f"must be {_BOUNDS[bound]} {limit}{_unit(kind, limit)}"
    kinds = " or ".join(_KINDS.get(kind, kind) for kind in wanted.split(" | ") if kind != "null")
    if given == "float" and "int" in wanted.split(" | "):
        given = ""  # the value is shown, and is a number
    remedy = f"; write [{_toml(raw)}]" if (wanted, given) == ("array", "str") else ""
    return f"must be {kinds}" + (
        f", not {_KINDS.get(given, given).removesuffix(' in quotes')}{remedy}" if given else ""
    )


def _in_words(pattern: str) -> str:
    """What a regular expression of a setting's type asks for."""
    if (scheme := re.match(r"\^(\w+)s\?://", pattern)) is not None:
        return f"a URL that begins with {scheme[1]}:// or {scheme[1]}s://"
    found = re.match(r"\^\[(?:A-Za-z|a-zA-Z)0-9([^]]*)\](?:\{(\d+),(\d+)\})?", pattern)
    if found is None:
        return f"a text that matches {pattern}"
    others, least, most = found.groups()
    count = f"{least} to {most} " if least else ""
    return f"{count}letters, digits and any of {' '.join(others.replace(chr(92), ''))}"


def _unit(kind: Any, value: str) -> str:
    """The unit of a type's plain numbers, and the value in a larger unit."""
    unit = unit_of(kind)
    if unit is Millis:
        return f" ms ({units.format_duration(int(value))})"
    return f" bytes ({units.format_size(int(value))})" if unit is Bytes else ""


def unit_of(kind: Any) -> Any:
    """`Bytes` or `Millis` if the values of a type are that, else None."""
    means = meanings(kind)
    return Bytes if Means.BYTES in means else Millis if Means.MILLIS in means else None


def snake(key: str) -> str:
    """The TOML key of a key on the wire: `timeHintMillis` is `time_hint_millis`."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda found: f"_{found[1].lower()}", key)


def dotted(keys: Keys) -> str:
    """Write keys as TOML and people do: `streams.sensors.export.s3[0].bucket`."""
    text = ""
    for key in keys:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += ("." if text else "") + (key if re.fullmatch(r"[\w-]+", key) else json.dumps(key))
    return text


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _one_of(choices: Iterable[object], raw: object) -> str:
    by_lower = {str(choice).lower(): choice for choice in choices}
    near = difflib.get_close_matches(str(raw).lower(), by_lower, n=1)
    hint = f"; did you mean {_toml(by_lower[near[0]])}?" if near else ""
    return "must be " + " or ".join(map(_toml, by_lower.values())) + hint


def _deep(change: Callable[[str], str], value: Any) -> Any:
    """Apply `change` to every text in a value."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_deep(change, item) for item in value]
    if isinstance(value, dict):
        return {key: _deep(change, item) for key, item in value.items()}
    return value


def _members(kind: Any) -> tuple[Any, ...]:
    """The member types of a union or an Annotated."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(kind) for member in _members(part))
    if typing.get_origin(kind) is typing.Annotated:
        return _members(typing.get_args(kind)[0])
    return (kind,)


def _choices(kind: Any) -> tuple[Any, ...]:
    literals = [member for member in _members(kind) if typing.get_origin(member) is typing.Literal]
    return tuple(choice for literal in literals for choice in typing.get_args(literal))


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, IntEnum)


def _is_of_a_plugin(cls: type[Struct]) -> bool:
    return cls.__module__.partition(".")[0] != "bridge"


def _is_struct(kind: Any) -> TypeGuard[type[Struct]]:
    return isinstance(kind, type) and issubclass(kind, Struct)


def struct_in(kind: Any) -> tuple[type[Struct], Any] | None:
    """The struct type in a field's type, and the container around it if there is one."""
    for member in _members(kind):
        if _is_struct(member):
            return member, None
        origin, arguments = typing.get_origin(member), typing.get_args(member)
        if origin in (list, tuple) and _is_struct(arguments[0]):
            return arguments[0], origin
        if origin is dict and _is_struct(arguments[1]):
            return arguments[1], origin
    return None
