"""One connection to an MQTT broker, for exporters: it publishes messages and collects the answers.

`Connection` connects in its constructor and ends with `Ended`; it never reconnects. The exporter makes the
next one, and resends the unanswered messages in order. Three rules follow from that:

* Clean start (3.1.1 section 3.1.2.4, 5 section 3.1.2.4). For a client that only publishes at QoS 0 and 1, a
  session at the broker holds nothing of use, and to continue one means to resend with old packet ids.
* The same client id each time. The broker ends the old connection before it accepts the new one
  (MQTT-3.1.4-2 and -3), so nothing that is still on its way on the old one arrives after a resent message.
* Nothing runs between two calls. paho has no thread here: `turn` reads and writes, for whoever calls it.

A PUBACK answers a QoS 1 message (3.4). A QoS 0 message has no answer. Behind a number of them, `finish`
sends an UNSUBSCRIBE for a filter that was never subscribed to. The broker handles packets in order and must
answer (MQTT-3.10.4-5), so its UNSUBACK shows that it has received them.

A dead link is noticed in two ways. Data that the TCP of the other machine does not acknowledge for
`link.PATIENCE` or the keep-alive, whichever is shorter, ends the connection (TCP_USER_TIMEOUT). So does a
broker that answers nothing for `timeout` while no data goes out. A large message on a slow link is neither,
nor one that waits for its turn under the bandwidth ceiling. While nothing is pending, paho sends PINGREQ
(3.1.2.10), if `idle` is called several times per keep-alive.
"""

from __future__ import annotations

import fcntl
import select
import socket
import ssl
import struct
import termios
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from bridge.net.brokers import cause_of, hint_for
from bridge.plugin.api import Retry
from bridge.plugin.link import UNLIMITED, Link, Meter, prepare

LARGEST = 268_435_455  # bytes of a packet behind its first two to five (2.1.4)
LONGEST = 65_535  # bytes of a string (1.5.4)
PROOF = "streambridge/proof"  # the filter of the UNSUBSCRIBE
TOGETHER = 25  # messages in one write
POLL = 0.2  # seconds; how often the time-outs are looked at


def named(key: str) -> str:
    """What a setting that `bridge.net.brokers` speaks of is called in the options of an exporter."""
    if key == "url":
        return "endpoint_url"
    return f"{key}_file" if key in ("ca", "cert", "key") else key


class Ended(Exception):  # noqa: N818 - named for what happened
    """The connection is over. `code` is the reason code of the broker's DISCONNECT, None without one.

    `dropped`: without one, the other end has closed it, within the keep-alive of the last sign of life. A
    link that carries nothing any more looks otherwise.
    """

    def __init__(self, reason: str, code: int | None = None, *, dropped: bool = False) -> None:
        super().__init__(reason)
        self.code, self.dropped = code, dropped


class Target(Struct, frozen=True, kw_only=True):
    """A broker, and how to connect. Times in seconds. `url` is for messages and has no secret."""

    url: str
    host: str
    port: int
    v5: bool
    qos: int
    client_id: str
    keep_alive: int
    timeout: float
    username: str | None = None
    password: str | None = None
    tls: ssl.SSLContext | None = None


class Connection:
    """One connection.

    `answers` has the reason code of each message that the broker has answered, by the number that `publish`
    got; `refused` has those of 0x80 and above. From CONNACK (5 section 3.2.2.3): `receive_maximum`,
    `max_packet` in bytes, `max_qos`, `takes_retained`.
    """

    def __init__(
        self,
        target: Target,
        monotonic: Callable[[], float],
        working: Callable[[], None],
        link: Link = UNLIMITED,
    ) -> None:
        """Connect over `link`; `working` is called whenever something moves. Raises Retry."""
        import paho.mqtt.client as paho
        from paho.mqtt.enums import CallbackAPIVersion

        self._target, self._monotonic, self._working, self._link = target, monotonic, working, link
        self._meter: Meter | None = None
        self.answers: dict[int, int] = {}
        self.refused: dict[int, int] = {}
        self._flying: dict[int, int] = {}  # numbers by packet id: not answered, or at QoS 0 not written yet
        self._unwritten = 0
        self._unproven: list[int] = []  # written at QoS 0
        self._proof: int | None = None  # the packet id of the UNSUBSCRIBE
        self._connack: tuple[int, str, Any] | None = None
        self._end: tuple[str, int | None] | None = None
        self._moved_at = monotonic()
        self._turned_at = monotonic()
        self._queued = 0  # bytes with the kernel at the last look
        self._client = _paced(paho.Client)(
            CallbackAPIVersion.VERSION2,
            target.client_id,
            clean_session=None if target.v5 else True,
            protocol=paho.MQTTv5 if target.v5 else paho.MQTTv311,
            reconnect_on_failure=False,
        )
        client = self._client
        client.may_send = self._may_send
        client.max_inflight_messages_set(0)  # the window is the exporter's
        client.connect_timeout = target.timeout
        if target.username is not None:
            client.username_pw_set(target.username, target.password)
        if target.tls is not None:
            client.tls_set_context(target.tls)
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_publish = self._on_publish
        client.on_unsubscribe = self._on_unsubscribe
        # With this callback paho writes when `turn` says so, not with each message.
        client.on_socket_register_write = lambda *_: None
        self._open()

    # --- connecting

    def _open(self) -> None:
        target = self._target
        options: dict[str, Any] = {"clean_start": True} if target.v5 else {}
        try:
            self._client.connect(target.host, target.port, target.keep_alive, **options)
            self._prepare(self._client.socket())
            while self._connack is None:
                self.turn(POLL)
                if self._monotonic() - self._moved_at > target.timeout:
                    raise TimeoutError
        except Ended as error:
            if self._connack is None:  # else it ended behind a refusal
                raise Retry(
                    f"{error} before the broker accepted it", unsent=True, cut=error.code is None
                ) from error
        except (OSError, ValueError) as error:
            self.close()
            cut = not isinstance(error, ssl.SSLError | ValueError)
            raise Retry(
                f"no connection to {target.url}: {cause_of(error, named)}", unsent=True, cut=cut
            ) from error
        code, name, properties = self._connack
        if code:
            self.close()
            hint = hint_for(code, named)
            why = f"{name}; {hint}" if hint else name
            raise Retry(f"{target.url} refuses the connection: {why}", unsent=True)
        self.receive_maximum: int = getattr(properties, "ReceiveMaximum", LONGEST)
        self.max_packet: int = getattr(properties, "MaximumPacketSize", LARGEST)
        self.max_qos: int = getattr(properties, "MaximumQoS", 2)
        self.takes_retained: bool = bool(getattr(properties, "RetainAvailable", 1))

    def _prepare(self, sock: Any) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        prepare(sock, min(self._target.keep_alive, self._link.patience))
        self._sock = sock
        self._meter = Meter(self._link, sock)
        self._poll = select.poll()  # not select(): the descriptor may be above 1,023
        self._poll.register(sock, select.POLLIN)

    # --- for the exporter

    @property
    def pending(self) -> int:
        """How many messages have no answer, or at QoS 0 are not written yet."""
        return len(self._flying)

    @property
    def unanswered(self) -> list[int]:
        """The numbers of the messages without an answer, in order."""
        return sorted([*self._flying.values(), *self._unproven])

    def forget(self) -> None:
        """Drop the answers."""
        self.answers.clear()
        self.refused.clear()

    @property
    def stale(self) -> bool:
        """Whether the broker has ended it after this long a silence (MQTT-3.1.2-22), or it may be dead."""
        is_late = self._monotonic() - self._turned_at > self._target.keep_alive * 1.5
        return is_late or self._moved_at <= self._link.lost_at

    def publish(self, number: int, topic: str, payload: bytes, retain: bool, properties: bytes) -> None:
        """Queue a message; `properties` are encoded, with their length. It is written by the next `turn`, or
        as one of `TOGETHER`. Raises Ended.
        """
        packed: Any = _Packed(properties) if self._target.v5 else None
        sent = self._client.publish(topic, payload, self._target.qos, retain, packed)
        if not self._flying:
            self._moved_at = self._monotonic()
        self._flying[sent.mid] = number
        self._unwritten += 1
        if self._unwritten >= TOGETHER:  # the broker works on these, while the next ones are made
            self._write()

    def wait_below(self, count: int) -> None:
        """Wait until fewer than `count` messages are pending; raises Ended."""
        while len(self._flying) >= count:
            self._write()
            if len(self._flying) >= count:  # a QoS 0 message is done when it is written
                self.turn(POLL)

    def finish(self) -> None:
        """Wait until every message has an answer; raises Ended."""
        self.wait_below(1)
        if self._unproven:
            self._moved_at = self._monotonic()
            self._proof = self._client.unsubscribe(PROOF)[1]
            while self._unproven:
                self.turn(POLL)

    def turn(self, wait: float) -> None:
        """Write what is queued, wait for the broker for at most `wait` seconds, read. Raises Ended."""
        client = self._client
        self._write()
        writing = client.want_write()
        held = self._meter.wait() if self._meter is not None else 0.0
        if writing and held:  # it is the link's turn, not the broker's
            writing, wait = False, min(wait, held)
            self._moved()
        # Some brokers send a PUBACK only when TCP has acknowledged the one before (Nagle), so that is done at
        # once. The kernel forgets this option now and then.
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        self._poll.modify(self._sock, select.POLLIN | (select.POLLOUT if writing else 0))
        buffered = isinstance(self._sock, ssl.SSLSocket) and self._sock.pending()
        found = self._poll.poll(0 if buffered else wait * 1000)
        if found or buffered:
            self._read()
        if client.socket() is None:
            raise self._ended()
        self._turned_at = self._monotonic()
        if found and found[0][1] & select.POLLOUT:
            self._moved_at = self._turned_at
        elif self._turned_at - self._moved_at > POLL and (self._flying or self._unproven):
            self._look_for_silence()

    def idle(self) -> None:
        """Ping if it is time; raises Ended."""
        self.turn(0)
        self._client.loop_misc()
        self.turn(0)

    def close(self) -> None:
        """Disconnect, without waiting for anything."""
        sock = self._client.socket()
        if sock is not None:
            self._client.disconnect()
            self._client.loop_write()
            sock.close()

    # --- time-outs

    def _look_for_silence(self) -> None:
        queued = int.from_bytes(fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(4)), "little")
        if queued < self._queued:
            self._moved_at = self._turned_at
            self._working()
        self._queued = queued
        if self._turned_at - self._moved_at > self._target.timeout:
            self.close()
            raise Ended(f"{self._target.url} has not answered for {self._target.timeout:g} s")

    def _write(self) -> None:
        self._unwritten = 0
        if self._client.socket() is not None and self._client.want_write():
            # One packet of TCP for many of MQTT.
            self._cork(1)
            self._client.loop_write()
            self._cork(0)
            if self._meter is not None:
                self._meter.settle()
        if self._client.socket() is None:
            raise self._ended()

    def _read(self) -> None:
        try:
            self._client.loop_read()
        except Exception as error:  # paho raises any type for data that is not MQTT
            self.close()
            raise Ended(f"{self._target.url} sent what is not MQTT: {type(error).__name__}") from error

    def _cork(self, on: int) -> None:
        if self._client.socket() is not None:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, on)

    def _ended(self) -> Ended:
        name, code = self._end or ("", None)
        what = f"{self._target.url} ended the connection"
        if code is None:
            alive = self._monotonic() - self._moved_at < self._target.keep_alive
            return Ended(f"the connection to {self._target.url} broke", dropped=alive)
        if code == 0x8E:
            name += (
                f"; another client has the client id {self._target.client_id!r}: each export needs its own"
            )
        return Ended(f"{what}: {name}", code)

    def _may_send(self, size: int) -> int:
        """Return how many of `size` bytes the link takes now."""
        return size if self._meter is None else self._meter.grant(size)

    # --- paho's callbacks, within `turn`

    def _on_connect(self, _client: Any, _data: Any, _flags: Any, reason: Any, properties: Any) -> None:
        self._connack = (reason.value if reason.is_failure else 0, str(reason), properties)

    def _on_disconnect(self, _client: Any, _data: Any, flags: Any, reason: Any, _properties: Any) -> None:
        if flags.is_disconnect_packet_from_server:
            self._end = str(reason), reason.value

    def _on_publish(self, _client: Any, _data: Any, packet_id: int, reason: Any, _properties: Any) -> None:
        number = self._flying.pop(packet_id, None)
        if number is not None:
            self._moved()
            if self._target.qos:
                self.answers[number] = code = reason.value
                if code >= 0x80:
                    self.refused[number] = code
            else:
                self._unproven.append(number)

    def _on_unsubscribe(self, _client: Any, _data: Any, packet_id: int, *_: Any) -> None:
        if packet_id == self._proof:
            self.answers |= dict.fromkeys(self._unproven, 0)
            self._unproven.clear()
            self._proof = None
            self._moved()

    def _moved(self) -> None:
        self._moved_at = self._monotonic()
        self._working()


def _paced(client: Any) -> Any:
    """paho's class, with an attribute `may_send` that says how many bytes its socket takes."""

    class Paced(client):  # type: ignore[misc]
        may_send: Callable[[int], int]

        def _sock_send(self, buf: Any) -> int:
            size = self.may_send(len(buf))
            if not size:
                raise BlockingIOError
            return int(super()._sock_send(buf[:size]))

    return Paced


class _Packed:
    """Encoded properties, for paho. Its own class takes longer than all the rest of a PUBLISH."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def pack(self) -> bytes:
        return self._packed


def packet_size(topic: bytes, payload: bytes, qos: int, properties: bytes) -> int:
    """The bytes of a PUBLISH (3.3)."""
    rest = 2 + len(topic) + (2 if qos else 0) + len(properties) + len(payload)
    return 1 + len(_length(rest)) + rest


def pack_properties(
    user: Sequence[tuple[str, str]] = (),
    *,
    expiry: int | None = None,
    utf8: bool = False,
    content_type: str = "",
    reply: str = "",
    token: bytes = b"",
) -> bytes:
    """The properties of a PUBLISH with their length (5 section 3.3.2.3); `expiry` in seconds.

    Raises ValueError for a string that cannot be encoded.
    """
    parts = []
    if utf8:
        parts.append(b"\x01\x01")
    if expiry is not None:
        parts.append(struct.pack("!BI", 0x02, min(expiry, 0xFFFFFFFF)))
    if content_type:
        parts.append(b"\x03" + _string(content_type.encode()))
    if reply:
        parts.append(b"\x08" + _string(reply.encode()))
    if token:
        parts.append(b"\x09" + _string(token))
    parts += [b"\x26" + _string(name.encode()) + _string(value.encode()) for name, value in user]
    body = b"".join(parts)
    return _length(len(body)) + body


def _string(data: bytes) -> bytes:
    if len(data) > LONGEST:
        raise ValueError(f"a property has {len(data)} bytes; MQTT allows {LONGEST}")
    return len(data).to_bytes(2, "big") + data


def _length(number: int) -> bytes:
    found = bytearray()
    while True:
        number, digit = number >> 7, number & 0x7F
        found.append(digit | (0x80 if number else 0))
        if not number:
            return bytes(found)
