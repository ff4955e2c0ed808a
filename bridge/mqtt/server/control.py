"""The packets of a connected client other than PUBLISH: acknowledgements, subscriptions, PINGREQ, DISCONNECT.

The rows of `states.TRANSITIONS` name the functions here. Each gets the connection, its session, the batch of
answers to the current read, and the packet without its fixed header. A wrong packet raises ProtocolError.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any, Protocol

from bridge.mqtt.server.states import OPEN, TRANSITIONS, Event
from bridge.mqtt.wire import answers
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import (
    AUTH,
    CONNACK,
    CONNECT,
    MALFORMED,
    PINGREQ,
    PINGRESP,
    PROTOCOL_ERROR,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    SUBACK,
    SUCCESS,
    UNSUBACK,
    V31,
    ProtocolError,
    parse_ack,
    parse_disconnect,
    parse_subscribe,
    parse_unsubscribe,
)
from bridge.topics import unshared

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from bridge.mqtt.broker.broker import Broker
    from bridge.mqtt.broker.inbox import Batch, Inbox
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.server.asking import Asking


class Client(Protocol):
    """A connection; `connection.Connection` is one."""

    broker: Broker
    inbox: Inbox
    level: int
    asking: Asking | None
    transport: asyncio.Transport

    @property
    def session(self) -> Session | None: ...

    @property
    def most_filters(self) -> int: ...

    def send(self, data: bytes) -> None: ...

    def answer(self, data: bytes) -> None: ...

    def count_filters(self) -> None: ...

    def disconnected(self, *, will: bool) -> None: ...


def handle(conn: Client, batch: Batch, head: int, body: bytes) -> None:
    """Handle one packet by the table. A packet that the table lacks is an error (MQTT-2.2.2-2)."""
    if conn.level == V31 and head in (0x6A, 0x8A, 0xAA):
        head &= 0xF7  # in MQTT 3.1 PUBREL, SUBSCRIBE and UNSUBSCRIBE may have DUP
    handler = _HANDLERS.get(head)
    if handler is None:
        # A packet with flags that its type does not have is malformed (MQTT 5 section 2.1.3).
        known = head in (CONNECT, CONNACK, SUBACK, UNSUBACK, PINGRESP, AUTH)
        raise _not_allowed(head, body, PROTOCOL_ERROR if known else MALFORMED)
    handler(conn, conn.session, batch, body)


def puback(conn: Client, session: Session, _batch: Batch, body: bytes) -> None:
    """The client has a message of QoS 1."""
    session.outbox.puback(parse_ack(PUBACK, body, conn.level)[0])
    _acknowledge_at_once(conn, session)


def pubrec(conn: Client, session: Session, _batch: Batch, body: bytes) -> None:
    """The client has a message of QoS 2: answer with PUBREL."""
    session.outbox.pubrec(*parse_ack(PUBREC, body, conn.level))


def pubrel(conn: Client, _session: Session, batch: Batch, body: bytes) -> None:
    """The client forgets a packet id of its own: answer with PUBCOMP."""
    conn.broker.released(batch, parse_ack(PUBREL, body, conn.level)[0])


def pubcomp(conn: Client, session: Session, _batch: Batch, body: bytes) -> None:
    """The exchange for a message of QoS 2 has ended."""
    session.outbox.pubcomp(parse_ack(PUBCOMP, body, conn.level)[0])
    _acknowledge_at_once(conn, session)


def subscribe(conn: Client, _session: Session, _batch: Batch, body: bytes) -> None:
    """Subscribe, after plugins have been asked about the topic filters."""
    packet_id, requests, properties = parse_subscribe(body, conn.level, conn.most_filters)
    wanted = [unshared(request.filter) for request in requests]

    def answer(codes: bytes) -> None:
        conn.answer(answers.suback(conn.level, packet_id, codes))

    def subscribe_allowed() -> None:
        asking = conn.asking  # of the present plugins
        denied = {topics for topics in wanted if asking is not None and not asking.may("subscribe", topics)}
        identifier = properties.get(p.SUBSCRIPTION_ID, 0)
        conn.broker.subscribing.subscribe(conn.inbox, requests, identifier, answer, denied)
        conn.count_filters()

    if (now := conn.asking) is not None and any(now.may("subscribe", topics) is None for topics in wanted):
        now.ask("subscribe", wanted, subscribe_allowed)
    else:
        subscribe_allowed()


def unsubscribe(conn: Client, session: Session, _batch: Batch, body: bytes) -> None:
    """Unsubscribe."""
    packet_id, filters = parse_unsubscribe(body, conn.level, conn.most_filters)
    codes = conn.broker.subscribing.unsubscribe(session, filters)
    conn.count_filters()
    conn.answer(answers.unsuback(conn.level, packet_id, codes))


def pingreq(conn: Client, _session: Session, _batch: Batch, body: bytes) -> None:
    """Answer with PINGRESP."""
    if body:
        raise _not_allowed(PINGREQ, body, MALFORMED)
    conn.send(bytes((PINGRESP, 0)))


def disconnect(conn: Client, session: Session, _batch: Batch, body: bytes) -> None:
    """Close the connection. The will is published unless the client gives no reason or reason 0."""
    reason, properties = parse_disconnect(body, conn.level)
    expiry = properties.get(p.SESSION_EXPIRY)
    if expiry is not None:
        if expiry and not session.expiry:
            raise ProtocolError("a session expiry that was 0 at CONNECT (MQTT-3.1.2-23)", PROTOCOL_ERROR)
        conn.broker.set_expiry(session, expiry)
    conn.disconnected(will=reason != SUCCESS)  # (MQTT 5 section 3.14.4-3)


def _acknowledge_at_once(conn: Client, session: Session) -> None:
    """If nothing is left to send, make the kernel send its TCP acknowledgement now.

    The kernel waits 40 ms for data that could carry it. A client without TCP_NODELAY holds its next small
    packet back for as long (Nagle's algorithm).
    """
    if len(session.outbox) or conn.transport.is_closing():
        return
    sock = conn.transport.get_extra_info("socket")
    if sock is not None and sock.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):  # the peer may just have disconnected
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _not_allowed(head: int, body: bytes, reason: int) -> ProtocolError:
    return ProtocolError(f"a packet that no client may send: {head:#04x}, {len(body)} bytes", reason)


_HANDLERS: dict[int | Event, Callable[[Client, Any, Batch, bytes], None]] = {
    row.on: globals()[row.handler] for row in TRANSITIONS if row.state is OPEN and row.handler
}
