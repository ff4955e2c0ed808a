"""The packets that carry a reason code to a client: the only place that makes them.

What it promises: no client gets a reason code that the standard does not allow in that packet. A client that
gets one closes the connection, connects again, and sends the same message again. The table is
`packets.REASONS`; a code that is not in it raises ValueError here, before anything is sent.

MQTT 3.1 and 3.1.1 have return codes in CONNACK (section 3.2.2.3), one failure code in SUBACK (3.9.3), and
none anywhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bridge.mqtt.wire.packets import (
    BAD_CLIENT_ID,
    BAD_TOPIC_NAME,
    BAD_USER_OR_PASSWORD,
    CONNACK,
    DISCONNECT,
    NOT_AUTHORIZED,
    QUOTA_EXCEEDED,
    REASONS,
    SERVER_BUSY,
    SUBACK,
    SUCCESS,
    UNSPECIFIED,
    UNSUBACK,
    UNSUPPORTED_VERSION,
    V5,
    V311,
    packet,
)
from bridge.mqtt.wire.properties import Properties, write_properties

if TYPE_CHECKING:
    from collections.abc import Iterable

# MQTT 5 reason code to the return code of a 3.1.1 CONNACK (section 3.2.2.3); all others are 5, not authorized
_RETURN_CODES: Final = {
    SUCCESS: 0, UNSUPPORTED_VERSION: 1, BAD_CLIENT_ID: 2, SERVER_BUSY: 3, BAD_USER_OR_PASSWORD: 4,
    NOT_AUTHORIZED: 5, BAD_TOPIC_NAME: 5, QUOTA_EXCEEDED: 3,
}  # fmt: skip


def _checked(kind: int, reason: int) -> int:
    if reason not in REASONS[kind & 0xF0]:
        raise ValueError(f"reason code {reason:#04x} is not allowed in packet type {kind:#04x}")
    return reason


def ack(kind: int, packet_id: bytes, reason: int = SUCCESS, properties: Properties | None = None) -> bytes:
    """PUBACK, PUBREC, PUBREL or PUBCOMP (MQTT 5 sections 3.4 to 3.7).

    A reason but SUCCESS, and properties, are MQTT 5 only.
    """
    if properties:
        return packet(kind, packet_id + bytes((_checked(kind, reason),)) + write_properties(properties))
    if _checked(kind, reason):
        return bytes((kind, 3)) + packet_id + bytes((reason,))
    return bytes((kind, 2)) + packet_id


def connack(level: int, reason: int, *, present: bool = False, properties: Properties | None = None) -> bytes:
    """CONNACK (section 3.2). MQTT 3.1 has no Session Present flag."""
    _checked(CONNACK, reason)
    if level == V5:
        return packet(CONNACK, bytes((present, reason)) + write_properties(properties or {}))
    return packet(CONNACK, bytes((present and level == V311, _RETURN_CODES.get(reason, 5))))


def suback(level: int, packet_id: int, codes: Iterable[int]) -> bytes:
    """SUBACK (section 3.9): for each filter the QoS granted or the reason of the refusal."""
    found = [_checked(SUBACK, code) for code in codes]
    number = packet_id.to_bytes(2, "big")
    if level == V5:
        return packet(SUBACK, number + b"\0" + bytes(found))
    return packet(SUBACK, number + bytes(min(code, UNSPECIFIED) for code in found))


def unsuback(level: int, packet_id: int, codes: Iterable[int]) -> bytes:
    """UNSUBACK (section 3.11). Only MQTT 5 has a result for each filter."""
    found = bytes(_checked(UNSUBACK, code) for code in codes)
    return packet(UNSUBACK, packet_id.to_bytes(2, "big") + (b"\0" + found if level == V5 else b""))


def disconnect(reason: int, properties: Properties | None = None) -> bytes:
    """DISCONNECT, which a server sends only in MQTT 5 (section 3.14)."""
    return packet(DISCONNECT, bytes((_checked(DISCONNECT, reason),)) + write_properties(properties or {}))
