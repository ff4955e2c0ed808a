"""The files of one stream's directory as its only writer uses them, from the event loop and from threads.

A stream may be deleted, and made again under its name, while a thread still works for it: from then
on nothing is made or removed here, and nothing is given a name.
"""

from __future__ import annotations

import os
from errno import ESTALE
from pathlib import Path
from threading import Lock

from bridge.streams import layout
from bridge.streams.layout import Files


class Directory:
    """Makes, replaces and removes files, and closes them when nobody uses them any more."""

    def __init__(self, files: Files, path: Path) -> None:
        self.files, self.path = files, path
        self._gate = Lock()  # held while a name is given to a file, and while the stream is deleted
        self._abandoned = False
        self._leftovers: set[Path] = set()  # files of a failed group that could not be removed
        self._pins = 0  # worker threads that use our descriptors
        self._retired: list[int] = []

    # -- descriptors -----------------------------------------------------------------------------
    @property
    def pinned(self) -> bool:
        """Whether a worker thread uses our descriptors."""
        return self._pins > 0

    def pin(self) -> None:
        """A worker thread begins to use our descriptors: none is closed until `unpin`.

        The kernel would give the number of a closed one to the next file that is opened.
        """
        self._pins += 1

    def unpin(self) -> None:
        """A worker thread has done its work."""
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
        """The stream is deleted: its definition's directory `home` gets another name; raises OSError."""
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
        self._leftovers.discard(path)  # it is not what a failed group has left there any more
        try:
            self.files.write(fd, [content], 0)
        except OSError:
            self.discard(path, fd)
            raise
        return fd

    def discard(self, path: Path, fd: int) -> None:
        """Remove a file that was made for a group that failed; if that fails too, before the next group."""
        try:
            self.files.truncate(fd, 0)
            with self._gate:
                if not self._abandoned:  # else the name may be a new stream's by now
                    self.files.unlink(path)
        except OSError:
            self._leftovers.add(path)
        self.retire(fd)

    def remove_leftovers(self) -> None:
        """Remove what `discard` could not; raises OSError."""
        if self._leftovers:
            for path in list(self._leftovers):
                self.files.unlink(path)
                self._leftovers.discard(path)
            self.files.sync_directory(self.path)

    def rewrite(self, path: Path, parts: list[bytes]) -> int:
        """Replace a file by a new one, and return its descriptor; raises OSError.

        It takes the old one's name once it is on the disk itself, so that a crash at any instant leaves
        one or the other.
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
        """Remove segments and their indexes; raises OSError. What is gone already is fine.

        `cut`: free their room at once, also of a file that a reader has open.
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
