"""When the next group of a stream begins, if the disk is slow.

A client whose message was acknowledged sends the next one at once. If each group began as soon as the disk
is free, those who wait for it and those just acknowledged would take turns without end: the disk
would store half of what is under way with each sync, and every message would wait for one and a half.

So after a sync that took `SLOW` or longer the next group waits until as many messages have come as are
known to be under way, those just stored and those that wait already, but no longer than a `SHARE` of what
the sync took, and `LONGEST`. Where that was in vain, senders keep a time of their own: the following groups
begin at once, one at first, then 3, 7 and so on up to 63, until it is tried again. On a faster disk two
groups in turn are better: one is received while the other is synced.
"""

from __future__ import annotations

SLOW = 0.003  # seconds of a sync
SHARE = 4
LONGEST = 0.025  # seconds: a disk that has stalled once is not waited for
MAX_FAILURES = 6


class Pace:
    """The rhythm of one stream on a slow disk. Times in seconds of any steady clock."""

    __slots__ = ("_at_once", "_expected", "_failures", "_waited", "until")

    def __init__(self) -> None:
        self.until = 0.0  # the time when the next group begins at the latest; 0: at once
        self._expected = self._failures = self._at_once = 0
        self._waited = False

    def synced(self, now: float, took: float, under_way: int) -> None:
        """A group is on the disk after `took`; so many messages were in it or wait for the next."""
        self.until, self._waited = 0.0, False
        if self._at_once:
            self._at_once -= 1
        else:
            self.until, self._expected = now + min(took / SHARE, LONGEST), under_way

    def end_wait(self, now: float) -> None:
        """Wait no longer."""
        self.until = min(self.until, now)

    def wants_more(self, now: float, pending: int) -> bool:
        """Whether the next group waits for more than these messages."""
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
