"""How much of its history an Iceberg table keeps, so that a round costs the same after a year.

Every commit copies the list of snapshots and adds metadata files. So a commit of the job also drops old
snapshots, some at a time, and then deletes the files that only these used:

* A snapshot that was current within the last hour stays, and so does its metadata file: a reader may use it.
* The first snapshot of each day of the last week stays if it names a state, so the table can be rolled back
  to it.
* Snapshots with a branch or tag stay, and so do those that others have staged outside the table's history.
* Everything since the round that the commit builds on stays: the verdict compares these snapshots.

The new snapshot names the manifest lists of the dropped ones in its summary, so that both become visible
together. A job that is killed before it has deleted them leaves them to the next commit that drops some. That
commit deletes a manifest list after its manifests, so it finds what is left. Files of commits that were never
made stay until `compact --orphan-days`. All deletions go through `deletes`, with the references of `Kept`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self
from zlib import decompressobj

from pyiceberg.manifest import ManifestFile, read_manifest_list
from pyiceberg.table.update.snapshot import ExpireSnapshots

from bridge.ingest import deletes
from bridge.ingest.deletes import Deleted, sweep
from bridge.ingest.errors import IngestError
from bridge.ingest.sinks.snapshots import ancestry, state_version
from bridge.ingest.store import ObjectStore, StorageLocation, below

if TYPE_CHECKING:
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

EXPIRED = "streambridge.expired"  # in the summary of a snapshot: manifest lists that nothing needs since
LEAST, MOST = 30, 100  # snapshots dropped in one commit; an older version may have left thousands
READERS = timedelta(hours=1)
WEEK_MS, DAY_MS = 7 * 24 * 3600 * 1000, 24 * 3600 * 1000
LOG = 25  # earlier metadata files that a table keeps, in steps of so many
DELETE_METADATA = "write.metadata.delete-after-commit.enabled"
DELETE_DATA = "gc.enabled"  # false if data files may be of other tables too
DAY_BYTES = 4  # of a day in the bounds of a manifest
METADATA = ".metadata.json"
HEAD = 4096  # bytes of a metadata file, with the table's identity
METADATA_LOG = "write.metadata.previous-versions-max"
# Few entries are rewritten at a time: pyiceberg takes tens of us for each. These are not stored in the table,
# and its own properties come first.
MERGING = {
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.min-count-to-merge": "30",
    "commit.manifest.target-size-bytes": str(64 << 10),
}


def obsolete(table: Table, previous: int | None, keep: timedelta, now: int) -> list[Snapshot]:
    """Return the snapshots that the commit of a round on top of the state `previous` drops; `now` is in ms.

    Those that were current in the time `keep` stay.
    """
    line = list(ancestry(table))
    since = max((at for at, one in enumerate(line) if state_version(one) == previous), default=len(line))
    heads = {ref.snapshot_id for ref in table.metadata.refs.values()}
    on_line = {snapshot.snapshot_id for snapshot in line}
    # earlier days, and what was rolled back
    others = [
        snapshot
        for snapshot in table.metadata.snapshots
        if snapshot.snapshot_id not in on_line and state_version(snapshot) is not None
    ]
    days = {snapshot.timestamp_ms // DAY_MS for snapshot in others}
    gone = [snapshot for snapshot in others if snapshot.timestamp_ms < now - WEEK_MS]
    for snapshot, following in pairwise(line[since:][::-1]):
        if following.timestamp_ms >= now - keep // timedelta(milliseconds=1):
            break
        day = snapshot.timestamp_ms // DAY_MS
        recent = snapshot.timestamp_ms >= now - WEEK_MS
        if recent and day not in days and state_version(snapshot) is not None:
            days.add(day)
        else:
            gone.append(snapshot)
    gone = [snapshot for snapshot in gone if snapshot.snapshot_id not in heads]
    return gone[:MOST] if len(gone) >= LEAST else []


class _Shared(list[Any]):
    """A list of values that never change, so a copy of it need not copy them."""

    def __deepcopy__(self, memo: Any = None) -> Self:
        return type(self)(self)

    def __add__(self, more: Any) -> Self:
        return type(self)(super().__add__(more))


def shared(metadata: TableMetadata) -> dict[str, list[Any]]:
    """Return the lists of the metadata that grow with the history, such that copies share their entries.

    A transaction of pyiceberg makes a deep copy of all metadata every time that it looks at it: sixteen for
    one commit.
    """
    return {name: _Shared(getattr(metadata, name)) for name in ("snapshots", "snapshot_log", "metadata_log")}


class Drop(ExpireSnapshots):
    """Drops snapshots in a transaction, but never tagged ones or heads of branches.

    `by_ids` does the same, but copies all of the table's metadata twice for each snapshot.
    """

    def __init__(self, transaction: Transaction, gone: Iterable[Snapshot]) -> None:
        super().__init__(transaction)
        self._snapshot_ids_to_expire = {snapshot.snapshot_id for snapshot in gone}


def record(gone: Iterable[Snapshot]) -> dict[str, str]:
    """Return the properties about these snapshots for the summary of the commit that drops them."""
    lists = " ".join(snapshot.manifest_list.rpartition("/")[2] for snapshot in gone)
    return {EXPIRED: lists} if lists else {}


def metadata_log(table: Table, keep: timedelta, now: int) -> dict[str, str]:
    """Return the table properties to change so that metadata files older than the time `keep` are deleted.

    Where somebody has turned deletion off, none is changed.
    """
    properties = table.metadata.properties
    if properties.get(DELETE_METADATA, "true").lower() != "true":
        return {}
    limit = now - keep // timedelta(milliseconds=1)
    recent = sum(entry.timestamp_ms >= limit for entry in table.metadata.metadata_log)
    # and the one that was current when that time began
    wanted = {DELETE_METADATA: "true", METADATA_LOG: str(LOG * ((recent + 1) // LOG + 1))}
    return {name: value for name, value in wanted.items() if properties.get(name) != value}


def unfinished(table: Table) -> list[str]:
    """Return the manifest lists that the last commit that dropped snapshots was to delete, deleted or not."""
    for snapshot in ancestry(table):
        if snapshot.summary and (lists := snapshot.summary.additional_properties.get(EXPIRED)):
            folder = snapshot.manifest_list.rpartition("/")[0]
            return [f"{folder}/{name}" for name in lists.split()]
    return []


class Kept:
    """The locations that the kept snapshots of a table need; see `deletes.References`.

    `load` gives the table as it is now. Files in manifests of other days than those of `around` are left out:
    no file of these is among them. Without `files`, all but metadata is.
    """

    def __init__(
        self, load: Callable[[], Table | None], around: Collection[ManifestFile] = (), *, files: bool = True
    ) -> None:
        self._load, self._around, self._files = load, _days(around), files
        self._seen: set[str] = set()

    def __call__(self) -> Iterator[str]:
        table = self._load()
        if table is None:
            return
        metadata = table.metadata
        yield from (table.metadata_location, *_logged(table))
        yield from (entry.statistics_path for entry in (*metadata.statistics, *metadata.partition_statistics))
        for snapshot in metadata.snapshots:
            if snapshot.manifest_list in self._seen:
                continue
            yield snapshot.manifest_list
            for manifest in _manifests(table, snapshot.manifest_list):
                if manifest.manifest_path in self._seen:
                    continue
                yield manifest.manifest_path
                if self._files and _overlap(_days([manifest]), self._around):
                    for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                        yield entry.data_file.file_path
                self._seen.add(manifest.manifest_path)
            self._seen.add(snapshot.manifest_list)


def delete(load: Callable[[], Table | None], lists: Iterable[str], place: StorageLocation) -> Deleted:
    """Delete manifest lists, with the manifests and data files that no snapshot of the table uses any more.

    Such data files were merged or otherwise replaced. `place` is that of the table; files elsewhere stay, and
    are named. Files are deleted before what names them, so a killed deletion can be repeated.
    """
    table = load()
    if table is None:
        return Deleted()
    dropped = set(lists) - {snapshot.manifest_list for snapshot in table.metadata.snapshots}
    if not dropped:
        return Deleted()
    in_use = set(_in_use(table))
    unused: dict[str, ManifestFile] = {}
    there: list[str] = []
    for path in dropped:
        with suppress(FileNotFoundError):
            found = {one.manifest_path: one for one in _manifests(table, path)}
            unused |= {name: one for name, one in found.items() if name not in in_use}
            there.append(path)
    paths = [*sorted(_replaced(table, unused.values())), *unused, *there]
    keys = {path: below(table.location(), path) for path in paths}
    mine = [key for key in keys.values() if key]
    done = deletes.delete(place, mine, Kept(load, unused.values(), files=bool(unused)))
    if elsewhere := [path for path, key in keys.items() if not key]:
        kept = set(map(deletes.normal, Kept(load)()))
        done.unclear += [path for path in elsewhere if deletes.normal(path) not in kept]
    return done


def _replaced(table: Table, unused: Collection[ManifestFile]) -> set[str]:
    """Return the data files of these manifests."""
    gone: set[str] = set()
    for manifest in unused if collects(table) else ():
        with suppress(FileNotFoundError):  # the data files of such a manifest were deleted before it
            entries = manifest.fetch_manifest_entry(table.io, discard_deleted=False)
            gone.update(entry.data_file.file_path for entry in entries)
    return gone


def collects(table: Table) -> bool:
    """Return whether the table's data files are its own alone, and may be deleted."""
    return table.metadata.properties.get(DELETE_DATA, "true").lower() == "true"


def _days(manifests: Iterable[ManifestFile]) -> tuple[int, int] | None:
    """Return the first and last day of the files in manifests; None if they may have other partitions."""
    found: list[int] = []
    for manifest in manifests:
        bounds = [bound for one in manifest.partitions or () for bound in (one.lower_bound, one.upper_bound)]
        if [len(bound or b"") for bound in bounds] != [DAY_BYTES, DAY_BYTES]:
            return None
        found += (int.from_bytes(bound or b"", "little", signed=True) for bound in bounds)
    return (min(found), max(found)) if found else None


def _overlap(one: tuple[int, int] | None, other: tuple[int, int] | None) -> bool:
    return one is None or other is None or (one[0] <= other[1] and other[0] <= one[1])


def replaced(table: Table, before: float) -> list[Snapshot]:
    """Return the snapshots that were replaced before a time (Unix, in ms); never heads and tagged ones."""
    heads = {ref.snapshot_id for ref in table.metadata.refs.values()}
    until = {older.snapshot_id: newer.timestamp_ms for newer, older in pairwise(ancestry(table))}
    return [
        snapshot
        for snapshot in table.metadata.snapshots
        if snapshot.snapshot_id not in heads
        and until.get(snapshot.snapshot_id, snapshot.timestamp_ms) <= before
    ]


def orphans(load: Callable[[], Table | None], place: StorageLocation, before: float) -> Deleted:
    """Delete files below `data/` and `metadata/` that the table does not name; `before` is Unix time in ms.

    Metadata files are left if the table has its metadata elsewhere. Raises IngestError if the table's folder
    is that of another table too.
    """
    table = load()
    if table is None:
        return Deleted()
    if not collects(table):
        raise IngestError(
            f"{'.'.join(table.name())}: it has {DELETE_DATA} = false: its files may be of other tables too, "
            "so nothing was deleted"
        )
    done = Deleted()
    if below(table.location(), table.metadata_location):
        _check_owner(table, place.open())
        # whatever else is there (statistics, hints) is not of this job
        done.add(sweep(place, "metadata/", Kept(load), before, lambda key: key.endswith((".avro", METADATA))))
    done.add(sweep(place, "data/", Kept(load), before))
    return done


def _check_owner(table: Table, store: ObjectStore) -> None:
    """Raise IngestError if another table has its metadata in the same folder: its files would be orphans."""
    own = {path.rpartition("/")[2] for path in (table.metadata_location, *_logged(table))}
    for entry in store.under("metadata/"):
        if entry.key.endswith(METADATA) and entry.key.rpartition("/")[2] not in own and entry.size:
            begin = store.part(entry.key, 0, HEAD)
            if begin.startswith(b"\x1f\x8b"):
                begin = decompressobj(wbits=31).decompress(begin)
            found = re.search(rb'"table-uuid"\s*:\s*"([0-9A-Fa-f-]+)"', begin)
            if found and found[1].decode().lower() != str(table.metadata.table_uuid):
                raise IngestError(
                    f"{'.'.join(table.name())}: {entry.key} in its folder is of another table, so nothing "
                    "was deleted; if that one no longer exists, remove its metadata files first"
                )


def _logged(table: Table) -> list[str]:
    return [entry.metadata_file for entry in table.metadata.metadata_log]


def _in_use(table: Table) -> Iterator[str]:
    """Yield the manifests of the snapshots, as far as older ones may have them too.

    A snapshot has manifests of its parent, and new ones. So of the table's line only the oldest one counts.
    """
    line = list(ancestry(table))
    newer = {snapshot.snapshot_id for snapshot in line[:-1]}
    for snapshot in table.metadata.snapshots:
        if snapshot.snapshot_id not in newer:
            yield from (one.manifest_path for one in _manifests(table, snapshot.manifest_list))


def _manifests(table: Table, path: str) -> list[ManifestFile]:
    return list(read_manifest_list(table.io.new_input(path)))
