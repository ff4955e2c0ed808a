"""Ordinary MQTT beside the streams: subscriptions, retained messages, sessions, delivery at least once."""

from __future__ import annotations

import asyncio
import itertools
import unittest

from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5
from bridge.topics import is_topic_name, matches

from .harness import (
    Bridge,
    Client,
    Packet,
    Published,
    ack,
    bridge_test,
    copied,
    found_again,
    publish,
    subscribe,
    unsubscribe,
    until,
)


async def take(client: Client, count: int) -> list[Published]:
    return [await client.message() for _ in range(count)]


@bridge_test
async def test_subscribers_of_stream_topics_and_of_ordinary_ones_are_served_in_order(bridge: Bridge) -> None:
    subscriber, publisher = await bridge.connect("s"), await bridge.connect("p")
    assert await subscriber.subscribe(("in/#", 1), ("plain", 0), packet_id=9) == b"\1\0"
    publisher.send(
        publish("in/a", b"1", 1, 1, retain=True), publish("in/a", b"2"), publish("in/a", b"3", 2, 2)
    )
    assert [(m.payload, m.qos, m.retain) for m in await take(subscriber, 3)] == [
        (b"1", 1, False), (b"2", 0, False), (b"3", 1, False),
    ]  # fmt: skip
    publisher.send(*(publish("plain", b"%d" % number) for number in range(100)))
    assert [m.payload for m in await take(subscriber, 100)] == [b"%d" % number for number in range(100)]


@bridge_test
async def test_a_delivery_has_the_lower_of_both_qos(bridge: Bridge) -> None:
    for topic in ("plain/t", "in/t"):
        for wanted in (0, 1, 2):
            subscriber = await bridge.connect(f"s{wanted}")
            await subscriber.subscribe((topic, wanted))
            publisher = await bridge.connect("p")
            for qos in (0, 1, 2):
                publisher.send(publish(topic, b"x", qos, 1))
                got = await subscriber.message()
                assert got.qos == min(qos, wanted), (topic, wanted, qos)
                if got.qos == 2:
                    assert await subscriber.exchange(ack(0x50, got.packet_id)) == Packet(
                        0x62, got.packet_id.to_bytes(2, "big")
                    )
                    subscriber.send(ack(0x70, got.packet_id))
            publisher.disconnect()
            subscriber.disconnect()


@bridge_test
async def test_overlapping_filters_bring_one_copy_at_the_highest_qos(bridge: Bridge) -> None:
    subscriber, publisher = await bridge.connect("s"), await bridge.connect("p")
    await subscriber.subscribe(("t", 0), ("+", 1), ("#", 0))
    publisher.send(publish("t", b"one", 1, 1), publish("t", b"two"), publish("t", b"three", 1, 2))
    assert {(m.payload, m.qos) for m in await take(subscriber, 3)} == {
        (b"one", 1),
        (b"two", 0),
        (b"three", 1),
    }
    assert await subscriber.silent()


@bridge_test
async def test_subscribing_again_replaces_the_qos_and_unsubscribing_ends_it(bridge: Bridge) -> None:
    subscriber, publisher = await bridge.connect("s"), await bridge.connect("p")
    for topic in ("t", "in/t"):
        await subscriber.subscribe((topic, 0))
        await subscriber.subscribe((topic, 1))
        publisher.send(publish(topic, b"x", 1, 1))
        assert (await subscriber.message()).qos == 1
        assert await subscriber.exchange(unsubscribe(7, topic, "never")) == Packet(0xB0, b"\0\7")
        await publisher.receive()
        await publisher.exchange(publish(topic, b"y", 1, 1))
        publisher.send(publish(topic, b"z"))
        assert await publisher.alive()
        assert await subscriber.silent()


@bridge_test
async def test_a_filter_subscribed_to_again_right_after_unsubscribing_is_in_force(bridge: Bridge) -> None:
    subscriber, publisher = await bridge.connect("s"), await bridge.connect("p")
    await subscriber.subscribe(("plain/a", 0), ("plain/b", 0))
    for number in range(3):
        subscriber.send(
            unsubscribe(2, "plain/a", "plain/b"),
            subscribe(3, ("plain/a", 0)),
            unsubscribe(4, "plain/a"),
            subscribe(5, ("plain/b", 0), ("plain/a", 0)),
        )
        assert [(await subscriber.receive()).head for _ in range(4)] == [0xB0, 0x90, 0xB0, 0x90]
        assert await subscriber.exchange(unsubscribe(6, "plain/b")) == Packet(0xB0, b"\0\6")
        await subscriber.subscribe(("plain/b", 0))
        publisher.send(publish("plain/a", b"%d" % number), publish("plain/b", b"%d" % number))
        got = [(await subscriber.message()).topic for _ in range(2)]
        assert sorted(got) == ["plain/a", "plain/b"]
    assert await subscriber.silent()


@bridge_test
async def test_a_client_that_goes_between_unsubscribing_and_subscribing_leaves_nothing(
    bridge: Bridge,
) -> None:
    for _ in range(20):
        subscriber = await bridge.connect("s")
        await subscriber.subscribe(("plain/a", 0))
        subscriber.send(unsubscribe(2, "plain/a"), subscribe(3, ("plain/a", 0)))
        await subscriber.receive()
        subscriber.abort()
    await until(lambda: bridge.stat("connections") == 0)
    await until(lambda: not bridge.server.connections._tasks, what="no task is left")


@bridge_test
async def test_a_route_in_use_notices_a_subscription_that_comes_later(bridge: Bridge) -> None:
    subscriber, publisher = await bridge.connect("s"), await bridge.connect("p")
    for topic in ("in/late", "plain/late"):
        await publisher.exchange(publish(topic, b"1", 1, 1))
        await subscriber.subscribe((topic, 0))
        await publisher.exchange(publish(topic, b"2", 1, 2))
        assert (await subscriber.message()).payload == b"2"


@bridge_test
async def test_a_route_in_use_notices_a_stream_that_is_bound_later(bridge: Bridge) -> None:
    publisher = await bridge.connect("p")
    await publisher.exchange(publish("late/a", b"1", 1, 1))
    bridge.stream("late", "late/#")
    await publisher.exchange(publish("late/a", b"2", 1, 2))
    assert await bridge.payloads("late") == [b"2"]


@bridge_test
async def test_retained_messages_come_to_new_subscriptions_until_they_are_cleared(bridge: Bridge) -> None:
    publisher = await bridge.connect("p")
    for topic in ("in/r", "plain/r"):
        await publisher.exchange(publish(topic, b"old", 1, 1, retain=True))
        await publisher.exchange(publish(topic, b"kept", 1, 1, retain=True))
    await bridge.restart()
    subscriber, publisher = await bridge.connect("s"), await bridge.connect("p")
    for topic in ("in/+", "plain/r"):
        await subscriber.subscribe((topic, 1))
        assert (await subscriber.message())[1:4] == (b"kept", 1, True)
    await publisher.exchange(publish("in/r", b"", 1, 1, retain=True))
    assert (await subscriber.message()).payload == b""
    late = await bridge.connect("late")
    await late.subscribe(("in/#", 0))
    assert await late.silent()
    assert bridge.stat("retained") == 1


@bridge_test(sys_interval=0)
async def test_dollar_topics_do_not_match_wildcards_at_the_first_level(bridge: Bridge) -> None:
    subscriber = await bridge.connect("s", will=("plain/w", b"w", 0))
    assert await subscriber.subscribe(("#", 0), ("+/x", 0), ("$SYS/#", 0), ("$share/g", 0)) == b"\0\0\0\x80"
    publisher = await bridge.connect("p")
    assert await publisher.exchange(publish("$x/y", b"", 1, 1)) == Packet(0x40, b"\0\1")
    assert await subscriber.silent()
    publisher.send(publish("$SYS/y", b"", 1, 1))
    assert await publisher.closed()


@bridge_test
async def test_a_persistent_session_gets_what_came_while_it_was_away(bridge: Bridge) -> None:
    subscriber = await bridge.connect("s", clean=False)
    await subscriber.subscribe(("plain/#", 1))
    subscriber.disconnect()
    assert await subscriber.closed()
    publisher = await bridge.connect("p")
    for number in range(1, 201):
        publisher.send(publish("plain/x", b"%d" % number, 1, number))
    for _ in range(200):
        await publisher.receive()
    subscriber = await bridge.open()
    assert (await subscriber.connect("s", clean=False)).body == b"\1\0", "session present"
    assert [m.payload for m in await take(subscriber, 200)] == [b"%d" % number for number in range(1, 201)]
    subscriber.disconnect()
    assert await subscriber.closed()
    subscriber = await bridge.connect("s", clean=True)
    assert await subscriber.silent()


@bridge_test(in_flight=4)
async def test_what_was_not_acknowledged_comes_again_in_order_after_a_reconnect(bridge: Bridge) -> None:
    subscriber, publisher = await bridge.connect("s", clean=False), await bridge.connect("p")
    await subscriber.subscribe(("plain", 2))
    for number in range(1, 9):
        await publisher.exchange(publish("plain", b"%d" % number, 1 + number % 2, number))
        if not number % 2:
            continue
        await publisher.exchange(ack(0x62, number))
    got = [subscriber.parse(*await subscriber.receive()) for _ in range(4)]
    assert [m.payload for m in got] == [b"1", b"2", b"3", b"4"]
    assert await subscriber.silent(), "no more than four are in flight"
    assert (await subscriber.exchange(ack(0x50, got[0].packet_id))).head == 0x62, (
        "1 is received, not released"
    )
    subscriber.abort()
    await until(lambda: bridge.stat("connections") == 1)
    subscriber = await bridge.open()
    await subscriber.connect("s", clean=False)
    assert await subscriber.receive() == Packet(0x62, got[0].packet_id.to_bytes(2, "big"))
    again = [subscriber.parse(*await subscriber.receive()) for _ in range(3)]
    assert [(m.payload, m.dup, m.packet_id) for m in again] == [
        (m.payload, True, m.packet_id) for m in got[1:]
    ]
    subscriber.send(ack(0x70, got[0].packet_id))
    assert (await subscriber.message()).payload == b"5"


@bridge_test
async def test_what_was_not_acknowledged_survives_a_restart_of_the_bridge(bridge: Bridge) -> None:
    subscriber, publisher = await bridge.connect("s", clean=False), await bridge.connect("p")
    await subscriber.subscribe(("plain/#", 1), ("in/#", 1))
    for number in range(1, 6):
        await publisher.exchange(publish(f"plain/{number}", b"%d" % number, 1, number))
    assert [(await subscriber.message()).payload for _ in range(2)] == [b"1", b"2"]
    for _ in range(3):
        await subscriber.receive()
    assert await subscriber.alive()
    await bridge.restart()
    publisher = await bridge.connect("p")
    await publisher.exchange(publish("plain/6", b"6", 1, 6))
    await bridge.restart()
    subscriber = await bridge.open()
    assert (await subscriber.connect("s", clean=False)).body == b"\1\0"
    assert [m.payload for m in await take(subscriber, 4)] == [b"3", b"4", b"5", b"6"]
    publisher = await bridge.connect("p")
    await publisher.exchange(publish("plain/7", b"7", 1, 6))
    assert (await subscriber.message()).payload == b"7", "the subscription is in force again"
    assert await subscriber.alive()
    await bridge.restart()
    subscriber = await bridge.connect("s", clean=False)
    assert await subscriber.silent(), "nothing comes twice without reason"


@bridge_test(queued_messages=1_000)
async def test_a_session_that_is_away_keeps_the_newest_messages_and_the_rest_is_counted(
    bridge: Bridge,
) -> None:
    subscriber, publisher = await bridge.connect("s", clean=False), await bridge.connect("p")
    await subscriber.subscribe(("plain/#", 1))
    subscriber.abort()
    await until(lambda: bridge.stat("connections") == 1)
    for number in range(1, 3001):
        publisher.send(publish("plain/x", b"%d" % number, 1, number))
    for _ in range(3000):
        await publisher.receive()
    assert bridge.stat("dropped_queue_full") == 2000
    subscriber = await bridge.connect("s", clean=False)
    assert [m.payload for m in await take(subscriber, 1000)] == [b"%d" % n for n in range(2001, 3001)]


@bridge_test
async def test_a_subscriber_that_never_acknowledges_neither_slows_nor_fills_the_bridge(
    bridge: Bridge,
) -> None:
    stuck, publisher = await bridge.connect("stuck"), await bridge.connect("p")
    await stuck.subscribe(("in/#", 1), ("plain/#", 1))
    for start in range(0, 20_000, 1000):
        for number in range(start, start + 1000):
            publisher.send(publish(("in/a", "plain/a")[number % 2], b"x" * 100, 1, number + 1))
        for _ in range(1000):
            await publisher.receive()
    session = bridge.broker.sessions.get("stuck")
    assert session is not None
    assert len(session.outbox) <= bridge.config.limits.queued_messages + bridge.config.limits.in_flight
    assert bridge.stat("dropped_queue_full") > 0


@bridge_test
async def test_ordinary_qos_1_messages_all_arrive_when_the_subscriber_keeps_up(bridge: Bridge) -> None:
    subscriber, publisher = await bridge.connect("s"), await bridge.connect("p")
    await subscriber.subscribe(("plain", 1))

    async def publishing() -> None:
        for start in range(0, 5000, 500):
            publisher.send(*(publish("plain", b"%d" % n, 1, n + 1) for n in range(start, start + 500)))
            for _ in range(500):
                await publisher.receive()

    _, got = await asyncio.gather(publishing(), take(subscriber, 5000))
    assert [m.payload for m in got] == [b"%d" % number for number in range(5000)]


@bridge_test(session_expiry_interval=1000)
async def test_a_session_ends_when_its_client_stays_away_too_long(bridge: Bridge) -> None:
    subscriber = await bridge.connect("s", clean=False)
    await subscriber.subscribe(("plain", 1))
    subscriber.abort()
    await until(lambda: bridge.stat("sessions") == 0)
    subscriber = await bridge.open()
    assert (await subscriber.connect("s", clean=False)).body == b"\0\0"


@bridge_test(sessions=2)
async def test_of_too_many_sessions_the_one_left_first_goes_and_is_logged(bridge: Bridge) -> None:
    with unittest.TestCase().assertLogs("bridge.mqtt", "WARNING") as logs:
        for name in ("a", "b", "c"):
            client = await bridge.connect(name, clean=False)
            client.disconnect()
            assert await client.closed()
        await until(lambda: bridge.stat("ended_sessions") == 1)
    (line,) = logs.output
    assert "client 'a'" in line
    assert "sessions = 2" in line
    for name, present in (("a", 0), ("b", 1), ("c", 1)):
        client = await bridge.open()
        assert (await client.connect(name, clean=False)).body[0] == present, name
    assert bridge.stat("ended_sessions") == 1


@bridge_test
async def test_wills_reach_subscribers_and_are_retained_if_asked(bridge: Bridge) -> None:
    subscriber = await bridge.connect("s")
    await subscriber.subscribe(("w/#", 1))
    client = await bridge.connect("c", will=("w/1", b"gone", 1), will_retain=True)
    client.abort()
    assert (await subscriber.message())[:3] == ("w/1", b"gone", 1)
    late = await bridge.connect("late")
    await late.subscribe(("w/1", 0))
    assert (await late.message())[1:4] == (b"gone", 0, True)
    silent = await bridge.connect("c", keep_alive=1, will=("w/2", b"silent", 0))
    assert (await subscriber.message()).payload == b"silent"
    assert await silent.closed()


@bridge_test
async def test_a_filter_brings_the_retained_messages_that_it_matches_and_no_others(bridge: Bridge) -> None:
    levels = ["a", "b", "", "a.b", "a-", "a0", "$x"]
    topics = {"/".join(parts) for count in (1, 2, 3) for parts in itertools.product(levels, repeat=count)}
    topics = {topic for topic in topics if is_topic_name(topic.removeprefix("$"))}
    publisher = await bridge.connect("p")
    for topic in sorted(topics):
        await publisher.exchange(publish(topic, b"x", 1, 1, retain=True))
    for wanted in (
        "#",
        "+",
        "a/#",
        "a/+",
        "a/b/#",
        "a/+/b",
        "+/b",
        "/#",
        "/+",
        "a/",
        "a",
        "$x/#",
        "a0/#",
        "//#",
    ):
        subscriber = await bridge.connect("s")
        await subscriber.subscribe((wanted, 0))
        matching = {topic for topic in topics if matches(wanted, topic)}
        assert {(await subscriber.message()).topic for _ in matching} == matching, wanted
        assert await subscriber.silent(), wanted


@bridge_test
async def test_many_filters_and_retained_messages_keep_nobody_else_waiting(bridge: Bridge) -> None:
    publisher, other = await bridge.connect("p"), await bridge.connect("o")
    for number in range(1, 1001):
        publisher.send(publish(f"r/{number}/x/y", b"v", 1, number, retain=True))
    for _ in range(1000):
        await publisher.receive()
    subscriber = await bridge.connect("s")
    await subscriber.subscribe(*((f"+/+/+/{number}", 0) for number in range(300)))
    session = bridge.broker.sessions.get("s")
    assert session is not None
    assert session.line is not None
    for _ in range(10):
        assert await other.alive()
        assert session.line.holds, "it is still being looked at"
    assert await subscriber.silent()


@bridge_test
async def test_all_that_waits_on_stream_topics_for_who_is_away_survives_kills_and_stops(
    bridge: Bridge,
) -> None:
    subscriber, publisher = await bridge.connect("s", clean=False), await bridge.connect("p")
    await subscriber.subscribe(("in/#", 1))
    await subscriber.subscribe(("$share/g/in/#", 1))
    subscriber.disconnect()
    await until(lambda: all(one.line is None or one.client_id == "p" for one in bridge.broker.sessions.all()))
    for number in range(500):
        assert (await publisher.exchange(publish("in/t", b"%d" % number, 1, 1))).head == 0x40
    expected = sorted(2 * [b"%d" % number for number in range(500)])
    async with found_again(bridge, copied(bridge)) as again:
        subscriber = await again.connect("s", clean=False)
        assert sorted([(await subscriber.message()).payload for _ in expected]) == expected
    await bridge.restart()
    subscriber = await bridge.connect("s", clean=False)
    assert sorted([(await subscriber.message()).payload for _ in expected]) == expected
    assert await subscriber.silent()


@bridge_test(queued_messages=5, queued_bytes=2048, in_flight=3)
async def test_more_retained_messages_than_a_queue_holds_all_come_as_fast_as_they_are_read(
    bridge: Bridge,
) -> None:
    publisher = await bridge.connect("p")
    topics = [f"{'in' if number % 2 else 'on'}/{number:03}" for number in range(300)]
    for topic in topics:
        assert (await publisher.exchange(publish(topic, bytes(50_000), 2, 1, retain=True))).head == 0x50
        assert (await publisher.exchange(ack(0x62, 1))).head == 0x70
    for qos in (0, 1, 2):
        subscriber = await bridge.connect(f"s{qos}", clean=False)
        subscriber.writer.transport.pause_reading()  # type: ignore[attr-defined]
        subscriber.send(subscribe(1, ("none/+", 1), ("in/+", qos), ("on/#", qos)))
        await until(lambda: bridge.broker.sessions.all()[-1].subscriptions)
        for number in range(5):
            assert (await publisher.exchange(publish("in/live", b"%d" % number, 1, 9))).head == 0x40
        subscriber.writer.transport.resume_reading()  # type: ignore[attr-defined]
        found = list[str]()
        while len(found) < 305:
            head, body = await subscriber.receive()
            if head == 0x62:
                subscriber.send(ack(0x70, int.from_bytes(body, "big")))
            if head & 0xF0 != 0x30:
                continue
            message = subscriber.parse(head, body)
            found.append(message.topic)
            if message.qos:
                subscriber.send(ack(0x50 if message.qos == 2 else 0x40, message.packet_id))
        assert sorted(found) == sorted([*topics, *5 * ["in/live"]])
        subscriber.disconnect()
    assert bridge.stat("dropped_queue_full") == 0


@bridge_test
async def test_retained_messages_stop_coming_when_the_filter_is_unsubscribed(bridge: Bridge) -> None:
    publisher = await bridge.connect("p")
    for number in range(1, 301):
        await publisher.exchange(publish(f"r/{number:03}", b"x", 1, number, retain=True))
    subscriber = await bridge.open()
    await subscriber.connect("s", level=V5, properties={p.RECEIVE_MAXIMUM: 2})
    await subscriber.subscribe(("r/#", 1))
    sent = [subscriber.parse(*await subscriber.receive()) for _ in range(2)]
    assert (await subscriber.exchange(unsubscribe(7, "r/#", level=V5))).head == 0xB0
    subscriber.send(*(ack(0x40, one.packet_id) for one in sent))
    assert await subscriber.silent()


@bridge_test
async def test_retained_messages_on_their_way_to_a_persistent_session_survive_a_restart(
    bridge: Bridge,
) -> None:
    publisher = await bridge.connect("p")
    for topic in ("plain/r", "in/r"):
        await publisher.exchange(publish(topic, b"kept", 1, 1, retain=True))
    subscriber = await bridge.connect("s", clean=False)
    await subscriber.subscribe(("plain/#", 1), ("in/#", 1))
    assert [subscriber.parse(*await subscriber.receive()).topic for _ in range(2)] == ["plain/r", "in/r"]
    assert await subscriber.alive(), "neither is acknowledged"
    await bridge.restart()
    subscriber = await bridge.connect("s", clean=False)
    for topic in ("plain/r", "in/r"):
        got = await subscriber.message()
        assert (got.topic, got.payload, got.qos, got.retain) == (topic, b"kept", 1, True)
    assert await subscriber.alive(), "both are acknowledged"
    await bridge.restart()
    subscriber = await bridge.connect("s", clean=False)
    assert await subscriber.silent()
