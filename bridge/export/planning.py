"""Which messages make up the next batch: reads a stream, waits for more messages, skips gaps.

A batch is due when enough messages or bytes are pending, when the oldest pending message is old enough, or at
once if the export has no interval or an operator asks for it. Until then each message is read and counted
once, but not kept, so memory stays bounded by one batch per thread, however many exports wait.

With `topics`, only messages that match one of the filters are counted and planned. Each topic is matched once
(as long as there are few). If none of the pending messages matches, the position passes them at once.

An exporter that declares what filters leave out (`declares_filtered`) gets batches of all numbers that were
read, whether they match or not. Such a batch ends only where numbers are missing in the stream. If it is due
and has no record, the position passes its numbers, and the exporter reports them as a `filtered` range;
consecutive ones become one range.

Missing numbers were dropped by the stream's limits (its drop log has the reasons) or left out by a
plugin's `transform_records`. They are skipped and reported, never waited for.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import count, repeat
from pathlib import Path
from typing import NamedTuple

from bridge.clock import Timeline
from bridge.encryption import Keys
from bridge.filtered import MAX_SPAN
from bridge.plugin.api import Batching, BatchLimits, ExportConfig, Record
from bridge.plugin.transform import TransformState
from bridge.plugin.withheld import Withheld
from bridge.streams.drops import DropLog
from bridge.streams.layout import Files
from bridge.streams.reader import StreamReader
from bridge.streams.segment import Frame, columns
from bridge.topics import matches

MAX_RECORDS = 100_000
MAX_BYTES = 4 * 1024 * 1024
COUNT_EVERY = 0.2  # seconds between two counts of pending messages
_CHUNK_RECORDS, _CHUNK_BYTES = 10_000, 1024 * 1024
_SCAN_BYTES = 32 * 1024 * 1024
_TOPICS = 4096

Transform = Callable[[list[Record], str, ExportConfig, TransformState], list[Record]]


class Source:
    """A stream in the worker. The main thread updates the numbers when messages are committed."""

    def __init__(
        self,
        name: str,
        directory: Path,
        epoch: int,
        keys: Keys | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.name, self.directory, self.epoch, self.keys = name, directory, epoch, keys
        self.timeline = timeline or Timeline()
        self.encrypted = False  # whether new segments are
        self.revision = 0  # of the definition of its exports
        self.keeps_rejected_in = ""  # the stream for rejected messages of exports that name none
        self.loses_tail = True  # a power cut may take messages that were exported
        self.oldest = 0
        self.next = 0
        self._drops: DropLog | None = None

    def drops(self) -> DropLog | None:
        """The record of drops as it is now; None if it cannot be read. For the main thread."""
        with suppress(OSError):
            if self._drops is None:
                self._drops = DropLog(Files(), self.directory)
            self._drops.refresh()
            return self._drops
        return None


class Plan(NamedTuple):
    """The next batch: the position at which it begins, its last number, and what is skipped before and in it.

    Without records, the position is where the next batch may begin.
    """

    position: int
    last: int
    records: list[Record]
    skipped: list[tuple[int, int, str]]


class _Topics(dict[bytes, str]):
    """A cache of decoded topics, because a few topics repeat all the time."""

    def __missing__(self, topic: bytes) -> str:
        text = self[topic] = topic.decode("utf-8", "replace")
        return text


class _Matching(dict[str, bool]):
    """Whether a topic matches one of an export's filters (`ExportConfig.filters`)."""

    def __init__(self, filters: Sequence[str]) -> None:
        self._filters = [one for one in filters if one[0] != "\0"]
        self._withheld = Withheld([one[1:] for one in filters if one[0] == "\0"])

    def __missing__(self, topic: str) -> bool:
        if len(self) >= _TOPICS:
            self.clear()
        found = self[topic] = not self._filters or any(matches(wanted, topic) for wanted in self._filters)
        return found

    def takes(self, record: Record) -> bool:
        """Return whether the export gets a message."""
        return self[record.topic] and not self._withheld(record.topic, record.payload)


class Planner:
    """Reads one export's batches; used by one thread at a time."""

    def __init__(self, source: Source, transform: Transform | None) -> None:
        self._source, self._transform = source, transform
        self._limits, self._batching = BatchLimits(), Batching()
        self.state = TransformState()  # of the transform, at the position
        self.max_bytes = MAX_BYTES  # of a batch that no link limits
        self._reader: StreamReader | None = None
        self._drops: DropLog | None = None
        self._topics = _Topics()
        self._matching: _Matching | None = None  # None: every topic
        self._count_from = -1  # where the count begins; -1: there is no count
        self._counted_to = 0
        self._count = self._size = 0
        self._full_at = 0.0
        self._count_at = 0.0
        self._hurried = 0  # messages below this number wait for no others

    def configure(
        self, limits: BatchLimits, batching: Batching, most: int, topics: Sequence[str] = ()
    ) -> None:
        """Set an exporter's limits, batching and filters, and the most bytes that memory allows a batch."""
        self._matching = _Matching(topics) if topics else None
        self._limits, self._batching = limits, batching
        self._records = min(batching.records or MAX_RECORDS, limits.records or MAX_RECORDS)
        wanted = batching.size or limits.batch_bytes or MAX_BYTES
        self.max_bytes = self._bytes = min(wanted, limits.batch_bytes or wanted, most)
        self._count_from = -1

    def limit(self, size: int | None) -> None:
        """Plan no batch of more than `size` bytes; None: the exporter's own limit."""
        size = min(self.max_bytes, size or self.max_bytes)
        if size != self._bytes:
            self._bytes, self._count_from = size, -1

    def fitting(self, records: Sequence[Record]) -> int:
        """How many of the leading records fit in a batch now; at least one."""
        room = self._bytes
        for n, record in enumerate(records[: self._records]):
            room -= len(record.payload) + len(record.topic)
            if room < 0:
                return max(n, 1)
        return min(len(records), self._records)

    def hurry(self, upto: int) -> None:
        """Let messages below a number wait for no others; from any thread."""
        self._hurried = upto

    def due(self, position: int) -> float:
        """The monotonic time at which planning may return a batch: in the past if it is unknown."""
        if self._count_from != position or position < self._hurried:
            return 0.0
        return min(self._full_at, self._count_at) if self._source.next > self._counted_to else self._full_at

    def complete_at(self, position: int) -> float:
        """When the batch that collects messages is sent at the latest (monotonic); 0.0 if none does."""
        return self._full_at if self._count_from == position else 0.0

    def recent(self, position: int, millis: int) -> int:
        """`position`, or where newer messages begin if the message there has waited for too long.

        That is for more than `millis` longer than the batch may wait. The newest message is always recent. A
        message from the future counts as old: its stream was copied from another gateway.
        """
        longest, end = (self._batching.millis or 0) + millis, self._source.next

        def is_recent(number: int) -> bool:
            found = self._stream().moment_of(number, end)
            return found is None or abs(self._source.timeline.now() - found.age) <= longest

        if position >= end or is_recent(position):
            return position
        return bisect_left(range(end - 1), True, position, key=is_recent)

    def plan(self, position: int, config: ExportConfig, upto: int | None = None) -> Plan | None:
        """The next batch from `position` on; None if it is not due. It may have no records.

        With `upto`, there is one at once, of numbers below that.
        """
        end = self._source.next if upto is None else upto
        if position >= end or (upto is None and not self._is_due(position, end)):
            return None
        if upto is None:
            self._count_from = -1
        if self._limits.declares_filtered:
            return self._plan_declared(position, end, config)
        seen: Sequence[int] = ()
        if self._matching is None:
            found = self._read(position, end, self._records, self._bytes)
        else:
            seen, found = self._scan(position, end)
        if not found and not seen:
            return Plan(end, end - 1, [], self.missing(position, end - 1, []))
        if self._limits.contiguous:
            found = _consecutive(found)
        records = self._records_of(found, config)
        if self._limits.contiguous:
            records = _consecutive(records)
        if not seen:
            first, last = found[0].sequence_number, found[-1].sequence_number
            if len(records) == len(found) == last - first + 1:
                return Plan(first, last, records, self.missing(position, first - 1, []))
            seen = [record.sequence_number for record in found]
        reach = records[-1].sequence_number if records else seen[-1]
        skipped = self._not_exported(position, reach, seen, found, records)
        return Plan(records[0].sequence_number if records else reach + 1, reach, records, skipped)

    def _plan_declared(self, position: int, end: int, config: ExportConfig) -> Plan:
        """The next batch of an exporter that declares what filters leave out."""
        seen: Sequence[int]
        if self._matching is None:
            found = self._read(position, end, self._records, self._bytes)
            seen = _numbers(found)
        else:
            seen, found = self._scan(position, end, MAX_SPAN)
        if not seen:
            return Plan(end, end - 1, [], self.missing(position, end - 1, []))
        first, last = seen[0], seen[-1]
        if last - first != len(seen) - 1:  # numbers were dropped
            last = first + next(n for n, number in enumerate(seen) if number != first + n) - 1
        skipped = self.missing(position, first - 1, [])
        if found and found[-1].sequence_number > last:
            found = [record for record in found if record.sequence_number <= last]
        records = self._declared(first, last, found, config)
        if not records:
            return Plan(last + 1, last, [], [*skipped, (first, last, "filtered")])
        return Plan(first, last, records, skipped)

    def _declared(self, first: int, last: int, found: list[Record], config: ExportConfig) -> list[Record]:
        """What plugins leave of the records: none twice, and each in its place."""
        left = self._records_of(found, config)
        if left and len(left) == left[-1].sequence_number - left[0].sequence_number + 1 == last - first + 1:
            return left
        records, number = [], first - 1
        for record in left:
            if number < record.sequence_number <= last:
                records.append(record)
                number = record.sequence_number
        return records

    def _scan(self, position: int, end: int, most: int = MAX_RECORDS) -> tuple[list[int], list[Record]]:
        """Read until a batch is full; return the numbers that were read, and the records of the topics.

        One call reads so much that other exports have their turn: about `most` messages.
        """
        seen: list[int] = []
        kept: list[Record] = []
        size, count = 0, self._records
        while position < end and len(seen) < most and size < max(_SCAN_BYTES, self._bytes):
            if not (read := self._read(position, end, count, MAX_BYTES)):
                break
            # Where few messages match, more are read at a time.
            count = min(2 * count, MAX_RECORDS, max(most - len(seen) - len(read), 1))
            seen += [record.sequence_number for record in read]
            size += sum(len(record.payload) for record in read)
            kept += self.matching(read)
            position = seen[-1] + 1
            if (fit := self.fitting(kept)) < len(kept) or fit == self._records:
                kept = kept[:fit]
                seen = seen[: bisect_right(seen, kept[-1].sequence_number)]
                break
        return seen, kept

    def matching(self, records: list[Record]) -> list[Record]:
        """The records that match the topics of the export."""
        if (matching := self._matching) is None:
            return records
        return list(filter(matching.takes, records))

    def reread(self, first: int, last: int, config: ExportConfig) -> Plan | None:
        """Read the batch first..last again, as far as it exists; None if it must be planned again.

        Raises CorruptData for damage in it that is not quarantined yet.
        """
        matching = self._matching
        if self._limits.declares_filtered:  # the topics of the planned batch
            matching = _Matching(config.filters) if config.filters else None
        # Other topics may have any number of bytes between those of the batch.
        size = 2**62 if matching is None else MAX_BYTES
        seen: list[int] = []
        found: list[Record] = []
        # A read that has found something ends silently before damage; a read that begins there raises.
        position = first
        while position <= last and (read := self._read(position, last + 1, last - position + 1, size)):
            seen += [record.sequence_number for record in read]
            found += read if matching is None else filter(matching.takes, read)
            position = seen[-1] + 1
        if self._limits.declares_filtered:
            records = self._declared(first, last, found, config)
            return Plan(first, last, records, []) if records and len(seen) == last - first + 1 else None
        records = self._records_of(found, config)
        if len(records) == last - first + 1:
            return Plan(first, last, records, [])
        if self._limits.contiguous:
            return None
        return Plan(first, last, records, self._not_exported(first, last, seen, found, records))

    def _not_exported(
        self, first: int, last: int, seen: Sequence[int], found: list[Record], records: list[Record]
    ) -> list[tuple[int, int, str]]:
        """The numbers of first..last that were dropped from the stream, or filtered by a plugin.

        `seen` are those in the stream, `found` the records of the export's topics, and `records` what plugins
        have left of them.
        """
        skipped = self.missing(first, last, [number for number in seen if number <= last])
        chosen = [m.sequence_number for m in found if m.sequence_number <= last]
        if len(records) != len(chosen):
            kept = {record.sequence_number for record in records}
            omitted = [n for n in chosen if n not in kept]
            skipped = sorted(skipped + intersection([(first, last, "filtered")], omitted))
        return skipped

    def missing(self, first: int, last: int, present: Sequence[int]) -> list[tuple[int, int, str]]:
        """The numbers of first..last that are not `present`, with the reasons of the stream's drop log."""
        if len(present) == last - first + 1:
            return []
        holes, expected = [], first
        for number in [*present, last + 1]:
            if number > expected:
                holes.append((expected, number - 1))
            expected = number + 1
        if self._drops is None:
            self._drops = DropLog(Files(), self._source.directory)
        self._drops.refresh()
        return [part for hole in holes for part in self._with_reasons(*hole)]

    def lost(self, position: int) -> int:
        """How many messages from a position on are lost already, to an export that begins there now."""
        return DropLog(Files(), self._source.directory).lost(position, self._source.next - 1)

    def oldest(self) -> int:
        """The number of the oldest stored message, or the next number if there is none."""
        return self._stream().oldest()

    def pending(self, position: int) -> list[Record]:
        """The first pending records, as far as they can still be read."""
        try:
            return self.matching(self._read(position, self._source.next, 1000, MAX_BYTES))
        except Exception:  # the stream is being deleted meanwhile
            return []

    def close(self) -> None:
        """Close the files."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read(self, start: int, end: int, records: int, size: int) -> list[Record]:
        if len(self._topics) > _TOPICS:
            self._topics.clear()
        return self._stream().read_as(self._decode, start, end=end, max_messages=records, max_bytes=size)

    def _stream(self) -> StreamReader:
        if self._reader is None:
            self._reader = StreamReader(self._source.directory, keys=self._source.keys)
        return self._reader

    def _decode(self, data: bytes, frame: Frame) -> list[Record]:
        topics, payloads, headers = columns(data, frame)
        texts = map(self._topics.__getitem__, topics)
        return list(map(Record, count(frame.base), repeat(frame.time), texts, payloads, headers))

    def _is_due(self, position: int, end: int) -> bool:
        millis = self._batching.millis
        if millis is None or position < self._hurried:
            return True
        if self._matching is None and end - position >= self._records:
            return True
        now = time.monotonic()
        if self._count_from != position:
            oldest = self._stream().moment_of(position, end)
            if oldest is None:
                return True
            # A stream that was copied from another gateway may have messages from the future.
            left = oldest.age + millis - self._source.timeline.now()
            self._full_at = now + min(max(left, 0), millis) / 1000
            self._count_from = position
            self._counted_to = oldest.number
            self._count = self._size = 0
        if now >= self._full_at:
            return True
        while self._counted_to < end:
            found = self._read(self._counted_to, end, _CHUNK_RECORDS, _CHUNK_BYTES)
            if not found:
                self._counted_to = end
                break
            if self._limits.contiguous and found[-1].sequence_number != self._counted_to + len(found) - 1:
                return True  # a gap: the batch cannot grow beyond it
            self._counted_to = found[-1].sequence_number + 1
            found = self.matching(found)
            self._count += len(found)
            self._size += sum(len(m.payload) + len(m.topic) for m in found)
            if self._count >= self._records or self._size >= self._bytes:
                return True
        self._count_at = now + COUNT_EVERY
        if self._limits.declares_filtered:
            return self._counted_to - position >= MAX_SPAN
        return not self._count

    def _records_of(self, found: list[Record], config: ExportConfig) -> list[Record]:
        if self._transform is None:
            return found
        self.state.rewind()
        return self._transform(list(found), self._source.name, config, self.state)

    def _with_reasons(self, first: int, last: int) -> list[tuple[int, int, str]]:
        assert self._drops is not None
        parts = self._drops.within(first, last)
        # The drop log has a reason for each drop: a message that is missing without one is lost.
        parts += [(a, b, "unknown") for a, b in self._drops.live(first, last)]
        return sorted(parts)


def too_large(records: Sequence[Record], limit: int | None) -> dict[int, str]:
    """The records whose payload is larger than the destination accepts, each with the reason."""
    if limit is None:
        return {}
    sizes = {n: len(record.payload) for n, record in enumerate(records) if len(record.payload) > limit}
    return {n: f"the message of {size} bytes is larger than {limit} bytes" for n, size in sizes.items()}


def intersection(ranges: list[tuple[int, int, str]], numbers: Collection[int]) -> list[tuple[int, int, str]]:
    """The parts of `ranges` that contain these numbers."""
    ascending, found = sorted(numbers), list[tuple[int, int, str]]()
    for first, last, reason in ranges:
        for number in ascending[bisect_left(ascending, first) : bisect_right(ascending, last)]:
            if found and found[-1][1] + 1 == number and found[-1][2] == reason:
                found[-1] = found[-1][0], number, reason
            else:
                found.append((number, number, reason))
    return found


def _consecutive(records: list[Record]) -> list[Record]:
    """The leading records with consecutive numbers."""
    if not records or records[-1].sequence_number - records[0].sequence_number == len(records) - 1:
        return records
    first = records[0].sequence_number
    return records[: next(n for n, record in enumerate(records) if record.sequence_number != first + n)]


def _numbers(records: list[Record]) -> Sequence[int]:
    """The numbers of records: a range if none is missing, as nearly always."""
    if records and records[-1].sequence_number - records[0].sequence_number == len(records) - 1:
        return range(records[0].sequence_number, records[-1].sequence_number + 1)
    return [record.sequence_number for record in records]
