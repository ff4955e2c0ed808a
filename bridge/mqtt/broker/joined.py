"""Our session at another broker: what a client must keep of it (MQTT 3.1.1 and 5, section 4.1).

The other broker keeps its half over our kills, so we keep ours: the QoS 2 packet ids between PUBREC and
PUBREL, and which subscriptions it has granted. Both are in a journal, under the name of the upstream. The
packet ids have `ABOVE` added there, and in the headers of streams. So a client that has the same name cannot
use up one of them.

A message may go into streams, and into the queues of sessions in the same journal. A kill may come when only
some of them have it. So the record of the queues names the packet id too, and what is sent again goes where
it is lacking (`replay.Partial`; `QUEUES` stands for the queues).

Before each CONNECT the journal says that the session is doubtful: if we are killed before we have seen the
answer, the broker may have begun a new one. A doubtful session has no granted subscriptions. Of its packet
ids, one counts as free when it comes without DUP, because a broker that goes on with a session sets that flag
on what it sends again (MQTT-3.3.1-1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bridge.access.rules import Identity
from bridge.mqtt.broker import records as r
from bridge.mqtt.broker.journal import survived
from bridge.mqtt.broker.replay import QUEUES, Partial, digest_of
from bridge.mqtt.broker.sessions import NEVER, Session

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from bridge.mqtt.broker.journal import Journal
    from bridge.mqtt.broker.replay import Unstored

ABOVE: Final = 0x10000  # above every packet id of a client
_PREFIX = b"\x01"  # which makes a packet id of two bytes one that is `ABOVE`


class Joined(Session):
    """One such session. It only receives, so it has no outbox.

    `at` is the broker and the client id there. `granted` has what was subscribed to, by filter: the protocol
    and the options of the SUBSCRIBE (see `subscribing`), 0 if there has been no answer. `accepts` is the
    protocol that the broker has taken last, 0 for none; `refuses_bridges` says that it takes 3.1.1, but not
    the bit of a bridge.
    """

    __slots__ = ("accepts", "at", "doubtful", "granted", "refuses_bridges", "uncommitted")

    def __init__(self, name: str) -> None:
        super().__init__(name, Identity(name, None, ()))
        self.expiry = NEVER
        self.at = ""
        self.doubtful = self.refuses_bridges = False
        self.accepts = 0
        self.granted: dict[str, int] = {}
        self.uncommitted: Callable[[], Mapping[int, Unstored]] = dict  # those of its inbox

    def take_ids(self, packet_ids: Collection[int]) -> None:
        self.incoming.update(packet_ids)

    def free_ids(self, packet_ids: Collection[int]) -> None:
        self.incoming.difference_update(packet_ids)

    def records(self) -> Iterator[r.Record]:
        """Yield the records that restore it."""
        yield self.record()
        unstored = self.uncommitted()
        for packet_id in self.incoming - unstored.keys():
            yield r.Received(self.client_id, packet_id)
        for packet_id, one in unstored.items():
            if one.delivered:
                yield r.Held(self.client_id, packet_id, [QUEUES], one.digest)
        for packet_id, held in self.partial.items():
            for digest, streams in held.items():
                yield r.Held(self.client_id, packet_id, sorted(streams), digest)

    def record(self) -> r.Joined:
        """Return the record of all but its packet ids."""
        return r.Joined(
            self.client_id, self.at, self.doubtful, self.accepts, self.refuses_bridges, dict(self.granted)
        )

    def begin_anew(self, at: str, journal: Journal) -> None:
        """The broker has no session of ours, or it is another broker."""
        for packet_id in sorted(self.incoming):
            journal.released(self, packet_id)
        self.incoming.clear()
        self.partial.clear()
        self.granted.clear()
        if at != self.at:
            self.at, self.accepts, self.refuses_bridges = at, 0, False
        self.doubtful = False
        journal.joined(self.record())


def above(packet_id: bytes) -> bytes:
    """The two bytes of a packet id, so that its number is `ABOVE`."""
    return _PREFIX + packet_id


def recover_joined(records: Sequence[r.Any_], boot: str) -> dict[str, Joined]:
    """Return the sessions in a journal, by their names. After a power cut they are doubtful, without ids."""
    found: dict[str, Joined] = {}
    for record in records:
        match record:
            case r.Joined(name):
                one = found.setdefault(name, Joined(name))
                one.at, one.doubtful, one.granted = record.at, record.doubtful, record.granted
                one.accepts, one.refuses_bridges = record.accepts, record.refuses_bridges
            case r.Received(name, number) if number >= ABOVE and name in found:
                found[name].incoming.add(number)
                found[name].partial.pop(number, None)
            case r.Released(name, number) if number >= ABOVE and name in found:
                found[name].incoming.discard(number)
                found[name].partial.pop(number, None)
            case r.Held(name, number, streams, digest) if number >= ABOVE and name in found:
                found[name].partial.setdefault(number, Partial()).hold(digest, frozenset(streams))
            case r.Queued() if record.id >= ABOVE and record.sender in found:
                partial = found[record.sender].partial.setdefault(record.id, Partial())
                partial.hold(digest_of(record.topic, record.payload), frozenset({QUEUES}))
    if not survived(records, boot):
        for one in found.values():
            one.incoming.clear()
            one.partial.clear()
            one.granted = dict.fromkeys(one.granted, 0)
    return found
