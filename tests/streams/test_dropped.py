"""Dropped numbers against plain sets, and their record on a disk that has no room or fails half-way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from errno import EIO, ENOSPC
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.streams import meta
from bridge.streams.drops import COMPACT_AT, KEPT, LOST_TO_EXPORTS, ROOM, Drop, DropReason, Drops, Passed
from bridge.streams.layout import Files

from .conftest import House, payloads, put, run
from .test_drops import path_of

ADDED = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12), st.sampled_from(list(DropReason))), max_size=25
)


@given(ADDED)
def test_drops_are_the_numbers_that_were_added_each_for_its_first_reason(
    added: list[tuple[int, int, DropReason]],
) -> None:
    drops, gone = Drops(), dict[int, DropReason]()
    for time, (first, more, reason) in enumerate(added, 1000):
        new = [n for n in range(first, first + more + 1) if n not in gone]
        fresh = drops.add(Drop(first, first + more, time, reason))
        assert [n for drop in fresh for n in range(drop.first, drop.last + 1)] == new
        gone |= dict.fromkeys(new, reason)
        assert all(drops.time_of(drop.last) == time for drop in fresh)
        assert drops.number == len(gone)
    for first in range(0, 75, 7):
        assert drops.first_live(first) == next(n for n in range(first, 200) if n not in gone)
        assert drops.time_of(first) > 0 if first in gone else drops.time_of(first) == 0
        for last in range(first, 75, 11):
            inside = range(first, last + 1)
            assert drops.count(first, last) == sum(n in gone for n in inside)
            assert drops.lost(first, last) == sum(gone.get(n) in LOST_TO_EXPORTS for n in inside)
            found = {n: why for a, b, why in drops.within(first, last) for n in range(a, b + 1)}
            assert found == {n: gone[n].name.lower() for n in inside if n in gone}
            assert [n for a, b in drops.live(first, last) for n in range(a, b + 1)] == [
                n for n in inside if n not in gone
            ]


@pytest.mark.parametrize("loss", [None, 301])
def test_compaction_joins_only_old_ranges_and_counts_what_it_joins(loss: int | None) -> None:
    drops = Drops()
    for number in range(0, 2 * (2 * KEPT), 2):
        reason = DropReason.DAMAGED if number + 1 == loss else DropReason.LIMITS
        drops.add(Drop(number, number, 1, reason))
    before, oldest = list(drops.ranges), 2 * (KEPT + 500)
    drops.compact(oldest)
    assert drops.ranges[-1499:] == before[-1499:], "the newest ranges below the oldest message, and all above"
    assert len(drops.ranges) <= 1503
    assert drops.number == sum(drop.last - drop.first + 1 for drop in drops.ranges)
    assert drops.count(0, 10**6) == drops.number
    assert drops.lost(0, 2 * oldest) == drops.number, "limits lose to exports, too"
    losses = [(drop.first, drop.last) for drop in drops.ranges if drop.reason == DropReason.DAMAGED]
    assert losses == ([] if loss is None else [(loss - 1, loss - 1)])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.sampled_from([*DropReason, None]))),
    st.integers(0, 12),
)
def test_what_an_export_has_passed_is_counted_once_without_what_is_waived(
    steps: list[tuple[int, int, DropReason | None]], waived: int
) -> None:
    """`None`: left out by a filter."""
    passed, position = Passed(waived=waived), 0
    dropped, lost = list[int](), list[int]()
    for sent, size, reason in steps:
        first = position + sent
        position = first + size
        passed = passed.add([(first, position - 1, "filtered" if reason is None else reason.name.lower())])
        if reason is not None:
            dropped += range(first, position)
        if reason in LOST_TO_EXPORTS:
            lost += range(first, position)
        counted = lost[waived:]
        assert (passed.lost, passed.waived) == (len(counted), max(0, waived - len(lost)))
        assert (passed.lost_first, passed.lost_last) == _last_run(counted)
        assert (passed.first, passed.last) == _last_run(dropped)
        newest = next((n for n in range(position - 1, -1, -1) if n not in dropped), -1)
        assert passed.sent_below(position) == newest
        assert passed.sent_below(0) == -1, "what was passed is ahead, with the newest first"


def _last_run(numbers: list[int]) -> tuple[int, int]:
    """The last ones of ascending numbers that follow each other."""
    if not numbers:
        return 0, -1
    first = numbers[-1]
    while first - 1 in numbers:
        first -= 1
    return first, numbers[-1]


class Tight(Files):
    """A disk on which `drops.log` cannot grow by zeros, of which it takes the first half; counts its
    replacements, which may fail, before they have the name or after that.
    """

    def __init__(self) -> None:
        self.full = False
        self.fails = ""
        self.replaced = 0

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        data = b"".join(parts)
        if self.full and path_of(fd).name == "drops.log" and not data.rstrip(b"\0"):
            super().write(fd, [data[: len(data) // 2]], offset)
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        super().write(fd, parts, offset)

    def replace(self, path: Path, content: bytes, *, sync: bool = True) -> None:
        if path.name != "drops.log":
            super().replace(path, content, sync=sync)
            return
        self.replaced += 1
        if self.fails != "before":
            super().replace(path, content, sync=sync)
        if self.fails:
            raise OSError(EIO, os.strerror(EIO))


def test_records_go_beyond_the_room_that_a_full_disk_had_and_none_is_lost_when_there_is_more(
    house: House,
) -> None:
    async def work() -> None:
        house.files = disk = Tight()
        async with house.stream() as stream:
            await put(stream, *(b"%d" % n for n in range(900)))
            log = house.directory() / "drops.log"
            disk.full = True
            for number in range(1, 701, 2):
                size = log.stat().st_size
                stream.drop([(number, number)], DropReason.PURGED)
                assert log.stat().st_size <= max(size, 32 * (number // 2 + 1)), "no zeros are left behind"
            disk.full = False
            stream.drop([(801, 801)], DropReason.PURGED)
            assert log.stat().st_size % ROOM == 0
            left = payloads(stream)
            assert len(left) == 900 - 351
        async with house.stream() as stream:
            assert payloads(stream) == left
        assert house.events == []

    run(work())


@pytest.mark.parametrize("fails", ["before", "after", ""])
def test_a_compact_record_that_could_not_be_made_or_named_takes_no_later_record_with_it(
    house: House, fails: str
) -> None:
    async def work() -> None:
        house.files = disk = Tight()
        async with house.stream() as stream:
            await put(stream, *(b"%d" % n for n in range(6000)))
            log, disk.replaced = house.directory() / "drops.log", 0
            disk.fails = fails
            for number in range(3000):  # in one range, once it is compact
                stream.drop([(number, number)], DropReason.LIMITS)
                if disk.replaced:
                    break
            assert disk.replaced == 1
            disk.fails = ""
            stream.drop([(n, n) for n in range(4000, 4100, 2)], DropReason.PURGED)
            left = payloads(stream)
            assert log.stat().st_size < 3 * ROOM, "and then it is short"
        async with house.stream() as stream:
            assert payloads(stream) == left
        assert house.events == []

    run(work())


def test_a_long_record_that_has_no_shorter_form_is_not_made_again_with_each_drop(house: House) -> None:
    async def work() -> None:
        house.files = disk = Tight()
        async with house.stream() as stream:
            many = 2 * COMPACT_AT // 32
            await put(stream, *([b"x"] * (2 * many + 2)))
            disk.replaced = 0
            stream.drop([(n, n) for n in range(1, 2 * many, 2)], DropReason.LIMITS)
            for number in range(2, 202, 2):
                stream.drop([(number, number)], DropReason.PURGED)
            assert disk.replaced <= 1

    run(work())


@pytest.mark.parametrize("unread", meta.NAMES)
def test_a_copy_of_a_definition_that_cannot_be_read_does_not_matter_if_the_other_is_sound(
    house: House, unread: str
) -> None:
    async def work() -> None:
        async with house.stream():
            pass

    run(work())
    directory = house.directory()
    known, _ = meta.load(directory)
    path = directory / unread
    path.unlink()
    path.mkdir()
    assert meta.load(directory) == (known, [path])
    (other,) = (directory / name for name in meta.NAMES if name != unread)
    other.write_bytes(b"damaged")
    with pytest.raises(IsADirectoryError):
        meta.load(directory)
