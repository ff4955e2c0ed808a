"""What happens to a PUBLISH: it is stored, retained, delivered or refused.

The connection's hot path handles a plain append. This module handles flags, properties, subscribers, refusals
and wills.

A message that a stream refuses is never acknowledged as if it were stored. MQTT 5 has reason codes for that
(section 3.4.2.1). For a 3.1.1 client a PUBACK is a promise, so its connection is closed, with a counted and
logged reason, after the acknowledgements of earlier messages. QoS 0 is dropped and counted.

A refusal is permanent (`PERMANENT`) if the same message would be refused again, whatever is exported or
purged until then. A 3.1.1 client would resend such a message on each connection, and never get to the next
one. With `[mqtt] refused_stream` it is stored there instead, and acknowledged as usual. It goes to none of
its own streams and to no subscriber, and is not retained. So is what the rules forbid a client that cannot be
told (3.1.1, or QoS 0). Without that stream, `forbidden = "acknowledge"` acknowledges it where no stream takes
the topic (MQTT-3.3.5-2). A refusal that may pass, such as the time-out of a plugin, does neither.

A limit of retained messages refuses no message that has a stream: it is stored, delivered and acknowledged,
but not retained. Without a stream that is so too, except that an MQTT 5 client is told that its message is
refused. A 3.1.1 client could not be told, and would never get to what is behind it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import (
    InvalidRequest,
    JournalFailed,
    MessageTooLarge,
    NoStream,
    RetainedFull,
    StreamBridgeError,
    StreamError,
    Unauthorized,
    Undecided,
)
from bridge.mqtt.broker import receipts
from bridge.mqtt.broker.inbox import reason_of
from bridge.mqtt.broker.message import Message, expiry_of, headers_of
from bridge.mqtt.broker.replay import QUEUES, digest_of
from bridge.mqtt.broker.reports import HOUR
from bridge.mqtt.broker.router import OURS
from bridge.mqtt.broker.unmatched import Unmatched
from bridge.mqtt.wire import answers
from bridge.mqtt.wire.packets import (
    NO_MATCHING_SUBSCRIBERS,
    PUBACK,
    PUBREC,
    RECEIVE_MAXIMUM_EXCEEDED,
    V5,
    ProtocolError,
    Publish,
)
from bridge.streams import headers

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Collection
    from collections.abc import Set as AbstractSet

    from bridge.access.rules import Holder
    from bridge.clock import Clock
    from bridge.mqtt.broker.inbox import Batch
    from bridge.mqtt.broker.joined import Joined
    from bridge.mqtt.broker.journal import Journal
    from bridge.mqtt.broker.reports import Reports
    from bridge.mqtt.broker.router import Route, Router
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.broker.store import Committer, Store, Stream
    from bridge.net.turns import Turns

    # Answers a PUBLISH on a request topic. Arguments: session, topic, packet. Raises Unauthorized.
    Requests = Callable[[Session, str, Publish], None]

RECEIVE_MAXIMUM = 4_096  # QoS 2 messages of an MQTT 5 client between PUBLISH and PUBREL; CONNACK announces it

# Too large for the stream, no such stream, or a missing right; not a full stream or a failing disk.
PERMANENT = (MessageTooLarge, NoStream, Unauthorized)
LONGEST_REASON = 500  # characters of an error that are stored with the message
_NONE: frozenset[Stream] = frozenset()


class Brought(NamedTuple):
    """Where a message is: what must be committed before it counts as stored, its numbers, its topic.

    `delivered`: the sessions that are to get it have it.
    """

    touched: Collection[Committer]
    places: dict[Stream, int]
    topic: bytes
    delivered: bool = False


class Publisher:
    """Processes the PUBLISH packets of all clients, and their wills."""

    def __init__(
        self,
        store: Store,
        router: Router,
        journal: Journal,
        clock: Clock,
        turns: Turns,
        reports: Reports,
        requests: Requests,
    ) -> None:
        self._store, self._router, self._journal, self._clock = store, router, journal, clock
        self._turns, self._reports, self._requests = turns, reports, requests
        self._counts: Counter[str] = reports.counts
        self.refused_stream: str | None = None  # `[mqtt] refused_stream`
        self.unmatched = Unmatched(store, clock, reports)

    def publish(self, batch: Batch, packet: Publish, route: Route) -> None:
        """Process one PUBLISH (section 3.3); `batch` gets its acknowledgement. Raises ProtocolError."""
        session, qos, number, line = batch.inbox.session, packet.qos, packet.number, batch.inbox.line
        assert session is not None
        if packet.head & 14 == 8:
            raise ProtocolError("a PUBLISH of QoS 0 with DUP (MQTT-3.3.1-2)")
        if qos == 2 and number in session.incoming:
            batch.acks += b"\x50\x02" + packet.packet_id  # already stored: once per packet id (4.3.3)
            if session.persistent:
                batch.touched[self._journal] = None  # which may have failed to keep the id
            return
        if qos == 2 and line.level == V5 and len(session.incoming) >= RECEIVE_MAXIMUM:
            why = f"more than {RECEIVE_MAXIMUM} QoS 2 messages at a time"
            raise ProtocolError(why, RECEIVE_MAXIMUM_EXCEEDED)
        places: dict[Stream, int] = {}
        known: AbstractSet[Stream] = _NONE
        full = ""  # why it is not retained
        try:
            if route.denied:
                why = "it belongs to the broker" if route.reserved else "see [[mqtt.acl]]"
                if route.undecided:
                    raise Undecided(f"no plugin has said in time whether it may publish on {route.name!r}")
                raise Unauthorized(f"it may not publish on {route.name!r}; {why}")
            if packet.head & 1 and not route.request and not route.ignored:
                full = self._router.retained.refusal(route.name, packet, session.identity.holder)
                if full and qos and line.level == V5 and not route.streams:
                    raise RetainedFull(full)
            if route.request:
                self._requests(session, route.name, packet)
            elif route.streams:
                places, known = self._append(session, packet, route)
                batch.touched.update(dict.fromkeys(places))
            elif route.ignored:
                self._counts["ignored_bridge_state"] += 1
            else:
                self._unmatched(session, packet, route)
        except (StreamError, RetainedFull, Unauthorized, InvalidRequest) as error:
            self.refused(batch, packet, error, stored=bool(route.streams))
            return
        if (route.delivers or packet.head & 1) and not route.request and not route.ignored:
            began = self._turns.begin()
            packet_id = number if qos == 2 and session.persistent else 0
            holder = session.identity.holder if packet.head & 1 and not full else None
            if full:
                self._not_retained(session.identity.label, session.identity.holder, full)
            message = self._message(packet, places)
            if self._router.publish(route, message, session, packet_id, holder=holder):
                batch.touched[self._journal] = None
            self._turns.spend(began)
        answer = b""
        if qos and line.level == V5 and route.stored_nowhere and not route.delivers:
            kind = PUBACK if qos == 1 else PUBREC
            answer = answers.ack(kind, packet.packet_id, NO_MATCHING_SUBSCRIBERS)
        self._acknowledge(batch, packet, places, known, answer)

    def refused(
        self, batch: Batch, packet: Publish, error: StreamBridgeError, *, stored: bool = True
    ) -> None:
        """Handle a refused message: keep it in `refused_stream`, answer with the reason, or close (3.1.1).

        `stored`: a stream takes its topic.
        """
        line, session = batch.inbox.line, batch.inbox.session
        assert session is not None
        forbidden = isinstance(error, Unauthorized) and not isinstance(error, Undecided)
        told = line.level == V5 and packet.qos > 0
        places: dict[Stream, int] | None = None
        try:
            have = having(session, packet) if packet.qos == 2 else frozenset()
            if not (forbidden and told):
                places = self._keep_refused(session.client_id, session.identity.label, packet, error, have)
        except StreamError as other:
            error = other  # if that stream is full, for example, the client will resend it
            forbidden = False
        if places is None and forbidden and packet.qos and not (told or stored) and line.drops_forbidden:
            self._counts["acknowledged_forbidden"] += 1
            text = "%s: a message is acknowledged and dropped: %s (counted in the metrics)"
            self._reports.log(f"forbidden {session.client_id}", logging.WARNING, text, line.name, error)
            places = {}
        if places is not None:
            batch.touched.update(dict.fromkeys(places))
            self._acknowledge(batch, packet, places, _NONE)
            return
        kind, reason = reason_of(error)
        if not packet.qos:
            self._counts[f"dropped_{kind}"] += 1
            self._reports.not_stored(line.name, kind, error)
        elif line.level == V5 and not isinstance(error, JournalFailed):
            self._counts[f"rejected_{kind}"] += 1
            self._reports.not_stored(line.name, kind, error)
            batch.acks += receipts.refused(line, packet, reason, str(error))
        else:
            batch.close = (f"rejected_{kind}", f"not acknowledged: {error}", reason)
            line.hold("rejected")

    def publish_will(self, session: Session, will: Publish) -> None:
        """Publish the will of a client that left without DISCONNECT (section 3.1.2.5)."""
        if will.topic.startswith(OURS.encode()):  # of a bridge; its client was let in with it
            return
        try:
            who = session.identity
            self.bring(session.client_id, who.label, who.holder, will, origin=session)
        except StreamError as error:
            self._counts["dropped_wills"] += 1
            self._reports.will_not_stored(session, error)
        else:
            self._counts["wills"] += 1

    def bring(
        self,
        client: str,
        label: str,
        holder: Holder,
        packet: Publish,
        *,
        origin: Session | None = None,
        joined: Joined | None = None,
        keep_copies: bool = False,
    ) -> Brought:
        """Publish a message that did not come over a connection: a will, or one from another broker.

        `client` is the publisher's client id, `label` its name in the log, and `holder` who a retained
        message counts for. `origin` is the publisher's session, for No Local. `joined`: where it came in, if
        it has a QoS 2 id of there. `keep_copies`: the journal keeps its copies for persistent sessions, also
        if it is in a stream. Raises StreamError, and then it is nowhere.
        """
        route = self._router.route(packet.topic)
        # Without `joined`, no QoS 2: a packet id in it is not one of the client's.
        plain = packet._replace(head=packet.head & (13 if joined is not None else 9))
        have = having(joined, plain) if joined is not None else frozenset()
        streams = [stream for stream in route.streams if stream.name not in have]
        full = self._router.retained.refusal(route.name, packet, holder) if packet.head & 1 else ""
        if route.stored_nowhere:
            self._note_unmatched(route, packet, client, label, holder)
        try:
            kept = _headers(client, plain, route)
            if len(streams) > 1:
                for stream in streams:
                    stream.ensure_admits(packet.topic, packet.payload, kept)
            if joined is not None:
                self._journal.search(streams, packet, kept)
            places = {stream: stream.append(packet.topic, packet.payload, kept) for stream in streams}
        except StreamError as error:
            refused = self._keep_refused(client, label, plain, error, have)
            if refused is None:
                raise
            return Brought(list(refused), refused, packet.topic)
        touched: list[Committer] = list(places)
        if QUEUES not in have:
            began = self._turns.begin()
            message = self._message(packet, {} if keep_copies else places)
            packet_id = packet.number if joined is not None else 0
            if full:
                self._not_retained(label, holder, full)
            retainer = None if full else holder
            if self._router.publish(
                route, message, joined or origin, packet_id, holder=retainer, keep_copies=keep_copies
            ):
                touched.append(self._journal)
            self._turns.spend(began)
        return Brought(touched, places, packet.topic, delivered=True)

    def _unmatched(self, session: Session, packet: Publish, route: Route) -> None:
        """No stream takes a message. Raises NoStream if its client's listener refuses that."""
        self._counts["without_stream"] += 1
        who = session.identity
        self._note_unmatched(route, packet, session.client_id, who.label, who.holder)
        if route.unwanted:
            raise NoStream(
                f"no stream takes messages on {route.name!r}, and `unmatched` of this listener is "
                '"refuse"; add the topic to a stream'
            )

    def _note_unmatched(self, route: Route, packet: Publish, client: str, label: str, holder: Holder) -> None:
        delivered = (route.delivers or bool(packet.head & 1)) and not route.unwanted
        note = self.unmatched.note
        route.unmatched = note(route.unmatched, route.name, client, label, holder, delivered=delivered)

    def _not_retained(self, label: str, holder: Holder, full: str) -> None:
        """A message is stored and delivered, but there is no room to retain it."""
        self._counts["not_retained"] += 1
        text = "%s: messages are processed, but not retained: %s (counted in the metrics; said once an hour)"
        self._reports.log(f"not_retained {holder}", logging.WARNING, text, label, full, every=HOUR)

    def _append(
        self, session: Session, packet: Publish, route: Route
    ) -> tuple[dict[Stream, int], AbstractSet[Stream]]:
        """Append a message to all of its streams or to none.

        Returns its number in each, and the streams that already have its message id. Raises StreamError, or
        InvalidRequest for the id.
        """
        kept, name, known = _headers(session.client_id, packet, route), b"", _NONE
        fresh = streams = _lacking(session, packet, route) if packet.qos == 2 else route.streams
        if packet.properties and (name := receipts.message_id(packet, session.identity)):
            known = frozenset(stream for stream in streams if stream.find(name) is not None)
            fresh = tuple(stream for stream in streams if stream not in known)
        if len(fresh) > 1:
            for stream in fresh:
                stream.ensure_admits(packet.topic, packet.payload, kept, name)  # it would be resent to all
        if packet.qos == 2:
            self._journal.search(fresh, packet, kept)
        return {stream: stream.append(packet.topic, packet.payload, kept, name) for stream in streams}, known

    def _message(self, packet: Publish, places: dict[Stream, int]) -> Message:
        expires = expiry_of(packet.properties, self._clock)
        retain, place = bool(packet.head & 1), None
        for stream, number in places.items():
            place = (stream.name, number)
            break
        return Message(packet.topic, packet.payload, packet.qos, retain, packet.properties, expires, place)

    def _acknowledge(
        self,
        batch: Batch,
        packet: Publish,
        places: dict[Stream, int],
        known: AbstractSet[Stream],
        answer: bytes = b"",
    ) -> None:
        """Answer a PUBLISH once everything that its batch touches is committed.

        `places` are its numbers; those in `known` belong to an earlier PUBLISH with its message id.
        """
        qos, line = packet.head & 6, batch.inbox.line  # 2 stands for QoS 1, 4 for QoS 2
        if answer:
            batch.acks += answer
        elif qos and line.receipts:
            batch.acks += receipts.stored(line, packet, places, known)
        elif qos:
            batch.acks += (b"\x40\x02" if qos == 2 else b"\x50\x02") + packet.packet_id
        if qos == 4:
            session = batch.inbox.session
            assert session is not None
            session.take_ids((packet.number,))
            if not places and session.persistent:
                # No stream has the message, so the journal need not wait for a commit.
                batch.use_id_alone(self._journal, packet.number)
                return
            new = {stream: place for stream, place in places.items() if stream not in known}
            batch.use_id(self._journal, packet, new)

    def _keep_refused(
        self,
        client: str,
        label: str,
        packet: Publish,
        error: StreamBridgeError,
        have: AbstractSet[str] = frozenset(),
    ) -> dict[Stream, int] | None:
        """Store a message in `refused_stream` and return its place; None without one, or if not needed.

        `have` has the streams that stored it in an earlier attempt. Raises the StreamError of that stream,
        except MessageTooLarge, which counts as no such stream.
        """
        name = self.refused_stream
        if name is None or name not in self._store.definitions:
            return None
        if not isinstance(error, PERMANENT) or isinstance(error, Undecided):
            return None
        if name in have:
            return {}
        number = packet.number if packet.qos == 2 else 0
        kind = reason_of(error)[0]
        why = f"{kind}: {error}"[:LONGEST_REASON]
        kept = headers_of(packet.head, packet.properties or {}, client, number, why)
        stream = self._store.stream(name)
        try:
            stream.ensure_admits(packet.topic, packet.payload, kept)
        except MessageTooLarge:
            return None
        if number:
            self._journal.search((stream,), packet, kept)
        place = stream.append(packet.topic, packet.payload, kept)
        self._counts[f"kept_{kind}"] += 1
        text = "%s: a message is kept in stream %r, its own can never store it: %s (counted in the metrics)"
        self._reports.log(f"kept_{kind} {client}", logging.WARNING, text, label, name, error)
        return {stream: place}


def _lacking(session: Session, packet: Publish, route: Route) -> tuple[Stream, ...]:
    """Return the streams that still need a QoS 2 message, without those that stored an earlier attempt."""
    have = having(session, packet)
    return tuple(stream for stream in route.streams if stream.name not in have)


def having(session: Session, packet: Publish) -> frozenset[str]:
    """Return the streams that stored a QoS 2 message in an earlier attempt."""
    found = session.partial.get(packet.number)
    if found is None:
        return frozenset()
    if not packet.head & 8:
        del session.partial[packet.number]  # a new message has the id
        return frozenset()
    return found.streams(digest_of(packet.topic, packet.payload))


def _headers(client: str, packet: Publish, route: Route) -> bytes:
    with_client = route.with_client or packet.qos == 2
    if not packet.properties and not with_client:
        flags = packet.head & 9
        if not flags:
            return b""
        if flags == 1:
            return headers.RETAIN
        if flags == 8:
            return headers.DUP
    return headers_of(packet.head, packet.properties or {}, client if with_client else "", packet.number)
