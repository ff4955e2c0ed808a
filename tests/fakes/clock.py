"""A machine whose clocks a test sets: time passes, the wall clock is stepped, the power goes."""

from __future__ import annotations

import time

from bridge.clock import System

SECOND = 1_000_000_000
DAY = 86_400.0
NOON_2026 = 1_767_268_800.0  # 2026-01-01 12:00 UTC, Unix time in s


class Machine(System):
    """Clocks that stand still but for `sleep` and what is set. Times in seconds."""

    def __init__(self, wall: float = NOON_2026, *, synchronised: bool = True) -> None:
        self.boot, self.boots, self.synced = "boot-0", 0, synchronised
        self._wall, self._boottime = int(wall * SECOND), 100 * SECOND

    def wall(self) -> int:
        return self._wall

    def boottime(self) -> int:
        return self._boottime

    def synchronised(self) -> bool:
        return self.synced

    def sleep(self, seconds: float) -> None:
        """Time passes on both clocks."""
        self._wall += int(seconds * SECOND)
        self._boottime += int(seconds * SECOND)

    def set_wall(self, wall: float, *, synchronised: bool = True) -> None:
        """Somebody sets the wall clock: NTP, or a person."""
        self._wall, self.synced = int(wall * SECOND), synchronised

    def step(self, seconds: float) -> None:
        """The wall clock jumps by so much."""
        self._wall += int(seconds * SECOND)

    def reboot(self, wall: float | None = None, *, off: float = 0, synchronised: bool = False) -> None:
        """The power goes for `off` seconds; then the wall clock says `wall`, or the right time if None."""
        self.boots += 1
        self.boot = f"boot-{self.boots}"
        self._wall = self._wall + int(off * SECOND) if wall is None else int(wall * SECOND)
        self._boottime, self.synced = 10 * SECOND, synchronised


class Shifted(System):
    """The real clocks, but for what a test has added to them, and whether they are synchronised."""

    def __init__(self, boot: str | None = None, *, synchronised: bool = True) -> None:
        super().__init__()
        self.boot = self.boot if boot is None else boot
        self.passed, self.stepped, self.synced = 0.0, 0.0, synchronised

    def wall(self) -> int:
        return time.time_ns() + int((self.passed + self.stepped) * SECOND)

    def boottime(self) -> int:
        return super().boottime() + int(self.passed * SECOND)

    def synchronised(self) -> bool:
        return self.synced

    def sleep(self, seconds: float) -> None:
        """Time passes on both clocks."""
        self.passed += seconds

    def step(self, seconds: float) -> None:
        """The wall clock jumps by so much."""
        self.stepped += seconds
