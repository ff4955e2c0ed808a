"""Budgets: what a user, an address or a network may use together, and what becomes of who uses more."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bridge.access.users import hash_password
from bridge.mqtt.settings import ListenerTable
from bridge.mqtt.wire.packets import V5
from bridge.net.budgets import BURST, Budget, Budgets, Meter
from tests.fakes.byhand import Wire, World

from .harness import PLAIN, Bridge, Client, Packet, ack, bridge_test, connect, publish, subscribe, until
from .test_access import users, with_bridge
from .test_proxy import header

USERS = f"ann:{hash_password(b'a')}\nbob:{hash_password(b'b')}\n"
PROXIED = ListenerTable(
    name="proxied", listen=["tcp://127.0.0.1:0"], proxy_protocol=["127.0.0.1"], allow_anonymous=True
)


async def behind(bridge: Bridge, address: str, client_id: str) -> tuple[Client, int]:
    """A client at an address, and the reason code of its CONNACK; -1 if it was disconnected."""
    client = await bridge.open(1)
    client.level = V5
    client.send(header(address) + connect(client_id, level=V5))
    try:
        return client, (await client.receive()).body[1]
    except (EOFError, ConnectionError):
        return client, -1


async def answered(client: Client, count: int, size: int = 0, at_once: int = 10) -> None:
    """Publish with so many in flight, until all are acknowledged."""
    for start in range(0, count, at_once):
        numbers = range(start + 1, start + at_once + 1)
        client.send(*(publish("in/a", b"x" * size, 1, n, level=client.level) for n in numbers))
        for _ in numbers:
            assert (await client.receive()).head == 0x40


@bridge_test(
    listener=[PROXIED],
    budget=[
        Budget(name="net", per="prefix", connections=3),
        Budget(name="one", per="address", connections=2),
    ],
)
async def test_connections_of_an_address_and_of_a_network_are_limited_apart(bridge: Bridge) -> None:
    kept = []
    for address, client_id, code in (
        ("203.0.113.1", "a", 0), ("203.0.113.1", "b", 0), ("203.0.113.1", "c", -1), ("203.0.113.9", "d", 0),
        ("203.0.113.10", "e", -1), ("203.0.112.1", "f", 0), ("2001:db8:0:1::1", "g", 0),
        ("2001:db8:0:1::2", "h", 0), ("2001:db8:0:1::3", "i", -1), ("2001:db8:0:2::1", "j", 0),
        ("2001:db8:0:3::1", "k", -1), ("2001:db8:1::1", "l", 0),
    ):  # fmt: skip
        client, found = await behind(bridge, address, client_id)
        assert found == code, (address, client_id)
        kept.append(client)
    refusals = [bridge.stat(f"refused_{what}") for what in ("budget_one", "budget_net", "limit")]
    assert refusals == [2, 2, 0]
    kept[0].abort()
    await until(lambda: bridge.stat("connections") == 7)
    _kept, code = await behind(bridge, "203.0.113.1", "again")
    assert code == 0


def test_connections_of_a_user_are_limited_and_a_client_may_come_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def test(bridge: Bridge) -> None:
        async def log_in(client_id: str, user: str | None, level: int = V5) -> tuple[Client, int]:
            client = await bridge.open()
            client.level = level
            password = None if user is None else user[:1].encode()
            client.send(connect(client_id, user=user, password=password, level=level))
            return client, (await client.receive()).body[1]

        first = [await log_in(name, "ann") for name in ("a", "b")]
        assert [code for _, code in first] == [0, 0]
        assert (await log_in("c", "ann"))[1] == 0x97
        assert (await log_in("c", "ann", level=4))[1] == 3
        assert bridge.stat("refused_budget_users") == 2
        assert "'ann' has 2 connections already, the limit is 2; see [[mqtt.budget]] users" in caplog.text
        taken, code = await log_in("a", "ann")
        assert code == 0, "its old connection ends"
        others = [
            await log_in(name, user) for name, user in (("d", "bob"), ("e", None), ("f", None), ("g", None))
        ]
        assert [code for _, code in others] == [0] * 4
        taken.disconnect()
        await until(lambda: bridge.stat("connections") == 5)
        again, code = await log_in("c", "ann")
        assert code == 0
        assert await again.alive()

    budget = [Budget(name="users", per="user", connections=2)]
    with_bridge(tmp_path, test, users_file=users(tmp_path, USERS), budget=budget)


def test_a_login_that_is_over_after_its_connection_counts_for_no_user(tmp_path: Path) -> None:
    async def test(bridge: Bridge) -> None:
        def log_in(client_id: str) -> bytes:
            return connect(client_id, user="ann", password=b"a", level=V5)

        logging_in = bridge.server.connections.logging_in
        with socket.create_connection(("127.0.0.1", bridge.port_of(1))) as lingering:
            lingering.send(log_in("lingering"))
            while not logging_in:  # its password takes a thread a while
                await asyncio.sleep(0)
            bridge.front.reload(msgspec.structs.replace(bridge.config, listener=[]))
            await until(lambda: not logging_in, what="the login is over")
            assert bridge.stat("connections") == 1, "it waits for the client to close its half"
            client = await bridge.open()
            client.send(log_in("c"))
            assert (await client.receive()).body[1] == 0

    with_bridge(
        tmp_path,
        test,
        users_file=users(tmp_path, USERS),
        listener=[ListenerTable(name="other", listen=["tcp://127.0.0.1:0"])],
        budget=[Budget(name="users", per="user", connections=1)],
    )


def test_subscriptions_of_a_user_are_counted_over_all_its_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bridge: Bridge) -> None:
        ann = [await bridge.connect(name, user="ann", password=b"a", level=V5) for name in ("a", "b")]
        filters = [(f"f/{n}", 0) for n in range(5)]
        assert (await ann[0].exchange(subscribe(1, *filters[:3], level=V5))).body[3:] == b"\0\0\0"
        assert (await ann[1].exchange(subscribe(1, *filters, level=V5))).body[3:] == b"\0\x97\x97\x97\x97"
        assert bridge.stat("refused_budget_users") == 4
        assert "'ann' has 4 subscriptions already, the limit is 4; see [[mqtt.budget]] users" in caplog.text
        assert (await ann[0].exchange(subscribe(2, filters[0], level=V5))).body[3:] == b"\0", (
            "it has this one"
        )
        bob = await bridge.connect("c", user="bob", password=b"b", level=V5)
        assert (await bob.exchange(subscribe(1, *filters, level=V5))).body[3:] == b"\0\0\0\0\x97"
        ann[0].disconnect()
        await until(lambda: bridge.stat("connections") == 2)
        assert (await ann[1].exchange(subscribe(2, *filters, level=V5))).body[3:] == b"\0\0\0\0\x97"
        bridge.front.reload(msgspec.structs.replace(bridge.config, budget=[]))
        assert (await ann[1].exchange(subscribe(3, *filters, level=V5))).body[3:] == b"\0" * 5

    budget = [Budget(name="users", per="user", subscriptions=4)]
    with_bridge(tmp_path, test, users_file=users(tmp_path, USERS), budget=budget)


@pytest.mark.parametrize(
    ("limit", "count", "size"),
    [({"messages_per_second": 100}, 250, 0), ({"bytes_per_second": 100_000}, 50, 5_000)],
)
def test_who_is_over_a_budget_is_read_more_slowly_loses_nothing_and_is_named(
    tmp_path: Path, limit: dict[str, int], count: int, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bridge: Bridge) -> None:
        noisy = await bridge.connect("noisy", level=V5)
        await answered(noisy, count, size)
        (peer,) = bridge.front.clients()
        assert peer.slowed
        assert bridge.stat("over_addresses") == 1
        assert bridge.stat("slowed_addresses") > 0
        assert len(await bridge.stored()) == count
        (line,) = [record.getMessage() for record in caplog.records if "read more slowly" in record.message]
        assert "client 'noisy'" in line
        assert "address '127.0.0.1'" in line
        bridge.front.reload(msgspec.structs.replace(bridge.config, budget=[]))
        await answered(noisy, count, size)
        (peer,) = bridge.front.clients()
        assert not peer.slowed

    with_bridge(tmp_path, test, budget=[Budget(name="addresses", per="address", **limit)])


@pytest.mark.parametrize(
    ("limit", "size", "code"),
    [({"messages_per_second": 20}, 0, 0x96), ({"bytes_per_second": 20_000}, 10_000, 0x97)],
)
def test_who_goes_on_is_disconnected_with_the_reason_and_the_others_are_not(
    tmp_path: Path, limit: dict[str, int], size: int, code: int
) -> None:
    async def test(bridge: Bridge) -> None:
        quiet, noisy = [await bridge.connect(name, level=V5) for name in ("quiet", "noisy")]
        quiet.send(publish("in/q", b"", 1, 1, level=V5))
        assert (await quiet.receive()).head == 0x40
        acknowledged, last = 0, Packet(0, b"")
        number = 0
        while last.head != 0xE0:
            number += 1
            noisy.send(*(publish("in/n", b"x" * size, 1, number, level=V5) for _ in range(10)))
            for _ in range(10):
                if (last := await noisy.receive()).head != 0x40:
                    break
                acknowledged += 1
        assert last.body[0] == code
        assert len(await bridge.stored()) >= acknowledged + 1
        assert await quiet.alive()
        assert bridge.stat("refused_budget_all") == 1

    with_bridge(tmp_path, test, budget=[Budget(name="all", per="prefix", disconnect_after=300, **limit)])


@bridge_test(budget=[Budget(name="all", per="address", bytes_per_second=200_000)])
async def test_one_large_packet_is_paid_for_while_it_comes(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    packet = publish("in/a", b"x" * 500_000, 1, 1)
    client.send(packet[:-1])
    await until(lambda: bridge.stat("slowed_all"))
    client.send(packet[-1:])
    assert (await client.receive()).head == 0x40
    assert [len(payload) for payload in await bridge.payloads()] == [500_000]


def flood(count: int, size: int = 0) -> bytes:
    return b"".join(publish("in/n", b"x" * size, 1, n, level=V5) for n in range(1, count + 1))


def world(root: Path, **limits: Any) -> World:
    found = World(root, budget=[Budget(name="all", per="address", **limits)])
    found.streams.definitions["s"].by_itself = True
    return found


def log_in(on: World, client_id: str) -> Wire:
    wire = on.connect(connect(client_id, level=V5, properties=PLAIN))
    assert wire.got()[:1] == b"\x20"
    return wire


def test_of_many_messages_in_one_read_only_the_burst_is_handled_at_once(tmp_path: Path) -> None:
    on = world(tmp_path, messages_per_second=50, disconnect_after=0)
    stored = on.streams.definitions["s"].stored
    wire = log_in(on, "noisy")
    wire.send(flood(1_000))
    assert 50 <= len(stored) <= 52
    for second in range(1, 19):
        on.run(1.0)
        assert 50 * second <= len(stored) <= 50 * second + 60
        assert not wire.transport.reading
    on.run(2.0)
    assert len(stored) == 1_000, "and nothing is lost"
    assert wire.got() == b"".join(ack(0x40, n) for n in range(1, 1_001))
    assert wire.transport.reading


@pytest.mark.parametrize(
    ("limit", "size", "code"),
    [({"messages_per_second": 50}, 0, 0x96), ({"bytes_per_second": 1_000}, 100, 0x97)],
)
def test_one_read_that_takes_long_to_pay_ends_its_connection_in_time_and_no_other(
    tmp_path: Path, limit: dict[str, int], size: int, code: int
) -> None:
    on = world(tmp_path, disconnect_after=3_000, **limit)
    noisy, quiet = log_in(on, "noisy"), log_in(on, "quiet")
    noisy.send(flood(1_000, size))
    quiet.send(flood(1))
    on.run(2.9)
    assert not noisy.transport.closed
    on.run(0.2)
    assert noisy.transport.closed
    assert noisy.got().endswith(b"\xe0\2" + bytes((code, 0)))
    assert on.broker.counts["refused_budget_all"] == 1
    on.run(1.0)
    assert quiet.got() == ack(0x40, 1), "it need not wait for what the other one owed"
    stored = on.streams.definitions["s"].stored
    before = len(stored)
    for number in range(10):
        on.run(1.0)
        quiet.send(flood(1))
        assert len(stored) == before + number + 1
    assert not quiet.transport.closed


def test_two_that_pay_for_the_same_read_lose_nobody_who_is_within_the_budget_again(tmp_path: Path) -> None:
    on = world(tmp_path, messages_per_second=50, disconnect_after=3_000)
    wires = [log_in(on, name) for name in ("a", "b", "c")]
    for wire in wires:
        wire.send(flood(45))
    on.run(2.0)
    assert [wire.got() for wire in wires] == [b"".join(ack(0x40, n) for n in range(1, 46))] * 3
    on.run(10.0)
    assert not any(wire.transport.closed for wire in wires)


def test_a_meter_lets_through_its_rate_and_a_burst_and_names_who_used_most() -> None:
    meter: Meter[str] = Meter(
        Budget(name="x", per="user", messages_per_second=10, disconnect_after=5_000), "k"
    )
    now, sent = 100.0, 0
    while now < 110.0:
        wait = meter.pay("much" if sent % 3 else "little", 1, 100, now)
        sent += 1
        now += max(wait, 0.0)
    assert sent <= 10 * (10 + BURST) + 2
    assert meter.must_go(104.0) is None
    assert meter.must_go(110.0) == "much"
    assert meter.pay("little", 1, 100, 130.0) <= 0
    assert meter.over is None, "a pause has paid for everything"
    assert meter.must_go(140.0) is None


def test_meters_are_forgotten_when_they_are_paid_and_not_before() -> None:
    due: list[tuple[float, Any, Any]] = []
    budgets: Budgets[str] = Budgets(
        [Budget(name="x", per="address", messages_per_second=1)],
        lambda seconds, do, meter: due.append((seconds, do, meter)),
        lambda: 0.0,
    )
    for number in range(1000):
        meters = budgets.of_address(f"10.0.{number // 250}.{number % 250}")
        assert budgets.enter(meters) is None
        meters[0].pay("c", 5, 0, 0.0)
        budgets.leave(meters, "c")
    assert {seconds for seconds, _, _ in due} == {5.0}
    again = budgets.of_address("10.0.0.0")
    budgets.enter(again)
    assert again[0].pay("c", 0, 0, 0.0) > 0, "who comes again still owes"
    for _, do, meter in due:
        do(meter)
    assert len(budgets._meters) == 1
