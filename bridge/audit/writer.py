"""The threads that write events to the audit log as lines. `bridge.audit` says what it promises.

One thread makes lines of events and numbers them. Each destination has a thread and a queue of its own, so
that a full or hanging disk keeps no line from journald.

`Tally` counts in a file that is mapped into memory, which costs no system call and survives a kill: the lines
that were made, and the events that are in no line yet. So the next start goes on with the numbers, and says
what was lost.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Condition, Thread
from typing import Any, Final

from bridge.audit.repeats import Bounds, Event, Repeats
from bridge.audit.settings import AuditSettings
from bridge.audit.sinks import FileSink, JournalSink, Sink
from bridge.errors import ConfigError

MOST_KEPT: Final = 10_000  # events in the queue, and lines that could not be written yet
RETRY = 1.0  # seconds between attempts to write lines
CLOSE = 5.0  # seconds for which a stop waits for a disk that hangs
_COUNTS = struct.Struct("<QQQ")

log = logging.getLogger(__name__)


class Tally:
    """The number of the last line that was made, and how many events have come and are in lines."""

    def __init__(self, path: Path | None) -> None:
        """Without a file, or if it cannot be used, the counts end with the process."""
        self._map: bytearray | mmap.mmap = bytearray(_COUNTS.size)
        if path is not None:
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                try:
                    os.truncate(fd, _COUNTS.size)
                    self._map = mmap.mmap(fd, _COUNTS.size)
                finally:
                    os.close(fd)
        self.made, came, told = _COUNTS.unpack_from(self._map)
        self.lost = max(came - told, 0)  # by the end of the last process
        self.came = self.told = 0

    def keep(self) -> None:
        """Keep the counts as they are."""
        _COUNTS.pack_into(self._map, 0, self.made, self.came, self.told)


class Outlet:
    """One destination: the lines that wait for it, and the thread that writes them."""

    def __init__(self, name: str, sink: Sink, sync_interval: float) -> None:
        self.name, self.sink, self.sync_interval = name, sink, sync_interval
        self.trouble = ""  # why nothing can be written now
        self._lost = self._lost_seq = 0  # lines that found no room, and the last of them
        self._lines: deque[dict[str, Any]] = deque()
        self._sync_due: float | None = None
        self._ends = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name=f"audit-{name[:4]}", daemon=True)
        self._thread.start()

    def put(self, lines: list[dict[str, Any]]) -> None:
        """Have lines written. Those without room are lost here; a line of its own counts them."""
        with self._changed:
            for line in lines:
                self._tell_lost()
                if len(self._lines) < MOST_KEPT:
                    self._lines.append(line)
                else:
                    self._lost += line.get("repeated", 1)
                    self._lost_seq = line["seq"]
            self._changed.notify()

    def _tell_lost(self) -> None:
        if self._lost and len(self._lines) < MOST_KEPT:
            line = {"time": time.time(), "seq": self._lost_seq, "event": "lost", "outcome": "failed"}
            self._lines.append({**line, "repeated": self._lost})
            self._lost = 0

    def close(self) -> None:
        """Write and sync all lines, and end the thread."""
        with self._changed:
            self._ends = True
            self._changed.notify()

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join(CLOSE)

    def _run(self) -> None:
        ends, failed = False, False
        while not (ends and (failed or not self._lines)):
            with self._changed:
                if failed:
                    self._changed.wait_for(lambda: self._ends, RETRY)
                elif not (self._ends or self._lines):
                    due = self._sync_due
                    self._changed.wait(None if due is None else max(due - time.monotonic(), 0.0))
                lines, ends = list(self._lines), self._ends
            failed = not self._write(lines, sync=ends)
        with contextlib.suppress(OSError):
            self.sink.close()

    def _write(self, lines: list[dict[str, Any]], *, sync: bool) -> bool:
        """Write these lines, and sync if it is due. Returns whether that worked."""
        now = time.monotonic()
        try:
            if lines:
                self.sink.write(lines)
                with self._changed:
                    for _ in lines:
                        self._lines.popleft()
                    self._tell_lost()
                self._sync_due = self._sync_due or now + self.sync_interval
            if self._sync_due is not None and (sync or now >= self._sync_due):
                self.sink.sync()
                self._sync_due = None
        except OSError as error:
            if str(error) != self.trouble:
                text = "the audit log (%s) cannot be written: %s; %d lines wait"
                log.error(text, self.name, error, len(self._lines))
            self.trouble = str(error)
            return False
        if self.trouble and lines:
            log.info("the audit log (%s) is written again", self.name)
            self.trouble = ""
        return True


class Audit:
    """A queue of events, and the thread that makes lines of them. Call `close` at the end."""

    def __init__(
        self, settings: AuditSettings, bounds: Bounds | None = None, tally: Path | None = None
    ) -> None:
        """Open the destinations in the settings; `tally` is the file of the counts. Raises ConfigError."""
        self._settings = settings
        self._outlets = _outlets(settings, {})
        files = [outlet.sink for outlet in self._outlets.values() if isinstance(outlet.sink, FileSink)]
        self._tally = Tally(tally)
        self._tally.made = max([self._tally.made, *(file.last for file in files)])
        self._repeats = Repeats(bounds or Bounds())
        self._queue: SimpleQueue[Event | dict[str, Outlet] | None] = SimpleQueue()
        self._lost, self._told = self._tally.lost + sum(file.torn for file in files), 0
        self._tally.keep()
        self._thread = Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Record an event."""
        if self._queue.qsize() < MOST_KEPT:
            self._tally.came += 1
            self._tally.keep()
            self._queue.put(event)
        else:
            self._lost += 1

    def reload(self, settings: AuditSettings) -> None:
        """Write to these destinations from now on. After a ConfigError, nothing has changed."""
        if settings != self._settings:
            outlets = _outlets(settings, self._outlets)
            self._settings, self._outlets = settings, outlets
            self._queue.put(outlets)

    def close(self) -> None:
        """Write and sync all events, and end the threads."""
        self._queue.put(None)
        self._thread.join(CLOSE)

    def troubles(self) -> dict[str, str]:
        """Why destinations cannot be written now, by name; empty if all can."""
        return {name: outlet.trouble for name, outlet in list(self._outlets.items()) if outlet.trouble}

    # -- the thread ------------------------------------------------------------

    def _run(self) -> None:
        outlets, go_on = self._outlets, True
        while go_on:
            for item in self._taken():
                if isinstance(item, Event):
                    self._put(self._repeats.take(item), outlets)
                elif item is None:
                    go_on = False
                    self._put(self._repeats.end(), outlets)
                else:
                    _close(outlets, item)
                    outlets = item
            self._put(self._repeats.due(), outlets)
            if lost := self._lost - self._told:
                self._told += lost
                self._put(
                    [{"time": time.time(), "event": "lost", "outcome": "failed", "repeated": lost}], outlets
                )
        _close(outlets, {})

    def _taken(self) -> Iterator[Event | dict[str, Outlet] | None]:
        """Wait for events, or until a window of repeats ends, and return the events."""
        if self._lost != self._told:
            return
        wait = self._repeats.ends - time.monotonic()
        with contextlib.suppress(Empty):
            yield self._queue.get(timeout=max(wait, 0.0)) if wait < float("inf") else self._queue.get()
            for _ in range(self._queue.qsize()):
                yield self._queue.get_nowait()

    def _put(self, lines: list[dict[str, Any]], outlets: Mapping[str, Outlet]) -> None:
        made = []
        for line in lines:
            self._tally.made += 1
            self._tally.told += line.get("repeated", 1) if line["event"] != "lost" else 0
            made.append({"time": line.pop("time"), "seq": self._tally.made, **line})
        if made:
            self._tally.keep()
            for outlet in outlets.values():
                outlet.put(made)


def _outlets(settings: AuditSettings, old: Mapping[str, Outlet]) -> dict[str, Outlet]:
    """Open the destinations by name, or keep old ones. After a ConfigError, no new one is open."""
    sinks: dict[str, Sink] = {}
    try:
        if settings.file is not None and (name := f"file:{settings.file}") not in old:
            sinks[name] = FileSink(settings.file)
        if settings.journald and "journald" not in old:
            sinks["journald"] = JournalSink(settings.journald_socket)
    except OSError as error:
        for sink in sinks.values():
            sink.close()
        key = "file" if error.filename == str(settings.file) else "journald"
        raise ConfigError(f"audit.{key}: {error}") from error
    wanted = [f"file:{settings.file}"] * (settings.file is not None) + ["journald"] * settings.journald
    interval = settings.sync_interval / 1000
    found = {name: old.get(name) or Outlet(name, sinks[name], interval) for name in wanted}
    for outlet in found.values():
        outlet.sync_interval = interval
        if isinstance(outlet.sink, FileSink):
            outlet.sink.bound(settings.max_size, settings.files)
    return found


def _close(outlets: Mapping[str, Outlet], kept: Mapping[str, Outlet]) -> None:
    """Close the destinations that are not kept, together, because one may hang."""
    ended = [outlet for name, outlet in outlets.items() if kept.get(name) is not outlet]
    for outlet in ended:
        outlet.close()
    for outlet in ended:
        outlet.join()
