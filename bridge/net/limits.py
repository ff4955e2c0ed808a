"""Limits on the connections of a listener: in total, per address, and by free file descriptors.

An address counts as its network (`addresses.network_of`), because a client with one IPv6 address has 2^64 of
them.

The last descriptors of the process are reserved for segments, exports, health checks and the log. The kernel
gives a new socket the lowest free number, so the number of a socket tells how many descriptors are in use at
least.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Iterable

from bridge import books
from bridge.net.addresses import network_of

SPARE_DESCRIPTORS = 200
FOR_HEALTH = (
    100  # of those, for the page and its health checks, which must answer when clients have all others
)


class ConnectionLimits:
    """The open connections of one front end, counted."""

    def __init__(
        self, connections: int, connections_per_address: int, spare: int = SPARE_DESCRIPTORS
    ) -> None:
        """`spare` descriptors are left to others."""
        self.set(connections, connections_per_address)
        self._by_network: Counter[str] = Counter()
        self._open = 0
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._descriptors = files - min(spare, files * spare // (2 * SPARE_DESCRIPTORS))

    def set(self, connections: int, connections_per_address: int) -> None:
        """Change the limits. Existing connections beyond them stay."""
        self._most, self._most_of_one = connections, connections_per_address

    def recount(self, addresses: Iterable[str | None]) -> Iterable[books.Entry]:
        """Compare with the open connections, which entered with these addresses."""
        addresses = list(addresses)
        yield "connections", self._open, len(addresses)
        networks = Counter(network_of(one) for one in addresses if one is not None)
        yield "connections by network", self._by_network, networks

    def __len__(self) -> int:
        """The number of open connections."""
        return self._open

    def enter(self, address: str | None, descriptor: int = -1) -> str:
        """Count a connection. Returns why it must be closed, or "" if it may stay open.

        It counts until `leave` in both cases. With address None, its client is not known yet.
        """
        self._open += 1
        refused = f"{self._most} connections are open already" if self._open > self._most else ""
        if address is not None:
            network = network_of(address)
            self._by_network[network] += 1
            if self._by_network[network] > self._most_of_one:
                refused = refused or "too many connections from this address"
        if refused:
            return refused
        if descriptor >= self._descriptors:
            return "too few file descriptors are left; see LimitNOFILE"
        return ""

    def crowded(self, address: str) -> bool:
        """Return whether the network of an address alone has too many connections."""
        return self._by_network[network_of(address)] > self._most_of_one

    def leave(self, address: str | None) -> None:
        """A counted connection is closed; `address` as it entered."""
        self._open -= 1
        if address is None:
            return
        network = network_of(address)
        self._by_network[network] -= 1
        if not self._by_network[network]:
            del self._by_network[network]


def descriptor_of(transport: asyncio.BaseTransport) -> int:
    """The number of a connection's socket, -1 without a socket."""
    sock = transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())
