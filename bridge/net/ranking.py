"""Who has most, of many whose shares change all the time.

A change costs O(log n), and so does the question, on average: `first` looks at a heap in which outdated
entries stay until they come to its top.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Ranking(Generic[T]):
    """Some holders with their ranks; the least rank is the first, so that of a share is its negative."""

    def __init__(self) -> None:
        self._ranks: dict[T, Any] = {}
        self._heap: list[tuple[Any, int, T]] = []
        self._entries = 0  # made so far; of equal ranks, the older entry is first

    def set(self, holder: T, rank: Any) -> None:
        """A holder has another rank now; None: it has nothing any more."""
        if rank is None:
            self._ranks.pop(holder, None)
        elif self._ranks.get(holder) != rank:
            self._ranks[holder] = rank
            self._push(holder, rank)
        if len(self._heap) > 2 * len(self._ranks) + 100:
            self._heap.clear()
            for one, its in self._ranks.items():
                self._push(one, its)

    def first(self) -> T | None:
        """The holder with the least rank; None if there is no holder."""
        while self._heap:
            rank, _, holder = self._heap[0]
            if self._ranks.get(holder) == rank:
                return holder
            heapq.heappop(self._heap)
        return None

    def _push(self, holder: T, rank: Any) -> None:
        self._entries += 1
        heapq.heappush(self._heap, (rank, self._entries, holder))
