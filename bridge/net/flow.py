"""What the connections of every front end do with their transport: hold and release reading, end with FIN.

A connection is read from while nothing holds it. Each reason is held by name and released by name, so that
two parts of a front end do not undo each other's pause. One of them is writing: a peer that does not take
what it is sent is not read from.

A connection ends with FIN: our half is closed first, and what still comes is thrown away until the peer
closes. A socket that is closed with unread bytes is reset, and the peer loses our last words (RFC 9112
section 9.6).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.runtime import Timer

QUIET = 1.0  # seconds of silence after our FIN until the connection is closed


class Flow(asyncio.Protocol):
    """The base of a connection. A subclass sets `transport` and `_timer` when the connection is made.

    `_timer` ends the present phase of the connection, whichever it is. The code that handles packets looks at
    `_holds` itself, so that a packet costs no call.
    """

    __slots__ = ("_holds", "_over", "_timer", "transport")
    transport: asyncio.Transport
    _timer: Timer

    def __init__(self) -> None:
        self._holds: set[str] = set()
        self._over = (
            0.0  # once our FIN is sent: when the connection is closed in any case, by the loop's time
        )

    # -- reading ------------------------------------------------------------

    def hold(self, why: str) -> None:
        """Stop reading until `release` has been called for every reason."""
        if self._over:
            return
        if not self._holds and not self.transport.is_closing():
            self.transport.pause_reading()
        self._holds.add(why)

    def release(self, why: str) -> None:
        """Go on, if this was the last reason not to."""
        if why not in self._holds:
            return
        self._holds.discard(why)
        if self._holds or self._over:
            return
        self.proceed()
        if not self._holds and not self.transport.is_closing():
            self.transport.resume_reading()

    def proceed(self) -> None:
        """Handle what was read before the hold; it may hold again."""
        raise NotImplementedError

    def pause_writing(self) -> None:
        self.hold("writes")

    def resume_writing(self) -> None:
        self.release("writes")

    # -- the end ------------------------------------------------------------

    def finish(self, within: float) -> None:
        """Send what is written and FIN; close when the peer is silent for `QUIET`, or after `within` seconds.

        A peer that has not taken everything by then is reset.
        """
        if self._over or self.transport.is_closing():
            return
        self._over = asyncio.get_running_loop().time() + within
        with contextlib.suppress(OSError):  # the peer may have gone this very moment
            self.transport.write_eof()
        if self._holds:
            self.transport.resume_reading()
        self.discard()

    def discard(self) -> None:
        """Something came after our FIN, or FIN is sent: the silence begins anew."""
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
