"""The server: listening sockets, the connections they accept, and the limits on all of them together.

What it promises: as many connections as `limits` allow and no more, those in their TLS handshake among
them; a stop that stores and acknowledges everything that had been read, publishes no wills (the next start
publishes those of persistent MQTT 5 sessions), and leaves no task behind.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge.access.proofs import authorities
from bridge.errors import ConfigError
from bridge.mqtt.broker.broker import Broker
from bridge.mqtt.server import requests
from bridge.mqtt.server.connection import Connection
from bridge.mqtt.server.tls import TlsServer, tls_context
from bridge.mqtt.server.websocket import WebSocket
from bridge.mqtt.settings import parse_address
from bridge.mqtt.wire.packets import SERVER_SHUTTING_DOWN
from bridge.net.addresses import is_loopback
from bridge.net.fairqueue import FairQueue
from bridge.net.guests import Guests
from bridge.net.limits import ConnectionLimits, keep_alive
from bridge.net.listening import Listening, listen

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from bridge.access.logins import Access
    from bridge.mqtt.settings import Address, MqttConfig, TlsSettings
    from bridge.operations.catalog import Operations
    from bridge.runtime import Runtime

log = logging.getLogger(__name__)

STOP_TIMEOUT = 10.0  # seconds for the last commits
CLOSE_TIMEOUT = 1.0  # seconds for the last bytes
STOPPING = "the service is stopping"
GUESTS = "clients that have not logged in hold too much memory; see [mqtt.limits] guest_bytes"


class Listener:
    """One listening socket."""

    def __init__(self, address: Address, client_certificates: bool) -> None:
        self.address, self.client_certificates = address, client_certificates
        self.server: Listening | TlsServer | None = None


class Server:
    """The embedded broker's listeners and connections."""

    def __init__(self, config: MqttConfig, operations: Operations, access: Access, runtime: Runtime) -> None:
        self.runtime = runtime
        self.config, self.limits = config, config.limits
        self.operations, self._access = operations, access
        self._manager = manager = operations.manager
        self.under_pressure = manager.under_pressure
        self.broker = Broker(
            self.runtime,
            manager,
            manager.store.clock,
            access,
            config.limits,
            manager.store.data_dir / "mqtt",
            partial(requests.take, self),
        )
        self.broker.publisher.refused_stream = config.refused_stream
        self.connections: set[Connection] = set()
        self.reading: dict[Connection, set[asyncio.Task[None]]] = {}  # requests that end with it
        self.stopping = False
        self._handshakes: dict[Connection, str] = {}  # in their TLS handshake, with their address
        self._open = ConnectionLimits(self.limits.connections, self.limits.connections_per_address)
        self.guests: Guests[Connection] = Guests(self.limits.guest_bytes, self._dismiss)
        self.logging_in: dict[Connection, asyncio.Task[None]] = {}
        rate = self.limits.handshakes_per_second
        # Each turn is given back after a tenth of a second.
        self.handshake_turns = FairQueue(max(rate // 10, 1)) if rate else None
        self._listeners: list[Listener] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._tls: ssl.SSLContext | None = None
        self._logged: dict[str, float] = {}
        self._empty: asyncio.Future[None] | None = None  # set by the last connection, at the stop

    # -- life ------------------------------------------------------------

    async def start(self) -> list[str]:
        """Restore sessions and listen; returns the urls, with the ports really taken."""
        if self.config.tls is not None:
            self._tls = tls_context(self.config.tls)
            self._access.load(self.config, authorities(self._tls))
        await self.broker.start()
        self._manager.on_pressure.append(self._pressure)
        try:
            return [await self._listen(parse_address(url)) for url in self.config.listen]
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop accepting and reading, store and acknowledge what was read, close."""
        self.stopping = self.broker.stopping = True
        for listener in self._listeners:
            if listener.server is not None:
                listener.server.close()
        for conn in list(self.connections):
            conn.hold("stop")
        settling = [self._settled(conn) for conn in self.connections if conn.inbox.unsettled]
        if settling and (await asyncio.wait(settling, timeout=STOP_TIMEOUT))[1]:
            log.error(
                "stop: some messages could not be stored in %g s; they are not acknowledged", STOP_TIMEOUT
            )
        for conn in list(self.connections):
            conn.fail("", "", SERVER_SHUTTING_DOWN)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.broker.stop()
        self._manager.on_pressure.remove(self._pressure)
        if self.connections:
            # All transports are closing; a peer that takes no more bytes is not waited for.
            self._empty = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._empty], timeout=CLOSE_TIMEOUT)
            for conn in list(self.connections):
                conn.transport.abort()

    def reload(self, config: MqttConfig) -> None:
        """Apply users, rules and certificates, or raise a ConfigError and leave everything as it was.

        A listener's address, and whether it asks for certificates, are fixed when it opens. Users and rules
        meant for another listener could let in too many, so nothing is applied then. New certificates come
        with new keys for session tickets: no client resumes what an earlier client CA has allowed.
        """
        if _asks_for(config.tls) != _asks_for(self.config.tls):
            raise ConfigError("[mqtt.tls] or its client_ca was added or removed; that needs a restart")
        if config.listen != self.config.listen:
            raise ConfigError("mqtt.listen was changed; that needs a restart")
        context = tls_context(config.tls) if config.tls is not None else None
        self._access.load(config, authorities(context))
        self.broker.publisher.refused_stream = config.refused_stream
        for listener in self._listeners:
            if context is not None and isinstance(listener.server, TlsServer):
                listener.server.context = context
        for session in self.broker.sessions.all():
            local = session.line is not None and is_loopback(session.line.address)
            user = session.identity.user
            session.identity = self._access.identify(session.client_id, user, local=local)
        self.broker.revoke()

    async def _listen(self, address: Address) -> str:
        tls = self._tls if address.secure else None
        listener = Listener(address, tls is not None and tls.verify_mode is ssl.CERT_REQUIRED)
        make = partial(self._connection, listener)
        listening = await listen("mqtt.listen", address.host, address.port)
        self._listeners.append(listener)
        if tls is None:
            listener.server = listening
            await listening.accept(lambda: make()[1])
        else:
            listener.server = TlsServer(self, tls, make, listening)
        return f"{_URL_SCHEMES[address.scheme]}://{listening.place}"

    def _connection(self, listener: Listener) -> tuple[Connection, asyncio.Protocol]:
        conn = Connection(self, listener)
        return conn, WebSocket(conn) if listener.address.scheme in ("ws", "wss") else conn

    # -- connections ------------------------------------------------------------

    def expect(self, conn: Connection, address: str, descriptor: int) -> bool:
        """A socket whose TLS handshake is to begin; returns whether there is room for it."""
        refused = self._count(address, descriptor)
        conn.address = self._handshakes[conn] = address
        if refused:
            self.given_up(conn, "refused_limit", refused)
        else:
            self.guests.keep(conn, address, 0)
        return not refused and conn in self._handshakes

    def given_up(self, conn: Connection, counter: str = "", why: str = "") -> None:
        """Nothing comes of an expected connection, unless `accept` has seen it already."""
        address = self._handshakes.pop(conn, None)
        if address is None:
            return
        self._open.leave(address)
        self.guests.leave(conn, address)
        if counter:
            self.broker.reports.closed(conn.name, counter, why)

    def accept(self, conn: Connection) -> None:
        """A new connection: let it stay if there is room for it."""
        address = self._handshakes.pop(conn, None)
        descriptor = keep_alive(conn.transport)  # for a peer that vanishes without keep-alive of its own
        if address is None:
            refused = self._count(conn.address, descriptor)
        else:
            conn.address, refused = address, STOPPING if self.stopping else ""
        self.connections.add(conn)
        if refused:
            conn.end("refused_limit", refused)
        else:
            self.guests.keep(conn, conn.address, 0)

    def gone(self, conn: Connection) -> None:
        """A connection's transport is closed."""
        if conn in self.connections:
            self.connections.discard(conn)
            self._open.leave(conn.address)
            self.guests.leave(conn, conn.address)
        if (task := self.logging_in.pop(conn, None)) is not None:
            task.cancel()  # nobody waits for its answer
        if self._empty is not None and not self.connections and not self._empty.done():
            self._empty.set_result(None)

    def _count(self, address: str, descriptor: int) -> str:
        """Count a socket; returns why it is one too many, or nothing if there is room for it."""
        refused = self._open.enter(address, descriptor)
        self.broker.counts["accepted"] += 1
        return STOPPING if self.stopping else refused

    def _dismiss(self, conn: Connection) -> None:
        """Peers that have not logged in hold too much memory, and this one has the largest share."""
        if conn in self._handshakes:
            self.logging_in.pop(conn).cancel()
            self.given_up(conn, "refused_guest", GUESTS)
        else:
            conn.end("refused_guest", GUESTS, abort=True)

    def left(self, conn: Connection) -> None:
        """A client's connection has ended: so do its reads, however long they would still wait."""
        for task in self.reading.pop(conn, ()):
            task.cancel()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that must not outlive the server."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def journaled(self) -> None:
        """Wait until the journal holds what was given to it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.broker.journal.after_commit(lambda _error: _resolve(future))
        await future

    def _settled(self, conn: Connection) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        conn.inbox.when_settled(lambda: _resolve(future))
        return future

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the MQTT front end failed", exc_info=task.exception())

    def _pressure(self, high: bool) -> None:
        self.under_pressure = high
        if not high:
            for conn in list(self.connections):
                conn.release("pressure")

    def stats(self) -> dict[str, int]:
        """Everything counted since the start, and what there is now."""
        return {
            **self.broker.counts,
            "connections": len(self.connections) + len(self._handshakes),
            "sessions": len(self.broker.sessions),
            "retained": len(self.broker.router.retained),
        }


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_URL_SCHEMES = {"tcp": "mqtt", "tls": "mqtts", "ws": "ws", "wss": "wss"}


def _asks_for(tls: TlsSettings | None) -> tuple[bool, bool]:
    """Whether there are certificates, and whether clients must have one."""
    return tls is not None, tls is not None and tls.client_ca is not None
