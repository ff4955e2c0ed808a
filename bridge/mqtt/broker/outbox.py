"""What one session is still to be sent: at-least-once delivery to a subscriber.

What it promises (MQTT 3.1.1 sections 4.3 to 4.6): a QoS 1 or 2 message stays here until the subscriber
has acknowledged it, however slowly; when the subscriber comes back, what it had not acknowledged is
sent again in the first order, with DUP, before anything new. At most `in_flight` messages are under way,
and no more than the subscriber takes at a time; beyond them `queued_messages` and `queued_bytes` wait,
then the oldest is dropped and counted.
A QoS 0 message waits here only while the subscriber reads too slowly, and is forgotten when it goes.
Across a restart of the bridge QoS 2 is at least once too: packet ids given out are not kept on disk.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from bridge.mqtt.wire.answers import ack
from bridge.mqtt.wire.packets import PACKET_ID_NOT_FOUND, PROTOCOL_ERROR, PUBREL, SUCCESS, V5, ProtocolError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from bridge.mqtt.broker.line import Line
    from bridge.mqtt.broker.message import Message
    from bridge.mqtt.settings import Limits


class Outgoing:
    """One message for one session."""

    __slots__ = ("identifiers", "message", "number", "qos", "released", "retain")

    def __init__(
        self,
        message: Message,
        qos: int,
        retain: bool = False,
        identifiers: tuple[int, ...] = (),
        number: int = 0,
    ) -> None:
        self.message, self.qos, self.retain, self.identifiers = message, qos, retain, identifiers
        self.number = number  # its name in the journal; 0: not there
        self.released = False  # QoS 2: PUBREC came, PUBREL went


class Outbox:
    """The outgoing half of a session. `settled` is called with each message that need not be kept."""

    __slots__ = (
        "_again", "_bytes", "_counts", "_inflight", "_limits", "_line", "_next_id", "_queue", "settled",
    )  # fmt: skip

    def __init__(self, limits: Limits, counts: Counter[str], settled: Callable[[Outgoing], None]) -> None:
        self._limits, self._counts, self.settled = limits, counts, settled
        self._queue: deque[Outgoing] = deque()
        self._inflight: dict[int, Outgoing] = {}
        self._again: dict[int, Outgoing] = {}  # those of them that this connection has not been sent yet
        self._bytes = self._next_id = 0
        self._line: Line | None = None

    def __len__(self) -> int:
        """How many messages are waiting or under way."""
        return len(self._queue) + len(self._inflight)

    def put(self, out: Outgoing) -> None:
        """Send a message now if it may go, or let it wait."""
        line = self._line
        if line is None:
            if not out.qos:
                return
        elif line.writable and not self._queue and not self._again and (not out.qos or self._room(line)):
            self._send(line, out)
            return
        self._queue.append(out)
        self._bytes += out.message.size
        while len(self._queue) > self._limits.queued_messages or self._bytes > self._limits.queued_bytes:
            self._counts["dropped_queue_full"] += 1
            self.settled(self._pop())

    def attach(self, line: Line) -> None:
        """The session has a connection: send again what it had not acknowledged, then what waits."""
        self._line = line
        self._again = {packet_id: out for packet_id, out in self._inflight.items() if not out.released}
        for packet_id, out in self._inflight.items():
            if out.released:
                line.send(ack(PUBREL, packet_id.to_bytes(2, "big")))
        self.pump()

    def detach(self) -> None:
        """The session lost its connection."""
        self._line = None
        kept = [out for out in self._queue if out.qos]
        self._queue = deque(kept)
        self._bytes = sum(out.message.size for out in kept)

    def pump(self) -> None:
        """Send what may go now."""
        line = self._line
        while line is not None and self._again and line.writable:
            if not self._room(line):
                return
            packet_id = next(iter(self._again))
            self._write(line, self._again.pop(packet_id), packet_id, dup=True)
        while line is not None and self._queue and line.writable:
            if self._queue[0].qos and not self._room(line):
                return
            self._send(line, self._pop())

    def puback(self, packet_id: int) -> None:
        """PUBACK: the subscriber has the message (an unknown id is ignored, as 4.3.2 allows).

        As `pubrec` and `pubcomp` it raises ProtocolError for an id whose message has another QoS.
        """
        self._check(packet_id, 1)
        self._done(packet_id)

    def pubcomp(self, packet_id: int) -> None:
        """PUBCOMP: the subscriber has released the message."""
        self._check(packet_id, 2)
        self._done(packet_id)

    def _check(self, packet_id: int, qos: int) -> None:
        out = self._inflight.get(packet_id)
        if out is not None and out.qos != qos:
            why = (
                f"an acknowledgement of QoS {qos} for packet id {packet_id}, whose message has QoS {out.qos}"
            )
            raise ProtocolError(why, PROTOCOL_ERROR)

    def _done(self, packet_id: int) -> None:
        out = self._inflight.pop(packet_id, None)
        if out is not None:
            self._again.pop(packet_id, None)
            self.settled(out)
            self.pump()

    def pubrec(self, packet_id: int, reason: int) -> None:
        """PUBREC: answer with PUBREL, or forget the message if the subscriber refused it (MQTT 5 4.3.3)."""
        self._check(packet_id, 2)
        out, line = self._inflight.get(packet_id), self._line
        if reason >= 0x80:
            self._done(packet_id)
        elif line is not None:
            if out is not None:
                out.released = True
                self._again.pop(packet_id, None)
            code = SUCCESS if out is not None or line.level != V5 else PACKET_ID_NOT_FOUND
            line.send(ack(PUBREL, packet_id.to_bytes(2, "big"), code))

    def pending(self) -> list[Outgoing]:
        """Everything not yet acknowledged, oldest first."""
        return [*self._inflight.values(), *self._queue]

    def clear(self) -> None:
        """Forget everything: the session has ended."""
        for out in self.pending():
            self.settled(out)
        self._queue.clear()
        self._inflight.clear()
        self._again.clear()
        self._bytes = 0

    def _room(self, line: Line) -> bool:
        return len(self._inflight) - len(self._again) < min(self._limits.in_flight, line.receive_maximum)

    def _pop(self) -> Outgoing:
        out = self._queue.popleft()
        self._bytes -= out.message.size
        return out

    def _send(self, line: Line, out: Outgoing) -> None:
        if out.message.expired():
            self._counts["dropped_expired"] += 1
            self.settled(out)
            return
        packet_id = 0
        if out.qos:
            packet_id = self._next_id = self._free_id()
            self._inflight[packet_id] = out
        self._write(line, out, packet_id, dup=False)

    def _free_id(self) -> int:
        packet_id = self._next_id
        while True:
            packet_id = packet_id % 65_535 + 1
            if packet_id not in self._inflight:
                return packet_id

    def _write(self, line: Line, out: Outgoing, packet_id: int, *, dup: bool) -> None:
        pieces = out.message.packet(
            line.level,
            out.qos,
            retain=out.retain,
            packet_id=packet_id,
            dup=dup,
            identifiers=out.identifiers,
        )
        if sum(map(len, pieces)) > line.max_packet_out:
            # The subscriber cannot take packets of this size (MQTT 5 section 3.1.2.11.4).
            self._counts["dropped_too_large"] += 1
            self._inflight.pop(packet_id, None)
            self.settled(out)
            return
        for piece in pieces:
            line.send(piece)
        self._counts["delivered"] += 1
