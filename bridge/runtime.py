"""The interface to time and threads, for code that does no I/O itself.

The service has an event loop and threads (`LoopRuntime`). A test or a simulation has its own clock and
decides what runs when. A runtime must be used in its own thread, and calls back in that thread.

The time of day and the age of messages are in `bridge.clock`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

Done = Callable[[BaseException | None], object]


class Timer(Protocol):
    """A call that has not been made yet."""

    def cancel(self) -> None:
        """Do not make it; nothing happens if it has been made."""


class Runtime(Protocol):
    """Where a part runs."""

    def now(self) -> float:
        """Seconds on a clock that only moves forward. Its zero means nothing."""

    def soon(self, do: Callable[..., object], *args: Any) -> Timer:
        """Call `do` when what runs now has returned, in the order of these calls."""

    def later(self, seconds: float, do: Callable[..., object], *args: Any) -> Timer:
        """Call `do` after so many seconds."""

    def work(self, do: Callable[[], object], done: Done) -> None:
        """Run `do`, which may block, in a thread; then call `done` with what it raised, or None."""

    def close(self) -> None:
        """End the threads once all work is done; its `done` may not be called any more."""


async def tick(interval: float) -> float:
    """Wait for the next multiple of `interval` seconds, at least a tenth of it; return how late it came.

    So all that is done once a second is done in one wake-up: on an idle machine, waking costs more than that.
    """
    loop = asyncio.get_running_loop()
    margin = interval / 10  # a timer may end early, and what is due must not be done twice
    began = loop.time()
    wait = interval + margin - (began + margin) % interval
    await asyncio.sleep(wait)
    return loop.time() - began - wait


class LoopRuntime:
    """The running event loop, and one thread, or up to `threads` when needed.

    `concurrent.futures` costs twice as much: it makes a future with a condition variable for every call, and
    a commit needs only one message each way.
    """

    def __init__(self, threads: int, name: str) -> None:
        """`name` is that of the threads. Raises RuntimeError if no event loop runs, or no thread starts."""
        self._loop = loop = asyncio.get_running_loop()
        self.now = time.monotonic  # not the loop's time, which stands still during one of its turns
        self.soon, self.later = loop.call_soon, loop.call_later
        self._most, self._name = threads, name
        self._jobs: SimpleQueue[tuple[Callable[[], object], Done] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._unfinished = 0
        self._grow()

    def work(self, do: Callable[[], object], done: Done) -> None:
        """Call `do` in a thread, then `done` in the event loop."""
        self._unfinished += 1
        if len(self._threads) < min(self._unfinished, self._most):
            with contextlib.suppress(RuntimeError):
                self._grow()
        self._jobs.put((do, done))

    def close(self) -> None:
        """End the threads, when what was given to them is done."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _grow(self) -> None:
        # Daemons: a process that ends without `close` must not hang on a disk that does.
        thread = Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            do, done = job
            error: BaseException | None = None
            try:
                do()
            except BaseException as caught:  # given to `done`
                error = caught
            try:
                self._loop.call_soon_threadsafe(self._finished, done, error)
            except RuntimeError:  # the loop is closed
                return
            del job, do, done, error  # do not keep them alive until the next job

    def _finished(self, done: Done, error: BaseException | None) -> None:
        self._unfinished -= 1
        done(error)
