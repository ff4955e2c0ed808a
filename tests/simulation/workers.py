"""Workers that share the messages of the stream work, through its consumer pool, and what they are promised.

* A message that was delivered to a worker is delivered to nobody before its deadline, unless that worker
  has given it back; one whose acknowledgement was answered never again.
* A number stands for one message. Its deliveries are counted: each that was seen, and at most those more
  whose answer was lost on the way since the last one. One that the gateway could not save does not count,
  unless the gateway ends before it can: what the disk has refused to sync may be there then.
* Once all faults have ended, every message that a device got acknowledged was acknowledged by a worker.
"""

from __future__ import annotations

import base64
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
    done: float | None = None  # when an acknowledgement was answered
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

    def _say(self, verdict: str, number: int) -> None:
        if not self.connected:
            return
        if verdict == "nack":
            self._truth.given_back(self.name, number)
        else:
            self._truth.acknowledging(number)

        def done(answer: dict[str, Any]) -> None:
            if answer.get("status") == 0 and verdict == "ack":
                self._truth.acknowledged(number)

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
        self.unanswered = 0  # fetches
        self.unsaved: list[float] = []  # when a fetch was refused
        self._given_back: dict[tuple[str, int], float] = {}  # when, by worker and number
        self.ends = False  # from now on everything is acknowledged at once

    @property
    def _unsure(self) -> bool:
        """Whether a step of the clock passes for time in which the machine was off."""
        return bool(self.world.cuts) and self.checks.clocked

    def delivered(self, worker: str, number: int, payload: bytes, count: int, asked: float) -> None:
        """A fetch was answered."""
        checks, now = self.checks, self.world.kernel.now
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
            if count > 1 + self._unseen() + self._under_way():
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
        latest = self.latest[number]
        self._given_back[worker, number] = self.world.kernel.now
        if latest.worker == worker or self.world.starts[-1] > latest.asked:
            self.latest[number].given_back = True

    def acknowledging(self, number: int) -> None:
        """An acknowledgement is about to be sent; it may count without an answer."""
        self.done.add(self.latest[number].payload)

    def acknowledged(self, number: int) -> None:
        """An acknowledgement was answered."""
        latest = self.latest[number]
        latest.done = latest.done or self.world.kernel.now

    def left(self) -> list[bytes]:
        """What is acknowledged to devices, and was not acknowledged by a worker."""
        checks = self.checks
        return [
            payload
            for payload, message in checks.answered("work").items()
            if payload not in self.done and not checks.excused("work", message)
        ]
