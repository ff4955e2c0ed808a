"""Disks that refuse: full, failing to write or to sync, read only; through the file seam and for real."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bridge.errors import StorageFailed, StreamError, StreamFull
from bridge.operations.manager import committed
from bridge.streams.layout import Files
from bridge.streams.meta import MessageLimits, StorageSettings

from .conftest import House, everything, payloads, put, run

ROOT = Path(__file__).parent.parent.parent


class Faulty(Files):
    """Files whose calls fail when `fails(call)` gives an error number; a failing write writes half."""

    def __init__(self) -> None:
        self.fails: Callable[[str], int] = lambda call: 0
        self.calls = 0

    def _maybe(self, call: str) -> None:
        self.calls += 1
        number = self.fails(call)
        if number:
            raise OSError(number, os.strerror(number))

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT:
            self._maybe(f"create {path.suffix}")
        return super().open(path, flags)

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        try:
            self._maybe("write")
        except OSError:
            data = b"".join(parts)
            super().write(fd, [data[: len(data) // 2]], offset)
            raise
        super().write(fd, parts, offset)

    def sync(self, fd: int) -> None:
        self._maybe("sync")
        super().sync(fd)

    def truncate(self, fd: int, size: int) -> None:
        self._maybe("truncate")
        super().truncate(fd, size)

    def unlink(self, path: Path) -> None:
        self._maybe("unlink")
        super().unlink(path)

    def sync_directory(self, directory: Path) -> None:
        self._maybe("sync_directory")
        super().sync_directory(directory)


@pytest.fixture
def files(house: House) -> Faulty:
    house.files = faulty = Faulty()
    return faulty


@pytest.mark.parametrize("flush", [False, True])
def test_a_full_disk_refuses_clearly_reads_continue_and_free_space_ends_it(
    house: House, files: Faulty, flush: bool
) -> None:
    async def work() -> None:
        async with house.stream(flush=flush, segment_size=1024) as stream:
            await put(stream, b"a", b"b")
            files.fails = lambda call: errno.ENOSPC if call.startswith(("write", "create")) else 0
            for _ in range(5):
                with pytest.raises(StorageFailed, match="No space left on device; nothing was acknowledged"):
                    await put(stream, b"lost" * 300)
                assert payloads(stream) == [b"a", b"b"]
            files.fails = lambda call: 0
            assert await put(stream, b"c") == [2]
            assert stream.error is None
        async with house.stream() as stream:
            assert payloads(stream) == [b"a", b"b", b"c"]
            assert stream.log.damage == []

    run(work())


class Brimming(Files):
    """A disk with room for small writes only."""

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        if sum(map(len, parts)) > 10_000:
            super().write(fd, [b"".join(parts)[:5_000]], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, parts, offset)


def test_a_disk_that_has_room_for_a_message_but_not_for_more_takes_the_message(house: House) -> None:
    async def work() -> None:
        house.files = Brimming()
        async with house.stream(flush=True) as stream:
            for n in range(20):
                assert await put(stream, b"%d" % n) == [n]
            assert payloads(stream) == [b"%d" % n for n in range(20)]
        (path,) = house.directory().glob("*.seg")
        assert path.stat().st_size < 2000
        async with house.stream() as stream:
            assert len(payloads(stream)) == 20
            assert stream.log.damage == []

    run(work())


def test_what_is_pending_behind_a_failed_write_fails_with_it_and_numbers_are_not_wasted(
    house: House, files: Faulty
) -> None:
    async def work() -> None:
        async with house.stream(flush=True) as stream:
            outcomes: list[StreamError | None] = []
            files.fails = lambda call: errno.EIO if call == "write" else 0
            for n in range(3):
                stream.append(b"t", b"%d" % n)
                stream.after_commit(outcomes.append)
            with pytest.raises(StorageFailed):
                await committed(stream)
            assert len(outcomes) == 3
            assert all(isinstance(outcome, StorageFailed) for outcome in outcomes)
            files.fails = lambda call: 0
            assert await put(stream, b"x") == [0]

    run(work())


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("number", [1, 3])
def test_no_message_of_a_failed_group_passes_for_a_duplicate(
    house: House, files: Faulty, flush: bool, number: int
) -> None:
    """Also not behind others in the window, and not after a second failure."""

    async def work() -> None:
        async with house.stream(flush=flush, dedup_window=60_000) as stream:
            assert await put(stream, b"first", ids=True) == [0]
            failed = [b"%d" % n for n in range(number)]
            files.fails = lambda call: errno.EIO if call == "write" else 0
            for _ in range(2):
                with pytest.raises(StorageFailed):
                    await put(stream, *failed, ids=True)
            files.fails = lambda call: 0
            assert await put(stream, b"first", ids=True) == [0]
            assert await put(stream, *failed, ids=True) == list(range(1, number + 1))
            assert await put(stream, *failed, ids=True) == list(range(1, number + 1))
            assert payloads(stream) == [b"first", *failed]

    run(work())


@pytest.mark.parametrize(
    "limits",
    [
        MessageLimits(max_messages=5, discard_new=True),
        MessageLimits(max_bytes=5 * 11, discard_new=True),
        MessageLimits(max_messages_per_topic=5, discard_new=True),
        MessageLimits(max_bytes=5 * 11, max_messages_per_topic=5, discard_new=True),
    ],
    ids=str,
)
def test_a_failed_group_takes_no_room_from_a_limit(
    house: House, files: Faulty, limits: MessageLimits
) -> None:
    async def work() -> None:
        async with house.stream(limits=limits) as stream:
            for n in range(5):
                files.fails = lambda call: errno.EIO if call == "write" else 0
                with pytest.raises(StorageFailed):
                    await put(stream, *[b"%010d" % n] * (5 - n))
                files.fails = lambda call: 0
                assert await put(stream, b"%010d" % n) == [n]
            with pytest.raises(StreamFull):
                await put(stream, b"%010d" % 5)
            assert payloads(stream) == [b"%010d" % n for n in range(5)]

    run(work())


def test_after_a_failed_sync_the_group_is_written_to_a_new_segment_before_it_is_acknowledged(
    house: House, files: Faulty
) -> None:
    async def work() -> None:
        async with house.stream(flush=True) as stream:
            await put(stream, b"a")
            failed: list[str] = []

            def once(call: str) -> int:
                if call == "sync" and not failed:
                    failed.append(call)
                    return errno.EIO
                return 0

            files.fails = once
            assert await put(stream, b"b", b"c") == [1, 2]
            assert len(stream.log.sizes) == 2
            assert "written again to a new segment" in house.events[-1]
            first = min(stream.directory.glob("*.seg")).read_bytes()
            assert b"tbtc" not in first[40:]
            assert await put(stream, b"d") == [3]
        async with house.stream() as stream:
            assert payloads(stream) == [b"a", b"b", b"c", b"d"]

    run(work())


def test_while_syncs_fail_nothing_is_acknowledged_and_afterwards_everything_works(
    house: House, files: Faulty
) -> None:
    async def work() -> None:
        async with house.stream(flush=True) as stream:
            await put(stream, b"a")
            files.fails = lambda call: errno.EIO if call == "sync" else 0
            for _ in range(3):
                with pytest.raises(StorageFailed, match="Input/output error"):
                    await put(stream, b"lost")
            files.fails = lambda call: 0
            assert await put(stream, b"b") == [1]
        async with house.stream() as stream:
            assert payloads(stream) == [b"a", b"b"]

    run(work())


@pytest.mark.parametrize("segment_size", [1024, 1 << 20])
def test_after_a_failed_background_sync_what_was_not_on_the_disk_is_written_again(
    house: House, files: Faulty, segment_size: int
) -> None:
    async def work() -> None:
        async with house.store() as store:
            stream = store.create("s", StorageSettings(segment_size=segment_size), b"{}")
            await put(stream, *(b"%d" % n for n in range(20)))
            await store.committer.sync([stream])
            for start in range(20, 200, 3):
                await put(stream, *(b"%03d" % n * 9 for n in range(start, start + 3)))
            left = [1]

            def once(call: str) -> int:
                return errno.EIO if call == "sync" and left and left.pop() else 0

            files.fails = once
            await store.committer.sync([stream])
            assert "what was not on the disk was written to a new file" in house.events[-1]
            numbers = [m.sequence_number for m in everything(stream)]
            assert numbers == list(range(200))
            assert await put(stream, b"next") == [200]
            await store.committer.sync([stream])
        async with house.stream() as stream:
            assert [m.sequence_number for m in everything(stream)] == list(range(201))
            assert stream.log.damage == []

    run(work())


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("flush", [False, True])
def test_an_error_at_any_call_loses_nothing_acknowledged(
    tmp_path: Path, persistent: bool, flush: bool
) -> None:
    """SQLite's loop: fail the Nth call, N = 1, 2, ..., until the run passes without a failure."""

    async def work() -> None:
        for number in range(1, 2000):
            house = House(tmp_path / str(number))
            house.files = faulty = Faulty()
            acknowledged: dict[int, bytes] = {}

            def fails(call: str, number: int = number, faulty: Faulty = faulty) -> int:
                hit = faulty.calls >= number if persistent else faulty.calls == number
                return errno.EIO if hit else 0

            faulty.fails = fails
            with contextlib.suppress(OSError):
                await _workload(house, acknowledged, flush)
            reached = faulty.calls >= number
            faulty.fails = lambda call: 0
            house.events.clear()
            async with house.stream(segment_size=1024) as stream:
                found = {m.sequence_number: m.payload for m in everything(stream)}
                for at, payload in acknowledged.items():
                    if at >= stream.oldest:
                        assert found.get(at) == payload, (number, at)
                assert stream.next_sequence >= len(acknowledged), number
                assert await put(stream, b"after") == [stream.next_sequence - 1]
            if not reached:
                assert number > 20
                return
        raise AssertionError("the loop never passed without a failure")

    run(work())


async def _workload(house: House, acknowledged: dict[int, bytes], flush: bool) -> None:
    async with house.store() as store:
        stream = store.create("s", StorageSettings(segment_size=1024, flush=flush), b"{}")
        for n in range(12):
            content = [b"%d-%d" % (n, i) * 20 for i in range(3)]
            try:
                for at, payload in zip(await put(stream, *content), content, strict=True):
                    assert at not in acknowledged
                    acknowledged[at] = payload
            except StorageFailed:
                pass
            if n % 4 == 3:
                await store.committer.sync([stream])


# -- for real ------------------------------------------------------------------------------------
@pytest.mark.parametrize("flush", [False, True])
def test_a_really_full_disk_is_survived_and_works_again_once_there_is_room(
    mounted: Path, flush: bool
) -> None:
    house = House(mounted)
    ballast = mounted / "ballast"
    ballast.write_bytes(bytes(600_000))

    async def work() -> None:
        stored: list[bytes] = []
        async with house.stream(flush=flush, segment_size=65536) as stream:
            with pytest.raises(StorageFailed, match="No space left on device"):
                for n in range(10_000):
                    await put(stream, b"%05d" % n * 200)
                    stored.append(b"%05d" % n * 200)
            assert len(stored) > 100
            assert payloads(stream) == stored
            ballast.unlink()
            await put(stream, b"again")
        async with house.stream() as stream:
            assert payloads(stream) == [*stored, b"again"]

    run(work())


@pytest.mark.parametrize("flush", [False, True])
def test_what_a_full_disk_refuses_is_not_kept_in_memory(house: House, files: Faulty, flush: bool) -> None:
    """Not even until the collector looks for cycles, which it does seldom: by then it may be gigabytes."""

    async def work() -> None:
        async with house.stream(flush=flush, max_size=1 << 30) as stream:
            files.fails = lambda call: errno.ENOSPC if call == "write" else 0
            for turn in range(21):
                refused = asyncio.Event()  # and no exception, whose frames would keep the message
                stream.append(b"t", os.urandom(1 << 20))
                stream.after_commit(lambda error, refused=refused: refused.set() if error else None)  # type: ignore[misc]
                await asyncio.wait_for(refused.wait(), 60)
                if turn == 0:
                    tracemalloc.start()
                    before = tracemalloc.get_traced_memory()[0]
            assert tracemalloc.get_traced_memory()[0] - before < 4 << 20

    gc.disable()
    try:
        run(work())
    finally:
        gc.enable()
        tracemalloc.stop()


def test_an_overwriting_stream_drops_also_when_the_drop_cannot_be_recorded_at_once(
    house: House, files: Faulty
) -> None:
    async def work() -> None:
        async with house.stream(overwrite=True, max_size=8192, segment_size=1024) as stream:
            files.fails = lambda call: errno.ENOSPC if call == "create .log" else 0
            for n in range(200):
                await put(stream, b"%03d" % n * 17 + b".")
            assert stream.total_bytes <= 8192
            assert not any((stream.directory / "drops.log").read_bytes())
            files.fails = lambda call: 0
            for n in range(20):
                await put(stream, b"%03d" % n * 17 + b".")
            oldest = stream.oldest
        async with house.stream() as stream:
            assert stream.drops.live(0, oldest) == [(oldest, oldest)]
            assert stream.drops.ranges[0].first == 0

    run(work())


def test_a_file_system_that_goes_read_only_refuses_appends_and_is_read(mounted: Path) -> None:
    house = House(mounted)
    house.files = files = Faulty()

    async def work() -> None:
        async with house.stream(segment_size=1024) as stream:
            await put(stream, b"a" * 500)
            # A remount is refused while files are open for writing; an error of the disk does not ask.
            subprocess.run(["mount", "-o", "remount,ro", mounted], capture_output=True)
            files.fails = lambda call: errno.EROFS
            with pytest.raises(StorageFailed, match="Read-only file system"):
                await put(stream, b"b" * 600)
            assert payloads(stream) == [b"a" * 500]
            subprocess.run(["mount", "-o", "remount,rw", mounted], check=True)
            files.fails = lambda call: 0
            assert await put(stream, b"b") == [1]

    run(work())


CHILD = """
import asyncio, pathlib, sys
sys.path.insert(0, sys.argv[2])
from bridge.operations.manager import committed
from bridge.errors import StreamError
from bridge.streams.meta import MessageLimits, StorageSettings
from bridge.streams.store import StreamStore
async def main():
    root = pathlib.Path(sys.argv[1])
    store = StreamStore(root / "data", root / "memory", on_event=lambda *what: print(*what, file=sys.stderr))
    stream = store.create("s", StorageSettings(flush=True), b"{}")
    for n in range(40):
        try:
            stream.append(b"t", b"%d" % n)
            await committed(stream)
            print("ok", n, flush=True)
        except StreamError as error:
            print("failed", n, error, flush=True)
    await store.close()
asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["8..10", "6+4", "9"])
def test_errors_injected_into_the_real_fdatasync_lose_nothing_acknowledged(tmp_path: Path, when: str) -> None:
    """strace makes the kernel's own call fail, in a real process."""
    if subprocess.run(["strace", "-V"], capture_output=True).returncode:
        pytest.skip("strace is missing: apt-get install strace")
    inject = f"inject=fdatasync:error=EIO:when={when}"
    command = ["strace", "-f", "-q", "-e", "trace=fdatasync", "-e", inject, "-o", str(tmp_path / "trace")]
    done = subprocess.run(
        [*command, sys.executable, "-c", CHILD, str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "ptrace" in done.stderr and "not permitted" in done.stderr:
        pytest.skip("strace may not trace here")
    assert "(INJECTED)" in (tmp_path / "trace").read_text()
    acknowledged = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("ok")]
    assert len(acknowledged) > 20
    house = House(tmp_path)

    async def work() -> None:
        async with house.stream() as stream:
            assert [int(p) for p in payloads(stream)] == [int(n) for n in acknowledged]

    run(work())
