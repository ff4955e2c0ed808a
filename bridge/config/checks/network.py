"""Whether every address can be listened at, who could reach it, and whether destinations speak TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import msgspec

from bridge.config.checks.look import Finding, Look
from bridge.config.tomlfile import Keys
from bridge.config.tomlstruct import dotted
from bridge.mqtt.settings import parse_address
from bridge.net.addresses import host_and_port, is_loopback
from bridge.net.listening import place, refusal
from bridge.streams.store import is_running

Wanted = tuple[Keys, str, int]


def listeners(look: Look) -> Iterator[Finding]:
    """Addresses that are wanted twice, are taken, or are not ours.

    A running service of ours rightly holds its own; then only those wanted twice are found.
    """
    running = is_running(look.config.gateway.data_dir)
    held: list[socket.socket] = []
    ours: list[Wanted] = []
    try:
        for keys, host, port in _wanted(look):
            owner = next((other for other, *place in ours if port and _overlap((host, port), place)), None)
            ours.append((keys, host, port))
            if owner is not None:
                why = f"{dotted(owner)} of this configuration listens there too; choose another port"
                yield look.error(keys, f"cannot listen at {place(host, port)}: {why}")
            elif not running:
                try:
                    held.append(socket.create_server((host, port), family=_family(host)))
                except OSError as error:
                    yield look.error(keys, refusal(host, port, error))
    finally:
        for listener in held:
            listener.close()


def _overlap(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether two addresses with ports cannot both be listened at."""
    hosts = {"127.0.0.1" if host == "localhost" else str(host) for host in (one[0], other[0])}
    every = "::" if any(":" in host for host in hosts) else "0.0.0.0"  # noqa: S104 - compared with only
    same_family = len({":" in host for host in hosts}) == 1
    return one[1] == other[1] and same_family and (len(hosts) == 1 or every in hosts)


def unused(look: Look) -> Iterator[Finding]:
    """Listeners that the mode does not open."""
    section = look.document.data.get("mqtt")
    if look.config.mqtt.mode == "external" and isinstance(section, dict) and "listen" in section:
        yield look.warning(
            ("mqtt", "listen"),
            'not used, since mode = "external" opens no listener; remove it, or set mode = "embedded"',
        )


def exposure(look: Look) -> Iterator[Finding]:
    """Listeners without a password that others than this machine can reach."""
    for section, what in (("http", "the status page"), ("greengrass", "every stream")):
        listen = getattr(look.config, section).listen
        if section == "greengrass" and look.config.greengrass.token_file is not None:
            continue
        if listen and look.knows(section, "listen") and not is_loopback(host_and_port(listen)[0]):
            other = ", or set greengrass.token_file" if section == "greengrass" else ""
            yield look.warning(
                (section, "listen"),
                f"whoever can reach {listen} gets at {what} without a password; listen at 127.0.0.1{other}",
            )


def destinations(look: Look) -> Iterator[Finding]:
    """Destinations whose port speaks TLS where the URL does not, or the other way round."""
    seen: dict[tuple[str, int, bool], str] = {}
    for keys, url in _urls(look):
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or _PORTS[parts.scheme]
        except (ValueError, KeyError):  # reported with the configuration
            continue
        if host:
            secure = parts.scheme in ("mqtts", "https")
            if (host, port, secure) not in seen:
                hello = _CONNECT if parts.scheme.startswith("mqtt") else _HEAD
                seen[host, port, secure] = _wrong_port(host, port, hello, secure=secure)
            if why := seen[host, port, secure]:
                scheme = parts.scheme.removesuffix("s") if secure else f"{parts.scheme}s"
                yield look.error(keys, f"{host}:{port} {why}; write {scheme}://, or the other port")


_PORTS = {"mqtt": 1883, "mqtts": 8883, "http": 80, "https": 443}
_CONNECT = b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\x00\x00"  # 3.1.1, a clean session without a name
_HEAD = b"HEAD / HTTP/1.0\r\n\r\n"
_PATIENCE = 3.0  # seconds


def _urls(look: Look) -> Iterator[tuple[Keys, str]]:
    config = look.config
    if config.mqtt.mode == "external" and look.knows("mqtt", "external"):
        yield ("mqtt", "external", "url"), config.mqtt.external.url
    if config.aws.endpoint_url and look.knows("aws", "endpoint_url"):
        yield ("aws", "endpoint_url"), config.aws.endpoint_url
    for stream in config.streams.values():
        for kind, items in stream.export_definition.items():
            for number, raw in enumerate(items):
                for key, name in (("endpointUrl", "endpoint_url"), ("uri", "uri")):
                    if isinstance(url := raw.get(key), str):
                        yield ("streams", stream.name, "export", kind, number, name), url


def _wrong_port(host: str, port: int, hello: bytes, *, secure: bool) -> str:
    """What is wrong with the port; empty if nothing is, or nobody answers."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname=host).do_handshake()
    answer = _answer(host, port, outgoing.read())
    if answer is None:
        return ""
    speaks_tls = (
        answer[:1] in (b"\x15", b"\x16") and answer[1:2] == b"\x03"
    )  # an alert or a handshake, RFC 8446 5.1
    if speaks_tls and not secure:
        return "speaks TLS only"
    if secure and not speaks_tls and _answer(host, port, hello):
        return "speaks no TLS"
    return ""


def _answer(host: str, port: int, hello: bytes) -> bytes | None:
    """The first bytes that come back, none if it hangs up; None if nobody is there or answers in time."""
    try:
        with socket.create_connection((host, port), _PATIENCE) as connection:
            connection.sendall(hello)
            try:
                return connection.recv(16)
            except ConnectionError:
                return b""
    except OSError:
        return None


def client_ids(look: Look) -> Iterator[Finding]:
    """Rules that give rights to a client id, which anybody chooses."""
    config = look.config.mqtt
    if config.client_ids != "any" or config.mode != "embedded":
        return
    for number, rule in enumerate(config.acl):
        for right, filters in msgspec.structs.asdict(rule).items():
            # Its own level below streambridge/ is each client's by the protocol of requests, not by a rule.
            asked = filters if isinstance(filters, list) else []
            wide = [name for name in asked if "%c" in name and not name.startswith("streambridge/")]
            if wide:
                yield look.warning(
                    ("mqtt", "acl", number, right),
                    f"{wide[0]!r} gives rights to whoever chooses that client id; write %u for the user "
                    'name, or bind the ids to users: mqtt.client_ids = "user" or "prefix"',
                )


def _wanted(look: Look) -> Iterator[Wanted]:
    config = look.config
    if config.mqtt.mode == "embedded" and look.knows("mqtt", "mode"):
        urls = config.mqtt.listen
        if not look.knows("mqtt", "listen"):  # one of them is wrong: the others are looked at all the same
            section = look.document.data.get("mqtt")
            stated = section.get("listen") if isinstance(section, dict) else None
            urls = [url for url in stated if isinstance(url, str)] if isinstance(stated, list) else []
        for url in urls:
            try:
                address = parse_address(url)
            except ValueError:
                continue
            yield ("mqtt", "listen"), address.host, address.port
    for section in ("greengrass", "http"):
        listen = getattr(config, section).listen
        if listen and look.knows(section, "listen"):
            yield (section, "listen"), *host_and_port(listen)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
