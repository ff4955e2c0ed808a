"""Listening sockets, and errors for addresses that cannot be used."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any

from bridge.errors import ConfigError

BACKLOG = 4096  # connections that wait in the kernel to be accepted, as far as its somaxconn permits
# For peers that vanish. Accepted sockets have the options of the listening one (on Linux).
KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 120),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)


class Listening:
    """The sockets of one address: several if a name such as `localhost` has several addresses."""

    def __init__(self, host: str, sockets: list[socket.socket]) -> None:
        self.sockets, self._host = sockets, host
        self.place = place(host, sockets[0].getsockname()[1])  # "host:port" with the actual port
        self._servers: list[asyncio.Server] = []

    async def accept(self, make: Callable[[], asyncio.BaseProtocol]) -> None:
        """Accept connections on the event loop; `make` creates the protocol of each."""
        loop = asyncio.get_running_loop()
        for listening in self.sockets:
            self._servers.append(await loop.create_server(make, sock=listening, backlog=BACKLOG))

    def again(self) -> Listening:
        """Hand over the sockets, so that clients that connect in the meantime are not refused."""
        return Listening(self._host, [listening.dup() for listening in self.sockets])

    def close(self) -> None:
        """Stop accepting connections."""
        for server in self._servers:
            server.close()
        for listening in [] if self._servers else self.sockets:
            listening.close()
        self._servers.clear()
        self.sockets.clear()


async def listen(option: str, host: str, port: int) -> Listening:
    """Listen on an address; port 0 means any free one. Raises ConfigError, which names the option."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, **_ASKED)
    except OSError as error:
        raise ConfigError(f"{option}: {refusal(host, port, error)}") from error
    return _bound(option, host, port, found)


def listen_now(option: str, host: str, port: int) -> Listening:
    """The same for synchronous code; blocks during the look-up if the host is a name."""
    try:
        found = socket.getaddrinfo(host, port, **_ASKED)
    except OSError as error:
        raise ConfigError(f"{option}: {refusal(host, port, error)}") from error
    return _bound(option, host, port, found)


_ASKED: dict[str, Any] = {"type": socket.SOCK_STREAM, "flags": socket.AI_PASSIVE}


def _bound(option: str, host: str, port: int, found: Iterable[Any]) -> Listening:
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, where in dict.fromkeys(found):
            try:
                sockets.append(socket.create_server(where, family=family, backlog=BACKLOG))
            except OSError as error:
                if error.errno != errno.EAFNOSUPPORT:  # a kernel without IPv6, as in asyncio
                    raise
                continue
            sockets[-1].setblocking(False)
            for level, name, value in KEEP_ALIVE:
                sockets[-1].setsockopt(level, name, value)
        if not sockets:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
    except OSError as error:
        for listening in sockets:
            listening.close()
        raise ConfigError(f"{option}: {refusal(host, port, error)}") from error
    return Listening(host, sockets)


def place(host: str, port: int) -> str:
    """An address and a port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def refusal(host: str, port: int, error: OSError) -> str:
    """Return why it is impossible to listen on an address, and what to do."""
    match error.errno:
        case errno.EADDRINUSE:
            why = (
                "another program listens there already; stop it, or choose another port "
                f"(`ss -ltnp sport = :{port}` shows which program)"
            )
        case errno.EACCES:
            why = (
                "only root may use ports below 1024; choose another one, or see `systemctl cat streambridge`"
            )
        case errno.EADDRNOTAVAIL:
            why = "this machine has no such address; `ip address` shows those that it has"
        case _:
            why = error.strerror or str(error)
    return f"cannot listen at {place(host, port)}: {why}"
