"""Retained messages on their way to new subscriptions (MQTT-3.3.1-6).

What it promises: a subscription gets every retained message that it matches and its client may read, as fast
as the client reads. They are stored, so they need no queue: a message is looked up when it can be sent, and
neither `queued_messages` nor `queued_bytes` limits their number. What is published meanwhile goes first, so
no older message of a topic follows a newer one.

`Session.unfed` has the filters that still get some, each with the last topic that was looked at. It outlives
the connection with the session, and is in the journal.

There may be a thousand filters and any number of messages, so `LOOK_UPS` of them are a slice of work.
"""

from __future__ import annotations

import heapq
from functools import partial
from typing import TYPE_CHECKING, Protocol

from bridge.mqtt.broker.outbox import Outgoing
from bridge.topics import matches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bridge.mqtt.broker.journal import Journal
    from bridge.mqtt.broker.message import Message, Subscription
    from bridge.mqtt.broker.retained import Retained
    from bridge.mqtt.broker.sessions import Session
    from bridge.net.turns import Turns
    from bridge.runtime import Runtime

LOOK_UPS = 200  # among the retained messages, about a millisecond in which nobody else has a turn


class Live(Protocol):
    """Generated messages that act as retained ones: those below `$SYS`."""

    def names(self, topic_filter: str) -> list[str]:
        """The topics that a filter may match."""

    def get(self, name: str) -> Message | None:
        """The message of a topic."""


class Feeds:
    """Gives retained messages to the sessions that have subscribed."""

    def __init__(self, retained: Retained, journal: Journal, turns: Turns, runtime: Runtime) -> None:
        self._retained, self._journal, self._turns, self._runtime = retained, journal, turns, runtime
        self.live: Live | None = None
        # Sessions that have a turn, or will have one, and what is to be called then.
        self._running: dict[Session, list[Callable[[], object]]] = {}

    def want(self, session: Session, topic_filter: str) -> None:
        """A subscription is to get the retained messages, from the first one on."""
        session.unfed[topic_filter] = ""
        if session.persistent:
            self._journal.fed(session, topic_filter, "")

    def resume(self, session: Session) -> None:
        """Go on once the client of a session is there, and has room."""
        if session.unfed:
            session.outbox.when_free(partial(self._runtime.soon, self.feed, session, bool))

    def feed(self, session: Session, done: Callable[[], object]) -> None:
        """Send what the client takes now. The rest follows as it reads.

        `done` is called when all have been looked at, when the client has to read first, or when it has left.
        """
        waiting = self._running.setdefault(session, [])
        waiting.append(done)
        if len(waiting) == 1:
            self._begin(session)

    def _begin(self, session: Session) -> None:
        self._turns.soon(session.identity.turn, partial(self._go_on, session))

    def _go_on(self, session: Session) -> None:
        left, free = LOOK_UPS, session.line is not None
        while session.unfed and left > 0 and free:
            topic_filter, after = next(iter(session.unfed.items()))
            left, free = self._give(session, topic_filter, after, left)
            if session.persistent:
                self._journal.fed(session, topic_filter, session.unfed.get(topic_filter))
        if session.unfed and free:
            self._runtime.soon(self._begin, session)
            return
        self.resume(session)
        for done in self._running.pop(session):
            done()

    def _give(self, session: Session, topic_filter: str, after: str, left: int) -> tuple[int, bool]:
        """Send the messages above a topic that a filter matches, with so many look-ups.

        Returns how many of these are left, and whether the client takes more.
        """
        subscription, outbox = session.subscriptions[topic_filter], session.outbox
        for name in self._candidates(topic_filter, after):
            if not left:
                return 0, True
            left -= 1
            out = self._copy(session, subscription, name)
            if out is not None:
                if not outbox.takes(out.qos):
                    return left, False
                if out.qos and session.persistent:
                    self._journal.queued(out.message, [session], [out])
                outbox.put(out)
            session.unfed[topic_filter] = name
        del session.unfed[topic_filter]
        return left, True

    def _candidates(self, topic_filter: str, after: str) -> Iterator[str]:
        found = self._retained.candidates(topic_filter, after)
        if self.live is None or topic_filter[0] != "$":
            return found
        return heapq.merge(found, (name for name in sorted(self.live.names(topic_filter)) if name > after))

    def _copy(self, session: Session, subscription: Subscription, name: str) -> Outgoing | None:
        """Return the copy of the message of a topic; None if it gets none."""
        if not (matches(subscription.filter, name) and session.identity.may_read(name)):
            return None
        message = self._retained.get(name)
        if message is None and self.live is not None:
            message = self.live.get(name)
        if message is None:
            return None
        identifiers = (subscription.identifier,) if subscription.identifier else ()
        return Outgoing(message, min(message.qos, subscription.qos), True, identifiers)
