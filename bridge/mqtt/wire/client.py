"""What a client sends to a server, and what a server may send to it (MQTT 3.1.1 and 5).

What it promises: every packet that the standard lets a server send is read. Any other raises `ProtocolError`,
whose text says what is wrong with it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import (
    AUTH,
    BAD_TOPIC_ALIAS,
    CONNACK,
    CONNECT,
    DISCONNECT,
    PINGRESP,
    PROTOCOL_ERROR,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    REASONS,
    SUBACK,
    SUBSCRIBE,
    SUCCESS,
    UNSUBACK,
    UNSUBSCRIBE,
    UNSUPPORTED_VERSION,
    V5,
    V311,
    ProtocolError,
    Publish,
    packet,
    properties_at,
    read_packet_id,
    string,
    text,
)

LARGEST: Final = 268_435_455  # bytes of a packet behind its fixed header (2.1.4 of MQTT 5, 2.2.3 of 3.1.1)
BRIDGE: Final = 0x80  # added to a level: see `packets.protocol_of`
_KNOWN: Final = frozenset((PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK, PINGRESP))
_NAMES: Final = (
    "packet type 0", "CONNECT", "CONNACK", "PUBLISH", "PUBACK", "PUBREC", "PUBREL", "PUBCOMP", "SUBSCRIBE",
    "SUBACK", "UNSUBSCRIBE", "UNSUBACK", "PINGREQ", "PINGRESP", "DISCONNECT", "AUTH",
)  # fmt: skip
# Return codes of a 3.1.1 CONNACK (section 3.2.2.3) as reason codes of MQTT 5
_RETURN_CODES: Final = (SUCCESS, 0x84, 0x85, 0x88, 0x86, 0x87)


class Connack(NamedTuple):
    """A CONNACK (section 3.2): session present, a reason code of MQTT 5, properties."""

    present: bool
    reason: int
    properties: p.Properties


def connect(
    level: int,
    client_id: str,
    keep_alive: int,
    username: str | None = None,
    password: str | None = None,
    properties: p.Properties | None = None,
) -> bytes:
    """CONNECT (section 3.1) that goes on with a session. `level` may have `BRIDGE` in it."""
    v5 = level == V5
    flags = (0x80 if username is not None else 0) | (0x40 if password is not None else 0)
    body = string(b"MQTT") + bytes((level, flags)) + keep_alive.to_bytes(2, "big")
    body += p.write_properties(properties or {}) if v5 else b""
    body += b"".join(string(one.encode()) for one in (client_id, username, password) if one is not None)
    return packet(CONNECT, body)


def subscribe(level: int, packet_id: int, topic_filter: str, options: int) -> bytes:
    """SUBSCRIBE to one filter (section 3.8)."""
    head = packet_id.to_bytes(2, "big") + (b"\0" if level == V5 else b"")
    return packet(SUBSCRIBE, head + string(topic_filter.encode()) + bytes((options,)))


def unsubscribe(level: int, packet_id: int, topic_filter: str) -> bytes:
    """UNSUBSCRIBE from one filter (section 3.10)."""
    head = packet_id.to_bytes(2, "big") + (b"\0" if level == V5 else b"")
    return packet(UNSUBSCRIBE, head + string(topic_filter.encode()))


def publish(
    level: int, topic: str, payload: bytes, packet_id: int = 0, properties: p.Properties | None = None
) -> bytes:
    """PUBLISH (section 3.3) of QoS 1, or of QoS 0 without a packet id."""
    body = string(topic.encode()) + (packet_id.to_bytes(2, "big") if packet_id else b"")
    body += p.write_properties(properties or {}) if level == V5 else b""
    return packet(PUBLISH | (2 if packet_id else 0), body + payload)


def name_of(head: int) -> str:
    """What a packet with this first byte is called."""
    return _NAMES[head >> 4]


def check_head(head: int, level: int) -> None:
    """Raise ProtocolError if a server may not send a packet with this first byte behind its CONNACK."""
    if head & 0xF0 == PUBLISH:
        if head & 6 == 6:
            raise ProtocolError("a PUBLISH of QoS 3 (MQTT-3.3.1-4)")
        if head & 14 == 8:
            raise ProtocolError("a PUBLISH of QoS 0 with DUP (MQTT-3.3.1-2)")
    elif head == CONNACK:
        raise ProtocolError("a second CONNACK", PROTOCOL_ERROR)
    elif head == AUTH and level == V5:
        raise ProtocolError("an AUTH, which was not asked for (MQTT-4.12.0-1)", PROTOCOL_ERROR)
    elif head not in _KNOWN and not (head == DISCONNECT and level == V5):
        if any(head & 0xF0 == one & 0xF0 for one in _KNOWN) or (head & 0xF0 == DISCONNECT and level == V5):
            raise ProtocolError(f"a {name_of(head)} with the flags {head & 15:#06b} (MQTT-2.2.2-2)")
        raise ProtocolError(f"a {name_of(head)}, which a server may not send", PROTOCOL_ERROR)


def read_publish(head: int, body: bytes, level: int) -> Publish:
    """Read a PUBLISH (section 3.3)."""
    end = len(body)
    start = 2 + int.from_bytes(body[:2], "big")
    if end < 2 or start > end:
        raise ProtocolError("a PUBLISH with a topic that runs beyond it")
    topic = body[2:start]
    name = text(topic)
    if "+" in name or "#" in name:
        raise ProtocolError(f"a PUBLISH on {name[:200]!r}, which has a wildcard (MQTT-3.3.2-2)", 0x90)
    packet_id = b""
    if head & 6:
        packet_id = body[start : start + 2]
        _, start = read_packet_id(body, start, end)
    properties: p.Properties = {}
    if level == V5:
        properties, start = properties_at(body, start, end, PUBLISH)
    if p.TOPIC_ALIAS in properties:
        raise ProtocolError("a PUBLISH with a topic alias; none was allowed (MQTT-3.1.2-27)", BAD_TOPIC_ALIAS)
    if not topic:
        raise ProtocolError("a PUBLISH without a topic (MQTT-4.7.3-1)", PROTOCOL_ERROR)
    reply = properties.get(p.RESPONSE_TOPIC)
    if reply is not None and (not reply or b"+" in reply or b"#" in reply):
        raise ProtocolError("a PUBLISH whose Response Topic is no topic (MQTT-3.3.2-14)", PROTOCOL_ERROR)
    kept = {kind: value for kind, value in properties.items() if kind in p.MESSAGE}
    return Publish(head, topic, packet_id, body[start:], kept or None)


def read_connack(body: bytes, level: int) -> Connack:
    """Read a CONNACK (section 3.2). A server that answers MQTT 5 as 3.1.1 does refuses it."""
    if len(body) < 2 or body[0] > 1:
        raise ProtocolError("a CONNACK without its flags and code, or with reserved flags (MQTT-3.2.2-1)")
    present, code = bool(body[0]), body[1]
    properties: p.Properties = {}
    if len(body) == 2 and level == V5:
        return Connack(False, UNSUPPORTED_VERSION, {})
    if len(body) == 2:
        if code >= len(_RETURN_CODES):
            raise ProtocolError(f"a CONNACK with the reserved return code {code}")
        code = _RETURN_CODES[code]
    elif level != V5 or code not in REASONS[CONNACK]:
        raise ProtocolError(f"a CONNACK of {len(body)} bytes with the code {code:#04x}", PROTOCOL_ERROR)
    else:
        properties, end = properties_at(body, 2, len(body), CONNACK)
        if end != len(body):
            raise ProtocolError("bytes after the properties of a CONNACK")
    if present and code:
        raise ProtocolError("a CONNACK that refuses, with a session (MQTT-3.2.2-6)", PROTOCOL_ERROR)
    return Connack(present, code, properties)


def read_suback(kind: int, body: bytes, level: int) -> tuple[int, int]:
    """Read a SUBACK or UNSUBACK for one filter (sections 3.9, 3.11): packet id and code.

    An UNSUBACK of 3.1.1 has no code; it counts as 0.
    """
    end = len(body)
    packet_id, start = read_packet_id(body, 0, end)
    if level == V5:
        _, start = properties_at(body, start, end, kind)
    elif kind == UNSUBACK:
        if start != end:
            raise ProtocolError(f"an UNSUBACK of {end} bytes")
        return packet_id, SUCCESS
    if end - start != 1:
        raise ProtocolError(f"{end - start} codes for one filter (MQTT-3.8.4-5)", PROTOCOL_ERROR)
    allowed = REASONS[kind] if level == V5 else (0, 1, 2, 0x80)
    if body[start] not in allowed:
        raise ProtocolError(f"a {name_of(kind)} with the reserved code {body[start]:#04x}", PROTOCOL_ERROR)
    return packet_id, body[start]


def read_disconnect(body: bytes) -> int:
    """Read a DISCONNECT of a server (MQTT 5 section 3.14): its reason code."""
    reason = body[0] if body else SUCCESS
    if reason not in REASONS[DISCONNECT]:
        raise ProtocolError(f"a DISCONNECT with the reason code {reason:#04x}", PROTOCOL_ERROR)
    if len(body) > 1 and properties_at(body, 1, len(body), p.LEFT_BY_SERVER)[1] != len(body):
        raise ProtocolError("bytes after the properties of a DISCONNECT")
    return reason


def level_of(protocol: int) -> int:
    """The level of a protocol byte of CONNECT: without `BRIDGE`."""
    return V311 if protocol & BRIDGE else protocol
