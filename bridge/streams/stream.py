"""The writer of one stream: appends become commit groups, groups become frames, limits drop messages.

Only `Stream` changes its files. It has a queue of uncommitted messages (`queue`), a log (`log`) and a record
of drops (`drops`). Policies read the stored messages (`contents`) and return ranges to drop.

All methods must be called in the event loop's thread, unless they say otherwise. A `Committer` may run those
in a worker thread while `busy` is set; no other group of the stream is staged in that time.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from errno import ENOSPC
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bridge import books
from bridge.clock import Clock
from bridge.encryption import OVERHEAD, Keys
from bridge.errors import MessageTooLarge, StorageFailed, StreamDeleted, StreamError, StreamFull
from bridge.objectkeys import MAX_SEQUENCE
from bridge.streams import meta as metadata
from bridge.streams import segment_limits
from bridge.streams.contents import Contents, Ranges
from bridge.streams.dedup import Window
from bridge.streams.drops import DropReason
from bridge.streams.layout import FULL, Files
from bridge.streams.message_limits import MessageLimitPolicy
from bridge.streams.meta import Meta, StorageSettings
from bridge.streams.queue import CommitQueue, Group, Waiter
from bridge.streams.recovery import Damage
from bridge.streams.segment import FRAME, HEADER, RECORD_OVERHEAD
from bridge.streams.segment_limits import Removal
from bridge.streams.staging import OpenSegment, Staged

PRESSURE_STEP = 256 * 1024  # bytes by which the pending group grows between checks of back-pressure
FULL_FOR = 60.0  # seconds for which a stream counts as full after a rejection, if nothing is stored
DISK_ROOM = 16 * 1024  # bytes freed on a full disk beyond the size of the group, for blocks and records
NEAR_LAST = MAX_SEQUENCE - 2**32  # from here on each append is checked; a group has fewer messages
FRAMING = 2 * (FRAME.size + HEADER.size)  # bytes that a group may need in addition to its messages
SEALING = 2 * OVERHEAD  # the same for encryption


class Stream(Contents):
    """Appends to one stream, and drops from it. Sizes in bytes, times in ms."""

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
        soon: Callable[..., object],
        on_event: Callable[[str, str], None],
        clock: Clock,
        floor: int = 0,
        keys: Keys | None = None,
    ) -> None:
        """As `Contents`; `soon` is a `Runtime`'s, the other callables are a `Committer`'s."""
        self._soon = soon
        self.limits: MessageLimitPolicy | None = None  # opening the files may report damage
        super().__init__(
            files,
            home,
            data,
            meta,
            delete=partial(delete, self),
            on_event=on_event,
            clock=clock,
            floor=floor,
            keys=keys,
        )
        self.error: StreamError | None = None
        self._wanted = 0  # bytes that the file system must have free before the error of a full disk is over
        self._rejected = "", 0.0, 0  # why a message did not fit, when, and its provisional number
        self.on_commit: list[Callable[[], None]] = []
        self.closed = self._maintain_late = self._continuing = False
        self._update_pressure, self._free_space = update_pressure, free_space
        self.queue = CommitQueue(self.log.next, partial(schedule, self))
        self._drop_obsolete()
        self.window: Window | None = None
        if meta.settings.dedup_window is not None:
            self.deduplicate()
        self._apply()
        books.opened(self)

    def recount(self) -> Iterable[books.Entry]:
        yield from self.queue.recount()
        yield "total_bytes", self.log.total_bytes, sum(self.log.sizes.values())
        if self.limits is not None:
            yield from self.limits.recount()

    @property
    def pending_bytes(self) -> int:
        """Return the uncommitted bytes in memory."""
        return self.queue.size

    @property
    def busy(self) -> bool:
        """Return whether a group is in flight or files are being rewritten."""
        return self.queue.busy

    def configure(self, settings: StorageSettings, definition: bytes, **beside: Any) -> None:
        """Change the settings. Limits take effect at once. `beside` are fields of `Meta`.

        Raises OSError. Then nothing has changed, unless the error says so.
        """
        window = self._loaded(settings.dedup_window) if settings.dedup_window is not None else self.window
        self._change(settings=settings, definition=definition, **beside)
        self.window = window
        self._apply()

    def pause(self, exports: tuple[str, ...]) -> None:
        """Store which exports are paused. Raises as `configure`."""
        self._change(paused=exports)

    def _change(self, **fields: Any) -> None:
        """Replace fields of the stored definition. On a full disk, free space for it."""
        fresh = msgspec.structs.replace(self.meta, generation=self.meta.generation + 1, **fields)
        while True:
            try:
                metadata.save(self.files, self.home, fresh, self.meta)
                break
            except OSError as error:
                if error.errno not in FULL or not self._free_space(self, DISK_ROOM):
                    raise
        self.meta = fresh

    @property
    def _framing(self) -> int:
        return FRAMING + SEALING if self.log.encrypts else FRAMING

    def _apply(self) -> None:
        self.log.encrypts = self.settings.encryption
        if self.window is not None:
            self.window.configure(self.settings.dedup_window)
        if self.limits is not None:
            self.limits.close()
        limited = self.settings.limits != metadata.MessageLimits()
        self.limits = MessageLimitPolicy(self, self.queue) if limited else None
        self._set_room()
        with contextlib.suppress(OSError):  # retried with every commit and every second
            self.maintain(self.clock.now())

    def deduplicate(self) -> None:
        """Deduplicate by message id from now on, even if the settings define no window."""
        self.window = self._loaded(self.settings.dedup_window)

    def _loaded(self, length: int | None) -> Window:
        if self.window is not None:
            return self.window
        window = Window(length)
        window.load(self, self.clock.now())
        if self.settings.flush and window and not self.busy and (work := self.unsynced()):
            # A kill may have come between write and sync, but a duplicate is acknowledged without a commit.
            with contextlib.suppress(OSError):  # the next background sync retries, in a new file
                self.sync(work)
                self.synced(work)
        return window

    async def idle(self) -> None:
        await self.queue.idle()

    def abandon(self, name: Path) -> None:
        """Delete the stream: rename its directory to `name`. Threads create no more files. Raises OSError."""
        self.log.directory.abandon(self.home, name)

    def close(self) -> None:
        """Close the files as soon as no thread uses them. Pending messages fail."""
        self.closed = True
        if self.limits is not None:
            self.limits.close()
        self.log.close()
        why = f"stream {self.name!r} was deleted before the message was stored"
        self._fail(StreamDeleted(why, why))
        self._set_room()

    # -- appending -------------------------------------------------------------------------------
    def append(self, topic: bytes, payload: bytes, headers: bytes = b"", message_id: bytes = b"") -> int:
        """Add a message to the pending group; returns its provisional number.

        With a deduplication window, an append whose message id is in it adds nothing and returns the first
        message's number. Raises StreamFull, MessageTooLarge or StorageFailed, and then nothing was added.
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
            data = len(topic) + len(payload) + len(headers) + len(message_id)
            self._check(topic, data, size)
            if self.limits is not None:
                self.limits.admitted(topic, data)
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

    def find(self, message_id: bytes) -> int | None:
        """The number of the message with an id, if that is in the deduplication window.

        Begins a window if there is none. Raises StorageFailed.
        """
        if self.window is None:
            try:
                self.deduplicate()
            except OSError as error:
                raise StorageFailed(
                    f"stream {self.name!r}: its message ids cannot be read: {error}; nothing was stored"
                ) from error
        assert self.window is not None
        return self.window.find(message_id)

    def ensure_admits(
        self, topic: bytes, payload: bytes, headers: bytes = b"", message_id: bytes = b""
    ) -> None:
        """Raise what `append` would raise, for a caller that appends to all of several streams or to none."""
        data = len(topic) + len(payload) + len(headers) + len(message_id)
        self._check(topic, data, data + RECORD_OVERHEAD + 8)

    def after_commit(self, done: Waiter, heard: float = math.inf) -> None:
        """Call `done` when everything appended so far is committed (None) or has failed (the error).

        The calls of one stream are made in the order in which they were requested. `heard`: when the client
        was heard before this message, for `delay`; without it the commit is not delayed.
        """
        self.queue.after_commit(done, heard)

    def _set_room(self) -> None:
        """Set the size that the pending group may reach before `append` calls `_check`."""
        settings = self.settings
        guarded = self.limits is not None and self.limits.guards_appends
        near = self.log.next > NEAR_LAST or self.queue.next + PRESSURE_STEP > self._reserved
        if self.closed or guarded or near:
            self._room = -1
        elif settings.overwrite:
            self._room = settings.max_size - self._framing
        else:
            self._room = settings.max_size - self.log.total_bytes - self.queue.flight_size - self._framing
        self._room = min(self._room, self.queue.group.size + PRESSURE_STEP)

    def _check(self, topic: bytes, data: int, size: int) -> None:
        """Raise what `append` raises, and count it."""
        if self.closed:
            raise StorageFailed(f"stream {self.name!r} was deleted or the service stops; nothing was stored")
        self._update_pressure(self)
        self._set_room()
        try:
            self._check_number()
            self._check_size(data, size)
            if self.limits is not None:
                self._refresh(self.limits)
                self._check_limits(self.limits, topic, data)
        except MessageTooLarge:
            self.count("too_large")
            raise
        except StreamFull as error:
            self.count("full")
            self._rejected = str(error), time.monotonic(), self.queue.next
            raise

    def _check_limits(self, limits: MessageLimitPolicy, topic: bytes, data: int) -> None:
        """As `limits.check`, after freeing what all exports have passed, as far as that is needed."""
        while True:
            try:
                return limits.check(topic, data, self.queue.next - self.log.next)
            except StreamFull:
                first = self.log.first
                if self.settings.free_exported:
                    with contextlib.suppress(OSError):
                        self._drop_segments(segment_limits.oldest_exported(self))
                        self._refresh(limits)
                if self.log.first == first:
                    raise

    @property
    def _reserved(self) -> int:
        """The numbers below may be given to messages."""
        return MAX_SEQUENCE + 1 if self.lasting else self.meta.reserved

    def _check_number(self) -> None:
        """Fail if the numbers are used up. They are BIGINT in tables and int64 in the SDKs."""
        if self.queue.next > MAX_SEQUENCE:
            raise StreamFull(
                f"stream {self.name!r} has used its last sequence number, {MAX_SEQUENCE}; create another "
                "stream for its topics"
            )
        if self.queue.next >= self._reserved:
            raise StorageFailed(
                f"stream {self.name!r} has used all numbers that are reserved in {self.home}, and cannot "
                "reserve more; nothing was stored. Appends work again as soon as that disk does"
            )

    def _check_size(self, data: int, size: int) -> None:
        settings = self.settings
        if size + self._framing > settings.max_size:
            raise MessageTooLarge(
                f"stream {self.name!r}: a message of {data} bytes is larger than the stream "
                f"(max_size {settings.max_size}); send smaller messages or raise max_size"
            )
        needed = self.queue.size + size + self._framing
        if settings.overwrite or self.log.total_bytes + needed <= settings.max_size:
            return
        if settings.free_exported:
            with contextlib.suppress(OSError):  # after a failure, it counts as full
                self._drop_segments(segment_limits.exported(self, needed))
            self._set_room()
        if self.log.total_bytes + needed > settings.max_size:
            raise StreamFull(
                f"stream {self.name!r} is full: {self.log.total_bytes} of max_size {settings.max_size} bytes "
                f"are in use and it rejects new data; {self._remedy}"
            )

    @property
    def _remedy(self) -> str:
        """Return what frees space in a full stream that rejects new data."""
        others = "raise max_size, set a limit, or let it overwrite"
        if not self.settings.free_exported:
            return f'set retention = "exported", which frees what its exports have delivered; or {others}'
        if self.exported_upto is None:
            return f'retention = "exported" frees nothing here, because it has no enabled export; {others}'
        return (
            f'retention = "exported" frees what all of its exports have delivered, and one of them waits at '
            f"message {self.exported_upto}: see `streambridge exports`; or {others}"
        )

    def _refresh(self, limits: MessageLimitPolicy) -> None:
        try:
            self._drop_ranges(limits.refresh())
        except OSError as error:
            raise StorageFailed(f"stream {self.name!r}: its limits cannot be checked: {error}") from error

    def last_by_topic(self) -> dict[bytes, int] | None:
        """The number of the newest message of each topic; None without a limit per topic.

        Costs a step per topic: the limit counts the messages of each. Raises StorageFailed.
        """
        if self.limits is None or not self.limits.by_topic:
            return None
        self._refresh(self.limits)
        return self.limits.last_by_topic()

    def count_topics(self) -> int | None:
        """The number of topics; None without a limit per topic. Raises StorageFailed."""
        if self.limits is None or not self.limits.by_topic:
            return None
        self._refresh(self.limits)
        return self.limits.topics

    @property
    def cannot_store(self) -> str | None:
        """Return why the last message was not stored (the disk, or no space); None if it was stored.

        A rejection for lack of space counts only for `FULL_FOR`, because there may be space again.
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
                needed = group.size + self._framing
                if self.log.total_bytes + needed > self.meta.settings.max_size and self.settings.overwrite:
                    self._drop_segments(segment_limits.make_room(self, needed))
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
        """Stage a group whose write failed again. Raises OSError.

        `elsewhere`: in a new segment. After a failed sync, the old file is not trusted, even if a second sync
        succeeds, because the kernel marks pages as clean although their write has failed.
        """
        self.log.abort(staged)
        if elsewhere:
            self.log.replace_active()
        return self._stage(staged.group)

    def freed_space(self, staged: Staged, error: OSError) -> bool:
        """After a failed write of a group, free space if the disk is full; return whether that succeeded."""
        if error.errno not in FULL:
            return False
        self.log.abort(staged)
        self.queue.busy = False  # the group is not in the active segment, so that may be dropped too
        try:
            return self._free_space(self, staged.group.size + DISK_ROOM)
        finally:
            self.queue.busy = True

    def _stage(self, group: Group) -> Staged:
        settings = self.settings
        return self.log.stage(group, settings.segment_size, sync=settings.flush)

    def write(self, staged: Staged, *, sync: bool) -> None:
        """Write a staged group to the files; with `sync`, to the disk. Raises OSError. For any thread."""
        self.log.write(staged, sync=sync)

    def finish(self, staged: Staged, error: OSError | None) -> None:
        """Commit or fail a group that was written: notify the waiters, apply the limits."""
        if error is not None:
            self.log.abort(staged)
            self.fail(error)
            return
        self.log.commit(staged, synced=self.settings.flush)
        if self.error is not None:
            self._recovered("messages are stored again")
        waiters = self.queue.committed()
        if self.limits is not None:
            now = self.clock.now()
            dropping = self.limits.committed(staged.group, staged.first, staged.data_bytes, now)
            try:
                self._enforce(self.limits, dropping, now)
            except OSError as failure:  # the messages are stored, and the waiters wait only for that
                self._on_event(self.name, f"cannot apply its limits now: {failure}")
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
        """Fail everything pending or in flight. Its numbers are used again."""
        wanted = self.queue.size + self._framing + DISK_ROOM
        why = error.strerror or error
        failed = StorageFailed(
            f"stream {self.name!r} cannot be written in {self.directory}: {why}; nothing "
            f"was acknowledged. Appends work again as soon as the disk does",
            f"stream {self.name!r} cannot be written: {why}",
        )
        self._fail(failed, wanted if error.errno == ENOSPC else 0)

    def _fail(self, error: StorageFailed, wanted: int = 0) -> None:
        failed = self.queue.next - self.log.next
        waiters = self.queue.clear(self.log.next)
        if not failed and not waiters:
            return
        self.count("failed", failed)
        self._wanted, self.error = wanted, error
        if self.limits is not None:
            self.limits.failed()
        if self.window is not None:
            self.window.forget(self.log.next)
        self._set_room()
        for waiter in waiters:
            waiter(error)

    def _recovered(self, what: str) -> None:
        self.error, self._wanted = None, 0
        self._on_event(self.name, what)

    def discard(self, staged: Staged) -> None:
        """Discard a staged group after `close`."""
        self.log.discard(staged)

    # -- syncing ---------------------------------------------------------------------------------
    def pin(self) -> None:
        """Keep the files open for a worker thread, until `unpin`."""
        self.log.directory.pin()

    def unpin(self) -> None:
        self.log.directory.unpin()

    def unsynced(self) -> list[tuple[OpenSegment, int]]:
        """Return the segments with committed bytes that may not be on the disk, with their sizes."""
        return self.log.unsynced()

    def sync(self, work: list[tuple[OpenSegment, int]]) -> None:
        """Wait until these segments are on the disk. Raises OSError. For any thread."""
        self.log.sync(work)

    def synced(self, work: list[tuple[OpenSegment, int]]) -> None:
        """Record that these segments are on the disk."""
        self.log.synced(work)

    def begin_rewrite(self) -> None:
        """After a failed sync, prevent groups and deletions until `end_rewrite`."""
        self.queue.busy = self.log.frozen = True
        self.pin()

    def rewrite_unsynced(self) -> Ranges:
        """Rewrite segments that are not on the disk to new files. Returns the numbers that were lost.

        Raises OSError. For any thread.
        """
        return self.log.rewrite_unsynced()

    def end_rewrite(self, lost: Ranges | None) -> None:
        """End the rewrite. `lost` is the result of `rewrite_unsynced`, None if it failed."""
        self.log.frozen = False
        self.unpin()
        self.queue.release()
        if lost is not None and not self.closed:
            self.log.synced([])
            self.drop(lost, DropReason.DAMAGED)  # even if empty: also removes dropped segments

    # -- dropping --------------------------------------------------------------------------------
    def drop(self, ranges: Ranges, reason: DropReason) -> int:
        """Drop the messages of these ranges. Returns how many there were.

        Deletes leading segments that no longer have a live message.
        """
        if self.limits is not None and reason is not DropReason.LIMITS:
            self.limits.dropping(ranges)
        number = self._record(ranges, reason)
        self._drop_obsolete()
        return number

    def purge(self, ranges: Ranges) -> int:
        """Drop messages because a client wants that; as `drop`.

        Raises StorageFailed if the record of it is not on the disk. Then the messages are dropped, but may be
        back after a restart or a power cut.
        """
        number = self.drop(ranges, DropReason.PURGED)
        try:
            self.drops.settle(self.oldest, fresh=number > 0)
        except OSError as error:
            raise StorageFailed(
                f"stream {self.name!r}: the messages were dropped, but that cannot be recorded in "
                f"{self.directory}: {error.strerror or error}; they may be back after a restart or a power "
                "cut. Check the disk and its free space, and purge again"
            ) from error
        return number

    def drop_upto(self, number: int, reason: DropReason) -> int:
        """Drop all messages below `number`, as `drop` does."""
        return self.drop([(self.oldest, min(number, self.log.next) - 1)], reason)

    def _report(self, found: list[Damage]) -> None:
        super()._report(found)
        if found and self.limits is not None:
            self.limits.stale = True

    def _drop_segments(self, removals: Iterable[Removal]) -> None:
        """Drop the ranges that a policy yields. Raises OSError."""
        for upto, reason in removals:
            if upto > self.log.active.index.base:
                self.log.replace_active(lazily=True)
            self.drop_upto(upto, reason)

    def _drop_ranges(self, dropping: Iterable[Ranges]) -> None:
        for ranges in dropping:
            self.drop(ranges, DropReason.LIMITS)

    def _enforce(self, limits: MessageLimitPolicy, dropping: Iterable[Ranges], now: int) -> None:
        self._drop_ranges(dropping)
        if limits.unfinished and not self._continuing:
            self._continuing = True
            self._soon(self._continue, now)

    def _continue(self, now: int) -> None:
        self._continuing = False
        if not self.closed:
            with contextlib.suppress(OSError):  # retried with every commit and every second
                self.maintain(now)

    def free_space(self, needed: int, *, exported_only: bool) -> bool:
        """On a full disk, drop messages that may be dropped, to free `needed` bytes.

        Returns whether there are files to delete. Raises OSError.
        """
        self._drop_segments(segment_limits.free_space(self, needed, exported_only=exported_only))
        return bool(self.obsolete.pending)

    def close_segment(self) -> None:
        """On a full disk with nothing to drop, begin a segment that can be dropped later. Raises OSError."""
        if segment_limits.wants_new_segment(self) and not self.log.frozen:
            self.log.replace_active(lazily=True)

    def maintain(self, now: int) -> None:
        """Apply everything that depends on time or changed settings. Called regularly. Raises OSError.

        `now` is in ms on the age timeline.
        """
        if self._wanted and self.files.free(self.directory) >= self._wanted:
            self._recovered("the file system has room again; messages can be stored")
        self.drops.save()
        self._delete()
        self._maintain_late = self.busy
        if self.busy:
            return
        for base in sorted(self._damaged & self.log.sizes.keys()):
            self.repair(base)
        self.log.renew()
        self._drop_segments(segment_limits.expired(self, now))
        if self.settings.overwrite:
            self._drop_segments(segment_limits.make_room(self, self._framing))
        elif self.settings.free_exported:  # it may exceed a lowered `max_size`
            self._drop_segments(segment_limits.exported(self, 0))
        if self.limits is not None:
            self._enforce(self.limits, self.limits.enforce(now), now)
        if self.window is not None:
            self.window.expire(now)
        self._set_room()
