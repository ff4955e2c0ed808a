"""Partition keys: a template over a record, such as `{topic/1}-{json:/device/id}`.

    {topic}            the whole topic            {topic/N}   its level N, from 0; {topic/-1} is the last
    {stream} {gateway} their names                {json:/P}   the value at the JSON pointer /P of the payload
    {client}           the MQTT client id of the publisher

A record without one of the values (no such level, no JSON, no such member) has no key, and then no
order. The client is known for messages that were published to the embedded broker while an export of
the stream had `{client}`. Keys over 256 characters are replaced by their SHA-256 in hex.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import msgspec

from bridge.plugin.api import Batch, Record

MAX_KEY = 256
_FIELD = re.compile(r"\{([^{}]*)\}")
_Part = Callable[[Batch, Record], str | None]


class KeyTemplate:
    """A parsed template; raises ValueError for one that is wrong."""

    def __init__(self, template: str) -> None:
        pieces = _FIELD.split(template)
        if any("{" in text or "}" in text for text in pieces[::2]):
            raise ValueError(f"{template!r}: unbalanced brace; write fields as {{name}}")
        self._parts = [_literal(p) if n % 2 == 0 else _field(p) for n, p in enumerate(pieces) if n % 2 or p]
        if not self._parts:
            raise ValueError("a partition key is empty; omit it for random keys")

    def key(self, batch: Batch, record: Record) -> str | None:
        """The record's key; None if it has none."""
        found = []
        for part in self._parts:
            value = part(batch, record)
            if value is None:
                return None
            found.append(value)
        key = "".join(found)
        return key if 0 < len(key) <= MAX_KEY else hashlib.sha256(key.encode()).hexdigest() if key else None


def _literal(text: str) -> _Part:
    return lambda batch, record: text


def _field(name: str) -> _Part:
    if name == "topic":
        return lambda batch, record: record.topic
    if name == "stream":
        return lambda batch, record: batch.stream
    if name == "client":
        return lambda batch, record: record.client or None
    if name == "gateway":
        return lambda batch, record: batch.gateway
    if re.fullmatch(r"topic/-?\d+", name):
        return _level(int(name[6:]))
    if name.startswith("json:/"):
        return _pointer(name[5:])
    raise ValueError(
        f"{{{name}}} is not a field; known fields: {{topic}} {{topic/N}} {{client}} {{stream}} {{gateway}} "
        "{json:/pointer}"
    )


def _level(number: int) -> _Part:
    def part(batch: Batch, record: Record) -> str | None:
        try:
            return record.topic.split("/")[number]
        except IndexError:
            return None

    return part


def _pointer(pointer: str) -> _Part:
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]

    def part(batch: Batch, record: Record) -> str | None:
        try:
            value: Any = msgspec.json.decode(record.payload)
            for step in steps:
                value = value[int(step)] if isinstance(value, list) else value[step]
            return value if isinstance(value, str) else msgspec.json.encode(value).decode()
        except (msgspec.DecodeError, LookupError, TypeError, ValueError, RecursionError):
            return None

    return part
