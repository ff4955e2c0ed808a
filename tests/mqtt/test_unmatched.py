"""Topics that no stream takes: what their clients are told, and who sees them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from bridge.mqtt.broker.unmatched import MOST, OF_ONE, pattern_of
from bridge.mqtt.settings import ListenerTable
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5
from bridge.topics import matches
from tests.fakes.byhand import World

from .harness import PLAIN, Bridge, ack, bridge_test, connect, publish, subscribe

RECEIPTS = {p.USER_PROPERTY: [(b"streambridge-receipts", b"true")]}


@bridge_test
async def test_a_device_is_told_that_nobody_wants_its_message(bridge: Bridge) -> None:
    away = await bridge.connect("away", clean=False)
    await away.subscribe(("away/#", 1), ("$share/g/shared/+", 1))
    away.disconnect()
    for properties in (PLAIN, RECEIPTS):
        device = await bridge.open()
        await device.connect("d", level=V5, properties=properties)
        for qos in (1, 2):
            for number, (topic, said) in enumerate(
                [("on/x", b"\x10"), ("away/x", b""), ("shared/x", b""), ("$other/x", b"\x10")], 1
            ):
                for retain in (False, True):
                    number += 4
                    answer = await device.exchange(publish(topic, b"x", qos, number, retain=retain, level=V5))
                    assert answer == (0x40 if qos == 1 else 0x50, bytes((0, number)) + said), topic
                    if qos == 2:
                        assert (await device.exchange(ack(0x62, number))).head == 0x70
        assert (await device.exchange(publish("in/x", b"x", 1, 9, level=V5))).body[2:3] in (b"", b"\0")
        device.disconnect()
    old = await bridge.connect("old")
    assert await old.exchange(publish("on/x", b"x", 1, 1)) == (0x40, b"\0\1")


def test_a_typo_is_listed_and_logged_once_an_hour_with_the_line_that_stores_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world = World(tmp_path)
    world.streams.definitions["s"].by_itself = True
    wire = world.connect(connect("pump-7") + publish("in/7", b"x") + publish("inn/line1/7", b"x"))
    for number in (8, 9):
        wire.send(publish(f"inn/line2/{number}", b"x", 1, 1))
    wire.got()
    unmatched = world.broker.publisher.unmatched
    (one,) = unmatched.listed()
    assert {key: one[key] for key in ("topics", "topic", "client", "messages", "delivered", "line")} == {
        "topics": "inn/+/+",
        "topic": "inn/line2/9",
        "client": "pump-7",
        "messages": 3,
        "delivered": False,
        "line": 'topics = ["inn/+/+"]',
    }
    said = "client 'pump-7' (anonymous) publishes on inn/line1/7, which no stream takes"
    assert caplog.text.count("which no stream takes") == caplog.text.count(said) == 1
    assert 'topics = ["inn/+/+"]' in caplog.text
    world.run(3500)
    wire.send(publish("inn/line2/9", b"x"))
    assert caplog.text.count("which no stream takes") == 1
    world.run(200)
    wire.send(publish("inn/line2/9", b"x"))
    assert caplog.text.count("which no stream takes") == 2
    assert "5 such messages" in caplog.text
    world.streams.definitions["s"].topic = "inn/#"
    assert unmatched.listed() == []


def test_what_subscribers_get_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World(tmp_path)
    world.connect(connect("s") + subscribe(1, ("cmd/#", 0))).got()
    wire = world.connect(connect("p"))
    wire.send(publish("cmd/a", b"x") + publish("state/a", b"x", retain=True))
    wire.send(publish("$SYS/broker/connection/a/state", b"1"))
    wire.got()
    levels = {record.levelname for record in caplog.records if "which no stream takes" in record.getMessage()}
    assert levels == {"INFO"}
    assert [one["delivered"] for one in world.broker.publisher.unmatched.listed()] == [True, True]


def test_nobody_fills_the_list_or_the_log_for_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    flood, count = world.connect(connect("flood")), 1_000
    for number in range(count):
        name = "".join(chr(ord("a") + int(digit)) for digit in str(number))
        flood.send(publish(f"t/{name}", b"x") + publish("x" * number + "/y", b"x"))
        flood.send(publish("/".join(name * 20), b""))
        flood.got()
    unmatched = world.broker.publisher.unmatched
    assert len(unmatched.listed()) <= OF_ONE + 1 < MOST
    assert sum(one["messages"] for one in unmatched.listed()) == 3 * count
    assert caplog.text.count("which no stream takes") <= OF_ONE + 1


@pytest.mark.parametrize(
    "topic",
    ["a", "a1", "1/2", "a/b2/c", "a//2", "/1/", "$aws/things/t1/x", "x" * 300, "a/" + "y" * 300, "é1/b"],
)
def test_the_line_stores_the_topic(topic: str) -> None:
    pattern = pattern_of(topic)
    assert matches(pattern, topic)
    assert len(pattern) <= 202


LAX = ListenerTable(name="lax", listen=["tcp://127.0.0.1:0"], unmatched="deliver")


@bridge_test(unmatched="refuse", listener=[LAX])
async def test_a_listener_may_refuse_what_no_stream_takes(bridge: Bridge) -> None:
    watcher = await bridge.connect("watcher")
    await watcher.subscribe(("#", 0))
    lax = await bridge.open(1)
    await lax.connect("lax")
    assert (await lax.exchange(publish("on/a", b"lax", 1, 1))).head == 0x40
    new = await bridge.connect("new", level=V5)
    answer = await new.exchange(publish("on/a", b"x", 1, 1, retain=True, level=V5))
    assert answer.body[2] == 0x90
    assert b"no stream takes messages on 'on/a'" in answer.body
    assert (await new.exchange(publish("in/a", b"in", 1, 2, level=V5))).body == b"\0\2"
    new.send(publish("on/qos0", b"x", level=V5))
    assert await new.alive()
    old = await bridge.connect("old")
    old.send(publish("on/a", b"x", 1, 1))
    assert await old.closed(), "as for a stream that does not exist"
    assert [(await watcher.message()).payload for _ in range(2)] == [b"lax", b"in"]
    assert (bridge.stat("rejected_no_stream"), bridge.stat("dropped_no_stream")) == (2, 1)
    assert {one["topics"]: one["messages"] for one in bridge.front.unmatched()} == {"on/a": 3, "on/+": 1}
    refused = await bridge.open()
    await refused.connect("w", expect=5, will=("on/will", b"x", 1))
    bridge.stream("kept")
    bridge.broker.publisher.refused_stream = "kept"
    old = await bridge.connect("old")
    assert (await old.exchange(publish("off/a", b"off", 1, 1))).head == 0x40
    assert await bridge.payloads("kept") == [b"off"]
    bridge.stream("on", "on/#")
    assert (await new.exchange(publish("on/a", b"y", 1, 3, level=V5))).body == b"\0\3"
    assert [one["topics"] for one in bridge.front.unmatched()] == ["off/a"]
