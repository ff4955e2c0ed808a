"""How a commit group becomes frames, and where they go: planned before any file is touched.

A small group that is synced also preallocates `ROOM` bytes when none are left (see `segment`): a sync that
only overwrites existing bytes changes no metadata of the file system, and costs about half. The rest is
truncated when the segment is sealed or closed.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from bridge.streams import layout, segment
from bridge.streams.queue import Group
from bridge.streams.segment import FRAME, HEADER, Frame, Indexer

ROOM = 128 * 1024
SMALL = 8 * 1024  # for a larger group, preallocation costs more than it saves in the journal


@dataclass(slots=True, eq=False)
class OpenSegment:
    """A segment that is open or, with `fd` below 0, has no file yet.

    It holds committed frames up to `size`; up to `synced` they are on the disk. If `room` is larger, the file
    is preallocated up to there.
    """

    path: Path
    fd: int
    index: Indexer
    size: int = HEADER.size
    synced: int = 0
    room: int = 0


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
        """Bytes of topics, payloads, headers and ids."""
        return sum(frame.data_bytes for _, _, _, frame in self.writes)


class Stager:
    """Plans the frames of one stream's groups."""

    def __init__(self, directory: Path, salt: int) -> None:
        self._directory, self._salt = directory, salt
        self._pattern = segment.filling(salt)

    def new(self, base: int) -> OpenSegment:
        """A segment without a file."""
        return OpenSegment(layout.segment_path(self._directory, base), -1, Indexer(base))

    def stage(
        self,
        group: Group,
        base: int,
        active: OpenSegment,
        at: tuple[int, int],
        segment_size: int,
        *,
        sync: bool,
    ) -> Staged:
        """Encode a group with the numbers from `base` on, to be appended to the active segment.

        `at`: Unix time and age, both in ms. `sync`: the write will be synced.
        """
        end_of_room = segment_size // segment.SECTOR * segment.SECTOR if sync else 0
        staged = Staged(group, base, [], [], base)
        number = len(group.parts) // 2
        target, offset, low = active, active.size, 0
        if offset + group.size + FRAME.size <= segment_size:
            self._add(staged, target, offset, group, at, end_of_room)
            return staged
        ends = list(accumulate(group.record_sizes(), initial=0))
        while low < number:
            room = segment_size - offset - FRAME.size
            high = bisect_right(ends, ends[low] + room) - 1
            if high <= low and offset > HEADER.size:
                target, offset = self.new(staged.next), HEADER.size
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
        buffers = segment.encode_frame(staged.next, *at, self._salt, group.parts, group.headers, group.ids)
        columns = (1 if group.headers else 0) | (2 if group.ids else 0)
        end = offset + sum(map(len, buffers))
        frame = Frame(staged.next, len(group.parts) // 2, *at, columns, offset, end)
        room = b""
        if end_of_room > end > target.room and end - offset <= SMALL:
            target.room = min(end_of_room, (end + ROOM) // segment.SECTOR * segment.SECTOR)
            room = segment.room(self._pattern, end, target.room)
        staged.writes.append((target, buffers, room, frame))
        staged.next = frame.next
        return end
