"""How far one export is: its cursor in memory and the files in which it is kept."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import msgspec

from bridge.errors import CorruptData
from bridge.export import cursor as cursors
from bridge.export.host import Host
from bridge.export.planning import Source
from bridge.model import ExportStatus
from bridge.plugin.api import ExportConfig
from bridge.streams.layout import directory_name

_ERROR_SIZE = 500

log = logging.getLogger("bridge.export")


class Position:
    """Changed by the thread that runs the export; others read `cursor`.

    Whoever changes the cursor sets `dirty`: the next `write` then has something to write.
    """

    def __init__(
        self, host: Host, source: Source, kind: str, config: ExportConfig, *, contiguous: bool
    ) -> None:
        self.key = source.name, config.identifier
        self.label = f"export {config.identifier} ({kind}) of {source.name}"  # in the log
        self.source = source
        self._host, self._kind, self._contiguous = host, kind, contiguous
        directory = cursors.stream_directory(host.data_dir, source.name)
        self._path = directory / f"{directory_name(config.identifier)}.cursor"
        self._file: cursors.CursorFile | None = None  # opened by the first step, in its own thread
        self._is_gone = False
        self.dirty = False
        self.cursor = self._fresh(config)
        self.skipped: cursors.Skipped | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the position has been read."""
        return self._file is not None

    def _fresh(self, config: ExportConfig) -> cursors.Cursor:
        start = start_of(config)
        return cursors.Cursor(epoch=self.source.epoch, kind=self._kind, start=start, position=start)

    def load(self, config: ExportConfig, oldest: Callable[[], int]) -> bool:
        """Open the files and read the position; raises OSError. Returns whether there was one.

        `oldest` looks for the oldest message of the stream.
        """
        fresh, found = self._fresh(config), None
        try:
            found = cursors.CursorFile.peek(self._path) if self._path.exists() else None
        except CorruptData as error:
            fresh.error = f"{error}; exporting again from {fresh.position}"
            log.error("%s: %s", self.label, fresh.error)
        else:
            if found is not None and found.epoch == self.source.epoch:
                fresh.reached = found.reached
            if found is None or found.epoch != self.source.epoch or found.kind != self._kind:
                self._path.with_suffix(".skipped").unlink(missing_ok=True)
                found = None
            elif found.start != fresh.start:  # that moves the position; what was done stays done
                fresh.messages, fresh.size, fresh.last_time = found.messages, found.size, found.last_time
                fresh.rejected, fresh.skipped = found.rejected, found.skipped
                found = None
        if found is None and not self._contiguous:
            # What was gone before the export began was never for it: it counts, and nobody is told.
            first = max(oldest(), fresh.position)
            fresh.skipped += first - fresh.position
            fresh.position = first
        loaded = found or fresh
        if loaded.stopped and loaded.stopped != cursors.fingerprint(config):
            loaded.stopped, loaded.error = b"", None
        loaded.error = loaded.error if loaded.stopped else self.cursor.error or loaded.error
        # Only who sends what is contiguous, and as a whole, has gaps to explain; all others count.
        skipped = cursors.Skipped(self._path.with_suffix(".skipped")) if self._contiguous else None
        file = cursors.CursorFile(self._path)
        try:
            file.fill(loaded)
        except OSError:
            file.close()
            raise
        self.cursor, self.skipped, self._file = loaded, skipped, file
        self._host.changed(self.source.name)
        return found is not None

    def status(self) -> ExportStatus:
        """What a description of the stream says; before `load`, as it is stored."""
        if self.is_loaded:
            return self.cursor.status(self.key[1])
        stored = cursors.stored_status(
            self._host.data_dir, self.source.name, self.source.epoch, self._kind, self.key[1]
        )
        return msgspec.structs.replace(stored, error_message=self.cursor.error)

    def write(self, *, force: bool = False) -> None:
        """Write the cursor if it has changed; raises OSError."""
        if self._file is not None and not self._is_gone and (force or self.dirty):
            self._file.write(self.cursor)
            self.dirty = False

    def try_write(self) -> None:
        """The same, but what fails is logged, and left to the next write."""
        try:
            self.write()
        except OSError as error:
            log.error("%s: its position was not written: %s", self.label, error)

    def report(self, error: str | None) -> None:
        """Show an error, or that there is none any more."""
        error = error if error is None else short(error)
        if self.cursor.error != error:
            self.cursor.error, self.dirty = error, True
            self.try_write()  # the command looks at the files
            self._host.changed(self.source.name)

    def save_state(self, state: bytes) -> None:
        """Keep an exporter's own state with the cursor; raises ValueError and OSError."""
        if len(state) > cursors.STATE_LIMIT:
            raise ValueError(f"the state of an export has at most {cursors.STATE_LIMIT} bytes")
        self.cursor.state = state
        self.write(force=True)

    def forget(self, *, keep: bool) -> None:
        """Write no more. Remove the files, unless another export of the same name is to `keep` them."""
        self._is_gone = True
        for path in () if keep else (self._path, self._path.with_suffix(".skipped")):
            with contextlib.suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()


def start_of(config: ExportConfig) -> int:
    """The number from which a new export begins."""
    return getattr(config, "start_sequence_number", 0)


def short(reason: str) -> str:
    """What of an error fits into a cursor, beside a state, and can be sent."""
    return reason.encode(errors="backslashreplace")[:_ERROR_SIZE].decode(errors="ignore")
