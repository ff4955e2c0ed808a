"""Kills on a Spark cluster: drivers, executors and their Python workers, while `ingest --every` works.

The cluster is `local-cluster`: executors are processes of their own. Each kill comes at a random moment while
there is work. Then the table must have every message once; after a driver was killed, and its executors
have noticed, the next expiry must leave no file that the table does not have.

    STREAMBRIDGE_KILLS=50 .venv/bin/python -m pytest tests/ingest/test_cluster_kills.py -m slow
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bridge.ingest.store import StorageLocation
from tests.ingest.conftest import need_java
from tests.ingest.gateway import Gateway
from tests.ingest.test_command import ROOT
from tests.ingest.test_scale import clean_work_folder  # noqa: F401 - a fixture

KILLS = int(os.environ.get("STREAMBRIDGE_KILLS", "6"))
MASTER = "local-cluster[2,1,1024]"
OBJECTS, ROWS = 12, 50  # before each kill
pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow(seconds=180),
    pytest.mark.timeout(900 + 120 * KILLS),
    pytest.mark.usefixtures("clean_work_folder"),
]


class Cluster:
    """`ingest --every 1` on a cluster of its own, started again when it has ended."""

    def __init__(self, landing: StorageLocation, lake: Path, log: Path) -> None:
        self.command = [
            *(sys.executable, "-m", "bridge.ingest.main", "--source", landing.url, "--every", "1"),
            *("--warehouse", str(lake), "--master", MASTER),
        ]
        self.log = log
        self.driver = self._start()
        self.starts = 1

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as file:
            return subprocess.Popen(self.command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)

    def revive(self) -> None:
        """What systemd or a scheduler does."""
        if self.driver.poll() is not None:
            self.driver = self._start()
            self.starts += 1

    def tree(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.driver.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def executors(self) -> list[psutil.Process]:
        return [one for one in self.tree() if "CoarseGrainedExecutorBackend" in _words(one)]

    def workers(self) -> list[psutil.Process]:
        """The processes that run tasks in Python: children of the executors' daemons."""
        daemons = [one for one in self.tree() if "pyspark.daemon" in _words(one)]
        return [one for one in daemons if "pyspark.daemon" in _words(one.parent())]

    def kill_driver(self) -> None:
        """Kill Python and its JVM, and wait until the executors have noticed."""
        left = self.tree()
        java = [one for one in left if "SparkSubmit" in _words(one)]
        for one in [psutil.Process(self.driver.pid), *java]:
            one.kill()
        self.driver.wait()
        _, alive = psutil.wait_procs(left, timeout=60)
        assert alive == []

    def stop(self) -> None:
        left = self.tree()
        self.driver.send_signal(signal.SIGTERM)
        self.driver.wait(60)
        psutil.wait_procs(left, timeout=30)

    def abandon(self) -> None:
        for one in self.tree():
            one.kill()
        self.driver.kill()
        self.driver.wait()


def _words(process: psutil.Process | None) -> str:
    try:
        return " ".join(process.cmdline()) if process else ""
    except psutil.Error:
        return ""


def wait_for(cluster: Cluster, what: Callable[[], Any]) -> Any:
    """Poll until it is true; the job is started again if it has ended."""
    until = time.monotonic() + 600
    while not (found := what()):
        cluster.revive()
        assert time.monotonic() < until, cluster.log.read_text()[-3000:]
        time.sleep(0.1)
    return found


@pytest.fixture
def cluster(landing: StorageLocation, tmp_path: Path) -> Iterator[Cluster]:
    need_java()
    Path(landing.url).mkdir()
    running = Cluster(landing, tmp_path / "warehouse", tmp_path / "log")
    yield running
    running.abandon()


def test_whatever_is_killed_on_a_cluster_the_table_is_exact_and_no_orphan_survives_expiry(
    cluster: Cluster, landing: StorageLocation, iceberg: Callable[[], Any], tmp_path: Path
) -> None:
    chance, gateway, uploaded = random.Random(), Gateway(landing), 0

    def rows() -> int:
        return (
            sum(file.rows for file in iceberg().files())
            if (tmp_path / "warehouse" / "catalog.db").exists()
            else 0
        )

    def exact() -> None:
        found = Counter(iceberg().read(["sequence_number"])["sequence_number"].to_pylist())
        assert found == Counter(range(uploaded))

    def upload() -> None:
        nonlocal uploaded
        for _ in range(OBJECTS):
            gateway.export(max(0, uploaded - chance.choice([0, 7])), uploaded + ROWS - 1)
            uploaded += ROWS

    upload()
    wait_for(cluster, lambda: rows() == uploaded)  # Spark is warm
    for number in range(KILLS):
        victim = ("executor", "worker", "driver")[number % 3]
        upload()
        if victim != "driver":  # there is none while one is being replaced
            found = wait_for(cluster, cluster.executors if victim == "executor" else cluster.workers)
        time.sleep(chance.uniform(0, 2))  # no wait for anything: any moment of a cycle
        if victim == "driver":
            wait_for(cluster, lambda: cluster.driver.poll() is None and cluster.tree())
            cluster.kill_driver()
            before = rows()
            iceberg().expire(0.0)
            iceberg().orphans(0.0)
            assert rows() == before
            data = tmp_path / "warehouse" / "lake" / "messages" / "data"
            on_disk = {path for path in data.rglob("*") if path.is_file()}
            assert len(on_disk) == len(iceberg().files())
        else:
            chance.choice(found).kill()
        wait_for(cluster, lambda: rows() >= uploaded)
        exact()
        print(f"{number + 1} of {KILLS}: {victim}, {uploaded} rows, {cluster.starts} starts", flush=True)
    cluster.stop()
    iceberg().expire(0.0)
    iceberg().orphans(0.0)
    exact()
