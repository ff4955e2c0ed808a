"""MQTT 5 on the embedded broker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5, packet

from ..fakes.measured import least_of
from .harness import (
    PLAIN,
    Bridge,
    Client,
    Packet,
    ack,
    bridge_test,
    connect,
    decoded,
    publish,
    run_async,
    running,
    subscribe,
    unsubscribe,
    until,
)


async def v5(bridge: Bridge, client_id: str = "", **options: Any) -> Client:
    return await bridge.connect(client_id, level=V5, **options)


def properties_of(raw: bytes) -> p.Properties:
    found, _ = p.read_properties(bytes((len(raw),)) + raw, 0, len(raw) + 1, 0x30)
    return found


def send(
    client: Client, topic: str, payload: bytes = b"", qos: int = 0, packet_id: int = 0, **options: Any
) -> None:
    client.send(publish(topic, payload, qos, packet_id, level=V5, **options))


def test_who_is_disconnected_since_the_disk_is_full_learns_that_and_no_path(mounted: Path) -> None:
    async def work() -> None:
        async with asyncio.timeout(240), running(mounted) as bridge:
            client, plain = (
                await v5(bridge, "d"),
                await v5(bridge, "p", properties={p.REQUEST_PROBLEM_INFO: 0}),
            )
            with (mounted / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            for number in range(1, 200):
                send(client, "in/a", bytes(8000), 1, number)
                answer = await client.receive()
                if answer.head != 0x40:
                    break
            assert (answer.head, answer.body[0]) == (0xE0, 0x83)
            why = p.read_properties(answer.body, 1, len(answer.body), 0x40)[0][p.REASON_STRING]
            assert b"cannot be written: No space left on device" in why
            assert b"stream 's'" in why
            assert os.fsencode(mounted) not in why
            send(plain, "in/a", bytes(8000), 1, 1)
            assert await plain.receive() == Packet(0xE0, b"\x83\0")

    run_async(work())


@bridge_test(max_packet=100_000, max_keep_alive=600)
async def test_the_connack_says_what_is_not_there_and_what_was_changed(bridge: Bridge) -> None:
    client = await bridge.open()
    options = {p.SESSION_EXPIRY: 0xFFFF_FFFF, p.RECEIVE_MAXIMUM: 3}
    body = (await client.connect("", level=V5, keep_alive=0, properties=options)).body
    assert body[:2] == b"\0\0"
    found = body[3:]
    assert b"\x27" + (100_000).to_bytes(4, "big") in found, "maximum packet size"
    assert b"\x2a" not in found, "shared subscriptions are available, which is the default"
    assert b"\x22\0\x40" in found, "topic aliases"
    assert b"\x21\x10\0" in found, "receive maximum"
    assert b"\x13\x02\x58" in found, "server keep alive"
    assert b"\x11" + (7 * 24 * 3600).to_bytes(4, "big") in found, "session expiry"
    assert b"\x12\0\x19auto-" in found, "assigned client id"


@bridge_test
async def test_refusals_have_reason_codes(bridge: Bridge) -> None:
    for options, reason in (
        ({"properties": {p.AUTH_METHOD: b"SCRAM"}}, 0x8C),
        ({"will": ("w/#", b"", 0)}, 0x90),
        ({"client_id": "x" * 2000}, 0x85),
    ):
        client = await bridge.open()
        await client.connect(level=V5, expect=reason, **{"client_id": "c", **options})
        assert await client.closed()
    for raw, reason in (
        (publish("in/#", b"", 1, 1, level=V5), 0x90),
        (publish("in/a", b"", 1, 1, level=V5, properties={p.TOPIC_ALIAS: 0}), 0x94),
        (publish("in/a", b"", 1, 1, level=V5, properties={p.TOPIC_ALIAS: 65}), 0x94),
        (publish("", b"", 1, 1, level=V5, properties={p.TOPIC_ALIAS: 5}), 0x82),
        (publish("in/a", b"", 1, 1, level=V5, properties={p.SESSION_EXPIRY: 5}), 0x81),
        (publish("in/a", b"", 1, 1, level=V5, properties={p.RESPONSE_TOPIC: b"a/+"}), 0x90),
        (b"\x30\x07\0\4in/a\xff", 0x81),
        (b"\xc0\1\0", 0x81),
        (packet(0xF0, b""), 0x82),
        (b"\x30\xff\xff\xff\x7f", 0x95),
        (subscribe(1, ("a", 0x30), level=V5), 0x81),
    ):
        client = await v5(bridge, "bad")
        client.send(raw)
        assert await client.receive() == Packet(0xE0, bytes((reason, 0))), raw
        assert await client.closed()
    assert await bridge.payloads() == []


@bridge_test
async def test_a_full_stream_is_said_with_quota_exceeded_and_the_connection_stays(bridge: Bridge) -> None:
    bridge.stream("small", "small", max_size=4096, stream_segment_size=2048)
    client = await v5(bridge, "c", properties=PLAIN)
    codes = []
    for number in range(1, 21):
        send(client, "small", b"x" * 500, 1, number)
        answer = await client.receive()
        codes.append(answer.body[2:] or b"\0")
    stored = len(await bridge.stored("small"))
    assert codes == [b"\0"] * stored + [b"\x97"] * (20 - stored)
    send(client, "small", b"x" * 5000, 1, 21)
    assert await client.receive() == Packet(0x40, b"\0\x15\x97"), "too large for the stream"
    send(client, "small", b"x" * 500, 2, 22)
    assert await client.receive() == Packet(0x50, b"\0\x16\x97")
    assert await client.alive()


@bridge_test
async def test_user_properties_are_stored_with_the_message_and_passed_on(bridge: Bridge) -> None:
    subscriber, old = await v5(bridge, "s"), await bridge.connect("old")
    for client in (subscriber, old):
        await client.subscribe(("in/#", 1), ("plain", 0))
    publisher = await v5(bridge, "p")
    properties = {
        p.PAYLOAD_FORMAT: 1,
        p.CONTENT_TYPE: b"text/plain",
        p.RESPONSE_TOPIC: b"answers",
        p.CORRELATION_DATA: b"\0\1",
        p.USER_PROPERTY: [(b"unit", b"K"), (b"unit", "°C".encode())],
    }
    for topic in ("in/t", "plain"):
        send(publisher, topic, b"20", 1, 1, properties=properties)
        assert properties_of((await subscriber.message()).properties) == properties
        assert (await old.message()).payload == b"20"
    (message,) = await bridge.stored()
    assert decoded(message.headers) == {
        "utf8": True,
        "type": "text/plain",
        "reply": "answers",
        "token": b"\0\1",
        "user": [["unit", "K"], ["unit", "°C"]],
    }


@bridge_test
async def test_topic_aliases_stand_for_topics(bridge: Bridge) -> None:
    client = await v5(bridge, "c")
    send(client, "in/long/name", b"1", 1, 1, properties={p.TOPIC_ALIAS: 7})
    send(client, "", b"2", 1, 2, properties={p.TOPIC_ALIAS: 7})
    send(client, "in/other", b"3", 1, 3, properties={p.TOPIC_ALIAS: 7})
    send(client, "", b"4", 1, 4, properties={p.TOPIC_ALIAS: 7})
    for number in range(1, 5):
        assert await client.receive() == Packet(0x40, bytes((0, number)))
    assert [m.topic for m in await bridge.stored()] == [b"in/long/name"] * 2 + [b"in/other"] * 2


@bridge_test
async def test_no_more_than_receive_maximum_messages_are_in_flight(bridge: Bridge) -> None:
    subscriber = await v5(bridge, "s", properties={p.RECEIVE_MAXIMUM: 2})
    await subscriber.subscribe(("plain", 1))
    publisher = await v5(bridge, "p")
    for number in range(1, 6):
        send(publisher, "plain", b"%d" % number, 1, number)
        await publisher.receive()
    got = [subscriber.parse(*await subscriber.receive()) for _ in range(2)]
    assert await subscriber.silent()
    subscriber.send(ack(0x40, got[0].packet_id))
    assert (await subscriber.message()).payload == b"3"


@bridge_test
async def test_messages_larger_than_the_client_takes_are_not_sent(bridge: Bridge) -> None:
    subscriber = await v5(bridge, "s", properties={p.MAXIMUM_PACKET_SIZE: 100})
    await subscriber.subscribe(("plain", 1))
    publisher = await v5(bridge, "p")
    for size in (500, 50):
        send(publisher, "plain", b"x" * size, 1, 1)
    assert len((await subscriber.message()).payload) == 50
    assert bridge.stat("dropped_too_large") == 1


@bridge_test
async def test_a_client_that_returns_taking_less_is_sent_again_what_it_takes(bridge: Bridge) -> None:
    kept = {p.SESSION_EXPIRY: 60}
    subscriber = await v5(bridge, "s", properties=kept)
    await subscriber.subscribe(("plain", 1))
    publisher = await v5(bridge, "p")
    for number, payload in enumerate((b"x" * 500, b"1", b"2", b"3"), 1):
        send(publisher, "plain", payload, 1, number)
        await publisher.receive()
        await subscriber.receive()
    subscriber.abort()
    await until(lambda: bridge.stat("connections") == 1)
    less = kept | {p.MAXIMUM_PACKET_SIZE: 100, p.RECEIVE_MAXIMUM: 2}
    subscriber = await v5(bridge, "s", clean=False, properties=less)
    send(publisher, "plain", b"4", 1, 5)
    got = [subscriber.parse(*await subscriber.receive()) for _ in range(2)]
    assert await subscriber.silent(), "two are under way"
    subscriber.send(*(ack(0x40, one.packet_id) for one in got))
    got += [await subscriber.message() for _ in range(2)]
    assert [(one.payload, one.dup) for one in got] == [
        (b"1", True), (b"2", True), (b"3", True), (b"4", False),
    ]  # fmt: skip
    assert await subscriber.silent()
    assert bridge.stat("dropped_too_large") == 1


@bridge_test
async def test_no_local_retain_as_published_and_retain_handling(bridge: Bridge) -> None:
    client, other = await v5(bridge, "c"), await v5(bridge, "o")
    await client.subscribe(("t/#", 1 | 4))
    await other.subscribe(("t/#", 1 | 8))
    send(client, "t/1", b"x", 1, 1, retain=True)
    assert (await other.message()).retain
    assert await client.receive() == Packet(0x40, b"\0\1")
    send(client, "t/1", b"y")
    assert not (await other.message()).retain
    assert await client.silent()
    await client.subscribe(("t/1", 0x10))
    assert (await client.message()).retain, "1: it is a new subscription"
    await client.subscribe(("t/1", 0x10))
    await client.subscribe(("t/2", 0x20), ("t/+", 0x20))
    assert await client.silent()
    await client.subscribe(("t/1", 0))
    assert (await client.message()).payload == b"x"


@bridge_test
async def test_subscription_identifiers_come_with_the_messages(bridge: Bridge) -> None:
    client = await v5(bridge, "c")
    await client.subscribe(("a/+", 1), properties={p.SUBSCRIPTION_ID: 1})
    await client.subscribe(("a/#", 0), properties={p.SUBSCRIPTION_ID: 200})
    for topic in ("a/b", "a/b/c"):
        send(client, topic, b"", 0)
    assert set(properties_of((await client.message()).properties)[p.SUBSCRIPTION_ID]) == {1, 200}
    assert properties_of((await client.message()).properties) == {p.SUBSCRIPTION_ID: [200]}


@bridge_test
async def test_messages_expire_and_those_that_do_not_say_how_long_they_still_hold(bridge: Bridge) -> None:
    subscriber = await v5(bridge, "s", properties={p.SESSION_EXPIRY: 100})
    await subscriber.subscribe(("plain/#", 1))
    subscriber.abort()
    publisher = await v5(bridge, "p")
    for topic, seconds in (("plain/a", 1), ("plain/b", 1000), ("plain/c", 1)):
        options = {"properties": {p.MESSAGE_EXPIRY: seconds}, "retain": topic == "plain/c"}
        send(publisher, topic, b"x", 1, 1, **options)
        await publisher.receive()
    await asyncio.sleep(1.1)  # what is tested is the passing of time
    subscriber = await v5(bridge, "s", clean=False, properties={p.SESSION_EXPIRY: 100})
    message = await subscriber.message()
    assert message.topic == "plain/b"
    assert 990 < properties_of(message.properties)[p.MESSAGE_EXPIRY] < 1000
    await subscriber.subscribe(("plain/c", 1))
    assert await subscriber.silent()
    assert bridge.stat("dropped_expired") == 2


@bridge_test
async def test_sessions_last_as_long_as_the_client_asked_for(bridge: Bridge) -> None:
    client = await v5(bridge, "c", properties={p.SESSION_EXPIRY: 1})
    client.abort()
    await until(lambda: bridge.stat("connections") == 0)
    client = await bridge.open()
    again = {"level": V5, "clean": False, "properties": {p.SESSION_EXPIRY: 1}}
    assert (await client.connect("c", **again)).body[0] == 1
    client.abort()
    await until(lambda: bridge.stat("sessions") == 0)
    client = await bridge.open()
    assert (await client.connect("c", **again)).body[0] == 0
    client.send(packet(0xE0, b"\0\5\x11\0\0\0\0"))
    assert await client.closed()
    assert bridge.stat("sessions") == 0, "0 in DISCONNECT ends it at once"
    client = await v5(bridge, "d")
    client.send(packet(0xE0, b"\0\5\x11\0\0\0\x05"))
    assert (await client.receive()).body[0] == 0x82, "0 at CONNECT stays 0"


@bridge_test
async def test_clean_start_with_an_expiry_forgets_the_old_session_and_keeps_the_new_one(
    bridge: Bridge,
) -> None:
    options = {"properties": {p.SESSION_EXPIRY: 100}}
    client = await v5(bridge, "c", **options)
    await client.subscribe(("plain", 1))
    client.abort()
    client = await v5(bridge, "c", clean=True, **options)
    publisher = await v5(bridge, "p")
    send(publisher, "plain", b"", 1, 1)
    await publisher.receive()
    assert await client.silent()
    client.abort()
    client = await bridge.open()
    assert (await client.connect("c", level=V5, clean=False, **options)).body[0] == 1


@bridge_test
async def test_only_a_disconnect_without_an_error_takes_the_will_back(bridge: Bridge) -> None:
    subscriber = await bridge.connect("s")
    await subscriber.subscribe(("w/#", 1))
    for body in (b"", b"\0", b"\4", b"\x80", b"\x8d", b"\x97"):
        client = await bridge.connect("c", level=V5, will=(f"w/{body.hex()}", b"gone", 1))
        client.send(packet(0xE0, body))
        assert await client.closed()
    assert [(await subscriber.message()).topic for _ in range(4)] == ["w/04", "w/80", "w/8d", "w/97"]
    assert bridge.stat("wills") == 4


@bridge_test
async def test_a_will_waits_for_its_delay_and_is_not_sent_if_the_client_returns(bridge: Bridge) -> None:
    watcher = await v5(bridge, "w")
    await watcher.subscribe(("w", 1))
    options: Any = {
        "properties": {p.SESSION_EXPIRY: 100},
        "will": ("w", b"gone", 1),
        "will_properties": {p.WILL_DELAY: 1, p.CONTENT_TYPE: b"x"},
    }
    client = await v5(bridge, "c", **options)
    client.abort()
    client = await v5(bridge, "c", clean=False, **options)
    client.send(packet(0xE0, b"\x04"))  # disconnect with will
    assert await client.closed()
    assert await watcher.silent()
    message = await watcher.message()
    assert (message.payload, properties_of(message.properties)) == (b"gone", {p.CONTENT_TYPE: b"x"})
    assert bridge.stat("wills") == 1
    client = await v5(bridge, "c", clean=False, **options)
    client.abort()
    await until(lambda: bridge.stat("connections") == 1)
    await v5(bridge, "c", clean=True)
    assert (await watcher.message()).payload == b"gone", "the end of the session sends it too"


@bridge_test
async def test_the_old_connection_is_told_that_it_was_taken_over_and_all_that_we_stop(bridge: Bridge) -> None:
    old = await v5(bridge, "c")
    new = await v5(bridge, "c")
    assert await old.receive() == Packet(0xE0, b"\x8e\0")
    await bridge.stop()
    assert await new.receive() == Packet(0xE0, b"\x8b\0")
    await bridge.start()


@bridge_test
async def test_acknowledgements_say_what_was_not_found(bridge: Bridge) -> None:
    client = await v5(bridge, "c")
    assert await client.exchange(packet(0x62, b"\0\7\0\0")) == Packet(0x70, b"\0\7\x92")
    assert await client.exchange(unsubscribe(3, "no", level=V5)) == Packet(0xB0, b"\0\3\0\x11")
    assert await client.subscribe(("a/#/b", 0), ("$share/g", 0), ("ok", 2)) == b"\x8f\x8f\2"
    send(client, "in/a", b"x", 2, 9)
    assert await client.receive() == Packet(0x50, b"\0\x09")
    assert await client.exchange(packet(0x62, b"\0\x09")) == Packet(0x70, b"\0\x09")


@bridge_test
async def test_a_refused_qos_2_delivery_is_forgotten(bridge: Bridge) -> None:
    client = await v5(bridge, "c", properties={p.RECEIVE_MAXIMUM: 1})
    await client.subscribe(("plain", 2))
    for number in (1, 2):
        send(client, "plain", b"%d" % number, 2, number)
    first = None
    while first is None:
        head, body = await client.receive()
        first = client.parse(head, body) if head & 0xF0 == 0x30 else None
    client.send(packet(0x50, first.packet_id.to_bytes(2, "big") + b"\x80"))
    while (got := await client.receive()).head & 0xF0 != 0x30:
        pass
    assert client.parse(*got).payload == b"2"


@bridge_test
async def test_more_qos_2_messages_at_a_time_than_announced_end_the_connection(bridge: Bridge) -> None:
    client = await v5(bridge, "c")
    client.send(*(publish("plain", b"", 2, number, level=V5) for number in range(1, 4098)))
    for _ in range(4096):
        got = await client.receive()
        if got.head == 0xE0:
            break
        assert got.head == 0x50
    else:
        got = await client.receive()
    assert got == Packet(0xE0, b"\x93\0")


@bridge_test
async def test_malformed_packets_are_answered_with_0x81_and_others_with_0x82(bridge: Bridge) -> None:
    for raw, reason in (
        (b"\x80\6\0\1\0\0\1a\0", 0x81),  # flags that the type does not have (2.1.3)
        (b"\x41\3\0\1\0", 0x81),
        (b"\x60\3\0\1\0", 0x81),
        (b"\x00\0", 0x81),
        (b"\xe1\0", 0x81),
        (b"\x30\5\0\1a\1\x21", 0x81),  # a property that its packet may not carry (2.2.2.2)
        (b"\x38\4\0\1a\0", 0x81),  # DUP with QoS 0 (MQTT-3.3.1-2)
        (subscribe(1, ("", 0), level=V5), 0x81),
        (unsubscribe(1, "a", "", level=V5), 0x81),
        (b"\xd0\0", 0x82),
        (packet(0x10, b""), 0x82),
        (b"\xa2\3\0\1\0", 0x82),  # without a payload (3.10.3)
    ):
        client = await v5(bridge, "bad")
        assert await client.exchange(raw) == Packet(0xE0, bytes((reason, 0))), raw
        assert await client.closed()
    old = await bridge.connect("old")
    old.send(unsubscribe(1, ""))
    assert await old.closed()
    old = await bridge.connect("old")
    old.send(publish("a", dup=True))
    assert await old.closed()


@bridge_test
async def test_a_malformed_connect_is_answered_too_where_the_protocol_can(bridge: Bridge) -> None:
    for options, reason in (
        ({"properties": {p.AUTH_DATA: b"x"}}, 0x82),
        ({"properties": {p.TOPIC_ALIAS: 1}}, 0x81),
        ({"properties": {p.MAXIMUM_PACKET_SIZE: 0}}, 0x82),
        ({"will": ("", b"", 0)}, 0x90),
    ):
        client = await bridge.open()
        await client.connect("c", level=V5, expect=reason, **options)
        assert await client.closed()
    client = await bridge.open()
    client.send(connect("c", will=("", b"", 0)))
    assert await client.reader.read() == b"", "3.1.1: closed without a CONNACK (MQTT-3.1.4-1)"


@bridge_test
async def test_acknowledgements_of_another_qos_are_protocol_errors(bridge: Bridge) -> None:
    publisher = await v5(bridge, "p")
    for qos, head in ((1, 0x50), (1, 0x70), (2, 0x40)):
        client = await v5(bridge, "s")
        await client.subscribe(("plain", qos))
        assert (await publisher.exchange(publish("plain", b"x", 2, 1, level=V5))).head == 0x50
        await publisher.exchange(ack(0x62, 1))
        message = client.parse(*await client.receive())
        assert await client.exchange(ack(head, message.packet_id)) == Packet(0xE0, b"\x82\0"), (qos, head)
        assert await client.closed()


@bridge_test
async def test_nothing_larger_than_the_client_takes_is_sent(bridge: Bridge) -> None:
    for size, expected in ((4, b""), (20, b"\x20\3\0\x95\0")):
        client = await bridge.open()
        client.send(connect("", level=V5, properties={p.MAXIMUM_PACKET_SIZE: size}))
        assert await client.reader.read() == expected
    client = await v5(bridge, "c", properties={p.MAXIMUM_PACKET_SIZE: 30})
    assert await client.subscribe(("a", 0)) == b"\0"
    client.send(subscribe(2, *((f"t/{n}", 0) for n in range(40)), level=V5))
    assert await client.receive() == Packet(0xE0, b"\x95\0")
    assert await client.closed()


@bridge_test
async def test_a_client_without_tcp_nodelay_does_not_stall(bridge: Bridge) -> None:
    client = await v5(bridge, "c")
    await client.subscribe(("plain", 2))
    sock = client.writer.get_extra_info("socket")

    async def fastest(nodelay: int) -> float:
        """The time in which half of the messages have come, in seconds."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, nodelay)
        times = []
        for number in range(1, 31):
            began = time.perf_counter()
            client.send(publish("plain", b"x", 2, number, level=V5))
            heads = []
            while len(heads) < 4:
                head, body = await client.receive()
                heads.append(head & 0xF0)
                if head & 0xF0 == 0x30:
                    client.send(ack(0x50, client.parse(head, body).packet_id))
                elif head == 0x50:
                    client.send(ack(0x62, number))
                elif head == 0x62:
                    client.send(b"\x70\2" + body[:2])
            times.append(time.perf_counter() - began)
        return sorted(times)[15]

    bound = await fastest(nodelay=1) + 0.03
    took = await least_of(lambda: fastest(nodelay=0), bound)
    assert took < bound, "44 ms more: the delayed acknowledgement of TCP, and Nagle's algorithm"
