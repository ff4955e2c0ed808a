"""Types of settings: bytes, durations, endpoints, buckets, secret files.

The type decides how the configuration parses a text ("256MiB", "1.5s"), what the documentation says, and
what a client's definition may contain ([export.allow]). A path is a plain `Path`, relative to the
configuration's directory.
"""

from __future__ import annotations

import typing
from enum import Enum
from typing import Annotated, Any

from msgspec import Meta


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
