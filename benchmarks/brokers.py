"""The MQTT servers of the ingest benchmarks: how to start each on a free port and an empty directory."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.testbed.certificates import Pair
from benchmarks.testbed.local import find, free_port
from benchmarks.testbed.nats import PROGRAM

START_TIMEOUT = 60.0

# Mosquitto 2.1 or newer from a source tree built in `build`: measured beside the installed one.
NEWER = str(Path(os.environ.get("MOSQUITTO_TREE", "/nowhere"), "build", "src", "mosquitto"))
FLASH = 0.005  # seconds: about what the flash of a gateway takes longer than a server's disk to sync
FLASH_NAME = f"fdatasync of {FLASH * 1e3:.0f} ms"
NATS = str(PROGRAM)
RABBITMQ = "/usr/lib/rabbitmq/bin/rabbitmq-server"


class Server(NamedTuple):
    """A server to be measured: how to start it on a port, in a directory."""

    name: str
    command: Callable[[Path, int], list[str]]  # directory, port
    program: str = ""  # that must be installed
    keeper: bool = False  # stores a message only if there is a session that waits for it


def mosquitto(
    directory: Path, port: int, *, program: str = "mosquitto", tls: tuple[int, Pair] | None = None
) -> list[str]:
    """Mosquitto without persistence; `tls` is the port of a second listener, and its certificate."""
    config = directory / "mosquitto.conf"
    text = f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\nmax_inflight_messages 0\n"
    if tls is not None:
        secure, pair = tls
        text += f"listener {secure} 127.0.0.1\ncertfile {pair.cert}\nkeyfile {pair.key}\nuser root\n"
    config.write_text(text)
    return [find(program) or program, "-c", str(config)]


def nats(directory: Path, port: int, settings: str = "") -> list[str]:
    """NATS with MQTT; `settings` are lines for its section `jetstream`."""
    config = directory / "nats.conf"
    config.write_text(
        f"server_name: bench\nport: {free_port()}\njetstream {{\nstore_dir: {directory}/js\n{settings}}}\n"
        f"mqtt {{ port: {port}, host: 127.0.0.1 }}\n"
    )
    return [NATS, "-c", str(config)]


def rabbitmq(directory: Path, port: int) -> list[str]:
    (directory / "enabled_plugins").write_text("[rabbitmq_mqtt].")
    (directory / "rabbitmq.conf").write_text(
        f"listeners.tcp.default = {free_port()}\n"
        f"mqtt.listeners.tcp.default = {port}\nmqtt.allow_anonymous = true\n"
    )
    settings = {
        "HOME": directory,
        "ERL_EPMD_PORT": free_port(),
        "RABBITMQ_DIST_PORT": free_port(),
        "RABBITMQ_MNESIA_BASE": directory,
        "RABBITMQ_LOG_BASE": directory,
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_ENABLED_PLUGINS_FILE": directory / "enabled_plugins",
        "RABBITMQ_CONFIG_FILE": directory / "rabbitmq.conf",
    }
    # Debian's program in the path would become another user; and Erlang leaves its port mapper behind.
    script = f"trap 'kill $!; wait; epmd -kill' TERM; {RABBITMQ} & wait"
    return ["env", *(f"{name}={value}" for name, value in settings.items()), "sh", "-c", script]


def amqtt(directory: Path, port: int) -> list[str]:
    code = (
        "import asyncio, logging, uvloop; logging.disable(50)\n"
        "from amqtt.broker import Broker\n"
        "from amqtt.contexts import BrokerConfig, ListenerConfig\n"
        "async def main():\n"
        f"    listeners = {{'default': ListenerConfig(bind='127.0.0.1:{port}')}}\n"
        "    plugins = {'amqtt.plugins.authentication.AnonymousAuthPlugin': {}}\n"
        "    broker = Broker(BrokerConfig(listeners=listeners, plugins=plugins))\n"
        "    await broker.start(); await asyncio.Event().wait()\n"
        "uvloop.run(main())\n"
    )
    return [sys.executable, "-c", code]


def ours(
    directory: Path,
    port: int,
    *,
    sync: bool = False,
    streams: int = 1,
    topic: str = "bench/#",
    tls: tuple[int, Pair] | None = None,
) -> list[str]:
    """The service; with several streams, each has the messages of some of the clients.

    `tls` is the port of a second listener, and its certificate.
    """
    config = directory / "streambridge.toml"
    listen = [f"tcp://127.0.0.1:{port}"]
    certificate = ""
    if tls is not None:
        secure, pair = tls
        listen.append(f"tls://127.0.0.1:{secure}")
        certificate = f'[mqtt.tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\n'
    text = (
        f'[gateway]\nid = "bench"\ndata_dir = "data"\n[mqtt]\nlisten = {listen}\n{certificate}'
        '[greengrass]\nlisten = ""\n[http]\nlisten = ""\n'
    )
    for number in range(streams):
        part = f"bench/{number}/#" if streams > 1 else topic
        text += (
            f'[streams.bench{number}]\ntopics = ["{part}"]\nflush_on_write = {str(sync).lower()}\n'
            'max_size = "512MiB"\nstrategy_on_full = "OverwriteOldestData"\n'
        )
    config.write_text(text)
    return [sys.executable, "-m", "bridge", "run", "-c", str(config)]


def on_flash(directory: Path, port: int) -> list[str]:
    """The service with fdatasync, on a disk that takes `FLASH` longer for each."""
    *_, config = ours(directory, port, sync=True)
    return [sys.executable, "-m", "benchmarks.brokers", config]


SERVERS = [
    Server("streambridge", ours),
    Server("streambridge, fdatasync", lambda d, p: ours(d, p, sync=True)),
    Server(f"streambridge, {FLASH_NAME}", on_flash),
    Server("mosquitto, no persistence", mosquitto, "mosquitto"),
    Server("mosquitto 2.1, no persistence", partial(mosquitto, program=NEWER), NEWER),
    Server("nats", nats, NATS, keeper=True),
    Server("nats, sync always", partial(nats, settings="sync_interval: always\n"), NATS, keeper=True),
    Server("rabbitmq", rabbitmq, RABBITMQ, keeper=True),  # syncs before it acknowledges
    Server("amqtt alone", amqtt),
]


def installed(server: Server) -> bool:
    """Whether a server can be started on this machine."""
    if server.name == "amqtt alone":
        return importlib.util.find_spec("amqtt") is not None
    return not server.program or find(server.program) is not None


@contextlib.contextmanager
def serving(server: Server, root: Path) -> Iterator[tuple[int, int]]:
    """Start a server and wait until it answers; yields its process id and port."""
    port = free_port()
    with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as name:
        directory = Path(name)
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                server.command(directory, port), stdout=log, stderr=log, cwd=Path(__file__).parents[1],
                start_new_session=True,
            )  # fmt: skip
        try:
            deadline = time.monotonic() + START_TIMEOUT
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    said = (directory / "log").read_text()[-500:]
                    raise RuntimeError(f"{server.name} does not start: {said}")
                time.sleep(0.05)
            if server.keeper:
                keep(port)
            yield process.pid, port
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def keep(port: int) -> None:
    """Have a session that is away wait for all messages, at QoS 1: servers without one store nothing."""
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        client.sendall(b"\x10\x12\0\4MQTT\4\0\0\0\0\6keeper")
        assert client.recv(4) == b"\x20\2\0\0"
        client.sendall(b"\x82\x0c\0\1\0\7bench/#\1")
        assert client.recv(5) == b"\x90\3\0\1\1"
        client.sendall(b"\xe0\0")


def serve_on_flash(path: Path) -> None:
    """Be the service on the slow disk, until killed."""
    from bridge.config import settings
    from bridge.service import service
    from bridge.streams.layout import Files

    def sync(_: Files, fd: int) -> None:
        os.fdatasync(fd)
        time.sleep(FLASH)

    Files.sync = sync  # type: ignore[method-assign]
    service.run(settings.load(path))


if __name__ == "__main__":
    serve_on_flash(Path(sys.argv[1]))
