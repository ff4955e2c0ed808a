"""Makes a change exactly where the product waits, without a change of the product.

`Scheduler.at` says at which site (`sites`) which change is made, and at which of its visits. At an `await`,
it is made when what was awaited is there and the coroutine has not gone on: nothing can happen later, and
still change what was checked before. At a hand-over to a thread, a timer or a callback it is made just before
the callback is called.

The event loop is asyncio's with its public methods overridden, and its tasks run inside a coroutine that sees
each suspension. `Watched` is a `LoopRuntime` that sees what its threads are given.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import cache
from pathlib import Path
from typing import Any

from bridge.runtime import Done, LoopRuntime

from .sites import PLACES, ROOT, Site, of_file

Change = Callable[[], Awaitable[object] | object]


class Scheduler:
    """The changes that are to be made, and the sites that were seen."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.made: list[str] = []
        self._wanted: dict[str, tuple[Change, int]] = {}

    def at(self, site: str, change: Change, visit: int = 1) -> None:
        """Make a change at this site, the `visit`th time that something waits there from now on.

        A change at an `await` may be a coroutine function.
        """
        self._wanted[site] = change, self.seen[site] + visit

    def check(self) -> None:
        """Fail if a change was not made, because nothing waited there."""
        assert not self._wanted, f"nothing waited at {list(self._wanted)}; it did at {list(self.seen)}"

    def came(self, site: str) -> Change | None:
        """Something waits at a site: count it, and return the change that is to be made there now."""
        self.seen[site] += 1
        change, visit = self._wanted.get(site, (None, 0))
        if change is None or self.seen[site] != visit:
            return None
        del self._wanted[site]
        self.made.append(site)
        return change

    def before(self, frame: types.FrameType, do: Callable[..., object]) -> Callable[..., object]:
        """Return a callback that first makes the change of the site at which this frame is, if it has one."""
        site = _site_of(frame.f_code, frame.f_lasti)
        if site is None or (change := self.came(str(site))) is None:
            return do

        def changed(*args: object) -> object:
            change()
            return do(*args)

        return changed


class Loop(asyncio.SelectorEventLoop):
    """The event loop on which a scheduler makes its changes."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self.set_task_factory(self._task)

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_watched(work, self._scheduler), loop=loop, **more)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        callback = self._scheduler.before(sys._getframe(1), callback)
        return super().call_soon(callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        callback = self._scheduler.before(sys._getframe(1), callback)
        return super().call_later(delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        callback = self._scheduler.before(sys._getframe(1), callback)
        return super().call_at(when, callback, *args, context=context)


class Watched(LoopRuntime):
    """The runtime of a part: what a thread has done is told after the change."""

    def __init__(self, scheduler: Scheduler, threads: int, name: str) -> None:
        super().__init__(threads, name)
        self._scheduler = scheduler

    def work(self, do: Callable[[], object], done: Done) -> None:
        super().work(do, self._scheduler.before(sys._getframe(1), done))


def run(scheduler: Scheduler, main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end on a loop of its own."""
    with asyncio.Runner(loop_factory=lambda: Loop(scheduler)) as runner:
        runner.run(main)


async def _watched(work: Coroutine[Any, Any, Any], scheduler: Scheduler) -> Any:
    return await _steps(work, scheduler)


@types.coroutine
def _steps(work: Coroutine[Any, Any, Any], scheduler: Scheduler) -> Generator[Any, Any, Any]:
    """Run a coroutine, and make the changes of the sites at which it waits before it goes on."""
    error: BaseException | None = None
    waited: list[tuple[Site, object]] = []
    try:
        while True:
            try:
                waits = work.send(None) if error is None else work.throw(error)
            except StopIteration as done:
                return done.value
            error, before = None, waited
            waited = _waiting(work)
            # An outer await that goes on waiting for the same is one visit.
            fresh = [site for site, what in waited if all(what is not known for _, known in before)]
            changes = [scheduler.came(str(site)) for site in fresh]
            try:
                yield waits
            except BaseException as caught:  # for the work
                error = caught
            for change in changes:
                if change is not None and inspect.isawaitable(made := change()):
                    yield from made.__await__()
    finally:
        work.close()


def _waiting(work: Any) -> list[tuple[Site, object]]:
    """The sites at which a suspended coroutine waits, the outermost first, each with what it waits for."""
    found = []
    while work is not None:
        frame = getattr(work, "cr_frame", None) or getattr(work, "gi_frame", None)
        if frame is None:
            break
        inner = getattr(work, "cr_await", None) or getattr(work, "gi_yieldfrom", None)
        if inner is None:  # it runs another coroutine by hand, step by step, as turns do
            inner = next((one for one in frame.f_locals.values() if inspect.iscoroutine(one)), None)
        if (site := _site_of(frame.f_code, frame.f_lasti)) is not None:
            found.append((site, inner))
        work = inner
    return found


def _site_of(code: types.CodeType, instruction: int) -> Site | None:
    """The site at which code of the product is; None for other code."""
    return _known(code.co_filename, code, instruction)


@cache
def _known(name: str, code: types.CodeType, instruction: int) -> Site | None:
    path = Path(name)
    if ROOT not in path.parents or path.relative_to(ROOT).parts[0] not in PLACES:
        return None
    line, end, column, last = list(code.co_positions())[instruction // 2]
    here = line, end, column, last
    return next((site for site in of_file(path.relative_to(ROOT).as_posix()) if site.position == here), None)
