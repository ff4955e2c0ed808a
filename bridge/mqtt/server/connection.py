"""One client's connection: framing, PUBLISH and its acknowledgements, keep-alive.

States (the transport may be TCP, TLS or a WebSocket):

    NEW --CONNECT--> CONNECTING --CONNACK 0--> OPEN --DISCONNECT, error, end of the transport--> CLOSED
     |                    |                                                                        ^
     +--- anything else, time-out, refusal --------------------------------------------------------+

What it promises:
* Nothing of a client is looked at before CONNACK 0; what it sent behind its CONNECT waits.
* Acknowledgements leave in the order of the packets (MQTT 3.1.1 section 4.6), each after the commit of
  all streams that its message went to: every read from the socket makes one `Batch`, and batches leave
  first in, first out.
* A malformed packet closes this connection and no other.
* Reading is paused while there is a reason to (`hold`), so that nothing here grows without bound.

The hot path (`_packets`) makes no task, no log line and no system call per message.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import socket
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, cast

from bridge.errors import StreamError
from bridge.mqtt.server import control, handshake, publishing
from bridge.mqtt.server.batch import Batch
from bridge.mqtt.wire import answers
from bridge.mqtt.wire.packets import (
    CONNECT,
    KEEP_ALIVE_TIMEOUT,
    MALFORMED,
    MAX_CONNECT,
    PACKET_TOO_LARGE,
    PUBLISH,
    V5,
    V311,
    ProtocolError,
    frame,
)
from bridge.net.flow import Flow

if TYPE_CHECKING:
    from bridge.mqtt.broker.router import Route
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.broker.store import Committer
    from bridge.mqtt.server.lane import Lane, Listener

log = logging.getLogger(__name__)

UNSENT_BATCHES = 1_000  # reads whose commit is awaited before reading is paused
LINGER = 1.0  # seconds for the last bytes to go out
ROUTES = 4_096  # topics that one connection remembers


class State(enum.Enum):
    """Where a connection is in its life."""

    NEW = enum.auto()
    CONNECTING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class Connection(Flow):
    """The server's side of one MQTT connection."""

    __slots__ = (
        "_batches", "_connect_size", "_drained", "_epoch", "_heard", "_need", "_paid", "_routes", "_tail",
        "address", "aliases", "bridge", "keep_alive", "lane", "level", "limit", "listener", "max_packet_out",
        "reason", "receive_maximum", "requests", "session", "state", "writable",
    )  # fmt: skip

    def __init__(self, lane: Lane, listener: Listener) -> None:
        super().__init__()
        self.lane, self.listener = lane, listener
        self.state = State.NEW
        self.level = V311
        self.bridge = False  # the client is another broker
        self.limit = MAX_CONNECT  # bytes of a packet, until the client is known
        self.session: Session | None = None
        self.writable = True
        self.receive_maximum = self.max_packet_out = 0xFFFF_FFFF
        self.keep_alive = 0.0  # seconds of silence until the connection counts as lost; 0: never
        self.reason = 0  # why it was closed, a reason code
        self.aliases: dict[int, bytes] = {}
        self.requests = 0  # being answered
        self._drained: asyncio.Future[None] | None = None
        self._tail: bytes | bytearray = b""  # read, not yet handled
        self._need = 2  # bytes that make the next packet whole
        self._connect_size = 0  # bytes of its CONNECT while the login waits
        self._routes: dict[bytes, Route] = {}
        self._epoch = -1
        self._paid = 0.0  # until when its messages are within its rate
        self._batches: deque[Batch] = deque()

    @property
    def name(self) -> str:
        """How the log calls the client."""
        client = f"{self.session.identity.label} at " if self.session is not None else ""
        return f"{client}{self.address}"

    # -- the transport calls ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) else "local"
        loop = self.lane.loop
        self._heard = loop.time()
        self._timer = loop.call_later(self.lane.limits.connect_timeout / 1000, self._too_slow)
        self.lane.accept(self)

    def data_received(self, data: bytes) -> None:
        if self.state is State.CLOSED:
            return
        self._heard = self.lane.loop.time()
        if self._tail:
            if not isinstance(self._tail, bytearray):
                self._tail = bytearray(self._tail)
            self._tail += data  # linear, in however many pieces a big packet arrives
            if len(self._tail) < self._need or self._holds:
                if self.state is not State.OPEN:
                    self._wait()
                return
            data, self._tail = bytes(self._tail), b""
        self._work(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.end("", "")
        self._timer.cancel()
        self.lane.gone(self)
        if not self._batches:
            self._rest()

    def pause_writing(self) -> None:
        self.writable = False
        super().pause_writing()  # a client that does not read its acknowledgements need not send more

    def resume_writing(self) -> None:
        self.writable = True
        if self.session is not None and self.state is State.OPEN:
            self.session.outbox.pump()
        if self.writable:
            super().resume_writing()

    # -- for the rest of the lane ------------------------------------------------------------

    def send(self, data: bytes | bytearray) -> None:
        """Write to the client, unless the connection is on its end."""
        if self.state is not State.CLOSED and not self.transport.is_closing():
            self.transport.write(data)

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

    def acknowledge_now(self) -> None:
        """Have the kernel acknowledge what was read, if nothing else goes out to carry that."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX and not self.transport.is_closing():
            with contextlib.suppress(OSError):  # the peer may have gone this very moment
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def proceed(self) -> None:
        data, self._tail = bytes(self._tail), b""
        if data:
            self._work(data)

    def wait_with(self, size: int) -> None:
        """Its login waits, and needs so many bytes beside what the client has sent behind it."""
        self._connect_size = size
        self._wait()

    def listen_for_end(self, yes: bool) -> None:
        """Read on, though nothing is handled, to notice when the client goes before its answer comes."""
        if self.state is State.CLOSED or self.transport.is_closing():
            return
        if yes:
            self.transport.resume_reading()
        elif self._holds:
            self.transport.pause_reading()

    def _wait(self) -> None:
        """Before it is logged in, what it has sent counts against a budget for all such clients."""
        self.lane.guests.keep(self, self.address, self._connect_size + len(self._tail))
        if len(self._tail) > MAX_CONNECT and self._holds:
            self.transport.pause_reading()

    def opened(self) -> None:
        """The handshake is over: handle what the client has sent behind its CONNECT."""
        self.lane.guests.leave(self, self.address)
        self.state = State.OPEN
        self.limit = self.lane.max_packet
        self._timer.cancel()
        if self.keep_alive:
            self._watch()
        self.lane.loop.call_soon(self.release, "connect")

    def fail(self, counter: str, why: str, reason: int) -> None:
        """The client did wrong, or must go: tell an MQTT 5 client the reason, and close."""
        self.reason = reason
        if self.level == V5 and self.state is State.OPEN and self.max_packet_out >= 4:
            self.send(answers.disconnect(reason))
        self.end(counter, why, linger=True)

    def end(self, counter: str, why: str, *, will: bool = True, linger: bool = False) -> None:
        """Close the connection; `counter` counts the reason, `why` goes to the log.

        With `linger` it ends with FIN, so that the peer gets our last words.
        """
        if self.state is State.CLOSED:
            return
        if counter:
            self.lane.counts[counter] += 1
            self.lane.log_closed(self, counter, why)
        self.state = State.CLOSED
        self._timer.cancel()
        self._tail = b""
        self._routes = {}
        if self.session is not None:
            self.lane.left(self, will=will)
        transport = self.transport
        if not self.writable:
            transport.abort()
        elif linger and not transport.is_closing() and transport.can_write_eof():
            self.finish(LINGER)
        else:
            transport.close()
            if transport.get_write_buffer_size():
                # What has been written still goes out, but a peer that does not take it is not waited for.
                self._timer = self.lane.loop.call_later(LINGER, transport.abort)

    @property
    def unsettled(self) -> bool:
        """Whether a commit is still awaited for something that it published."""
        return bool(self._batches)

    @property
    def unstored_ids(self) -> set[int]:
        """QoS 2 ids in use whose messages are not known to be stored yet."""
        return {packet_id for batch in self._batches for packet_id in batch.ids}

    def is_unstored(self, packet_id: int) -> bool:
        """Whether a QoS 2 id is one of these."""
        return any(packet_id in batch.ids for batch in self._batches)

    async def settled(self) -> None:
        """Wait until everything that it published is committed, or has failed to be."""
        while self._batches:
            self._drained = self._drained or self.lane.loop.create_future()
            await asyncio.shield(self._drained)

    def certificate_name(self) -> str | None:
        """The common name in the client's certificate, which TLS has verified."""
        certificate = self.transport.get_extra_info("peercert") or {}
        names = [
            value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"
        ]
        return names[0] if len(names) == 1 else None

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
            if used < len(data) and self.state is not State.CLOSED:
                self._tail = data[used:] if used else data
                if self.state is not State.OPEN:
                    self._wait()

    def _packets(self, d: bytes) -> int:
        """Handle the whole packets in `d`; return how many bytes that used."""
        lane, state, size, pos, published = self.lane, self.state, len(d), 0, 0
        router = lane.router
        if self._epoch != router.epoch or len(self._routes) > ROUTES:
            self._routes, self._epoch = {}, router.epoch
        routes, limit, v5 = self._routes, self.limit, self.level == V5
        two_bytes = limit > 0x3FFF  # then a length of two bytes cannot be above it
        batch = Batch(self)
        acks, touched = batch.acks, batch.touched
        last: Committer | None = None
        self._need = 2
        if state is State.NEW and size and d[0] != CONNECT:
            raise ProtocolError("the first packet is not a CONNECT (MQTT-3.1.0-1)")
        try:
            while size - pos >= 2 and not self._holds:
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
                if head & 0xF0 == PUBLISH and state is State.OPEN:
                    if lane.under_pressure:
                        # Only who publishes waits: the others' acknowledgements make room.
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
                            if lane.turns.over:
                                lane.turns.wait(self)
                                break
                            published += 1
                            publishing.publish_v5(self, batch, head, topic, packet_id, d, at, end)
                            last = None
                            pos = end
                            continue
                        at += 1
                    route = routes.get(topic)
                    if route is None:
                        if lane.turns.over:
                            lane.turns.wait(self)
                            break
                        route = self.find_route(topic)
                        append = route.append
                    elif (append := route.append) is None and route.receivers and lane.turns.over:
                        lane.turns.wait(self)
                        break
                    published += 1
                    if append is None or head & 0x0D:
                        publishing.publish(self, batch, head, topic, packet_id, d[at:end], route)
                        last = None
                    else:
                        try:
                            append(topic, d[at:end])
                        except StreamError as error:
                            publishing.refused(self, batch, head, topic, packet_id, d[at:end], None, error)
                        else:
                            if (stream := route.stream) is not last:
                                touched[stream] = None  # type: ignore[index]
                                last = stream
                            if qos:
                                acks += b"\x40\x02"
                                acks += packet_id
                elif state is State.OPEN:
                    if head & 0xD0 == 0x80 and lane.turns.over:  # SUBSCRIBE or UNSUBSCRIBE
                        lane.turns.wait(self)
                        break
                    control.handle(self, batch, head, d[body:end])
                    if self.state is State.CLOSED:
                        return size
                else:
                    self.state = state = State.CONNECTING
                    self.hold("connect")
                    handshake.begin(self, d[body:end])
                pos = end
        finally:
            lane.counts["received"] += published
            self._queue(batch)
            if published and lane.limits.messages_per_second:
                self._throttle(published / lane.limits.messages_per_second)
        return pos

    def find_route(self, topic: bytes) -> Route:
        """The route of a topic for this client; one that it may not publish on has no streams."""
        route = self._routes[topic] = publishing.allowed_route(self, topic)
        return route

    def _queue(self, batch: Batch) -> None:
        """Let a batch leave when it may."""
        touched = batch.touched
        if not touched and not self._batches and batch.close is None:
            if batch.acks:
                self.send(batch.acks)
            return
        if not batch.acks and batch.close is None:
            return  # QoS 0 alone: nobody waits for it
        batch.waiting = len(touched) + 1
        self._batches.append(batch)
        several = len(touched) > 1
        for committer in touched:
            committer.after_commit(partial(batch.one_done, committer) if several else batch.done)
        batch.done(None)
        if len(self._batches) > UNSENT_BATCHES:
            self.hold("commits")

    def settle(self) -> None:
        """Send the acknowledgements of all leading batches that are committed, in one write."""
        batches, failed = self._batches, None
        acks: bytearray | None = None
        while batches and not batches[0].waiting:
            batch = batches.popleft()
            if batch.error is not None:
                self._forget_ids(batch)
                failed = failed or batch
            elif failed is None:
                if acks is None:
                    acks = batch.acks
                else:
                    acks += batch.acks
                if batch.close is not None:
                    failed = batch
        if acks:
            self.send(acks)
        if failed is not None:
            if failed.error is not None:
                why = publishing.reason_of(failed.error)
                self.fail("rejected_storage", f"not acknowledged: {failed.error}", why)
            elif failed.close is not None:
                self.fail(*failed.close)
        if not batches:
            self._rest()
        if "commits" in self._holds and len(batches) <= UNSENT_BATCHES // 2:
            self.release("commits")

    def _rest(self) -> None:
        """Nothing awaits its commit any more: a client that is away holds no connection, nor its buffers."""
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None
        if self.state is State.CLOSED and self.session is not None:
            newest = self.lane.newest
            if newest.get(self.session.client_id) is self:
                del newest[self.session.client_id]

    def _forget_ids(self, batch: Batch) -> None:
        # The client will send these again, and then they must not pass for duplicates: but where they are
        # stored, they are not to be stored again.
        session = self.session
        if session is None:
            return
        session.incoming.difference_update(batch.ids)
        for packet_id, places in batch.ids.items():
            stored = {at.name for at in places if at not in batch.failed} if batch.failed else set()
            if stored:
                session.partial[packet_id] = session.partial.get(packet_id, frozenset()) | stored
                if session.persistent:
                    self.lane.journal.held(session, packet_id)
        self.lane.journal.failed(batch.ids.values(), batch.failed, batch)

    def _throttle(self, seconds: float) -> None:
        """Read no further for as long as what was read should have taken, beyond the last second's worth."""
        loop = self.lane.loop
        self._paid = max(self._paid, loop.time()) + seconds
        ahead = self._paid - loop.time() - 1.0
        if ahead > 0:
            self.hold("rate")
            loop.call_later(ahead, self.release, "rate")

    # -- time ------------------------------------------------------------

    def _too_slow(self) -> None:
        self.end("refused_timeout", "no complete CONNECT in time")
        self.transport.abort()

    def _watch(self) -> None:
        """Enforce the keep-alive (3.1.1 section 3.1.2.10): silent for 1.5 times as long is lost."""
        left = self._heard + self.keep_alive - self.lane.loop.time()
        if self._holds:
            left = self.keep_alive  # it is we who do not read
        if left > 0:
            self._timer = self.lane.loop.call_later(left, self._watch)
        else:
            self.fail("keep_alive_timeouts", "keep-alive expired", KEEP_ALIVE_TIMEOUT)
            self.transport.abort()
