"""A client of another broker: connects again and again, and speaks the packets.

What it promises: whatever the standard lets a server send is taken. A packet that it does not allow ends the
connection, with its reason in the log, once. If the broker sends the same packet again, as it must with a
message that was not acknowledged, the packet is left out: a message goes on without a topic, to be dropped,
counted and acknowledged. So what is behind it is reached.

It tries the protocols in their order. The next one is tried if the broker refuses one with CONNACK, or does
not answer, or closes `PATIENCE` connections in a row without an answer, unless it has taken that one before.

The password and the certificates are read for each connection. If a file cannot be read, the last readable
content is used.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
from collections import deque
from typing import TYPE_CHECKING, Protocol, cast

from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode

from bridge.errors import ConfigError
from bridge.mqtt.wire import answers
from bridge.mqtt.wire import client as wire
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import (
    CONNACK,
    DISCONNECT,
    PACKET_ID_NOT_FOUND,
    PINGREQ,
    PROTOCOL_ERROR,
    PUBACK,
    PUBLISH,
    PUBREC,
    PUBREL,
    QUOTA_EXCEEDED,
    SUBACK,
    SUCCESS,
    UNSUBACK,
    UNSUPPORTED_VERSION,
    V5,
    ProtocolError,
    Publish,
    frame,
    parse_ack,
)
from bridge.net.brokers import Named, cause_of, host_and_port, load_certificates, read_password, tls_context

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bridge.errors import StreamError
    from bridge.mqtt.settings import BrokerSettings

log = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds between attempts to connect
CONNECT_TIMEOUT = 5.0  # seconds for TCP, and again for TLS
ANSWER_TIMEOUT = 30.0  # seconds for CONNACK
UNKNOWN_TIMEOUT = 10.0  # the same, if the broker may be silent because it does not know the protocol
PATIENCE = 2
# Messages that an MQTT 5 broker may send before the first is acknowledged. So while messages are held, the
# broker waits and the connection stays usable.
RECEIVE_MAXIMUM = 1_000
IN_FLIGHT = 20  # what we publish at a time
MOST_ILLEGAL = 1_000  # packets that are remembered


class Events(Protocol):
    """What happens to a client; `upstream.Upstream` says what it does about each."""

    def failed(self, cause: str) -> None: ...
    def connecting(self, send: Callable[[StreamError | None], None]) -> None: ...
    def connected(self, connack: wire.Connack, protocol: int) -> None: ...
    def lost(self, why: str) -> None: ...
    def arrived(self, packet: Publish) -> None: ...
    def subscribed(self, packet_id: int, failed: str | None) -> None: ...
    def published(self, packet_id: int) -> None: ...


class Client(asyncio.Protocol):
    """A client that has not connected yet. Must be used in the event loop's thread."""

    def __init__(
        self,
        settings: BrokerSettings,
        client_id: str,
        named: Named,
        protocols: Sequence[int],
        taken: int,
        events: Events,
    ) -> None:
        """`protocols` are levels, with `wire.BRIDGE` in them or not; the broker took `taken` in an earlier
        process. Raises ConfigError for a file that cannot be used.
        """
        self._settings, self._client_id, self._named, self._events = settings, client_id, named, events
        self.protocols, self._left, self._taken, self._closed = protocols, list(protocols), taken, 0
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None  # until the end of the connection begins
        self._ended: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._delay, self._why, self._last_id = FIRST_DELAY, "", 0
        self._data = bytearray()
        self._answered = self._held = self._pinged = False
        self.again = False  # another protocol is tried at once
        self._in_flight, self._max_qos = IN_FLIGHT, 1
        # What we have published: by packet id, with whether it was sent; those to be sent now
        self._unanswered: dict[int, tuple[bool, str, bytes, p.Properties]] = {}
        self._unsent: deque[int] = deque()
        self._illegal: dict[bytes, None] = {}
        try:
            self._password = read_password(settings.password_file, named)
            self._tls = tls_context(
                settings.url, named, ca=settings.ca, cert=settings.cert, key=settings.key, alpn=settings.alpn
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def protocol(self) -> int:
        """What is spoken, or tried next: a level, with `wire.BRIDGE` in it or not."""
        return self._left[0]

    @property
    def level(self) -> int:
        """Its level alone."""
        return wire.level_of(self._left[0])

    # -- connections ---------------------------------------------------------------------

    def start(self) -> None:
        """Connect, and reconnect without limit."""
        self._task = self._loop.create_task(self._run())

    async def stop(self) -> None:
        """Disconnect."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self.end("it is stopped")
        if self._ended is not None:
            await self._ended

    async def _run(self) -> None:
        while True:
            self.again = False
            try:
                await self._open()
                if self._ended is not None:
                    await asyncio.shield(self._ended)
            except (OSError, ValueError) as error:
                self._events.failed(cause_of(error, self._named))
            if not self.again:
                await asyncio.sleep(self._delay)
                self._delay = min(self._delay * 2, LONGEST_DELAY)

    async def _open(self) -> None:
        settings, named, tls = self._settings, self._named, self._tls
        try:
            self._password = read_password(settings.password_file, named)
            if tls is not None:
                load_certificates(tls, named, ca=settings.ca, cert=settings.cert, key=settings.key)
        except ValueError as error:
            log.warning("%s; connecting with what was read before", error)
        host, port = host_and_port(settings.url)
        sock = await asyncio.to_thread(socket.create_connection, (host, port), CONNECT_TIMEOUT)
        sock.setblocking(False)
        async with asyncio.timeout(CONNECT_TIMEOUT):
            name = host if tls is not None else None
            await self._loop.create_connection(lambda: self, sock=sock, ssl=tls, server_hostname=name)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._ended = self._loop.create_future()
        self._why, self._answered = "", False
        self._data.clear()
        unknown = len(self._left) > 1 and self._taken != self.protocol
        seconds = UNKNOWN_TIMEOUT if unknown else ANSWER_TIMEOUT
        self._timer = self._loop.call_later(seconds, self._not_answered)
        self._events.connecting(self._connect)

    def _connect(self, error: StreamError | None) -> None:
        """Send CONNECT, or go because the journal has failed."""
        if error is not None:
            self.end(str(error), None)
            return
        properties: p.Properties = {}
        if self.level == V5:
            properties[p.SESSION_EXPIRY] = self._settings.session_seconds
            properties[p.RECEIVE_MAXIMUM] = RECEIVE_MAXIMUM
        user = self._settings.username
        password = self._password if user is not None else None
        keep_alive = self._settings.keep_alive
        self.send(wire.connect(self.protocol, self._client_id, keep_alive, user, password, properties))

    def _not_answered(self) -> None:
        self._closed = PATIENCE
        self.end("it does not answer", None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        if not self._answered and self._taken != self.protocol:
            self._closed += 1
            if self._closed >= PATIENCE:
                self._next_protocol()
        if self._ended is not None:
            self._ended.set_result(None)
        self._events.lost(self._why or str(exc or "the broker closed it"))

    def _next_protocol(self) -> None:
        self._closed = 0
        del self._left[0]
        self._left = self._left or list(self.protocols)  # after the last one: it was not the protocol

    def end(self, why: str, reason: int | None = SUCCESS) -> None:
        """Close the connection. `reason` is that of the DISCONNECT; None: without one."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        self._why = why
        if reason is not None and self._answered:
            transport.write(answers.disconnect(reason) if reason and self.level == V5 else b"\xe0\0")
        transport.close()
        self._loop.call_later(1.0, transport.abort)  # if the broker does not read

    def _tick(self, seconds: float) -> None:
        """Ping, twice in each keep-alive, and end a connection on which nothing comes (3.1.2.10)."""
        if self._pinged and not self._held:
            self.end("it does not answer PINGREQ", None)
            return
        self._pinged = True
        self.send(bytes((PINGREQ, 0)))
        self._timer = self._loop.call_later(seconds, self._tick, seconds)

    # -- what we send ----------------------------------------------------------------------

    def hold(self) -> None:
        """Read nothing more for now."""
        if not self._held:
            self._held = True
            if self._transport is not None:
                self._transport.pause_reading()

    def release(self) -> None:
        """Read again."""
        if self._held:
            self._held = self._pinged = False
            if self._transport is not None:
                self._transport.resume_reading()

    def send(self, data: bytes | bytearray) -> None:
        """Write packets on the connection there is; without one, drop them."""
        if self._transport is not None:
            self._transport.write(data)

    def subscribe(self, topic_filter: str, options: int) -> int:
        """Subscribe; returns the packet id of the request."""
        packet_id = self._next_id()
        self.send(wire.subscribe(self.level, packet_id, topic_filter, options))
        return packet_id

    def unsubscribe(self, topic_filter: str) -> None:
        """Unsubscribe."""
        self.send(wire.unsubscribe(self.level, self._next_id(), topic_filter))

    def publish(self, topic: str, payload: bytes, qos: int, properties: p.Properties) -> int | None:
        """Publish at QoS 0 or 1. At QoS 1, send it on each connection until the broker has it.

        Returns its packet id; None if there will be no acknowledgement.
        """
        if not qos or not self._max_qos:
            self.send(wire.publish(self.level, topic, payload, 0, properties))
            return None
        packet_id = self._next_id()
        self._unanswered[packet_id] = False, topic, payload, properties
        self._unsent.append(packet_id)
        self._publish_more()
        return packet_id

    def _publish_more(self) -> None:
        while self._answered and self._unsent:
            if len(self._unanswered) - len(self._unsent) >= self._in_flight:
                return
            packet_id = self._unsent.popleft()
            again, topic, payload, properties = self._unanswered[packet_id]
            self._unanswered[packet_id] = True, topic, payload, properties
            packet = wire.publish(self.level, topic, payload, packet_id, properties)
            self.send(bytes((packet[0] | (8 if again else 0),)) + packet[1:])

    def _next_id(self) -> int:
        self._last_id = self._last_id % 65_535 + 1
        return self._last_id if self._last_id not in self._unanswered else self._next_id()

    # -- what comes ------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._pinged = False
        self._data += data
        pos = 0
        try:
            while pos < len(self._data) and self._transport is not None:
                start, end = frame(self._data, pos, wire.LARGEST)
                if end > len(self._data):
                    break
                head, body, pos = self._data[pos], bytes(self._data[start:end]), end
                self._take(head, body)
        except ProtocolError as error:
            self.end(f"it sent what MQTT does not allow: {error}", error.reason)
        del self._data[:pos]

    def _take(self, head: int, body: bytes) -> None:
        if not self._answered:
            if head != CONNACK:
                raise ProtocolError(f"a {wire.name_of(head)} before CONNACK (MQTT-3.2.0-1)", PROTOCOL_ERROR)
            self._connected(wire.read_connack(body, self.level))
            return
        try:
            self._read(head, body)
        except ProtocolError as error:
            is_message = head & 0xF0 == PUBLISH
            # Too many user properties are allowed, but more than we take.
            if not (is_message and error.reason == QUOTA_EXCEEDED) and not self._is_known(head, body):
                raise
            if is_message:
                self._events.arrived(_malformed(head, body, str(error)))
            elif head & 0xF0 == PUBREL & 0xF0 and len(body) > 1:
                self._events.arrived(Publish(PUBREL, b"", body[:2], b""))

    def _is_known(self, head: int, body: bytes) -> bool:
        """Whether a packet that is not allowed has come before; remembers it."""
        key = hashlib.sha256(bytes((head & 0xF7 if head & 0xF0 == PUBLISH else head,)) + body).digest()
        known = key in self._illegal
        self._illegal[key] = None
        if len(self._illegal) > MOST_ILLEGAL:
            del self._illegal[next(iter(self._illegal))]
        return known

    def _connected(self, connack: wire.Connack) -> None:
        self._answered = True
        if self._timer is not None:
            self._timer.cancel()
        properties, protocol = connack.properties, self.protocol
        if connack.reason:
            if connack.reason == UNSUPPORTED_VERSION:
                self.again = len(self._left) > 1
                self._next_protocol()
            self._events.connected(connack, protocol)
            self.end("it was refused", None)
            return
        self._delay, self._closed, self._taken = FIRST_DELAY, 0, protocol
        self._in_flight = min(IN_FLIGHT, properties.get(p.RECEIVE_MAXIMUM, IN_FLIGHT))
        self._max_qos = properties.get(p.MAXIMUM_QOS, 1)
        if keep_alive := properties.get(p.SERVER_KEEP_ALIVE, self._settings.keep_alive):
            self._timer = self._loop.call_later(keep_alive / 2, self._tick, keep_alive / 2)
        if self._held and self._transport is not None:
            self._transport.pause_reading()
        self._events.connected(connack, protocol)
        self._unsent = deque(self._unanswered)
        self._publish_more()

    def _read(self, head: int, body: bytes) -> None:
        """Handle one packet behind the CONNACK. Raises ProtocolError."""
        kind = head & 0xF0
        wire.check_head(head, self.level)
        if kind == PUBLISH:
            self._events.arrived(wire.read_publish(head, body, self.level))
        elif kind in (SUBACK, UNSUBACK):
            packet_id, code = wire.read_suback(kind, body, self.level)
            if kind == SUBACK:
                self._events.subscribed(packet_id, reason_name(SUBACK, code) if code >= 0x80 else None)
        elif head == DISCONNECT:
            self.end(f"the broker ended it: {reason_name(DISCONNECT, wire.read_disconnect(body))}", None)
        elif kind < SUBACK:
            packet_id, _ = parse_ack(head, body, self.level)
            if head == PUBREL:
                self._events.arrived(Publish(head, b"", body[:2], b""))
            elif head == PUBREC:  # of an earlier client with our id; we publish at QoS 1
                unknown = PACKET_ID_NOT_FOUND if self.level == V5 else SUCCESS
                self.send(answers.ack(PUBREL, body[:2], unknown))
            elif head == PUBACK and self._unanswered.pop(packet_id, None) is not None:
                self._publish_more()
                self._events.published(packet_id)
        elif body:
            raise ProtocolError("a PINGRESP with a body")


def reason_name(kind: int, code: int) -> str:
    """What MQTT 5 calls a reason code in a type of packet (section 2.4)."""
    names = {CONNACK: PacketTypes.CONNACK, SUBACK: PacketTypes.SUBACK, DISCONNECT: PacketTypes.DISCONNECT}
    return str(ReasonCode(names[kind], identifier=code))


def _malformed(head: int, body: bytes, why: str) -> Publish:
    """A PUBLISH that is to be acknowledged, and dropped for the reason in its payload."""
    start = 2 + int.from_bytes(body[:2], "big")
    packet_id = body[start : start + 2] if head & 6 in (2, 4) else b""
    if len(packet_id) < 2 or not any(packet_id):
        return Publish(PUBLISH, b"", b"", why.encode())
    return Publish(PUBLISH | head & 6, b"", packet_id, why.encode())
