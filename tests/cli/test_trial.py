"""`streambridge demo` and `streambridge bench`, as somebody with nothing but an installation runs them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import streambridge


def test_the_demo_kills_a_gateway_and_finds_every_acknowledged_reading(tmp_path: Path) -> None:
    done = streambridge("demo", "--seconds", "1", "--json", env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["acknowledged"] >= 100
    assert told["missing"] == 0
    assert list(tmp_path.iterdir()) == []


def test_the_bench_measures_both_promises_and_leaves_nothing(tmp_path: Path) -> None:
    done = streambridge("bench", "--seconds", "0.2", "--directory", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for promise in ("written", "flushed"):
        assert told[promise]["messagesPerSecond"] > 100
        assert 0 < told[promise]["medianMillis"] <= told[promise]["worstPercentMillis"]
    assert list(tmp_path.iterdir()) == []
