"""Every packet of an open connection but PUBLISH: subscriptions, acknowledgements, PING, DISCONNECT."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from bridge.mqtt.broker.message import Subscription
from bridge.mqtt.wire import answers
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import (
    AUTH,
    BAD_TOPIC_FILTER,
    CONNACK,
    CONNECT,
    DISCONNECT,
    MALFORMED,
    NO_SHARED_SUBSCRIPTIONS,
    NO_SUBSCRIPTION_EXISTED,
    NOT_AUTHORIZED,
    PACKET_ID_NOT_FOUND,
    PINGREQ,
    PINGRESP,
    PROTOCOL_ERROR,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    QUOTA_EXCEEDED,
    SUBSCRIBE,
    SUCCESS,
    UNSUBSCRIBE,
    V5,
    V31,
    ProtocolError,
    parse_ack,
    parse_disconnect,
    parse_subscribe,
    parse_unsubscribe,
)
from bridge.topics import is_topic_filter

if TYPE_CHECKING:
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.server.batch import Batch
    from bridge.mqtt.server.connection import Connection
    from bridge.mqtt.wire.packets import TopicRequest


def handle(conn: Connection, batch: Batch, head: int, body: bytes) -> None:
    """Handle one packet; anything that a client may not send is an error (MQTT-2.2.2-2)."""
    session = conn.session
    assert session is not None
    if conn.level == V31 and head in (0x6A, 0x8A, 0xAA):
        head &= 0xF7  # in MQTT 3.1 PUBREL, SUBSCRIBE and UNSUBSCRIBE may have DUP
    match head:
        case 0x40:  # PUBACK
            session.outbox.puback(parse_ack(head, body, conn.level)[0])
            _nothing_to_send(conn, session)
        case 0x50:  # PUBREC
            session.outbox.pubrec(*parse_ack(head, body, conn.level))
        case 0x62:  # PUBREL
            _pubrel(conn, session, batch, parse_ack(head, body, conn.level)[0])
        case 0x70:  # PUBCOMP
            session.outbox.pubcomp(parse_ack(head, body, conn.level)[0])
            _nothing_to_send(conn, session)
        case 0x82:  # SUBSCRIBE
            began = time.perf_counter()
            _subscribe(conn, session, body)
            conn.lane.turns.spend(began)
        case 0xA2:  # UNSUBSCRIBE
            began = time.perf_counter()
            _unsubscribe(conn, session, body)
            conn.lane.turns.spend(began)
        case 0xC0 if not body:  # PINGREQ
            conn.send(bytes((PINGRESP, 0)))
        case 0xE0:  # DISCONNECT
            _disconnect(conn, session, body)
        case _:
            # With flags that its type does not have, a packet is malformed (MQTT 5 section 2.1.3).
            reason = PROTOCOL_ERROR if head in (CONNECT, CONNACK, 0x90, 0xB0, PINGRESP, AUTH) else MALFORMED
            raise ProtocolError(f"a packet that no client may send: {head:#04x}, {len(body)} bytes", reason)


assert (PUBACK, PUBREC, PUBREL, PUBCOMP) == (0x40, 0x50, 0x62, 0x70)
assert (SUBSCRIBE, UNSUBSCRIBE, PINGREQ, DISCONNECT, AUTH) == (0x82, 0xA2, 0xC0, 0xE0, 0xF0)


def _nothing_to_send(conn: Connection, session: Session) -> None:
    """The client has acknowledged the last message: let its socket know that we got that.

    The kernel waits 40 ms for data of ours to go along with the TCP acknowledgement, and a client without
    TCP_NODELAY keeps its next small packet back for as long (Nagle's algorithm).
    """
    if not len(session.outbox):
        conn.acknowledge_now()


def _pubrel(conn: Connection, session: Session, batch: Batch, packet_id: int) -> None:
    """The client is done with a QoS 2 id. Answered, known or not, or it would ask for ever (4.3.3).

    It comes after PUBREC: an id that were free before would be given to two messages under way.
    """
    if packet_id in batch.ids or conn.is_unstored(packet_id):
        raise ProtocolError(f"PUBREL for packet id {packet_id} before its PUBREC", PROTOCOL_ERROR)
    raw = packet_id.to_bytes(2, "big")
    session.partial.pop(packet_id, None)
    if packet_id in session.incoming:
        session.incoming.discard(packet_id)
        if session.persistent:
            # Were this lost, the next message with the id would pass for a duplicate.
            conn.lane.journal.released(session, packet_id)
            batch.touched[conn.lane.journal] = None
    elif conn.level == V5:
        batch.acks += answers.ack(PUBCOMP, raw, PACKET_ID_NOT_FOUND)
        return
    batch.acks += answers.ack(PUBCOMP, raw)


def _subscribe(conn: Connection, session: Session, body: bytes) -> None:
    packet_id, requests, properties = parse_subscribe(body, conn.level)
    identifier = properties.get(p.SUBSCRIPTION_ID, 0)
    codes = bytearray()
    granted: list[tuple[Subscription, bool]] = []
    for request in requests:
        code = _refusal(conn, session, request)
        if code:
            codes.append(code)
            continue
        options = request.options
        subscription = Subscription(
            request.filter,
            options & 3,
            bool(options & 4) or conn.bridge,
            bool(options & 8) or conn.bridge,
            options >> 4 & 3,
            identifier,
        )
        granted.append((subscription, conn.lane.router.subscribe(session, subscription)))
        if session.persistent:
            conn.lane.journal.subscribed(session, subscription)
        codes.append(subscription.qos)
    # Reading waits, so that what the client does next finds the subscription in force.
    conn.hold("subscribe")
    conn.lane.spawn(_confirm(conn, session, packet_id, bytes(codes), granted))


async def _confirm(
    conn: Connection,
    session: Session,
    packet_id: int,
    codes: bytes,
    granted: list[tuple[Subscription, bool]],
) -> None:
    """Answer a SUBSCRIBE once the journal holds the subscriptions, then send what is retained."""
    lane = conn.lane
    await lane.journaled()
    if session.connection is conn:
        conn.answer(answers.suback(conn.level, packet_id, codes))
    if session.connection is conn:
        wanted = [
            one for one, new in granted if one.retain_handling == 0 or (one.retain_handling == 1 and new)
        ]
        await lane.router.send_retained(session, wanted)
    conn.release("subscribe")


def _refusal(conn: Connection, session: Session, request: TopicRequest) -> int:
    """Why a filter is not granted: an MQTT 5 reason code, or 0."""
    if not is_topic_filter(request.filter):
        if conn.level != V5:
            raise ProtocolError(f"topic filter {request.filter[:80]!r}")
        return BAD_TOPIC_FILTER
    if request.filter.startswith("$share/"):
        return NO_SHARED_SUBSCRIPTIONS
    if not session.identity.may_subscribe(request.filter):
        why = "it may not subscribe there; see [[mqtt.acl]]"
        return _told(conn, request, why, NOT_AUTHORIZED)
    known = session.subscriptions
    if request.filter not in known and len(known) >= conn.lane.limits.subscriptions:
        why = f"it has {len(known)} already; see [mqtt.limits] subscriptions"
        return _told(conn, request, why, QUOTA_EXCEEDED)
    return 0


def _told(conn: Connection, request: TopicRequest, why: str, code: int) -> int:
    """Count a refusal, and tell of it from time to time."""
    conn.lane.counts["refused_subscriptions"] += 1
    text = "%s: subscription to %.200r refused: %s (counted in the metrics)"
    conn.lane.tell(f"subscription {code}", logging.WARNING, text, conn.name, request.filter, why)
    return code


def _unsubscribe(conn: Connection, session: Session, body: bytes) -> None:
    packet_id, filters = parse_unsubscribe(body, conn.level)
    codes = bytearray()
    for topic_filter in filters:
        known = conn.lane.router.unsubscribe(session, topic_filter)
        if known and session.persistent:
            conn.lane.journal.unsubscribed(session, topic_filter)
        codes.append(SUCCESS if known else NO_SUBSCRIPTION_EXISTED)
    conn.answer(answers.unsuback(conn.level, packet_id, codes))


def _disconnect(conn: Connection, session: Session, body: bytes) -> None:
    reason, properties = parse_disconnect(body, conn.level)
    expiry = properties.get(p.SESSION_EXPIRY)
    if expiry is not None:
        if expiry and not session.expiry:
            raise ProtocolError("a session expiry that was 0 at CONNECT (MQTT-3.1.2-23)", PROTOCOL_ERROR)
        conn.lane.set_expiry(session, expiry)
    conn.end("", "", will=reason != SUCCESS)  # (MQTT 5 section 3.14.4-3)
