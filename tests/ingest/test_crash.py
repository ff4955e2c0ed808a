"""Whatever is killed, wherever: the next run completes the table, and nothing is there twice."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.ingest.errors import CommitConflict
from bridge.ingest.job import run
from bridge.ingest.planner import RoundLimits
from bridge.ingest.store import LocalStore, StorageLocation
from tests.ingest.conftest import Intercepted
from tests.ingest.gateway import Gateway
from tests.ingest.test_job import numbers

pytestmark = pytest.mark.spark


class Killed(BaseException):
    """Like SIGKILL at this line: no handler of the job catches it."""


class Death:
    """Kills the driver when a run reaches a point for the nth time."""

    def __init__(self, point: str, round_number: int) -> None:
        self.point, self.left = point, round_number

    def reach(self, point: str) -> None:
        self.left -= point == self.point
        if not self.left:
            raise Killed


def dying(sink: Any, death: Death) -> Any:
    """A sink whose driver dies at its death's point."""

    class States(LocalStore):
        def put(self, key: str, data: bytes) -> None:
            death.reach("worked")
            super().put(key, data)
            death.reach("state written")

    class Location(StorageLocation):
        def open(self) -> LocalStore:
            return States(Path(self.url))

    def commit(*arguments: Any) -> None:
        sink.commit(*arguments)
        death.reach("committed")

    return Intercepted(sink, state=lambda: Location(sink.state().url), commit=commit)


@pytest.mark.parametrize("round_number", [1, 2])
@pytest.mark.parametrize("point", ["planned", "worked", "state written", "committed"])
def test_a_driver_killed_at_any_point_loses_and_doubles_nothing(
    spark: Any, landing: StorageLocation, sink: Callable[[], Any], point: str, round_number: int
) -> None:
    for first in range(0, 40, 10):
        Gateway(landing).export(first, first + 9)
    limits, death = RoundLimits(objects=2), Death(point, round_number)

    def session() -> Any:  # opened between plan and work
        death.reach("planned")
        return spark

    with pytest.raises(Killed):
        run(session, landing, dying(sink(), death), limits)
    before = (round_number - 1 + (point == "committed")) * 20
    assert numbers(sink()) == list(range(before))
    summary = run(spark, landing, sink(), limits)
    assert summary.rows == 40 - before
    assert numbers(sink()) == list(range(40))
    assert summary.report.complete


def test_a_commit_that_was_made_but_reported_as_lost_keeps_its_files(
    spark: Any, landing: StorageLocation, sink: Callable[[], Any]
) -> None:
    """As when the answer to a commit is lost, its retry is refused, and another run commits meanwhile."""
    Gateway(landing).export(0, 9)
    mine = sink()
    lost: list[int] = []

    def unlucky(previous: int | None, version: int, files: Any) -> None:
        mine.commit(previous, version, files)
        if not lost:
            lost.append(version)
            Gateway(landing).export(10, 19)
            run(spark, landing, sink())
            raise CommitConflict("another run committed first")

    assert run(spark, landing, Intercepted(mine, commit=unlucky)).rows == 0
    assert numbers(sink()) == list(range(20))


def test_a_killed_python_worker_is_replaced_and_nothing_is_doubled(
    spark: Any, landing: StorageLocation, iceberg: Callable[[], Any]
) -> None:
    gateway = Gateway(landing)
    for first in range(0, 40, 10):
        gateway.export(first, first + 9)
    last = Path(landing.url) / gateway.export(40, 49)
    content = last.read_bytes()
    last.unlink()
    os.mkfifo(last)  # the worker hangs here, with the other objects of its task read already

    def kill_the_reader() -> None:
        writer = os.open(last, os.O_WRONLY)  # waits for the reader
        (victim,) = holders(last) - {os.getpid()}
        last.unlink()
        last.write_bytes(content)
        os.kill(victim, signal.SIGKILL)
        os.close(writer)

    killer = threading.Thread(target=kill_the_reader)
    killer.start()
    summary = run(spark, landing, iceberg())
    killer.join(timeout=120)
    assert not killer.is_alive()
    assert summary.rows == 50
    assert numbers(iceberg()) == list(range(50))


def holders(path: Path) -> set[int]:
    """The processes that have the file open."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                if any(fd.readlink() == path for fd in (process / "fd").iterdir()):
                    found.add(int(process.name))
            except OSError:  # it has ended, or is not ours
                continue
    return found
