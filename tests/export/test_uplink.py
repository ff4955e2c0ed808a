"""The exporter `mqtt` to real brokers, over a link that breaks, from workers and to a hub that are killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest

from benchmarks import brokers
from benchmarks.testbed import nats
from benchmarks.testbed.forwarder import Forwarder
from benchmarks.testbed.local import free_port
from benchmarks.testbed.mosquitto import Mosquitto
from bridge.export.wire import Tuning
from tests.export.harness import Gateway, running
from tests.export.process import Running

QUICK = Tuning(beat=0.1, silence=20.0, first_backoff=0.05, max_backoff=0.4, drain=1.0)
DEADLINE = 120.0
BREAKS = 12

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
[streams.fleet]
topics = ["sites/#"]
segment_size = 65536
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Running]:
    port = free_port()
    with Running(tmp_path / "hub", HUB.format(port=port), port) as hub:
        yield hub


class Subscriber:
    """Takes what a broker delivers at QoS 1; `payloads` are in order of arrival."""

    def __init__(self, port: int) -> None:
        self.payloads: list[bytes] = []
        ready = threading.Event()
        self._client = paho.Client(paho.CallbackAPIVersion.VERSION2, "subscriber", clean_session=False)
        self._client.on_connect = lambda client, *_: client.subscribe("sites/#", 1)
        self._client.on_subscribe = lambda *_: ready.set()
        self._client.on_message = lambda _client, _data, message: self.payloads.append(message.payload)
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        assert ready.wait(30)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


def check_order(numbers: Sequence[int], total: int, breaks: int) -> None:
    """All are there, in order, and what is repeated begins anew after a break: at most once for each."""
    assert set(numbers) == set(range(total))
    newest, again = -1, 0
    for before, number in zip([-1, *numbers], numbers, strict=False):
        if number != before + 1:
            again += 1
            assert number <= newest, f"{number} came behind {before}, and {newest + 1} was missing"
        newest = max(newest, number)
    assert again <= breaks, f"repeated {again} times after {breaks} breaks"


async def trouble(gateway: Gateway, chance: random.Random, faults: Sequence[Callable[[], Any]]) -> int:
    """Break things at random; returns how many times."""
    for _ in range(BREAKS):
        await asyncio.sleep(chance.uniform(0, 0.3))
        fault = chance.choice([*faults, None])
        if fault is not None:
            await fault()
        elif gateway.exports.pid:
            os.kill(gateway.exports.pid, signal.SIGKILL)
            await asyncio.sleep(chance.uniform(0, 0.8))
    return BREAKS


async def publish(gateway: Gateway, chance: random.Random, total: int) -> None:
    sent = 0
    while sent < total:
        count = min(chance.randint(1, 40), total - sent)
        await gateway.append("plant", *(b"%d" % (sent + n) for n in range(count)))
        sent += count
        await asyncio.sleep(0.03)


async def go_out(
    root: Path, link: Forwarder, config: dict[str, Any], total: int, faults: Sequence[Callable[[], Any]] = ()
) -> int:
    """Export `total` messages while the link, the worker and whatever `faults` says break; how many times."""
    chance = random.Random(20261123)

    async def cut() -> None:
        with link.shut():
            await asyncio.sleep(chance.uniform(0, 0.3))

    async with running(root, tuning=QUICK) as gateway:
        url = link.url.replace("http", "mqtt")
        base = {"identifier": "up", "url": url, "topic": "sites/north/{stream}", "timeoutMillis": 10_000}
        gateway.create("plant", {"mqtt": [{**base, **config}]})
        publishing = asyncio.create_task(publish(gateway, chance, total))
        breaks = await trouble(gateway, chance, [cut, *faults])
        await publishing
        await gateway.exported("plant", total - 1, DEADLINE)
    return breaks


def all_arrived(payloads: list[bytes], total: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while len(set(payloads)) < total:
        assert time.monotonic() < deadline, f"{len(set(payloads))} of {total}"
        time.sleep(0.02)


def to_subscriber(root: Path, port: int, total: int, **config: Any) -> None:
    """Nothing is missing, in order, and repeated only after a break."""
    link, subscriber = Forwarder(f"mqtt://127.0.0.1:{port}"), Subscriber(port)
    try:
        breaks = asyncio.run(go_out(root, link, config, total))
        all_arrived(subscriber.payloads, total)
    finally:
        subscriber.close()
        link.close()
    check_order([int(payload) for payload in subscriber.payloads], total, breaks)


@pytest.mark.parametrize("config", [{}, {"protocol": "3.1.1"}, {"qos": 0}], ids=["5", "3.1.1", "QoS 0"])
def test_mosquitto_gets_everything_in_order_over_a_link_that_breaks(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    with Mosquitto(tmp_path / "broker") as mosquitto:
        to_subscriber(tmp_path, mosquitto.port, 2000, **config)


def test_nats_gets_everything_in_order_over_a_link_that_breaks(tmp_path: Path) -> None:
    nats.program()
    with brokers.serving(next(one for one in brokers.SERVERS if one.name == "nats"), tmp_path) as (
        _,
        port,
    ):
        to_subscriber(tmp_path, port, 2000, protocol="3.1.1")


@pytest.mark.slow(seconds=15)
def test_a_hub_that_is_killed_has_each_message_once_and_in_order(tmp_path: Path, hub: Running) -> None:
    link = Forwarder(f"mqtt://127.0.0.1:{hub.port}")

    async def kill() -> None:
        await asyncio.to_thread(hub.kill)
        await asyncio.to_thread(hub.start)

    try:
        asyncio.run(go_out(tmp_path, link, {}, 3000, [kill]))
    finally:
        link.close()
    stored = hub.read("fleet")
    assert [int(row["payload"]) for row in stored] == list(range(3000))
    assert {row["topic"] for row in stored} == {"sites/north/plant"}
