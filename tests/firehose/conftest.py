"""A gateway for the tests of the Firehose API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.export.harness import bucket, moto
from tests.firehose.harness import Gateway

__all__ = ["bucket", "gateway", "moto"]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with Gateway(tmp_path) as running:
        yield running
