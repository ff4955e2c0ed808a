"""The section [audit] of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from bridge.settingtypes import Bytes, Millis

JOURNAL = Path("/run/systemd/journal/socket")


class AuditSettings(Struct, frozen=True, kw_only=True):
    """[audit]: the audit log. It is off unless `file` is set or `journald` is true; both are possible.

    file            JSON lines, mode 0600. It is rotated at `max_size`: FILE.1 is the last one before it
    files           the maximum number of files, including FILE; the oldest is deleted
    sync_interval   how long a line may be in the file before it is synced; 0 syncs at once
    journald        send the lines to the journal by its socket, `journald_socket`, with the fields
                    STREAMBRIDGE_EVENT, STREAMBRIDGE_USER and so on
    """

    file: Path | None = None
    max_size: Annotated[Bytes, Meta(ge=4096)] = 10 * 1024 * 1024
    files: Annotated[int, Meta(ge=2, le=1000)] = 10
    sync_interval: Annotated[Millis, Meta(ge=0, le=3_600_000)] = 1000
    journald: bool = False
    journald_socket: Path = JOURNAL

    @property
    def on(self) -> bool:
        """Whether there is an audit log."""
        return self.file is not None or self.journald
