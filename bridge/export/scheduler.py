"""The pool of threads that run exports, strictly by priority.

Each thread picks its next export itself, under one lock: the due export with the lowest priority number.
Among equals, one with new messages that go before a backlog comes first, then the one that has waited
longest. So a free thread always runs the most urgent export, and no dispatcher can fall behind.

Exports whose last attempt had no connection take at most all threads but one. Their next attempts may each
wait for an answer until a time-out, and the other exports must not wait for them.

A thread that makes no progress for its export's timeout counts as hung. Python cannot end a thread. So the
thread keeps its export, a new thread takes its place in the pool, and the worker asks to be replaced (see
`worker.py`).
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from typing import NamedTuple

from bridge.export.task import LAST_RANK, NEVER, Task
from bridge.plugin.api import Progress, Retry
from bridge.plugin.link import Link

LOOK = 0.1  # seconds between two checks whether a busy link is free
LONGEST_WAIT = 3600.0  # seconds; a plugin may ask for more than a thread can wait (`threading.TIMEOUT_MAX`)

_Due = tuple[int, float, int, Task]  # rank, last step, number of the entry


class _Entry(NamedTuple):
    """The valid entry of a task: its number, its time (0: it is due), and its rank."""

    number: int
    at: float
    rank: int


class Scheduler:
    """Runs the tasks of one worker.

    Exports of one priority share the link. While the link is at its ceiling, no export starts that is less
    urgent than a running one.

    A task has one valid entry in one of the heaps, or none while it runs or has nothing to do. Entries that
    are no longer valid are skipped when their time comes.
    """

    def __init__(self, threads: int, link: Link) -> None:
        self._threads, self._link = threads, link
        self._changed = threading.Condition()
        self._streams: dict[str, dict[Task, None]] = {}  # including deleted tasks until they are closed
        self._valid: dict[Task, _Entry] = {}
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, Task]] = []  # monotonic time
        self._due: list[_Due] = []
        self._due_deleted: list[_Due] = []  # these send nothing
        self._due_down: list[_Due] = []  # these may have no connection
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
            self._streams.setdefault(task.source.name, {})[task] = None
            self._schedule(task)

    def get(self, stream: str, identifier: str) -> Task | None:
        """Return the export with this identifier, or None."""
        return next((task for task in self.of_stream(stream) if task.config.identifier == identifier), None)

    def of_stream(self, stream: str) -> list[Task]:
        """The exports of a stream."""
        with self._changed:
            return [task for task in self._streams.get(stream, ()) if not task.deleted]

    def wake(self, stream: str) -> None:
        """Reschedule a stream's exports: messages were committed, or a configuration has changed."""
        with self._changed:
            for task in self._streams.get(stream, ()):
                self._schedule(task)

    def hung(self) -> list[Task]:
        """Replace threads that have begun to hang since the last call. Return their exports."""
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
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def is_quiet(self) -> bool:
        """Whether no step is running, except those that hang."""
        with self._changed:
            return not self._running.keys() - self._hung

    def finish(self) -> None:
        """After `stop`: write the cursors of all exports that are not running, and close them."""
        tasks = [task for task in self._tasks() if not task.running and not task.deleted]
        for task in tasks:
            task.position.finish()
        for task in tasks:  # after all writes, because closing takes long while the link is down
            task.close()

    # --- for exporters, in pool threads

    def working(self) -> None:
        """Restart the timeout of the step that runs in this thread."""
        if (task := self._running.get(threading.get_ident())) is not None:
            task.working()

    def progress(self, kind: str) -> list[Progress]:
        """Return snapshots of all exports of a kind. Raises Retry while the position of one is unknown."""
        with self._changed:
            tasks = [task for task in self._tasks() if task.kind == kind and not task.deleted]
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
                if task.closed:  # not just deleted, which may have happened during this step
                    self._forget(task)
                else:
                    self._schedule(task)
                self._changed.notify_all()
                if me in self._hung:  # this thread has recovered, but another one has its place
                    self._hung.discard(me)
                    return

    def _tasks(self) -> list[Task]:
        return [task for tasks in self._streams.values() for task in tasks]

    def _forget(self, task: Task) -> None:
        name = task.source.name
        del self._streams[name][task]
        if not self._streams[name]:
            del self._streams[name]

    def _schedule(self, task: Task) -> None:
        """Enter a task for the time it is due, unless it has an earlier entry. Called with the lock held."""
        at, rank, known = task.due(), self._rank(task), self._valid.get(task)
        if task.running or (known is not None and known.at <= at < NEVER and known.rank == rank):
            return
        self._valid.pop(task, None)
        if at == NEVER:
            return
        number = next(self._numbers)
        self._valid[task] = _Entry(number, at, rank)
        heapq.heappush(self._waiting, (at, number, task))
        if at <= time.monotonic() or self._waiting[0][1] == number:
            self._changed.notify()
        if len(self._waiting) > 2 * len(self._valid) + 100:
            self._waiting = [entry for entry in self._waiting if self._is_valid(entry[2], entry[1])]
            heapq.heapify(self._waiting)

    def _is_valid(self, task: Task, number: int) -> bool:
        known = self._valid.get(task)
        return known is not None and known.number == number

    def _rank(self, task: Task) -> int:
        """Return the rank of a task; 0 for a deleted one, which sends nothing."""
        return 0 if task.deleted else task.rank

    def _collect_due(self, now: float) -> None:
        """Move due tasks from the waiting heap to the due ones."""
        while self._waiting and self._waiting[0][0] <= now:
            _, number, task = heapq.heappop(self._waiting)
            if not self._is_valid(task, number):
                continue
            at = task.due()
            if at > now:
                del self._valid[task]
                self._schedule(task)
                continue
            rank = self._rank(task)
            self._valid[task] = _Entry(number, 0.0, rank)
            heap = self._due_deleted if not rank else self._due_down if task.is_down else self._due
            heapq.heappush(heap, (rank, task.last_step, number, task))

    def _first(self, heap: list[_Due], *, without_alone: bool) -> _Due | None:
        """Return the first valid entry, without removing it."""
        held, found = list[_Due](), None
        while heap and found is None:
            entry = heap[0]
            if not self._is_valid(entry[3], entry[2]):
                heapq.heappop(heap)
            elif without_alone and entry[3].alone:
                held.append(heapq.heappop(heap))
            else:
                found = entry
        for entry in held:
            heapq.heappush(heap, entry)
        return found

    def _pick(self) -> Task | None:
        """Wait for the next task; None when the pool stops. Called with the lock held."""
        while not self._stopping:
            now = time.monotonic()
            alone = any(task.alone for task in self._running.values())
            self._collect_due(now)
            least = LAST_RANK
            running = [task for thread, task in self._running.items() if thread not in self._hung]
            if self._link.busy:
                least = min((task.rank for task in running), default=LAST_RANK)
            heaps = [self._due_deleted, self._due]
            if sum(task.is_down for task in running) < max(self._threads - 1, 1):
                heaps.append(self._due_down)
            found = [entry for heap in heaps if (entry := self._first(heap, without_alone=alone))]
            found = [entry for entry in found if self._rank(entry[3]) <= least]
            if found:
                task = min(found)[3]
                del self._valid[task]
                self._changed.notify()  # this step may take long
                return task
            until = [self._waiting[0][0]] if self._waiting else []
            if (self._due or self._due_down) and least < LAST_RANK:
                until.append(now + LOOK)
            self._changed.wait(min(min(until) - now, LONGEST_WAIT) if until else None)
        return None
