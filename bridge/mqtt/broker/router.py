"""Where a message goes: the streams bound to its topic, and the sessions subscribed to it.

A `Route` is everything known about one topic. Routes are cached until streams or subscriptions change, so a
PUBLISH costs one dict look-up, whatever the number of streams, filters and clients.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from bridge.mqtt.broker.feeds import Feeds
from bridge.mqtt.broker.memory import size_of_filter
from bridge.mqtt.broker.message import Receiver, Subscription, receiver_of
from bridge.mqtt.broker.outbox import Outgoing
from bridge.mqtt.broker.retained import Retained
from bridge.mqtt.broker.shared import Group, Share
from bridge.mqtt.wire.packets import BAD_TOPIC_NAME, ProtocolError, text
from bridge.topics import REQUEST_LEVEL, SHARE, FilterTree, Remembered, is_topic_name, unshared

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.access.rules import Holder
    from bridge.clock import Clock
    from bridge.mqtt.broker.journal import Journal
    from bridge.mqtt.broker.message import Message
    from bridge.mqtt.broker.reports import Reports
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.broker.store import Store, Stream
    from bridge.mqtt.broker.unmatched import Topics
    from bridge.mqtt.settings import Limits
    from bridge.net.turns import Turns
    from bridge.runtime import Runtime

OURS = "$SYS/"  # where this broker publishes its state
# By default, Mosquitto publishes here, at both ends, that one of its bridges is connected.
BRIDGE_STATE = f"{OURS}broker/connection/"
RESERVED = (OURS, SHARE, REQUEST_LEVEL + "/")
# How the topics of `server.systopics` go on. No will of an ordinary client may be there.
STATUS = (
    "bytes", "clients", "heap", "load", "messages", "publish", "retained", "shared_", "store",
    "subscriptions", "uptime", "version",
)  # fmt: skip
ROUTE = 500  # bytes of a route,
RECEIVER = 150  # and of one of its receivers
PRUNED = 50  # filters taken out of the tree between two looks at the clock


class Route:
    """One topic with its streams and receivers. `append` is set if a PUBLISH needs only one append."""

    __slots__ = (
        "append",
        "delivers",
        "denied",
        "ignored",
        "name",
        "own",
        "receivers",
        "request",
        "reserved",
        "shares",
        "stream",
        "streams",
        "undecided",
        "unmatched",
        "unwanted",
        "with_client",
    )

    def __init__(self, name: str, streams: tuple[Stream, ...]) -> None:
        self.name, self.streams = name, streams
        self.stream: Stream | None = streams[0] if len(streams) == 1 else None
        self.receivers: dict[Session, Receiver] = {}
        # Clients that do not want their own messages back (No Local), with their other subscriptions.
        self.own: dict[Session, Receiver | None] = {}
        self.shares: dict[str, Share] = {}  # by their filters
        self.delivers = False  # whether it has receivers or shares
        self.request = name.partition("/")[0] == REQUEST_LEVEL
        self.ignored = name.startswith(BRIDGE_STATE)  # acknowledged and dropped, so that bridges work
        self.reserved = not self.request and not self.ignored and name.startswith(RESERVED)
        self.denied = self.reserved  # for this client
        self.unwanted = False  # it has no stream, and this client's listener refuses that
        self.unmatched: Topics | None = None  # where it counts, without a stream
        self.undecided = False  # denied only because no plugin has answered
        self.with_client = False  # whether a stream keeps the publisher's client id
        self.append: Callable[[bytes, bytes], int] | None = None

    @property
    def stored_nowhere(self) -> bool:
        """Whether clients may publish messages on it, and no stream takes them."""
        return not (self.streams or self.denied or self.request or self.ignored)


def is_status(topic: str) -> bool:
    """Return whether this broker publishes its state on a topic."""
    return topic.startswith(tuple(f"{OURS}broker/{level}" for level in STATUS))


class Router:
    """All topics, subscriptions and retained messages. `epoch` grows when cached routes become outdated."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        limits: Limits,
        clock: Clock,
        turns: Turns,
        runtime: Runtime,
        reports: Reports,
    ) -> None:
        self.epoch = 0
        self._turns, self._runtime = turns, runtime
        self.retained = Retained(journal, limits, clock, reports)
        self.feeds = Feeds(self.retained, journal, turns, runtime)
        self._store, self._journal = store, journal
        self._tree: FilterTree[tuple[Session, Subscription]] = FilterTree()
        self.groups: dict[str, Group] = {}  # the shared subscriptions by their filters
        self._routes: Remembered[Route] = Remembered()
        # Subscriptions of sessions that have ended and are still in the tree.
        self._ended: deque[tuple[Session, Subscription]] = deque()
        self._pruning = False

    def forget_routes(self) -> None:
        """Clear the cached routes, because streams or subscriptions have changed."""
        self.epoch += 1
        self._routes.clear()

    def route(self, topic: bytes) -> Route:
        """Return the route of a topic name, and check the name (MQTT 4.7)."""
        route = self._routes.get(topic)
        if route is not None:
            return route
        began = self._turns.begin()
        name = text(topic)
        # A client may publish below `$`, but wildcards do not match it (4.7.2); not on the server's own
        # topics.
        if not is_topic_name(name.removeprefix("$")):
            raise ProtocolError(f"topic name {name[:80]!r}", BAD_TOPIC_NAME)
        route = Route(name, () if name.startswith(RESERVED) else self._store.bound(name))
        found: dict[Session, list[Subscription]] = {}
        for session, subscription in self._tree.match(name):
            if session.subscriptions.get(subscription.filter) is not subscription:
                continue  # its session has ended
            if subscription.filter.startswith(SHARE):
                self._share(route, session, subscription)
                continue
            wanted = found.get(session)
            if wanted is None:
                wanted = found[session] = []
            wanted.append(subscription)
        for session, wanted in found.items():
            if session.identity.may_read(name):
                route.receivers[session] = receiver_of(wanted)
                others = [one for one in wanted if not one.no_local]
                if len(others) < len(wanted):
                    route.own[session] = receiver_of(others) if others else None
        route.with_client = any(self._store.wants_client(stream.name) for stream in route.streams)
        route.delivers = bool(route.receivers or route.shares)
        if route.stream is not None and not route.delivers and not route.with_client:
            route.append = route.stream.append
        members = sum(len(share) for share in route.shares.values())
        self._routes.remember(topic, route, ROUTE + RECEIVER * (len(route.receivers) + members))
        self._turns.spend(began)
        return route

    def subscribe(self, session: Session, subscription: Subscription) -> bool:
        """Add or replace a subscription; returns whether it is a new one (MQTT-3.8.4-3)."""
        old = session.subscriptions.get(subscription.filter)
        if old is not None:
            self._tree.remove(unshared(old.filter), (session, old))
        else:
            session.outbox.hold(size_of_filter(subscription.filter))
            if subscription.filter.startswith(SHARE):
                self.groups.setdefault(subscription.filter, Group()).members += 1
        session.subscriptions[subscription.filter] = subscription
        self._tree.add(unshared(subscription.filter), (session, subscription))
        self.forget_routes()
        return old is None

    def unsubscribe(self, session: Session, topic_filter: str) -> bool:
        """Remove a subscription; returns whether there was one."""
        subscription = session.subscriptions.pop(topic_filter, None)
        if subscription is None:
            return False
        session.unfed.pop(topic_filter, None)
        session.outbox.hold(-size_of_filter(topic_filter))
        self._tree.remove(unshared(topic_filter), (session, subscription))
        self._leave_group(topic_filter)
        self.forget_routes()
        return True

    def end(self, session: Session) -> None:
        """Remove the subscriptions of an ended session. The tree is cleaned up gradually."""
        self._ended.extend((session, one) for one in session.subscriptions.values())
        for topic_filter in session.subscriptions:
            self._leave_group(topic_filter)
        session.subscriptions, session.unfed = {}, {}
        self.forget_routes()
        self._prune()

    def _share(self, route: Route, session: Session, subscription: Subscription) -> None:
        """Add a member of a shared subscription that matches a topic, if it may read the topic."""
        name = subscription.filter
        if session.identity.may_read(route.name):
            share = route.shares.get(name)
            if share is None:
                share = route.shares[name] = Share(name, self.groups[name])
            share.add(session, receiver_of([subscription]))

    def has_left(self, session: Session) -> None:
        """Let shared subscriptions prefer other members, because a session has lost its connection."""
        if self.groups and any(one in self.groups for one in session.subscriptions):
            self.forget_routes()

    def _leave_group(self, topic_filter: str) -> None:
        """A session no longer has a subscription, which may be a shared one."""
        group = self.groups.get(topic_filter)
        if group is not None:
            group.members -= 1
            if not group.members:
                del self.groups[topic_filter]

    def _prune(self) -> None:
        """Remove filters of ended sessions from the tree, as many as fit into a turn of the event loop."""
        while self._ended and not self._turns.over:
            began = self._turns.begin()
            for _ in range(min(PRUNED, len(self._ended))):
                session, subscription = self._ended.popleft()
                self._tree.remove(unshared(subscription.filter), (session, subscription))
            self._turns.spend(began)
        if self._ended and not self._pruning:
            self._pruning = True
            self._runtime.soon(self._prune_again)

    def _prune_again(self) -> None:
        self._pruning = False
        self._prune()

    def publish(
        self,
        route: Route,
        message: Message,
        origin: Session | None = None,
        packet_id: int = 0,
        *,
        holder: Holder | None = None,
        keep_copies: bool = False,
    ) -> bool:
        """Give a message to all receivers, and keep it if it is retained. The caller appends it to streams.

        `holder`: who a retained message counts for; None: it is not retained.

        `packet_id`: of QoS 2, from a persistent session; the journal has it in use with the message.
        `keep_copies`: the journal keeps what persistent sessions are to be sent, also on a stream topic.
        Returns whether the journal must be committed before the message may be acknowledged.
        """
        waits = False
        if message.retain and holder is not None:
            waits = self.retained.publish(route.name, message.without_place(), holder)
        if not route.delivers:
            return waits
        receivers = route.receivers
        if origin is not None and origin in route.own:
            receivers, wanted = dict(receivers), route.own[origin]
            del receivers[origin]
            if wanted is not None:
                receivers[origin] = wanted
        # The stream has its messages, unless the sender needs a copy for each session. For a client that is
        # away the journal refers to it; for the others, when they leave (`Journal.left`).
        keep = keep_copies or not route.streams
        lasting: list[Outgoing] = []
        homes: list[Session] = []
        for session, receiver in receivers.items():
            qos = min(message.qos, receiver.qos)
            retain = message.retain and receiver.retain_as_published
            out = Outgoing(message, qos, retain, receiver.identifiers)
            if qos and (keep or session.line is None) and session.persistent:
                lasting.append(out)
                homes.append(session)
            else:
                session.outbox.put(out)
        if route.shares:
            for share in route.shares.values():
                chosen = share.choose(message)
                if chosen is not None:
                    session, out = chosen
                    if out.qos and (keep or session.line is None) and session.persistent:
                        lasting.append(out)
                        homes.append(session)
                    else:
                        session.outbox.put(out)
        if lasting:
            self._journal.queued(message, homes, lasting, origin, packet_id)
            for session, out in zip(homes, lasting, strict=True):
                session.outbox.put(out)
            waits = waits or keep
        return waits

    def reassign(self, old: Outgoing) -> bool:
        """Give a message of an ended session to another member of its shared subscription.

        Returns whether there is another member.
        """
        route = self.route(old.message.topic)
        share = route.shares.get(old.share)
        chosen = share.choose(old.message) if share is not None else None
        if chosen is None:
            return False
        self._put(*chosen, keep=bool(old.number) or not route.streams)
        return True

    def _put(self, session: Session, out: Outgoing, *, keep: bool) -> None:
        """Give one session a message. `keep`: the journal keeps it even while the client is there."""
        if out.qos and session.persistent and (keep or session.line is None):
            self._journal.queued(out.message, [session], [out])
        session.outbox.put(out)

    def anyone_names(self, level: str) -> bool:
        """Return whether a subscription begins with this level: wildcards do not match `$` (4.7.2)."""
        return self._tree.has_first(level)
