"""Checks a data directory without changing it, and repairs it.

`verify` reads every frame of every segment, the indexes, both copies of each definition and of each key, and
the records of drops. The service may be running; what it is writing at that moment does not count as damage.
With the keys, it also decrypts encrypted frames. Without them it checks framing, lengths and checksums, and
reports how many frames it could not decrypt, which is not damage.

`repair` needs a stopped service. It writes damaged copies of keys again. It opens every stream, which repairs
what a crash has left and damaged records of drops. It checks every frame, quarantines damage, and rebuilds
indexes and lost definitions (with default settings and the directory's name; the caller provides the stored
definition).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

from msgspec import Struct

from bridge import encryption
from bridge.encryption import Keys
from bridge.streams import formats, layout, meta, recovery, segment
from bridge.streams.drops import LOSSES, NAME, DropLog
from bridge.streams.layout import Files
from bridge.streams.meta import Meta, StorageSettings
from bridge.streams.reader import stream_directories
from bridge.streams.sealing import Opener, Sealing
from bridge.streams.store import MEMORY, open_stopped

KEYS = f"{encryption.DIRECTORY}/"  # stands in reports for the keys; no stream can have this name

Progress = Callable[[str, int, int], None]  # stream, bytes read, bytes in all


class Problem(Struct, rename="camel"):
    """A problem: the file, a description, and the sequence numbers that cannot be read because of it."""

    path: str
    what: str
    lost: list[tuple[int, int]] = []


class Checked(Struct, rename="camel"):
    """One stream as it was found, or, with the name `KEYS`, damaged keys. Sizes in bytes.

    `messages` can be read, given the key of the `encrypted` segments. `unopened` frames were not decrypted,
    for lack of the key. `lost` has the numbers lost to earlier damage, and `quarantined` its files; these are
    not current problems. `closed`: `repair` could not open the stream, so it is not repaired.
    """

    name: str
    directory: str
    oldest: int = 0
    newest: int = -1
    messages: int = 0
    segments: int = 0
    frames: int = 0
    encrypted: int = 0
    unopened: int = 0
    closed: bool = False
    total_bytes: int = 0
    lost: list[tuple[int, int]] = []
    quarantined: list[str] = []
    rebuilt: list[str] = []  # indexes that do not match their segment: the next use makes them again
    problems: list[Problem] = []


def verify(data_dir: Path, progress: Progress = lambda *_: None, keys: Keys | None = None) -> list[Checked]:
    """Check all streams of a data directory, without changing it; with `keys`, decrypt encrypted frames.

    Damaged keys are at the end. Raises OSError if it cannot be read, or EncryptionKeyError if the key is
    missing or wrong.
    """
    if keys is not None:
        keys.check()
    found = [_verify(data_dir, directory, progress, keys) for directory in stream_directories(data_dir)]
    return found + _check_keys(data_dir)


def _check_keys(data_dir: Path) -> list[Checked]:
    problems = [
        Problem(str(path), "one of its two copies is damaged")
        if number == 1
        else Problem(str(path), "both its copies are damaged; restore it from a backup")
        for path, number in encryption.damaged(data_dir).items()
    ]
    return [Checked(KEYS, str(data_dir / encryption.DIRECTORY), problems=problems)] if problems else []


def _verify(data_dir: Path, directory: Path, progress: Progress, keys: Keys | None) -> Checked:
    try:
        known, bad = meta.load(directory)
    except PermissionError:
        raise
    except OSError as error:
        problem = Problem(str(error.filename), f"it cannot be read: {error.strerror}")
        return Checked(unquote(directory.name), str(directory), problems=[problem])
    name = known.name if known is not None else unquote(directory.name)
    data = _data_of(data_dir, directory, known)
    found = Checked(name, str(directory))
    if known is None:
        found.problems.append(Problem(str(directory), "both copies of the definition are damaged"))
    else:
        found.problems += [
            Problem(str(path), "this copy of the definition is damaged or missing") for path in bad
        ]
    if not data.is_dir():
        return found
    quarantine = data / layout.QUARANTINE
    if quarantine.is_dir():
        found.quarantined = sorted(map(str, quarantine.iterdir()))
    drops = DropLog(Files(), data)
    what, _ = recovery.check_drops(data, known)
    if what and what == recovery.check_drops(data, known)[0]:  # not just being written
        found.problems.append(Problem(str(data / NAME), what))
    bases = layout.segment_bases(data)
    sizes = [_size(layout.segment_path(data, base)) for base in bases]
    done = 0
    first = bases[0] if bases else drops.first_live(0)  # without a file, all messages were dropped
    found.oldest, found.newest = drops.first_live(first), first - 1
    for number, base in enumerate(bases):
        following = bases[number + 1] if number + 1 < len(bases) else None
        with contextlib.suppress(FileNotFoundError):  # retention has just deleted it
            _check(found, drops, data, base, following, known, keys)
        done += sizes[number]
        progress(name, done, sum(sizes))
    live = drops.live(found.oldest, found.newest) if found.oldest <= found.newest else []
    found.messages = sum(last - first + 1 for first, last in live)
    for problem in found.problems:
        found.messages -= sum(last - first + 1 for first, last in problem.lost)
    drops.refresh()  # a drop is recorded before its file is deleted
    if not what and (missing := drops.live(0, first - 1)):
        found.problems.append(Problem(str(data), "its first segments are missing", missing))
    found.lost = [(drop.first, drop.last) for drop in drops.ranges if drop.reason in LOSSES]
    return found


def check_end(data_dir: Path, directory: Path) -> list[Problem]:
    """Return the problems of the last segment, whose damaged end a reader takes for an unfinished write."""
    known, _ = meta.load(directory)
    data = _data_of(data_dir, directory, known)
    bases = layout.segment_bases(data)
    found = Checked(directory.name, str(directory))
    if bases:
        _check(found, DropLog(Files(), data), data, bases[-1], None, known)
    return found.problems


def _data_of(data_dir: Path, directory: Path, known: Meta | None) -> Path:
    memory = known is not None and known.settings.memory
    return data_dir / MEMORY / directory.name if memory else directory


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _check(
    found: Checked,
    drops: DropLog,
    data: Path,
    base: int,
    following: int | None,
    known: Meta | None,
    keys: Keys | None = None,
) -> None:
    path = layout.segment_path(data, base)
    content = path.read_bytes()
    formats.refuse_old(path, content)
    header = segment.decode_header(content)
    salt = known.salt if known is not None else header[2] if header is not None else 0
    epoch = known.epoch if known is not None else header[1] if header is not None else 0
    opening = recovery.opening_of(content, epoch, salt, base)
    opened: Opener | None = None
    if opening is not None and keys is not None:
        if keys.knows(opening):
            opened = Sealing(keys, data.name).opener(epoch, base)
        else:
            found.problems.append(Problem(str(path), f"it cannot be decrypted: {keys.missing(opening)}"))
    index, holes, spans, end = recovery.walk(content, base, following, salt, opened)
    pattern = segment.filling(salt)
    written = segment.written_end(content, end, pattern)
    found.segments += 1
    found.total_bytes += len(content) if written > end else end
    frames = sum(1 for a, b in spans for _ in segment.scan(content[a:b], 0, salt))
    found.frames += frames
    found.encrypted += opening is not None
    found.unopened += frames if opening is not None and opened is None else 0
    found.newest = max(found.newest, index.next - 1)
    expected = (base, known.epoch, known.salt) if known is not None else header
    if len(content) >= segment.HEADER.size and (header is None or header != expected):
        found.problems.append(Problem(str(path), "its header is damaged or belongs to another stream"))
    if following is not None and index.next < following:
        holes = [*holes, (index.next, following - 1)]
    lost = [part for first, last in holes for part in drops.live(first, last)]
    closed = following is not None and recovery.read_index(data, base, len(content)) is not None
    # A running service may have changed it, so check again before it counts as a problem.
    if lost and _follows(data, base) == following:
        found.problems.append(Problem(str(path), "frames are damaged or missing", lost))
    elif _is_broken(content, spans, end, closed=closed):
        if path.read_bytes() == content:
            found.problems.append(
                Problem(str(path), "frames are damaged; their messages were dropped before")
            )
    elif following is None and written > end and path.read_bytes() == content:
        claimed = segment.frame_at(content, end)
        if claimed is not None and not segment.is_torn(content, claimed, pattern):
            found.problems.append(Problem(str(path), f"the last frame, at byte {end}, is damaged"))
        else:
            found.problems.append(Problem(str(path), f"a torn tail of {written - end} bytes"))
    index_path = path.with_suffix(layout.INDEX)
    if (
        following is not None
        and index_path.exists()
        and recovery.read_index(data, base, len(content)) is None
        and _size(path) == len(content)
        and index_path.exists()
    ):
        found.rebuilt.append(str(index_path))


def _is_broken(content: bytes, spans: list[tuple[int, int]], end: int, *, closed: bool) -> bool:
    """Return whether there is damage before the last valid frame or, in a closed segment, after it."""
    whole = all(a == b for (_, a), (b, _) in pairwise([(0, segment.HEADER.size), *spans]))
    return not whole or (closed and end < len(content))


def _follows(data: Path, base: int) -> int | None:
    """Return the first number of the segment that currently follows this one."""
    return next((other for other in layout.segment_bases(data) if other > base), None)


def repair(
    data_dir: Path,
    definition: Callable[[str], bytes],
    progress: Progress = lambda *_: None,
    keys: Keys | None = None,
) -> list[Checked]:
    """Repair a data directory. Returns each stream as it is afterwards, and the problems found.

    `definition` returns the definition to store for a stream (by name) that has lost it. Raises
    DataDirectoryBusy while the service runs, EncryptionKeyError without the key of encrypted streams, or
    OSError.
    """
    keys = keys or Keys(data_dir)
    keys.check()
    repaired: dict[str, list[Problem]] = {}
    damaged_keys = _check_keys(data_dir)
    keys.repair()
    for directory in stream_directories(data_dir):
        problem = _rebuild_definition(directory, definition)
        if problem is not None:
            repaired.setdefault(unquote(directory.name), []).append(problem)

    def note(stream: str, what: str) -> None:
        path, _, rest = what.partition(": ")  # an event about a file begins with its path
        problem = Problem(path, rest) if path.startswith(str(data_dir)) else Problem(str(data_dir), what)
        repaired.setdefault(stream, []).append(problem)

    closed = asyncio.run(_repair(data_dir, note, progress, keys))
    after = [checked for checked in verify(data_dir, keys=keys) if checked.name != KEYS]
    for checked in after:
        checked.problems, checked.closed = repaired.get(checked.name, []), checked.name in closed
    return after + damaged_keys


async def _repair(
    data_dir: Path, note: Callable[[str, str], None], progress: Progress, keys: Keys
) -> set[str]:
    """Repair the streams that can be opened; return the names of the others."""
    async with open_stopped(data_dir, on_event=note, keys=keys) as store:
        for stream in store.streams.values():
            bases = list(stream.log.sizes)[:-1]  # opening has checked the last one
            for done, base in enumerate(bases, 1):
                stream.repair(base)
                progress(stream.name, done, len(bases))
        return set(store.unopened)


def _rebuild_definition(directory: Path, definition: Callable[[str], bytes]) -> Problem | None:
    """Write a definition with default settings if both copies are lost; the epoch is in the segments."""
    try:
        known, _ = meta.load(directory)
    except PermissionError:
        raise
    except OSError:  # it is not damaged, and the start reports it
        return None
    if known is not None:
        return None
    epoch = salt = 0
    for base in layout.segment_bases(directory):
        with layout.segment_path(directory, base).open("rb") as file:
            header = segment.decode_header(formats.present_header(file.read(segment.HEADER.size)))
        if header is not None:
            _, epoch, salt = header
            break
    name = re.sub(r"[^\w ,.\-]", "-", unquote(directory.name))  # the directory may have been renamed
    meta.save(Files(), directory, Meta(name, epoch, salt, StorageSettings(), definition(name)))
    return Problem(str(directory), "the definition was lost; written again with default settings")
