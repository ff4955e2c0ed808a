"""The committer step by step: what is held back, pinned, freed or counted is given back in every order.

Time stands still, and threads work when a test says so. So each step of an overlap is a line of a test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from errno import EIO
from pathlib import Path

import pytest

from bridge.streams.committer import HIGH, LOW
from bridge.streams.drops import DropReason
from bridge.streams.layout import Files
from bridge.streams.meta import StorageSettings
from bridge.streams.store import StreamStore
from bridge.streams.stream import DISK_ROOM, Stream

from ..fakes.byhand import ByHand

FLUSH = StorageSettings(flush=True, max_size=1 << 30)
DELAY = 0.25


class Threads(ByHand):
    """Work is held back while `hold` is set, until `finish`."""

    def __init__(self) -> None:
        super().__init__()
        self.hold = False
        self.held: list[tuple[Callable[[], object], Callable[[BaseException | None], object]]] = []

    def work(self, do: Callable[[], object], done: Callable[[BaseException | None], object]) -> None:
        if self.hold:
            self.held.append((do, done))
        else:
            super().work(do, done)

    def begin(self) -> None:
        """Do all work that is held back, without telling anybody."""
        for at, (do, done) in enumerate(self.held):
            do()
            self.held[at] = (lambda: None), done

    def finish(self) -> None:
        """Do the work that was held back first, and all that follows from it now."""
        super().work(*self.held.pop(0))
        self.turn()

    def turn(self) -> None:
        """Do what is due now."""
        self.run(self.time)


class Disk(Files):
    """File systems with so much room, on which deletions or syncs fail on demand."""

    def __init__(self) -> None:
        self.room = {"streams": 1 << 30, "memory": 1 << 30}
        self.fails = self.unsyncable = False

    def sync(self, fd: int) -> None:
        if self.unsyncable:
            raise OSError(EIO, "injected")
        super().sync(fd)

    def free(self, directory: Path) -> int:
        return self.room["memory" if "memory" in directory.parts else "streams"]

    def unlink(self, path: Path) -> None:
        if self.fails and path.suffix == ".seg":
            raise OSError(EIO, "injected")
        super().unlink(path)


class Place:
    """A store on such a machine, and what it has reported."""

    def __init__(self, root: Path, delay: float) -> None:
        self.runtime, self.disk, self.events = Threads(), Disk(), list[str]()
        self.store = StreamStore(
            root / "data",
            root / "memory",
            on_event=lambda stream, what: self.events.append(f"{stream}: {what}"),
            files=self.disk,
            runtime=self.runtime,
            commit_delay=delay,
        )
        self.committer = self.store.committer
        self.pressure: list[bool] = []
        self.committer.on_pressure.append(self.pressure.append)

    def create(self, name: str, settings: StorageSettings = FLUSH) -> Stream:
        return self.store.create(name, settings, b"{}")

    def send(self, stream: Stream, *sizes: int, heard: float = 0.0) -> list[float]:
        """Append messages as a client does; returns a list that gets the time of their commit."""
        told: list[float] = []
        for size in sizes:
            stream.append(b"t", bytes(size))
        stream.after_commit(lambda error: told.append(self.runtime.now()), heard)
        self.runtime.turn()
        return told

    def fill(self, stream: Stream, segments: int = 8) -> None:
        """Store messages of 1,000 bytes, each in a segment of its own."""
        for _ in range(segments):
            self.send(stream, 1000)


@asynccontextmanager
async def place(root: Path, delay: float = 0.0) -> AsyncIterator[Place]:
    here = Place(root, delay)
    yield here
    here.runtime.hold, here.disk.fails = False, False
    while here.runtime.held:
        here.runtime.finish()
    for stream in here.store.streams.values():
        stream.exported_upto = None
    here.runtime.turn()

    async def turn() -> None:
        while True:
            here.runtime.turn()
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    await asyncio.wait_for(here.store.close(), 60)
    turning.cancel()


def open_files(root: Path, name: str) -> list[str]:
    """The open files in directories with this name."""
    files = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return [file for file in files if str(root) in file and name in file]


def test_pressure_ends_below_the_lower_bound_and_a_deleted_stream_is_taken_off_once(tmp_path: Path) -> None:
    async def work() -> None:
        async with place(tmp_path) as here:
            large, small, gone = (here.create(name) for name in ("large", "small", "gone"))
            here.runtime.hold = True
            here.send(large, HIGH)
            here.send(small, 2 * LOW)
            assert here.pressure == [True]
            here.runtime.finish()
            assert (large.pending_bytes, here.pressure) == (0, [True]), "more than LOW is pending"
            here.runtime.finish()
            assert here.pressure == [True, False]
            here.send(gone, HIGH)
            here.send(gone, LOW)
            assert here.pressure == [True, False, True]
            here.store.delete("gone")
            assert here.pressure == [True, False, True, False]
            here.runtime.finish()  # its thread ends after that
            here.send(large, HIGH)
            assert here.pressure == [True, False, True, False, True]

    asyncio.run(work())


@pytest.mark.parametrize("deleted", [False, True])
def test_a_sync_that_is_asked_for_during_a_group_comes_after_it_and_ends(
    tmp_path: Path, deleted: bool
) -> None:
    async def work() -> None:
        async with place(tmp_path) as here:
            stream = here.create("s")
            here.runtime.hold = True
            told = here.send(stream, 10)
            syncing = asyncio.create_task(here.committer.sync([stream]))
            await asyncio.sleep(0)
            assert len(here.runtime.held) == 1, "one stream never has two syncs at a time"
            assert not syncing.done()
            if deleted:
                here.store.delete("s")
            while here.runtime.held:
                here.runtime.finish()
            await asyncio.wait_for(syncing, 60)
            assert told
            assert deleted or not stream.unsynced()

    asyncio.run(work())


@pytest.mark.parametrize("begun", [False, True])
def test_a_deleted_stream_leaves_no_open_file_and_no_message_whatever_its_threads_do(
    tmp_path: Path, begun: bool
) -> None:
    async def work() -> None:
        async with place(tmp_path) as here:
            stream = here.create("gone", StorageSettings(flush=True, segment_size=1024))
            plain = here.create("gone too", StorageSettings(segment_size=1024))
            here.fill(stream)
            here.fill(plain)
            here.runtime.hold = True
            plain.drop_upto(4, DropReason.PURGED)  # a thread deletes
            here.send(stream, 1000, 1000, 1000)  # a group in new segments
            syncing = asyncio.create_task(here.committer.sync([plain]))
            await asyncio.sleep(0)
            assert len(here.runtime.held) == 3
            if begun:
                here.runtime.begin()
            for name in ("gone", "gone too"):
                here.store.delete(name)
            while here.runtime.held:
                here.runtime.finish()
            await asyncio.wait_for(syncing, 60)
            assert open_files(tmp_path, "gone") == []
            assert here.events == []

    asyncio.run(work())


def test_what_is_dropped_while_a_thread_deletes_is_deleted_after_it_and_what_failed_is_tried_again(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        async with place(tmp_path) as here:
            stream = here.create("s", StorageSettings(flush=True, segment_size=1024))
            here.fill(stream)

            def files() -> int:
                return len(list(stream.directory.glob("*.seg")))

            before, here.runtime.hold = files(), True
            for number in (2, 4):
                stream.drop_upto(number, DropReason.PURGED)
            while here.runtime.held:
                here.runtime.finish()
            assert files() == before - 4, "nothing else has happened in between"
            here.disk.fails = True
            stream.drop_upto(6, DropReason.PURGED)
            here.runtime.finish()
            assert files() == before - 4
            assert stream.counters["delete_failed"] == 1
            here.disk.fails = False
            here.committer.maintain([stream])
            here.runtime.finish()
            assert files() == before - 6

    asyncio.run(work())


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("nearly_full", ["streams", "memory", ""])
def test_on_a_nearly_full_file_system_only_its_exported_segments_go(
    tmp_path: Path, nearly_full: str, exported: bool
) -> None:
    async def work() -> None:
        async with place(tmp_path) as here:
            found: dict[str, Stream] = {}
            for memory in (False, True):
                for name in ("overwriting", "partly", "kept"):
                    settings = StorageSettings(
                        flush=not memory,
                        segment_size=65536 if name == "overwriting" else 1024,
                        memory=memory,
                        free_exported=name != "kept",
                        overwrite=name != "partly",
                    )
                    stream = here.create(f"{name} {'memory' if memory else 'streams'}", settings)
                    here.fill(stream, 30)
                    found[stream.name] = stream
                    stream.exported_upto = {"partly": 5, "overwriting": 0, "kept": 30}[name]
            sizes = {name: len(stream.log.sizes) for name, stream in found.items()}
            if nearly_full:
                if not exported:
                    found[f"partly {nearly_full}"].exported_upto = 0
                here.disk.room[nearly_full] = DISK_ROOM - 1
            here.committer.reclaim_exported()
            dropped = {name: stream.oldest for name, stream in found.items() if stream.oldest}
            assert dropped == ({f"partly {nearly_full}": 5} if nearly_full and exported else {})
            gone = {name: sizes[name] - len(stream.log.sizes) for name, stream in found.items()}
            assert {name: number for name, number in gone.items() if number} == dropped
            here.disk.room = dict.fromkeys(here.disk.room, DISK_ROOM)
            here.committer.reclaim_exported()
            last = found["kept streams"]
            before = len(list(last.directory.glob("*.seg")))
            last.drop_upto(3, DropReason.PURGED)
            here.runtime.turn()
            assert len(list(last.directory.glob("*.seg"))) == before - 3, "threads delete again"

    asyncio.run(work())


def test_a_stream_is_deleted_while_its_group_waits_for_others(tmp_path: Path) -> None:
    async def work() -> None:
        async with place(tmp_path, DELAY) as here:
            stream = here.create("s")
            told = here.send(stream, 10)
            assert not told
            here.store.delete("s")
            assert told
            again = here.create("s")
            assert not here.send(again, 10)
            here.runtime.run(here.runtime.now() + 2 * DELAY)
            assert again.next_sequence == 1

    asyncio.run(work())


def test_under_pressure_no_group_waits_and_afterwards_it_does_again(tmp_path: Path) -> None:
    async def work() -> None:
        async with place(tmp_path, DELAY) as here:
            stream, other = here.create("s"), here.create("other")
            waits = here.send(stream, 10)  # for others, before there is pressure
            here.runtime.hold = True
            assert not waits
            here.send(other, HIGH + LOW, heard=float("inf"))
            assert here.pressure == [True]
            here.runtime.hold = False
            began = here.runtime.now()
            assert here.send(stream, 10) == [began]
            assert waits == [began]
            here.runtime.finish()
            assert here.pressure == [True, False]
            here.runtime.run(began + 10)
            later = here.send(stream, 10)
            assert not later
            here.runtime.run(began + 10 + DELAY)
            assert later == [pytest.approx(began + 10 + DELAY)]

    asyncio.run(work())


def test_a_message_that_came_during_a_sync_waits_for_nothing_else(tmp_path: Path) -> None:
    async def work() -> None:
        async with place(tmp_path, DELAY) as here:
            stream, long_ago = here.create("s"), here.runtime.now()
            for _ in range(2):
                here.runtime.run(here.runtime.now() + 10)
                here.send(stream, 10, heard=float("inf"))
            here.runtime.hold = True
            here.send(stream, 10, heard=float("inf"))
            meanwhile = here.send(stream, 10, heard=long_ago)
            here.runtime.finish()
            here.runtime.finish()
            assert meanwhile == [here.runtime.now()]

    asyncio.run(work())


@pytest.mark.parametrize("failed", [False, True])
def test_an_operation_hurries_only_its_own_group(tmp_path: Path, failed: bool) -> None:
    """Also if that could not be stored; nor does a client of which nothing was acknowledged just now."""

    async def work() -> None:
        async with place(tmp_path, DELAY) as here:
            stream = here.create("s")
            began = here.runtime.now()
            if failed:
                here.runtime.hold = here.disk.unsyncable = True
                for _ in range(2):
                    here.send(stream, 10, heard=float("inf"))
                while here.runtime.held:
                    here.runtime.finish()
                assert stream.counters["failed"] == 2
                here.runtime.hold = here.disk.unsyncable = False
            else:
                assert here.send(stream, 10, heard=float("inf")) == [began]
            for pause in (0.3 * DELAY, 5 * DELAY):
                here.runtime.run(here.runtime.now() + pause)
                now = here.runtime.now()
                first = here.send(stream, 10, heard=now - pause)
                second = here.send(stream, 10, heard=now)  # the same client, in the same instant
                assert not first
                here.runtime.run(now + DELAY)
                assert first == second == [pytest.approx(now + DELAY)]

    asyncio.run(work())
