"""From exported objects in S3 to the committed table, compared with Spark's own reader and writer.

    python -m benchmarks.ingest_spark [--rows 2000000] [--rounds 3] [--grow 1,10] [--small 4000]
                                      [--output DIR]

Writes ingest_spark.json, ingest_spark.md (tables) and ingest_spark.png to the output directory. Both sides
run in one Spark session, alternating, on the same data:

* ours:   objects on an S3 server (moto, in a separate process) -> read, check, dedupe -> Iceberg table
* native: the same objects as local files -> spark.read -> the same columns -> write.parquet, zstd; no
          check of numbers, no dedupe, no table commit

The results are the best wall time, and the CPU seconds of the driver, the JVM and the Python workers
together, which vary less than wall time on a busy machine. NDJSON is measured with and without zlib-ng,
which is part of the extra [spark]. Then follow the cost per row as the data grows, the cost of a small object
(of ten rows: a run with many less a run with a tenth of them, by how many more it reads), and that of listing
and planning many keys (a process that only returns prepared pages serves the listing).

Caveats. Everything runs on one machine, so the S3 server takes CPU from the job; there is no network;
payloads have 200 bytes. The job checks every number and commits to an Iceberg table; Spark's own reader and
writer do neither.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from benchmarks.ingest_data import PAYLOAD, make, objects
from bridge.ingest.job import run
from bridge.ingest.planner import Inventory, RoundLimits, plan
from bridge.ingest.session import open_session
from bridge.ingest.store import StorageLocation
from bridge.ingest.table import TableOptions, open_sink
from bridge.ranges import Ranges

FORMS = {"parquet": "Parquet", "ndjson.gz": "NDJSON"}
SMALL = 10  # rows
MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""

# Answers ListObjectsV2 as S3 does, for GATEWAYS prefixes of the same number of keys.
LISTING = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse
keys, gateways = int(sys.argv[1]), int(sys.argv[2])
each = keys // gateways
class Lister(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        asked = {name: value[0] for name, value in parse_qs(urlparse(self.path).query).items()}
        body = ['<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>']
        if "delimiter" in asked:
            prefixes = [f"<Prefix>gateway=gw-{g:04d}/</Prefix>" for g in range(gateways)]
            body += [f"<CommonPrefixes>{prefix}</CommonPrefixes>" for prefix in prefixes]
            body.append("<IsTruncated>false</IsTruncated>")
        elif asked.get("prefix", "").startswith("gateway="):
            start = int(asked.get("continuation-token", 0))
            end = min(start + 1000, each)
            head = f"{asked['prefix']}stream=readings/epoch=1795000000000/date=2026-11-"
            rest = "<Size>200000</Size><StorageClass>STANDARD</StorageClass></Contents>"
            when = "<LastModified>2026-11-18T11:06:40.000Z</LastModified>"
            for n in range(start, end):
                name = f"{head}{18 + n // 2400:02d}/hour={n // 100 % 24:02d}/"
                name += f"{n * 1000:020d}-{n * 1000 + 999:020d}.parquet"
                body.append(f'<Contents><Key>{name}</Key>{when}<ETag>"{n:032x}"</ETag>{rest}')
            more = end < each
            body.append(f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>")
            if more:
                body.append(f"<NextContinuationToken>{end}</NextContinuationToken>")
        body.append("</ListBucketResult>")
        data = "".join(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *a):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Lister)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def server(code: str, *arguments: str) -> Iterator[str]:
    """Run a small server; the endpoint is its result."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def cpu(excluding: set[int]) -> float:
    """CPU seconds of this process and all below it but the servers."""
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            if process.pid not in excluding:
                times = process.cpu_times()
                total += times.user + times.system
                total += 0.0 if process == me else times.children_user + times.children_system
        except psutil.Error:
            continue
    return total


def daemons() -> set[int]:
    """The processes that fork Python workers, children of the JVM."""
    return {below.pid for one in psutil.Process().children() for below in one.children()}


class Bench:
    """One session, one S3 server, one scratch directory."""

    def __init__(self, folder: Path, endpoint: str, servers: set[int]) -> None:
        self.folder, self.endpoint, self.servers = folder, endpoint, servers
        self.spark = open_session("local[2]", app="benchmark")
        self.spark.conf.set("spark.sql.parquet.compression.codec", "zstd")

    def upload(
        self, rows: int, form: str, local: bool, per_object: int = 10_000
    ) -> tuple[StorageLocation, str, int]:
        import boto3

        wanted = list(objects(rows, 8, per_object, form))
        bucket = f"bench-{uuid4().hex[:8]}"
        boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1").create_bucket(Bucket=bucket)
        place = StorageLocation(f"s3://{bucket}/export", self.endpoint)
        size = make(place, wanted)
        folder = str(self.folder / bucket)
        if local:
            make(StorageLocation(folder), wanted)
        return place, folder, size

    def ours(self, place: StorageLocation, *, zlib_ng: bool = True) -> int:
        # Python workers get their environment with each function: a package of this name hides the real one
        hidden = self.folder / "hidden" / "zlib_ng"
        hidden.mkdir(parents=True, exist_ok=True)
        (hidden / "__init__.py").write_text("raise ImportError")
        self.spark.sparkContext.environment["PYTHONPATH"] = "" if zlib_ng else str(hidden.parent)
        sink = open_sink(TableOptions(warehouse=str(self.folder / uuid4().hex)))
        return run(self.spark, place, sink).rows

    def native(self, folder: str, form: str) -> int:
        from pyspark.sql import functions as f

        columns = "gateway string, stream string, epoch string, sequence_number bigint, "
        if form == "parquet":
            frame = self.spark.read.schema(
                columns + "ingest_time timestamp, topic string, payload binary"
            ).parquet(folder)
        else:
            frame = self.spark.read.schema(
                columns + "ingest_time timestamp, topic string, payload string"
            ).json(folder)
            frame = frame.withColumn("payload", f.unbase64("payload"))
        frame = frame.withColumn("object_key", f.col("_metadata.file_path"))
        target = str(self.folder / uuid4().hex)
        frame.write.parquet(target)
        return int(self.spark.read.parquet(target).count())

    def measured(self, work: Callable[[], int], rows: int) -> tuple[float, float]:
        while True:
            forking, before, began = daemons(), cpu(self.servers), time.monotonic()
            assert work() == rows
            took, used = time.monotonic() - began, cpu(self.servers) - before
            if forking <= daemons():  # one that has ended takes the time of its workers with it
                return took, used


def figures(runs: list[tuple[float, float]], rows: int, size: int) -> dict[str, float]:
    wall, seconds = min(run[0] for run in runs), min(run[1] for run in runs)
    return {
        "seconds": round(wall, 2),
        "rows_per_second": round(rows / wall),
        "payload_mb_per_second": round(rows * PAYLOAD / wall / 1e6, 1),
        "object_mb_per_second": round(size / wall / 1e6, 1),
        "cpu_seconds": round(seconds, 2),
        "cpu_us_per_row": round(seconds / rows * 1e6, 2),
    }


def against_native(bench: Bench, form: str, rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """All contenders in turn, by name; each of ours also with how many times native it is."""
    place, folder, size = bench.upload(rows, form, local=True)
    label = FORMS[form]
    contenders = {
        f"{label}, ours": lambda: bench.ours(place),
        **(
            {f"{label}, ours without zlib-ng": lambda: bench.ours(place, zlib_ng=False)}
            if form != "parquet"
            else {}
        ),
        f"{label}, native": lambda: bench.native(folder, form),
    }
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, work in contenders.items():
            result = bench.measured(work, rows)
            if turn:  # the first turn warms all up
                runs[name].append(result)
    found = {name: figures(times, rows, size) for name, times in runs.items()}
    native = found[f"{label}, native"]
    for one in found.values():
        one["times_native_wall"] = round(native["seconds"] / one["seconds"], 2)
        one["times_native_cpu"] = round(native["cpu_seconds"] / one["cpu_seconds"], 2)
    return found


def growth(bench: Bench, millions: list[float], rounds: int) -> dict[str, Any]:
    result = {}
    for million in millions:
        rows = len(range(0, round(million * 1e6 / 8), 1)) * 8
        place, _, size = bench.upload(rows, "parquet", local=False)
        runs = [bench.measured(lambda place=place: bench.ours(place), rows) for _ in range(rounds)]  # type: ignore[misc]
        result[f"{million:g}M"] = figures(runs, rows, size)
    return result


def small_objects(bench: Bench, form: str, count: int, rounds: int) -> float:
    """CPU milliseconds for one more small object."""
    spent = []
    for number in (count // 10, count):
        rows = number * SMALL
        place, _, _ = bench.upload(rows, form, local=False, per_object=SMALL)
        runs = [bench.measured(lambda place=place: bench.ours(place), rows) for _ in range(rounds)]  # type: ignore[misc]
        spent.append(min(run[1] for run in runs))
    return round((spent[1] - spent[0]) / (count - count // 10) * 1e3, 2)


def many_keys(count: int) -> dict[str, Any]:
    gateways = 200
    with server(LISTING, str(count), str(gateways)) as endpoint:
        store = StorageLocation("s3://listing", endpoint).open()
        began, before = time.monotonic(), time.process_time()
        entries = list(store.list())
        listed, listed_cpu = time.monotonic() - began, time.process_time() - before
    began = time.monotonic()
    inventory = Inventory(entries)
    sorted_in = time.monotonic() - began
    no_limits = RoundLimits(objects=count, bytes=1 << 62)
    began = time.monotonic()
    work = plan(inventory.pending(), {}, (), no_limits).work
    planned = time.monotonic() - began
    covered: dict[Any, Ranges] = {}
    for one in work:
        covered.setdefault(one.stream, Ranges()).update(one.fresh)
    began = time.monotonic()
    nothing = plan(inventory.pending(), covered, (), no_limits).work
    again = time.monotonic() - began
    assert (len(entries), len(work), nothing) == (count, count, [])
    names = ("list", "list_cpu", "sort", "plan_all_new", "plan_nothing_new")
    return {
        "keys": count,
        **{
            f"{name}_seconds": round(value, 2)
            for name, value in zip(names, (listed, listed_cpu, sorted_in, planned, again), strict=True)
        },
    }


def tables(result: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    lines: list[str] = []
    if found := result.get("native"):
        lines += [
            "| objects | rows/s | payload, MB/s | CPU, us a row | times native: wall | CPU |",
            "|---|---|---|---|---|---|",
        ]
        for name, one in found.items():
            rates = f"{one['rows_per_second']:,} | {one['payload_mb_per_second']} | {one['cpu_us_per_row']}"
            lines.append(f"| {name} | {rates} | {one['times_native_wall']} | {one['times_native_cpu']} |")
    if found := result.get("growth"):
        lines += ["", "As the table grows (Parquet objects, from nothing):", ""]
        lines += ["| rows | rows/s | CPU, us a row |", "|---|---|---|"]
        lines += [
            f"| {rows} | {one['rows_per_second']:,} | {one['cpu_us_per_row']} |"
            for rows, one in found.items()
        ]
    if found := result.get("small"):
        lines += ["", f"An object of {SMALL} rows, whole run, CPU in ms:", ""]
        lines += ["| " + " | ".join(found) + " |", "|---|---|"]
        lines.append("| " + " | ".join(map(str, found.values())) + " |")
    if found := result.get("keys"):
        lines += ["", f"{found['keys']:,} keys of 200 gateways, seconds:", ""]
        lines += [
            "| list | of it CPU here | sort | plan, all new | plan, nothing new |",
            "|---|---|---|---|---|",
        ]
        names = ("list", "list_cpu", "sort", "plan_all_new", "plan_nothing_new")
        lines.append("| " + " | ".join(str(found[f"{name}_seconds"]) for name in names) + " |")
    return "\n".join(lines).strip() + "\n"


def draw(found: dict[str, dict[str, float]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
    names = list(found)[::-1]
    colours = ["0.6" if name.endswith("native") else "C0" for name in names]
    bars = axes.barh(names, [found[name]["cpu_us_per_row"] for name in names], color=colours)
    axes.bar_label(bars, padding=3)
    axes.margins(x=0.1)
    axes.set_xlabel("CPU time per row, us (driver, JVM and Python workers)")
    figure.savefig(path, dpi=120)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rows", type=int, default=2_000_000, help="0: leave the comparison out")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--grow", default="1,10", help="millions of rows; empty: leave it out")
    options.add_argument("--small", type=int, default=4_000, help="objects; 0: leave it out")
    options.add_argument("--keys", type=int, default=1_000_000, help="0: leave it out")
    options.add_argument("--output", type=Path, default=Path("benchmark-output"))
    given = options.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    result: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder, server(MOTO) as endpoint:
        servers = {process.pid for process in psutil.Process().children()}
        bench = Bench(Path(folder), endpoint, servers)
        result["native"] = {}
        for form in FORMS if given.rows else ():
            result["native"] |= against_native(bench, form, given.rows, given.rounds)
        if given.grow:
            millions = [float(text) for text in given.grow.split(",")]
            result["growth"] = growth(bench, millions, given.rounds)
        if given.small:
            result["small"] = {
                label: small_objects(bench, form, given.small, given.rounds) for form, label in FORMS.items()
            }
        bench.spark.stop()
    if given.keys:
        result["keys"] = many_keys(given.keys)
    (given.output / "ingest_spark.json").write_text(json.dumps(result, indent=1) + "\n")
    (given.output / "ingest_spark.md").write_text(tables(result))
    if result["native"]:
        draw(result["native"], given.output / "ingest_spark.png")
    print(tables(result))


if __name__ == "__main__":
    main()
