"""Memory that is free, given back to the system; only glibc keeps it, elsewhere nothing happens.

What a storm of reconnects or a large batch has used stays with the process, in holes between what is still in
use: 180 devices that came back four times by TLS made 47 MiB into 94, of which 50 were in use.
"""

from __future__ import annotations

import contextlib
import ctypes

TRIM_INTERVAL = 60.0  # seconds
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def trim() -> None:
    """Give back what is free now (malloc_trim(3)): some milliseconds, in which other threads may wait."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_little(*, few_heaps: bool) -> None:
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
