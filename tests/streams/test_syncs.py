"""Syncs that fail or overlap, and threads that outlive their stream: no error is lost, no file mixed up."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from bridge.errors import StreamError
from bridge.streams.layout import Files
from bridge.streams.meta import StorageSettings
from bridge.streams.reader import StreamReader
from bridge.streams.store import open_stopped
from bridge.streams.verify import verify

from .conftest import House, payloads, put, run
from .test_commit import until
from .test_faults import Faulty
from .test_threads import Unreadable


class HeldSync(Files):
    """A disk that holds the next sync back and then, on demand, fails it; it records new files."""

    def __init__(self) -> None:
        self.hold = self.fail = False
        self.reached, self.gate = threading.Event(), threading.Event()
        self.made: list[str] = []

    def sync(self, fd: int) -> None:
        if self.hold:
            self.hold = False
            self.reached.set()
            self.gate.wait(30)
            if self.fail:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(fd)

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT:
            self.made.append(path.name)
        return super().open(path, flags)


def test_a_group_to_sync_waits_for_a_background_sync_and_neither_hides_the_others_error(
    house: House,
) -> None:
    async def work() -> None:
        house.files = disk = HeldSync()
        async with house.store() as store:
            stream = store.create("s", StorageSettings(), b"{}")
            await put(stream, b"a", b"b")  # written, and not on the disk yet
            stream.configure(StorageSettings(flush=True), b"{}")
            disk.hold = disk.fail = True
            syncing = asyncio.create_task(store.committer.sync([stream]))
            await until(disk.reached.is_set)
            appending = asyncio.create_task(put(stream, b"c"))
            await asyncio.sleep(0.01)
            assert not appending.done()
            disk.made.clear()
            disk.gate.set()
            await asyncio.wait_for(asyncio.gather(syncing, appending), 60)
            assert any(name.endswith(".seg.tmp") for name in disk.made), "what was lost is written again"
            assert payloads(stream) == [b"a", b"b", b"c"]

    run(work())


def test_a_stream_made_again_under_its_name_is_not_touched_by_the_threads_of_the_old_one(
    house: House,
) -> None:
    async def work() -> None:
        house.files = disk = HeldSync()
        settings = StorageSettings(flush=True, segment_size=1024)
        async with house.store() as store:
            old = store.create("s", settings, b"{}")
            disk.hold = True
            old.append(b"t", b"x" * 700)
            old.append(b"t", b"y" * 700)  # a second segment: made after the first is on the disk
            await until(disk.reached.is_set)
            store.delete("s")
            new = store.create("s", settings, b"{}")
            assert await put(new, b"1" * 700) + await put(new, b"2" * 700) == [0, 1]
            disk.gate.set()
            await store.committer.drain()
            assert payloads(new) == [b"1" * 700, b"2" * 700]
        async with house.stream() as stream:
            assert payloads(stream) == [b"1" * 700, b"2" * 700]
            assert stream.log.damage == []

    run(work())


@pytest.mark.parametrize("call", ["truncate", "unlink"])
def test_what_a_failed_group_left_under_the_next_segments_name_is_not_removed_later(
    house: House, call: str
) -> None:
    async def work() -> None:
        house.files = files = Faulty()
        async with house.stream(flush=True, segment_size=1024) as stream:
            await put(stream, b"a" * 900)
            failed: list[str] = []

            def fails(now: str) -> int:
                if (now == "sync" and not failed) or (now == call and failed == ["sync"]):
                    failed.append(now)
                    return errno.EIO
                return 0

            files.fails = fails
            assert await put(stream, b"b" * 900) == [1]
            assert failed == ["sync", call]
            assert await put(stream, b"c") == [2]
            assert payloads(stream) == [b"a" * 900, b"b" * 900, b"c"]
        async with house.stream() as stream:
            assert payloads(stream) == [b"a" * 900, b"b" * 900, b"c"]

    run(work())


def test_preallocated_space_that_could_not_be_truncated_is_truncated_by_the_next_start(house: House) -> None:
    async def work() -> None:
        house.files = files = Faulty()
        async with house.stream(flush=True) as stream:
            await put(stream, b"a")
            files.fails = lambda call: errno.EIO if call == "truncate" else 0
            stream.log.replace_active()
            await put(stream, b"b")
            files.fails = lambda call: 0
            reported = stream.total_bytes
        async with house.stream() as stream:
            assert stream.total_bytes == reported
            assert sum(path.stat().st_size for path in house.directory().glob("*.seg")) == reported
            assert verify(house.data_dir)[0].problems == []

    run(work())


def test_the_writer_readers_and_verify_report_the_same_size_with_preallocated_space(house: House) -> None:
    async def work() -> None:
        async with house.stream(flush=True) as stream:
            await put(stream, b"a")
            await put(stream, b"b" * 3000)
            with closing(StreamReader(house.directory())) as reader:
                assert reader.total_bytes() == stream.total_bytes < 4000
            assert verify(house.data_dir)[0].total_bytes == stream.total_bytes

    run(work())


def test_syncs_of_a_slow_stream_leave_the_size_of_its_file_as_it_is_and_those_of_a_fast_one_do_not(
    house: House,
) -> None:
    """A sync of a file that has grown costs flash memory seven pages of the file system's journal."""

    async def work() -> None:
        async with house.store() as store:
            stream = store.create("s", StorageSettings(), b"{}")
            (path,) = stream.directory.glob("*.seg")
            sizes = []
            for number in range(60):
                await put(stream, b"%3d" % number * 100)
                await store.committer.sync([stream])
                sizes.append(path.stat().st_size)
            assert len(set(sizes[2:])) <= 2
            assert sizes[-1] > stream.total_bytes
            assert verify(house.data_dir)[0].problems == []
            for _ in range(20):
                await put(stream, *[b"x" * 1000] * 20)
                await store.committer.sync([stream])
            assert path.stat().st_size - stream.total_bytes < 1000
            assert len(payloads(stream)) == 460
        assert path.stat().st_size == stream.total_bytes, "a clean stop leaves no preallocated space"

    run(work())


def test_with_too_few_threads_streams_are_committed_by_the_existing_ones(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with house.store() as store:
            streams = [store.create(f"s{n}", StorageSettings(flush=True), b"{}") for n in range(4)]

            def no_more(thread: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            monkeypatch.setattr(threading.Thread, "start", no_more)
            assert await asyncio.gather(*(put(stream, b"a") for stream in streams)) == [[0]] * 4
            await store.committer.sync(streams)

    run(work())


def test_deleting_a_stream_that_caused_back_pressure_releases_it(house: House) -> None:
    async def work() -> None:
        house.files = disk = HeldSync()
        async with house.store() as store:
            stream = store.create("s", StorageSettings(), b"{}")
            reported: list[bool] = []
            store.committer.on_pressure.append(reported.append)
            await put(stream, b"a")
            disk.hold = True
            syncing = asyncio.create_task(store.committer.sync([stream]))
            await until(disk.reached.is_set)
            stream.configure(StorageSettings(flush=True), b"{}")
            for _ in range(12):
                stream.append(b"t", bytes(1_000_000))
            await until(lambda: reported == [True])
            store.delete("s")
            assert reported == [True, False]
            disk.gate.set()
            await syncing

    run(work())


class Forgetful(Files):
    """A disk that reports a failed sync once, and has then lost what was written before it."""

    def __init__(self) -> None:
        self.fail_next = self.full = False
        self._dirty: dict[int, list[tuple[int, bytes]]] = {}
        self._durable: dict[int, bytearray] = {}

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT and self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fd = super().open(path, flags)
        if flags & os.O_TRUNC:
            self._dirty.pop(os.fstat(fd).st_ino, None)
            self._durable.pop(os.fstat(fd).st_ino, None)
        return fd

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        super().write(fd, parts, offset)
        self._dirty.setdefault(os.fstat(fd).st_ino, []).append((offset, b"".join(parts)))

    def sync(self, fd: int) -> None:
        writes = self._dirty.pop(os.fstat(fd).st_ino, [])
        if self.fail_next:
            self.fail_next = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        content = self._durable.setdefault(os.fstat(fd).st_ino, bytearray())
        for offset, data in writes:
            content.extend(bytes(max(0, offset + len(data) - len(content))))
            content[offset : offset + len(data)] = data

    def power_cut(self, house: House) -> House:
        """The data directory as it would be found again."""
        found = House(house.data_dir.parent)
        found.data_dir = house.data_dir.with_name("found")
        shutil.copytree(house.data_dir, found.data_dir, symlinks=True)
        for path in (*house.directory().glob("*.seg"), house.directory() / "drops.log"):
            durable = self._durable.get(path.stat().st_ino, b"")
            (found.directory() / path.name).write_bytes(durable)
        return found


def test_what_an_earlier_group_left_to_the_background_is_saved_when_a_later_groups_sync_fails(
    house: House,
) -> None:
    async def work() -> None:
        house.files = disk = Forgetful()
        async with house.store() as store:
            stream = store.create("s", StorageSettings(), b"{}")
            await put(stream, b"a" * 3000, b"b" * 3000)
            stream.configure(StorageSettings(flush=True), b"{}")
            disk.fail_next = True
            assert await put(stream, b"c") == [2]
            await store.committer.sync([stream])
            assert stream.log.unsynced() == []
            found = disk.power_cut(house)
        async with found.stream() as stream:
            assert payloads(stream) == [b"a" * 3000, b"b" * 3000, b"c"]

    run(work())


def test_what_could_not_be_written_elsewhere_after_a_failed_sync_is_written_at_the_next_one(
    house: House,
) -> None:
    async def work() -> None:
        house.files = disk = Forgetful()
        async with house.store() as store:
            stream = store.create("s", StorageSettings(), b"{}")
            await put(stream, b"a" * 3000, b"b" * 3000)
            disk.fail_next = disk.full = True
            await store.committer.sync([stream])
            assert "so did writing elsewhere" in house.events[-1]
            disk.full = False
            await put(stream, b"c")
            await store.committer.sync([stream])
            assert stream.log.unsynced() == []
            found = disk.power_cut(house)
        async with found.stream() as stream:
            assert payloads(stream) == [b"a" * 3000, b"b" * 3000, b"c"]

    run(work())


class Failing(Files):
    """A disk on which some syncs of segments fail."""

    left = 0

    def sync(self, fd: int) -> None:
        if self.left and Path(f"/proc/self/fd/{fd}").readlink().suffix in (".seg", ".tmp"):
            self.left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(fd)


@pytest.mark.parametrize(("failures", "unsynced"), [(4, []), (100, ["s"])])
def test_a_stop_syncs_again_what_it_could_not_sync_and_names_the_rest(
    house: House, failures: int, unsynced: list[str]
) -> None:
    async def work() -> None:
        house.files = disk = Failing()
        async with house.stream() as stream:
            await put(stream, b"a")
            disk.left = failures
        assert house.unsynced == unsynced

    run(work())


def test_a_command_on_a_stopped_directory_names_what_it_could_not_sync(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, b"a")

        def fail(fd: int) -> None:
            if Path(f"/proc/self/fd/{fd}").readlink().suffix in (".seg", ".tmp"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        events: list[str] = []
        async with open_stopped(house.data_dir, on_event=lambda name, what: events.append(what)) as store:
            await put(store.streams["s"], b"b")
            monkeypatch.setattr(os, "fdatasync", fail)
        assert "it could not be synced" in events[-1]

    run(work())


class HeldHeader(Files):
    """A disk that holds the header of a segment back, if a thread writes it, and then has no room."""

    def __init__(self) -> None:
        self.hold = False
        self.reached, self.gate = threading.Event(), threading.Event()

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        if self.hold and offset == 0 and threading.current_thread() is not threading.main_thread():
            self.hold = False
            self.reached.set()
            self.gate.wait(30)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, parts, offset)


def test_a_deleted_streams_thread_that_fails_removes_no_file_of_the_stream_that_has_its_name_now(
    house: House,
) -> None:
    async def work() -> None:
        house.files = disk = HeldHeader()
        settings = StorageSettings(flush=True, segment_size=1024)
        async with house.store() as store:
            old = store.create("s", settings, b"{}")
            disk.hold = True
            old.append(b"t", b"x" * 700)
            old.append(b"t", b"y" * 700)
            await until(disk.reached.is_set)
            store.delete("s")
            new = store.create("s", settings, b"{}")
            assert await put(new, b"1" * 700) + await put(new, b"2" * 700) == [0, 1]
            disk.gate.set()
            await store.committer.drain()
        async with house.stream() as stream:
            assert payloads(stream) == [b"1" * 700, b"2" * 700]

    run(work())


def test_settings_that_cannot_be_applied_are_not_saved(house: House) -> None:
    async def work() -> None:
        house.files = files = Unreadable()
        async with house.store() as store:
            stream = store.create("s", StorageSettings(), b"{}")
            await put(stream, b"a", b"b")
            files.failing = True
            with pytest.raises(OSError, match="Input/output error"):
                stream.configure(StorageSettings(dedup_window=60_000), b"{new}")
            files.failing = False
            assert stream.settings == StorageSettings()
            stream.configure(StorageSettings(dedup_window=60_000), b"{new}")
            assert await put(stream, b"c", ids=True) == await put(stream, b"c", ids=True) == [2]

    run(work())


class Noting(Files):
    """A disk that notes which segments were synced, and which got their index before that."""

    def __init__(self) -> None:
        self.synced: set[str] = set()
        self.early: list[str] = []

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.synced.add(Path(f"/proc/self/fd/{fd}").readlink().stem)

    def replace(self, path: Path, data: bytes, *, sync: bool = True) -> None:
        super().replace(path, data, sync=sync)
        if path.suffix == ".idx" and path.stem not in self.synced:
            self.early.append(path.stem)


def test_segments_that_a_kill_left_before_their_sync_are_synced_after_the_start(house: House) -> None:
    async def work() -> None:
        async with house.stream(segment_size=4096) as stream:
            for n in range(12):
                await put(stream, bytes([n]) * 1000)
            closed = [item.path.stem for item in stream.log.closing]
            assert len(closed) > 1
            found = House(house.data_dir.parent)  # as a kill leaves it now
            found.data_dir = Path(shutil.copytree(house.data_dir, house.data_dir.with_name("found")))
        found.files = disk = Noting()
        async with found.stream() as stream:
            assert len(payloads(stream)) == 12
        assert disk.synced >= set(closed)
        assert disk.early == []
        assert all((found.directory() / f"{name}.idx").exists() for name in closed)

    run(work())


class Watched(Files):
    """A disk that has a look taken at a file once it is made, and at what a write left that failed."""

    def __init__(self) -> None:
        self.fail = False
        self.look: Callable[[], object] = lambda: None
        self.seen: list[object] = []

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        if flags & os.O_CREAT and path.suffix == ".seg":
            self.seen.append(self.look())
        return fd

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        super().write(fd, parts, offset)
        if self.fail:
            self.fail = False
            self.seen.append(self.look())
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_reader_that_saw_a_group_whose_write_failed_forgets_it(house: House) -> None:
    async def work() -> None:
        house.files = disk = Watched()
        async with house.stream() as stream:
            await put(stream, *[b"a" * 100] * 700)
            with closing(StreamReader(house.directory())) as reader:
                disk.look, disk.fail = reader.bounds, True
                with pytest.raises(StreamError):
                    await put(stream, b"x" * 400)
                assert disk.seen[-1] == (0, 701)
                assert reader.bounds() == (0, 700)
                assert reader.total_bytes() == stream.total_bytes
                # the next group ends at the very byte where the failed one did, and has more messages
                await put(stream, *[b"y" * 60] * 4, b"y" * 124)
                await put(stream, b"z", b"z")
                rows = reader.read(701, end=stream.next_sequence, max_messages=100, max_bytes=1 << 20)
                assert [row.sequence_number for row in rows] == [701, 702, 703, 704, 705, 706]

    run(work())


def test_a_reader_that_saw_a_segment_before_its_header_was_written_reads_on_in_it(house: House) -> None:
    async def work() -> None:
        house.files = disk = Watched()
        async with house.stream(segment_size=1024) as stream:
            await put(stream, b"a" * 500)
            with closing(StreamReader(house.directory())) as reader:
                disk.look = reader.bounds
                await put(stream, b"b" * 500)
                assert disk.seen[-1] == (0, 1)
                assert reader.bounds() == (0, 2)

    run(work())
