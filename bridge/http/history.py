"""The last hour in steps of 20 s: one column of numbers for each line in a chart.

What it promises: its size depends on the current streams and exports, not on time. A column takes 1.4 KB and
keeps `KEPT` values; a column without a value for an hour is deleted. Counters are stored as they are, and
charts use differences, so a missed step loses nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from math import nan

STEP = 20.0  # seconds
KEPT = 180

Key = tuple[str, ...]


class History:
    """Columns by key, all of the same length as `times`."""

    def __init__(self) -> None:
        self._times = array("q", bytes(8 * KEPT))
        self._columns: dict[Key, array[float]] = {}
        self._count = 0
        self._gone: dict[Key, int] = {}  # columns without a current value, and since which step

    def add(self, time: int, values: Mapping[Key, float]) -> None:
        """Add a step at a Unix time in ms."""
        slot = self._count % KEPT
        self._times[slot] = time
        gone = self._gone
        for key in values.keys() - self._columns.keys():
            self._columns[key] = array("d", [nan]) * KEPT
        for key, column in self._columns.items():
            value = values.get(key, nan)
            column[slot] = value
            if value != value:
                gone.setdefault(key, self._count)
            elif gone:
                gone.pop(key, None)
        self._count += 1
        for key in [key for key, since in gone.items() if self._count - since >= KEPT]:
            del self._columns[key], gone[key]

    def times(self) -> list[int]:
        """The steps, Unix time in ms, oldest first."""
        return self._in_order(self._times)

    def column(self, *key: str) -> list[float]:
        """Return the values of a column, oldest first; NaN where there is none."""
        known = self._columns.get(key)
        return [nan] * min(self._count, KEPT) if known is None else self._in_order(known)

    def columns(self, *beginning: str) -> dict[Key, list[float]]:
        """Return the columns whose keys have this prefix, by the rest of the key."""
        length = len(beginning)
        found = (key for key in self._columns if key[:length] == beginning)
        return {key[length:]: self.column(*key) for key in found}

    def _in_order(self, ring: Iterable[float]) -> list:  # type: ignore[type-arg]
        values = list(ring)
        slot = self._count % KEPT
        return values[:slot] if self._count < KEPT else values[slot:] + values[:slot]
