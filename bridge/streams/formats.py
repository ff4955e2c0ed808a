"""The version of a data directory's format, and upgrades from earlier versions.

    <data_dir>/format = "streambridge data format " number [" upgrading"] " " crc32 of that, hex, "\\n"

* 1: the first builds. There is no file `format`, and `lock` is a file
* 2: frames have an age (`segment`), and `lock` is a directory
* 3: streams may be encrypted (`bridge.encryption`). A directory changes from format 2 to format 3 with its
  first encrypted stream; until then, earlier builds can still open it

Upgrade: the first start of a newer build writes the new number with "upgrading". It then replaces the
segments one by one, each atomically, and removes "upgrading" when all streams are open. Each segment states
its own format, so after a kill at any instant the next start continues the upgrade. Each message gets its
ingest time as its age. In a directory without a clock, the age timeline begins at the newest stored age.

Downgrade: a build refuses a directory with a higher number than it knows. Builds of format 1 do not read the
number. They try to open `lock` as a file and stop with "Is a directory" before they have changed anything.

    header of format 1 = as now, but with the magic "SBSEG\\0\\0\\1"
    frame of format 1  = magic "SBF1" | crc u32 | length u32 | columns u16 | zero u16 | number u32
                         | base u64 | time u64                                   36 bytes, then its body
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from msgspec import Struct

from bridge.deflate import crc32
from bridge.errors import OtherFormat
from bridge.streams import layout, segment
from bridge.streams.layout import Files
from bridge.streams.segment import COVERED, FRAME, FRAME_MAGIC, HEADER, SEGMENT_MAGIC, Frame

NAME = "format"
PRESENT = 2
ENCRYPTED = 3
_WORDS = "streambridge data format "
_OLD_MAGIC = b"SBSEG\0\0\1"
_OLD_FRAME_MAGIC = b"SBF1"
_OLD_FRAME = struct.Struct("<IIIHHIQQ")
_SHORTER = FRAME.size - _OLD_FRAME.size


class Format(Struct, frozen=True):
    """What a data directory says of itself; `upgrading`: some segments may still have an earlier format."""

    number: int
    upgrading: bool = False


def find(data_dir: Path) -> Format:
    """The format of a data directory: 1 if it does not say, or if what it says is damaged.

    Raises OtherFormat if it is newer than this build knows, or OSError.
    """
    path = data_dir / NAME
    try:
        line = path.read_text("utf-8", "replace").removesuffix("\n")
    except FileNotFoundError:
        return Format(1)
    text, _, check = line.rpartition(" ")
    number, _, rest = text.removeprefix(_WORDS).partition(" ")
    if not text.startswith(_WORDS) or not number.isdecimal() or check != _check(text):
        return Format(1)
    if int(number) > ENCRYPTED:
        raise OtherFormat(
            f"{data_dir}: was written by a newer streambridge (format {number}; this one knows up to "
            f"{ENCRYPTED}); install that version again; nothing was changed"
        )
    return Format(int(number), bool(rest))


def save(files: Files, data_dir: Path, found: Format) -> None:
    """Note the format durably; raises OSError."""
    text = f"{_WORDS}{found.number}{' upgrading' if found.upgrading else ''}"
    files.replace(data_dir / NAME, f"{text} {_check(text)}\n".encode())


def _check(text: str) -> str:
    return f"{crc32(text.encode()):08x}"


def refuse_old(path: Path, data: bytes) -> None:
    """Raise OtherFormat for a segment that is still to be brought to the present format."""
    if _is_old(data):
        raise OtherFormat(
            f"{path}: has the format of an earlier version; start the service once, which brings it to the "
            "present one"
        )


def upgrade(files: Files, directory: Path, salt: int) -> int:
    """Bring a stream's segments to the present format; returns how many were not. Raises OSError."""
    number = 0
    for base in layout.segment_bases(directory):
        path = layout.segment_path(directory, base)
        fd = files.open(path, os.O_RDONLY)
        try:
            if not _is_old(files.read(fd, HEADER.size + len(_OLD_FRAME_MAGIC), 0)):
                continue
            data = files.read(fd, os.fstat(fd).st_size, 0)
        finally:
            os.close(fd)
        files.unlink(path.with_suffix(layout.INDEX))
        files.replace(path, upgraded(data, salt))
        number += 1
    return number


def _is_old(data: bytes) -> bool:
    """Whether a segment that begins like this is of format 1, also if a bit of its magic has flipped."""
    first = data[HEADER.size : HEADER.size + len(_OLD_FRAME_MAGIC)]
    return data.startswith(_OLD_MAGIC) or (
        len(data) > HEADER.size and not data.startswith(SEGMENT_MAGIC) and first == _OLD_FRAME_MAGIC
    )


def upgraded(data: bytes, salt: int) -> bytes:
    """A segment of format 1 in the present format.

    Nothing is judged here: sound frames stay sound, torn ones torn and damaged ones damaged, so that
    `recovery` finds the same in it. Room at the end is left out.
    """
    parts, pos = [present_header(data)], HEADER.size
    while pos < len(data):
        frame = _frame_at(data, pos)
        if frame is not None and _is_sound(data, frame, salt):
            parts += _frame(data, frame, salt)
            pos = frame.end
            continue
        following = segment.resync(data, pos, salt, magic=_OLD_FRAME_MAGIC, frame_at=_frame_at)
        if following is None:
            parts += _tail(data, pos, frame, salt)
            break
        parts.append(data[pos:following])
        pos = following
    return b"".join(parts)


def present_header(data: bytes) -> bytes:
    """A segment's header in the present format; one of format 1 that is damaged stays damaged."""
    if not _is_old(data):
        return data[: HEADER.size]
    fields, check = data[len(_OLD_MAGIC) : HEADER.size - 4], data[HEADER.size - 4 : HEADER.size]
    head = SEGMENT_MAGIC + fields
    if crc32(_OLD_MAGIC + fields).to_bytes(4, "little") == check:
        check = crc32(head).to_bytes(4, "little")
    return head + check


def _frame_at(data: bytes, pos: int) -> Frame | None:
    """As `segment.frame_at`; `start` is so far before the frame that its body is where `FRAME` says."""
    if len(data) - pos < _OLD_FRAME.size or data[pos : pos + 4] != _OLD_FRAME_MAGIC:
        return None
    _, _, length, columns, zero, number, base, time = _OLD_FRAME.unpack_from(data, pos)
    if zero or not number:
        return None
    return Frame(base, number, time, time, columns, pos - _SHORTER, pos + _OLD_FRAME.size + length)


def _is_sound(data: bytes, frame: Frame, salt: int) -> bool:
    start = frame.start + _SHORTER
    return (
        frame.end <= len(data)
        and crc32(data[start + 8 : frame.end], salt) == int.from_bytes(data[start + 4 : start + 8], "little")
        and segment.fits(frame)
    )


def _frame(data: bytes, frame: Frame, salt: int, spoil: int = 0) -> list[bytes]:
    """A frame in the present format; `spoil` is what its check is changed by."""
    body = data[frame.start + FRAME.size : frame.end]
    covered = COVERED.pack(len(body), frame.columns, 0, frame.number, frame.base, frame.time, frame.age)
    check = crc32(body, crc32(covered, salt)) ^ spoil
    return [FRAME_MAGIC.to_bytes(4, "little"), check.to_bytes(4, "little"), covered, body]


def _tail(data: bytes, pos: int, claimed: Frame | None, salt: int) -> list[bytes]:
    """What stands behind the last sound frame, without room."""
    pattern = segment.filling(salt)
    damaged: list[bytes] = []
    if claimed is not None and not segment.is_torn(data, claimed, pattern):
        damaged, pos = _frame(data, claimed, salt, spoil=1), claimed.end
    return [*damaged, data[pos : segment.written_end(data, pos, pattern)]]
