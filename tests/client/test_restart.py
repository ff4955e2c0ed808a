"""The client while its service is killed and started again: what is repeated, and what the caller decides."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.client import (
    AsyncStreamManagerClient,
    MessageStreamDefinition,
    ReadMessagesOptions,
    StrategyOnFull,
    StreamManagerClient,
)
from tests.client.gateway import Gateway
from tests.http.conftest import eventually

FAST = (0.05, 0.2)
NEW = MessageStreamDefinition("s", strategy_on_full=StrategyOnFull.RejectNewData, flush_on_write=False)
ROUNDS = 3


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with Gateway(tmp_path) as running:
        yield running


def stored(gateway: Gateway) -> list[bytes]:
    with StreamManagerClient(gateway.urls["mqtt"]) as client:
        newest = client.describe_message_stream("s").storage_status.newest_sequence_number
        return [
            message.payload
            for start in range(0, newest + 1, 1000)
            for message in client.read_messages("s", ReadMessagesOptions(start, 1, 1000))
        ]


class Writer(threading.Thread):
    """Appends numbers until it is told to stop; notes the ones that have failed, and goes on."""

    def __init__(self, client: StreamManagerClient) -> None:
        super().__init__()
        self._client, self._enough = client, threading.Event()
        self.acknowledged: dict[int, int] = {}
        self.open: list[int] = []

    def run(self) -> None:
        number = 0
        while not self._enough.is_set():
            try:
                self.acknowledged[number] = self._client.append_message("s", b"%d" % number)
            except ConnectionError:
                self.open.append(number)
            number += 1

    def finish(self) -> None:
        self._enough.set()
        self.join(60)


@pytest.mark.slow(seconds=40)
def test_over_mqtt_every_append_is_stored_once_through_kills_and_a_stop(gateway: Gateway) -> None:
    with StreamManagerClient(gateway.urls["mqtt"], reconnect_delay=FAST) as client:
        client.create_message_stream(NEW)
        writer = Writer(client)
        writer.start()
        for turn in range(ROUNDS):
            reached = len(writer.acknowledged) + 50
            eventually(lambda reached=reached: len(writer.acknowledged) >= reached)
            gateway.stop() if turn == ROUNDS - 1 else gateway.kill()
            gateway.start()
        reached = len(writer.acknowledged) + 50
        eventually(lambda: len(writer.acknowledged) >= reached)
        writer.finish()
    assert writer.open == []
    assert stored(gateway) == [b"%d" % number for number in range(len(writer.acknowledged))]
    assert list(writer.acknowledged.values()) == list(range(len(writer.acknowledged)))


@pytest.mark.slow(seconds=40)
def test_over_the_stream_manager_protocol_a_lost_append_is_an_error_and_is_not_repeated(
    gateway: Gateway,
) -> None:
    with StreamManagerClient(gateway.urls["streammanager"], reconnect_delay=FAST) as client:
        client.create_message_stream(NEW)
        writer = Writer(client)
        writer.start()
        for _ in range(ROUNDS):
            reached = len(writer.acknowledged) + 50
            eventually(lambda reached=reached: len(writer.acknowledged) >= reached)
            gateway.kill()
            gateway.start()
        reached = len(writer.acknowledged) + 50
        eventually(lambda: len(writer.acknowledged) >= reached)
        writer.finish()
    found = [int(payload) for payload in stored(gateway)]
    assert len(writer.open) <= ROUNDS  # the one on its way; what waits for the connection is sent later
    assert found == sorted(set(found))  # nothing twice
    assert set(writer.acknowledged) <= set(found) <= set(writer.acknowledged) | set(writer.open)


@pytest.mark.parametrize("transport", ["mqtt", "streammanager"])
def test_tasks_read_append_and_tail_through_a_kill(gateway: Gateway, transport: str) -> None:
    async def work() -> tuple[list[int], list[bytes | None]]:
        acknowledged: list[int] = []
        followed: list[bytes | None] = []
        url = gateway.urls[transport]
        async with AsyncStreamManagerClient(url, reconnect_delay=FAST) as client:
            await client.create_message_stream(NEW)

            async def follow() -> None:
                async for message in client.tail("s", 0):
                    followed.append(message.payload)
                    if message.payload == b"after 9":
                        return

            async def append(when: str) -> None:
                made = [client.append_message("s", b"%s %d" % (when.encode(), n)) for n in range(10)]
                acknowledged.extend(await asyncio.gather(*made))

            following = asyncio.create_task(follow())
            await append("before")
            await asyncio.to_thread(gateway.kill)
            # A request that goes out before the client has noticed would be on its way, not waiting.
            await asyncio.to_thread(eventually, lambda: not client.connected)
            waiting = asyncio.create_task(append("after"))  # sent once there is a connection
            await asyncio.to_thread(gateway.start)
            await waiting
            await asyncio.wait_for(following, 60)
            assert await client.list_streams() == ["s"]
        return acknowledged, followed

    acknowledged, followed = asyncio.run(work())
    assert sorted(acknowledged) == list(range(20))
    assert followed == stored(gateway)
    assert len(followed) == 20
