"""Decides how long a message that must be synced waits for others that share its sync.

A sync of one small message writes 4 to 7 KB, and flash memory wears out by that. Devices that send a reading
now and then do not notice when an acknowledgement comes a quarter of a second later; programs that send the
next message as soon as the last one is acknowledged would be slowed down by it. So the delay adapts to who
sends:

* A message waits at most `longest` for others, and only until `ENOUGH` share the sync.
* Somebody hurries, and the group begins at once, if the message came during a sync or less than `SOON` of
  `longest` after an acknowledgement to the same client, or if its sender is not a device (an operation, an
  upstream).

So a hurrying client is delayed once, with its first message after a pause.
"""

from __future__ import annotations

from collections import deque

ENOUGH = 16  # messages; a larger group would save less than half of what is left
SOON = 1 / 4  # of the delay: a client that pauses longer waits at most four times its pause


class Delay:
    """Decides for one stream. Times are in seconds of any monotonic clock."""

    __slots__ = ("_before", "_began", "_longest", "_recent", "until")

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self.until = 0.0  # the latest time at which the group begins; 0: no group waits
        self._began = self._before = 0.0  # when the last group began, and the one before it
        # The groups acknowledged lately: since when their messages came, and when they were acknowledged.
        self._recent: deque[tuple[float, float]] = deque()

    def committed(self, now: float, pending: int) -> None:
        """Note that a group is acknowledged; `pending` messages came meanwhile."""
        self._forget(now)  # also here: under pressure, nobody asks whether to wait
        self._recent.append((self._before, now))
        self.until = now if pending else 0.0

    def end_wait(self, now: float) -> None:
        """Wait no longer."""
        self.until = min(self.until, now)

    def wants_more(self, now: float, pending: int, heard: float) -> bool:
        """Return whether the next group waits for more than these messages.

        `heard` is the latest time at which one of their clients had sent something before; infinity: one
        cannot wait.
        """
        self._forget(now)
        recent = self._recent
        answered = bool(recent) and heard >= recent[0][0]
        if pending < ENOUGH and not answered and heard <= now:
            self.until = self.until or now + self._longest
            if now < self.until:
                return True
        self._before, self._began = self._began, now
        return False

    def _forget(self, now: float) -> None:
        """Forget the acknowledgements that are not recent any more."""
        while self._recent and now - self._recent[0][1] >= self._longest * SOON:
            self._recent.popleft()
