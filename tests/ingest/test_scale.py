"""Minutes long: ten million messages of 200 gateways, and real kills of the real command."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.ingest_data import make, objects
from bridge.ingest.job import run
from bridge.ingest.store import StorageLocation
from bridge.ingest.table import TableOptions, open_sink
from tests.ingest.conftest import need_java
from tests.ingest.gateway import Gateway
from tests.ingest.test_command import ROOT, command
from tests.ingest.test_crash import holders

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1200)]
ROWS, GATEWAYS = 10_000_000, 200
MIB = 1 << 20


@contextmanager
def memory() -> Iterator[Counter[str]]:
    """The highest resident size of the driver, of the JVM and of any one Python worker, in MiB."""
    peak: Counter[str] = Counter()
    ended = threading.Event()
    driver = psutil.Process()

    def watch() -> None:
        while not ended.wait(0.2):
            for process in [driver, *driver.children(recursive=True)]:
                try:
                    name = "driver" if process == driver else "jvm" if process.name() == "java" else "worker"
                    peak[name] = max(peak[name], process.memory_info().rss // MIB)
                except psutil.Error:
                    continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()


def counted(sink: Any) -> dict[str, Any]:
    """Rows, numbers that are there twice, and the numbers per gateway, file by file."""
    import pyarrow.parquet as pq

    seen: dict[str, Any] = {}
    rows = twice = 0
    root = Path(sink.target().location.url.removeprefix("file://"))
    for file in sink.files():
        table = pq.read_table(root / file.path, columns=["gateway", "sequence_number"])
        rows += table.num_rows
        for gateway in table["gateway"].unique().to_pylist():
            numbers = table.filter(pa_equal(table["gateway"], gateway))["sequence_number"].to_numpy()
            bits = seen.setdefault(gateway, np.zeros(ROWS, dtype=bool))
            twice += int(bits[numbers].sum()) + len(numbers) - len(np.unique(numbers))
            bits[numbers] = True
    return {"rows": rows, "twice": twice, "numbers": {name: int(bits.sum()) for name, bits in seen.items()}}


def pa_equal(column: Any, value: str) -> Any:
    import pyarrow.compute as pc

    return pc.equal(column, value)


def test_ten_million_messages_of_200_gateways_one_of_them_skewed_in_bounded_memory(
    spark: Any, tmp_path: Path
) -> None:
    landing = StorageLocation(str(tmp_path / "landing"))
    wanted = list(objects(ROWS, GATEWAYS, 20_000, "parquet", skewed=0.4))
    make(landing, wanted)
    cut_otherwise = list(objects(ROWS, GATEWAYS, 7_000, "parquet", skewed=0.4))
    make(landing, cut_otherwise[::40])
    sink = open_sink(TableOptions(warehouse=str(tmp_path / "lake")))
    with memory() as peak:
        before = psutil.Process().memory_info().rss // MIB
        summary = run(spark, landing, sink)
    total = sum(made.last - made.first + 1 for made in wanted)
    found = counted(sink)
    assert (found["rows"], found["twice"]) == (total, 0)
    assert len(found["numbers"]) == GATEWAYS
    assert summary.report.complete
    assert summary.report.total("duplicates") > 100_000
    assert summary.rounds[0].tasks > 4
    rate = total / summary.seconds
    print(f"{total:,} rows in {summary.seconds:.1f} s, {rate:,.0f} rows/s, peaks {dict(peak)} MiB")
    assert peak["driver"] - before < 300  # no message is there
    assert peak["worker"] < 1024
    assert peak["jvm"] < 2048


def test_the_command_killed_again_and_again_ends_with_every_message_once(tmp_path: Path) -> None:
    need_java()
    landing = StorageLocation(str(tmp_path / "landing"))
    for name in ("gw-a", "gw-b"):
        for first in range(0, 60_000, 2000):
            Gateway(landing, name).export(first, first + 1999, form="parquet")
    where = ("--source", landing.url, "--warehouse", str(tmp_path / "lake"), "--max-objects", "6")
    chance = random.Random(3)
    killed = 0
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-m", "bridge.ingest.main", *where, "--master", "local[2,4]"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as running:
            assert running.stderr is not None
            wait = chance.randint(1, 3)
            for line in running.stderr:  # after some rounds, and then somewhere in the next one
                wait -= line.startswith("round")
                if not wait:
                    threading.Event().wait(chance.uniform(0, 0.7))
                    break
            killed += running.poll() is None
            os.killpg(running.pid, signal.SIGKILL)
    assert killed >= 2
    done = command(*where, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["report"]["total"]["rows"] == 120_000
    found = counted(open_sink(TableOptions(warehouse=str(tmp_path / "lake"))))
    assert (found["rows"], found["twice"]) == (120_000, 0)


@pytest.fixture
def clean_work_folder() -> Iterator[None]:
    """local-cluster leaves what its executors have logged beside Spark itself."""
    import pyspark

    folder = Path(pyspark.__file__).parent / "work"
    before = set(folder.glob("*"))
    yield
    for left in set(folder.glob("*")) - before:
        shutil.rmtree(left)
    if folder.exists() and not before:
        folder.rmdir()


@pytest.mark.usefixtures("clean_work_folder")
def test_a_killed_executor_is_replaced_and_nothing_is_doubled(tmp_path: Path) -> None:
    """Executors in processes of their own, as on a cluster; one dies in the middle of its task."""
    need_java()
    landing = StorageLocation(str(tmp_path / "landing"))
    gateway = Gateway(landing)
    for first in range(0, 4000, 100):
        gateway.export(first, first + 99)
    last = Path(landing.url) / gateway.export(4000, 4099)
    content = last.read_bytes()
    last.unlink()
    os.mkfifo(last)
    where = ("--source", landing.url, "--warehouse", str(tmp_path / "lake"), "--json")
    with subprocess.Popen(
        [sys.executable, "-m", "bridge.ingest.main", *where, "--master", "local-cluster[2,1,1024]"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as running:
        writer = os.open(last, os.O_WRONLY)  # waits for the worker that reads
        (worker,) = holders(last) - {os.getpid()}
        executor = next(parent for parent in psutil.Process(worker).parents() if parent.name() == "java")
        assert "CoarseGrainedExecutorBackend" in " ".join(executor.cmdline())
        last.unlink()
        last.write_bytes(content)
        executor.kill()
        os.close(writer)
        document = json.loads(running.communicate(timeout=300)[0])
    assert (running.returncode, document["rows"]) == (0, 4100)
    found = counted(open_sink(TableOptions(warehouse=str(tmp_path / "lake"))))
    assert (found["rows"], found["twice"]) == (4100, 0)


def test_two_commands_at_once_store_every_message_once(tmp_path: Path) -> None:
    need_java()
    landing = StorageLocation(str(tmp_path / "landing"))
    for first in range(0, 80_000, 2000):
        Gateway(landing).export(first, first + 1999, form="parquet")
    where = ("--source", landing.url, "--warehouse", str(tmp_path / "lake"), "--max-objects", "5")
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "bridge.ingest.main", *where, "--master", "local[1,4]"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    errors = [running.communicate(timeout=300)[1] for running in both]
    assert all(running.returncode in (0, 5) for running in both), errors
    assert any(running.returncode == 0 for running in both)
    found = counted(open_sink(TableOptions(warehouse=str(tmp_path / "lake"))))
    assert (found["rows"], found["twice"]) == (80_000, 0)
