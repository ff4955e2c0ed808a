"""The sections [mqtt] and [[upstream]] of the configuration, as structs that check themselves.

Sizes are bytes and durations milliseconds. A mistake is a ValueError whose text names the key in
backticks, so that the configuration can report it with its line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from bridge.access.accounts import Account
from bridge.access.rules import AccessRule, Role
from bridge.model import KIB, MIB
from bridge.mqtt.mappings import Mapping
from bridge.net.addresses import is_loopback, normal, parse_network
from bridge.net.brokers import is_secure, url_mistake
from bridge.net.budgets import Budget
from bridge.printable import without_credentials
from bridge.settingtypes import Bytes, Count, Millis
from bridge.topics import overlap

NEVER = 0xFFFFFFFF  # seconds of a session without an end
_USUAL = ["tcp://127.0.0.1:1883"]  # to listen on
SCHEMES = {"tcp": 1883, "tls": 8883, "ws": 8080, "wss": 8443}
_WEB = {"http": 80, "https": 443}
_MEANT = {"mqtts": "tls", "ssl": "tls", "tls": "tls", "http": "ws", "ws": "ws", "https": "wss", "wss": "wss"}


class Address(NamedTuple):
    """A listener's url, taken apart."""

    scheme: str
    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    @property
    def secure(self) -> bool:
        """Whether it needs a certificate."""
        return self.scheme in ("tls", "wss")


def parse_address(url: str) -> Address:
    """Take "tcp://127.0.0.1:1883" apart; the port may be left out, port 0 means any free one."""
    found = _parsed(url)
    if found is None:
        scheme, _, rest = url.rpartition("://")
        place = rest.partition("/")[0].rpartition("@")[2].strip(":")
        meant = f"{_MEANT.get(scheme, 'tcp')}://{f'127.0.0.1:{place}' if place.isdecimal() else place}"
        raise ValueError(
            f"`listen`: {without_credentials(url)!r} is not tcp://, tls://, ws:// or wss:// and an address "
            f"host:port; write {meant if _parsed(meant) else _USUAL[0]}"
        )
    return found


def _parsed(url: str) -> Address | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in SCHEMES or not parts.hostname or parts.path.strip("/") or parts.username:
        return None
    return Address(parts.scheme, normal(parts.hostname), SCHEMES[parts.scheme] if port is None else port)


def origin_of(text: str) -> str:
    """Return the normal form of a web page's origin, as browsers write it. Raises ValueError."""
    try:
        parts = urlsplit("" if text == "null" else text)
        port = None if parts.port == _WEB.get(parts.scheme) else parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    rest = parts.path or parts.query or parts.fragment or parts.username is not None
    if text != "null" and (rest or not (parts.scheme and parts.hostname)):
        why = 'is not an origin; write it like "https://host:8443", without a path, or "null"'
        raise ValueError(f"`origins`: {text!r} {why}")
    host = normal(parts.hostname or "")
    place = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{place}{'' if port is None else f':{port}'}" if host else text


class TlsSettings(Struct, frozen=True, kw_only=True):
    """[mqtt.tls]: the certificate of the tls and wss listeners, read again on reload.

    With `client_ca` every client must present a certificate signed by it. The user is the one whose
    [[mqtt.user]] lists the certificate, or else the one that its common name names: no password is asked for.

    `crl_file` has the revocation lists of the CAs that sign client certificates, in PEM, one for each. A
    certificate in them is refused. So is every certificate of a CA whose list is missing or expired.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None
    crl_file: Path | None = None

    def __post_init__(self) -> None:
        if self.crl_file is not None and self.client_ca is None:
            raise ValueError("`crl_file` needs `client_ca`: without it clients show no certificates")


class Limits(Struct, frozen=True, kw_only=True):
    """[mqtt.limits]: what clients may use before they are refused, slowed, or lose messages.

    connections           open connections in all, and from one address (connections_per_address);
                          with TLS they count from before the handshake. An IPv6 /64 is one address
    connect_timeout       from the connection to a complete CONNECT; a TLS handshake before has as long
    guest_bytes           memory for all clients that have not logged in: 4 KiB each, 32 KiB in a TLS
                          handshake, and what they have sent; above it, those that hold most are closed
    handshakes_per_second  has no effect any more: TLS handshakes have a thread of their own
    max_keep_alive        seconds; MQTT 5 clients get it in CONNACK; a silent client is closed after 1.5
                          times it. A client of 3.1.1 that asks for no keep-alive may be silent
    in_flight             messages sent to one subscriber and not yet acknowledged by it
    queued_messages       messages waiting for one subscriber beyond those, and their bytes
                          (queued_bytes); then the oldest is dropped and counted
    sessions              persistent sessions of clients that are away; of the user who has most of them,
                          the one away for longest goes first, and is logged. Clients without a user name
                          count by address
    session_bytes         memory of all sessions together: messages under way and waiting, filters, wills,
                          requests not answered yet; above it, the user who has most loses messages that
                          wait, the oldest first, and without any, sessions. Clients without a user name
                          count by address
    session_expiry_interval   how long a session may outlive its connection at most
    messages_per_second   of one connection; 0 is no limit; a faster one is read more slowly. SUBSCRIBE,
                          UNSUBSCRIBE and PINGREQ count too
    subscriptions         topic filters of one client; together they may have 256 times as many characters
    retained_messages     retained messages in all, and their bytes (retained_bytes). One too many takes
                          the place of the one that was set first by the user who has most; from that user
                          itself, it is stored and delivered, but not retained
    """

    connections: Count = 10_000
    connections_per_address: Count = 10_000
    connect_timeout: Annotated[Millis, Meta(ge=10)] = 10_000
    guest_bytes: Annotated[Bytes, Meta(ge=256 * KIB)] = 32 * MIB
    handshakes_per_second: Annotated[int, Meta(ge=0)] = 0
    max_keep_alive: Annotated[int, Meta(ge=1, le=65_535)] = 3_600
    in_flight: Annotated[int, Meta(ge=1, le=65_535)] = 128
    queued_messages: Count = 10_000
    queued_bytes: Annotated[Bytes, Meta(ge=1024)] = 16 * MIB
    sessions: Count = 10_000
    session_bytes: Annotated[Bytes, Meta(ge=64 * KIB)] = 1024 * MIB
    session_expiry_interval: Annotated[Millis, Meta(ge=1000)] = 7 * 24 * 3_600_000
    messages_per_second: Annotated[int, Meta(ge=0)] = 0
    subscriptions: Count = 1_000
    retained_messages: Count = 10_000
    retained_bytes: Annotated[Bytes, Meta(ge=1024)] = 16 * MIB


class ListenerLimits(Struct, frozen=True, kw_only=True):
    """[mqtt.listener.limits]: limits of [mqtt.limits] that are others for the clients of a listener.

    `connections` and `connections_per_address` count those of this listener, beside those of all.
    """

    connections: Count | None = None
    connections_per_address: Count | None = None
    connect_timeout: Annotated[Millis, Meta(ge=10)] | None = None
    max_keep_alive: Annotated[int, Meta(ge=1, le=65_535)] | None = None
    messages_per_second: Annotated[int, Meta(ge=0)] | None = None
    subscriptions: Count | None = None


class ListenerTable(Struct, frozen=True, kw_only=True):
    """[[mqtt.listener]]: addresses, and what holds for the clients that come in there.

    What is left out is as in [mqtt], but for `allow_anonymous`: left out, it allows clients without a user
    name on loopback only. `users_file`, or `client_ca` in its `tls`, make the users of this listener others
    than those of [mqtt], also if they have the same names.

    `origins` are the origins of the web pages that may come in, and no others may: each counts as the browser
    that shows it, with its place in the network and its certificate. Left out, pages of this machine may come
    in on loopback, and any page where a browser alone is nobody: where every client needs a password.

    `proxy_protocol` are the networks of proxies. If there are any, connections come from these only, and each
    begins with a header of the PROXY protocol, version 2, that names the client.
    """

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
    listen: Annotated[list[str], Meta(min_length=1)]
    proxy_protocol: list[str] = []
    origins: list[str] | None = None
    allow_anonymous: bool | None = None
    unmatched: Literal["deliver", "refuse"] | None = None
    users_file: Path | None = None
    client_ids: Literal["any", "user", "prefix"] | None = None
    forbidden: Literal["disconnect", "acknowledge"] | None = None
    acl: list[AccessRule] | None = None
    user: list[Account] | None = None
    tls: TlsSettings | None = None
    limits: ListenerLimits = ListenerLimits()

    def __post_init__(self) -> None:
        mistakes = []
        for network in self.proxy_protocol:
            try:
                parse_network(network)
            except ValueError as error:
                mistakes.append(f"`proxy_protocol`: {error}; write it like 10.0.0.0/8 or 10.0.0.7")
        mistakes += _wrong_origins(self.origins)
        if mistakes:
            raise ValueError("\n".join(mistakes))


def _wrong_origins(origins: Sequence[str] | None) -> Iterator[str]:
    for origin in origins or ():
        try:
            origin_of(origin)
        except ValueError as error:
            yield str(error)


class ListenerSettings(NamedTuple):
    """The settings of one listener, complete; `own_users`: its users are not those of [mqtt]."""

    name: str  # empty for the listener of [mqtt]
    listen: Sequence[str]
    proxy_protocol: Sequence[str]
    origins: frozenset[str] | None
    allow_anonymous: bool | None
    unmatched: Literal["deliver", "refuse"]
    users_file: Path | None
    client_ids: Literal["any", "user", "prefix"]
    forbidden: Literal["disconnect", "acknowledge"]
    acl: Sequence[AccessRule]
    role: Sequence[Role]
    user: Sequence[Account]
    tls: TlsSettings | None
    limits: Limits
    own_limits: ListenerLimits
    own_users: bool

    @property
    def option(self) -> str:
        """What the log calls the keys of this listener."""
        return f"mqtt.listener {self.name}" if self.name else "mqtt"

    def mistakes(self, *, plugin: bool) -> Iterator[str]:
        """What is wrong with its addresses, or that nobody could log in; `plugin`: one may let clients in."""
        ca = self.tls.client_ca if self.tls is not None else None
        for url in self.listen:
            try:
                address = parse_address(url)
            except ValueError as error:
                yield str(error)
                continue
            if address.secure and self.tls is None:
                yield f"`listen`: {url!r} needs a certificate: add [mqtt.tls] with cert and key"
            local = address.loopback and not self.proxy_protocol
            anonymous = local or self.allow_anonymous is True
            users = plugin or self.users_file is not None or (address.secure and ca is not None)
            if not (anonymous or users):
                yield (
                    f"`listen`: nobody could log in at {url!r}: set users_file, tls.client_ca, a plugin in "
                    "[auth.plugins] or allow_anonymous = true"
                )


class BrokerSettings(Struct, frozen=True, kw_only=True):
    """How another broker is reached. The client id names our session there, which outlives connections.

    Files are read again for each connection. `protocol` left out is MQTT 5, or 3.1.1 if the broker refuses 5.
    """

    url: str = "mqtt://127.0.0.1:1883"
    client_id: str | None = None
    username: str | None = None
    password_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    alpn: str | None = None
    protocol: Literal["3.1.1", "5"] | None = None
    keep_alive: Annotated[int, Meta(ge=1, le=65_535)] = 30

    def __post_init__(self) -> None:
        mistakes = []
        if mistake := url_mistake(self.url):
            mistakes.append(f"`url`: {mistake}")
        if self.client_id == "":
            mistakes.append("`client_id` is empty; a persistent session needs a name")
        if (self.cert is None) != (self.key is None):
            mistakes.append("`cert` and `key` belong together")
        if mistakes:
            raise ValueError("\n".join(mistakes))

    @property
    def session_seconds(self) -> int:
        """How long that broker keeps the session without a connection, in MQTT 5 (section 3.1.2.11.2)."""
        return NEVER


class ExternalSettings(BrokerSettings, frozen=True, kw_only=True):
    """[mqtt.external]: the upstream of mode "external", whose mappings are the topics of the streams.

    `client_id` names the persistent session at that broker: it must stay the same for messages to wait
    there while the bridge is down. With `share_group` several bridges share the load (`$share/...`).

    `operations` lets clients of that broker send requests. The caller is named by the client level of the
    request's topic, so that broker's own rules must let each client publish to
    `streambridge/<its client id>/+` only. The rules of [[mqtt.acl]] for "" and "*" apply to these clients.
    Without such rules they may append, read and describe, but not create, update, purge or delete.
    """

    client_id: str | None = "streambridge"
    share_group: str | None = None
    operations: bool = False

    def __post_init__(self) -> None:
        BrokerSettings.__post_init__(self)
        if self.share_group is not None and (not self.share_group or set(self.share_group) & set("/+#")):
            raise ValueError("`share_group` must be a name without `/`, `+` and `#`")


class UpstreamSettings(BrokerSettings, frozen=True, kw_only=True):
    """[[upstream]]: a broker whose messages are published here as those of a client.

    `client_id` left out is `<gateway>-<name>`. `session_expiry` is how long that broker keeps what it has for
    us while there is no connection; left out, without limit, as in 3.1.1 always. `user` is the user of
    [[mqtt.acl]] whose `publish` rules the messages are held to; left out, they may go wherever the mappings
    lead.
    """

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
    url: str
    user: str | None = None
    session_expiry: Annotated[Millis, Meta(ge=1000)] | None = None
    mapping: list[Mapping]

    def __post_init__(self) -> None:
        BrokerSettings.__post_init__(self)
        mistakes = [
            f"`{key}` needs TLS: write url as mqtts://host"
            for key in ("ca", "cert", "key", "alpn")
            if getattr(self, key) is not None and not is_secure(self.url)
        ]
        if self.password_file is not None and self.username is None:
            mistakes.append("`password_file` needs `username`")
        if self.session_expiry is not None and self.protocol == "3.1.1":
            mistakes.append('`session_expiry` needs protocol = "5"')
        if not self.mapping:
            mistakes.append("`mapping` is empty; add [[upstream.mapping]] with a filter")
        if mistakes:
            raise ValueError("\n".join(mistakes))
        for number, one in enumerate(self.mapping):
            for other in self.mapping[:number]:
                if overlap(one.filter, other.filter):
                    raise ValueError(
                        f"`mapping`: {other.filter!r} and {one.filter!r} overlap, so a message would come "
                        "twice; write filters that have no topic in common"
                    )

    @property
    def session_seconds(self) -> int:
        return NEVER if self.session_expiry is None else min(self.session_expiry // 1000, NEVER)


class MqttConfig(Struct, frozen=True, kw_only=True):
    """[mqtt]: the MQTT front end.

    `listen` are the addresses of one listener, for which all else here holds; `listener` are more of them.
    Left out, `listen` is tcp://127.0.0.1:1883, or nothing if there is a [[mqtt.listener]].

    `allow_anonymous` left out allows clients without a user name on loopback listeners only.
    `refused_stream` is the stream that keeps messages which their own stream can never store, and those that
    the rules forbid and whose client cannot be told; the embedded broker acknowledges them once they are
    there. `forbidden` says what becomes of a client of MQTT 3.1.1 that publishes what the rules forbid, on a
    topic without a stream: "disconnect", or "acknowledge", as Mosquitto does, and drop the message.

    `unmatched` is what becomes of messages on topics that no stream takes: "deliver" gives them to
    subscribers, and lists the topics; "refuse" refuses them as it does messages to a stream that does not
    exist.

    Every `sys_interval`, the state of the broker is published below `$SYS/broker/` for those who subscribe to
    it, with Mosquitto's topics; 0 turns that off.

    `client_ids` sets which client ids a user may have: "any"; "user", its own name only; "prefix", its name,
    also followed by `:` and more. With the last two, clients without a user name may have no id of a user,
    and a user takes back an id of his from another client. An empty client id, for which the server chooses
    one, is always allowed.
    """

    mode: Literal["embedded", "external"] = "embedded"
    listen: list[str] = msgspec.field(default_factory=lambda: _USUAL)
    origins: list[str] | None = None
    max_packet: Annotated[Bytes, Meta(ge=KIB, le=256 * MIB)] = MIB
    refused_stream: Annotated[str, Meta(min_length=1)] | None = None
    allow_anonymous: bool | None = None
    unmatched: Literal["deliver", "refuse"] = "deliver"
    users_file: Path | None = None
    client_ids: Literal["any", "user", "prefix"] = "any"
    forbidden: Literal["disconnect", "acknowledge"] = "disconnect"
    sys_interval: Annotated[Millis, Meta(ge=0)] = 10_000
    acl: list[AccessRule] = []
    role: list[Role] = []
    user: list[Account] = []
    tls: TlsSettings | None = None
    limits: Limits = Limits()
    listener: list[ListenerTable] = []
    budget: list[Budget] = []
    external: ExternalSettings = ExternalSettings()

    def __post_init__(self) -> None:
        if self.listen is _USUAL:
            msgspec.structs.force_setattr(self, "listen", [] if self.listener else list(_USUAL))
        mistakes = []
        if self.mode == "embedded" and not (self.listen or self.listener):
            mistakes.append("`listen` is empty; name at least one listener, such as tcp://127.0.0.1:1883")
        for url in self.listen:
            try:
                parse_address(url)
            except ValueError as error:
                mistakes.append(str(error))
        mistakes += _wrong_origins(self.origins)
        if mistakes:
            raise ValueError("\n".join(mistakes))

    def with_rules_of(self, other: MqttConfig) -> MqttConfig:
        """These settings with the rules, roles and users of others; listeners are the same by their names."""
        named = {one.name: one for one in other.listener}
        listener = [
            msgspec.structs.replace(one, acl=named[one.name].acl, user=named[one.name].user)
            if one.name in named
            else one
            for one in self.listener
        ]
        return msgspec.structs.replace(
            self,
            acl=other.acl,
            role=other.role,
            user=other.user,
            client_ids=other.client_ids,
            listener=listener,
        )

    def rules_lost_in(self, other: MqttConfig) -> list[str]:
        """The keys of rules and roles that are here, and of which none is left in others.

        Without rules everybody may do everything, so an emptied or half-written file would open the gateway.
        """
        lost = [f"mqtt.{key}" for key in ("acl", "role") if getattr(self, key) and not getattr(other, key)]
        named = {one.name: one for one in other.listener}
        for one in self.listener:
            fresh = named.get(one.name, one).acl
            if one.acl and not (other.acl if fresh is None else fresh):
                lost.append(f"mqtt.listener.{one.name}.acl")
        return lost

    def listeners(self) -> list[ListenerSettings]:
        """All listeners, complete: that of [mqtt] first, and the others by their order."""
        return [self._listener(None), *map(self._listener, self.listener)]

    def _listener(self, own: ListenerTable | None) -> ListenerSettings:
        """One of [[mqtt.listener]] with what it does not set, or None for that of [mqtt]."""
        given = own or ListenerTable(name="mqtt", listen=self.listen, allow_anonymous=self.allow_anonymous)
        origins = self.origins if given.origins is None else given.origins
        limits = {
            key: value for key, value in msgspec.structs.asdict(given.limits).items() if value is not None
        }
        return ListenerSettings(
            name="" if own is None else own.name,
            listen=given.listen,
            proxy_protocol=given.proxy_protocol,
            origins=None if origins is None else frozenset(map(origin_of, origins)),
            allow_anonymous=given.allow_anonymous,
            unmatched=given.unmatched or self.unmatched,
            users_file=given.users_file or self.users_file,
            client_ids=given.client_ids or self.client_ids,
            forbidden=given.forbidden or self.forbidden,
            acl=self.acl if given.acl is None else given.acl,
            role=self.role,
            user=self.user if given.user is None else given.user,
            tls=given.tls or self.tls,
            limits=msgspec.structs.replace(self.limits, **limits),
            own_limits=given.limits,
            own_users=given.users_file is not None
            or (given.tls is not None and given.tls.client_ca is not None),
        )
