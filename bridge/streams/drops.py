"""The record of drops, a stream's file `drops.log`: which numbers were dropped, when and why.

    record = first u64 | last u64 | time u64 (Unix ms) | reason u8 | zero u8 x 3 | crc u32        32 bytes

A record is appended before the data of its numbers is deleted, so every drop is explained. The file has what
the segments lack: the numbers dropped inside a segment (message limits, purge by topic), and the reasons.

A record that fails its check is skipped, and the messages that it dropped may reappear. The next start
quarantines the file and keeps its valid records (see `recovery`). If zeros follow the record to the end of
its sector of 512 bytes, it is an unfinished write and not damage. The next record overwrites the last such
one.

A file that has grown is replaced by its compact form. Adjacent ranges with the same reason become one. Below
the oldest message, all ranges but the newest `KEPT` are joined, except real losses. The compact form begins
with 32 random bytes, which are not a record; they tell readers that the file is new.

A record is synced before the files that it explains are deleted, and before a purge is confirmed. Apart from
that, a record is synced at once only if applying the limits again would not lead to the same drop. After a
failed sync, all records are written again before the next one. So they are after a start, because a sync may
have failed before it.

Preallocated zeros follow the records, and records overwrite them. If a record needed a new block, nothing
could be freed on a full disk. The zeros are there from the stream's creation on; its definition says so (see
`meta`), and then a file that is missing or shorter than `ROOM` is damaged. While the file cannot be extended,
its second half is reserved for records that explain obsolete files, in joined form: one for all numbers below
the oldest message, and one for each real loss.
"""

from __future__ import annotations

import contextlib
import os
import struct
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from enum import IntEnum
from errno import EIO
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import msgspec

from bridge import books
from bridge.decoded import MOST, FromMinusOne, Next
from bridge.deflate import crc32
from bridge.streams.layout import Files
from bridge.streams.segment import SECTOR

NAME = "drops.log"
KEPT = 1000
COMPACT_AT = 64 * 1024
ROOM = 4096  # bytes made at a time, a block of most file systems
_RECORD = struct.Struct("<QQQBxxxI")


class DropReason(IntEnum):
    """Why messages are gone. `UNKNOWN` and `DAMAGED` are losses; the other reasons are intended."""

    UNKNOWN = 0
    OVERWRITTEN = 1
    EXPIRED = 2
    PURGED = 3
    LIMITS = 4
    DAMAGED = 5
    MEMORY = 6
    SKIPPED = 7  # numbers that were never given to a message
    EXPORTED = 8  # freed by retention "exported" after all exports had passed them


_REASONS = frozenset(map(int, DropReason))
LOSSES = (DropReason.DAMAGED, DropReason.UNKNOWN)
# For an export that had not passed the message. A purge is wanted, what is EXPORTED has been delivered by all
# that count, and MEMORY and SKIPPED have numbers that no message had.
LOST_TO_EXPORTS = (*LOSSES, DropReason.OVERWRITTEN, DropReason.EXPIRED, DropReason.LIMITS)
_LOST_NAMES = frozenset(reason.name.lower() for reason in LOST_TO_EXPORTS)

# After a power cut the limits are applied again and come to the same; the other records must be on the disk.
_REPEATABLE = (DropReason.OVERWRITTEN, DropReason.EXPIRED, DropReason.LIMITS, DropReason.EXPORTED)


class Drop(NamedTuple):
    """The numbers first..last are gone. `time` is Unix time in ms."""

    first: int
    last: int
    time: int
    reason: int


def _encode(drop: Drop) -> bytes:
    head = _RECORD.pack(*drop, 0)[:-4]
    return head + crc32(head).to_bytes(4, "little")


def _decode(data: bytes, pos: int) -> Drop | None:
    first, last, time, reason, crc = _RECORD.unpack_from(data, pos)
    sound = crc32(data[pos : pos + _RECORD.size - 4]) == crc and first <= last <= MOST and reason in _REASONS
    return Drop(first, last, time, reason) if sound else None


def _is_unfinished(data: bytes, pos: int, start: int = 0) -> bool:
    """Whether the bad record at `pos` is an unfinished write; `start`: where `data` begins in the file."""
    check = pos + _RECORD.size - 4
    following = data[check : pos + SECTOR - (start + pos) % SECTOR].rstrip(b"\0")
    return crc32(data[pos:check]).to_bytes(4, "little").startswith(following)


def examine(data: bytes) -> tuple[list[Drop], bool]:
    """The sound records of a file, and whether others are damaged."""
    found, damaged = list[Drop](), False
    for pos in range(0, min(len(data.rstrip(b"\0")), len(data) - _RECORD.size + 1), _RECORD.size):
        drop = _decode(data, pos)
        if drop is not None:
            found.append(drop)
        elif not _is_unfinished(data, pos) and not (pos == 0 and _is_random(data)):
            damaged = True
    return found, damaged


def _is_random(data: bytes) -> bool:
    """Whether a file begins with random bytes: few of them are zero; in a record at least eleven are."""
    return data.count(0, 0, _RECORD.size) < 6


def make(files: Files, directory: Path, drops: list[Drop]) -> None:
    """Make the file durably, with these records after the random bytes; raises OSError."""
    records = os.urandom(_RECORD.size) + b"".join(map(_encode, drops)) if drops else b""
    files.replace(directory / NAME, records + bytes(ROOM))


def _joined(drops: list[Drop]) -> list[Drop]:
    """Ascending drops as one range, with the numbers between them; real losses are not joined."""
    joined: list[Drop] = []
    for drop in drops:
        if joined and drop.reason not in LOSSES and joined[-1].reason not in LOSSES:
            joined[-1] = drop._replace(first=joined[-1].first)
        else:
            joined.append(drop)
    return joined


def _number(drops: list[Drop]) -> int:
    return sum(drop.last - drop.first + 1 for drop in drops)


class Passed(msgspec.Struct, array_like=True, frozen=True):
    """What an export has passed because it was dropped; part of its position.

    `lost` messages were lost to it, the last ones were `lost_first` to `lost_last`. Of those that it has to
    pass, `waived` were dropped before it began. `first` to `last` were passed last, for whatever reason.
    """

    lost: Next = 0
    waived: Next = 0
    lost_first: Next = 0
    lost_last: FromMinusOne = -1
    first: Next = 0
    last: FromMinusOne = -1

    def add(self, ranges: Iterable[tuple[int, int, str]]) -> Passed:
        """Return this after ranges with the reasons of a drop log, or "filtered", have been passed."""
        passed = self
        for first, last, reason in ranges:
            if reason == "filtered":
                continue
            begin, end = _extended(passed.first, passed.last, first, last)
            passed = msgspec.structs.replace(passed, first=begin, last=end)
            if reason in _LOST_NAMES:
                waived = min(passed.waived, last - first + 1)
                lost, left = passed.lost + last - first + 1 - waived, passed.waived - waived
                begin, end = _extended(passed.lost_first, passed.lost_last, first + waived, last)
                passed = msgspec.structs.replace(
                    passed, lost=lost, waived=left, lost_first=begin, lost_last=end
                )
        return passed

    def sent_below(self, position: int) -> int:
        """Return the last number below a position that was not dropped; -1 if there is none."""
        return (self.first if self.last == position - 1 else position) - 1


def _extended(first: int, last: int, begin: int, end: int) -> tuple[int, int]:
    """Return a range with another one, if they are adjacent; else the other one, if it has numbers."""
    if begin > end:
        return first, last
    if last >= first and (last + 1 == begin or end + 1 == first):
        return min(first, begin), max(last, end)
    return begin, end


class Drops:
    """The dropped numbers of one stream as disjoint ranges in ascending order."""

    def __init__(self) -> None:
        self.ranges: list[Drop] = []
        self.number = 0  # how many numbers they hold
        books.opened(self)

    def recount(self) -> Iterable[books.Entry]:
        yield "number", self.number, _number(self.ranges)

    def add(self, drop: Drop) -> list[Drop]:
        """Add a drop; returns the parts that were not dropped before."""
        fresh = [Drop(a, b, drop.time, drop.reason) for a, b in self.live(drop.first, drop.last)]
        for new in fresh:
            self.number += new.last - new.first + 1
            at = bisect_left(self.ranges, new)
            if at and (before := self.ranges[at - 1]).last + 1 == new.first and before.reason == new.reason:
                self.ranges[at - 1] = before._replace(last=new.last, time=new.time)
            else:
                insort(self.ranges, new)
        return fresh

    def live(self, first: int, last: int) -> list[tuple[int, int]]:
        """The parts of first..last that were not dropped."""
        return list(self.each_live(first, last))

    def each_live(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """As `live`, one by one: for callers that need only the first of many."""
        at = max(0, bisect_right(self.ranges, (first, last + 1, 0, 0)) - 1)
        while at < len(self.ranges) and (drop := self.ranges[at]).first <= last:
            if drop.last >= first:
                if drop.first > first:
                    yield first, drop.first - 1
                first = max(first, drop.last + 1)
            at += 1
        if first <= last:
            yield first, last

    def first_live(self, number: int) -> int:
        """`number`, or the first one after it that was not dropped."""
        at = max(0, bisect_right(self.ranges, (number, 2**64, 0, 0)) - 1)
        while at < len(self.ranges) and self.ranges[at].first <= number:
            number = max(number, self.ranges[at].last + 1)
            at += 1
        return number

    def count(self, first: int, last: int) -> int:
        """How many of first..last were dropped."""
        if not self.ranges or first > self.ranges[-1].last:
            return 0
        return last - first + 1 - sum(b - a + 1 for a, b in self.live(first, last))

    def within(self, first: int, last: int) -> list[tuple[int, int, str]]:
        """The dropped parts of first..last with the names of their reasons, ascending."""
        begin = bisect_left(self.ranges, first, key=attrgetter("last"))
        end = bisect_right(self.ranges, last, key=attrgetter("first"))
        return [
            (max(first, drop.first), min(last, drop.last), DropReason(drop.reason).name.lower())
            for drop in self.ranges[begin:end]
        ]

    def lost(self, first: int, last: int) -> int:
        """How many of first..last are lost to an export that has not passed them."""
        return sum(b - a + 1 for a, b, reason in self.within(first, last) if reason in _LOST_NAMES)

    def time_of(self, number: int) -> int:
        """When a number was dropped, Unix time in ms; 0 if it was not."""
        at = bisect_left(self.ranges, number, key=attrgetter("last"))
        return self.ranges[at].time if at < len(self.ranges) and self.ranges[at].first <= number else 0

    def compact(self, oldest: int) -> None:
        """Join all but the newest `KEPT` of the ranges below `oldest`."""
        many = bisect_left(self.ranges, (oldest, 0, 0, 0)) - KEPT
        if many > 0:
            joined = _joined(before := self.ranges[: many + 1])
            self.ranges[: many + 1] = joined
            self.number += _number(joined) - _number(before)


class DropLog(Drops):
    """`Drops` with its file; one process appends, any process may `refresh` from it."""

    def __init__(self, files: Files, directory: Path) -> None:
        super().__init__()
        self._files, self._path = files, directory / NAME
        self._read = 0  # bytes that were read and will not change
        self._size = 0  # where its records end
        self._room = 0  # where it ends
        self._start = b""  # identifies the file; inode numbers are reused
        self._named = False  # the file's name is known to be on the disk
        self._unsaved: list[Drop] = []
        self._suspect = True  # a sync has failed, or may have failed before this start
        self._begun = 0  # how many of them may be in the file already: rewritten without a change
        self.refresh()

    def refresh(self) -> None:
        """Read what was added to the file since the last time."""
        try:
            fd = self._files.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            self._forget(b"")
            return
        try:
            size, start = os.fstat(fd).st_size, self._files.read(fd, _RECORD.size, 0)
            if start != self._start or size < self._read:
                self._forget(start)
            begin, data = self._read, self._files.read(fd, size - self._read, self._read)
        finally:
            os.close(fd)
        slots = min(-(-len(data.rstrip(b"\0")) // _RECORD.size), len(data) // _RECORD.size)
        certain = True
        for pos in range(0, slots * _RECORD.size, _RECORD.size):
            drop = _decode(data, pos)
            if drop is not None:
                self.add(drop)
            elif begin + pos:  # damaged, or being written now: read again next time
                certain = False
            if certain:
                self._read = begin + pos + _RECORD.size
        if slots and drop is None and _is_unfinished(data, pos, begin):
            slots -= 1
        self._size, self._room = begin + slots * _RECORD.size, size

    def _forget(self, start: bytes) -> None:
        self.ranges, self.number = [], 0
        self._read, self._size, self._room, self._start = 0, 0, 0, start

    def record(self, ranges: list[tuple[int, int]], time: int, reason: DropReason) -> list[Drop]:
        """Add drops, and write them to the file; returns the parts that were not dropped before.

        A drop frees space, so it must not fail for lack of space: what cannot be written now is written with
        the next record, or by `explains`.
        """
        fresh = [new for a, b in ranges if a <= b for new in self.add(Drop(a, b, time, int(reason)))]
        self._unsaved += fresh
        self.save()
        return fresh

    def save(self) -> None:
        """Write what is not in the file yet, and extend the file, if the disk has space."""
        with contextlib.suppress(OSError):
            self._save()

    def _save(self) -> None:
        end = self._size + len(self._unsaved) * _RECORD.size
        if self._room < end + ROOM // 2:
            self._extend((end + 2 * ROOM - 1) // ROOM * ROOM)
        if self._unsaved:
            self._write(len(self._unsaved))

    def settle(self, oldest: int, *, fresh: bool) -> None:
        """Have the record of a purge on the disk before its answer; raises OSError.

        `oldest` is as in `explains`. `fresh`: the purge has dropped messages, and its record was synced if
        that was possible. Otherwise they were dropped before, perhaps by an earlier process, and their record
        may not be on the disk.
        """
        if fresh and not self._unsaved and self._named:
            return
        self.explains(oldest)
        if self._unsaved:
            self._save()
        if self._size:
            self.sync()

    def explains(self, oldest: int) -> bool:
        """Whether the file records all drops below `oldest`; writes what is missing, also on a full disk."""
        with contextlib.suppress(OSError):
            self._write(self._begun)
            below = sorted(drop for drop in self._unsaved if drop.first < oldest)
            joined = _joined(below)
            self._unsaved = joined + [drop for drop in self._unsaved if drop.first >= oldest]
            self._write(len(joined), sync=True)  # what is joined with a purge may have another reason
        return not self._suspect and not any(drop.first < oldest for drop in self._unsaved)

    def _extend(self, end: int) -> None:
        fd = self._files.open(self._path, os.O_WRONLY | os.O_CREAT)
        try:
            self._files.write(fd, [bytes(end - self._room)], self._room)
        except OSError:  # leave the little space there is to others
            self._files.truncate(fd, self._room)
            raise
        finally:
            os.close(fd)
        self._room = end

    def _write(self, number: int, *, sync: bool = False) -> None:
        """Write the first `number` unsaved records, and sync them if they need it; raises OSError."""
        self._repeat()
        drops = self._unsaved[:number]
        if not drops:
            return
        fd = self._files.open(self._path, os.O_WRONLY | os.O_CREAT)
        try:
            self._begun = number
            self._files.write(fd, [b"".join(map(_encode, drops))], self._size)
            if sync or any(drop.reason not in _REPEATABLE for drop in drops):
                self._sync(fd)
                if not self._named:
                    self._files.sync_directory(self._path.parent)
                    self._named = True
        finally:
            os.close(fd)
        self._size += number * _RECORD.size
        self._room = max(self._room, self._size)
        del self._unsaved[:number]
        self._begun = 0

    def _repeat(self) -> None:
        """After a failed sync, write all records again; raises OSError.

        The kernel reports a failed sync once, and takes the pages for written from then on.
        """
        if not self._suspect:
            return
        self._suspect = False  # first, because a sync in a thread may fail meanwhile
        try:
            if self._size:
                fd = self._files.open(self._path, os.O_RDWR)
                try:
                    self._files.write(fd, [self._files.read(fd, self._size, 0)], 0)
                finally:
                    os.close(fd)
        except OSError:
            self._suspect = True
            raise

    def _sync(self, fd: int) -> None:
        try:
            self._files.sync(fd)
        except OSError:
            self._suspect = True
            raise

    def sync(self) -> None:
        """Bring the file to the disk; raises OSError. May run in a thread. `explains` comes before it."""
        if self._suspect:
            raise OSError(EIO, "an earlier sync failed", str(self._path))
        fd = self._files.open(self._path, os.O_RDONLY)
        try:
            self._sync(fd)
        finally:
            os.close(fd)
        self._files.sync_directory(self._path.parent)

    def compact_file(self, oldest: int) -> None:
        """Replace the file by its compact form if it is large and the disk has space."""
        if self._size < max(COMPACT_AT, 2 * _RECORD.size * len(self.ranges)):
            return
        self.compact(oldest)
        size, self._named = (1 + len(self.ranges)) * _RECORD.size, False
        try:
            make(self._files, self._path.parent, self.ranges)
            self._named = True
        except OSError:
            if not self._has_size(size + ROOM):  # else only its name may not be on the disk
                return
        self._size, self._room = size, size + ROOM
        self._unsaved, self._begun, self._suspect = [], 0, False

    def _has_size(self, size: int) -> bool:
        with contextlib.suppress(OSError):
            return self._path.stat().st_size == size
        return False
