"""How much of its history an Iceberg table keeps, so that a round costs the same after a year.

Every commit copies the list of snapshots and adds metadata files. So a commit of the job also drops old
snapshots, some at a time, and then deletes the files that only these used:

* A snapshot that was current within the last hour stays, and so does its metadata file: a reader may use it.
* Of the last week, the first snapshot of each day stays, if it names a state: to it a table can be set back.
* What a branch or tag names stays, and so does what others have staged beside the table's history.
* Everything since the round that the commit builds on stays: the verdict compares these snapshots.

The new snapshot names the manifest lists of the dropped ones in its summary, so that both become visible
together. A job that is killed before it has deleted them leaves them to the next commit that drops some. That
commit deletes a manifest list after its manifests, so it finds what is left. Files of commits that were never
made stay until `compact --expire-days`. Data files are left alone here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from pyiceberg.manifest import read_manifest_list
from pyiceberg.table.update.snapshot import ExpireSnapshots

from bridge.ingest.sinks.snapshots import ancestry, state_version

if TYPE_CHECKING:
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.snapshots import Snapshot

    from bridge.ingest.store import ObjectStore

EXPIRED = "streambridge.expired"  # in the summary of a snapshot: manifest lists that nothing needs since
LEAST, MOST = 30, 100  # snapshots dropped in one commit; an older version may have left thousands
READERS = timedelta(hours=1)
WEEK_MS, DAY_MS = 7 * 24 * 3600 * 1000, 24 * 3600 * 1000
LOG = 25  # earlier metadata files that a table keeps, in steps of so many
DELETE_METADATA = "write.metadata.delete-after-commit.enabled"
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


class Drop(ExpireSnapshots):
    """Drops snapshots in a transaction; never heads of branches, nor what is tagged.

    `by_ids` does the same, but copies all of the table's metadata twice for each snapshot.
    """

    def __init__(self, transaction: Transaction, gone: Iterable[Snapshot]) -> None:
        super().__init__(transaction)
        self._snapshot_ids_to_expire = {snapshot.snapshot_id for snapshot in gone}


def record(gone: Iterable[Snapshot]) -> dict[str, str]:
    """Return what the summary of the commit that drops these snapshots says of them."""
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


def delete(table: Table, lists: Iterable[str]) -> None:
    """Delete manifest lists, and the manifests in them that no snapshot of the table uses any more.

    Files that cannot be deleted stay: they do no harm, and `compact --expire-days` deletes them.
    """
    obsolete = set(lists) - {snapshot.manifest_list for snapshot in table.metadata.snapshots}
    if not obsolete:
        return
    with suppress(Exception):  # a network failure, or no right to delete
        in_use = set(_in_use(table))
        for path in obsolete:
            with suppress(FileNotFoundError):
                for manifest in _manifests(table, path) - in_use:
                    _delete(table, manifest)
                _delete(table, path)


def sweep(table: Table, store: ObjectStore, before: float) -> None:
    """Delete metadata files that the table does not name and that are older than `before` (Unix time in ms).

    Nothing is deleted if the table has its metadata elsewhere.
    """
    folder = f"{table.location().rstrip('/')}/"
    if not table.metadata_location.startswith(f"{folder}metadata/"):
        return
    used = {table.metadata_location, *(entry.metadata_file for entry in table.metadata.metadata_log)}
    for snapshot in table.metadata.snapshots:
        used |= {snapshot.manifest_list, *_manifests(table, snapshot.manifest_list)}
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
            yield from _manifests(table, snapshot.manifest_list)


def _manifests(table: Table, path: str) -> set[str]:
    return {manifest.manifest_path for manifest in read_manifest_list(table.io.new_input(path))}


def _delete(table: Table, path: str) -> None:
    with suppress(FileNotFoundError):
        table.io.delete(path)
