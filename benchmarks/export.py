"""Exports: how fast a backlog drains, and what that costs ingest.

    python -m benchmarks.export [--output DIR]

Part 1, drain. A real worker process drains a stream of `--messages` messages of `--size` bytes to local
fakes of Kinesis and S3, each in a separate process. The limit is a bare boto3 loop that sends the same
batches from messages in memory. It does the same encoding (keys; NDJSON and gzip), but does not read files,
check frames or keep positions. It runs in a separate process at the same low priority as the worker (nice
5). The time of the worker includes receiving the export and reporting that it is done, up to 0.3 s. The
fakes answer after a delay, as a service over a link does: none, or the time for a request of 100 kB
(Kinesis, 20 ms) or 800 kB (S3, 200 ms).

Part 2, ingest. A device publishes to `streambridge run` every 2 ms, one message at a time, QoS 1. The time
from PUBLISH to PUBACK is measured twice: with paused backlogs to Kinesis and S3, and while both drain. Part
1 determines a size for the backlogs that lasts until the end.

Rounds alternate, and the results are medians. Everything runs on one machine: compare ratios, not rates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bridge.export.settings import ExportSettings
from bridge.export.supervisor import ExportSupervisor, highest_exported
from bridge.model import MIB
from bridge.operations.manager import StreamManager
from bridge.plugin.aws import AwsSettings, client
from bridge.plugin.discovery import load
from bridge.streams.reader import list_streams
from bridge.streams.store import StreamStore

SEGMENT = 16 * MIB


def serve(listener: socket.socket, wait: float) -> None:
    """A service that takes everything: reads a request, waits, answers that all is well."""

    os.nice(10)  # a service is elsewhere: it is not to compete with those who are measured

    def talk(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = bytearray()
        while True:
            while (end := data.find(b"\r\n\r\n")) < 0:
                if not (part := connection.recv(1 << 20)):
                    return
                data += part
            head = bytes(data[:end]).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if b"100-continue" in head:
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            missing = end + 4 + length - len(data)
            count = data.count(b'"PartitionKey"')
            while missing > 0:
                part = connection.recv(min(missing, 1 << 20))
                count += part.count(b'"PartitionKey"')
                missing -= len(part)
                data += part
            time.sleep(wait)
            body = b"<ListBucketResult/>" if b"list-type=2" in head else b""
            if b"x-amz-target" in head:
                count = data.count(b'"PartitionKey"')
                one = b'{"SequenceNumber":"1","ShardId":"s"}'
                body = b'{"FailedRecordCount":0,"Records":[' + b",".join([one] * count) + b"]}"
            connection.sendall(
                b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: %d\r\n\r\n' % len(body) + body
            )
            del data[: end + 4 + length]

    while True:
        threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()


@contextmanager
def service(wait_ms: float) -> Iterator[str]:
    """The fake in a process of its own; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = multiprocessing.get_context("fork").Process(
            target=serve, args=(listener, wait_ms / 1000), daemon=True
        )
        process.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.kill()
            process.join()


def payloads(count: int, size: int) -> list[bytes]:
    """Readings as a machine sends them, of about `size` bytes; numbers do not compress away."""
    chance = random.Random(7)
    rows = []
    for n in range(count):
        row = f'{{"n": {n}, "device": "press-{n % 40}", "state": "run"'
        while len(row) < size - 20:
            row += f', "t{len(row)}": {chance.gauss(40, 9):.4f}'
        rows.append((row + "}").encode())
    return rows


def cpu_seconds(pid: int | None) -> float:
    """CPU time of a process so far: what a busy machine does not distort."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bare_kinesis(url: str, rows: list[bytes]) -> Callable[[], None]:
    """PutRecords of 500 from memory, one after the other: what is to be timed, with all else made ready."""
    kinesis = client(AwsSettings(), "kinesis", endpoint_url=url)
    kinesis.put_records(StreamName="s", Records=[{"Data": b"warm", "PartitionKey": "k"}])

    def send() -> None:
        for n in range(0, len(rows), 500):
            records = [{"Data": row, "PartitionKey": os.urandom(8).hex()} for row in rows[n : n + 500]]
            kinesis.put_records(StreamName="s", Records=records)

    return send


def bare_s3(url: str, rows: list[bytes]) -> Callable[[], None]:
    """The same objects from memory, encoded as the exporter does."""
    from bridge import Batch, Record

    encode = load().exporters["s3"].__init__.__globals__["_ndjson"]()[0]
    s3 = client(AwsSettings(), "s3", endpoint_url=url, s3={"addressing_style": "path"})
    s3.put_object(Bucket="bbb", Key="warm", Body=b"x")
    records = [Record(n, 1_700_000_000_000, "streams/plant", row) for n, row in enumerate(rows)]
    per_object = 5 * MIB // (len(rows[0]) + len("streams/plant"))

    def send() -> None:
        for n in range(0, len(rows), per_object):
            part = records[n : n + per_object]
            body, _ = encode(Batch("gw", "plant", 1, n, n + len(part) - 1, part))
            s3.put_object(Bucket="bbb", Key=f"k/{n}", Body=body)

    return send


Loop = Callable[[str, list[bytes]], Callable[[], None]]


def apart(loop: Loop, url: str, rows: list[bytes]) -> tuple[float, float]:
    """A bare loop in a process of its own; seconds, and CPU seconds."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def run() -> None:
        os.nice(5)
        send = loop(url, rows)
        began, cpu = time.perf_counter(), time.process_time()
        send()
        theirs.send((time.perf_counter() - began, time.process_time() - cpu))

    process = context.Process(target=run)
    process.start()
    found: tuple[float, float] = ours.recv()
    process.join()
    return found


class Gateway:
    """A store and a supervisor, without front ends."""

    def __init__(self, root: Path, threads: int) -> None:
        data_dir = root / "data"
        self.store = StreamStore(
            data_dir,
            root / "memory",
            on_event=print,
            floor=lambda name, epoch: highest_exported(data_dir, name, epoch) + 1,
        )
        self.exports = ExportSupervisor(
            data_dir,
            gateway="gw",
            export=ExportSettings(threads=threads, plugin_dirs=[]),
            aws=AwsSettings(),
            append_status=lambda name, payload: None,
            clock=self.store.clock,
        )
        self.manager = StreamManager(self.store, load(), self.exports)

    def define(self, name: str, exports: dict[str, Any], *, update: bool = False) -> None:
        definition = {"name": name, "strategyOnFull": 0, "maxSize": 64 << 30, "streamSegmentSize": SEGMENT}
        act = self.manager.update if update else self.manager.create
        act({**definition, "exportDefinition": exports})

    async def fill(self, name: str, rows: list[bytes]) -> None:
        for n in range(0, len(rows), 200):  # as many clients' messages form a commit group
            await self.manager.append_all(name, rows[n : n + 200])

    async def drained(self, names: list[str], last: int) -> int:
        """Wait until the exports of these streams are done; the worker's largest RSS meanwhile."""
        largest = 0
        while True:
            statuses = [status for name in names for status in self.exports.statuses(name)]
            if all(status.last_exported_sequence_number >= last for status in statuses):
                return largest
            await asyncio.sleep(0.02)
            largest = max(largest, self.exports.memory)

    async def close(self) -> None:
        await self.exports.stop(5)
        await self.store.close()


def config(kind: str, url: str) -> dict[str, Any]:
    if kind == "kinesis":
        return {kind: [{"identifier": "x", "kinesisStreamName": "s", "endpointUrl": url}]}
    return {kind: [{"identifier": "x", "bucket": "bbb", "endpointUrl": url, "timeHintMillis": 1}]}


async def drain(kind: str, url: str, rows: list[bytes], threads: int) -> tuple[float, float, int]:
    """Fill a stream per thread, then drain them; seconds, CPU seconds, and the worker's largest RSS."""
    with tempfile.TemporaryDirectory() as root:
        gateway = Gateway(Path(root), threads)
        names = [f"s{n}" for n in range(threads)]
        share = rows[: len(rows) // threads]
        for name in names:
            gateway.define(name, {})
            await gateway.fill(name, share)
        gateway.define("warm", config(kind, url))
        await gateway.exports.start()
        await gateway.manager.append("warm", b"x")
        await gateway.drained(["warm"], 0)
        began, cpu = time.perf_counter(), cpu_seconds(gateway.exports.pid)
        for name in names:
            gateway.define(name, config(kind, url), update=True)
        largest = await gateway.drained(names, len(share) - 1)
        took, cpu = time.perf_counter() - began, cpu_seconds(gateway.exports.pid) - cpu
        await gateway.close()
        return took, cpu, largest


SERVICE = """
[gateway]
id = "bench"
data_dir = "data"
[mqtt]
listen = ["tcp://127.0.0.1:0"]
[greengrass]
listen = ""
[http]
listen = ""
[export]
plugin_dirs = []
[streams.live]
topics = ["live"]
"""


async def backlogs(
    root: Path, urls: dict[str, str], rows: list[bytes], times: dict[str, int], *, paused: bool
) -> None:
    """A data directory with a stream for each service, full of what is to be exported."""
    gateway = Gateway(root, 1)
    for kind, url in urls.items():
        exports = config(kind, url)
        exports[kind][0]["disabled"] = paused
        gateway.define(kind, exports)
        for _ in range(times[kind]):
            await gateway.fill(kind, rows)
    await gateway.close()


def latency(
    urls: dict[str, str], rows: list[bytes], times: dict[str, int], seconds: float, *, paused: bool
) -> list[float]:
    """Seconds from PUBLISH to PUBACK of messages that come every 2 ms; a backlog is `rows` so many times."""
    packet = b"\x32\x88\x01\0\4live\0\1" + b"x" * 128
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        asyncio.run(backlogs(root, urls, rows, times, paused=paused))
        (root / "bench.toml").write_text(SERVICE, encoding="utf-8")
        command = [sys.executable, "-m", "bridge", "run", "-c", str(root / "bench.toml")]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        ready = next(
            found for line in process.stderr if (found := re.search(r"ready.*127.0.0.1:(\d+)", line))
        )
        took = []
        with socket.create_connection(("127.0.0.1", int(ready[1]))) as device:
            device.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            device.sendall(b"\x10\x10\0\4MQTT\4\2\0\0\0\4load")
            device.recv(4)
            time.sleep(1)  # both processes have started in full
            end = time.perf_counter() + seconds
            while (began := time.perf_counter()) < end:
                device.sendall(packet)
                device.recv(4)
                took.append(time.perf_counter() - began)
                time.sleep(0.002)
        process.terminate()
        process.communicate()
        streams = {meta.name: meta.epoch for meta in list_streams(root / "data")}
        reached = {kind: highest_exported(root / "data", kind, streams[kind]) for kind in urls}
        if not paused and not all(0 <= at < len(rows) * times[kind] - 1 for kind, at in reached.items()):
            raise SystemExit(f"the backlogs did not drain all the time, but up to {reached}")
        return took


def of(latencies: list[float]) -> dict[str, float]:
    """What is reported of latencies."""
    latencies.sort()
    return {
        f"p{share}_ms": round(latencies[int(len(latencies) * share / 100)] * 1000, 3)
        for share in (50, 90, 99)
    } | {"messages": len(latencies)}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each latency round")
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    options = parser.parse_args()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.setdefault(name, "benchmark")
    rows = payloads(options.messages, options.size)
    results: list[dict[str, Any]] = []
    for kind, loop, waits in (("kinesis", bare_kinesis, (0, 20)), ("s3", bare_s3, (0, 200))):
        for wait in waits:
            with service(wait) as url:
                rounds = [measure(kind, loop, url, rows) for _ in range(options.rounds)]
            limit, limit_cpu, one, cpu, two, memory = map(statistics.median, zip(*rounds, strict=True))
            results.append(
                {
                    "service": kind,
                    "wait_ms": wait,
                    "messages": len(rows),
                    "bare_per_s": round(len(rows) / limit),
                    "one_thread_per_s": round(len(rows) / one),
                    "two_threads_per_s": round(len(rows) / two),
                    "of_the_bare_loop": round(limit / one, 2),
                    "bare_cpu_over_ours": round(limit_cpu / cpu, 2),
                    "two_over_one": round(one / two, 2),
                    "worker_rss_mib": int(memory) >> 20,
                }
            )
            print(json.dumps(results[-1]), flush=True)
    quiet: list[float] = []
    busy: list[float] = []
    with service(20) as kinesis, service(200) as s3:
        urls = {"kinesis": kinesis, "s3": s3}
        fastest = {row["service"]: row["one_thread_per_s"] for row in results if row["wait_ms"]}
        times = {kind: 1 + int(fastest[kind] * 1.5 * options.seconds / len(rows)) for kind in urls}
        for _ in range(options.rounds):
            quiet += latency(urls, rows, times, options.seconds, paused=True)
            busy += latency(urls, rows, times, options.seconds, paused=False)
    found = {"without_exports": of(quiet), "while_draining": of(busy)}
    ratio = found["while_draining"]["p99_ms"] / found["without_exports"]["p99_ms"]
    results.append({"publish_to_puback": found, "p99_ratio": round(ratio, 2)})
    print(json.dumps(results[-1]))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "export.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.output / "export.md").write_text(tables(results[:-1], found, ratio))
    draw(results[:-1], options.output / "export.png")


def tables(drains: list[dict[str, Any]], latency: dict[str, dict[str, float]], ratio: float) -> str:
    """What was measured, as Markdown."""
    lines = [
        "Messages per second; rate and CPU time of one thread compared with the bare loop:\n",
        "| service, answering after | bare loop | one thread | of the loop | its CPU / ours | two threads |"
        " two / one | worker, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['service']}, {row['wait_ms']} ms | {row['bare_per_s']:,} | {row['one_thread_per_s']:,} | "
        f"{row['of_the_bare_loop']:.2f} | {row['bare_cpu_over_ours']:.2f} | {row['two_threads_per_s']:,} | "
        f"{row['two_over_one']:.2f} | {row['worker_rss_mib']} |"
        for row in drains
    ]
    lines += ["", f"PUBLISH to PUBACK while a backlog drains (p99: {ratio:.2f} times as long):", ""]
    columns = list(next(iter(latency.values())))
    lines += ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in latency.items():
        lines.append(
            f"| {name.replace('_', ' ')} | " + " | ".join(f"{row[key]:,.6g}" for key in columns) + " |"
        )
    return "\n".join(lines) + "\n"


def draw(drains: list[dict[str, Any]], path: Path) -> None:
    """Bars of the rates."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 3.5), layout="constrained")
    for place, key in enumerate(("bare_per_s", "one_thread_per_s", "two_threads_per_s")):
        heights = [row[key] for row in drains]
        axes.bar(
            [n + place * 0.27 for n in range(len(drains))], heights, 0.25, label=key[:-6].replace("_", " ")
        )
    axes.set_xticks(
        [n + 0.27 for n in range(len(drains))], [f"{row['service']}, {row['wait_ms']} ms" for row in drains]
    )
    axes.set_ylabel("messages per second")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def measure(kind: str, loop: Loop, url: str, rows: list[bytes]) -> tuple[float, ...]:
    """One round: the limit and its CPU, one thread and its CPU, two threads, the worker's memory."""
    limit, limit_cpu = apart(loop, url, rows)
    one, cpu, memory = asyncio.run(drain(kind, url, rows, 1))
    two, _, _ = asyncio.run(drain(kind, url, rows, 2))
    return limit, limit_cpu, one, cpu, two, memory


if __name__ == "__main__":
    main()
