"""The audit log: who logged in, who was refused, and what was changed.

    record     records an event, from anywhere in the service; without an audit log, it does nothing
    begin      opens the files and sockets that [audit] names
    writer     a queue of events, and the thread that writes them
    repeats    limits the lines per kind and address, and summarizes the others
    sinks      where lines go: a file that is rotated, or journald

An event is one line. Keys that do not apply are omitted:

    time        when it happened, RFC 3339 in UTC, with milliseconds
    seq         counts the lines, also over starts and kills: a missing number is a missing line
    event       `login`, `publish`, `subscribe`, `will`, `revoke`, `start`, `stop`, `reload`, `clock`, `lost`,
                or the name of an operation
    outcome     `ok`, `refused` (no right, or wrong credentials) or `failed` (another error)
    front_end   `mqtt`, `http`, `greengrass`, `firehose` or `control`
    address     of the peer; at the control socket, the ids of its user and its process
    user        the name of the user; for a login that was refused, the name that the client gave
    client      the client id, likewise
    on          the stream, topic or topic filter concerned
    why         what was done, or why not, as in the log
    before      the changed values before the event; `after` has them after it
    repeated    only in a summary: how many more events of this kind occurred from `since` to `time` without a
                line of their own; `on` lists some of their subjects

What it promises:

* Nothing waits for the audit log: an event is put into a queue, and a thread writes it. The only PUBLISH
  packets that are recorded are the first of each connection on each topic that it may not publish on.
* A line is in the file a moment after its event, and on the disk at most `sync_interval` later. SIGKILL
  costs the lines of that moment; a power cut those of `sync_interval`. A stop writes and syncs everything.
* Lines that cannot be written (a full disk) are kept and written later, up to `writer.MOST_KEPT`; `lost`
  counts the others. Each destination is for itself: what keeps lines out of one does not keep them out of
  another.
* What a kill costs is seen: the numbers of lines that were made and not written are missing, and `lost`
  counts the events that were in no line yet. Readers find whole lines only.
* Nobody can push other lines out of the files by repeating something: see `repeats`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bridge.audit.repeats import Bounds, Event
from bridge.audit.settings import AuditSettings
from bridge.audit.writer import Audit

TALLY = "audit.tally"
CUT = 500  # characters that are kept of a text that a client sends
LONGEST = 64 * 1024  # characters of JSON of one value in `before` and `after`

Outcome = Literal["ok", "refused", "failed"]
_current: Audit | None = None
_tally: Path | None = None


class Origin(NamedTuple):
    """Where a caller comes from: the front end, and the address of the peer."""

    front_end: str = ""
    address: str = ""


def begin(settings: AuditSettings, bounds: Bounds | None = None, data_dir: Path | None = None) -> None:
    """Open the audit log of this process, if the settings define one. Raises ConfigError.

    `data_dir` keeps the counts, with which the next process goes on.
    """
    global _current, _tally
    _tally = None if data_dir is None else data_dir / TALLY
    _current = Audit(settings, bounds, _tally) if settings.on else None


def reload(settings: AuditSettings) -> None:
    """Apply new settings. After a ConfigError, nothing has changed."""
    global _current
    if _current is None:
        _current = Audit(settings, None, _tally) if settings.on else None
    elif settings.on:
        _current.reload(settings)
    else:
        end()


def end() -> None:
    """Close the audit log, with everything written."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


def troubles() -> dict[str, str]:
    """Why destinations of the audit log cannot be written now, by name."""
    return {} if _current is None else _current.troubles()


def active() -> bool:
    """Whether there is an audit log."""
    return _current is not None


def record(
    event: str,
    outcome: Outcome = "ok",
    *,
    origin: Origin = Origin(),  # noqa: B008 - immutable
    user: str | None = None,
    client: str = "",
    proven: bool = True,
    on: str = "",
    why: str = "",
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Record an event; see the module. `proven`: `user` has been authenticated, not just claimed."""
    if _current is not None:
        _current.put(
            Event(
                time.time(), event, outcome, origin.front_end, origin.address,
                user and user[:CUT], client[:CUT], proven, on[:CUT], why[:CUT],
                None if before is None else _bounded(before), None if after is None else _bounded(after),
            )
        )  # fmt: skip


def _bounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values to JSON types. A value that is too long is replaced by its length."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        size = len(json.dumps(value, default=str))
        found[key] = value if size <= LONGEST else f"({size} characters)"
    return found
