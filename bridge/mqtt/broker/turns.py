"""Fairness between clients: expensive packets get a limited time in each turn of the event loop.

What it promises: packets whose cost a client can drive up (a topic that is looked up among the filters of all
clients, a message for many subscribers) take `LIMIT` seconds and one packet more in a turn, however many
clients send them, and however many of them one read brings. So do small packets that come in their thousands.
A client that sends more is read on in a later turn, first come, first served; everybody else has a turn in
between.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.mqtt.broker.line import Line
    from bridge.runtime import Runtime

LIMIT = 0.02  # seconds
MANY, TAKE = 250, 0.001  # small packets of one read, and about the seconds that they take
HOLD = "turn"


class Turns:
    """The time that expensive packets have taken in this turn, and the clients that wait for another one."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.begin = runtime.now  # returns the time at which an expensive packet begins, for `spend`
        self._spent = 0.0
        self._scheduled = False
        self._waiting: deque[Line] = deque()

    @property
    def over(self) -> bool:
        """Return whether no expensive packet should begin in this turn any more."""
        return self._spent >= LIMIT

    def spend(self, began: float) -> None:
        """Count the time that an expensive packet has taken since `began`."""
        self._spent += self.begin() - began
        self._schedule()

    def many(self, line: Line) -> None:
        """A client has sent `MANY` small packets in one read: the next may have to wait for another turn.

        They are not timed one by one, which would take as long as a small packet itself.
        """
        self._spent += TAKE
        self._schedule()
        if self.over:
            self.wait(line)

    def wait(self, line: Line) -> None:
        """Stop reading from a client until there is time."""
        line.hold(HOLD)
        self._waiting.append(line)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._runtime.soon(self._next)

    def _next(self) -> None:
        self._spent, self._scheduled = 0.0, False
        while self._waiting and not self.over:
            self._waiting.popleft().release(HOLD)
        if self._waiting:
            self._schedule()
