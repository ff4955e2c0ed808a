"""The listeners: opened together, reloaded together, each with its own access.

What it promises about a reload:
* Everything new is read, checked and bound first. A mistake changes nothing.
* An address that stays is open all the time.
* If a listener is removed, or authenticates clients in another way, its connections are closed after
  everything that they sent is stored.

    config --_plan (may fail)--> users, rules, certificates, new sockets --_apply--> in force
"""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from bridge.access.logins import Access, Loaded, read
from bridge.access.proofs import authorities
from bridge.access.revocations import Revocations
from bridge.errors import ConfigError
from bridge.mqtt.server.connection import Connection
from bridge.mqtt.server.connections import Endpoint, Listener
from bridge.mqtt.server.proxied import ProxyServer
from bridge.mqtt.server.tls import Handshake, tls_context
from bridge.mqtt.server.websocket import WebSocket
from bridge.mqtt.settings import parse_address
from bridge.net.crl import Crls, read_crls
from bridge.net.listening import Listening, listen, listen_now
from bridge.net.tlslayer import TlsLayer
from bridge.readable import ensure_regular, unreadable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from pathlib import Path

    from bridge.mqtt.server.connections import Connections
    from bridge.mqtt.settings import ListenerSettings, MqttConfig
    from bridge.readable import Kept

log = logging.getLogger(__name__)

GONE = "its listener was removed, or authenticates clients in another way now"
_URL_SCHEMES = {"tcp": "mqtt", "tls": "mqtts", "ws": "ws", "wss": "wss"}

# An address of a listener: the name of the listener, the URL, and a number that tells equal URLs apart.
Key = tuple[str, str, int]


class Open(NamedTuple):
    """An address that is open."""

    endpoint: Endpoint
    listening: Listening
    proxied: ProxyServer | None  # None: the event loop accepts its connections

    def close(self) -> None:
        """Accept no more connections."""
        (self.proxied or self.listening).close()


class Plan(NamedTuple):
    """A configuration that was read and checked: settings, access and certificates of each listener."""

    listeners: dict[str, tuple[ListenerSettings, Loaded, ssl.SSLContext | None, Crls]]
    addresses: dict[Key, ListenerSettings]


class Listeners:
    """The listeners of a server, and their accesses."""

    def __init__(self, config: MqttConfig, first: Access, connections: Connections) -> None:
        """`first` is the access of [mqtt]."""
        self._config, self._connections = config, connections
        self._accesses = connections.broker.accesses
        self._listeners: dict[str, Listener] = {}
        self._open: dict[Key, Open] = {}
        self._first = first

    # -- life ------------------------------------------------------------

    def load(self) -> None:
        """Apply users, rules and certificates, before anything is open. Raises ConfigError."""
        self._set(self.plan(self._config))

    async def open(self) -> list[str]:
        """Open all addresses. Returns the URLs with the actual ports. Raises ConfigError."""
        for key, settings in _addresses(self._config).items():
            address = parse_address(key[1])
            self._add(key, await listen(f"{settings.option}.listen", address.host, address.port))
            await self._accept(key)
        return [_url(key, one.listening) for key, one in self._open.items()]

    def close(self) -> None:
        """Accept no more connections."""
        for one in self._open.values():
            one.close()

    def plan(self, config: MqttConfig) -> Plan:
        """Read the files of all listeners; any thread may do it. Raises ConfigError."""
        return _plan(config, self._first.kept)

    def reload(self, config: MqttConfig, plan: Plan | None = None) -> None:
        """Apply a new configuration and its plan. Raises ConfigError, and then nothing has changed."""
        plan = plan or self.plan(config)
        fresh: dict[Key, Listening] = {}
        left = [key for key in self._open if key not in plan.addresses]
        try:
            for key, settings in plan.addresses.items():
                if key not in self._open:
                    fresh[key] = self._bind(key, settings, left)
        except BaseException:
            _close(fresh)
            raise
        self._config = config
        before = {key: one.endpoint.listener.regime(one.endpoint.address) for key, one in self._open.items()}
        self._set(plan)
        for key in left:
            self._remove(key)
            log.info("closed the listener at %s", key[1])
        for key, regime in before.items():
            if key in self._open and self._regime(key) != regime:
                again = self._open[key].listening.again()
                self._remove(key)
                fresh[key] = again
        for key, listening in fresh.items():
            self._add(key, listening)
            self._connections.spawn(self._accept(key))
            log.info("listening at %s", _url(key, listening))

    @property
    def crls_expire(self) -> datetime | None:
        """When the first revocation list expires; None if none expires."""
        ends = [one.revocations.crls.expires for one in self._listeners.values()]
        return min((end for end in ends if end is not None), default=None)

    # -- parts ------------------------------------------------------------

    def _bind(self, key: Key, settings: ListenerSettings, left: list[Key]) -> Listening:
        """Return the sockets of a new address. They may come from a listener that is closing."""
        url = key[1]
        address = parse_address(url)
        for other in left:
            if other[1] == url and address.port:
                return self._open[other].listening.again()
        try:
            return listen_now(f"{settings.option}.listen", address.host, address.port)
        except ConfigError as error:
            cause = error.__cause__
            taken = [other[1] for other in left if parse_address(other[1]).port == address.port]
            if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE and taken:
                raise ConfigError(
                    f"{settings.option}.listen: {url} has the port of {taken[0]}, which is open until a "
                    "restart; restart the service, or remove that one first and reload"
                ) from error
            raise

    def _set(self, plan: Plan) -> None:
        """Apply users, rules, certificates and limits."""
        listeners: dict[str, Listener] = {}
        for name, (settings, loaded, context, crls) in plan.listeners.items():
            access = self._accesses.named.get(name) or Access(loaded, name, beside=self._first)
            access.realm = name if settings.own_users else ""
            access.apply(loaded)
            old = self._listeners.get(name)
            counted, before = (None, None) if old is None else (old.counted, old.revocations)
            revocations = Revocations(crls, before)
            listeners[name] = Listener(settings, access, context, counted, revocations)
        self._listeners = listeners
        self._accesses.named = {name: one.access for name, one in listeners.items()}
        for key, one in self._open.items():
            if key in plan.addresses:
                one.endpoint.listener = listeners[key[0]]

    def _regime(self, key: Key) -> tuple[object, ...]:
        endpoint = self._open[key].endpoint
        return endpoint.listener.regime(endpoint.address)

    def _add(self, key: Key, listening: Listening) -> None:
        endpoint = Endpoint(parse_address(key[1]), self._listeners[key[0]])
        self._open[key] = Open(endpoint, listening, None)

    def _remove(self, key: Key) -> None:
        one = self._open.pop(key)
        one.close()
        self._connections.end_all_of(one.endpoint, GONE)

    async def _accept(self, key: Key) -> None:
        one = self._open.get(key)
        if one is None or one.proxied is not None:
            return
        make = partial(self._connection, one.endpoint)
        if one.endpoint.listener.proxies:
            self._open[key] = one._replace(proxied=ProxyServer(self._connections, make, one.listening))
        else:
            await one.listening.accept(lambda: make()[1])

    def _connection(self, endpoint: Endpoint) -> tuple[Connection, asyncio.Protocol]:
        """Make a connection, and the protocol between it and its socket."""
        conn = Connection(self._connections, endpoint)
        protocol: asyncio.Protocol = WebSocket(conn) if endpoint.address.scheme in ("ws", "wss") else conn
        if endpoint.address.secure:
            context = endpoint.listener.context
            assert context is not None
            protocol = TlsLayer(context, protocol, self._connections.handshakes, Handshake(conn))
        return conn, protocol


def _plan(config: MqttConfig, kept: Kept) -> Plan:
    """Read the files of all listeners. Raises ConfigError."""
    plan = Plan({}, _addresses(config))
    for settings in config.listeners():
        tls, option, crls = settings.tls, f"{settings.option}.tls", Crls()
        known: frozenset[bytes] = frozenset()
        if tls is not None and tls.client_ca is not None:
            load = partial(_authorities, f"{option}.client_ca", tls.client_ca)
            known = kept.read(("ca", tls.client_ca), f"{option}.client_ca", (tls.client_ca,), load)
        if tls is not None and tls.crl_file is not None:
            lists = partial(_lists, f"{option}.crl_file", tls.crl_file, known, tls.client_ca)
            crls = kept.read(("crl", tls.crl_file), f"{option}.crl_file", (tls.crl_file,), lists, known)
        context = None if tls is None else tls_context(option, tls, kept)
        loaded = read(settings, authorities(known), kept, settings.option)
        plan.listeners[settings.name] = (settings, loaded, context, crls)
    lists_of = {None, *(one.tls.crl_file for one in config.listeners() if one.tls is not None)}
    kept.forget(lambda key: key[0] in ("crl", "context") and key[-1] not in lists_of)  # they may be large
    return plan


def _authorities(option: str, path: Path) -> frozenset[bytes]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        ensure_regular(path)
        context.load_verify_locations(path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{option}: {path}: {unreadable(path) or error}") from error
    return frozenset(context.get_ca_certs(binary_form=True))


def _lists(option: str, path: Path, known: frozenset[bytes], client_ca: Path | None) -> Crls:
    crls = read_crls(option, path)
    if known and len(crls.without_list(known)) == len(known):
        raise ConfigError(
            f"{option} {path}: no list in it is from a CA in {client_ca}; get the lists of those CAs"
        )
    return crls


def _addresses(config: MqttConfig) -> dict[Key, ListenerSettings]:
    found: dict[Key, ListenerSettings] = {}
    for settings in config.listeners():
        for url in settings.listen:
            number = 0
            while (settings.name, url, number) in found:
                number += 1
            found[settings.name, url, number] = settings
    return found


def _close(sockets: Mapping[Key, Listening]) -> None:
    for listening in sockets.values():
        listening.close()


def _url(key: Key, listening: Listening) -> str:
    return f"{_URL_SCHEMES[parse_address(key[1]).scheme]}://{listening.place}"
