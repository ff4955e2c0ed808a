"""Metadata addresses of clouds: the worker fetches AWS credentials from them, but never exports to them.

A client that may name a destination must not reach the instance's metadata service, which gives the
credentials of the instance's role to any process. The export worker calls `deny` once. From then on this
process cannot connect to such an address, whatever code, name or redirect leads there. The exception is
`allowed`, within which `bridge.plugin.aws` fetches credentials, so an instance's role works without
configuration.

Not covered: code other than Python, a `connect` to a name instead of an address, and malicious plugins.
"""

from __future__ import annotations

import errno
import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from bridge.net.addresses import IPAddress, parse

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
    """Make connections to these addresses fail from now on, with PermissionError and an error in the log."""
    denied = set(map(parse, addresses))

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if event not in ("socket.connect", "socket.sendto") or getattr(_this_thread, "allowed", False):
            return
        where = arguments[1]
        if isinstance(where, tuple) and where and _address(where[0]) in denied:
            why = f"{where[0]} is a cloud's metadata address, which exports may not reach"
            log.error("connection blocked: %s", why)
            raise PermissionError(errno.EACCES, why)

    sys.addaudithook(audit)


@contextmanager
def allowed() -> Iterator[None]:
    """Let this thread connect to them within the block."""
    before = getattr(_this_thread, "allowed", False)
    _this_thread.allowed = True
    try:
        yield
    finally:
        _this_thread.allowed = before


def _address(host: object) -> IPAddress | None:
    with suppress(ValueError):
        return parse(str(host))
    return None
