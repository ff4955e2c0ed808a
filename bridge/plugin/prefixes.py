"""Names of objects as Data Firehose makes them: an evaluated prefix and a suffix.

    <prefix><stream>-<version>-yyyy-MM-dd-HH-mm-ss-<uuid><extension>

Source: "Configure Amazon S3 object name format" and "Understand custom prefixes for Amazon S3 objects" in the
Amazon Data Firehose Developer Guide. Expressions in a prefix:

    !{timestamp:FORMAT}          the time of the first message, by a Java DateTimeFormatter pattern
    !{firehose:random-string}    11 letters and digits, different at each place

A prefix without a timestamp is followed by `!{timestamp:yyyy/MM/dd/HH/}`. Of the patterns, these letters are
known: y u (year), M, d, D (day of the year), H, m, s, S (fraction of the second). Text in quotes stands for
itself. The uuid and random strings are derived from the numbers of the messages, so the same batch always has
the same name.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo

DEFAULT = "!{timestamp:yyyy/MM/dd/HH/}"
MAX_KEY = 1024  # bytes of a key in S3
_EXPRESSION = re.compile(r"!\{([^{}]*)\}")
_PIECE = re.compile(r"'((?:[^']|'')*)'|([A-Za-z])\2*|([^A-Za-z']+)")
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

_Part = Callable[[datetime, "_Random"], str]


class _Random:
    """Strings that look random but are always the same for one batch."""

    def __init__(self, identity: str) -> None:
        self._identity, self._count = identity, 0

    def text(self) -> str:
        self._count += 1
        number = int.from_bytes(hashlib.sha256(f"{self._count}:{self._identity}".encode()).digest())
        return "".join(_LETTERS[number // len(_LETTERS) ** place % len(_LETTERS)] for place in range(11))

    def uuid(self) -> str:
        return str(uuid.UUID(bytes=hashlib.sha256(self._identity.encode()).digest()[:16], version=4))


class ObjectName:
    """Makes the names of one delivery stream's objects.

    Raises ValueError for a prefix that is wrong or has an expression that is not supported, and for an
    unknown time zone.
    """

    def __init__(self, prefix: str, *, stream: str, version: int, extension: str, zone: str = "UTC") -> None:
        self._zone = time_zone(zone)
        self._parts = parse(prefix)
        self._stream, self._version, self._extension = stream, version, extension

    def name(self, millis: int, identity: str) -> str:
        """Return an object's name; `millis` (Unix ms) is of its first message, `identity` of its batch."""
        when = datetime.fromtimestamp(millis / 1000, UTC).astimezone(self._zone)
        random = _Random(identity)
        prefix = "".join(part(when, random) for part in self._parts)
        suffix = f"{self._stream}-{self._version}-{when:%Y-%m-%d-%H-%M-%S}-{random.uuid()}{self._extension}"
        return prefix + suffix


def time_zone(name: str) -> tzinfo:
    """A time zone by its name; raises ValueError."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError):
        raise ValueError(
            f"timeZone: {name!r} is not a time zone that this machine knows, such as Europe/Berlin"
        ) from None


def parse(prefix: str) -> list[_Part]:
    """The parts of a prefix; raises ValueError."""
    if not any(found.startswith("timestamp:") for found in _EXPRESSION.findall(prefix)):
        prefix += DEFAULT
    pieces = _EXPRESSION.split(prefix)
    if any("!{" in text for text in pieces[::2]):
        raise ValueError(f"prefix: {prefix!r} has `!{{` without its `}}`")
    parts: list[_Part] = []
    for n, piece in enumerate(pieces):
        if n % 2:
            parts.append(_expression(piece))
        elif piece:
            parts.append(_literal(piece))
    return parts


def _literal(text: str) -> _Part:
    return lambda when, random: text


def _expression(expression: str) -> _Part:
    namespace, _, value = expression.partition(":")
    if namespace == "timestamp":
        return _timestamp(value)
    if (namespace, value) == ("firehose", "random-string"):
        return lambda when, random: random.text()
    why = "partition keys need Firehose itself" if namespace.startswith("partitionKey") else "it is unknown"
    raise ValueError(
        f"prefix: !{{{expression}}} is not supported, {why}; use !{{timestamp:...}} and "
        "!{firehose:random-string}"
    )


def _timestamp(pattern: str) -> _Part:
    fields: list[Callable[[datetime], str]] = []
    end = 0
    for found in _PIECE.finditer(pattern):
        if found.start() != end:
            break
        end = found.end()
        fields.append(_field(found, pattern))
    if end != len(pattern) or not pattern:
        raise ValueError(f"prefix: the pattern {pattern!r} is empty or has an unbalanced quote")
    return lambda when, random: "".join(field(when) for field in fields)


def _field(found: re.Match[str], pattern: str) -> Callable[[datetime], str]:
    quoted, letter, plain = found.groups()
    if letter is None:
        text = plain if plain is not None else quoted.replace("''", "'") or "'"
        return lambda when: text
    width = len(found[0])
    if letter in "yu" and width == 2:
        return lambda when: f"{when.year % 100:02d}"
    if letter == "S" and width <= 9:
        return lambda when: f"{when.microsecond:06d}000"[:width]
    value = _VALUES.get(letter)
    if value is None or width > (4 if letter in "yu" else 3 if letter == "D" else 2):
        raise ValueError(
            f"prefix: {found[0]!r} in the pattern {pattern!r} is not supported; known letters are "
            f"{' '.join([*_VALUES, 'S'])}, with a month as M or MM"
        )
    return lambda when: str(value(when)).zfill(width)


_VALUES: dict[str, Callable[[datetime], int]] = {
    "y": lambda when: when.year,
    "u": lambda when: when.year,
    "M": lambda when: when.month,
    "d": lambda when: when.day,
    "D": lambda when: when.timetuple().tm_yday,
    "H": lambda when: when.hour,
    "m": lambda when: when.minute,
    "s": lambda when: when.second,
}
