"""The command line's side of the control socket."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Self

from bridge.control import HEADER, MAX_FRAME, SOCKET, address
from bridge.errors import StreamBridgeError

TIMEOUT = 120.0  # seconds; a purge by topic reads the whole stream


class Control:
    """A connection to the running service."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def connect(cls, data_dir: Path) -> Self | None:
        """Connect to the service that uses a data directory; None if none runs. Raises OSError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(TIMEOUT)
        with address(data_dir) as name:
            try:
                connection.connect(name)
            except OSError as error:
                connection.close()
                if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
                    return None
                raise OSError(error.errno, error.strerror, str(data_dir / SOCKET)) from None
        return cls(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, operation: str, body: bytes) -> bytes:
        """Request an operation; returns the encoded reply.

        Raises StreamBridgeError without a whole reply: it is then unknown whether it was carried out.
        """
        name = operation.encode("ascii")
        request = bytes((len(name),)) + name + body
        if len(request) > MAX_FRAME:
            raise StreamBridgeError(
                f"{operation}: a request may have at most {MAX_FRAME} bytes; send smaller messages"
            )
        try:
            self._socket.sendall(len(request).to_bytes(HEADER, "big") + request)
            return self._receive(int.from_bytes(self._receive(HEADER), "big"))
        except (ConnectionError, TimeoutError):
            raise StreamBridgeError(
                "the connection ended without a reply; check whether the operation was carried out"
            ) from None

    def _receive(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            piece = self._socket.recv(min(size - len(received), 1 << 20))
            if not piece:
                raise ConnectionResetError
            received += piece
        return bytes(received)
