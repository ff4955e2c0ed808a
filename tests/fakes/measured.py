"""What something costs on a machine that runs other things and may stand still for seconds.

What else happens on the machine only adds to a measurement. So a bound holds for the least of several.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

ATTEMPTS = 5
STEPS = 500_000


def plain_loop() -> float:
    """Seconds of CPU that a plain loop of STEPS takes here and now: what other work is compared with."""
    began = time.thread_time()
    for _ in range(STEPS):
        pass
    return time.thread_time() - began


def least(measure: Callable[[], float], below: float, attempts: int = ATTEMPTS) -> float:
    """The least of several measurements; the first one below `below` is the last."""
    found = measure()
    for _ in range(attempts - 1):
        if found < below:
            break
        found = min(found, measure())
    return found


async def least_of(measure: Callable[[], Awaitable[float]], below: float, attempts: int = ATTEMPTS) -> float:
    """As `least`, of a coroutine."""
    found = await measure()
    for _ in range(attempts - 1):
        if found < below:
            break
        found = min(found, await measure())
    return found
