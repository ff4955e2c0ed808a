"""The metadata addresses of clouds: only AWS credentials are asked for there, nothing is exported to them.

Who may name a destination must not get at what an instance's metadata service gives to everybody on the
instance: its role's credentials. The export worker calls `deny` once. From then on a connection to such an
address is refused in this process, whoever makes it and whatever name or redirect led there, except while
`allowed` holds: where `bridge.plugin.aws` asks for credentials. An instance's role works without being
configured.

Code that is not Python, and a `connect` that is given a name instead of an address, are not seen; a plugin
that means harm is not defended against.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

ADDRESSES = (
    "169.254.169.254",  # EC2 and most other clouds
    "fd00:ec2::254",
    "169.254.170.2",  # ECS
    "169.254.170.23",  # EKS
    "fd00:ec2::23",
    "100.100.100.200",  # Alibaba Cloud
)

log = logging.getLogger("bridge.export")
_this_thread = threading.local()


def deny(addresses: Iterable[str] = ADDRESSES) -> None:
    """Refuse connections to these addresses from now on, with a PermissionError and a line in the log."""
    denied = set(map(ipaddress.ip_address, addresses))

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if event not in ("socket.connect", "socket.sendto") or getattr(_this_thread, "allowed", False):
            return
        where = arguments[1]
        if isinstance(where, tuple) and where and _address(where[0]) in denied:
            why = f"{where[0]} is a cloud's metadata address, which no export may reach"
            log.error("a connection was refused: %s", why)
            raise PermissionError(errno.EACCES, why)

    sys.addaudithook(audit)


@contextmanager
def allowed() -> Iterator[None]:
    """Let this thread connect to them meanwhile."""
    before = getattr(_this_thread, "allowed", False)
    _this_thread.allowed = True
    try:
        yield
    finally:
        _this_thread.allowed = before


def _address(host: object) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
