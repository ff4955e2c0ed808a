"""A plugin of pytest for a recorded run: notes which blocks each test has run in its own process.

A line of JSON for each test that passed, in a file of each process of pytest: its name, its seconds with its
fixtures, and the blocks, see `probe`.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import time
from collections.abc import Generator
from pathlib import Path

import pytest

HITS = Path(__file__).resolve().parents[2] / "hits"
HEAD = 512
_failed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome != "passed":
        _failed.add(report.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _taken()
    began = time.monotonic()
    result = yield
    if item.nodeid not in _failed:
        line = json.dumps([item.nodeid, round(time.monotonic() - began, 3), _taken()])
        with (HITS / f"{os.getpid()}.tests").open("a") as file:
            file.write(f"{line}\n")
    return result


def _taken() -> list[int]:
    """The blocks that were run since the last call."""
    hits = getattr(builtins, "_hit", None)  # none before the first import of the product
    if hits is None:
        return []
    found = [match.start() for match in re.finditer(b"\x01", hits[HEAD:])]
    for block in found:
        hits[HEAD + block] = 0
    return found
