"""Floods of peers that never log in: they cost little, and who has a password comes in all the same."""

from __future__ import annotations

import asyncio
import socket
import ssl
import statistics
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from bridge.access.users import Password, hash_password, read_users, usual_iterations
from bridge.net.addresses import network_of
from bridge.net.fairqueue import FairQueue
from bridge.net.guests import Guests

from .harness import Bridge, Client, bridge_test, connect, run_async, until
from .test_abuse import _files  # noqa: F401 - both ends of the connections are in this process
from .test_access import users, with_bridge
from .test_tls import with_tls

USERS = "\n".join(f"user{number}:" + hash_password(b"right") for number in range(20))
HALF = connect("x" * 60, will=("w", b"x" * 63_000, 0))[:-1_000]


async def open_from(bridge: Bridge, address: str, listener: int = 0) -> Client:
    """A transport from another address of this machine."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.bind((address, 0))
    sock.setblocking(False)
    await loop.sock_connect(sock, ("127.0.0.1", bridge.port_of(listener)))
    reader, writer = await asyncio.open_connection(sock=sock)
    return Client(reader, writer)


async def log_in(bridge: Bridge, number: int, address: str) -> float:
    """Log in with a right password; returns how long it took."""
    client = await open_from(bridge, address)
    began = time.monotonic()
    await client.connect(f"good-{number}", user=f"user{number}", password=b"right")
    took = time.monotonic() - began
    client.disconnect()
    return took


@asynccontextmanager
async def guessing(bridge: Bridge, addresses: list[str], names: list[str], each: int) -> AsyncIterator[None]:
    """So many clients at each address guess passwords as fast as they are answered."""

    async def guess(address: str, number: int) -> None:
        while True:
            client = await open_from(bridge, address)
            client.send(connect(user=names[number % len(names)], password=b"wrong%d" % number))
            await client.closed(timeout=30)
            client.abort()

    tasks = [asyncio.create_task(guess(at, number)) for at in addresses for number in range(each)]
    await until(lambda: bridge.stat("connections") >= len(tasks) * 3 // 4)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_a_good_login_waits_for_a_turn_of_each_address_that_guesses_and_not_for_all_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[bytes] = []
    verify = Password.verify
    monkeypatch.setattr(Password, "verify", lambda self, given: hashed.append(given) or verify(self, given))

    async def test(bridge: Bridge) -> None:
        async def hashes(number: int, address: str) -> list[bytes]:
            """The passwords that are hashed while somebody logs in."""
            before = len(hashed)
            await log_in(bridge, number, address)
            return hashed[before:]

        await log_in(bridge, 0, "127.0.1.1")
        addresses = [f"127.0.0.{number}" for number in range(2, 14)]
        async with guessing(bridge, addresses, [f"user{number}" for number in range(20)], 16):
            assert len(await hashes(6, "127.0.2.1")) < 40, "there are 192 guesses before it"
            assert len(await hashes(7, "127.0.1.1")) < 10, "somebody has logged in from there before"
            assert b"right" not in await hashes(6, "127.0.2.1"), "its password is known"

    with_bridge(
        tmp_path, test, users_file=users(tmp_path, USERS), allow_anonymous=False, connect_timeout=60_000
    )


def test_from_an_address_where_others_guess_all_good_logins_succeed(tmp_path: Path) -> None:
    async def test(bridge: Bridge) -> None:
        async with guessing(bridge, ["127.0.0.1"], [f"nobody{number}" for number in range(64)], 64):
            good = [log_in(bridge, number, "127.0.0.1") for number in range(20)]
            assert len(await asyncio.gather(*good)) == 20

    with_bridge(
        tmp_path, test, users_file=users(tmp_path, USERS), allow_anonymous=False, connect_timeout=60_000
    )


def test_guesses_of_clients_that_have_gone_are_not_looked_at(tmp_path: Path) -> None:
    async def test(bridge: Bridge) -> None:
        alone = statistics.median([await log_in(bridge, number, "127.0.1.1") for number in range(3)])
        clients = [await open_from(bridge, "127.0.0.2") for _ in range(150)]
        for number, client in enumerate(clients):
            client.send(connect(user=f"user{number % 20}", password=b"%d" % number))
        await until(lambda: len(bridge.server.connections.logging_in) == 150)
        for client in clients:
            client.abort()
        began = time.process_time()
        await until(lambda: not bridge.server.connections.logging_in)
        await log_in(bridge, 10, "127.0.0.2")
        assert time.process_time() - began < 20 * alone, "of 150 hashes"

    with_bridge(tmp_path, test, users_file=users(tmp_path, USERS), allow_anonymous=False)


@bridge_test(guest_bytes=4 << 20, seconds=120)
async def test_half_connects_are_bounded_in_all_and_good_clients_come_in(bridge: Bridge) -> None:
    before = psutil.Process().memory_info().rss
    clients = []
    for start in range(0, 2000, 100):
        group = await asyncio.gather(*(bridge.open() for _ in range(100)))
        for client in group:
            client.send(HALF)
        clients += group
        good = await bridge.connect(f"good-{start}")
        assert await good.alive()
        good.disconnect()
    await until(lambda: bridge.stat("refused_guest") > 1900)
    assert bridge.server.connections.guests.total <= 4 << 20
    assert psutil.Process().memory_info().rss - before < 60 << 20, (
        "2,000 times 62 KiB are 121 MiB, twice here"
    )
    for client in clients:
        client.abort()
    await until(lambda: bridge.stat("connections") == 0)
    assert bridge.server.connections.guests.total == 0


@bridge_test(guest_bytes=1 << 20)
async def test_a_flood_from_one_address_displaces_its_own_and_not_another_address(bridge: Bridge) -> None:
    slow = await open_from(bridge, "127.0.0.9")
    slow.send(HALF[:40_000])
    flood = [await bridge.open() for _ in range(60)]
    for client in flood:
        client.send(HALF)
    await until(lambda: bridge.stat("refused_guest") > 30)
    slow.send(connect("x" * 60, will=("w", b"x" * 63_000, 0))[40_000:])
    assert (await slow.receive()).head == 0x20
    await until(lambda: sum(client.writer.transport.is_closing() for client in flood) > 30)


def test_tls_handshakes_take_turns_by_address(tmp_path: Path) -> None:
    async def test(bridge: Bridge, trusted: ssl.SSLContext) -> None:
        gate = threading.Event()
        bridge.server.connections.handshakes.step(gate.wait, lambda error: None)  # all wait behind it
        flood = [asyncio.create_task(bridge.open(0, trusted)) for _ in range(120)]
        await until(lambda: bridge.stat("accepted") == 120)
        other = await open_from(bridge, "127.0.0.9")
        other.send(connect("plain text instead of a handshake"))
        await until(lambda: bridge.stat("accepted") == 121)
        gate.set()
        assert await other.closed()
        done = sum(task.done() for task in flood)
        assert done < 100, "its turn came before those of the last"
        for client in await asyncio.gather(*flood):
            client.abort()

    with_tls(tmp_path, test)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unix", "unix"),
    ],
)
def test_an_ipv6_network_counts_as_one_address(address: str, network: str) -> None:
    assert network_of(address) == network
    assert network_of(network) == network


def test_turns_go_round_networks_and_names_and_keep_half_for_known_ones() -> None:
    async def main() -> None:
        turns, order = FairQueue(), []

        async def work(network: str, name: str, known: bool) -> None:
            await turns.wait(network, name, known=known)
            order.append(network + name)

        await turns.wait("first")
        asked = ["aX", "aX", "aX", "aY", "bX", "bX", "kX", "kX"]
        tasks = [asyncio.create_task(work(what[0], what[1], what[0] == "k")) for what in asked]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        for _ in asked[1:]:
            turns.done()
            await asyncio.sleep(0)
        assert order == ["kX", "aX", "kX", "bX", "aY", "bX", "aX"]
        assert turns._waiting == ({}, {})

    run_async(main())


def test_names_of_clients_that_have_hung_up_take_no_memory(tmp_path: Path) -> None:
    """A wrong login counts for seconds after its client has left, and its name may have 60 KB."""

    async def main(bridge: Bridge) -> None:
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for number in range(200):
                client = await bridge.open()
                client.send(connect(f"c{number}", user=f"{number:04d}" + "x" * 60_000))
                client.disconnect()
                assert await client.closed()
            sent = 200 * 60_000
            assert tracemalloc.get_traced_memory()[0] - before < sent / 5
        finally:
            tracemalloc.stop()

    with_bridge(tmp_path, main, users_file=users(tmp_path, USERS))


def test_the_next_waiter_gets_its_turn_however_many_before_it_have_just_left() -> None:
    async def main() -> None:
        turns = FairQueue()
        await turns.wait("first")
        gone = [turns.ask("flood", str(number)) for number in range(5000)]
        last = turns.ask("other")
        for turn in gone:
            turn.cancel()
        turns.done()
        assert last.done()
        turns.done()
        assert turns.ask("free").done()

    run_async(main())


def test_guests_displace_those_who_hold_most_of_the_largest_network() -> None:
    gone: list[str] = []
    guests: Guests[str] = Guests(100_000, gone.append)
    guests.keep("quiet", "192.0.2.1", 0)
    guests.keep("slow", "192.0.2.2", 30_000)
    for number in range(30):
        guests.keep(f"flood{number}", "192.0.2.3", 20_000)
    assert guests.total <= 100_000
    assert "quiet" not in gone
    assert "slow" not in gone
    for name in ("quiet", "slow"):
        guests.leave(name, "192.0.2.1" if name == "quiet" else "192.0.2.2")
    for number in range(30):
        guests.leave(f"flood{number}", "192.0.2.3")
    assert guests.total == 0


def test_a_name_that_is_not_there_costs_as_much_as_a_user(tmp_path: Path) -> None:
    line = "$7$30000$c2FsdA==$" + hash_password(b"x").rpartition("$")[2]
    path = users(tmp_path, f"ann:{line}\nbob:{line}\nold:{line.replace('30000', '101')}\n")
    assert usual_iterations(read_users(path)) == 30_000

    async def test(bridge: Bridge) -> None:
        async def cost(user: str, address: str) -> float:
            client = await open_from(bridge, address)  # each its own: nobody's second failure is late
            began = time.process_time()
            await client.connect(user=user, password=b"wrong", expect=4)
            return time.process_time() - began

        at = [f"127.0.0.{number}" for number in range(10, 18)]
        pairs = [(await cost("ann", at.pop()), await cost("nobody", at.pop())) for _ in range(4)]
        ratio = statistics.median(known for known, _ in pairs) / statistics.median(none for _, none in pairs)
        assert 0.5 < ratio < 2, "210,000 iterations would be seven times as much"

    with_bridge(tmp_path, test, users_file=path, allow_anonymous=False)
