"""`streambridge demo` and `streambridge bench`, as a user of a fresh installation runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import streambridge


def test_the_demo_kills_a_gateway_and_finds_every_acknowledged_reading(tmp_path: Path) -> None:
    done = streambridge("demo", "--seconds", "1", "--json", env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["acknowledged"] >= 100
    assert printed["missing"] == 0
    assert list(tmp_path.iterdir()) == []


def test_the_demo_with_a_site_broker_stores_all_that_the_broker_acknowledged(tmp_path: Path) -> None:
    done = streambridge("demo", "--bridge", "--seconds", "1", "--json", env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["acknowledged"] >= 150
    assert printed["missing"] == 0
    assert list(tmp_path.iterdir()) == []


def test_without_amqtt_the_error_of_the_demo_names_the_package_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['amqtt'] = None\n")
    done = streambridge("demo", "--bridge", env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "streambridge: the site broker of `demo --bridge` is amqtt, which is not installed; "
        f"install it with: pip install '{Path(__file__).parents[2]}[amqtt]'\n"
    )


def test_the_bench_measures_both_promises_and_leaves_nothing(tmp_path: Path) -> None:
    done = streambridge("bench", "--seconds", "0.2", "--directory", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    for promise in ("written", "flushed"):
        assert printed[promise]["messagesPerSecond"] > 0
        assert 0 < printed[promise]["medianMillis"] <= printed[promise]["worstPercentMillis"]
    assert list(tmp_path.iterdir()) == []


def test_the_bench_writes_more_than_a_stream_may_hold_and_needs_little_disk(tmp_path: Path) -> None:
    done = streambridge("bench", "--size", "60000", "--seconds", "4", "--directory", tmp_path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    printed = json.loads(done.stdout)
    if printed["written"]["messagesPerSecond"] * 4 * 60_000 < 64 << 20:
        pytest.skip("this machine is too slow now to fill the stream")


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_a_temporary_gateway_that_cannot_store_is_reported_in_one_line(tmp_path: Path, command: str) -> None:
    small = ("prlimit", "--fsize=1500")  # of every file, as a full disk would
    done = streambridge(command, "--seconds", "2", env={"TMPDIR": str(tmp_path)}, prefix=small)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith("streambridge: the temporary gateway in ")
    assert "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []
