"""One stream: appends become commit groups, groups become frames, limits drop what is too much.

`Stream` alone changes its files: it has a queue of what is not committed yet (`queue`), a log (`log`) and
a record of what is gone (`drops`). Policies look at it (`view`) and tell what is to go.

All methods are for the event loop's thread, but those that say so, which a `Committer` may run in a worker
thread while `busy` is set; no other group of the stream is staged in that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from bridge.clock import Clock
from bridge.errors import CorruptData, MessageTooLarge, StorageFailed, StreamError, StreamFull
from bridge.streams import meta as metadata
from bridge.streams import recovery, segment_limits
from bridge.streams.dedup import Window
from bridge.streams.drops import DropLog, DropReason
from bridge.streams.layout import FULL, Files
from bridge.streams.log import SegmentLog
from bridge.streams.message_limits import MessageLimitPolicy, Ranges
from bridge.streams.meta import Meta, StorageSettings
from bridge.streams.queue import CommitQueue, Group, Waiter
from bridge.streams.reader import StreamReader
from bridge.streams.recovery import Damage
from bridge.streams.segment import FRAME, HEADER, RECORD_OVERHEAD, Frame, SegmentSummary
from bridge.streams.segment_limits import Removal
from bridge.streams.staging import OpenSegment, Staged
from bridge.streams.view import Segments

PRESSURE_STEP = 256 * 1024  # bytes that the pending group grows by between two looks at back-pressure
FULL_FOR = 60.0  # seconds after a rejected message in which a stream counts as full, if none is stored
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
        update_pressure: Callable[[Stream], None],
        delete: Callable[[Stream], None],
        free_space: Callable[[Stream, int], bool],
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
        damage = recovery.repair_drops(files, data, meta)
        self.drops = DropLog(files, data)
        if self.drops.ranges:  # also when the segment with the last frame has lost that frame
            floor = max(floor, self.drops.ranges[-1].last + 1)
        self.log = SegmentLog(files, data, meta, self.drops, clock)
        self.log.open(floor)
        self.obsolete = self.log.obsolete
        clock.observe(self.log.active.index.last_age)
        self._on_event = on_event
        self.limits: MessageLimitPolicy | None = None
        self._report(damage + self.log.damage)
        memory = meta.settings.memory
        if floor > self.log.next:
            self._record([(self.log.next, floor - 1)], DropReason.MEMORY if memory else DropReason.SKIPPED)
            self.log.replace_active(floor)
        self._record([(0, self.log.first - 1)], DropReason.MEMORY if memory else DropReason.UNKNOWN)
        self._damaged = set[int]()  # segments with damage that could not be set aside yet
        self.error: StreamError | None = None
        self._rejected = "", 0.0, 0  # why there was no room for a message, when, and its provisional number
        self.on_commit: list[Callable[[], None]] = []
        self.closed = self._maintain_late = self._continuing = False
        self._update_pressure, self._delete, self._free_space = update_pressure, delete, free_space
        self.queue = CommitQueue(self.log.next, partial(schedule, self))
        self._drop_obsolete()
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
    def settings(self) -> StorageSettings:
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
    def segments(self) -> Segments:
        """Its segment files, to be read only."""
        return self.log

    @property
    def pending_bytes(self) -> int:
        """What waits in memory to be committed."""
        return self.queue.size

    @property
    def busy(self) -> bool:
        """Whether a group is in flight, or files are being rewritten."""
        return self.queue.busy

    def live_messages(self) -> int:
        """How many messages can be read: a number that was given and not dropped is one."""
        return self.log.next - self.drops.number

    def frames(self, start: int, end: int) -> Iterator[tuple[bytes, Frame]]:
        """The sound frames with numbers of start..end-1, in order, each with its buffer; raises OSError.

        Where damage cannot be set aside just now, the rest of its segment is passed over; `maintain` sets it
        aside when it can.
        """
        position, repaired = start, set[int]()
        with contextlib.closing(self.reader()) as reader:
            while position < end:
                before = position
                try:
                    for data, frame in reader.frames(position, end):
                        position = frame.next
                        yield data, frame
                    if position == before:
                        return
                except CorruptData as error:
                    self.count("corrupt_reads")
                    if error.segment in repaired or not self.repair(error.segment):
                        position = max(position + 1, self.log.following(error.segment))
                    repaired.add(error.segment)

    def reader(self) -> StreamReader:
        """A new reader of the stream's files; the caller closes it."""
        return StreamReader(self.directory, self.files, self.drops)

    def configure(self, settings: StorageSettings, definition: bytes) -> None:
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
                if error.errno not in FULL or not self._free_space(self, DISK_ROOM):
                    raise
        self.meta, self.window = fresh, window
        self._apply()

    def _apply(self) -> None:
        if self.window is not None:
            self.window.configure(self.settings.dedup_window)
        if self.limits is not None:
            self.limits.close()
        self.limits = MessageLimitPolicy(self) if self.settings.limits != metadata.MessageLimits() else None
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
        await self.queue.idle()

    def abandon(self, name: Path) -> None:
        """The stream is deleted: its directory is renamed, and no thread makes a file in it any more."""
        self.log.directory.abandon(self.home, name)

    def close(self) -> None:
        """Close the files, as soon as no thread uses them. What is pending fails."""
        self.closed = True
        if self.limits is not None:
            self.limits.close()
        self.log.close()
        self.fail(OSError(0, "the stream was closed"))
        self._set_room()

    # -- appending -------------------------------------------------------------------------------
    def append(self, topic: bytes, payload: bytes, headers: bytes = b"", message_id: bytes = b"") -> int:
        """Add a message to the pending group; returns its provisional number.

        With a deduplication window, a message id seen in it gives the first message's number and
        adds nothing. Raises StreamFull, MessageTooLarge or StorageFailed, and then nothing was added.
        """
        queue = self.queue
        group = queue.group
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
                    self.window.add(message_id, queue.next, self.clock.now())
        group.size += size
        parts.append(topic)
        parts.append(payload)
        number = queue.next
        queue.next = number + 1
        if not queue.scheduled:
            queue.schedule()
        return number

    def ensure_admits(self, topic: bytes, payload: bytes, headers: bytes = b"") -> None:
        """Raise what `append` would: for who appends to several streams, and wants it in all or in none."""
        data = len(topic) + len(payload) + len(headers)
        self._check(topic, data, data + RECORD_OVERHEAD + 8)

    def after_commit(self, done: Waiter) -> None:
        """Call `done` when all that was appended so far is committed (None) or has failed (the error).

        The calls of one stream come in the order in which they were asked for.
        """
        self.queue.after_commit(done)

    def _set_room(self) -> None:
        """How large the pending group may grow before `_admit` is asked."""
        settings = self.settings
        if self.closed or (self.limits is not None and self.limits.guards_appends):
            self._room = -1
        elif settings.overwrite:
            self._room = settings.max_size - FRAMING
        else:
            self._room = settings.max_size - self.log.total_bytes - self.queue.flight_size - FRAMING
        self._room = min(self._room, self.queue.group.size + PRESSURE_STEP)

    def _admit(self, topic: bytes, data: int, size: int) -> None:
        self._check(topic, data, size)
        if self.limits is not None:
            self.limits.admitted(topic, data)

    def _check(self, topic: bytes, data: int, size: int) -> None:
        """Raise what `append` does, and take note of it."""
        if self.closed:
            raise StorageFailed(f"stream {self.name!r} was deleted or the service stops; nothing was stored")
        self._update_pressure(self)
        self._set_room()
        try:
            self._check_size(data, size)
            if self.limits is not None:
                self._refresh(self.limits)
                self.limits.check(topic, data, self.queue.next - self.log.next)
        except MessageTooLarge:
            self.count("too_large")
            raise
        except StreamFull as error:
            self.count("full")
            self._rejected = str(error), time.monotonic(), self.queue.next
            raise

    def _check_size(self, data: int, size: int) -> None:
        settings = self.settings
        if size + FRAMING > settings.max_size:
            raise MessageTooLarge(
                f"stream {self.name!r}: a message of {data} bytes is larger than the stream "
                f"(maxSize {settings.max_size}); send smaller messages or raise maxSize"
            )
        needed = self.queue.size + size + FRAMING
        if settings.overwrite or self.log.total_bytes + needed <= settings.max_size:
            return
        if settings.free_exported:
            with contextlib.suppress(OSError):  # then it is full
                self._drop_segments(segment_limits.exported(self, needed))
            self._set_room()
        if self.log.total_bytes + needed > settings.max_size:
            raise StreamFull(
                f"stream {self.name!r} is full: {self.log.total_bytes} of maxSize {settings.max_size} bytes "
                "are in use and it rejects new data; raise maxSize, set a limit, or let it overwrite"
            )

    def _refresh(self, limits: MessageLimitPolicy) -> None:
        try:
            self._drop_ranges(limits.refresh())
        except OSError as error:
            raise StorageFailed(f"stream {self.name!r}: its limits cannot be checked: {error}") from error

    @property
    def cannot_store(self) -> str | None:
        """Why the last message was not stored, because of the disk or for lack of room; None if it was.

        What was rejected for lack of room is forgotten after `FULL_FOR`, since there may be room again.
        """
        if self.error is not None:
            return str(self.error)
        why, since, before = self._rejected
        return why if why and self.log.next <= before and time.monotonic() - since < FULL_FOR else None

    # -- committing ------------------------------------------------------------------------------
    def begin(self) -> Staged | None:
        """Stage the pending group; None if there is none or it failed. Sets `busy`."""
        group = self.queue.take()
        if group is None or self.closed:
            return None
        while True:
            try:
                if self.settings.overwrite:
                    self._drop_segments(segment_limits.make_room(self, group.size + FRAMING))
                staged = self._stage(group)
                break
            except OSError as error:
                if error.errno not in FULL or not self._free_space(self, group.size + DISK_ROOM):
                    self.fail(error)
                    return None
        self.queue.busy = True
        self._set_room()
        return staged

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

    def freed_space(self, staged: Staged, error: OSError) -> bool:
        """After a write of a staged group failed: whether the disk was full, and something could be freed."""
        if error.errno not in FULL:
            return False
        self.log.abort(staged)
        self.queue.busy = False  # of the group nothing is in the active segment, so that may go too
        try:
            return self._free_space(self, staged.group.size + DISK_ROOM)
        finally:
            self.queue.busy = True

    def _stage(self, group: Group) -> Staged:
        settings = self.settings
        return self.log.stage(group, settings.segment_size, sync=settings.flush)

    def write(self, staged: Staged, *, sync: bool) -> None:
        """Bring a staged group to the files, and with `sync` to the disk; raises OSError. For any thread."""
        self.log.write(staged, sync=sync)

    def finish(self, staged: Staged, error: OSError | None) -> None:
        """Take over the result of `write`: notify the waiters, apply the limits."""
        if error is not None:
            self.log.abort(staged)
            self.fail(error)
            return
        self.log.commit(staged, synced=self.settings.flush)
        self.error = None
        waiters = self.queue.committed()
        if self.limits is not None:
            now = self.clock.now()
            going = self.limits.committed(staged.group, staged.first, staged.data_bytes, now)
            try:
                self._enforce(self.limits, going, now)
            except OSError as trouble:  # the messages are stored: that is what the waiters ask for
                self._on_event(self.name, f"cannot apply its limits now: {trouble}")
        self._set_room()
        self.queue.reschedule()
        for waiter in waiters:
            waiter(None)
        for notify in self.on_commit:
            notify()
        if self._maintain_late:
            with contextlib.suppress(OSError):
                self.maintain(self.clock.now())

    def fail(self, error: OSError) -> None:
        """Nothing pending is stored: all of it fails together, and the numbers are free again."""
        failed = self.queue.next - self.log.next
        waiters = self.queue.clear(self.log.next)
        if not failed and not waiters:
            return
        self.count("failed", failed)
        self.error = StorageFailed(
            f"stream {self.name!r} cannot be written in {self.directory}: {error.strerror or error}; nothing "
            f"was acknowledged. Appends work again as soon as the disk does"
        )
        if self.limits is not None:
            self.limits.failed()
        if self.window is not None:
            self.window.forget(self.log.next)
        self._set_room()
        for waiter in waiters:
            waiter(self.error)

    def discard(self, staged: Staged) -> None:
        """Let go of a staged group after `close`."""
        self.log.discard(staged)

    def count(self, what: str, number: int = 1) -> None:
        """Count something that an operator wants to know of."""
        self.counters[what] = self.counters.get(what, 0) + number

    # -- syncing ---------------------------------------------------------------------------------
    def pin(self) -> None:
        """A worker thread begins to use the files: none is closed until `unpin`."""
        self.log.directory.pin()

    def unpin(self) -> None:
        """A worker thread has done its work."""
        self.log.directory.unpin()

    def unsynced(self) -> list[tuple[OpenSegment, int]]:
        """The segments with committed bytes that are not known to be on the disk, with their sizes."""
        return self.log.unsynced()

    def sync(self, work: list[tuple[OpenSegment, int]]) -> None:
        """Wait until these are on the disk; raises OSError. For any thread."""
        self.log.sync(work)

    def synced(self, work: list[tuple[OpenSegment, int]]) -> None:
        """Take note that they are."""
        self.log.synced(work)

    def begin_rewrite(self) -> None:
        """After a failed sync: nothing is staged or removed until `end_rewrite`."""
        self.queue.busy = self.log.frozen = True
        self.pin()

    def rewrite_unsynced(self) -> Ranges:
        """Write what is not on the disk to new files; returns the numbers that it has cost.

        Raises OSError. For any thread.
        """
        return self.log.rewrite_unsynced()

    def end_rewrite(self, lost: Ranges | None) -> None:
        """What `rewrite_unsynced` returned, None if it failed."""
        self.log.frozen = False
        self.unpin()
        self.queue.release()
        if lost is not None and not self.closed:
            self.log.synced([])
            self.drop(lost, DropReason.DAMAGED)  # also with none: what was dropped meanwhile is let go of

    # -- dropping --------------------------------------------------------------------------------
    def drop(self, ranges: Ranges, reason: DropReason) -> int:
        """Drop the messages of these ranges (both ends included); returns how many there were.

        Segments at the front that hold no live message any more are deleted.
        """
        if self.limits is not None and reason is not DropReason.LIMITS:
            self.limits.dropping(ranges)
        number = self._record(ranges, reason)
        self._drop_obsolete()
        return number

    def _record(self, ranges: Ranges, reason: DropReason) -> int:
        number = sum(
            drop.last - drop.first + 1 for drop in self.drops.record(ranges, self.clock.wall(), reason)
        )
        if number:
            self.count(reason.name.lower(), number)
        return number

    def drop_upto(self, number: int, reason: DropReason) -> int:
        """Drop all messages below `number`; as `drop`."""
        return self.drop([(self.oldest, min(number, self.log.next) - 1)], reason)

    def _drop_segments(self, going: Iterable[Removal]) -> None:
        """Do what a policy asks for; raises OSError."""
        for upto, reason in going:
            if upto > self.log.active.index.base:
                self.log.leave_active()
            self.drop_upto(upto, reason)

    def _drop_ranges(self, going: Iterable[Ranges]) -> None:
        for ranges in going:
            self.drop(ranges, DropReason.LIMITS)

    def _enforce(self, limits: MessageLimitPolicy, going: Iterable[Ranges], now: int) -> None:
        self._drop_ranges(going)
        if limits.unfinished and not self._continuing:
            self._continuing = True
            asyncio.get_running_loop().call_soon(self._continue, now)

    def _continue(self, now: int) -> None:
        self._continuing = False
        if not self.closed:
            with contextlib.suppress(OSError):  # tried again with every commit and every second
                self.maintain(now)

    def _drop_obsolete(self) -> None:
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
        self._delete(self)

    def free_space(self, needed: int, *, exported_only: bool) -> bool:
        """On a full disk, drop what may go for `needed` bytes; whether anything may. Raises OSError."""
        self._drop_segments(segment_limits.free_space(self, needed, exported_only=exported_only))
        return bool(self.obsolete.pending)

    def seal(self) -> None:
        """On a full disk where nothing may go, see to it that something can later; raises OSError."""
        if segment_limits.wants_new_segment(self) and not self.log.frozen:
            self.log.leave_active()

    # -- damage ----------------------------------------------------------------------------------
    def repair(self, base: int) -> bool:
        """Check a segment and set what is damaged aside; False: `maintain` will. Raises OSError."""
        if self.busy or base not in self.log.sizes or self.log.is_syncing(base):
            self._damaged.add(base)
            return False
        self._report(self.log.repair(base))
        self._damaged.discard(base)
        self._drop_obsolete()
        return True

    def damaged(self, base: int) -> bool:
        """A reader has met damage in a segment; as `repair`."""
        self.count("corrupt_reads")
        return self.repair(base)

    def summary(self, base: int) -> SegmentSummary:
        """What a segment holds; damage that is found on the way is set aside. Raises OSError."""
        known = len(self.log.damage)
        found = self.log.summary(base)
        self._report(self.log.damage[known:])
        return found

    def _report(self, found: list[Damage]) -> None:
        for damage in found:
            self._record(damage.lost, DropReason.DAMAGED)
            lost = ", ".join(f"{first}-{last}" for first, last in damage.lost)
            self._on_event(self.name, f"{damage.path}: {damage.what}" + (f"; lost: {lost}" if lost else ""))
            if self.limits is not None:
                self.limits.stale = True

    # -- time ------------------------------------------------------------------------------------
    def maintain(self, now: int) -> None:
        """Apply what depends on time and on changed settings. Called now and then; raises OSError.

        `now` is in ms on the age timeline.
        """
        self.drops.save()
        self._delete(self)
        self._maintain_late = self.busy
        if self.busy:
            return
        for base in sorted(self._damaged & self.log.sizes.keys()):
            self.repair(base)
        self._drop_segments(segment_limits.expired(self, now))
        if self.settings.overwrite:
            self._drop_segments(segment_limits.make_room(self, FRAMING))
        elif self.settings.free_exported:  # it holds more than `max_size` if that was lowered
            self._drop_segments(segment_limits.exported(self, 0))
        if self.limits is not None:
            self._enforce(self.limits, self.limits.enforce(now), now)
        if self.window is not None:
            self.window.expire(now)
        self._set_room()
