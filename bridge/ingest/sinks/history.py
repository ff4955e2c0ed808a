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
made stay until `compact --expire-days`. Data files are left alone here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

from pyiceberg.manifest import ManifestFile, read_manifest_list
from pyiceberg.table.update.snapshot import ExpireSnapshots

from bridge.ingest.sinks.snapshots import ancestry, state_version

if TYPE_CHECKING:
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

    from bridge.ingest.store import ObjectStore

EXPIRED = "streambridge.expired"  # in the summary of a snapshot: manifest lists that nothing needs since
LEAST, MOST = 30, 100  # snapshots dropped in one commit; an older version may have left thousands
READERS = timedelta(hours=1)
WEEK_MS, DAY_MS = 7 * 24 * 3600 * 1000, 24 * 3600 * 1000
LOG = 25  # earlier metadata files that a table keeps, in steps of so many
DELETE_METADATA = "write.metadata.delete-after-commit.enabled"
DELETE_DATA = "gc.enabled"  # false if data files may be of other tables too
DAY_BYTES = 4  # of a day in the bounds of a manifest
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


def delete(table: Table, lists: Iterable[str], store: ObjectStore) -> None:
    """Delete manifest lists, with the manifests and data files that no snapshot of the table uses any more.

    Such data files were merged or otherwise replaced. `store` has the files of the table.
    Files that cannot be deleted stay: they do no harm, and `compact --expire-days` deletes them.
    """
    obsolete = set(lists) - {snapshot.manifest_list for snapshot in table.metadata.snapshots}
    if not obsolete:
        return
    with suppress(Exception):  # a network failure, or no right to delete
        in_use = set(_in_use(table))
        gone: dict[str, list[ManifestFile]] = {}
        for path in obsolete:
            with suppress(FileNotFoundError):
                gone[path] = _manifests(table, path)
        unused = [
            manifest for found in gone.values() for manifest in found if manifest.manifest_path not in in_use
        ]
        store.delete(sorted(_replaced(table, {one.manifest_path: one for one in unused}.values())))
        for path, found in gone.items():
            for manifest in {manifest.manifest_path for manifest in found} - in_use:
                _delete(table, manifest)
            _delete(table, path)


def _replaced(table: Table, unused: Collection[ManifestFile]) -> set[str]:
    """Return the data files of these manifests that no snapshot has, relative to the table."""
    if table.metadata.properties.get(DELETE_DATA, "true").lower() != "true":
        return set()
    folder = f"{table.location().rstrip('/')}/"
    gone: dict[str, ManifestFile] = {}
    for manifest in unused:
        with suppress(FileNotFoundError):  # the data files of such a manifest were deleted before it
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False):
                if entry.data_file.file_path.startswith(f"{folder}data/"):
                    gone[entry.data_file.file_path.removeprefix(folder)] = manifest
    around = _days(gone.values())
    seen: set[str] = set()
    for snapshot in table.metadata.snapshots if gone else ():
        for manifest in _manifests(table, snapshot.manifest_list):
            if manifest.manifest_path in seen or not _overlap(_days([manifest]), around):
                continue
            seen.add(manifest.manifest_path)
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                gone.pop(entry.data_file.file_path.removeprefix(folder), None)
    return set(gone)


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


def sweep(table: Table, store: ObjectStore, before: float) -> None:
    """Delete metadata files that the table does not name and that are older than `before` (Unix time in ms).

    Nothing is deleted if the table has its metadata elsewhere.
    """
    folder = f"{table.location().rstrip('/')}/"
    if not table.metadata_location.startswith(f"{folder}metadata/"):
        return
    used = {table.metadata_location, *(entry.metadata_file for entry in table.metadata.metadata_log)}
    for snapshot in table.metadata.snapshots:
        manifests = _manifests(table, snapshot.manifest_list)
        used |= {snapshot.manifest_list, *(manifest.manifest_path for manifest in manifests)}
    keys = {path.removeprefix(folder) for path in used}
    store.delete(
        entry.key
        for entry in store.under("metadata/")
        # whatever else is there (statistics, hints) is not of this job
        if entry.key.endswith((".avro", ".metadata.json"))
        and entry.key not in keys
        and entry.modified < before
    )


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


def _delete(table: Table, path: str) -> None:
    with suppress(FileNotFoundError):
        table.io.delete(path)
