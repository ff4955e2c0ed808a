"""`streambridge demo` and `streambridge bench`: a gateway of their own, in a directory that goes away again.

Both start `streambridge run` as a process and talk to it as devices do, over MQTT at QoS 1.
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

from bridge.cli.common import JsonOption, echo, print_json, print_table
from bridge.cli.lookup import read_messages
from bridge.cli.site import SiteBroker
from bridge.errors import StreamBridgeError
from bridge.mqtt.wire.packets import string
from bridge.mqtt.wire.properties import varint
from bridge.streams.reader import StreamReader

# However long the bench runs, it takes little disk; what the demo counts in the end is kept.
CONFIG = """
[gateway]
id = "trial"
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
# In the place of a listener of its own. amqtt keeps messages for clients with a user name only.
EXTERNAL = """
mode = "external"
[mqtt.external]
url = "mqtt://127.0.0.1:%d"
username = "gateway"
"""
LISTEN = 'listen = ["tcp://127.0.0.1:0"]\n'
DEVICES = 4
TOGETHER = 200  # messages that a device sends before it waits for their acknowledgements
PATIENCE = 30.0
GROUP = 50  # readings that the demo's device sends before it waits for their acknowledgements
PAUSE = 0.01  # seconds between its groups
SITE_PAUSE = (
    0.05  # amqtt passes a few thousand messages a second on, and forgets one after 5 s without answer
)
POLL = 0.1  # seconds between two looks at what is stored
HELLO = b"hello"  # sent until the first is stored: then the gateway has subscribed at the site broker

Tell = Callable[[str, float], None]


class Gateway:
    """A service in a directory; `listen` has its addresses by scheme."""

    def __init__(self, directory: Path, site: SiteBroker | None = None) -> None:
        self.directory = directory
        config = CONFIG if site is None else CONFIG.replace(LISTEN, EXTERNAL % site.port)
        (directory / "trial.toml").write_text(config)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bridge", "run", "-c", directory / "trial.toml"],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        stderr: IO[bytes] = self.process.stderr  # type: ignore[assignment]
        said = b""
        for line in stderr:
            said = line
            if b'"msg": "ready"' in line:
                break
        else:
            raise StreamBridgeError(f"the gateway did not start: {said.decode(errors='replace').strip()}")
        addresses = str(json.loads(said)["listen"]).split(",")
        self.listen = {address.partition(":")[0]: address for address in addresses}

    def stop(self, number: int = signal.SIGTERM) -> str:
        """End it as told; returns the last that it said, if it has said anything since it was ready."""
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=PATIENCE)
        return str(json.loads(said.splitlines()[-1])["msg"]) if said else "nothing"

    @property
    def port(self) -> int:
        """Where devices connect."""
        return int(self.listen["mqtt"].rpartition(":")[2])

    def kept(self) -> list[bytes]:
        """The payloads that are in the stream `kept`."""
        with closing(StreamReader(self.directory / "data" / "streams" / "kept")) as reader:
            return [message.payload for message in read_messages(reader, *reader.bounds())]


class Device:
    """An MQTT client that can publish, and nothing else: it must cost less than what it measures."""

    def __init__(self, port: int, name: str, user: str = "") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body = b"\0\4MQTT\4" + (b"\x82" if user else b"\2") + b"\0\0" + string(name.encode())
        if user:
            body += string(user.encode())
        self._socket.sendall(bytes((0x10, len(body))) + body)
        self._receive(4)

    def send(self, topic: str, payloads: list[bytes]) -> None:
        """Publish at QoS 1, and do not wait."""
        head = string(topic.encode())
        self._socket.sendall(
            b"".join(
                b"\x32" + varint(len(head) + 2 + len(payload)) + head + number.to_bytes(2, "big") + payload
                for number, payload in enumerate(payloads, 1)
            )
        )

    def acknowledged(self, number: int) -> None:
        """Wait for so many acknowledgements; raises OSError if they do not come."""
        self._receive(4 * number)

    def _receive(self, size: int) -> None:
        while size:
            got = len(self._socket.recv(size))
            if not got:
                raise ConnectionResetError("the gateway is gone")
            size -= got

    def close(self) -> None:
        """Leave."""
        self._socket.close()


@contextmanager
def _progress() -> Iterator[Tell]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=1.0)
        yield lambda what, part: bars.update(task, description=what, completed=part)


@contextmanager
def _directory(parent: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="streambridge-trial-", dir=parent) as place:
        yield Path(place)


@contextmanager
def _gateway(place: Path, site: SiteBroker | None = None) -> Iterator[Gateway]:
    gateway = Gateway(place, site)
    try:
        yield gateway
    except OSError as error:
        raise StreamBridgeError(
            f"the gateway of this trial in {place} has failed: {error}; it said last: "
            f"{gateway.stop(signal.SIGKILL)}"
        ) from None
    finally:
        if gateway.process.poll() is None:
            gateway.stop(signal.SIGKILL)


# -- demo ----------------------------------------------------------------------------------------------
def demo(
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="How long the device publishes.")] = 6,
    bridge: Annotated[
        bool,
        typer.Option(
            "--bridge",
            help='Show mode "external": the device publishes to a broker of the site, and the gateway stores '
            "what that one passes on. The broker is amqtt, of the extra [amqtt].",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show that nothing acknowledged is lost: a gateway of its own is killed while a device publishes.

    Takes its own free ports and a directory that it removes. The exit code is 0 only if every reading that
    was acknowledged is stored.
    """

    def say(text: str) -> None:
        if not as_json:
            echo(text)

    with _directory(None) as place, ExitStack() as started, _progress() as tell:
        show = _at_a_site_broker if bridge else _at_the_gateway
        acknowledged, stored = show(place, started, seconds, tell, say)
    missing = set(_readings(0, acknowledged)) - set(stored)
    twice = len(stored) - len(set(stored))
    if as_json:
        print_json({"acknowledged": acknowledged, "missing": len(missing), "twice": twice})
    else:
        echo(f"{acknowledged} readings were acknowledged: {len(missing)} of them are missing")
        if twice:
            echo(f"{twice} are there twice: they were stored, but the acknowledgement was lost")
    if missing:
        raise typer.Exit(1)


def _readings(first: int, end: int) -> list[bytes]:
    return [b"reading %d" % number for number in range(first, end)]


def _publish(
    device: Device,
    topic: str,
    first: int,
    seconds: float,
    note: Callable[[float], None],
    pause: float = PAUSE,
) -> int:
    """Publish readings from number `first` on for a time; returns the first that is not acknowledged."""
    began = time.monotonic()
    while (passed := (time.monotonic() - began) / seconds) < 1:
        note(passed)
        device.send(topic, _readings(first, first + GROUP))
        device.acknowledged(GROUP)
        first += GROUP
        time.sleep(pause)
    return first


def _at_the_gateway(
    place: Path, started: ExitStack, seconds: float, tell: Tell, say: Callable[[str], None]
) -> tuple[int, list[bytes]]:
    """Returns how many readings the gateway has acknowledged, and what is stored."""
    gateway = started.enter_context(_gateway(place))
    say(f"a gateway runs at {gateway.listen['mqtt']}, its status page at {gateway.listen['http']}")
    device, topic, what = Device(gateway.port, "thermometer"), "streams/kept", "a device publishes"
    acknowledged = _publish(device, topic, 0, seconds / 2, lambda part: tell(what, part / 2))
    device.send(topic, _readings(acknowledged, acknowledged + GROUP))  # the device sends them again below
    gateway.stop(signal.SIGKILL)
    say(f"it is killed, with {acknowledged} readings acknowledged and {GROUP} on their way")
    device.close()
    gateway = started.enter_context(_gateway(place))
    device = Device(gateway.port, "thermometer")
    say("it was started again, and the device goes on where it had no answer")
    acknowledged = _publish(device, topic, acknowledged, seconds / 2, lambda part: tell(what, 0.5 + part / 2))
    gateway.stop()
    return acknowledged, gateway.kept()


def _at_a_site_broker(
    place: Path, started: ExitStack, seconds: float, tell: Tell, say: Callable[[str], None]
) -> tuple[int, list[bytes]]:
    """Returns how many readings the site broker has acknowledged, and what the gateway has stored.

    The gateway is killed while nothing is on its way to it: amqtt does not send again what it has sent and
    got no acknowledgement for, whatever the gateway does.
    """
    site = started.enter_context(SiteBroker())
    gateway = started.enter_context(_gateway(place, site))
    say(
        f"a site broker runs at mqtt://127.0.0.1:{site.port}, and a gateway that stores what it passes on; "
        f"the gateway's status page is at {gateway.listen['http']}"
    )
    device, topic, acknowledged = Device(site.port, "thermometer", "device"), "site/thermometer", 0

    def publish(third: int, what: str) -> None:
        nonlocal acknowledged
        acknowledged = _publish(
            device, topic, acknowledged, seconds / 3, lambda part: tell(what, (third + part) / 3), SITE_PAUSE
        )

    deadline = time.monotonic() + PATIENCE
    while not gateway.kept() and time.monotonic() < deadline:
        device.send(topic, [HELLO])
        device.acknowledged(1)
        time.sleep(POLL)
    publish(0, "a device publishes")
    _wait_for(gateway, acknowledged)
    gateway.stop(signal.SIGKILL)
    site.wait_for_end()  # what amqtt sends to a connection that is gone without its knowing is lost
    say(f"the gateway is killed, with {acknowledged} readings stored; the device goes on publishing")
    publish(1, "the gateway is away")
    gateway = started.enter_context(_gateway(place, site))
    say(f"it was started again, with {acknowledged} readings acknowledged by the site broker")
    publish(2, "the gateway is back")
    _wait_for(gateway, acknowledged)
    gateway.stop()
    return acknowledged, [payload for payload in gateway.kept() if payload != HELLO]


def _wait_for(gateway: Gateway, readings: int) -> None:
    """Wait until so many readings are stored; what is missing after a while is counted in the end."""
    deadline = time.monotonic() + PATIENCE
    while len(set(gateway.kept()) - {HELLO}) < readings and time.monotonic() < deadline:
        time.sleep(POLL)


# -- bench ---------------------------------------------------------------------------------------------
def bench(
    seconds: Annotated[float, typer.Option("--seconds", min=0.2, help="Time for each of four steps.")] = 3,
    size: Annotated[int, typer.Option("--size", min=1, max=60_000, help="Bytes of a message.")] = 128,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            metavar="DIRECTORY",
            help="Where to write: on the disk that is to be measured.",
            show_default="that of temporary files",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine: messages acknowledged a second, and how long one takes.

    Once with messages written to the file system, and once with `flush_on_write`, on the disk. Uses a gateway
    of its own, in a directory that it removes; that takes up to 150 MB, however long it measures.
    """
    found: dict[str, dict[str, Any]] = {}
    with _directory(directory) as place, _gateway(place) as gateway, _progress() as tell:
        for step, stream in enumerate(("written", "flushed")):
            tell(f"{stream}: many at a time", step / 2)
            many = _many(gateway, stream, bytes(size), seconds)
            tell(f"{stream}: one at a time", step / 2 + 0.25)
            waits = _one(gateway, stream, bytes(size), seconds)
            found[stream] = {
                "messagesPerSecond": round(many),
                "medianMillis": round(median(waits) * 1000, 3),
                "worstPercentMillis": round(quantiles(waits, n=100)[98] * 1000, 3),
            }
        gateway.stop()
    if as_json:
        print_json({"size": size, **found})
        return
    print_table(
        ["ACKNOWLEDGED WHEN", "MESSAGES/S", "ONE TAKES, MEDIAN", "99 OF 100 TAKE AT MOST"],
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
    echo(f"{size} bytes a message; {DEVICES} devices with {TOGETHER} on their way each, then one with 1")


def _many(gateway: Gateway, stream: str, payload: bytes, seconds: float) -> float:
    devices = [Device(gateway.port, f"device-{number}") for number in range(DEVICES)]
    batch, done, began = [payload] * TOGETHER, 0, time.monotonic()
    for device in devices:
        device.send(f"streams/{stream}", batch)
    while time.monotonic() - began < seconds:
        for device in devices:
            device.acknowledged(TOGETHER)
            device.send(f"streams/{stream}", batch)
            done += TOGETHER
    took = time.monotonic() - began
    for device in devices:
        device.acknowledged(TOGETHER)
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


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(demo)
    app.command(
        epilog="""\b
Examples:
  streambridge bench --directory /var/lib/streambridge
  streambridge bench --size 1024 --json
"""
    )(bench)
