"""Checks whether the files of a table are there: a table whose files are gone is not complete.

The files that the current version of a table references are compared with what is there, by name and size:
data files, delete files, manifests and manifest lists of Iceberg; data files and deletion vectors of Delta,
whose log is read whole whenever the table is opened. S3 is listed, a request per 1,000 files, also at older
places of the table, however they are spelt. What cannot be looked at (another kind of store, no right to list
it) is `unseen`: it is named, and nothing is complete then.

`look` compares all of them: `report --deep`, `repair` and `prune` do. An ordinary run compares a share, in
the order of days and names (`share`). It grows with the time since the last look, such that all are compared
every 12 hours, or in each run if runs are rarer: so what is known is a day old at most. A share has at least
1,000 files, which one request lists. Once something is damaged, each run compares all until nothing is. What
is known, and where the next share begins, is in `files.json` beside the states. A run overwrites it; without
it, all files are compared.

The numbers of lost rows follow from the bounds of the file and the state: those that the table should have
between these bounds, and that no other file is known to have. They are exact if there are as many as rows.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from bridge.ingest.columns import IDENTITY
from bridge.ingest.errors import Vanished, line
from bridge.ingest.planner import StreamId
from bridge.ingest.sinks.base import DATA, DELETES, MANIFEST_OF_DELETES
from bridge.ingest.store import StorageLocation
from bridge.objectkeys import MAX_SEQUENCE
from bridge.ranges import Ranges

if TYPE_CHECKING:
    from bridge.ingest.sinks.base import Held, Part, Sink
    from bridge.ingest.state import TableState

CYCLE_MS = 12 * 3600 * 1000  # in which ordinary runs compare all files
LEAST = 1000  # files of a share: one request
RECORD = "files.json"
LOOKS = 5  # at a table that others keep changing
KEPT = 1000  # damages that the record names
START = ("", "")


@dataclass(slots=True)
class Damage:
    """A file that is gone (`found` is None) or has another size, in bytes, and the rows that it had.

    `numbers` are [gateway, stream, epoch, first, last]; unless `exact`, the lost ones are among them.
    """

    path: str
    kind: str
    size: int | None
    found: int | None
    rows: int
    numbers: list[list[Any]] = field(default_factory=list)
    exact: bool = False

    @property
    def why(self) -> str:
        if self.found is None:
            return "is gone"
        return f"has {self.found} bytes instead of {'more' if self.size is None else self.size}"


@dataclass(slots=True)
class Look:
    """What is known of the files: the damaged, and why others are `unseen`; times are Unix time in ms.

    All files were compared after `full` (None: never yet), those up to `after` since `began`.
    """

    damages: list[Damage] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    compared: int = 0
    full: int | None = None
    began: int = 0
    at: int = 0
    after: tuple[str, str] = START

    @property
    def whole(self) -> bool:
        """Whether nothing is known to be damaged or unseen."""
        return not self.damages and not self.unseen

    def numbers(self) -> dict[StreamId, Ranges]:
        """Return the numbers whose rows are lost, or may be."""
        found: dict[StreamId, Ranges] = defaultdict(Ranges)
        for damage in self.damages:
            for *name, first, last in damage.numbers:
                found[StreamId(*name)].add(first, last)
        return found


def look(sink: Sink, state: TableState, now: int | None = None) -> Look:
    """Compare all files of the table as it is now; `state` is that of this version.

    What is gone because another run has replaced it meanwhile is looked at again.
    """
    now = time.time_ns() // 1_000_000 if now is None else now
    for _ in range(LOOKS):
        at, _, place, parts = sink.parts()
        found = compared(list(parts), place, state, Look(full=now, began=now, at=now))
        if found.whole or sink.parts().at == at:
            break
    return found


def share(sink: Sink, state: TableState, now: int) -> Look:
    """Compare the share of an ordinary run, and return what is known of all; `now` is Unix time in ms.

    A failure ends no run: all is committed.
    """
    try:
        return _share(sink, state, now)
    except Exception as error:  # of the network, or of a library
        return Look(unseen=[f"{sink.name}: {line(error)}"])


def _share(sink: Sink, state: TableState, now: int) -> Look:
    known = recorded(sink)
    _, count, place, parts = sink.parts(known.after)
    most = max(LEAST, -(-count * (now - known.at) // CYCLE_MS))
    if known.full is None or not known.whole or most >= count:
        found = look(sink, state, now)
    else:
        some = list(islice(parts, most))
        found = compared(some, place, state, Look([], [], 0, known.full, known.began, now))
        if len(some) == most:
            found.after = some[-1].order()
        else:  # all were compared since it began, and the next share begins again
            found.full, found.began = known.began, now
        if not found.whole:
            found = look(sink, state, now)
    record(sink, found)
    return found


def recorded(sink: Sink) -> Look:
    """Return what the runs so far have found; nothing is known without a record, or with a damaged one."""
    with suppress(Vanished, LookupError, TypeError, ValueError):
        raw = json.loads(sink.state().open().get(RECORD))
        raw["damages"] = [Damage(**damage) for damage in raw["damages"]]
        raw["after"] = (str(raw["after"][0]), str(raw["after"][1]))
        found = Look(**raw)
        if all(isinstance(ms, int) for ms in (found.at, found.began, found.full)):
            return found
    return Look()


def record(sink: Sink, found: Look) -> None:
    """Keep what was found for the next run and the next report."""
    raw = asdict(found) | {"damages": [asdict(damage) for damage in found.damages[:KEPT]]}
    sink.state().open().put(RECORD, json.dumps(raw, separators=(",", ":")).encode())


def spellings(path: str) -> list[tuple[str, str]]:
    """Return where a file may be that a table spells like this: bucket ("": local) and key or absolute path.

    Nothing is returned for another kind of store.
    """
    scheme, colon, rest = path.partition(":")
    if not colon or "/" in scheme:
        scheme, rest = "file", path
    if scheme.lower() == "file":
        bucket, key = "", str(Path(rest).absolute())
    elif scheme.lower() in ("s3", "s3a", "s3n"):
        bucket, _, key = rest.lstrip("/").partition("/")
    else:
        return []
    plain = [key, re.sub("//+", "/", key)]
    return list(dict.fromkeys((bucket, one) for one in [*plain, *map(unquote, plain)]))


def compared(parts: list[Part], place: StorageLocation, state: TableState, found: Look) -> Look:
    """Add to `found` what is damaged or unseen of these files; `place` is the table's own."""
    own = (spellings(place.url) or [("", "")])[0]
    groups: dict[tuple[str, bool], set[str]] = defaultdict(set)  # by bucket, and whether at the own place
    where = {part.path: spellings(part.path) for part in parts}
    for bucket, key in {one for places in where.values() for one in places}:
        groups[bucket, bucket == own[0] and key.startswith(f"{own[1].rstrip('/')}/")].add(key)
    sizes: dict[tuple[str, str], int] = {}
    failed: dict[str, str] = {}
    for (bucket, _), keys in groups.items():
        try:
            sizes |= {(bucket, key): size for key, size in _sizes(bucket, keys, place)}
        except Exception as error:  # of the network, or no right to list it
            failed[bucket] = line(error)
    found.compared = len(parts)
    lost: dict[tuple[str, str], tuple[Part, int | None]] = {}
    for part in parts:
        there = [sizes[one] for one in where[part.path] if one in sizes]
        blind = [failed[bucket] for bucket, _ in where[part.path] if bucket in failed]
        if not where[part.path] or (blind and not there):
            found.unseen.append(f"{part.path}: {blind[0] if blind else 'no place that can be looked at'}")
        elif not there or part.size not in (None, *there) or max(there) < part.least:
            lost[part.path, part.of] = (part, max(there, default=None))
        elif part.problem:
            found.unseen.append(f"{part.path}: {part.problem}")
    victims = {key: concerned(part, parts) for key, (part, _) in lost.items()}
    held = _held(parts) if lost else {}
    for at, (part, size) in lost.items():
        numbers: dict[StreamId, Ranges] = defaultdict(Ranges)
        for one in victims[at]:
            for name, ranges in lacking(state, one, held).items():
                numbers[name].update(ranges)
        rows = sum(one.rows for one in victims[at])
        listed = [[*name, *pair] for name, ranges in sorted(numbers.items()) for pair in ranges]
        exact = 0 < rows == sum(ranges.count() for ranges in numbers.values())
        found.damages.append(Damage(part.path, part.kind, part.size, size, rows, listed, exact))
    return found


def concerned(lost: Part, parts: Iterable[Part]) -> list[Part]:
    """Return the files whose rows cannot be read without this one: for a delete file, others."""
    if lost.kind not in (DELETES, MANIFEST_OF_DELETES):
        return [lost]
    return [
        part
        for part in parts
        if part.kind == DATA and (part.path == lost.of if lost.of else lost.day in ("", "0", part.day))
    ]


def _sizes(bucket: str, keys: set[str], place: StorageLocation) -> Iterator[tuple[str, int]]:
    """Yield the sizes of those of the files that exist."""
    if not bucket:
        for path in keys:
            with suppress(FileNotFoundError, NotADirectoryError):
                yield path, os.stat(path).st_size
        return
    last, prefix = max(keys), os.path.commonprefix(list(keys)).rpartition("/")  # noqa: RUF071 # of keys
    store = replace(place, url=f"s3://{bucket}").open()
    for entry in store.under(prefix[0] + prefix[1], min(keys)[:-1]):
        if entry.key in keys:
            yield entry.key, entry.size
        if entry.key >= last:
            return


def lacking(state: TableState, part: Part, held: dict[StreamId, Ranges]) -> dict[StreamId, Ranges]:
    """Return the numbers that a lost file may have had: those of the state between its bounds.

    If the bounds do not say exactly which, the numbers that others have (`held`) are none of them.
    """
    found = {}
    own = single(part)
    for name, stream in state.streams.items():
        first, last = 0, MAX_SEQUENCE
        if part.bounds is not None:
            values = zip(IDENTITY.names, (*name[:2], str(name.epoch)), strict=False)
            if not all(part.bounds[key][0] <= value <= part.bounds[key][1] for key, value in values):
                continue
            first, last = part.bounds["sequence_number"]
        numbers = Ranges(stream.covered.common(first, last))
        for pair in held.get(name, ()) if own is None else ():
            numbers.take(*pair)
        if numbers:
            found[name] = numbers
    return found


def _held(parts: Iterable[Part]) -> dict[StreamId, Ranges]:
    """Return the numbers of the files whose bounds say exactly which they have."""
    found: dict[StreamId, Ranges] = defaultdict(Ranges)
    for part in parts:
        if (name := single(part)) is not None and part.bounds is not None:
            found[name].add(*part.bounds["sequence_number"])
    return found


def single(file: Held | Part) -> StreamId | None:
    """Return the stream of a file that holds all numbers between its bounds; None: its rows must be read."""
    if file.bounds is None or any(
        file.bounds[name][0] != file.bounds[name][1] for name in IDENTITY.names[:3]
    ):
        return None
    first, last = file.bounds["sequence_number"]
    stream = named(*(file.bounds[name][0] for name in IDENTITY.names[:3]))
    return stream if first >= 0 and file.rows == last - first + 1 else None


def named(gateway: Any, stream: Any, epoch: Any) -> StreamId | None:
    """Return the stream of a row, if a message can have these values."""
    if not gateway or not stream or not epoch or not re.fullmatch("0|[1-9][0-9]{,18}", epoch):
        return None
    return StreamId(gateway, stream, int(epoch))
