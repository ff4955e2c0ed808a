"""The contract of a sink.

A commit makes data files and the version of the state that includes them visible together. It succeeds only
if the table still points to `previous`; if another run committed first, it raises `CommitConflict`, and
nothing is added. Commits of others that leave the pointer unchanged (compaction) do not conflict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pyarrow as pa

from bridge.ingest.deletes import Deleted, References, delete
from bridge.ingest.errors import CommitConflict, IngestError, line
from bridge.ingest.files import DataFile, Target
from bridge.ingest.store import StorageLocation, ahead

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bridge.ingest.tasks import Tasks

DATA, DELETES = "data file", "delete file"  # kinds of files
MANIFEST, MANIFEST_OF_DELETES, MANIFEST_LIST = "manifest", "manifest of delete files", "manifest list"
ATTEMPTS = 6  # to commit a change, while other writers commit first


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A data file of the current table; a file that was added later has a larger `added`."""

    path: str  # relative to the table
    day: str  # empty: another engine wrote it, with other partitions
    size: int
    rows: int
    added: int
    has_deletes: bool = False  # another engine deleted rows that are still in the file (merge-on-read)


@dataclass(slots=True)
class Compacted:
    """The result of a compaction: merged files before and after, and their rows.

    `left` counts the files left as they are, because of changes by another engine. `problem` says why a run
    has merged none.
    """

    before: int = 0
    after: int = 0
    rows: int = 0
    left: int = 0
    problem: str = ""


class Difference(NamedTuple):
    """A column that a table should have, and the one that it has by that name, in any case, or None."""

    wanted: pa.Field
    found: pa.Field | None


class Standing(NamedTuple):
    """What the metadata of one version of the table says of its rows.

    `at` names the version; it is "" before the first. `changes` are the commits after an earlier version that
    may have changed rows, and carry no pointer, as text: those that have not expired.
    """

    pointer: int | None
    at: str
    rows: int
    changes: list[str]


class Held(NamedTuple):
    """The rows of a data file, and the bounds of its columns of IDENTITY; times are in us since 1970.

    Without bounds, nothing but the rows themselves says which they are. They have no nulls.
    """

    path: str
    rows: int
    bounds: Mapping[str, tuple[Any, Any]] | None


class Content(NamedTuple):
    """The data files of one version of the table.

    `read` gives the columns of IDENTITY of some of them, by path, without deleted rows; it raises IngestError
    if it cannot tell which are deleted.
    """

    pointer: int | None
    at: str
    files: list[Held]
    read: Callable[[Collection[str]], Iterator[pa.Table]]


class Part(NamedTuple):
    """A file that the current version of a table references, with its path in full, as it is spelt there.

    `rows` are those that are lost with it, and `bounds` as in `Held`, but of all rows of the file, deleted or
    not. `size` is in bytes, None if the table only says that there are at `least` so many. A delete file that
    is `of` one data file concerns no other; `deletes` of its rows are in the log as deleted. `day` is "" for
    files of no one day, and `problem` says why what the file lists could not be read.
    """

    path: str
    kind: str
    size: int | None
    rows: int = 0
    day: str = ""
    bounds: Mapping[str, tuple[Any, Any]] | None = None
    of: str = ""
    least: int = 0
    problem: str = ""
    deletes: int = 0

    def order(self) -> tuple[str, str]:
        return self.day, self.path


class Parts(NamedTuple):
    """The files, by day and path, that the version `at` of a table references: `total` of them, about."""

    at: str
    total: int
    place: StorageLocation
    files: Iterator[Part]


class Sink(Protocol):
    """A table, as the ingest job needs it."""

    @property
    def name(self) -> str:
        """The name of the table in messages."""

    def table(self) -> Any:
        """Return the table of the library as it is now, or None."""

    def pointer(self) -> int | None:
        """Return the version of the state that matches the table's content; None: nothing committed yet."""

    def differences(self) -> list[Difference]:
        """Return the columns of the job that an existing table lacks or has with another type."""

    def target(self) -> Target:
        """Return where and with which columns to write data files; creates the table if there is none.

        Raises IngestError if another engine has renamed, dropped or changed a column of the job, whose values
        would be written where nothing reads them.
        """

    def state(self) -> StorageLocation:
        """Return where the state documents are: for a table that exists, a location of its own."""

    def add_columns(self, columns: Mapping[str, pa.DataType]) -> None:
        """Add columns that the table does not have yet; names that differ only in case are the same."""

    def commit(self, previous: int | None, version: int, files: Sequence[DataFile]) -> None:
        """Add the files and point to `version`, in one commit; raises CommitConflict."""

    def files(self) -> list[LiveFile]:
        """Return the table's data files, in the order of `added`."""

    def rows(self) -> int:
        """Return the number of rows according to the table's metadata, without deleted ones."""

    def standing(self, since: str | None, expected: int) -> Standing:
        """Return what the table's metadata says now, with the commits of others after version `since`.

        None: there is no such version, and no commit is returned. If deleted rows leave the number of rows
        open, and it may not be the `expected` one, they are counted.
        """

    def content(self) -> Content:
        """Return the data files of the table as it is now."""

    def parts(self, after: tuple[str, str] = ("", "")) -> Parts:
        """Return the files that the table references, only those after a day and path."""

    def take_out(self, previous: int | None, version: int, paths: Collection[str], at: str) -> None:
        """Take files out of the version `at` of the table and point to `version`, in one commit.

        The paths are those of `parts`. Raises CommitConflict if the table has changed.
        """

    def replace(self, removed: Sequence[LiveFile], added: Sequence[DataFile]) -> None:
        """Replace files by others in one commit; the state stays the same. Raises CommitConflict.

        A Delta table can only replace all of its files.
        """

    def compact(self, spark: SparkSession) -> Compacted:
        """Merge small data files; the rows stay the same."""

    def tidy(self, tasks: Callable[[], Tasks]) -> Compacted:
        """Like `compact`, but only files that are due (see `sinks.due`), and without looking for them often.

        Called after a round; its cost does not grow with the table.
        """

    def references(self) -> References:
        """Return what gives the locations of all files that versions of the table need, read anew."""

    def retention(self) -> float:
        """Return how many days the table's own settings keep replaced and unknown files; 0 without any."""

    def expire(self, days: float) -> Deleted:
        """Drop versions that were replaced so many days ago, and delete the files that only they used."""

    def orphans(self, days: float) -> Deleted:
        """Delete files that no version uses and that are older than so many days: those of killed runs.

        Raises IngestError if they may be of another table.
        """

    def erase(self) -> Deleted:
        """Delete now whatever the current version does not need, also from the metadata.

        Raises IngestError if the current version has deleted rows in its files, or if older ones are named.
        """

    def read(self, columns: Sequence[str] | None = None, limit: int | None = None) -> Any:
        """Return rows as an Arrow table in this process: a few of them, or all of a small table."""


def attempts(name: str) -> Iterator[None]:
    """Yield for each attempt to commit, with growing pauses in between; then raise CommitConflict."""
    for attempt in range(ATTEMPTS):
        yield
        time.sleep(0.1 * 2**attempt)
    raise CommitConflict(f"{name}: {ATTEMPTS} commits failed: other writers always committed first")


def absent(columns: Mapping[str, pa.DataType], names: Iterable[str]) -> list[pa.Field]:
    """Return the columns that are not among the names; most engines ignore the case."""
    known = {name.lower() for name in names}
    return [pa.field(name, kind) for name, kind in columns.items() if name.lower() not in known]


def differences(wanted: pa.Schema, found: pa.Schema) -> list[Difference]:
    """Return the columns of `wanted` that `found` does not have with the same name and type."""
    known = {field.name.lower(): field for field in found} | {field.name: field for field in found}
    pairs = (Difference(field, known.get(field.name) or known.get(field.name.lower())) for field in wanted)
    return [pair for pair in pairs if pair.found is None or described(pair.found) != described(pair.wanted)]


def described(field: pa.Field) -> str:
    """Return name and type of a column, for messages."""
    return f"{field.name} ({field.type})"


def check(name: str, found: Sequence[Difference]) -> None:
    """Raise IngestError for the first difference of the table `name`."""
    for wanted, other in found:
        now = f"the table has {described(other)}" if other is not None else "it is gone"
        raise IngestError(
            f"{name}: its column {described(wanted)} was renamed, dropped or changed by another engine: "
            f"{now}; nothing was done, because its values would be lost. Restore the column's name and type, "
            "or ingest into a new table"
        )


def state_of(name: str, at: StorageLocation, identity: str | None) -> StorageLocation:
    """Return a table's own folder for its state, below a location that tables may share.

    A table in another catalog or on another host may have the same name, so the path also has the identity
    that the table got when it was created (None: the table does not exist yet, and has no state).
    """
    named = at if at.url.rstrip("/").endswith(f"/{name}") else at.join(name)
    return named.join(identity) if identity else named


def tidied(tasks: Callable[[], Tasks], sink: Sink) -> Compacted:
    """Merge the small files of a table that are due. A failure ends no run: all is committed."""
    try:
        return sink.tidy(tasks)
    except CommitConflict:  # another run or engine has replaced these files
        return Compacted()
    except Exception as error:  # of Spark, of the libraries, or a damaged file
        return Compacted(problem=f"{sink.name}: small files were not merged: {line(error)}")


def discard(sink: Sink, files: Sequence[DataFile]) -> None:
    """Delete files whose commit was refused.

    Files of a version of the table are kept: the commit may have succeeded although its answer was lost.
    """
    with suppress(Exception):  # a network failure, or no right to delete: `compact --orphan-days` does it
        delete(sink.target().location, [file.path for file in files], sink.references())


def check_files(sink: Sink, files: Sequence[DataFile], place: StorageLocation) -> None:
    """Raise CommitConflict unless the files to be committed are there: something may have deleted them."""
    store = place.open()
    sizes = ahead((partial(store.size, file.path) for file in files), store.ahead if len(files) > 1 else 0)
    for file, size in zip(files, sizes, strict=True):
        if (found := size()) != file.size:
            now = "is gone" if found is None else f"has {found} bytes, not {file.size}"
            raise CommitConflict(
                f"{sink.name}: {file.path} was to be committed and {now}, so nothing was committed; find out "
                "what deletes files in the table's folder (compact --orphan-days, a lifecycle rule)"
            )
