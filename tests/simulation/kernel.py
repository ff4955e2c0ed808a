"""Time, processes and threads of the simulated machine.

One thing runs at a time: an event of the kernel's queue. A simulated thread is a thread of the interpreter
that runs only while the kernel waits for it, and hands over wherever a real one could: at a lock,
a wait, a sleep, or a call of the operating system. How long such a call takes is drawn, so that the order of
threads differs from seed to seed, and never within one.

A killed process ends where it is: whatever of it still runs, to unwind its stack, gets `Killed` from all that
it calls.
"""

from __future__ import annotations

import _thread
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

OFTEN = 250  # steps
SHORT, HANDED_OVER = 60e-6, 0.3  # of calls that take less (in s), so many hand over


class Killed(SystemExit):
    """Raised in a process that has been killed; asyncio passes on a SystemExit."""


class DeadlockError(AssertionError):
    """Nothing can run, and something waits."""


class Process:
    """A simulated process."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel, self.name = kernel, name
        self.pid = next(kernel.numbers) + 1000
        self.dead = False
        self.died = 0.0  # when
        self.status: int | None = None
        self.loop: Any = None
        self.threads: list[Thread] = []
        self.files: set[int] = set()
        self.handlers: list[Any] = []  # of its log records
        self.at_exit: list[Callable[[], object]] = []
        self.calls_left: int | None = None  # of the operating system, until it is killed

    def __repr__(self) -> str:
        return self.name


class Kernel:
    """The queue of events."""

    def __init__(self, seed: object) -> None:
        self.random = Random(f"kernel {seed}")
        self.now = 1000.0  # seconds since the machine's start
        self.numbers = itertools.count()
        self.process: Process | None = None  # whose code runs
        self.thread: Thread | None = None
        self.steps = 0
        self.look: Callable[[], object] = int  # called between two turns, once in `OFTEN` steps
        self._events: list[tuple[float, int, Process | None, Callable[..., object], tuple[Any, ...]]] = []

    def later(self, seconds: float, process: Process | None, do: Callable[..., object], *args: Any) -> None:
        """Call `do` in so many seconds, unless the process is dead then."""
        heapq.heappush(self._events, (self.now + seconds, next(self.numbers), process, do, args))

    def step(self) -> bool:
        """Make the next event happen; returns whether there was one."""
        if not self._events:
            return False
        at, _, process, do, args = heapq.heappop(self._events)
        self.now = max(self.now, at)
        if process is not None and process.dead:
            return True
        self.steps += 1
        if process is None:
            do(*args)
            return True
        try:
            with self.inside(process):
                do(*args)
        except Killed:
            self.kill(process, -9)
        if process.loop is not None and not process.dead:
            process.loop.kick()
        if not self.steps % OFTEN:
            self.look()
        return True

    def step_thread(self) -> None:
        """Let the next thread run: the event loop waits for it, and makes no other event happen."""
        mine = [event for event in self._events if getattr(event[3], "__func__", None) is Thread._resume]
        if not mine:
            raise DeadlockError("the event loop waits for a thread, and none can run")
        event = min(mine)
        self._events.remove(event)
        heapq.heapify(self._events)
        self.now = max(self.now, event[0])
        if event[2] is None or not event[2].dead:
            event[3](*event[4])

    def run(self, until: Callable[[], bool], seconds: float = 3600.0) -> bool:
        """Let things happen until a condition holds, for at most so much simulated time."""
        end = self.now + seconds
        while not until():
            if not self._events or self._events[0][0] > end:
                self.now = max(self.now, end)
                return until()
            self.step()
        return True

    def pass_time(self, seconds: float) -> None:
        """Let things happen for so long."""
        self.run(lambda: False, seconds)

    @contextmanager
    def inside(self, process: Process) -> Iterator[None]:
        """Run code of a process."""
        before = self.process, self.thread
        self.process, self.thread = process, None
        loop = process.loop
        try:
            if loop is None:
                yield
            else:
                with loop.running():
                    yield
        finally:
            self.process, self.thread = before

    # -- processes

    def spawn(self, name: str) -> Process:
        """A new process; its code begins with an event or a thread."""
        return Process(self, name)

    def call(self, kind: str, seconds: float) -> None:
        """Code calls the operating system: others may run meanwhile, and it may be killed here."""
        process = self.process
        if process is None:
            return
        if process.dead:
            raise Killed(kind)
        if process.calls_left is not None:
            process.calls_left -= 1
            if process.calls_left < 0:
                raise Killed(kind)
        if self.thread is not None and (seconds > SHORT or self.random.random() < HANDED_OVER):
            self.thread.pause(seconds)

    def kill(self, process: Process, status: int) -> None:
        """End a process where it is."""
        if process.dead:
            return
        process.dead, process.status, process.died = True, status, self.now
        for thread in list(process.threads):
            thread.unwind()
        if process.loop is not None:
            with self.inside(process):
                process.loop.abandon()
        for do in process.at_exit:
            do()
        process.at_exit.clear()

    def check_alive(self) -> None:
        """Raise Killed if the code that runs belongs to a dead process."""
        if self.process is not None and self.process.dead:
            raise Killed


KERNEL: Kernel | None = None  # the one that runs


def use(kernel: Kernel | None) -> None:
    """Make this the kernel of all locks and threads."""
    global KERNEL
    KERNEL = kernel


def kernel() -> Kernel:
    """The kernel that runs."""
    assert KERNEL is not None
    return KERNEL


class Thread:
    """What `threading.Thread` is on the simulated machine."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str = "",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self.name, self._args, self._kwargs = target, name, args, kwargs or {}
        self.daemon = daemon
        self.ident: int | None = None
        self._go, self._back = _thread.allocate_lock(), _thread.allocate_lock()
        self._go.acquire()
        self._back.acquire()
        self._ended = False
        self._token = 0  # of the event that resumes it
        self._joining: list[Thread] = []

    def start(self) -> None:
        now = kernel()
        now.check_alive()
        assert now.process is not None
        self.process = now.process
        self.process.threads.append(self)
        self.ident = next(now.numbers) + 1
        self._kernel = now
        _thread.start_new_thread(self._run, ())
        self.wake(now.random.random() * 50e-6)

    def is_alive(self) -> bool:
        return self.ident is not None and not self._ended

    def join(self, timeout: float | None = None) -> None:
        now = kernel()
        if self._ended:
            return
        if now.thread is None:  # the event loop waits: what must happen first happens now
            while not self._ended:
                now.step_thread()
        else:
            self._joining.append(now.thread)
            now.thread.wait(timeout)

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self.process.dead and self._target is not None:
                self._target(*self._args, **self._kwargs)
        except Killed:
            pass
        except BaseException as error:  # the kernel raises it
            self.error: BaseException | None = error
        finally:
            self._ended = True
            self.process.threads.remove(self)
            for other in self._joining:
                other.wake()
            self._back.release()

    # -- for the kernel

    def _resume(self, token: int = -1) -> None:
        """Run until it hands over."""
        if self._ended or token not in (-1, self._token):
            return
        self._token += 1
        now = self._kernel
        before = now.process, now.thread
        now.process, now.thread = self.process, self
        try:
            self._go.release()
            self._back.acquire()
        finally:
            now.process, now.thread = before
        if (error := getattr(self, "error", None)) is not None:
            raise error
        if self.process.calls_left is not None and self.process.calls_left < 0 and not self.process.dead:
            raise Killed

    def wake(self, seconds: float | None = None) -> None:
        """Go on soon, whatever it waits for."""
        if seconds is None:
            seconds = self._kernel.random.random() * 30e-6
        self._kernel.later(seconds, self.process, self._resume, self._token)

    def pause(self, seconds: float) -> None:
        """Called by itself: hand over for so long."""
        self.wake(seconds)
        self._hand_over()

    def wait(self, seconds: float | None = None) -> None:
        """Called by itself: hand over until somebody wakes it, or the time has passed."""
        if seconds is not None:
            self.wake(max(seconds, 0.0))
        self._hand_over()

    def _hand_over(self) -> None:
        self._back.release()
        self._go.acquire()
        if self.process.dead:
            raise Killed

    def unwind(self) -> None:
        """Its process has been killed: let its stack unwind."""
        if self._kernel.thread is not self:
            for _ in range(100):
                if self._ended:
                    return
                self._resume()
            raise AssertionError(f"{self.name} does not end")


class Lock:
    """What `threading.Lock` is on the simulated machine."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: deque[Thread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        now = KERNEL
        if now is not None and now.process is not None and now.process.dead:
            raise Killed
        if not self._held:
            self._held = True
            return True
        if not blocking:
            return False
        if now is None:
            raise DeadlockError("a lock is taken, and nothing runs")
        return self._wait(now, timeout)

    def _wait(self, now: Kernel, timeout: float) -> bool:
        end = now.now + timeout if timeout >= 0 else None
        while self._held:
            if end is not None and now.now >= end:
                return False
            if now.thread is None:
                now.step_thread()
                continue
            thread = now.thread
            self._waiting.append(thread)
            try:
                thread.wait(None if end is None else end - now.now)
            finally:
                if thread in self._waiting:
                    self._waiting.remove(thread)
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        if self._waiting:
            self._waiting.popleft().wake()

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self.__init__()  # type: ignore[misc]


class RLock(Lock):
    """What `threading.RLock` is on the simulated machine."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: object = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = _thread.get_ident()
        if self._depth and self._owner == me:
            self._depth += 1
            return True
        if not super().acquire(blocking, timeout):
            return False
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            super().release()

    def _is_owned(self) -> bool:
        return self._depth > 0 and self._owner == _thread.get_ident()

    def _release_save(self) -> int:
        depth, self._depth, self._owner = self._depth, 0, None
        super().release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        super().acquire()
        self._owner, self._depth = _thread.get_ident(), depth


def sleep(seconds: float) -> None:
    """What `time.sleep` is on the simulated machine."""
    now = kernel()
    now.check_alive()
    if now.thread is not None:
        now.thread.pause(max(seconds, 0.0))
    else:
        now.now += max(seconds, 0.0)
