"""Errors and deletions while a worker thread writes or syncs: other streams are unaffected."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path

import pytest

from bridge.errors import StorageFailed, StreamError
from bridge.operations.manager import committed
from bridge.streams.committer import PROVEN
from bridge.streams.drops import DropReason
from bridge.streams.layout import Files
from bridge.streams.meta import MessageLimits, StorageSettings

from .conftest import House, everything, payloads, put, run
from .test_commit import SlowDisk, slow, until
from .test_drops import flip
from .test_faults import Faulty


def test_a_stream_deleted_behind_slow_syncs_never_touches_the_file_of_the_next_one(house: House) -> None:
    async def work() -> None:
        disk: SlowDisk = slow(house)
        async with house.store() as store:
            busy = [store.create(f"busy{n}", StorageSettings(flush=True), b"{}") for n in range(8)]
            gone = store.create("gone", StorageSettings(flush=True, segment_size=1024), b"{}")
            disk.gate.clear()
            for stream in busy:
                stream.append(b"t", b"x")
            await until(lambda: disk.blocked == 8)  # every worker thread is taken
            notified: list[StreamError | None] = []
            for _ in range(5):
                gone.append(b"t", b"GONE" * 100)  # spans segments
            gone.after_commit(notified.append)
            await asyncio.sleep(0)
            store.delete("gone")
            assert isinstance(notified[0], StorageFailed)
            new = store.create("new", StorageSettings(), b"{}")
            await put(new, b"mine", b"mine too")
            with pytest.raises(StorageFailed, match="was deleted"):
                gone.append(b"t", b"x")
            disk.gate.set()
            for stream in busy:
                await committed(stream)
            assert payloads(new) == [b"mine", b"mine too"]
            assert [payloads(stream) for stream in busy] == [[b"x"]] * 8

    run(work())


def test_dropping_segments_during_a_background_sync_is_no_failed_sync(house: House) -> None:
    async def work() -> None:
        disk: SlowDisk = slow(house)
        async with house.store() as store:
            stream = store.create("s", StorageSettings(segment_size=1024), b"{}")
            for n in range(50):
                await put(stream, b"%d" % n * 30)
            disk.gate.clear()
            syncing = asyncio.create_task(store.committer.sync([stream]))
            await until(lambda: disk.blocked == 1)
            stream.drop_upto(40, DropReason.PURGED)
            disk.gate.set()
            await syncing
            assert house.events == []
            assert len(everything(stream)) == 10

    run(work())


class Unreadable(Files):
    """Reading fails on demand."""

    failing = False

    def read(self, fd: int, size: int, offset: int) -> bytes:
        if self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(fd, size, offset)


@pytest.mark.parametrize("flush", [False, True])
def test_an_error_in_applying_limits_neither_holds_acknowledgements_nor_other_streams(
    house: House, flush: bool
) -> None:
    async def work() -> None:
        house.files = files = Unreadable()
        async with house.store() as store:
            limited = store.create(
                "a", StorageSettings(flush=flush, limits=MessageLimits(max_bytes=20)), b"{}"
            )
            plain = store.create("b", StorageSettings(flush=flush), b"{}")
            await put(limited, b"0123456789")
            files.failing = True
            numbers = [limited.append(b"t", b"0123456789"), plain.append(b"t", b"x")]
            await asyncio.wait_for(asyncio.gather(committed(limited), committed(plain)), 60)
            assert numbers == [1, 0]
            assert "cannot apply its limits now" in house.events[-1]
            files.failing = False
            await put(limited, b"9876543210")
            assert payloads(limited) == [b"9876543210"]

    run(work())


class Snapshots(Faulty):
    """Copies the data directory at every call of the disk while `into` is set: each a possible crash."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.into = root, list[Path]()
        self.taking = False

    def _maybe(self, call: str) -> None:
        if self.taking:
            copy = self.root.with_name(f"crash{len(self.into)}")
            shutil.copytree(self.root, copy, symlinks=True)
            self.into.append(copy)
        super()._maybe(call)


def test_a_crash_at_any_instant_of_rewriting_unsynced_data_loses_nothing_and_reuses_no_number(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        house = House(tmp_path / "house")
        house.data_dir.parent.mkdir()
        house.files = files = Snapshots(house.data_dir)
        async with house.store() as store:
            stream = store.create("s", StorageSettings(segment_size=1024), b"{}")
            content = [b"%03d" % n * 40 for n in range(30)]
            for payload in content:
                await put(stream, payload)
            left = [1]

            def once(call: str) -> int:
                return errno.EIO if call == "sync" and left and left.pop() else 0

            files.fails, files.taking = once, True
            await store.committer.sync([stream])
            files.taking = False
            assert payloads(stream) == content
            assert await put(stream, b"after") == [30]
        assert len(files.into) > 10
        for copy in files.into:
            crashed = House(tmp_path)
            crashed.data_dir = copy
            async with crashed.stream() as stream:
                assert payloads(stream) == content, copy
                assert stream.next_sequence == 30
                assert not [event for event in crashed.events if "lost" in event]

    run(work())


def test_a_file_of_a_refused_group_that_cannot_be_removed_is_removed_before_the_next_group(
    house: House,
) -> None:
    async def work() -> None:
        house.files = files = Faulty()
        async with house.stream(segment_size=1024) as stream:
            await put(stream, b"first" * 100)
            writes = [0]

            def fails(call: str) -> int:
                writes[0] += call == "write"
                return errno.EIO if (call == "write" and writes[0] >= 6) or call == "unlink" else 0

            files.fails = fails
            with pytest.raises(StorageFailed):
                await put(stream, *(b"refused" * 60 for _ in range(6)))
            files.fails = lambda call: 0
            taken = [b"%d" % n for n in range(20)]
            for payload in taken:
                await put(stream, payload)
            assert payloads(stream)[1:] == taken
        async with house.stream() as stream:
            assert payloads(stream)[1:] == taken
            assert stream.log.damage == []

    run(work())


def fail_once_and_hold(disk: SlowDisk) -> None:
    """The next sync fails, and what the disk is asked for after that waits at the gate."""
    real, failed = disk.sync, [0]

    def sync(fd: int) -> None:
        failed[0] += 1
        if failed[0] == 1:
            disk.gate.clear()
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    disk.sync = sync  # type: ignore[method-assign]


def test_a_stop_while_unsynced_data_is_rewritten_waits_and_keeps_what_is_acknowledged(house: House) -> None:
    async def work() -> None:
        disk: SlowDisk = slow(house)
        async with house.store() as store:
            stream = store.create("s", StorageSettings(), b"{}")
            await put(stream, b"a")
            keeping = asyncio.create_task(store.keep(0.001))
            fail_once_and_hold(disk)
            await until(lambda: stream.busy and disk.blocked)
            keeping.cancel()
            stream.append(b"t", b"b")
            waiter = asyncio.create_task(committed(stream))
            idle = asyncio.create_task(stream.idle())
            await asyncio.sleep(0)
            disk.gate.set()
            await asyncio.wait_for(asyncio.gather(waiter, idle), 60)
        async with house.stream() as stream:
            assert payloads(stream) == [b"a", b"b"]

    run(work())


def test_damage_inside_the_deduplication_window_keeps_neither_the_service_down_nor_other_ids_away(
    house: House,
) -> None:
    async def work() -> None:
        async with house.stream(segment_size=1024, dedup_window=600_000) as stream:
            for n in range(20):
                await put(stream, b"%02d" % n * 100, ids=True)
        for path in sorted(house.directory().glob("*.seg"))[:2]:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        async with house.stream() as stream:
            before = stream.next_sequence
            assert await put(stream, *(b"%02d" % n * 100 for n in range(12, 20)), ids=True) == list(
                range(12, 20)
            )
            assert stream.next_sequence == before
            assert house.events

    run(work())


def test_messages_dropped_while_unsynced_data_is_rewritten_are_deleted_afterwards(house: House) -> None:
    async def work() -> None:
        disk: SlowDisk = slow(house)
        async with house.store() as store:
            stream = store.create("s", StorageSettings(segment_size=1024), b"{}")
            for number in range(4):
                await put(stream, bytes((number,)) * 700)
            fail_once_and_hold(disk)
            syncing = asyncio.create_task(store.committer.sync([stream]))
            await until(lambda: stream.busy and disk.blocked)
            assert stream.drop_upto(2, DropReason.PURGED) == 2
            disk.gate.set()
            await asyncio.wait_for(syncing, 60)
            await until(lambda: not stream.busy)
            assert stream.oldest == 2
            await until(lambda: len(list(house.directory().glob("*.seg"))) == 2)

    run(work())


def test_damage_found_while_a_group_is_in_flight_is_repaired_afterwards(house: House) -> None:
    async def work() -> None:
        disk = slow(house)
        async with house.store() as store:
            stream = store.create("s", StorageSettings(segment_size=1024, flush=True), b"{}")
            disk.gate.set()
            for n in range(PROVEN // 2):  # the disk has not proven quick: what follows is synced in a thread
                await put(stream, b"%d" % n * 50, b"%d" % n * 50)
            disk.gate.clear()
            flip(house.directory() / f"{0:020d}.seg")
            stream.append(b"t", b"x")
            await until(lambda: stream.busy)
            assert not stream.repair(0)
            assert house.events == []
            disk.gate.set()
            await stream.idle()
            store.committer.maintain([stream])
            assert "it is damaged" in house.events[0]

    run(work())
