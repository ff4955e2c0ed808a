"""Flow control of every front end's connections: hold and release reading, close with FIN.

A connection is read while nothing holds it. Each hold has a name and is released by name, so two parts of a
front end do not undo each other's pause. One hold is for writing: if a peer does not read its replies, we do
not read from it.

To close a connection, we send FIN and discard further input until the peer closes. Closing a socket with
unread bytes would reset it, and the peer would lose our last bytes (RFC 9112 section 9.6).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.runtime import Timer

NONE: frozenset[str] = frozenset()
QUIET = 1.0  # seconds of silence after our FIN until the connection is closed


class Flow(asyncio.Protocol):
    """The base of a connection. A subclass sets `transport` and `_timer` when the connection is made.

    `_timer` ends the current phase of the connection. The code that handles packets reads `holds` directly,
    which saves a call per packet.
    """

    __slots__ = ("_over", "_timer", "holds", "transport")
    transport: asyncio.Transport
    _timer: Timer

    def __init__(self) -> None:
        self.holds = NONE  # shared by all connections that are read, so that it stays in the cache
        self._over = 0.0  # after our FIN: the latest time (of the loop) to close the connection

    # -- reading ------------------------------------------------------------

    def hold(self, why: str) -> None:
        """Stop reading until `release` has been called for every reason."""
        if self._over:
            return
        if not self.holds and not self.transport.is_closing():
            self.transport.pause_reading()
        self.holds |= {why}

    def release(self, why: str) -> None:
        """Resume reading if this was the last hold."""
        if why not in self.holds:
            return
        self.holds = self.holds - {why} or NONE
        if self.holds or self._over:
            return
        self.proceed()
        if not self.holds and not self.transport.is_closing():
            self.transport.resume_reading()

    def proceed(self) -> None:
        """Handle bytes read before the hold. May hold again."""
        raise NotImplementedError

    def pause_writing(self) -> None:
        self.hold("writes")

    def resume_writing(self) -> None:
        self.release("writes")

    # -- the end ------------------------------------------------------------

    def finish(self, within: float) -> None:
        """Send pending output and FIN. Close when the peer is silent for `QUIET`, or after `within` seconds.

        A peer that has not read everything by then gets a reset. TLS cannot close only one half, so a TLS
        connection is closed once everything is sent.
        """
        if self._over or self.transport.is_closing():
            return
        self._over = asyncio.get_running_loop().time() + within
        if not self.transport.can_write_eof():
            self._timer.cancel()
            self.transport.close()
            self._timer = asyncio.get_running_loop().call_later(within, self.transport.abort)
            return
        with contextlib.suppress(OSError):  # the peer may just have disconnected
            self.transport.write_eof()
        if self.holds:
            self.transport.resume_reading()
        self.discard()

    def discard(self) -> None:
        """Restart the timer of `QUIET`: FIN was sent, or data arrived after it."""
        if self.transport.is_closing():
            return
        self._timer.cancel()
        left = self._over - asyncio.get_running_loop().time()
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(min(QUIET, left), self._silent)
        else:
            self._silent()

    def _silent(self) -> None:
        if not self.transport.get_write_buffer_size():
            self.transport.close()
        elif asyncio.get_running_loop().time() < self._over:
            self.discard()
        else:
            self.transport.abort()
