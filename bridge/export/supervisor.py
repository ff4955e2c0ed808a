"""The service's side of exports: starts, feeds, watches and restarts the worker process.

Everything here runs on the event loop and returns at once. A worker that reads slowly gets fewer updates,
never a queue of them. A dead or silent worker is replaced, with backoff, and the new one gets all definitions
and positions.

When a worker dies, the report of `faulthandler` names the thread, and `Began` names the export that the
thread was running. Without a report (killed, `_exit`) all exports in flight are suspects. They wait, and then
run one at a time, so the next death identifies one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import closing
from pathlib import Path

import msgspec

from bridge import frames, logs, process
from bridge.clock import Clock
from bridge.encryption import Keys
from bridge.errors import MessageTooLarge
from bridge.export import wire
from bridge.export.cursor import forget_others, forget_stream, highest_exported, stored_status
from bridge.export.planning import Planner, Source
from bridge.export.settings import ExportSettings
from bridge.model import ExportStatus, MessageStreamDefinition
from bridge.plugin.api import Record
from bridge.plugin.aws import AwsSettings

__all__ = ["ExportSupervisor", "highest_exported"]

UPDATE_EVERY = 0.1
WRITE_LIMIT = 256 * 1024
STARVED = 10  # times as long may a worker be silent that lacks a processor
QUIET_AFTER = 60.0  # seconds; a worker that has lived this long resets the backoff
MAX_RESTART = 30.0

_THREAD = re.compile(r"Current thread 0x([0-9a-f]+)[^\n]*\n((?:  File [^\n]*\n)*)")

log = logging.getLogger("bridge.export")


class _Stream:
    """What the worker must know about a stream, and what it has reported."""

    def __init__(self, since: int) -> None:
        self.since = since  # reports with older revisions are about deleted exports and are ignored
        self.define: wire.Define | None = None
        self.oldest = self.next = 0
        self.begun: dict[str, int] = {}  # by export; another number has another position
        self.enabled: set[str] = set()
        self.identifiers: list[str] = []
        self.statuses: dict[str, ExportStatus] = {}
        self.positions: dict[str, int] = {}


class _Suspicion:
    """Why one export is suspected to have ended the worker."""

    def __init__(self) -> None:
        self.count = 0
        self.until = 0.0
        self.reason = ""
        self.alone = False
        self.outage = logs.Outage()


class ExportSupervisor:
    """Runs the exports of a gateway in a worker process."""

    def __init__(
        self,
        data_dir: Path,
        *,
        gateway: str,
        export: ExportSettings,
        aws: AwsSettings,
        append_status: Callable[[str, bytes], Awaitable[object] | None],
        clock: Clock,
        damaged: Callable[[str, str], None] | None = None,
        tuning: wire.Tuning | None = None,
        keys: Keys | None = None,
    ) -> None:
        """`append_status` appends to a stream, or raises; if it returns an awaitable, the message counts
        as appended after that. `clock` is that of the data directory. `damaged` is called with
        (stream, detail) when stored data failed its check.
        """
        self._data_dir, self._gateway, self._export, self._aws = data_dir, gateway, export, aws
        self._append_status, self._clock, self._damaged = append_status, clock, damaged
        self._tuning = tuning or wire.Tuning()
        self._keys = keys or Keys(data_dir)
        self._streams: dict[str, _Stream] = {}
        self._revision = 0  # of the newest definition of any stream
        self._changed: set[str] = set()
        self._retries: dict[tuple[str, str], int] = {}  # not begun yet; up to which number
        self._advanced: set[str] = set()
        self._appends: set[asyncio.Future[None]] = set()
        self._in_flight: dict[tuple[str, str], wire.Began] = {}
        self._suspicions: dict[tuple[str, str], _Suspicion] = {}
        self._blamed = False  # the cause of the worker's end is known
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._update_timer: asyncio.TimerHandle | None = None
        self._last_heard = 0.0
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Event | None = None
        self._stopping = False
        self.restarts = 0
        self.memory = 0

    # --- for the service

    @property
    def pid(self) -> int | None:
        """Return the process id of the worker; None while there is none."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the worker and keep it running. Returns when it has started or cannot be started."""
        self._ready = asyncio.Event()
        self._task = asyncio.create_task(self._supervise(), name="export supervisor")
        await self._ready.wait()

    def define(
        self,
        name: str,
        directory: Path,
        epoch: int,
        definition: MessageStreamDefinition,
        paused: Collection[str],
        begun: Mapping[str, int],
    ) -> None:
        """A stream was found, created or updated, or exports of it were paused or resumed.

        `begun` is that of `streams.meta`.
        """
        stream = self._streams.get(name)
        if stream is None or (stream.define is not None and stream.define.epoch != epoch):
            stream = self._streams[name] = _Stream(self._revision + 1)
            # Used until the worker reports, which takes a second or two.
            stream.statuses = {
                identifier: stored_status(self._data_dir, name, epoch, kind, identifier)
                for kind, items in definition.export_definition.items()
                for identifier in (str(item.get("identifier")) for item in items)
            }
        exports = definition.export_definition
        self._revision += 1
        stream.define = wire.Define(
            name,
            self._revision,
            directory,
            epoch,
            definition.flush_on_write,
            exports,
            sorted(paused),
            definition.encryption,
            dict(begun),
            definition.keeps_rejected_in,
        )
        configs = [config for configs in exports.values() for config in configs]
        before, stream.identifiers = stream.identifiers, [str(config.get("identifier")) for config in configs]
        moved = {one for one in stream.identifiers if stream.begun.get(one) != begun.get(one)}
        stream.begun = dict(begun)
        for identifier in moved:  # counts as having sent nothing until the worker reports its position
            stream.positions.pop(identifier, None)
        stream.enabled = {str(c.get("identifier")) for c in configs if not c.get("disabled")}
        for known in (stream.statuses, stream.positions):
            for identifier in known.keys() - set(stream.identifiers):
                del known[identifier]
        if moved:
            stream.since = self._revision
        if set(before) - set(stream.identifiers):
            # At once, because an export that is deleted and created again must begin at its start.
            stream.since = self._revision
            self._forget_retries(name, stream.identifiers)
            self._send(stream.define)
            if self._writer is None:
                with contextlib.suppress(OSError):  # the next worker retries
                    forget_others(self._data_dir, name, set(stream.identifiers))
        self._changed.add(name)
        self._schedule_update()

    def retry(self, name: str, identifiers: Collection[str]) -> None:
        """Let these exports send what they have now. The next worker does so if this one dies before that."""
        for identifier in identifiers:
            if (suspicion := self._suspicions.get((name, identifier))) is not None:
                suspicion.until = 0.0
        upto = stream.next if (stream := self._streams.get(name)) is not None else 0
        self._retries |= {(name, identifier): upto for identifier in identifiers}
        self._send(wire.Try(name, sorted(identifiers), upto))

    def _forget_retries(self, name: str, kept: Collection[str]) -> None:
        for key in [key for key in self._retries if key[0] == name and key[1] not in kept]:
            del self._retries[key]

    def pending(self, name: str) -> dict[str, list[Record]]:
        """Return the first pending records of each export, for `forget` after the deletion."""
        stream = self._streams.get(name)
        if stream is None or stream.define is None or self._writer is None:
            return {}
        source = Source(name, stream.define.directory, stream.define.epoch, self._keys)
        source.next = stream.next
        with closing(Planner(source, None)) as planner:
            return {
                identifier: planner.pending(stream.positions[identifier])
                for identifier in stream.enabled & stream.positions.keys()
            }

    def forget(self, name: str, pending: dict[str, list[Record]] | None = None) -> None:
        """A stream was deleted: delete its cursors, and report the pending records to its exporters."""
        if self._streams.pop(name, None) is None:
            return
        self._changed.discard(name)
        self._advanced.discard(name)
        self._forget_retries(name, ())
        if self._writer is None:
            forget_stream(self._data_dir, name)
        else:
            self._send(wire.Forget(name, pending or {}))

    def committed(self, name: str, oldest: int, next_sequence: int) -> None:
        """Messages below `next_sequence` may be exported.

        Drops are not sent: the worker reads the stream's drop log when it meets a hole.
        """
        stream = self._streams.get(name)
        if stream is not None and (oldest, next_sequence) != (stream.oldest, stream.next):
            stream.oldest, stream.next = oldest, next_sequence
            if stream.identifiers:
                self._advanced.add(name)
                self._schedule_update()

    def statuses(self, name: str) -> list[ExportStatus]:
        """The status of each export of a stream, in the order of its definition."""
        stream = self._streams.get(name)
        if stream is None:
            return []
        return [
            stream.statuses.get(identifier) or ExportStatus(export_config_identifier=identifier)
            for identifier in stream.identifiers
        ]

    def exported_upto(self, name: str, holding: Collection[str] | None = None) -> int | None:
        """Return the lowest number that not all enabled exports have passed; None without enabled exports.

        With `holding`, only these count. An export without a known position counts as having sent nothing: it
        does not exist or is new, or an update has moved its start or changed its kind, and the worker has not
        reported its position yet.
        """
        stream = self._streams.get(name)
        holding = holding if holding is not None else () if stream is None else stream.enabled
        positions = {} if stream is None else stream.positions
        return min((positions.get(identifier, 0) for identifier in holding), default=None)

    def event(self, name: str, stream: str, detail: str = "") -> None:
        """Send an event, such as `stream_full`, to the `handle_event` hooks of plugins."""
        self._send(wire.Notice(name, stream, detail))

    async def stop(self, timeout: float) -> None:
        """Let batches in flight finish, then end the worker; after `timeout` seconds kill it."""
        if self._task is None:
            return
        self._stopping = True
        self._send(wire.Stop(timeout))
        # The worker keeps to the timeout itself. It is served until its end, because it still writes cursors,
        # status messages and gateway reports. This bound is for a worker that does not keep to it.
        try:
            await asyncio.wait_for(self._task, timeout + self._tuning.beat + 1)
        except TimeoutError:
            log.error("the export worker did not end in time and was killed")
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None
        self._task = None

    # --- the worker's life

    async def _supervise(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            try:
                await self._run_worker()
            except OSError as error:
                log.error("the export worker cannot be started: %s", error)
            except Exception:  # exports must continue after any error
                log.exception("internal error; starting a new export worker")
            if self._ready is not None:
                self._ready.set()
            if self._stopping:
                return
            self.restarts += 1
            if self._blamed or time.monotonic() - began > QUIET_AFTER:
                failures = 0  # restart at once, because only the culprit backs off
            else:
                await asyncio.sleep(min(0.25 * 2**failures, MAX_RESTART))
                failures += 1

    async def _run_worker(self) -> None:
        """Start a worker, serve it until it dies, and find the culprit."""
        ours, theirs = socket.socketpair()
        report = os.memfd_create("faults")
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-P", "-m", "bridge.export.worker", str(theirs.fileno()), str(report)),
                    pass_fds=[theirs.fileno(), report],
                    stdin=asyncio.subprocess.DEVNULL,
                    env=process.child_environment(),
                )
            if self._ready is not None:
                self._ready.set()
            self._in_flight.clear()
            self._blamed = False
            self._last_heard = time.monotonic()
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._send_hello()
            await self._serve(reader)
            status = await self._process.wait()
            self._process = None
            self._find_culprit(status, os.pread(report, 64 * 1024, 0).decode("utf-8", "replace"))
        finally:
            os.close(report)
            if self._writer is None:
                ours.close()
            self._disconnect()

    def _send_hello(self) -> None:
        now = time.monotonic()
        crashes = [
            wire.Crash(*key, s.reason, max(s.until - now, 0.0), s.alone)
            for key, s in self._suspicions.items()
            if s.reason
        ]
        key_file = self._keys.key_file
        self._send(
            wire.Hello(
                self._data_dir, self._gateway, self._export, self._aws, self._tuning, crashes, key_file
            )
        )
        self._changed.update(self._streams)
        self._send_updates()
        for (name, identifier), upto in self._retries.items():
            self._send(wire.Try(name, [identifier], upto))
        if self._stopping:
            self._send(wire.Stop(0))

    async def _serve(self, reader: asyncio.StreamReader) -> None:
        received = frames.Frames(wire.FROM_WORKER)
        assert self._process is not None
        watch = asyncio.create_task(self._watch(self._process))
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(256 * 1024):
                    self._last_heard = time.monotonic()
                    for message in received.feed(data):
                        self._handle(message)
        finally:
            watch.cancel()

    async def _watch(self, child: asyncio.subprocess.Process) -> None:
        """Kill a silent worker: a plugin may block its interpreter.

        Silence counts only while the worker could have spoken: not while it lacks a processor, as when many
        services start at once, nor while this process was too late to listen. In all it may last `STARVED`
        times as long. The last look is after this process has read what it was too late to read.
        """
        silence, beat = self._tuning.silence, self._tuning.beat
        heard, counted, looked = -1.0, 0.0, time.monotonic()
        processor = process.Processor(child.pid)
        while True:
            await asyncio.sleep(max(self._last_heard + silence / 2 - time.monotonic(), beat))
            quiet = time.monotonic() - self._last_heard
            passed, looked = time.monotonic() - looked, time.monotonic()
            if self._last_heard != heard:
                if quiet >= silence / 2:
                    heard, counted = self._last_heard, min(quiet, silence / 2 + beat)
                    processor = process.Processor(child.pid)
                continue
            if counted <= silence and quiet <= STARVED * silence:
                counted += 0.0 if processor.lacks() else min(passed, 2 * beat)
                continue
            log.error("the export worker was silent for %.0f s; killing it", quiet)
            child.kill()
            return

    def _disconnect(self) -> None:
        if self._update_timer is not None:
            self._update_timer.cancel()
            self._update_timer = None
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None

    # --- to the worker

    def _send(self, message: wire.WorkerMessage) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frames.encode(message))

    def _schedule_update(self) -> None:
        if self._update_timer is None and self._writer is not None:
            self._update_timer = asyncio.get_running_loop().call_later(UPDATE_EVERY, self._send_updates)

    def _send_updates(self) -> None:
        self._update_timer = None
        if self._writer is None:
            return
        if self._writer.transport.get_write_buffer_size() > WRITE_LIMIT:
            self._schedule_update()  # the worker reads slowly: send fewer updates instead of queueing them
            return
        redefined, self._changed = self._changed, set()
        moved, self._advanced = self._advanced | redefined, set()
        for name in redefined:
            if (stream := self._streams.get(name)) is not None and stream.define is not None:
                self._send(stream.define)
        for name in moved:
            if (stream := self._streams.get(name)) is not None:
                self._send(wire.Committed(name, stream.oldest, stream.next, self._clock.offset))

    # --- from the worker

    def _handle(self, message: wire.WorkerMessage) -> None:
        match message:
            case wire.Beat(rss):
                self.memory = rss
            case wire.Began(name, identifier):
                self._in_flight[name, identifier] = message
                self._retries.pop((name, identifier), None)
            case wire.Ended(name, identifier):
                began = self._in_flight.pop((name, identifier), None)
                if began is not None and began.doing.startswith("exporting"):
                    self._suspicions.pop((name, identifier), None)
            case wire.Statuses(name, revision, statuses, positions):
                stream = self._streams.get(name)
                if stream is not None and revision >= stream.since:
                    reported = {status.export_config_identifier: status for status in statuses}
                    for identifier in stream.identifiers:
                        if identifier in reported:
                            stream.statuses[identifier] = reported[identifier]
                        if identifier in positions:
                            stream.positions[identifier] = positions[identifier]
            case wire.Append(number, name, payload):
                task = asyncio.ensure_future(self._append(self._writer, number, name, payload))
                self._appends.add(task)
                task.add_done_callback(self._appends.discard)
            case wire.Log(level, name, text, template):
                logging.getLogger(name).log(level, "%s", text, extra={logs.TEMPLATE: template})
            case wire.Damaged(name, detail):
                if self._damaged is not None:
                    self._damaged(name, detail)
            case wire.Culprit(name, identifier, reason, alone):
                self._suspect((name, identifier), reason, alone=alone)

    async def _append(
        self, asked: asyncio.StreamWriter | None, number: int, name: str, payload: bytes
    ) -> None:
        """Append, and answer the worker that asked. Each worker numbers its requests from 1."""
        error, too_large = "", False
        try:
            done = self._append_status(name, payload)
            if done is not None:
                await done
        except Exception as failure:
            error = str(failure) or type(failure).__name__
            too_large = isinstance(failure, MessageTooLarge)
        if self._writer is asked:
            self._send(wire.Appended(number, error, too_large))

    # --- the cause of the worker's end

    def _find_culprit(self, status: int, report: str) -> None:
        if self._blamed or status == 0:
            return
        how = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        suspects = list(self._in_flight)
        place = ""
        if found := _THREAD.search(report):
            thread = int(found[1], 16)
            suspects = [key for key, began in self._in_flight.items() if began.thread == thread] or suspects
            place = _location(found[2])
        if not suspects:
            log.error("the export worker was %s%s; no export was in flight", how, place)
        # A suspect that is in flight again is the culprit.
        known = [key for key in suspects if key in self._suspicions and self._suspicions[key].alone]
        suspects = known if len(known) == 1 else suspects
        for key in suspects:
            doing = self._in_flight[key].doing
            self._suspect(key, f"the export worker was {how}{place} while {doing}", alone=len(suspects) > 1)

    def _suspect(self, key: tuple[str, str], reason: str, *, alone: bool) -> None:
        self._blamed = True
        suspicion = self._suspicions.setdefault(key, _Suspicion())
        tuning = self._tuning
        wait = min(tuning.first_backoff * 2**suspicion.count, tuning.max_backoff)
        suspicion.count = min(suspicion.count + 1, 30)
        suspicion.until = time.monotonic() + wait
        suspicion.reason = reason
        suspicion.alone = suspicion.alone or alone
        if suspicion.outage.is_news(reason):
            log.error("export %s of %s: %s; retrying in %.1f s", key[1], key[0], reason, wait)
        stream = self._streams.get(key[0])
        if stream is not None and key[1] in stream.identifiers:
            before = stream.statuses.get(key[1]) or ExportStatus(export_config_identifier=key[1])
            now = time.time_ns() // 1_000_000
            stream.statuses[key[1]] = msgspec.structs.replace(
                before,
                error_message=reason,
                failed_attempts=suspicion.count,
                next_attempt_time=now + int(wait * 1000),
                error_since=before.error_since or now,
            )


def _location(stack: str) -> str:
    """Return the place in the plugin's code: the last frame before ours (most recent call first)."""
    place = ""
    for file, line in re.findall(r'File "([^"]*)", line (\d+)', stack):
        if Path(file).parent == Path(__file__).parent:
            break
        place = f" at {file}:{line}"
    return place
