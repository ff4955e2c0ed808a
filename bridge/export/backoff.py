"""How long a failed export waits before its next attempt."""

from __future__ import annotations

import random
import time

AWAY_PARTS = 16  # of the time for which the link was away, one is waited at most


class Backoff:
    """Doubles the wait with each failure in a row. Durations are seconds, `until` is monotonic."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self.until = 0.0  # no attempt before
        self.attempts = 0  # in a row, failed
        self._down_since: float | None = None  # since when the link has been the cause of failures

    def hold(self, seconds: float) -> None:
        """Make no attempt for so long."""
        self.until = time.monotonic() + seconds

    def failed(self, after: float | None, *, cut: bool) -> float:
        """An attempt has failed; returns the wait, `after` at least. `cut`: the link was the cause."""
        now = time.monotonic()
        wait: float = min(self._first * 2**self.attempts, self._longest)
        if cut:
            # Nobody is relieved by a longer wait, and a link that is back may soon be gone again: what is
            # lost of its time is a part of the time for which it was away.
            self._down_since = self._down_since or now
            wait = min(wait, max(self._first, (now - self._down_since) / AWAY_PARTS))
        else:
            self._down_since = None
        self.attempts = min(self.attempts + 1, 30)
        wait = max(wait * random.uniform(0.5, 1.0), after or 0.0)
        self.hold(wait)
        return wait

    def recovered(self) -> None:
        """An attempt has succeeded."""
        self.attempts, self._down_since = 0, None
