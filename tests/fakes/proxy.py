"""An HTTP proxy that knows nothing but CONNECT, as those that stand before TLS do."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


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
