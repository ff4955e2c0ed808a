"""Mode "external": what we are subscribed to at the other broker, and what it refuses us.

When streams change, new filters are subscribed before old ones are unsubscribed: in between a message may
come twice; the other way round it could be missed. A subscription counts once the broker has granted it. A
refused one is logged, is in `refused`, and is requested again every minute. One that was not answered is
requested again on the next connection.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from paho.mqtt.subscribeoptions import SubscribeOptions

from bridge.topics import REQUEST_LEVEL, covers

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable

    import paho.mqtt.client as paho

    from bridge.model import MessageStreamDefinition
    from bridge.mqtt.settings import ExternalSettings
    from bridge.operations.manager import StreamManager
    from bridge.runtime import Runtime, Timer

log = logging.getLogger(__name__)

ASK_AGAIN = 60.0  # seconds until a refused subscription is requested again
REQUESTS = f"{REQUEST_LEVEL}/+/+"


class Subscriptions:
    """The subscriptions of our session. Use from the event loop's thread."""

    def __init__(
        self,
        settings: ExternalSettings,
        manager: StreamManager,
        client: paho.Client,
        counts: Counter[str],
        runtime: Runtime,
    ) -> None:
        self._settings, self._manager, self._client, self._counts = settings, manager, client, counts
        self._runtime = runtime
        self._connected = False
        self._wanted: set[str] = set()
        self._made: set[str] = set()  # granted, or under way
        self._asked: dict[int, str] = {}  # under way: by packet id, on this connection
        self._refused: dict[str, str] = {}  # filters, and the broker's reason
        self._former: set[str] = set()  # subscriptions of former streams, ended on this connection
        self._again: Timer | None = None

    def connected(self, present: bool) -> bool:
        """There is a connection; False if the session was ours, and is not `present` any more."""
        lost = bool(self._made) and not present
        self._made = self._made - {*self._asked.values()} if present else set()
        self._asked.clear()
        self._former.clear()
        self._connected = True
        self.update()
        return not lost

    def disconnected(self) -> None:
        """Nothing can be subscribed until the next connection."""
        self._connected = False
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def update(self) -> None:
        """Subscribe to what streams are bound to now, and soon to nothing else.

        A filter that another one covers is left out: brokers may deliver one message for each.
        """
        if not self._connected:
            return
        wanted = {REQUESTS} if self._settings.operations else set()
        for name, definition in self._manager.definitions.items():
            wanted |= _filters(name, definition)
        wanted = {one for one in wanted if not any(one != other and covers(other, one) for other in wanted)}
        self._wanted = {one if one == REQUESTS else self._shared(one) for one in wanted}
        self._refused = {one: why for one, why in self._refused.items() if one in self._wanted}
        for new in sorted(self._wanted - self._made):
            packet_id = self._subscribe(new)
            if packet_id is not None:  # else the connection has just ended
                self._asked[packet_id] = new
                self._made.add(new)
        self._runtime.soon(self._unsubscribe)

    def _subscribe(self, topic_filter: str) -> int | None:
        if self._settings.protocol != "5":
            return self._client.subscribe(topic_filter, 1)[1]
        # Retained messages only with a new subscription, not at every reconnect.
        handling = (
            SubscribeOptions.RETAIN_DO_NOT_SEND
            if self._settings.share_group
            else SubscribeOptions.RETAIN_SEND_IF_NEW_SUB
        )
        options = SubscribeOptions(qos=1, retainHandling=handling)
        return self._client.subscribe(topic_filter, options=options)[1]

    def _unsubscribe(self) -> None:
        """End the subscriptions that no stream has any more.

        Not at once: a reload changes one stream after the other, and the next may have the topic now.
        """
        if self._connected:  # else after the next connect
            for old in self._made - self._wanted:
                self._client.unsubscribe(old)
            self._made &= self._wanted

    def leave(self, name: str) -> None:
        """End the subscription of a former stream, which an earlier run has left in our session."""
        self._end(self._shared(f"streams/{name}/#"))

    def leave_requests(self) -> None:
        """End the subscription for requests, which an earlier run has left in our session."""
        self._end(REQUESTS)

    def _end(self, former: str) -> None:
        if former not in self._former:
            self._former.add(former)
            self._client.unsubscribe(former)

    def answered(self, packet_id: int, failed: str | None) -> None:
        """The broker has granted a subscription, or refused it for this reason."""
        topic_filter = self._asked.pop(packet_id, None)
        if topic_filter not in self._wanted:
            return  # of an earlier connection, or of a stream that is gone
        assert topic_filter is not None
        known = self._refused.pop(topic_filter, None)
        if failed is not None:
            self._made.discard(topic_filter)
            self._refused[topic_filter] = failed
            self._counts["refused_subscriptions"] += 1
            if known is None:
                log.error("%s; what is published there is not stored", self._refusal([topic_filter]))
            if self._again is None and self._connected:
                self._again = self._runtime.later(ASK_AGAIN, self._ask_again)
        elif known is not None:
            log.info("%s grants our subscription to %r now", self._settings.url, topic_filter)

    def _ask_again(self) -> None:
        self._again = None
        self.update()

    @property
    def refused(self) -> dict[str, str]:
        """The streams whose messages do not all reach us, and why."""
        found: dict[str, str] = {}
        for name, definition in self._manager.definitions.items() if self._refused else ():
            own = {self._shared(one) for one in _filters(name, definition)}
            lacking = [one for one in self._refused if any(covers(one, mine) for mine in own)]
            if lacking:
                found[name] = self._refusal(lacking)
        return found

    def _refusal(self, filters: Iterable[str]) -> str:
        settings = self._settings
        names = ", ".join(map(repr, sorted(filters)))
        reasons = ", ".join(sorted({self._refused[one] for one in filters}))
        who = f"user {settings.username!r}" if settings.username else f"client id {settings.client_id!r}"
        return f"{settings.url} refuses our subscription to {names} ({reasons}); allow that to {who} there"

    def _shared(self, topic_filter: str) -> str:
        group = self._settings.share_group
        return f"$share/{group}/{topic_filter}" if group else topic_filter


def _filters(name: str, definition: MessageStreamDefinition) -> set[str]:
    return {*definition.topics, f"streams/{name}/#"}
