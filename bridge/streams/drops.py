"""Which numbers of a stream were dropped, when and why: the file `drops.log` in its directory.

    record = first u64 | last u64 | time u64 (Unix ms) | reason u8 | zero u8 x 3 | crc u32        32 bytes

Records are appended before the data they name goes away, so that a drop is never unexplained. A
record that fails its check is passed over. The file is a record of facts that the segments cannot
tell by themselves: numbers dropped inside a segment (exact limits, purge by topic) and reasons.
When it has grown, it is replaced by its compact form, in which neighbours with the same reason are
one, and of what lies below the oldest message all but the newest `KEPT` ranges are joined, real losses
kept apart. It begins with 32 random bytes, no record, by which readers tell a new file from the old.

A record is on the disk before the files are removed that it explains; otherwise only those are synced
at once that no limit would find again.
"""

from __future__ import annotations

import contextlib
import os
import struct
from bisect import bisect_left, bisect_right, insort
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from bridge.deflate import crc32
from bridge.streams.layout import Files

NAME = "drops.log"
KEPT = 1000
COMPACT_AT = 64 * 1024
_RECORD = struct.Struct("<QQQBxxxI")


class Reason(IntEnum):
    """Why messages are gone. All but the `ILLEGAL` ones: somebody asked for it."""

    UNKNOWN = 0
    OVERWRITTEN = 1
    EXPIRED = 2
    PURGED = 3
    LIMITS = 4
    DAMAGED = 5
    MEMORY = 6
    SKIPPED = 7  # numbers that were never given to a message
    EXPORTED = 8  # freed by retention "exported" after all exports had passed them


ILLEGAL = (Reason.DAMAGED, Reason.UNKNOWN)

# After a power cut the limits are applied again, and come to the same; the rest must be on the disk.
_FOUND_AGAIN = (Reason.OVERWRITTEN, Reason.EXPIRED, Reason.LIMITS, Reason.EXPORTED)


class Drop(NamedTuple):
    """The numbers first..last are gone. `time` is Unix time in ms."""

    first: int
    last: int
    time: int
    reason: int


def _encode(drop: Drop) -> bytes:
    head = _RECORD.pack(*drop, 0)[:-4]
    return head + crc32(head).to_bytes(4, "little")


def _decode(data: bytes) -> list[Drop]:
    found = []
    for pos in range(0, len(data) - _RECORD.size + 1, _RECORD.size):
        first, last, time, reason, crc = _RECORD.unpack_from(data, pos)
        if crc32(data[pos : pos + _RECORD.size - 4]) == crc:
            found.append(Drop(first, last, time, reason))
    return found


class Drops:
    """The dropped numbers of one stream as disjoint ranges in ascending order."""

    def __init__(self) -> None:
        self.ranges: list[Drop] = []

    def add(self, drop: Drop) -> list[Drop]:
        """Take note of a drop; returns what of it was not dropped before."""
        fresh = [Drop(a, b, drop.time, drop.reason) for a, b in self.live(drop.first, drop.last)]
        for new in fresh:
            at = bisect_left(self.ranges, new)
            if at and (before := self.ranges[at - 1]).last + 1 == new.first and before.reason == new.reason:
                self.ranges[at - 1] = before._replace(last=new.last, time=new.time)
            else:
                insort(self.ranges, new)
        return fresh

    def live(self, first: int, last: int) -> list[tuple[int, int]]:
        """The parts of first..last that were not dropped."""
        parts, at = [], max(0, bisect_right(self.ranges, (first, last + 1, 0, 0)) - 1)
        while at < len(self.ranges) and self.ranges[at].first <= last:
            drop = self.ranges[at]
            if drop.last >= first:
                if drop.first > first:
                    parts.append((first, drop.first - 1))
                first = max(first, drop.last + 1)
            at += 1
        if first <= last:
            parts.append((first, last))
        return parts

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
            joined: list[Drop] = []
            for drop in self.ranges[: many + 1]:
                if joined and drop.reason not in ILLEGAL and joined[-1].reason not in ILLEGAL:
                    joined[-1] = drop._replace(first=joined[-1].first)
                else:
                    joined.append(drop)
            self.ranges[: many + 1] = joined


class DropLog(Drops):
    """`Drops` kept in the file; one process appends, any process may `refresh` from it."""

    def __init__(self, files: Files, directory: Path) -> None:
        super().__init__()
        self._files, self._path = files, directory / NAME
        self._size = 0
        self._start = b""  # of the file: tells one from the other, as inode numbers are given out again
        self._named = False  # the file's name is known to be on the disk
        self._unsaved: list[Drop] = []
        self.refresh()

    def refresh(self) -> None:
        """Read what was added to the file since the last time."""
        try:
            fd = self._files.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            self.ranges, self._size, self._start = [], 0, b""
            return
        try:
            size, start = os.fstat(fd).st_size, self._files.read(fd, _RECORD.size, 0)
            if start != self._start or size < self._size:
                self.ranges, self._size, self._start = [], 0, start
            if size == self._size:
                return
            data = self._files.read(fd, size - self._size, self._size)
        finally:
            os.close(fd)
        whole = len(data) - len(data) % _RECORD.size
        for drop in _decode(data[:whole]):
            self.add(drop)
        self._size += whole

    def record(self, ranges: list[tuple[int, int]], time: int, reason: Reason) -> list[Drop]:
        """Take note of drops and add them to the file; returns what of it was new.

        A drop must not fail for want of room, since it is what makes room: what cannot be written
        now is written with the next record.
        """
        fresh = [new for a, b in ranges if a <= b for new in self.add(Drop(a, b, time, int(reason)))]
        self._unsaved += fresh
        self.save()
        return fresh

    def save(self) -> None:
        """Write what is not in the file yet, if the disk lets us."""
        if self._unsaved:
            with contextlib.suppress(OSError):
                self._save(sync=any(drop.reason not in _FOUND_AGAIN for drop in self._unsaved))

    def _save(self, *, sync: bool) -> None:
        fd = self._files.open(self._path, os.O_WRONLY | os.O_CREAT)
        try:
            self._files.write(fd, [b"".join(map(_encode, self._unsaved))], self._size)
            if sync:
                self._files.sync(fd)
                if not self._named:
                    self._files.sync_directory(self._path.parent)
                    self._named = True
        finally:
            os.close(fd)
        self._size += len(self._unsaved) * _RECORD.size
        self._unsaved = []

    @property
    def saved(self) -> bool:
        """Whether everything is in the file."""
        return not self._unsaved

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
        # It begins with a record that is none, and that no other file begins with.
        content = os.urandom(_RECORD.size) + b"".join(map(_encode, self.ranges))
        try:
            self._files.replace(self._path, content)
        except OSError:
            return
        self._size, self._unsaved = len(content), []
