"""MQTT sessions: the state of a client that outlives its connection (3.1.1 and 5, section 4.1).

A session lives as long as its connection, and then for its expiry interval: 0 for a clean session of
3.1.1, no end for the others there, what the client asked for in MQTT 5; never longer than
`limits.session_expiry_interval`. At most `limits.sessions` are kept for clients that are away. One too many
ends the one that has been away for longest, of the user who has most of them: whoever opens many ends only
sessions of its own. Clients without a user name are told apart by their addresses (`Identity.holder`). It is
logged, and counted (`ended_sessions`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from bridge import books
from bridge.mqtt.broker.memory import EACH, OF_ID, Memory, size_of_filter, size_of_will
from bridge.mqtt.broker.outbox import Notes, Outbox
from bridge.mqtt.wire.packets import V5
from bridge.net.ranking import Ranking

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from bridge.access.rules import Holder, Identity
    from bridge.clock import Clock
    from bridge.mqtt.broker.line import Line
    from bridge.mqtt.broker.message import Subscription
    from bridge.mqtt.broker.replay import Partial
    from bridge.mqtt.settings import Limits
    from bridge.mqtt.wire.packets import Will
    from bridge.runtime import Runtime, Timer

NEVER = 0xFFFFFFFF  # MQTT 5 section 3.1.2.11.2


class Session:
    """One client's subscriptions, outgoing messages, and QoS 2 ids in use."""

    __slots__ = (
        "client_id", "expiry", "identity", "incoming", "left", "line", "outbox", "partial", "proof",
        "subscriptions", "timer", "unfed", "will", "will_timer",
    )  # fmt: skip

    outbox: Outbox

    def __init__(self, client_id: str, identity: Identity) -> None:
        self.client_id, self.identity = client_id, identity
        self.proof = b""  # the proof of its client's login (`access.proofs`)
        self.expiry = 0  # seconds by which it outlives its connection
        self.subscriptions: dict[str, Subscription] = {}
        # Filters that still get retained messages, with the last topic that was looked at (`feeds`).
        self.unfed: dict[str, str] = {}
        self.incoming: set[int] = set()  # QoS 2 packet ids between PUBLISH and PUBREL (4.3.3)
        self.partial: dict[int, Partial] = {}  # QoS 2 messages that only some of their streams have, by id
        self.line: Line | None = None
        self.left = 0.0  # when the connection was lost, seconds on the age timeline
        self.timer: Timer | None = None
        self.will: Will | None = None  # published when the client has left, after the delay
        self.will_timer: Timer | None = None  # runs during its delay

    @property
    def persistent(self) -> bool:
        """Return whether it outlives its connection."""
        return self.expiry > 0

    def take_ids(self, packet_ids: Collection[int]) -> None:
        """QoS 2 packet ids are in use."""
        before = len(self.incoming)
        self.incoming.update(packet_ids)
        self.outbox.hold(OF_ID * (len(self.incoming) - before))

    def free_ids(self, packet_ids: Collection[int]) -> None:
        """QoS 2 packet ids are in use no longer."""
        before = len(self.incoming)
        self.incoming.difference_update(packet_ids)
        self.outbox.hold(OF_ID * (len(self.incoming) - before))

    def set_will(self, will: Will | None) -> None:
        """Set what is published when the client has gone."""
        self.outbox.hold(size_of_will(will) - size_of_will(self.will))
        self.will = will

    @property
    def lasting_will(self) -> Will | None:
        """Return the will if it survives a restart. A will of 3.1.1 does not: it has no delay."""
        here = self.line is None or self.line.level == V5  # disconnected: it waits for its delay
        return self.will if self.persistent and here else None


class Sessions:
    """All sessions by client id.

    `ended` is called for each that is over, `evicted` for one too many, and `full` when all hold too much.
    """

    def __init__(
        self,
        runtime: Runtime,
        limits: Limits,
        counts: Counter[str],
        clock: Clock,
        notes: Callable[[Session], Notes],
        ended: Callable[[Session], None],
        evicted: Callable[[Session], None],
        full: Callable[[], None],
    ) -> None:
        self._runtime, self._limits, self._counts, self._clock = runtime, limits, counts, clock
        self._notes, self._ended, self._evicted = notes, ended, evicted
        self.memory = Memory(limits.session_bytes, runtime, full)
        self._by_id: dict[str, Session] = {}
        # The requests under way, with what they hold of the memory of their session.
        self.requests: dict[object, tuple[Session, Line, int]] = {}
        # By holder, and by client id in the order in which they were left.
        self._away: dict[Holder, dict[str, Session]] = {}
        self._away_of: dict[str, Holder] = {}  # by client id
        self._most: Ranking[Holder] = Ranking()  # who has most that are away; of equals, who left first
        books.opened(self)

    def recount(self) -> Iterable[books.Entry]:
        yield "memory.total", self.memory.total, sum(one.outbox.held for one in self._by_id.values())
        requests: Counter[Session] = Counter()
        for session, _, size in self.requests.values():
            requests[session] += size
        for name, session in self._by_id.items():
            waiting, flying = session.outbox.recount()
            beside = sum(map(size_of_filter, session.subscriptions)) + OF_ID * len(session.incoming)
            held = EACH + beside + size_of_will(session.will) + waiting + flying + requests[session]
            yield f"outbox.held of {name!r}", session.outbox.held, held
            yield f"outbox.size of {name!r}", session.outbox.size, waiting
        away = {one: holder for holder, sessions in self._away.items() for one in sessions}
        yield "away_of", self._away_of, away

    def __len__(self) -> int:
        """Return how many sessions there are."""
        return len(self._by_id)

    def get(self, client_id: str) -> Session | None:
        """Return the session of a client, if there is one."""
        return self._by_id.get(client_id)

    def all(self) -> list[Session]:
        """Return every session."""
        return list(self._by_id.values())

    def create(self, client_id: str, identity: Identity) -> Session:
        """Create a session. An existing one of the client must have been ended before."""
        session = Session(client_id, identity)
        session.outbox = Outbox(self._limits, self._counts, self._notes(session), self.memory)
        session.outbox.hold(EACH)
        self._by_id[client_id] = session
        return session

    def enter(self, session: Session) -> None:
        """Mark a client as connected, so its session does not expire."""
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None
        session.left = 0.0
        if (holder := self._away_of.pop(session.client_id, None)) is not None:
            del self._away[holder][session.client_id]
            self._rank(holder)

    def leave(self, session: Session) -> None:
        """Mark a client as disconnected: end its session now, or when it expires."""
        if self._by_id.get(session.client_id) is not session:
            return
        session.left = session.left or self._clock.now() / 1000
        seconds = self._seconds_left(session)
        if seconds <= 0:
            self.end(session)
            return
        holder = self._away_of.setdefault(session.client_id, session.identity.holder)
        self._away.setdefault(holder, {})[session.client_id] = session
        self._rank(holder)
        session.timer = self._runtime.later(seconds, self._expired, session)
        if len(self._away_of) > self._limits.sessions and (most := self._most.first()) is not None:
            self._counts["ended_sessions"] += 1
            oldest = _first(self._away[most])
            self._evicted(oldest)
            self.end(oldest)

    def _rank(self, holder: Holder) -> None:
        of_holder = self._away[holder]
        if of_holder:
            self._most.set(holder, (-len(of_holder), _first(of_holder).left))
        else:
            del self._away[holder]
            self._most.set(holder, None)

    def is_over(self, session: Session) -> bool:
        """Return whether a session has expired. A timer does not run while the machine is suspended."""
        return bool(session.left) and self._seconds_left(session) <= 0

    def _seconds_left(self, session: Session) -> float:
        return self.lifetime(session) - max(0.0, self._clock.now() / 1000 - session.left)

    def lifetime(self, session: Session) -> float:
        """Return the seconds by which a session outlives its connection."""
        longest = self._limits.session_expiry_interval / 1000
        return longest if session.expiry == NEVER else min(longest, session.expiry)

    def end(self, session: Session) -> None:
        """Delete a session and everything in it."""
        if self._by_id.get(session.client_id) is not session:
            return
        self.enter(session)
        del self._by_id[session.client_id]
        self._ended(session)
        session.outbox.clear()

    def _expired(self, session: Session) -> None:
        self._counts["expired_sessions"] += 1
        self.end(session)

    def stop(self) -> None:
        """Cancel all timers. Sessions stay as they are."""
        for session in self._by_id.values():
            for timer in (session.timer, session.will_timer):
                if timer is not None:
                    timer.cancel()


def _first(sessions: dict[str, Session]) -> Session:
    """Return the session that was left first."""
    return next(iter(sessions.values()))
