"""The deduplication window of a stream: message ids seen lately, and the numbers they got.

An append with an id that is in the window is acknowledged with the first one's number and not
stored again (as NATS JetStream does with Nats-Msg-Id). Ids are stored with their messages, so that
the window is the same after a restart: opening reads back the segments as far as the window goes.

Without a window in its settings, a stream that is given an id begins to keep a window of `DEFAULT` ms
and `MOST` ids: enough for a client that repeats an append whose answer it has missed.
"""

from __future__ import annotations

from collections import deque

from bridge.streams import segment
from bridge.streams.view import View

DEFAULT = 120_000
MOST = 100_000


class Window:
    """Message ids of the last `length` ms (None: the default). Times are in ms on the age timeline."""

    def __init__(self, length: int | None) -> None:
        self.configure(length)
        self._numbers: dict[bytes, int] = {}
        self._ages: deque[tuple[int, int, bytes]] = deque()  # time, number, id

    def configure(self, length: int | None) -> None:
        """Change the length; the default is bounded in number, too."""
        self.length = DEFAULT if length is None else length
        self._most = MOST if length is None else None

    def find(self, message_id: bytes) -> int | None:
        """The number of the message that had this id, if it is in the window."""
        return self._numbers.get(message_id)

    def add(self, message_id: bytes, number: int, now: int) -> None:
        """Remember an id, and forget those that are too old."""
        self._numbers[message_id] = number
        self._ages.append((now, number, message_id))
        self.expire(now)

    def expire(self, now: int) -> None:
        """Forget the ids that are older than the window."""
        ages, most = self._ages, self._most
        while ages and (ages[0][0] + self.length < now or (most is not None and len(ages) > most)):
            _, number, message_id = ages.popleft()
            if self._numbers.get(message_id) == number:
                del self._numbers[message_id]

    def forget(self, number: int) -> None:
        """Forget the ids of messages from `number` on: they were not stored."""
        while self._ages and self._ages[-1][1] >= number:
            del self._numbers[self._ages.pop()[2]]

    def load(self, view: View, now: int) -> None:
        """Fill the window from the stream's own files, newest segments only."""
        start = end = view.segments.next
        for base in reversed(list(view.segments.sizes)):
            summary = view.summary(base)
            if summary.entries and summary.last_age + self.length < now:  # an empty one says nothing
                break
            start = base
        for data, frame in view.frames(start, end):
            if frame.age + self.length >= now:
                for number, message_id in segment.ids_of(data, frame).items():
                    self.add(message_id, number, frame.age)
