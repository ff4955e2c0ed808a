"""Frames and replies of the Stream Manager protocol. Pure functions over bytes, no sockets.

    connection  = version byte 0x01, then frames, in either direction
    frame       = length i32 big-endian (of what follows) | operation i8 | body: one CBOR map

The first frame of a client is Connect. Every request has a `requestId`, and its reply repeats it with a
`status`. Enumerations are sent as numbers. A reply never contains null, and only keys and numbers that the
SDK of the negotiated protocol version knows: an unknown one stops the reader in the SDK, and every later call
of that client hangs.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import repeat
from typing import TYPE_CHECKING, Any

import cbor2

from bridge import cbor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.streams.segment import StreamMessage

CONNECT_VERSION = 1
VERSIONS = ("1.1.0", "1.0.0")  # of the protocol, the preferred one first
HEADER = 5
LARGEST_LEGAL = 1 << 30  # what the SDKs allow a frame to announce


class Op(IntEnum):
    """The operations that a client may request."""

    CONNECT = 1
    CREATE = 2
    DELETE = 3
    APPEND = 4
    READ = 5
    LIST = 11
    DESCRIBE = 13
    UPDATE = 15


CONNECT_RESPONSE = 6
UNKNOWN_OPERATION_ERROR = 17
REPLY_TO = {
    Op.CONNECT: CONNECT_RESPONSE, Op.CREATE: 7, Op.DELETE: 8, Op.APPEND: 9, Op.READ: 10,
    Op.LIST: 12, Op.DESCRIBE: 14, Op.UPDATE: 16,
}  # fmt: skip


class ResponseStatus(IntEnum):
    """The statuses that the protocol itself needs; errors have their own."""

    SUCCESS = 0
    UNKNOWN_FAILURE = 1
    UNAUTHORIZED = 2
    INVALID_REQUEST = 3
    REQUEST_TOO_LARGE = 4
    RESPONSE_TOO_LARGE = 7
    UNSUPPORTED_CONNECT_VERSION = 8
    UNEXPECTED_OPERATION = 9
    UNSUPPORTED_PROTOCOL_VERSION = 10
    INVALID_PROTOCOL_VERSION = 11
    NOT_ENOUGH_MESSAGES = 13
    UNKNOWN_OPERATION = 18


# Statuses that protocol 1.1.0 has introduced, and those that a client of 1.0.0 gets instead.
_FOR_OLD = {15: 1, 16: 1, 17: 3, 18: 1}


def frame(op: int, body: bytes) -> bytes:
    """A whole frame in one piece: the Python SDK misreads a length that arrives in two."""
    return (len(body) + 1).to_bytes(4, "big") + bytes((op,)) + body


def reply(op: Op, request_id: str, result: dict[str, Any]) -> bytes:
    """The frame of a successful reply."""
    return frame(REPLY_TO[op], cbor2.dumps({"requestId": request_id, "status": 0, **result}))


def failure(op: int, request_id: str, status: int, text: str, version: str = VERSIONS[0]) -> bytes:
    """The frame of an error reply; an unknown operation has a reply of its own."""
    if version == "1.0.0":
        status = _FOR_OLD.get(status, status)
    to = REPLY_TO[Op(op)] if op in REPLY_TO else UNKNOWN_OPERATION_ERROR
    return frame(to, cbor2.dumps({"requestId": request_id, "status": status, "errorMessage": text}))


_APPENDED = cbor2.dumps("status") + b"\0" + cbor2.dumps("sequenceNumber")
_REQUEST_ID = cbor2.dumps("requestId")


def appended(request_id: str, number: int) -> bytes:
    """The reply to an append; like `reply`, but faster, since each message has one."""
    text = request_id.encode()
    body = b"".join((b"\xa3", _REQUEST_ID, cbor.head(3, len(text)), text, _APPENDED, cbor.head(0, number)))
    return (len(body) + 1).to_bytes(4, "big") + b"\x09" + body


def read(request_id: str, stream: str, messages: Sequence[StreamMessage]) -> bytearray:
    """The reply to a read."""
    opening = cbor2.dumps({"requestId": request_id, "status": 0})
    begin = b"\xa4" + cbor2.dumps("streamName") + cbor2.dumps(stream)
    pieces = cbor.messages(repeat(begin), messages)
    pieces[0] = bytes(4) + b"\x0a\xa3" + opening[1:] + cbor2.dumps("messages") + pieces[0]
    frame = bytearray().join(pieces)
    frame[:4] = (len(frame) - 4).to_bytes(4, "big")  # adding up the pieces before takes longer
    return frame
