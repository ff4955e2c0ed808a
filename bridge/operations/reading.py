"""readMessages: finds the requested messages, and waits for those that are not stored yet.

* A read returns at least its minimum, or fails. Beyond the minimum it returns what one step finds (`STEP`
  bytes or `MANY` messages), so a large maximum costs little memory. A step is read in slices of `SLICE`
  messages or `SLICE_BYTES`, between which the event loop serves other clients.
* A waiting read is woken by the commit that completes its minimum (see `waiting`), and is answered before its
  time-out.
* One reader per stream stays open, because opening one costs more than a small read. A reader that was not
  used recently is closed, because an open file takes disk space even after retention has deleted it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from heapq import nsmallest
from itertools import islice
from typing import Annotated

from msgspec import Meta, Struct

from bridge.errors import CorruptData, InvalidRequest, NotEnoughMessages, ResponseTooLarge, StreamNotFound
from bridge.model import MAX_INT32, MAX_INT64, MAX_MILLIS
from bridge.operations.waiting import Waiting
from bridge.plugin.withheld import Withheld
from bridge.streams.reader import StreamReader
from bridge.streams.segment import StreamMessage
from bridge.streams.stream import Stream
from bridge.topics import filter_mistake, matches

MOST_BYTES = 256 * 1024 * 1024  # of one read, however large its minimum
STEP = 16 * 1024 * 1024
ROUNDS = 10  # attempts to read the newest messages while newer ones replace them
FEW = 50  # messages that are not adjacent, read at a time
MANY = 10_000  # messages; reading them takes tens of milliseconds
SLICE, SLICE_BYTES = 2_000, 2 * 1024 * 1024  # read at a time before other clients are served

Turn = Callable[[], AbstractAsyncContextManager[None]]  # entered to read available messages
Hidden = Callable[
    [], Withheld | None
]  # returns which messages the reader must not get now; None: it gets all


def nothing() -> None:
    """Hide nothing."""


class ReadMessagesOptions(Struct, rename="camel", kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The options of a read: those of the SDK's class of this name, our `topic` filter, and `last_per_topic`.

    `last_per_topic` reads only the newest message of each topic, by default of at most `MANY` topics.
    """

    desired_start_sequence_number: Annotated[int, Meta(ge=0, le=MAX_INT64)] = 0
    min_message_count: Annotated[int, Meta(ge=1, le=MAX_INT32)] = 1
    max_message_count: Annotated[int, Meta(ge=1, le=MAX_INT32)] | None = None
    read_timeout_millis: Annotated[int, Meta(ge=0, le=MAX_MILLIS)] = 0
    topic: str | None = None
    last_per_topic: bool = False


class Reads:
    """Carries out reads of all streams. Must be used in the event loop's thread."""

    def __init__(self, step: int = STEP) -> None:
        """`step` is how many bytes a read returns beyond its minimum."""
        self.waiting, self._step = Waiting(), step
        self._readers: dict[Stream, StreamReader] = {}
        self._used: set[Stream] = set()

    async def read(
        self,
        stream: Stream,
        options: ReadMessagesOptions,
        max_bytes: int,
        turn: Turn = nullcontext,
        hidden: Hidden = nothing,
    ) -> list[StreamMessage]:
        """Read messages; leave out those that are `hidden`.

        Raises InvalidRequest, NotEnoughMessages, ResponseTooLarge or CorruptData, and StreamNotFound if the
        stream is deleted during the read.
        """
        least = options.min_message_count
        if (options.max_message_count or least) < least:
            raise InvalidRequest(
                f"maxMessageCount {options.max_message_count} is less than minMessageCount {least}"
            )
        if options.topic is not None and (mistake := filter_mistake(options.topic)) is not None:
            raise InvalidRequest(f"topic: {mistake}")
        if options.last_per_topic:
            return await self._last_per_topic(stream, options, max_bytes, turn, hidden)
        deadline = _deadline(options)
        found: list[StreamMessage] = []
        position = options.desired_start_sequence_number
        while True:
            position = max(position, stream.oldest)
            if deadline is not None:
                await self.waiting.until(stream, position + least - len(found), deadline)
            async with turn():
                position = await self._read_on(stream, options, found, position, max_bytes, hidden)
            if len(found) >= least:
                return found
            if stream.closed:
                raise StreamNotFound(f"stream {stream.name!r} was deleted during a read")
            if deadline is None or asyncio.get_running_loop().time() >= deadline:
                raise _not_enough(stream, options, len(found))

    async def _last_per_topic(
        self, stream: Stream, options: ReadMessagesOptions, max_bytes: int, turn: Turn, hidden: Hidden
    ) -> list[StreamMessage]:
        """Return the newest message of each topic, by number, from the table of the limit per topic.

        If a topic gets another message during the read, the result has one of the two.
        """
        if options.read_timeout_millis:
            raise InvalidRequest("lastPerTopic: it does not wait; leave out readTimeoutMillis")
        start, least = options.desired_start_sequence_number, options.min_message_count
        found: dict[int, StreamMessage] = {}
        left: set[bytes] | None = None  # topics whose message was dropped before it was read
        size, full = 0, False
        async with turn():
            for _ in range(ROUNDS):
                if stream.closed:
                    raise StreamNotFound(f"stream {stream.name!r} was deleted during a read")
                books = stream.last_by_topic()
                if books is None:
                    raise InvalidRequest(
                        f"stream {stream.name!r}: lastPerTopic needs its limit maxMessagesPerTopic, whose "
                        "books it reads; set one"
                    )
                wanted = await _wanted(books, left, start, options)
                left = set()
                for number, topic in wanted:
                    rows = self.rows(stream, number, number + 1, 1, max_bytes)
                    if not rows:
                        left.add(topic)
                        continue
                    if (withheld := hidden()) and withheld(topic.decode(), rows[0].payload):
                        continue
                    size += len(rows[0].payload) + len(topic)
                    full = size > max_bytes and len(found) >= least
                    if full:
                        break
                    found[number] = rows[0]
                    if not len(found) % FEW:
                        await asyncio.sleep(0)
                if not left or full:
                    break
        if len(found) < least:
            raise NotEnoughMessages(
                f"stream {stream.name!r}: {len(found)} of the {least} requested topics have messages"
            )
        return [found[number] for number in sorted(found)]

    async def _read_on(
        self,
        stream: Stream,
        options: ReadMessagesOptions,
        found: list[StreamMessage],
        position: int,
        max_bytes: int,
        hidden: Hidden,
    ) -> int:
        """Read from `position` into `found`. Returns where to continue."""
        least = options.min_message_count
        most = options.max_message_count or least
        size = sum(len(row.payload) + len(row.topic) for row in found)
        step = min(self._step, max_bytes)
        end = min(MANY, most) if most > least else most  # beyond the minimum, what one step finds
        while len(found) < most and position < stream.next_sequence:
            withheld = hidden()
            chosen = options.topic is not None or withheld is not None
            wanted = SLICE if chosen else min(most - len(found), SLICE)
            room = SLICE_BYTES if chosen else min(max(step - size, 1), SLICE_BYTES)
            rows = self.rows(stream, position, stream.next_sequence, wanted, room)
            if not rows:
                return stream.next_sequence
            after = rows[-1].sequence_number + 1
            if options.topic is not None:
                rows = [row for row in rows if matches(options.topic, row.topic.decode())]
            if withheld is not None:
                rows = [row for row in rows if not withheld(row.topic.decode(), row.payload)]
            if len(found) + len(rows) > most:
                rows = rows[: most - len(found)]
                after = rows[-1].sequence_number + 1
            fresh = sum(len(row.payload) + len(row.topic) for row in rows)
            if found and size + fresh > max_bytes:
                if len(found) < least:
                    raise ResponseTooLarge(
                        f"stream {stream.name!r}: the {least} requested messages are larger than the "
                        f"{max_bytes} bytes of a reply; request fewer"
                    )
                break
            position = after
            found += rows
            size += fresh
            if len(found) >= least and (size >= step or (not chosen and len(found) >= end)):
                break
            await asyncio.sleep(0)
        return position

    def rows(self, stream: Stream, position: int, end: int, most: int, max_bytes: int) -> list[StreamMessage]:
        """Return the stored messages of position..end-1, as `StreamReader.read`; quarantine damage first."""
        if stream.closed:
            return []
        reader = self._readers.get(stream)
        if reader is None:
            reader = self._readers[stream] = stream.reader()
        self._used.add(stream)
        healed: set[int] = set()
        while True:
            try:
                return reader.read(position, end=end, max_messages=most, max_bytes=max_bytes)
            except CorruptData as error:
                if error.segment in healed or not stream.repair(error.segment):
                    raise
                healed.add(error.segment)  # the next segment may be damaged too

    def gone(self, stream: Stream) -> None:
        """Let waiting reads check again, because a stream was deleted or its settings have changed."""
        self.waiting.wake_all(stream)
        self._close(stream)

    def tidy(self) -> None:
        """Close readers that were not used since the last call."""
        for stream in self._readers.keys() - self._used:
            self._close(stream)
        self._used.clear()

    def _close(self, stream: Stream) -> None:
        reader = self._readers.pop(stream, None)
        if reader is not None:
            reader.close()


async def _wanted(
    books: dict[bytes, int], left: set[bytes] | None, start: int, options: ReadMessagesOptions
) -> list[tuple[int, bytes]]:
    """Return the lowest wanted numbers from `start` on, with their topics; `left`: only of these topics."""
    most = options.max_message_count or max(MANY, options.min_message_count)
    wanted: list[tuple[int, bytes]] = []
    every = iter(books.items())
    while some := list(islice(every, SLICE)):
        wanted += [
            (number, topic)
            for topic, number in some
            if number >= start and (left is None or topic in left) and _matches(options.topic, topic)
        ]
        if len(wanted) > 2 * most:
            wanted = nsmallest(most, wanted)
        if len(some) == SLICE:
            await asyncio.sleep(0)
    return sorted(wanted)[:most]


def _matches(topic_filter: str | None, topic: bytes) -> bool:
    return topic_filter is None or matches(topic_filter, topic.decode())


def _deadline(options: ReadMessagesOptions) -> float | None:
    """Return the loop's time at which a wait ends."""
    if not options.read_timeout_millis:
        return None
    return asyncio.get_running_loop().time() + options.read_timeout_millis / 1000


def _not_enough(stream: Stream, options: ReadMessagesOptions, number: int) -> NotEnoughMessages:
    start, newest = options.desired_start_sequence_number, stream.next_sequence - 1
    if start > newest:
        why = f"the desired start {start} is greater than the last sequence number {newest}"
    else:
        why = f"only {number} of the {options.min_message_count} requested messages are stored"
    return NotEnoughMessages(f"stream {stream.name!r}: {why}")
