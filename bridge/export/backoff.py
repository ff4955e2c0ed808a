"""How long a failed export waits before its next attempt.

A file with a password or a key may be the cause of the failure, and the wait minutes long. So while an export
waits, it looks at its files every `LOOK` seconds, and makes an attempt when one has changed.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Sequence

OUTAGE_PARTS = 16  # after an outage, wait for at most one such part of its length
LOOK = 2.0


class Backoff:
    """Doubles the wait with each failure in a row. Durations are seconds, `until` is monotonic."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self.until = 0.0  # no attempt before this time, unless a file changes
        self.files: Sequence[str] = ()  # those to look at
        self._seen: list[tuple[int, int, int] | None] = []  # as they were at the last attempt
        self._look_at = math.inf
        self.attempts = 0  # failed in a row, since the last one of which a part arrived
        self._refused = 0  # of those, not because of the link
        self._down_since: float | None = None  # when the link began to be the cause of failures

    @property
    def due(self) -> float:
        """When to make an attempt, or to look at the files."""
        return min(self.until, self._look_at)

    def hold(self, seconds: float) -> None:
        """Make no attempt for `seconds`, whatever becomes of the files."""
        self.until = time.monotonic() + seconds
        self._look_at = math.inf

    def attempt(self) -> bool:
        """Whether to make an attempt now; the files are read with it."""
        now = time.monotonic()
        if now < self.until and now < self._look_at:
            return False
        seen = [_stamp(path) for path in self.files]
        if now < self.until and seen == self._seen:
            self._look_at = now + LOOK
            return False
        self._seen, self._look_at = seen, math.inf
        return True

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
        if self.files:
            self._look_at = now + LOOK
        return wait

    def progressed(self) -> None:
        """Begin with short waits again: a part has arrived."""
        self.attempts = self._refused = 0

    def recovered(self) -> None:
        """Start anew after a success."""
        self.progressed()
        self._down_since = None


def _stamp(path: str) -> tuple[int, int, int] | None:
    """What changes when a file is written or replaced; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
