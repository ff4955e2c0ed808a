"""Real runs of the service under strace, with real clients; what came of it as a `Recording`."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bridge.encryption import new_master

from ..cli.conftest import COMMAND, environment
from ..mqtt.harness import Client, Packet, ack, connect, publish, subscribe
from .trace import OPTIONS, Call, parse

PATIENCE = 60.0  # seconds; strace makes everything slow
SYNC_INTERVAL = 0.1  # seconds
# What is promised is lost at most: "the last second or so". Thirty times the interval of streams, three times
# that of the journal.
QUIET = 3.0
FIXTURE = Path(__file__).parent / "fixtures" / "40e5b2e.tar.gz"
LIMIT = 12  # messages of the stream "limited"
SINK = '''
import os
from bridge import ACCEPTED, BatchedConfig, BatchLimits, Exporter, Retry, hookimpl


class SinkConfig(BatchedConfig, kw_only=True, frozen=True):
    path: str


class Sink(Exporter):
    """Notes what it is sent, and what it accepts; refuses every third batch once."""

    kind = "sink"
    Config = SinkConfig
    limits = BatchLimits(records=7, contiguous=True)

    def __init__(self, config, context):
        super().__init__(config, context)
        self.note = os.open(config.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def export(self, batch):
        os.write(self.note, b"sent %d %d\\n" % (batch.first, batch.last))
        if batch.first % 3 == 0 and batch.attempt == 1:
            raise Retry("not yet", after=0.01)
        os.write(self.note, b"accepted %d %d\\n" % (batch.first, batch.last))
        return ACCEPTED

    def landed(self, batch):
        return False


class Loose(Sink):
    """The same, for a destination that takes each message for itself."""

    kind = "loose"
    limits = BatchLimits(records=7, by_record=True)


@hookimpl
def register_exporters(register):
    register(Sink)
    register(Loose)
'''


class Sent(NamedTuple):
    """A message that a client has published."""

    topic: str
    payload: bytes
    qos: int
    packet_id: int


class Before(NamedTuple):
    """What clients were promised by an earlier version: see `check.Promised`."""

    waiting: frozenset[bytes]
    kept: int
    exact: dict[int, Sent]


class Recording(NamedTuple):
    """What happened. `sent` is by the client's port and packet id; an id is used again once it is free."""

    area: str
    calls: list[Call]
    initial: Path  # the disk as it was before
    disk: Path  # where it was
    told: Path  # what the destination of exports has noted
    sent: dict[tuple[int, int], list[Sent]]
    before: Before | None = None
    key: Path | None = None  # of its encrypted streams


class Recorder:
    """Runs the service in `root`/disk/data, as often as `run` is called."""

    def __init__(self, root: Path, config: str) -> None:
        self.root, self.disk, self.initial = root, root / "disk", root / "initial"
        self.disk.mkdir(exist_ok=True)  # an earlier version's files may be there
        shutil.copytree(self.disk, self.initial, symlinks=True)
        (root / "plugins").mkdir()
        (root / "plugins" / "sink.py").write_text(SINK)
        self.told = root / "told"
        self.config = root / "bridge.toml"
        self.config.write_text(
            f"""
[gateway]
id = "recorded"
data_dir = "{self.disk}/data"
memory_dir = "{root}/memory"
sync_interval = "{int(SYNC_INTERVAL * 1000)}ms"
[mqtt]
listen = ["tcp://127.0.0.1:0"]
[greengrass]
listen = ""
[http]
listen = ""
[export]
plugin_dirs = ["{root}/plugins"]
{config}"""
        )
        self.sent: dict[tuple[int, int], list[Sent]] = {}
        self.calls: list[Call] = []
        self._lines = self._marks = 0
        self.port = 0

    @asynccontextmanager
    async def run(self, end: signal.Signals) -> AsyncIterator[Recorder]:
        """One life of the service; how it ends."""
        log = self.root / "trace"
        said = (self.root / "log").open("w+")
        process = subprocess.Popen(
            ["strace", *OPTIONS, "-o", str(log), *COMMAND, "run", "-c", str(self.config)],
            env=environment(),
            stderr=said,
        )
        try:
            while not (ready := re.search(r"msg=ready .*mqtt://\S+:(\d+)", (self.root / "log").read_text())):
                assert process.poll() is None, (self.root / "log").read_text()
                await asyncio.sleep(0.02)
            self.port = int(ready[1])
            yield self
            service = int(_children(process.pid)[0])
            subprocess.run(["kill", f"-{int(end)}", str(service)], check=True)
            process.wait(PATIENCE)
        finally:
            if process.poll() is None:
                for child in _children(process.pid):
                    subprocess.run(["kill", "-9", child], check=False)
                process.kill()
                process.wait()
            said.close()
        with log.open(encoding="ascii", errors="replace") as lines:
            self.calls += parse(lines, self._lines)
        self._lines = max((call.end for call in self.calls), default=0) + 1
        log.unlink()

    def recording(self, area: str) -> Recording:
        """What was recorded so far."""
        return Recording(area, self.calls, self.initial, self.disk, self.told, self.sent)

    # -- clients ---------------------------------------------------------------------------------
    async def client(self, name: str, *, clean: bool = True) -> Device:
        """A client that is connected."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        device = Device(self, reader, writer)
        device.send(connect(name, clean=clean))
        answer = await device.receive(PATIENCE)
        assert answer.head == 0x20, answer
        return device

    async def mark(self, name: str) -> None:
        """Have it in the log that a step is over."""
        self._marks += 1
        device = await self.client(f"marker-{self._marks}")
        await device.put(f"mark/{name}", b"%d" % self._marks)
        device.disconnect()

    async def quiet(self) -> None:
        """Wait until everything must be on the disk, and mark that."""
        for _ in range(3):  # the promise is about time; a machine that stands still shortens one part
            await asyncio.sleep(QUIET / 3)
        await self.mark("quiet")

    async def request(self, operation: str, **body: Any) -> Any:
        """An operation, answered."""
        self._marks += 1
        name = f"asker-{self._marks}"
        device = await self.client(name)
        device.send(publish(f"streambridge/{name}/{operation}", json.dumps(body).encode(), 0))
        reply = device.parse(*await device.receive(PATIENCE))
        answer = json.loads(reply.payload)
        assert answer["statusName"] == "Success", answer
        device.disconnect()
        return answer


class Device(Client):
    """A client that notes what it publishes."""

    def __init__(
        self, recorder: Recorder, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        super().__init__(reader, writer)
        self._recorder, self._last = recorder, 0
        self.own = writer.get_extra_info("sockname")[1]

    def begin(self, topic: str, payload: bytes, qos: int, packet_id: int, *, retain: bool = False) -> None:
        """Send a PUBLISH."""
        key = self.own, packet_id
        self._recorder.sent.setdefault(key, []).append(Sent(topic, payload, qos, packet_id))
        self.send(publish(topic, payload, qos, packet_id, retain=retain))

    async def put(self, topic: str, *payloads: bytes, retain: bool = False) -> None:
        """Publish at QoS 1, all at once, and wait for the acknowledgements."""
        for payload in payloads:
            self._last += 1
            self.begin(topic, payload, 1, self._last, retain=retain)
        for _ in payloads:
            answer = await self.receive(PATIENCE)
            assert answer.head == 0x40, answer

    async def exactly_once(self, topic: str, payload: bytes, packet_id: int, *, release: bool = True) -> None:
        """Publish at QoS 2, and with `release` to the end."""
        await self._recorder.mark(f"begins:{self.own}:{packet_id}")
        self.begin(topic, payload, 2, packet_id)
        await self.expect(0x50, packet_id)
        if release:
            await self.release(packet_id)

    async def release(self, packet_id: int) -> None:
        """The second half."""
        self.send(ack(0x62, packet_id))
        await self.expect(0x70, packet_id)

    async def expect(self, head: int, packet_id: int) -> None:
        """Wait for an acknowledgement."""
        assert await self.receive(PATIENCE) == Packet(head, packet_id.to_bytes(2, "big"))


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


# -- the areas -----------------------------------------------------------------------------------
async def first_start(root: Path) -> Recording:
    """Nothing is there: directories, definitions and the first messages."""
    recorder = Recorder(root, _STREAMS)
    async with recorder.run(signal.SIGKILL):
        device = await recorder.client("device")
        await device.put("synced/a", b"first")
        await device.put("written/a", b"first")
        await device.put("synced/a", b"second", b"third")
        await recorder.quiet()
        await device.put("synced/a", b"fourth")
    return recorder.recording("first start")


_STREAMS = """
[streams.synced]
topics = ["synced/#"]
flush_on_write = true
segment_size = 4096
max_size = 65536
[streams.written]
topics = ["written/#"]
flush_on_write = false
segment_size = 2048
max_size = 65536
"""


async def store(root: Path) -> Recording:
    """Segments that are closed and removed, limits, a purge, streams that are made, changed and deleted."""
    limited = f"""
[streams.limited]
topics = ["limited/#"]
flush_on_write = true
segment_size = 1024
max_size = 65536
limits = {{ max_messages = {LIMIT} }}
[streams.over]
topics = ["over/#"]
flush_on_write = false
segment_size = 1024
max_size = 4096
strategy_on_full = "OverwriteOldestData"
"""
    recorder = Recorder(root, _STREAMS + limited)

    async def work(label: str) -> None:
        device = await recorder.client(f"device-{label}")
        for n in range(4):
            await device.put("synced/a", b"%s-%d" % (label.encode(), n))
        for name, size in (("synced", 200), ("written", 150), ("limited", 60), ("over", 200)):
            for burst in range(5):
                payloads = [b"%s-%d-%d-" % (label.encode(), burst, n) + b"x" * size for n in range(5)]
                await device.put(f"{name}/b", *payloads)
        await device.put("synced/a", label.encode() + b"-large-" + b"y" * 2500)
        device.disconnect()

    async with recorder.run(signal.SIGTERM):
        await work("one")
        await recorder.mark("purging:synced:12")
        await recorder.request("purgeMessageStream", name="synced", upto=12)
        await recorder.mark("purged:synced:12")
        definition = {
            "name": "made",
            "strategyOnFull": 0,
            "maxSize": 65536,
            "streamSegmentSize": 2048,
            "topics": ["made/#"],
            "flushOnWrite": True,
        }
        for life in ("first", "second"):
            await recorder.request("createMessageStream", definition=definition)
            await recorder.mark("created:made")
            device = await recorder.client("maker")
            await device.put("made/a", *[b"%s-life-%d" % (life.encode(), n) for n in range(3)])
            device.disconnect()
            if life == "first":
                await recorder.mark("deleting:made")
                await recorder.request("deleteMessageStream", name="made")
                await recorder.mark("deleted:made")
        await recorder.request("updateMessageStream", definition=definition | {"maxSize": 70000})
        await recorder.quiet()
        await work("two")
    async with recorder.run(signal.SIGKILL):
        await work("three")
        await recorder.quiet()
    return recorder.recording("store")


async def encrypted(root: Path) -> Recording:
    """Encrypted streams: the first key, segments that are closed, a restart and another key."""
    streams = _STREAMS.replace("flush_on_write = true", "flush_on_write = true\nencryption = true")
    recorder = Recorder(root, f'[encryption]\nkey_file = "{root}/key"\n{streams}')
    (root / "key").write_text(new_master())

    async def work(label: str) -> None:
        device = await recorder.client(f"device-{label}")
        for burst in range(4):
            for name in ("synced", "written"):
                await device.put(
                    f"{name}/a", *[b"%s-%d-%d-" % (label.encode(), burst, n) + b"e" * 150 for n in range(6)]
                )
        device.disconnect()

    async with recorder.run(signal.SIGTERM):
        await work("one")
        await recorder.quiet()
    async with recorder.run(signal.SIGKILL):
        await work("two")
        definition = {"name": "written", "strategyOnFull": 0, "maxSize": 65536, "streamSegmentSize": 2048}
        definition |= {"topics": ["written/#"], "encryption": True}
        await recorder.request("updateMessageStream", definition=definition)
        await work("three")
        await recorder.quiet()
        await work("four")
    return recorder.recording("encrypted")._replace(key=root / "key")


async def cursors(root: Path) -> Recording:
    """Exports of a stream that is synced and of two that are not, with gaps, over a restart."""
    export = """
[[streams.{0}.export.{2}]]
identifier = "out"
path = "{1}-{0}"
"""
    config = _STREAMS + '\n[streams.loose]\ntopics = ["loose/#"]\nsegment_size = 2048\n'
    for name, kind in ("synced", "sink"), ("written", "sink"), ("loose", "loose"):
        config += export.format(name, root / "told", kind)
    recorder = Recorder(root, config)

    async def work(label: str) -> None:
        device = await recorder.client(f"device-{label}")
        for burst in range(4):
            for name in ("synced", "written", "loose"):
                await device.put(
                    f"{name}/a", *[b"%s-%d-%d" % (label.encode(), burst, n) + b"z" * 40 for n in range(9)]
                )
            if burst % 2:
                await device.put(
                    "written/gone", *[b"%s-%d-gone-%d" % (label.encode(), burst, n) for n in range(3)]
                )
                await recorder.request("purgeMessageStream", name="written", topic="written/gone")
        device.disconnect()
        await asyncio.sleep(1)  # the exports go on

    async with recorder.run(signal.SIGTERM):
        await work("one")
        await recorder.quiet()
        await work("two")
    async with recorder.run(signal.SIGKILL):
        await work("three")
    return recorder.recording("cursors")


async def journal(root: Path) -> Recording:
    """Sessions, retained messages, and QoS 2 over a restart."""
    recorder = Recorder(root, _STREAMS)
    async with recorder.run(signal.SIGTERM):
        away = await recorder.client("away", clean=False)
        away.send(subscribe(1, ("plain/#", 1)))
        assert (await away.receive(PATIENCE)).head == 0x90
        away.disconnect()
        await recorder.mark("subscribed")
        device = await recorder.client("device")
        exact = await recorder.client("exact", clean=False)
        await device.put("plain/a", *[b"queued-%d" % n for n in range(6)])
        for n in range(4):
            await device.put("kept/a", b"kept-%d" % n, retain=True)
            await exact.exactly_once("synced/q", b"exact-%d" % n, n + 1)
        await exact.exactly_once("synced/q", b"exact-open", 7, release=False)
        await recorder.quiet()
        await exact.exactly_once("synced/q", b"exact-again", 1)
        await exact.exactly_once("written/q", b"exact-written", 2)
        await recorder.mark("taking")
        await take(recorder, 6)
        await device.put("plain/a", *[b"late-%d" % n for n in range(4)])
        await device.put("kept/a", b"kept-4", b"kept-5", retain=True)
        await exact.exactly_once("synced/q", b"exact-held", 9, release=False)
    async with recorder.run(signal.SIGKILL):
        device = await recorder.client("device")
        exact = await recorder.client("exact", clean=False)
        await exact.release(9)
        await exact.release(7)
        await exact.exactly_once("synced/q", b"exact-reused", 7)
        await exact.exactly_once("synced/q", b"exact-reused-too", 9, release=False)
        await device.put("plain/a", *[b"later-%d" % n for n in range(4)])
        await device.put("kept/a", b"kept-6", retain=True)
        await recorder.quiet()
        await exact.release(9)
        await exact.exactly_once("synced/q", b"exact-last", 9)
        await exact.exactly_once("synced/q", b"exact-on-its-way", 10, release=False)
    return recorder.recording("journal")


async def upgrade(root: Path) -> Recording:
    """A data directory that version 40e5b2e left when it was killed is opened by this one.

    The first start brings it to the present format. That version's service was run as in the other areas: the
    streams of `_STREAMS`, closed and purged; a clean stop, a second life, and a kill after the quiet seconds.
    """
    with tarfile.open(FIXTURE) as packed:
        packed.extractall(root / "disk", filter="data")
    recorder = Recorder(root, _STREAMS)
    async with recorder.run(signal.SIGTERM):
        device = await recorder.client("device")
        exact = await recorder.client("exact", clean=False)
        await device.put("synced/a", b"new-first")
        await exact.release(5)
        await exact.exactly_once("synced/q", b"exact-again", 5)
        await device.put("kept/a", b"kept-3", retain=True)
        for burst in range(3):
            await device.put("written/a", *[b"new-%d-%d-" % (burst, n) + b"x" * 100 for n in range(5)])
            await device.put("synced/a", *[b"new-%d-%d-" % (burst, n) + b"y" * 150 for n in range(5)])
        await recorder.request("purgeMessageStream", name="written", upto=20)
        await recorder.quiet()
        await recorder.mark("taking")
        await take(recorder, 5)
    async with recorder.run(signal.SIGKILL):
        device = await recorder.client("device")
        await device.put("synced/a", b"new-last")
        await device.put("plain/a", b"queued-new")
        await recorder.quiet()
    queued = frozenset(b"queued-%d" % n for n in range(5))
    before = Before(queued, 2, {5: Sent("synced/q", b"exact-old", 2, 5)})
    return recorder.recording("upgrade")._replace(before=before)


async def take(recorder: Recorder, number: int) -> None:
    """The subscriber takes what waits for it."""
    away = await recorder.client("away", clean=False)
    for _ in range(number):
        await away.message(PATIENCE)
    assert await away.alive()
    away.disconnect()


AREAS: dict[str, Callable[[Path], Awaitable[Recording]]] = {
    "first start": first_start,
    "store": store,
    "encrypted": encrypted,
    "cursors": cursors,
    "journal": journal,
    "upgrade": upgrade,
}


def record(area: str, root: Path) -> Recording:
    """Record an area in an empty directory; raises FileNotFoundError without strace."""
    return asyncio.run(_in_time(AREAS[area](root)))


async def _in_time(work: Awaitable[Recording]) -> Recording:
    async with asyncio.timeout(4 * PATIENCE):
        return await work
