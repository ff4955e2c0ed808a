"""The user at the other end of a TCP connection within this machine.

The kernel knows the sockets of this network namespace, with their owners. The peer's socket is the one whose
local address is our remote one, and vice versa. A user of another user namespace appears as the overflow user
(65534), and so is never mistaken for root or for our own user.

The kernel answers about one socket over netlink (sock_diag(7)), in microseconds however many there are. Where
it does not, a thread reads the list of all sockets in /proc/self/net/tcp and tcp6, once at a time: anyone on
this machine can make that list long, and ask for it again and again.
"""

from __future__ import annotations

import asyncio
import pwd
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bridge.net.addresses import IPV4_IN_IPV6, parse

Address = tuple[bytes, int]  # packed, in the normal form of `net.addresses`, and the port
ESTABLISHED = 1

# From linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h. Addresses and ports have network order.
_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_QUESTION = struct.Struct("=BBBxI 4s16s16sI8s")  # family, protocol, extensions, states, then the socket:
_PORTS = struct.Struct("!HH")  # its own and the other one; then both addresses, interface, cookie
_ANSWER = struct.Struct("=BBxx4s16s16s12x4x8xII")  # family, state, the socket, queues, user, inode
_NO_COOKIE = b"\xff" * 8

# Columns of a line of the list (Documentation/networking/proc_net_tcp.rst in the kernel's source).
_UID = 7


def uid_of(name: str) -> int:
    """Return the id of a local user, by name or in digits. Raises ValueError with a remedy.

    The overflow user is none: whoever comes from another user namespace looks like it.
    """
    try:
        uid = pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        if not name.isascii() or not name.isdecimal():
            raise ValueError(f"this machine has no user {name!r}; `getent passwd` lists them") from None
        uid = int(name)
    if uid == int(Path("/proc/sys/kernel/overflowuid").read_text()):
        raise ValueError(f"user {name!r} ({uid}) stands for all users of other namespaces; choose another")
    return uid


class Found(NamedTuple):
    """A socket: its TCP state, and the user id of its owner."""

    state: int
    uid: int


class Owners:
    """Finds the users at the other ends of connections."""

    def __init__(self, ask: Callable[[Address, Address], Found | None] | None = None) -> None:
        """`ask` returns the socket with a local and a remote address, or None. Raises OSError."""
        self._ask = ask or ask_kernel
        self._reading = asyncio.Lock()

    def known(self, connection: socket.socket) -> int | None:
        """The user id at the other end, if the kernel says it at once."""
        with suppress(OSError, ValueError):
            found = self._ask(_address(connection.getpeername()), _address(connection.getsockname()))
            return found.uid if found is not None else None
        return None

    async def owner(self, connection: socket.socket) -> int | None:
        """The user id at the other end; None if it is unknown, for example on another machine."""
        with suppress(OSError, ValueError):
            if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED:
                return None  # there is nobody to be admitted
            ours, theirs = _address(connection.getsockname()), _address(connection.getpeername())
            with suppress(OSError):
                found = self._ask(theirs, ours)
                if found is not None:
                    return found.uid if found.state == ESTABLISHED else None
                if self._ask(ours, theirs) is not None:
                    return None  # it knows our end alone
            async with self._reading:
                return await asyncio.to_thread(search, theirs, ours)
        return None


def ask_kernel(local: Address, remote: Address) -> Found | None:
    """Ask for a socket by its addresses. Raises OSError. Returns None also if the kernel lacks sock_diag."""
    family = socket.AF_INET if len(local[0]) == 4 else socket.AF_INET6
    question = _QUESTION.pack(
        family, socket.IPPROTO_TCP, 0, 0, _PORTS.pack(local[1], remote[1]), local[0], remote[0], 0, _NO_COOKIE
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.setblocking(False)  # the answer is there when `sendto` returns
        kernel.sendto(
            _HEADER.pack(_HEADER.size + len(question), _BY_FAMILY, _REQUEST, 1, 0) + question, (0, 0)
        )
        answer = kernel.recv(4096)
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:  # an error, such as: no such socket
        return None
    # The family is that of the other socket: a client may have made one of IPv6 for its address of IPv4.
    family, state, ports, its_own, other, uid, _ = _ANSWER.unpack_from(answer, _HEADER.size)
    size = 4 if family == socket.AF_INET else 16
    ends = parse(its_own[:size]).packed, parse(other[:size]).packed
    if (*ends, ports) != (local[0], remote[0], _PORTS.pack(local[1], remote[1])):
        return None  # a listener
    return Found(state, uid)


def search(local: Address, remote: Address) -> int | None:
    """Search the list of all sockets for the owner of an established one. Raises OSError or ValueError."""
    for name, begin in (("tcp", b""), ("tcp6", _MAPPED)):
        wanted = f" {_written(local, begin)} {_written(remote, begin)} {ESTABLISHED:02X} ".encode()
        with suppress(FileNotFoundError):
            table = Path(f"/proc/self/net/{name}").read_bytes()
            if (at := table.find(wanted)) >= 0:
                line = table[table.rfind(b"\n", 0, at) + 1 : table.find(b"\n", at)]
                return int(line.split()[_UID])
    return None


_MAPPED = IPV4_IN_IPV6.network_address.packed[:12]  # before an IPv4 address within IPv6


def _address(name: tuple[str, int]) -> Address:
    """The address of a socket, as Python names it."""
    host, port = name[:2]
    return parse(host).packed, port


def _written(address: Address, begin: bytes) -> str:
    """An address as in the list: words of 32 bits in the machine's byte order. `begin` is before IPv4."""
    packed, port = address
    packed = begin + packed if len(packed) == 4 else packed
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed)) + f":{port:04X}"
