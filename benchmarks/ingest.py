"""Ingest side by side: QoS 1 messages per second into each MQTT server that is installed, and into ours.

    python benchmarks/ingest.py [--rounds 5] [--seconds 1] [--out benchmarks/results] [--only NAME ...]

Each server is started in turn, on an empty directory and its own port, and loaded by the same generator
in a process of its own: `clients x window` messages are under way at any time, and each PUBACK lets the
next message go. Measured: acknowledged messages per second, CPU time of the server per message (all its
processes), its resident memory after the load, the latency from PUBLISH to PUBACK of every 64th
message. Rounds go over all servers before the next round begins, so that what the machine does meanwhile
meets all alike; reported are medians. `limit` is what fdatasync allows: messages in flight per fdatasync
of a file that grows by their bytes, measured in the same rounds.

Written: ingest.json, ingest.md (the table), ingest.png. Peers that are not installed are left out:
mosquitto, nats-server (JetStream over MQTT), rabbitmq-server, amqtt (alone, with its TCP listener).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import uvloop

SHAPES = ((4, 20), (4, 200), (50, 10), (1, 1))
SIZES = (128, 1024)
EVERY = 64  # messages between two latency samples
START_TIMEOUT = 30.0


# -- the load, in a process of its own ------------------------------------------------------------


def publish_packet(topic: bytes, packet_id: int, payload: bytes) -> bytes:
    """A QoS 1 PUBLISH (MQTT 3.1.1 section 3.3)."""
    body = len(topic).to_bytes(2, "big") + topic + packet_id.to_bytes(2, "big") + payload
    length, head = len(body), bytearray(b"\x32")
    while length >= 0x80:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + body


class Publisher(asyncio.Protocol):
    """One client: a window of messages under way, whole runs of packets written at a time."""

    def __init__(self, number: int, window: int, size: int) -> None:
        self.window, self.acknowledged, self.latencies = window, 0, []
        ring = 65_535 // window * window  # packet ids in use never meet
        topic = b"bench/%d" % number
        packets = [publish_packet(topic, index + 1, os.urandom(size)) for index in range(min(ring, 20_000))]
        self._length, self._count = len(packets[0]), len(packets)
        self._ring = b"".join(packets) * 2  # any run of up to `count` packets is one slice
        self._next = 0
        self._rest = 0
        self._sampled: tuple[int, float] | None = None
        self._running = False
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        name = b"load-%d" % number
        self._connect = (
            b"\x10" + bytes((12 + len(name),)) + b"\0\4MQTT\4\2\0\0\0" + bytes((len(name),)) + name
        )

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.write(self._connect)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.connected.done():
            self.connected.set_exception(ConnectionError("closed before CONNACK"))

    def data_received(self, data: bytes) -> None:
        if not self.connected.done():
            assert data[:4] == b"\x20\2\0\0", data
            self.connected.set_result(None)
            data = data[4:]
        count, self._rest = divmod(self._rest + len(data), 4)  # nothing but PUBACKs of four bytes comes
        self.acknowledged += count
        if self._sampled is not None and self.acknowledged >= self._sampled[0]:
            self.latencies.append(time.perf_counter() - self._sampled[1])
            self._sampled = None
        if self._running and count:
            self._send(count)

    def begin(self) -> None:
        self._running = True
        self._sent = 0
        self._send(self.window)

    def end(self) -> None:
        self._running = False

    def _send(self, count: int) -> None:
        if self._sampled is None and self._sent % EVERY < count:
            self._sampled = (self._sent + 1, time.perf_counter())
        self._sent += count
        while count:
            run = min(count, self._count - 1)
            start = self._next * self._length
            self.transport.write(self._ring[start : start + run * self._length])
            self._next = (self._next + run) % self._count
            count -= run


async def load(port: int, clients: int, window: int, size: int, seconds: float, pid: int) -> dict[str, Any]:
    """Load the server for some seconds; the first quarter is not counted."""
    loop = asyncio.get_running_loop()
    publishers = []
    for number in range(clients):
        _, publisher = await loop.create_connection(
            lambda number=number: Publisher(number, window, size), "127.0.0.1", port
        )
        await publisher.connected
        publishers.append(publisher)
    for publisher in publishers:
        publisher.begin()
    await asyncio.sleep(seconds / 4)
    before, cpu, began = sum(p.acknowledged for p in publishers), cpu_of(pid), time.perf_counter()
    for publisher in publishers:
        publisher.latencies.clear()
    await asyncio.sleep(seconds)
    took, cpu = time.perf_counter() - began, cpu_of(pid) - cpu
    count = sum(p.acknowledged for p in publishers) - before
    samples = sorted(sample for p in publishers for sample in p.latencies)
    rss = memory_of(pid)
    for publisher in publishers:
        publisher.end()
        publisher.transport.abort()
    return {
        "rate": count / took,
        "cpu_us": cpu / count * 1e6 if count else None,
        "rss_mib": rss / 2**20,
        "p50_ms": samples[len(samples) // 2] * 1e3 if samples else None,
        "p99_ms": samples[len(samples) * 99 // 100] * 1e3 if samples else None,
    }


def family(pid: int) -> list[psutil.Process]:
    """A process and its children."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def cpu_of(pid: int) -> float:
    """CPU seconds of a server, all its processes."""
    return sum(sum(process.cpu_times()[:2]) for process in family(pid))


def memory_of(pid: int) -> int:
    """Resident bytes of a server's first process, which has the sockets."""
    return int(psutil.Process(pid).memory_info().rss)


# -- the servers ------------------------------------------------------------


class Server(NamedTuple):
    """A server to be measured: how to start it on a port, in a directory."""

    name: str
    synced: bool  # whether a PUBACK means that the message is on the disk
    command: Any  # (directory, port) -> list of arguments


def mosquitto(directory: Path, port: int) -> list[str]:
    config = directory / "mosquitto.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\nmax_inflight_messages 0\n"
    )
    return [find("mosquitto"), "-c", str(config)]


def nats(directory: Path, port: int, *, sync: bool = False) -> list[str]:
    config = directory / "nats.conf"
    always = "sync_interval: always\n" if sync else ""  # from 2.10 on
    config.write_text(
        f"server_name: bench\nport: {free_port()}\njetstream {{\nstore_dir: {directory}/js\n{always}}}\n"
        f"mqtt {{ port: {port}, host: 127.0.0.1, max_ack_pending: 65535 }}\n"
    )
    return [find("nats-server"), "-c", str(config)]


def rabbitmq(directory: Path, port: int) -> list[str]:
    (directory / "enabled_plugins").write_text("[rabbitmq_mqtt].")
    (directory / "rabbitmq.conf").write_text(
        f"listeners.tcp.default = {free_port()}\n"
        f"mqtt.listeners.tcp.default = {port}\nmqtt.allow_anonymous = true\n"
    )
    settings = {
        "RABBITMQ_MNESIA_BASE": directory,
        "RABBITMQ_LOG_BASE": directory,
        "RABBITMQ_NODENAME": f"bench{port}",
        "RABBITMQ_ENABLED_PLUGINS_FILE": directory / "enabled_plugins",
        "RABBITMQ_CONFIG_FILE": directory / "rabbitmq",
    }
    return ["env", *(f"{name}={value}" for name, value in settings.items()), find("rabbitmq-server")]


def amqtt(directory: Path, port: int) -> list[str]:
    code = (
        "import asyncio, logging, uvloop; logging.disable(50)\n"
        "from amqtt.broker import Broker\n"
        "from amqtt.contexts import BrokerConfig, ListenerConfig\n"
        "async def main():\n"
        f"    listeners = {{'default': ListenerConfig(bind='127.0.0.1:{port}')}}\n"
        "    plugins = {'amqtt.plugins.authentication.AnonymousAuthPlugin': {}}\n"
        "    broker = Broker(BrokerConfig(listeners=listeners, plugins=plugins))\n"
        "    await broker.start(); await asyncio.Event().wait()\n"
        "uvloop.run(main())\n"
    )
    return [sys.executable, "-c", code]


def ours(directory: Path, port: int, *, sync: bool) -> list[str]:
    config = directory / "streambridge.toml"
    config.write_text(
        f'[gateway]\nid = "bench"\ndata_dir = "data"\n[mqtt]\nlisten = ["tcp://127.0.0.1:{port}"]\n'
        '[greengrass]\nlisten = ""\n[http]\nlisten = ""\n'
        f'[streams.bench]\ntopics = ["bench/#"]\nflush_on_write = {str(sync).lower()}\n'
        'max_size = "512MiB"\nstrategy_on_full = "OverwriteOldestData"\n'
    )
    return [sys.executable, "-m", "bridge", "run", "-c", str(config)]


SERVERS = [
    Server("streambridge", False, lambda d, p: ours(d, p, sync=False)),
    Server("streambridge, fdatasync", True, lambda d, p: ours(d, p, sync=True)),
    Server("mosquitto, no persistence", False, mosquitto),
    Server("nats jetstream", False, nats),
    Server("nats jetstream, sync always", True, lambda d, p: nats(d, p, sync=True)),
    Server("rabbitmq", True, rabbitmq),
    Server("amqtt alone", False, amqtt),
]
PROGRAMS = {"mosquitto": "mosquitto", "nats": "nats-server", "rabbitmq": "rabbitmq-server"}


def find(program: str) -> str:
    """The path of a program; KeyError if it is not installed."""
    path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")
    if path is None:
        raise KeyError(program)
    return path


def installed(server: Server) -> bool:
    """Whether a server can be started on this machine."""
    program = PROGRAMS.get(server.name.split()[0].rstrip(","))
    if program is None:
        return importlib.util.find_spec(
            server.name.split()[0].replace("streambridge,", "bridge")
        ) is not None or (server.name.startswith("streambridge"))
    with contextlib.suppress(KeyError):
        return bool(find(program))
    return False


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(server: Server, root: Path) -> Any:
    """Start a server and wait until it answers; yields its process id and port."""
    port = free_port()
    with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as name:
        directory = Path(name)
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                server.command(directory, port), stdout=log, stderr=log, cwd=Path(__file__).parents[1],
                start_new_session=True,
            )  # fmt: skip
        try:
            deadline = time.monotonic() + START_TIMEOUT
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    said = (directory / "log").read_text()[-500:]
                    raise RuntimeError(f"{server.name} does not start: {said}")
                time.sleep(0.05)
            yield process.pid, port
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def sync_limit(root: Path, in_flight: int, size: int, seconds: float) -> float:
    """Messages per second if every fdatasync covers all that is in flight."""
    with tempfile.NamedTemporaryFile(dir=root) as file:
        data, count, began = os.urandom(in_flight * (size + 16)), 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            os.write(file.fileno(), data)
            os.fdatasync(file.fileno())
            count += 1
        return in_flight * count / (time.perf_counter() - began)


# -- the report ------------------------------------------------------------


def measure(
    servers: list[Server], root: Path, rounds: int, seconds: float
) -> dict[str, dict[str, list[Any]]]:
    """All rounds: server name -> "4x20 128" -> results."""
    found: dict[str, dict[str, list[Any]]] = {}
    for number in range(rounds):
        for server in list(servers):
            try:
                with serving(server, root) as (pid, port):
                    for (clients, window), size in ((shape, size) for size in SIZES for shape in SHAPES):
                        result = loaded(port, clients, window, size, seconds, pid)
                        found.setdefault(server.name, {}).setdefault(f"{clients}x{window} {size}", []).append(
                            result
                        )
            except RuntimeError as error:
                print(f"left out: {error}", file=sys.stderr)
                servers.remove(server)
            print(f"round {number + 1}/{rounds}: {server.name}", file=sys.stderr, flush=True)
        for (clients, window), size in ((shape, size) for size in SIZES for shape in SHAPES):
            rate = sync_limit(root, clients * window, size, seconds / 2)
            case = f"{clients}x{window} {size}"
            found.setdefault("limit of fdatasync", {}).setdefault(case, []).append({"rate": rate})
    return found


def loaded(*arguments: float) -> dict[str, Any]:
    """Run the load in a process of its own."""
    command = [sys.executable, __file__, "--load", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the load failed: {done.stderr[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def medians(found: dict[str, dict[str, list[Any]]]) -> dict[str, dict[str, dict[str, float]]]:
    """The median of each figure over the rounds."""
    return {
        name: {
            case: {
                key: statistics.median(values)
                for key in results[0]
                if (values := [result[key] for result in results if result[key] is not None])
            }
            for case, results in cases.items()
        }
        for name, cases in found.items()
    }


def table(summary: dict[str, dict[str, dict[str, float]]]) -> str:
    """The medians as Markdown: messages/s, with the ratio to ours, CPU and memory."""
    cases = [f"{clients}x{window} {size}" for size in SIZES for clients, window in SHAPES]
    lines = [
        "| server | "
        + " | ".join(f"{case} B" for case in cases)
        + " | CPU us/msg at 4x200 128 B | RSS MiB |",
        "|---" * (len(cases) + 3) + "|",
    ]
    for name, results in summary.items():
        cells = [f"{results[case]['rate']:,.0f}" if case in results else "" for case in cases]
        loaded = results.get("4x200 128", {})
        rss = max((result.get("rss_mib", 0.0) for result in results.values()), default=0.0)
        cells += [f"{loaded['cpu_us']:.1f}" if "cpu_us" in loaded else "", f"{rss:.0f}" if rss else ""]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for mine in ("streambridge", "streambridge, fdatasync"):
        for name, results in summary.items():
            if mine in summary and name != mine:
                ratios = [
                    summary[mine][case]["rate"] / results[case]["rate"] for case in cases if case in results
                ]
                cells = [f"{ratio:.2f}" for ratio in ratios]
                lines.append(f"| *{mine} / {name}* | " + " | ".join(cells) + " | | |")
    return "\n".join(lines) + "\n"


def draw(summary: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """Bars of the rates, one group for each case."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    cases = [f"{clients}x{window} {size}" for size in SIZES for clients, window in SHAPES]
    figure, axes = plt.subplots(figsize=(12, 5))
    width = 0.8 / len(summary)
    for index, (name, results) in enumerate(summary.items()):
        heights = [results.get(case, {}).get("rate", 0) for case in cases]
        axes.bar([place + index * width for place in range(len(cases))], heights, width, label=name)
    axes.set_yscale("log")
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(cases))], [f"{case} B" for case in cases])
    axes.set_ylabel("acknowledged messages per second (QoS 1)")
    axes.set_xlabel("clients x messages in flight, payload")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the benchmark, or be its load."""
    if sys.argv[1:2] == ["--load"]:
        port, clients, window, size = map(int, sys.argv[2:6])
        print(json.dumps(uvloop.run(load(port, clients, window, size, float(sys.argv[6]), int(sys.argv[7])))))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--dir", type=Path, default=None, help="where servers keep their data (a real disk)")
    parser.add_argument("--only", nargs="*", default=None, help="names of servers")
    arguments = parser.parse_args()
    servers = [s for s in SERVERS if installed(s) and (arguments.only is None or s.name in arguments.only)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    root = arguments.dir or arguments.out
    found = measure(servers, root, arguments.rounds, arguments.seconds)
    summary = medians(found)
    machine = {"cpus": os.cpu_count(), "machine": platform.platform(), "python": platform.python_version()}
    report = {"machine": machine, "seconds": arguments.seconds, "rounds": found, "medians": summary}
    (arguments.out / "ingest.json").write_text(json.dumps(report, indent=1))
    (arguments.out / "ingest.md").write_text(table(summary))
    draw(summary, arguments.out / "ingest.png")
    print(table(summary))


if __name__ == "__main__":
    main()
