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
    | length u32 BE| CRC-32 u32  | msgpack array [kind, ...], a `Record` below       |
    +--------------+-------------+---------------------------------------------------+

The file is replaced by a snapshot of what is alive when it has grown to several times that size, and at
each start. After a failed write nothing is confirmed until a snapshot has been written.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bridge.deflate import crc32
from bridge.errors import StorageFailed, StreamError
from bridge.mqtt.marks import Mark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from bridge.mqtt.message import Message, Subscription
    from bridge.mqtt.outbox import Outgoing
    from bridge.mqtt.sessions import Session
    from bridge.mqtt.store import Stream

log = logging.getLogger(__name__)

_FRAME = struct.Struct(">II")
SLACK = 4 * 1024 * 1024  # bytes of dead records that do not yet make a snapshot worth while
SYNC_INTERVAL = 1.0
RETRY_INTERVAL = 1.0


class Record(msgspec.Struct, array_like=True, frozen=True):
    """The base of all records."""


class Opened(Record, frozen=True, tag=1):
    """A persistent session exists; `left` is the Unix time since when its client is away, 0 if it is not."""

    client: str
    user: str | None
    expiry: int
    left: float


class Ended(Record, frozen=True, tag=2):
    """A session is over."""

    client: str


class Subscribed(Record, frozen=True, tag=3):
    """A session has a subscription: the fields of `message.Subscription`."""

    client: str
    subscription: tuple[str, int, bool, bool, int, int]


class Unsubscribed(Record, frozen=True, tag=4):
    """A session no longer has a subscription."""

    client: str
    filter: str


class Queued(Record, frozen=True, tag=5):
    """A message waits for the sessions in `homes`: client, QoS, retain flag, subscription identifiers."""

    number: int
    topic: bytes
    payload: bytes
    qos: int
    properties: dict[int, Any]
    expires: float | None
    homes: list[tuple[str, int, bool, tuple[int, ...]]]


class Settled(Record, frozen=True, tag=6):
    """A session no longer needs a queued message."""

    client: str
    number: int


class Retained(Record, frozen=True, tag=7):
    """The retained message of a topic; an empty payload: there is none."""

    topic: bytes
    payload: bytes
    qos: int
    properties: dict[int, Any]
    expires: float | None


class Received(Record, frozen=True, tag=8):
    """A QoS 2 packet id is in use by its client."""

    client: str
    id: int


class Released(Record, frozen=True, tag=9):
    """A QoS 2 packet id is free again."""

    client: str
    id: int


class Marked(Record, frozen=True, tag=10):
    """Of a stream's QoS 2 messages below number `upto`, and of these, the journal has what it needs."""

    stream: str
    upto: int
    known: list[int] = []


class Held(Record, frozen=True, tag=11):
    """Some streams have the message of a QoS 2 id, and others of its streams have failed to store it."""

    client: str
    id: int
    streams: list[str]


class Booted(Record, frozen=True, tag=12):
    """The records are sure to be all there while the machine runs on; empty: in any case, up to here."""

    boot: str


class Willed(Record, frozen=True, tag=13):
    """What is to be published when a session's client is gone: `packets.Will`; without a topic: nothing."""

    client: str
    topic: str = ""
    payload: bytes = b""
    qos: int = 0
    retain: bool = False
    properties: dict[int, Any] = {}


Any_ = (
    Opened
    | Ended
    | Subscribed
    | Unsubscribed
    | Queued
    | Settled
    | Retained
    | Received
    | Released
    | Marked
    | Held
    | Booted
    | Willed
)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any_] = msgspec.msgpack.Decoder(Any_)


class Journal:
    """The journal of one front end."""

    def __init__(self, path: Path) -> None:
        self._path = path
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

    # -- records ------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """A session is persistent from now on, or has been left."""
        self._add(Opened(session.client_id, session.identity.user, session.expiry, session.left))

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
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        self._syncer.cancel()
        await asyncio.gather(self._syncer, return_exceptions=True)
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
        body = _encoder.encode(record)
        self._buffer += (_FRAME.pack(len(body), crc32(body)), body)
        if self._write_handle is None:
            self._write_handle = asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        """Write what has gathered in this turn of the event loop."""
        self._write_handle = None
        error: StreamError | None = None
        try:
            if self._failed or self._size > 4 * self._least + SLACK:
                self._write_snapshot()
            elif self._buffer:
                _write_all(self._fd, b"".join(self._buffer))
                self._size += sum(map(len, self._buffer))
                self._unsynced = True
            self._failed = False
        except OSError as problem:
            self._cannot_write(problem)
            error = StorageFailed(f"{self._path}: {problem}")
            self._write_handle = asyncio.get_running_loop().call_later(RETRY_INTERVAL, self._write)
        self._buffer = []
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done(error)

    def _cannot_write(self, problem: OSError) -> None:
        if not self._failed:
            log.error(
                "%s: %s; persistent sessions are not acknowledged until it can be written",
                self._path,
                problem,
            )
        self._failed = True

    def _write_snapshot(self) -> None:
        frames: list[bytes] = []
        for record in (Booted(_boot_id()), *self.snapshot()):
            body = _encoder.encode(record)
            frames += (_FRAME.pack(len(body), crc32(body)), body)
        data = b"".join(frames)
        new = self._path.with_suffix(".new")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, data)
            os.fdatasync(fd)
            new.replace(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError:
            os.close(fd)
            new.unlink(missing_ok=True)  # it takes room
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size, self._least, self._unsynced = fd, len(data), len(data), False

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
                log.error("%s: %s; it will be written again", self._path, error)
                self._failed = True
                if self._write_handle is None:
                    self._write_handle = asyncio.get_running_loop().call_soon(self._write)
            finally:
                os.close(fd)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def survived(records: Iterable[Record]) -> bool:
    """Whether nothing is missing at the end: after a clean stop, and while the machine runs on."""
    boots = [record.boot for record in records if isinstance(record, Booted)]
    return bool(boots) and boots[-1] in ("", _boot_id())


def queued_record(message: Message, number: int, copies: Iterable[tuple[Session, Outgoing]]) -> Queued:
    """The record of a message that waits for sessions."""
    homes = [(session.client_id, out.qos, out.retain, out.identifiers) for session, out in copies]
    return Queued(
        number, message.topic, message.payload, message.qos, message.properties, message.expires, homes
    )


def will_record(session: Session) -> Willed:
    """The record of a session's will."""
    return Willed(session.client_id, *session.will) if session.will is not None else Willed(session.client_id)


def retained_record(message: Message) -> Retained:
    """The record of a retained message."""
    return Retained(message.topic, message.payload, message.qos, message.properties, message.expires)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
