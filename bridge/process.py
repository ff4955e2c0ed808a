"""How this process shares the machine: CPU time, and the memory that it has freed.

CPU
---
The service wakes for every packet and runs for microseconds; the worker compresses for seconds. From
Linux 6.12 on, a process may set how long it wants to run at a time, and the shorter time goes first
(sched_setattr(2), `sched_runtime` of an ordinary process, 0.1 to 100 ms). With two cores busy exporting, the
p99 latency of a message is 2.5 ms without this and 0.6 ms with it, as without exports (`benchmarks.export`).
If the kernel does not support or allow it, nothing happens.

A thread that has written a group needs the GIL to begin the sync, and again to report its end. The loop holds
the GIL while it handles what a socket has received, and yields after the interpreter's switch interval: 5 ms
by default, while a good disk syncs in 0.1.

Memory
------
Freed memory is returned to the system (with glibc; other libraries do not keep it). Otherwise
the process keeps what a reconnect storm or a large batch has used, in holes between what is still in use: 180
devices that reconnected four times by TLS turned 47 MiB into 94, of which 50 were in use.

A buffer that is mapped individually goes back at once, but the kernel clears each of its pages anew: 0.4 ms
for 1 MiB on a virtual machine, where reading its bytes takes 0.03. So the service, which trims its memory
each minute, maps only buffers that are larger than a read or a commit usually needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys
import time
from pathlib import Path

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}  # the system call's number, 64 bits
_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
TRIM_INTERVAL = 60.0  # seconds
MAPPED = 128 * 1024  # bytes of a buffer from which on it is mapped individually
MAPPED_IF_TRIMMED = 4 * 1024 * 1024  # the same in a process that calls `trim_memory` regularly
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def use_short_slices() -> None:
    """Run this thread, and those that it starts, soon after they wake or request the GIL."""
    sys.setswitchinterval(50e-6)
    _run_for(100_000)


def lower_priority() -> None:
    """Run this process after others, for as long at a time as the kernel's default."""
    os.nice(5)
    _run_for(0)


def _run_for(nanoseconds: int) -> None:
    call = _SCHED_SETATTR.get(platform.machine())
    if call is not None and sys.maxsize > 2**32:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = _ATTR.pack(_ATTR.size, os.SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0)
        ctypes.CDLL(None).syscall(call, 0, attributes, 0)


class Processor:
    """Whether a process gets less processor than it wants, from one look to the next.

    A thread that waits counts its wait only once it runs again (`schedstat`, where the kernel has it). So one
    that may run and has hardly run since the last look waits too.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before, self._looked = _threads(pid), time.monotonic()

    def lacks(self) -> bool:
        """Return whether a thread has waited for a quarter of the time since the last look, or longer."""
        now, threads = time.monotonic(), _threads(self._pid)
        before, passed = self._before, now - self._looked
        self._before, self._looked = threads, now
        for thread, (may_run, ran, waited) in threads.items():
            _, ran_before, waited_before = before.get(thread, (False, ran, waited))
            if waited - waited_before > passed / 4 or (may_run and ran - ran_before < passed / 2):
                return True
        return False


def _threads(pid: int) -> dict[str, tuple[bool, float, float]]:
    """Of each thread of a process: whether it may run, and for how many seconds it has run and waited to."""
    found = {}
    tick = os.sysconf("SC_CLK_TCK")
    for task in Path(f"/proc/{pid}/task").glob("*"):
        waited = 0.0
        with contextlib.suppress(OSError, ValueError, IndexError):  # not every kernel has it
            waited = int((task / "schedstat").read_text("ascii").split()[1]) / 1e9
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread may have ended
            fields = (task / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
            found[task.name] = fields[0] == "R", (int(fields[11]) + int(fields[12])) / tick, waited
    return found


def trim_memory() -> None:
    """Return free memory now (malloc_trim(3)): takes some milliseconds; other threads may wait."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def return_freed_memory(mapped: int, *, few_heaps: bool) -> None:
    """Map buffers of `mapped` bytes and more individually; `few_heaps`: threads share heaps (mallopt(3)).

    By default glibc maps no buffer that is smaller than one that was freed, up to 32 MiB, and has a heap for
    each thread.
    """
    library = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        library.mallopt(_M_MMAP_THRESHOLD, mapped)
        # by default it follows the other one
        library.mallopt(_M_TRIM_THRESHOLD, max(2 * mapped, 1024 * 1024))
        if few_heaps:
            library.mallopt(_M_ARENA_MAX, 2)


def child_environment() -> dict[str, str]:
    """This process's environment for a child with plugins: without secrets, this package first on the path.

    STREAMBRIDGE_... belongs to the configuration, which is read already; the first message brings the child's
    part. Start it with `-P`, which keeps the working directory off the path.
    """
    package = str(Path(__file__).resolve().parents[1])
    path = os.environ.get("PYTHONPATH")
    ours = {name: value for name, value in os.environ.items() if not name.startswith("STREAMBRIDGE_")}
    return {**ours, "PYTHONPATH": f"{package}{os.pathsep}{path}" if path else package}
