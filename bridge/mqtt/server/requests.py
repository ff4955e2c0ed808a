"""Requests over MQTT: the operations on streams for any MQTT client.

A client publishes to `streambridge/<client id>/<operation>` and gets the reply on
`streambridge/<client id>/<operation>/reply`, or, with MQTT 5, on its Response Topic with its Correlation
Data. The operations are those of `bridge.operations.catalog`, their encoding is that of
`bridge.operations.codec`.

On the embedded broker a client may use its own `<client id>` level only, and with access rules it needs
`publish` on the request topic, beside the operation's right on the stream. The reply goes straight to the
connection that asked, so that no other client can ask for it. A read ends with that connection, however long
it would still wait; what changes a stream is carried out.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bridge.errors import Unauthorized
from bridge.mqtt.broker.message import Message
from bridge.mqtt.broker.outbox import Outgoing
from bridge.mqtt.wire import properties as p
from bridge.operations.catalog import READ
from bridge.operations.codec import answer
from bridge.topics import REQUEST_LEVEL

if TYPE_CHECKING:
    import asyncio

    from bridge.mqtt.server.connection import Connection
    from bridge.mqtt.server.lane import Lane

AT_A_TIME = 16  # requests of one client that are being answered; more wait in the socket


def take(conn: Connection, topic: str, payload: bytes, properties: p.Properties, qos: int) -> None:
    """Answer a PUBLISH on a request topic; raises Unauthorized on another client's."""
    assert conn.session is not None
    client_id = conn.session.client_id
    operation = topic.removeprefix(f"{REQUEST_LEVEL}/{client_id}/")
    if operation == topic or "/" in operation:
        raise Unauthorized(
            f"{topic!r} is not open to client {client_id!r}: "
            f"requests go to {REQUEST_LEVEL}/{client_id}/<operation>"
        )
    reply_to = properties.get(p.RESPONSE_TOPIC) or f"{topic}/reply".encode()
    passed_on = (
        {p.CORRELATION_DATA: properties[p.CORRELATION_DATA]} if p.CORRELATION_DATA in properties else {}
    )
    conn.requests += 1
    if conn.requests >= AT_A_TIME:
        conn.hold("requests")
    lane = conn.lane
    lane.counts["requests"] += 1
    task = lane.spawn(_reply(lane, conn, operation, payload, reply_to, passed_on, qos))
    if operation == READ:
        lane.reading.setdefault(conn, set()).add(task)
        task.add_done_callback(partial(_read_ended, lane, conn))


def _read_ended(lane: Lane, conn: Connection, task: asyncio.Task[None]) -> None:
    reads = lane.reading.get(conn, set())
    reads.discard(task)
    if not reads:
        lane.reading.pop(conn, None)


async def _reply(
    lane: Lane,
    conn: Connection,
    operation: str,
    body: bytes,
    reply_to: bytes,
    properties: p.Properties,
    qos: int,
) -> None:
    session = conn.session
    assert session is not None
    try:
        room = min(lane.max_packet, conn.max_packet_out) - len(reply_to) - 1024
        reply = await answer(lane.operations, operation, body, room, session.identity)
        # Straight to who asked, at the QoS of the request: no other client can ask for it.
        session.outbox.put(Outgoing(Message(reply_to, reply, qos, properties=properties), min(qos, 1)))
    finally:
        conn.requests -= 1
        conn.release("requests")
