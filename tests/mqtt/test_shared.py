"""Shared subscriptions (MQTT 5 section 4.8.2): `$share/<group>/<filter>`.

Costs 6 seconds.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bridge.access.rules import AccessRule
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5, V311
from tests.fakes.byhand import Wire, World

from .harness import (
    PING,
    Bridge,
    Client,
    Packet,
    Published,
    ack,
    bridge_test,
    connect,
    copied,
    found_again,
    publish,
    subscribe,
    unsubscribe,
    until,
)
from .test_v5 import properties_of

LASTING = {p.SESSION_EXPIRY: 100}


async def member(
    bridge: Bridge, name: str, *filters: str, qos: int = 1, level: int = V5, **options: Any
) -> Client:
    """A client that has joined `$share/g/...` of each filter."""
    client = await bridge.connect(name, level=level, **options)
    for one in filters:
        assert await client.subscribe((f"$share/g/{one}", qos)) == bytes((qos,))
    return client


async def send(client: Client, topic: str, payload: bytes, qos: int = 1, packet_id: int = 1) -> None:
    client.send(publish(topic, payload, qos, packet_id, level=client.level))
    if qos:
        assert (await client.receive()).head == 0x30 + qos * 0x10


async def came(client: Client) -> list[Published]:
    """What has come so far; nothing of it is acknowledged."""
    found = []
    client.send(b"\xc0\0")
    while (got := await client.receive()) != Packet(0xD0, b""):
        found.append(client.parse(*got))
    return found


async def payloads(client: Client) -> list[bytes]:
    return [one.payload for one in await came(client)]


@pytest.mark.parametrize("level", [V311, V5])
@pytest.mark.parametrize("topic", ["plain/x", "in/x"])
def test_each_message_goes_to_one_member_in_turn_and_to_every_other_subscription(
    tmp_path: Path, level: int, topic: str
) -> None:
    @bridge_test
    async def test(bridge: Bridge) -> None:
        one, two = [await member(bridge, name, f"{topic[:-1]}+", level=level) for name in ("one", "two")]
        other = await bridge.connect("other", level=level)
        await other.subscribe((f"$share/h/{topic[:-1]}+", 1), packet_id=1)
        all_of_them = await bridge.connect("all", level=level)
        await all_of_them.subscribe(("#", 0))
        exact = await bridge.connect("exact", level=level)
        await exact.subscribe((f"$share/g/{topic}", 1))
        publisher = await bridge.connect("p")
        for number in range(6):
            await send(publisher, topic, b"%d" % number)
        assert await payloads(one) == [b"0", b"2", b"4"]
        assert await payloads(two) == [b"1", b"3", b"5"]
        for client in (other, all_of_them, exact):
            assert await payloads(client) == [b"%d" % number for number in range(6)]
        assert len(await bridge.stored()) == (6 if topic == "in/x" else 0)
        assert bridge.stat("shared_subscriptions") == 3

    test(tmp_path)


@bridge_test
async def test_a_member_has_the_qos_identifier_and_retain_flag_of_its_own_subscription(
    bridge: Bridge,
) -> None:
    one = await bridge.connect("one", level=V5)
    await one.subscribe(("$share/g/t", 0 | 8), properties={p.SUBSCRIPTION_ID: 7})
    two = await bridge.connect("two", level=V5)
    await two.subscribe(("$share/g/t", 2), properties={p.SUBSCRIPTION_ID: 8})
    publisher = await bridge.connect("p")
    for number in (1, 2):
        await publisher.exchange(publish("t", b"x", 2, number, retain=True))
    (first,), (second,) = await came(one), await came(two)
    assert (first.qos, first.retain, properties_of(first.properties)) == (0, True, {p.SUBSCRIPTION_ID: [7]})
    assert (second.qos, second.retain, properties_of(second.properties)) == (
        2,
        False,
        {p.SUBSCRIPTION_ID: [8]},
    )
    late = await member(bridge, "late", "t")
    assert await late.silent(), "a new member gets nothing that is retained"
    assert await one.subscribe(("$share/g/t", 1)) == b"\1"
    assert await one.silent(), "nor does one that changes its subscription"
    assert bridge.stat("shared_subscriptions") == 1
    for client in (one, two, late):
        assert (await client.exchange(unsubscribe(9, "$share/g/t", level=V5))).body == b"\0\x09\0\0"
    assert bridge.stat("shared_subscriptions") == 0
    await send(publisher, "t", b"y", packet_id=3)
    assert [await payloads(client) for client in (one, two, late)] == [[], [], []]


@bridge_test
async def test_a_message_goes_to_a_member_that_can_take_it(bridge: Bridge) -> None:
    busy = await member(bridge, "busy", "t/#", properties={p.RECEIVE_MAXIMUM: 1})
    away = await member(bridge, "away", "t/#", clean=False, properties=LASTING)
    away.abort()
    await until(lambda: bridge.stat("connections") == 1)
    small = await member(bridge, "small", "t/#", properties={p.MAXIMUM_PACKET_SIZE: 100})
    publisher = await bridge.connect("p")
    await send(publisher, "t/1", b"x" * 200)
    assert await payloads(busy) == [b"x" * 200]
    for number in range(3):
        await send(publisher, "t/2", b"%d" % number)
    assert await payloads(small) == [b"0", b"1", b"2"], "the other one may be sent no more"
    small.disconnect()
    assert await small.closed()
    # What it had not acknowledged is queued for the one that is connected; so is what comes now.
    await send(publisher, "t/3", b"3")
    busy.send(ack(0x40, 1))
    assert await payloads(busy) == [b"0"]
    busy.disconnect()
    assert await busy.closed()
    await send(publisher, "t/4", b"4")
    publisher.send(publish("t/4", b"none of QoS 0 is kept for a client that is away", 0))
    away = await bridge.connect("away", level=V5, clean=False, properties=LASTING)
    assert await payloads(away) == [b"0", b"1", b"2", b"3", b"4"]
    await send(publisher, "t/5", b"y" * 200)
    assert bridge.stat("dropped_too_large") == 0
    assert bridge.stat("reassigned") == 3 + 4


@bridge_test(queued_messages=2)
async def test_those_away_share_by_the_length_of_their_queues_and_a_full_one_comes_last(
    bridge: Bridge,
) -> None:
    stuck = await member(bridge, "stuck", "t", properties={p.RECEIVE_MAXIMUM: 1})
    for name in ("one", "two"):
        (await member(bridge, name, "t", clean=False, properties=LASTING)).abort()
    await until(lambda: bridge.stat("connections") == 1)
    publisher = await bridge.connect("p")
    for number in range(7):
        await send(publisher, "t", b"%d" % number)
    assert bridge.stat("dropped_queue_full") == 0
    assert await payloads(stuck) == [b"0"]
    for name, expected in (("one", 2), ("two", 2)):
        client = await bridge.connect(name, level=V5, clean=False, properties=LASTING)
        assert len(await payloads(client)) == expected
        client.abort()
    await send(publisher, "t", b"one too many of them all")
    await until(lambda: bridge.stat("dropped_queue_full") == 0)


@pytest.mark.parametrize("end", ["lost", "DISCONNECT", "forgotten", "clean start", "expired"])
def test_when_a_session_ends_others_get_what_it_had_not_acknowledged(tmp_path: Path, end: str) -> None:
    """In flight at QoS 1, queued at QoS 1 and 2; never what is in flight at QoS 2 (MQTT-4.8.2-5)."""

    @bridge_test(hurry=100)
    async def test(bridge: Bridge) -> None:
        session = {} if end in ("lost", "DISCONNECT") else LASTING
        one = await member(
            bridge, "one", "t/#", qos=2, properties={p.RECEIVE_MAXIMUM: 2, **session}, clean=False
        )
        await one.subscribe(("own", 1), packet_id=2)
        publisher = await bridge.connect("p")
        for number, qos in enumerate((1, 2, 1, 2), 1):
            await send(publisher, f"t/{number}", b"%d" % number, qos, number)
        await send(publisher, "own", b"of its own subscription", 1, 9)
        assert await payloads(one) == [b"1", b"2"]
        two = await member(bridge, "two", "t/#", qos=2)
        if end == "DISCONNECT":
            one.disconnect()
        elif end == "forgotten":
            bridge.broker.forget(bridge.broker.sessions.get("one"))  # type: ignore[arg-type]
        elif end == "clean start":
            await bridge.connect("one", level=V5)
        else:
            one.abort()
        await until(lambda: bridge.stat("reassigned") == 3)
        found = [(one.payload, one.qos, one.dup) for one in await came(two)]
        assert found == [(b"1", 1, False), (b"3", 1, False), (b"4", 2, False)]

    test(tmp_path)


@bridge_test
async def test_a_message_that_a_member_refuses_goes_to_nobody_else(bridge: Bridge) -> None:
    one = await member(bridge, "one", "t", qos=2)
    publisher = await bridge.connect("p")
    await send(publisher, "t", b"1", 1)
    await send(publisher, "t", b"2", 2, 2)
    first, second = await came(one)
    two = await member(bridge, "two", "t", qos=2)
    one.send(b"\x40\3" + first.packet_id.to_bytes(2, "big") + b"\x80")
    one.send(b"\x50\3" + second.packet_id.to_bytes(2, "big") + b"\x97")
    assert await one.silent()
    one.disconnect()
    assert await one.closed()
    assert await two.silent()
    assert bridge.stat("reassigned") == 0


@bridge_test
async def test_a_member_that_comes_back_gets_what_it_had_not_acknowledged(bridge: Bridge) -> None:
    one = await member(bridge, "one", "t", qos=2, clean=False, properties=LASTING)
    publisher = await bridge.connect("p")
    await send(publisher, "t", b"1", 1)
    await send(publisher, "t", b"2", 2, 2)
    assert len(await came(one)) == 2
    two = await member(bridge, "two", "t", qos=2)
    one.abort()
    await until(lambda: bridge.stat("connections") == 2)
    assert await two.silent()
    one = await bridge.connect("one", level=V5, clean=False, properties=LASTING)
    assert [(one.payload, one.dup) for one in await came(one)] == [(b"1", True), (b"2", True)]


@pytest.mark.parametrize("way", ["stop", "kill"])
def test_copies_and_members_survive_a_restart(tmp_path: Path, way: str) -> None:
    """Each message is there once, also for a client that has an ordinary subscription for it."""

    @bridge_test
    async def test(bridge: Bridge) -> None:
        for name in ("one", "two"):
            client = await member(bridge, name, "t/+", clean=False, properties=LASTING)
            if name == "two":
                assert await client.subscribe(("t/#", 1)) == b"\1"
            client.abort()
        await until(lambda: bridge.stat("connections") == 0)
        publisher = await bridge.connect("p")
        for number in range(4):
            await send(publisher, "t/x", b"%d" % number)
        if way == "stop":
            await bridge.restart()
            await look(bridge)
        else:
            async with found_again(bridge, copied(bridge)) as again:
                await look(again)

    async def look(bridge: Bridge) -> None:
        assert bridge.stat("shared_subscriptions") == 1
        assert bridge.stat("sessions") == 2
        two = await bridge.connect("two", level=V5, clean=False, properties=LASTING)
        found = await payloads(two)
        assert sorted(found) == [b"0", b"1", b"1", b"2", b"3"], "then its queue was longer"
        await bridge.connect("one", level=V5)  # with a new session
        assert await payloads(two) == [b"0", b"2", b"3"], "what waited for the other one"

    test(tmp_path)


@bridge_test
async def test_wrong_forms_are_refused(bridge: Bridge) -> None:
    wrong = ["$share/g", "$share/", "$share//t", "$share/g/", "$share/+/t", "$share/g#/t", "$share/#",
             "$share/g/a/#/b", "$share/g/" + "x/" * 64]  # fmt: skip
    for level, code in ((V5, b"\x8f"), (V311, b"\x80")):
        client = await bridge.connect("c", level=level)
        asked = [(one, 0) for one in wrong]
        assert await client.subscribe(*asked, ("$share/g/ok", 0)) == code * len(wrong) + b"\0"
        assert await client.alive()
    client = await bridge.connect("c", level=V5)
    client.send(subscribe(1, ("$share/g/t", 1 | 4), level=V5))
    assert await client.receive() == Packet(0xE0, b"\x82\0"), "No Local"
    assert await client.closed()
    assert bridge.stat("shared_subscriptions") == 0


@bridge_test
async def test_a_bridge_may_share_though_it_wants_none_of_its_own_messages_back(bridge: Bridge) -> None:
    client = await bridge.connect("b", level=0x84)
    assert await client.subscribe(("$share/g/t", 1)) == b"\1"
    client.send(publish("t", b"x", 1, 1))
    assert {(await client.receive()).head & 0xF0 for _ in range(2)} == {0x30, 0x40}


RULES = [
    AccessRule(publish=["#"]),
    AccessRule(user="", subscribe=["t/#"], read=["t/%c/#", "t/all"]),
]


@bridge_test(acl=RULES, subscriptions=2)
async def test_a_member_needs_the_rights_of_an_ordinary_subscription(bridge: Bridge) -> None:
    one, two = await member(bridge, "one", "t/#"), await member(bridge, "two", "t/#")
    assert await one.subscribe(("$share/g/#", 0), ("$share/t/x", 0)) == b"\x87\x87"
    publisher = await bridge.connect("p")
    for number in range(4):
        await send(publisher, "t/two/x", b"%d" % number)
    assert await payloads(one) == []
    assert await payloads(two) == [b"0", b"1", b"2", b"3"]
    two.disconnect()
    assert await two.closed()
    assert await one.silent(), "it may not read them"
    await send(publisher, "t/all", b"x")
    assert await payloads(one) == [b"x"]
    assert await one.subscribe(("t/1", 0), ("$share/g/t/2", 0)) == b"\0\x97", "at most two subscriptions"


@bridge_test(acl=RULES)
async def test_a_reload_takes_a_member_the_messages_that_it_may_no_longer_read(bridge: Bridge) -> None:
    one, two = await member(bridge, "one", "t/#"), await member(bridge, "two", "t/#")
    publisher = await bridge.connect("p")
    for number in range(2):
        await send(publisher, "t/all", b"%d" % number)
    assert (len(await came(one)), len(await came(two))) == (1, 1)
    rules = [AccessRule(publish=["#"]), AccessRule(user="", subscribe=["t/#"], read=["t/%c/#"])]
    bridge.server.reload(msgspec.structs.replace(bridge.config, acl=rules))
    for number in range(2):
        await send(publisher, "t/all", b"%d" % number)
        await send(publisher, "t/one/x", b"%d" % number)
    assert await payloads(one) == [b"0", b"1"]
    assert await payloads(two) == []


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, in_flight=3)


def test_however_many_members_are_away_the_one_that_is_there_gets_the_messages(world: World) -> None:
    asked = subscribe(1, ("$share/g/t", 0), level=V5)
    wires = [
        world.connect(connect(f"c{number}", level=V5, clean=False, properties=LASTING) + asked)
        for number in range(50)
    ]
    publisher = world.connect(connect("p"))
    for wire in (publisher, *wires):
        wire.got()
    publisher.send(publish("t", b"x") * 50)
    assert {wire.got() for wire in wires} == {publish("t", b"x", level=V5)}
    here = wires.pop(25)
    for wire in wires:
        wire.lose()
    publisher.send(publish("t", b"x") * 50)
    assert here.got() == publish("t", b"x", level=V5) * 50
    back = world.connect(connect("c0", level=V5, clean=False, properties=LASTING))
    back.got()
    publisher.send(publish("t", b"x") * 50)
    assert here.got() == back.got() == publish("t", b"x", level=V5) * 25


def test_after_a_kill_a_qos_2_message_in_flight_still_goes_to_nobody_else(world: World) -> None:
    asked = connect("one", clean=False, level=V5, properties={p.RECEIVE_MAXIMUM: 1, **LASTING})
    one = world.connect(asked + subscribe(1, ("$share/g/t", 2), level=V5))
    one.got()
    publisher = world.connect(connect("p"))
    publisher.got()
    publisher.send(publish("t", b"1", 2, 1) + publish("t", b"2", 2, 2))
    assert one.got() == publish("t", b"1", 2, 1, level=V5)
    publisher.got()
    world.kill()
    two = world.connect(connect("two") + subscribe(1, ("$share/g/t", 2)))
    assert two.got() == b"\x20\2\0\0" + b"\x90\3\0\1\2"
    one = world.connect(connect("one", level=V5))
    one.got()
    assert two.got() == publish("t", b"2", 2, 1), "it was queued, and never sent"


@pytest.mark.parametrize("seed", range(15))
def test_whatever_members_do_each_message_is_acknowledged_exactly_once(world: World, seed: int) -> None:
    """Members come, go, acknowledge, and end their sessions; the service is killed."""
    chance = random.Random(seed)
    publisher = world.connect(connect("p"))
    publisher.got()
    wires: dict[str, Wire] = {}
    here: dict[str, dict[bytes, bytes]] = {}  # by member: packet ids, and what came with them
    acknowledged: Counter[bytes] = Counter()
    sent, names = 0, ["a", "b", "c"]

    def come(name: str, *, clean: bool = False) -> None:
        asked = connect(name, clean=clean, level=V5, properties=LASTING)
        wires[name] = world.connect(asked + subscribe(1, ("$share/g/t", 1), level=V5))
        here[name] = {}

    def take() -> None:
        for name, wire in wires.items():
            here[name] |= _messages(wire.got())
        assert not acknowledged.keys() & {one for some in here.values() for one in some.values()}

    def acknowledge(name: str) -> None:
        acknowledged.update(here[name].values())
        wires[name].send(PING + b"".join(b"\x40\2" + packet_id for packet_id in here[name]))
        here[name] = {}

    for name in names:
        come(name)
    take()
    for _ in range(150):
        name = chance.choice(names)
        match chance.choice(["publish"] * 4 + ["acknowledge"] * 2 + ["leave", "come", "clean", "kill"]):
            case "publish":
                publisher.send(publish("t", b"%d" % sent, 1, 1))
                assert publisher.got() == b"\x40\2\0\1"
                sent += 1
            case "acknowledge" if name in wires:
                acknowledge(name)
            case "leave" if name in wires:
                wires.pop(name).lose()
                here[name] = {}
            case "come" if name not in wires:
                come(name)
            case "clean":
                if name in wires:
                    wires.pop(name).lose()
                come(name, clean=True)
            case "kill" if chance.random() < 0.3:
                world.kill()
                wires.clear()
                here.clear()
                publisher = world.connect(connect("p"))
                publisher.got()
        take()
    for name in names:
        if name not in wires:
            come(name)
    take()
    while any(here.values()):
        for name in names:
            acknowledge(name)
        take()
    assert sent > 30
    assert acknowledged == Counter(b"%d" % number for number in range(sent))


def _messages(data: bytes) -> dict[bytes, bytes]:
    """The payloads of the QoS 1 messages on "t" among an MQTT 5 client's packets, by packet id."""
    found = {}
    while data:
        head, size = data[0], data[1]
        body, data = data[2 : 2 + size], data[2 + size :]
        if head & 0xF6 == 0x32:
            found[body[3:5]] = body[6:]
    return found


def test_however_many_members_are_away_the_one_that_stays_gets_every_message(tmp_path: Path) -> None:
    @bridge_test
    async def test(bridge: Bridge) -> None:
        stays = await member(bridge, "stays", "plain/+")
        sender = await bridge.connect("sender", level=V5)
        others = []
        for number in range(40):
            other = await member(bridge, f"away-{number}", "plain/+", clean=False, properties=LASTING)
            await other.subscribe(("own", 1), packet_id=2)  # an ordinary subscription makes no difference
            others.append(other)
        await send(sender, "plain/x", b"the route knows all of them")
        for other in others:
            other.disconnect()
        await until(lambda: bridge.stat("connections") == 2)
        await came(stays)
        sent = [b"%d" % number for number in range(50)]
        for payload in sent:
            await send(sender, "plain/x", payload)
        assert await payloads(stays) == sent

    test(tmp_path)
