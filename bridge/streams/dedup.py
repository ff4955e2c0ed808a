"""The deduplication window of a stream: recent message ids, and the numbers of their messages.

An append with an id in the window is acknowledged with the first message's number and not stored again (as
NATS JetStream does with Nats-Msg-Id). Ids are stored with their messages. A restart restores the window from
the segments that it covers.

A stream without a window in its settings gets one with the first id: `DEFAULT` ms and at most `MOST` ids,
enough for a client that repeats an append whose reply was lost.
"""

from __future__ import annotations

from collections import deque

from bridge.streams import segment
from bridge.streams.contents import Contents

SCOPED = b"\0mqtt\0"  # the prefix of ids from MQTT clients only (`mqtt.broker.receipts`)
DEFAULT = 120_000
MOST = 100_000


class Window:
    """The message ids of the last `length` ms (None: the default). Times are in ms on the age timeline."""

    def __init__(self, length: int | None) -> None:
        self.configure(length)
        self._numbers: dict[bytes, int] = {}
        self._ages: deque[tuple[int, int, bytes]] = deque()  # time, number, id

    def configure(self, length: int | None) -> None:
        """Change the length. The default window is also bounded in number."""
        self.length = DEFAULT if length is None else length
        self._most = MOST if length is None else None

    def __bool__(self) -> bool:
        """Whether any id is in the window."""
        return bool(self._numbers)

    def find(self, message_id: bytes) -> int | None:
        """Return the number of the message with this id; None if it is not in the window."""
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
        """Forget the ids of messages from `number` on, which were not stored."""
        while self._ages and self._ages[-1][1] >= number:
            del self._numbers[self._ages.pop()[2]]

    def load(self, stream: Contents, now: int) -> None:
        """Fill the window from the newest segments of the stream."""
        start = end = stream.log.next
        for base in reversed(list(stream.log.sizes)):
            summary = stream.summary(base)
            if summary.entries and summary.last_age + self.length < now:  # skip an empty segment
                break
            start = base
        for data, frame in stream.frames(start, end):
            if frame.age + self.length >= now:
                for number, message_id in segment.ids_of(data, frame).items():
                    self.add(message_id, number, frame.age)
