"""Messages that someone is denied to read, wherever they are stored.

What counts is the topic on which a message was published. A message in `refused_stream`, or in a stream whose
topics have changed, still has it. A dead letter has it in its payload, as has a dead letter about a dead
letter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from bridge.topics import matches

MOST = 1_000  # topics that are remembered
DEPTH = 16  # of dead letters about dead letters


class _Letter(Struct):
    """What counts of a dead letter (`plugin.api.dead_letter`)."""

    topic: str
    payload: bytes = b""


_letters = msgspec.json.Decoder(_Letter)


def topics_of(topic: str, payload: bytes) -> Iterator[str]:
    """Yield the topic of a stored message, and those of the messages that it is a dead letter about."""
    yield topic
    for _ in range(DEPTH):
        if not topic.startswith("streams/") or not payload.startswith(b'{"stream":'):
            return
        try:
            letter = _letters.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        topic, payload = letter.topic, letter.payload
        yield topic


class Withheld:
    """Whether a message is on a topic that one of the filters matches; call it with topic and payload."""

    def __init__(self, filters: Sequence[str]) -> None:
        self._filters = filters
        self._known: dict[str, bool] = {}

    def __call__(self, topic: str, payload: bytes) -> bool:
        return any(map(self._matches, topics_of(topic, payload)))

    def _matches(self, topic: str) -> bool:
        found = self._known.get(topic)
        if found is None:
            if len(self._known) >= MOST:
                self._known.clear()
            found = self._known[topic] = any(matches(one, topic) for one in self._filters)
        return found
