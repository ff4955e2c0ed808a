"""How and when a connection's packets are answered: the incoming half. `outbox` is the outgoing half.

What it promises: acknowledgements are sent in the order of the packets (MQTT 3.1.1 section 4.6), each after
the commit of all streams to which its message went. Every read from the socket makes one `Batch`, and batches
are answered first in, first out. When a commit fails, neither its messages nor any later ones are
acknowledged, and the connection is closed.

A QoS 2 id goes to the journal after that commit. If the journal had the id of a message that no stream has,
the message would be lost. Ids of sessions that are not persistent are recorded too. Otherwise the next start
would assign such an id to the client's next session, and take a new message for a duplicate.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import msgspec

from bridge.errors import (
    InvalidRequest,
    MessageTooLarge,
    NoStream,
    RetainedFull,
    StorageFailed,
    StreamBridgeError,
    StreamError,
    StreamFull,
    Unauthorized,
)
from bridge.mqtt.broker.replay import QUEUES, Partial, Unstored
from bridge.mqtt.wire.packets import (
    BAD_TOPIC_NAME,
    IMPLEMENTATION_ERROR,
    NOT_AUTHORIZED,
    QUOTA_EXCEEDED,
    UNSPECIFIED,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bridge.mqtt.broker.journal import Journal
    from bridge.mqtt.broker.line import Line
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.broker.store import Committer, Stream
    from bridge.mqtt.wire.packets import Publish

_NOTHING: deque[Batch | Single] = deque()  # shared, and never added to
UNSENT_BATCHES = 1_000  # reads that may wait for their commit before reading is paused

# Error, suffix of the counter, and an MQTT 5 reason code that PUBACK, PUBREC and DISCONNECT may have.
_REASONS: tuple[tuple[type[StreamBridgeError], str, int], ...] = (
    (NoStream, "no_stream", BAD_TOPIC_NAME),
    (StreamFull, "full", QUOTA_EXCEEDED),
    (MessageTooLarge, "too_large", QUOTA_EXCEEDED),  # a limit of the stream; 0x95 may not be here
    (StorageFailed, "storage", IMPLEMENTATION_ERROR),
    (Unauthorized, "not_allowed", NOT_AUTHORIZED),
    (RetainedFull, "retained", QUOTA_EXCEEDED),
    (InvalidRequest, "invalid", IMPLEMENTATION_ERROR),  # an invalid message id
    (StreamBridgeError, "other", UNSPECIFIED),
)


def reason_of(error: StreamBridgeError) -> tuple[str, int]:
    """Return the suffix of the counter, and the MQTT 5 reason code, for a message that is not stored."""
    return next((kind, code) for cls, kind, code in _REASONS if isinstance(error, cls))


class Batch:
    """The answers to one read from the socket, sent once everything it touched is committed."""

    __slots__ = ("acks", "close", "error", "failed", "ids", "inbox", "touched", "waiting")

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox
        inbox.newest = self
        self.acks = bytearray()
        self.touched: dict[Committer, None] = {}
        self.ids: dict[int, Unstored] = {}  # QoS 2 ids that are in use only if the commit succeeds
        self.waiting = 0  # the number of commits to wait for
        self.error: StreamError | None = None
        self.failed: frozenset[Committer] = frozenset()  # only kept when several are touched
        self.close: tuple[str, str, int] | None = None  # counter, text, reason: close after these acks

    def use_id(
        self, journal: Journal, packet: Publish, new: Mapping[Stream, int], *, delivered: bool = False
    ) -> None:
        """The QoS 2 id of a message is in use if the commit succeeds; `new` are its numbers."""
        self.ids[packet.number] = Unstored(packet.topic, packet.payload, dict(new), delivered)
        for stream, place in new.items():
            journal.replay_points[stream.name].expect(place, self)

    def use_id_alone(self, journal: Journal, packet_id: int) -> None:
        """The QoS 2 id of a message that is in no stream is in use."""
        session = self.inbox.session
        assert session is not None
        journal.received(session, packet_id)
        self.touched[journal] = None

    def committed(self, error: StreamError | None, committer: Committer | None = None) -> None:
        """Record that something it touched is committed or has failed."""
        if error is not None:
            if committer is not None:
                self.failed |= {committer}
            self.error = self.error or error
            # The connection closes once everything before is answered. Store nothing after a failure.
            self.inbox.line.hold("failed")
        self.waiting -= 1
        if self.waiting:
            return
        if self.ids and self.error is None and self.inbox.keep_ids(self):
            return
        self.inbox.settle()


class Lot:
    """The messages of many connections for one stream that were read in one turn, one message of each."""

    __slots__ = ("error", "inboxes", "waiting")

    def __init__(self) -> None:
        self.inboxes: list[Inbox] = []
        self.waiting = 1
        self.error: StreamError | None = None

    def committed(self, error: StreamError | None) -> None:
        """Record that they are committed or have failed."""
        self.waiting, self.error = 0, error
        for inbox in self.inboxes:
            if error is None and inbox.lot is self:
                inbox.lot = None
                inbox.line.acknowledge(inbox.ack)
                if inbox.at_rest:
                    inbox.rest()
            else:
                if error is not None:
                    inbox.line.hold("failed")
                inbox.settle()


class Single(msgspec.Struct, gc=False):
    """The `Batch` of a read that is part of a lot."""

    lot: Lot
    acks: bytes
    close: ClassVar[tuple[str, str, int] | None] = None
    ids: ClassVar[Mapping[int, Unstored]] = {}
    failed: ClassVar[frozenset[Committer]] = frozenset()

    @property
    def waiting(self) -> int:
        return self.lot.waiting

    @property
    def error(self) -> StreamError | None:
        return self.lot.error


class Inbox:
    """One connection's batches, and the session that its packets belong to once it has logged in.

    If the only read that waits belongs to a lot, `lot` and `ack` have it instead of `_batches`. That is the
    usual case with many devices, and it touches less memory (see `server.reads`).
    """

    __slots__ = ("_batches", "_held", "_journal", "ack", "at_rest", "line", "lot", "newest", "session")

    def __init__(self, line: Line, journal: Journal) -> None:
        self.line: Line = line
        self._journal = journal
        self.session: Session | None = None
        self.newest: Batch | None = None  # of the last read, which may still be being processed
        self.lot: Lot | None = None
        self.ack = b""
        self._batches = _NOTHING
        self._held = False
        self.at_rest: tuple[Callable[[], object], ...] = ()

    @property
    def unsettled(self) -> bool:
        """Return whether it still waits for the commit of a message that it published."""
        return self.lot is not None or bool(self._batches)

    @property
    def unstored_ids(self) -> set[int]:
        """Return the QoS 2 ids in use whose messages may not be stored yet."""
        return {packet_id for batch in self._batches for packet_id in batch.ids}

    @property
    def uncommitted_ids(self) -> set[int]:
        """Return these, and those of the read that is being processed."""
        return self.unstored_ids if self.newest is None else self.unstored_ids.union(self.newest.ids)

    def uncommitted(self) -> dict[int, Unstored]:
        """Return the messages of `uncommitted_ids`."""
        newest = () if self.newest is None else (self.newest,)
        return {packet_id: one for batch in (*self._batches, *newest) for packet_id, one in batch.ids.items()}

    def is_unstored(self, packet_id: int) -> bool:
        """Return whether a QoS 2 id is one of these."""
        return any(packet_id in batch.ids for batch in self._batches)

    def when_settled(self, do: Callable[[], object]) -> None:
        """Call `do` once everything that it published is committed or has failed."""
        if self.unsettled:
            self.at_rest += (do,)
        else:
            do()

    def put(self, batch: Batch, heard: float = math.inf) -> None:
        """Answer a read once all it touched is committed. `heard`: as in `Committer.after_commit`."""
        self._queue_single()
        touched = batch.touched
        if not touched and not self._batches and batch.close is None:
            if batch.acks:
                self.line.acknowledge(batch.acks)
            return
        if not batch.acks and batch.close is None and not batch.ids:
            return  # only QoS 0, so no client waits for it
        self._queue(batch)
        batch.waiting = len(touched)
        if batch.waiting == 1:
            for committer in touched:
                committer.after_commit(batch.committed, heard)
        elif touched:
            batch.waiting += 1  # all must be counted before one can be the last
            for committer in touched:
                committer.after_commit(partial(batch.committed, committer=committer), heard)
            batch.committed(None)
        else:
            self.settle()
        if len(self._batches) > UNSENT_BATCHES:
            self._hold()

    def add(self, lot: Lot, ack: bytes) -> None:
        """Add a read that was a single message of a lot, with the answer to send after the commit."""
        lot.inboxes.append(self)
        if self.lot is None and not self._batches:
            self.lot, self.ack = lot, ack
            return
        self._queue_single()
        self._queue(Single(lot, ack))
        if len(self._batches) > UNSENT_BATCHES:
            self._hold()

    def _queue_single(self) -> None:
        """Make room for a second read that waits."""
        if self.lot is not None:
            self._queue(Single(self.lot, self.ack))
            self.lot = None

    def _queue(self, batch: Batch | Single) -> None:
        if self._batches is _NOTHING:
            self._batches = deque()
        self._batches.append(batch)

    def mute(self) -> None:
        """Answer no earlier read: the connection on which it came has ended, and another may follow."""
        for batch in self._batches:
            if isinstance(batch, Batch):
                batch.acks.clear()

    def _hold(self) -> None:
        self._held = True
        self.line.hold("commits")

    def settle(self) -> None:
        """Send the acknowledgements of all leading batches that are committed, in one write."""
        self._queue_single()
        batches = self._batches
        last: Batch | Single | None = None
        acks: list[bytes | bytearray] = []
        while batches and not batches[0].waiting:
            batch = batches.popleft()
            if batch.error is not None:
                self._forget_ids(batch)
                last = last or batch
            elif last is None:
                acks.append(batch.acks)
                if batch.close is not None:
                    last = batch
        if joined := b"".join(acks):
            self.line.acknowledge(joined)
        if last is not None:
            if last.error is not None:
                why = f"not acknowledged: {last.error}"
                told = last.error.public if isinstance(last.error, StorageFailed) else ""
                self.line.fail("rejected_storage", why, reason_of(last.error)[1], told)
            elif last.close is not None:
                self.line.fail(*last.close)
        if not batches and self.at_rest:
            self.rest()
        if self._held and len(batches) <= UNSENT_BATCHES // 2:
            self._held = False
            self.line.release("commits")

    def rest(self) -> None:
        """Nothing waits any more: make the calls of `when_settled`."""
        waiting, self.at_rest = self.at_rest, ()
        for do in waiting:
            do()

    def keep_ids(self, batch: Batch) -> bool:
        """Record the QoS 2 ids of stored messages; returns whether the batch waits for the journal."""
        journal, session = self._journal, self.session
        assert session is not None
        ids, batch.ids = batch.ids, {}  # from here on they are in use, even if the journal fails
        if session.persistent:
            for packet_id, one in ids.items():
                # After a restart, a stream in memory is empty, and resent messages are stored again.
                if any(stream.lasting for stream in one.places):
                    journal.received(session, packet_id)
        journal.settled_in(((at, n) for one in ids.values() for at, n in one.places.items()), batch)
        if session.persistent:
            batch.waiting = 1
            journal.after_commit(batch.committed)
        return session.persistent

    def _forget_ids(self, batch: Batch | Single) -> None:
        # The client will resend these messages. Then they are not duplicates, but a stream that already has
        # one of them must not store it twice.
        session = self.session
        if session is None:
            return
        session.free_ids(batch.ids)
        for packet_id, unstored in batch.ids.items():
            stored = {at.name for at in unstored.places if at not in batch.failed} if batch.failed else set()
            if unstored.delivered:
                stored.add(QUEUES)
            if stored:
                found, digest = session.partial.setdefault(packet_id, Partial()), unstored.digest
                found.hold(digest, found.streams(digest) | stored)
                if session.persistent:
                    self._journal.held(session, packet_id, digest)
        self._journal.not_stored((one.places for one in batch.ids.values()), batch.failed, batch)
