"""`GreengrassFrontEnd`: the Stream Manager protocol on TCP, and on a unix socket for the command line.

The unix socket, `<data_dir>/streambridge.sock`, is open to this user alone (mode 0600) and therefore
asks for no token; on it, `wire.COMMAND` brings the operations that the SDK does not know. On TCP, a
client must show the token that stands in `token_file` if one is configured: the file is read at each
connect, so that a token can be changed while running, and if it cannot be read or is empty, nobody is
let in.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bridge.addresses import host_and_port
from bridge.errors import ConfigError
from bridge.greengrass.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from bridge.manager import StreamManager

log = logging.getLogger(__name__)

Command = Callable[[str, bytes], Awaitable[bytes]]
SOCKET = "streambridge.sock"
MANY = 64 * 1024  # bytes of an unfinished frame from which on they are counted
PARTIAL_BYTES = 256 * 1024 * 1024  # that may wait in unfinished frames of all clients together
BACKLOG = 1024


class Settings(Protocol):
    """The section [greengrass] of the configuration."""

    @property
    def listen(self) -> str:
        """host:port; empty: no TCP."""

    @property
    def token_file(self) -> Path | None:
        """The file with the token that clients must show."""


class GreengrassFrontEnd:
    """The listeners, and what their connections share."""

    def __init__(self, config: Settings, manager: StreamManager, data_dir: Path, command: Command) -> None:
        """`command` carries out any operation by its name, encoded request in, encoded reply out."""
        self.command = command
        self._config, self.manager, self._data_dir = config, manager, data_dir
        self.connections: set[Connection] = set()
        self.counts: Counter[str] = Counter()
        self._servers: list[asyncio.Server] = []
        self.reading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._partial: dict[Connection, int] = {}
        self._waiting: list[Connection] = []

    async def start(self) -> list[str]:
        """Listen; returns the urls, port 0 resolved. Raises ConfigError or OSError."""
        self.manager.on_pressure.append(self._pressure)
        loop = asyncio.get_running_loop()
        urls = []
        if self._config.listen:
            host, port = host_and_port(self._config.listen)
            try:
                server = await loop.create_server(
                    partial(Connection, self, trusted=False), host, port, backlog=BACKLOG
                )
            except OSError as error:
                why = os.strerror(error.errno) if error.errno else str(error)
                raise OSError(error.errno, f"cannot listen on {self._config.listen}: {why}") from None
            self._servers.append(server)
            bound = server.sockets[0].getsockname()
            urls.append(f"tcp://{f'[{host}]' if ':' in host else host}:{bound[1]}")
        self._servers.append(
            await loop.create_unix_server(
                partial(Connection, self, trusted=True), sock=self._unix_socket(), backlog=BACKLOG
            )
        )
        return [*urls, f"unix://{self._data_dir / SOCKET}"]

    def _unix_socket(self) -> socket.socket:
        """Bound to our name in the data directory, which is ours: what is there is from a run that died."""
        path = self._data_dir / SOCKET
        if (path.exists() or path.is_symlink()) and not path.is_socket():
            raise ConfigError(f"{path} is in the way, since it is no socket; move it away")
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        # A unix address has room for 107 bytes, a path may be longer: name the directory by descriptor.
        directory = os.open(self._data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fchmod(listener.fileno(), 0o600)  # before the bind, so that the name never has another mode
            listener.bind(f"/proc/self/fd/{directory}/{SOCKET}")
        except BaseException:
            listener.close()
            raise
        finally:
            os.close(directory)
        return listener

    async def stop(self) -> None:
        """Accept nobody any more; what was read is committed and answered, then every connection ends."""
        for server in self._servers:
            server.close()
        connections = list(self.connections)
        await asyncio.gather(*(connection.stop() for connection in connections))
        await asyncio.gather(*(connection.closed for connection in connections), *self._tasks)
        with contextlib.suppress(ValueError):
            self.manager.on_pressure.remove(self._pressure)
        if self._servers:
            (self._data_dir / SOCKET).unlink(missing_ok=True)
        self._servers.clear()

    def stats(self) -> dict[str, int]:
        """Connections now, and counters since the start."""
        return {"connections": len(self.connections), **self.counts}

    # -- for the connections ------------------------------------------------------------
    def admits(self, token: str) -> bool:
        """Whether a client with this token may come in."""
        path = self._config.token_file
        if path is None:
            return True
        try:
            wanted = path.read_bytes().strip()
        except OSError as error:
            log.error("greengrass.token_file cannot be read, so nobody is let in: %s", error)
            return False
        if not wanted:
            log.error("greengrass.token_file is empty, so nobody is let in: %s", path)
            return False
        return hmac.compare_digest(token.encode(), wanted)

    def gone(self, connection: Connection) -> None:
        """A connection is closed."""
        self.connections.discard(connection)
        self._partial.pop(connection, None)

    def too_much(self, connection: Connection, waiting: int) -> bool:
        """Take note of what waits in an unfinished frame; whether it is too much in all."""
        if waiting <= MANY:
            self._partial.pop(connection, None)
            return False
        self._partial[connection] = waiting
        return sum(self._partial.values()) > PARTIAL_BYTES

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that `stop` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def wait_for_room(self, connection: Connection) -> None:
        """Tell a connection when the streams take messages again."""
        self._waiting.append(connection)

    def log_ended(self, connection: Connection, why: str) -> None:
        """Count and log why we end a connection."""
        self.counts["ended"] += 1
        log.warning("connection ended: %s", why, extra={"client": connection.address})

    def _pressure(self, high: bool) -> None:
        if not high:
            waiting, self._waiting = self._waiting, []
            for connection in waiting:
                connection.release("pressure")
