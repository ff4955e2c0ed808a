"""Whose turn it is: work of strangers is done a little at a time, and nobody waits for a crowd.

One network after the other has its turn, and in each one name after the other. Networks that are known, since
somebody there has logged in before, have every second turn while any of them waits. Whoever stops waiting
loses his place at once.
"""

from __future__ import annotations

import asyncio

Waiting = dict[str, dict[str, dict["asyncio.Future[None]", None]]]  # by network and name, in order


class FairQueue:
    """At most `at_a_time` have their turn together."""

    def __init__(self, at_a_time: int = 1) -> None:
        self._free = at_a_time
        self._waiting: tuple[Waiting, Waiting] = ({}, {})  # unknown, known
        self._next = 0

    async def wait(self, network: str, name: str = "", *, known: bool = False) -> None:
        """Wait for a turn; whoever has it gives it back by `done`."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting[known]
        waiting.setdefault(network, {}).setdefault(name, {})[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.done()
            else:
                _remove(waiting, network, name, turn)
            raise

    def done(self) -> None:
        """A turn is over: it is the next one's."""
        for _ in range(2):
            self._next = 1 - self._next
            waiting = self._waiting[self._next]
            if waiting:
                network = next(iter(waiting))
                name = next(iter(waiting[network]))
                turn = next(iter(waiting[network][name]))
                _remove(waiting, network, name, turn)
                if turn.done():  # cancelled this very moment
                    self.done()
                    return
                turn.set_result(None)
                # Both go to the end of their row, if there is more of them.
                if (names := waiting.pop(network, None)) is not None:
                    waiting[network] = names
                    if (same := names.pop(name, None)) is not None:
                        names[name] = same
                return
        self._free += 1


def _remove(waiting: Waiting, network: str, name: str, turn: asyncio.Future[None]) -> None:
    names = waiting.get(network, {})
    same = names.get(name, {})
    if turn in same:
        del same[turn]
        if not same:
            del names[name]
        if not names:
            del waiting[network]
