"""The fleet at a glance: a report as one HTML file, for a browser and no server.

The file has everything in it, and its policy allows it to load nothing. The figures are a JSON document in
the page; its script keeps one page of rows in the document, so 10,000 gateways are as quick as ten. Names
come from gateways, and are shown as text only.

The page is not complete if and only if a tile is marked as bad: the tile "Table" says what is wrong with the
table itself, `state` [what, more, whether anything is].

The document has `gateways`: [[id, version, ms of the report or null, streams]]; a stream is
[name, epoch, first, last, rows, ms of the newest row or null, missing, quarantined, unreadable, waiting,
trimmed, duplicates, late rows, ranges, number of ranges left out], and a range is
[first, last, count, index of its kind, reason, ms of the row before, ms of the row after].
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from bridge.ingest.errors import BadOption
from bridge.ingest.report import KINDS, Hole, Report, StreamReport
from bridge.ingest.store import replacing
from bridge.printable import printable

RANGES = 200  # of a stream
SAFE = 2**53  # JavaScript's numbers are exact up to here


def write_page(report: Report, path: Path) -> None:
    """Write the page; a browser sees the old file or the new one. Raises BadOption if that fails."""
    try:
        with replacing(path) as file:
            file.write(page(report).encode())
    except OSError as error:
        raise BadOption(f"--html {path}: cannot be written: {error.strerror}") from error


def page(report: Report) -> str:
    """Return the page."""
    here = files("bridge.ingest")
    html, style, script = ((here / f"fleet.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    policy = (
        f"default-src 'none'; img-src data:; script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    )
    # "<" would end the script element, whatever its type
    data = json.dumps(document(report), separators=(",", ":")).replace("<", "\\u003c")
    parts = {"policy": policy, "style": style, "script": script, "data": data}
    first, *rest = html.split("/*")
    for part in rest:
        name, _, after = part.partition("*/")
        first += parts[name] + after
    return first


def document(report: Report) -> dict[str, Any]:
    """Return the figures of the page."""
    streams: dict[str, list[StreamReport]] = defaultdict(list)
    for stream in report.streams:
        streams[stream.gateway].append(stream)
    return {
        "table": printable(report.table),
        "made": report.made_ms,
        "full": report.full_ms,
        "complete": report.complete,
        "files": report.files.full,
        "state": _condition(report),
        "problems": [printable(problem) for problem in report.problems],
        "kinds": KINDS,
        "gateways": [
            [
                printable(gateway),
                printable(report.versions.get(gateway, "")),
                max((one.reported_ms for one in own if one.reported_ms is not None), default=None),
                [_stream(one) for one in own],
            ]
            for gateway, own in streams.items()
        ],
    }


def _condition(report: Report) -> tuple[str, str, bool]:
    """Return what is wrong with the table itself in short, more of it, and whether anything is."""
    damaged, unseen = len(report.files.damages), len(report.files.unseen)
    found = {
        "not of this source": report.elsewhere,
        f"{damaged:,} files damaged": damaged,
        f"{unseen:,} files unseen": unseen,
        "changed by others": report.differs,
    }
    first, *others = [what for what, holds in found.items() if holds] or ["as recorded"]
    return first, ", ".join(others), any(found.values())


def _stream(stream: StreamReport) -> list[Any]:
    return [
        printable(stream.stream),
        str(stream.epoch),
        _exact(stream.first),
        _exact(stream.last),
        _exact(stream.rows),
        stream.newest_ms,
        _exact(stream.missing),
        _exact(stream.quarantined),
        _exact(stream.unreadable),
        _exact(stream.waiting),
        _exact(stream.trimmed),
        _exact(stream.duplicates),
        _exact(stream.late_rows),
        [_range(hole) for hole in stream.holes[:RANGES]],
        max(0, len(stream.holes) - RANGES),
    ]


def _range(hole: Hole) -> list[Any]:
    kind, reason = KINDS.index(hole.kind), printable(hole.reason)
    return [
        _exact(hole.first),
        _exact(hole.last),
        _exact(hole.count),
        kind,
        reason,
        hole.after_ms,
        hole.before_ms,
    ]


def _exact(number: int | None) -> int | str | None:
    return str(number) if number is not None and number > SAFE else number


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
