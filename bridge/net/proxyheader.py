"""The header of the PROXY protocol, version 2, in which a proxy names its client.

https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt, section 2.2:

    | signature 12 byte | version, command 1 byte | family, transport 1 byte | length 16 bit | length byte |

The last part has the addresses, 12 bytes for IPv4 and 36 for IPv6, and then TLVs, which are ignored. The
command LOCAL marks a connection of the proxy itself, such as a health check. With the family UNSPEC or UNIX,
the proxy does not know the client's address either.

Only the bytes of the header are read, because the rest belongs to TLS or MQTT. Nothing but this header is
accepted. Version 1, which is text of any length, is refused.
"""

from __future__ import annotations

import asyncio
import socket

from bridge.net.addresses import parse

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
FIXED = 16  # bytes up to and including the length
MOST = 4096  # bytes after them; the addresses of UNIX sockets are the longest, with 216
LOCAL, PROXY = 0x20, 0x21  # version 2 and the command
STREAM = {0x11: 4, 0x21: 16}  # TCP over IPv4 and IPv6: bytes of an address
UNKNOWN = (0x00, 0x31)  # UNSPEC, and a stream of UNIX sockets


class BadHeader(Exception):  # noqa: N818  (named for what it is)
    """Raised for bytes that are not such a header. The text says why."""


def check(beginning: bytes) -> int:
    """Check up to `FIXED` first bytes. Returns how many follow them, 0 if that is not known yet."""
    if not SIGNATURE.startswith(beginning[: len(SIGNATURE)]):
        if beginning.startswith(b"PROXY"[: len(beginning)]):
            raise BadHeader("a PROXY header of version 1; let the proxy send version 2 (send-proxy-v2)")
        raise BadHeader("no PROXY header; is it a client that did not come through the proxy?")
    if len(beginning) < FIXED:
        return 0
    command, family, length = beginning[12], beginning[13], int.from_bytes(beginning[14:16], "big")
    if command not in (LOCAL, PROXY):
        raise BadHeader(f"a PROXY header with version and command {command:#04x}")
    if length > MOST:
        raise BadHeader(f"a PROXY header with {length} bytes behind the first {FIXED}; {MOST} are accepted")
    if command == PROXY:
        if family not in STREAM and family not in UNKNOWN:
            raise BadHeader(f"a PROXY header with family and transport {family:#04x}, which is not TCP")
        if length < 2 * STREAM.get(family, -2) + 4:
            raise BadHeader(f"a PROXY header with {length} bytes, too few for its addresses")
    return length


def source(beginning: bytes, rest: bytes) -> str | None:
    """Return the client's address in a complete header that `check` has accepted; None if it has none."""
    size = STREAM.get(beginning[13], 0)
    if beginning[12] == LOCAL or not size:
        return None
    return str(parse(rest[:size]))


async def read(sock: socket.socket) -> str | None:
    """Read the header, and nothing after it, from a non-blocking socket. Returns the result of `source`.

    Raises BadHeader, or OSError if the peer has gone.
    """
    loop = asyncio.get_running_loop()
    received = b""
    need, length = FIXED, 0
    while len(received) < need:
        piece = await loop.sock_recv(sock, need - len(received))
        if not piece:
            raise ConnectionResetError("the connection was closed in the middle of its PROXY header")
        received += piece
        if len(received) <= FIXED:
            length = check(received)
            need = FIXED + length
    return source(received[:FIXED], received[FIXED:])
