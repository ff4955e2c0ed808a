"""What can go wrong in an ingest run, beside `bridge.errors`."""

# ruff: noqa: N818 # named for what happened, as there

from __future__ import annotations

from bridge.errors import StreamBridgeError
from bridge.printable import printable

REASON = 200  # characters: what others wrote may be in a reason, and every state has it until it is cured


def line(said: object) -> str:
    """What an error or anything else says, short, in one line, and fit for a terminal."""
    return printable(" ".join(str(said)[: 10 * REASON].split()))[:REASON]


class IngestError(StreamBridgeError):
    """The base of what stops a run; the message says what to do."""


class BadOption(IngestError):
    """Raised when the options cannot be meant as they are."""


class NotInstalled(IngestError):
    """Raised when Java or a package of the extra [spark] is missing."""


class NoTable(IngestError):
    """Raised when there is no such table, for who works on one that is there and makes none."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where}: there is no such table; check the options, or let `streambridge ingest` make it"
        )


class StateMissing(IngestError):
    """Raised when the table points to a state document that is not there; going on would store twice."""


class Moved(IngestError):
    """Raised when another run committed to the table after this one had planned: nothing was added."""


class BadObject(StreamBridgeError):
    """Raised when an object does not hold what its name promises; it is quarantined with this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(line(reason))


class Vanished(StreamBridgeError):
    """Raised when an object is no longer there, such as when it expired after it had been listed."""


class Unreadable(StreamBridgeError):
    """Raised when an object cannot be read now and may be good: the next run tries it again."""

    def __init__(self, reason: str) -> None:
        super().__init__(line(reason))
