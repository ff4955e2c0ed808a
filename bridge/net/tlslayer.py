"""TLS between the transport of a TCP connection and the protocol above it, as a layer of its own.

    event loop's transport <-- bytes --> TlsLayer (OpenSSL, in memory) <-- plain bytes --> protocol

To the transport the layer is the protocol, and to the protocol it is the transport. The protocol gets its
`connection_made` when the socket was accepted, before the handshake: so it counts the connection, and ends it
when nothing comes. docs/adr/0030-tls-is-a-layer.md says why this is not asyncio's TLS, which costs four times
as much, and docs/adr/0033-handshakes-have-a-thread.md why handshakes run in a thread.

What it promises, as asyncio's transports do:
* `data_received` in order and not before the handshake is over, `connection_lost` once, at the end.
* `close` sends what was written and a close_notify, and reads on for a moment: a socket that is closed with
  unread bytes is reset, and the peer would lose our last ones (RFC 9112 section 9.6). `abort` does not.
* OpenSSL sees a ClientHello when all of it is there, and it is of a usual size: OpenSSL reserves what is
  announced, up to 128 KB. So does a second one, after a HelloRetryRequest (RFC 8446 section 4.1.4).
* A peer that ends without a close_notify has ended all the same: MQTT and HTTP know where a message ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol, cast

from bridge.net.fairqueue import FairQueue
from bridge.process import lower_priority

Step = Callable[[], object]
Done = Callable[[BaseException | None], None]

RECORD = 1 << 16  # bytes; a TLS record has at most 2^14 (RFC 8446 section 5.1), so a read takes a whole one
PIECE = 1 << 14  # bytes given to OpenSSL at a time: its buffers stay as large as they once were
EARLY = 1 << 16  # bytes that may wait while a step of the handshake is under way
HELLO, RECORDS = 1 << 14, 8  # the most bytes of a ClientHello, of usually 0.3 to 2 KB, and its records
RETRY = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")  # section 4.1.3
LINGER = 1.0  # seconds of silence after our close_notify until the connection is closed,
LONGEST = 10.0  # and the most that they may take if the peer goes on sending
AT_A_TIME = 32  # handshakes in front of the thread: enough that it need not wait for the event loop
TOGETHER = 0.005  # seconds after which the event loop hears what the thread has done


class Handshakes:
    """The handshakes of a front end: one thread of low priority, and turns by network (`FairQueue`).

    A handshake needs a turn to begin. Once it has begun, it goes on before others begin: so those that hold
    memory are few. The event loop hears of several at once, and handles what their clients send together.
    """

    def __init__(self) -> None:
        self._turns = FairQueue(AT_A_TIME)
        self._steps: SimpleQueue[tuple[Step, Done] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def turn(self, network: str, *, known: bool) -> asyncio.Future[None]:
        """Done when a handshake of this network may begin; `over` ends the turn."""
        return self._turns.ask(network, known=known)

    def over(self) -> None:
        """A turn has ended."""
        self._turns.done()

    def step(self, do: Step, done: Done) -> None:
        """Run a step of a handshake in the thread; then call `done` with what it raised, or None."""
        if self._thread is None:
            loop = asyncio.get_running_loop()
            self._thread = Thread(target=self._run, args=(loop,), name="tls", daemon=True)
            self._thread.start()
        self._steps.put((do, done))

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._steps.put(None)
            self._thread.join()
            self._thread = None

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        lower_priority()
        steps = self._steps
        while (step := steps.get()) is not None:
            results: list[tuple[Done, BaseException | None]] = []
            until = time.monotonic() + TOGETHER
            while step is not None:
                do, done = step
                try:
                    do()
                except Exception as error:  # given to `done`
                    results.append((done, error))
                else:
                    results.append((done, None))
                if steps.empty() or time.monotonic() > until:
                    break
                step = steps.get()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_tell, results)
            if step is None:
                return


def _tell(results: list[tuple[Done, BaseException | None]]) -> None:
    for done, error in results:
        done(error)


class Handshaking(Protocol):
    """What a front end knows of a connection in its handshake, and wants to know."""

    def turn(self) -> tuple[str, bool]:
        """Its network, and whether that is known (see `FairQueue`)."""

    def begins(self) -> None:
        """OpenSSL takes memory for it now; may end the connection."""

    def made(self) -> None:
        """The handshake is over."""

    def failed(self, error: OSError) -> None:
        """It has failed, as an ssl.SSLError says, or the peer has gone; the layer closes the connection."""


def hello_is_whole(data: bytes | bytearray) -> bool | None:
    """Whether OpenSSL may see this: a whole ClientHello, or what is none, so that it says why.

    None: more must come. False: it is too large.
    """
    message, at = bytearray(), 0
    for _ in range(RECORDS):
        if data[at : at + 1] not in (b"", b"\x14", b"\x16"):  # change_cipher_spec may stand before it
            return True
        if len(data) - at < 5:
            return None
        end = at + 5 + (data[at + 3] << 8 | data[at + 4])
        if data[at] == 0x16:
            message += data[at + 5 : end]
        if len(message) >= 4:
            if message[0] != 1:
                return True
            size = int.from_bytes(message[1:4])
            if size > HELLO or len(message) >= 4 + size:
                return size <= HELLO
        at = end
    return None if at > len(data) else False


class TlsLayer(asyncio.Transport, asyncio.Protocol):
    """The server's side of one TLS connection."""

    __slots__ = (
        "_begun", "_busy", "_closing", "_context", "_early", "_ended", "_handshakes", "_handshaking",
        "_heard", "_held", "_hello_due", "_incoming", "_linger", "_lost", "_open", "_outgoing", "_protocol",
        "_read", "_ssl", "_transport", "_turn", "_until", "_write",
    )  # fmt: skip

    def __init__(
        self,
        context: ssl.SSLContext,
        protocol: asyncio.Protocol,
        handshakes: Handshakes,
        handshaking: Handshaking,
    ) -> None:
        super().__init__()
        self._context, self._protocol = context, protocol
        self._handshakes, self._handshaking = handshakes, handshaking
        self._transport: asyncio.Transport
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl: ssl.SSLObject | None = None
        self._early = bytearray()  # read, but OpenSSL is busy or has no turn yet
        self._hello_due = True  # what comes next is a ClientHello
        self._begun = False  # the handshake: something was answered
        self._busy = False  # a step of it waits or is under way
        self._open = False  # it is over
        self._ended = False  # the peer has sent its FIN
        self._closing = False
        self._held = False  # the protocol does not want to read
        self._lost: tuple[Exception | None] | None = None  # the connection, before a step was over
        self._turn: asyncio.Future[None] | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._heard, self._until = False, 0.0  # after our close_notify: whether the peer still sends

    # -- the handshake ------------------------------------------------------------

    def _shake(self) -> None:
        """Something has come: go on, or wait for the turn to begin."""
        if self._hello_due:
            if (whole := hello_is_whole(self._early)) is None:
                if self._ended:
                    self._transport.close()
                return
            if not whole:
                error = ssl.SSLError(1, "the ClientHello is too large")
                error.reason = "CLIENT_HELLO_TOO_LARGE"  # as OpenSSL's errors have one
                self._give_up(error)
                self.close()
                return
            self._hello_due = False
        self._busy = True
        if self._begun:
            self._step()
            return
        network, known = self._handshaking.turn()
        self._turn = self._handshakes.turn(network, known=known)
        self._turn.add_done_callback(self._granted)

    def _granted(self, turn: asyncio.Future[None]) -> None:
        if turn.cancelled():
            return
        if not self._closing and self._ssl is None:
            self._ssl = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
            self._read, self._write = self._ssl.read, self._ssl.write
            self._handshaking.begins()
        if self._closing:
            self._yield_turn()
        else:
            self._step()

    def _step(self) -> None:
        assert self._ssl is not None
        self._take_early()
        self._handshakes.step(self._ssl.do_handshake, self._stepped)

    def _take_early(self) -> None:
        self._incoming.write(self._early)
        if len(self._early) > EARLY and not self._held:
            self._transport.resume_reading()
        self._early.clear()

    def _stepped(self, error: BaseException | None) -> None:
        self._busy = False
        self._yield_turn()
        if self._lost is not None:
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLWantReadError):
                self._give_up(error)
                self._closing = True
            self._lose(*self._lost)
            return
        if self._closing:
            return
        if answer := self._outgoing.read():
            self._begun = True
            self._hello_due = RETRY in answer
            self._transport.write(answer)
        if error is None:
            self._open = True
            self._handshaking.made()
            self._take_early()
            if self._incoming.pending and not self._closing:
                self.data_received(b"")
            if self._ended:
                self._protocol.eof_received()
                self.close()
        elif isinstance(error, ssl.SSLWantReadError):
            if self._early:
                self._shake()
            elif self._ended:
                self._transport.close()
        else:
            assert isinstance(error, OSError), error
            self._give_up(error)
            self.close()

    def _give_up(self, error: OSError) -> None:
        if not self._closing:
            self._handshaking.failed(error)

    def _yield_turn(self) -> None:
        if self._turn is not None:
            self._turn = None
            self._handshakes.over()

    # -- as the protocol of the TCP connection ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._protocol.connection_made(self)

    def data_received(self, data: bytes) -> None:
        if not self._open:
            if self._closing:
                self._heard = True
            else:
                self._early += data
                if not self._busy:
                    self._shake()
                elif len(self._early) > EARLY:
                    self._transport.pause_reading()
            return
        incoming = self._incoming
        try:
            if len(data) > PIECE:
                plain = self._long(data)
            else:
                incoming.write(data)
                plain = self._read(RECORD)
                if incoming.pending and plain:
                    plain += self._more()
        except ssl.SSLWantReadError:  # a part of a record, or one without data
            return
        except ssl.SSLError:
            self._transport.write(self._outgoing.read())  # the alert that says why
            self.close()
            return
        if plain:
            self._protocol.data_received(plain)
        else:
            self._protocol.eof_received()
            self.close()

    def _long(self, data: bytes) -> bytes:
        """The plain text of more than a piece. Raises ssl.SSLWantReadError if there is none."""
        plain = bytearray()
        with memoryview(data) as view:
            for at in range(0, len(data), PIECE):
                self._incoming.write(view[at : at + PIECE])
                plain += self._more()
        if not plain:
            plain += self._read(RECORD)
        return bytes(plain)

    def _more(self) -> bytes:
        """What is there of further records; an error or an end comes with the next read."""
        records = []
        with contextlib.suppress(ssl.SSLError):
            while self._incoming.pending and (data := self._read(RECORD)):
                records.append(data)
        return b"".join(records)

    def eof_received(self) -> bool:
        self._ended = True
        if self._open:
            self._protocol.eof_received()
        return self._busy and self._begun  # it may have said why it goes: the handshake looks at that first

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._busy and self._begun:
            self._lost = (exc,)  # it may have said why: the handshake looks at that first
        else:
            self._lose(exc)

    def _lose(self, exc: Exception | None) -> None:
        if not self._open:
            self._give_up(exc if isinstance(exc, OSError) else ConnectionResetError())
        self._end()
        if self._linger is not None:
            self._linger.cancel()
        self._protocol.connection_lost(exc)
        # The layer and its protocol refer to each other, so what OpenSSL holds, 50 KB in a handshake, would
        # stay until Python looks for such cycles. It counts objects, not bytes: a flood is faster.
        if self._ssl is not None:
            self._ssl = None
            del self._read, self._write
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()

    # -- as the transport of the protocol ------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        if not self._open or not data:  # nobody has anything to say before the handshake
            return
        if len(data) <= PIECE:
            self._write(data)
            self._transport.write(self._outgoing.read())
            return
        records = []
        with memoryview(data) as view:
            for at in range(0, len(data), PIECE):
                self._write(view[at : at + PIECE])
                records.append(self._outgoing.read())
        self._transport.write(b"".join(records))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self._held = True
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._held = False
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        if self._closing:
            return
        if self._open and self._ssl is not None:
            with contextlib.suppress(ssl.SSLError):  # sent, but the peer's is not there yet, or data is
                self._ssl.unwrap()
            self._transport.write(self._outgoing.read())
        self._end()
        if not self._begun or self._transport.is_closing():
            self._transport.abort()
            return
        if self._ended:
            self._transport.close()
            return
        with contextlib.suppress(OSError, RuntimeError):  # the peer has gone
            self._transport.write_eof()
            self._transport.resume_reading()
        self._until = asyncio.get_running_loop().time() + LONGEST
        self._linger = asyncio.get_running_loop().call_later(LINGER, self._silent)

    def abort(self) -> None:
        self._end()
        self._transport.abort()

    def _end(self) -> None:
        self._open, self._closing = False, True
        self._early.clear()
        if self._turn is not None and not self._turn.done():
            self._turn.cancel()
            self._turn = None

    def _silent(self) -> None:
        """The peer had its time; what it has not taken yet is the protocol's to give up."""
        heard, self._heard = self._heard, False
        heard = heard and asyncio.get_running_loop().time() < self._until
        if heard or self._transport.get_write_buffer_size():
            self._linger = asyncio.get_running_loop().call_later(LINGER, self._silent)
        else:
            self._transport.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._ssl
        return self._transport.get_extra_info(name, default)
