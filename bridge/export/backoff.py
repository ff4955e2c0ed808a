"""How long a failed export waits before its next attempt."""

from __future__ import annotations

import random
import time

OUTAGE_PARTS = 16  # after an outage, wait for at most one such part of its length


class Backoff:
    """Doubles the wait with each failure in a row. Durations are seconds, `until` is monotonic."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self.until = 0.0  # no attempt before this time
        self.attempts = 0  # failed in a row, since the last one of which a part arrived
        self._refused = 0  # of those, not because of the link
        self._down_since: float | None = None  # when the link began to be the cause of failures

    def hold(self, seconds: float) -> None:
        """Make no attempt for `seconds`."""
        self.until = time.monotonic() + seconds

    def failed(self, after: float | None, *, cut: bool) -> float:
        """Count a failed attempt; return the wait, at least `after`. `cut`: the link was the cause."""
        now = time.monotonic()
        # The attempts of an outage say nothing about a server that then answers: it is busy for a moment.
        doubled = min(self.attempts if cut else self._refused, 30)
        wait: float = min(self._first * 2**doubled, self._longest)
        if cut:
            # A longer wait relieves no server, and a link that is up again may not stay up for long: bound
            # the uptime that is lost by a share of the outage.
            self._down_since = self._down_since or now
            wait = min(wait, max(self._first, (now - self._down_since) / OUTAGE_PARTS))
        else:
            self._down_since = None
            self._refused += 1
        self.attempts += 1
        wait = max(wait * random.uniform(0.5, 1.0), after or 0.0)
        self.hold(wait)
        return wait

    def progressed(self) -> None:
        """Begin with short waits again: a part has arrived."""
        self.attempts = self._refused = 0

    def recovered(self) -> None:
        """Start anew after a success."""
        self.progressed()
        self._down_since = None
