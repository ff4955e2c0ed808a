"""Many exports, and old ones: a gateway with hundreds of exports to S3, and one that runs for a leap year.

    python -m tests.simulation --large [--seed S]

As in a world, the machine is simulated, and the store, the supervisor, its worker and the exporter of S3 are
the product's own. There are no front ends, whose timers would make a year long: messages are appended by the
operation. In a year, the supervision's heart beats once an hour.

`Many`: whatever fails, each message that was acknowledged is in one object, under its number; and while
nothing fails, no export waits longer than all of them together take.

`Year`: no message waits longer for its object than `time_hint_millis`, also over restarts of the gateway and
its worker, reloads and steps of the wall clock, and no object comes early. At a boot at which the time
without power is not known, that time does not count, nor what has passed since the last anchor of the clock.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import time
from bisect import bisect_right
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bridge.export.settings import ExportSettings
from bridge.export.supervisor import ExportSupervisor, highest_exported
from bridge.export.wire import Tuning
from bridge.objectkeys import parse_key
from bridge.operations.manager import StreamManager
from bridge.plugin.aws import AwsSettings
from bridge.streams.store import StreamStore

from . import boundary
from . import loop as loops
from .boundary import MACHINE
from .plan import draw
from .world import BrokenError, World

HOUR, DAY = 3600.0, 86_400.0
LEAP_YEAR = datetime(2028, 1, 1, tzinfo=UTC).timestamp()
LEAP_DAY = "/date=2028-02-29/"
REQUESTS = 0.12  # s that the requests of one batch take, at most
SLACK = 3.0  # s
LOOK = 600.0  # s between two looks of the store at its streams and at the clock, at most


class Stored(NamedTuple):
    """A message that was acknowledged, and when."""

    stream: str
    number: int
    payload: bytes
    at: float


class Gateway(World):
    """Streams with one export each."""

    def __init__(
        self, seed: int, place: Path, streams: dict[str, dict[str, Any]], beat: float, threads: int
    ) -> None:
        """`streams`: the settings of each one's export. `beat` in s, of the supervision and of syncs."""
        plan = replace(draw(seed, 0, 0), ntp=True, cuts=True, lying=False, restored=False)
        super().__init__(plan, place)
        self.streams, self._beat, self._threads = streams, beat, threads
        self.stored: list[Stored] = []
        self.objects: dict[str, list[tuple[int, bytes]]] = {}  # by key: numbers and payloads
        self.arrived: dict[tuple[str, int], float] = {}  # by stream and number: when
        self._sent = 0
        self._open = 0
        self._keep = type(self.bucket).store
        self.bucket.store = self._noted  # type: ignore[method-assign]

    @property
    def acknowledged(self) -> int:
        return len(self.stored)

    # -- the gateway

    def start(self) -> None:
        """Start it, and wait until it has all its streams."""
        self.starts.append(self.kernel.now)
        self._lines.clear()
        process = self.process = self.kernel.spawn("gateway")
        process.at_exit.append(lambda: boundary.close_all(process))
        process.loop = loops.Loop(process)
        ready: list[BaseException | None] = []
        self._open = 0

        def main() -> None:
            task = process.loop.create_task(self._open_all())
            task.add_done_callback(lambda done: ready.append(done.exception()))

        self.kernel.later(0.0, process, main)
        self.kernel.run(lambda: bool(ready) or process.dead, 600)
        if ready and ready[0] is not None:
            raise ready[0]
        if not process.dead:
            self.tell("the gateway runs")

    async def _open_all(self) -> None:
        data_dir = self.root / "data"
        store = StreamStore(
            data_dir,
            self.place / "memory",
            on_event=lambda stream, what: self.tell(f"{stream}: {what}"),
            floor=lambda name, epoch: highest_exported(data_dir, name, epoch) + 1,
        )
        exports = ExportSupervisor(
            data_dir,
            gateway="g",
            export=ExportSettings(plugin_dirs=[], threads=self._threads),
            aws=AwsSettings(),
            append_status=self._refuse,
            clock=store.clock,
            tuning=Tuning(beat=self._beat, silence=6 * self._beat + 30),  # idle, it beats a fifth as often
        )
        from . import product

        manager = self.manager = StreamManager(store, product.REGISTRY, exports)
        await exports.start()
        for name, settings in self.streams.items():
            if name not in store.streams:
                manager.create(self._definition(name, settings))
        self._tasks = [
            asyncio.ensure_future(store.keep(min(self._beat, LOOK))),
            asyncio.ensure_future(self._refresh(manager)),
        ]

    async def _refresh(self, manager: StreamManager) -> None:
        while True:
            await asyncio.sleep(self._beat)
            await manager.refresh()

    async def _refuse(self, name: str, payload: bytes) -> None:
        raise OSError(f"there is no stream {name}")

    @staticmethod
    def _definition(name: str, settings: dict[str, Any]) -> dict[str, Any]:
        export = {"identifier": "lake", "bucket": "landing", "reportIntervalMillis": 3_600_000} | settings
        return {"name": name, "strategyOnFull": 0, "flushOnWrite": True, "exportDefinition": {"s3": [export]}}

    def _inside(self, work: Any) -> None:
        process = self.process
        assert process is not None
        with self.kernel.inside(process):
            process.loop.create_task(work)
        process.loop.kick()

    def append(self, name: str, number: int) -> None:
        """Append some messages in one request, if the gateway runs."""
        assert self.process is not None
        if self.process.dead:
            return
        payloads = [f"{name} {self._sent + n} ".encode() + b"." * 40 for n in range(number)]
        self._sent += number
        self._open += 1
        self._inside(self._append(name, payloads))

    async def _append(self, name: str, payloads: list[bytes]) -> None:
        try:
            numbers = await self.manager.append_all(name, payloads)
            clock = self.manager.store.clock
            if clock.watch(active=True):  # what a service does within a second
                clock.try_save()
            now = self.kernel.now
            self.stored += [Stored(name, n, one, now) for n, one in zip(numbers, payloads, strict=True)]
        finally:
            self._open -= 1

    def update(self, name: str, **changes: Any) -> None:
        """Change the settings of a stream's export."""
        assert self.process is not None
        self.streams[name] = self.streams[name] | changes
        if not self.process.dead:
            with self.kernel.inside(self.process):
                self.manager.update(self._definition(name, self.streams[name]))
            self.process.loop.kick()

    def ends(self, what: str, seconds: float) -> None:
        """The service is killed, or the power is cut, and it is started after so many seconds."""
        assert self.process is not None
        self.tell(f"{what}, for {seconds:.0f} s")
        self._pending_cut = what == "cut"
        self.kernel.kill(self.process, -9)
        self._died()
        self.kernel.pass_time(seconds)
        self.ensure()

    # -- the cloud

    def _noted(self, key: str, body: bytes, what: str, metadata: Any = None) -> str:
        name = parse_key(key)
        if name is not None:
            rows = [json.loads(line) for line in gzip.decompress(body).splitlines()]
            content = [(row["sequence_number"], base64.b64decode(row["payload"])) for row in rows]
            if self.objects.setdefault(key, content) != content:
                self.checks.broken(f"the object {key} was overwritten with other rows")
            for number, _ in content:
                self.arrived.setdefault((name.stream, number), self.kernel.now)
        return self._keep(self.bucket, key, body, what, metadata)

    def waits(self) -> int:
        """How many messages that were acknowledged are in no object."""
        return sum((one.stream, one.number) not in self.arrived for one in self.stored)

    def all_arrive(self, within: float) -> None:
        """What was acknowledged is in one object, under its number."""
        self.features.repair()
        self._do_faults(0.0)
        self.ensure()
        if not self.kernel.run(lambda: not self._open and not self.waits(), within):
            raise BrokenError(f"{self.waits()} messages are in no object after {within} s")
        rows: dict[tuple[str, int], bytes] = {}
        for key, content in self.objects.items():
            name = parse_key(key)
            assert name is not None
            if [number for number, _ in content] != list(range(name.first, name.last + 1)):
                raise BrokenError(f"the object {key} does not hold the numbers of its name")
            for number, payload in content:
                if (name.stream, number) in rows:
                    raise BrokenError(f"{name.stream}: number {number} is in two objects, also in {key}")
                rows[name.stream, number] = payload
        for one in self.stored:
            if rows[one.stream, one.number] != one.payload:
                raise BrokenError(f"{one.stream}: number {one.number} is another message in its object")
        self.checks.whole()

    def run(self) -> None:
        raise NotImplementedError


class Many(Gateway):
    """Hundreds of exports, whose gateway, worker and link fail."""

    NUMBER, THREADS, ROUNDS = 300, 4, 12

    def __init__(self, seed: int, place: Path) -> None:
        hints = (1, 200, 1000)
        streams = {f"s{n}": {"timeHintMillis": hints[n % 3]} for n in range(self.NUMBER)}
        super().__init__(seed, place, streams, 1.0, self.THREADS)

    def run(self) -> None:
        self.start()
        self._nobody_waits_long()
        for _ in range(self.ROUNDS):
            self._all_append()
            self._trouble()
            self.kernel.pass_time(self.random.random() * 4)
            self.ensure()
            if self.random.random() < 0.4:
                self.features.repair()
                self._do_faults(0.0)
        self.all_arrive(900)
        self._nobody_waits_long()

    def _all_append(self) -> None:
        for name in self.streams:
            self.append(name, self.random.choice((1, 1, 5)))

    def _nobody_waits_long(self) -> None:
        self.kernel.pass_time(5.0)
        since = self.kernel.now
        self._all_append()
        most = 1.0 + self.NUMBER * REQUESTS / self.THREADS + SLACK
        self.all_arrive(most + 60)
        longest = max(self.arrived[one.stream, one.number] - one.at for one in self.stored if one.at >= since)
        if longest > most:
            raise BrokenError(
                f"a message has waited {longest:.1f} s for its object, and {most:.1f} s are enough"
            )

    def _trouble(self) -> None:
        random = self.random
        match random.choice(
            ("kill", "cut", "worker", "worker", "link", "breaks", "faults", "update", "nothing")
        ):
            case "kill" | "cut" as what:
                self.kernel.pass_time(random.random() * random.choice((0.05, 1.0)))
                self.ends(what, 0.5)
            case "worker":
                self._do_worker(random.random() * 2, "s later")
            case "link":
                self._do_link(True)
            case "breaks":
                self._do_breaks(random.randrange(300), "s3")
            case "faults":
                self._do_faults(0.02)
            case "update":
                for name in random.sample(list(self.streams), 100):
                    self.update(
                        name, timeHintMillis=random.choice((1, 200, 1000)), priority=random.randint(1, 10)
                    )


class Year(Gateway):
    """A few exports that collect messages for long, for a leap year."""

    HINTS = (1.0, 300.0, HOUR, DAY)  # s
    BACKOFF = 300.0  # s between two attempts, at most
    RESTART = 5.0  # s until the next worker exports
    ANCHOR = 600.0 + LOOK  # s that a power cut may take from the age of a message: see `bridge.clock`

    def __init__(self, seed: int, place: Path, *, steps: bool) -> None:
        """`steps`: whether the wall clock is stepped, and begins in 1970 at some boots, until NTP sets it."""
        self.steps = steps
        streams = {f"h{n}": {"timeHintMillis": int(hint * 1000)} for n, hint in enumerate(self.HINTS)}
        super().__init__(seed, place, streams, HOUR, 2)
        self.plan = replace(self.plan, ntp=not steps)
        self.troubles_of_link: list[float] = []  # when the link was up again
        self.worker_ends: list[float] = []
        self.corrected: list[float] = []  # when NTP has set the clock
        self.uncounted: list[tuple[float, float]] = []  # from and to, at boots

    def _set_clock(self) -> None:
        """A boot: NTP is there from the start, or later."""
        if self.steps and self.kernel.now and self.random.random() < 0.5:
            self._unsynchronised(-self.kernel.now)
        else:
            MACHINE.wall, MACHINE.synchronised = LEAP_YEAR, True

    def _unsynchronised(self, wall: float) -> None:
        MACHINE.wall, MACHINE.synchronised = wall, False

    def _do_clock(self, seconds: float) -> None:
        """Somebody sets the clock, so that it no longer is synchronised."""
        self._unsynchronised(max(MACHINE.wall + seconds, -self.kernel.now))

    def run(self) -> None:
        os.environ["TZ"] = "Europe/Berlin"  # with clock changes: nothing may depend on it
        time.tzset()
        self.start()
        began, random = self.kernel.now, self.random
        while self.kernel.now < began + 366 * DAY:
            self.append(random.choice(list(self.streams)), random.choice((1, 3)))
            self.kernel.pass_time(random.expovariate(1 / (6 * HOUR)))
            if random.random() < 0.05:
                self._restarts()
            if random.random() < 0.02:
                self._do_link(True)
                self.kernel.pass_time(random.random() * 12 * HOUR)
                self._do_link(False)
                self.troubles_of_link.append(self.kernel.now)
            if self.steps and random.random() < 0.1:
                self._sets_clock()
        self.all_arrive(2 * DAY)
        if not any(LEAP_DAY in key for key in self.objects) and not self.steps:
            raise BrokenError("no object has the leap day in its name")
        self._nothing_is_late()
        self._nothing_is_early()

    def _restarts(self) -> None:
        random = self.random
        match random.choice(("kill", "cut", "worker", "worker", "update")):
            case "kill" | "cut" as what:
                since, known = self.kernel.now, MACHINE.synchronised and not self._was_wrong_lately()
                self.ends(what, random.random() * random.choice((10, 2 * HOUR)))
                if what == "cut" and not (known and MACHINE.synchronised):
                    self.uncounted.append((since, self.kernel.now))
            case "worker":
                self._do_worker(0.0, "s later")
                self.worker_ends.append(self.kernel.now)
            case "update":
                self.update(
                    random.choice(list(self.streams)), reportIntervalMillis=random.randint(1, 7_200_000)
                )

    def _was_wrong_lately(self) -> bool:
        """Whether the newest anchor may be of a time at which the clock was not synchronised."""
        return bool(self.corrected) and self.kernel.now < self.corrected[-1] + self.ANCHOR

    def _sets_clock(self) -> None:
        if MACHINE.synchronised or self.random.random() < 0.3:
            self._do_clock(self.random.choice((-1, 1)) * self.random.choice((0.5, HOUR, HOUR, 400 * DAY)))
        else:
            self.corrected.append(self.kernel.now)
            MACHINE.wall, MACHINE.synchronised = LEAP_YEAR, True

    def _hint(self, stream: str) -> float:
        return self.HINTS[int(stream[1:])]

    def _due(self, one: Stored) -> float:
        """When a message is old enough, at the latest."""
        due = one.at + self._hint(one.stream)
        for since, until in self.uncounted:
            if one.at < until and since < due:
                due += until - since + min(self.ANCHOR, max(since - one.at, 0.0))
        return due

    def _nothing_is_late(self) -> None:
        for one in self.stored:
            at, due = self.arrived[one.stream, one.number], self._due(one)
            for again, wait in (
                (self.starts, 0.0),
                (self.worker_ends, self.RESTART),
                (self.troubles_of_link, self.BACKOFF),
            ):
                if last := bisect_right(
                    again, at
                ):  # an export waits on for a moment when the link is up again
                    due = max(due, again[last - 1] + wait)
            if at > due + SLACK:
                raise BrokenError(
                    f"{one.stream}: number {one.number} was acknowledged at {one.at:.0f}, and uploaded at "
                    f"{at:.0f}, {at - due:.0f} s after it was due"
                )

    def _nothing_is_early(self) -> None:
        first = {(name.stream, name.first) for key in self.objects if (name := parse_key(key)) is not None}
        for one in self.stored:
            at = self.arrived[one.stream, one.number]
            if (one.stream, one.number) in first and at < one.at + self._hint(one.stream) - SLACK:
                raise BrokenError(
                    f"{one.stream}: number {one.number} was acknowledged at {one.at:.0f}, and came early, at "
                    f"{at:.0f}"
                )


def run(seed: int, place: Path) -> int:
    """Run all of them; returns the exit status."""
    from . import runs

    made = {
        "hundreds of exports": lambda: Many(seed, Path()),
        "a year": lambda: Year(seed, Path(), steps=False),
        "a year of clock steps": lambda: Year(seed + 1, Path(), steps=True),
    }
    runs.ready(place)
    broken = 0
    for what, make in made.items():
        began = time.perf_counter()
        result = runs.apart(make)
        took = time.perf_counter() - began
        said = result.error or f"{result.acknowledged} messages, {result.crashes} crashes"
        print(f"{what}, seed {seed}: {said}, {took:.1f} s", flush=True)
        if result.error:
            print(result.trace)
            broken += 1
    return 1 if broken else 0
