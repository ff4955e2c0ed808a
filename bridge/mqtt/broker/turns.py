"""Fairness on the event loop: expensive packets get a bounded time in each of its turns.

What it promises: packets whose cost a client can drive up (a topic that is looked up among the filters of all
clients, a message for many subscribers) take `LIMIT` seconds and one packet more in a turn of the event loop,
however many clients send them, and however many of them one read brings. Who sends more is read on in a
later turn, first come, first served; everybody else has a turn in between.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


class Held(Protocol):
    """A client that can be kept waiting."""

    def hold(self, why: str) -> None:
        """Read no further from it."""

    def release(self, why: str) -> None:
        """Go on reading, unless there is another reason not to."""


LIMIT = 0.02  # seconds
HOLD = "turn"


class Turns:
    """The time that expensive packets have taken in this turn of the loop, and who waits for another one."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._spent = 0.0
        self._scheduled = False
        self._waiting: deque[Held] = deque()

    @property
    def over(self) -> bool:
        """Whether no expensive packet should begin in this turn."""
        return self._spent >= LIMIT

    def spend(self, began: float) -> None:
        """An expensive packet has taken the time since `began` (time.perf_counter)."""
        self._spent += time.perf_counter() - began
        self._schedule()

    def wait(self, conn: Held) -> None:
        """Read no further from a client until there is time."""
        conn.hold(HOLD)
        self._waiting.append(conn)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        self._spent, self._scheduled = 0.0, False
        while self._waiting and not self.over:
            self._waiting.popleft().release(HOLD)
        if self._waiting:
            self._schedule()
