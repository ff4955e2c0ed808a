"""A few threads for work that may block; the event loop is notified when it is done.

`concurrent.futures` costs twice as much: it makes a future with a condition variable for every call, and a
commit needs only one message each way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

Done = Callable[[BaseException | None], None]
_Job = tuple[Callable[[], object], Done]


class Workers:
    """One thread, and up to `number` when needed. For the running event loop's thread."""

    def __init__(self, number: int, name: str) -> None:
        """Raises RuntimeError if no thread can be started; later, it uses those that it has."""
        self._number, self._name = number, name
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._unfinished = 0
        self._grow()

    def submit(self, work: Callable[[], object], done: Done) -> None:
        """Call `work` in a thread, then `done` on the event loop with what it raised, or None."""
        self._unfinished += 1
        if len(self._threads) < min(self._unfinished, self._number):
            with contextlib.suppress(RuntimeError):
                self._grow()
        self._jobs.put((work, done))

    def _grow(self) -> None:
        # Daemons: a process that ends without `close` must not hang on a disk that does.
        thread = Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done = job
            error: BaseException | None = None
            try:
                work()
            except BaseException as caught:  # given to `done`
                error = caught
            try:
                self._loop.call_soon_threadsafe(self._finished, done, error)
            except RuntimeError:  # the loop is closed
                return
            del job, work, done, error  # do not keep them alive until the next job

    def _finished(self, done: Done, error: BaseException | None) -> None:
        self._unfinished -= 1
        done(error)

    def close(self) -> None:
        """End the threads, when what was submitted is done."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
