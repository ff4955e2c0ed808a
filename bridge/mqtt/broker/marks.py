"""Which QoS 2 messages of a stream have their packet ids in the journal.

A message is in its stream a moment before its id is in the journal. After a kill in between, the start reads
the stream for such ids (`recovery.find_stored_ids`), from a mark on: below it, all ids are in the journal.
Messages are settled out of order, since one may wait for another of its streams. So the mark stays at or
below the lowest that is not settled, and what is settled above it is known by its number. Messages of clean
sessions count like others: an id that the start finds is taken to be of the session that its client has then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Mark:
    """The mark of one stream: all ids below `upto` are in the journal, and those of the numbers `known`."""

    __slots__ = ("_waiting", "known", "upto")

    def __init__(self, upto: int) -> None:
        self.upto = upto
        self.known: set[int] = set()
        self._waiting: dict[int, object] = {}  # numbers that are not settled, ascending, and whose they are

    def expect(self, number: int, owner: object) -> None:
        """The stream was given a message, which will be its `number` if the commit succeeds."""
        while self._waiting and next(reversed(self._waiting)) >= number:
            self._waiting.popitem()  # a commit has failed, and its numbers are given out again
        self._waiting[number] = owner

    def forget(self, number: int, owner: object) -> None:
        """A message was not stored after all: its number is another's now, or will be."""
        if self._waiting.get(number) is owner:
            del self._waiting[number]

    def settle(self, numbers: list[int], owner: object, following: int) -> list[int]:
        """The ids of these are in the journal; `following` is the stream's next number.

        Moves the mark as far as it may go; returns those that are above it.
        """
        for number in numbers:
            self.forget(number, owner)
        self.add(min(following, next(iter(self._waiting), following)), numbers)
        return [number for number in numbers if number >= self.upto]

    def add(self, upto: int, numbers: Iterable[int]) -> None:
        """Take over what the journal says."""
        self.known.update(numbers)
        if upto != self.upto:
            self.known = {number for number in self.known if number >= upto}
        self.upto = upto
