"""Templates over a message: text with fields, such as `{topic/1}-{json:/device/id}`.

    {topic}            the whole topic            {topic/N}   its level N, from 0; {topic/-1} is the last
    {topic/N/#}        its level N and all after it
    {stream} {gateway} their names                {json:/P}   the value at the JSON pointer /P of the payload
    {client}           the MQTT client id of the publisher
    {epoch} {sequence_number}                     with the stream, what identifies the message
    {ingest_time} {ingest_millis}                 when it was stored: RFC 3339 in UTC, and Unix time in ms
    {payload} {base64}                            the payload, as it is and in base64

A message can lack a value: there is no such level, no JSON, no such member. The client is known for messages
that were published to the embedded broker while an export of the stream had `{client}`.

A partition key is such a template. A message that lacks one of its values has no key, and then no order.
Keys over 256 characters are replaced by their SHA-256 in hex.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from bridge.plugin.api import Batch, Record
from bridge.plugin.reduction import steps

MAX_KEY = 256
_FIELD = re.compile(r"\{([^{}]*)\}")


class NoValue(LookupError):  # noqa: N818 - named for what is the case
    """Raised by a field for a message that lacks its value; says which field."""


class Message:
    """A record of a batch, whose payload is decoded at most once."""

    __slots__ = ("_document", "_is_decoded", "batch", "record")

    def __init__(self, batch: Batch, record: Record) -> None:
        self.batch, self.record = batch, record
        self._is_decoded = False

    def document(self) -> Any:
        """The payload as JSON; raises what msgspec raises."""
        if not self._is_decoded:
            self._document = msgspec.json.decode(self.record.payload)
            self._is_decoded = True
        return self._document


# A field's value: what JSON has, or the bytes of the payload. Raises NoValue.
Field = Callable[[Message], Any]


class Template:
    """A parsed template. Raises ValueError for an unknown field and for a brace without its partner.

    `fields` are its fields, in order; `only` is the field of a template that consists of nothing else.
    """

    def __init__(self, template: str) -> None:
        pieces = _FIELD.split(template)
        if any("{" in text or "}" in text for text in pieces[::2]):
            raise ValueError(f"{template!r}: unbalanced brace; write fields as {{name}}")
        self._parts: list[str | Field] = [
            field(piece) if n % 2 else piece for n, piece in enumerate(pieces) if n % 2 or piece
        ]
        self.fields = pieces[1::2]
        self.only = field(pieces[1]) if len(pieces) == 3 and not pieces[0] and not pieces[2] else None

    def render(self, batch: Batch, record: Record) -> str:
        """The text for a record; raises NoValue if it lacks a value."""
        message = Message(batch, record)
        return "".join(
            [part if isinstance(part, str) else as_text(part(message)) for part in self._parts],
        )


class KeyTemplate:
    """The template of a partition key; raises ValueError for one that is wrong."""

    def __init__(self, template: str) -> None:
        if not template:
            raise ValueError("a partition key is empty; omit it for random keys")
        self._template = Template(template)

    def key(self, batch: Batch, record: Record) -> str | None:
        """Return the record's key; None if it has none."""
        try:
            key = self._template.render(batch, record)
        except NoValue:
            return None
        return key if 0 < len(key) <= MAX_KEY else hashlib.sha256(key.encode()).hexdigest() if key else None


def as_text(value: Any) -> str:
    """Return a value as text, in JSON if it is not a string. Raises NoValue if bytes are not UTF-8."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise NoValue("{payload}: the payload is not UTF-8; {base64} takes any") from None
    return msgspec.json.encode(value).decode()


def rfc3339(millis: int) -> str:
    """Format a Unix time in ms, in UTC with milliseconds and `Z`."""
    when = datetime.fromtimestamp(millis // 1000, UTC)
    return f"{when:%Y-%m-%dT%H:%M:%S}.{millis % 1000:03d}Z"


def field(name: str) -> Field:
    """The field of a name, such as `topic/1`; raises ValueError for an unknown one."""
    if name in _PLAIN:
        return _PLAIN[name]
    if found := re.fullmatch(r"topic/(-?\d{1,5})(/#)?", name):
        return _level(name, int(found[1]), rest=found[2] is not None)
    if name.startswith("json:/"):
        return _pointer(name[5:])
    known = " ".join(
        f"{{{each}}}" for each in ("topic", "topic/N", "topic/N/#", "json:/pointer", *list(_PLAIN)[1:])
    )
    raise ValueError(f"{{{name}}} is not a field; known fields: {known}")


def _client(message: Message) -> str:
    if not (client := message.record.client):
        raise NoValue("{client}: the publisher is unknown")
    return client


_PLAIN: dict[str, Field] = {
    "topic": lambda message: message.record.topic,
    "client": _client,
    "stream": lambda message: message.batch.stream,
    "gateway": lambda message: message.batch.gateway,
    "epoch": lambda message: str(message.batch.epoch),
    "sequence_number": lambda message: message.record.sequence_number,
    "ingest_time": lambda message: rfc3339(message.record.ingest_time),
    "ingest_millis": lambda message: message.record.ingest_time,
    "payload": lambda message: message.record.payload,
    "base64": lambda message: base64.b64encode(message.record.payload).decode(),
}


def _level(name: str, number: int, *, rest: bool) -> Field:
    def level(message: Message) -> str:
        levels = message.record.topic.split("/")
        try:
            found = levels[number]
        except IndexError:
            raise NoValue(f"{{{name}}}: the topic has no such level") from None
        return "/".join(levels[number:]) if rest else found

    return level


def _pointer(pointer: str) -> Field:
    """The value at a JSON pointer (RFC 6901)."""
    members = steps(pointer)

    def value(message: Message) -> Any:
        try:
            found = message.document()
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise NoValue(f"{{json:{pointer}}}: the payload is not JSON") from None
        try:
            for step in members:
                found = found[int(step)] if isinstance(found, list) else found[step]
        except (LookupError, TypeError, ValueError):
            raise NoValue(f"{{json:{pointer}}}: the payload has no such member") from None
        return found

    return value
