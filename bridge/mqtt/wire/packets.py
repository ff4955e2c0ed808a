"""The MQTT wire format as pure functions: no I/O, no state.

What it promises: any bytes are either read or raise `ProtocolError`, never anything else; nothing is
ever allocated from a length that a peer merely announced.

Layout of a packet (MQTT 3.1.1 section 2, MQTT 5 section 2):

    +--------------+----------------------+------------------------------------------+
    | type | flags | remaining length     | body                                     |
    | 4 bit| 4 bit | 1 to 4 bytes, 7 bits | strings are a 2-byte length and UTF-8;   |
    |      |       | each, low part first | MQTT 5 adds properties (`properties.py`) |
    +--------------+----------------------+------------------------------------------+
"""

from __future__ import annotations

from typing import Final, NamedTuple

from bridge.errors import StreamBridgeError
from bridge.mqtt.wire.properties import Properties, PropertyError, read_properties, varint

V31: Final = 3
V311: Final = 4
V5: Final = 5

CONNECT: Final = 0x10
CONNACK: Final = 0x20
PUBLISH: Final = 0x30
PUBACK: Final = 0x40
PUBREC: Final = 0x50
PUBREL: Final = 0x62  # its flags are fixed at 0b0010 (3.1.1 section 3.6.1)
PUBCOMP: Final = 0x70
SUBSCRIBE: Final = 0x82
SUBACK: Final = 0x90
UNSUBSCRIBE: Final = 0xA2
UNSUBACK: Final = 0xB0
PINGREQ: Final = 0xC0
PINGRESP: Final = 0xD0
DISCONNECT: Final = 0xE0
AUTH: Final = 0xF0

# An unauthenticated peer gets no more than this: two strings of the usual size, a will, properties.
MAX_CONNECT: Final = 64 * 1024
MOST_FILTERS: Final = 1_000  # of a SUBSCRIBE: a packet of 1 MiB could have 200,000, which take a second

# MQTT 5 reason codes that we use (section 2.4)
SUCCESS: Final = 0x00
NO_MATCHING_SUBSCRIBERS: Final = 0x10
NO_SUBSCRIPTION_EXISTED: Final = 0x11
UNSPECIFIED: Final = 0x80
MALFORMED: Final = 0x81
PROTOCOL_ERROR: Final = 0x82
IMPLEMENTATION_ERROR: Final = 0x83
UNSUPPORTED_VERSION: Final = 0x84
BAD_CLIENT_ID: Final = 0x85
BAD_USER_OR_PASSWORD: Final = 0x86
NOT_AUTHORIZED: Final = 0x87
SERVER_BUSY: Final = 0x89
SERVER_SHUTTING_DOWN: Final = 0x8B
BAD_AUTH_METHOD: Final = 0x8C
KEEP_ALIVE_TIMEOUT: Final = 0x8D
SESSION_TAKEN_OVER: Final = 0x8E
BAD_TOPIC_FILTER: Final = 0x8F
BAD_TOPIC_NAME: Final = 0x90
PACKET_ID_NOT_FOUND: Final = 0x92
RECEIVE_MAXIMUM_EXCEEDED: Final = 0x93
ADMINISTRATIVE_ACTION: Final = 0x98
MAXIMUM_CONNECT_TIME: Final = 0xA0
BAD_TOPIC_ALIAS: Final = 0x94
PACKET_TOO_LARGE: Final = 0x95
MESSAGE_RATE_TOO_HIGH: Final = 0x96
QUOTA_EXCEEDED: Final = 0x97

_ACK: Final = frozenset({0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99})
_RELEASE: Final = frozenset({0x00, 0x92})
# The reason codes that each packet of a server may carry, by packet type (MQTT 5 section 2.4, and the tables
# of sections 3.2.2.2, 3.4.2.1 to 3.7.2.1, 3.9.3, 3.11.3, 3.14.2.1 and 3.15.2.1). Those of
# acknowledgements hold for clients too.
REASONS: Final[dict[int, frozenset[int]]] = {
    0x20: frozenset(
        {
            0x00, 0x80, 0x81, 0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8A, 0x8C, 0x90, 0x95, 0x97,
            0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9F,
        }
    ),
    0x40: _ACK,
    0x50: _ACK,
    0x60: _RELEASE,
    0x70: _RELEASE,
    0x90: frozenset({0x00, 0x01, 0x02, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2}),
    0xB0: frozenset({0x00, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91}),
    0xE0: frozenset(
        {
            0x00, 0x80, 0x81, 0x82, 0x83, 0x87, 0x89, 0x8B, 0x8D, 0x8E, 0x8F, 0x90, 0x93, 0x94, 0x95, 0x96,
            0x97, 0x98, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9E, 0x9F, 0xA0, 0xA1, 0xA2,
        }
    ),
    0xF0: frozenset({0x00, 0x18}),
}  # fmt: skip


class ProtocolError(StreamBridgeError):
    """Raised when a peer breaks the protocol. Only its connection is closed.

    `reason` is the MQTT 5 reason code that a DISCONNECT may carry.
    """

    def __init__(self, message: str, reason: int = MALFORMED) -> None:
        super().__init__(message)
        self.reason = reason


class Will(NamedTuple):
    """The message that is published when its client leaves without DISCONNECT (3.1.1 section 3.1.2.5)."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    properties: Properties


class Connect(NamedTuple):
    """A checked CONNECT packet (section 3.1)."""

    level: int
    client_id: str
    clean: bool
    keep_alive: int
    username: str | None
    password: bytes | None
    will: Will | None
    properties: Properties
    bridge: bool = False  # another broker: see `protocol_of`


class Publish(NamedTuple):
    """A PUBLISH packet (section 3.3) with its topic, even if the client sent an alias."""

    head: int  # the first byte: QoS, RETAIN, DUP
    topic: bytes
    packet_id: bytes  # two bytes; none at QoS 0
    payload: bytes
    properties: Properties | None = None  # of MQTT 5

    @property
    def qos(self) -> int:
        """0, 1 or 2."""
        return self.head >> 1 & 3

    @property
    def number(self) -> int:
        """The packet id as a number; 0 at QoS 0."""
        return int.from_bytes(self.packet_id, "big")


class TopicRequest(NamedTuple):
    """One topic filter of a SUBSCRIBE and its options byte (MQTT 5 section 3.8.3.1)."""

    filter: str
    options: int


def string(value: bytes) -> bytes:
    """Encode a string or binary data: a 2-byte length and the bytes (section 1.5.3)."""
    return len(value).to_bytes(2, "big") + value


def packet(header: int, body: bytes) -> bytes:
    """Put a fixed header before a body."""
    return bytes((header,)) + varint(len(body)) + body


def frame(data: bytes | bytearray, pos: int, limit: int) -> tuple[int, int]:
    """Find where the packet at `pos` has its body and where it ends: (body, end).

    `end` lies beyond the data while the packet is incomplete; while even its length is, body is 0
    and `end` is one byte more than there is. A length above `limit` or of five bytes raises.
    """
    length = shift = 0
    at, size = pos + 1, len(data)
    while True:
        if at >= size:
            return 0, size + 1
        byte = data[at]
        at += 1
        length |= (byte & 0x7F) << shift
        shift += 7
        if length > limit:
            raise ProtocolError(f"a packet of {length} bytes, above the limit of {limit}", PACKET_TOO_LARGE)
        if byte < 0x80:
            return at, at + length
        if shift > 21:
            raise ProtocolError("a remaining length of more than four bytes")


def read_binary(data: bytes, pos: int, end: int) -> tuple[bytes, int]:
    """Read length-prefixed bytes. Return them and the position after them."""
    stop = pos + 2
    if stop > end:
        raise ProtocolError("a string without its length")
    stop += data[pos] << 8 | data[pos + 1]
    if stop > end:
        raise ProtocolError("a string that runs beyond its packet")
    return bytes(data[pos + 2 : stop]), stop


def read_text(data: bytes, pos: int, end: int) -> tuple[str, int]:
    """Read a UTF-8 string without NUL (3.1.1 section 1.5.3: MQTT-1.5.3-1 and -2)."""
    raw, pos = read_binary(data, pos, end)
    return text(raw), pos


def text(raw: bytes) -> str:
    """Decode a UTF-8 string of the protocol, or raise."""
    try:
        value = raw.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a string that is not UTF-8: {raw[:40]!r}") from error
    if "\0" in value:
        raise ProtocolError("a string that contains NUL")
    return value


def read_packet_id(data: bytes, pos: int, end: int) -> tuple[int, int]:
    """Read a packet identifier, which is never 0 (3.1.1 section 2.3.1)."""
    if pos + 2 > end:
        raise ProtocolError("a packet without its packet id")
    packet_id = data[pos] << 8 | data[pos + 1]
    if not packet_id:
        raise ProtocolError("packet id 0", PROTOCOL_ERROR)
    return packet_id, pos + 2


def properties_at(data: bytes, pos: int, end: int, packet_type: int) -> tuple[Properties, int]:
    """Read MQTT 5 properties that the type of packet may carry."""
    try:
        return read_properties(data, pos, end, packet_type)
    except PropertyError as error:
        raise ProtocolError(str(error), error.reason) from error


def protocol_of(body: bytes) -> tuple[int, bool, int]:
    """Read the protocol of a CONNECT (section 3.1.2): level, whether a bridge sends it, the next position.

    Brokers that act as bridges set the top bit of the level (0x83, 0x84), which no standard describes. They
    do not want their own messages back, and want the RETAIN flag as published. MQTT 5 has subscription
    options for both. An unknown level raises with reason UNSUPPORTED_VERSION.
    """
    end = len(body)
    name, pos = read_binary(body, 0, end)
    if name not in (b"MQTT", b"MQIsdp") or pos + 4 > end:
        raise ProtocolError("not an MQTT CONNECT")
    byte = body[pos]
    level, bridge = byte & 0x7F, byte > 0x7F
    if level not in ((V31,) if name == b"MQIsdp" else (V311,) if bridge else (V311, V5)):
        why = f"protocol {name.decode()} level {byte}; MQIsdp 3 (3.1), MQTT 4 (3.1.1) and 5 are served"
        raise ProtocolError(why, UNSUPPORTED_VERSION)
    return level, bridge, pos + 1


def parse_connect(body: bytes) -> Connect:
    """Check and read the body of a CONNECT (3.1, 3.1.1 and 5, section 3.1). Raises as `protocol_of`."""
    end = len(body)
    level, bridge, pos = protocol_of(body)
    flags, keep_alive = body[pos], body[pos + 1] << 8 | body[pos + 2]
    pos += 3
    has_will, will_qos, has_name, has_password = flags & 4, flags >> 3 & 3, flags & 0x80, flags & 0x40
    # MQTT 3.1 reserves no flag, and says nothing of the will's without a will: Mosquitto takes both there.
    if will_qos == 3 or (level != V31 and (flags & 1 or (not has_will and flags & 0x38))):
        raise ProtocolError(f"CONNECT flags {flags:#04x}")
    if has_password and not has_name and level != V5:
        raise ProtocolError("a password without a user name (MQTT-3.1.2-22)")
    properties: Properties = {}
    if level == V5:
        properties, pos = properties_at(body, pos, end, CONNECT)
    client_id, pos = read_text(body, pos, end)
    will: Will | None = None
    if has_will:
        will_properties: Properties = {}
        if level == V5:
            will_properties, pos = properties_at(body, pos, end, WILL)
        topic, pos = read_text(body, pos, end)
        if not topic and level != V5:  # MQTT 5 has a reason code for it
            raise ProtocolError("an empty will topic (MQTT-4.7.3-1)")
        payload, pos = read_binary(body, pos, end)
        will = Will(topic, payload, will_qos, bool(flags & 0x20), will_properties)
    username: str | None = None
    password: bytes | None = None
    if has_name:
        username, pos = read_text(body, pos, end)
    if has_password:
        password, pos = read_binary(body, pos, end)
    if pos != end:
        raise ProtocolError("bytes after the fields of the CONNECT")
    clean = bool(flags & 2)
    return Connect(level, client_id, clean, keep_alive, username, password, will, properties, bridge)


# Not a packet type: the properties of a will differ from those of its CONNECT.
WILL: Final = 0x01


def parse_subscribe(
    body: bytes, level: int, most: int = MOST_FILTERS
) -> tuple[int, list[TopicRequest], Properties]:
    """Read the body of a SUBSCRIBE (section 3.8): packet id, at most `most` requests, properties."""
    end = len(body)
    packet_id, pos = read_packet_id(body, 0, end)
    properties: Properties = {}
    if level == V5:
        properties, pos = properties_at(body, pos, end, SUBSCRIBE)
    requests: list[TopicRequest] = []
    while pos < end:
        name, pos = read_text(body, pos, end)
        if pos >= end:
            raise ProtocolError("a SUBSCRIBE that ends before its options")
        options = body[pos]
        pos += 1
        if not name:
            raise ProtocolError("an empty topic filter (MQTT-4.7.3-1)")
        reserved = 0xC0 if level == V5 else 0xFC
        if options & reserved or options & 3 == 3 or options & 0x30 == 0x30:
            raise ProtocolError(f"SUBSCRIBE options {options:#04x}")
        requests.append(TopicRequest(name, options))
        if len(requests) > most:
            raise ProtocolError(f"a SUBSCRIBE with more than {most} topic filters", QUOTA_EXCEEDED)
    if not requests:
        raise ProtocolError("a SUBSCRIBE without topic filters (MQTT-3.8.3-3)", PROTOCOL_ERROR)
    return packet_id, requests, properties


def parse_unsubscribe(body: bytes, level: int, most: int = MOST_FILTERS) -> tuple[int, list[str]]:
    """Read the body of an UNSUBSCRIBE (section 3.10): packet id and at most `most` filters."""
    end = len(body)
    packet_id, pos = read_packet_id(body, 0, end)
    if level == V5:
        _, pos = properties_at(body, pos, end, UNSUBSCRIBE)
    filters: list[str] = []
    while pos < end:
        name, pos = read_text(body, pos, end)
        if not name:
            raise ProtocolError("an empty topic filter (MQTT-4.7.3-1)")
        filters.append(name)
        if len(filters) > most:
            raise ProtocolError(f"an UNSUBSCRIBE with more than {most} topic filters", QUOTA_EXCEEDED)
    if not filters:
        raise ProtocolError("an UNSUBSCRIBE without topic filters (MQTT-3.10.3-2)", PROTOCOL_ERROR)
    return packet_id, filters


def parse_ack(header: int, body: bytes, level: int) -> tuple[int, int]:
    """Read the body of a PUBACK, PUBREC, PUBREL or PUBCOMP: packet id and reason code (section 3.4)."""
    end = len(body)
    packet_id, pos = read_packet_id(body, 0, end)
    if level != V5:
        if pos != end:
            raise ProtocolError(f"an acknowledgement {header:#04x} of {end} bytes")
        return packet_id, SUCCESS
    if pos == end:
        return packet_id, SUCCESS
    reason = body[pos]
    if reason not in REASONS[header & 0xF0]:
        raise ProtocolError(f"reason code {reason:#04x} in packet {header:#04x}", PROTOCOL_ERROR)
    if pos + 1 < end:
        _, pos = properties_at(body, pos + 1, end, header & 0xF0)
        if pos != end:
            raise ProtocolError("bytes after the properties of an acknowledgement")
    return packet_id, reason


def parse_disconnect(body: bytes, level: int) -> tuple[int, Properties]:
    """Read the body of a DISCONNECT (section 3.14): reason code and properties."""
    if not body:
        return SUCCESS, {}
    if level != V5:
        raise ProtocolError("a DISCONNECT with a body")
    properties: Properties = {}
    if len(body) > 1:
        properties, pos = properties_at(body, 1, len(body), DISCONNECT)
        if pos != len(body):
            raise ProtocolError("bytes after the properties of a DISCONNECT")
    return body[0], properties
