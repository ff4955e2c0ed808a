"""The data files that one task writes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyiceberg.expressions import EqualTo

from bridge.ingest import files
from bridge.ingest.columns import BASE, TIME
from bridge.ingest.files import DayFiles, Target
from bridge.ingest.store import StorageLocation
from tests.ingest.gateway import rows

DAY = 86_400_000


def target(folder: Path) -> Target:
    return Target(StorageLocation(str(folder)), "day", BASE.serialize().to_pybytes(), ())


def messages(first: int, last: int) -> pa.Table:
    """One message a day."""
    table = pa.Table.from_pylist(rows("gw-a", "s0", range(first, last + 1), step_ms=DAY))
    at = table.column_names.index("ingest_time")
    return table.set_column(
        at, "ingest_time", table["ingest_time"].cast(pa.timestamp("ms", "UTC")).cast(TIME)
    )


def test_an_object_of_many_days_never_has_many_files_open(tmp_path: Path) -> None:
    with DayFiles(
        Target(StorageLocation(str(tmp_path)), "day", BASE.serialize().to_pybytes(), ())
    ) as writing:
        writing.add(messages(0, 149))
        assert len(list(tmp_path.rglob("*.tmp"))) == files.OPEN
        writing.add(messages(0, 9))  # of days whose files are complete by now
    assert sum(file.rows for file in writing.written) == 160
    for file in writing.written:
        assert (tmp_path / file.path).stat().st_size == file.size
        assert pq.read_metadata(tmp_path / file.path).num_rows == file.rows
    assert not list(tmp_path.rglob("*.tmp"))


def test_rows_of_any_order_are_in_the_files_of_their_days_in_that_order(tmp_path: Path) -> None:
    parts = [messages(number, number) for number in (5, 3, 4, 3, 5, 5, 4)]
    with DayFiles(target(tmp_path)) as writing:
        writing.add(pa.concat_tables([messages(0, 0), messages(3, 5), *parts]))
    found = {
        file.day: pq.read_table(tmp_path / file.path, partitioning=None)["sequence_number"].to_pylist()
        for file in writing.written
    }
    assert found == {
        "2026-11-18": [0],
        "2026-11-21": [3, 3, 3],
        "2026-11-22": [4, 4, 4],
        "2026-11-23": [5, 5, 5, 5],
    }
    assert sum(file.rows for file in writing.written) == 11


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_the_bounds_of_a_file_are_those_of_its_rows_in_whatever_order_they_came(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    """Readers skip a file by its bounds: too narrow ones hide rows."""
    parts = [
        pa.Table.from_pylist(rows(gateway, stream, range(first, first + 10)))
        for gateway, stream, first in (("gw-b", "s1", 50), ("gw-a", "s2", 0), ("gw-c", "s0", 100))
    ]
    with DayFiles(target(tmp_path)) as writing:
        for at in order:
            times = parts[at]["ingest_time"].cast(pa.timestamp("ms", "UTC")).cast(TIME)
            writing.add(parts[at].set_column(4, "ingest_time", times))
    (file,) = writing.written
    table = pq.read_table(tmp_path / file.path)
    for column, bounds in file.bounds.items():
        values = table[column].cast(pa.int64()) if column == "ingest_time" else table[column]
        ends = pc.min_max(values).as_py()
        assert bounds == (ends["min"], ends["max"]), column
    assert set(file.bounds) >= {"gateway", "stream", "sequence_number", "ingest_time"}


def test_after_an_error_no_open_file_appears(tmp_path: Path) -> None:
    writing = DayFiles(target(tmp_path))
    with pytest.raises(ZeroDivisionError), writing:
        writing.add(messages(0, 9))
        raise ZeroDivisionError
    assert (writing.written, [path for path in tmp_path.rglob("*") if path.is_file()]) == ([], [])


@pytest.mark.parametrize(
    "topic", ["plant/" + "x" * 500, "\U0010ffff" * 100, "a" * 63 + "\ud7ff" + "b", "short", ""]
)
def test_the_bounds_of_a_long_topic_are_short_and_contain_it(tmp_path: Path, topic: str) -> None:
    with DayFiles(target(tmp_path)) as writing:
        table = messages(0, 1)
        writing.add(table.set_column(table.column_names.index("topic"), "topic", pa.array([topic] * 2)))
    for file in writing.written:
        low, high = file.bounds["topic"]
        assert low.encode() <= topic.encode() <= high.encode()
        assert len(low) <= 64
        assert high == topic or len(high) <= 64


def test_a_file_with_rows_that_lack_a_topic_has_no_bounds_of_it(tmp_path: Path) -> None:
    with DayFiles(target(tmp_path)) as writing:
        for topics in (["a"], [None]):
            table = messages(0, 0)
            writing.add(
                table.set_column(table.column_names.index("topic"), "topic", pa.array(topics, pa.string()))
            )
    assert ["topic" in file.bounds for file in writing.written] == [False]


def test_a_filter_on_the_topic_reads_only_files_that_may_have_it(sink: Callable[[], Any]) -> None:
    table = sink()
    with DayFiles(table.target()) as writing:
        for day, topic in enumerate(("plant/a", "plant/b", "site/" + "x" * 100)):
            one = messages(day, day)
            writing.add(one.set_column(one.column_names.index("topic"), "topic", pa.array([topic])))
    table.commit(None, 1, writing.written)
    if hasattr(table, "catalog"):
        planned = {
            topic: len(list(table.table().scan(row_filter=EqualTo("topic", topic)).plan_files()))
            for topic in ("plant/a", "site/" + "x" * 100, "nothing")
        }
        assert planned == {"plant/a": 1, "site/" + "x" * 100: 1, "nothing": 0}
    else:
        actions = pa.table(table.table().get_add_actions(flatten=True)).sort_by("min.topic")
        bounds = list(zip(actions["min.topic"].to_pylist(), actions["max.topic"].to_pylist(), strict=True))
        assert bounds[:2] == [("plant/a", "plant/a"), ("plant/b", "plant/b")]
        assert bounds[2][0] <= "site/" + "x" * 100 <= bounds[2][1]
