"""Handles all reads of one turn of the event loop together.

A thousand devices with one message in flight each cause a thousand small reads in a turn. Nearly all of them
are one PUBLISH at QoS 1 that takes one append. One loop here handles those; `Connection.read` handles
everything else. After the loop, all appends are committed together, and a second loop sends the answers. So
checks and counters that one turn needs once are not repeated for each message.

What it promises:
* The reads of a connection are handled in their order, and before the loss of the connection.
* Little waits here: a read of more than `SMALL` bytes is handled at once, after those that wait, as far as
  there is time for it in this turn (`net.turns`).
* A read that fails ends its own connection and no other.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Protocol

from bridge.errors import StreamError
from bridge.mqtt.broker.inbox import Batch, Lot
from bridge.mqtt.server.polling import Polling
from bridge.mqtt.server.states import OPEN
from bridge.mqtt.wire.packets import PUBLISH, V5, Publish
from bridge.net.flow import Flow

if TYPE_CHECKING:
    from bridge.mqtt.broker.broker import Broker
    from bridge.mqtt.broker.inbox import Inbox
    from bridge.mqtt.broker.router import Route
    from bridge.mqtt.broker.store import Committer, Stream
    from bridge.mqtt.server.metering import Metering
    from bridge.mqtt.server.states import State
    from bridge.mqtt.server.traffic import Traffic
    from bridge.net.turns import Who
    from bridge.runtime import Runtime

SMALL = 2_048  # bytes; a turn has at most 1,000 reads
PLAIN = PUBLISH | 2  # the first byte of a PUBLISH at QoS 1, without DUP and RETAIN

log = logging.getLogger(__name__)


class Source(Flow):
    """The part of a connection that the loop uses; `Connection` is the whole.

    With a thousand connections, most of the time of a message is the wait for memory. So these attributes lie
    next to each other, apart from those that the loop does not use.
    """

    __slots__ = (
        "before", "epoch", "heard", "inbox", "level", "limit", "metering", "pays", "published", "reads",
        "routes", "state", "stream", "tail", "topic", "traffic",
    )  # fmt: skip
    state: State
    tail: bytes | bytearray  # read but not yet handled
    heard: float  # time of the last read
    before: float  # time of the read before that
    limit: int  # bytes of a packet
    level: int
    routes: dict[bytes, Route]  # of the router's `epoch`
    topic: bytes  # a topic of which a PUBLISH takes one append, to this stream:
    stream: Stream | None
    epoch: int
    published: int  # messages that the client has sent
    inbox: Inbox
    metering: Metering
    pays: bool  # whether a budget limits its rate
    reads: Reads
    traffic: Traffic

    @property
    def name(self) -> str:
        """The client's name in the log."""
        raise NotImplementedError

    @property
    def turn(self) -> Who:
        """Who it takes turns as."""
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        reads = self.reads
        if len(data) > SMALL or self.state is not OPEN:
            reads.run()
            self.before, self.heard = self.heard, reads.now()
            turns = reads.turns
            if turns.over and not self.holds:
                turns.wait(self)
            if self.holds:
                self.read(data)
                return
            turns.slices += 1
            began = turns.begin()
            self.read(data)
            turns.spend(began)
            return
        if not reads.waiting:
            reads.begin()
        reads.waiting.append((self, data))

    def read(self, data: bytes) -> None:
        """Handle bytes from the socket."""
        raise NotImplementedError

    def fail(self, counter: str, why: str, reason: int, told: str = "") -> None:
        """Close, after a DISCONNECT with the reason."""
        raise NotImplementedError

    def end(self, counter: str, why: str, *, abort: bool = False) -> None:
        """Close without telling the client."""
        raise NotImplementedError


class Pressure(Protocol):
    """Tells whether publishers must wait, because too much data waits for the disk."""

    under_pressure: bool


class Reads:
    """The small reads of this turn that wait."""

    def __init__(self, broker: Broker, runtime: Runtime, traffic: Traffic, pressure: Pressure) -> None:
        self._broker, self._router, self._traffic, self._pressure = broker, broker.router, traffic, pressure
        self.now, self.begin = runtime.now, partial(runtime.soon, self.run)
        self.waiting: list[tuple[Source, bytes]] = []
        self._polling = Polling(runtime.soon)
        self.turns = broker.turns

    def run(self) -> None:
        """Handle what waits, and commit its appends."""
        if self.waiting:
            reads, self.waiting = self.waiting, []
            lots: dict[Committer, Lot] = {}
            self._broker.store.gather(partial(self._handle, reads, lots))
            alone = len(reads) == 1 and not any(lot.waiting for lot in lots.values())
            self._polling.answered(id(reads[0][0]) if alone else 0)

    def _handle(self, reads: list[tuple[Source, bytes]], lots: dict[Committer, Lot]) -> None:
        router, pressure, now = self._router, self._pressure, self.now()
        count = size = 0
        for conn, data in reads:
            conn.before = conn.heard
            conn.heard = now
            try:
                if conn.tail or conn.holds or pressure.under_pressure or conn.state is not OPEN:
                    conn.read(data)
                    continue
                # Parse it as one plain PUBLISH. If anything does not fit, `read` handles it.
                at, length, version = 4, len(data) - 2, conn.level
                if data[0] != PLAIN or length < 6:
                    conn.read(data)
                    continue
                said = data[1]
                if said > 0x7F:  # a remaining length of two bytes
                    at, length, said = 5, length - 1, said + (data[2] - 1 << 7)
                start = at
                at += data[start - 2] << 8 | data[start - 1]
                topic, end = data[start:at], at + 2
                packet_id = data[at:end]
                if topic == conn.topic:
                    stream = conn.stream
                else:
                    route = conn.routes.get(topic)
                    stream = None if route is None or route.append is None else route.stream
                    if stream is not None:
                        conn.topic, conn.stream = topic, stream
                if version == V5:
                    end += 1
                if (
                    stream is None
                    or said != length
                    or length > conn.limit
                    or end > len(data)
                    or (version == V5 and data[end - 1])
                    or packet_id == b"\0\0"
                    or conn.epoch != router.epoch
                ):
                    conn.read(data)
                    continue
                count += 1
                size += len(data)
                conn.published += 1
                try:
                    stream.append(topic, data[end:])
                except StreamError as error:
                    batch = Batch(conn.inbox)
                    self._broker.refused(batch, Publish(PLAIN, topic, packet_id, data[end:]), error)
                    conn.inbox.put(batch)
                else:
                    lot = lots.get(stream)
                    if lot is None or not lot.waiting:
                        lots[stream] = lot = Lot()
                        stream.after_commit(lot.committed, conn.before)
                    conn.inbox.add(lot, b"\x40\x02" + packet_id)
                if conn.pays:
                    conn.metering.pay(conn, 1, len(data))
            except Exception as error:
                log.exception("internal error with what a client has sent")
                conn.end("protocol_errors", f"internal error: {error!r}", abort=True)
        self._traffic.published += count
        self._traffic.received_bytes += size
