"""A table in memory, with the contract of `bridge.ingest.sinks.base` (tests/ingest/test_sinks.py checks it).

`Table` is what is there; a `TableSink` is what one run has opened of it. Data files and state documents are
objects of a bucket. Each commit makes a version: its files and its pointer, visible together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bridge.ingest.columns import IDENTITY, MESSAGES, shaped
from bridge.ingest.deletes import Deleted, References, sweep
from bridge.ingest.errors import CommitConflict
from bridge.ingest.files import STATISTICS, DataFile, DayFiles, Target, labelled, sweep_on_error
from bridge.ingest.sinks.base import (
    DATA,
    Compacted,
    Content,
    Difference,
    Held,
    LiveFile,
    Part,
    Parts,
    Standing,
    absent,
)

from .bucket import At, Bucket, Place, nowhere

DAY_MS = 24 * 3600 * 1000


class LostAnswer(Exception):  # noqa: N818 - named for what is the case
    """Raised by `at` when a commit was made and nobody says so."""


@dataclass(frozen=True, slots=True)
class Version:
    """What one commit left; `at` is its Unix time in ms."""

    at: int
    pointer: int | None
    files: tuple[LiveFile, ...]


class Table:
    """A table in a bucket."""

    def __init__(
        self, bucket: Bucket, name: str = "lake.messages", kind: type[TableSink] | None = None
    ) -> None:
        """`kind` is what opens it."""
        self.bucket, self.name, self.kind = bucket, name, kind or TableSink
        self.schema: pa.Schema | None = None  # None: there is no such table
        self.versions: list[Version] = [Version(0, None, ())]
        self.commits = 0

    @property
    def now(self) -> Version:
        """What a reader sees."""
        return self.versions[-1]

    def needed(self) -> set[str]:
        """The keys of what a version of the table uses that has not expired."""
        return {f"{self.name}/{file.path}" for version in self.versions for file in version.files}

    def sink(self, at: At = nowhere) -> TableSink:
        """Open the table; `at` is called before each step."""
        return self.kind(self, at)

    def content(self, path: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of a data file."""
        body = self.bucket.objects[f"{self.name}/{path}"].body
        return pq.ParquetFile(BytesIO(body)).read(columns and list(columns), use_threads=False)


class TableSink:
    """A sink. A commit calls `at("commit")` before it happens, and `at("committed")` after it.

    If that raises LostAnswer, the commit is tried again, as by the sinks of Iceberg and Delta, after
    `at("commit again")`.
    """

    def __init__(self, table: Table, at: At) -> None:
        self.memory, self.at = table, at

    @property
    def name(self) -> str:
        return self.memory.name

    def table(self) -> Table | None:
        self.at("table")
        return self.memory if self.memory.schema is not None else None

    def pointer(self) -> int | None:
        self.at("pointer")
        return self.memory.now.pointer

    def differences(self) -> list[Difference]:
        return []  # nobody else changes its columns

    def _place(self) -> Place:
        return self.memory.bucket.place(self.memory.name, self.at)

    def target(self) -> Target:
        self.at("target")
        if self.memory.schema is None:
            self.memory.schema = MESSAGES
        return Target.of(self._place(), "data/ingest_day", self.memory.schema, MESSAGES)

    def state(self) -> Place:
        place = self.memory.bucket.place(f"state/{self.memory.name}", self.at)
        return place if self.memory.schema is None else replace(place, url=f"{place.url}/made")

    def add_columns(self, columns: Mapping[str, pa.DataType]) -> None:
        self.at("add columns")
        schema = self.memory.schema or MESSAGES
        for field in absent(columns, schema.names):
            schema = schema.append(field)
        self.memory.schema = schema

    def commit(self, previous: int | None, version: int, files: Sequence[DataFile]) -> None:
        self.at("commit")
        self._commit(previous, version, files)
        try:
            self.at("committed")
        except LostAnswer:
            self.at("commit again")
            self._commit(previous, version, files)

    def _commit(self, previous: int | None, version: int, files: Sequence[DataFile]) -> None:
        self.memory.schema = self.memory.schema or MESSAGES
        found = self.memory.now.pointer
        if found != version:  # otherwise an earlier attempt succeeded, and only its answer was lost
            if found != previous:
                raise CommitConflict(f"{self.name}: another run committed first")
            self.add(version, self.memory.now.files, files)

    def add(self, pointer: int | None, kept: Sequence[LiveFile], files: Sequence[DataFile]) -> None:
        """Make a version of the files kept and added."""
        table = self.memory
        for file in files:
            check_bounds(table, file)
        table.commits += 1
        new = [LiveFile(file.path, file.day, file.size, file.rows, table.commits) for file in files]
        table.versions.append(Version(int(table.bucket.now() * 1000), pointer, (*kept, *new)))

    def files(self) -> list[LiveFile]:
        self.at("files")
        return list(self.memory.now.files)

    def rows(self) -> int:
        return sum(file.rows for file in self.memory.now.files)

    def parts(self, after: tuple[str, str] = ("", "")) -> Parts:
        self.at("parts")
        files = self.memory.now.files
        found = [
            Part(f"{self._place().url}/{file.path}", DATA, file.size, file.rows, file.day) for file in files
        ]
        found.sort(key=Part.order)
        return Parts(
            str(self.memory.commits),
            len(files),
            self._place(),
            (part for part in found if part.order() > after),
        )

    def take_out(self, previous: int | None, version: int, paths: Collection[str], at: str) -> None:
        """Take files out, as `commit` adds them."""
        self.at("commit")
        self._take_out(version, paths, at)
        try:
            self.at("committed")
        except LostAnswer:
            self.at("commit again")
            self._take_out(version, paths, at)

    def _take_out(self, version: int, paths: Collection[str], at: str) -> None:
        if self.memory.now.pointer != version:
            if at != str(self.memory.commits):
                raise CommitConflict(f"{self.name}: it was changed meanwhile")
            url = self._place().url
            self.add(version, [f for f in self.memory.now.files if f"{url}/{f.path}" not in paths], [])

    def standing(self, since: str | None, expected: int) -> Standing:
        """Only runs change this table, and compaction, which keeps the rows."""
        self.at("standing")
        return Standing(self.pointer(), str(self.memory.commits), self.rows(), [])

    def content(self) -> Content:
        files = [Held(file.path, file.rows, None) for file in self.files()]
        read = partial(map, partial(self.memory.content, columns=IDENTITY.names))
        return Content(self.pointer(), str(self.memory.commits), files, read)

    def compact(self, spark: object) -> Compacted:
        """Merge the files of each day; uses no Spark. The pointer stays the same."""
        days: dict[str, list[LiveFile]] = {}
        for file in self.files():
            days.setdefault(file.day, []).append(file)
        old = [file for files in days.values() if len(files) > 1 for file in files]
        target = labelled(self.target())
        with sweep_on_error(target):
            with DayFiles(target) as merged:
                for file in old:
                    merged.add(shaped(self.memory.content(file.path), target.arrow()))
            self.at("compacted")
            there = set(self.memory.now.files)
            if not there.issuperset(old):
                raise CommitConflict(f"{self.name}: another run has compacted it")
        if old:
            kept = [file for file in self.memory.now.files if file not in set(old)]
            self.add(self.memory.now.pointer, kept, merged.written)
        return Compacted(len(old), len(merged.written), sum(file.rows for file in merged.written))

    def tidy(self, tasks: object) -> Compacted:
        """Merge the files of each day as soon as there are three."""
        return self.compact(None) if len(self.files()) > 2 else Compacted()

    def references(self) -> References:
        def kept() -> Iterator[str]:
            self.at("references")
            yield from (f"s3://{self.memory.bucket.name}/{key}" for key in self.memory.needed())

        return kept

    def expire(self, days: float) -> Deleted:
        """Forget versions that are so old, but for the current one."""
        table, before = self.memory, table_time(self.memory) - days * DAY_MS
        table.versions = [v for v in table.versions if v.at >= before or v is table.now]
        return Deleted()

    def orphans(self, days: float) -> Deleted:
        """Delete the files that no version has."""
        before = table_time(self.memory) - days * DAY_MS
        return sweep(self._place(), "data/", self.references(), before)

    def read(self, columns: Sequence[str] | None = None, limit: int | None = None) -> pa.Table:
        rows = pa.concat_tables([*self._contents()], promote_options="default")
        rows = rows.select(list(columns)) if columns else rows
        return rows if limit is None else rows.slice(0, limit)

    def _contents(self) -> Iterator[pa.Table]:
        schema = self.memory.schema or MESSAGES
        yield schema.empty_table()
        for file in self.files():
            yield shaped(self.memory.content(file.path), schema)


def table_time(table: Table) -> float:
    """Unix time in ms."""
    return table.bucket.now() * 1000


def check_bounds(table: Any, file: DataFile) -> None:
    """Raises AssertionError if a reader would skip rows of a file of a table because of its bounds."""
    rows = table.content(file.path, [name for name in STATISTICS if name in file.bounds])
    for name, (low, high) in file.bounds.items():
        values = rows[name].cast(pa.int64()) if name == "ingest_time" else rows[name]
        ends = pc.min_max(values).as_py()
        assert low <= ends["min"], (file.path, name, low, ends)
        assert ends["max"] <= high, (file.path, name, high, ends)
