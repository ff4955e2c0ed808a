"""An HTTP proxy that knows nothing but CONNECT, as those that stand before TLS do, and a slow link."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress
from urllib.parse import urlsplit


class Proxy:
    """Tunnels; `asked` are the ports that were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += client.recv(1)
                method, place, _ = head.split(b" ", 2)
                assert method == b"CONNECT", head
                port = int(place.rpartition(b":")[2])
                self.asked.append(port)
                server = socket.create_connection(("127.0.0.1", port))
                self._open += [client, server]
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                for pair in ((client, server), (server, client)):
                    self._threads.append(threading.Thread(target=self._pump, args=pair))
                    self._threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


class Link:
    """A slow link to `url` that is up and down in turn; what is on it when it goes down is reset.

    `rate` is what passes from the client's side in bytes per second, `up` and `down` are seconds;
    `down` 0 is a link that stays up. `sent` counts what the client's side has put on it.
    """

    PIECE = 4096
    RESET = struct.pack("ii", 1, 0)

    def __init__(self, url: str, rate: float, up: float = 1.0, down: float = 0.0) -> None:
        self._rate, self._up, self._down = rate, up, down
        target = urlsplit(url)
        self._target = ("127.0.0.1", target.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        # What is not through stays with who sends it.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.PIECE)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = 0
        self._free_at = 0.0  # when the next piece may pass
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_up = True
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=run) for run in (self._accept, self._switch)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._reset()
        for thread in self._threads:
            thread.join()

    def _switch(self) -> None:
        while self._down and not self._ended.wait(self._up):
            self._is_up = False
            self._reset()
            self._ended.wait(self._down)
            self._is_up = True

    def _reset(self) -> None:
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, self.RESET)
                    one.shutdown(socket.SHUT_RD)  # wakes who reads; it closes
            self._open.clear()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if not self._is_up:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, self.RESET)
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                for one in (client, server):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._open |= {client, server}
                ends = [0, threading.Lock()]
                for pair in ((client, server), (server, client)):
                    self._threads.append(
                        threading.Thread(target=self._pump, args=(*pair, pair[0] is client, ends))
                    )
                    self._threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool, ends: list) -> None:
        with suppress(OSError):
            while data := source.recv(self.PIECE):
                if counted:
                    self._pace(len(data))
                if source not in self._open:
                    break
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        with ends[1]:
            ends[0] += 1
            last = ends[0] == 2
        if last:
            with self._lock:
                self._open -= {source, sink}
            source.close()
            sink.close()

    def _pace(self, size: int) -> None:
        with self._lock:
            self.sent += size
            self._free_at = max(self._free_at, time.monotonic()) + size / self._rate
            wait = self._free_at - time.monotonic()
        self._ended.wait(max(wait, 0))
