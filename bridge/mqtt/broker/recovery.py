"""Sessions and retained messages from the journal, and back into it as a snapshot."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from bridge.clock import Deadline
from bridge.errors import CorruptData, NotEnoughMessages
from bridge.mqtt.broker.journal import survived
from bridge.mqtt.broker.marks import Mark
from bridge.mqtt.broker.message import Message, Subscription
from bridge.mqtt.broker.outbox import Outgoing
from bridge.mqtt.broker.records import (
    Ended,
    Held,
    Marked,
    Opened,
    Queued,
    Received,
    Record,
    Released,
    Retained,
    Settled,
    Subscribed,
    Unsubscribed,
    Willed,
    opened_record,
    queued_record,
    retained_record,
    will_record,
)
from bridge.mqtt.wire.packets import Will, text
from bridge.operations.reading import ReadMessagesOptions
from bridge.streams import headers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bridge.clock import Clock
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.server.lane import Lane

log = logging.getLogger(__name__)

LAST_MESSAGES = 10_000  # of a stream that are looked through at most


class _Saved:
    """One session as the records tell it."""

    def __init__(self, record: Opened) -> None:
        self.opened = record
        self.subscriptions: dict[str, Subscription] = {}
        self.queue: dict[int, Outgoing] = {}
        self.incoming: set[int] = set()
        self.partial: dict[int, frozenset[str]] = {}
        self.will: Will | None = None


def recover(records: Sequence[Record], lane: Lane) -> None:
    """Bring sessions and retained messages back. A client that was connected is away since now.

    After a power cut the records that released QoS 2 ids may be missing: a message that has got one of
    these ids since would pass for stored. So its ids are forgotten, and what is sent again is stored again.
    """
    saved: dict[str, _Saved] = {}
    numbers = 0
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
            case Queued(number):
                numbers = max(numbers, number)
                message = _message(record, lane.clock, retain=False)
                for client, qos, retain, identifiers in record.homes:
                    if client in saved:
                        saved[client].queue[number] = Outgoing(message, qos, retain, identifiers, number)
            case Settled(client, number) if client in saved:
                saved[client].queue.pop(number, None)
            case Retained(topic):
                lane.router.retained.keep(text(topic), _message(record, lane.clock, retain=True))
            case Marked(stream, upto, known):
                lane.journal.marks.setdefault(stream, Mark(upto)).add(upto, known)
            case Received(client, packet_id) if client in saved:
                saved[client].incoming.add(packet_id)
                saved[client].partial.pop(packet_id, None)
            case Released(client, packet_id) if client in saved:
                saved[client].incoming.discard(packet_id)
                saved[client].partial.pop(packet_id, None)
            case Held(client, packet_id, streams) if client in saved:
                saved[client].partial[packet_id] = frozenset(streams)
            case Willed(client, topic, payload, qos, retain, properties) if client in saved:
                saved[client].will = Will(topic, payload, qos, retain, properties) if topic else None
            case _:
                pass  # about a session that had ended by then
    lane.router.retained.drop_expired()
    lane.journal.resume_numbers(numbers)
    whole = survived(records, lane.clock.boot)
    if not whole:
        lane.journal.marks.clear()
    for client, past in saved.items():
        identity = lane.access.identify(client, past.opened.user)
        session = lane.sessions.create(client, identity)
        session.expiry, session.proof = past.opened.expiry, past.opened.proof
        if whole:
            session.incoming, session.partial = past.incoming, past.partial
        lane.clock.observe(int(past.opened.left * 1000))
        session.left = past.opened.left or lane.clock.now() / 1000
        session.will = past.will
        for subscription in past.subscriptions.values():
            lane.router.subscribe(session, subscription)
        for out in past.queue.values():
            session.outbox.put(out)


async def find_stored_ids(lane: Lane) -> None:
    """Find QoS 2 messages that a stream holds, but whose ids did not reach the journal before the end.

    Their headers have client and id. Only streams with such messages are read, from the mark on. A message
    that one of its streams has and another has not is not stored yet: its client will send it again.
    What cannot be read is passed over.
    """
    found: dict[tuple[Session, int, bytes], set[str]] = {}
    refused: set[tuple[Session, int, bytes]] = set()  # stored, although in none of their own streams
    for name, mark in list(lane.journal.marks.items()):
        if name not in lane.manager.definitions:
            del lane.journal.marks[name]
            continue
        position = max(mark.upto, lane.manager.stream(name).next_sequence - LAST_MESSAGES)
        while position < lane.manager.stream(name).next_sequence:
            options = ReadMessagesOptions(
                desired_start_sequence_number=position, max_message_count=LAST_MESSAGES
            )
            try:
                messages = await lane.manager.read(name, options)
            except NotEnoughMessages:
                break
            except (CorruptData, OSError) as error:
                # Twice is better than never, and no reason for all others to wait.
                log.error("%s; what QoS 2 clients send to stream %r again may be stored twice", error, name)
                break
            for message in messages:
                if not message.headers or message.sequence_number in mark.known:
                    continue
                kept = headers.decode(message.headers)
                session = lane.sessions.get(kept.client)
                if session is not None and kept.id:
                    key = (session, kept.id, message.topic)
                    found.setdefault(key, set()).add(name)
                    if kept.refused:
                        refused.add(key)
            position = messages[-1].sequence_number + 1
        lane.journal.marks[name] = Mark(lane.manager.stream(name).next_sequence)
    for (session, packet_id, topic), names in found.items():
        names |= session.partial.get(packet_id, frozenset())
        own = lane.manager.bound(text(topic))
        if (session, packet_id, topic) in refused or all(stream.name in names for stream in own):
            session.incoming.add(packet_id)
        else:
            session.partial[packet_id] = frozenset(names)


def snapshot(lane: Lane) -> Iterator[Record]:
    """The records that make everything that is alive now."""
    waiting: dict[int, tuple[Message, list[tuple[Session, Outgoing]]]] = {}
    for session in lane.sessions.all():
        if not session.persistent:
            continue
        yield opened_record(session)
        if session.lasting_will is not None:
            yield will_record(session)
        for subscription in session.subscriptions.values():
            yield Subscribed(session.client_id, subscription)
        newest = lane.newest.get(session.client_id)
        unstored = newest.unstored_ids if newest is not None else set()
        for packet_id in session.incoming - unstored:
            yield Received(session.client_id, packet_id)
        for packet_id, streams in session.partial.items():
            yield Held(session.client_id, packet_id, sorted(streams))
        for out in session.outbox.pending():
            if out.number:
                waiting.setdefault(out.number, (out.message, []))[1].append((session, out))
    for number in sorted(waiting):
        message, copies = waiting[number]
        yield queued_record(message, number, copies)
    for message in lane.router.retained.all():
        yield retained_record(message)
    for stream, mark in lane.journal.marks.items():
        yield Marked(stream, mark.upto, sorted(mark.known))


def _message(record: Queued | Retained, clock: Clock, *, retain: bool) -> Message:
    expires = None if record.expires is None else Deadline(clock, record.expires)
    return Message(record.topic, record.payload, record.qos, retain, record.properties, expires)
