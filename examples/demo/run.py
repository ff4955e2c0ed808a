"""The full path with real input: readings of this machine, from a PUBLISH of a device to a Spark table.

    make demo            (or: python examples/demo/run.py [--seconds 30] [--output demo-output])

Steps:
 1. A stand-in for S3 (moto's server) and the bridge start.
 2. Devices, each a paho client in a separate process, publish readings of this machine at QoS 1.
 3. In the middle, the bridge is killed with SIGKILL and started again.
 4. When the devices are done and everything is exported, the bridge is stopped with SIGTERM.
 5. `streambridge ingest` loads the objects into an Iceberg table. A second run adds nothing.
 6. The table is compared with the acknowledgements that the devices recorded.

The exit code is 0 only if every acknowledged reading is in the table and no stored message is there twice.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import parts
from chart import draw
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

console = Console(highlight=False)


@dataclass
class Timeline:
    """Counts over time, for the chart and the rates."""

    began: float = field(default_factory=time.monotonic)
    seconds: list[float] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    exported: list[int] = field(default_factory=list)
    killed: tuple[float, float] = (0.0, 0.0)

    def now(self) -> float:
        """Seconds since the devices started."""
        return time.monotonic() - self.began


def publish(
    bridge: parts.Bridge, storage: parts.Storage, output: Path, seconds: float
) -> tuple[Timeline, list[parts.Result]]:
    """Run the devices, kill the bridge in the middle, wait until everything is exported."""
    line = Timeline()
    devices = parts.Devices(output, bridge.port, seconds)
    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(),
        TextColumn("{task.completed:>9,}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        stored_bar, exported_bar = (
            progress.add_task("stored", total=None),
            progress.add_task("exported", total=None),
        )

        def look() -> tuple[int, int]:
            line.seconds.append(line.now())
            line.stored.append(bridge.stored())
            line.exported.append(storage.exported())
            total = max(1, line.stored[-1])
            progress.update(stored_bar, completed=line.stored[-1], total=total)
            progress.update(exported_bar, completed=line.exported[-1], total=total)
            return line.stored[-1], line.exported[-1]

        try:
            while devices.running():
                look()
                if not line.killed[0] and line.now() > seconds / 2:
                    before = line.now()
                    bridge.kill()
                    progress.console.print(
                        f"  SIGKILL to the bridge with {line.stored[-1]:,} messages stored"
                    )
                    took = bridge.start()
                    line.killed = (before, line.now())
                    progress.console.print(f"  started again: accepts connections after {took:.2f} s")
                time.sleep(0.2)
            deadline = line.now() + 60
            while (counts := look())[0] != counts[1]:
                if line.now() > deadline:
                    raise TimeoutError(f"{counts[0] - counts[1]:,} messages were not exported within 60 s")
                time.sleep(0.2)
        finally:
            devices.stop()
    return line, devices.results()


def ingest(output: Path, endpoint: str) -> dict[str, Any]:
    """Run `streambridge ingest` and return its JSON document."""
    command = [sys.executable, "-m", "bridge", "ingest", "--json", "--endpoint-url", endpoint]
    command += ["--source", f"s3://{parts.BUCKET}/{parts.PREFIX}", "--warehouse", str(output / "warehouse")]
    with (output / "ingest.log").open("ab") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, check=False)
    if done.returncode not in (0, 3, 4):
        raise RuntimeError(f"streambridge ingest failed ({done.returncode}); see {output / 'ingest.log'}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def verify(results: list[parts.Result], table: Any) -> tuple[bool, list[tuple[str, str]]]:
    """Compare the table with the records of the devices; returns (good, facts to show)."""
    ids = Counter(json.loads(payload)["id"] for payload in table["payload"].to_pylist())
    acknowledged = {f"{r.kind}-{number}" for r in results for number in r.acknowledged}
    positions = Counter(
        zip(
            table["stream"].to_pylist(),
            table["epoch"].to_pylist(),
            table["sequence_number"].to_pylist(),
            strict=True,
        )
    )
    lost = len(acknowledged - ids.keys())
    twice = sum(number - 1 for number in positions.values())
    sent_again = sum(number - 1 for number in ids.values())
    facts = [
        ("readings sent", f"{sum(r.sent for r in results):,}"),
        ("acknowledged", f"{len(acknowledged):,}"),
        ("acknowledged but not in the table", f"{lost:,}"),
        ("rows in the table", f"{table.num_rows:,}"),
        ("stored messages that occur twice", f"{twice:,}"),
        ("readings sent and stored again after the kill", f"{sent_again:,}"),
    ]
    return not lost and not twice and bool(acknowledged), facts


def show(table: Any, report: dict[str, Any]) -> None:
    """Print the first rows of the table and the completeness report."""
    rows = Table(title="First rows of the table", title_justify="left", expand=True)
    for column, width in (("stream", 12), ("number", 6), ("ingest_time", 12), ("topic", 16)):
        rows.add_column(column, no_wrap=True, min_width=width)
    rows.add_column("payload", no_wrap=True, ratio=1)
    for row in table.slice(0, 5).to_pylist():
        rows.add_row(
            row["stream"],
            str(row["sequence_number"]),
            f"{row['ingest_time']:%H:%M:%S.%f}"[:-3],
            row["topic"],
            row["payload"].decode(),
        )
    console.print(rows)
    lines = Table(title="Completeness", title_justify="left")
    for name in ("stream", "first", "last", "rows", "missing", "duplicates removed"):
        lines.add_column(name, justify="left" if name == "stream" else "right")
    for item in report["streams"]:
        numbers = (item["first"], item["last"], item["rows"], item["missing"], item["duplicates"])
        lines.add_row(item["stream"], *(f"{number:,}" for number in numbers))
    console.print(lines)
    console.print(f"missing {sum(item['missing'] for item in report['streams'])}")


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30, help="how long the devices publish [30]")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="output directory [demo-output]"
    )
    options = parser.parse_args()
    output = options.output.resolve()
    parts.prepare(output)
    with parts.storage(output) as storage:
        bridge = parts.Bridge(output, storage.endpoint)
        took = bridge.start()
        console.print(f"the bridge listens on mqtt://127.0.0.1:{bridge.port} after {took:.2f} s")
        try:
            line, results = publish(bridge, storage, output, options.seconds)
            code = bridge.stop()
        finally:
            bridge.kill()
        console.print(f"the bridge stopped on SIGTERM with exit code {code}")
        with console.status("streambridge ingest"):
            began = time.monotonic()
            first = ingest(output, storage.endpoint)
            spent = time.monotonic() - began
            second = ingest(output, storage.endpoint)
        table = parts.read_table(output)
    show(table, second["report"])
    good, facts = verify(results, table)
    good = good and code == 0 and second["rows"] == 0
    reached = line.stored[-1] / max(results_seconds(line), 0.001)
    facts += [
        (
            "connections per device (2: before and after the kill)",
            ", ".join(str(r.connects) for r in results),
        ),
        ("published and stored per second", f"{reached:,.0f}"),
        ("ingested: rows, seconds including the start of Spark", f"{first['rows']:,} in {spent:.1f}"),
        ("rows added by a second run", str(second["rows"])),
    ]
    summary = Table(title="Checks", title_justify="left", show_header=False)
    for fact in facts:
        summary.add_row(*fact)
    console.print(summary)
    picture = output / "counts.png"
    draw(line, results, picture)
    console.print(f"chart: {picture}")
    console.print(
        "[green]every acknowledged reading is in the table, none twice[/]" if good else "[red]NOT COMPLETE[/]"
    )
    return 0 if good else 1


def results_seconds(line: Timeline) -> float:
    """The seconds until the last message was stored."""
    last = line.stored[-1]
    return line.seconds[line.stored.index(last)]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (TimeoutError, RuntimeError) as error:
        console.print(f"[red]{error}[/]")
        sys.exit(1)
