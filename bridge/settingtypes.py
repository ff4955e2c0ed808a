"""Types of settings: bytes, durations, endpoints, buckets, secret files; and the names of options.

The type decides how the configuration parses a text ("256MiB", "1.5s"), what the documentation says, and
what a client's definition may contain ([export.allow]). A path is a plain `Path`, relative to the
configuration's directory.

An option of an export has the name of its field in the file, and that in camelCase on the wire. A field
with a `name` of its own, `msgspec.field(name="uri")`, has a second name on both, its former one: definitions
are stored and described with that, so that older clients and versions understand them.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import fields


class Means(Enum):
    """What a value is, in addition to its Python type."""

    BYTES = "bytes"
    MILLIS = "ms"
    ENDPOINT = "endpoint"
    BUCKET = "bucket"
    SECRET_FILE = "secret file"  # noqa: S105 - no secret


Count = Annotated[int, Meta(ge=1, le=10_000_000)]
Bytes = Annotated[int, Means.BYTES]
Millis = Annotated[int, Means.MILLIS]
Endpoint = Annotated[str, Meta(pattern="^https?://"), Means.ENDPOINT]
BrokerUrl = Annotated[str, Meta(pattern="^mqtts?://"), Means.ENDPOINT]
Bucket = Annotated[str, Meta(min_length=3, max_length=255), Means.BUCKET]
SecretFile = Annotated[str, Meta(min_length=1), Means.SECRET_FILE]


def meanings(kind: Any) -> set[Means]:
    """What the values in a type are: `Annotated[Bytes, Meta(ge=1)] | None` is bytes."""
    if isinstance(kind, Means):
        return {kind}
    return {found for part in typing.get_args(kind) for found in meanings(part)}


def wire_name(key: str) -> str:
    """The key on the wire of an option: `time_hint_millis` is `timeHintMillis`."""
    word, *words = key.split("_")
    return word + "".join(map(str.capitalize, words))


@cache
def second_names(options: type[Struct]) -> dict[str, str]:
    """The options with two names on the wire: the first one, and that with which they are stored."""
    names = {wire_name(field.name): field.encode_name for field in fields(options)}
    return {name: stored for name, stored in names.items() if name != stored}


def as_stored(options: type[Struct], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the wire by the names with which they are stored. Raises ValueError for two names of one."""
    found = dict(raw)
    for name, stored in second_names(options).items():
        if (value := found.pop(name, None)) is not None:
            if found.get(stored) is not None:
                raise ValueError(f"`{stored}` is the former name of `{name}`; remove one of the two")
            found[stored] = value
    return found
