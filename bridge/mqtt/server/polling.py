"""Checks the sockets again before the event loop sleeps, while one client waits for each answer.

A local program that publishes one message after the other sends the next message about ten microseconds after
it gets the acknowledgement of the last. If the event loop sleeps by then, it takes longer to wake than to
handle the message. So if two turns in a row had one read each, both from the same connection, and it was
answered, the loop takes up to `TURNS` more turns without sleeping. They take about 100 microseconds. Turns
are counted, not timed, because on a slow machine both the turns and the program take longer.

A device behind a network answers later. After an attempt without success, the next 1, 3, 7 and so on up to 63
chances are skipped. So this costs at most one microsecond per message on average.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.runtime import Timer

TURNS = 96
MAX_FAILURES = 6


class Polling:
    """Decides whether the loop takes another turn before it sleeps."""

    def __init__(self, soon: Callable[[Callable[[], None]], Timer]) -> None:
        """`soon` is that of a `Runtime`. The loop does not sleep before it has called what `soon` got."""
        self._soon = soon
        self._last = 0
        self._left = 0  # turns left without sleeping
        self._failures = self._skip = 0

    def answered(self, source: int) -> None:
        """A turn had one read, from the connection with this `id`, and it was answered.

        0: the turn was different.
        """
        same, self._last = source == self._last, source
        if self._left:
            self._failures = 0
            self._left = TURNS if same else 1
        elif same and source:
            if self._skip:
                self._skip -= 1
            else:
                self._left = TURNS
                self._soon(self._turn)

    def _turn(self) -> None:
        self._left -= 1
        if self._left:
            self._soon(self._turn)
        else:
            self._failures = min(self._failures + 1, MAX_FAILURES)
            self._skip = 2**self._failures - 1
