"""Other brokers that bridge to us: their private protocol level, their state topic, and MQTT 3.1."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.testbed.mosquitto import Mosquitto
from bridge.access.rules import AccessRule
from bridge.mqtt.wire.packets import V5, V31, V311

from .harness import (
    Bridge,
    Packet,
    ack,
    bridge_test,
    publish,
    run_async,
    running,
    subscribe,
    until,
)

STATE = "$SYS/broker/connection/edge.gateway/state"
TOPICS = "topic in/# out 1\ntopic back/# in 1\ntopic both/# both 1"


@pytest.mark.parametrize("version", ["", "mqttv31", "mqttv311", "mqttv50"])
def test_a_mosquitto_bridge_connects_at_once_and_serves_both_directions(tmp_path: Path, version: str) -> None:
    chosen = f"bridge_protocol_version {version}\n" if version else ""

    async def main() -> None:
        async with running(tmp_path / "ours", listen=["tcp://127.0.0.1:0"]) as bridge:
            lines = f"connection edge\naddress 127.0.0.1:{bridge.port}\n{chosen}{TOPICS}\n"
            with Mosquitto(tmp_path / "theirs", lines) as theirs:
                other = Bridge(tmp_path, bridge.config)
                other.urls = [f"mqtt://127.0.0.1:{theirs.port}"]
                far, near = await other.connect("far"), await bridge.connect("near")
                there, here = await other.connect("there"), await bridge.connect("here")
                await far.subscribe(("back/#", 1), ("both/#", 1))
                await near.subscribe(("both/#", 1))
                await until(lambda: bridge.stat("ignored_bridge_state") == 1)
                await there.exchange(publish("in/a", b"out", 1, 1))
                await until(lambda: bridge.stat("received") >= 2)
                assert await bridge.payloads() == [b"out"]
                await here.exchange(publish("back/a", b"in", 1, 1))
                assert (await far.message())[:2] == ("back/a", b"in")
                await there.exchange(publish("both/a", b"from there", 1, 2, retain=True))
                assert (await far.message())[:2] == ("both/a", b"from there")
                assert (await near.message())[:2] == ("both/a", b"from there")
                await here.exchange(publish("both/b", b"from here", 1, 2, retain=True))
                assert (await near.message())[:2] == ("both/b", b"from here")
                assert (await far.message())[:2] == ("both/b", b"from here")
                assert await far.silent()
                assert await near.silent(), "what a bridge has published does not come back by it"
                assert {one.topic for one in bridge.broker.router.retained.all()} == {b"both/a", b"both/b"}
                assert bridge.stat("accepted") == 3, "the bridge and us: at the first attempt, and it stays"
                assert theirs.process is not None
                theirs.process.kill()
                await until(lambda: bridge.stat("connections") == 2)
            assert bridge.stat("wills") == 0

    run_async(main())


@bridge_test(sys_interval=0)
async def test_where_a_bridge_says_that_it_is_connected_nothing_is_published(bridge: Bridge) -> None:
    watcher = await bridge.connect("w")
    await watcher.subscribe((STATE, 1), ("$SYS/#", 1))
    for level in (V31 | 0x80, V311 | 0x80, V311, V5):
        client = await bridge.open()
        name = b"MQIsdp" if level & 0x7F == V31 else b"MQTT"
        options = {"level": level, "name": name, "will": (STATE, b"0", 1), "will_retain": True}
        await client.connect("edge.gateway", **options)
        assert await client.exchange(publish(STATE, b"1", 1, 1, retain=True, level=level)) == Packet(
            0x40, b"\0\1"
        )
        client.abort()
    await until(lambda: bridge.stat("connections") == 1)
    assert await watcher.silent()
    assert (bridge.stat("retained"), bridge.stat("wills")) == (0, 0)
    client = await bridge.open()
    await client.connect("x", level=V5, will=("$SYS/broker/uptime", b"", 0), expect=0x87)
    client = await bridge.open()
    await client.connect("x", level=V5)
    assert (await client.exchange(publish("$SYS/broker/uptime", b"", 1, 1, level=V5))).body[2] == 0x87


@bridge_test(acl=[AccessRule(user="*", publish=["in/#"])])
async def test_the_rules_need_not_name_where_a_bridge_says_that_it_is_connected(bridge: Bridge) -> None:
    client = await bridge.open()
    await client.connect("edge.gateway", level=V311 | 0x80, will=(STATE, b"0", 1), will_retain=True)
    assert await client.exchange(publish(STATE, b"1", 1, 1, retain=True)) == Packet(0x40, b"\0\1")
    assert await client.exchange(publish("in/a", b"1", 1, 2)) == Packet(0x40, b"\0\2")


@bridge_test
async def test_with_the_bridge_bit_nothing_comes_back_and_retained_stays_retained(bridge: Bridge) -> None:
    other = await bridge.connect("o")
    for level in (V31 | 0x80, V311 | 0x80):
        client = await bridge.open()
        await client.connect("b", level=level, name=b"MQIsdp" if level == V31 | 0x80 else b"MQTT")
        assert await client.subscribe((f"t{level}/#", 1)) == b"\1"
        assert await client.exchange(publish(f"t{level}/own", b"x", 1, 1)) == Packet(0x40, b"\0\1")
        await other.exchange(publish(f"t{level}/a", b"kept", 1, 1, retain=True))
        message = await client.message()
        assert (message.topic, message.retain) == (f"t{level}/a", True)
        await other.exchange(publish(f"t{level}/a", b"not kept", 1, 1))
        assert not (await client.message()).retain
        assert await client.silent()


@bridge_test
async def test_mqtt_3_1_is_served(bridge: Bridge) -> None:
    client = await bridge.open()
    await client.connect("", level=V31, name=b"MQIsdp", expect=2)
    assert await client.closed()
    client = await bridge.open()
    options = {"level": V31, "name": b"MQIsdp", "clean": False}
    assert (await client.connect("old", **options)).body == b"\0\0"
    again = bytearray(subscribe(1, ("plain", 1)))
    again[0] |= 8  # DUP, which 3.1 has in SUBSCRIBE, UNSUBSCRIBE and PUBREL too
    assert await client.exchange(again) == Packet(0x90, b"\0\1\1")
    assert await client.exchange(publish("in/a", b"2", 2, 7)) == Packet(0x50, b"\0\7")
    assert await client.exchange(ack(0x6A, 7)) == Packet(0x70, b"\0\7")
    assert await bridge.payloads() == [b"2"]
    client.disconnect()
    await until(lambda: bridge.stat("connections") == 0)
    other = await bridge.connect("o")
    await other.exchange(publish("plain", b"kept", 1, 1))
    client = await bridge.open()
    assert (await client.connect("old", **options)).body == b"\0\0", "3.1 has no Session Present"
    assert (await client.message()).payload == b"kept"
    assert [one.protocol for one in bridge.front.clients() if one.id == "old"] == ["MQTT 3.1"]
