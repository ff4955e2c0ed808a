"""`streambridge demo` and `streambridge bench`: each runs a gateway in a temporary directory.

Both start `streambridge run` as a process and use it as devices do, over MQTT at QoS 1.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from bridge.cli import output
from bridge.cli.lookup import read_messages
from bridge.cli.options import JsonOption
from bridge.cli.site import SiteBroker
from bridge.errors import StreamBridgeError
from bridge.mqtt.wire.packets import string
from bridge.mqtt.wire.properties import varint
from bridge.streams.reader import StreamReader

# `bench` needs little disk space, however long it runs. `demo` counts the messages in `kept`.
CONFIG = """
[gateway]
id = "demo"
data_dir = "data"
memory_dir = "memory"
[mqtt]
listen = ["tcp://127.0.0.1:0"]
[mqtt.limits]
messages_per_second = 0
[greengrass]
listen = ""
[http]
listen = "127.0.0.1:0"
[log]
format = "json"
[streams.written]
max_size = "64MiB"
strategy_on_full = "OverwriteOldestData"
[streams.flushed]
max_size = "64MiB"
strategy_on_full = "OverwriteOldestData"
flush_on_write = true
[streams.kept]
max_size = "1TiB"
flush_on_write = true
topics = ["site/#"]
"""
# Replaces the listener. amqtt queues messages only for clients with a user name.
EXTERNAL = """
mode = "external"
[mqtt.external]
url = "mqtt://127.0.0.1:%d"
username = "gateway"
protocol = "3.1.1"
"""
LISTEN = 'listen = ["tcp://127.0.0.1:0"]\n'
DEVICES = 4
IN_FLIGHT = 200  # messages that a device sends before it waits for their acknowledgements
TIMEOUT = 30.0  # seconds
GROUP = 50  # readings that the demo's device sends before it waits for their acknowledgements
PAUSE = 0.01  # seconds between its groups
SITE_PAUSE = (
    0.05  # amqtt forwards a few thousand messages a second, and drops one after 5 s without an answer
)
POLL = 0.1  # seconds between two checks of what is stored
HELLO = b"hello"  # sent until one is stored, which shows that the gateway has subscribed

Progressed = Callable[[str, float], None]  # the current activity, and the completed fraction
app = typer.Typer()


class Gateway:
    """A service that runs in a directory. `listen` has its addresses by scheme."""

    def __init__(self, directory: Path, site: SiteBroker | None = None) -> None:
        self.directory = directory
        config = CONFIG if site is None else CONFIG.replace(LISTEN, EXTERNAL % site.port)
        (directory / "demo.toml").write_text(config)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bridge", "run", "-c", directory / "demo.toml"],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        stderr: IO[bytes] = self.process.stderr  # type: ignore[assignment]
        logged = b""
        for line in stderr:
            logged = line
            if b'"msg": "ready"' in line:
                break
        else:
            raise StreamBridgeError(f"the gateway did not start: {logged.decode(errors='replace').strip()}")
        addresses = str(json.loads(logged)["listen"]).split(",")
        self.listen = {address.partition(":")[0]: address for address in addresses}

    def stop(self, number: int = signal.SIGTERM) -> str:
        """Send it a signal and wait for its end. Returns its last log message since it was ready."""
        self.process.send_signal(number)
        _, logged = self.process.communicate(timeout=TIMEOUT)
        return str(json.loads(logged.splitlines()[-1])["msg"]) if logged else "nothing"

    @property
    def port(self) -> int:
        """The port that devices connect to."""
        return int(self.listen["mqtt"].rpartition(":")[2])

    def kept(self) -> list[bytes]:
        """The payloads in the stream `kept`."""
        with closing(StreamReader(self.directory / "data" / "streams" / "kept")) as reader:
            return [message.payload for message in read_messages(reader, *reader.bounds())]


class Device:
    """An MQTT client that can only publish, so that it costs less than what it measures."""

    def __init__(self, port: int, name: str, user: str = "") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body = b"\0\4MQTT\4" + (b"\x82" if user else b"\2") + b"\0\0" + string(name.encode())
        if user:
            body += string(user.encode())
        self._socket.sendall(bytes((0x10, len(body))) + body)
        self._receive(4)

    def send(self, topic: str, payloads: list[bytes]) -> None:
        """Publish at QoS 1 without waiting for acknowledgements."""
        head = string(topic.encode())
        self._socket.sendall(
            b"".join(
                b"\x32" + varint(len(head) + 2 + len(payload)) + head + number.to_bytes(2, "big") + payload
                for number, payload in enumerate(payloads, 1)
            )
        )

    def acknowledged(self, number: int) -> None:
        """Wait for this number of acknowledgements; raises OSError if they do not arrive."""
        self._receive(4 * number)

    def _receive(self, size: int) -> None:
        while size:
            got = len(self._socket.recv(size))
            if not got:
                raise ConnectionResetError("the gateway has closed the connection")
            size -= got

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


@contextmanager
def _progress() -> Iterator[Progressed]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=1.0)
        yield lambda what, part: bars.update(task, description=what, completed=part)


@contextmanager
def _directory(parent: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="streambridge-demo-", dir=parent) as directory:
        yield Path(directory)


@contextmanager
def _gateway(directory: Path, site: SiteBroker | None = None) -> Iterator[Gateway]:
    gateway = Gateway(directory, site)
    try:
        yield gateway
    except OSError as error:
        raise StreamBridgeError(
            f"the temporary gateway in {directory} has failed: {error}; its last log message: "
            f"{gateway.stop(signal.SIGKILL)}"
        ) from None
    finally:
        if gateway.process.poll() is None:
            gateway.stop(signal.SIGKILL)


# -- demo ----------------------------------------------------------------------------------------------
@app.command()
def demo(
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="How long the device publishes.")] = 6,
    bridge: Annotated[
        bool,
        typer.Option(
            "--bridge",
            help='Show mode "external": the device publishes to a site broker, and the gateway stores what '
            "that broker forwards. The broker is amqtt, from the extra [amqtt].",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Kill a gateway and show that it lost nothing.

    Runs a separate gateway on free ports, in a temporary directory, and kills it while a device publishes.
    The exit code is 0 only if every acknowledged reading is stored.
    """

    def report(text: str) -> None:
        if not as_json:
            output.echo(text)

    with _directory(None) as directory, ExitStack() as started, _progress() as progressed:
        show = _at_a_site_broker if bridge else _at_the_gateway
        acknowledged, stored = show(directory, started, seconds, progressed, report)
    missing = set(_readings(0, acknowledged)) - set(stored)
    twice = len(stored) - len(set(stored))
    if as_json:
        output.json({"acknowledged": acknowledged, "missing": len(missing), "twice": twice})
    else:
        output.echo(f"{acknowledged} readings were acknowledged, {len(missing)} of them are missing")
        if twice:
            output.echo(
                f"{twice} readings are stored twice: they were sent again because an acknowledgement was lost"
            )
    if missing:
        raise typer.Exit(1)


def _readings(first: int, end: int) -> list[bytes]:
    return [b"reading %d" % number for number in range(first, end)]


def _publish(
    device: Device,
    topic: str,
    first: int,
    seconds: float,
    progressed: Callable[[float], None],
    pause: float = PAUSE,
) -> int:
    """Publish readings for some seconds, beginning with number `first`; returns the number after the last."""
    began = time.monotonic()
    while (passed := (time.monotonic() - began) / seconds) < 1:
        progressed(passed)
        device.send(topic, _readings(first, first + GROUP))
        device.acknowledged(GROUP)
        first += GROUP
        time.sleep(pause)
    return first


def _at_the_gateway(
    directory: Path,
    started: ExitStack,
    seconds: float,
    progressed: Progressed,
    report: Callable[[str], None],
) -> tuple[int, list[bytes]]:
    """Return how many readings the gateway has acknowledged, and the stored payloads."""
    gateway = started.enter_context(_gateway(directory))
    report(f"a gateway is running at {gateway.listen['mqtt']}, its status page at {gateway.listen['http']}")
    device, topic, what = Device(gateway.port, "thermometer"), "streams/kept", "a device publishes"
    acknowledged = _publish(device, topic, 0, seconds / 2, lambda part: progressed(what, part / 2))
    device.send(topic, _readings(acknowledged, acknowledged + GROUP))  # the device sends them again below
    gateway.stop(signal.SIGKILL)
    report(f"the gateway was killed, with {acknowledged} readings acknowledged and {GROUP} in flight")
    device.close()
    gateway = started.enter_context(_gateway(directory))
    device = Device(gateway.port, "thermometer")
    report("the gateway was restarted; the device continues after its last acknowledged reading")
    acknowledged = _publish(
        device, topic, acknowledged, seconds / 2, lambda part: progressed(what, 0.5 + part / 2)
    )
    gateway.stop()
    return acknowledged, gateway.kept()


def _at_a_site_broker(
    directory: Path,
    started: ExitStack,
    seconds: float,
    progressed: Progressed,
    report: Callable[[str], None],
) -> tuple[int, list[bytes]]:
    """Return how many readings the site broker has acknowledged, and the stored payloads.

    The gateway is killed while no message is in flight to it, because amqtt never resends a message that the
    gateway has not acknowledged.
    """
    site = started.enter_context(SiteBroker())
    gateway = started.enter_context(_gateway(directory, site))
    report(
        f"a site broker is running at mqtt://127.0.0.1:{site.port}, and a gateway that stores the messages "
        f"from it; the gateway's status page is at {gateway.listen['http']}"
    )
    device, topic, acknowledged = Device(site.port, "thermometer", "device"), "site/thermometer", 0

    def publish(third: int, what: str) -> None:
        nonlocal acknowledged
        acknowledged = _publish(
            device,
            topic,
            acknowledged,
            seconds / 3,
            lambda part: progressed(what, (third + part) / 3),
            SITE_PAUSE,
        )

    deadline = time.monotonic() + TIMEOUT
    while not gateway.kept() and time.monotonic() < deadline:
        device.send(topic, [HELLO])
        device.acknowledged(1)
        time.sleep(POLL)
    publish(0, "a device publishes")
    _wait_for(gateway, acknowledged)
    gateway.stop(signal.SIGKILL)
    site.wait_for_end()  # before amqtt notices the end of the connection, it loses what it sends
    report(f"the gateway was killed, with {acknowledged} readings stored; the device continues to publish")
    publish(1, "the gateway is down")
    gateway = started.enter_context(_gateway(directory, site))
    report(f"the gateway was restarted, with {acknowledged} readings acknowledged by the site broker")
    publish(2, "the gateway is running again")
    _wait_for(gateway, acknowledged)
    gateway.stop()
    return acknowledged, [payload for payload in gateway.kept() if payload != HELLO]


def _wait_for(gateway: Gateway, readings: int) -> None:
    """Wait, for a limited time, until this number of readings is stored."""
    deadline = time.monotonic() + TIMEOUT
    while len(set(gateway.kept()) - {HELLO}) < readings and time.monotonic() < deadline:
        time.sleep(POLL)


# -- bench ---------------------------------------------------------------------------------------------
@app.command(
    epilog="""\b
Examples:
  streambridge bench --directory /var/lib/streambridge
  streambridge bench --size 1024 --json
"""
)
def bench(
    seconds: Annotated[float, typer.Option("--seconds", min=0.2, help="Time for each of four steps.")] = 3,
    size: Annotated[int, typer.Option("--size", min=1, max=60_000, help="Bytes per message.")] = 128,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            metavar="DIRECTORY",
            help="A directory on the disk to measure.",
            show_default="that of temporary files",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure message rate and latency.

    Measures without `flush_on_write` (messages are written) and with it (messages are synced to the disk).
    Runs a separate gateway in a temporary directory, which needs up to 150 MB.
    """
    found: dict[str, dict[str, Any]] = {}
    with _directory(directory) as temporary, _gateway(temporary) as gateway, _progress() as progressed:
        for step, stream in enumerate(("written", "flushed")):
            progressed(f"{stream}: many in flight", step / 2)
            many = _many(gateway, stream, bytes(size), seconds)
            progressed(f"{stream}: one in flight", step / 2 + 0.25)
            waits = _one(gateway, stream, bytes(size), seconds)
            found[stream] = {
                "messagesPerSecond": round(many),
                "medianMillis": round(median(waits) * 1000, 3),
                "worstPercentMillis": round(quantiles(waits, n=100)[98] * 1000, 3),
            }
        gateway.stop()
    if as_json:
        output.json({"size": size, **found})
        return
    output.table(
        ["ACKNOWLEDGED WHEN", "MESSAGES/S", "MEDIAN LATENCY", "P99 LATENCY"],
        [
            [
                {"written": "written", "flushed": "on the disk"}[stream],
                f"{row['messagesPerSecond']:,}",
                f"{row['medianMillis']} ms",
                f"{row['worstPercentMillis']} ms",
            ]
            for stream, row in found.items()
        ],
    )
    output.echo(
        f"{size} bytes per message; rate: {DEVICES} devices with {IN_FLIGHT} messages in flight each; "
        "latency: one device with one message in flight"
    )


def _many(gateway: Gateway, stream: str, payload: bytes, seconds: float) -> float:
    devices = [Device(gateway.port, f"device-{number}") for number in range(DEVICES)]
    batch, done, began = [payload] * IN_FLIGHT, 0, time.monotonic()
    for device in devices:
        device.send(f"streams/{stream}", batch)
    while time.monotonic() - began < seconds:
        for device in devices:
            device.acknowledged(IN_FLIGHT)
            device.send(f"streams/{stream}", batch)
            done += IN_FLIGHT
    took = time.monotonic() - began
    for device in devices:
        device.acknowledged(IN_FLIGHT)
        device.close()
    return done / took


def _one(gateway: Gateway, stream: str, payload: bytes, seconds: float) -> list[float]:
    device, waits = Device(gateway.port, "device"), [0.0]
    ends = time.monotonic() + seconds
    while (began := time.monotonic()) < ends or len(waits) < 3:
        device.send(f"streams/{stream}", [payload])
        device.acknowledged(1)
        waits.append(time.monotonic() - began)
    device.close()
    return waits[1:]
