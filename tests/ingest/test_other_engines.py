"""Changes by other engines cost no rows and no values, and the job reports what it cannot do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.transforms import IdentityTransform, MonthTransform
from pyiceberg.types import BinaryType

from bridge.ingest.errors import IngestError, StateMissing
from bridge.ingest.job import run
from bridge.ingest.store import StorageLocation
from bridge.ingest.table import open_sink
from bridge.ingest.upkeep import prune
from tests.ingest.conftest import Intercepted
from tests.ingest.gateway import Gateway
from tests.ingest.test_command import command
from tests.ingest.test_job import numbers
from tests.ingest.test_refine import Lake

pytestmark = pytest.mark.spark
Sink = Callable[[], Any]


def altered(sink: Any, **fields: dict[str, Any]) -> None:
    """Change fields of a Delta table's schema in its log, as an engine with column mapping does."""
    log = Path(sink.location.url) / "_delta_log"
    versions = sorted(log.glob("*.json"))
    actions = [json.loads(line) for version in versions for line in version.read_text().splitlines()]
    meta = [action["metaData"] for action in actions if "metaData" in action][-1]
    schema = json.loads(meta["schemaString"])
    for number, field in enumerate(schema["fields"], 1):
        names = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": field["name"]}
        field |= {"metadata": names | field["metadata"]} | fields.get(field["name"], {})
    meta |= {
        "schemaString": json.dumps(schema),
        "configuration": {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "99"},
    }
    protocol = {"minReaderVersion": 2, "minWriterVersion": 5}
    lines = [json.dumps({"protocol": protocol}), json.dumps({"metaData": meta})]
    (log / f"{len(versions):020d}.json").write_text("\n".join(lines) + "\n")


def renamed(sink: Any, old: str, new: str) -> None:
    if hasattr(sink, "location"):
        altered(sink, **{old: {"name": new}})
        return
    with sink.table().update_schema() as update:
        update.rename_column(old, new)


def test_a_column_of_the_job_that_was_renamed_stops_the_run_before_anything_is_written(
    spark: Any, landing: StorageLocation, sink: Sink
) -> None:
    Gateway(landing).export(0, 9)
    run(spark, landing, sink())
    renamed(sink(), "payload", "body")
    Gateway(landing).export(10, 19)
    message = r"its column payload \(binary\) was renamed, dropped or changed by another engine: it is gone"
    with pytest.raises(IngestError, match=message):
        run(spark, landing, sink())
    assert sink().rows() == 10
    with pytest.raises(IngestError, match=message):
        prune(landing, sink(), 0, dry_run=False, trust_state=False)
    assert len(list(landing.open().list())) == 2


def test_a_column_that_is_renamed_while_a_round_works_stops_its_commit(
    spark: Any, landing: StorageLocation, sink: Sink
) -> None:
    Gateway(landing).export(0, 9)
    mine = sink()

    def and_rename() -> Any:
        found = mine.target()
        renamed(sink(), "topic", "subject")
        return found

    with pytest.raises(IngestError, match=r"its column topic \(string\) was renamed"):
        run(spark, landing, Intercepted(mine, target=and_rename))
    assert sink().rows() == 0


def test_a_column_of_the_job_with_another_type_stops_the_run(
    spark: Any, landing: StorageLocation, sink: Sink
) -> None:
    Gateway(landing).export(0, 9)
    table = sink()
    table.schema = table.schema.set(6, pa.field("payload", pa.string()))
    table.target()  # somebody made the table beforehand
    with pytest.raises(
        IngestError, match=r"its column payload \(binary\) .*: the table has payload \(string\)"
    ):
        run(spark, landing, sink())


def test_a_column_that_files_have_under_another_name_stops_the_run(
    spark: Any, landing: StorageLocation, delta: Sink
) -> None:
    Gateway(landing).export(0, 9, qos=1)
    run(spark, landing, delta())
    altered(delta(), qos={"name": "quality"})
    Gateway(landing).export(10, 19)
    message = "its files have the column quality under the name qos"
    with pytest.raises(IngestError, match=message):
        run(spark, landing, delta())
    with pytest.raises(IngestError, match=message):
        delta().compact(spark)
    altered(delta(), quality={"name": "qos"})
    assert run(spark, landing, delta()).rows == 10
    assert numbers(delta()) == list(range(20))


def test_an_object_with_a_column_that_the_table_has_in_another_case_is_quarantined(
    spark: Any, landing: StorageLocation, sink: Sink
) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 9)
    run(spark, landing, sink())
    sink().add_columns({"Temp": pa.float64()})
    bad = gateway.export(10, 19, temp=1.5)
    gateway.export(20, 29, Temp=2.5)
    summary = run(spark, landing, sink())
    assert [(document["key"], document["reason"]) for document in summary.report.refused] == [
        (bad, "column 'temp' cannot be added to the table: it has 'Temp' in another case")
    ]
    assert numbers(sink()) == [*range(10), *range(20, 30)]
    sink().add_columns({"temp": pa.float64()})  # of a round that had planned before
    assert [name for name in sink().read().column_names if name.lower() == "temp"] == ["Temp"]


def values(sink: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = sink.read().sort_by("sequence_number").to_pylist()
    return rows


def test_compaction_keeps_the_values_of_columns_that_were_renamed(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    for first in (0, 10):
        Gateway(landing).export(first, first + 9, qos=lambda n: n)
        run(spark, landing, iceberg())
    renamed(iceberg(), "payload", "body")
    renamed(iceberg(), "qos", "quality")
    before = values(iceberg())
    assert (before[7]["body"], before[7]["quality"]) == (b'{"n":7,"temp":20.70}', 7)
    done = iceberg().compact(spark)
    assert (done.before, done.after, done.rows, done.left) == (2, 1, 20, 0)
    assert values(iceberg()) == before


def test_compaction_leaves_files_alone_that_hold_a_column_which_was_dropped(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    for first in (0, 10, 20, 30):
        Gateway(landing).export(first, first + 9, **({"qos": 1} if first < 20 else {}))
        run(spark, landing, iceberg())
        if first == 10:
            snapshot = iceberg().table().current_snapshot().snapshot_id
            with iceberg().table().update_schema() as update:
                update.delete_column("qos")
    done = iceberg().compact(spark)
    assert (done.before, done.after, done.left) == (2, 1, 2)
    old = iceberg().table().scan(snapshot_id=snapshot).to_arrow()
    assert old["qos"].to_pylist() == [1] * 20


def test_compaction_refuses_a_table_whose_rows_no_longer_name_their_message(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    iceberg().compact(spark)
    assert iceberg().table() is None
    for first in (0, 10):
        taken(spark, landing, iceberg, first)
    renamed(iceberg(), "sequence_number", "number")
    with pytest.raises(IngestError, match=r"its column sequence_number \(int64\) was renamed"):
        iceberg().compact(spark)


def test_a_refined_table_can_be_compacted(spark: Any, landing: StorageLocation, tmp_path: Path) -> None:
    lake = Lake(spark, landing, "iceberg", tmp_path)
    for first in (0, 10):
        Gateway(landing).export(first, first + 9, payload=b'{"n":1,"at":{"lat":[47.1]},"tags":["a","b"]}')
        lake.ingest()
        lake.refine()
    before = lake.rows("readings")
    assert (before[0]["tags"], before[0]["at"]) == (["a", "b"], {"lat": [47.1]})
    done = open_sink(lake._options("readings")).compact(spark)
    assert (done.before, done.after, done.rows) == (2, 1, 20)
    assert lake.rows("readings") == before


def test_files_that_unpack_to_much_are_not_merged_into_one(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    big = bytes(1 << 20)
    for first in (0, 100, 200):
        Gateway(landing).export(first, first + 99, form="parquet", payload=big)
        run(spark, landing, iceberg())
    assert sum(file.size for file in iceberg().files()) < 1 << 20
    done = iceberg().compact(spark)
    assert (done.before, done.after, done.rows, done.left) == (2, 1, 200, 0)
    assert sorted(file.rows for file in iceberg().files()) == [100, 200]
    assert iceberg().compact(spark).before == 0
    assert numbers(iceberg()) == list(range(300))


def test_values_that_another_engine_has_stored_only_once_stay_so_in_compaction(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    for first in (0, 10):
        Gateway(landing).export(first, first + 9, qos=lambda n: n)
        run(spark, landing, iceberg())
    for file in iceberg().files():  # as one that writes dictionaries of all columns
        path = Path(iceberg().table().location().removeprefix("file://")) / file.path
        table = pq.read_table(path)
        last = table["sequence_number"][-1].as_py()
        table = table.set_column(6, table.schema.field("payload"), pa.array([b"%d" % (last % 2)] * 10))
        pq.write_table(table, path, use_dictionary=True)
    before = values(iceberg())
    assert iceberg().compact(spark).before == 2
    assert values(iceberg()) == before


def other_partitions(sink: Any, evolution: str) -> None:
    with sink.table().update_spec() as update:
        if evolution != "added":
            update.remove_field("ingest_day")
        if evolution == "added":
            update.add_field("stream", IdentityTransform())
        if evolution == "replaced":
            update.add_field("ingest_time", MonthTransform(), "ingest_month")


@pytest.mark.parametrize("evolution", ["added", "replaced", "removed"])
def test_partitions_that_another_engine_has_changed_do_not_matter(
    spark: Any, landing: StorageLocation, tmp_path: Path, iceberg: Sink, evolution: str
) -> None:
    day = 86_400_000
    for first in (0, 4):
        Gateway(landing).export(first, first + 3, step_ms=day)
        run(spark, landing, iceberg())
    other_partitions(iceberg(), evolution)
    rows, path = values(iceberg())[:1], tmp_path / "warehouse" / "by-another-engine.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    iceberg().table().add_files([f"file://{path}"])
    Gateway(landing).export(8, 11, step_ms=day)
    assert run(spark, landing, iceberg()).rows == 4
    Gateway(landing).export(12, 15, stream="s1", step_ms=day)
    assert run(spark, landing, iceberg()).rows == 4
    assert (iceberg().rows(), sum(file.rows for file in iceberg().files())) == (17, 17)
    specs = [file["spec_id"] for file in iceberg().table().inspect.files().to_pylist()]
    assert (specs.count(0), specs.count(1)) == (16, 1)
    start = "2026-11-18T00:00:00+00:00"
    found = iceberg().table().scan(f"ingest_time >= '{start}' and ingest_time < '2026-11-20T00:00:00+00:00'")
    assert sorted(found.to_arrow()["sequence_number"].to_pylist()) == [0, 0, 1]
    before = values(iceberg())
    assert iceberg().compact(spark).left == 1
    assert values(iceberg()) == before
    assert iceberg().table().spec().spec_id == 1
    iceberg().expire(0)
    assert values(iceberg()) == before


def test_files_of_days_are_compacted_also_when_the_table_has_other_partitions_by_now(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    for first in (0, 10):
        Gateway(landing).export(first, first + 9)
        run(spark, landing, iceberg())
    other_partitions(iceberg(), "replaced")
    assert iceberg().compact(spark).before == 2
    assert [(file.day, file.rows) for file in iceberg().files()] == [("2026-11-18", 20)]
    assert iceberg().table().inspect.files()["spec_id"].to_pylist() == [0]
    assert numbers(iceberg()) == list(range(20))


def test_a_table_that_was_never_partitioned_by_day_is_refused(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    iceberg().target()
    schema = iceberg().table().schema()
    iceberg().catalog.drop_table("lake.messages")
    iceberg().catalog.create_table("lake.messages", schema)
    Gateway(landing).export(0, 9)
    with pytest.raises(IngestError, match=r"no partition spec of day\(ingest_time\) alone"):
        run(spark, landing, iceberg())


def newest(sink: Any) -> int:
    found: int = sink.table().current_snapshot().snapshot_id
    return found


def rewritten(sink: Any) -> int:
    """A snapshot of another engine, which knows nothing of the state."""
    with sink.table().transaction() as change, change.update_snapshot().fast_append():
        pass
    return newest(sink)


def expired(sink: Any, snapshots: list[int]) -> None:
    sink.table().maintenance.expire_snapshots().by_ids(snapshots).commit()


def rolled_back(sink: Any, snapshot: int) -> None:
    sink.table().manage_snapshots().rollback_to_snapshot(snapshot).commit()


def taken(spark: Any, landing: StorageLocation, iceberg: Sink, first: int) -> int:
    Gateway(landing).export(first, first + 9)
    assert run(spark, landing, iceberg()).rows == 10
    return newest(iceberg())


@pytest.mark.parametrize("compacted", [False, True], ids=["plain", "compacted"])
def test_a_table_rolled_back_to_a_snapshot_of_another_engine_takes_again_what_it_lost_and_no_more(
    spark: Any, landing: StorageLocation, iceberg: Sink, compacted: bool
) -> None:
    before = [taken(spark, landing, iceberg, first) for first in (0, 10)]
    then = rewritten(iceberg())
    rewritten(iceberg())
    if compacted:
        assert iceberg().compact(spark).before == 2
    for first in (20, 30):
        taken(spark, landing, iceberg, first)
    expired(iceberg(), before)
    rolled_back(iceberg(), then)
    assert numbers(iceberg()) == list(range(20))
    summary = run(spark, landing, iceberg())
    assert (summary.rows, summary.report.complete, summary.report.problems[1:]) == (20, True, [])
    assert numbers(iceberg()) == list(range(40))


def test_a_table_whose_rounds_have_expired_is_not_ingested_anew(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    before = taken(spark, landing, iceberg, 0)
    rewritten(iceberg())
    expired(iceberg(), [before])
    assert run(spark, landing, iceberg()).rounds == []
    taken(spark, landing, iceberg, 10)
    assert numbers(iceberg()) == list(range(20))


def test_a_rollback_to_a_snapshot_of_an_unknown_state_is_reported(
    spark: Any, landing: StorageLocation, iceberg: Sink
) -> None:
    before = taken(spark, landing, iceberg, 0)
    then, between = rewritten(iceberg()), rewritten(iceberg())
    taken(spark, landing, iceberg, 10)
    rolled_back(iceberg(), then)
    expired(iceberg(), [before, between])
    with pytest.raises(StateMissing, match="it was rolled back, and the snapshots that named its state"):
        run(spark, landing, iceberg())


def test_rows_of_files_without_statistics_are_counted(
    spark: Any, landing: StorageLocation, delta: Sink
) -> None:
    for first in (0, 10):
        Gateway(landing).export(first, first + 9)
        run(spark, landing, delta())
    log = max((Path(delta().location.url) / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        action.get("add", {}).pop("stats", None)
    log.write_text("".join(json.dumps(action) + "\n" for action in actions))
    summary = run(spark, landing, delta())
    assert not any("something else changed the table" in problem for problem in summary.report.problems)
    assert (delta().rows(), [file.rows for file in delta().files()]) == (20, [10, 10])


def swapped(sink: Any, one: str, other: str) -> None:
    renamed(sink, one, "between")
    renamed(sink, other, one)
    renamed(sink, "between", other)


def test_refine_reads_the_column_that_has_the_name_now(
    spark: Any, landing: StorageLocation, tmp_path: Path
) -> None:
    lake = Lake(spark, landing, "iceberg", tmp_path)
    Gateway(landing).export(0, 4, form="parquet", raw=b'{"n":77}')
    lake.ingest()
    swapped(open_sink(lake.options), "payload", "raw")
    lake.refine(schema="n BIGINT")
    assert [row["n"] for row in lake.rows("readings")] == [77] * 5


def test_refine_says_in_one_line_which_file_has_no_payloads(
    landing: StorageLocation, tmp_path: Path, spark: Any
) -> None:
    lake = Lake(spark, landing, "iceberg", tmp_path)
    Gateway(landing).export(0, 4)
    lake.ingest()
    with open_sink(lake.options).table().update_schema() as update:
        update.delete_column("payload")
    with open_sink(lake.options).table().update_schema() as update:
        update.add_column("payload", BinaryType())
    where = ("--warehouse", str(tmp_path / "lake"), "--to", "lake.readings", "--schema", "n BIGINT")
    done = command("refine", *where)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("streambridge ingest: data/ingest_day=2026-11-18/")
    assert "this data file has no values of the table's column payload" in last


def test_refine_adds_no_column_to_a_table_whose_files_have_one_under_another_name(
    spark: Any, landing: StorageLocation, tmp_path: Path, delta: Sink
) -> None:
    lake = Lake(spark, landing, "delta", tmp_path)
    Gateway(landing).export(0, 4)
    lake.ingest()
    lake.refine(schema="n BIGINT")
    readings = open_sink(lake._options("readings"))
    altered(readings, n={"name": "m"})
    Gateway(landing).export(5, 9)
    lake.ingest()
    with pytest.raises(IngestError, match="its files have the column m under the name n"):
        lake.refine(schema="n BIGINT")
    assert "n" not in readings.read().column_names
