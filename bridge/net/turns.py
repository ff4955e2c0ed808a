"""One budget of work for each turn of the event loop, whatever the work, the transport and the connections.

What it promises: what clients can make expensive takes `LIMIT` seconds and one slice more between two looks
at the sockets, however many clients ask for it. Everything else waits, and whoever has little to do waits for
one slice of each of the others, not for all of their work.

Who enters:
* connections: packets that are looked up, delivered, refused, or come in their thousands, CONNECT, and reads
  of more than a few packets. They are read on when their turn comes (`wait`).
* operations, requests over HTTP and their encoding: each step of a coroutine between two of its waits is a
  slice (`work`), so an operation that is added later needs nothing for it.
* what follows from a packet: retained messages, wills (`soon`).

A slice is what runs without a wait. It should take a few milliseconds: who scans something of any length lets
others go first (`asyncio.sleep(0)`) after so many messages or bytes. What waits for the disk or for messages
is not in a turn.

Turns go round: by holder (a user or, without a user name, an address), and in each holder by address, first
come, first served. So one user with many connections, or one address among many of the same user, is one.

The queue has no limit of its own. A connection is in it once, and its requests in progress are bounded by
their transport. A task that is cancelled leaves it; a connection that is closed has nothing more to read.
"""

from __future__ import annotations

import asyncio
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Generator, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from bridge.runtime import Runtime

LIMIT = 0.01  # seconds
MANY, TAKE = 250, 0.001  # small packets of one read, and about the seconds that they take
HOLD = "turn"

T = TypeVar("T")
Who = tuple[Hashable, str]  # the holder, and the network (`net.addresses.network_of`) it comes from


class Held(Protocol):
    """A connection."""

    @property
    def turn(self) -> Who:
        """Who it takes turns as."""

    def hold(self, why: str) -> None:
        """Stop reading from it."""

    def release(self, why: str) -> None:
        """Read on, and handle what was read before."""


class Turns:
    """The time that was spent in this turn, and who waits for another one. For the event loop's thread."""

    def __init__(self, runtime: Runtime, limit: float = LIMIT) -> None:
        self._runtime, self._now, self._limit = runtime, runtime.now, limit
        self.slices = 0  # large reads, steps of operations and calls in turn so far
        self._spent = 0.0
        self._scheduled = self._inside = False
        self._woken: asyncio.Future[None] | None = None  # of the task whose turn it is, until it runs
        self._waiting: OrderedDict[Hashable, OrderedDict[str, deque[Callable[[], None]]]] = OrderedDict()

    @property
    def over(self) -> bool:
        """Return whether no expensive work should begin in this turn any more."""
        return self._spent >= self._limit

    def begin(self) -> float:
        """Return a time for `spend`, at the beginning of expensive work. Such work may be nested."""
        return self._now() - self._spent

    def spend(self, began: float) -> None:
        """Count the time that expensive work has taken since `began`."""
        self._spent = max(self._spent, self._now() - began)
        self._schedule()

    def many(self, line: Held) -> None:
        """A client has sent `MANY` small packets in one read: the next may have to wait for another turn.

        They are not timed one by one, which would take as long as a small packet itself.
        """
        self._spent += TAKE
        self._schedule()
        if self.over:
            self.wait(line)

    def wait(self, line: Held) -> None:
        """Stop reading from a client until it has its turn."""
        line.hold(HOLD)
        self._queue(line.turn).append(partial(line.release, HOLD))

    def soon(self, who: Who, do: Callable[[], None]) -> None:
        """Call `do`, one slice of work, at once if nobody waits and there is time, else in a later turn."""
        if self._waiting or self.over:
            self._queue(who).append(do)
        else:
            self._do(do)

    @types.coroutine
    def work(self, who: Who, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Carry out a coroutine, each of its steps as a slice in turn. Within another one's step, at once."""
        error: BaseException | None = None
        try:
            while True:
                inside = self._inside
                if error is None and not inside:
                    error = yield from self._enter(who)
                began, self._inside = self.begin(), True
                try:
                    waits = work.send(None) if error is None else work.throw(error)
                except StopIteration as done:
                    result: T = done.value
                    return result
                finally:
                    self._inside = inside
                    if not inside:
                        self.slices += 1
                        self.spend(began)
                error = None
                try:
                    yield waits
                except BaseException as caught:  # for the work, which may wait for something else then
                    error = caught
        finally:
            work.close()

    def _enter(self, who: Who) -> Generator[Any, Any, BaseException | None]:
        """Wait for a turn; without anyone who waits, and with time left, it is now. Returns what ends it."""
        if not self._waiting and not self.over and self._woken is None:
            return None
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue(who).append(partial(self._wake, woken))
        try:
            yield from woken
        except BaseException as caught:
            return caught
        finally:
            if self._woken is woken:
                self._woken = None
                self._runtime.soon(self._serve)
        return None

    def _wake(self, woken: asyncio.Future[None]) -> None:
        if not woken.done():
            self._woken = woken  # the next one has to wait until this one has run
            woken.set_result(None)

    def _do(self, do: Callable[[], None]) -> None:
        began = self.begin()
        self.slices += 1
        try:
            do()
        finally:
            self.spend(began)

    def _queue(self, who: Who) -> deque[Callable[[], None]]:
        holder, network = who
        self._schedule()
        return self._waiting.setdefault(holder, OrderedDict()).setdefault(network, deque())

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._runtime.soon(self._next)

    def _next(self) -> None:
        """Begin a turn."""
        self._spent, self._scheduled = 0.0, False
        self._serve()
        if self._waiting:
            self._schedule()

    def _serve(self) -> None:
        """Give the turn to those who wait, as far as it lasts."""
        while self._waiting and not self.over and self._woken is None:
            self._do(self._first())

    def _first(self) -> Callable[[], None]:
        """Take whose turn it is from the queue."""
        holder, networks = next(iter(self._waiting.items()))
        network, queue = next(iter(networks.items()))
        do = queue.popleft()
        networks.move_to_end(network)
        self._waiting.move_to_end(holder)
        if not queue:
            del networks[network]
        if not networks:
            del self._waiting[holder]
        return do
