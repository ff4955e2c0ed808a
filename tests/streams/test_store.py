"""Storing, reading back, numbering, and what survives a restart."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bridge.errors import DataDirectoryBusy, MessageTooLarge, StorageFailed, StreamFull
from bridge.operations.manager import committed
from bridge.streams import meta
from bridge.streams.layout import Files
from bridge.streams.meta import StorageSettings
from bridge.streams.reader import StreamReader, list_streams
from bridge.streams.store import StreamStore, open_stopped

from ..fakes.clock import Machine
from .conftest import House, everything, payloads, put, run
from .test_commit import until


def test_messages_come_back_with_topic_payload_headers_time_and_number(house: House) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            assert stream.append(b"a/b", b"one") == 0
            assert stream.append(b"", b"", b"headers", b"id") == 1
            assert stream.append("ü".encode(), bytes(range(256)), b"h") == 2
            await committed(stream)
        async with house.stream() as stream:
            rows = everything(stream)
            assert [(m.sequence_number, m.topic, m.payload, m.headers) for m in rows] == [
                (0, b"a/b", b"one", b""),
                (1, b"", b"", b"headers"),
                (2, "ü".encode(), bytes(range(256)), b"h"),
            ]
            assert all(m.ingest_time >= stream.epoch > 1_700_000_000_000 for m in rows)

    run(work())


def test_numbers_go_on_after_a_restart_and_after_everything_was_dropped(house: House) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            assert await put(stream, b"a", b"b") == [0, 1]
        async with house.stream() as stream:
            assert await put(stream, b"c") == [2]
            from bridge.streams.drops import DropReason

            assert stream.drop_upto(3, DropReason.PURGED) == 3
            assert payloads(stream) == []
            assert (stream.oldest, stream.next_sequence) == (3, 3)
        async with house.stream() as stream:
            assert (stream.oldest, stream.next_sequence) == (3, 3)
            assert await put(stream, b"d") == [3]
            assert payloads(stream) == [b"d"]

    run(work())


def test_numbering_continues_after_the_highest_number_ever_exported(house: House) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, b"a", b"b")
        house.floors["s"] = 10
        async with house.stream() as stream:
            assert await put(stream, b"c") == [10]
            assert [m.sequence_number for m in everything(stream)] == [0, 1, 10]
        house.floors.clear()
        async with house.stream() as stream:
            assert await put(stream, b"d") == [11]
            assert payloads(stream) == [b"a", b"b", b"c", b"d"]

    run(work())


@pytest.mark.parametrize("name", ["..", ".", "a b, c.log", ".hidden", "données" * 30, "x" * 255, "stream=1"])
def test_any_legal_name_is_a_name_and_never_a_path(house: House, name: str) -> None:
    async def work() -> None:
        async with house.stream(name) as stream:
            await put(stream, b"x")
        async with house.stream(name) as stream:
            assert payloads(stream) == [b"x"]
        (found,) = list_streams(house.data_dir)
        assert found.name == name
        assert found.directory.parent == house.data_dir / "streams"

    run(work())


def test_segments_are_rolled_and_reading_crosses_them_from_any_start(house: House) -> None:
    async def work() -> None:
        async with house.stream(segment_size=1024) as stream:
            for start in range(0, 300, 7):
                await put(stream, *(b"%d" % n for n in range(start, min(start + 7, 300))))
            assert len(stream.log.sizes) > 5
            assert payloads(stream) == [b"%d" % n for n in range(300)]
            reader = stream.reader()
            for start in range(300):
                rows = reader.read(start, end=300, max_messages=3, max_bytes=1000)
                assert [m.payload for m in rows] == [b"%d" % n for n in range(start, min(start + 3, 300))]
            reader.close()

    run(work())


def test_a_group_larger_than_a_segment_is_split_and_a_message_larger_than_one_gets_its_own(
    house: House,
) -> None:
    async def work() -> None:
        async with house.stream(segment_size=1024) as stream:
            content = [b"%03d" % n * 50 for n in range(40)] + [b"x" * 5000] + [b"y"]
            await put(stream, *content)
            assert payloads(stream) == content
        async with house.stream() as stream:
            assert payloads(stream) == content
            assert all(size <= 1024 or size > 5000 for size in stream.log.sizes.values())

    run(work())


def test_a_reader_that_goes_on_reads_a_large_group_from_the_disk_once(house: House) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            for _ in range(4):
                await put(stream, *[bytes(1000)] * 200)
            files = Sized()
            with contextlib.closing(StreamReader(stream.directory, files, keys=house.keys())) as reader:
                for start in (0, 200, 400, 0, 200):
                    files.read_bytes = 0
                    assert len(reader.read(start, end=800, max_messages=200, max_bytes=1 << 20)) == 200
            assert files.read_bytes < 1.1 * 200 * 1000

    run(work())


class Sized(Files):
    """Files that count the bytes of each read."""

    read_bytes = 0

    def read(self, fd: int, size: int, offset: int) -> bytes:
        found = super().read(fd, size, offset)
        self.read_bytes += len(found)
        return found


def test_a_read_stops_at_its_bytes_but_returns_at_least_one_message(house: House) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, b"x" * 1000, b"y" * 10, b"z" * 10)
            reader = stream.reader()
            assert [m.payload[:1] for m in reader.read(0, end=3, max_messages=9, max_bytes=5)] == [b"x"]
            assert [m.payload[:1] for m in reader.read(1, end=3, max_messages=9, max_bytes=22)] == [
                b"y",
                b"z",
            ]
            assert [m.payload[:1] for m in reader.read(0, end=2, max_messages=9, max_bytes=5000)] == [
                b"x",
                b"y",
            ]
            assert reader.read(3, end=3, max_messages=9, max_bytes=5000) == []
            reader.close()

    run(work())


def test_a_full_stream_that_rejects_names_the_limit_and_keeps_what_it_has(house: House) -> None:
    async def work() -> None:
        async with house.stream(max_size=4096, segment_size=1024) as stream:
            stored = 0
            with pytest.raises(StreamFull, match=r"'s' is full: \d+ of max_size 4096"):
                for _ in range(100):
                    await put(stream, b"x" * 200)
                    stored += 1
            assert 10 < stored < 20
            assert stream.total_bytes <= 4096
            assert len(everything(stream)) == stored
            with pytest.raises(MessageTooLarge, match="max_size 4096"):
                stream.append(b"t", b"x" * 5000)

    run(work())


def test_an_overwriting_stream_drops_its_oldest_segments_and_stays_within_its_size(house: House) -> None:
    async def work() -> None:
        async with house.stream(max_size=8192, segment_size=1024, overwrite=True) as stream:
            for n in range(500):
                await put(stream, b"%03d" % n * 20)
                assert stream.total_bytes <= 8192
            rows = everything(stream)
            assert rows[-1].sequence_number == 499
            assert [m.sequence_number for m in rows] == list(range(stream.oldest, 500))
            assert stream.counters["overwritten"] == stream.oldest > 300
            assert [m.payload for m in rows] == [b"%03d" % m.sequence_number * 20 for m in rows]

    run(work())


def test_an_overwriting_stream_whose_segment_is_as_large_as_itself_still_takes_messages(house: House) -> None:
    async def work() -> None:
        async with house.stream(max_size=2048, segment_size=2048, overwrite=True) as stream:
            for n in range(100):
                await put(stream, b"%03d" % n * 20)
            assert everything(stream)[-1].sequence_number == 99
            assert stream.total_bytes <= 2048

    run(work())


def test_memory_streams_are_emptied_at_start_and_their_numbers_go_on(house: House) -> None:
    async def work() -> None:
        async with house.stream(memory=True) as stream:
            assert await put(stream, b"a", b"b") == [0, 1]
            assert payloads(stream) == [b"a", b"b"]
            assert house.memory_dir in stream.directory.parents
        async with house.stream() as stream:
            assert stream.settings.memory
            assert payloads(stream) == []
            assert await put(stream, b"c") == [2]

    run(work())


class NoDefinitions(Files):
    """A disk that has room for no definition."""

    full = False

    def replace(self, path: Path, content: bytes, *, sync: bool = True) -> None:
        if self.full and path.name.startswith("meta"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().replace(path, content, sync=sync)


@pytest.mark.slow(seconds=20)
def test_a_memory_stream_gives_no_number_that_it_cannot_reserve(house: House) -> None:
    house.files = disk = NoDefinitions()

    async def work() -> None:
        async with house.store() as store:
            stream = store.create("s", StorageSettings(memory=True, max_size=1 << 22, overwrite=True), b"{}")
            disk.full = True
            keeping = asyncio.create_task(store.keep(0.01))
            with pytest.raises(StorageFailed, match="cannot reserve"):
                while stream.next_sequence < 20_000_000:
                    await put(stream, *[b""] * 100_000)
            await committed(stream)
            given = stream.next_sequence
            killed = House(house.data_dir.with_name("killed"))
            shutil.copytree(house.data_dir, killed.data_dir, symlinks=True)
            async with killed.stream() as after:
                assert after.next_sequence >= given
            disk.full = False
            reserved = stream.meta.reserved
            await until(lambda: stream.meta.reserved > reserved)
            assert await put(stream, b"again") == [given]
            keeping.cancel()

    run(work())


def test_a_deleted_stream_is_gone_and_a_new_one_of_its_name_is_another_one(house: House) -> None:
    async def work() -> None:
        async with house.store() as store:
            stream = store.create("s", StorageSettings(), b"{}")
            await put(stream, b"a")
            before = stream.epoch
            store.delete("s")
            assert list_streams(house.data_dir) == []
            again = store.create("s", StorageSettings(), b"{}")
            assert await put(again, b"b") == [0]
            assert again.epoch > before

    run(work())


def test_no_epoch_is_given_twice_however_fast_streams_are_deleted_and_made_or_the_clock_is_set_back(
    house: House,
) -> None:
    house.system = machine = Machine(1000)

    async def work() -> None:
        epochs: list[int] = []
        async with house.store() as store:
            for _ in range(3):
                epochs.append(store.create("s", StorageSettings(), b"{}").epoch)
                store.delete("s")
            epochs.append(store.create("s", StorageSettings(), b"{}").epoch)
        async with house.store() as store:
            machine.step(-0.001)
            store.delete("s")
            epochs.append(store.create("s", StorageSettings(), b"{}").epoch)
            machine.step(0.010)
            epochs.append(store.create("other", StorageSettings(), b"{}").epoch)
        assert epochs == [1_000_000, 1_000_001, 1_000_002, 1_000_003, 1_000_004, 1_000_009]

    run(work())


def test_only_one_process_writes_a_data_directory(house: House) -> None:
    async def work() -> None:
        async with house.store():
            with pytest.raises(DataDirectoryBusy, match="another process writes"):
                async with house.store():
                    pass

    run(work())


def test_a_command_on_a_copy_leaves_the_memory_streams_of_the_running_service(house: House) -> None:
    async def work() -> None:
        async with house.stream(memory=True) as stream:
            await put(stream, b"a")
            copy = house.data_dir.with_name("copy")
            shutil.copytree(house.data_dir, copy, symlinks=True)
            async with open_stopped(copy, on_event=lambda *_: None) as store:
                await put(store.streams["s"], b"b")
            assert payloads(stream) == [b"a"]
            assert await put(stream, b"c") == [1]
            assert payloads(stream) == [b"a", b"c"]

    run(work())


def test_only_one_service_has_its_memory_streams_in_a_directory(house: House, tmp_path: Path) -> None:
    async def work() -> None:
        async with house.stream(memory=True) as stream:
            await put(stream, b"a")
            with pytest.raises(DataDirectoryBusy, match="memory_dir"):
                StreamStore(tmp_path / "other", house.memory_dir, on_event=lambda *_: None)
            assert payloads(stream) == [b"a"]

    run(work())


def test_definitions_survive_and_either_copy_alone_is_enough(house: House) -> None:
    async def work() -> None:
        async with house.stream(max_size=12345, segment_size=1024) as stream:
            stream.configure(StorageSettings(max_size=54321, segment_size=2048), b'{"definition": 1}')
        for name in meta.NAMES:
            path = house.directory() / name
            path.write_bytes(path.read_bytes()[:-1] + b"?")
            async with house.stream() as stream:
                assert stream.settings == StorageSettings(max_size=54321, segment_size=2048)
                assert stream.meta.definition == b'{"definition": 1}'
            assert "damaged; rewritten from the other copy" in house.events.pop()

    run(work())


class Stubborn(Files):
    """Fails calls on files as many times as a test sets: "call file"."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self._last = ""

    def open(self, path: Path, flags: int) -> int:
        self._last = path.name.removesuffix(".tmp")
        self._check("open")
        return super().open(path, flags)

    def sync_directory(self, directory: Path) -> None:
        self._check("sync_directory")
        super().sync_directory(directory)

    def _check(self, call: str) -> None:
        if self.refused[f"{call} {self._last}"]:
            self.refused[f"{call} {self._last}"] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["open", "sync_directory"])
@pytest.mark.parametrize("name", meta.NAMES)
def test_an_update_that_fails_half_way_does_not_take_effect_at_the_next_start(
    house: House, name: str, call: str
) -> None:
    async def work() -> None:
        house.files = files = Stubborn()
        async with house.stream(max_size=12345) as stream:
            for number in (b"1", b"2"):
                files.refused[f"{call} {name}"] = 1
                with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device$"):
                    stream.configure(StorageSettings(max_size=54321), number)
                assert stream.settings.max_size == 12345
        house.files = Files()
        assert list_streams(house.data_dir)[0].definition == b"{}"
        async with house.stream() as stream:
            assert (stream.settings.max_size, stream.meta.definition) == (12345, b"{}")
            stream.configure(StorageSettings(max_size=54321), b"3")
        async with house.stream() as stream:
            assert (stream.settings.max_size, stream.meta.definition) == (54321, b"3")

    run(work())


def test_an_update_that_fails_and_cannot_be_reverted_says_so(house: House) -> None:
    async def work() -> None:
        house.files = files = Stubborn()
        async with house.stream(max_size=12345) as stream:
            files.refused["sync_directory meta.1"] = 2
            with pytest.raises(OSError, match="may take effect at the next start"):
                stream.configure(StorageSettings(max_size=54321), b"new")
            assert stream.settings.max_size == 12345

    run(work())


def test_files_are_for_the_service_user_alone(house: House) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, b"a")
        for path in house.data_dir.rglob("*"):
            if not path.is_symlink():
                assert path.stat().st_mode & 0o077 == 0, path

    run(work())


def test_another_process_reads_while_this_one_writes(house: House) -> None:
    async def work() -> None:
        async with house.stream(segment_size=4096) as stream:
            await put(stream, *(b"%d" % n for n in range(1000)))
            code = (
                "import sys, pathlib; from bridge.streams.reader import StreamReader\n"
                "r = StreamReader(pathlib.Path(sys.argv[1])); first, end = r.bounds()\n"
                "rows = r.read(first, end=end, max_messages=9999, max_bytes=1 << 30)\n"
                "print(first, end, len(rows), sum(int(m.payload) for m in rows))"
            )
            out = subprocess.run(
                [sys.executable, "-c", code, str(stream.directory)],
                capture_output=True,
                text=True,
                check=True,
            )
            assert out.stdout.split() == ["0", "1000", "1000", str(sum(range(1000)))]

    run(work())


def test_a_reader_under_which_segments_are_deleted_goes_on_at_the_new_oldest(house: House) -> None:
    async def work() -> None:
        async with house.stream(max_size=8192, segment_size=1024, overwrite=True) as stream:
            await put(stream, *(b"%03d" % n for n in range(50)))
            reader = StreamReader(stream.directory)
            assert [m.payload for m in reader.read(0, end=50, max_messages=5, max_bytes=999)] == [
                b"%03d" % n for n in range(5)
            ]
            for n in range(50, 1000):
                await put(stream, b"%03d" % n)
            rows = reader.read(5, end=1000, max_messages=5, max_bytes=999)
            assert rows[0].sequence_number == stream.oldest
            assert rows[0].payload == b"%03d" % stream.oldest
            assert reader.bounds() == (stream.oldest, 1000)
            reader.close()

    run(work())


@pytest.mark.parametrize("flush", [True, False])
def test_many_concurrent_appends_are_committed_and_notified_in_order(house: House, flush: bool) -> None:
    async def work() -> None:
        async with house.store() as store:
            streams = [
                store.create(f"s{n}", StorageSettings(flush=flush, segment_size=4096), b"{}")
                for n in range(4)
            ]
            notified: dict[str, list[int]] = {stream.name: [] for stream in streams}

            async def device(number: int) -> None:
                stream = streams[number % 4]
                for _ in range(50):
                    at = stream.append(b"t", b"%d" % stream.next_sequence)
                    await committed(stream)
                    notified[stream.name].append(at)
                    assert stream.next_sequence > at

            await asyncio.wait_for(asyncio.gather(*(device(n) for n in range(40))), 60)
            for stream in streams:
                assert notified[stream.name] == list(range(500))
                assert [m.sequence_number for m in everything(stream)] == list(range(500))

    run(work())


def test_a_repeated_message_id_inside_the_window_is_stored_once_also_after_a_restart(house: House) -> None:
    async def work() -> None:
        async with house.stream(dedup_window=60_000) as stream:
            assert await put(stream, b"a", b"b", ids=True) == [0, 1]
            assert await put(stream, b"a", b"c", ids=True) == [0, 2]
        async with house.stream() as stream:
            assert await put(stream, b"b", b"d", ids=True) == [1, 3]
            assert payloads(stream) == [b"a", b"b", b"c", b"d"]
            assert stream.counters["deduplicated"] == 1

    run(work())


def test_a_message_id_that_came_again_after_its_window_is_known_as_long_as_the_second_message(
    house: House,
) -> None:
    clock = Machine()
    house.system = clock

    async def work() -> None:
        async with house.stream(dedup_window=60_000) as stream:
            assert await put(stream, b"a", ids=True) == [0]
            clock.sleep(61)
            assert await put(stream, b"b", ids=True) == [1]
            assert await put(stream, b"a", ids=True) == [2]
            stream.configure(StorageSettings(dedup_window=600_000), b"{}")
        async with house.stream() as stream:  # the longer window has both
            clock.sleep(560)
            assert await put(stream, b"c", ids=True) == [3]  # and the first is over
            assert await put(stream, b"a", ids=True) == [2]
            clock.sleep(60)
            assert await put(stream, b"d", ids=True) == [4]
            assert await put(stream, b"a", ids=True) == [5]

    run(work())


def test_what_a_message_id_is_found_for_at_a_start_is_on_the_disk(house: House) -> None:
    async def work() -> None:
        async with house.stream(flush=True, dedup_window=60_000) as stream:
            await put(stream, b"a", ids=True)
        async with house.stream() as stream:  # a repetition is acknowledged without another commit
            assert stream.unsynced() == []
            assert await put(stream, b"a", ids=True) == [0]

    run(work())


def test_a_repeated_message_id_is_known_also_behind_numbers_that_were_skipped(house: House) -> None:
    async def work() -> None:
        async with house.stream(dedup_window=60_000) as stream:
            assert await put(stream, b"a", b"b", ids=True) == [0, 1]
        house.floors["s"] = 10  # an export is further than the disk, after a power cut
        async with house.stream() as stream:
            assert stream.counters == {"skipped": 8}
            assert await put(stream, b"a", b"c", ids=True) == [0, 10]

    run(work())
