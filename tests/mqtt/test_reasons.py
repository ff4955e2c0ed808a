"""Reason codes: no packet carries one that the standard does not allow there.

Beside these tests, every packet that any test receives over MQTT 5 is checked against the standard's table
(`harness.illegal_reasons`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridge import errors
from bridge.mqtt.broker.inbox import reason_of
from bridge.mqtt.wire import answers
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5

from .harness import PACKET_TYPES, REASON_CODES, Bridge, Packet, bridge_test, illegal_reasons, publish


def made(head: int, reason: int) -> bytes:
    """What the server sends in a packet of this type for this reason."""
    match PACKET_TYPES[head]:
        case "CONNACK":
            return answers.connack(V5, reason)
        case "SUBACK":
            return answers.suback(V5, 1, [reason])
        case "UNSUBACK":
            return answers.unsuback(V5, 1, [reason])
        case "DISCONNECT":
            return answers.disconnect(reason)
    return answers.ack(head, b"\0\1", reason)


@pytest.mark.parametrize("name", [name for name in PACKET_TYPES.values() if name != "AUTH"])
def test_each_packet_is_made_with_the_reason_codes_of_the_standard_and_no_others(name: str) -> None:
    head = next(head for head, other in PACKET_TYPES.items() if other == name)
    allowed = {code for code, names in REASON_CODES.items() if name in names.split()}
    for reason in range(256):
        if reason in allowed:
            raw = made(head, reason)
            assert not illegal_reasons(Packet(raw[0], raw[2:])), raw
        else:
            with pytest.raises(ValueError, match="reason code"):
                made(head, reason)


def every_error(kind: type[errors.StreamBridgeError]) -> Iterator[type[errors.StreamBridgeError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from every_error(below)


def test_every_error_has_a_reason_that_an_acknowledgement_and_a_disconnect_may_carry() -> None:
    for kind in every_error(errors.StreamBridgeError):
        reason = reason_of(kind.__new__(kind, "why"))[1]
        for name in ("PUBACK", "PUBREC", "DISCONNECT"):
            assert name in REASON_CODES[reason].split(), (kind, reason)


@bridge_test
async def test_refused_messages_are_answered_with_codes_that_an_acknowledgement_may_carry(
    bridge: Bridge,
) -> None:
    bridge.stream("small", "small", max_size=4096, stream_segment_size=2048)
    client = await bridge.open()
    await client.connect("c", level=V5)
    found = []
    for topic, size in (("small", 5000), ("streams/typo", 1), ("$SYS/x", 1)):
        for qos, head in ((1, 0x40), (2, 0x50)):
            answer = await client.exchange(publish(topic, b"x" * size, qos, qos, level=V5))
            assert answer.head == head
            found.append(answer.body[2])
    assert found == [0x97, 0x97, 0x90, 0x90, 0x87, 0x87]
    assert await client.alive()


@bridge_test
async def test_a_client_that_sends_a_reason_code_out_of_place_breaks_the_protocol(bridge: Bridge) -> None:
    for head, reason in ((0x40, 0x95), (0x50, 0x81), (0x62, 0x80), (0x70, 0x10)):
        client = await bridge.open()
        await client.connect("c", level=V5, properties={p.SESSION_EXPIRY: 0})
        answer = await client.exchange(bytes((head, 3, 0, 1, reason)))
        assert answer == Packet(0xE0, b"\x82\0"), (head, reason)
        assert await client.closed()
