"""The link of the gateway: what all connections of exporters share.

**Ceiling.** `[export] max_bandwidth` counts what exporters send: each byte that they hand to TCP, and each
that TCP sends again. That is HTTP and MQTT with headers, TLS with its handshakes, failed attempts and
retransmissions. It does not count answers, which come the other way, nor the headers of TCP and IP (52
bytes a packet: 3.6 % of full ones).

The ceiling holds within a request, in pieces of a twentieth of a second. Connections take turns. While a
batch is made and an answer is awaited, nothing is sent: a link makes up for half a second of that at most,
at 1.05 times the ceiling, and for a tenth of a second at once, because threads wake up late. A
connection that waits for its turn is not dead, so no time-out runs while it waits.

A piece is charged before it is sent. Afterwards the kernel says what the connection has really sent
(TCP_INFO, in Linux 4.19 and later), and the difference is charged too. Older kernels count without TLS and
retransmissions.

**Dead connections.** A NAT may forget a connection, or a modem may get another address: packets then vanish
without a reset. TCP alone notices that after a quarter of an hour, and answers are awaited for a minute.
Here a connection ends with ETIMEDOUT when the other end's TCP does not acknowledge data for `PATIENCE`
(TCP_USER_TIMEOUT) or, while an answer is awaited, probes (SO_KEEPALIVE). An idle connection is not probed,
since that costs bytes. One that was idle for `IDLE` is not used again. Neither is one that has shown no sign
of life since another one died: what a NAT or a modem forgets, it forgets for all.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE = 15.0  # seconds without a sign of life of the other end's TCP
IDLE = 60.0  # seconds; NATs of cellular networks forget connections after one to five minutes
PIECE = 0.05  # seconds of the ceiling that are sent at once
LEAST, MOST = 512, 16 * 1024  # bytes of a piece
SAVED, PEAK = 0.5, 1.05  # seconds of the ceiling that an idle link makes up for, and how fast
LATE = 0.1  # seconds of these at once
RECENT = 0.25  # seconds
# struct tcp_info of linux/tcp.h: where tcpi_notsent_bytes and tcpi_bytes_sent are
_NOT_SENT, _SENT, _INFO = struct.Struct("I"), struct.Struct("Q"), 256
_NOT_SENT_AT, _SENT_AT = 144, 200


class Link:
    """The ceiling, shared by all threads, and when connections are dead. Times are monotonic seconds."""

    def __init__(
        self,
        ceiling: int | None = None,
        working: Callable[[], None] = lambda: None,
        *,
        patience: float = PATIENCE,
        idle: float = IDLE,
    ) -> None:
        """`ceiling` is in bits per second. `working` is called each second while a thread waits."""
        self._ceiling, self._working = ceiling, working
        self.patience, self.idle = patience, idle
        self.lost_at = -math.inf  # connections without a sign of life since then are not used again
        self._lock = threading.Lock()
        self._free_at = self._peak_at = 0.0  # when all charged bytes are sent: at the ceiling, at the peak
        self._waited_at = -math.inf  # when a connection last had to
        self.piece = max(LEAST, min(int(ceiling / 8 * PIECE), MOST)) if ceiling else MOST

    @property
    def limited(self) -> bool:
        """Whether there is a ceiling."""
        return self._ceiling is not None

    def died(self) -> None:
        """A connection has shown no sign of life for `patience`."""
        self.lost_at = time.monotonic() - self.patience

    @property
    def busy(self) -> bool:
        """Whether a connection had to wait for its turn a moment ago."""
        return self._waited_at > time.monotonic() - RECENT

    def reserve(self, size: int) -> float:
        """Charge `size` bytes, and return when they may be sent. The caller waits until then."""
        if self._ceiling is None:
            return 0.0
        seconds = size * 8 / self._ceiling
        with self._lock:
            now = time.monotonic()
            at, peak_at = max(self._free_at, now - SAVED), max(self._peak_at, now - LATE)
            self._free_at, self._peak_at = at + seconds, peak_at + seconds / PEAK
            if max(at, peak_at) > now:
                self._waited_at = now
        return max(at, peak_at)

    def charge(self, size: int) -> float:
        """Charge `size` bytes that were sent already, and return when the link is free again.

        Less than 0 gives some back.
        """
        self.reserve(size)
        return self._free_at

    def take(self, size: int) -> None:
        """Wait until `size` bytes may be sent, and charge them."""
        self.wait(self.reserve(size))

    def wait(self, at: float) -> None:
        """Wait until a time that `reserve` has returned."""
        while (wait := at - time.monotonic()) > 0:
            time.sleep(min(wait, 1.0))
            self._working()


UNLIMITED = Link()


class Meter:
    """Counts and paces what one connection sends; `sock` is connected, with TLS if it has that.

    Use either `pieces`, which waits, or `grant`, `wait` and `settle`, for a socket that does not block.
    """

    def __init__(self, link: Link, sock: Any) -> None:
        self._link, self._sock = link, sock
        self._charged = 0  # bytes so far
        self._granted = 0  # of these, not sent yet
        self._at = 0.0  # when these may be sent

    def pieces(self, data: Any) -> Iterator[Any]:
        """Split bytes, and wait for the turn of each piece."""
        if not self._link.limited:
            yield data
            return
        view = memoryview(data)
        while view:
            if size := self.grant(len(view)):
                yield view[:size]
                view = view[size:]
                self.settle()
            else:
                self._link.wait(self._at)

    def grant(self, size: int) -> int:
        """How many of `size` bytes may be sent now; 0: none before `wait`."""
        if not self._link.limited:
            return size
        if not self._granted:  # a whole piece, so that small requests get as many bytes as large ones
            self._granted = self._link.piece
            self._charged += self._granted
            self._at = self._link.reserve(self._granted)
        if self.wait() > 0:
            return 0
        granted = min(self._granted, size)
        self._granted -= granted
        return granted

    def wait(self) -> float:
        """Return the seconds until the granted bytes may be sent."""
        return max(self._at - time.monotonic(), 0.0) if self._granted else 0.0

    def close(self) -> None:
        """Give back granted bytes that were not sent."""
        self._link.charge(-self._granted)
        self._charged, self._granted = self._charged - self._granted, 0

    def settle(self) -> None:
        """Charge bytes that the kernel has sent beyond those charged. Call it after a write."""
        if self._link.limited and (sent := _sent(self._sock)) is not None:
            more = sent - (self._charged - self._granted)
            self._link.charge(more)
            self._charged += more


def _sent(sock: Any) -> int | None:
    """Return the bytes that a connection has sent and queued; None if the kernel does not say."""
    try:
        found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO)
        queued, sent = _NOT_SENT.unpack_from(found, _NOT_SENT_AT)[0], _SENT.unpack_from(found, _SENT_AT)[0]
    except (OSError, AttributeError, struct.error):  # TLS through a TLS proxy has no such method
        return None
    return int(queued + sent)


def prepare(sock: Any, patience: float) -> None:
    """Have a connection end when the other end's TCP shows no sign of life for `patience` seconds."""
    between = max(int(patience / 3), 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(patience * 1000))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, between)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between)


def probe(sock: Any, on: bool) -> None:
    """Turn the probes of a prepared connection on or off."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, on)
