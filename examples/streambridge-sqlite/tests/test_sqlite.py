"""The published contract suite, and what is special to SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from streambridge_sqlite import SqliteExporter

from bridge.plugin.testing import ExporterContract, deliver, make_batch


class TestSqlite(ExporterContract):
    """Inherits the tests; pytest finds them here."""

    exporter = SqliteExporter
    faults = ("locked", "missing_directory")
    path: Path

    @pytest.fixture(autouse=True)
    def _database(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "data"
        self.directory.mkdir()
        self.path = self.directory / "plant.db"

    def config(self) -> dict[str, Any]:
        return {"identifier": "local", "path": str(self.path), "timeoutMillis": 50}

    def delivered(self) -> list[int]:
        with closing(sqlite3.connect(self.path)) as database:
            rows = database.execute("SELECT payload FROM messages ORDER BY sequence_number")
            return [int(payload.split()[1]) for (payload,) in rows]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Somebody else writes for a long time."""
        with closing(sqlite3.connect(self.path)) as other:
            other.execute("BEGIN EXCLUSIVE")
            yield
            other.rollback()

    @contextmanager
    def missing_directory(self) -> Iterator[None]:
        """The disk is not mounted yet."""
        aside = self.directory.rename(self.directory.with_name("aside"))
        yield
        aside.rename(self.directory)

    def test_a_row_is_never_there_twice(self) -> None:
        """Also when a batch comes again with other boundaries."""
        exporter = self.make()
        deliver(exporter, make_batch([b"message 0", b"message 1"]))
        deliver(exporter, make_batch([b"message 1", b"message 2"], first=1))
        assert self.delivered() == [0, 1, 2]
