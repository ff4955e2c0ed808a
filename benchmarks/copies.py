"""Copies of ordinary messages: the cost for the broker, with one publisher and ten subscribers.

    python -m benchmarks.copies [--rounds 5] [--messages 4000] [--size 128] [--output DIR]

The publisher sends groups of messages on a topic without a stream. It sends a group when every subscriber
has received the previous one, so no queue overflows, and every copy arrives. The result is the CPU time of
the server per copy, after a warm-up with the same number of messages (during which the service starts its
export worker). Publisher and subscribers use the same QoS, and acknowledge at QoS 1.

Caveats. The generator is one Python process on the same machine, so the generator limits copies per second
as much as the server does. Peers that are not installed are skipped: mosquitto, amqtt.

Writes copies.json and copies.md to the output directory, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import selectors
import socket
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks import brokers, ingest
from bridge.mqtt.wire.packets import CONNECT, PUBLISH, SUBSCRIBE, packet, string

NAMES = ("streambridge", "mosquitto, no persistence", "amqtt alone")
SUBSCRIBERS = 10
GROUP = 200  # messages that the publisher sends before it waits for their copies
TOPIC = b"plain/copies"
PATIENCE = 20.0  # seconds without any copy
ID = 2 + 2 + len(TOPIC)  # where a packet id is in a PUBLISH, behind a length of one byte


def client(port: int, name: str) -> socket.socket:
    """A connection that a server has let in."""
    sock = socket.create_connection(("127.0.0.1", port), PATIENCE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(packet(CONNECT, string(b"MQTT") + b"\x04\x02\0\0" + string(name.encode())))
    if sock.recv(4) != b"\x20\x02\0\0":
        raise ConnectionError("the server did not let a client in")
    return sock


def publish(number: int, qos: int, payload: bytes) -> bytes:
    """One PUBLISH."""
    packet_id = (number % 60_000 + 1).to_bytes(2, "big") if qos else b""
    return packet(PUBLISH | qos << 1, string(TOPIC) + packet_id + payload)


def measure(server: brokers.Server, root: Path, qos: int, messages: int, size: int) -> tuple[float, float]:
    """Microseconds of CPU time a copy, and copies a second; raises TimeoutError if one does not arrive."""
    payload = bytes(size)
    length = len(publish(0, qos, payload))
    at = ID + (size + ID + 2 * bool(qos) - 2 > 127)
    with brokers.serving(server, root) as (pid, port), selectors.DefaultSelector() as selector:
        publisher = client(port, "publisher")
        selector.register(publisher, selectors.EVENT_READ)
        arrived: dict[socket.socket, int] = {}
        rest: dict[socket.socket, bytes] = {}
        for number in range(SUBSCRIBERS):
            sock = client(port, f"subscriber-{number}")
            sock.sendall(packet(SUBSCRIBE, b"\0\x01" + string(TOPIC) + bytes([qos])))
            sock.recv(5)
            selector.register(sock, selectors.EVENT_READ)
            arrived[sock], rest[sock] = 0, b""
        cpu = began = 0.0
        for first in range(-messages, messages, GROUP):
            if first >= 0 and not began:
                cpu, began = ingest.cpu_of(pid), time.perf_counter()
            end = first + GROUP
            publisher.sendall(b"".join(publish(number, qos, payload) for number in range(first, end)))
            while min(arrived.values()) < end + messages:
                ready = selector.select(PATIENCE)
                if not ready:
                    raise TimeoutError(f"{server.name}: copies are missing: {sorted(arrived.values())}")
                for key, _ in ready:
                    sock = key.fileobj  # type: ignore[assignment]
                    data = sock.recv(1 << 20)
                    if not data:
                        raise ConnectionError(f"{server.name} closed a connection")
                    if sock is publisher:
                        continue  # its acknowledgements
                    data = rest[sock] + data
                    whole = len(data) // length
                    rest[sock] = data[whole * length :]
                    arrived[sock] += whole
                    if qos:
                        starts = range(at, whole * length, length)
                        sock.sendall(b"".join(b"\x40\x02" + data[start : start + 2] for start in starts))
        took, used = time.perf_counter() - began, ingest.cpu_of(pid) - cpu
        for sock in (publisher, *arrived):
            sock.close()
    return used / messages / SUBSCRIBERS * 1e6, messages * SUBSCRIBERS / took


def table(found: dict[str, dict[str, tuple[float, float]]]) -> str:
    """Medians as Markdown, one row for each server."""
    lines = [
        "| | QoS 0: CPU µs a copy | copies/s | QoS 1: CPU µs a copy | copies/s |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | " + " | ".join(f"{cpu:.1f} | {rate:,.0f}" for cpu, rate in by_qos.values()) + " |"
        for name, by_qos in found.items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=4_000, help=f"a multiple of {GROUP}")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    servers = [one for one in brokers.SERVERS if one.name in NAMES and brokers.installed(one)]
    runs: dict[str, dict[str, list[tuple[float, float]]]] = {one.name: {"0": [], "1": []} for one in servers}
    with tempfile.TemporaryDirectory(dir=given.output.resolve()) as root:
        for _ in range(given.rounds):
            for server in servers:
                for qos in (0, 1):
                    result = measure(server, Path(root), qos, given.messages, given.size)
                    runs[server.name][str(qos)].append(result)
    found = {
        name: {
            qos: (statistics.median(cpu for cpu, _ in some), statistics.median(rate for _, rate in some))
            for qos, some in by_qos.items()
        }
        for name, by_qos in runs.items()
    }
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    (given.output / "copies.json").write_text(json.dumps({"machine": machine, "rows": found, "runs": runs}))
    (given.output / "copies.md").write_text(table(found) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
