"""What holds for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _memory_streams_leave_nothing_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Services that are killed leave their directory for memory streams; let it be one of the tests' own."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))
    yield
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before
