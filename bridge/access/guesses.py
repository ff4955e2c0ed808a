"""The price of guessing passwords and tokens.

Each failure from a network makes the answer to its next one later, up to `LONGEST_DELAY`. Whoever is still
waiting for an answer counts, also after hanging up: at most `AT_A_TIME` answers of one name and network are
under way, so that guessing in parallel is no faster.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable

FIRST_DELAY, LONGEST_DELAY = 0.25, 8.0  # seconds
AT_A_TIME = 16
REMEMBERED = 10_000  # networks with failures


class Guesses:
    """Who guesses, and how often it was wrong."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._under_way: Counter[Hashable] = Counter()

    def begin(self, who: Hashable) -> bool:
        """Whether one more answer may be under way; if so, it counts until `end`."""
        if self._under_way[who] >= AT_A_TIME:
            return False
        self._under_way[who] += 1
        return True

    def end(self, who: Hashable, seconds: float = 0.0) -> None:
        """An answer is given, or will have been after so many seconds."""
        if seconds > 0:
            asyncio.get_running_loop().call_later(seconds, self.end, who)
            return
        self._under_way[who] -= 1
        if not self._under_way[who]:
            del self._under_way[who]

    def wrong(self, network: str) -> float:
        """A guess was wrong; returns how many seconds after it came it is to be answered."""
        count = self._failures.pop(network, 0)
        if len(self._failures) >= REMEMBERED:
            del self._failures[next(iter(self._failures))]
        self._failures[network] = count + 1
        return float(min(FIRST_DELAY * 2 ** min(count, 8), LONGEST_DELAY))

    def right(self, network: str) -> None:
        """Somebody of this network was right."""
        self._failures.pop(network, None)
