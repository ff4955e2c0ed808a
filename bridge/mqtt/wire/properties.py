"""MQTT 5 properties: reading, checking and writing (MQTT 5 section 2.2.2).

Layout: a variable byte integer with the length of what follows, then one identifier byte per
property and its value, whose kind the identifier fixes. A property that its packet may not carry, or
that occurs twice, is an error; only User Property and (in PUBLISH) Subscription Identifier repeat.

A set of properties is a dict from identifier to value: int, bytes (strings stay UTF-8 encoded, for
they are mostly passed on), and lists for the two that repeat.
"""

from __future__ import annotations

from typing import Any, Final

Properties = dict[int, Any]

PAYLOAD_FORMAT: Final = 0x01
MESSAGE_EXPIRY: Final = 0x02
CONTENT_TYPE: Final = 0x03
RESPONSE_TOPIC: Final = 0x08
CORRELATION_DATA: Final = 0x09
SUBSCRIPTION_ID: Final = 0x0B
SESSION_EXPIRY: Final = 0x11
ASSIGNED_CLIENT_ID: Final = 0x12
SERVER_KEEP_ALIVE: Final = 0x13
AUTH_METHOD: Final = 0x15
AUTH_DATA: Final = 0x16
REQUEST_PROBLEM_INFO: Final = 0x17
WILL_DELAY: Final = 0x18
REQUEST_RESPONSE_INFO: Final = 0x19
RESPONSE_INFO: Final = 0x1A
SERVER_REFERENCE: Final = 0x1C
REASON_STRING: Final = 0x1F
RECEIVE_MAXIMUM: Final = 0x21
TOPIC_ALIAS_MAXIMUM: Final = 0x22
TOPIC_ALIAS: Final = 0x23
MAXIMUM_QOS: Final = 0x24
RETAIN_AVAILABLE: Final = 0x25
USER_PROPERTY: Final = 0x26
MAXIMUM_PACKET_SIZE: Final = 0x27
WILDCARDS_AVAILABLE: Final = 0x28
SUBSCRIPTION_IDS_AVAILABLE: Final = 0x29
SHARED_AVAILABLE: Final = 0x2A

_INT_SIZES: Final = {
    PAYLOAD_FORMAT: 1, MESSAGE_EXPIRY: 4, SESSION_EXPIRY: 4, SERVER_KEEP_ALIVE: 2, REQUEST_PROBLEM_INFO: 1,
    WILL_DELAY: 4, REQUEST_RESPONSE_INFO: 1, RECEIVE_MAXIMUM: 2, TOPIC_ALIAS_MAXIMUM: 2, TOPIC_ALIAS: 2,
    MAXIMUM_QOS: 1, RETAIN_AVAILABLE: 1, MAXIMUM_PACKET_SIZE: 4, WILDCARDS_AVAILABLE: 1,
    SUBSCRIPTION_IDS_AVAILABLE: 1, SHARED_AVAILABLE: 1,
}  # fmt: skip
_STRINGS: Final = frozenset(
    {
        CONTENT_TYPE, RESPONSE_TOPIC, ASSIGNED_CLIENT_ID, AUTH_METHOD, REASON_STRING, RESPONSE_INFO,
        SERVER_REFERENCE,
    }
)  # fmt: skip
_BINARIES: Final = frozenset({CORRELATION_DATA, AUTH_DATA})
_FLAGS: Final = frozenset(
    {
        PAYLOAD_FORMAT, REQUEST_PROBLEM_INFO, REQUEST_RESPONSE_INFO, MAXIMUM_QOS, RETAIN_AVAILABLE,
        WILDCARDS_AVAILABLE, SUBSCRIPTION_IDS_AVAILABLE, SHARED_AVAILABLE,
    }
)  # fmt: skip
_NEVER_ZERO: Final = frozenset({RECEIVE_MAXIMUM, MAXIMUM_PACKET_SIZE})

# Properties that go to the subscribers with a message (section 3.3.2.3, "MUST send unaltered").
MESSAGE: Final = frozenset(
    {PAYLOAD_FORMAT, MESSAGE_EXPIRY, CONTENT_TYPE, RESPONSE_TOPIC, CORRELATION_DATA, USER_PROPERTY}
)
_ANSWER: Final = frozenset({REASON_STRING, USER_PROPERTY})
LEFT_BY_SERVER: Final = 0x02  # not a packet type: a DISCONNECT from a server
# Properties by packet type (the type byte with flags cleared; a will is 0x01).
_ALLOWED: Final[dict[int, frozenset[int]]] = {
    0x01: MESSAGE | {WILL_DELAY},
    LEFT_BY_SERVER: _ANSWER | {SERVER_REFERENCE},
    0x20: _ANSWER | frozenset(
        {
            SESSION_EXPIRY, RECEIVE_MAXIMUM, MAXIMUM_QOS, RETAIN_AVAILABLE, MAXIMUM_PACKET_SIZE,
            ASSIGNED_CLIENT_ID, TOPIC_ALIAS_MAXIMUM, WILDCARDS_AVAILABLE, SUBSCRIPTION_IDS_AVAILABLE,
            SHARED_AVAILABLE, SERVER_KEEP_ALIVE, RESPONSE_INFO, SERVER_REFERENCE, AUTH_METHOD, AUTH_DATA,
        }
    ),
    0x10: frozenset(
        {
            SESSION_EXPIRY, RECEIVE_MAXIMUM, MAXIMUM_PACKET_SIZE, TOPIC_ALIAS_MAXIMUM, REQUEST_RESPONSE_INFO,
            REQUEST_PROBLEM_INFO, USER_PROPERTY, AUTH_METHOD, AUTH_DATA,
        }
    ),
    0x30: MESSAGE | {TOPIC_ALIAS, SUBSCRIPTION_ID},
    0x40: _ANSWER, 0x50: _ANSWER, 0x60: _ANSWER, 0x70: _ANSWER,
    0x80: frozenset({SUBSCRIPTION_ID, USER_PROPERTY}), 0x90: _ANSWER,
    0xA0: frozenset({USER_PROPERTY}), 0xB0: _ANSWER,
    0xE0: _ANSWER | {SESSION_EXPIRY},
}  # fmt: skip
# User properties of a packet: a packet of 1 MiB could have 200,000, which take 0.2 s to read.
MOST_PAIRS: Final = 1_000


class PropertyError(ValueError):
    """Raised for properties that are malformed (0x81), twice or of a wrong value (0x82), too many (0x97)."""

    def __init__(self, message: str, reason: int = 0x81) -> None:
        super().__init__(message)
        self.reason = reason


def varint(value: int) -> bytes:
    """Encode a variable byte integer (section 2.2.3 of 3.1.1, 1.5.5 of MQTT 5)."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, pos: int, end: int) -> tuple[int, int]:
    """Read a variable byte integer of at most four bytes (section 1.5.5)."""
    value = shift = 0
    while True:
        if pos >= end or shift > 21:
            raise PropertyError("a variable byte integer that does not end")
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos
        shift += 7


def read_properties(data: bytes, pos: int, end: int, packet_type: int) -> tuple[Properties, int]:
    """Read the properties at `pos`. Return them and the position after them."""
    length, pos = read_varint(data, pos, end)
    if not length:
        return {}, pos
    stop = pos + length
    if stop > end:
        raise PropertyError("properties that run beyond their packet")
    allowed = _ALLOWED[packet_type & 0xF0 or packet_type]
    found: Properties = {}
    while pos < stop:
        kind = data[pos]
        if kind not in allowed:
            raise PropertyError(f"property {kind:#04x} where it is not allowed")  # malformed: section 2.2.2.2
        value, pos = _read_value(data, kind, pos + 1, stop)
        if kind == USER_PROPERTY or (kind == SUBSCRIPTION_ID and packet_type & 0xF0 == 0x30):
            values = found.setdefault(kind, [])
            values.append(value)
            if len(values) > MOST_PAIRS:
                raise PropertyError(f"more than {MOST_PAIRS} times property {kind:#04x}", 0x97)
        elif kind in found:
            raise PropertyError(f"property {kind:#04x} twice", 0x82)
        else:
            found[kind] = value
    return found, pos


def _read_value(data: bytes, kind: int, pos: int, stop: int) -> tuple[Any, int]:
    if size := _INT_SIZES.get(kind):
        if pos + size > stop:
            raise PropertyError(f"property {kind:#04x} cut short")
        number = int.from_bytes(data[pos : pos + size], "big")
        if (kind in _FLAGS and number > 1) or (kind in _NEVER_ZERO and not number):
            raise PropertyError(f"property {kind:#04x} of value {number}", 0x82)
        return number, pos + size
    if kind == SUBSCRIPTION_ID:
        number, pos = read_varint(data, pos, stop)
        if not number:
            raise PropertyError("subscription identifier 0", 0x82)
        return number, pos
    if kind == USER_PROPERTY:
        name, pos = _read_bytes(data, pos, stop, is_text=True)
        value, pos = _read_bytes(data, pos, stop, is_text=True)
        return (name, value), pos
    return _read_bytes(data, pos, stop, is_text=kind in _STRINGS)


def _read_bytes(data: bytes, pos: int, stop: int, *, is_text: bool) -> tuple[bytes, int]:
    begin = pos + 2
    if begin > stop:
        raise PropertyError("a property cut short")
    pos = begin + (data[pos] << 8 | data[pos + 1])
    if pos > stop:
        raise PropertyError("a property that runs beyond the others")
    value = bytes(data[begin:pos])
    if is_text:
        try:
            value.decode()
        except UnicodeDecodeError as error:
            raise PropertyError("a property that is not UTF-8") from error
        if 0 in value:
            raise PropertyError("a property that contains NUL")
    return value, pos


def write_properties(properties: Properties) -> bytes:
    """Encode properties, their length first."""
    if not properties:
        return b"\0"
    out = bytearray()
    for kind, value in properties.items():
        if size := _INT_SIZES.get(kind):
            out.append(kind)
            out += value.to_bytes(size, "big")
        elif kind == USER_PROPERTY:
            for name, content in value:
                out.append(kind)
                out += len(name).to_bytes(2, "big") + name + len(content).to_bytes(2, "big") + content
        elif kind == SUBSCRIPTION_ID:
            for number in value if isinstance(value, list) else (value,):
                out.append(kind)
                out += varint(number)
        elif kind in _STRINGS or kind in _BINARIES:
            out.append(kind)
            out += len(value).to_bytes(2, "big") + value
    return varint(len(out)) + bytes(out)
