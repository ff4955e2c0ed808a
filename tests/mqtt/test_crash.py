"""The bridge killed with SIGKILL under load: what was acknowledged is there, and comes to its subscribers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from bridge.mqtt.settings import MqttConfig

from .harness import Bridge, Client, ack, publish, run_async, until

CHILD = """
import asyncio, sys
from pathlib import Path
from tests.mqtt.harness import Bridge, MqttConfig, run_async

async def main():
    bridge = Bridge(Path(sys.argv[1]), MqttConfig(listen=["tcp://127.0.0.1:0"]))
    await bridge.start()
    if not bridge.manager.names():
        bridge.stream("s", "in/#")
        bridge.stream("synced", "synced/#", flush_on_write=True)
    print(bridge.port, flush=True)
    await asyncio.sleep(600)

run_async(main())
"""
TOPICS = ("in/a", "synced/a", "plain/a")


async def killed_after(root: Path, messages: int, work: list[Worker]) -> None:
    """Run a bridge under the load of workers, and kill it when they have had some acknowledgements."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(root), stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    port = int(await process.stdout.readline())
    wanted = sum(len(worker.done) for worker in work) + messages
    tasks = [asyncio.create_task(worker.run(port)) for worker in work]
    await until(lambda: sum(len(worker.done) for worker in work) >= wanted)
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, ConnectionError), result


class Worker:
    """A client that goes on where it was when it lost its connection."""

    def __init__(self, name: str) -> None:
        self.name, self.done = name, set[bytes]()

    async def run(self, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = Client(reader, writer)
        try:
            present = (await client.connect(self.name, clean=False)).body[0]
            await self.work(client, bool(present))
        finally:
            client.abort()

    async def work(self, client: Client, present: bool) -> None:
        raise NotImplementedError


class Publisher(Worker):
    """Publishes one message after the other on one topic; `done` are those that were acknowledged."""

    def __init__(self, topic: str, qos: int) -> None:
        super().__init__(f"publisher-{topic}-{qos}")
        self.topic, self.qos, self.number, self.sent, self.released = topic, qos, 0, False, True

    async def work(self, client: Client, present: bool) -> None:
        while True:
            packet_id, payload = self.number % 1000 + 1, b"%d-%d" % (self.qos, self.number)
            if not self.released:
                await client.exchange(ack(0x62, packet_id))
                self.released, self.sent = True, False
                self.number += 1
                continue
            client.send(publish(self.topic, payload, self.qos, packet_id, dup=self.sent))
            self.sent = True
            answer = await client.receive()
            assert answer == (0x40 if self.qos == 1 else 0x50, packet_id.to_bytes(2, "big"))
            self.done.add(payload)
            if self.qos == 2:
                self.released = False
            else:
                self.number, self.sent = self.number + 1, False


class Subscriber(Worker):
    """Collects what comes on the ordinary topic; `done` are the payloads."""

    async def work(self, client: Client, present: bool) -> None:
        if not present:
            await client.subscribe(("plain/#", 1))
        while True:
            self.done.add((await client.message(60)).payload)


def test_nothing_acknowledged_is_lost_by_a_kill_and_every_subscriber_gets_it(tmp_path: Path) -> None:
    publishers = [Publisher(topic, qos) for topic in TOPICS for qos in (1, 2)]
    subscriber = Subscriber("subscriber")

    async def main() -> None:
        # The subscriber first: what is published before it subscribes is not for it.
        first = Publisher("in/first", 1)
        await killed_after(tmp_path, 100, [subscriber, first])
        for _ in range(3):
            await killed_after(tmp_path, 600, [subscriber, *publishers])
        bridge = Bridge(tmp_path, MqttConfig(listen=["tcp://127.0.0.1:0"]))
        await bridge.start()
        try:
            stored = {
                topic: await bridge.payloads(name)
                for topic, name in zip(TOPICS, ("s", "synced"), strict=False)
            }
            task = asyncio.create_task(subscriber.run(bridge.port))
            wanted = set.union(*(p.done for p in publishers if p.topic == "plain/a"))
            await until(lambda: wanted <= subscriber.done, what="the subscriber has all of them")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        finally:
            await bridge.stop()
        for publisher in publishers:
            assert publisher.done
            if publisher.topic in stored:
                found = [
                    payload
                    for payload in stored[publisher.topic]
                    if payload.startswith(b"%d-" % publisher.qos)
                ]
                assert publisher.done <= set(found), publisher.name
                assert publisher.qos == 1 or len(found) == len(set(found)), "QoS 2 is stored once"

    run_async(main())
