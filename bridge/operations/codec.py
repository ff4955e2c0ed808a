"""Requests and replies as bytes: JSON (bytes in base64) or CBOR, for any transport that carries messages.

A body is the request's map. Its first byte reveals the encoding: a CBOR map begins with 0xA0 to 0xBF. It may
be nested at most 16 deep. A body in CBOR, and a definition in JSON, may have a limited number of items: they
are walked through in Python, on the event loop and before the caller's right is known. The reply has the same
encoding:

    {"requestId": ..., "status": 0, "statusName": "Success", <the operation's result>}
    {"requestId": ..., "status": 5, "statusName": "ResourceNotFound", "errorMessage": ...}

A reply has at most as many bytes as its transport accepts. A read then returns fewer messages, and a reply
that still does not fit becomes the error ResponsePayloadTooLarge.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import cbor2
import msgspec
from msgspec import UNSET, Struct

from bridge import cbor
from bridge.errors import InvalidRequest, ResponseTooLarge, StreamBridgeError, UnknownOperation
from bridge.model import problem
from bridge.operations.catalog import OPERATIONS, Fetched, Found, Request, Result
from bridge.streams import headers
from bridge.streams.segment import StreamMessage

if TYPE_CHECKING:
    from bridge.access.rules import Identity
    from bridge.operations.catalog import Operations

ENVELOPE = 4 * 1024  # bytes of a reply besides the messages
WAITING = 64 * 1024  # bytes of a request that may wait for messages, and is in memory meanwhile
PEEK = 4 * 1024  # bytes of an invalid body that are searched for its requestId
PER_MESSAGE = 128  # bytes per message in a reply, besides payload, names and headers
_DELIVERIES = cbor2.dumps("deliveries")
_of_headers = attrgetter("headers")


async def answer(operations: Operations, name: str, body: bytes, limit: int, caller: Identity) -> bytes:
    """Carry out one encoded request. Returns the encoded reply, of at most `limit` bytes.

    It raises no error, whatever the request is. All of it is done in turns (`net.turns`).
    """
    return await operations.turns.work(caller.turn, _answer(operations, name, body, limit, caller))


async def _answer(operations: Operations, name: str, body: bytes, limit: int, caller: Identity) -> bytes:
    received = _Received(body)
    in_cbor = received.in_cbor
    room = limit - ENVELOPE if in_cbor else (limit - ENVELOPE) * 3 // 4
    try:
        request = received.decode(name)
        result = await operations.call(name, request, caller, room=max(room, 1))
        reply = _encode(request.request_id, result, room, in_cbor=in_cbor)
        if len(reply) > limit:
            raise ResponseTooLarge(
                f"the reply has {len(reply)} bytes, but at most {limit} are possible; request less"
            )
    except StreamBridgeError as error:
        return _failure(received.request_id(), error, in_cbor=in_cbor)
    except OSError as error:
        failed = StreamBridgeError(f"{name}: {error}")
        return _failure(received.request_id(), failed, in_cbor=in_cbor)
    return reply


def refusal(body: bytes, why: str) -> bytes:
    """Return the encoded reply to a request that is not carried out."""
    received = _Received(body)
    return _failure(received.request_id(), StreamBridgeError(why), in_cbor=received.in_cbor)


class _Envelope(Struct, rename="camel"):
    request_id: str = ""


class _Received:
    """The body of a request. CBOR is decoded once at most."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.in_cbor = bool(body) and 0xA0 <= body[0] <= 0xBF
        self._entries: dict[str, Any] | None = None

    def decode(self, name: str) -> Request:
        """Return the request for an operation. Raises UnknownOperation or InvalidRequest."""
        operation = OPERATIONS.get(name)
        if operation is None:
            raise UnknownOperation(f"there is no operation {name!r}; known: {', '.join(OPERATIONS)}")
        if operation.waits and len(self._body) > WAITING:
            raise InvalidRequest(
                f"the request has {len(self._body)} bytes, but at most {WAITING} are possible for one that "
                "may wait for messages"
            )
        try:
            if self.in_cbor:
                self._entries = cbor.decode_map(self._body)
                return msgspec.convert(self._entries, operation.request, builtin_types=(bytes,))
            request = msgspec.json.decode(self._body or b"{}", type=operation.request)
            _check_size(getattr(request, "definition", None))
        except msgspec.ValidationError as error:
            known = ", ".join(operation.request.__struct_encode_fields__)
            hint = f"; known are: {known}" if "unknown field" in str(error) else ""
            raise InvalidRequest(problem(error, "the request") + hint) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the request: {error}") from None
        except RecursionError:
            raise InvalidRequest(f"the request is nested deeper than {cbor.MAX_DEPTH}") from None
        except cbor.TooMany as error:
            raise InvalidRequest(f"the request has {error}; send less in one request") from None
        except cbor.Malformed as error:
            raise InvalidRequest(f"the request is not one CBOR map: {error}") from None
        return request

    def request_id(self) -> str:
        """The requestId, also of an invalid request; empty if there is none."""
        if self.in_cbor:
            if self._entries is None:
                self._entries = cbor.first_entries(self._body[:PEEK])
            found = self._entries.get("requestId")
            return found if isinstance(found, str) else ""
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(self._body, type=_Envelope).request_id
        return ""


def _check_size(definition: Any) -> None:
    """Raise what a request in CBOR raises if the definition is nested too deeply, or has too many items.

    It could be decoded, but not handled later.
    """
    level: list[Any] = [definition]
    count = 0
    for _ in range(cbor.MAX_DEPTH - 1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        count += len(inner)
        if count > cbor.MOST:
            raise cbor.TooMany(f"more than {cbor.MOST:,} items")
        level = inner
    if any(isinstance(value, dict | list) for value in level):
        raise RecursionError


# -- replies ------------------------------------------------------------


def _failure(request_id: str, error: StreamBridgeError, *, in_cbor: bool) -> bytes:
    fields = {
        "requestId": request_id,
        "status": error.status,
        "statusName": error.status_name,
        "errorMessage": str(error),
        **error.result,
    }
    return cbor2.dumps(fields) if in_cbor else msgspec.json.encode(fields)


def _encode(request_id: str, result: Result, room: int, *, in_cbor: bool) -> bytes:
    fields: dict[str, Any] = {"requestId": request_id, "status": 0, "statusName": "Success"}
    if isinstance(result, Found | Fetched) and in_cbor:
        head = cbor2.dumps(fields)
        opening = bytes((head[0] + 1,)) + head[1:] + cbor2.dumps("messages")
        if isinstance(result, Found):
            return _found_in_cbor(opening, result, room)
        return b"".join((opening, *_fetched_in_cbor(result)))
    if isinstance(result, Found):
        fields["messages"] = _for_json(result, room)
    elif isinstance(result, Fetched):
        fields["messages"] = [
            _stored(result.stream, message, deliveries) for message, deliveries in result.deliveries
        ]
    else:
        for name, attribute in zip(result.__struct_encode_fields__, result.__struct_fields__, strict=True):
            if (value := getattr(result, attribute)) is not UNSET:
                fields[name] = value
    if in_cbor:
        return cbor2.dumps(msgspec.to_builtins(fields, builtin_types=(bytes,)))
    return msgspec.json.encode(fields)


class StoredMessage(Struct, rename="camel", omit_defaults=True):
    """A message with the SDK's fields, and our topic and headers."""

    stream_name: str
    sequence_number: int
    ingest_time: int
    payload: bytes
    topic: str = ""
    headers: headers.Headers | None = None
    deliveries: int = 0  # of a consumer: how often it was delivered, including this time


def _for_json(found: Found, room: int) -> list[StoredMessage]:
    """The messages of a read that fit into a reply, for msgspec to encode."""
    each = len(found.stream) + PER_MESSAGE
    ends = list(
        accumulate(len(row.payload) + len(row.topic) + 2 * len(row.headers) + each for row in found.messages)
    )
    return [_stored(found.stream, message) for message in found.messages[: _fitting(found, ends, room)]]


def _stored(stream: str, message: StreamMessage, deliveries: int = 0) -> StoredMessage:
    return StoredMessage(
        stream,
        message.sequence_number,
        message.ingest_time,
        message.payload,
        message.topic.decode(),
        headers.decode(message.headers) if message.headers else None,
        deliveries,
    )


def _found_in_cbor(opening: bytes, found: Found, room: int) -> bytes:
    """What opens the reply, and a CBOR array of the messages that fit into `room` bytes."""
    pieces = cbor.messages(_begins(found.stream, found.messages, 5), found.messages)
    reply = b"".join((opening, *pieces))
    if len(reply) - len(opening) > room:
        fit = _fitting(found, list(accumulate(map(len, pieces)))[3::3], room)
        reply = b"".join((opening, cbor.head(4, fit), *pieces[1 : 3 * fit + 1]))
    return reply


def _fetched_in_cbor(fetched: Fetched) -> list[bytes]:
    """A CBOR array of the messages, each with its deliveries, in pieces."""
    rows = [message for message, _ in fetched.deliveries]
    counts = [deliveries for _, deliveries in fetched.deliveries]
    said = {deliveries: _DELIVERIES + cbor.head(0, deliveries) for deliveries in set(counts)}
    begins = _begins(fetched.stream, rows, 6)
    both = [begin + said[deliveries] for begin, deliveries in zip(begins, counts, strict=True)]
    return cbor.messages(both, rows)


def _begins(stream: str, rows: Sequence[StreamMessage], entries: int) -> Iterable[bytes]:
    """The head and the first entries of each message's map; repeated parts are encoded once.

    `entries` is the number of all entries of a message without headers.
    """
    names = cbor2.dumps("streamName") + cbor2.dumps(stream) + cbor2.dumps("topic")
    topics = [row.topic for row in rows]
    after = {topic: names + cbor2.dumps(topic.decode()) for topic in set(topics)}
    plain = {topic: cbor.head(5, entries) + begin for topic, begin in after.items()}
    if not any(map(_of_headers, rows)):
        return map(plain.__getitem__, topics)
    more = cbor.head(5, entries + 1)
    return [
        plain[row.topic] if not row.headers else more + after[row.topic] + _headers_in_cbor(row.headers)
        for row in rows
    ]


def _fitting(found: Found, ends: list[int], room: int) -> int:
    """Return how many messages to return, if the first n+1 take `ends[n]` bytes."""
    return max(bisect_right(ends, room), found.least)


def _headers_in_cbor(extra: bytes) -> bytes:
    decoded = msgspec.to_builtins(headers.decode(extra), builtin_types=(bytes,))
    return cbor2.dumps("headers") + cbor2.dumps(decoded)
