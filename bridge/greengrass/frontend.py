"""`GreengrassFrontEnd`: the Stream Manager protocol on TCP.

A client must show the token in `token_file`, unless its process belongs to root or to the service's own user
on this machine. The file is read at each connect, so the token can be changed at any time. If the file cannot
be read or is empty, no token is right. The rules for `greengrass.user` say what these clients may do.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge.access.guesses import Guesses
from bridge.greengrass.connection import Connection
from bridge.net import peer
from bridge.net.addresses import host_and_port, is_loopback
from bridge.net.guests import Guests
from bridge.net.limits import ConnectionLimits
from bridge.net.listening import listen

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from bridge.access.logins import Access
    from bridge.access.rules import Identity
    from bridge.greengrass.settings import GreengrassConfig
    from bridge.net.listening import Listening
    from bridge.operations.catalog import Operations

log = logging.getLogger(__name__)

MANY = 64 * 1024  # bytes; an unfinished frame counts towards `Bounds.partial_bytes` above that


class Bounds(NamedTuple):
    """What clients may take, in bytes of memory and in seconds."""

    guest_bytes: int = 8 * 1024 * 1024  # of all clients that have not connected yet
    partial_bytes: int = 256 * 1024 * 1024  # in unfinished frames of all clients together
    handshake: float = 10.0  # until a client has sent its whole Connect
    stalled: float = 60.0  # without a byte of a frame that has begun


class GreengrassFrontEnd:
    """The listener, and what its connections share."""

    def __init__(
        self,
        config: GreengrassConfig,
        operations: Operations,
        access: Access,
        bounds: Bounds = Bounds(),  # noqa: B008 - immutable
    ) -> None:
        self._config, self.operations, self._access, self.bounds = config, operations, access, bounds
        self.manager = operations.manager
        self.connections: set[Connection] = set()
        self.counts: Counter[str] = Counter()
        self._listening: Listening | None = None
        self.reading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._partial: dict[Connection, int] = {}
        self._waiting: list[Connection] = []
        self.limits = ConnectionLimits(config.connections, config.connections_per_address)
        self.idle_timeout = config.idle_timeout / 1000
        self.guests: Guests[Connection] = Guests(bounds.guest_bytes, Connection.dismiss)
        self.guesses = Guesses()

    async def start(self) -> list[str]:
        """Listen; returns the urls, port 0 resolved. Raises ConfigError."""
        self.manager.on_pressure.append(self._pressure)
        if self._config.listen:
            host, port = host_and_port(self._config.listen)
            self._listening = await listen("greengrass.listen", host, port)
            await self._listening.accept(partial(Connection, self))
            return [f"tcp://{self._listening.place}"]
        return []

    async def stop(self) -> None:
        """Stop accepting clients, commit and answer what was received, then end every connection."""
        if self._listening is not None:
            self._listening.close()
        connections = list(self.connections)
        await asyncio.gather(*(connection.stop() for connection in connections))
        await asyncio.gather(*(connection.closed for connection in connections), *self._tasks)
        with contextlib.suppress(ValueError):
            self.manager.on_pressure.remove(self._pressure)

    def stats(self) -> dict[str, int]:
        """The number of connections, and counters since the start."""
        return {"connections": len(self.connections), **self.counts}

    # -- for the connections ------------------------------------------------------------
    def refused(self, connection: Connection, token: str) -> str:
        """Return why a client is refused with this token, or an empty text if it is admitted.

        Root and the service's own user need none: they can read the streams' files anyway.
        """
        path = self._config.token_file
        wanted = b""
        if path is not None:
            try:
                wanted = path.read_bytes().strip()
            except OSError as error:
                log.error("greengrass.token_file cannot be read: %s", error)
            else:
                if not wanted:
                    log.error("greengrass.token_file is empty: %s", path)
        if wanted and hmac.compare_digest(token.encode(), wanted):
            return ""
        ignored = not token or path is None
        if ignored and is_loopback(connection.host) and peer.owner(connection.socket) in (0, os.geteuid()):
            return ""
        if ignored:
            return (
                "a token is needed: `streambridge install-service` creates one in greengrass.token_file; set "
                "it for the client as AWS_CONTAINER_AUTHORIZATION_TOKEN"
            )
        return "the token differs from the one in greengrass.token_file"

    def identify(self, host: str, address: str) -> Identity:
        """The rights of a client at an address: those of `greengrass.user`."""
        user = self._config.user
        label = f"{address} (user {user!r})"
        return self._access.identify("", user, local=is_loopback(host), label=label)

    def reload(self) -> None:
        """The rules have changed."""
        for connection in self.connections:
            connection.identify()

    def gone(self, connection: Connection) -> None:
        """A connection is closed."""
        self.connections.discard(connection)
        self._partial.pop(connection, None)

    def too_much(self, connection: Connection, waiting: int) -> bool:
        """Note the size of an unfinished frame; returns whether those of all clients are too much."""
        if waiting <= MANY:
            self._partial.pop(connection, None)
            return False
        self._partial[connection] = waiting
        return sum(self._partial.values()) > self.bounds.partial_bytes

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that `stop` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def wait_for_room(self, connection: Connection) -> None:
        """Release a connection when the streams accept messages again."""
        self._waiting.append(connection)

    def log_ended(self, connection: Connection, why: str) -> None:
        """Count and log the end of a connection by us."""
        self.counts["ended"] += 1
        log.warning("connection ended: %s", why, extra={"client": connection.address})

    def _pressure(self, high: bool) -> None:
        if not high:
            waiting, self._waiting = self._waiting, []
            for connection in waiting:
                connection.release("pressure")
