"""The position of a consumer: the settled numbers, the leases, and the changes to be saved.

It does no I/O, and times are arguments, in ms on the age timeline. Below the frontier each number is settled
or leased.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from heapq import heapify, heappop, heappush

from msgspec import Struct

from bridge import books
from bridge.decoded import Natural, Next
from bridge.ranges import Pair, Ranges, runs
from bridge.streams.drops import Passed

FEW = 100  # stale entries of `_due` that do no harm


class Lease(Struct, array_like=True):
    """A message that was delivered `deliveries` times, and may be delivered again from `until` on.

    `size` is that of its payload. `holder` is the client that has it; None if no client has it or that is
    unknown.
    """

    number: int
    until: int
    deliveries: int
    size: int
    holder: str | None = None


class Counts(Struct, array_like=True):
    """Counts of settled messages. `size` is the bytes of acknowledged payloads; `last_time` is Unix ms."""

    messages: Natural = 0
    size: Natural = 0
    rejected: Natural = 0
    skipped: Next = 0
    last_time: Natural = 0
    passed: Passed = Passed()  # of the skipped ones, those that were dropped


class Change(Struct, array_like=True, frozen=True):
    """The difference from the previous position: one record of the journal.

    `at` is its time. `leases` has the new and changed leases, as they are now.
    """

    at: Natural
    frontier: Next
    settled: list[tuple[Natural, Natural]]
    leases: list[tuple[Natural, Natural, Natural, Natural]]
    counts: Counts


class Position:
    """One consumer's position. All changes go through its methods, which record them for the journal."""

    def __init__(self, start: int) -> None:
        """Begin at number `start`."""
        self.settled = Ranges([(0, start - 1)] if start else [])
        self.frontier = start  # the lowest number that was never delivered
        self.leases: dict[int, Lease] = {}
        self.counts = Counts()
        self.version = 0  # counts the changes that a reply waits for
        self._due: list[Pair] = []  # a heap of (until, number); entries that match no lease are stale
        self._changed: set[int] = set()
        self._added = Ranges()
        self.unsaved_from: int | None = None  # the lowest number acknowledged or rejected since `take`
        books.opened(self)

    def recount(self) -> Iterable[books.Entry]:
        below = sum(
            min(last, self.frontier - 1) - first + 1 for first, last in self.settled if first < self.frontier
        )
        yield "leases", len(self.leases), self.frontier - below

    @property
    def upto(self) -> int:
        """The lowest number that is not settled."""
        first = next(iter(self.settled), None)
        return first[1] + 1 if first is not None and first[0] == 0 else 0

    # -- changes -----------------------------------------------------------------------------------------
    def deliver(self, number: int, until: int, size: int, holder: str) -> Lease:
        """Lease a message until a time, for the first time or again."""
        lease = self.leases.get(number)
        if lease is None:
            lease = self.leases[number] = Lease(number, until, 0, size)
            self.frontier = max(self.frontier, number + 1)
        lease.deliveries += 1
        self._hold(lease, until, holder)
        return lease

    def take_back(self, lease: Lease, now: int) -> None:
        """Undo a delivery: the client did not get the message."""
        lease.deliveries -= 1
        self._hold(lease, now, None)

    def hold(self, number: int, until: int, holder: str | None) -> None:
        """Change the end of a lease."""
        self._hold(self.leases[number], until, holder)

    def _hold(self, lease: Lease, until: int, holder: str | None) -> None:
        lease.until, lease.holder = until, holder
        self._queue(until, lease.number)
        self._changed.add(lease.number)
        self.version += 1

    def settle(self, numbers: Collection[int], *, rejected: bool, now: int) -> None:
        """Settle at least one leased message as acknowledged or rejected; `now` is Unix time in ms."""
        counts, leases = self.counts, self.leases
        counts.messages += len(numbers)
        if rejected:
            counts.rejected += len(numbers)
        else:
            counts.size += sum(leases[number].size for number in numbers)
        counts.last_time = now
        for first, last in runs(numbers):
            self._remove(first, last)
        low, lowest = self.unsaved_from, min(numbers)
        self.unsaved_from = lowest if low is None else min(low, lowest)
        self.version += 1

    def skip(self, first: int, last: int) -> None:
        """Settle messages first..last, which were dropped or are not for this consumer, and count them.

        Nothing waits until this is saved, because it would be found again.
        """
        missing = self.settled.missing(first, last)
        if missing:
            self.counts.skipped += sum(b - a + 1 for a, b in missing)
            self._remove(first, last)
        self.frontier = max(self.frontier, last + 1)

    def _remove(self, first: int, last: int) -> None:
        self.settled.add(first, last)
        self._added.add(first, last)
        self._end_leases(first, last)

    def _end_leases(self, first: int, last: int) -> None:
        few = last - first < len(self.leases)
        for number in range(first, last + 1) if few else [n for n in self.leases if first <= n <= last]:
            self.leases.pop(number, None)
        if not self.leases:
            self._due.clear()

    # -- what is due -------------------------------------------------------------------------------------
    def next_due(self) -> int | None:
        """Return when the first lease ends, except those that `due` has returned; None without leases."""
        while self._due:
            until, number = self._due[0]
            lease = self.leases.get(number)
            if lease is not None and lease.until == until:
                return until
            heappop(self._due)
        return None

    def due(self, now: int, most: int) -> list[int]:
        """Return up to `most` numbers whose lease has ended, in that order; `requeue` or deliver each."""
        found: dict[int, None] = {}
        while len(found) < most and (until := self.next_due()) is not None and until <= now:
            found[heappop(self._due)[1]] = None
        return list(found)

    def requeue(self, number: int) -> None:
        """Return a number to the queue, because it was not delivered after `due`."""
        if (lease := self.leases.get(number)) is not None:
            self._queue(lease.until, number)

    def _queue(self, until: int, number: int) -> None:
        """Add an entry, and remove stale ones once they are most: nobody may ask what is due."""
        heappush(self._due, (until, number))
        if len(self._due) > 2 * len(self.leases) + FEW:
            self.queue_all()

    def queue_all(self) -> None:
        """Make all leases due at their time again, even those that `due` has returned."""
        self._due = [(lease.until, number) for number, lease in self.leases.items()]
        heapify(self._due)

    # -- the journal -------------------------------------------------------------------------------------
    def take(self, now: int) -> Change:
        """Return all changes since the last call."""
        settled = list(self._added)
        leases = [self.leases[number] for number in self._changed if number in self.leases]
        self._forget_changes()
        return self._change(now, settled, leases)

    def whole(self, now: int) -> Change:
        """Return the complete position, as one change of a position that begins at 0."""
        self._forget_changes()
        return self._change(now, list(self.settled), list(self.leases.values()))

    def _forget_changes(self) -> None:
        self._changed, self._added, self.unsaved_from = set(), Ranges(), None

    def _change(self, now: int, settled: list[Pair], leases: list[Lease]) -> Change:
        rows = [(lease.number, lease.until, lease.deliveries, lease.size) for lease in leases]
        counts = Counts(*(getattr(self.counts, name) for name in Counts.__struct_fields__))
        return Change(now, self.frontier, settled, rows, counts)

    def apply(self, change: Change, now: int) -> None:
        """Apply a saved change. If the clock was lost, a lease lasts at most its full length from now."""
        for first, last in change.settled:
            self.settled.add(first, last)
            self._end_leases(first, last)
        for number, until, deliveries, size in change.leases:
            self.leases[number] = Lease(number, min(until, now + max(0, until - change.at)), deliveries, size)
        self.frontier, self.counts = change.frontier, change.counts
