"""The front end's side of exports: one worker process, started, fed, watched and started again.

Everything here runs on the event loop and returns at once. A worker that is slow to read is told
less often, never more; one that is dead or mute is replaced, with backoff, and gets all definitions
and positions again.

Who is to blame when a worker dies: the report of `faulthandler` names the thread, and `Began` says
which export that thread was working for. Without a report (killed, `_exit`) all exports in flight are
suspects: each waits, and then they run one at a time, so that the next death names one.
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
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import msgspec

from bridge import logs
from bridge.export import wire
from bridge.export.cursor import forget_others, forget_stream, highest_exported, stored_status
from bridge.export.planning import Planner, Source
from bridge.export.settings import ExportSettings
from bridge.model import ExportStatus, MessageStreamDefinition
from bridge.plugin.api import Record
from bridge.plugin.aws import AwsSettings

__all__ = ["ExportSupervisor", "highest_exported"]

TELL_EVERY = 0.1
WRITE_LIMIT = 256 * 1024
QUIET_AFTER = 60.0  # a worker that lived so long starts the backoff anew
MAX_RESTART = 30.0

_THREAD = re.compile(r"Current thread 0x([0-9a-f]+)[^\n]*\n((?:  File [^\n]*\n)*)")

log = logging.getLogger("bridge.export")


class _Stream:
    """What the worker must know of a stream, and what it said of it."""

    def __init__(self, since: int) -> None:
        self.since = since  # what the worker says by older definitions is of exports that were deleted
        self.define: wire.Define | None = None
        self.oldest = self.next = 0
        self.places: dict[str, tuple[str, object]] = {}  # of each export what its position depends on
        self.enabled: set[str] = set()
        self.identifiers: list[str] = []
        self.statuses: dict[str, ExportStatus] = {}
        self.positions: dict[str, int] = {}


class _Suspicion:
    """What is held against one export."""

    def __init__(self) -> None:
        self.count = 0
        self.until = 0.0
        self.reason = ""
        self.alone = False


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
        damaged: Callable[[str, str], None] | None = None,
        tuning: wire.Tuning | None = None,
    ) -> None:
        """`append_status` appends to a stream, or raises why not; if it gives something to await, the
        message counts as appended after that. `damaged` is told (stream, what) when reading a stream
        failed its check."""
        self._data_dir, self._gateway, self._export, self._aws = data_dir, gateway, export, aws
        self._append_status, self._damaged = append_status, damaged
        self._tuning = tuning or wire.Tuning()
        self._streams: dict[str, _Stream] = {}
        self._revision = 0  # of the newest definition of any stream
        self._redefined: set[str] = set()
        self._moved: set[str] = set()
        self._appends: set[asyncio.Future[None]] = set()
        self._flight: dict[tuple[str, str], wire.Began] = {}
        self._suspicions: dict[tuple[str, str], _Suspicion] = {}
        self._blamed = False  # somebody is known to be the cause of the worker's end
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tell: asyncio.TimerHandle | None = None
        self._heard = 0.0
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Event | None = None
        self._stopping = False
        self.restarts = 0
        self.memory = 0

    # --- for the front end

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the worker and keep it running; returns when there is a process, or there cannot be one."""
        self._ready = asyncio.Event()
        self._task = asyncio.create_task(self._supervise(), name="export supervisor")
        await self._ready.wait()

    def define(self, name: str, directory: Path, epoch: int, definition: MessageStreamDefinition) -> None:
        """A stream was found, created or updated."""
        stream = self._streams.get(name)
        if stream is None or (stream.define is not None and stream.define.epoch != epoch):
            stream = self._streams[name] = _Stream(self._revision + 1)
            # What is known until the worker says more, which takes it a second or two to start.
            stream.statuses = {
                identifier: stored_status(self._data_dir, name, epoch, kind, identifier)
                for kind, items in definition.export_definition.items()
                for identifier in (str(item.get("identifier")) for item in items)
            }
        exports = definition.export_definition
        self._revision += 1
        stream.define = wire.Define(name, self._revision, directory, epoch, exports)
        configs = [config for configs in exports.values() for config in configs]
        before, stream.identifiers = stream.identifiers, [str(config.get("identifier")) for config in configs]
        places = {
            str(config.get("identifier")): (kind, config.get("startSequenceNumber", 0))
            for kind, items in exports.items()
            for config in items
        }
        moved = {one for one, place in places.items() if stream.places.get(one, place) != place}
        stream.places = places
        for identifier in moved:  # where it is now, the worker says; until then it has sent nothing
            stream.positions.pop(identifier, None)
        stream.enabled = {str(c.get("identifier")) for c in configs if not c.get("disabled")}
        for known in (stream.statuses, stream.positions):
            for identifier in known.keys() - set(stream.identifiers):
                del known[identifier]
        if moved:
            stream.since = self._revision
        if set(before) - set(stream.identifiers):
            # At once: one that is deleted and made again is another, and begins at its start.
            stream.since = self._revision
            self._send(stream.define)
            if self._writer is None:
                with contextlib.suppress(OSError):  # the next worker tries again
                    forget_others(self._data_dir, name, set(stream.identifiers))
        self._redefined.add(name)
        self._soon()

    def waiting(self, name: str) -> dict[str, list[Record]]:
        """By export, the first records that it has not sent: to be handed to `forget` after the deletion."""
        stream = self._streams.get(name)
        if stream is None or stream.define is None or self._writer is None:
            return {}
        source = Source(name, stream.define.directory, stream.define.epoch)
        source.next = stream.next
        with closing(Planner(source, None)) as planner:
            return {
                identifier: planner.waiting(stream.positions[identifier])
                for identifier in stream.enabled & stream.positions.keys()
            }

    def forget(self, name: str, waiting: dict[str, list[Record]] | None = None) -> None:
        """A stream was deleted; its cursors go too. Exporters hear of what was waiting."""
        if self._streams.pop(name, None) is None:
            return
        self._redefined.discard(name)
        self._moved.discard(name)
        if self._writer is None:
            forget_stream(self._data_dir, name)
        else:
            self._send(wire.Forget(name, waiting or {}))

    def committed(self, name: str, oldest: int, next_sequence: int) -> None:
        """Messages below `next_sequence` may be exported.

        What was dropped is not told: the worker reads the stream's drop log when it meets a hole.
        """
        stream = self._streams.get(name)
        if stream is not None and (oldest, next_sequence) != (stream.oldest, stream.next):
            stream.oldest, stream.next = oldest, next_sequence
            if stream.identifiers:
                self._moved.add(name)
                self._soon()

    def statuses(self, name: str) -> list[ExportStatus]:
        """The status of each export of a stream, in the order of its definition."""
        stream = self._streams.get(name)
        if stream is None:
            return []
        return [
            stream.statuses.get(identifier) or ExportStatus(export_config_identifier=identifier)
            for identifier in stream.identifiers
        ]

    def exported_upto(self, name: str) -> int | None:
        """The lowest number that not all enabled exports have passed; None without enabled exports.

        One whose position is not known counts as one that has sent nothing: it is new, or an update has moved
        its start or changed its kind, and the worker has not said yet where it begins. One that is disabled
        does not count.
        """
        stream = self._streams.get(name)
        if stream is None or not stream.enabled:
            return None
        return min(stream.positions.get(identifier, 0) for identifier in stream.enabled)

    def event(self, name: str, stream: str, detail: str = "") -> None:
        """Tell the plugins' `handle_event` hooks, such as of `stream_full`."""
        self._send(wire.Notice(name, stream, detail))

    async def stop(self, timeout: float) -> None:
        """Let batches in flight finish, then end the worker; after `timeout` seconds by force."""
        if self._task is None:
            return
        self._stopping = True
        self._send(wire.Stop(timeout))
        # The worker keeps its own time, and is served until its end: it still writes cursors, status
        # messages and heads. This bound is for a worker that does not keep it.
        try:
            await asyncio.wait_for(self._task, timeout + self._tuning.beat + 1)
        except TimeoutError:
            log.error("the export worker did not end in time; killed")
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
            except Exception:  # whatever it is, exports must not end with it
                log.exception("internal error; starting a new export worker")
            if self._ready is not None:
                self._ready.set()
            if self._stopping:
                return
            self.restarts += 1
            if self._blamed or time.monotonic() - began > QUIET_AFTER:
                failures = 0  # at once: the culprit waits on its own account, and the others need not
            else:
                await asyncio.sleep(min(0.25 * 2**failures, MAX_RESTART))
                failures += 1

    async def _run_worker(self) -> None:
        """Start a worker and serve it until it has died; find out who is to blame."""
        ours, theirs = socket.socketpair()
        report = os.memfd_create("faults")
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-P", "-m", "bridge.export.worker", str(theirs.fileno()), str(report)),
                    pass_fds=[theirs.fileno(), report],
                    stdin=asyncio.subprocess.DEVNULL,
                    env=_environment(),
                )
            if self._ready is not None:
                self._ready.set()
            self._flight.clear()
            self._blamed = False
            self._heard = time.monotonic()
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._greet()
            await self._serve(reader)
            status = await self._process.wait()
            self._process = None
            self._blame(status, os.pread(report, 64 * 1024, 0).decode("utf-8", "replace"))
        finally:
            os.close(report)
            if self._writer is None:
                ours.close()
            self._disconnect()

    def _greet(self) -> None:
        now = time.monotonic()
        crashes = [
            wire.Crash(*key, s.reason, max(s.until - now, 0.0), s.alone)
            for key, s in self._suspicions.items()
            if s.reason
        ]
        self._send(wire.Hello(self._data_dir, self._gateway, self._export, self._aws, self._tuning, crashes))
        self._redefined.update(self._streams)
        self._tell_worker()
        if self._stopping:
            self._send(wire.Stop(0))

    async def _serve(self, reader: asyncio.StreamReader) -> None:
        frames = wire.Frames(wire.FROM_WORKER)
        assert self._process is not None
        watch = asyncio.create_task(self._watch(self._process))
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(256 * 1024):
                    self._heard = time.monotonic()
                    for message in frames.feed(data):
                        self._take(message)
        finally:
            watch.cancel()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill a worker that has gone mute, such as by a plugin that holds the interpreter."""
        while True:
            await asyncio.sleep(self._tuning.beat)
            if time.monotonic() - self._heard > self._tuning.silence:
                log.error("the export worker is mute for %.0f s; killing it", self._tuning.silence)
                process.kill()
                return

    def _disconnect(self) -> None:
        if self._tell is not None:
            self._tell.cancel()
            self._tell = None
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None

    # --- to the worker

    def _send(self, message: wire.Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.encode(message))

    def _soon(self) -> None:
        if self._tell is None and self._writer is not None:
            self._tell = asyncio.get_running_loop().call_later(TELL_EVERY, self._tell_worker)

    def _tell_worker(self) -> None:
        self._tell = None
        if self._writer is None:
            return
        if self._writer.transport.get_write_buffer_size() > WRITE_LIMIT:
            self._soon()  # it is slow to read: let positions gather instead of queueing them
            return
        redefined, self._redefined = self._redefined, set()
        moved, self._moved = self._moved | redefined, set()
        for name in redefined:
            if (stream := self._streams.get(name)) is not None and stream.define is not None:
                self._send(stream.define)
        for name in moved:
            if (stream := self._streams.get(name)) is not None:
                self._send(wire.Committed(name, stream.oldest, stream.next))

    # --- from the worker

    def _take(self, message: wire.Message) -> None:
        match message:
            case wire.Beat(rss):
                self.memory = rss
            case wire.Began(name, identifier):
                self._flight[name, identifier] = message
            case wire.Ended(name, identifier):
                began = self._flight.pop((name, identifier), None)
                if began is not None and began.doing.startswith("exporting"):
                    self._suspicions.pop((name, identifier), None)
            case wire.Statuses(name, revision, statuses, positions):
                stream = self._streams.get(name)
                if stream is not None and revision >= stream.since:
                    told = {status.export_config_identifier: status for status in statuses}
                    for identifier in stream.identifiers:
                        if identifier in told:
                            stream.statuses[identifier] = told[identifier]
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
        """Append, and answer the worker that asked: each one counts from 1."""
        error = ""
        try:
            done = self._append_status(name, payload)
            if done is not None:
                await done
        except Exception as refused:
            error = str(refused) or type(refused).__name__
        if self._writer is asked:
            self._send(wire.Appended(number, error))

    # --- who did it

    def _blame(self, status: int, report: str) -> None:
        if self._blamed or status == 0:
            return
        how = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        guilty = list(self._flight)
        place = ""
        if found := _THREAD.search(report):
            thread = int(found[1], 16)
            guilty = [key for key, began in self._flight.items() if began.thread == thread] or guilty
            place = _place(found[2])
        if not guilty:
            log.error("the export worker was %s%s; no export was in flight", how, place)
        # One that was a suspect before and is in flight again is it; the others were only near.
        known = [key for key in guilty if key in self._suspicions and self._suspicions[key].alone]
        guilty = known if len(known) == 1 else guilty
        for key in guilty:
            doing = self._flight[key].doing
            self._suspect(key, f"the export worker was {how}{place} while {doing}", alone=len(guilty) > 1)

    def _suspect(self, key: tuple[str, str], reason: str, *, alone: bool) -> None:
        self._blamed = True
        suspicion = self._suspicions.setdefault(key, _Suspicion())
        tuning = self._tuning
        wait = min(tuning.first_backoff * 2**suspicion.count, tuning.max_backoff)
        suspicion.count = min(suspicion.count + 1, 30)
        suspicion.until = time.monotonic() + wait
        suspicion.reason = reason
        suspicion.alone = suspicion.alone or alone
        log.error("export %s of %s: %s; trying again in %.1f s", key[1], key[0], reason, wait)
        stream = self._streams.get(key[0])
        if stream is not None and key[1] in stream.identifiers:
            before = stream.statuses.get(key[1]) or ExportStatus(export_config_identifier=key[1])
            stream.statuses[key[1]] = msgspec.structs.replace(before, error_message=reason)


def _place(stack: str) -> str:
    """Where in the plugin it was: the last frame before ours, most recent first."""
    place = ""
    for file, line in re.findall(r'File "([^"]*)", line (\d+)', stack):
        if Path(file).parent == Path(__file__).parent:
            break
        place = f" at {file}:{line}"
    return place


def _environment() -> dict[str, str]:
    """Ours without its secrets, and with the place of this package first on the path.

    STREAMBRIDGE_... is for the configuration, which was read: the worker gets its part of that in `Hello`.
    `-P` keeps the working directory off the path.
    """
    package = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    ours = {name: value for name, value in os.environ.items() if not name.startswith("STREAMBRIDGE_")}
    return {**ours, "PYTHONPATH": f"{package}{os.pathsep}{path}" if path else package}
