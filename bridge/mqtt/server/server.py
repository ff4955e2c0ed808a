"""The server: its listening sockets, from the start over reloads to the stop.

What it promises: a stop stores and acknowledges everything that had been read, publishes no wills (the next
start publishes those of persistent MQTT 5 sessions), and leaves no task behind.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from functools import partial
from typing import TYPE_CHECKING

from bridge.access.proofs import NO_CERTIFICATE, authorities, is_of_certificate
from bridge.errors import ConfigError
from bridge.mqtt.broker.broker import Broker
from bridge.mqtt.broker.journalfile import DIRECTORY
from bridge.mqtt.server import requests
from bridge.mqtt.server.connection import Connection
from bridge.mqtt.server.connections import Connections, Listener
from bridge.mqtt.server.systopics import SysTopics
from bridge.mqtt.server.tls import TlsServer, tls_context
from bridge.mqtt.server.websocket import WebSocket
from bridge.mqtt.settings import parse_address
from bridge.mqtt.wire.packets import SERVER_SHUTTING_DOWN
from bridge.net.addresses import is_loopback
from bridge.net.listening import Listening, listen

if TYPE_CHECKING:
    from bridge.access.logins import Access
    from bridge.mqtt.broker.inbox import Inbox
    from bridge.mqtt.server.connections import Member
    from bridge.mqtt.settings import Address, MqttConfig, TlsSettings
    from bridge.operations.catalog import Operations
    from bridge.runtime import Runtime

log = logging.getLogger(__name__)

STOP_TIMEOUT = 10.0  # seconds for the last commits
CLOSE_TIMEOUT = 1.0  # seconds for the last bytes


class Server:
    """The embedded broker's listeners and connections."""

    def __init__(self, config: MqttConfig, operations: Operations, access: Access, runtime: Runtime) -> None:
        self.config, self._access = config, access
        self._manager = manager = operations.manager
        self.broker = Broker(
            runtime,
            manager,
            manager.store.clock,
            access,
            config.limits,
            manager.store.data_dir / DIRECTORY,
            lambda *packet: requests.take(self.connections, operations, *packet),
            manager.store.keys,
            lambda: manager.store.encrypts,
        )
        self.broker.publisher.refused_stream = config.refused_stream
        self.connections = Connections(config, self.broker, runtime, under_pressure=manager.under_pressure)
        self._systopics = SysTopics(self.connections, runtime, config.sys_interval / 1000)
        self._sockets: list[Listening | TlsServer] = []
        self._tls: ssl.SSLContext | None = None

    # -- life ------------------------------------------------------------

    async def start(self) -> list[str]:
        """Restore sessions and listen; returns the urls, with the ports really taken."""
        if self.config.tls is not None:
            self._tls = tls_context(self.config.tls)
            self._access.load(self.config, authorities(self._tls))
        await self.broker.start()
        self._systopics.start()
        self._manager.on_pressure.append(self.connections.press)
        try:
            return [await self._listen(parse_address(url)) for url in self.config.listen]
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop accepting and reading, store and acknowledge what was read, close."""
        self.connections.stopping = self.broker.stopping = True
        self._systopics.stop()
        for listening in self._sockets:
            listening.close()
        for conn in list(self.connections.open):
            conn.hold("stop")
        settling = [_settled(conn.inbox) for conn in self.connections.open if conn.inbox.unsettled]
        if settling and (await asyncio.wait(settling, timeout=STOP_TIMEOUT))[1]:
            log.error(
                "stop: some messages could not be stored in %g s; they are not acknowledged", STOP_TIMEOUT
            )
        for conn in list(self.connections.open):
            conn.fail("", "", SERVER_SHUTTING_DOWN)
        await self.connections.end_tasks()
        self.broker.stop()
        self._manager.on_pressure.remove(self.connections.press)
        await self.connections.empty(CLOSE_TIMEOUT)

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
        for listening in self._sockets:
            if context is not None and isinstance(listening, TlsServer):
                listening.context = context
        for session in self.broker.sessions.all():
            local = session.line is not None and is_loopback(session.line.address)
            user = session.identity.user
            session.identity = self._access.identify(session.client_id, user, local=local)
        for conn in self.connections.open:
            self._check_certificate(conn)
        self.broker.revoke()

    def _check_certificate(self, conn: Member) -> None:
        """A client whose certificate is another user's now must log in again."""
        session, tls = conn.session, conn.transport.get_extra_info("ssl_object")
        if session is not None and tls is not None and is_of_certificate(session.proof):
            found = self._access.certified(tls)
            if found is None or found[0] != session.identity.user:
                session.proof = NO_CERTIFICATE

    async def _listen(self, address: Address) -> str:
        tls = self._tls if address.secure else None
        listener = Listener(address, tls is not None and tls.verify_mode is ssl.CERT_REQUIRED)
        make = partial(self._connection, listener)
        listening = await listen("mqtt.listen", address.host, address.port)
        if tls is None:
            self._sockets.append(listening)
            await listening.accept(lambda: make()[1])
        else:
            self._sockets.append(TlsServer(self.connections, tls, make, listening))
        return f"{_URL_SCHEMES[address.scheme]}://{listening.place}"

    def _connection(self, listener: Listener) -> tuple[Connection, asyncio.Protocol]:
        conn = Connection(self.connections, listener)
        return conn, WebSocket(conn) if listener.address.scheme in ("ws", "wss") else conn

    async def journaled(self) -> None:
        """Wait until the journal holds what was given to it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.broker.journal.after_commit(lambda _error: _resolve(future))
        await future


def _settled(inbox: Inbox) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    inbox.when_settled(lambda: _resolve(future))
    return future


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_URL_SCHEMES = {"tcp": "mqtt", "tls": "mqtts", "ws": "ws", "wss": "wss"}


def _asks_for(tls: TlsSettings | None) -> tuple[bool, bool]:
    """Whether there are certificates, and whether clients must have one."""
    return tls is not None, tls is not None and tls.client_ca is not None
