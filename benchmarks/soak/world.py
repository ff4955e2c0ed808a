"""Everything that runs: the gateways, the broker, the links between them, the services, the disk."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import boto3
import psutil

from benchmarks.soak import plan
from benchmarks.soak.services import Broken, Delivered, Services
from benchmarks.testbed.certificates import Authority
from benchmarks.testbed.forwarder import Forwarder
from benchmarks.testbed.local import free_port
from benchmarks.testbed.mosquitto import Mosquitto
from bridge import books
from bridge.access.users import hash_password

DISK = 512 << 20
START = 60.0  # seconds that a gateway may take until it is ready


def wait_for(what: str, done: Callable[[], Any], seconds: float) -> Any:
    """Poll until `done` gives something; raises TimeoutError that says what was waited for."""
    deadline = time.monotonic() + seconds
    while not (found := done()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.05)
    return found


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Gateway:
    """A gateway's process, its configuration and its status page."""

    def __init__(self, name: str, root: Path, text: str, http: int) -> None:
        self.name, self.log = name, root / f"{name}.log"
        self.config = root / f"{name}.toml"
        self.config.write_text(text)
        self._status = f"http://127.0.0.1:{http}/status.json"
        self.process: subprocess.Popen[bytes] | None = None
        self.lives: list[tuple[float, int]] = []  # when it was ready, and which process it is
        self.slowest_start = 0.0
        self.faults: list[str] = []  # what it should never have done
        self.lock = threading.Lock()  # held by who starts and ends it

    def start(self) -> None:
        began = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bridge", "run", "-c", str(self.config)], stderr=log
            )
        try:
            wait_for(f"{self.name} to be ready; see {self.log}", self._ready, START)
        except TimeoutError as error:
            self.faults.append(str(error))
            raise
        self.slowest_start = max(self.slowest_start, time.monotonic() - began)
        self.lives.append((time.time(), self.process.pid))

    def _ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise TimeoutError(f"{self.name} ended with {self.process.returncode} at its start: {self.log}")
        status = self.status()
        return status is not None and status["readiness"]["phase"] == "running"

    def status(self) -> dict[str, Any] | None:
        """What its status page says; None while it does not answer."""
        with suppress(OSError, ValueError), urllib.request.urlopen(self._status, timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
        return None

    def reloads(self) -> int:
        """How often it has reloaded its configuration, although some changes may need a restart."""
        log = self.log.read_bytes()
        return log.count(b"msg=reloaded") + log.count(b'msg="reloaded, except: ')

    def count(self, what: str) -> int:
        """A counter of its MQTT front end; it starts again with the process."""
        return int((self.status() or {}).get("counts", {}).get("mqtt", {}).get(what, 0))

    def worker(self) -> psutil.Process | None:
        """Its export worker."""
        with suppress(psutil.Error):
            if self.process is not None:
                for child in psutil.Process(self.process.pid).children():
                    if "bridge.export.worker" in child.cmdline():
                        return child
        return None

    def running(self) -> bool:
        """Whether it is running; an exit that no fault caused is a failure."""
        assert self.process is not None
        if self.process.poll() is None:
            return True
        self.faults.append(f"{self.name} ended by itself with {self.process.returncode}: {self.log}")
        return False

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """SIGTERM; anything but a clean end is a fault."""
        assert self.process is not None
        self.process.terminate()
        try:
            code: int | str = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            code = "SIGKILL after 60 s"
        if code != 0:
            self.faults.append(f"{self.name} ended with {code} after SIGTERM: {self.log}")

    def caught_up(self) -> bool:
        """Whether all its exports have delivered all that it has."""
        state = self.status()
        return state is not None and all(not export["lag"] for export in state["exports"])


class World:
    """All of it. `root` is where it writes, `disk` a small file system of its own or None."""

    def __init__(self, root: Path, disk: Path | None, devices: int) -> None:
        self.root, self.disk, self.devices = root, disk, devices
        os.environ.update(plan.CREDENTIALS | {books.VARIABLE: "1"})
        self.gateways: dict[str, Gateway] = {}
        self.data: dict[str, Path] = {}  # their data directories
        self._ends = ExitStack()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self.storage = self._start_storage()
        self.delivered = Delivered()
        self.services, self.broken = Services(self.delivered), Broken()
        self._ends.callback(self.services.close)
        self._ends.callback(self.broken.close)
        self.authority = Authority(self.root / "tls")
        certificate = self.authority.issue("gateway")
        self.broker = Mosquitto(self.root / "mosquitto", "autosave_interval 1\nautosave_on_changes true")
        self.broker.start()
        self._ends.callback(self.broker.stop)
        self.ports = {"tcp": free_port(), "tls": free_port(), "ws": free_port()}
        self.users = self.root / "users"
        self.set_password(plan.PASSWORD)
        broker = f"mqtt://127.0.0.1:{self.broker.port}"
        leads = {
            f"{kind}{n}": f"mqtt://127.0.0.1:{self.ports[kind]}" for kind in self.ports for n in range(2)
        }
        leads |= {"broker": broker, "uplink": broker, "s3": self.storage, **self.services.urls}
        self.links: dict[str, Forwarder] = {}
        for name, url in leads.items():
            self.links[name] = Forwarder(url)
            self._ends.callback(self.links[name].close)
        endpoints = {name: self.links[name].url for name in ("s3", *self.services.urls)}
        endpoints["mqtt"] = endpoints["mqtt"].replace("http", "mqtt")
        uplink = self.links["uplink"].url.replace("http", "mqtt")
        for name, home, more in (
            (
                plan.EMBEDDED,
                self.disk or self.root,
                {**self.ports, **certificate._asdict(), "users": self.users},
            ),
            (plan.EXTERNAL, self.root, {"broker": uplink}),
        ):
            http = free_port()
            places = {"data": home / f"data-{name}", "memory": home / f"memory-{name}", "http": http, **more}
            self.data[name] = places["data"]
            self.gateways[name] = Gateway(name, self.root, plan.configuration(name, places, endpoints), http)
            self._ends.callback(self.gateways[name].kill)
            self.gateways[name].start()

    def _start_storage(self) -> str:
        port = free_port()
        with (self.root / "s3.log").open("wb") as log:
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
            process = subprocess.Popen(command, stdout=log, stderr=log)
        self._ends.callback(process.wait)
        self._ends.callback(process.kill)
        wait_for("moto", lambda: _listens(port), START)
        url = f"http://127.0.0.1:{port}"
        client: Any = boto3.client("s3", endpoint_url=url)
        where = {"LocationConstraint": plan.CREDENTIALS["AWS_DEFAULT_REGION"]}
        client.create_bucket(Bucket=plan.BUCKET, CreateBucketConfiguration=where)
        return url

    def set_password(self, password: str) -> None:
        """The password of the devices' user, from the next reload on."""
        spare = self.users.with_suffix(".new")
        spare.write_text(f"{plan.USER}:{hash_password(password.encode())}\n")
        spare.chmod(0o600)
        spare.replace(self.users)

    def start_devices(self, seconds: float) -> subprocess.Popen[bytes]:
        """The devices' process; it ends when all is acknowledged, or cannot be."""
        given = {
            "devices": [device.to_json() for device in plan.devices(self.devices)],
            "ports": {name: int(link.url.rsplit(":", 1)[1]) for name, link in self.links.items()},
            "ca": str(self.authority.cert),
        }
        (self.root / "plan.json").write_text(json.dumps(given))
        command = [sys.executable, "-m", "benchmarks.soak.device", str(self.root / "plan.json")]
        return subprocess.Popen([*command, str(self.root / "devices.json"), str(seconds)])

    def ingest(self, kill_after: float | None = None) -> tuple[int, dict[str, Any]]:
        """Run `streambridge ingest`, or begin to and kill it; returns its exit code and its document."""
        command = [sys.executable, "-m", "bridge", "ingest", "--json", "--endpoint-url", self.links["s3"].url]
        command += ["--source", f"s3://{plan.BUCKET}/{plan.PREFIX}", "--warehouse", str(self.root / "lake")]
        with (self.root / "ingest.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
        try:
            out, _ = process.communicate(timeout=kill_after or 600)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the JVM and the Python workers too
            process.communicate()
            return -signal.SIGKILL, {}
        document: dict[str, Any] = json.loads(out) if out.strip() else {}
        return process.returncode, document

    def fill_disk(self) -> Path:
        """Take all the room there is; returns the file to delete."""
        assert self.disk is not None
        ballast = self.disk / "ballast"
        free = os.statvfs(self.disk)
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(free.f_bavail * free.f_bsize, 1))
            file.seek(0, os.SEEK_END)
            while True:  # what has become free meanwhile
                file.write(bytes(4096))
        return ballast

    def close(self) -> None:
        """End everything, however far it has come."""
        self._ends.close()
