"""From CONNECT to CONNACK: protocol version, identity, session (section 3.1).

The order matters. Until a client is authenticated, nothing that belongs to its client id is touched: neither
a connection, nor a session, nor a will.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from bridge.access.logins import Denied, Reason
from bridge.access.proofs import of_plugin
from bridge.audit import Origin, record
from bridge.auth.supervisor import Refusal
from bridge.mqtt.broker import receipts
from bridge.mqtt.broker.broker import Opening, Refused
from bridge.mqtt.broker.outbox import NO_LIMIT
from bridge.mqtt.broker.publishing import RECEIVE_MAXIMUM
from bridge.mqtt.broker.router import OURS, is_status
from bridge.mqtt.broker.sessions import NEVER
from bridge.mqtt.wire import answers
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import (
    BAD_AUTH_METHOD,
    BAD_CLIENT_ID,
    BAD_TOPIC_NAME,
    BAD_USER_OR_PASSWORD,
    NOT_AUTHORIZED,
    PACKET_TOO_LARGE,
    PROTOCOL_ERROR,
    QUOTA_EXCEEDED,
    SERVER_BUSY,
    SUCCESS,
    UNSUPPORTED_VERSION,
    V5,
    V31,
    Connect,
    ProtocolError,
    parse_connect,
    protocol_of,
    text,
)
from bridge.plugin.auth import Login
from bridge.topics import is_topic_name

if TYPE_CHECKING:
    from bridge.access.rules import Identity
    from bridge.mqtt.server.connection import Connection
    from bridge.mqtt.wire.packets import Will

MAX_CLIENT_ID = 1_024
TOPIC_ALIASES = 64  # of one connection, announced by CONNACK

_REASONS = {
    Reason.NOT_ALLOWED: NOT_AUTHORIZED,
    Reason.WRONG_CREDENTIALS: BAD_USER_OR_PASSWORD,
    Reason.BUSY: SERVER_BUSY,
}
_LOGINS = {  # by kind of proof
    b"": "anonymous",
    b"p": "password",
    b"c": "certificate",
    b"m": "certificate",
    b"a": "plugin",
}


def begin(conn: Connection, body: bytes) -> None:
    """Handle a CONNECT. The answer may come later, because passwords and plugins take time."""
    try:
        conn.level, conn.bridge, _ = protocol_of(body)
        connect = parse_connect(body)
    except ProtocolError as error:
        # 3.1.1 has no return code for a malformed CONNECT: the connection is closed (MQTT-3.1.4-1).
        if error.reason == UNSUPPORTED_VERSION or conn.level == V5:
            conn.broker.counts["protocol_errors"] += error.reason != UNSUPPORTED_VERSION
            conn.refuse(error.reason, str(error))
            return
        raise
    conn.claimed = connect.client_id, connect.username
    asked = connect.properties
    conn.max_packet_out = asked.get(p.MAXIMUM_PACKET_SIZE, conn.max_packet_out)
    conn.explains = conn.level == V5 and bool(asked.get(p.REQUEST_PROBLEM_INFO, 1))
    conn.receipts = conn.explains and receipts.ASKED in asked.get(p.USER_PROPERTY, ())
    conn.wait_with(len(body))
    access, user, endpoint = conn.endpoint.listener.access, connect.username, conn.endpoint
    if refused := _unfit(connect):
        conn.refuse(*refused)
    elif endpoint.client_certificates:
        tls = conn.transport.get_extra_info("ssl_object")
        found, now = access.certified(tls), conn.broker.clock.wall() / 1000
        if found is None:
            why = (
                "its certificate belongs to no user: it does not have exactly one common name, or "
                "[[mqtt.user]] lists others"
            )
            conn.refuse(NOT_AUTHORIZED, why)
        elif (user or found.user) != found.user:
            conn.refuse(NOT_AUTHORIZED, f"user name {user!r} is not its certificate's, {found.user!r}")
        elif found.expires <= now:  # TLS does not check this when it resumes a session
            conn.refuse(NOT_AUTHORIZED, "its certificate, or one of its CAs, has expired")
        elif why := endpoint.listener.revocations.refuse(tls, datetime.fromtimestamp(now, UTC)):
            conn.refuse(NOT_AUTHORIZED, why)
        else:
            conn.expires = found.expires
            _authenticated(conn, connect, found.user, found.proof)
    elif (
        (user is not None or connect.password is not None)
        and conn.connections.auth.active
        and not (user is not None and access.knows(user))
    ):
        conn.connections.logging_in[conn] = conn.connections.spawn(_ask_plugins(conn, connect))
    elif user is not None and access.has_users:
        conn.connections.logging_in[conn] = conn.connections.spawn(_check_password(conn, connect, user))
    elif denied := access.refuse_anonymous(loopback=endpoint.loopback):
        _deny(conn, denied)
    else:
        _authenticated(conn, connect, None, b"")


async def _check_password(conn: Connection, connect: Connect, user: str) -> None:
    access = conn.endpoint.listener.access
    conn.listen_for_end(True)
    denied = await access.verify(user, connect.password, conn.address)
    conn.listen_for_end(False)
    conn.connections.logging_in.pop(conn, None)  # from here on, the login is not cancelled
    if denied is not None:
        _deny(conn, denied)
    else:
        _authenticated(conn, connect, user, access.proof_of(user))


async def _ask_plugins(conn: Connection, connect: Connect) -> None:
    """Ask the plugins about a client that the users file does not know."""
    login = Login(
        client_id=connect.client_id, user=connect.username, password=connect.password, address=conn.address
    )
    conn.listen_for_end(True)
    found = await conn.connections.auth.log_in(login)
    conn.listen_for_end(False)
    conn.connections.logging_in.pop(conn, None)
    if isinstance(found, Refusal):
        conn.refuse(SERVER_BUSY if found.busy else BAD_USER_OR_PASSWORD, found.why)
    elif conn.endpoint.listener.access.knows(found.user):
        why = f"{found.plugin}: {found.user!r} is a user of mqtt.users_file, who logs in with that password"
        conn.refuse(NOT_AUTHORIZED, why)
    elif why := conn.endpoint.listener.access.needs_certificate(found.user):
        conn.refuse(BAD_USER_OR_PASSWORD, f"{found.plugin}: {why}")
    else:
        conn.expires = found.expires or 0.0
        proof = of_plugin(found.plugin, found.basis)
        if proof not in conn.broker.accesses.of_plugins:
            conn.connections.ask_for_bases()  # a file has changed, but the service has not noticed yet
        _authenticated(conn, connect, found.user, proof)


async def _ask_about_will(
    conn: Connection, connect: Connect, identity: Identity, proof: bytes, topic: str
) -> None:
    conn.listen_for_end(True)
    while (asking := conn.asking) is not None:
        allowed = await asking.learn("publish", topic)
        if conn.asking is asking:  # else a reload has changed the plugins
            break
    else:
        allowed = True
    conn.listen_for_end(False)
    conn.connections.logging_in.pop(conn, None)
    if allowed:
        _open(conn, connect, identity, proof)
    else:
        conn.refuse(NOT_AUTHORIZED, f"a plugin refuses its will on {topic!r}")


def _deny(conn: Connection, denied: Denied) -> None:
    conn.refuse(_REASONS[denied.reason], denied.text)


def _authenticated(conn: Connection, connect: Connect, user: str | None, proof: bytes) -> None:
    """The client is authenticated (user None: anonymous): check what it asks for, then open its session."""
    listener = conn.endpoint.listener
    if connect.client_id and not listener.access.may_use_id(user, connect.client_id):
        whose = "belongs to a user, who must log in" if user is None else f"is not one of user {user!r}"
        why = f"client id {connect.client_id[:80]!r} {whose}"
        conn.refuse(BAD_CLIENT_ID, f"{why}; see mqtt.client_ids and [[mqtt.user]]")
        return
    client_id = connect.client_id or f"auto-{secrets.token_hex(10)}"
    identity = listener.access.identify(client_id, user, local=conn.local)
    identity.origin = Origin("mqtt", conn.address)
    if connect.will is not None and (refused := _refused_will(conn, identity, connect.will)):
        conn.refuse(*refused)
        return
    if refused_by_budget := conn.connections.enter_user(conn, identity):
        conn.refuse(QUOTA_EXCEEDED, refused_by_budget.why, refused_by_budget.counter)
        return
    conn.who = client_id, user
    asked = connect.will is not None and not connect.will.topic.startswith(OURS)
    if connect.will is not None and conn.asking is not None and asked:
        asking = _ask_about_will(conn, connect, identity, proof, connect.will.topic)
        conn.connections.logging_in[conn] = conn.connections.spawn(asking)
    else:
        _open(conn, connect, identity, proof)


def _open(conn: Connection, connect: Connect, identity: Identity, proof: bytes) -> None:
    """The client may do what it asks for: ask the broker for its session."""
    broker, client_id, user = conn.broker, identity.client_id, identity.user
    limits = conn.endpoint.listener.limits
    seconds = min(connect.keep_alive, limits.max_keep_alive)
    if connect.level == V5:
        expiry = connect.properties.get(p.SESSION_EXPIRY, 0)
        conn.receive_maximum = connect.properties.get(p.RECEIVE_MAXIMUM, 65_535)
        seconds = seconds or limits.max_keep_alive
    else:
        expiry = 0 if connect.clean else NEVER
    conn.keep_alive = 1.5 * seconds
    if conn.max_packet_out < NO_LIMIT:  # checked before it takes over or ends a session, and has a will
        size = len(_connack(conn, connect, client_id, expiry, present=False))
        if size > conn.max_packet_out:
            limit = f"its Maximum Packet Size of {conn.max_packet_out}"
            conn.refuse(PACKET_TOO_LARGE, f"CONNACK has {size} bytes, above {limit}")
            return

    def opened(present: bool | Refused) -> None:
        if isinstance(present, Refused):
            conn.refuse(*present)
            return
        session = conn.session
        assert session is not None
        conn.send(_connack(conn, connect, client_id, expiry, present=present))
        record("login", origin=identity.origin, user=user, client=client_id, why=_LOGINS[proof[:1]])
        conn.opened()
        session.outbox.attach(conn)

    broker.open(conn.inbox, Opening(identity, proof, connect.clean, expiry, connect.will), opened)


def _unfit(connect: Connect) -> Refused | None:
    """Return why a CONNECT is refused whoever sends it; None if it is not."""
    if p.AUTH_METHOD in connect.properties:
        return Refused(BAD_AUTH_METHOD, "enhanced authentication is not supported")
    if p.AUTH_DATA in connect.properties:
        return Refused(PROTOCOL_ERROR, "authentication data without a method (MQTT 5 section 3.1.2.11.10)")
    if not connect.client_id and connect.level == V31:
        return Refused(BAD_CLIENT_ID, "no client id, which MQTT 3.1 requires (3.1, section 3.1)")
    if not connect.client_id and not connect.clean and connect.level != V5:
        return Refused(BAD_CLIENT_ID, "a persistent session without client id (MQTT-3.1.3-8)")
    if len(connect.client_id) > MAX_CLIENT_ID:
        return Refused(BAD_CLIENT_ID, f"a client id of {len(connect.client_id)} characters")
    return None


def _refused_will(conn: Connection, identity: Identity, will: Will) -> Refused | None:
    """Return why a client may not have this will: the rules for a PUBLISH apply."""
    topic, reply = will.topic, will.properties.get(p.RESPONSE_TOPIC)
    if reply is not None and not is_topic_name(text(reply)):
        return Refused(BAD_TOPIC_NAME, f"a will with response topic {reply[:80]!r}")
    try:
        route = conn.broker.router.route(topic.encode())
    except ProtocolError as error:
        return Refused(error.reason, f"a will on topic {topic[:80]!r}")
    if topic.startswith(OURS) and (conn.bridge or not is_status(topic)):
        return None  # it is never published (`Broker.route`)
    if route.request or route.reserved:
        return Refused(NOT_AUTHORIZED, f"a will on topic {topic[:80]!r}, which belongs to the broker")
    if not identity.may_publish(topic):
        why = f"{identity.label} may not publish its will on {topic!r}; see [[mqtt.acl]]"
        return Refused(NOT_AUTHORIZED, why)
    if route.stored_nowhere and conn.refuses_unmatched:
        why = f'a will on {topic!r}, which no stream takes: `unmatched` of this listener is "refuse"'
        return Refused(BAD_TOPIC_NAME, why)
    return None


def _connack(conn: Connection, connect: Connect, client_id: str, expiry: int, *, present: bool) -> bytes:
    """Return CONNACK 0. For MQTT 5 it has each limit below the protocol's own (section 3.2.2.3)."""
    if connect.level != V5:
        return answers.connack(connect.level, SUCCESS, present=present)
    config = conn.connections.config
    properties: p.Properties = {
        p.MAXIMUM_PACKET_SIZE: config.max_packet,
        p.RECEIVE_MAXIMUM: RECEIVE_MAXIMUM,
        p.TOPIC_ALIAS_MAXIMUM: TOPIC_ALIASES,
    }
    longest = config.limits.session_expiry_interval // 1000
    if expiry > longest:
        properties[p.SESSION_EXPIRY] = longest
    if not connect.client_id:
        properties[p.ASSIGNED_CLIENT_ID] = client_id.encode()
    if conn.keep_alive != 1.5 * connect.keep_alive:
        properties[p.SERVER_KEEP_ALIVE] = round(conn.keep_alive / 1.5)
    return answers.connack(connect.level, SUCCESS, present=present, properties=properties)
