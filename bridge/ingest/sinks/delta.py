"""A Delta table through delta-rs, without any JVM library.

The pointer to the state is the version of an application transaction in the commit that adds the files.
delta-rs does not refuse a repeated transaction itself, so the pointer is always compared first. With its
default retries it does refuse a commit from a handle that has not seen another run's commit.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Field, Schema, TableFeatures, Transaction, VariantType
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction

from bridge.ingest.columns import IDENTITY, MESSAGES, PARTITIONS, TIME, VARIANT, is_variant
from bridge.ingest.deletes import Deleted, References, delete, listed, normal, sweep
from bridge.ingest.errors import CommitConflict, IngestError, Vanished, line
from bridge.ingest.files import DataFile, Target
from bridge.ingest.sinks.base import (
    DATA,
    DELETES,
    Compacted,
    Content,
    Difference,
    Held,
    LiveFile,
    Part,
    Parts,
    Standing,
    absent,
    attempts,
    check,
    check_files,
    differences,
    state_of,
)
from bridge.ingest.sinks.deltalog import NOW, named, old, retention
from bridge.ingest.sinks.due import SMALL, due
from bridge.ingest.sinks.vectors import FRAME, file_of, read_vectors
from bridge.ingest.store import ALWAYS, StorageLocation, holding, table_folder
from bridge.ingest.stored import RangedFile, footer, undamaged

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bridge.ingest.tasks import Tasks

APPLICATION = "streambridge-ingest"
PARTITION = PARTITIONS[0]
BATCH_ROWS = 100_000
DAY = 24 * 3600
FOREVER = 36500  # days: whatever the clocks of those who wrote


class DeltaSink:
    """The Delta table at a directory or an s3:// URL."""

    def __init__(
        self, url: str, state_at: str | None = None, endpoint: str | None = None, schema: pa.Schema = MESSAGES
    ) -> None:
        self.location = StorageLocation(
            url if StorageLocation(url).is_s3 else str(table_folder("--delta", url, "%")), endpoint
        )
        self.schema = schema
        self._state_at = state_at
        self._options = {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"} if endpoint else None

    @property
    def name(self) -> str:
        return self.location.url

    def table(self) -> DeltaTable | None:
        """The table as it is now, or None."""
        if DeltaTable.is_deltatable(self.location.url, self._options):
            return DeltaTable(self.location.url, storage_options=self._options)
        return None

    def _made(self) -> DeltaTable:
        table = self.table()
        if table is None:
            schema = Schema(_fields(self.schema.append(pa.field(PARTITION, pa.date32()))))
            # mode "ignore": another run may create it at the same time
            DeltaTable.create(
                self.location.url,
                schema,
                mode="ignore",
                partition_by=[PARTITION],
                storage_options=self._options,
            )
            table = DeltaTable(self.location.url, storage_options=self._options)
        return table

    def state(self) -> StorageLocation:
        # VACUUM skips folders whose names begin with an underscore
        if self._state_at:
            path = self.location.url.rpartition("://")[2].strip("/")
            table = self.table()
            identity = str(table.metadata().id) if table else None
            return state_of(
                path.replace("/", "_"), StorageLocation(self._state_at, self.location.endpoint), identity
            )
        return self.location.join("_streambridge")

    def pointer(self) -> int | None:
        table = self.table()
        return table.transaction_version(APPLICATION) if table else None

    def differences(self) -> list[Difference]:
        table = self.table()
        return self._differences(table) if table else []

    def _differences(self, table: DeltaTable) -> list[Difference]:
        return differences(_arrow(Schema(_fields(self.schema))), _arrow(table.schema()))

    def _check(self, table: DeltaTable) -> None:
        check(self.name, self._differences(table))
        _check_layout(self.name, table)

    def target(self) -> Target:
        table = self._made()
        self._check(table)
        return Target.of(self.location, PARTITION, _arrow(table.schema()), self.schema)

    def add_columns(self, columns: Mapping[str, pa.DataType]) -> None:
        for _ in attempts(self.name):
            table = self._made()
            _check_layout(self.name, table)
            added = _fields(absent(columns, (field.name for field in table.schema().fields)))
            if not added:
                return
            with suppress(CommitFailedError):
                if any(isinstance(field.type, VariantType) for field in added):
                    table.alter.add_feature(TableFeatures.VariantType, allow_protocol_versions_increase=True)
                table.alter.add_columns(added)
                return

    def commit(self, previous: int | None, version: int, files: Sequence[DataFile]) -> None:
        table = self._made()
        found = table.transaction_version(APPLICATION)
        if found == version:
            return
        if found != previous:
            raise CommitConflict(f"{self.name}: another run committed first")
        self._check(table)
        check_files(self, files, self.location)
        properties = CommitProperties(app_transactions=[Transaction(APPLICATION, version)])
        try:
            table.create_write_transaction(
                [_action(file) for file in files],
                "append",
                table.schema(),
                partition_by=[PARTITION],
                commit_properties=properties,
            )
        except CommitFailedError as error:
            if self.pointer() == version:  # the commit succeeded, and only its answer was lost
                return
            if "oncurrent transaction" in str(error):
                raise CommitConflict(f"{self.name}: another run committed first") from error
            raise

    def files(self) -> list[LiveFile]:
        table = self.table()
        if table is None:
            return []
        _check_partitions(self.name, table)
        deleted, found = _deleted(table), []
        for action in self._actions(table):
            path, rows = action["path"], action["num_records"]
            day, added = str(action[f"partition.{PARTITION}"]), _millis(action["modification_time"])
            found.append(LiveFile(path, day, action["size_bytes"], rows, added, _name(path) in deleted))
        return sorted(found, key=lambda file: file.added)

    def _actions(self, table: DeltaTable) -> list[dict[str, Any]]:
        """Return the data files with plain paths, and always with their numbers of rows."""
        found: list[dict[str, Any]] = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        for action in found:
            action["path"] = unquote(action["path"])
            if action.get("num_records") is None:  # another engine wrote it without statistics
                place, key = holding(self.location, action["path"])
                action["num_records"] = 0
                with suppress(Vanished):
                    action["num_records"] = footer(place.open(), key).num_rows
        return found

    def rows(self) -> int:
        table = self.table()
        return self._rows(table) if table else 0

    def _rows(self, table: DeltaTable) -> int:
        deleted = sum(int(vector["cardinality"]) for vector in self._vectors(table).values())
        return sum(int(action["num_records"]) for action in self._actions(table)) - deleted

    def _vectors(self, table: DeltaTable) -> dict[str, dict[str, Any]]:
        return read_vectors(self.location.open(), table.version()) if _has_vectors(table) else {}

    def parts(self, after: tuple[str, str] = ("", "")) -> Parts:
        table = self._made()
        found, vectors = [], self._vectors(table)
        for action in pa.table(table.get_add_actions(flatten=True)).to_pylist():
            path, day = unquote(action["path"]), str(action.get(f"partition.{PARTITION}") or "")
            rows, size = action.get("num_records") or 0, action["size_bytes"]
            deletes = int(vectors.get(path, {}).get("cardinality", 0))
            part = Part(self._full(path), DATA, size, rows, day, _bounds(action), deletes=deletes)
            found.append(part)
        days = {part.path: part.day for part in found}
        for path, vector in vectors.items():
            if (name := file_of(vector)) is not None:
                of = self._full(path)
                least = vector.get("offset", 0) + vector["sizeInBytes"] + FRAME
                found.append(Part(self._full(name), DELETES, None, 0, days.get(of, ""), None, of, least))
        found.sort(key=Part.order)
        return Parts(
            str(table.version()), len(found), self.location, (part for part in found if part.order() > after)
        )

    def _full(self, path: str) -> str:
        """Return a path in full: those below the table's folder are relative to it."""
        full = path.startswith("/") or re.match("[A-Za-z][A-Za-z0-9+.-]*:/", path)
        return path if full else f"{self.location.url.rstrip('/')}/{path}"

    def standing(self, since: str | None, expected: int) -> Standing:
        table = self.table()
        if table is None:
            return Standing(None, "", 0, [])
        pointer = table.transaction_version(APPLICATION)
        return Standing(pointer, str(table.version()), self._rows(table), self._changes(table, since))

    def _changes(self, table: DeltaTable, since: str | None) -> list[str]:
        """Return the versions after `since` that may have changed rows and are of no run."""
        if since is None:
            return []
        store, found = self.location.open(), []
        for version in range(int(since) + 1 if since else 0, table.version() + 1):
            try:
                log = store.get(f"_delta_log/{version:020d}.json")
            except Vanished:  # it has expired
                continue
            actions = [json.loads(text) for text in log.splitlines() if text.strip()]
            if any(action.get("txn", {}).get("appId") == APPLICATION for action in actions):
                continue
            files = [action[kind] for action in actions for kind in ("add", "remove") if kind in action]
            if any(file.get("dataChange", True) for file in files):
                given = [action["commitInfo"] for action in actions if "commitInfo" in action]
                operation = line(given[0].get("operation")) if given else "unknown"
                found.append(f"version {version} ({operation})")
        return found

    def content(self) -> Content:
        table = self.table()
        if table is None:
            return Content(None, "", [], lambda paths: iter(()))
        check(self.name, differences(IDENTITY, _arrow(table.schema())))
        _check_layout(self.name, table)
        actions, deleted = self._actions(table), _deleted(table)
        files = [
            Held(
                action["path"],
                action["num_records"],
                None if _name(action["path"]) in deleted else _bounds(action),
            )
            for action in actions
        ]
        sizes = {action["path"]: action["size_bytes"] for action in actions}

        def read(paths: Collection[str]) -> Iterator[pa.Table]:
            for path in paths:
                place, key = holding(self.location, path)
                with undamaged(path):
                    source = pa.PythonFile(RangedFile(place.open(), key, sizes[path]), mode="r")
                    file = pq.ParquetFile(source, page_checksum_verification=True)
                    start, vector = 0, deleted.get(_name(path), [])
                    for batch in file.iter_batches(BATCH_ROWS, columns=IDENTITY.names, use_threads=False):
                        rows = pa.Table.from_batches([batch]).cast(IDENTITY)  # may be of views
                        gone = vector[start : start + rows.num_rows]
                        start += rows.num_rows
                        keep = pa.array(gone + [True] * (rows.num_rows - len(gone)))
                        yield rows.filter(keep)

        pointer = table.transaction_version(APPLICATION)
        return Content(pointer, str(table.version()), files, read)

    def take_out(self, previous: int | None, version: int, paths: Collection[str], at: str) -> None:
        """As in `Sink`. Written here: what delta-rs removes keeps its deletion vector, and so stays."""
        table = self._made()
        if table.transaction_version(APPLICATION) == version:
            return
        self._check(table)
        if table.metadata().configuration.get("delta.appendOnly") == "true":
            raise IngestError(
                f"{self.name}: it is append-only, so no file was taken out; unset delta.appendOnly"
            )
        vectors, now = self._vectors(table), time.time_ns() // 1_000_000
        actions: list[dict[str, Any]] = [{"commitInfo": {"timestamp": now, "operation": "FSCK"}}]
        for action in pa.table(table.get_add_actions(flatten=True)).to_pylist():
            if self._full(path := unquote(action["path"])) in paths:
                day = str(action[f"partition.{PARTITION}"])
                gone = {"path": action["path"], "deletionTimestamp": now, "dataChange": True}
                gone |= {"extendedFileMetadata": True, "partitionValues": {PARTITION: day}}
                gone |= {"size": action["size_bytes"]}
                gone |= {"deletionVector": vectors[path]} if path in vectors else {}
                actions.append({"remove": gone})
        actions.append({"txn": {"appId": APPLICATION, "version": version, "lastUpdated": now}})
        log = "".join(f"{json.dumps(action)}\n" for action in actions).encode()
        name = f"_delta_log/{table.version() + 1:020d}.json"
        is_new = str(table.version()) == at and self.location.open().create(name, log)
        if not is_new and self.pointer() != version:
            raise CommitConflict(f"{self.name}: it was changed meanwhile")

    def replace(self, removed: Sequence[LiveFile], added: Sequence[DataFile]) -> None:
        table = self._made()
        if {file.path for file in removed} != {file.path for file in self.files()}:
            raise CommitConflict(f"{self.name}: another run has changed its files")
        self._check(table)
        check_files(self, added, self.location)
        # the pointer is repeated: delta-rs then refuses this commit after one of another run, and the reverse
        version = table.transaction_version(APPLICATION)
        same = [] if version is None else [Transaction(APPLICATION, version)]
        try:
            table.create_write_transaction(
                [_action(file) for file in added],
                "overwrite",
                table.schema(),
                partition_by=[PARTITION],
                commit_properties=CommitProperties(app_transactions=same),
            )
        except CommitFailedError as error:
            if "oncurrent transaction" in str(error):
                raise CommitConflict(f"{self.name}: another run committed first") from error
            raise

    def compact(self, spark: SparkSession) -> Compacted:
        """Compact in this process: the Python API of delta-rs cannot commit files that executors replaced."""
        table = self.table()
        if table is None:
            return Compacted()
        _check_layout(self.name, table)
        done = table.optimize.compact()
        return Compacted(
            done["numFilesRemoved"], done["numFilesAdded"], sum(file.rows for file in self.files())
        )

    def tidy(self, tasks: Callable[[], Tasks]) -> Compacted:
        """Merge in this process, for the same reason as `compact`."""
        table, done = self.table(), Compacted()
        if table is None or _deleted(table):
            return done
        _check_layout(self.name, table)
        day = f"partition.{PARTITION}"
        found = pa.table(table.get_add_actions(flatten=True)).select(["path", "size_bytes", day])
        newest = str(pc.max(found[day]).as_py())
        files = [
            LiveFile(one["path"], str(one[day]), one["size_bytes"], 0, 0)
            for one in found.filter(pc.less(found["size_bytes"], SMALL)).to_pylist()
        ]
        for group in due(files, newest):
            size = sum(file.size for file in group)
            try:
                merged = table.optimize.compact([(PARTITION, "=", group[0].day)], target_size=size)
            except CommitFailedError as error:
                raise CommitConflict(f"{self.name}: {line(error)}") from error
            done.before += merged["numFilesRemoved"]
            done.after += merged["numFilesAdded"]
        return done

    def references(self) -> References:
        return self._needed(0)

    def retention(self) -> float:
        table = self.table()
        return retention(table.metadata().configuration) if table else 0

    def expire(self, days: float) -> Deleted:
        table, before = self.table(), (time.time() - days * DAY) * 1000
        if table is None:
            return Deleted()
        files = named(self.location, table.version())
        gone = {normal(file) for file, until in files.items() if until <= before}
        # the log spells names in its own way; the listing has the keys
        keys, done = listed(self.location, "", wanted=lambda key: normal(self.location.join(key).url) in gone)
        done.add(delete(self.location, keys, self._needed(before)))
        return done

    def orphans(self, days: float) -> Deleted:
        if self.table() is None:
            return Deleted()
        before = (time.time() - days * DAY) * 1000
        return sweep(self.location, "", self._needed(0), before, _visible)

    def _needed(self, since: float) -> References:
        """Return what gives the files that a version since a time needed (Unix, in ms)."""
        seen = -1

        def news() -> Iterator[str]:
            nonlocal seen
            table = self.table()
            if table is not None and table.version() != seen:
                yield from (
                    file
                    for file, until in named(self.location, table.version()).items()
                    if until > since or until == NOW
                )
                yield from table.file_uris()
                seen = table.version()

        return news

    def erase(self) -> Deleted:
        table = self.table()
        if table is None:
            return Deleted()
        if left := len(_deleted(table)):
            raise IngestError(
                f"{self.name}: {left} data file(s) still have the rows that another engine has deleted "
                "(deletion vectors), so nothing was erased; let it rewrite them (REORG TABLE ... APPLY "
                "(PURGE)) and repeat"
            )
        done = self.expire(-FOREVER)
        done.add(sweep(self.location, "", self._needed(ALWAYS), wanted=_visible))
        # commits name bounds of the values in files that are gone, and conditions by which rows were deleted
        version = table.transaction_version(APPLICATION)
        same = [] if version is None else [Transaction(APPLICATION, version)]
        table.create_write_transaction(
            [],
            "append",
            table.schema(),
            partition_by=[PARTITION],
            commit_properties=CommitProperties(app_transactions=same),
        )
        table = self._made()
        table.create_checkpoint()
        kept = [self.location.join(f"_delta_log/{table.version():020d}.json").url]
        done.add(delete(self.location, list(old(self.location, table.version())), lambda: kept))
        return done

    def read(self, columns: Sequence[str] | None = None, limit: int | None = None) -> Any:
        table = self.table()
        if table is None:
            return self.schema.empty_table()
        data = table.to_pyarrow_dataset()
        chosen = list(columns) if columns else None
        return data.to_table(chosen) if limit is None else data.head(limit, columns=chosen)


def _visible(key: str) -> bool:
    """Return whether a key is of a file that belongs to versions: other engines' own folders are hidden."""
    parts = key.removeprefix("_change_data/").split("/")
    return not any(part.startswith(("_", ".")) for part in parts)


def _deleted(table: DeltaTable) -> dict[str, list[bool]]:
    """Return, by file name, which rows other engines have left by deletion vectors.

    Rows beyond the end of a list are left too.
    """
    if not _has_vectors(table):
        return {}
    found = pa.table(table.deletion_vectors().read_all()).to_pylist()
    return {_name(vector["filepath"]): vector["selection_vector"] for vector in found}


def _has_vectors(table: DeltaTable) -> bool:
    """Return whether the table may have deletion vectors."""
    return "deletionVectors" in (table.protocol().reader_features or ())


def _bounds(action: dict[str, Any]) -> dict[str, tuple[Any, Any]] | None:
    """Return the bounds of the columns of IDENTITY, if the file has all of them, and no nulls."""
    found = {}
    for name in IDENTITY.names:
        low, high = action.get(f"min.{name}"), action.get(f"max.{name}")
        if low is None or high is None or action.get(f"null_count.{name}") != 0:
            return None
        found[name] = (_micros(low), _micros(high)) if name == "ingest_time" else (low, high)
    return found


def _micros(when: Any) -> int:
    return int(pa.scalar(when, TIME).cast(pa.int64()).as_py())


def _name(path: str) -> str:
    return unquote(path.rpartition("/")[2])


def _check_layout(name: str, table: DeltaTable) -> None:
    """Raise IngestError for a table whose files delta-rs, or this sink, would read or write wrongly."""
    _check_partitions(name, table)
    _check_names(name, table)


def _check_partitions(name: str, table: DeltaTable) -> None:
    """Raise IngestError if files have other partitions: one of ours among them makes a table unreadable."""
    found = table.metadata().partition_columns
    if found != [PARTITION]:
        raise IngestError(
            f"{name}: it is partitioned by {', '.join(found) or 'nothing'}, not by {PARTITION}: another "
            "engine has changed that, which is not supported; nothing was written. Let it restore an "
            f"earlier version of the table, or write it again with {PARTITION} as its only partition"
        )


def _check_names(name: str, table: DeltaTable) -> None:
    """Raise IngestError if files have a column under another name: delta-rs would read and write nulls."""
    for field in table.schema().fields:
        stored = field.metadata.get("delta.columnMapping.physicalName", field.name)
        if stored != field.name:
            raise IngestError(
                f"{name}: its files have the column {field.name} under the name {stored}: another engine has "
                "renamed or added it by column mapping, which is not supported; nothing was written. "
                f"Rename it to {stored}, or copy the table into a new one without column mapping, and let "
                "`streambridge ingest repair` count the rows of the copy before the next run"
            )


def _arrow(schema: Schema) -> pa.Schema:
    """Return the columns of the data files: those of the table without the partition."""
    variants = {field.name for field in schema.fields if isinstance(field.type, VariantType)}
    return pa.schema(
        [
            pa.field(field.name, VARIANT) if field.name in variants else _narrow(field)
            for field in pa.schema(schema.to_arrow())
            if field.name != PARTITION
        ]
    )


def _fields(columns: Iterable[pa.Field]) -> list[Field]:
    """Return the columns in Delta's types."""
    return [
        Field(column.name, VariantType())
        if is_variant(column.type)
        else Schema.from_arrow(pa.schema([column])).fields[0]
        for column in columns
    ]


def _millis(when: Any) -> int:
    return when if isinstance(when, int) else int(when.timestamp() * 1000)


def _action(file: DataFile) -> AddAction:
    low, high = ({name: _json(name, bounds[end]) for name, bounds in file.bounds.items()} for end in (0, 1))
    statistics = {
        "numRecords": file.rows,
        "minValues": low,
        "maxValues": high,
        "nullCount": dict.fromkeys(low, 0),
    }
    return AddAction(
        path=file.path,
        size=file.size,
        partition_values={PARTITION: file.day},
        modification_time=time.time_ns() // 1_000_000,
        data_change=True,
        stats=json.dumps(statistics),
    )


def _json(name: str, value: Any) -> Any:
    if name != "ingest_time":
        return value
    return pa.scalar(value, pa.timestamp("us")).as_py().isoformat(timespec="microseconds") + "Z"


def _narrow(field: pa.Field) -> pa.Field:
    """Replace the view types that delta-rs may use in Arrow schemas; files are written with plain types."""
    plain = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary(), pa.large_string(): pa.string()}
    return pa.field(field.name, plain.get(field.type, field.type), field.nullable)
