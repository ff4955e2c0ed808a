"""Latency: from PUBLISH to a row that a query finds.

    python -m benchmarks.latency [--minutes 10] [--gateways 50] [--real 3]

Each gateway gets ten messages a second. Some gateways are real: `streambridge run`, with an MQTT publisher
(QoS 1) and an `s3` export with `time_hint_millis = 1000` and `report_interval_millis = 500`. The others are
played by the S3 stand-in: each uploads an object and its gateway report every second, when the first message
of that second is a second old. One
`streambridge ingest --every 1` takes them all into an Iceberg table. A watcher asks the catalog every 20 ms
for the current version of the table. The latency of a message is the time from PUBLISH until a version with
its row was seen; files into which the job gathers small ones do not count again. It counts from the second
minute on, when Spark has started.

Caveats. Everything shares one machine, so the latency includes waiting for the processor. The S3 stand-in
answers at once: add a few round trips to your S3 (a listing, a GET, and the PUTs of the table).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.testbed.local import free_port

ROOT = Path(__file__).resolve().parents[1]
RATE = 10  # messages a second of each gateway
POLL = 0.02  # seconds
CONFIG = """\
[gateway]
id = "real-{number:02d}"
data_dir = "data"
memory_dir = "memory"

[mqtt]
listen = ["tcp://127.0.0.1:{mqtt}"]

[greengrass]
listen = ""

[http]
listen = ""

[streams.sensors]
topics = ["plant/#"]

[[streams.sensors.export.s3]]
identifier = "landing"
bucket = "landing"
prefix = "site"
endpoint_url = "{endpoint}"
time_hint_millis = 1000
report_interval_millis = 500
"""
Seen = list[tuple[float, str]]  # when, and the location of the metadata


@contextmanager
def process(*command: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a command in this repository; it is ended with the block."""
    environment = os.environ | {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "PYTHONPATH": str(ROOT),
    }
    running = subprocess.Popen([sys.executable, *command], env=environment, text=True, **options)
    try:
        yield running
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                running.wait(30)
        running.kill()
        running.wait()


def publish(port: int, stopped: threading.Event) -> None:
    """Publish ten messages a second until stopped."""
    import paho.mqtt.client as mqtt

    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
    while True:
        with suppress(OSError):
            client.connect("127.0.0.1", port)
            break
        time.sleep(0.1)
    client.loop_start()
    due = time.time()
    while not stopped.is_set():
        client.publish("plant/line", json.dumps({"sent": time.time_ns(), "pad": "x" * 100}), qos=1)
        due += 1 / RATE
        time.sleep(max(0.0, due - time.time()))
    client.disconnect()
    client.loop_stop()


def watch(catalog: Path, seen: Seen, stopped: threading.Event) -> None:
    """Note when each version of the table can be found."""
    last = ""
    while not stopped.is_set():
        with suppress(sqlite3.Error):
            with sqlite3.connect(f"file:{catalog}?mode=ro", uri=True) as database:
                row = database.execute("select metadata_location from iceberg_tables").fetchone()
            database.close()
            if row and row[0] != last:
                last = row[0]
                seen.append((time.time(), last))
        time.sleep(POLL)


def tree_cpu(pid: int) -> float:
    """CPU seconds of a process and all below it."""
    total = 0.0
    with suppress(psutil.Error):
        for one in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with suppress(psutil.Error):
                times = one.cpu_times()
                total += times.user + times.system
    return total


def latencies(seen: Seen, warehouse: Path) -> list[tuple[float, float, bool]]:
    """When each message was published, its latency in seconds, and whether its gateway is real."""
    import pyarrow.parquet as pq
    from pyiceberg.table import StaticTable

    current: dict[int | None, float] = {}
    for when, location in seen:
        with suppress(FileNotFoundError):  # the run has deleted it; a later version has the snapshot too
            document = json.loads(Path(location.removeprefix("file://")).read_text())
            current.setdefault(document.get("current-snapshot-id"), when)
    table = StaticTable.from_metadata(seen[-1][1])
    first: dict[tuple[str, int], float] = {}  # a compaction writes rows again: the first version counts
    for snapshot in table.snapshots():
        when = current.get(snapshot.snapshot_id)
        if when is None:
            continue
        for manifest in snapshot.manifests(table.io):
            if manifest.added_snapshot_id != snapshot.snapshot_id:
                continue
            for entry in manifest.fetch_manifest_entry(table.io):
                if entry.snapshot_id != snapshot.snapshot_id:
                    continue
                rows = pq.read_table(
                    entry.data_file.file_path.removeprefix("file://"), columns=["gateway", "payload"]
                )
                for gateway, payload in zip(
                    *(rows[name].to_pylist() for name in rows.column_names), strict=True
                ):
                    message = gateway, json.loads(payload)["sent"]
                    first[message] = min(when, first.get(message, when))
    return [
        (sent / 1e9, when - sent / 1e9, gateway.startswith("real-"))
        for (gateway, sent), when in first.items()
    ]


def measure(minutes: float, gateways: int, real: int) -> dict[str, Any]:
    """Run it all, and return the percentiles by minute."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="latency-")))
        stopped = threading.Event()
        store = stack.enter_context(
            process(
                *("-m", "benchmarks.testbed.objectstore", str(gateways - real), str(RATE)),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
        assert store.stdin is not None
        assert store.stdout is not None
        endpoint = f"http://127.0.0.1:{int(store.stdout.readline())}"
        threads = []
        for number in range(real):
            place = folder / f"gateway-{number}"
            place.mkdir()
            port = free_port()
            config = place / "streambridge.toml"
            config.write_text(CONFIG.format(number=number, mqtt=port, endpoint=endpoint))
            log = stack.enter_context((place / "log").open("w"))
            stack.enter_context(
                process("-m", "bridge", "run", "-c", str(config), cwd=place, stdout=log, stderr=log)
            )
            threads.append(threading.Thread(target=publish, args=(port, stopped), daemon=True))
        warehouse, seen = folder / "lake", Seen()
        threads.append(
            threading.Thread(target=watch, args=(warehouse / "catalog.db", seen, stopped), daemon=True)
        )
        log = stack.enter_context((folder / "ingest.log").open("w"))
        ingest = stack.enter_context(
            process(
                *("-m", "bridge.ingest.main", "--source", "s3://landing/site", "--endpoint-url", endpoint),
                *("--warehouse", str(warehouse), "--every", "1"),
                cwd=folder,
                stdout=log,
                stderr=log,
            )
        )
        stack.callback(stopped.set)
        for thread in threads:
            thread.start()
        store.stdin.write("go\n")
        store.stdin.flush()
        began = time.time()
        time.sleep(60)
        spent, loads = tree_cpu(ingest.pid), []
        while time.time() < began + 60 * (minutes + 1):
            time.sleep(5)
            loads.append(os.getloadavg()[0])
            if ingest.poll() is not None:
                raise SystemExit((folder / "ingest.log").read_text())
        spent = tree_cpu(ingest.pid) - spent
        end = time.time() - 5  # what was sent after this may not be there yet
        cycles = len([1 for when, _ in seen if began + 60 <= when])
        time.sleep(10)
        stopped.set()
        ingest.send_signal(signal.SIGTERM)
        ingest.wait(60)
        store.stdin.close()
        requests = json.loads(store.stdout.read())
        found = latencies(seen, warehouse)
    rows = [one for one in found if began + 60 <= one[0] < end]
    by_minute: dict[int, list[float]] = defaultdict(list)
    for sent, latency, _ in rows:
        by_minute[int((sent - began - 60) / 60) + 1].append(latency)
    return {
        "messages": len(rows),
        "expected": round((end - began - 60) * gateways * RATE),
        "cpu_of_one_core": round(spent / (60 * minutes), 2),
        "rounds": cycles,
        "load": round(statistics.mean(loads), 1),
        "requests": requests,
        "all": figures([one[1] for one in rows]),
        "real": figures([one[1] for one in rows if one[2]]),
        "minutes": {minute: figures(values) for minute, values in sorted(by_minute.items())},
    }


def figures(values: list[float]) -> dict[str, float]:
    """Percentiles, in seconds."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in PERCENTILES}
    return {name: round(value, 2) for name, value in at.items()} | {"max": round(ordered[-1], 2)}


PERCENTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
COLUMNS = ("p50", "p95", "p99", "max")


def page(result: dict[str, Any], gateways: int, real: int) -> str:
    """The tables."""
    lines = [
        f"{gateways} gateways, {real} of them real, with {RATE} messages a second each: "
        f"{result['messages']:,} messages of {result['expected']:,} expected, in {result['rounds']:,} rounds "
        f"of the job. The job takes {result['cpu_of_one_core']:.2f} of a core. The load average of the "
        f"machine was {result['load']}.",
        "",
        "| seconds from PUBLISH | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    rows = [("all", result["all"]), ("of real gateways", result["real"])]
    rows += [(f"minute {minute}", found) for minute, found in result["minutes"].items()]
    lines += [
        f"| {name} | " + " | ".join(f"{found[column]:.2f}" for column in COLUMNS) + " |"
        for name, found in rows
        if found
    ]
    return "\n".join(lines) + "\n"


def chart(result: dict[str, Any], path: Path) -> None:
    """Percentiles by minute."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 3.5), layout="constrained")
    minutes = list(result["minutes"])
    for name in ("p99", "p95", "p50"):
        values = [found[name] for found in result["minutes"].values()]
        axes.plot(minutes, values, marker="o", label=name)
    axes.axhline(3, color="grey", linestyle="--", linewidth=0.8)
    axes.set(xlabel="minute", ylabel="seconds from PUBLISH to the row", ylim=(0, None), xticks=minutes)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, and write latency.json, latency.md and latency.png."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--gateways", type=int, default=50)
    parser.add_argument("--real", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    result = measure(given.minutes, given.gateways, given.real)
    (given.output / "latency.json").write_text(json.dumps(result, indent=1))
    text = page(result, given.gateways, given.real)
    (given.output / "latency.md").write_text(text)
    chart(result, given.output / "latency.png")
    print(text)


if __name__ == "__main__":
    main()
