"""Limits by message: their number, bytes, age and number per topic, in the manner of NATS JetStream.

With discard "old" a group is committed first and then the oldest messages go, until the limits hold
again; nobody sees the moment in between. With discard "new" an append that would pass a limit is
rejected. Age always drops. What is dropped is recorded (`drops.log`); segments without live
messages are deleted, and the rest of a segment is passed over by readers.

The limits yield what is to go, in ranges (both ends included); the stream drops it, and they go on.

Where far more must go than a group has brought (a limit is new or smaller, or much has grown too old at
once), it goes in steps of `STEP` messages. Between them others have their turn, and each step is recorded:
who stops meanwhile goes on where it was. The number of messages alone takes one step, since nothing is read.

Memory: sizes and times are read from the files only for the messages at the front, some `AHEAD` at a
time; the topics' table, one entry per live message, exists only with a limit per topic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bridge.errors import CorruptData, MessageTooLarge, StreamFull
from bridge.streams import segment
from bridge.streams.queue import Group
from bridge.streams.reader import StreamReader
from bridge.streams.segment import Frame
from bridge.streams.view import View

STEP = 2000
AHEAD = 64

Ranges = list[tuple[int, int]]


class _Row(NamedTuple):
    """A live message. `age` is in ms on the age timeline; `topic` is empty where no limit is per topic."""

    number: int
    size: int
    age: int
    topic: bytes


class MessageLimitPolicy:
    """The limits of one stream, and the bookkeeping they need."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._limits = limits = view.settings.limits
        self.guards_appends = limits.max_message_size is not None or limits.discard_new
        self.stale = True  # nothing was read yet, or others have dropped messages: look again
        self._counts_bytes = limits.max_bytes is not None
        self._by_topic = limits.max_messages_per_topic is not None
        self._needs_head = self._counts_bytes or limits.max_age is not None
        self.tracks_messages = self._counts_bytes or self._by_topic  # of all messages
        self._reader: StreamReader | None = None  # of the front: a new one would have to search for it
        self.unfinished = False  # the next step is to come
        self._admitted = 0  # bytes that were let in and are not committed yet
        self._admitted_topics: dict[bytes, int] = {}
        self._clear()

    def _clear(self) -> None:
        self.close()
        self._head: deque[_Row] = deque()  # the oldest live messages
        self._head_end = self._view.oldest
        self._live_bytes = 0
        self._topics: dict[bytes, deque[tuple[int, int]]] = {}  # numbers and bytes of live messages

    def close(self) -> None:
        """Let go of the files."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def refresh(self) -> Iterator[Ranges]:
        """If need be, read from the files what the limits need to know; raises OSError."""
        if not self.stale:
            return
        view, segments = self._view, self._view.segments
        self._clear()
        if self._by_topic:
            for row in self._rows(view.oldest, segments.next):
                self._topics.setdefault(row.topic, deque()).append((row.number, row.size))
                self._live_bytes += row.size
            yield from self._trim_topics(self._topics)
        elif self._counts_bytes:
            for base in list(segments.sizes):
                last = segments.following(base) - 1
                if view.drops.count(base, last):
                    self._live_bytes += sum(row.size for row in self._rows(base, last + 1))
                else:
                    self._live_bytes += view.summary(base).data_bytes
        self.stale = False

    def _rows(self, start: int, end: int) -> Iterator[_Row]:
        """The live messages of start..end-1; damaged ones are set aside, and passed over."""
        for data, frame in self._view.frames(start, end):
            yield from self._rows_of(data, frame, start, end)

    def _rows_of(self, data: bytes, frame: Frame, start: int, end: int) -> Iterator[_Row]:
        base, sizes = frame.base, segment.sizes_of(data, frame)
        topics = segment.topics_of(data, frame) if self._by_topic else [b""] * frame.number
        for a, b in self._view.drops.live(max(start, base), min(end, frame.next) - 1):
            for number in range(a, b + 1):
                yield _Row(number, sizes[number - base], frame.age, topics[number - base])

    # -- appending -------------------------------------------------------------------------------
    def check(self, topic: bytes, data: int, pending: int) -> None:
        """Raise MessageTooLarge or StreamFull if `data` bytes do not fit behind `pending` messages.

        What the limits know must be fresh (see `refresh`).
        """
        limits, view = self._limits, self._view
        if limits.max_message_size is not None and data > limits.max_message_size:
            raise MessageTooLarge(
                f"stream {view.name!r}: a message of {data} bytes is over maxMessageSize "
                f"{limits.max_message_size}"
            )
        if limits.discard_new:
            if limits.max_bytes is not None and data > limits.max_bytes:
                raise MessageTooLarge(
                    f"stream {view.name!r}: a message of {data} bytes is over maxBytes {limits.max_bytes}"
                )
            if limits.max_messages is not None and view.live_messages() + pending >= limits.max_messages:
                self._reject(f"maxMessages {limits.max_messages}")
            if limits.max_bytes is not None and self._live_bytes + self._admitted + data > limits.max_bytes:
                self._reject(f"maxBytes {limits.max_bytes}")
            if limits.max_messages_per_topic is not None:
                number = len(self._topics.get(topic, ())) + self._admitted_topics.get(topic, 0)
                if number >= limits.max_messages_per_topic:
                    self._reject(f"maxMessagesPerTopic {limits.max_messages_per_topic}")

    def admitted(self, topic: bytes, data: int) -> None:
        """A message that was checked waits to be committed."""
        if self._limits.discard_new:
            if self._limits.max_messages_per_topic is not None:
                self._admitted_topics[topic] = self._admitted_topics.get(topic, 0) + 1
            self._admitted += data

    def _reject(self, limit: str) -> None:
        raise StreamFull(
            f"stream {self._view.name!r} is full: {limit} is reached and it discards new messages; "
            "raise the limit, purge, or discard old ones"
        )

    # -- after a commit --------------------------------------------------------------------------
    def committed(self, group: Group, first: int, size: int, now: int) -> Iterator[Ranges]:
        """Take note of a committed group, its first number and bytes, and enforce the limits as `enforce`."""
        self._admitted = max(0, self._admitted - size)
        for topic in group.parts[::2] if self._admitted_topics else ():
            if (pending := self._admitted_topics.pop(topic, 1) - 1) > 0:
                self._admitted_topics[topic] = pending
        if not self.stale:  # else the group is read from the files with the rest
            self._live_bytes += size
            if self._by_topic:
                yield from self._note_topics(group, first)
        # Every commit drops as many as it has brought, so that the steps are not outrun.
        yield from self.enforce(now, STEP + len(group.parts) // 2)

    def _note_topics(self, group: Group, first: int) -> Iterator[Ranges]:
        for i, topic in enumerate(group.parts[::2]):
            size = len(topic) + len(group.parts[2 * i + 1])
            size += len(group.headers.get(i, b"")) + len(group.ids.get(i, b""))
            self._topics.setdefault(topic, deque()).append((first + i, size))
        yield from self._trim_topics(group.parts[::2])

    def _trim_topics(self, topics: Iterable[bytes]) -> Iterator[Ranges]:
        over: Ranges = []
        for topic in dict.fromkeys(topics):
            entries = self._topics[topic]
            while len(entries) > (self._limits.max_messages_per_topic or 1):
                old, freed = entries.popleft()
                self._live_bytes -= freed
                over.append((old, old))
        if over:
            yield from self._going(over)

    def failed(self) -> None:
        """Nothing that was admitted and is not committed will be."""
        self._admitted = 0
        self._admitted_topics = {}

    def enforce(self, now: int, most: int = STEP) -> Iterator[Ranges]:
        """Let the oldest messages go until every limit holds, `most` of them in one step.

        If more must go, `unfinished` says so. Raises OSError, and then looks anew next time.
        """
        done = False
        try:
            yield from self._enforce(now, most)
            done = True
        finally:
            self.stale = self.stale or not done

    def _enforce(self, now: int, most: int) -> Iterator[Ranges]:
        yield from self.refresh()
        self.unfinished = False
        limits, view = self._limits, self._view
        target = view.oldest
        excess = view.live_messages() - limits.max_messages if limits.max_messages is not None else 0
        if excess > 0:
            target = self._after(excess)
        if self._needs_head or (self._by_topic and excess > 0):
            target = self._trim(target, now, most)
        if target > view.oldest:
            yield from self._going([(view.oldest, target - 1)])

    def _after(self, number: int) -> int:
        """The number behind the first `number` live messages."""
        view, end = self._view, self._view.segments.next
        for first, last in view.drops.each_live(view.oldest, end - 1):
            if last - first + 1 >= number:
                return first + number
            number -= last - first + 1
        return end

    def _trim(self, target: int, now: int, most: int) -> int:
        """The number up to which messages must go, `target` at the least; or how far one step comes."""
        limits, reached = self._limits, self._view.oldest
        before = now - limits.max_age if limits.max_age is not None else -1
        for _ in range(most):
            if not self._head and not self._fill_head():
                return max(target, reached)
            row = self._head[0]
            over = limits.max_bytes is not None and self._live_bytes > limits.max_bytes
            if row.number >= target and row.age > before and not over:
                return max(target, reached)
            self._forget(self._head.popleft())
            reached = row.number + 1
        self.unfinished = True
        return reached

    def _fill_head(self) -> bool:
        """Read of the next messages at the front some, in whole frames; False if there are none."""
        view = self._view
        start, end = max(self._head_end, view.oldest), view.segments.next
        if start < end and self._reader is None:
            self._reader = view.reader()
        try:
            for seen, (data, frame) in enumerate(self._frames(start, end), 1):
                self._head.extend(self._rows_of(data, frame, start, end))
                self._head_end = frame.next
                if self._head and max(seen, len(self._head)) >= AHEAD:
                    break
        except CorruptData as error:
            view.damaged(error.segment)  # marks us stale: the next look begins anew
        return bool(self._head)

    def _frames(self, start: int, end: int) -> Iterable[tuple[bytes, Frame]]:
        return self._reader.frames(start, end) if self._reader is not None else ()

    def _forget(self, row: _Row) -> None:
        if self._by_topic:
            entries = self._topics.get(row.topic)
            if not entries or entries[0][0] != row.number:
                return  # the limit per topic has dropped it
            entries.popleft()
            if not entries:
                del self._topics[row.topic]
        self._live_bytes -= row.size

    def dropping(self, ranges: Ranges) -> None:
        """Others are about to drop these: of the front note is taken, for anything else all is read anew."""
        oldest = self._view.oldest
        ranges = [(first, last) for first, last in ranges if first <= last and last >= oldest]
        if self._by_topic and len(ranges) == 1 and ranges[0][0] <= oldest:
            self._forget_below(ranges[0][1] + 1)
        elif ranges:
            self.stale = True

    def _forget_below(self, number: int) -> None:
        """By the table, since to read what a whole segment holds takes longer."""
        for topic, entries in list(self._topics.items()):
            while entries and entries[0][0] < number:
                self._live_bytes -= entries.popleft()[1]
            if not entries:
                del self._topics[topic]
        while self._head and self._head[0].number < number:
            self._head.popleft()
        if self._head_end < number:
            self._head_end = number
            self.close()

    def _going(self, ranges: Ranges) -> Iterator[Ranges]:
        yield ranges
        # An open file that is gone takes its room all the same.
        if self._head_end <= self._view.segments.first:
            self.close()
