"""`spark.readStream.format("streambridge")`: queries with checkpoints, as Spark runs them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.ingest.store import StorageLocation
from tests.ingest.conftest import need_java
from tests.ingest.gateway import EPOCH, Gateway
from tests.ingest.test_command import ROOT

pytest.importorskip("pyspark.sql.streaming.datasource", reason="Spark before 4.2 is in test_versions.py")
pytestmark = pytest.mark.spark


@pytest.fixture
def stream(spark: Any, tmp_path: Path) -> Callable[..., list[tuple[str, str, int]]]:
    """Run the query until it has all that there is, and give what its sink has got since the first run."""
    from bridge.ingest.source import register

    register(spark)
    sink: dict[int, list[tuple[str, str, int]]] = {}

    def run(place: StorageLocation, fail_at: int | None = None, **options: str) -> list[tuple[str, str, int]]:
        reader = spark.readStream.format("streambridge").options(**options)
        if place.endpoint:
            reader = reader.option("endpoint", place.endpoint)

        def take(frame: Any, batch: int) -> None:
            if batch == fail_at:
                raise RuntimeError("the sink is down")
            rows = frame.select("stream", "epoch", "sequence_number").collect()
            sink.setdefault(batch, [tuple(row) for row in rows])

        query = (
            reader.load(place.url)
            .writeStream.foreachBatch(take)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return sorted(row for batch in sink.values() for row in batch)

    return run


def numbers(found: list[tuple[str, str, int]]) -> list[int]:
    return [number for _, _, number in found]


def test_a_query_takes_every_number_once_over_restarts_streams_and_epochs(
    bucket: StorageLocation, stream: Callable[..., Any]
) -> None:
    gateway = Gateway(bucket)
    gateway.export(0, 99)
    gateway.export(50, 149, form="parquet")
    assert numbers(stream(bucket, maxObjectsPerTrigger="1")) == list(range(150))
    gateway.export(100, 199)
    gateway.export(0, 9, stream="s1")
    gateway.export(0, 4, epoch=EPOCH + 1)
    found = stream(bucket)
    expected = [("s0", str(EPOCH), number) for number in range(200)]
    expected += [("s0", str(EPOCH + 1), number) for number in range(5)]
    expected += [("s1", str(EPOCH), number) for number in range(10)]
    assert found == sorted(expected)


def test_a_batch_that_failed_is_repeated_with_the_same_objects(
    landing: StorageLocation, stream: Callable[..., Any]
) -> None:
    gateway = Gateway(landing)
    for first in range(0, 40, 10):
        gateway.export(first, first + 9)
    with pytest.raises(Exception, match="the sink is down"):
        stream(landing, fail_at=1, maxObjectsPerTrigger="2")
    gateway.export(15, 44)
    assert numbers(stream(landing, maxObjectsPerTrigger="2")) == list(range(45))


def test_a_bad_object_stops_the_query_or_is_quarantined_until_it_is_uploaded_again(
    landing: StorageLocation, tmp_path: Path, stream: Callable[..., Any]
) -> None:
    gateway = Gateway(landing)
    gateway.export(0, 9)
    gateway.export(10, 19, data=b"broken")
    with pytest.raises(Exception, match="upload it again, or pass over it with the option quarantine"):
        stream(landing)
    assert numbers(stream(landing, quarantine=str(tmp_path / "quarantine"))) == list(range(10))
    gateway.export(10, 19)
    assert numbers(stream(landing, quarantine=str(tmp_path / "quarantine"))) == list(range(20))


def test_a_query_that_is_always_on_takes_new_objects_and_plans_no_empty_batches(
    spark: Any, landing: StorageLocation, tmp_path: Path
) -> None:
    from bridge.ingest.source import register

    register(spark)
    gateway = Gateway(landing)
    gateway.export(0, 9)
    query = (
        spark.readStream.format("streambridge")
        .load(landing.url)
        .writeStream.format("memory")
        .queryName("always_on")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(processingTime="0 seconds")
        .start()
    )
    try:
        query.processAllAvailable()
        gateway.export(10, 19)
        query.processAllAvailable()
        query.processAllAvailable()
        assert spark.table("always_on").count() == 20
    finally:
        query.stop()
    assert len(list((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"))) == 2


QUERY = """
import sys
from pyspark.sql import SparkSession
from bridge.ingest.session import open_session
from bridge.ingest.source import register
spark = open_session("local[2,4]")
register(spark)
landing, place = sys.argv[1:]

def take(frame, batch):
    # a sink that is exactly-once: a batch replaces what an earlier attempt at it has left
    frame.select("sequence_number", "object_key").write.mode("overwrite").json(f"{place}/sink/{batch}")

reader = spark.readStream.format("streambridge").option("maxObjectsPerTrigger", "3")
writer = reader.load(landing).writeStream.foreachBatch(take)
writer = writer.option("checkpointLocation", f"{place}/checkpoint")
writer.trigger(availableNow=True).start().awaitTermination()
"""


@pytest.mark.slow(seconds=60)
@pytest.mark.timeout(900)
def test_a_query_killed_at_random_gives_every_number_once(landing: StorageLocation, tmp_path: Path) -> None:
    need_java()
    chance, gateway, uploaded, killed = random.Random(), Gateway(landing), 0, 0
    while True:
        for _ in range(12):
            gateway.export(max(0, uploaded - chance.choice([0, 5])), uploaded + 9)
            uploaded += 10
        with subprocess.Popen(
            [sys.executable, "-c", QUERY, landing.url, str(tmp_path)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as running:
            batches = chance.randint(1, 3)
            if killed < 3:
                offsets = tmp_path / "checkpoint" / "offsets"
                before = _newest(offsets)
                while _newest(offsets) < before + batches and running.poll() is None:
                    time.sleep(0.05)
                os.killpg(running.pid, signal.SIGKILL)
                killed += 1
                continue
            assert running.stderr is not None
            complaint = running.stderr.read().decode()
        assert running.returncode == 0, complaint
        break
    found: Counter[int] = Counter()
    for path in (tmp_path / "sink").rglob("part-*.json"):
        found.update(json.loads(line)["sequence_number"] for line in path.read_text().splitlines())
    assert found == Counter(range(uploaded))


def _newest(log: Path) -> int:
    return max((int(path.name) for path in log.glob("[0-9]*")), default=-1)
