"""Shared subscriptions: each message goes to one member of a group (MQTT 5 section 4.8.2).

A client of any protocol version joins by subscribing to `$share/<group>/<filter>`. Clients that name the same
group and the same filter are members of one shared subscription. Every other subscription gets its own copy,
even an ordinary one of the same client.

What it promises:
* A message goes to a member that can receive it at once; these take turns. If there is none, it is queued for
  the member with the fewest pending messages: connected ones first, then disconnected ones. A full queue
  comes last. In a large group, at most `LOOKS` connected and as many disconnected members are compared for a
  message.
* Only members whose rules currently let them read the topic are considered.
* When a member's session ends, its unacknowledged messages go to other members (`Router.reassign`). A QoS 2
  message in flight does not (MQTT-4.8.2-5), because its member may have it.
* A message that a member refuses, by a reason code of 0x80 or above, goes to nobody else (MQTT-4.8.2-6).
* Retained messages are not sent to a new member. There is no order between members.

A copy that waits for a persistent session is in the journal like any other; see `Router`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.mqtt.broker.outbox import IDLE, Outgoing

if TYPE_CHECKING:
    from bridge.mqtt.broker.message import Message, Receiver
    from bridge.mqtt.broker.sessions import Session


LOOKS = 16


class Group:
    """One shared subscription: the number of its members, and whose turn it is."""

    __slots__ = ("members", "turn")

    def __init__(self) -> None:
        self.members = self.turn = 0


class Share:
    """A shared subscription for one topic. It is rebuilt when a member joins or leaves."""

    __slots__ = ("_away", "_connected", "_group", "filter")

    def __init__(self, topic_filter: str, group: Group) -> None:
        """`topic_filter` is complete, with `$share/`."""
        self.filter, self._group = topic_filter, group
        self._connected: list[tuple[Session, Receiver]] = []
        self._away: list[tuple[Session, Receiver]] = []

    def add(self, session: Session, receiver: Receiver) -> None:
        """Add a member with the options of its subscription."""
        (self._away if session.line is None else self._connected).append((session, receiver))

    def __len__(self) -> int:
        """How many members it has."""
        return len(self._connected) + len(self._away)

    def choose(self, message: Message) -> tuple[Session, Outgoing] | None:
        """Choose the member that gets a message, and make its copy; None if it would drop it at once."""
        first = self._group.turn
        self._group.turn = first + 1
        best, least = None, None
        for members in (self._connected, self._away):
            count = len(members)
            for at in range(first, first + min(count, LOOKS)):
                session, receiver = members[at % count]
                if self.filter not in session.subscriptions:
                    continue  # it left in the same read that brought the message
                qos = min(message.qos, receiver.qos)
                retain = message.retain and receiver.retain_as_published
                out = Outgoing(message, qos, retain, receiver.identifiers, share=self.filter)
                load = session.outbox.load(out)
                if load == IDLE:
                    return session, out
                if load is not None and (least is None or load < least):
                    best, least = (session, out), load
            if least is not None and not least[0]:
                break  # connected, with space in its queue
        return best
