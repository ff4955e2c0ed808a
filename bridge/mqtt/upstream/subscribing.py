"""The subscriptions of an upstream at the other broker, and those that the broker refuses.

When the intake needs other filters, new ones are subscribed before old ones are unsubscribed. So a message
may come twice in between; in the other order it could be missed. A subscription counts once the broker has
granted it. A refused one is logged, is in `refused`, and is requested again every minute. One without an
answer is requested again on the next connection.

In MQTT 3.1.1 a broker sends all retained messages again for each SUBSCRIBE. So one is left out if the session
is still there, and if `Joined.granted` has the answer to the same SUBSCRIBE: protocol, filter and options. A
filter is in that record, without an answer, before anything about it is sent. So after a kill at any moment
the record has no subscription that the broker lacks, and every one that it may have.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5
from bridge.topics import SHARE

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Collection, Iterable

    from bridge.errors import StreamError
    from bridge.mqtt.broker.joined import Joined
    from bridge.mqtt.broker.journal import Journal
    from bridge.mqtt.settings import BrokerSettings
    from bridge.mqtt.upstream.client import Client
    from bridge.mqtt.upstream.intake import Intake, Wish
    from bridge.runtime import Runtime, Timer

log = logging.getLogger(__name__)

ASK_AGAIN = 60.0  # seconds until a refused subscription is requested again
ONLY_NEW, NEVER = 0x10, 0x20  # when retained messages are sent (MQTT 5 section 3.8.3.1)


class Subscriptions:
    """The subscriptions of our session. Must be used in the event loop's thread."""

    def __init__(
        self,
        settings: BrokerSettings,
        client_id: str,
        intake: Intake,
        client: Client,
        counts: Counter[str],
        runtime: Runtime,
        journal: Journal,
        joined: Joined,
    ) -> None:
        self._settings, self._client_id, self._intake = settings, client_id, intake
        self._client, self._counts, self._runtime = client, counts, runtime
        self._journal, self._joined = journal, joined
        self._visit = 0  # the number of the connection; 0 without one
        self._visits = 0
        self._lacks: dict[int, int] = {}  # properties of the CONNACK
        self._wanted: dict[str, int] = {}  # as in `Joined.granted`
        self._made: dict[str, int] = {}  # those granted or requested on this connection
        self._asked: dict[int, tuple[str, int]] = {}  # requested on this connection, by packet id
        self._refused: dict[str, str] = {}  # filters, and the broker's reason
        self._former: set[str] = set()  # subscriptions of former streams, ended on this connection
        self._again: Timer | None = None

    def connected(self, properties: p.Properties, *, trusted: bool) -> None:
        """Use a new connection. `trusted`: the broker has the session that the record is about."""
        # In MQTT 5 a SUBSCRIBE brings no retained messages again, so each start sends them all.
        trusted = trusted and (self._client.level != V5 or bool(self._visits))
        self._made = {one: value for one, value in self._joined.granted.items() if value and trusted}
        self._lacks = properties
        self._asked.clear()
        self._former.clear()
        self._visits = self._visit = self._visits + 1
        self.update()

    def disconnected(self) -> None:
        """Stop subscribing until the next connection."""
        self._visit = 0
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def update(self) -> None:
        """Subscribe to the filters that are wanted now, and soon unsubscribe all others."""
        if not self._visit:
            return
        self._wanted = {one: self._value(one, wish) for one, wish in self._intake.wishes().items()}
        self._refused = {one: why for one, why in self._refused.items() if one in self._wanted}
        new = [one for one in sorted(self._wanted) if self._made.get(one) != self._wanted[one]]
        self._made |= {one: self._wanted[one] for one in new}
        if new:
            self._change(new, self._subscribe)
        self._runtime.soon(self._unsubscribe)

    def _value(self, topic_filter: str, wish: Wish) -> int:
        """The protocol and the options byte of a SUBSCRIBE."""
        options = wish.qos
        if self._client.level == V5:
            # Get retained messages only with a new subscription, not at every reconnect.
            handling = NEVER if topic_filter.startswith(SHARE) else ONLY_NEW
            options |= handling | (8 if wish.retain_as_published else 0)
        return self._client.protocol << 8 | options

    def _change(self, filters: list[str], do: Callable[[list[str]], None]) -> None:
        """Do something about these filters, once the record has them without an answer."""
        visit = self._visit
        self._joined.granted |= dict.fromkeys(filters, 0)
        self._journal.joined(self._joined.record())

        def recorded(error: StreamError | None) -> None:
            if visit != self._visit:
                return
            if error is None:
                do(filters)
            else:
                self._journal.after_commit(recorded)  # after the next attempt

        self._journal.after_commit(recorded)

    def _subscribe(self, filters: list[str]) -> None:
        for one in filters:
            if why := self._impossible(one):
                self._settle(one, why)
            elif value := self._made.get(one):
                self._asked[self._client.subscribe(one, value & 0xFF)] = one, value

    def _impossible(self, topic_filter: str) -> str:
        """Return why the broker must not be asked (MQTT 5 sections 3.2.2.3.11 and 13); empty if it may."""
        shared = topic_filter.startswith(SHARE)
        if shared and not self._lacks.get(p.SHARED_AVAILABLE, 1):
            return "Shared Subscriptions not supported"
        if {"+", "#"} & set(topic_filter) and not self._lacks.get(p.WILDCARDS_AVAILABLE, 1):
            return "Wildcard Subscriptions not supported"
        return ""

    def _unsubscribe(self) -> None:
        """End subscriptions that are no longer wanted.

        This is delayed, because a reload changes one stream after the other, and a topic may move to the
        next.
        """
        if old := [one for one in self._joined.granted if one not in self._wanted and self._visit]:
            self._change(old, self._end)

    def _end(self, filters: list[str]) -> None:
        for one in filters:
            if one not in self._wanted:  # else it is to stay after all
                self._client.unsubscribe(one)
                self._made.pop(one, None)
                self._joined.granted.pop(one, None)
        self._journal.joined(self._joined.record())

    def leave(self, former: str) -> None:
        """End a subscription that an earlier run has left in our session."""
        if former not in self._former:
            self._former.add(former)
            self._client.unsubscribe(former)

    def answered(self, packet_id: int, failed: str | None) -> None:
        """Record that the broker has granted a subscription, or refused it for this reason."""
        topic_filter, value = self._asked.pop(packet_id, ("", 0))
        if value and self._made.get(topic_filter) == value:  # else it has changed, or its stream is deleted
            self._settle(topic_filter, failed)

    def _settle(self, topic_filter: str, failed: str | None) -> None:
        known = self._refused.pop(topic_filter, None)
        granted = self._joined.granted
        if failed is None:
            granted[topic_filter] = self._made[topic_filter]
            if known is not None:
                log.info("%s now grants the subscription to %r", self._settings.url, topic_filter)
        else:
            self._made.pop(topic_filter, None)
            granted.pop(topic_filter, None)
            self._refused[topic_filter] = failed
            self._counts["refused_subscriptions"] += 1
            if known is None:
                log.error("%s; messages published there do not arrive here", self.refusal([topic_filter]))
            if self._again is None and self._visit:
                self._again = self._runtime.later(ASK_AGAIN, self._ask_again)
        self._journal.joined(self._joined.record())

    def _ask_again(self) -> None:
        self._again = None
        self.update()

    @property
    def refused(self) -> Collection[str]:
        """The filters that the broker refuses."""
        return self._refused

    def refusal(self, filters: Iterable[str]) -> str:
        """Return which of our subscriptions the broker refuses, why, and what to do."""
        settings = self._settings
        names = ", ".join(map(repr, sorted(filters)))
        reasons = ", ".join(sorted({self._refused[one] for one in filters}))
        who = f"user {settings.username!r}" if settings.username else f"client id {self._client_id!r}"
        return f"{settings.url} refuses our subscription to {names} ({reasons}); allow that to {who} there"
