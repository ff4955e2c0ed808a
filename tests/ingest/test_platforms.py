"""What the job asks of a cluster, and the data source; test_versions.py has every version of Spark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.ingest.commands import write_package
from bridge.ingest.job import run
from bridge.ingest.store import StorageLocation
from tests.ingest.gateway import Gateway
from tests.ingest.test_command import ROOT

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("what", ["checkout", "package"])
def test_workers_need_none_of_the_gateways_packages(what: str, tmp_path: Path) -> None:
    """A checkout on a cluster is enough, such as a Git folder of Databricks, or the package's archive."""
    hide = "import sys; sys.modules |= dict.fromkeys(['cbor2', 'msgspec', 'paho', 'pluggy', "
    hide += "'rich', 'typer', 'uvloop', 'zlib_ng'])\n"
    # the checkout that this is may be installed: nothing of it is to be found in another place
    hide += "sys.meta_path = [one for one in sys.meta_path if '__editable__' not in repr(one)]\n"
    place = ROOT if what == "checkout" else write_package(tmp_path)[0]
    hide += f"sys.path = [{str(place)!r}, *(path for path in sys.path if path)]\n"
    modules = ", ".join(
        f"bridge.ingest.{name}" for name in ("worker", "decode", "refine_worker", "sinks.compact")
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{hide}import {modules}; print({modules.split(',')[0]}.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(place))


def test_the_work_is_one_map_over_arrow_batches_without_a_shuffle(
    spark: Any, landing: StorageLocation, iceberg: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver gets names of files: what comes back is much smaller than what went through."""
    plans: list[str] = []
    kind = type(spark.range(1))
    collect = kind.collect

    def explained(frame: Any) -> Any:
        plans.append(frame._jdf.queryExecution().executedPlan().toString())
        rows = collect(frame)
        plans.append(str(sum(len(row.body) for row in rows)))
        return rows

    monkeypatch.setattr(kind, "collect", explained)
    for first in range(0, 20_000, 1000):
        Gateway(landing).export(first, first + 999)
    summary = run(spark, landing, iceberg())
    assert summary.rounds[0].tasks >= 2
    assert "MapInArrow" in plans[0]
    assert "Exchange" not in plans[0]
    assert int(plans[1]) < 10_000 < summary.bytes


def test_the_data_source_gives_every_number_once(spark: Any, bucket: StorageLocation) -> None:
    pytest.importorskip("pyspark.sql.datasource", reason="Python data sources need Spark 4.0")
    from bridge.ingest.source import register

    register(spark)
    gateway = Gateway(bucket)
    gateway.export(0, 99, qos=1)
    gateway.export(50, 149, form="parquet")
    reader = spark.read.format("streambridge").option("endpoint", bucket.endpoint)
    frame = reader.load(bucket.url)
    found = frame.selectExpr(
        "count(*) c", "count(distinct sequence_number) d", "max(length(payload)) p"
    ).collect()
    assert tuple(found[0]) == (150, 150, 22)
    times = frame.where("sequence_number = 60").selectExpr("unix_millis(ingest_time) ms").collect()
    assert times[0].ms == 1_795_000_060_000
    with_qos = reader.schema("sequence_number bigint, qos bigint").load(bucket.url)
    assert with_qos.where("qos = 1").count() == 100


def test_where_spark_knows_no_data_sources_in_python_the_import_says_so() -> None:
    """As on Spark 3.5, which test_versions.py tries itself."""
    hide = "import sys; sys.modules['pyspark.sql.datasource'] = None\n"
    asked = [sys.executable, "-c", f"{hide}import bridge.ingest.source"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    assert 'NotInstalled: format("streambridge") needs Spark 4.0 or newer' in done.stderr


def test_the_data_source_fails_at_a_bad_object_or_skips_it(spark: Any, landing: StorageLocation) -> None:
    pytest.importorskip("pyspark.sql.datasource", reason="Python data sources need Spark 4.0")
    from bridge.ingest.source import register

    register(spark)
    Gateway(landing).export(0, 9)
    Gateway(landing).export(10, 19, data=b"broken")
    reader = spark.read.format("streambridge")
    with pytest.raises(Exception, match="badObjects"):
        reader.load(landing.url).count()
    assert reader.option("badObjects", "skip").load(landing.url).count() == 10


def test_what_a_bad_object_shares_with_good_ones_is_given_from_those(
    spark: Any, landing: StorageLocation
) -> None:
    pytest.importorskip("pyspark.sql.datasource", reason="Python data sources need Spark 4.0")
    from bridge.ingest.source import register

    register(spark)
    gateway = Gateway(landing)
    gateway.export(0, 19, data=b"")  # the first one, and it is empty
    gateway.export(0, 9)
    gateway.export(5, 14, data=b"broken")
    gateway.export(8, 17)
    gateway.export(0, 9, stream="s1")
    reader = spark.read.format("streambridge").option("badObjects", "skip").load(landing.url)
    found = reader.groupBy("stream").agg({"sequence_number": "collect_list"}).collect()
    assert {row[0]: sorted(row[1]) for row in found} == {"s0": list(range(18)), "s1": list(range(10))}
