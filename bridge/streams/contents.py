"""The stored messages of one stream: its segments, the dropped numbers, and the quarantine of damage.

`Stream` extends this with appends and commits. The policies (limits, deduplication) read it and return ranges
to drop; only `Stream` drops them. If a read finds damage, that is quarantined first, so no readable message
is dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from bridge.clock import Clock
from bridge.encryption import Keys
from bridge.errors import CorruptData
from bridge.model import EncryptionStatus, encryption_status
from bridge.streams import recovery
from bridge.streams.drops import DropLog, DropReason
from bridge.streams.layout import Files
from bridge.streams.log import SegmentLog
from bridge.streams.meta import Meta, StorageSettings
from bridge.streams.reader import StreamReader
from bridge.streams.recovery import Damage
from bridge.streams.sealing import Sealing
from bridge.streams.segment import Frame, SegmentSummary

Ranges = list[tuple[int, int]]  # of numbers, both ends included


class Contents:
    """The stored messages of one stream. Sizes in bytes, times in ms."""

    def __init__(
        self,
        files: Files,
        home: Path,
        data: Path,
        meta: Meta,
        *,
        delete: Callable[[], None],
        on_event: Callable[[str, str], None],
        clock: Clock,
        floor: int = 0,
        keys: Keys | None = None,
    ) -> None:
        """Open the files; raises OSError, or StorageFailed if they are encrypted and a key is missing.

        `home` has the definition, `data` the segments. `floor` is the lowest number that the next message may
        have. `delete` is called when there are obsolete files.
        """
        self.files, self.home, self.directory, self.meta = files, home, data, meta
        self.clock, self.keys = clock, keys
        self._delete, self._on_event = delete, on_event
        self.counters: dict[str, int] = {}
        self.passed_upto: int | None = None  # all exports have passed the numbers below; None: no exports
        self.exported_upto: int | None = None  # the same for those exports that hold messages (`retention`)
        self.oldest = 0  # all lower numbers were dropped
        self._damaged = set[int]()  # segments with damage that could not be quarantined yet
        sealing = Sealing(keys, data.name) if keys is not None else None
        damage = recovery.repair_drops(files, data, meta)
        self.drops = DropLog(files, data)
        if self.drops.ranges:  # even if the last segment has lost its last frame
            floor = max(floor, self.drops.ranges[-1].last + 1)
        self.log = SegmentLog(files, data, meta, self.drops, clock, sealing)  # policies only read it
        self.log.open(floor)
        self.obsolete = self.log.obsolete
        clock.observe(self.log.active.index.last_age)
        self._report(damage + self.log.damage)
        memory = meta.settings.memory
        if floor > self.log.next:
            self._record([(self.log.next, floor - 1)], DropReason.MEMORY if memory else DropReason.SKIPPED)
            self.log.replace_active(floor, lazily=True)
        missing = self.drops.live(0, self.log.first - 1)
        self._record(missing, DropReason.MEMORY if memory else DropReason.UNKNOWN)
        if missing and not (memory or damage):  # a damaged record may have had the reason
            lost = ", ".join(f"{first}-{last}" for first, last in missing)
            self._on_event(self.name, f"{data}: its first segments are missing; lost: {lost}")

    @property
    def name(self) -> str:
        return self.meta.name

    @property
    def epoch(self) -> int:
        """Return the time of creation, Unix time in ms."""
        return self.meta.epoch

    @property
    def settings(self) -> StorageSettings:
        return self.meta.settings

    @property
    def next_sequence(self) -> int:
        """The number after the newest committed message."""
        return self.log.next

    @property
    def lasting(self) -> bool:
        """Return whether committed messages survive the end of this process."""
        return not self.settings.memory

    @property
    def total_bytes(self) -> int:
        return self.log.total_bytes

    @property
    def busy(self) -> bool:
        """Return whether the active segment must stay: a group is in flight, or files are rewritten."""
        raise NotImplementedError

    def count(self, what: str, number: int = 1) -> None:
        """Increase a counter that is shown to operators."""
        self.counters[what] = self.counters.get(what, 0) + number

    def encryption(self) -> EncryptionStatus:
        """Return whether the stored messages are encrypted, and how many segments are not."""
        return encryption_status(
            wanted=self.settings.encryption,
            active=self.log.active.opening is not None,
            encrypted=len(self.log.filled) - self.log.unencrypted,
            unencrypted=self.log.unencrypted,
        )

    # -- reading ---------------------------------------------------------------------------------
    def live_messages(self) -> int:
        """Return how many messages can be read: those that were committed and not dropped."""
        return self.log.next - self.drops.number

    def reader(self) -> StreamReader:
        """A new reader of the files; the caller closes it."""
        return StreamReader(self.directory, self.files, self.drops, self.keys)

    def newest(self) -> int | None:
        """The number of the newest message that can be read; None if there is none."""
        number = self.log.next - 1
        for drop in reversed(self.drops.ranges):
            if drop.last < number:
                break
            number = min(number, drop.first - 1)
        return number if number >= self.oldest else None

    @property
    def is_awaited(self) -> bool:
        """Whether an export or a consumer has not passed all messages."""
        return self.passed_upto is not None and self.passed_upto < self.next_sequence

    def ingest_time(self, number: int) -> int | None:
        """Return when a message was received, Unix time in ms; None if it cannot be read now."""
        with contextlib.suppress(OSError, CorruptData), contextlib.closing(self.reader()) as reader:
            found = reader.moment_of(number, number + 1)
            return None if found is None else found.time
        return None

    def frames(self, start: int, end: int) -> Iterator[tuple[bytes, Frame]]:
        """Yield the valid frames with numbers of start..end-1, in order, with their buffers. Raises OSError.

        If damage cannot be quarantined now, the rest of its segment is skipped, and `Stream.maintain` repairs
        it later.
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

    def summary(self, base: int) -> SegmentSummary:
        """Return the summary of a segment. Quarantines damage that it finds. Raises OSError."""
        known = len(self.log.damage)
        found = self.log.summary(base)
        self._report(self.log.damage[known:])
        return found

    # -- damage ----------------------------------------------------------------------------------
    def repair(self, base: int) -> bool:
        """Check a segment and quarantine its damage; False if `maintain` must do it later. Raises OSError."""
        if self.busy or base not in self.log.sizes or self.log.is_syncing(base):
            self._damaged.add(base)
            return False
        self._report(self.log.repair(base))
        self._damaged.discard(base)
        self._drop_obsolete()
        return True

    def _report(self, found: list[Damage]) -> None:
        for damage in found:
            self._record(damage.lost, DropReason.DAMAGED)
            lost = ", ".join(f"{first}-{last}" for first, last in damage.lost)
            self._on_event(self.name, f"{damage.path}: {damage.what}" + (f"; lost: {lost}" if lost else ""))

    # -- what is gone ----------------------------------------------------------------------------
    def _record(self, ranges: Ranges, reason: DropReason) -> int:
        """Record a drop. Returns the number of messages."""
        dropped = self.drops.record(ranges, self.clock.wall(), reason)
        number = sum(drop.last - drop.first + 1 for drop in dropped)
        if number:
            self.count(reason.name.lower(), number)
        return number

    def _drop_obsolete(self) -> None:
        """Drop leading segments without live messages, except the active one.

        A worker thread deletes their files. A failure is retried later.
        """
        log = self.log
        if log.frozen:
            return
        self.oldest = min(self.drops.first_live(max(log.first, self.oldest)), log.next)
        try:
            if self.oldest >= log.next > log.active.index.base and not self.busy:
                log.replace_active(lazily=True)
        except OSError as error:
            self._on_event(self.name, f"{self.directory}: cannot begin a new segment: {error.strerror}")
        while log.first < log.active.index.base and log.following(log.first) <= self.oldest:
            log.remove_first()
        self.drops.compact_file(self.oldest)
        self._delete()
