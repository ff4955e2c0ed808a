"""What is on the disk at a power cut, on a disk that forgets what was not synced: data and names.

`make crashstates` tries the same on recordings of the whole service. Here the disk is in memory, so that
syncs can fail and be held back as well.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import StorageFailed
from bridge.operations.manager import StreamManager
from bridge.streams.drops import DropReason
from bridge.streams.layout import Files
from bridge.streams.meta import MessageLimits, StorageSettings
from bridge.streams.reader import StreamReader
from bridge.streams.store import StreamStore

from ..test_manager import REGISTRY, NoExports
from .conftest import House, everything, payloads, put, run
from .test_commit import until
from .test_syncs import Forgetful


class Disk(Forgetful):
    """Forgets names too, until their directory is synced. Fails syncs, and holds back those of segments."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0  # of the next syncs of files whose names end so
        self.failing = ".seg"
        self.killed = False  # the process is dead, and changes nothing more
        self.dying = False  # it is killed when it is about to sync a segment
        self.hold = False
        self.reached, self.gate = threading.Event(), threading.Event()
        self._unnamed: set[Path] = set()
        self._instant = threading.RLock()  # a power cut is between two calls of any thread

    def _alive(self) -> None:
        if self.killed:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_TRUNC:
            self._alive()
        if flags & os.O_CREAT and not path.exists():
            self._unnamed.add(path)
        return super().open(path, flags)

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        self._alive()
        super().write(fd, parts, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._alive()
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        segment = name.endswith(".seg")
        self.killed |= self.dying and segment
        self._alive()
        try:
            with self._instant:
                if self.failures and name.endswith(self.failing):
                    self.failures -= 1
                    self.fail_next = True
                super().sync(fd)
        finally:
            if self.hold and segment:  # what is written from now on is not covered
                self.hold = False
                self.reached.set()
                self.gate.wait(30)

    def unlink(self, path: Path) -> None:
        self._alive()
        with self._instant:
            super().unlink(path)

    def sync_directory(self, directory: Path) -> None:
        super().sync_directory(directory)
        self._unnamed = {path for path in self._unnamed if path.parent != directory}

    def power_cut(self, house: House) -> House:
        with self._instant:
            found = super().power_cut(house)
            for path in self._unnamed:
                (found.data_dir / path.relative_to(house.data_dir)).unlink(missing_ok=True)
        return found


@pytest.fixture
def disk(house: House) -> Disk:
    house.files = disk = Disk()
    return disk


@pytest.mark.parametrize("purged", [False, True])
@pytest.mark.parametrize("segment_size", [1024, 1 << 20])
@pytest.mark.parametrize("failures", list(product((0, 1, 2), repeat=3)), ids=str)
def test_what_is_acknowledged_is_on_the_disk_however_syncs_fail(
    house: House, disk: Disk, failures: tuple[int, ...], segment_size: int, purged: bool
) -> None:
    """Each group is larger than a small segment; a sync that fails twice is reported to the client."""

    async def work() -> None:
        acknowledged: list[bytes] = []
        async with house.stream(flush=True, segment_size=segment_size) as stream:
            if purged:
                await put(stream, b"gone")
                stream.drop_upto(1, DropReason.PURGED)
                await until(lambda: not stream.obsolete.any())
            for at, disk.failures in enumerate(failures):
                group = [b"%d-%d" % (at, n) * 100 for n in range(5)]
                try:
                    await put(stream, *group)
                except StorageFailed:
                    assert failures[at] == 2
                else:
                    acknowledged += group
                disk.failures = 0
            found = disk.power_cut(house)
        async with found.stream() as stream:
            assert payloads(stream) == acknowledged

    run(work())


@pytest.mark.parametrize("failing", [False, True])
def test_what_was_stored_when_a_sync_began_is_on_the_disk_when_it_has_ended(
    house: House, disk: Disk, failing: bool
) -> None:
    """Also in segments that were closed while the sync before it was under way, and if that one fails."""

    async def work() -> None:
        stored: list[bytes] = []
        async with house.store() as store:
            stream = store.create("s", StorageSettings(segment_size=1024), b"{}")
            for round_ in range(3):
                disk.gate.clear()
                disk.reached.clear()
                disk.hold, disk.failures = True, int(failing)
                stored.append(b"%d-before" % round_)
                await put(stream, stored[-1])
                syncing = asyncio.create_task(store.committer.sync([stream]))
                await until(disk.reached.is_set)
                for n in range(6):
                    stored.append(b"%d-%d" % (round_, n) * 100)
                    stream.append(b"t", stored[-1])
                    await asyncio.sleep(0)
                disk.gate.set()
                await syncing
                await stream.idle()
            await store.committer.sync([stream])
            assert stream.unsynced() == []
            found = disk.power_cut(house)
        async with found.stream() as stream:
            assert payloads(stream) == stored

    run(work())


async def purged(store: StreamStore, **what: Any) -> bool:
    """Whether a purge of the stream is confirmed."""
    try:
        await StreamManager(store, REGISTRY, NoExports()).purge("s", **what)
    except StorageFailed:
        return False
    return True


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("segment_size", [1024, 1 << 20])
@pytest.mark.parametrize("failures", range(5))
def test_a_purge_that_was_confirmed_stands_after_a_power_cut_however_syncs_fail(
    house: House, disk: Disk, failures: int, segment_size: int, killed: bool
) -> None:
    """A client repeats a purge until it is confirmed, also after a kill; then the power fails."""

    async def work() -> None:
        async with house.store() as store:
            stream = store.create("s", StorageSettings(flush=True, segment_size=segment_size), b"{}")
            for n in range(6):
                await put(stream, b"%d" % n * 500)
            disk.failing, disk.failures = "drops.log", failures
            confirmed = await purged(store, upto=4)
            disk.killed = killed and not confirmed
            if confirmed:
                found = disk.power_cut(house)
        disk.killed = False
        disk.failures = 0
        if not confirmed:
            async with house.store() as store:
                assert await purged(store, upto=4)
                found = disk.power_cut(house)
        async with found.stream() as stream:
            assert payloads(stream) == [b"4" * 500, b"5" * 500]
            assert found.events == []

    run(work())


def test_no_purge_is_confirmed_while_the_name_of_the_compact_record_is_not_on_the_disk(house: House) -> None:
    class Nameless(Files):
        """Fails the syncs of directories."""

        failing = False

        def sync_directory(self, directory: Path) -> None:
            if self.failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().sync_directory(directory)

    async def work() -> None:
        house.files = disk = Nameless()
        async with house.stream(flush=True) as stream:
            await put(stream, *(b"%d" % n for n in range(3000)))
            stream.purge([(1, 1)])
            log = house.directory() / "drops.log"
            size, disk.failing = log.stat().st_size, True
            with suppress(StorageFailed):  # it is in the old file as well as in the new one
                stream.purge([(n, n) for n in range(2, 2900)])
            assert log.stat().st_size <= size + 4096, "it has been made compact"
            with pytest.raises(StorageFailed):
                stream.purge([(2950, 2950)])
            disk.failing = False
            assert stream.purge([(2950, 2950)]) == 0
        async with house.stream() as stream:
            assert payloads(stream) == [b"0", *(b"%d" % n for n in range(2900, 3000) if n != 2950)]
        assert house.events == []

    run(work())


def test_a_duplicate_is_confirmed_only_once_the_first_message_is_on_the_disk(
    house: House, disk: Disk
) -> None:
    """A kill comes between write and sync; the client repeats the append, and then the power fails."""

    async def work() -> None:
        async with house.store() as store:
            stream = store.create("s", StorageSettings(flush=True, dedup_window=60_000), b"{}")
            disk.dying = True
            with pytest.raises(StorageFailed):
                await put(stream, b"once", ids=True)
        disk.dying = disk.killed = False
        async with house.stream() as stream:
            assert payloads(stream) == [b"once"], "it is in the page cache"
            assert await put(stream, b"once", ids=True) == [0]
            found = disk.power_cut(house)
        async with found.stream() as stream:
            assert payloads(stream) == [b"once"]

    run(work())


def test_after_a_kill_a_record_whose_sync_had_failed_is_written_again_before_the_next_one(
    house: House, disk: Disk
) -> None:
    async def work() -> None:
        settings = StorageSettings(flush=True, limits=MessageLimits(max_messages=8))
        async with house.store() as store:
            stream = store.create("s", settings, b"{}")
            await put(stream, *(b"%d" % n for n in range(8)))
            disk.failing, disk.failures = "drops.log", 99
            assert not await purged(store, topic="t", upto=2)
            disk.killed = True
        disk.killed, disk.failures = False, 0
        async with house.store() as store:
            stream = store.streams["s"]
            await put(stream, b"x", b"y", b"z")  # more than the limit: its record is not synced
            assert await purged(store, upto=5)
            found = disk.power_cut(house)
        async with found.stream() as stream:
            assert payloads(stream) == [b"5", b"6", b"7", b"x", b"y", b"z"]
            assert found.events == []

    run(work())


@pytest.mark.parametrize("failures", range(3))
def test_overwritten_messages_are_not_taken_for_lost_if_the_sync_of_their_record_had_failed(
    house: House, disk: Disk, failures: int
) -> None:
    async def work() -> None:
        settings = StorageSettings(flush=True, segment_size=1024, max_size=4096, overwrite=True)
        async with house.store() as store:
            stream = store.create("s", settings, b"{}")
            disk.failing, disk.failures = "drops.log", failures
            for n in range(12):
                await put(stream, b"%03d" % n * 200)

            def deleted() -> bool:
                store.committer.maintain([stream])
                return not stream.obsolete.any()

            await until(deleted)
            assert not disk.failures
            found = disk.power_cut(house)
        async with found.stream() as stream:
            with closing(StreamReader(stream.directory)) as reader:
                assert reader.lost() == []
            assert everything(stream)[-1].payload == b"011" * 200
            assert found.events == []

    run(work())


def test_a_disk_that_forgets_is_noticed(house: House, disk: Disk) -> None:
    """The disk itself: without a sync nothing is there."""

    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, b"a")
            found = disk.power_cut(house)
        async with found.stream() as stream:
            assert payloads(stream) == []

    run(work())


@pytest.mark.parametrize(("lost", "numbers"), [(512, "0-0"), (4096, "0-3")])
def test_a_segment_whose_beginning_a_power_cut_has_lost_keeps_its_other_frames(
    house: House, lost: int, numbers: str
) -> None:
    """The disk has the later sectors, or pages, of what was not synced, and not the first one."""

    async def work() -> None:
        sent = [b"%d" % n * 1000 for n in range(8)]
        async with house.stream() as stream:
            for payload in sent:
                await put(stream, payload)
        (path,) = house.directory().glob("*.seg")
        path.write_bytes(bytes(lost) + path.read_bytes()[lost:])
        async with house.stream() as stream:
            assert payloads(stream) == sent[int(numbers[-1]) + 1 :]
        (event,) = house.events
        assert "its beginning is missing; its sound frames were kept" in event
        assert f"lost: {numbers}" in event

    run(work())
