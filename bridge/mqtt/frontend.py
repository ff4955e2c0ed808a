"""`MqttFrontEnd`: the part of MQTT that the service starts and stops, in either mode.

The mode "embedded" has a server, and an upstream for each [[upstream]]. The mode "external" has one upstream
and no server.
"""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from bridge.access.logins import read
from bridge.errors import ConfigError
from bridge.mqtt.broker.journal import Journal
from bridge.mqtt.broker.journalfile import DIRECTORY
from bridge.mqtt.broker.recovery import recover_alone
from bridge.mqtt.server import clients
from bridge.mqtt.server.server import Server
from bridge.mqtt.upstream.intake import IntoBroker, IntoStreams
from bridge.mqtt.upstream.requests import Requests
from bridge.mqtt.upstream.upstream import Upstream
from bridge.runtime import LoopRuntime

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from datetime import datetime

    from bridge.access.logins import Access
    from bridge.auth.supervisor import Auth
    from bridge.mqtt.server.listeners import Plan
    from bridge.mqtt.settings import MqttConfig, UpstreamSettings
    from bridge.net.connected import Connected
    from bridge.operations.catalog import Operations
    from bridge.runtime import Runtime


THREADS = 2  # one to sync the journal, one to write a snapshot of it


class MqttFrontEnd:
    """The embedded broker with its upstreams, or the upstream of mode "external"."""

    def __init__(
        self,
        config: MqttConfig,
        operations: Operations,
        access: Access,
        runtime: Runtime | None = None,
        *,
        upstreams: Sequence[UpstreamSettings] = (),
        gateway: str = "",
        auth: Auth | None = None,
    ) -> None:
        """`runtime` is by default that of the running event loop; `stop` closes it.

        `gateway` is this gateway's id, which marks messages that have passed it.
        """
        self._config, self._operations, self._access = config, operations, access
        self._gateway, self._settings, self._auth = gateway, upstreams, auth
        self._runtime = runtime or LoopRuntime(THREADS, "mqtt")
        self._server: Server | None = None
        self._external: Upstream | None = None
        self._journal: Journal | None = None  # of mode "external"
        self._upstreams: dict[str, Upstream] = {}
        self._started: set[Upstream] = set()
        self._change: asyncio.Task[None] | None = None  # of the upstreams, after a reload

    async def start(self) -> list[str]:
        """Listen, and start to connect. Returns the listeners' URLs with the actual ports.

        Raises ConfigError or OSError.
        """
        if self._config.mode == "external":
            _refuse(self._settings)
            self._external = await self._make_external()
            await self._external.start()
            return []
        self._server = Server(
            self._config, self._operations, self._access, self._runtime, self._auth, self._operations.turns
        )
        self._operations.clients = clients.ServerClients(self._server)
        urls = await self._server.start()
        try:
            for one in self._settings:
                self._upstreams[one.name] = self._make(one)
        except ConfigError:
            await self.stop()
            raise
        for upstream in self._upstreams.values():
            await self._begin(upstream)
        self._forget_removed()
        return urls

    async def stop(self) -> None:
        """Stop reading, commit and acknowledge received messages, close."""
        if self._change is not None:
            await asyncio.wait([self._change])
        for upstream in list(self._started):
            await self._end(upstream)
        for part in (self._external, self._server):
            if part is not None:
                await part.stop()
        if self._journal is not None:
            self._operations.manager.on_bindings_changed.remove(self._journal.renew)
            self._journal.close()
        self._runtime.close()

    @property
    def failed(self) -> bool:
        """Return whether the sessions cannot be written to the disk."""
        journal = self._server.broker.journal if self._server is not None else self._journal
        return journal is not None and journal.failed

    def plan(self, config: MqttConfig) -> Plan | None:
        """Read what a reload applies; any thread may do it. Raises ConfigError."""
        if self._server is None:
            read(config, kept=self._access.kept)
            return None
        return self._server.plan(config)

    def reload(
        self, config: MqttConfig, upstreams: Sequence[UpstreamSettings] = (), plan: Plan | None = None
    ) -> None:
        """Apply users, rules, certificates and upstreams, all or nothing. Raises ConfigError."""
        if self._server is None:
            _refuse(upstreams)
            self._access.load(config)
            return
        changed = [
            one
            for one in upstreams
            if one.name not in self._upstreams or self._upstreams[one.name].settings != one
        ]
        fresh = {one.name: self._make(one) for one in changed}
        self._server.reload(config, plan)
        kept = {one.name for one in upstreams} - fresh.keys()
        old = [upstream for name, upstream in self._upstreams.items() if name not in kept]
        self._upstreams = {one.name: fresh.get(one.name) or self._upstreams[one.name] for one in upstreams}
        for upstream in self._upstreams.values():
            upstream.changed()
        if fresh or old:
            self._change = asyncio.create_task(self._exchange(self._change, old, list(fresh.values())))

    async def _exchange(
        self, before: asyncio.Task[None] | None, old: Collection[Upstream], fresh: Collection[Upstream]
    ) -> None:
        """End upstreams before starting others: two with one client id would end each other's connections."""
        if before is not None:
            await asyncio.wait([before])
        for upstream in old:
            if upstream in self._started:
                await self._end(upstream)
        for upstream in fresh:
            if upstream in self._upstreams.values():  # unless another reload has replaced it
                await self._begin(upstream)
        self._forget_removed()

    def _forget_removed(self) -> None:
        """Forget our sessions at brokers that are no upstreams any more."""
        assert self._server is not None
        broker, used = self._server.broker, {one.joined for one in self._upstreams.values()}
        for name, joined in list(broker.joined.items()):
            if joined not in used:
                joined.begin_anew("", broker.journal)
                del broker.joined[name]

    async def _begin(self, upstream: Upstream) -> None:
        self._started.add(upstream)
        await upstream.start()

    async def _end(self, upstream: Upstream) -> None:
        self._started.discard(upstream)
        await upstream.stop()

    def _make(self, settings: UpstreamSettings) -> Upstream:
        """Raises ConfigError."""
        assert self._server is not None
        name, user = settings.name, settings.user
        client_id = settings.client_id or f"{self._gateway}-{name}"
        identify = None if user is None else partial(self._access.identify, f"upstream:{name}", user)
        broker = self._server.broker
        try:
            intake = IntoBroker(broker, name, settings.mapping, self._gateway, identify)
        except ValueError as error:
            raise ConfigError(f"upstream {name!r}: with the gateway id {self._gateway!r}: {error}") from error
        return Upstream(
            settings,
            intake,
            self._operations.manager,
            self._runtime,
            broker.journal,
            broker.join(f"upstream:{name}"),
            named=lambda key: f"{key} of upstream {name!r}",
            client_id=client_id,
            gateway=self._gateway,
        )

    async def _make_external(self) -> Upstream:
        settings, manager = self._config.external, self._operations.manager
        store = manager.store
        self._journal = journal = Journal(
            store.data_dir / DIRECTORY / "external.journal",
            store.clock.boot,
            self._runtime,
            store.keys,
            lambda: store.encrypts,
        )
        joined = await recover_alone(journal, manager, "external", store.clock.boot)
        manager.on_bindings_changed.append(journal.renew)
        requests = Requests(settings, self._operations, self._access, self._config.max_packet)
        return Upstream(
            settings,
            IntoStreams(manager, settings, requests),
            manager,
            self._runtime,
            journal,
            joined,
            named=lambda key: f"mqtt.external.{key}",
            client_id=settings.client_id or "streambridge",
            gateway=self._gateway,
            requests=requests,
        )

    def stats(self) -> dict[str, int]:
        """Return counters since the start, with current connections and sessions."""
        part = self._server.connections if self._server is not None else self._external
        return part.stats() if part is not None else {}

    def upstream_stats(self) -> dict[str, dict[str, int]]:
        """Return the same for each [[upstream]], by `upstream:<name>`."""
        return {f"upstream:{name}": one.stats() for name, one in self._upstreams.items()}

    def upstreams(self) -> list[tuple[str, str, bool, int, int, str | None]]:
        """Return name, URL, whether connected, waiting and received messages, and problem of each."""
        stats = [(name, one, one.stats()) for name, one in self._upstreams.items()]
        return [
            (
                name,
                one.settings.url,
                one.unreachable is None,
                now["waiting"],
                now.get("received", 0),
                one.trouble,
            )
            for name, one, now in stats
        ]

    @property
    def crls_expire(self) -> datetime | None:
        """Return when the first revocation list expires; None if none does."""
        return self._server.crls_expire if self._server is not None else None

    @property
    def refused(self) -> dict[str, str]:
        """Return the streams whose messages an external broker withholds, and why."""
        return self._external.refused if self._external is not None else {}

    @property
    def unreachable(self) -> str | None:
        """Return why the external broker is not connected; None if it is, or if there is none."""
        return self._external.unreachable if self._external is not None else None

    def clients(self) -> Iterator[Connected]:
        """The clients that are connected when this is called."""
        if self._server is None:
            return iter(())
        known = [(conn, conn.session) for conn in self._server.connections.open]
        return (clients.peer(conn, session) for conn, session in known if session is not None)

    def unmatched(self) -> list[dict[str, Any]]:
        """Return the topics of clients that no stream takes (`broker.unmatched`)."""
        return [] if self._server is None else self._server.broker.publisher.unmatched.listed()

    def subscriptions(self, client: str, most: int) -> list[str]:
        """Return up to this many topic filters of a client."""
        session = self._server.broker.sessions.get(client) if self._server is not None else None
        return [] if session is None else list(islice(session.subscriptions, most))


def _refuse(upstreams: Sequence[UpstreamSettings]) -> None:
    """Raise ConfigError for upstreams, because mode "external" has no broker for their messages."""
    if upstreams:
        raise ConfigError('[[upstream]] needs mqtt.mode = "embedded": its messages go to that broker')
