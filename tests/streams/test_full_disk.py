"""A disk that is really full: what is purged, expires or is overwritten frees space anyway."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bridge.errors import StorageFailed
from bridge.streams.drops import LOSSES, DropReason
from bridge.streams.meta import StorageSettings
from bridge.streams.reader import StreamReader
from bridge.streams.stream import Stream

from .conftest import House, everything, payloads, put, run
from .test_commit import until


def _fill(place: Path) -> None:
    """Take all that is left of a file system."""
    with (place / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))


async def _put_until_it_works(stream: Stream, payload: bytes) -> None:
    """What was dropped is removed in a thread: its space is free some time later."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(StorageFailed):
                await put(stream, payload)
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("reopened", [False, True])
def test_on_a_really_full_disk_a_purge_makes_room_at_once(
    mounted: Path, reopened: bool, scattered: bool
) -> None:
    house = House(mounted)

    async def fill() -> None:
        async with house.stream(segment_size=65536) as stream:
            with pytest.raises(StorageFailed, match="No space left on device"):
                while True:
                    await put(stream, *(b"%d" % n * 100 for n in range(10)))
            _fill(mounted)
            if not reopened:
                await purge(stream)

    async def purge(stream: Stream) -> None:
        assert stream.drops.ranges == [], "nothing was ever dropped"
        before, end = set(stream.directory.glob("*.seg")), stream.next_sequence
        if scattered:  # more records than were preallocated
            stream.drop([(n, n) for n in range(0, end, 2)], DropReason.PURGED)
            stream.drop([(5, 5)], DropReason.DAMAGED)
        stream.drop_upto(end, DropReason.PURGED)
        await _put_until_it_works(stream, b"again" * 1000)
        await until(lambda: not before & set(stream.directory.glob("*.seg")) - {stream.log.active.path})
        assert payloads(stream) == [b"again" * 1000]

    async def check() -> None:
        async with house.stream() as stream:
            assert payloads(stream) == [b"again" * 1000]
            lost = [(drop.first, drop.last) for drop in stream.drops.ranges if drop.reason in LOSSES]
            assert lost == ([(5, 5)] if scattered else [])
            assert stream.log.damage == []

    async def again() -> None:
        async with house.stream() as stream:
            await purge(stream)

    run(fill())
    if reopened:
        run(again())
    run(check())


@pytest.mark.parametrize("settings", [{"overwrite": True}, {"ttl": 1}])
def test_on_a_really_full_disk_overwriting_and_expiry_make_room(
    mounted: Path, settings: dict[str, Any]
) -> None:
    house = House(mounted)

    async def work() -> None:
        async with house.store() as store:
            stream = store.create("s", StorageSettings(max_size=600_000, segment_size=65536), b"{}")
            while stream.total_bytes < 550_000:
                await put(stream, b"x" * 1000)
            # Its definition takes effect when the disk is full, as the clock would have it.
            _fill(mounted)
            stream.meta = msgspec.structs.replace(
                stream.meta, settings=msgspec.structs.replace(stream.settings, max_size=500_000, **settings)
            )

            def removed() -> bool:
                store.committer.maintain([stream])
                return not (stream.directory / f"{0:020}.seg").exists()

            await until(removed)
            await _put_until_it_works(stream, b"again")
            assert payloads(stream)[-1:] == [b"again"]

    run(work())


def _ballast(place: Path) -> None:
    """Another program fills the file system, to the last block."""
    with (place / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize(
    "settings", [{"free_exported": True}, {"overwrite": True}], ids=["exported", "oldest"]
)
@pytest.mark.parametrize("segment_size", [16384, 1 << 20], ids=["segments", "active"])
def test_on_a_disk_that_others_have_filled_drops_free_space_and_nothing_is_refused(
    mounted: Path, segment_size: int, settings: dict[str, Any], flush: bool
) -> None:
    """Far below `max_size`; also when all of it is in the segment that is being written."""
    house = House(mounted)
    reason = DropReason.EXPORTED if "free_exported" in settings else DropReason.OVERWRITTEN

    async def work() -> None:
        async with house.stream(segment_size=segment_size, flush=flush, **settings) as stream:
            for n in range(100):
                await put(stream, b"%04d" % n * 250)
            _ballast(mounted)
            if settings.get("free_exported"):
                with pytest.raises(StorageFailed, match="No space left on device"):
                    for _ in range(100):
                        await put(stream, b"x" * 8000)
                stream.exported_upto = 100
            before = stream.next_sequence
            for n in range(50):
                assert await put(stream, b"%04d" % n * 250) == [before + n]
                if settings.get("free_exported"):
                    stream.exported_upto = stream.next_sequence  # exports keep up
            assert os.statvfs(mounted).f_bavail * 4096 < 200_000
            gone = stream.oldest
            assert gone > 0
            assert stream.counters[reason.name.lower()] == gone
            assert [m.sequence_number for m in everything(stream)] == list(range(gone, before + 50))
        async with house.stream() as stream:
            assert {drop.reason for drop in stream.drops.ranges} == {reason}
            assert stream.drops.live(0, before + 49) == [(gone, before + 49)]
            assert [m.sequence_number for m in everything(stream)] == list(range(gone, before + 50))
            assert stream.log.damage == []

    run(work())


def test_space_is_free_at_once_also_if_a_reader_has_the_oldest_segment_open(mounted: Path) -> None:
    """A lagging export has it open; unlinked alone, it would keep its space, and more would be dropped."""
    house = House(mounted)

    async def work() -> None:
        async with house.stream(segment_size=100_000, overwrite=True) as stream:
            for n in range(500):
                await put(stream, b"%04d" % n * 250)
            reader = StreamReader(stream.directory)
            assert reader.read(0, end=500, max_messages=1, max_bytes=1)[0].sequence_number == 0
            _ballast(mounted)
            for n in range(20):
                await put(stream, b"%04d" % n * 250)
            assert 0 < stream.oldest < 110, "one segment was enough"
            found, position = list[int](), 1
            while rows := reader.read(position, end=520, max_messages=100, max_bytes=1 << 20):
                found += [row.sequence_number for row in rows]
                position = found[-1] + 1
            assert found == list(range(stream.oldest, 520))
            assert reader.dropped(1, 520) == stream.oldest - 1
            assert reader.lost() == []
            reader.close()

    run(work())


def test_exported_messages_of_other_streams_are_dropped_too_and_nothing_else_of_theirs(mounted: Path) -> None:
    house = House(mounted)

    async def work() -> None:
        async with house.store() as store:
            rejects = store.create("rejects", StorageSettings(), b"{}")
            exported = store.create(
                "exported", StorageSettings(segment_size=16384, free_exported=True), b"{}"
            )
            oldest = store.create("oldest", StorageSettings(segment_size=16384, overwrite=True), b"{}")
            for stream in (exported, oldest):
                for _ in range(100):
                    await put(stream, bytes(1000))
            exported.exported_upto = 50
            _ballast(mounted)
            with pytest.raises(StorageFailed, match="No space left on device"):
                while True:
                    await put(rejects, bytes(1000))
            assert rejects.next_sequence > 20
            assert 32 < exported.oldest <= 50
            assert oldest.oldest == 0
            assert rejects.drops.ranges == []

    run(work())


def test_memory_streams_on_a_full_tmpfs_drop_their_oldest_messages(tmp_path: Path, mounted: Path) -> None:
    house = House(tmp_path)
    house.memory_dir = mounted / "memory"

    async def work() -> None:
        async with house.stream(memory=True, overwrite=True, segment_size=65536) as stream:
            for n in range(3000):
                assert await put(stream, b"%04d" % n * 250) == [n]
            assert stream.total_bytes < 1 << 20
            assert stream.oldest == stream.counters["overwritten"]
            assert [m.sequence_number for m in everything(stream)] == list(range(stream.oldest, 3000))

    run(work())


@pytest.mark.parametrize("flush", [False, True])
def test_a_definition_can_be_changed_on_a_full_disk_if_something_can_be_dropped(
    mounted: Path, flush: bool
) -> None:
    house = House(mounted)

    async def work() -> None:
        async with house.stream(segment_size=16384, free_exported=True, flush=flush) as stream:
            for _ in range(100):
                await put(stream, bytes(1000))
            _ballast(mounted)
            with pytest.raises(OSError, match="No space left on device"):
                stream.configure(msgspec.structs.replace(stream.settings, max_size=50_000), b"{}")
            assert stream.oldest == 0
            stream.exported_upto = 100
            stream.configure(msgspec.structs.replace(stream.settings, max_size=50_000), b"{}")
            assert stream.total_bytes <= 50_000
        async with house.stream() as stream:
            assert stream.settings.max_size == 50_000
            assert len(payloads(stream)) == 100 - stream.oldest

    run(work())


@pytest.mark.parametrize("flush", [False, True])
def test_a_stream_says_when_the_full_disk_has_room_again_and_that_nothing_was_stored_before(
    mounted: Path, flush: bool
) -> None:
    house = House(mounted)

    async def fill(stream: Stream) -> None:
        _ballast(mounted)
        with pytest.raises(StorageFailed, match="No space left on device"):
            for _ in range(100):
                await put(stream, b"x" * 8000)
        assert "No space left on device" in (stream.cannot_store or "")
        assert house.events == []

    async def work() -> None:
        async with house.store() as store:
            stream = store.create("s", StorageSettings(flush=flush), b"{}")
            await fill(stream)
            store.committer.maintain([stream])
            assert stream.cannot_store is not None
            (mounted / "ballast").unlink()
            store.committer.maintain([stream])
            assert stream.cannot_store is None
            assert house.events == ["s: the file system has room again; messages can be stored"]
            await put(stream, b"x" * 8000)
            house.events.clear()
            await fill(stream)
            (mounted / "ballast").unlink()
            await put(stream, b"again")
            await put(stream, b"and again")
            assert stream.cannot_store is None
            assert house.events == ["s: messages are stored again"]

    run(work())


def test_a_start_on_a_full_disk_opens_a_stream_with_a_torn_tail(mounted: Path) -> None:
    """A write that the full disk cut short, and a kill before it was taken back."""
    house = House(mounted)

    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, b"a", b"b")
        (path,) = house.directory().glob("*.seg")
        data = path.read_bytes()
        path.write_bytes(data + data[40:-1])
        _ballast(mounted)
        async with house.stream() as stream:
            assert payloads(stream) == [b"a", b"b"]
            assert "no room to keep it" in stream.log.damage[0].what

    run(work())
