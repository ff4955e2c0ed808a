"""The segment files of one stream, for their only writer.

States of a segment: *active* (the last one, to which groups are appended), *closing* (complete, but perhaps
not on the disk yet), *closed* (on the disk, with an index).

A commit group goes through three steps, so that the middle one can run in a thread:
    stage              on the event loop: encode, plan the new segments that the group needs
    write              in any thread: write, and with `sync` wait for the disk; only the files change
    commit or abort    on the event loop: make the group readable, or leave the files as they were

After a failed sync the file's tail is not trusted: `replace_active` continues in a new segment.

On a full disk no file can be created, and all messages of the active segment may be about to be dropped. Then
the new active segment has no file until its first group is written. The old file can be deleted before that,
and its space used for the new one. While no file shows the stream's next number, `drops.log` does.
"""

from __future__ import annotations

import contextlib
import os
import time
from errno import EIO
from itertools import zip_longest
from pathlib import Path

from bridge.clock import Clock
from bridge.errors import EncryptionKeyError, StorageFailed
from bridge.streams import layout, recovery, segment
from bridge.streams.directory import Directory, ObsoleteSegments
from bridge.streams.drops import DropLog
from bridge.streams.layout import FULL, Files
from bridge.streams.meta import Meta
from bridge.streams.queue import Group
from bridge.streams.recovery import Damage
from bridge.streams.sealing import Sealing
from bridge.streams.segment import HEADER, Indexer, SegmentSummary
from bridge.streams.staging import ROOM, SMALL, SYNCS, OpenSegment, Staged, Stager


class SegmentLog:
    """Appends commit groups to a stream's segments, and removes segments from its front."""

    def __init__(
        self,
        files: Files,
        directory: Path,
        meta: Meta,
        drops: DropLog,
        clock: Clock,
        sealing: Sealing | None = None,
    ) -> None:
        self._drops, self._clock, self._sealing = drops, clock, sealing
        self.encrypts = meta.settings.encryption  # whether new segments are sealed; `sealing` is needed then
        self.openings: dict[int, int] = {}  # the opening keys of encrypted segments, by first number
        self._obsolete_openings: dict[Path, int] = {}  # those of obsolete segments
        self._files, self._path, self._meta = files, directory, meta
        self.directory = Directory(files, directory)
        self._stager = Stager(directory, meta.epoch, meta.salt, sealing)
        self.sizes: dict[int, int] = {}  # of all segments by first number, ascending
        self.total_bytes = 0  # their sum
        self.closing: list[OpenSegment] = []
        self.damage: list[Damage] = []
        self._tainted = False  # a failed write has left invalid bytes in the active file
        self._suspect = False  # a sync failed; the kernel may not report the lost writes again
        self.obsolete = ObsoleteSegments(self.directory, drops)
        self._room = 0  # bytes to preallocate for groups that are synced in the background
        self.frozen = False  # files are being rewritten, so none may be deleted

    # -- opening and closing ---------------------------------------------------------------------
    def open(self, first: int) -> None:
        """Open the directory's segments and repair the effects of a crash or of the disk.

        A directory without segments starts with number `first`. Raises OSError. An empty file had just been
        created, or was about to be removed after all its messages were dropped (see `ObsoleteSegments`).
        """
        with os.scandir(self._path) as entries:
            found = {entry.name: entry for entry in entries}
        for name in found:
            if name.endswith(layout.TEMPORARY):
                self._files.unlink(self._path / name)
        bases = sorted(base for name in found if (base := layout.base_of(name)) is not None)
        for base, following in zip_longest(bases, bases[1:]):
            if following is not None and layout.file_name(base, layout.INDEX) in found:
                self._resize(base, found[layout.file_name(base)].stat().st_size)
                self._note_opening(base, self._opening_of(base))
                continue
            path = layout.segment_path(self._path, base)
            if not path.stat().st_size:
                if following is None:
                    self._take(self._stager.new(base, None))
                    continue
                if not self._drops.live(base, following - 1):
                    self.obsolete.pending.append(path)
                    continue
            examined = self._examined(base, following)
            self.damage += examined.damage
            self._resize(base, examined.summary.size)
            self._note_opening(base, examined.opening)
            item = self._reopened(path, examined.summary, examined.opening)
            if following is not None:
                self.closing.append(item)  # it may be only in the page cache: no index before a sync
            else:
                self.active = item
        if not bases:
            self._take(self._create(first, None, lazily=True))
        self.next = self.active.index.next

    def _examined(self, base: int, following: int | None) -> recovery.Examined:
        """Open a segment. Raises OSError, or StorageFailed if the key of an encrypted one is missing."""
        try:
            return recovery.examine(
                self._files, self._path, base, self._meta, following, self._drops, self._sealing
            )
        except EncryptionKeyError as error:
            raise StorageFailed(str(error)) from None

    def _opening_of(self, base: int) -> int | None:
        """Return the key of an encrypted segment's frames, even if its header is damaged."""
        if self._sealing is None:
            return None
        fd = self._files.open(layout.segment_path(self._path, base), os.O_RDONLY)
        try:
            data = self._files.read(fd, HEADER.size, 0)
            if segment.decode_header(data) is None:
                data = self._files.read(fd, os.fstat(fd).st_size, 0)
        finally:
            os.close(fd)
        return recovery.opening_of(data, self._meta.epoch, self._meta.salt, base)

    def _note_opening(self, base: int, opening: int | None) -> None:
        """Record whether a segment is encrypted. Raises StorageFailed if its key is missing."""
        self.openings.pop(base, None)
        if opening is None:
            return
        self.openings[base] = opening
        if self._sealing is None or not self._sealing.knows(opening):
            what = "no key is configured" if self._sealing is None else self._sealing.missing(opening)
            raise StorageFailed(f"{layout.segment_path(self._path, base)} is encrypted: {what}")

    def all_openings(self) -> set[int]:
        """The opening keys that files in the directory need, also those that are about to be deleted."""
        left = set(self.obsolete.paths)
        self._obsolete_openings = {path: key for path, key in self._obsolete_openings.items() if path in left}
        return {*self.openings.values(), *self._obsolete_openings.values()}

    def settle(self) -> None:
        """Make certain that a power cut brings back no other content of the directory. Raises OSError.

        A killed process may not have synced what this one has found. Segments with an index are synced. Files
        that are empty may have been cut, and what they had be on the disk.
        """
        for item in (*self.closing, self.active):
            if item.fd >= 0:
                self._sync(item)
        empty = [self.active.path] if self.active.fd < 0 else []
        for path in (*self.obsolete.paths, *empty):
            with contextlib.suppress(FileNotFoundError):
                self._files.sync_path(path)
        self._files.sync_directory(self._path)

    def renew(self) -> None:
        """Continue in a new segment if the encryption of the active one is not as the settings say.

        Nothing may be in flight. Raises OSError.
        """
        if (self.active.opening is not None) is not self.encrypts:
            self.replace_active()

    @property
    def filled(self) -> list[int]:
        """The segments with messages, by first number."""
        return [
            base for base in self.sizes if base != self.active.index.base or self.active.size > HEADER.size
        ]

    @property
    def unencrypted(self) -> int:
        """How many of them are not encrypted."""
        return sum(1 for base in self.filled if base not in self.openings)

    def _reopened(self, path: Path, summary: SegmentSummary, opening: int | None) -> OpenSegment:
        fd = self._files.open(path, os.O_RDWR)
        index = Indexer(summary.base)
        index.next, index.entries = summary.next, summary.entries
        index.last_age, index.data_bytes = summary.last_age, summary.data_bytes
        # It is unknown how much is synced, so the next sync covers all of it.
        return OpenSegment(path, fd, index, summary.size, opening=opening)

    def close(self) -> None:
        """Close the files, without a sync."""
        for item in [*self.closing, self.active]:
            with contextlib.suppress(OSError):  # else the next start does
                self._cut(item)
            if item.fd >= 0:
                self.directory.retire(item.fd)

    def is_syncing(self, base: int) -> bool:
        """Whether a worker thread may be syncing a segment."""
        return self.directory.pinned and base in [item.index.base for item in [*self.closing, self.active]]

    # -- writing ---------------------------------------------------------------------------------
    def stage(self, group: Group, segment_size: int, *, sync: bool) -> Staged:
        """Encode a group with the next numbers. Raises OSError if an earlier failure cannot be undone.

        `sync`: `write` will be called with `sync`.
        """
        at = self._clock.wall(), self._clock.now()
        self.directory.remove_leftovers()
        if self._tainted or self.active.opening != self._wanted():
            self.replace_active()
        room = ROOM if sync else self._room
        return self._stager.stage(group, self.next, self.active, at, segment_size, room=room)

    def _wanted(self, *, lazily: bool = False) -> int | None:
        """Return the opening key for new segments; None if they are not encrypted. Raises OSError.

        `lazily`: also None if a full disk has no space for the key; `stage` retries.
        """
        if not self.encrypts or self._sealing is None:
            return None
        try:
            return self._sealing.opening()
        except OSError as error:
            if not lazily or error.errno not in FULL:
                raise
            return None

    def write(self, staged: Staged, *, sync: bool) -> None:
        """Write a staged group to the files. Raises OSError. May run in a thread.

        A new segment is created only when everything before it is in the files, with `sync` on the disk. So a
        crash never leaves a gap in the numbers.
        """
        written: OpenSegment | None = None
        for target, buffers, room, frame in staged.writes:
            if target.fd < 0:
                if sync and written is not None:
                    self._sync(written)
                self._make(target)
            try:
                self._files.write(target.fd, [*buffers, room] if room else buffers, frame.start)
            except OSError:
                if not room:
                    raise
                self._files.write(target.fd, buffers, frame.start)  # the group alone may still fit
            written = target
        if sync and written is not None:
            began = time.monotonic()
            self._sync(written)
            staged.took = time.monotonic() - began
            if any(target.synced < HEADER.size for target, _, _, _ in staged.writes):
                self._files.sync_directory(self._path)

    def _sync(self, item: OpenSegment) -> None:
        try:
            self._files.sync(item.fd)
        except OSError:
            self._suspect = True
            raise

    def _cut(self, item: OpenSegment) -> None:
        """Truncate preallocated space; raises OSError."""
        if item.room > item.size:
            self._files.truncate(item.fd, item.size)
        item.room = 0

    def commit(self, staged: Staged, *, synced: bool) -> None:
        """Make a group that was written readable."""
        for target, _, _, frame in staged.writes:
            if target is not self.active:
                self.closing.append(self.active)
                self._take(target)
            target.index.add(frame, frame.start)
            target.size = frame.end
            if synced:
                target.synced = frame.end
            self._resize(target.index.base, frame.end)
        self.next = staged.next
        if synced and self.closing:
            self.synced([])

    def abort(self, staged: Staged) -> None:
        """Undo a staged group, written or not. Everything committed before stays."""
        for item in staged.opened:
            if item.fd >= 0:
                self.directory.discard(item.path, item.fd)
        staged.opened = []
        if self._suspect:  # a sync failed, so the file's copy of the group is not trusted
            self._tainted = True
        if self.active.fd < 0:
            return
        try:
            self._files.truncate(self.active.fd, self.active.size)
            self.active.room = 0
        except OSError:  # the remains must not be taken for data: continue in a new file
            self._tainted = True

    def discard(self, staged: Staged) -> None:
        """Discard a staged group whose stream is closed; its files are deleted with the directory."""
        for item in staged.opened:
            if item.fd >= 0:
                self.directory.retire(item.fd)

    def replace_active(self, first: int | None = None, *, lazily: bool = False) -> None:
        """Close the active segment where it ends and continue in a new, empty one. Raises OSError.

        `first` skips numbers: the new segment begins there. `lazily`: on a full disk, create its file with
        the first group.
        """
        base, opening = max(self.next, first or 0), self._wanted(lazily=lazily)
        if base == self.active.index.base and not self._tainted and self.active.opening == opening:
            return  # it is empty already
        old = self.active
        try:
            fresh = self._create(base, opening, lazily=lazily or old.fd < 0)
        except OSError:
            self._tainted |= base == old.index.base  # its file, which had the same name, may be gone
            raise
        if old.fd < 0:
            self._resize(old.index.base, None)
            if old.index.base != base:
                self.obsolete.pending.append(old.path)  # an empty file may exist
        elif base == old.index.base:
            self.directory.retire(old.fd)
        else:
            self.closing.append(self.active)
        self._take(fresh)
        self.next = base
        self._tainted = False

    def _header(self, item: OpenSegment) -> bytes:
        created = self._clock.wall()
        return segment.encode_header(
            item.index.base, self._meta.epoch, created, self._meta.salt, item.opening
        )

    def _make(self, item: OpenSegment) -> None:
        """Create the file of a new segment. After an OSError, it does not exist."""
        item.fd = self.directory.make(item.path, self._header(item))

    def _create(self, base: int, opening: int | None, *, lazily: bool) -> OpenSegment:
        """Begin a segment; `lazily`: on a full disk, create its file with the first group. Raises OSError."""
        fresh = self._stager.new(base, opening)
        try:
            self._make(fresh)
        except OSError as error:
            if not lazily or error.errno not in FULL:
                raise
        return fresh

    def _take(self, fresh: OpenSegment) -> None:
        self.active = fresh
        self._resize(fresh.index.base, fresh.size)
        self.openings.pop(fresh.index.base, None)
        if fresh.opening is not None:
            self.openings[fresh.index.base] = fresh.opening

    # -- syncing ---------------------------------------------------------------------------------
    def unsynced(self) -> list[tuple[OpenSegment, int]]:
        """Return the segments with committed bytes that may not be on the disk, with their sizes."""
        items = [*self.closing, self.active]
        return [(item, item.size) for item in items if item.fd >= 0 and item.synced < item.size]

    def sync(self, work: list[tuple[OpenSegment, int]]) -> None:
        """Wait until these segments are on the disk. Raises OSError. May run in a thread."""
        for item, _ in work:
            self._sync(item)
        if self._suspect:  # the kernel reports an error only once, and a second sync succeeds
            raise OSError(EIO, "an earlier sync failed")
        if any(item.synced < HEADER.size for item, _ in work):
            self._files.sync_directory(self._path)

    def synced(self, work: list[tuple[OpenSegment, int]]) -> None:
        """Record that these segments are on the disk; the closing ones are then closed."""
        covered = sum(max(0, size - item.synced) for item, size in work)
        if work:
            self._room = min(SYNCS * covered, ROOM) if covered <= SMALL else 0
        for item, size in work:
            item.synced = max(item.synced, size)
        for item in [item for item in self.closing if item.synced >= item.size]:
            self.closing.remove(item)
            with contextlib.suppress(OSError):  # without an index, the next start reads and truncates it
                self._cut(item)
                self._write_index(item.path, item.index.summary(item.size))
            self.directory.retire(item.fd)

    def rewrite_unsynced(self) -> list[tuple[int, int]]:
        """After a failed background sync, replace each file that is not on the disk by a copy.

        Returns the numbers that could not be read back. Raises OSError if the copy fails too; files that were
        not replaced are unchanged. May run in a thread, while nothing else writes or deletes.
        """
        lost: list[tuple[int, int]] = []
        work = [item for item, _ in self.unsynced()]
        for item in work:
            data = self._files.read(item.fd, item.size, 0)
            frames = list(segment.scan(data, HEADER.size, self._meta.salt))
            end = frames[-1].end if frames else HEADER.size
            if end < item.synced:
                end = item.size  # the file on the disk is damaged too, so it is copied unchanged
            elif end < item.size:
                lost.append((frames[-1].next if frames else item.index.base, item.index.next - 1))
            fd = self.directory.rewrite(item.path, [self._header(item), data[HEADER.size : end]])
            self.directory.retire(item.fd)
            item.fd, item.room = fd, 0
            if end < item.size:
                kept = Indexer(item.index.base)
                for frame in frames:
                    kept.add(frame, frame.start)
                kept.next = item.index.next
                item.index, item.size = kept, end
                self._resize(kept.base, end)
        self._files.sync_directory(self._path)
        self._suspect = False
        for item in work:
            item.synced = item.size
        return lost

    # -- the front -------------------------------------------------------------------------------
    @property
    def first(self) -> int:
        """The first number of the oldest segment."""
        return next(iter(self.sizes))

    def _resize(self, base: int, size: int | None) -> None:
        self.total_bytes += (size or 0) - self.sizes.get(base, 0)
        if size is None:
            self.sizes.pop(base, None)
            self.openings.pop(base, None)
        else:
            self.sizes[base] = size

    def following(self, base: int) -> int:
        """The first number after the segment that begins at `base`."""
        return next((other for other in self.sizes if other > base), self.next)

    def summary(self, base: int) -> SegmentSummary:
        """Return the summary of a segment; rebuild a lost index. Raises OSError."""
        for item in [*self.closing, self.active]:
            if item.index.base == base:
                return item.index.summary(item.size)
        found = recovery.read_index(self._path, base, self.sizes[base])
        return found or self._examine(base).summary

    def repair(self, base: int) -> list[Damage]:
        """Check every frame of a segment and quarantine damage; return what was found. Raises OSError.

        Nothing may be in flight. If it is the active segment, it is closed first.
        """
        if base == self.active.index.base and self.active.size > HEADER.size:
            self.replace_active()
        for item in [item for item in self.closing if item.index.base == base]:
            self._sync(item)  # because an index states that the segment is on the disk
            self.closing.remove(item)
            self.directory.retire(item.fd)
        if base == self.active.index.base:
            return []
        return self._examine(base).damage

    def _examine(self, base: int) -> recovery.Examined:
        examined = self._examined(base, self.following(base))
        self._resize(base, examined.summary.size)
        self._write_index(layout.segment_path(self._path, base), examined.summary)
        self.damage += examined.damage
        return examined

    def remove_first(self) -> None:
        """Remove the oldest segment, not the active one, from the log. Its files are then obsolete."""
        base = self.first
        path = layout.segment_path(self._path, base)
        self.obsolete.pending.append(path)
        if (opening := self.openings.get(base)) is not None:
            self._obsolete_openings[path] = opening
        self._resize(base, None)
        for item in [item for item in self.closing if item.index.base == base]:
            self.closing.remove(item)
            self.directory.retire(item.fd)

    def _write_index(self, path: Path, summary: SegmentSummary) -> None:
        try:
            self._files.replace(path.with_suffix(layout.INDEX), segment.encode_index(summary), sync=False)
        except OSError:  # without an index the next start reads the segment
            return
