"""Compaction, expiry and retention: the rows stay, and only what is in the table goes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyiceberg.manifest import DataFileContent

from bridge.ingest.console import external_reason
from bridge.ingest.errors import CommitConflict
from bridge.ingest.job import ingest, run
from bridge.ingest.sinks.compact import compact
from bridge.ingest.store import StorageLocation
from bridge.ingest.upkeep import prune
from tests.ingest.conftest import Intercepted
from tests.ingest.deletes import delete_rows
from tests.ingest.gateway import Gateway, reported
from tests.ingest.test_command import command
from tests.ingest.test_job import numbers
from tests.ingest.test_tidy import data_files
from tests.ingest.test_verdict import InProcess

Sink = Callable[[], Any]


def rounds(spark: Any, landing: StorageLocation, sink: Sink, count: int = 3) -> None:
    for first in range(0, count * 10, 10):
        Gateway(landing).export(first, first + 9, **({"qos": 1} if first else {}))
        run(spark, landing, sink())


@pytest.mark.spark
def test_compaction_merges_small_files_and_keeps_every_row(
    spark: Any, landing: StorageLocation, sink: Sink
) -> None:
    rounds(spark, landing, sink)
    before = sink().read().sort_by("sequence_number").to_pylist()
    done = sink().compact(spark)
    assert (done.before, done.after, done.rows) == (3, 1, 30)
    assert sink().read().sort_by("sequence_number").to_pylist() == before
    assert [file.rows for file in sink().files()] == [30]
    assert sink().compact(spark).before == 0
    Gateway(landing).export(30, 39)
    summary = run(spark, landing, sink())  # the state is still the one of the last round
    assert (summary.rows, numbers(sink())) == (10, list(range(40)))


@pytest.mark.spark
def test_a_damaged_data_file_is_named_and_not_merged(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    rounds(spark, landing, iceberg, 2)
    damaged = iceberg().files()[0].path
    path = Path(iceberg().table().location().removeprefix("file://")) / damaged
    pages = pq.read_metadata(path).row_group(0).column(6)  # payloads
    content = bytearray(path.read_bytes())
    content[pages.data_page_offset + pages.total_compressed_size - 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(Exception, match="CRC checksum verification failed") as failed:
        iceberg().compact(spark)
    reason = external_reason(failed.value)
    assert reason
    assert reason.startswith(f"{damaged}: this data file is damaged (OSError")
    assert len(iceberg().files()) == 2


@pytest.mark.spark
def test_compaction_and_a_round_at_the_same_time_both_count(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    rounds(spark, landing, iceberg)
    mine = iceberg()

    def late(*arguments: Any) -> None:
        Gateway(landing).export(30, 39)
        assert run(spark, landing, iceberg()).rows == 10
        mine.replace(*arguments)

    compact(spark, Intercepted(mine, replace=late))
    assert numbers(iceberg()) == list(range(40))
    assert sorted(file.rows for file in iceberg().files()) == [10, 30]


@pytest.mark.spark
def test_compaction_leaves_files_alone_in_which_another_engine_has_deleted_rows(
    spark: Any, landing: StorageLocation, tmp_path: Path, iceberg: Sink
) -> None:
    rounds(spark, landing, iceberg)
    delete_rows(iceberg(), iceberg().files()[0], [0, 1, 2])
    left = list(range(3, 30))
    assert numbers(iceberg()) == left
    done = command("compact", "--warehouse", str(tmp_path / "warehouse"))
    assert done.stdout == (
        "2 files merged into 1; 0 unused files deleted; 1 files left as they are: another engine has deleted "
        "rows or a column in them, or partitioned them differently; rewrite them with that engine "
        "(Athena: OPTIMIZE, Spark: rewrite_data_files)\n"
    )
    assert numbers(iceberg()) == left
    assert sorted(file.rows for file in iceberg().files()) == [10, 20]
    iceberg().expire(0)
    assert numbers(iceberg()) == left
    assert len(data_files(iceberg())) == 3  # with the file of deletes


@pytest.mark.spark
def test_rows_that_another_engine_deletes_during_compaction_stay_deleted(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    rounds(spark, landing, iceberg)
    mine = iceberg()

    def late(*arguments: Any) -> None:
        delete_rows(iceberg(), iceberg().files()[0], [0, 1, 2])
        mine.replace(*arguments)

    with pytest.raises(CommitConflict, match="another engine has deleted rows in files to be compacted"):
        compact(spark, Intercepted(mine, replace=late))
    assert numbers(iceberg()) == list(range(3, 30))


@pytest.mark.spark
def test_with_deletes_that_may_be_of_any_file_nothing_is_compacted(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    rounds(spark, landing, iceberg)
    delete_rows(iceberg(), iceberg().files()[0], [0], DataFileContent.EQUALITY_DELETES)
    done = iceberg().compact(spark)
    assert (done.before, done.left) == (0, 3)


@pytest.mark.spark
def test_a_table_of_which_another_engine_has_deleted_rows_has_not_the_rows_of_its_state(
    spark: Any, landing: StorageLocation, tmp_path: Path, iceberg: Sink
) -> None:
    rounds(spark, landing, iceberg)
    delete_rows(iceberg(), iceberg().files()[0], [0, 1, 2])
    report = run(spark, landing, iceberg()).report
    assert (
        "lake.messages has 27 rows and its state says 30: something else changed the table" in report.problems
    )
    where = ("--source", landing.url, "--warehouse", str(tmp_path / "warehouse"), "--older-than-days", "0")
    assert "its state says 30 rows and it has 27, so nothing is deleted" in command("prune", *where).stderr


@pytest.mark.spark
def test_expiry_deletes_files_that_no_version_uses_and_those_of_crashed_runs(
    spark: Any, landing: StorageLocation, sink: Sink
) -> None:
    rounds(spark, landing, sink)
    place = sink().target().location
    folder = Path(sink().files()[0].path).parent
    crashed = f"{folder}/of-a-run-that-crashed.parquet"
    place.open().put(crashed, b"half a file")
    sink().compact(spark)
    assert (sink().expire(1).count, sink().orphans(1).count) == (0, 0)  # all of it is young
    sink().expire(0)
    assert place.open().get(crashed)
    left = {entry.key for entry in place.open().under(str(folder))}
    assert left == {crashed, sink().files()[0].path}
    assert sink().orphans(0).count == 1
    assert numbers(sink()) == list(range(30))
    assert [e.key for e in place.open().under(str(folder))] == [file.path for file in sink().files()]
    assert run(spark, landing, sink()).rounds == []  # the pointer has survived


def test_expiry_keeps_the_files_of_deletion_vectors(landing: StorageLocation, delta: Sink) -> None:
    for first in (0, 10):
        Gateway(landing).export(first, first + 9)
        ingest(InProcess, landing, delta(), full_every=0)
    delta().table().optimize.compact()  # so that files are unused
    delete_rows(delta(), delta().files()[0], [2, 3], apart=True)
    assert delta().rows() == 18
    assert delta().expire(0).count == 2
    assert delta().orphans(0).count == 0
    assert delta().rows() == 18
    Gateway(landing).export(20, 29)
    assert ingest(InProcess, landing, delta(), full_every=0).rows == 10


@pytest.mark.spark
def test_retention_deletes_only_objects_that_are_in_the_table(
    spark: Any, landing: StorageLocation, tmp_path: Path, iceberg: Sink
) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 99)
    gateway.export(50, 120, form="parquet")
    bad = gateway.export(121, 130, data=b"broken")
    gateway.report()
    run(spark, landing, iceberg())
    new = gateway.export(131, 140)
    where = ("--source", landing.url, "--warehouse", str(tmp_path / "warehouse"), "--json")
    young = json.loads(command("prune", *where).stdout)
    assert (young["deleted"], young["kept_because_young"], young["kept"]) == (0, 2, 2)
    dry = json.loads(command("prune", *where, "--older-than-days", "0", "--dry-run").stdout)
    assert (dry["deleted"], len(list(landing.open().list()))) == (2, 5)
    done = command("prune", *where, "--older-than-days", "0")
    assert (done.returncode, json.loads(done.stdout)["deleted"]) == (0, 2)
    assert {entry.key for entry in landing.open().list()} == {bad, new, "_gateway/gw-a.json"}
    summary = run(spark, landing, iceberg())
    assert summary.rows == 10
    assert numbers(iceberg()) == [*range(121), *range(131, 141)]


@pytest.mark.spark
def test_a_quarantined_object_stays_although_its_numbers_came_in_another(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    gateway = Gateway(landing)
    bad = gateway.export(0, 9, data=b"broken")
    run(spark, landing, iceberg())
    good = gateway.export(0, 19)
    run(spark, landing, iceberg())
    done = prune(landing, iceberg(), 0, dry_run=False, trust_state=False)
    assert (done.deleted, done.kept) == (1, 1)
    assert [entry.key for entry in landing.open().list()] == [bad]
    assert good != bad


@pytest.mark.spark
def test_retention_deletes_nothing_when_the_table_has_not_the_rows_of_its_state(
    spark: Any, landing: StorageLocation, tmp_path: Path, iceberg: Sink
) -> None:
    Gateway(landing).report(reported(99))
    Gateway(landing).export(0, 9)
    run(spark, landing, iceberg())
    Gateway(landing).export(10, 99)
    Gateway(landing).report(reported(99))
    report = run(spark, landing, iceberg()).report
    assert report.problems == []
    iceberg().replace(iceberg().files()[:1], [])  # somebody deletes rows
    report = run(spark, landing, iceberg()).report
    assert report.problems == [
        "lake.messages has 90 rows and its state says 100: something else changed the table"
    ]
    where = ("--source", landing.url, "--warehouse", str(tmp_path / "warehouse"), "--older-than-days", "0")
    refused = command("prune", *where)
    assert refused.returncode == 1
    assert "its state says 100 rows and it has 90, so nothing is deleted" in refused.stderr
    assert len(list(landing.open().list())) == 3
    assert command("prune", *where, "--trust-state").returncode == 0
    assert [entry.key for entry in landing.open().list()] == ["_gateway/gw-a.json"]


@pytest.mark.spark
def test_a_table_that_was_rolled_back_gets_its_lost_rows_again(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    rounds(spark, landing, iceberg)
    table = iceberg().table()
    table.manage_snapshots().rollback_to_snapshot(table.history()[0].snapshot_id).commit()
    assert numbers(iceberg()) == list(range(10))
    assert run(spark, landing, iceberg()).rows == 20
    assert numbers(iceberg()) == list(range(30))
