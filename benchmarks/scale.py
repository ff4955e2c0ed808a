"""Devices per gateway: how far one gateway scales.

    python -m benchmarks.scale [--tcp N,N] [--tls N,N] [--output DIR]

For each number of devices, over TCP and over TLS, a gateway starts on an empty directory, and a separate
load process connects the devices. There is one persistent stream. Measured are:

* connects: the time until all devices are connected (CONNACK), and the CPU time of the gateway for each
* memory: the resident memory of the gateway per connection, above its memory without any
* idle: the CPU time that connected and silent devices cost, in percent of a core
* fan-in: all devices publish at QoS 1, together `--rate` messages a second: the CPU time of the gateway per
  message, and the time from PUBLISH to PUBACK
* return: the gateway is killed with SIGKILL and restarted, and all devices reconnect at once with their
  persistent sessions: the time from the start of the process until the last device is connected

Caveats. Gateway and load share the machine, so CPU figures are more reliable than times: the load process
makes the other side of each TLS handshake. Messages have 200 bytes, and each needs its own read and write.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import ssl
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.testbed.certificates import Authority
from benchmarks.testbed.local import free_port
from benchmarks.testbed.mqtt import connect, publish

CONFIG = """\
[gateway]
id = "scale"
data_dir = "data"
memory_dir = "memory"
[mqtt]
listen = ["{scheme}://127.0.0.1:{port}"]
{tls}[greengrass]
listen = ""
[http]
listen = ""
[export]
plugin_dirs = []
[streams.s]
topics = ["in/#"]
max_size = "4GiB"
"""
PAYLOAD = bytes(200)
QUIET = 5.0  # seconds of silence that are measured
FAN_IN = 10.0  # seconds of load that are measured


class Device(asyncio.Protocol):
    """A device that counts acknowledgements and does no more."""

    def __init__(self, number: int) -> None:
        self.number, self.sent = number, deque[float]()
        self.delays: list[float] = []
        self.next_id = 0
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(connect(f"device{self.number}", clean=False))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.connected.done():
            self.connected.set_exception(ConnectionError("closed"))

    def data_received(self, data: bytes) -> None:
        if not self.connected.done():
            self.connected.set_result(None)
            return
        now = time.perf_counter()
        for _ in range(len(data) // 4):  # nothing but PUBACKs comes
            self.delays.append(now - self.sent.popleft())

    def publish(self) -> None:
        self.next_id = self.next_id % 65535 + 1
        self.sent.append(time.perf_counter())
        self.transport.write(publish(f"in/{self.number}", PAYLOAD, 1, self.next_id))


async def connected(number: int, port: int, tls: ssl.SSLContext | None) -> list[Device]:
    """Connect them, 200 at a time, and wait for the last; one that is refused tries again."""
    loop, turn = asyncio.get_running_loop(), asyncio.Semaphore(200)

    async def one(n: int) -> Device:
        while True:
            async with turn:
                try:
                    _, device = await loop.create_connection(partial(Device, n), "127.0.0.1", port, ssl=tls)
                    await device.connected
                    return device
                except OSError:
                    await asyncio.sleep(random.uniform(0.02, 0.1))

    return list(await asyncio.gather(*(one(n) for n in range(number))))


async def load(port: int, number: int, rate: float, ca: str) -> None:
    """The load process: takes commands as lines on standard input, and answers with lines of JSON."""
    loop = asyncio.get_running_loop()
    devices: list[Device] = []
    tls = ssl.create_default_context(cafile=ca) if ca else None
    while command := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        began, answer = time.perf_counter(), {}
        if command == "connect":
            devices = await connected(number, port, tls)
        else:
            pause, due, n = 0.01, time.perf_counter(), 0
            while (now := time.perf_counter()) < began + FAN_IN:
                while n < (now - began) * rate:
                    devices[n % number].publish()
                    n += 1
                due += pause
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            while any(device.sent for device in devices):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            delays = sorted(delay for device in devices for delay in device.delays)
            answer = {
                "messages": n,
                "p50_ms": round(delays[len(delays) // 2] * 1e3, 2),
                "p99_ms": round(delays[len(delays) * 99 // 100] * 1e3, 2),
            }
        print(json.dumps({"seconds": round(time.perf_counter() - began, 3), **answer}), flush=True)


@contextmanager
def loading(port: int, number: int, rate: float, ca: str = "") -> Iterator[Callable[[str], dict[str, Any]]]:
    """Start a load process. The function that is yielded gives it a command, and returns its answer."""
    command = [sys.executable, "-m", "benchmarks.scale", "--load", str(port), str(number), str(rate), ca]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as devices:

        def tell(what: str) -> dict[str, Any]:
            assert devices.stdin is not None
            assert devices.stdout is not None
            print(what, file=devices.stdin, flush=True)
            return dict(json.loads(devices.stdout.readline()))

        try:
            yield tell
        finally:
            devices.kill()


class Gateway:
    """The service, measured from outside."""

    def __init__(self, root: Path, tls: bool) -> None:
        self.port, self.root, self.ca, section = free_port(), root, "", ""
        if tls:
            authority = Authority(root / "tls")
            pair = authority.issue("gateway")
            self.ca = str(authority.cert)
            section = f'[mqtt.tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\n'
        text = CONFIG.format(port=self.port, scheme="tls" if tls else "tcp", tls=section)
        (root / "streambridge.toml").write_text(text)

    def start(self) -> None:
        command = [sys.executable, "-m", "bridge", "run", "-c", str(self.root / "streambridge.toml")]
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log)
        self.seen = psutil.Process(self.process.pid)

    def kill(self) -> None:
        """SIGKILL; its export worker ends by itself, after the write that it is at."""
        if self.process.poll() is None:
            worker = self.seen.children()
            self.process.kill()
            self.process.wait()
            psutil.wait_procs(worker)

    def wait(self) -> None:
        """Until it is ready."""
        deadline = time.monotonic() + 60
        while b"msg=ready" not in (self.root / "log").read_bytes():
            assert time.monotonic() < deadline, f"the gateway does not start: {self.root / 'log'}"
            time.sleep(0.05)

    def cpu(self) -> float:
        return sum(self.seen.cpu_times()[:2])

    def memory(self) -> int:
        return int(self.seen.memory_info().rss)


def measure(number: int, rate: float, tls: bool) -> dict[str, Any]:
    """All figures for so many devices."""
    with tempfile.TemporaryDirectory() as root:
        gateway = Gateway(Path(root), tls)
        gateway.start()
        gateway.wait()
        try:
            with loading(gateway.port, number, rate, gateway.ca) as tell:
                memory, cpu = gateway.memory(), gateway.cpu()
                found = tell("connect")
                result = {
                    "devices": number,
                    "tls": tls,
                    "connect_seconds": found["seconds"],
                    "connect_cpu_ms": round((gateway.cpu() - cpu) / number * 1e3, 3),
                    "kib_per_connection": round((gateway.memory() - memory) / number / 1024, 1),
                }
                cpu = gateway.cpu()
                time.sleep(QUIET)
                result["idle_percent"] = round((gateway.cpu() - cpu) / QUIET * 100, 2)
                cpu = gateway.cpu()
                found = tell("publish")
                result |= {
                    "messages_per_second": round(found["messages"] / found["seconds"]),
                    "cpu_us_per_message": round((gateway.cpu() - cpu) / found["messages"] * 1e6, 1),
                    "p50_ms": found["p50_ms"],
                    "p99_ms": found["p99_ms"],
                    "mib_in_all": round(gateway.memory() / (1 << 20)),
                }
                gateway.kill()
                gateway.start()
                result["return_seconds"] = tell("connect")["seconds"]
        finally:
            gateway.kill()
    return result


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if sys.argv[1:2] == ["--load"]:
        uvloop.run(load(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tcp", default="100,1000,2000,5000", help="numbers of devices by TCP")
    parser.add_argument("--tls", default="1000,5000", help="numbers of devices by TLS")
    parser.add_argument("--rate", type=float, default=5000, help="messages a second, of all devices [5000]")
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    options = parser.parse_args()
    results = []
    for transport, numbers in (("TCP", options.tcp), ("TLS", options.tls)):
        for number in filter(None, numbers.split(",")):
            results.append(measure(int(number), options.rate, transport == "TLS"))
            print(json.dumps(results[-1]), flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "scale.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.output / "scale.md").write_text(table(results))


COLUMNS = {
    "connect, s": "connect_seconds",
    "CPU each, ms": "connect_cpu_ms",
    "KiB each": "kib_per_connection",
    "gateway, MiB": "mib_in_all",
    "idle, % of a core": "idle_percent",
    "messages/s": "messages_per_second",
    "CPU, µs each": "cpu_us_per_message",
    "PUBACK p50, ms": "p50_ms",
    "p99, ms": "p99_ms",
    "return, s": "return_seconds",
}


def table(results: list[dict[str, Any]]) -> str:
    """What was measured, as Markdown: a row for each number of devices."""
    lines = [f"| devices | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in results:
        name = f"{row['devices']:,} {'TLS' if row['tls'] else 'TCP'}"
        lines.append(f"| {name} | " + " | ".join(f"{row[key]:,}" for key in COLUMNS.values()) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
