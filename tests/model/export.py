"""The export protocol: batches with durable boundaries, sent until they are accepted.

Two streams with one export each, in one worker, and three messages in total. The streams do not have
`flush_on_write`, so a power cut may take the end of a stream, even if it was exported. The destination is S3
as the exporter uses it: a batch is an object whose name is its boundaries. An existing object is not
overwritten; if it has the same rows, it counts as delivered.

With `newest_first`, a batch may begin at any pending message, and the position has ranges.

With `by_record`, the destination takes each message on its own. A write of the cursor may then be without a
sync: it survives the worker, but a power cut may take it. The cursor on the disk has a number above which
nothing is sent before the next sync.

Each message has its own identity, so the model notices a number that stands for two messages.

Not modelled: rejected records and the dead-letter stream, exporters that send a batch in parts, several
exports of one stream, redefinition, damaged cursors (they restart), and other writers in the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from tests.model.explorer import Invariant, Steps, Transition

NOBODY = -1  # the identity of a number that was skipped
STREAMS = ("A", "B")
Records = tuple[tuple[int, int], ...]  # numbers and identities


class Defect(Enum):
    """An essential step that is omitted or done in the wrong order."""

    NONE = "nothing"
    UNCOMMITTED = "a message is exported before it is committed"
    CURSOR_LATE = "a batch is sent before its boundaries are on the disk"
    CURSOR_LEADS = "the cursor passes a batch before it is accepted"
    LOST_IS_DELIVERED = "a batch whose answer was lost counts as delivered"
    OTHER_BOUNDARIES = (
        "a batch that may have arrived gets new boundaries before the gateway has looked at the destination"
    )
    NO_FLOOR = "after a power cut, a number that was exported is used again"
    TRIM_EARLY = "retention frees messages that were sent but not accepted"
    UNRECORDED = "dropped messages are passed over without a record"
    RECORD_LATE = "the cursor passes dropped messages before they are recorded"
    UNRESERVED = "a number is sent that the cursor on the disk has not reserved"
    JUMPED = "the position moves beyond a batch that was sent before older messages"


class Batch(NamedTuple):
    """An attempt or an object, with its boundaries and rows."""

    first: int
    last: int
    records: Records


class Cursor(NamedTuple):
    """Position and planned batch. `reached` is the highest number that may have been sent.

    `ahead` has the settled numbers above the position.
    """

    position: int = 0
    planned: tuple[int, int] | None = None
    reached: int = -1
    ahead: frozenset[int] = frozenset()

    def settled(self, numbers: Iterable[int]) -> Cursor:
        """Return the cursor after these numbers, and with them the batch, are settled."""
        ahead, position = self.ahead.union(numbers), self.position
        while position in ahead:
            position += 1
        return Cursor(position, None, self.reached, frozenset(n for n in ahead if n > position))

    def has_passed(self, number: int) -> bool:
        return number < self.position or number in self.ahead


class Export(NamedTuple):
    """One stream, its export and its objects."""

    log: tuple[int, ...] = ()  # identities by number
    committed: int = 0
    made: int = 0
    dropped: frozenset[int] = frozenset()  # by a limit, by retention, or skipped
    freed: frozenset[int] = (
        frozenset()
    )  # the dropped ones that retention freed, because the export had passed them
    disk: Cursor = Cursor()  # what another worker reads
    synced: Cursor = Cursor()  # with `by_record`: what survives a power cut
    reserved: int = -1  # nothing above this number is sent before the next sync
    cursor: Cursor = Cursor()  # in the memory of the worker
    doubtful: bool = False  # an attempt to send the planned batch got no answer
    told: frozenset[int] = frozenset()  # in the file of skipped ranges
    untold: frozenset[int] = frozenset()  # (only with a defect) in memory only
    sending: Batch | None = None
    late: Batch | None = None  # its connection is gone, but it may still arrive
    objects: tuple[Batch, ...] = ()
    moved: bool = False  # a batch has got new boundaries for a legitimate reason


class State(NamedTuple):
    """Both exports, and the number of faults."""

    exports: tuple[Export, Export] = (Export(), Export())
    lost: int = 0
    limited: int = 0


class Exports:
    """The model. `messages` are sent to each stream; `lost` answers and `limited` drops are allowed.

    `newest_first` is the order of both exports. With `by_record`, their destination knows no batches.
    """

    def __init__(
        self,
        messages: tuple[int, int] = (2, 1),
        *,
        lost: int = 1,
        limited: int = 1,
        newest_first: bool = False,
        by_record: bool = False,
        defect: Defect = Defect.NONE,
    ) -> None:
        self.messages, self.lost, self.limited, self.defect = messages, lost, limited, defect
        self.newest_first, self.by_record = newest_first, by_record
        room, streams = "bridge.export", "bridge.streams"
        self.transitions = (
            self._each(
                "append", self._append, f"{streams}.stream:Stream.append", f"{streams}.log:SegmentLog.write"
            ),
            self._each(
                "commit", self._commit, f"{streams}.log:SegmentLog.commit", f"{room}.worker:Worker._handle"
            ),
            self._each(
                "plan", self._plan, f"{room}.planning:Planner.plan", f"{room}.batches:Batches._plan",
                f"{room}.cursor:Cursor.plan", f"{room}.cursor:Skipped.add",
                f"{room}.order:Order.plan",
            ),
            self._each("write the cursor", self._write, f"{room}.position:Position.write"),
            self._each(
                "send", self._send, f"{room}.batches:Batches.next", f"{room}.planning:Planner.reread",
                f"{room}.task:Task._export",
            ),
            self._each("accept", self._accept, "plugins.s3:S3Exporter.export"),
            self._each(
                "settle", self._settle, f"{room}.batches:Batches.settle", f"{room}.batches:Batches._settled",
                f"{room}.cursor:Cursor.settle",
            ),
            self._each(
                "look, and cut the batch short", self._portion, f"{room}.batches:Batches._next_part"
            ),
            self._each(
                "free what was exported", self._free, f"{streams}.segment_limits:exported",
                f"{room}.supervisor:ExportSupervisor.exported_upto",
            ),
            self._each("the answer is lost", self._lose, f"{room}.batches:Batches.was_cut", fault=True),
            self._each("a late object arrives", self._arrive, fault=True),
            self._each("a limit drops", self._limit, f"{streams}.stream:Stream.drop", fault=True),
            Transition(
                "the worker is killed",
                self._kill_worker,
                (f"{room}.position:Position.load", f"{room}.batches:Batches.resume", f"{room}.worker:_lock"),
                crash=True,
            ),
            Transition("the service is killed", self._kill, crash=True),
            Transition(
                "power cut", self._cut, (f"{room}.cursor:highest_exported",), crash=True
            ),
        )  # fmt: skip
        self.invariants = (
            Invariant[State](
                "a number never stands for two messages",
                "Only committed messages are read. Before a number is sent, it or a higher one is on the "
                "disk, and after a power cut numbering continues above that.",
                lambda state: all(map(_one_message_a_number, state.exports)),
            ),
            Invariant[State](
                "every number that a cursor on the disk has passed has arrived or is recorded as dropped",
                "The position moves once the destination has accepted the batch, and is written after that. "
                "The record of a dropped range is on the disk before the cursor that passes the range.",
                lambda state: all(map(_passed_has_arrived, state.exports)),
            ),
            Invariant[State](
                "no number below one that has arrived is skipped without a record",
                "An export sends one batch at a time, in the order of the numbers, and plans the next one "
                "when the last is settled. With the newest first, the ranges of the position show which "
                "numbers are still to be sent.",
                lambda state: all(_no_hole(one, newest_first) for one in state.exports),
            ),
            Invariant[State](
                "retention frees only messages that have arrived",
                "Retention uses the position, which never leads what was accepted.",
                lambda state: all(map(_freed_has_arrived, state.exports)),
            ),
            Invariant[State](
                "a batch keeps its boundaries until it is accepted",
                "They are on the disk before the first attempt, and are the name of the object in each "
                "attempt. They change only if part of the batch was dropped, or if the gateway has looked "
                "and found nothing under the old name.",
                lambda state: all(map(_no_overlap, state.exports)),
            ),
        )

    def _each(self, name: str, steps: object, *code: str, fault: bool = False) -> Transition[State]:
        """A transition that each of the two exports makes on its own."""

        def both(state: State) -> Steps[State]:
            for at, export in enumerate(state.exports):
                for does, after, *spent in steps(state, export, at):  # type: ignore[operator]
                    exports = (after, state.exports[1]) if at == 0 else (state.exports[0], after)
                    lost, limited = spent[0] if spent else (0, 0)
                    yield f"{STREAMS[at]}: {does}", State(exports, state.lost + lost, state.limited + limited)

        both.__doc__ = steps.__doc__
        return Transition(name, both, code, fault=fault)

    def begins(self) -> Iterable[State]:
        """Two empty streams."""
        yield State()

    def is_over(self, state: State) -> bool:
        """Every message that was not dropped has arrived."""
        return all(
            export.made == most and export.committed == len(export.log) and not export.sending
            and all(n in arrived(export) or n in export.dropped for n in range(export.committed))
            for export, most in zip(state.exports, self.messages, strict=True)
        )  # fmt: skip

    # -- the stream ------------------------------------------------------------------------------

    def _append(self, state: State, export: Export, at: int) -> Iterator[tuple[str, Export]]:
        """A message is written to the stream's file."""
        if export.made < self.messages[at] and export.committed == len(export.log):
            yield (
                f"message {export.made} is written",
                export._replace(log=(*export.log, export.made), made=export.made + 1),
            )

    def _commit(self, state: State, export: Export, at: int) -> Iterator[tuple[str, Export]]:
        """The message is committed, and the worker is notified."""
        if export.committed < len(export.log):
            yield "it is committed", export._replace(committed=len(export.log))

    def _limit(self, state: State, export: Export, at: int) -> Iterator[tuple[str, Export, tuple[int, int]]]:
        """A limit drops the oldest message, exported or not."""
        oldest = _oldest(export)
        if state.limited < self.limited and oldest < export.committed:
            yield f"a limit drops number {oldest}", export._replace(dropped=export.dropped | {oldest}), (0, 1)

    def _free(self, state: State, export: Export, at: int) -> Iterator[tuple[str, Export]]:
        """Retention drops the oldest message that the export has passed."""
        oldest, cursor = _oldest(export), export.cursor
        if oldest >= export.committed:
            return
        passed = cursor.position
        if self.defect is Defect.TRIM_EARLY and export.sending:
            passed = export.sending.last + 1
        if oldest < passed:
            yield (
                f"retention frees number {oldest}",
                export._replace(dropped=export.dropped | {oldest}, freed=export.freed | {oldest}),
            )

    # -- the worker ------------------------------------------------------------------------------

    def _readable(self, export: Export) -> int:
        return len(export.log) if self.defect is Defect.UNCOMMITTED else export.committed

    def _plan(self, state: State, export: Export, at: int) -> Iterator[tuple[str, Export]]:
        """The worker passes over and records what was dropped, then chooses the boundaries of a batch."""
        cursor, end = export.cursor, self._readable(export)
        if cursor.planned or export.sending:
            return
        for start in range(cursor.position, end if self.newest_first else cursor.position + 1):
            if start < end and not cursor.has_passed(start):
                after = next((n for n in range(start, end) if cursor.has_passed(n)), end)
                yield from self._plan_between(export, start, after)

    def _plan_between(self, export: Export, start: int, end: int) -> Iterator[tuple[str, Export]]:
        cursor = export.cursor
        there = [n for n in range(start, end) if n not in export.dropped]
        first = there[0] if there else end
        export = self._passed(export, range(start, first))
        cursor = cursor.settled(range(start, first))
        if not there:
            yield "the worker passes over what was dropped", export._replace(cursor=cursor)
            return
        run = 1
        while run < len(there) and there[run] == there[run - 1] + 1:
            run += 1
        for last in there[:run]:
            planned = cursor._replace(planned=(first, last), reached=max(cursor.reached, last))
            yield (
                f"the worker plans the batch {first}-{last}",
                export._replace(cursor=planned, doubtful=False),
            )

    def _passed(self, export: Export, numbers: Iterable[int]) -> Export:
        match self.defect:
            case Defect.UNRECORDED:
                return export
            case Defect.RECORD_LATE:
                return export._replace(untold=export.untold.union(numbers))
        return export._replace(told=export.told.union(numbers))

    def _write(self, state: State, export: Export, at: int) -> Iterator[tuple[str, Export]]:
        """The cursor is written to the slot without the newest synced version, and synced if necessary."""
        cursor = export.cursor
        if not self.by_record:
            if cursor != export.disk:
                yield "the cursor is written and synced", export._replace(disk=cursor)
            return
        if cursor != export.synced:
            for reserved in (cursor.reached + 1, cursor.reached + 2):
                after = export._replace(disk=cursor, synced=cursor, reserved=reserved)
                yield f"the cursor is synced, and reserves up to {reserved}", after
        if cursor != export.disk and (cursor.reached <= export.reserved or self.defect is Defect.UNRESERVED):
            yield "the cursor is written", export._replace(disk=cursor)

    def _send(self, state: State, export: Export, at: int) -> Iterator[tuple[str, Export]]:
        """The planned batch is sent once its boundaries are on the disk."""
        cursor = export.cursor
        if not cursor.planned or any(one.sending for one in state.exports):
            return  # one thread
        first, last = cursor.planned
        if last >= len(export.log):
            return  # (only with a defect) a crash has taken the message
        if cursor != export.disk and self.defect is not Defect.CURSOR_LATE:
            return
        if any(n in export.dropped for n in range(first, last + 1)):
            yield (
                "part of the batch was dropped: it is planned again",
                export._replace(cursor=cursor._replace(planned=None), moved=True),
            )
            return
        batch = Batch(first, last, tuple((n, export.log[n]) for n in range(first, last + 1)))
        after = export._replace(sending=batch)
        if self.defect is Defect.CURSOR_LEADS:
            ahead = cursor._replace(position=last + 1)
            after = after._replace(cursor=ahead, disk=ahead)
        yield f"the batch {first}-{last} is sent", after

    def _portion(self, state: State, export: Export, at: int) -> Iterator[tuple[str, Export]]:
        """The link is too slow for a batch whose answer was lost: look for the batch, then shorten it."""
        cursor = export.cursor
        if not cursor.planned or export.sending or not export.doubtful:
            return
        first, last = cursor.planned
        if any(n in export.dropped for n in range(first, last + 1)):
            return
        there = any((one.first, one.last) == (first, last) for one in export.objects)
        if there and self.defect is not Defect.OTHER_BOUNDARIES:
            yield (
                f"the object {first}-{last} is found",
                export._replace(cursor=cursor.settled(range(first, last + 1)), doubtful=False),
            )
        elif last > first:
            shorter = cursor._replace(planned=(first, last - 1))
            yield (
                f"the batch is cut short to {first}-{last - 1}",
                export._replace(cursor=shorter, doubtful=False),
            )

    def _accept(self, state: State, export: Export, at: int) -> Iterator[tuple[str, Export]]:
        """The destination stores the object. It does not overwrite an existing one with this name."""
        batch = export.sending
        if batch is not None and batch not in export.objects and not _occupied(export, batch):
            yield (
                f"the object {batch.first}-{batch.last} is there",
                export._replace(objects=(*export.objects, batch)),
            )

    def _settle(self, state: State, export: Export, at: int) -> Iterator[tuple[str, Export]]:
        """The answer arrives, and the position moves beyond the batch."""
        batch, cursor = export.sending, export.cursor
        if batch is not None and batch in export.objects:
            after = cursor.settled(range(batch.first, batch.last + 1))
            if self.defect is Defect.JUMPED:
                after = Cursor(batch.last + 1, None, cursor.reached)
            yield "the answer arrives", export._replace(
                sending=None, doubtful=False, cursor=after,
                told=export.told | export.untold, untold=frozenset(),
            )  # fmt: skip

    def _lose(self, state: State, export: Export, at: int) -> Iterator[tuple[str, Export, tuple[int, int]]]:
        """No answer arrives. The batch may have arrived."""
        batch, cursor = export.sending, export.cursor
        if batch is None or state.lost >= self.lost:
            return
        after = export._replace(sending=None, doubtful=True)
        if self.defect is Defect.LOST_IS_DELIVERED:
            after = after._replace(cursor=cursor.settled(range(batch.first, batch.last + 1)))
        yield "the connection breaks", after, (1, 0)
        if batch not in export.objects:
            yield (
                "the connection breaks, and the object is still on its way",
                after._replace(late=batch),
                (1, 0),
            )

    def _arrive(self, state: State, export: Export, at: int) -> Iterator[tuple[str, Export]]:
        """An object that was still on its way arrives after all."""
        batch = export.late
        if batch is None:
            return
        if batch in export.objects or _occupied(export, batch):
            yield "a late object is refused", export._replace(late=None)
        else:
            # If the gateway has looked in the meantime, it may have shortened the batch.
            moved = export.moved or export.cursor.planned != (batch.first, batch.last)
            yield (
                "a late object arrives",
                export._replace(late=None, objects=(*export.objects, batch), moved=moved),
            )

    # -- crashes ---------------------------------------------------------------------------------

    def _without_worker(self, state: State) -> Iterator[State]:
        """Another worker reads the cursors. A batch on its way is lost, or arrives late."""
        ends = [
            export._replace(
                cursor=export.disk, doubtful=export.disk.planned is not None, sending=None, untold=frozenset()
            )
            for export in state.exports
        ]
        yield state._replace(exports=(ends[0], ends[1]))
        for at, export in enumerate(state.exports):
            batch = export.sending
            if batch is not None and batch not in export.objects and state.lost < self.lost:
                late = [*ends]
                late[at] = late[at]._replace(late=batch)
                yield state._replace(exports=(late[0], late[1]), lost=state.lost + 1)

    def _kill_worker(self, state: State) -> Steps[State]:
        """The worker ends; another one reads the cursors."""
        for after in self._without_worker(state):
            yield "the worker is killed", after

    def _kill(self, state: State) -> Steps[State]:
        """The service and its worker end. What was written but not committed may be there or not."""
        exports = state.exports
        if exports[0].committed == len(exports[0].log) and exports[1].committed == len(exports[1].log):
            return  # then the same as a kill of the worker alone
        for killed in self._without_worker(state):
            one, other = (self._uncommitted_gone(export) for export in killed.exports)
            yield "the service is killed", killed._replace(exports=(one, other))

    @staticmethod
    def _uncommitted_gone(export: Export) -> Export:
        return export._replace(log=export.log[: export.committed])

    def _cut(self, state: State) -> Steps[State]:
        """The end of a stream may be gone. Cursors are as last synced, or as written since."""
        for killed in self._without_worker(state):
            for first in self._left(killed.exports[0]):
                for second in self._left(killed.exports[1]):
                    for one in self._tails(first):
                        for other in self._tails(second):
                            yield "the power is cut", killed._replace(exports=(one, other))

    def _left(self, export: Export) -> Iterator[Export]:
        """The cursors that a power cut may leave."""
        if not self.by_record:
            yield export
            return
        for found in {export.disk, export.synced}:
            cursor = found._replace(reached=max(found.reached, export.reserved))
            yield export._replace(
                disk=cursor, synced=cursor, reserved=-1, cursor=cursor, moved=True,
                doubtful=cursor.planned is not None,
            )  # fmt: skip

    def _tails(self, export: Export) -> Iterator[Export]:
        for kept in range(len(export.log) + 1):
            floor = kept if self.defect is Defect.NO_FLOOR else export.disk.reached + 1
            following = max(kept, floor)
            log = export.log[:kept] + (NOBODY,) * (following - kept)
            skipped = frozenset(range(kept, following))
            dropped = frozenset(n for n in export.dropped if n < kept) | skipped
            freed = frozenset(n for n in export.freed if n < kept)
            moved = export.moved or bool(skipped)
            yield export._replace(log=log, committed=len(log), dropped=dropped, freed=freed, moved=moved)


def _oldest(export: Export) -> int:
    return next((n for n in range(len(export.log)) if n not in export.dropped), len(export.log))


def _occupied(export: Export, batch: Batch) -> bool:
    return any((one.first, one.last) == (batch.first, batch.last) for one in export.objects)


def _share(one: Batch, other: Batch) -> bool:
    return one.first <= other.last and other.first <= one.last


def arrived(export: Export) -> set[int]:
    """Return the numbers that have arrived at the destination."""
    return {number for one in export.objects for number, _ in one.records}


# -- what must hold ------------------------------------------------------------------------------------


def _one_message_a_number(export: Export) -> bool:
    known: dict[int, int] = {n: identity for n, identity in enumerate(export.log) if identity != NOBODY}
    return all(
        known.setdefault(number, identity) == identity
        for one in export.objects
        for number, identity in one.records
    )


def _passed_has_arrived(export: Export) -> bool:
    there = arrived(export) | export.told
    return all(number in there for number in (*range(export.disk.position), *export.disk.ahead))


def _no_hole(export: Export, newest_first: bool) -> bool:
    there = arrived(export) | export.told
    return all(
        n in there or (newest_first and not export.cursor.has_passed(n))
        for n in range(max(arrived(export), default=0))
    )


def _freed_has_arrived(export: Export) -> bool:
    return export.freed <= arrived(export) | export.told


def _no_overlap(export: Export) -> bool:
    if export.moved:
        return True
    parts = sorted((one.first, one.last) for one in export.objects)
    return all(left[1] < right[0] for left, right in pairwise(parts))
