"""What the tests of the MQTT front end share: a bridge on a real store, and a client made of bytes.

`Client` writes and reads packets with no client library in between, so that a test can send what no
library would, and sees what really comes. `bridge_test` turns a coroutine into a test with a bridge.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import uvloop

from bridge.access.logins import Access
from bridge.model import ExportStatus, MessageStreamDefinition, StrategyOnFull
from bridge.mqtt import MqttFrontEnd
from bridge.mqtt.broker.broker import Broker
from bridge.mqtt.server.server import Server
from bridge.mqtt.settings import Limits, MqttConfig
from bridge.mqtt.wire.packets import V5, V311, packet, string
from bridge.mqtt.wire.properties import Properties, write_properties
from bridge.operations.catalog import Operations
from bridge.operations.manager import StreamManager
from bridge.operations.reading import ReadMessagesOptions
from bridge.plugin import discovery
from bridge.plugin.allow import Allow
from bridge.runtime import LoopRuntime
from bridge.streams.segment import StreamMessage
from bridge.streams.store import StreamStore

from ..fakes.clock import Shifted

DEADLINE = 10.0


class NoExports:
    """The export side of a manager without exports."""

    def define(self, *_: object) -> None:
        return

    def waiting(self, name: str) -> dict[str, list[Any]]:
        return {}

    def forget(self, name: str, waiting: object = None) -> None:
        return

    def committed(self, *_: object) -> None:
        return

    def statuses(self, name: str) -> list[ExportStatus]:
        return []

    def exported_upto(self, name: str) -> int | None:
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


class Bridge:
    """A front end on a store in a directory."""

    def __init__(
        self,
        root: Path,
        config: MqttConfig,
        allow: Allow | None = None,
        system: Shifted | None = None,
        hurry: float = 1,
    ) -> None:
        """Every wait of the MQTT front end is `hurry` times shorter."""
        self.root, self.config, self.allow, self.system = root, config, allow, system or Shifted()
        self.hurry = hurry
        self.store: StreamStore
        self.manager: StreamManager
        self.front: MqttFrontEnd
        self.urls: list[str] = []

    async def start(self) -> None:
        self.store = StreamStore(
            self.root / "data",
            self.root / "memory",
            on_event=lambda stream, what: None,
            system=self.system,
        )
        self.manager = StreamManager(self.store, discovery.load([]), NoExports())
        self.operations = Operations(self.manager, self.allow)
        self.front = MqttFrontEnd(self.config, self.operations, Access(self.config), Hurried(self.hurry))
        self.urls = await self.front.start()

    async def stop(self) -> None:
        await self.front.stop()
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


class Packet(NamedTuple):
    """A received packet: first byte and body."""

    head: int
    body: bytes


class Published(NamedTuple):
    """A received PUBLISH, taken apart."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    dup: bool
    packet_id: int
    properties: bytes


_BOTH = "CONNACK DISCONNECT"
_EVERY = "CONNACK PUBACK PUBREC SUBACK UNSUBACK DISCONNECT"
# Table 2-6 of MQTT 5, "Reason Codes": the packets in which a server may send each
REASON_CODES = {
    0x00: "CONNACK PUBACK PUBREC PUBREL PUBCOMP SUBACK UNSUBACK DISCONNECT AUTH",
    0x01: "SUBACK", 0x02: "SUBACK", 0x10: "PUBACK PUBREC", 0x11: "UNSUBACK", 0x18: "AUTH", 0x80: _EVERY,
    0x81: _BOTH, 0x82: _BOTH, 0x83: _EVERY, 0x84: "CONNACK", 0x85: "CONNACK", 0x86: "CONNACK", 0x87: _EVERY,
    0x88: "CONNACK", 0x89: _BOTH, 0x8A: "CONNACK", 0x8B: "DISCONNECT", 0x8C: "CONNACK", 0x8D: "DISCONNECT",
    0x8E: "DISCONNECT", 0x8F: "SUBACK UNSUBACK DISCONNECT", 0x90: "CONNACK PUBACK PUBREC DISCONNECT",
    0x91: "PUBACK PUBREC SUBACK UNSUBACK", 0x92: "PUBREL PUBCOMP", 0x93: "DISCONNECT", 0x94: "DISCONNECT",
    0x95: _BOTH, 0x96: "DISCONNECT", 0x97: "CONNACK PUBACK PUBREC SUBACK DISCONNECT", 0x98: "DISCONNECT",
    0x99: "CONNACK PUBACK PUBREC DISCONNECT", 0x9A: _BOTH, 0x9B: _BOTH, 0x9C: _BOTH, 0x9D: _BOTH,
    0x9E: "SUBACK DISCONNECT", 0x9F: _BOTH, 0xA0: "DISCONNECT", 0xA1: "SUBACK DISCONNECT",
    0xA2: "SUBACK DISCONNECT",
}  # fmt: skip
PACKET_TYPES = {
    0x20: "CONNACK", 0x40: "PUBACK", 0x50: "PUBREC", 0x62: "PUBREL", 0x70: "PUBCOMP", 0x90: "SUBACK",
    0xB0: "UNSUBACK", 0xE0: "DISCONNECT", 0xF0: "AUTH",
}  # fmt: skip


def illegal_reasons(packet: Packet) -> list[str]:
    """The reason codes of a server's MQTT 5 packet that the standard does not allow there."""
    head, body = packet
    match PACKET_TYPES.get(head):
        case "PUBACK" | "PUBREC" | "PUBREL" | "PUBCOMP":
            codes = body[2:3]
        case "SUBACK" | "UNSUBACK":
            codes = body[3 + body[2] :]
        case "CONNACK":
            codes = body[1:2]
        case "DISCONNECT" | "AUTH":
            codes = body[:1]
        case _:
            return []
    return [hex(code) for code in codes if PACKET_TYPES[head] not in REASON_CODES.get(code, "").split()]


class Client:
    """One connection of raw packets."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self.level = reader, writer, V311

    def send(self, *packets: bytes) -> None:
        if not self.writer.transport.is_closing():
            self.writer.write(b"".join(packets))

    async def connect(self, client_id: str = "", *, expect: int = 0, **options: Any) -> Packet:
        self.level = options.get("level", V311)
        self.send(connect(client_id, **options))
        answer = await self.receive()
        assert answer.head == 0x20, answer
        assert answer.body[1] == expect, answer
        return answer

    async def receive(self, timeout: float = DEADLINE) -> Packet:
        """The next packet; ConnectionError at the end of the connection."""
        async with asyncio.timeout(timeout):
            try:
                head = (await self.reader.readexactly(1))[0]
                length = shift = 0
                while True:
                    byte = (await self.reader.readexactly(1))[0]
                    length |= (byte & 0x7F) << shift
                    shift += 7
                    if byte < 0x80:
                        break
                packet = Packet(head, await self.reader.readexactly(length))
            except (asyncio.IncompleteReadError, OSError) as error:
                raise ConnectionError("closed by the bridge") from error
        if self.level == V5:
            assert not (wrong := illegal_reasons(packet)), f"{packet} carries {wrong}"
        return packet

    async def exchange(self, *packets: bytes) -> Packet:
        self.send(*packets)
        return await self.receive()

    async def message(self, timeout: float = DEADLINE) -> Published:
        """The next packet, which is a PUBLISH; a QoS 1 one is acknowledged."""
        head, body = await self.receive(timeout)
        assert head & 0xF0 == 0x30, (head, body)
        published = self.parse(head, body)
        if published.qos == 1:
            self.send(ack(0x40, published.packet_id))
        return published

    def parse(self, head: int, body: bytes) -> Published:
        end = 2 + int.from_bytes(body[:2], "big")
        topic, qos, packet_id = body[2:end].decode(), head >> 1 & 3, 0
        if qos:
            packet_id, end = int.from_bytes(body[end : end + 2], "big"), end + 2
        properties = b""
        if self.level == V5:
            length = body[end]
            if length & 0x80:
                length, end = length & 0x7F | body[end + 1] << 7, end + 1
            properties = body[end + 1 : end + 1 + length]
            end += 1 + length
        return Published(topic, body[end:], qos, bool(head & 1), bool(head & 8), packet_id, properties)

    async def subscribe(self, *filters: tuple[str, int], packet_id: int = 1, **options: Any) -> bytes:
        """Subscribe; returns the codes of the SUBACK."""
        answer = await self.exchange(subscribe(packet_id, *filters, level=self.level, **options))
        assert answer.head == 0x90, answer
        return answer.body[3 if self.level == V5 else 2 :]

    async def alive(self) -> bool:
        """Whether the bridge still answers on this connection."""
        try:
            return await self.exchange(b"\xc0\0") == Packet(0xD0, b"")
        except ConnectionError:
            return False

    async def silent(self) -> bool:
        """Whether nothing is under way to the client: the next packet is the answer to a ping."""
        return await self.alive()

    async def closed(self, timeout: float = DEADLINE) -> bool:
        """Whether the bridge closes the connection; what it sends before is skipped."""
        try:
            async with asyncio.timeout(timeout):
                while await self.reader.read(65536):
                    pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def abort(self) -> None:
        """Go without a word."""
        self.writer.transport.abort()

    def disconnect(self) -> None:
        """Go politely."""
        self.send(b"\xe0\0")
        self.writer.close()


def connect(
    client_id: str = "",
    *,
    level: int = V311,
    clean: bool = True,
    keep_alive: int = 0,
    user: str | None = None,
    password: bytes | None = None,
    will: tuple[str, bytes, int] | None = None,
    will_retain: bool = False,
    properties: Properties | None = None,
    will_properties: Properties | None = None,
    name: bytes = b"MQTT",
) -> bytes:
    flags = clean << 1
    rest = string(client_id.encode())
    if will is not None:
        flags |= 4 | will[2] << 3 | will_retain << 5
        if level == V5:
            rest += write_properties(will_properties or {})
        rest += string(will[0].encode()) + string(will[1])
    if user is not None:
        flags |= 0x80
        rest += string(user.encode())
    if password is not None:
        flags |= 0x40
        rest += string(password)
    head = string(name) + bytes((level, flags)) + keep_alive.to_bytes(2, "big")
    if level == V5:
        head += write_properties(properties or {})
    return packet(0x10, head + rest)


def publish(
    topic: str | bytes,
    payload: bytes = b"",
    qos: int = 0,
    packet_id: int = 0,
    *,
    retain: bool = False,
    dup: bool = False,
    level: int = V311,
    properties: Properties | None = None,
) -> bytes:
    body = string(topic.encode() if isinstance(topic, str) else topic)
    if qos:
        body += packet_id.to_bytes(2, "big")
    if level == V5:
        body += write_properties(properties or {})
    return packet(0x30 | qos << 1 | retain | dup << 3, body + payload)


def subscribe(
    packet_id: int, *filters: tuple[str, int], level: int = V311, properties: Properties | None = None
) -> bytes:
    body = packet_id.to_bytes(2, "big")
    if level == V5:
        body += write_properties(properties or {})
    for name, options in filters:
        body += string(name.encode()) + bytes((options,))
    return packet(0x82, body)


def unsubscribe(packet_id: int, *filters: str, level: int = V311) -> bytes:
    body = packet_id.to_bytes(2, "big") + (b"\0" if level == V5 else b"")
    return packet(0xA2, body + b"".join(string(name.encode()) for name in filters))


def ack(head: int, packet_id: int) -> bytes:
    return bytes((head, 2)) + packet_id.to_bytes(2, "big")


PING = b"\xc0\0"


async def until(condition: Callable[[], Any], timeout: float = DEADLINE, what: str = "") -> None:
    """Wait for a condition, with a deadline."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s: {what or inspect.getsource(condition)}"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def running(root: Path, hurry: float = 1, **settings: Any) -> AsyncIterator[Bridge]:
    """A bridge with one stream "s", bound to "in/#"; see `Bridge` for `hurry`."""
    limits = {key: settings.pop(key) for key in list(settings) if key in Limits.__struct_fields__}
    config = MqttConfig(**{"listen": ["tcp://127.0.0.1:0"], "limits": Limits(**limits), **settings})
    bridge = Bridge(root, config, hurry=hurry)
    await bridge.start()
    try:
        bridge.stream("s", "in/#")
        yield bridge
    finally:
        await bridge.stop()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
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
    test: Callable[[Bridge], Awaitable[None]] | None = None, *, seconds: float = 60, **settings: Any
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


def tool(name: str) -> str:
    """The path of a program; the test is skipped without it."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if path is None:
        pytest.skip(f"{name} is not installed; apt-get install mosquitto mosquitto-clients")
    return path


def decoded(raw: bytes) -> dict[str, Any]:
    """msgpack, as stored in headers."""
    return msgspec.msgpack.decode(raw) if raw else {}
