"""Uplink: the export `mqtt` and Mosquitto's own bridge, to the same broker, in one run.

    python -m benchmarks.uplink [--messages 20000] [--seconds 10] [--rounds 3] [--output DIR]

An edge broker gets messages of 200 bytes at QoS 1 from one publisher, 100 in flight, and brings them to a
broker upstream. That one is a process of its own with a window of 100. It answers each PUBLISH at once and
remembers its number. It never forgets what it has acknowledged: what is missing there, the edge has lost.

    live       the publisher sends for at most `--seconds`, with the link up and the edge connected
    drain      the same while the link is down; then the link comes up
    kill away  as drain, but the edge is killed (SIGKILL) and started again before the link is up
    kill       as drain, but the edge is killed when half has arrived
    upstream   as live, while the broker upstream ends its connections ten times, before it has answered

Of the messages that the edge had acknowledged to the publisher, the table has how many did not arrive (lost),
how many came again, and how many came for the first time behind a later one. Messages per second are from the
first arrival to the last; "away" is the time from the link to the first. Both are medians of the rounds, the
other numbers are sums. Every setting runs in turn for each edge.

Caveats. Mosquitto keeps its queue in memory and writes all of it to a file when it saves: by default every
half hour, and with `autosave_on_changes` after each change, which is what keeps most. No edge syncs, except
"fdatasync": a SIGKILL leaves what the kernel has. Publisher, edge and upstream share the machine. The bridge
has `cleansession false`, `set_tcp_nodelay true`, `restart_timeout 1`, and queues without a limit.
Writes uplink.json and uplink.md to the output directory, and prints the table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.testbed.local import find, free_port
from benchmarks.testbed.mqtt import Client, connect, packet, publish

WINDOW = 100
SIZE = 200
QUIET = 15.0  # seconds without an arrival after which nothing more is awaited
SCENARIOS = ("live", "drain", "kill away", "kill", "upstream")
CHECKOUT = Path(__file__).parents[1]


class Edge(NamedTuple):
    """An edge broker: its command in a directory, with its own port and that of the broker upstream."""

    name: str
    command: Callable[[Path, int, int], list[str]]


def ours(directory: Path, port: int, upstream: int, *, sync: bool = False) -> list[str]:
    config = directory / "streambridge.toml"
    config.write_text(
        f'[gateway]\nid = "edge"\ndata_dir = "data"\n[mqtt]\nlisten = ["tcp://127.0.0.1:{port}"]\n'
        f'[greengrass]\nlisten = ""\n[http]\nlisten = ""\n'
        f'[streams.plant]\ntopics = ["plant/#"]\nflush_on_write = {str(sync).lower()}\n'
        f'[[streams.plant.export.mqtt]]\nidentifier = "up"\nurl = "mqtt://127.0.0.1:{upstream}"\n'
        f"max_in_flight = {WINDOW}\n"
    )
    return [sys.executable, "-m", "bridge", "run", "-c", str(config)]


def mosquitto(directory: Path, port: int, upstream: int, *, saves: str = "") -> list[str]:
    config = directory / "mosquitto.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\nuser root\npersistence true\n"
        f"persistence_location {directory}/\n{saves}max_queued_messages 0\nmax_inflight_messages {WINDOW}\n"
        "set_tcp_nodelay true\n"
        f"connection up\naddress 127.0.0.1:{upstream}\ntopic # out 1\ncleansession false\n"
        "restart_timeout 1\nnotifications false\ntry_private false\nbridge_attempt_unsubscribe false\n"
    )
    return [find("mosquitto") or "mosquitto", "-c", str(config)]


EDGES = [
    Edge("streambridge", ours),
    Edge("streambridge, fdatasync", lambda d, p, u: ours(d, p, u, sync=True)),
    Edge("mosquitto", mosquitto),
    Edge(
        "mosquitto, autosave on changes",
        lambda d, p, u: mosquitto(d, p, u, saves="autosave_on_changes true\nautosave_interval 1\n"),
    ),
]


# --- the broker upstream, a process of its own


class _Upstream:
    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.first = self.last = 0.0
        self.cutting = False  # end the connection with the next packet, without an answer
        self._clients: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        data = bytearray()
        v5 = False
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while chunk := await reader.read(256 * 1024):
                data += chunk
                answers, at = [], 0
                while (found := _frame(data, at)) is not None:
                    body, end = found
                    kind = data[at] & 0xF0
                    if kind == 0x10:
                        v5 = data[body + 6] == 5
                        answers.append(
                            packet(0x20, b"\0\0\x03\x21" + WINDOW.to_bytes(2, "big") if v5 else b"\0\0")
                        )
                    elif kind == 0x30 and data[at] & 6:
                        behind = body + 2 + int.from_bytes(data[body : body + 2], "big")
                        self.numbers.append(int(data[end - SIZE : end - SIZE + 12]))
                        answers.append(b"\x40\x02" + data[behind : behind + 2])
                    elif kind == 0xC0:
                        answers.append(b"\xd0\0")
                    elif kind == 0x80:
                        answers.append(packet(0x90, data[body : body + 2] + (b"\0\0" if v5 else b"\0")))
                    at = end
                del data[:at]
                if self.numbers and self.cutting:
                    self.cutting = False
                    writer.transport.abort()
                elif answers:
                    self.last = time.monotonic()
                    self.first = self.first or (self.last if self.numbers else 0.0)
                    writer.write(b"".join(answers))
                    await writer.drain()
        self._clients.discard(writer)
        writer.close()

    def cut(self) -> None:
        for writer in self._clients:
            writer.transport.abort()


def _frame(data: bytearray, at: int) -> tuple[int, int] | None:
    """Where the body of the packet begins and ends; None while it is incomplete."""
    length = shift = 0
    for pos in range(at + 1, min(at + 5, len(data))):
        length |= (data[pos] & 0x7F) << shift
        shift += 7
        if data[pos] < 0x80:
            end = pos + 1 + length
            return (pos + 1, end) if end <= len(data) else None
    return None


def upstream(port: int, pipe: multiprocessing.connection.Connection) -> None:
    """Serve; the pipe says what to do: up, down, cut, numbers, count, end."""

    async def run() -> None:
        broker, server = _Upstream(), None
        while True:
            word = await asyncio.to_thread(pipe.recv)
            answer: Any = None
            match word:
                case "up":
                    server = await asyncio.start_server(broker.serve, "127.0.0.1", port)
                case "down" | "end":
                    if server is not None:
                        server.close()
                        server = None
                    broker.cut()
                case "cut":
                    broker.cutting = True
                case "count":
                    answer = len(broker.numbers), broker.first, broker.last
                case "numbers":
                    answer, broker.numbers, broker.first = broker.numbers, [], 0.0
            pipe.send(answer)
            if word == "end":
                return

    asyncio.run(run())


class Upstream:
    """The broker upstream, from the process that measures."""

    def __init__(self) -> None:
        self.port = free_port()
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=upstream, args=(self.port, theirs))
        self._process.start()

    def ask(self, word: str) -> Any:
        self._pipe.send(word)
        return self._pipe.recv()

    def close(self) -> None:
        self.ask("end")
        self._process.join()


# --- the edge


class Process:
    """An edge that runs, and is killed and started again on the same directory."""

    def __init__(self, edge: Edge, directory: Path, upstream_port: int) -> None:
        self.port = free_port()
        self._command = edge.command(directory, self.port, upstream_port)
        self._log = (directory / "log").open("ab")
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdout=self._log, stderr=self._log, cwd=CHECKOUT, start_new_session=True
        )
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it does not start: {' '.join(self._command)}")
            time.sleep(0.02)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._log.close()


async def send(port: int, messages: int, seconds: float, meanwhile: Callable[[float], None]) -> int:
    """Publish numbers for at most `seconds`; returns how many were acknowledged, all that were sent.

    `meanwhile` is called from time to time with the part of the work that is done.
    """
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    client.send(connect("publisher"))
    await client.receive()
    sent = acknowledged = 0
    data = b""
    began = time.monotonic()
    while True:
        done = max(sent / messages, (time.monotonic() - began) / seconds)
        meanwhile(done)
        more = 0 if done >= 1 else min(WINDOW - (sent - acknowledged), messages - sent)
        client.send(
            *(
                publish(f"plant/{n % 10}/temp", (b"%012d" % n).ljust(SIZE, b"x"), 1, n % 65_535 + 1)
                for n in range(sent, sent + more)
            )
        )
        sent += more
        if acknowledged == sent and not more:
            client.disconnect()
            return sent
        data += await asyncio.wait_for(client.reader.read(65_536), 60)
        acknowledged, data = acknowledged + len(data) // 4, data[len(data) // 4 * 4 :]


def arrived(broker: Upstream, sent: int) -> tuple[float, float]:
    """Wait until all or nothing more arrives; returns when the first and the last one did."""
    count, first, last = broker.ask("count")
    quiet_at = time.monotonic() + QUIET
    while count < sent and time.monotonic() < quiet_at:
        time.sleep(0.05)
        before = count
        count, first, last = broker.ask("count")
        if count > before:
            quiet_at = time.monotonic() + QUIET
    time.sleep(0.5)  # repetitions
    return first, last


def run(edge: Edge, scenario: str, messages: int, seconds: float, root: Path) -> dict[str, Any]:
    """One scenario with a fresh edge; its figures."""
    broker = Upstream()
    with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o777)
        process = Process(edge, Path(name), broker.port)
        try:
            return _measure(broker, process, scenario, messages, seconds)
        finally:
            process.close()
            broker.close()


def _measure(
    broker: Upstream, process: Process, scenario: str, messages: int, seconds: float
) -> dict[str, Any]:
    with_link = scenario in ("live", "upstream")
    cuts = iter(range(1, 11))
    next_cut = next(cuts) / 11 if scenario == "upstream" else 2.0

    def meanwhile(done: float) -> None:
        nonlocal next_cut
        if done >= next_cut:
            broker.ask("cut")
            next_cut = next(cuts, 22) / 11

    if with_link:
        broker.ask("up")
        asyncio.run(send(process.port, 1, 1, lambda done: None))  # it connects with the first message
        arrived(broker, 1)
        broker.ask("numbers")
    began = time.monotonic()
    sent = asyncio.run(send(process.port, messages, seconds, meanwhile))
    if scenario == "kill away":
        process.kill()
        process.start()
    if not with_link:
        began = time.monotonic()
        broker.ask("up")
    if scenario == "kill":
        deadline = time.monotonic() + QUIET
        while broker.ask("count")[0] < sent / 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        process.start()
    first, last = arrived(broker, sent)
    numbers = broker.ask("numbers")
    counts = Counter(numbers)
    newest, late = -1, 0
    for number in dict.fromkeys(numbers):
        late += number < newest
        newest = max(newest, number)
    return {
        "sent": sent,
        "rate": len(counts) / max(last - first, 1e-9),
        "away": first - began,
        "lost": sent - len(counts),
        "repeated": len(numbers) - len(counts),
        "disordered": late,
    }


# --- the report


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: one row per scenario and edge."""
    lines = [
        "| | edge | messages | messages/s | away | lost | repeated | out of order |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for scenario in SCENARIOS:
        for edge in EDGES:
            found = [r for r in results if (r["scenario"], r["edge"]) == (scenario, edge.name)]
            if not found:
                continue
            sums = {key: sum(r[key] for r in found) for key in ("sent", "lost", "repeated", "disordered")}
            middle = {key: statistics.median(r[key] for r in found) for key in ("rate", "away")}
            rate = f"{middle['rate']:,.0f}" if scenario in ("live", "drain") else ""
            away = f"{middle['away']:.1f} s" if scenario == "drain" else ""
            lines.append(
                f"| {scenario} | {edge.name} | {sums['sent']:,} | {rate} | {away} | {sums['lost']:,} "
                f"| {sums['repeated']:,} | {sums['disordered']:,} |"
            )
    return "\n".join(lines) + "\n"


def _edges() -> Iterator[Edge]:
    for edge in EDGES:
        if edge.name.startswith("mosquitto") and find("mosquitto") is None:
            print(f"{edge.name}: mosquitto is not installed")
        else:
            yield edge


def main() -> None:
    """Measure, print the table, write the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    edges, results = list(_edges()), []
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        for number in range(given.rounds):
            for scenario in given.only:
                for edge in edges:
                    found = run(edge, scenario, given.messages, given.seconds, Path(name))
                    results.append({"scenario": scenario, "edge": edge.name, "round": number, **found})
                    print(json.dumps(results[-1]), flush=True)
    (given.output / "uplink.json").write_text(
        json.dumps({"cpus": os.cpu_count(), "results": results}, indent=1)
    )
    (given.output / "uplink.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
