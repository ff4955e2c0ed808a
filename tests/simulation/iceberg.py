"""A table of Iceberg in a bucket: the real sink, on pyiceberg, with a catalog in memory.

`Iceberg` is what is there, as `table.Table` is; `OpenIceberg` is what one run has opened of it. Metadata,
manifests and data files are objects of the bucket. The catalog knows where the newest metadata is, and moves
that only if nobody else has meanwhile, as every catalog of Iceberg does. It calls `at("load")`, and around a
commit `at("commit")` and `at("committed")`. If the last raises LostAnswer, the commit is asked for again, as
by the clients of AWS, and refused.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from datetime import datetime
from io import BytesIO
from time import time
from typing import Any
from urllib.parse import urlparse

import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.table.metadata
import pyiceberg.table.update
from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.io import FileIO, InputFile, OutputFile
from pyiceberg.manifest import read_manifest_list
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import CommitTableResponse
from pyiceberg.table import Table as TableOfIceberg
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.utils.concurrent import ExecutorFactory

from bridge.ingest.errors import Vanished
from bridge.ingest.files import DataFile
from bridge.ingest.sinks.base import Compacted, LiveFile
from bridge.ingest.sinks.compact import merge
from bridge.ingest.sinks.due import bins
from bridge.ingest.sinks.iceberg import IcebergSink
from bridge.ingest.store import StorageLocation

from .bucket import At, Bucket, BucketStore, nowhere
from .table import LostAnswer, Version, check_bounds


class _Now(datetime):
    """What `datetime.now` is on the simulated machine."""

    @classmethod
    def now(cls, tz: Any = None) -> _Now:
        return cls.fromtimestamp(time(), tz)


class _AtOnce(Executor):
    """Does what it is given, before it returns."""

    def submit(self, do: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(do(*args, **options))
        except Exception as error:
            done.set_exception(error)
        return done


def install() -> None:
    """Give pyiceberg the simulated clock, and no threads. Only in a process that does nothing else."""
    pyiceberg.table.update.datetime = _Now  # type: ignore[attr-defined]
    pyiceberg.table.metadata.datetime = types.SimpleNamespace(datetime=_Now)  # type: ignore[assignment]
    executor = _AtOnce()
    ExecutorFactory.get_or_create = staticmethod(lambda: executor)  # type: ignore[method-assign]


class Iceberg:
    """A table in a bucket."""

    def __init__(self, bucket: Bucket, name: str = "lake.messages") -> None:
        self.bucket, self.name = bucket, name
        self.url = f"s3://{bucket.name}/{name}"
        self.current = ""  # where its metadata is; empty: there is no such table
        self._parsed: dict[str, TableMetadata] = {}
        self._files: dict[str, list[LiveFile]] = {}  # by snapshot
        self._needed: dict[str, set[str]] = {}  # objects, by snapshot

    @property
    def schema(self) -> object:
        """None if there is no such table."""
        return self.metadata(self.current).schema() if self.current else None

    def metadata(self, location: str, at: At = nowhere) -> TableMetadata:
        """Read metadata."""
        if location not in self._parsed:
            self._parsed[location] = FromInputFile.table_metadata(_Files(self, at).new_input(location))
        return self._parsed[location]

    @property
    def now(self) -> Version:
        """What a reader sees."""
        if not self.current:
            return Version(0, None, ())
        metadata = self.metadata(self.current)
        head = str(metadata.current_snapshot_id)
        if head not in self._files:
            self._files[head] = self.sink().files()
        return Version(metadata.last_updated_ms, None, tuple(self._files[head]))

    def needed(self) -> set[str]:
        """The keys of what a version of the table uses that has not expired."""
        if not self.current:
            return set()
        metadata = self.metadata(self.current)
        for snapshot in metadata.snapshots:
            if str(snapshot.snapshot_id) not in self._needed:
                self._needed[str(snapshot.snapshot_id)] = self._used_by(snapshot)
        used = [self._needed[str(snapshot.snapshot_id)] for snapshot in metadata.snapshots]
        return {_key(self.current)}.union(*used)

    def _used_by(self, snapshot: Any) -> set[str]:
        files = _Files(self, nowhere)
        found = {_key(snapshot.manifest_list)}
        for manifest in read_manifest_list(files.new_input(snapshot.manifest_list)):
            entries = manifest.fetch_manifest_entry(files, discard_deleted=True)
            found |= {_key(manifest.manifest_path), *(_key(entry.data_file.file_path) for entry in entries)}
        return found

    def sink(self, at: At = nowhere) -> OpenIceberg:
        """Open the table; `at` is called before each step."""
        return OpenIceberg(self, at)

    def content(self, path: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of a data file."""
        body = self.bucket.objects[f"{self.name}/{path}"].body
        return pq.ParquetFile(BytesIO(body)).read(columns and list(columns), use_threads=False)


class OpenIceberg(IcebergSink):
    """The sink, on a bucket in memory."""

    def __init__(self, table: Iceberg, at: At) -> None:
        super().__init__(_Catalog(table, at), table.name, f"s3://{table.bucket.name}/state")
        self.memory, self.at = table, at

    def _in_memory(self, location: StorageLocation) -> Any:
        return self.memory.bucket.place(urlparse(location.url).path.strip("/"), self.at)

    def state(self) -> StorageLocation:
        place: StorageLocation = self._in_memory(super().state())
        return place

    def place(self, table: TableOfIceberg) -> StorageLocation:
        place: StorageLocation = self._in_memory(super().place(table))
        return place

    def commit(self, previous: int | None, version: int, files: Sequence[DataFile]) -> None:
        for file in files:
            check_bounds(self.memory, file)
        super().commit(previous, version, files)

    def compact(self, tasks: Any) -> Compacted:
        """Merge the small files of each day, in tasks that need no Spark."""
        return merge(tasks, self, list(bins(self.files())))


class _Catalog(MetastoreCatalog, NoopCatalog):
    """A catalog of one table."""

    def __init__(self, table: Iceberg, at: At) -> None:
        super().__init__("simulated")
        self._table, self._at = table, at

    def _load_file_io(self, properties: Any = None, location: str | None = None) -> FileIO:
        return _Files(self._table, self._at)

    def create_namespace(self, namespace: Any, properties: Any = None) -> None:
        pass

    def create_table(
        self, identifier: Any, schema: Any, location: str | None = None, *args: Any, **options: Any
    ) -> TableOfIceberg:
        staged = self._create_staged_table(identifier, schema, self._table.url, *args, **options)
        self._write_metadata(staged.metadata, staged.io, staged.metadata_location)
        self._at("create")
        if self._table.current:
            raise TableAlreadyExistsError(self._table.name)
        self._table.current = staged.metadata_location
        return self.load_table(identifier)

    def load_table(self, identifier: Any) -> TableOfIceberg:
        self._at("load")
        if not self._table.current:
            raise NoSuchTableError(self._table.name)
        name, at = self.identifier_to_tuple(identifier), self._table.current
        return TableOfIceberg(name, self._table.metadata(at, self._at), at, self._load_file_io(), self)

    def commit_table(self, table: TableOfIceberg, requirements: Any, updates: Any) -> CommitTableResponse:
        now = self.load_table(table.name())
        staged = self._update_and_stage_table(now, table.name(), requirements, updates)
        if staged.metadata != now.metadata:
            self._write_metadata(staged.metadata, staged.io, staged.metadata_location)
            self._at("commit")
            if self._table.current != now.metadata_location:
                raise CommitFailedException(f"{self._table.name}: it has other metadata by now")
            self._table.current = staged.metadata_location
            try:
                self._at("committed")
            except LostAnswer as lost:
                self._at("commit again")
                raise CommitFailedException(f"{self._table.name}: it has other metadata by now") from lost
        return CommitTableResponse(metadata=staged.metadata, metadata_location=staged.metadata_location)


class _Files(FileIO):
    """The objects of the bucket, as pyiceberg reads and writes them."""

    def __init__(self, table: Iceberg, at: At) -> None:
        super().__init__()
        self.store = BucketStore(table.bucket, "", at)

    def new_input(self, location: str) -> _File:
        return _File(location, self.store)

    new_output = new_input

    def delete(self, location: Any) -> None:
        path = location if isinstance(location, str) else location.location
        if _key(path) not in self.store.bucket.objects:
            raise FileNotFoundError(path)
        self.store.delete([_key(path)])


class _File(InputFile, OutputFile):
    def __init__(self, location: str, store: BucketStore) -> None:
        super().__init__(location)
        self._store = store

    def __len__(self) -> int:
        return len(self._store.bucket.objects[_key(self.location)].body)

    def exists(self) -> bool:
        return _key(self.location) in self._store.bucket.objects

    def open(self, seekable: bool = True) -> Any:
        try:
            return BytesIO(self._store.get(_key(self.location)))
        except Vanished as error:
            raise FileNotFoundError(self.location) from error

    def create(self, overwrite: bool = False) -> Any:
        if not overwrite and self.exists():
            raise FileExistsError(self.location)
        return _Upload(lambda body: self._store.put(_key(self.location), body))

    def to_input_file(self) -> InputFile:
        return self


class _Upload(BytesIO):
    """What is written becomes an object when it is closed."""

    def __init__(self, done: Callable[[bytes], object]) -> None:
        super().__init__()
        self._done = done

    def close(self) -> None:
        if not self.closed:
            body = self.getvalue()
            super().close()
            self._done(body)


def _key(location: str) -> str:
    return urlparse(location).path.strip("/")
