"""The service as a process, and its workers, killed again and again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import cbor2

from tests.cli.conftest import CHECKOUT, environment
from tests.mqtt.harness import Client, publish, run_async, until

MESSAGES = 45
DEADLINE = 2.5  # seconds of a lease; a start takes about one
CONFIG = """
[gateway]
data_dir = "data"
memory_dir = "memory"
[mqtt]
listen = ["tcp://127.0.0.1:0"]
[greengrass]
listen = ""
[http]
listen = ""
[streams.jobs]
topics = ["jobs/#"]
retention = "exported"
[[streams.jobs.export.consumer]]
identifier = "workers"
ack_deadline_millis = "2500ms"
max_unacknowledged = 20
"""


class Received(NamedTuple):
    """A delivery: when its fetch was sent, when it came, and its count."""

    asked: float
    came: float
    deliveries: int


class Gateway:
    """`streambridge run`, killed and started."""

    def __init__(self, root: Path) -> None:
        self.root, self.port, self.starts = root, 0, 0
        (root / "bridge.toml").write_text(CONFIG)
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        self.starts += 1
        log = self.root / f"log-{self.starts}"
        with log.open("w") as out:
            command = (sys.executable, "-m", "bridge", "run", "-c", str(self.root / "bridge.toml"))
            self.process = await asyncio.create_subprocess_exec(
                *command, stderr=out, cwd=CHECKOUT, env=environment()
            )
        await until(lambda: "msg=ready" in log.read_text(), 120)
        found = re.search(r"msg=ready .*mqtts?://\S+?:(\d+)", log.read_text())
        assert found is not None, log.read_text()
        self.port = int(found[1])

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def connect(self, name: str) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        client = Client(reader, writer)
        await client.connect(name)
        return client

    async def settled(self) -> int:
        """How many messages are settled."""
        client = await self.connect("looking")
        try:
            described: Any = await ask(client, "looking", "describeMessageStream", name="jobs")
            return int(described["messageStreamInfo"]["exportStatuses"][0]["exportedMessagesCount"])
        finally:
            client.abort()


class Work:
    """What the workers have seen."""

    def __init__(self, gateway: Gateway, seed: int) -> None:
        self.gateway, self.random = gateway, random.Random(seed)
        self.received: dict[int, list[Received]] = {}
        self.done: dict[int, float] = {}  # acknowledged, and the reply came: when it did

    async def work(self, name: str) -> None:
        """Fetch and acknowledge, and die now and then, with messages in hand."""
        life = 0
        while True:
            life += 1
            client = None
            try:
                async with asyncio.timeout(30):
                    client = await self.gateway.connect(f"{name}-{life}")
                    while self.random.random() < 0.8:
                        await self._round(client, f"{name}-{life}")
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.02)
            finally:
                if client is not None:
                    client.abort()

    async def _round(self, client: Client, name: str) -> None:
        fields = {"name": "jobs", "consumer": "workers"}
        asked = time.monotonic()
        reply = await ask(client, name, "fetchMessages", **fields, maxMessageCount=4, timeoutMillis=300)
        came = time.monotonic()
        numbers = []
        for message in reply["messages"]:
            number = message["sequenceNumber"]
            assert message["payload"] == b"job %d" % number
            self.received.setdefault(number, []).append(Received(asked, came, message["deliveries"]))
            numbers.append(number)
        mine = [number for number in numbers if self.random.random() < 0.7]
        if mine:
            await ask(client, name, "ackMessages", **fields, ack=mine)
            for number in mine:
                self.done.setdefault(number, time.monotonic())


async def ask(client: Client, who: str, operation: str, **fields: object) -> dict[str, Any]:
    client.send(publish(f"streambridge/{who}/{operation}", cbor2.dumps(fields), level=client.level))
    reply = cbor2.loads((await client.message()).payload)
    assert reply["status"] == 0, reply
    return reply  # type: ignore[no-any-return]


def test_workers_and_gateway_are_killed_and_each_message_is_done_at_least_once_and_never_early(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        gateway = Gateway(tmp_path)
        await gateway.start()
        try:
            sender = await gateway.connect("sender")
            for number in range(MESSAGES):
                await sender.exchange(publish("jobs/a", b"job %d" % number, 1, number + 1))
            sender.abort()
            work = Work(gateway, 11)
            workers = [asyncio.create_task(work.work(f"w{number}")) for number in range(4)]
            for part in (1, 2):
                await until(lambda part=part: len(work.done) >= part * MESSAGES // 3, 120)  # type: ignore[misc]
                await gateway.kill()
                await gateway.start()
            async with asyncio.timeout(180):
                while await gateway.settled() < MESSAGES:
                    await asyncio.sleep(0.1)
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        finally:
            await gateway.kill()
        assert sorted(work.received) == list(range(MESSAGES))
        assert sum(map(len, work.received.values())) > MESSAGES, "some were delivered again"
        for number, deliveries in work.received.items():
            by_time = sorted(deliveries, key=lambda one: one.deliveries)
            for before, after in pairwise(by_time):
                assert after.deliveries > before.deliveries
                assert after.came >= before.asked + DEADLINE - 0.01, f"{number} came before its deadline"
            done = work.done.get(number)  # None if the reply was lost
            assert done is None or all(one.asked <= done for one in deliveries), "acknowledged is done"

    run_async(main())
