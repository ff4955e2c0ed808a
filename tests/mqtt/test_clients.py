"""Clients that nobody here wrote: mosquitto_pub and _sub, paho, aiomqtt, amqtt, mqtt.js.

mqtt.js is installed from the npm registry into `.sdks/` the first time.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import paho.mqtt.client as paho
import pytest

from tests.fakes.sdks import MQTT_JS, node_modules

from .harness import Bridge, bridge_test, run_async, running, tool, until


async def run(*command: str, stdin: bytes = b"", timeout: float = 120) -> bytes:
    """Run a program to its end; returns what it printed."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(timeout):
            out, err = await process.communicate(stdin)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (command, err.decode())
    return out


def of_mosquitto(bridge: Bridge, name: str, version: str) -> tuple[str, ...]:
    return (tool(name), "-h", "127.0.0.1", "-p", str(bridge.port), "-V", version)


@pytest.mark.parametrize("version", ["311", "5"])
@pytest.mark.parametrize("qos", ["0", "1", "2"])
def test_mosquitto_pub_and_sub(tmp_path: Path, version: str, qos: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), running(tmp_path) as bridge:
            subscriber = await asyncio.create_subprocess_exec(
                *of_mosquitto(bridge, "mosquitto_sub", version), "-t", "in/#", "-q", qos, "-C", "500",
                "-i", "sub", stdout=subprocess.PIPE,
            )  # fmt: skip
            await until(lambda: any(s.subscriptions for s in bridge.broker.sessions.all()))
            lines = b"".join(b"line %d\n" % number for number in range(500))
            publish = of_mosquitto(bridge, "mosquitto_pub", version)
            publisher = asyncio.create_task(run(*publish, "-t", "in/lines", "-q", qos, "-l", stdin=lines))
            out, _ = await subscriber.communicate()
            assert out == lines
            # On a busy machine mosquitto_pub may never see the end of what it sent at QoS 0.
            if qos == "0":
                publisher.cancel()
                await asyncio.gather(publisher, return_exceptions=True)
            else:
                await publisher
            assert await bridge.payloads() == lines.splitlines()

    run_async(main())


@pytest.mark.parametrize("version", [paho.MQTTv311, paho.MQTTv5])
def test_paho(tmp_path: Path, version: int) -> None:
    def use(port: int) -> list[tuple[str, bytes, int]]:
        got: list[tuple[str, bytes, int]] = []
        client = paho.Client(paho.CallbackAPIVersion.VERSION2, "paho", protocol=version)
        client.on_message = lambda _c, _d, message: got.append((message.topic, message.payload, message.qos))
        client.connect("127.0.0.1", port)
        client.loop_start()
        try:
            subscribed = []
            client.on_subscribe = lambda *_: subscribed.append(True)
            client.subscribe([("in/#", 2), ("plain", 1)])
            while not subscribed:
                client.publish("tick", qos=1).wait_for_publish(60)
            for number in range(90):
                topic = ("in/a", "plain")[number % 2]
                client.publish(topic, b"%d" % number, qos=number % 3).wait_for_publish(60)
            for _ in range(1000):
                if len(got) == 90:
                    break
                client.publish("tick", qos=1).wait_for_publish(60)
        finally:
            client.disconnect()
            client.loop_stop()
        return got

    async def main() -> None:
        async with asyncio.timeout(240), running(tmp_path) as bridge:
            got = await asyncio.to_thread(use, bridge.port)
            assert sorted(int(payload) for _, payload, _ in got) == list(range(90))
            for topic, payload, qos in got:
                assert qos == min(int(payload) % 3, 2 if topic == "in/a" else 1)
            assert [int(payload) for payload in await bridge.payloads()] == list(range(0, 90, 2))

    run_async(main())


AIOMQTT = """
import asyncio, sys, aiomqtt

async def main():
    async with aiomqtt.Client("127.0.0.1", int(sys.argv[1]), protocol=aiomqtt.ProtocolVersion.V5) as client:
        await client.subscribe("in/#", qos=1)
        for number in range(50):
            await client.publish("in/a", b"%d" % number, qos=1 + number % 2)
        got = []
        async for message in client.messages:
            got.append(int(message.payload))
            if len(got) == 50:
                break
        assert got == list(range(50)), got

asyncio.run(main())
"""


@bridge_test
async def test_aiomqtt(bridge: Bridge) -> None:
    await run(sys.executable, "-c", AIOMQTT, str(bridge.port))
    assert [int(payload) for payload in await bridge.payloads()] == list(range(50))


AMQTT = """
import asyncio, logging, sys
from amqtt.client import MQTTClient

async def main():
    client = MQTTClient(client_id="amqtt")
    await client.connect(f"mqtt://127.0.0.1:{sys.argv[1]}/", cleansession=False)
    await client.publish("plain/kept", b"kept", qos=1, retain=True)
    granted = await client.subscribe([("in/#", 1), ("plain/#", 2)])
    assert granted == [1, 2], granted
    kept = await client.deliver_message(10)
    assert (kept.topic, bytes(kept.data), kept.retain) == ("plain/kept", b"kept", True)
    for topic in ("in/a", "plain/a"):
        for number in range(30):
            await client.publish(topic, b"%d" % number, qos=number % 3)
            got = await client.deliver_message(10)
            assert (got.topic, bytes(got.data)) == (topic, b"%d" % number), got
    await client.disconnect()
    other = MQTTClient(client_id="other")
    await other.connect(f"mqtt://127.0.0.1:{sys.argv[1]}/")
    await other.publish("plain/a", b"waits", qos=1)
    await other.disconnect()
    client = MQTTClient(client_id="amqtt")
    await client.connect(f"mqtt://127.0.0.1:{sys.argv[1]}/", cleansession=False)
    got = await client.deliver_message(10)
    assert bytes(got.data) == b"waits", got
    await client.disconnect()

logging.basicConfig(level=logging.CRITICAL)
asyncio.run(main())
"""


@bridge_test
async def test_amqtt(bridge: Bridge) -> None:
    await run(sys.executable, "-c", AMQTT, str(bridge.port))
    assert [int(payload) for payload in await bridge.payloads()] == list(range(30))


MQTT_JS_PROGRAM = """
const mqtt = require("mqtt")
const [port, version] = process.argv.slice(1).map(Number)
const client = mqtt.connect(`mqtt://127.0.0.1:${port}`, {protocolVersion: version, clientId: "js"})
let got = 0
client.on("error", (error) => { console.error(error); process.exit(1) })
client.on("message", (topic, payload) => {
  if (String(payload) !== String(got++)) process.exit(2)
  if (got === 100) client.end(false, () => process.exit(0))
})
client.on("connect", async () => {
  await client.subscribeAsync("in/#", {qos: 1})
  for (let n = 0; n < 100; n++) client.publish("in/a", String(n), {qos: 1 + n % 2})
})
"""


@pytest.mark.parametrize("version", ["4", "5"])
def test_mqtt_js(tmp_path: Path, version: str) -> None:
    where = f"NODE_PATH={node_modules(MQTT_JS)}"

    async def main() -> None:
        async with asyncio.timeout(240), running(tmp_path) as bridge:
            await run("env", where, "node", "-e", MQTT_JS_PROGRAM, str(bridge.port), version)
            assert [int(payload) for payload in await bridge.payloads()] == list(range(100))

    run_async(main())
