"""The last sequence numbers: up to 2^63 - 1 all is stored, and then nothing wraps, is lost or is used again.

No stream gets there by appending. A test begins near the end, as if exports had sent all numbers before.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bridge.errors import StreamError, StreamFull
from bridge.objectkeys import MAX_SEQUENCE, data_key, parse_key
from bridge.operations.manager import committed
from bridge.streams import verify
from bridge.streams.drops import DropReason
from bridge.streams.meta import MessageLimits

from .conftest import House, everything, payloads, put, run

LAST = 2**63 - 1


def begin_at(house: House, first: int, **settings: Any) -> None:
    """Make a stream whose next number is `first`."""

    async def work() -> None:
        async with house.stream(**settings):
            pass

    house.floors["s"] = 0
    asyncio.run(work())
    house.floors["s"] = first


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"flush": True},
        {"overwrite": True, "max_size": 4096},
        {"limits": MessageLimits(max_messages=100)},
        {"limits": MessageLimits(max_messages=100, discard_new=True)},
    ],
    ids=["plain", "flush", "overwrite", "limited", "discards new"],
)
def test_the_last_number_is_stored_and_the_next_message_is_refused(
    house: House, more: dict[str, Any]
) -> None:
    begin_at(house, LAST - 2, **more)

    async def work() -> None:
        async with house.stream() as stream:
            assert await put(stream, b"a", b"b") == [LAST - 2, LAST - 1]
            assert stream.append(b"t", b"c") == LAST
            with pytest.raises(
                StreamFull, match=f"has used its last sequence number, {LAST}; create another"
            ):
                stream.append(b"t", b"d")
            with pytest.raises(StreamFull, match="last sequence number"):
                stream.ensure_admits(b"t", b"d")
            await committed(stream)
            assert stream.next_sequence == LAST + 1
            assert "last sequence number" in str(stream.cannot_store)
        async with house.stream() as stream:
            assert [row.sequence_number for row in everything(stream)] == [LAST - 2, LAST - 1, LAST]
            with pytest.raises(StreamFull, match="last sequence number"):
                stream.append(b"t", b"d")
            assert stream.drop_upto(2**64, DropReason.PURGED) == 3
            with pytest.raises(StreamFull, match="last sequence number"):
                stream.append(b"t", b"d")
        async with house.stream() as stream:  # what is purged is not used again either
            assert (stream.oldest, stream.next_sequence) == (LAST + 1, LAST + 1)
            with pytest.raises(StreamFull, match="last sequence number"):
                stream.append(b"t", b"d")

    run(work())
    (found,) = verify.verify(house.data_dir)
    assert (found.newest, found.problems, found.lost) == (LAST, [], [])


@settings(max_examples=40)
@given(
    first=st.integers(LAST - 40, LAST + 1),
    groups=st.lists(st.integers(1, 12), max_size=8),
    segment_size=st.sampled_from([200, 1024, 65_536]),
    restarts=st.sets(st.integers(0, 7)),
)
@example(first=LAST + 1, groups=[1], segment_size=200, restarts={0})
def test_near_the_end_numbers_stay_contiguous_through_segments_and_restarts(
    first: int, groups: list[int], segment_size: int, restarts: set[int]
) -> None:
    async def work(house: House) -> None:
        wanted: list[bytes] = []
        number = 0
        while number < len(groups) or not number:
            async with house.stream() as stream:
                while number < len(groups):
                    for n in range(groups[number]):
                        try:
                            stream.append(b"t", b"%d.%d" % (number, n))
                        except StreamError:
                            assert first + len(wanted) == LAST + 1
                        else:
                            wanted.append(b"%d.%d" % (number, n))
                    await committed(stream)
                    number += 1
                    if number in restarts:
                        break
                rows = everything(stream)
                assert [row.payload for row in rows] == wanted
                assert [row.sequence_number for row in rows] == list(range(first, first + len(wanted)))
                assert stream.next_sequence == first + len(wanted) <= LAST + 1
            number = number or 1

    with TemporaryDirectory() as directory:
        house = House(Path(directory))
        begin_at(house, first, segment_size=segment_size)
        asyncio.run(work(house))


def test_a_memory_stream_reserves_no_numbers_beyond_the_last(house: House) -> None:
    begin_at(house, LAST - 5, memory=True)

    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, b"a")
            assert stream.meta.reserved == LAST + 1
        async with house.stream() as stream:  # a clean stop: its next number is known
            assert stream.next_sequence == LAST - 4
            await put(stream, *(b"x" for _ in range(5)))
            with pytest.raises(StreamFull, match="last sequence number"):
                stream.append(b"t", b"y")
        for _ in range(2):
            async with house.stream() as stream:
                assert (stream.oldest, stream.next_sequence, payloads(stream)) == (LAST + 1, LAST + 1, [])

    run(work())


def test_a_damaged_frame_that_claims_numbers_beyond_the_last_takes_the_stream_no_further(
    house: House,
) -> None:
    begin_at(house, LAST - 9)

    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, b"kept")
            await put(stream, b"damaged")
        (path,) = house.directory().glob("*.seg")
        data = bytearray(path.read_bytes())
        at = data.rindex((LAST - 8).to_bytes(8, "little")) - 4  # the number of messages in the frame
        data[at : at + 4] = (2**32 - 1).to_bytes(4, "little")
        path.write_bytes(data)
        async with house.stream() as stream:
            assert (stream.next_sequence, payloads(stream)) == (LAST + 1, [b"kept"])
            assert stream.drops.ranges[-1][:2] == (LAST - 8, LAST)

    run(work())


EDGES = [0, 1, 2**31, 2**53, 2**53 + 1, 10**18, LAST - 1, LAST]


@given(st.lists(st.sampled_from(EDGES) | st.integers(0, LAST), min_size=2, max_size=6))
def test_object_keys_sort_by_number_and_say_what_they_hold_up_to_the_last(numbers: list[int]) -> None:
    pairs = sorted((min(pair), max(pair)) for pair in pairwise(numbers))
    keys = [data_key("g", "s", 10**19 - 1, first, last, 0, "parquet") for first, last in pairs]
    assert keys == sorted(keys)
    for key, pair in zip(keys, pairs, strict=True):
        found = parse_key(f"landing/{key}")
        assert found is not None
        assert (found.first, found.last, found.epoch) == (*pair, 10**19 - 1)


def test_a_key_with_a_number_beyond_the_last_is_no_data_object() -> None:
    assert MAX_SEQUENCE == LAST
    assert parse_key(data_key("g", "s", 1, LAST, LAST + 1, 0, "ndjson.gz")) is None
