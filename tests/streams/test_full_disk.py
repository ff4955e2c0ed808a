"""A disk that is really full: what is purged, expires or is overwritten makes room all the same."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bridge.errors import StorageFailed
from bridge.streams.drops import ILLEGAL, Reason
from bridge.streams.meta import Settings
from bridge.streams.stream import Stream

from .conftest import House, payloads, put, run
from .test_commit import until


def _fill(place: Path) -> None:
    """Take all that is left of a file system."""
    with (place / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))


async def _put_until_it_works(stream: Stream, payload: bytes) -> None:
    """What was dropped is removed in a thread: its room is there some time later."""
    async with asyncio.timeout(10):
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
        if scattered:  # more records than there is room for
            stream.drop([(n, n) for n in range(0, end, 2)], Reason.PURGED)
            stream.drop([(5, 5)], Reason.DAMAGED)
        stream.drop_upto(end, Reason.PURGED)
        await _put_until_it_works(stream, b"again" * 1000)
        await until(lambda: not before & set(stream.directory.glob("*.seg")) - {stream.log.active.path})
        assert payloads(stream) == [b"again" * 1000]

    async def check() -> None:
        async with house.stream() as stream:
            assert payloads(stream) == [b"again" * 1000]
            lost = [(drop.first, drop.last) for drop in stream.drops.ranges if drop.reason in ILLEGAL]
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
            stream = store.create("s", Settings(max_size=600_000, segment_size=65536), b"{}")
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
