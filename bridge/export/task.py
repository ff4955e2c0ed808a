"""One export of one stream: when its next step is due, and what a step does.

    state      the next step                                            next state
    idle       plans a batch, or calls the exporter's `idle`            planned, or idle
    planned    sends the unsettled part of the batch                    idle, planned or backoff
    backoff    the step of the state before, after the wait
    stopped    nothing, until the configuration changes                 idle or planned
    paused     nothing, until it is resumed; the same if disabled       the state before

`retry` ends a backoff or a stop at once.

One pool thread at a time calls `step`, when it is `due`. The main thread calls all other methods; they only
determine what the next step does.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from bridge.errors import CorruptData, EncryptionKeyError
from bridge.export import cursor as cursors
from bridge.export.backoff import Backoff
from bridge.export.batches import Batches, NoBatch, size_of
from bridge.export.host import Host
from bridge.export.planning import Planner, Source, too_large
from bridge.export.position import Position, shorten
from bridge.logs import Outage
from bridge.model import ExportStatus
from bridge.plugin.api import (
    AwsBatchedConfig,
    AwsConfig,
    Batch,
    Context,
    ExportConfig,
    Exporter,
    Outcome,
    Progress,
    Record,
    Retry,
    Stopped,
)
from bridge.plugin.link import Link
from bridge.plugin.mistakes import line_of
from bridge.ranges import Ranges
from bridge.settingtypes import Means, meanings

NEVER = math.inf
LAST = 11  # the priority of exports without one
LAST_RANK = 2 * LAST
_LONGEST_SHOWN = 300 * 365 * 86_400.0  # seconds
_SHOWN_FROM = 1.0  # seconds; status pages show batches that are collected for longer
IDLE_AFTER = 0.2  # seconds; keeps a trickle of messages from writing a cursor for each one
_CUT = (ConnectionError, TimeoutError)

log = logging.getLogger("bridge.export")


class Task:
    """One export. `running`, `last_step` and `deadline` belong to the scheduler's lock."""

    def __init__(
        self,
        host: Host,
        source: Source,
        kind: str,
        exporter: type[Exporter],
        config: ExportConfig,
        begun: int,
    ) -> None:
        """`begun` is its number in `streams.meta`."""
        self.source, self.kind, self.config, self.begun = source, kind, config, begun
        self.running = False
        self.last_step = 0.0
        self.deadline = 0.0  # when the running step counts as hung
        self.alone = False  # must not run at the same time as another suspect
        self.deleted = self.closed = False
        self.position = Position(host, source, kind, config, exporter.limits, begun)
        self.key, self.label = self.position.key, self.position.label
        self._host, self._cls = host, exporter
        self._exporter: Exporter | None = None
        self.paused = False  # by an operator
        self._updated = False  # the exporter has an older configuration, or must be replaced
        self._resumes = False  # a stop ends as soon as the position is loaded
        self._pending: Sequence[Record] | None = None  # of a deleted stream
        self._paid_at = 0.0  # when the link will have sent what the exporter sent over its own connections
        self._failing = False  # the hooks got the event `export_failing`
        self._idle_at = NEVER
        self._collects_until = 0.0  # the latest time at which the batch shown as being collected is sent
        self._backoff = Backoff(host.tuning.first_backoff, host.tuning.max_backoff)
        self._outage = Outage()
        self._backoff.files = _secret_files(config)
        self._planner = Planner(source, host.transform(self.key, kind))
        self._batches = Batches(host, self.position, self._planner, exporter)
        self._context = WorkerContext(host, self)

    # --- for the main thread and the scheduler

    @property
    def rank(self) -> int:
        """Return the rank; the lowest is the most urgent. Among equals, new messages go before backlogs."""
        return 2 * (self.config.priority or LAST) - self._batches.skips_backlog

    @property
    def is_down(self) -> bool:
        """Return whether its last attempt had no connection, so that the next one may take long in vain."""
        return self._backoff.is_down

    @property
    def timeout(self) -> float:
        """Return the seconds without progress after which a step counts as hung."""
        return self._host.tuning.hang or self._cls.timeout

    def remove(self, *, replaced: bool = False, pending: Sequence[Record] | None = None) -> None:
        """Delete the export: the next step closes it, and its position is deleted.

        `pending` has its first pending records if its stream was deleted too; otherwise they are read from
        the stream. The files stay if an export with the same identifier has `replaced` it.
        """
        self.deleted, self._pending = True, pending
        self.position.forget(keep=replaced)

    def update(self, config: ExportConfig) -> None:
        """Apply an updated configuration: pause and priority at once, the rest at the next step."""
        self.config = config
        self._outage = Outage()
        self._backoff.files = _secret_files(config)
        self._updated = True

    def retry(self, upto: int) -> None:
        """End a backoff or a stop, and make an attempt now, with a new exporter.

        A batch that still collects messages is sent too, up to `upto` (exclusive).
        """
        self._planner.hurry(upto)
        self._backoff.hold(0.0)
        self._updated = True

    @property
    def _rests(self) -> bool:
        """Return whether it makes no attempts until an operator or the configuration changes that."""
        return self.config.disabled or self.paused or bool(self.position.cursor.stopped)

    def status(self) -> ExportStatus:
        """Return the status for descriptions of the stream."""
        attempts, at, now = self._backoff.attempts, 0, time.monotonic()
        if self.position.cursor.error is not None and not self._rests:
            at = _unix_millis(self._backoff.until - now)
        elif self._collects_until > now and not self._rests:
            at = _unix_millis(self._collects_until - now)
        status = self.position.status(disabled=self.config.disabled)
        return msgspec.structs.replace(status, failed_attempts=attempts, next_attempt_time=at)

    def due(self) -> float:
        """Return the monotonic time of the next step; NEVER if there is nothing to do."""
        cursor = self.position.cursor
        if self.deleted:
            return 0.0
        if not self.position.is_loaded:
            return self._backoff.due
        if self._updated:
            return 0.0
        if self.position.is_outdated:
            return self._backoff.due
        if self._rests:
            return self._backoff.due if self.position.dirty else max(self._backoff.due, self.position.sync_at)
        if cursor.batch:
            return max(self._backoff.due, self._paid_at)
        soonest = min(self._batches.due(), self._idle_at, self.position.sync_at)
        return max(self._backoff.due, self._paid_at, soonest)

    def hold(self, seconds: float, reason: str, *, alone: bool) -> None:
        """Make no attempt for `seconds`, because this export was in flight when a worker died."""
        self._backoff.hold(seconds)
        self.alone = alone
        self._failing = True
        self.position.cursor.fail(shorten(reason))

    def progress(self) -> Progress:
        """Return a snapshot for exporters that report on the gateway."""
        skipped = self.position.skipped
        return Progress(
            stream=self.source.name,
            epoch=self.source.epoch,
            identifier=self.config.identifier,
            config=self.config,
            oldest=self.source.oldest,
            newest=self.source.next - 1,
            exported=self.position.cursor.position - 1,
            exported_ahead=self.position.cursor.ranges,
            skipped=list(skipped.ranges) if skipped else [],
        )

    # --- for the exporter, from any of its threads

    def working(self) -> None:
        """Restart the timeout of the current step."""
        self.deadline = time.monotonic() + self.timeout

    # --- in a pool thread

    def step(self) -> None:
        """Perform the next step. Errors are reported and retried, never raised."""
        try:
            if self.deleted or self._updated:
                self._updated = False
                self._close()
                if self.deleted:
                    self._release()
                    return
                self._resumes = True
            elif not self._backoff.attempt():
                return
            if not self.position.is_loaded:
                self._load()
            if self._resumes:
                self._resumes = False
                self._resume()
            if self._rests or self.position.is_outdated:
                self.position.write()
                return
            exporter = self._open()
            batch = self._batches.next(exporter, self.config, self._backoff.attempts + 1)
            if isinstance(batch, Batch):
                self._export(exporter, batch)
                return
            if batch is NoBatch.LATER:
                self.position.write()
                return
            if batch is NoBatch.NOT_DUE:
                self._collect()
            elif batch is NoBatch.SETTLED:
                self._settled()
            elif batch is NoBatch.DROPPED:
                self._idle_at = time.monotonic()
                self._host.changed(self.source.name)
            self._idle(exporter)
        except Retry as error:
            self._failed(str(error), error.after, cut=error.cut)
        except Stopped as error:
            self._stop(str(error))
        except CorruptData as error:
            self._host.damaged(self.source.name, str(error))
            self._failed(str(error), None)
        except EncryptionKeyError as error:
            self._failed(str(error), None)
        except BaseException as error:
            if not isinstance(error, OSError):
                log.exception("%s: a defect of the plugin or of streambridge", self.label)
            self._failed(f"{type(error).__name__}: {error}", None, cut=isinstance(error, _CUT))

    def _collect(self) -> None:
        """Report when a batch is sent at the latest, once for each that takes seconds to collect."""
        until = self._batches.complete_at
        if until != self._collects_until and until - time.monotonic() > _SHOWN_FROM:
            self._collects_until = until
            self._host.changed(self.source.name)

    def _load(self) -> None:
        found = self.position.load(self.config, self._planner)
        self._batches.resume()
        if found and self._cls.idle is not Exporter.idle:
            # The previous worker may have died between its last batch and the call to `idle`.
            self._idle_at = time.monotonic() + IDLE_AFTER

    def _open(self) -> Exporter:
        if self._exporter is None:
            with self._host.in_plugin(self.key, "opening it"):
                self._context.state = self.position.cursor.state
                self._exporter = self._cls(self.config, self._context)
            self._planner.configure(
                self._cls.limits,
                self._cls.batching(self.config),
                self._host.batch_bytes,
                self.config.filters,
            )
        return self._exporter

    def _close(self) -> None:
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            try:
                with self._host.in_plugin(self.key, "closing it"):
                    if self.deleted:
                        exporter.cancelled(self._cancelled())
                    exporter.close()
            except Exception as error:
                log.warning("%s: closing it failed: %s", self.label, error)

    def _cancelled(self) -> Sequence[Record]:
        """Return the first pending records of a deleted export."""
        cursor, found = self.position.cursor, self._pending
        if found is None:
            found = self._planner.pending(cursor.position)
        ahead = Ranges(cursor.ranges)
        numbered = [(record.sequence_number, record) for record in found]
        pending = [one for n, one in numbered if n >= cursor.position and not ahead.covers(n, n)]
        return self._planner.matching(pending)

    def _export(self, exporter: Exporter, batch: Batch) -> None:
        size = size_of(batch)
        self.position.cursor.last_time = time.time_ns() // 1_000_000
        large = too_large(batch.records, exporter.limits.record_bytes)
        if large and not exporter.limits.contiguous:
            others = [n for n in range(len(batch.records)) if n not in large]
            if self._settle(batch, Outcome(rejected=large, retry=others)):
                return
            batch = msgspec.structs.replace(batch, records=[batch.records[n] for n in others])
            if not batch.records:
                return  # the next step sends the rest of the planned batch
            size = size_of(batch)
        began, link, is_unsent = time.monotonic(), self._host.link, False
        with self._host.in_plugin(self.key, f"exporting {batch.first} to {batch.last}"):
            try:
                outcome = exporter.export(batch)
            except Retry as error:
                is_unsent = error.unsent
                if error.cut and not is_unsent:
                    self._batches.was_cut(size, time.monotonic() - began)
                raise
            except _CUT:
                self._batches.was_cut(size, time.monotonic() - began)
                raise
            finally:
                if not (self._context.over_link or is_unsent):
                    self._paid_at = link.charge(size)
        if not isinstance(outcome, Outcome):
            raise Retry(
                f"a defect of the plugin: {_export_of(exporter)} returned {outcome!r:.100}, not an Outcome; "
                "return ACCEPTED if the destination has confirmed all records"
            )
        if (outcome.retry or outcome.rejected) and (mistake := outcome.mistake(batch)) is not None:
            raise Retry(f"a defect of the plugin: {_export_of(exporter)} returned an Outcome whose {mistake}")
        if outcome.cut:
            self._batches.was_cut(size, time.monotonic() - began)
        else:
            now = time.monotonic()
            self._batches.delivered(size, now - began, max(now, self._paid_at) - began)
        if self._settle(batch, outcome):
            return
        if not outcome.retry:
            self._recovered()  # a part of the planned batch; the next part follows at once
        else:
            if len(outcome.retry) < len(batch.records):
                self._backoff.progressed()
            reason = outcome.error or f"{len(outcome.retry)} records must be retried"
            self._failed(reason, outcome.after, cut=outcome.cut)

    def _settle(self, batch: Batch, outcome: Outcome) -> bool:
        settled = self._batches.settle(batch, outcome, self.config.dead_letter_stream)
        if settled:
            self._settled()
        return settled

    def _settled(self) -> None:
        self._collects_until = 0.0
        self._idle_at = time.monotonic() + IDLE_AFTER
        self._recovered()
        self._host.changed(self.source.name)

    def _idle(self, exporter: Exporter) -> None:
        self.position.write()
        if self._idle_at <= time.monotonic():
            with self._host.in_plugin(self.key, "being idle"):
                again = exporter.idle()
            self._idle_at = NEVER if again is None else time.monotonic() + again
            if again is None:
                self._planner.close()  # saves a descriptor per idle export; a deleted file frees its space
            self._recovered()

    def _failed(self, reason: str, after: object, *, cut: bool = False) -> None:
        self._host.failures += 1
        reason = shorten(reason)
        wait = self._backoff.failed(after, cut=cut)
        self._idle_at = max(self._idle_at, self._backoff.until)
        self.position.report(reason)
        if self._outage.is_news(reason):
            log.warning("%s: %s; retrying in %.1f s", self.label, self.position.cursor.error, wait)
        if self._backoff.attempts >= 2 and not self._failing:
            self._failing = True
            self._host.event("export_failing", self.key, reason)
        self._host.changed(self.source.name)

    def _stop(self, reason: str) -> None:
        """Make no attempt until `retry` or a change of the configuration. A restart is not a change."""
        cursor, reason = self.position.cursor, shorten(reason)
        cursor.stopped = cursors.fingerprint(self.config)
        cursor.fail(shorten(f"stopped: {reason}"))
        self._backoff.progressed()
        self._failing, self.position.dirty = True, True
        log.error("%s: %s", self.label, cursor.error)
        self._host.event("export_stopped", self.key, reason)
        self._host.changed(self.source.name)
        self.position.try_write()

    def _resume(self) -> None:
        if self.position.cursor.stopped:
            self.position.cursor.stopped = b""
            log.info("%s: resuming after it had stopped", self.label)
            self.position.report(None)

    def _recovered(self) -> None:
        self._backoff.recovered()
        self._outage.ended()
        self.alone = False
        self.position.report(None)
        if self._failing:
            self._failing = False
            log.info("%s: recovered", self.label)
            self._host.event("export_recovered", self.key, "")

    def close(self) -> None:
        """Close the exporter and all files. The export must not be running."""
        self._close()
        self._release()

    def _release(self) -> None:
        self.position.close()
        self._planner.close()
        self.closed = True


def _unix_millis(wait: float) -> int:
    """Return the Unix time in ms after a wait of some seconds; for longer ones, that in 300 years.

    The batching of a plugin can ask for any time.
    """
    return int((time.time() + max(0.0, min(wait, _LONGEST_SHOWN))) * 1000)


def _export_of(exporter: Exporter) -> str:
    """Return the name of an exporter's `export`, and its location."""
    return f"{type(exporter).__name__}.export{line_of(type(exporter).export)}"


def _secret_files(config: ExportConfig) -> list[str]:
    """Return the files with passwords, keys and certificates that a configuration names."""
    return [path for name in _secret_fields(type(config)) if (path := getattr(config, name))]


@cache  # msgspec evaluates the annotations on each call, which takes 2 ms
def _secret_fields(cls: type[ExportConfig]) -> list[str]:
    fields = msgspec.structs.fields(cls)
    return [field.name for field in fields if Means.SECRET_FILE in meanings(field.type)]


class WorkerContext(Context):
    """The context of an exporter in the worker."""

    def __init__(self, host: Host, task: Task) -> None:
        super().__init__(host.gateway, task.source.name, task.source.epoch)
        self.over_link = False  # whether its connections are paced; if not, batches are charged
        self.log = logging.getLogger(f"bridge.plugin.{task.kind}")
        self._host, self._task = host, task

    @property
    def link(self) -> Link:
        self.over_link = True
        return self._host.link

    def client(self, service: str, config: AwsConfig | AwsBatchedConfig, **options: Any) -> Any:
        self.over_link = True
        return self._host.client(service, config, **options)

    def working(self) -> None:
        self._task.working()

    def throttle(self, size: int) -> None:
        self._host.link.take(size)

    def append(self, stream: str, payload: bytes) -> None:
        if not isinstance(stream, str) or not isinstance(payload, bytes):
            raise TypeError(
                f"append takes the name of a stream and bytes, not {stream!r:.100} and {payload!r:.100}"
            )
        self._host.append(stream, payload)

    def save_state(self, state: bytes) -> None:
        self._task.position.save_state(state)
        self.state = state

    def open(self, path: Path) -> BinaryIO:
        return self._host.allow.open(path)

    def may_write_to(self, bucket: str) -> bool:
        return self._host.allow.bucket(bucket)

    def exports(self) -> list[Progress]:
        return self._host.progress(self._task.kind)
