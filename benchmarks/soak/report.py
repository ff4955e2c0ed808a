"""The report of a run: soak.json with all data, soak.md for people, and its charts."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.soak import charts
from benchmarks.soak.faults import Event
from benchmarks.soak.verdict import Check
from benchmarks.soak.watch import Watch
from benchmarks.soak.world import World


def write(
    root: Path,
    options: argparse.Namespace,
    checks: Sequence[Check],
    world: World,
    events: Sequence[Event],
    watch: Watch,
) -> bool:
    """Write it all and print the verdict; returns whether all held."""
    good = all(check.good for check in checks)
    devices = json.loads((root / "devices.json").read_text())
    acknowledged = sorted(time for one in devices for time in one["acknowledged"] if time)
    figures = {
        "devices": len(devices),
        "messages sent": sum(len(one["acknowledged"]) for one in devices),
        "acknowledged": len(acknowledged),
        "connections made": sum(one["connects"] for one in devices),
        "refused and sent again (MQTT 5)": sum(one["refused"] for one in devices),
        "waited in vain for an acknowledgement": sum(one["stalls"] for one in devices),
        "slowest start of a gateway, s": round(max(g.slowest_start for g in world.gateways.values()), 2),
    }
    faults = Counter(event.kind for event in events)
    document = {
        "good": good,
        "seed": options.seed,
        "minutes": options.minutes,
        "machine": f"{os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}",
        "figures": figures,
        "faults": dict(faults),
        "checks": [check._asdict() for check in checks],
        "events": [asdict(event) for event in events],
        "counts": [asdict(count) for count in watch.counts],
        "samples": [asdict(sample) for sample in watch.samples],
    }
    (root / "soak.json").write_text(json.dumps(document, indent=1) + "\n")
    charts.counts(root / "soak-counts.png", acknowledged, watch.counts, events)
    charts.processes(root / "soak-processes.png", watch.samples)
    lines = [
        "# Soak",
        "",
        f"{options.minutes:g} minutes, seed {options.seed}, on {document['machine']}.",
        "",
        "| what must hold | | found |",
        "|---|---|---|",
        *(f"| {check.what} | {'yes' if check.good else '**NO**'} | {check.found} |" for check in checks),
        "",
        "![Messages over time, and the faults](soak-counts.png)",
        "",
        "![Memory, threads, files and sockets of the processes](soak-processes.png)",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value:,} |" for name, value in figures.items()),
        *(f"| {name} | {number} times |" for name, number in sorted(faults.items())),
    ]
    (root / "soak.md").write_text("\n".join(lines) + "\n")
    table = Table(show_header=False)
    for check in checks:
        table.add_row("[green]yes[/]" if check.good else "[red]NO[/]", check.what, check.found)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{figures}\n{dict(faults)}\nreport: {root / 'soak.md'}")
    return good
