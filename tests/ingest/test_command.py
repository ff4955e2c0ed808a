"""`streambridge ingest` as people and timers run it: standard output, standard error, exit codes."""

from __future__ import annotations

import errno
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import boto3
import pytest

from bridge.ingest.console import external_reason
from bridge.ingest.errors import IngestError, Stopped, stop
from bridge.ingest.gateway_reports import ReportedStream
from bridge.ingest.job import run
from bridge.ingest.planner import StreamId
from bridge.ingest.session import watched
from bridge.ingest.state import StateStore, TableState
from bridge.ingest.store import StorageLocation
from bridge.ingest.table import TableOptions, open_sink, read
from tests.ingest.conftest import need_java
from tests.ingest.gateway import EPOCH, START, Gateway, reported

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bridge.ingest.main", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.spark
def test_a_run_prints_progress_and_the_report_and_its_exit_code_says_whether_all_is_there(
    bucket: StorageLocation, tmp_path: Path
) -> None:
    need_java()
    gateway = Gateway(bucket)
    gateway.export(0, 99)
    gateway.export(120, 199, form="parquet")
    gateway.report(reported(199))
    warehouse = str(tmp_path / "warehouse")
    assert bucket.endpoint is not None
    where = ("--source", bucket.url, "--endpoint-url", bucket.endpoint, "--warehouse", warehouse)
    first = command(*where, "--master", "local[2]", "--json")
    assert first.returncode == 3, first.stderr  # numbers are missing
    document = json.loads(first.stdout)  # nothing else is on standard output
    assert document["rows"] == 180
    assert document["report"]["total"]["missing"] == 20
    assert document["report"]["streams"][0]["holes"][0]["first"] == 100
    metrics = [json.loads(line) for line in first.stderr.splitlines() if line.startswith('{"number"')]
    assert [(figures["objects"], figures["rows"]) for figures in metrics] == [(2, 180)]

    gateway.export(100, 119)
    second = command(*where, "--master", "local[2]")
    assert second.returncode == 0, second.stderr
    assert "round 1: 1 objects, 20 rows" in second.stderr
    # the logs of Spark and Java are left out; NOTE comes from the options that these tests give to Java
    assert {line.split()[0] for line in second.stderr.splitlines()} <= {"round", "20", "NOTE:"}
    assert "Completeness of lake.messages" in second.stdout
    assert "complete: 200 rows, missing 0" in second.stdout

    report = command("report", *where, "--json")
    assert (report.returncode, json.loads(report.stdout)["complete"]) == (0, True)
    rows = read(TableOptions(warehouse=warehouse), ["sequence_number"], limit=5)
    assert rows.num_rows == 5


@pytest.mark.spark
def test_a_continuous_run_takes_what_comes_and_ends_at_sigterm(
    landing: StorageLocation, tmp_path: Path
) -> None:
    need_java()
    Gateway(landing).export(0, 9)
    where = ("--source", landing.url, "--warehouse", str(tmp_path), "--master", "local[2]")
    with subprocess.Popen(
        [sys.executable, "-m", "bridge.ingest.main", *where, "--every", "1", "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert json.loads(running.stdout.readline())["rows"] == 10
        Gateway(landing).export(10, 29)
        later = (json.loads(line)["rows"] for line in running.stdout)
        assert next(rows for rows in later if rows) == 20
        running.terminate()
        assert running.wait(timeout=120) == 0
    assert read(TableOptions(warehouse=str(tmp_path))).num_rows == 30


@pytest.mark.spark
def test_a_continuous_run_outlives_an_s3_that_fails_for_a_while(
    bucket: StorageLocation, s3_endpoint: str, tmp_path: Path
) -> None:
    need_java()
    late = StorageLocation(f"{bucket.url.partition('/site')[0]}-late/x", s3_endpoint)
    where = ("--source", late.url, "--endpoint-url", s3_endpoint, "--warehouse", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-m", "bridge.ingest.main", *where, "--every", "1", "--master", "local[2]"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr is not None
        lines = iter(running.stderr)
        failure = next(line for line in lines if "retrying in 1 s" in line)
        assert "NoSuchBucket" in failure
        boto3.client("s3", endpoint_url=s3_endpoint).create_bucket(Bucket=f"{late.url.split('/')[2]}")
        assert "nothing found under s3://" in next(line for line in lines if "NoSuchBucket" not in line)
        Gateway(late).export(0, 9)
        assert "10 rows" in next(line for line in lines if line.startswith("round 1: 1 objects"))
        running.terminate()
        assert running.wait(timeout=120) == 0


@pytest.mark.spark
def test_a_run_that_is_stopped_in_the_middle_does_not_look_done(
    landing: StorageLocation, tmp_path: Path
) -> None:
    need_java()
    held = Path(landing.url) / Gateway(landing).export(0, 9)
    held.unlink()
    os.mkfifo(held)  # the task hangs here
    with (
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "bridge.ingest.main",
                "--source",
                landing.url,
                "--warehouse",
                str(tmp_path / "lake"),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as running,
        held.open("wb"),
    ):  # waits for the task
        running.terminate()
        out, errors = running.communicate(timeout=120)
    assert running.returncode == 143
    assert "stopped by SIGTERM" in errors
    assert "Traceback" not in errors
    assert out == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_that_comes_while_an_object_is_freed_stops_the_job_all_the_same() -> None:
    """Python drops what a finalizer raises, and libraries ask the JVM in theirs."""
    ended = threading.Event()

    # as that of Spark Connect, which has no context and knows its jobs by tags
    session: Any = SimpleNamespace(addTag=lambda tag: None, interruptTag=lambda tag: ended.set())

    class Freed:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            while not came:  # the handler runs between two steps of this
                pass

    came: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(number)
        stop(number, frame)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        Freed()
        with pytest.raises(Stopped):
            watched(session, "working", lambda: ended.wait(30), every=0.01)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came
    assert ended.is_set()


def test_a_directory_that_cannot_be_read_ends_a_run_and_is_not_taken_for_an_empty_one(
    tmp_path: Path, iceberg: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    landing = StorageLocation(str(tmp_path / "landing"))
    Gateway(landing).export(0, 9)
    closed, scandir = str(tmp_path / "landing" / "gateway=gw-a"), os.scandir

    def denied(path: Any) -> Any:  # root can read every directory, and may run this test
        if str(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", closed)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(IngestError, match=f"^{closed}: cannot be listed: Permission denied; "):
        run(pytest.fail, landing, iceberg())


def test_a_folder_whose_name_is_not_text_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    landing = StorageLocation(str(tmp_path / "landing"))
    need_java()
    Gateway(landing).export(0, 9)
    latin = tmp_path / "landing" / os.fsdecode(b"Z\xfcrich")
    key = Gateway(StorageLocation(str(latin)), "gw-b").export(0, 9)
    where = ("--source", landing.url, "--warehouse", str(tmp_path / "lake"))
    done = command(*where, "--master", "local[2]")
    assert done.returncode == 0, done.stderr
    assert "complete: 10 rows" in done.stdout
    assert f"not named like data (1): Z\\udcfcrich/{key}" in done.stdout


@pytest.mark.parametrize("option", ["--source", "--warehouse", "--delta", "--state"])
@pytest.mark.parametrize("url", ["gs://bucket/lake", "abfss:box/lake"])
def test_a_url_of_another_store_is_refused_and_not_taken_for_a_directory(
    tmp_path: Path, option: str, url: str
) -> None:
    given = {"--source": str(tmp_path), "--warehouse": str(tmp_path / "lake"), option: url}
    done = command("report", *(part for pair in given.items() for part in pair), folder=tmp_path)
    assert done.returncode == 2, done.stderr
    scheme = url.partition(":")[0]
    assert f"{url}: {scheme}: is not supported; use s3://bucket/prefix or" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mistake", ["warehouse", "other warehouse", "table", "delta"])
def test_a_report_on_a_table_that_is_not_there_says_so_and_makes_nothing(
    tmp_path: Path, mistake: str
) -> None:
    landing = StorageLocation(str(tmp_path / "landing"))
    Gateway(landing).report(reported(-1))
    open_sink(TableOptions(warehouse=str(tmp_path / "lake"))).target()
    (tmp_path / "other").mkdir()
    table = {
        "warehouse": ["--warehouse", str(tmp_path / "lak")],
        "other warehouse": ["--warehouse", str(tmp_path / "other")],
        "table": ["--warehouse", str(tmp_path / "lake"), "--table", "lake.mesages"],
        "delta": ["--delta", str(tmp_path / "lake")],
    }[mistake]
    there = sorted(tmp_path.rglob("*"))
    for subcommand in (["report"], ["accept", "gw-a/s0"], ["prune"]):
        done = command(*subcommand, "--source", landing.url, *table)
        assert (done.returncode, done.stdout) == (6, ""), done.stderr
        (line,) = done.stderr.splitlines()
        assert "there is no such table" in line
        assert "lake.mesages" in line if mistake == "table" else table[1] in line
    assert sorted(tmp_path.rglob("*")) == there


def test_a_report_between_an_upload_and_the_next_run_shows_no_loss(tmp_path: Path) -> None:
    landing = StorageLocation(str(tmp_path / "landing"))
    open_sink(TableOptions(warehouse=str(tmp_path / "lake"))).target()  # makes the table
    gateway = Gateway(landing)
    gateway.export(0, 49)
    gateway.report(reported(49))
    done = command("report", "--source", landing.url, "--warehouse", str(tmp_path / "lake"))
    assert done.returncode == 0, done.stderr
    assert "waiting (uploaded, not taken yet): gw-a s0 0..49 (50)" in done.stdout


def test_a_stream_that_is_gone_is_reported_with_the_command_that_accepts_it(tmp_path: Path) -> None:
    landing = StorageLocation(str(tmp_path / "landing"))
    where = ("--source", landing.url, "--warehouse", str(tmp_path / "lake"))
    state, sink = TableState(), open_sink(TableOptions(warehouse=str(tmp_path / "lake")))
    state.of(StreamId("gw-a", "s0", EPOCH)).reported = ReportedStream(START, 0, 99, -1)
    sink.target()  # makes the table
    sink.commit(None, StateStore(sink.state()).save(state, None), [])
    Gateway(landing).report(updated=START + 1)  # it has no stream any more
    lost = command("report", *where)
    assert lost.returncode == 3, lost.stderr
    assert "missing (its stream is gone): gw-a s0 0..99 (100)" in lost.stdout
    assert "streambridge ingest accept gw-a/s0" in lost.stdout
    typo = command("accept", "gw-a/s1", *where)
    assert (typo.returncode, "these are: gw-a/s0" in typo.stderr) == (1, True), typo.stderr
    accepted = command("accept", "gw-a/s0", *where)
    assert accepted.returncode == 0, accepted.stderr
    assert accepted.stdout == "gw-a/s0: 100 pending messages now count as trimmed\n"
    report = command("report", *where)
    assert report.returncode == 0, report.stderr
    assert "trimmed (accepted): gw-a s0 0..99 (100)" in report.stdout


def test_an_unreachable_s3_is_reported_in_one_line(tmp_path: Path) -> None:
    open_sink(TableOptions(warehouse=str(tmp_path))).target()  # makes the table
    done = command(
        *("report", "--source", "s3://nowhere/x", "--endpoint-url", "http://127.0.0.1:1"),
        *("--warehouse", str(tmp_path)),
        AWS_ACCESS_KEY_ID="x",
        AWS_SECRET_ACCESS_KEY="x",
    )
    assert done.returncode == 1
    assert "Could not connect to the endpoint URL" in done.stderr
    assert "Traceback" not in done.stderr


def of_an_iceberg_table(folder: Path) -> list[str]:
    """Options for a table whose metadata are on an S3 that does not answer: Arrow reads them."""
    options = ["--warehouse", str(folder / "lake")]
    open_sink(TableOptions(warehouse=options[1])).target()  # makes the table
    with closing(sqlite3.connect(folder / "lake" / "catalog.db")) as catalog, catalog:
        catalog.execute("update iceberg_tables set metadata_location = 's3://nowhere/x.metadata.json'")
    return options


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_table_on_an_unreachable_s3_is_reported_in_one_line_and_a_continuous_run_retries(
    tmp_path: Path, kind: str
) -> None:
    need_java()
    landing = tmp_path / "landing"
    landing.mkdir()
    table = of_an_iceberg_table(tmp_path) if kind == "iceberg" else ["--delta", "s3://nowhere/x"]
    where = ("--source", str(landing), "--endpoint-url", "http://127.0.0.1:1", *table)
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    done = command("report", *where, **keys)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("streambridge ingest: OSError: ")
    assert "127.0.0.1:1" in line
    assert line.isprintable()  # no colours of a terminal
    with subprocess.Popen(
        [sys.executable, "-m", "bridge.ingest.main", *where, "--every", "1"],
        cwd=ROOT,
        env=os.environ | keys,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr is not None
        for _ in range(2):
            assert running.stderr.readline().endswith("; retrying in 1 s\n")
        running.terminate()
        assert running.wait(timeout=120) == 0


@pytest.mark.parametrize("module", ["exceptions", "errorfactory"])  # what S3 refuses is of the second
def test_an_error_of_s3_in_a_task_is_reported_without_the_stack_traces_of_spark(module: str) -> None:
    pyspark = pytest.importorskip("pyspark.errors")
    trace = f"Job aborted\n  File ...\nbotocore.{module}.NoSuchBucket: An error occurred\n\tat org.apache"
    assert external_reason(pyspark.PySparkException(trace)) == "NoSuchBucket: An error occurred"


def test_missing_java_is_reported_in_one_line_with_the_remedy(tmp_path: Path) -> None:
    done = command("--source", str(tmp_path), "--warehouse", str(tmp_path), JAVA_HOME=str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "Java" in done.stderr
    assert "openjdk-17" in done.stderr


def test_without_the_spark_extra_the_command_says_what_to_install(tmp_path: Path) -> None:
    hide = "import sys; sys.modules |= dict.fromkeys(['pyspark', 'pyarrow', 'pandas'])\n"
    code = hide + "from bridge.ingest.commands import app; app(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "--source", str(tmp_path), "--warehouse", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "streambridge ingest: pyspark, pyarrow, pandas are not installed: "
        f"pip install '{Path(__file__).parents[2]}[spark]'"
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--source is missing"),
        (["--source", "s3://x", "--catalog", "glue"], "--catalog glue: write it as key=value"),
        (
            ["--source", "s3://x", "--table", "messages", "--warehouse", "{tmp}"],
            "write it as namespace.table",
        ),
        (["--source", "s3://x"], "no catalog: give --warehouse DIR"),
        (
            ["--source", "s3://x", "--every", "9", "--retry-quarantined"],
            "--retry-quarantined is for a single run, without --every",
        ),
    ],
)
def test_wrong_options_are_named(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    done = command("--max-objects", "5", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("subcommand", [[], ["report"]])
def test_a_prefix_without_any_gateway_does_not_look_complete(
    bucket: StorageLocation, subcommand: list[str]
) -> None:
    need_java()
    Gateway(bucket.join("deeper")).report(reported(9))  # a typo, or one level too high
    where = ("--source", bucket.url, "--endpoint-url", str(bucket.endpoint))
    if subcommand:
        open_sink(TableOptions(delta=f"{bucket.url}-lake", endpoint=bucket.endpoint)).target()
    done = command(*subcommand, *where, "--delta", f"{bucket.url}-lake")
    assert done.returncode == 6
    assert f"nothing found under {bucket.url}: no object and no gateway report" in done.stderr
    assert "complete" not in done.stdout
    document = json.loads(command(*subcommand, *where, "--delta", f"{bucket.url}-lake", "--json").stdout)
    found = document if subcommand else document["report"]
    assert found["complete"] is False
    assert found["problems"] == [
        "the gateway reports are in deeper/: end --source with it, or lost tails go unnoticed"
    ]


@pytest.mark.parametrize("command", [["ingest"], ["ingest", "report"]])
def test_a_source_that_is_not_there_is_a_mistake_and_not_complete(tmp_path: Path, command: list[str]) -> None:
    arguments = ["--source", str(tmp_path / "typo"), "--warehouse", str(tmp_path / "warehouse")]
    done = subprocess.run(
        [sys.executable, "-m", "bridge", *command, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no such directory" in done.stderr
    assert "complete" not in done.stdout
    assert not (tmp_path / "warehouse").exists()
