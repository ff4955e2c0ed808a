"""Where the time of one message goes, from the socket to the disk, at QoS 1.

    python -m benchmarks.stages [--rounds 5] [--seconds 1] [--size 128] [--output DIR]

The service runs with its later stages removed, and each row adds one stage. The generator of `ingest.py`
loads it in two ways: with 4 clients and 200 messages in flight each, which measures the CPU time of the
server per message, and with one client that waits for each acknowledgement, which measures latency. The
difference of two rows is the cost of a stage.

    sockets    a protocol on the same event loop that only counts bytes and writes as many PUBACKs: the floor
    packets    the real listener: framing, checks, the route of the topic, the queue of acknowledgements;
               appends are discarded
    append     also real appends, encoded as frames and committed, but not written
    write      also written: the service as it is
    fdatasync  also synced before each PUBACK

Writes stages.json, stages.md and stages.png to the output directory, and prints the table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import uvloop

from benchmarks import brokers, ingest

STAGES = ("sockets", "packets", "append", "write", "fdatasync")
LOADS = {"4 clients, 200 in flight each": (4, 200), "1 client, 1 in flight": (1, 1)}


class Floor(asyncio.Protocol):
    """Answers a CONNECT, and then every `length` bytes with an acknowledgement."""

    def __init__(self, length: int) -> None:
        self.length, self.rest, self.greeted = length, 0, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if not self.greeted:
            self.greeted = True
            self.transport.write(b"\x20\2\0\0")
            return
        count, self.rest = divmod(self.rest + len(data), self.length)
        self.transport.write(b"\x40\2\0\1" * count)


async def floor(port: int, size: int) -> None:
    """Serve sockets and nothing else."""
    length = len(ingest.publish_packet(b"bench/0/0", 1, bytes(size)))
    server = await asyncio.get_running_loop().create_server(lambda: Floor(length), "127.0.0.1", port)
    await server.serve_forever()


def serve(stage: str, directory: Path, port: int, size: int) -> None:
    """Be the server of a stage, until killed."""
    if stage == "sockets":
        uvloop.run(floor(port, size))
    from bridge.config import settings
    from bridge.service import service
    from bridge.streams.log import SegmentLog
    from bridge.streams.stream import Stream

    patched = {
        "packets": [
            (Stream, "append", staticmethod(max)),  # takes both arguments, and costs next to nothing
            (Stream, "after_commit", lambda stream, done: stream._soon(done, None)),
        ],
        "append": [(SegmentLog, "write", lambda *_, sync: None)],
    }
    for owner, name, replacement in patched.get(stage, []):
        setattr(owner, name, replacement)
    brokers.ours(directory, port, sync=stage == "fdatasync")  # writes the configuration
    service.run(settings.load(directory / "streambridge.toml"))


def measure(stage: str, root: Path, load: tuple[int, int], size: int, seconds: float) -> dict[str, Any]:
    """Messages per second and CPU time per message with the stages up to this one."""

    def command(directory: Path, port: int) -> list[str]:
        return [
            sys.executable,
            "-m",
            "benchmarks.stages",
            "--serve",
            stage,
            str(directory),
            str(port),
            str(size),
        ]

    with brokers.serving(brokers.Server(stage, command), root) as (pid, port):
        return ingest.loaded(port, *load, size, 1, pid, seconds)


def rows(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, float | str]]:
    """Per stage: a message's median CPU time up to it, what it adds, the rate, and the time of one turn."""
    result: list[dict[str, float | str]] = []
    before = 0.0
    for stage, runs in found.items():
        cpu = statistics.median(run["cpu_us"] for run in runs)
        rate = statistics.median(run["rate"] for run in runs)
        result.append(
            {
                "stage": stage,
                "cpu_us": cpu,
                "adds_us": cpu - before,
                "per_second": rate,
                "turn_us": 1e6 / rate,
            }
        )
        before = cpu
    return result


def tables(found: dict[str, list[dict[str, float | str]]]) -> str:
    """The rows of each load as Markdown."""
    lines = []
    for load, table_rows in found.items():
        alone = LOADS[load] == (1, 1)
        lines += [f"{load}:", ""]
        lines += [
            f"| up to | CPU µs per message | the stage adds | {'one turn, µs' if alone else 'messages/s'} |"
        ]
        lines += ["|---|---|---|---|"]
        lines += [
            f"| {row['stage']} | {row['cpu_us']:.2f} | {row['adds_us']:.2f} | "
            + (f"{row['turn_us']:.1f} |" if alone else f"{row['per_second']:,.0f} |")
            for row in table_rows
        ]
        lines.append("")
    return "\n".join(lines)


def draw(table_rows: list[dict[str, float | str]], path: Path) -> None:
    """One bar, made of the stages."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 2.2), layout="constrained")
    left = 0.0
    for row in table_rows:
        width = max(float(row["adds_us"]), 0.0)
        axes.barh([""], [width], left=left, label=f"{row['stage']} {width:.2f}")
        left += width
    axes.set_xlabel("CPU µs per message (QoS 1)")
    axes.legend(ncols=len(table_rows), fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the benchmark, or be one of its servers."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {load: {} for load in LOADS}
    with tempfile.TemporaryDirectory(dir=given.output.resolve()) as root:
        for _ in range(given.rounds):
            for name, load in LOADS.items():
                for stage in STAGES:
                    result = measure(stage, Path(root), load, given.size, given.seconds)
                    found[name].setdefault(stage, []).append(result)
    shown = {name: rows(runs) for name, runs in found.items()}
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    (given.output / "stages.json").write_text(json.dumps({"machine": machine, "rows": shown, "runs": found}))
    (given.output / "stages.md").write_text(tables(shown))
    draw(next(iter(shown.values())), given.output / "stages.png")
    print(tables(shown))


if __name__ == "__main__":
    main()
