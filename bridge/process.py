"""How this process shares the machine: its time on the CPU, and the memory that it has freed.

CPU
---
The service is woken for every packet, and done in microseconds; the worker compresses for seconds. From
Linux 6.12 on a process may say how long it wants to run at a time, and who wants less goes first
(sched_setattr(2), `sched_runtime` of an ordinary process, 0.1 to 100 ms). On two cores that are both busy
exporting, a message in a hundred waits for 2.5 ms without that, and for 0.6 ms with it, as it does
without exports (`benchmarks.export`). Where the kernel does not know it or forbids it, nothing happens.

A thread that has written a group asks for the interpreter to begin the sync, and again to tell of its
end. The loop, which holds it while it goes through what a socket brought, hears of that after the
interpreter's switch interval: 5 ms if nothing is said, and a good disk has synced in 0.1.

Memory
------
Freed memory is given back to the system; only glibc keeps it, elsewhere nothing happens.
What a storm of reconnects or a large batch has used stays with the process, in holes between what is still in
use: 180 devices that came back four times by TLS made 47 MiB into 94, of which 50 were in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}  # the call's number, in 64 bits
_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
TRIM_INTERVAL = 60.0  # seconds
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def use_short_slices() -> None:
    """Have this thread, and those that it starts, run soon after they are woken or ask for the GIL."""
    sys.setswitchinterval(50e-6)
    _run_for(100_000)


def lower_priority() -> None:
    """Have this process come after others, and run for as long at a time as the kernel likes."""
    os.nice(5)
    _run_for(0)


def _run_for(nanoseconds: int) -> None:
    call = _SCHED_SETATTR.get(platform.machine())
    if call is not None and sys.maxsize > 2**32:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = _ATTR.pack(_ATTR.size, os.SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0)
        ctypes.CDLL(None).syscall(call, 0, attributes, 0)


def trim_memory() -> None:
    """Give back what is free now (malloc_trim(3)): some milliseconds, in which other threads may wait."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def return_freed_memory(*, few_heaps: bool) -> None:
    """Have large buffers mapped each for itself, and with `few_heaps` threads share heaps (mallopt(3)).

    Left alone, the C library raises its threshold to the largest buffer that was freed, and has a heap for
    each thread. A connection by TLS has a buffer of 256 KiB, of which it uses little: mapped anew that takes
    little memory, in a heap it keeps all that others have used there before. What comes and goes with each
    commit is in smaller pieces, see `segment.PIECE`.
    """
    library = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        library.mallopt(_M_MMAP_THRESHOLD, 128 * 1024)
        library.mallopt(_M_TRIM_THRESHOLD, 1024 * 1024)  # left alone it follows the other one
        if few_heaps:
            library.mallopt(_M_ARENA_MAX, 2)
