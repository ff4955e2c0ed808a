"""The thread that writes events to the audit log as lines. `bridge.audit` says what it promises."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final

from bridge.audit.repeats import Bounds, Event, Repeats
from bridge.audit.settings import AuditSettings
from bridge.audit.sinks import FileSink, JournalSink, Sink
from bridge.errors import ConfigError

MOST_KEPT: Final = 10_000  # events in the queue, and lines that could not be written yet
RETRY = 1.0  # seconds between attempts to write lines
CLOSE = 5.0  # seconds for which a stop waits for a disk that hangs

log = logging.getLogger(__name__)


class Audit:
    """A queue of events, and the thread that writes them. Call `close` at the end."""

    def __init__(self, settings: AuditSettings, bounds: Bounds | None = None) -> None:
        """Open the destinations in the settings. Raises ConfigError."""
        self._settings = settings
        self._sinks = _sinks(settings, {})
        self._repeats = Repeats(bounds or Bounds())
        self._queue: SimpleQueue[Event | dict[str, Sink] | None] = SimpleQueue()
        self._kept: deque[dict[str, Any]] = deque()
        self._seq = 0
        self._overflowed = self._dropped = self._told = 0  # lost: before the queue, after it, and reported
        self._sync_due: float | None = None  # when written lines must be synced
        self._failed = False
        self._thread = Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Record an event."""
        if self._queue.qsize() < MOST_KEPT:
            self._queue.put(event)
        else:
            self._overflowed += 1

    def reload(self, settings: AuditSettings) -> None:
        """Write to these destinations from now on. After a ConfigError, nothing has changed."""
        if settings != self._settings:
            sinks = _sinks(settings, self._sinks)
            self._settings, self._sinks = settings, sinks
            self._queue.put(sinks)

    def close(self) -> None:
        """Write and sync all events, and end the thread."""
        self._queue.put(None)
        self._thread.join(CLOSE)

    # -- the thread ------------------------------------------------------------

    def _run(self) -> None:
        sinks, go_on = self._sinks, True
        while go_on:
            for item in self._taken():
                if isinstance(item, Event):
                    self._keep(self._repeats.take(item))
                elif item is None:
                    go_on = False
                    self._keep(self._repeats.end())
                else:
                    self._write(sinks)
                    _close(sinks, item)
                    sinks = item
            self._keep(self._repeats.due())
            self._tell_lost()
            self._write(sinks, sync=not go_on)
        _close(sinks, {})

    def _taken(self) -> Iterator[Event | dict[str, Sink] | None]:
        """Wait for events, or until something else is due, and return the events."""
        moments = [self._repeats.ends]
        if self._kept:
            moments.append(time.monotonic() + RETRY)
        if self._sync_due is not None:
            moments.append(self._sync_due)
        wait = min(moments) - time.monotonic()
        with contextlib.suppress(Empty):
            yield self._queue.get(timeout=max(wait, 0.0)) if wait < float("inf") else self._queue.get()
            for _ in range(self._queue.qsize()):
                yield self._queue.get_nowait()

    def _keep(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if len(self._kept) >= MOST_KEPT:
                self._dropped += 1
                continue
            self._seq += 1
            self._kept.append({"time": line.pop("time"), "seq": self._seq, **line})

    def _tell_lost(self) -> None:
        lost = self._overflowed + self._dropped - self._told
        if lost and len(self._kept) < MOST_KEPT:
            self._told += lost
            self._keep([{"time": time.time(), "event": "lost", "outcome": "failed", "repeated": lost}])

    def _write(self, sinks: dict[str, Sink], *, sync: bool = False) -> None:
        lines = list(self._kept)
        now = time.monotonic()
        try:
            if lines:
                for sink in sinks.values():
                    sink.write(lines)
                self._kept.clear()
                self._sync_due = self._sync_due or now + self._settings.sync_interval / 1000
            if self._sync_due is not None and (sync or now >= self._sync_due):
                self._sync_due = None
                for sink in sinks.values():
                    sink.sync()
        except OSError as error:
            self._failed = True
            log.error("the audit log cannot be written: %s; %d lines wait", error, len(self._kept))
        else:
            if lines and self._failed:
                self._failed = False
                log.info("the audit log is written again")


def _sinks(settings: AuditSettings, old: Mapping[str, Sink]) -> dict[str, Sink]:
    """Open the destinations by name, or keep old ones. After a ConfigError, no new one is open."""
    found: dict[str, Sink] = {}
    try:
        if settings.file is not None:
            name = f"file:{settings.file}"
            found[name] = old.get(name) or FileSink(settings.file)
        if settings.journald:
            found["journald"] = old.get("journald") or JournalSink(settings.journald_socket)
    except OSError as error:
        _close(found, old)
        key = "file" if error.filename == str(settings.file) else "journald"
        raise ConfigError(f"audit.{key}: {error}") from error
    for sink in found.values():
        if isinstance(sink, FileSink):
            sink.bound(settings.max_size, settings.files)
    return found


def _close(sinks: Mapping[str, Sink], kept: Mapping[str, Sink]) -> None:
    for name, sink in sinks.items():
        if name not in kept:
            with contextlib.suppress(OSError):
                sink.close()
