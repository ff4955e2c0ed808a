"""The control socket: how the command line reaches the running service.

Only root and the service's own user can open `<data_dir>/streambridge.sock` (mode 0600). It needs no token,
and its callers are trusted (`bridge.access.rules`).

    connection  = requests from the client, one reply to each from the service, in order
    request     = length u32 big-endian | operation: length u8, ASCII | body
    reply       = length u32 big-endian | body

Lengths do not count themselves. Bodies are those of `bridge.operations.codec`. A frame of more than 64 MiB
ends the connection.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOCKET = "streambridge.sock"
HEADER = 4
MAX_FRAME = 64 * 1024 * 1024


@contextmanager
def address(data_dir: Path) -> Iterator[str]:
    """The address of the socket, while the context lasts.

    A unix address is limited to 107 bytes, and a path may be longer: it names the directory by descriptor.
    """
    directory = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{SOCKET}"
    finally:
        os.close(directory)
