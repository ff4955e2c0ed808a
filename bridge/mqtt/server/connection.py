"""One client's connection: bytes in, packets to the broker, its answers out.

`states.py` has the table of its states. The transport may be TCP, TLS or a WebSocket.

What it promises:
* No packet behind a CONNECT is looked at before CONNACK 0. Until then it waits.
* Each read from the socket makes one `Batch`, which collects the answers to its packets (`broker.inbox`).
* A malformed packet closes this connection and no other.
* Reading stops while any reason to wait is left (`hold`), so nothing here grows without bound.

The hot path (`_packets`) makes no task, no log line and no system call per message. `control.py` handles the
packets other than PUBLISH.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING, cast

from bridge.audit import Origin, record
from bridge.errors import StreamError
from bridge.mqtt.broker.inbox import Batch, Inbox
from bridge.mqtt.broker.outbox import NO_LIMIT
from bridge.mqtt.server import control, handshake
from bridge.mqtt.server.asking import Asking
from bridge.mqtt.server.metering import Metering
from bridge.mqtt.server.reads import Source
from bridge.mqtt.server.states import CLOSED, NEW, NEXT, OPEN, Event, State
from bridge.mqtt.wire import answers
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import (
    BAD_TOPIC_ALIAS,
    BAD_TOPIC_NAME,
    CONNECT,
    DISCONNECT,
    KEEP_ALIVE_TIMEOUT,
    MALFORMED,
    MAX_CONNECT,
    MAXIMUM_CONNECT_TIME,
    MOST_FILTERS,
    PACKET_TOO_LARGE,
    PROTOCOL_ERROR,
    PUBLISH,
    V5,
    V311,
    ProtocolError,
    Publish,
    frame,
    properties_at,
    text,
)
from bridge.net.addresses import is_loopback, network_of, peer_of
from bridge.net.budgets import Refusal
from bridge.net.turns import MANY
from bridge.topics import is_topic_name

if TYPE_CHECKING:
    from bridge.mqtt.broker.router import Route
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.broker.store import Committer
    from bridge.mqtt.server.connections import Connections, Endpoint
    from bridge.net.turns import Who
    from bridge.runtime import Timer

log = logging.getLogger(__name__)

# Seconds to send the last bytes to a client that goes on sending: it may have thousands of our packets to
# read before it sees why we have closed.
LINGER = 10.0
ROUTES = 4_096  # topics whose routes a connection remembers
USUAL_TOPIC = 128  # bytes; longer topics are not remembered
LOOK_AGAIN = 60.0  # seconds; how late an expired login may be noticed after the clock was set
REFUSED = 5  # a PUBLISH that is refused, or that takes more than one append, costs as much as 5 small packets
REQUEST = 0x80  # SUBSCRIBE, UNSUBSCRIBE and PINGREQ: the client decides how many, as with PUBLISH
EXPENSIVE = 0x80  # SUBSCRIBE and UNSUBSCRIBE, with the bits in which they differ masked by 0xD0


class Connection(Source):
    """The server's side of one MQTT connection; the broker sees it as a `Line`."""

    __slots__ = (
        "_connect_size", "_expiry", "_need", "address", "aliases", "asking", "awaited", "bridge",
        "broker", "claimed", "connections", "endpoint", "expires", "explains", "keep_alive",
        "max_packet_out", "proxied", "reason", "receipts", "receive_maximum", "requests",
        "since", "who", "writable",
    )  # fmt: skip

    def __init__(self, connections: Connections, endpoint: Endpoint) -> None:
        super().__init__()
        self.connections, self.broker, self.endpoint = connections, connections.broker, endpoint
        self.traffic = connections.traffic
        self.reads = connections.reads
        self.inbox = Inbox(self, self.broker.journal)
        self.state: State = NEW
        self.level = V311
        self.proxied = False  # a proxy has named its address
        self.claimed: tuple[str, str | None] = ("", None)  # client id and user name of its CONNECT
        self.bridge = False  # the client is another broker
        self.limit = MAX_CONNECT  # bytes of a packet; more after the login
        self.awaited = "CONNECT"  # what must come in time
        self.writable = True
        self.receive_maximum = self.max_packet_out = NO_LIMIT
        self.explains = self.receipts = False
        self.keep_alive = 0.0  # seconds of silence after which the connection counts as lost; 0: never
        self.reason = 0  # reason code with which it was closed
        self.aliases: dict[int, bytes] = {}
        self.requests = 0  # requests in progress
        self.since = 0  # when it logged in, Unix time in ms
        self.published = 0  # messages that the client has sent
        # The decisions of plugins about its topics; None: no plugin decides.
        self.asking = Asking(self, connections) if connections.auth.authorizes else None
        self.who: tuple[str, str | None] = ("", None)  # client id and user, once proved
        self.expires = 0.0  # when its credentials expire, Unix time in seconds; 0: never
        self._expiry: Timer | None = None
        self.tail: bytes | bytearray = b""  # read but not yet handled
        self._need = 2  # size of the next packet, as far as it is known
        self._connect_size = 0  # bytes of its CONNECT during the login
        self.routes: dict[bytes, Route] = {}
        self.topic, self.stream = b"", None
        self.epoch = -1
        self.pays = False
        self.metering = Metering(connections.budgets, connections.runtime, self.broker.counts)

    @property
    def session(self) -> Session | None:
        """The client's session; None until it has logged in."""
        return self.inbox.session

    @property
    def name(self) -> str:
        """The client's name in the log."""
        session = self.inbox.session
        client = f"{session.identity.label} at " if session is not None else ""
        return f"{client}{self.address}"

    @property
    def turn(self) -> Who:
        """Who it takes turns as: its user, or its address before the login."""
        session, network = self.inbox.session, network_of(self.address)
        return (network, network) if session is None else session.identity.turn

    @property
    def local(self) -> bool:
        """Whether the client is on this machine. An address that a proxy has named does not count."""
        return is_loopback(self.address) and not self.proxied

    @property
    def drops_forbidden(self) -> bool:
        """Whether what the rules forbid is acknowledged and dropped where no stream takes the topic."""
        return self.endpoint.listener.settings.forbidden == "acknowledge"

    @property
    def gone(self) -> bool:
        """Whether it is closed or being closed."""
        return self.state is CLOSED or self.transport.is_closing()

    # -- called by the transport ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.address, _ = peer_of(transport)
        runtime = self.connections.runtime
        self.heard = self.before = runtime.now()
        self._timer = self._in_time()
        self.connections.accept(self)

    def read(self, data: bytes) -> None:
        """Handle bytes from the socket, after those that wait."""
        if self.state is CLOSED:
            if self._over:
                self.discard()
            return
        if self.tail:
            if not isinstance(self.tail, bytearray):
                self.tail = bytearray(self.tail)
            self.tail += data  # linear time, however many pieces a large packet arrives in
            if len(self.tail) < self._need or self.holds:
                if self.pays:
                    self.metering.prepay(self, len(self.tail))
                if self.state is not OPEN:
                    self._wait()
                return
            data, self.tail = bytes(self.tail), b""
        self._work(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.reads.run()  # what it sent before
        self._close(Event.LOST)
        self._timer.cancel()
        self.connections.gone(self)

    def pause_writing(self) -> None:
        self.writable = False
        super().pause_writing()  # a client that does not read acknowledgements must not send more

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
        """Send an answer whose length the client determines. Closes if it exceeds the client's limit.

        A client must not be sent more than its Maximum Packet Size (MQTT 5 section 3.1.2.11.4), and it cannot
        continue without this answer.
        """
        if len(data) <= self.max_packet_out:
            self.send(data)
        else:
            why = f"an answer of {len(data)} bytes, above its Maximum Packet Size of {self.max_packet_out}"
            self.fail("refused_packet_size", why, PACKET_TOO_LARGE)

    @property
    def refuses_unmatched(self) -> bool:
        """Whether its listener refuses messages on topics that no stream takes."""
        return self.endpoint.listener.settings.unmatched == "refuse"

    @property
    def most_filters(self) -> int:
        """The most topic filters in one packet, because those of one packet are handled in one step."""
        return max(MOST_FILTERS, self.endpoint.listener.limits.subscriptions)

    def admits(self, user: str | None, proof: bytes) -> bool:
        """Whether its listener would admit it now as this user: see `Endpoint.admits`."""
        return self.endpoint.admits(user, proof, self.transport.get_extra_info("ssl_object"))

    def full_of_subscriptions(self, count: int) -> Refusal | None:
        """Return why a client with `count` topic filters may not have more; None if it may."""
        if count >= self.endpoint.listener.limits.subscriptions:
            why = f"it has {count} already; see [mqtt.limits] subscriptions"
            return Refusal("refused_subscriptions", why)
        return self.metering.refuse_filter(count)

    def metered(self) -> None:
        """Start its rates, after the login or after a reload that has made new meters."""
        filters = 0 if self.session is None else len(self.session.subscriptions)
        self.metering.logged_in(self.endpoint.listener.limits.messages_per_second, filters)
        self.pays = bool(self.metering.rates)

    def count_filters(self) -> None:
        """Count the topic filters of its session again."""
        if self.session is not None:
            self.metering.count_filters(len(self.session.subscriptions))

    def await_connect(self) -> None:
        """The TLS handshake is complete: give the CONNECT as much time."""
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
        """The login waits. Its CONNECT holds `size` bytes, besides what the client has sent after it."""
        self._connect_size = size
        self._wait()

    def listen_for_end(self, yes: bool) -> None:
        """Read without handling anything, to notice if the client disconnects before its answer."""
        if self.state is CLOSED or self.transport.is_closing():
            return
        if yes:
            self.transport.resume_reading()
        elif self.holds:
            self.transport.pause_reading()

    def _wait(self) -> None:
        """Count what a client that is not logged in has sent: all such clients share a limit."""
        self.connections.guests.keep(self, self.address, self._connect_size + len(self.tail))
        if len(self.tail) > MAX_CONNECT and self.holds:
            self.transport.pause_reading()

    def opened(self) -> None:
        """The client has its session: handle what it has sent after its CONNECT."""
        self.connections.guests.leave(self, self.address)
        self.state = NEXT[self.state, Event.ACCEPTED]
        self.since = round(self.broker.clock.wall())
        self.metered()
        self.limit = self.connections.config.max_packet
        self._timer.cancel()
        if self.keep_alive:
            self._limit_unread()
            self._watch()
        if self.expires:
            self._watch_expiry()
        self.connections.runtime.soon(self.release, "connect")

    def refuse(self, reason: int, why: str, counter: str = "refused_connects") -> None:
        """Answer a CONNECT with a reason code and close."""
        answer = answers.connack(self.level, reason)
        if len(answer) <= self.max_packet_out:
            self.send(answer)
        client, user = self.claimed
        origin = Origin("mqtt", self.address)
        record("login", "refused", origin=origin, user=user, client=client, proven=False, why=why)
        self._close(Event.REFUSED, counter, f"refused: {why}", linger=True)

    def fail(self, counter: str, why: str, reason: int, told: str = "") -> None:
        """Close. An MQTT 5 client first gets a DISCONNECT with the reason, and `told` if it accepts text."""
        self.reason = reason
        if self.level == V5 and self.state is OPEN:
            properties: p.Properties = {p.REASON_STRING: told.encode()} if told and self.explains else {}
            for answer in (answers.disconnect(reason, properties), answers.disconnect(reason)):
                if len(answer) <= self.max_packet_out:
                    self.send(answer)
                    break
        self._close(Event.FAILED, counter, why, linger=True)

    def end(self, counter: str, why: str, *, abort: bool = False) -> None:
        """Close without telling the client. With `abort`, unsent data is discarded."""
        self._close(Event.FAILED, counter, why)
        if abort:
            self.transport.abort()

    def disconnected(self, *, will: bool) -> None:
        """Close after the client's DISCONNECT. `will`: whether its will is published."""
        self._close(DISCONNECT, will=will)

    def _close(
        self,
        on: int | Event,
        counter: str = "",
        why: str = "",
        *,
        will: bool = True,
        linger: bool = False,
    ) -> None:
        """Close the connection. `counter` counts the reason, `why` goes to the log.

        With `linger` we send FIN and wait, so that the peer gets our last packets, also one that is slow to
        read them.
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
        if linger and not transport.is_closing() and transport.can_write_eof():
            self.finish(LINGER)
        elif not (self.writable or linger):
            transport.abort()
        else:
            transport.close()
            if transport.get_write_buffer_size():
                # Sends what was written, but does not wait for a peer that does not read it.
                self._timer = self.connections.runtime.later(LINGER, transport.abort)

    # -- packets ------------------------------------------------------------

    def _work(self, data: bytes) -> None:
        try:
            used = self._packets(data)
        except ProtocolError as error:
            why = str(error)
            if error.reason == PACKET_TOO_LARGE and self.state is OPEN:
                why += ", which [mqtt] max_packet sets"
            self.fail("protocol_errors", why, error.reason)
        except (IndexError, ValueError) as error:
            # A check is missing. The peer's packet is wrong all the same.
            self.fail("protocol_errors", repr(error), MALFORMED)
        else:
            if used < len(data) and self.state is not CLOSED:
                self.tail = data[used:] if used else data
                if self.pays:
                    self.metering.prepay(self, len(self.tail))
                if self.state is not OPEN:
                    self._wait()

    def _packets(self, d: bytes) -> int:
        """Handle the complete packets in `d`. Returns their size in bytes."""
        shared, broker, state = self.connections, self.broker, self.state
        size, pos, published, asked, small = len(d), 0, 0, 0, 0
        most = self.metering.messages_left() if self.pays else size
        router, turns = broker.router, broker.turns
        if self.epoch != router.epoch or len(self.routes) > ROUTES:
            self.routes, self.epoch = {}, router.epoch
            self.topic, self.stream = b"", None
        routes, limit, v5 = self.routes, self.limit, self.level == V5
        two_bytes = limit > 0x3FFF  # no length of two bytes exceeds it
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
                        # Only publishers wait: acknowledgements of others make room.
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
                        if not route.delivers:  # deliveries are timed instead
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
                elif (state is not OPEN or head & 0xD0 == EXPENSIVE) and turns.over:
                    turns.wait(self)
                    break
                else:
                    self.traffic.others += 1
                    self.traffic.other_bytes += end - pos
                    pos = end  # it counts as received even if handling fails
                    if state is OPEN:
                        if head >= REQUEST:
                            asked += 1
                            most -= 1
                        control.handle(self, batch, head, d[body:end])
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
                        began = turns.begin()
                        handshake.begin(self, d[body:end])
                        turns.spend(began)
                pos = end
        finally:
            self.published += published
            traffic = self.traffic
            traffic.published += published
            traffic.received_bytes += pos
            self.inbox.put(batch, self.before)
            if self.pays:
                self.metering.pay_handled(self, published + asked, pos)
        return pos

    def _route(self, topic: bytes) -> Route | None:
        """Return the route of a topic for this client; None while plugins are asked about it."""
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
                    route.undecided = True
                    return route
        if len(topic) <= USUAL_TOPIC:
            self.routes[topic] = route
        return route

    def forget_routes(self) -> None:
        """Look up all routes again."""
        self.epoch = -1

    def ask_again(self) -> None:
        """Forget the decisions of plugins: a reload may have changed the plugins."""
        if self.asking is not None:
            self.asking.stop()
        self.asking = Asking(self, self.connections) if self.connections.auth.authorizes else None
        self.forget_routes()

    def _publish_v5(
        self, batch: Batch, head: int, topic: bytes, packet_id: bytes, data: bytes, pos: int, end: int
    ) -> bool:
        """Handle a PUBLISH with properties or without a topic (MQTT 5 section 3.3.2.3).

        Returns False if plugins must be asked first; it is then handled again after their decision.
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

    # -- time ------------------------------------------------------------

    def _too_slow(self) -> None:
        self.end("refused_timeout", f"no complete {self.awaited} in time", abort=True)

    def _watch_expiry(self) -> None:
        """Close when the credentials expire. Checks often, because the wall clock may be set."""
        left = self.expires - self.broker.clock.wall() / 1000
        if left > 0:
            wait = min(left, LOOK_AGAIN)
            self._expiry = self.connections.runtime.later(wait, self._watch_expiry)
        else:
            self.fail("expired_logins", "its credentials have expired", MAXIMUM_CONNECT_TIME)

    def _limit_unread(self) -> None:
        """Have the kernel end the connection if the peer reads nothing for as long as it may be silent.

        Meanwhile we do not read from it (`pause_writing`), so `_watch` cannot tell whether it is there.
        """
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # the peer may just have disconnected
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.keep_alive * 1000))

    def _watch(self) -> None:
        """Enforce the keep-alive: silence for 1.5 times as long counts as lost (3.1.1 section 3.1.2.10)."""
        left = self.heard + self.keep_alive - self.connections.runtime.now()
        if self.holds:
            left = self.keep_alive  # we do not read, so silence proves nothing
        if left > 0:
            self._timer = self.connections.runtime.later(left, self._watch)
        else:
            self.fail("keep_alive_timeouts", "keep-alive expired", KEEP_ALIVE_TIMEOUT)
