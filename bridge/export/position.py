"""The position of one export: its cursor in memory, and its files.

Each write is synced, so the boundaries of a batch are on the disk before its first attempt. A destination
that takes each message on its own (`BatchLimits.by_record`) never sees boundaries. For it, a write is synced
only

* `SYNC_INTERVAL` after the first unsynced one; a power cut repeats at most what was sent in that time,
* before a number is sent that another message could get: if the stream may lose messages in a power cut, the
  cursor on the disk reserves numbers (`Cursor.reserved`), up to `MOST_RESERVED` ahead, and none above them is
  sent before the next sync,
* with the state of a transform, with an error, and at the end of the worker.

A write without a sync survives the end of all processes, so a worker that replaces a killed one repeats the
batch with the same boundaries.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator

import msgspec
from msgspec import UNSET

from bridge.errors import CorruptData
from bridge.export import cursor as cursors
from bridge.export.host import Host
from bridge.export.planning import Planner, Source
from bridge.export.sizing import FIRST
from bridge.model import ExportStatus
from bridge.plugin.api import BatchLimits, ExportConfig
from bridge.printable import without_credentials
from bridge.streams.layout import directory_name

_ERROR_SIZE = 800  # bytes: the call, the sentence of AWS, and what to do
SYNC_INTERVAL = 5.0  # seconds
LEAST_RESERVED, MOST_RESERVED = 16, 10_000

log = logging.getLogger("bridge.export")


class Position:
    """The thread that runs the export changes it; other threads read `cursor`.

    A change of the cursor sets `dirty`, so that the next `write` writes it.
    """

    def __init__(
        self, host: Host, source: Source, kind: str, config: ExportConfig, limits: BatchLimits, begun: int
    ) -> None:
        """`begun` is the number of the export in `streams.meta`."""
        self.key = source.name, config.identifier
        self.label = f"export {config.identifier} ({kind}) of {source.name}"  # for the log
        self.source = source
        self._host, self._kind, self._contiguous = host, kind, limits.contiguous
        self._by_record, self._begun = limits.by_record, begun
        directory = cursors.stream_directory(host.data_dir, source.name)
        self._path = directory / f"{directory_name(config.identifier)}.cursor"
        self._sealing = (
            None if source.keys is None else cursors.Sealing(source.keys, self._path, source.epoch)
        )
        self._file: cursors.CursorFile | None = None  # the first step opens it
        self._is_deleted = False
        self.dirty = False
        self.sync_at = math.inf  # the monotonic time at which writes must be synced
        self._reserved = self._reached = -1  # of the last cursor that was synced
        # The export of the same name that this one replaced. It may know more than its last write.
        self.replaced: Position | None = None
        self.cursor = self._fresh(config)
        self.lock = threading.Lock()  # of the position and what it has passed, which belong together
        self.skipped: cursors.Skipped | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the position has been read."""
        return self._file is not None

    @property
    def is_outdated(self) -> bool:
        """Whether the file is not encrypted and the stream is, or the reverse: it must be written again."""
        return self._file is not None and self._file.differs(self.source.encrypted)

    def _fresh(self, config: ExportConfig) -> cursors.Cursor:
        start = start_of(config)
        return cursors.Cursor(
            epoch=self.source.epoch,
            kind=self._kind,
            start=start,
            begun=self._begun,
            position=start,
            limit=FIRST,
        )

    def load(self, config: ExportConfig, planner: Planner) -> bool:
        """Open the files and read the position; return whether there was one. Raises OSError."""
        fresh, found, is_first = self._fresh(config), None, False
        before, self.replaced = self.replaced, None
        try:
            if before is not None and before.is_loaded:
                found = msgspec.structs.replace(before.cursor)
            elif self._path.exists():
                found = cursors.CursorFile.read(self._path, self._sealing)
        except CorruptData as error:
            fresh.fail(f"{error}; exporting again from {fresh.position}")
            log.error("%s: %s", self.label, fresh.error)
        else:
            # It was made with the stream, and nothing was dropped before it began.
            is_first = not self._begun and (found is None or found.epoch != self.source.epoch)
            if found is not None and found.epoch == self.source.epoch:
                fresh.reached = found.reached = found.sent(self._host.boot)
            if found is None or found.epoch != self.source.epoch or found.kind != self._kind:
                self._path.with_suffix(".skipped").unlink(missing_ok=True)
                found = None
            elif not found.begins_as(fresh):  # a new start moves the position; the rest stays
                fresh.messages, fresh.size, fresh.last_time = found.messages, found.size, found.last_time
                fresh.rejected, fresh.skipped, fresh.limit = found.rejected, found.skipped, found.limit
                fresh.dropped = found.dropped
                found = None
        if found is None and not self._contiguous:
            # Messages dropped before the export began are counted, but not reported to the exporter.
            first = max(planner.oldest(), fresh.position)
            fresh.skipped += first - fresh.position
            counts = is_first and not config.disabled
            gaps = planner.missing(fresh.position, first - 1, []) if counts else []
            if first > fresh.position:
                fresh.dropped = fresh.passed.add(gaps or [(fresh.position, first - 1, "skipped")])
            fresh.position = first
        if found is None and not is_first and (waived := planner.lost(fresh.position)):
            fresh.dropped = msgspec.structs.replace(fresh.passed, waived=waived)
        loaded = found or fresh
        loaded.begun = self._begun
        if loaded.stopped and loaded.stopped != cursors.fingerprint(config):
            loaded.stopped = b""
            loaded.fail(None)
        if not loaded.stopped and self.cursor.error is not None:
            loaded.fail(self.cursor.error)
        # Only a contiguous exporter reports gaps; for the others a count is enough.
        skipped = cursors.Skipped(self._path.with_suffix(".skipped")) if self._contiguous else None
        file = cursors.CursorFile(self._path, self._sealing)
        try:
            file.encrypted = self.source.encrypted
            file.fill(loaded)
        except OSError:
            file.close()
            raise
        self.cursor, self.skipped, self._file = loaded, skipped, file
        self._reached = loaded.reached
        self._host.changed(self.source.name)
        return found is not None

    def status(self, *, disabled: bool) -> ExportStatus:
        """The status in descriptions of the stream; before `load`, the stored one.

        A `disabled` export loses nothing meanwhile. For the worker's main thread.
        """
        if self.is_loaded:
            with self.lock:
                oldest = 0 if disabled else self.source.oldest
                dropped = oldest > self.cursor.position or self.cursor.passed.lost
                return self.cursor.status(self.key[1], self.source.drops() if dropped else None, oldest)
        stored = cursors.stored_status(
            self._host.data_dir, self.source.name, self.source.epoch, self._kind, self.key[1]
        )
        since = stored.error_since or self.cursor.error_since
        return msgspec.structs.replace(stored, error_message=self.cursor.error, error_since=since)

    def write(self, *, sync: bool = False) -> None:
        """Write the cursor if it has changed or is outdated; durably with `sync` or if necessary.

        Raises OSError.
        """
        sync = sync or self.sync_at <= time.monotonic()
        if self._file is None or self._is_deleted or not (sync or self.dirty or self.is_outdated):
            return
        self._file.encrypted = self.source.encrypted
        if not sync and self._by_record and not self.cursor.transform and self._is_covered:
            self._file.write(self.cursor, sync=False)
            self.sync_at = min(self.sync_at, time.monotonic() + SYNC_INTERVAL)
            self.dirty = False
        else:
            ahead = max(2 * (self.cursor.reached - self._reached), LEAST_RESERVED)
            self._write_durably(min(ahead, MOST_RESERVED) if self._reserves else 0)

    @property
    def _reserves(self) -> bool:
        return self._by_record and self.source.loses_tail

    @property
    def _is_covered(self) -> bool:
        """Return whether no other message can get a number that may have been sent."""
        return not self.source.loses_tail or self.cursor.reached <= self._reserved

    def _write_durably(self, ahead: int) -> None:
        assert self._file is not None
        cursor = self.cursor
        cursor.reserved, cursor.boot = (cursor.reached + ahead, self._host.boot) if ahead else (UNSET, UNSET)
        self._file.write(cursor)
        self._reached, self._reserved, self.sync_at = cursor.reached, cursor.reached + ahead, math.inf
        self.dirty = False

    def try_write(self, *, sync: bool = False) -> None:
        """Write. A failure is logged, and the next write makes up for it."""
        with self._logging():
            self.write(sync=sync)

    def finish(self) -> None:
        """Write for the last time, without reserved numbers, because nothing more is sent. As `try_write`."""
        is_stale = self.dirty or self.sync_at < math.inf or self.cursor.reserved is not UNSET
        if (is_stale or self.is_outdated) and self._file is not None and not self._is_deleted:
            with self._logging():
                self._file.encrypted = self.source.encrypted
                self._write_durably(0)

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.error("%s: its position was not written: %s", self.label, error)

    def report(self, error: str | None) -> None:
        """Set the error in the status; None clears it."""
        error = error if error is None else shorten(error)
        if self.cursor.error != error:
            self.cursor.fail(error)
            self.dirty = True
            self.try_write(sync=True)  # the command reads the files
            self._host.changed(self.source.name)

    def save_state(self, state: bytes) -> None:
        """Store an exporter's own state with the cursor. Raises TypeError, ValueError and OSError."""
        if not isinstance(state, bytes):  # it would be written, and could not be read
            raise TypeError(f"the state of an export is bytes, not {state!r:.100}")
        if len(state) > cursors.MAX_STATE:
            raise ValueError(f"the state of an export may have at most {cursors.MAX_STATE} bytes")
        self.cursor.state = state
        self.write(sync=True)

    def forget(self, *, keep: bool) -> None:
        """End all writes and remove the files; `keep` them for another export of the same name."""
        self._is_deleted = True
        for path in () if keep else (self._path, self._path.with_suffix(".skipped")):
            with contextlib.suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()


def start_of(config: ExportConfig) -> int:
    """Return the number at which a new export begins."""
    return getattr(config, "start_sequence_number", 0)


def shorten(reason: str) -> str:
    """Prepare an error for storing and showing it: short, valid UTF-8, without credentials in URLs.

    All errors of exporters pass through here on their way into a cursor or a dead letter.
    """
    return without_credentials(reason).encode(errors="backslashreplace")[:_ERROR_SIZE].decode(errors="ignore")
