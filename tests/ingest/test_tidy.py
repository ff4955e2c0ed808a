"""Runs merge small data files: nothing is lost or doubled, and readers keep their files; no Spark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.ingest.job import Summary, ingest
from bridge.ingest.sinks.base import LiveFile
from bridge.ingest.sinks.due import FEW, MANY, SMALL, due
from bridge.ingest.store import StorageLocation
from bridge.ingest.table import TableOptions, open_sink
from tests.ingest.conftest import Intercepted
from tests.ingest.gateway import Gateway, reported
from tests.ingest.test_sinks import numbers
from tests.ingest.test_verdict import InProcess

Sink = Callable[[], Any]


class Killed(BaseException):
    """The driver is dead."""


class DyingTasks(InProcess):
    """Tasks whose driver dies before or after those that merge."""

    def __init__(self, point: str) -> None:
        self.point = point

    def each(self, what: str, count: int, work: Callable[[int], Any]) -> dict[str, list[Any]]:
        if self.point == "planned":
            raise Killed
        done = super().each(what, count, work)
        if self.point == "written":
            raise Killed
        return done


def rounds(landing: StorageLocation, sink: Any, first: int, last: int, tasks: Any = InProcess) -> Summary:
    """Runs that take one object of ten rows each, the objects `first` to `last`."""
    for number in range(first, last + 1):
        Gateway(landing).export(10 * number, 10 * number + 9)
        Gateway(landing).report(reported(10 * number + 9))
        summary = ingest(tasks, landing, sink)
    return summary


class Wide(InProcess):
    """Each object in a task of its own, so that one round leaves many files."""

    def slots(self) -> int:
        return MANY


def almost_due(landing: StorageLocation, sink: Any) -> None:
    """One round that leaves one file less than are merged."""
    for number in range(MANY - 1):
        Gateway(landing).export(10 * number, 10 * number + 9)
    ingest(Wide, landing, sink)
    assert len(sink.files()) == MANY - 1


def data_files(sink: Any) -> set[str]:
    folder = Path(str(sink.target().location.url).removeprefix("file://"))
    return {path.name for path in folder.rglob("*.parquet") if "_delta_log" not in path.parts}


def test_runs_merge_small_files_and_the_rows_and_the_verdict_stay(
    landing: StorageLocation, sink: Sink
) -> None:
    before = rounds(landing, sink(), 0, MANY - 2)
    assert (before.compacted.before, len(sink().files())) == (0, MANY - 1)
    merging = rounds(landing, sink(), MANY - 1, MANY - 1)
    assert (merging.compacted.before, merging.compacted.after, merging.compacted.problem) == (MANY, 1, "")
    assert len(sink().files()) == 1
    after = rounds(landing, sink(), MANY, MANY + 1)
    assert (after.rows, after.compacted.before, len(sink().files())) == (10, 0, 3)
    assert after.report.complete
    assert numbers(sink()) == list(range(10 * (MANY + 2)))


@pytest.mark.parametrize("point", ["planned", "written", "replaced"])
def test_a_driver_killed_while_it_merges_loses_and_doubles_nothing(
    landing: StorageLocation, iceberg: Sink, point: str
) -> None:
    almost_due(landing, iceberg())
    mine = iceberg()

    def tidy(tasks: Any) -> Any:
        done = mine.tidy(lambda: DyingTasks(point))
        assert done.before == MANY
        raise Killed

    with pytest.raises(Killed):
        rounds(landing, Intercepted(mine, tidy=tidy), MANY - 1, MANY - 1)
    assert numbers(iceberg()) == list(range(10 * MANY))
    after = rounds(landing, iceberg(), MANY, MANY)
    assert (after.rows, after.report.complete, after.compacted.problem) == (10, True, "")
    assert after.compacted.before == (0 if point == "replaced" else MANY + 1)
    assert numbers(iceberg()) == list(range(10 * MANY + 10))


def test_another_run_that_merges_first_wins_and_the_files_of_the_other_are_deleted(
    landing: StorageLocation, iceberg: Sink
) -> None:
    almost_due(landing, iceberg())

    class Late(InProcess):
        def each(self, what: str, count: int, work: Callable[[int], Any]) -> dict[str, list[Any]]:
            done = super().each(what, count, work)
            assert iceberg().tidy(InProcess).before == MANY
            return done

    summary = rounds(landing, iceberg(), MANY - 1, MANY - 1, Late)
    assert (summary.compacted.before, summary.compacted.problem) == (0, "")
    assert len(iceberg().files()) == 1
    assert len(data_files(iceberg())) == MANY + 1  # what was merged is there for readers
    assert numbers(iceberg()) == list(range(10 * MANY))


def test_a_failure_to_merge_is_told_and_ends_no_run(landing: StorageLocation, iceberg: Sink) -> None:
    almost_due(landing, iceberg())
    victim = iceberg().files()[0].path
    place = iceberg().target().location.open()
    place.put(victim, place.get(victim)[:-1])
    summary = rounds(landing, iceberg(), MANY - 1, MANY - 1)
    assert summary.rows == 10
    assert victim in summary.compacted.problem
    assert len(iceberg().files()) == MANY
    assert len(data_files(iceberg())) == MANY


def test_a_reader_of_the_last_hour_keeps_the_files_that_were_merged(
    landing: StorageLocation, tmp_path: Path
) -> None:
    def opened() -> Any:
        return open_sink(TableOptions(warehouse=str(tmp_path / "lake")))

    almost_due(landing, opened())
    reader = opened().table()
    rounds(landing, opened(), MANY - 1, MANY)
    assert len(opened().files()) == 2
    assert reader.scan().to_arrow().num_rows == 10 * (MANY - 1)


def file(day: str, size: int, number: int) -> LiveFile:
    return LiveFile(f"{day}/{number}", day, size, 1, number)


def test_files_are_due_when_enough_of_a_size_are_there_and_of_past_days_fewer() -> None:
    many = [file("2026-11-20", 100_000 + at, at) for at in range(MANY)]
    assert list(due(many[1:], "2026-11-20")) == []
    assert list(due(many, "2026-11-20")) == [many]
    assert list(due(many[: FEW - 1], "2026-11-21")) == []
    assert list(due(many[:FEW], "2026-11-21")) == [many[:FEW]]
    large = [file("2026-11-20", SMALL, MANY + at) for at in range(MANY)]
    assert list(due([*many, *large], "2026-11-20")) == [many]


def test_each_row_is_merged_a_few_times_however_many_rounds_there_are() -> None:
    files: list[LiveFile] = []
    merged = 0
    for number in range(5000):
        files.append(file("2026-11-20", 100_000, number))
        for group in list(due(files, "2026-11-20")):
            size = sum(one.size for one in group)
            merged += size
            files = [one for one in files if one not in group] + [file("2026-11-20", size, number)]
        assert len(files) < 4 * MANY
    assert merged < 3 * 5000 * 100_000
