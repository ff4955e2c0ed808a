"""Group commit on the event loop: messages that arrive while a group is written form the next one.

* Streams that do not flush on write are written on the loop itself (into the page cache), once per
  turn of the loop; every `sync_interval` their files are synced in a worker thread.
* Streams that flush on write are each written and synced in a worker thread, several at the same time, while
  the loop continues to read sockets. One stream never has two syncs at a time, because the kernel reports an
  error to only one of them. On a slow disk the next group waits for the clients that have just been
  notified (see `pace`).
* If each of the last `PROVEN` syncs took less than `QUICK`, a sync is cheaper than switching to a thread and
  back. Then a small group that is alone in its turn is synced on the loop. A single slower sync ends this
  until the disk has proven itself again.
* A group of devices that do not hurry waits up to `commit_delay` for more messages (see `delay`).
* On a full disk, space is freed at once and the group is written again. First obsolete files are deleted,
  then segments that the stream's settings allow to drop, then exported segments of other streams on the same
  file system. Meanwhile the loop waits for the disk; this is rare, and nothing else could be stored.
* Back-pressure: `on_pressure` is called when more than `HIGH` bytes are pending in all streams together, and
  again when it is less than `LOW`. The front ends stop and start reading.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from bridge import books
from bridge.runtime import Runtime, Timer
from bridge.streams.delay import Delay
from bridge.streams.pace import SLOW, Pace
from bridge.streams.staging import OpenSegment, Staged
from bridge.streams.stream import DISK_ROOM, Stream

HIGH = 8 * 1024 * 1024
LOW = 1024 * 1024
QUICK = 0.001  # seconds
PROVEN = 16  # syncs
SMALL = 100  # messages; while a larger group is synced, the loop should do other work
FULL_DISK = "the file system is full"


class Committer:
    """Commits the groups of many streams."""

    def __init__(
        self,
        on_event: Callable[[str, str], None],
        streams: Mapping[str, Stream],
        runtime: Runtime,
        commit_delay: float = 0.0,
    ) -> None:
        """`streams` has all streams of the store. `commit_delay`: seconds; 0: no group waits for more."""
        self._on_event, self._streams, self._runtime = on_event, streams, runtime
        self._commit_delay = commit_delay
        self._dirty: list[Stream] = []
        self._gathering = False  # `gather` commits the groups that are scheduled now
        self._flights: set[Stream] = set()  # whose groups are in worker threads
        self._pending_bytes: dict[Stream, int] = {}
        self._total = 0
        self._syncing: dict[Stream, asyncio.Future[None]] = {}
        self._freeing = False
        self._paces: dict[Stream, Pace] = {}  # of streams on a slow disk
        self._delays: dict[Stream, Delay] = {}  # of streams that flush on write, with a delay
        self._proven = 0  # quick syncs in a row
        self._elsewhere: dict[Stream, str] = {}  # why a stream's group is being written to a new segment
        self._held: dict[Stream, tuple[Timer, float]] = {}  # streams whose next group waits, and until when
        self.under_pressure = False
        self.on_pressure: list[Callable[[bool], None]] = []
        books.opened(self)

    def recount(self) -> Iterable[books.Entry]:
        yield "total", self._total, sum(self._pending_bytes.values())
        streams = set(self._streams.values())
        pending = self._pending_bytes.items()
        over = {one for one, size in pending if one not in streams or (size and not one.pending_bytes)}
        yield "pending_bytes of streams without any", over, set()
        flights = {stream for stream in streams if stream.queue.flight is not None}
        yield "flights", self._flights & streams, flights
        pinned = {stream for stream in streams if stream.log.directory.pinned}
        yield "pins", pinned, (self._flights | self._syncing.keys()) & streams

    # -- commits ---------------------------------------------------------------------------------
    def schedule(self, stream: Stream) -> None:
        """Commit a stream's pending group in this turn of the event loop."""
        if not self._dirty and not self._gathering:
            self._runtime.soon(self._run)
        self._dirty.append(stream)

    def gather(self, do: Callable[[], None]) -> None:
        """Call `do`, which appends everything that has arrived, and commit that at once."""
        self._gathering = True
        try:
            do()
        finally:
            self._gathering = False
            if self._dirty:
                self._run()

    def _run(self) -> None:
        dirty, self._dirty = self._dirty, []
        for stream in dirty:
            # If it is busy, the end of its current work starts the next group.
            if not stream.busy and not (stream.settings.flush and stream in self._syncing):
                if stream.settings.flush and self._hold(stream):
                    continue
                try:
                    self._start(stream, alone=len(dirty) == 1)
                except Exception as error:  # the other streams are not affected
                    self._on_event(stream.name, f"internal error: {error!r}")
                    stream.fail(OSError(0, repr(error)))
        for stream in dirty:
            self.update_pressure(stream)

    def _hold(self, stream: Stream) -> bool:
        """Return whether the next group waits for more messages; the next one or a timer schedules it."""
        until = 0.0 if self.under_pressure else self._wait(stream)
        if stream in self._held:
            timer, end = self._held[stream]
            if until != end:
                timer.cancel()
                del self._held[stream]
        if until:
            stream.queue.postpone()
            if stream not in self._held:
                timer = self._runtime.later(until - self._runtime.now(), self._release, stream)
                self._held[stream] = timer, until
        return until > 0

    def _wait(self, stream: Stream) -> float:
        """Return until when the next group waits; 0: it does not."""
        pace, delay, queue = self._paces.get(stream), self._delays.get(stream), stream.queue
        if delay is None and self._commit_delay:
            delay = self._delays[stream] = Delay(self._commit_delay)
        if pace is None and delay is None:
            return 0.0
        now = self._runtime.now()
        if delay is not None and delay.wants_more(now, queue.pending, queue.heard):
            return delay.until
        if pace is not None and pace.wants_more(now, queue.pending):
            return pace.until
        return 0.0

    def _release(self, stream: Stream) -> None:
        del self._held[stream]
        now = self._runtime.now()
        for waits in (self._paces.get(stream), self._delays.get(stream)):
            if waits is not None:
                waits.end_wait(now)  # timers may be early
        self.schedule(stream)

    def _start(self, stream: Stream, *, alone: bool) -> None:
        staged = stream.begin()
        if staged is None:
            return
        if not stream.settings.flush:
            self._write(stream, staged, sync=False)
        elif alone and self._proven >= PROVEN and not self._flights and len(staged.group.parts) <= 2 * SMALL:
            self._write(stream, staged, sync=True)
        else:
            self._flights.add(stream)
            stream.pin()
            self._submit(stream, staged, first=True)

    def _write(self, stream: Stream, staged: Staged, *, sync: bool) -> None:
        """Write a group on the loop."""
        error: OSError | None = None
        first = sync
        while True:
            try:
                stream.write(staged, sync=sync)
            except OSError as caught:
                error = caught.with_traceback(None)  # the traceback would keep the group in memory
            if error is None:
                break
            again, error, first = self._retry(stream, staged, error, first=first)
            if again is None:
                break
            staged, error = again, None
        if sync:
            self._rate(stream, staged, error)
        self._finish(stream, staged, error)

    def _finish(self, stream: Stream, staged: Staged, error: OSError | None) -> None:
        why = self._elsewhere.pop(stream, "")
        if why and error is None:
            self._on_event(stream.name, f"sync failed ({why}); written again to a new segment")
        if stream in self._delays:
            pending = stream.queue.pending if error is None else 0  # they fail, too
            self._delays[stream].committed(self._runtime.now(), pending)
        stream.finish(staged, error)

    def _rate(self, stream: Stream, staged: Staged, error: BaseException | None) -> None:
        """Note how long a sync took."""
        self._proven = self._proven + 1 if error is None and staged.took < QUICK else 0
        if error is not None or staged.took < SLOW:
            self._paces.pop(stream, None)
        else:
            under_way = len(staged.group.parts) // 2 + stream.queue.pending
            self._paces.setdefault(stream, Pace()).synced(self._runtime.now(), staged.took, under_way)

    def _retry(
        self, stream: Stream, staged: Staged, error: OSError, *, first: bool
    ) -> tuple[Staged | None, OSError, bool]:
        """Stage a group whose write failed again, if that may help.

        It may help if space was freed on a full disk, or in a new segment, after the `first` failure of a
        group that is synced. Returns the group or None, the last error, and whether the next failure is the
        first.
        """
        while True:
            elsewhere = False
            if not stream.freed_space(staged, error):
                if not first:
                    return None, error, False
                first, elsewhere = False, True
            try:
                again = stream.restage(staged, elsewhere=elsewhere)
            except OSError as caught:
                error = caught.with_traceback(None)
                continue
            if elsewhere:
                self._elsewhere[stream] = error.strerror or str(error)
            return again, error, first

    def _submit(self, stream: Stream, staged: Staged, *, first: bool) -> None:
        """Write and sync in a worker thread, with a callback, because a task would cost more."""
        self._runtime.work(
            partial(stream.write, staged, sync=True), partial(self._written, stream, staged, first)
        )

    def _written(self, stream: Stream, staged: Staged, first: bool, error: BaseException | None) -> None:
        if isinstance(error, OSError) and not stream.closed:
            again, error, first = self._retry(stream, staged, error, first=first)
            if again is not None:
                self._submit(stream, again, first=first)
                return
        self._flights.discard(stream)
        if stream.closed:
            self._elsewhere.pop(stream, None)
            stream.discard(staged)
        else:
            if error is not None and not isinstance(error, OSError):
                error = OSError(0, repr(error))
            self._rate(stream, staged, error)
            self._finish(stream, staged, error)
        stream.unpin()
        self.update_pressure(stream)
        if stream in self._syncing:
            self._sync(stream)

    def update_pressure(self, stream: Stream) -> None:
        """Update the sum of pending bytes, and report pressure."""
        pending = stream.pending_bytes
        self._total += pending - self._pending_bytes.get(stream, 0)
        if stream.closed:
            self._pending_bytes.pop(stream, None)
            self._paces.pop(stream, None)
            self._delays.pop(stream, None)
            if stream in self._held:
                self._held.pop(stream)[0].cancel()
        else:
            self._pending_bytes[stream] = pending
        pressure = self._total > (LOW if self.under_pressure else HIGH)
        if pressure is not self.under_pressure:
            self.under_pressure = pressure
            for notify in self.on_pressure:
                notify(self.under_pressure)

    # -- background syncs ------------------------------------------------------------------------
    async def sync(self, streams: Iterable[Stream]) -> None:
        """Sync everything that is committed in these streams, in parallel."""
        for stream in streams:
            if stream not in self._syncing and (stream.busy or stream.unsynced()):
                self._syncing[stream] = asyncio.get_running_loop().create_future()
                if not stream.busy:  # else the end of its group begins the sync
                    self._sync(stream)
        # If this is cancelled, the threads still finish.
        await asyncio.gather(*(asyncio.shield(future) for future in list(self._syncing.values())))

    def _sync(self, stream: Stream) -> None:
        work = stream.unsynced()
        if stream.closed or not work:
            self._sync_over(stream)
            return
        stream.pin()
        self._runtime.work(partial(stream.sync, work), partial(self._synced, stream, work))

    def _synced(
        self, stream: Stream, work: list[tuple[OpenSegment, int]], error: BaseException | None
    ) -> None:
        stream.unpin()
        if not stream.closed and error is not None:
            self._rewrite(stream, error)
            return
        if not stream.closed:
            stream.synced(work)
        self._sync_over(stream)

    def _sync_over(self, stream: Stream) -> None:
        self._syncing.pop(stream).set_result(None)
        if stream.queue.pending:
            self.schedule(stream)

    def _rewrite(self, stream: Stream, error: BaseException) -> None:
        """After a failed background sync, rewrite the files that are not on the disk."""
        stream.begin_rewrite()
        lost: list[tuple[int, int]] = []
        self._runtime.work(
            lambda: lost.extend(stream.rewrite_unsynced()), partial(self._rewritten, stream, error, lost)
        )

    def _rewritten(
        self,
        stream: Stream,
        error: BaseException,
        lost: list[tuple[int, int]],
        again: BaseException | None,
    ) -> None:
        stream.end_rewrite(lost if again is None else None)
        if not stream.closed:
            if again is not None:
                what = f"sync failed ({error}), and so did writing elsewhere ({again}); retrying"
            else:
                what = f"sync failed ({error}); what was not on the disk was written to a new file"
            self._on_event(stream.name, what)
        self._sync_over(stream)

    # -- removal ---------------------------------------------------------------------------------
    def delete(self, stream: Stream) -> None:
        """Delete obsolete files in a worker thread, if there are any."""
        if not self._freeing and (paths := stream.obsolete.begin(stream.oldest)):
            self._runtime.work(partial(stream.obsolete.delete, paths), partial(self._deleted, stream))

    def _deleted(self, stream: Stream, error: BaseException | None) -> None:
        stream.obsolete.end(failed=error is not None)
        if stream.closed:
            return
        if error is not None:
            self._not_deleted(stream, error)  # `maintain` retries
        else:
            self.delete(stream)

    def _not_deleted(self, stream: Stream, error: BaseException) -> None:
        stream.count("delete_failed")
        self._on_event(stream.name, f"{stream.directory}: cannot delete what was dropped: {error}")

    def reclaim_exported(self) -> None:
        """Free exported segments when a file system is nearly full. Called regularly.

        Otherwise new messages would be added to a segment that has just been exported completely.
        """
        for memory in (False, True):
            streams = [s for s in self._streams.values() if s.settings.memory is memory]
            holding = next((stream for stream in streams if stream.settings.free_exported), None)
            with contextlib.suppress(OSError):  # a rejected append reports the reason
                if holding is not None and holding.files.free(holding.directory) < DISK_ROOM:
                    self.free_space(holding, DISK_ROOM, exported_only=True)

    def free_space(self, stream: Stream, needed: int, *, exported_only: bool = False) -> bool:
        """Free space on a full disk, if possible `needed` bytes. Returns whether a file was deleted."""
        self._freeing = True
        try:
            if stream.obsolete.any():
                return self._delete_now(stream)
            if stream.free_space(needed, exported_only=exported_only):
                self._on_event(stream.name, f"{FULL_DISK}: dropped its oldest segments")
                return self._delete_now(stream)
            for other in list(self._streams.values()):
                if (
                    other is not stream
                    and other.settings.memory == stream.settings.memory
                    and other.free_space(needed, exported_only=True)
                ):
                    self._on_event(other.name, f"{FULL_DISK} for {stream.name!r}: dropped exported segments")
                    if self._delete_now(other):
                        return True
            if not exported_only:
                stream.close_segment()
        except OSError as error:
            self._on_event(stream.name, f"{stream.directory}: cannot free space on the full disk: {error}")
        finally:
            self._freeing = False
        return False

    def _delete_now(self, stream: Stream) -> bool:
        """Delete a stream's obsolete files, even those that a worker thread is about to delete."""
        try:
            return stream.obsolete.delete_now(stream.oldest)
        except OSError as error:
            self._not_deleted(stream, error)
            return False

    def maintain(self, streams: Iterable[Stream]) -> None:
        """Apply the limits that depend on time, to the streams that are still open."""
        for stream in streams:
            try:
                if not stream.closed:
                    stream.maintain(stream.clock.now())
            except OSError as error:
                self._on_event(stream.name, f"cannot apply its limits: {error}")

    async def drain(self) -> None:
        """Wait until nothing is pending or in flight in any stream."""
        while self._dirty or self._held or self._flights or self._syncing:
            for stream in list(self._held):
                self._held[stream][0].cancel()
                self._release(stream)
            for stream in list(self._pending_bytes):
                await stream.idle()
            await asyncio.sleep(0.001)
