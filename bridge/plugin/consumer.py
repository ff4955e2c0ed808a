"""The kind `consumer`: an export whose destination is the clients that fetch its messages.

It is declared here like every kind, so that the configuration, `check` and definitions know its options. No
worker runs it: `bridge.consumers` hands out the messages.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import Meta

from bridge.model import MAX_INT64, MAX_MILLIS
from bridge.plugin.api import ExportConfig, Exporter
from bridge.settingtypes import Millis

KIND = "consumer"
DAY = 86_400_000  # ms
MOST = 10_000  # unacknowledged messages; each may be a gap in the position


class ConsumerConfig(ExportConfig, kw_only=True, frozen=True):
    """A consumer: which messages clients fetch, and how long they may take for each.

    A message that is not acknowledged within `ack_deadline_millis` is delivered again. While
    `max_unacknowledged` messages are leased, new ones wait. A message that was delivered `max_deliveries`
    times counts as rejected. The consumer begins at `start_sequence_number`, or at the first message received
    at `start_time` (ISO 8601 with a zone) or later.
    """

    ack_deadline_millis: Annotated[Millis, Meta(ge=1, le=DAY)] = 30_000
    max_unacknowledged: Annotated[int, Meta(ge=1, le=MOST)] = 1000
    max_deliveries: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    start_sequence_number: Annotated[int, Meta(ge=0, le=MAX_INT64)] = 0
    start_time: str | None = None

    @property
    def start_millis(self) -> int | None:
        """Return `start_time` as Unix time in ms."""
        if self.start_time is None:
            return None
        parsed = datetime.fromisoformat(self.start_time)
        if parsed.tzinfo is None:
            raise ValueError("no zone")
        return min(max(0, int(parsed.timestamp() * 1000)), MAX_MILLIS)


class ClientExporter(Exporter):
    """Clients fetch the messages, and acknowledge each."""

    kind = KIND
    Config = ConsumerConfig

    @classmethod
    def check(cls, config: ConsumerConfig) -> None:
        """Raise ValueError for a priority, and for a start that is ambiguous."""
        if config.priority is not None:
            raise ValueError(
                "priority: a consumer has no priority, because its clients decide when they fetch"
            )
        if config.reduce:
            raise ValueError(
                "reduce: a consumer has no rules, because its messages do not leave the gateway in order"
            )
        try:
            start = config.start_millis
        except (ValueError, OverflowError, OSError):
            raise ValueError(
                f"startTime: {config.start_time!r} is not a time with a zone, such as 2026-01-31T12:00:00Z"
            ) from None
        if start is not None and config.start_sequence_number:
            raise ValueError("give startTime or startSequenceNumber, not both")
