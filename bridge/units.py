"""Sizes and durations in text form: "256MiB", "1.5s", "7d".

Sizes are in bytes; the units are powers of 1000 (kB, MB, GB, TB) or 1024 (KiB, MiB, GiB, TiB). Durations are
in milliseconds: ms, s, m, h, d. Times are ISO 8601, or a duration ago.
"""

from __future__ import annotations

import math
import re
import time
from contextlib import suppress
from datetime import datetime

SIZES = {"B": 1}
for _power, _letter in enumerate("KMGT", 1):
    SIZES["kB" if _letter == "K" else f"{_letter}B"] = 1000**_power
    SIZES[f"{_letter}iB"] = 1024**_power
DURATIONS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)")


def parse_size(text: str) -> int:
    """Parse "256MiB" as bytes; raises ValueError."""
    return _parse(text, SIZES, 'a size such as 512, "64KiB" or "1.5GB"')


def parse_duration(text: str) -> int:
    """Parse "1.5s" as milliseconds; raises ValueError."""
    return _parse(text, DURATIONS, 'a duration such as 1500, "1.5s", "10m" or "7d"')


def parse_rate(text: str) -> float:
    """Parse "10/s", "5/m" or "1000/h" as a number per second; raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/(s|m|min|h))?", text.strip())
    if found is None or not float(found[1]):
        raise ValueError('expected a rate such as "10/s", "5/m" or "1000/h"')
    return float(found[1]) / {None: 1, "s": 1, "m": 60, "min": 60, "h": 3600}[found[2]]


def parse_time(text: str) -> int:
    """Parse a time as Unix ms: ISO 8601 (local without a zone), or a duration ago ("10m", "10m ago")."""
    with suppress(ValueError):
        return int(time.time() * 1000) - parse_duration(text.strip().removesuffix("ago"))
    try:
        return int(datetime.fromisoformat(text.strip()).timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise ValueError("is not a time such as 2026-01-31T12:00:00Z, 90s, 10m ago, 2h or 7d") from None


def _parse(text: str, units: dict[str, int], wanted: str) -> int:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None or found[2] not in units:
        raise ValueError(f"expected {wanted} (units: {', '.join(units)})")
    value = float(found[1]) * units[found[2]]
    if math.isinf(value):
        raise ValueError("is too large")
    if value != int(value):
        raise ValueError(f"is not a whole number of {'bytes' if units is SIZES else 'milliseconds'}")
    return int(value)


def format_size(size: int) -> str:
    """Format bytes with the largest binary unit: 1536 as "1.5 KiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def format_duration(millis: int) -> str:
    """Format milliseconds with the largest unit that fits: 90000 as "1.5m"."""
    unit, length = next(
        ((unit, length) for unit, length in reversed(DURATIONS.items()) if abs(millis) >= length), ("ms", 1)
    )
    return f"{millis / length:.4g}{unit}"
