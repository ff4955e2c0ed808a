"""File names, and the class through which the store uses the file system.

A stream's directory has the escaped name of the stream (`bridge.objectkeys.escape`). So `..`, spaces and
`.log` are legal names, and never act as paths. Escaped names over 200 characters are cut, and end with `~`
and a digest; the definition has the full name. Segments are named by their first sequence number with 20
digits, so they sort by number.

All system calls that change or read stream data go through `Files`, so tests can make any of them fail and
count reads.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from errno import EDQUOT, ENOSPC
from pathlib import Path

from bridge import durable
from bridge.objectkeys import escape

STREAMS = "streams"
QUARANTINE = "quarantine"
SEGMENT = ".seg"
INDEX = ".idx"
TEMPORARY = ".tmp"
DIGITS = 20
FULL = (ENOSPC, EDQUOT)  # no space left in the file system, or in the user's quota


def directory_name(name: str) -> str:
    """The name of a stream's directory; at most 200 characters, never starting with a dot."""
    escaped = escape(name)
    if len(escaped) <= 200:
        return escaped
    return f"{escaped[:150]}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def file_name(base: int, ending: str = SEGMENT) -> str:
    """The name of the segment whose first sequence number is `base`, or of its index."""
    return f"{base:0{DIGITS}d}{ending}"


def segment_path(directory: Path, base: int) -> Path:
    """The segment file whose first sequence number is `base`."""
    return directory / file_name(base)


def base_of(name: str) -> int | None:
    """The first sequence number in a segment's file name; None for any other file."""
    stem, dot, end = name.rpartition(".")
    return int(stem) if dot + end == SEGMENT and len(stem) == DIGITS and stem.isdecimal() else None


def segment_bases(directory: Path) -> list[int]:
    """The first numbers of a directory's segments, ascending."""
    with os.scandir(directory) as entries:
        return sorted(base for entry in entries if (base := base_of(entry.name)) is not None)


class Files:
    """The real file system. Tests replace single methods to inject faults."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file, of mode 0600 if this creates it; raises OSError."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        """Write all of `parts` at `offset`; raises OSError, possibly after writing some of it."""
        done, total = os.pwritev(fd, parts, offset), sum(map(len, parts))
        if done < total:
            rest = memoryview(b"".join(parts))
            while done < total:
                done += os.pwrite(fd, rest[done:], offset + done)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Read up to `size` bytes at `offset`; fewer at the end of the file."""
        return os.pread(fd, size, offset)

    def sync(self, fd: int) -> None:
        """Wait until the file's data is on the disk (fdatasync); raises OSError."""
        os.fdatasync(fd)

    def sync_path(self, path: Path) -> None:
        """Wait until what a file has now is on the disk."""
        fd = self.open(path, os.O_RDONLY)
        try:
            self.sync(fd)
        finally:
            os.close(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def unlink(self, path: Path) -> None:
        """Remove a file, if it exists."""
        path.unlink(missing_ok=True)

    def free(self, directory: Path) -> int:
        """The free bytes of a directory's file system; raises OSError."""
        space = os.statvfs(directory)
        return space.f_bavail * space.f_frsize

    def sync_directory(self, directory: Path) -> None:
        """Wait until the names in a directory are on the disk; raises OSError."""
        durable.sync_directory(directory)

    def make_directory(self, directory: Path) -> None:
        """Make a directory durably, if it does not exist (see `bridge.durable`); raises OSError."""
        durable.make_directory(directory, self.sync_directory)

    def replace(self, path: Path, content: bytes, *, sync: bool = True) -> None:
        """Replace a file: readers see the old content or the new one, never a mixture.

        With `sync` the same holds after a power cut. Raises OSError.
        """
        temporary = path.with_name(path.name + TEMPORARY)
        fd = self.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self.write(fd, [content], 0)
            if sync:
                self.sync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
        if sync:
            self.sync_directory(path.parent)
