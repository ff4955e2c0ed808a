"""One stream: appends become commit groups, groups become frames, limits drop what is too much.

A message passes through these states:
    pending     appended, in memory; has a provisional number, that counts from the last commit
    in flight   its group is on its way to the files
    committed   the group is in the files; the number is final, the waiters are told
If a group cannot be stored, it and everything pending behind it fails together: the waiters get the
error, the numbers are given to later messages, and the next append tries the disk again.

All methods are for the event loop's thread, but `SegmentLog.write` and `sync`, which a `Committer` may
run in a worker thread while `busy` is set; no other group of the stream is staged in that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from bridge.clock import Clock
from bridge.errors import MessageTooLarge, StorageFailed, StreamError, StreamFull
from bridge.streams import meta as metadata
from bridge.streams import recovery, whole
from bridge.streams.dedup import Window
from bridge.streams.drops import DropLog, Reason
from bridge.streams.group import Group
from bridge.streams.layout import FULL, Files
from bridge.streams.log import SegmentLog, Staged
from bridge.streams.meta import Meta, Settings
from bridge.streams.reader import StreamReader
from bridge.streams.recovery import Damage
from bridge.streams.retention import Exact
from bridge.streams.segment import FRAME, HEADER, RECORD_OVERHEAD, Summary

Waiter = Callable[[StreamError | None], None]
WEIGH_EVERY = 256 * 1024  # bytes that the pending group grows by between two looks at back-pressure
FULL_FOR = 60.0  # seconds after a refused message in which a stream counts as full, if none is stored
DISK_ROOM = 16 * 1024  # bytes that are freed on a full disk beside what a group needs: blocks, records
FRAMING = 2 * (FRAME.size + HEADER.size)  # room that a group may need beside its messages


class Stream:
    """The writer of one stream. Sizes in bytes, times in ms."""

    def __init__(
        self,
        files: Files,
        home: Path,
        data: Path,
        meta: Meta,
        *,
        schedule: Callable[[Stream], None],
        weigh: Callable[[Stream], None],
        bury: Callable[[Stream], None],
        relieve: Callable[[Stream, int], bool],
        on_event: Callable[[str, str], None],
        clock: Clock,
        floor: int = 0,
    ) -> None:
        """Open the stream; raises OSError.

        `home` holds its definition, `data` its segments. Numbering goes on at `floor` at the least.
        """
        self.files, self.home, self.directory, self.meta = files, home, data, meta
        self.clock = clock
        self.counters: dict[str, int] = {}
        self.exported_upto: int | None = None
        self.oldest = 0  # all below it are gone
        damage = recovery.mend_drops(files, data, meta)
        self.drops = DropLog(files, data)
        if self.drops.ranges:  # also when the segment with the last frame has lost that frame
            floor = max(floor, self.drops.ranges[-1].last + 1)
        self.log = SegmentLog(files, data, meta, self.drops, clock)
        self.log.open(floor)
        clock.observe(self.log.active.index.last_age)
        self._on_event = on_event
        self.exact: Exact | None = None
        self._report(damage + self.log.damage)
        memory = meta.settings.memory
        if floor > self.log.next:
            self._gone([(self.log.next, floor - 1)], Reason.MEMORY if memory else Reason.SKIPPED)
            self.log.replace_active(floor)
        self._gone([(0, self.log.first - 1)], Reason.MEMORY if memory else Reason.UNKNOWN)
        self._ill = set[int]()  # segments with damage that could not be set aside yet
        self.error: StreamError | None = None
        self._refused = "", 0.0, 0  # why there was no room for a message, when, and its provisional number
        self.on_commit: list[Callable[[], None]] = []
        self.busy = self.closed = self._maintain_late = False
        self._schedule, self._scheduled, self._weigh = schedule, False, weigh
        self._bury, self._relieve = bury, relieve
        self._group, self._waiters = Group(), list[Waiter]()
        self._flight_waiters, self._flight_size = list[Waiter](), 0
        self._rested = asyncio.Event()  # set for an instant
        self._next = self.log.next
        self._remove_dead()
        self.window: Window | None = None
        if meta.settings.dedup_window is not None:
            self.deduplicate()
        self._apply()

    # -- what it is ------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        """The stream's name."""
        return self.meta.name

    @property
    def epoch(self) -> int:
        """When the stream was created, Unix time in ms."""
        return self.meta.epoch

    @property
    def settings(self) -> Settings:
        """How it is stored."""
        return self.meta.settings

    @property
    def next_sequence(self) -> int:
        """The number after the newest committed message."""
        return self.log.next

    @property
    def total_bytes(self) -> int:
        """The size of its segment files."""
        return self.log.total_bytes

    @property
    def pending_bytes(self) -> int:
        """What waits in memory to be committed."""
        return self._group.size + self._flight_size

    @property
    def waiting(self) -> int:
        """How many messages wait for their group to be staged."""
        return len(self._group.parts) // 2

    def live_messages(self) -> int:
        """How many messages can be read: a number that was given and not dropped is one."""
        return self.log.next - self.drops.number

    def reader(self) -> StreamReader:
        """A new reader of the stream's files; the caller closes it."""
        return StreamReader(self.directory, self.files, self.drops)

    def configure(self, settings: Settings, definition: bytes) -> None:
        """Change the settings; limits take effect at once. Raises OSError: nothing changed, or it says so."""
        fresh = msgspec.structs.replace(
            self.meta, settings=settings, definition=definition, generation=self.meta.generation + 1
        )
        window = self._loaded(settings.dedup_window) if settings.dedup_window is not None else self.window
        while True:
            try:
                metadata.save(self.files, self.home, fresh, self.meta)
                break
            except OSError as error:
                if error.errno not in FULL or not self._relieve(self, DISK_ROOM):
                    raise
        self.meta, self.window = fresh, window
        self._apply()

    def _apply(self) -> None:
        if self.window is not None:
            self.window.configure(self.settings.dedup_window)
        if self.exact is not None:
            self.exact.close()
        self.exact = Exact(self) if self.settings.limits != metadata.ExactLimits() else None
        self._set_room()
        with contextlib.suppress(OSError):  # tried again with every commit and every second
            self.maintain(self.clock.now())

    def deduplicate(self) -> None:
        """Have message ids count from now on, also if the settings do not say for how long."""
        self.window = self._loaded(self.settings.dedup_window)

    def _loaded(self, length: int | None) -> Window:
        if self.window is not None:
            return self.window
        window = Window(length)
        window.load(self, self.clock.now())
        return window

    async def idle(self) -> None:
        """Wait until no group is in flight."""
        while self.busy:
            await self._rested.wait()

    def rest(self) -> None:
        """Nothing is in flight any more: tell those who wait for that."""
        self.busy = False
        self._rested.set()
        self._rested.clear()

    def close(self) -> None:
        """Close the files, as soon as no thread uses them. What is pending fails."""
        self.closed = True
        if self.exact is not None:
            self.exact.close()
        self.log.close()
        self.fail(OSError(0, "the stream was closed"))
        self._set_room()

    # -- appending -------------------------------------------------------------------------------
    def append(self, topic: bytes, payload: bytes, headers: bytes = b"", message_id: bytes = b"") -> int:
        """Add a message to the pending group; returns its provisional number.

        With a deduplication window, a message id seen in it gives the first message's number and
        adds nothing. Raises StreamFull, MessageTooLarge or StorageFailed, and then nothing was added.
        """
        group = self._group
        parts = group.parts
        size = len(topic) + len(payload) + RECORD_OVERHEAD
        if headers or message_id:
            if message_id and self.window is not None:
                known = self.window.find(message_id)
                if known is not None:
                    self.count("deduplicated")
                    return known
            size += len(headers) + len(message_id) + 8
        if group.size + size > self._room:
            self._admit(topic, len(topic) + len(payload) + len(headers) + len(message_id), size)
        if headers or message_id:
            if headers:
                group.headers[len(parts) >> 1] = headers
            if message_id:
                group.ids[len(parts) >> 1] = message_id
                if self.window is not None:
                    self.window.add(message_id, self._next, self.clock.now())
        group.size += size
        parts.append(topic)
        parts.append(payload)
        number = self._next
        self._next = number + 1
        if not self._scheduled:
            self._scheduled = True
            self._schedule(self)
        return number

    def ensure_admits(self, topic: bytes, payload: bytes, headers: bytes = b"") -> None:
        """Raise what `append` would: for who appends to several streams, and wants it in all or in none."""
        data = len(topic) + len(payload) + len(headers)
        self._check(topic, data, data + RECORD_OVERHEAD + 8)

    def after_commit(self, done: Waiter) -> None:
        """Call `done` when all that was appended so far is committed (None) or has failed (the error).

        The calls of one stream come in the order in which they were asked for.
        """
        if self._group.parts:
            self._waiters.append(done)
        elif self._flight_size:
            self._flight_waiters.append(done)
        else:
            done(None)

    def _set_room(self) -> None:
        """How large the pending group may grow before `_admit` is asked."""
        settings = self.settings
        if self.closed or (self.exact is not None and self.exact.guards_appends):
            self._room = -1
        elif settings.overwrite:
            self._room = settings.max_size - FRAMING
        else:
            self._room = settings.max_size - self.log.total_bytes - self._flight_size - FRAMING
        self._room = min(self._room, self._group.size + WEIGH_EVERY)

    def _admit(self, topic: bytes, data: int, size: int) -> None:
        self._check(topic, data, size)
        if self.exact is not None:
            self.exact.admitted(topic, data)

    def _check(self, topic: bytes, data: int, size: int) -> None:
        if self.closed:
            raise StorageFailed(f"stream {self.name!r} was deleted or the service stops; nothing was stored")
        self._weigh(self)
        self._set_room()
        settings = self.settings
        if size + FRAMING > settings.max_size:
            self.count("too_large")
            raise MessageTooLarge(
                f"stream {self.name!r}: a message of {data} bytes is larger than the stream "
                f"(maxSize {settings.max_size}); send smaller messages or raise maxSize"
            )
        if not settings.overwrite:
            self._reject_if_full(size)
        if self.exact is not None:
            self.exact.check(topic, data, self._next - self.log.next)

    def _reject_if_full(self, size: int) -> None:
        settings = self.settings
        needed = self._group.size + size + self._flight_size + FRAMING
        if self.log.total_bytes + needed > settings.max_size and settings.free_exported:
            with contextlib.suppress(OSError):  # then it is full
                whole.free(self, needed)
            self._set_room()
        if self.log.total_bytes + needed > settings.max_size:
            raise self.full(
                f"{self.log.total_bytes} of maxSize {settings.max_size} bytes "
                f"are in use and it rejects new data; raise maxSize, set a limit, or let it overwrite"
            )

    def full(self, why: str) -> StreamFull:
        """Take note of a message that is refused since the stream is full; returns the error to raise."""
        self.count("full")
        error = StreamFull(f"stream {self.name!r} is full: {why}")
        self._refused = str(error), time.monotonic(), self._next
        return error

    @property
    def cannot_store(self) -> str | None:
        """Why the last message was not stored, because of the disk or for lack of room; None if it was.

        What was refused for lack of room is forgotten after `FULL_FOR`, since there may be room again.
        """
        if self.error is not None:
            return str(self.error)
        why, since, before = self._refused
        return why if why and self.log.next <= before and time.monotonic() - since < FULL_FOR else None

    # -- committing ------------------------------------------------------------------------------
    def begin(self) -> Staged | None:
        """Stage the pending group; None if there is none or it failed. Sets `busy`."""
        self._scheduled = False
        group, waiters = self._group, self._waiters
        if not group.parts or self.closed:
            return None
        self._group, self._waiters = Group(), []
        self._flight_waiters, self._flight_size = waiters, group.size
        while True:
            try:
                if self.settings.overwrite:
                    whole.make_room(self, group.size + FRAMING)
                staged = self._stage(group)
                break
            except OSError as error:
                if error.errno not in FULL or not self._relieve(self, group.size + DISK_ROOM):
                    self.fail(error)
                    return None
        self.busy = True
        self._set_room()
        return staged

    def postpone(self) -> None:
        """Begin no group now: the next message asks for it again, or who calls this does."""
        self._scheduled = False

    def restage(self, staged: Staged, *, elsewhere: bool) -> Staged:
        """After a failed write of a staged group: the same group once more; raises OSError.

        `elsewhere`: to a new segment. After a failed sync what the old file holds of the group is not
        trusted any more, whatever a second sync of it would say (the kernel marks pages clean whose write
        has failed).
        """
        self.log.abort(staged)
        if elsewhere:
            self.log.replace_active()
        return self._stage(staged.group)

    def made_room(self, staged: Staged, error: OSError) -> bool:
        """After a write of a staged group failed: whether the disk was full, and something could be freed."""
        if error.errno not in FULL:
            return False
        self.log.abort(staged)
        self.busy = False  # of the group nothing is in the active segment, so that may go too
        try:
            return self._relieve(self, staged.group.size + DISK_ROOM)
        finally:
            self.busy = True

    def _stage(self, group: Group) -> Staged:
        settings = self.settings
        return self.log.stage(group, settings.segment_size, sync=settings.flush)

    def finish(self, staged: Staged, error: OSError | None) -> None:
        """Take over the result of `SegmentLog.write`: tell the waiters, apply the limits."""
        if error is not None:
            self.log.abort(staged)
            self.fail(error)
            return
        self.log.commit(staged, synced=self.settings.flush)
        self.error = None
        waiters, self._flight_waiters, self._flight_size = self._flight_waiters, [], 0
        self.rest()
        if self.exact is not None:
            try:
                self.exact.committed(staged, self.clock.now())
            except OSError as trouble:  # the messages are stored: that is what the waiters ask for
                self._on_event(self.name, f"cannot apply its limits now: {trouble}")
        self._set_room()
        if self._group.parts:  # it may have been scheduled while we were busy, and passed over
            self._scheduled = True
            self._schedule(self)
        for waiter in waiters:
            waiter(None)
        for told in self.on_commit:
            told()
        if self._maintain_late:
            with contextlib.suppress(OSError):
                self.maintain(self.clock.now())

    def fail(self, error: OSError) -> None:
        """Nothing pending is stored: all of it fails together, and the numbers are free again."""
        if self._next == self.log.next and not self._flight_waiters and not self._waiters:
            self._scheduled = False
            self.rest()
            return
        self.count("failed", self._next - self.log.next)
        self.error = StorageFailed(
            f"stream {self.name!r} cannot be written in {self.directory}: {error.strerror or error}; nothing "
            f"was acknowledged. Appends work again as soon as the disk does"
        )
        if self.exact is not None:
            self.exact.failed()
        if self.window is not None:
            self.window.forget(self.log.next)
        waiters = [*self._flight_waiters, *self._waiters]
        self._group, self._waiters, self._flight_waiters, self._flight_size = Group(), [], [], 0
        self._next = self.log.next
        self._scheduled = False
        self.rest()
        self._set_room()
        for waiter in waiters:
            waiter(self.error)

    def count(self, what: str, number: int = 1) -> None:
        """Count something that an operator wants to know of."""
        self.counters[what] = self.counters.get(what, 0) + number

    # -- dropping --------------------------------------------------------------------------------
    def drop(self, ranges: list[tuple[int, int]], reason: Reason) -> int:
        """Drop the messages of these ranges (both ends included); returns how many there were.

        Segments at the front that hold no live message any more are deleted.
        """
        if self.exact is not None and reason is not Reason.LIMITS:
            self.exact.dropping(ranges)
        number = self._gone(ranges, reason)
        self._remove_dead()
        return number

    def _gone(self, ranges: list[tuple[int, int]], reason: Reason) -> int:
        number = sum(
            drop.last - drop.first + 1 for drop in self.drops.record(ranges, self.clock.wall(), reason)
        )
        if number:
            self.count(reason.name.lower(), number)
        return number

    def drop_upto(self, number: int, reason: Reason) -> int:
        """Drop all messages below `number`; as `drop`."""
        return self.drop([(self.oldest, min(number, self.log.next) - 1)], reason)

    def _remove_dead(self) -> None:
        """Let go of the segments at the front that hold no live message; the active one stays.

        Their files are removed in a worker thread; what the disk refuses to remove, another time.
        """
        log = self.log
        if log.frozen:
            return
        self.oldest = min(self.drops.first_live(max(log.first, self.oldest)), log.next)
        try:
            if self.oldest >= log.next > log.active.index.base and not self.busy:
                log.leave_active()
        except OSError as error:
            self._on_event(self.name, f"{self.directory}: cannot begin a new segment: {error.strerror}")
        while log.first < log.active.index.base and log.following(log.first) <= self.oldest:
            log.remove_first()
        self.drops.compact_file(self.oldest)
        self._bury(self)

    # -- damage ----------------------------------------------------------------------------------
    def heal(self, base: int) -> bool:
        """Check a segment and set what is damaged aside; False: `maintain` will. Raises OSError."""
        if self.busy or base not in self.log.sizes or self.log.is_syncing(base):
            self._ill.add(base)
            return False
        self._report(self.log.mend(base))
        self._ill.discard(base)
        self._remove_dead()
        return True

    def summary(self, base: int) -> Summary:
        """What a segment holds; damage that is found on the way is set aside. Raises OSError."""
        known = len(self.log.damage)
        found = self.log.summary(base)
        self._report(self.log.damage[known:])
        return found

    def _report(self, found: list[Damage]) -> None:
        for damage in found:
            self._gone(damage.lost, Reason.DAMAGED)
            lost = ", ".join(f"{first}-{last}" for first, last in damage.lost)
            self._on_event(self.name, f"{damage.path}: {damage.what}" + (f"; lost: {lost}" if lost else ""))
            if self.exact is not None:
                self.exact.stale = True

    # -- time ------------------------------------------------------------------------------------
    def maintain(self, now: int) -> None:
        """Apply what depends on time and on changed settings. Called now and then; raises OSError.

        `now` is in ms on the age timeline.
        """
        self.drops.save()
        self._bury(self)
        self._maintain_late = self.busy
        if self.busy:
            return
        for base in sorted(self._ill & self.log.sizes.keys()):
            self.heal(base)
        whole.expire(self, now)
        if self.settings.overwrite:
            whole.make_room(self, FRAMING)
        elif self.settings.free_exported:
            whole.free(self, 0)  # it holds more than `max_size` if that was lowered
        if self.exact is not None:
            self.exact.enforce(now)
        if self.window is not None:
            self.window.expire(now)
        self._set_room()
