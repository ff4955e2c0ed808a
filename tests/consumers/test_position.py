"""The position of a consumer against a plain model, and its file cut, flipped, outgrown and lost."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.consumers.journal import Identity, Journal, half_for, highest_delivered, load, path_of
from bridge.consumers.position import Position
from bridge.errors import CorruptData
from bridge.streams.layout import Files

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["new", "new", "again", "ack", "reject", "nack", "skip", "save", "time"]),
        st.integers(0, 20),
    ),
    max_size=60,
)
IDENTITY = Identity(7, 0, "")


@given(STEPS, st.integers(0, 5))
def test_a_position_is_what_its_changes_make_and_has_no_more_holes_than_leases(
    steps: list[tuple[str, int]], start: int
) -> None:
    position, now = Position(start), 0
    changes = [position.whole(now)]
    settled, leases = set(range(start)), dict[int, tuple[int, int]]()  # number: until, deliveries
    for what, number in steps:
        if what == "new":
            number = position.frontier
            position.deliver(number, now + 10, 1, "w")
            leases[number] = now + 10, 1
        elif what == "time":
            now += number
        elif what == "save":
            changes.append(position.take(now))
        elif what == "skip":
            gone = range(min(number, position.frontier), min(number, position.frontier) + 3)
            position.skip(gone[0], gone[-1])
            leases = {n: lease for n, lease in leases.items() if n not in gone}
            settled |= set(gone)
        elif number in leases:
            if what == "again":
                position.deliver(number, now + 10, 1, "w")
                leases[number] = now + 10, leases[number][1] + 1
            elif what == "nack":
                position.hold(number, now + number, None)
                leases[number] = now + number, leases[number][1]
            else:
                position.settle([number], rejected=what == "reject", now=0)
                del leases[number]
                settled.add(number)
        assert {n: (lease.until, lease.deliveries) for n, lease in position.leases.items()} == leases
        assert {n for a, b in position.settled for n in range(a, b + 1)} == settled
        assert settled | leases.keys() == set(range(position.frontier))
        assert len(list(position.settled)) <= len(leases) + 1
        assert position.upto == min(leases, default=position.frontier)
        assert position.next_due() == min((until for until, _ in leases.values()), default=None)
    changes.append(position.take(now))
    again = Position(0)
    for change in changes:
        again.apply(change, now)
    assert (again.settled, again.frontier) == (position.settled, position.frontier)
    assert again.counts == position.counts
    assert {n: one.deliveries for n, one in again.leases.items()} == {n: d for n, (_, d) in leases.items()}
    assert all(again.leases[n].until <= max(until, now + 20) for n, (until, _) in leases.items())
    again.queue_all()
    assert sorted(again.due(10**9, 10**9)) == sorted(leases)


def test_a_position_that_nobody_fetches_from_or_saves_does_not_grow() -> None:
    position = Position(0)
    position.deliver(0, 1, 1, "w")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1, 20_001):
            position.skip(number, number)  # a message that is not for this consumer
            position.hold(0, number, "w")  # a worker that goes on and on
            position.requeue(0)  # a dead letter that its stream does not take
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()
    assert position.due(20_000, 9) == [0]
    change = position.take(20_000)
    assert (change.settled, [lease[:2] for lease in change.leases]) == ([(1, 20_000)], [(0, 20_000)])


def test_a_clock_that_was_lost_makes_a_lease_last_its_whole_time_again_and_no_longer() -> None:
    position = Position(0)
    position.deliver(0, 1_000_030, 1, "w")
    change = position.take(1_000_000)
    for now, until in ((1_000_010, 1_000_030), (50, 80), (2_000_000, 1_000_030)):
        again = Position(0)
        again.apply(change, now)
        assert again.leases[0].until == until


def written(path: Path, changes: int) -> list[Position]:
    """Write a file with so many changes; returns the position after each."""
    position, found = Position(0), [Position(0)]
    with closing(Journal(Files(), path, IDENTITY, None)) as journal:
        journal.write_whole(position.whole(0), 1)
        for number in range(changes):
            position.deliver(number, number + 100, 5, "w")
            if number % 3 == 2:
                position.settle([number - 1], rejected=False, now=number)
            change = position.take(number)
            if journal.fits(change):
                journal.append(change)
            else:
                journal.write_whole(position.whole(number), 1)
            found.append(read(path))
    return found


def read(path: Path) -> Position:
    """The position in a file; raises CorruptData."""
    loaded = load(path)
    assert loaded is not None
    assert loaded.identity == IDENTITY
    position = Position(0)
    for change in loaded.changes:
        position.apply(change, 0)
    return position


def summary(position: Position) -> tuple[object, ...]:
    return position.frontier, list(position.settled), sorted(position.leases)


def test_a_file_that_is_cut_or_flipped_anywhere_gives_an_earlier_position_or_none(tmp_path: Path) -> None:
    path = tmp_path / "c.consumer"
    known = [summary(position) for position in written(path, 12)]
    data = path.read_bytes()
    used = len(data.rstrip(b"\0"))
    assert summary(read(path)) == known[-1]
    for at in range(used):
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        torn = data[:at] + bytes(len(data) - at)
        for damaged in (bytes(flipped), torn):
            path.write_bytes(damaged)
            with suppress(CorruptData):
                assert summary(read(path)) in known


def test_the_half_that_counts_is_on_the_disk_before_the_other_one_is_overwritten(tmp_path: Path) -> None:
    """A process is killed before the sync of a half; the next one finds it in the page cache."""
    path, calls = tmp_path / "c.consumer", list[str]()

    class Noting(Files):
        def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
            calls.append("write")
            super().write(fd, parts, offset)

        def sync(self, fd: int) -> None:
            calls.append("sync")
            super().sync(fd)

    written(path, 2)
    with closing(Journal(Noting(), path, IDENTITY, load(path))) as journal:
        journal.write_whole(Position(5).whole(0), 1)
    assert calls == ["sync", "write", "sync"]


def test_a_torn_write_of_the_whole_position_costs_nothing(tmp_path: Path) -> None:
    path, half = tmp_path / "c.consumer", half_for(1)
    position = Position(0)
    with closing(Journal(Files(), path, IDENTITY, None)) as journal:
        journal.write_whole(position.whole(0), 1)
        while True:
            position.deliver(position.frontier, 100, 5, "w")
            before, change = path.read_bytes(), position.take(0)
            if not journal.fits(change):
                break
            journal.append(change)
        known = summary(read(path))
        journal.write_whole(position.whole(0), 1)
    after = path.read_bytes()
    assert summary(read(path)) == summary(position) != known
    whole = len(after[half:].rstrip(b"\0"))
    assert after[:half] == before[:half]
    for written in range(0, whole, 97):
        path.write_bytes(after[: half + written] + before[half + written :])
        assert summary(read(path)) == known


def test_a_file_has_room_for_the_leases_it_is_made_for_and_grows_for_more(tmp_path: Path) -> None:
    path = tmp_path / "c.consumer"
    position = Position(0)
    with closing(Journal(Files(), path, IDENTITY, None)) as journal:
        journal.write_whole(position.whole(0), 1000)
        made = path.stat()
        for number in range(2000):
            position.deliver(number, 2**40 + number, 2**31, "w")
            if number % 2:
                position.settle([number], rejected=False, now=2**40)
        journal.write_whole(position.whole(0), 1000)
        assert path.stat().st_ino == made.st_ino, "the worst position fits"
        journal.append(position.take(0))
        for number in range(2000, 9000):
            position.deliver(number, 2**40 + number, 2**31, "w")
        journal.write_whole(position.whole(0), 8000)
        assert path.stat().st_size > made.st_size
    assert summary(read(path)) == summary(position)


def test_an_empty_file_is_damaged_and_a_missing_one_is_new(tmp_path: Path) -> None:
    path = tmp_path / "c.consumer"
    assert load(path) is None
    path.write_bytes(b"")
    with pytest.raises(CorruptData):
        load(path)


@pytest.mark.parametrize("first", [2**63 - 3, 2**63 - 1])
def test_the_last_numbers_are_leased_settled_and_kept_in_the_file(tmp_path: Path, first: int) -> None:
    last = 2**63 - 1
    position = Position(first)
    position.deliver(last, 2**62, 1, "w")
    with closing(Journal(Files(), tmp_path / "c", IDENTITY, None)) as journal:
        journal.write_whole(position.whole(0), 1)
        position.settle([last], rejected=False, now=0)
        position.skip(first, last)
        journal.append(position.take(0))
    loaded = load(tmp_path / "c")
    assert loaded is not None
    again = Position(0)
    for change in loaded.changes:
        again.apply(change, 0)
    assert (again.upto, again.frontier, list(again.settled), again.leases) == (2**63, 2**63, [(0, last)], {})


def test_numbering_goes_on_behind_all_that_was_delivered_since_the_last_whole_position(
    tmp_path: Path,
) -> None:
    path, position = path_of(tmp_path, "s", "c"), Position(0)
    with closing(Journal(Files(), path, IDENTITY, None)) as journal:
        journal.write_whole(position.whole(0), 1)
        for number in range(3):
            position.deliver(number, 100, 1, "w")
            journal.append(position.take(0))
            assert highest_delivered(tmp_path, "s", IDENTITY.epoch) == number
