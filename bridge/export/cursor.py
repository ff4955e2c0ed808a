"""The position of an export, on disk. A cursor may lag behind what was exported; it never leads.

    <data_dir>/exports/lock                                         the worker holds it (flock)
    <data_dir>/exports/<stream>/<identifier>.cursor                 named by `streams.layout`
    <data_dir>/exports/<stream>/<identifier>.skipped                ranges not exported, with reasons;
                                                                    only for `contiguous` exporters

A cursor file has two slots of 4096 bytes; the valid slot with the higher generation counts. A write goes into
the slot that does not have the newest synced cursor. So a torn write costs only one step, and a write needs
no rename and no directory sync. A write without a sync survives the end of the process. Until the next sync,
further writes go into the same slot, each with a generation that is higher by two, and a power cut leaves the
other slot. Both slots are written when an export begins, so later writes are in place and need no space. This
matters because a batch is sent only after its boundaries are written here, and on a full disk it is exports
that free space. (A file system that never writes in place, such as btrfs, can still fail; then exports wait.)

    slot = magic "SBCURSR1" | generation u64 | length u32 | crc32 u32 (of the head and the body) | body

Numbers are big-endian. `body` is msgpack of `Cursor`. If both slots fail their check, the export starts again
at its start sequence number: messages are sent again, and none is lost.

If the export has rules or transforms with a state (`bridge.plugin.transform`), two areas of 65,536 bytes
follow, one for each slot. `transform` in `body` is then `length u32 | crc32 u32` of the content of the slot's
area, and a slot whose area does not match is invalid. Area and slot are written together, with one sync.

In a cursor of an encrypted stream, `sealed` is true. `state` and the areas are then sealed
(`bridge.encryption`) with the context "cursor\\0", the names of the stream's directory and of the file, each
followed by "\\0", and the epoch u64 (little-endian). The first and the last 16 bytes of a sealed area follow
its check in `transform`; the rest is the area.

With `order = "newest first"` (`order`), `body` also has `ahead`, the exported ranges above `position`, and
for a batch that does not begin at `position` it has `planned_ahead` instead of `planned`. Without such ranges
it has neither key. A version that does not know these keys continues from `position`, and exports the ranges
again.

`start` and `begun` say with which start the export began. If `begun` in the definition (`streams.meta`) is
another number, an update has moved the start, even if it is the same number again, and the export starts
over. Versions that do not know `begun` compare `start` only. What they have written has no `begun`; then only
`start` counts here too.

If writes may be without a sync (`position`), `body` has `reserved`, a number above which nothing is sent
before the next sync, and `boot`, the boot id. The numbers of a stream continue after `reached`; after another
boot, after `reserved`.

A line of `.skipped` is `first last reason crc32`. It is appended and synced before the cursor passes the
range. A process that appends for the first time also rewrites and syncs the lines that it has found. A line
that fails its check ends the file. A file that has grown is replaced by its compact form, which keeps the
newest `KEPT_RANGES` ranges and joins older adjacent ones into a range with the reason `joined:<count>`.
`count` numbers of such a range were skipped; the others were exported. Losses are never joined, nor are
ranges with pending numbers between them. `bridge.plugin.reports` describes how readers interpret the ranges.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import struct
import time
from bisect import bisect_left
from collections.abc import Sequence
from errno import EACCES
from operator import itemgetter
from pathlib import Path

import msgspec
from msgspec import UNSET, Struct, UnsetType

from bridge import clock
from bridge.decoded import END, FromMinusOne, Natural, Next, decoded
from bridge.deflate import crc32
from bridge.encryption import Keys, opening_of
from bridge.errors import CorruptData, EncryptionKeyError
from bridge.model import ExportStatus
from bridge.objectkeys import JOINED, LOSSES
from bridge.plugin.api import ExportConfig
from bridge.plugin.transform import MAX_STATE as AREA
from bridge.ranges import Pair, Ranges
from bridge.streams.drops import DropLog, Passed
from bridge.streams.layout import Files, directory_name

SLOT = 4096
MAX_STATE = 2000
KEPT_RANGES = 1000
MAX_AHEAD = 56
_MAGIC = b"SBCURSR1"
_HEAD = struct.Struct(">8sQI")
_SEAL = struct.Struct(">II")  # length and CRC of an area
_AROUND = 16  # bytes at each end of a sealed area that are stored in the slot


class Cursor(Struct, kw_only=True):
    """One export's position and counters. `position` is the first number that is not exported.

    `ahead` has the exported ranges above it: ascending, not adjacent, at most `MAX_AHEAD`. `planned`, or
    `planned_ahead`, is the batch whose boundaries are fixed and that is not settled yet.
    `start` is the configured start sequence number from which the export began. `begun` is its number in
    `streams.meta`, which also tells a start that was moved and moved back from one that stayed. `reached` is
    the highest number that may have been sent or was passed, -1 if none. It never decreases, and a start
    beyond the newest message does not count. In a boot other than `boot`, use `reserved` instead, because a
    later `reached` may be lost. `transform` is the state of the transforms at `position`. `skipped` counts
    the numbers that the position has passed without exporting or rejecting a message; `dropped` has those
    that were dropped. `stopped` is the `fingerprint` of the configuration with which the exporter raised
    `Stopped`; empty while the export may run. `limit` is that of `sizing`, 0 for none. `error_since` is
    when the export began to report errors, Unix time in ms.
    """

    epoch: Natural
    kind: str
    start: Natural = 0
    position: Next = 0
    planned: tuple[Natural, Natural] | None = None
    messages: Natural = 0
    size: Natural = 0
    rejected: Natural = 0
    skipped: Next = 0
    last_time: Natural = 0
    error: str | None = None
    state: bytes = b""
    transform: bytes = b""
    reached: FromMinusOne = -1
    stopped: bytes = b""
    limit: Natural = 0
    error_since: Natural = 0
    ahead: list[tuple[Natural, Natural]] | UnsetType = UNSET
    planned_ahead: tuple[Natural, Natural] | UnsetType = UNSET
    sealed: bool | UnsetType = UNSET  # only in the file
    reserved: FromMinusOne | UnsetType = UNSET
    boot: str | UnsetType = UNSET
    begun: FromMinusOne | UnsetType = UNSET  # written by versions that know it
    dropped: Passed | UnsetType = UNSET

    def begins_as(self, other: Cursor) -> bool:
        """Return whether no update has moved the start since. `other` is a new cursor.

        If an older version has written this cursor, or the definition, only the start is known.
        """
        if self.begun is UNSET or not other.begun:
            return self.start == other.start
        return (self.start, self.begun) == (other.start, other.begun)

    def makes_sense(self) -> bool:
        """Return whether its ranges are ascending; a file may hold anything."""
        pairs = self.ranges if self.batch is None else [*self.ranges, self.batch]
        lasts = [-1, *(last for _, last in self.ranges)]
        ascending = all(first > last for (first, _), last in zip(self.ranges, lasts, strict=False))
        ordered = ascending and all(first <= last for first, last in pairs)
        return ordered and max(self.position, self.skipped) <= END

    def sent(self, boot: str) -> int:
        """Return the highest number that may have been sent, as known in this boot; -1 if none."""
        if self.reserved is UNSET or (boot and boot == self.boot):
            return self.reached
        return max(self.reached, self.reserved)

    def fail(self, error: str | None) -> None:
        """Set the error and the time since when there is one; None clears both."""
        if error is None:
            self.error_since = 0
        elif self.error is None or not self.error_since:
            self.error_since = time.time_ns() // 1_000_000
        self.error = error

    @property
    def batch(self) -> Pair | None:
        """Return the boundaries of the planned batch, which is not settled yet."""
        return self.planned if self.planned_ahead is UNSET else self.planned_ahead

    @property
    def ranges(self) -> list[Pair]:
        """`ahead`; empty if there are none."""
        return [] if self.ahead is UNSET else self.ahead

    @property
    def passed(self) -> Passed:
        """Return `dropped`; empty if nothing was."""
        return Passed() if self.dropped is UNSET else self.dropped

    @property
    def front(self) -> int:
        """Return the number after the highest exported one."""
        return self.position if self.ahead is UNSET else self.ahead[-1][1] + 1

    def pending(self, end: int) -> list[Pair]:
        """Return the ranges below `end` that are not exported."""
        return Ranges(self.ranges).missing(self.position, end - 1)

    def plan(self, first: int, last: int) -> None:
        """Fix the boundaries of the next batch. It may be sent once they are written."""
        if first == self.position:
            self.planned = first, last
        else:
            self.planned_ahead = first, last
        self.reached = max(self.reached, last)

    def unplan(self) -> None:
        """Remove the planned batch: it is settled, or must be planned again."""
        self.planned, self.planned_ahead = None, UNSET

    def settle(self, first: int, last: int) -> None:
        """Mark pending numbers first..last as settled: exported, or never to be exported."""
        if last < first:
            return
        if self.ahead is not UNSET or first > self.position:
            ranges = list(Ranges([*self.ranges, (first, last)]))
            last = ranges.pop(0)[1] if ranges[0][0] == self.position else self.position - 1
            self.ahead = ranges or UNSET
        self.position = last + 1

    def status(self, identifier: str, drops: DropLog | None = None, oldest: int = 0) -> ExportStatus:
        """Return the status for descriptions of the stream.

        With the stream's `drops` and its oldest number, dropped messages that it has still to pass count as
        lost too, except those of the planned batch: an attempt may be under way, and arrive.
        """
        passed, planned = self.passed, self.batch
        if drops is not None and oldest > self.position:
            known = Ranges([*self.ranges, *([] if planned is None else [planned])])
            for first, last in known.missing(self.position, oldest - 1):
                passed = passed.add(drops.within(first, last))
        return ExportStatus(
            export_config_identifier=identifier,
            last_exported_sequence_number=self.passed.sent_below(self.position),
            passed_sequence_number=self.position - 1,
            last_export_time=self.last_time,
            error_message=self.error,
            exported_bytes_from_stream=self.size,
            exported_messages_count=self.messages,
            rejected_messages_count=self.rejected,
            skipped_messages_count=self.skipped,
            stopped=bool(self.stopped),
            error_since=self.error_since if self.error is not None else 0,
            exported_ahead=self.ranges,
            lost_messages_count=passed.lost,
            last_lost=(passed.lost_first, passed.lost_last) if passed.lost else None,
            last_lost_time=drops.time_of(passed.lost_last) if drops is not None and passed.lost else 0,
        )


_NUMBER = re.compile(r"[0-9]{1,19}")
_decoder = msgspec.msgpack.Decoder(Cursor)


def fingerprint(config: ExportConfig) -> bytes:
    """Identify one configuration of an export."""
    return hashlib.sha256(msgspec.json.encode(config, enc_hook=str)).digest()[:16]


def stopped_with(data_dir: Path, stream: str, epoch: int, config: ExportConfig) -> str | None:
    """Return why an export has stopped with exactly this configuration, or None. Raises OSError."""
    path = stream_directory(data_dir, stream) / f"{directory_name(config.identifier)}.cursor"
    found: Cursor | None = None
    with contextlib.suppress(CorruptData, FileNotFoundError):
        found = CursorFile.read(path)
    if found is None or found.epoch != epoch or found.stopped != fingerprint(config):
        return None
    return found.error or "stopped"


def stream_directory(data_dir: Path, stream: str) -> Path:
    """Return the directory with the cursors of a stream's exports."""
    return data_dir / "exports" / directory_name(stream)


def stored_status(
    data_dir: Path,
    stream: str,
    epoch: int,
    kind: str,
    identifier: str,
    drops: DropLog | None = None,
    oldest: int = 0,
) -> ExportStatus:
    """Return the status of an export from its file, as `Cursor.status`, or that of a new one."""
    found: Cursor | None = None
    with contextlib.suppress(CorruptData, OSError):
        found = CursorFile.read(stream_directory(data_dir, stream) / f"{directory_name(identifier)}.cursor")
    if found is None or (found.epoch, found.kind) != (epoch, kind):
        return ExportStatus(export_config_identifier=identifier)
    return found.status(identifier, drops, oldest)


def highest_exported(data_dir: Path, name: str, epoch: int, boot: str | None = None) -> int:
    """Return the highest number that any export of the stream may have sent; -1 if none.

    Numbering continues after it if a power cut took unsynced messages that were already exported. `boot` is
    the boot id, by default that of the machine.
    """
    highest, boot = -1, clock.System().boot if boot is None else boot
    for path in stream_directory(data_dir, name).glob("*.cursor"):
        with contextlib.suppress(CorruptData, OSError):
            cursor = CursorFile.read(path)
            if cursor is not None and cursor.epoch == epoch:
                highest = max(highest, cursor.sent(boot))
    return highest


def forget_stream(data_dir: Path, name: str) -> None:
    """Remove all cursors of a stream."""
    shutil.rmtree(stream_directory(data_dir, name), ignore_errors=True)


def forget_others(data_dir: Path, name: str, identifiers: set[str]) -> None:
    """Remove the cursors of all other exports, which were deleted while no worker ran."""
    kept = {directory_name(identifier) for identifier in identifiers}
    directory = stream_directory(data_dir, name)
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.suffix in (".cursor", ".skipped") and path.stem not in kept:
            path.unlink()


class Sealing:
    """Encrypts the state of exporters and transforms, which may have parts of messages."""

    def __init__(self, keys: Keys, path: Path, epoch: int) -> None:
        """`path` is the cursor's file."""
        names = b"".join(name.encode() + b"\0" for name in (path.parent.name, path.name))
        self._keys, self._context = keys, b"cursor\0" + names + epoch.to_bytes(8, "little")

    def seal(self, plain: bytes) -> bytes:
        """Encrypt. Raises OSError."""
        try:
            return self._keys.seal(self._context, b"", plain)
        except EncryptionKeyError as error:
            raise OSError(EACCES, str(error)) from None

    def open(self, sealed: bytes) -> bytes:
        """Decrypt. Raises CorruptData or EncryptionKeyError."""
        return self._keys.open(self._context, b"", sealed)


def openings(data_dir: Path) -> set[int]:
    """Return the numbers of the opening keys that cursors need. Raises OSError."""
    found = set[int]()
    for path in (data_dir / "exports").glob("*/*.cursor"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for _, cursor in _slots(fd):
                if cursor.sealed is True:
                    found |= {opening_of(part) for part in (cursor.state, cursor.transform) if part}
        finally:
            os.close(fd)
    return found


def settle(data_dir: Path) -> None:
    """Make certain that a power cut brings back no other content of the cursors. Raises OSError.

    A killed worker may not have synced what `openings` has found.
    """
    for path in (data_dir / "exports").glob("*/*.cursor"):
        Files().sync_path(path)


class CursorFile:
    """The file of one cursor, open for writing."""

    def __init__(self, path: Path, sealing: Sealing | None = None) -> None:
        """`sealing` is needed to write `encrypted`."""
        Files().make_directory(path.parent)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            Files().sync_directory(path.parent)
            found = _slots(self._fd)
            # An earlier process may have ended before its next sync, or after a failed one: only what is
            # written again is then on the disk.
            Files().write(self._fd, [os.pread(self._fd, _area(2), 0)], 0)
            os.fdatasync(self._fd)
        except OSError:
            os.close(self._fd)
            raise
        self._sealing, self.encrypted = sealing, False  # whether writes are encrypted
        self._generation = max((generation for generation, _ in found), default=0)
        self._is_synced = True  # whether the newest slot is
        self._areas: list[tuple[bytes, bool, bytes] | None] = [None, None]  # content, encrypted, check
        self._is_sealed = [False, False]
        for generation, cursor in found:
            self._is_sealed[generation % 2] = cursor.sealed is True

    def fill(self, cursor: Cursor) -> None:
        """Write each invalid slot, so that no later write needs space. Raises OSError.

        Also replace slots that are not encrypted and should be, or the reverse: an encrypted one needs a key.
        """
        for _ in range(2 - len(_slots(self._fd))):
            self.write(cursor)
        if self.differs(self.encrypted):
            self.write(cursor)  # replaces both slots

    def differs(self, encrypted: bool) -> bool:
        """Return whether a slot is not encrypted and should be, or the reverse."""
        return self._is_sealed != [encrypted, encrypted]

    @staticmethod
    def read(path: Path, sealing: Sealing | None = None) -> Cursor | None:
        """Read a cursor; None for an empty file. Raises CorruptData if there is no valid slot.

        Without `sealing`, the `state` and `transform` of an encrypted cursor stay encrypted. With it, also
        raises EncryptionKeyError.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for _, cursor in sorted(_slots(fd), key=itemgetter(0), reverse=True):
                with contextlib.suppress(CorruptData):
                    return cursor if sealing is None else _decrypted(cursor, sealing)
            if os.fstat(fd).st_size == 0:
                return None
        finally:
            os.close(fd)
        raise CorruptData(f"{path}: it has no valid cursor")

    def write(self, cursor: Cursor, *, sync: bool = True) -> None:
        """Write into the slot without the newest synced cursor, durably if `sync`. Raises OSError.

        With a state of transforms, the write is always durable: slot and area are two writes, and a process
        that is killed between them must leave the newest slot unchanged. The first write after encryption was
        switched on or off is durable too, because it replaces both slots and their areas.
        """
        plain, transform, encrypted = cursor, cursor.transform, self.encrypted
        if transform or self.differs(encrypted):
            sync = True
            if not self._is_synced:
                os.fdatasync(self._fd)
                self._is_synced = True
        generation = self._generation + (1 if self._is_synced else 2)
        number, area = generation % 2, transform
        if transform or encrypted:
            known, state = self._areas[number], cursor.state
            if known is None or known[:2] != (transform, encrypted):
                area, check = self._encoded(transform)
            else:
                area, check = b"", known[2]
            if encrypted and state:
                state = self._encrypt(state)
            sealed = encrypted or UNSET
            cursor = msgspec.structs.replace(cursor, state=state, transform=check, sealed=sealed)
        body = msgspec.msgpack.encode(cursor)
        head = _HEAD.pack(_MAGIC, generation, len(body))
        slot = head + crc32(body, crc32(head)).to_bytes(4, "big") + body
        if len(slot) > SLOT:
            raise ValueError(f"a cursor of {len(slot)} bytes does not fit in its slot")
        if encrypted and not self._is_sealed[number]:
            self._wipe_area(number)
        if area:
            self._areas[number] = None
            self._write_area(number, area)
        Files().write(self._fd, [slot.ljust(SLOT, b"\0")], number * SLOT)
        if sync:
            os.fdatasync(self._fd)
        self._generation, self._is_synced, self._is_sealed[number] = generation, sync, encrypted
        if area:  # after a failed sync, it must be written again
            self._areas[number] = transform, encrypted, cursor.transform
        if self.differs(encrypted):
            self.write(plain)

    def _encoded(self, transform: bytes) -> tuple[bytes, bytes]:
        """Return the content of an area, and the part of it that goes into the slot."""
        if not transform or not self.encrypted:
            return transform, _seal(transform) if transform else b""
        sealed = self._encrypt(transform)
        area = sealed[_AROUND:-_AROUND]
        return area, _seal(area) + sealed[:_AROUND] + sealed[-_AROUND:]

    def _encrypt(self, content: bytes) -> bytes:
        assert self._sealing is not None
        return self._sealing.seal(content)

    def _wipe_area(self, number: int) -> None:
        """Overwrite unencrypted content of an area."""
        if os.fstat(self._fd).st_size >= _area(2):
            Files().write(self._fd, [bytes(AREA)], _area(number))

    def _write_area(self, number: int, content: bytes) -> None:
        """Write the area of an invalidated slot. The first time, make room for both areas."""
        end = _area(2)
        if (size := os.fstat(self._fd).st_size) < end:
            Files().write(self._fd, [bytes(end - size)], size)
        Files().write(self._fd, [content], _area(number))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _decrypted(cursor: Cursor, sealing: Sealing) -> Cursor:
    """Return a cursor with its state and transform decrypted. Raises CorruptData or EncryptionKeyError."""
    if cursor.sealed is not True:
        return cursor
    state = sealing.open(cursor.state) if cursor.state else b""
    transform = sealing.open(cursor.transform) if cursor.transform else b""
    return msgspec.structs.replace(cursor, state=state, transform=transform, sealed=UNSET)


def _slots(fd: int) -> list[tuple[int, Cursor]]:
    """Return the valid slots with their generations."""
    found = []
    for number in range(2):
        data = os.pread(fd, SLOT, number * SLOT)
        if len(data) < _HEAD.size + 4:
            continue
        magic, generation, length = _HEAD.unpack_from(data)
        body = data[_HEAD.size + 4 : _HEAD.size + 4 + length]
        crc = int.from_bytes(data[_HEAD.size : _HEAD.size + 4], "big")
        if magic == _MAGIC and len(body) == length and crc32(body, crc32(data[: _HEAD.size])) == crc:
            with contextlib.suppress(CorruptData, struct.error):
                cursor = decoded(body, _decoder)
                if not cursor.makes_sense():
                    continue
                if cursor.transform:
                    check, around = cursor.transform[: _SEAL.size], cursor.transform[_SEAL.size :]
                    content = os.pread(fd, AREA, _area(number))[: _SEAL.unpack(check)[0]]
                    if _seal(content) != check:
                        continue
                    cursor.transform = around[:_AROUND] + content + around[_AROUND:]
                found.append((generation, cursor))
    return found


def _area(number: int) -> int:
    """Return the offset of a slot's area; for slot 2, the end of the file."""
    return 2 * SLOT + number * AREA


def _seal(content: bytes) -> bytes:
    return _SEAL.pack(len(content), crc32(content))


class Skipped:
    """The ranges that an export never sent, ascending. Adjacent ones with the same reason are joined."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.ranges: list[tuple[int, int, str]] = []
        self._found = b""  # the lines of an earlier process, which may have ended before its sync
        self._is_synced = False  # whether this process has synced these lines and the file's name
        self._size = 0  # of the valid lines; the next write overwrites the remains of a failed one
        self._lines = 0
        self._compact_size = KEPT_RANGES  # the number of ranges of a compact file
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            fields = line.decode("ascii", "replace").split()
            if not line.endswith(b"\n") or len(fields) != 4 or fields[3] != _checksum(*fields[:3]):
                break
            if not (_NUMBER.fullmatch(fields[0]) and _NUMBER.fullmatch(fields[1])):
                break
            self._join(int(fields[0]), int(fields[1]), fields[2])
            self._found += line
            self._size += len(line)
            self._lines += 1

    def add(self, ranges: list[tuple[int, int, str]], pending: Sequence[Pair] = ()) -> None:
        """Append durably the parts of these ranges that are not in the file yet.

        `pending` has the numbers between them that the export has not passed. Raises OSError; then the next
        call overwrites the incomplete write. The first call also rewrites the lines that were in the file: a
        cursor may pass them only once they are on the disk, and syncing again does not repair a failed sync.
        """
        fresh = [(a, b, reason) for first, last, reason in ranges for a, b in self._new_parts(first, last)]
        if not fresh and (self._is_synced or not ranges):
            return
        data = _lines(fresh)
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, self._size)
            Files().write(fd, [self._found, data], self._size - len(self._found))
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if not self._is_synced:
            Files().sync_directory(self._path.parent)
            self._found, self._is_synced = b"", True
        self._size += len(data)
        self._lines += len(fresh)
        for entry in fresh:
            self._join(*entry)
        if self._lines > 2 * self._compact_size:
            with contextlib.suppress(OSError):  # the long file is correct too; the next call retries
                self._compact([first for first, _ in pending])

    def _compact(self, pending: list[int]) -> None:
        old, kept = self.ranges[:-KEPT_RANGES], self.ranges[-KEPT_RANGES:]
        joined: list[tuple[int, int, str]] = []
        for entry in old:
            # A pending number must not look like a skipped one.
            apart = joined and bisect_left(pending, joined[-1][1]) != bisect_left(pending, entry[0])
            if joined and not apart and entry[2] not in LOSSES and joined[-1][2] not in LOSSES:
                reason = f"{JOINED}{_count(joined[-1]) + _count(entry)}"
                joined[-1] = joined[-1][0], entry[1], reason
            else:
                joined.append(entry)
        data = _lines(joined + kept)
        Files().replace(self._path, data)
        self.ranges = joined + kept
        self._size, self._lines, self._compact_size = (
            len(data),
            len(self.ranges),
            max(KEPT_RANGES, len(self.ranges)),
        )

    def _new_parts(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the parts of first..last that are in no range: an export that restarts passes them twice."""
        parts, at = [], bisect_left(self.ranges, first, key=itemgetter(1))
        while at < len(self.ranges) and self.ranges[at][0] <= last:
            if self.ranges[at][0] > first:
                parts.append((first, self.ranges[at][0] - 1))
            first = self.ranges[at][1] + 1
            at += 1
        return [*parts, (first, last)] if first <= last else parts

    def _join(self, first: int, last: int, reason: str) -> None:
        at = bisect_left(self.ranges, first, key=itemgetter(0))
        if at and self.ranges[at - 1][1] + 1 == first and self.ranges[at - 1][2] == reason:
            self.ranges[at - 1] = self.ranges[at - 1][0], last, reason
        else:
            self.ranges.insert(at, (first, last, reason))


def _count(entry: tuple[int, int, str]) -> int:
    first, last, reason = entry
    return int(reason.removeprefix(JOINED)) if reason.startswith(JOINED) else last - first + 1


def _lines(ranges: list[tuple[int, int, str]]) -> bytes:
    lines = [f"{first} {last} {reason} {_checksum(first, last, reason)}\n" for first, last, reason in ranges]
    return "".join(lines).encode("ascii")


def _checksum(*fields: object) -> str:
    return f"{crc32(' '.join(map(str, fields)).encode()):08x}"
