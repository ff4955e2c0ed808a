"""A streambridge exporter that writes messages to an SQLite database.

    [[streams.plant.export.sqlite]]
    identifier = "local"
    path = "/var/lib/plant.db"

The table `messages` has one row per message. A batch may arrive again after a crash. The key of a row is the
stream, its epoch and the sequence number, so the second batch changes nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing

from bridge import (
    ACCEPTED,
    Batch,
    BatchedConfig,
    BatchLimits,
    Context,
    Exporter,
    Outcome,
    Retry,
    hookimpl,
)

SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (
    stream TEXT, epoch INTEGER, sequence_number INTEGER, ingest_time INTEGER, topic TEXT, payload BLOB,
    PRIMARY KEY (stream, epoch, sequence_number)
) WITHOUT ROWID
"""


class SqliteConfig(BatchedConfig, kw_only=True, frozen=True):
    """The keys of a configuration, in addition to those of all exports."""

    path: str
    timeout_millis: int = 5000


class SqliteExporter(Exporter):
    """One stream to one database."""

    kind = "sqlite"
    Config = SqliteConfig
    limits = BatchLimits(records=1000)

    config: SqliteConfig

    def __init__(self, config: SqliteConfig, context: Context) -> None:
        super().__init__(config, context)
        self._timeout = config.timeout_millis / 1000

    def export(self, batch: Batch) -> Outcome:
        rows = [
            (batch.stream, batch.epoch, r.sequence_number, r.ingest_time, r.topic, r.payload)
            for r in batch.records
        ]
        try:
            # One transaction: the batch is in the table completely when this returns, or not at all.
            with closing(sqlite3.connect(self.config.path, timeout=self._timeout)) as database, database:
                database.execute(SCHEMA)
                database.executemany("INSERT OR IGNORE INTO messages VALUES (?, ?, ?, ?, ?, ?)", rows)
        except sqlite3.OperationalError as error:  # locked, disk full, no directory yet
            raise Retry(f"{self.config.path}: {error}") from error
        return ACCEPTED


@hookimpl
def register_exporters(register: Callable[[type[Exporter]], None]) -> None:
    """The exporter of this package."""
    register(SqliteExporter)
