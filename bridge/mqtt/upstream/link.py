"""Why there is no connection to another broker, for the log, the status page and `/readyz`.

paho connects again without end, and logs nothing. A cause is logged when it is new, and then once in `REPEAT`
seconds, however often it recurs.
"""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

REPEAT = 600.0


class Link:
    """Whether there is a connection to one broker: `why` not, None while there is one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.why: str | None = f"not connected to {url} yet"
        self._logged: tuple[str, float] | None = None  # the last cause that was logged, and when

    def failed(self, cause: str) -> None:
        """There is no connection, for this cause."""
        self.why = f"no connection to {self._url}: {cause}; trying again"
        now = time.monotonic()
        if self._logged is None or self._logged[0] != cause or now >= self._logged[1] + REPEAT:
            self._logged = cause, now
            log.warning(self.why)

    def recovered(self) -> None:
        """There is a connection."""
        self.why = self._logged = None
