"""The job on every Spark that is promised, by spark-submit and by Spark Connect.

    make test-spark

A version other than the one that the tests run with gets an environment of its own in `.sdks/`, from the
package registry, once. The Connect server of Spark 3.5 is not in the pyspark package: Spark fetches it from
Maven Central, or takes the jar that STREAMBRIDGE_SPARK_CONNECT_JAR names; where it has neither the test is
skipped. The client of 3.5 is tried in any case, against a server of 4.1.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyspark
import pytest

from bridge.ingest.store import StorageLocation
from bridge.ingest.table import TableOptions, read
from tests.ingest.conftest import need_java
from tests.ingest.gateway import Gateway
from tests.ingest.test_command import ROOT, command

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1200)]
JOB = ("boto3", "deltalake>=1.6,<2", "msgspec", "pandas<3", "pyiceberg[sql-sqlite]==0.12.*", "rich", "typer")
NEEDS = {
    "3.5.6": (*JOB, "pyspark[connect]==3.5.6", "numpy<2", "pyarrow<20", "setuptools"),
    "4.1.1": (*JOB, "pyspark[connect]==4.1.1", "pyarrow>=19"),
    "4.3.0": (*JOB, "pyspark[connect]==4.3.0", "pyarrow>=19"),
}
CONNECT_SERVER = "org.apache.spark:spark-connect_2.12:3.5.6"
CONNECT_JAR = "STREAMBRIDGE_SPARK_CONNECT_JAR"


@pytest.fixture(scope="session")
def python() -> Callable[[str], Path]:
    """The interpreter of an environment with this Spark."""

    def find(version: str) -> Path:
        if version == pyspark.__version__:
            return Path(sys.executable)
        content = hashlib.sha256(" ".join((sys.version, *NEEDS[version])).encode()).hexdigest()[:12]
        place = ROOT / ".sdks" / f"spark-{version}-{content}"
        done = place / "complete"
        if not done.exists():  # a venv cannot be moved, so a file marks it as complete
            shutil.rmtree(place, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", place], check=True)
            pip = [place / "bin" / "pip", "install", "--quiet", *NEEDS[version]]
            why = subprocess.run(pip, capture_output=True, text=True, timeout=900, check=False)
            if why.returncode:
                pytest.skip(f"Spark {version} cannot be installed: {why.stderr[-500:]}")
            done.touch()
        return place / "bin" / "python"

    return find


def environment(python: Path, **more: str) -> dict[str, str]:
    """As on a machine that has this Spark and nothing of this repository."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME")}
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    return kept | {"PATH": path, "PYSPARK_PYTHON": str(python), "SPARK_LOCAL_IP": "127.0.0.1"} | more


def works(bucket: StorageLocation, lake: Path, job: Callable[..., dict[str, Any]]) -> None:
    """Ingest both formats, twice, refine and compact; `job` runs the command and gives its document."""
    gateway = Gateway(bucket)
    gateway.export(0, 99)
    gateway.export(100, 199, form="parquet", qos=1)
    gateway.export(200, 209, payload=b"no JSON")
    source = ("--source", bucket.url, "--endpoint-url", str(bucket.endpoint))
    first = job(*source)
    assert (first["rows"], first["report"]["complete"]) == (210, True)
    gateway.export(150, 299)
    gateway.export(300, 309, data=b"broken")
    second = job(*source, exit_code=4)
    assert (second["rows"], second["quarantined"]) == (90, 1)
    typed = job("refine", "--to", "lake.readings", exit_code=4)
    assert (typed["rows"], typed["rejected"]) == (290, 10)
    assert job("compact")["after"] == 1
    found = read(TableOptions(warehouse=str(lake))).sort_by("sequence_number")
    assert found["sequence_number"].to_pylist() == list(range(300))
    assert [found["qos"][number].as_py() for number in (99, 100, 200)] == [None, 1, None]
    assert found["payload"][123].as_py() == b'{"n":123,"temp":20.30}'
    readings = read(TableOptions("lake.readings", str(lake))).sort_by("sequence_number")
    assert readings["n"].to_pylist() == [*range(200), *range(210, 300)]


def document(line: list[Any], where: Path, variables: dict[str, str], exit_code: int) -> dict[str, Any]:
    """Run the command in the folder `where`, with a table there, and give what it prints."""
    done = subprocess.run(
        [*map(str, line), "--json", "--warehouse", str(where / "lake")],
        cwd=where,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == exit_code, done.stderr
    # spark-submit sends the script's standard error to standard output: the document is the last line
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


@pytest.mark.parametrize("version", NEEDS)
def test_spark_submit_needs_nothing_of_this_repository_but_the_package(
    bucket: StorageLocation, tmp_path: Path, python: Callable[[str], Path], version: str
) -> None:
    need_java()
    own = python(version)
    archive, script = command("package", str(tmp_path / "job")).stdout.split()
    submit = [own.with_name("spark-submit"), "--master", "local[2]", "--conf", "spark.ui.enabled=false"]

    def job(*arguments: str, exit_code: int = 0) -> dict[str, Any]:
        line = [*submit, "--py-files", archive, script, *arguments]
        return document(line, tmp_path, environment(own), exit_code)

    works(bucket, tmp_path / "lake", job)


@contextmanager
def server(version: str, python: Path, log: Path) -> Iterator[str]:
    """A Connect server of its own; its workers find this checkout, as where the package is installed."""
    named = os.environ.get(CONNECT_JAR)
    jar = ("--jars", str(Path(named).absolute())) if named else ("--packages", CONNECT_SERVER)
    line = [
        *(python.with_name("spark-submit"), "--master", "local[2]"),
        *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
        *("--conf", "spark.ui.enabled=false", "--conf", "spark.connect.grpc.binding.port=0"),
        *("--conf", "spark.connect.grpc.binding.address=127.0.0.1"),
        *(jar if version.startswith("3") else ()),
        "spark-internal",
    ]
    with (
        log.open("w") as file,
        subprocess.Popen(
            line,
            cwd=log.parent,
            env=environment(python, PYTHONPATH=str(ROOT)),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        ) as running,
    ):
        try:
            until = time.monotonic() + 120
            while True:
                ended, output = running.poll() is not None, log.read_text()
                if port := re.search(r"Spark Connect server started at: \S+:(\d+)\s", output):
                    break
                if "UNRESOLVED DEPENDENCIES" in output:
                    why = f"Maven Central cannot be reached, and {CONNECT_JAR} names no jar of it"
                    pytest.skip(f"{CONNECT_SERVER} is not to be had: {why}")
                assert not ended, output[-3000:]
                assert time.monotonic() < until, output[-3000:]
                time.sleep(0.2)
            yield f"sc://127.0.0.1:{port[1]}"
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(running.pid, signal.SIGKILL)


SOURCE = """
import sys
from pyspark.sql import SparkSession
from bridge.ingest.source import register
spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
register(spark)
frame = spark.read.format("streambridge").option("endpoint", sys.argv[3]).option("badObjects", "skip")
print(frame.load(sys.argv[2]).where("topic like 'plant/%'").count())
"""


STREAM = """
import json, sys
from pyspark.sql import SparkSession
from bridge.ingest.source import register
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
register(spark)
url, endpoint, checkpoint, quarantine = sys.argv[1:]
options = {"endpoint": endpoint, "checkpoint": checkpoint, "quarantine": quarantine}
found = []

def take(frame, batch):
    found.append(sorted(row[0] for row in frame.select("sequence_number").collect()))

def run(**trigger):
    frame = spark.readStream.format("streambridge").options(**options).load(url)
    stream = frame.writeStream.foreachBatch(take)
    return stream.option("checkpointLocation", checkpoint).trigger(**trigger).start()

run(availableNow=True).awaitTermination()
sys.stdin.readline()  # the bad object is uploaded again meanwhile
query = run(processingTime="1 second")
while len(found) < 2:
    assert query.isActive, query.exception()
query.stop()
print(json.dumps(found))
"""


@pytest.mark.parametrize("version", ["4.1.1", "4.3.0"])
def test_streams_run_on_every_spark_with_data_sources_in_python(
    bucket: StorageLocation, tmp_path: Path, python: Callable[[str], Path], version: str
) -> None:
    need_java()
    own, gateway = python(version), Gateway(bucket)
    gateway.export(0, 9)
    gateway.export(5, 14, form="parquet")
    gateway.export(15, 19, data=b"broken")
    places = [str(tmp_path / name) for name in ("checkpoint", "quarantine")]
    with subprocess.Popen(
        [own, "-c", STREAM, bucket.url, str(bucket.endpoint), *places],
        cwd=tmp_path,
        env=environment(own, PYTHONPATH=str(ROOT)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        while not list(tmp_path.glob("checkpoint/commits/0")):
            assert running.poll() is None
            time.sleep(0.2)
        gateway.export(15, 19)
        found, _ = running.communicate("on\n", timeout=300)
    assert json.loads(found) == [list(range(15)), list(range(15, 20))]


def test_spark_3_5_is_told_what_it_needs(tmp_path: Path, python: Callable[[str], Path]) -> None:
    own = python("3.5.6")
    asked = [own, "-c", "import bridge.ingest.source"]
    variables = environment(own, PYTHONPATH=str(ROOT))
    done = subprocess.run(asked, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'NotInstalled: format("streambridge") needs Spark 4.0 or newer' in done.stderr


@pytest.mark.parametrize(
    ("client", "of_server"), [("3.5.6", "3.5.6"), ("3.5.6", "4.1.1"), ("4.1.1", "4.1.1"), ("4.3.0", "4.3.0")]
)
def test_the_job_runs_over_spark_connect(
    bucket: StorageLocation, tmp_path: Path, python: Callable[[str], Path], client: str, of_server: str
) -> None:
    need_java()
    own = python(client)
    variables = environment(own, PYTHONPATH=str(ROOT))
    with server(of_server, python(of_server), tmp_path / "server.log") as url:

        def job(*arguments: str, exit_code: int = 0) -> dict[str, Any]:
            line = [own, "-m", "bridge.ingest.main", *arguments, "--remote", url]
            return document(line, tmp_path, variables, exit_code)

        works(bucket, tmp_path / "lake", job)
        if client.startswith("4"):  # Python data sources
            asked = [own, "-c", SOURCE, url, bucket.url, str(bucket.endpoint)]
            done = subprocess.run(
                asked, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False
            )
            assert done.stdout.split() == ["300"], done.stderr
