"""What is promised, compared with what is there (docs/guarantees.md).

* A message that was acknowledged is in each of its streams, unless a power cut came within the time in which
  the stream's settings allow a loss, or a limit dropped it.
* What is in a stream was sent by somebody, to a topic of the stream, who had the right; a QoS 2 message is
  there once (over a power cut its packet id may be forgotten), an append with an id once.
* The messages of a client are in the order in which it sent them; numbers are contiguous.
* What a stream that syncs before it acknowledges no longer has, it has a reason for.
* A number that was seen in a stream, or in the cloud, stands for the same message from then on.
* Objects hold the numbers of their names, and declare those that the export's topics leave out; what an
  export has passed is in the cloud, or was left out, or its loss is recorded.
* A persistent session gets each message of an ordinary topic that was acknowledged after it subscribed, in
  order, and one of QoS 2 once.
* The table has every exported row once; a verdict is true.
* Once all faults have ended, everything comes to rest; a stop and `verify` find nothing wrong.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from bridge.errors import CorruptData, NotEnoughMessages
from bridge.filtered import from_extra
from bridge.ingest.planner import StreamId
from bridge.objectkeys import REPORTS, parse_key
from bridge.operations.reading import ReadMessagesOptions
from bridge.ranges import Ranges
from bridge.streams.drops import Drop, DropReason
from bridge.streams.verify import verify
from bridge.topics import matches

from . import kernel as kernels
from .clients import Device, Message
from .cloud import absent
from .exports import ExportChecks, rows_of
from .hands import Hands
from .lake import LakeChecks
from .sessions import SessionChecks
from .settings import FEW

if TYPE_CHECKING:
    from .world import World

EXPORTED = ("safe", "plain", "ring")
ON_THE_WAY = 0.002  # s, of an acknowledgement
SLACK = 0.5  # s, of a sync that is under way
START = 0.1  # s, that one takes
STREAMS = (
    "safe",
    "plain",
    "both",
    "ring",
    "memory",
    "kin",
    "aged",
    "ids",
    "dead",
    "work",
    "few",
    "odd",
    "fate",
)
LETTERS = ("dead", "fate")  # streams of dead letters: they are read after those that have them
NOTED = 12.0  # s after which a step of the wall clock is on the disk
AGAIN = 0.03  # s in which what a failed call has left is written again


def _said(body: bytes) -> tuple[bytes, bytes | None]:
    """What an object says: its rows, and what it lacks."""
    return gzip.decompress(body), from_extra(body)


@cache
def streams_of(topic: str) -> list[str]:
    """The streams that a topic is bound to."""
    family, _, rest = topic.partition("/")
    found = [family] if family in STREAMS else []
    if family in ("safe", "plain") and rest.startswith("both/"):
        found.append("both")
    return found


class _Seen(NamedTuple):
    """What a stream had: its rows, how often each payload, and the newest message of each client."""

    rows: list[tuple[int, bytes, bytes]]
    times: Counter[bytes]
    newest: dict[str, int]


class Checks:
    """The truth about one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen: dict[str, dict[int, bytes]] = {name: {} for name in STREAMS}
        self._perhaps_lost: dict[str, set[int]] = defaultdict(set)  # numbers of dead letters, by a power cut
        self.exported: dict[str, dict[int, bytes]] = {name: {} for name in EXPORTED}
        self.now: dict[str, list[tuple[int, bytes, bytes]]] = {name: [] for name in STREAMS}
        self.appended: dict[tuple[str, str, int, int], bytes] = {}
        self.epochs: dict[str, int] = {}
        self.left_out: dict[StreamId, Ranges] = defaultdict(Ranges)  # as objects declare
        self.clocked = any(step.do == "clock" for step in world.plan.steps)
        self.steps: list[float] = []  # when the wall clock was set
        self.filled = any(step.do in ("full", "refuse") for step in world.plan.steps)
        self._known: dict[bytes, Message] = {}
        self._known_of: dict[str, int] = defaultdict(int)
        self._open: list[Message] = []  # not acknowledged
        self._looked_at: dict[str, int] = defaultdict(int)  # how many of a device's messages
        self._acked: dict[str, dict[bytes, Message]] = defaultdict(dict)  # by stream
        self._unopened: dict[str, list[float]] = defaultdict(list)  # by stream: starts that could not open it
        self._before: dict[str, _Seen] = {}  # by stream: what was right at the last look
        self.over = False  # the gateway is another one now
        self._purged_upto = 0  # of the stream both, as a reply has said
        self._purging: set[bytes] = set()  # what may be gone because of a purge
        self._unsynced: dict[str, list[float]] = defaultdict(list)  # when what a stream has was not synced
        self._epochs_of_fresh: set[int] = set()
        self._recreating = -1  # the connection of the appender on which it is under way
        self.sessions = SessionChecks(world, self)
        self.exports = ExportChecks(world, self)
        self.labour, self.hands = world.labour, Hands(world)
        self.lake = LakeChecks(world, self)
        self._topics_of_few: dict[int, bytes] = {}  # by number: all that were ever there
        self.first = ""  # what was broken first
        self._room = 0  # how many messages of one size the stream exact has room for
        store = world.bucket.store

        def noted(key: str, body: bytes, what: str, metadata: Any = None) -> str:
            before = world.bucket.objects.get(key)
            known = what == "put" and before is not None and key not in world.bucket.harmed and parse_key(key)
            if known and _said(before.body) != _said(body):
                self.broken(f"the object {key} was overwritten with other rows")
            etag = store(key, body, what, metadata)
            if what == "put" and key.startswith(REPORTS):
                self.exports.report(body)
            elif what == "put":
                self._object(key, body)
            return etag

        world.bucket.store = noted  # type: ignore[method-assign]

    def broken(self, text: str) -> NoReturn:
        """A promise is broken: note it, if it is the first, and raise BrokenError.

        Where the product calls a checker, as with an upload, it takes the error for one of its own, and goes
        on. The world ends at its next step all the same, with what was noted.
        """
        from .world import BrokenError

        self.first = self.first or text
        raise BrokenError(text)

    def whole(self) -> None:
        """Raise BrokenError if a promise was broken, whoever was told."""
        if self.first:
            self.broken(self.first)

    # -- what was sent

    def message(self, payload: bytes) -> Message | None:
        known = self._known.get(payload)
        return known if known is not None else self._learn().get(payload)

    def _learn(self) -> dict[bytes, Message]:
        """All messages by payload."""
        for device in self.world.devices:
            for message in device.messages[self._known_of[device.name] :]:
                self._known[message.payload] = message
            self._known_of[device.name] = len(device.messages)
        return self._known

    def answered(self, name: str) -> dict[bytes, Message]:
        """What was acknowledged of a stream's messages, by payload."""
        open_ = []
        for message in self._open + [one for d in self.world.devices for one in self._fresh(d)]:
            if message.acked is None:
                open_.append(message)
                continue
            for stream in streams_of(message.topic):
                self._acked[stream][message.payload] = message
        self._open = open_
        return self._acked[name]

    def _fresh(self, device: Device) -> list[Message]:
        """The messages of a device that nobody has looked at."""
        at = self._looked_at[device.name]
        self._looked_at[device.name] = len(device.messages)
        return device.messages[at:]

    # -- when a loss is allowed

    @property
    def late(self) -> float:
        """Seconds after which what is too old is gone: limits are applied with background syncs."""
        return max(1.0, self.world.plan.sync_interval / 1000) + SLACK

    @property
    def losses(self) -> list[float]:
        """When what was not synced may have been lost: at power cuts, and at starts after a failed sync.

        Such a start reads what is on the disk (docs/guarantees.md: "reported if that fails too"). It may be
        the start itself whose sync fails.
        """
        world = self.world
        first = min(world.sync_failures, default=float("inf"))
        return sorted([*world.cuts, *(at for at in world.starts if at > first - START)])

    @property
    def lied(self) -> bool:
        """Whether the power was cut after syncs that did nothing, or an old copy came back.

        Little is promised then.
        """
        return self.world.restored or any(
            begin < cut for begin, _ in self.world.lies for cut in self.world.cuts
        )

    def flushed(self, stream: str) -> bool:
        """Whether a stream syncs before it acknowledges."""
        seed = self.world.plan.seed
        return (
            stream in ("safe", "kin", "few", "odd", *LETTERS)
            or (stream in ("both", "work") and seed % 2 == 1)
            or (stream == "ids" and not seed % 3)
        )

    def _excused(self, stream: str, at: float) -> bool:
        """Whether a message that was acknowledged then may be gone after one of the power cuts."""
        world = self.world
        if stream == "memory":
            return any(start > at for start in world.starts)
        if self.flushed(stream):
            return False
        for cut in self.losses:
            if cut <= at - ON_THE_WAY:
                continue
            calm = world.plan.sync_interval / 1000 + SLACK + world.disk.syncing(at, cut)
            since = at - ON_THE_WAY  # the service may have ended while the acknowledgement was on its way
            if self.longest_calm(since, cut, self._unopened[stream]) < calm or self._could_not_rewrite(
                at, cut
            ):
                return True
        return False

    def _could_not_rewrite(self, begin: float, end: float) -> bool:
        """Whether what a failed sync has left could not be written elsewhere, because the disk was full."""
        failed = min(self.world.sync_failures, default=end)
        return any(since < end and until > max(begin, failed) for since, until in self.world.full)

    def longest_calm(self, begin: float, end: float, unopened: Sequence[float] = ()) -> float:
        """The longest time, in s, that the service ran without a failed sync.

        `unopened`: when it was started and could not open the stream in question.
        """
        world = self.world
        ends = [(at, False) for at in (*world.kills, *world.cuts, *world.stops, *unopened)]
        marks = [(at, True) for at in (*world.starts, *world.sync_failures)] + ends
        inside = sorted((at, runs) for at, runs in marks if begin <= at < end)
        parts = pairwise([(begin, True), *inside, (end, False)])
        return max(b - a for (a, runs), (b, _) in parts if runs)

    def fails(self, name: str) -> bool:
        """Whether a call for a stream has ever failed."""
        return any(f"/streams/{name}/" in path for _, path in self.world.troubles)

    def _failed_before_an_end(self, name: str) -> bool:
        """Whether a call for a stream failed soon before the service ended, or while it was started."""
        world = self.world
        failed = [at for at, path in world.troubles if f"/streams/{name}/" in path]
        ends = [*world.kills, *world.cuts, *world.starts]
        return any(-1 < end - at < AGAIN + world.disk.syncing(at, end) for at in failed for end in ends)

    # -- the streams

    def _read(self) -> dict[str, list[tuple[int, bytes, bytes]]]:
        """All messages of all streams, by the product's own read."""
        world = self.world
        process = world.process
        assert process is not None
        found: dict[str, list[tuple[int, bytes, bytes]]] = {}
        done: list[BaseException | None] = []

        async def read() -> None:
            manager = world.service._manager
            for name in STREAMS:
                stream = manager.store.streams.get(name)
                if stream is None:
                    continue
                self._epoch(name, stream.epoch)
                self._explained(name, stream.drops.ranges)
                rows: list[tuple[int, bytes, bytes]] = []
                at = 0
                while at < stream.log.next:
                    options = ReadMessagesOptions(
                        desired_start_sequence_number=at, max_message_count=10_000, read_timeout_millis=0
                    )
                    try:
                        some = await manager.read(name, options)
                    except Exception as error:
                        if isinstance(error, NotEnoughMessages) or (
                            self.lied and isinstance(error, CorruptData | OSError)
                        ):
                            break
                        raise
                    rows += [(m.sequence_number, bytes(m.topic), bytes(m.payload)) for m in some]
                    at = rows[-1][0] + 1
                found[name] = rows

        def ended(task: asyncio.Task[None]) -> None:
            done.append(None if task.cancelled() else task.exception())

        with world.kernel.inside(process):
            process.loop.create_task(read()).add_done_callback(ended)
        process.loop.kick()
        world.kernel.run(lambda: bool(done) or process.dead, 30)
        if process.dead or (done and isinstance(done[0], kernels.Killed)):
            return {}
        if not done:
            self.broken("a read does not end")
        if done[0] is not None:
            raise done[0]
        return found

    def _epoch(self, name: str, epoch: int) -> None:
        before = self.epochs.setdefault(name, epoch)
        if before != epoch and not self.lied:
            self.broken(f"the stream {name} was made anew: its epoch was {before} and is {epoch}")

    def _explained(self, name: str, drops: Sequence[Drop]) -> None:
        """What a stream that syncs before it acknowledges no longer has, it has a reason for."""
        if self.lied or self.world.sync_failures or not self.flushed(name):
            return
        for drop in drops:
            if drop.reason is DropReason.UNKNOWN:
                self.broken(f"{name}: nobody knows why numbers {drop.first} to {drop.last} are gone")

    def repaired(self, name: str, text: str) -> None:
        """The service warns about a stream, often of what a start has repaired.

        Nobody has flipped a bit, so that a power cut has torn at most what was not acknowledged yet. After a
        failed call it may tear what a process that was killed soon after that had not written again.
        """
        if "the stream is not opened" in text:
            self._unopened[name].append(self.world.kernel.now + 1e-6)  # after the sync that failed
        if "so did writing elsewhere" in text:
            self._unsynced[name].append(self.world.kernel.now)
        torn = "it is damaged" in text or "what followed it is gone" in text
        excused = self.lied or self.world.backup or self._failed_before_an_end(name)
        # Zeros that a power cut leaves in the last frame may be a torn write or damage, and nothing tells
        # them apart (proof.md, "Every crash state"). `_acknowledged` knows what of it was acknowledged.
        excused = excused or ("; lost: " in text and bool(self.losses))
        # A disk that has failed twice, at a sync and elsewhere, has really lost what it was given.
        excused = excused or bool(self._unsynced[name])
        # What a limit drops, or has been exported, is dropped again: the record of it is not synced.
        excused = excused or (name in ("few", "kin", "work") and "/drops.log" in text)
        if torn and self.flushed(name) and not excused:
            self.broken(f"{name}: a start has found damage in what was acknowledged: {text}")

    def after_start(self) -> None:
        """The service has been started: look at all streams, mostly."""
        if self.over:
            return
        if self.world.random.random() < 0.4 and self.world.kernel.now > 1001:
            return
        self.look()

    def look(self) -> None:
        """Look at all streams."""
        found = self._read()
        for name in sorted(found, key=lambda name: name not in LETTERS):
            # What could not be opened may have what the other one has not.
            if {"kin": "dead", "work": "fate"}.get(name, name) not in found:
                continue
            rows = found[name]
            self._stream(name, rows)
            self.now[name] = rows
        if found:
            self.exports.looked()

    def rows(self, name: str) -> dict[int, bytes]:
        """What a stream has now, by number; empty if the service ends meanwhile."""
        return {number: payload for number, _, payload in self._read().get(name, ())}

    def after_cut(self) -> None:
        """Numbers whose messages may have been lost may be used again, unless they were exported.

        Also those of dead letters: a start may find one that was not synced, and somebody has seen it then.
        """
        for name in LETTERS:
            self._perhaps_lost[name] = set(self.seen[name])
        for name in ("plain", "both", "ring", "memory", "aged", "ids", "work"):
            seen = self.seen[name]
            for number in list(seen):
                if self.exported.get(name, {}).get(number) is not None:
                    continue
                if name in self.epochs and self.left_out[self._id(name)].covers(number, number):
                    continue
                del seen[number]

    def _stream(self, name: str, rows: list[tuple[int, bytes, bytes]]) -> None:
        if self.lied:
            for number, _, payload in rows if name not in ("ids", *LETTERS) else ():
                if self.message(payload) is None:
                    self.broken(f"{name}: number {number} was never sent: {payload!r}")
            return
        seen, cuts = self.seen[name], self.losses
        before = -1
        for number, _topic, payload in rows:
            if number <= before:
                self.broken(f"{name}: number {number} comes after {before}")
            if number > before + 1 and before >= 0 and not (cuts or name in ("memory", "kin", "ring", "few")):
                self.broken(f"{name}: after number {before} comes {number}")
            before = number
            was = seen.get(number)
            if was is None or (was != payload and number in self._perhaps_lost[name]):
                seen[number] = payload
                self._perhaps_lost[name].discard(number)
                if name == "fate":
                    letter = json.loads(payload)
                    self.labour.dead_letter(letter["sequenceNumber"], base64.b64decode(letter["payload"]))
                row = "g", name, self.epochs[name], number
                if self.appended.setdefault(row, payload) != payload:
                    if self.exported.get(name, {}).get(number) is not None:
                        self.broken(
                            f"{name}: number {number} is {payload!r}, and another message was exported"
                        )
                    self.appended[row] = payload
            elif was != payload:
                self.broken(f"{name}: number {number} was {was!r} and is {payload!r}")
        if name not in ("ids", *LETTERS):
            self._sent(name, rows)
        elif name == "ids":
            self._ids(rows)
        self._acknowledged(name, {payload for _, _, payload in rows})
        if name == "few":
            self._few(rows)
        if name == "both" and rows and rows[0][0] < self._purged_upto:
            self.broken(f"both: number {rows[0][0]} is back after a purge up to {self._purged_upto}")

    def _few(self, rows: list[tuple[int, bytes, bytes]]) -> None:
        """A stream with a limit per topic has the newest messages of each, and no others."""
        have = Counter(topic for _, topic, _ in rows)
        ever: dict[bytes, set[int]] = defaultdict(set)
        for number, topic, _ in rows:
            self._topics_of_few[number] = topic
        for number, topic in self._topics_of_few.items():
            ever[topic].add(number)
        for topic, numbers in ever.items():
            if not min(len(numbers), FEW) <= have[topic] <= FEW:
                self.broken(f"few: {len(numbers)} messages on {topic!r} were there, and {have[topic]} are")

    def _sent(self, name: str, rows: list[tuple[int, bytes, bytes]]) -> None:
        """Nothing is invented, in the wrong stream, out of order, or there too often."""
        before = self._before.get(name)
        if before is None or rows[: len(before.rows)] != before.rows:
            before = _Seen([], Counter(), {})
        times, newest, latest = before.times, before.newest, max(self.losses, default=-1.0)
        self._before[name] = before._replace(rows=rows)
        for number, topic, payload in rows[len(before.rows) :]:
            message = self.message(payload)
            if message is None:
                self.broken(f"{name}: number {number} was never sent: {payload!r}")
                continue
            if name not in streams_of(message.topic) or topic != message.topic.encode():
                self.broken(f"{name}: number {number} was sent to {message.topic}, not to {topic!r}")
            times[payload] += 1
            if times[payload] == 1:
                # A power cut may take an unsynced message and leave a later one.
                again = not self.flushed(name) and latest > message.sent[0]
                # What is dropped first, and then sent again, is stored at the end.
                again |= name in ("ring", "aged", "kin", "work", "few") or payload in self._purging
                # What one of its streams refuses is not acknowledged, and later messages go on.
                several = len(streams_of(message.topic)) > 1
                again |= several and (self.filled or bool(self.world.sync_failures))
                if newest.get(message.client, -1) > message.number and not (again and len(message.sent) > 1):
                    self.broken(
                        f"{name}: message {message.number} of {message.client} (number {number}) comes after "
                        f"its message {newest[message.client]}"
                    )
                newest[message.client] = max(message.number, newest.get(message.client, -1))
                self._right(name, message)
            elif message.qos == 0 or (len(message.sent) < times[payload] and message.qos == 1):
                self.broken(
                    f"{name}: QoS {message.qos}: {payload!r} is there {times[payload]} times, and was sent "
                    f"{len(message.sent)} times"
                )
            # What a start finds and cannot sync is stored again: the next start may not find it.
            elif (
                message.qos == 2
                and name not in ("ring", "few")
                and all(at <= message.sent[0] for at in (latest, *self._unsynced[name]))
            ):
                self.broken(f"{name}: QoS 2: {payload!r} is there twice")

    def _right(self, name: str, message: Message) -> None:
        """Who sent it could still do so: by the rules of the last reload before it was stored."""
        device = int(message.client.rpartition("-")[2])
        taken = self.world.revoked.get((device, message.topic.partition("/")[0]))
        if taken and message.sent and message.sent[0] > taken + 0.01:
            self.broken(f"{name}: {message.client} sent {message.payload!r} after it had lost the right to")

    def password_changed(self, device: Device) -> None:
        """A reload has changed a password: the old connection must end, and the old password open none."""
        world = self.world
        process = world.process
        if process is None or process.dead or process.calls_left is not None:
            return
        connections = device.connections
        if not world.kernel.run(lambda: device.link is None or not device.connected or process.dead, 1.0):
            self.broken(f"{device.name} is still connected after its password was changed")
        world.kernel.pass_time(0.2)
        if device.connections > connections and not process.dead:
            self.broken(f"{device.name} got in with its old password")

    def _ids(self, rows: list[tuple[int, bytes, bytes]]) -> None:
        times = Counter(payload for _, _, payload in rows)
        known = {one.payload: one for one in self.world.appender.all}
        # A step of the clock just before a power cut passes for the time that the machine was off.
        forgotten = bool(self.world.cuts) and self.clocked
        window = self.world.plan.window - SLACK
        for payload, count in times.items():
            late = payload in known and known[payload].sent[-1] - known[payload].sent[0] > window
            if count > 1 and not (late or forgotten):
                self.broken(f"ids: {payload!r} is there {count} times")
        for number, _, payload in rows:
            if payload not in known:
                self.broken(f"ids: number {number} was never sent: {payload!r}")
        self._forgotten()

    def _forgotten(self) -> None:
        """An id stands for a new message once its window is over; a power cut may take the time of it."""
        excuse = max((*self.world.cuts, *self.world.sync_failures), default=0)
        for one in self.world.appender.all:
            stored: dict[int, float] = {}  # when the last answer came that can have stored it
            for asked, answered, number in one.answers:
                last = stored.setdefault(number, answered)
                slow = self.world.disk.syncing(last, asked)  # limits wait for syncs in the background
                if excuse < last and asked > last + self.world.plan.window + self.late + slow:
                    self.broken(f"ids: {one.payload!r} passed for number {number} after {asked - last:.1f} s")

    def _acknowledged(self, name: str, there: set[bytes]) -> None:
        if name == "ids":
            for one in self.world.appender.all:
                if one.acked is not None and one.payload not in there and not self._excused(name, one.acked):
                    self.broken(
                        f"ids: {one.payload!r} was acknowledged at {one.acked - 1000:.6f}, and is gone"
                    )
            return
        if name in ("ring", "few", *LETTERS):
            return
        if name == "aged":
            self._not_too_old(there)
            return
        sent = set(self.world.kinesis.records) if name == "kin" else set()
        if name == "work":
            sent = self.world.labour.done | self.world.labour.rejected
        if name == "kin":
            sent |= set(self.dead())
        for payload, message in self.answered(name).items():
            if (
                payload not in there
                and payload not in sent
                and not (name == "both" and payload in self._purging)
                and not self.excused(name, message)
            ):
                self.broken(
                    f"{name}: {payload!r} (QoS {message.qos}) was acknowledged at "
                    f"{message.acked - 1000:.6f}, and is gone"
                )

    def excused(self, name: str, message: Message) -> bool:
        """Whether a message that was acknowledged may be gone."""
        return self._excused(name, self._stored_since(message))

    @staticmethod
    def _stored_since(message: Message) -> float:
        """Since when one of its streams may have had a message that was acknowledged.

        One of QoS 2 is not stored again where an earlier attempt has stored it.
        """
        several = message.qos == 2 and len(streams_of(message.topic)) > 1
        assert message.acked is not None
        return message.sent[0] if several else message.acked

    def failed_at(self, *places: str) -> bool:
        """Whether a call for one of these files has ever failed."""
        return any(place in path for place in places for _, path in self.world.troubles)

    @property
    def passes_for_time(self) -> bool:
        """Whether a step of the wall clock may pass for time in which the machine was off.

        It does if the power is cut before the step is noted (`bridge.clock`).
        """
        world = self.world
        bad = bool(world.lies) or self.failed_at("/data/clock")
        return any(
            at < cut and (bad or self.longest_calm(at, cut) < NOTED + world.disk.syncing(at, cut))
            for at in self.steps
            for cut in world.cuts
        )

    def _not_too_old(self, there: set[bytes]) -> None:
        """A message lives as long as its stream says, whatever the wall clock does."""
        world = self.world
        if self.passes_for_time or self.failed_at("/data/clock", "/streams/aged"):
            return
        for device in world.devices:
            for message in device.messages:
                age = world.kernel.now - message.sent[0] if message.sent else 0
                if (
                    message.acked is not None
                    and message.topic.startswith("aged/")
                    and message.payload not in there
                    and age < world.plan.age - SLACK
                    and not self._excused("aged", message.acked)
                ):
                    self.broken(f"aged: {message.payload!r} is gone after {age:.1f} s")

    def dead(self) -> Iterator[bytes]:
        """What was rejected."""
        for payload in self.seen["dead"].values():
            document = json.loads(payload)
            yield base64.b64decode(document.get("payload", ""))

    # -- purges and limits

    def drain_dead(self) -> None:
        """Purge what has been read of the dead letter stream, which takes few messages."""
        upto = max(self.seen["dead"], default=-1) + 1
        if upto:
            self.world.appender.ask("purgeMessageStream", {"name": "dead", "upto": upto}, lambda _: None)

    def purge_both(self) -> None:
        """Purge what the stream is known to have."""
        known = self.seen["both"]
        upto = max(known, default=-1) + 1
        self._purging |= set(known.values())

        def done(answer: dict[str, Any]) -> None:
            if answer.get("status") == 0 and not self.lied:
                self._purged_upto = max(self._purged_upto, upto)

        self.world.appender.ask("purgeMessageStream", {"name": "both", "upto": upto}, done)

    def recreate(self) -> None:
        """Delete the stream fresh, and create it again: no two streams have the same epoch."""
        manager, appender = self.world.service._manager, self.world.appender
        if self._recreating == appender.connections:
            return  # the last one is not answered yet
        self._recreating = appender.connections

        def created(answer: dict[str, Any]) -> None:
            self._recreating = -1
            if answer.get("status") == 0 and not self.lied and not self.world.process.dead:
                epoch = manager.store.streams["fresh"].epoch
                if epoch in self._epochs_of_fresh:
                    self.broken(f"fresh: a new stream has the epoch {epoch}, as one before")
                self._epochs_of_fresh.add(epoch)

        appender.ask("deleteMessageStream", {"name": "fresh"}, lambda _: None)
        appender.ask("createMessageStream", {"definition": {"name": "fresh", "strategyOnFull": 0}}, created)

    def _fill(self) -> int | None:
        """Purge the stream exact, and return how many messages of 100 bytes it takes then.

        None if the service or the connection has ended meanwhile.
        """
        world, taken, answers = self.world, [0], [0]

        def done(answer: dict[str, Any]) -> None:
            answers[0] += 1
            taken[0] += "sequenceNumber" in answer

        process, connections = world.process, world.appender.connections
        world.kernel.run(lambda: world.appender.connected, 10)
        world.appender.ask("purgeMessageStream", {"name": "exact"}, done)
        for _ in range(40):
            payload = base64.b64encode(b"." * 100).decode()
            world.appender.ask("appendMessage", {"name": "exact", "payload": payload}, done)
        world.kernel.run(lambda: answers[0] == 41, 10)
        if answers[0] < 41:
            if process is None or process.dead or world.appender.connections != connections:
                return None
            self.broken(f"only {answers[0]} of 41 requests were answered")
        return taken[0]

    def fresh_room(self) -> None:
        """Note how much the stream has room for while nothing has gone wrong."""
        self._room = self._fill() or 0

    def same_room(self) -> None:
        """The stream exact has room for as much as at the beginning, whatever has failed since."""
        if "exact" not in self.world.service._manager.store.streams:
            return  # it could not be opened
        room = self._fill()
        if room is not None and room != self._room:
            self.broken(f"exact: there was room for {self._room} messages, and is for {room}")

    def guest_got_nothing(self) -> None:
        """Nobody gets what he has no right to."""
        if self.world.guest.allowed:
            self.broken(f"a guest was allowed to: {self.world.guest.allowed[0]}")

    def look_closely(self) -> None:
        """Look at all streams, and at what depends on time."""
        self.look()
        world = self.world
        assert world.process is not None
        if not (world.process.dead or self.filled) and world.kernel.now > world.starts[-1] + 1 + SLACK:
            self._aged()

    def _aged(self) -> None:
        """Nothing is kept beyond its age, or beyond that of the newest (with a time to live, which drops
        whole segments). A power cut may take the time that was noted.
        """
        world = self.world
        found = [(number, self.message(payload)) for number, _, payload in self.now["aged"]]
        sent = [message.sent[-1] for _, message in found if message is not None]
        whole, old = world.plan.age == 60, world.plan.age + self.late
        excuse = max((*world.cuts, *world.sync_failures), default=0)
        for (number, _), at in zip(found, sent, strict=True):
            last = max(sent) if whole else at
            slow = world.disk.syncing(last, world.kernel.now)
            if excuse < at and last < world.kernel.now - old - slow:
                self.broken(f"aged: number {number} is still there, after {world.kernel.now - at:.1f} s")

    # -- the cloud

    def _object(self, key: str, body: bytes) -> None:
        """An object has arrived."""
        name = parse_key(key)
        if name is None:
            return
        self.exports.upload(name.stream, name.epoch, name.first, name.last)
        if self.over:
            return
        rows = rows_of(body)
        numbers = list(rows)
        self.exports.numbers_are_taken(key, rows)
        for number, payload in rows.items():
            self.exports.rows.add((name.stream, number, payload))
            if self.lied:
                continue
            known = self.exported[name.stream]
            if known.setdefault(number, payload) != payload:
                self.broken(
                    f"{name.stream}: number {number} was exported as {known[number]!r} and {payload!r}"
                )
            was = self.seen[name.stream].get(number)
            if was is not None and was != payload:
                self.broken(f"{name.stream}: number {number} is {was!r}, and was exported as {payload!r}")
            self.seen[name.stream][number] = payload
            self.epochs.setdefault(name.stream, name.epoch)
            self.appended["g", name.stream, name.epoch, number] = payload
            if self.message(payload) is None:
                self.broken(f"{name.stream}: number {number} was exported and never sent: {payload!r}")
            elif not self.wanted(name.stream, payload):
                self.broken(f"{name.stream}: number {number} was exported, and is of another topic")
        omitted = absent(name, body)
        if numbers != [number for number in range(name.first, name.last + 1) if number not in omitted]:
            self.broken(f"the object {key} holds {numbers[:3]} to {numbers[-3:]}")
        for number in sorted(omitted) if not self.lied else ():
            self.left_out[StreamId.of(name)].add(number, number)
            found = self.seen[name.stream].get(number)
            if found is not None and self.wanted(name.stream, found):
                self.broken(f"{name.stream}: number {number} ({found!r}) was left out, and is wanted")

    def wanted(self, stream: str, payload: bytes) -> bool:
        """Whether the export of a stream to S3 wants a message."""
        topics, message = self.world.plan.wanted.get(stream), self.message(payload)
        return topics is None or message is None or any(matches(one, message.topic) for one in topics)

    def _id(self, stream: str) -> StreamId:
        return StreamId("g", stream, self.epochs[stream])

    # -- the end

    def at_rest(self) -> None:
        """All faults have ended: wait until nothing is left to do, and look at everything."""
        from .world import QUIET

        world = self.world
        if self.lied:  # a stream may need `streambridge repair` now
            world.kernel.pass_time(3.0)
            world.ensure()
            self.look()
            self.exports.nothing_passed_in_vain()
            world.tell("the service is stopped")
            world._do_stop()
            return
        world.labour.ends = True
        self.hands.at_rest()
        for _ in range(60):
            if world.kernel.run(self._clients_are_done, QUIET / 12):
                break
            self.look()
            self.drain_dead()  # while it is full, so is the stream kin
        else:
            waiting = [
                f"{client.name}: {len(client.queue)} to send, {len(client.flying)} not acknowledged, "
                f"connected: {client.connected}"
                for client in world.devices
                if not client.idle
            ]
            if not world.appender.idle:
                waiting.append(f"appender: {len(world.appender.open)}: {world.appender.refusals[-1:]}")
            self.broken(f"a client is not served: {waiting}")
        self.look()
        for _ in range(60):
            if world.kernel.run(self.exports_are_done, 10):
                break
            self.look()
            self.drain_dead()
        else:
            self.broken(f"exports do not catch up: {self._behind()}")
        self.look()
        for _ in range(12):
            if world.kernel.run(lambda: not world.labour.left(), 5):
                break
            self.look()  # what was rejected has a dead letter
        else:
            self.broken(f"work: no worker has acknowledged {world.labour.left()[0]!r}")
        world.kernel.pass_time(2.0)
        self.guest_got_nothing()
        self.sessions.at_rest()
        self.exports.at_rest()
        self.same_room()
        self.look()
        self._aged()
        self.whole()
        self.lake.at_rest()
        if world.plan.replaced:
            self.lake.replace_gateway()
        world.tell("the service is stopped")
        world._do_stop()
        self._verify()
        self.whole()

    def _clients_are_done(self) -> bool:
        world = self.world
        world.ensure()
        return all(device.idle for device in world.devices) and world.appender.idle

    def _behind(self) -> dict[str, Any]:
        manager, exports = self.world.service._manager, self.world.service._exports
        found = {}
        for name in (*EXPORTED, "kin", "odd"):
            upto = exports.exported_upto(name)
            following = manager.store.streams[name].log.next
            if upto is None or upto < following:
                found[name] = (upto, following, [s.error_message for s in exports.statuses(name)])
        return found

    def exports_are_done(self) -> bool:
        self.world.ensure()
        return not self._behind()

    def _verify(self) -> None:
        """`streambridge verify` finds nothing wrong; without a cut or a failed sync nothing ever was."""
        world = self.world
        for found in verify(world.root / "data"):
            # An index is not synced: it is rebuilt when its segment is needed.
            wrong = [one for one in found.problems if not (world.cuts and one.path.endswith(".idx"))]
            if wrong:
                self.broken(f"{found.name}: verify finds {wrong}")
            lost = [part for part in found.lost if found.name != "memory"]
            if lost and not (world.cuts or world.sync_failures):
                self.broken(f"{found.name}: recorded as lost, although no power was cut: {lost}")
