"""Our session at another broker: the protocol that it takes, what is retained there, what it has granted."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.mosquitto import Mosquitto
from bridge.mqtt.mappings import Mapping
from bridge.mqtt.settings import MqttConfig, UpstreamSettings
from tests.fakes.brokers import BrokerOfBytes

from .harness import Bridge, full_disk, run_async, running, until
from .test_external import Device, connected, external, stored

BRIDGE = 0x84


def upstream(port: int, **settings: Any) -> UpstreamSettings:
    base: dict[str, Any] = {"name": "cloud", "mapping": [Mapping(filter="in/#")]}
    return UpstreamSettings(url=f"mqtt://127.0.0.1:{port}", **base | settings)


def stats(bridge: Bridge) -> dict[str, int]:
    return bridge.front.upstream_stats()["upstream:cloud"]


async def ready(bridge: Bridge, connects: int = 1) -> None:
    """Wait until the broker has granted the subscriptions."""
    await until(lambda: stats(bridge).get("connects", 0) >= connects and stats(bridge)["connected"])
    subscriptions = bridge.front._upstreams["cloud"]._subscriptions
    await until(lambda: subscriptions._made and not subscriptions._asked)


async def retained(bridge: Bridge) -> dict[str, bytes]:
    """What the bridge has retained below in/."""
    client = await bridge.connect()
    await client.subscribe(("in/#", 0))
    found = {}
    client.send(b"\xc0\0")
    while (packet := await client.receive()).head != 0xD0:
        message = client.parse(*packet)
        found[message.topic] = message.payload
    client.abort()
    return found


@pytest.mark.parametrize("protocol", [None, "3.1.1", "5"])
def test_a_value_retained_there_changes_and_is_cleared_here_also_while_the_gateway_was_away(
    tmp_path: Path, protocol: str | None
) -> None:
    async def main() -> None:
        with Mosquitto(tmp_path / "broker") as mosquitto:
            there = Device(mosquitto.port)

            async def put(**values: bytes) -> None:
                for topic, payload in values.items():
                    await asyncio.to_thread(there.publish, f"in/{topic}", payload, retain=True)

            await put(a=b"1", b=b"1", c=b"1")
            settings = [upstream(mosquitto.port, protocol=protocol)]
            async with asyncio.timeout(120), running(tmp_path, upstreams=settings) as bridge:
                await stored(bridge, 3)
                await put(a=b"2", b=b"")
                await stored(bridge, 5)
                assert await retained(bridge) == {"in/a": b"2", "in/c": b"1"}
                await bridge.stop()
                await put(a=b"3", c=b"")
                await bridge.start()
                await ready(bridge)
                await put(d=b"1")
                found = await stored(bridge, 8)
                assert await retained(bridge) == {"in/a": b"3", "in/d": b"1"}
                assert len(found) == 8, "a start brings nothing again"
            there.close()

    run_async(main())


@pytest.mark.parametrize("protocol", [None, "3.1.1", "5"])
def test_a_restart_does_not_store_again_what_is_retained_there(tmp_path: Path, protocol: str | None) -> None:
    async def main() -> None:
        with Mosquitto(tmp_path / "broker") as mosquitto:
            there = Device(mosquitto.port)
            for number in range(20):
                await asyncio.to_thread(there.publish, f"in/{number}", b"x", retain=True)
            settings = external(mosquitto.port, protocol=protocol)
            async with asyncio.timeout(120), running(tmp_path, **settings) as bridge:
                await stored(bridge, 20)
                for number in range(1, 4):
                    await bridge.restart()
                    await connected(bridge)
                    await asyncio.to_thread(there.publish, "in/end", b"%d" % number)
                    assert len(await stored(bridge, 20 + number)) == 20 + number
            there.close()

    run_async(main())


def test_the_bit_of_a_bridge_is_shown_by_upstreams_and_not_in_mode_external(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), BrokerOfBytes() as broker:
            settings = external(broker.port, protocol="3.1.1")
            async with running(tmp_path / "external", **settings) as bridge:
                await connected(bridge)
            async with running(tmp_path, upstreams=[upstream(broker.port, protocol="3.1.1")]) as bridge:
                await ready(bridge)
            assert broker.protocols == [4, BRIDGE]

    run_async(main())


@pytest.mark.parametrize("how", ["CONNACK", "closed"])
def test_a_broker_that_takes_no_bridges_is_remembered_and_served_without(tmp_path: Path, how: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), BrokerOfBytes() as broker:
            (broker.refused_protocols if how == "CONNACK" else broker.closed_protocols).add(BRIDGE)
            async with running(tmp_path, upstreams=[upstream(broker.port, protocol="3.1.1")]) as bridge:
                await ready(bridge)
                assert broker.protocols == [*[BRIDGE] * (1 if how == "CONNACK" else 2), 4]
                broker.protocols.clear()
                await bridge.restart()
                await ready(bridge)
                broker.cut()
                await ready(bridge, 2)
                assert broker.protocols == [4, 4]
                broker.send("in/a", b"1", 1, 1)
                assert await stored(bridge, 1) == [b"1"]

    run_async(main())


@pytest.mark.parametrize("mode", ["external", "upstream"])
@pytest.mark.parametrize("how", ["CONNACK", "closed", "silent"])
def test_mqtt_5_is_tried_first_and_3_1_1_is_spoken_to_a_broker_that_refuses_it(
    tmp_path: Path, how: str, mode: str
) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), BrokerOfBytes() as broker:
            if how == "silent":
                broker.ignored_protocols = {5}
            else:
                (broker.refused_protocols if how == "CONNACK" else broker.closed_protocols).add(5)
            own: dict[str, Any] = {"upstreams": [upstream(broker.port)]}
            async with running(tmp_path, **own if mode == "upstream" else external(broker.port)) as bridge:
                await until(lambda: broker.got("SUBSCRIBE in/#"))
                then = BRIDGE if mode == "upstream" else 4
                assert broker.protocols == [*[5] * (2 if how == "closed" else 1), then]
                broker.send("in/a", b"1", 1, 1)
                assert await stored(bridge, 1) == [b"1"]

    run_async(main())


def test_a_broker_that_took_mqtt_5_is_not_taken_for_an_older_one_while_it_closes_connections(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        broker = BrokerOfBytes()
        async with asyncio.timeout(120), broker, running(tmp_path, **external(broker.port)) as bridge:
            await connected(bridge)
            broker.closed_protocols.add(5)
            await bridge.restart()
            await until(lambda: len(broker.protocols) == 4)
            broker.closed_protocols.clear()
            await connected(bridge)
            assert set(broker.protocols) == {5}

    run_async(main())


def test_a_subscribe_is_left_out_only_if_the_same_session_has_granted_the_same_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), BrokerOfBytes() as broker:
            broker.session_present = True

            async def asked(present: bool = True, **settings: Any) -> list[tuple[str, int]]:
                """Restart with these settings; return what was subscribed to."""
                broker.options.clear()
                broker.session_present = present
                bridge.upstreams = [upstream(broker.port, **{"protocol": "3.1.1"} | settings)]
                await bridge.restart()
                await ready(bridge)
                return list(broker.options)

            async with running(tmp_path, upstreams=[upstream(broker.port, protocol="3.1.1")]) as bridge:
                await ready(bridge)
                assert broker.options == [("in/#", 1)]
                assert await asked() == []
                assert await asked(mapping=[Mapping(filter="in/#", qos=0)]) == [("in/#", 0)]
                assert await asked() == [("in/#", 1)]
                assert await asked(present=False) == [("in/#", 1)]
                assert await asked(client_id="other") == [("in/#", 1)]
                assert await asked() == [("in/#", 1)], "another session, of the first client id"
                broker.log.clear()
                assert await asked(mapping=[Mapping(filter="b")]) == [("b", 1)]
                await until(lambda: broker.got("UNSUBSCRIBE in/#"))
                assert await asked() == [("in/#", 1)]
                assert await asked() == []
                broker.refused_protocols.add(BRIDGE)
                assert await asked() == [("in/#", 1)], "another protocol"

    run_async(main())


@pytest.mark.parametrize("late", ["CONNACK", "SUBACK"])
def test_a_subscribe_is_not_left_out_after_a_kill_that_may_have_come_before_the_record(
    tmp_path: Path, late: str
) -> None:
    """The broker begins a new session, and the gateway is killed before it knows, or before the SUBACK."""

    async def main() -> None:
        async with asyncio.timeout(120), BrokerOfBytes() as broker:
            settings = [upstream(broker.port, protocol="3.1.1")]
            async with running(tmp_path / "a", upstreams=settings) as bridge:
                await ready(bridge)
                if late == "CONNACK":
                    broker.silent_to_connects = True
                    broker.cut()
                    await until(lambda: len(broker.protocols) == 2)
                else:
                    broker.silent = {"in/#"}
                    broker.options.clear()
                    broker.session_present = False
                    broker.cut()
                    await until(lambda: broker.options)
                killed = bridge.root / "data"
                await asyncio.to_thread(_copy, killed, tmp_path / "b" / "data")
            broker.silent_to_connects, broker.session_present = False, True
            broker.silent.clear()
            broker.options.clear()
            again = Bridge(tmp_path / "b", MqttConfig(listen=["tcp://127.0.0.1:0"]), upstreams=settings)
            await again.start()
            await until(lambda: broker.options == [("in/#", 1)])
            await again.stop()

    run_async(main())


def _copy(here: Path, there: Path) -> None:
    shutil.copytree(here, there, symlinks=True)


def test_an_id_that_comes_without_dup_is_new_after_a_kill_that_may_have_hidden_a_new_session(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), BrokerOfBytes() as broker:
            broker.session_present = True
            settings = [upstream(broker.port, protocol="3.1.1")]
            async with running(tmp_path / "a", upstreams=settings) as bridge:
                await ready(bridge)
                for number in (1, 2):
                    broker.send("in/a", b"%d" % number, 2, number)
                await until(lambda: broker.got("PUBREC 2"))
                broker.silent_to_connects = True
                broker.cut()
                await until(lambda: len(broker.protocols) == 2)
                await asyncio.to_thread(_copy, bridge.root / "data", tmp_path / "b" / "data")
            broker.silent_to_connects = False
            again = Bridge(tmp_path / "b", MqttConfig(listen=["tcp://127.0.0.1:0"]), upstreams=settings)
            await again.start()
            await ready(again)
            broker.log.clear()
            broker.send("in/a", b"3", 2, 1)  # the first message of a new session
            broker.send("in/a", b"2", 2, 2, dup=True)  # of the old one, if it goes on
            await until(lambda: broker.got("PUBREC 2"))
            assert await again.payloads() == [b"1", b"2", b"3"]
            await again.stop()

    run_async(main())


def test_nothing_later_is_stored_once_one_of_the_commits_of_a_message_has_failed(tmp_path: Path) -> None:
    """It is for the journal, which fails, and for a stream, whose disk does not answer yet."""
    gate, sync = threading.Event(), os.fdatasync

    def slow(fd: int) -> None:
        if "/slow/" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            gate.wait(60)
        sync(fd)

    async def main() -> None:
        settings = [upstream(broker.port, protocol="3.1.1", mapping=[Mapping(filter="#")])]
        async with asyncio.timeout(120), running(tmp_path, upstreams=settings) as bridge:
            away = await bridge.connect("away", clean=False)
            await away.subscribe(("slow", 1))
            away.abort()
            bridge.stream("slow", "slow", flush_on_write=True)
            await ready(bridge)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "fdatasync", slow)
                with full_disk():
                    broker.send("slow", b"first", 1, 1)
                    await until(lambda: stats(bridge).get("received") == 1)
                    await until(lambda: bridge.broker.journal.failed)
                    broker.send("in/a", b"second", 1, 2)
                    broker.send("in/a", b"nobody brings it again")
                    assert await stored(bridge, 1) == [b"nobody brings it again"]
                gate.set()
            await ready(bridge, 2)
            for number, (topic, payload) in enumerate((("slow", b"first"), ("in/a", b"second")), 1):
                broker.send(topic, payload, 1, number)
            await until(lambda: broker.got("PUBACK 2"))
            assert broker.got("PUBACK") == ["2 PUBACK 1", "2 PUBACK 2"]
            assert await bridge.payloads() == [b"nobody brings it again", b"second"]

    async def served() -> None:
        async with broker:
            await main()

    broker = BrokerOfBytes()
    broker.session_present = True
    run_async(served())
