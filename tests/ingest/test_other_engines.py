"""What other engines do to the table: it costs no rows and no values, and the job says what it cannot do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bridge.ingest.errors import IngestError
from bridge.ingest.job import run
from bridge.ingest.store import Place
from tests.ingest.gateway import Gateway
from tests.ingest.test_job import numbers

pytestmark = pytest.mark.spark
Sink = Callable[[], Any]


def altered(sink: Any, **fields: dict[str, Any]) -> None:
    """Change fields of a Delta table's schema in its log, as an engine with column mapping does."""
    log = Path(sink.place.url) / "_delta_log"
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
    if hasattr(sink, "place"):
        altered(sink, **{old: {"name": new}})
        return
    with sink.table().update_schema() as update:
        update.rename_column(old, new)


def test_a_column_of_the_job_that_was_renamed_stops_the_run_before_anything_is_written(
    spark: Any, landing: Place, sink: Sink
) -> None:
    Gateway(landing).export(0, 9)
    run(spark, landing, sink())
    renamed(sink(), "payload", "body")
    Gateway(landing).export(10, 19)
    message = r"its column payload \(binary\) was renamed, dropped or changed by another engine: it is gone"
    with pytest.raises(IngestError, match=message):
        run(spark, landing, sink())
    assert sink().rows() == 10


def test_a_column_that_is_renamed_while_a_round_works_stops_its_commit(
    spark: Any, landing: Place, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    Gateway(landing).export(0, 9)
    mine = sink()
    target = mine.target

    def and_rename() -> Any:
        found = target()
        renamed(sink(), "topic", "subject")
        return found

    monkeypatch.setattr(mine, "target", and_rename)
    with pytest.raises(IngestError, match=r"its column topic \(string\) was renamed"):
        run(spark, landing, mine)
    assert sink().rows() == 0


def test_a_column_of_the_job_with_another_type_stops_the_run(spark: Any, landing: Place, sink: Sink) -> None:
    Gateway(landing).export(0, 9)
    table = sink()
    table.schema = table.schema.set(6, pa.field("payload", pa.string()))
    table.target()  # somebody made the table beforehand
    with pytest.raises(IngestError, match=r"its column payload \(binary\) .*: it has payload \(string\)"):
        run(spark, landing, sink())


def test_a_column_that_files_have_under_another_name_stops_the_run(
    spark: Any, landing: Place, delta: Sink
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
    spark: Any, landing: Place, sink: Sink
) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 9)
    run(spark, landing, sink())
    sink().add_columns({"Temp": pa.float64()})
    bad = gateway.export(10, 19, temp=1.5)
    gateway.export(20, 29, Temp=2.5)
    summary = run(spark, landing, sink())
    assert [(document["key"], document["reason"]) for document in summary.report.refused] == [
        (bad, "column 'temp' cannot be added to the table: it has 'Temp', another case")
    ]
    assert numbers(sink()) == [*range(10), *range(20, 30)]
    sink().add_columns({"temp": pa.float64()})  # of a round that had planned before
    assert [name for name in sink().read().column_names if name.lower() == "temp"] == ["Temp"]
