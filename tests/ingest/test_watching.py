"""What tells an operator that the table is up to date: the metrics file and the alarm."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from bridge.ingest.alarm import newest_row, seconds
from bridge.ingest.commands import app
from bridge.ingest.errors import BadOption
from bridge.ingest.job import ingest
from bridge.ingest.metrics import MetricsFile
from bridge.ingest.report import survey
from bridge.ingest.store import StorageLocation
from tests.ingest.conftest import need_java
from tests.ingest.gateway import START, Gateway, reported
from tests.ingest.test_command import command
from tests.ingest.test_verdict import InProcess

Sink = Callable[[], Any]
LINE = re.compile(r'streambridge_ingest_(\w+(?:\{kind="\w+"\})?) (\S+)')


def figures(path: Path) -> dict[str, float]:
    """Return the metrics of a file in Prometheus' text format."""
    found: dict[str, float] = {}
    declared = set()
    for text in path.read_text().splitlines():
        if kind := re.fullmatch(r"# TYPE (streambridge_ingest_\w+) (counter|gauge)", text):
            assert (kind[2] == "counter") == kind[1].endswith("_total")
            declared.add(kind[1].removeprefix("streambridge_ingest_"))
        elif not text.startswith("# HELP "):
            line = LINE.fullmatch(text)
            assert line is not None, text
            assert line[1].partition("{")[0] in declared
            found[line[1]] = float(line[2])
    return found


def test_the_metrics_file_has_the_figures_of_the_last_cycle(
    landing: StorageLocation, iceberg: Sink, tmp_path: Path
) -> None:
    path = tmp_path / "ingest.prom"
    metrics, gateway = MetricsFile(path, clock=lambda: 7.0), Gateway(landing)
    gateway.export(0, 99)
    gateway.export(100, 109, data=b"")
    gateway.report(reported(129, exported=119))
    metrics.succeeded(ingest(InProcess, landing, iceberg()))
    found = figures(path)
    assert found["added_rows_total"] == found["table_rows"] == 100
    assert (found["complete"], found["gateways"], found["gateways_with_losses"]) == (0, 1, 1)
    assert (found["last_success_timestamp_seconds"], found["quarantined_objects_total"]) == (7, 1)
    assert found["newest_row_timestamp_seconds"] == START / 1000 + 99
    kinds = ("missing", "quarantined", "waiting", "trimmed")
    assert [found[f'absent_numbers{{kind="{kind}"}}'] for kind in kinds] == [10, 10, 10, 0]
    gateway.export(100, 119)
    gateway.report(reported(119), updated=START + 1)
    metrics.succeeded(ingest(InProcess, landing, iceberg()))
    metrics.failed()
    found = figures(path)
    assert (found["added_rows_total"], found["failed_cycles_total"], found["table_rows"]) == (120, 1, 120)
    assert os.stat(path).st_mode & 0o777 == 0o644
    assert [each.name for each in tmp_path.iterdir() if "prom" in each.name] == ["ingest.prom"]


def test_a_metrics_file_that_nothing_would_read_is_refused(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "ingest.txt", "end in .prom"),
        (tmp_path / "a" / "b.prom", "no such dir"),
    ):
        with pytest.raises(BadOption, match=reason):
            MetricsFile(path)


def test_a_metrics_file_that_cannot_be_written_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ingest.prom").mkdir()
    MetricsFile(tmp_path / "ingest.prom").failed()
    assert "ingest.prom: cannot be written: Is a directory" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 1


def test_the_age_is_that_of_the_newest_row_of_the_table_or_of_each_gateway(
    landing: StorageLocation, iceberg: Sink
) -> None:
    Gateway(landing, "gw-a").export(0, 99)
    Gateway(landing, "gw-b").export(0, 9)
    Gateway(landing, "gw-b").export(0, 29, stream="s1")
    ingest(InProcess, landing, iceberg())
    now = START / 1000 + 100
    found = newest_row(iceberg(), 60, clock=lambda: now)
    assert (found.age_seconds, found.too_old, found.late, found.gateways) == (1, False, {"gw-b": 71}, 2)
    assert newest_row(iceberg(), 60, clock=lambda: now + 60).too_old


def invoked(*arguments: str) -> Result:
    """Run a command in this process: only `ingest` itself needs one of its own."""
    return CliRunner().invoke(app, arguments)


def test_rows_from_the_future_do_not_keep_the_alarm_silent(
    tmp_path: Path, landing: StorageLocation, iceberg: Sink
) -> None:
    """One is the last of a gateway that was right before, and one is all that another gateway has sent."""
    year, now = 365 * 24 * 3600, START / 1000 + 99 + 30
    gateway = Gateway(landing)
    gateway.export(0, 99)
    gateway.export(100, 100, step_ms=60_000_000)  # its clock is set to 69 days later
    Gateway(landing, "gw-b").export(0, 0, hour_of=0, step_ms=1, ingest_time=START + 70 * year * 1000)
    ingest(InProcess, landing, iceberg())
    found = newest_row(iceberg(), 60, clock=lambda: now)
    assert (found.age_seconds, found.too_old, found.late, found.gateways) == (
        129,
        True,
        {"gw-a": 129, "gw-b": None},
        2,
    )
    _, report = survey(landing, iceberg())
    (stream,) = [stream for stream in report.streams if stream.gateway == "gw-b"]
    assert (stream.rows, stream.newest_ms, stream.lag_seconds) == (1, None, None)


def test_the_alarm_ends_with_a_code_of_its_own(
    landing: StorageLocation, tmp_path: Path, iceberg: Sink
) -> None:
    where = ("--warehouse", str(tmp_path / "warehouse"), "--older-than")
    assert invoked("alarm", *where, "1h").exit_code == 6  # there is no table yet
    Gateway(landing).export(0, 9)
    ingest(InProcess, landing, iceberg())
    late = invoked("alarm", *where, "1h", "--each-gateway", "--json")
    document = json.loads(late.stdout)
    assert (late.exit_code, document["too_old"], list(document["late"])) == (8, True, ["gw-a"])
    assert invoked("alarm", *where, "9999999d").exit_code == 0
    assert invoked("alarm", *where, "soon").exit_code == 2


def test_the_report_writes_a_page_beside_its_verdict(
    landing: StorageLocation, tmp_path: Path, iceberg: Sink
) -> None:
    Gateway(landing).export(0, 9)
    Gateway(landing).report(reported(9))
    ingest(InProcess, landing, iceberg())
    where = ("--source", landing.url, "--warehouse", str(tmp_path / "warehouse"))
    shown = invoked("report", *where, "--html", str(tmp_path / "fleet.html"))
    assert (shown.exit_code, shown.stdout.splitlines()[-1][:17]) == (0, "complete: 10 rows")
    assert '"gw-a"' in (tmp_path / "fleet.html").read_text()


def test_a_run_writes_the_metrics_file(tmp_path: Path) -> None:
    need_java()
    (tmp_path / "landing").mkdir()
    path = tmp_path / "ingest.prom"
    where = ("--source", str(tmp_path / "landing"), "--warehouse", str(tmp_path / "warehouse"))
    run = command(*where, "--metrics-file", str(path))  # with nothing to do, so without Spark
    assert (run.returncode, figures(path)["complete"], figures(path)["table_rows"]) == (6, 0, 0)


@pytest.mark.parametrize(("text", "value"), [("90s", 90), ("15min", 900), ("1.5h", 5400), ("2 d", 172_800)])
def test_ages_have_units(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "15", "15m", "-1h", "1h1s"])
def test_an_age_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(BadOption, match="write it like"):
        seconds(text)
