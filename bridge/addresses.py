"""What `listen` means: an address and a port of this machine."""

from __future__ import annotations

_LOOPBACK = ("localhost", "::1")


def host_and_port(listen: str) -> tuple[str, int]:
    """Take "127.0.0.1:8088" or "[::1]:8088" apart; port 0 means any free one. Raises ValueError."""
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and int(port) < 65_536):
        raise ValueError(f"{listen!r} is no address and port")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a host name means this machine."""
    return host in _LOOPBACK or host.startswith("127.")
