"""Requests over MQTT: the operations on streams for any MQTT client.

A client publishes to `streambridge/<client id>/<operation>` and gets the reply on
`streambridge/<client id>/<operation>/reply`, or, with MQTT 5, on its Response Topic with its Correlation
Data. The operations are those of `bridge.operations.catalog`, their encoding is that of
`bridge.operations.codec`.

On the embedded broker, a client may use only its own `<client id>` level. With access rules, it needs
`publish` on the request topic and the operation's right on the stream. The reply goes directly to the
connection that asked, so no other client can get it. Operations that wait (a read, a fetch) end with that
connection; operations that change a stream are completed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from bridge import audit
from bridge.errors import Unauthorized
from bridge.mqtt.broker.message import Message
from bridge.mqtt.broker.outbox import Outgoing
from bridge.mqtt.wire import properties as p
from bridge.operations.catalog import OPERATIONS
from bridge.operations.codec import answer
from bridge.topics import REQUEST_LEVEL

if TYPE_CHECKING:
    import asyncio

    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.server.connection import Connection
    from bridge.mqtt.server.connections import Connections
    from bridge.mqtt.wire.packets import Publish
    from bridge.operations.catalog import Operations

AT_A_TIME = 16  # requests of one client in progress; more wait in the socket
COPIES = 2  # of a request's bytes in memory, until it is answered: as received, and decoded


def take(
    connections: Connections, operations: Operations, session: Session, topic: str, packet: Publish
) -> None:
    """Answer a PUBLISH on a request topic. Raises Unauthorized on another client's topic."""
    client_id = session.client_id
    operation = topic.removeprefix(f"{REQUEST_LEVEL}/{client_id}/")
    if operation == topic or "/" in operation:
        who, why = session.identity, f"requests go to {REQUEST_LEVEL}/{client_id}/<operation>"
        audit.record(
            "publish", "refused", origin=who.origin, user=who.user, client=client_id, on=topic, why=why
        )
        raise Unauthorized(f"{topic!r} is not open to client {client_id!r}: {why}")
    conn = cast("Connection", session.line)  # every line here is one
    conn.requests += 1
    if conn.requests >= AT_A_TIME:
        conn.hold("requests")
    connections.broker.counts["requests"] += 1
    size = COPIES * len(packet.payload)
    session.outbox.hold(size)
    task = connections.spawn(_reply(operations, conn, session, operation, topic, packet))
    connections.broker.sessions.requests[task] = session, conn, size
    task.add_done_callback(partial(_ended, connections, conn))
    if (declared := OPERATIONS.get(operation)) is not None and declared.waits:
        connections.reading.setdefault(conn, {})[task] = None
        task.add_done_callback(partial(_read_ended, connections, conn))


def _ended(connections: Connections, conn: Connection, task: asyncio.Task[None]) -> None:
    """A request is over. A callback, because a task that is cancelled may not even have begun."""
    session, _, size = connections.broker.sessions.requests.pop(task)
    session.outbox.hold(-size)
    conn.requests -= 1
    conn.release("requests")


def _read_ended(connections: Connections, conn: Connection, task: asyncio.Task[None]) -> None:
    reads = connections.reading.get(conn, {})
    reads.pop(task, None)
    if not reads:
        connections.reading.pop(conn, None)


async def _reply(
    operations: Operations, conn: Connection, session: Session, operation: str, topic: str, packet: Publish
) -> None:
    asked = packet.properties or {}
    reply_to = asked.get(p.RESPONSE_TOPIC) or f"{topic}/reply".encode()
    properties = {kind: asked[kind] for kind in (p.CORRELATION_DATA,) if kind in asked}
    room = min(conn.connections.config.max_packet, conn.max_packet_out) - len(reply_to) - 1024
    reply = await answer(operations, operation, packet.payload, room, session.identity)
    # Straight to the client that asked, at the QoS of the request: no other one can ask for it.
    message = Message(reply_to, reply, packet.qos, properties=properties)
    session.outbox.put(Outgoing(message, min(packet.qos, 1), asked=True))
