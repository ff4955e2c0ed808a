"""What the tests of the MQTT front end share: a bridge on a real store, and a client of raw packets.

`bridge_test` turns a coroutine into a test with a bridge. The client comes from `benchmarks.testbed.mqtt`.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import inspect
import os
import shutil
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from benchmarks.testbed.local import tool
from benchmarks.testbed.mqtt import (
    DEADLINE,
    PACKET_TYPES,
    PING,
    REASON_CODES,
    Client,
    Packet,
    Published,
    ack,
    connect,
    illegal_reasons,
    publish,
    subscribe,
    unsubscribe,
)
from bridge import books
from bridge.access.logins import Access
from bridge.auth.supervisor import Auth
from bridge.encryption import Keys
from bridge.model import ExportStatus, MessageStreamDefinition, StrategyOnFull
from bridge.mqtt import MqttFrontEnd
from bridge.mqtt.broker.broker import Broker
from bridge.mqtt.server.server import Server
from bridge.mqtt.settings import Limits, MqttConfig, UpstreamSettings
from bridge.mqtt.wire import properties as p
from bridge.operations.catalog import Operations
from bridge.operations.manager import StreamManager
from bridge.operations.reading import ReadMessagesOptions
from bridge.plugin import discovery
from bridge.plugin.allow import Allow
from bridge.runtime import LoopRuntime
from bridge.streams.layout import Files
from bridge.streams.segment import StreamMessage
from bridge.streams.store import StreamStore

from ..fakes.clock import Shifted

# The tests of MQTT import all that they share from here.
__all__ = [
    "DEADLINE",
    "PACKET_TYPES",
    "PING",
    "PLAIN",
    "REASON_CODES",
    "Bridge",
    "Client",
    "Hurried",
    "NoExports",
    "NoWorker",
    "Packet",
    "Published",
    "ack",
    "bridge_test",
    "connect",
    "copied",
    "decoded",
    "found_again",
    "full_disk",
    "illegal_reasons",
    "publish",
    "run_async",
    "running",
    "subscribe",
    "tool",
    "unsubscribe",
    "until",
]


PLAIN = {p.REQUEST_PROBLEM_INFO: 0}  # a client with these properties gets reason codes without a text


class NoExports:
    """The export side of a manager without exports."""

    def define(self, *_: object) -> None:
        return

    def pending(self, name: str) -> dict[str, list[Any]]:
        return {}

    def forget(self, name: str, pending: object = None) -> None:
        return

    def committed(self, *_: object) -> None:
        return

    def statuses(self, name: str) -> list[ExportStatus]:
        return []

    def exported_upto(self, name: str, holding: object = None) -> int | None:
        return None


class Hurried(LoopRuntime):
    """The event loop, on which whatever waits for a time waits less."""

    def __init__(self, factor: float) -> None:
        super().__init__(2, "mqtt")
        later = self.later
        self.later = lambda seconds, do, *args: later(seconds / factor, do, *args)


class NoWorker:
    """An export side that only has numbers, for an observer to look at."""

    restarts = memory = 0
    pid = 1


class Disk(Files):
    """The files of streams; `full` has the names of those whose segments cannot grow."""

    def __init__(self) -> None:
        self.full: set[str] = set()
        self.refuse: Callable[[], object] = lambda: None  # called before a write fails, in its thread

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        if self.full and not self.full.isdisjoint(Path(f"/proc/self/fd/{fd}").readlink().parts):
            self.refuse()
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(fd, parts, offset)


class Bridge:
    """A front end on a store in a directory; if that has a file `key`, streams may be encrypted."""

    def __init__(
        self,
        root: Path,
        config: MqttConfig,
        allow: Allow | None = None,
        system: Shifted | None = None,
        hurry: float = 1,
        registry: discovery.Registry | None = None,
        upstreams: Sequence[UpstreamSettings] = (),
        auth: Auth | None = None,
    ) -> None:
        """Every wait of the MQTT front end is `hurry` times shorter. `registry`: plugins that are loaded."""
        self.upstreams, self.gateway, self.auth = upstreams, "plant-7", auth
        self.root, self.config, self.allow, self.system = root, config, allow, system or Shifted()
        self.hurry, self.registry = hurry, registry
        self.files = Disk()
        self.store: StreamStore
        self.manager: StreamManager
        self.front: MqttFrontEnd
        self.urls: list[str] = []

    async def start(self) -> None:
        self.store = StreamStore(
            self.root / "data",
            self.root / "memory",
            on_event=lambda stream, what: None,
            files=self.files,
            system=self.system,
            keys=Keys(self.root / "data", key) if (key := self.root / "key").exists() else None,
        )
        self.manager = StreamManager(self.store, self.registry or discovery.load([]), NoExports())
        self.operations = Operations(self.manager, self.allow)
        access, runtime = Access(self.config), Hurried(self.hurry)
        self.front = MqttFrontEnd(
            self.config,
            self.operations,
            access,
            runtime,
            upstreams=self.upstreams,
            gateway=self.gateway,
            auth=self.auth,
        )
        self.urls = await self.front.start()
        if self.auth is not None:
            await self.auth.start()

    async def stop(self) -> None:
        books.check()  # while there are still connections and sessions
        if self.auth is not None:
            await self.auth.stop()
        await self.front.stop()
        self.manager.close()
        await self.store.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    @property
    def server(self) -> Server:
        """The insides, for what no client can see (how much is held, whether a task is left)."""
        assert self.front._server is not None
        return self.front._server

    @property
    def broker(self) -> Broker:
        return self.server.broker

    @property
    def port(self) -> int:
        return self.port_of(0)

    def port_of(self, number: int) -> int:
        return int(self.urls[number].rsplit(":", 1)[1])

    def stat(self, name: str) -> int:
        return self.front.stats().get(name, 0)

    def stream(self, name: str, *topics: str, **options: Any) -> None:
        self.manager.create(
            MessageStreamDefinition(
                name=name, strategy_on_full=StrategyOnFull.RejectNewData, topics=list(topics), **options
            )
        )

    async def stored(self, name: str = "s") -> list[StreamMessage]:
        """All messages of a stream."""
        if not self.manager.describe(name).storage_status.newest_sequence_number + 1:
            return []
        found: list[StreamMessage] = []
        end = self.manager.describe(name).storage_status.newest_sequence_number
        while not found or found[-1].sequence_number < end:
            start = found[-1].sequence_number + 1 if found else 0
            options = ReadMessagesOptions(desired_start_sequence_number=start, max_message_count=1_000_000)
            found += await self.manager.read(name, options)
        return found

    async def payloads(self, name: str = "s") -> list[bytes]:
        return [message.payload for message in await self.stored(name)]

    async def connect(self, client_id: str = "", **options: Any) -> Client:
        """A client, connected."""
        client = await self.open()
        await client.connect(client_id, **options)
        return client

    async def open(self, listener: int = 0, tls: ssl.SSLContext | None = None) -> Client:
        """A transport without a CONNECT."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(1 << 24)
        protocol = _Closing(reader)
        transport, _ = await loop.create_connection(
            lambda: protocol, "127.0.0.1", self.port_of(listener), ssl=tls
        )
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        return Client(reader, writer)


class _Closing(asyncio.StreamReaderProtocol):
    """A stream that closes its half when the bridge has closed the other, as most clients do."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False


async def until(condition: Callable[[], Any], timeout: float = DEADLINE, what: str = "") -> None:
    """Wait for a condition, with a deadline."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s: {what or inspect.getsource(condition)}"
        await asyncio.sleep(0.005)
    books.check()


@asynccontextmanager
async def running(
    root: Path,
    hurry: float = 1,
    upstreams: Sequence[UpstreamSettings] = (),
    auth: Auth | None = None,
    **settings: Any,
) -> AsyncIterator[Bridge]:
    """A bridge with one stream "s", bound to "in/#"; see `Bridge` for `hurry`."""
    limits = {key: settings.pop(key) for key in list(settings) if key in Limits.__struct_fields__}
    if hurry > 1:  # not the time for a CONNECT: it is one that the test takes itself
        limits.setdefault("connect_timeout", 3_600_000)
    config = MqttConfig(**{"listen": ["tcp://127.0.0.1:0"], "limits": Limits(**limits), **settings})
    bridge = Bridge(root, config, hurry=hurry, upstreams=upstreams, auth=auth)
    before = asyncio.all_tasks()  # of other bridges
    await bridge.start()
    try:
        bridge.stream("s", "in/#")
        yield bridge
    finally:
        await bridge.stop()
        left = [task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
    assert not left, f"tasks left behind by the bridge: {left}"


@asynccontextmanager
async def found_again(bridge: Bridge, taken: Path, system: Shifted | None = None) -> AsyncIterator[Bridge]:
    """A bridge on a copy that was taken of another's files, as a kill or a power cut leaves them."""
    again = Bridge(taken, MqttConfig(listen=["tcp://127.0.0.1:0"]), system=system or bridge.system)
    await again.start()
    try:
        yield again
    finally:
        await again.stop()


@contextmanager
def full_disk(times: int = 1_000_000) -> Iterator[None]:
    """A disk that refuses so many writes to the journal, and then takes them again."""
    pwrite, left = os.pwrite, times

    def full(fd: int, data: Any, offset: int) -> int:
        nonlocal left
        if left and Path(f"/proc/self/fd/{fd}").readlink().name.startswith("sessions."):
            left -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        yield


def copied(bridge: Bridge) -> Path:
    """The files as they are at this moment."""
    taken = bridge.root / f"taken-{len(list(bridge.root.iterdir()))}"
    shutil.copytree(bridge.root / "data", taken / "data", symlinks=True)
    return taken


def bridge_test(
    test: Callable[[Bridge], Awaitable[None]] | None = None, *, seconds: float = 240, **settings: Any
) -> Any:
    """Make a test of a coroutine that takes a running bridge, and ends in time."""
    if test is None:
        return functools.partial(bridge_test, seconds=seconds, **settings)

    # Not functools.wraps: pytest would take the coroutine's argument for a fixture.
    def run(tmp_path: Path) -> None:
        async def main() -> None:
            async with asyncio.timeout(seconds), running(tmp_path, **settings) as bridge:
                await test(bridge)

        run_async(main())

    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    return run


def run_async(coroutine: Any) -> None:
    """Run on uvloop, as the service does; with BRIDGE_TEST_LOOP=asyncio on the standard loop."""
    if os.environ.get("BRIDGE_TEST_LOOP") == "asyncio":
        asyncio.run(coroutine)
    else:
        uvloop.run(coroutine)


def decoded(raw: bytes) -> dict[str, Any]:
    """msgpack, as stored in headers."""
    return msgspec.msgpack.decode(raw) if raw else {}
