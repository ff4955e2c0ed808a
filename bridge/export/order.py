"""The order of an export's batches: where the next one begins.

    numbers   0 ....... position ....... ahead ....... ahead ....... live ....... next
              exported  |    backlog     exported      backlog       new messages

With the oldest first, a batch begins at the position, and exported ranges ahead of it are passed over. With
the newest first, a batch begins at `live` if one is due there. Otherwise it comes from the backlog, which is
due at once, beginning with its oldest message.

When the first new message has waited for more than `behind` beyond the time that a batch may wait, for
example after an outage, `live` jumps to the newest messages. The messages that it skips join the backlog.
Each jump can leave one more range of exported numbers on its far side. At `MAX_AHEAD` ranges there is no
jump. Then the smallest part of the backlog is sent first: the two ranges around it become one, and `live` can
jump again.

A jump is not stored. A new worker begins after the highest exported number, and jumps on its own.
"""

from __future__ import annotations

import math
import time

from bridge.export.cursor import MAX_AHEAD, Cursor
from bridge.export.planning import Plan, Planner, Source
from bridge.plugin.api import ExportConfig


class Order:
    """Chooses the next batch of one export. Other threads only ask when it is due and of which kind it is."""

    def __init__(self, source: Source, planner: Planner, behind: float) -> None:
        """`behind` in seconds."""
        self._source, self._planner, self._behind = source, planner, int(behind * 1000)
        self._live = 0  # the first new message; without a jump, at most the front of the cursor
        self._stuck = False  # it is behind, but there are too many ranges for a jump

    def has_backlog(self, cursor: Cursor) -> bool:
        """Return whether there is a backlog."""
        return cursor.front > cursor.position or self._live > cursor.position

    def skips_backlog(self, cursor: Cursor) -> bool:
        """Return whether the next batch has new messages that go before a backlog, even of other exports."""
        if not self.has_backlog(cursor):
            return False
        front = max(cursor.front, self._live)
        if cursor.batch is not None:
            return cursor.batch[0] >= front
        return self._source.next > front and self._planner.due(front) <= time.monotonic()

    def due(self, cursor: Cursor) -> float:
        """Return the monotonic time of the next batch if none is planned; infinite if nothing is pending."""
        if self.has_backlog(cursor):
            return 0.0
        return self._planner.due(cursor.position) if self._source.next > cursor.position else math.inf

    def complete_at(self, cursor: Cursor) -> float:
        """Return the latest time (monotonic) of the batch that is collecting messages; 0.0 if none is."""
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
        """Return where the pending numbers begin, and the next batch from there; None if none is due."""
        front = max(cursor.front, self._live)
        backlog = cursor.pending(front)
        if not backlog:
            return front, self._planner.plan(front, config)
        if config.newest_first and not self._stuck:
            is_known = self._planner.due(front) > 0
            plan = self._planner.plan(front, config)
            if plan is not None or not (is_known or front == self._source.next):
                return front, plan  # not due: the scheduler decides which backlog is sent now
        first, last = min(backlog, key=_size) if self._stuck else backlog[0]
        return first, self._planner.plan(first, config, last + 1)


def _size(pair: tuple[int, int]) -> int:
    return pair[1] - pair[0]
