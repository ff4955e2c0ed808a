"""How the service shares the CPU with its export worker, and its event loop the interpreter with its threads.

The service is woken for every packet, and done in microseconds; the worker compresses for seconds. From
Linux 6.12 on a process may say how long it wants to run at a time, and who wants less goes first
(sched_setattr(2), `sched_runtime` of an ordinary process, 0.1 to 100 ms). On two cores that are both busy
exporting, a message in a hundred waits for 2.5 ms without that, and for 0.6 ms with it, as it does
without exports (`benchmarks.export`). Where the kernel does not know it or forbids it, nothing happens.

A thread that has written a group asks for the interpreter to begin the sync, and again to tell of its
end. The loop, which holds it while it goes through what a socket brought, hears of that after the
interpreter's switch interval: 5 ms if nothing is said, and a good disk has synced in 0.1.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}  # the call's number, in 64 bits
_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def prompt() -> None:
    """Have this thread, and those that it starts, run soon after they are woken or ask for the GIL."""
    sys.setswitchinterval(50e-6)
    _run_for(100_000)


def polite() -> None:
    """Have this process come after others, and run for as long at a time as the kernel likes."""
    os.nice(5)
    _run_for(0)


def _run_for(nanoseconds: int) -> None:
    call = _SCHED_SETATTR.get(platform.machine())
    if call is not None and sys.maxsize > 2**32:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = _ATTR.pack(_ATTR.size, os.SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0)
        ctypes.CDLL(None).syscall(call, 0, attributes, 0)
