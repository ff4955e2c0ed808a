"""The files of one stream's directory, for its only writer, which uses the event loop and threads.

A stream may be deleted, and created again under its name, while a thread still works for it. From then on,
this object creates, renames and deletes nothing.
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
    """Creates, replaces and deletes files, and closes them when no thread uses them."""

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
        """Keep all descriptors open for a worker thread, until `unpin`.

        Otherwise the kernel could give the number of a closed descriptor to the next file.
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
        """Delete the stream by renaming its definition's directory `home` to `name`. Raises OSError."""
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
        """Create a file and return its descriptor. After an OSError, the file does not exist."""
        fd = self._open(path)
        self._leftovers.discard(path)  # it is used again
        try:
            self.files.write(fd, [content], 0)
        except OSError:
            self.discard(path, fd)
            raise
        return fd

    def discard(self, path: Path, fd: int) -> None:
        """Delete a file that was created for a failed group. The next group retries a failure."""
        try:
            self.files.truncate(fd, 0)
            with self._gate:
                if not self._abandoned:  # if it is, a new stream may use the name
                    self.files.unlink(path)
        except OSError:
            self._leftovers.add(path)
        self.retire(fd)

    def remove_leftovers(self) -> None:
        """Delete the files that `discard` could not. Raises OSError."""
        if self._leftovers:
            for path in list(self._leftovers):
                self.files.unlink(path)
                self._leftovers.discard(path)
            self.files.sync_directory(self.path)

    def rewrite(self, path: Path, parts: list[bytes]) -> int:
        """Replace a file, and return the descriptor of the new one. Raises OSError.

        The new file gets the name once it is on the disk, so a crash at any instant leaves one or the other.
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
        """Delete segments and their indexes, if they exist. Raises OSError.

        `cut`: free the space at once, even of a file that a reader has open.
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

    @property
    def paths(self) -> list[Path]:
        """Return all such files."""
        return [*(self._deleting or ()), *self.pending]

    def any(self) -> bool:
        """Return whether there are such files."""
        return bool(self._deleting or self.pending)

    def begin(self, oldest: int) -> list[Path]:
        """Return files for a worker thread to `delete`; call `end` afterwards.

        Returns none while a thread is deleting, or if `drops.log` cannot record all drops below `oldest`.
        """
        if self._deleting is not None or not self.pending or not self._drops.explains(oldest):
            return []
        self._deleting, self.pending = self.pending, []
        return self._deleting

    def delete(self, paths: list[Path], *, cut: bool = False) -> None:
        """Delete files, which need not exist. Raises OSError. May run in a thread.

        Syncs `drops.log` first; otherwise an intended drop could look like a loss after a power cut. `cut`:
        free the space at once, even of a file that a reader has open; the reader sees the drop.
        """
        self._drops.sync()
        self._directory.delete(paths, cut=cut)

    def end(self, *, failed: bool) -> None:
        """End the work of a thread; files that it failed to delete are pending again."""
        deleting, self._deleting = self._deleting or [], None
        if failed:
            self.pending = deleting + self.pending

    def delete_now(self, oldest: int) -> bool:
        """Delete all, even those that a thread is about to delete; False as in `begin`. Raises OSError."""
        if not self._drops.explains(oldest):
            return False
        self.delete(self.paths, cut=True)
        self.pending = []
        if self._deleting is not None:
            self._deleting = []
        self._drops.save()  # preallocates first; without space for records, nothing could be freed next time
        return True
