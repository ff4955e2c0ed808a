"""Consumers compared with NATS JetStream: fetches, acknowledgements, a work queue, redelivery after a kill.

    python -m benchmarks.consumers [--rounds 5] [--messages 20000] [--kills 5] [--output DIR]

One worker fetches 1, 10 and 100 messages at a time and acknowledges them before it fetches again. Then four
workers, each a process, empty a work queue (`retention = "exported"`; WorkQueuePolicy), 10 messages at a
time. Every system runs in turn, in each round, on a fresh server. The figures are medians over the rounds; a
ratio is the median of the ratios of the rounds.

Then the server is killed (SIGKILL) while a worker, which needs 5 ms for 10 messages, has acknowledged some
and has others in hand. It is started again on the same files, and what it delivers is compared with what the
worker knows.

Caveats. Workers and server share the machine. A worker sends raw bytes and decodes the replies itself, on
both sides, so no client library is measured. streambridge answers a fetch and an acknowledgement after an
fdatasync of the position. JetStream answers before: it writes the state of a consumer at most ten times a
second (`consumerFileStore.flushLoop` in its source), and with `sync_interval: always` it then syncs that
file. "Ack confirmed" waits for an answer to each acknowledgement (`ack_sync`), and sends all that belong to
one fetch together. A plain ack has no answer. So "sync always, ack confirmed" is the nearest row, but no
setting of JetStream waits for the state of the consumer. "Files in memory" is streambridge on a tmpfs, where
a sync costs nothing: the difference to the first row is the price of the disk.
Writes consumers.json and consumers.md to the output directory, and prints the tables.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.consumers_peers import QUEUE, SYSTEMS, Delivery, Server, System, connect, serve
from benchmarks.ingest import cpu_of
from benchmarks.operations import CHECKOUT
from benchmarks.testbed import nats

SIZE = 128
CONSUMER = "workers"
DEADLINE = 60.0  # seconds of a lease; none ends while it is measured
KILL_DEADLINE = 6.0  # the same where the server is killed; a start takes about one
KILL_MESSAGES, KILL_BATCH = 4000, 10
KILL_AFTER = range(100, 200)  # fetches
KILL_WORK = 0.005  # seconds that a worker needs for what it has fetched
PATIENCE = 60.0  # seconds, for what must come
KILLED = {
    "acknowledged": "acknowledged",
    "again": "of these, delivered again",
    "in_hand": "in hand",
    "early": "of these, delivered again before the deadline",
    "forgotten": "of these, delivered as if for the first time",
    "lost": "neither acknowledged nor delivered again",
}


class Case(NamedTuple):
    """A column: a stream of its own, whose consumer so many workers ask for `batch` messages at a time.

    `share` is that of the number of messages: where each takes longer, there are fewer.
    """

    name: str
    stream: str
    workers: int
    batch: int
    share: float


CASES = (
    Case("1 at a time", "jobs1", 1, 1, 0.05),
    Case("10 at a time", "jobs10", 1, 10, 0.5),
    Case("100 at a time", "jobs100", 1, 100, 1),
    Case("queue of 4 workers", QUEUE, 4, 10, 0.5),
)


def work(kind: str, port: int, stream: str, batch: int, name: str) -> None:
    """Be a worker: fetch and acknowledge until there is nothing, once a line has come; report at the end."""
    client = connect(kind, port, name, stream, CONSUMER)
    print("ready", flush=True)
    sys.stdin.readline()
    began, number = time.process_time(), 0
    while some := client.fetch(batch):
        client.ack(some)
        number += len(some)
    print(json.dumps({"messages": number, "cpu": time.process_time() - began}), flush=True)


def measure(system: System, server: Server, case: Case, expected: int) -> dict[str, float]:
    """Messages per second, and µs of CPU a message, of the server and of the workers."""
    command = [sys.executable, "-m", "benchmarks.consumers", "--work", system.kind, str(server.port)]
    workers = [
        subprocess.Popen(
            [*command, case.stream, str(case.batch), f"w{number}"],
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(case.workers)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    cpu, began = cpu_of(server.process.pid), time.perf_counter()
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    said = [json.loads(worker.stdout.readline()) for worker in workers if worker.stdout is not None]
    took, cpu = time.perf_counter() - began, cpu_of(server.process.pid) - cpu
    for worker in workers:
        worker.communicate()
    done = sum(one["messages"] for one in said)
    if done != expected:
        raise RuntimeError(f"{system.name}, {case.name}: {done} of {expected} messages")
    return {
        "rate": done / took,
        "server_us": cpu / done * 1e6,
        "worker_us": sum(one["cpu"] for one in said) / done * 1e6,
    }


def one_round(system: System, directory: Path, messages: int) -> dict[str, dict[str, float]]:
    """All cases on a fresh server, which does not sync while it is filled: that would take a minute."""
    streams = {case.stream: [CONSUMER] for case in CASES}
    server = serve(system._replace(settings=""), directory, streams, DEADLINE)
    try:
        client = connect(system.kind, server.port, "filler", "", "")
        for case in CASES:
            client.fill(case.stream, int(messages * case.share), SIZE)
    finally:
        server.stop()
    server = serve(system, directory, streams, DEADLINE)
    try:
        return {case.name: measure(system, server, case, int(messages * case.share)) for case in CASES}
    finally:
        server.stop()


def kill(system: System, directory: Path, seed: int) -> dict[str, int]:
    """What is delivered after a SIGKILL, compared with what the worker knows; see KILLED."""
    server = serve(system, directory, {"jobs": [CONSUMER]}, KILL_DEADLINE)
    try:
        client = connect(system.kind, server.port, "before", "jobs", CONSUMER)
        client.fill("jobs", KILL_MESSAGES, SIZE)
        acknowledged, in_hand = set[int](), dict[int, float]()
        for _ in range(random.Random(seed).choice(KILL_AFTER)):
            asked = time.monotonic()
            some = client.fetch(KILL_BATCH)
            time.sleep(KILL_WORK)
            client.ack(some[:-1])
            acknowledged |= {one.number for one in some[:-1]}
            in_hand[some[-1].number] = asked
    finally:
        server.stop()
    server = serve(system, directory, {"jobs": [CONSUMER]}, KILL_DEADLINE)
    try:
        client = connect(system.kind, server.port, "after", "jobs", CONSUMER)
        came: dict[int, tuple[Delivery, float]] = {}
        ends = time.monotonic() + KILL_DEADLINE + PATIENCE
        missing = set(range(KILL_MESSAGES)) - acknowledged
        while missing and time.monotonic() < ends:
            some = client.fetch(100)
            now = time.monotonic()
            for one in some:
                came.setdefault(one.number, (one, now))
            missing -= came.keys()
            if some:
                client.ack(some)
            else:
                time.sleep(0.02)
    finally:
        server.stop()
    again = [(came[number], asked) for number, asked in in_hand.items() if number in came]
    return {
        "acknowledged": len(acknowledged),
        "again": len(acknowledged & came.keys()),
        "in_hand": len(in_hand),
        "early": sum(now < asked + KILL_DEADLINE - 0.05 for (_, now), asked in again),
        "forgotten": sum(one.deliveries == 1 for (one, _), _ in again),
        "lost": len(missing),
    }


def tables(systems: list[System], rounds: list[dict[str, Any]], kills: list[dict[str, Any]]) -> str:
    """What was measured, as Markdown."""
    mine, names = systems[0].name, [case.name for case in CASES]
    head = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    peer = f"nats-server {nats.version()}. " if nats.installed() else ""
    lines = [f"{peer}Messages of {SIZE} bytes per second, fetched and acknowledged:", "", *head]
    for system in systems:
        cells = [statistics.median(one[system.name][case]["rate"] for one in rounds) for case in names]
        lines.append(f"| {system.name} | {' | '.join(f'{cell:,.0f}' for cell in cells)} |")
    for system in systems[1:]:
        ratios = [
            statistics.median(one[mine][case]["rate"] / one[system.name][case]["rate"] for one in rounds)
            for case in names
        ]
        lines.append(f"| *{mine} / {system.name}* | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    lines += ["", "CPU µs a message, of the server + of the workers:", ""]
    lines += head
    for system in systems:
        parts = [
            [statistics.median(one[system.name][case][key] for one in rounds) for case in names]
            for key in ("server_us", "worker_us")
        ]
        cells = [f"{server:.1f} + {worker:.1f}" for server, worker in zip(*parts, strict=True)]
        lines.append(f"| {system.name} | {' | '.join(cells)} |")
    if kills:
        lines += ["", f"Messages at {len(kills)} kills of the server, all together:", ""]
        lines += [f"| | {' | '.join(KILLED.values())} |", "|---" * (len(KILLED) + 1) + "|"]
        for system in systems:
            sums = [sum(one[system.name][key] for one in kills) for key in KILLED]
            lines.append(f"| {system.name} | {' | '.join(f'{number:,}' for number in sums)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the benchmark."""
    if sys.argv[1:2] == ["--work"]:
        kind, port, stream, batch, name = sys.argv[2:]
        work(kind, int(port), stream, int(batch), name)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--messages", type=int, default=20_000, help="of 100 at a time; other cases have fewer"
    )
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    systems = [one for one in SYSTEMS if one.kind == "streambridge" or nats.installed()]
    runs: dict[str, list[dict[str, Any]]] = {"rounds": [], "kills": []}
    for what, times in (("rounds", given.rounds), ("kills", given.kills)):
        for number in range(times):
            found: dict[str, Any] = {}
            for system in systems:
                with tempfile.TemporaryDirectory(dir=system.place or given.output.resolve()) as root:
                    place = Path(root)
                    found[system.name] = (
                        one_round(system, place, given.messages)
                        if what == "rounds"
                        else kill(system, place, number)
                    )
            runs[what].append(found)
            print(f"{what} {number + 1}/{times}", file=sys.stderr, flush=True)
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    (given.output / "consumers.json").write_text(json.dumps({"machine": machine, **runs}, indent=1))
    text = tables(systems, runs["rounds"], runs["kills"])
    (given.output / "consumers.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
