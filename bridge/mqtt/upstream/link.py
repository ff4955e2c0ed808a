"""The state of the connection to another broker, for the log, the status page and `/readyz`.

The client reconnects without limit, and logs nothing. A cause is logged when it is new, and then every ten
minutes, however often it recurs (`logs.Outage`).
"""

from __future__ import annotations

import logging

from bridge.logs import Outage

log = logging.getLogger(__name__)


class Link:
    """The connection to one broker. `why` says why there is none; None while there is one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.why: str | None = f"not connected to {url} yet"
        self._outage = Outage()

    def failed(self, cause: str) -> None:
        """Record that there is no connection, and the cause."""
        self.why = f"no connection to {self._url}: {cause}; trying again"
        if self._outage.is_news(cause):
            log.warning(self.why)

    def recovered(self) -> None:
        """Record that there is a connection."""
        self.why = None
        self._outage.ended()
