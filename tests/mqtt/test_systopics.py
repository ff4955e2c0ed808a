"""The topics below `$SYS/broker/`, beside those of a real Mosquitto."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.testbed.mosquitto import Mosquitto
from bridge.access.rules import AccessRule
from tests.mqtt.harness import Bridge, Client, bridge_test, publish, run_async, running, until

FORMS = (r"\d+", r"\d+\.\d\d", r"\d+ seconds", r"\w+ .*\d.*")  # a number, an average, the uptime, the version


async def values(client: Client, topic_filter: str = "$SYS/#") -> dict[str, tuple[bytes, bool]]:
    """What a new subscription gets at once: payloads, and whether they are retained ones."""
    await client.subscribe((topic_filter, 2))
    client.send(b"\xc0\0")
    found: dict[str, tuple[bytes, bool]] = {}
    while (packet := await client.receive()).head != 0xD0:
        message = client.parse(*packet)
        found[message.topic] = message.payload, message.retain
    return found


async def value(bridge: Bridge, name: str) -> str:
    client = await bridge.connect(f"asks for {name}"[:23])
    ((payload, _),) = (await values(client, f"$SYS/broker/{name}")).values()
    client.disconnect()
    assert await client.closed()
    return payload.decode()


def form(payload: bytes) -> str:
    """Which of the forms a value has."""
    return next(form for form in FORMS if re.fullmatch(form, payload.decode()))


def test_the_topics_and_the_forms_of_their_values_are_those_of_mosquitto(tmp_path: Path) -> None:
    if (tool := shutil.which("mosquitto_sub")) is None:
        pytest.skip("no mosquitto_sub")

    async def ours() -> dict[str, str]:
        async with running(tmp_path / "ours") as bridge:
            found = await values(await bridge.connect("c"))
            assert all(retained for _, retained in found.values())
            return {topic: form(payload) for topic, (payload, _) in found.items()}

    found: list[dict[str, str]] = []

    async def main() -> None:
        found.append(await ours())

    run_async(main())
    theirs: dict[str, str] = {}
    with Mosquitto(tmp_path / "theirs", "sys_interval 1") as mosquitto:
        for seconds in ("4", "30"):  # a machine that stands still may not get all of them in the first time
            command = [tool, "-p", str(mosquitto.port), "-t", "$SYS/#", "-W", seconds, "-F", "%r %t=%p"]
            for line in subprocess.run(command, capture_output=True, check=False).stdout.splitlines():
                topic, _, payload = line[2:].partition(b"=")
                theirs[topic.decode()] = form(payload)
            if found[0] == theirs:
                break
    assert len(theirs) > 40
    assert found[0] == theirs


@bridge_test(sys_interval=100)
async def test_the_numbers_are_those_of_what_happens(bridge: Bridge) -> None:
    sleeper = await bridge.connect("sleeper", clean=False)
    await sleeper.subscribe(("plain/#", 1))
    sleeper.disconnect()
    assert await sleeper.closed()
    publisher = await bridge.connect("p")
    await publisher.exchange(publish("plain/kept", b"12345", 1, 1, retain=True))
    await publisher.exchange(publish("plain/queued", b"123", 1, 2))
    await publisher.exchange(publish("in/a", b"12", 1, 3))
    assert await value(bridge, "publish/messages/received") == "3"
    # Two bytes each for head, length of the topic, and packet id; then topics and payloads.
    assert await value(bridge, "publish/bytes/received") == str(
        3 * 6 + len("plain/kept12345plain/queued123in/a12")
    )
    assert await value(bridge, "retained messages/count") == "1"
    assert await value(bridge, "messages/stored") == "3"
    assert await value(bridge, "clients/disconnected") == "1"
    assert await value(bridge, "clients/connected") == "2"
    assert await value(bridge, "subscriptions/count") == "2"
    assert int(await value(bridge, "messages/received")) >= 9
    assert int(await value(bridge, "bytes/received")) > int(await value(bridge, "publish/bytes/sent"))


@bridge_test(sys_interval=50)
async def test_what_changes_is_published_at_every_interval_and_nothing_else(bridge: Bridge) -> None:
    watcher, publisher = await bridge.connect("w"), await bridge.connect("p")
    await watcher.subscribe(("$SYS/broker/publish/messages/received", 0), ("$SYS/broker/version", 0))
    first = {(await watcher.message()).topic for _ in range(2)}
    assert first == {"$SYS/broker/publish/messages/received", "$SYS/broker/version"}
    seen: list[tuple[str, bytes]] = []
    await publisher.exchange(publish("in/a", b"1", 1, 1))
    while not seen or seen[-1] != ("$SYS/broker/publish/messages/received", b"1"):
        message = await watcher.message()
        assert not message.retain
        seen.append((message.topic, message.payload))
    assert await watcher.silent()
    assert len(seen) <= 4  # each was published once when the subscription was new


@bridge_test(sys_interval=20)
async def test_averages_follow_the_traffic(bridge: Bridge) -> None:
    watcher, publisher = await bridge.connect("w"), await bridge.connect("p")
    await watcher.subscribe(("$SYS/broker/load/publish/received/1min", 0))
    assert (await watcher.message()).payload == b"0.00"
    await publisher.exchange(publish("in/a", b"1", 1, 1))
    while (payload := (await watcher.message()).payload) == b"0.00":
        pass
    assert 0 < float(payload) <= 60


@bridge_test
async def test_wildcards_at_the_first_level_do_not_match_them(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    await client.subscribe(("#", 0), ("+/broker/uptime", 0), ("+/#", 0))
    assert await client.silent()


@bridge_test(acl=[AccessRule(user="*", subscribe=["#"], publish=["#"])])
async def test_a_rule_for_everything_does_not_give_them(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    assert await client.subscribe(("$SYS/#", 0), ("#", 0)) == b"\x80\0"


@bridge_test(acl=[AccessRule(user="*", subscribe=["$SYS/broker/clients/#"])])
async def test_a_rule_that_names_them_gives_what_it_names(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    assert await client.subscribe(("$SYS/broker/uptime", 0)) == b"\x80"
    found = await values(client, "$SYS/broker/clients/+")
    assert {topic.rpartition("/")[2] for topic in found} >= {"connected", "maximum", "total"}


@bridge_test(sys_interval=0)
async def test_they_can_be_turned_off(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    await client.subscribe(("$SYS/#", 0))
    assert await client.silent()


@bridge_test(sys_interval=10)
async def test_nothing_of_them_is_stored(bridge: Bridge) -> None:
    client = await bridge.connect("c", clean=False)
    await client.subscribe(("$SYS/#", 1))
    client.disconnect()
    assert await client.closed()
    await asyncio.sleep(0)
    await until(lambda: bridge.broker.router.feeds.live is not None)
    assert bridge.stat("retained") == 0
    await bridge.restart()
    client = await bridge.open()
    await client.connect("c", clean=False)
    assert (await client.message()).qos == 0
