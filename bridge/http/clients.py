"""Connected clients, in pages, because there may be thousands.

* A list of all clients is made in slices, between which the event loop serves others, and so is a search in
  it. The list is reused for `FRESH` seconds.
* The rate of a client is measured since the previous list, if that is not too old, otherwise since it
  connected.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from msgspec import Struct

if TYPE_CHECKING:
    from bridge.net.connected import Connected

FRESH = 2.0
OLD = 60.0
SLICE = 250  # clients, some tenths of a millisecond
SEARCHED = 64 * 1024  # characters, about a millisecond
PAGE = 100
FILTERS = 10  # topic filters that are shown per client

Row = tuple["Connected", str, float]


@runtime_checkable
class DeviceFrontEnd(Protocol):
    """A front end for devices, as this package uses it."""

    def clients(self) -> Iterable[Connected]:
        """Return the connected clients. They may be iterated slowly."""

    def unmatched(self) -> list[dict[str, Any]]:
        """Return the topics of clients that no stream takes: topics, client, messages, delivered, line."""

    def subscriptions(self, client: str, most: int) -> list[str]:
        """Return up to this many topic filters of a client."""

    @property
    def refused(self) -> dict[str, str]:
        """The streams whose messages it cannot receive, and why."""

    @property
    def unreachable(self) -> str | None:
        """Why it receives no messages at all; None if it does."""


class Client(Struct, rename="camel", kw_only=True):
    """One connected client. `rate` is messages per second; `filters` are some of its subscriptions.

    A `slowed` client is over a budget, and we read from it more slowly.
    """

    id: str
    user: str | None
    address: str
    protocol: str
    listener: str
    since: int
    published: int
    rate: float
    subscriptions: int
    filters: list[str]
    queued: int
    slowed: bool


class Clients(Struct, rename="camel", kw_only=True):
    """A page of clients. Of `connected`, `found` match; `clients` has those from `offset` on.

    `unmatched` are the topics on which clients publish and that no stream takes.
    """

    connected: int
    found: int
    offset: int
    clients: list[Client]
    unmatched: list[dict[str, Any]]


ORDERS: dict[str, Callable[[Row], tuple[object, ...]]] = {
    "queued": lambda row: (not row[0].slowed, -row[0].queued, -row[2], row[0].id),
    "rate": lambda row: (-row[2], row[0].id),
    "since": lambda row: (-row[0].since, row[0].id),
    "subscriptions": lambda row: (-row[0].subscriptions, row[0].id),
    "id": lambda row: (row[0].id,),
}


class Directory:
    """The clients of all front ends."""

    def __init__(self, front_ends: Mapping[str, DeviceFrontEnd]) -> None:
        self._front_ends = front_ends
        self._rows: list[Row] = []
        self._made = float("-inf")
        self._before: dict[tuple[str, str, int], tuple[int, float]] = {}
        self._making: asyncio.Task[None] | None = None

    async def page(self, find: str, order: str, offset: int) -> Clients:
        """Return up to `PAGE` clients whose id, user or address contains a text.

        `order` is one of `ORDERS`. Raises KeyError for another.
        """
        key = ORDERS[order]
        if time.monotonic() - self._made >= FRESH:
            if self._making is None or self._making.done():
                self._making = asyncio.create_task(self._make())
            await asyncio.shield(self._making)
        every = self._rows  # the search may see others come
        rows = await _matching(find.casefold(), every) if find else every
        shown = heapq.nsmallest(offset + PAGE, rows, key)[offset:]
        return Clients(
            connected=len(every),
            found=len(rows),
            offset=offset,
            clients=[self._client(*row) for row in shown],
            unmatched=[one for front_end in self._front_ends.values() for one in front_end.unmatched()],
        )

    def _client(self, peer: Connected, listener: str, rate: float) -> Client:
        return Client(
            id=peer.id,
            user=peer.user,
            address=peer.address,
            protocol=peer.protocol,
            listener=listener,
            since=peer.since,
            published=peer.published,
            rate=rate,
            subscriptions=peer.subscriptions,
            filters=self._front_ends[listener].subscriptions(peer.id, FILTERS),
            queued=peer.queued,
            slowed=peer.slowed,
        )

    async def _make(self) -> None:
        rows: list[Row] = []
        before, old = self._before, time.monotonic() - self._made > OLD
        counts: dict[tuple[str, str, int], tuple[int, float]] = {}
        for name, front_end in self._front_ends.items():
            for peer in front_end.clients():
                now = time.monotonic()
                key = (name, peer.id, peer.since)
                known = None if old else before.get(key)
                if known is None:
                    seconds = max(1.0, time.time() - peer.since / 1000)
                    rate = peer.published / seconds
                else:
                    rate = (peer.published - known[0]) / max(now - known[1], 0.001)
                counts[key] = (peer.published, now)
                rows.append((peer, name, round(rate, 2)))
                if not len(rows) % SLICE:
                    await asyncio.sleep(0)
        self._rows, self._before, self._made = rows, counts, time.monotonic()


async def _matching(wanted: str, rows: list[Row]) -> list[Row]:
    """Return the rows that have a text. Ids may have a thousand characters, of which each takes its time."""
    found, searched = [], 0
    for row in rows:
        peer = row[0]
        text = f"{peer.id}\n{peer.user or ''}\n{peer.address}"
        if wanted in text.casefold():
            found.append(row)
        searched += len(text)
        if searched >= SEARCHED:
            searched = 0
            await asyncio.sleep(0)
    return found
