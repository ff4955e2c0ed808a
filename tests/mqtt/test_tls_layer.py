"""The TLS layer of connections: every byte, in order, to a peer that reads slowly, stalls or vanishes."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from benchmarks.testbed.certificates import Authority
from bridge.net.tls import server_context
from bridge.net.tlslayer import Handshakes, TlsLayer
from tests.mqtt.harness import run_async


class Peer(asyncio.Protocol):
    """The server's protocol: notes what it is told."""

    def __init__(self, on_data: Callable[[Peer, bytes], None] = lambda peer, data: None) -> None:
        self.on_data, self.got = on_data, bytearray()
        self.paused = False
        self.shaken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def turn(self) -> tuple[str, bool]:
        return "network", False

    def begins(self) -> None:
        pass

    def made(self) -> None:
        self.shaken.set_result(None)

    def failed(self, error: OSError) -> None:
        self.shaken.set_exception(error)

    def data_received(self, data: bytes) -> None:
        self.got += data
        self.on_data(self, data)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


def with_client(
    authority: Authority,
    client: Callable[[ssl.SSLSocket], Any],
    server: Callable[[Peer], Coroutine[Any, Any, None]],
    on_data: Callable[[Peer, bytes], None] = lambda peer, data: None,
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
) -> Any:
    """Run a client in a thread against a connection of the server; returns what the client returns."""
    pair = authority.issue("gateway")
    context = server_context("tls", pair.cert, pair.key)
    trusting = ssl.create_default_context(cafile=str(authority.cert))
    trusting.maximum_version = version
    listening = socket.create_server(("127.0.0.1", 0))
    answers: list[Any] = []
    handshakes = Handshakes()

    def work() -> None:
        try:
            with (
                socket.create_connection(listening.getsockname(), timeout=30) as plain,
                trusting.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
            ):
                answers.append(client(secure))
        except Exception as error:
            answers.append(error)

    async def main() -> None:
        async with asyncio.timeout(240):
            thread = threading.Thread(target=work)
            thread.start()
            loop = asyncio.get_running_loop()
            sock, _ = await loop.run_in_executor(None, listening.accept)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
            peer = Peer(on_data)
            layer = TlsLayer(context, peer, handshakes, peer)
            await loop.connect_accepted_socket(lambda: layer, sock)
            await peer.shaken
            await server(peer)
            await loop.run_in_executor(None, thread.join)
            peer.transport.abort()
            await peer.lost
            handshakes.close()

    with listening:
        run_async(main())
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


DATA = random.Random(7).randbytes(3_000_000)
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_all_that_is_written_arrives_in_order_at_a_client_that_reads_slowly(
    authority: Authority, version: ssl.TLSVersion
) -> None:
    stalled = threading.Event()

    def client(secure: ssl.SSLSocket) -> str:
        secure.sendall(b"go")
        stalled.wait(30)  # reads nothing until the server can send no more
        found = hashlib.sha256()
        while data := secure.recv(7_001):
            found.update(data)
        return found.hexdigest()

    async def server(peer: Peer) -> None:
        while not peer.got:
            await asyncio.sleep(0)
        for begin in range(0, len(DATA), 50_000):
            while peer.paused:
                stalled.set()
                await asyncio.sleep(0)
            peer.transport.write(DATA[begin : begin + 50_000])
            assert peer.transport.get_write_buffer_size() < 200_000
        peer.transport.close()
        await peer.lost
        assert stalled.is_set()

    assert with_client(authority, client, server, version=version) == DIGEST


@pytest.mark.parametrize("size", [1, 100, 20_000])
def test_all_that_a_client_sends_arrives_in_order_however_it_is_cut(authority: Authority, size: int) -> None:
    data = DATA[: size * 3_000]

    def client(secure: ssl.SSLSocket) -> None:
        for begin in range(0, len(data), size):
            secure.sendall(data[begin : begin + size])
        secure.recv(1)

    def pausing(peer: Peer, _: bytes) -> None:
        peer.transport.pause_reading()  # as a connection that is held
        asyncio.get_running_loop().call_soon(peer.transport.resume_reading)

    async def server(peer: Peer) -> None:
        while len(peer.got) < len(data):
            await asyncio.sleep(0)
        assert bytes(peer.got) == data
        peer.transport.write(b"!")

    with_client(authority, client, server, pausing)


def test_the_last_bytes_arrive_although_the_client_has_sent_what_nobody_reads(authority: Authority) -> None:
    """A socket that is closed with unread bytes is reset, and the peer loses our last bytes."""

    def client(secure: ssl.SSLSocket) -> bytes:
        secure.sendall(b"x" * 200_000)
        found = bytearray()
        while data := secure.recv(1000):
            found += data
        return bytes(found)

    async def server(peer: Peer) -> None:
        while not peer.got:
            await asyncio.sleep(0)
        peer.transport.pause_reading()
        peer.transport.write(b"goodbye")
        peer.transport.close()
        assert await peer.lost is None

    assert with_client(authority, client, server) == b"goodbye"


def test_a_client_that_vanishes_or_sends_nonsense_ends_its_connection(authority: Authority) -> None:
    def vanishes(secure: ssl.SSLSocket) -> None:
        secure.sendall(b"x")
        secure.recv(1)
        secure.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def talks_nonsense(secure: ssl.SSLSocket) -> None:
        secure.sendall(b"x")
        secure.recv(1)
        socket.socket.send(secure, b"\x17\x03\x03\x00\x10" + b"?" * 16)
        secure.recv(1)

    def only_hangs_up(secure: ssl.SSLSocket) -> None:
        secure.sendall(b"x")
        secure.recv(1)
        secure.shutdown(socket.SHUT_RDWR)  # without a close_notify

    async def server(peer: Peer) -> None:
        while not peer.got:
            await asyncio.sleep(0)
        peer.transport.write(b"!")
        await peer.lost
        assert peer.transport.is_closing()
        peer.transport.write(b"to nobody")

    for client in (vanishes, talks_nonsense, only_hangs_up):
        try:
            with_client(authority, client, server)
        except ssl.SSLError:
            assert client is talks_nonsense
