"""The journal of sessions and retained messages: `<data_dir>/mqtt/sessions.journal`.

What it promises: changes that `after_commit` has confirmed survive the end of this process at any instant. A
power cut loses at most the last second (a thread syncs the file once a second). After a power cut, the QoS 2
ids in use are unknown, so none counts as in use: a duplicate is better than a loss.

What it keeps: persistent sessions with their subscriptions, and which of these still get retained messages;
QoS 1 and 2 messages of ordinary topics and of upstreams until each persistent subscriber has acknowledged
them; QoS 2 packet ids in use, in both directions; wills of persistent sessions that may still have to be
published; retained messages; our own sessions at other brokers (`joined`). Of messages that devices publish
on stream topics, it has references to the stream, for persistent sessions that are away. A clean stop
replaces these by the messages themselves, so that they outlive their segments, and streams in memory. A kill
loses those that the stream has dropped by then, and what was under way to clients that were connected. The
next start counts and logs that (`recovery`).

In mode "external", `external.journal` has our session at that broker, and this file stays as it is.

While any stream is encrypted, this file is too, because its messages may contain the same secrets.

Its records are in `records.py`, its file in `journalfile.py`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from bridge.decoded import decoded
from bridge.errors import CorruptData, JournalFailed
from bridge.mqtt.broker.journalfile import JournalFile
from bridge.mqtt.broker.records import (
    Any_,
    Booted,
    Ended,
    Fed,
    Freed,
    Held,
    Joined,
    Marked,
    Received,
    Record,
    Released,
    Sending,
    Settled,
    Subscribed,
    Unsubscribed,
    check,
    opened_record,
    queued_record,
    retained_record,
    will_record,
)
from bridge.mqtt.broker.replay import ReplayPoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from bridge.access.rules import Holder
    from bridge.encryption import Keys
    from bridge.errors import StreamError
    from bridge.mqtt.broker.message import Message, Subscription
    from bridge.mqtt.broker.outbox import Outgoing
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.broker.store import Stream
    from bridge.mqtt.wire.packets import Publish
    from bridge.runtime import Runtime

log = logging.getLogger(__name__)

UNKNOWN = "unknown"  # stands for a boot whose id cannot be read

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any_] = msgspec.msgpack.Decoder(Any_)


class Journal:
    """The journal of one front end."""

    def __init__(
        self,
        path: Path,
        boot: str,
        runtime: Runtime,
        keys: Keys | None = None,
        encrypts: Callable[[], bool] = lambda: False,
    ) -> None:
        """`boot` is the id of this boot of the machine; empty if it is unknown.

        `encrypts` returns whether to encrypt the file, with `keys`.
        """
        self._path, self._boot = path, boot
        self.replay_points: dict[str, ReplayPoint] = {}
        self.snapshot: Callable[[], Iterable[Record]] = tuple
        self.referred: Callable[[], Iterable[Record]] = tuple  # whole, what is referred to
        self._numbers = 0
        self.stopped = False
        outdated = _encoder.encode(Booted(UNKNOWN))
        self._file = JournalFile(path, runtime, self._bodies, keys, encrypts, outdated)

    @property
    def failed(self) -> bool:
        """Return whether it cannot be written, and so confirms nothing."""
        return self._file.failed

    def read(self) -> list[Any_]:
        """Read the records of an earlier process. Call it before `open`."""
        records: list[Any_] = []
        for body in self._file.read():
            try:
                record = decoded(body, _decoder)
                check(record)
            except (CorruptData, ValueError) as error:
                log.warning(
                    "%s: a record cannot be read; it and all later ones are left out: %s", self._path, error
                )
                break
            records.append(record)
        return records

    def open(self) -> None:
        """Begin to write, with a snapshot; see `JournalFile.open`."""
        self._file.open()

    def renew(self) -> None:
        """Encrypt the file if a stream is encrypted now. Called when streams have changed."""
        self._file.renew()

    def after_commit(self, done: Callable[[StreamError | None], None], heard: float = 0.0) -> None:
        """Call `done` once all records so far are in the file. That is never delayed."""
        self._file.after_commit(done)

    def close(self) -> None:
        """Write and sync everything, for a clean stop. `failed` says whether that was not possible."""
        self.stopped = True
        for record in self.referred():
            self._add(record)
        self._add(Booted(""))
        self._file.close()

    def _add(self, record: Record) -> None:
        self._file.add(_encoder.encode(record))

    def _bodies(self) -> Iterator[bytes]:
        for record in (Booted(self._boot or UNKNOWN), *self.snapshot()):
            yield _encoder.encode(record)
        if self.stopped:
            yield _encoder.encode(Booted(""))

    # -- records ------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """A session is persistent from now on, or has been left."""
        self._add(opened_record(session))

    def left(self, session: Session) -> None:
        """The client of a persistent session is away: keep what waits for it, also what streams have."""
        self.opened(session)
        outbox = session.outbox
        for out in outbox.pending():
            if out.qos and not (out.number or out.asked):
                self.queued(out.message, [session], [out])
        for packet_id, number in outbox.ids():
            if number:
                self._add(Sending(session.client_id, packet_id, number))

    def ended(self, session: Session) -> None:
        """A persistent session is over."""
        self._add(Ended(session.client_id))

    def subscribed(self, session: Session, subscription: Subscription) -> None:
        """A persistent session has a subscription."""
        self._add(Subscribed(session.client_id, subscription))

    def unsubscribed(self, session: Session, topic_filter: str) -> None:
        """A persistent session has lost a subscription."""
        self._add(Unsubscribed(session.client_id, topic_filter))

    def fed(self, session: Session, topic_filter: str, upto: str | None) -> None:
        """A subscription of a persistent session has the retained messages up to a topic; None: all."""
        self._add(Fed(session.client_id, topic_filter, upto))

    def queued(
        self,
        message: Message,
        homes: list[Session],
        copies: list[Outgoing],
        sender: Session | None = None,
        packet_id: int = 0,
    ) -> None:
        """A message waits for some persistent sessions. Numbers its copies.

        `packet_id`: the QoS 2 id, if the session of its sender is persistent.
        """
        number = self._numbers = self._numbers + 1
        for copy in copies:
            if copy.share:
                self._numbers += 1
            copy.number = self._numbers if copy.share else number
        name = sender.client_id if sender is not None and packet_id else ""
        self._add(queued_record(message, number, list(zip(homes, copies, strict=True)), name, packet_id))

    def notes(self, session: Session) -> Notes:
        """Return the notes that the outbox of a session keeps here."""
        return Notes(self, session)

    def settled(self, session: Session, out: Outgoing) -> None:
        """A session has acknowledged a queued message, or it was dropped."""
        self._add(Settled(session.client_id, out.number))

    def sending(self, session: Session, packet_id: int, out: Outgoing) -> None:
        """A persistent session sends a QoS 2 message with this packet id."""
        self._add(Sending(session.client_id, packet_id, out.number))

    def freed(self, session: Session, packet_id: int) -> None:
        """A packet id with which a persistent session sent a message is free again."""
        self._add(Freed(session.client_id, packet_id))

    def willed(self, session: Session) -> None:
        """A persistent session has another will, or none any more."""
        self._add(will_record(session))

    def retained(self, message: Message, holder: Holder) -> None:
        """A topic has a new retained message, set by `holder`."""
        self._add(retained_record(message, holder))

    def received(self, session: Session, packet_id: int) -> None:
        """A persistent session uses a QoS 2 packet id."""
        self._add(Received(session.client_id, packet_id))

    def held(self, session: Session, packet_id: int, digest: int) -> None:
        """Only some streams have a message of a QoS 2 id."""
        streams = session.partial[packet_id][digest]
        self._add(Held(session.client_id, packet_id, sorted(streams), digest))

    def joined(self, record: Joined) -> None:
        """Something of our session at another broker has changed, besides its packet ids."""
        self._add(record)

    def search(self, streams: Iterable[Stream], packet: Publish, kept: bytes) -> None:
        """Let the next start search these streams for QoS 2 ids, from here on. Raises StreamError."""
        for stream in streams:
            if stream.name not in self.replay_points:
                stream.ensure_admits(packet.topic, packet.payload, kept)  # a refused one leaves nothing
                self.search_from_here(stream)

    def search_from_here(self, stream: Stream) -> None:
        """From here on, the next start searches a stream for QoS 2 ids.

        Raises JournalFailed; then a message stored now could not be found, and would be stored twice.
        """
        self.replay_points[stream.name] = ReplayPoint(stream.next_sequence)
        try:
            # Now and not at the end of the turn, because the stream may be written before that.
            self._file.add_at_once(_encoder.encode(Marked(stream.name, stream.next_sequence)))
        except OSError as error:
            del self.replay_points[stream.name]
            raise JournalFailed(f"{self._path}: {error.strerror or error}; QoS 2 messages need it") from error

    def settled_in(self, places: Iterable[tuple[Stream, int]], owner: object) -> None:
        """The journal has the ids of the QoS 2 messages with these numbers."""
        numbers: dict[Stream, list[int]] = {}
        for stream, number in places:
            numbers.setdefault(stream, []).append(number)
        for stream, some in numbers.items():
            point = self.replay_points[stream.name]
            above = point.settle(some, owner, stream.next_sequence)
            self._add(Marked(stream.name, point.upto, above))

    def not_stored(
        self, places: Iterable[Mapping[Stream, int]], failed: AbstractSet[object], owner: object
    ) -> None:
        """Messages were not stored in all streams; `failed` has those that failed, none means all."""
        known = [(at, n) for one in places for at, n in one.items() if at.name in self.replay_points]
        self.settled_in((pair for pair in known if failed and pair[0] not in failed), owner)
        for stream, number in known:
            self.replay_points[stream.name].forget(number, owner)

    def released(self, session: Session, packet_id: int) -> None:
        """A persistent session has released a QoS 2 packet id."""
        self._add(Released(session.client_id, packet_id))

    def resume_numbers(self, number: int) -> None:
        """Number the next message above those of an earlier process."""
        self._numbers = max(self._numbers, number)


class Notes:
    """The notes of an outbox (`outbox.Notes`). The journal keeps those of persistent sessions."""

    __slots__ = ("_journal", "_session")

    def __init__(self, journal: Journal, session: Session) -> None:
        self._journal, self._session = journal, session

    def settled(self, out: Outgoing) -> None:
        """A message need no longer be kept."""
        if out.number:
            self._journal.settled(self._session, out)

    def sending(self, packet_id: int, out: Outgoing, then: Callable[[], None]) -> None:
        """A QoS 2 message gets this packet id."""
        if self._session.persistent:
            self._journal.sending(self._session, packet_id, out)
        self.releasing(then)

    def releasing(self, then: Callable[[], None]) -> None:
        """Call `then` once all records are kept. While they cannot be written, QoS 2 messages wait."""
        if not self._session.persistent:
            then()
            return

        def done(error: StreamError | None) -> None:
            if error is None:
                then()
            else:
                self._journal.after_commit(done)  # after the next attempt

        self._journal.after_commit(done)

    def freed(self, packet_id: int) -> None:
        """A QoS 2 packet id is no longer in use."""
        if self._session.persistent:
            self._journal.freed(self._session, packet_id)


def survived(records: Iterable[Record], boot: str) -> bool:
    """Return whether the journal is complete: after a clean stop, or within the same boot.

    If the boot id is unknown, a start without a clean stop before it counts as one after a power cut.
    """
    boots = [record.boot for record in records if isinstance(record, Booted)]
    return bool(boots) and boots[-1] in ("", boot or None)
