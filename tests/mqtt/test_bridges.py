"""Other brokers that bridge to us: their private protocol level, their state topic, and MQTT 3.1."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.testbed.certificates import Authority
from benchmarks.testbed.mosquitto import Mosquitto
from bridge.access.rules import AccessRule
from bridge.access.users import hash_password
from bridge.mqtt.settings import TlsSettings
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
STATES = (STATE, "$SYS/broker/bridge/edge/state", "$SYS/bridges")
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


@bridge_test(acl=[AccessRule(user="*", subscribe=["$SYS/#"])])
async def test_whatever_a_bridge_sends_below_sys_is_acknowledged_and_not_published(bridge: Bridge) -> None:
    watcher = await bridge.connect("w")
    await watcher.subscribe(*((topic, 1) for topic in STATES[:2]))
    forwarded = ("$SYS/broker/uptime", "$SYS/a/b")
    for level, will in (
        *((level | 0x80, topic) for level in (V31, V311) for topic in (None, *STATES, *forwarded)),
        *((level, topic) for level in (V311, V5) for topic in STATES),
    ):
        client = await bridge.open()
        name = b"MQIsdp" if level & 0x7F == V31 else b"MQTT"
        options = {"will": (will, b"0", 1), "will_retain": True} if will else {}
        await client.connect("edge", level=level, name=name, **options)
        for topic in (*STATES, *forwarded):
            for qos, head in ((1, 0x40), (2, 0x50)):
                sent = publish(topic, b"1", qos, qos, retain=True, level=level)
                assert await client.exchange(sent) == Packet(head, bytes((0, qos))), (level, will, topic)
            if level & 0x7F != V5:
                assert await client.exchange(ack(0x62, 2)) == Packet(0x70, b"\0\2")
        client.abort()
        await until(lambda: bridge.stat("connections") == 1)
    assert await watcher.silent()
    assert (bridge.stat("retained"), bridge.stat("wills")) == (0, 0)


@bridge_test
async def test_no_other_client_has_a_will_where_this_broker_publishes_its_state(bridge: Bridge) -> None:
    watcher = await bridge.connect("w")
    await watcher.subscribe(("$SYS/broker/#", 0))
    found = set()
    while "$SYS/broker/heap/maximum" not in found or len(found) < 30:
        found.add((await watcher.message()).topic)
    for topic in found:
        client = await bridge.open()
        await client.connect("x", level=V5, will=(topic, b"", 0), expect=0x87)


def test_a_will_that_no_rule_could_allow_names_no_rule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with running(tmp_path) as bridge:
            for topic in ("streambridge/x/listStreams", "$share/g/a"):
                client = await bridge.open()
                await client.connect("x", will=(topic, b"", 0), expect=5)

    with caplog.at_level("INFO"):
        run_async(main())
    refused = [one.getMessage() for one in caplog.records if "refused: " in one.getMessage()]
    assert len(refused) == 2
    assert all("belongs to the broker" in line and "acl" not in line for line in refused)


# Bridges as people publish them; {0} is our address. Each with a topic at their side, and what it is at ours.
BRIDGES = {
    "the shortest": ("connection edge\naddress {0}\ntopic # both 0\n", "in/a", "in/a"),
    "with a state of its own": (
        "connection cloud-01\naddress {0}\nclientid edge-7\ncleansession false\nstart_type automatic\n"
        "keepalive_interval 60\nrestart_timeout 10 30\nnotifications true\n"
        "notification_topic $SYS/broker/bridge/cloud-01/state\ntopic # out 1\ntopic commands/# in 1\n",
        "in/a",
        "in/a",
    ),
    "of a home": (
        "connection homeassistant\naddress {0}\nbridge_protocol_version mqttv311\ntry_private false\n"
        "remote_clientid ha-bridge\nremote_username ann\nremote_password a\n"
        "topic homeassistant/# out 1\ntopic tele/# out 1\ntopic cmnd/# in 1\n",
        "tele/plug/STATE",
        "tele/plug/STATE",
    ),
    "with prefixes": (
        "connection site1\naddress {0}\nlocal_clientid site1-local\nnotifications_local_only true\n"
        "topic # out 1 line/ plants/site1/\ntopic # in 1 commands/ plants/site1/commands/\n",
        "line/temp",
        "plants/site1/temp",
    ),
    "as to AWS IoT": (
        "connection awsiot\naddress {1}\nbridge_cafile {2}\nbridge_insecure false\n"
        "bridge_attempt_unsubscribe false\n"
        "bridge_protocol_version mqttv311\ncleansession true\nclientid bridgeawsiot\nstart_type automatic\n"
        "notifications false\ntry_private false\nremote_username ann\nremote_password a\n"
        "topic awsiot_to_local in 1\ntopic local_to_awsiot out 1\ntopic both_directions both 1\n",
        "local_to_awsiot",
        "local_to_awsiot",
    ),
    "with the state of its broker": (
        "connection monitor\naddress {0}\nsys_interval 1\ntopic $SYS/# out 0\n"
        "topic $SYS/broker/load/# out 1\ntopic $SYS/broker/clients/# both 0\ntopic status/# out 1\n",
        "status/a",
        "status/a",
    ),
    "of MQTT 5": (
        "connection five\naddress {0}\nbridge_protocol_version mqttv50\n"
        "notification_topic $SYS/broker/bridge/five/state\nmax_queued_messages 10000\ntopic # both 2\n",
        "in/a",
        "in/a",
    ),
    "of MQTT 3.1": (
        "connection old\naddress {0}\nbridge_protocol_version mqttv31\nclientid old01\n"
        "notification_topic $SYS/broker/bridge/old/state\ntopic in/# out 2\n",
        "in/a",
        "in/a",
    ),
    "that is lazy": (
        "connection lazy\naddress {0}\nstart_type lazy\nidle_timeout 60\nthreshold 1\ncleansession false\n"
        "topic in/# out 1\n",
        "in/a",
        "in/a",
    ),
    "with two addresses": (
        "connection twice\naddresses {0} {0}\nround_robin true\ncleansession false\n"
        'notification_topic $SYS/bridges/twice\ntopic # out 1 "" east/\ntopic # in 1 west/ west/\n',
        "in/a",
        "east/in/a",
    ),
}


@pytest.mark.parametrize("name", BRIDGES)
def test_bridges_as_people_configure_them_connect_at_once_and_stay(tmp_path: Path, name: str) -> None:
    lines, theirs_topic, ours_topic = BRIDGES[name]
    authority, users = Authority(tmp_path / "ca"), tmp_path / "users"
    pair = authority.issue("server")
    authority.cert.chmod(0o644)
    users.write_text(f"ann:{hash_password(b'a')}\n")
    users.chmod(0o600)
    listen = ["tcp://127.0.0.1:0", "tls://127.0.0.1:0"]
    settings = {"users_file": users, "tls": TlsSettings(cert=pair.cert, key=pair.key)}

    async def main() -> None:
        async with asyncio.timeout(240), running(tmp_path / "ours", listen=listen, **settings) as bridge:
            near = await bridge.connect("near")
            await near.subscribe(("#", 1))
            addresses = [f"127.0.0.1:{bridge.port_of(number)}" for number in (0, 1)]
            with Mosquitto(tmp_path / "theirs", lines.format(*addresses, authority.cert)) as theirs:
                other = Bridge(tmp_path, bridge.config)
                other.urls = [f"mqtt://127.0.0.1:{theirs.port}"]
                there = await other.connect("there")
                first = None
                while first is None:  # a clean session gets only what comes after it has begun
                    await there.exchange(publish(theirs_topic, b"first", 1, 9))
                    with suppress(TimeoutError):
                        first = await near.message(1)
                assert first[:2] == (ours_topic, b"first")
                for number in range(1, 4):
                    await there.exchange(publish(theirs_topic, b"%d" % number, 1, number))
                    while (message := await near.message())[1] == b"first":
                        continue
                    assert message[:2] == (ours_topic, b"%d" % number)
                if "$SYS" in lines:
                    await until(lambda: bridge.stat("ignored_bridge_state"))
                assert bridge.stat("accepted") == 2, "the bridge and us: at the first attempt, and it stays"
            assert not [
                key for key in bridge.front.stats() if key.startswith(("rejected", "protocol_errors"))
            ]

    run_async(main())


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
