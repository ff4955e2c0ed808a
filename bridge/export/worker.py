"""The export worker process: `python -m bridge.export.worker <socket fd> <fault report fd>`.

It ends at once when the supervisor's end of the socket closes. Two workers must never use the same cursors,
which the lock on `<data_dir>/exports/lock` ensures. The worker ignores SIGTERM and SIGINT, which a
service manager or a terminal sends to all processes; the supervisor handles them.

Exit status: 0 the supervisor ended it, 3 the supervisor has died, 4 an export hung, 5 the memory grew
beyond its limit. Any other end is a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import logging
import math
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from bridge import frames, process
from bridge.clock import Timeline
from bridge.durable import make_directory
from bridge.encryption import Keys
from bridge.errors import InvalidRequest
from bridge.export import cursor, wire
from bridge.export.host import Host, TooLarge, memory_used
from bridge.export.planning import Source
from bridge.export.scheduler import Scheduler
from bridge.export.task import Task
from bridge.model import ExportStatus
from bridge.plugin import aws, discovery, metadata
from bridge.plugin.api import Record, Retry
from bridge.plugin.hooks import Event
from bridge.plugin.link import Link

STOPPED, ORPHANED, HUNG, MEMORY = 0, 3, 4, 5
LOCK_TIMEOUT = 30.0
_PR_SET_PDEATHSIG = 1
_STATUS_EVERY = 0.1
_RESTS_AFTER = 2.0  # seconds without a message or a change; then the main thread wakes only for its heartbeat
_RESTING_BEAT = 5  # times as long between two heartbeats
_LOG_LINES = 200  # per second; further lines are dropped

log = logging.getLogger("bridge.export")


class Worker:
    """The process, with its streams and its connection to the supervisor."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._frames = frames.Frames(wire.TO_WORKER)
        self._timeline = Timeline()
        self._sources: dict[str, Source] = {}
        self._changed_streams: set[str] = set()
        self._broken: dict[str, list[ExportStatus]] = {}  # exports whose configuration no plugin accepts
        self._replies: dict[int, queue.SimpleQueue[wire.Appended]] = {}
        self._numbers = 0
        self._events: queue.Queue[Event] = queue.Queue(1000)
        self._ending: tuple[int, float] | None = None  # exit status, and until when to wait for batches
        self._resting = False
        self._waking = os.eventfd(0, os.EFD_CLOEXEC)  # ends a rest of the main thread

    # --- for the host

    def send(self, message: wire.WorkerMessage) -> None:
        """Send a message to the supervisor. Ends the process if the supervisor is gone."""
        frame = frames.encode(message)
        try:
            with self._sending:
                self._connection.sendall(frame)
        except OSError:
            os._exit(ORPHANED)

    def append(self, stream: str, payload: bytes, timeout: float) -> None:
        """Append to a stream and wait for the reply. Raises Retry, or TooLarge if it can never be stored."""
        with self._sending:
            self._numbers += 1
            number = self._numbers
            answer = self._replies[number] = queue.SimpleQueue()
        self.send(wire.Append(number, stream, payload))
        try:
            reply = answer.get(timeout=timeout)
        except queue.Empty:
            reply = wire.Appended(number, "no reply in time")
        finally:
            del self._replies[number]
        if reply.error:
            kind = TooLarge if reply.too_large else Retry
            raise kind(f"appending to {stream}: {reply.error}")

    def changed(self, stream: str) -> None:
        """The statuses of a stream have changed; the supervisor gets them soon, also if the worker rests."""
        self._changed_streams.add(stream)
        if self._resting:
            os.eventfd_write(self._waking, 1)

    def event(self, event: Event) -> None:
        """Queue an event for the hooks."""
        with contextlib.suppress(queue.Full):
            self._events.put_nowait(event)

    # --- the process

    def run(self) -> int:
        """Run until the supervisor ends it. Returns the exit status."""
        hello = self._receive_hello()
        logging.getLogger().addHandler(_Forward(self))
        logging.getLogger().setLevel(logging.INFO)
        for noisy in ("boto3", "botocore", "urllib3", "s3transfer"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        _lock(hello.data_dir / "exports" / "lock")
        self._registry = discovery.load(hello.export.plugin_dirs)
        aws.use_provider(lambda settings: self._registry.hook.aws_credentials(settings=settings))
        self._hello = hello
        self._keys = Keys(hello.data_dir, hello.key_file)
        self._crashes = {(crash.stream, crash.identifier): crash for crash in hello.crashes}
        self._max_memory = hello.tuning.max_memory or max(_memory() // 4, 256 * 1024 * 1024)
        link = Link(hello.export.max_bandwidth, lambda: self._scheduler.working())
        self._scheduler = Scheduler(hello.export.threads, link)
        self._host = Host(hello, self._registry, self, self._max_memory, link, self._scheduler.progress)
        threading.Thread(target=self._run_hooks, name="events", daemon=True).start()
        self._scheduler.start()
        status = self._loop()
        self._scheduler.finish()
        self._send_statuses()
        return status

    def _receive_hello(self) -> wire.Hello:
        self._early: list[wire.WorkerMessage] = []
        while not self._early:
            self._early += self._frames.feed(self._receive())
        hello = self._early.pop(0)
        assert isinstance(hello, wire.Hello)
        return hello

    def _receive(self) -> bytes:
        try:
            data = self._connection.recv(256 * 1024)
        except ConnectionError:  # the supervisor was killed before it read all of our messages
            data = b""
        if not data:
            os._exit(ORPHANED)
        return data

    def _loop(self) -> int:
        beaten_at, rests_at, failures = -math.inf, 0.0, 0
        incoming = select.poll()  # not select(): the descriptor may be above 1,023
        incoming.register(self._connection, select.POLLIN)
        incoming.register(self._waking, select.POLLIN)
        for message in self._early:
            self._handle(message)
        while True:
            now = time.monotonic()
            if self._changed_streams or self._ending is not None or not self._scheduler.is_quiet():
                rests_at = now + _RESTS_AFTER
            rests = now >= rests_at
            beat_at = beaten_at + self._hello.tuning.beat * (_RESTING_BEAT if rests else 1)
            wait = max(beat_at - now, _STATUS_EVERY) if rests else _STATUS_EVERY
            self._resting = rests
            if rests and self._changed_streams:  # by a thread that did not see the rest begin
                wait = 0.0
            ready = incoming.poll(wait * 1000)
            self._resting = False
            if ready:
                rests_at = time.monotonic() + _RESTS_AFTER
            for descriptor, _ in ready:
                if descriptor == self._waking:
                    os.eventfd_read(self._waking)
                    continue
                for message in self._frames.feed(self._receive()):
                    self._handle(message)
            self._send_statuses()
            if time.monotonic() >= beat_at:
                beaten_at = time.monotonic()
                if failures != self._host.failures:
                    # Errors of boto3 keep their request in a reference cycle: megabytes in few objects.
                    failures = self._host.failures
                    gc.collect()
                used = memory_used()
                self.send(wire.Beat(used))
                self._watch(used)
            if self._ending is not None:
                status, until = self._ending
                if self._scheduler.is_quiet() or time.monotonic() >= until:
                    return status

    def _end(self, status: int, timeout: float) -> None:
        """End after the batches in flight. A new process continues all exports."""
        if self._ending is None:
            self._ending = status, time.monotonic() + timeout
            self._scheduler.stop()

    def _watch(self, used: int) -> None:
        """Check for hung threads and excessive memory. Both require a new process."""
        for task in self._scheduler.hung():
            reason = f"the plugin hangs: no progress for {task.timeout:.0f} s"
            log.error("%s: %s", task.label, reason)
            self.send(wire.Culprit(*task.key, reason))
            self._end(HUNG, self._hello.tuning.drain)
        if used > self._max_memory and self._ending is None:
            suspects = self._host.most_grown()
            log.error("the export worker grew to %d MiB; starting a new one", used >> 20)
            for key, grown in suspects.items():
                reason = f"the export worker grew to {used >> 20} MiB, {grown >> 20} MiB of it in this plugin"
                self.send(wire.Culprit(*key, reason, alone=len(suspects) > 1))
            self._end(MEMORY, self._hello.tuning.drain)

    def _handle(self, message: wire.WorkerMessage) -> None:
        match message:
            case wire.Committed(name, oldest, following, age_offset):
                self._timeline.offset = age_offset
                source = self._sources.get(name)
                if source is not None:
                    if oldest != source.oldest:
                        tasks = self._scheduler.of_stream(name)
                        if any(task.position.cursor.position < oldest for task in tasks):
                            self.changed(name)  # what one of them has not sent was dropped
                    source.oldest, source.next = oldest, max(source.next, following)
                    self._scheduler.wake(name)
            case wire.Define():
                self._define(message)
            case wire.Try(name, identifiers, upto):
                self._try(name, identifiers, upto)
            case wire.Forget(name, pending):
                self._forget(name, pending)
            case wire.Appended(number):
                if (answer := self._replies.get(number)) is not None:
                    answer.put(message)
            case wire.Notice(name, stream, detail):
                self.event(Event(name=name, stream=stream, detail=detail))
            case wire.Stop(timeout):
                self._end(STOPPED, timeout)

    def _define(self, message: wire.Define) -> None:
        source = self._sources.get(message.name)
        if source is not None and source.epoch != message.epoch:
            self._forget(message.name)
            source = None
        if source is None:
            source = self._sources[message.name] = Source(
                message.name, message.directory, message.epoch, self._keys, self._timeline
            )
            source.loses_tail = not message.flush
        source.loses_tail |= not message.flush  # messages from before may still be unsynced
        source.encrypted = message.encrypted
        source.keeps_rejected_in = message.keeps_rejected_in
        source.revision = message.revision
        wanted = []
        broken = self._broken[message.name] = []
        for kind, configs in message.exports.items():
            for raw in configs:
                try:
                    wanted.append((kind, self._registry.config(kind, raw)))
                except InvalidRequest as error:
                    identifier = str(raw.get("identifier"))
                    log.error("export %s of %s: %s", identifier, message.name, error)
                    stored = cursor.stored_status(
                        self._hello.data_dir, message.name, message.epoch, kind, identifier
                    )
                    broken.append(msgspec.structs.replace(stored, error_message=str(error)))
        # A configuration that no plugin accepts keeps its position until one does.
        kept = {config.identifier for _, config in wanted}
        kept |= {status.export_config_identifier for status in broken}
        try:
            cursor.forget_others(self._hello.data_dir, message.name, kept)
        except OSError as error:
            log.warning("stream %s: cannot remove the positions of deleted exports: %s", message.name, error)
        for task in self._scheduler.of_stream(message.name):
            if task.config.identifier not in kept:
                self._remove(task)
        for kind, config in wanted:
            current = self._scheduler.get(message.name, config.identifier)
            begun = message.begun.get(config.identifier, 0)
            if current is not None and not current.deleted and (current.kind, current.begun) == (kind, begun):
                if current.config != config:
                    current.update(config)
                current.paused = config.identifier in message.paused
                continue
            replaced = current if current is not None and not current.deleted else None
            if current is not None:
                self._remove(current, replaced=True)
            task = Task(self._host, source, kind, self._registry.exporters[kind], config, begun)
            task.paused = config.identifier in message.paused
            task.position.replaced = replaced.position if replaced is not None else None
            self._add(task)
        self._scheduler.wake(message.name)
        self.changed(message.name)

    def _try(self, name: str, identifiers: Sequence[str], upto: int) -> None:
        for identifier in identifiers:
            task = self._scheduler.get(name, identifier)
            if task is not None and not task.deleted:
                task.retry(upto)
        self._scheduler.wake(name)

    def _add(self, task: Task) -> None:
        crash = self._crashes.pop(task.key, None)
        if crash is not None:
            task.hold(crash.wait, crash.reason, alone=crash.alone)
        self._scheduler.put(task)

    def _remove(self, task: Task, *, replaced: bool = False, pending: Sequence[Record] | None = None) -> None:
        task.remove(replaced=replaced, pending=pending)
        self._scheduler.wake(task.source.name)

    def _forget(self, name: str, pending: Mapping[str, Sequence[Record]] = MappingProxyType({})) -> None:
        for task in self._scheduler.of_stream(name):
            self._remove(task, pending=pending.get(task.config.identifier, ()))
        self._broken.pop(name, None)
        if self._sources.pop(name, None) is not None:
            cursor.forget_stream(self._hello.data_dir, name)

    def _send_statuses(self) -> None:
        while self._changed_streams:
            name = self._changed_streams.pop()
            if (source := self._sources.get(name)) is None:
                continue  # deleted
            tasks = self._scheduler.of_stream(name)
            positions = {
                task.config.identifier: task.position.cursor.position
                for task in tasks
                if task.position.is_loaded
            }
            statuses = [
                task.status() for task in tasks if task.position.is_loaded or task.position.cursor.error
            ]
            self.send(wire.Statuses(name, source.revision, statuses + self._broken.get(name, []), positions))

    def _run_hooks(self) -> None:
        while True:
            event = self._events.get()
            for impl in self._registry.hook.handle_event.get_hookimpls():
                try:
                    impl.function(*(event for _ in impl.argnames))
                except Exception as error:
                    log.warning("plugin %s: handle_event failed: %r", impl.plugin_name, error)


class _Forward(logging.Handler):
    """Sends log records to the supervisor, which writes the one log."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker
        self._second, self._lines = 0, 0

    def emit(self, record: logging.LogRecord) -> None:
        second = int(record.created)
        if second != self._second:
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines <= _LOG_LINES:
            text, template = _sendable(self.format(record)), _sendable(str(record.msg))
            self._worker.send(wire.Log(record.levelno, record.name, text, template))


def _sendable(text: str) -> str:
    """Escape lone surrogates, which occur in file names and which UTF-8 cannot encode."""
    return text.encode(errors="backslashreplace").decode()


def _lock(path: Path) -> None:
    """Take the lock on the cursors. A dying predecessor may still hold it for a moment."""
    make_directory(path.parent)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Run the process on the file descriptors given by the supervisor."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel kills the worker with the supervisor, even while a plugin holds the interpreter.
    with contextlib.suppress(Exception):  # a sandbox may forbid it; the closed socket usually suffices
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable(int(sys.argv[2]))
    gc.set_threshold(50_000, 20, 50)  # batches have many objects, no cycles: saves a third
    # Large batches come and go in several threads.
    process.return_freed_memory(process.MAPPED, few_heaps=True)
    process.lower_priority()  # ingest comes first on a small machine
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")  # kill it before the broker
    metadata.deny()
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        status = Worker(connection).run()
    except Exception:
        log.exception("internal error; the export worker ends")
        status = 1
    # A normal exit would wait for the threads of hung plugins.
    os._exit(status)


if __name__ == "__main__":
    main()
