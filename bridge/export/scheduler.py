"""The pool of threads that run exports, strictly by priority.

Threads pick for themselves, under one lock: the due export with the lowest priority number; among
equals the one that has waited longest. So a freed thread always goes to the most urgent export, and
no dispatcher can fall behind.

A thread that shows no sign of life for its export's timeout counts as hung. Python cannot end a
thread, so it is left alone with its export, a new thread takes its place in the pool, and the
worker asks to be replaced (see `worker.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from bridge.export import wire
from bridge.export.planning import Transform
from bridge.export.task import NEVER, Task
from bridge.model import MIB
from bridge.plugin import aws
from bridge.plugin.api import AwsBatchedConfig, AwsConfig, Batch, ExportConfig, Progress, Record, Retry
from bridge.plugin.discovery import Registry
from bridge.plugin.hooks import Event

APPEND_TIMEOUT = 30.0
IDLE_MEMORY = 96 * MIB  # more than what the process has without any batch
LEAST_BATCH = 5 * MIB
_PAGE = os.sysconf("SC_PAGE_SIZE")


def memory_used() -> int:
    """The resident size of this process in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE


class Parent(Protocol):
    """What the scheduler needs of the process around it."""

    def send(self, message: wire.Message) -> None:
        """Send a message to the supervisor."""

    def append(self, stream: str, payload: bytes, timeout: float) -> None:
        """Append to a stream through the supervisor; raises Retry."""

    def changed(self, stream: str) -> None:
        """The statuses of a stream have changed."""

    def event(self, event: Event) -> None:
        """Tell the `handle_event` hooks."""


class Scheduler:
    """Runs the tasks of one worker."""

    def __init__(self, hello: wire.Hello, registry: Registry, parent: Parent, memory: int) -> None:
        """`memory` is how large the process may be, in bytes."""
        # All threads may hold a batch at a time, each as records, as a request and on its way between.
        self.batch_bytes = max((memory - IDLE_MEMORY) // (3 * hello.export.threads), LEAST_BATCH)
        self.data_dir: Path = hello.data_dir
        self.gateway = hello.gateway
        self.tuning = hello.tuning
        self.registry = registry
        self._parent = parent
        self.aws, self.allow = hello.aws, hello.export.allow
        self._threads = hello.export.threads
        self._bandwidth = hello.export.max_bandwidth
        self._changed = threading.Condition()
        self._tasks: list[Task] = []  # also deleted ones, until they are closed
        self._grown: dict[tuple[str, str], int] = {}  # by how many bytes, in each export's plugin
        self._inside: dict[tuple[str, str], int] = {}  # how large when a plugin was called
        self._running: dict[int, tuple[Task, float]] = {}  # thread -> its task, when it counts as hung
        self._hung: set[int] = set()
        self.failures = 0  # attempts so far that ended with an error
        self._stopping = False
        self._allowed_at = 0.0  # when the bandwidth ceiling lets the next batch go

    # --- for the main thread

    def start(self) -> None:
        """Start the pool."""
        for _ in range(self._threads):
            self._start_thread()

    def put(self, task: Task) -> None:
        """Take in an export."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()

    def get(self, stream: str, identifier: str) -> Task | None:
        """The export of that name."""
        return next((task for task in self.of_stream(stream) if task.config.identifier == identifier), None)

    def of_stream(self, stream: str) -> list[Task]:
        """The exports of a stream."""
        with self._changed:
            return [task for task in self._tasks if task.source.name == stream and not task.gone]

    def wake(self) -> None:
        """Something has changed: messages were committed, or a configuration was."""
        with self._changed:
            self._changed.notify_all()

    def hung(self) -> list[Task]:
        """Exports whose thread has newly been found hung; their threads are replaced."""
        now = time.monotonic()
        with self._changed:
            found = {
                thread: task
                for thread, (task, deadline) in self._running.items()
                if now > deadline and thread not in self._hung
            }
            self._hung |= found.keys()
        for _ in found:
            self._start_thread()
        return list(found.values())

    def stop(self) -> None:
        """Start nothing more."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def is_quiet(self) -> bool:
        """Whether nothing runs any more, but for what hangs."""
        with self._changed:
            return not self._running.keys() - self._hung

    def finish(self) -> None:
        """After `stop`: write the cursors of all exports that do not run, and close them."""
        tasks = [task for task in self._tasks if not task.running and not task.gone]
        for task in tasks:
            task.write()
        for task in tasks:  # only then: with the link down, closing takes its time
            task.close()

    def most_grown(self) -> dict[tuple[str, str], int]:
        """The exports in whose plugins this process has grown most, and by how many bytes.

        Several that ran at the same time cannot be told apart, so all near the largest are named.
        """
        grown, used = dict(self._grown), memory_used()
        for key, before in list(self._inside.items()):
            grown[key] = grown.get(key, 0) + used - before
        largest = max(grown.values(), default=0)
        return {key: size for key, size in grown.items() if size * 2 > largest}

    # --- for tasks, in pool threads

    @contextmanager
    def in_plugin(self, task: Task, doing: str) -> Iterator[None]:
        """Around all code of plugins: the supervisor knows whom to name if this process dies in it."""
        before = self._inside[task.key] = memory_used()
        self._parent.send(wire.Began(*task.key, threading.get_ident(), doing))
        try:
            yield
        finally:
            self._parent.send(wire.Ended(*task.key))
            self._inside.pop(task.key, None)
            self._grown[task.key] = self._grown.get(task.key, 0) + memory_used() - before

    def working(self, task: Task) -> None:
        """Put off the time at which the task's thread counts as hung, whatever thread of the plugin says so.

        Without a step of the task under way there is nothing to put off.
        """
        with self._changed:
            for thread, (running, _) in self._running.items():
                if running is task:
                    self._running[thread] = task, time.monotonic() + task.timeout
                    return

    def charge(self, batch: Batch, task: Task) -> None:
        """Count a batch against the bandwidth ceiling: what comes next waits for it."""
        if self._bandwidth is not None:
            self._charge(sum([len(record.payload) + len(record.topic) for record in batch.records]), task)

    def _charge(self, size: int, task: Task) -> None:
        if self._bandwidth is not None:
            with self._changed:
                task.charged = size * 8 / self._bandwidth
                self._allowed_at = max(self._allowed_at, time.monotonic()) + task.charged

    def give_back(self, task: Task) -> None:
        """What a task was last charged for was not sent: it holds up nobody."""
        with self._changed:
            self._allowed_at -= task.charged
            task.charged = 0.0
            self._changed.notify_all()

    def throttle(self, size: int, task: Task) -> None:
        """Wait until the ceiling allows more, and count these bytes: what comes next waits for them."""
        while (wait := self._allowed_at - time.monotonic()) > 0 and not self._stopping:
            time.sleep(min(wait, 1.0))
            self.working(task)
        self._charge(size, task)

    def append(self, stream: str, payload: bytes) -> None:
        """Append to a stream of the gateway."""
        self._parent.append(stream, payload, APPEND_TIMEOUT)

    def client(self, service: str, config: AwsConfig | AwsBatchedConfig, **options: Any) -> Any:
        """An AWS client with the configured settings."""
        try:
            return aws.client(self.aws, service, config.region, config.endpoint_url, **options)
        except Exception as error:
            raise aws.failure(error, f"making the {service} client") from error

    def transform(self, task: Task) -> Transform | None:
        """What plugins make of an export's records; None if no plugin has such a hook."""
        return (
            partial(self._transform, task) if self.registry.hook.transform_records.get_hookimpls() else None
        )

    def _transform(
        self, task: Task, records: list[Record], stream: str, config: ExportConfig
    ) -> list[Record]:
        # Plugins in the order of loading, each seeing what those before it made of the records.
        with self.in_plugin(task, "transforming records"):
            for impl in self.registry.hook.transform_records.get_hookimpls():
                values = {"records": records, "stream": stream, "kind": task.kind, "config": config}
                try:
                    changed = impl.function(*(values[name] for name in impl.argnames))
                except Exception as error:
                    raise Retry(f"the plugin {impl.plugin_name} failed to transform: {error!r}") from error
                records = records if changed is None else changed
        return records

    def progress(self, kind: str) -> list[Progress]:
        """Snapshots of all exports of a kind; raises Retry as long as one is not known yet."""
        with self._changed:
            tasks = [task for task in self._tasks if task.kind == kind and not task.gone]
        if not all(task.is_loaded for task in tasks):
            raise Retry("the positions of all exports are not read yet")
        return [task.progress() for task in tasks]

    def changed(self, stream: str) -> None:
        """The statuses of a stream have changed."""
        self._parent.changed(stream)

    def damaged(self, stream: str, detail: str) -> None:
        """Reading a stream failed its check."""
        self._parent.send(wire.Damaged(stream, detail))

    def event(self, name: str, task: Task, detail: str) -> None:
        """Tell the hooks of an event of an export."""
        self._parent.event(
            Event(name=name, stream=task.source.name, export=task.config.identifier, detail=detail)
        )

    # --- the pool

    def _start_thread(self) -> None:
        threading.Thread(target=self._run, name="export", daemon=True).start()

    def _run(self) -> None:
        me = threading.get_ident()
        while True:
            with self._changed:
                task = self._pick()
                if task is None:
                    return
                task.running = True
                self._running[me] = task, time.monotonic() + task.timeout
            task.step()
            with self._changed:
                task.running = False
                del self._running[me]
                if task.over:  # not only gone: it may have been deleted in the middle of this step
                    self._tasks.remove(task)
                self._changed.notify_all()
                if me in self._hung:  # it came back after all; its place is taken
                    self._hung.discard(me)
                    return

    def _pick(self) -> Task | None:
        """Wait for the next task; None when the pool stops. Called with the lock held."""
        while not self._stopping:
            now = time.monotonic()
            alone = any(task.alone for task, _ in self._running.values())
            best: Task | None = None
            earliest = NEVER
            for task in self._tasks:
                if task.running or (alone and task.alone):
                    continue
                at = max(task.due(), 0.0 if task.gone else self._allowed_at)
                if at > now:
                    earliest = min(earliest, at)
                elif best is None or (task.priority, task.last_step) < (best.priority, best.last_step):
                    best = task
            if best is not None:
                return best
            self._changed.wait(None if earliest == NEVER else earliest - now)
        return None
