"""The subscriptions of an upstream at the other broker, and those that the broker refuses.

When the intake needs other filters, new ones are subscribed before old ones are unsubscribed. So a message
may come twice in between; in the other order it could be missed. A subscription counts once the broker has
granted it. A refused one is logged, is in `refused`, and is requested again every minute. One without an
answer is requested again on the next connection.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from paho.mqtt.subscribeoptions import SubscribeOptions

from bridge.topics import SHARE

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Collection, Iterable, Mapping

    import paho.mqtt.client as paho

    from bridge.mqtt.settings import BrokerSettings
    from bridge.mqtt.upstream.intake import Intake, Wish
    from bridge.runtime import Runtime, Timer

log = logging.getLogger(__name__)

ASK_AGAIN = 60.0  # seconds until a refused subscription is requested again


class Subscriptions:
    """The subscriptions of our session. Must be used in the event loop's thread."""

    def __init__(
        self,
        settings: BrokerSettings,
        client_id: str,
        intake: Intake,
        client: paho.Client,
        counts: Counter[str],
        runtime: Runtime,
        former: Collection[str] = (),
    ) -> None:
        """`former` has filters of an earlier definition, which our session there still has."""
        self._settings, self._client_id, self._intake = settings, client_id, intake
        self._client, self._counts, self._runtime = client, counts, runtime
        self._connected = False
        self._inherited = set(former)
        self._wanted: Mapping[str, Wish] = {}
        self._made: set[str] = set()  # granted or requested
        self._asked: dict[int, str] = {}  # requested on this connection, by packet id
        self._refused: dict[str, str] = {}  # filters, and the broker's reason
        self._former: set[str] = set()  # subscriptions of former streams, ended on this connection
        self._again: Timer | None = None

    def connected(self, present: bool) -> bool:
        """Use a new connection. Returns False if our session is no longer `present`."""
        lost = bool(self._made) and not present
        self._made = self._made - {*self._asked.values()} if present else set()
        self._asked.clear()
        self._former.clear()
        self._connected = True
        self.update()
        return not lost

    def disconnected(self) -> None:
        """Stop subscribing until the next connection."""
        self._connected = False
        if self._again is not None:
            self._again.cancel()
            self._again = None

    @property
    def held(self) -> Collection[str]:
        """The filters to which our session there may be subscribed, wanted or not."""
        return self._made | self._inherited

    def update(self) -> None:
        """Subscribe to the filters that are wanted now, and soon unsubscribe all others."""
        if not self._connected:
            return
        self._wanted = self._intake.wishes()
        self._refused = {one: why for one, why in self._refused.items() if one in self._wanted}
        for new in sorted(self._wanted.keys() - self._made):
            packet_id = self._subscribe(new, self._wanted[new])
            if packet_id is not None:  # otherwise the connection has just ended
                self._asked[packet_id] = new
                self._made.add(new)
        self._runtime.soon(self._unsubscribe)

    def _subscribe(self, topic_filter: str, wish: Wish) -> int | None:
        if self._settings.protocol != "5":
            return self._client.subscribe(topic_filter, wish.qos)[1]
        # Get retained messages only with a new subscription, not at every reconnect.
        handling = (
            SubscribeOptions.RETAIN_DO_NOT_SEND
            if topic_filter.startswith(SHARE)
            else SubscribeOptions.RETAIN_SEND_IF_NEW_SUB
        )
        options = SubscribeOptions(
            qos=wish.qos, retainAsPublished=wish.retain_as_published, retainHandling=handling
        )
        return self._client.subscribe(topic_filter, options=options)[1]

    def _unsubscribe(self) -> None:
        """End subscriptions that are no longer wanted.

        This is delayed, because a reload changes one stream after the other, and a topic may move to the
        next.
        """
        if self._connected:  # otherwise after the next connect
            for old in (self._made | self._inherited) - self._wanted.keys():
                self._client.unsubscribe(old)
            self._made &= self._wanted.keys()
            self._inherited.clear()

    def leave(self, former: str) -> None:
        """End a subscription that an earlier run has left in our session."""
        if former not in self._former:
            self._former.add(former)
            self._client.unsubscribe(former)

    def answered(self, packet_id: int, failed: str | None) -> None:
        """Record that the broker has granted a subscription, or refused it for this reason."""
        topic_filter = self._asked.pop(packet_id, None)
        if topic_filter not in self._wanted:
            return  # from an earlier connection, or for a deleted stream
        assert topic_filter is not None
        known = self._refused.pop(topic_filter, None)
        if failed is not None:
            self._made.discard(topic_filter)
            self._refused[topic_filter] = failed
            self._counts["refused_subscriptions"] += 1
            if known is None:
                log.error("%s; messages published there do not arrive here", self.refusal([topic_filter]))
            if self._again is None and self._connected:
                self._again = self._runtime.later(ASK_AGAIN, self._ask_again)
        elif known is not None:
            log.info("%s now grants the subscription to %r", self._settings.url, topic_filter)

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
