"""One consumer: fetches, acknowledgements and dead letters, each answered once it is on the disk.

Everything runs on the event loop, except that a thread writes the journal, one write at a time. Changes
during a write are in the next one.

If the journal cannot be written, the request fails with StorageFailed. A delivery is then undone. An
acknowledgement stays in memory, and the complete position is written with the next request; the client should
repeat its request.

Fetches wait in their order of arrival. What one of them may get, each of them may get. So when there may be
messages, the first looks, and if it finds some, it wakes the next one: a message costs the same however many
wait. A fetch keeps its place until it has found something or ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from bridge.consumers.journal import Identity, Journal, load, path_of
from bridge.consumers.position import Lease, Position
from bridge.errors import (
    CorruptData,
    InvalidRequest,
    MessageTooLarge,
    ResponseTooLarge,
    StorageFailed,
    StreamBridgeError,
    StreamNotFound,
    Unauthorized,
)
from bridge.model import ExportStatus
from bridge.plugin.api import Record, dead_letter
from bridge.plugin.consumer import ConsumerConfig
from bridge.plugin.withheld import Withheld
from bridge.ranges import Ranges
from bridge.runtime import Runtime
from bridge.streams.drops import Drops
from bridge.streams.layout import Files
from bridge.streams.reader import first_since
from bridge.streams.segment import StreamMessage
from bridge.streams.stream import Stream
from bridge.topics import matches

SCAN = 1000  # messages that are read before other clients are served
FEW = 16
REJECTED = 50  # messages that are rejected before other clients are served
DUE = 200  # redelivered messages, which are read one by one because they are not adjacent
SCAN_BYTES = 2 * 1024 * 1024
MOST_REASON = 500  # characters kept of a reason
PER_MESSAGE = 192  # bytes per message in a reply, besides payload, names and headers

log = logging.getLogger(__name__)


class Host(NamedTuple):
    """The process, as a consumer uses it.

    `rows` reads messages from a number up to but not including another one, at most a given number of
    messages and bytes, but at least one if there is one. Raises CorruptData. `append` appends to a stream, as
    durably as the stream is configured. Raises StreamBridgeError.
    """

    data_dir: Path
    files: Files
    runtime: Runtime
    rows: Callable[[Stream, int, int, int, int], list[StreamMessage]]
    append: Callable[[str, bytes], Awaitable[object]]


class Delivery(NamedTuple):
    """A message, and the number of its deliveries, including this one."""

    message: StreamMessage
    deliveries: int


class Verdicts(NamedTuple):
    """The results that a client reports, by sequence number. `delay` is in ms, for `nack`."""

    ack: Sequence[int] = ()
    nack: Sequence[int] = ()
    in_progress: Sequence[int] = ()
    terminate: Sequence[int] = ()
    delay: int = 0
    reason: str = ""


class Consumer:
    """One consumer of a stream."""

    def __init__(
        self, host: Host, stream: Stream, config: ConsumerConfig, before: Awaitable[object] | None = None
    ) -> None:
        """Read the position from its file. `before`: await this before writing the file."""
        self._host, self.stream, self.config, self._before = host, stream, config, before
        self.closed = False
        self.paused = False  # by an operator
        self.error: str | None = None
        self.path = path_of(host.data_dir, stream.name, config.identifier)
        self._label = f"consumer {config.identifier} of {stream.name}"
        self._waiting: OrderedDict[object, asyncio.Future[None]] = OrderedDict()  # done: it looks, or will
        self._due: asyncio.TimerHandle | None = None
        self._rejecting: set[int] = set()
        self._task: asyncio.Task[None] | None = None
        self._drops_seen = -1
        self._scan = FEW
        self._load()

    def _load(self) -> None:
        stream, identity = self.stream, _identity(self.stream, self.config)
        loaded = None
        try:
            if self._before is None:  # otherwise the file belongs to a deleted consumer, and will be removed
                loaded = load(self.path)
        except (CorruptData, OSError) as error:
            self.error = f"{error}; delivering again from the start"
            log.error("%s: %s", self._label, self.error)
        if loaded is not None and loaded.identity.begins_as(identity):
            self.position = Position(0)
            # After a power cut, the clock's own file may be older. Later reads may correct the clock, but too
            # late for leases that were shortened by then.
            stream.clock.observe(max(change.at for change in loaded.changes))
            now = stream.clock.now()
            for change in loaded.changes:
                self.position.apply(change, now)
            self.position.queue_all()
        else:
            self.position = Position(self._start())
            if loaded is not None and loaded.identity.epoch == stream.epoch:  # only the start has changed
                self.position.counts = loaded.changes[-1].counts
            self._waive()
        self._journal = Journal(self._host.files, self.path, identity, loaded)
        self._saved = -1  # the version on the disk; what a killed process wrote may not be synced
        self._whole = True  # the next write must have the complete position
        self._flight: asyncio.Future[None] | None = None
        self._in_flight_from: int | None = None

    def _start(self) -> int:
        """Return the number at which a new consumer begins."""
        stream, since = self.stream, self.config.start_millis
        first = max(self.config.start_sequence_number, stream.oldest)
        if since is None:
            return first
        with closing(stream.reader()) as reader:
            return first_since(reader, first, stream.next_sequence, since)

    def _waive(self) -> None:
        """What was dropped before a consumer began is not lost to it."""
        counts, stream = self.position.counts, self.stream
        waived = stream.drops.lost(self.position.upto, stream.next_sequence - 1)
        counts.passed = msgspec.structs.replace(counts.passed, waived=waived)

    def configure(self, stream: Stream, config: ConsumerConfig) -> None:
        """Apply a changed definition. A new start moves the position; leases keep their deadlines."""
        self.stream, self.config = stream, config
        identity = _identity(stream, config)
        if self._journal.identity != identity:
            counts, self.position = self.position.counts, Position(self._start())
            self.position.counts = counts
            self._waive()
            self._journal.identity = identity
            self._whole, self._saved = True, -1
        self.position.queue_all()  # a message may be delivered more often now
        self.wake()

    # -- what is shown -----------------------------------------------------------------------------------
    def status(self) -> ExportStatus:
        """Return the status for descriptions of the stream."""
        return _status(self.config.identifier, self.position, self.error, self.stream.drops)

    @property
    def saved_upto(self) -> int:
        """Return the lowest number that is not settled on the disk."""
        unsaved = (self.position.unsaved_from, self._in_flight_from)
        return min([self.position.upto, *(number for number in unsaved if number is not None)])

    # -- fetching ----------------------------------------------------------------------------------------
    async def fetch(
        self,
        most: int,
        room: int,
        wait: float,
        holder: str,
        hidden: Callable[[], Withheld | None] = lambda: None,
    ) -> list[Delivery]:
        """Deliver up to `most` messages, in `room` bytes. Waits up to `wait` seconds for the first.

        Returns none if none arrives in that time. Raises InvalidRequest, StreamNotFound, CorruptData,
        StorageFailed, or ResponseTooLarge for a single message larger than `room`, which counts as
        delivered. Raises Unauthorized if the next message is `hidden` from the client: it stays for others.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        place = object()
        try:
            while True:
                self._check()
                if self.config.disabled:
                    raise InvalidRequest(f"{self._label} is disabled by its definition")
                if self.paused:
                    raise InvalidRequest(f"{self._label} is paused; resume it (resumeExports)")
                leases: list[Lease] = []
                found, too_large, denied, more = self._take(most, room, holder, leases, hidden())
                if leases:
                    self._waiting.pop(place, None)
                    self.wake()  # before the write, so that the next one shares it
                    try:
                        await self._save()
                    except BaseException:
                        self._take_back(leases)
                        raise
                if found:
                    return found
                if too_large is not None:
                    raise ResponseTooLarge(
                        f"{self._label}: message {too_large} is larger than the {room} bytes of a reply; "
                        "accept larger packets, or terminate the message"
                    )
                if denied is not None:
                    raise Unauthorized(
                        f"{self._label}: this client is denied `read` on the topic of message {denied}, "
                        "which is next; use a consumer whose `topics` leave it out, or define one"
                    )
                if more:
                    await asyncio.sleep(0)
                elif loop.time() >= deadline:
                    return []
                else:
                    await self._until(place, deadline)
        finally:
            if self._waiting.pop(place, None) is not None:  # it may have been woken, and has not looked
                self.wake()

    def _check(self) -> None:
        if self.stream.closed:
            raise StreamNotFound(f"stream {self.stream.name!r} was deleted")
        if self.closed:
            raise InvalidRequest(f"{self._label} was deleted")

    def _take(
        self, most: int, room: int, holder: str, leases: list[Lease], withheld: Withheld | None
    ) -> tuple[list[Delivery], int | None, int | None, bool]:
        """Lease available messages.

        Returns them, a message that is too large, one that is withheld, and whether to look again.
        """
        now = self.stream.clock.now()
        found: list[Delivery] = []
        too_large: int | None = None
        denied: int | None = None

        def add(row: StreamMessage) -> bool:
            """Lease a message; False if it does not fit."""
            nonlocal room, too_large, denied
            if withheld is not None and withheld(row.topic.decode(), row.payload):
                denied = row.sequence_number
                return False
            size = len(row.payload) + len(row.topic) + 2 * len(row.headers)
            size += len(self.stream.name) + PER_MESSAGE
            if size > room and (found or leases):
                return False
            until = now + self.config.ack_deadline_millis
            lease = self.position.deliver(row.sequence_number, until, len(row.payload), holder)
            leases.append(lease)
            if size > room:
                too_large = row.sequence_number
                return False
            room -= size
            found.append(Delivery(row, lease.deliveries))
            return True

        full = self._take_due(now, most, room, add)
        more = False
        if not full and denied is None and len(found) < most:
            most = min(most - len(found), self.config.max_unacknowledged - len(self.position.leases))
            if most > 0:
                more = self._take_new(most, add)
        return found, too_large, denied, more

    def _take_due(self, now: int, most: int, room: int, add: Callable[[StreamMessage], bool]) -> bool:
        """Deliver again messages whose lease has ended. Returns whether the reply is full."""
        position = self.position
        numbers = position.due(now, min(most, DUE))
        try:
            for first, last in Ranges(zip(numbers, numbers, strict=True)):
                while first <= last:
                    rows = self._host.rows(self.stream, first, last + 1, last - first + 1, room)
                    for row in rows:
                        number = row.sequence_number
                        self._gone(first, number - 1)
                        first = number + 1
                        if not self._is_ending(position.leases[number]) and not add(row):
                            return True
                    if not rows:
                        self._gone(first, last)
                        break
        finally:
            for number in numbers:
                lease = position.leases.get(number)
                if lease is not None and lease.until <= now and not self._is_ending(lease):
                    position.requeue(number)
        return len(numbers) == DUE

    def _take_new(self, most: int, add: Callable[[StreamMessage], bool]) -> bool:
        """Deliver new messages. Returns whether there may be more that were not read."""
        position, stream, topics = self.position, self.stream, self.config.topics
        left_out = Withheld(self.config.withheld)
        self._gone(position.frontier, stream.oldest - 1)
        start, end = position.frontier, stream.next_sequence
        if start >= end:
            return False
        # If few messages match, more are read at a time.
        wanted = min(max(most, self._scan), SCAN)
        rows = self._host.rows(stream, start, end, wanted, SCAN_BYTES)
        taken = 0
        for row in rows:
            number = row.sequence_number
            self._gone(position.frontier, number - 1)
            topic = row.topic.decode()
            if (topics and not any(matches(one, topic) for one in topics)) or left_out(topic, row.payload):
                position.skip(number, number)
                continue
            if taken == most or not add(row):
                self._scan = FEW
                return False
            taken += 1
        if not rows:
            self._gone(start, end - 1)
        self._scan = FEW if taken else min(2 * self._scan, SCAN)
        return not taken and position.frontier < end

    def _gone(self, first: int, last: int) -> None:
        if first <= last:
            counts, drops = self.position.counts, self.stream.drops
            for a, b in self.position.settled.missing(first, last):
                counts.passed = counts.passed.add(drops.within(a, b))
            self.position.skip(first, last)

    def _take_back(self, leases: Iterable[Lease]) -> None:
        """Undo the delivery of messages that the client did not get."""
        now = self.stream.clock.now()
        for lease in leases:
            if self.position.leases.get(lease.number) is lease:
                self.position.take_back(lease, now)
        self.wake()

    def _is_exhausted(self, lease: Lease) -> bool:
        most = self.config.max_deliveries
        return most is not None and lease.deliveries >= most

    def _is_ending(self, lease: Lease) -> bool:
        """Return whether a message is not delivered again, because it is or will be rejected."""
        return lease.number in self._rejecting or self._is_exhausted(lease)

    # -- waiting -----------------------------------------------------------------------------------------
    def wake(self) -> None:
        """Have the first of the waiting fetches look, because there may be messages, or none to wait for."""
        woken = next(iter(self._waiting.values()), None)
        if woken is not None:
            _wake(woken)

    async def _until(self, place: object, deadline: float) -> None:
        """Wait until messages may be available, or until a time of the event loop."""
        loop = asyncio.get_running_loop()
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if (due := self.position.next_due()) is not None:
            left = max(0, due - self.stream.clock.now()) / 1000 + 0.001
            self._due = loop.call_later(left, self.wake)
        woken = self._waiting[place] = loop.create_future()
        timer = loop.call_at(deadline, _wake, woken)
        try:
            await woken
        finally:
            timer.cancel()

    # -- acknowledging -----------------------------------------------------------------------------------
    async def acknowledge(self, verdicts: Verdicts, holder: str, *, trusted: bool) -> list[int]:
        """Settle, release or extend leases. Returns the numbers to which that did not apply.

        Those are already settled, or leased to another client (for `nack`, `in_progress` and `terminate`,
        unless the caller is `trusted`). Raises InvalidRequest for a number that was never delivered, before
        anything is changed, and StorageFailed, after which the client should repeat the request.
        """
        self._check()
        position, now, wall = self.position, self.stream.clock.now(), self.stream.clock.wall()
        for number in (*verdicts.ack, *verdicts.nack, *verdicts.in_progress, *verdicts.terminate):
            if not 0 <= number < position.frontier:
                raise InvalidRequest(f"{self._label}: message {number} was not delivered")
        other: list[int] = []

        def is_mine(number: int) -> bool:
            lease = position.leases.get(number)
            if lease is None or number in self._rejecting:
                return False
            return trusted or lease.holder in (None, holder)

        done = position.leases.keys() & verdicts.ack
        if done:
            position.settle(done, rejected=False, now=wall)
        other += [number for number in verdicts.ack if number not in done]
        for number in verdicts.nack:
            if is_mine(number):
                position.hold(number, now + verdicts.delay, None)
            else:
                other.append(number)
        for number in verdicts.in_progress:
            if is_mine(number):
                known = position.leases[number].holder
                until = now + self.config.ack_deadline_millis
                position.hold(number, until, holder if known is None else known)
            else:
                other.append(number)
        reason = verdicts.reason[:MOST_REASON] or "terminated by a client"
        ending = {number: reason for number in verdicts.terminate if is_mine(number)}
        other += [number for number in verdicts.terminate if number not in ending]
        if ending:
            await self._reject(ending)
        await self._save()
        self.wake()
        return other

    # -- dead letters ------------------------------------------------------------------------------------
    async def _reject(self, reasons: dict[int, str]) -> None:
        """Settle messages as rejected, each after its dead letter is stored. Raises StreamBridgeError."""
        position = self.position
        self._rejecting |= reasons.keys()
        try:
            for count, (number, reason) in enumerate(reasons.items(), 1):
                if not count % REJECTED:
                    await asyncio.sleep(0)
                for row in self._host.rows(self.stream, number, number + 1, 1, 1):
                    await self._dead_letter(row, reason)
                if self.position is position and number in position.leases:  # the start may have moved
                    position.settle([number], rejected=True, now=self.stream.clock.wall())
        finally:
            self._rejecting -= reasons.keys()
            for number in reasons:
                self.position.requeue(number)

    async def _dead_letter(self, row: StreamMessage, reason: str) -> None:
        log.warning("%s: message %d was rejected: %s", self._label, row.sequence_number, reason)
        name = self.config.dead_letter_stream
        if not name:
            return
        record = Record(
            row.sequence_number, row.ingest_time, row.topic.decode(errors="replace"), row.payload, row.headers
        )
        place = self.stream.name, self.config.identifier
        try:
            await self._host.append(name, dead_letter(*place, record, reason))
        except MessageTooLarge:  # it always will be
            await self._host.append(name, dead_letter(*place, record, reason, with_payload=False))

    def refresh(self) -> None:
        """Skip dropped messages, and reject those delivered too often. Called every second.

        Saves a start by time: a time in the future would mean another message at the next start.
        """
        stream, position = self.stream, self.position
        if self.closed or stream.closed:
            return
        if stream.drops.number != self._drops_seen:
            self._drops_seen = stream.drops.number
            self._gone(position.upto, stream.oldest - 1)
            for number in [n for n in position.leases if stream.drops.count(n, n)]:
                self._gone(number, number)
            self.wake()
        if self.config.start_time is not None and self._saved < 0 and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._save_start())
        if self.config.max_deliveries is not None and self._task is None:
            now = stream.clock.now()
            found = {
                number: f"delivered {lease.deliveries} times without an acknowledgement"
                for number, lease in position.leases.items()
                if lease.until <= now and self._is_exhausted(lease) and number not in self._rejecting
            }
            if found:
                self._task = asyncio.get_running_loop().create_task(self._reject_exhausted(found))

    async def _save_start(self) -> None:
        try:
            with suppress(StreamBridgeError):  # it is tried again
                await self._save()
        finally:
            self._task = None

    async def _reject_exhausted(self, found: dict[int, str]) -> None:
        try:
            await self._reject(found)
            await self._save()
            self.error = None
        except (StreamBridgeError, OSError) as error:
            text = f"messages that were delivered too often stay: {error}"
            if self.error != text:
                log.error("%s: %s", self._label, text)
            self.error = text
        finally:
            self._task = None
            self.wake()

    # -- the journal -------------------------------------------------------------------------------------
    async def _save(self) -> None:
        """Wait until all changes so far are on the disk. Raises StorageFailed.

        A write begins after the current work of the loop, so requests that arrive together share it. A
        position that was replaced because the start has changed is not waited for.
        """
        position, wanted = self.position, self.position.version
        while self.position is position and self._saved < wanted:
            if self._before is not None:
                await self._before
                self._before = None
                self._check()
            if self._flight is None:
                self._flight = asyncio.get_running_loop().create_future()
                self._flight.add_done_callback(_seen)
                self._host.runtime.soon(self._write, self._flight)
            await asyncio.shield(self._flight)
            self._check()

    def _write(self, flight: asyncio.Future[None]) -> None:
        if self.closed:
            self._flight = None
            flight.set_result(None)
            return
        position, now = self.position, self.stream.clock.now()
        version, low = position.version, position.unsaved_from
        change = None if self._whole else position.take(now)
        if change is not None and self._journal.fits(change):
            work = partial(self._journal.append, change)
        else:
            most = max(self.config.max_unacknowledged, len(position.leases))
            work = partial(self._journal.write_whole, position.whole(now), most)
        self._in_flight_from = low

        def done(error: BaseException | None) -> None:
            self._flight = None
            self._in_flight_from = None
            if error is None:
                if self.position is position:  # unless the start has changed during the write
                    self._whole, self._saved = False, version
                flight.set_result(None)
                return
            self._whole = True  # the remains of a failed write are not trusted
            if low is not None:
                later = position.unsaved_from
                position.unsaved_from = low if later is None else min(low, later)
            reason = getattr(error, "strerror", None) or error
            flight.set_exception(
                StorageFailed(
                    f"{self._label}: {self.path} cannot be written: {reason}; nothing was delivered or is "
                    "lost. Repeat the request when the disk works"
                )
            )

        self._host.runtime.work(work, done)

    def close(self) -> asyncio.Future[None] | None:
        """Stop, and fail waiting fetches. Returns the write that must end before the file may be removed."""
        self.closed = True
        self.wake()
        if self._due is not None:
            self._due.cancel()
        if self._task is not None:
            self._task.cancel()  # unsettled messages are rejected after the next start
        if self._flight is None:
            self._journal.close()
            return None
        self._flight.add_done_callback(lambda _: self._journal.close())
        return self._flight


def stored_status(
    data_dir: Path, stream: str, epoch: int, identifier: str, drops: Drops | None = None
) -> ExportStatus:
    """Return the status of a consumer from its file, or that of a new one without a file."""
    loaded, position = None, Position(0)
    with suppress(CorruptData, OSError):
        loaded = load(path_of(data_dir, stream, identifier))
    if loaded is not None and loaded.identity.epoch == epoch:
        for change in loaded.changes:
            position.apply(change, 0)
    return _status(identifier, position, None, drops)


def _status(identifier: str, position: Position, error: str | None, drops: Drops | None) -> ExportStatus:
    counts, passed = position.counts, position.counts.passed
    return ExportStatus(
        export_config_identifier=identifier,
        last_exported_sequence_number=passed.sent_below(position.upto),
        passed_sequence_number=position.upto - 1,
        lost_messages_count=passed.lost,
        last_lost=(passed.lost_first, passed.lost_last) if passed.lost else None,
        last_lost_time=drops.time_of(passed.lost_last) if drops is not None and passed.lost else 0,
        last_export_time=counts.last_time,
        error_message=error,
        exported_bytes_from_stream=counts.size,
        exported_messages_count=counts.messages,
        rejected_messages_count=counts.rejected,
        skipped_messages_count=counts.skipped,
        unacknowledged_messages_count=len(position.leases),
    )


def _identity(stream: Stream, config: ConsumerConfig) -> Identity:
    begun = stream.meta.begun.get(config.identifier, 0)
    return Identity(stream.epoch, config.start_sequence_number, config.start_time or "", begun)


def _seen(flight: asyncio.Future[None]) -> None:
    """Mark an error as retrieved: waiters get it, and it does not matter if there are none."""
    if not flight.cancelled():
        flight.exception()


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
