"""Workers that share the messages of the stream work, through its consumer pool, and what they are promised.

* A message that was delivered to a worker is delivered to nobody before its deadline, unless that worker
  has given it back; one whose acknowledgement was answered never again.
* A number stands for one message. Its deliveries are counted: each that was seen, and at most those more
  whose answer was lost on the way since the last one. One that the gateway could not save does not count,
  unless the gateway ends before it can: what the disk has refused to sync may be there then.
* An acknowledgement that comes before the deadline of the last delivery counts.
* A message is rejected only if a worker asks for that, or if it was delivered too often; then it has a dead
  letter, and is delivered to nobody.
* Once all faults have ended, every message that a device got acknowledged was acknowledged by a worker, or
  rejected.
"""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from .clients import HERE, PUBLISH, Packet
from .kernel import Kernel
from .requests import Asker
from .settings import DEADLINE

if TYPE_CHECKING:
    from .checks import Checks
    from .world import World

POOL = {"name": "work", "consumer": "pool"}
UNSURE = 0.05  # s


@dataclass
class Delivered:
    """The last delivery of a number that a worker has seen."""

    payload: bytes
    worker: str
    asked: float
    count: int
    given_back: bool = False
    done: float | None = None  # when an acknowledgement, or a termination, was answered
    more: int = 0  # deliveries until then that nobody has seen


class Worker(Asker):
    """Fetches, and acknowledges most of it, some too late; some it gives back, or forgets."""

    def __init__(self, kernel: Kernel, name: str, random: Random, truth: ConsumerChecks, *, v5: bool) -> None:
        super().__init__(kernel, name, random, v5=v5, clean=True, peer=HERE)
        self._truth = truth
        self._turn = 0  # of fetches: one after the other, also over connections
        self.fetching = False

    def ready(self) -> None:
        super().ready()
        self._turn += 1
        self._fetch(self._turn)

    def _gone(self) -> None:
        super()._gone()
        self._truth.unanswered += self.fetching
        self.fetching = False

    def _fetch(self, turn: int) -> None:
        if not self.connected or turn != self._turn:
            return
        asked, most = self.kernel.now, self._random.choice((1, 3, 20))
        wait = self._random.choice((0, 100, 1000))
        self.fetching = True

        def done(answer: dict[str, Any]) -> None:
            self.fetching = False
            self.served()
            if answer.get("status"):
                self._truth.unsaved.append(self.kernel.now)
            for row in answer.get("messages", ()):
                number, payload = row["sequenceNumber"], base64.b64decode(row.get("payload", ""))
                self._truth.delivered(self.name, number, payload, row["deliveries"], asked)
                self._work(number)
            self.kernel.later(0.01 + self._random.random() * 0.2, None, self._fetch, turn)

        self.ask("fetchMessages", POOL | {"maxMessageCount": most, "timeoutMillis": wait}, done)

    def _work(self, number: int) -> None:
        """A message is worked on: what becomes of it is drawn."""
        drawn = self._random.random() if not self._truth.ends else 0.0
        late = self._random.random() * 1.5 * DEADLINE
        if drawn < 0.6:
            self._say("ack", number)
        elif drawn < 0.75:
            self.kernel.later(late, None, self._say, "ack", number)
        elif drawn < 0.85:
            self.kernel.later(late, None, self._say, "nack", number)
        elif drawn < 0.9 and self._truth.rejects:
            self.kernel.later(late, None, self._say, "terminate", number)

    def _say(self, verdict: str, number: int) -> None:
        if not self.connected:
            return
        if verdict == "nack":
            self._truth.given_back(self.name, number)
        else:
            self._truth.ending(verdict, number)

        asked = self.kernel.now

        def done(answer: dict[str, Any]) -> None:
            if answer.get("status") == 0 and verdict != "nack":
                self._truth.ended(number, asked, applied=number not in answer["notPending"], verdict=verdict)

        self.ask("ackMessages", POOL | {verdict: [number]}, done)

    def handle(self, packet: Packet) -> None:
        if packet.kind == PUBLISH:
            self.answered(packet)


class ConsumerChecks:
    """The truth about the consumer of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.checks: Checks  # set when it is there
        self.latest: dict[int, Delivered] = {}  # by number
        self.done: set[bytes] = set()  # payloads whose acknowledgement was sent
        self._payloads: dict[int, bytes] = {}  # of all that was delivered, by number
        self.rejected: set[bytes] = set()  # payloads that have a dead letter
        self.rejects = world.plan.deliveries > 0
        self._endings: Counter[int] = Counter()  # acknowledgements and terminations that were sent
        self._terminated: set[int] = set()
        self.since = 0.0  # when the consumer was started over; what was asked before does not count
        self.unanswered = 0  # fetches
        # Answers, by number, to fetches from before that: the former consumer has made them, or the new one.
        self._earlier: Counter[int] = Counter()
        self.unsaved: list[float] = []  # when a fetch was refused
        self._given_back: dict[tuple[str, int], float] = {}  # when, by worker and number
        self.ends = False  # from now on everything is acknowledged at once

    @property
    def _unsure(self) -> bool:
        """Whether time passes twice for a lease, after a power cut.

        A step of the clock may pass for time in which the machine was off. If a boot could not write the file
        of the clock, the time before it may count only once the clock is synchronised again.
        """
        return bool(self.world.cuts) and (self.checks.clocked or self.checks.failed_at("/data/clock"))

    def delivered(self, worker: str, number: int, payload: bytes, count: int, asked: float) -> None:
        """A fetch was answered."""
        checks, now = self.checks, self.world.kernel.now
        self._payloads[number] = payload
        if asked < self.since:
            self._earlier[number] += 1
            return
        before = self.latest.get(number)
        # It may have given it back for an earlier delivery, while the answer of this one was on its way.
        back = self._given_back.get((worker, number), -1.0) >= asked
        if before is not None and (back or asked < before.asked) and count < before.count:
            return  # the answer to who has got it since was faster
        self.latest[number] = Delivered(payload, worker, asked, count, back, more=self._unseen())
        if checks.lied or checks.over:
            return
        if checks.message(payload) is None:
            checks.broken(f"work: a worker got number {number}, which was never sent: {payload!r}")
        if before is None:
            if count > 1 + self._earlier[number] + self._unseen() + self._under_way():
                checks.broken(f"work: number {number} comes for the first time, and says it is time {count}")
            return
        if before.payload != payload:
            checks.broken(f"work: number {number} was {before.payload!r} and is {payload!r}")
        if before.done is not None and before.done < asked:
            checks.broken(f"work: number {number} is delivered again after it was acknowledged")
        if not (before.given_back or self._unsure) and now < before.asked + DEADLINE - UNSURE:
            checks.broken(
                f"work: number {number} is delivered to {worker}, and {before.worker} has it since "
                f"{now - before.asked:.3f} s"
            )
        if not before.count < count <= before.count + 1 + self._unseen() - before.more + self._under_way():
            checks.broken(f"work: the delivery of number {number} after number {before.count} is {count}")

    def _under_way(self) -> int:
        """How many fetches have no answer yet: each may have a delivery of its own."""
        return sum(worker.fetching for worker in self.world.workers)

    def _unseen(self) -> int:
        """How many deliveries of one message may count that no worker has seen."""
        return self.unanswered + sum(at < self.world.starts[-1] for at in self.unsaved)

    def given_back(self, worker: str, number: int) -> None:
        """A worker is about to give a message back: who has it can, and after a start anybody."""
        latest = self.latest.get(number)
        self._given_back[worker, number] = self.world.kernel.now
        if latest is None:
            return
        if latest.worker == worker or self.world.starts[-1] > latest.asked:
            self.latest[number].given_back = True

    def ending(self, verdict: str, number: int) -> None:
        """An acknowledgement or a termination is about to be sent; it may count without an answer."""
        self._endings[number] += 1
        if verdict == "terminate":
            self._terminated.add(number)
        else:
            self.done.add(self._payloads[number])

    def ended(self, number: int, asked: float, *, applied: bool, verdict: str) -> None:
        """An acknowledgement or a termination was answered; `applied`: it was the one that counted."""
        latest, checks, now = self.latest.get(number), self.checks, self.world.kernel.now
        if latest is None or asked < self.since:
            return
        if applied or verdict == "ack":
            latest.done = latest.done or now
        held = not latest.given_back and now < latest.asked + DEADLINE - UNSURE
        alone = self._endings[number] == 1 and (checks.flushed("work") or not checks.losses)
        if verdict == "ack" and not applied and held and alone and not (checks.lied or self._unsure):
            checks.broken(f"work: number {number} was acknowledged in time, and that did not count")

    def dead_letter(self, number: int, payload: bytes) -> None:
        """A message has a dead letter."""
        self.rejected.add(payload)
        latest = self.latest.get(number)
        seen, more = (latest.count, latest.more) if latest is not None else (0, 0)
        most = seen + self._unseen() - more + self._under_way()
        if number not in self._terminated and most < self.world.plan.deliveries and not self.since:
            self.checks.broken(f"work: number {number} was rejected after {seen} deliveries")

    def start_over(self) -> None:
        """A reload moves the start of the consumer: nothing counts that was before."""
        world = self.world
        process = world.process
        stream = world.service._manager.store.streams.get("work") if process and not process.dead else None
        if stream is None or stream.next_sequence < 4 or process.calls_left is not None or self.checks.lied:
            return
        self.done |= {payload for number, payload in self.checks.rows("work").items() if number < 1}
        if process.dead:
            return
        start = world.export_starts["work"] = 1 - world.export_starts.get("work", 0)
        self.since = float("inf")
        world.reload()
        moved = world.kernel.run(lambda: process.dead or self.checks.exports.starts_at("work", start), 1.0)
        if moved and not process.dead:  # else nothing is known any more
            self.since = world.kernel.now
            self.latest.clear()
            self._endings.clear()
            self._earlier.clear()

    def left(self) -> list[bytes]:
        """What is acknowledged to devices, and was not acknowledged by a worker."""
        checks = self.checks
        return [
            payload
            for payload, message in checks.answered("work").items()
            if payload not in self.done | self.rejected and not checks.excused("work", message)
        ]
