"""[[upstream]]: messages of another broker come here, and are acknowledged there once they are stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from benchmarks.testbed.certificates import Authority
from benchmarks.testbed.local import free_port
from benchmarks.testbed.mosquitto import Mosquitto
from bridge.access.rules import AccessRule
from bridge.access.users import hash_password
from bridge.errors import ConfigError
from bridge.mqtt.mappings import Mapping
from bridge.mqtt.settings import MqttConfig, TlsSettings, UpstreamSettings
from bridge.mqtt.wire import properties as p
from tests.export.process import Running
from tests.fakes.brokers import BrokerOfBytes

from .harness import (
    Bridge,
    Published,
    copied,
    decoded,
    found_again,
    run_async,
    running,
    subscribe,
    until,
)
from .test_external import Device, stored

HUB = """
[gateway]
id = "hub"
data_dir = "data"
[mqtt]
listen = ["tcp://127.0.0.1:{port}"]
[greengrass]
listen = ""
[http]
listen = ""
"""
COMMANDS = [Mapping(filter="{gateway}/cmd/#", topic="in/{topic/2/#}")]


@pytest.fixture(params=["mosquitto", "streambridge"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """The port of a real broker."""
    if request.param == "mosquitto":
        with Mosquitto(tmp_path / "broker") as broker:
            yield broker.port
    else:
        port = free_port()
        with Running(tmp_path / "broker", HUB.format(port=port), port):
            yield port


def upstream(port: int, **settings: Any) -> UpstreamSettings:
    base: dict[str, Any] = {"name": "cloud", "url": f"mqtt://127.0.0.1:{port}", "mapping": COMMANDS}
    return UpstreamSettings(**base | settings)


def stats(bridge: Bridge, name: str = "cloud") -> dict[str, int]:
    return bridge.front.upstream_stats()[f"upstream:{name}"]


async def ready(bridge: Bridge, connects: int = 1, name: str = "cloud") -> None:
    """Wait until the broker has granted the subscriptions: what it gets before is nobody's."""
    await until(lambda: stats(bridge, name).get("connects", 0) >= connects)
    one = bridge.front._upstreams[name]
    await until(lambda: one._connected and not one._subscriptions._asked)


@contextmanager
def device(port: int, *, v5: bool = True) -> Iterator[Device]:
    found = Device(port, v5=v5)
    try:
        yield found
    finally:
        found.close()


def user_properties(message: Published) -> list[tuple[bytes, bytes]]:
    raw = p.varint(len(message.properties)) + message.properties
    return list(p.read_properties(raw, 0, len(raw), 0x30)[0][p.USER_PROPERTY])


async def publish(there: Device, topic: str, *payloads: bytes, **options: Any) -> None:
    for payload in payloads:
        await asyncio.to_thread(there.publish, topic, payload, **options)


@pytest.mark.parametrize("protocol", ["3.1.1", "5"])
def test_commands_reach_streams_subscribers_and_the_queues_of_those_who_are_away(
    tmp_path: Path, port: int, protocol: str
) -> None:
    async def main() -> None:
        settings = upstream(
            port, protocol=protocol, mapping=[*COMMANDS, Mapping(filter="all/+", topic="{topic}/x")]
        )
        async with asyncio.timeout(120), running(tmp_path, upstreams=[settings]) as bridge:
            away = await bridge.connect("away", clean=False)
            await away.subscribe(("all/#", 1))
            away.abort()
            press = await bridge.connect("press", level=5)
            await press.subscribe(("#", 1))
            await ready(bridge)
            with device(port) as there:
                properties = Properties(PacketTypes.PUBLISH)
                properties.UserProperty = ("by", "me")
                await publish(there, "plant-7/cmd/press/start", b"1", properties=properties)
                await publish(there, "all/stop", b"2")
                await publish(there, "plant-8/cmd/press/start", b"not ours")
            first, second = await press.message(), await press.message()
            assert (first.topic, first.payload, first.qos) == ("in/press/start", b"1", 1)
            assert (second.topic, second.payload, second.qos) == ("all/stop/x", b"2", 1)
            marks = [(b"by", b"me")] if protocol == "5" else []
            assert user_properties(first) == [*marks, (b"bridged-by", b"plant-7")]
            (kept,) = await stored(bridge, 1)
            assert kept == b"1"
            assert ["bridged-by", "plant-7"] in decoded((await bridge.stored())[0].headers)["user"]
            again = await bridge.connect("away", clean=False)
            found = await again.message()
            assert (found.topic, found.payload, found.qos) == ("all/stop/x", b"2", 1)
            assert stats(bridge)["received"] == 2
            for client in (press, again):
                client.abort()

    run_async(main())


def test_commands_wait_at_the_broker_while_the_gateway_is_away(tmp_path: Path, port: int) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), running(tmp_path, upstreams=[upstream(port)]) as bridge:
            await ready(bridge)
            await bridge.stop()
            numbers = [b"%d" % number for number in range(300)]
            with device(port) as there:
                await publish(there, "plant-7/cmd/a", *numbers)
            await bridge.start()
            assert await stored(bridge, 300) == numbers
            assert "sessions_lost" not in stats(bridge)

    run_async(main())


def test_a_full_stream_holds_commands_at_the_broker_until_there_is_room(tmp_path: Path, port: int) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), running(tmp_path, 20, upstreams=[upstream(port)]) as bridge:
            bridge.stream("small", "in/small", max_size=4096, stream_segment_size=1024)
            await ready(bridge)
            payloads = [b"%03d" % number + bytes(200) for number in range(100)]
            with device(port) as there:
                await publish(there, "plant-7/cmd/small", *payloads)
            # Stream "s" gets them, too: a message goes to all of its streams or to none.
            while stats(bridge).get("received", 0) < 100:
                await until(lambda: bridge.front.upstreams()[0][5] or stats(bridge)["received"] == 100)
                assert "is full" in (bridge.front.upstreams()[0][5] or "is full"), "the status says why"
                await bridge.manager.purge("small")
                await asyncio.sleep(0.01)
            assert await stored(bridge, 100) == payloads, "all of them, in order, and once"
            assert bridge.front.upstreams()[0][5] is None
            assert stats(bridge)["connects"] == 1

    run_async(main())


def test_what_the_rules_forbid_is_held_until_they_allow_it(tmp_path: Path) -> None:
    async def main() -> None:
        rules = [AccessRule(user="north", publish=["in/a"])]
        config = {"acl": rules}
        settings = [upstream(broker.port, user="north")]
        async with asyncio.timeout(120), running(tmp_path, 20, upstreams=settings, **config) as bridge:
            await ready(bridge)
            with device(broker.port) as there:
                await publish(there, "plant-7/cmd/a", b"1")
                await publish(there, "plant-7/cmd/b", b"2")
                await publish(there, "plant-7/cmd/a", b"3")
            await until(lambda: stats(bridge).get("held", 0) > 2)
            assert await bridge.payloads() == [b"1"]
            assert "may not publish on 'in/b'" in (bridge.front.upstreams()[0][5] or "")
            allowed = MqttConfig(
                listen=bridge.config.listen, acl=[AccessRule(user="north", publish=["in/#"])]
            )
            bridge.front.reload(allowed, settings)
            assert await stored(bridge, 3) == [b"1", b"2", b"3"]
            assert stats(bridge)["connects"] == 1, "an upstream that did not change goes on"

    with Mosquitto(tmp_path / "broker") as broker:
        run_async(main())


@pytest.mark.parametrize("refused", [None, "refused"])
def test_a_command_that_no_stream_can_ever_store_holds_nothing_up(
    tmp_path: Path, refused: str | None
) -> None:
    async def main() -> None:
        settings = {"upstreams": [upstream(broker.port)], "refused_stream": refused}
        async with asyncio.timeout(120), running(tmp_path, **settings) as bridge:
            bridge.stream("tiny", "in/tiny", max_size=4096, stream_segment_size=1024)
            bridge.stream("refused")
            await ready(bridge)
            with device(broker.port) as there:
                await publish(there, "plant-7/cmd/tiny", bytes(5000))
                await publish(there, "plant-7/cmd/a", b"after")
            assert await stored(bridge, 1) == [b"after"]
            assert stats(bridge).get("dropped_too_large", 0) == (refused is None)
            assert len(await bridge.payloads("refused")) == (refused is not None)

    with Mosquitto(tmp_path / "broker") as broker:
        run_async(main())


@pytest.mark.parametrize("topic", ["plain/{topic}", "in/{topic}"], ids=["no stream", "in a stream"])
def test_nothing_is_acknowledged_before_a_queue_of_a_client_that_is_away_has_it(
    tmp_path: Path, topic: str
) -> None:
    async def main() -> None:
        async with BrokerOfBytes() as broker, asyncio.timeout(120):
            settings = [
                upstream(broker.port, protocol="3.1.1", mapping=[Mapping(filter="cmd/#", topic=topic)])
            ]
            async with running(tmp_path, upstreams=settings) as bridge:
                away = await bridge.connect("away", clean=False)
                await away.subscribe(("+/cmd/#", 1))
                away.abort()
                await ready(bridge)
                journaled: list[Any] = []
                after_commit = bridge.broker.journal.after_commit

                def hold(done: Any, heard: float = 0.0) -> None:
                    journaled.append(done)

                bridge.broker.journal.after_commit = hold  # type: ignore[method-assign]
                broker.send("cmd/a", b"1", 1, 7)
                await until(lambda: journaled)
                broker.send("cmd/b", b"2", 0)
                await until(lambda: stats(bridge)["received"] == 2)
                assert not broker.got("PUBACK")
                bridge.broker.journal.after_commit = after_commit  # type: ignore[method-assign]
                after_commit(journaled[0])
                await until(lambda: broker.got("PUBACK 7"))

    run_async(main())


def test_commands_in_a_stream_are_still_in_the_queues_of_those_who_are_away_after_a_kill(
    tmp_path: Path,
) -> None:
    """Also what a member of a shared subscription has left to another one."""

    async def main() -> None:
        async with BrokerOfBytes() as broker, asyncio.timeout(120):
            mapping = [Mapping(filter="cmd/#", topic="in/{topic}")]
            settings = [upstream(broker.port, protocol="3.1.1", mapping=mapping)]
            async with running(tmp_path, upstreams=settings) as bridge:
                for name, topic_filter in (("press", "in/#"), ("one", "$share/g/in/#")):
                    client = await bridge.connect(name, clean=False)
                    await client.subscribe((topic_filter, 1))
                    client.abort()
                await until(lambda: broker.got("SUBSCRIBE"))
                for number in (1, 2):
                    broker.send("cmd/a", b"%d" % number, 1, number)
                await until(lambda: broker.got("PUBACK 2"))
                killed = copied(bridge)
                two = await bridge.connect("two", clean=False)
                await two.subscribe(("$share/g/in/#", 1))
                two.abort()
                (await bridge.connect("one")).abort()  # with a clean session: the old one ends
                await until(lambda: bridge.stat("reassigned") == 2)
                killed_later = copied(bridge)
            for files, names in ((killed, ("press", "one")), (killed_later, ("press", "two"))):
                async with found_again(bridge, files) as again:
                    for name in names:
                        client = await again.connect(name, clean=False)
                        found = [await client.message() for _ in range(2)]
                        assert [one.payload for one in found] == [b"1", b"2"]
                        client.abort()

    run_async(main())


def test_a_reload_adds_changes_and_removes_upstreams_or_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), running(tmp_path) as bridge:
            config, cloud = bridge.config, upstream(broker.port)
            bridge.front.reload(config, [cloud])
            await ready(bridge)
            with device(broker.port) as there:
                await publish(there, "plant-7/cmd/a", b"1")
                await stored(bridge, 1)

                missing = upstream(broker.port, name="two", username="u", password_file=tmp_path / "none")
                with pytest.raises(ConfigError, match="password_file of upstream 'two'"):
                    bridge.front.reload(config, [missing])
                assert stats(bridge)["connects"] == 1
                await publish(there, "plant-7/cmd/a", b"2")
                assert await stored(bridge, 2) == [b"1", b"2"]

                other = upstream(broker.port, mapping=[Mapping(filter="new/#", topic="in/{topic/1/#}")])
                bridge.front.reload(config, [other])
                await ready(bridge)
                await publish(there, "plant-7/cmd/a", b"of a mapping that is gone")
                await publish(there, "new/a", b"3")
                assert await stored(bridge, 3) == [b"1", b"2", b"3"]

                bridge.front.reload(config, [])
                assert bridge.front.upstreams() == []
                bridge.front.reload(config, [other])
                bridge.front.reload(config, [])
                bridge.front.reload(config, [other])
                await ready(bridge)
                await publish(there, "new/a", b"4")
                assert (await stored(bridge, 4))[3:] == [b"4"]

    with Mosquitto(tmp_path / "broker") as broker:
        run_async(main())


def test_reloads_while_the_broker_is_away_leave_no_subscription_of_the_first_mapping(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), BrokerOfBytes() as broker, running(tmp_path) as bridge:
            mappings = [Mapping(filter=f"{name}/#", topic="in/{topic}") for name in ("one", "two", "three")]
            first, second, third = [
                upstream(broker.port, protocol="3.1.1", mapping=[mapping]) for mapping in mappings
            ]
            bridge.front.reload(bridge.config, [first])
            await ready(bridge)
            broker.silent_to_connects = broker.session_present = True
            bridge.front.reload(bridge.config, [second])
            await until(lambda: broker.connections == 2)
            broker.silent_to_connects = False
            bridge.front.reload(bridge.config, [third])
            await until(lambda: broker.got("UNSUBSCRIBE one/#"))
            await until(lambda: broker.got("SUBSCRIBE three/#"))

    run_async(main())


def test_two_brokers_that_pull_from_each_other_stop_after_one_turn(tmp_path: Path) -> None:
    async def main() -> None:
        one = Bridge(tmp_path / "1", MqttConfig(listen=[f"tcp://127.0.0.1:{ports[0]}"]))
        everything = [Mapping(filter="in/#")]
        settings = [upstream(ports[0], mapping=everything)]
        two = Bridge(tmp_path / "2", MqttConfig(listen=[f"tcp://127.0.0.1:{ports[1]}"]), upstreams=settings)
        for bridge, name in ((one, "north"), (two, "south")):
            bridge.gateway = name
            await bridge.start()
            bridge.stream("s", "in/#")
        one.front.reload(one.config, [upstream(ports[1], mapping=everything)])
        try:
            await ready(one)
            await ready(two)
            client = await one.connect("c")
            client.send(b"\x32\x09\x00\x04in/a\x00\x01x")
            await until(lambda: stats(two).get("looped"))
            client.abort()
            assert await stored(two, 1) == [b"x"]
            assert await one.payloads() == [b"x", b"x"], "once from its client, once from there"
            assert stats(two)["looped"] == 1
        finally:
            await one.stop()
            await two.stop()

    for name in ("1", "2"):
        (tmp_path / name).mkdir()
    ports = free_port(), free_port()
    run_async(main())


def test_a_client_certificate_and_alpn_are_shown_and_a_changed_password_file_is_read(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    server, mine = authority.issue("server"), authority.issue("plant")
    tls = TlsSettings(cert=server.cert, key=server.key, client_ca=authority.cert)

    async def main() -> None:
        (tmp_path / "hub").mkdir()
        hub = Bridge(tmp_path / "hub", MqttConfig(listen=["tls://127.0.0.1:0"], tls=tls))
        await hub.start()
        try:
            url = f"mqtts://127.0.0.1:{hub.port}"
            files = {"ca": authority.cert, "cert": mine.cert, "key": mine.key, "alpn": "mqtt"}
            settings = [upstream(0, url=url, **files)]
            async with asyncio.timeout(120), running(tmp_path, upstreams=settings) as bridge:
                await ready(bridge)
                (seen,) = hub.front.clients()
                assert (seen.id, seen.user) == ("plant-7-cloud", "plant")
        finally:
            await hub.stop()

    run_async(main())


def test_a_password_file_that_is_corrected_is_read_for_the_next_connection(tmp_path: Path) -> None:
    users, secret = tmp_path / "users", tmp_path / "secret"
    users.write_text(f"plant:{hash_password(b'right')}\n")
    users.chmod(0o600)
    secret.write_text("wrong\n")

    async def main() -> None:
        (tmp_path / "hub").mkdir()
        hub = Bridge(tmp_path / "hub", MqttConfig(users_file=users, listen=["tcp://127.0.0.1:0"]))
        await hub.start()
        try:
            settings = [upstream(hub.port, username="plant", password_file=secret)]
            async with asyncio.timeout(120), running(tmp_path, upstreams=settings) as bridge:
                await until(lambda: stats(bridge).get("refused_connects"))
                assert "password_file of upstream 'cloud'" in (bridge.front.upstreams()[0][5] or "")
                assert bridge.front.unreachable is None, "the gateway itself is ready"
                secret.write_text("right\n")
                await ready(bridge)
        finally:
            await hub.stop()

    run_async(main())


def test_external_mode_has_no_upstreams(tmp_path: Path) -> None:
    async def main() -> None:
        bridge = Bridge(tmp_path, MqttConfig(mode="external"), upstreams=[upstream(1)])
        with pytest.raises(ConfigError, match="embedded"):
            await bridge.start()
        await bridge.store.close()

    run_async(main())


def test_what_is_retained_there_is_retained_here(tmp_path: Path, port: int) -> None:
    async def main() -> None:
        with device(port) as there:
            await publish(there, "plant-7/cmd/before", b"1", retain=True)
            async with asyncio.timeout(120), running(tmp_path, upstreams=[upstream(port)]) as bridge:
                await ready(bridge)
                await publish(there, "plant-7/cmd/after", b"2", retain=True)
                await publish(there, "plant-7/cmd/passing", b"3")
                await until(lambda: stats(bridge).get("received", 0) >= 3)
                late = await bridge.connect("late")
                late.send(subscribe(1, ("in/#", 1)))
                await late.receive()
                found = {(message := await late.message()).topic: message.payload for _ in range(2)}
                assert found == {"in/before": b"1", "in/after": b"2"}
                assert await late.silent()
                late.abort()

    run_async(main())
