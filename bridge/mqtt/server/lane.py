"""The lane: the listening sockets, all connections, and what they share.

What it promises: as many connections as `limits` allow and no more, those in their TLS handshake among
them; a stop that stores and acknowledges everything that had been read, sends no wills (the next start sends
those of persistent MQTT 5 sessions), and leaves no task behind.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge.access.proofs import authorities
from bridge.errors import ConfigError, StreamBridgeError, StreamError
from bridge.mqtt.broker.journal import Journal
from bridge.mqtt.broker.recovery import find_stored_ids, recover, snapshot
from bridge.mqtt.broker.router import Router
from bridge.mqtt.broker.sessions import Session, Sessions
from bridge.mqtt.broker.turns import Turns
from bridge.mqtt.server.connection import Connection
from bridge.mqtt.server.publishing import publish_will
from bridge.mqtt.server.tls import TlsServer, tls_context
from bridge.mqtt.server.websocket import WebSocket
from bridge.mqtt.settings import parse_address
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import NOT_AUTHORIZED, SERVER_SHUTTING_DOWN
from bridge.net.addresses import is_loopback
from bridge.net.fairqueue import FairQueue
from bridge.net.guests import Guests
from bridge.net.limits import ConnectionLimits, keep_alive
from bridge.net.listening import Listening, listen

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from bridge.access.logins import Access
    from bridge.mqtt.settings import Address, MqttConfig, TlsSettings
    from bridge.mqtt.wire.packets import Will
    from bridge.operations.catalog import Operations

log = logging.getLogger(__name__)

STOP_TIMEOUT = 10.0  # seconds for the last commits
CLOSE_TIMEOUT = 1.0  # seconds for the last bytes
LOG_INTERVAL = 10.0  # seconds between two lines about drops of one kind
STOPPING = "the service is stopping"
GUESTS = "too much is waiting of clients that have not logged in; see [mqtt.limits] guest_bytes"
REVOKED = "its password has changed, its user is gone, or its certificate is not signed by client_ca any more"


class Listener:
    """One listening socket."""

    def __init__(self, address: Address, client_certificates: bool) -> None:
        self.address, self.client_certificates = address, client_certificates
        self.server: Listening | TlsServer | None = None


class Lane:
    """The embedded broker's front: sockets and connections."""

    def __init__(self, config: MqttConfig, operations: Operations, access: Access) -> None:
        self.loop = asyncio.get_running_loop()
        self.config, self.limits, self.max_packet = config, config.limits, config.max_packet
        self.counts: Counter[str] = Counter()
        self.operations = operations
        self.manager = manager = operations.manager
        self.clock = manager.store.clock
        self.refused_stream = config.refused_stream
        self.under_pressure = manager.under_pressure
        self.access = access
        self.journal = Journal(manager.store.data_dir / "mqtt" / "sessions.journal", self.clock.boot)
        self.turns = Turns(self.loop)
        self.router = Router(manager, self.journal, self.limits, self.clock, self.turns)
        self.sessions = Sessions(
            self.loop,
            self.limits,
            self.counts,
            self.clock,
            self.journal.settled,
            self._ended,
            self._evicted,
        )
        self.connections: set[Connection] = set()
        # Each client's newest connection, until it is closed and all that it published is settled.
        self.newest: dict[str, Connection] = {}
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
            self.access.load(self.config, authorities(self._tls))
        recover(self.journal.read(), self)
        await find_stored_ids(self)
        self.journal.snapshot = lambda: snapshot(self)
        self.journal.open()
        self.manager.on_pressure.append(self._pressure)
        self.manager.on_bindings_changed.append(self.router.forget_routes)
        self._revoke()  # the users file may have changed since the stop
        for session in self.sessions.all():
            self._await_will(session)
            self.sessions.leave(session)
        try:
            return [await self._listen(parse_address(url)) for url in self.config.listen]
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop accepting and reading, store and acknowledge what was read, close."""
        self.stopping = True
        for listener in self._listeners:
            if listener.server is not None:
                listener.server.close()
        for conn in list(self.connections):
            conn.hold("stop")
        settling = [conn.settled() for conn in self.connections if conn.unsettled]
        try:
            await asyncio.wait_for(asyncio.gather(*settling), STOP_TIMEOUT)
        except TimeoutError:
            log.error(
                "stop: some messages could not be stored in %g s; they are not acknowledged", STOP_TIMEOUT
            )
        for conn in list(self.connections):
            conn.fail("", "", SERVER_SHUTTING_DOWN)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.sessions.stop()
        await self.journal.close()
        self.manager.on_pressure.remove(self._pressure)
        self.manager.on_bindings_changed.remove(self.router.forget_routes)
        if self.connections:
            # The transports have been told to close; a peer that takes no more bytes is not waited for.
            self._empty = self.loop.create_future()
            await asyncio.wait([self._empty], timeout=CLOSE_TIMEOUT)
            for conn in list(self.connections):
                conn.transport.abort()

    def reload(self, config: MqttConfig) -> None:
        """Take over users, rules and certificates, or raise a ConfigError and leave all as it was.

        Where a listener is and where names come from is fixed when it opens; users and rules that are
        meant for another one could open a door, so that nothing is taken over then. New certificates come
        with new keys for session tickets: no client resumes what an earlier client CA has allowed.
        """
        if _asks_for(config.tls) != _asks_for(self.config.tls):
            raise ConfigError("[mqtt.tls] or its client_ca was added or removed; that needs a restart")
        if config.listen != self.config.listen:
            raise ConfigError("mqtt.listen was changed; that needs a restart")
        context = tls_context(config.tls) if config.tls is not None else None
        self.access.load(config, authorities(context))
        self.refused_stream = config.refused_stream
        for listener in self._listeners:
            if context is not None and isinstance(listener.server, TlsServer):
                listener.server.context = context
        for session in self.sessions.all():
            conn, user = session.connection, session.identity.user
            local = conn is not None and is_loopback(conn.address)
            session.identity = self.access.identify(session.client_id, user, local=local)
        self._revoke()
        self.router.forget_routes()

    def _revoke(self) -> None:
        """Close the connections of clients that would not be let in any more; their wills are dropped.

        So are wills that wait for their delay. The session stays for a client that comes back with a new
        password or certificate; that of a user who is gone ends, since nobody could ever open it.
        """
        for session in self.sessions.all():
            conn, user = session.connection, session.identity.user
            if self.access.still_admits(user, session.proof):
                continue
            if session.will is not None:
                self.counts["dropped_wills"] += 1
                self.set_will(session, None)
            if conn is not None:
                conn.fail("refused_reload", REVOKED, NOT_AUTHORIZED)
            if session.proof[:1] != b"c" and not self.access.knows(user or ""):
                self.sessions.end(session)

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
        """A socket whose TLS handshake is to begin: whether there is room for it."""
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
            self.counts[counter] += 1
            self.log_closed(conn, counter, why)

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
        self.counts["accepted"] += 1
        return STOPPING if self.stopping else refused

    def _dismiss(self, conn: Connection) -> None:
        """Too much is waiting of peers that have not logged in, and this one has the largest part of it."""
        if conn in self._handshakes:
            self.logging_in.pop(conn).cancel()
            self.given_up(conn, "refused_guest", GUESTS)
        else:
            conn.end("refused_guest", GUESTS)
            conn.transport.abort()

    def left(self, conn: Connection, *, will: bool) -> None:
        """A client's connection has ended, politely (no will) or not."""
        for task in self.reading.pop(conn, ()):
            task.cancel()
        session = conn.session
        if session is None or session.connection is not conn:
            return
        lost = self.stopping and will and session.will is not None and session.lasting_will is None
        session.connection = None
        session.outbox.detach()
        session.left = self.clock.now() / 1000
        if session.persistent:
            self.journal.opened(session)
        if lost:
            self.counts["dropped_wills"] += 1
        if lost or not will:
            self.set_will(session, None)
        elif not self.stopping:
            self._await_will(session)
        self.sessions.leave(session)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that must not outlive the lane."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def journaled(self) -> None:
        """Wait until the journal holds what was given to it."""
        future: asyncio.Future[None] = self.loop.create_future()

        def done(error: StreamError | None) -> None:
            if not future.done():
                future.set_result(None)

        self.journal.after_commit(done)
        await future

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the MQTT front end failed", exc_info=task.exception())

    def _pressure(self, high: bool) -> None:
        self.under_pressure = high
        if not high:
            for conn in list(self.connections):
                conn.release("pressure")

    # -- sessions ------------------------------------------------------------

    def set_expiry(self, session: Session, seconds: int) -> None:
        """Say how long a session outlives its connection, and keep or forget it accordingly."""
        was, session.expiry = session.persistent, seconds
        if session.persistent:
            self.journal.opened(session)
            for subscription in () if was else session.subscriptions.values():
                self.journal.subscribed(session, subscription)
        elif was:
            self.journal.ended(session)

    def set_will(self, session: Session, will: Will | None) -> None:
        """Say what is to be published if the client goes without DISCONNECT; the last one is so no more.

        A client that is back before its will's delay was over takes it back (MQTT 5 section 3.1.3.2.2).
        """
        if session.will_timer is not None:
            session.will_timer.cancel()
            session.will_timer = None
        if session.will is not None or will is not None:
            session.will = will
            if session.persistent:
                self.journal.willed(session)

    def _await_will(self, session: Session) -> None:
        """A client is gone: publish its will, if it has one, as soon as its delay is over."""
        if session.will is None:
            return
        delay = session.will.properties.get(p.WILL_DELAY, 0) if session.persistent else 0
        seconds = min(
            delay, session.left + delay - self.clock.now() / 1000
        )  # it may be gone since before a restart
        if seconds > 0:
            session.will_timer = self.loop.call_later(min(seconds, 0xFFFF_FFF), self._will_due, session)
        else:
            self._will_due(session)

    def _will_due(self, session: Session) -> None:
        will = session.will
        if will is not None and not session.identity.may_publish(will.topic):
            self.counts["dropped_wills"] += 1  # its rules have changed since
        elif will is not None:
            publish_will(self, session, will)
        self.set_will(session, None)

    def _ended(self, session: Session) -> None:
        if session.will_timer is not None:
            self._will_due(session)
        self.router.end(session)
        if session.persistent:
            self.journal.ended(session)

    def _evicted(self, session: Session) -> None:
        text = (
            "the session of client %r is ended, with what waits for it: it was away for longest, and there "
            "are more than [mqtt.limits] sessions = %d (counted in the metrics as ended_sessions)"
        )
        self.tell("evicted", logging.WARNING, text, session.client_id, self.limits.sessions)

    # -- reporting ------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Everything counted since the start, and what there is now."""
        return {
            **self.counts,
            "connections": len(self.connections) + len(self._handshakes),
            "sessions": len(self.sessions),
            "retained": len(self.router.retained),
        }

    def log_closed(self, conn: Connection, counter: str, why: str) -> None:
        """A connection was closed by us."""
        if counter == "refused_tls":
            self.tell("tls", logging.WARNING, "%s closed: %s (counted in the metrics)", conn.name, why)
            return
        level = logging.WARNING if counter.startswith("rejected") else logging.INFO
        log.log(level, "%s closed: %s", conn.name, why)

    def tell(self, kind: str, level: int, text: str, *values: object) -> None:
        """Tell what clients could cause without end: one line for each kind from time to time."""
        now = self.loop.time()
        if now - self._logged.get(kind, -LOG_INTERVAL) >= LOG_INTERVAL:
            self._logged[kind] = now
            log.log(level, text, *values)

    def log_dropped(self, conn: Connection, kind: str, why: str) -> None:
        """A message was dropped or refused."""
        text = "%s: a message was not stored: %s (counted in the metrics and on the status page)"
        self.tell(kind, logging.WARNING, text, conn.name, why)

    def log_will(self, session: Session, error: StreamBridgeError) -> None:
        """A will could not be stored."""
        log.warning("the will of client %r was not stored: %s", session.client_id, error)


_URL_SCHEMES = {"tcp": "mqtt", "tls": "mqtts", "ws": "ws", "wss": "wss"}


def _asks_for(tls: TlsSettings | None) -> tuple[bool, bool]:
    """Whether there are certificates, and whether clients must have one."""
    return tls is not None, tls is not None and tls.client_ca is not None
