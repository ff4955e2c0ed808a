"""The contract of a sink.

A commit makes a set of data files and the version of the state that includes them visible together. It
succeeds only if the table still points to `previous`; if another run was first, it raises `Moved` and
nothing was added. Commits of others that leave the pointer alone (compaction) are no obstacle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from uuid import uuid4

from bridge.ingest.errors import IngestError
from bridge.ingest.files import DataFile
from bridge.ingest.store import Place
from bridge.ingest.worker import Target

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A data file that the table consists of; a file that came later has a larger `added`."""

    path: str  # relative to the table
    day: str  # empty: another engine wrote it, and put it into partitions of its own
    size: int
    rows: int
    added: int
    # Another engine has marked rows of it as deleted (merge-on-read): they are in it yet.
    marked: bool = False


@dataclass(slots=True)
class Compacted:
    """What was put together: files before and after, and the rows in them.

    `left` are files that another engine has changed so that they are left alone.
    """

    before: int = 0
    after: int = 0
    rows: int = 0
    left: int = 0


class Difference(NamedTuple):
    """A column that a table should have, and what it has by that name, in whatever case; None: nothing."""

    wanted: pa.Field
    found: pa.Field | None


class Sink(Protocol):
    """A table, as the ingest job needs it."""

    @property
    def name(self) -> str:
        """What the table is called in messages."""

    def exists(self) -> bool:
        """Whether the table has been made."""

    def pointer(self) -> int | None:
        """The version of the state that the table's content agrees with; None: nothing committed yet."""

    def differences(self) -> list[Difference]:
        """The columns of the job that the table, if there is one, lacks or has with another type."""

    def target(self) -> Target:
        """Where and with which columns data files are to be written; makes the table if there is none.

        Raises IngestError if another engine has renamed, dropped or changed a column of the job: its values
        would be written where nobody reads them.
        """

    def state(self) -> Place:
        """Where the state documents are; a table that is made has a place that no other one has."""

    def add_columns(self, columns: Mapping[str, pa.DataType]) -> None:
        """Add columns that the table does not have yet; names that differ in case only are the same."""

    def commit(self, previous: int | None, version: int, files: Sequence[DataFile]) -> None:
        """Add the files and point to `version`, in one step."""

    def files(self) -> list[LiveFile]:
        """The table's data files, in the order of `added`."""

    def rows(self) -> int:
        """How many rows the table has, from its metadata; less those that it says are deleted."""

    def compact(self, spark: SparkSession) -> Compacted:
        """Put small data files together; the rows stay the same."""

    def expire(self, days: float) -> int:
        """Forget versions older than so many days, delete files that only they used, and say how many."""

    def read(self, columns: Sequence[str] | None = None, limit: int | None = None) -> Any:
        """Rows of the table as an Arrow table in this process: a few of them, or all of a small table."""


def differences(wanted: pa.Schema, found: pa.Schema) -> list[Difference]:
    """What of `wanted` is not in `found` with the same name and type."""
    known = {field.name.lower(): field for field in found} | {field.name: field for field in found}
    pairs = (Difference(field, known.get(field.name) or known.get(field.name.lower())) for field in wanted)
    return [pair for pair in pairs if pair.found is None or described(pair.found) != described(pair.wanted)]


def described(field: pa.Field) -> str:
    """A column, as messages name it."""
    return f"{field.name} ({field.type})"


def check(name: str, found: Sequence[Difference]) -> None:
    """Raise IngestError about the first difference of the table `name`."""
    for wanted, other in found:
        now = f"it has {described(other)}" if other is not None else "it is gone"
        raise IngestError(
            f"{name}: its column {described(wanted)} was renamed, dropped or changed by another engine: "
            f"{now}; nothing was done, for its values would be lost. Give the column its name and type back, "
            "or ingest into a new table"
        )


def state_of(name: str, at: Place, identity: str | None) -> Place:
    """Where a table's state is at a place that tables may share: below it, in a folder of its own.

    The name alone may be that of another catalog's or host's table too, so the identity that the table got
    when it was made is in it; None is a table that is not made yet, which has no state.
    """
    named = at if at.url.rstrip("/").endswith(f"/{name}") else at.join(name)
    return named.join(identity) if identity else named


def labelled(target: Target) -> Target:
    """The same target for the tasks of one round: their files can be told from all others."""
    return replace(target, label=f"{uuid4().hex}-")


def sweep(target: Target, keep: Iterable[DataFile] = ()) -> None:
    """Delete what the tasks of a labelled target have written, finished or not, but for these files.

    For files that no commit has named yet. What cannot be deleted stays: nothing is wrong because of it,
    and `compact --expire-days` deletes it later.
    """
    assert target.label
    with suppress(Exception):  # of the network, or no right to list uploads in parts
        paths = {file.path for file in keep}
        target.place.open().sweep(f"{target.folder}=", target.label, paths)


@contextmanager
def swept(*targets: Target) -> Iterator[None]:
    """If the block, which commits nothing, fails, delete what the tasks of these targets have written."""
    try:
        yield
    except BaseException:
        for target in targets:
            sweep(target)
        raise


def discard(sink: Sink, files: Sequence[DataFile]) -> None:
    """Delete files whose commit was refused.

    An answer may have been lost on the way: what the table has after all must not go.
    """
    live = {file.path for file in sink.files()}
    sink.target().place.open().delete(file.path for file in files if file.path not in live)
