"""Opens the segments of a stream after a stop or a crash.

Only segments without an index are read: the last one, and those that were closed shortly before the stop and
perhaps not synced. In one of them there may be:

* preallocated space after the last valid frame, left by a crash (see `segment`). It is truncated.
* a *torn tail*: bytes after the last valid frame that contain neither a valid nor a complete frame. They come
  from an unfinished write, which was not acknowledged. The segment is truncated there.
* *damage*: anything else. The file is linked into `quarantine/` and replaced by one with its valid frames.
  The missing numbers are recorded as dropped, with the reason DAMAGED.

Truncated and replaced bytes are kept in `quarantine/`; only a torn tail on a full disk is lost.

The record of drops is checked too. A damaged one is quarantined and rewritten with its valid records.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from bridge.encryption import opening_of as opening_number
from bridge.objectkeys import MAX_SEQUENCE
from bridge.streams import drops as record
from bridge.streams import formats, layout, segment
from bridge.streams.drops import Drop, Drops
from bridge.streams.layout import FULL, Files
from bridge.streams.meta import Meta
from bridge.streams.sealing import Opener, Sealing
from bridge.streams.segment import FRAME, HEADER, SEALED, Indexer, SegmentSummary

_BACK = "messages that were dropped may be back"


class Damage(NamedTuple):
    """A problem with a stream's files, and what was done. `lost` has ranges of numbers."""

    path: Path
    what: str
    lost: list[tuple[int, int]]


class Examined(NamedTuple):
    """An examined and repaired segment. `opening` is the opening key of its frames."""

    summary: SegmentSummary
    damage: list[Damage]
    opening: int | None = None


def read_index(directory: Path, base: int, size: int) -> SegmentSummary | None:
    """Return a closed segment's summary, if its index exists, is valid, and matches the segment's size."""
    path = layout.segment_path(directory, base).with_suffix(layout.INDEX)
    try:
        summary = segment.decode_index(path.read_bytes())
    except OSError:
        return None
    return summary if summary is not None and (summary.base, summary.size) == (base, size) else None


def opening_of(data: bytes, epoch: int, salt: int, base: int) -> int | None:
    """Return the opening key of a segment, even if its header is damaged; None if it is not encrypted."""
    if segment.decode_header(data) == (base, epoch, salt):
        return segment.opening_in(data)
    pos: int | None = HEADER.size
    while pos is not None:
        for frame in segment.scan(data, pos, salt):
            return opening_number(segment.body_of(data, frame)[1]) if frame.columns & SEALED else None
        pos = segment.resync(data, pos, salt) if len(data) > pos else None
    return None


def examine(
    files: Files,
    directory: Path,
    base: int,
    meta: Meta,
    following: int | None,
    drops: Drops,
    sealing: Sealing | None = None,
) -> Examined:
    """Check every frame of a segment and repair damage, as described above.

    `following` is the first number of the next segment, None for the last one. Gaps that `drops` explains are
    not damage. If it raises OSError or EncryptionKeyError, nothing has changed.
    """
    path = layout.segment_path(directory, base)
    fd = files.open(path, os.O_RDWR)
    try:
        if hasattr(os, "posix_fadvise"):  # after a failed sync the page cache may differ from the disk
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(fd).st_size
        data = files.read(fd, size, 0)
    finally:
        os.close(fd)
    formats.refuse_old(path, data)
    opening = opening_of(data, meta.epoch, meta.salt, base)
    opened = sealing.opener(meta.epoch, base) if sealing is not None and opening is not None else None
    index, holes, spans, end = walk(data, base, following, meta.salt, opened)
    holes = [part for first, last in holes for part in drops.live(first, last)]
    header_ok = segment.decode_header(data) == (base, meta.epoch, meta.salt)
    if not header_ok and not spans:
        written = len(data.rstrip(b"\0")) >= HEADER.size
        if written:
            keep(files, directory, path, "damaged")
        rewrite(files, path, base, meta, [], opening)
        lost = drops.live(base, following - 1) if following is not None and following > base else []
        index.next = following if following is not None else base
        what = "its header is damaged" if written else "its header is incomplete"
        found = [Damage(path, what, lost)] if size or lost else []
        return Examined(index.summary(HEADER.size), found, opening)
    lost = list(holes)
    pattern = segment.filling(meta.salt)
    claimed = segment.frame_at(data, end)
    if following is not None and index.next < following:
        lost += drops.live(index.next, following - 1)
    elif (
        claimed is not None
        and claimed.base == index.next
        and following is None
        and not segment.is_torn(data, claimed, pattern)
    ):
        # A complete frame fails its check. Its numbers are used up.
        last = min(claimed.next - 1, MAX_SEQUENCE)  # the damage may be in its header
        lost.append((claimed.base, last))
        index.next = last + 1
    # Damage among dropped messages loses nothing, but stops a reader.
    whole = all(a == b for (_, a), (b, _) in pairwise([(0, HEADER.size), *spans]))
    if header_ok and whole and end == size and not holes:
        found = [Damage(path, "what followed it is gone", lost)] if lost else []
        return Examined(index.summary(size), found, opening)
    if header_ok and whole and not lost:
        tail = data[end : segment.written_end(data, end, pattern)]
        kept = not tail or keep_tail(files, directory, base, end, tail)
        fd = files.open(path, os.O_RDWR)
        try:
            files.truncate(fd, end)
            files.sync(fd)
        finally:
            os.close(fd)
        what = f"a torn tail of {len(tail)} bytes was cut off"
        torn = Damage(path, what if kept else f"{what}; the full disk had no room to keep it", [])
        return Examined(index.summary(end), [torn] if tail else [], opening)
    keep(files, directory, path, "damaged")
    rewrite(files, path, base, meta, [data[a:b] for a, b in spans], opening)
    repaired = Indexer(base)
    offset = HEADER.size
    for a, b in spans:
        for frame in segment.scan(data[a:b], 0, meta.salt):
            repaired.add(frame, offset + frame.start)
        offset += b - a
    repaired.next = index.next
    cut = not (header_ok or any(data[: segment.SECTOR])) and all(a == b for (_, a), (b, _) in pairwise(spans))
    what = "its beginning is missing" if cut else "it is damaged"  # a power cut has kept what follows
    return Examined(
        repaired.summary(offset), [Damage(path, f"{what}; its sound frames were kept", lost)], opening
    )


def openings_kept(directory: Path, meta: Meta) -> set[int]:
    """Return the opening keys of files in the quarantine. Raises OSError."""
    found, place = set[int](), directory / layout.QUARANTINE
    for path in place.iterdir() if place.is_dir() else ():
        data = path.read_bytes()
        if path.suffix == ".tail":  # it begins where a frame did
            frame = segment.frame_at(data, 0)
            is_sealed = frame is not None and frame.columns & SEALED
            opening = opening_number(data[FRAME.size :]) if is_sealed else None
        else:
            opening = opening_of(
                data, meta.epoch, meta.salt, layout.base_of(path.name[: layout.DIGITS + 4]) or 0
            )
        if opening is not None:
            found.add(opening)
    return found


def check_drops(directory: Path, meta: Meta | None) -> tuple[str, list[Drop]]:
    """Return the problem of a stream's record of drops (or ""), and its valid records. Raises OSError."""
    try:
        data = (directory / record.NAME).read_bytes()
    except FileNotFoundError:
        return (f"it is missing; {_BACK}" if _has_drops(directory, meta) else ""), []
    found, damaged = record.examine(data)
    if damaged:
        return f"it is damaged, and {len(found)} of its records are sound; {_BACK}", found
    if meta is not None and meta.drops and len(data) < record.ROOM:
        return f"it was cut short; {_BACK}", found
    return "", found


def _has_drops(directory: Path, meta: Meta | None) -> bool:
    """Return whether the record must exist. Older versions created it with the first drop."""
    if meta is not None and (meta.drops or meta.settings.memory):
        return meta.drops
    return min(layout.segment_bases(directory), default=0) > 0


def repair_drops(files: Files, directory: Path, meta: Meta) -> list[Damage]:
    """Quarantine a damaged record of drops, and rewrite its valid records if the disk has space."""
    path = directory / record.NAME
    what, found = check_drops(directory, meta)
    if not what:
        return []
    done = "recreated"
    try:
        if path.exists():
            keep(files, directory, path, "damaged")
            done = "quarantined, and rewritten with its sound records"
        record.make(files, directory, found)
        return [Damage(path, f"{what}; {done}", [])]
    except OSError as error:  # the stream is opened anyway, and bad records are skipped
        return [Damage(path, f"{what}; it cannot be quarantined: {error.strerror}", [])]


def walk(
    data: bytes, base: int, following: int | None, salt: int, opened: Opener | None = None
) -> tuple[Indexer, list[tuple[int, int]], list[tuple[int, int]], int]:
    """Return (index, gaps in the numbers, byte ranges of valid frames, end of the last valid frame).

    With `opened`, a frame is valid only if it can be decrypted.
    """
    index, holes, spans = Indexer(base), [], []
    pos: int | None = HEADER.size
    end = HEADER.size
    while pos is not None:
        start = pos
        for frame in segment.scan(data, pos, salt):
            if frame.base < index.next or (following is not None and frame.next > following):
                break
            if opened is not None and opened(data, frame) is None:
                break
            if frame.base > index.next:
                holes.append((index.next, frame.base - 1))
            index.add(frame, frame.start)
            pos = end = frame.end
        if pos > start:
            spans.append((start, pos))
        pos = segment.resync(data, pos, salt) if len(data) - pos > 0 else None
    return index, holes, spans, end


def keep(files: Files, directory: Path, path: Path, why: str) -> Path:
    """Link a file into the quarantine durably, under a free name, because its own name may be reused."""
    place = directory / layout.QUARANTINE
    files.make_directory(place)
    number = sum(1 for _ in place.iterdir())
    kept = place / f"{path.name}.{number}.{why}"
    os.link(path, kept)
    files.sync_directory(place)
    return kept


def keep_tail(files: Files, directory: Path, base: int, offset: int, data: bytes) -> bool:
    """Keep the bytes truncated from a segment at `offset`; False if the disk is full. Raises OSError."""
    place = directory / layout.QUARANTINE
    path = place / f"{base:0{layout.DIGITS}d}.{offset}.tail"
    try:
        files.make_directory(place)
        files.replace(path, data)
    except OSError as error:
        if error.errno not in FULL:
            raise
        path.with_name(path.name + layout.TEMPORARY).unlink(missing_ok=True)
        return False
    return True


def rewrite(
    files: Files, path: Path, base: int, meta: Meta, frames: list[bytes], opening: int | None
) -> None:
    """Replace a segment by one with these frames, atomically and durably; deletes its index."""
    files.unlink(path.with_suffix(layout.INDEX))
    files.replace(path, b"".join([segment.encode_header(base, meta.epoch, 0, meta.salt, opening), *frames]))
