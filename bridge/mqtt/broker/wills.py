"""Wills: the message of a client that is published if it leaves without DISCONNECT, after its delay."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bridge.mqtt.broker.reports import reason, refused
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import Publish

if TYPE_CHECKING:
    from collections import Counter

    from bridge.clock import Clock
    from bridge.mqtt.broker.journal import Journal
    from bridge.mqtt.broker.publishing import Publisher
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.wire.packets import Will
    from bridge.net.turns import Turns
    from bridge.runtime import Runtime

LONGEST_DELAY = 0xFFF_FFFF  # seconds of a timer


class Wills:
    """Keeps and publishes the wills of all clients."""

    def __init__(
        self,
        runtime: Runtime,
        clock: Clock,
        journal: Journal,
        publisher: Publisher,
        turns: Turns,
        counts: Counter[str],
    ) -> None:
        self._runtime, self._clock, self._journal = runtime, clock, journal
        self._publisher, self._turns, self._counts = publisher, turns, counts

    def set(self, session: Session, will: Will | None) -> None:
        """Set or replace the message that is published if the client leaves without DISCONNECT.

        A client that returns within the delay of its will cancels it (MQTT 5 section 3.1.3.2.2).
        """
        if session.will_timer is not None:
            session.will_timer.cancel()
            session.will_timer = None
        if session.will is not None or will is not None:
            session.set_will(will)
            if session.persistent:
                self._journal.willed(session)

    def wait(self, session: Session) -> None:
        """Publish the will of a disconnected client, if it has one, after its delay."""
        if session.will is None:
            return
        delay = session.will.properties.get(p.WILL_DELAY, 0) if session.persistent else 0
        # The client may have disconnected before a restart.
        seconds = min(delay, session.left + delay - self._clock.now() / 1000)
        if seconds > 0:
            session.will_timer = self._runtime.later(min(seconds, LONGEST_DELAY), self.publish, session)
        else:
            self.publish(session)

    def publish(self, session: Session) -> None:
        """Publish the will of a session now, if it has one and its client may."""
        will = session.will
        if will is not None and not session.identity.may_publish(will.topic):
            self._counts["dropped_wills"] += 1  # the rules have changed in the meantime
            refused(session, "will", will.topic, reason(session, "publish", will.topic))
        elif will is not None:
            head = will.qos << 1 | will.retain
            packet = Publish(head, will.topic.encode(), b"", will.payload, will.properties)
            # Many clients may leave at the same time, and each will may have many receivers.
            self._turns.soon(session.identity.turn, partial(self._publisher.publish_will, session, packet))
        self.set(session, None)
