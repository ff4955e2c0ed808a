"""Mode "external": a Mosquitto of our own has the messages, the bridge stores them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from bridge import metrics
from bridge.errors import ConfigError, StorageFailed, StreamFull
from bridge.http.observer import Observer
from bridge.mqtt.settings import ExternalSettings, MqttConfig
from tests.fakes.brokers import BrokerOfBytes, Mosquitto
from tests.fakes.certificates import Authority

from .harness import Bridge, decoded, run_async, running, until


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
    await until(lambda: bridge.stat("connects") >= connects and bridge.stat("connections"), 20)
    assert bridge.front._external is not None
    subscriptions = bridge.front._external._subscriptions
    await until(lambda: not subscriptions._asked)


async def stored(bridge: Bridge, count: int) -> list[bytes]:
    end = time.monotonic() + 20
    while len(found := await bridge.payloads()) < count:
        assert time.monotonic() < end, f"{len(found)} of {count}"
        await asyncio.sleep(0.01)
    return found


def with_bytes(test: Callable[[BrokerOfBytes, Bridge], Awaitable[None]]) -> Callable[[Path], None]:
    """Make a test of a coroutine that takes a broker made of bytes and a bridge that has subscribed there."""

    def run(tmp_path: Path) -> None:
        async def main() -> None:
            async with (
                asyncio.timeout(60),
                BrokerOfBytes() as broker,
                running(tmp_path, **external(broker.port)) as bridge,
            ):
                await until(lambda: broker.got("SUBSCRIBE streams/s/#"))
                await test(broker, bridge)

        run_async(main())

    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    return run


def redefine(bridge: Bridge, **changes: Any) -> None:
    bridge.manager.update(msgspec.structs.replace(bridge.manager.definitions["s"], **changes))


@pytest.mark.parametrize("protocol", ["3.1.1", "5"])
def test_what_devices_publish_at_the_broker_is_stored(tmp_path: Path, protocol: str) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(60),
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


def test_messages_wait_at_the_broker_while_the_bridge_is_away(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), running(tmp_path, **external(broker.port)) as bridge:
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
        async with asyncio.timeout(60), running(tmp_path, **external(broker.port)) as bridge:
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
        async with asyncio.timeout(60), running(tmp_path / "old", **external(broker.port)) as bridge:
            bridge.stream("gone")
            await connected(bridge)
            device = await asyncio.to_thread(Device, broker.port)
            await asyncio.to_thread(device.publish, "streams/gone/a", b"x")
            await until(lambda: bridge.stat("received") == 1)
        await asyncio.to_thread(device.publish, "streams/gone/a", b"dropped")
        await asyncio.to_thread(device.publish, "in/a", b"kept")
        async with asyncio.timeout(60), running(tmp_path / "new", **external(broker.port)) as bridge:
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
        async with asyncio.timeout(60), running(tmp_path / "new2", **external(broker.port)) as bridge:
            await asyncio.to_thread(device.publish, "in/a", b"last")
            assert await stored(bridge, 1) == [b"last"], "the rest was acknowledged"
        device.close()

    for name in ("old", "new", "new2"):
        (tmp_path / name).mkdir()
    with Mosquitto(tmp_path / "broker") as broker:
        run_async(main())


def test_the_bridge_reconnects_and_notices_that_its_session_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), running(tmp_path, **external(broker.port)) as bridge:
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
        async with asyncio.timeout(60), running(tmp_path, **external(broker.port, protocol="5")) as bridge:
            await connected(bridge)
            device = await asyncio.to_thread(Device, broker.port, v5=True)
            device.client.subscribe([("streambridge/dev/+/reply", 1), ("answers", 1)])
            await asyncio.to_thread(device.publish, "streambridge/dev/listStreams", b'{"requestId": "7"}')
            await until(lambda: len(device.got) == 1)
            assert json.loads(device.got[0].payload)["streams"] == ["s"]
            properties = Properties(PacketTypes.PUBLISH)
            properties.ResponseTopic, properties.CorrelationData = "answers", b"\1\2"
            await asyncio.to_thread(device.publish, "streambridge/dev/nonsense", b"{}", properties=properties)
            await until(lambda: len(device.got) == 2)
            assert device.got[1].topic == "answers"
            assert device.got[1].properties.CorrelationData == b"\1\2"
            assert json.loads(device.got[1].payload)["statusName"] == "UnknownOperation"
            nested = b'{"definition": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001
            await asyncio.to_thread(device.publish, "streambridge/dev/createMessageStream", nested)
            await until(lambda: len(device.got) == 3)
            assert "nested" in json.loads(device.got[2].payload)["errorMessage"]
            device.close()

    with Mosquitto(tmp_path / "broker") as broker:
        run_async(main())


def test_two_bridges_share_the_messages_of_a_group(tmp_path: Path) -> None:
    async def main() -> None:
        first = running(tmp_path / "1", **external(broker.port, share_group="g", client_id="one"))
        second = running(tmp_path / "2", **external(broker.port, share_group="g", client_id="two"))
        async with asyncio.timeout(60), first as one, second as two:
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
        async with asyncio.timeout(60), running(tmp_path, **settings) as bridge:
            await connected(bridge)
        missing = ExternalSettings(username="x", password_file=tmp_path / "nothing")
        other = Bridge(tmp_path / "other", MqttConfig(mode="external", external=missing))
        with pytest.raises(ConfigError, match="password_file"):
            await other.start()
        await other.store.close()

    (tmp_path / "other").mkdir()
    with broker:
        run_async(main())


@with_bytes
async def test_an_update_ends_no_subscription_that_a_stream_still_has(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    broker.log.clear()
    redefine(bridge, max_size=2**29)
    bridge.stream("end", "end")
    await until(lambda: broker.got("SUBSCRIBE end"))
    assert broker.log == ["1 SUBSCRIBE end", "1 SUBSCRIBE streams/end/#"], "nothing for the other size"

    broker.log.clear()
    redefine(bridge, topics=["in/a", "new"])
    await until(lambda: broker.got("UNSUBSCRIBE"))
    assert broker.log == ["1 SUBSCRIBE in/a", "1 SUBSCRIBE new", "1 UNSUBSCRIBE in/#"], "never without in/a"


@with_bytes
async def test_a_topic_that_moves_from_one_stream_to_another_stays_subscribed(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    broker.log.clear()
    redefine(bridge, topics=[])  # as a reload does it: one stream after the other
    bridge.stream("heir", "in/#")
    bridge.stream("end", "end")
    await until(lambda: broker.got("SUBSCRIBE streams/end/#"))
    redefine(bridge, topics=["last"])
    await until(lambda: broker.got("SUBSCRIBE last"))
    assert not broker.got("UNSUBSCRIBE")


def test_updates_lose_nothing_that_the_broker_has_acknowledged(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), running(tmp_path, **external(broker.port)) as bridge:
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


async def fill(bridge: Bridge, name: str) -> None:
    """A small stream bound to its own name, with no room left for 300 bytes."""
    bridge.stream(name, name, max_size=4096, stream_segment_size=1024)
    with pytest.raises(StreamFull):
        while True:
            await bridge.manager.append(name, bytes(200))


@with_bytes
async def test_what_came_on_an_earlier_connection_is_stored_and_not_acknowledged_on_the_next(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    await fill(bridge, "x")
    await fill(bridge, "y")
    broker.send("x", b"A" * 300, 1, 1)
    await until(lambda: bridge.stat("held"))
    broker.cut()
    await connected(bridge, 2)
    broker.send("y", b"B" * 300, 1, 1)  # another message with the same id: the session is new
    await until(lambda: bridge.stat("waiting") == 2)
    purged = await bridge.manager.purge("x")
    await until(lambda: bridge.store.streams["x"].next_sequence > purged)
    tries = bridge.stat("held")
    await until(lambda: bridge.stat("held") > tries + 1)
    assert not broker.got("PUBACK"), "B is not stored yet"
    await bridge.manager.purge("y")
    broker.send("in/a", b"C", 1, 2)
    await until(lambda: broker.got("PUBACK 2"))
    assert broker.got("PUBACK") == ["2 PUBACK 1", "2 PUBACK 2"]
    assert [(await bridge.payloads(name))[-1][:1] for name in ("x", "y")] == [b"A", b"B"]


@with_bytes
async def test_after_a_failed_commit_nothing_more_is_taken_from_that_connection(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    segments = bridge.store.streams["s"].log
    write = segments.write

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    segments.write = full  # type: ignore[method-assign]
    broker.session_present = True
    broker.send("in/a", b"first", 1, 1)
    await until(lambda: bridge.stat("rejected_storage"))
    segments.write = write  # type: ignore[method-assign]
    broker.send("in/a", b"second", 1, 2)
    broker.send("in/a", b"nobody brings it again")
    assert await stored(bridge, 1) == [b"nobody brings it again"], "QoS 0 has no second chance"
    await connected(bridge, 2)
    for number, payload in enumerate((b"first", b"second"), 1):
        broker.send("in/a", payload, 1, number)
    assert (await stored(bridge, 3))[1:] == [b"first", b"second"], "in their order, and once"
    await until(lambda: broker.got("PUBACK 2"))
    assert broker.got("PUBACK") == ["2 PUBACK 1", "2 PUBACK 2"]
    broker.send("in/a", b"third", 1, 3)
    await until(lambda: broker.got("PUBACK 3"))
    assert broker.connections == 2


class Worker:
    """An export worker, as far as an observer looks."""

    restarts = memory = 0
    pid = 1


def test_a_refused_subscription_is_told_and_its_stream_shown_as_refused_until_it_is_granted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @with_bytes
    async def test(broker: BrokerOfBytes, bridge: Bridge) -> None:
        observer = Observer("plant-7", bridge.root / "data", bridge.manager, Worker(), {"mqtt": bridge.front})
        observer.phase = "running"
        try:
            assert observer.state(fresh=True).ready
            broker.refused = {"here/#": 0x80, "there/#": 0x80}
            bridge.stream("t", "here/#", "there/#", "everywhere/#")
            await until(lambda: bridge.stat("refused_subscriptions") == 2)
            assert "to 'here/#'" in caplog.text
            assert "allow that to client id 'streambridge'" in caplog.text
            state = observer.state(fresh=True)
            assert list(state.refused) == ["t"]
            assert "to 'here/#', 'there/#'" in state.refused["t"]
            assert not state.ready
            told = metrics.render(state).decode()
            assert 'streambridge_refused_total{front_end="mqtt",reason="subscriptions"} 2.0' in told
            assert "streambridge_streams_refused 1.0" in told

            broker.refused.clear()
            broker.session_present = True
            broker.cut()  # on the next connection it is asked for again; what was granted is not
            await until(lambda: bridge.stat("connects") == 2 and not bridge.front.refused)
            assert broker.got("2 SUBSCRIBE") == ["2 SUBSCRIBE here/#", "2 SUBSCRIBE there/#"]
            assert observer.state(fresh=True).ready
        finally:
            observer.close()

    test(tmp_path)


def test_a_refused_subscription_is_asked_for_again_from_time_to_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @with_bytes
    async def test(broker: BrokerOfBytes, bridge: Bridge) -> None:
        broker.refused = {"here": 0x80}
        bridge.stream("t", "here")
        await until(lambda: bridge.stat("refused_subscriptions") > 2)
        broker.refused.clear()
        await until(lambda: not bridge.front.refused)

    monkeypatch.setattr("bridge.mqtt.subscribing.ASK_AGAIN", 0.05)
    test(tmp_path)


@with_bytes
async def test_a_subscription_that_was_not_answered_is_asked_for_again_on_the_next_connection(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    broker.silent, broker.session_present = {"late"}, True
    bridge.stream("late", "late")
    bridge.stream("end", "end")
    await until(lambda: broker.got("SUBSCRIBE streams/end/#"))
    broker.cut()
    await until(lambda: "2 SUBSCRIBE late" in broker.log)


@with_bytes
async def test_requests_that_wait_are_bounded_and_hold_no_message_up(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    waiting = b'{"requestId": "w", "name": "s", "readMessagesOptions": {"readTimeoutMillis": 3600000}}'
    for number in range(1, 1001):
        broker.send("streambridge/dev/readMessages", waiting, 1, number)
    broker.send("in/a", b"x", 1, 1001)
    await until(lambda: broker.got("PUBACK 1001"))
    assert len(broker.got("PUBACK")) == 1001, "the broker keeps none of them"
    under_way = 1000 - bridge.stat("refused_requests")
    assert 16 <= under_way <= 256
    # The message has ended the waiting of those that were let in; the others were answered at once.
    await until(lambda: len(broker.got("PUBLISH streambridge/dev/readMessages/reply")) == 1000)
    replies = [json.loads(line.split(" ", 3)[3]) for line in broker.got("PUBLISH")]
    refused = [reply for reply in replies if "too many requests" in reply.get("errorMessage", "")]
    assert len(refused) == 1000 - under_way
    assert {reply["requestId"] for reply in refused} == {"w"}
    broker.send("streambridge/dev/listStreams", b'{"requestId": "l"}', 1, 1)
    await until(lambda: [line for line in broker.got("PUBLISH") if '"streams":["s"]' in line])


@with_bytes
async def test_replies_that_the_broker_does_not_take_count_as_requests_under_way(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    broker.acknowledges = False
    for number in range(1, 1001):
        broker.send("streambridge/dev/listStreams", b"{}", 1, number)
    await until(lambda: len(broker.got("PUBACK")) == 1000)
    assert bridge.stat("refused_requests") >= 1000 - 256
    broker.acknowledges, broker.session_present = True, True
    broker.cut()
    await connected(bridge, 2)
    under_way = 1000 - bridge.stat("refused_requests")
    await until(lambda: len(broker.got("2 PUBLISH")) == under_way)
    broker.send("streambridge/dev/listStreams", b"{}", 1, 1)
    await until(lambda: len(broker.got("2 PUBLISH")) == under_way + 1)
    assert bridge.stat("refused_requests") == 1000 - under_way


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
    await asyncio.sleep(60)

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
        wanted, end = len(acknowledged) + 200, time.monotonic() + 20
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
            end = time.monotonic() + 20
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
