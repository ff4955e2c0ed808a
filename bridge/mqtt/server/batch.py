"""What one read from a client's socket is answered with, and when.

What it promises: its acknowledgements leave after the commit of all streams that its messages went to. A
QoS 2 id is noted in the journal only then: one that is known although its message is not stored would lose
the message. It is settled there for sessions that are not persistent too, or the next start would take it
for an id of its client's next session, and a new message under it for a repetition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.errors import StreamError
    from bridge.mqtt.broker.store import Committer, Stream
    from bridge.mqtt.server.connection import Connection


class Batch:
    """What one read from the socket is to be answered with, once what it touched is committed."""

    __slots__ = (
        "acks", "close", "connection", "error", "failed", "ids", "touched", "waiting",
    )  # fmt: skip

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.acks = bytearray()
        self.touched: dict[Committer, None] = {}
        # QoS 2 ids that count as used only if the commit succeeds; where their messages are if it does
        self.ids: dict[int, dict[Stream, int]] = {}
        self.waiting = 0
        self.error: StreamError | None = None
        self.failed: set[Committer] = set()  # known where it matters: when several are touched
        self.close: tuple[str, str, int] | None = None  # counter, text, reason: end after these acks

    def one_done(self, committer: Committer, error: StreamError | None) -> None:
        """One of several streams is committed, or failed to."""
        if error is not None:
            self.failed.add(committer)
        self.done(error)

    def done(self, error: StreamError | None) -> None:
        """One of the streams is committed, or failed to."""
        if error is not None:
            self.error = self.error or error
            # It ends, as soon as what came before is answered: nothing behind it may be stored before it.
            self.connection.hold("failed")
        self.waiting -= 1
        if self.waiting:
            return
        if self.ids and self.error is None and self._keep_ids():
            return
        self.connection.settle()

    def _keep_ids(self) -> bool:
        """Have the journal know the QoS 2 ids; tell whether it is to be waited for."""
        journal, session = self.connection.lane.journal, self.connection.session
        assert session is not None
        ids, self.ids = self.ids, {}  # from here on they are in use, also if the journal fails
        if session.persistent:
            for packet_id in ids:
                journal.received(session, packet_id)
        journal.settled_in(((at, n) for places in ids.values() for at, n in places.items()), self)
        if session.persistent:
            self.waiting = 1
            journal.after_commit(self.done)
        return session.persistent
