"""The record of what was dropped: it outlives errors of the disk, power cuts and compaction."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from contextlib import closing
from pathlib import Path

import pytest

from bridge import books
from bridge.errors import StreamFull
from bridge.streams.drops import KEPT, Drop, DropReason, Drops
from bridge.streams.layout import Files
from bridge.streams.meta import MessageLimits, StorageSettings
from bridge.streams.reader import StreamReader

from .conftest import House, everything, payloads, put, run
from .test_commit import until


def path_of(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}").readlink()


class Selective(Files):
    """Refuses to open, sync or replace files whose names end so."""

    def __init__(self) -> None:
        self.refused: tuple[str, ...] = ()
        self.number = errno.ENOSPC

    def check(self, name: str) -> None:
        if self.refused and name.endswith(self.refused):
            raise OSError(self.number, os.strerror(self.number))

    def open(self, path: Path, flags: int) -> int:
        self.check(path.name)
        return super().open(path, flags)

    def sync(self, fd: int) -> None:
        self.check(path_of(fd).name)
        super().sync(fd)

    def replace(self, path: Path, content: bytes, *, sync: bool = True) -> None:
        self.check(path.name)
        super().replace(path, content, sync=sync)


def test_old_drops_that_are_joined_have_the_numbers_between_them() -> None:
    drops = Drops()
    for number in range(0, 2 * KEPT + 20, 2):
        drops.add(Drop(number, number, 0, int(DropReason.EXPIRED)))
    books.check()
    drops.compact(2 * KEPT + 20)
    assert len(drops.ranges) == KEPT
    assert drops.count(0, 20) == drops.ranges[0].last + 1 == 21
    books.check()


class Volatile(Files):
    """A disk that keeps of `drops.log` only what was synced; names and all else are kept at once."""

    def __init__(self) -> None:
        self.durable: dict[int, bytes] = {}
        self._instant = threading.Lock()  # a power cut is between two calls of any thread

    def sync(self, fd: int) -> None:
        with self._instant:
            super().sync(fd)
            path = path_of(fd)
            if path.name.startswith("drops.log"):
                self.durable[os.fstat(fd).st_ino] = path.read_bytes()

    def unlink(self, path: Path) -> None:
        with self._instant:
            super().unlink(path)

    def power_cut(self, house: House) -> House:
        """The data directory as it would be found again."""
        found = House(house.data_dir.parent)
        found.data_dir = house.data_dir.with_name("found")
        with self._instant:
            shutil.copytree(house.data_dir, found.data_dir, symlinks=True)
            log = house.directory() / "drops.log"
            if log.exists():
                (found.directory() / "drops.log").write_bytes(self.durable.get(log.stat().st_ino, b""))
        return found


def test_overwritten_messages_are_not_taken_for_lost_after_a_power_cut(house: House) -> None:
    async def work() -> None:
        house.files = disk = Volatile()
        async with house.stream(segment_size=1024, max_size=10_240, overwrite=True, flush=True) as stream:
            for n in range(60):
                await put(stream, b"%03d" % n * 200)
            found = disk.power_cut(house)
        async with found.stream() as stream:
            with closing(StreamReader(stream.directory)) as reader:
                assert reader.lost() == []
            assert payloads(stream)[-1] == b"059" * 200

    run(work())


def test_a_purge_whose_record_could_not_be_synced_is_synced_with_the_next_one(house: House) -> None:
    async def work() -> None:
        refusing = Selective()

        class Disk(Volatile):
            def sync(self, fd: int) -> None:
                refusing.check(path_of(fd).name)
                super().sync(fd)

        house.files = disk = Disk()
        async with house.stream(limits=MessageLimits(max_messages=8), flush=True) as stream:
            await put(stream, *(b"%d" % n for n in range(8)))
            refusing.refused = ("drops.log",)
            stream.drop([(3, 4)], DropReason.PURGED)
            refusing.refused = ()
            await put(stream, b"x", b"y", b"z", b"w")  # two more than the limit: its record is not synced
            found = disk.power_cut(house)
        async with found.stream() as stream:
            assert not {3, 4} & {message.sequence_number for message in everything(stream)}

    run(work())


def test_a_purge_whose_record_could_not_be_written_is_written_at_the_stop(house: House) -> None:
    async def work() -> None:
        house.files = files = Selective()
        async with house.stream() as stream:
            await put(stream, *(b"%d" % n for n in range(5)))
            files.refused = ("drops.log",)
            stream.drop([(2, 3)], DropReason.PURGED)
            files.refused = ()
        async with house.stream() as stream:
            assert payloads(stream) == [b"0", b"1", b"4"]

    run(work())


def test_compaction_of_a_long_record_never_joins_real_losses_with_intended_drops(house: House) -> None:
    async def work() -> None:
        async with house.stream(segment_size=4096) as stream:
            for start in range(0, 4000, 10):
                await put(stream, *(b"%05d" % n for n in range(start, start + 10)))
            stream.drop([(n, n) for n in range(0, 4000, 2) if n != 2000], DropReason.LIMITS)
            stream.drop([(1001, 1001)], DropReason.DAMAGED)
            stream.drop([(n, n) for n in range(1, 2000, 2)], DropReason.PURGED)
            for n in range(2001, 3900):  # many small records, until the file is compacted
                stream.drop([(n, n)], DropReason.PURGED)
            stream.drop([(2000, 2000)], DropReason.LIMITS)
            with closing(StreamReader(stream.directory)) as reader:
                assert reader.lost() == [(1001, 1001)]

    run(work())


def test_a_reader_that_slept_through_compactions_sees_no_dropped_message(house: House) -> None:
    async def work() -> None:
        async with house.stream(limits=MessageLimits(max_messages_per_topic=1)) as stream:
            for n in range(10):
                await put(stream, b"v", topic=b"t%d" % (n % 3))
            with closing(StreamReader(house.directory())) as reader:
                reader.oldest()
                log = house.directory() / "drops.log"
                before, compacted, size = log.stat().st_ino, 0, 0
                number = 0
                while compacted < 2:
                    number += 1
                    await put(stream, b"v", topic=b"t%d" % (number % 3))
                    if number % 50 == 0:
                        await put(stream, b"k", topic=b"keep-%d" % number)
                    compacted += log.stat().st_size < size
                    size = log.stat().st_size
                live = [message.sequence_number for message in everything(stream)]
                rows = reader.read(0, end=stream.next_sequence, max_messages=10**6, max_bytes=1 << 30)
                assert [row.sequence_number for row in rows] == live, before

    run(work())


def test_with_no_room_for_an_index_a_time_to_live_deletes_nothing_early(house: House) -> None:
    async def work() -> None:
        house.files = files = Selective()
        async with house.store() as store:
            stream = store.create("s", StorageSettings(segment_size=1024, ttl=3_600_000), b"{}")
            files.refused = (".idx",)
            for n in range(10):
                await put(stream, b"%03d" % n * 200)
            await store.committer.sync([stream])
            store.committer.maintain([stream])
            assert stream.live_messages() == 10
        async with house.stream() as stream:
            assert stream.live_messages() == 10

    run(work())


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file, in place."""
    with path.open("r+b") as file:
        middle = path.stat().st_size // 2
        file.seek(middle)
        (byte,) = file.read(1)
        file.seek(middle)
        file.write(bytes((byte ^ 1,)))


def test_damage_found_by_a_time_to_live_is_reported_and_recorded(house: House) -> None:
    async def work() -> None:
        async with house.store() as store:
            stream = store.create("s", StorageSettings(segment_size=1024, ttl=3_600_000), b"{}")
            for n in range(12):
                await put(stream, b"%02d" % n * 100)
            await store.committer.sync([stream])
            first = min(house.directory().glob("*.seg"))
            flip(first)
            first.with_suffix(".idx").unlink()
            store.committer.maintain([stream])
            assert "it is damaged" in house.events[0]
            assert "lost" in house.events[0]
            assert any(drop.reason == DropReason.DAMAGED for drop in stream.drops.ranges)

    run(work())


@pytest.mark.parametrize("limits", [MessageLimits(max_age=50), MessageLimits(max_bytes=1000)])
def test_a_damaged_frame_at_the_front_does_not_stop_the_limits(house: House, limits: MessageLimits) -> None:
    async def work() -> None:
        async with house.store() as store:
            stream = store.create("s", StorageSettings(segment_size=1024), b"{}")
            for n in range(20):
                await put(stream, b"%02d" % n * 100)
            await store.committer.sync([stream])
            flip(min(house.directory().glob("*.seg")))
            stream.configure(StorageSettings(segment_size=1024, limits=limits), b"{}")

            def within() -> bool:
                store.committer.maintain([stream])
                return stream.live_messages() == (0 if limits.max_age else 4)

            await until(within)

    run(work())


def test_messages_behind_damage_among_dropped_ones_can_be_read_after_a_start(house: House) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            for n in range(10):
                await put(stream, b"%02d" % n * 50)
            stream.drop_upto(8, DropReason.LIMITS)
            await stream.idle()
        (path,) = house.directory().glob("*.seg")
        data = path.read_bytes()
        lost = data.index(b"02" * 50) - 60  # in the middle of a frame that is not needed any more
        path.write_bytes(data[:lost] + bytes(120) + data[lost + 120 :])
        async with house.stream() as stream:
            assert payloads(stream) == [b"08" * 50, b"09" * 50]

    run(work())


def test_a_full_stream_whose_space_the_disk_refuses_to_free_is_reported_as_full(house: House) -> None:
    async def work() -> None:
        house.files = files = Selective()
        async with house.stream(max_size=4096, overwrite=False, free_exported=True) as stream:
            with pytest.raises(StreamFull):
                while True:
                    await put(stream, b"x" * 100)
            stream.exported_upto = stream.next_sequence
            # No new segment, behind which the old one could go; a disk that is only full makes it later.
            files.refused, files.number = (".seg",), errno.EIO
            with pytest.raises(StreamFull):
                stream.append(b"t", b"x" * 100)
            files.refused = ()
            assert await put(stream, b"y") == [stream.exported_upto]

    run(work())


def test_a_reader_that_sees_half_a_record_sees_all_of_it_when_it_is_there(house: House) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, *(b"%d" % n for n in range(9)))
            stream.drop([(1, 1)], DropReason.PURGED)
            log = house.directory() / "drops.log"
            with closing(StreamReader(house.directory())) as reader:
                assert reader.oldest() == 0
                before = log.read_bytes()
                stream.drop([(0, 0), (2, 3)], DropReason.PURGED)
                after = log.read_bytes()
                assert len(before) == len(after), "written over the preallocated zeros"
                log.write_bytes(after[:50] + before[50:])
                assert reader.oldest() == 0
                log.write_bytes(after)
                assert reader.oldest() == 4

    run(work())


def test_a_damaged_record_is_skipped_and_those_after_it_are_read(house: House) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, *(b"%d" % n for n in range(9)))
            for number in (2, 4, 6):
                stream.drop([(number, number)], DropReason.PURGED)
        log = house.directory() / "drops.log"
        data = bytearray(log.read_bytes())
        data[40] ^= 1
        log.write_bytes(data)
        async with house.stream() as stream:
            assert payloads(stream) == [b"%d" % n for n in (0, 1, 3, 4, 5, 7, 8)]
            stream.drop([(8, 8)], DropReason.PURGED)
        with closing(StreamReader(house.directory())) as reader:
            rows = reader.read(0, end=9, max_messages=99, max_bytes=1 << 20)
            assert [row.sequence_number for row in rows] == [0, 1, 3, 4, 5, 7]

    run(work())
