"""Checks whether the table is up to date: the age of its newest row, from the state alone.

It lists no objects and reads no rows, so it can run every minute, on any machine that can reach the table.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from bridge.ingest.errors import BadOption
from bridge.ingest.sinks.base import Sink
from bridge.ingest.state import load_state

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}


@dataclass(slots=True)
class Age:
    """The age of the newest row in seconds, and the gateways whose newest row is too old; None: no row.

    A row from the future does not count: one of a wrong clock would keep the alarm silent for years.
    """

    age_seconds: float | None
    limit_seconds: float
    late: dict[str, float | None]  # age in seconds by gateway, the oldest first
    gateways: int

    @property
    def too_old(self) -> bool:
        return self.age_seconds is None or self.age_seconds > self.limit_seconds


def seconds(text: str) -> float:
    """Return the seconds of `15min`, `2h`, `90s` or `1d`. Raises BadOption."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)", text.strip(), re.ASCII)
    if found is None:
        raise BadOption(f"--older-than {text}: write it like 90s, 15min, 2h or 1d")
    return float(found[1]) * UNITS[found[2]]


def newest_row(sink: Sink, limit: float, clock: Callable[[], float] = time.time) -> Age:
    """Compare the newest rows with the limit, in seconds; `clock` gives Unix time in seconds."""
    newest: dict[str, int | None] = {}
    now = clock()
    for name, stream in load_state(sink).streams.items():
        if stream.covered:
            times = (stream.newest(int(now * 1000)), newest.get(name.gateway))
            newest[name.gateway] = max((ms for ms in times if ms is not None), default=None)
    ages = {gateway: None if ms is None else round(now - ms / 1000, 3) for gateway, ms in newest.items()}
    known = {gateway: age for gateway, age in ages.items() if age is not None}
    late = sorted(gateway for gateway in ages if known.get(gateway, math.inf) > limit)
    late.sort(key=lambda gateway: known.get(gateway, math.inf), reverse=True)
    return Age(min(known.values(), default=None), limit, {name: ages[name] for name in late}, len(ages))
