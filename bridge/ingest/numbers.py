"""The rows of one object by their numbers: an object may lack numbers of its range (`bridge.filtered`).

For the state, left-out numbers are counted by chunks of 2^20 numbers, from a multiple of 2^20 on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

import pyarrow as pa

from bridge.ranges import Pair

CHUNK_BITS = 20


class Numbered:
    """A table with the rows of one object, sorted by number, and its numbers."""

    def __init__(self, table: pa.Table, numbers: pa.ChunkedArray) -> None:
        """`numbers` are those of the rows (int64, without nulls), at least one."""
        self.table = table
        found = numbers.combine_chunks()
        everything = memoryview(found.buffers()[1]).cast("B").cast("q")
        self._numbers = everything[found.offset : found.offset + len(found)]

    def part(self, first: int, last: int) -> pa.Table:
        """Return the rows with the numbers first..last."""
        start, end = self._span(first, last)
        return self.table.slice(start, end - start)

    def parts(self, fresh: Iterable[Pair]) -> Iterator[pa.Table]:
        """Yield the rows of each range that has any."""
        for first, last in fresh:
            if (part := self.part(first, last)).num_rows:
                yield part

    def nearest(self, first: int, last: int) -> tuple[int, int]:
        """Return the indexes of the first and last row of a range; of the row before it if it has none."""
        start, end = self._span(first, last)
        if start < end:
            return start, end - 1
        return (max(start - 1, 0),) * 2

    def left_out(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return how many of first..last are in no row, by the number of their chunk."""
        found = []
        for chunk in range(first >> CHUNK_BITS, (last >> CHUNK_BITS) + 1):
            low, high = within(chunk, first, last)
            start, end = self._span(low, high)
            if (count := high - low + 1 - (end - start)) > 0:
                found.append((chunk, count))
        return found

    def _span(self, first: int, last: int) -> tuple[int, int]:
        return bisect_left(self._numbers, first), bisect_right(self._numbers, last)


def within(chunk: int, first: int, last: int) -> Pair:
    """Return the part of first..last in a chunk."""
    start = chunk << CHUNK_BITS
    return max(first, start), min(last, start + (1 << CHUNK_BITS) - 1)
