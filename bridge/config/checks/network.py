"""The listeners, who could reach them, and whether destinations speak TLS."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from bridge.access.accounts import Account
from bridge.access.rules import FILTERS, Rights
from bridge.config.checks.context import CheckContext, DeclaredExport, Finding, existing
from bridge.config.tomlfile import Keys
from bridge.config.tomlstruct import dotted, former_keys, snake
from bridge.mqtt.settings import parse_address
from bridge.net.addresses import host_and_port, is_loopback, parse_network
from bridge.net.listening import place, refusal
from bridge.net.peer import uid_of
from bridge.printable import masked
from bridge.streams.store import is_running

Wanted = tuple[Keys, str, int]


def listeners(context: CheckContext) -> Iterator[Finding]:
    """Report addresses that are configured twice, in use, or not of this machine.

    Our running service uses its own addresses; beside it only duplicates are reported. So they are if this
    user may not see whether it runs, which is reported for the data directory.
    """
    data_dir = context.config.gateway.data_dir
    there = existing(data_dir)
    running = is_running(data_dir) or (there.is_dir() and not os.access(there, os.X_OK))
    held: list[socket.socket] = []
    ours: list[Wanted] = []
    try:
        for keys, host, port in _wanted(context):
            owner = next((other for other, *place in ours if port and _overlap((host, port), place)), None)
            ours.append((keys, host, port))
            if owner is not None:
                why = f"{dotted(owner)} of this configuration listens there too; choose another port"
                yield context.error(keys, f"cannot listen at {place(host, port)}: {why}")
            elif not running:
                try:
                    held.append(socket.create_server((host, port), family=_family(host)))
                except OSError as error:
                    yield context.error(keys, refusal(host, port, error))
    finally:
        for listener in held:
            listener.close()


def _overlap(one: Sequence[object], other: Sequence[object]) -> bool:
    """Return whether two addresses with ports cannot both have a listener."""
    hosts = {"127.0.0.1" if host == "localhost" else str(host) for host in (one[0], other[0])}
    every = "::" if any(":" in host for host in hosts) else "0.0.0.0"  # noqa: S104 - for comparison only
    same_family = len({":" in host for host in hosts}) == 1
    return one[1] == other[1] and same_family and (len(hosts) == 1 or every in hosts)


def unused(context: CheckContext) -> Iterator[Finding]:
    """Report listeners that the mode does not open, and settings that have no effect any more."""
    limits: Keys = ("mqtt", "limits", "handshakes_per_second")
    if context.document.states(limits):
        yield context.warning(
            limits, "not used any more: TLS handshakes have a thread of their own; remove this line"
        )
    section = context.document.data.get("mqtt")
    if context.config.mqtt.mode == "external" and isinstance(section, dict) and "listen" in section:
        yield context.warning(
            ("mqtt", "listen"),
            'not used: mode = "external" opens no listener; remove this line, or set mode = "embedded"',
        )


def exposure(context: CheckContext) -> Iterator[Finding]:
    """Report listeners without a password that other machines can reach."""
    for section, what in (("http", "the status page"), ("greengrass", "every stream")):
        listen = getattr(context.config, section).listen
        greengrass = context.config.greengrass
        if section == "greengrass" and (greengrass.token_file or greengrass.tokens_file) is not None:
            continue
        if listen and context.knows(section, "listen") and not is_loopback(host_and_port(listen)[0]):
            other = ", or set greengrass.token_file" if section == "greengrass" else ""
            yield context.warning(
                (section, "listen"),
                f"every machine that reaches {listen} has access to {what} without a password; listen on "
                f"127.0.0.1{other}",
            )


def local_clients(context: CheckContext) -> Iterator[Finding]:
    """Report local users who come in on port 8088 without a token and could do everything, or nothing."""
    greengrass, mqtt = context.config.greengrass, context.config.mqtt
    if not greengrass.listen:
        return
    if not greengrass.authenticate_clients:
        yield context.warning(
            ("greengrass", "authenticate_clients"),
            f"every program on this machine has the rights of {greengrass.user!r}, in containers that share "
            "its network too; name the users of your components in greengrass.users instead",
        )
    if not context.knows_all("mqtt", "acl") or not context.knows_all("mqtt", "role"):
        return
    for name, user in greengrass.users.items():
        keys: Keys = ("greengrass", "users", name)
        try:
            uid_of(name)
        except ValueError as error:
            yield context.error(keys, str(error))
        if not (mqtt.acl or mqtt.role):
            yield context.error(
                keys, f"without rules, {user!r} could do everything, so {name} is refused; add [[mqtt.acl]]"
            )


def proxies(context: CheckContext) -> Iterator[Finding]:
    """Report listeners where everybody counts as a proxy, and may claim any address."""
    for number, one in enumerate(context.config.mqtt.listener):
        for network in one.proxy_protocol:
            if parse_network(network).prefixlen == 0:
                yield context.error(
                    ("mqtt", "listener", number, "proxy_protocol"),
                    f"{network!r} lets every machine claim any address; list the addresses of your proxies",
                )


def certificates_of_users(context: CheckContext) -> Iterator[Finding]:
    """Report certificates of users that no listener asks for: these users cannot log in at all."""
    mqtt = context.config.mqtt
    asks = any(one.tls is not None and one.tls.client_ca is not None for one in mqtt.listeners())
    if asks or not (context.knows_all("mqtt", "tls") and context.knows_all("mqtt", "listener")):
        return
    tables: list[tuple[Keys, Sequence[Account]]] = [(("mqtt",), mqtt.user)]
    tables += [(("mqtt", "listener", n), one.user or ()) for n, one in enumerate(mqtt.listener)]
    for table, accounts in tables:
        for number, account in enumerate(accounts):
            if account.certificates:
                yield context.error(
                    (*table, "user", number, "certificates"),
                    f"{account.name!r} can log in only with these, but no listener asks for certificates; "
                    "set client_ca in its tls, or remove this",
                )


def unencrypted(context: CheckContext) -> Iterator[Finding]:
    """Report a Firehose listener without TLS that other machines can reach."""
    firehose = context.config.firehose
    if not firehose.listen or not context.knows("firehose", "listen") or firehose.tls is not None:
        return
    if not is_loopback(host_and_port(firehose.listen)[0]):
        yield context.warning(
            ("firehose", "listen"),
            f"records on their way to {firehose.listen} can be read by others, and sent again for 5 minutes; "
            "add [firehose.tls]",
        )


def destinations(context: CheckContext) -> Iterator[Finding]:
    """Report URLs that no server can have, and ports whose use of TLS is not that of the URL."""
    seen: dict[tuple[str, int, bool], str] = {}
    for keys, url in _urls(context):
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or _PORTS[parts.scheme]
        except (ValueError, KeyError):
            host, port = None, 0
        if not host and keys[-1] == "endpoint_url":  # else it is reported already
            yield context.error(keys, "no server has such a URL; it is like https://host:8443")
        if host:
            secure = parts.scheme in ("mqtts", "https")
            if (host, port, secure) not in seen:
                hello = _CONNECT if parts.scheme.startswith("mqtt") else _HEAD
                seen[host, port, secure] = _wrong_port(host, port, hello, secure=secure)
            if why := seen[host, port, secure]:
                scheme = parts.scheme.removesuffix("s") if secure else f"{parts.scheme}s"
                yield context.error(keys, f"{host}:{port} {why}; write {scheme}://, or use the other port")


def secrets_in_urls(context: CheckContext) -> Iterator[Finding]:
    """Report exports with a password or a token in a URL, which is stored with the stream."""
    for stream in context.config.streams.values():
        for kind, items in stream.export_definition.items():
            for number, raw in enumerate(items):
                for name, value in raw.items():
                    if isinstance(value, str) and masked(value) != value and _SECRET.search(masked(value)):
                        yield context.warning(
                            ("streams", stream.name, "export", kind, number, snake(name)),
                            "a secret in the URL is stored in the stream's definition, unencrypted; use an "
                            "option that names a file, such as bearer_token_file",
                        )


# In a masked URL: a user or password, a parameter without a name, or one whose name tells.
_SECRET = re.compile(
    r"://\*\*\*|[?&;]\*\*\*|[?&;][^=&;]*(token|key|secret|pass|pwd|sig|auth|cred|code)[^=&;]*=", re.IGNORECASE
)
_PORTS = {"mqtt": 1883, "mqtts": 8883, "http": 80, "https": 443}
_CONNECT = b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\x00\x00"  # MQTT 3.1.1, a clean session, no client id
_HEAD = b"HEAD / HTTP/1.0\r\n\r\n"
_PATIENCE = 3.0  # seconds


def _urls(context: CheckContext) -> Iterator[tuple[Keys, str]]:
    config = context.config
    if config.mqtt.mode == "external" and context.knows("mqtt", "external"):
        yield ("mqtt", "external", "url"), config.mqtt.external.url
    for number, one in enumerate(config.upstream):
        yield ("upstream", number, "url"), one.url
    if config.aws.endpoint_url and context.knows("aws", "endpoint_url"):
        yield ("aws", "endpoint_url"), config.aws.endpoint_url
    for export in context.exports:
        if url := getattr(export.config, "endpoint_url", None):
            keys = dict(_former(context, export)).get("endpoint_url", (*export.keys, "endpoint_url"))
            if not any(str(keys[-1]) in mistake.what for mistake in export.mistakes):
                yield keys, url


def _former(context: CheckContext, export: DeclaredExport) -> Iterator[tuple[str, Keys]]:
    """The options of an export that the file has only under their former names, and where."""
    exporter, states = context.registry.exporters.get(export.kind), context.document.states
    for old, new in former_keys(exporter.Config).items() if exporter is not None else ():
        if states((*export.keys, old)) and not states((*export.keys, new)):
            yield new, (*export.keys, old)


def former_names(context: CheckContext) -> Iterator[Finding]:
    """Report options under their former names, once for all exports of a kind."""
    found: dict[tuple[str, str], list[Keys]] = {}
    for export in context.exports:
        for new, keys in _former(context, export):
            found.setdefault((export.kind, new), []).append(keys)
    for (_, new), places in found.items():
        more = len(places) - 1
        others = f" ({more} other export{'s'[: more - 1]} of this kind too)" if more else ""
        yield context.warning(
            places[0], f"the former name of `{new}`, still accepted{others}; write `{new}` instead"
        )


def _wrong_port(host: str, port: int, hello: bytes, *, secure: bool) -> str:
    """Return what is wrong with the port, or an empty text if nothing is, or nothing answers."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname=host).do_handshake()
    answer = _answer(host, port, outgoing.read())
    if answer is None:
        return ""
    # An alert or a handshake, RFC 8446 5.1.
    speaks_tls = answer[:1] in (b"\x15", b"\x16") and answer[1:2] == b"\x03"
    if speaks_tls and not secure:
        return "speaks only TLS"
    if secure and not speaks_tls and _answer(host, port, hello):
        return "does not speak TLS"
    return ""


def _answer(host: str, port: int, hello: bytes) -> bytes | None:
    """Return the first bytes of the answer, none if it closes the connection; None without any answer."""
    try:
        with socket.create_connection((host, port), _PATIENCE) as connection:
            connection.sendall(hello)
            try:
                return connection.recv(16)
            except ConnectionError:
                return b""
    except OSError:
        return None


def client_ids(context: CheckContext) -> Iterator[Finding]:
    """Report rules that give rights to a client id, since any client may choose any id."""
    config = context.config.mqtt
    if config.client_ids != "any" or config.mode != "embedded":
        return
    bound = {one.name for one in config.user if one.client_ids}
    tables: list[tuple[Keys, Rights]]
    tables = [(("acl", number), rule) for number, rule in enumerate(config.acl) if rule.user not in bound]
    for number, role in enumerate(config.role):
        if any(role.name in one.roles and one.name not in bound for one in config.user):
            tables.append((("role", number), role))
    for number, listener in enumerate(config.listener):
        if listener.client_ids in (None, "any") and listener.user is None:
            rules = enumerate(listener.acl or ())
            tables += [(("listener", number, "acl", n), rule) for n, rule in rules if rule.user not in bound]
    for keys, rights in tables:
        for right in FILTERS:
            # Each client has its own level below streambridge/ for requests, whatever the rules are.
            names = getattr(rights, right) or ()
            wide = [name for name in names if "%c" in name and not name.startswith("streambridge/")]
            if wide:
                yield context.warning(
                    ("mqtt", *keys, right),
                    f"{wide[0]!r} gives rights to any client that chooses this client id; write %u for the "
                    'user name, or bind the ids to users: mqtt.client_ids = "user" or "prefix", or '
                    "client_ids in [[mqtt.user]]",
                )


def shared_client_ids(context: CheckContext) -> Iterator[Finding]:
    """Report client ids that tables of several listeners bind to different users."""
    mqtt = context.config.mqtt
    tables: list[tuple[Keys, str, Sequence[Account]]] = [(("mqtt",), "", mqtt.user)]
    for number, (given, listener) in enumerate(zip(mqtt.listener, mqtt.listeners()[1:], strict=True)):
        realm = listener.name if listener.own_users else ""
        tables.append((("mqtt", "listener", number), realm, given.user or ()))
    known: list[tuple[Keys, str, str, str]] = []
    for table, realm, accounts in tables:
        for number, account in enumerate(accounts):
            for one in account.client_ids:
                for other, of, user, theirs in known:
                    if other != table and (of, user) != (realm, account.name) and _share_an_id(one, theirs):
                        where = dotted((*other, "user"))
                        yield context.warning(
                            (*table, "user", number, "client_ids"),
                            f"{one!r} is bound to {user!r} in {where} too, and all listeners share the "
                            "client ids: whoever comes second is refused; give each its own ids",
                        )
                        break
            known += [(table, realm, account.name, one) for one in account.client_ids]


def _share_an_id(one: str, other: str) -> bool:
    """Whether a client id could fit both of two entries of `client_ids`."""
    short, long = sorted((one, other), key=lambda entry: len(entry.rstrip("*")))
    if short.endswith("*"):
        return long.startswith(short[:-1])
    return short == long or short + "*" == long


def _wanted(context: CheckContext) -> Iterator[Wanted]:
    config = context.config
    if config.mqtt.mode == "embedded" and context.knows("mqtt", "mode"):
        urls = config.mqtt.listen
        if not context.knows("mqtt", "listen"):  # one of them is wrong; the others are still checked
            section = context.document.data.get("mqtt")
            stated = section.get("listen") if isinstance(section, dict) else None
            urls = [url for url in stated if isinstance(url, str)] if isinstance(stated, list) else []
        addresses: list[tuple[Keys, str]] = [(("mqtt", "listen"), url) for url in urls]
        addresses += [
            (("mqtt", "listener", number, "listen"), url)
            for number, listener in enumerate(config.mqtt.listener)
            for url in listener.listen
        ]
        for keys, url in addresses:
            try:
                address = parse_address(url)
            except ValueError:
                continue
            yield keys, address.host, address.port
    for section in ("greengrass", "firehose", "http"):
        listen = getattr(config, section).listen
        if listen and context.knows(section, "listen"):
            yield (section, "listen"), *host_and_port(listen)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
