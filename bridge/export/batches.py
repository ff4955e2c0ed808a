"""The batch that an export has planned: its boundaries, what of it goes next, and what is settled.

Its boundaries are durable before its first attempt. What of it is not settled is in memory only: after a
crash all of it is sent again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum, auto

import msgspec

from bridge.export.host import Host
from bridge.export.planning import Planner, among
from bridge.export.position import Position, short
from bridge.export.sizing import Sizing
from bridge.plugin.api import Batch, ExportConfig, Exporter, Outcome, Record, Retry

log = logging.getLogger("bridge.export")


class Nothing(Enum):
    """Why there is no batch to send."""

    DUE = auto()  # not enough waits
    LEFT = auto()  # what was to be planned had been dropped; there may be more
    UNSETTLED = auto()  # all of the planned batch has arrived or was dropped: it is settled


class Batches:
    """Plans and settles the batches of one export, for one thread at a time."""

    def __init__(self, host: Host, position: Position, planner: Planner, exporter: type[Exporter]) -> None:
        self._planner = planner
        self._host, self._position, self._cls = host, position, exporter
        self._pending: set[int] | None = None  # of the planned batch, what is not settled; None: all
        self._later: set[int] = set()  # of these, what the attempt under way leaves to later ones
        self._doubtful = False  # the planned batch may have arrived: an attempt of it had no answer
        self._handled = 0  # how many messages of the planned batch are settled
        self._sizing = Sizing()

    def resume(self) -> None:
        """Go on from the position, which was read just now."""
        self._sizing = Sizing(self._position.cursor.limit or None)
        self._doubtful = self._position.cursor.planned is not None

    def next(self, exporter: Exporter, config: ExportConfig, attempt: int) -> Batch | Nothing:
        """What goes in the next attempt; its boundaries are durable. Raises OSError and CorruptData."""
        self._planner.limit(self._sizing.limit)
        self._later = set()
        cursor = self._position.cursor
        left = self._again(exporter, config) if cursor.planned else None
        if left is None:
            records = self._plan(exporter, config)
        else:
            records = self._portion(exporter, left, attempt) if left else left
        if isinstance(records, Nothing):
            return records
        self._position.write()  # also when the last attempt to do so failed: never a batch of unknown ends
        if not records:  # what was left of the planned batch was dropped
            self._settled()
            return Nothing.UNSETTLED
        return self._made_of(records, attempt)

    def _made_of(self, records: Sequence[Record], attempt: int) -> Batch:
        assert self._position.cursor.planned is not None
        first, last = self._position.cursor.planned
        return Batch(
            gateway=self._host.gateway,
            stream=self._position.source.name,
            epoch=self._position.source.epoch,
            first=first,
            last=last,
            records=list(records),
            attempt=attempt,
        )

    def _portion(
        self, exporter: Exporter, records: Sequence[Record], attempt: int
    ) -> Sequence[Record] | Nothing:
        """What of a planned batch goes in the next attempt.

        The limits may be lower than when it was planned. Its boundaries stay: the rest of it goes in a
        later attempt. Only where a batch is one object there is no such part. Then it gets a lower end, and
        with it another name, provided that nothing is at the destination under the name that it had.
        """
        fitting = self._planner.fitting(records)
        if not self._cls.limits.contiguous:
            self._later = {record.sequence_number for record in records[fitting:]}
            return records[:fitting]
        if self._doubtful or fitting < len(records):
            batch = self._made_of(records, attempt)
            with self._host.in_plugin(self._position.key, f"looking for {batch.first} to {batch.last}"):
                landed = exporter.landed(batch)
            self._doubtful = False
            if landed:
                self._count(batch, set(), {})
                self._settled()
                return Nothing.UNSETTLED
            if landed is False and fitting < len(records):
                records = records[:fitting]
                self._position.cursor.plan(batch.first, records[-1].sequence_number)
                self._position.dirty = True
        return records

    def _again(self, exporter: Exporter, config: ExportConfig) -> Sequence[Record] | None:
        """What is left of the planned batch; None if another takes its place, as part of it was dropped."""
        cursor, pending = self._position.cursor, self._pending
        assert cursor.planned is not None
        plan = self._planner.again(*cursor.planned, config)
        if plan is None:
            cursor.planned, self._pending = None, None
            return None
        records, gone = plan.records, plan.skipped
        if pending is not None:
            records = [record for record in records if record.sequence_number in pending]
            gone = among(gone, pending)
        if gone:
            self._pass_over(gone, exporter)
            self._pending = {record.sequence_number for record in records}
        return records

    def _plan(self, exporter: Exporter, config: ExportConfig) -> Sequence[Record] | Nothing:
        """Fix the boundaries of the next batch."""
        cursor = self._position.cursor
        plan = self._planner.plan(cursor.position, config)
        if plan is None:
            return Nothing.DUE
        self._pass_over(plan.skipped, exporter)
        cursor.skipped += plan.position - cursor.position
        cursor.position, records, self._position.dirty = plan.position, plan.records, True
        if not records:
            return Nothing.LEFT
        cursor.plan(records[0].sequence_number, records[-1].sequence_number)
        self._doubtful = False
        whole = len(records) == records[-1].sequence_number - cursor.position + 1
        self._pending = None if whole else {record.sequence_number for record in records}
        self._handled = 0
        return records

    def _pass_over(self, ranges: list[tuple[int, int, str]], exporter: Exporter) -> None:
        """Report what was dropped before it was exported.

        How many they are is counted when the position passes them, in one write with it: no crash counts
        any twice.
        """
        if ranges and self._cls.dropped is not Exporter.dropped:
            with self._host.in_plugin(self._position.key, "hearing of dropped messages"):
                for dropped in ranges:
                    exporter.dropped(*dropped)
        if ranges and self._position.skipped is not None:
            self._position.skipped.add(ranges)

    def delivered(self, size: int, seconds: float) -> None:
        """An attempt with so many bytes was answered."""
        self._sizing.delivered(size, seconds, self._planner.most)
        self._position.cursor.limit = self._sizing.limit or 0

    def was_cut(self, size: int, seconds: float) -> None:
        """An attempt had no answer: the batch may have arrived, and may have been too long for the link."""
        self._doubtful = True
        self._sizing.cut(size, seconds)
        if self._position.cursor.limit != (self._sizing.limit or 0):
            self._position.cursor.limit, self._position.dirty = self._sizing.limit or 0, True

    def settle(self, batch: Batch, outcome: Outcome, dead_letters: str | None) -> bool:
        """Take note of an outcome; True if the planned batch is settled now.

        Rejected records go to the stream `dead_letters`. Raises Retry if it takes one of them not.
        """
        again = set(outcome.retry)
        rejected = {n: reason for n, reason in outcome.rejected.items() if n not in again}
        left = {batch.records[n].sequence_number for n in again} | self._later
        for n, reason in rejected.items():
            record = batch.records[n]
            try:
                self._dead_letter(record, reason, dead_letters)
            except Retry as error:
                # Not passed without its dead letter: the record is tried, and refused, again.
                left.add(record.sequence_number)
                self._pending = left | {batch.records[m].sequence_number for m in rejected if m > n}
                self._count(batch, again | {m for m in rejected if m >= n}, rejected)
                raise Retry(f"the dead letter stream refuses: {error}") from None
        self._count(batch, again, rejected)
        self._pending = left
        if left:
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
        assert cursor.planned is not None
        first, last = cursor.planned
        cursor.skipped += max(last - first + 1 - self._handled, 0)  # a plugin may have made two of one
        cursor.position, cursor.planned, self._pending = last + 1, None, None
        self._position.dirty = True

    def _dead_letter(self, record: Record, reason: str, stream: str | None) -> None:
        text = f"message {record.sequence_number} was rejected: {reason}"
        if self._position.cursor.error != text:
            log.warning("%s: %s", self._position.label, text)
        if stream is not None:
            letter = {
                "stream": self._position.key[0],
                "sequenceNumber": record.sequence_number,
                "ingestTime": record.ingest_time,
                "topic": record.topic,
                "payload": record.payload,
                "export": self._position.key[1],
                "reason": short(reason),
            }
            self._host.append(stream, msgspec.json.encode(letter))


def size_of(batch: Batch) -> int:
    """Bytes of payloads and topics."""
    return sum([len(record.payload) + len(record.topic) for record in batch.records])
