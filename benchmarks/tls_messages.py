"""What TLS adds to a message: streambridge and Mosquitto, loaded in turn.

    python -m benchmarks.tls_messages [--devices 500] [--rate 10000] [--rounds 3] [--output DIR]

All servers run at the same time, each with a listener for TCP and one for TLS 1.3. In each round the devices
of `scale.py` connect to one listener after the other, and publish 200 bytes at QoS 1, together `--rate`
messages a second. Each message needs its own read and write.

Shown are medians of the rounds: the server's CPU time per message over TCP and over TLS, without that of
connecting, and TLS in relation to TCP in the same round.

Caveats. Devices and servers share the machine. Mosquitto stores nothing.
Writes tls_messages.json and tls_messages.md to the output directory, and prints the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import brokers
from benchmarks.brokers import NEWER, Server
from benchmarks.ingest import cpu_of
from benchmarks.scale import loading
from benchmarks.testbed.certificates import Authority
from benchmarks.testbed.local import free_port


def spent(pid: int, port: int, devices: int, rate: float, ca: str) -> float:
    """The CPU time of a server for a message of these devices, µs."""
    with loading(port, devices, rate, ca) as tell:
        tell("connect")
        before = cpu_of(pid)
        messages = tell("publish")["messages"]
        return (cpu_of(pid) - before) / messages * 1e6


def measure(given: argparse.Namespace, root: Path) -> dict[str, list[tuple[float, float]]]:
    """All rounds: server name -> CPU µs per message, over TCP and over TLS."""
    authority = Authority(root)
    pair = authority.issue("gateway")
    found: dict[str, list[tuple[float, float]]] = {}
    with contextlib.ExitStack() as stack:
        running = {}
        for name, command, program in (
            ("streambridge", partial(brokers.ours, topic="in/#"), ""),
            ("mosquitto", brokers.mosquitto, "mosquitto"),
            ("mosquitto 2.1", partial(brokers.mosquitto, program=NEWER), NEWER),
        ):
            port = free_port()
            server = Server(name, partial(command, tls=(port, pair)), program)
            if brokers.installed(server):
                running[name] = (*stack.enter_context(brokers.serving(server, root)), port)
        for _ in range(given.rounds):
            for name, (pid, tcp, tls) in running.items():
                plain = spent(pid, tcp, given.devices, given.rate, "")
                secure = spent(pid, tls, given.devices, given.rate, str(authority.cert))
                print(name, f"{plain:.1f} {secure:.1f}", flush=True)
                found.setdefault(name, []).append((plain, secure))
    return found


def table(found: dict[str, list[tuple[float, float]]]) -> str:
    """Medians, as Markdown."""
    lines = ["| server | TCP, CPU µs | TLS, CPU µs | TLS adds | TLS / TCP |", "|---" * 5 + "|"]
    for name, pairs in found.items():
        plain, secure = (statistics.median(values) for values in zip(*pairs, strict=True))
        adds = statistics.median(tls - tcp for tcp, tls in pairs)
        ratio = statistics.median(tls / tcp for tcp, tls in pairs)
        lines.append(f"| {name} | {plain:.1f} | {secure:.1f} | {adds:.1f} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=500)
    parser.add_argument(
        "--rate", type=float, default=10_000, help="messages a second, of all devices [10000]"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        found = measure(given, Path(root))
    (given.output / "tls_messages.json").write_text(json.dumps(found, indent=1))
    (given.output / "tls_messages.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
