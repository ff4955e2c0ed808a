"""A world that a test turns by hand: time, threads, commits and transports happen when it says so.

Nothing here has a socket, an event loop or a real clock. `World.run` does what is due, and no more.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bridge import books
from bridge.access.logins import Access
from bridge.clock import Clock
from bridge.errors import NotEnoughMessages, StreamError, StreamFull
from bridge.mqtt.server.connection import Connection
from bridge.mqtt.server.connections import Endpoint, Listener
from bridge.mqtt.server.server import Server
from bridge.mqtt.settings import Limits, MqttConfig, parse_address
from bridge.operations.reading import ReadMessagesOptions
from bridge.streams.segment import StreamMessage
from bridge.topics import matches

from .clock import Machine


class Call:
    """A call that is due at some time."""

    def __init__(self, do: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.do, self.args, self.cancelled = do, args, False

    def cancel(self) -> None:
        self.cancelled = True


class ByHand:
    """A runtime whose time stands still until `World.run` moves it. Work is done at once, in its turn.

    With `tick`, each look at the clock takes so many seconds.
    """

    def __init__(self, tick: float = 0.0) -> None:
        self.time, self._tick = 1000.0, tick
        self._number = itertools.count()
        self._calls: list[tuple[float, int, Call]] = []

    def now(self) -> float:
        self.time += self._tick
        return self.time

    def soon(self, do: Callable[..., object], *args: Any) -> Call:
        return self.later(0, do, *args)

    def later(self, seconds: float, do: Callable[..., object], *args: Any) -> Call:
        call = Call(do, args)
        heapq.heappush(self._calls, (self.time + max(seconds, 0), next(self._number), call))
        return call

    def work(self, do: Callable[[], object], done: Callable[[BaseException | None], object]) -> None:
        def work() -> None:
            error: BaseException | None = None
            try:
                do()
            except Exception as caught:
                error = caught
            done(error)

        self.soon(work)

    def close(self) -> None:
        """There are no threads."""

    def step(self) -> bool:
        """Make the next call if it is due now; returns whether there was one."""
        if not self._calls or self._calls[0][0] > self.time:
            return False
        _, _, call = heapq.heappop(self._calls)
        if not call.cancelled:
            call.do(*call.args)
        return True

    def run(self, until: float) -> None:
        """Make all calls that are due up to a time, and those that they lead to."""
        while self._calls and self._calls[0][0] <= until:
            due, _, call = heapq.heappop(self._calls)
            self.time = max(self.time, due)
            if not call.cancelled:
                call.do(*call.args)
        self.time = max(self.time, until)


class Stream:
    """A stream in memory: `commit` stores what was appended, `fail` does not."""

    def __init__(self, name: str, topic: str) -> None:
        self.name, self.topic, self.full, self.by_itself = name, topic, False, False
        self.lasting = True
        self.stored: list[StreamMessage] = []
        self.pending: list[StreamMessage] = []
        self.waiting: list[Callable[[StreamError | None], None]] = []
        self.ids: dict[bytes, int] = {}

    @property
    def next_sequence(self) -> int:
        return len(self.stored)

    def ensure_admits(
        self, topic: bytes, payload: bytes, headers: bytes = b"", message_id: bytes = b""
    ) -> None:
        if self.full:
            raise StreamFull(f"stream {self.name!r} is full")

    def find(self, message_id: bytes) -> int | None:
        return self.ids.get(message_id)

    def append(self, topic: bytes, payload: bytes, headers: bytes = b"", message_id: bytes = b"") -> int:
        if message_id in self.ids:
            return self.ids[message_id]
        self.ensure_admits(topic, payload, headers)
        number = len(self.stored) + len(self.pending)
        if message_id:
            self.ids[message_id] = number
        self.pending.append(StreamMessage(number, 0, topic, payload, headers))
        return number

    def after_commit(self, done: Callable[[StreamError | None], None], heard: float = 0.0) -> None:
        self.waiting.append(done)
        if self.by_itself:
            self.commit()

    def commit(self, error: StreamError | None = None) -> None:
        """Store what is pending, or fail to."""
        if error is None:
            self.stored += self.pending
        self.forget_pending()
        waiting, self.waiting = self.waiting, []
        for done in waiting:
            done(error)

    def forget_pending(self) -> None:
        """What is not stored by now never is."""
        self.pending = []
        self.ids = {
            message_id: number for message_id, number in self.ids.items() if number < len(self.stored)
        }

    @property
    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.stored]


class Streams:
    """All streams, as the broker sees them (`mqtt.broker.store.Store`)."""

    def __init__(self, clock: Clock, data_dir: Path) -> None:
        self.definitions: dict[str, Stream] = {}
        self.on_bindings_changed: list[Callable[[], None]] = []
        self.on_pressure: list[Callable[[bool], None]] = []
        self.under_pressure = False
        self.unsyncable: set[str] = set()
        self.store = SimpleNamespace(clock=clock, data_dir=data_dir, keys=None, encrypts=False)

    def stream(self, name: str) -> Stream:
        return self.definitions[name]

    def bound(self, topic: str) -> tuple[Stream, ...]:
        return tuple(one for one in self.definitions.values() if matches(one.topic, topic))

    def gather(self, do: Callable[[], None]) -> None:
        do()

    def wants_client(self, name: str) -> bool:
        return False

    async def sync(self, names: Iterable[str]) -> set[str]:
        return self.unsyncable & set(names)

    async def read(self, name: str, options: ReadMessagesOptions) -> Sequence[StreamMessage]:
        found = self.definitions[name].stored[options.desired_start_sequence_number :]
        if not found:
            raise NotEnoughMessages(f"nothing in {name!r}")
        return found


class Transport:
    """One client's transport: what is written to it, and whether it is read from."""

    def __init__(self, address: str = "10.0.0.1") -> None:
        self.address, self.written = address, bytearray()
        self.closed = False
        self.reading = True

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: object = None) -> object:
        return (self.address, 1) if name == "peername" else default

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Wire:
    """A client's end: it sends bytes, and takes what has come."""

    def __init__(self, world: World, pieces: int = 0, address: str = "10.0.0.1") -> None:
        """With `pieces`, what it sends arrives in pieces of so many bytes."""
        self._world, self._pieces = world, pieces
        self.transport = Transport(address)
        self.connection = Connection(world.server.connections, world.endpoint)
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        self._lost = False

    def send(self, data: bytes) -> None:
        size = self._pieces or len(data)
        for start in range(0, len(data), size):
            if not self.transport.closed:
                self.connection.data_received(data[start : start + size])
                self._world.server.connections.reads.run()  # as at the end of a turn

    def got(self) -> bytes:
        """What has come since the last call, once everything that is due has been done."""
        self._world.run()
        found, self.transport.written = bytes(self.transport.written), bytearray()
        if self.transport.closed:
            self.lose()
        return found

    def lose(self) -> None:
        """The transport ends."""
        if not self._lost:
            self._lost = self.transport.closed = True
            self.connection.connection_lost(None)


class World:
    """A server with its broker, and streams "s" (bound to "in/#") and "other" ("in/both")."""

    def __init__(
        self, root: Path, machine: Machine | None = None, tick: float = 0.0, **settings: Any
    ) -> None:
        self.root, self.machine = root, machine or Machine()
        limits = {key: settings.pop(key) for key in list(settings) if key in Limits.__struct_fields__}
        self.config = MqttConfig(limits=Limits(**limits), **settings)
        self.runtime = ByHand(tick)
        self.clock = Clock(root / "clock", lambda path, data: None, self.machine)
        self.streams = Streams(self.clock, root)
        self.streams.definitions = {
            "s": Stream("s", "in/#"),
            "other": Stream("other", "in/both"),
        }
        self.start()

    def start(self) -> None:
        """Start a server on what the last one has left on the disk."""
        operations: Any = SimpleNamespace(manager=self.streams)
        access = Access(MqttConfig(allow_anonymous=True))
        self.server = Server(self.config, operations, access, self.runtime)
        self.broker = self.server.broker
        (settings,) = self.config.listeners()
        self.endpoint = Endpoint(parse_address("tcp://10.0.0.2:1883"), Listener(settings, access, None))
        begin = self.broker.start()
        try:
            begin.send(None)
        except StopIteration:
            return
        raise AssertionError("the broker waits for something")

    def kill(self) -> None:
        """End the server where it is: nothing more that it had begun happens. Start another one."""
        self.runtime = ByHand()
        for stream in self.streams.definitions.values():
            stream.waiting = []
            stream.forget_pending()
        self.start()

    def run(self, seconds: float = 0.0) -> None:
        """Let so much time pass, and do what is due."""
        self.machine.sleep(seconds)
        self.runtime.run(self.runtime.time + seconds)
        books.check()

    def connect(self, data: bytes, pieces: int = 0, address: str = "10.0.0.1") -> Wire:
        """A client that has sent its CONNECT."""
        wire = Wire(self, pieces, address)
        wire.send(data)
        return wire
