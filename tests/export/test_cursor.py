"""Cursors on disk: they lag at most, and no damage to them loses a message."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bridge.errors import CorruptData
from bridge.export.cursor import SLOT, Cursor, CursorFile, Skipped, highest_exported, stream_directory
from tests.export.harness import numbers, recorded, running, until


def written(path: Path, *positions: int) -> None:
    file = CursorFile(path)
    for position in positions:
        file.write(Cursor(epoch=7, kind="k", position=position))
    file.close()


def test_the_newest_slot_counts_and_a_torn_one_costs_one_step(tmp_path: Path) -> None:
    path = tmp_path / "c.cursor"
    written(path, 1, 2, 3)
    found = CursorFile.peek(path)
    assert found is not None
    assert found.position == 3
    written(path, 4)
    data = bytearray(path.read_bytes())
    for newest in range(0, len(data), SLOT):
        torn = bytearray(data)
        torn[newest + 60] ^= 1
        path.write_bytes(torn)
        found = CursorFile.peek(path)
        assert found is not None
        assert found.position in (3, 4)


def test_every_torn_length_gives_a_whole_cursor_or_says_that_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "c.cursor"
    written(path, 1, 2)
    data = path.read_bytes()
    for size in [0, 1, 30, 100, SLOT - 1, SLOT, SLOT + 1, SLOT + 60, 2 * SLOT]:
        path.write_bytes(data[:size])
        try:
            found = CursorFile.peek(path)
        except CorruptData:
            assert 0 < size < SLOT
        else:
            assert (found is None) == (size == 0)
            assert found is None or found.position in (1, 2)


def test_the_log_of_skipped_ranges_survives_a_torn_line_and_repeats(tmp_path: Path) -> None:
    path = tmp_path / "x.skipped"
    skipped = Skipped(path)
    assert skipped.add([(0, 3, "expired"), (4, 5, "expired"), (9, 9, "purged")]) == 7
    with path.open("a") as out:
        out.write("10 20 expi")
    again = Skipped(path)
    assert again.ranges == [(0, 5, "expired"), (9, 9, "purged")]
    assert again.add([(4, 5, "expired"), (9, 12, "purged")]) == 3  # told again after a crash
    assert Skipped(path).ranges == [(0, 5, "expired"), (9, 12, "purged")]


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
    assert skipped.add([(9, 9, "purged")]) == 1
    assert skipped.add([(40, 49, "limits")]) == 10
    assert Skipped(path).ranges == [(0, 3, "expired"), (9, 9, "purged"), (40, 49, "limits")]


def test_half_a_cursor_that_a_full_disk_took_is_an_error_and_costs_no_other_step(tmp_path: Path) -> None:
    path = tmp_path / "c.cursor"
    written(path, 1, 2)
    file = CursorFile(path)
    with room(SLOT + 30):  # the third one goes to the second slot
        for _ in range(2):
            with pytest.raises(OSError, match="large"):
                file.write(Cursor(epoch=7, kind="k", position=3))
    found = CursorFile.peek(path)
    assert found is not None
    assert found.position == 2
    file.write(Cursor(epoch=7, kind="k", position=3))
    found = CursorFile.peek(path)
    assert found is not None
    assert found.position == 3
    file.close()


def test_numbering_continues_after_what_was_planned(tmp_path: Path) -> None:
    directory = stream_directory(tmp_path, "a")
    written(directory / "x.cursor", 5)
    file = CursorFile(directory / "y.cursor")
    file.write(Cursor(epoch=7, kind="k", position=3, planned=(3, 9)))
    file.close()
    assert highest_exported(tmp_path, "a", 7) == 9
    assert highest_exported(tmp_path, "a", 8) == -1
    assert highest_exported(tmp_path, "b", 7) == -1


def test_after_a_start_exports_are_as_far_as_they_were_also_before_the_worker_says_so(
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
