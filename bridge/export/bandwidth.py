"""The bandwidth ceiling that all exports share: each batch is charged, and the next one waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Bandwidth:
    """A ceiling in bits per second, on average; None: no ceiling. Times are monotonic seconds."""

    def __init__(self, ceiling: int | None) -> None:
        self._ceiling = ceiling
        self._lock = threading.Lock()
        self._stopping = False
        self.free_at = 0.0  # when the next batch may go

    def charge(self, size: int) -> float:
        """Count `size` bytes that are sent now; return the seconds that they take at the ceiling."""
        if self._ceiling is None:
            return 0.0
        seconds = size * 8 / self._ceiling
        with self._lock:
            self.free_at = max(self.free_at, time.monotonic()) + seconds
        return seconds

    def give_back(self, seconds: float) -> None:
        """Undo a charge: nothing was sent."""
        with self._lock:
            self.free_at -= seconds

    def wait(self, working: Callable[[], None]) -> None:
        """Wait until more may be sent, or until `stop`; call `working` each second."""
        while (wait := self.free_at - time.monotonic()) > 0 and not self._stopping:
            time.sleep(min(wait, 1.0))
            working()

    def stop(self) -> None:
        """End all waits."""
        self._stopping = True
