"""All streams of one data directory, and the only process that writes them.

Opening takes the lock, recovers each stream, and reports damage. A stream whose definition is lost is left
unchanged, reported, and not opened; the others run. Creating and deleting are atomic: a directory's name
begins with a dot until the stream is complete, and again before its files are deleted. The next start deletes
such directories.

Memory streams: the definition is in the data directory, the segments are in `memory_dir`, to which
`<data_dir>/memory` links. They are emptied at every start, but their numbers continue: `reserved` in the
definition is kept above every number that was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from bridge.clock import NAME as CLOCK
from bridge.clock import Clock, System
from bridge.durable import make_directory
from bridge.encryption import Keys, is_used
from bridge.errors import (
    DataDirectoryBusy,
    EncryptionKeyError,
    KeyUnavailable,
    OtherFormat,
    StorageFailed,
    StreamError,
)
from bridge.objectkeys import MAX_SEQUENCE
from bridge.readable import is_directory, user_name
from bridge.runtime import LoopRuntime, Runtime, tick
from bridge.streams import drops, formats, layout, meta, recovery
from bridge.streams.committer import Committer
from bridge.streams.formats import Format
from bridge.streams.layout import Files
from bridge.streams.meta import Meta, StorageSettings
from bridge.streams.stream import Stream

LOCK = "lock"
MEMORY = "memory"
CREATING = ".new-"
DELETED = ".deleted-"
RANDOM_BITS = 40  # of ms: 35 years
SLICE = 200  # streams that are maintained at a time, a few milliseconds, before clients are served
LAST_SYNCS = 3  # attempts at a stop; a failed sync is written again elsewhere, which may fail too
RESERVE = 10_000_000  # numbers of a memory stream that one write of its definition covers

log = logging.getLogger(__name__)

Event = Callable[[str, str], None]


def is_running(data_dir: Path) -> bool:
    """Return whether a process has the lock on a data directory. Reads /proc/locks and takes no lock."""
    return running(data_dir) is not None


def running(data_dir: Path) -> int | None:
    """Return the process that has the lock on a data directory; None if none has it, or nobody can tell."""
    try:
        inode = (data_dir / LOCK).stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return None
    found = (line.split() for line in locks.splitlines() if f":{inode} " in line)
    return next((int(words[4]) for words in found if words[1] == "FLOCK"), None)


def is_held(memory_dir: Path) -> bool:
    """Return whether a store has its memory streams in this directory."""
    try:
        os.close(_locked(memory_dir, os.O_RDONLY | os.O_DIRECTORY))
    except BlockingIOError:
        return True
    except OSError:  # there is none, or it belongs to somebody else
        return False
    return False


def _locked(path: Path, flags: int) -> int:
    """Lock a file or directory. Raises BlockingIOError if another process has the lock."""
    lock = os.open(path, flags | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


THREADS = 8  # that write and sync groups


class Unopened(NamedTuple):
    """A stream that could not be opened. `definition` is None if it is lost.

    `encrypted`: whether the stream is encrypted, or may be if that is unknown.
    """

    why: str
    definition: bytes | None
    encrypted: bool


class StreamStore:
    """The streams of a data directory, by name. `on_event` is called with (stream, what happened)."""

    def __init__(
        self,
        data_dir: Path,
        memory_dir: Path,
        *,
        on_event: Event,
        floor: Callable[[str, int], int] = lambda name, epoch: 0,
        files: Files | None = None,
        system: System | None = None,
        runtime: Runtime | None = None,
        link: bool = True,
        most: int | None = None,
        keys: Keys | None = None,
        commit_delay: float = 0.0,
    ) -> None:
        """Open the directory, or create it.

        Raises DataDirectoryBusy, OtherFormat, EncryptionKeyError or OSError.

        `floor` returns the lowest number that the next message of a stream (name, epoch) may have. `runtime`
        is by default that of the running event loop; `close` closes it. `link`: whether to link
        `<data_dir>/memory` to `memory_dir`. `most` is how many streams are opened: each keeps a file open.
        `keys` are those of the directory; without them, encrypted streams cannot be opened. `commit_delay` is
        the committer's, in seconds.
        """
        self.keys = keys or Keys(data_dir)
        self._most = most
        self.data_dir, self.files, self._on_event, self._floor = data_dir, files or Files(), on_event, floor
        self.streams: dict[str, Stream] = {}
        self.runtime = runtime or LoopRuntime(THREADS, "commit")
        self.committer = Committer(on_event, self.streams, self.runtime, commit_delay)
        self.unopened: dict[str, Unopened] = {}
        self._epoch = 0  # the highest epoch of streams created or deleted here; none is used twice
        self._root = data_dir / layout.STREAMS
        found = formats.find(data_dir)
        self.files.make_directory(self._root)
        self._lock, self._memory_lock = self._take_lock(), -1
        try:
            for path in self.keys.check():
                log.error("%s: both its copies are damaged; restore it from a backup", path)
            self._repair_keys()
            self.clock = Clock(
                data_dir / CLOCK, self.files.replace, system, empty=not any(self._root.iterdir())
            )
            self._memory = self._prepare_memory(memory_dir, link)
            encrypted = found.number == formats.ENCRYPTED or is_used(data_dir)
            self._format = formats.ENCRYPTED if encrypted else formats.PRESENT
            self._upgrading = found != Format(self._format)
            if self._upgrading:  # a new directory has nothing that could have another format
                self._upgrading = any(self._root.iterdir())
                formats.save(self.files, data_dir, Format(self._format, upgrading=self._upgrading))
            for directory in sorted(self._root.iterdir()):
                if directory.name.startswith("."):
                    self._remove_leftovers(directory)
                elif directory.is_dir():
                    self._open(directory)
            self.clock.observed()
            if self._upgrading and not self.unopened:
                formats.save(self.files, data_dir, Format(self._format))
        except BaseException:
            self._unlock()
            raise

    def _remove_leftovers(self, directory: Path) -> None:
        """Delete the directory of a stream that was about to be created or deleted, and nothing else."""
        if not directory.name.startswith((CREATING, DELETED)) or not directory.is_dir():
            return
        try:
            shutil.rmtree(directory)
        except OSError as error:
            self._on_event(directory.name, f"{directory}: cannot be deleted: {error}")

    def _unlock(self) -> None:
        for lock in (self._memory_lock, self._lock):
            if lock >= 0:
                os.close(lock)

    def _repair_keys(self) -> None:
        try:
            for path in self.keys.repair():
                log.warning("%s: one of its two copies was damaged; written again from the other one", path)
        except OSError as error:  # no reason not to start, as long as the other copy is sound
            log.error("%s: a damaged copy of a key cannot be written again: %s", self.keys.directory, error)

    def _take_lock(self) -> int:
        path = self.data_dir / LOCK
        try:
            if path.is_file():
                self._replace_lock(path)
            path.mkdir(mode=0o700, exist_ok=True)
            lock = _locked(path, os.O_RDONLY | os.O_DIRECTORY)
        except (BlockingIOError, FileExistsError):
            raise DataDirectoryBusy(
                f"{self.data_dir}: another process writes to this data directory (process "
                f"{running(self.data_dir) or 'unknown'}), most likely the service; stop that first "
                "(`systemctl stop streambridge`)"
            ) from None
        return lock

    def _replace_lock(self, path: Path) -> None:
        """Replace the lock file of format 1 by a directory, which that format's builds cannot open."""
        lock = _locked(path, os.O_RDWR)
        try:
            if path.is_file() and os.path.samestat(path.stat(), os.fstat(lock)):
                path.unlink()
                path.mkdir(mode=0o700)  # not if a build of format 1 was faster
                self.files.sync_directory(self.data_dir)
        finally:
            os.close(lock)

    def _prepare_memory(self, memory_dir: Path, linked: bool) -> Path:
        """Create the directory of memory streams, and a link to it."""
        link = self.data_dir / MEMORY
        make_directory(memory_dir, lambda _: None)  # nothing in it survives a power cut
        found = memory_dir.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            # In a shared directory such as /dev/shm, another user may have created it.
            raise PermissionError(
                errno.EPERM,
                "belongs to somebody else or is open to others; set gateway.memory_dir",
                str(memory_dir),
            )
        try:  # the start empties the streams in it
            self._memory_lock = _locked(memory_dir, os.O_RDONLY | os.O_DIRECTORY)
        except BlockingIOError:
            raise DataDirectoryBusy(
                f"{memory_dir}: another process keeps its memory streams in this directory; set "
                "gateway.memory_dir to a directory of its own for each service"
            ) from None
        if not linked or memory_dir.absolute() == link.absolute():
            return memory_dir  # it is where the link would be
        if not link.is_symlink() or link.readlink() != memory_dir:
            if link.is_dir() and not link.is_symlink():
                shutil.rmtree(link)  # in a copy of a data directory the link may be a directory
            link.unlink(missing_ok=True)
            link.symlink_to(memory_dir)
        return memory_dir

    def _data_of(self, directory: Path, settings: StorageSettings) -> Path:
        return self._memory / directory.name if settings.memory else directory

    def _open(self, directory: Path) -> None:
        may_be_encrypted = self._format == formats.ENCRYPTED  # until its settings are known
        try:
            known, bad = meta.load(directory)
        except PermissionError as error:
            why = (
                f"{error.filename}: user {user_name(os.geteuid())} may not read it; `chown -R` {directory} "
                "to the service's user, and restart the service"
            )
            self._cannot_open(unquote(directory.name), Unopened(why, None, may_be_encrypted))
            return
        except OSError as error:
            why = (
                f"{error.filename}: {error.strerror}; nothing was changed. Repair the disk, and restart the "
                "service"
            )
            self._cannot_open(unquote(directory.name), Unopened(why, None, may_be_encrypted))
            return
        if known is None:
            why = (
                f"{directory}: both copies of its definition are damaged; stop the service and run "
                "`streambridge repair`"
            )
            self._cannot_open(unquote(directory.name), Unopened(why, None, may_be_encrypted))
            return
        try:
            if bad:
                self._on_event(
                    known.name, f"{', '.join(map(str, bad))}: damaged; rewritten from the other copy"
                )
                meta.save(self.files, directory, known)
            self._check_number()
            self.streams[known.name] = self._start(directory, known)
        except (OSError, OtherFormat, StreamError) as error:
            what = str(error)
            why = (
                what
                if isinstance(error, StorageFailed)
                else f"{directory}: {what}; repair that and restart the service"
            )
            self._cannot_open(known.name, Unopened(why, known.definition, known.settings.encryption))

    def _check_number(self) -> None:
        """Raise StorageFailed if one more stream would use up the open files that others need."""
        if self._most is not None and len(self.streams) >= self._most:
            raise StorageFailed(
                f"{self._most} streams are open, which is three quarters of the limit of open files; raise "
                "that limit (LimitNOFILE= in the systemd unit, else `ulimit -Hn`) and restart the service"
            )

    def _cannot_open(self, name: str, unopened: Unopened) -> None:
        self.unopened[name] = unopened
        self._on_event(name, f"the stream is not opened: {unopened.why}")

    def _start(self, directory: Path, known: Meta) -> Stream:
        data = self._data_of(directory, known.settings)
        if known.settings.encryption and not self.keys.configured:
            raise EncryptionKeyError(
                f"{directory}: stream {known.name!r} is encrypted, and no key is configured; set key_file in "
                "[encryption] to the file with the key. Nothing was changed"
            )
        if self._upgrading and (number := formats.upgrade(self.files, directory, known.salt)):
            log.info(
                "%d segments were brought to this version's format", number, extra={"stream": known.name}
            )
        floor = min(max(self._floor(known.name, known.epoch), known.reserved), MAX_SEQUENCE + 1)
        if known.settings.memory:
            shutil.rmtree(data, ignore_errors=True)
            data.mkdir(mode=0o700)
            known = self._reserve(directory, known, floor)
        return Stream(
            self.files,
            directory,
            data,
            known,
            schedule=self.committer.schedule,
            update_pressure=self.committer.update_pressure,
            delete=self.committer.delete,
            free_space=self.committer.free_space,
            soon=self.runtime.soon,
            on_event=self._on_event,
            clock=self.clock,
            floor=floor,
            keys=self.keys if self.keys.configured else None,
        )

    def _reserve(self, directory: Path, known: Meta, first: int, ahead: int = RESERVE) -> Meta:
        """Reserve the numbers from `first` up to first + ahead for a memory stream, durably."""
        reserved = min(first + ahead, MAX_SEQUENCE + 1)
        fresh = msgspec.structs.replace(known, generation=known.generation + 1, reserved=reserved)
        meta.save(self.files, directory, fresh)
        return fresh

    # -- encryption ------------------------------------------------------------------------------
    @property
    def encrypts(self) -> bool:
        """Return whether any stream is encrypted; then all other files with messages are encrypted too.

        A stream that could not be opened counts, because it may be the only encrypted one.
        """
        if any(stream.settings.encryption for stream in self.streams.values()):
            return True
        return self.keys.configured and any(one.encrypted for one in self.unopened.values())

    def admit(self, settings: StorageSettings) -> None:
        """Raise KeyUnavailable or OSError if a stream with these settings cannot be stored here.

        Earlier builds refuse the directory from the first encrypted stream on, but not after a mere attempt.
        """
        if not settings.encryption:
            return
        if not self.keys.configured:
            raise KeyUnavailable(
                "a stream cannot be encrypted without a key; set key_file in [encryption] of the "
                "configuration, and restart the service"
            )
        try:
            self.keys.own()
        except EncryptionKeyError as error:
            raise KeyUnavailable(str(error)) from None
        if self._format != formats.ENCRYPTED:
            formats.save(self.files, self.data_dir, Format(formats.ENCRYPTED, upgrading=self._upgrading))
            self._format = formats.ENCRYPTED

    def openings(self) -> set[int] | None:
        """Return the numbers of the opening keys that streams need; None if that is unknown for some.

        Raises OSError.
        """
        if self.unopened:
            return None
        found = set[int]()
        for stream in self.streams.values():
            found.update(stream.log.all_openings(), recovery.openings_kept(stream.directory, stream.meta))
        return found

    def settle(self) -> None:
        """Make certain that `openings` holds after a power cut, too. Raises OSError."""
        for stream in self.streams.values():
            stream.log.settle()
        self.files.sync_directory(self._root)

    # -- streams ---------------------------------------------------------------------------------
    def create(self, name: str, settings: StorageSettings, definition: bytes, owner: str = "") -> Stream:
        """Create a stream, durably. The name must be free.

        Raises OSError, StorageFailed or KeyUnavailable.
        """
        self._check_number()
        self.admit(settings)
        directory = self._root / layout.directory_name(name)
        fresh = self._root / f"{CREATING}{directory.name}"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        self._epoch = max(
            self._new_epoch(), self._epoch + 1
        )  # a stream may be deleted and created within a ms
        lasting = not settings.memory
        known = Meta(
            name, self._epoch, secrets.randbits(32), settings, definition, drops=lasting, owner=owner
        )
        if lasting:
            drops.make(self.files, fresh, [])
        meta.save(self.files, fresh, known)
        fresh.rename(directory)
        try:
            self.files.sync_directory(self._root)
            stream = self._start(directory, known)
        except OSError:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self.streams[name] = stream
        return stream

    def _new_epoch(self) -> int:
        """Return Unix time in ms; if the wall clock is not synchronised, a random time in the next 35 years.

        A gateway that is wiped boots into the same second of 1970 again, and an epoch must not be reused.
        """
        return self.clock.wall() + (0 if self.clock.synchronised else secrets.randbits(RANDOM_BITS))

    def delete(self, name: str) -> None:
        """Remove a stream with all its messages. After an OSError, it still exists."""
        stream = self.streams[name]
        gone = self._root / f"{DELETED}{stream.home.name}"
        shutil.rmtree(gone, ignore_errors=True)
        stream.abandon(gone)
        try:
            self.files.sync_directory(self._root)
        except OSError as error:  # it is deleted, but a power cut now might bring it back
            self._on_event(name, f"{self._root}: cannot be synced after the stream was deleted: {error}")
        del self.streams[name]
        self._epoch = max(self._epoch, stream.epoch)  # the clock may have been set back since it was created
        stream.close()
        self.committer.update_pressure(stream)
        if stream.directory != stream.home:
            shutil.rmtree(stream.directory, ignore_errors=True)
        shutil.rmtree(gone, ignore_errors=True)

    async def keep(self, sync_interval: float) -> None:
        """Sync, apply limits and watch the clock every `sync_interval` seconds, until cancelled."""
        known = sum(stream.next_sequence for stream in self.streams.values())
        while True:
            await tick(sync_interval)
            streams = list(self.streams.values())
            async for some in in_slices(streams):
                self.committer.maintain(some)
            streams = [stream for stream in streams if not stream.closed]
            for stream in streams:
                wanted = min(stream.next_sequence + RESERVE // 2, MAX_SEQUENCE + 1)
                if stream.settings.memory and wanted > stream.meta.reserved:
                    try:
                        stream.meta = self._reserve(stream.home, stream.meta, stream.next_sequence)
                    except OSError as error:
                        self._on_event(stream.name, f"{stream.home}: cannot reserve numbers: {error}")
            await self.committer.sync(stream for stream in streams if not stream.settings.memory)
            numbers = sum(stream.next_sequence for stream in streams)
            if self.clock.watch(active=numbers != known or any(stream.is_awaited for stream in streams)):
                known = numbers
                await asyncio.to_thread(self.clock.try_save)

    async def close(self) -> list[str]:
        """Commit pending messages, sync everything, close the files and release the lock.

        Returns the streams of which a power cut may now take committed messages, because syncs fail.
        """
        await self.committer.drain()
        unsynced = list(self.streams.values())
        for _ in range(LAST_SYNCS):
            await self.committer.sync(unsynced)
            unsynced = [stream for stream in unsynced if stream.unsynced()]
        for stream in self.streams.values():
            stream.drops.save()
            if stream.settings.memory:  # after a clean stop, the next number is known exactly
                with contextlib.suppress(OSError):  # otherwise the reserved ones are skipped
                    self._reserve(stream.home, stream.meta, stream.next_sequence, 0)
            stream.close()
        if self.clock.watch(active=True):
            self.clock.try_save()
        self.runtime.close()
        self.keys.close()
        with contextlib.suppress(OSError):  # not empty
            self._memory.rmdir()
        self._unlock()
        return [stream.name for stream in unsynced]


async def in_slices(streams: Sequence[Stream]) -> AsyncIterator[Sequence[Stream]]:
    """Yield slices of the streams, and let clients be served in between; streams may be closed meanwhile."""
    for start in range(0, len(streams), SLICE):
        if start:
            await asyncio.sleep(0)
        yield streams[start : start + SLICE]


@contextlib.asynccontextmanager
async def open_stopped(
    data_dir: Path,
    *,
    on_event: Event,
    floor: Callable[[str, int], int] = lambda name, epoch: 0,
    keys: Keys | None = None,
) -> AsyncIterator[StreamStore]:
    """Open the streams of a stopped service, for a command. Raises as `StreamStore`.

    Memory streams are where the service had them, if that directory still exists; systemd deletes its part of
    /run at a stop. Otherwise, or if a service has them, since this is a copy of its data directory, they are
    in a temporary directory, and the link is not changed.
    """
    link = data_dir / MEMORY
    with tempfile.TemporaryDirectory(prefix="streambridge-") as temporary:
        there = link.readlink() if link.is_symlink() else link
        exists = is_directory(link)
        memory = there if exists and not is_held(there) else Path(temporary)
        store = StreamStore(data_dir, memory, on_event=on_event, floor=floor, link=False, keys=keys)
        try:
            yield store
        finally:
            for name in await store.close():
                on_event(name, "it could not be synced; a power cut now may lose its newest messages")
