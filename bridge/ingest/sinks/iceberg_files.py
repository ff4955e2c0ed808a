"""The files of an Iceberg table one by one, and a commit without some of them.

Manifests are read in the order of the days that they have, and only those with days that are asked for: a
share of a large table costs what it has. A manifest that cannot be read hides the files that only it names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, timedelta
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from pyiceberg.manifest import (
    DataFileContent,
    ManifestContent,
    ManifestEntry,
    ManifestFile,
    ManifestWriterV2,
    read_manifest_list,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table.snapshots import Summary
from pyiceberg.table.update.snapshot import _OverwriteFiles
from pyiceberg.transforms import DayTransform
from pyiceberg.typedef import EMPTY_DICT

from bridge.ingest.errors import line
from bridge.ingest.sinks.base import (
    DATA,
    DELETES,
    MANIFEST,
    MANIFEST_LIST,
    MANIFEST_OF_DELETES,
    Part,
)
from bridge.ingest.sinks.snapshots import bounds

if TYPE_CHECKING:
    from pyiceberg.table import Table

FILE_PATH = 2147483546  # field id of the path in a delete file
NO_DAY, LAST_DAY = "0", "9999-12-31"  # after manifests, and before all days
MANIFESTS = {ManifestContent.DATA: MANIFEST, ManifestContent.DELETES: MANIFEST_OF_DELETES}
SIZE = "total-files-size"
FIGURES = {  # of a summary: files, and rows
    DataFileContent.DATA: ("total-data-files", "total-records"),
    DataFileContent.POSITION_DELETES: ("total-delete-files", "total-position-deletes"),
    DataFileContent.EQUALITY_DELETES: ("total-delete-files", "total-equality-deletes"),
}


def parts(table: Table, after: tuple[str, str]) -> Iterator[Part]:
    """Yield the files of the current snapshot after a day and path, in this order."""
    snapshot = table.current_snapshot()
    if snapshot is None:
        return
    try:
        manifests = sorted(
            read_manifest_list(table.io.new_input(snapshot.manifest_list)), key=partial(_order, table)
        )
    except Exception as error:  # of the library, depending on what is damaged
        yield Part(snapshot.manifest_list, MANIFEST_LIST, None, problem=line(error))
        return
    listed = [Part(snapshot.manifest_list, MANIFEST_LIST, None), *map(_manifest, manifests)]
    yield from sorted((part for part in listed if part.order() > after), key=Part.order)
    waiting: list[Part] = []
    for at, manifest in enumerate(manifests):
        if _days(table, manifest)[1] >= after[0]:
            try:
                waiting += [_part(table, entry) for entry in manifest.fetch_manifest_entry(table.io)]
            except Exception as error:
                yield _manifest(manifest)._replace(problem=line(error))
        following = _days(table, manifests[at + 1])[0] if at + 1 < len(manifests) else f"{LAST_DAY}."
        ready = [part for part in waiting if part.day < following]
        waiting = [part for part in waiting if part.day >= following]
        yield from sorted((part for part in ready if part.order() > after), key=Part.order)


def _order(table: Table, manifest: ManifestFile) -> tuple[tuple[str, str], str]:
    return _days(table, manifest), manifest.manifest_path


def _days(table: Table, manifest: ManifestFile) -> tuple[str, str]:
    """Return the first and last day of the files of a manifest."""
    if not daily(table, table.specs()[manifest.partition_spec_id]):
        return NO_DAY, NO_DAY
    ends = [end for one in manifest.partitions or () for end in (one.lower_bound, one.upper_bound) if end]
    days = [_day(int.from_bytes(end, "little", signed=True)) for end in ends]
    return (days[0], days[1]) if len(days) == 2 else (NO_DAY, LAST_DAY)


def _day(number: int | None) -> str:
    return NO_DAY if number is None else (date(1970, 1, 1) + timedelta(days=number)).isoformat()


def _manifest(manifest: ManifestFile) -> Part:
    rows = (manifest.existing_rows_count or 0) + (manifest.added_rows_count or 0)
    kind = MANIFESTS[manifest.content]
    return Part(manifest.manifest_path, kind, manifest.manifest_length, rows)


def _part(table: Table, entry: ManifestEntry) -> Part:
    file = entry.data_file
    day = _day(file.partition[0]) if daily(table, table.specs()[file.spec_id]) else NO_DAY
    if file.content == DataFileContent.DATA:
        found = None
        with suppress(ValueError):  # another engine has renamed a column
            found = bounds(table, file)
        return Part(file.file_path, DATA, file.file_size_in_bytes, file.record_count, day, found)
    ends = {(of or {}).get(FILE_PATH) for of in (file.lower_bounds, file.upper_bounds)}
    of = (ends.pop() or b"").decode() if len(ends) == 1 else ""
    return Part(file.file_path, DELETES, file.file_size_in_bytes, file.record_count, day, of=of)


def daily(table: Table, spec: PartitionSpec) -> bool:
    """Return whether the spec has days of ingest_time, and nothing else."""
    fields = [(field.transform, table.schema().find_column_name(field.source_id)) for field in spec.fields]
    return fields == [(DayTransform(), "ingest_time")]


class _OfDeletes(ManifestWriterV2):
    """pyiceberg writes manifests of data files only."""

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class Without(_OverwriteFiles):
    """A change of a transaction that takes files out of the table, and manifests that cannot be read.

    The totals of its summary are counted, because nobody knows what such a manifest had.
    """

    gone: Collection[str] = ()
    totals: Mapping[str, int]

    def _existing_manifests(self) -> list[ManifestFile]:
        snapshot = self._transaction.table_metadata.snapshot_by_name(self._target_branch)
        kept: list[ManifestFile] = []
        totals: dict[str, int] = dict.fromkeys((SIZE, *chain(*FIGURES.values())), 0)
        for manifest in snapshot.manifests(self._io) if snapshot else ():
            if manifest.manifest_path in self.gone:
                continue
            entries = manifest.fetch_manifest_entry(self._io)
            left = [entry for entry in entries if entry.data_file.file_path not in self.gone]
            for file in (entry.data_file for entry in left):
                files, rows = FIGURES[file.content]
                for name, more in ((files, 1), (rows, file.record_count), (SIZE, file.file_size_in_bytes)):
                    totals[name] += more
            kept += [manifest] if len(left) == len(entries) else self._rewritten(manifest, left)
        self.totals = totals
        return kept

    def _rewritten(self, manifest: ManifestFile, left: Sequence[ManifestEntry]) -> list[ManifestFile]:
        if not left:
            return []
        spec = self.spec(manifest.partition_spec_id)
        if manifest.content == ManifestContent.DATA:
            writer = self.new_manifest_writer(spec)
        else:
            place = self.new_manifest_output()
            writer = _OfDeletes(spec, self.schema(), place, self._snapshot_id, self._compression)
        with writer:
            for entry in left:
                writer.existing(entry)
        return [writer.to_manifest_file()]

    def _deleted_entries(self) -> list[ManifestEntry]:
        return []

    def _summary(self, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        summary = super()._summary(snapshot_properties)
        totals = {name: str(total) for name, total in self.totals.items()}
        return Summary(summary.operation, **{**summary.additional_properties, **totals})
