"""The user at the other end of a connection on this machine, on which clients without a token depend."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import cbor2
import pytest

from bridge.access.guesses import FIRST_DELAY
from bridge.net.peer import ESTABLISHED, Address, Found, Owners, ask_kernel

from ..fakes.measured import least
from .harness import CONNECT, Raw, Server, frame

MANY = 3_000
STRANGERS = """if True:
    import encodings.idna, os, socket, sys
    os.setuid(65534)
    def connect():
        peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
        peer.sendall(bytes.fromhex(sys.argv[2]))
        return peer
    sys.stdout.buffer.write(connect().recv(4096) + b"\\n")
    sys.stdout.flush()
    peers = [connect() for _ in range(18)]
    sys.stdin.read()"""
Ask = Callable[[Address, Address], Found | None]


@contextmanager
def connection(bound: str, host: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Our end of a connection within this machine, and the other one."""
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    with (
        socket.create_server((bound, 0), family=family, dualstack_ipv6=bound == "::") as server,
        socket.create_connection((host, server.getsockname()[1])) as theirs,
        server.accept()[0] as ours,
    ):
        yield ours, theirs


def lacks(_local: Address, _remote: Address) -> Found | None:
    """A kernel without sock_diag."""
    return None


def forbids(_local: Address, _remote: Address) -> Found | None:
    """A sandbox without netlink."""
    raise PermissionError


@pytest.mark.parametrize(
    ("bound", "host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "::ffff:127.0.0.1"),
        ("::1", "::1"),
        ("::", "127.0.0.1"),
        ("::", "::1"),
    ],
)
@pytest.mark.parametrize("ask", [ask_kernel, lacks, forbids])
def test_the_owner_of_the_other_end_is_found(bound: str, host: str, ask: Ask) -> None:
    with ExitStack() as stack:
        try:
            ours, theirs = stack.enter_context(connection(bound, host))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
        owners = Owners(ask)
        assert asyncio.run(owners.owner(ours)) == os.geteuid()
        theirs.close()
        assert asyncio.run(owners.owner(ours)) is None


def test_the_kernel_is_asked_about_one_socket() -> None:
    """Otherwise the tests here would pass with the list alone."""

    def packed(name: tuple[str, int]) -> Address:
        return socket.inet_aton(name[0]), name[1]

    with connection("127.0.0.1", "127.0.0.1") as (ours, theirs):
        ends = packed(theirs.getsockname()), packed(ours.getsockname())
        assert ask_kernel(*ends) == Found(ESTABLISHED, os.geteuid())
        assert ask_kernel(ends[1], (socket.inet_aton("127.0.0.1"), 1)) is None, "not that of the listener"


@pytest.mark.parametrize("ask", [ask_kernel, lacks])
def test_thousands_of_sockets_make_no_look_up_slower_for_the_event_loop(ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(MANY):  # each stays in the list for a minute
            with socket.create_connection(server.getsockname()[:2]):
                server.accept()[0].close()

    def read() -> float:
        began = time.thread_time()
        for line in Path("/proc/self/net/tcp").read_text().splitlines():
            line.split()
        return time.thread_time() - began

    async def look_up(ours: socket.socket) -> float:
        owners = Owners(ask)
        began = time.thread_time()
        assert await owners.owner(ours) == os.geteuid()
        return time.thread_time() - began

    with connection("127.0.0.1", "127.0.0.1") as (ours, _):
        asyncio.run(look_up(ours))
        bound = read() / 4
        assert least(lambda: asyncio.run(look_up(ours)), bound) < bound, "of the time to read the list"


def test_refusals_without_a_token_come_late_and_keep_no_other_client_out(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be somebody else")
    file = tmp_path / "token"
    file.write_text("right")
    hello = b"\x01" + frame(1, CONNECT)
    with Server(tmp_path, token_file=file) as server:
        command = [sys.executable, "-c", STRANGERS, str(server.port), hello.hex()]
        began = time.monotonic()
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as strangers:
            assert strangers.stdout is not None
            assert cbor2.loads(strangers.stdout.readline()[6:-1])["status"] == 2
            assert time.monotonic() - began >= FIRST_DELAY
            server.wait_until(
                lambda: sum("token" in one.holds for one in server.front.connections) > 16,
                "more refusals are delayed than wrong tokens may be",
            )
            with Raw(server) as own, Raw(server, connect=CONNECT | {"authToken": "right"}) as known:
                assert own.ask(11)["status"] == known.ask(11)["status"] == 0
