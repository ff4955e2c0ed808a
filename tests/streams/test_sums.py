"""Checks of many long parts of a file: exact, and in a time that does not grow with their length."""

from __future__ import annotations

import random
import zlib

import pytest

from bridge.streams import segment, sums
from bridge.streams.sums import BLOCK, Sums
from bridge.streams.verify import verify

from .conftest import House, check, everything, payloads, put, run


@pytest.mark.parametrize("size", [0, 1, BLOCK, 20 * BLOCK, 300 * BLOCK + 17])
def test_the_check_of_a_part_is_what_reading_it_gives(size: int) -> None:
    draw = random.Random(size)
    data = draw.randbytes(size)
    kept = Sums(data)
    for _ in range(300):
        start, end = sorted((draw.randint(0, size), draw.randint(0, size)))
        if draw.random() < 0.3:
            start, end = start // BLOCK * BLOCK, end // BLOCK * BLOCK
        seed = draw.getrandbits(32)
        assert kept.crc32(start, end, seed) == zlib.crc32(data[start:end], seed)


def _forged(size: int, apart: int = 44) -> bytes:
    """Headers of frames with one message each, all of which end shortly before this ends."""
    found = bytearray()
    for at in range(0, size - 2 * apart, apart):
        length = size - at - segment.FRAME.size - apart
        head = segment.FRAME.pack(segment.FRAME_MAGIC, 0, length, 0, 0, 1, 5, 0, 0)
        found += head + segment.PAIR.pack(0, length - segment.PAIR.size)
    return bytes(found.ljust(size, b"\0"))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all that is checked."""
    sizes: list[int] = []

    def counted(data: bytes | memoryview, seed: int = 0) -> int:
        sizes.append(len(data))
        return zlib.crc32(data, seed)

    monkeypatch.setattr(segment, "crc32", counted)
    monkeypatch.setattr(sums, "crc32", counted)
    return sizes


@pytest.mark.parametrize("cut", [True, False])
def test_a_payload_of_forged_headers_behind_damage_does_not_hold_a_start_up(
    house: House, checked: list[int], cut: bool
) -> None:
    async def work() -> None:
        size = 400_000
        async with house.stream() as stream:
            await put(stream, b"true")
            await put(stream, _forged(size))
            if not cut:
                await put(stream, b"y" * 50_000, b"z")
                await put(stream, b"last")
        (path,) = house.directory().glob("*.seg")
        intact = path.read_bytes()
        # A write that was cut short, or a bit that was flipped in the frame before sound ones.
        path.write_bytes(intact[:-5] if cut else intact[:2000] + bytes((intact[2000] ^ 1,)) + intact[2001:])
        checked.clear()
        assert len(verify(house.data_dir)[0].problems) == 1
        async with house.stream() as stream:
            assert sum(checked) < 100 * len(intact)
            check(stream)
            if cut:
                assert payloads(stream) == [b"true"]
                assert await put(stream, b"next") == [1]
            else:
                assert [m.sequence_number for m in everything(stream)] == [0, 2, 3, 4]
                assert payloads(stream)[1:] == [b"y" * 50_000, b"z", b"last"]

    run(work())
