"""The Parquet data files that one Spark task writes.

One file per day of ingest time (UTC). Rows are buffered per day until they fill a row group, so that many
small objects do not become many small row groups. The buffers of all days hold at most `BUFFERED` bytes;
written bytes go to disk (or are spooled there on their way to S3). A file has its final name from the start,
but counts only once a commit names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bridge.ingest import deletes
from bridge.ingest.columns import shaped
from bridge.ingest.store import StorageLocation

GROUP_ROWS = 200_000
GROUP_BYTES = 64 << 20
BUFFERED = 128 << 20
OPEN = 64  # files at a time: an object may hold one message a day for many years
TOPIC = 64  # characters of a topic in the bounds of a file: every commit has them, and a topic may be long
STATISTICS = ["gateway", "stream", "epoch", "sequence_number", "ingest_time", "topic"]


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how to write the data files of a table. It travels to the executors."""

    location: StorageLocation
    folder: str  # the part of a file's folder before the `=`
    schema: bytes  # serialized Arrow schema (with the field ids of the table, if any), for any pyarrow
    extras: tuple[str, ...]  # columns of the table in addition to the required ones
    label: str = ""  # prefix of the file names, by which the leftovers of a round are found
    reserved: frozenset[str] = frozenset()  # in lower case: names that no new column may have

    @classmethod
    def of(
        cls,
        location: StorageLocation,
        folder: str,
        table: pa.Schema,
        required: pa.Schema,
        reserved: Iterable[str] = (),
    ) -> Target:
        """Return the target for a table whose required columns are these."""
        extras = tuple(name for name in table.names if name not in required.names)
        names = frozenset(name.lower() for name in reserved)
        return cls(location, folder, table.serialize().to_pybytes(), extras, reserved=names)

    def arrow(self) -> pa.Schema:
        return pa.ipc.read_schema(pa.py_buffer(self.schema))


@dataclass(slots=True)
class DataFile:
    """A written data file, with the bounds by which readers skip files; times are in us since 1970."""

    path: str  # relative to the table
    day: str  # YYYY-MM-DD
    size: int = 0
    rows: int = 0
    bounds: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def widen(self, column: str, low: Any, high: Any) -> None:
        known = self.bounds.get(column)
        self.bounds[column] = (low, high) if known is None else (min(known[0], low), max(known[1], high))


class _Day:
    """One open file and its buffered rows."""

    def __init__(self, target: Target, schema: pa.Schema, day: str) -> None:
        self.file = DataFile(f"{target.folder}={day}/{target.label}{uuid4()}.parquet", day)
        self.pending: list[pa.Table] = []
        self.rows = self.bytes = 0
        self.lacks_topic = False  # in some rows: the bounds promise that there are no nulls
        self.stack = ExitStack()
        self.sink = self.stack.enter_context(target.location.open().writer(self.file.path))
        self.writer = self.stack.enter_context(
            pq.ParquetWriter(
                self.sink,
                schema,
                compression="zstd",
                write_statistics=STATISTICS,
                use_dictionary=_repeating(schema),
                write_page_checksum=True,
            )
        )

    def add(self, table: pa.Table) -> None:
        self.pending.append(table)
        self.rows += table.num_rows
        self.bytes += table.nbytes
        if self.rows >= GROUP_ROWS or self.bytes >= GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        if self.pending:
            self.writer.write_table(pa.concat_tables(self.pending), row_group_size=GROUP_ROWS)
            self.pending.clear()
            self.file.rows += self.rows
            self.rows = self.bytes = 0

    def finish(self) -> DataFile:
        with self.stack:
            self.flush()
            self.writer.close()
            self.file.size = self.sink.tell()
        if self.lacks_topic:
            self.file.bounds.pop("topic", None)
        return self.file


class DayFiles:
    """The files of one task, as a context manager: they are complete when the block ends."""

    def __init__(self, target: Target) -> None:
        self.target, self.schema = target, target.arrow()
        self._days: dict[str, _Day] = {}
        self.written: list[DataFile] = []

    def __enter__(self) -> DayFiles:
        return self

    def __exit__(self, *raised: Any) -> None:
        opened = ExitStack()  # closes all files together: after an error none of them appears
        for day in self._days.values():
            opened.push(day.stack)
        if raised[0] is not None:
            opened.__exit__(*raised)
            return
        with opened:
            self.written += [day.finish() for day in self._days.values()]

    def add(self, table: pa.Table) -> None:
        """Write the rows; missing columns are null."""
        table = shaped(table, self.schema)
        times = table["ingest_time"]
        bounds = pc.min_max(times.cast(pa.int64())).as_py()
        first, last = (_day_of(bounds[end]) for end in ("min", "max"))
        if first == last:
            self._add(first, table)
        else:
            # sorted once: to look through all rows for each day would take long for an object of many days
            table = table.combine_chunks()
            days = pc.floor_temporal(times, unit="day").combine_chunks()
            order = pc.sort_indices(days)  # stable
            start = 0
            for found in pc.value_counts(days.take(order)):
                count = found["counts"].as_py()
                self._add(found["values"].as_py().strftime("%Y-%m-%d"), table.take(order.slice(start, count)))
                start += count
        if sum(day.bytes for day in self._days.values()) > BUFFERED:
            max(self._days.values(), key=lambda day: day.bytes).flush()

    def _add(self, name: str, part: pa.Table) -> None:
        day = self._days.get(name)
        if day is None:
            if len(self._days) == OPEN:
                self.written.append(self._days.pop(next(iter(self._days))).finish())
            day = self._days[name] = _Day(self.target, self.schema, name)
        for column in STATISTICS[:-1]:
            values = part[column].cast(pa.int64()) if column == "ingest_time" else part[column]
            ends = pc.min_max(values).as_py()
            day.file.widen(column, ends["min"], ends["max"])
        # another engine may have renamed it, or written rows without it
        if "topic" in part.column_names and pa.types.is_string(part["topic"].type):
            ends = pc.min_max(part["topic"]).as_py()
            day.lacks_topic = day.lacks_topic or part["topic"].null_count > 0
            if ends["min"] is not None:
                day.file.widen("topic", ends["min"][:TOPIC], _at_least(ends["max"]))
        day.add(part)


def labelled(target: Target) -> Target:
    """Return the target with a label of its own, by which the files of one round can be found."""
    return replace(target, label=f"{uuid4().hex}-")


def sweep(target: Target, keep: Iterable[DataFile] = ()) -> None:
    """Delete the files that the tasks of a labelled target wrote, finished or not, except those in `keep`.

    For uncommitted files only: the label was drawn for this round, so no version of the table can name one.
    Files that cannot be deleted stay: they do no harm, and a later `compact --orphan-days` deletes them.
    """
    assert target.label
    kept = [target.location.join(file.path).url for file in keep]

    def mine(key: str) -> bool:
        return key.rpartition("/")[2].startswith(target.label)

    with suppress(Exception):  # a network failure, or no right to delete
        deletes.sweep(target.location, f"{target.folder}=", lambda: kept, wanted=mine)


@contextmanager
def sweep_on_error(*targets: Target) -> Iterator[None]:
    """If the block fails, delete the files that the tasks of these targets wrote. It must not commit any."""
    try:
        yield
    except BaseException:
        for target in targets:
            sweep(target)
        raise


def _repeating(schema: pa.Schema) -> list[str]:
    """Return the columns worth a dictionary. Trying one on payloads takes a sixth of the time for nothing."""
    return [field.name for field in schema if pa.types.is_string(field.type)]


def _at_least(text: str) -> str:
    """Return a short text that is not less than this one, in the order of UTF-8."""
    if len(text) <= TOPIC:
        return text
    for at in reversed(range(TOPIC)):
        following = ord(text[at]) + 1
        if following == 0xD800:  # surrogates are no characters
            following = 0xE000
        if following <= 0x10FFFF:
            return text[:at] + chr(following)
    return text


def _day_of(micros: int) -> str:
    return f"{datetime(1970, 1, 1) + timedelta(microseconds=micros):%Y-%m-%d}"


def day_number(day: str) -> int:
    """Return the days since 1970, as Iceberg stores them."""
    return date.fromisoformat(day).toordinal() - date(1970, 1, 1).toordinal()
