"""QoS 2 from another broker: each message is stored exactly once and in order, whoever is killed when."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from benchmarks.testbed.local import free_port
from benchmarks.testbed.mosquitto import Mosquitto
from benchmarks.testbed.mqtt import Client, ack, packet, publish, subscribe
from tests.export.process import Running

from .harness import run_async, running, until
from .test_external import Device, external, stored

CONFIG = """
[gateway]
id = "gw"
data_dir = "data"
[greengrass]
listen = ""
[http]
listen = "127.0.0.1:{http}"
[streams.one]
topics = ["in/#"]
[streams.two]
topics = ["in/+/both"]
flush_on_write = true
"""
EXTERNAL = """
[mqtt]
mode = "external"
[mqtt.external]
url = "mqtt://127.0.0.1:{port}"
protocol = "3.1.1"
"""
UPSTREAM = """
[mqtt]
listen = ["tcp://127.0.0.1:{own}"]
limits = {{ queued_messages = 1000000 }}
[[upstream]]
name = "cloud"
url = "mqtt://127.0.0.1:{port}"
protocol = "3.1.1"
[[upstream.mapping]]
filter = "#"
"""
WINDOW = 8  # messages under way: the packet ids are 1 to 8, so each is used again and again
TOPICS = ["in/a/both", "in/a", "plain/a"]


class Sender:
    """A broker with one session, which sends numbers at QoS 2 as the standard says (4.3.3, 4.4)."""

    def __init__(self) -> None:
        self.number = 0  # the next message
        self.subscribed = self.enough = False
        self.under_way: dict[int, tuple[int, bool]] = {}  # number, and whether PUBREC has come, by packet id
        self.session = False
        self._client: Client | None = None

    @property
    def done(self) -> bool:
        return self.enough and not self.under_way

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = self._client = Client(reader, writer)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while True:
                self._answer(client, *await client.receive(600))
        client.abort()

    def cut(self) -> None:
        if self._client is not None:
            self._client.abort()

    def _answer(self, client: Client, head: int, body: bytes) -> None:
        kind, number = head & 0xF0, int.from_bytes(body[:2], "big")
        if kind == 0x10:
            client.send(bytes((0x20, 2, self.session, 0)))
            self.session = True
            for packet_id, (one, received) in self.under_way.items():
                client.send(ack(0x62, packet_id) if received else self._message(one, packet_id, dup=True))
        elif kind == 0x80:
            client.send(packet(0x90, body[:2] + b"\1"))
            self.subscribed = True
        elif kind == 0x50:
            if number in self.under_way:
                self.under_way[number] = self.under_way[number][0], True
            client.send(ack(0x62, number))
        elif kind == 0x70:
            self.under_way.pop(number, None)
        elif kind == 0xC0:
            client.send(b"\xd0\0")
        while self.subscribed and not self.enough and len(self.under_way) < WINDOW:
            packet_id = next(one for one in range(1, WINDOW + 1) if one not in self.under_way)
            self.under_way[packet_id] = self.number, False
            client.send(self._message(self.number, packet_id))
            self.number += 1

    def _message(self, number: int, packet_id: int, *, dup: bool = False) -> bytes:
        return publish(TOPICS[number % len(TOPICS)], b"%d" % number, 2, packet_id, dup=dup)


def numbers(gateway: Running, stream: str) -> list[int]:
    return [int(row["payload"]) for row in gateway.read(stream)]


async def exactly_once(root: Path, mode: str, breaks: int) -> None:
    chance, sender, own, http = random.Random(37), Sender(), free_port(), free_port()
    server = await asyncio.start_server(sender.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = CONFIG + (EXTERNAL if mode == "external" else UPSTREAM)
    ready = http if mode == "external" else own
    gateway = Running(root / "gw", config.format(port=port, own=own, http=http), ready)
    away: Client | None = None
    try:
        await asyncio.to_thread(gateway.start)
        if mode == "upstream":
            away = Client(*await asyncio.open_connection("127.0.0.1", own))
            await away.connect("away", clean=False)
            away.send(subscribe(1, ("#", 1)))
            while (await away.receive()).head != 0x90:
                pass  # messages may come before the SUBACK (MQTT 3.8.4)
            away.abort()
        for number in range(breaks):
            before = sender.number
            await until(lambda before=before: sender.number > before + 2 * WINDOW)
            await asyncio.sleep(chance.uniform(0, 0.05))  # any moment
            if number % 3 == 2:
                sender.cut()
            else:
                await asyncio.to_thread(gateway.kill)
                await asyncio.to_thread(gateway.start)
        sender.enough = True
        await until(lambda: sender.done)
        every = range(sender.number)
        topic = [TOPICS[n % len(TOPICS)] for n in every]
        one, two = [await asyncio.to_thread(numbers, gateway, name) for name in ("one", "two")]
        assert one == [n for n in every if topic[n].startswith("in/")]
        assert two == [n for n in every if topic[n].endswith("/both")]
        if away is not None:
            away = Client(*await asyncio.open_connection("127.0.0.1", own))
            await away.connect("away", clean=False)
            first = int((await away.message()).payload)
            found = [first, *[int((await away.message()).payload) for _ in range(first + 1, sender.number)]]
            assert found == list(range(first, sender.number)), "queued once, and in order"
            assert await away.silent()
    finally:
        if away is not None:
            away.abort()
        gateway.kill()
        server.close()
        sender.cut()


@pytest.mark.parametrize("mode", ["external", "upstream"])
def test_a_message_of_qos_2_is_stored_exactly_once_over_kills_and_cuts(tmp_path: Path, mode: str) -> None:
    run_async(exactly_once(tmp_path, mode, 5))


@pytest.mark.slow(seconds=120)
@pytest.mark.parametrize("mode", ["external", "upstream"])
def test_a_message_of_qos_2_is_stored_exactly_once_over_many_kills_and_cuts(
    tmp_path: Path, mode: str
) -> None:
    run_async(exactly_once(tmp_path, mode, 40))


@pytest.mark.parametrize("protocol", ["3.1.1", "5"])
def test_what_an_old_session_of_the_client_id_brings_at_qos_2_is_stored(
    tmp_path: Path, protocol: str
) -> None:
    """Mosquitto keeps the subscription of an earlier client at QoS 2, and its messages."""

    def leave_a_session(port: int) -> None:
        v5 = protocol == "5"
        client = paho.Client(
            paho.CallbackAPIVersion.VERSION2,
            "streambridge",
            clean_session=None if v5 else False,
            protocol=paho.MQTTv5 if v5 else paho.MQTTv311,
        )
        options: dict[str, Any] = {}
        if v5:
            options = {"clean_start": False, "properties": Properties(PacketTypes.CONNECT)}
            options["properties"].SessionExpiryInterval = 3600
        client.connect("127.0.0.1", port, **options)
        client.subscribe("in/#", 2)
        granted = []
        client.on_subscribe = lambda *_: granted.append(1)
        while not granted:
            client.loop(0.1)
        client.disconnect()

    async def main() -> None:
        with Mosquitto(tmp_path / "broker") as broker:
            await asyncio.to_thread(leave_a_session, broker.port)
            device = Device(broker.port)
            for number in range(30):
                await asyncio.to_thread(device.publish, "in/a", b"%d" % number, 2)
            settings = external(broker.port, protocol=protocol)
            async with asyncio.timeout(120), running(tmp_path, **settings) as bridge:
                expected = [b"%d" % number for number in range(30)]
                assert await stored(bridge, 30) == expected
                await asyncio.to_thread(device.publish, "in/a", b"30", 2)
                assert await stored(bridge, 31) == [*expected, b"30"]
                assert bridge.stat("connects") == 1
            device.close()

    run_async(main())
