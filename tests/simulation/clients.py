"""MQTT clients of the simulated network: devices that publish, and subscribers that stay away at times.

A client never forgets what it has sent and nobody has acknowledged: it sends it again, in order, when it is
back (MQTT 3.1.1 section 4.4). It notes what it sent on which connection, and what was acknowledged when;
`checks` reads that.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import NamedTuple

from .kernel import Kernel
from .loop import Link

ADDRESS = ("127.0.0.1", 1883)
HERE, ELSEWHERE = ("127.0.0.1", 40001), ("10.0.0.1", 40000)  # whence a client connects
WINDOW = 60  # messages in flight
POISON = b"poison "  # in a payload that Kinesis never takes
WILL_TOPIC, WILL_DELAY = "live/1/will", 1  # s


class Message:
    """What a client publishes."""

    __slots__ = (
        "acked", "client", "expiry", "number", "payload", "pid", "qos", "received", "refused", "retain",
        "sent", "topic",
    )  # fmt: skip

    def __init__(
        self, client: str, number: int, topic: str, payload: bytes, qos: int, *, expiry: int, retain: bool
    ) -> None:
        self.client, self.number, self.topic, self.payload, self.qos = client, number, topic, payload, qos
        self.expiry = expiry  # s; 0: none
        self.retain = retain
        self.pid = 0
        self.sent: list[float] = []  # when
        self.received: float | None = None  # when PUBREC came, for QoS 2
        self.acked: float | None = None  # when PUBACK or PUBREC came
        self.refused = False  # with a reason code


class Will:
    """What the broker is to publish if a connection ends without a DISCONNECT, and the client stays away."""

    __slots__ = ("back", "left", "payload", "politely", "withdrawn")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.left: float | None = None
        self.back: float | None = None
        self.politely = False
        self.withdrawn = False  # its client's password has changed before it was due


class Packet(NamedTuple):
    """A packet: its type, its flags, and the rest."""

    kind: int
    flags: int
    body: bytes


CONNECT, CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBSCRIBE, SUBACK = 1, 2, 3, 4, 5, 6, 7, 8, 9
DISCONNECT = 14


def _length(size: int) -> bytes:
    made = bytearray()
    while True:
        size, digit = divmod(size, 128)
        made.append(digit | 0x80 if size else digit)
        if not size:
            return bytes(made)


def _packet(kind: int, flags: int, body: bytes) -> bytes:
    return bytes([kind << 4 | flags]) + _length(len(body)) + body


def _text(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(2, "big") + data


def _packets(buffer: bytearray) -> list[Packet]:
    """Take whole packets from the front of what has arrived."""
    found = []
    while len(buffer) >= 2:
        size, shift, at = 0, 0, 1
        while at < len(buffer):
            digit = buffer[at]
            size |= (digit & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if not digit & 0x80:
                break
        else:
            break
        if len(buffer) < at + size:
            break
        found.append(Packet(buffer[0] >> 4, buffer[0] & 15, bytes(buffer[at : at + size])))
        del buffer[: at + size]
    return found


class Client:
    """One MQTT client; `start` makes it connect, and again whenever it has lost its connection."""

    def __init__(
        self, kernel: Kernel, name: str, random: Random, *, v5: bool, clean: bool, user: str = "",
        password: str = "", expiry: int = 65_536, wills: bool = False, peer: tuple[str, int] = ELSEWHERE,
    ) -> None:  # fmt: skip
        """`clean` asks for a new session with each connection.

        With MQTT 5, a session outlives its connection by `expiry` s, and `wills` gives each connection one.
        """
        self.kernel, self.name, self._random, self.v5, self.clean = kernel, name, random, v5, clean
        self.user, self.password, self.peer = user, password, peer
        self.link: Link | None = None
        self.connected = False
        self.away = True  # stays away until `start`
        self._buffer = bytearray()
        self._pid = 0
        self._attempts = 0
        self._vain = 0  # connections in a row on which nothing was acknowledged
        self.connections = 0
        self.session_present = False
        self.expiry = expiry
        self.left: float | None = None  # when its last connection ended
        self.spans: list[tuple[float, float]] = []  # from when to when it was connected
        self.wills: list[Will] | None = [] if wills and v5 else None
        self._asleep = False
        self.low_ids = False

    def sleep(self) -> None:
        """Nothing listens, for a long time: do not even try."""
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False
        if not self.away and self.link is None:
            self._again()

    def start(self) -> None:
        if self.away:
            self.away = False
            self._attempts += 1
            self._connect(self._attempts)

    def leave(self, *, politely: bool) -> None:
        """Go away, with a DISCONNECT or without."""
        self.away = True
        if self.link is not None:
            if politely and self.connected:
                if self.wills:
                    self.wills[-1].politely = True
                self.link.send(_packet(DISCONNECT, 0, b""))
                self.link.finish()
            else:
                self.link.close()
        self._gone()

    def drop(self) -> None:
        """The connection breaks; it comes back."""
        if self.link is not None:
            self.link.close()
            self._lost()

    def _connect(self, attempt: int) -> None:
        if self.away or self._asleep or self.link is not None or attempt != self._attempts:
            return
        try:
            link: Link | None = None
            link = Link(
                self.kernel, ADDRESS, lambda data: self._receive(link, data), lambda: self._lost_link(link),
                self.peer,
            )  # fmt: skip
        except ConnectionRefusedError:
            self._again()
            return
        self.link = link
        flags = (2 if self.clean else 0) | (0xC0 if self.user else 0)
        flags |= 0 if self.wills is None else 0x0C  # of QoS 1
        body = _text("MQTT") + bytes([5 if self.v5 else 4, flags]) + b"\0\0"
        if self.v5:
            body += b"\0" if self.clean else b"\x05\x11" + self.expiry.to_bytes(4, "big")
        body += _text(self.name)
        if self.wills is not None:
            will = Will(f"will of {self.name} {len(self.wills)}".encode())
            self.wills.append(will)
            body += b"\x05\x18" + WILL_DELAY.to_bytes(4, "big") + _text(WILL_TOPIC)
            body += _text(will.payload.decode())
        if self.user:
            body += _text(self.user) + _text(self.password)
        link.send(_packet(CONNECT, 0, body))

    def _again(self) -> None:
        self._attempts += 1
        longer = 2 ** min(max(self._vain - 3, 0), 5)
        self.kernel.later(
            (0.005 + self._random.random() * 0.05) * longer, None, self._connect, self._attempts
        )

    def _lost_link(self, link: Link | None) -> None:
        if link is self.link:
            self._lost()

    def _lost(self) -> None:
        self._gone()
        if not self.away:
            self._again()

    def _gone(self) -> None:
        if self.connected:
            self.left = self.kernel.now
            self.spans[-1] = self.spans[-1][0], self.left
            if self.wills:
                self.wills[-1].left = self.left
        self.link, self.connected = None, False
        self._buffer.clear()

    def _receive(self, link: Link | None, data: bytes) -> None:
        if link is not self.link:
            return
        self._buffer += data
        for packet in _packets(self._buffer):
            if packet.kind == CONNACK:
                if packet.body[1]:
                    assert self.link is not None
                    self.link.close()
                    self._lost()
                    return
                self.connected = True
                self.connections += 1
                self._vain += 1
                self.spans.append((self.kernel.now, float("inf")))
                self.session_present = bool(packet.body[0])
                for will in (self.wills or ())[:-1]:
                    will.back = will.back or self.kernel.now
                self.ready()
            else:
                self.handle(packet)
            if self.link is None:
                return

    def send(self, kind: int, flags: int, body: bytes) -> None:
        assert self.link is not None
        self.link.send(_packet(kind, flags, body))

    def next_pid(self, used: set[int]) -> int:
        """The next packet id that is not in use, or the lowest one, as small clients take it."""
        if self.low_ids:
            return next(pid for pid in range(1, 65536) if pid not in used)
        while True:
            self._pid = self._pid % 65535 + 1
            if self._pid not in used:
                return self._pid

    def ready(self) -> None:
        """The session is there."""

    def handle(self, packet: Packet) -> None:
        """A packet has come."""

    def served(self) -> None:
        """Something was acknowledged."""
        self._vain = 0


class Device(Client):
    """Publishes. What it could not get rid of on one connection it sends on the next."""

    def __init__(self, kernel: Kernel, name: str, random: Random, *, v5: bool, user: str = "",
                 password: str = "") -> None:  # fmt: skip
        super().__init__(kernel, name, random, v5=v5, clean=False, user=user, password=password, wills=True)
        self.queue: deque[Message] = deque()
        self.flying: dict[int, Message] = {}  # by packet id, in order
        self.messages: list[Message] = []

    def publish(
        self, topic: str, payload: bytes, qos: int, *, expiry: int = 0, retain: bool = False
    ) -> Message:
        number, expiry = len(self.messages), expiry if self.v5 else 0
        message = Message(self.name, number, topic, payload, qos, expiry=expiry, retain=retain)
        self.messages.append(message)
        self.queue.append(message)
        self._pump()
        return message

    @property
    def idle(self) -> bool:
        return not self.queue and not self.flying

    def ready(self) -> None:
        for message in self.flying.values():
            # Also if a power cut has taken the session: PUBREL of an id that is not in use is answered.
            if message.received is not None:
                self.send(PUBREL, 2, message.pid.to_bytes(2, "big"))
            else:
                self._send(message, again=True)
        self._pump()

    def _pump(self) -> None:
        while self.connected and self.queue and len(self.flying) < WINDOW:
            message = self.queue.popleft()
            if message.qos:
                message.pid = self.next_pid(set(self.flying))
                self.flying[message.pid] = message
            self._send(message, again=False)

    def _send(self, message: Message, *, again: bool) -> None:
        message.sent.append(self.kernel.now)
        body = _text(message.topic)
        if message.qos:
            body += message.pid.to_bytes(2, "big")
        if self.v5:
            body += b"\5\2" + message.expiry.to_bytes(4, "big") if message.expiry else b"\0"
        flags = message.qos << 1 | (8 if again and message.qos else 0) | message.retain
        self.send(PUBLISH, flags, body + message.payload)

    def handle(self, packet: Packet) -> None:
        pid = int.from_bytes(packet.body[:2], "big")
        message = self.flying.get(pid)
        reason = packet.body[2] if len(packet.body) > 2 else 0
        if packet.kind == PUBACK and message is not None and message.qos == 1:
            del self.flying[pid]
            if reason >= 0x80:
                message.refused = True
            else:
                message.acked = self.kernel.now
                self.served()
        elif packet.kind == PUBREC and message is not None and message.qos == 2:
            if reason >= 0x80:
                del self.flying[pid]
                message.refused = True
            else:
                message.received = self.kernel.now
                if message.acked is None:
                    message.acked = self.kernel.now
                    self.served()
                self.send(PUBREL, 2, packet.body[:2])
        elif packet.kind == PUBCOMP and message is not None and message.received is not None:
            del self.flying[pid]
        elif packet.kind == DISCONNECT:
            return
        self._pump()


class Got(NamedTuple):
    """A message that a subscriber has got."""

    at: float
    qos: int
    payload: bytes
    expiry: int  # s that were left; 0 if nothing was said


class Subscriber(Client):
    """Subscribes once, with a session that stays; notes what it gets."""

    def __init__(self, kernel: Kernel, name: str, random: Random, filters: list[tuple[str, int]], *, v5: bool,
                 expiry: int) -> None:  # fmt: skip
        super().__init__(kernel, name, random, v5=v5, clean=False, expiry=expiry)
        self._filters = filters
        self.subscribed_at: float | None = None
        self.first: float | None = None  # when it subscribed for the first time
        self.got: list[Got] = []
        self._held: dict[int, bytes] = {}  # QoS 2: packet ids whose PUBREL has not come
        # When it came back and had left, whether its session was still there, and since when there was one.
        self.returns: list[tuple[float, float, bool, float]] = []

    def ready(self) -> None:
        if self.left is not None and self.subscribed_at is not None:
            since = self.subscribed_at
            self.returns.append((self.kernel.now, self.left, self.session_present, since))
        if not self.session_present:
            self._held.clear()
            self.subscribed_at = None
        if self.subscribed_at is None:  # also if the connection was lost before SUBACK
            body = b"\0\1" + (b"\0" if self.v5 else b"")
            for name, qos in self._filters:
                body += _text(name) + bytes([qos])
            self.send(SUBSCRIBE, 2, body)

    def handle(self, packet: Packet) -> None:
        if packet.kind == SUBACK:
            self.subscribed_at = self.kernel.now
            self.first = self.first or self.kernel.now
        elif packet.kind == PUBLISH:
            self._published(packet)
        elif packet.kind == PUBREL:
            self._held.pop(int.from_bytes(packet.body[:2], "big"), None)
            self.send(PUBCOMP, 0, packet.body[:2])

    def _published(self, packet: Packet) -> None:
        qos, body = packet.flags >> 1 & 3, packet.body
        at = 2 + int.from_bytes(body[:2], "big")
        pid = body[at : at + 2]
        at += 2 if qos else 0
        expiry = 0
        if self.v5:
            if body[at] and body[at + 1] == 2:
                expiry = int.from_bytes(body[at + 2 : at + 6], "big")
            at += 1 + body[at]
        got = Got(self.kernel.now, qos, body[at:], expiry)
        if qos == 2:
            number = int.from_bytes(pid, "big")
            if number not in self._held:
                self._held[number] = got.payload
                self.got.append(got)
            self.send(PUBREC, 0, pid)
        else:
            self.got.append(got)
            if qos:
                self.send(PUBACK, 0, pid)
