"""The figures of runs for Prometheus, as a file for node_exporter's textfile collector.

It is a file instead of a listener because runs that a timer starts have ended when Prometheus scrapes, and
because a file needs no port and no rights. `last_success` shows how old the figures are. There is no series
per gateway or stream, as a fleet of 10,000 would need 10,000 series; `report --html` shows those.

The file is replaced after each cycle, so a reader sees either the old figures or the new ones. The counters
begin at 0 with each process. A file that cannot be written is logged, and ends no run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.ingest.console import log
from bridge.ingest.errors import BadOption
from bridge.ingest.report import KINDS
from bridge.ingest.store import replacing

if TYPE_CHECKING:
    from bridge.ingest.job import Summary
    from bridge.ingest.report import Report

PREFIX = "streambridge_ingest_"


class MetricsFile:
    """The file at `path`, which must end in `.prom`; `clock` gives Unix time in seconds. Raises BadOption."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        if path.suffix != ".prom":
            raise BadOption(f"--metrics-file {path}: node_exporter reads only files that end in .prom")
        if not path.parent.is_dir():
            raise BadOption(f"--metrics-file {path}: there is no such directory")
        self._path, self._clock = path, clock
        self._rows = self._objects = self._quarantined = self._failures = 0
        self._last: list[str] = []

    def succeeded(self, summary: Summary) -> None:
        """Write the figures of a cycle."""
        self._rows += summary.rows
        self._objects += summary.objects
        self._quarantined += summary.quarantined
        self._last = [
            *_gauge("last_success_timestamp_seconds", "When the last cycle ended", self._clock()),
            *_gauge("cycle_seconds", "Duration of the last cycle", summary.seconds),
            *_gauge("listed_objects", "Objects that the last cycle listed", summary.listed),
            *_of(summary.report),
        ]
        self._write()

    def failed(self) -> None:
        """Count a cycle that failed; the figures of the last good one stay."""
        self._failures += 1
        self._write()

    def _write(self) -> None:
        counters = (
            ("added_rows_total", "Rows added to the table", self._rows),
            ("added_objects_total", "Objects taken", self._objects),
            ("quarantined_objects_total", "Objects quarantined", self._quarantined),
            ("failed_cycles_total", "Cycles that failed", self._failures),
        )
        lines = [
            line for name, text, value in counters for line in _metric(name, text, "counter", {"": value})
        ]
        try:
            with replacing(self._path) as file:
                file.write("\n".join([*lines, *self._last, ""]).encode())
                os.fchmod(file.fileno(), 0o644)  # for node_exporter, which is another user
        except OSError as error:
            log(f"streambridge ingest: --metrics-file {self._path}: cannot be written: {error.strerror}")


def _of(report: Report) -> Iterator[str]:
    """Yield the lines of a report."""
    yield from _gauge("complete", "Whether the report is complete", int(report.complete))
    yield from _gauge("table_differs", "Whether others have changed the table", int(report.differs))
    files = report.files
    yield from _gauge("damaged_files", "Files that are gone or damaged", len(files.damages + files.unseen))
    if files.full is not None:
        text = "When all files of the table were compared with what is there"
        yield from _gauge("files_compared_timestamp_seconds", text, files.full / 1000)
    yield from _gauge("table_rows", "Rows of the table", report.total("rows"))
    kinds: dict[str, float] = {f'{{kind="{kind}"}}': report.total(kind) for kind in KINDS}
    yield from _metric("absent_numbers", "Numbers that are not in the table", "gauge", kinds)
    bad = {stream.gateway for stream in report.streams if stream.missing or stream.quarantined}
    yield from _gauge("gateways", "Gateways", len({stream.gateway for stream in report.streams}))
    yield from _gauge("gateways_with_losses", "Gateways with missing or quarantined numbers", len(bad))
    newest = [stream.newest_ms for stream in report.streams if stream.newest_ms is not None]
    if newest:
        yield from _gauge("newest_row_timestamp_seconds", "Ingest time of the newest row", max(newest) / 1000)
    if report.full_ms is not None:
        text = "When all objects were listed the last time"
        yield from _gauge("full_listing_timestamp_seconds", text, report.full_ms / 1000)


def _gauge(name: str, text: str, value: float) -> list[str]:
    return _metric(name, text, "gauge", {"": value})


def _metric(name: str, text: str, kind: str, values: dict[str, float]) -> list[str]:
    head = [f"# HELP {PREFIX}{name} {text}.", f"# TYPE {PREFIX}{name} {kind}"]
    return head + [f"{PREFIX}{name}{labels} {value}" for labels, value in values.items()]
