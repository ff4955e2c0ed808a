"""What is told of a change to a stream: who made it, and why the disk refused one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bridge.errors import StorageFailed

log = logging.getLogger(__name__)


def log_change(what: str, name: str, by: str) -> None:
    """Tell of what somebody has done to a stream."""
    log.info("stream %s", what, extra={"stream": name, "by": by})


@contextmanager
def all_or_nothing(what: str, name: str, place: Path) -> Iterator[None]:
    """Raise StorageFailed, with the place and what to do, where the disk refuses a change as a whole."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(
            f"stream {name!r} cannot be {what} in {error.filename or place}: {error.strerror or error}; "
            "nothing was changed. Make room there, or see to the disk or its rights, and try again"
        ) from error
