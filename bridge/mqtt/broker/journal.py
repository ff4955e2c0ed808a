"""The durable half of sessions and retained messages: `<data_dir>/mqtt/sessions.journal`.

What it promises: what `after_commit` has confirmed survives the end of this process at any instant; a
power cut loses at most the last second (the file is synced once a second, in a thread). So after one it
is not known which QoS 2 ids are still in use, and none is taken to be: stored twice is better than never.
What it keeps:
persistent sessions with their subscriptions, QoS 1 and 2 messages of ordinary topics until each
persistent subscriber has acknowledged them, QoS 2 ids between PUBLISH and PUBREL, wills of persistent
sessions that may still have to be published, retained messages.
Messages on stream topics are not here: the stream has them.

Layout: frames, one after the other. A frame whose CRC is wrong ends the journal (a torn tail).

    +--------------+-------------+---------------------------------------------------+
    | length u32 BE| CRC-32 u32  | msgpack array [kind, ...], see `records.py`       |
    +--------------+-------------+---------------------------------------------------+

The file is replaced by a snapshot of what is alive when it has grown to several times that size, and at
each start. While a thread brings a snapshot to the disk, records are written to it and to the file. After a
failed write nothing is confirmed until a snapshot has been written.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bridge.deflate import crc32
from bridge.durable import make_directory, sync_directory
from bridge.errors import StorageFailed, StreamError
from bridge.mqtt.broker.marks import Mark
from bridge.mqtt.broker.records import (
    Any_,
    Booted,
    Ended,
    Held,
    Marked,
    Received,
    Record,
    Released,
    Settled,
    Subscribed,
    Unsubscribed,
    opened_record,
    queued_record,
    retained_record,
    will_record,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from bridge.mqtt.broker.message import Message, Subscription
    from bridge.mqtt.broker.outbox import Outgoing
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.broker.store import Stream

log = logging.getLogger(__name__)

_FRAME = struct.Struct(">II")
SLACK = 4 * 1024 * 1024  # bytes of dead records that do not yet make a snapshot worth while
SYNC_INTERVAL = 1.0
RETRY_INTERVAL = 1.0
UNKNOWN = "unknown"  # stands for the boot where its name cannot be read


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any_] = msgspec.msgpack.Decoder(Any_)


class _Copy:
    """A snapshot beside the journal, which is to take its place; what comes meanwhile is written to both."""

    def __init__(self, journal: Path, data: bytes) -> None:
        """Raises OSError."""
        self.path = journal.with_suffix(".new")
        self.path.unlink(missing_ok=True)  # a thread may still be writing to one that was dropped
        self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.size = self.least = len(data)

    def append(self, data: bytes) -> None:
        _write_all(self.fd, data, self.size)
        self.size += len(data)

    def drop(self) -> None:
        os.close(self.fd)
        self.path.unlink(missing_ok=True)  # it takes room


class Journal:
    """The journal of one front end."""

    def __init__(self, path: Path, boot: str) -> None:
        """`boot` names this boot of the machine; empty if that is not known."""
        self._path, self._boot = path, boot
        self.marks: dict[str, Mark] = {}
        self.snapshot: Callable[[], Iterable[Record]] = tuple
        self._fd = -1
        self._size = self._least = 0  # bytes in the file now, and right after the last snapshot
        self._buffer: list[bytes] = []
        self._waiting: list[Callable[[StreamError | None], None]] = []
        self._numbers = 0
        self._failed = self._unsynced = False
        self._write_handle: asyncio.Handle | None = None
        self._syncer: asyncio.Task[None] | None = None
        self._copy: _Copy | None = None
        self._copier: asyncio.Task[None] | None = None

    # -- records ------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """A session is persistent from now on, or has been left."""
        self._add(opened_record(session))

    def ended(self, session: Session) -> None:
        """A persistent session is over."""
        self._add(Ended(session.client_id))

    def subscribed(self, session: Session, subscription: Subscription) -> None:
        """A persistent session has a subscription."""
        self._add(Subscribed(session.client_id, subscription))

    def unsubscribed(self, session: Session, topic_filter: str) -> None:
        """A persistent session has lost a subscription."""
        self._add(Unsubscribed(session.client_id, topic_filter))

    def queued(self, message: Message, homes: list[Session], copies: list[Outgoing]) -> None:
        """A message waits for some persistent sessions; numbers its copies."""
        self._numbers += 1
        for copy in copies:
            copy.number = self._numbers
        self._add(queued_record(message, self._numbers, zip(homes, copies, strict=True)))

    def settled(self, session: Session, out: Outgoing) -> None:
        """A session has acknowledged a queued message, or it was dropped."""
        self._add(Settled(session.client_id, out.number))

    def willed(self, session: Session) -> None:
        """A persistent session has another will, or none any more."""
        self._add(will_record(session))

    def retained(self, message: Message) -> None:
        """A topic has a new retained message."""
        self._add(retained_record(message))

    def received(self, session: Session, packet_id: int) -> None:
        """A persistent session uses a QoS 2 packet id."""
        self._add(Received(session.client_id, packet_id))

    def held(self, session: Session, packet_id: int) -> None:
        """Only some streams have the message of a QoS 2 id."""
        self._add(Held(session.client_id, packet_id, sorted(session.partial[packet_id])))

    def mark(self, stream: Stream) -> None:
        """From here on QoS 2 ids are looked for in a stream at the next start."""
        self.marks[stream.name] = Mark(stream.next_sequence)
        self._add(Marked(stream.name, stream.next_sequence))

    def settled_in(self, places: Iterable[tuple[Stream, int]], owner: object) -> None:
        """The journal has the ids of the QoS 2 messages that streams hold under these numbers."""
        numbers: dict[Stream, list[int]] = {}
        for stream, number in places:
            numbers.setdefault(stream, []).append(number)
        for stream, some in numbers.items():
            mark = self.marks[stream.name]
            above = mark.settle(some, owner, stream.next_sequence)
            self._add(Marked(stream.name, mark.upto, above))

    def failed(
        self, places: Iterable[Mapping[Stream, int]], failed: AbstractSet[object], owner: object
    ) -> None:
        """What became of messages of which some stream has failed, or the only one if none is named."""
        known = [(at, n) for one in places for at, n in one.items() if at.name in self.marks]
        self.settled_in((pair for pair in known if failed and pair[0] not in failed), owner)
        for stream, number in known:
            self.marks[stream.name].forget(number, owner)

    def released(self, session: Session, packet_id: int) -> None:
        """A persistent session has released a QoS 2 packet id."""
        self._add(Released(session.client_id, packet_id))

    def resume_numbers(self, number: int) -> None:
        """Number the next message above those of an earlier life."""
        self._numbers = max(self._numbers, number)

    # -- the file ------------------------------------------------------------

    def read(self) -> list[Any_]:
        """The records of an earlier life; call it before `open`."""
        if not self._path.exists():
            return []
        data = self._path.read_bytes()
        records: list[Any_] = []
        pos = 0
        while pos + _FRAME.size <= len(data):
            length, check = _FRAME.unpack_from(data, pos)
            body = data[pos + _FRAME.size : pos + _FRAME.size + length]
            if len(body) < length or crc32(body) != check:
                break
            try:
                records.append(_decoder.decode(body))
            except msgspec.MsgspecError:
                break
            pos += _FRAME.size + length
        if pos < len(data):
            log.warning("%s: %d bytes at the end are damaged and were left out", self._path, len(data) - pos)
        return records

    def open(self) -> None:
        """Begin to write, with a snapshot; raises OSError if the file cannot be written.

        A full disk is waited for, as later on: who keeps exports from starting keeps it full.
        """
        loop = asyncio.get_running_loop()
        try:
            make_directory(self._path.parent)
            self._write_snapshot()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._cannot_write(error)
            self._write_handle = loop.call_later(RETRY_INTERVAL, self._write)
        self._syncer = loop.create_task(self._sync_for_ever())

    def after_commit(self, done: Callable[[StreamError | None], None]) -> None:
        """Call `done` once all records so far are in the file."""
        if self._buffer or self._failed:
            self._waiting.append(done)
        else:
            done(None)

    async def close(self) -> None:
        """Write and sync everything, and close the file."""
        if self._syncer is None:
            return
        tasks = [task for task in (self._syncer, self._copier) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._drop_copy()
        self._add(Booted(""))
        self._syncer = None
        if self._write_handle is not None:
            self._write_handle.cancel()
        self._write()
        if self._write_handle is not None:
            self._write_handle.cancel()
        if self._fd < 0:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            log.error(
                "%s: %s; sessions may be older than they should be after a power cut", self._path, error
            )
        os.close(self._fd)
        self._fd = -1

    def _add(self, record: Record) -> None:
        if self._syncer is None:
            return
        self._buffer += _framed(record)
        if self._write_handle is None:
            self._write_handle = asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        """Write what has gathered in this turn of the event loop."""
        self._write_handle = None
        error: StreamError | None = None
        try:
            if self._failed:
                self._write_snapshot()
            elif self._buffer:
                self._append(b"".join(self._buffer))
            self._failed = False
        except OSError as problem:
            self._cannot_write(problem)
            error = StorageFailed(f"{self._path}: {problem}")
            self._write_handle = asyncio.get_running_loop().call_later(RETRY_INTERVAL, self._write)
        self._buffer = []
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done(error)

    def _append(self, data: bytes) -> None:
        _write_all(self._fd, data, self._size)
        self._size += len(data)
        self._unsynced = True
        if self._copy is not None:
            self._copy.append(data)
        elif self._size > 4 * self._least + SLACK and self._copier is None and self._syncer is not None:
            frames = self._snapshot_frames()
            self._copy = _Copy(self._path, frames)
            self._copier = asyncio.get_running_loop().create_task(self._replace(self._copy, frames))

    def _cannot_write(self, problem: OSError) -> None:
        self._drop_copy()  # it may lack what was to be written
        if not self._failed:
            log.error(
                "%s: %s; persistent sessions are not acknowledged until it can be written",
                self._path,
                problem,
            )
        self._failed = True

    def _write_snapshot(self) -> None:
        self._drop_copy()
        data = self._snapshot_frames()
        copy = _Copy(self._path, data)
        try:
            _fill(os.dup(copy.fd), data)
            self._install(copy)
        except OSError:
            copy.drop()
            raise
        sync_directory(self._path.parent)

    def _snapshot_frames(self) -> bytes:
        frames: list[bytes] = []
        for record in (Booted(self._boot or UNKNOWN), *self.snapshot()):
            frames += _framed(record)
        return b"".join(frames)

    async def _replace(self, copy: _Copy, data: bytes) -> None:
        """Put a snapshot in the file's place. It may be large, and a thread waits for the disk."""
        try:
            for part in (data, b""):  # the second time for what has come meanwhile
                if self._copy is copy:
                    await asyncio.to_thread(_fill, os.dup(copy.fd), part)
            if self._copy is not copy:
                return  # a write has failed
            self._install(copy)
            self._copy, self._unsynced = None, True
            await asyncio.to_thread(sync_directory, self._path.parent)
        except OSError as error:
            self._write_again(error)
        finally:
            self._drop_copy()
            self._copier = None

    def _install(self, copy: _Copy) -> None:
        copy.path.replace(self._path)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size, self._least, self._unsynced = copy.fd, copy.size, copy.least, False

    def _drop_copy(self) -> None:
        if self._copy is not None:
            self._copy.drop()
            self._copy = None

    def _write_again(self, error: OSError) -> None:
        log.error("%s: %s; it will be written again", self._path, error)
        self._failed = True
        if self._write_handle is None:
            self._write_handle = asyncio.get_running_loop().call_soon(self._write)

    async def _sync_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SYNC_INTERVAL)
            if not self._unsynced:
                continue
            self._unsynced = False
            fd = os.dup(self._fd)  # a snapshot may replace the file meanwhile
            try:
                await asyncio.to_thread(os.fdatasync, fd)
            except OSError as error:
                self._write_again(error)
            finally:
                os.close(fd)


def survived(records: Iterable[Record], boot: str) -> bool:
    """Whether nothing is missing at the end: after a clean stop, and while the machine runs on.

    Where the boot has no name, a start that no clean stop came before counts as one after a power cut.
    """
    boots = [record.boot for record in records if isinstance(record, Booted)]
    return bool(boots) and boots[-1] in ("", boot or None)


def _framed(record: Record) -> tuple[bytes, bytes]:
    body = _encoder.encode(record)
    return _FRAME.pack(len(body), crc32(body)), body


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _fill(fd: int, data: bytes) -> None:
    """Begin a file with these bytes and wait for the disk; closes `fd`, which whoever waits may not do."""
    try:
        _write_all(fd, data, 0)
        os.fdatasync(fd)
    finally:
        os.close(fd)
