"""One client's connection: bytes to packets, packets to the broker, its answers to bytes.

The states and what changes them are the table in `states.py`. The transport may be TCP, TLS or a WebSocket.

What it promises:
* Nothing of a client is looked at before CONNACK 0; what it sent behind its CONNECT waits.
* Every read from the socket makes one `Batch`; what a packet is answered with leaves by it (`broker.inbox`).
* A malformed packet closes this connection and no other.
* Reading is paused while there is a reason to (`hold`), so that nothing here grows without bound.

The hot path (`_packets`) makes no task, no log line and no system call per message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING, Any, cast

from bridge.audit import Origin, record
from bridge.errors import StreamError
from bridge.mqtt.broker.inbox import Batch, Inbox
from bridge.mqtt.broker.outbox import NO_LIMIT
from bridge.mqtt.broker.turns import MANY
from bridge.mqtt.server import handshake
from bridge.mqtt.server.asking import Asking
from bridge.mqtt.server.states import CLOSED, NEW, NEXT, OPEN, TRANSITIONS, Event, State
from bridge.mqtt.wire import answers
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import (
    AUTH,
    BAD_TOPIC_ALIAS,
    BAD_TOPIC_NAME,
    CONNACK,
    CONNECT,
    DISCONNECT,
    KEEP_ALIVE_TIMEOUT,
    MALFORMED,
    MAX_CONNECT,
    MAXIMUM_CONNECT_TIME,
    MESSAGE_RATE_TOO_HIGH,
    MOST_FILTERS,
    PACKET_TOO_LARGE,
    PINGREQ,
    PINGRESP,
    PROTOCOL_ERROR,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    QUOTA_EXCEEDED,
    SUBACK,
    SUCCESS,
    UNSUBACK,
    V5,
    V31,
    V311,
    ProtocolError,
    Publish,
    frame,
    parse_ack,
    parse_disconnect,
    parse_subscribe,
    parse_unsubscribe,
    properties_at,
    text,
)
from bridge.net.addresses import is_loopback
from bridge.net.budgets import BURST, PAUSE, Budget, Meter, Refusal
from bridge.net.flow import Flow
from bridge.topics import is_topic_name, unshared

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.mqtt.broker.router import Route
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.broker.store import Committer
    from bridge.mqtt.server.connections import Connections, Endpoint
    from bridge.runtime import Timer

log = logging.getLogger(__name__)

LINGER = 1.0  # seconds for the last bytes to go out
ROUTES = 4_096  # topics that one connection remembers,
USUAL_TOPIC = 128  # if they have no more bytes: longer ones cost their look-up each time
ANY = 1 << 60  # messages, where no budget limits them
OWN = "connection"  # the budget of one connection: `messages_per_second` of its listener
LOOK_AGAIN = 60.0  # seconds; how late the end of a login may be noticed after the clock was set
REFUSED = 5  # small packets take as long as a PUBLISH that is refused, or is more than one append
EXPENSIVE = 0x80  # SUBSCRIBE and UNSUBSCRIBE, with the bits in which they differ masked by 0xD0


class Connection(Flow):
    """The server's side of one MQTT connection; the broker sees it as a `Line`."""

    __slots__ = (
        "_connect_size", "_expiry", "_need", "_prepaid", "_slow", "address", "address_meters",
        "aliases", "asking", "awaited", "bridge", "broker", "claimed", "connections", "endpoint", "epoch",
        "expires", "explains", "heard", "inbox", "keep_alive", "level", "limit", "max_packet_out",
        "meters", "proxied", "published", "reads", "reason", "receipts", "receive_maximum", "requests",
        "routes", "since", "state", "subscribed", "tail", "traffic", "user_meters", "who", "writable",
    )  # fmt: skip

    def __init__(self, connections: Connections, endpoint: Endpoint) -> None:
        super().__init__()
        self.connections, self.broker, self.endpoint = connections, connections.broker, endpoint
        self.traffic = connections.traffic
        self.reads = connections.reads
        self.inbox = Inbox(self, self.broker.journal)
        self.state: State = NEW
        self.level = V311
        self.proxied = False  # its address is what a proxy said
        self.claimed: tuple[str, str | None] = ("", None)  # client id and user name of its CONNECT
        self.bridge = False  # the client is another broker
        self.limit = MAX_CONNECT  # bytes of a packet, until the client is known
        self.awaited = "CONNECT"  # what must be complete in time
        self.writable = True
        self.receive_maximum = self.max_packet_out = NO_LIMIT
        self.explains = self.receipts = False
        self.keep_alive = 0.0  # seconds of silence until the connection counts as lost; 0: never
        self.reason = 0  # why it was closed, a reason code
        self.aliases: dict[int, bytes] = {}
        self.requests = 0  # being answered
        self.since = 0  # when it logged in, Unix time in ms
        self.published = 0  # messages that it has sent
        # What plugins say about its topics; None: they are not asked.
        self.asking = Asking(self, connections) if connections.auth.authorizes else None
        self.who: tuple[str, str | None] = ("", None)  # client id and user, once they are proved
        self.expires = 0.0  # when what it has logged in with expires, Unix time in seconds; 0: never
        self._expiry: Timer | None = None
        self.tail: bytes | bytearray = b""  # read, not yet handled
        self._need = 2  # bytes that make the next packet complete
        self._connect_size = 0  # bytes of its CONNECT while the login waits
        self.routes: dict[bytes, Route] = {}
        self.epoch = -1
        self.address_meters: tuple[Meter[Any], ...] = ()
        self.user_meters: tuple[Meter[Any], ...] = ()
        self.subscribed = 0  # topic filters, as its meters count them
        self.meters: tuple[Meter[Any], ...] = ()  # those of the above that have a rate, and its own
        self._prepaid = 0  # bytes of what is not handled yet
        self._slow: Timer | None = None  # until it is read on

    @property
    def session(self) -> Session | None:
        """The client's session; None until it has logged in."""
        return self.inbox.session

    @property
    def name(self) -> str:
        """What the log calls the client."""
        session = self.inbox.session
        client = f"{session.identity.label} at " if session is not None else ""
        return f"{client}{self.address}"

    @property
    def slowed(self) -> bool:
        """Whether it, or those with whom it shares a budget, are over the budget."""
        now = self.connections.runtime.now()
        return any(meter.over is not None and meter.paid > now for meter in self.meters)

    @property
    def local(self) -> bool:
        """Whether the client is on this machine; a proxy may say so of a client of its own machine."""
        return is_loopback(self.address) and not self.proxied

    @property
    def gone(self) -> bool:
        """Whether it is closed, or is being closed."""
        return self.state is CLOSED or self.transport.is_closing()

    # -- the transport calls ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) else "local"
        runtime = self.connections.runtime
        self.heard = runtime.now()
        self._timer = self._in_time()
        self.connections.accept(self)

    def data_received(self, data: bytes) -> None:
        self.reads.add(self, data)

    def read(self, data: bytes) -> None:
        """Handle what was read from the socket, behind what waits for its rest."""
        if self.state is CLOSED:
            return
        if self.tail:
            if not isinstance(self.tail, bytearray):
                self.tail = bytearray(self.tail)
            self.tail += data  # linear, in however many pieces a big packet arrives
            if len(self.tail) < self._need or self.holds:
                if self.meters:
                    self._prepay()
                if self.state is not OPEN:
                    self._wait()
                return
            data, self.tail = bytes(self.tail), b""
        self._work(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.reads.run()  # what it has sent before
        self._close(Event.LOST)
        self._timer.cancel()
        if self._slow is not None:
            self._slow.cancel()
        self.connections.gone(self)

    def pause_writing(self) -> None:
        self.writable = False
        super().pause_writing()  # a client that does not read its acknowledgements need not send more

    def resume_writing(self) -> None:
        self.writable = True
        if self.session is not None and self.state is OPEN:
            self.session.outbox.pump()
        if self.writable:
            super().resume_writing()

    # -- for the broker and the server ------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Write a packet to the client, unless the connection is closed or closing."""
        if self.state is not CLOSED and not self.transport.is_closing():
            self.traffic.count_sent(len(data))
            self.transport.write(data)

    def acknowledge(self, acks: bytes | bytearray) -> None:
        """Write acknowledgements to the client, unless the connection is closed or closing."""
        if self.state is not CLOSED and not self.transport.is_closing():
            self.traffic.acknowledged_bytes += len(acks)
            self.transport.write(acks)

    def answer(self, data: bytes) -> None:
        """Send an answer of a length that the client determines; close if it does not take that much.

        MQTT 5 section 3.1.2.11.4: the client must not be sent more than its Maximum Packet Size, and without
        this answer it could not go on.
        """
        if len(data) <= self.max_packet_out:
            self.send(data)
        else:
            why = f"an answer of {len(data)} bytes, above its Maximum Packet Size of {self.max_packet_out}"
            self.fail("refused_packet_size", why, PACKET_TOO_LARGE)

    @property
    def most_filters(self) -> int:
        """How many topic filters a packet may have. Those of one packet are looked at in one go."""
        return max(MOST_FILTERS, self.endpoint.listener.limits.subscriptions)

    def full_of_subscriptions(self, count: int) -> Refusal | None:
        """Why it may have no more than its `count` topic filters; None if it may."""
        if count >= self.endpoint.listener.limits.subscriptions:
            why = f"it has {count} already; see [mqtt.limits] subscriptions"
            return Refusal("refused_subscriptions", why)
        more = count - self.subscribed
        for meter in (*self.address_meters, *self.user_meters):
            most = meter.budget.subscriptions
            if most is not None and meter.subscriptions + more >= most:
                return meter.refusal(meter.subscriptions + more, most, "subscriptions")
        return None

    def metered(self) -> None:
        """It has logged in, or there are other budgets: count what it has in its meters."""
        limit = self.endpoint.listener.limits.messages_per_second
        shared = (*self.address_meters, *self.user_meters)
        self.meters = tuple(meter for meter in shared if meter.has_rate)
        if limit:
            own = Budget(name=OWN, per="address", messages_per_second=limit, disconnect_after=0)
            self.meters += (Meter(own, ""),)
        self.subscribed = 0
        self._count_subscriptions()

    def _count_subscriptions(self) -> None:
        session = self.inbox.session
        more = (0 if session is None else len(session.subscriptions)) - self.subscribed
        if more:
            self.subscribed += more
            for meter in (*self.address_meters, *self.user_meters):
                meter.subscriptions += more

    def await_connect(self) -> None:
        """The TLS handshake is over: a CONNECT may take as long as that."""
        self.awaited = "CONNECT"
        self._timer.cancel()
        self._timer = self._in_time()

    def _in_time(self) -> Timer:
        limits = self.endpoint.listener.limits
        return self.connections.runtime.later(limits.connect_timeout / 1000, self._too_slow)

    def proceed(self) -> None:
        data, self.tail = bytes(self.tail), b""
        if data:
            self._work(data)

    def wait_with(self, size: int) -> None:
        """Its login waits, and needs so many bytes beside what the client has sent behind it."""
        self._connect_size = size
        self._wait()

    def listen_for_end(self, yes: bool) -> None:
        """Read on, though nothing is handled, to notice when the client goes before its answer comes."""
        if self.state is CLOSED or self.transport.is_closing():
            return
        if yes:
            self.transport.resume_reading()
        elif self.holds:
            self.transport.pause_reading()

    def _wait(self) -> None:
        """Before it is logged in, what it has sent counts against a budget for all such clients."""
        self.connections.guests.keep(self, self.address, self._connect_size + len(self.tail))
        if len(self.tail) > MAX_CONNECT and self.holds:
            self.transport.pause_reading()

    def opened(self) -> None:
        """The client has its session: handle what it has sent behind its CONNECT."""
        self.connections.guests.leave(self, self.address)
        self.state = NEXT[self.state, Event.ACCEPTED]
        self.since = round(self.broker.clock.wall())
        self.metered()
        self.limit = self.connections.config.max_packet
        self._timer.cancel()
        if self.keep_alive:
            self._watch()
        if self.expires:
            self._watch_expiry()
        self.connections.runtime.soon(self.release, "connect")

    def refuse(self, reason: int, why: str, counter: str = "refused_connects") -> None:
        """Answer a CONNECT with a reason code, and close."""
        answer = answers.connack(self.level, reason)
        if len(answer) <= self.max_packet_out:
            self.send(answer)
        client, user = self.claimed
        origin = Origin("mqtt", self.address)
        record("login", "refused", origin=origin, user=user, client=client, proven=False, why=why)
        self._close(Event.REFUSED, counter, f"refused: {why}", linger=True)

    def fail(self, counter: str, why: str, reason: int, told: str = "") -> None:
        """Close, after a DISCONNECT with the reason for an MQTT 5 client, and `told` if it takes that."""
        self.reason = reason
        if self.level == V5 and self.state is OPEN:
            properties: p.Properties = {p.REASON_STRING: told.encode()} if told and self.explains else {}
            for answer in (answers.disconnect(reason, properties), answers.disconnect(reason)):
                if len(answer) <= self.max_packet_out:
                    self.send(answer)
                    break
        self._close(Event.FAILED, counter, why, linger=True)

    def end(self, counter: str, why: str, *, abort: bool = False) -> None:
        """Close without a word to the client; with `abort`, also without what was written."""
        self._close(Event.FAILED, counter, why)
        if abort:
            self.transport.abort()

    def _close(
        self,
        on: int | Event,
        counter: str = "",
        why: str = "",
        *,
        will: bool = True,
        linger: bool = False,
    ) -> None:
        """Close the connection; `counter` counts the reason, `why` goes to the log.

        With `linger` it ends with FIN, so that the peer gets our last packets.
        """
        if self.state is CLOSED:
            return
        if counter:
            self.broker.reports.closed(self.name, counter, why)
        self.state = NEXT[self.state, on]
        self._timer.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        if self.asking is not None:
            self.asking.stop()
        self.tail = b""
        self.routes = {}
        self.connections.left(self)
        self.broker.close(self.inbox, will=will)
        transport = self.transport
        if not self.writable:
            transport.abort()
        elif linger and not transport.is_closing() and transport.can_write_eof():
            self.finish(LINGER)
        else:
            transport.close()
            if transport.get_write_buffer_size():
                # What has been written still goes out, but a peer that does not take it is not waited for.
                self._timer = self.connections.runtime.later(LINGER, transport.abort)

    # -- packets ------------------------------------------------------------

    def _work(self, data: bytes) -> None:
        try:
            used = self._packets(data)
        except ProtocolError as error:
            self.fail("protocol_errors", str(error), error.reason)
        except (IndexError, ValueError) as error:
            # Every check should have come first; that one did not is no reason to trust the peer.
            self.fail("protocol_errors", repr(error), MALFORMED)
        else:
            if used < len(data) and self.state is not CLOSED:
                self.tail = data[used:] if used else data
                if self.meters:
                    self._prepay()
                if self.state is not OPEN:
                    self._wait()

    def _packets(self, d: bytes) -> int:
        """Handle the whole packets in `d`; return how many bytes that used."""
        shared, broker, state = self.connections, self.broker, self.state
        size, pos, published, small = len(d), 0, 0, 0
        most = self._messages_left() if self.meters else size
        router, turns = broker.router, broker.turns
        if self.epoch != router.epoch or len(self.routes) > ROUTES:
            self.routes, self.epoch = {}, router.epoch
        routes, limit, v5 = self.routes, self.limit, self.level == V5
        two_bytes = limit > 0x3FFF  # then a length of two bytes cannot be above it
        batch = Batch(self.inbox)
        acks, touched = batch.acks, batch.touched
        last: Committer | None = None
        self._need = 2
        if state is NEW and size and d[0] != CONNECT:
            raise ProtocolError("the first packet is not a CONNECT (MQTT-3.1.0-1)")
        try:
            while size - pos >= 2 and not self.holds and published < most:
                head = d[pos]
                if (length := d[pos + 1]) < 0x80:
                    body = pos + 2
                    end = body + length
                elif two_bytes and size - pos > 2 and (more := d[pos + 2]) < 0x80:
                    body = pos + 3
                    end = body + (length & 0x7F | more << 7)
                else:
                    body, end = frame(d, pos, limit)
                if end > size:
                    self._need = end - pos
                    break
                if head & 0xF0 == PUBLISH and state is OPEN:
                    if shared.under_pressure:
                        # Only publishers wait: what others acknowledge makes room.
                        self.hold("pressure")
                        break
                    at = body + 2
                    if at > end:
                        raise ProtocolError("a PUBLISH without a topic")
                    at += d[body] << 8 | d[body + 1]
                    topic, qos = d[body + 2 : at], head & 6
                    if qos:
                        packet_id = d[at : at + 2]
                        at += 2
                        if packet_id == b"\0\0" or qos == 6:
                            raise ProtocolError(f"a PUBLISH of QoS {qos >> 1} with packet id {packet_id!r}")
                    else:
                        packet_id = b""
                    if at > end:
                        raise ProtocolError("a PUBLISH that is shorter than its topic and packet id")
                    if v5:
                        if at >= end:
                            raise ProtocolError("a PUBLISH without properties")
                        if d[at] or not topic:
                            if turns.over:
                                turns.wait(self)
                                break
                            if not self._publish_v5(batch, head, topic, packet_id, d, at, end):
                                break
                            published += 1
                            last = None
                            pos = end
                            small += REFUSED
                            if small >= MANY:
                                small = 0
                                turns.many(self)
                            continue
                        at += 1
                    route = routes.get(topic)
                    if route is None:
                        if turns.over:
                            turns.wait(self)
                            break
                        if (route := self._route(topic)) is None:
                            break
                        append = route.append
                    elif (append := route.append) is None and route.delivers and turns.over:
                        turns.wait(self)
                        break
                    published += 1
                    if append is None or head & 0x0D:
                        broker.publish(batch, Publish(head, topic, packet_id, d[at:end]), route)
                        last = None
                        if not route.delivers:  # else it is timed
                            small += REFUSED
                            if small >= MANY:
                                small = 0
                                turns.many(self)
                    else:
                        try:
                            append(topic, d[at:end])
                        except StreamError as error:
                            broker.refused(batch, Publish(head, topic, packet_id, d[at:end]), error)
                        else:
                            if (stream := route.stream) is not last:
                                touched[stream] = None  # type: ignore[index]
                                last = stream
                            if qos:
                                acks += b"\x40\x02"
                                acks += packet_id
                elif state is OPEN and head & 0xD0 == EXPENSIVE and turns.over:
                    turns.wait(self)
                    break
                else:
                    self.traffic.others += 1
                    self.traffic.other_bytes += end - pos
                    pos = end  # it counts as received, whatever becomes of it
                    if state is OPEN:
                        self._handle(batch, head, d[body:end])
                        if self.state is CLOSED:
                            return size
                        small += 1
                        if small >= MANY:
                            small = 0
                            turns.many(self)
                    else:
                        self.traffic.connects += 1
                        self.state = state = NEXT[state, CONNECT]
                        self.hold("connect")
                        self._connect(d[body:end])
                pos = end
        finally:
            self.published += published
            traffic = self.traffic
            traffic.published += published
            traffic.received_bytes += pos
            self.inbox.put(batch)
            if self.meters:
                size, self._prepaid = max(pos - self._prepaid, 0), max(self._prepaid - pos, 0)
                self.pay(published, size)
        return pos

    def _route(self, topic: bytes) -> Route | None:
        """The route of a topic for this client, looked up once; None while plugins are asked about it."""
        session = self.inbox.session
        assert session is not None
        route = self.broker.route(session, topic)
        if self.asking is not None and not route.denied and not route.ignored:
            allowed = self.asking.may("publish", route.name)
            if allowed is None:
                self.asking.ask("publish", [route.name])
                return None
            if not allowed:
                route = self.broker.denied(session, route, "a plugin refuses it")
                if not self.asking.holds("publish", route.name):
                    return route
        if len(topic) <= USUAL_TOPIC:
            self.routes[topic] = route
        return route

    def forget_routes(self) -> None:
        """Look up all routes again."""
        self.epoch = -1

    def ask_again(self) -> None:
        """Forget what plugins have said: others may be asked now, or none."""
        if self.asking is not None:
            self.asking.stop()
        self.asking = Asking(self, self.connections) if self.connections.auth.authorizes else None
        self.forget_routes()

    def _publish_v5(
        self, batch: Batch, head: int, topic: bytes, packet_id: bytes, data: bytes, pos: int, end: int
    ) -> bool:
        """Handle a PUBLISH with properties or without a topic (MQTT 5 section 3.3.2.3).

        Returns whether it is handled; it comes again when plugins have said whether it is allowed.
        """
        properties, pos = properties_at(data, pos, end, PUBLISH)
        if p.SUBSCRIPTION_ID in properties:
            raise ProtocolError("a Subscription Identifier from a client (MQTT-3.3.4-6)", PROTOCOL_ERROR)
        alias = properties.pop(p.TOPIC_ALIAS, None)
        if alias is not None:
            if not 0 < alias <= handshake.TOPIC_ALIASES:
                raise ProtocolError(
                    f"topic alias {alias}; 1 to {handshake.TOPIC_ALIASES} are announced", BAD_TOPIC_ALIAS
                )
            if topic:
                self.aliases[alias] = topic
            else:
                topic = self.aliases.get(alias, b"")
        if not topic:
            raise ProtocolError("a PUBLISH without topic and known alias", PROTOCOL_ERROR)
        reply = properties.get(p.RESPONSE_TOPIC)
        if reply is not None and not is_topic_name(text(reply)):
            raise ProtocolError(f"response topic {reply[:80]!r}", BAD_TOPIC_NAME)
        if (route := self._route(topic)) is None:
            return False
        packet = Publish(head, topic, packet_id, data[pos:end], properties)
        self.broker.publish(batch, packet, route)
        return True

    # -- every other packet ------------------------------------------------------------

    def _connect(self, body: bytes) -> None:
        handshake.begin(self, body)

    def _handle(self, batch: Batch, head: int, body: bytes) -> None:
        """Handle one packet by the table; anything that it does not have is an error (MQTT-2.2.2-2)."""
        if self.level == V31 and head in (0x6A, 0x8A, 0xAA):
            head &= 0xF7  # in MQTT 3.1 PUBREL, SUBSCRIBE and UNSUBSCRIBE may have DUP
        handler = _HANDLERS.get(head)
        if handler is None:
            # With flags that its type does not have, a packet is malformed (MQTT 5 section 2.1.3).
            known = head in (CONNECT, CONNACK, SUBACK, UNSUBACK, PINGRESP, AUTH)
            raise _not_allowed(head, body, PROTOCOL_ERROR if known else MALFORMED)
        handler(self, self.inbox.session, batch, body)

    def _puback(self, session: Session, _batch: Batch, body: bytes) -> None:
        session.outbox.puback(parse_ack(PUBACK, body, self.level)[0])
        self._nothing_to_send(session)

    def _pubrec(self, session: Session, _batch: Batch, body: bytes) -> None:
        session.outbox.pubrec(*parse_ack(PUBREC, body, self.level))

    def _pubrel(self, _session: Session, batch: Batch, body: bytes) -> None:
        self.broker.released(batch, parse_ack(PUBREL, body, self.level)[0])

    def _pubcomp(self, session: Session, _batch: Batch, body: bytes) -> None:
        session.outbox.pubcomp(parse_ack(PUBCOMP, body, self.level)[0])
        self._nothing_to_send(session)

    def _subscribe(self, _session: Session, _batch: Batch, body: bytes) -> None:
        packet_id, requests, properties = parse_subscribe(body, self.level, self.most_filters)

        def answer(codes: bytes) -> None:
            self.answer(answers.suback(self.level, packet_id, codes))

        def subscribe() -> None:
            denied = {
                topics for topics in wanted if asking is not None and not asking.may("subscribe", topics)
            }
            identifier = properties.get(p.SUBSCRIPTION_ID, 0)
            self.broker.subscribe(self.inbox, requests, identifier, answer, denied)
            self._count_subscriptions()

        asking = self.asking
        wanted = [unshared(request.filter) for request in requests]
        if asking is not None and any(asking.may("subscribe", topics) is None for topics in wanted):
            asking.ask("subscribe", wanted, subscribe)
        else:
            subscribe()

    def _unsubscribe(self, session: Session, _batch: Batch, body: bytes) -> None:
        packet_id, filters = parse_unsubscribe(body, self.level, self.most_filters)
        codes = self.broker.unsubscribe(session, filters)
        self._count_subscriptions()
        self.answer(answers.unsuback(self.level, packet_id, codes))

    def _pingreq(self, _session: Session, _batch: Batch, body: bytes) -> None:
        if body:
            raise _not_allowed(PINGREQ, body, MALFORMED)
        self.send(bytes((PINGRESP, 0)))

    def _disconnect(self, session: Session, _batch: Batch, body: bytes) -> None:
        reason, properties = parse_disconnect(body, self.level)
        expiry = properties.get(p.SESSION_EXPIRY)
        if expiry is not None:
            if expiry and not session.expiry:
                raise ProtocolError("a session expiry that was 0 at CONNECT (MQTT-3.1.2-23)", PROTOCOL_ERROR)
            self.broker.set_expiry(session, expiry)
        self._close(DISCONNECT, will=reason != SUCCESS)  # (MQTT 5 section 3.14.4-3)

    def _nothing_to_send(self, session: Session) -> None:
        """The client has acknowledged the last message: let its socket know that we got that.

        The kernel waits 40 ms for data of ours to go along with the TCP acknowledgement, and a client without
        TCP_NODELAY keeps its next small packet back for as long (Nagle's algorithm).
        """
        if len(session.outbox) or self.transport.is_closing():
            return
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # the peer may have gone this very moment
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def _prepay(self) -> None:
        """Pay for the bytes of packets that are not complete, or that wait."""
        size = len(self.tail) - self._prepaid
        if size > 0:
            self._prepaid += size
            self.pay(0, size)

    def _messages_left(self) -> int:
        """How many messages to handle until a budget is used up: `pay` then holds the connection."""
        now = self.connections.runtime.now()
        return min((n for meter in self.meters if (n := meter.messages_left(now)) is not None), default=ANY)

    def pay(self, messages: int, size: int) -> None:
        """Pay for what was read; read no further as long as a budget is exceeded, or end who exceeds it."""
        now, longest = self.connections.runtime.now(), 0.0
        for meter in self.meters:
            wait = meter.pay(self, messages, size, now)
            if wait > 0 and meter.key:
                self._exceeds(meter)
            longest = max(longest, wait)
        if longest > 0:
            self._pause(now + longest + PAUSE)

    def _exceeds(self, meter: Meter[Any]) -> None:
        """A budget is exceeded: report it."""
        name, limit = meter.budget.name, "bytes" if meter.bytes_went_over else "messages"
        self.broker.counts[f"slowed_{name}"] += 1
        if self.connections.budgets.is_news(meter):
            text = "%s is read more slowly: %s %r is over %s_per_second of [[mqtt.budget]] %s (logged once)"
            log.warning(text, self.name, meter.budget.per, meter.key, limit, name)

    def _pause(self, until: float) -> None:
        """Read no further until then; meanwhile end who exceeds a budget for too long."""
        runtime = self.connections.runtime
        now = runtime.now()
        for meter in self.meters:
            if (noisy := meter.must_go(now)) is not None:
                name, limit = meter.budget.name, "bytes" if meter.bytes_went_over else "messages"
                reason = QUOTA_EXCEEDED if meter.bytes_went_over else MESSAGE_RATE_TOO_HIGH
                why = f"over {limit}_per_second of [[mqtt.budget]] {name} for too long"
                runtime.soon(noisy.fail, meter.budget.counter, why, reason)
        # Another connection may have been ended, with what it owed; or a reload has changed the budgets.
        until = min(until, max((meter.paid for meter in self.meters), default=0.0) - BURST + PAUSE)
        if self._slow is not None:
            self._slow.cancel()
        if self.state is not OPEN:
            return
        if until <= now:
            self.release("rate")
            return
        self.hold("rate")
        due = min(until, *(meter.ends(now) for meter in self.meters))
        self._slow = runtime.later(due - now, self._pause, until)

    # -- time ------------------------------------------------------------

    def _too_slow(self) -> None:
        self.end("refused_timeout", f"no complete {self.awaited} in time", abort=True)

    def _watch_expiry(self) -> None:
        """End the connection when its credentials expire. The wall clock may be set, so look often."""
        left = self.expires - self.broker.clock.wall() / 1000
        if left > 0:
            wait = min(left, LOOK_AGAIN)
            self._expiry = self.connections.runtime.later(wait, self._watch_expiry)
        else:
            self.fail("expired_logins", "what it has logged in with has expired", MAXIMUM_CONNECT_TIME)

    def _watch(self) -> None:
        """Enforce the keep-alive (3.1.1 section 3.1.2.10): silent for 1.5 times as long is lost."""
        left = self.heard + self.keep_alive - self.connections.runtime.now()
        if self.holds:
            left = self.keep_alive  # we do not read, so silence means nothing
        if left > 0:
            self._timer = self.connections.runtime.later(left, self._watch)
        else:
            self.fail("keep_alive_timeouts", "keep-alive expired", KEEP_ALIVE_TIMEOUT)
            self.transport.abort()


# PUBLISH is not among them: `_packets` handles it itself.
_HANDLERS: dict[int | Event, Callable[[Connection, Any, Batch, bytes], None]] = {
    row.on: getattr(Connection, row.handler)
    for row in TRANSITIONS
    if row.state is OPEN and row.handler not in ("", "_packets")
}


def _not_allowed(head: int, body: bytes, reason: int) -> ProtocolError:
    return ProtocolError(f"a packet that no client may send: {head:#04x}, {len(body)} bytes", reason)
