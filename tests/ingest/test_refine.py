"""Refining: payloads become typed columns, once each; the others go to the rejects, with the reason."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cbor2
import deltalake
import pyarrow as pa
import pyspark
import pytest

from bridge.ingest.errors import BadOption, CommitConflict, IngestError
from bridge.ingest.job import run
from bridge.ingest.refine import Refined, Refinement
from bridge.ingest.schema import column_names, infer
from bridge.ingest.store import StorageLocation
from bridge.ingest.table import TableOptions, open_sink
from tests.ingest.conftest import Intercepted
from tests.ingest.deletes import delete_rows
from tests.ingest.gateway import Gateway, reported
from tests.ingest.test_command import command


class Lake:
    """The table of messages and what is refined from it, opened anew each time as other processes would."""

    def __init__(self, spark: Any, landing: StorageLocation, kind: str, folder: Path) -> None:
        self.spark, self.landing, self.folder, self.kind = spark, landing, folder, kind
        self.options = TableOptions(warehouse=str(folder / "lake"))
        if kind == "delta":
            self.options = TableOptions(delta=str(folder / "messages"))

    def _options(self, name: str) -> TableOptions:
        if self.kind == "delta":
            return replace(self.options, delta=str(self.folder / name))
        return replace(self.options, name=f"lake.{name}")

    def ingest(self) -> int:
        return run(self.spark, self.landing, open_sink(self.options)).rows

    def refine(self, before_commit: Callable[[str], None] = lambda kind: None, **settings: Any) -> Refined:
        """Refine once; `before_commit` is called with "rejects" and with "typed"."""

        def make(kind: str, schema: Any) -> Any:
            sink = open_sink(self._options("readings" if kind == "typed" else "rejects"), schema)

            def commit(*arguments: Any) -> None:
                before_commit(kind)
                sink.commit(*arguments)

            def replace(*arguments: Any) -> None:
                before_commit(kind)
                sink.replace(*arguments)

            return Intercepted(sink, commit=commit, replace=replace)

        return Refinement(self.spark, open_sink(self.options), make, **settings).run()

    def rows(self, name: str) -> list[dict[str, Any]]:
        table = open_sink(self._options(name)).read()
        return sorted(table.to_pylist(), key=lambda row: (row["stream"], row["sequence_number"]))

    def numbers(self, name: str) -> list[int]:
        return [row["sequence_number"] for row in self.rows(name)]


@pytest.fixture(params=["iceberg", "delta"])
def lake(request: pytest.FixtureRequest, spark: Any, landing: StorageLocation, tmp_path: Path) -> Lake:
    if request.param == "delta":
        request.getfixturevalue("delta")
    return Lake(spark, landing, request.param, tmp_path)


@pytest.mark.spark
def test_only_what_is_new_is_refined_and_nothing_twice(lake: Lake, landing: StorageLocation) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 99)
    lake.ingest()
    done = lake.refine()
    assert (done.rows, done.rejected, done.schema) == (100, 0, "`n` DOUBLE, `temp` DOUBLE")
    row = lake.rows("readings")[42]
    assert (row["n"], row["temp"], row["topic"]) == (42, 20.2, "plant/gw-a/s0")
    assert lake.refine().rows == 0
    gateway.export(150, 199)
    lake.ingest()
    gateway.export(100, 149)  # late
    lake.ingest()
    assert lake.refine().rows == 100
    assert lake.numbers("readings") == list(range(200))


@pytest.mark.spark
def test_numbers_that_filters_have_left_out_are_not_waited_for(lake: Lake, landing: StorageLocation) -> None:
    gateway, wanted = Gateway(landing), set[int]()

    def export(first: int, last: int, lacks: set[int]) -> None:
        gateway.export(first, last, lacks=lacks)
        wanted.update(set(range(first, last + 1)) - lacks)

    export(0, 99, set(range(0, 100, 3)))
    lake.ingest()
    assert lake.refine().rows == 66
    done = lake.refine()
    assert (done.rows, done.rounds) == (0, 0)  # nothing is read again
    export(150, 199, set(range(150, 190)))
    lake.ingest()
    assert lake.refine().rows == 10
    export(100, 149, {100, 149})  # late
    export(190, 220, set(range(200, 221)))  # of it, only numbers without a row are new
    lake.ingest()
    assert lake.refine().rows == 48
    assert lake.refine().rounds == 0
    assert lake.numbers("readings") == sorted(wanted)


@pytest.mark.spark
def test_after_a_crash_between_two_commits_left_out_numbers_are_settled_in_both_tables(
    lake: Lake, landing: StorageLocation
) -> None:
    def crash(kind: str) -> None:
        if kind == "typed":
            raise OSError("killed")

    gateway = Gateway(landing)
    gateway.export(0, 49, lacks=range(0, 50, 2))
    lake.ingest()
    with pytest.raises(OSError, match="killed"):
        lake.refine(crash, schema="n DOUBLE")
    gateway.export(50, 99, lacks=range(50, 100, 2))
    lake.ingest()
    assert lake.refine(schema="n DOUBLE").rows == 50
    assert lake.refine(schema="n DOUBLE").rounds == 0
    assert lake.numbers("readings") == list(range(1, 100, 2))


@pytest.mark.spark
def test_payloads_that_do_not_fit_go_to_the_rejects_with_the_reason(
    lake: Lake, landing: StorageLocation
) -> None:
    payloads = [
        b'{"temp":1.5,"unit":"C","at":{"lat":47.1},"tags":["a","b"]}',
        b'{"temp":"hot"}',
        b"[1,2]",
        b"no json",
        b"\xff\xfe",
        b'{"temp":2,"more":true}',
        b"{}",
        b"",
    ]
    Gateway(landing).export(0, len(payloads) - 1, payload=lambda n: payloads[n])
    lake.ingest()
    schema = "temp DOUBLE, unit STRING, at STRUCT<lat: DOUBLE>, tags ARRAY<STRING>"
    done = lake.refine(schema=schema)
    assert (done.rows, done.rejected) == (3, 5)
    typed = lake.rows("readings")
    assert [(row["sequence_number"], row["temp"]) for row in typed] == [(0, 1.5), (5, 2.0), (6, None)]
    assert (typed[0]["at"], typed[0]["tags"]) == ({"lat": 47.1}, ["a", "b"])
    rejected = lake.rows("rejects")
    assert [row["payload"] for row in rejected] == [payloads[n] for n in (1, 2, 3, 4, 7)]
    assert [row["reason"] for row in rejected] == [
        "does not fit the schema: temp is text that does not fit DOUBLE",
        "not an object",
        "not JSON",
        "not JSON",
        "empty",
    ]


@pytest.mark.spark
def test_cbor_payloads_are_typed(spark: Any, landing: StorageLocation, tmp_path: Path) -> None:
    lake = Lake(spark, landing, "iceberg", tmp_path)
    content = [cbor2.dumps({"temp": 1.5, "raw": b"\x00\xff"}), b"\xff"]
    Gateway(landing).export(0, 1, payload=lambda n: content[n])
    lake.ingest()
    assert (lake.refine(form="cbor").rows, lake.numbers("rejects")) == (1, [1])
    row = lake.rows("readings")[0]
    assert (row["temp"], base64.b64decode(row["raw"])) == (1.5, b"\x00\xff")


@pytest.mark.spark
@pytest.mark.parametrize("form", ["json", "cbor"])
def test_whole_payloads_become_one_variant_column_of_a_delta_table(
    spark: Any, landing: StorageLocation, tmp_path: Path, form: str
) -> None:
    if pyspark.__version__ < "4":
        pytest.skip("VARIANT came with Spark 4.0")
    lake = Lake(spark, landing, "delta", tmp_path)
    values: list[Any] = [{"temp": 1.5, "tags": ["a"]}, [1, 2], "text", None, {"temp": "hot"}]
    encode = cbor2.dumps if form == "cbor" else lambda value: json.dumps(value).encode()
    payloads = [*map(encode, values), b"\x1f"]
    Gateway(landing).export(0, 5, payload=lambda n: payloads[n])
    lake.ingest()
    done = lake.refine(form=form, schema="variant")
    assert (done.rows, done.rejected) == (5, 1)
    assert lake.rows("rejects")[0]["reason"] == f"not {form.upper()}"
    Gateway(landing).export(6, 7)
    lake.ingest()
    if form == "cbor":
        assert (lake.refine(form=form, schema="variant").rejected, lake.numbers("rejects")) == (2, [5, 6, 7])
    else:
        assert lake.refine(schema="variant").rows == 2
        assert open_sink(lake._options("readings")).compact(spark).before == 2
    table = deltalake.DeltaTable(tmp_path / "readings")
    assert table.protocol().reader_features == ["variantType"]
    columns = "sequence_number BIGINT, value VARIANT"
    frame = spark.read.schema(columns).parquet(*table.file_uris()).orderBy("sequence_number")
    found = frame.selectExpr("to_json(value) j", "try_variant_get(value, '$.temp', 'double') t").collect()
    assert [json.loads(row.j) for row in found][:5] == values
    assert [row.t for row in found][:5] == [1.5, None, None, None, None]


@pytest.mark.spark
def test_a_variant_column_beside_typed_ones_can_come_later(
    spark: Any, landing: StorageLocation, tmp_path: Path
) -> None:
    if pyspark.__version__ < "4":
        pytest.skip("VARIANT came with Spark 4.0")
    lake = Lake(spark, landing, "delta", tmp_path)
    Gateway(landing).export(0, 0)
    lake.ingest()
    lake.refine(schema="n BIGINT")
    Gateway(landing).export(1, 1, payload=b'{"n":7,"more":{"a":[1]}}')
    lake.ingest()
    lake.refine(schema="n BIGINT, more VARIANT")
    files = deltalake.DeltaTable(tmp_path / "readings").file_uris()
    frame = spark.read.schema("sequence_number BIGINT, n BIGINT, more VARIANT").parquet(*files)
    found = frame.orderBy("sequence_number").selectExpr("n", "to_json(more)").collect()
    assert [tuple(row) for row in found] == [(0, None), (7, '{"a":[1]}')]


@pytest.mark.spark
def test_a_variant_that_the_table_cannot_hold_is_refused_before_anything_is_done(
    spark: Any, landing: StorageLocation, tmp_path: Path
) -> None:
    lake = Lake(spark, landing, "iceberg", tmp_path)
    Gateway(landing).export(0, 4)
    lake.ingest()
    with pytest.raises(BadOption, match=r"Iceberg table cannot have a VARIANT column yet.* use --delta"):
        lake.refine(schema="variant")
    assert (lake.numbers("readings"), lake.numbers("rejects")) == ([], [])


@pytest.mark.spark
def test_a_schema_that_spark_cannot_read_is_named(
    spark: Any, landing: StorageLocation, tmp_path: Path
) -> None:
    lake = Lake(spark, landing, "iceberg", tmp_path)
    Gateway(landing).export(0, 4)
    lake.ingest()
    with pytest.raises(BadOption, match="--schema temp DUOBLE: Spark cannot read it"):
        lake.refine(schema="temp DUOBLE")
    if pyspark.__version__ >= "4":
        with pytest.raises(BadOption, match="VARIANT can be a whole column, but not part of one"):
            lake.refine(schema="at STRUCT<lat: DOUBLE, more: VARIANT>")


class Death:
    """Kills the driver before the change of a table of this number."""

    def __init__(self, change: int) -> None:
        self.left = change

    def __call__(self, kind: str) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.spark
@pytest.mark.parametrize("commit", [1, 2, 3])
def test_a_crash_before_any_commit_is_repaired_by_the_next_run_even_with_another_schema(
    lake: Lake, landing: StorageLocation, commit: int
) -> None:
    payloads = [b'{"temp":1}', b'{"temp":1.5}']
    Gateway(landing).export(0, 9, payload=lambda n: payloads[n % 2])
    lake.ingest()
    with pytest.raises(KeyboardInterrupt):  # the commits are: schema, rejects, typed rows
        lake.refine(Death(commit), schema="temp INT")
    rejected = [1, 3, 5, 7, 9] if commit == 3 else []
    assert (lake.numbers("readings"), lake.numbers("rejects")) == ([], rejected)
    Gateway(landing).export(10, 19, payload=lambda n: payloads[n % 2])
    lake.ingest()
    # by the rules of this run 1, 3, ... are rows, and by the strict ones rejects: never both, never neither
    done = lake.refine(schema="infer" if commit > 1 else "temp INT")
    typed, rejects = lake.numbers("readings"), lake.numbers("rejects")
    assert sorted(typed + rejects) == list(range(20))
    assert rejects == ([*range(1, 20, 2)] if commit == 1 else rejected)
    assert (done.added_columns, done.rejects) == ([] if commit == 1 else ["temp_double"], len(rejects))


@pytest.mark.spark
@pytest.mark.parametrize("at", ["rejects", "typed"])
def test_two_runs_at_once_store_everything_once(lake: Lake, landing: StorageLocation, at: str) -> None:
    payloads = [b'{"temp":1}', b"bad"]
    Gateway(landing).export(0, 9, payload=lambda n: payloads[n % 2])
    lake.ingest()

    def another(kind: str) -> None:  # a run that does it all between work and this commit
        if kind == at:
            lake.refine(schema="temp INT")

    with pytest.raises(CommitConflict, match="another run committed first"):
        lake.refine(another, schema="temp INT")
    assert (lake.numbers("readings"), lake.numbers("rejects")) == ([*range(0, 10, 2)], [*range(1, 10, 2)])
    for name in ("readings", "rejects"):  # the files of the round that lost are gone
        sink = open_sink(lake._options(name), pa.schema([]))
        target = sink.target()
        written = {
            entry.key for entry in target.location.open().list() if entry.key.startswith(target.folder)
        }
        assert written == {file.path for file in sink.files()}
    assert lake.refine(schema="temp INT").rounds == 0


@pytest.mark.spark
def test_values_that_no_longer_fit_go_to_wider_columns_and_nothing_is_lost(
    lake: Lake, landing: StorageLocation
) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 1, payload=lambda n: [b'{"temp":20}', b"21.5"][n])
    lake.ingest()
    assert lake.refine().schema == "`temp` DOUBLE, `value` DOUBLE"
    later = [b'{"temp":"hot"}', b'{"temp":9007199254740993}', b'{"temp":1,"temp_text":"mine"}', b"on"]
    gateway.export(2, 5, payload=lambda n: later[n - 2])
    lake.ingest()
    done = lake.refine()
    assert (done.rows, done.rejected, done.rejects, done.rounds) == (3, 1, 1, 1)
    assert (done.added_columns, done.reasons) == (["temp_bigint", "temp_text"], {"not JSON": 1})
    assert (done.extra_rows, done.extra) == (1, {"temp_text": 1})
    wanted = ("temp", "temp_bigint", "temp_text", "value", "extra")
    rows = [{name: row[name] for name in wanted if row[name] is not None} for row in lake.rows("readings")]
    assert rows == [
        {"temp": 20.0},
        {"value": 21.5},
        {"temp_text": "hot"},
        {"temp_bigint": 2**53 + 1},
        {"temp": 1.0, "extra": '{"temp_text":"mine"}'},
    ]


@pytest.mark.spark
@pytest.mark.parametrize("change", [None, 2, 3, 4])
def test_replayed_rejects_are_in_one_of_the_tables_once_whenever_the_driver_is_killed(
    lake: Lake, landing: StorageLocation, change: int | None
) -> None:
    payloads = [b'{"at":1795000000}', b'{"at":1795000000000}', b"bad"]  # the second is in year 58,851
    Gateway(landing).export(0, 8, payload=lambda n: payloads[n % 3])
    lake.ingest()
    done = lake.refine(schema="at TIMESTAMP")
    assert (done.rows, done.rejects) == (3, 6)
    assert done.reasons == {
        "not JSON": 3,
        "does not fit the schema: at is a time outside the years 1 to 9999 (a number is Unix time in "
        "seconds)": 3,
    }
    if change:  # they are: a wider column, typed rows, the rejects without these, the mark's removal
        with pytest.raises(KeyboardInterrupt):
            lake.refine(Death(change), replay=True)
        assert lake.numbers("readings") == ([0, 3, 6] if change == 2 else [0, 1, 3, 4, 6, 7])
    done = lake.refine(replay=change in (None, 2))
    assert (done.replayed, done.rejects) == (3 if change in (None, 2) else 0, 3)
    assert (lake.numbers("readings"), lake.numbers("rejects")) == ([0, 1, 3, 4, 6, 7], [2, 5, 8])
    assert {row["at_double"] for row in lake.rows("readings")} == {None, 1_795_000_000_000}
    assert [row["payload"] for row in lake.rows("rejects")] == [b"bad"] * 3
    again = lake.refine(replay=True)
    assert (again.rounds, again.replayed, again.rejects) == (0, 0, 3)


@pytest.mark.spark
def test_topics_are_chosen_by_a_pattern_and_their_levels_become_columns(
    spark: Any, landing: StorageLocation, tmp_path: Path
) -> None:
    lake = Lake(spark, landing, "iceberg", tmp_path)
    topics = ["plant/1/temp", "plant/2/temp", "site/1/temp", "plant/1/state"]
    payloads = [b"1.5", b"bad", b"also bad", b'"on"']
    Gateway(landing).export(0, 3, topic=lambda n: topics[n], payload=lambda n: payloads[n])
    lake.ingest()
    done = lake.refine(topic="plant/{line}/temp")
    assert (done.rows, done.rejected, done.schema) == (1, 1, "`value` DOUBLE")
    assert [(row["line"], row["value"], row["topic"]) for row in lake.rows("readings")] == [
        ("1", 1.5, "plant/1/temp")
    ]
    assert lake.numbers("rejects") == [1]
    Gateway(landing).export(4, 5, topic=lambda n: topics[n - 4], payload=b"2")
    lake.ingest()
    with pytest.raises(BadOption, match=r"--topic #: the table was refined with --topic plant/\{line\}/temp"):
        lake.refine(topic="#")
    assert lake.refine().rows == 2  # the pattern of the first run
    assert [row["line"] for row in lake.rows("readings")] == ["1", "1", "2"]


@pytest.mark.spark
def test_the_command_reports_keys_and_rejects_and_exits_with_4_until_they_are_gone(
    spark: Any, landing: StorageLocation, tmp_path: Path
) -> None:
    lake = Lake(spark, landing, "iceberg", tmp_path)
    payloads = [b'{"temp":1,"\\u001b[31m":2}', b'{"temp":"hot"}']
    Gateway(landing).export(0, 1, payload=lambda n: payloads[n])
    lake.ingest()
    where = ("--warehouse", str(tmp_path / "lake"), "--to", "lake.readings")
    done = command("refine", *where, "--schema", "temp DOUBLE")
    assert done.returncode == 4, done.stderr
    assert done.stdout.splitlines() == [
        "1 rows typed, 1 rejected; schema temp DOUBLE",
        "1 rows have keys without a column, kept in extra: \\x1b[31m (1)",
        "rejected: does not fit the schema: temp is text that does not fit DOUBLE (1)",
        "lake.readings_rejects has 1 rows; refine --replay-rejects moves those that fit by now",
    ]
    done = command("refine", *where, "--replay-rejects", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["rows"], found["replayed"], found["rejects"]) == (0, 1, 0)
    assert found["added_columns"] == ["temp_text"]


@pytest.mark.spark
def test_a_run_also_refines_and_takes_what_an_earlier_one_has_not_refined(
    spark: Any, landing: StorageLocation, tmp_path: Path
) -> None:
    lake = Lake(spark, landing, "iceberg", tmp_path)
    Gateway(landing).export(0, 9, payload=b'{"temp":1}')
    Gateway(landing).report(reported(9))
    lake.ingest()  # as a run that is killed between its two commits
    where = ("--source", landing.url, "--warehouse", str(tmp_path / "lake"), "--refine-to", "lake.readings")
    for rejected in range(2):
        done = command(*where, "--schema", "temp DOUBLE", "--json")
        assert done.returncode == (4 if rejected else 0), done.stderr
        found = json.loads(done.stdout)
        assert (found["rows"], found["refined"]["rows"]) == ((0, 10), (2, 1))[rejected]
        assert found["refined"]["rejects"] == rejected
        assert lake.numbers("readings") == [*range(10), *([10] if rejected else [])]
        Gateway(landing).export(10, 11, payload=lambda n: b'{"temp":%s}' % (b'"hot"' if n % 2 else b"2"))
        Gateway(landing).report(reported(11))
    done = command(*where, "--schema", "temp DOUBLE", "--json")
    assert done.returncode == 4, done.stderr
    assert json.loads(done.stdout)["refined"]["rounds"] == 0


@pytest.mark.spark
def test_rows_that_another_engine_has_deleted_are_not_refined(lake: Lake, landing: StorageLocation) -> None:
    Gateway(landing).export(0, 9)
    lake.ingest()
    assert lake.refine().rows == 10
    messages = open_sink(lake.options)
    delete_rows(messages, messages.files()[0], [0, 1, 2])  # of what is refined already
    assert messages.rows() == 7
    Gateway(landing).export(10, 19)
    lake.ingest()
    assert lake.refine().rows == 10
    Gateway(landing).export(20, 29)
    lake.ingest()
    delete_rows(messages, messages.files()[-1], [0])
    with pytest.raises(IngestError, match=r"another engine has deleted rows in 1 data file.*OPTIMIZE"):
        lake.refine()
    assert lake.numbers("readings") == list(range(20))


@pytest.mark.spark
def test_columns_that_a_later_schema_adds_are_added(
    spark: Any, landing: StorageLocation, tmp_path: Path
) -> None:
    lake = Lake(spark, landing, "iceberg", tmp_path)
    Gateway(landing).export(0, 4)
    lake.ingest()
    lake.refine(schema="n BIGINT")
    Gateway(landing).export(5, 9)
    lake.ingest()
    lake.refine(schema="n BIGINT, temp DOUBLE")
    assert [(row["n"], row["temp"]) for row in lake.rows("readings")][4:6] == [(4, None), (5, 20.5)]


@pytest.mark.spark
@pytest.mark.parametrize(
    ("old", "new", "types"),
    [
        ("temp BIGINT", "temp DOUBLE", r"temp \(double\).* has temp \(int64\)"),
        ("temp DOUBLE", "temp BIGINT", r"temp \(int64\).* has temp \(double\)"),
        ("n STRUCT<a: INT>", "n STRUCT<b: INT>", r"b: int32>\).* has n \(struct<a: int32>\)"),
    ],
)
def test_a_later_schema_with_another_type_for_a_column_is_refused_before_anything_is_done(
    lake: Lake, landing: StorageLocation, old: str, new: str, types: str
) -> None:
    Gateway(landing).export(0, 4)
    lake.ingest()
    lake.refine(schema=old)
    before = open_sink(lake._options("readings")).read().column_names
    Gateway(landing).export(5, 9)
    lake.ingest()
    with pytest.raises(BadOption, match=f"--schema more INT, {new}: it has the column .*{types}"):
        lake.refine(schema=f"more INT, {new}")
    assert open_sink(lake._options("readings")).read().column_names == before
    assert lake.refine(schema=old).rounds == 1


@pytest.mark.spark
def test_one_stream_can_be_refined_alone(spark: Any, landing: StorageLocation, tmp_path: Path) -> None:
    lake = Lake(spark, landing, "iceberg", tmp_path)
    for stream in ("s0", "s1"):
        Gateway(landing).export(0, 4, stream=stream)
    lake.ingest()
    assert lake.refine(streams=["s1"]).rows == 5
    assert {row["stream"] for row in lake.rows("readings")} == {"s1"}
    assert lake.refine().rows == 5


@pytest.mark.spark
def test_any_keys_of_a_payload_become_columns(lake: Lake, landing: StorageLocation) -> None:
    payloads = [
        b"{}",
        b'{"Temp":1,"temp":2,"at":{"Lat":1,"lat":2},"a`b":3,"a.b":4,"":5}',
        b'{"topic":"mine","fits":false,"Reason":"none","text":"x","payload":6}',
    ]
    Gateway(landing).export(0, 2, payload=lambda n: payloads[n])
    lake.ingest()
    assert (lake.refine().rows, lake.numbers("rejects")) == (3, [])
    keys = {"ingest_date", "gateway", "stream", "epoch", "sequence_number", "ingest_time"}
    rows = [{name: value for name, value in row.items() if name not in keys} for row in lake.rows("readings")]
    assert [{name: value for name, value in row.items() if value is not None} for row in rows] == [
        {"topic": "plant/gw-a/s0"},
        {
            "topic": "plant/gw-a/s0",
            "temp": 1,
            "temp_2": 2,
            "at": '{"Lat":1,"lat":2}',
            "a_b": 3,
            "a_b_2": 4,
            "extra": '{"":5}',
        },
        {
            "topic": "plant/gw-a/s0",
            "payload_topic": "mine",
            "payload_fits": False,
            "payload_reason": "none",
            "text": "x",
            "payload_payload": 6,
        },
    ]


@pytest.mark.spark
def test_where_no_payload_has_a_key_there_is_no_schema_to_infer(
    spark: Any, landing: StorageLocation, tmp_path: Path
) -> None:
    lake = Lake(spark, landing, "iceberg", tmp_path)
    Gateway(landing).export(0, 1, payload=b"{}")
    lake.ingest()
    with pytest.raises(BadOption, match="no payload is a JSON object with keys"):
        lake.refine()


def test_a_schema_is_inferred_that_fits_all_samples() -> None:
    samples = [
        "[" * 100_000,
        '{"a":1,"b":{"c":true},"l":[1,2.5]}',
        '{"a":2.5,"b":{"d":null},"s":"x"}',
        '{"s":5}',
        "[1]",
        "x",
        None,
    ]
    assert infer(samples) == (
        "`a` DOUBLE, `b` STRUCT<`c`: BOOLEAN, `d`: STRING>, `l` ARRAY<DOUBLE>, `s` STRING"
    )


def test_objects_whose_keys_cannot_all_be_fields_are_text() -> None:
    assert infer(["{}"]) == ""
    assert infer(['{"a":{}}', '{"a":{"b":1}}', '{"c":{}}', "{}"]) == "`a` STRUCT<`b`: DOUBLE>, `c` STRING"
    assert infer(['{"a`b":1,"":2,"c":{"a`b":1},"d":{"":1}}']) == "`a``b` DOUBLE, `c` STRING, `d` STRING"
    assert (
        infer(['{"a":{"X":1}}', '{"a":{"x":1}}', '{"b":[{"X":1,"x":1}]}']) == "`a` STRING, `b` ARRAY<STRING>"
    )
    assert infer(['{"a":' * 90 + "1" + "}" * 90]).count("STRUCT") == 31


def test_columns_get_plain_names_that_never_collide() -> None:
    assert column_names(["Temp", "temp", "topic", "a-b", "ingest_date", "ingest_day"]) == {
        "Temp": "temp",
        "temp": "temp_2",
        "topic": "payload_topic",
        "a-b": "a_b",
        "ingest_date": "payload_ingest_date",  # partitions of the tables
        "ingest_day": "payload_ingest_day",
    }
