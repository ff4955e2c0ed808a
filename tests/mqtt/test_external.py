"""Mode "external": a Mosquitto of our own has the messages, the bridge stores them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from benchmarks.testbed.certificates import Authority
from benchmarks.testbed.mosquitto import Mosquitto
from bridge.errors import ConfigError, StorageFailed
from bridge.mqtt.settings import ExternalSettings, MqttConfig

from .harness import DEADLINE, Bridge, decoded, run_async, running, until


class Device:
    """A paho client in its own thread."""

    def __init__(self, port: int, *, v5: bool = False) -> None:
        self.got: list[paho.MQTTMessage] = []
        self.client = paho.Client(
            paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5 if v5 else paho.MQTTv311
        )
        self.client.on_message = lambda _client, _data, message: self.got.append(message)
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()

    def publish(self, topic: str, payload: bytes, qos: int = 1, **options: Any) -> None:
        info = self.client.publish(topic, payload, qos, **options)
        info.wait_for_publish(10)

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


def external(port: int, **settings: Any) -> dict[str, Any]:
    url = settings.pop("url", f"mqtt://127.0.0.1:{port}")
    return {"mode": "external", "external": ExternalSettings(url=url, **settings)}


async def connected(bridge: Bridge, connects: int = 1) -> None:
    """Wait until the broker has granted all that was asked for: what it gets before is nobody's."""
    await until(lambda: bridge.stat("connects") >= connects and bridge.stat("connections"))
    assert bridge.front._external is not None
    subscriptions = bridge.front._external._subscriptions
    await until(lambda: not subscriptions._asked)


async def stored(bridge: Bridge, count: int) -> list[bytes]:
    end = time.monotonic() + DEADLINE
    while len(found := await bridge.payloads()) < count:
        assert time.monotonic() < end, f"{len(found)} of {count}"
        await asyncio.sleep(0.01)
    return found


def redefine(bridge: Bridge, **changes: Any) -> None:
    bridge.manager.update(msgspec.structs.replace(bridge.manager.definitions["s"], **changes))


@pytest.mark.parametrize("protocol", ["3.1.1", "5"])
def test_what_devices_publish_at_the_broker_is_stored(tmp_path: Path, protocol: str) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(240),
            running(tmp_path, **external(broker.port, protocol=protocol)) as bridge,
        ):
            await connected(bridge)
            device = await asyncio.to_thread(Device, broker.port, v5=protocol == "5")
            properties = Properties(PacketTypes.PUBLISH)
            properties.UserProperty = ("unit", "K")
            options = {"properties": properties} if protocol == "5" else {}
            for number in range(100):
                await asyncio.to_thread(device.publish, "in/a", b"%d" % number, number % 3, **options)
            assert sorted(await stored(bridge, 100), key=int) == [b"%d" % number for number in range(100)]
            if protocol == "5":
                assert decoded((await bridge.stored())[0].headers) == {"user": [["unit", "K"]]}
            bridge.stream("later", "later/#")
            # The new subscription is on its way; what the broker gets before it is nobody's.
            while bridge.manager.describe("later").storage_status.newest_sequence_number < 0:
                await asyncio.to_thread(device.publish, "later/x", b"x")
            device.close()

    with Mosquitto(tmp_path / "broker") as broker:
        run_async(main())


def test_a_property_with_a_byte_order_mark_is_stored_and_stops_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        settings = external(broker.port, protocol="5")
        async with asyncio.timeout(240), running(tmp_path, **settings) as bridge:
            await connected(bridge)
            device = await asyncio.to_thread(Device, broker.port, v5=True)
            properties = Properties(PacketTypes.PUBLISH)
            properties.UserProperty = ("unit", "\ufeffK")
            await asyncio.to_thread(device.publish, "in/a", b"1", properties=properties)
            await asyncio.to_thread(device.publish, "in/a", b"2")
            assert await stored(bridge, 2) == [b"1", b"2"]
            assert decoded((await bridge.stored())[0].headers) == {"user": [["unit", "\ufeffK"]]}
            assert bridge.stat("connects") == 1
            device.close()

    with Mosquitto(tmp_path / "broker") as broker:
        run_async(main())


def test_messages_wait_at_the_broker_while_the_bridge_is_away(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), running(tmp_path, **external(broker.port)) as bridge:
            await connected(bridge)
            device = await asyncio.to_thread(Device, broker.port)
            await asyncio.to_thread(device.publish, "in/a", b"first")
            await stored(bridge, 1)
            await bridge.stop()
            for number in range(500):
                await asyncio.to_thread(device.publish, "in/a", b"%d" % number)
            await bridge.start()
            assert (await stored(bridge, 501))[1:] == [b"%d" % number for number in range(500)]
            assert bridge.stat("sessions_lost") == 0
            device.close()

    with Mosquitto(tmp_path / "broker") as broker:
        run_async(main())


def test_nothing_is_acknowledged_before_it_is_committed(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), running(tmp_path, **external(broker.port)) as bridge:
            await connected(bridge)
            device = await asyncio.to_thread(Device, broker.port)
            stream = bridge.manager.stream("s")
            failures = iter([True] * 3)

            def failing(*_: Any) -> None:
                if next(failures, False):
                    raise StorageFailed("the disk is away")

            stream.ensure_admits = failing  # type: ignore[method-assign]
            bridge.stream("also", "in/a")
            for number in range(5):
                await asyncio.to_thread(device.publish, "in/a", b"%d" % number)
            assert await stored(bridge, 5) == [b"%d" % number for number in range(5)], "in order, all of them"
            assert bridge.stat("held") == 3
            assert await bridge.payloads("also") == [b"%d" % number for number in range(5)], (
                "not held, and once"
            )
            device.close()

    with Mosquitto(tmp_path / "broker") as broker:
        run_async(main())


def test_a_message_for_a_stream_that_is_gone_holds_nothing_up(tmp_path: Path) -> None:
    async def main() -> None:
        # The same session at the broker, first with the stream and then without it.
        async with asyncio.timeout(240), running(tmp_path / "old", **external(broker.port)) as bridge:
            bridge.stream("gone")
            await connected(bridge)
            device = await asyncio.to_thread(Device, broker.port)
            await asyncio.to_thread(device.publish, "streams/gone/a", b"x")
            await until(lambda: bridge.stat("received") == 1)
        await asyncio.to_thread(device.publish, "streams/gone/a", b"dropped")
        await asyncio.to_thread(device.publish, "in/a", b"kept")
        settings = external(broker.port, operations=True)
        async with asyncio.timeout(240), running(tmp_path / "new", **settings) as bridge:
            assert await stored(bridge, 1) == [b"kept"]
            assert bridge.stat("dropped_unbound") == 1
            assert bridge.stat("held") == 0
            device.client.subscribe("streambridge/dev/+/reply", 1)
            await asyncio.to_thread(device.publish, "streambridge/dev/listStreams", b"{}")
            await until(lambda: device.got)  # what the bridge has sent before it, the broker has
            await asyncio.to_thread(device.publish, "streams/gone/a", b"nobody's")
            await asyncio.to_thread(device.publish, "in/a", b"also")
            assert await stored(bridge, 2) == [b"kept", b"also"]
            assert bridge.stat("dropped_unbound") == 1, "the subscription has ended"
        async with asyncio.timeout(240), running(tmp_path / "new2", **external(broker.port)) as bridge:
            await asyncio.to_thread(device.publish, "in/a", b"last")
            assert await stored(bridge, 1) == [b"last"], "the rest was acknowledged"
        device.close()

    for name in ("old", "new", "new2"):
        (tmp_path / name).mkdir()
    with Mosquitto(tmp_path / "broker") as broker:
        run_async(main())


def test_the_bridge_reconnects_and_notices_that_its_session_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), running(tmp_path, **external(broker.port)) as bridge:
            assert bridge.stat("connections") == 0, "a broker that is not there yet is waited for"
            await asyncio.to_thread(broker.start)
            await connected(bridge)
            await asyncio.to_thread(broker.stop)
            await until(lambda: not bridge.stat("connections"))
            for left in (tmp_path / "broker").glob("mosquitto.db*"):
                left.unlink()
            await asyncio.to_thread(broker.start)
            await connected(bridge, 2)
            assert bridge.stat("sessions_lost") == 1
            device = await asyncio.to_thread(Device, broker.port)
            await asyncio.to_thread(device.publish, "in/a", b"again")
            await stored(bridge, 1)
            device.close()

    broker = Mosquitto(tmp_path / "broker")
    try:
        run_async(main())
    finally:
        broker.stop()


def test_requests_are_answered_over_the_broker(tmp_path: Path) -> None:
    async def main() -> None:
        settings = external(broker.port, protocol="5", operations=True)
        async with asyncio.timeout(240), running(tmp_path, **settings) as bridge:
            await connected(bridge)
            device = await asyncio.to_thread(Device, broker.port, v5=True)
            answers = "streambridge/dev/nonsense/answers"
            device.client.subscribe([("streambridge/dev/+/reply", 1), (answers, 1)])
            await asyncio.to_thread(device.publish, "streambridge/dev/listStreams", b'{"requestId": "7"}')
            await until(lambda: len(device.got) == 1)
            assert json.loads(device.got[0].payload)["streams"] == ["s"]
            properties = Properties(PacketTypes.PUBLISH)
            properties.ResponseTopic, properties.CorrelationData = answers, b"\1\2"
            await asyncio.to_thread(device.publish, "streambridge/dev/nonsense", b"{}", properties=properties)
            await until(lambda: len(device.got) == 2)
            assert device.got[1].topic == answers
            assert device.got[1].properties.CorrelationData == b"\1\2"
            assert json.loads(device.got[1].payload)["statusName"] == "UnknownOperation"
            nested = b'{"definition": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001
            await asyncio.to_thread(device.publish, "streambridge/dev/createMessageStream", nested)
            await until(lambda: len(device.got) == 3)
            assert "nested" in json.loads(device.got[2].payload)["errorMessage"]
            device.close()

    with Mosquitto(tmp_path / "broker") as broker:
        run_async(main())


def test_a_reply_larger_than_the_broker_takes_says_so_and_the_connection_stays(tmp_path: Path) -> None:
    async def main() -> None:
        settings = external(broker.port, protocol="5", operations=True)
        async with asyncio.timeout(240), running(tmp_path, **settings) as bridge:
            await connected(bridge)
            device = await asyncio.to_thread(Device, broker.port)
            device.client.subscribe("streambridge/dev/+/reply", 1)
            for _ in range(8):
                await asyncio.to_thread(device.publish, "in/a", b"x" * 5000)
            await stored(bridge, 8)
            all_of_it = b'{"name": "s", "readMessagesOptions": {"minMessageCount": 8, "maxMessageCount": 8}}'
            await asyncio.to_thread(device.publish, "streambridge/dev/readMessages", all_of_it)
            await until(lambda: len(device.got) == 1)
            assert json.loads(device.got[0].payload)["statusName"] == "ResponsePayloadTooLarge"
            long_id = json.dumps({"requestId": "x" * 19_900}).encode()
            await asyncio.to_thread(device.publish, "streambridge/dev/nonsense", long_id)
            await asyncio.to_thread(device.publish, "streambridge/dev/listStreams", b"{}")
            await until(lambda: len(device.got) == 2)
            assert json.loads(device.got[1].payload)["streams"] == ["s"]
            assert bridge.stat("dropped_replies") == 1
            assert bridge.stat("connects") == 1
            device.close()

    with Mosquitto(tmp_path / "broker", "max_packet_size 20000") as broker:
        run_async(main())


def test_two_bridges_share_the_messages_of_a_group(tmp_path: Path) -> None:
    async def main() -> None:
        first = running(tmp_path / "1", **external(broker.port, share_group="g", client_id="one"))
        second = running(tmp_path / "2", **external(broker.port, share_group="g", client_id="two"))
        async with asyncio.timeout(240), first as one, second as two:
            await connected(one)
            await connected(two)
            device = await asyncio.to_thread(Device, broker.port)
            for number in range(100):
                await asyncio.to_thread(device.publish, "in/a", b"%d" % number)
            while len(found := [*await one.payloads(), *await two.payloads()]) < 100:
                await asyncio.sleep(0.01)
            assert sorted(found, key=int) == [b"%d" % number for number in range(100)]
            assert await one.payloads()
            assert await two.payloads()
            device.close()

    for name in ("1", "2"):
        (tmp_path / name).mkdir()
    with Mosquitto(tmp_path / "broker") as broker:
        run_async(main())


def test_tls_and_a_password_are_used_and_a_missing_file_is_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    pair, password = authority.issue("server"), tmp_path / "password"
    users = tmp_path / "users"
    subprocess.run(
        ["mosquitto_passwd", "-c", "-b", users, "bridge", "secret"], check=True, capture_output=True
    )
    password.write_text("secret\n")
    extra = f"certfile {pair.cert}\nkeyfile {pair.key}\nallow_anonymous false\npassword_file {users}"
    broker = Mosquitto(tmp_path / "broker", extra)
    settings = external(
        broker.port,
        url=f"mqtts://127.0.0.1:{broker.port}",
        ca=authority.cert,
        username="bridge",
        password_file=password,
    )

    async def main() -> None:
        async with asyncio.timeout(240), running(tmp_path, **settings) as bridge:
            await connected(bridge)
        missing = ExternalSettings(username="x", password_file=tmp_path / "nothing")
        other = Bridge(tmp_path / "other", MqttConfig(mode="external", external=missing))
        with pytest.raises(ConfigError, match="password_file"):
            await other.start()
        await other.store.close()

    (tmp_path / "other").mkdir()
    with broker:
        run_async(main())


def test_updates_lose_nothing_that_the_broker_has_acknowledged(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(240),
            running(tmp_path, **external(broker.port, operations=True)) as bridge,
        ):
            # Answered: the broker has our subscriptions, which were sent before the answer.
            device = await asyncio.to_thread(Device, broker.port)
            device.client.subscribe("streambridge/dev/+/reply", 1)
            while not device.got:
                await asyncio.to_thread(device.publish, "streambridge/dev/listStreams", b"{}")
            sending = asyncio.create_task(asyncio.to_thread(publish, device))
            while not sending.done():
                redefine(bridge, max_size=bridge.manager.definitions["s"].max_size + 4096)
                await asyncio.sleep(0.02)
            assert set(await stored(bridge, 1000)) == {b"%d" % number for number in range(1000)}
            device.close()

    def publish(device: Device) -> None:
        for number in range(1000):
            device.publish("in/a", b"%d" % number)

    with Mosquitto(tmp_path / "broker") as broker:
        run_async(main())


CHILD = """
import asyncio, sys
from pathlib import Path
from tests.mqtt.harness import Bridge, MqttConfig
from tests.mqtt.test_external import connected, external

async def main():
    bridge = Bridge(Path(sys.argv[1]), MqttConfig(**external(int(sys.argv[2]))))
    await bridge.start()
    if not bridge.manager.names():
        bridge.stream("s", "in/#")
    await connected(bridge)
    print("connected", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_nothing_is_lost_when_the_bridge_is_killed_again_and_again(tmp_path: Path) -> None:
    acknowledged: list[int] = []

    def publish() -> None:
        device = Device(broker.port)
        number = 0
        while not enough.is_set():
            device.publish("in/a", b"%d" % number)
            acknowledged.append(number)
            number += 1
        device.close()

    def child() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", CHILD, str(tmp_path), str(broker.port)]
        process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"connected\n"
        return process

    def kill(process: subprocess.Popen[bytes]) -> None:
        """Kill the bridge in the middle of 200 more messages."""
        wanted, end = len(acknowledged) + 200, time.monotonic() + DEADLINE
        while len(acknowledged) < wanted:
            assert time.monotonic() < end
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        with process:
            process.wait()

    async def read() -> list[bytes]:
        bridge = Bridge(tmp_path, MqttConfig(**external(broker.port)))
        await bridge.start()
        try:
            end = time.monotonic() + DEADLINE
            while True:
                found = await bridge.payloads()
                if set(acknowledged) <= {int(payload) for payload in found} or time.monotonic() > end:
                    return found
                await asyncio.sleep(0.05)
        finally:
            await bridge.stop()

    enough = threading.Event()
    with Mosquitto(tmp_path / "broker") as broker:
        # The session must be there before the first message: what is published before it is nobody's.
        bridge = child()
        thread = threading.Thread(target=publish)
        thread.start()
        for _ in range(2):
            kill(bridge)
            bridge = child()
        kill(bridge)
        enough.set()
        thread.join()
        found: list[bytes] = []

        async def main() -> None:
            found.extend(await read())

        run_async(main())
    assert len(acknowledged) >= 600
    assert set(acknowledged) <= {int(payload) for payload in found}


def test_what_has_passed_this_gateway_is_not_stored_again(tmp_path: Path) -> None:
    async def main() -> None:
        settings = external(broker.port, protocol="5")
        async with asyncio.timeout(240), running(tmp_path, **settings) as bridge:
            await connected(bridge)
            device = await asyncio.to_thread(Device, broker.port, v5=True)
            for gateway in ("plant-7", "plant-8"):
                properties = Properties(PacketTypes.PUBLISH)
                properties.UserProperty = ("bridged-by", gateway)
                await asyncio.to_thread(device.publish, "in/a", gateway.encode(), properties=properties)
            assert await stored(bridge, 1) == [b"plant-8"]
            assert bridge.stat("looped") == 1
            device.close()

    with Mosquitto(tmp_path / "broker") as broker:
        run_async(main())
