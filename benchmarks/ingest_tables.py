"""A committed table from exported objects, compared with other tools.

    python -m benchmarks.ingest_tables [--rows 2000000] [--rounds 2] [--peers PYTHON] [--output DIR]

Writes ingest_tables.json and ingest_tables.md (tables) to the output directory. Every contender reads the
same local files, gzipped NDJSON or Parquet with 10,000 rows each, and ends when a table with the columns of
ours is committed:

* ours:                 the job with an Iceberg table, or a Delta table
* Spark batch:          spark.read -> write.parquet (zstd), committed by _SUCCESS
* Structured Streaming: spark.readStream, availableNow -> file sink with its log, and a checkpoint
* DuckDB:               read_ndjson or read_parquet -> a table of a database file
* Polars:               scan_ndjson or scan_parquet -> write_delta
* pyiceberg:            Arrow's readers -> Table.append of an Iceberg table in an SQLite catalog

`warm` is a load in a process that has done one before, the best of some. `process` is from the start of a
process to the end of its first load. CPU is that of the process and all below it; it varies less than wall
time on a busy machine.

DuckDB and Polars are no dependencies of the project: `--peers` names a Python that has them, and pyiceberg,
deltalake and psutil. A contender that is not installed is left out.

Caveats. Only streambridge checks that each object has the rows of its name, that no number is missing, and
that none is in the table twice, also if a load is repeated or killed. Spark's own sinks write no tables of a
catalog, because its Iceberg and Delta writers need jars that are not installed here. Payloads have 200
bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

FORMS = {"ndjson.gz": "NDJSON", "parquet": "Parquet"}
OURS = ("ours, Iceberg", "ours, Delta")
SPARK = ("Spark batch", "Structured Streaming")
PEERS = ("DuckDB", "Polars", "pyiceberg append")
TYPES = (
    "gateway string, stream string, epoch string, sequence_number bigint, ingest_time timestamp, topic string"
)


def cpu() -> float:
    """CPU seconds of this process and all below it, also of those that have ended."""
    import psutil

    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def ours(name: str, folder: str, form: str, out: Path) -> Callable[[], int]:
    from bridge.ingest.job import run
    from bridge.ingest.session import open_session
    from bridge.ingest.store import StorageLocation
    from bridge.ingest.table import TableOptions, open_sink

    spark = open_session("local[2]", app="benchmark")

    def load() -> int:
        at = str(out / uuid4().hex)
        options = TableOptions(delta=at) if name.endswith("Delta") else TableOptions(warehouse=at)
        return run(spark, StorageLocation(folder), open_sink(options)).rows

    return load


def native(name: str, folder: str, form: str, out: Path) -> Callable[[], int]:
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as f

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.memory", "1g").config("spark.sql.session.timeZone", "UTC")
    spark = builder.config("spark.sql.parquet.compression.codec", "zstd").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")

    def load() -> int:
        reader: Any = spark.read if name == "Spark batch" else spark.readStream
        reader = reader.option("recursiveFileLookup", "true")
        if form == "parquet":
            frame = reader.schema(f"{TYPES}, payload binary").parquet(folder)
        else:
            frame = reader.schema(f"{TYPES}, payload string").json(folder)
            frame = frame.withColumn("payload", f.unbase64("payload"))
        frame = frame.withColumn("object_key", f.col("_metadata.file_path"))
        at = str(out / uuid4().hex)
        if name == "Spark batch":
            frame.write.parquet(at)
        else:
            writer = frame.writeStream.format("parquet").option("checkpointLocation", f"{at}-checkpoint")
            writer.trigger(availableNow=True).start(at).awaitTermination()
        return int(spark.read.parquet(at).count())

    return load


def duckdb(folder: str, form: str, out: Path) -> int:
    import duckdb as engine

    connection = engine.connect(str(out / f"{uuid4().hex}.duckdb"))
    connection.execute("SET threads = 2; SET TimeZone = 'UTC'")
    names = "gateway, stream, epoch, sequence_number, ingest_time, topic"
    if form == "parquet":
        source = (
            f"SELECT {names}, payload, filename FROM read_parquet('{folder}/**/*.parquet', filename = true)"
        )
    else:
        columns = (
            "{gateway: 'VARCHAR', stream: 'VARCHAR', epoch: 'VARCHAR', sequence_number: 'BIGINT', "
            "ingest_time: 'TIMESTAMPTZ', topic: 'VARCHAR', payload: 'VARCHAR'}"
        )
        source = (
            f"SELECT {names}, from_base64(payload) AS payload, filename FROM "
            f"read_ndjson('{folder}/**/*.ndjson.gz', filename = true, columns = {columns})"
        )
    connection.execute(f"CREATE TABLE messages AS {source}")
    (count,) = connection.execute("SELECT count(*) FROM messages").fetchone()  # type: ignore[misc] # has a row
    connection.close()
    return int(count)


def polars(folder: str, form: str, out: Path) -> int:
    import polars as pl

    if form == "parquet":
        frame = pl.scan_parquet(
            f"{folder}/**/*.parquet", include_file_paths="object_key", hive_partitioning=False
        )
    else:
        text = dict.fromkeys(("gateway", "stream", "epoch"), pl.String)
        schema = {
            **text,
            "sequence_number": pl.Int64,
            **dict.fromkeys(("ingest_time", "topic", "payload"), pl.String),
        }
        frame = pl.scan_ndjson(f"{folder}/**/*.ndjson.gz", schema=schema, include_file_paths="object_key")
        when = pl.col("ingest_time").str.to_datetime("%Y-%m-%dT%H:%M:%S%.fZ", time_unit="us", time_zone="UTC")
        frame = frame.with_columns(when, pl.col("payload").str.decode("base64"))
    at = str(out / uuid4().hex)
    frame.collect(engine="streaming").write_delta(at)
    return int(pl.scan_delta(at).select(pl.len()).collect().item())


def iceberg(folder: str, form: str, out: Path) -> int:
    import binascii

    import pyarrow as pa
    import pyarrow.json
    import pyarrow.parquet as pq
    from pyiceberg.catalog import load_catalog

    pa.set_cpu_count(2)
    at = out / uuid4().hex
    at.mkdir()
    catalog = load_catalog("bench", type="sql", uri=f"sqlite:///{at}/catalog.db", warehouse=f"file://{at}")
    tables = []
    for path in sorted(Path(folder).rglob(f"*.{form}")):
        if form == "parquet":
            table = pq.ParquetFile(path).read()
        else:
            with pa.input_stream(str(path), compression="gzip") as lines:
                table = pyarrow.json.read_json(lines)
            micros = table["ingest_time"].cast(pa.timestamp("us", tz="UTC"))
            payload = pa.array(map(binascii.a2b_base64, table["payload"].to_pylist()), pa.binary())
            table = table.set_column(table.column_names.index("ingest_time"), "ingest_time", micros)
            table = table.set_column(table.column_names.index("payload"), "payload", payload)
        tables.append(table.append_column("object_key", pa.repeat(pa.scalar(str(path)), table.num_rows)))
    rows = pa.concat_tables(tables)
    catalog.create_namespace("lake")
    made = catalog.create_table("lake.messages", rows.schema)
    made.append(rows)
    return int(made.scan().count())


SIMPLE = {"DuckDB": duckdb, "Polars": polars, "pyiceberg append": iceberg}


def contender(name: str, folder: str, form: str, out: Path) -> Callable[[], int]:
    """Return what loads the files into a new table below `out`, and returns its rows."""
    if name in OURS:
        return ours(name, folder, form, out)
    if name in SPARK:
        return native(name, folder, form, out)
    return partial(SIMPLE[name], folder, form, out)


def inside(name: str, folder: str, form: str, out: Path, rounds: int, rows: int) -> None:
    """Load once, then `rounds` times more, in a process of its own.

    Prints for each load the Unix time at its end, its seconds and CPU seconds, and all CPU of the process.
    """
    load = contender(name, folder, form, out)
    for _ in range(rounds + 1):
        began, used = time.monotonic(), cpu()
        found = load()
        assert found == rows, (name, found, rows)
        print(json.dumps([time.time(), time.monotonic() - began, cpu() - used, cpu()]), flush=True)


def measure(name: str, python: str, folder: str, form: str, rows: int, rounds: int) -> dict[str, float]:
    """Return wall and CPU seconds of a warm load, and of a process up to the end of its first load."""
    command = [python, __file__, "--inside", name, "--folder", folder, "--form", form, "--rows", str(rows)]
    paths = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with tempfile.TemporaryDirectory() as out:
        began = time.time()
        done = subprocess.run(
            [*command, "--out", out, "--rounds", str(rounds)],
            env=os.environ | paths,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    loads = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    best = {
        "warm": min(seconds for _, seconds, _, _ in loads[1:]),
        "warm_cpu": min(used for _, _, used, _ in loads[1:]),
        "process": loads[0][0] - began,
        "process_cpu": loads[0][3],
    }
    return {key: round(value, 2) for key, value in best.items()}


def tables(result: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    lines = []
    for form, found in result["loads"].items():
        lines += [
            f"{result['rows']:,} rows, {form}:",
            "",
            "| | warm, s | rows/s | CPU, us a row | process, s | CPU, us a row |",
            "|---|---|---|---|---|---|",
        ]
        for name, one in found.items():
            each = [one[kind] / result["rows"] * 1e6 for kind in ("warm_cpu", "process_cpu")]
            rate = result["rows"] / one["warm"]
            warm = f"{one['warm']:.1f} | {rate:,.0f} | {each[0]:.2f}"
            lines.append(f"| {name} | {warm} | {one['process']:.1f} | {each[1]:.2f} |")
        lines.append("")
    load = result["load"]
    lines.append(
        f"Load of the machine before and after: {load[0]:.1f}, {load[1]:.1f} (2 cores, shared with others)."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rows", type=int, default=2_000_000)
    options.add_argument("--rounds", type=int, default=2, help="warm loads")
    options.add_argument("--peers", default=sys.executable, help="a Python that has DuckDB and Polars")
    options.add_argument("--output", type=Path, default=Path("benchmark-output"))
    for name in ("--inside", "--folder", "--form", "--out"):
        options.add_argument(name, default="", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.inside:
        inside(given.inside, given.folder, given.form, Path(given.out), given.rounds, given.rows)
        return
    from benchmarks.ingest_data import make, objects
    from bridge.ingest.store import StorageLocation

    given.output.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    result: dict[str, Any] = {"rows": given.rows, "loads": {label: {} for label in FORMS.values()}}
    with tempfile.TemporaryDirectory() as scratch:
        for form in FORMS:
            make(StorageLocation(f"{scratch}/{form}"), list(objects(given.rows, 8, 10_000, form)))
        for name in (*OURS[:1], *PEERS, *SPARK, *OURS[1:]):
            python = given.peers if name in PEERS else sys.executable
            for form, label in FORMS.items():
                try:
                    found = measure(name, python, f"{scratch}/{form}", form, given.rows, given.rounds)
                except RuntimeError as error:
                    if "ModuleNotFoundError" not in str(error):
                        raise
                    print(f"{name}: not installed, left out", flush=True)
                    break
                print(label, name, found, flush=True)
                result["loads"][label][name] = found
            result["load"] = [load, os.getloadavg()[0]]
            (given.output / "ingest_tables.json").write_text(json.dumps(result, indent=1) + "\n")
            (given.output / "ingest_tables.md").write_text(tables(result))


if __name__ == "__main__":
    main()
