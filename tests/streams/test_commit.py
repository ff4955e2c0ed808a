"""Group commit: off the event loop, in parallel over streams, with bounded memory when the disk is slow."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

from bridge.errors import StreamError
from bridge.manager import committed
from bridge.streams.committer import HIGH, LOW
from bridge.streams.layout import Files
from bridge.streams.meta import Settings

from .conftest import House, everything, payloads, put, run


class SlowDisk(Files):
    """A disk whose syncs wait until the test lets them through; counts how many wait at once."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = 0
        self.most = 0
        self.syncs = 0
        self._lock = threading.Lock()

    def sync(self, fd: int) -> None:
        if threading.current_thread() is threading.main_thread():
            super().sync(fd)  # definitions are synced on the loop; only the workers' disk is slow
            return
        with self._lock:
            self.syncs += 1
            self.waiting += 1
            self.most = max(self.most, self.waiting)
        self.gate.wait(30)
        with self._lock:
            self.waiting -= 1
        super().sync(fd)


async def until(done: object, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def slow(house: House) -> SlowDisk:
    house.files = disk = SlowDisk()
    return disk


def test_streams_sync_at_the_same_time_and_the_loop_goes_on(house: House) -> None:
    async def work() -> None:
        disk = slow(house)
        async with house.store() as store:
            streams = [store.create(f"s{n}", Settings(flush=True), b"{}") for n in range(4)]
            disk.gate.clear()
            for stream in streams:
                stream.append(b"t", b"x")
            await until(lambda: disk.waiting == 4)
            assert all(stream.next_sequence == 0 for stream in streams)
            disk.gate.set()
            for stream in streams:
                await committed(stream)
            assert disk.most == 4

    run(work())


def test_what_arrives_during_a_sync_forms_one_next_group(house: House) -> None:
    async def work() -> None:
        disk = slow(house)
        async with house.stream(flush=True) as stream:
            disk.gate.clear()
            disk.syncs = 0
            stream.append(b"t", b"first")
            await until(lambda: disk.waiting == 1)
            for n in range(500):
                stream.append(b"t", b"%d" % n)
                await asyncio.sleep(0)
            told: list[StreamError | None] = []
            stream.after_commit(told.append)
            assert told == []
            disk.gate.set()
            await committed(stream)
            assert told == [None]
            assert disk.syncs == 2
            assert len(everything(stream)) == 501

    run(work())


def test_waiters_are_told_in_the_order_of_their_calls_and_only_after_the_sync(house: House) -> None:
    async def work() -> None:
        disk = slow(house)
        async with house.stream(flush=True) as stream:
            disk.gate.clear()
            order: list[int] = []
            for n in range(20):
                stream.append(b"t", b"%d" % n)
                stream.after_commit(lambda _, n=n: order.append(n))  # type: ignore[misc]
                if n % 5 == 4:
                    await asyncio.sleep(0.001)
            assert order == []
            disk.gate.set()
            await committed(stream)
            assert order == list(range(20))

    run(work())


def test_front_ends_are_told_when_too_much_waits_for_the_disk_and_when_it_is_done(
    house: House,
) -> None:
    async def work() -> None:
        disk = slow(house)
        async with house.store() as store:
            stream = store.create("s", Settings(flush=True, max_size=1 << 30), b"{}")
            told: list[bool] = []
            store.committer.on_pressure.append(told.append)
            disk.gate.clear()
            sent = 0
            while not store.committer.under_pressure:  # a front end reads on until it is told to stop
                for _ in range(10):
                    stream.append(b"t", bytes(10_000))
                    sent += 1
                await asyncio.sleep(0)
            assert told == [True]
            assert HIGH < stream.pending_bytes < HIGH + 600_000
            disk.gate.set()
            await until(lambda: not store.committer.under_pressure)
            assert told == [True, False]
            assert stream.pending_bytes < LOW
            await committed(stream)
            assert stream.next_sequence == sent

    run(work())


def test_written_streams_are_synced_in_the_background_and_a_stop_syncs_everything(house: House) -> None:
    async def work() -> None:
        disk = slow(house)
        async with house.store() as store:
            stream = store.create("s", Settings(), b"{}")
            keeping = asyncio.create_task(store.keep(0.01))
            await put(stream, b"a")
            await until(lambda: not stream.log.unsynced())
            disk.gate.clear()
            await put(stream, b"b")  # committed although the disk is busy
            assert payloads(stream) == [b"a", b"b"]
            await until(lambda: disk.waiting == 1)
            disk.gate.set()
            keeping.cancel()
            before = disk.syncs
            await put(stream, b"c")
        assert disk.syncs > before

    run(work())


def test_a_stream_deleted_while_a_group_is_in_flight_disturbs_nobody(house: House, tmp_path: Path) -> None:
    async def work() -> None:
        disk = slow(house)
        async with house.store() as store:
            stream = store.create("s", Settings(flush=True), b"{}")
            other = store.create("other", Settings(flush=True), b"{}")
            disk.gate.clear()
            stream.append(b"t", b"x")
            told: list[StreamError | None] = []
            stream.after_commit(told.append)
            await until(lambda: disk.waiting == 1)
            store.delete("s")
            disk.gate.set()
            assert await put(other, b"y") == [0]
            await until(lambda: told)
            assert store.create("s", Settings(), b"{}").next_sequence == 0

    run(work())
