"""Which numbers of a stream were dropped, when and why: the file `drops.log` in its directory.

    record = first u64 | last u64 | time u64 (Unix ms) | reason u8 | zero u8 x 3 | crc u32        32 bytes

Records are appended before the data they name goes away, so that a drop is never unexplained. A
record that fails its check is passed over, and what it has dropped may be back; the next start sets the
file aside and keeps its sound records (see `recovery`). It is not damage, but a write that never ended, if
zeros follow it to the end of its sector of 512 bytes; the next record is written over the last such one.
The file is a record of facts that the segments cannot tell by themselves: numbers dropped inside a segment
(message limits, purge by topic) and reasons.
When it has grown, it is replaced by its compact form, in which neighbours with the same reason are
one, and of what lies below the oldest message all but the newest `KEPT` ranges are joined, real losses
kept apart. It begins with 32 random bytes, no record, by which readers tell a new file from the old.

A record is on the disk before the files are removed that it explains; otherwise only those are synced
at once that no limit would find again.

Behind the records there is room, zeros, from the stream's creation on (a definition says so, see `meta`: a
file that is missing or shorter than `ROOM` is damage then): records are written over it. On a
full disk nothing could be freed if its record needed a block. While the room cannot be made larger,
its second half is for what explains files that wait to be removed, in joined form: all below the oldest
message is gone, which takes one record, and one for each real loss.
"""

from __future__ import annotations

import contextlib
import os
import struct
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from bridge.deflate import crc32
from bridge.streams.layout import Files
from bridge.streams.segment import SECTOR

NAME = "drops.log"
KEPT = 1000
COMPACT_AT = 64 * 1024
ROOM = 4096  # bytes made at a time, a block of most file systems
_RECORD = struct.Struct("<QQQBxxxI")


class DropReason(IntEnum):
    """Why messages are gone. All but the `LOSSES` ones: somebody asked for it."""

    UNKNOWN = 0
    OVERWRITTEN = 1
    EXPIRED = 2
    PURGED = 3
    LIMITS = 4
    DAMAGED = 5
    MEMORY = 6
    SKIPPED = 7  # numbers that were never given to a message
    EXPORTED = 8  # freed by retention "exported" after all exports had passed them


LOSSES = (DropReason.DAMAGED, DropReason.UNKNOWN)

# After a power cut the limits are applied again, and come to the same; the rest must be on the disk.
_FOUND_AGAIN = (DropReason.OVERWRITTEN, DropReason.EXPIRED, DropReason.LIMITS, DropReason.EXPORTED)


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
    return Drop(first, last, time, reason) if crc32(data[pos : pos + _RECORD.size - 4]) == crc else None


def _is_unfinished(data: bytes, pos: int, start: int = 0) -> bool:
    """Whether what is no record at `pos` is a write that never ended; `start`: of `data` in the file."""
    check = pos + _RECORD.size - 4
    behind = data[check : pos + SECTOR - (start + pos) % SECTOR].rstrip(b"\0")
    return crc32(data[pos:check]).to_bytes(4, "little").startswith(behind)


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
    """Whether a file begins with random bytes: few are zero there, and of a record at least eleven."""
    return data.count(0, 0, _RECORD.size) < 6


def make(files: Files, directory: Path, drops: list[Drop]) -> None:
    """Make the file, with these records, durably; raises OSError.

    It begins with a record that is none, and that no other file begins with.
    """
    records = os.urandom(_RECORD.size) + b"".join(map(_encode, drops)) if drops else b""
    files.replace(directory / NAME, records + bytes(ROOM))


def _joined(drops: list[Drop]) -> list[Drop]:
    """Ascending drops as one, and what lies between them with it, but real losses kept apart."""
    joined: list[Drop] = []
    for drop in drops:
        if joined and drop.reason not in LOSSES and joined[-1].reason not in LOSSES:
            joined[-1] = drop._replace(first=joined[-1].first)
        else:
            joined.append(drop)
    return joined


def _number(drops: list[Drop]) -> int:
    return sum(drop.last - drop.first + 1 for drop in drops)


class Drops:
    """The dropped numbers of one stream as disjoint ranges in ascending order."""

    def __init__(self) -> None:
        self.ranges: list[Drop] = []
        self.number = 0  # of the numbers in them

    def add(self, drop: Drop) -> list[Drop]:
        """Take note of a drop; returns what of it was not dropped before."""
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
        """As `live`, one by one: for who needs only the first of many."""
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

    def compact(self, oldest: int) -> None:
        """Join all but the newest `KEPT` of the ranges that lie below `oldest` to one."""
        many = bisect_left(self.ranges, (oldest, 0, 0, 0)) - KEPT
        if many > 0:
            joined = _joined(before := self.ranges[: many + 1])
            self.ranges[: many + 1] = joined
            self.number += _number(joined) - _number(before)


class DropLog(Drops):
    """`Drops` kept in the file; one process appends, any process may `refresh` from it."""

    def __init__(self, files: Files, directory: Path) -> None:
        super().__init__()
        self._files, self._path = files, directory / NAME
        self._read = 0  # bytes, up to which the file was read and will not change
        self._size = 0  # where its records end
        self._room = 0  # where it ends
        self._start = b""  # of the file: tells one from the other, as inode numbers are given out again
        self._named = False  # the file's name is known to be on the disk
        self._unsaved: list[Drop] = []
        self._begun = 0  # so many of them the file may hold, and readers know: written again as they are
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
            elif begin + pos:  # damaged, or being written just now: looked at again the next time
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
        """Take note of drops and add them to the file; returns what of it was new.

        A drop must not fail for want of room, since it is what makes room: what cannot be written
        now is written with the next record, or by `explains`.
        """
        fresh = [new for a, b in ranges if a <= b for new in self.add(Drop(a, b, time, int(reason)))]
        self._unsaved += fresh
        self.save()
        return fresh

    def save(self) -> None:
        """Write what is not in the file yet, and see to the room behind it, if the disk lets us."""
        end = self._size + len(self._unsaved) * _RECORD.size
        if self._unsaved or self._room < end + ROOM // 2:
            with contextlib.suppress(OSError):
                if self._room < end + ROOM // 2:
                    self._make_room((end + 2 * ROOM - 1) // ROOM * ROOM)
                self._write(len(self._unsaved))

    def explains(self, oldest: int) -> bool:
        """Whether the file tells of all that is gone below `oldest`; if not, tries, on a full disk too."""
        with contextlib.suppress(OSError):
            self._write(self._begun)
            below = sorted(drop for drop in self._unsaved if drop.first < oldest)
            joined = _joined(below)
            self._unsaved = joined + [drop for drop in self._unsaved if drop.first >= oldest]
            self._write(len(joined))
        return not any(drop.first < oldest for drop in self._unsaved)

    def _make_room(self, end: int) -> None:
        fd = self._files.open(self._path, os.O_WRONLY | os.O_CREAT)
        try:
            self._files.write(fd, [bytes(end - self._room)], self._room)
        except OSError:  # it must not take what little is left
            self._files.truncate(fd, self._room)
            raise
        finally:
            os.close(fd)
        self._room = end

    def _write(self, number: int) -> None:
        """Write the first of what is unsaved over the room; raises OSError."""
        drops = self._unsaved[:number]
        if not drops:
            return
        fd = self._files.open(self._path, os.O_WRONLY | os.O_CREAT)
        try:
            self._begun = number
            self._files.write(fd, [b"".join(map(_encode, drops))], self._size)
            if any(drop.reason not in _FOUND_AGAIN for drop in drops):
                self._files.sync(fd)
                if not self._named:
                    self._files.sync_directory(self._path.parent)
                    self._named = True
        finally:
            os.close(fd)
        self._size += number * _RECORD.size
        self._room = max(self._room, self._size)
        del self._unsaved[:number]
        self._begun = 0

    def sync(self) -> None:
        """Bring the file to the disk; raises OSError. May run in a thread."""
        fd = self._files.open(self._path, os.O_RDONLY)
        try:
            self._files.sync(fd)
        finally:
            os.close(fd)
        self._files.sync_directory(self._path.parent)

    def compact_file(self, oldest: int) -> None:
        """Replace the file by its compact form if it has grown large and the disk lets us."""
        if self._size < max(COMPACT_AT, 2 * _RECORD.size * len(self.ranges)):
            return
        self.compact(oldest)
        try:
            make(self._files, self._path.parent, self.ranges)
        except OSError:
            return
        self._size = (1 + len(self.ranges)) * _RECORD.size
        self._room, self._unsaved, self._begun = self._size + ROOM, [], 0
