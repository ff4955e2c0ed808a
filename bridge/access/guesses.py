"""Delays that make guessing passwords and tokens slow.

Each failure from a network delays the reply to the next one, up to `LONGEST_DELAY`. At most `AT_A_TIME`
attempts of one name and network are in progress, so parallel guessing is no faster. A client that disconnects
still counts until its reply would have been sent.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Hashable

from bridge.access.remembered import remember

FIRST_DELAY, LONGEST_DELAY = 0.25, 8.0  # seconds
AT_A_TIME = 16


def key_of(network: str, name: str | None) -> tuple[str, bytes]:
    """Return the key of attempts with a name, however long the name is."""
    return network, hashlib.sha256((name or "").encode(errors="surrogatepass")).digest()


class Guesses:
    """Failed attempts by network, and attempts in progress by key (a network, or see `key_of`)."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._in_progress: Counter[Hashable] = Counter()

    def begin(self, key: Hashable) -> bool:
        """Return whether one more attempt may begin. If so, it counts until `end`."""
        if self._in_progress[key] >= AT_A_TIME:
            return False
        self._in_progress[key] += 1
        return True

    def end(self, key: Hashable, seconds: float = 0.0) -> None:
        """End an attempt, now or after this many seconds."""
        if seconds > 0:
            asyncio.get_running_loop().call_later(seconds, self.end, key)
            return
        self._in_progress[key] -= 1
        if not self._in_progress[key]:
            del self._in_progress[key]

    def wrong(self, network: str) -> float:
        """Count a wrong guess. Returns the seconds by which to delay the reply."""
        count = self._failures.get(network, 0)
        remember(self._failures, network, count + 1)
        return float(min(FIRST_DELAY * 2 ** min(count, 8), LONGEST_DELAY))

    def right(self, network: str) -> None:
        """Forget the failures of a network whose client gave the right password."""
        self._failures.pop(network, None)
