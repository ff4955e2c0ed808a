"""Cursors on disk: they lag at most, and no damage to them loses a message."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bridge.encryption import Keys, new_master
from bridge.errors import CorruptData, EncryptionKeyError
from bridge.export.cursor import (
    SLOT,
    Cursor,
    CursorFile,
    Sealing,
    Skipped,
    highest_exported,
    openings,
    stream_directory,
)
from bridge.export.planning import Planner, Source
from bridge.export.position import Position
from bridge.plugin.api import BatchedConfig, BatchLimits
from bridge.plugin.transform import MAX_STATE
from tests.export.harness import drop_in, numbers, recorded, running, until


def written(path: Path, *positions: int) -> None:
    file = CursorFile(path)
    for position in positions:
        file.write(Cursor(epoch=7, kind="k", position=position))
    file.close()


def test_the_newest_slot_counts_and_a_torn_one_costs_one_step(tmp_path: Path) -> None:
    path = tmp_path / "c.cursor"
    written(path, 1, 2, 3)
    found = CursorFile.read(path)
    assert found is not None
    assert found.position == 3
    written(path, 4)
    data = bytearray(path.read_bytes())
    for newest in range(0, len(data), SLOT):
        torn = bytearray(data)
        torn[newest + 60] ^= 1
        path.write_bytes(torn)
        found = CursorFile.read(path)
        assert found is not None
        assert found.position in (3, 4)


def test_a_slot_whose_key_is_gone_does_not_hide_a_newer_one(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(new_master())
    path = stream_directory(tmp_path, "s") / "c.cursor"

    def write(position: int) -> int:
        with closing(Keys(tmp_path, tmp_path / "key")) as keys:
            keys.check()
            file = CursorFile(path, Sealing(keys, path, 7))
            file.encrypted = True
            file.write(Cursor(epoch=7, kind="k", position=position, state=b"%d" % position))
            file.close()
            return keys.own()

    write(1)
    older = openings(tmp_path)
    write(2)
    newer = openings(tmp_path) - older
    for opening in older:
        (tmp_path / "keys" / f"{opening:016x}.key").unlink()
    with closing(Keys(tmp_path, tmp_path / "key")) as keys:
        keys.check()
        found = CursorFile.read(path, Sealing(keys, path, 7))
        assert found is not None
        assert (found.position, found.state) == (2, b"2")
        for opening in newer:
            (tmp_path / "keys" / f"{opening:016x}.key").unlink()
    with closing(Keys(tmp_path, tmp_path / "key")) as keys:
        keys.check()
        with pytest.raises(EncryptionKeyError):
            CursorFile.read(path, Sealing(keys, path, 7))


def test_a_cursor_torn_at_any_length_is_read_complete_or_reported_missing(tmp_path: Path) -> None:
    path = tmp_path / "c.cursor"
    written(path, 1, 2)
    data = path.read_bytes()
    for size in [0, 1, 30, 100, SLOT - 1, SLOT, SLOT + 1, SLOT + 60, 2 * SLOT]:
        path.write_bytes(data[:size])
        try:
            found = CursorFile.read(path)
        except CorruptData:
            assert 0 < size < SLOT
        else:
            assert (found is None) == (size == 0)
            assert found is None or found.position in (1, 2)


def test_the_log_of_skipped_ranges_survives_a_torn_line_and_repeats(tmp_path: Path) -> None:
    path = tmp_path / "x.skipped"
    skipped = Skipped(path)
    skipped.add([(0, 3, "expired"), (4, 5, "expired"), (9, 9, "purged")])
    with path.open("a") as out:
        out.write("10 20 expi")
    again = Skipped(path)
    assert again.ranges == [(0, 5, "expired"), (9, 9, "purged")]
    again.add([(4, 5, "expired"), (9, 12, "purged")])  # reported again after a crash
    assert Skipped(path).ranges == [(0, 5, "expired"), (9, 12, "purged")]


def test_ranges_below_others_are_kept_too_for_a_start_may_be_moved_back(tmp_path: Path) -> None:
    path = tmp_path / "x.skipped"
    Skipped(path).add([(500, 509, "expired"), (600, 609, "purged")])
    Skipped(path).add([(100, 119, "limits"), (495, 605, "limits"), (608, 611, "limits")])
    kept = [(100, 119, "limits"), (495, 499, "limits"), (500, 509, "expired"), (510, 599, "limits")]
    kept += [(600, 609, "purged"), (610, 611, "limits")]
    assert Skipped(path).ranges == kept


@pytest.fixture
def on_the_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], bytes]:
    """What of a file is on the disk: its content at its last sync."""
    fdatasync, durable = os.fdatasync, dict[int, bytes]()

    def sync(fd: int) -> None:
        fdatasync(fd)
        durable[os.fstat(fd).st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

    monkeypatch.setattr(os, "fdatasync", sync)
    return lambda path: durable.get(path.stat().st_ino, b"")


class Forgetful:
    """A disk that, after a failed sync, does not write what was written before it."""

    def __init__(self) -> None:
        self.failures = 0  # of the next syncs
        self._written: dict[int, list[tuple[int, bytes]]] = {}
        self._durable: dict[int, bytearray] = {}

    def wrote(self, fd: int, data: bytes, offset: int) -> None:
        self._written.setdefault(os.fstat(fd).st_ino, []).append((offset, data))

    def sync(self, fd: int) -> None:
        inode = os.fstat(fd).st_ino
        writes = self._written.pop(inode, [])
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        content = self._durable.setdefault(inode, bytearray())
        for offset, data in writes:
            content.extend(bytes(max(0, offset + len(data) - len(content))))
            content[offset : offset + len(data)] = data

    def cursor(self, path: Path) -> Cursor | None:
        """What a power cut leaves of a cursor."""
        found = path.with_name("found.cursor")
        found.write_bytes(self._durable[path.stat().st_ino])
        return CursorFile.read(found)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Forgetful:
    disk, pwritev = Forgetful(), os.pwritev

    def write(fd: int, parts: Sequence[bytes], offset: int) -> int:
        done = pwritev(fd, parts, offset)
        disk.wrote(fd, b"".join(parts), offset)
        return done

    monkeypatch.setattr(os, "pwritev", write)
    monkeypatch.setattr(os, "fdatasync", disk.sync)
    return disk


def test_after_a_failed_sync_the_state_of_transforms_is_written_again_too(
    tmp_path: Path, forgetful: Forgetful
) -> None:
    path = tmp_path / "c.cursor"
    file = CursorFile(path)
    file.fill(Cursor(epoch=7, kind="k", transform=b"old" * 500))
    planned = Cursor(epoch=7, kind="k", planned=(0, 9), reached=9, transform=b"new" * 500)
    forgetful.failures = 1
    with pytest.raises(OSError, match="Input/output"):
        file.write(planned)
    file.write(planned)  # now the batch may be sent
    file.close()
    assert forgetful.cursor(path) == planned


@pytest.mark.parametrize("transform", [b"", b"new" * 500])
def test_what_a_process_has_written_and_failed_to_sync_is_on_the_disk_before_another_continues(
    tmp_path: Path, forgetful: Forgetful, transform: bytes
) -> None:
    path = tmp_path / "c.cursor"
    file = CursorFile(path)
    file.fill(Cursor(epoch=7, kind="k"))
    planned = Cursor(epoch=7, kind="k", planned=(0, 9), reached=9, transform=transform)
    forgetful.failures = 1
    with pytest.raises(OSError, match="Input/output"):
        file.write(planned)
    file.close()  # the worker is killed
    file = CursorFile(path)
    file.fill(planned)
    assert CursorFile.read(path) == forgetful.cursor(path) == planned
    file.close()


def test_what_is_known_of_an_export_is_on_the_disk_once_it_is_written(
    tmp_path: Path, on_the_disk: Callable[[Path], bytes]
) -> None:
    """Boundaries before a batch is sent, and dropped ranges before the cursor passes them."""
    path = tmp_path / "c.cursor"
    file = CursorFile(path)
    file.fill(Cursor(epoch=7, kind="k"))
    for position in range(5):
        file.write(Cursor(epoch=7, kind="k", position=position))
        assert on_the_disk(path) == path.read_bytes()
    file.close()
    path = tmp_path / "c.skipped"
    skipped = Skipped(path)
    for begin in range(0, 8000, 400):  # it is made smaller meanwhile
        skipped.add([(n, n, "expired") for n in range(begin, begin + 400, 2)])
        assert on_the_disk(path) == path.read_bytes()
        skipped.add([(begin + 1, begin + 1, "purged")])
        assert on_the_disk(path) == path.read_bytes()


def test_ranges_that_a_process_wrote_and_did_not_sync_are_on_the_disk_before_another_passes_them(
    tmp_path: Path, on_the_disk: Callable[[Path], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.skipped"
    Skipped(path).add([(0, 9, "filtered")])

    def killed(fd: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(os, "fdatasync", killed)
        Skipped(path).add([(12, 14, "filtered")])
    assert on_the_disk(path) != path.read_bytes()
    skipped = Skipped(path)
    skipped.add([(12, 14, "filtered")])
    assert on_the_disk(path) == path.read_bytes()
    assert Skipped(path).ranges == skipped.ranges == [(0, 9, "filtered"), (12, 14, "filtered")]


def test_of_any_number_of_ranges_the_newest_are_exact_and_the_others_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.skipped"
    skipped, reasons = Skipped(path), {3000: "damaged", 5000: "unknown"}
    for begin in range(0, 20_000, 500):
        skipped.add([(n, n, reasons.get(n, "filtered")) for n in range(begin, begin + 500, 2)])
    for found in (skipped, Skipped(path)):
        assert len(found.ranges) < 2100
        newest = [(n, n, "filtered") for n in range(18_000, 20_000, 2)]
        assert found.ranges[-1000:] == newest
        assert found.ranges[:4] == [
            (0, 2998, "joined:1500"),
            (3000, 3000, "damaged"),
            (3002, 4998, "joined:999"),
            (5000, 5000, "unknown"),
        ]
        counts = [int(why.partition(":")[2]) if ":" in why else b - a + 1 for a, b, why in found.ranges]
        assert sum(counts) == 10_000
    assert path.stat().st_size < 100_000


def test_neighbours_that_come_one_by_one_do_not_grow_the_file_without_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.skipped"
    skipped = Skipped(path)
    for number in range(3000):
        skipped.add([(number, number, "overwritten")])
    assert Skipped(path).ranges == skipped.ranges == [(0, 2999, "overwritten")]
    assert path.stat().st_size < 60_000


@contextmanager
def room(size: int) -> Iterator[None]:
    """Files take no more than so many bytes: the last write that fits in part is short, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_half_a_line_that_a_full_disk_took_is_an_error_and_cuts_off_no_later_line(tmp_path: Path) -> None:
    path = tmp_path / "x.skipped"
    skipped = Skipped(path)
    skipped.add([(0, 3, "expired")])
    with room(path.stat().st_size + 5), pytest.raises(OSError, match="large"):
        skipped.add([(9, 9, "purged"), (20, 29, "expired")])
    skipped.add([(9, 9, "purged")])
    skipped.add([(40, 49, "limits")])
    assert Skipped(path).ranges == [(0, 3, "expired"), (9, 9, "purged"), (40, 49, "limits")]


def test_half_a_cursor_that_a_full_disk_took_is_an_error_and_costs_no_other_step(tmp_path: Path) -> None:
    path = tmp_path / "c.cursor"
    written(path, 1, 2)
    file = CursorFile(path)
    with room(SLOT + 30):  # the third one goes to the second slot
        for _ in range(2):
            with pytest.raises(OSError, match="large"):
                file.write(Cursor(epoch=7, kind="k", position=3))
    found = CursorFile.read(path)
    assert found is not None
    assert found.position == 2
    file.write(Cursor(epoch=7, kind="k", position=3))
    found = CursorFile.read(path)
    assert found is not None
    assert found.position == 3
    file.close()


def test_until_the_next_sync_writes_leave_alone_what_is_on_the_disk(
    tmp_path: Path, on_the_disk: Callable[[Path], bytes]
) -> None:
    def position(data: bytes) -> int:
        place = tmp_path / "copy"
        place.write_bytes(data)
        found = CursorFile.read(place)
        return found.position if found else -1

    path = tmp_path / "c.cursor"
    written(path, 0, 1)
    file = CursorFile(path)
    for first in range(2, 30, 7):
        file.write(Cursor(epoch=7, kind="k", position=first))
        known = on_the_disk(path)
        assert position(known) == first
        for step in range(first, first + 7):
            file.write(Cursor(epoch=7, kind="k", position=step), sync=False)
            now = path.read_bytes()
            assert position(now) == step
            # A power cut leaves any of the two slots as it was or as it is, or torn.
            for slot in (0, SLOT):
                torn = now[:slot] + known[slot : slot + SLOT] + now[slot + SLOT :]
                assert position(torn) in (first, step)
                is_newest = known[slot : slot + SLOT] != now[slot : slot + SLOT]
                if is_newest:
                    assert position(now[:slot] + b"x" * SLOT + now[slot + SLOT :]) == first
    file.close()
    again = CursorFile(path)  # after a kill: what the process has left is on the disk before it is replaced
    assert on_the_disk(path) == path.read_bytes()
    again.close()


@pytest.mark.parametrize("transform", [b"", b"state of a dead band"])
def test_once_encryption_is_off_a_cursor_needs_no_key_even_if_nothing_is_exported(
    tmp_path: Path, transform: bytes
) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(new_master())
    keys = Keys(tmp_path, key_file)
    path = stream_directory(tmp_path, "a") / "x.cursor"
    sealing = Sealing(keys, path, 7)
    file = CursorFile(path, sealing)
    file.encrypted = True
    file.fill(Cursor(epoch=7, kind="k", position=3, state=b"secret", transform=transform))
    file.close()
    assert openings(tmp_path) == {keys.own()}
    found = CursorFile.read(path, sealing)
    assert found is not None
    file = CursorFile(path, sealing)  # the next start, with encryption switched off
    file.fill(found)
    file.close()
    assert openings(tmp_path) == set()
    found = CursorFile.read(path)
    assert found is not None
    assert (found.position, found.state, found.transform) == (3, b"secret", transform)


@pytest.mark.parametrize("paused", [False, True])
def test_the_cursor_of_an_idle_export_follows_when_encryption_is_switched(
    recorder: Path, paused: bool
) -> None:
    """A dead band remembers a value, which is in the cursor: no message comes, nothing is restarted."""
    key_file = recorder / "key"
    key_file.write_text(new_master())
    config = {"identifier": "x", "path": str(recorder / "out"), "reduce": [{"deadband": {"/value": 1}}]}
    value = 77_123_451
    forms = [str(value).encode(), *(struct.pack(f">{code}", value) for code in "Iqdf")]

    def shows_value() -> bool:
        (path,) = stream_directory(recorder / "data", "a").glob("*.cursor")
        content = path.read_bytes()
        return any(form in content for form in forms)

    async def work() -> None:
        async with running(recorder, key_file=key_file) as gateway:
            gateway.create("a", {"recorder": [config]})
            await gateway.append("a", b'{"value": %d}' % value)
            await gateway.exported("a", 0)
            await until(shows_value)
            if paused:
                gateway.manager.pause("a", "x", paused=True)
            gateway.update("a", {"recorder": [config]}, encryption=True)
            await until(lambda: not shows_value())
            assert openings(recorder / "data") != set()
            gateway.update("a", {"recorder": [config]}, encryption=False)
            await until(lambda: openings(recorder / "data") == set())
            assert shows_value()

    asyncio.run(work())


class Machine:
    """What a position needs of the worker."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir, self.boot = data_dir, "first"

    def changed(self, stream: str) -> None:
        """Nothing."""


@pytest.mark.parametrize("flush", [False, True])
def test_few_writes_are_synced_for_a_destination_without_batches_and_no_number_is_given_twice(
    tmp_path: Path, on_the_disk: Callable[[Path], bytes], flush: bool
) -> None:
    source = Source("a", tmp_path, 7)
    source.loses_tail = not flush
    machine: Any = Machine(tmp_path)
    config = BatchedConfig(identifier="x")
    position = Position(machine, source, "k", config, BatchLimits(by_record=True), 0)
    position.load(config, Planner(source, None))
    (path,) = stream_directory(tmp_path, "a").iterdir()
    known, syncs, copy = on_the_disk(path), 0, stream_directory(tmp_path / "cut", "a") / path.name
    copy.parent.mkdir(parents=True)
    for number in range(2000):
        position.cursor.plan(number, number)
        position.dirty = True
        position.write()  # and then it is sent
        if on_the_disk(path) != known:
            known, syncs = on_the_disk(path), syncs + 1
            copy.write_bytes(known)
        if not flush:  # else the stream itself has the number
            assert highest_exported(tmp_path / "cut", "a", 7, "second") >= number
            assert highest_exported(tmp_path, "a", 7, "") >= number
        assert highest_exported(tmp_path, "a", 7, "first") == number
        position.cursor.settle(number, number)
        position.cursor.unplan()
    assert syncs < 20
    position.finish()
    position.close()
    assert on_the_disk(path) == path.read_bytes()
    assert highest_exported(tmp_path, "a", 7, "second") == 1999, "a clean stop leaves nothing reserved"


def test_numbering_continues_after_what_was_planned(tmp_path: Path) -> None:
    directory = stream_directory(tmp_path, "a")
    written(directory / "x.cursor", 5)
    file = CursorFile(directory / "y.cursor")
    file.write(Cursor(epoch=7, kind="k", position=3, planned=(3, 9), reached=9))
    file.close()
    assert highest_exported(tmp_path, "a", 7) == 9
    assert highest_exported(tmp_path, "a", 8) == -1
    assert highest_exported(tmp_path, "b", 7) == -1


def test_after_a_start_positions_are_known_before_the_worker_reports_them(
    recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def exported() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [{"identifier": "x", "path": str(recorder / "out")}]})
            await gateway.append("a", *(b"x" for _ in range(5)))
            await gateway.exported("a", 4)

    async def without_a_worker() -> None:
        monkeypatch.setattr("sys.executable", "/nonexistent/python")
        async with running(recorder) as gateway:
            status = gateway.status("a")
            assert (status.last_exported_sequence_number, status.exported_messages_count) == (4, 5)
            gateway.manager.delete("a")
            gateway.create("a", {"recorder": [{"identifier": "x", "path": str(recorder / "out")}]})
            assert gateway.status("a").last_exported_sequence_number == -1

    asyncio.run(exported())
    asyncio.run(without_a_worker())


@pytest.mark.parametrize("damage", ["removed", "zeroed", "random"])
def test_with_a_damaged_cursor_everything_is_sent_again(recorder: Path, damage: str) -> None:
    async def part(count: int) -> None:
        async with running(recorder) as gateway:
            if "a" not in gateway.store.streams:
                config = {"identifier": "x", "path": str(recorder / "out")}
                gateway.create("a", {"recorder": [config]})
            await gateway.append("a", *(b"x" for _ in range(count)))
            await gateway.exported("a", count * 2 - 1 if (recorder / "again").exists() else count - 1)
            await until(lambda: len(set(numbers(recorder / "out"))) >= count)

    asyncio.run(part(3))
    (path,) = (recorder / "data" / "exports" / "a").glob("*.cursor")
    size = path.stat().st_size
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(bytes(size) if damage == "zeroed" else os.urandom(size))
    (recorder / "again").touch()
    asyncio.run(part(3))
    assert numbers(recorder / "out") == [0, 1, 2, 0, 1, 2, 3, 4, 5]


def test_a_cursor_that_cannot_be_written_stops_its_export_and_no_other(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            (recorder / "data" / "exports").mkdir(exist_ok=True)
            (recorder / "data" / "exports" / "a").write_text("in the way")
            for name in ("a", "b"):
                config = {"identifier": "x", "path": str(recorder / name)}
                gateway.create(name, {"recorder": [config]})
                await gateway.append(name, b"x")
            await gateway.exported("b", 0)
            await until(lambda: gateway.status("a").error_message)
            (recorder / "data" / "exports" / "a").unlink()
            await gateway.exported("a", 0)

    asyncio.run(scenario())
    assert [batch[:2] for batch in recorded(recorder / "a")] == [[0, 0]]


# -- a disk that takes no cursor -------------------------------------------------------------------
REFUSING = """
    import os
    from bridge.export import cursor

    real = cursor.CursorFile.write
    if not hasattr(real, "refuses"):

        def write(self, content):
            if os.path.exists({flag!r}):
                raise OSError(5, "Input/output error")
            real(self, content)

        write.refuses = True
        cursor.CursorFile.write = write
"""


def test_no_batch_is_sent_before_its_boundaries_are_on_the_disk(
    recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CursorFile, "write", CursorFile.write)  # the plugin replaces it; restored at the end
    flag = recorder / "refuse"
    drop_in(recorder, "refusing", REFUSING.format(flag=str(flag)))

    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [{"identifier": "x", "path": str(recorder / "out")}]})
            await gateway.append("a", b"0")
            await gateway.exported("a", 0)
            await until(lambda: position(recorder) == 1)
            flag.touch()
            try:
                await gateway.append("a", b"1", b"2")
                await until(lambda: gateway.status("a").error_message)
                await gateway.append("a", b"3", b"4")
                seen = gateway.status("a").failed_attempts
                await until(lambda: gateway.status("a").failed_attempts >= seen + 2)
                assert numbers(recorder / "out") == [0]
            finally:
                flag.unlink()
            await gateway.exported("a", 4)

    asyncio.run(scenario())
    assert [batch[:2] for batch in recorded(recorder / "out")] == [[0, 0], [1, 2], [3, 4]]


def position(root: Path) -> int:
    """The position that is on the disk."""
    (path,) = (root / "data" / "exports" / "a").glob("*.cursor")
    found = CursorFile.read(path)
    return found.position if found else -1


def test_exports_go_on_on_a_full_disk(recorder: Path, mounted: Path) -> None:
    (recorder / "data").symlink_to(mounted)

    async def scenario() -> None:
        async with running(recorder) as gateway:
            config = {
                "identifier": "x",
                "path": str(recorder / "out"),
                "batchSize": 2,
                "lingerMillis": 600_000,
            }
            gateway.create("a", {"recorder": [config]})
            await gateway.append("a", b"0")
            await until(
                lambda: (path := mounted / "exports" / "a" / "x.cursor").exists() and path.stat().st_size
            )
            with (
                (mounted / "ballast").open("wb", buffering=0) as ballast,
                pytest.raises(OSError, match="No space"),
            ):
                while True:
                    ballast.write(bytes(4096))
            for number in range(1, 10):
                await gateway.append("a", b"%d" % number)  # into the page that the file has
            await gateway.exported("a", 9)
            await until(lambda: position(recorder) == 10)
            assert os.statvfs(mounted).f_bavail == 0

    asyncio.run(scenario())
    assert numbers(recorder / "out") == list(range(10))


UNABLE = """
    from bridge import ACCEPTED, Exporter, Retry, hookimpl

    class Unable(Exporter):
        kind = "unable"

        def __init__(self, config, context):
            raise Retry("You must specify a region.")

        def export(self, batch):
            return ACCEPTED

    @hookimpl
    def register_exporters(register):
        register(Unable)
"""


def test_a_start_beyond_the_newest_message_moves_no_number(tmp_path: Path) -> None:
    drop_in(tmp_path, "unable", UNABLE)

    async def scenario() -> None:
        for turn in range(2):
            async with running(tmp_path) as gateway:
                if not turn:
                    gateway.create("a", {"unable": [{"identifier": "x", "startSequenceNumber": 1000}]})
                await gateway.append("a", b"x", b"y")
                await until(lambda: gateway.status("a").error_message)
                await until(lambda: position(tmp_path) == 1000)
                assert gateway.store.streams["a"].next_sequence == 2 * (turn + 1)
                assert gateway.store.streams["a"].drops.ranges == []

    asyncio.run(scenario())


def test_what_was_sent_stays_known_when_an_export_starts_over_further_back(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            config = {"identifier": "x", "path": str(recorder / "out")}
            gateway.create("a", {"recorder": [config]})
            epoch = gateway.store.streams["a"].epoch
            await gateway.append("a", *(b"x" for _ in range(10)))
            await gateway.exported("a", 9)
            gateway.update(
                "a", {"recorder": [{**config, "startSequenceNumber": 3, "fault": "wait", "batchSize": 1}]}
            )
            await until(lambda: "link is down" in (gateway.status("a").error_message or ""))
            assert position(recorder) == 3
            assert highest_exported(recorder / "data", "a", epoch) == 9

    asyncio.run(scenario())


def test_whatever_a_power_cut_leaves_of_a_write_position_and_state_of_the_transforms_belong_together(
    tmp_path: Path,
) -> None:
    """The sectors of a write that was not synced may be on the disk or not, each for itself."""
    path, chance = tmp_path / "c.cursor", random.Random(4)
    states = {position: random.Random(position).randbytes(1 + position * 4321) for position in range(16)}
    file = CursorFile(path)
    file.fill(Cursor(epoch=7, kind="k", transform=states[0]))
    for position in range(1, 16):
        before = path.read_bytes()
        file.write(Cursor(epoch=7, kind="k", position=position, transform=states[position]))
        after = path.read_bytes()
        assert len(after) <= 2 * (SLOT + MAX_STATE)
        changed = [at for at in range(0, len(after), 512) if before[at : at + 512] != after[at : at + 512]]
        for _ in range(50):
            left = bytearray(before.ljust(len(after), b"\0"))
            for at in chance.sample(changed, chance.randint(0, len(changed))):
                left[at : at + 512] = after[at : at + 512]
            (tmp_path / "left.cursor").write_bytes(left)
            found = CursorFile.read(tmp_path / "left.cursor")
            assert found is not None
            assert found.position in (position - 1, position)
            assert found.transform == states[found.position]
    file.close()


def test_a_cursor_whose_state_does_not_change_is_written_alone(tmp_path: Path) -> None:
    path = tmp_path / "c.cursor"
    file = CursorFile(path)
    for position in range(4):
        file.write(Cursor(epoch=7, kind="k", position=position, transform=b"state" * 1000))
    areas = path.read_bytes()[2 * SLOT :]
    file.write(Cursor(epoch=7, kind="k", position=4, transform=b"state" * 1000))
    assert path.read_bytes()[2 * SLOT :] == areas
    file.write(Cursor(epoch=7, kind="k", position=5))  # the rules are gone
    file.close()
    found = CursorFile.read(path)
    assert found is not None
    assert (found.position, found.transform) == (5, b"")


def test_a_cursor_without_room_for_a_state_is_an_error_until_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "c.cursor"
    written(path, 1, 2)
    file = CursorFile(path)
    wanted = Cursor(epoch=7, kind="k", position=3, transform=b"state" * 1000)
    for size in (2 * SLOT, 2 * SLOT + 700, 2 * SLOT + MAX_STATE + 700):
        with room(size), pytest.raises(OSError, match="large"):
            file.write(wanted)
        found = CursorFile.read(path)
        assert found is not None
        assert (found.position, found.transform) == (2, b"")
    file.write(wanted)
    assert CursorFile.read(path) == wanted
    file.close()
