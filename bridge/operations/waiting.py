"""Reads that wait for new messages, and are woken by the commit that completes their minimum.

Each stream has a heap of waiting reads, ordered by the sequence number that they need. A commit compares the
top of the heap and wakes only the reads that it completes, so thousands of waiting reads cost a commit one
comparison. There is no polling.
"""

from __future__ import annotations

import asyncio
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.streams.stream import Stream

_Entry = tuple[int, int, asyncio.Future[None]]  # the number needed, the order of arrival, and what to wake


class Waiting:
    """The waiting reads of all streams. Must be used in the event loop's thread."""

    def __init__(self) -> None:
        self._heaps: dict[Stream, list[_Entry]] = {}
        self._order = count()
        self._stale = 0

    def __len__(self) -> int:
        """How many reads wait, or have timed out and are not yet removed."""
        return sum(map(len, self._heaps.values()))

    async def until(self, stream: Stream, next_sequence: int, deadline: float) -> None:
        """Wait until the stream has this next number or is deleted, or until `deadline` (loop time)."""
        loop = asyncio.get_running_loop()
        if stream.next_sequence >= next_sequence or loop.time() >= deadline:
            return
        woken: asyncio.Future[None] = loop.create_future()
        heappush(self._heaps.setdefault(stream, []), (next_sequence, next(self._order), woken))
        timer = loop.call_at(deadline, _wake, woken)
        try:
            await woken
        finally:
            timer.cancel()
            if stream.next_sequence < next_sequence:
                self._timed_out()

    def wake(self, stream: Stream) -> None:
        """Wake the reads that new messages of a stream complete."""
        heap = self._heaps.get(stream)
        if heap is None:
            return
        while heap and heap[0][0] <= stream.next_sequence:
            _wake(heappop(heap)[2])
        if not heap:
            del self._heaps[stream]

    def wake_all(self, stream: Stream) -> None:
        """Wake all reads of a stream that has changed or was deleted, to check again."""
        for _, _, woken in self._heaps.pop(stream, ()):
            _wake(woken)

    def _timed_out(self) -> None:
        """Remove the reads that have timed out, once they are many."""
        self._stale += 1
        if self._stale < 64 + len(self) // 2:
            return
        self._stale = 0
        for stream, heap in list(self._heaps.items()):
            heap[:] = [entry for entry in heap if not entry[2].done()]
            if heap:
                heapify(heap)
            else:
                del self._heaps[stream]


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
