"""The parts of the demo: S3 stand-in, bridge, devices, and the counters that it reads while they run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import boto3
from readings import present

from bridge.objectkeys import parse_key
from bridge.streams.reader import StreamReader, list_streams

HERE = Path(__file__).parent
BUCKET = "demo"
PREFIX = "landing"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "demo",
    "AWS_SECRET_ACCESS_KEY": "demo",
    "AWS_DEFAULT_REGION": "eu-west-1",
}

CONFIG = """\
[gateway]
id = "this-machine"
data_dir = "data"
memory_dir = "memory"

[mqtt]
listen = ["tcp://127.0.0.1:{mqtt}"]

[greengrass]
listen = ""

[http]
listen = ""
"""

STREAM = """
[streams.{name}]
topics = [{topics}]
flush_on_write = {flush}

[[streams.{name}.export.s3]]
identifier = "landing"
bucket = "{bucket}"
prefix = "{prefix}"
endpoint_url = "{endpoint}"
time_hint_millis = 2000
report_interval_millis = 1000
"""

STREAMS = {
    "processor": (["machine/cpu/#", "machine/load", "machine/scheduler"], True),
    "memory": (["machine/memory/#"], False),
    "input-output": (["machine/disk/#", "machine/network/#", "machine/temperature/#"], False),
}


def free_port() -> int:
    """A TCP port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: str, done: Callable[[], bool], seconds: float) -> None:
    """Poll until `done`; raises a TimeoutError that names `what`."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.05)


def connects(port: int) -> bool:
    """Whether there is a listener."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Storage:
    """moto's server as S3."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self.client: Any = boto3.client("s3", endpoint_url=self.endpoint)
        self.client.create_bucket(
            Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": CREDENTIALS["AWS_DEFAULT_REGION"]}
        )

    def exported(self) -> int:
        """How many messages the objects hold, according to their names."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=PREFIX)
        keys = {item["Key"]: parse_key(item["Key"]) for page in pages for item in page.get("Contents", ())}
        return sum(key.last - key.first + 1 for key in keys.values() if key is not None)


@contextmanager
def storage(output: Path) -> Iterator[Storage]:
    """Run the stand-in for the duration of the block."""
    port = free_port()
    with (output / "s3.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
        )
    try:
        wait_for("the S3 stand-in", lambda: connects(port), 60)
        yield Storage(port)
    finally:
        server.kill()
        server.wait()


class Bridge:
    """The service, started and killed as a separate process."""

    def __init__(self, output: Path, endpoint: str) -> None:
        self.port, self.output = free_port(), output
        self.config = output / "streambridge.toml"
        text = CONFIG.format(mqtt=self.port)
        for name, (topics, flush) in STREAMS.items():
            text += STREAM.format(
                name=name,
                topics=", ".join(f'"{topic}"' for topic in topics),
                flush=str(flush).lower(),
                bucket=BUCKET,
                prefix=PREFIX,
                endpoint=endpoint,
            )
        self.config.write_text(text)
        self._readers: dict[str, StreamReader] = {}

    def start(self) -> float:
        """Start it; returns the seconds until it accepted connections."""
        began = time.monotonic()
        with (self.output / "bridge.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bridge", "run", "-c", str(self.config)], stderr=log
            )
        wait_for("the bridge", lambda: connects(self.port) or self.process.poll() is not None, 60)
        if self.process.poll() is not None:
            raise RuntimeError(f"the bridge did not start; see {self.output / 'bridge.log'}")
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL: no chance to finish anything."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def stored(self) -> int:
        """How many messages its streams hold, read from their files while the service runs."""
        total = 0
        for stream in list_streams(self.output / "data"):
            reader = self._readers.setdefault(stream.name, StreamReader(stream.directory))
            oldest, after = reader.bounds()
            total += after - oldest
        return total


class Result(NamedTuple):
    """What a device reports at its end."""

    kind: str
    sent: int
    acknowledged: list[int]
    times: list[float]  # of the acknowledgements, on the machine's monotonic clock
    connects: int


class Devices:
    """The device processes."""

    def __init__(self, output: Path, port: int, seconds: float) -> None:
        self._results = {kind: output / f"device-{kind}.json" for kind in present()}
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "device.py"), kind, str(port), str(seconds), str(result)]
            )
            for kind, result in self._results.items()
        ]

    def running(self) -> bool:
        """Whether a device still publishes."""
        return any(process.poll() is None for process in self._processes)

    def results(self) -> list[Result]:
        """What each device sent, and what was acknowledged."""
        return [Result(**json.loads(path.read_text())) for path in self._results.values()]

    def stop(self) -> None:
        """Stop them, finished or not."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def read_table(output: Path) -> Any:
    """The complete table, as Arrow, sorted by stream and number."""
    from bridge.ingest.table import TableOptions, read

    order = [("stream", "ascending"), ("sequence_number", "ascending")]
    return read(TableOptions(warehouse=str(output / "warehouse"))).sort_by(order)


def prepare(output: Path) -> None:
    """An empty output directory, and the stand-in's credentials for all parts."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    os.environ |= CREDENTIALS
