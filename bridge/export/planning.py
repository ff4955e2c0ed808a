"""Which messages make the next batch: reading a stream, waiting for more, skipping holes.

A batch is due when enough messages or bytes are pending, when the oldest pending message is old
enough, or at once if the export has no interval. Until then each message is read once, counted and
not kept: memory stays bounded by one batch per thread, however many exports wait.

Missing numbers were dropped by the stream's limits (its drop log has the reasons) or left out by a
plugin's `transform_records`. They are skipped and reported, never waited for.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from itertools import count, repeat
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from bridge.plugin.api import Batching, BatchLimits, ExportConfig, Record
from bridge.streams.drops import DropLog, DropReason
from bridge.streams.layout import Files
from bridge.streams.reader import StreamReader
from bridge.streams.segment import Frame, columns

MAX_RECORDS = 100_000
MAX_BYTES = 4 * 1024 * 1024
COUNT_EVERY = 0.2  # seconds between two counts of what is pending
_CHUNK_RECORDS, _CHUNK_BYTES = 10_000, 1024 * 1024
_TOPICS = 4096

Transform = Callable[[list[Record], str, ExportConfig], list[Record]]


class Source:
    """A stream in the worker. The main thread updates the numbers when messages are committed."""

    def __init__(self, name: str, directory: Path, epoch: int) -> None:
        self.name, self.directory, self.epoch = name, directory, epoch
        self.revision = 0  # of the definition of its exports
        self.oldest = 0
        self.next = 0


class Plan(NamedTuple):
    """The next batch, the position at which it begins, and what is skipped before and within it."""

    position: int
    records: list[Record]
    skipped: list[tuple[int, int, str]]


class _Topics(dict[bytes, str]):
    """Decoded topics: a few topics repeat all the time."""

    def __missing__(self, topic: bytes) -> str:
        text = self[topic] = topic.decode("utf-8", "replace")
        return text


class Planner:
    """Reads one export's batches; used by one thread at a time."""

    def __init__(self, source: Source, transform: Transform | None) -> None:
        self._source, self._transform = source, transform
        self._limits, self._batching = BatchLimits(), Batching()
        self.max_bytes = MAX_BYTES  # of a batch that no link limits
        self._reader: StreamReader | None = None
        self._drops: DropLog | None = None
        self._topics = _Topics()
        self._count_from = -1  # where the count begins; -1: there is no count
        self._counted_to = 0
        self._count = self._size = 0
        self._full_at = 0.0
        self._count_at = 0.0

    def configure(self, limits: BatchLimits, batching: Batching, most: int) -> None:
        """Set an exporter's limits and batching, and the largest batch in bytes that memory allows."""
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

    def due(self, position: int) -> float:
        """The monotonic time at which planning may return a batch: in the past if it is unknown."""
        if self._count_from != position:
            return 0.0
        return min(self._full_at, self._count_at) if self._source.next > self._counted_to else self._full_at

    def plan(self, position: int, config: ExportConfig) -> Plan | None:
        """The next batch from `position` on; None if it is not due. It may have no records."""
        end = self._source.next
        if position >= end or not self._is_due(position, end):
            return None
        self._count_from = -1
        found = self._read(position, end, self._records, self._bytes)
        if not found:
            return Plan(end, [], self.missing(position, end - 1, []))
        if self._limits.contiguous:
            found = _consecutive(found)
        records = self._records_of(found, config)
        if self._limits.contiguous:
            records = _consecutive(records)
        first, last = found[0].sequence_number, found[-1].sequence_number
        if len(records) == len(found) == last - first + 1:
            return Plan(first, records, self.missing(position, first - 1, []))
        reach = records[-1].sequence_number if records else last
        skipped = self._not_exported(position, reach, found, records)
        return Plan(records[0].sequence_number if records else reach + 1, records, skipped)

    def reread(self, first: int, last: int, config: ExportConfig) -> Plan | None:
        """Read the batch first..last again, as far as it exists; None if it must be planned anew.

        Raises CorruptData for damage in it that is not quarantined yet.
        """
        found = self._read(first, last + 1, last - first + 1, 2**62)
        # A read that has found something ends silently before damage; a read that begins there raises.
        while found and (after := found[-1].sequence_number + 1) <= last:
            if not (rest := self._read(after, last + 1, last - first + 1, 2**62)):
                break
            found += rest
        records = self._records_of(found, config)
        if len(records) == last - first + 1:
            return Plan(first, records, [])
        if self._limits.contiguous:
            return None
        return Plan(first, records, self._not_exported(first, last, found, records))

    def _not_exported(
        self, first: int, last: int, found: list[Record], records: list[Record]
    ) -> list[tuple[int, int, str]]:
        """The numbers of first..last that are not in `records`: dropped from the stream, or filtered."""
        present = [m.sequence_number for m in found if m.sequence_number <= last]
        skipped = self.missing(first, last, present)
        if len(records) != len(present):
            kept = {record.sequence_number for record in records}
            skipped = sorted(skipped + [(n, n, "filtered") for n in present if n not in kept])
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

    def oldest(self) -> int:
        """The number of the oldest stored message, or the next number if there is none."""
        return self._stream().oldest()

    def pending(self, position: int) -> list[Record]:
        """The first pending records, as far as they can still be read."""
        try:
            return self._read(position, self._source.next, 1000, MAX_BYTES)
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
            self._reader = StreamReader(self._source.directory)
        return self._reader

    def _decode(self, data: bytes, frame: Frame) -> list[Record]:
        topics, payloads, headers = columns(data, frame)
        texts = map(self._topics.__getitem__, topics)
        return list(map(Record, count(frame.base), repeat(frame.time), texts, payloads, headers))

    def _is_due(self, position: int, end: int) -> bool:
        millis = self._batching.millis
        if millis is None or end - position >= self._records:
            return True
        now = time.monotonic()
        if self._count_from != position:
            oldest = self._read(position, end, 1, 1)
            if not oldest:
                return True
            # By the wall clock, but never longer than the interval, whatever the clock does.
            left = oldest[0].ingest_time + millis - time.time_ns() // 1_000_000
            self._full_at = now + min(max(left, 0), millis) / 1000
            self._count_from = position
            self._counted_to = oldest[0].sequence_number
            self._count = self._size = 0
        if now >= self._full_at:
            return True
        while self._counted_to < end:
            found = self._read(self._counted_to, end, _CHUNK_RECORDS, _CHUNK_BYTES)
            if not found:
                self._counted_to = end
                break
            if self._limits.contiguous and found[-1].sequence_number != self._counted_to + len(found) - 1:
                return True  # a hole: the batch cannot grow beyond it
            self._counted_to = found[-1].sequence_number + 1
            self._count += len(found)
            self._size += sum(len(m.payload) + len(m.topic) for m in found)
            if self._count >= self._records or self._size >= self._bytes:
                return True
        self._count_at = now + COUNT_EVERY
        return False

    def _records_of(self, found: list[Record], config: ExportConfig) -> list[Record]:
        return self._transform(list(found), self._source.name, config) if self._transform else found

    def _with_reasons(self, first: int, last: int) -> list[tuple[int, int, str]]:
        assert self._drops is not None
        ranges = self._drops.ranges
        begin = bisect_left(ranges, first, key=attrgetter("last"))
        end = bisect_right(ranges, last, key=attrgetter("first"))
        parts = [
            (max(first, drop.first), min(last, drop.last), DropReason(drop.reason).name.lower())
            for drop in ranges[begin:end]
        ]
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
