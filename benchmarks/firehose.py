"""Puts of records through the API of Data Firehose: streambridge, moto, and a server that stores nothing.

    python -m benchmarks.firehose [--rounds 3] [--seconds 5] [--output DIR]

Records of 128 bytes, 500 in a request (PutRecordBatch) or one (PutRecord), in two ways:

* two producers with boto3, each in a process of its own, one request after the other: what a program gets
* four connections on which one process sends signed requests that it has made before, each after the answer
  to the one before it: what the server takes

The server that stores nothing is uvloop and h11: it decodes the JSON and the base64 of each request, checks
no signature, and answers with ids. It is the limit of any such server in Python. moto stores the records of a
request as an object in its own memory, and gets boto3 only. Every setting runs in turn for each system,
`--rounds` times, in one run on one machine; results are medians.

Caveats. Clients and servers share the machine. streambridge has an S3 export whose destination is away.
moto checks no signature.
Writes firehose.json and firehose.md to the output directory, and prints the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import boto3
import h11
import msgspec
import psutil
import uvloop
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from benchmarks.testbed.local import free_port

ROOT = Path(__file__).resolve().parents[1]
KEY, SECRET, REGION = "AKIAPLANT7", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "eu-central-1"
SIZE, PRODUCERS, CONNECTIONS = 128, 2, 4
BATCHES = (500, 1)
DESTINATION = {
    "RoleARN": "arn:aws:iam::123456789012:role/delivery",
    "BucketARN": "arn:aws:s3:::bucket",
    "BufferingHints": {"SizeInMBs": 128, "IntervalInSeconds": 900},
}
SYSTEMS = ("stores nothing", "streambridge", "with flush_on_write", "moto")
CONFIG = """
[gateway]
data_dir = "data"
memory_dir = "memory"
[mqtt]
listen = ["tcp://127.0.0.1:0"]
[greengrass]
listen = ""
[http]
listen = ""
[firehose]
listen = "127.0.0.1:{port}"
access_keys_file = "keys"
max_size = "16GiB"
flush_on_write = {flush}
[aws]
region = "eu-central-1"
endpoint_url = "http://127.0.0.1:9"
"""


# -- the server that stores nothing ------------------------------------------------------------


class Record(msgspec.Struct, rename="pascal"):
    data: bytes


class Put(msgspec.Struct, rename="pascal"):
    records: list[Record] = []


class Bare(asyncio.Protocol):
    """Decodes each request, and answers with ids."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self._http = cast("asyncio.Transport", transport), h11.Connection(h11.SERVER)
        self._target, self._body = "", bytearray()

    def data_received(self, data: bytes) -> None:
        self._http.receive_data(data)
        while (event := self._http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Request):
                self._target, self._body = dict(event.headers).get(b"x-amz-target", b"").decode(), bytearray()
            elif isinstance(event, h11.Data):
                self._body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self._answer()
            else:
                return

    def _answer(self) -> None:
        records = msgspec.json.decode(self._body, type=Put).records
        if self._target.endswith("Batch"):
            entries = [{"RecordId": f"1795000000000-{n}"} for n in range(len(records))]
            body = msgspec.json.encode({"FailedPutCount": 0, "RequestResponses": entries})
        else:
            body = msgspec.json.encode({"RecordId": "1795000000000-1"})
        headers = [
            ("Content-Type", "application/x-amz-json-1.1"),
            ("Content-Length", str(len(body))),
            ("x-amzn-RequestId", "1"),
        ]
        send = self._http.send
        self.transport.write(
            send(h11.Response(status_code=200, headers=headers))
            + send(h11.Data(data=body))
            + send(h11.EndOfMessage())
        )
        self._http.start_next_cycle()


async def bare(port: int) -> None:
    """Serve until it is killed."""
    server = await asyncio.get_running_loop().create_server(Bare, "127.0.0.1", port)
    await server.serve_forever()


# -- servers ------------------------------------------------------------


@contextlib.contextmanager
def serving(system: str) -> Iterator[tuple[int, psutil.Process]]:
    """A server on a port, with the delivery stream `plant`."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        if system == "stores nothing":
            command = ["-m", "benchmarks.firehose", "--bare", str(port)]
        elif system == "moto":
            command = ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        else:
            flush = "true" if "flush" in system else "false"
            config = Path(directory) / "streambridge.toml"
            config.write_text(CONFIG.format(port=port, flush=flush))
            (Path(directory) / "keys").write_text(f"{KEY} {SECRET}\n")
            (Path(directory) / "keys").chmod(0o600)
            command = ["-m", "bridge", "run", "-c", str(config)]
        env = {**os.environ, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait(port, process)
            if system != "stores nothing":
                client = _client(port)
                if system == "moto":
                    _client(port, "s3").create_bucket(
                        Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": REGION}
                    )
                client.create_delivery_stream(
                    DeliveryStreamName="plant", ExtendedS3DestinationConfiguration=DESTINATION
                )
            yield port, psutil.Process(process.pid)
        finally:
            process.kill()
            process.wait()


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    import socket

    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise SystemExit("a server does not start")


def _client(port: int, service: str = "firehose") -> Any:
    return boto3.client(
        service,
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name=REGION,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
    )


# -- clients ------------------------------------------------------------


def produce(port: int, batch: int, seconds: float, results: Any) -> None:
    """A producer with boto3: puts until the time is over."""
    client = _client(port)
    records = [{"Data": os.urandom(SIZE)} for _ in range(batch)]

    def put() -> None:
        if batch == 1:
            client.put_record(DeliveryStreamName="plant", Record=records[0])
        else:
            answer = client.put_record_batch(DeliveryStreamName="plant", Records=records)
            assert answer["FailedPutCount"] == 0

    put()
    began, count = time.monotonic(), 0
    while (now := time.monotonic() - began) < seconds:
        put()
        count += batch
    results.put(count / now)


def with_boto3(port: int, batch: int, seconds: float) -> float:
    """Records per second of all producers together."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    producers = [
        context.Process(target=produce, args=(port, batch, seconds, results)) for _ in range(PRODUCERS)
    ]
    for producer in producers:
        producer.start()
    rates = [results.get(timeout=seconds + 120) for _ in producers]
    for producer in producers:
        producer.join()
    return sum(rates)


def request(port: int, batch: int) -> bytes:
    """A signed request."""
    records = [{"Data": base64.b64encode(os.urandom(SIZE)).decode()} for _ in range(batch)]
    operation = "PutRecordBatch" if batch > 1 else "PutRecord"
    content = {"Records": records} if batch > 1 else {"Record": records[0]}
    body = json.dumps({"DeliveryStreamName": "plant", **content}).encode()
    made = AWSRequest(
        "POST",
        f"http://127.0.0.1:{port}/",
        {
            "Content-Type": "application/x-amz-json-1.1",
            "X-Amz-Target": f"Firehose_20150804.{operation}",
            "Host": f"127.0.0.1:{port}",
        },
        body,
    )
    SigV4Auth(Credentials(KEY, SECRET), "firehose", REGION).add_auth(made)
    head = "".join(f"{name}: {value}\r\n" for name, value in made.headers.items())
    return f"POST / HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _replay(port: int, sent: bytes, until: float) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024 * 1024)
    count = 0
    while time.monotonic() < until:
        writer.write(sent)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(length)
        count += 1
    writer.close()
    return count


async def _replayed(port: int, batch: int, seconds: float) -> float:
    sent = request(port, batch)
    began = time.monotonic()
    counts = await asyncio.gather(*(_replay(port, sent, began + seconds) for _ in range(CONNECTIONS)))
    return sum(counts) * batch / (time.monotonic() - began)


def replayed(port: int, batch: int, seconds: float) -> float:
    """Records per second of all connections together."""
    return uvloop.run(_replayed(port, batch, seconds))


WAYS = {"boto3": with_boto3, "signed before": replayed}


def measure(rounds: int, seconds: float) -> list[dict[str, Any]]:
    """A row for each way, size of request and system."""
    found: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for system in SYSTEMS:
            with serving(system) as (port, process):
                for way, run in WAYS.items():
                    if (system, way) == ("moto", "signed before"):
                        continue
                    for batch in BATCHES:
                        before, began = sum(process.cpu_times()[:2]), time.monotonic()
                        rate = run(port, batch, seconds)
                        used = sum(process.cpu_times()[:2]) - before
                        done = rate * min(seconds, time.monotonic() - began)
                        found.setdefault((way, batch, system), []).append((rate, used / done * 1e6))
    return [
        {
            "clients": way,
            "batch": batch,
            "system": system,
            "rate": statistics.median(rate for rate, _ in runs),
            "cpu": statistics.median(cpu for _, cpu in runs),
            "runs": runs,
        }
        for (way, batch, system), runs in found.items()
    ]


def tables(rows: list[dict[str, Any]]) -> str:
    """Records per second, and beside it the share of what the server that stores nothing takes."""
    parts = []
    for way in WAYS:
        head = "| records in a request | " + " | ".join(SYSTEMS) + " |\n|---" + "|---" * len(SYSTEMS) + "|"
        lines = []
        for batch in BATCHES:
            here = {row["system"]: row for row in rows if (row["clients"], row["batch"]) == (way, batch)}
            bound = here[SYSTEMS[0]]["rate"]
            cells = [
                f"{row['rate']:,.0f} ({row['rate'] / bound:.2f}; {row['cpu']:,.1f} us)"
                if row is not None
                else "not measured"
                for row in (here.get(system) for system in SYSTEMS)
            ]
            lines.append(f"| {batch} | " + " | ".join(cells) + " |")
        clients = f"{PRODUCERS} producers with boto3" if way == "boto3" else f"{CONNECTIONS} connections"
        parts.append(
            f"Records per second, {clients} (share of the first column; CPU of the server per record)\n\n"
            + "\n".join([head, *lines])
        )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure, print and write."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmark-output")
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        uvloop.run(bare(options.bare))
        return
    options.output.mkdir(parents=True, exist_ok=True)
    rows = measure(options.rounds, options.seconds)
    text = tables(rows)
    (options.output / "firehose.json").write_text(json.dumps(rows, indent=1))
    (options.output / "firehose.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
