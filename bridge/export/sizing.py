"""How large one attempt may be on a link that does not last.

What an attempt has sent is lost when its connection breaks, so an attempt must be short compared with the
time for which the link stays up. That time is learned from operation:

* A new export starts with `FIRST` bytes. Until its first break, a delivery raises the limit to what the link
  moves in `SHORT` seconds: a fast link has no limit after two small requests.
* The link counts as up from the beginning of the first delivery after a break.
* A break that cost more than `1/PARTS` of that time lowers the limit to what the link moves in such a part.
  If nothing was delivered before it, the attempt took all of the time: the limit is `1/PARTS` of its size.
* A delivery that took less than `1/PARTS` of the time for which the link has been up doubles the limit.

So the limit follows the link within a few breaks, whatever its rate, and on a link without breaks there is
soon none. At most about `2/PARTS` of a window is wasted, on average a fraction of that; of the first window,
about `SHORT` seconds if that is more.

While newer messages go before a backlog (`order`), they wait for the request under way. So a request is a
slice then: as large as the link moves in `SLICE` seconds. More would make new messages late, and less would
slow the backlog down, since each request costs a round trip and its headers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PARTS = 12  # of the time for which the link stays up
MIN_SIZE = 4096  # bytes; smaller requests have more overhead than content
FIRST = 16 * 1024  # bytes; TCP sends them in about one round trip (RFC 6928)
SHORT = 1.0  # seconds; a link is not worth using if it never stays up for several times as long
SLICE = 3.5  # seconds


class Sizing:
    """The limit of one export's attempts; sizes in bytes of payloads and topics, times in seconds."""

    def __init__(self, limit: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit` is `FIRST` for a new export, later what an earlier process learned; None: no limit."""
        self.limit = limit
        self._unbroken = True  # no break has shown how long the link stays up
        self._clock = clock
        self._up_since: float | None = None
        self._rate = 0.0  # bytes per second, of the last delivery large enough to measure it

    def delivered(self, size: int, seconds: float, largest: int) -> None:
        """An attempt was answered. `largest` is the size of a batch without this limit."""
        now = self._clock()
        if self._up_since is None:
            self._up_since, self._rate = now - seconds, 0.0
        limited = self.limit is not None and size * 2 >= self.limit
        if not self._rate or size * 2 >= (self.limit or largest):  # small ones measure latency
            self._rate = size / max(seconds, 0.001)
        if self.limit is not None and limited:
            wanted = self.limit * 2 if seconds * PARTS <= now - self._up_since else self.limit
            if self._unbroken:
                wanted = max(wanted, int(self._rate * SHORT))
            self.limit = wanted if wanted < largest else None

    def cut(self, size: int, seconds: float) -> None:
        """An attempt ended without an answer, after it had sent something."""
        since, self._up_since = self._up_since, None
        if since is None:
            wanted = size // PARTS
        else:
            up = self._clock() - since
            if seconds * PARTS <= up:
                return  # little was lost: the server had closed a kept connection, for example
            wanted = min(int(self._rate * up / PARTS), size)
        self.limit, self._unbroken = max(min(wanted, self.limit or wanted), MIN_SIZE), False


class Slices:
    """How large a request may be while newer messages wait for its end; in bytes of payloads and topics."""

    def __init__(self) -> None:
        self.size = FIRST

    def delivered(self, size: int, seconds: float) -> None:
        """A request was answered; it kept the link busy for `seconds`."""
        wanted = int(size * SLICE / max(seconds, 0.001))
        if size * 2 >= self.size:
            self.size = max(min(wanted, self.size * 2), MIN_SIZE)
        elif seconds > SLICE:  # a small one measures latency more than the rate
            self.size = max(self.size // 2, MIN_SIZE)

    def bounded(self, limit: int | None) -> int:
        """The smaller one of a slice and a limit; None: no limit."""
        return min(limit or self.size, self.size)
