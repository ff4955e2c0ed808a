"""Message limits: number, bytes, age and number per topic, as in NATS JetStream.

With discard "old", a group is committed first. Then the oldest messages are dropped until the limits are met
again; no reader sees the moment in between. With discard "new", an append that would exceed a limit is
rejected. Messages that are too old are always dropped. Drops are recorded (`drops.log`), segments without
live messages are deleted, and readers skip dropped messages in the others.

The policy yields ranges to drop; the stream drops each before the policy continues.

If far more must be dropped than a group has added (because a limit is new or lower, or many messages have
become too old at once), this happens in steps of `STEP` messages. Other work runs between the steps. Each
step is recorded, so a restart continues where it stopped. A limit on the number alone takes one step, because
it reads nothing.

Memory: sizes and times are read from the files only for the messages at the front, about `AHEAD` at a time.
A table with one entry per live message exists only with a limit per topic.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bridge import books
from bridge.errors import CorruptData, MessageTooLarge, StreamFull
from bridge.streams import segment
from bridge.streams.contents import Contents, Ranges
from bridge.streams.queue import CommitQueue, Group
from bridge.streams.reader import StreamReader
from bridge.streams.segment import Frame

STEP = 2000
AHEAD = 64


class _Row(NamedTuple):
    """A live message. `age` is in ms on the age timeline; `topic` is empty where no limit is per topic."""

    number: int
    size: int
    age: int
    topic: bytes


class MessageLimitPolicy:
    """The message limits of one stream, with the counts they need."""

    def __init__(self, stream: Contents, queue: CommitQueue) -> None:
        """What is in `queue` counts as admitted."""
        self._stream, self._queue = stream, queue
        self._limits = limits = stream.settings.limits
        self.guards_appends = limits.max_message_size is not None or limits.discard_new
        self.stale = True  # the counts must be read from the files (again): not read yet, or other drops
        self._counts_bytes = limits.max_bytes is not None
        self.by_topic = limits.max_messages_per_topic is not None
        self._needs_head = self._counts_bytes or limits.max_age is not None
        self.tracks_messages = self._counts_bytes or self.by_topic  # each one, even in the middle
        self._reader: StreamReader | None = None  # at the front; a new one would have to search for it
        self.unfinished = False  # another step is needed
        self._admitted = 0  # bytes of admitted, uncommitted messages
        self._admitted_topics: dict[bytes, int] = {}
        for topic, data in queue.messages():
            self.admitted(topic, data)
        self._clear()

    def recount(self) -> Iterable[books.Entry]:
        admitted = list(self._queue.messages()) if self._limits.discard_new else []
        yield "admitted", self._admitted, sum(data for _, data in admitted)
        topics = admitted if self._limits.max_messages_per_topic is not None else []
        yield "admitted_topics", self._admitted_topics, Counter(topic for topic, _ in topics)
        if self.by_topic and not self.stale:
            live = sum(size for entries in self._topics.values() for _, size in entries)
            yield "live_bytes", self._live_bytes, live

    def _clear(self) -> None:
        self.close()
        self._head: deque[_Row] = deque()  # the oldest live messages
        self._head_end = self._stream.oldest
        self._live_bytes = 0
        self._topics: dict[bytes, deque[tuple[int, int]]] = {}  # numbers and bytes of live messages

    def close(self) -> None:
        """Close the files."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def refresh(self) -> Iterator[Ranges]:
        """Read the counts from the files if they are stale. Raises OSError."""
        if not self.stale:
            return
        stream, log = self._stream, self._stream.log
        self._clear()
        if self.by_topic:
            for row in self._rows(stream.oldest, log.next):
                self._topics.setdefault(row.topic, deque()).append((row.number, row.size))
                self._live_bytes += row.size
            yield from self._trim_topics(self._topics)
        elif self._counts_bytes:
            for base in list(log.sizes):
                last = log.following(base) - 1
                if stream.drops.count(base, last):
                    self._live_bytes += sum(row.size for row in self._rows(base, last + 1))
                else:
                    self._live_bytes += stream.summary(base).data_bytes
        self.stale = False

    def _rows(self, start: int, end: int) -> Iterator[_Row]:
        """Yield the live messages of start..end-1, without damaged ones."""
        for data, frame in self._stream.frames(start, end):
            yield from self._rows_of(data, frame, start, end)

    def _rows_of(self, data: bytes, frame: Frame, start: int, end: int) -> Iterator[_Row]:
        base, sizes = frame.base, segment.sizes_of(data, frame)
        topics = segment.columns(data, frame)[0] if self.by_topic else [b""] * frame.number
        for a, b in self._stream.drops.live(max(start, base), min(end, frame.next) - 1):
            for number in range(a, b + 1):
                yield _Row(number, sizes[number - base], frame.age, topics[number - base])

    def last_by_topic(self) -> dict[bytes, int]:
        """Return the newest number of each topic. Call `refresh` first. Needs a limit per topic."""
        return {topic: entries[-1][0] for topic, entries in self._topics.items() if entries}

    @property
    def topics(self) -> int:
        """Return how many topics have live messages. Call `refresh` first."""
        return len(self._topics)

    # -- appending -------------------------------------------------------------------------------
    def check(self, topic: bytes, data: int, pending: int) -> None:
        """Raise MessageTooLarge or StreamFull if `data` bytes do not fit after `pending` messages.

        Call `refresh` first.
        """
        limits, stream = self._limits, self._stream
        if limits.max_message_size is not None and data > limits.max_message_size:
            raise MessageTooLarge(
                f"stream {stream.name!r}: a message of {data} bytes is over limits.max_message_size "
                f"{limits.max_message_size}"
            )
        if limits.discard_new:
            if limits.max_bytes is not None and data > limits.max_bytes:
                raise MessageTooLarge(
                    f"stream {stream.name!r}: a message of {data} bytes is over limits.max_bytes "
                    f"{limits.max_bytes}"
                )
            if limits.max_messages is not None and stream.live_messages() + pending >= limits.max_messages:
                self._reject(f"limits.max_messages {limits.max_messages}")
            if limits.max_bytes is not None and self._live_bytes + self._admitted + data > limits.max_bytes:
                self._reject(f"limits.max_bytes {limits.max_bytes}")
            if limits.max_messages_per_topic is not None:
                number = len(self._topics.get(topic, ())) + self._admitted_topics.get(topic, 0)
                if number >= limits.max_messages_per_topic:
                    self._reject(f"limits.max_messages_per_topic {limits.max_messages_per_topic}")

    def admitted(self, topic: bytes, data: int) -> None:
        """Count a checked message as pending."""
        if self._limits.discard_new:
            if self._limits.max_messages_per_topic is not None:
                self._admitted_topics[topic] = self._admitted_topics.get(topic, 0) + 1
            self._admitted += data

    def _reject(self, limit: str) -> None:
        raise StreamFull(
            f"stream {self._stream.name!r} is full: {limit} is reached and it discards new messages; "
            "raise the limit, purge, or discard old ones"
        )

    # -- after a commit --------------------------------------------------------------------------
    def committed(self, group: Group, first: int, size: int, now: int) -> Iterator[Ranges]:
        """Count a committed group (its first number and bytes), then act as `enforce`."""
        if self._limits.discard_new:
            self._admitted -= size
        for topic in group.parts[::2] if self._admitted_topics else ():
            if pending := self._admitted_topics.pop(topic) - 1:
                self._admitted_topics[topic] = pending
        if not self.stale:  # if stale, the group is read from the files with the rest
            self._live_bytes += size
            if self.by_topic:
                yield from self._note_topics(group, first)
        # Every commit drops at least as many as it adds, so appends cannot outrun the steps.
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
            yield from self._yielding(over)

    def failed(self) -> None:
        """Forget admitted messages whose commit has failed."""
        self._admitted = 0
        self._admitted_topics = {}

    def enforce(self, now: int, most: int = STEP) -> Iterator[Ranges]:
        """Drop the oldest messages until every limit is met, at most `most` of them.

        Sets `unfinished` if more must be dropped. Raises OSError; the next call then reads the files again.
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
        limits, stream = self._limits, self._stream
        target = stream.oldest
        excess = stream.live_messages() - limits.max_messages if limits.max_messages is not None else 0
        if excess > 0:
            target = self._after(excess)
        if self._needs_head or (self.by_topic and excess > 0):
            target = self._trim(target, now, most)
        if target > stream.oldest:
            yield from self._yielding([(stream.oldest, target - 1)])

    def _after(self, number: int) -> int:
        """Return the number after the first `number` live messages."""
        stream, end = self._stream, self._stream.log.next
        for first, last in stream.drops.each_live(stream.oldest, end - 1):
            if last - first + 1 >= number:
                return first + number
            number -= last - first + 1
        return end

    def _trim(self, target: int, now: int, most: int) -> int:
        """Return the number below which to drop messages, at least `target`, as far as one step gets."""
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
        self.unfinished = True
        return reached

    def _fill_head(self) -> bool:
        """Read some messages at the front, in complete frames; False if there are none."""
        stream = self._stream
        start, end = max(self._head_end, stream.oldest), stream.log.next
        if start >= end:
            return bool(self._head)
        self._reader = self._reader or stream.reader()
        try:
            for seen, (data, frame) in enumerate(self._reader.frames(start, end), 1):
                self._head.extend(self._rows_of(data, frame, start, end))
                self._head_end = frame.next
                if self._head and max(seen, len(self._head)) >= AHEAD:
                    break
        except CorruptData as error:
            stream.count("corrupt_reads")
            stream.repair(error.segment)  # which sets `stale`
        return bool(self._head)

    def _forget(self, row: _Row) -> None:
        if self.by_topic:
            entries = self._topics.get(row.topic)
            if not entries or entries[0][0] != row.number:
                return  # already dropped by the limit per topic
            entries.popleft()
            if not entries:
                del self._topics[row.topic]
        self._live_bytes -= row.size

    def dropping(self, ranges: Ranges) -> None:
        """Account for another drop: subtract it at the front; elsewhere the counts become stale."""
        oldest = self._stream.oldest
        ranges = [(first, last) for first, last in ranges if first <= last and last >= oldest]
        if self.by_topic and len(ranges) == 1 and ranges[0][0] <= oldest:
            self._forget_below(ranges[0][1] + 1)
        elif ranges:
            self.stale = True

    def _forget_below(self, number: int) -> None:
        """Use the table, because reading the segments takes longer."""
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

    def _yielding(self, ranges: Ranges) -> Iterator[Ranges]:
        yield ranges
        # A deleted file that is still open takes up space.
        if self._head_end <= self._stream.log.first:
            self.close()
