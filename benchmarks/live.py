"""New messages first: how old the newest message at the destination is while a backlog goes out.

    python -m benchmarks.live [--messages 1000000] [--rate 20] [--link 1000000] [--output DIR]

A stream has a backlog of `--messages` messages of about 200 bytes, and gets `--rate` new ones a second. A
real worker exports it to a stand-in for S3, over a link of `--link` bits per second that adds 50 ms to each
answer, with `time_hint_millis = 1000`. It does so twice at the same time, over two such links: oldest first
and newest first.

The age is that of the newest message at the destination, sampled each 10 ms of the drain. The drain ends
when all that is older than five seconds is there.

Caveats. The stand-in counts what it reads of the connection: HTTP with its headers, without what TCP, IP and
TLS add. Payloads have numbers that hardly compress. Both workers share the machine, which the link leaves
idle.

Writes live.json and live.md to the output directory, and prints the table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from bisect import bisect_right
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from benchmarks.export import Gateway, payloads
from bridge.objectkeys import parse_key
from bridge.ranges import Ranges

ORDERS = ("oldest first", "newest first")
DELAY = 0.05  # seconds to each answer
PIECE = 4096
RECENT = 5.0  # seconds
SAMPLE = 0.01  # seconds


class Destination:
    """S3 behind a link: takes every object, and knows when it was there."""

    def __init__(self, bits: int) -> None:
        self._rate, self._free_at = bits / 8, 0.0
        self.there = Ranges()
        self.arrived: list[tuple[float, int]] = []  # Unix time, and the newest number then
        self.bytes = self.objects = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Give its URL."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=PIECE)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        data = await reader.read(PIECE)
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + len(data) / self._rate
        self.bytes += len(data)
        await asyncio.sleep(self._free_at - now)
        return data

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = bytearray()
        while True:
            while (end := data.find(b"\r\n\r\n")) < 0:
                if not (part := await self._read(reader)):
                    writer.close()
                    return
                data += part
            head = bytes(data[:end]).lower()
            left = end + 4 - len(data)
            if b"content-length:" in head:
                left += int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            if b"100-continue" in head:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request = bytes(data[:end])
            data.clear()
            while left > 0:
                left -= len(await self._read(reader))
            await asyncio.sleep(DELAY)
            self._take(request)
            writer.write(b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 0\r\n\r\n')

    def _take(self, request: bytes) -> None:
        name = parse_key(unquote(request.split(b" ")[1].decode()))
        if name is not None:
            self.objects += 1
            self.there.add(name.first, name.last)
            self.arrived.append((time.time(), self.there.last))


def ages(arrived: list[tuple[float, int]], times: list[float], began: float, ended: float) -> list[float]:
    """The age of the newest message at the destination, sampled; `times` are those of the messages."""
    found, at = [], began
    moments = [moment for moment, _ in arrived]
    while at < ended:
        number = bisect_right(moments, at)
        found.append(at - (times[arrived[number - 1][1]] if number else times[0]))
        at += SAMPLE
    return sorted(found)


async def measure(order: str, given: argparse.Namespace, rows: list[bytes]) -> dict[str, Any]:
    """One export of one backlog."""
    chance = random.Random(order)
    destination = Destination(given.link)
    with tempfile.TemporaryDirectory() as root:
        async with destination.open() as url:
            gateway = Gateway(Path(root), 1)
            base = {"identifier": "x", "bucket": "bbb", "endpointUrl": url, "timeHintMillis": 1000}
            config = {**base, "order": order}
            gateway.define("s", {})
            times: list[float] = []
            for start in range(0, given.messages, len(rows)):
                some = rows[: given.messages - start]
                await gateway.fill("s", some)
                times += [time.time()] * len(some)
            await asyncio.sleep(2 * RECENT)
            await gateway.exports.start()
            began = time.time()
            gateway.define("s", {"s3": [config]}, update=True)
            while True:
                times.append(time.time())
                await gateway.manager.append("s", chance.choice(rows))
                # What was appended before that moment has arrived.
                old = bisect_right(times, time.time() - RECENT)
                if destination.there.covers(0, old - 1):
                    break
                await asyncio.sleep(chance.uniform(0.5, 1.5) / given.rate)
            ended = time.time()
            await gateway.close()
    sampled = ages(destination.arrived, times, began + RECENT, ended)
    return {
        "order": order,
        "messages": len(times),
        "drain_s": round(ended - began, 1),
        "messages_per_s": round(len(times) / (ended - began)),
        "age_p50_s": round(sampled[len(sampled) // 2], 2),
        "age_p99_s": round(sampled[len(sampled) * 99 // 100], 2),
        "age_max_s": round(sampled[-1], 2),
        "objects": destination.objects,
        "mbytes": round(destination.bytes / 1e6, 1),
    }


def table(found: list[dict[str, Any]], given: argparse.Namespace) -> str:
    """The results as Markdown."""
    lines = [
        f"{given.messages:,} messages behind, {given.rate} new ones a second, {given.link / 1e6:g} Mbit/s:",
        "",
        "| order | drain | messages/s | age of the newest message there: p50 | p99 | max | objects | MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['order']} | {row['drain_s']:,.0f} s | {row['messages_per_s']:,} | {row['age_p50_s']:,.2f} s "
        f"| {row['age_p99_s']:,.2f} s | {row['age_max_s']:,.2f} s | {row['objects']:,} | {row['mbytes']:,} |"
        for row in found
    ]
    ratio = found[1]["messages_per_s"] / found[0]["messages_per_s"]
    return "\n".join([*lines, "", f"Newest first drains at {ratio:.3f} of the rate of oldest first."])


async def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Both orders, side by side."""
    rows = payloads(min(given.messages, 20_000), 200)
    return await asyncio.gather(*(measure(order, given, rows) for order in ORDERS))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=20, help="new messages a second")
    parser.add_argument("--link", type=int, default=1_000_000, help="bits a second")
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    given = parser.parse_args()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.setdefault(name, "benchmark")
    os.environ.setdefault("AWS_DEFAULT_REGION", "eu-central-1")
    found = asyncio.run(run(given))
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "live.json").write_text(json.dumps(found, indent=1) + "\n")
    (given.output / "live.md").write_text(table(found, given) + "\n")
    print(table(found, given))


if __name__ == "__main__":
    main()
