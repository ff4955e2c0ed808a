"""A producer for Data Firehose in an outage of the link: as it is, and with one changed line.

    python -m benchmarks.firehose_outage [--seconds 60] [--output DIR]

The producer takes 20 readings a second and puts them with boto3 twice a second. What a call raises it logs,
and goes on: its readings are then lost. It runs twice at the same time: straight to Firehose, and to a
gateway (`endpoint_url`) whose stream has an export to the same delivery stream. In the second third of the
time the link to AWS is shut.

Firehose is the stand-in of the tests: it takes what botocore's model of the service allows, and answers at
once. Writes firehose-outage.json and firehose-outage.png, and prints the counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from benchmarks.testbed.aws import FakeAws
from benchmarks.testbed.forwarder import Forwarder
from benchmarks.testbed.local import free_port

ROOT = Path(__file__).resolve().parents[1]
RATE, PUTS = 20, 2  # readings and puts a second
KEY, SECRET = "AKIAPLANT7", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
# A call fails within seconds, so that each loss is short. With botocore's defaults it takes longer.
FAILING_SOON = Config(connect_timeout=1, read_timeout=2, retries={"total_max_attempts": 2})
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
[aws]
region = "eu-central-1"
endpoint_url = "{aws}"
[[streams.plant.export.firehose]]
identifier = "aws"
delivery_stream_name = "plant"
delimiter = ""
"""


class Producer(threading.Thread):
    """Takes readings, and puts those of each half second."""

    def __init__(self, name: str, url: str, began: float) -> None:
        super().__init__()
        self.label, self._began = name, began
        self.taken: list[tuple[float, int]] = []  # when, and how many readings until then
        self.lost = 0
        self.ended = threading.Event()
        self._client = boto3.client(
            "firehose",
            endpoint_url=url,
            region_name="eu-central-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            config=FAILING_SOON,
        )

    def run(self) -> None:
        number = 0
        while not self.ended.wait(1 / PUTS):
            now = time.monotonic() - self._began
            until = int(now * RATE)
            if until == number:
                continue
            readings = [f"{self.label} {n}\n".encode() for n in range(number, until)]
            self.taken.append((now, until))
            number = until
            try:
                put = self._client.put_record_batch(
                    DeliveryStreamName="plant", Records=[{"Data": one} for one in readings]
                )
                self.lost += put["FailedPutCount"]
            except (BotoCoreError, ClientError):
                self.lost += len(readings)  # a line in a log, and the next reading


class Gateway:
    """streambridge in front of the delivery stream."""

    def __init__(self, directory: Path, aws: str) -> None:
        self.port, config = free_port(), directory / "streambridge.toml"
        (directory / "keys").write_text(f"{KEY} {SECRET} line-7\n")
        (directory / "keys").chmod(0o600)
        config.write_text(CONFIG.format(port=self.port, aws=aws))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bridge", "run", "-c", str(config)],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "AWS_ACCESS_KEY_ID": "x",
                "AWS_SECRET_ACCESS_KEY": "y",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "msg=ready" in line:
                break
        else:
            raise SystemExit("the gateway does not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def run(seconds: float) -> dict[str, Any]:
    """The counts of both producers over time."""
    aws = FakeAws()
    aws.server.handle_error = lambda *_: None  # type: ignore[method-assign]  # connections that are reset
    arrived: list[tuple[float, int, int]] = []
    with tempfile.TemporaryDirectory() as directory:
        link = Forwarder(aws.url)
        gateway = Gateway(Path(directory), link.url)
        began = time.monotonic()
        producers = [
            Producer("direct", link.url, began),
            Producer("gateway", f"http://127.0.0.1:{gateway.port}", began),
        ]

        def watch(until: float) -> None:
            while (now := time.monotonic() - began) < until:
                with aws.lock:
                    data = {bytes(record["Data"]) for record in aws.taken}
                direct, through = (sum(one.startswith(p.label.encode()) for one in data) for p in producers)
                arrived.append((now, direct, through))
                if producers[1].ended.is_set() and through >= producers[1].taken[-1][1]:
                    return
                time.sleep(0.2)

        try:
            for one in producers:
                one.start()
            watch(seconds / 3)
            with link.shut():
                watch(seconds * 2 / 3)
            watch(seconds)
            for one in producers:
                one.ended.set()
                one.join()
            watch(seconds + 120)
        finally:
            gateway.close()
            link.close()
            aws.close()
    return {
        "seconds": seconds,
        "shut": (seconds / 3, seconds * 2 / 3),
        "arrived": arrived,
        "taken": {one.label: one.taken for one in producers},
        "producers": {
            one.label: {"taken": one.taken[-1][1], "refused": one.lost, "arrived": arrived[-1][at]}
            for at, one in enumerate(producers, 1)
        },
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Readings taken and arrived, for both producers."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    titles = {"direct": "straight to Firehose", "gateway": "endpoint_url = the gateway"}
    for at, (label, axis) in enumerate(zip(titles, axes, strict=True), 1):
        counts = found["producers"][label]
        axis.axvspan(*found["shut"], color="#f3d9d9", label="link to AWS is down")
        axis.plot(*zip(*found["taken"][label], strict=True), color="#888888", label="readings taken")
        axis.plot(
            [point[0] for point in found["arrived"]],
            [point[at] for point in found["arrived"]],
            color="#1f5fa8",
            label="arrived at Firehose",
        )
        lost = counts["taken"] - counts["arrived"]
        axis.set_title(f"{titles[label]}: {lost:,} of {counts['taken']:,} lost")
        axis.set_xlabel("seconds")
        axis.grid(visible=True, alpha=0.3)
        axis.legend(loc="upper left", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": ""})


def main() -> None:
    """Run it, and write counts and picture."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmark-output")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    found = run(options.seconds)
    (options.output / "firehose-outage.json").write_text(json.dumps(found))
    with suppress(ImportError):
        draw(found, options.output / "firehose-outage.png")
    for label, counts in found["producers"].items():
        print(f"{label}: {counts['taken']} readings taken, {counts['arrived']} arrived")


if __name__ == "__main__":
    main()
