"""Why a connection is closed reaches its client, also one that is slow to read, or that goes on sending."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from pathlib import Path

import pytest

from benchmarks.testbed.certificates import Authority
from bridge.mqtt.settings import TlsSettings
from bridge.mqtt.wire.packets import V5, V31, V311, packet

from .harness import (
    DEADLINE,
    Bridge,
    Client,
    ack,
    bridge_test,
    connect,
    publish,
    run_async,
    running,
    subscribe,
    until,
)
from .test_websocket import frame, http

SCHEMES = ["tcp", "tls", "ws", "wss"]
SLOWER = 2.5  # seconds for which a client reads nothing: more than the silence after which we close


class Slow:
    """A client in a thread of its own that reads nothing for a while, and goes on sending meanwhile."""

    def __init__(self, port: int, scheme: str, trusted: ssl.SSLContext) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)
        if scheme in ("tls", "wss"):
            self._sock = trusted.wrap_socket(self._sock, server_hostname="127.0.0.1")
        self._framed = scheme in ("ws", "wss")
        if self._framed:
            self._sock.sendall(http())
            while not self._sock.recv(4096).endswith(b"\r\n\r\n"):
                pass

    def send(self, data: bytes) -> None:
        self._sock.sendall(frame(data) if self._framed else data)

    def run(self) -> bytes:
        """Send more than Receive Maximum allows; return all that came, once the connection has ended."""
        self.send(connect("c", level=V5))
        for start in range(1, 4098, 500):
            self.send(b"".join(publish("in/a", b"", 2, start + n, level=V5) for n in range(500)))
        for number in range(1, 101):  # as it would act on each PUBREC that comes before the DISCONNECT
            time.sleep(SLOWER / 100)
            self.send(ack(0x62, number))
        found = bytearray()
        with self._sock:
            while data := self._sock.recv(65_536):
                found += data
        return bytes(found)


async def last(client: Client) -> tuple[int, bytes]:
    """The last packet before the end of the connection."""
    found = None
    while True:
        try:
            found = await client.receive()
        except ConnectionError:
            assert found is not None
            return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_client_that_goes_on_sending_still_reads_why_it_was_disconnected(
    tmp_path: Path, scheme: str
) -> None:
    authority = Authority(tmp_path / "ca")
    pair = authority.issue("server")

    async def main() -> None:
        tls = TlsSettings(cert=pair.cert, key=pair.key)
        listen = [f"{one}://127.0.0.1:0" for one in SCHEMES]
        async with asyncio.timeout(240), running(tmp_path, listen=listen, tls=tls) as bridge:
            port, trusted = (
                bridge.port_of(SCHEMES.index(scheme)),
                ssl.create_default_context(cafile=str(authority.cert)),
            )
            found = await asyncio.to_thread(lambda: Slow(port, scheme, trusted).run())
            assert found.count(b"\xe0\2\x93\0") == 1
            await until(lambda: bridge.stat("connections") == 0)

    run_async(main())


@bridge_test
async def test_a_subscriber_that_reads_late_learns_that_another_client_has_its_id(bridge: Bridge) -> None:
    client = await bridge.connect("c", level=V5)
    await client.subscribe(("t", 0))
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    publisher = await bridge.connect("p")
    session = next(one for one in bridge.broker.sessions.all() if one.client_id == "c")
    while session.line is not None and session.line.writable:
        await publisher.exchange(publish("t", bytes(1_000_000)), publish("in/a", b"", 1, 1))
    other = await bridge.connect("c", level=V5)
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert await last(client) == (0xE0, b"\x8e\0")
    assert await other.alive()


@bridge_test(hurry=10)
async def test_a_client_is_told_that_its_keep_alive_has_passed(bridge: Bridge) -> None:
    client = await bridge.connect("c", level=V5, keep_alive=1)
    assert await last(client) == (0xE0, b"\x8d\0")


def test_a_packet_above_max_packet_is_logged_with_that_option(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    @bridge_test(max_packet=2048)
    async def run(bridge: Bridge) -> None:
        client = await bridge.connect("c", level=V5)
        client.send(publish("in/a", bytes(3000), 1, 1, level=V5))
        assert await last(client) == (0xE0, b"\x95\0")
        assert "a packet of 3009 bytes, above the limit of 2048, which [mqtt] max_packet sets" in caplog.text

    run(tmp_path)


@bridge_test
async def test_mqtt_3_1_is_served_with_flags_that_it_does_not_reserve_as_mosquitto_does(
    bridge: Bridge,
) -> None:
    for level, flags, served in (
        (V31, 0x03, True),
        (V31, 0x32, True),
        (V31, 0x1A, False),
        (V311, 0x03, False),
    ):
        client = await bridge.open()
        name = b"\0\x06MQIsdp" if level == V31 else b"\0\x04MQTT"
        client.send(packet(0x10, name + bytes((level, flags, 0, 60)) + b"\0\1c"))
        if served:
            assert await client.receive() == (0x20, b"\0\0")
            assert (await client.exchange(subscribe(1, ("t", 0)))).head == 0x90
        else:
            assert await client.closed()
