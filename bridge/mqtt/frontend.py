"""`MqttFrontEnd`: what the service starts and stops, in either mode."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from bridge.mqtt.server import clients
from bridge.mqtt.server.server import Server
from bridge.mqtt.upstream.external import ExternalBroker
from bridge.runtime import LoopRuntime

if TYPE_CHECKING:
    from bridge.access.logins import Access
    from bridge.mqtt.settings import MqttConfig
    from bridge.operations.catalog import Operations
    from bridge.runtime import Runtime


THREADS = 2  # the journal is synced, and a snapshot of it written


class MqttFrontEnd:
    """The embedded broker, or the subscriber at an external one."""

    def __init__(
        self,
        config: MqttConfig,
        operations: Operations,
        access: Access,
        runtime: Runtime | None = None,
    ) -> None:
        """`runtime` is the running event loop's, unless another one is given; `stop` closes it."""
        self._config, self._operations, self._access = config, operations, access
        self._runtime = runtime or LoopRuntime(THREADS, "mqtt")
        self._server: Server | None = None
        self._external: ExternalBroker | None = None

    async def start(self) -> list[str]:
        """Listen, or begin to connect; returns the listeners' urls, port 0 resolved.

        Raises ConfigError or OSError.
        """
        if self._config.mode == "external":
            self._external = ExternalBroker(
                self._config.external, self._operations, self._access, self._config.max_packet, self._runtime
            )
            await self._external.start()
            return []
        self._server = Server(self._config, self._operations, self._access, self._runtime)
        return await self._server.start()

    async def stop(self) -> None:
        """Stop reading, commit and acknowledge what was read, close."""
        for part in (self._server, self._external):
            if part is not None:
                await part.stop()
        self._runtime.close()

    def reload(self, config: MqttConfig) -> None:
        """Apply users, rules and certificates, all or nothing. Raises ConfigError."""
        if self._server is not None:
            self._server.reload(config)
        else:
            self._access.load(config)

    def stats(self) -> dict[str, int]:
        """Counters since the start (drops and refusals by reason), connections and sessions now."""
        part = self._server.connections if self._server is not None else self._external
        return part.stats() if part is not None else {}

    @property
    def refused(self) -> dict[str, str]:
        """The streams whose messages an external broker keeps from us, and why."""
        return self._external.refused if self._external is not None else {}

    @property
    def unreachable(self) -> str | None:
        """Why there is no connection to an external broker; None if there is one, or need not be."""
        return self._external.unreachable if self._external is not None else None

    async def command(self, operation: str, body: bytes) -> bytes:
        """Carry out one of `clients.OPERATIONS` for the command line; request and reply are in CBOR."""
        return await clients.answer(self._server, operation, body)

    def clients(self, most: int) -> list[tuple[str, str | None, str, str]]:
        """Connected clients, at most so many: client id, user name, address, protocol."""
        if self._server is None:
            return []
        sessions = ((conn, conn.session) for conn in self._server.connections.open)
        known = ((conn, session) for conn, session in sessions if session is not None)
        return [
            (
                session.client_id,
                session.identity.user,
                conn.address,
                clients.PROTOCOLS.get(conn.level, "MQTT"),
            )
            for conn, session in islice(known, most)
        ]
