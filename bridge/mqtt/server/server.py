"""The server: its listening sockets, from the start over reloads to the stop.

What it promises: a stop stores and acknowledges everything that had been read, publishes no wills (the next
start publishes those of persistent MQTT 5 sessions), and leaves no task behind.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from bridge.access.proofs import NOTHING
from bridge.auth.supervisor import Auth
from bridge.mqtt.broker.broker import Broker
from bridge.mqtt.broker.journalfile import DIRECTORY
from bridge.mqtt.server import requests
from bridge.mqtt.server.connections import Connections
from bridge.mqtt.server.listeners import Listeners
from bridge.mqtt.server.systopics import SysTopics
from bridge.mqtt.wire.packets import SERVER_SHUTTING_DOWN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from bridge.access.logins import Access
    from bridge.mqtt.broker.inbox import Inbox
    from bridge.mqtt.server.connections import Member
    from bridge.mqtt.server.listeners import Plan
    from bridge.mqtt.settings import MqttConfig
    from bridge.net.turns import Turns
    from bridge.operations.catalog import Operations
    from bridge.runtime import Runtime

log = logging.getLogger(__name__)

SLICE = 200  # sessions and connections that a reload looks up at a time
STOP_TIMEOUT = 10.0  # seconds for the last commits
CLOSE_TIMEOUT = 1.0  # seconds for the last bytes


class Server:
    """The embedded broker's listeners and connections."""

    def __init__(
        self,
        config: MqttConfig,
        operations: Operations,
        access: Access,
        runtime: Runtime,
        auth: Auth | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`auth` asks the plugins for authentication and authorization; None: there are none."""
        self._auth = auth or Auth()
        self.config = config
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
            turns,
        )
        self.broker.publisher.refused_stream = config.refused_stream
        self.connections = Connections(
            config, self.broker, runtime, self._auth, under_pressure=manager.under_pressure
        )
        self._budgets = config.budget
        self._applying: Iterator[None] = iter(())  # what a reload has to look up
        self.listeners = Listeners(config, access, self.connections)
        self._systopics = SysTopics(self.connections, runtime, config.sys_interval / 1000)

    # -- life ------------------------------------------------------------

    async def start(self) -> list[str]:
        """Restore sessions and listen. Returns the URLs with the actual ports."""
        self.listeners.load()
        self.connections.ask_for_bases()
        await self.broker.start()
        self._systopics.start()
        self._manager.on_pressure.append(self.connections.press)
        try:
            return await self.listeners.open()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop accepting and reading, store and acknowledge what was read, then close."""
        self.connections.stopping = self.broker.stopping = True
        self._systopics.stop()
        self.listeners.close()
        self.connections.reads.run()
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
        self.connections.handshakes.close()

    def plan(self, config: MqttConfig) -> Plan:
        """Read what a reload applies; any thread may do it. Raises ConfigError."""
        return self.listeners.plan(msgspec.structs.replace(config, limits=self.config.limits))

    def reload(self, config: MqttConfig, plan: Plan | None = None) -> None:
        """Apply listeners, users, rules and certificates. Raises ConfigError, and then nothing has changed.

        New certificates have new keys for session tickets, so no client can resume a session that an earlier
        client CA allowed. New logins follow the new rules at once; what clients lose that are connected, or
        have a session, is looked up in slices.
        """
        self.listeners.reload(msgspec.structs.replace(config, limits=self.config.limits), plan)
        self.broker.publisher.refused_stream = config.refused_stream
        if config.budget != self._budgets:
            self._budgets = config.budget
            self.connections.set_budgets(config.budget)
        self.connections.ask_for_bases()
        self._applying = self._apply()
        self._go_on(self._applying)

    def _go_on(self, applying: Iterator[None]) -> None:
        if applying is not self._applying or self.connections.stopping:
            return  # a later reload does it
        if sum(1 for _ in islice(applying, SLICE)) == SLICE:
            self.broker.runtime.soon(self._go_on, applying)

    def _apply(self) -> Iterator[None]:
        """Look up what each client may do now; yields after each."""
        for session in self.broker.sessions.all():
            local = session.line is not None and session.line.local
            session.identity = self.broker.accesses.again(session.identity, local=local)
            yield
        for conn in list(self.connections.open):
            self._check(conn)
            conn.ask_again()
            yield
        yield from self.broker.revoking()

    def _check(self, conn: Member) -> None:
        """Remove the proof of a client whose listener would not admit it again as the same user."""
        session = conn.session
        if session is None or conn.gone:
            return  # one that is just coming is looked up when it has its turn (`Broker.open`)
        if not conn.admits(session.identity.user, session.proof):
            session.proof = NOTHING

    @property
    def crls_expire(self) -> datetime | None:
        """When the first revocation list expires; None if none expires."""
        return self.listeners.crls_expire

    async def journaled(self) -> None:
        """Wait until the journal has stored all its records."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.broker.journal.after_commit(lambda _error: _resolve(future))
        await future


def _settled(inbox: Inbox) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    inbox.when_settled(lambda: _resolve(future))
    return future


def certificate_of(conn: Member) -> bytes:
    """Return the verified certificate of a client in DER; empty if it has none."""
    tls = conn.transport.get_extra_info("ssl_object")
    return b"" if tls is None else tls.getpeercert(binary_form=True) or b""


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
