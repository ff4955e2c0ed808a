"""docs/howto/query-the-tables.md: its Python programs, each run as it is against a table of the job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bridge.ingest.job import ingest
from bridge.ingest.store import StorageLocation
from bridge.ingest.table import TableOptions, open_sink
from tests.ingest.gateway import Gateway
from tests.ingest.test_verdict import InProcess
from tests.test_docs import DOCS, blocks

PAGE = DOCS / "howto" / "query-the-tables.md"
PROGRAMS = {title: text for _, title, text in blocks("python", [PAGE])}


def printed(program: str, lake: Path) -> str:
    """What a program of the page prints, with the lake in another place."""
    done = subprocess.run(
        [sys.executable, "-c", program.replace("/var/lib/lake", str(lake))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A directory with an Iceberg and a Delta table of the same rows: 0 to 19 on the topic of the page."""
    landing = StorageLocation(str(tmp_path / "landing"))
    Gateway(landing).export(0, 19, topic="plant/7/temp", payload=b"21.5")
    Gateway(landing).export(20, 29, topic="plant/8/temp", payload=b"99")
    place = tmp_path / "lake"
    for options in (TableOptions(warehouse=str(place)), TableOptions(delta=str(place / "messages"))):
        assert ingest(InProcess, landing, open_sink(options), full_every=0).rows == 30
    return place


def test_pyiceberg_reads_the_rows_of_a_topic_in_their_order(lake: Path) -> None:
    assert printed(PROGRAMS["pyiceberg"], lake).splitlines() == [f"{number} 21.5" for number in range(10, 20)]


def test_pandas_reads_payloads_as_numbers(lake: Path) -> None:
    assert printed(PROGRAMS["pandas"], lake).splitlines()[-1].split()[1:] == ["20", "21.5", "21.5"]


def test_pandas_reads_a_delta_table(lake: Path) -> None:
    rows = printed(PROGRAMS["delta"], lake).splitlines()[1:]
    assert [row.split()[-1] for row in rows] == [str(number) for number in range(20)]


def test_no_other_program_of_the_page_stays_untried() -> None:
    assert PROGRAMS.keys() == {"pyiceberg", "pandas", "delta"}
