"""The file of a consumer's position. A change is written before the reply that depends on it.

    <data_dir>/consumers/<stream>/<identifier>.consumer      named by `streams.layout`

A file has two halves of the same size, written in turn; the valid half with the higher generation counts. A
half begins with the complete position, and each change is appended. When a half is full, the complete
position is written to the other one. So a torn write loses nothing that a reply has reported. Once it exists,
a file needs no more space, which matters because on a full disk it is consumers and exports that free space.
(A file system that never writes in place, such as btrfs, can still fail.)

    half   = head, record, record, ...     (then zeros, or remains of an earlier generation)
    head   = magic "SBCONS\\0\\1" | generation u64 | crc32 u32                                       20 bytes
    record = length u32 | crc32 u32 | msgpack body (`length` bytes)

Numbers are big-endian. The CRC of a record starts from that of its half's head, and covers length and body.
The first body is [[epoch, start, start time, begun], change], the others are changes: [at, frontier, [[first,
last], ...] settled, [[number, until, deliveries, size], ...] leases, [messages, size, rejected, skipped, last
time] counts]. `at` and `until` are in ms on the age timeline (`bridge.clock`), sizes in bytes. `begun` is
that of `streams.meta`; versions that do not know it leave it out.

The first record that fails its check ends a half: its write was not finished. If no half is valid, the
consumer starts again at its start sequence number: messages are delivered again, and none is lost.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import msgspec
from msgspec import Struct

from bridge.consumers.position import Change
from bridge.decoded import END, FromMinusOne, Natural, decoded
from bridge.deflate import crc32
from bridge.errors import CorruptData
from bridge.streams.layout import Files, directory_name

ENDING = ".consumer"
BLOCK = 4096
PER_HOLE = 48  # the most bytes of a lease and a range
_MAGIC = b"SBCONS\0\1"
_HEAD = struct.Struct(">8sQ")
_CRC = struct.Struct(">I")
_RECORD = struct.Struct(">II")
_START = _HEAD.size + _CRC.size


class Identity(Struct, array_like=True, frozen=True):
    """Identifies the owner of a position. If any field differs, the position is discarded.

    `begun` is the number of the consumer in `streams.meta`, -1 in a file of a version that does not know it.
    """

    epoch: Natural
    start: Natural = 0
    start_time: str = ""
    begun: FromMinusOne = -1

    def begins_as(self, other: Identity) -> bool:
        """As `export.cursor.Cursor.begins_as`, and of the same stream."""
        if self.begun < 0 or not other.begun:
            other = msgspec.structs.replace(other, begun=self.begun)
        return self == other


_first = msgspec.msgpack.Decoder(tuple[Identity, Change])
_change = msgspec.msgpack.Decoder(Change)


class Loaded(Struct):
    """The content of a file."""

    identity: Identity
    changes: list[Change]
    generation: int
    half: int  # bytes
    number: int  # 0 or 1: the half that counts


def directory_of(data_dir: Path, stream: str) -> Path:
    """The directory of the consumers of a stream."""
    return data_dir / "consumers" / directory_name(stream)


def path_of(data_dir: Path, stream: str, identifier: str) -> Path:
    """The file of a consumer."""
    return directory_of(data_dir, stream) / f"{directory_name(identifier)}{ENDING}"


def half_for(leases: int) -> int:
    """Return the size of a half for a number of leases: three times the largest complete position."""
    return (-(-3 * (leases + 1) * PER_HOLE // BLOCK) + 1) * BLOCK


def load(path: Path) -> Loaded | None:
    """Read a file; None if there is none. Raises CorruptData without a valid half, or OSError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    half = len(data) // 2
    found = [one for number in (0, 1) if (one := _half(data[number * half :][:half], half, number))]
    if not found:
        raise CorruptData(f"{path}: it has no valid position")
    return max(found, key=lambda one: one.generation)


def _half(data: bytes, half: int, number: int) -> Loaded | None:
    if len(data) < _START or data[: len(_MAGIC)] != _MAGIC:
        return None
    seed = crc32(data[: _HEAD.size])
    if _CRC.unpack_from(data, _HEAD.size)[0] != seed:
        return None
    bodies, at = list[bytes](), _START
    while at + _RECORD.size <= len(data):
        length, crc = _RECORD.unpack_from(data, at)
        body = data[at + _RECORD.size : at + _RECORD.size + length]
        if not length or len(body) < length or crc != crc32(body, crc32(data[at : at + 4], seed)):
            break
        bodies.append(body)
        at += _RECORD.size + length
    if not bodies:
        return None
    try:
        identity, whole = decoded(bodies[0], _first)
        changes = [decoded(body, _change) for body in bodies[1:]]
    except CorruptData:
        return None
    for one in (whole, *changes):
        if max(one.frontier, one.counts.skipped) > END or any(last < first for first, last in one.settled):
            return None
    return Loaded(identity, [whole, *changes], _HEAD.unpack_from(data)[1], half, number)


class Journal:
    """The file, open for writing. Its methods block. Only one thread at a time may use it."""

    def __init__(self, files: Files, path: Path, identity: Identity, loaded: Loaded | None) -> None:
        """`loaded` is the content of the file; without it, the first `write_whole` creates the file."""
        self._files, self._path, self.identity = files, path, identity
        self._generation = loaded.generation if loaded is not None else 0
        self._half = loaded.half if loaded is not None else 0
        self._number = loaded.number if loaded is not None else 0
        self._end = self._half  # of the written part; nothing is appended to what another process wrote
        self._fd: int | None = None
        self._seed = 0

    def fits(self, change: Change) -> bool:
        """Return whether a change fits, by a rough estimate."""
        size = _RECORD.size + 128 + PER_HOLE * (len(change.settled) + len(change.leases))
        return self._fd is not None and self._end + size <= self._half

    def append(self, change: Change) -> None:
        """Append a change that fits, durably. After an OSError, `write_whole` must be called next."""
        assert self._fd is not None
        record = _record(msgspec.msgpack.encode(change), self._seed)
        self._files.write(self._fd, [record], self._number * self._half + self._end)
        self._files.sync(self._fd)
        self._end += len(record)

    def write_whole(self, whole: Change, leases: int) -> None:
        """Write the complete position to the other half, durably. Raises OSError.

        The file is created or enlarged if `leases` do not fit.
        """
        generation = self._generation + 1
        head = _HEAD.pack(_MAGIC, generation)
        seed = crc32(head)
        data = head + _CRC.pack(seed) + _record(msgspec.msgpack.encode((self.identity, whole)), seed)
        wanted = max(half_for(leases), -(-2 * len(data) // BLOCK) * BLOCK)
        if self._half < wanted:
            self._files.make_directory(self._path.parent)
            self._files.replace(self._path, data.ljust(2 * wanted, b"\0"))
            self.close()
            self._fd, self._half, self._number = self._files.open(self._path, os.O_RDWR), wanted, 0
        else:
            if self._fd is None:
                self._fd = self._files.open(self._path, os.O_RDWR)
                self._files.sync(self._fd)  # a killed process may not have synced the half that counts
            self._files.write(self._fd, [data], (1 - self._number) * self._half)
            self._files.sync(self._fd)
            self._number = 1 - self._number
        self._generation, self._seed, self._end = generation, seed, len(data)

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _record(body: bytes, seed: int) -> bytes:
    length = len(body).to_bytes(4, "big")
    return length + _CRC.pack(crc32(body, crc32(length, seed))) + body


def highest_delivered(data_dir: Path, name: str, epoch: int) -> int:
    """Return the highest number that any consumer of a stream may have delivered; -1 if none.

    Numbering continues after it if a power cut took unsynced messages of the stream.
    """
    highest = -1
    for path in directory_of(data_dir, name).glob(f"*{ENDING}"):
        try:
            loaded = load(path)
        except (CorruptData, OSError):
            continue
        if loaded is not None and loaded.identity.epoch == epoch:
            highest = max(highest, loaded.changes[-1].frontier - 1)
    return highest
