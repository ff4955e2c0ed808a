"""The contract of a sink.

A commit makes a set of data files and the version of the state that includes them visible together. It
succeeds only if the table still points to `previous`; if another run was first, it raises `Moved` and
nothing was added. Commits of others that leave the pointer alone (compaction) are no obstacle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

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
    day: str
    size: int
    rows: int
    added: int
    # Another engine has marked rows of it as deleted (merge-on-read): they are in it yet.
    marked: bool = False


@dataclass(slots=True)
class Compacted:
    """What was put together: files before and after, and the rows in them; `left` are marked files."""

    before: int = 0
    after: int = 0
    rows: int = 0
    left: int = 0


class Sink(Protocol):
    """A table, as the ingest job needs it."""

    @property
    def name(self) -> str:
        """What the table is called in messages."""

    def exists(self) -> bool:
        """Whether the table has been made."""

    def pointer(self) -> int | None:
        """The version of the state that the table's content agrees with; None: nothing committed yet."""

    def target(self) -> Target:
        """Where and with which columns data files are to be written; makes the table if there is none."""

    def state(self) -> Place:
        """Where the state documents are; a table that is made has a place that no other one has."""

    def add_columns(self, columns: Mapping[str, pa.DataType]) -> None:
        """Add columns that the table does not have yet."""

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


def state_of(name: str, at: Place, identity: str | None) -> Place:
    """Where a table's state is at a place that tables may share: below it, in a folder of its own.

    The name alone may be that of another catalog's or host's table too, so the identity that the table got
    when it was made is in it; None is a table that is not made yet, which has no state.
    """
    named = at if at.url.rstrip("/").endswith(f"/{name}") else at.join(name)
    return named.join(identity) if identity else named


def discard(sink: Sink, files: Sequence[DataFile]) -> None:
    """Delete files whose commit was refused.

    An answer may have been lost on the way: what the table has after all must not go.
    """
    live = {file.path for file in sink.files()}
    sink.target().place.open().delete(file.path for file in files if file.path not in live)
