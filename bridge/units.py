"""Sizes and durations as people write them: "256MiB", "1.5s", "7d".

Sizes are bytes; kB, MB, GB, TB count in thousands, KiB, MiB, GiB, TiB in 1024. Durations are
milliseconds: ms, s, m, h, d.
"""

from __future__ import annotations

import re

_SIZES = {"B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _SIZES["kB" if _letter == "K" else f"{_letter}B"] = 1000**_power
    _SIZES[f"{_letter}iB"] = 1024**_power
_DURATIONS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)")


def parse_size(text: str) -> int:
    """Read "256MiB" as bytes."""
    return _parse(text, _SIZES, 'a size such as 512, "64KiB" or "1.5GB"')


def parse_duration(text: str) -> int:
    """Read "1.5s" as milliseconds."""
    return _parse(text, _DURATIONS, 'a duration such as 1500, "1.5s", "10m" or "7d"')


def _parse(text: str, units: dict[str, int], wanted: str) -> int:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None or found[2] not in units:
        raise ValueError(f"expected {wanted} (units: {', '.join(units)})")
    value = float(found[1]) * units[found[2]]
    if value != int(value):
        raise ValueError(f"is not a whole number of {'bytes' if units is _SIZES else 'milliseconds'}")
    return int(value)


def format_size(size: int) -> str:
    """Write bytes with the largest binary unit: 1536 as "1.5 KiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def format_duration(millis: int) -> str:
    """Write milliseconds with the largest unit that fits: 90000 as "1.5m"."""
    unit, length = next(
        ((unit, length) for unit, length in reversed(_DURATIONS.items()) if abs(millis) >= length), ("ms", 1)
    )
    return f"{millis / length:.4g}{unit}"
