"""All that the job deletes in a warehouse or a landing bucket it deletes here: `delete` is the only way.

A caller names candidates: objects below one place. One of them is deleted only if

* nothing that is kept refers to it. The references are read after the candidates are known, and immediately
  before the deletion: for each `BATCH` of objects again;
* it is below the place, and in no folder of another table (`listed`);
* it is older than the caller says (`listed`).

The same object has many spellings: `s3`, `s3a` and `s3n`; `file:/x`, `file:///x` and `/x`; with and without
percent signs; `//`, `/./` and a `/` at the end; symbolic links. `normal` gives one form for all of them. It
is coarse on purpose: `a b` and `a%20b` may be two objects of S3, and then a reference to one keeps both.

What this cannot decide it does not delete. A key without a normal form stays, and is named. A reference
without one stops everything, and so does one into another bucket or scheme whose file is named as a
candidate: both may be the same object (Iceberg's own procedure stops at such a mismatch too).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from bridge.ingest.errors import IngestError
from bridge.ingest.store import ALWAYS, S3_SCHEMES, StorageLocation

BATCH = 1000  # objects between two looks at the references; S3 deletes so many in one request
TABLE = re.compile(r"(.+)/(_delta_log/|metadata/[^/]+\.metadata\.json$)")  # in a folder below
ODD = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")

# Gives the locations that are kept. A further call may leave out what an earlier one gave.
References = Callable[[], Iterable[str]]


class Spot(NamedTuple):
    """The normal form of a location: `s3://bucket` or `file://`, and a path without `/` at its ends."""

    of: str
    path: str


@dataclass(slots=True)
class Deleted:
    """How many objects were deleted, and which were left because it is not clear what they are."""

    count: int = 0
    unclear: list[str] = field(default_factory=list)

    def add(self, more: Deleted) -> None:
        self.count += more.count
        self.unclear += more.unclear


def delete(place: StorageLocation, keys: Iterable[str], references: References) -> Deleted:
    """Delete the objects below `place` with these keys, in this order, except those that are referred to.

    A kill leaves the rest; to repeat it is safe. Raises IngestError if the place or a reference has no normal
    form, or may be a candidate under another name; and whatever the references and the store raise.
    """
    root, done = _root(place), Deleted()
    folder = f"{root.path}/" if root.path else ""
    candidates: dict[str, list[str]] = {}
    for key in keys:
        spot = normal(f"{root.of}/{folder}{key}")
        if spot is None or spot.of != root.of or not spot.path.startswith(folder):
            done.unclear.append(key)
        else:
            candidates.setdefault(spot.path, []).append(key)
    store = place.open() if candidates else None
    while candidates:
        _keep(root, candidates, references())
        batch = [key for path in list(islice(candidates, BATCH)) for key in candidates.pop(path)]
        if batch and store is not None:
            store.delete(batch)
        done.count += len(batch)
    return done


def _keep(root: Spot, candidates: dict[str, list[str]], references: Iterable[str]) -> None:
    """Remove from the candidates what is referred to."""
    elsewhere: dict[str, str] = {}  # by file name
    for location in references:
        spot = normal(location)
        if spot is None:
            raise IngestError(
                f"{location}: the table needs this file, and it is not clear where it is, so nothing was "
                "deleted; let the engine that added it rewrite it below the table's place"
            )
        if spot.of == root.of:
            candidates.pop(spot.path, None)
        else:
            elsewhere[spot.path.rpartition("/")[2]] = location
    for path in candidates if elsewhere else ():
        if other := elsewhere.get(path.rpartition("/")[2]):
            raise IngestError(
                f"{other}: the table needs this file, and {root.of}/{path} has the same name in another "
                "bucket or scheme, so nothing was deleted: they may be the same file; let an engine rewrite "
                "the table's files below its place, and expire the versions before"
            )


def listed(
    place: StorageLocation,
    prefix: str,
    before: float = ALWAYS,
    wanted: Callable[[str], bool] = lambda key: True,
) -> tuple[list[str], Deleted]:
    """Return the keys that begin with `prefix`, are older than `before` (Unix time in ms), and `wanted`.

    Those in the folders of other tables are left, and the folders are named.
    """
    keys, others = [], set()
    for entry in place.open().under(prefix):
        if found := TABLE.match(entry.key):
            others.add(f"{found[1]}/")
        elif entry.modified < before and wanted(entry.key):
            keys.append(entry.key)
    mine = [key for key in keys if not any(key.startswith(folder) for folder in others)]
    return mine, Deleted(0, sorted(f"{folder} (another table)" for folder in others))


def sweep(
    place: StorageLocation,
    prefix: str,
    references: References,
    before: float = ALWAYS,
    wanted: Callable[[str], bool] = lambda key: True,
) -> Deleted:
    """List and `delete`; unfinished objects are deleted too, but not counted."""
    keys, done = listed(place, prefix, before, wanted)
    done.add(delete(place, keys, references))
    place.open().abort(prefix, wanted, before)
    return done


def normal(location: str) -> Spot | None:
    """Return the normal form of an absolute location; None if it has none."""
    found = re.fullmatch("(?:([A-Za-z][A-Za-z0-9+.-]*):)?(?://([^/]*))?(/.*)?", location, re.DOTALL)
    if found is None:
        return None
    scheme, authority, path = ((part or "") for part in found.groups())
    scheme = scheme.lower()
    if not scheme:  # a plain path, which may begin with //
        scheme, authority, path = "file", "", location
    if scheme in S3_SCHEMES:
        return _spot(f"s3://{authority}", path) if authority else None
    if scheme == "file" and authority in ("", "localhost"):
        return _spot("file://", path) if path.startswith("/") else None
    return _spot(f"{scheme}://{authority}", path)


def _root(place: StorageLocation) -> Spot:
    url = place.url if re.match("[A-Za-z0-9]+:", place.url) else str(Path(place.url).absolute())
    found = normal(f"{url.rstrip('/')}/")  # all of it is a folder
    if found is None or re.search("[?#]", url if place.is_s3 else ""):
        raise IngestError(f"{place.url}: it is not clear which place this is, so nothing was deleted")
    return found


def _spot(of: str, path: str) -> Spot | None:
    folder, _, name = path.rpartition("/")
    parts, last = _folder(folder, local=of == "file://"), _decoded(name)
    return None if parts is None or last is None else Spot(of, "/".join([*parts, *last]))


@lru_cache(maxsize=1 << 12)
def _folder(path: str, *, local: bool) -> list[str] | None:
    return _decoded(path, os.path.realpath if local else str)


def _decoded(path: str, resolved: Callable[[str], str] = str) -> list[str] | None:
    """Return the parts of a path, decoded until nothing is left to decode, or None."""
    before = None
    while path != before:
        before = path
        try:
            path = unquote(resolved(path), errors="strict")
        except ValueError:  # no UTF-8, or a zero byte
            return None
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return None if ".." in parts or ODD.search(path) else parts
