"""Operations side by side: appends and reads through each interface, NATS JetStream and Redis Streams.

    python -m benchmarks.operations [--rounds 3] [--messages 20000] [--output DIR]

Interfaces: requests over MQTT (CBOR), the Stream Manager protocol, PUBLISH at QoS 1. Appends are sent one
after another (`window` 1: each waits for its acknowledgement), and with many in flight. Reads repeatedly
fetch 1,000 messages that were appended 1,000 at a time: one request after another, and with four in flight,
like a reader that works through a backlog. Every setting runs in turn for each system, `--rounds` times, in
one run on one machine. The results are medians.

Then the real AWS SDK appends in a loop, to the service and to a server that accepts its frames, stores
nothing and answers at once: that is the limit of the SDK itself. SDK and server have a core each; otherwise
the scheduler chooses, and the ratio is anything from 0.61 to 1.12. A profile shows where the SDK's time goes.

Caveats. All clients are this one Python process, with one connection each. For every system it sends raw
bytes and decodes the replies itself, so no client library is measured: for NATS the payload of each message,
for ours a map with number, time, topic and payload. The NATS consumer acknowledges nothing. A Redis client
asks for messages after the last id, so it cannot send requests ahead. Servers share the machine. No system
syncs before acknowledging. MQTT requests append `window` messages in one request; the others send as many
requests. Appends "1 at a time" vary by a factor of two and more from run to run, for every system: the
scheduler puts client and server on one core or on two.
Writes operations.json, operations.md and operations.png to the output directory, and prints the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import cbor2
import uvloop

from benchmarks import peers
from benchmarks.ingest import pin
from benchmarks.testbed.local import free_port

CHECKOUT = Path(__file__).parents[1]
WINDOWS = (1, 100, 1000)
SIZES = (128, 1024)
BATCH = 1000
AHEAD = (1, 4)
READING = 1.0  # seconds, at least
CONFIG = """
[gateway]
data_dir = "data"
[mqtt]
listen = ["tcp://127.0.0.1:0"]
max_packet = "64MiB"
[greengrass]
listen = "127.0.0.1:0"
[http]
listen = ""
"""


class Service:
    """streambridge run, as a process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "bench.toml").write_text(CONFIG)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bridge", "run", "-c", str(directory / "bench.toml")],
            env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"ready.*listen=(\S+)", line):
                ports = re.findall(r"(?:tcp|mqtt)://127.0.0.1:(\d+)", found[1])
                self.sdk, self.mqtt = (int(port) for port in ports)
                return
        raise SystemExit("the service does not start")

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=30)


class Sdk(peers.Wire):
    """The Stream Manager protocol."""

    def __init__(self, port: int, stream: str) -> None:
        super().__init__(port)
        self.stream = stream
        connect = {"requestId": "c", "protocolVersion": "1.1.0"}
        self.socket.sendall(b"\x01" + self.frame(1, connect))
        assert self.file.read(1) == b"\x01"
        self.reply()
        definition = {"name": stream, "strategyOnFull": 1, "maxSize": 1 << 40}
        self.socket.sendall(self.frame(2, {"requestId": "n", "definition": definition}))
        self.reply()

    @staticmethod
    def frame(op: int, body: dict[str, Any]) -> bytes:
        data = cbor2.dumps(body)
        return struct.pack(">ib", len(data) + 1, op) + data

    def reply(self) -> dict[str, Any]:
        length, _ = struct.unpack(">ib", self.file.read(5))
        body: dict[str, Any] = cbor2.loads(self.file.read(length - 1))
        assert body["status"] == 0, body
        return body

    def append(self, payloads: list[bytes]) -> None:
        self.socket.sendall(
            b"".join(
                self.frame(4, {"requestId": f"{n:036}", "name": self.stream, "payload": payload})
                for n, payload in enumerate(payloads)
            )
        )
        for _ in payloads:
            self.reply()

    def ask(self, start: int, count: int) -> None:
        options = {"desiredStartSequenceNumber": start, "minMessageCount": count}
        body = {"requestId": "r", "streamName": self.stream, "readMessagesOptions": options}
        self.socket.sendall(self.frame(5, body))

    def take(self, count: int) -> int:
        return len(self.reply()["messages"])


class Mqtt(peers.Wire):
    """MQTT 3.1.1: requests, and PUBLISH at QoS 1."""

    def __init__(self, port: int, stream: str) -> None:
        self.connect(port, f"bench-{stream}")
        self.stream = stream
        definition = {"name": stream, "strategyOnFull": 1, "maxSize": 1 << 40}
        self.request(b"createMessageStream", {"definition": definition})
        self.reply()

    def connect(self, port: int, client_id: str) -> None:
        """Connect as a client; its requests go to its own topics."""
        super().__init__(port)
        name = client_id.encode()
        body = b"\0\4MQTT\4\2\0\0" + struct.pack(">H", len(name)) + name
        self.socket.sendall(bytes((0x10, len(body))) + body)
        assert self.file.read(4) == b" \2\0\0"
        self.topic = f"streambridge/{client_id}/".encode()

    @staticmethod
    def packet(head: int, body: bytes) -> bytes:
        length, size = len(body), b""
        while True:
            length, low = divmod(length, 128)
            size += bytes((low | (0x80 if length else 0),))
            if not length:
                return bytes((head,)) + size + body

    def request(self, operation: bytes, body: dict[str, Any]) -> None:
        topic = self.topic + operation
        head = struct.pack(">H", len(topic)) + topic
        self.socket.sendall(self.packet(0x30, head + cbor2.dumps({"requestId": "r", **body})))

    def reply(self) -> dict[str, Any]:
        assert self.file.read(1) == b"0"
        length = shift = 0
        while True:
            byte = self.file.read(1)[0]
            length |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        (topic_length,) = struct.unpack(">H", self.file.read(2))
        self.file.read(topic_length)
        reply: dict[str, Any] = cbor2.loads(self.file.read(length - 2 - topic_length))
        assert reply["status"] == 0, reply
        return reply

    def append(self, payloads: list[bytes]) -> None:
        self.request(b"appendMessages", {"name": self.stream, "payloads": payloads})
        self.reply()

    def publish(self, payloads: list[bytes]) -> None:
        topic = f"streams/{self.stream}".encode()
        head = struct.pack(">H", len(topic)) + topic
        self.socket.sendall(
            b"".join(
                self.packet(0x32, head + struct.pack(">H", n + 1) + payload)
                for n, payload in enumerate(payloads)
            )
        )
        assert self.file.read(4 * len(payloads))[-2:] == struct.pack(">H", len(payloads))

    def ask(self, start: int, count: int) -> None:
        options = {"desiredStartSequenceNumber": start, "minMessageCount": count}
        self.request(b"readMessages", {"streamName": self.stream, "readMessagesOptions": options})

    def take(self, count: int) -> int:
        return len(self.reply()["messages"])


Append = Callable[[list[bytes]], None]


@contextmanager
def systems(
    directory: Path, service: Service, mark: str
) -> Iterator[dict[str, tuple[Append, peers.Wire | None]]]:
    """Each system's append and read, on fresh streams."""
    with ExitStack() as stack:
        sdk = Sdk(service.sdk, f"sdk{mark}")
        mqtt, publisher = Mqtt(service.mqtt, f"mqtt{mark}"), Mqtt(service.mqtt, f"publisher{mark}")
        for client in (sdk, mqtt, publisher):
            stack.callback(client.socket.close)
            stack.callback(client.file.close)
        found: dict[str, tuple[Append, peers.Wire | None]] = {
            "streambridge SDK protocol": (sdk.append, sdk),
            "streambridge MQTT request": (mqtt.append, mqtt),
            "streambridge MQTT PUBLISH": (publisher.publish, None),
        }
        for name, make in (("nats", peers.nats), ("redis", peers.redis)):
            if name in peers.installed():
                home = directory / f"{name}{mark}"
                home.mkdir()
                peer = stack.enter_context(make(home, False))
                found[{"nats": "NATS JetStream", "redis": "Redis Streams"}[name]] = (peer.append, peer)
        yield found


def reads(client: peers.Wire, number: int, ahead: int) -> float:
    """Messages read per second, `ahead` requests under way, over the first `number` again and again."""
    began, got = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < READING:
        for begun, start in enumerate(range(0, number // BATCH * BATCH, BATCH)):
            client.ask(start, BATCH)
            if begun >= ahead - 1:
                got += client.take(BATCH)
        for _ in range(ahead - 1):
            got += client.take(BATCH)
    return got / took


def measure(directory: Path, service: Service, size: int, number: int, mark: str) -> dict[str, Any]:
    """Messages per second: {system: {"append": {window: rate}, "read": {requests under way: rate}}}."""
    payload = os.urandom(size)
    rates: dict[str, Any] = {}
    with systems(directory, service, mark) as found:
        for name in found:
            rates[name] = {"append": {}, "read": {}}
        for window in WINDOWS:
            total = max(window, min(number, 2000 if window == 1 else number))
            for name, (append, _) in found.items():
                began = time.perf_counter()
                for _ in range(0, total, window):
                    append([payload] * window)
                rates[name]["append"][window] = total / (time.perf_counter() - began)
    with systems(directory, service, f"{mark}-read") as found:
        for append, _ in found.values():
            for _ in range(0, number, BATCH):
                append([payload] * BATCH)
        for ahead in AHEAD:
            for name, (_, client) in found.items():
                if client is not None and (ahead == 1 or not isinstance(client, peers.Redis)):
                    rates[name]["read"][ahead] = reads(client, number, ahead)
    return rates


SDK_LOOP = """
import cProfile, json, sys, time, threading
from stream_manager import *
client = StreamManagerClient(port=int(sys.argv[1]))
threads, number = int(sys.argv[2]), int(sys.argv[3])
try:
    client.create_message_stream(MessageStreamDefinition(
        name="real", strategy_on_full=StrategyOnFull.OverwriteOldestData))
except InvalidRequestException:
    pass
def work(number):
    for _ in range(number):
        client.append_message("real", b"x" * 128)
def run(number):
    workers = [threading.Thread(target=work, args=(number // threads,)) for _ in range(threads)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
work(200)
began, cpu = time.perf_counter(), time.process_time()
run(number)
seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
if threads > 1:
    print(json.dumps({"seconds": seconds, "cpu": cpu}))
    sys.exit()
# A profile of the caller's thread and of the thread with the SDK's event loop.
loop = client._StreamManagerClient__loop
profiles = [cProfile.Profile(), cProfile.Profile()]
loop.call_soon_threadsafe(profiles[0].enable)
profiles[1].enable()
work(1000)
profiles[1].disable()
off = threading.Event()
loop.call_soon_threadsafe(lambda: (profiles[0].disable(), off.set()))
off.wait()
names = ("waiting", "sockets", "CBOR", "the SDK's code", "asyncio and threads", "the rest")
stages = dict.fromkeys(names, 0.0)
for profile in profiles:
    for entry in profile.getstats():
        where = entry.code if isinstance(entry.code, str) else entry.code.co_filename
        stage = (
            "waiting" if "'poll'" in where or "'acquire'" in where
            else "sockets" if "socket" in where
            else "CBOR" if "cbor" in where
            else "the SDK's code" if "stream_manager" in where
            else "asyncio and threads" if any(part in where for part in (
                "asyncio", "concurrent", "threading", "selectors", "_thread", "Context"))
            else "the rest")
        stages[stage] += entry.inlinetime
print(json.dumps({"seconds": seconds, "cpu": cpu, "stages": stages}))
"""


class Nothing(asyncio.Protocol):
    """The least that the SDK takes for a Stream Manager: every request succeeds, with the next number."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.buffer, self.number = transport, b"", 0

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.number and self.buffer:
            self.number, self.buffer = 1, self.buffer[1:]
            self.transport.write(b"\x01")
        while len(self.buffer) >= 5:
            length, op = struct.unpack(">ib", self.buffer[:5])
            if len(self.buffer) < 4 + length:
                return
            request = cbor2.loads(self.buffer[5 : 4 + length])
            self.buffer = self.buffer[4 + length :]
            answer = {"requestId": request["requestId"], "status": 0, "sequenceNumber": self.number}
            self.number += 1
            self.transport.write(Sdk.frame({1: 6, 2: 7, 4: 9}[op], answer | {"protocolVersion": "1.1.0"}))


async def answer_at_once(port: int) -> None:
    """Serve the SDK, and store nothing."""
    server = await asyncio.get_running_loop().create_server(Nothing, "127.0.0.1", port)
    await server.serve_forever()


@contextmanager
def apart(*servers: int) -> Iterator[None]:
    """Give the servers the first core, and the processes that this one starts meanwhile the last one."""
    cores = sorted(os.sched_getaffinity(0))
    for pid in servers:
        pin(pid, cores[:1])
    os.sched_setaffinity(0, cores[-1:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        for pid in servers:
            pin(pid, cores)


def real_sdk(service: Service, number: int, rounds: int) -> list[dict[str, Any]] | None:
    """The AWS SDK (as the tests of greengrass install it): appends to the service, and to nothing."""
    homes = sorted((CHECKOUT / ".sdks").glob("stream-manager-*"))
    if not homes:
        print("the AWS SDK is left out: pytest tests/greengrass installs it")
        return None
    port, rows = free_port(), []
    floor = [sys.executable, "-m", "benchmarks.operations", "--answer-at-once", str(port)]
    with peers.server(floor, port) as nothing, apart(service.process.pid, nothing.pid):
        for threads in (1, 16):
            runs: dict[str, list[dict[str, Any]]] = {"streambridge": [], "nothing": []}
            for _ in range(rounds):
                for name, to in (("streambridge", service.sdk), ("nothing", port)):
                    done = subprocess.run(
                        [sys.executable, "-c", SDK_LOOP, str(to), str(threads), str(number)],
                        env={"PYTHONPATH": str(homes[0])},
                        capture_output=True,
                        text=True,
                        check=True,
                    )
                    runs[name].append(json.loads(done.stdout))
            best = {name: min(runs[name], key=lambda run: run["seconds"]) for name in runs}
            rows.append(
                {
                    "threads": threads,
                    "per_second": number / best["streambridge"]["seconds"],
                    "limit_per_second": number / best["nothing"]["seconds"],
                    "sdk_cpu_us": best["streambridge"]["cpu"] / number * 1e6,
                    "stages": best["streambridge"].get("stages"),
                }
            )
    return rows


def main() -> None:
    """Run all of it, or be the server that does nothing."""
    if sys.argv[1:2] == ["--answer-at-once"]:
        uvloop.run(answer_at_once(int(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": platform.platform(), "cpus": os.cpu_count(), "rates": {}}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        service = Service(directory)
        try:
            for size in SIZES:
                rounds = [
                    measure(directory, service, size, given.messages, f"-{size}-{n}")
                    for n in range(given.rounds)
                ]
                result["rates"][size] = {
                    name: {
                        what: {
                            key: statistics.median(r[name][what][key] for r in rounds)
                            for key in rounds[0][name][what]
                        }
                        for what in ("append", "read")
                    }
                    for name in rounds[0]
                }
            result["aws_sdk"] = real_sdk(service, 4_000, given.rounds)
        finally:
            service.stop()
    (given.output / "operations.json").write_text(json.dumps(result, indent=1))
    (given.output / "operations.md").write_text(tables(result))
    draw(result["rates"], given.output / "operations.png")
    print(tables(result))


def tables(result: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    lines = []
    for size, rates in result["rates"].items():
        heads = [f"append, {window} at a time" for window in WINDOWS]
        heads += [f"read {BATCH} at a time, {ahead} under way" for ahead in AHEAD]
        lines += [f"{size} bytes, messages per second:", "", f"| interface | {' | '.join(heads)} |"]
        lines += ["|---" * (len(heads) + 1) + "|"]
        for name, row in rates.items():
            cells = [row["append"][window] for window in WINDOWS] + [row["read"].get(n) for n in AHEAD]
            lines.append(f"| {name} | {' | '.join(f'{cell:,.0f}' if cell else '-' for cell in cells)} |")
        lines.append("")
    if result["aws_sdk"]:
        lines += ["Appends of 128 bytes through the AWS SDK for Python, and its limit:", ""]
        lines += [
            "| threads | appends/s | to a server that does nothing | ratio | CPU µs of the SDK | at work |"
        ]
        lines += ["|---|---|---|---|---|---|"]
        lines += [
            f"| {row['threads']} | {row['per_second']:,.0f} | {row['limit_per_second']:,.0f} | "
            f"{row['per_second'] / row['limit_per_second']:.2f} | {row['sdk_cpu_us']:.0f} | "
            f"{row['sdk_cpu_us'] * row['per_second'] / 1e6:.0%} |"
            for row in result["aws_sdk"]
        ]
        stages = {k: v for k, v in result["aws_sdk"][0]["stages"].items() if k != "waiting"}
        busy = sum(stages.values())
        shares = [f"{name} {seconds / busy:.0%}" for name, seconds in stages.items()]
        lines += ["", f"The SDK's time at work, by its profile: {', '.join(shares)}.", ""]
    return "\n".join(lines)


def draw(rates: dict[int, Any], path: Path) -> None:
    """Bars of reads and of appends, 1,000 at a time."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for place, (title, pick) in enumerate(
        (
            ("append", lambda row: row["append"][BATCH]),
            ("read", lambda row: max(row["read"].values(), default=None)),
        )
    ):
        for offset, (size, rows) in enumerate(rates.items()):
            shown = {name: pick(row) / 1000 for name, row in rows.items() if pick(row)}
            at = [number + 0.4 * offset for number in range(len(shown))]
            axes[place].barh(at, list(shown.values()), 0.38, label=f"{size} bytes")
            axes[place].set_yticks([number + 0.2 for number in range(len(shown))], list(shown))
        axes[place].set_title(f"{title}, {BATCH} at a time")
        axes[place].set_xlabel("thousand messages per second")
        axes[place].invert_yaxis()
        axes[place].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
