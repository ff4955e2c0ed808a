"""Topics of another broker, and where their messages are published here.

A mapping is a topic filter of that broker and a template for the topic here:

    {topic}        the topic there          {topic/N}      its level N, from 0; {topic/-1} is the last
    {gateway}      the id of this gateway   {topic/N/#}    its level N and all after it

`{gateway}` may also be in the filter, so one configuration fits every gateway of a fleet. A message whose
topic lacks a level, or that would go to a topic of the broker itself, goes nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from bridge.topics import REQUEST_LEVEL, filter_mistake, is_topic_name

GATEWAY = "{gateway}"
_FIELD = re.compile(r"\{([^{}]*)\}")
_LEVEL = re.compile(r"topic/(-?\d{1,5})(/#)?")

_Part = Callable[[list[str]], str]  # of the levels of a topic; raises IndexError


class Mapping(Struct, frozen=True, kw_only=True):
    """[[upstream.mapping]]: what comes from the other broker, and where it goes.

    `filter` is a topic filter there, without `$share/`. `topic` is the topic here, a template: see
    docs/reference/upstream.md. `qos` is the QoS of the subscription, 0 or 1.
    """

    filter: str
    topic: str = "{topic}"
    qos: Annotated[int, Meta(ge=0, le=1)] = 1

    def __post_init__(self) -> None:
        mistakes = []
        if (mistake := filter_mistake(self.filter.replace(GATEWAY, "gateway"))) is not None:
            mistakes.append(f"`filter`: {mistake}")
        try:
            topic_template(self.topic.replace(GATEWAY, "gateway"))
        except ValueError as error:
            mistakes.append(f"`topic`: {error}")
        if mistakes:
            raise ValueError("\n".join(mistakes))

    def of(self, gateway: str) -> Mapping:
        """The mapping of one gateway; raises ValueError if its id makes no topic."""
        return msgspec.structs.replace(
            self, filter=self.filter.replace(GATEWAY, gateway), topic=self.topic.replace(GATEWAY, gateway)
        )


def topic_template(text: str) -> Callable[[str], str | None]:
    """Return a function from a topic there to the topic here; None if it has none.

    Raises ValueError for an unknown field, a wildcard, and a topic that belongs to the broker.
    """
    pieces = _FIELD.split(text)
    if any(set("{}+#\0") & set(piece) for piece in pieces[::2]) or not text:
        raise ValueError(f"{text!r} is not a topic; it has no wildcards, and fields are like {{topic/1}}")
    if text.startswith(("$", f"{REQUEST_LEVEL}/")):
        raise ValueError(f"{text!r}: topics below `$` and {REQUEST_LEVEL}/ belong to the broker")
    parts: list[str | _Part] = [
        _field(piece) if n % 2 else piece for n, piece in enumerate(pieces) if n % 2 or piece
    ]

    def render(topic: str) -> str | None:
        levels = topic.split("/")
        try:
            found = "".join([part if isinstance(part, str) else part(levels) for part in parts])
        except IndexError:
            return None
        return found if is_topic_name(found) and not found.startswith(f"{REQUEST_LEVEL}/") else None

    return render


def _field(name: str) -> _Part:
    if name == "topic":
        return "/".join
    found = _LEVEL.fullmatch(name)
    if found is None:
        raise ValueError(f"{{{name}}} is not a field; known: {{topic}} {{topic/N}} {{topic/N/#}} {{gateway}}")
    number = int(found[1])
    if found[2] is None:
        return lambda levels: levels[number]

    def rest(levels: list[str]) -> str:
        levels[number]  # raises IndexError
        return "/".join(levels[number:])

    return rest
