"""What 300 hostile connections cost another client: its wait for PUBACK.

    python -m benchmarks.hostile [--connections 300] [--seconds 5] [--only NAME ...] [--output DIR]

A device with ordinary rights opens so many connections, and sends one kind of work on all of them, as fast as
the service takes it: each operation of the catalog, and each packet type. The requests are the worst that we
know: a scan of 100,000 messages for a topic that no message has, subscriptions to 10,000 retained messages,
wills with a receiver on each connection. Meanwhile another client publishes at QoS 1, every 10 ms, and waits
for each PUBACK. The table has its wait (p50, p99, the longest), and the ratio of p99 to that of the same
client alone.

An operation or a packet type that is added to the service and has no row here ends the run with an error.

The service has no commit delay, so what is measured is what others cost: with it, a client that the attackers
have kept from the processor for 60 ms counts as one that pauses, and waits up to 250 ms for others.

Caveats. Attackers, service and the other client share one machine; the attackers are one process. What the
device has no right to is refused, and so costs little. Each kind of work runs alone.
Writes hostile.json and hostile.md to the output directory, and prints the table.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.testbed.mqtt import PING, Client, ack, connect, publish, subscribe, unsubscribe
from bridge.mqtt.server.states import OPEN, TRANSITIONS, State
from bridge.mqtt.wire import packets
from bridge.operations.catalog import OPERATIONS

CHECKOUT = Path(__file__).parents[1]
THERE, HERE = "127.0.0.2", "127.0.0.1"  # of the attackers, and of the other client
MESSAGES, RETAINED, STREAMS = 100_000, 10_000, 200
EVERY = 0.01  # seconds between two messages of the other client
CHUNK = 32 * 1024  # bytes of small packets that are sent at a time
CONFIG = """
[gateway]
commit_delay = "0s"
data_dir = "data"
[mqtt]
listen = ["tcp://127.0.0.1:0"]
allow_anonymous = true
[mqtt.limits]
connections_per_address = 10000
retained_messages = 20000
[[mqtt.acl]]
publish = ["in/#", "flood/#", "r/#", "streambridge/%c/#", "streams/big", "streams/per-topic"]
subscribe = ["flood/#", "r/#", "streambridge/%c/#"]
read = ["#"]
manage = ["streams/own"]
[http]
listen = ""
[greengrass]
listen = ""
[streams.big]
topics = ["in/#"]
max_size = "4GiB"
strategy_on_full = "OverwriteOldestData"
[[streams.big.export.consumer]]
identifier = "idle"
topics = ["nothing/#"]
[streams.per-topic]
topics = ["topic/#"]
[streams.per-topic.limits]
max_messages_per_topic = 1
"""


def request(operation: str, body: dict[str, Any]) -> Callable[[str], bytes]:
    """Requests of a client, 16 at a time."""
    data = json.dumps(body).encode()
    return lambda client: publish(f"streambridge/{client}/{operation}", data) * 16


def many(one: bytes) -> Callable[[str], bytes]:
    """Small packets."""
    return lambda client: one * (CHUNK // len(one))


SCAN = {"maxMessageCount": 1, "topic": "nothing/here"}
OWN = {"definition": {"name": "own", "maxSize": 1 << 20, "streamSegmentSize": 1 << 20}}
REQUESTS: dict[str, list[dict[str, Any]]] = {
    "createMessageStream": [OWN],
    "updateMessageStream": [OWN],
    "deleteMessageStream": [{"name": "own"}],
    "describeMessageStream": [{"name": "per-topic"}],
    "listStreams": [{"details": True}],
    "appendMessage": [{"name": "big", "payload": "eA=="}],
    "appendMessages": [{"name": "big", "payloads": ["eA=="] * 10_000}],
    "readMessages": [
        {"streamName": "big", "readMessagesOptions": SCAN},
        {"streamName": "per-topic", "readMessagesOptions": SCAN | {"lastPerTopic": True}},
        {"streamName": "big", "readMessagesOptions": {"maxMessageCount": 10_000}},
    ],
    "fetchMessages": [{"name": "big", "consumer": "idle", "maxMessageCount": 1000, "timeoutMillis": 1000}],
    "ackMessages": [{"name": "big", "consumer": "idle", "ack": list(range(10_000))}],
    "purgeMessageStream": [{"name": "own", "topic": "nothing/here"}],
    "pauseExports": [{"name": "own"}],
    "resumeExports": [{"name": "own"}],
    "retryExports": [{"name": "own"}],
    "listClients": [{}],
    "disconnectClients": [{"user": "nobody"}],
    "forgetClient": [{"client": "nobody"}],
}
_numbers = itertools.count()


def _topics(head: str, **options: Any) -> Callable[[str], bytes]:
    """PUBLISH packets on ever new topics."""

    def packets_of(client: str) -> bytes:
        return b"".join(publish(f"{head}/{client}/{next(_numbers)}", b"x", **options) for _ in range(500))

    return packets_of


def _filters(client: str) -> bytes:
    return subscribe(1, *((f"r/+/{client}/{number}", 0) for number in range(400)))


PACKETS: dict[int, dict[str, Callable[[str], bytes]]] = {
    packets.CONNECT: {"CONNECT": lambda client: b""},
    packets.PUBLISH: {
        "PUBLISH": many(publish("in/x", b"x", 1, 1)),
        "PUBLISH, QoS 2": many(publish("in/x", b"x", 2, 1) + ack(0x62, 1)),
        "PUBLISH, new topics": _topics("in"),
        "PUBLISH, retained": _topics("r/new", retain=True),
        "PUBLISH, many receivers": lambda client: publish("flood/all", b"x") * 20,
        "PUBLISH, refused": many(publish("denied", b"x")),
    },
    packets.PUBACK: {"PUBACK": many(ack(0x40, 7))},
    packets.PUBREC: {"PUBREC": many(ack(0x50, 7))},
    packets.PUBREL: {"PUBREL": many(ack(0x62, 7))},
    packets.PUBCOMP: {"PUBCOMP": many(ack(0x70, 7))},
    packets.SUBSCRIBE: {"SUBSCRIBE": _filters, "SUBSCRIBE, all": lambda client: subscribe(1, ("r/#", 0))},
    packets.UNSUBSCRIBE: {"UNSUBSCRIBE": lambda client: unsubscribe(1, *(f"f/{n}" for n in range(400)))},
    packets.PINGREQ: {"PINGREQ": many(PING)},
    packets.DISCONNECT: {"DISCONNECT, with a will": lambda client: b""},
}
SHORT = ("CONNECT", "DISCONNECT, with a will")  # connections that end at once


def kinds() -> dict[str, Callable[[str], bytes]]:
    """Every kind of work by name. Raises KeyError if an operation or a packet type has none."""
    found: dict[str, Callable[[str], bytes]] = {}
    for name in OPERATIONS:
        for number, body in enumerate(REQUESTS[name], 1):
            found[name if number == 1 else f"{name} ({number})"] = request(name, body)
    for row in TRANSITIONS:
        if row.state in (State.NEW, OPEN) and isinstance(row.on, int):
            found |= PACKETS[row.on]
    return found


# -- the attackers ------------------------------------------------------------


async def _attack(port: int, kind: str, number: int) -> None:
    client = f"h{number}"
    send, short = kinds()[kind], kind in SHORT
    will = ("flood/all", b"x", 0) if short else None
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(HERE, port, local_addr=(THERE, 0))
            writer.write(connect(f"{client}-{next(_numbers)}" if short else client, will=will))
            await reader.readexactly(4)
            if kind == "PUBLISH, many receivers" or short:
                writer.write(subscribe(1, ("flood/all", 0)))
                await reader.readexactly(5)
            if number == 0:
                print("begun", flush=True)
            discard = asyncio.create_task(_discard(reader))
            try:
                while not short and not discard.done():
                    writer.write(send(client))
                    await writer.drain()
                    await asyncio.sleep(0)
            finally:
                discard.cancel()
                writer.transport.abort()
        await asyncio.sleep(0.01)


async def _discard(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(1 << 20):
            pass


async def attack(port: int, kind: str, connections: int) -> None:
    """Send until the process is ended."""
    await asyncio.gather(*(_attack(port, kind, number) for number in range(connections)))


# -- the service, and the other client ------------------------------------------------------------


@contextmanager
def service(directory: Path) -> Iterator[int]:
    """Run the service; yields its port."""
    path = directory / "bench.toml"
    extra = "".join(f'[streams.s{number}]\ntopics = ["s/{number}"]\n' for number in range(STREAMS))
    path.write_text(CONFIG + extra)
    process = subprocess.Popen(
        [sys.executable, "-m", "bridge", "run", "-c", str(path)],
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        found = next((m for line in process.stderr if (m := re.search(r"ready.*:(\d+)", line))), None)
        if found is None:
            raise SystemExit("the service does not start")
        log = (directory / "log").open("w")
        copier = subprocess.Popen(["cat"], stdin=process.stderr, stdout=log)
        yield int(found[1])
    finally:
        process.terminate()
        process.wait(60)
    copier.wait(60)


async def _connected(port: int, client_id: str) -> Client:
    client = Client(*await asyncio.open_connection(HERE, port, local_addr=(HERE, 0)))
    await client.connect(client_id)
    return client


async def prepare(port: int) -> None:
    """Store what is scanned."""
    client = await _connected(port, "prepares")
    for begin in range(0, MESSAGES, 1000):
        client.send(*(publish(f"in/{number % 50}", b"x" * 100) for number in range(begin, begin + 999)))
        await client.exchange(publish("in/last", b"x", 1, 1))
    for begin in range(0, RETAINED, 1000):
        numbers = range(begin, begin + 1000)
        client.send(*(publish(f"r/{number}/a/0", b"x", retain=True) for number in numbers))
        await client.exchange(PING)
    client.disconnect()


async def waits(port: int, seconds: float) -> list[float]:
    """Return how long a client waits for each PUBACK, in ms."""
    client, found = await _connected(port, "other"), []
    until = time.monotonic() + seconds
    while (began := time.monotonic()) < until:
        await client.exchange(publish("in/other", b"x", 1, 1))
        found.append((time.monotonic() - began) * 1000)
        await asyncio.sleep(EVERY)
    client.disconnect()
    return found


def figures(found: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the longest."""
    ordered = sorted(found)
    p99 = ordered[min(len(ordered) - 1, round(len(ordered) * 0.99))]
    return {"p50": statistics.median(found), "p99": p99, "longest": ordered[-1], "messages": len(found)}


def measure(port: int, kind: str, connections: int, seconds: float) -> dict[str, float]:
    """Return the figures of the other client under one kind of work."""
    command = [sys.executable, "-m", "benchmarks.hostile", "--attack", kind, "--port", str(port)]
    attackers = subprocess.Popen(
        [*command, "--connections", str(connections)], stdout=subprocess.PIPE, cwd=CHECKOUT
    )
    try:
        assert attackers.stdout is not None
        attackers.stdout.readline()
        time.sleep(1)  # until they are all at it
        return figures(uvloop.run(waits(port, seconds)))
    finally:
        attackers.kill()
        attackers.wait()


def table(found: dict[str, dict[str, float]]) -> str:
    """The table."""
    lines = ["| work | p50 ms | p99 ms | longest ms | p99 / alone |", "|---|---|---|---|---|"]
    alone = found["alone"]["p99"]
    for name, one in found.items():
        times = " | ".join(f"{one[key]:.1f}" for key in ("p50", "p99", "longest"))
        lines.append(f"| {name} | {times} | {one['p99'] / alone:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each kind of work")
    parser.add_argument("--only", nargs="*", help="kinds of work")
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack:
        uvloop.run(attack(given.port, given.attack, given.connections))
    given.output.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, float]] = {"alone": {}}
    for kind in given.only or kinds():
        with tempfile.TemporaryDirectory() as root, service(Path(root)) as port:
            uvloop.run(prepare(port))
            if not found["alone"]:
                found["alone"] = figures(uvloop.run(waits(port, given.seconds)))
            found[kind] = measure(port, kind, given.connections, given.seconds)
            print(f"{kind}: {found[kind]}", file=sys.stderr, flush=True)
    machine = f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}"
    (given.output / "hostile.json").write_text(json.dumps({"machine": machine, "kinds": found}, indent=1))
    (given.output / "hostile.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
