"""An Iceberg table through pyiceberg, without any JVM library.

The pointer to the state is in the summary of the snapshot that added the files, so a rollback of the table
also rolls the state back. It is also in a table property of the same commit, for the time after that snapshot
has expired; a rollback does not change the property. Every round makes a snapshot, even one without files:
the catalog refuses a commit on top of an outdated snapshot, and that separates two runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.conversions import to_bytes
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.io.pyarrow import pyarrow_to_schema, schema_to_pyarrow
from pyiceberg.manifest import DataFile as IcebergFile
from pyiceberg.manifest import DataFileContent, FileFormat, ManifestEntry
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.name_mapping import NameMapping
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.transforms import DayTransform
from pyiceberg.typedef import Record

from bridge.ingest.columns import IDENTITY, MESSAGES, PARTITIONS, has_variant
from bridge.ingest.deletes import Deleted, References
from bridge.ingest.errors import BadOption, CommitConflict, IngestError, NoTable, StateMissing
from bridge.ingest.files import DataFile, Target, day_number
from bridge.ingest.sinks.base import (
    Compacted,
    Content,
    Difference,
    LiveFile,
    Parts,
    Standing,
    absent,
    attempts,
    check,
    check_files,
    differences,
    state_of,
)
from bridge.ingest.sinks.due import MANY, due
from bridge.ingest.sinks.history import (
    MERGING,
    READERS,
    Drop,
    Kept,
    delete,
    metadata_log,
    obsolete,
    orphans,
    record,
    replaced,
    shared,
    unfinished,
)
from bridge.ingest.sinks.iceberg_files import Without, daily, parts
from bridge.ingest.sinks.snapshots import (
    POINTER,
    ancestry,
    changes,
    content,
    counted_files,
    counted_rows,
    current_id,
    entries,
    small_files,
    state_version,
    total_rows,
    with_deletes,
)
from bridge.ingest.state import StateStore
from bridge.ingest.store import StorageLocation, below, literal, table_folder

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyiceberg.table.update.snapshot import _SnapshotProducer
    from pyiceberg.types import PrimitiveType
    from pyspark.sql import SparkSession

    from bridge.ingest.tasks import Tasks

PARTITION = PARTITIONS[1]
Change = TypeVar("Change", bound="_SnapshotProducer[Any]")
DAY = 24 * 3600
FOREVER = 36500  # days: whatever the clocks of those who wrote
STATE_AT = "streambridge.state-location"
# pyiceberg deletes the manifests of a commit that was refused for the last time. But the catalog may have
# made it, lost the answer, and refused only what its client then sent again: a retry looks for it first.
LOOK_AGAIN = {"commit.retry.num-retries": "1", "commit.retry.total-timeout-ms": str(24 * 3600 * 1000)}
PROPERTIES = {"format-version": "2", "write.parquet.compression-codec": "zstd"}


class IcebergSink:
    """One table of a catalog. `schema` and `state_at` are used when the table is created.

    Commits drop no version of the table that was current within the time `keep`.
    """

    def __init__(
        self,
        catalog: Catalog,
        identifier: str,
        state_at: str | None = None,
        endpoint: str | None = None,
        schema: pa.Schema = MESSAGES,
        keep: timedelta = READERS,
    ) -> None:
        self.catalog, self.identifier, self.endpoint = catalog, identifier, endpoint
        self.schema, self.keep = schema, keep
        self._state_at = state_at
        self._looked = ""  # the snapshot in which `tidy` has looked for small files last

    @property
    def name(self) -> str:
        return self.identifier

    def table(self) -> Table | None:
        """The table as it is now, or None."""
        try:
            return self.catalog.load_table(self.identifier)
        except NoSuchTableError:
            return None

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

    def state(self) -> StorageLocation:
        table = self.table()
        at = self._state_at or (table.properties.get(STATE_AT) if table else None)
        if at is None:
            raise BadOption(f"{self.name}: the location of its state is unknown: give --state or --warehouse")
        identity = str(table.metadata.table_uuid) if table else None
        return state_of(self.name, StorageLocation(at, self.endpoint), identity)

    def pointer(self) -> int | None:
        table = self.table()
        return self._pointer(table) if table else None

    def _pointer(self, table: Table) -> int | None:
        known = list(ancestry(table))
        for snapshot in known:
            if (version := state_version(snapshot)) is not None:
                return version
        value = table.properties.get(POINTER)  # for when the snapshot has expired
        if value is None:
            return None
        ids = {snapshot.snapshot_id for snapshot in known}
        others = [snapshot for snapshot in table.snapshots() if snapshot.snapshot_id not in ids]
        if any(state_version(snapshot) == int(value) for snapshot in others):
            return self._rolled_back(ids, others)
        return int(value)

    def _rolled_back(self, known: set[int], others: Sequence[Snapshot]) -> int | None:
        """Return the state version of a table whose property names a state that was rolled back.

        The table's own snapshots, `known`, name no state. But one of the `others` directly followed them, and
        its state names the one from which it was planned.
        """
        silent = {
            other.snapshot_id: other.parent_snapshot_id for other in others if state_version(other) is None
        }
        for other in others:
            version, below = state_version(other), other.parent_snapshot_id
            while below in silent:
                below = silent[below]
            if version is None or below not in known:
                continue
            is_round = other.summary is not None and other.summary.operation == Operation.APPEND
            # a compaction repeats the state before it
            return StateStore(self.state()).previous(version) if is_round else version
        raise StateMissing(
            f"{self.name}: it was rolled back, and the snapshots that named its state have expired; roll it "
            f"back to a snapshot whose summary has {POINTER}"
        )

    def _ready(self, table: Table) -> Table:
        """Prepare a table for a commit: make days its default partitions, which pyiceberg uses for new files.

        Another engine may have changed the default, but a file may use any spec that the table ever had.
        """
        days = [spec.spec_id for spec in table.specs().values() if daily(table, spec)]
        if not days:
            raise IngestError(
                f"{self.name}: it has no partition spec of day(ingest_time) alone, so nothing was written; "
                "partition it by that once (Spark: ALTER TABLE ... ADD PARTITION FIELD days(ingest_time), "
                "and DROP the others; you can add these again later), or use a new table"
            )
        update = {
            **shared(table.metadata),
            "properties": {**MERGING, **table.metadata.properties, **LOOK_AGAIN},
            "default_spec_id": max(days),
        }
        table.metadata = table.metadata.model_copy(update=update)
        return table

    def differences(self) -> list[Difference]:
        table = self.table()
        _schema(self.schema)  # raises BadOption, also where there is no table yet
        return _differences(table, self.schema) if table else []

    def target(self) -> Target:
        return self.layout(self.schema)

    def layout(self, needed: pa.Schema) -> Target:
        """Like `target`, for work that needs only these columns."""
        table = self._made()
        check(self.name, _differences(table, needed))
        self._ready(table)  # raises if the table has never been partitioned by day
        schema = _arrow(table.schema())
        location = self.place(table)
        # of all specs: Iceberg keeps the old ones, and has no column of such a name beside them
        partitions = {field.name for spec in table.specs().values() for field in spec.fields}
        return Target.of(location, f"data/{PARTITION}", schema, self.schema, partitions)

    def add_columns(self, columns: Mapping[str, pa.DataType]) -> None:
        for _ in attempts(self.name):
            table = self._made()
            wanted = absent(columns, (field.name for field in table.schema().fields))
            if not wanted:
                return
            added = _schema(pa.schema(wanted))
            with suppress(CommitFailedException):
                with table.update_schema() as update:
                    for field in added.fields:
                        update.add_column(field.name, field.field_type)
                return

    def commit(self, previous: int | None, version: int, files: Sequence[DataFile]) -> None:
        for _ in attempts(self.name):
            table = self._made()
            found = self._pointer(table)
            if found == version:  # an earlier attempt succeeded, and only its answer was lost
                return
            if found != previous:
                raise CommitConflict(f"{self.name}: another run committed first")
            check(self.name, _differences(table, self.schema))
            self._ready(table)
            pointer, now = {POINTER: str(version)}, time.time_ns() // 1_000_000
            gone = obsolete(table, previous, self.keep, now)
            if gone:
                self._delete(unfinished(table))
            check_files(self, files, self.place(table))
            summary = pointer | record(gone)
            with suppress(CommitFailedException):
                with table.transaction() as change:
                    with once(change.update_snapshot(snapshot_properties=summary).merge_append()) as append:
                        for file in files:
                            append.append_data_file(data_file(table, file))
                    change.set_properties(pointer | metadata_log(table, self.keep, now))
                    if gone:
                        Drop(change, gone).commit()
                self._delete([snapshot.manifest_list for snapshot in gone])
                return

    def place(self, table: Table) -> StorageLocation:
        """Return where the table is."""
        return StorageLocation(literal(table.location()), self.endpoint)

    def _delete(self, lists: Iterable[str]) -> None:
        """Delete what only dropped snapshots had. What cannot be deleted is left for `orphans`."""
        with suppress(Exception):  # a network failure, or no right to delete
            self._dropped(lists)

    def _dropped(self, lists: Iterable[str]) -> Deleted:
        table, wanted = self.table(), list(lists)
        return delete(self.table, wanted, self.place(table)) if table and wanted else Deleted()

    def files(self) -> list[LiveFile]:
        table = self.table()
        if table is None:
            return []
        deleted_from = with_deletes(table)
        files = (live_file(table, entry, deleted_from) for entry in entries(table))
        return sorted(files, key=lambda file: file.added)

    def rows(self) -> int:
        table = self.table()
        return total_rows(table) if table else 0

    def standing(self, since: str | None, expected: int) -> Standing:
        table = self.table()
        if table is None:
            return Standing(None, "", 0, [])
        rows = counted_rows(table, expected)
        return Standing(self._pointer(table), current_id(table), rows, changes(table, since))

    def content(self) -> Content:
        table = self.table()
        if table is None:
            return Content(None, "", [], lambda paths: iter(()))
        check(self.name, _differences(table, IDENTITY))
        return content(self.name, table, self._pointer(table))

    def parts(self, after: tuple[str, str] = ("", "")) -> Parts:
        table = self._made()
        return Parts(current_id(table), counted_files(table), self.place(table), parts(table, after))

    def take_out(self, previous: int | None, version: int, paths: Collection[str], at: str) -> None:
        table = self._ready(self._made())
        if self._pointer(table) == version:
            return
        if current_id(table) != at:
            raise CommitConflict(f"{self.name}: it was changed meanwhile")
        pointer = {POINTER: str(version)}
        try:
            with table.transaction() as change:
                taking = Without(Operation.OVERWRITE, change, table.io, snapshot_properties=pointer)
                taking.gone = paths
                once(taking).commit()
                change.set_properties(pointer)
        except CommitFailedException as error:
            if self.pointer() != version:
                raise CommitConflict(f"{self.name}: another writer committed first") from error

    def replace(self, removed: Sequence[LiveFile], added: Sequence[DataFile]) -> None:
        """Replace files by others in one commit; the state stays the same. Raises CommitConflict."""
        paths = {file.path for file in removed}
        for _ in attempts(self.name):
            table = self._ready(self._made())
            deleted_from = with_deletes(table)
            known = [(live_file(table, entry, deleted_from), entry.data_file) for entry in entries(table)]
            old = [(file, entry) for file, entry in known if file.path in paths]
            if len(old) != len(paths):
                raise CommitConflict(f"{self.name}: another run has compacted it")
            if any(file.has_deletes for file, _ in old):
                raise CommitConflict(f"{self.name}: another engine has deleted rows in files to be compacted")
            check(self.name, _differences(table, IDENTITY))
            check_files(self, added, self.place(table))
            version = self._pointer(table)
            # the new snapshot repeats the pointer, because the last one that has it may expire
            keep = {} if version is None else {POINTER: str(version)}
            with suppress(CommitFailedException):
                with (
                    table.transaction() as change,
                    once(change.update_snapshot(snapshot_properties=keep).overwrite()) as overwrite,
                ):
                    for _, gone in old:
                        overwrite.delete_data_file(gone)
                    for file in added:
                        overwrite.append_data_file(data_file(table, file))
                return

    def compact(self, spark: SparkSession) -> Compacted:
        from bridge.ingest.sinks.compact import compact

        return compact(spark, self)

    def tidy(self, tasks: Callable[[], Tasks]) -> Compacted:
        table = self.table()
        if table is None or small_files(table, self._looked) < MANY:
            return Compacted()
        from bridge.ingest.sinks.compact import merge

        self._looked = current_id(table)
        files = self.files()
        groups = list(due(files, max((file.day for file in files), default="")))
        return merge(tasks(), self, groups) if groups else Compacted()

    def references(self) -> References:
        return Kept(self.table)

    def retention(self) -> float:
        return 0

    def expire(self, days: float) -> Deleted:
        lists: dict[str, None] = {}
        for _ in attempts(self.name):
            table = self.table()
            gone = replaced(table, _ago(days)) if table else []
            lists |= dict.fromkeys(snapshot.manifest_list for snapshot in gone)
            if table is None or not gone:
                break
            with suppress(CommitFailedException):
                table.metadata = table.metadata.model_copy(update=shared(table.metadata))
                with table.transaction() as change:
                    Drop(change, gone).commit()
                break
        return self._dropped([*(unfinished(table) if table else ()), *lists])

    def orphans(self, days: float) -> Deleted:
        table = self.table()
        return orphans(self.table, self.place(table), _ago(days)) if table else Deleted()

    def erase(self) -> Deleted:
        table = self.table()
        if table is None:
            return Deleted()
        if left := len(with_deletes(table)):
            raise IngestError(
                f"{self.name}: {left} data file(s) still have the rows that another engine has deleted "
                "(merge-on-read), so nothing was erased; let it rewrite them (Athena: OPTIMIZE, Spark: "
                "rewrite_data_files) and repeat"
            )
        current = current_id(table)
        if named := [name for name, ref in table.refs().items() if str(ref.snapshot_id) != current]:
            raise IngestError(
                f"{self.name}: the branches or tags {', '.join(sorted(named))} keep older versions, so "
                "nothing was erased; drop them and repeat"
            )
        done = self.expire(-FOREVER)
        done.add(self.orphans(-FOREVER))
        return done

    def read(self, columns: Sequence[str] | None = None, limit: int | None = None) -> Any:
        table = self.table()
        if table is None:
            return self.schema.empty_table()
        return table.scan(selected_fields=tuple(columns) if columns else ("*",), limit=limit).to_arrow()


def _ago(days: float) -> float:
    """Return the Unix time in ms so many days ago."""
    return (time.time() - days * DAY) * 1000


def open_catalog(
    warehouse: str | None, properties: Mapping[str, str], endpoint: str | None, *, make: bool = True
) -> Catalog:
    """Open the catalog of the properties or, without any, an SQLite file in the warehouse directory.

    Without `make` the SQLite file must exist: raises NoTable if it does not, and creates nothing.
    """
    options = dict(properties)
    if endpoint:
        options.setdefault("s3.endpoint", endpoint)
        # without it Arrow would ask AWS for the bucket's region, and wait in vain
        options.setdefault(
            "s3.region", os.environ.get("AWS_REGION", os.environ.get("AWS_DEFAULT_REGION", "us-east-1"))
        )
    if warehouse:
        location = StorageLocation(warehouse)
        if not location.is_s3:
            folder = table_folder("--warehouse", warehouse, "%#?")
            warehouse = f"file://{folder}"  # not quoted: pyiceberg does not unquote the path
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
            "no catalog: give --warehouse DIR, or --catalog type=glue (rest, sql, ...) and its options"
        )
    return load_catalog(options.pop("name", "streambridge"), **options)


def once(change: Change) -> Change:
    """Keep a change of a transaction from being made on top of another writer's later commit.

    pyiceberg would do so at its retries, without a look at the pointer. See LOOK_AGAIN for why it retries.
    """
    change._validate_concurrency = _refused  # type: ignore[method-assign]
    return change


def _refused() -> None:
    raise CommitFailedException("another writer committed first")


def data_file(table: Table, file: DataFile) -> IcebergFile:
    """Return the table's description of a file, without reading the file again."""
    fields = {field.name: field for field in table.schema().fields}
    low, high = {}, {}
    for column, (least, most) in file.bounds.items():
        field = fields.get(column)
        if field is None:  # of the topic, which another engine has renamed
            continue
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


def live_file(table: Table, entry: ManifestEntry, deleted_from: Container[str] = ()) -> LiveFile:
    """Convert a manifest entry; `deleted_from` are the paths of files with deleted rows."""
    file = entry.data_file
    path = below(table.location(), file.file_path) or file.file_path
    by_day = daily(table, table.specs()[file.spec_id])
    return LiveFile(
        path,
        (date(1970, 1, 1) + timedelta(days=file.partition[0])).isoformat() if by_day else "",
        file.file_size_in_bytes,
        file.record_count,
        entry.file_sequence_number or 0,
        file.file_path in deleted_from,
    )


def _schema(schema: pa.Schema) -> Schema:
    """Convert an Arrow schema, with ids 1, 2, ... for the columns and the fields within them."""
    if any(has_variant(field.type) for field in schema):
        raise BadOption(
            "an Iceberg table cannot have a VARIANT column yet: it needs Iceberg's format 3, and pyiceberg "
            "does not support the type; use --delta, or give typed columns in --schema"
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
    """Return the columns of the data files, with their field ids."""
    return pa.schema([_narrow(field) for field in schema_to_pyarrow(schema, include_field_ids=True)])


def _narrow(field: pa.Field) -> pa.Field:
    """Replace the large types of pyiceberg's Arrow schemas; files are written with plain types."""
    kind = field.type
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct([_narrow(inner) for inner in kind]))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return field.with_type(pa.list_(_narrow(kind.value_field)))
    plain = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    return field.with_type(plain.get(kind, kind))
