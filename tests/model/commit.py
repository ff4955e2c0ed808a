"""The commit protocol: a client publishes, streams commit groups, the journal keeps QoS 2 packet ids.

One client with a persistent session sends three messages in order, at QoS 1 or 2, each to one or both of two
streams. The third has the packet id of the first. Answers to PUBLISH are those of `bridge.mqtt.broker`, and
groups are written as in `bridge.streams`.

A kill loses what is in memory. A power cut may also lose each frame that was written but not synced. If it
loses a frame and keeps a later one, the numbers of the lost frame have no message (`LOST`).

Not modelled: torn frames and damage (recovery cuts them off: see "Every crash state"), several messages in
one read, the syncs of streams without `flush_on_write` (a power cut may take anything from them here, which
is more than it really can), segments, limits, full disks, QoS 0, outgoing messages. Of the reason codes of
MQTT 5 there is one: with `refuses`, a message may be refused when it is sent again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, IntEnum
from itertools import product
from typing import NamedTuple

from tests.model.explorer import Invariant, Steps, Transition

LOST = -1  # a number without a message
A, B = 0, 1
BOTH = (A, B)
IDS = (1, 2, 1)  # packet ids of the messages: the third has that of the first
NAMES = ("first", "second", "third")
STREAMS = ("A", "B")


class Kind(NamedTuple):
    """How a message is sent, and to which streams."""

    qos: int
    streams: tuple[int, ...]


class Sent(IntEnum):
    """How far the client is with a message."""

    NEW = 0
    AGAIN = 1  # the connection broke before the acknowledgement: it is sent again with DUP
    SENT = 2
    RECEIVED = 3  # PUBREC has arrived; PUBREL is sent next
    RELEASING = 4  # PUBREL was sent
    DONE = 5
    GIVEN_UP = 6  # the client began a clean session, or the message was refused


class Defect(Enum):
    """An essential step that is omitted or done in the wrong order."""

    NONE = "nothing"
    EARLY = "a message is acknowledged before its commit"
    ONE_OF_TWO = "a message is acknowledged after the commit of one of its two streams"
    UNSYNCED = "a group is committed before it is synced"
    SAME_FILE = "after a failed sync, the same file is synced again"
    LEFT_BEHIND = "a group that was not stored stays in the file"
    READS_ON = "packets are still read after a message that could not be stored"
    ID_BEFORE_COMMIT = "a packet id is in the journal before its message is in the stream"
    ID_OF_FAILED = "the packet id of a message that was not stored stays in use"
    TAKEOVER = "a client may reconnect before what it sent earlier is committed"
    EARLY_PUBCOMP = "PUBCOMP is sent before the release of the id is in the journal"
    LATE_PUBCOMP = "a repeated PUBREL is answered although the first one could not be written to the journal"
    UNNOTED_END = (
        "a clean session begins although the end of the last one could not be written to the journal"
    )
    NO_SEARCH = "a start does not look for packet ids in the streams"
    SEARCH_ALL = "a start treats released packet ids as in use"
    POINT_TOO_FAR = "the replay point passes a message that is not settled"
    POINT_TOO_LATE = "a message is written before the replay point of its stream is in the journal"
    PARTIAL = "a resent message that one of two streams already has is stored in both"
    PARTIAL_BY_ID = "the streams that have a message are remembered by its packet id alone"
    IDS_AFTER_CUT = "the packet ids in the journal are trusted after a power cut"
    UNSYNCED_DUPLICATE = "a message found at a start counts as stored before it is synced"


class Batch(NamedTuple):
    """A packet that waits for its answer. `waits`, by stream: 0 no, 1 group pending, 2 group in flight."""

    message: int
    release: bool = False
    waits: tuple[int, int] = (0, 0)
    failed: frozenset[int] = frozenset()
    error: bool = False
    places: tuple[tuple[int, int], ...] = ()  # streams and numbers of a QoS 2 message
    unstored: bool = False  # its id is in use only if the commit succeeds
    journal: bool = False  # it waits for the journal
    live: bool = True  # its connection is still there


class Log(NamedTuple):
    """One stream: frames in the files, how many of them are synced, the group in flight, what is pending."""

    frames: tuple[tuple[int, ...], ...] = ()
    safe: int = 0
    flight: tuple[int, ...] = ()
    second: bool = False  # the group in flight was written again, to a new segment
    hollow: bool = False  # (only with a defect) the sync will succeed, but the data is not on the disk
    pending: tuple[int, ...] = ()
    left: tuple[int, tuple[int, ...]] | None = (
        None  # (only with a defect) a failed frame, and the number of frames before it
    )

    @property
    def numbers(self) -> tuple[int, ...]:
        """The messages by number."""
        return tuple(message for frame in self.frames for message in frame)

    @property
    def next(self) -> int:
        """The provisional number of the next message."""
        return len(self.numbers) + len(self.flight) + len(self.pending)


class Point(NamedTuple):
    """A replay point. `open` has the unsettled numbers with their messages."""

    upto: int
    known: frozenset[int] = frozenset()
    open: tuple[tuple[int, int], ...] = ()


class Kept(NamedTuple):
    """The journal: packet ids in use, streams that have a message which others lack, replay points."""

    incoming: frozenset[int] = frozenset()
    partial: tuple[tuple[tuple[int, int], frozenset[int]], ...] = ()  # streams by packet id and message
    points: tuple[Point | None, Point | None] = (None, None)


class State(NamedTuple):
    """The whole state. `kept` is the content of the journal's file; `session` is the same in memory."""

    client: tuple[Sent, ...]
    up: bool = True
    connected: bool = True
    logs: tuple[Log, Log] = (Log(), Log())
    batches: tuple[Batch, ...] = ()
    session: Kept = Kept()
    kept: Kept = Kept()
    older: Kept | None = None  # (only with a defect) the content of the journal before its last write
    promised: frozenset[tuple[int, int]] = frozenset()  # acknowledged messages, and their streams
    failures: int = 0  # writes, syncs and connections that have failed
    cuts: int = 0
    clean: bool = False  # a clean session was begun


def _put(pair: tuple, at: int, value: object) -> tuple:  # type: ignore[type-arg]  # of any two
    return (*pair[:at], value, *pair[at + 1 :])


class Commit:
    """The model. `kinds` of the three messages; `flush` is `flush_on_write` of both streams."""

    def __init__(
        self,
        kinds: Iterable[Kind],
        *,
        flush: tuple[bool, bool],
        ids: tuple[int, ...] = IDS,
        failures: int = 1,
        cleans: bool = True,
        cuts: bool = True,
        refuses: bool = False,
        defect: Defect = Defect.NONE,
    ) -> None:
        self.kinds, self.flush, self.ids, self.failures = tuple(kinds), flush, ids, failures
        self.cleans, self.cuts, self.refuses, self.defect = cleans, cuts, refuses, defect
        broker, streams = "bridge.mqtt.broker", "bridge.streams"
        self.transitions = (
            Transition(
                "PUBLISH",
                self.publish,
                (f"{broker}.publishing:Publisher.publish", f"{broker}.inbox:Inbox.put",
                 f"{streams}.stream:Stream.append", f"{broker}.replay:ReplayPoint.expect",
                 f"{broker}.journal:Journal.search_from_here"),
            ),
            Transition(
                "write a group",
                self.write,
                (f"{streams}.queue:CommitQueue.take", f"{streams}.log:SegmentLog.stage",
                 f"{streams}.log:SegmentLog.write"),
            ),
            Transition(
                "commit",
                self.commit,
                (f"{streams}.stream:Stream.finish", f"{streams}.log:SegmentLog.commit",
                 f"{broker}.inbox:Batch.committed", f"{broker}.inbox:Inbox.keep_ids",
                 f"{broker}.inbox:Inbox.settle"),
            ),
            Transition(
                "write the journal",
                self.journal,
                (f"{broker}.journalfile:JournalFile._write", f"{broker}.journal:Journal.settled_in"),
            ),
            Transition("PUBREL", self.release, (f"{broker}.broker:Broker.released",)),
            Transition("connect", self.connect, (f"{broker}.broker:Broker.open",)),
            Transition(
                "connect with a clean session", self.connect_clean, (f"{broker}.sessions:Sessions.end",)
            ),
            Transition(
                "start",
                self.start,
                (f"{streams}.recovery:examine", f"{broker}.recovery:recover",
                 f"{broker}.recovery:find_stored_ids"),
            ),
            Transition(
                "a write fails",
                self.write_fails,
                (f"{streams}.stream:Stream.fail", f"{broker}.inbox:Inbox._forget_ids"),
                fault=True,
            ),
            Transition(
                "a sync fails",
                self.sync_fails,
                (f"{streams}.committer:Committer._retry", f"{streams}.stream:Stream.restage"),
                fault=True,
            ),
            Transition(
                "the journal fails",
                self.journal_fails,
                (f"{broker}.journalfile:JournalFile._cannot_write",),
                fault=True,
            ),
            Transition("the connection breaks", self.breaks, (f"{broker}.broker:Broker.close",), fault=True),
            Transition("kill", self.kill, crash=True),
            Transition("power cut", self.cut, (f"{broker}.journal:survived",), crash=True),
        )  # fmt: skip
        self.invariants = (
            Invariant[State](
                "an acknowledged message is in each of its streams",
                "The answer waits in the inbox until every stream has committed the message. Only then does "
                "the packet id count as used. It is free again only once the journal has its release. So no "
                "message is taken for one that is already stored.",
                self.acknowledged_is_stored,
            ),
            Invariant[State](
                "a QoS 2 message is in a stream once",
                "Its packet id is in the journal, or the message is above the replay point, where a start "
                "finds it. If only one of two streams has the message, the session remembers that. A power "
                "cut clears the ids: a duplicate is better than a loss.",
                self.once,
            ),
            Invariant[State](
                "messages are stored in the order in which they were sent",
                "If a group fails, everything that is pending after it fails too. Nothing more is read from "
                "a connection once one of its messages has failed.",
                self.in_order,
            ),
            Invariant[State](
                "a committed message keeps its number",
                "Frames are only appended. The numbers of a failed group are used again, but nobody has seen "
                "them.",
                keeps=self.numbers_stay,
            ),
        )

    def begins(self) -> Iterable[State]:
        """A connected client that has sent nothing yet."""
        yield State(tuple(Sent.NEW for _ in self.kinds), kept=Kept())

    def is_over(self, state: State) -> bool:
        """Every message is acknowledged or given up."""
        return all(sent in (Sent.DONE, Sent.GIVEN_UP) for sent in state.client)

    # -- the client ------------------------------------------------------------------------------

    def publish(self, state: State) -> Steps[State]:
        """The client sends its next message. The broker receives it, or it is lost on the way."""
        holds = any(batch.error and batch.live for batch in state.batches)
        if not state.up or not state.connected or (holds and self.defect is not Defect.READS_ON):
            return
        message = next((n for n, sent in enumerate(state.client) if sent in (Sent.NEW, Sent.AGAIN)), None)
        if message is None:
            return
        sent = state.client[message]
        taken = (self.ids[n] == self.ids[message] for n in range(message)
                 if state.client[n] not in (Sent.DONE, Sent.GIVEN_UP))  # fmt: skip
        if any(taken):
            return
        dup = sent is Sent.AGAIN
        name = f"the client sends the {NAMES[message]} message{' again' if dup else ''}"
        if not dup and state.failures < self.failures:
            lost = state._replace(failures=state.failures + 1, client=_put(state.client, message, Sent.AGAIN))
            yield f"{name}, and the connection breaks before it arrives", self._closed(lost)
        after = state._replace(client=_put(state.client, message, Sent.SENT))
        yield name, self._advance(self._take(after, message, dup=dup))
        refuses = self.refuses and self.ids[message] not in state.session.incoming
        if dup and refuses and state.failures < self.failures:
            over = state._replace(client=_put(state.client, message, Sent.GIVEN_UP))
            yield f"{name}, and it is refused", over._replace(failures=state.failures + 1)

    def _take(self, state: State, message: int, *, dup: bool) -> State:
        kind, number, session = self.kinds[message], self.ids[message], state.session
        if kind.qos == 2 and number in session.incoming:
            return state._replace(batches=(*state.batches, Batch(message, journal=True)))
        targets, kept = kind.streams, state.kept
        partial, points, incoming = dict(session.partial), list(session.points), session.incoming
        if kind.qos == 2 and dup and self.defect is not Defect.PARTIAL:
            names = partial.get(self._partial(message), ())
            targets = tuple(stream for stream in targets if stream not in names)
        elif kind.qos == 2 and not dup:
            partial = {key: names for key, names in partial.items() if key[0] != number}
        logs, waits, places = state.logs, (0, 0), []
        for stream in targets:
            log = logs[stream]
            if kind.qos == 2:
                point = points[stream]
                if point is None:
                    point = Point(len(log.numbers))
                    if self.defect is not Defect.POINT_TOO_LATE:  # it is in the file at once
                        kept = kept._replace(points=_put(kept.points, stream, point))
                opened = tuple(one for one in point.open if one[0] < log.next)
                points[stream] = point._replace(open=(*opened, (log.next, message)))
                places.append((stream, log.next))
            logs = _put(logs, stream, log._replace(pending=(*log.pending, message)))
            waits = _put(waits, stream, 1)
        if kind.qos == 2:
            incoming |= {number}
        batch = Batch(message, waits=waits, places=tuple(places), unstored=kind.qos == 2)
        session = Kept(incoming, tuple(sorted(partial.items())), tuple(points))  # type: ignore[arg-type]
        return state._replace(logs=logs, batches=(*state.batches, batch), session=session, kept=kept)

    def _partial(self, message: int) -> tuple[int, int]:
        """What the streams that have a message are remembered by: its packet id, and its digest."""
        return self.ids[message], 0 if self.defect is Defect.PARTIAL_BY_ID else message

    def release(self, state: State) -> Steps[State]:
        """The client releases a packet id."""
        holds = any(batch.error and batch.live for batch in state.batches)
        if not state.up or not state.connected or holds:
            return
        for message, sent in enumerate(state.client):
            if sent is not Sent.RECEIVED:
                continue
            session, number = state.session, self.ids[message]
            partial = tuple(one for one in session.partial if one[0][0] != number)
            waits = (number in session.incoming or self.defect is not Defect.LATE_PUBCOMP) and (
                self.defect is not Defect.EARLY_PUBCOMP
            )
            after = state._replace(
                client=_put(state.client, message, Sent.RELEASING),
                session=session._replace(incoming=session.incoming - {number}, partial=partial),
                batches=(*state.batches, Batch(message, release=True, journal=waits)),
            )
            yield f"the client sends PUBREL of the {NAMES[message]} message", self._advance(after)

    def connect(self, state: State) -> Steps[State]:
        """The client reconnects to its session."""
        waits = any(batch.unstored for batch in state.batches) and self.defect is not Defect.TAKEOVER
        if state.up and not state.connected and not waits:
            yield "the client connects", state._replace(connected=True)

    def connect_clean(self, state: State) -> Steps[State]:
        """The client reconnects with a clean session, and abandons its unfinished messages."""
        waits = any(batch.unstored for batch in state.batches) and self.defect is not Defect.TAKEOVER
        if not self.cleans or state.clean or not state.up or state.connected or waits:
            return
        if all(sent in (Sent.NEW, Sent.DONE) for sent in state.client):
            return
        over = (Sent.NEW, Sent.DONE)
        client = tuple(sent if sent in over else Sent.GIVEN_UP for sent in state.client)
        session = Kept(points=state.session.points)
        after = state._replace(connected=True, client=client, session=session, clean=True)
        kept = self._to_keep(after)  # CONNACK waits for the journal
        batches = tuple(batch._replace(journal=False) for batch in after.batches)
        yield (
            "the client connects with a clean session",
            self._advance(after._replace(kept=kept, batches=batches)),
        )
        if self.defect is Defect.UNNOTED_END and state.failures < self.failures:
            failed = after._replace(failures=state.failures + 1)
            yield "the client connects with a clean session; the journal cannot be written", failed

    def breaks(self, state: State) -> Steps[State]:
        """The connection is lost. What has arrived is stored all the same."""
        live = any(batch.live for batch in state.batches)
        if state.up and state.connected and live and state.failures < self.failures:
            closed = self._closed(state)
            yield "the connection breaks", closed._replace(failures=state.failures + 1)

    @staticmethod
    def _closed(state: State) -> State:
        back = {Sent.SENT: Sent.AGAIN, Sent.RELEASING: Sent.RECEIVED}
        return state._replace(
            connected=False,
            client=tuple(back.get(sent, sent) for sent in state.client),
            batches=tuple(batch._replace(live=False) for batch in state.batches),
        )

    # -- the streams -----------------------------------------------------------------------------

    def write(self, state: State) -> Steps[State]:
        """The pending group is written to the file as one frame."""
        for stream, log in enumerate(state.logs):
            if state.up and log.pending and not log.flight:
                yield f"stream {STREAMS[stream]} writes its group", self._in_flight(state, stream)

    @staticmethod
    def _in_flight(state: State, stream: int) -> State:
        log = state.logs[stream]
        batches = tuple(
            batch._replace(waits=_put(batch.waits, stream, 2)) if batch.waits[stream] else batch
            for batch in state.batches
        )
        fresh = log._replace(flight=log.pending, pending=(), second=False, hollow=False)
        return state._replace(logs=_put(state.logs, stream, fresh), batches=batches)

    def commit(self, state: State) -> Steps[State]:
        """The group in flight is committed; with `flush_on_write`, after its sync."""
        for stream, log in enumerate(state.logs):
            if not state.up or not log.flight:
                continue
            frames = (*log.frames, log.flight)
            safe = log.safe
            if self.flush[stream] and not log.hollow and self.defect is not Defect.UNSYNCED:
                safe = len(frames)
            done = log._replace(frames=frames, safe=safe, flight=(), second=False, hollow=False)
            batches = tuple(
                batch._replace(waits=_put(batch.waits, stream, 0)) if batch.waits[stream] == 2 else batch
                for batch in state.batches
            )
            after = state._replace(logs=_put(state.logs, stream, done), batches=batches)
            how = "syncs and commits" if self.flush[stream] else "commits"
            yield f"stream {STREAMS[stream]} {how} its group", self._advance(after)

    def write_fails(self, state: State) -> Steps[State]:
        """A write fails, and the group is not stored."""
        for stream, log in enumerate(state.logs):
            if state.up and log.pending and not log.flight and state.failures < self.failures:
                flying = self._in_flight(state, stream)
                yield f"stream {STREAMS[stream]} cannot write its group", self._failed(flying, stream)

    def sync_fails(self, state: State) -> Steps[State]:
        """A sync fails. The group is written to a new segment; if that sync fails too, it is not stored."""
        for stream, log in enumerate(state.logs):
            if not state.up or not log.flight or not self.flush[stream] or state.failures >= self.failures:
                continue
            name = f"the sync of stream {STREAMS[stream]} fails"
            if log.second:
                yield f"{name} again", self._failed(state, stream)
                continue
            fresh = log._replace(second=True, hollow=self.defect is Defect.SAME_FILE)
            where = "is synced again" if fresh.hollow else "is written to a new segment"
            yield (
                f"{name}; the group {where}",
                state._replace(logs=_put(state.logs, stream, fresh), failures=state.failures + 1),
            )

    def _failed(self, state: State, stream: int) -> State:
        """Everything pending or in flight fails; its numbers are used again."""
        log = state.logs[stream]
        batches = tuple(
            batch._replace(waits=_put(batch.waits, stream, 0), failed=batch.failed | {stream}, error=True)
            if batch.waits[stream]
            else batch
            for batch in state.batches
        )
        empty = Log(log.frames, log.safe, left=log.left)
        if self.defect is Defect.LEFT_BEHIND:
            empty = empty._replace(left=(len(log.frames), log.flight))
        after = state._replace(
            logs=_put(state.logs, stream, empty), batches=batches, failures=state.failures + 1
        )
        return self._advance(after)

    # -- answers ---------------------------------------------------------------------------------

    def _advance(self, state: State) -> State:
        """Record the ids of stored messages, and answer the leading packets that wait for nothing."""
        for at, batch in enumerate(state.batches):
            if batch.unstored and batch.waits == (0, 0) and not batch.error:
                points = self._settled(state.session.points, batch, batch.places)
                done = batch._replace(unstored=False, journal=True)
                state = state._replace(
                    session=state.session._replace(points=points), batches=_put(state.batches, at, done)
                )
        for live in (True, False):
            state = self._answer(state, live=live)
        return state

    def _settled(
        self,
        points: tuple[Point | None, Point | None],
        batch: Batch,
        places: Iterable[tuple[int, int]],
    ) -> tuple[Point | None, Point | None]:
        for stream, number in places:
            point = points[stream]
            if point is None:  # a start has begun new replay points
                continue
            opened = tuple(one for one in point.open if one != (number, batch.message))
            known = point.known | {number}
            upto = min([one for one, _ in opened], default=max(known) + 1)
            if self.defect is Defect.POINT_TOO_FAR:
                upto = max(known) + 1
            upto = max(upto, point.upto)
            known = frozenset(one for one in known if one >= upto)
            points = _put(points, stream, Point(upto, known, opened))
        return points

    def _answer(self, state: State, *, live: bool) -> State:
        while True:
            found = next((at for at, one in enumerate(state.batches) if one.live is live), None)
            if found is None:
                return state
            batch = state.batches[found]
            waits = batch.waits != (0, 0) or batch.journal
            early = self.defect is Defect.EARLY and self.kinds[batch.message].qos == 1
            if self.defect is Defect.ONE_OF_TWO and self.kinds[batch.message].streams == BOTH:
                early = 0 in batch.waits and not batch.journal
            if waits and not (early and live and not batch.error and not batch.release):
                return state
            rest = (*state.batches[:found], *state.batches[found + 1 :])
            if batch.error:
                state = self._forget(state._replace(batches=rest), batch)
                if live:
                    return self._answer(self._closed(state), live=False)
                continue
            state = state._replace(batches=rest)
            if live:
                state = self._acknowledged(state, batch)

    def _acknowledged(self, state: State, batch: Batch) -> State:
        kind, message = self.kinds[batch.message], batch.message
        if batch.release:
            return state._replace(client=_put(state.client, message, Sent.DONE))
        sent = Sent.DONE if kind.qos == 1 else Sent.RECEIVED
        promised = state.promised | {(message, stream) for stream in kind.streams}
        return state._replace(client=_put(state.client, message, sent), promised=promised)

    def _forget(self, state: State, batch: Batch) -> State:
        """A message is not in all of its streams: free its id, and remember the streams that have it."""
        if not batch.unstored:
            return state
        session, number = state.session, self.ids[batch.message]
        stored = [place for place in batch.places if place[0] not in batch.failed]
        partial = dict(session.partial)
        if stored:
            key = self._partial(batch.message)
            partial[key] = partial.get(key, frozenset()) | {stream for stream, _ in stored}
        points = self._settled(session.points, batch, stored)
        for stream, place in batch.places:
            point = points[stream]
            if point is not None:
                opened = tuple(one for one in point.open if one != (place, batch.message))
                points = _put(points, stream, point._replace(open=opened))
        incoming = session.incoming
        if self.defect is not Defect.ID_OF_FAILED:
            incoming -= {number}
        return state._replace(session=Kept(incoming, tuple(sorted(partial.items())), points))

    # -- the journal -----------------------------------------------------------------------------

    def journal(self, state: State) -> Steps[State]:
        """Everything that is pending for the journal is written."""
        if not state.up:
            return
        fresh = self._to_keep(state)
        if fresh == state.kept and not any(batch.journal for batch in state.batches):
            return
        batches = tuple(batch._replace(journal=False) for batch in state.batches)
        older = state.kept if self.defect is Defect.IDS_AFTER_CUT else None
        yield (
            "the journal is written",
            self._advance(state._replace(kept=fresh, batches=batches, older=older)),
        )

    def _to_keep(self, state: State) -> Kept:
        unstored = {self.ids[batch.message] for batch in state.batches if batch.unstored}
        if self.defect is Defect.ID_BEFORE_COMMIT:
            unstored = set()
        points = tuple(point and point._replace(open=()) for point in state.session.points)
        return state.session._replace(incoming=state.session.incoming - unstored, points=points)  # type: ignore[arg-type]

    def journal_fails(self, state: State) -> Steps[State]:
        """The journal cannot be written. Nothing that waits for it is acknowledged."""
        if state.up and state.failures < self.failures and any(one.journal for one in state.batches):
            batches = tuple(
                batch._replace(journal=False, error=batch.error or batch.journal) for batch in state.batches
            )
            after = state._replace(batches=batches, failures=state.failures + 1)
            yield "the journal cannot be written", self._advance(after)

    # -- crashes ---------------------------------------------------------------------------------

    def kill(self, state: State) -> Steps[State]:
        """Everything in memory is lost; everything written stays."""
        if state.up:
            logs = tuple(map(self._written, state.logs))
            yield "the service is killed", self._down(state, logs)

    @staticmethod
    def _written(log: Log) -> Log:
        """What a start finds in the files. It cuts off frames whose numbers go back."""
        frames = (*log.frames, log.flight) if log.flight else log.frames
        if log.left is not None:
            frames = (*frames[: log.left[0]], log.left[1])
        return Log(frames, min(log.safe, len(frames)))

    def cut(self, state: State) -> Steps[State]:
        """Each frame that was not synced may be lost."""
        if not self.cuts:
            return
        for logs in product(*(set(self._survivors(log)) for log in state.logs)):
            older = (None,) if state.older is None else (None, state.older)
            for kept in older:
                after = self._down(state, logs)
                gone = {one for one in after.promised if not self.flush[one[1]]}
                yield (
                    "the power is cut",
                    after._replace(
                        cuts=state.cuts + 1,
                        promised=after.promised - gone,
                        kept=(kept or state.kept) if self.defect is Defect.IDS_AFTER_CUT else Kept(),
                        older=None,
                    ),
                )

    def _survivors(self, log: Log) -> Iterator[Log]:
        safe, loose = log.frames[: log.safe], list(log.frames[log.safe :])
        if log.flight and not log.hollow:
            loose.append(log.flight)
        for there in product((True, False), repeat=len(loose)):
            frames = [
                frame if is_there else (LOST,) * len(frame)
                for frame, is_there in zip(loose, there, strict=True)
            ]
            while frames and frames[-1][0] == LOST:
                frames.pop()
            yield Log((*safe, *frames), len(safe) + len(frames))

    def _down(self, state: State, logs: tuple[Log, ...]) -> State:
        closed = self._closed(state)
        return closed._replace(up=False, batches=(), session=Kept(), logs=logs)  # type: ignore[arg-type]

    def start(self, state: State) -> Steps[State]:
        """Read the journal, search the streams for ids from their replay points on, write a snapshot."""
        if state.up:
            return
        kept, logs = state.kept, state.logs
        found: dict[int, frozenset[int]] = {}
        points: list[Point | None] = list(kept.points)
        for stream, point in enumerate(kept.points):
            if point is None:
                continue
            messages = logs[stream].numbers
            begin = 0 if self.defect is Defect.SEARCH_ALL else point.upto
            for number in range(begin, len(messages)):
                message = messages[number]
                known = number in point.known and self.defect is not Defect.SEARCH_ALL
                if message == LOST or known or self.kinds[message].qos != 2:
                    continue
                found[message] = found.get(message, frozenset()) | {stream}
            points[stream] = Point(len(messages))
        incoming, partial = kept.incoming, dict(kept.partial)
        if self.defect is not Defect.NO_SEARCH:
            for message, names in found.items():
                key = self._partial(message)
                have = names | partial.get(key, frozenset())
                if have.issuperset(self.kinds[message].streams):
                    incoming |= {self.ids[message]}
                else:
                    partial[key] = have
        if self.defect is not Defect.UNSYNCED_DUPLICATE:
            for stream in set().union(*found.values()):
                logs = _put(logs, stream, logs[stream]._replace(safe=len(logs[stream].frames)))
        session = Kept(incoming, tuple(sorted(partial.items())), tuple(points))  # type: ignore[arg-type]
        yield "the service starts", state._replace(up=True, logs=logs, session=session, kept=session)

    # -- what must hold --------------------------------------------------------------------------

    def acknowledged_is_stored(self, state: State) -> bool:
        """Whether every acknowledged message is in its streams."""
        return all(message in state.logs[stream].numbers for message, stream in state.promised)

    def once(self, state: State) -> bool:
        """Whether no QoS 2 message is in a stream twice."""
        return state.cuts > 0 or not any(
            log.numbers.count(message) > 1
            for log in state.logs
            for message, kind in enumerate(self.kinds)
            if kind.qos == 2
        )

    def in_order(self, state: State) -> bool:
        """Whether the first copies of the messages are in the order in which the client sent them."""
        for log in state.logs if not state.cuts else ():
            first = list(dict.fromkeys(log.numbers))
            if first != sorted(first):
                return False
        return True

    def numbers_stay(self, before: State, after: State) -> bool:
        """Whether a committed message, or after a power cut an acknowledged one, keeps its number."""
        if after.cuts > before.cuts:
            return all(
                before.logs[stream].numbers.index(message) == after.logs[stream].numbers.index(message)
                for message, stream in after.promised
                if message in after.logs[stream].numbers
            )
        return all(
            new.numbers[: len(old.numbers)] == old.numbers
            for old, new in zip(before.logs, after.logs, strict=True)
        )
