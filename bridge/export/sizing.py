"""How large an attempt may be on a link that breaks often.

When its connection breaks, everything that an attempt has sent is lost. So an attempt must be short compared
with the time for which the link stays up. That time is learned from operation:

* A new export starts with `FIRST` bytes. Until its first break, a delivery raises the limit to what the link
  moves in `SHORT` seconds: a fast link has no limit after two small requests.
* The link counts as up from the beginning of the first delivery after a break.
* A break that cost more than `1/PARTS` of that time lowers the limit to what the link moves in such a part.
  If nothing was delivered before the break, the attempt took all of the time: the limit is `1/PARTS` of its
  size.
* A delivery that took less than `1/PARTS` of the time for which the link has been up doubles the limit.

So the limit adapts to the link within a few breaks, whatever its rate, and on a link without breaks it soon
disappears. At most about `2/PARTS` of the uptime is wasted, on average a fraction of that; of the first
uptime, about `SHORT` seconds if that is more.

While newer messages go before a backlog (`order`), they still wait for the request in flight. So a request is
then limited to a slice: as much as the link moves in `SLICE` seconds. More would delay new messages, and less
would slow down the backlog, because each request costs a round trip and its headers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PARTS = 12  # an attempt should take at most 1/PARTS of the uptime
MIN_SIZE = 4096  # bytes; smaller requests have more overhead than content
FIRST = 16 * 1024  # bytes; TCP sends them in about one round trip (RFC 6928)
SHORT = 1.0  # seconds; a link is not worth using if it never stays up for several times as long
SLICE = 3.5  # seconds


class Sizing:
    """The limit of one export's attempts; sizes in bytes of payloads and topics, times in seconds."""

    def __init__(self, limit: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit` is `FIRST` for a new export, otherwise what an earlier process learned; None: no limit."""
        self.limit = limit
        self._unbroken = True  # no break yet, so the uptime of the link is unknown
        self._clock = clock
        self._up_since: float | None = None
        self._rate = 0.0  # bytes per second, of the last delivery large enough to measure it

    def delivered(self, size: int, seconds: float, largest: int) -> None:
        """Learn from an answered attempt. `largest` is the size of a batch without this limit."""
        now = self._clock()
        if self._up_since is None:
            self._up_since, self._rate = now - seconds, 0.0
        limited = self.limit is not None and size * 2 >= self.limit
        if not self._rate or size * 2 >= (self.limit or largest):  # small ones measure only the latency
            self._rate = size / max(seconds, 0.001)
        if self.limit is not None and limited:
            wanted = self.limit * 2 if seconds * PARTS <= now - self._up_since else self.limit
            if self._unbroken:
                wanted = max(wanted, int(self._rate * SHORT))
            self.limit = wanted if wanted < largest else None

    def cut(self, size: int, seconds: float) -> None:
        """Learn from an attempt that sent something and got no answer."""
        since, self._up_since = self._up_since, None
        if since is None:
            wanted = size // PARTS
        else:
            up = self._clock() - since
            if seconds * PARTS <= up:
                return  # little was lost; for example, the server had closed an idle connection
            wanted = min(int(self._rate * up / PARTS), size)
        self.limit, self._unbroken = max(min(wanted, self.limit or wanted), MIN_SIZE), False


class Slices:
    """How large a request may be while newer messages wait for its end; in bytes of payloads and topics."""

    def __init__(self) -> None:
        self.size = FIRST

    def delivered(self, size: int, seconds: float) -> None:
        """Learn from an answered request, which kept the link busy for `seconds`."""
        wanted = int(size * SLICE / max(seconds, 0.001))
        if size * 2 >= self.size:
            self.size = max(min(wanted, self.size * 2), MIN_SIZE)
        elif seconds > SLICE:  # a small one measures latency more than the rate
            self.size = max(self.size // 2, MIN_SIZE)

    def bounded(self, limit: int | None) -> int:
        """Return the smaller of a slice and a limit; None: no limit."""
        return min(limit or self.size, self.size)
