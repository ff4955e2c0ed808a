"""Requests over MQTT: the operations on streams for any MQTT client.

A client publishes to `streambridge/<client id>/<operation>` and gets the reply on
`streambridge/<client id>/<operation>/reply`, or, with MQTT 5, on its Response Topic with its
Correlation Data. The body is the request map of the Stream Manager SDK, as JSON (bytes in base64) or
CBOR, told apart by the first byte (a CBOR map begins with 0xA0 to 0xBF) and nested 16 deep at most; the
reply is in the same:

    {"requestId": ..., "status": 0, "statusName": "Success", <the operation's result>}
    {"requestId": ..., "status": 5, "statusName": "ResourceNotFound", "errorMessage": ...}

    operation               request                                     result
    createMessageStream     definition
    updateMessageStream     definition
    deleteMessageStream     name
    describeMessageStream   name                                        messageStreamInfo
    listStreams                                                         streams: names
    appendMessage           name, payload, [messageId]                  sequenceNumber
    appendMessages          name, payloads, [messageIds]                sequenceNumbers
    readMessages            streamName, [readMessagesOptions]           messages
    purgeMessageStream      name, [upto], [topic]                       purgedMessages

A reply is never larger than a packet may be: a read returns fewer messages, and what still does not
fit is the error ResponsePayloadTooLarge. A read ends with the connection that asked, however long it
would still wait; what changes a stream is carried out. With access rules a client needs `publish` on
the request topic, and on `streams/<name>` to append, `read` on `streams/<name>` to read.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import cbor2
import msgspec
from msgspec import Struct

from bridge import cbor
from bridge.changes import log_change
from bridge.errors import InvalidRequest, ResponseTooLarge, StreamBridgeError, Unauthorized
from bridge.mqtt import headers
from bridge.mqtt import properties as p
from bridge.mqtt.message import Message
from bridge.mqtt.outbox import Outgoing
from bridge.reading import ReadMessagesOptions
from bridge.topics import REQUEST_LEVEL

if TYPE_CHECKING:
    import asyncio

    from bridge.access.rules import Identity
    from bridge.manager import StreamManager
    from bridge.mqtt.connection import Connection
    from bridge.mqtt.lane import Lane
    from bridge.streams.segment import Message as Stored

log = logging.getLogger(__name__)

READ = "readMessages"
AT_A_TIME = 16  # requests of one client that are being answered; more wait in the socket
ENVELOPE = 4 * 1024  # bytes of a reply beside the messages
PER_MESSAGE = 128  # bytes of a message in a reply, beside its payload, names and headers


class UnknownOperation(StreamBridgeError):  # noqa: N818
    """Raised for an operation that there is not."""

    status = 18
    status_name = "UnknownOperation"


class Request(Struct, rename="camel"):
    """The body of any request; each operation takes its own fields and ignores the rest."""

    request_id: str = ""
    definition: dict[str, Any] | None = None
    name: str | None = None
    stream_name: str | None = None
    payload: bytes | None = None
    payloads: list[bytes] | None = None
    message_id: bytes = b""
    message_ids: list[bytes] = []
    read_messages_options: ReadMessagesOptions | None = None
    upto: int | None = None
    topic: str | None = None


class StoredMessage(Struct, rename="camel", omit_defaults=True):
    """A message as the SDK knows it, with our topic and headers."""

    stream_name: str
    sequence_number: int
    ingest_time: int
    payload: bytes
    topic: str = ""
    headers: headers.Headers | None = None


class Found:
    """The messages that a read has found, to be encoded: `least`, and more as far as there is room."""

    def __init__(self, stream: str, messages: list[Stored], least: int, room: int) -> None:
        self._stream, self._messages, self._least, self._room = stream, messages, least, room

    def for_json(self) -> list[StoredMessage]:
        """As msgspec encodes them."""
        each = len(self._stream) + PER_MESSAGE
        ends = list(
            accumulate(
                len(row.payload) + len(row.topic) + 2 * len(row.headers) + each for row in self._messages
            )
        )
        return [
            StoredMessage(
                self._stream,
                message.sequence_number,
                message.ingest_time,
                message.payload,
                message.topic.decode(),
                headers.decode(message.headers) if message.headers else None,
            )
            for message in self._messages[: self._fitting(ends)]
        ]

    def in_cbor(self, opening: bytes) -> bytes:
        """Behind `opening` a CBOR array of the same; what is the same in many messages is encoded once."""
        stream = cbor.encode("streamName") + cbor.encode(self._stream) + cbor.encode("topic")
        topics = {row.topic for row in self._messages}
        after = {topic: stream + cbor.encode(topic.decode()) for topic in topics}
        plain = {topic: b"\xa5" + names for topic, names in after.items()}
        begins = [
            plain[row.topic]
            if not row.headers
            else b"\xa6" + after[row.topic] + _headers_in_cbor(row.headers)
            for row in self._messages
        ]
        pieces = cbor.messages(begins, self._messages)
        if sum(map(len, pieces)) > self._room:
            fit = self._fitting(list(accumulate(map(len, pieces)))[3::3])
            pieces[3 * fit + 1 :] = []
            pieces[0] = cbor.head(4, fit)
        return b"".join((opening, *pieces))

    def _fitting(self, ends: list[int]) -> int:
        """How many messages are returned, if each with those before it takes so many bytes."""
        return max(bisect_right(ends, self._room), self._least)


def _headers_in_cbor(extra: bytes) -> bytes:
    decoded = msgspec.to_builtins(headers.decode(extra), builtin_types=(bytes,))
    return cbor.encode("headers") + cbor2.dumps(decoded)


async def answer(
    manager: StreamManager,
    operation: str,
    body: bytes,
    limit: int,
    who: Identity | None = None,
    by: str = "a command",
) -> bytes:
    """Carry out one request and return the encoded reply; never raises because of what is asked.

    It may do what `who` may, or anything; the log calls somebody without an identity `by`.
    """
    in_cbor = bool(body) and 0xA0 <= body[0] <= 0xBF
    request = Request()
    try:
        request = _decode(body, in_cbor=in_cbor)
        action = _OPERATIONS.get(operation)
        if action is None:
            raise UnknownOperation(f"there is no operation {operation!r}; known: {', '.join(_OPERATIONS)}")
        room = limit - ENVELOPE if in_cbor else (limit - ENVELOPE) * 3 // 4
        result = await action(manager, request, who, max(room, 1))
        _log(operation, request, result, by if who is None else who.label)
        reply = _encode(
            {"requestId": request.request_id, "status": 0, "statusName": "Success", **result}, in_cbor
        )
        if len(reply) > limit:
            raise ResponseTooLarge(
                f"the reply has {len(reply)} bytes, and a packet has room for {limit}; ask for less"
            )
    except StreamBridgeError as error:
        return _failure(request, error.status, error.status_name, str(error), in_cbor)
    except OSError as error:
        return _failure(request, 1, "UnknownFailure", f"{operation}: {error}", in_cbor)
    return reply


def _log(operation: str, request: Request, result: dict[str, Any], by: str) -> None:
    """Tell of what has changed a stream."""
    match operation:
        case "createMessageStream":
            log_change("created", str(_definition(request)["name"]), by)
        case "updateMessageStream":
            log_change("updated", str(_definition(request)["name"]), by)
        case "deleteMessageStream":
            log_change("deleted", _name(request), by)
        case "purgeMessageStream":
            log_change(f"purged, messages dropped: {result['purgedMessages']}", _name(request), by)


def refusal(body: bytes, why: str) -> bytes:
    """The encoded reply to a request that is not carried out."""
    in_cbor = bool(body) and 0xA0 <= body[0] <= 0xBF
    request = Request()
    with suppress(InvalidRequest):
        request = _decode(body, in_cbor=in_cbor)
    return _failure(request, 1, "UnknownFailure", why, in_cbor)


def _failure(request: Request, status: int, name: str, text: str, in_cbor: bool) -> bytes:
    fields = {"requestId": request.request_id, "status": status, "statusName": name, "errorMessage": text}
    return _encode(fields, in_cbor)


def _decode(body: bytes, *, in_cbor: bool) -> Request:
    try:
        if in_cbor:
            return msgspec.convert(cbor.decode_map(body), Request, builtin_types=(bytes,))
        request = msgspec.json.decode(body or b"{}", type=Request)
        if _deeper(request.definition, cbor.MAX_DEPTH - 1):
            raise RecursionError
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the request: {error}") from None
    except RecursionError:
        raise InvalidRequest(f"the request is nested deeper than {cbor.MAX_DEPTH}") from None
    except cbor.Malformed as error:
        raise InvalidRequest(f"the request is not one CBOR map: {error}") from None
    return request


def _deeper(value: Any, levels: int) -> bool:
    """Whether a definition is nested deeper: what decodes here could be too deep for whoever handles it."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return not levels or any(_deeper(item, levels - 1) for item in value)


def _encode(fields: dict[str, Any], in_cbor: bool) -> bytes:
    found = fields.get("messages")
    if isinstance(found, Found):
        if in_cbor:
            rest = cbor.encode({key: value for key, value in fields.items() if key != "messages"})
            return found.in_cbor(bytes((rest[0] + 1,)) + rest[1:] + cbor.encode("messages"))
        fields = {**fields, "messages": found.for_json()}
    if in_cbor:
        return cbor2.dumps(msgspec.to_builtins(fields, builtin_types=(bytes,)))
    return msgspec.json.encode(fields)


# -- the operations ------------------------------------------------------------

Action = Callable[["StreamManager", Request, "Identity | None", int], Awaitable[dict[str, Any]]]


def _name(request: Request) -> str:
    name = request.name or request.stream_name
    if not name:
        raise InvalidRequest("the request: `name` is missing; give the name of the stream")
    return name


async def _create(
    manager: StreamManager, request: Request, who: Identity | None, room: int
) -> dict[str, Any]:
    manager.create(_definition(request))
    return {}


async def _update(
    manager: StreamManager, request: Request, who: Identity | None, room: int
) -> dict[str, Any]:
    manager.update(_definition(request))
    return {}


def _definition(request: Request) -> dict[str, Any]:
    if request.definition is None:
        raise InvalidRequest("the request: `definition` is missing")
    return request.definition


async def _delete(
    manager: StreamManager, request: Request, who: Identity | None, room: int
) -> dict[str, Any]:
    manager.delete(_name(request))
    return {}


async def _describe(
    manager: StreamManager, request: Request, who: Identity | None, room: int
) -> dict[str, Any]:
    return {"messageStreamInfo": manager.describe(_name(request))}


async def _list(manager: StreamManager, request: Request, who: Identity | None, room: int) -> dict[str, Any]:
    return {"streams": manager.names()}


async def _append(
    manager: StreamManager, request: Request, who: Identity | None, room: int
) -> dict[str, Any]:
    name = _name(request)
    _may_append(who, name)
    if request.payload is None:
        raise InvalidRequest("the request: `payload` is missing")
    kept = _kept(manager, who, name)
    number = await manager.append(name, request.payload, message_id=request.message_id, headers=kept)
    return {"sequenceNumber": number}


async def _append_all(
    manager: StreamManager, request: Request, who: Identity | None, room: int
) -> dict[str, Any]:
    name = _name(request)
    _may_append(who, name)
    payloads, ids = request.payloads or [], request.message_ids
    if ids and len(ids) != len(payloads):
        raise InvalidRequest(f"the request: {len(payloads)} payloads and {len(ids)} messageIds")
    kept = _kept(manager, who, name)
    return {"sequenceNumbers": await manager.append_all(name, payloads, ids, kept)}


async def _read(manager: StreamManager, request: Request, who: Identity | None, room: int) -> dict[str, Any]:
    name = _name(request)
    if who is not None and not who.may_read(f"streams/{name}"):
        raise Unauthorized(f"{who.label} may not read streams/{name}; see [[mqtt.acl]]")
    options = request.read_messages_options or ReadMessagesOptions()
    found = await manager.read(name, options, max_bytes=room)
    return {"messages": Found(name, found, options.min_message_count, room)}


async def _purge(manager: StreamManager, request: Request, who: Identity | None, room: int) -> dict[str, Any]:
    return {"purgedMessages": await manager.purge(_name(request), upto=request.upto, topic=request.topic)}


def _kept(manager: StreamManager, who: Identity | None, name: str) -> bytes:
    """The headers of what a client appends to a stream."""
    if who is None or not manager.wants_client(name):
        return b""
    return headers.encode(headers.Headers(client=who.client_id))


def _may_append(who: Identity | None, name: str) -> None:
    if who is not None and not who.may_publish(f"streams/{name}"):
        raise Unauthorized(f"{who.label} may not publish on streams/{name}; see [[mqtt.acl]]")


_OPERATIONS: dict[str, Action] = {
    "createMessageStream": _create,
    "updateMessageStream": _update,
    "deleteMessageStream": _delete,
    "describeMessageStream": _describe,
    "listStreams": _list,
    "appendMessage": _append,
    "appendMessages": _append_all,
    READ: _read,
    "purgeMessageStream": _purge,
}


# -- on the embedded broker ------------------------------------------------------------


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
        reply = await answer(lane.manager, operation, body, room, session.identity)
        # Straight to who asked, at the QoS of the request: no other client can ask for it.
        session.outbox.put(Outgoing(Message(reply_to, reply, qos, properties=properties), min(qos, 1)))
    finally:
        conn.requests -= 1
        conn.release("requests")
