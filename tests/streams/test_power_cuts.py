"""What is on the disk at a power cut, on a disk that forgets what was not synced: data and names.

`make crashstates` tries the same on recordings of the whole service. Here the disk is in memory, so that
syncs can fail and be held back as well.
"""

from __future__ import annotations

import asyncio
import os
import threading
from itertools import product
from pathlib import Path

import pytest

from bridge.errors import StorageFailed
from bridge.streams.drops import DropReason
from bridge.streams.meta import StorageSettings

from .conftest import House, payloads, put, run
from .test_commit import until
from .test_syncs import Forgetful


class Disk(Forgetful):
    """Forgets names too, until their directory is synced. Fails or holds back syncs of segments."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0  # of the next syncs
        self.hold = False
        self.reached, self.gate = threading.Event(), threading.Event()
        self._unnamed: set[Path] = set()

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT and not path.exists():
            self._unnamed.add(path)
        return super().open(path, flags)

    def sync(self, fd: int) -> None:
        segment = Path(f"/proc/self/fd/{fd}").readlink().suffix == ".seg"
        if self.failures and segment:
            self.failures -= 1
            self.fail_next = True
        try:
            super().sync(fd)
        finally:
            if self.hold and segment:  # what is written from now on is not covered
                self.hold = False
                self.reached.set()
                self.gate.wait(30)

    def sync_directory(self, directory: Path) -> None:
        super().sync_directory(directory)
        self._unnamed = {path for path in self._unnamed if path.parent != directory}

    def power_cut(self, house: House) -> House:
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
    """Also in segments that were sealed while the sync before it was under way, and if that one fails."""

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


def test_a_disk_that_forgets_is_noticed(house: House, disk: Disk) -> None:
    """The disk itself: without a sync nothing is there."""

    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, b"a")
            found = disk.power_cut(house)
        async with found.stream() as stream:
            assert payloads(stream) == []

    run(work())
