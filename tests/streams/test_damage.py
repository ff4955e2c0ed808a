"""Torn tails, flipped bits, lost files: never wrong data, never a crash, always reported."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path

import pytest

from bridge.errors import CorruptData
from bridge.streams import meta, segment
from bridge.streams.drops import DropReason
from bridge.streams.reader import StreamReader
from bridge.streams.verify import verify

from .conftest import House, check, everything, payloads, put, run

CONTENT = [b"%03d-" % n + bytes([n]) * (n % 40) for n in range(60)]


async def fill(house: House, segment_size: int = 1024) -> None:
    async with house.stream(segment_size=segment_size) as stream:
        for start in range(0, len(CONTENT), 4):
            await put(stream, *CONTENT[start : start + 4])


def test_the_last_segment_cut_at_every_byte_loses_only_the_frames_that_are_cut(house: House) -> None:
    async def work() -> None:
        await fill(house, 1 << 20)
        (path,) = house.directory().glob("*.seg")
        intact = path.read_bytes()
        kept_before = -1
        for size in range(len(intact) + 1):
            path.write_bytes(intact[:size])
            async with house.stream() as stream:
                rows = everything(stream)
                assert [m.payload for m in rows] == CONTENT[: len(rows)]
                assert len(rows) % 4 == 0
                assert len(rows) >= kept_before
                assert stream.next_sequence == len(rows)
                kept_before = len(rows)
                if size % 97 == 0:
                    assert await put(stream, b"new") == [len(rows)]
                    assert payloads(stream) == [*CONTENT[: len(rows)], b"new"]
                    path.unlink()
        assert kept_before == len(CONTENT)

    run(work())


async def _into_room(house: House, last: bytes) -> bytes:
    """The segment of a synced stream with a message and then `last`, as it is while the service runs.

    Its last sector is preallocated space, as the sectors after the last frame.
    """
    async with house.stream(flush=True) as stream:
        await put(stream, b"first")
        await put(stream, last)
        (path,) = house.directory().glob("*.seg")
        content = path.read_bytes()
    assert len(content) > 100_000
    assert len(content) % 512 == 0
    intact = path.read_bytes()
    assert content.startswith(intact)
    assert len(intact) < 4096, "a clean stop leaves no preallocated space"
    return content


def test_preallocated_space_after_the_last_frame_is_no_damage_after_a_crash(house: House) -> None:
    async def work() -> None:
        content = await _into_room(house, b"last")
        (path,) = house.directory().glob("*.seg")
        path.write_bytes(content)
        assert [problem for found in verify(house.data_dir) for problem in found.problems] == []
        async with house.stream() as stream:
            assert payloads(stream) == [b"first", b"last"]
            assert await put(stream, b"new") == [2]
            assert stream.log.damage == []
        assert path.stat().st_size < 1000
        assert not (house.directory() / "quarantine").exists()

    run(work())


def test_a_power_cut_that_leaves_any_sectors_of_a_frame_unwritten_uses_up_no_number(house: House) -> None:
    async def work() -> None:
        content = await _into_room(house, b"x" * 1800)
        (path,) = house.directory().glob("*.seg")
        sectors = range(512, path.stat().st_size, 512)  # the first message lies in the sector before
        assert len(sectors) == 3
        for gone in range(1, 8):
            torn = bytearray(content)
            for at in (at for bit, at in enumerate(sectors) if gone >> bit & 1):
                torn[at : at + 512] = content[-512:]
            path.write_bytes(torn)
            house.events.clear()
            async with house.stream() as stream:
                assert payloads(stream) == [b"first"]
                assert "torn tail" in house.events[0]
                assert "lost" not in house.events[0]
                assert await put(stream, b"new") == [1]

    run(work())


def test_zeros_behind_a_torn_frame_are_no_damage(house: House) -> None:
    """The file's new size was on the disk before its data, which is then all zeros from some sector on."""

    async def work() -> None:
        content = await _into_room(house, b"x" * 1800)
        (path,) = house.directory().glob("*.seg")
        for at in range(512, path.stat().st_size, 512):
            path.write_bytes(content[:at] + bytes(len(content) - at))
            assert "torn tail" in verify(house.data_dir)[0].problems[0].what
            house.events.clear()
            async with house.stream() as stream:
                assert payloads(stream) == [b"first"]
                assert "torn tail" in house.events[0]
                assert "lost" not in house.events[0]
                assert await put(stream, b"new") == [1]

    run(work())


@pytest.mark.parametrize("payload", [b"x" * 300, bytes(300)])
def test_zeros_from_the_middle_of_the_last_group_on_are_no_damage(house: House, payload: bytes) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, b"first")
            start = stream.total_bytes
            await put(stream, *[payload] * 200)
            (path,) = house.directory().glob("*.seg")
        content = path.read_bytes()
        for at in range(-(-(start + 44) // 512) * 512, len(content) - 400, 512):
            path.write_bytes(content[:at] + bytes(len(content) - at))
            house.events.clear()
            async with house.stream() as stream:
                assert payloads(stream) == [b"first"]
                assert "lost" not in house.events[0]
                assert stream.next_sequence == 1

    run(work())


def test_a_flipped_bit_in_a_last_message_of_zeros_is_damage_and_its_number_is_used_up(house: House) -> None:
    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, b"first")
            await put(stream, b"second", bytes(4000))
        (path,) = house.directory().glob("*.seg")
        content = bytearray(path.read_bytes())
        content[content.index(b"second")] ^= 1
        path.write_bytes(content)
        async with house.stream() as stream:
            assert "lost: 1-2" in house.events[0]
            assert await put(stream, b"new") == [3]

    run(work())


@pytest.mark.parametrize("payload", [b"x" * 1800, bytes(1800), b"x" * 1000 + bytes(800)])
def test_a_flipped_bit_in_the_last_frame_before_preallocated_space_is_damage_and_its_number_is_used_up(
    house: House, payload: bytes
) -> None:
    async def work() -> None:
        content = bytearray(await _into_room(house, payload))
        content[1000] ^= 1
        (path,) = house.directory().glob("*.seg")
        path.write_bytes(content)
        assert "is damaged" in verify(house.data_dir)[0].problems[0].what
        async with house.stream() as stream:
            assert "lost: 1-1" in house.events[0]
            assert await put(stream, b"new") == [2]

    run(work())


def _files(house: House) -> list[Path]:
    return sorted(p for p in house.directory().rglob("*") if p.is_file())


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_anywhere_never_gives_wrong_data_and_is_reported(house: House, seed: int) -> None:
    """Every file of the stream; bytes drawn at random, more of them where headers are."""

    async def work() -> None:
        await fill(house)
        async with house.stream() as stream:
            stream.drop([(2, 2)], DropReason.PURGED)
        shutil.copytree(house.data_dir, house.data_dir.with_name("copy"), symlinks=True)
        true = dict(enumerate(CONTENT))
        draw = random.Random(seed)
        for path, size in [(path, path.stat().st_size) for path in _files(house)]:
            spots = {draw.randrange(size) for _ in range(12)} | {
                draw.randrange(min(size, 80)) for _ in range(6)
            }
            for spot in sorted(spots):
                shutil.rmtree(house.data_dir)
                shutil.copytree(house.data_dir.with_name("copy"), house.data_dir, symlinks=True)
                data = bytearray(path.read_bytes())
                data[spot] ^= 1 << draw.randrange(8)
                path.write_bytes(data)
                house.events.clear()
                await _check(house, true, (path.name, spot))

    run(work())


async def _check(house: House, true: dict[int, bytes], what: object) -> None:
    reader = StreamReader(house.directory())
    try:
        for message in reader.read(0, end=len(true), max_messages=999, max_bytes=1 << 30):
            assert message.payload == true[message.sequence_number], what
    except CorruptData:
        pass
    finally:
        reader.close()
    async with house.store() as store:
        stream = store.streams["s"]
        check(stream)
        rows = everything(stream)
        for message in rows:
            assert message.payload == true[message.sequence_number], what
        live = {message.sequence_number for message in rows}
        gone = set(true) - live - {2}
        assert not gone or house.events, (what, gone)
        assert len(gone) <= 12, (what, gone)
        (number,) = await put(stream, b"new")
        assert number not in live
        assert number >= len(true) - 4, what
        assert payloads(stream)[-1] == b"new"


def test_a_damaged_closed_segment_is_quarantined_its_sound_frames_kept_and_the_loss_recorded(
    house: House,
) -> None:
    async def work() -> None:
        await fill(house)
        path = sorted(house.directory().glob("*.seg"))[1]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        async with house.stream() as stream:
            with pytest.raises(CorruptData, match="is damaged; it was not returned"):
                everything(stream)
            check(stream)
            rows = everything(stream)
            missing = sorted(set(range(60)) - {m.sequence_number for m in rows})
            assert len(missing) == 4
            assert missing == list(range(missing[0], missing[0] + 4))
            assert [(d.first, d.last, d.reason) for d in stream.drops.ranges] == [
                (missing[0], missing[-1], DropReason.DAMAGED)
            ]
            assert [m.payload for m in rows] == [CONTENT[m.sequence_number] for m in rows]
            (kept,) = (house.directory() / "quarantine").iterdir()
            assert kept.read_bytes() == bytes(data)
            assert f"{missing[0]}-{missing[-1]}" in "".join(house.events)
            assert await put(stream, b"on") == [60]

    run(work())


def test_a_lost_index_is_rebuilt_and_a_lost_segment_is_a_reported_hole(house: House) -> None:
    async def work() -> None:
        await fill(house)
        for path in house.directory().glob("*.idx"):
            path.unlink()
        async with house.stream() as stream:
            assert payloads(stream) == CONTENT
        assert list(house.directory().glob("*.idx"))
        gone = sorted(house.directory().glob("*.seg"))[1]
        gone.unlink()
        async with house.stream() as stream:
            check(stream)
            rows = everything(stream)
            assert 0 < len(rows) < 60
            assert [m.payload for m in rows] == [CONTENT[m.sequence_number] for m in rows]
            assert house.events

    run(work())


def test_a_stream_whose_definition_is_lost_is_reported_and_left_and_the_others_run(house: House) -> None:
    async def work() -> None:
        await fill(house)
        async with house.stream("other") as stream:
            await put(stream, b"x")
        before = {p: p.read_bytes() for p in _files(house) if p.name not in meta.NAMES}
        for name in meta.NAMES:
            (house.directory() / name).write_bytes(b"rubbish")
        async with house.store() as store:
            assert set(store.streams) == {"other"}
            assert list(store.unopened) == [house.directory().name]
        assert any("both copies of its definition are damaged" in event for event in house.events)
        assert {p: p.read_bytes() for p in before} == before

    run(work())


def test_files_that_are_not_ours_do_not_disturb(house: House) -> None:
    async def work() -> None:
        await fill(house)
        (house.directory() / "00000000000000000099.seg.bak").write_bytes(b"x")
        (house.directory() / "notes.txt").write_bytes(b"x")
        for name in ("stray", ".DS_Store", ".new-stray"):
            (house.data_dir / "streams" / name).write_bytes(b"x")
        (house.data_dir / "streams" / ".snapshot").mkdir()
        async with house.stream() as stream:
            assert payloads(stream) == CONTENT
        assert (house.data_dir / "streams" / ".snapshot").is_dir()

    run(work())


def test_what_cannot_be_deleted_of_a_deleted_stream_stops_no_other(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(fill(house))
    left = house.data_dir / "streams" / ".deleted-old"
    left.mkdir()
    (left / "file").write_bytes(b"x")

    def unlink(*path: object, **how: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(left / "file"))

    async def work() -> None:
        with monkeypatch.context() as context:
            context.setattr(os, "unlink", unlink)
            async with house.stream() as stream:
                assert payloads(stream) == CONTENT
        assert [event for event in house.events if str(left) in event]
        async with house.stream():
            assert not left.exists()

    run(work())


def test_an_empty_last_segment_left_by_a_crash_is_used_again(house: House) -> None:
    async def work() -> None:
        await fill(house)
        (house.directory() / f"{60:020d}.seg").write_bytes(b"")
        async with house.stream() as stream:
            assert payloads(stream) == CONTENT
            assert await put(stream, b"next") == [60]
            assert payloads(stream) == [*CONTENT, b"next"]

    run(work())


def test_a_payload_that_looks_like_a_frame_is_never_taken_for_one(house: House) -> None:
    """A device could publish the bytes of a frame and hope for a power cut at the right place."""

    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, b"true")
            forged = b"".join(segment.encode_frame(1, 0, 0, 0, [b"t", b"forged"]))
            await put(stream, b"x" * 100, forged, b"y" * 100)
        (path,) = house.directory().glob("*.seg")
        intact = path.read_bytes()
        at = intact.index(forged)
        for broken in (intact[: at + len(forged)], intact[: at - 120] + b"?" + intact[at - 119 :]):
            path.write_bytes(broken)
            async with house.stream() as stream:
                assert payloads(stream) == [b"true"]

    run(work())
