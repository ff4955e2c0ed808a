"""The errors of an ingest run, in addition to `bridge.errors`."""

# ruff: noqa: N818 # named for what happened, as there

from __future__ import annotations

import threading
from typing import ClassVar

from bridge.errors import StreamBridgeError
from bridge.printable import printable

REASON = 200  # characters: a reason may quote others' text, and every state keeps it until it is resolved


def line(text: object) -> str:
    """Return the text of an error, or of anything else, as one short line that is safe for a terminal."""
    return printable(" ".join(str(text)[: 10 * REASON].split()))[:REASON]


class IngestError(StreamBridgeError):
    """The base of all errors that stop a run; the message says what to do."""

    exit_code: ClassVar[int] = 1  # of the command


class BadOption(IngestError):
    """Raised when an option is wrong, or options contradict each other."""

    exit_code = 2


class NotInstalled(IngestError):
    """Raised when Java or a package of the extra [spark] is missing."""

    exit_code = 2


class NoTable(IngestError):
    """Raised by commands that need an existing table and never create one."""

    exit_code = 6

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where}: there is no such table; check the options, or create it with `streambridge ingest`"
        )


class StateMissing(IngestError):
    """Raised when the table's state document is missing or damaged; to continue would store rows twice."""


class WrongSource(IngestError):
    """Raised when the source has nothing of what the table has; to go on would call the table complete."""

    exit_code = 10


class CommitConflict(IngestError):
    """Raised when another run committed to the table after this run had planned; nothing was added."""

    exit_code = 5

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; nothing was added")


class BadObject(StreamBridgeError):
    """Raised when an object does not hold what its key promises; it is quarantined with this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(line(reason))


class Vanished(StreamBridgeError):
    """Raised when an object no longer exists, for example because it expired after the listing."""


class Unreadable(StreamBridgeError):
    """Raised when an object cannot be read now but may be good; the next run tries it again."""

    def __init__(self, reason: str) -> None:
        super().__init__(line(reason))


class Stopped(BaseException):
    """Raised by SIGTERM. An uncommitted round leaves nothing in the table."""


_asked = threading.Event()


def stop(number: int, frame: object) -> None:
    """Handle SIGTERM."""
    _asked.set()
    raise Stopped


def stop_if_asked() -> None:
    """Raise Stopped if SIGTERM has come: Python drops an exception that is raised in a finalizer."""
    if _asked.is_set():
        _asked.clear()
        raise Stopped
