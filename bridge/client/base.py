"""The base of the client's data classes: conversion to and from the wire, checks, and unknown keys.

A class is a mutable record whose fields are all optional in the constructor, as in the AWS SDK. Required
fields and ranges are checked when it is sent. `more` holds the keys that the class does not name (extensions,
keys of plugins), so that a description can be sent back as an update without losing them.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar, Self

import msgspec
from msgspec import Struct

from bridge.client.exceptions import ValidationException


class Data(Struct, rename="camel"):
    """`REQUIRED` are the fields that must be set, `NESTED` the classes of fields, or of their items."""

    REQUIRED: ClassVar[tuple[str, ...]] = ()
    NESTED: ClassVar[dict[str, type[Data]]] = {}

    def as_dict(self) -> dict[str, Any]:
        """Return the wire format: without unset fields, and with the values of enumerations."""
        found = {
            field.encode_name: _plain(getattr(self, field.name))
            for field in msgspec.structs.fields(self)
            if field.name != "more" and getattr(self, field.name) is not None
        }
        return found | getattr(self, "more", {})

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        """Read the wire format; raises ValidationException if a value has the wrong type."""
        values: dict[str, Any] = {}
        left = dict(d)
        for field in msgspec.structs.fields(cls):
            value = left.pop(field.encode_name, None)
            if value is None or field.name == "more":
                continue
            inner = cls.NESTED.get(field.name)
            try:
                if inner is None:
                    values[field.name] = msgspec.convert(value, field.type, builtin_types=(bytes,))
                elif isinstance(value, list):
                    values[field.name] = [inner.from_dict(item) for item in value]
                else:
                    values[field.name] = inner.from_dict(value)
            except (msgspec.ValidationError, AttributeError, TypeError) as error:
                raise ValidationException(f"{cls.__name__}.{field.name}: {error}") from None
        if left and "more" in cls.__struct_fields__:
            values["more"] = {key: value for key, value in left.items() if value is not None}
        return cls(**values)

    def check(self, where: str = "") -> None:
        """Raise ValidationException for a field that is missing or out of range."""
        where = where or type(self).__name__
        for name in self.REQUIRED:
            if getattr(self, name) is None:
                raise ValidationException(f"{where}.{name} is required, but is None")
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            inner = self.NESTED.get(field.name)
            here = f"{where}.{field.name}"
            if value is None or field.name == "more":
                continue
            if inner is None:
                try:
                    msgspec.convert(_plain(value), field.type, builtin_types=(bytes,))
                except msgspec.ValidationError as error:
                    raise ValidationException(f"{here}: {error}") from None
                continue
            for item in value if isinstance(value, list) else [value]:
                if not isinstance(item, inner):
                    raise ValidationException(f"{here}: {item!r} is not a {inner.__name__}")
                item.check(here)


def _plain(value: Any) -> Any:
    if isinstance(value, Data):
        return value.as_dict()
    if isinstance(value, Struct):  # a class of the data model, for example Limits
        return _plain(msgspec.to_builtins(value, builtin_types=(bytes,)))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return value
