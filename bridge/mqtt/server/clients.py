"""What the command line may ask about MQTT clients: list them, disconnect one, forget its session.

    operation           request     result
    listClients                     clients: a list of `describe`
    disconnectClient    client      connected: whether it was; its session and its will go on as ever
    forgetClient        client      connected; the session with its subscriptions, messages and will is gone

A client id belongs to the user who opened its session, for as long as the session lasts. If somebody else has
taken an id, the operator frees it by forgetting that client.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import cbor2

from bridge import cbor
from bridge.errors import InvalidRequest, StreamBridgeError
from bridge.mqtt.wire.packets import V5, V31, V311
from bridge.net.connected import Connected

if TYPE_CHECKING:
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.server.connections import Member
    from bridge.mqtt.server.server import Server

log = logging.getLogger(__name__)

OPERATIONS = frozenset({"listClients", "disconnectClient", "forgetClient"})
PROTOCOLS = {V31: "MQTT 3.1", V311: "MQTT 3.1.1", V5: "MQTT 5"}


async def answer(server: Server | None, operation: str, body: bytes) -> bytes:
    """Carry out one request of the command line, in CBOR; returns the reply, in CBOR."""
    reply: dict[str, Any] = {"requestId": "", "status": 0, "statusName": "Success"}
    try:
        request = cbor.decode_map(body)
        reply["requestId"] = str(request.get("requestId", ""))
        if server is None:
            raise InvalidRequest('there are no clients of ours: mode = "external"; ask that broker')
        reply |= await _carry_out(server, operation, request.get("client"))
    except cbor.Malformed as error:
        reply |= _failure(InvalidRequest(f"the request is not one CBOR map: {error}"))
    except StreamBridgeError as error:
        reply |= _failure(error)
    return cbor2.dumps(reply)


def _failure(error: StreamBridgeError) -> dict[str, Any]:
    return {"status": error.status, "statusName": error.status_name, "errorMessage": str(error)}


async def _carry_out(server: Server, operation: str, client: object) -> dict[str, Any]:
    if operation == "listClients":
        found = sorted(server.broker.sessions.all(), key=lambda session: session.client_id)
        return {"clients": [describe(server, session) for session in found]}
    session = server.broker.sessions.get(client) if isinstance(client, str) else None
    if session is None:
        raise InvalidRequest(f"no client {client!r} is connected or has a session")
    connected = session.line is not None
    if operation == "forgetClient":
        server.broker.forget(session)
        await server.journaled()
    else:
        server.broker.disconnect(session)
    log.info(
        "%s: %s by a command",
        session.identity.label,
        "forgotten" if operation == "forgetClient" else "disconnected",
    )
    return {"connected": connected}


def peer(conn: Member, session: Session) -> Connected:
    """A client that is connected."""
    return Connected(
        session.client_id,
        session.identity.user,
        conn.address,
        PROTOCOLS.get(conn.level, "MQTT"),
        conn.since,
        conn.published,
        len(session.subscriptions),
        len(session.outbox),
        conn.slowed,
    )


def describe(server: Server, session: Session) -> dict[str, Any]:
    """A session as plain values; `left` is the Unix time in ms since when it is away, `expires` its end."""
    broker, conn, left, ends = server.broker, session.line, None, None
    if conn is None:
        left = round(session.left * 1000 + broker.clock.wall() - broker.clock.now())
        ends = left + round(broker.sessions.lifetime(session) * 1000)
    return {
        "client": session.client_id,
        "user": session.identity.user,
        "address": None if conn is None else conn.address,
        "protocol": None if conn is None else PROTOCOLS.get(conn.level, "MQTT"),
        "persistent": session.persistent,
        "subscriptions": len(session.subscriptions),
        "queued": len(session.outbox),
        "left": left,
        "expires": ends,
    }
