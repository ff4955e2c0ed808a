"""A world: one gateway, its clients, its cloud; what a plan says happens to them.

The service is the product's own, started on a configuration file and a data directory. A world ends
with its faults healed: every client must get its acknowledgements, and every export must catch up; then
everything is checked once more.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from bridge import books

from . import boundary, settings
from . import kernel as kernels
from . import loop as loops
from .boundary import MACHINE
from .clients import ADDRESS, POISON, Device, Subscriber
from .disk import Disk
from .kernel import Kernel, Process
from .plan import DEVICES, Plan
from .steps import Step

QUIET = 120.0  # s of simulated time in which everything must settle
TERM, HUP = 15, 1
SESSION = 60  # s that the subscriber's session outlives its connection, with MQTT 5
EXPIRY = 10  # s, of some messages
POISONED = {"kin": 0.03, "odd": 0.3}  # how many messages Kinesis rejects


class BrokenError(AssertionError):
    """A promise was broken."""


def prepare() -> None:
    """Import everything now, and not in the process of each world."""
    MACHINE.entropy = Random(0)
    import pandas  # noqa: F401 - pyarrow imports it at its first use, a second of each world

    from . import checks, cloud, features, iceberg, product, requests, table  # noqa: F401

    iceberg.install()


class World:
    """What one plan becomes."""

    def __init__(self, plan: Plan, place: Path) -> None:
        from . import checks, cloud, features, iceberg, product, requests, shares, table, workers

        self.plan, self.place = plan, place
        seed = plan.seed
        self.random = Random(f"world {seed}")
        self.kernel = Kernel(seed)
        kernels.use(self.kernel)
        self.kernel.look = self._check_books
        self.story: list[str] = []
        self.crashes = 0
        self._lines: Counter[str] = Counter()  # of the log since the last start, by message
        loops.NETWORK.clear()
        loops.Socket.by_number.clear()
        product.reset()
        MACHINE.entropy = Random(f"entropy {seed}")
        MACHINE.boot, MACHINE.missing = "boot 0", ""
        self._set_clock()
        MACHINE.log = self._log
        MACHINE.client = self._client
        self.root = place / "disk"
        if self.root.exists():
            shutil.rmtree(self.root)
        self.disk = MACHINE.disk = Disk(self.root, Random(f"disk {seed}"))
        self.disk.strict = plan.strict
        self.disk.on_failure = lambda: self.sync_failures.append(self.kernel.now)
        self.disk.on_trouble = lambda path: self.troubles.append((self.kernel.now, path))
        self.bucket = cloud.Bucket(Random(f"bucket {seed}"), lambda: boundary.wall_ns() / 1e9)
        self.lake = cloud.Bucket(Random(f"lake {seed}"), lambda: boundary.wall_ns() / 1e9, name="lake")
        self.table = iceberg.Iceberg(self.lake) if plan.iceberg else table.Table(self.lake)
        self.kinesis = product.Kinesis(self, Random(f"kinesis {seed}"))
        self.process: Process | None = None
        self.service: Any = None
        self.cuts: list[float] = []  # when
        self.kills: list[float] = []
        self.starts: list[float] = []
        self.stops: list[float] = []
        self.sync_failures: list[float] = []
        self.troubles: list[tuple[float, str]] = []  # when a call of the disk has failed, and for which path
        self.lies: list[tuple[float, float]] = []  # from and to
        self.full: list[tuple[float, float]] = []  # the disk, from and to
        self.backup: Any = None
        self.restored = False
        self.revoked: dict[tuple[int, str], float] = {}
        self.revoked_once = False
        self.refused = any(step.do == "refuse" for step in plan.steps)
        self.passwords = [0] * DEVICES
        self.ring = plan.ring
        self.linger = plan.linger
        self.newest_first = plan.newest_first
        self.kin_size = 20 * settings.KIN_SEGMENT
        self.export_starts: dict[str, int] = {}  # by stream, where a reload has put the start of its export
        self._pending_cut = False
        self._breaking, self._requests_left = "", 0  # the service of the request at which the link breaks
        self.devices = [
            Device(self.kernel, f"device-{n}", Random(f"device {n} {seed}"), v5=plan.v5[n], user=f"user{n}",
                   password=f"word{n}-0")
            for n in range(DEVICES)
        ]  # fmt: skip
        for n, device in enumerate(self.devices):
            device.low_ids = n == plan.frugal
        self.subscriber = Subscriber(
            self.kernel, "subscriber", Random(f"subscriber {seed}"), [("live/1/#", 1), ("live/2/#", 2)],
            v5=bool(seed % 2), expiry=SESSION,
        )  # fmt: skip
        self.slow = Subscriber(
            self.kernel, "slow", Random(f"slow {seed}"), [("flood/#", 1)], v5=bool(seed % 3), expiry=65_536
        )
        self.appender = requests.Appender(self.kernel, Random(f"appender {seed}"))
        self.guest = requests.Guest(self.kernel, Random(f"guest {seed}"))
        self.members = shares.members(self, seed)
        self.crowd: list[Subscriber] = []  # more members, in some worlds
        self.labour = workers.ConsumerChecks(self)
        self.workers = [
            workers.Worker(self.kernel, f"worker-{n}", Random(f"worker {n} {seed}"), self.labour, v5=n == 0)
            for n in range(2)
        ]
        self.clients = [*self.devices, self.subscriber, self.slow, self.appender, self.guest,
                        *self.members, *self.workers]  # fmt: skip
        self.cloud_random = Random(f"cloud {seed}")
        self.checks = self.labour.checks = checks.Checks(self)
        self.features = features.Features(self)
        self._write_config()

    # -- the story

    def tell(self, text: str) -> None:
        text = text.replace(MACHINE.here, "")
        self.story.append(f"{self.kernel.now - 1000:11.6f}  {text}")

    def _log(self, process: Process, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if process.name == "gateway":
            stream = getattr(record, "stream", "")
            key = stream + str(record.msg)
            self._lines[key] += 1
            if self._lines[key] <= 5:
                self.tell(f"    log: {record.levelname.lower()}: {stream}{': ' if stream else ''}{text}")
            if stream and record.levelno == logging.WARNING:
                self.checks.repaired(stream, text)
            if text.startswith("the retained message on") or "not retained: no room" in text:
                self.checks.sessions.displaced = True
            if record.exc_info and record.exc_info[1] is not None:
                if isinstance(record.exc_info[1], kernels.Killed):
                    return
                trace = "".join(traceback.format_exception(record.exc_info[1]))
                self.checks.broken(f"an internal error: {text}\n{trace}")

    @property
    def acknowledged(self) -> int:
        """How many messages were."""
        return sum(message.acked is not None for device in self.devices for message in device.messages)

    def _check_books(self) -> None:
        """Every counter of the gateway is right between two of its turns."""
        if self.process is not None and not self.process.dead:
            books.check()

    # -- the gateway

    def _write_config(self) -> None:
        (self.place / "config.toml").write_text(settings.text(self))
        keys = self.place / "keys"
        if self.plan.encrypted and not keys.exists():
            keys.write_text(f"{Random(self.plan.seed).randbytes(32).hex()}\n")
            keys.chmod(0o600)
        users = self.place / "users"
        users.write_text(settings.users(self))
        users.chmod(0o600)

    def start(self) -> None:
        """Start the service and wait until it listens, or dies."""
        from . import product

        self.starts.append(self.kernel.now)
        if self.sync_failures:
            self.checks.after_cut()
        self._lines.clear()
        books.keep(set())  # those of the last one ended somewhere
        process = self.process = self.kernel.spawn("gateway")
        process.at_exit.append(lambda: boundary.close_all(process))
        process.loop = loops.Loop(process)
        self.service = None

        def main() -> None:
            self.service = product.service(self.place / "config.toml")
            task = process.loop.create_task(self.service.run())
            task.add_done_callback(ended)

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, kernels.Killed):
                trace = "".join(traceback.format_exception(error))
                if not isinstance(error, OSError) or not (
                    self.disk.full or self.sync_failures or self.disk.failing or self.refused
                ):
                    self.failed = BrokenError(f"the service ends with an error:\n{trace}")
                self.tell(f"the service ends: {error}")
            self.kernel.later(0.0, None, self.kernel.kill, process, 0)

        self.failed: BrokenError | None = None
        self.kernel.later(0.0, process, main)
        if not self.kernel.run(lambda: process.dead or ADDRESS in loops.NETWORK, QUIET):
            raise BrokenError("the service does not start")
        if self.failed is not None:
            raise self.failed
        if not process.dead:
            self.tell("the service runs")
            self.checks.after_start()

    def ensure(self) -> None:
        """If the service is dead, start it again."""
        for _ in range(200):
            assert self.process is not None
            if not self.process.dead:
                return
            self._died()
            self.start()
        raise BrokenError("the service does not stay alive")

    def _died(self) -> None:
        assert self.process is not None
        now = self.process.died
        if self.process.status == -9:
            self.crashes += 1
            if self._pending_cut:
                self.tell(f"the power is gone: {self._cut()}")
                self.cuts.append(now)
                self.checks.after_cut()
            else:
                self.tell("the service is dead")
                self.kills.append(now)
        self._pending_cut = False
        self.kernel.pass_time(self.random.random() * 0.05)

    def _cut(self) -> str:
        if self.disk.lying:
            self.lies[-1] = self.lies[-1][0], self.kernel.now
        text = self.disk.cut()
        shutil.rmtree(self.place / "memory", ignore_errors=True)
        self.disk.failing = self.disk.refusing = 0
        self.disk.slow = 0.0
        MACHINE.boot = f"boot {len(self.cuts) + 1}"
        if not self.plan.ntp:
            self._set_clock()
        return text

    def _client(self, settings: Any, service: str, *_: Any, **__: Any) -> Any:
        from . import product

        real = self.bucket.client() if service == "s3" else self.kinesis
        return product.Slow(self, service, real)

    def requested(self, service: str) -> None:
        """A request goes to a service of the cloud: the link may break now."""
        if service == self._breaking:
            self._requests_left -= 1
            if self._requests_left < 0:
                self._do_link(True)
                (self.bucket if service == "s3" else self.kinesis).cut = True

    # -- the run

    def run(self) -> None:
        """Carry out the plan, then heal everything and check; raises BrokenError."""
        self.start()
        for client in self.clients:
            client.start()
        self.checks.fresh_room()
        for step in self.plan.steps:
            self.ensure()
            self.tell(f"{step.words()}")
            self.do(step)
            self.kernel.pass_time(step.wait)
            self.checks.whole()
        self.settle()
        self.checks.whole()
        self._check_books()

    def do(self, step: Step) -> None:
        """Make a step."""
        do = getattr(self, f"_do_{step.do}", None) or getattr(self.features, step.do)
        do(*step.arguments)

    def settle(self) -> None:
        """Heal all faults; everything must come to rest, and be right."""
        self.tell("all faults end")
        self.features.repair()
        self._do_lie(False)
        self._do_faults(0.0)
        self.features.plugin(False)
        self.features.stall(False)
        assert self.process is not None
        self.process.calls_left = None
        self._heal_rights()
        self.ensure()
        if not self.process.dead:
            self.tell("the service is stopped, and started: a stream that could not be opened is opened now")
            self._do_stop()
        self.ensure()
        while self.bucket.late():
            pass
        for client in self.clients:
            client.start()
        self.checks.at_rest()

    def _heal_rights(self) -> None:
        if self.revoked:
            self.revoked.clear()
            self.reload()

    def reload(self) -> None:
        self._write_config()
        if self.process is not None and not self.process.dead:
            with self.kernel.inside(self.process):
                self.process.loop.signal(HUP)
            self.kernel.pass_time(0.001)

    # -- steps

    def _do_publish(self, device: int, number: int, family: str, qos: int) -> None:
        who = self.devices[device]
        deep = {"live": "live/1/x" if qos < 2 else "live/2/x"}
        for n in range(number):
            topic = deep.get(family, f"{family}/{device}")
            if family == "few":
                topic = f"few/{device}/{n % (settings.TOPICS // DEVICES)}"
            if family in ("safe", "plain") and n % 7 == 3:
                topic = f"{family}/both/{device}"
            body = f"{who.name} {len(who.messages)} {self.random.randrange(10**6)} ".encode()
            if family in POISONED and self.random.random() < POISONED[family]:
                body += POISON
            expiry = EXPIRY if family == "live" and self.random.random() < 0.3 else 0
            who.publish(topic, body + b"." * self.random.choice((0, 5, 40, 200)), qos, expiry=expiry)

    def _do_retain(self, device: int, number: int) -> None:
        who = self.devices[device]
        for _ in range(number):
            body = f"{who.name} {len(who.messages)} retained".encode()
            who.publish(f"live/1/kept/{device}", body, 1, retain=True)

    def _do_append(self, number: int, again: bool) -> None:
        self.appender.append(number, again=again)

    def _do_repeat(self, number: int) -> None:
        self.appender.repeat(number, latest=self.random.random() < 0.5)

    def _do_drain(self) -> None:
        self.checks.drain_dead()

    def _do_pause(self, seconds: float) -> None:
        self.kernel.pass_time(seconds)
        self._look_closely()

    def _do_room(self) -> None:
        self._do_full(False)
        self.disk.failing = self.disk.refusing = 0
        assert self.process is not None
        if not self.process.dead and self.process.calls_left is None:
            self.kernel.pass_time(1.0)  # what was under way
            self.checks.same_room()

    def _do_off(self, seconds: float, how: str) -> None:
        assert self.process is not None
        for client in self.clients:
            client.sleep()
        if how == "stop":
            self._do_stop()
        else:
            self.kernel.kill(self.process, -9)
        self._died()
        self.kernel.pass_time(seconds)
        for client in self.clients:
            client.wake()
        self.start()

    def _set_clock(self) -> None:
        """A boot: without NTP from the start, the wall clock begins in 1970 as often as not."""
        right = self.plan.ntp or self.random.random() < 0.5
        MACHINE.wall, MACHINE.synchronised = boundary.CLOUD if right else 0.0, right

    def _do_ntp(self) -> None:
        if not MACHINE.synchronised:
            self.checks.steps.append(self.kernel.now)
            MACHINE.wall, MACHINE.synchronised = boundary.CLOUD, True

    def _do_recreate(self) -> None:
        self.checks.recreate()

    def _do_span(self, limited: str, how: str, part: float, end: float) -> None:
        limit = {"ids": self.plan.window, "aged": self.plan.age, "session": SESSION}[limited]
        device = self.devices[0]
        if limited == "ids":
            self._do_append(2, False)
        elif limited == "aged":
            self._do_publish(0, 3, "aged", 1)
        else:
            self.subscriber.leave(politely=self.random.random() < 0.5)
        self.kernel.run(lambda: device.idle and self.appender.idle, 2.0)
        begun = self.kernel.now
        self.ensure()
        self._do_off(limit * part, how)
        late = 3.5 if end == 1.0 else 0.0
        self.kernel.pass_time(max(0.0, begun + limit * end + late - self.kernel.now))
        self.ensure()
        if limited == "ids":
            self.appender.repeat(2, latest=True)
        elif limited == "aged":
            self._look_closely()
        else:
            self.subscriber.start()

    def _look_closely(self) -> None:
        if self.process is not None and not self.process.dead:
            self.checks.look_closely()

    def _do_purge(self) -> None:
        self.checks.purge_both()

    def _do_fill(self, number: int) -> None:
        if not number:
            self.appender.ask("purgeMessageStream", {"name": "exact"}, lambda _: None)
        for _ in range(number):
            body = {"name": "exact", "payload": "A" * self.random.choice((40, 100, 400))}
            self.appender.ask("appendMessage", body, lambda _: None)

    def _do_drop(self, device: int) -> None:
        self.devices[device].drop()

    def _do_leave(self, device: int, politely: bool) -> None:
        self.devices[device].leave(politely=politely)

    def _do_come(self, device: int, _: bool) -> None:
        self.devices[device].start()

    def _do_subscriber(self) -> None:
        if self.subscriber.away:
            self.subscriber.start()
        else:
            self.subscriber.leave(politely=self.random.random() < 0.5)

    def _do_kill(self, after: float, unit: str) -> None:
        self._doom(after, unit)

    def _do_cut(self, after: float, unit: str) -> None:
        self._pending_cut = True
        self._doom(after, unit)

    def _doom(self, after: float, unit: str) -> None:
        process = self.process
        assert process is not None
        if unit.startswith("s"):
            self.kernel.later(after, None, self.kernel.kill, process, -9)
        else:
            process.calls_left = int(after)
            self.kernel.later(1.0, None, self.kernel.kill, process, -9)

    def _do_stop(self) -> None:
        process = self.process
        assert process is not None
        if not process.dead:
            self.checks.sessions.counted()
        with self.kernel.inside(process):
            process.loop.signal(TERM)
        if not self.kernel.run(lambda: process.dead, QUIET):
            raise BrokenError("the service does not stop")
        if process.status == 0:
            self.tell("the service has stopped")
            self.stops.append(process.died)

    def _do_worker(self, after: float, unit: str) -> None:
        for process in boundary.CHILDREN:
            if not process.dead and process.threads:
                if unit.startswith("s"):
                    self.kernel.later(after, None, self.kernel.kill, process, -9)
                else:
                    process.calls_left = int(after)
                break

    def _do_link(self, down: bool) -> None:
        self.bucket.down = self.kinesis.down = down
        self.bucket.cut = self.kinesis.cut = False
        self._breaking = ""

    def _do_breaks(self, number: int, service: str) -> None:
        self._do_link(False)
        self._breaking, self._requests_left = service, number

    def _do_faults(self, share: float) -> None:
        from .bucket import Faults

        self.bucket.faults = Faults.all(share)
        self.kinesis.faults = share

    def _do_late(self) -> None:
        self.bucket.late()

    def _do_syncs(self, number: int, where: str) -> None:
        self.disk.failing, self.disk.failing_at = number, where

    def _do_refuse(self, number: int, where: str) -> None:
        self.disk.refusing, self.disk.refusing_at = number, where

    def _do_lie(self, on: bool) -> None:
        if on and not self.disk.lying:
            self.lies.append((self.kernel.now, float("inf")))
        elif not on and self.disk.lying:
            self.lies[-1] = self.lies[-1][0], self.kernel.now
        self.disk.lying = on

    def _do_full(self, on: bool) -> None:
        if on and not self.disk.full:
            self.full.append((self.kernel.now, float("inf")))
        elif not on and self.disk.full:
            self.full[-1] = self.full[-1][0], self.kernel.now
        self.disk.full = on

    def _do_backup(self) -> None:
        self.backup = self.disk.copy()

    def _do_restore(self) -> None:
        if self.backup is not None:
            assert self.process is not None
            self.kernel.kill(self.process, -9)
            self.disk.restore(self.backup)
            self.restored = True

    def _do_clock(self, seconds: float) -> None:
        self.checks.steps.append(self.kernel.now)
        MACHINE.wall = max(MACHINE.wall + seconds, 0.0)  # Linux refuses a time before 1970
        MACHINE.synchronised = self.plan.ntp  # who sets it by hand ends that, in the kernel too

    def _do_revoke(self, device: int, family: str) -> None:
        if self.plan.open:  # there is no rule
            return
        key = device, family
        self.revoked_once = True
        if self.revoked.pop(key, None) is None:
            self.revoked[key] = 0.0
            self.reload()
            if self.process is not None and not self.process.dead:
                self.revoked[key] = self.kernel.now
        else:
            self.reload()

    def _do_passwords(self, device: int) -> None:
        self.passwords[device] += 1
        who = self.devices[device]
        self.checks.sessions.password_changed(who)
        self.reload()
        self.checks.password_changed(who)
        who.password = f"word{device}-{self.passwords[device]}"

    def _do_update(self) -> None:
        self.ring = self.random.choice((5, 40, 200))
        self.linger = self.random.choice((1, 100, 400))
        self.newest_first = self.plan.newest_first and self.random.random() < 0.7
        self.reload()

    def _do_ingest(self) -> None:
        self.checks.lake.ingest()

    def _do_harm(self, how: str) -> None:
        self.harm(how)

    def harm(self, how: str) -> None:
        """Somebody deletes, damages or tears an object: any, or one that is the first of its stream."""
        data = [key for key in self.bucket.keys if key.startswith("gateway=")]
        firsts = list({key.partition("/epoch=")[0]: key for key in reversed(data)}.values())
        if data:
            key = self.random.choice(self.random.choice((data, firsts)))
            if key not in self.bucket.harmed:
                getattr(self.bucket, how)(key)

    def advance_clock(self) -> None:
        """The wall clock is later than it ever was."""
        MACHINE.wall, MACHINE.synchronised = boundary.CLOUD + 10 * 365 * 86_400, True

    def replace_disk(self) -> None:
        """The gateway ends, and begins on an empty disk."""
        assert self.process is not None
        self.kernel.kill(self.process, -9)
        self.tell("the disk is dead, and another one takes its place")
        self.disk.clear()
        shutil.rmtree(self.place / "memory", ignore_errors=True)
        self.export_starts.clear()
        self._write_config()
        self.start()
