"""Retained messages: of each topic the newest that asked to be kept (3.1.1 section 3.3.1.3).

What it promises: never more than `limits.retained_messages` and `retained_bytes`; expired messages take no
room from others. A filter is only compared with names that begin with its levels before the first wildcard.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from typing import TYPE_CHECKING

from bridge.errors import RetainedFull
from bridge.mqtt.broker.message import Message, size_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bridge.clock import Clock
    from bridge.mqtt.broker.journal import Journal
    from bridge.mqtt.settings import Limits


class Retained:
    """The retained messages of all topics."""

    def __init__(self, journal: Journal, limits: Limits, clock: Clock) -> None:
        self._journal, self._limits, self._clock = journal, limits, clock
        self._messages: dict[str, Message] = {}
        self._bytes = 0
        self._names: list[str] | None = None  # sorted; None: to be made anew
        self._expiring: list[tuple[float, str]] = []  # a heap; a name may have got another message since

    def __len__(self) -> int:
        """How many there are."""
        return len(self._messages)

    @property
    def size(self) -> int:
        """Roughly the bytes of all of them."""
        return self._bytes

    def all(self) -> Iterable[Message]:
        """Every message."""
        return self._messages.values()

    def get(self, name: str) -> Message | None:
        """The message of a topic, unless it has expired."""
        message = self._messages.get(name)
        if message is not None and message.expired():
            self.publish(name, Message(message.topic, b"", retain=True))
            return None
        return message

    def check(self, name: str, payload: bytes) -> None:
        """Raise RetainedFull if the limits leave no room for this as the retained message of a topic."""
        if not self._fits(name, payload):
            self.drop_expired()
            if not self._fits(name, payload):
                limits = self._limits
                raise RetainedFull(
                    f"no room for a retained message of {len(payload)} bytes on {name!r}: "
                    f"{len(self._messages)} of [mqtt.limits] retained_messages = {limits.retained_messages} "
                    f"and {self._bytes} of retained_bytes = {limits.retained_bytes} are in use; raise the "
                    "limit, or clear some"
                )

    def publish(self, name: str, message: Message) -> bool:
        """Keep the newest message of a topic, or clear it if it is empty (MQTT-3.3.1-10). `check` it first.

        Returns whether the journal must be committed before the message may be acknowledged.
        """
        if not message.payload and name not in self._messages:
            return False
        self.keep(name, message)
        self._journal.retained(message)
        return True

    def keep(self, name: str, message: Message) -> None:
        """Make this the retained message of a topic; an empty one: there is none."""
        old = self._messages.pop(name, None)
        if old is not None:
            self._bytes -= old.size
        if message.payload:
            self._messages[name] = message
            self._bytes += message.size
            if message.expires is not None:
                heapq.heappush(self._expiring, (message.expires.at, name))
                self._tidy()
        if bool(message.payload) == (old is None):
            self._names = None

    def drop_expired(self) -> None:
        """Free the room of expired messages."""
        while self._expiring and self._expiring[0][0] <= self._clock.now() / 1000:
            self.get(heapq.heappop(self._expiring)[1])

    def candidates(self, topic_filter: str) -> list[str]:
        """The topics that a filter may match, and hardly any others."""
        first = min((at for at in map(topic_filter.find, "+#") if at >= 0), default=None)
        if first is None:
            return [topic_filter] if topic_filter in self._messages else []
        if self._names is None:
            self._names = sorted(self._messages)
        names, prefix = self._names, topic_filter[:first]
        if not prefix:
            return names
        found = names[bisect_left(names, prefix) : bisect_left(names, prefix[:-1] + "0")]  # the one after "/"
        return [prefix[:-1], *found] if prefix[:-1] in self._messages else found  # "a/#" matches "a" as well

    def _fits(self, name: str, payload: bytes) -> bool:
        if not payload:
            return True
        old = self._messages.get(name)
        size = self._bytes + size_of(name.encode(), payload) - (old.size if old is not None else 0)
        number = len(self._messages) + (old is None)
        return number <= self._limits.retained_messages and size <= self._limits.retained_bytes

    def _tidy(self) -> None:
        if len(self._expiring) > 2 * len(self._messages) + 100:  # most have got another message since
            live = self._messages.items()
            self._expiring = [(one.expires.at, name) for name, one in live if one.expires is not None]
            heapq.heapify(self._expiring)
