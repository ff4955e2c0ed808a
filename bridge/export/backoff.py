"""How long a failed export waits before its next attempt.

The cause may be a file with a password or a key, and the wait may be minutes long. So while an export waits,
it checks its files every `LOOK` seconds, and makes an attempt when one has changed.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence

OUTAGE_PARTS = 16  # after an outage, wait for at most one such part of its length
LOOK = 2.0
LONGEST_ASKED = 86_400.0  # the longest wait that a plugin can ask for


class Backoff:
    """Doubles the wait with each failure in a row. Durations are in seconds; `until` is monotonic."""

    def __init__(self, first: float, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first, self._longest, self._clock = first, longest, clock
        self.until = 0.0  # no attempt before this time, unless a file changes
        self.files: Sequence[str] = ()  # those to check
        self._seen: list[tuple[int, int, int] | None] = []  # as they were at the last attempt
        self._look_at = math.inf
        self.attempts = 0  # failures in a row, since the last attempt of which a part arrived
        self._refused = 0  # of these, failures that the link did not cause
        self._down_since: float | None = None  # when the link began to be the cause of failures

    @property
    def due(self) -> float:
        """Return when to make an attempt or check the files."""
        return min(self.until, self._look_at)

    @property
    def is_down(self) -> bool:
        """Return whether the link was the cause of the last failure, and nothing has succeeded since."""
        return self._down_since is not None

    def hold(self, seconds: float) -> None:
        """Make no attempt for `seconds`, even if a file changes."""
        self.until = self._clock() + seconds
        self._look_at = math.inf

    def attempt(self) -> bool:
        """Return whether to make an attempt now; it will use the files as they are."""
        now = self._clock()
        if now < self.until and now < self._look_at:
            return False
        seen = [_stamp(path) for path in self.files]
        if now < self.until and seen == self._seen:
            self._look_at = now + LOOK
            return False
        self._seen, self._look_at = seen, math.inf
        return True

    def failed(self, after: object, *, cut: bool) -> float:
        """Count a failed attempt; return the wait. `cut`: the link was the cause.

        The wait is at least `after`, up to a day. It comes from a plugin: what is no number is ignored.
        """
        now = self._clock()
        # The number of attempts during an outage says nothing about a server that answers afterwards.
        doubled = min(self.attempts if cut else self._refused, 30)
        wait: float = min(self._first * 2**doubled, self._longest)
        if cut:
            # A longer wait would not relieve a server, and the link may not stay up for long. So limit the
            # lost uptime to a share of the outage.
            self._down_since = self._down_since or now
            wait = min(wait, max(self._first, (now - self._down_since) / OUTAGE_PARTS))
        else:
            self._down_since = None
            self._refused += 1
        self.attempts += 1
        wait = max(wait * random.uniform(0.5, 1.0), _seconds(after))
        self.hold(wait)
        if self.files:
            self._look_at = now + LOOK
        return wait

    def progressed(self) -> None:
        """Return to short waits, because a part has arrived."""
        self.attempts = self._refused = 0

    def recovered(self) -> None:
        """Reset everything after a success."""
        self.progressed()
        self._down_since = None


def _seconds(asked: object) -> float:
    """Return the wait that a plugin asks for; 0.0 for what is no number."""
    if not isinstance(asked, int | float) or asked != asked:  # NaN differs from itself
        return 0.0
    return max(0.0, min(asked, LONGEST_ASKED))


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Return a stamp that changes when the file is written or replaced; None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
