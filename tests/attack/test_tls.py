"""Attacks below the protocols: handshakes that stop half-way by the thousand. 5 s together."""

from __future__ import annotations

import ssl
from contextlib import suppress

import psutil
import pytest

from ..http.conftest import eventually
from .conftest import Attacker, Gateway
from .test_floods import hello


def test_handshakes_that_never_end_leave_no_memory_behind(gateway: Gateway) -> None:
    """Each left 50 KB until the next collection of garbage: 10,000 took 340 MB, above any limit of ours."""
    said, port = hello(), gateway.port["mqtts"]
    process = psutil.Process(gateway.process.pid)

    def accepted() -> int:
        return sum(one.laddr.port == port and one.status != "LISTEN" for one in process.net_connections())

    def flood() -> None:
        attackers = [Attacker(port) for _ in range(800)]
        for attacker in attackers:
            attacker.send(said)
        for attacker in attackers:
            attacker.read(1)  # its half of the handshake is done, or it is displaced
        for attacker in attackers:
            attacker.close()
        eventually(lambda: not accepted())

    flood()
    before = gateway.memory()
    for _ in range(4):
        flood()
    assert gateway.memory() - before < 64 << 20


def records(message: bytes, size: int) -> bytes:
    """A handshake message in records of this size."""
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\3\1" + len(piece).to_bytes(2, "big") + piece for piece in pieces)


ANNOUNCED = b"\1\1\xff\0\3\3" + b"r" * 32  # 128 KB, of which 38 bytes are here


@pytest.mark.parametrize(
    "said", [records(ANNOUNCED, 1_000), b"\x14\3\3\0\1\1" * 2 + records(ANNOUNCED, 10), records(ANNOUNCED, 1)]
)
def test_a_hello_that_announces_much_reserves_no_memory(gateway: Gateway, said: bytes) -> None:
    """OpenSSL reserved the 128 KB, and 1,000 connections of 44 bytes took 180 MB."""
    attackers = [Attacker(gateway.port["mqtts"]) for _ in range(300)]
    before = gateway.memory()
    for attacker in attackers:
        attacker.send(said)
    for attacker in attackers:
        assert attacker.rest() == b""
        attacker.close()
    assert gateway.memory() - before < 16 << 20
    gateway.device.next()


def without_key_share(said: bytes) -> bytes:
    """A ClientHello whose key_share (RFC 8446 section 4.2.8) is empty, which asks for a HelloRetryRequest."""

    def after(at: int, width: int) -> int:
        """The end of what has a length of so many bytes there."""
        return at + width + int.from_bytes(said[at : at + width], "big")

    at = extensions = after(after(after(9 + 34, 1), 2), 1)  # behind session id, cipher suites, compression
    found, at = b"", at + 2
    while at < len(said):
        end = after(at + 2, 2)
        found += b"\0\x33\0\2\0\0" if said[at : at + 2] == b"\0\x33" else said[at:end]
        at = end
    message = said[9:extensions] + len(found).to_bytes(2, "big") + found
    return records(b"\1" + len(message).to_bytes(3, "big") + message, 16_384)


def test_a_second_hello_is_looked_at_like_the_first(gateway: Gateway) -> None:
    attacker = Attacker(gateway.port["mqtts"])
    attacker.send(without_key_share(hello()))
    assert attacker.read(6)[5] == 2, "a HelloRetryRequest is a ServerHello"
    attacker.send(b"\x14\3\3\0\1\1" + records(ANNOUNCED, 1_000))
    attacker.rest()
    eventually(lambda: "client hello too large" in gateway.log())
    attacker.close()


@pytest.mark.parametrize("size", [5, 200, 16_384])
def test_a_hello_in_a_few_records_and_byte_by_byte_comes_through(gateway: Gateway, size: int) -> None:
    context, said, heard = ssl.create_default_context(), ssl.MemoryBIO(), ssl.MemoryBIO()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = context.wrap_bio(heard, said)
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    message = said.read()[5:]
    attacker = Attacker(gateway.port["mqtts"])
    for byte in records(message, max(size, -(-len(message) // 8))):
        attacker.send(bytes((byte,)))
    for _ in range(100):
        heard.write(attacker.socket.recv(65_536))
        with suppress(ssl.SSLWantReadError):
            client.do_handshake()
            break
    attacker.send(said.read())
    assert client.version() == "TLSv1.3"
    attacker.close()
