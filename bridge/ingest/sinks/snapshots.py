"""What the metadata of an Iceberg table says about its rows: snapshots, and the files of the current one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from pyiceberg.conversions import from_bytes
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFile, ManifestContent, ManifestEntry
from pyiceberg.table.snapshots import Operation, Snapshot

from bridge.ingest.columns import IDENTITY
from bridge.ingest.errors import IngestError, line
from bridge.ingest.sinks.base import Content, Held
from bridge.ingest.sinks.due import SMALL

if TYPE_CHECKING:
    from pyiceberg.table import DataScan, Table
    from pyiceberg.types import PrimitiveType

POINTER = "streambridge.state"  # in the summary of a snapshot of a run: the version of its state
# figures of a snapshot that are 0 or absent if no row can have changed
TOUCHED = (
    *("added-data-files", "deleted-data-files", "added-delete-files", "removed-delete-files"),
    *("added-records", "deleted-records", "added-position-deletes", "added-equality-deletes"),
)


def ancestry(table: Table) -> Iterator[Snapshot]:
    """Yield the current snapshot and its ancestors that have not expired."""
    snapshot = table.current_snapshot()
    while snapshot is not None:
        yield snapshot
        parent = snapshot.parent_snapshot_id
        snapshot = table.snapshot_by_id(parent) if parent is not None else None


def state_version(snapshot: Snapshot) -> int | None:
    """Return the version of the state that a snapshot names, if any."""
    value = snapshot.summary.additional_properties.get(POINTER) if snapshot.summary else None
    return int(value) if value else None


def current_id(table: Table) -> str:
    """Return the id of the current snapshot; empty if there is none."""
    snapshot = table.current_snapshot()
    return str(snapshot.snapshot_id) if snapshot else ""


def changes(table: Table, since: str | None) -> list[str]:
    """Return the snapshots after `since` that may have changed rows and are of no run."""
    found: list[str] = []
    for snapshot in ancestry(table) if since is not None else ():
        if str(snapshot.snapshot_id) == since:
            break
        operation = snapshot.summary.operation if snapshot.summary else None
        figures = _figures(snapshot)
        still = snapshot.summary is not None and not any(int(figures.get(name) or 0) for name in TOUCHED)
        # the specification says of `replace`: without changing the table's data
        if state_version(snapshot) is None and operation != Operation.REPLACE and not still:
            found.append(f"snapshot {snapshot.snapshot_id} ({operation.value if operation else 'unknown'})")
    return found[::-1]


def small_files(table: Table, looked: str) -> int:
    """Return how many small data files were added after the snapshot `looked`, or the last merge of a run.

    An estimate: of each snapshot only the mean size is known.
    """
    found = 0
    for snapshot in ancestry(table):
        operation = snapshot.summary.operation if snapshot.summary else None
        merged = operation == Operation.OVERWRITE and state_version(snapshot) is not None
        if merged or str(snapshot.snapshot_id) == looked:
            break
        figures = _figures(snapshot)
        files, size = (int(figures.get(name) or 0) for name in ("added-data-files", "added-files-size"))
        found += files if size < SMALL * files else 0
    return found


def total_rows(table: Table) -> int:
    """Return the number of rows according to the current snapshot's totals."""
    snapshot = table.current_snapshot()
    records = int(_figures(snapshot).get("total-records") or 0) if snapshot else 0
    return records - _deletes(table)  # rows deleted merge-on-read still count as records


def _deletes(table: Table) -> int:
    """Return how many deletes the current snapshot has beside its data files (merge-on-read)."""
    snapshot = table.current_snapshot()
    totals = _figures(snapshot) if snapshot else {}
    return sum(int(totals.get(f"total-{kind}-deletes") or 0) for kind in ("position", "equality"))


def _figures(snapshot: Snapshot) -> Mapping[str, str]:
    return snapshot.summary.additional_properties if snapshot.summary else {}


def counted_rows(table: Table, expected: int) -> int:
    """Return the number of rows. If deletes leave it open and it is not the expected one, rows are read."""
    rows = total_rows(table)
    if rows != expected and _deletes(table):  # those of files that are gone count in the totals
        # equality deletes, which pyiceberg does not support, or a file is gone
        with suppress(NotImplementedError, ValueError, FileNotFoundError):
            rows = _scan(table).count()
    return rows


def counted_files(table: Table) -> int:
    """Return the number of data files and delete files according to the current snapshot's totals."""
    snapshot = table.current_snapshot()
    figures = _figures(snapshot) if snapshot else {}
    return sum(int(figures.get(f"total-{kind}-files") or 0) for kind in ("data", "delete"))


def _scan(table: Table) -> DataScan:
    return table.scan(selected_fields=tuple(IDENTITY.names))


def entries(table: Table) -> list[ManifestEntry]:
    """Return the data files of the current snapshot."""
    snapshot = table.current_snapshot()
    return [
        entry
        for manifest in (snapshot.manifests(table.io) if snapshot else ())
        if manifest.content == ManifestContent.DATA
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
    ]


def with_deletes(table: Table) -> set[str]:
    """Return the paths of data files whose rows another engine deleted by delete files (merge-on-read)."""
    snapshot = table.current_snapshot()
    if snapshot is None or all(
        manifest.content == ManifestContent.DATA for manifest in snapshot.manifests(table.io)
    ):
        return set()
    try:
        return {task.file.file_path for task in table.scan().plan_files() if task.delete_files}
    except (NotImplementedError, ValueError):  # equality deletes, not supported by pyiceberg: of any file
        return {entry.data_file.file_path for entry in entries(table)}


def content(name: str, table: Table, pointer: int | None) -> Content:
    """Return the data files of the current snapshot of the table `name`."""
    deleted_from = with_deletes(table)
    files = [
        Held(
            entry.data_file.file_path,
            entry.data_file.record_count,
            None if entry.data_file.file_path in deleted_from else bounds(table, entry.data_file),
        )
        for entry in entries(table)
    ]

    def read(paths: Collection[str]) -> Iterator[pa.Table]:
        wanted, scan = set(paths), _scan(table)
        try:
            tasks = [task for task in scan.plan_files() if task.file.file_path in wanted]
        except (NotImplementedError, ValueError) as error:  # equality deletes
            raise IngestError(
                f"{name}: another engine has deleted rows in a way that pyiceberg cannot read "
                f"({line(error)}); let that engine rewrite the files first (Spark: rewrite_data_files, "
                "Athena: OPTIMIZE)"
            ) from error
        rows = ArrowScan(table.metadata, table.io, scan.projection(), AlwaysTrue())
        for batch in rows.to_record_batches(tasks):
            yield pa.Table.from_batches([batch])

    return Content(pointer, current_id(table), files, read)


def bounds(table: Table, file: DataFile) -> dict[str, tuple[Any, Any]] | None:
    """Return the bounds of the columns of IDENTITY, if the file has all of them, and no nulls."""
    found = {}
    for name in IDENTITY.names:
        field = table.schema().find_field(name)
        low, high = (ends.get(field.field_id) for ends in (file.lower_bounds or {}, file.upper_bounds or {}))
        if low is None or high is None or (file.null_value_counts or {}).get(field.field_id) != 0:
            return None
        kind = cast("PrimitiveType", field.field_type)
        found[name] = (from_bytes(kind, low), from_bytes(kind, high))
    return found
