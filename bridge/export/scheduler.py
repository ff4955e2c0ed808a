"""The pool of threads that run exports, strictly by priority.

Each thread picks its next export itself, under one lock: the due export with the lowest priority
number; among equals the one that has waited longest. A free thread therefore always runs the most
urgent export, and no dispatcher can fall behind.

A thread without progress for its export's timeout counts as hung. Python cannot end a thread, so it
stays with its export, a new thread takes its place in the pool, and the worker asks to be replaced
(see `worker.py`).
"""

from __future__ import annotations

import threading
import time

from bridge.export.bandwidth import Bandwidth
from bridge.export.task import NEVER, Task
from bridge.plugin.api import Progress, Retry


class Scheduler:
    """Runs the tasks of one worker; sends no batch before the bandwidth is free."""

    def __init__(self, threads: int, bandwidth: Bandwidth) -> None:
        self._threads, self._bandwidth = threads, bandwidth
        self._changed = threading.Condition()
        self._tasks: list[Task] = []  # also deleted ones, until they are closed
        self._running: dict[int, Task] = {}  # by thread
        self._hung: set[int] = set()
        self._stopping = False

    # --- for the main thread

    def start(self) -> None:
        """Start the pool."""
        for _ in range(self._threads):
            self._start_thread()

    def put(self, task: Task) -> None:
        """Add an export."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()

    def get(self, stream: str, identifier: str) -> Task | None:
        """The export of that name."""
        return next((task for task in self.of_stream(stream) if task.config.identifier == identifier), None)

    def of_stream(self, stream: str) -> list[Task]:
        """The exports of a stream."""
        with self._changed:
            return [task for task in self._tasks if task.source.name == stream and not task.deleted]

    def wake(self) -> None:
        """Look for due exports again: messages were committed, or a configuration has changed."""
        with self._changed:
            self._changed.notify_all()

    def hung(self) -> list[Task]:
        """Replace the threads that hang since the last call; return their exports."""
        now = time.monotonic()
        with self._changed:
            found = {
                thread: task
                for thread, task in self._running.items()
                if now > task.deadline and thread not in self._hung
            }
            self._hung |= found.keys()
        for _ in found:
            self._start_thread()
        return list(found.values())

    def stop(self) -> None:
        """Start no more steps."""
        self._bandwidth.stop()
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def is_quiet(self) -> bool:
        """Whether no step is running, except those that hang."""
        with self._changed:
            return not self._running.keys() - self._hung

    def finish(self) -> None:
        """After `stop`: write the cursors of all exports that are not running, and close them."""
        tasks = [task for task in self._tasks if not task.running and not task.deleted]
        for task in tasks:
            task.position.try_write()
        for task in tasks:  # after all writes: with the link down, closing takes long
            task.close()

    # --- for exporters, in pool threads

    def progress(self, kind: str) -> list[Progress]:
        """Snapshots of all exports of a kind; raises Retry while the position of one is unknown."""
        with self._changed:
            tasks = [task for task in self._tasks if task.kind == kind and not task.deleted]
        if not all(task.position.is_loaded for task in tasks):
            raise Retry("the positions of all exports are not read yet")
        return [task.progress() for task in tasks]

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
                task.running, task.last_step = True, time.monotonic()
                task.deadline = task.last_step + task.timeout
                self._running[me] = task
            task.step()
            with self._changed:
                task.running = False
                del self._running[me]
                if task.closed:  # not only deleted, which may have happened in the middle of this step
                    self._tasks.remove(task)
                self._changed.notify_all()
                if me in self._hung:  # it came back; another thread has its place
                    self._hung.discard(me)
                    return

    def _pick(self) -> Task | None:
        """Wait for the next task; None when the pool stops. Called with the lock held."""
        while not self._stopping:
            now = time.monotonic()
            alone = any(task.alone for task in self._running.values())
            best: Task | None = None
            earliest = NEVER
            for task in self._tasks:
                if task.running or (alone and task.alone):
                    continue
                at = max(task.due(), 0.0 if task.deleted else self._bandwidth.free_at)
                if at > now:
                    earliest = min(earliest, at)
                elif best is None or (task.priority, task.last_step) < (best.priority, best.last_step):
                    best = task
            if best is not None:
                return best
            self._changed.wait(None if earliest == NEVER else earliest - now)
        return None
