"""The outgoing queue of one session: at-least-once delivery to a subscriber.

What it promises (MQTT 3.1.1 sections 4.3 to 4.6): a QoS 1 or 2 message stays here until the subscriber
has acknowledged it, however slowly; when the subscriber comes back, what it had not acknowledged is
sent again in the first order, with DUP, before anything new. At most `in_flight` messages are under way,
and no more than the subscriber takes at a time; beyond them `queued_messages` and `queued_bytes` wait,
then the oldest is dropped and counted. So it is when all sessions together hold too much (`memory`).
A QoS 0 message waits here only while the subscriber reads too slowly, and is forgotten when it goes.

QoS 2 is exactly once, even across a kill of the gateway. For a persistent session, the packet id is in the
journal before its PUBLISH is sent, and the end of the message is there before its PUBREL is sent. The states
of a packet id:

    noted       its record is being written; nothing has been sent
    in flight   PUBLISH may have been sent, and is sent again on the next connection
    settled     PUBREC has arrived, or the client now accepts only smaller packets: the record is being
                written, and PUBLISH is never sent again
    released    PUBREL has been sent, and is sent again on the next connection; PUBCOMP frees the id

QoS 1 has only `in flight`.
"""

from __future__ import annotations

import sys
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol

from bridge.mqtt.broker.memory import NOWHERE, Memory
from bridge.mqtt.wire.answers import ack
from bridge.mqtt.wire.packets import PACKET_ID_NOT_FOUND, PROTOCOL_ERROR, PUBREL, SUCCESS, V5, ProtocolError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Collection

    from bridge.mqtt.broker.line import Line
    from bridge.mqtt.broker.message import Message
    from bridge.mqtt.settings import Limits


NO_LIMIT = 0xFFFF_FFFF  # the Maximum Packet Size of a client that states none
IDLE = (False, False, -1)  # the `Outbox.load` of one that sends at once,
UNFIT = (True, True, sys.maxsize)  # and of one whose client does not accept packets of this size


class Outgoing:
    """One message for one session."""

    __slots__ = ("asked", "identifiers", "message", "noted", "number", "qos", "retain", "sent", "share")

    def __init__(
        self,
        message: Message,
        qos: int,
        retain: bool = False,
        identifiers: tuple[int, ...] = (),
        number: int = 0,
        share: str = "",
        *,
        asked: bool = False,
    ) -> None:
        self.message, self.qos, self.retain, self.identifiers = message, qos, retain, identifiers
        self.number = number  # its name in the journal; 0: not there
        self.share = share  # the shared subscription that it came by; empty: an ordinary one
        self.asked = asked  # it answers a request: to receive it takes no right
        self.noted = qos < 2  # its packet id is in the journal, if it has to be
        self.sent = False


class Notes(Protocol):
    """The notes of a session's outbox, which the next start reads."""

    def settled(self, out: Outgoing) -> None:
        """A message need no longer be kept."""

    def sending(self, packet_id: int, out: Outgoing, then: Callable[[], None]) -> None:
        """A QoS 2 message gets this packet id. `then` is called once that is kept."""

    def releasing(self, then: Callable[[], None]) -> None:
        """Call `then` once the journal has all messages settled so far."""

    def freed(self, packet_id: int) -> None:
        """A QoS 2 packet id is no longer in use."""


class Outbox:
    """The outgoing half of a session."""

    __slots__ = (
        "_again", "_bytes", "_counts", "_free", "_inflight", "_limits", "_line", "_memory", "_next_id",
        "_notes", "_queue", "_released", "_withdrawn", "held",
    )  # fmt: skip

    def __init__(self, limits: Limits, counts: Counter[str], notes: Notes, memory: Memory) -> None:
        """`memory` counts what all sessions hold; `held` is the part of this one, messages and all else."""
        self._limits, self._counts, self._notes = limits, counts, notes
        self._memory = memory
        self.held = 0
        self._queue: deque[Outgoing] = deque()
        self._inflight: dict[int, Outgoing] = {}
        self._again: dict[int, Outgoing] = {}  # of these, the ones to resend on this connection
        self._released: dict[int, bool] = {}  # QoS 2 ids after PUBREC; whether PUBREL may be sent
        self._withdrawn: tuple[tuple[int, Outgoing], ...] = ()  # in flight, and not to be sent again
        self._bytes = self._next_id = 0
        self._line: Line | None = None
        self._free: Callable[[], object] | None = None

    def __len__(self) -> int:
        """Return how many messages wait, or are in flight and not received."""
        return len(self._queue) + len(self._inflight)

    @property
    def size(self) -> int:
        """Return roughly the bytes of the waiting messages."""
        return self._bytes

    def recount(self) -> tuple[int, int]:
        """Add up the bytes of what waits, as `size` must be, and of what is in flight."""
        waiting, flying = self._queue, self._inflight.values()
        return sum(out.message.size for out in waiting), sum(out.message.size for out in flying)

    def hold(self, size: int) -> None:
        """The session holds so many bytes more in memory; a negative number: less."""
        self.held += size
        self._memory.take(size)

    def restore(self, out: Outgoing, packet_id: int) -> None:
        """Restore a message that an earlier process may have sent, at QoS 2 with this packet id."""
        out.noted = out.sent = True
        self._inflight[packet_id] = out
        self.hold(out.message.size)

    def restore_released(self, packet_id: int) -> None:
        """Restore the packet id of a QoS 2 message that need not be sent again."""
        self._released[packet_id] = True

    def release_all(self) -> None:
        """Release all QoS 2 packet ids, any of which an earlier process may have used for lost messages."""
        for packet_id in range(1, self._limits.in_flight + 1):
            if packet_id not in self._inflight:
                self._released.setdefault(packet_id, True)

    def restore_queue(self, outs: Collection[Outgoing]) -> None:
        """Restore messages that waited, or were in flight at QoS 1, oldest first.

        Those for which the queue has no room were in flight.
        """
        for out in outs:
            self._enqueue(out)
        while self._is_too_full():
            if self._queue[0].qos == 1 and len(self._inflight) + len(self._released) < self._limits.in_flight:
                self.restore(self._pop(), self._free_id(1))
            else:
                self.drop_oldest()

    def put(self, out: Outgoing) -> None:
        """Send a message now if possible, or queue it."""
        line = self._line
        if line is None:
            if not out.qos:
                return
        elif line.writable and not self._queue and not self._again and (not out.qos or self._room(line)):
            self._send(line, out)
            return
        self._enqueue(out)
        while self._is_too_full():
            self.drop_oldest()

    def _enqueue(self, out: Outgoing) -> None:
        self._queue.append(out)
        self._bytes += out.message.size
        self.hold(out.message.size)

    def _is_too_full(self) -> bool:
        return len(self._queue) > self._limits.queued_messages or self._bytes > self._limits.queued_bytes

    def drop_oldest(self) -> None:
        """Drop the message that has waited for longest."""
        self._counts["dropped_queue_full"] += 1
        self._notes.settled(self._pop())

    def load(self, out: Outgoing) -> tuple[bool, bool, int] | None:
        """Return how busy it is, to choose the least busy one for a message: `IDLE` is least, `UNFIT` most.

        In between: whether its queue is full, whether its client is disconnected, the number of its messages.
        None if the client is away and the message has QoS 0.
        """
        line = self._line
        if line is None:
            if not out.qos:
                return None
        elif line.max_packet_out < NO_LIMIT and self._too_large(line, out):
            return UNFIT
        elif line.writable and not self._queue and not self._again and (not out.qos or self._room(line)):
            return IDLE  # repeats the test of `put`, because a call would cost too much
        limits, size = self._limits, self._bytes + out.message.size
        full = len(self._queue) >= limits.queued_messages or size > limits.queued_bytes
        return full, line is None, len(self)

    def unreadable(self, may_read: Callable[[str], bool]) -> list[Outgoing]:
        """What would be sent, or sent again, and may be read no longer.

        What is in flight on this connection counts against its Receive Maximum, and is withdrawn with it.
        """
        may: dict[bytes, bool] = {}

        def is_unreadable(out: Outgoing) -> bool:
            topic = out.message.topic
            if topic not in may:
                may[topic] = may_read(topic.decode())
            return not (may[topic] or out.asked)

        flying = self._inflight if self._line is None else self._again
        found = list(filter(is_unreadable, (*flying.values(), *self._queue)))
        if self._line is not None:
            sent = [one for one in self._inflight.items() if one[0] not in self._again]
            self._withdrawn = tuple(one for one in sent if is_unreadable(one[1]))
        return found

    def remove(self, outs: Collection[Outgoing]) -> None:
        """Take messages out of the queue, and those that would be sent again."""
        gone = set(map(id, outs))
        for packet_id, out in list(self._inflight.items()):
            if id(out) in gone:
                gone.discard(id(out))
                self._take_back(packet_id, out)
        kept = deque[Outgoing]()
        for out in self._queue:
            if id(out) in gone:
                self._bytes -= out.message.size
                self.hold(-out.message.size)
                self._notes.settled(out)
            else:
                kept.append(out)
        self._queue = kept

    def _take_back(self, packet_id: int, out: Outgoing) -> None:
        """Never send a message again. Its receiver may have it, and must forget a QoS 2 id first."""
        self._again.pop(packet_id, None)
        if out.sent and out.qos == 2:
            self.pubrec(packet_id, SUCCESS)
            return
        del self._inflight[packet_id]
        self.hold(-out.message.size)
        self._forget(packet_id, out)

    def attach(self, line: Line) -> None:
        """Use a new connection: resend unacknowledged messages, then send waiting ones."""
        self._line = line
        for packet_id, out in self._withdrawn:
            if self._inflight.get(packet_id) is out:
                self._counts["dropped_unreadable"] += 1
                self._take_back(packet_id, out)
        self._withdrawn = ()
        self._again = {packet_id: out for packet_id, out in self._inflight.items() if out.noted}
        for packet_id, kept in self._released.items():
            if kept:
                line.send(ack(PUBREL, packet_id.to_bytes(2, "big")))
        self.pump()

    def detach(self) -> None:
        """Stop, because the session has lost its connection."""
        self._line = None
        kept = [out for out in self._queue if out.qos]
        self._queue = deque(kept)
        self.hold(-self._bytes)
        self._bytes = sum(out.message.size for out in kept)
        self.hold(self._bytes)

    def pump(self) -> None:
        """Send the messages that may be sent now."""
        line = self._line
        while line is not None and self._again and line.writable:
            if not self._room(line):
                return
            packet_id = next(iter(self._again))
            self._write(line, self._again.pop(packet_id), packet_id)
        while line is not None and self._queue and line.writable:
            if self._queue[0].qos and not self._room(line):
                return
            self._send(line, self._pop())
        if self._free is not None and line is not None and not self._queue:
            free, self._free = self._free, None
            free()

    def takes(self, qos: int) -> bool:
        """Return whether it would send a message of this QoS at once."""
        line = self._line
        return (
            line is not None
            and line.writable
            and not self._queue
            and not self._again
            and (not qos or self._room(line))
        )

    def when_free(self, do: Callable[[], object]) -> None:
        """Call `do` once, when the client is there and something has left the queue or been acknowledged."""
        self._free = do

    def puback(self, packet_id: int) -> None:
        """PUBACK: the subscriber has the message (an unknown id is ignored, as 4.3.2 allows).

        Like `pubrec` and `pubcomp`, raises ProtocolError for an id whose message has another QoS.
        """
        self._check(packet_id, 1)
        self._done(packet_id)

    def pubcomp(self, packet_id: int) -> None:
        """PUBCOMP: the subscriber has freed the packet id."""
        self._check(packet_id, 2)
        if self._released.pop(packet_id, None) is None:
            self._done(packet_id)
        else:
            self._notes.freed(packet_id)
            self.pump()

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
            size = out.message.size  # as `hold`; each call would cost as much as this
            self.held -= size
            self._memory.total -= size
            self._forget(packet_id, out)
            self.pump()

    def _forget(self, packet_id: int, out: Outgoing) -> None:
        self._notes.settled(out)
        if out.qos == 2:
            self._notes.freed(packet_id)

    def pubrec(self, packet_id: int, reason: int) -> None:
        """PUBREC: answer with PUBREL, or forget the message if the subscriber refused it (MQTT 5 4.3.3)."""
        self._check(packet_id, 2)
        line = self._line
        if reason >= 0x80:
            self._done(packet_id)
        elif packet_id in self._inflight:
            self._again.pop(packet_id, None)
            self._released[packet_id] = False
            out = self._inflight.pop(packet_id)
            self.hold(-out.message.size)
            self._notes.settled(out)
            self._notes.releasing(partial(self._release, packet_id))
        elif line is not None and self._released.get(packet_id, True):
            known = packet_id in self._released or line.level != V5
            line.send(ack(PUBREL, packet_id.to_bytes(2, "big"), SUCCESS if known else PACKET_ID_NOT_FOUND))

    def _release(self, packet_id: int) -> None:
        """The journal has the end of the message: send PUBREL."""
        if packet_id in self._released:
            self._released[packet_id] = True
            if self._line is not None:
                self._line.send(ack(PUBREL, packet_id.to_bytes(2, "big")))

    def pending(self) -> list[Outgoing]:
        """Return all messages that are not acknowledged yet, oldest first."""
        return [*self._inflight.values(), *self._queue]

    def ids(self) -> list[tuple[int, int]]:
        """Return the QoS 2 packet ids in use, in order, with the numbers of their messages; 0: none."""
        flying = [(packet_id, out.number) for packet_id, out in self._inflight.items() if out.qos == 2]
        return [*flying, *((packet_id, 0) for packet_id in self._released)]

    def shared(self) -> list[Outgoing]:
        """Return messages that other members of a shared subscription may get; not sent QoS 2 ones."""
        return [out for out in self.pending() if out.share and not (out.sent and out.qos == 2)]

    def clear(self) -> None:
        """Forget everything: the session has ended, and holds nothing from now on."""
        self.hold(-self.held)
        self._memory = NOWHERE
        for out in self.pending():
            self._notes.settled(out)
        self._queue.clear()
        self._inflight.clear()
        self._again.clear()
        self._released.clear()
        self._bytes = 0
        self._free = None

    def _too_large(self, line: Line, out: Outgoing) -> bool:
        """Return whether the packet of a message is larger than the client accepts."""
        pieces = out.message.packet(line.level, out.qos, packet_id=1, identifiers=out.identifiers)
        return sum(map(len, pieces)) > line.max_packet_out

    def _room(self, line: Line) -> bool:
        under_way = len(self._inflight) - len(self._again) + len(self._released)
        return under_way < min(self._limits.in_flight, line.receive_maximum)

    def _pop(self) -> Outgoing:
        out = self._queue.popleft()
        self._bytes -= out.message.size
        self.hold(-out.message.size)
        return out

    def _send(self, line: Line, out: Outgoing) -> None:
        if out.message.expired():
            self._counts["dropped_expired"] += 1
            self._notes.settled(out)
            return
        if out.qos == 2 and line.max_packet_out < NO_LIMIT and self._too_large(line, out):
            self._counts["dropped_too_large"] += 1  # before it takes the place of another one
            self._notes.settled(out)
            return
        packet_id = 0
        if out.qos:
            packet_id = self._free_id(out.qos)
            self._inflight[packet_id] = out
            size, memory = out.message.size, self._memory
            self.held += size
            memory.total += size
            if memory.total > memory.limit:
                memory.exceeded()
        if out.qos < 2:
            self._write(line, out, packet_id)
        else:
            self._notes.sending(packet_id, out, partial(self._noted, packet_id, out))

    def _noted(self, packet_id: int, out: Outgoing) -> None:
        """The journal has the message's packet id: send it."""
        if self._inflight.get(packet_id) is not out:
            return
        out.noted = True
        line = self._line
        if self._again:
            self._again[packet_id] = out  # in order
            self.pump()
        elif line is not None:
            self._write(line, out, packet_id)

    def _free_id(self, qos: int) -> int:
        packet_id = self._next_id if qos == 1 else 0
        while True:
            packet_id = packet_id % 65_535 + 1
            if packet_id not in self._inflight and packet_id not in self._released:
                break
        if qos == 1:
            self._next_id = packet_id
        return packet_id

    def _write(self, line: Line, out: Outgoing, packet_id: int) -> None:
        pieces = out.message.packet(
            line.level,
            out.qos,
            retain=out.retain,
            packet_id=packet_id,
            dup=out.sent,
            identifiers=out.identifiers,
        )
        size = sum(map(len, pieces))
        if size > line.max_packet_out:
            # The subscriber does not accept packets of this size (MQTT 5 section 3.1.2.11.4).
            self._counts["dropped_too_large"] += 1
            if out.sent and out.qos == 2:
                self.pubrec(packet_id, SUCCESS)  # it may have the message, and must forget the id first
                return
            if self._inflight.pop(packet_id, None) is not None:
                self.hold(-out.message.size)
            self._forget(packet_id, out)
            return
        out.sent = out.qos > 0
        for piece in pieces:
            line.send(piece)
        self._counts["delivered"] += 1
        self._counts["delivered_bytes"] += size
