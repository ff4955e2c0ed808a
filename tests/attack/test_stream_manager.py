"""Attacks on the port of the Stream Manager protocol. 3 s together.

The attacker runs as root here, who needs no token; what is sent is therefore looked at.
"""

from __future__ import annotations

import struct

import cbor2
import pytest

from .conftest import Attacker, Gateway

CONNECT = {
    "protocolVersion": "1.1.0", "supportedProtocolVersions": ["1.1.0"], "sdkVersion": "1", "requestId": "1",
}  # fmt: skip


def frame(operation: int, body: bytes) -> bytes:
    return struct.pack(">ib", len(body) + 1, operation) + body


def connected(gateway: Gateway) -> Attacker:
    attacker = gateway.attack("greengrass")
    attacker.send(b"\x01" + frame(1, cbor2.dumps(CONNECT)))
    assert attacker.read(1) == b"\x01"
    reply(attacker)
    return attacker


def reply(attacker: Attacker) -> dict[str, object]:
    """The next reply; empty at the end of the connection."""
    head = attacker.read(5)
    if len(head) < 5:
        return {}
    found: dict[str, object] = cbor2.loads(attacker.read(struct.unpack(">i", head[:4])[0] - 1))
    return found


@pytest.mark.parametrize(
    "head",
    [b"\x7f\xff\xff\xff\x04", b"\xff\xff\xff\xff\x04", b"\x80\0\0\0\x04", b"\0\0\0\0", b"\0\0\0\x01\x63"],
)
def test_a_frame_of_a_false_length_or_kind_holds_no_memory(gateway: Gateway, head: bytes) -> None:
    before = gateway.memory()
    attackers = [connected(gateway) for _ in range(10)]
    for attacker in attackers:
        attacker.send(head + b"x" * 1_000)
    gateway.device.next()
    assert gateway.memory() - before < 32 << 20
    for attacker in attackers:
        attacker.close()


@pytest.mark.parametrize(
    "body",
    [
        b"\x81" * 200_000,
        b"\xa1\x61a" * 100_000,
        b"\xd8\x1c\x81\xd8\x1d\x00",  # a list that contains itself
        b"\xc2\x5a\x00\x0f\xff\xff" + b"\xff" * 0xFFFFF,  # a number of eight million bits
        b"\xbf" + b"\x61a\x00" * 200_000,  # a map that never ends
        b"\xa1\x61a\x9f" + b"\xa0" * (4 << 20),  # four million maps
        cbor2.dumps({"requestId": "2", "name": "../../../etc/passwd"}),
        cbor2.dumps({"requestId": "2", "name": "x" * 100_000}),
        cbor2.dumps({"requestId": ["2"], "name": {"a": 1}}),
    ],
)
@pytest.mark.parametrize("operation", [2, 4, 5, 13, 15])
def test_hostile_cbor_is_answered_or_ends_the_connection(
    gateway: Gateway, body: bytes, operation: int
) -> None:
    before = gateway.memory()
    attacker = connected(gateway)
    attacker.send(frame(operation, body))
    answer = reply(attacker)
    assert not answer or answer["status"] != 0, answer
    assert gateway.memory() - before < 64 << 20
    attacker.close()


def test_who_never_reads_replies_is_given_no_memory_for_them(gateway: Gateway) -> None:
    before = gateway.memory()
    attacker = connected(gateway)
    options = {"minMessageCount": 1, "maxMessageCount": 10_000}
    request = cbor2.dumps({"requestId": "r", "streamName": "readings", "readMessagesOptions": options})
    attacker.socket.settimeout(2)
    sent = 0
    try:
        while sent < 200_000:
            attacker.socket.sendall(frame(5, request))
            sent += 1
    except OSError:  # the gateway reads no further
        pass
    gateway.device.next()
    assert gateway.memory() - before < 96 << 20
    attacker.close()
