"""Shared subscriptions: of each message one copy, for one member of a group (MQTT 5 section 4.8.2).

A client of any protocol version joins by subscribing to `$share/<group>/<filter>`. Those who name the same
group and the same filter are members of one shared subscription. Every other subscription gets copies of its
own, ordinary ones of the same client included.

What it promises:
* A message goes to a member that can be sent it at once; these take turns. If there is none, it is queued for
  the member with the fewest pending messages: connected ones first, then those away. A full queue comes last.
  Of a large group, at most `LOOKS` connected members and as many of those away are compared for a message.
* Only members whose rules let them read the topic are considered, as they are at that moment.
* When a member's session ends, what it has not acknowledged goes to other members (`Router.reassign`). A
  QoS 2 message that is under way does not (MQTT-4.8.2-5): its member may have it.
* A message that a member refuses, by a reason code of 0x80 or above, goes to nobody else (MQTT-4.8.2-6).
* Retained messages are not sent to a new member. There is no order between members.

A copy that waits for a persistent session is in the journal as any other; see `Router`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.mqtt.broker.outbox import IDLE, Outgoing

if TYPE_CHECKING:
    from bridge.mqtt.broker.message import Message, Receiver
    from bridge.mqtt.broker.sessions import Session


LOOKS = 16


class Group:
    """One shared subscription: how many members it has, and whose turn it is."""

    __slots__ = ("members", "turn")

    def __init__(self) -> None:
        self.members = self.turn = 0


class Share:
    """A shared subscription, as far as one topic is concerned. Made anew when a member comes or goes."""

    __slots__ = ("_away", "_connected", "_group", "filter")

    def __init__(self, topic_filter: str, group: Group) -> None:
        """`topic_filter` is all of it, with `$share/`."""
        self.filter, self._group = topic_filter, group
        self._connected: list[tuple[Session, Receiver]] = []
        self._away: list[tuple[Session, Receiver]] = []

    def add(self, session: Session, receiver: Receiver) -> None:
        """A member, and what its subscription asks for."""
        (self._away if session.line is None else self._connected).append((session, receiver))

    def __len__(self) -> int:
        """How many members it has."""
        return len(self._connected) + len(self._away)

    def choose(self, message: Message) -> tuple[Session, Outgoing] | None:
        """The member that is to get a message, and its copy; None if the copy would be dropped at once."""
        first = self._group.turn
        self._group.turn = first + 1
        best, least = None, None
        for members in (self._connected, self._away):
            count = len(members)
            for at in range(first, first + min(count, LOOKS)):
                session, receiver = members[at % count]
                if self.filter not in session.subscriptions:
                    continue  # it has left in the very read that brought the message
                qos = min(message.qos, receiver.qos)
                retain = message.retain and receiver.retain_as_published
                out = Outgoing(message, qos, retain, receiver.identifiers, share=self.filter)
                load = session.outbox.load(out)
                if load == IDLE:
                    return session, out
                if load is not None and (least is None or load < least):
                    best, least = (session, out), load
            if least is not None and not least[0]:
                break  # connected, with room in its queue
        return best
