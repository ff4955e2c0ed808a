"""The state of the connection to another broker, for the log, the status page and `/readyz`.

The client reconnects without limit, and logs nothing. A cause is logged when it is new, and then once per
`REPEAT` seconds, however often it recurs.
"""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

REPEAT = 600.0


class Link:
    """The connection to one broker. `why` says why there is none; None while there is one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.why: str | None = f"not connected to {url} yet"
        self._logged: tuple[str, float] | None = None  # the last cause that was logged, and when

    def failed(self, cause: str) -> None:
        """Record that there is no connection, and the cause."""
        self.why = f"no connection to {self._url}: {cause}; trying again"
        now = time.monotonic()
        if self._logged is None or self._logged[0] != cause or now >= self._logged[1] + REPEAT:
            self._logged = cause, now
            log.warning(self.why)

    def recovered(self) -> None:
        """Record that there is a connection."""
        self.why = self._logged = None
