"""A fair queue for the work of unknown clients, in which one network cannot delay the others.

Networks take turns, and so do the names in each network. Known networks, with an earlier successful login,
get every second turn while one of them waits. A cancelled waiter leaves the queue at once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial

# By network and name, in order. The first of a plain dict is found behind all that were removed before it.
Turns = OrderedDict["asyncio.Future[None]", None]
Names = OrderedDict[str, Turns]
Waiting = OrderedDict[str, Names]


class FairQueue:
    """Gives at most `at_a_time` turns at the same time."""

    def __init__(self, at_a_time: int = 1) -> None:
        self._free = at_a_time
        self._waiting: tuple[Waiting, Waiting] = (OrderedDict(), OrderedDict())  # unknown, known
        self._next = 0

    async def wait(self, network: str, name: str = "", *, known: bool = False) -> None:
        """Wait for a turn; it ends with `done`."""
        turn = self.ask(network, name, known=known)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.done()
            raise

    def ask(self, network: str, name: str = "", *, known: bool = False) -> asyncio.Future[None]:
        """Return a future that is done when the turn comes; cancelling it leaves the queue."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._free:
            self._free -= 1
            turn.set_result(None)
            return turn
        waiting = self._waiting[known]
        waiting.setdefault(network, OrderedDict()).setdefault(name, OrderedDict())[turn] = None
        turn.add_done_callback(partial(_left, waiting, network, name))
        return turn

    def done(self) -> None:
        """End a turn, and give it to the next waiter."""
        while any(self._waiting):
            self._next = 1 - self._next
            waiting = self._waiting[self._next]
            if not waiting:
                continue
            network = next(iter(waiting))
            name = next(iter(waiting[network]))
            turn = next(iter(waiting[network][name]))
            _remove(waiting, network, name, turn)
            if turn.done():  # just cancelled, perhaps with thousands of others
                continue
            turn.set_result(None)
            # Both move to the end of their queue, if they have more waiters.
            if network in waiting:
                waiting.move_to_end(network)
                if name in waiting[network]:
                    waiting[network].move_to_end(name)
            return
        self._free += 1


def _left(waiting: Waiting, network: str, name: str, turn: asyncio.Future[None]) -> None:
    if turn.cancelled():
        _remove(waiting, network, name, turn)


def _remove(waiting: Waiting, network: str, name: str, turn: asyncio.Future[None]) -> None:
    names = waiting.get(network)
    same = names.get(name) if names is not None else None
    if names is not None and same is not None and turn in same:
        del same[turn]
        if not same:
            del names[name]
        if not names:
            del waiting[network]
