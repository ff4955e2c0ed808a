"""What a setting is, said by its type.

It decides how the configuration reads a text ("256MiB", "1.5s"), what the documentation says of it, and what
a client's definition may hold ([export.allow]). A path needs no type of ours: it is a `Path`, and relative
to the directory of the configuration.
"""

from __future__ import annotations

import typing
from enum import Enum
from typing import Annotated, Any

from msgspec import Meta


class Means(Enum):
    """What a value is, beside its Python type."""

    BYTES = "bytes"
    MILLIS = "ms"
    ENDPOINT = "endpoint"
    BUCKET = "bucket"
    SECRET_FILE = "secret file"  # noqa: S105 - a name for it


Bytes = Annotated[int, Means.BYTES]
Millis = Annotated[int, Means.MILLIS]
Endpoint = Annotated[str, Meta(pattern="^https?://"), Means.ENDPOINT]
Bucket = Annotated[str, Meta(min_length=3, max_length=255), Means.BUCKET]
SecretFile = Annotated[str, Meta(min_length=1), Means.SECRET_FILE]


def meanings(kind: Any) -> set[Means]:
    """What a type says of its values, or of those inside: `Annotated[Bytes, Meta(ge=1)] | None` is bytes."""
    if isinstance(kind, Means):
        return {kind}
    return {found for part in typing.get_args(kind) for found in meanings(part)}
