"""Random faults: processes killed, links cut, services broken, disk full; certificates, stream definitions
and passwords replaced.

Two threads run at once, so faults overlap: one for processes and the disk, one for links and services. Each
fault is an event with a start and an end, for the report. The main processes of the gateways are spared in
the last half of the run, and the workers in the last third, so that a leak has time to show.
"""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import psutil

from benchmarks.soak import plan
from benchmarks.soak.world import World, wait_for
from benchmarks.testbed.aws import error, partial, reset

GATEWAYS_SPARED, WORKERS_SPARED = 0.5, 0.66  # of the run
SERVICES = ("s3", "kinesis", "firehose", "http", "mqtt")
LINKS = ("tcp0", "tcp1", "tls0", "tls1", "ws0", "broker", "uplink", *SERVICES)


@dataclass
class Event:
    """A fault: what, to whom, from when to when (Unix time)."""

    kind: str
    what: str
    begin: float
    end: float = 0.0


class Faults:
    """The faults of one run."""

    def __init__(self, world: World, seed: int, seconds: float) -> None:
        self.world, self.seconds = world, seconds
        self.events: list[Event] = []
        self.unsaved: list[tuple[float, float]] = []  # from Mosquitto's last save to its SIGKILL
        self.thrown_out = 0  # connections that a new password has ended
        self.broken: list[str] = []  # what did not come back, and errors of our own
        self.began = time.time()
        self.over = threading.Event()
        self._lock = threading.Lock()
        processes: dict[Callable[[random.Random], None], int] = {
            self.kill_gateway: 3,
            self.stop_gateway: 1,
            self.kill_worker: 3,
            self.kill_broker: 2,
            self.fill_disk: 2,
            self.replace_certificate: 2,
            self.change_streams: 2,
            self.change_password: 2,
        }
        links = {self.cut_link: 3, self.break_service: 2}
        self._threads = [
            threading.Thread(target=self._go_wrong, args=(work, random.Random(f"{seed}{n}")))
            for n, work in enumerate((processes, links))
        ]

    def start(self) -> None:
        self.began = time.time()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No more faults; what is broken is whole again when this returns."""
        self.over.set()
        for thread in self._threads:
            thread.join()

    def past(self, share: float) -> bool:
        return time.time() > self.began + share * self.seconds

    def _go_wrong(self, work: dict[Callable[[random.Random], None], int], chance: random.Random) -> None:
        # Each once, in a random order, before chance alone decides: a short run has them all.
        first = chance.sample(list(work), len(work))
        pause = min(4.0, self.seconds / 30)
        while not self.over.wait(chance.uniform(pause / 4, pause)):
            fault = first.pop() if first else chance.choices(list(work), list(work.values()))[0]
            try:
                fault(chance)
            except (TimeoutError, OSError, AssertionError) as failed:
                self.broken.append(f"{fault.__name__}: {failed!r}")
                return

    def _event(self, kind: str, what: str) -> Event:
        event = Event(kind, what, time.time())
        with self._lock:
            self.events.append(event)
        return event

    # --- processes

    def kill_gateway(self, chance: random.Random) -> None:
        if self.past(GATEWAYS_SPARED):
            return
        gateway = self.world.gateways[chance.choice((plan.EMBEDDED, plan.EMBEDDED, plan.EXTERNAL))]
        event = self._event("SIGKILL gateway", gateway.name)
        with gateway.lock:
            if gateway.running():
                gateway.kill()
            self.over.wait(chance.choice((0.0, 0.0, chance.uniform(0, 5))))
            gateway.start()
        event.end = time.time()

    def stop_gateway(self, chance: random.Random) -> None:
        if self.past(GATEWAYS_SPARED):
            return
        gateway = self.world.gateways[chance.choice((plan.EMBEDDED, plan.EXTERNAL))]
        event = self._event("SIGTERM gateway", gateway.name)
        with gateway.lock:
            if gateway.running():
                gateway.stop()
            gateway.start()
        event.end = time.time()

    def kill_worker(self, chance: random.Random) -> None:
        if self.past(WORKERS_SPARED):
            return
        gateway = self.world.gateways[chance.choice((plan.EMBEDDED, plan.EMBEDDED, plan.EXTERNAL))]
        worker = gateway.worker()
        if worker is None:
            return
        event = self._event("SIGKILL worker", gateway.name)
        try:
            worker.kill()
        except psutil.NoSuchProcess:
            return

        def another() -> bool:
            found = gateway.worker()
            return found is not None and found.pid != worker.pid

        wait_for(f"another worker of {gateway.name}", another, 60)
        event.end = time.time()

    def kill_broker(self, chance: random.Random) -> None:
        broker = self.world.broker
        assert broker.process is not None
        event = self._event("SIGKILL broker", "mosquitto")
        broker.process.kill()
        broker.process.wait()
        database = broker.config.with_name("mosquitto.db")
        saved = database.stat().st_mtime if database.exists() else 0.0
        self.unsaved.append((saved, time.time()))
        self.over.wait(chance.uniform(0, 3))
        broker.start()
        event.end = time.time()

    # --- the disk and the certificates

    def fill_disk(self, chance: random.Random) -> None:
        """Full for a while; sometimes the gateway is killed in the middle, and starts on the full disk."""
        if self.world.disk is None:
            return
        gateway = self.world.gateways[plan.EMBEDDED]
        kill = not self.past(GATEWAYS_SPARED) and chance.random() < 0.4
        event = self._event("disk full", "and SIGKILL" if kill else "")
        ballast = self.world.fill_disk()
        try:
            self.over.wait(chance.uniform(2, 10))
            if kill:
                with gateway.lock:
                    if gateway.running():
                        gateway.kill()
                    gateway.start()
        finally:
            ballast.unlink()
        event.end = time.time()

    def replace_certificate(self, chance: random.Random) -> None:
        gateway = self.world.gateways[plan.EMBEDDED]
        event = self._event("certificate", gateway.name)
        with gateway.lock:
            if not gateway.running():
                gateway.start()
            assert gateway.process is not None
            before = self._served()
            self.world.authority.issue("gateway")  # over the old files
            gateway.process.send_signal(1)  # SIGHUP
            wait_for("the new certificate to be served", lambda: self._served() != before, 20)
        event.end = time.time()

    def change_streams(self, chance: random.Random) -> None:
        """Other sizes for all streams of a gateway, by a reload."""
        gateway = self.world.gateways[chance.choice((plan.EMBEDDED, plan.EXTERNAL))]
        event = self._event("streams changed", gateway.name)
        with gateway.lock:
            if not gateway.running():
                gateway.start()
            assert gateway.process is not None
            text, other = gateway.config.read_text(), chance.choice(plan.MAX_SIZES)
            for size in plan.MAX_SIZES:
                text = text.replace(f'max_size = "{size}"', f'max_size = "{other}"')
            gateway.config.write_text(text)
            before = gateway.reloads()
            gateway.process.send_signal(1)  # SIGHUP
            wait_for("the reload", lambda: gateway.reloads() > before, 20)
        event.end = time.time()

    def change_password(self, chance: random.Random) -> None:
        """Another password for a while: clients that are connected with the old one are thrown out."""
        gateway = self.world.gateways[plan.EMBEDDED]
        event = self._event("password changed", plan.USER)
        with gateway.lock:
            if not gateway.running():
                gateway.start()
            assert gateway.process is not None
            try:
                for password in (plan.OTHER_PASSWORD, plan.PASSWORD):
                    self.world.set_password(password)
                    before = gateway.reloads()
                    gateway.process.send_signal(1)  # SIGHUP
                    wait_for("the reload", lambda: gateway.reloads() > before, 20)  # noqa: B023
                    self.thrown_out = max(self.thrown_out, gateway.count("refused_reload"))
                    if password == plan.OTHER_PASSWORD:
                        self.over.wait(chance.uniform(0, 4))
            finally:
                self.world.set_password(plan.PASSWORD)
        event.end = time.time()

    def _served(self) -> bytes:
        """The certificate that a new connection is shown."""
        context = ssl.create_default_context(cafile=str(self.world.authority.cert))
        context.check_hostname = True
        address = ("127.0.0.1", self.world.ports["tls"])
        with (
            socket.create_connection(address, 10) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as tls,
        ):
            return tls.getpeercert(binary_form=True) or b""

    # --- links and services

    def cut_link(self, chance: random.Random) -> None:
        names = chance.sample(LINKS, chance.choice((1, 1, 2, len(LINKS))))
        event = self._event("link cut", "all" if len(names) == len(LINKS) else ", ".join(names))
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(self.world.links[name].shut())
            self.over.wait(chance.choice((0.0, chance.uniform(0, 2), chance.uniform(0, 8))))
        event.end = time.time()

    def break_service(self, chance: random.Random) -> None:
        kind = chance.choice(("s3", *SERVICES))
        event = self._event("service broken", kind)
        fake = self.world.services.fakes.get(kind)
        with ExitStack() as stack:
            if fake is None or chance.random() < 0.3:
                stack.enter_context(self.world.links[kind].leading_to(self.world.broken.port))
            else:
                part = chance.randrange(2, 5)
                fault = chance.choice(
                    [
                        error(400, "ProvisionedThroughputExceededException"),
                        error(500, "InternalFailure"),
                        error(400, "ExpiredTokenException"),
                        reset,
                        partial(fake, lambda n, _: n % part == 1, "InternalFailure"),
                    ]
                )
                stack.enter_context(fake.broken(fault))
            self.over.wait(chance.uniform(0.2, 8))
        event.end = time.time()
