"""All connections of the server: their number, their memory before the login, and what ends with them.

What it promises:
* There are no more connections than `limits` allow, including those in their TLS handshake.
* Clients that have not logged in hold no more than `guest_bytes` together.

A connection has one of these states here:

    expected   its PROXY header has not arrived
    open       it has a transport; it counts as a guest until it has logged in
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from bridge import books
from bridge.access.proofs import is_of_certificate, of_plugin
from bridge.access.revocations import Revocations
from bridge.mqtt.server.reads import Reads
from bridge.mqtt.server.traffic import Traffic
from bridge.mqtt.wire.packets import ADMINISTRATIVE_ACTION
from bridge.net.addresses import is_within, parse_network
from bridge.net.budgets import Budget, Budgets, Meter, Refusal
from bridge.net.crl import Crls
from bridge.net.guests import Guests
from bridge.net.limits import ConnectionLimits, descriptor_of
from bridge.net.tlslayer import Handshakes

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from bridge.access.logins import Access
    from bridge.access.rules import Identity
    from bridge.auth.supervisor import Auth
    from bridge.mqtt.broker.broker import Broker
    from bridge.mqtt.broker.inbox import Inbox
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.server.metering import Metering
    from bridge.mqtt.settings import Address, ListenerSettings, MqttConfig
    from bridge.runtime import Runtime

log = logging.getLogger(__name__)

STOPPING = Refusal("refused_limit", "the service is stopping")
ANY = 1 << 60  # connections, if there is no limit
GUESTS = "clients that have not logged in hold too much memory; see [mqtt.limits] guest_bytes"


class Listener:
    """The settings and rights of one listener. A reload makes a new one that keeps the count."""

    def __init__(
        self,
        settings: ListenerSettings,
        access: Access,
        context: ssl.SSLContext | None,
        counted: ConnectionLimits | None = None,
        revocations: Revocations = Revocations(Crls()),  # noqa: B008 - without lists, it never changes
    ) -> None:
        """`context` is for TLS. `counted` comes from the listener that it replaces."""
        self.settings, self.access, self.context = settings, access, context
        self.revocations = revocations
        self.name, self.limits = settings.name, settings.limits
        self.proxies = tuple(map(parse_network, settings.proxy_protocol))
        self.asks = (
            context is not None and context.verify_mode is ssl.CERT_REQUIRED
        )  # clients for certificates
        self.counted = counted or ConnectionLimits(ANY, ANY)
        own = settings.own_limits
        self.counted.set(own.connections or ANY, own.connections_per_address or ANY)

    def regime(self, address: Address) -> tuple[object, ...]:
        """Return what a client's login rests on. If a reload changes it, the client must log in again."""
        return self.name, self.settings.own_users, address.secure and self.asks, bool(self.proxies)


class Endpoint:
    """One address of a listener."""

    def __init__(self, address: Address, listener: Listener) -> None:
        self.address, self.listener = address, listener
        self._loopback = address.loopback  # computed once: each login asks

    @property
    def client_certificates(self) -> bool:
        """Whether every client must have a certificate."""
        return self.address.secure and self.listener.asks

    @property
    def loopback(self) -> bool:
        """Whether its clients are on this machine. The clients of a proxy may be elsewhere."""
        return self._loopback and not self.listener.proxies

    def admits(self, user: str | None, proof: bytes, tls: ssl.SSLObject | None) -> bool:
        """Return whether it would admit a client as the same user again, as far as a proof does not tell.

        The certificate is still this user's and not withdrawn, or anonymous clients may still come here.
        """
        if is_of_certificate(proof) and tls is not None:
            found = self.listener.access.certified(tls)
            return found is not None and found.user == user and not self.listener.revocations.revoke(tls)
        return user is not None or self.listener.access.refuse_anonymous(loopback=self.loopback) is None


class Member(Protocol):
    """A connection; `connection.Connection` is one."""

    address: str
    endpoint: Endpoint
    who: tuple[str, str | None]  # client id and user, once proved
    level: int
    proxied: bool  # a proxy has named its address
    metering: Metering
    inbox: Inbox
    since: int  # when it logged in, Unix time in ms
    published: int  # messages that the client has sent
    requests: int  # in progress
    transport: asyncio.Transport

    @property
    def name(self) -> str: ...

    @property
    def gone(self) -> bool: ...

    @property
    def session(self) -> Session | None: ...

    def admits(self, user: str | None, proof: bytes) -> bool: ...

    def metered(self) -> None: ...
    def ask_again(self) -> None: ...

    def forget_routes(self) -> None: ...

    def hold(self, why: str) -> None: ...

    def release(self, why: str) -> None: ...

    def fail(self, counter: str, why: str, reason: int, told: str = "") -> None: ...

    def end(self, counter: str, why: str, *, abort: bool = False) -> None: ...


class Connections:
    """The connections of all listeners, and the tasks that serve them."""

    def __init__(
        self, config: MqttConfig, broker: Broker, runtime: Runtime, auth: Auth, *, under_pressure: bool
    ) -> None:
        """`under_pressure`: so much waits for the disk that publishers must wait."""
        self.auth = auth
        self.config, self.limits, self.broker, self.runtime = config, config.limits, broker, runtime
        self.under_pressure = under_pressure
        self.traffic = Traffic()
        self.reads = Reads(broker, runtime, self.traffic, self)
        self.open: dict[Member, None] = {}  # oldest first
        self.reading: dict[
            Member, dict[asyncio.Task[None], None]
        ] = {}  # requests that end with the connection
        self.logging_in: dict[Member, asyncio.Task[None]] = {}
        self.guests: Guests[Member] = Guests(self.limits.guest_bytes, self._dismiss)
        self.handshakes = Handshakes()
        # With the address that counts them; None: the proxy has not named it yet.
        self._expected: dict[Member, str | None] = {}
        self.budgets: Budgets[Member] = Budgets(config.budget, runtime.later, runtime.now)
        self._counted = ConnectionLimits(self.limits.connections, self.limits.connections_per_address)
        self._tasks: set[asyncio.Task[None]] = set()
        self._empty: asyncio.Future[None] | None = None  # set by the last connection, once `stopping`
        self.stopping = False
        books.opened(self)

    def recount(self) -> Iterable[books.Entry]:
        at = self._expected | {conn: conn.address for conn in self.open}
        yield from self._counted.recount(at.values())
        for counted in {conn.endpoint.listener.counted for conn in at}:
            here = [address for conn, address in at.items() if conn.endpoint.listener.counted is counted]
            yield from counted.recount(here)
        new = {conn for conn in at if conn in self._expected or not (conn.since or conn.gone)}
        yield "guests that are missing", new - self.guests.peers(), set()
        yield "guests that are gone", self.guests.peers() - at.keys(), set()
        requests: Counter[Any] = Counter(line for _, line, _ in self.broker.sessions.requests.values())
        connections: Counter[Meter[Any]] = Counter()
        subscriptions: Counter[Meter[Any]] = Counter()
        for conn in at:
            yield f"requests of {conn.name}", conn.requests, requests[conn]
            session: Any = conn.session
            filters = len(session.subscriptions) if session is not None and session.line is conn else 0
            connections.update(conn.metering.shared)
            subscriptions.update(dict.fromkeys(conn.metering.shared, filters))
        for meter in self.budgets.meters():
            name = f"{meter.budget.name} of {meter.key!r}"
            yield f"connections in {name}", meter.connections, connections[meter]
            yield f"subscriptions in {name}", meter.subscriptions, subscriptions[meter]

    def expect(self, conn: Member, address: str, descriptor: int) -> bool:
        """Add a socket that must send a PROXY header first. Returns whether there is room."""
        listener = conn.endpoint.listener
        counted = None if listener.proxies else address
        refused = self._count(conn, counted, descriptor)
        if listener.proxies and not is_within(address, listener.proxies):
            refused = Refusal(
                "refused_proxy", "its address is not a proxy of this listener; see proxy_protocol"
            )
        conn.address, self._expected[conn] = address, counted
        if refused:
            self.given_up(conn, *refused)
        else:
            self.guests.keep(conn, address, 0)
        return not refused and conn in self._expected

    def named(self, conn: Member, address: str | None) -> bool:
        """A proxy has named the client's address; None: its own. Returns whether there is room."""
        if conn not in self._expected:
            return False
        self._leave(conn, None)
        self.guests.leave(conn, conn.address)
        if address is not None:
            conn.address, conn.proxied = address, True
        self._expected[conn] = conn.address
        if refused := self._enter(conn, conn.address):
            self.given_up(conn, *refused)
        else:
            self.guests.keep(conn, conn.address, 0)
        return conn in self._expected

    def given_up(self, conn: Member, counter: str = "", why: str = "") -> None:
        """Forget an expected connection, unless `accept` has already taken it."""
        if conn not in self._expected:
            return
        self._leave(conn, self._expected.pop(conn))
        self.guests.leave(conn, conn.address)
        if counter:
            self.broker.reports.closed(conn.name, counter, why)

    def accept(self, conn: Member) -> None:
        """Add a connection, and close it if there is no room."""
        descriptor = descriptor_of(conn.transport)
        address = self._expected.pop(conn, None)
        if address is None:
            refused = self._count(conn, conn.address, descriptor)
        else:
            conn.address, refused = address, STOPPING if self.stopping else None
            self.logging_in.pop(conn, None)  # the task that has read the header
        self.open[conn] = None
        if refused:
            conn.end(*refused)
        else:
            self.guests.keep(conn, conn.address, 0)

    def gone(self, conn: Member) -> None:
        """A connection's transport is closed."""
        if conn in self.open:
            del self.open[conn]
            self._leave(conn, conn.address)
            self.guests.leave(conn, conn.address)
        if self._empty is not None and not self.open and not self._empty.done():
            self._empty.set_result(None)

    def _count(self, conn: Member, address: str | None, descriptor: int) -> Refusal | None:
        """Count a new socket. Returns why it is refused, or None."""
        refused = self._enter(conn, address, descriptor)
        self.broker.counts["accepted"] += 1
        return STOPPING if self.stopping else refused

    def _enter(self, conn: Member, address: str | None, descriptor: int = -1) -> Refusal | None:
        of_all = self._counted.enter(address, descriptor)
        of_listener = conn.endpoint.listener.counted.enter(address)
        of_budgets = None
        if address is not None:
            of_budgets = conn.metering.enter_address(address)
        if why := of_all or of_listener:
            return Refusal("refused_limit", why)
        return of_budgets

    def _leave(self, conn: Member, address: str | None) -> None:
        self._counted.leave(address)
        conn.endpoint.listener.counted.leave(address)
        conn.metering.leave_address(conn)

    def enter_user(self, conn: Member, identity: Identity) -> Refusal | None:
        """Count a client that has logged in for its user. Returns why it is refused, or None."""
        old = self.broker.sessions.get(identity.client_id)
        spare = old is not None and old.line is not None and old.identity.owner == identity.owner
        return conn.metering.enter_user(identity.user, spare)

    def ask_for_bases(self) -> None:
        """Ask plugins what their logins rest on. `Broker.revoke` ends logins that rest on anything else."""
        self.broker.accesses.of_plugins = frozenset(
            of_plugin(name, basis) for name, bases in self.auth.bases().items() for basis in bases
        )

    def set_budgets(self, budgets: Sequence[Budget]) -> None:
        """Apply new budgets. Connected clients stay, even if there are more than the budgets allow."""
        self.budgets.load(budgets)
        for conn, address in [*self._expected.items(), *((conn, conn.address) for conn in self.open)]:
            if address is not None:
                conn.metering.enter_address(address)
            line: object = None if conn.session is None else conn.session.line
            if conn.session is not None and line is conn:
                conn.metering.enter_user(conn.session.identity.user)
                conn.metered()

    def end_all_of(self, endpoint: Endpoint, why: str) -> None:
        """Close the connections of an address once everything that they sent is stored and acknowledged."""
        self.reads.run()
        for conn in [conn for conn in self._expected if conn.endpoint is endpoint]:
            if (task := self.logging_in.get(conn)) is not None:
                task.cancel()
        for conn in [conn for conn in self.open if conn.endpoint is endpoint]:
            conn.hold("listener")
            conn.inbox.when_settled(partial(conn.fail, "refused_reload", why, ADMINISTRATIVE_ACTION))

    def _dismiss(self, conn: Member) -> None:
        """Close a guest: guests hold too much memory, and this one has the largest share."""
        if conn in self._expected:
            self.logging_in.pop(conn).cancel()
            self.given_up(conn, "refused_guest", GUESTS)
        else:
            conn.end("refused_guest", GUESTS, abort=True)

    def left(self, conn: Member) -> None:
        """A connection is closed: nobody waits for its login, nor for its reads, which may take long."""
        if (login := self.logging_in.pop(conn, None)) is not None:
            login.cancel()
        for task in self.reading.pop(conn, ()):
            task.cancel()
        conn.metering.leave_user(conn)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that ends with the server."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the MQTT front end failed", exc_info=task.exception())

    async def end_tasks(self) -> None:
        """Cancel all tasks."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def empty(self, timeout: float) -> None:
        """Wait until all transports are closed. Aborts them after `timeout` seconds."""
        if self.open:
            self._empty = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._empty], timeout=timeout)
            for conn in list(self.open):
                conn.transport.abort()

    def press(self, high: bool) -> None:
        """Hold publishers while too much data waits for the disk; release them after."""
        self.under_pressure = high
        if not high:
            for conn in list(self.open):
                conn.release("pressure")

    def stats(self) -> dict[str, int]:
        """Return the counters since the start, and the present numbers."""
        return {
            **self.broker.counts,
            "received": self.traffic.published,
            "received_bytes": self.traffic.received_bytes,
            "sent_bytes": self.traffic.all_sent_bytes,
            "connections": len(self.open) + len(self._expected),
            "sessions": len(self.broker.sessions),
            "session_bytes": self.broker.sessions.memory.total,
            "retained": len(self.broker.router.retained),
            "retained_bytes": self.broker.router.retained.size,
            "shared_subscriptions": len(self.broker.router.groups),
            **{f"over_{name}": number for name, number in self.budgets.over().items()},
        }
