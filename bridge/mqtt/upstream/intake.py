"""Where the messages of another broker go.

    IntoBroker    [[upstream]]: published in the embedded broker on the topic that a mapping gives, for its
                  streams, its subscribers and their queues, as the message of a client
    IntoStreams   mode "external": appended to the streams that are bound to the topic, which is not changed

Both say what to subscribe to, and store one message at a time, in all of its destinations or in none. They
return the streams and journal that must commit before the message may be acknowledged. An error means that
neither the message nor any later one can be stored now. A message that can never be stored, for example
because it is too large, is dropped, counted, logged and acknowledged, because it would hold up all later
ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from bridge.access.rules import Holder
from bridge.errors import MessageTooLarge, NoStream, Unauthorized
from bridge.mqtt.broker.inbox import reason_of
from bridge.mqtt.broker.message import headers_of
from bridge.mqtt.broker.publishing import PERMANENT, Brought, having
from bridge.mqtt.mappings import topic_template
from bridge.mqtt.wire import properties as p
from bridge.net.brokers import BRIDGED_BY
from bridge.topics import REQUEST_LEVEL, Remembered, covers, matches

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Mapping

    from bridge.access.rules import Identity
    from bridge.mqtt.broker.broker import Broker
    from bridge.mqtt.broker.joined import Joined
    from bridge.mqtt.broker.journal import Journal
    from bridge.mqtt.broker.store import Stream
    from bridge.mqtt.mappings import Mapping as TopicMapping
    from bridge.mqtt.settings import ExternalSettings
    from bridge.mqtt.upstream.requests import Requests
    from bridge.mqtt.wire.packets import Publish
    from bridge.operations.manager import StreamManager

REQUESTS = f"{REQUEST_LEVEL}/+/+"
_NOWHERE = Brought((), {}, b"")


class Wish(NamedTuple):
    """A subscription: its QoS, and whether a message keeps its RETAIN flag (MQTT 5 section 3.8.3.1)."""

    qos: int
    retain_as_published: bool = False


class Source(Protocol):
    """The upstream from which messages come."""

    counts: Counter[str]
    journal: Journal
    joined: Joined

    def dropped(self, kind: str, why: str) -> None:
        """Count and log a message that can never be stored; `kind` is the suffix of its counter."""

    def leave(self, topic_filter: str) -> None:
        """End a subscription that an earlier run left in our session."""


class Intake(Protocol):
    """The destination of the messages of one broker.

    `wants_flags`: a message is to have the RETAIN flag with which it was published.
    """

    wants_flags: bool

    def attach(self, source: Source) -> None:
        """Take the messages of this upstream."""

    def wishes(self) -> Mapping[str, Wish]:
        """Return what to subscribe to now."""

    def take(self, packet: Publish) -> Brought:
        """Store a message. Raises StreamBridgeError if that is impossible for now."""

    def changed(self) -> None:
        """Apply changed streams or rules."""

    def lacking(self, refused: Iterable[str]) -> dict[str, list[str]]:
        """Return the streams that do not get all messages, with the refused subscriptions that they need."""


class IntoBroker:
    """The embedded broker, as the client `upstream:<name>`."""

    wants_flags = True

    def __init__(
        self,
        broker: Broker,
        name: str,
        mappings: Iterable[TopicMapping],
        gateway: str,
        identify: Callable[[], Identity] | None,
    ) -> None:
        """`identify` returns the rights that apply to the messages; None: they may go anywhere.

        Raises ValueError for a gateway id that cannot be part of a topic.
        """
        self._broker, self._client, self._label = broker, f"upstream:{name}", f"upstream {name!r}"
        self._holder = Holder(network=self._label)
        self._mark = (BRIDGED_BY.encode(), gateway.encode())
        self._identify = identify
        self._mappings = [
            (one.filter, one.qos, topic_template(one.topic))
            for one in (each.of(gateway) for each in mappings)
        ]
        self._topics: Remembered[str] = Remembered()  # here, by the topic there
        self.changed()

    def attach(self, source: Source) -> None:
        self._source = source

    def wishes(self) -> Mapping[str, Wish]:
        return {topic_filter: Wish(qos, True) for topic_filter, qos, _ in self._mappings}

    def changed(self) -> None:
        self._identity = self._identify() if self._identify is not None else None

    def lacking(self, refused: Iterable[str]) -> dict[str, list[str]]:
        return {}

    def take(self, packet: Publish) -> Brought:
        topic = self._topics.get(packet.topic)
        if topic is None:
            topic = self._topic(packet.topic.decode())
            self._topics.remember(packet.topic, topic, len(topic))
        if not topic:
            self._source.dropped("unmapped", f"no mapping makes a topic here of {packet.topic[:200]!r}")
            return _NOWHERE
        if self._identity is not None and not self._identity.may_publish(topic):
            raise Unauthorized(f"{self._label} may not publish on {topic!r}; see [[mqtt.acl]]")
        properties = dict(packet.properties or {})
        properties[p.USER_PROPERTY] = [*properties.get(p.USER_PROPERTY, ()), self._mark]
        here = packet._replace(topic=topic.encode(), properties=properties)
        joined = self._source.joined if packet.qos == 2 else None
        try:
            # A device that was away waits for its command: it does not look for it in a stream.
            brought = self._broker.publisher.bring(
                self._client, self._label, self._holder, here, joined=joined, keep_copies=True
            )
        except PERMANENT as error:
            self._source.dropped(reason_of(error)[0], str(error))
            return _NOWHERE
        if not brought.touched:
            self._source.counts["without_stream"] += 1
        return brought

    def _topic(self, there: str) -> str:
        """The topic here; empty if there is none."""
        for topic_filter, _, render in self._mappings:
            if matches(topic_filter, there):
                return render(there) or ""
        return ""  # its subscription is outdated


class IntoStreams:
    """The streams, by their own topics; and the requests for operations, if they are allowed."""

    wants_flags = False

    def __init__(self, manager: StreamManager, settings: ExternalSettings, requests: Requests) -> None:
        self._manager, self._settings, self._requests = manager, settings, requests
        self._routes: Remembered[tuple[Stream, ...]] = Remembered()

    def attach(self, source: Source) -> None:
        self._source = source

    def wishes(self) -> Mapping[str, Wish]:
        """Return the filters; one that another covers is omitted, or a message might come twice."""
        wanted = {REQUESTS} if self._settings.operations else set()
        for name, topics in self._topics().items():
            wanted |= {*topics, f"streams/{name}/#"}
        wanted = {one for one in wanted if not any(one != other and covers(other, one) for other in wanted)}
        return {one if one == REQUESTS else self._shared(one): Wish(1) for one in wanted}

    def changed(self) -> None:
        self._routes.clear()

    def lacking(self, refused: Iterable[str]) -> dict[str, list[str]]:
        refused, found = list(refused), {}
        for name, topics in self._topics().items() if refused else ():
            own = {self._shared(one) for one in (*topics, f"streams/{name}/#")}
            if lacking := [one for one in refused if any(covers(one, mine) for mine in own)]:
                found[name] = lacking
        return found

    def take(self, packet: Publish) -> Brought:
        if packet.topic.startswith(f"{REQUEST_LEVEL}/".encode()):
            if not matches(REQUESTS, packet.topic.decode()):
                return (
                    _NOWHERE  # a reply, which a wildcard of a stream matches: answers to it would never end
                )
            if self._settings.operations:
                self._requests.take(packet)
            else:
                self._source.counts["refused_requests"] += 1
                self._source.leave(REQUESTS)
            return _NOWHERE
        streams = self._routes.get(packet.topic)
        if streams is None:
            streams = self._manager.bound(packet.topic.decode())
            self._routes.remember(packet.topic, streams)
        if not streams:
            self._source.counts["dropped_unbound"] += 1  # the subscription of a former stream still exists
        joined = self._source.joined
        have = having(joined, packet) if packet.qos == 2 else frozenset()
        kept = _headers(packet, joined.client_id)
        takers: list[Stream] = []
        for stream in streams:
            if stream.name in have:
                continue
            try:
                stream.ensure_admits(packet.topic, packet.payload, kept)
            except MessageTooLarge as error:
                self._source.dropped("too_large", str(error))
            except NoStream as error:
                self._source.dropped("unbound", str(error))
                self._source.leave(self._shared(f"streams/{stream.name}/#"))
            else:
                takers.append(stream)
        if packet.qos == 2:
            self._source.journal.search(takers, packet, kept)
        places = {stream: stream.append(packet.topic, packet.payload, kept) for stream in takers}
        return Brought(takers, places, packet.topic)

    def _topics(self) -> dict[str, list[str]]:
        return {name: definition.topics for name, definition in self._manager.definitions.items()}

    def _shared(self, topic_filter: str) -> str:
        group = self._settings.share_group
        return f"$share/{group}/{topic_filter}" if group else topic_filter


def _headers(packet: Publish, client: str) -> bytes:
    once = packet.qos == 2
    flags = packet.head & (13 if once else 9)
    if not flags and not packet.properties:
        return b""
    return headers_of(flags, packet.properties or {}, client if once else "", packet.number)
