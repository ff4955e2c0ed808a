"""From CONNECT to CONNACK: version, identity, take-over, session (section 3.1).

The order matters. Nothing that belongs to a client id is touched before its owner is authenticated:
not its connection, not its session, not its will.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, NamedTuple

from bridge.access.logins import Denied, Reason
from bridge.access.proofs import of_certificate
from bridge.mqtt.broker.sessions import NEVER
from bridge.mqtt.server.publishing import RECEIVE_MAXIMUM, TOPIC_ALIASES
from bridge.mqtt.wire import answers
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import (
    BAD_AUTH_METHOD,
    BAD_CLIENT_ID,
    BAD_USER_OR_PASSWORD,
    NOT_AUTHORIZED,
    PACKET_TOO_LARGE,
    PROTOCOL_ERROR,
    SERVER_BUSY,
    SESSION_TAKEN_OVER,
    SUCCESS,
    UNSUPPORTED_VERSION,
    V5,
    V31,
    Connect,
    ProtocolError,
    parse_connect,
    protocol_of,
)
from bridge.net.addresses import is_loopback

if TYPE_CHECKING:
    from bridge.access.rules import Identity
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.server.connection import Connection

SETTLE_TIMEOUT = 5.0  # seconds for what the old connection published to be committed
MAX_CLIENT_ID = 1_024

_REASONS = {
    Reason.NOT_ALLOWED: NOT_AUTHORIZED,
    Reason.WRONG_CREDENTIALS: BAD_USER_OR_PASSWORD,
    Reason.BUSY: SERVER_BUSY,
}


class Refused(NamedTuple):
    """Why a CONNECT is not accepted: an MQTT 5 reason code, and a text for the log."""

    reason: int
    text: str


def begin(conn: Connection, body: bytes) -> None:
    """Take a CONNECT; the answer comes when the client is known."""
    try:
        conn.level, conn.bridge, _ = protocol_of(body)
        connect = parse_connect(body)
    except ProtocolError as error:
        # 3.1.1 has no return code for a malformed CONNECT: the connection is closed (MQTT-3.1.4-1).
        if error.reason == UNSUPPORTED_VERSION or conn.level == V5:
            conn.lane.counts["protocol_errors"] += error.reason != UNSUPPORTED_VERSION
            refuse(conn, Refused(error.reason, str(error)))
            return
        raise
    conn.max_packet_out = connect.properties.get(p.MAXIMUM_PACKET_SIZE, conn.max_packet_out)
    conn.wait_with(len(body))
    conn.lane.logging_in[conn] = conn.lane.spawn(_open(conn, connect))


def refuse(conn: Connection, refused: Refused) -> None:
    """Answer with a reason, and close."""
    answer = answers.connack(conn.level, refused.reason)
    if len(answer) <= conn.max_packet_out:
        conn.send(answer)
    conn.end("refused_connects", f"refused: {refused.text}", linger=True)


async def _open(conn: Connection, connect: Connect) -> None:
    lane = conn.lane
    refused = _unfit(connect)
    user: str | None = None
    proof = b""
    if refused is None:
        user, proof, refused = await _authenticate(conn, connect)
    lane.logging_in.pop(conn, None)  # from here on it is not ended half way
    if refused is None and connect.client_id and not lane.access.may_use_id(user, connect.client_id):
        why = f"client id {connect.client_id[:80]!r} is not one of user {user!r}; see mqtt.client_ids"
        refused = Refused(BAD_CLIENT_ID, why)
    client_id = connect.client_id or f"auto-{secrets.token_hex(10)}"
    identity = lane.access.identify(client_id, user, local=is_loopback(conn.address))
    if refused is None and connect.will is not None:
        refused = _refused_will(conn, identity, connect.will.topic)
    while refused is None:
        old, newest = lane.sessions.get(client_id), lane.newest.get(client_id)
        foreign = old is not None and old.identity.user != user
        if foreign and not lane.access.binds_ids:
            refused = Refused(NOT_AUTHORIZED, f"client id {client_id!r} belongs to another user")
        elif old is not None and old.connection is not None:
            old.connection.fail("taken_over", "taken over by a new connection", SESSION_TAKEN_OVER)
        elif newest is not None and newest.unstored_ids:
            # They count only once the messages are stored, and only in the session that they were sent in.
            if not await _settled(newest):
                refused = Refused(SERVER_BUSY, "what its last connection sent is not stored yet")
        elif old is None:
            break
        elif connect.clean or foreign:
            lane.sessions.end(old)
        else:
            break
    if conn.transport.is_closing():
        return
    if refused is None and not lane.access.still_admits(user, proof):  # a reload came in between
        refused = Refused(NOT_AUTHORIZED, "what let it in was replaced meanwhile")
    if refused is not None:
        refuse(conn, refused)
        return
    session = lane.sessions.get(client_id)
    present = session is not None
    if session is None:
        session = lane.sessions.create(client_id, identity)
    session.identity = identity
    session.proof = proof
    _adopt(conn, connect, session)
    if present and session.subscriptions:
        lane.router.forget_routes()  # its rules may have changed
    if session.persistent:
        await lane.journaled()
    if session.connection is not conn:
        return
    answer = _connack(conn, connect, session, present=present)
    if len(answer) > conn.max_packet_out:
        size = f"its Maximum Packet Size of {conn.max_packet_out}"
        refuse(conn, Refused(PACKET_TOO_LARGE, f"CONNACK has {len(answer)} bytes, above {size}"))
        return
    conn.send(answer)
    conn.opened()
    session.outbox.attach(conn)


def _unfit(connect: Connect) -> Refused | None:
    """What rules a CONNECT out, whoever sends it."""
    if p.AUTH_METHOD in connect.properties:
        return Refused(BAD_AUTH_METHOD, "enhanced authentication is not offered")
    if p.AUTH_DATA in connect.properties:
        return Refused(PROTOCOL_ERROR, "authentication data without a method (MQTT 5 section 3.1.2.11.10)")
    if not connect.client_id and connect.level == V31:
        return Refused(BAD_CLIENT_ID, "no client id, which MQTT 3.1 asks for (3.1, section 3.1)")
    if not connect.client_id and not connect.clean and connect.level != V5:
        return Refused(BAD_CLIENT_ID, "a persistent session without client id (MQTT-3.1.3-8)")
    if len(connect.client_id) > MAX_CLIENT_ID:
        return Refused(BAD_CLIENT_ID, f"a client id of {len(connect.client_id)} characters")
    return None


def _refused_will(conn: Connection, identity: Identity, topic: str) -> Refused | None:
    """Why a client may not have a will on this topic: the rules of a PUBLISH hold for it too."""
    try:
        route = conn.lane.router.route(topic.encode())
    except ProtocolError as error:
        return Refused(error.reason, f"a will on topic {topic[:80]!r}")
    if route.request or route.denied or not (route.ignored or identity.may_publish(topic)):
        why = f"{identity.label} may not publish its will on {topic!r}; see [[mqtt.acl]]"
        return Refused(NOT_AUTHORIZED, why)
    return None


async def _authenticate(conn: Connection, connect: Connect) -> tuple[str | None, bytes, Refused | None]:
    """Who the client is, and by what proof: a certificate, a user with a password, or nobody (None)."""
    access = conn.lane.access
    if conn.listener.client_certificates:
        name = conn.certificate_name()
        if not name or (connect.username or name) != name:
            why = f"user name {connect.username!r} is not its certificate's"
            return None, b"", Refused(NOT_AUTHORIZED, why)
        return name, of_certificate(conn.transport.get_extra_info("ssl_object")), None
    if connect.username is None or not access.has_users:
        return None, b"", _answer(access.refuse_anonymous(loopback=conn.listener.address.loopback))
    conn.listen_for_end(True)
    denied = await access.verify(connect.username, connect.password, conn.address)
    conn.listen_for_end(False)
    return connect.username, access.proof_of(connect.username), _answer(denied)


def _answer(denied: Denied | None) -> Refused | None:
    return None if denied is None else Refused(_REASONS[denied.reason], denied.text)


async def _settled(old: Connection) -> bool:
    """Wait until what an old connection published is committed or has failed."""
    try:
        await asyncio.wait_for(old.settled(), SETTLE_TIMEOUT)
    except TimeoutError:
        return False
    return True


def _adopt(conn: Connection, connect: Connect, session: Session) -> None:
    """Join a connection and its session."""
    lane, properties = conn.lane, connect.properties
    lane.sessions.enter(session)
    session.connection = lane.newest[session.client_id] = conn
    conn.session = session
    if connect.level == V5:
        lane.set_expiry(session, properties.get(p.SESSION_EXPIRY, 0))
        conn.receive_maximum = properties.get(p.RECEIVE_MAXIMUM, 65_535)
    else:
        lane.set_expiry(session, 0 if connect.clean else NEVER)
    lane.set_will(session, connect.will)
    seconds = min(connect.keep_alive, lane.limits.max_keep_alive)
    if connect.level == V5 and not seconds:
        seconds = lane.limits.max_keep_alive
    conn.keep_alive = 1.5 * seconds


def _connack(conn: Connection, connect: Connect, session: Session, *, present: bool) -> bytes:
    """CONNACK 0; for MQTT 5 with everything that is less than the protocol allows (section 3.2.2.3)."""
    if connect.level != V5:
        return answers.connack(connect.level, SUCCESS, present=present)
    lane = conn.lane
    properties: p.Properties = {
        p.MAXIMUM_PACKET_SIZE: lane.max_packet,
        p.RECEIVE_MAXIMUM: RECEIVE_MAXIMUM,
        p.TOPIC_ALIAS_MAXIMUM: TOPIC_ALIASES,
        p.SHARED_AVAILABLE: 0,
    }
    longest = lane.limits.session_expiry_interval // 1000
    if session.expiry > longest:
        properties[p.SESSION_EXPIRY] = longest
    if not connect.client_id:
        properties[p.ASSIGNED_CLIENT_ID] = session.client_id.encode()
    if conn.keep_alive != 1.5 * connect.keep_alive:
        properties[p.SERVER_KEEP_ALIVE] = round(conn.keep_alive / 1.5)
    return answers.connack(connect.level, SUCCESS, present=present, properties=properties)
