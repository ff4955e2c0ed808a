"""Exact limits: messages, bytes, age and messages per topic, in the manner of NATS JetStream.

With discard "old" a group is committed first and then the oldest messages go, until the limits hold
again; nobody sees the moment in between. With discard "new" an append that would pass a limit is
refused. Age always drops. What is dropped is recorded (`drops.log`); segments without live
messages are deleted, and the rest of a segment is passed over by readers.

Memory: sizes and times are read from the files only for the messages at the front, a frame at a
time; the topics' table, one entry per live message, exists only with a limit per topic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import repeat
from typing import TYPE_CHECKING

from bridge.errors import CorruptData, MessageTooLarge, StreamFull
from bridge.streams import segment
from bridge.streams.drops import Reason
from bridge.streams.log import Staged

if TYPE_CHECKING:
    from bridge.streams.stream import Stream


class Exact:
    """The exact limits of one stream, and the bookkeeping they need."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._limits = limits = stream.settings.limits
        self.guards_appends = limits.max_message_size is not None or limits.discard_new
        self.stale = True  # nothing was read yet, or others have dropped messages: look again
        self._counts_bytes = limits.max_bytes is not None
        self._needs_head = self._counts_bytes or limits.max_age is not None
        self.keeps_books = self._counts_bytes or limits.max_messages_per_topic is not None  # of all messages
        self._admitted = 0  # bytes that were let in and are not committed yet
        self._admitted_topics: dict[bytes, int] = {}
        self._clear()

    def _clear(self) -> None:
        self._head: deque[tuple[int, int, int]] = deque()  # number, bytes, time of the oldest live messages
        self._head_end = self._stream.oldest
        self._live_bytes = 0
        self._topics: dict[bytes, deque[tuple[int, int]]] = {}  # numbers and bytes of live messages

    def reload(self) -> None:
        """Read from the files what the limits need to know."""
        stream = self._stream
        self._clear()
        if self._limits.max_messages_per_topic is not None:
            for number, size, topic in self._rows(stream.oldest, stream.next_sequence):
                self._topics.setdefault(topic, deque()).append((number, size))
                self._live_bytes += size
            self._trim_topics(self._topics)
        elif self._counts_bytes:
            for base in list(stream.log.sizes):
                last = stream.log.following(base) - 1
                if stream.drops.count(base, last):
                    self._live_bytes += sum(size for _, size, _ in self._rows(base, last + 1))
                else:
                    self._live_bytes += stream.summary(base).data_bytes
        self.stale = False

    def _rows(self, start: int, end: int) -> list[tuple[int, int, bytes]]:
        """(number, bytes, topic) of the live messages of start..end-1; damaged ones are passed over."""
        rows = []
        stream = self._stream
        reader = stream.reader()
        try:
            for data, frame in reader.frames(start, end):
                topics, sizes = segment.topics_of(data, frame), segment.sizes_of(data, frame)
                for a, b in stream.drops.live(max(start, frame.base), min(end, frame.next) - 1):
                    rows += [(n, sizes[n - frame.base], topics[n - frame.base]) for n in range(a, b + 1)]
        except CorruptData:
            stream.count("corrupt_reads")
        finally:
            reader.close()
        return rows

    # -- appending -------------------------------------------------------------------------------
    def check(self, topic: bytes, data: int, waiting: int) -> None:
        """Raise MessageTooLarge or StreamFull if `data` bytes do not fit behind `waiting` messages."""
        self._synchronise()
        limits, stream = self._limits, self._stream
        if limits.max_message_size is not None and data > limits.max_message_size:
            stream.count("too_large")
            raise MessageTooLarge(
                f"stream {stream.name!r}: a message of {data} bytes is over maxMessageSize "
                f"{limits.max_message_size}"
            )
        if limits.discard_new:
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
        self._stream.count("full")
        raise StreamFull(
            f"stream {self._stream.name!r} is full: {limit} is reached and it discards new messages; "
            f"raise the limit, purge, or discard old ones"
        )

    # -- after a commit --------------------------------------------------------------------------
    def committed(self, staged: Staged) -> None:
        """Take note of a committed group."""
        size = sum(frame.data_bytes for _, _, _, frame in staged.writes)
        self._admitted = max(0, self._admitted - size)
        for topic in staged.group.parts[::2] if self._admitted_topics else ():
            if (waiting := self._admitted_topics.pop(topic, 1) - 1) > 0:
                self._admitted_topics[topic] = waiting
        if self.stale:
            self.reload()  # the group is in the files already
            return
        self._live_bytes += size
        if self._limits.max_messages_per_topic is not None:
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

    def enforce(self, now: int) -> None:
        """Drop the oldest messages until every limit holds; raises OSError, and then looks anew next time."""
        try:
            self._enforce(now)
        except OSError:
            self.stale = True
            raise

    def _enforce(self, now: int) -> None:
        self._synchronise()
        limits, stream = self._limits, self._stream
        target = stream.oldest
        excess = stream.live_messages() - limits.max_messages if limits.max_messages is not None else 0
        if excess > 0:
            target = self._after(excess)
        if self._needs_head:
            target = self._trim(target, now - limits.max_age if limits.max_age is not None else -1)
        if target > stream.oldest:
            self._forget_topics(target)
            self._drop([(stream.oldest, target - 1)])

    def _after(self, number: int) -> int:
        """The number behind the first `number` live messages."""
        stream = self._stream
        for first, last in stream.drops.each_live(stream.oldest, stream.next_sequence - 1):
            if last - first + 1 >= number:
                return first + number
            number -= last - first + 1
        return stream.next_sequence

    def _trim(self, target: int, before: int) -> int:
        """The number up to which age and bytes want messages gone, `target` at the least."""
        most = self._limits.max_bytes
        while self._head or self._fill_head():
            number, size, time = self._head[0]
            if number >= target and time > before and not (most is not None and self._live_bytes > most):
                break
            self._head.popleft()
            self._live_bytes -= size
            target = max(target, number + 1)
        return target

    def _fill_head(self) -> bool:
        """Read sizes and times of the next frame with live messages at the front."""
        stream = self._stream
        reader = stream.reader()
        try:
            for data, frame in reader.frames(self._head_end, stream.next_sequence):
                sizes, start = segment.sizes_of(data, frame), max(self._head_end, frame.base)
                self._head_end = frame.next
                for a, b in stream.drops.live(start, frame.next - 1):
                    rows = zip(range(a, b + 1), sizes[a - frame.base :], repeat(frame.time), strict=False)
                    self._head.extend(rows)
                if self._head:
                    return True
        except CorruptData as error:
            stream.count("corrupt_reads")
            stream.heal(error.segment)  # marks us stale: the next look begins anew
        finally:
            reader.close()
        return False

    def _forget_topics(self, target: int) -> None:
        if self._limits.max_messages_per_topic is None:
            return
        for number, size, topic in self._rows(self._stream.oldest, target):
            entries = self._topics.get(topic)
            if entries and entries[0][0] == number:
                entries.popleft()
                if not self._needs_head:
                    self._live_bytes -= size
                if not entries:
                    del self._topics[topic]

    def _drop(self, ranges: list[tuple[int, int]]) -> None:
        stream = self._stream
        stream.drop(ranges, Reason.LIMITS)
        if self._head:
            self._head = deque(entry for entry in self._head if stream.drops.live(entry[0], entry[0]))

    def _synchronise(self) -> None:
        if self.stale:
            self.reload()
