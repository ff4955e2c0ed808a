"""Reads a stream's files from any process, while another one writes and deletes them.

* Nothing is locked. If retention deletes a segment during a read, the read continues at the new oldest
  message.
* A message is returned only if its frame passes its check. Below `end`, a frame that fails raises
  `CorruptData`. Above it, such a frame is the writer's unfinished tail, and is ignored.
* The position of the last frame is kept, so the next read needs no search and reads little twice.
* Memory is bounded by the size of one read, `CHUNK` and the largest frame.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

from bridge.encryption import Keys
from bridge.errors import CorruptData, EncryptionKeyError
from bridge.streams import formats, layout, meta, segment
from bridge.streams.drops import LOSSES, DropLog, Drops
from bridge.streams.sealing import Opener, Sealing
from bridge.streams.segment import FRAME, HEADER, Frame, StreamMessage

CHUNK = 64 * 1024  # in a process that maps larger ones, they cost a page fault for each page of every read
Row = TypeVar("Row")


class StreamMeta(NamedTuple):
    """A stream found in a data directory. `epoch`: when it was created, Unix time in ms."""

    name: str
    epoch: int
    directory: Path
    definition: bytes
    memory: bool
    paused: tuple[str, ...] = ()


def list_streams(data_dir: Path) -> list[StreamMeta]:
    """The streams of a data directory by name.

    Streams whose definition is damaged or cannot be read are left out; see `list_damaged`.
    """
    found = []
    for directory in stream_directories(data_dir):
        known = None
        with suppress(OSError):
            known, _ = meta.load(directory)
        if known is not None:
            found.append(
                StreamMeta(
                    known.name,
                    known.epoch,
                    directory,
                    known.definition,
                    known.settings.memory,
                    known.paused,
                )
            )
    return sorted(found)


def list_damaged(data_dir: Path) -> list[str]:
    """Return the names of streams with a damaged definition. Raises PermissionError if one is unreadable."""
    return [unquote(one.name) for one in stream_directories(data_dir) if meta.load(one)[0] is None]


def stream_directories(data_dir: Path) -> list[Path]:
    """The directories of the streams, whatever their state."""
    root = data_dir / layout.STREAMS
    entries = sorted(root.iterdir()) if root.is_dir() else []
    return [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]


class Moment(NamedTuple):
    """When a message was stored: its number, its ingest time, and its place on the age timeline, in ms."""

    number: int
    time: int
    age: int


class _SegmentFile:
    """One open segment file, and the known positions of its frames."""

    def __init__(self, files: layout.Files, path: Path, base: int, sealing: Sealing | None) -> None:
        self.base, self._files = base, files
        self.fd = files.open(path, os.O_RDONLY)
        self.offsets = [(base, HEADER.size)]  # (first number, offset) of some frames
        self.end = HEADER.size  # of the last frame that was read
        self.last: tuple[Frame, int] | None = (
            None  # the last committed frame that was read, and where it ends
        )
        head = files.read(self.fd, FRAME.size + HEADER.size, 0)
        formats.refuse_old(path, head)
        header = segment.decode_header(head)
        self._salt = header[2] if header is not None else None
        self._opener: Opener | None = None
        if header is not None and segment.opening_in(head) is not None:
            self._opener = _refuse(path) if sealing is None else sealing.opener(header[1], base)
        try:
            summary = segment.decode_index(path.with_suffix(layout.INDEX).read_bytes())
        except OSError:
            summary = None
        if summary is not None and summary.base == base and summary.size == os.fstat(self.fd).st_size:
            self.offsets += [entry for entry in summary.entries if entry[1] > HEADER.size]

    @property
    def has_header(self) -> bool:
        """Return whether the header is there; the file may have been opened before it was written."""
        return self._salt is not None

    def close(self) -> None:
        os.close(self.fd)

    def is_stale(self, path: Path) -> bool:
        """Whether the file of this name has been replaced or deleted."""
        try:
            return path.stat().st_ino != os.fstat(self.fd).st_ino
        except FileNotFoundError:
            return True

    def _start(self, number: int) -> tuple[int, int]:
        """Return where to start the search for a number, and how many bytes to read."""
        first, offset = self.offsets[bisect_right(self.offsets, (number, 2**63)) - 1]
        if self.last is None:
            return offset, CHUNK
        frame, end = self.last
        size = frame.end - frame.start  # the next frame is often as large
        if first <= frame.base <= number:
            offset = end if frame.next <= number else end - size
        return offset, max(CHUNK, size)

    def opened(self, start: int, limit: int) -> Iterator[tuple[bytes, Frame]]:
        """As `frames`, decrypted; raises EncryptionKeyError."""
        opener = self._opener
        if opener is None:
            yield from self.frames(start, limit)
            return
        for data, frame in self.frames(start, limit):
            opened = opener(data, frame)
            if opened is None:
                return
            yield opened

    def frames(self, start: int, limit: int | None) -> Iterator[tuple[bytes, Frame]]:
        """Yield the valid frames with numbers from `start` on, each with its buffer, as they are stored.

        Stops at the end of the file, at a frame that begins at `limit` or above, or at the first invalid
        frame. Without a limit the last frames may be uncommitted, and may disappear.
        """
        (offset, size), salt = self._start(start), self._salt
        if salt is None:
            return
        while data := self._files.read(self.fd, size, offset):
            pos, frame = 0, segment.frame_at(data, 0)
            while frame is not None and frame.end <= len(data):
                if frame.next > start:
                    over = limit is not None and frame.base >= limit
                    if over or not segment.is_sound(data, frame, salt):
                        return
                    self.end = offset + frame.end
                    if limit is not None:
                        self.last = frame, self.end
                if offset + pos - self.offsets[-1][1] >= segment.INDEX_STEP:
                    self.offsets.append((frame.base, offset + pos))
                if frame.next > start:
                    yield data, frame
                pos, frame = frame.end, segment.frame_at(data, frame.end)
            if frame is None and len(data) - pos >= FRAME.size:
                return
            wanted = frame.end - pos if frame is not None else FRAME.size
            offset += pos
            if wanted > os.fstat(self.fd).st_size - offset:
                return
            size = max(size, wanted)


def _refuse(path: Path) -> Opener:
    def opened(data: bytes, frame: Frame) -> None:
        raise EncryptionKeyError(
            f"{path}: these messages are encrypted, and no key is configured; set key_file in [encryption] "
            "to the file with the key"
        )

    return opened


class StreamReader:
    """Reads one stream's messages by number. Not for use by several threads at once."""

    def __init__(
        self,
        directory: Path,
        files: layout.Files | None = None,
        drops: Drops | None = None,
        keys: Keys | None = None,
    ) -> None:
        """`drops` is that of the writer, for a reader in its process; other readers read the file.

        Without `keys`, reading messages of an encrypted stream raises EncryptionKeyError.
        """
        self.directory = directory
        self._sealing = Sealing(keys, directory.name) if keys is not None and keys.configured else None
        self._files = files or layout.Files()
        self._bases = layout.segment_bases(directory)
        self._log = DropLog(self._files, directory) if drops is None else None
        self._drops: Drops = self._log or drops or Drops()
        self._open: _SegmentFile | None = None
        self._part: tuple[object, tuple[list[Any], list[int]]] | None = None

    def close(self) -> None:
        """Close the files."""
        if self._open is not None:
            self._open.close()
            self._open = None
        self._part = None

    def oldest(self) -> int:
        """The number of the oldest message, or the next number if there is none."""
        self._refresh()
        return self._drops.first_live(self._bases[0] if self._bases else 0)

    def bounds(self) -> tuple[int, int]:
        """(oldest, next): next - oldest is 0 for an empty stream. As written, not as committed."""
        oldest = self.oldest()
        if not self._bases:
            return oldest, oldest
        base = after = self._bases[-1]
        if self._open is not None and self._open.is_stale(
            layout.segment_path(self.directory, self._open.base)
        ):
            self.close()
        try:
            known = self._known_end(base)
            for _, frame in self._segment(base).frames(known, None):
                after = frame.next
            if after == base and known > base:  # a failed write that is gone
                self.close()
                for _, frame in self._segment(base).frames(base, None):
                    after = frame.next
        except FileNotFoundError:
            return self.bounds()
        return oldest, max(after, oldest)

    def dropped(self, start: int, end: int) -> int:
        """Return how many of the numbers start..end-1 were dropped."""
        return self._drops.count(start, end - 1) if start < end else 0

    def lost(self) -> list[tuple[int, int]]:
        return [(drop.first, drop.last) for drop in self._drops.ranges if drop.reason in LOSSES]

    def total_bytes(self) -> int:
        """The size of the segment files, without preallocated space."""
        self.bounds()
        total = self._open.end if self._open is not None and self._bases else 0
        for base in self._bases[:-1]:
            try:
                total += layout.segment_path(self.directory, base).stat().st_size
            except FileNotFoundError:
                continue
        return total

    def read(self, start: int, *, end: int, max_messages: int, max_bytes: int) -> list[StreamMessage]:
        """Return the messages from `start`, or the oldest one, up to but not including `end`.

        They are in order, with gaps where messages were dropped. Returns at most `max_messages`, and at
        most `max_bytes` of stored data, but at least one message if there is one. Raises CorruptData if a
        frame below `end` is damaged and there is nothing before it to return.
        """
        return self.read_as(segment.messages, start, end=end, max_messages=max_messages, max_bytes=max_bytes)

    def read_as(
        self,
        decode: Callable[[bytes, Frame], list[Row]],
        start: int,
        *,
        end: int,
        max_messages: int,
        max_bytes: int,
    ) -> list[Row]:
        """As `read`, with the rows that `decode` makes of a frame's messages."""
        found: list[Row] = []
        room = max_bytes
        for data, frame in self.frames(start, end):
            base, after = frame.base, frame.next
            complete = base >= start and after <= end and not self._drops.count(base, after - 1)
            size = frame.data_bytes
            if complete and size <= room and len(found) + frame.number <= max_messages:
                found += decode(data, frame)
                room -= size
            else:
                rows, ends = self._decoded(decode, data, frame)
                for a, b in self._drops.live(max(start, base), min(end, after) - 1):
                    first, stop = a - base, min(b + 1 - base, a - base + max_messages - len(found))
                    fit = bisect_right(ends, ends[first] + room) - 1
                    if fit < stop:
                        return found + rows[first : max(fit, first + (not found))]
                    found += rows[first:stop]
                    room -= ends[stop] - ends[first]
            if len(found) >= max_messages:
                break
        return found

    def _decoded(
        self, decode: Callable[[bytes, Frame], list[Row]], data: bytes, frame: Frame
    ) -> tuple[list[Row], list[int]]:
        """Return the rows of a frame that is returned in parts, and the sum of sizes up to each message.

        They are kept, because the next read usually returns the rest.
        """
        key = (decode, frame.base, data[frame.start : frame.start + FRAME.size])
        if self._part is None or self._part[0] != key:
            ends = list(accumulate(segment.sizes_of(data, frame), initial=0))
            self._part = key, (decode(data, frame), ends)
        return self._part[1]

    def moment_of(self, number: int, end: int) -> Moment | None:
        """The first message from `number` on, below `end`; None if there is none.

        Needs no key. Raises CorruptData.
        """
        for _, frame in self.frames(number, end, opened=False):
            for first, _ in self._drops.live(max(number, frame.base), min(end, frame.next) - 1):
                return Moment(first, frame.time, frame.age)
        return None

    def encryption(self) -> tuple[int, int, bool]:
        """Return how many segments with messages are encrypted and not, and whether the newest is."""
        found, is_sealed = [0, 0], False
        self._refresh()
        for base in self._bases:
            with suppress(FileNotFoundError), layout.segment_path(self.directory, base).open("rb") as file:
                head = file.read(HEADER.size + FRAME.size)
                is_sealed = segment.is_encrypted(head)
                if segment.frame_at(head, HEADER.size) is not None:
                    found[is_sealed] += 1
        return found[True], found[False], is_sealed

    def frames(self, start: int, end: int, *, opened: bool = True) -> Iterator[tuple[bytes, Frame]]:
        """Yield the valid frames with numbers of start..end-1, in order, each with its buffer.

        `opened`: decrypt encrypted ones; raises EncryptionKeyError without the key.
        """
        position, delivered, retried = start, False, False
        while position < end:
            base = self._base_for(position)
            if base is None:
                return
            limit = min(end, next((b for b in self._bases if b > base), end))
            try:
                # from the limit on, there may be the remains of a failed write
                item = self._segment(base)
                for data, frame in (item.opened if opened else item.frames)(max(position, base), limit):
                    yield data, frame
                    delivered = delivered or self._drops.first_live(max(position, frame.base)) < frame.next
                    position = frame.next
            except FileNotFoundError:
                self._refresh()
                continue
            if position >= end:
                return
            self._refresh()
            following = next((b for b in self._bases if b > base), None)
            if base not in self._bases:
                continue
            if self._open is not None and self._open.is_stale(layout.segment_path(self.directory, base)):
                self.close()  # repaired during this read
                continue
            upto = min(end, following or end)
            if position >= upto or self._drops.first_live(max(position, base)) >= upto:
                position = max(position, upto)
            elif not retried:
                retried = True  # the writer may have been between write and rename, so read again
                self.close()
            elif delivered:
                return
            else:
                raise CorruptData(
                    f"{layout.segment_path(self.directory, base)}: the frame with message "
                    f"{max(position, base)} is damaged; it was not returned. "
                    f"`streambridge repair` quarantines the damage",
                    base,
                )

    def _known_end(self, base: int) -> int:
        return self._open.offsets[-1][0] if self._open is not None and self._open.base == base else base

    def _refresh(self) -> None:
        self._bases = layout.segment_bases(self.directory)
        if self._log is not None:
            self._log.refresh()

    def _base_for(self, number: int) -> int | None:
        at = bisect_right(self._bases, number) - 1
        if at == len(self._bases) - 1 or at < 0:
            self._refresh()
            at = bisect_right(self._bases, number) - 1
        return self._bases[max(at, 0)] if self._bases else None

    def _segment(self, base: int) -> _SegmentFile:
        if self._open is None or self._open.base != base or not self._open.has_header:
            self.close()
            path = layout.segment_path(self.directory, base)
            self._open = _SegmentFile(self._files, path, base, self._sealing)
        return self._open


def first_since(reader: StreamReader, low: int, high: int, millis: int) -> int:
    """The first number whose message is not older than `millis`; ingest times grow with the numbers."""
    while low < high:
        middle = (low + high) // 2
        found = reader.moment_of(middle, high)
        if found is not None and found.time < millis:
            low = found.number + 1
        else:
            high = middle
    return low
