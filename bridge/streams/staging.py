"""Plans how a commit group becomes frames and where they go, before any file is touched.

A sync that only overwrites existing bytes changes no metadata of the file system. It takes about half of the
time, and saves the writes of the file system's journal (some 28 KiB on ext4). So while little is synced at a
time, a segment without space left is preallocated (see `segment`): by `ROOM` bytes if each group is synced,
and by the size of about `SYNCS` syncs if a background sync covers a few groups. The rest is truncated when
the segment is closed.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from bridge.encryption import OVERHEAD
from bridge.streams import layout, segment
from bridge.streams.queue import Group
from bridge.streams.sealing import Sealing
from bridge.streams.segment import FRAME, HEADER, HEADERS, IDS, SEALED, Frame, Indexer, Seal

ROOM = 128 * 1024
SMALL = 8 * 1024  # if more is synced, preallocation costs more than it saves in the journal
SYNCS = 64


@dataclass(slots=True, eq=False)
class OpenSegment:
    """A segment that is open or, with `fd` below 0, has no file yet.

    It has committed frames up to `size`; up to `synced` they are on the disk. If `room` is larger, the file
    is preallocated up to there. `opening` is the opening key of its frames; None: they are not encrypted.
    """

    path: Path
    fd: int
    index: Indexer
    size: int = HEADER.size
    synced: int = 0
    room: int = 0
    opening: int | None = None


@dataclass(slots=True)
class Staged:
    """A group on its way to the files."""

    group: Group
    first: int
    writes: list[tuple[OpenSegment, list[bytes], bytes, Frame]]  # buffers, and the preallocation after them
    opened: list[OpenSegment]
    next: int
    took: float = 0.0  # seconds of its sync

    @property
    def data_bytes(self) -> int:
        """Return the bytes of topics, payloads, headers and ids."""
        return sum(frame.data_bytes for _, _, _, frame in self.writes)


class Stager:
    """Plans the frames of one stream's groups."""

    def __init__(self, directory: Path, epoch: int, salt: int, sealing: Sealing | None) -> None:
        self._directory, self._epoch, self._salt, self._sealing = directory, epoch, salt, sealing
        self._pattern = segment.filling(salt)
        self._seals: tuple[OpenSegment, Seal] | None = None
        self._room = 0

    def new(self, base: int, opening: int | None) -> OpenSegment:
        """A segment without a file."""
        return OpenSegment(layout.segment_path(self._directory, base), -1, Indexer(base), opening=opening)

    def _seal(self, target: OpenSegment) -> Seal | None:
        """Return the function that seals the frames of a segment."""
        if target.opening is None or self._sealing is None:
            return None
        if self._seals is None or self._seals[0] is not target:
            self._seals = target, self._sealing.sealer(self._epoch, target.index.base)
        return self._seals[1]

    def stage(
        self,
        group: Group,
        base: int,
        active: OpenSegment,
        at: tuple[int, int],
        segment_size: int,
        *,
        room: int,
    ) -> Staged:
        """Encode a group with the numbers from `base` on, to be appended to the active segment.

        `at`: Unix time and age, both in ms. `room`: bytes to preallocate, if none are left.
        """
        self._room = room
        end_of_room = segment_size // segment.SECTOR * segment.SECTOR if room else 0
        staged = Staged(group, base, [], [], base)
        number = len(group.parts) // 2
        target, offset, low = active, active.size, 0
        framing = FRAME.size + (OVERHEAD if active.opening is not None else 0)
        if offset + group.size + framing <= segment_size:
            self._add(staged, target, offset, group, at, end_of_room)
            return staged
        ends = list(accumulate(group.record_sizes(), initial=0))
        while low < number:
            room = segment_size - offset - framing
            high = bisect_right(ends, ends[low] + room) - 1
            if high <= low and offset > HEADER.size:
                target, offset = self.new(staged.next, active.opening), HEADER.size
                staged.opened.append(target)
                continue
            high = max(high, low + 1)  # a message larger than a segment gets one of its own
            offset = self._add(staged, target, offset, group.part(low, high), at, end_of_room)
            low = high
        return staged

    def _add(
        self,
        staged: Staged,
        target: OpenSegment,
        offset: int,
        group: Group,
        at: tuple[int, int],
        end_of_room: int,
    ) -> int:
        seal = None if target.opening is None else self._seal(target)
        buffers = segment.encode_frame(
            staged.next, *at, self._salt, group.parts, group.headers, group.ids, seal
        )
        columns = (HEADERS if group.headers else 0) | (IDS if group.ids else 0) | (SEALED if seal else 0)
        end = offset + sum(map(len, buffers))
        frame = Frame(staged.next, len(group.parts) // 2, *at, columns, offset, end)
        room = b""
        if end_of_room > end > target.room and end - offset <= SMALL:
            target.room = min(end_of_room, (end + self._room) // segment.SECTOR * segment.SECTOR)
            room = segment.room(self._pattern, end, target.room)
        staged.writes.append((target, buffers, room, frame))
        staged.next = frame.next
        return end
