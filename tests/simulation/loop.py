"""The event loop of a simulated process, and what it talks to: clients, its worker, other processes.

A transport's bytes take a drawn time to arrive, in pieces that are drawn. Each direction keeps its order.
When a connection breaks, what is on its way is lost, each side's part of it.
"""

from __future__ import annotations

import asyncio
import socket
from asyncio import events
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from . import kernel as kernels
from .kernel import Kernel, Killed, Process, Thread

HIGH_WATER = 64 * 1024  # bytes that a client has not taken: its protocol is told to pause, as asyncio does


class _NoSelector:
    def select(self, timeout: float | None) -> list[Any]:
        return []


class Loop(asyncio.BaseEventLoop):
    """Runs in events of the kernel."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._selector = _NoSelector()  # of the base class
        self._clock_resolution = 1e-6  # of the base class, too: after a year, a float has no nanoseconds
        self.process, self.kernel = process, process.kernel
        self._due: float | None = None  # when it runs next
        self._turn = 0
        self.signals: dict[int, Callable[[], object]] = {}
        self.ending = False
        self._tasks: WeakKeyDictionary[asyncio.Task[Any], None] = WeakKeyDictionary()  # in their order

    def create_task(self, *args: Any, **kwargs: Any) -> Any:
        task = super().create_task(*args, **kwargs)
        self._tasks[task] = None
        return task

    # -- for the kernel

    @contextmanager
    def running(self) -> Iterator[None]:
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            yield
        finally:
            events._set_running_loop(before)

    def kick(self) -> None:
        """Make sure that it runs when it has something to do."""
        if self.ending:
            return
        now = self.kernel.now
        if self._ready:
            at = now + self.kernel.random.random() * 20e-6
        elif self._scheduled:
            at = max(self._scheduled[0]._when, now)
        else:
            return
        if self._due is None or at < self._due:
            self._due, self._turn = at, self._turn + 1
            self.kernel.later(at - now, self.process, self._run_turn, self._turn)

    def _run_turn(self, turn: int) -> None:
        if turn == self._turn:
            self._due = None
            self._run_once()

    def abandon(self) -> None:
        """Its process is dead: nothing that it had begun goes on."""
        self.ending = True
        for task in [task for task in self._tasks if not task.done()]:
            task._log_destroy_pending = False
            unwind(task.get_coro())
        self._ready.clear()
        self._scheduled.clear()

    # -- of the event loop

    def time(self) -> float:
        return self.kernel.now

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        self.kick()

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        if self.process.dead:
            raise Killed
        handle = self.call_soon(callback, *args, context=context)
        self.kick()
        return handle

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        future = self.create_future()

        def work() -> None:
            error: BaseException | None = None
            result = None
            try:
                result = func(*args)
            except Killed:
                raise
            except BaseException as caught:
                error = caught
            self.call_soon_threadsafe(done, result, error)

        def done(result: object, error: BaseException | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

        Thread(target=work, name="executor").start()
        return future

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        self.signals[sig] = lambda: callback(*args)

    def signal(self, number: int) -> None:
        """A signal arrives."""
        if number in self.signals:
            self.call_soon(self.signals[number])
            self.kick()

    async def getaddrinfo(self, host: Any, port: Any, **more: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]

    async def create_server(self, protocol_factory: Any, *args: Any, sock: Any = None, **more: Any) -> Any:
        NETWORK[sock.address] = self.process, protocol_factory
        return sock

    async def create_connection(
        self, protocol_factory: Any, *args: Any, sock: Any = None, **more: Any
    ) -> Any:
        protocol = protocol_factory()
        transport = PairTransport(self, sock, protocol)
        protocol.connection_made(transport)
        return transport, protocol

    async def subprocess_exec(self, protocol_factory: Any, *args: Any, **more: Any) -> Any:
        protocol = protocol_factory()
        transport = ProcessTransport(self, protocol, CHILDREN.start(self.process, [str(arg) for arg in args]))
        protocol.connection_made(transport)
        return transport, protocol


def unwind(coroutine: Any) -> None:
    """End a coroutine of a dead process, whatever it awaits on its way out."""
    for _ in range(1000):
        try:
            coroutine.throw(Killed())
        except BaseException:
            return
    raise AssertionError(f"{coroutine} does not end")


NETWORK: dict[tuple[str, int], tuple[Process, Callable[[], Any]]] = {}


class Children:
    """How child processes are started; `boundary` knows."""

    start: Callable[[Process, list[str]], Process]


CHILDREN = Children()


class Listener:
    """A listening socket."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def setblocking(self, on: bool) -> None:
        pass

    def setsockopt(self, level: int, name: int, value: int) -> None:
        pass

    def close(self) -> None:
        NETWORK.pop(self.address, None)


class Link:
    """A connection of a client with the gateway."""

    def __init__(self, kernel: Kernel, address: tuple[str, int], receive: Callable[[bytes], object],
                 lost: Callable[[], object], peer: tuple[str, int]) -> None:  # fmt: skip
        """Raises ConnectionRefusedError. What arrives at the client, which is `peer`, goes to `receive`."""
        found = NETWORK.get(address)
        if found is None or found[0].dead:
            raise ConnectionRefusedError(address)
        self.kernel, self._receive, self._lost, self.peer = kernel, receive, lost, peer
        self.process, make = found
        self.open = True  # for the client
        self.transport = ClientTransport(self)
        self._up: deque[bytes] = deque()
        self._going = self._finishing = False
        self._down_at = 0.0
        self.stalled = False  # the client does not read
        self._held: list[bytes] = []
        self.untaken = 0  # bytes that the client has not read
        self._paused = False
        with kernel.inside(self.process):
            self.protocol = make()
            self.protocol.connection_made(self.transport)
        self.process.loop.kick()
        self.process.at_exit.append(self._process_gone)

    # -- the client's side

    def send(self, data: bytes) -> None:
        if self.open and data:
            self._up.append(data)
            self._go()

    def close(self) -> None:
        """The client, or the network, ends the connection."""
        if self.open:
            self.open = False
            self._up.clear()
            self.close_now()

    def finish(self) -> None:
        """The client ends the connection; what it has sent still arrives."""
        if self.open:
            self.open = False
            if self._up:
                self._finishing = True
            else:
                self.close_now()

    def close_now(self) -> None:
        self.kernel.later(self._delay(), self.process, self._end_at_the_gateway)

    def stall(self, on: bool) -> None:
        """The client stops reading, or goes on."""
        self.stalled = on
        if not on and self._held:
            data = b"".join(self._held)
            self._held.clear()
            self.untaken = 0
            self.down(data)
        if not on and self._paused:
            self._paused = False
            self.kernel.later(self._delay(), self.process, self._resume)

    def _resume(self) -> None:
        if not self.transport.lost and not self._paused:
            self.protocol.resume_writing()

    # -- on the way

    def _delay(self) -> float:
        return self.kernel.random.random() * 400e-6

    def _go(self) -> None:
        if not self._going and self._up and self.transport.reading:
            self._going = True
            self.kernel.later(self._delay(), self.process, self._arrive)

    def _arrive(self) -> None:
        self._going = False
        if self.transport.closed or not self.transport.reading or not self._up:
            return
        random = self.kernel.random
        if random.random() < 0.7:
            data = b"".join(self._up)
            self._up.clear()
        else:
            data = self._up.popleft()
        if len(data) > 1 and random.random() < 0.2:
            cut = random.randrange(1, len(data))
            self._up.appendleft(data[cut:])
            data = data[:cut]
        self.protocol.data_received(data)
        if self._finishing and not self._up:
            self.close_now()
        self._go()

    def down(self, data: bytes) -> None:
        """The gateway has written."""
        if self.stalled:
            self._held.append(data)
            self.untaken += len(data)
            if not self._paused and self.untaken > HIGH_WATER:
                self._paused = True
                self.protocol.pause_writing()
            return
        self._down_at = max(self.kernel.now + self._delay(), self._down_at)
        self.kernel.later(self._down_at - self.kernel.now, None, self._deliver, data)

    def _deliver(self, data: bytes) -> None:
        if self.open:
            self._receive(data)

    def _end_at_the_gateway(self) -> None:
        if not self.transport.lost:
            self.transport.lost = self.transport.closed = True
            self.protocol.connection_lost(None)

    def _process_gone(self) -> None:
        self.transport.lost = self.transport.closed = True
        self.kernel.later(self._delay(), None, self._end_at_the_client)

    def ended_by_gateway(self) -> None:
        """The gateway has closed it: what it wrote before still arrives."""
        self.kernel.later(0.0, self.process, self._end_at_the_gateway)
        at = max(self._down_at - self.kernel.now, 0.0)
        self.kernel.later(at, None, self._end_at_the_client)

    def _end_at_the_client(self) -> None:
        if self.open:
            self.open = False
            self._lost()


class ClientTransport(asyncio.Transport):
    """The gateway's side of a link."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link, self.reading, self.closed, self.lost = link, True, False, False

    def write(self, data: Any) -> None:
        if not self.closed:
            self._link.down(bytes(data))

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._link.ended_by_gateway()

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self._link.untaken

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._link.peer if name == "peername" else default

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
        self._link._go()

    def set_protocol(self, protocol: Any) -> None:
        self._link.protocol = protocol

    def get_protocol(self) -> Any:
        return self._link.protocol


class End:
    """One end of a socket pair; processes share it by reference."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.other: End
        self.buffer = bytearray()
        self.users = 1
        self.eof = False
        self._at = 0.0  # when what was sent last arrives
        self.waiting: Thread | None = None
        self.transport: PairTransport | None = None

    @property
    def ready(self) -> bool:
        """Whether a read does not wait."""
        return bool(self.buffer) or self.eof

    def send(self, data: bytes) -> None:
        if self.other.users <= 0:
            raise BrokenPipeError
        self._at = max(self._at, self.kernel.now + self.kernel.random.random() * 60e-6)
        self.kernel.later(self._at - self.kernel.now, None, self.other.arrive, data)

    def arrive(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.arrive(data)
            return
        self.buffer += data
        self.notify()

    def notify(self) -> None:
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            waiting.wake()

    def leave(self) -> None:
        self.users -= 1
        if self.users == 0:
            self.kernel.later(max(self._at - self.kernel.now, 0.0), None, self.other.hang_up)

    def hang_up(self) -> None:
        self.eof = True
        if self.transport is not None:
            self.transport.hang_up()
        self.notify()


class Socket:
    """A socket of a pair, in one process."""

    by_number: ClassVar[dict[int, Socket]] = {}

    def __init__(self, end: End, process: Process) -> None:
        self.end, self.kernel = end, end.kernel
        self.number = 1_000_000 + next(self.kernel.numbers)
        Socket.by_number[self.number] = self
        self._open = True
        self.process = process
        process.at_exit.append(self.close)

    @classmethod
    def pair(cls, kernel: Kernel) -> tuple[Socket, Socket]:
        one, two = End(kernel), End(kernel)
        one.other, two.other = two, one
        assert kernel.process is not None
        return cls(one, kernel.process), cls(two, kernel.process)

    def fileno(self) -> int:
        return self.number

    def inherited(self, process: Process) -> Socket:
        """The same socket in a child."""
        self.end.users += 1
        return Socket(self.end, process)

    def sendall(self, data: bytes) -> None:
        self.kernel.call("send", self.kernel.random.random() * 20e-6)
        self.end.send(bytes(data))

    def recv(self, size: int) -> bytes:
        self.kernel.call("recv", self.kernel.random.random() * 10e-6)
        while not self.end.buffer and not self.end.eof:
            self.wait(None)
        data = bytes(self.end.buffer[:size])
        del self.end.buffer[:size]
        return data

    def wait(self, seconds: float | None) -> None:
        thread = self.kernel.thread
        assert thread is not None
        self.end.waiting = thread
        thread.wait(seconds)

    def close(self) -> None:
        if self._open:
            self._open = False
            Socket.by_number.pop(self.number, None)
            self.end.leave()

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class EventFd:
    """What `os.eventfd` makes: a number that a thread waits for."""

    by_number: ClassVar[dict[int, EventFd]] = {}

    def __init__(self, kernel: Kernel) -> None:
        self.number, self._count = 1_000_000 + next(kernel.numbers), 0
        self.waiting: Thread | None = None
        EventFd.by_number[self.number] = self
        assert kernel.process is not None
        kernel.process.at_exit.append(lambda: EventFd.by_number.pop(self.number, None))

    @property
    def ready(self) -> bool:
        return self._count > 0

    def write(self, count: int) -> None:
        self._count += count
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            waiting.wake()

    def read(self) -> int:
        assert self._count, "a read would wait"
        count, self._count = self._count, 0
        return count


class Poll:
    """What `select.poll` is on the simulated machine, for sockets and for what `os.eventfd` makes."""

    def __init__(self) -> None:
        self._watched: dict[int, End | EventFd] = {}

    def register(self, what: Socket | int, events: int) -> None:
        if isinstance(what, int):
            self._watched[what] = EventFd.by_number[what]
        else:
            self._watched[what.number] = what.end

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        kernel = kernels.kernel()
        end, thread = kernel.now + milliseconds / 1000, kernel.thread
        assert thread is not None
        while not (ready := [(number, 1) for number, one in self._watched.items() if one.ready]):
            left = end - kernel.now
            if left <= 1e-9:
                break
            for one in self._watched.values():
                one.waiting = thread
            thread.wait(left)
            for one in self._watched.values():
                one.waiting = None
        return ready


class PairTransport(ClientTransport):
    """The event loop's side of a socket pair."""

    def __init__(self, loop: Loop, sock: Socket, protocol: Any) -> None:
        asyncio.Transport.__init__(self)
        self._loop, self._sock, self._protocol = loop, sock, protocol
        self.reading, self.closed, self.lost = True, False, False
        self._waiting: list[bytes] = []
        sock.end.transport = self
        if sock.end.buffer:
            early, sock.end.buffer = bytes(sock.end.buffer), bytearray()
            loop.call_soon(self._receive, early)

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Any) -> None:
        if not self.closed:
            with suppress(BrokenPipeError):
                self._sock.end.send(bytes(data))

    def arrive(self, data: bytes) -> None:
        process = self._loop.process
        if process.dead or self.closed:
            return
        with self._loop.kernel.inside(process):
            self._receive(data)
        self._loop.kick()

    def _receive(self, data: bytes) -> None:
        if self.reading:
            self._protocol.data_received(data)
        else:
            self._waiting.append(data)

    def resume_reading(self) -> None:
        self.reading = True
        while self._waiting and self.reading:
            self._protocol.data_received(self._waiting.pop(0))

    def hang_up(self) -> None:
        process = self._loop.process
        if process.dead or self.lost:
            return
        with self._loop.kernel.inside(process):
            if not self.closed:
                self._protocol.eof_received()
            self._lose()
        self._loop.kick()

    def _lose(self) -> None:
        if not self.lost:
            self.lost = self.closed = True
            self._protocol.connection_lost(None)
            self._sock.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._loop.call_soon(self._lose)

    abort = close

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol


class ProcessTransport(asyncio.SubprocessTransport):
    """A child process, as its parent sees it."""

    def __init__(self, loop: Loop, protocol: Any, child: Process) -> None:
        super().__init__()
        self._loop, self._protocol, self._child = loop, protocol, child
        self._waiters: list[asyncio.Future[int]] = []
        child.at_exit.append(self._ended)
        loop.process.at_exit.append(lambda: child.kernel.kill(child, -9))  # PR_SET_PDEATHSIG

    def get_pid(self) -> int:
        return self._child.pid

    def get_returncode(self) -> int | None:
        return self._child.status if self._child.dead else None

    def get_pipe_transport(self, fd: int) -> None:
        return None

    def kill(self) -> None:
        if self._child.dead:
            raise ProcessLookupError
        self._loop.kernel.later(0.0, None, self._child.kernel.kill, self._child, -9)

    async def _wait(self) -> int:
        if self._child.dead:
            assert self._child.status is not None
            return self._child.status
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        return await waiter

    def _ended(self) -> None:
        if self._loop.process.dead:
            return
        self._loop.kernel.later(50e-6, self._loop.process, self._report)

    def _report(self) -> None:
        self._protocol.process_exited()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(self._child.status)

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self._child.dead
