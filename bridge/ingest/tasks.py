"""What carries out the tasks of a round: Spark, or anything that calls `worker.process` for each part."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from bridge.ingest.files import Target, sweep
from bridge.ingest.store import StorageLocation
from bridge.ingest.worker import Rows, collected, each_part, numbered, task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEAD_WORKER = re.compile(
    "Python worker exited unexpectedly|Python worker failed to connect|ExecutorLostFailure"
)


class Tasks(Protocol):
    """The tasks of a round; each may be attempted several times, also at the same time."""

    def slots(self) -> int:
        """Return how many tasks run at the same time."""

    def work(
        self, what: str, parts: Sequence[bytes], source: StorageLocation, target: Target
    ) -> dict[str, list[Any]]:
        """Return the bodies of the status rows (see `worker`), by kind, of one attempt at each part.

        A part is what `worker.pack` returns; `what` names the round in messages.
        """

    def each(self, what: str, count: int, work: Callable[[int], Rows]) -> dict[str, list[Any]]:
        """Return the bodies of the status rows, by kind, that `work` gives for 0, 1, ... `count` - 1.

        `what` names the work in messages.
        """


class SparkTasks:
    """Tasks in the Python workers of a Spark session."""

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark

    def slots(self) -> int:
        """As in `Tasks`; a guess over Spark Connect, which does not report it."""
        try:
            return int(self.spark.sparkContext.defaultParallelism)
        except Exception:  # Connect has no sparkContext, and each version raises something else
            return 16

    def work(
        self, what: str, parts: Sequence[bytes], source: StorageLocation, target: Target
    ) -> dict[str, list[Any]]:
        """As in `Tasks`. If a worker died in the last attempt, run all again, isolated."""
        frame = numbered(self.spark, parts)
        try:
            return collected(self.spark, what, frame, task(parts, source, target))
        except Exception as error:  # of pyspark or py4j, depending on the version
            if not DEAD_WORKER.search(str(error)):
                raise
        sweep(target)
        return collected(self.spark, what, frame, task(parts, source, target, isolated=True))

    def each(self, what: str, count: int, work: Callable[[int], Rows]) -> dict[str, list[Any]]:
        """As in `Tasks`."""
        return collected(self.spark, what, numbered(self.spark, range(count)), each_part(work))
