"""All devices back over TLS after a restart: how long it takes, and what it costs.

    python -m benchmarks.tls_return [--devices 5000] [--rounds 3] [--key ec] [--one-address] [--output DIR]

A server is killed and starts again. As soon as it listens, all devices connect at once: a full handshake of
TLS 1.3, CONNECT, SUBSCRIBE if the server does not have the session, and a PUBLISH at QoS 1 with 200 bytes.
Each device has an address of its own on loopback, as in a plant, or all have one, as behind a router. A
device whose connection fails tries again after 0.5 to 1.5 s.

`bare` is the floor: a program that accepts the same connections with the same certificate, does their
handshakes one after the other on the sockets, and nothing else.

Shown are medians of the rounds, in which all servers have their turn: the time until the last device has its
PUBACK, the server's CPU time for each device, and both in relation to the CPU time of `bare` in that round.

Caveats. The devices share the machine, and take the other side of each handshake: they alone need more of it
than `bare`. Mosquitto stores neither the sessions nor the messages.
Writes tls_return.json and tls_return.md to the output directory, and prints the table.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import random
import resource
import select
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.brokers import NEWER
from benchmarks.ingest import cpu_of
from benchmarks.testbed.certificates import KEY, Authority, Pair
from benchmarks.testbed.local import find, free_port
from benchmarks.testbed.mqtt import connect, publish, subscribe

CONFIG = """\
[gateway]
id = "back"
data_dir = "data"
[mqtt]
listen = ["tls://127.0.0.1:{port}"]
[mqtt.tls]
cert = "{cert}"
key = "{key}"
[greengrass]
listen = ""
[http]
listen = ""
[export]
plugin_dirs = []
[streams.s]
topics = ["in/#"]
max_size = "4GiB"
"""
PROCESSES = 2  # that the devices are divided among
PAYLOAD = bytes(200)
KEYS = {"ec": KEY, "rsa": ("-newkey", "rsa:2048", "-nodes")}
GIVE_UP = 120.0  # seconds


# -- the devices, in processes of their own ------------------------------------------------------------


class Device:
    """A device on its way back."""

    def __init__(self, number: int, home: str) -> None:
        self.number, self.home = number, home
        self.sock: socket.socket | ssl.SSLSocket
        self.step: Callable[[], bool]
        self.got = b""
        self.tries = 0


class Devices:
    """Some of the devices, and the loop that serves them."""

    def __init__(self, port: int, numbers: range, ca: str, *, shake_only: bool, one_address: bool) -> None:
        self._port, self._shake_only = port, shake_only
        self._tls = ssl.create_default_context(cafile=ca)
        self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE  # it costs the devices less
        self._poll, self._open = select.epoll(), dict[int, Device]()
        self._later: list[tuple[float, int, Device]] = []
        self.tries = 0
        self.back: list[float] = []  # when each was back, seconds from the begin
        self._devices = []
        for number in numbers:
            home = "127.0.0.1" if one_address else f"127.1.{number >> 8}.{number & 255}"
            self._devices.append(Device(number, home))

    def run(self) -> None:
        """Until all are back."""
        began = time.perf_counter()
        for device in self._devices:
            self._begin(device)
            self._serve(0.0, began)
        while len(self.back) < len(self._devices):
            now = time.perf_counter()
            assert now < began + GIVE_UP, f"{len(self.back)} of {len(self._devices)} are back"
            while self._later and self._later[0][0] <= now:
                self._begin(heapq.heappop(self._later)[2])
            self._serve(min(0.05, self._later[0][0] - now) if self._later else 1.0, began)

    def _begin(self, device: Device) -> None:
        self.tries += 1
        device.got = b""
        device.sock = sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
        sock.bind((device.home, 0))
        with contextlib.suppress(BlockingIOError):
            sock.connect(("127.0.0.1", self._port))
        self._open[sock.fileno()] = device
        self._poll.register(sock.fileno(), select.EPOLLOUT)

    def _serve(self, timeout: float, began: float) -> None:
        for fd, _ in self._poll.poll(timeout):
            device = self._open[fd]
            try:
                self._step(device, fd, began)
            except ssl.SSLWantReadError:
                self._poll.modify(fd, select.EPOLLIN)
            except (OSError, AssertionError):  # also ssl.SSLError
                with contextlib.suppress(OSError):
                    self._poll.unregister(fd)
                del self._open[fd]
                device.sock.close()
                again = time.perf_counter() + random.uniform(0.5, 1.5)
                heapq.heappush(self._later, (again, device.number, device))

    def _step(self, device: Device, fd: int, began: float) -> None:
        sock = device.sock
        if not isinstance(sock, ssl.SSLSocket):
            if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._poll.unregister(fd)
            del self._open[fd]
            sock = device.sock = self._tls.wrap_socket(
                sock, server_hostname="127.0.0.1", do_handshake_on_connect=False
            )
            fd = sock.fileno()
            self._open[fd] = device
            self._poll.register(fd, select.EPOLLIN)
        if not device.got:
            sock.do_handshake()
            device.got = b"!"
            if self._shake_only:
                self._is_back(fd, began)
                return
            sock.send(connect(f"device{device.number}", clean=False))
            return
        data = sock.recv(4096)
        if not data:
            raise ConnectionResetError
        device.got += data
        if device.got[1:2] != b"\x20" or len(device.got) < 5:
            raise ConnectionResetError
        known = device.got[3] & 1  # session present: it need not subscribe again
        if len(device.got) == 5:
            first = b"" if known else subscribe(1, (f"to/{device.number}", 1))
            sock.send(first + publish(f"in/{device.number}", PAYLOAD, 1, 2))
        elif len(device.got) == (9 if known else 14):  # PUBACK, and SUBACK
            self._is_back(fd, began)

    def _is_back(self, fd: int, began: float) -> None:
        self._poll.unregister(fd)
        self.back.append(time.perf_counter() - began)


def devices(port: int, numbers: range, ca: str, shake_only: str, one_address: str) -> None:
    """Connect when told so, say when all are back, and stay until the end of standard input."""
    some = Devices(port, numbers, ca, shake_only=bool(shake_only), one_address=bool(one_address))
    print("ready", flush=True)
    sys.stdin.readline()
    some.run()
    print(json.dumps({"tries": some.tries, "back": some.back}), flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def crowd(
    port: int, count: int, ca: Path, *, shake_only: bool, one_address: bool
) -> Iterator[Callable[[], Any]]:
    """The devices; the function that is yielded has them all connect, and returns what they saw."""
    command = [sys.executable, "-m", "benchmarks.tls_return", "--load", str(port), str(ca)]
    command += ["yes" if shake_only else "", "yes" if one_address else ""]
    share = -(-count // PROCESSES)
    parts = [(first, min(first + share, count)) for first in range(0, count, share)]
    with contextlib.ExitStack() as stack:
        running = []
        for first, end in parts:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = stack.enter_context(subprocess.Popen([*command, str(first), str(end)], **pipes))
            stack.callback(process.kill)
            assert process.stdout.readline() == "ready\n"
            running.append(process)

        def go() -> tuple[int, list[float]]:
            for process in running:
                process.stdin.write("\n")
                process.stdin.flush()
            said = [json.loads(process.stdout.readline()) for process in running]
            return sum(one["tries"] for one in said), sorted(at for one in said for at in one["back"])

        yield go


# -- the servers ------------------------------------------------------------


class Server(NamedTuple):
    """A server: how to start it in a directory, what it logs when it is ready, and what it needs."""

    command: Callable[[Path, int, Pair], list[str]]
    ready: bytes
    program: str = ""


def ours(directory: Path, port: int, pair: Pair) -> list[str]:
    (directory / "streambridge.toml").write_text(CONFIG.format(port=port, cert=pair.cert, key=pair.key))
    return [sys.executable, "-m", "bridge", "run", "-c", str(directory / "streambridge.toml")]


def mosquitto(directory: Path, port: int, pair: Pair, *, program: str = "mosquitto") -> list[str]:
    text = f"user root\nlistener {port} 127.0.0.1\nallow_anonymous true\n"
    text += f"certfile {pair.cert}\nkeyfile {pair.key}\n"
    (directory / "mosquitto.conf").write_text(text)
    return [find(program) or program, "-c", str(directory / "mosquitto.conf")]


def bare(directory: Path, port: int, pair: Pair) -> list[str]:
    return [sys.executable, "-m", "benchmarks.tls_return", "--bare", str(port), str(pair.cert), str(pair.key)]


SERVERS = {
    "bare": Server(bare, b"ready"),
    "streambridge": Server(ours, b"msg=ready"),
    "mosquitto": Server(mosquitto, b"running", "mosquitto"),
    "mosquitto 2.1": Server(partial(mosquitto, program=NEWER), b"running", NEWER),
}


def accept_all(port: int, cert: str, key: str) -> None:
    """The floor: do the handshakes of all who come, one after the other, until the end by a signal."""
    from bridge.net.tls import server_context

    context = server_context("bare", Path(cert), Path(key))
    listening = socket.create_server(("127.0.0.1", port), backlog=4096)
    listening.setblocking(False)
    poll, shaking, kept = select.epoll(), dict[int, ssl.SSLSocket](), []
    poll.register(listening, select.EPOLLIN)
    print("ready", file=sys.stderr, flush=True)
    while True:
        for fd, _ in poll.poll():
            if fd == listening.fileno():
                with contextlib.suppress(BlockingIOError):
                    while True:
                        plain, _ = listening.accept()
                        plain.setblocking(False)
                        sock = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
                        shaking[sock.fileno()] = sock
                        poll.register(sock.fileno(), select.EPOLLIN)
                continue
            sock = shaking[fd]
            try:
                sock.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except OSError:
                pass
            poll.unregister(fd)
            kept.append(shaking.pop(fd))


class Running:
    """A server that can be killed and started again."""

    def __init__(self, name: str, directory: Path, pair: Pair) -> None:
        self._server, self._log = SERVERS[name], directory / "log"
        self.port = free_port()
        self._command = self._server.command(directory, self.port, pair)

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        self._log.write_bytes(b"")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while self._server.ready not in self._log.read_bytes():
            assert time.monotonic() < deadline, f"{self._command} does not start: {self._log.read_text()}"
            time.sleep(0.02)

    def cpu(self) -> float:
        return cpu_of(self._process.pid)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def measure(name: str, count: int, authority: Authority, pair: Pair, *, one_address: bool) -> dict[str, Any]:
    """One return."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        server = Running(name, Path(root), pair)
        how: Any = {"shake_only": name == "bare", "one_address": one_address}
        server.start()
        try:
            if name == "streambridge":  # it remembers the sessions
                with crowd(server.port, count, authority.cert, **how) as go:
                    go()
                    server.kill()
                server.start()
            with crowd(server.port, count, authority.cert, **how) as go:
                cpu = server.cpu()
                tries, back = go()
                if name == "bare":
                    time.sleep(0.1)  # it still reads the last messages of the last handshakes
                return {
                    "seconds": back[-1],
                    "half_seconds": back[len(back) // 2],
                    "cpu": server.cpu() - cpu,
                    "tries": tries / count,
                }
        finally:
            server.kill()


def table(found: dict[str, list[dict[str, Any]]], count: int) -> str:
    """Medians, and medians of the ratios to the CPU time of `bare` in the same round, as Markdown."""
    lines = [
        "| server | all back, s | / floor | half of them, s | CPU each, ms | / floor | connections each |"
    ]
    lines.append("|---" * 7 + "|")
    floor = [one["cpu"] for one in found["bare"]]
    for name, results in found.items():
        middle = {key: statistics.median(one[key] for one in results) for key in results[0]}
        ratio = {
            key: statistics.median(one[key] / least for one, least in zip(results, floor, strict=True))
            for key in ("seconds", "cpu")
        }
        lines.append(
            f"| {name} | {middle['seconds']:.2f} | {ratio['seconds']:.2f} | {middle['half_seconds']:.2f} "
            f"| {middle['cpu'] / count * 1e3:.3f} | {ratio['cpu']:.2f} | {middle['tries']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the benchmark."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if sys.argv[1:2] == ["--load"]:
        port, ca, shake_only, one_address, first, end = sys.argv[2:]
        devices(int(port), range(int(first), int(end)), ca, shake_only, one_address)
        return
    if sys.argv[1:2] == ["--bare"]:
        accept_all(int(sys.argv[2]), sys.argv[3], sys.argv[4])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--key", choices=KEYS, default="ec", help="of the server's certificate [ec]")
    parser.add_argument("--one-address", action="store_true", help="all devices have one address")
    parser.add_argument("--only", nargs="*", default=list(SERVERS))
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as root:
        authority = Authority(Path(root))
        pair = authority.issue("gateway")
        for _ in range(given.rounds):
            for name, server in SERVERS.items():
                if name in given.only and (not server.program or find(server.program)):
                    one = measure(name, given.devices, authority, pair, one_address=given.one_address)
                    print(name, one, flush=True)
                    found.setdefault(name, []).append(one)
    (given.output / "tls_return.json").write_text(json.dumps(found, indent=1))
    (given.output / "tls_return.md").write_text(table(found, given.devices))
    print(table(found, given.devices))


if __name__ == "__main__":
    main()
