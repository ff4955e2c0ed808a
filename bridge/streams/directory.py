"""The files of one stream's directory as its only writer uses them, from the event loop and from threads.

A stream may be deleted, and created again under its name, while a thread still works for it. From then on
nothing is made, renamed or deleted here.
"""

from __future__ import annotations

import os
from errno import ESTALE
from pathlib import Path
from threading import Lock

from bridge.streams import layout
from bridge.streams.drops import DropLog
from bridge.streams.layout import Files


class Directory:
    """Makes, replaces and deletes files, and closes them when no thread uses them."""

    def __init__(self, files: Files, path: Path) -> None:
        self.files, self.path = files, path
        self._gate = Lock()  # held while a file gets its name, and while the stream is deleted
        self._abandoned = False
        self._leftovers: set[Path] = set()  # files of a failed group that could not be deleted
        self._pins = 0  # worker threads that use our descriptors
        self._retired: list[int] = []

    # -- descriptors -----------------------------------------------------------------------------
    @property
    def pinned(self) -> bool:
        """Whether a worker thread uses our descriptors."""
        return self._pins > 0

    def pin(self) -> None:
        """A worker thread begins to use our descriptors: none is closed until `unpin`.

        The kernel gives the number of a closed descriptor to the next file that is opened.
        """
        self._pins += 1

    def unpin(self) -> None:
        self._pins -= 1
        if not self._pins:
            retired, self._retired = self._retired, []
            for fd in retired:
                os.close(fd)

    def retire(self, fd: int) -> None:
        """Close a descriptor as soon as no worker thread uses it."""
        if self._pins:
            self._retired.append(fd)
        else:
            os.close(fd)

    # -- names -----------------------------------------------------------------------------------
    def abandon(self, home: Path, name: Path) -> None:
        """Delete the stream: rename its definition's directory `home` to `name`; raises OSError."""
        with self._gate:
            home.rename(name)
            self._abandoned = True

    def _open(self, path: Path) -> int:
        with self._gate:
            self._check_there()
            return self.files.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def _check_there(self) -> None:
        if self._abandoned:
            raise OSError(ESTALE, "the stream was deleted")

    def make(self, path: Path, content: bytes) -> int:
        """Make a file, and return its descriptor; raises OSError, and then there is none."""
        fd = self._open(path)
        self._leftovers.discard(path)  # it is no leftover any more
        try:
            self.files.write(fd, [content], 0)
        except OSError:
            self.discard(path, fd)
            raise
        return fd

    def discard(self, path: Path, fd: int) -> None:
        """Delete a file that was made for a failed group; if that fails too, it is retried by the next."""
        try:
            self.files.truncate(fd, 0)
            with self._gate:
                if not self._abandoned:  # else the name may be a new stream's
                    self.files.unlink(path)
        except OSError:
            self._leftovers.add(path)
        self.retire(fd)

    def remove_leftovers(self) -> None:
        """Delete what `discard` could not; raises OSError."""
        if self._leftovers:
            for path in list(self._leftovers):
                self.files.unlink(path)
                self._leftovers.discard(path)
            self.files.sync_directory(self.path)

    def rewrite(self, path: Path, parts: list[bytes]) -> int:
        """Replace a file by a new one, and return its descriptor; raises OSError.

        It gets the old one's name once it is on the disk, so a crash at any instant leaves one or the other.
        """
        spare = path.with_name(path.name + layout.TEMPORARY)
        fd = self._open(spare)
        try:
            self.files.write(fd, parts, 0)
            self.files.sync(fd)
            with self._gate:
                self._check_there()
                spare.replace(path)
        except OSError:
            os.close(fd)
            raise
        return fd

    def delete(self, segments: list[Path], *, cut: bool) -> None:
        """Delete segments and their indexes, if they exist; raises OSError.

        `cut`: free the space at once, also of a file that a reader has open.
        """
        for path in segments:
            with self._gate:
                self._check_there()
                self.files.unlink(path.with_suffix(layout.INDEX))
                if cut:
                    self._empty(path)
                self.files.unlink(path)

    def _empty(self, path: Path) -> None:
        try:
            fd = self.files.open(path, os.O_WRONLY)
        except FileNotFoundError:
            return
        try:
            self.files.truncate(fd, 0)
        finally:
            os.close(fd)


class ObsoleteSegments:
    """The files of one stream to delete, and those being deleted."""

    def __init__(self, directory: Directory, drops: DropLog) -> None:
        self._directory, self._drops = directory, drops
        self.pending: list[Path] = []
        self._deleting: list[Path] | None = None  # by a worker thread

    def any(self) -> bool:
        """Whether there are such files."""
        return bool(self._deleting or self.pending)

    def begin(self, oldest: int) -> list[Path]:
        """Files for a worker thread to `delete`; call `end` afterwards.

        There are none while a thread is deleting, or if `drops.log` cannot record all drops below `oldest`.
        """
        if self._deleting is not None or not self.pending or not self._drops.explains(oldest):
            return []
        self._deleting, self.pending = self.pending, []
        return self._deleting

    def delete(self, paths: list[Path], *, cut: bool = False) -> None:
        """Delete files; raises OSError. May run in a thread. Files that are gone already are no error.

        Syncs `drops.log` first: otherwise an intended drop could look like a loss after a power cut. `cut`:
        free the space at once, also of a file that a reader has open; the reader sees the drop.
        """
        self._drops.sync()
        self._directory.delete(paths, cut=cut)

    def end(self, *, failed: bool) -> None:
        """A worker thread is done; files that it failed to delete are pending again."""
        deleting, self._deleting = self._deleting or [], None
        if failed:
            self.pending = deleting + self.pending

    def delete_now(self, oldest: int) -> bool:
        """Delete all, also those that a worker thread is about to; False as in `begin`. Raises OSError."""
        if not self._drops.explains(oldest):
            return False
        self.delete([*(self._deleting or ()), *self.pending], cut=True)
        self.pending = []
        if self._deleting is not None:
            self._deleting = []
        self._drops.save()  # it preallocates first: without that nothing can be freed next time
        return True
