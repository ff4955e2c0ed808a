"""PUBLISH on stream topics: stored, then acknowledged, in order, whatever the pieces it comes in."""

from __future__ import annotations

import asyncio
import struct

import pytest

from bridge.errors import InvalidRequest

from .harness import PING, PLAIN, Bridge, Packet, ack, bridge_test, decoded, publish


def acks(first: int, last: int) -> list[Packet]:
    return [Packet(0x40, struct.pack(">H", number)) for number in range(first, last + 1)]


@bridge_test
async def test_acknowledgements_come_in_the_order_of_the_packets(bridge: Bridge) -> None:
    client = await bridge.connect("a")
    client.send(b"".join(publish("in/a", b"%d" % number, 1, number) for number in range(1, 301)))
    assert [await client.receive() for _ in range(300)] == acks(1, 300)
    assert await bridge.payloads() == [b"%d" % number for number in range(1, 301)]


@bridge_test
async def test_acknowledgements_keep_their_order_across_streams_of_different_speed(bridge: Bridge) -> None:
    bridge.stream("synced", "slow/#", flush_on_write=True)
    client = await bridge.connect("a")
    for number in range(1, 201):
        client.send(publish("slow/x" if number % 3 else "in/x", b"", 1, number))
    assert [await client.receive() for _ in range(200)] == acks(1, 200)


@bridge_test
async def test_a_message_bound_to_two_streams_is_in_both_when_it_is_acknowledged(bridge: Bridge) -> None:
    bridge.stream("t", "in/both")
    client = await bridge.connect("a")
    assert await client.exchange(publish("in/both", b"x", 1, 1)) == Packet(0x40, b"\0\1")
    assert await bridge.payloads("s") == await bridge.payloads("t") == [b"x"]


@bridge_test
async def test_packets_may_come_in_any_pieces(bridge: Bridge) -> None:
    client = await bridge.connect("a")
    data = publish("in/a", b"q" * 200, 1, 7) + PING + publish("in/b", b"", 1, 8)
    wanted = sorted([Packet(0x40, b"\0\7"), Packet(0xD0, b""), Packet(0x40, b"\0\10")])
    for byte in data:
        client.send(bytes((byte,)))
        await asyncio.sleep(0)
    assert sorted([await client.receive() for _ in range(3)]) == wanted
    for cut in range(1, len(data)):
        client.send(data[:cut])
        await asyncio.sleep(0.0005)
        client.send(data[cut:])
        assert sorted([await client.receive() for _ in range(3)]) == wanted, cut
    assert len(await bridge.stored()) == 2 * len(data)


@bridge_test(max_packet=5 << 20)
async def test_a_large_message_is_stored_whole(bridge: Bridge) -> None:
    client = await bridge.connect("a")
    assert await client.exchange(publish("in/big", b"z" * 4_000_000, 1, 1)) == Packet(0x40, b"\0\1")
    assert [len(payload) for payload in await bridge.payloads()] == [4_000_000]


@bridge_test
async def test_a_packet_above_the_limit_closes_the_connection_before_it_is_read(bridge: Bridge) -> None:
    client = await bridge.connect("a")
    client.send(b"\x30\x81\x80\x40")  # announces 1 MiB and one byte, and nothing follows
    assert await client.closed()
    assert bridge.stat("protocol_errors") == 1


@bridge_test
async def test_qos_0_is_stored_and_qos_2_only_once(bridge: Bridge) -> None:
    client = await bridge.connect("a")
    client.send(publish("in/a", b"0"), publish("in/a", b"1", 1, 5), publish("in/a", b"2", 2, 6))
    assert [await client.receive(), await client.receive()] == [Packet(0x40, b"\0\5"), Packet(0x50, b"\0\6")]
    client.send(publish("in/a", b"2", 2, 6, dup=True))
    assert await client.receive() == Packet(0x50, b"\0\6")
    client.send(ack(0x62, 6), ack(0x62, 6), ack(0x62, 99))
    answers = [await client.receive() for _ in range(3)]
    assert answers == [Packet(0x70, b"\0\6"), Packet(0x70, b"\0\6"), Packet(0x70, b"\0\x63")]
    client.send(publish("in/a", b"3", 2, 6))
    assert await client.receive() == Packet(0x50, b"\0\6")
    assert await bridge.payloads() == [b"0", b"1", b"2", b"3"]


@bridge_test
async def test_flags_are_kept_in_the_headers_of_the_stored_message(bridge: Bridge) -> None:
    client = await bridge.connect("a")
    await client.exchange(publish("in/a", b"plain", 1, 1))
    await client.exchange(publish("in/a", b"again", 1, 2, dup=True))
    await client.exchange(publish("in/a", b"kept", 1, 3, retain=True))
    await client.exchange(publish("in/a", b"once", 2, 4))
    headers = [decoded(message.headers) for message in await bridge.stored()]
    assert headers == [{}, {"dup": True}, {"retain": True}, {"client": "a", "id": 4}]


@bridge_test
async def test_qos_2_is_stored_once_across_a_reconnect_of_a_persistent_session(bridge: Bridge) -> None:
    for clean, copies in ((False, 1), (True, 2)):
        name = f"client-{clean}"
        client = await bridge.connect(name, clean=clean)
        assert await client.exchange(publish(f"in/{name}", b"x", 2, 6)) == Packet(0x50, b"\0\6")
        client.abort()
        client = await bridge.connect(name, clean=clean)
        assert await client.exchange(publish(f"in/{name}", b"x", 2, 6, dup=True)) == Packet(0x50, b"\0\6")
        assert await client.exchange(ack(0x62, 6)) == Packet(0x70, b"\0\6")
        stored = [message for message in await bridge.stored() if message.topic == f"in/{name}".encode()]
        assert len(stored) == copies


@bridge_test
async def test_qos_2_is_stored_once_across_a_restart_of_the_bridge(bridge: Bridge) -> None:
    client = await bridge.connect("c", clean=False)
    assert await client.exchange(publish("in/a", b"x", 2, 6)) == Packet(0x50, b"\0\6")
    client.send(publish("in/a", b"y", 2, 7))
    assert await client.receive() == Packet(0x50, b"\0\7")
    assert await client.exchange(ack(0x62, 7)) == Packet(0x70, b"\0\7")
    await bridge.restart()
    client = await bridge.connect("c", clean=False)
    assert await client.exchange(publish("in/a", b"x", 2, 6, dup=True)) == Packet(0x50, b"\0\6")
    assert await client.exchange(publish("in/a", b"z", 2, 7)) == Packet(0x50, b"\0\7"), "7 was released"
    assert await bridge.payloads() == [b"x", b"y", b"z"]


@bridge_test
async def test_a_full_stream_is_not_acknowledged_and_the_connection_ends(bridge: Bridge) -> None:
    bridge.stream("small", "small", max_size=4096, stream_segment_size=1024)
    client = await bridge.connect("a")
    client.send(*(publish("small", b"x" * 500, 1, number) for number in range(1, 50)))
    answers = []
    try:
        while True:
            answers.append(await client.receive())
    except ConnectionError:
        pass
    assert answers == acks(1, len(answers))
    assert len(await bridge.stored("small")) == len(answers) < 49
    assert bridge.stat("rejected_full") == 1
    other = await bridge.connect("b")
    other.send(publish("small", b"x" * 500), publish("in/a", b"", 1, 1))
    assert await other.receive() == Packet(0x40, b"\0\1"), "QoS 0 is dropped, and the connection stays"
    assert bridge.stat("dropped_full") == 1


@bridge_test
async def test_will_and_retain_reach_the_stream(bridge: Bridge) -> None:
    client = await bridge.connect("a", will=("in/will", b"gone", 1))
    client.abort()
    other = await bridge.connect("b")
    while b"gone" not in await bridge.payloads():
        assert await other.alive()
    polite = await bridge.connect("c", will=("in/will", b"not this", 1))
    polite.disconnect()
    assert await polite.closed()
    assert await bridge.payloads() == [b"gone"]


@bridge_test
async def test_streams_take_topics_below_a_dollar_that_they_name(bridge: Bridge) -> None:
    bridge.stream("shadows", "$aws/things/+/shadow/#", "$vendor/a")
    bridge.stream("all", "#", "+/a")
    subscriber = await bridge.connect("s")
    await subscriber.subscribe(("$aws/#", 1))
    client = await bridge.connect("c", level=5, will=("$aws/things/t/shadow/will", b"gone", 1))
    topics = ["$aws/things/t/shadow/update", "$vendor/a", "$aws/things/t/shadow"]
    for number, topic in enumerate(topics, 1):
        answer = await client.exchange(publish(topic, b"%d" % number, number % 2 + 1, number, level=5))
        assert answer.body == bytes((0, number)), "success"
    client.abort()
    assert [(await subscriber.message()).payload for _ in range(3)] == [b"1", b"3", b"gone"]
    assert [message.topic.decode() for message in await bridge.stored("shadows")] == [
        *topics,
        "$aws/things/t/shadow/will",
    ]
    assert await bridge.payloads("all") == [], "wildcards match no topic below `$`"
    for topic in ("$SYS/#", "$SYS", "$share/g/a", "streambridge/a"):
        with pytest.raises(InvalidRequest):
            bridge.stream("no", topic)


@bridge_test
async def test_a_message_for_a_stream_that_is_not_there_is_refused_and_others_are_counted(
    bridge: Bridge,
) -> None:
    client = await bridge.connect("a")
    client.send(publish("streams/typo/x", b"1"), publish("ordinary", b"2", 1, 1))
    assert await client.receive() == Packet(0x40, b"\0\1"), "QoS 0 is dropped, and the connection stays"
    assert (bridge.stat("dropped_no_stream"), bridge.stat("without_stream")) == (1, 1)
    client.send(publish("streams/typo", b"3", 1, 2))
    assert await client.closed()
    assert bridge.stat("rejected_no_stream") == 1
    modern = await bridge.connect("b", level=5, properties=PLAIN)
    assert await modern.exchange(publish("streams/typo", b"4", 1, 3, level=5)) == Packet(0x40, b"\0\3\x90")
    bridge.stream("typo")
    answer = await modern.exchange(publish("streams/typo", b"5", 1, 4, level=5))
    assert answer.body[:2] == b"\0\4"
    assert await bridge.payloads("typo") == [b"5"]
