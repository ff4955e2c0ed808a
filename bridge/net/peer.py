"""The user at the other end of a TCP connection within this machine.

The kernel lists the sockets of this network namespace, with their owners, in /proc/self/net/tcp and tcp6.
The peer's socket is the one whose local address is our remote one, and vice versa. A user of another user
namespace appears as the overflow user (65534), and so is never mistaken for root or for our own user.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from pathlib import Path

# Columns of a line (Documentation/networking/proc_net_tcp.rst in the kernel's source).
_LOCAL, _REMOTE, _STATE, _UID = 1, 2, 3, 7
_ESTABLISHED = "01"


def owner(connection: socket.socket) -> int | None:
    """The user id at the other end; None if it is unknown, for example on another machine.

    Reads the list of all sockets: call it once per connection, not for each message.
    """
    with suppress(OSError, ValueError):
        ours, theirs = _written(connection.getsockname()), _written(connection.getpeername())
        table = "tcp6" if connection.family == socket.AF_INET6 else "tcp"
        # The client's socket may be IPv4 if ours is an IPv6 one for both, and vice versa.
        for name in (table, "tcp" if table == "tcp6" else "tcp6"):
            with suppress(FileNotFoundError), Path(f"/proc/self/net/{name}").open("rb") as lines:
                for line in lines:
                    fields = line.split(maxsplit=_UID + 1)
                    if (
                        len(fields) > _UID
                        and _plain(fields[_LOCAL].decode()) == theirs
                        and _plain(fields[_REMOTE].decode()) == ours
                        and fields[_STATE].decode() == _ESTABLISHED
                    ):
                        return int(fields[_UID])
    return None


def _written(address: tuple[str, int]) -> str:
    """An address in the kernel's format."""
    host, port = address[:2]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return _plain(f"{_words(socket.inet_pton(family, host.partition('%')[0]))}:{port:04X}")


def _words(packed: bytes) -> str:
    """Words of 32 bits in the machine's byte order."""
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed))


_MAPPED = _words(socket.inet_pton(socket.AF_INET6, "::ffff:0:0"))[:24]


def _plain(address: str) -> str:
    """An IPv4 address within IPv6 (RFC 4291 section 2.5.5.2) as IPv4."""
    return address.removeprefix(_MAPPED)
