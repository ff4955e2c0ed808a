"""Reads that wait for messages to come: woken by the commit that completes what they wait for.

Per stream there is a heap of those who wait, by the sequence number that they need. A commit looks at
the top of it and wakes whom it satisfies, nobody else: thousands who wait cost a commit one comparison,
and there is no polling.
"""

from __future__ import annotations

import asyncio
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.streams.stream import Stream

_Entry = tuple[int, int, asyncio.Future[None]]  # number needed, order of arrival, told when it is there


class Waiting:
    """Who waits for which message, by stream. For the event loop's thread."""

    def __init__(self) -> None:
        self._heaps: dict[Stream, list[_Entry]] = {}
        self._order = count()
        self._given_up = 0

    def __len__(self) -> int:
        """How many wait, or have given up and are not yet forgotten."""
        return sum(map(len, self._heaps.values()))

    async def until(self, stream: Stream, next_sequence: int, deadline: float) -> None:
        """Wait until a stream has grown to this next number, is gone, or the loop says `deadline`."""
        loop = asyncio.get_running_loop()
        if stream.next_sequence >= next_sequence or loop.time() >= deadline:
            return
        told: asyncio.Future[None] = loop.create_future()
        heappush(self._heaps.setdefault(stream, []), (next_sequence, next(self._order), told))
        timer = loop.call_at(deadline, _tell, told)
        try:
            await told
        finally:
            timer.cancel()
            if stream.next_sequence < next_sequence:
                self._gave_up()

    def wake(self, stream: Stream) -> None:
        """A stream has grown."""
        heap = self._heaps.get(stream)
        if heap is None:
            return
        while heap and heap[0][0] <= stream.next_sequence:
            _tell(heappop(heap)[2])
        if not heap:
            del self._heaps[stream]

    def wake_all(self, stream: Stream) -> None:
        """A stream has changed or is gone: everybody looks again."""
        for _, _, told in self._heaps.pop(stream, ()):
            _tell(told)

    def _gave_up(self) -> None:
        """Forget those who gave up, before they are many."""
        self._given_up += 1
        if self._given_up < 64 + len(self) // 2:
            return
        self._given_up = 0
        for stream, heap in list(self._heaps.items()):
            heap[:] = [entry for entry in heap if not entry[2].done()]
            if heap:
                heapify(heap)
            else:
                del self._heaps[stream]


def _tell(told: asyncio.Future[None]) -> None:
    if not told.done():
        told.set_result(None)
