"""The file of the journal: frames are appended, and a snapshot replaces them when most are obsolete.

Layout: frames, one after the other. A frame whose length is 0 or whose CRC is wrong ends the file (a torn
tail).

    frame = length u32 | crc u32 | msgpack array [kind, ...], see `records.py`

Numbers are big-endian. The crc is the CRC-32 of the `length` bytes after it.

While any stream is encrypted, the bodies are too, and the highest bit of their length is set. They are sealed
as `bridge.encryption` describes, with the context "journal". If the file of their key in `keys/` is lost or
damaged, the file is kept under its name with `.` and the number of that key, and the sessions start empty.
The last frame of a kept file says that it may be out of date.

States:

    writing     the records of a turn are appended when it ends, and synced within `SYNC_INTERVAL`
    copying     the file is several times as large as its live records: a thread writes a snapshot beside it,
                records go to both, and then the snapshot replaces the file
    failed      a write has failed: nothing is confirmed until a snapshot has been written, which is tried
                every `RETRY_INTERVAL` seconds
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from functools import partial
from typing import TYPE_CHECKING

from bridge.deflate import crc32
from bridge.durable import make_directory, sync_directory
from bridge.encryption import opening_of
from bridge.errors import CorruptData, EncryptionKeyError, StorageFailed, StreamError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from bridge.encryption import Keys
    from bridge.runtime import Runtime, Timer

log = logging.getLogger(__name__)

_FRAME = struct.Struct(">II")
DIRECTORY, NAME = "mqtt", "sessions.journal"
_SEALED = 0x80000000
_CONTEXT = b"journal"
SLACK = 4 * 1024 * 1024  # bytes of obsolete records up to which a snapshot is not worthwhile
SYNC_INTERVAL = 1.0
RETRY_INTERVAL = 1.0


class _Copy:
    """A snapshot that will replace the file. Until then, records go to both."""

    def __init__(self, journal: Path, data: bytes) -> None:
        """Raises OSError."""
        self.path = journal.with_suffix(".new")
        self.path.unlink(missing_ok=True)  # a thread may still be writing to a dropped one
        self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.size = self.least = len(data)

    def append(self, data: bytes) -> None:
        write_all(self.fd, data, self.size)
        self.size += len(data)

    def drop(self) -> None:
        os.close(self.fd)
        self.path.unlink(missing_ok=True)  # it takes up space


class JournalFile:
    """The file to which bodies of records are written."""

    def __init__(
        self,
        path: Path,
        runtime: Runtime,
        snapshot: Callable[[], Iterable[bytes]],
        keys: Keys | None = None,
        encrypts: Callable[[], bool] = lambda: False,
        outdated: bytes = b"",
    ) -> None:
        """`snapshot` returns the bodies of all live records.

        `encrypts` returns whether to encrypt them with `keys`. `outdated` ends a file that is kept.
        """
        self._outdated = outdated
        self.path, self._runtime, self._snapshot = path, runtime, snapshot
        self._keys, self._encrypts = keys, encrypts
        self._sealed = False  # whether the last snapshot was encrypted
        self.failed = False
        self._open = False
        self._fd = -1
        self._size = self._least = 0  # bytes in the file now, and right after the last snapshot
        self._buffer: list[bytes] = []
        self._waiting: list[Callable[[StreamError | None], None]] = []
        self._unsynced = self._syncing = False
        self._write_timer: Timer | None = None
        self._sync_timer: Timer | None = None
        self._copy: _Copy | None = None
        self._copying = False  # a thread writes a copy, which may already be dropped

    def read(self) -> Iterator[bytes]:
        """Read the bodies of an earlier process. Call it before `open`.

        Raises EncryptionKeyError without the master key, or OSError.
        """
        data = self.path.read_bytes() if self.path.exists() else None
        if data is not None and not data.rstrip(b"\0"):  # each start writes a record
            lost = "the sessions, wills and retained messages of the last run are lost; restore a backup"
            log.warning("%s: it is empty: %s", self.path, lost)
        data, pos = data or b"", 0
        for body, is_sealed, end in _frames(data):
            if is_sealed:
                if self._keys is None:
                    raise EncryptionKeyError(f"{self.path} is encrypted, and no key is configured")
                try:
                    yield self._keys.open(_CONTEXT, b"", body)
                except CorruptData:
                    break
                except EncryptionKeyError as error:
                    self._keep(opening_of(body), data, error)
                    return
            else:
                yield body
            pos = end
        if pos < len(data):
            log.warning("%s: %d bytes at the end are damaged and were left out", self.path, len(data) - pos)

    def _keep(self, opening: int, data: bytes, why: EncryptionKeyError) -> None:
        """Set the file aside, because a gateway without its sessions is better than none. Raises OSError.

        By the time it is back, clients will have used their packet ids for other messages.
        """
        *_, (_, _, end) = _frames(data)
        mark = _FRAME.pack(len(self._outdated), crc32(self._outdated)) + self._outdated
        fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            write_all(fd, mark, end)
            os.ftruncate(fd, end + len(mark))
            os.fdatasync(fd)
        finally:
            os.close(fd)
        kept = self.path.with_name(f"{self.path.name}.{opening:016x}")
        self.path.replace(kept)
        log.error(
            "%s: sessions and retained messages cannot be read, and start empty: %s. Their file is kept: "
            "with that key, stop the service and rename %s to %s",
            self.path,
            why,
            kept,
            self.path.name,
        )

    def open(self) -> None:
        """Begin to write, with a snapshot. Raises OSError if the file cannot be written.

        It waits while the disk is full, because a failed start would keep exports from freeing space.
        """
        try:
            make_directory(self.path.parent)
            self._write_snapshot()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._cannot_write(error)
            self._write_timer = self._runtime.later(RETRY_INTERVAL, self._write)
        self._open = True

    def renew(self) -> None:
        """Replace the file by an encrypted one, if encryption has been switched on."""
        if self._open and not self._sealed and self._encrypts():
            self.failed = True  # nothing is confirmed until then
            self._write_in(0)

    def add(self, body: bytes) -> None:
        """Write a body at the end of this turn. Before `open` and after `close` nothing is written."""
        if not self._open:
            return
        if not self.failed:  # else the next snapshot has its content
            try:
                self._buffer += self._framed(body)
            except OSError as problem:
                self._cannot_write(problem)
        if self._write_timer is None:
            self._write_timer = self._runtime.soon(self._write)

    def add_at_once(self, body: bytes) -> None:
        """Write a body before this returns. It may come before earlier bodies.

        After a failure, a snapshot is written in place of everything. Raises OSError; the body is dropped.
        """
        if not self._open:
            return
        try:
            if self.failed:
                self._write_snapshot()
                self.failed = False
                self._buffer = []  # the snapshot has its content
            else:
                self._append(b"".join(self._framed(body)))
        except OSError as problem:
            self._cannot_write(problem)
            self._write_in(RETRY_INTERVAL)
            raise
        if self._waiting:
            self._write_in(0)

    def after_commit(self, done: Callable[[StreamError | None], None]) -> None:
        """Call `done` once all bodies so far are in the file."""
        if self._buffer or self.failed:
            self._waiting.append(done)
        else:
            done(None)

    def close(self) -> None:
        """Write and sync everything, and close the file. `failed` says whether that was not possible."""
        if not self._open:
            return
        self._open = False
        for timer in (self._write_timer, self._sync_timer):
            if timer is not None:
                timer.cancel()
        self._drop_copy()
        self._write()
        if self._write_timer is not None:
            self._write_timer.cancel()  # the write has failed
        if self._fd < 0:
            return
        try:
            try:
                os.fdatasync(self._fd)
            except OSError:  # the kernel may have dropped what was not synced, and not report it again
                self._write_snapshot()
        except OSError as error:
            self.failed = True
            log.error(
                "%s: %s; a power cut now, or the next start, may bring back older sessions", self.path, error
            )
        os.close(self._fd)
        self._fd = -1

    # -- writing ------------------------------------------------------------

    def _write(self) -> None:
        """Write the records of this turn."""
        self._write_timer = None
        error: StreamError | None = None
        try:
            if self.failed:
                self._write_snapshot()
            elif self._buffer:
                self._append(b"".join(self._buffer))
                self._begin_copy()
            self.failed = False
        except OSError as problem:
            self._cannot_write(problem)
            error = StorageFailed(f"{self.path}: {problem.strerror or problem}")
            self._write_in(RETRY_INTERVAL)
        self._buffer = []
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done(error)

    def _write_in(self, seconds: float) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._write_timer = self._runtime.later(seconds, self._write)

    def _append(self, data: bytes) -> None:
        write_all(self._fd, data, self._size)
        self._size += len(data)
        self._must_sync()
        if self._copy is not None:
            self._copy.append(data)

    def _begin_copy(self) -> None:
        """Start a snapshot if most of the file is obsolete."""
        if self._copy is not None or self._copying or not self._open:
            return
        if self._size > 4 * self._least + SLACK:
            frames = self._snapshot_frames()
            self._copy = _Copy(self.path, frames)
            self._copying = True
            self._fill(self._copy, frames, self._filled)

    def _cannot_write(self, problem: OSError) -> None:
        self._drop_copy()  # it may lack records that could not be written
        if not self.failed:
            log.error(
                "%s: %s; persistent sessions are not acknowledged until it can be written",
                self.path,
                problem.strerror or problem,
            )
        self.failed = True

    def _write_again(self, error: BaseException) -> None:
        log.error("%s: %s; it will be written again", self.path, error)
        self.failed = True
        if self._write_timer is None and self._open:
            self._write_timer = self._runtime.soon(self._write)

    # -- syncing ------------------------------------------------------------

    def _must_sync(self) -> None:
        self._unsynced = True
        if self._sync_timer is None and not self._syncing and self._open:
            self._sync_timer = self._runtime.later(SYNC_INTERVAL, self._sync)

    def _sync(self) -> None:
        self._sync_timer, self._unsynced, self._syncing = None, False, True
        fd = os.dup(self._fd)  # a snapshot may replace the file during the sync
        self._runtime.work(partial(_sync_and_close, fd), self._synced)

    def _synced(self, error: BaseException | None) -> None:
        self._syncing = False
        if error is not None:
            self._write_again(error)
        if self._unsynced:
            self._must_sync()

    def _framed(self, body: bytes) -> tuple[bytes, bytes]:
        """Return a frame in two parts. Raises OSError, for the first one may have to make a key."""
        flag = 0
        if self._sealed and self._keys is not None:
            try:
                flag, body = _SEALED, self._keys.seal(_CONTEXT, b"", body)
            except EncryptionKeyError as error:
                raise OSError(errno.EACCES, str(error)) from None
        return _FRAME.pack(len(body) | flag, crc32(body)), body

    # -- snapshots ------------------------------------------------------------

    def _snapshot_frames(self) -> bytes:
        frames: list[bytes] = []
        self._sealed = self._encrypts()
        for body in self._snapshot():
            frames += self._framed(body)
        return b"".join(frames)

    def _write_snapshot(self) -> None:
        self._drop_copy()
        data = self._snapshot_frames()
        copy = _Copy(self.path, data)
        try:
            _write_and_sync(os.dup(copy.fd), data)
            self._install(copy)
        except OSError:
            copy.drop()
            raise
        sync_directory(self.path.parent)

    def _fill(self, copy: _Copy, data: bytes, done: Callable[[_Copy, BaseException | None], None]) -> None:
        work = partial(_write_and_sync, os.dup(copy.fd), data)
        self._runtime.work(work, partial(done, copy))

    def _filled(self, copy: _Copy, error: BaseException | None) -> None:
        """The snapshot is on the disk. Sync the records added since."""
        if error is None and self._copy is copy:
            self._fill(copy, b"", self._complete)
        else:
            self._copied(copy, error)

    def _complete(self, copy: _Copy, error: BaseException | None) -> None:
        """The snapshot and the records added since are on the disk. Replace the file by it."""
        if error is None and self._copy is copy:
            try:
                self._install(copy)
            except OSError as problem:
                error = problem
            else:
                self._copy = None
                self._must_sync()
                work = partial(sync_directory, self.path.parent)
                self._runtime.work(work, partial(self._copied, copy))
                return
        self._copied(copy, error)

    def _copied(self, copy: _Copy, error: BaseException | None) -> None:
        self._copying = False
        if self._copy is copy:
            self._drop_copy()
        if error is not None and self._open:
            self._write_again(error)

    def _install(self, copy: _Copy) -> None:
        copy.path.replace(self.path)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size, self._least, self._unsynced = copy.fd, copy.size, copy.least, False

    def _drop_copy(self) -> None:
        if self._copy is not None:
            self._copy.drop()
            self._copy = None


def _frames(data: bytes) -> Iterator[tuple[bytes, bool, int]]:
    """Return the bodies up to damage, each with whether it is sealed, and where they end."""
    pos = 0
    while pos + _FRAME.size <= len(data):
        length, check = _FRAME.unpack_from(data, pos)
        is_sealed, length = bool(length & _SEALED), length & ~_SEALED
        body = data[pos + _FRAME.size : pos + _FRAME.size + length]
        if not length or len(body) < length or crc32(body) != check:
            return  # zeros, too: a power cut may leave them where a write is missing
        pos += _FRAME.size + length
        yield body, is_sealed, pos


def openings(data_dir: Path) -> set[int]:
    """Return the numbers of the opening keys that the journal needs, and kept ones. Raises OSError."""
    found = set[int]()
    for path in (data_dir / DIRECTORY).glob("*.journal*"):
        found |= {opening_of(body) for body, is_sealed, _ in _frames(path.read_bytes()) if is_sealed}
    return found


def settle(data_dir: Path) -> None:
    """Make certain that a power cut brings back no older journal. Raises OSError."""
    directory = data_dir / DIRECTORY
    if directory.exists():
        sync_directory(directory)


def write_all(fd: int, data: bytes, offset: int) -> None:
    """Write all of `data` at an offset. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _write_and_sync(fd: int, data: bytes) -> None:
    """Write these bytes at the beginning of a file and wait for the disk. Closes `fd`."""
    try:
        write_all(fd, data, 0)
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _sync_and_close(fd: int) -> None:
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)
