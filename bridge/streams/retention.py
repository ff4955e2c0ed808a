"""Exact limits: messages, bytes, age and messages per topic, in the manner of NATS JetStream.

With discard "old" a group is committed first and then the oldest messages go, until the limits hold
again; nobody sees the moment in between. With discard "new" an append that would pass a limit is
refused. Age always drops. What is dropped is recorded (`drops.log`); segments without live
messages are deleted, and the rest of a segment is passed over by readers.

Where far more must go than a group has brought (a limit is new or smaller, or much has grown too old at
once), it goes in steps of `STEP` messages. Between them others have their turn, and each step is recorded:
who stops meanwhile goes on where it was. The number of messages alone takes one step, since nothing is read.

Memory: sizes and times are read from the files only for the messages at the front, some `AHEAD` at a
time; the topics' table, one entry per live message, exists only with a limit per topic.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import CorruptData, MessageTooLarge, StorageFailed
from bridge.streams import segment, walk
from bridge.streams.drops import Reason
from bridge.streams.log import Staged
from bridge.streams.reader import StreamReader
from bridge.streams.segment import Frame

if TYPE_CHECKING:
    from bridge.streams.stream import Stream

STEP = 2000
AHEAD = 64


class _Row(NamedTuple):
    """A live message. `age` is in ms on the age timeline; `topic` is empty where no limit is per topic."""

    number: int
    size: int
    age: int
    topic: bytes


class Exact:
    """The exact limits of one stream, and the bookkeeping they need."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._limits = limits = stream.settings.limits
        self.guards_appends = limits.max_message_size is not None or limits.discard_new
        self.stale = True  # nothing was read yet, or others have dropped messages: look again
        self._counts_bytes = limits.max_bytes is not None
        self._by_topic = limits.max_messages_per_topic is not None
        self._needs_head = self._counts_bytes or limits.max_age is not None
        self.keeps_books = self._counts_bytes or self._by_topic  # of all messages
        self._reader: StreamReader | None = None  # of the front: a new one would have to search for it
        self._waits = False  # the next step is to come
        self._admitted = 0  # bytes that were let in and are not committed yet
        self._admitted_topics: dict[bytes, int] = {}
        self._clear()

    def _clear(self) -> None:
        self.close()
        self._head: deque[_Row] = deque()  # the oldest live messages
        self._head_end = self._stream.oldest
        self._live_bytes = 0
        self._topics: dict[bytes, deque[tuple[int, int]]] = {}  # numbers and bytes of live messages

    def close(self) -> None:
        """Let go of the files."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def reload(self) -> None:
        """Read from the files what the limits need to know."""
        stream = self._stream
        self._clear()
        if self._by_topic:
            for row in self._rows(stream.oldest, stream.next_sequence):
                self._topics.setdefault(row.topic, deque()).append((row.number, row.size))
                self._live_bytes += row.size
            self._trim_topics(self._topics)
        elif self._counts_bytes:
            for base in list(stream.log.sizes):
                last = stream.log.following(base) - 1
                if stream.drops.count(base, last):
                    self._live_bytes += sum(row.size for row in self._rows(base, last + 1))
                else:
                    self._live_bytes += stream.summary(base).data_bytes
        self.stale = False

    def _rows(self, start: int, end: int) -> Iterator[_Row]:
        """The live messages of start..end-1; damaged ones are set aside, and passed over."""
        with contextlib.closing(self._stream.reader()) as reader:
            for data, frame in walk.frames(self._stream, reader, start, end):
                yield from self._rows_of(data, frame, start, end)

    def _rows_of(self, data: bytes, frame: Frame, start: int, end: int) -> Iterator[_Row]:
        base, sizes = frame.base, segment.sizes_of(data, frame)
        topics = segment.topics_of(data, frame) if self._by_topic else [b""] * frame.number
        for a, b in self._stream.drops.live(max(start, base), min(end, frame.next) - 1):
            for number in range(a, b + 1):
                yield _Row(number, sizes[number - base], frame.age, topics[number - base])

    # -- appending -------------------------------------------------------------------------------
    def check(self, topic: bytes, data: int, waiting: int) -> None:
        """Raise a StreamError if `data` bytes do not fit behind `waiting` messages."""
        limits, stream = self._limits, self._stream
        try:
            self._synchronise()
        except OSError as error:
            why = f"stream {stream.name!r}: its limits cannot be checked: {error}"
            raise StorageFailed(why) from error
        if limits.max_message_size is not None and data > limits.max_message_size:
            stream.count("too_large")
            raise MessageTooLarge(
                f"stream {stream.name!r}: a message of {data} bytes is over maxMessageSize "
                f"{limits.max_message_size}"
            )
        if limits.discard_new:
            if limits.max_bytes is not None and data > limits.max_bytes:
                stream.count("too_large")
                raise MessageTooLarge(
                    f"stream {stream.name!r}: a message of {data} bytes is over maxBytes {limits.max_bytes}"
                )
            if limits.max_messages is not None and stream.live_messages() + waiting >= limits.max_messages:
                self._refuse(f"maxMessages {limits.max_messages}")
            if limits.max_bytes is not None and self._live_bytes + self._admitted + data > limits.max_bytes:
                self._refuse(f"maxBytes {limits.max_bytes}")
            if limits.max_messages_per_topic is not None:
                number = len(self._topics.get(topic, ())) + self._admitted_topics.get(topic, 0)
                if number >= limits.max_messages_per_topic:
                    self._refuse(f"maxMessagesPerTopic {limits.max_messages_per_topic}")

    def admitted(self, topic: bytes, data: int) -> None:
        """A message that was checked waits to be committed."""
        if self._limits.discard_new:
            if self._limits.max_messages_per_topic is not None:
                self._admitted_topics[topic] = self._admitted_topics.get(topic, 0) + 1
            self._admitted += data

    def _refuse(self, limit: str) -> None:
        raise self._stream.full(
            f"{limit} is reached and it discards new messages; raise the limit, purge, or discard old ones"
        )

    # -- after a commit --------------------------------------------------------------------------
    def committed(self, staged: Staged, now: int) -> None:
        """Take note of a committed group, and enforce the limits; raises OSError, as `enforce` does."""
        try:
            self._note(staged)
        except OSError:
            self.stale = True
            raise
        # Every commit drops as many as it has brought, so that the steps are not outrun.
        self.enforce(now, STEP + len(staged.group.parts) // 2)

    def _note(self, staged: Staged) -> None:
        size = sum(frame.data_bytes for _, _, _, frame in staged.writes)
        self._admitted = max(0, self._admitted - size)
        for topic in staged.group.parts[::2] if self._admitted_topics else ():
            if (waiting := self._admitted_topics.pop(topic, 1) - 1) > 0:
                self._admitted_topics[topic] = waiting
        if self.stale:
            self.reload()  # the group is in the files already
            return
        self._live_bytes += size
        if self._by_topic:
            self._note_topics(staged)

    def _note_topics(self, staged: Staged) -> None:
        group, number = staged.group, staged.writes[0][3].base
        for i, topic in enumerate(group.parts[::2]):
            size = len(topic) + len(group.parts[2 * i + 1])
            size += len(group.headers.get(i, b"")) + len(group.ids.get(i, b""))
            self._topics.setdefault(topic, deque()).append((number + i, size))
        self._trim_topics(group.parts[::2])

    def _trim_topics(self, topics: Iterable[bytes]) -> None:
        over: list[tuple[int, int]] = []
        for topic in dict.fromkeys(topics):
            entries = self._topics[topic]
            while len(entries) > (self._limits.max_messages_per_topic or 1):
                old, freed = entries.popleft()
                self._live_bytes -= freed
                over.append((old, old))
        if over:
            self._drop(over)

    def failed(self) -> None:
        """Nothing that was admitted and is not committed will be."""
        self._admitted = 0
        self._admitted_topics = {}

    def enforce(self, now: int, most: int = STEP) -> None:
        """Drop the oldest messages until every limit holds, `most` of them in one step.

        Raises OSError, and then looks anew next time.
        """
        try:
            self._enforce(now, most)
        except OSError:
            self.stale = True
            raise

    def _enforce(self, now: int, most: int) -> None:
        self._synchronise()
        limits, stream = self._limits, self._stream
        target = stream.oldest
        excess = stream.live_messages() - limits.max_messages if limits.max_messages is not None else 0
        if excess > 0:
            target = self._after(excess)
        if self._needs_head or (self._by_topic and excess > 0):
            target = self._trim(target, now, most)
        if target > stream.oldest:
            self._drop([(stream.oldest, target - 1)])

    def _continue(self, now: int) -> None:
        self._waits = False
        if self._stream.exact is self and not self._stream.closed:
            with contextlib.suppress(OSError):  # tried again with every commit and every second
                self._stream.maintain(now)

    def _after(self, number: int) -> int:
        """The number behind the first `number` live messages."""
        stream = self._stream
        for first, last in stream.drops.each_live(stream.oldest, stream.next_sequence - 1):
            if last - first + 1 >= number:
                return first + number
            number -= last - first + 1
        return stream.next_sequence

    def _trim(self, target: int, now: int, most: int) -> int:
        """The number up to which messages must go, `target` at the least; or how far one step comes."""
        limits, reached = self._limits, self._stream.oldest
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
        if not self._waits:
            self._waits = True
            asyncio.get_running_loop().call_soon(self._continue, now)
        return reached

    def _fill_head(self) -> bool:
        """Read of the next messages at the front some, in whole frames; False if there are none."""
        stream = self._stream
        start, end = max(self._head_end, stream.oldest), stream.next_sequence
        if start < end and self._reader is None:
            self._reader = stream.reader()
        try:
            for seen, (data, frame) in enumerate(self._frames(start, end), 1):
                self._head.extend(self._rows_of(data, frame, start, end))
                self._head_end = frame.next
                if self._head and max(seen, len(self._head)) >= AHEAD:
                    break
        except CorruptData as error:
            stream.count("corrupt_reads")
            stream.heal(error.segment)  # marks us stale: the next look begins anew
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

    def dropping(self, ranges: list[tuple[int, int]]) -> None:
        """Others are about to drop these: of the front note is taken, for anything else all is read anew."""
        oldest = self._stream.oldest
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

    def _drop(self, ranges: list[tuple[int, int]]) -> None:
        self._stream.drop(ranges, Reason.LIMITS)
        if self._head_end <= self._stream.log.first:  # an open file that is gone takes its room all the same
            self.close()

    def _synchronise(self) -> None:
        if self.stale:
            self.reload()
