"""The input of the S3 task executor: task definitions, key placeholders, input URLs.

The formats are those of the AWS Stream Manager SDK (S3ExportTaskDefinition, StatusMessage). A
placeholder `!{timestamp:PATTERN}` in a key is filled with the time of the first attempt, in UTC.
PATTERN is the part of Java's DateTimeFormatter that is useful in a key: letters, and text between them.
`YYYY` is the calendar year that its users mean, not Java's week-based year.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Struct

MAX_KEY = 1024
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t -~]*")
_PLACEHOLDER = re.compile(r"!\{([^:}]*):([^}]*)\}")
_RUN = re.compile(r"([A-Za-z])\1*|[^A-Za-z]+")
_FORMATS = {
    **dict.fromkeys(("y", "yyyy", "u", "uuuu", "Y", "YYYY"), "%Y"),
    **dict.fromkeys(("yy", "uu", "YY"), "%y"),
    "MM": "%m",
    "MMM": "%b",
    "MMMM": "%B",
    "dd": "%d",
    "DDD": "%j",
    "HH": "%H",
    "hh": "%I",
    "mm": "%M",
    "ss": "%S",
    "a": "%p",
    "EEEE": "%A",
    **dict.fromkeys(("E", "EE", "EEE"), "%a"),
}
_SHORT = {"M": "%m", "d": "%d", "D": "%j", "H": "%H", "h": "%I", "m": "%M", "s": "%S"}


class TaskDefinition(Struct, rename="camel", kw_only=True, frozen=True):
    """S3ExportTaskDefinition: upload the file `input_url` as `bucket`/`key`."""

    input_url: str
    bucket: str
    key: str
    user_metadata: dict[str, Any] = msgspec.field(default_factory=dict)

    def check(self) -> None:
        """Raise ValueError for impossible values; after decoding, so that a status message can show them."""
        for name, value, least, most in (("bucket", self.bucket, 3, 63), ("key", self.key, 1, MAX_KEY)):
            if not least <= len(value) <= most:
                raise ValueError(f"{name}: it has {len(value)} characters; {least} to {most} are allowed")
        reserved = [name for name in self.user_metadata if name.lower().startswith("$aws-gg-")]
        if reserved:
            raise ValueError(f"userMetadata: names that begin with $aws-gg- are reserved: {reserved[0]}")

    def metadata(self) -> dict[str, str]:
        """Return the metadata in S3's form. Raises ValueError for values that an HTTP header cannot carry.

        The SDK accepts numbers, but S3 only strings.
        """
        found = {name.lower(): str(value) for name, value in self.user_metadata.items()}
        for name, value in found.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise ValueError(
                    f"userMetadata {name!r}: {value!r} does not fit in an HTTP header; "
                    "names have ASCII letters, digits and hyphens, values printable ASCII characters"
                )
        return found

    def path(self) -> Path:
        """Return the file that the input URL names. Raises ValueError."""
        url = urlsplit(self.input_url)
        if url.scheme not in ("", "file") or url.netloc not in ("", "localhost"):
            raise ValueError(f"inputUrl {self.input_url!r} is not a file of this machine; use file:/path")
        # A bare path is used as it is: `%`, `?` and `#` are part of the name.
        path = Path(unquote(url.path) if url.scheme else self.input_url)
        if not path.is_absolute():
            raise ValueError(f"inputUrl {self.input_url!r} is not an absolute path")
        return path


def resolve_key(key: str, now: datetime) -> str:
    """Fill the placeholders of a key. Raises ValueError for an unknown one."""

    def fill(found: re.Match[str]) -> str:
        if found[1] != "timestamp":
            raise ValueError(f"{found[0]}: the only placeholder is !{{timestamp:PATTERN}}")
        return "".join(_letters(piece[0], now) for piece in _RUN.finditer(found[2]))

    resolved = _PLACEHOLDER.sub(fill, key)
    if not 0 < len(resolved.encode()) <= MAX_KEY:
        raise ValueError(f"the key has {len(resolved.encode())} bytes; 1 to {MAX_KEY} are allowed")
    return resolved


def _letters(piece: str, now: datetime) -> str:
    if not piece[0].isalpha():
        return piece
    if set(piece) == {"S"}:
        return f"{now.microsecond:06d}"[: len(piece)].ljust(len(piece), "0")
    if piece in _SHORT:
        return str(int(now.strftime(_SHORT[piece])))
    if piece not in _FORMATS:
        raise ValueError(f"the date pattern {piece!r} is not supported")
    return now.strftime(_FORMATS[piece])
