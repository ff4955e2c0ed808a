"""The planned batch of an export: its boundaries, which part is sent next, and what is settled.

Its boundaries are durable before its first attempt. Which of its records are settled is only in memory, so
after a crash the whole batch is sent again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum, auto

import msgspec

from bridge.export.host import Host, TooLarge
from bridge.export.order import Order
from bridge.export.planning import Planner, intersection
from bridge.export.position import Position, shorten
from bridge.export.sizing import Sizing, Slices
from bridge.plugin.api import Batch, ExportConfig, Exporter, Outcome, Record, Retry, dead_letter
from bridge.plugin.reduction import decoded, encoded
from bridge.plugin.transform import TransformState

log = logging.getLogger("bridge.export")


class NoBatch(Enum):
    """Why there is no batch to send."""

    NOT_DUE = auto()  # too few messages are pending
    LATER = auto()  # no new messages are due, and a backlog waits for its turn
    DROPPED = auto()  # the next messages have been dropped; more may follow
    SETTLED = auto()  # the rest of the planned batch has arrived or was dropped


class Batches:
    """Plans and settles the batches of one export; used by one thread at a time."""

    def __init__(self, host: Host, position: Position, planner: Planner, exporter: type[Exporter]) -> None:
        self._planner = planner
        self._host, self._position, self._cls = host, position, exporter
        self._pending: set[int] | None = None  # the unsettled numbers of the planned batch; None: all
        self._postponed: set[int] = set()  # of these, the ones that a later attempt sends
        self._done: set[int] = set()  # the numbers of the planned batch that were accepted or rejected
        self._may_have_arrived = False  # an attempt of the planned batch got no answer
        self._gone: list[tuple[int, int, str]] = []  # of the planned batch, not exported, with the reasons
        self._handled = 0  # the settled messages of the planned batch
        self._sizing = Sizing()
        self._order = Order(position.source, planner, host.tuning.behind)
        self._slices = Slices()
        self._in_order = True  # the planned batch comes after all settled messages

    def due(self) -> float:
        """Return the monotonic time of the next batch if none is planned; infinite if nothing is pending."""
        return self._order.due(self._position.cursor)

    @property
    def complete_at(self) -> float:
        """Return the latest time (monotonic) of the batch that is collecting messages; 0.0 if none is."""
        return self._order.complete_at(self._position.cursor)

    @property
    def skips_backlog(self) -> bool:
        """Return whether the next batch has new messages, which go before a backlog."""
        return self._order.skips_backlog(self._position.cursor)

    def resume(self) -> None:
        """Continue from the position that was just read."""
        self._sizing = Sizing(self._position.cursor.limit or None)
        self._may_have_arrived = self._position.cursor.batch is not None
        self._planner.state = TransformState(self._position.cursor.transform)

    def next(self, exporter: Exporter, config: ExportConfig, attempt: int) -> Batch | NoBatch:
        """Return the next attempt, whose boundaries are durable. Raises OSError and CorruptData."""
        self._postponed = set()
        left = self._reread(exporter, config) if self._position.cursor.batch else None
        if left is None:
            records = self._plan(exporter, config)
        else:
            records = self._next_part(exporter, left, attempt) if left else left
        if isinstance(records, NoBatch):
            return records
        self._position.write()  # in case the last write failed: the boundaries must be durable
        if not records:  # the rest of the planned batch was dropped
            self._settled()
            return NoBatch.SETTLED
        return self._batch_of(records, attempt)

    def _batch_of(self, records: Sequence[Record], attempt: int) -> Batch:
        assert self._position.cursor.batch is not None
        first, last = self._position.cursor.batch
        return Batch(
            gateway=self._host.gateway,
            stream=self._position.source.name,
            epoch=self._position.source.epoch,
            first=first,
            last=last,
            records=list(records),
            attempt=attempt,
        )

    def _next_part(
        self, exporter: Exporter, records: Sequence[Record], attempt: int
    ) -> Sequence[Record] | NoBatch:
        """Return the records of a planned batch that the next attempt sends.

        The limits may be lower than when it was planned. Its boundaries stay, and a later attempt sends the
        rest. A batch that is one object cannot be sent in parts: it gets a lower end, and so another name,
        provided that nothing is at the destination under the old name.
        """
        self._planner.limit(self._sizing.limit)
        fitting = self._planner.fitting(records)
        if not self._cls.limits.contiguous:
            self._postponed = {record.sequence_number for record in records[fitting:]}
            return records[:fitting]
        if self._may_have_arrived or fitting < len(records):
            batch = self._batch_of(records, attempt)
            with self._host.in_plugin(self._position.key, f"looking for {batch.first} to {batch.last}"):
                landed = exporter.landed(batch)
            self._may_have_arrived = False
            if landed:
                self._count(batch, set(), {})
                self._settled()
                return NoBatch.SETTLED
            if landed is False and fitting < len(records):
                records = records[:fitting]
                self._position.cursor.plan(batch.first, records[-1].sequence_number)
                self._position.dirty = True
        return records

    def _reread(self, exporter: Exporter, config: ExportConfig) -> Sequence[Record] | None:
        """Return the rest of the planned batch; None if a drop requires a new plan.

        Without the dropped messages, the rules of a transform may choose others, which are sent too: the
        state of the transform has what the rules have chosen last.
        """
        cursor, pending = self._position.cursor, self._pending
        assert cursor.batch is not None
        plan = self._planner.reread(*cursor.batch, self._as_planned(config))
        if plan is None:
            cursor.unplan()
            self._pending = None
            return None
        records, gone = plan.records, plan.skipped
        if self._done:
            records = [record for record in records if record.sequence_number not in self._done]
        if pending is not None:
            gone = intersection(gone, pending)
        if gone:
            self._skip(gone, exporter)
            self._gone += gone
        if gone or pending is not None:
            self._pending = {record.sequence_number for record in records}
        return records

    def _plan(self, exporter: Exporter, config: ExportConfig) -> Sequence[Record] | NoBatch:
        """Fix the boundaries of the next batch."""
        cursor = self._position.cursor
        if self._order.look(cursor, config):
            self._slices = Slices()  # the link may be a different one after an outage
        limit = self._sizing.limit
        self._planner.limit(self._slices.bounded(limit) if self._order.has_backlog(cursor) else limit)
        self._in_order = not config.newest_first
        if not self._in_order:
            self._planner.state = TransformState()  # the state may come from newer records
        first, plan = self._order.plan(cursor, config)
        if plan is None:
            return NoBatch.LATER if self._order.has_backlog(cursor) else NoBatch.NOT_DUE
        self._skip(plan.skipped, exporter)
        cursor.skipped += plan.position - first
        with self._position.lock:
            cursor.settle(first, plan.position - 1)
            before = [gap for gap in plan.skipped if gap[1] < plan.position]
            cursor.dropped = cursor.passed.add(before) if before else cursor.dropped
        self._gone = [gap for gap in plan.skipped if gap[1] >= plan.position]
        records, self._position.dirty = plan.records, True
        self._planner.state.rules = self._filters(config)
        self._remember()
        if not records:
            # These numbers are settled, so no other message may get one of them after a power cut.
            cursor.reached = max(cursor.reached, plan.position - 1)
            return NoBatch.DROPPED
        cursor.plan(plan.position, plan.last)
        self._may_have_arrived = False
        whole = self._cls.limits.contiguous or len(records) == plan.last - plan.position + 1
        self._pending = None if whole else {record.sequence_number for record in records}
        self._done, self._handled = set(), 0
        return records

    def _skip(self, ranges: list[tuple[int, int, str]], exporter: Exporter) -> None:
        """Report messages that were dropped before they were exported.

        They are counted when the position passes them, in the same write, so a crash counts none twice.
        """
        if ranges and self._cls.dropped is not Exporter.dropped:
            with self._host.in_plugin(self._position.key, "reporting dropped messages to it"):
                for dropped in ranges:
                    exporter.dropped(*dropped)
        if ranges and self._position.skipped is not None:
            cursor = self._position.cursor
            self._position.skipped.add(ranges, cursor.pending(cursor.front))

    def delivered(self, size: int, seconds: float, busy: float) -> None:
        """Learn from an answered attempt of `size` bytes, which keeps the link busy for `busy` seconds."""
        self._sizing.delivered(size, seconds, self._planner.max_bytes)
        self._slices.delivered(size, busy)
        self._position.cursor.limit = self._sizing.limit or 0

    def was_cut(self, size: int, seconds: float) -> None:
        """Learn from an unanswered attempt: the batch may have arrived, or was too long for the link."""
        self._may_have_arrived = True
        self._sizing.cut(size, seconds)
        if self._position.cursor.limit != (self._sizing.limit or 0):
            self._position.cursor.limit, self._position.dirty = self._sizing.limit or 0, True

    def settle(self, batch: Batch, outcome: Outcome, dead_letters: str | None) -> bool:
        """Apply an outcome, and return whether the planned batch is settled.

        Rejected records go to the stream `dead_letters`; None: to that of their stream. Raises Retry if it
        does not accept one.
        """
        dead_letters = self._position.source.keeps_rejected_in if dead_letters is None else dead_letters
        again = set(outcome.retry)
        # Sorted, because an exporter that sends by key reports them in a different order.
        rejected = {n: reason for n, reason in sorted(outcome.rejected.items()) if n not in again}
        left = {batch.records[n].sequence_number for n in again} | self._postponed
        for n, reason in rejected.items():
            record = batch.records[n]
            try:
                self._dead_letter(record, reason, dead_letters)
            except Retry as error:
                # The position waits for the dead letter, so the record will be sent and rejected again.
                left.add(record.sequence_number)
                self._pending = left | {batch.records[m].sequence_number for m in rejected if m > n}
                self._done |= {one.sequence_number for one in batch.records} - self._pending
                self._count(batch, again | {m for m in rejected if m >= n}, rejected)
                raise Retry(f"the dead-letter stream did not accept the message: {error}") from None
        self._count(batch, again, rejected)
        self._pending = left
        if left:
            self._done |= {record.sequence_number for record in batch.records} - left
            return False
        self._settled()
        return True

    def _count(self, batch: Batch, left: set[int], rejected: dict[int, str]) -> None:
        cursor, records = self._position.cursor, batch.records
        done = [n for n in range(len(records)) if n not in left] if left else range(len(records))
        refused = [n for n in done if n in rejected] if rejected else []
        self._handled += len(done)
        cursor.messages += len(done)
        cursor.rejected += len(refused)
        cursor.size += sum([len(records[n].payload) for n in done])
        cursor.size -= sum([len(records[n].payload) for n in refused])
        self._host.changed(batch.stream)

    def _settled(self) -> None:
        cursor = self._position.cursor
        assert cursor.batch is not None
        first, last = cursor.batch
        cursor.skipped += max(
            last - first + 1 - self._handled, 0
        )  # a plugin may have made two records of one
        with self._position.lock:
            cursor.unplan()
            cursor.settle(first, last)
            cursor.dropped = cursor.passed.add(self._gone) if self._gone else cursor.dropped
        self._gone = []
        self._pending, self._position.dirty = None, True
        self._remember()

    def _remember(self) -> None:
        """Move the state of the transform to the position. Both are written together."""
        state, cursor = self._planner.state, self._position.cursor
        if self._in_order:
            state.advance(cursor.position)
        cursor.transform = state.stored()

    def _filters(self, config: ExportConfig) -> bytes:
        """Return what selects the messages of a batch: the rules, and the topics if it is one object."""
        return encoded(config.reduce, config.filters if self._cls.limits.declares_filtered else ())

    def _as_planned(self, config: ExportConfig) -> ExportConfig:
        """Return the configuration with the filters of the planned batch, for the same records."""
        stored = self._planner.state.rules
        if stored == self._filters(config):
            return config
        rules, topics = decoded(stored)
        if self._cls.limits.declares_filtered:
            return msgspec.structs.replace(config, reduce=rules, topics=topics, withheld=[])
        return msgspec.structs.replace(config, reduce=rules)

    def _dead_letter(self, record: Record, reason: str, stream: str) -> None:
        reason = shorten(reason)
        text = f"message {record.sequence_number} was rejected: {reason}"
        if self._position.cursor.error != text:
            log.warning("%s: %s", self._position.label, text)
        if not stream:
            return
        try:
            self._host.append(stream, dead_letter(*self._position.key, record, reason))
        except TooLarge:  # it always will be, and the messages behind it must not wait for it
            letter = dead_letter(*self._position.key, record, reason, with_payload=False)
            self._host.append(stream, letter)


def size_of(batch: Batch) -> int:
    """Return the bytes of payloads and topics."""
    return sum([len(record.payload) + len(record.topic) for record in batch.records])
