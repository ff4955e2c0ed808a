"""The replay point of a stream, from which a start searches it for QoS 2 ids.

A message is in its stream a moment before its packet id is in the journal. After a kill in between, the start
reads such ids from the stream (`recovery.find_stored_ids`), from its replay point on; all ids below it are in
the journal. Messages are settled out of order, because one may wait for another of its streams. So the point
stays at or below the lowest unsettled number, and the settled numbers above it are kept. Messages of clean
sessions count too, because the start assigns an id to whatever session its client has then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from bridge.deflate import crc32

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bridge.mqtt.broker.store import Stream


QUEUES: Final = ""  # stands among the streams of a message for the sessions that are to get it
FEW = 4  # messages of one packet id that are told apart; only the newest may be sent again


def digest_of(topic: bytes, payload: bytes) -> int:
    """Return a number, not 0, that tells the messages apart that a client has sent with one packet id.

    Messages that differ only in their properties are taken for one.
    """
    return crc32(payload, crc32(topic + b"\0")) or 1  # no topic has a NUL (MQTT-4.7.3-2)


class Unstored(NamedTuple):
    """A QoS 2 message whose id is in use only if the commit succeeds, and its numbers.

    `delivered`: the sessions that are to get it have it, and get it only once (see `joined`).
    """

    topic: bytes
    payload: bytes
    places: dict[Stream, int]
    delivered: bool = False

    @property
    def digest(self) -> int:
        """See `digest_of`."""
        return digest_of(self.topic, self.payload)


class Partial(dict[int, frozenset[str]]):
    """The messages of one QoS 2 id that only some of their streams have stored: those streams, by digest.

    The id alone does not identify a message. If the client is told that it is refused, the next one may have
    the id, and DUP, if its first attempt was lost (section 4.3.3). The digest 0 is of an older version's
    journal, and stands for any message. Of more than `FEW` messages, the oldest are forgotten.
    """

    def streams(self, digest: int) -> frozenset[str]:
        """Return the streams that have the message with this digest."""
        return self.get(digest) or self.get(0, frozenset())

    def hold(self, digest: int, streams: frozenset[str]) -> None:
        """These streams have this message, which is the newest of the id."""
        self.pop(digest, None)
        self[digest] = streams
        if len(self) > FEW:
            del self[next(iter(self))]


NONE: Final = Partial()  # not to be changed


class ReplayPoint:
    """One stream's replay point: the journal has all ids below `upto`, and those of the numbers `known`."""

    __slots__ = ("_pending", "known", "upto")

    def __init__(self, upto: int) -> None:
        self.upto = upto
        self.known: set[int] = set()
        self._pending: dict[int, object] = {}  # unsettled numbers, ascending, and their owners

    def expect(self, number: int, owner: object) -> None:
        """Expect a message, which will have this `number` if the commit succeeds."""
        while self._pending and next(reversed(self._pending)) >= number:
            self._pending.popitem()  # a commit has failed, and its numbers are used again
        self._pending[number] = owner

    def forget(self, number: int, owner: object) -> None:
        """Forget a message that was not stored; another one has or will have its number."""
        if self._pending.get(number) is owner:
            del self._pending[number]

    def settle(self, numbers: list[int], owner: object, following: int) -> list[int]:
        """Settle messages whose ids the journal has; `following` is the stream's next number.

        Moves the point as far as possible, and returns the settled numbers above it.
        """
        for number in numbers:
            self.forget(number, owner)
        self.add(min(following, next(iter(self._pending), following)), numbers)
        return [number for number in numbers if number >= self.upto]

    def add(self, upto: int, numbers: Iterable[int]) -> None:
        """Set the point as the journal has it."""
        self.known.update(numbers)
        if upto != self.upto:
            self.known = {number for number in self.known if number >= upto}
        self.upto = upto
