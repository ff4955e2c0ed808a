"""The byte layout of segments and their indexes: pure functions over bytes, no files.

All numbers are little-endian.

    segment  = header, frame, frame, ...
    header   = magic "SBSEG\\0\\0\\2" | base u64 | epoch u64 | created u64 (Unix ms)
               | salt u32 | crc u32                                                       40 bytes
    (then, in a segment without an index: preallocated space, if little was synced at a time)
    frame    = magic u32 | crc u32 | length u32 | columns u16 | zero u16 | number u32
               | base u64 | time u64 | age u64                                            44 bytes
               body (`length` bytes), sealed if columns & 4
    body     = sizes u32 x 2 x number (topic, payload, topic, payload, ...)
               [sizes u32 x number of the headers]   if columns & 1
               [sizes u32 x number of the ids]       if columns & 2
               topic, payload, topic, payload, ...  [headers] [ids]

    index    = magic "SBIDX\\0\\0\\2" | base u64 | next u64 | size u64 | last age u64
               | data bytes u64 | entries u32 | crc u32,                                  56 bytes
               then entries x (sequence u64 | offset u64)

A segment of an encrypted stream has the magic "SBSEG\\0\\0\\3", and the number of its opening key in place
of `created`. Its frames are sealed with that key, as `bridge.encryption` describes: the context is
"segment\\0", the name of the stream's directory, "\\0", epoch u64 and base u64 of the segment; from `length`
on, the frame's header is authenticated too. The crc covers the sealed body.

The crc of a header is the CRC-32 of the 36 bytes before it. The crc of an index covers the 52 bytes before
it, then the entries. The magic of a frame is "SBF2".

Invariants
* A frame is one commit group: it is there completely or not at all. Its CRC-32 covers everything after
  the crc field, including the length. The CRC starts from the stream's salt, a secret random number:
  `zlib.crc32(data, salt)`. So a payload that contains the bytes of a frame is never taken for one, even if a
  torn write has removed what preceded it.
* A frame holds the numbers base .. base+number-1; `time` is their ingest time (Unix ms). `age` is the same
  moment on the data directory's age timeline (ms, see `bridge.clock`); expiry uses only that.
* A frame never spans segments. Bases increase from frame to frame. A gap between frames means that numbers
  are missing; frames never overlap.
* Preallocated space is filled with a pattern of 64 bytes: the BLAKE2b digest, 64 bytes long, of the 4 bytes
  of the salt in the header. Byte n of the file is byte n % 64 of the pattern. Frames overwrite it. A disk
  writes a sector of 512 bytes completely or not at all. So a frame that fails its check and has a sector with
  only the pattern is an unfinished write. No payload can look like that.
* An index is written only after its closed segment is on the disk, so a segment with an index has no torn
  tail. An index that is missing or does not match its segment is rebuilt from it.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate, count, pairwise, repeat
from typing import NamedTuple

from msgspec import Struct

from bridge.deflate import crc32
from bridge.encryption import OVERHEAD
from bridge.streams.sums import Sums

SEGMENT_MAGIC = b"SBSEG\0\0\2"
SEALED_MAGIC = b"SBSEG\0\0\3"
INDEX_MAGIC = b"SBIDX\0\0\2"
FRAME_MAGIC = 0x32464253  # "SBF2"
HEADER = struct.Struct("<8sQQQII")
FRAME = struct.Struct("<IIIHHIQQQ")
COVERED = struct.Struct("<IHHIQQQ")  # what of a frame's header its crc covers
INDEX = struct.Struct("<8sQQQQQII")
ENTRY = struct.Struct("<QQ")
PAIR = struct.Struct("<II")
HEADERS, IDS, SEALED = 1, 2, 4
RECORD_OVERHEAD = 8
INDEX_STEP = 64 * 1024
SECTOR = 512
PATTERN = 64
PIECES = 128
PIECE = 64 * 1024  # bytes of a buffer to write: so few that no process maps each one anew (`bridge.process`)
SMALL = 4096  # bytes: it is faster to copy fewer than to pass them as buffers of their own
_FRAME_MAGIC_BYTES = FRAME_MAGIC.to_bytes(4, "little")
_WIDTHS = (2, 3, 3, 4) * 2  # sizes per message, by columns
_SWAP = sys.byteorder == "big"


class StreamMessage(Struct, frozen=True, gc=False):  # a named tuple costs four times as much to make
    """One stored message. `ingest_time` is Unix time in ms; `headers` are opaque to the store."""

    sequence_number: int
    ingest_time: int
    topic: bytes
    payload: bytes
    headers: bytes


class Frame(Struct, frozen=True, gc=False):
    """A frame's header, and its position in a buffer."""

    base: int
    number: int
    time: int
    age: int
    columns: int
    start: int
    end: int

    @property
    def next(self) -> int:
        return self.base + self.number

    @property
    def width(self) -> int:
        """How many sizes the body has per message."""
        return _WIDTHS[self.columns]

    @property
    def data_bytes(self) -> int:
        """Bytes of topics, payloads, headers and ids."""
        framing = FRAME.size + 4 * self.width * self.number
        return self.end - self.start - framing - (OVERHEAD if self.columns & SEALED else 0)


class SegmentSummary(NamedTuple):
    """What an index says about its segment. `last_age` is in ms on the age timeline, sizes are bytes."""

    base: int
    next: int
    size: int
    last_age: int
    data_bytes: int
    entries: list[tuple[int, int]]


def encode_header(base: int, epoch: int, created: int, salt: int, opening: int | None = None) -> bytes:
    """A segment's first 40 bytes; `opening` is the number of the key that its frames are sealed with."""
    if opening is None:
        head = HEADER.pack(SEGMENT_MAGIC, base, epoch, created, salt, 0)[:-4]
    else:
        head = HEADER.pack(SEALED_MAGIC, base, epoch, opening, salt, 0)[:-4]
    return head + crc32(head).to_bytes(4, "little")


def decode_header(data: bytes) -> tuple[int, int, int] | None:
    """(base, epoch, salt) of a segment's header; None if it is damaged or of another format."""
    if len(data) < HEADER.size or crc32(data[: HEADER.size - 4]) != int.from_bytes(
        data[HEADER.size - 4 : HEADER.size], "little"
    ):
        return None
    magic, base, epoch, _, salt, _ = HEADER.unpack_from(data)
    return (base, epoch, salt) if magic in (SEGMENT_MAGIC, SEALED_MAGIC) else None


def is_encrypted(header: bytes) -> bool:
    """Whether a segment that begins like this is encrypted."""
    return header.startswith(SEALED_MAGIC)


def opening_in(header: bytes) -> int | None:
    """The number of the opening key in a sound header; None if the segment is not encrypted."""
    return int(HEADER.unpack_from(header)[3]) if is_encrypted(header) else None


# Seals a body, given what of its frame's header is authenticated; returns `bridge.encryption`'s two parts.
Seal = Callable[[bytes, bytes], tuple[bytes, bytes]]


def _sizes(parts: Sequence[bytes]) -> bytes:
    if len(parts) == 2:  # one message: common with clients that wait for each acknowledgement
        return PAIR.pack(len(parts[0]), len(parts[1]))
    sizes = array("I", map(len, parts))
    if _SWAP:
        sizes.byteswap()
    return sizes.tobytes()


def encode_frame(
    base: int,
    time: int,
    age: int,
    salt: int,
    parts: Sequence[bytes],
    headers: dict[int, bytes] | None = None,
    ids: dict[int, bytes] | None = None,
    seal: Seal | None = None,
) -> list[bytes]:
    """Encode one commit group as buffers, to be written one after the other.

    `parts` alternates topics and payloads; `headers` and `ids` are by position in the group, absent ones are
    empty. `seal` encrypts the body.
    """
    number = len(parts) // 2
    if number == 1 and not headers and not ids and seal is None:  # as common as above, and simple
        covered = PAIR.pack(len(parts[0]), len(parts[1])) + parts[0] + parts[1]
        if len(covered) < SMALL:
            covered = COVERED.pack(len(covered), 0, 0, 1, base, time, age) + covered
            return [_FRAME_MAGIC_BYTES + crc32(covered, salt).to_bytes(4, "little") + covered]
    sizes, data, columns = _sizes(parts), _joined(parts), 0
    if headers or ids:
        for bit, column in ((HEADERS, headers), (IDS, ids)):
            if column:
                values = [column.get(i, b"") for i in range(number)]
                sizes, data, columns = sizes + _sizes(values), data + _joined(values), columns | bit
    length = len(sizes) + sum(map(len, data))
    if seal is not None:
        covered = COVERED.pack(length + OVERHEAD, columns | SEALED, 0, number, base, time, age)
        prefix, body = seal(covered, b"".join([sizes, *data]))
        covered += prefix
        check = crc32(body, crc32(covered, salt))
        return [_FRAME_MAGIC_BYTES + check.to_bytes(4, "little") + covered, body]
    covered = COVERED.pack(length, columns, 0, number, base, time, age) + sizes
    if length < SMALL:
        covered += b"".join(data)
        return [_FRAME_MAGIC_BYTES + crc32(covered, salt).to_bytes(4, "little") + covered]
    check = crc32(covered, salt)
    for piece in data:
        check = crc32(piece, check)
    return [_FRAME_MAGIC_BYTES + check.to_bytes(4, "little") + covered, *data]


def _joined(parts: Sequence[bytes]) -> list[bytes]:
    """The parts in buffers of about `PIECE` bytes, if the messages are of similar size.

    There are at most `PIECES` buffers in any case: a system call takes 1,024 (IOV_MAX).
    """
    number = max(2 * PIECE // (len(parts[0]) + len(parts[-1]) + 1), len(parts) // PIECES + 1)
    if number >= len(parts):
        return [b"".join(parts)]
    return [b"".join(parts[at : at + number]) for at in range(0, len(parts), number)]


def frame_at(data: bytes, pos: int) -> Frame | None:
    """The frame that begins at `pos`, unchecked; None if there is no frame header there."""
    if len(data) - pos < FRAME.size:
        return None
    magic, _, length, columns, zero, number, base, time, age = FRAME.unpack_from(data, pos)
    if magic != FRAME_MAGIC or zero or not number:
        return None
    return Frame(base, number, time, age, columns, pos, pos + FRAME.size + length)


def is_sound(data: bytes, frame: Frame, salt: int) -> bool:
    """Whether a frame is complete and passes its check."""
    start, end = frame.start, frame.end
    if end > len(data):
        return False
    covered = data[start + 8 : end] if end - start < SMALL else memoryview(data)[start + 8 : end]
    if crc32(covered, salt) != int.from_bytes(data[start + 4 : start + 8], "little"):
        return False
    return fits(frame)


def fits(frame: Frame) -> bool:
    """Whether a frame is long enough for the sizes of its messages."""
    return frame.columns < len(_WIDTHS) and frame.data_bytes >= 0


def filling(salt: int) -> bytes:
    """The pattern of preallocated space in a stream's segments."""
    return blake2b(salt.to_bytes(4, "little"), digest_size=PATTERN).digest()


def room(pattern: bytes, start: int, end: int) -> bytes:
    """Preallocated space for the bytes start..end-1 of a file."""
    return (pattern * ((end - start) // PATTERN + 2))[start % PATTERN :][: end - start]


def written_end(data: bytes, start: int, pattern: bytes) -> int:
    """Where the data after `start` ends: `start` if there is only preallocated space, or zeros."""
    end = len(data)
    while end > start:
        begin = max(start, (end - 1) // PATTERN * PATTERN)
        if data[begin:end] != pattern[begin % PATTERN :][: end - begin]:
            break
        end = begin
    return end if data[start:end].strip(b"\0") else start


def is_torn(data: bytes, frame: Frame, pattern: bytes) -> bool:
    """Whether a frame that fails its check is an unfinished write.

    It is if it ends after the end of the file, or one of its sectors is still preallocated space (fewer than
    8 bytes of a sector prove nothing), or there are only zeros from one of its sectors on: the file's size
    has reached the disk, its data has not. Zeros that end with the frame must cover more than a payload,
    which may end with zeros itself: a complete topic, or a part of the sizes. `data` is the file from its
    beginning.
    """
    if frame.end > len(data):
        return True
    zeros = -(-len(data.rstrip(b"\0")) // SECTOR) * SECTOR
    if zeros < frame.end and (frame.end < len(data) or _covers_more_than_a_payload(data, frame, zeros)):
        return True
    for at in range(frame.start - frame.start % SECTOR, frame.end, SECTOR):
        start, end = max(at, frame.start), min(at + SECTOR, frame.end)
        if end - start >= 8 and data[start:end] == room(pattern, start, end):
            return True
    return False


def _covers_more_than_a_payload(data: bytes, frame: Frame, zeros: int) -> bool:
    if not fits(frame):
        return False
    if frame.columns & SEALED:  # what is encrypted does not end with zeros
        return frame.end - zeros >= 8
    bounds = _bounds(data, frame)
    if zeros < bounds[0]:
        return True
    spans = zip(bounds[0 : 2 * frame.number : 2], bounds[1 : 2 * frame.number : 2], strict=True)
    return bounds[-1] == frame.end and any(zeros <= start < end for start, end in spans)


def messages(data: bytes, frame: Frame) -> list[StreamMessage]:
    """The messages of a sound frame."""
    if frame.number == 1 and not frame.columns:  # common with clients that append one by one
        start = frame.start + FRAME.size + 2 * 4
        middle = start + int.from_bytes(data[start - 8 : start - 4], "little")
        return [StreamMessage(frame.base, frame.time, data[start:middle], data[middle : frame.end], b"")]
    return list(map(StreamMessage, count(frame.base), repeat(frame.time), *columns(data, frame)))


def columns(data: bytes, frame: Frame) -> tuple[list[bytes], list[bytes], Iterable[bytes]]:
    """Topics, payloads and headers of a sound frame's messages."""
    n, bounds = frame.number, _bounds(data, frame)
    starts, middles, ends = bounds[0 : 2 * n : 2], bounds[1 : 2 * n : 2], bounds[2 : 2 * n + 1 : 2]
    topics = [data[a:b] for a, b in zip(starts, middles, strict=True)]
    payloads = [data[a:b] for a, b in zip(middles, ends, strict=True)]
    if not frame.columns & HEADERS:
        return topics, payloads, repeat(b"", n)
    parts = zip(bounds[2 * n : 3 * n], bounds[2 * n + 1 :], strict=False)
    return topics, payloads, [data[a:b] for a, b in parts]


def _bounds(data: bytes, frame: Frame) -> list[int]:
    fields = frame.width * frame.number
    start = frame.start + FRAME.size
    sizes = array("I")
    sizes.frombytes(memoryview(data)[start : start + 4 * fields])
    if _SWAP:
        sizes.byteswap()
    return list(accumulate(sizes, initial=start + 4 * fields))


def sizes_of(data: bytes, frame: Frame) -> list[int]:
    """Bytes of topic, payload, headers and id of each message of a sound frame."""
    bounds, n = _bounds(data, frame), frame.number
    sizes = [b - a for a, b in zip(bounds[0 : 2 * n : 2], bounds[2 : 2 * n + 1 : 2], strict=True)]
    for column in range(2, frame.width):
        part = bounds[column * n : (column + 1) * n + 1]
        sizes = [size + b - a for size, a, b in zip(sizes, part, part[1:], strict=False)]
    return sizes


def ids_of(data: bytes, frame: Frame) -> dict[int, bytes]:
    """The message ids in a sound frame by sequence number; those without one are left out."""
    if not frame.columns & IDS:
        return {}
    bounds = _bounds(data, frame)[-frame.number - 1 :]
    return {frame.base + i: data[a:b] for i, (a, b) in enumerate(pairwise(bounds)) if b > a}


def body_of(data: bytes, frame: Frame) -> tuple[bytes, memoryview]:
    """What of a sealed frame's header is authenticated, and its sealed body."""
    start = frame.start + FRAME.size
    return data[frame.start + FRAME.size - COVERED.size : start], memoryview(data)[start : frame.end]


def unsealed(data: bytes, frame: Frame, body: bytes) -> tuple[bytes, Frame]:
    """A sealed frame with its body decrypted, in a buffer of its own."""
    head = data[frame.start : frame.start + FRAME.size]
    columns, end = frame.columns & ~SEALED, FRAME.size + len(body)
    return head + body, Frame(frame.base, frame.number, frame.time, frame.age, columns, 0, end)


def scan(data: bytes, pos: int, salt: int) -> Iterator[Frame]:
    """The sound frames from `pos` on, up to the first that is not."""
    while (frame := frame_at(data, pos)) is not None and is_sound(data, frame, salt):
        yield frame
        pos = frame.end


def resync(
    data: bytes,
    pos: int,
    salt: int,
    *,
    magic: bytes = _FRAME_MAGIC_BYTES,
    frame_at: Callable[[bytes, int], Frame | None] = frame_at,
) -> int | None:
    """Where the next sound frame after a bad one at `pos` begins; None if there is none.

    Takes time linear in the data, whatever it holds: see `sums`. `magic` and `frame_at` may be those of
    another format.
    """
    origin, sums = pos, Sums(memoryview(data)[pos:])
    while (pos := data.find(magic, pos + 1)) >= 0:
        frame = frame_at(data, pos)
        if frame is None or frame.end > len(data) or not fits(frame):
            continue
        check = sums.crc32(pos + 8 - origin, frame.end - origin, salt)
        if check == int.from_bytes(data[pos + 4 : pos + 8], "little"):
            return pos
    return None


def encode_index(summary: SegmentSummary) -> bytes:
    entries = b"".join(ENTRY.pack(*entry) for entry in summary.entries)
    head = INDEX.pack(INDEX_MAGIC, *summary[:5], len(summary.entries), 0)[:-4]
    return head + crc32(entries, crc32(head)).to_bytes(4, "little") + entries


def decode_index(data: bytes) -> SegmentSummary | None:
    """Read an index file; None if it is damaged."""
    if len(data) < INDEX.size:
        return None
    magic, base, after, size, last, total, number, crc = INDEX.unpack_from(data)
    entries = data[INDEX.size :]
    if (
        magic != INDEX_MAGIC
        or len(entries) != number * ENTRY.size
        or crc32(entries, crc32(data[: INDEX.size - 4])) != crc
    ):
        return None
    return SegmentSummary(base, after, size, last, total, list(ENTRY.iter_unpack(entries)))


class Indexer:
    """Builds the summary of a segment from its frames, in order."""

    def __init__(self, base: int) -> None:
        self.base = self.next = base
        self.last_age = self.data_bytes = 0
        self.entries: list[tuple[int, int]] = []
        self._last_entry = -INDEX_STEP

    def add(self, frame: Frame, offset: int) -> None:
        """Add a frame, which begins at `offset` of its file."""
        if offset - self._last_entry >= INDEX_STEP:
            self.entries.append((frame.base, offset))
            self._last_entry = offset
        self.next = frame.next
        if frame.age > self.last_age:
            self.last_age = frame.age
        self.data_bytes += frame.data_bytes

    def summary(self, size: int) -> SegmentSummary:
        """The summary of the segment, now `size` bytes long."""
        return SegmentSummary(self.base, self.next, size, self.last_age, self.data_bytes, self.entries)
