"""The uncommitted messages of a stream.

A message passes through these states:
    pending     appended, in memory; its number is provisional and counts from the last commit
    in flight   its group is on its way to the files
    committed   the group is in the files; the number is final, and the waiters are notified
If a group cannot be stored, it fails together with everything pending after it: the waiters get the error,
later messages get the numbers, and the next append tries the disk again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bridge import books
from bridge.errors import StreamError
from bridge.streams.segment import RECORD_OVERHEAD

Waiter = Callable[[StreamError | None], None]


@dataclass(slots=True)
class Group:
    """Messages that are committed together: topics and payloads alternate, the rest is by position."""

    parts: list[bytes] = field(default_factory=list)
    headers: dict[int, bytes] = field(default_factory=dict)
    ids: dict[int, bytes] = field(default_factory=dict)
    size: int = 0

    def part(self, low: int, high: int) -> Group:
        """Return the messages at the positions low..high-1."""
        if low == 0 and high * 2 == len(self.parts):
            return self
        headers = {i - low: h for i, h in self.headers.items() if low <= i < high}
        ids = {i - low: h for i, h in self.ids.items() if low <= i < high}
        return Group(self.parts[2 * low : 2 * high], headers, ids)

    def record_sizes(self) -> Sequence[int]:
        """Return the bytes that each message takes in a frame."""
        sizes = [
            len(topic) + len(payload) + RECORD_OVERHEAD
            for topic, payload in zip(self.parts[::2], self.parts[1::2], strict=True)
        ]
        for column in (self.headers, self.ids):
            if column:
                sizes = [size + 4 + len(column.get(i, b"")) for i, size in enumerate(sizes)]
        return sizes


class CommitQueue:
    """One stream's pending group, its group in flight, and the waiters of both. Sizes in bytes.

    `Stream.append` adds to the pending group itself, because a call would cost 5 % of an append.
    """

    def __init__(self, number: int, schedule: Callable[[], None]) -> None:
        """The next message gets `number`; `schedule` is called when there is a group to commit."""
        self.next = number
        self.group = Group()  # the pending group
        self.busy = False  # a group is in flight, so no other may be staged
        self.flight: Group | None = None
        self._schedule, self.scheduled = schedule, False
        self.heard = 0.0  # see `after_commit`; the latest time of the pending group
        self._waiters, self._committing = list[Waiter](), list[Waiter]()
        self._released: asyncio.Event | None = None  # set when nothing is in flight; None: nobody waits

    def recount(self) -> Iterable[books.Entry]:
        group = self.group
        beside = [*group.headers.values(), *group.ids.values()]
        size = sum(map(len, group.parts)) + sum(map(len, beside)) + RECORD_OVERHEAD * self.pending
        yield "group.size", group.size, size + 8 * len(group.headers.keys() | group.ids.keys())

    @property
    def flight_size(self) -> int:
        """What is in flight."""
        return 0 if self.flight is None else self.flight.size

    def messages(self) -> Iterator[tuple[bytes, int]]:
        """Yield the topic and the bytes of each message that is pending or in flight."""
        for group in (self.group,) if self.flight is None else (self.flight, self.group):
            for i, topic in enumerate(group.parts[::2]):
                beside = len(group.headers.get(i, b"")) + len(group.ids.get(i, b""))
                yield topic, len(topic) + len(group.parts[2 * i + 1]) + beside

    @property
    def size(self) -> int:
        """What is pending and in flight."""
        return self.group.size + self.flight_size

    @property
    def pending(self) -> int:
        """How many messages are in the pending group."""
        return len(self.group.parts) // 2

    def after_commit(self, done: Waiter, heard: float = math.inf) -> None:
        """Call `done` when all that is pending or in flight is committed (None) or has failed (the error).

        `heard` is when the client that waits was heard before this message; by default it cannot wait longer.
        """
        if self.group.parts:
            self._waiters.append(done)
            if heard > self.heard:
                self.heard = heard
                if not self.scheduled and not self.busy:  # it is held, for others that may wait longer
                    self.schedule()
        elif self.flight is not None:
            self._committing.append(done)
        else:
            done(None)

    def schedule(self) -> None:
        """Have the pending group committed."""
        self.scheduled = True
        self._schedule()

    def postpone(self) -> None:
        """Begin no group now. The next message or the caller schedules it."""
        self.scheduled = False

    def take(self) -> Group | None:
        """Put the pending group in flight and return it; None if nothing is pending."""
        self.scheduled = False
        group = self.group
        if not group.parts:
            return None
        self.group, self.flight, self.heard = Group(), group, 0.0
        self._committing, self._waiters = self._waiters, []
        return group

    def committed(self) -> list[Waiter]:
        """End the group in flight, which is committed; return its waiters."""
        waiters, self._committing, self.flight = self._committing, [], None
        self.release()
        return waiters

    def reschedule(self) -> None:
        """Commit messages that arrived while the stream was busy."""
        if self.group.parts:
            self.schedule()

    def clear(self, number: int) -> list[Waiter]:
        """Fail everything, and give the next message `number`; return all waiters."""
        waiters = [*self._committing, *self._waiters]
        self.group, self.flight, self.next = Group(), None, number
        self._waiters, self._committing = [], []
        self.scheduled, self.heard = False, 0.0
        self.release()
        return waiters

    async def idle(self) -> None:
        """Wait until no group is in flight."""
        while self.busy:
            if self._released is None:
                self._released = asyncio.Event()
            await self._released.wait()

    def release(self) -> None:
        """Wake `idle`, because nothing is in flight any more."""
        self.busy = False
        if self._released is not None:
            self._released.set()
            self._released = None
