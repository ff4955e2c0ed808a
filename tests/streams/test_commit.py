"""Group commit: off the event loop, in parallel over streams, with bounded memory when the disk is slow."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from pathlib import Path

from bridge import books
from bridge.errors import StreamError
from bridge.operations.manager import committed
from bridge.streams.committer import HIGH, LOW, PROVEN, QUICK, SMALL
from bridge.streams.layout import Files
from bridge.streams.meta import StorageSettings
from bridge.streams.pace import LONGEST, SHARE, SLOW, Pace

from ..fakes.measured import least
from .conftest import House, everything, payloads, put, run


class SlowDisk(Files):
    """A disk whose syncs wait until the test releases them; counts how many are blocked at once."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.blocked = 0
        self.most = 0
        self.syncs = 0
        self._lock = threading.Lock()

    def sync(self, fd: int) -> None:
        if threading.current_thread() is threading.main_thread():
            super().sync(fd)  # definitions are synced on the loop; only the workers' disk is slow
            return
        with self._lock:
            self.syncs += 1
            self.blocked += 1
            self.most = max(self.most, self.blocked)
        self.gate.wait(30)
        with self._lock:
            self.blocked -= 1
        super().sync(fd)


def test_the_size_of_what_waits_is_counted_with_all_that_belongs_to_it(house: House) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            for number in range(4):
                more = b"h" * (number % 2), b"id" * (number // 2)
                stream.append(b"topic", b"x" * number, *more)
                books.check()
            await committed(stream)

    run(work())


async def until(done: object, seconds: float = 60) -> None:
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
            streams = [store.create(f"s{n}", StorageSettings(flush=True), b"{}") for n in range(4)]
            disk.gate.clear()
            for stream in streams:
                stream.append(b"t", b"x")
            await until(lambda: disk.blocked == 4)
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
            await until(lambda: disk.blocked == 1)
            for n in range(500):
                stream.append(b"t", b"%d" % n)
                await asyncio.sleep(0)
            notified: list[StreamError | None] = []
            stream.after_commit(notified.append)
            assert notified == []
            disk.gate.set()
            await committed(stream)
            assert notified == [None]
            assert disk.syncs == 2
            assert len(everything(stream)) == 501

    run(work())


def test_waiters_are_notified_in_the_order_of_their_calls_and_only_after_the_sync(house: House) -> None:
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


def test_front_ends_are_notified_when_too_much_is_pending_and_when_it_is_stored(
    house: House,
) -> None:
    async def work() -> None:
        disk = slow(house)
        async with house.store() as store:
            stream = store.create("s", StorageSettings(flush=True, max_size=1 << 30), b"{}")
            notified: list[bool] = []
            store.committer.on_pressure.append(notified.append)
            disk.gate.clear()
            sent = 0
            while not store.committer.under_pressure:  # a front end reads on until it is told to stop
                for _ in range(10):
                    stream.append(b"t", bytes(10_000))
                    sent += 1
                await asyncio.sleep(0)
            assert notified == [True]
            assert HIGH < stream.pending_bytes < HIGH + 600_000
            disk.gate.set()
            await until(lambda: not store.committer.under_pressure)
            assert notified == [True, False]
            assert stream.pending_bytes < LOW
            await committed(stream)
            assert stream.next_sequence == sent

    run(work())


def test_written_streams_are_synced_in_the_background_and_a_stop_syncs_everything(house: House) -> None:
    async def work() -> None:
        disk = slow(house)
        async with house.store() as store:
            stream = store.create("s", StorageSettings(), b"{}")
            keeping = asyncio.create_task(store.keep(0.01))
            await put(stream, b"a")
            await until(lambda: not stream.log.unsynced())
            disk.gate.clear()
            await put(stream, b"b")  # committed although the disk is busy
            assert payloads(stream) == [b"a", b"b"]
            await until(lambda: disk.blocked == 1)
            disk.gate.set()
            keeping.cancel()
            before = disk.syncs
            await put(stream, b"c")
        assert disk.syncs > before

    run(work())


def test_a_stream_deleted_while_a_group_is_in_flight_disturbs_no_other(house: House, tmp_path: Path) -> None:
    async def work() -> None:
        disk = slow(house)
        async with house.store() as store:
            stream = store.create("s", StorageSettings(flush=True), b"{}")
            other = store.create("other", StorageSettings(flush=True), b"{}")
            disk.gate.clear()
            stream.append(b"t", b"x")
            notified: list[StreamError | None] = []
            stream.after_commit(notified.append)
            await until(lambda: disk.blocked == 1)
            store.delete("s")
            disk.gate.set()
            assert await put(other, b"y") == [0]
            await until(lambda: notified)
            assert store.create("s", StorageSettings(), b"{}").next_sequence == 0

    run(work())


class Flash(Files):
    """A disk like an SD card: each sync of a segment takes a while; counts them."""

    def __init__(self) -> None:
        self.syncs = 0

    def sync(self, fd: int) -> None:
        super().sync(fd)
        if threading.current_thread() is not threading.main_thread():
            self.syncs += 1
            time.sleep(2 * SLOW)


def test_on_a_slow_disk_a_sync_covers_what_all_senders_have_in_flight(house: House) -> None:
    senders, rounds = 20, 20

    async def syncs() -> int:
        house.files = disk = Flash()
        async with house.stream(flush=True) as stream:
            before = len(everything(stream))

            async def sender(number: int) -> None:
                for _ in range(rounds):
                    stream.append(b"t", b"x")
                    await committed(stream)
                    if number % 2:
                        await asyncio.sleep(0)  # a turn of the loop later than the others

            await asyncio.gather(*(sender(number) for number in range(senders)))
            assert len(everything(stream)) - before == senders * rounds
        return disk.syncs

    # If each group began as soon as the disk is free, half of them would take turns with the others.
    assert least(lambda: run(syncs()), 1.5 * rounds) < 1.5 * rounds


def test_a_group_that_waits_for_more_is_stored_when_nothing_comes_and_when_the_store_closes(
    house: House,
) -> None:
    async def work() -> None:
        house.files = Flash()
        async with house.stream(flush=True) as stream:
            for _ in range(3):
                for _ in range(10):
                    stream.append(b"t", b"x")
                await committed(stream)
                stream.append(b"t", b"alone")  # of the ten senders, nine are silent now
                await committed(stream)
            for _ in range(10):
                stream.append(b"t", b"x")
            await committed(stream)
            stream.append(b"t", b"last")
        async with house.stream(flush=True) as stream:
            assert len(everything(stream)) == 44

    run(work())


def test_senders_with_their_own_timing_are_waited_for_less_and_less_often() -> None:
    pace, now, waited = Pace(), 100.0, 0
    for _ in range(200):
        pace.synced(now, took=0.04, under_way=10)
        waited += pace.wants_more(now + 0.001, pending=5)
        assert not pace.wants_more(now + 0.04 / SHARE, pending=6)
        now += 10
    assert waited == 8  # after 0, 1, 3, 7, 15, 31, 63 and 63 groups that began at once
    for _ in range(5):  # a client that pauses makes no group wait
        pace = Pace()
        pace.synced(now, took=1.0, under_way=10)
        assert pace.wants_more(now, pending=9)
        assert not pace.wants_more(now, pending=10)
        pace.synced(now, took=1.0, under_way=10)
        assert not pace.wants_more(now + 10, pending=1)
    pace.synced(now, took=60.0, under_way=10)
    assert not pace.wants_more(now + LONGEST, pending=1)


def test_a_group_of_many_small_messages_between_large_ones_is_stored_completely(house: House) -> None:
    """It is written in pieces, and one system call takes 1,024 of them."""

    async def work() -> None:
        sent = [b"x" * 200_000, *(b"%d" % number for number in range(5000)), b"z" * 200_000]
        async with house.stream() as stream:
            assert await put(stream, *sent) == list(range(5002))
            assert payloads(stream) == sent
        async with house.stream() as stream:
            assert payloads(stream) == sent

    run(work())


class Counted(Files):
    """A disk whose syncs take `seconds`; counts those in threads and those on the event loop."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.in_threads = self.on_the_loop = 0
        self.fails = False

    def sync(self, fd: int) -> None:
        if threading.current_thread() is threading.main_thread():
            self.on_the_loop += 1
        else:
            self.in_threads += 1
        if self.fails:
            self.fails = False
            raise OSError(errno.EIO, "injected")
        time.sleep(self.seconds)


def test_a_disk_that_has_proven_quick_is_not_worth_a_thread_until_it_stalls(house: House) -> None:
    async def work() -> list[tuple[int, int]]:
        """Syncs in threads and on the loop, so far, after each step."""
        house.files = disk = Counted()
        seen: list[tuple[int, int]] = []
        async with house.stream(flush=True) as stream:

            async def step(*payloads: bytes, seconds: float = 0.0) -> None:
                disk.seconds = seconds
                await put(stream, *payloads)
                seen.append((disk.in_threads, disk.on_the_loop))

            large = (b"large",) * (SMALL + 1)
            await put(stream, *large)
            disk.on_the_loop = 0
            while not disk.on_the_loop and disk.in_threads < 50 * PROVEN:
                await put(stream, b"x")
            assert disk.in_threads >= PROVEN
            disk.in_threads = disk.on_the_loop = 0
            await step(b"on the loop")
            await step(*large)
            await step(b"stalls", seconds=2 * QUICK)
            await step(b"in a thread again")
        return seen

    for _ in range(5):  # on a machine that stands still, the disk seems to stall at other times, too
        seen = run(work())
        if seen == [(0, 1), (1, 1), (1, 2), (2, 2)]:
            break
    assert seen == [(0, 1), (1, 1), (1, 2), (2, 2)]


def test_a_sync_that_fails_on_the_loop_loses_nothing_and_ends_the_trust(house: House) -> None:
    async def work() -> None:
        house.files = disk = Counted()
        async with house.stream(flush=True) as stream:
            for number in range(2 * PROVEN):
                await put(stream, b"%d" % number)
            disk.in_threads = 0
            disk.fails = True
            assert await put(stream, b"again") == [2 * PROVEN]
            assert "s: sync failed (injected); written again to a new segment" in house.events
            await put(stream, b"after")
            assert payloads(stream) == [*(b"%d" % n for n in range(2 * PROVEN)), b"again", b"after"]

    run(work())


def test_several_streams_at_once_are_synced_in_threads_on_any_disk(house: House) -> None:
    async def work() -> None:
        house.files = disk = Counted()
        async with house.store() as store:
            streams = [store.create(f"s{n}", StorageSettings(flush=True), b"{}") for n in range(2)]
            for number in range(2 * PROVEN):
                await put(streams[0], b"%d" % number)
            disk.on_the_loop = disk.in_threads = 0
            for stream in streams:
                stream.append(b"t", b"x")
            for stream in streams:
                await committed(stream)
            assert (disk.in_threads, disk.on_the_loop) == (2, 0)

    run(work())
