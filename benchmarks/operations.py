"""What an operation costs through each door of the running service; beside NATS JetStream and Redis Streams.

    python benchmarks/operations.py [--rounds 3] [--messages 20000] [--output DIR]

Doors: requests over MQTT (CBOR), the Stream Manager protocol, PUBLISH at QoS 1. Appends are sent one
after the other (`window` 1: each waits for its acknowledgement) and with many under way; reads fetch
1,000 messages at a time. Every setting runs in turn for each system, `--rounds` times, in one run on one
machine; medians are kept. Then the real AWS SDK appends in a loop, and is profiled by CPU time: its
own, and the service's. Writes operations.json to the output directory and prints the tables.

Caveats. All clients are this one process in Python, with one connection each; for every system it sends
raw bytes and takes the replies apart, so that no client library is measured. Servers share the machine
with it. Nobody syncs before acknowledging (NATS 2.9 cannot). MQTT requests append `window` messages in
one request; the others send as many requests.
"""

from __future__ import annotations

import argparse
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
import peers

CHECKOUT = Path(__file__).parents[1]
WINDOWS = (1, 100, 1000)
SIZES = (128, 1024)
BATCH = 1000
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

    def cpu(self) -> float:
        """CPU seconds of the service's own process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

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

    def read(self, start: int, count: int) -> int:
        options = {"desiredStartSequenceNumber": start, "minMessageCount": count}
        body = {"requestId": "r", "streamName": self.stream, "readMessagesOptions": options}
        self.socket.sendall(self.frame(5, body))
        return len(self.reply()["messages"])


class Mqtt(peers.Wire):
    """MQTT 3.1.1: requests, and PUBLISH at QoS 1."""

    def __init__(self, port: int, stream: str) -> None:
        super().__init__(port)
        self.stream = stream
        name = f"bench-{stream}".encode()
        body = b"\0\4MQTT\4\2\0\0" + struct.pack(">H", len(name)) + name
        self.socket.sendall(bytes((0x10, len(body))) + body)
        assert self.file.read(4) == b" \2\0\0"
        definition = {"name": stream, "strategyOnFull": 1, "maxSize": 1 << 40}
        self.topic = f"streambridge/bench-{stream}/".encode()
        self.ask(b"createMessageStream", {"definition": definition})

    @staticmethod
    def packet(head: int, body: bytes) -> bytes:
        length, size = len(body), b""
        while True:
            length, low = divmod(length, 128)
            size += bytes((low | (0x80 if length else 0),))
            if not length:
                return bytes((head,)) + size + body

    def ask(self, operation: bytes, body: dict[str, Any]) -> dict[str, Any]:
        topic = self.topic + operation
        head = struct.pack(">H", len(topic)) + topic
        self.socket.sendall(self.packet(0x30, head + cbor2.dumps({"requestId": "r", **body})))
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
        self.ask(b"appendMessages", {"name": self.stream, "payloads": payloads})

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

    def read(self, start: int, count: int) -> int:
        options = {"desiredStartSequenceNumber": start, "minMessageCount": count}
        return len(
            self.ask(b"readMessages", {"streamName": self.stream, "readMessagesOptions": options})["messages"]
        )


Append = Callable[[list[bytes]], None]
Read = Callable[[int, int], int]


@contextmanager
def systems(directory: Path, service: Service, mark: str) -> Iterator[dict[str, tuple[Append, Read | None]]]:
    """Each system's append and read, on fresh streams."""
    with ExitStack() as stack:
        sdk = Sdk(service.sdk, f"sdk{mark}")
        mqtt, lane = Mqtt(service.mqtt, f"mqtt{mark}"), Mqtt(service.mqtt, f"lane{mark}")
        for door in (sdk, mqtt, lane):
            stack.callback(door.socket.close)
            stack.callback(door.file.close)
        found: dict[str, tuple[Append, Read | None]] = {
            "streambridge SDK protocol": (sdk.append, sdk.read),
            "streambridge MQTT request": (mqtt.append, mqtt.read),
            "streambridge MQTT PUBLISH": (lane.publish, None),
        }
        for name, make in (("nats", peers.nats), ("redis", peers.redis)):
            if name in peers.installed():
                home = directory / f"{name}{mark}"
                home.mkdir()
                peer = stack.enter_context(make(home, False))
                found[{"nats": "NATS JetStream", "redis": "Redis Streams"}[name]] = (peer.append, peer.read)
        yield found


def measure(directory: Path, service: Service, size: int, number: int, mark: str) -> dict[str, Any]:
    """Messages per second: {system: {"append": {window: rate}, "read": rate}}."""
    payload = os.urandom(size)
    rates: dict[str, Any] = {}
    with systems(directory, service, mark) as found:
        for name in found:
            rates[name] = {"append": {}}
        for window in WINDOWS:
            total = max(window, min(number, 2000 if window == 1 else number))
            for name, (append, _) in found.items():
                began = time.perf_counter()
                for _ in range(0, total, window):
                    append([payload] * window)
                rates[name]["append"][window] = total / (time.perf_counter() - began)
        for name, (_, read) in found.items():
            if read is None:
                continue
            began = time.perf_counter()
            got = sum(read(start, BATCH) for start in range(0, number // BATCH * BATCH, BATCH))
            rates[name]["read"] = got / (time.perf_counter() - began)
    return rates


SDK_LOOP = """
import json, sys, time, threading
from stream_manager import *
client = StreamManagerClient(port=int(sys.argv[1]))
threads, number = int(sys.argv[2]), int(sys.argv[3])
try:
    client.create_message_stream(MessageStreamDefinition(
        name=sys.argv[4], strategy_on_full=StrategyOnFull.OverwriteOldestData))
except InvalidRequestException:
    pass
def work():
    for _ in range(number // threads):
        client.append_message(sys.argv[4], b"x" * 128)
began, cpu = time.perf_counter(), time.process_time()
workers = [threading.Thread(target=work) for _ in range(threads)]
for worker in workers: worker.start()
for worker in workers: worker.join()
print(json.dumps({"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}))
"""


def real_sdk(service: Service, number: int) -> list[dict[str, Any]] | None:
    """The AWS SDK (as tests/greengrass install it): its rate, and whose CPU time an append takes."""
    homes = sorted((CHECKOUT / ".sdks").glob("stream-manager-*"))
    if not homes:
        return None
    rows = []
    for threads in (1, 16):
        before = service.cpu()
        done = subprocess.run(
            [sys.executable, "-c", SDK_LOOP, str(service.sdk), str(threads), str(number), f"real{threads}"],
            env={"PYTHONPATH": str(homes[0])},
            capture_output=True,
            text=True,
            check=True,
        )
        own = json.loads(done.stdout)
        rows.append(
            {
                "threads": threads,
                "per_second": number / own["seconds"],
                "sdk_cpu_us": own["cpu"] / number * 1e6,
                "service_cpu_us": (service.cpu() - before) / number * 1e6,
            }
        )
    return rows


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--output", type=Path, default=Path())
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
                        "append": {
                            window: statistics.median(r[name]["append"][window] for r in rounds)
                            for window in WINDOWS
                        },
                        "read": statistics.median(r[name]["read"] for r in rounds)
                        if "read" in rounds[0][name]
                        else None,
                    }
                    for name in rounds[0]
                }
            result["aws_sdk"] = real_sdk(service, 5_000)
        finally:
            service.stop()
    (given.output / "operations.json").write_text(json.dumps(result, indent=1))
    print_tables(result)


def print_tables(result: dict[str, Any]) -> None:
    """What was measured, in thousands of messages per second."""
    for size, rates in result["rates"].items():
        heads = "".join(f"{'append ' + str(window):>14}" for window in WINDOWS)
        print(f"\n{size} bytes, 1000 msg/s{heads}{'read ' + str(BATCH):>14}")
        for name, row in rates.items():
            cells = [row["append"][window] for window in WINDOWS] + [row["read"]]
            shown = "".join(f"{cell / 1000:14.1f}" if cell else f"{'-':>14}" for cell in cells)
            print(f"{name:28}{shown}")
    for row in result["aws_sdk"] or []:
        print(
            f"\nAWS SDK, {row['threads']} threads: {row['per_second']:.0f} appends/s; CPU per append: "
            f"SDK {row['sdk_cpu_us']:.0f} us, service {row['service_cpu_us']:.0f} us"
        )


if __name__ == "__main__":
    main()
