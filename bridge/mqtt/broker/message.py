"""Messages on their way to subscribers, the subscriptions that ask for them, and the headers in a stream."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import PUBLISH, V5, string
from bridge.mqtt.wire.properties import varint
from bridge.streams.headers import Headers, encode

if TYPE_CHECKING:
    from bridge.clock import Clock, Deadline


EACH = 200  # bytes in memory of a message, beside topic, payload and properties
PAIR = 130  # bytes in memory of a user property, beside its text
LARGE = 32 * 1024  # bytes of a payload from which on a copy costs more than a second write


class Subscription(NamedTuple):
    """One topic filter that a session subscribed to, with the options of MQTT 5 section 3.8.3.1."""

    filter: str
    qos: int
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    identifier: int = 0


class Receiver(NamedTuple):
    """The combined options of one session's matching subscriptions.

    A message that several filters match is delivered once, at the highest QoS of them (MQTT-3.3.5-1).
    """

    qos: int
    retain_as_published: bool
    identifiers: tuple[int, ...]


def receiver_of(subscriptions: list[Subscription]) -> Receiver:
    """Join the subscriptions of one session that match one topic."""
    return Receiver(
        max(s.qos for s in subscriptions),
        any(s.retain_as_published for s in subscriptions),
        tuple(s.identifier for s in subscriptions if s.identifier),
    )


def expiry_of(properties: p.Properties | None, clock: Clock) -> Deadline | None:
    """Return when a message with these properties expires (MQTT 5 section 3.3.2.3.3); None: never."""
    seconds = properties.get(p.MESSAGE_EXPIRY) if properties else None
    return None if seconds is None else clock.deadline(seconds)


def headers_of(flags: int, properties: p.Properties, client: str, packet_id: int, refused: str = "") -> bytes:
    """Return the headers that a stream keeps of a PUBLISH (layout: `bridge.streams.headers`).

    `flags` are those of the fixed header. `client` and `packet_id` identify the sender, if that is kept.
    `refused` says why its own stream refused it.
    """
    expiry = properties.get(p.MESSAGE_EXPIRY)
    return encode(
        Headers(
            retain=bool(flags & 1),
            dup=bool(flags & 8),
            client=client,
            id=packet_id if flags & 6 == 4 else 0,
            user=[(name.decode(), value.decode()) for name, value in properties.get(p.USER_PROPERTY, ())],
            type=properties.get(p.CONTENT_TYPE, b"").decode(),
            utf8=bool(properties.get(p.PAYLOAD_FORMAT)),
            reply=properties.get(p.RESPONSE_TOPIC, b"").decode(),
            token=properties.get(p.CORRELATION_DATA, b""),
            expires=int((time.time() + expiry) * 1000) if expiry is not None else 0,
            refused=refused,
        )
    )


def size_of(topic: bytes, payload: bytes, properties: p.Properties | None = None) -> int:
    """Roughly the bytes that a message holds in memory. Of the properties, those of the message count."""
    size = len(topic) + len(payload) + EACH
    if properties:
        for kind, value in properties.items():
            if kind == p.USER_PROPERTY:
                size += sum(len(name) + len(text) + PAIR for name, text in value)
            elif kind in p.MESSAGE:
                size += len(value) if isinstance(value, bytes) else 8
    return size


class Message:
    """One PUBLISH to be delivered. It is immutable, and all its receivers share it.

    `expires` takes the place of the Message Expiry Interval among the properties: see `expiry_of`. `size` is
    roughly the bytes that it holds in memory. `place` is its stream and number, if the journal may refer to
    it there.
    """

    __slots__ = ("_plain", "expires", "payload", "place", "properties", "qos", "retain", "size", "topic")

    def __init__(
        self,
        topic: bytes,
        payload: bytes,
        qos: int = 0,
        retain: bool = False,
        properties: p.Properties | None = None,
        expires: Deadline | None = None,
        place: tuple[str, int] | None = None,
    ) -> None:
        self.place = place
        self.topic, self.payload, self.qos, self.retain = topic, payload, qos, retain
        self.properties = {k: v for k, v in (properties or {}).items() if k in p.MESSAGE}
        self.properties.pop(p.MESSAGE_EXPIRY, None)
        self.expires = expires
        self.size = len(topic) + len(payload) + EACH
        if self.properties:
            self.size = size_of(topic, payload, self.properties)
        self._plain: tuple[bytes, ...] = ()

    def without_place(self) -> Message:
        """Return this message as one that the journal keeps itself, however long."""
        if self.place is None:
            return self
        return Message(self.topic, self.payload, self.qos, self.retain, self.properties, self.expires)

    def expired(self) -> bool:
        """Return whether its Message Expiry Interval has passed (MQTT 5 section 3.3.2.3.3)."""
        return self.expires is not None and self.expires.passed()

    def packet(
        self,
        level: int,
        qos: int = 0,
        *,
        retain: bool = False,
        packet_id: int = 0,
        dup: bool = False,
        identifiers: tuple[int, ...] = (),
    ) -> tuple[bytes, ...]:
        """Return the PUBLISH packet for a receiver (section 3.3), in pieces that avoid a large copy."""
        if level != V5 and not qos and not retain:
            # Everybody gets the same bytes, so they are made once.
            self._plain = self._plain or self._packet(PUBLISH, b"")
            return self._plain
        head = PUBLISH | qos << 1 | retain | dup << 3
        middle = packet_id.to_bytes(2, "big") if qos else b""
        if level == V5:
            properties = self.properties
            if identifiers or self.expires is not None:
                properties = dict(properties)
                if identifiers:
                    properties[p.SUBSCRIPTION_ID] = list(identifiers)
                if self.expires is not None:
                    properties[p.MESSAGE_EXPIRY] = max(0, round(self.expires.left()))
            middle += p.write_properties(properties)
        return self._packet(head, middle)

    def _packet(self, head: int, middle: bytes) -> tuple[bytes, ...]:
        length = 2 + len(self.topic) + len(middle) + len(self.payload)
        begin = b"".join((bytes((head,)), varint(length), string(self.topic), middle))
        return (begin, self.payload) if len(self.payload) >= LARGE else (begin + self.payload,)
