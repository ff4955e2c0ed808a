"""How a connection's packets are answered, and when: the incoming half; `outbox` is the outgoing one.

What it promises: acknowledgements leave in the order of the packets (MQTT 3.1.1 section 4.6), each after the
commit of all streams that its message went to. Every read from the socket makes one `Batch`, and batches
leave first in, first out. When a commit fails, its messages are not acknowledged, and neither is any behind
them: the connection is closed.

A QoS 2 id goes to the journal after that commit. If the journal knew the id of a message that no stream
holds, the message would be lost. The ids of sessions that are not persistent are settled there too. Otherwise
the next start would take such an id for one of the client's next session, and a new message for a repetition.
"""

from __future__ import annotations

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

UNSENT_BATCHES = 1_000  # reads that wait for their commit before reading is paused

# error, the counter's ending, MQTT 5 reason code: one that PUBACK, PUBREC and DISCONNECT may carry
_REASONS: tuple[tuple[type[StreamBridgeError], str, int], ...] = (
    (NoStream, "no_stream", BAD_TOPIC_NAME),
    (StreamFull, "full", QUOTA_EXCEEDED),
    (MessageTooLarge, "too_large", QUOTA_EXCEEDED),  # a limit of the stream; 0x95 may not be here
    (StorageFailed, "storage", IMPLEMENTATION_ERROR),
    (Unauthorized, "not_allowed", NOT_AUTHORIZED),
    (RetainedFull, "retained", QUOTA_EXCEEDED),
    (InvalidRequest, "invalid", IMPLEMENTATION_ERROR),  # its message id
    (StreamBridgeError, "other", UNSPECIFIED),
)


def reason_of(error: StreamBridgeError) -> tuple[str, int]:
    """Why a message is not stored: the ending of its counter, and the MQTT 5 reason code."""
    return next((kind, code) for cls, kind, code in _REASONS if isinstance(error, cls))


class Batch:
    """What one read from the socket is answered with, once everything it touched is committed."""

    __slots__ = ("acks", "close", "error", "failed", "ids", "inbox", "touched", "waiting")

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox
        inbox.newest = self
        self.acks = bytearray()
        self.touched: dict[Committer, None] = {}
        # QoS 2 ids that are in use only if the commit succeeds, and where their messages are if it does
        self.ids: dict[int, dict[Stream, int]] = {}
        self.waiting = 0  # commits
        self.error: StreamError | None = None
        self.failed: frozenset[Committer] = frozenset()  # only kept when several are touched
        self.close: tuple[str, str, int] | None = None  # counter, text, reason: close after these acks

    def committed(self, error: StreamError | None, committer: Committer | None = None) -> None:
        """Something that it touched is committed, or has failed to be."""
        if error is not None:
            if committer is not None:
                self.failed |= {committer}
            self.error = self.error or error
            # The connection closes once everything before is answered: store nothing behind a failure.
            self.inbox.line.hold("failed")
        self.waiting -= 1
        if self.waiting:
            return
        if self.ids and self.error is None and self.inbox.keep_ids(self):
            return
        self.inbox.settle()


class Lot:
    """The messages of many connections for one stream that were read in one turn: one `Single` of each."""

    __slots__ = ("_inboxes", "error", "waiting")

    def __init__(self) -> None:
        self._inboxes: list[Inbox] = []
        self.waiting = 1
        self.error: StreamError | None = None

    def add(self, inbox: Inbox, ack: bytes) -> None:
        """A connection's read was one message for the stream; it is answered with this."""
        inbox.add(Single(self, ack))
        self._inboxes.append(inbox)

    def committed(self, error: StreamError | None) -> None:
        """They are committed, or have failed to be."""
        self.waiting, self.error = 0, error
        for inbox in self._inboxes:
            if error is not None:
                inbox.line.hold("failed")
            inbox.settle()


class Single(msgspec.Struct, gc=False):
    """The `Batch` of a read that is part of a lot."""

    lot: Lot
    acks: bytes
    close: ClassVar[tuple[str, str, int] | None] = None
    ids: ClassVar[Mapping[int, Mapping[Stream, int]]] = {}
    failed: ClassVar[frozenset[Committer]] = frozenset()

    @property
    def waiting(self) -> int:
        return self.lot.waiting

    @property
    def error(self) -> StreamError | None:
        return self.lot.error


class Inbox:
    """One connection's batches, and the session that its packets belong to once it has logged in."""

    __slots__ = ("_at_rest", "_batches", "_held", "_journal", "line", "newest", "session")

    def __init__(self, line: Line, journal: Journal) -> None:
        self.line: Line = line
        self._journal = journal
        self.session: Session | None = None
        self.newest: Batch | None = None  # of the last read; it may be handled still, and not be put yet
        self._batches: deque[Batch | Single] = deque()
        self._held = False
        self._at_rest: list[Callable[[], object]] = []

    @property
    def unsettled(self) -> bool:
        """Whether it still waits for the commit of something that it published."""
        return bool(self._batches)

    @property
    def unstored_ids(self) -> set[int]:
        """QoS 2 ids in use whose messages are not known to be stored yet."""
        return {packet_id for batch in self._batches for packet_id in batch.ids}

    @property
    def uncommitted_ids(self) -> set[int]:
        """These, and those of the read that is being handled."""
        return self.unstored_ids if self.newest is None else self.unstored_ids.union(self.newest.ids)

    def is_unstored(self, packet_id: int) -> bool:
        """Whether a QoS 2 id is one of these."""
        return any(packet_id in batch.ids for batch in self._batches)

    def when_settled(self, do: Callable[[], object]) -> None:
        """Call `do` once everything that it published is committed, or has failed to be."""
        if self._batches:
            self._at_rest.append(do)
        else:
            do()

    def put(self, batch: Batch) -> None:
        """Answer a read, as soon as that may be."""
        touched = batch.touched
        if not touched and not self._batches and batch.close is None:
            if batch.acks:
                self.line.acknowledge(batch.acks)
            return
        if not batch.acks and batch.close is None:
            return  # QoS 0 alone: no client waits for it
        self._batches.append(batch)
        batch.waiting = len(touched)
        if batch.waiting == 1:
            for committer in touched:
                committer.after_commit(batch.committed)
        elif touched:
            batch.waiting += 1  # none may be the last before all of them are known
            for committer in touched:
                committer.after_commit(partial(batch.committed, committer=committer))
            batch.committed(None)
        else:
            self.settle()
        if len(self._batches) > UNSENT_BATCHES:
            self._hold()

    def add(self, single: Single) -> None:
        """Answer a read once its lot is committed."""
        self._batches.append(single)
        if len(self._batches) > UNSENT_BATCHES:
            self._hold()

    def _hold(self) -> None:
        self._held = True
        self.line.hold("commits")

    def settle(self) -> None:
        """Send the acknowledgements of all leading batches that are committed, in one write."""
        batches = self._batches
        if len(batches) == 1 and type(single := batches[0]) is Single and single.lot.error is None:
            if not single.lot.waiting:
                batches.popleft()
                self.line.acknowledge(single.acks)
                if self._at_rest:
                    self._rest()
            return
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
                self.line.fail("rejected_storage", why, reason_of(last.error)[1])
            elif last.close is not None:
                self.line.fail(*last.close)
        if not batches and self._at_rest:
            self._rest()
        if self._held and len(batches) <= UNSENT_BATCHES // 2:
            self._held = False
            self.line.release("commits")

    def _rest(self) -> None:
        waiting, self._at_rest = self._at_rest, []
        for do in waiting:
            do()

    def keep_ids(self, batch: Batch) -> bool:
        """Record the QoS 2 ids of stored messages; returns whether the batch waits for the journal."""
        journal, session = self._journal, self.session
        assert session is not None
        ids, batch.ids = batch.ids, {}  # from here on they are in use, also if the journal fails
        if session.persistent:
            for packet_id, places in ids.items():
                # After a restart a stream in memory is empty: what its client sends again is stored again.
                if any(stream.lasting for stream in places):
                    journal.received(session, packet_id)
        journal.settled_in(((at, n) for places in ids.values() for at, n in places.items()), batch)
        if session.persistent:
            batch.waiting = 1
            journal.after_commit(batch.committed)
        return session.persistent

    def _forget_ids(self, batch: Batch | Single) -> None:
        # The client will send these messages again. They are no duplicates then, but a stream that has
        # one of them is not to store it twice.
        session = self.session
        if session is None:
            return
        session.free_ids(batch.ids)
        for packet_id, places in batch.ids.items():
            stored = {at.name for at in places if at not in batch.failed} if batch.failed else set()
            if stored:
                session.partial[packet_id] = session.partial.get(packet_id, frozenset()) | stored
                if session.persistent:
                    self._journal.held(session, packet_id)
        self._journal.not_stored(batch.ids.values(), batch.failed, batch)
