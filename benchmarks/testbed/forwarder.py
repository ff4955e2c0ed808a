"""A TCP forwarder that stands for the link. It can be shut or redirected, and then resets its connections."""

from __future__ import annotations

import ctypes
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

LATE = 0.1  # seconds
_SO_ATTACH_FILTER = 26  # asm-generic/socket.h
_RESET = struct.pack("ii", 1, 0)


def swallow(sock: socket.socket) -> None:
    """Have the kernel drop each packet that comes for a connection, unacknowledged and without a reset."""
    # linux/filter.h: one instruction, BPF_RET | BPF_K: of the packet, keep 0 bytes.
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


class Forwarder:
    """Forwards its own `url` to another one while it is open."""

    def __init__(self, url: str, rate: float = 0) -> None:
        """`rate` is what passes, in bytes per second; 0 is as fast as it goes."""
        self._seconds = 1 / rate if rate else 0.0
        target = urlsplit(url)
        self._target = ("127.0.0.1", target.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        if rate:  # what is on its way waits with who sends it, not here
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.open = True
        self.close_at: int | None = None  # it shuts when so many bytes have passed
        self.passed = 0  # bytes so far, both ways
        self.sent = 0  # of these, what those who connect have sent
        self._trouble = ""
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._servers: set[socket.socket] = set()
        self._mute: set[socket.socket] = set()  # that have said all, and still listen
        self._wake, self._waker = socket.socketpair()
        self._woken = threading.Event()
        self._ended = False
        self._pause = threading.Event()  # never set: a clock to wait by
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._ended = True
        self._waker.send(b"x")
        self._thread.join()
        for one in (*self._pairs, self._listener, self._wake, self._waker):
            one.close()

    @contextmanager
    def shut(self) -> Iterator[None]:
        self.open = False
        self._reset()
        try:
            yield
        finally:
            self.open = True

    @contextmanager
    def trouble(self, kind: str) -> Iterator[None]:
        """`silent`: nothing passes, nothing is reset. `deaf`: requests pass, and answers break the
        connection. `late`: answers take a while."""
        self._trouble = kind
        self._reset()
        try:
            yield
        finally:
            self._trouble = ""
            self._reset()

    def forget(self) -> None:
        """Let all packets of the open connections vanish, as a NAT does that forgets them. New ones work."""
        for one in self._pairs.keys() - self._servers:
            swallow(one)

    @contextmanager
    def leading_to(self, port: int) -> Iterator[None]:
        """Forward to another port of this machine instead."""
        before, self._target = self._target, ("127.0.0.1", port)
        self._reset()
        try:
            yield
        finally:
            self._target = before
            self._reset()

    def _reset(self) -> None:
        """Reset what is on it, and nothing that comes later."""
        self._woken.clear()
        self._waker.send(b"x")
        self._woken.wait(10)

    def _run(self) -> None:
        while not self._ended:
            speaking = self._pairs.keys() - self._mute
            ready, _, _ = select.select([self._listener, self._wake, *speaking], [], [])
            for one in ready:
                if one is self._wake:
                    self._wake.recv(100)
                    for other in list(self._pairs):
                        self._drop(other)
                    self._woken.set()
                elif one is self._listener:
                    self._accept()
                elif one in self._pairs:
                    self._forward(one)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            if not self.open:
                raise ConnectionError("shut")
            server = socket.create_connection(self._target)
        except OSError:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            client.close()
            return
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pairs[client], self._pairs[server] = server, client
        self._servers.add(server)

    def _forward(self, one: socket.socket) -> None:
        other = self._pairs[one]
        answers = one in self._servers
        try:
            data = one.recv(256 * 1024)
            if data and self._trouble == "silent":
                return
            if answers and self._trouble == "late":
                self._pause.wait(LATE)
            if answers and self._trouble == "deaf":
                raise ConnectionError("answers break the connection")
            if self.close_at is not None and data:
                self.close_at -= len(data)
                if self.close_at < 0:
                    self.close_at, self.open = None, False
                    raise ConnectionError("shut")
            if data:
                self.passed += len(data)
                self.sent += 0 if answers else len(data)
                self._pause.wait(len(data) * self._seconds)
                other.sendall(data)
            elif other in self._mute:
                self._drop(one, reset=False)
            else:  # a reset would take away what the other has not read yet
                self._mute.add(one)
                other.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop(one)

    def _drop(self, one: socket.socket, reset: bool = True) -> None:
        other = self._pairs.pop(one, None)
        if other is not None:
            self._pairs.pop(other, None)
            for end in (one, other):
                self._servers.discard(end)
                self._mute.discard(end)
                if reset:
                    with suppress(OSError):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.close()
