"""PUBLISH packets that the hot path leaves to others: flags, properties, subscribers, refusals, wills.

A message that a stream refuses is never acknowledged as if it were stored. MQTT 5 has reason codes for
that (section 3.4.2.1); for a 3.1.1 client, to which a PUBACK is our promise, the connection ends with
a counted and logged reason, after the acknowledgements of what came before. QoS 0 is dropped and
counted.

A refusal is permanent if the same message would be refused again whatever is exported or purged meanwhile
(`PERMANENT`). A 3.1.1 client would send such a message again at each connection, and never get to the next.
With `[mqtt] refused_stream` it is stored there instead, and acknowledged as any other: in none of its own
streams, to no subscriber, and not retained.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from bridge.errors import (
    MessageTooLarge,
    NoStream,
    RetainedFull,
    StorageFailed,
    StreamBridgeError,
    StreamError,
    StreamFull,
    Unauthorized,
)
from bridge.mqtt.broker import headers as published
from bridge.mqtt.broker.message import Message, expiry_of
from bridge.mqtt.broker.router import Route
from bridge.mqtt.server import requests
from bridge.mqtt.wire import answers
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import (
    BAD_TOPIC_ALIAS,
    BAD_TOPIC_NAME,
    IMPLEMENTATION_ERROR,
    NOT_AUTHORIZED,
    PROTOCOL_ERROR,
    PUBACK,
    PUBLISH,
    PUBREC,
    QUOTA_EXCEEDED,
    RECEIVE_MAXIMUM_EXCEEDED,
    UNSPECIFIED,
    V5,
    ProtocolError,
    properties_at,
    text,
)
from bridge.streams import headers
from bridge.topics import is_topic_name

if TYPE_CHECKING:
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.broker.store import Stream
    from bridge.mqtt.server.batch import Batch
    from bridge.mqtt.server.connection import Connection
    from bridge.mqtt.server.lane import Lane
    from bridge.mqtt.wire.packets import Will

RECEIVE_MAXIMUM = 4_096  # QoS 2 messages of an MQTT 5 client between PUBLISH and PUBREL, announced too
TOPIC_ALIASES = 64  # per connection, announced in CONNACK

# error, the counter's ending, MQTT 5 reason code: one that PUBACK, PUBREC and DISCONNECT may carry
_REASONS: tuple[tuple[type[StreamBridgeError], str, int], ...] = (
    (NoStream, "no_stream", BAD_TOPIC_NAME),
    (StreamFull, "full", QUOTA_EXCEEDED),
    (MessageTooLarge, "too_large", QUOTA_EXCEEDED),  # a limit of the stream; 0x95 may not be here
    (StorageFailed, "storage", IMPLEMENTATION_ERROR),
    (Unauthorized, "not_allowed", NOT_AUTHORIZED),
    (RetainedFull, "retained", QUOTA_EXCEEDED),
    (StreamBridgeError, "other", UNSPECIFIED),
)

# Too large for the stream, or no such stream. Not: full, a disk that fails, or what the rules forbid.
PERMANENT = (MessageTooLarge, NoStream)
LONGEST_REASON = 500  # characters of an error that are stored with the message


def reason_of(error: StreamBridgeError) -> int:
    """The MQTT 5 reason code for an error."""
    return next(code for kind, _, code in _REASONS if isinstance(error, kind))


def allowed_route(conn: Connection, topic: bytes) -> Route:
    """The route of a topic, or a denied one if the client may not publish there."""
    route = conn.lane.router.route(topic)
    assert conn.session is not None
    if not route.denied and not route.ignored and not conn.session.identity.may_publish(route.name):
        route = Route(route.name, ())
        route.denied = True
    return route


def publish(
    conn: Connection,
    batch: Batch,
    head: int,
    topic: bytes,
    packet_id: bytes,
    payload: bytes,
    route: Route,
    properties: p.Properties | None = None,
) -> None:
    """Handle one PUBLISH in full (section 3.3): store, keep, deliver, acknowledge."""
    lane, session, qos = conn.lane, conn.session, head & 6
    assert session is not None
    if head & 14 == 8:
        raise ProtocolError("a PUBLISH of QoS 0 with DUP (MQTT-3.3.1-2)")
    number = packet_id[0] << 8 | packet_id[1] if qos else 0
    if qos == 4 and number in session.incoming:
        batch.acks += b"\x50\x02" + packet_id  # stored before: once per packet id (4.3.3)
        if session.persistent:
            batch.touched[lane.journal] = None  # which may have failed to keep the id
        return
    if qos == 4 and conn.level == V5 and len(session.incoming) >= RECEIVE_MAXIMUM:
        raise ProtocolError(f"more than {RECEIVE_MAXIMUM} QoS 2 messages at a time", RECEIVE_MAXIMUM_EXCEEDED)
    places: dict[Stream, int] = {}
    try:
        if route.denied:
            why = "it belongs to the broker" if route.reserved else "see [[mqtt.acl]]"
            raise Unauthorized(f"it may not publish on {route.name!r}; {why}")
        if head & 1 and not route.request and not route.ignored:
            lane.router.retained.check(route.name, payload)
        if route.request:
            requests.take(conn, route.name, payload, properties or {}, qos >> 1)
        elif route.streams:
            kept = _headers(head, properties, session, number, route)
            streams = _lacking(session, head, number, route) if qos == 4 else route.streams
            if len(streams) > 1:
                for stream in streams:
                    stream.ensure_admits(topic, payload, kept)  # in all, or in none: it will be sent again
            if qos == 4:
                _mark(lane, streams, topic, payload, kept)
            for stream in streams:
                places[stream] = stream.append(topic, payload, kept)
                batch.touched[stream] = None
        elif route.ignored:
            lane.counts["ignored_bridge_state"] += 1
        else:
            lane.counts["without_stream"] += 1
    except (StreamError, RetainedFull, Unauthorized) as error:
        refused(conn, batch, head, topic, packet_id, payload, properties, error)
        return
    if (route.receivers or head & 1) and not route.request and not route.ignored:
        began = time.perf_counter()
        message = Message(
            topic, payload, qos >> 1, bool(head & 1), properties, expiry_of(properties, lane.clock)
        )
        if lane.router.publish(route, message, session):
            batch.touched[lane.journal] = None
        lane.turns.spend(began)
    _acknowledge(lane, session, batch, qos, packet_id, places)


def _acknowledge(
    lane: Lane, session: Session, batch: Batch, qos: int, packet_id: bytes, places: dict[Stream, int]
) -> None:
    """Answer a PUBLISH once what its batch touches is committed."""
    if qos == 2:
        batch.acks += b"\x40\x02" + packet_id
    elif qos == 4:
        batch.acks += b"\x50\x02" + packet_id
        number = packet_id[0] << 8 | packet_id[1]
        session.incoming.add(number)
        batch.ids[number] = places
        for stream, place in places.items():
            lane.journal.marks[stream.name].expect(place, batch)


def _mark(lane: Lane, streams: tuple[Stream, ...], topic: bytes, payload: bytes, kept: bytes) -> None:
    """Have QoS 2 ids looked for in these streams at the next start, from here on."""
    for stream in streams:
        if stream.name not in lane.journal.marks:
            stream.ensure_admits(topic, payload, kept)  # a name without a stream leaves nothing
            lane.journal.mark(stream)


def _lacking(session: Session, head: int, number: int, route: Route) -> tuple[Stream, ...]:
    """The streams that a QoS 2 message is to go to: not those that have it from an earlier attempt."""
    have = session.partial.get(number)
    if have is None:
        return route.streams
    if not head & 8:
        del session.partial[number]  # another message
        return route.streams
    return tuple(stream for stream in route.streams if stream.name not in have)


def publish_v5(
    conn: Connection,
    batch: Batch,
    head: int,
    topic: bytes,
    packet_id: bytes,
    data: bytes,
    pos: int,
    end: int,
) -> None:
    """Handle a PUBLISH with properties or without a topic (MQTT 5 section 3.3.2.3)."""
    properties, pos = properties_at(data, pos, end, PUBLISH)
    if p.SUBSCRIPTION_ID in properties:
        raise ProtocolError("a Subscription Identifier from a client (MQTT-3.3.4-6)", PROTOCOL_ERROR)
    alias = properties.pop(p.TOPIC_ALIAS, None)
    if alias is not None:
        if not 0 < alias <= TOPIC_ALIASES:
            raise ProtocolError(f"topic alias {alias}; 1 to {TOPIC_ALIASES} are announced", BAD_TOPIC_ALIAS)
        if topic:
            conn.aliases[alias] = topic
        else:
            topic = conn.aliases.get(alias, b"")
    if not topic:
        raise ProtocolError("a PUBLISH without topic and known alias", PROTOCOL_ERROR)
    reply = properties.get(p.RESPONSE_TOPIC)
    if reply is not None and not is_topic_name(text(reply)):
        raise ProtocolError(f"response topic {reply[:80]!r}", BAD_TOPIC_NAME)
    route = conn.find_route(topic)
    publish(conn, batch, head, topic, packet_id, data[pos:end], route, properties)


def refused(
    conn: Connection,
    batch: Batch,
    head: int,
    topic: bytes,
    packet_id: bytes,
    payload: bytes,
    properties: p.Properties | None,
    error: StreamBridgeError,
) -> None:
    """A message was refused: keep it in `refused_stream`, answer with the reason, or close (3.1.1)."""
    qos, session = head & 6, conn.session
    assert session is not None
    try:
        places = _keep_refused(conn.lane, session, head, topic, packet_id, payload, properties, error)
    except StreamError as other:
        error, places = other, None  # the stream of refused messages is full, say: it will be sent again
    if places is not None:
        batch.touched.update(dict.fromkeys(places))
        _acknowledge(conn.lane, session, batch, qos, packet_id, places)
        return
    kind, reason = next((kind, code) for cls, kind, code in _REASONS if isinstance(error, cls))
    if not qos:
        conn.lane.counts[f"dropped_{kind}"] += 1
        conn.lane.log_dropped(conn, kind, str(error))
    elif conn.level == V5:
        conn.lane.counts[f"rejected_{kind}"] += 1
        conn.lane.log_dropped(conn, kind, str(error))
        batch.acks += answers.ack(PUBACK if qos == 2 else PUBREC, packet_id, reason)
    else:
        batch.close = (f"rejected_{kind}", f"not acknowledged: {error}", reason)
        conn.hold("rejected")


def _keep_refused(
    lane: Lane,
    session: Session,
    head: int,
    topic: bytes,
    packet_id: bytes,
    payload: bytes,
    properties: p.Properties | None,
    error: StreamBridgeError,
) -> dict[Stream, int] | None:
    """Store a message in `refused_stream` and return where; None if there is no such stream, or it need not.

    Raises the StreamError of that stream, but MessageTooLarge: then it is as if there were none.
    """
    name = lane.refused_stream
    if name is None or name not in lane.manager.definitions or not isinstance(error, PERMANENT):
        return None
    number = packet_id[0] << 8 | packet_id[1] if head & 6 == 4 else 0
    if head & 8 and name in session.partial.get(number, ()):
        return {}  # it is there since an earlier attempt
    kind = next(kind for cls, kind, _ in _REASONS if isinstance(error, cls))
    why = f"{kind}: {error}"[:LONGEST_REASON]
    kept = published.of_publish(head, properties or {}, session.client_id, number, why)
    stream = lane.manager.stream(name)
    try:
        stream.ensure_admits(topic, payload, kept)
    except MessageTooLarge:
        return None
    if number:
        _mark(lane, (stream,), topic, payload, kept)
    place = stream.append(topic, payload, kept)
    lane.counts[f"kept_{kind}"] += 1
    text = "%s: a message is kept in stream %r, since its own can never store it: %s (counted in the metrics)"
    lane.tell(f"kept_{kind}", logging.WARNING, text, session.identity.label, name, error)
    return {stream: place}


def publish_will(lane: Lane, session: Session, will: Will) -> None:
    """Publish the will of a client that went without DISCONNECT (section 3.1.2.5)."""
    topic = will.topic.encode()
    flags = will.qos << 1 | will.retain
    route = lane.router.route(topic)
    if route.ignored:
        return
    try:
        if will.retain:
            lane.router.retained.check(route.name, will.payload)
        kept = _headers(flags & 3, will.properties, session, 0, route)
        if len(route.streams) > 1:
            for stream in route.streams:
                stream.ensure_admits(topic, will.payload, kept)
        for stream in route.streams:
            stream.append(topic, will.payload, kept)
    except (StreamError, RetainedFull) as error:
        places = None
        with contextlib.suppress(StreamError):
            places = _keep_refused(lane, session, flags & 3, topic, b"", will.payload, will.properties, error)
        if places is None:
            lane.counts["dropped_wills"] += 1
            lane.log_will(session, error)
        return
    expires = expiry_of(will.properties, lane.clock)
    message = Message(topic, will.payload, will.qos, will.retain, will.properties, expires)
    lane.router.publish(route, message, None)
    lane.counts["wills"] += 1


def _headers(
    head: int, properties: p.Properties | None, session: Session, number: int, route: Route
) -> bytes:
    with_client = route.with_client or head & 6 == 4
    if not properties and not with_client:
        flags = head & 9
        if not flags:
            return b""
        if flags == 1:
            return headers.RETAIN
        if flags == 8:
            return headers.DUP
    return published.of_publish(head, properties or {}, session.client_id if with_client else "", number)
