"""The tls and wss listeners: a socket counts from its accept on, not from the end of its handshake."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.testbed.certificates import Authority
from bridge.mqtt.settings import TlsSettings

from .harness import Bridge, Packet, connect, publish, run_async, running, until

LISTENERS = ["tls://127.0.0.1:0", "wss://127.0.0.1:0"]


def with_tls(
    root: Path,
    test: Callable[[Bridge, ssl.SSLContext], Awaitable[None]],
    client_ca: Path | None = None,
    **settings: Any,
) -> None:
    """Run a test on a bridge with a tls and a wss listener; it gets what a client trusts."""
    authority = Authority(root / "ca")
    pair = authority.issue("server")

    async def main() -> None:
        tls = TlsSettings(cert=pair.cert, key=pair.key, client_ca=client_ca)
        options = {"listen": LISTENERS, "tls": tls, **settings}
        async with asyncio.timeout(240), running(root, **options) as bridge:
            await test(bridge, ssl.create_default_context(cafile=str(authority.cert)))

    run_async(main())


def silent(bridge: Bridge, listener: int, number: int) -> list[socket.socket]:
    """Sockets that are open and say nothing."""
    sockets = []
    for _ in range(number):
        sock = socket.create_connection(("127.0.0.1", bridge.port_of(listener)))
        sock.setblocking(False)
        sockets.append(sock)
    return sockets


def still_open(sockets: list[socket.socket]) -> int:
    number = 0
    for sock in sockets:
        try:
            number += bool(sock.recv(1))
        except BlockingIOError:
            number += 1
        except OSError:
            pass
    return number


@pytest.mark.parametrize("listener", [0, 1], ids=["tls", "wss"])
@pytest.mark.parametrize("limit", ["connections", "connections_per_address"])
def test_sockets_that_never_begin_their_handshake_count_and_end_in_time(
    tmp_path: Path, listener: int, limit: str
) -> None:
    async def test(bridge: Bridge, trusted: ssl.SSLContext) -> None:
        sockets = silent(bridge, listener, 50)
        await until(lambda: bridge.stat("refused_limit") == 45)
        await until(lambda: still_open(sockets) == 5)
        assert bridge.stat("connections") == bridge.stat("accepted") - 45 == 5
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await bridge.open(listener, trusted)
        for sock in sockets:
            sock.close()
        await until(lambda: bridge.stat("connections") == 0)
        for _ in range(6):  # nothing of them is counted any more
            client = await bridge.open(0, trusted)
            await client.connect("c")
            client.abort()
            await until(lambda: bridge.stat("connections") == 0)
        limits = msgspec.structs.replace(bridge.config.limits, connect_timeout=500)
        bridge.config = msgspec.structs.replace(bridge.config, limits=limits)
        await bridge.restart()
        sockets = silent(bridge, listener, 5)
        await until(lambda: bridge.stat("refused_timeout") == 5)
        await until(lambda: bridge.stat("connections") == still_open(sockets) == 0)
        await until(lambda: not bridge.server.connections._tasks)

    with_tls(tmp_path, test, connect_timeout=3_600_000, **{limit: 5})


def test_a_client_counts_once_during_its_handshake_and_after_it(tmp_path: Path) -> None:
    async def test(bridge: Bridge, trusted: ssl.SSLContext) -> None:
        for _ in range(3):
            clients = await asyncio.gather(*(bridge.open(0, trusted) for _ in range(4)))
            for number, client in enumerate(clients):
                await client.connect(f"c{number}")
            assert bridge.stat("connections") == 4
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await bridge.open(0, trusted)
            for client in clients:
                client.abort()
            await until(lambda: bridge.stat("connections") == 0)

    with_tls(tmp_path, test, connections=4, connections_per_address=4)


def test_rubbish_instead_of_a_handshake_ends_that_connection_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bridge: Bridge, trusted: ssl.SSLContext) -> None:
        client = await bridge.open(0, trusted)
        await client.connect("c")
        for rubbish in (connect("plain"), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02", b"\0" * 100_000):
            for listener in (0, 1):
                stranger = await bridge.open(listener)
                stranger.send(rubbish)
                if len(rubbish) == 4:  # the beginning of a handshake, and no more
                    stranger.abort()
                else:
                    assert await stranger.closed()
        await until(lambda: bridge.stat("connections") == 1)
        assert await client.exchange(publish("in/a", b"x", 1, 1)) == Packet(0x40, b"\0\1")
        client.disconnect()
        await until(lambda: bridge.stat("connections") == 0)
        await until(lambda: not bridge.server.connections._tasks)

    with_tls(tmp_path, test)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_what_comes_in_one_piece_with_the_end_of_the_handshake_is_not_lost(tmp_path: Path) -> None:
    async def test(bridge: Bridge, trusted: ssl.SSLContext) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = trusted.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        reader, writer = await asyncio.open_connection("127.0.0.1", bridge.port)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(65536))
        tls.write(connect("c") + publish("in/a", b"x", 1, 1))
        writer.write(outgoing.read())
        got = b""
        while len(got) < 8:
            try:
                got += tls.read(100)
            except ssl.SSLWantReadError:
                incoming.write(await reader.read(65536))
        assert got == b"\x20\2\0\0\x40\2\0\1"
        assert await bridge.payloads() == [b"x"]
        writer.close()

    with_tls(tmp_path, test)


def test_a_stop_waits_for_nobodys_handshake(tmp_path: Path) -> None:
    sockets: list[socket.socket] = []

    async def test(bridge: Bridge, trusted: ssl.SSLContext) -> None:
        sockets.extend(silent(bridge, 0, 10))
        await until(lambda: bridge.stat("connections") == 10)
        async with asyncio.timeout(60):
            await bridge.front.stop()
        await until(lambda: not still_open(sockets))
        await bridge.front.start()

    with_tls(tmp_path, test, connect_timeout=3_600_000)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("no certificate", "it sent no certificate; client_ca of the listener or of [mqtt.tls] asks for one"),
        ("wrong certificate", "its certificate is not accepted"),
        ("distrustful", "it does not accept our certificate"),
        ("http", "it speaks HTTP without TLS"),
        ("mqtt", "does it speak TLS"),
    ],
)
def test_a_failed_handshake_is_told_with_its_reason_from_time_to_time_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, reason: str
) -> None:
    devices, other = Authority(tmp_path / "devices"), Authority(tmp_path / "other", "other-ca")
    forged = other.issue("device")

    async def test(bridge: Bridge, trusted: ssl.SSLContext) -> None:
        if kind == "wrong certificate":
            trusted.load_cert_chain(*forged)
        for number, listener in enumerate((0, 1, 0)):
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                if kind == "distrustful":  # a client of the event loop would hang up without an alert
                    where = ("127.0.0.1", bridge.port_of(listener))
                    await asyncio.to_thread(ssl.get_server_certificate, where, ca_certs=str(other.cert))
                client = await bridge.open(listener, trusted if kind.endswith("certificate") else None)
                client.send(connect("c") if kind == "mqtt" else b"GET / HTTP/1.1\r\n\r\n")
                await client.closed()
            await until(lambda at=number: bridge.stat("refused_tls") == at + 1)
        await until(lambda: bridge.stat("connections") == 0)

    with_tls(tmp_path, test, client_ca=devices.cert)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith("127.0.0.1 closed: TLS handshake failed: ")
    assert reason in warning


def test_a_client_that_hangs_up_in_its_handshake_leaves_a_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bridge: Bridge, trusted: ssl.SSLContext) -> None:
        for _ in range(3):
            for sock in silent(bridge, 0, 1):
                sock.close()
            await until(lambda: bridge.stat("accepted") and not bridge.stat("connections"))

    caplog.set_level(logging.INFO)
    with_tls(tmp_path, test)
    assert caplog.text.count("127.0.0.1 hung up in its TLS handshake") == 1
