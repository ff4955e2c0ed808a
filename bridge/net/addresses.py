"""Addresses of listeners, and networks of clients."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache

from bridge.printable import without_credentials

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def host_and_port(listen: str) -> tuple[str, int]:
    """Split "127.0.0.1:8088" or "[::1]:8088"; port 0 is any free one. Raises ValueError."""
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    if "/" in host or not (host and port.isascii() and port.isdecimal() and int(port) < 65_536):
        raise ValueError(f"{without_credentials(listen)!r} is not an address and port, host:port")
    return host.strip("[]"), int(port)


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
def network_of(address: str) -> str:
    """Return the network that counts as one client: an IPv4 address, an IPv6 /64, other text unchanged."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return f"{ipaddress.IPv6Address(int(found) >> 64 << 64)}/64"
    return str(found)


def is_within(address: str, networks: Iterable[Network]) -> bool:
    """Whether an address belongs to one of these networks; an IPv4 address may be written as IPv6."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in network for network in networks)


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine; an IPv6 address has no brackets."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # 127.evil.com may be another machine
