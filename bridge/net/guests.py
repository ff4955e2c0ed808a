"""A memory budget for all peers that have not logged in.

Each peer counts with `EACH` bytes plus its pending bytes. When the budget is exceeded, networks with more
than an equal share lose peers until some of the budget is free: the largest networks first, and in them the
peers with the most pending bytes, then the oldest. So a flood displaces itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from bridge import books
from bridge.net.addresses import network_of

EACH = 4 * 1024  # bytes of a silent connection
T = TypeVar("T")


class Guests(Generic[T]):
    """The peers that have not logged in, with their bytes."""

    def __init__(self, budget: int, dismiss: Callable[[T], None]) -> None:
        """`dismiss` closes a peer's connection; it may call `leave`."""
        self._budget, self._dismiss = budget, dismiss
        self._networks: dict[str, dict[T, int]] = {}
        self._held: Counter[str] = Counter()  # bytes of each network
        self.total = 0
        books.opened(self)

    def recount(self) -> Iterable[books.Entry]:
        held = {network: sum(peers.values()) for network, peers in self._networks.items()}
        yield "held", dict(self._held), held
        yield "total", self.total, sum(held.values())

    def peers(self) -> set[T]:
        """Return all."""
        return set().union(*self._networks.values())

    def keep(self, peer: T, address: str, pending: int) -> None:
        """Set the pending bytes of a peer."""
        network = network_of(address)
        peers = self._networks.setdefault(network, {})
        more = EACH + pending - peers.get(peer, 0)
        peers[peer] = EACH + pending
        self._held[network] += more
        self.total += more
        if more > 0 and self.total > self._budget:
            self._make_room()

    def leave(self, peer: T, address: str) -> None:
        """Remove a peer that has logged in or disconnected. Unknown peers are ignored."""
        network = network_of(address)
        peers = self._networks.get(network)
        if peers is None or peer not in peers:
            return
        size = peers.pop(peer)
        self.total -= size
        self._held[network] -= size
        if not peers:
            del self._networks[network], self._held[network]

    def _make_room(self) -> None:
        room = self._budget - self._budget // 8  # free some at once, because each time all are sorted
        share = room // len(self._networks)
        for network, held in self._held.most_common():
            if held <= share or self.total <= room:
                return
            peers = self._networks[network]
            for peer in sorted(peers, key=peers.__getitem__, reverse=True):
                if self.total <= room or self._held[network] <= share:
                    break
                self.leave(peer, network)
                self._dismiss(peer)
