"""The ingest commit: a plan from object names, work in tasks, one commit of data files and state.

Two streams have three messages: numbers 0 and 1 of A, and 0 of B. There are four uploads, in any order: a
good A 0-1; a bad A 0-1 (the same key with another ETag); A 1-1, which overlaps; and B 0-0, whose message a
limit may drop instead. Uploads may be deleted and repeated. The gateway report says which messages were
uploaded or dropped.

Two drivers run at the same time, any number of times. They are interchangeable: states that differ only in
which driver is which count once. Sets are bit masks.

Not modelled: compaction and other engines, rollbacks, new columns, unreadable objects, rounds of limited
size, and the second step (`refine`, which commits in the same way).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, IntEnum
from typing import NamedTuple

from tests.model.explorer import Invariant, Steps, Transition

GOOD, TAIL, OTHER, BAD = range(4)  # the uploads
NAMES = ("A 0-1", "A 1-1", "B 0-0", "a bad A 0-1")
NUMBERS = (0b011, 0b010, 0b100, 0b011)  # the messages in the name of each upload, as bits: A 0, A 1, B 0
ALL = 0b111
OF_B = 0b100


class Defect(Enum):
    """An essential step that is omitted or done in the wrong order."""

    NONE = "nothing"
    OVERLAP = "a plan takes the numbers that two objects share from both"
    FILES_FIRST = "the files are committed before the state instead of with it"
    STATE_FIRST = "the state is committed before the files instead of with them"
    BLIND = "a commit does not check whether another run was first"
    DOCUMENT_LATE = "the table points to a state document that has not been written yet"
    TWICE = "a commit whose answer was lost is repeated"
    DISCARDS = "a refused round deletes its files although they are in the table"
    ORPHANS = "files of a killed task are committed along with those of its retry"
    BAD_TAKEN = "an object that was refused counts as taken"
    BY_KEY = "a refused object is recognized by its key alone"
    GONE_WAITS = "a deleted object counts as uploaded"
    LIST_FIRST = "the objects are listed before the gateway reports are read"


class Phase(IntEnum):
    """The phase of a run."""

    IDLE = 0
    BEGUN = 1  # it has read the reports, but not the listing (with LIST_FIRST the reverse)
    LISTED = 2
    WORKING = 3
    WORKED = 4
    SAVED = 5  # the state document is written
    HALF = 6  # (only with a defect) one half of the commit is made
    UNSURE = 7  # the answer to the commit was lost


class Report(NamedTuple):
    """The gateway report: messages that were uploaded or dropped, and those that were dropped."""

    exported: int = 0
    dropped: int = 0


class Driver(NamedTuple):
    """One run, with what it has read, planned and done."""

    phase: Phase = Phase.IDLE
    report: Report = Report()
    listing: int = 0
    base: int = 0  # the version of the table from which it planned
    covered: int = 0
    refused: int = 0  # uploads
    work: tuple[tuple[int, int], ...] = ()  # uploads, and the numbers to take from each
    rows: tuple[int, ...] = ()  # messages in its data files
    taken: int = 0
    bad: int = 0
    gone: int = 0  # uploads that this run did not find any more
    mine: bool = False  # the table points to the version of this round


class Table(NamedTuple):
    """The rows, and the state in the document that the table points to. `version` counts from 0."""

    rows: tuple[int, ...] = ()
    version: int = 0
    covered: int = 0
    refused: int = 0
    readable: bool = True  # the document exists


class State(NamedTuple):
    """The whole state."""

    bucket: int = 0
    uploaded: int = 0  # messages that were ever uploaded, or dropped
    dropped: int = 0
    report: Report = Report()
    table: Table = Table()
    drivers: tuple[Driver, Driver] = (Driver(), Driver())
    deleted: int = 0
    lost: int = 0  # how many answers were lost
    proven: bool = False  # a run has reported the table as complete
    wrong: str = ""  # a false statement of a run


class Ingest:
    """The model. At most `deletions` objects are deleted and `lost` answers are lost."""

    def __init__(
        self,
        uploads: Iterable[int] = (GOOD, TAIL, OTHER, BAD),
        *,
        drivers: int = 2,
        deletions: int = 1,
        lost: int = 1,
        defect: Defect = Defect.NONE,
    ) -> None:
        self.uploads, self.drivers, self.deletions = tuple(uploads), drivers, deletions
        self.lost, self.defect = lost, defect
        room = "bridge.ingest"
        self.transitions = (
            Transition("upload", self.upload),
            Transition("drop", self.drop),
            Transition("the gateway reports", self.reports, ("bridge.plugin.reports:gateway_report",)),
            self._each(
                "begin a run", self._begin, f"{room}.gateway_reports:read_gateway_reports",
                f"{room}.planner:Inventory"
            ),
            self._each(
                "list", self._list, f"{room}.planner:Inventory"
            ),
            self._each(
                "plan", self._plan, f"{room}.state:StateStore.load", f"{room}.planner:plan"
            ),
            self._each("work", self._work, f"{room}.worker:process", f"{room}.job:_apply"),
            self._each("save the state", self._save, f"{room}.state:StateStore.save"),
            self._each(
                "commit", self._commit, f"{room}.sinks.iceberg:IcebergSink.commit",
                f"{room}.sinks.delta:DeltaSink.commit", f"{room}.sinks.base:discard",
            ),
            self._each("report", self._finish, f"{room}.report:build"),
            self._each(
                "the answer to a commit is lost", self._commit_unsure, fault=True
            ),
            Transition("an object is deleted", self.delete, fault=True),
            self._each("a task is killed", self._task_killed, f"{room}.files:sweep", crash=True),
            self._each("a driver is killed", self._killed, crash=True),
        )  # fmt: skip
        self.invariants = (
            Invariant[State](
                "a message is in the table once",
                "A plan takes each number from one object. A round is committed only if the table still has "
                "the state from which it was planned. If a task was repeated, only the files that its last "
                "attempt reported count.",
                lambda state: len(set(state.table.rows)) == len(state.table.rows),
            ),
            Invariant[State](
                "the state covers exactly what is in the table",
                "The files and the pointer to the state change in one commit.",
                lambda state: sum(1 << row for row in set(state.table.rows)) == state.table.covered,
            ),
            Invariant[State](
                "a verdict is true",
                "Reports are read before objects are listed. So each object that a report calls uploaded is "
                "in the listing, unless somebody has deleted it. Refused and deleted objects do not count as "
                "uploaded.",
                lambda state: not state.wrong,
            ),
            Invariant[State](
                "rows in the table stay there",
                "A refused round deletes its files only after it has checked that the table lacks them.",
                keeps=lambda before, after: set(before.table.rows) <= set(after.table.rows),
            ),
        )

    def _each(
        self, name: str, steps: object, *code: str, fault: bool = False, crash: bool = False
    ) -> Transition[State]:
        """A transition that either driver makes."""

        def both(state: State) -> Steps[State]:
            for at in range(self.drivers):
                other = state.drivers[1 - at]
                for does, driver, *rest in steps(state, state.drivers[at]):  # type: ignore[operator]
                    after = rest[0] if rest else state
                    if after.table.version != state.table.version:
                        other = other._replace(mine=False)
                    pair = (driver, other)
                    if self.drivers == 2 and other < driver:
                        pair = (other, driver)
                    yield does, after._replace(drivers=pair)
                if state.drivers[0] == state.drivers[1]:
                    return

        both.__doc__ = steps.__doc__
        return Transition(name, both, code, fault=fault, crash=crash)

    def begins(self) -> Iterable[State]:
        """Nothing is uploaded, and the table is empty."""
        yield State()

    def is_over(self, state: State) -> bool:
        """Every message is in the table or dropped, and a run has reported that."""
        return state.proven and state.table.covered | state.dropped == ALL

    # -- the gateway and the bucket --------------------------------------------------------------

    def upload(self, state: State) -> Steps[State]:
        """An object is uploaded, perhaps again. The bad and the good one have the same key."""
        for upload in self.uploads:
            if state.bucket & 1 << upload:
                continue
            if upload == BAD and (state.bucket | state.uploaded) & 0b011:
                continue  # it comes first, if it comes
            if upload == TAIL and not state.uploaded & NUMBERS[TAIL]:
                continue
            if upload == OTHER and state.dropped:
                continue
            bucket = state.bucket | 1 << upload
            if upload == GOOD:
                bucket &= ~(1 << BAD)
            yield (
                f"{NAMES[upload]} is uploaded",
                state._replace(bucket=bucket, uploaded=state.uploaded | NUMBERS[upload]),
            )

    def drop(self, state: State) -> Steps[State]:
        """The gateway drops the message of B before it is uploaded."""
        if not state.uploaded & OF_B:
            yield "a limit drops B 0", state._replace(uploaded=state.uploaded | OF_B, dropped=OF_B)

    def reports(self, state: State) -> Steps[State]:
        """The gateway reports what it has uploaded and dropped."""
        fresh = Report(state.uploaded, state.dropped)
        if fresh != state.report:
            yield "the gateway reports", state._replace(report=fresh)

    def delete(self, state: State) -> Steps[State]:
        """Somebody deletes an object."""
        for upload in self.uploads:
            if state.deleted < self.deletions and state.bucket & 1 << upload:
                yield (
                    f"{NAMES[upload]} is deleted",
                    state._replace(bucket=state.bucket & ~(1 << upload), deleted=state.deleted + 1),
                )

    # -- a run -----------------------------------------------------------------------------------

    def _begin(self, state: State, driver: Driver) -> Iterator[tuple[str, Driver]]:
        """A run reads the gateway reports."""
        if driver.phase is Phase.IDLE:
            if self.defect is Defect.LIST_FIRST:
                yield "a run lists the objects", Driver(Phase.BEGUN, listing=state.bucket)
            else:
                yield "a run reads the gateway's report", Driver(Phase.BEGUN, state.report)

    def _list(self, state: State, driver: Driver) -> Iterator[tuple[str, Driver]]:
        """The run lists the objects."""
        if driver.phase is Phase.BEGUN:
            if self.defect is Defect.LIST_FIRST:
                yield (
                    "it reads the gateway's report",
                    driver._replace(phase=Phase.LISTED, report=state.report),
                )
            else:
                yield "it lists the objects", driver._replace(phase=Phase.LISTED, listing=state.bucket)

    def _todo(self, table: Table, driver: Driver) -> tuple[tuple[int, int], ...]:
        reach, work = table.covered, []
        for upload in self.uploads:
            numbers, there = NUMBERS[upload], driver.listing & ~driver.gone
            refused = table.refused & 1 << upload
            if self.defect is Defect.BY_KEY and upload == GOOD:
                refused |= table.refused & 1 << BAD
            if not there & 1 << upload or refused or not numbers & ~table.covered:
                continue
            fresh = numbers & ~(table.covered if self.defect is Defect.OVERLAP else reach)
            if fresh:
                reach |= fresh
                work.append((upload, fresh))
        return tuple(work)

    def _plan(self, state: State, driver: Driver) -> Iterator[tuple[str, Driver]]:
        """The run loads the state that the table points to, and plans a round from object names alone."""
        table = state.table
        if driver.phase is Phase.LISTED and table.readable and (work := self._todo(table, driver)):
            yield "a run plans a round", driver._replace(
                phase=Phase.WORKING, base=table.version, covered=table.covered, refused=table.refused,
                work=work, rows=(), taken=0, bad=0, mine=False,
            )  # fmt: skip

    def _work(self, state: State, driver: Driver) -> Iterator[tuple[str, Driver]]:
        """A task reads and checks an object, and writes its new rows to a data file."""
        if driver.phase is not Phase.WORKING:
            return
        (upload, fresh), *rest = driver.work
        after = driver._replace(work=tuple(rest), phase=Phase.WORKING if rest else Phase.WORKED)
        if not state.bucket & 1 << upload:
            yield f"a task does not find {NAMES[upload]}", after._replace(gone=driver.gone | 1 << upload)
        elif upload == BAD:
            taken = fresh if self.defect is Defect.BAD_TAKEN else 0
            yield (
                f"a task refuses {NAMES[upload]}",
                after._replace(bad=driver.bad | 1 << upload, taken=driver.taken | taken),
            )
        else:
            rows = tuple(sorted((*driver.rows, *_messages(fresh))))
            yield f"a task takes {NAMES[upload]}", after._replace(rows=rows, taken=driver.taken | fresh)

    def _task_killed(self, state: State, driver: Driver) -> Iterator[tuple[str, Driver]]:
        """A task dies after it has written its file, and is repeated."""
        if driver.phase is Phase.WORKING and state.bucket & 1 << driver.work[0][0]:
            rows = driver.rows
            if self.defect is Defect.ORPHANS and driver.work[0][0] != BAD:
                rows = tuple(sorted((*rows, *_messages(driver.work[0][1]))))
            yield "a task is killed when its file is written, and repeated", driver._replace(rows=rows)

    def _save(self, state: State, driver: Driver) -> Iterator[tuple[str, Driver]]:
        """The driver writes the state document under a new name."""
        if driver.phase is not Phase.WORKED:
            return
        if not driver.taken and not driver.bad:
            yield "nothing of the round is left", _again(driver)
        elif self.defect is Defect.DOCUMENT_LATE:
            yield "the round is ready", driver._replace(phase=Phase.SAVED)
        else:
            yield "the state document is written", driver._replace(phase=Phase.SAVED)

    def _committed(self, state: State, driver: Driver) -> State:
        table = state.table
        rows, covered, version = table.rows, table.covered, table.version + 1
        if self.defect is not Defect.STATE_FIRST:
            rows = tuple(sorted((*rows, *driver.rows)))
        if self.defect is not Defect.FILES_FIRST:
            covered = driver.covered | driver.taken
            refused = driver.refused | driver.bad
        else:
            refused, version = table.refused, table.version
        readable = self.defect is not Defect.DOCUMENT_LATE
        return state._replace(table=Table(rows, version, covered, refused, readable))

    def _commit(self, state: State, driver: Driver) -> Iterator[tuple[str, Driver, State]]:
        """The driver commits files and pointer, if the table still has the version from which it planned."""
        table = state.table
        if driver.phase is Phase.HALF:
            yield "the other half is committed", _again(driver), self._other_half(state, driver)
        if driver.phase not in (Phase.SAVED, Phase.UNSURE):
            return
        if driver.phase is Phase.UNSURE and driver.mine and self.defect is not Defect.TWICE:
            yield "the run finds its commit", _again(driver), state
        elif table.version == driver.base or self.defect is Defect.BLIND or (
            self.defect is Defect.TWICE and driver.mine
        ):  # fmt: skip
            halves = (Defect.FILES_FIRST, Defect.STATE_FIRST, Defect.DOCUMENT_LATE)
            after = driver._replace(phase=Phase.HALF) if self.defect in halves else _again(driver)
            yield "the round is committed", after, self._committed(state, driver)
        else:
            rows = table.rows
            if self.defect is Defect.DISCARDS and driver.phase is Phase.UNSURE:
                rows = tuple(row for row in rows if row not in driver.rows)
            yield (
                "another run was first: the round is discarded",
                _again(driver),
                state._replace(table=table._replace(rows=rows)),
            )

    def _other_half(self, state: State, driver: Driver) -> State:
        table = state.table
        match self.defect:
            case Defect.STATE_FIRST:
                table = table._replace(rows=tuple(sorted((*table.rows, *driver.rows))))
            case Defect.FILES_FIRST:
                table = table._replace(
                    version=table.version + 1, covered=table.covered | driver.taken,
                    refused=table.refused | driver.bad,
                )  # fmt: skip
        return state._replace(table=table._replace(readable=True))

    def _commit_unsure(self, state: State, driver: Driver) -> Iterator[tuple[str, Driver, State]]:
        """The answer to a commit is lost, whether the commit was made or not."""
        if driver.phase is Phase.SAVED and state.lost < self.lost and state.table.version == driver.base:
            spent = state._replace(lost=state.lost + 1)
            after = driver._replace(phase=Phase.UNSURE)
            yield (
                "the round is committed, and the answer is lost",
                after._replace(mine=True),
                self._committed(spent, driver),
            )
            yield "the connection breaks before the commit", after, spent

    def _finish(self, state: State, driver: Driver) -> Iterator[tuple[str, Driver, State]]:
        """If nothing is left to plan, the run gives its verdict."""
        table = state.table
        if driver.phase is not Phase.LISTED or not table.readable or self._todo(table, driver):
            return
        gone = 0 if self.defect is Defect.GONE_WAITS else driver.gone
        listed, refused = 0, 0
        for upload in self.uploads:
            if table.refused & 1 << upload:
                refused |= NUMBERS[upload]
            elif driver.listing & ~gone & 1 << upload:
                listed |= NUMBERS[upload]
        report = driver.report
        holes = ALL & ~table.covered & ~listed & ~report.dropped
        complete = not holes & report.exported and not holes & refused
        after = state._replace(proven=complete and report.exported == ALL)
        there = sum(1 << row for row in set(table.rows))
        if complete and report.exported & ~there & ~report.dropped:
            after = after._replace(wrong="a run calls the table complete, but a message is missing")
        if not complete and not state.deleted and not table.refused and not driver.gone:
            after = after._replace(wrong="a run says that a message is lost, but it is not")
        verdict = "complete" if complete else "incomplete"
        yield f"a run ends with the verdict: {verdict}", Driver(), after

    def _killed(self, state: State, driver: Driver) -> Iterator[tuple[str, Driver]]:
        """A driver dies. The next run starts over."""
        if driver.phase > Phase.LISTED:
            yield "a driver is killed", Driver()


def _again(driver: Driver) -> Driver:
    """The run continues with its next round."""
    return Driver(Phase.LISTED, driver.report, driver.listing, gone=driver.gone)


def _messages(mask: int) -> list[int]:
    return [message for message in range(3) if mask & 1 << message]
