"""What encryption costs: CPU time of the service per message, beside a plain stream, in interleaved pairs.

    python -m benchmarks.encryption [--rounds 11] [--seconds 1] [--output DIR] [--plain DIR]

Two services run at the same time, one with a plain stream and one with an encrypted one. The generator of
`ingest.py` loads them in turn, each first every other round. The result is the median of the rounds' ratios:
what else happens on the machine hits both sides of a pair alike. With `--plain DIR` the second service is
that of another checkout, also with a plain stream: whether plain streams have become slower.

Caveats. What a message costs depends on how many go into one group: each group is encrypted at once. So the
ratio is that of a loaded service. One client that waits for each acknowledgement pays for a group of one.

Writes encryption.json and encryption.md to the output directory, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import brokers, ingest
from bridge.encryption import new_master

LOADS = {"4 clients, 200 in flight each": (4, 200), "1 client, 1 in flight": (1, 1)}
SIZES = (128, 1024)


def encrypted(directory: Path, port: int, *, sync: bool) -> list[str]:
    """The service with an encrypted stream."""
    command = brokers.ours(directory, port, sync=sync)
    (directory / "key").write_text(new_master())
    config = directory / "streambridge.toml"
    config.write_text(f'[encryption]\nkey_file = "key"\n{config.read_text()}encryption = true\n')
    return command


def other(directory: Path, port: int, *, sync: bool, checkout: Path) -> list[str]:
    """The service of another checkout, with a plain stream."""
    return ["env", "-C", str(checkout), *brokers.ours(directory, port, sync=sync)]


def pairs(
    root: Path, second: Any, rounds: int, seconds: float
) -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """All rounds: "load, size, sync" -> (plain, second)."""
    found: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for sync in (False, True):
        sides = (partial(brokers.ours, sync=sync), partial(second, sync=sync))
        with ExitStack() as stack:
            servers = [
                stack.enter_context(brokers.serving(brokers.Server("streambridge", side), root))
                for side in sides
            ]
            cases = [(load, size) for size in SIZES for load in LOADS]
            for number in range(rounds):
                for load, size in cases:
                    results: dict[int, dict[str, Any]] = {}
                    for side in (0, 1) if number % 2 else (1, 0):
                        pid, port = servers[side]
                        results[side] = ingest.loaded(port, *LOADS[load], size, 1, pid, seconds)
                    if all(result["cpu_us"] for result in results.values()):  # the clock ticks every 10 ms
                        key = f"{load}, {size} bytes, {'synced' if sync else 'written'}"
                        found.setdefault(key, []).append((results[0], results[1]))
                print(f"round {number + 1}/{rounds}, sync {sync}", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]], second: str) -> str:
    """The medians as Markdown."""
    lines = [
        f"| load | plain, CPU µs per message | {second} | ratio | of the rounds |",
        "|---|---|---|---|---|",
    ]
    for key, runs in found.items():
        plain = statistics.median(first["cpu_us"] for first, _ in runs)
        sealed = statistics.median(other["cpu_us"] for _, other in runs)
        ratios = sorted(other["cpu_us"] / first["cpu_us"] for first, other in runs)
        middle = statistics.median(ratios)
        lines.append(
            f"| {key} | {plain:.2f} | {sealed:.2f} | {middle:.3f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    parser.add_argument("--plain", type=Path, help="another checkout, to compare plain streams with")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    second = partial(other, checkout=given.plain.resolve()) if given.plain else encrypted
    with tempfile.TemporaryDirectory(dir=given.output.resolve()) as root:
        found = pairs(Path(root), second, given.rounds, given.seconds)
    shown = table(found, "plain of the other checkout" if given.plain else "encrypted")
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    (given.output / "encryption.json").write_text(json.dumps({"machine": machine, "runs": found}))
    (given.output / "encryption.md").write_text(shown)
    print(shown)


if __name__ == "__main__":
    main()
