"""Interval sets against plain sets of numbers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bridge.ranges import Ranges, runs, size

pairs = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 15)).map(lambda p: (p[0], p[0] + p[1])), max_size=12
)


def plain(given_pairs: list[tuple[int, int]]) -> set[int]:
    return {number for first, last in given_pairs for number in range(first, last + 1)}


@given(pairs, st.integers(0, 80), st.integers(0, 30))
def test_intervals_behave_as_the_set_of_their_numbers(
    given_pairs: list[tuple[int, int]], low: int, length: int
) -> None:
    numbers, ranges = plain(given_pairs), Ranges(given_pairs)
    wanted = set(range(low, low + length + 1))
    assert plain(list(ranges)) == numbers
    assert ranges.count() == len(numbers) == size(ranges)
    assert plain(ranges.missing(low, low + length)) == wanted - numbers
    assert plain(ranges.common(low, low + length)) == wanted & numbers
    assert ranges.covers(low, low + length) == (wanted <= numbers)
    assert ranges.common(low + 1, low) == ranges.missing(low + 1, low) == []
    assert plain(ranges.take(low, low + length)) == wanted & numbers
    assert ranges == Ranges((number, number) for number in sorted(numbers - wanted))


@given(pairs)
def test_intervals_are_sorted_and_never_touch(given_pairs: list[tuple[int, int]]) -> None:
    kept = list(Ranges(given_pairs))
    assert all(first <= last for first, last in kept)
    assert all(one[1] + 1 < other[0] for one, other in itertools.pairwise(kept))


def test_a_copy_changes_on_its_own() -> None:
    ranges = Ranges([(0, 4)])
    ranges.copy().add(5, 9)
    assert ranges == Ranges([(0, 4)])


@given(st.sets(st.integers(0, 40)))
def test_runs_of_numbers_are_the_intervals_of_their_set(numbers: set[int]) -> None:
    assert runs(numbers) == list(Ranges((number, number) for number in numbers))
