"""Attacks on what all clients share: retained messages, sessions and their memory.

Who has most loses, and never the newcomer. A user is one, and so is an address without a user name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from bridge.access.users import hash_password
from bridge.mqtt.server.connection import Connection
from bridge.mqtt.server.websocket import WebSocket
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5
from bridge.net.budgets import Budget
from tests.fakes.byhand import Transport, World
from tests.mqtt.harness import (
    PLAIN,
    Bridge,
    Client,
    ack,
    bridge_test,
    connect,
    publish,
    subscribe,
    unsubscribe,
    until,
)
from tests.mqtt.test_access import users, with_bridge
from tests.mqtt.test_login_floods import open_from
from tests.mqtt.test_websocket import frame, http

STAYS: dict[str, Any] = {"level": V5, "clean": False, "properties": {p.SESSION_EXPIRY: 3600}}
NAMES = ("ann", "bob", "mallory")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return users(tmp_path, "".join(f"{name}:{hash_password(name.encode())}\n" for name in NAMES))


async def log_in(bridge: Bridge, user: str, client_id: str = "", **options: Any) -> Client:
    options = {"level": V5, "user": user, "password": user.encode(), **options}
    return await bridge.connect(client_id or user, **options)


async def retain(client: Client, topic: str, payload: bytes = b"x", **options: Any) -> bytes:
    """Set a retained message to which nobody subscribes; returns a refusal in its PUBACK, else 0."""
    packet = await client.exchange(publish(topic, payload, 1, 1, retain=True, level=V5, **options))
    assert packet.head == 0x40
    return b"\0" if packet.body[2:3] == b"\x10" else packet.body[2:3]


async def retained(bridge: Bridge) -> set[str]:
    """The topics of all retained messages, as a new subscriber gets them."""
    count = bridge.stat("retained")
    reader = await log_in(bridge, "bob", "reader")
    reader.send(subscribe(1, ("#", 0), level=V5))
    await reader.receive()
    topics = {(await reader.message()).topic for _ in range(count)}
    reader.disconnect()
    return topics


def test_who_fills_the_room_for_retained_messages_makes_room_for_others(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bridge: Bridge) -> None:
        flood = await log_in(bridge, "mallory")
        for number in range(10):
            assert await retain(flood, f"flood/{number}") == b"\0"
        assert await retain(flood, "flood/10") == b"\x97", "quota exceeded"
        with caplog.at_level(logging.WARNING):
            for name in ("ann", "bob"):
                device = await log_in(bridge, name)
                assert await retain(device, f"state/{name}") == b"\0"
        assert bridge.stat("dropped_retained_full") == 2
        assert "'flood/0' is dropped, for one of user 'ann': user 'mallory' has most" in caplog.text
        assert "'flood/1' is dropped, for one of user 'bob': user 'mallory' has most" in caplog.text
        kept = {f"flood/{number}" for number in range(2, 10)}
        assert await retained(bridge) == {"state/ann", "state/bob", *kept}
        assert await retain(flood, "flood/11") == b"\x97", "what it has lost it does not win back"
        await bridge.restart()
        assert await retained(bridge) == {"state/ann", "state/bob", *kept}
        flood, device = await log_in(bridge, "mallory"), await log_in(bridge, "ann")
        assert await retain(flood, "flood/12") == b"\x97", "also a restart does not tell them anew"
        for number in range(3):
            assert await retain(device, f"more/{number}") == b"\0"
        assert bridge.stat("retained") == 10

    with_bridge(tmp_path, test, users_file=file, retained_messages=10)


def test_two_who_want_all_of_the_room_for_retained_messages_get_half_each(tmp_path: Path, file: Path) -> None:
    async def test(bridge: Bridge) -> None:
        one, other = await log_in(bridge, "ann"), await log_in(bridge, "mallory")
        for number in range(10):
            await retain(one, f"one/{number}")
        codes = [await retain(other, f"other/{number}") for number in range(10)]
        assert codes == [b"\0"] * 5 + [b"\x97"] * 5
        assert [await retain(one, f"again/{number}") for number in range(3)] == [b"\x97"] * 3
        assert bridge.stat("dropped_retained_full") == 5, "and none goes back and forth"
        assert await retain(one, "one/9", b"newer") == b"\0", "a topic that it has may change"

    with_bridge(tmp_path, test, users_file=file, retained_messages=10)


def test_bytes_of_retained_messages_are_shared_too_and_properties_count(tmp_path: Path, file: Path) -> None:
    long = {p.USER_PROPERTY: [(b"", b"")] * 1_000}  # 5 KB on the wire, and some 100 KB in memory

    async def test(bridge: Bridge) -> None:
        flood = await log_in(bridge, "mallory")
        codes = [await retain(flood, f"flood/{number}", properties=long) for number in range(20)]
        assert codes == [b"\0"] * 7 + [b"\x97"] * 13
        device = await log_in(bridge, "ann")
        assert await retain(device, "state/ann", b"x" * 200_000) == b"\0"
        assert await retain(device, "state/large", b"x" * 990_000) == b"\x97", "it would have most"
        assert bridge.broker.router.retained.size <= 1_000_000
        assert await retained(bridge) == {"state/ann", *(f"flood/{number}" for number in range(1, 7))}

    with_bridge(tmp_path, test, users_file=file, retained_bytes=1_000_000)


@bridge_test(retained_messages=5)
async def test_strangers_at_one_address_take_no_retained_message_of_another(bridge: Bridge) -> None:
    device = await open_from(bridge, "127.0.0.2")
    await device.connect("device", level=V5)
    assert await retain(device, "state") == b"\0"
    for number in range(10):
        flood = await open_from(bridge, "127.0.0.3")
        await flood.connect(f"made-up-{number}", level=V5, will=(f"will/{number}", b"x", 1), will_retain=True)
        await retain(flood, f"flood/{number}")
        flood.abort()
        await until(lambda: bridge.stat("wills") == number + 1)  # noqa: B023
    assert bridge.stat("not_retained") > 0
    other = await open_from(bridge, "127.0.0.4")
    await other.connect("other", level=V5)
    assert await retain(other, "other") == b"\0"
    assert {one.topic for one in bridge.broker.router.retained.all()} >= {b"state", b"other"}


@bridge_test(sessions=3)
async def test_a_flood_of_sessions_from_one_address_ends_none_from_another(bridge: Bridge) -> None:
    async def leave(address: str, client_id: str) -> bytes:
        client = await open_from(bridge, address)
        packet = await client.connect(client_id, **STAYS)
        client.disconnect()
        assert await client.closed()
        return packet.body[:1]

    await leave("127.0.0.2", "device")
    for number in range(5):
        await leave("127.0.0.3", f"made-up-{number}")
    assert bridge.stat("ended_sessions") == 3
    await bridge.restart()
    for number in range(5, 8):
        await leave("127.0.0.3", f"made-up-{number}")
    assert await leave("127.0.0.2", "device") == b"\1", "its session is there, also after a restart"


def test_each_session_that_is_ended_is_named_with_the_number_of_its_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bridge: Bridge) -> None:
        sender = await bridge.connect("sender", level=V5)
        for number in range(6):
            client = await bridge.connect(f"a{number}", **STAYS)
            await client.exchange(subscribe(1, (f"to/{number}", 1), level=V5))
            client.disconnect()
            assert await client.closed()
            for _ in range(number):
                await sender.exchange(publish(f"to/{number}", b"x", 1, 1, level=V5))
        found = [line.partition(":")[0] for line in caplog.messages if "is ended" in line]
        assert found == [
            f"the session of client 'a{n}' is ended, with {n} messages queued for it" for n in range(4)
        ]
        assert bridge.stat("dropped_session_ended") == 0 + 1 + 2 + 3

    with_bridge(tmp_path, test, sessions=2)


def test_who_fills_the_memory_of_sessions_loses_messages_and_others_do_not(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bridge: Bridge) -> None:
        device = await log_in(bridge, "ann", **STAYS)
        await device.exchange(subscribe(1, ("ann", 1), level=V5))
        device.disconnect()
        for number in range(10):
            flood = await log_in(bridge, "mallory", f"made-up-{number}", **STAYS)
            await flood.exchange(subscribe(1, (f"flood/{number}", 1), level=V5))
            flood.disconnect()
            assert await flood.closed()
        sender = await log_in(bridge, "bob")
        for number in range(20):
            await sender.exchange(publish("ann", b"%d" % number, 1, 1, level=V5))
        with caplog.at_level(logging.WARNING):
            for number in range(40):
                await sender.exchange(publish(f"flood/{number % 10}", b"x" * 10_000, 1, 1, level=V5))
        memory = bridge.broker.sessions.memory
        await until(lambda: memory.total <= 300_000)
        assert bridge.stat("dropped_queue_full") > 10
        assert bridge.stat("ended_sessions") == 0
        for number in range(10):
            assert f"client 'made-up-{number}' loses messages" in caplog.text, "each is named"
        assert len(caplog.records) < bridge.stat("dropped_queue_full"), "but not with each message"
        assert "most is held by user 'mallory'" in caplog.text
        queues = [len(s.outbox) for s in bridge.broker.sessions.all() if s.client_id.startswith("made")]
        assert max(queues) - min(queues) <= 1, "its sessions lose alike"
        device = await log_in(bridge, "ann", **STAYS)
        assert [(await device.message()).payload for _ in range(20)] == [b"%d" % n for n in range(20)]
        for client_id in ("ann", *(f"made-up-{number}" for number in range(10))):
            bridge.broker.forget(bridge.broker.sessions.get(client_id))  # type: ignore[arg-type]
        sender.disconnect()
        await until(lambda: bridge.stat("sessions") == 0)
        assert memory.total == 0

    with_bridge(tmp_path, test, users_file=file, session_bytes=300_000)


@pytest.mark.parametrize("what", ["filters", "wills", "ids", "messages under way", "requests"])
def test_sessions_full_of_what_is_not_dropped_end_before_those_of_others(
    tmp_path: Path, file: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fill(flood: Client, number: int) -> None:
        if what == "filters":
            flood.send(subscribe(1, *((f"{number}/{n}" + "/+" * 50, 0) for n in range(10)), level=V5))
        elif what == "ids":
            flood.send(*(publish("nowhere", b"", 2, n, level=V5) for n in range(1, 800)))
        elif what == "requests":
            options = {"desiredStartSequenceNumber": 10**6, "readTimeoutMillis": 10**9}
            wait = {"requestId": "x" * 30_000, "streamName": "s", "readMessagesOptions": options}
            body = json.dumps(wait).encode()
            flood.send(publish(f"streambridge/made-up-{number}/readMessages", body, level=V5))
        elif what == "messages under way":
            flood.send(subscribe(1, ("flood", 1), level=V5))

    async def test(bridge: Bridge) -> None:
        device = await log_in(bridge, "ann", **STAYS)
        await device.exchange(subscribe(1, ("ann", 1), level=V5))
        floods = []
        for number in range(20):
            options = dict(STAYS)
            if what == "wills":
                options["will"] = ("will", b"x" * 60_000, 1)
            flood = await log_in(bridge, "mallory", f"made-up-{number}", **options)
            floods.append(flood)
            await fill(flood, number)
        if what == "messages under way":
            sender = await log_in(bridge, "bob")
            for _ in range(12):
                await sender.exchange(publish("flood", b"x" * 5_000, 1, 1, level=V5))
        await until(lambda: bridge.stat("ended_sessions") > 5)
        ended = [line for line in caplog.messages if "is ended, with " in line]
        assert len(ended) == bridge.stat("ended_sessions"), "each is named"
        await until(lambda: bridge.broker.sessions.memory.total <= 400_000)
        assert bridge.stat("refused_session_bytes") == bridge.stat("ended_sessions")
        while (packet := await floods[0].receive()).head != 0xE0:
            pass
        assert packet.body[:1] == b"\x97", "quota exceeded"
        sender = await log_in(bridge, "bob", "sender")
        await sender.exchange(publish("ann", b"open", 1, 1, level=V5))
        assert (await device.message()).payload == b"open"

    with_bridge(tmp_path, test, users_file=file, session_bytes=400_000)


def test_what_a_session_holds_is_counted_exactly_whatever_becomes_of_it(tmp_path: Path, file: Path) -> None:
    async def test(bridge: Bridge) -> None:
        memory = bridge.broker.sessions.memory
        client = await log_in(bridge, "ann", will=("w", b"x" * 100, 1), **STAYS)
        empty = memory.total
        await client.exchange(subscribe(1, ("a/+", 2), ("$share/g/b", 1), level=V5))
        await client.exchange(subscribe(2, ("a/+", 1), level=V5))
        sender = await log_in(bridge, "bob")
        for number in range(1, 4):
            await sender.exchange(publish("a/b", b"x" * 100, 1, number, level=V5))
            await client.message()
        await sender.exchange(publish("b", b"y", 1, 9, level=V5))
        await client.message()
        await client.exchange(publish("c", b"z", 2, 7, level=V5))
        await client.exchange(ack(0x62, 7))
        client.abort()
        await bridge.restart()
        client = await log_in(bridge, "ann", **STAYS)
        client.send(connect("x"))  # a second CONNECT ends it
        await until(lambda: bridge.stat("connections") == 0)
        client = await log_in(bridge, "ann", will=("w", b"x" * 100, 1), **STAYS)
        await client.exchange(unsubscribe(3, "a/+", "$share/g/b", level=V5))
        body = json.dumps({"requestId": "x" * 5_000}).encode()
        client.send(publish("streambridge/ann/listStreams", body, level=V5))
        await client.message()
        assert bridge.broker.sessions.memory.total == empty

    with_bridge(tmp_path, test, users_file=file)


@pytest.mark.parametrize("kind", ["pings", "what is denied"])
def test_one_read_full_of_small_packets_keeps_nobody_waiting(tmp_path: Path, kind: str) -> None:
    sent, answer = {
        "pings": (b"\xc0\0", b"\xd0\0"),
        "what is denied": (publish("$SYS/x", b"", 1, 7, level=V5), b"\x40\3\0\7\x87"),
    }[kind]
    world = World(tmp_path)
    world.streams.definitions["s"].by_itself = True
    wires = [world.connect(connect(name, level=V5, properties=PLAIN)) for name in ("device", "a", "b", "c")]
    for wire in wires:
        assert wire.got()[:1] == b"\x20"
    device, *floods = wires
    for flood in floods:
        flood.send(sent * 20_000)
    begun = sum(len(flood.transport.written) for flood in floods)
    assert begun < len(floods) * 20_000 * len(answer) // 4, "the rest waits for other turns"
    device.send(publish("in/device", b"", 1, 1, level=V5))
    assert device.got() == ack(0x40, 1)
    assert [flood.got() for flood in floods] == [answer * 20_000] * 3, "and nothing is lost"


class Socket(Transport):
    """The socket below a WebSocket."""

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.write(b"".join(pieces))


def test_one_read_full_of_tiny_frames_keeps_nobody_waiting(tmp_path: Path) -> None:
    """They made others wait for 18 s, and took 200 MB."""
    world = World(tmp_path)
    world.streams.definitions["s"].by_itself = True
    device = world.connect(connect("device", level=V5, properties=PLAIN))
    assert device.got()[:1] == b"\x20"
    socket = Socket()
    flood = WebSocket(Connection(world.server.connections, world.endpoint))
    flood.connection_made(socket)  # type: ignore[arg-type]
    flood.data_received(http() + frame(connect("flood")))
    world.run()
    socket.written.clear()
    halves = frame(b"\xc0") + frame(b"\0")
    flood.data_received(halves * 20_000)
    world.server.connections.reads.run()
    assert socket.written.count(b"\xd0\0") <= 2_000, "the rest waits for other turns"
    assert not socket.reading
    device.send(publish("in/device", b"", 1, 1, level=V5))
    assert device.got() == ack(0x40, 1)
    world.run()
    assert socket.written.count(b"\xd0\0") == 20_000, "and nothing is lost"
    assert socket.reading
    flood.data_received(frame(b"\xe0\0") + frame(b"", 8))
    world.run()
    assert socket.closed


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"\xc0\0", b"\xd0\0"),
        (subscribe(7, ("a/b", 0), level=V5), b"\x90\4\0\7\0\0"),
        (unsubscribe(7, "a/b", level=V5), b"\xb0\4\0\7\0\x11"),
    ],
)
def test_requests_that_are_no_messages_cost_the_same_of_a_budget(
    tmp_path: Path, sent: bytes, answer: bytes
) -> None:
    """They cost nothing: one client took all the time that there was with pings."""
    budget = Budget(name="all", per="address", messages_per_second=50, disconnect_after=0)
    world = World(tmp_path, budget=[budget])
    wire = world.connect(connect("flood", level=V5, properties=PLAIN))
    assert wire.got()[:1] == b"\x20"
    wire.send(sent * 200)
    assert 50 <= len(wire.got()) // len(answer) <= 52
    assert not wire.transport.reading
    seconds = 0
    while not wire.transport.reading:
        world.run(1.0)
        assert len(wire.got()) // len(answer) <= 60
        seconds += 1
    assert 3 <= seconds <= 5


def test_acknowledgements_cost_nothing_of_a_budget_of_messages(tmp_path: Path) -> None:
    """A device does not decide how many messages it gets, and so how many it acknowledges."""
    budget = Budget(name="all", per="address", messages_per_second=50, disconnect_after=0)
    world = World(tmp_path, budget=[budget])
    wire = world.connect(connect("device", level=V5, properties=PLAIN))
    assert wire.got()[:1] == b"\x20"
    wire.send(b"".join(ack(0x40, number) for number in range(1, 1_000)))
    wire.send(b"\xc0\0")
    assert wire.got() == b"\xd0\0"
    assert wire.transport.reading
