"""Counts and logs what happens to clients.

Everything is counted. Events that a client could cause with each message are logged at most once per
`LOG_INTERVAL` and kind, lasting states once per `HOUR`; the counters have the rest.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from bridge import audit

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.errors import StreamBridgeError
    from bridge.mqtt.broker.sessions import Session

log = logging.getLogger(__name__)

LOG_INTERVAL = 10.0  # seconds between two lines of one kind
HOUR = 3600.0
NO_RULE = "no rule or role allows it; see [[mqtt.acl]]"
DENIED = "`deny` of a rule or role forbids it"
KINDS = 1_000  # that are remembered; beyond that, all are forgotten


class Reports:
    """The counters of the front end, and its log."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter()
        self.now = now
        self._logged: dict[str, float] = {}  # until when a kind is not logged again

    def log(self, kind: str, level: int, text: str, *values: object, every: float = LOG_INTERVAL) -> None:
        """Log a line, unless one of this kind was logged less than `every` seconds ago."""
        now = self.now()
        if now >= self._logged.get(kind, now):
            if len(self._logged) >= KINDS:
                self._logged.clear()
            self._logged[kind] = now + every
            log.log(level, text, *values)

    def closed(self, client: str, counter: str, why: str) -> None:
        """We closed a connection."""
        self.counts[counter] += 1
        if counter == "refused_tls":
            self.log("tls", logging.WARNING, "%s closed: %s (counted in the metrics)", client, why)
        else:
            level = logging.WARNING if counter.startswith("rejected") else logging.INFO
            log.log(level, "%s closed: %s", client, why)

    def not_stored(self, client: str, kind: str, error: StreamBridgeError) -> None:
        """A message was dropped or refused."""
        text = "%s: a message was not stored: %s (counted in the metrics and on the status page)"
        self.log(kind, logging.WARNING, text, client, error)

    def will_not_stored(self, session: Session, error: StreamBridgeError) -> None:
        """A will could not be stored."""
        log.warning("the will of client %r was not stored: %s", session.client_id, error)


def reason(session: Session, right: str, topic_filter: str) -> str:
    """Return why a client has no right on a topic."""
    return DENIED if session.identity.is_denied(right, topic_filter) else NO_RULE


def refused(session: Session, what: str, topic: str, why: str) -> None:
    """Record and log that rules or plugins refuse something to a client."""
    identity = session.identity
    audit.record(
        what,
        "refused",
        origin=identity.origin,
        user=identity.user,
        client=session.client_id,
        on=topic,
        why=why,
    )
