"""Retained messages: the newest message of each topic that has the retain flag (3.1.1 section 3.3.1.3).

What it promises: never more than `limits.retained_messages` and `retained_bytes`; expired messages take no
room from others. When there is no room, a message is not retained if its publisher has as much as anybody.
Else it takes the room of whoever has most: the message that this one set first is dropped, logged and counted
(`dropped_retained_full`). So nobody takes all of the room, and it goes back and forth between no two.

A filter is only compared with names that begin with its levels before the first wildcard.
"""

from __future__ import annotations

import heapq
import logging
from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

from bridge import books
from bridge.mqtt.broker.message import Message, size_of
from bridge.net.ranking import Ranking

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bridge.access.rules import Holder
    from bridge.clock import Clock
    from bridge.mqtt.broker.journal import Journal
    from bridge.mqtt.broker.reports import Reports
    from bridge.mqtt.settings import Limits
    from bridge.mqtt.wire.packets import Publish

log = logging.getLogger(__name__)


class _Share:
    """What one holder has: its topics, in the order in which they were set, and the bytes of all."""

    __slots__ = ("bytes", "names")

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.bytes = 0


class Retained:
    """The retained messages of all topics."""

    def __init__(self, journal: Journal, limits: Limits, clock: Clock, reports: Reports) -> None:
        self._journal, self._limits, self._clock, self._reports = journal, limits, clock, reports
        self._messages: dict[str, Message] = {}
        self._holders: dict[str, Holder] = {}  # by topic
        self._shares: dict[Holder, _Share] = {}
        self._by_number: Ranking[Holder] = Ranking()
        self._by_bytes: Ranking[Holder] = Ranking()
        self._bytes = 0
        self._names: list[str] | None = None  # sorted; None: nobody has asked for them yet
        self._changes = 0  # of `_names`
        self._expiring: list[tuple[float, str]] = []  # a heap; a topic may have got a newer message since
        books.opened(self)

    def recount(self) -> Iterable[books.Entry]:
        yield "bytes", self._bytes, sum(message.size for message in self._messages.values())
        shares: dict[Holder, tuple[set[str], int]] = {}
        for name, message in self._messages.items():
            names, size = shares.get(holder := self._holders[name], (set(), 0))
            shares[holder] = names | {name}, size + message.size
        yield "shares", {who: (set(one.names), one.bytes) for who, one in self._shares.items()}, shares

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._messages)

    @property
    def size(self) -> int:
        """Return roughly the bytes of all of them."""
        return self._bytes

    def all(self) -> Iterable[Message]:
        """Return every message."""
        return self._messages.values()

    def holders(self) -> Iterator[tuple[Message, Holder]]:
        """Every message, and who it counts for."""
        for name, message in self._messages.items():
            yield message, self._holders[name]

    def get(self, name: str) -> Message | None:
        """Return the message of a topic, unless it has expired."""
        message = self._messages.get(name)
        if message is not None and message.expired():
            self._drop(name)
            return None
        return message

    def refusal(self, name: str, packet: Publish, holder: Holder) -> str:
        """Return why there is no room for this as the retained message of a topic; empty if there is."""
        if not packet.payload:
            return ""
        size = size_of(packet.topic, packet.payload, packet.properties)
        if why := self._lacks_room(name, size, holder):
            self.drop_expired()
            why = self._lacks_room(name, size, holder)
        if not why:
            return ""
        return (
            f"no room for a retained message of {size} bytes in memory on {name!r}: {why}; raise the limit, "
            "or clear some"
        )

    def publish(self, name: str, message: Message, holder: Holder) -> bool:
        """Keep the newest message of a topic, or clear it if it is empty (MQTT-3.3.1-10).

        Ask for its `refusal` first.

        Returns whether the journal must be committed before the message may be acknowledged.
        """
        if not message.payload and name not in self._messages:
            return False
        self.keep(name, message, holder)
        self._journal.retained(message, holder)
        if message.payload:
            while len(self._messages) > self._limits.retained_messages:
                self._displace(name, holder, self._by_number.first())
            while self._bytes > self._limits.retained_bytes:
                self._displace(name, holder, self._by_bytes.first())
        return True

    def keep(self, name: str, message: Message, holder: Holder) -> None:
        """Make this the retained message of a topic; an empty one: there is none."""
        old = self._messages.pop(name, None)
        if old is not None:
            self._bytes -= old.size
            self._count(self._holders.pop(name), name, -old.size)
        if message.payload:
            self._messages[name], self._holders[name] = message, holder
            self._bytes += message.size
            self._count(holder, name, message.size)
            if message.expires is not None:
                heapq.heappush(self._expiring, (message.expires.at, name))
                self._tidy()
        names = self._names
        if names is not None and bool(message.payload) == (old is None):
            self._changes += 1
            if message.payload:
                insort(names, name)
            else:
                del names[bisect_left(names, name)]

    def drop_expired(self) -> None:
        """Remove expired messages."""
        while self._expiring and self._expiring[0][0] <= self._clock.now() / 1000:
            self.get(heapq.heappop(self._expiring)[1])

    def candidates(self, topic_filter: str, after: str = "") -> Iterator[str]:
        """Yield the topics above `after` that a filter may match, and few others, in order.

        Each step is one look-up. Whoever takes them may stop at any time, and go on in another turn: with
        the same iterator, or with a new one after the last topic. Topics come and go meanwhile.
        """
        first = min((at for at in map(topic_filter.find, "+#") if at >= 0), default=None)
        prefix = topic_filter if first is None else topic_filter[:first]
        alone = prefix if first is None else prefix[:-1]  # "a/#" matches "a" as well
        if after < alone in self._messages:
            yield alone
        if first is None:
            return
        if self._names is None:
            self._names = sorted(self._messages)
        names, seen = self._names, self._changes
        at = max(bisect_right(names, after), bisect_left(names, prefix))
        while at < len(names) and (name := names[at]).startswith(prefix):
            yield name
            if seen == self._changes:
                at += 1
            else:
                at, seen = bisect_right(names, name), self._changes

    def _lacks_room(self, name: str, size: int, holder: Holder) -> str:
        """Why a message of this size is refused to a holder; empty if it may be kept."""
        old, owner, share = self._messages.get(name), self._holders.get(name), self._shares.get(holder)
        freed = 0 if old is None else old.size
        number, total = len(self._messages) + (old is None), self._bytes + size - freed
        own_number, own_bytes = (0, 0) if share is None else (len(share.names), share.bytes)
        if size > self._limits.retained_bytes:
            return f"[mqtt.limits] retained_bytes is only {self._limits.retained_bytes}"
        if number > self._limits.retained_messages:
            most = self._by_number.first()
            if most is None or own_number + 1 >= len(self._shares[most].names):
                limit = f"[mqtt.limits] retained_messages = {self._limits.retained_messages}"
                return f"{limit} are in use, and nobody has more of them than {holder}"
        if total > self._limits.retained_bytes:
            most = self._by_bytes.first()
            own_bytes += size - (freed if owner == holder else 0)
            if most is None or own_bytes >= self._shares[most].bytes:
                limit = f"{self._bytes} of [mqtt.limits] retained_bytes = {self._limits.retained_bytes}"
                return f"{limit} are in use, and nobody would have more of them than {holder}"
        return ""

    def _displace(self, name: str, holder: Holder, most: Holder | None) -> None:
        """Make room for the message of a topic, where `most` has most."""
        names = () if most is None else self._shares[most].names
        oldest = next((one for one in names if one != name), None)
        if oldest is None:  # what it had most of was replaced just now
            oldest = next(one for one in self._messages if one != name)
        loser = self._holders[oldest]
        self._drop(oldest)
        self._reports.counts["dropped_retained_full"] += 1
        log.warning(
            "the retained message on %.200r is dropped, for one of %s: %s has most, and [mqtt.limits] "
            "retained_messages or retained_bytes is reached (counted in the metrics and on the status page)",
            oldest,
            holder,
            loser,
        )

    def _drop(self, name: str) -> None:
        self.publish(name, Message(self._messages[name].topic, b"", retain=True), self._holders[name])

    def _count(self, holder: Holder, name: str, size: int) -> None:
        """A holder has set the message of a topic; a negative size: it is gone."""
        share = self._shares.get(holder)
        if share is None:
            share = self._shares[holder] = _Share()
        share.bytes += size
        if size > 0:
            share.names[name] = None
        else:
            del share.names[name]
        if share.names:
            self._by_number.set(holder, -len(share.names))
            self._by_bytes.set(holder, -share.bytes)
        else:
            del self._shares[holder]
            self._by_number.set(holder, None)
            self._by_bytes.set(holder, None)

    def _tidy(self) -> None:
        if len(self._expiring) > 2 * len(self._messages) + 100:  # most are outdated
            live = self._messages.items()
            self._expiring = [(one.expires.at, name) for name, one in live if one.expires is not None]
            heapq.heapify(self._expiring)
