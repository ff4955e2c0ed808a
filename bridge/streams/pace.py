"""Decides when the next group of a stream begins, if the disk is slow.

A client sends its next message as soon as the last one is acknowledged. If each group began as soon as the
disk is free, the clients would split into two halves that take turns: each sync would store half of the
messages, and every message would wait for one and a half syncs.

So after a sync that took `SLOW` or longer, the next group waits for as many messages as were in the last
group or pending during it. It waits at most `LONGEST`, and at most 1/`SHARE` of the time of the sync. If the
messages do not come, the clients do not wait for acknowledgements. Then the following groups begin at once, 1
at first, then 3, 7 and so on up to 63, before the next attempt. On a faster disk two halves are better: one
is received while the other is synced.
"""

from __future__ import annotations

SLOW = 0.003  # seconds of a sync
SHARE = 4
LONGEST = 0.025  # seconds, so that a disk that stalled once does not cause a long wait
MAX_FAILURES = 6


class Pace:
    """Decides for one stream. Times are in seconds of any monotonic clock."""

    __slots__ = ("_at_once", "_expected", "_failures", "_waited", "until")

    def __init__(self) -> None:
        self.until = 0.0  # the latest time at which the next group begins; 0: at once
        self._expected = self._failures = self._at_once = 0
        self._waited = False

    def synced(self, now: float, took: float, under_way: int) -> None:
        """Learn from a sync that took `took`; `under_way` messages were in its group or are pending."""
        self.until, self._waited = 0.0, False
        if self._at_once:
            self._at_once -= 1
        else:
            self.until, self._expected = now + min(took / SHARE, LONGEST), under_way

    def end_wait(self, now: float) -> None:
        """Wait no longer."""
        self.until = min(self.until, now)

    def wants_more(self, now: float, pending: int) -> bool:
        """Return whether the next group waits for more than these messages."""
        if not self.until:
            return False
        if pending >= self._expected:
            self._failures = 0
        elif now < self.until:
            self._waited = True
            return True
        elif self._waited:
            self._failures = min(self._failures + 1, MAX_FAILURES)
            self._at_once = 2**self._failures - 1
        self.until = 0.0
        return False
