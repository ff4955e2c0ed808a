"""Where a message goes: the streams bound to its topic, and the sessions subscribed to it.

A `Route` is all that is known about one topic. Routes are kept until streams or subscriptions change,
so that a PUBLISH costs one dict look-up, whatever the number of streams, filters and clients.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bridge.mqtt.message import Receiver, Subscription, receiver_of
from bridge.mqtt.outbox import Outgoing
from bridge.mqtt.packets import BAD_TOPIC_NAME, ProtocolError, text
from bridge.mqtt.retained import Retained
from bridge.topics import REQUEST_LEVEL, FilterTree, is_topic_name, matches

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable

    from bridge.clock import Clock
    from bridge.mqtt.delivery import Delivery
    from bridge.mqtt.journal import Journal
    from bridge.mqtt.message import Message
    from bridge.mqtt.sessions import Session
    from bridge.mqtt.settings import Limits
    from bridge.mqtt.store import Store, Stream

# Where Mosquitto says that one of its bridges is connected, at both ends, unless it is configured otherwise.
BRIDGE_STATE = "$SYS/broker/connection/"
RESERVED = ("$SYS/", "$share/", REQUEST_LEVEL + "/")
ROUTES = 50_000  # topics remembered; a topic not in use costs its look-up again
LOOK_UPS = 1_000  # among the retained messages, some milliseconds in which nobody else has a turn


class Route:
    """One topic: its streams and its receivers. `append` is set if all there is to do is one append."""

    __slots__ = (
        "append",
        "denied",
        "ignored",
        "name",
        "no_local",
        "receivers",
        "request",
        "reserved",
        "stream",
        "streams",
        "with_client",
    )

    def __init__(self, name: str, streams: tuple[Stream, ...]) -> None:
        self.name, self.streams = name, streams
        self.stream: Stream | None = streams[0] if len(streams) == 1 else None
        self.receivers: dict[Session, Receiver] = {}
        self.no_local = False  # some receiver does not want its own messages back
        self.request = name.partition("/")[0] == REQUEST_LEVEL
        self.ignored = name.startswith(BRIDGE_STATE)  # acknowledged and dropped: a bridge goes on
        self.reserved = not self.request and not self.ignored and name.startswith(RESERVED)
        self.denied = self.reserved  # for this client
        self.with_client = False  # some stream keeps who published
        self.append: Callable[[bytes, bytes], int] | None = None


class Router:
    """All topics, subscriptions and retained messages. `epoch` grows when kept routes are out of date."""

    def __init__(
        self,
        store: Store,
        delivery: Delivery,
        journal: Journal,
        limits: Limits,
        counts: Counter[str],
        clock: Clock,
    ) -> None:
        self.epoch = 0
        self.retained = Retained(journal, limits, counts, clock)
        self._store, self._delivery, self._journal = store, delivery, journal
        self._tree: FilterTree[tuple[Session, Subscription]] = FilterTree()
        self._routes: dict[bytes, Route] = {}

    def forget_routes(self) -> None:
        """Streams or subscriptions have changed."""
        self.epoch += 1
        self._routes.clear()

    def route(self, topic: bytes) -> Route:
        """The route of a topic name, which is checked (MQTT 4.7)."""
        route = self._routes.get(topic)
        if route is not None:
            return route
        name = text(topic)
        # Below `$` a client may publish, to no avail for wildcards (4.7.2); not where the server would.
        if not is_topic_name(name.removeprefix("$")):
            raise ProtocolError(f"topic name {name[:80]!r}", BAD_TOPIC_NAME)
        route = Route(name, () if name.startswith(RESERVED) else self._store.bound(name))
        found: dict[Session, list[Subscription]] = {}
        for session, subscription in self._tree.match(name):
            if session.identity.may_read(name):
                found.setdefault(session, []).append(subscription)
                route.no_local |= subscription.no_local
        route.receivers = {session: receiver_of(wanted) for session, wanted in found.items()}
        route.with_client = any(self._store.wants_client(stream.name) for stream in route.streams)
        if route.stream is not None and not route.receivers and not route.with_client:
            route.append = route.stream.append
        if len(self._routes) >= ROUTES:
            self._routes.clear()
        self._routes[topic] = route
        return route

    def subscribe(self, session: Session, subscription: Subscription) -> bool:
        """Add or replace a subscription; tell whether it is a new one (MQTT-3.8.4-3)."""
        old = session.subscriptions.get(subscription.filter)
        if old is not None:
            self._tree.remove(old.filter, (session, old))
        session.subscriptions[subscription.filter] = subscription
        self._tree.add(subscription.filter, (session, subscription))
        self.forget_routes()
        return old is None

    def unsubscribe(self, session: Session, topic_filter: str) -> bool:
        """Remove a subscription; tell whether there was one."""
        subscription = session.subscriptions.pop(topic_filter, None)
        if subscription is None:
            return False
        self._tree.remove(topic_filter, (session, subscription))
        self._delivery.unsubscribe(session, topic_filter)
        self.forget_routes()
        return True

    def publish(self, route: Route, message: Message, origin: Session | None = None) -> bool:
        """Give a message to all receivers and keep it if it is retained; streams are the caller's.

        Returns whether the journal must be committed before the message may be acknowledged.
        """
        waits = False
        if message.retain:
            waits = self.retained.publish(route.name, message)
        receivers = route.receivers
        if not receivers:
            return waits
        if route.no_local and origin in receivers:
            receivers = self._without_own(route, origin)
        live = False
        lasting: list[Outgoing] = []
        homes: list[Session] = []
        for session, receiver in receivers.items():
            qos = min(message.qos, receiver.qos)
            if not qos and not route.streams:
                live = True
                continue
            retain = message.retain and receiver.retain_as_published
            out = Outgoing(message, qos, retain, receiver.identifiers)
            if qos and session.persistent and not route.streams:
                # A stream's durable copy is in the stream; of other topics this is the only one.
                lasting.append(out)
                homes.append(session)
            else:
                session.outbox.put(out)
        if lasting:
            self._journal.queued(message, homes, lasting)
            for session, out in zip(homes, lasting, strict=True):
                session.outbox.put(out)
            waits = True
        if live:
            message.live = receivers
            self._delivery.publish(message)
        return waits

    def deliver_live(self, session: Session, message: Message) -> None:
        """`Delivery` has found a subscriber of a message: what it gets at QoS 0 is sent to it here."""
        receiver = message.live.get(session)
        if receiver is None or min(message.qos, receiver.qos):
            return
        if session.seen is message:  # another of its filters matched as well
            return
        session.seen = message
        retain = message.retain and receiver.retain_as_published
        session.outbox.put(Outgoing(message, 0, retain, receiver.identifiers))

    async def send_retained(self, session: Session, subscriptions: Iterable[Subscription]) -> None:
        """Send what is retained to new subscriptions (MQTT-3.3.1-6), as far as the client may read it.

        Others have their turn meanwhile: there may be a thousand filters, and any number of messages.
        """
        connection, looked = session.connection, 0
        for subscription in subscriptions:
            for name in self.retained.candidates(subscription.filter):
                looked += 1
                if looked % LOOK_UPS == 0:
                    await asyncio.sleep(0)
                    if session.connection is not connection:
                        return
                if matches(subscription.filter, name) and session.identity.may_read(name):
                    self._send_retained(session, subscription, name)

    def _send_retained(self, session: Session, subscription: Subscription, name: str) -> None:
        message = self.retained.get(name)
        if message is None:
            return
        qos = min(message.qos, subscription.qos)
        identifiers = (subscription.identifier,) if subscription.identifier else ()
        out = Outgoing(message, qos, True, identifiers)
        if qos and session.persistent and not self._store.bound(name):
            self._journal.queued(message, [session], [out])
        session.outbox.put(out)

    def _without_own(self, route: Route, origin: Session | None) -> dict[Session, Receiver]:
        """The receivers, without what the publisher asked not to be sent back (MQTT 5 No Local)."""
        receivers = dict(route.receivers)
        if origin is not None:
            wanted = [
                s for s in origin.subscriptions.values() if not s.no_local and matches(s.filter, route.name)
            ]
            del receivers[origin]
            if wanted:
                receivers[origin] = receiver_of(wanted)
        return receivers
