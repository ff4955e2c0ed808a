"""`GreengrassFrontEnd`: the Stream Manager protocol on TCP.

A client must show a token, unless its process belongs to root, to the service's own user, or to a local user
of `greengrass.users` on this machine. `tokens_file` has tokens with their users; the token in `token_file` is
that of `greengrass.user`, and so are processes of root and of the service without one. The files are read at
each connect, so a token can be changed at any time; a reload ends the connections of tokens that are gone. If
a file cannot be read or is empty, no token in it is right. The rules and roles of its user say what a client
may do.

An unknown token decides nothing. Under a Greengrass nucleus, each client shows the one that it needs for AWS
credentials, and its owner says who it is. A token that was in the files since the start and is gone refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge import books
from bridge.access.guesses import Guesses
from bridge.access.remembered import remember
from bridge.access.tokens import Proven, digest, read_tokens
from bridge.audit import Origin
from bridge.errors import ConfigError
from bridge.greengrass.connection import Admitted, Connection
from bridge.net.addresses import host_and_port, is_loopback
from bridge.net.guests import Guests
from bridge.net.limits import ConnectionLimits
from bridge.net.listening import listen
from bridge.net.peer import Owners, uid_of
from bridge.readable import read_regular, unreadable

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from bridge.access.logins import Access
    from bridge.access.rules import Identity
    from bridge.greengrass.settings import GreengrassConfig
    from bridge.net.listening import Listening
    from bridge.operations.catalog import Operations

log = logging.getLogger(__name__)

NEEDED = (
    "a token is needed: `streambridge install-service` creates one in greengrass.token_file, and "
    "greengrass.tokens_file has those of users; set it for the client as AWS_CONTAINER_AUTHORIZATION_TOKEN, "
    "or name its local user in greengrass.users"
)
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
        owners: Owners | None = None,
    ) -> None:
        self._config, self.operations, self._access, self.bounds = config, operations, access, bounds
        self.manager, self.retention = operations.manager, config.retention
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
        self.guesses, self.proven = Guesses(), Proven()
        self._owners = owners or Owners()
        self._known: dict[bytes, None] = {}  # digests of tokens that were in the files
        self._mapped: dict[int, str] = {}  # users of ours by the ids of local ones
        books.opened(self)

    def recount(self) -> Iterable[books.Entry]:
        yield from self.limits.recount(one.host for one in self.connections)
        yield "guests that are gone", self.guests.peers() - self.connections, set()
        yield "unfinished frames that are gone", self._partial.keys() - self.connections, set()
        if not any(stream.pending_bytes for stream in self.manager.store.streams.values()):
            yield "unanswered appends", {one.appends for one in self.connections} - {0}, set()

    async def start(self) -> list[str]:
        """Listen; returns the urls, port 0 resolved. Raises ConfigError."""
        self.manager.on_pressure.append(self._pressure)
        try:
            self.read()
        except ConfigError as error:
            log.error("%s; no token in it is right", error)
        if self._config.listen:
            self._users()  # from here on, one that is taken out is known as such
            for name, user in self._config.users.items():
                try:
                    self._mapped[uid_of(name)] = user
                except (ValueError, OSError) as error:
                    log.error("greengrass.users: %s is not let in: %s", name, error)
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
    def asks_for(self, token: str) -> bool:
        """Whether a token is looked at; without any file of tokens, none is."""
        return bool(token) and (self._config.token_file is not None or self._config.tokens_file is not None)

    def admit(self, token: str) -> Admitted | str:
        """Who a client with this token is, or why it is refused; an empty text for an unknown token."""
        shown = digest(token)
        user = self._users().get(shown)
        if user is None:
            return "the token has been removed, or its file cannot be read" if shown in self._known else ""
        return Admitted(user, shown, "token")

    async def admit_owner(self, connection: Connection) -> tuple[Admitted | str, int]:
        """Who a client is without a token, or why it is refused; and its local user, -1 if unknown.

        Root and the service's own user need no token: they can read the streams' files anyway.
        """
        if not is_loopback(connection.host):
            return NEEDED, -1
        found = await self._owners.owner(connection.socket)
        owner = -1 if found is None else found
        why = f"local user {owner}"
        if (user := self._mapped.get(owner)) is not None:
            if self._access.has_rules:
                return Admitted(user, b"", why, mapped=True), owner
            return f"greengrass.users gives {why} what the rules of {user!r} allow, but there are none", owner
        if owner in (0, os.geteuid()) or not self._config.authenticate_clients:
            trusted = owner in (0, os.geteuid())
            return Admitted(self._config.user, b"", why, trusted=trusted), owner
        return NEEDED, owner

    def _users(self) -> dict[bytes, str]:
        """The users by the digests of their tokens; without those of files that cannot be read."""
        users: dict[bytes, str] = {}
        config = self._config
        if config.token_file is not None:
            try:
                if shown := read_regular(config.token_file)[0].decode(errors="surrogateescape").strip():
                    users[digest(shown)] = config.user
                else:
                    log.error("greengrass.token_file is empty: %s", config.token_file)
            except OSError as error:
                why = unreadable(config.token_file) or error
                log.error("greengrass.token_file cannot be read: %s: %s", config.token_file, why)
        with contextlib.suppress(ConfigError):  # which is reported
            users |= self.read()
        for token in users:
            remember(self._known, token, None)
        return users

    def identify(self, admitted: Admitted, host: str, address: str) -> Identity:
        """The rights of a client at an address: those of its user."""
        user = admitted.user
        label = f"{address} (user {user!r})"
        found = self._access.identify("", user, local=is_loopback(host), label=label)
        found.origin = Origin("greengrass", host)
        return found

    def read(self) -> dict[bytes, str]:
        """The users of the tokens in `tokens_file`. Raises ConfigError if it never was in order."""
        path, option = self._config.tokens_file, "greengrass.tokens_file"
        if path is None or not self._config.listen:
            return {}
        return self._access.kept.read(("tokens",), option, (path,), lambda: read_tokens(option, path))

    def reload(self) -> None:
        """The rules or the tokens have changed."""
        users = self._users() if self.connections else {}
        for connection in list(self.connections):
            known = connection.admitted
            if known is None:
                continue
            if known.token and users.get(known.token) != known.user:
                connection.end("its token is not valid any more")
            elif known.mapped and not self._access.has_rules:
                connection.end(f"there are no rules any more that say what user {known.user!r} may do")
            else:
                past = connection.caller
                connection.identify()
                past.successor = connection.caller

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
