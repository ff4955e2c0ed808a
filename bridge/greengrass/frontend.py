"""`GreengrassFrontEnd`: the Stream Manager protocol on TCP.

A client must show the token that stands in `token_file`, unless its process belongs to root or to the
service's own user on this machine. The file is read at each connect, so that a token can be changed while
running; if it cannot be read or is empty, no token is right. What these clients may do is what the rules say
for `greengrass.user`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
    from bridge.net.listening import Listening
    from bridge.operations.catalog import Operations

log = logging.getLogger(__name__)

MANY = 64 * 1024  # bytes of an unfinished frame from which on they are counted
PARTIAL_BYTES = 256 * 1024 * 1024  # that may wait in unfinished frames of all clients together
GUEST_BYTES = 8 * 1024 * 1024


class Settings(Protocol):
    """The section [greengrass] of the configuration."""

    @property
    def listen(self) -> str:
        """host:port; empty: no TCP."""

    @property
    def token_file(self) -> Path | None:
        """The file with the token that clients must show."""

    @property
    def user(self) -> str:
        """The user whose rules hold for clients on TCP."""

    @property
    def connections(self) -> int:
        """How many connections on TCP may be open."""

    @property
    def connections_per_address(self) -> int:
        """How many of them one address may have."""

    @property
    def idle_timeout(self) -> int:
        """Milliseconds until a client that asks for nothing is disconnected."""


class GreengrassFrontEnd:
    """The listeners, and what their connections share."""

    def __init__(
        self, config: Settings, operations: Operations, access: Access, guest_bytes: int = GUEST_BYTES
    ) -> None:
        """`guest_bytes` is the memory for all clients that have not said who they are."""
        self._config, self.operations, self._access = config, operations, access
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
        self.guests: Guests[Connection] = Guests(guest_bytes, Connection.dismiss)
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
        """Accept nobody any more; what was read is committed and answered, then every connection ends."""
        if self._listening is not None:
            self._listening.close()
        connections = list(self.connections)
        await asyncio.gather(*(connection.stop() for connection in connections))
        await asyncio.gather(*(connection.closed for connection in connections), *self._tasks)
        with contextlib.suppress(ValueError):
            self.manager.on_pressure.remove(self._pressure)

    def stats(self) -> dict[str, int]:
        """Connections now, and counters since the start."""
        return {"connections": len(self.connections), **self.counts}

    # -- for the connections ------------------------------------------------------------
    def refused(self, connection: Connection, token: str) -> str:
        """Why a client on TCP is not let in with this token; empty if it is.

        Root and the service's own user need none: they could read the streams' files as well.
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
                "a token is needed here: `streambridge install-service` makes one, greengrass.token_file "
                "names its file, and the client needs it as AWS_CONTAINER_AUTHORIZATION_TOKEN"
            )
        return "the token is not the one in greengrass.token_file"

    def identify(self, host: str, address: str) -> Identity:
        """What a client at an address may do: what the rules say for `greengrass.user`."""
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
