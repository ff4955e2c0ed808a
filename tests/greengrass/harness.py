"""A bridge in a thread of its own, and a client made of bytes that can send what no SDK would."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import cbor2
import uvloop

from bridge.access.logins import Access
from bridge.encryption import Keys
from bridge.greengrass.frontend import Bounds, GreengrassFrontEnd
from bridge.greengrass.settings import GreengrassConfig
from bridge.model import ExportStatus, MessageStreamDefinition, StrategyOnFull
from bridge.mqtt.settings import MqttConfig
from bridge.net.peer import ESTABLISHED, Found, Owners
from bridge.operations.catalog import Operations
from bridge.operations.manager import StreamManager
from bridge.operations.reading import MOST_BYTES, STEP
from bridge.plugin import discovery
from bridge.plugin.allow import KINDS, Allow
from bridge.streams.store import StreamStore

DEADLINE = 60.0
T = TypeVar("T")


class Exports:
    """The export side of a manager: nothing is exported, but the status of it can be set."""

    def __init__(self) -> None:
        self.known: dict[str, list[ExportStatus]] = {}

    def define(
        self,
        name: str,
        directory: Path,
        epoch: int,
        definition: MessageStreamDefinition,
        paused: Collection[str],
        begun: Mapping[str, int],
    ) -> None:
        self.known[name] = [
            ExportStatus(export_config_identifier=raw["identifier"])
            for configs in definition.export_definition.values()
            for raw in configs
        ]

    def pending(self, name: str) -> dict[str, list[Any]]:
        return {}

    def forget(self, name: str, pending: object = None) -> None:
        self.known.pop(name, None)

    def committed(self, *_: object) -> None:
        return

    def statuses(self, name: str) -> list[ExportStatus]:
        return self.known[name]

    def exported_upto(self, name: str, holding: object = None) -> int | None:
        return None


class Server:
    """Store, manager and front end, on an event loop in a thread."""

    def __init__(
        self,
        root: Path,
        *,
        token_file: Path | None = None,
        tokens_file: Path | None = None,
        port: int = 0,
        allow: Allow | None = None,
        access: MqttConfig | None = None,
        bounds: Bounds = Bounds(),  # noqa: B008 - immutable
        read_step: int = STEP,
        read_bytes: int = MOST_BYTES,
        owner: int | None = None,
        retention: Literal["limits", "exported"] = "limits",
        **settings: Any,
    ) -> None:
        """`owner` is the user to whom all clients belong; None: their real one. `settings`: [greengrass]."""
        self.bounds, self.read_step, self.read_bytes = bounds, read_step, read_bytes
        self.allow = allow or Allow(kinds=[*KINDS, "s3"], endpoints=["http://127.0.0.1:1"])
        self.access = access or MqttConfig()
        self.data_dir, self._root = root / "data", root
        self.owner = owner
        self.config = GreengrassConfig(
            listen=f"127.0.0.1:{port}",
            token_file=token_file,
            tokens_file=tokens_file,
            retention=retention,
            **settings,
        )
        self.key_file: Path | None = None
        self.store: StreamStore
        self.manager: StreamManager
        self.front: Any
        self.exports = Exports()
        self.urls: list[str] = []

    def __enter__(self) -> Self:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        try:
            self.run(self._start())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(self._stop())
        finally:
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self.store = StreamStore(
            self.data_dir,
            self._root / "memory",
            on_event=lambda stream, what: None,
            keys=Keys(self.data_dir, self.key_file),
        )
        self.manager = StreamManager(self.store, discovery.load([]), self.exports, self.read_step)
        self.operations = Operations(self.manager, self.allow, self.read_bytes)
        self.front = self.front_end()
        try:
            self.urls = await self.front.start()
        except BaseException:
            await self.store.close()
            raise

    def front_end(self) -> Any:
        """The front end under test."""
        known = self.owner is None
        owners = None if known else Owners(lambda _ours, _theirs: Found(ESTABLISHED, self.owner or 0))
        return GreengrassFrontEnd(self.config, self.operations, Access(self.access), self.bounds, owners)

    async def _stop(self) -> None:
        await self.front.stop()
        await self.store.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE * 2)

    def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call something on the event loop."""

        async def work() -> T:
            return function(*args, **options)

        return self.run(work())

    @property
    def port(self) -> int:
        return int(self.urls[0].rsplit(":", 1)[1])

    def stream(self, name: str = "s", **settings: Any) -> None:
        settings.setdefault("strategy_on_full", StrategyOnFull.RejectNewData)
        self.call(self.manager.create, MessageStreamDefinition(name=name, **settings))

    def append(self, *payloads: bytes, name: str = "s") -> None:
        self.run(self.manager.append_all(name, payloads))

    def newest(self, name: str = "s") -> int:
        return self.call(self.manager.describe, name).storage_status.newest_sequence_number

    def wait_until(self, condition: Callable[[], object], what: str = "a condition") -> None:
        """Wait for something to become true on the event loop."""

        async def work() -> None:
            deadline = time.monotonic() + DEADLINE
            while not condition():
                assert time.monotonic() < deadline, f"{what} never came true"
                await asyncio.sleep(0.005)

        self.run(work())


def frame(op: int, body: bytes | dict[str, Any]) -> bytes:
    data = body if isinstance(body, bytes) else cbor2.dumps(body)
    return struct.pack(">ib", len(data) + 1, op) + data


CONNECT = {"requestId": "c", "protocolVersion": "1.1.0", "otherSupportedProtocolVersions": ["1.0.0"]}


class Raw:
    """A client that sends bytes."""

    def __init__(self, server: Server, *, connect: dict[str, Any] | None = CONNECT) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE)
        if connect is not None:
            self.socket.sendall(b"\x01" + frame(1, connect))
            self.greeting = self.greeted()
            assert self.greeting["status"] == 0, self.greeting

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def exactly(self, number: int) -> bytes:
        data = b""
        while len(data) < number:
            more = self.socket.recv(number - len(data))
            if not more:
                raise EOFError(f"the connection ended after {data!r}")
            data += more
        return data

    def receive(self) -> tuple[int, dict[str, Any]]:
        """The next frame: operation and body."""
        length, op = struct.unpack(">ib", self.exactly(5))
        body: dict[str, Any] = cbor2.loads(self.exactly(length - 1))
        return op, body

    def greeted(self) -> dict[str, Any]:
        """The server's part of the handshake."""
        assert self.exactly(1) == b"\x01"
        op, body = self.receive()
        assert op == 6
        return body

    def send(self, op: int, body: bytes | dict[str, Any]) -> None:
        self.socket.sendall(frame(op, body))

    def ask(self, op: int, **body: Any) -> dict[str, Any]:
        self.send(op, {"requestId": "r", **body})
        answered, reply = self.receive()
        assert reply["requestId"] == "r"
        return {"op": answered, **reply}

    def ended(self) -> bool:
        """Whether the server ends the connection, with FIN: a RST raises ConnectionResetError."""
        while self.socket.recv(1 << 16):
            continue
        return True


@contextlib.contextmanager
def many(number: int, make: Callable[[], Raw]) -> Any:
    """So many clients."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(make()) for _ in range(number)]
