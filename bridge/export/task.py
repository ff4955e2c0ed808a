"""One export of one stream: what is due, what is planned, and what came of it.

`step` is called by a pool thread, by one at a time, whenever `due` says so. Each step does one of:
plan and send the next batch, send the planned batch again, or, when nothing is left to send, write
the cursor and let the exporter do its idle work. Everything else here is called by the main thread
and only sets what the next step takes up.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from bridge.errors import CorruptData
from bridge.export import cursor as cursors
from bridge.export.context import WorkerContext
from bridge.export.planning import Planner, Source, among, too_large
from bridge.export.sizing import Sizing
from bridge.model import ExportStatus
from bridge.plugin.api import (
    Batch,
    ExportConfig,
    Exporter,
    Outcome,
    Progress,
    Record,
    Retry,
    Stopped,
)
from bridge.streams.layout import directory_name

if TYPE_CHECKING:
    from bridge.export.scheduler import Scheduler

NEVER = math.inf
LAST = 11  # the priority of exports that name none
IDLE_AFTER = 0.2  # seconds; so that a trickle of messages does not write a cursor for each
AWAY_PARTS = 8
_ERROR_SIZE = 500
_CUT = (ConnectionError, TimeoutError)

log = logging.getLogger("bridge.export")


class Task:
    """One export. `running` and the fields above it belong to the scheduler's lock."""

    def __init__(
        self, scheduler: Scheduler, source: Source, kind: str, exporter: type[Exporter], config: ExportConfig
    ) -> None:
        self.source, self.kind, self.config = source, kind, config
        self.running = False
        self.alone = False
        self.gone = self.over = False  # deleted; and closed since
        self._waiting: Sequence[Record] | None = None
        self.last_step = 0.0
        self.not_before = 0.0
        self.charged = 0.0  # seconds, at the bandwidth ceiling, of what it sends
        self._scheduler, self._cls = scheduler, exporter
        self._exporter: Exporter | None = None
        self._renewed: ExportConfig | None = None
        self._attempts = 0
        self._failing = False
        self._pending: set[int] | None = None  # of the planned batch, what is not settled; None: all
        self._later: set[int] = set()  # of these, what the attempt under way leaves to later ones
        self._doubtful = False  # the planned batch may have arrived: an attempt of it had no answer
        self._handled = 0  # how many messages of the planned batch are settled
        self._down_since: float | None = None  # since when the link has been the cause of failures
        self._sizing = Sizing()
        self._dirty = False
        self._idle_at = NEVER
        name = directory_name(config.identifier)
        directory = cursors.stream_directory(scheduler.data_dir, source.name)
        self._path = directory / f"{name}.cursor"
        self._file: cursors.CursorFile | None = None  # opened by the first step, in its own thread
        self.cursor = self._fresh()
        self.skipped: cursors.Skipped | None = None
        self._planner = Planner(source, scheduler.transform(self))
        self._context = WorkerContext(self, scheduler)

    def _fresh(self) -> cursors.Cursor:
        start = _start_of(self.config)
        return cursors.Cursor(epoch=self.source.epoch, kind=self.kind, start=start, position=start)

    def _load(self) -> tuple[cursors.CursorFile, cursors.Skipped | None]:
        """Open the files and read the position; raises OSError."""
        fresh, found = self._fresh(), None
        try:
            found = cursors.CursorFile.peek(self._path) if self._path.exists() else None
        except CorruptData as error:
            fresh.error = f"{error}; exporting again from {fresh.position}"
            log.error("%s: %s", self.label, fresh.error)
        else:
            if found is not None and found.epoch == self.source.epoch:
                fresh.reached = found.reached
            if found is None or found.epoch != self.source.epoch or found.kind != self.kind:
                self._path.with_suffix(".skipped").unlink(missing_ok=True)
                found = None
            elif found.start != fresh.start:  # that moves the position; what was done stays done
                fresh.messages, fresh.size, fresh.last_time = found.messages, found.size, found.last_time
                fresh.rejected, fresh.skipped = found.rejected, found.skipped
                found = None
        if found is None and not self._cls.limits.contiguous:
            # What was gone before the export began was never for it: it counts, and nobody is told.
            oldest = max(self._planner.oldest(), fresh.position)
            fresh.skipped += oldest - fresh.position
            fresh.position = oldest
        loaded = found or fresh
        if loaded.stopped and loaded.stopped != cursors.fingerprint(self.config):
            loaded.stopped, loaded.error = b"", None
        loaded.error = loaded.error if loaded.stopped else self.cursor.error or loaded.error
        # Only who sends what is contiguous, and as a whole, has gaps to explain; all others count.
        named = self._cls.limits.contiguous
        skipped = cursors.Skipped(self._path.with_suffix(".skipped")) if named else None
        file = cursors.CursorFile(self._path)
        try:
            file.fill(loaded)
        except OSError:
            file.close()
            raise
        self.cursor = loaded
        self._sizing = Sizing(loaded.limit or None)
        self._doubtful = loaded.planned is not None
        if found is not None and self._cls.idle is not Exporter.idle:
            # The worker before us may have died between its last batch and what it does when idle.
            self._idle_at = time.monotonic() + IDLE_AFTER
        self._scheduler.changed(self.source.name)
        return file, skipped

    # --- for the main thread and the scheduler

    @property
    def key(self) -> tuple[str, str]:
        """Stream and identifier."""
        return self.source.name, self.config.identifier

    @property
    def label(self) -> str:
        """How the log names this export."""
        return f"export {self.config.identifier} ({self.kind}) of {self.source.name}"

    @property
    def priority(self) -> int:
        """1 is the most urgent."""
        return self.config.priority or LAST

    @property
    def timeout(self) -> float:
        """Seconds without a sign of life after which a step counts as hung."""
        return self._scheduler.tuning.hang or self._cls.timeout

    def accepts(self, kind: str, config: ExportConfig) -> bool:
        """Whether an update to this configuration keeps the position; else it is another export."""
        return kind == self.kind and _start_of(config) == _start_of(self.config)

    def remove(self, *, replaced: bool = False, waiting: Sequence[Record] | None = None) -> None:
        """The export was deleted: the next step closes it, and its position is forgotten.

        `waiting` is what it had not sent, if its stream was deleted too; else it is read from there. One of
        the same identifier that takes its place looks at the files itself: what was sent stays known.
        """
        self.gone, self._waiting = True, waiting
        for path in () if replaced else (self._path, self._path.with_suffix(".skipped")):
            with contextlib.suppress(OSError):
                path.unlink()

    def renew(self, config: ExportConfig) -> None:
        """Take over an updated configuration: pause and priority at once, the rest with the next step."""
        self.config = config
        self._renewed = config

    def due(self) -> float:
        """The monotonic time of the next step; NEVER if there is nothing to do."""
        if self.gone:
            return 0.0
        if self._file is None:
            return self.not_before
        if self._renewed:
            return 0.0
        if self.config.disabled or self.cursor.stopped:
            return self.not_before if self._dirty else NEVER
        if self.cursor.planned:
            return self.not_before
        waiting = (
            self._planner.due(self.cursor.position) if self.source.next > self.cursor.position else NEVER
        )
        return max(self.not_before, min(waiting, self._idle_at))

    def hold(self, seconds: float, reason: str, *, alone: bool) -> None:
        """Do nothing for a while: this export was in flight when a worker died."""
        self.not_before = time.monotonic() + seconds
        self.alone = alone
        self._failing = True
        self.cursor.error = _short(reason)

    def status(self) -> ExportStatus:
        """What a description of the stream says about this export; before its first step, as it is stored."""
        if self.is_loaded:
            return self.cursor.status(self.config.identifier)
        stored = cursors.stored_status(
            self._scheduler.data_dir, self.source.name, self.source.epoch, self.kind, self.config.identifier
        )
        return msgspec.structs.replace(stored, error_message=self.cursor.error)

    @property
    def is_loaded(self) -> bool:
        """Whether the position has been read."""
        return self._file is not None

    def progress(self) -> Progress:
        """A snapshot for exporters that report on the gateway."""
        return Progress(
            stream=self.source.name,
            epoch=self.source.epoch,
            identifier=self.config.identifier,
            config=self.config,
            oldest=self.source.oldest,
            newest=self.source.next - 1,
            exported=self.cursor.position - 1,
            skipped=list(self.skipped.ranges) if self.skipped else [],
        )

    # --- in a pool thread

    def step(self) -> None:
        """Do what is due; errors are reported and waited out, never raised."""
        self.last_step = time.monotonic()
        try:
            if self.gone or self._renewed:
                self._renewed = None
                self._close()
                if self.gone:
                    self._release()
                    return
                self._go_on()
            if self._file is None:
                self._file, self.skipped = self._load()
            if self.config.disabled or self.cursor.stopped:
                self._write(force=False)
                return
            exporter = self._open()
            batch = self._batch(exporter)
            if batch is None:
                self._idle(exporter)
            else:
                self._export(exporter, batch)
        except Retry as error:
            self._failed(str(error), error.after, cut=error.cut)
        except Stopped as error:
            self._stop(str(error))
        except CorruptData as error:
            self._scheduler.damaged(self.source.name, str(error))
            self._failed(str(error), None)
        except BaseException as error:
            if not isinstance(error, OSError):
                log.exception("%s: the plugin or streambridge is at fault", self.label)
            self._failed(f"{type(error).__name__}: {error}", None, cut=isinstance(error, _CUT))

    def _open(self) -> Exporter:
        if self._exporter is None:
            with self._scheduler.in_plugin(self, "opening it"):
                self._context.state = self.cursor.state
                self._exporter = self._cls(self.config, self._context)
            self._planner.configure(
                self._cls.limits, self._cls.batching(self.config), self._scheduler.batch_bytes
            )
        return self._exporter

    def _close(self) -> None:
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            try:
                with self._scheduler.in_plugin(self, "closing it"):
                    if self.gone:
                        exporter.cancelled(self._cancelled())
                    exporter.close()
            except Exception as error:
                log.warning("%s: closing it failed: %s", self.label, error)

    def _cancelled(self) -> Sequence[Record]:
        """The first records that a deleted export has not sent."""
        position = self.cursor.position
        if self._waiting is None:
            return self._planner.waiting(position)
        return [record for record in self._waiting if record.sequence_number >= position]

    def _batch(self, exporter: Exporter) -> Batch | None:
        self._planner.limit(self._sizing.limit)
        self._later = set()
        records = self._again() if self.cursor.planned else None
        if records:
            records = self._portion(exporter, records)
        elif records is None:
            records = self._plan()
        if records is None or self.cursor.planned is None:
            return None
        self._write(force=False)  # also when the last attempt to do so failed: never a batch of unknown ends
        if not records:  # what was left of the planned batch was dropped
            self._settled()
            return None
        return self._made_of(records)

    def _made_of(self, records: Sequence[Record]) -> Batch:
        assert self.cursor.planned is not None
        first, last = self.cursor.planned
        return Batch(
            gateway=self._scheduler.gateway,
            stream=self.source.name,
            epoch=self.source.epoch,
            first=first,
            last=last,
            records=list(records),
            attempt=self._attempts + 1,
        )

    def _portion(self, exporter: Exporter, records: Sequence[Record]) -> Sequence[Record] | None:
        """What of a planned batch goes in the next attempt; None if all of it has arrived after all.

        The limits may be lower than when it was planned. Its boundaries stay: the rest of it goes in a
        later attempt. Only where a batch is one object there is no such part. Then it gets a lower end, and
        with it another name, provided that nothing is at the destination under the name that it had.
        """
        fitting = self._planner.fitting(records)
        if not self._cls.limits.contiguous:
            self._later = {record.sequence_number for record in records[fitting:]}
            return records[:fitting]
        if self._doubtful or fitting < len(records):
            batch = self._made_of(records)
            with self._scheduler.in_plugin(self, f"looking for {batch.first} to {batch.last}"):
                landed = exporter.landed(batch)
            self._doubtful = False
            if landed:
                self._count(batch, set(), {})
                self._settled()
                return None
            if landed is False and fitting < len(records):
                records = records[:fitting]
                self.cursor.plan(batch.first, records[-1].sequence_number)
                self._dirty = True
        return records

    def _again(self) -> Sequence[Record] | None:
        """What is left of the planned batch; None if another takes its place, as part of it was dropped."""
        assert self.cursor.planned is not None
        plan, pending = self._planner.again(*self.cursor.planned, self.config), self._pending
        if plan is None:
            self.cursor.planned, self._pending = None, None
            return None
        records, gone = plan.records, plan.skipped
        if pending is not None:
            records = [record for record in records if record.sequence_number in pending]
            gone = among(gone, pending)
        if gone:
            self._pass_over(gone)
            self._pending = {record.sequence_number for record in records}
        return records

    def _plan(self) -> Sequence[Record] | None:
        """Fix the boundaries of the next batch; None if there is none yet."""
        cursor = self.cursor
        plan = self._planner.plan(cursor.position, self.config)
        if plan is None:
            return None
        self._pass_over(plan.skipped)
        cursor.skipped += plan.position - cursor.position
        cursor.position, records, self._dirty = plan.position, plan.records, True
        if not records:
            self._idle_at = time.monotonic()  # all of it was dropped; there may be more
            return None
        cursor.plan(records[0].sequence_number, records[-1].sequence_number)
        self._doubtful = False
        whole = len(records) == records[-1].sequence_number - cursor.position + 1
        self._pending = None if whole else {record.sequence_number for record in records}
        self._handled = 0
        return records

    def _pass_over(self, ranges: list[tuple[int, int, str]]) -> None:
        """Tell of what was dropped before it was exported.

        How many they are is counted when the position passes them, in one write with it: no crash counts
        any twice.
        """
        if ranges and self._exporter is not None and self._cls.dropped is not Exporter.dropped:
            with self._scheduler.in_plugin(self, "hearing of dropped messages"):
                for dropped in ranges:
                    self._exporter.dropped(*dropped)
        if ranges and self.skipped is not None:
            self.skipped.add(ranges)

    def _export(self, exporter: Exporter, batch: Batch) -> None:
        self._scheduler.charge(batch, self)
        self.cursor.last_time = time.time_ns() // 1_000_000
        large = too_large(batch.records, exporter.limits.record_bytes)
        if large and not exporter.limits.contiguous:
            if self._settle(
                batch, Outcome(rejected=large, retry=sorted(set(range(len(batch.records))) - large.keys()))
            ):
                return
            batch = msgspec.structs.replace(
                batch, records=[r for n, r in enumerate(batch.records) if n not in large]
            )
            if not batch.records:
                return  # the others of the planned batch come with the next step
        began = time.monotonic()
        with self._scheduler.in_plugin(self, f"exporting {batch.first} to {batch.last}"):
            try:
                outcome = exporter.export(batch)
            except Retry as error:
                if error.unsent:
                    self._scheduler.give_back(self)
                elif error.cut:
                    self._was_cut(batch, began)
                raise
            except _CUT:
                self._was_cut(batch, began)
                raise
        if not isinstance(outcome, Outcome):
            raise Retry(f"the plugin returned {type(outcome).__name__} instead of an Outcome")
        if outcome.cut:
            self._was_cut(batch, began)
        else:
            self._sizing.delivered(_size(batch), time.monotonic() - began, self._planner.most)
            self.cursor.limit = self._sizing.limit or 0
        if self._settle(batch, outcome):
            return
        if not outcome.retry:
            self._recovered()  # a part of the planned batch; the next one goes at once
        else:
            if len(outcome.retry) < len(batch.records):
                self._attempts = 0
            reason = outcome.error or f"{len(outcome.retry)} records are to be tried again"
            self._failed(reason, outcome.after, cut=outcome.cut)

    def _was_cut(self, batch: Batch, began: float) -> None:
        """An attempt had no answer: the batch may have arrived, and may have been too long for the link."""
        self._doubtful = True
        self._sizing.cut(_size(batch), time.monotonic() - began)
        if self.cursor.limit != (self._sizing.limit or 0):
            self.cursor.limit, self._dirty = self._sizing.limit or 0, True

    def _settle(self, batch: Batch, outcome: Outcome) -> bool:
        """Take note of an outcome; True if the planned batch is settled now."""
        again = set(outcome.retry)
        rejected = {n: reason for n, reason in outcome.rejected.items() if n not in again}
        left = {batch.records[n].sequence_number for n in again} | self._later
        for n, reason in rejected.items():
            record = batch.records[n]
            try:
                self._dead_letter(record, reason)
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
        cursor, records = self.cursor, batch.records
        done = [n for n in range(len(records)) if n not in left] if left else range(len(records))
        refused = [n for n in done if n in rejected] if rejected else []
        self._handled += len(done)
        cursor.messages += len(done)
        cursor.rejected += len(refused)
        cursor.size += sum([len(records[n].payload) for n in done])
        cursor.size -= sum([len(records[n].payload) for n in refused])
        self._scheduler.changed(self.source.name)

    def _settled(self) -> None:
        cursor = self.cursor
        assert cursor.planned is not None
        first, last = cursor.planned
        cursor.skipped += max(last - first + 1 - self._handled, 0)  # a plugin may have made two of one
        cursor.position, cursor.planned, self._pending = last + 1, None, None
        self._dirty, self._idle_at = True, time.monotonic() + IDLE_AFTER
        self._recovered()
        self._scheduler.changed(self.source.name)

    def _dead_letter(self, record: Record, reason: str) -> None:
        stream = self.config.dead_letter_stream
        if self.cursor.error != (text := f"message {record.sequence_number} was rejected: {reason}"):
            log.warning("%s: %s", self.label, text)
        if stream is not None:
            letter = {
                "stream": self.source.name,
                "sequenceNumber": record.sequence_number,
                "ingestTime": record.ingest_time,
                "topic": record.topic,
                "payload": record.payload,
                "export": self.config.identifier,
                "reason": _short(reason),
            }
            self._scheduler.append(stream, msgspec.json.encode(letter))

    def _idle(self, exporter: Exporter) -> None:
        self._write(force=False)
        if self._idle_at <= time.monotonic():
            with self._scheduler.in_plugin(self, "being idle"):
                again = exporter.idle()
            self._idle_at = NEVER if again is None else time.monotonic() + again
            self._recovered()

    def _write(self, *, force: bool = True) -> None:
        if self._file is not None and not self.gone and (force or self._dirty):
            self._file.write(self.cursor)
            self._dirty = False

    def _failed(self, reason: str, after: float | None, *, cut: bool = False) -> None:
        self._scheduler.failures += 1
        tuning, now = self._scheduler.tuning, time.monotonic()
        wait = min(tuning.first_backoff * 2**self._attempts, tuning.max_backoff)
        if cut:
            # Nobody is relieved by a longer wait, and a link that is back may soon be gone again: what is
            # lost of its time is a part of the time for which it was away.
            self._down_since = self._down_since or now
            wait = min(wait, max(tuning.first_backoff, (now - self._down_since) / AWAY_PARTS))
        else:
            self._down_since = None
        wait *= random.uniform(0.5, 1.0)
        self._attempts = min(self._attempts + 1, 30)
        wait = max(wait, after or 0.0)
        self.not_before = time.monotonic() + wait
        if self._idle_at < self.not_before:
            self._idle_at = self.not_before
        self._report(_short(reason))
        log.warning("%s: %s; trying again in %.1f s", self.label, self.cursor.error, wait)
        if self._attempts >= 2 and not self._failing:
            self._failing = True
            self._scheduler.event("export_failing", self, reason)
        self._scheduler.changed(self.source.name)

    def _stop(self, reason: str) -> None:
        """Make no attempt until the configuration changes; a restart does not count as a change."""
        cursor = self.cursor
        cursor.stopped, cursor.error = cursors.fingerprint(self.config), _short(f"stopped: {reason}")
        self._attempts, self._failing, self._dirty = 0, True, True
        log.error("%s: %s", self.label, cursor.error)
        self._scheduler.event("export_stopped", self, reason)
        self._scheduler.changed(self.source.name)
        self.write()

    def _go_on(self) -> None:
        if self.cursor.stopped:
            self.cursor.stopped = b""
            log.info("%s: goes on with another configuration", self.label)
            self._report(None)

    def _recovered(self) -> None:
        self._attempts, self.alone, self._down_since = 0, False, None
        self._report(None)
        if self._failing:
            self._failing = False
            log.info("%s: works again", self.label)
            self._scheduler.event("export_recovered", self, "")

    def _report(self, error: str | None) -> None:
        if self.cursor.error != error:
            self.cursor.error, self._dirty = error, True
            self.write()  # the command looks at the files
            self._scheduler.changed(self.source.name)

    def write(self) -> None:
        """Write the cursor if need be; the export is not running."""
        try:
            self._write(force=False)
        except OSError as error:
            log.error("%s: its position was not written: %s", self.label, error)

    def close(self) -> None:
        """Let go of everything; the export is not running."""
        self._close()
        self._release()

    def _release(self) -> None:
        if self._file is not None:
            self._file.close()
        self._planner.close()
        self.over = True

    def save_state(self, state: bytes) -> None:
        """Keep an exporter's own state with the cursor."""
        if len(state) > cursors.STATE_LIMIT:
            raise ValueError(f"the state of an export has at most {cursors.STATE_LIMIT} bytes")
        self.cursor.state = state
        self._write()


def _size(batch: Batch) -> int:
    return sum([len(record.payload) + len(record.topic) for record in batch.records])


def _short(reason: str) -> str:
    """What of an error fits into a cursor, beside a state, and can be sent."""
    return reason.encode(errors="backslashreplace")[:_ERROR_SIZE].decode(errors="ignore")


def _start_of(config: ExportConfig) -> int:
    return getattr(config, "start_sequence_number", 0)
