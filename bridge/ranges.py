"""Sets of sequence numbers as intervals.

`Ranges` holds closed intervals that are sorted, disjoint and never touch: 0..4 and 5..9 are 0..9. A
healthy stream is one interval, however long it is, so the cost of a set is that of its holes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Pair = tuple[int, int]


class Ranges:
    """A set of integers that is small when they are mostly contiguous."""

    __slots__ = ("_high", "_low")

    def __init__(self, pairs: Iterable[Iterable[int]] = ()) -> None:
        self._low: list[int] = []
        self._high: list[int] = []
        for first, last in pairs:
            self.add(first, last)

    def add(self, first: int, last: int) -> None:
        """Add first..last."""
        low, high = self._low, self._high
        if not low or first > high[-1] + 1:  # the common case: append at the end
            low.append(first)
            high.append(last)
            return
        left = bisect_left(high, first - 1)  # the first interval that touches from the left
        right = bisect_right(low, last + 1)  # one past the last that touches
        if left < right:
            first = min(first, low[left])
            last = max(last, high[right - 1])
        low[left:right] = [first]
        high[left:right] = [last]

    def update(self, pairs: Iterable[Pair]) -> None:
        """Add several intervals."""
        for first, last in pairs:
            self.add(first, last)

    def missing(self, first: int, last: int) -> list[Pair]:
        """Return the parts of first..last that are not in the set."""
        holes: list[Pair] = []
        index = bisect_left(self._high, first)
        while first <= last and index < len(self._low) and self._low[index] <= last:
            if self._low[index] > first:
                holes.append((first, self._low[index] - 1))
            first = self._high[index] + 1
            index += 1
        if first <= last:
            holes.append((first, last))
        return holes

    def common(self, first: int, last: int) -> list[Pair]:
        """Return the parts of first..last that are in the set."""
        shared: list[Pair] = []
        index = bisect_left(self._high, first)
        while first <= last and index < len(self._low) and self._low[index] <= last:
            shared.append((max(first, self._low[index]), min(last, self._high[index])))
            index += 1
        return shared

    def take(self, first: int, last: int) -> list[Pair]:
        """Remove first..last, and return the parts that were in the set."""
        taken = self.common(first, last)
        if taken:
            left = bisect_left(self._high, first)
            right = left + len(taken)
            ends = ((self._low[left], first - 1), (last + 1, self._high[right - 1]))
            kept = [(low, high) for low, high in ends if low <= high]
            self._low[left:right] = [low for low, _ in kept]
            self._high[left:right] = [high for _, high in kept]
        return taken

    def covers(self, first: int, last: int) -> bool:
        """Return whether all of first..last is in the set."""
        index = bisect_left(self._high, first)
        return index < len(self._low) and self._low[index] <= first and last <= self._high[index]

    def copy(self) -> Ranges:
        """Return a set of its own with the same numbers."""
        twin = Ranges()
        twin._low, twin._high = self._low.copy(), self._high.copy()
        return twin

    @property
    def first(self) -> int:
        """The smallest number; the set must not be empty."""
        return self._low[0]

    @property
    def last(self) -> int:
        """The largest number; the set must not be empty."""
        return self._high[-1]

    def count(self) -> int:
        """Return how many numbers are in the set."""
        return sum(self._high) - sum(self._low) + len(self._low)

    def __iter__(self) -> Iterator[Pair]:
        return iter(zip(self._low, self._high, strict=True))

    def __bool__(self) -> bool:
        return bool(self._low)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self._low == other._low and self._high == other._high

    __hash__ = None  # type: ignore[assignment] # mutable

    def __repr__(self) -> str:
        return f"Ranges({list(self)})"


def runs(numbers: Iterable[int]) -> list[Pair]:
    """Return the intervals of some numbers, in any order."""
    found: list[Pair] = []
    for number in sorted(numbers):
        if found and number <= found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def size(pairs: Iterable[Pair]) -> int:
    """Return how many numbers disjoint intervals hold."""
    return sum(last - first + 1 for first, last in pairs)
