"""A consumer step by step: what is settled counts once it is on the disk, whatever overlaps and fails."""

from __future__ import annotations

import asyncio
from contextlib import closing
from errno import EIO
from pathlib import Path
from typing import Any

import pytest

from bridge.consumers.consumer import Consumer, Host, Verdicts, stored_status
from bridge.errors import StorageFailed
from bridge.plugin.consumer import ConsumerConfig
from bridge.streams.segment import StreamMessage
from bridge.streams.stream import Stream
from tests.streams.test_committer import Place, place


def rows(stream: Stream, start: int, end: int, most: int, size: int) -> list[StreamMessage]:
    with closing(stream.reader()) as reader:
        return reader.read(start, end=end, max_messages=most, max_bytes=size)


async def append(name: str, payload: bytes) -> None:
    raise AssertionError("no dead letter")


class Steps:
    """A consumer of a stream of so many messages, all of them delivered."""

    def __init__(self, here: Place, messages: int) -> None:
        self.here, stream = here, here.create("s")
        here.send(stream, *[10] * messages)
        host = Host(here.store.data_dir, here.disk, here.runtime, rows, append)
        self.consumer = Consumer(host, stream, ConsumerConfig(identifier="c"))

    async def turn(self, times: int = 5) -> None:
        for _ in range(times):
            self.here.runtime.turn()
            await asyncio.sleep(0)

    async def done(self, work: asyncio.Task[Any]) -> Any:
        async with asyncio.timeout(60):
            while not work.done():
                await self.turn()
        return await work

    def ack(self, *numbers: int) -> asyncio.Task[list[int]]:
        return asyncio.ensure_future(self.consumer.acknowledge(Verdicts(ack=numbers), "w", trusted=False))

    async def write(self, *, fails: bool = False) -> int:
        """End the write that is held back; return up to where all is settled."""

        def fail() -> None:
            raise OSError(EIO, "injected")

        (do, done), *others = self.here.runtime.held
        self.here.runtime.held = [(fail if fails else do, done), *others]
        self.here.runtime.finish()
        await self.turn()
        upto, stream = self.consumer.saved_upto, self.consumer.stream
        stored = stored_status(self.here.store.data_dir, stream.name, stream.epoch, "c")
        assert stored.passed_sequence_number == upto - 1, "what the next start finds"
        return upto


def test_what_is_acknowledged_is_settled_after_its_write_also_if_others_overlap_or_fail(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        async with place(tmp_path) as here:
            steps = Steps(here, 9)
            fetching = asyncio.ensure_future(steps.consumer.fetch(9, 1 << 20, 0.0, "w"))
            assert len(await steps.done(fetching)) == 9
            here.runtime.hold = True
            first = steps.ack(0, 1)
            await steps.turn()
            assert steps.consumer.saved_upto == 0
            second = steps.ack(2, 3)
            await steps.turn()
            assert (first.done(), second.done(), len(here.runtime.held)) == (False, False, 1)
            assert steps.consumer.saved_upto == 0
            assert await steps.write() == 2
            assert (first.done(), second.done()) == (True, False)
            assert await steps.write() == 4
            assert await steps.done(second) == []
            failing = [steps.ack(4)]
            await steps.turn()
            failing.append(steps.ack(6, 5))
            await steps.turn()
            assert await steps.write(fails=True) == 4
            for one in failing:
                with pytest.raises(StorageFailed, match="Repeat the request"):
                    await steps.done(one)
            again = steps.ack(7)  # its write has all that failed
            await steps.turn()
            assert steps.consumer.saved_upto == 4
            assert await steps.write() == 8
            assert await steps.done(again) == []
            assert steps.consumer.close() is None

    asyncio.run(work())
