"""What acknowledgements say in MQTT 5: receipts, reasons, and ids of messages.

Costs 8 seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bridge.access.rules import AccessRule
from bridge.errors import InvalidRequest, StorageFailed
from bridge.model import Limits
from bridge.mqtt.settings import MqttConfig
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5
from tests.fakes.byhand import Wire, World

from .harness import (
    Bridge,
    Client,
    Packet,
    bridge_test,
    connect,
    copied,
    decoded,
    found_again,
    publish,
    run_async,
)
from .test_crash import CHILD

ASKED = {p.USER_PROPERTY: [(b"streambridge-receipts", b"true")]}
LASTING = {p.SESSION_EXPIRY: 60}


class Answer(NamedTuple):
    """A PUBACK or PUBREC, taken apart; `receipt` has "stream sequence duplicate" for each stream."""

    head: int
    reason: int
    receipt: list[str]
    why: str


def answer_of(packet: Packet) -> Answer:
    head, body = packet
    found, _ = p.read_properties(body, 3, len(body), head) if len(body) > 3 else ({}, 0)
    pairs = [(name.decode(), value.decode()) for name, value in found.get(p.USER_PROPERTY, ())]
    assert [name for name, _ in pairs] == ["stream", "sequence", "duplicate"] * (len(pairs) // 3)
    values = [value for _, value in pairs]
    receipt = [" ".join(values[at : at + 3]) for at in range(0, len(values), 3)]
    return Answer(head, body[2] if len(body) > 2 else 0, receipt, found.get(p.REASON_STRING, b"").decode())


def message(
    payload: bytes = b"x", *ids: bytes, topic: str = "in/a", qos: int = 1, number: int = 1, **options: Any
) -> bytes:
    """A PUBLISH with these message ids, usually one."""
    properties = {p.USER_PROPERTY: [(b"message-id", one) for one in ids]} if ids else {}
    return publish(topic, payload, qos, number, level=V5, properties=properties, **options)


async def device(bridge: Bridge, name: str = "d", **options: Any) -> Client:
    """A client that asks for receipts."""
    return await bridge.connect(name, level=V5, **{"properties": ASKED, **options})


async def ask(client: Client, *packets: bytes) -> Answer:
    return answer_of(await client.exchange(*packets))


@bridge_test
async def test_who_asks_at_connect_learns_where_each_message_is(bridge: Bridge) -> None:
    bridge.stream("another", "in/both")
    client = await device(bridge)
    client.send(*(message(number=number, qos=1 + number % 2) for number in range(1, 7)))
    for number in range(1, 7):
        got = await client.receive()
        assert got.body[:2] == bytes((0, number))
        assert answer_of(got) == Answer(0x50 if number % 2 else 0x40, 0, [f"s {number - 1} false"], "")
    both = await ask(client, message(topic="in/both", number=7))
    assert both.receipt == ["another 0 false", "s 6 false"]
    assert await client.exchange(message(topic="plain", number=8)) == Packet(0x40, b"\0\x08\x10"), "no stream"
    assert [one.sequence_number for one in await bridge.stored()] == list(range(7))


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {p.USER_PROPERTY: [(b"streambridge-receipts", b"yes"), (b"receipts", b"true")]},
        ASKED | {p.REQUEST_PROBLEM_INFO: 0},
        ASKED | {p.MAXIMUM_PACKET_SIZE: 40},
    ],
    ids=["not asked", "otherwise", "no problem information", "small packets"],
)
def test_others_get_acknowledgements_as_ever(tmp_path: Path, properties: p.Properties) -> None:
    """Request Problem Information 0 forbids User Properties (MQTT-3.1.2-29), as does too large a packet."""

    @bridge_test
    async def test(bridge: Bridge) -> None:
        client = await bridge.connect("d", level=V5, properties=properties)
        assert await client.exchange(message()) == Packet(0x40, b"\0\1")
        assert await client.exchange(message(b"x", b"id")) == Packet(0x40, b"\0\1")
        assert await client.exchange(message(b"x", b"id", qos=2, number=2)) == Packet(0x50, b"\0\2")

    test(tmp_path)


RULES = [AccessRule(publish=["in/#", "full", "streams/#", "plain/#"])]


@bridge_test(acl=RULES, retained_messages=1)
async def test_a_refusal_says_why(bridge: Bridge) -> None:
    bridge.stream("full", "full", limits=Limits(max_messages=0, discard="new"))
    client = await bridge.connect("d", level=V5)
    await client.exchange(message(retain=True))
    for topic, reason, why in (
        ("full", 0x97, "full"),
        ("streams/typo", 0x90, "there is no stream 'typo'"),
        ("elsewhere", 0x87, "it may not publish on 'elsewhere'"),
        ("plain/b", 0x97, "retained_messages = 1"),
    ):
        for qos in (1, 2):
            got = await ask(client, message(topic=topic, qos=qos, number=9, retain=topic == "plain/b"))
            assert got[:3] == (0x30 + qos * 0x10, reason, [])
            assert why in got.why
    for properties in ({p.REQUEST_PROBLEM_INFO: 0}, {p.MAXIMUM_PACKET_SIZE: 30}):
        plain = await bridge.connect("e", level=V5, properties=properties)
        assert await plain.exchange(message(topic="full")) == Packet(0x40, b"\0\1\x97")
    assert len(await bridge.stored("full")) == 0


@pytest.mark.parametrize("qos", [1, 2])
def test_a_message_with_an_id_is_stored_once(tmp_path: Path, qos: int) -> None:
    @bridge_test
    async def test(bridge: Bridge) -> None:
        head = 0x30 + qos * 0x10
        client = await device(bridge)
        assert await ask(client, message(b"1", b"a", qos=qos)) == (head, 0, ["s 0 false"], "")
        assert await ask(client, message(b"2", b"b", qos=qos, number=2)) == (head, 0, ["s 1 false"], "")
        assert await ask(client, message(b"1", b"a", qos=qos, number=3)) == (head, 0, ["s 0 true"], "")
        other = await ask(client, message(b"another payload", b"a", qos=3 - qos, number=4))
        assert other == (0x90 - head, 0, ["s 0 true"], "")
        client.send(message(b"QoS 0", b"b", qos=0))
        client.abort()
        client = await device(bridge)
        assert (await ask(client, message(b"1", b"a", qos=qos, number=9, dup=True))).receipt == ["s 0 true"]
        assert (await ask(client, message(b"3", qos=qos, number=5))).receipt == ["s 2 false"]
        stored = await bridge.stored()
        assert [one.payload for one in stored] == [b"1", b"2", b"3"]
        assert decoded(stored[0].headers)["user"] == [["message-id", "a"]]
        assert bridge.store.streams["s"].counters["deduplicated"] == 4

    test(tmp_path)


@bridge_test
async def test_an_id_belongs_to_its_user_and_without_one_to_its_client(bridge: Bridge) -> None:
    one, two = await device(bridge, "one"), await device(bridge, "two")
    assert (await ask(one, message(b"1", b"a"))).receipt == ["s 0 false"]
    assert (await ask(two, message(b"2", b"a"))).receipt == ["s 1 false"]
    # The rest by hand: nobody can be a client whose name and id run into each other's.
    bridge.broker.sessions.get("two").identity.user = "one"  # type: ignore[union-attr]
    assert (await ask(two, message(b"3", b"a"))).receipt == ["s 2 false"]
    bridge.broker.sessions.get("one").identity.user = "one"  # type: ignore[union-attr]
    assert (await ask(one, message(b"3", b"a"))).receipt == ["s 2 true"]
    bridge.broker.sessions.get("one").identity.user = "on"  # type: ignore[union-attr]
    assert (await ask(one, message(b"4", b"ea"))).receipt == ["s 3 false"]
    known = next(iter(bridge.store.streams["s"].window._numbers))  # type: ignore[union-attr]
    for forged in (known, known[:6]):
        with pytest.raises(InvalidRequest, match="must not begin"):
            await bridge.manager.append("s", b"x", message_id=forged)
    assert await bridge.manager.append("s", b"x", message_id=b"a") == 4
    assert (await ask(one, message(b"5", b"e"))).receipt == ["s 5 false"]


@bridge_test
async def test_a_wrong_id_is_refused_with_a_reason_and_nothing_is_stored(bridge: Bridge) -> None:
    client = await device(bridge)
    for ids, why in (
        ((b"a", b"a"), "2 User Properties message-id"),
        ((b"",), "0 bytes"),
        ((b"x" * 256,), "256 bytes; it must have 1 to 255"),
    ):
        for qos in (1, 2):
            got = await ask(client, message(b"x", *ids, qos=qos))
            assert got[:3] == (0x30 + qos * 0x10, 0x83, [])
            assert why in got.why
        client.send(message(b"x", *ids, qos=0))
    assert await client.alive()
    assert (bridge.stat("rejected_invalid"), bridge.stat("dropped_invalid")) == (6, 3)
    assert await bridge.stored() == []
    assert (await ask(client, message(b"x", b"x" * 255))).receipt == ["s 0 false"]
    assert await client.exchange(message(b"x", b"a", b"a", topic="plain")) == Packet(0x40, b"\0\1\x10")


@bridge_test
async def test_each_stream_of_a_message_knows_its_id_and_a_full_one_too(bridge: Bridge) -> None:
    bridge.stream("tiny", "in/two/#", limits=Limits(max_messages=1, discard="new"))
    client = await device(bridge)
    assert (await ask(client, message(b"1", b"a", topic="in/two/a"))).receipt == ["s 0 false", "tiny 0 false"]
    assert (await ask(client, message(b"2", b"b", topic="in/two/a"))).reason == 0x97
    assert (await ask(client, message(b"1", b"a", topic="in/two/a"))).receipt == ["s 0 true", "tiny 0 true"]
    assert (await ask(client, message(b"2", b"b", topic="in/a"))).receipt == ["s 1 false"]
    await bridge.manager.purge("tiny")
    got = await ask(client, message(b"2", b"b", topic="in/two/a", qos=2))
    assert got.receipt == ["s 1 true", "tiny 1 false"]
    assert await bridge.payloads() == [b"1", b"2"]


@bridge_test(refused_stream="refused")
async def test_the_receipt_of_a_message_in_the_refused_stream_names_that(bridge: Bridge) -> None:
    bridge.stream("refused")
    client = await device(bridge)
    assert (await ask(client, message(topic="streams/typo"))).receipt == ["refused 0 false"]


@bridge_test
async def test_subscribers_get_a_repetition_as_ever(bridge: Bridge) -> None:
    subscriber = await bridge.connect("sub", level=V5)
    await subscriber.subscribe(("in/#", 1))
    client = await device(bridge)
    for expected in ("s 0 false", "s 0 true"):
        assert (await ask(client, message(b"1", b"a"))).receipt == [expected]
        assert (await subscriber.message()).payload == b"1"


@pytest.mark.parametrize("way", ["restart", "kill"])
@pytest.mark.parametrize("options", [{}, {"deduplication_window_millis": 60_000}, {"flush_on_write": True}])
def test_an_id_is_known_after_a_restart_and_as_long_as_the_window(
    tmp_path: Path, way: str, options: dict[str, Any]
) -> None:
    @bridge_test
    async def test(bridge: Bridge) -> None:
        bridge.stream("t", "t", **options)
        client = await device(bridge)
        for qos in (1, 2):
            got = await ask(client, message(b"%d" % qos, b"%d" % qos, topic="t", qos=qos))
            assert got.receipt == [f"t {qos - 1} false"]
        if way == "restart":
            await bridge.restart()
            await repeat(bridge)
        else:
            async with found_again(bridge, copied(bridge)) as again:
                await repeat(again)

    async def repeat(bridge: Bridge) -> None:
        client = await device(bridge)
        for qos in (1, 2):
            got = await ask(client, message(b"%d" % qos, b"%d" % qos, topic="t", qos=3 - qos))
            assert got.receipt == [f"t {qos - 1} true"]
        assert await bridge.payloads("t") == [b"1", b"2"]
        bridge.system.passed += 121
        assert (await ask(client, message(b"3", b"3", topic="t"))).receipt == ["t 2 false"]
        assert (await ask(client, message(b"1", b"1", topic="t"))).receipt == ["t 3 false"]

    test(tmp_path)


def test_a_device_that_repeats_until_it_is_answered_is_stored_once_over_kills(tmp_path: Path) -> None:
    """SIGKILL under load, again and again; the device has a clean session and QoS 1."""

    async def life(sent: int, until: int) -> int:
        """One life of the service: messages from number `sent` on; returns the first unacknowledged one."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, str(tmp_path),
            stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert process.stdout is not None
        client = Client(*await asyncio.open_connection("127.0.0.1", int(await process.stdout.readline())))
        await client.connect("d", level=V5)
        window = 20
        client.send(*(_numbered(number) for number in range(sent, sent + window)))
        while sent < until:
            assert await client.receive() == Packet(0x40, _packet_id(sent))
            client.send(_numbered(sent + window))
            sent += 1
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        with pytest.raises(ConnectionError):
            while True:
                got = await client.receive()
                assert got == Packet(0x40, _packet_id(sent))
                sent += 1
        client.abort()
        return sent

    async def main() -> None:
        sent = 0
        for until in (150, 300):
            sent = await life(sent, until)
        bridge = Bridge(tmp_path, MqttConfig(listen=["tcp://127.0.0.1:0"]))
        await bridge.start()
        try:
            for odd, name in enumerate(("s", "synced")):
                stored = await bridge.payloads(name)
                acknowledged = [b"%d" % number for number in range(odd, sent, 2)]
                assert stored[: len(acknowledged)] == acknowledged
                assert len(set(stored)) == len(stored)
        finally:
            await bridge.stop()

    run_async(main())


def _packet_id(number: int) -> bytes:
    return (number % 1000 + 1).to_bytes(2, "big")


def _numbered(number: int) -> bytes:
    """A message for one stream of the child, or for the other."""
    payload = b"%d" % number
    return message(payload, payload, topic=("in/a", "synced/a")[number % 2], number=number % 1000 + 1)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_message_whose_commit_failed_is_no_duplicate_and_one_of_a_pending_one_waits(world: World) -> None:
    stream = world.streams.definitions["s"]
    wire = world.connect(connect("d", level=V5, properties=ASKED))
    wire.got()
    wire.send(message(b"1", b"a", number=1) + message(b"1", b"a", number=2))
    assert wire.got() == b"", "the second one waits for the commit of the first"
    stream.commit(StorageFailed("the disk is gone"))
    assert wire.got() == b"\xe0\2\x83\0"
    wire = world.connect(connect("d", level=V5, properties=ASKED))
    wire.got()
    wire.send(message(b"1", b"a", number=1) + message(b"1", b"a", number=2))
    stream.commit()
    first = wire.got()
    size = 2 + first[1]
    assert answer_of(Packet(first[0], first[2:size])).receipt == ["s 0 false"]
    assert answer_of(Packet(first[size], first[size + 2 :])).receipt == ["s 0 true"]
    assert stream.payloads == [b"1"]


def test_a_repetition_by_id_hides_no_qos_2_message_that_waits_for_its_other_stream(world: World) -> None:
    """The replay point stays below it: after a kill its packet id is found in the stream that has it."""
    stream, other = world.streams.definitions["s"], world.streams.definitions["other"]

    def device(name: str) -> Wire:
        wire = world.connect(connect(name, level=V5, clean=False, properties=LASTING))
        wire.got()
        return wire

    one, two = device("one"), device("two")
    two.send(message(b"0", b"a", qos=2, number=1))
    stream.commit()
    two.got()
    one.send(message(b"1", topic="in/both", qos=2, number=2))
    stream.commit()
    two.send(message(b"0", b"a", qos=2, number=3))
    stream.commit()
    assert two.got() == b"\x50\2\0\3"
    assert one.got() == b""
    world.kill()
    one = device("one")
    one.send(message(b"1", topic="in/both", qos=2, number=2, dup=True))
    other.commit()
    stream.commit()
    assert one.got() == b"\x50\2\0\2"
    assert (stream.payloads, other.payloads) == ([b"0", b"1"], [b"1"])
