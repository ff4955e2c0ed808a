"""Time and threads, as code that does no I/O of its own asks for them.

The service has an event loop (`LoopRuntime`). A test or a simulation brings a clock of its own, and decides
what runs when. Nothing here blocks, and nothing is called from another thread.

The time of day and the age of messages are `bridge.clock`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


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

    def work(self, do: Callable[[], T], done: Callable[[T | None, Exception | None], object]) -> None:
        """Run what blocks elsewhere, and then call `done` with its result, or with what it raised."""


class LoopRuntime:
    """The running event loop and its threads."""

    def __init__(self) -> None:
        """Raises RuntimeError if no event loop runs."""
        loop = asyncio.get_running_loop()
        self.now = time.monotonic  # not the loop's time, which stands still during one of its turns
        self.soon, self.later = loop.call_soon, loop.call_later
        self._loop = loop

    def work(self, do: Callable[[], T], done: Callable[[T | None, Exception | None], object]) -> None:
        """Run `do` in one of the loop's threads."""

        def ended(future: asyncio.Future[T]) -> None:
            if future.cancelled():
                return  # the loop is closing
            error = future.exception()
            if error is None:
                done(future.result(), None)
            elif isinstance(error, Exception):
                done(None, error)

        self._loop.run_in_executor(None, do).add_done_callback(ended)
