"""The order of an export's batches: where the next one begins.

    numbers   0 ....... position ....... ahead ....... ahead ....... live ....... next
              exported  |    backlog     exported      backlog       new messages

Oldest first, a batch begins at the position, and what has been exported ahead of it is passed over. Newest
first, a batch begins at `live`, provided that one is due there. Otherwise it comes from the backlog, which
is due at once, from its oldest message on.

When the first of the new messages has waited for more than `behind` longer than a batch may wait, as after an
outage, `live` jumps to the newest messages. What it leaves out joins the backlog. Each jump can leave one
more range of exported numbers on its far side. At `MAX_AHEAD` ranges there is no jump; the smallest part of
the backlog is sent first then, since the two ranges around it become one, and `live` can jump again.

A jump is not written anywhere. A new worker begins behind the highest exported number, and jumps by itself.
"""

from __future__ import annotations

import math
import time

from bridge.export.cursor import MAX_AHEAD, Cursor
from bridge.export.planning import Plan, Planner, Source
from bridge.plugin.api import ExportConfig


class Order:
    """Chooses the next batch of one export. Other threads only ask when it is due, and which kind it is."""

    def __init__(self, source: Source, planner: Planner, behind: float) -> None:
        """`behind` in seconds."""
        self._source, self._planner, self._behind = source, planner, int(behind * 1000)
        self._live = 0  # new messages are from here on; at most the front of the cursor: there was no jump
        self._stuck = False  # behind, with too many ranges for a jump

    def has_backlog(self, cursor: Cursor) -> bool:
        """Whether messages are pending that newer ones go before."""
        return cursor.front > cursor.position or self._live > cursor.position

    def skips_backlog(self, cursor: Cursor) -> bool:
        """Whether the next batch is of new messages that go before a backlog, also before those of others."""
        if not self.has_backlog(cursor):
            return False
        front = max(cursor.front, self._live)
        if cursor.batch is not None:
            return cursor.batch[0] >= front
        return self._source.next > front and self._planner.due(front) <= time.monotonic()

    def due(self, cursor: Cursor) -> float:
        """The monotonic time of the next batch, if none is planned; infinite if nothing is pending."""
        if self.has_backlog(cursor):
            return 0.0
        return self._planner.due(cursor.position) if self._source.next > cursor.position else math.inf

    def complete_at(self, cursor: Cursor) -> float:
        """When the batch that collects messages is sent at the latest (monotonic); 0.0 if none does."""
        return 0.0 if self.has_backlog(cursor) else self._planner.complete_at(cursor.position)

    def look(self, cursor: Cursor, config: ExportConfig) -> bool:
        """Before a batch is planned, let `live` jump if it is behind; return whether it did."""
        self._stuck = False
        if not config.newest_first:
            self._live = 0
            return False
        front = max(cursor.front, self._live)
        recent = self._planner.recent(front, self._behind)
        if recent == front:
            return False
        self._stuck = len(cursor.ranges) >= MAX_AHEAD
        self._live = self._live if self._stuck else recent
        return not self._stuck

    def plan(self, cursor: Cursor, config: ExportConfig) -> tuple[int, Plan | None]:
        """Return the next batch, None if none is due, and where the pending numbers before it begin."""
        front = max(cursor.front, self._live)
        backlog = cursor.pending(front)
        if not backlog:
            return front, self._planner.plan(front, config)
        if config.newest_first and not self._stuck:
            is_known = self._planner.due(front) > 0
            plan = self._planner.plan(front, config)
            if plan is not None or not (is_known or front == self._source.next):
                return front, plan  # not due: the scheduler decides who sends a backlog now
        first, last = min(backlog, key=_size) if self._stuck else backlog[0]
        return first, self._planner.plan(first, config, last + 1)


def _size(pair: tuple[int, int]) -> int:
    return pair[1] - pair[0]
