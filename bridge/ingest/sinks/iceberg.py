"""An Iceberg table by pyiceberg: no JVM library is needed.

The pointer to the state is in the summary of the snapshot that added the files, so rolling the table back
rolls the state back with it; and in a table property of the same commit, for when that snapshot
has expired (but not when the table was rolled back then: the property stays what it was). Every round is a
snapshot, even one without files: the catalog then refuses a commit on top of a snapshot that is not the
newest any more, which is what keeps two runs apart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.conversions import to_bytes
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.io.pyarrow import pyarrow_to_schema, schema_to_pyarrow
from pyiceberg.manifest import DataFile as IcebergFile
from pyiceberg.manifest import DataFileContent, FileFormat, ManifestContent, ManifestEntry
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.name_mapping import NameMapping
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.transforms import DayTransform
from pyiceberg.typedef import Record

from bridge.ingest.columns import IDENTITY, MESSAGES, PARTITIONS, has_variant
from bridge.ingest.errors import BadOption, IngestError, Moved, NoTable, StateMissing
from bridge.ingest.files import DataFile, day_number
from bridge.ingest.sinks.base import Compacted, Difference, LiveFile, check, differences, state_of
from bridge.ingest.state import StateStore
from bridge.ingest.store import Place, table_folder
from bridge.ingest.worker import Target

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyiceberg.types import PrimitiveType
    from pyspark.sql import SparkSession

PARTITION = PARTITIONS[1]
POINTER = "streambridge.state"
STATE_AT = "streambridge.state-location"
ATTEMPTS = 6
PROPERTIES = {"format-version": "2", "write.parquet.compression-codec": "zstd"}


class IcebergSink:
    """One table of a catalog. `schema` and `state_at` are used when the table is made."""

    def __init__(
        self,
        catalog: Catalog,
        identifier: str,
        state_at: str | None = None,
        endpoint: str | None = None,
        schema: pa.Schema = MESSAGES,
    ) -> None:
        self.catalog, self.identifier, self.endpoint = catalog, identifier, endpoint
        self.schema = schema
        self._state_at = state_at

    @property
    def name(self) -> str:
        return self.identifier

    def table(self) -> Table | None:
        """The table as it is now, or None."""
        try:
            return self.catalog.load_table(self.identifier)
        except NoSuchTableError:
            return None

    def exists(self) -> bool:
        return self.table() is not None

    def _made(self) -> Table:
        found = self.table()
        if found is not None:
            return found
        self.catalog.create_namespace_if_not_exists(self.identifier.rpartition(".")[0])
        fields = _schema(self.schema)
        day = fields.find_field("ingest_time").field_id
        return self.catalog.create_table_if_not_exists(
            self.identifier,
            fields,
            partition_spec=PartitionSpec(PartitionField(day, 1000, DayTransform(), PARTITION)),
            properties={**PROPERTIES, **({STATE_AT: self._state_at} if self._state_at else {})},
        )

    def state(self) -> Place:
        table = self.table()
        at = self._state_at or (table.properties.get(STATE_AT) if table else None)
        if at is None:
            raise BadOption(f"{self.name}: where is its state? give --state URL, or --warehouse")
        identity = str(table.metadata.table_uuid) if table else None
        return state_of(self.name, Place(at, self.endpoint), identity)

    def pointer(self) -> int | None:
        table = self.table()
        return self._pointer(table) if table else None

    def _pointer(self, table: Table) -> int | None:
        known = list(_ancestry(table))
        for snapshot in known:
            if (version := _said(snapshot)) is not None:
                return version
        value = table.properties.get(POINTER)  # the snapshot that said it has expired
        if value is None:
            return None
        ids = {snapshot.snapshot_id for snapshot in known}
        others = [snapshot for snapshot in table.snapshots() if snapshot.snapshot_id not in ids]
        if any(_said(snapshot) == int(value) for snapshot in others):
            return self._rolled_back(ids, others)
        return int(value)

    def _rolled_back(self, known: set[int], others: Sequence[Snapshot]) -> int | None:
        """The state of a table whose property is that of a snapshot which was rolled back.

        Its own snapshots, `known`, do not say it; but one of the `others` that came right after them tells
        what it was planned from.
        """
        silent = {other.snapshot_id: other.parent_snapshot_id for other in others if _said(other) is None}
        for other in others:
            version, below = _said(other), other.parent_snapshot_id
            while below in silent:
                below = silent[below]
            if version is None or below not in known:
                continue
            made_it = other.summary is not None and other.summary.operation == Operation.APPEND
            # what is no round, but a compaction, says the state that was there already
            return StateStore(self.state()).previous(version) if made_it else version
        raise StateMissing(
            f"{self.name}: it was rolled back, and the snapshots that said which state it had then have "
            f"expired; roll it back to a snapshot whose summary has {POINTER}"
        )

    def _ready(self, table: Table) -> Table:
        """For a commit: as if its partitions were the days, which pyiceberg takes for all that it adds.

        Another engine may have made other partitions the table's own; a file may have any that it ever had.
        pyiceberg's own retry fails: it would commit on top of a run that it has not looked at.
        """
        days = [spec.spec_id for spec in table.specs().values() if _by_day(table, spec)]
        if not days:
            raise IngestError(
                f"{self.name}: it has no partition spec of day(ingest_time) alone, so nothing was written; "
                "partition it by that once (Spark: ALTER TABLE ... ADD PARTITION FIELD days(ingest_time), "
                "and DROP the others; they may come back), or use a new table"
            )
        update = {
            "properties": {**table.metadata.properties, "commit.retry.num-retries": "0"},
            "default_spec_id": max(days),
        }
        table.metadata = table.metadata.model_copy(update=update)
        return table

    def differences(self) -> list[Difference]:
        table = self.table()
        return _differences(table, self.schema) if table else []

    def target(self) -> Target:
        return self.layout(self.schema)

    def layout(self, needed: pa.Schema) -> Target:
        """Like `target`, for what does with these columns."""
        table = self._made()
        check(self.name, _differences(table, needed))
        self._ready(table)  # says whether it is partitioned as files are written
        schema = _arrow(table.schema())
        base = set(self.schema.names)
        extras = tuple(name for name in schema.names if name not in base)
        return Target(
            Place(table.location(), self.endpoint),
            f"data/{PARTITION}",
            schema.serialize().to_pybytes(),
            extras,
        )

    def add_columns(self, columns: Mapping[str, pa.DataType]) -> None:
        for attempt in range(ATTEMPTS):
            table = self._made()
            known = {field.name.lower() for field in table.schema().fields}
            wanted = {name: kind for name, kind in columns.items() if name.lower() not in known}
            if not wanted:
                return
            added = _schema(pa.schema(list(wanted.items())))
            try:
                with table.update_schema() as update:
                    for field in added.fields:
                        update.add_column(field.name, field.field_type)
                return
            except CommitFailedException:  # another writer was first: look again
                time.sleep(0.1 * 2**attempt)
        raise IngestError(f"{self.name}: columns could not be added, other writers were always first")

    def commit(self, previous: int | None, version: int, files: Sequence[DataFile]) -> None:
        for attempt in range(ATTEMPTS):
            table = self._made()
            found = self._pointer(table)
            if found == version:  # an attempt whose answer was lost did commit
                return
            if found != previous:
                raise Moved(f"{self.name}: another run committed first")
            check(self.name, _differences(table, self.schema))
            self._ready(table)
            try:
                with table.transaction() as change:
                    with change.update_snapshot(
                        snapshot_properties={POINTER: str(version)}
                    ).fast_append() as append:
                        for file in files:
                            append.append_data_file(data_file(table, file))
                    change.set_properties({POINTER: str(version)})
                return
            except CommitFailedException:
                time.sleep(0.1 * 2**attempt)
        raise Moved(f"{self.name}: {ATTEMPTS} commits failed, other writers were always first")

    def files(self) -> list[LiveFile]:
        table = self.table()
        if table is None:
            return []
        marked = _marked(table)
        files = (live_file(table, entry, marked) for entry in _entries(table))
        return sorted(files, key=lambda file: file.added)

    def rows(self) -> int:
        table = self.table()
        snapshot = table.current_snapshot() if table else None
        summary = snapshot.summary if snapshot else None
        totals = summary.additional_properties if summary else {}
        # rows that are deleted merge-on-read are still counted as records
        deleted = ("total-position-deletes", "total-equality-deletes")
        return int(totals.get("total-records") or 0) - sum(int(totals.get(name) or 0) for name in deleted)

    def replace(self, removed: Sequence[LiveFile], added: Sequence[DataFile]) -> None:
        """Put files in the place of others, in one step; the state stays the one it was."""
        paths = {file.path for file in removed}
        for attempt in range(ATTEMPTS):
            table = self._ready(self._made())
            marked = _marked(table)
            known = [(live_file(table, entry, marked), entry.data_file) for entry in _entries(table)]
            old = [(file, entry) for file, entry in known if file.path in paths]
            if len(old) != len(paths):
                raise Moved(f"{self.name}: another run has compacted it")
            if any(file.marked for file, _ in old):
                raise Moved(f"{self.name}: another engine has deleted rows in what was to be compacted")
            check(self.name, _differences(table, IDENTITY))
            version = self._pointer(table)
            # the new snapshot says it again: the last one that did may expire
            keep = {} if version is None else {POINTER: str(version)}
            try:
                with (
                    table.transaction() as change,
                    change.update_snapshot(snapshot_properties=keep).overwrite() as overwrite,
                ):
                    for _, gone in old:
                        overwrite.delete_data_file(gone)
                    for file in added:
                        overwrite.append_data_file(data_file(table, file))
                return
            except CommitFailedException:
                time.sleep(0.1 * 2**attempt)
        raise Moved(f"{self.name}: {ATTEMPTS} commits failed, other writers were always first")

    def compact(self, spark: SparkSession) -> Compacted:
        from bridge.ingest.sinks.compact import compact

        return compact(spark, self)

    def expire(self, days: float) -> int:
        table = self.table()
        if table is None:
            return 0
        before = datetime.now(UTC) - timedelta(days=days)
        table.maintenance.expire_snapshots().older_than(before).commit()
        table = self._made()
        used: set[str] = set()
        manifests: set[str] = set()
        for snapshot in table.snapshots():
            for manifest in snapshot.manifests(table.io):
                if manifest.manifest_path not in manifests:
                    manifests.add(manifest.manifest_path)
                    entries = manifest.fetch_manifest_entry(table.io, discard_deleted=True)
                    used.update(live_file(table, entry).path for entry in entries)
        store = Place(table.location(), self.endpoint).open()
        limit = before.timestamp() * 1000
        return store.sweep("data/", "", used, limit)

    def read(self, columns: Sequence[str] | None = None, limit: int | None = None) -> Any:
        table = self.table()
        if table is None:
            return self.schema.empty_table()
        return table.scan(selected_fields=tuple(columns) if columns else ("*",), limit=limit).to_arrow()


def open_catalog(
    warehouse: str | None, properties: Mapping[str, str], endpoint: str | None, *, make: bool = True
) -> Catalog:
    """The catalog that the properties name; without any, an SQLite file in the warehouse directory.

    Without `make` that file must be there: raises NoTable if it is not, and makes nothing.
    """
    options = dict(properties)
    if endpoint:
        options.setdefault("s3.endpoint", endpoint)
        # Arrow would ask AWS itself for the bucket's region, and wait for an answer that says nothing
        options.setdefault(
            "s3.region", os.environ.get("AWS_REGION", os.environ.get("AWS_DEFAULT_REGION", "us-east-1"))
        )
    if warehouse:
        place = Place(warehouse)
        if not place.is_s3:
            folder = table_folder("--warehouse", warehouse, "%#?")
            warehouse = f"file://{folder}"  # not quoted: pyiceberg takes the rest for the path as it is
            own = "uri" not in options and "type" not in options
            if make:
                folder.mkdir(parents=True, exist_ok=True)
            elif own and not (folder / "catalog.db").exists():
                raise NoTable(str(folder))
            if own:
                options |= {"type": "sql", "uri": f"sqlite:///{folder / 'catalog.db'}"}
        options.setdefault("warehouse", warehouse)
    if "type" not in options and "uri" not in options:
        raise BadOption(
            "which catalog? give --warehouse DIR, or --catalog type=glue (rest, sql, ...) and its options"
        )
    return load_catalog(options.pop("name", "streambridge"), **options)


def data_file(table: Table, file: DataFile) -> IcebergFile:
    """Describe a file to the table without reading it again."""
    fields = {field.name: field for field in table.schema().fields}
    low, high = {}, {}
    for column, (least, most) in file.bounds.items():
        field = fields[column]
        kind = cast("PrimitiveType", field.field_type)
        low[field.field_id], high[field.field_id] = to_bytes(kind, least), to_bytes(kind, most)
    return IcebergFile.from_args(
        content=DataFileContent.DATA,
        file_path=f"{table.location().rstrip('/')}/{file.path}",
        file_format=FileFormat.PARQUET,
        partition=Record(day_number(file.day)),
        record_count=file.rows,
        file_size_in_bytes=file.size,
        column_sizes={},
        value_counts=dict.fromkeys(low, file.rows),
        null_value_counts=dict.fromkeys(low, 0),
        nan_value_counts={},
        lower_bounds=low,
        upper_bounds=high,
        key_metadata=None,
        split_offsets=[4],
        equality_ids=None,
        sort_order_id=None,
        spec_id=table.spec().spec_id,
    )


def _differences(table: Table, needed: pa.Schema) -> list[Difference]:
    return differences(_arrow(_schema(needed)), _arrow(table.schema()))


def _by_day(table: Table, spec: PartitionSpec) -> bool:
    """Whether these partitions are those of the job: days of ingest_time, and nothing else."""
    fields = [(field.transform, table.schema().find_column_name(field.source_id)) for field in spec.fields]
    return fields == [(DayTransform(), "ingest_time")]


def _entries(table: Table) -> list[ManifestEntry]:
    """The current snapshot's data files."""
    snapshot = table.current_snapshot()
    return [
        entry
        for manifest in (snapshot.manifests(table.io) if snapshot else ())
        if manifest.content == ManifestContent.DATA
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
    ]


def _marked(table: Table) -> set[str]:
    """Paths of data files of which another engine has deleted rows by delete files (merge-on-read)."""
    snapshot = table.current_snapshot()
    if snapshot is None or all(
        manifest.content == ManifestContent.DATA for manifest in snapshot.manifests(table.io)
    ):
        return set()
    try:
        return {task.file.file_path for task in table.scan().plan_files() if task.delete_files}
    except (
        NotImplementedError,
        ValueError,
    ):  # pyiceberg knows no deletes by equality: they may be of any file
        return {entry.data_file.file_path for entry in _entries(table)}


def live_file(table: Table, entry: ManifestEntry, marked: Container[str] = ()) -> LiveFile:
    """A manifest entry, as the job sees it; `marked` are paths of files with deleted rows."""
    file = entry.data_file
    path = file.file_path.removeprefix(f"{table.location().rstrip('/')}/")
    daily = _by_day(table, table.specs()[file.spec_id])
    return LiveFile(
        path,
        (date(1970, 1, 1) + timedelta(days=file.partition[0])).isoformat() if daily else "",
        file.file_size_in_bytes,
        file.record_count,
        entry.file_sequence_number or 0,
        file.file_path in marked,
    )


def _ancestry(table: Table) -> Iterator[Snapshot]:
    """The current snapshot and those that it was made from, as far as they have not expired."""
    snapshot = table.current_snapshot()
    while snapshot is not None:
        yield snapshot
        parent = snapshot.parent_snapshot_id
        snapshot = table.snapshot_by_id(parent) if parent is not None else None


def _said(snapshot: Snapshot) -> int | None:
    """The version of the state that a snapshot names."""
    value = snapshot.summary.additional_properties.get(POINTER) if snapshot.summary else None
    return int(value) if value else None


def _schema(schema: pa.Schema) -> Schema:
    """Give the columns, and the fields within them, fresh ids 1, 2, ..."""
    if any(has_variant(field.type) for field in schema):
        raise BadOption(
            "an Iceberg table cannot get a VARIANT column here: it is of Iceberg's format 3, and pyiceberg "
            "knows no such type; use --delta, or name typed columns in --schema"
        )
    ids = count(1)
    columns = [{"field-id": next(ids), "names": [field.name]} for field in schema]
    for column, field in zip(columns, schema, strict=True):
        column["fields"] = _inner(field.type, ids)
    return pyarrow_to_schema(schema, name_mapping=NameMapping.model_validate(columns))


def _inner(kind: pa.DataType, ids: Iterator[int]) -> list[dict[str, Any]]:
    if pa.types.is_struct(kind):
        fields = [(field.name, field.type) for field in kind]
    elif pa.types.is_list(kind):
        fields = [("element", kind.value_type)]
    else:
        return []
    return [{"field-id": next(ids), "names": [name], "fields": _inner(inner, ids)} for name, inner in fields]


def _arrow(schema: Schema) -> pa.Schema:
    """The columns as data files have them, with their field ids."""
    return pa.schema([_narrow(field) for field in schema_to_pyarrow(schema, include_field_ids=True)])


def _narrow(field: pa.Field) -> pa.Field:
    """pyiceberg's Arrow schemas say large_string and large_binary; files are written with the plain ones."""
    kind = field.type
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct([_narrow(inner) for inner in kind]))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return field.with_type(pa.list_(_narrow(kind.value_field)))
    plain = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    return field.with_type(plain.get(kind, kind))
