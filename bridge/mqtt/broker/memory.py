"""The memory of all sessions together, and who gives some back when it is used up.

Every session counts with `EACH`, its messages (those that wait and those under way), its filters, its will,
its QoS 2 packet ids and its unanswered requests; roughly, as `Message.size` does. What several sessions wait
for counts for each. `Memory.total` has it all, `Outbox.held` the part of a session. Above
`limits.session_bytes`, whoever has most (`Identity.holder`) loses messages that wait, the oldest of its
fullest queue first; without any, the session of it that holds most ends. That is logged, and counted as
`dropped_queue_full` or `ended_sessions`. So a flood displaces itself.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Protocol, TypeVar

from bridge.mqtt.broker.message import size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bridge.access.rules import Holder, Identity
    from bridge.mqtt.wire.packets import Will
    from bridge.runtime import Runtime

EACH = 2500  # bytes of a session that has nothing
OF_FILTER = 700  # of a filter, beside its characters and levels
OF_LEVEL = 90
OF_ID = 100  # of a QoS 2 packet id of a client
SLACK = 256  # this part of the limit becomes free at a time: each time all sessions are looked at


class Queue(Protocol):
    """An outbox: the bytes that its session holds, and those of the messages that wait."""

    held: int

    @property
    def size(self) -> int: ...


class Holding(Protocol):
    """A session, as far as memory is concerned."""

    identity: Identity

    @property
    def outbox(self) -> Queue: ...


T = TypeVar("T", bound=Holding)


def size_of_filter(topic_filter: str) -> int:
    """Roughly the bytes that a subscription holds in memory."""
    return OF_FILTER + len(topic_filter) + OF_LEVEL * topic_filter.count("/")


def size_of_will(will: Will | None) -> int:
    """Roughly the bytes that a will holds in memory."""
    return size_of(will.topic.encode(), will.payload, will.properties) if will is not None else 0


class Memory:
    """Roughly the bytes that all sessions hold."""

    def __init__(self, limit: float, runtime: Runtime | None, full: Callable[[], None]) -> None:
        """`full` is called, in a turn of its own, when more than `limit` bytes are held."""
        self.total, self.limit = 0, limit
        self._runtime, self._full, self._due = runtime, full, False

    def take(self, size: int) -> None:
        """A session holds so many bytes more; a negative number: less."""
        self.total += size
        if self.total > self.limit:
            self.exceeded()

    def exceeded(self) -> None:
        """`total` is above the limit."""
        if not self._due and self._runtime is not None:
            self._due = True
            self._runtime.soon(self._make_room)

    def _make_room(self) -> None:
        self._due = False
        if self.total > self.limit:
            self._full()

    def make_room(self, sessions: Iterable[T], drop: Callable[[T], None], end: Callable[[T], None]) -> None:
        """Have sessions give back memory until there is some room again.

        `drop` drops the oldest message that waits for a session; `end` ends one without such messages.
        """
        room = self.limit - self.limit // SLACK
        held: dict[Holder, int] = {}
        # By what waits, then by all that is held.
        queues: dict[Holder, list[tuple[int, int, int, T]]] = {}
        for number, session in enumerate(sessions):
            holder, outbox = session.identity.holder, session.outbox
            held[holder] = held.get(holder, 0) + outbox.held
            queues.setdefault(holder, []).append((-outbox.size, -outbox.held, number, session))
        for queue in queues.values():
            heapq.heapify(queue)
        most = [(-size, number, holder) for number, (holder, size) in enumerate(held.items())]
        heapq.heapify(most)
        while self.total > room and most:
            _, place, holder = most[0]
            queue = queues[holder]
            waiting, _, number, session = queue[0]
            outbox, before = session.outbox, session.outbox.held
            if waiting:
                drop(session)
                heapq.heapreplace(queue, (-outbox.size, -outbox.held, number, session))
            else:
                heapq.heappop(queue)
                end(session)
            held[holder] -= before - outbox.held
            if queue:
                heapq.heapreplace(most, (-held[holder], place, holder))
            else:
                heapq.heappop(most)


NOWHERE = Memory(float("inf"), None, lambda: None)  # of sessions that have ended
