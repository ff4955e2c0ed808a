"""Errors and deletions while a worker thread writes or syncs: nobody else's file, no waiter left waiting."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from bridge.errors import StorageFailed, StreamError
from bridge.manager import committed
from bridge.streams.drops import Reason
from bridge.streams.layout import Files
from bridge.streams.meta import ExactLimits, Settings
from bridge.streams.reader import StreamReader
from bridge.streams.verify import verify

from .conftest import House, everything, payloads, put, run
from .test_commit import SlowDisk, slow, until
from .test_faults import Faulty


def test_a_stream_deleted_behind_slow_syncs_never_touches_the_file_of_the_next_one(house: House) -> None:
    async def work() -> None:
        disk: SlowDisk = slow(house)
        async with house.store() as store:
            busy = [store.create(f"busy{n}", Settings(flush=True), b"{}") for n in range(8)]
            gone = store.create("gone", Settings(flush=True, segment_size=1024), b"{}")
            disk.gate.clear()
            for stream in busy:
                stream.append(b"t", b"x")
            await until(lambda: disk.waiting == 8)  # every worker thread is taken
            told: list[StreamError | None] = []
            for _ in range(5):
                gone.append(b"t", b"GONE" * 100)  # spans segments
            gone.after_commit(told.append)
            await asyncio.sleep(0)
            store.delete("gone")
            assert isinstance(told[0], StorageFailed)
            new = store.create("new", Settings(), b"{}")
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
            stream = store.create("s", Settings(segment_size=1024), b"{}")
            for n in range(50):
                await put(stream, b"%d" % n * 30)
            disk.gate.clear()
            syncing = asyncio.create_task(store.committer.sync([stream]))
            await until(lambda: disk.waiting == 1)
            stream.drop_upto(40, Reason.PURGED)
            disk.gate.set()
            await syncing
            assert house.events == []
            assert len(everything(stream)) == 10

    run(work())


class FewDescriptors(Files):
    """Opening a segment for reading fails when the test says so, as with too many open files."""

    failing = False

    def open(self, path: Path, flags: int) -> int:
        if self.failing and path.suffix == ".seg" and not flags & (os.O_CREAT | os.O_RDWR):
            raise OSError(errno.EMFILE, "Too many open files")
        return super().open(path, flags)


@pytest.mark.parametrize("flush", [False, True])
def test_an_error_in_applying_limits_neither_holds_acknowledgements_nor_other_streams(
    house: House, flush: bool
) -> None:
    async def work() -> None:
        house.files = files = FewDescriptors()
        async with house.store() as store:
            limited = store.create("a", Settings(flush=flush, limits=ExactLimits(max_bytes=20)), b"{}")
            plain = store.create("b", Settings(flush=flush), b"{}")
            await put(limited, b"0123456789")
            files.failing = True
            numbers = [limited.append(b"t", b"0123456789"), plain.append(b"t", b"x")]
            await asyncio.wait_for(asyncio.gather(committed(limited), committed(plain)), 10)
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


def test_a_crash_at_any_instant_of_a_rescue_loses_nothing_and_reuses_no_number(tmp_path: Path) -> None:
    async def work() -> None:
        house = House(tmp_path / "house")
        house.data_dir.parent.mkdir()
        house.files = files = Snapshots(house.data_dir)
        async with house.store() as store:
            stream = store.create("s", Settings(segment_size=1024), b"{}")
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


def test_a_stop_during_a_rescue_waits_for_it_and_keeps_what_is_acknowledged(house: House) -> None:
    async def work() -> None:
        disk: SlowDisk = slow(house)
        async with house.store() as store:
            stream = store.create("s", Settings(), b"{}")
            await put(stream, b"a")
            keeping = asyncio.create_task(store.keep(0.001))
            real, failed = disk.sync, [0]

            def sync(fd: int) -> None:
                failed[0] += 1
                if failed[0] == 1:
                    disk.gate.clear()
                    raise OSError(errno.EIO, "Input/output error")
                real(fd)

            disk.sync = sync  # type: ignore[method-assign]
            await until(lambda: stream.busy and disk.waiting)
            keeping.cancel()
            stream.append(b"t", b"b")
            waiting = asyncio.create_task(committed(stream))
            idle = asyncio.create_task(stream.idle())
            await asyncio.sleep(0)
            disk.gate.set()
            await asyncio.wait_for(asyncio.gather(waiting, idle), 20)
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


class HeldSync(Files):
    """A disk that holds the next sync back and then, if told so, fails it; it notes the files made."""

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


def test_a_group_that_is_synced_waits_for_a_background_sync_so_that_neither_hides_the_others_error(
    house: House,
) -> None:
    async def work() -> None:
        house.files = disk = HeldSync()
        async with house.store() as store:
            stream = store.create("s", Settings(), b"{}")
            await put(stream, b"a", b"b")  # written, and not on the disk yet
            stream.configure(Settings(flush=True), b"{}")
            disk.hold = disk.fail = True
            syncing = asyncio.create_task(store.committer.sync([stream]))
            await until(disk.reached.is_set)
            appending = asyncio.create_task(put(stream, b"c"))
            await asyncio.sleep(0.01)
            assert not appending.done()
            disk.made.clear()
            disk.gate.set()
            await asyncio.wait_for(asyncio.gather(syncing, appending), 20)
            assert any(name.endswith(".seg.tmp") for name in disk.made), "what was lost is written again"
            assert payloads(stream) == [b"a", b"b", b"c"]

    run(work())


def test_a_stream_made_again_under_its_name_is_not_touched_by_the_threads_of_the_old_one(
    house: House,
) -> None:
    async def work() -> None:
        house.files = disk = HeldSync()
        settings = Settings(flush=True, segment_size=1024)
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


def test_room_that_could_not_be_cut_off_is_by_the_next_start(house: House) -> None:
    async def work() -> None:
        house.files = files = Faulty()
        async with house.stream(flush=True) as stream:
            await put(stream, b"a")
            files.fails = lambda call: errno.EIO if call == "truncate" else 0
            stream.log.replace_active()
            await put(stream, b"b")
            files.fails = lambda call: 0
            told = stream.total_bytes
        async with house.stream() as stream:
            assert stream.total_bytes == told
            assert sum(path.stat().st_size for path in house.directory().glob("*.seg")) == told
            assert verify(house.data_dir)[0].problems == []

    run(work())


def test_the_writer_readers_and_verify_tell_one_size_while_there_is_room(house: House) -> None:
    async def work() -> None:
        async with house.stream(flush=True) as stream:
            await put(stream, b"a")
            await put(stream, b"b" * 3000)
            with closing(StreamReader(house.directory())) as reader:
                assert reader.total_bytes() == stream.total_bytes < 4000
            assert verify(house.data_dir)[0].total_bytes == stream.total_bytes

    run(work())


def test_with_too_few_threads_streams_are_committed_by_those_there_are(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with house.store() as store:
            streams = [store.create(f"s{n}", Settings(flush=True), b"{}") for n in range(4)]

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
            stream = store.create("s", Settings(), b"{}")
            told: list[bool] = []
            store.committer.on_pressure.append(told.append)
            await put(stream, b"a")
            disk.hold = True
            syncing = asyncio.create_task(store.committer.sync([stream]))
            await until(disk.reached.is_set)
            stream.configure(Settings(flush=True), b"{}")
            for _ in range(12):
                stream.append(b"t", bytes(1_000_000))
            await until(lambda: told == [True])
            store.delete("s")
            assert told == [True, False]
            disk.gate.set()
            await syncing

    run(work())


class Forgetful(Files):
    """A disk that tells of a failed sync once, and has then lost what was written before it."""

    def __init__(self) -> None:
        self.fail_next = False
        self._dirty: dict[int, list[tuple[int, bytes]]] = {}
        self._durable: dict[int, bytearray] = {}

    def open(self, path: Path, flags: int) -> int:
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
        for path in house.directory().glob("*.seg"):
            durable = self._durable.get(path.stat().st_ino, b"")
            (found.directory() / path.name).write_bytes(durable)
        return found


def test_what_an_earlier_group_left_to_the_background_is_saved_when_a_later_groups_sync_fails(
    house: House,
) -> None:
    async def work() -> None:
        house.files = disk = Forgetful()
        async with house.store() as store:
            stream = store.create("s", Settings(), b"{}")
            await put(stream, b"a" * 3000, b"b" * 3000)
            stream.configure(Settings(flush=True), b"{}")
            disk.fail_next = True
            assert await put(stream, b"c") == [2]
            await store.committer.sync([stream])
            assert stream.log.unsynced() == []
            found = disk.power_cut(house)
        async with found.stream() as stream:
            assert payloads(stream) == [b"a" * 3000, b"b" * 3000, b"c"]

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
        settings = Settings(flush=True, segment_size=1024)
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
        house.files = files = FewDescriptors()
        async with house.store() as store:
            stream = store.create("s", Settings(), b"{}")
            await put(stream, b"a", b"b")
            files.failing = True
            with pytest.raises(OSError, match="Too many open files"):
                stream.configure(Settings(dedup_window=60_000), b"{new}")
            files.failing = False
            assert stream.settings == Settings()
            stream.configure(Settings(dedup_window=60_000), b"{new}")
            assert await put(stream, b"c", ids=True) == await put(stream, b"c", ids=True) == [2]

    run(work())
