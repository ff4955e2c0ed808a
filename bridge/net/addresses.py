"""Addresses of listeners and clients, in one normal form, and networks of clients.

An IPv4 address within IPv6 (`::ffff:127.0.0.1`, RFC 4291 section 2.5.5.2) is the IPv4 address: it is the same
machine, whatever socket its program uses. The JVM uses sockets of IPv6 for IPv4 too. So every address that
comes from a socket, a header, a certificate, an operator or the configuration passes one of the functions
here before it is compared, and every network passes `parse_network`.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache

from bridge.printable import without_credentials

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
IPV4_IN_IPV6 = ipaddress.IPv6Network("::ffff:0:0/96")


def parse(address: str | bytes) -> IPAddress:
    """Return the normal form of an address, as text or packed; a zone is left out. Raises ValueError."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv4Address):
        return found
    return found.ipv4_mapped or ipaddress.IPv6Address(found.packed)


def parse_network(network: str, *, strict: bool = True) -> Network:
    """Return the normal form of a network such as 10.0.0.0/8. Raises ValueError.

    Unless `strict`, bits of an address within it may be set.
    """
    found = ipaddress.ip_network(network, strict=strict)
    if isinstance(found, ipaddress.IPv6Network) and found.subnet_of(IPV4_IN_IPV6):
        return ipaddress.IPv4Network((found.network_address.packed[12:], found.prefixlen - 96))
    return found


def normal(host: str) -> str:
    """Return the normal form of an address with its zone, if it has one; any other text unchanged."""
    if ":" not in host:
        return host
    try:
        found = parse(host)
    except ValueError:
        return host
    return str(found) if found.version == 4 else f"{found}{''.join(host.partition('%')[1:])}"


def peer_of(transport: asyncio.BaseTransport) -> tuple[str, int]:
    """Return the address and the port of a connection's other end; "local" and 0 for a UNIX socket."""
    name = transport.get_extra_info("peername")
    return (normal(str(name[0])), int(name[1])) if isinstance(name, tuple) else ("local", 0)


def host_and_port(listen: str) -> tuple[str, int]:
    """Split "127.0.0.1:8088" or "[::1]:8088"; port 0 is any free one. Raises ValueError."""
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    if "/" in host or not (host and port.isascii() and port.isdecimal() and int(port) < 65_536):
        raise ValueError(f"{without_credentials(listen)!r} is not an address and port, host:port")
    return normal(host.strip("[]")), int(port)


def check_listen(listen: str, example: str) -> None:
    """Check the setting `listen`, which may be empty; raises ValueError with a right one."""
    try:
        if listen:
            host_and_port(listen)
    except ValueError as error:
        host, _, port = example.rpartition(":")
        given = listen.rpartition("://")[2].partition("/")[0].rpartition("@")[2].strip(":")
        name = given.partition(":")[0]
        for meant in (given, f"{host}:{given}" if given.isdecimal() else f"{name}:{port}", example):
            with suppress(ValueError):
                host_and_port(meant)
                break
        raise ValueError(f"`listen`: {error}; write {meant}") from None


@lru_cache(maxsize=1024)  # called several times per connection before its client has logged in
def network_of(address: str, ipv4_bits: int = 32, ipv6_bits: int = 64) -> str:
    """Return the network of an address; by default, what counts as one client. Other text is unchanged."""
    try:
        found = parse(address)
    except ValueError:
        return address
    bits = ipv4_bits if found.version == 4 else ipv6_bits
    return str(found) if bits == found.max_prefixlen else str(parse_network(f"{found}/{bits}", strict=False))


def is_within(address: str, networks: Iterable[Network]) -> bool:
    """Return whether an address belongs to one of these networks."""
    try:
        found = parse(address)
    except ValueError:
        return False
    return any(found in network for network in networks)


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine; an IPv6 address has no brackets."""
    try:
        return parse(host).is_loopback
    except ValueError:
        return host == "localhost"  # 127.evil.com may be another machine
