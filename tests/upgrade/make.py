"""Makes the data directories that `test_upgrade.py` opens, with the code of some commit.

    git worktree add /tmp/old 40e5b2e
    python -m tests.upgrade.make /tmp/old tests/upgrade/format-1

A service of that checkout runs with real clients, and is then killed (NAME-killed.tar.xz) or stopped
(NAME-stopped.tar.xz). Beside the data directory an archive has `expected.json`: what clients were told is
stored, by stream, what the export's destination has, and in which boot of the machine it was made.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.testbed.web import Web
from bridge.clock import System
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5
from tests.mqtt.harness import Client, ack, publish, until

CONFIG = """
[gateway]
id = "gw"
data_dir = "data"
memory_dir = "memory"
[mqtt]
listen = ["tcp://127.0.0.1:{port}"]
[greengrass]
listen = ""
[http]
listen = ""
[streams.sensors]
topics = ["sensors/#"]
segment_size = 4096
[[streams.sensors.export.http]]
identifier = "lake"
uri = "{url}"
batch_size = 16
export_format = 1
[streams.ledger]
topics = ["ledger/#"]
segment_size = 4096
flush_on_write = true
[streams.latest]
topics = ["latest/#"]
[streams.latest.limits]
max_messages_per_topic = 2
[streams.scratch]
topics = ["scratch/#"]
persistence = "Memory"
"""
ROOM = 3  # batches that the destination takes before it is shut
ACKNOWLEDGED, RECEIVED, RELEASE, COMPLETE = 0x40, 0x50, 0x62, 0x70
YEARS = 0xFFFFFFF0  # seconds: a session or a message that does not expire


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Service:
    """The service of a checkout, in a directory."""

    def __init__(self, checkout: Path, directory: Path, url: str) -> None:
        self.checkout, self.directory, self.port = checkout, directory, free_port()
        self.config, self.log = directory / "streambridge.toml", directory / "log"
        self.config.write_text(CONFIG.format(port=self.port, url=url))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *prefix: str) -> None:
        """Start it; `ready` waits."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "bridge", "run", "-c", str(self.config)],
                cwd=self.checkout,
                env=os.environ | {"PYTHONPATH": str(self.checkout)},
                stderr=log,
                start_new_session=True,
            )

    def listens(self) -> bool:
        """Whether clients can connect; fails if it has ended."""
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    async def ready(self) -> None:
        """Wait until clients can connect."""
        await until(self.listens, 30)

    def end(self, number: int = signal.SIGKILL) -> None:
        """Kill or stop it, with its worker."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(self.process.pid, number)
                else:
                    self.process.send_signal(number)
            self.process.wait(30)
            self.process = None

    async def connect(self, name: str, **options: Any) -> Client:
        """A client with a session that stays."""
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        await client.connect(name, clean=False, **options)
        return client


async def fill(service: Service, web: Web) -> dict[str, Any]:
    """Have clients leave everything that a data directory can hold; returns what was acknowledged."""
    stored: dict[str, list[str]] = {}
    device = await service.connect("device")

    async def store(stream: str, topic: str, payloads: list[bytes], qos: int = 1) -> None:
        for number, payload in enumerate(payloads, 1):
            packet_id = number % 60_000 + 1
            answer = await device.exchange(publish(topic, payload, qos, packet_id))
            assert answer.head == (0x40 if qos == 1 else RECEIVED), answer
            if qos == 2:
                assert (await device.exchange(ack(RELEASE, packet_id))).head == COMPLETE
            stored.setdefault(stream, []).append(payload.decode())

    web.room = ROOM
    readings = [b"reading %d %s" % (n, b"x" * (n % 50)) for n in range(200)]
    await store("sensors", "sensors/room1", readings[:100])
    await store("sensors", "sensors/room2", readings[100:], qos=2)
    await store("ledger", "ledger/a", [b"entry %d %s" % (n, b"y" * (n * 7 % 90)) for n in range(120)])
    for number in range(30):
        await store("latest", f"latest/{number % 3}", [b"value %d" % number])
    await store("scratch", "scratch/a", [b"passing"] * 5)
    stored["scratch"], stored["latest"] = [], stored["latest"][-6:]

    reader = await service.connect("reader")
    assert await reader.subscribe(("plain/#", 1), ("wills/#", 1)) == b"\1\1"
    modern = await service.connect("modern", level=V5, properties={p.SESSION_EXPIRY: YEARS})
    assert await modern.subscribe(("plain/+", 2)) == b"\2"
    for client in (reader, modern):
        client.disconnect()
    await asyncio.sleep(0.2)
    for number in range(5):
        await device.exchange(publish("plain/a", b"queued %d" % number, 1, 1000 + number))
    expiring = publish("plain/b", b"not expired", 1, 2000, level=V5, properties={p.MESSAGE_EXPIRY: YEARS})
    newer = await service.connect("newer", level=V5, properties={p.SESSION_EXPIRY: YEARS})
    assert (await newer.exchange(expiring)).head == 0x40
    for topic in ("state/a", "state/b"):
        await device.exchange(publish(topic, topic.encode(), 1, 3000, retain=True))
    # Its packet id is in use: the message is stored, and not released.
    assert (await device.exchange(publish("sensors/room3", b"once", 2, 77))).head == RECEIVED
    stored["sensors"].append("once")
    await service.connect(
        "mortal", level=V5, will=("wills/mortal", b"gone", 1), properties={p.SESSION_EXPIRY: YEARS}
    )
    await until(lambda: len(web.bodies) == ROOM, 30)
    await asyncio.sleep(1.5)  # what was sent is in the cursor, and closed segments have their indexes
    exported = [payload for body in web.bodies for payload in payloads(body)]
    return {"stored": stored, "exported": exported, "boot": System().boot}


def payloads(body: bytes) -> list[str]:
    """The payloads in a body of the `http` exporter."""
    return [base64.b64decode(row["payload"]).decode() for row in json.loads(body)]


def make(checkout: Path, output: Path, end: int) -> None:
    """Make one archive."""
    with tempfile.TemporaryDirectory() as name:
        directory, web = Path(name), Web()
        service = Service(checkout, directory, web.url)

        async def work() -> dict[str, Any]:
            service.start()
            await service.ready()
            return await fill(service, web)

        try:
            expected = asyncio.run(work())
        except BaseException:
            print(service.log.read_text(), file=sys.stderr)
            raise
        finally:
            service.end(end)
            web.close()
        (directory / "expected.json").write_text(json.dumps(expected))
        with tarfile.open(output, "w:xz") as archive:
            for name in ("data", "expected.json"):
                archive.add(directory / name, name, filter=_is_kept)
    print(f"{output}: {output.stat().st_size} bytes")


def _is_kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry if entry.isfile() or entry.isdir() else None  # no link to memory, no socket


def unpacked(archive: Path, directory: Path) -> dict[str, Any]:
    """Unpack an archive; returns what is expected of it."""
    with tarfile.open(archive) as found:
        found.extractall(directory, filter="data")
    expected: dict[str, Any] = json.loads((directory / "expected.json").read_text())
    return expected


ENDS: dict[str, int] = {"killed": signal.SIGKILL, "stopped": signal.SIGTERM}


if __name__ == "__main__":
    for what, number in ENDS.items():
        made = Path(f"{sys.argv[2]}-{what}.tar.xz")
        make(Path(sys.argv[1]).resolve(), made, number)
