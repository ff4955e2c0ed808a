"""What `listen` means: an address and a port of this machine."""

from __future__ import annotations

import ipaddress


def host_and_port(listen: str) -> tuple[str, int]:
    """Take "127.0.0.1:8088" or "[::1]:8088" apart; port 0 means any free one. Raises ValueError."""
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and int(port) < 65_536):
        raise ValueError(f"{listen!r} is no address and port")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a host means this machine; an IPv6 address comes without its brackets."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # 127.evil.com may be anybody's
