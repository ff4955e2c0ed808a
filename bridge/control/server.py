"""The service's side of the control socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.access.rules import command
from bridge.control import HEADER, MAX_FRAME, SOCKET, address
from bridge.errors import ConfigError
from bridge.operations.codec import answer

if TYPE_CHECKING:
    from bridge.access.rules import Identity
    from bridge.operations.catalog import Operations

BACKLOG = 64


def _remove_stale(path: Path) -> None:
    """Remove the socket that a killed service has left behind; raises ConfigError if it may be data.

    After a power cut, a file system that does not order its writes (ext2, ext4 without a journal) may show
    the socket as an empty file or as an empty directory.
    """
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and not any(path.iterdir()):
            path.rmdir()
        elif stat.S_ISSOCK(found.st_mode) or (stat.S_ISREG(found.st_mode) and not found.st_size):
            path.unlink()
        else:
            raise ConfigError(f"{path} is not a socket; move it away")


def _caller(writer: asyncio.StreamWriter) -> Identity:
    """Who has connected: a process of root or of the service's user, with its ids (SO_PEERCRED)."""
    credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", credentials)
    return command(f"uid {uid}, pid {pid}")


class ControlFrontEnd:
    """The listener and its connections."""

    def __init__(self, operations: Operations, data_dir: Path) -> None:
        self._operations, self._data_dir = operations, data_dir
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> list[str]:
        """Listen; returns the url. Raises ConfigError or OSError."""
        self._server = await asyncio.start_unix_server(
            self._serve, sock=self._unix_socket(), backlog=BACKLOG, limit=1024 * 1024
        )
        return [f"unix://{self._data_dir / SOCKET}"]

    async def stop(self) -> None:
        """Stop accepting connections and requests."""
        if self._server is None:
            return
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        (self._data_dir / SOCKET).unlink(missing_ok=True)
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._server is None:  # accepted just before the stop
            writer.close()
            return
        self._tasks.add(task)
        caller = _caller(writer)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, UnicodeDecodeError):
                while True:
                    size = int.from_bytes(await reader.readexactly(HEADER), "big")
                    if not 1 <= size <= MAX_FRAME:
                        return
                    request = await reader.readexactly(size)
                    end = 1 + request[0]
                    name, body = request[1:end].decode("ascii"), request[end:]
                    reply = await answer(self._operations, name, body, MAX_FRAME, caller)
                    writer.write(len(reply).to_bytes(HEADER, "big") + reply)
                    await writer.drain()
        finally:
            self._tasks.discard(task)
            writer.close()

    def _unix_socket(self) -> socket.socket:
        """A socket bound to its name in the data directory. We hold the directory's lock."""
        _remove_stale(self._data_dir / SOCKET)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            os.fchmod(listener.fileno(), 0o600)  # before the bind: the name never has another mode
            with address(self._data_dir) as name:
                listener.bind(name)
        except BaseException:
            listener.close()
            raise
        return listener
