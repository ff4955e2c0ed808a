"""Restores sessions and retained messages from the journal, and writes them back as a snapshot."""

from __future__ import annotations

import logging
from bisect import bisect_right
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from bridge.access.rules import Identity
from bridge.audit import Origin
from bridge.clock import Deadline
from bridge.errors import CorruptData, NotEnoughMessages, StreamBridgeError
from bridge.mqtt.broker.joined import ABOVE, Joined, recover_joined
from bridge.mqtt.broker.journal import survived
from bridge.mqtt.broker.message import Message, Subscription
from bridge.mqtt.broker.outbox import Outgoing
from bridge.mqtt.broker.records import (
    Any_,
    Booted,
    Ended,
    Fed,
    Freed,
    Held,
    Marked,
    Opened,
    Queued,
    Received,
    Record,
    Released,
    Retained,
    Sending,
    Settled,
    Subscribed,
    Unsubscribed,
    Willed,
    opened_record,
    queued_record,
    retained_record,
    will_record,
)
from bridge.mqtt.broker.replay import NONE, QUEUES, Partial, ReplayPoint, digest_of
from bridge.mqtt.wire.packets import Will, text
from bridge.operations.reading import ReadMessagesOptions
from bridge.streams import headers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from bridge.clock import Clock
    from bridge.mqtt.broker.broker import Broker
    from bridge.mqtt.broker.journal import Journal
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.broker.store import Store

log = logging.getLogger(__name__)

LAST_MESSAGES = 10_000  # at most this many messages of a stream are searched
TOGETHER = 1_000  # messages of a stream that are read at a time


class _Saved:
    """One session according to the records."""

    def __init__(self, record: Opened) -> None:
        self.opened = record
        self.subscriptions: dict[str, Subscription] = {}
        self.unfed: dict[str, str] = {}
        self.queue: dict[int, Outgoing] = {}
        self.sending: dict[int, int] = {}  # QoS 2 packet ids towards the subscriber, with numbers in `queue`
        self.incoming: set[int] = set()
        self.partial: dict[int, Partial] = {}
        self.will: Will | None = None


async def recover(records: Sequence[Any_], broker: Broker) -> None:
    """Restore sessions and retained messages. A client that was connected counts as disconnected from now.

    After a power cut, records that released QoS 2 ids may be missing, and a new message with such an id would
    be taken for a stored one. So the ids are forgotten, and resent messages are stored again. Ids that a
    subscriber has may be missing too, so all that it may have are released.
    """
    saved: dict[str, _Saved] = {}
    numbers = 0
    digests: dict[Message, int] = {}  # of messages whose payload is in a stream
    broker.joined = recover_joined(records, broker.clock.boot)
    for record in records:
        match record:
            case Opened(client):
                if client in saved:
                    saved[client].opened = record
                else:
                    saved[client] = _Saved(record)
            case Ended(client):
                saved.pop(client, None)
            case Subscribed(client, subscription) if client in saved:
                saved[client].subscriptions[subscription[0]] = Subscription(*subscription)
            case Unsubscribed(client, name) if client in saved:
                saved[client].subscriptions.pop(name, None)
                saved[client].unfed.pop(name, None)
            case Fed(client, name, upto) if client in saved:
                saved[client].unfed.pop(name, None)
                if upto is not None and name in saved[client].subscriptions:
                    saved[client].unfed[name] = upto
            case Queued(number):
                numbers = max(numbers, number)
                message = _message(record, broker.clock, retain=False)
                if record.stream:
                    message.place = record.stream, record.place
                    digests[message] = record.digest
                if 0 < record.id < ABOVE and record.sender in saved:
                    saved[record.sender].incoming.add(record.id)
                for client, qos, retain, identifiers in record.homes:
                    if client in saved:
                        saved[client].queue[number] = Outgoing(message, qos, retain, identifiers, number)
                for own, client, qos, retain, identifiers, share in record.shared:
                    numbers = max(numbers, own)
                    if client in saved:
                        out = Outgoing(message, qos, retain, identifiers, own, share)
                        saved[client].queue[own] = out
            case Settled(client, number) if client in saved:
                saved[client].queue.pop(number, None)
            case Sending(client, packet_id, number) if client in saved:
                saved[client].sending[packet_id] = number
            case Freed(client, packet_id) if client in saved:
                saved[client].sending.pop(packet_id, None)
            case Retained(topic):
                kept = _message(record, broker.clock, retain=True)
                broker.router.retained.keep(text(topic), kept, record.holder)
            case Marked(stream, upto, known):
                broker.journal.replay_points.setdefault(stream, ReplayPoint(upto)).add(upto, known)
            case Received(client, packet_id) if client in saved and packet_id < ABOVE:
                saved[client].incoming.add(packet_id)
                saved[client].partial.pop(packet_id, None)
            case Released(client, packet_id) if client in saved and packet_id < ABOVE:
                saved[client].incoming.discard(packet_id)
                saved[client].partial.pop(packet_id, None)
            case Held(client, packet_id, streams, digest) if client in saved and packet_id < ABOVE:
                saved[client].partial.setdefault(packet_id, Partial()).hold(digest, frozenset(streams))
            case Willed(client, topic, payload, qos, retain, properties) if client in saved:
                saved[client].will = Will(topic, payload, qos, retain, properties) if topic else None
            case _:
                pass  # about a session that had already ended, or ours at another broker
    broker.router.retained.drop_expired()
    broker.journal.resume_numbers(numbers)
    complete = survived(records, broker.clock.boot)
    if not complete:
        broker.journal.replay_points.clear()
    await _fill(broker, saved, digests)
    _report_interrupted(broker, records, saved)
    emptied = _emptied(broker.store)
    for joined in broker.joined.values():
        joined.partial = _without(joined.partial, emptied)
    for client, past in saved.items():
        opened = past.opened
        identity = Identity(client, opened.user, (), access=opened.access, realm=opened.realm)
        identity.origin = Origin("mqtt", opened.network)
        identity = broker.accesses.again(identity)
        session = broker.sessions.create(client, identity)
        session.expiry, session.proof = past.opened.expiry, past.opened.proof
        if complete:
            session.take_ids(past.incoming)
            session.partial = _without(past.partial, emptied)
        broker.clock.observe(int(past.opened.left * 1000))
        session.left = past.opened.left or broker.clock.now() / 1000
        session.set_will(past.will)
        for subscription in past.subscriptions.values():
            broker.router.subscribe(session, subscription)
        session.unfed = past.unfed
        broker.router.feeds.resume(session)
        for packet_id, number in past.sending.items():
            sending = past.queue.pop(number, None)
            if sending is None:
                session.outbox.restore_released(packet_id)
            else:
                session.outbox.restore(sending, packet_id)
        if not complete and any(one.qos == 2 for one in session.subscriptions.values()):
            session.outbox.release_all()
        for out in past.queue.values():
            if out.qos == 2 and not complete:
                out.share = ""  # it may have been sent, so it stays with its member (MQTT-4.8.2-5)
        session.outbox.restore_queue(past.queue.values())
    broker.clock.observed()


async def _fill(broker: Broker, saved: dict[str, _Saved], digests: dict[Message, int]) -> None:
    """Read the payloads that the journal only refers to. What its stream no longer has is lost."""
    wanted: dict[str, dict[int, list[Message]]] = {}
    waiting = {out.message for past in saved.values() for out in past.queue.values()}
    for message in waiting & digests.keys():
        assert message.place is not None
        name, number = message.place
        wanted.setdefault(name, {}).setdefault(number, []).append(message)
    for name, places in wanted.items():
        for number, payload in (await _read(broker, name, sorted(places))).items():
            for message in places[number]:
                if digest_of(message.topic, payload) == digests[message]:
                    message.payload = payload
                    message.size += len(payload)
                    del digests[message]
    for client, past in saved.items():
        lost = [number for number, out in past.queue.items() if out.message in digests]
        for number in lost:
            del past.queue[number]
        if lost:
            broker.counts["dropped_queue_lost"] += len(lost)
            text = "%d messages that waited for client %r are lost: no stream has them any more (counted)"
            log.warning(text, len(lost), client)


async def _read(broker: Broker, name: str, numbers: list[int]) -> dict[int, bytes]:
    """Return the payloads of some messages of a stream, given in order, as far as it has them."""
    found: dict[int, bytes] = {}
    wanted, at = set(numbers), 0
    while name in broker.store.definitions and at < len(numbers):
        count = min(numbers[-1] - numbers[at] + 1, TOGETHER)
        options = ReadMessagesOptions(
            desired_start_sequence_number=numbers[at], min_message_count=1, max_message_count=count
        )
        try:
            messages = await broker.store.read(name, options)
        except NotEnoughMessages:
            break
        except (StreamBridgeError, OSError) as error:
            log.error("%s; what waits in stream %r for clients that are away may be lost", error, name)
            break
        found |= {one.sequence_number: one.payload for one in messages if one.sequence_number in wanted}
        at = bisect_right(numbers, messages[-1].sequence_number)
    return found


def _report_interrupted(broker: Broker, records: Sequence[Any_], saved: dict[str, _Saved]) -> None:
    """Say how many clients were connected when the service was killed: what was under way to them is lost."""
    boots = [record.boot for record in records if isinstance(record, Booted)]
    if not boots or not boots[-1]:
        return
    count = sum(
        not past.opened.left and any(one.qos for one in past.subscriptions.values())
        for past in saved.values()
    )
    if count:
        broker.counts["interrupted_sessions"] += count
        log.warning(
            "the service ended without a stop while %d clients with persistent sessions were connected: what "
            "they had not acknowledged on topics of streams is not sent again; the streams have it (counted)",
            count,
        )


def _emptied(store: Store) -> set[str]:
    """The streams that this start has emptied, because they were in memory alone."""
    found = set()
    for name in store.definitions:
        with suppress(StreamBridgeError):  # it could not be opened, so it is on a disk
            if not store.stream(name).lasting:
                found.add(name)
    return found


def _without(partial: Mapping[int, Partial], emptied: set[str]) -> dict[int, Partial]:
    """QoS 2 messages that only some of their streams have, without the streams that have lost them."""
    found = {}
    for packet_id, held in partial.items():
        if left := {digest: names - emptied for digest, names in held.items() if names - emptied}:
            found[packet_id] = Partial(left)
    return found


async def find_stored_ids(
    journal: Journal,
    store: Store,
    session_of: Callable[[headers.Headers], Session | None],
    delivers: Callable[[headers.Headers, bytes], bool] = lambda kept, topic: False,
) -> None:
    """Find QoS 2 messages that are in a stream, but whose ids did not reach the journal before the end.

    Their headers have client and id. Only streams that may have such messages are read, from the replay point
    on. A message that one of its streams has and another lacks does not count as stored; its client will
    resend it. Unreadable messages are skipped.
    """
    found: dict[tuple[Session, int, bytes, int], set[str]] = {}
    wanted: set[tuple[Session, int, bytes, int]] = set()  # of another broker, and also for sessions
    refused: set[tuple[Session, int, bytes, int]] = set()  # stored, although in none of their own streams
    for name, point in list(journal.replay_points.items()):
        if name not in store.definitions:
            del journal.replay_points[name]
            continue
        position = max(point.upto, store.stream(name).next_sequence - LAST_MESSAGES)
        while position < store.stream(name).next_sequence:
            options = ReadMessagesOptions(
                desired_start_sequence_number=position, max_message_count=LAST_MESSAGES
            )
            try:
                messages = await store.read(name, options)
            except NotEnoughMessages:
                break
            except (CorruptData, OSError) as error:
                # A duplicate is better than a loss, and no reason to make all others wait.
                log.error("%s; what QoS 2 clients send to stream %r again may be stored twice", error, name)
                break
            for message in messages:
                if not message.headers or message.sequence_number in point.known:
                    continue
                try:
                    kept = headers.decode(message.headers)
                except (msgspec.MsgspecError, ValueError, RecursionError):
                    continue  # nobody has written them, so they have no packet id
                session = session_of(kept) if kept.id else None
                if session is not None:
                    digest = digest_of(message.topic, message.payload)
                    key = (session, kept.id, message.topic, digest)
                    found.setdefault(key, set()).add(name)
                    if kept.refused:
                        refused.add(key)
                    if delivers(kept, message.topic):
                        wanted.add(key)
            position = messages[-1].sequence_number + 1
        journal.replay_points[name] = ReplayPoint(store.stream(name).next_sequence)
    # A message that is found may be unsynced, but its duplicate is acknowledged without a commit. So sync it;
    # if that fails, the duplicate is stored, because the next start may not find the first copy.
    unsynced = await store.sync({name for names in found.values() for name in names})
    for key, names in found.items():
        session, packet_id, topic, digest = key
        names -= unsynced
        names |= session.partial.get(packet_id, NONE).streams(digest)
        own = store.bound(text(topic))
        lacking = [stream for stream in own if stream.name not in names]
        if key in refused or not (lacking or (key in wanted and QUEUES not in names)):
            session.take_ids((packet_id,))
        else:
            session.partial.setdefault(packet_id, Partial()).hold(digest, frozenset(names))


def referred(broker: Broker) -> Iterator[Record]:
    """Yield whole, what the journal only refers to: after a stop, it must not depend on the streams."""
    for number, (message, copies) in sorted(_waiting(broker).items()):
        if message.place is not None:
            yield queued_record(message, number, copies, whole=True)


def _waiting(broker: Broker) -> dict[int, tuple[Message, list[tuple[Session, Outgoing]]]]:
    """Return the messages that wait for persistent sessions, by their numbers, and their copies."""
    waiting: dict[int, tuple[Message, list[tuple[Session, Outgoing]]]] = {}
    for session in broker.sessions.all():
        for out in session.outbox.pending() if session.persistent else ():
            if out.number:
                waiting.setdefault(out.number, (out.message, []))[1].append((session, out))
    return waiting


def snapshot(broker: Broker) -> Iterator[Record]:
    """Yield the records that restore the current state."""
    for session in broker.sessions.all():
        if not session.persistent:
            continue
        yield opened_record(session)
        if session.lasting_will is not None:
            yield will_record(session)
        for subscription in session.subscriptions.values():
            yield Subscribed(session.client_id, subscription)
        for topic_filter, upto in session.unfed.items():
            yield Fed(session.client_id, topic_filter, upto)
        for packet_id in session.incoming - broker.unstored_ids(session):
            yield Received(session.client_id, packet_id)
        for packet_id, held in session.partial.items():
            for digest, streams in held.items():
                yield Held(session.client_id, packet_id, sorted(streams), digest)
        for packet_id, number in session.outbox.ids():
            yield Sending(session.client_id, packet_id, number)
    for joined in broker.joined.values():
        yield from joined.records()
    for number, (message, copies) in sorted(_waiting(broker).items()):
        yield queued_record(message, number, copies, whole=broker.journal.stopped)
    for message, holder in broker.router.retained.holders():
        yield retained_record(message, holder)
    yield from marks(broker.journal)


def marks(journal: Journal) -> Iterator[Record]:
    """Yield the records that restore the replay points."""
    for stream, point in journal.replay_points.items():
        yield Marked(stream, point.upto, sorted(point.known))


def _message(record: Queued | Retained, clock: Clock, *, retain: bool) -> Message:
    expires = None if record.expires is None else Deadline(clock, record.expires)
    return Message(record.topic, record.payload, record.qos, retain, record.properties, expires)


async def recover_alone(journal: Journal, store: Store, name: str, boot: str) -> Joined:
    """Return our session at another broker from a journal of its own, and begin to write that.

    Raises OSError if it cannot be written.
    """
    records = journal.read()
    joined = recover_joined(records, boot).get(name, Joined(name))
    joined.partial = _without(joined.partial, _emptied(store))
    for record in records if survived(records, boot) else ():
        if isinstance(record, Marked):
            point = journal.replay_points.setdefault(record.stream, ReplayPoint(record.upto))
            point.add(record.upto, record.known)
    await find_stored_ids(journal, store, lambda kept: joined if kept.client == name else None)
    journal.snapshot = lambda: (*joined.records(), *marks(journal))
    journal.open()
    return joined
