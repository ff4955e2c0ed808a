"""How fast a backlog drains, and what that costs ingest: `python benchmarks/export.py [--json FILE]`.

Part 1, drain. A stream of `--messages` messages of `--size` bytes is drained by a real worker process
to local fakes of Kinesis and S3, each in a process of its own. The limit is a bare boto3 loop that
sends the very same batches from memory. The fakes answer after `--wait` ms, as a service over a link
does: with 0 the CPU is the limit, and on two cores the fake shares it with us.

Part 2, ingest. Appends are timed (append to commit, group by group) without exports and while the
backlog drains.

Caveats: everything runs on one machine; read ratios, not rates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bridge.aws import AwsSettings, client
from bridge.export.settings import ExportSettings
from bridge.export.supervisor import ExportSupervisor, highest_exported
from bridge.manager import StreamManager
from bridge.model import MIB
from bridge.plugins import load
from bridge.streams.store import Store

SEGMENT = 16 * MIB


def serve(listener: socket.socket, wait: float) -> None:
    """A service that takes everything: reads a request, waits, answers that all is well."""

    def talk(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = bytearray()
        while True:
            while (end := data.find(b"\r\n\r\n")) < 0:
                if not (part := connection.recv(1 << 20)):
                    return
                data += part
            head = bytes(data[:end]).lower()
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
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
            body = b""
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


def bare_kinesis(url: str, rows: list[bytes]) -> float:
    """PutRecords of 500 from memory, one after the other; seconds."""
    kinesis = client(AwsSettings(), "kinesis", endpoint_url=url)
    kinesis.put_records(StreamName="s", Records=[{"Data": b"warm", "PartitionKey": "k"}])
    began = time.perf_counter()
    for n in range(0, len(rows), 500):
        records = [{"Data": row, "PartitionKey": os.urandom(8).hex()} for row in rows[n : n + 500]]
        kinesis.put_records(StreamName="s", Records=records)
    return time.perf_counter() - began


def bare_s3(url: str, rows: list[bytes]) -> float:
    """The same objects from memory, encoded as the exporter does; seconds."""
    from bridge import Batch, Record

    encode = load().exporters["s3"].__init__.__globals__["_ndjson"]()[0]
    s3 = client(AwsSettings(), "s3", endpoint_url=url, s3={"addressing_style": "path"})
    s3.put_object(Bucket="bbb", Key="warm", Body=b"x")
    records = [Record(n, 1_700_000_000_000, "streams/plant", row) for n, row in enumerate(rows)]
    per_object = 5 * MIB // (len(rows[0]) + len("streams/plant"))
    began = time.perf_counter()
    for n in range(0, len(rows), per_object):
        part = records[n : n + per_object]
        body = encode(Batch("gw", "plant", 1, n, n + len(part) - 1, part))
        s3.put_object(Bucket="bbb", Key=f"k/{n}", Body=body)
    return time.perf_counter() - began


class Gateway:
    """A store and a supervisor, without front ends."""

    def __init__(self, root: Path, threads: int) -> None:
        data_dir = root / "data"
        self.store = Store(
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


async def latency(rows: list[bytes], url: str | None, seconds: float) -> dict[str, float]:
    """Latency of appends in groups of 10, 500 a second, while a backlog drains if there is a URL."""
    with tempfile.TemporaryDirectory() as root:
        gateway = Gateway(Path(root), 2)
        gateway.define("live", {})
        gateway.define("backlog", {})
        await gateway.fill("backlog", rows)
        await gateway.exports.start()
        if url is not None:
            gateway.define("backlog", config("kinesis", url), update=True)
        took, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            began = time.perf_counter()
            await gateway.manager.append_all("live", [b"x" * 128] * 10)
            took.append(time.perf_counter() - began)
            await asyncio.sleep(0.02)
        if url is not None and gateway.exports.statuses("backlog")[0].last_exported_sequence_number < 0:
            raise SystemExit("nothing was exported meanwhile")
        await gateway.close()
        took.sort()
        return {
            "p50_ms": statistics.median(took) * 1000,
            "p99_ms": took[int(len(took) * 0.99)] * 1000,
            "appends": len(took),
        }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=200)
    parser.add_argument("--wait", type=float, default=20.0, help="ms that the services take to answer")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each latency run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.setdefault(name, "benchmark")
    rows = payloads(options.messages, options.size)
    results: list[dict[str, Any]] = []
    bare: dict[str, Callable[[str, list[bytes]], float]] = {"kinesis": bare_kinesis, "s3": bare_s3}
    for kind, loop in bare.items():
        for wait in (0.0, options.wait):
            with service(wait) as url:
                limit_cpu = -time.process_time()
                limit = loop(url, rows)
                limit_cpu += time.process_time()
                one, cpu, memory = asyncio.run(drain(kind, url, rows, 1))
                two, _, _ = asyncio.run(drain(kind, url, rows, 2))
            result = {
                "service": kind,
                "wait_ms": wait,
                "bare_per_s": round(len(rows) / limit),
                "one_thread_per_s": round(len(rows) / one),
                "two_threads_per_s": round(len(rows) / two),
                "of_the_bare_loop": round(limit / one, 2),
                "bare_cpu_over_ours": round(limit_cpu / cpu, 2),
                "two_over_one": round(one / two, 2),
                "worker_rss_mib": memory >> 20,
            }
            results.append(result)
            print(json.dumps(result), flush=True)
    with service(options.wait) as url:
        quiet = asyncio.run(latency(rows, None, options.seconds))
        busy = asyncio.run(latency(rows, url, options.seconds))
    result = {
        "ingest": {"without_exports": quiet, "while_draining": busy},
        "p99_ratio": round(busy["p99_ms"] / quiet["p99_ms"], 2),
    }
    results.append(result)
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
