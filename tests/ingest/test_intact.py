"""A table whose files are gone is not complete: what is lost is named, and brought back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.ingest import intact
from bridge.ingest.state import load_state
from bridge.ingest.store import StorageLocation
from bridge.ingest.table import TableOptions, open_sink
from tests.ingest.deletes import delete_rows
from tests.ingest.gateway import EPOCH, Gateway, reported
from tests.ingest.test_verdict import run

Sink = Callable[[], Any]


def filled(landing: StorageLocation, sink: Sink) -> Sink:
    """A table of 120 rows of one stream, in three files."""
    for first in (0, 40, 80):
        Gateway(landing).export(first, first + 39)
        Gateway(landing).report(reported(first + 39))
        assert run(landing, sink()).report.complete
    return sink


@pytest.fixture
def table(landing: StorageLocation, sink: Sink) -> Sink:
    return filled(landing, sink)


def files(sink: Any, kind: str = "data file") -> list[Path]:
    """The files of a local table, those of the oldest rows first."""
    found = [part for part in sink.parts().files if part.kind == kind]
    found.sort(key=lambda part: part.bounds["sequence_number"] if part.bounds else (0, 0))
    return [Path(part.path.removeprefix("file://")) for part in found]


def look(sink: Any) -> intact.Look:
    return intact.look(sink, load_state(sink))


def damages(sink: Any) -> list[tuple[str, str, list[Any], bool]]:
    return [(one.kind, one.why, one.numbers, one.exact) for one in look(sink).damages]


def of(first: int, last: int) -> list[list[Any]]:
    return [["gw-a", "s0", EPOCH, first, last]]


def test_a_look_at_a_whole_table_finds_nothing(table: Sink) -> None:
    found = look(table())
    assert (found.whole, found.compared) == (True, 7 if hasattr(table(), "catalog") else 3)


def test_data_files_that_are_gone_or_have_another_size_are_named_with_their_numbers(table: Sink) -> None:
    first, second, _ = files(table())
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    size = second.stat().st_size
    assert sorted(damages(table()), key=lambda one: one[2]) == [
        ("data file", "is gone", of(0, 39), True),
        ("data file", f"has {size} bytes instead of {size + 1}", of(40, 79), True),
    ]


def test_a_manifest_that_is_gone_or_cut_is_named_with_the_numbers_of_its_files(
    landing: StorageLocation, iceberg: Sink
) -> None:
    filled(landing, iceberg)
    gone, cut, _ = files(iceberg(), "manifest")
    gone.unlink()
    (found,) = look(iceberg()).damages
    assert (found.kind, found.why, found.rows, found.exact) == ("manifest", "is gone", 40, True)
    assert found.numbers[0][4] - found.numbers[0][3] == 39
    cut.write_bytes(cut.read_bytes()[:-20])
    assert {one.kind for one in look(iceberg()).damages} == {"manifest"}
    assert sum(size for one in look(iceberg()).damages for size in [one.rows]) == 80


def test_a_manifest_list_that_is_gone_is_named_with_all_numbers(
    landing: StorageLocation, iceberg: Sink
) -> None:
    filled(landing, iceberg)
    (path,) = files(iceberg(), "manifest list")
    path.unlink()
    assert damages(iceberg()) == [("manifest list", "is gone", of(0, 119), False)]


def test_a_delete_file_that_is_gone_is_named_with_the_numbers_that_nobody_can_read(table: Sink) -> None:
    file = next(file for file in table().files() if file.path.endswith(files(table())[1].name))
    delete_rows(table(), file, [3, 4], apart=True)
    assert look(table()).whole
    (path,) = files(table(), "delete file")
    path.unlink()
    assert damages(table()) == [("delete file", "is gone", of(40, 79), True)]


@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_a_table_in_s3_is_compared_by_a_listing(bucket: StorageLocation, kind: str, tmp_path: Path) -> None:
    import boto3

    place = f"s3a://{bucket.url.split('/')[2]}/lake"
    options = (
        TableOptions(delta=f"{place.replace('s3a', 's3')}/t", endpoint=bucket.endpoint)
        if kind == "delta"
        else TableOptions(
            catalog={"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db", "warehouse": place},
            state=str(tmp_path / "state"),
            endpoint=bucket.endpoint,
        )
    )
    table = filled(bucket, lambda: open_sink(options))
    assert look(table()).whole
    client = boto3.client("s3", endpoint_url=bucket.endpoint, region_name="us-east-1")
    part = min(
        (part for part in table().parts().files if part.bounds), key=lambda p: p.bounds["sequence_number"]
    )
    name, _, key = part.path.partition("://")[2].partition("/")
    client.delete_object(Bucket=name, Key=key)
    assert damages(table()) == [("data file", "is gone", of(0, 39), True)]


@pytest.mark.parametrize(
    ("path", "places"),
    [
        ("s3a://b/t//x%20y", [("b", "t//x%20y"), ("b", "t/x%20y"), ("b", "t//x y"), ("b", "t/x y")]),
        ("S3N://b/k", [("b", "k")]),
        ("file:/t/x", [("", "/t/x")]),
        ("file:///t/x", [("", "/t/x")]),
        ("/t/x:y", [("", "/t/x:y")]),
        ("gs://b/k", []),
    ],
)
def test_a_place_is_found_however_it_is_spelt(path: str, places: list[tuple[str, str]]) -> None:
    assert intact.spellings(path) == places
