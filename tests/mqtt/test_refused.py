"""`refused_stream`: messages that their own stream can never store are kept there, and acknowledged."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bridge.access.rules import AccessRule, Deny
from bridge.model import Limits
from bridge.mqtt.settings import ListenerTable
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5, V311

from .harness import (
    PLAIN,
    Bridge,
    Packet,
    ack,
    bridge_test,
    copied,
    decoded,
    found_again,
    publish,
    run_async,
    running,
    until,
)

SMALL = {"max_size": 4096, "stream_segment_size": 2048}
BIG = b"x" * 5000
RECEIVED = 8  # the kind of journal record that has the id of a QoS 2 message


async def kept(bridge: Bridge) -> list[tuple[bytes, bytes, str, str]]:
    """What was kept: topic, payload, client, and the kind of the reason."""
    found = []
    for message in await bridge.stored("refused"):
        headers = decoded(message.headers)
        kind, _, text = headers["refused"].partition(": ")
        assert text, headers
        found.append((message.topic, message.payload, headers["client"], kind))
    return found


@bridge_test(refused_stream="refused")
async def test_a_3_1_1_device_gets_on_when_a_message_can_never_be_stored(bridge: Bridge) -> None:
    bridge.stream("refused")
    bridge.stream("small", "small", **SMALL)
    bridge.stream("limited", "limited/size", limits=Limits(max_message_size=10))
    bridge.stream("few", "limited/bytes", limits=Limits(max_bytes=10, discard="new"))
    client = await bridge.connect("dev")
    topics = ("small", "streams/typo", "limited/size", "limited/bytes")
    for number, topic in enumerate(topics, 1):
        assert await client.exchange(publish(topic, BIG, 1, number)) == Packet(0x40, bytes((0, number)))
        assert await client.exchange(publish("in/next", topic.encode(), 1, 9)) == Packet(0x40, b"\0\x09")
    client.send(publish("small", BIG))
    assert await client.exchange(publish("in/next", b"last", 1, 9)) == Packet(0x40, b"\0\x09")
    assert await kept(bridge) == [
        (b"small", BIG, "dev", "too_large"),
        (b"streams/typo", BIG, "dev", "no_stream"),
        (b"limited/size", BIG, "dev", "too_large"),
        (b"limited/bytes", BIG, "dev", "too_large"),
        (b"small", BIG, "dev", "too_large"),
    ]
    assert await bridge.payloads() == [*(topic.encode() for topic in topics), b"last"]
    assert (bridge.stat("kept_too_large"), bridge.stat("kept_no_stream")) == (4, 1)


@bridge_test(refused_stream="refused")
async def test_a_refused_message_goes_nowhere_else(bridge: Bridge) -> None:
    bridge.stream("refused")
    bridge.stream("small", "both/#", **SMALL)
    bridge.stream("large", "both/#")
    subscriber = await bridge.connect("s")
    await subscriber.subscribe(("both/#", 1))
    client = await bridge.open()
    await client.connect("c", level=V5)
    properties = {p.USER_PROPERTY: [(b"unit", b"K")]}
    sent = publish("both/a", BIG, 1, 1, retain=True, level=V5, properties=properties)
    assert await client.exchange(sent) == Packet(0x40, b"\0\1"), "an MQTT 5 client gets no refusal either"
    assert await subscriber.silent()
    assert (bridge.stat("retained"), await bridge.payloads("large")) == (0, [])
    (message,) = await bridge.stored("refused")
    headers = decoded(message.headers)
    assert (headers["user"], headers["retain"]) == ([["unit", "K"]], True)


@bridge_test(refused_stream="refused", acl=[AccessRule(user="*", publish=["small"], subscribe=["#"])])
async def test_what_may_succeed_later_and_what_a_client_can_be_told_is_refused_as_ever(
    bridge: Bridge,
) -> None:
    bridge.stream("refused")
    bridge.stream("small", "small", **SMALL)
    client = await bridge.open()
    await client.connect("c", level=V5, properties=PLAIN)
    codes = set()
    for number in range(1, 20):
        codes.add((await client.exchange(publish("small", b"x" * 500, 1, number, level=V5))).body[2:])
    assert codes == {b"", b"\x97"}, "full"
    assert (await client.exchange(publish("streams/typo", b"", 1, 1, level=V5))).body[2] == 0x87
    old = await bridge.connect("old")
    old.send(publish("small", b"x" * 500, 1, 1))
    assert await old.closed()
    assert await bridge.stored("refused") == []


RULES = [AccessRule(user="*", publish=["in/#", "free/+"], subscribe=["#"], deny=Deny(publish=["in/secret"]))]
FORBIDDEN = ("in/secret", "nowhere", "streams/in", "streams/typo")  # with a stream, without, with, with none


@bridge_test(refused_stream="refused", acl=RULES)
async def test_what_the_rules_forbid_a_3_1_1_device_is_kept_and_the_device_gets_on(bridge: Bridge) -> None:
    bridge.stream("refused")
    watcher = await bridge.connect("watcher")
    await watcher.subscribe(("nowhere", 1))
    client = await bridge.connect("dev")
    expected = []
    for number, (topic, qos) in enumerate(((t, q) for t in FORBIDDEN for q in (0, 1, 2)), 1):
        sent = publish(topic, b"%d" % number, qos, number, retain=number % 2 == 0)
        if qos:
            assert await client.exchange(sent) == Packet(0x30 + 0x10 * qos, bytes((0, number)))
        else:
            client.send(sent)
        assert await client.exchange(publish("in/next", b"%d" % number, 1, 99)) == Packet(0x40, b"\0\x63")
        expected.append((topic.encode(), b"%d" % number, "dev", "not_allowed"))
    assert await kept(bridge) == expected
    assert bridge.stat("kept_not_allowed") == len(expected)
    assert await bridge.payloads() == [one[1] for one in expected], "nothing that is forbidden"
    assert await watcher.silent()
    assert bridge.stat("retained") == 0
    told = await bridge.open()
    await told.connect("new", level=V5, properties=PLAIN)
    for topic in FORBIDDEN:
        assert (await told.exchange(publish(topic, b"", 1, 1, level=V5))).body[2] == 0x87, "it can be told"
    assert len(await kept(bridge)) == len(expected)


@bridge_test(acl=RULES, forbidden="acknowledge")
async def test_a_listener_may_acknowledge_what_is_forbidden_where_no_stream_takes_it(bridge: Bridge) -> None:
    watcher = await bridge.connect("watcher")
    await watcher.subscribe(("nowhere", 2))
    client = await bridge.connect("dev")
    for number in range(1, 21):
        sent = publish("nowhere", b"x", 1 + number % 2, number, retain=True)
        assert (await client.exchange(sent)).body == bytes((0, number))
    assert await client.exchange(publish("in/a", b"stored", 1, 99)) == Packet(0x40, b"\0\x63")
    assert bridge.stat("acknowledged_forbidden") == 20
    assert await watcher.silent()
    assert (bridge.stat("retained"), await bridge.payloads()) == (0, [b"stored"])
    told = await bridge.open()
    await told.connect("new", level=V5, properties=PLAIN)
    assert (await told.exchange(publish("nowhere", b"", 1, 1, level=V5))).body[2] == 0x87
    for topic in ("in/secret", "streams/in", "streams/typo"):
        old = await bridge.connect("old")
        old.send(publish(topic, b"x", 1, 1))
        assert await old.closed(), "a mistake in a rule must not destroy a reading"


def test_each_listener_decides_and_by_default_a_device_is_disconnected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = ListenerTable(
        name="plant", listen=["tcp://127.0.0.1:0"], forbidden="acknowledge", allow_anonymous=True
    )

    async def main() -> None:
        async with running(tmp_path, acl=RULES, listener=[table]) as bridge:
            for url, answered in ((0, False), (1, True)):
                client = await bridge.open(url)
                await client.connect("pump-7")
                client.send(publish("nowhere", b"x", 1, 1))
                if answered:
                    assert (await client.receive()).head == 0x40
                else:
                    assert await client.closed()

    run_async(main())
    lines = [
        record.getMessage() for record in caplog.records if "acknowledged and dropped" in record.getMessage()
    ]
    assert len(lines) == 1
    assert "'pump-7'" in lines[0]
    assert "'nowhere'" in lines[0]


@pytest.mark.parametrize("name", [None, "missing", "tiny", "full"])
def test_without_a_stream_that_takes_it_a_message_is_refused_as_ever(
    tmp_path: Path, name: str | None
) -> None:
    async def main() -> None:
        async with running(tmp_path, refused_stream=name) as bridge:
            bridge.stream("small", "small", **SMALL)
            bridge.stream("tiny", "tiny", **SMALL)
            bridge.stream("full", "full", limits=Limits(max_messages=1, discard="new"))
            client = await bridge.open()
            await client.connect("c", level=V5)
            assert await client.exchange(publish("full", b"", 1, 1, level=V5)) == Packet(0x40, b"\0\1")
            assert (await client.exchange(publish("small", BIG, 1, 1, level=V5))).body[2] == 0x97
            old = await bridge.connect("old")
            old.send(publish("small", BIG, 1, 1))
            assert await old.closed()
            assert bridge.stat("kept_too_large") == 0

    run_async(main())


@pytest.mark.parametrize("level", [V311, V5])
def test_qos_2_keeps_a_refused_message_once_also_across_a_kill(tmp_path: Path, level: int) -> None:
    async def main() -> None:
        async with running(tmp_path, refused_stream="refused") as bridge:
            bridge.stream("refused")
            options = {"level": level, "clean": False}
            if level == V5:
                options["properties"] = {p.SESSION_EXPIRY: 100}
            client = await bridge.connect("dev", **options)
            send = publish("streams/typo", b"once", 2, 7, level=level)
            again = publish("streams/typo", b"once", 2, 7, level=level, dup=True)
            assert await client.exchange(send) == Packet(0x50, b"\0\7")
            assert await client.exchange(again) == Packet(0x50, b"\0\7")
            taken = copied(bridge)
            # as a kill leaves it between the stream's commit and the journal's
            (taken / "data" / "mqtt" / "sessions.journal").write_bytes(before_the_id(taken))
            async with found_again(bridge, taken) as other:
                client = await other.connect("dev", **options)
                assert await client.exchange(again) == Packet(0x50, b"\0\7")
                assert [one[1] for one in await kept(other)] == [b"once"]
                assert await client.exchange(ack(0x62, 7)) == Packet(0x70, b"\0\7")

    run_async(main())


def before_the_id(taken: Path) -> bytes:
    """The journal's frames up to the one that has the QoS 2 id."""
    raw, pos = (taken / "data" / "mqtt" / "sessions.journal").read_bytes(), 0
    while pos < len(raw):
        end = pos + 8 + int.from_bytes(raw[pos : pos + 4], "big")
        if msgspec.msgpack.decode(raw[pos + 8 : end])[0] == RECEIVED:
            return raw[:pos]
        pos = end
    raise AssertionError("no record of the id")


@bridge_test(refused_stream="refused")
async def test_a_will_that_can_never_be_stored_is_kept_too(bridge: Bridge) -> None:
    bridge.stream("refused")
    client = await bridge.connect("dev", will=("streams/typo", b"gone", 1))
    client.abort()
    await until(lambda: bridge.stat("kept_no_stream") == 1)
    assert await kept(bridge) == [(b"streams/typo", b"gone", "dev", "no_stream")]
    assert bridge.stat("dropped_wills") == 0


@bridge_test
async def test_a_reload_applies_another_stream_for_refused_messages(bridge: Bridge) -> None:
    bridge.stream("refused")
    bridge.front.reload(msgspec.structs.replace(bridge.config, refused_stream="refused"))
    client = await bridge.connect("dev")
    assert await client.exchange(publish("streams/typo", b"", 1, 1)) == Packet(0x40, b"\0\1")
    assert len(await kept(bridge)) == 1
