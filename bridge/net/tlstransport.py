"""TLS on a socket that the event loop watches: a transport, from the handshake to the last byte.

asyncio and uvloop decrypt in memory: bytes go from the socket into a buffer, through OpenSSL into another
one, and then to the protocol, and the way back is as long. That costs three times as much as the cipher and
the system calls (docs/adr/0030-tls-on-the-socket.md). Here OpenSSL reads and writes the socket itself.

What it promises, as asyncio's transports do:
* `connection_made` when the handshake is over, `data_received` in order, `connection_lost` once, at the end.
* `write` keeps what the socket does not take, and tells the protocol to pause above `HIGH` bytes.
* `close` sends what was written and a close_notify, and reads on for a moment: a socket that is closed with
  unread bytes is reset, and the peer would lose our last ones (RFC 9112 section 9.6). `abort` does not.
* A peer that ends without a close_notify has ended all the same: MQTT and HTTP know where a message ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Any

RECORD = 1 << 16  # bytes; a TLS record has at most 2^14 (RFC 8446 section 5.1), so a read takes a whole one
RECORDS = 32  # read in one turn of the event loop
SELDOM = 16  # reads after which it is tried again whether the peer sends several records at a time
HIGH, LOW = 1 << 16, 1 << 14  # bytes that wait to be sent: when the protocol pauses, and when it goes on
LINGER = 1.0  # seconds for the peer to close after our close_notify


class TlsTransport(asyncio.Transport):
    """The server's side of one TLS connection. `accept_tls` makes it."""

    def __init__(self, sock: ssl.SSLSocket, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._sock, self._fd, self._protocol = sock, sock.fileno(), protocol
        self._peer = sock.getpeername()
        self._unsent = bytearray()
        self._made = self._reading = self._paused = self._closing = self._over = False
        self._stalled = False  # a read has to write first, and the socket takes nothing
        self._interval, self._until_next = 1, 1  # of reads: when a second record is looked for
        self._linger: asyncio.TimerHandle | None = None

    # -- the handshake ------------------------------------------------------------

    async def shake_hands(self, timeout: float) -> None:
        """Do the handshake, then tell the protocol. Raises as `accept_tls`."""
        done: asyncio.Future[None] = self._loop.create_future()
        timer = self._loop.call_later(timeout, self._too_slow, done)
        try:
            self._handshake(done)
            await done
        except BaseException:
            if self._made:  # the caller is cancelled in the same turn of the event loop
                self.abort()
            else:
                self._forget()
                self._give_up()
            raise
        finally:
            timer.cancel()

    def _handshake(self, done: asyncio.Future[None]) -> None:
        if done.done():
            return
        try:
            self._sock.do_handshake()
        except ssl.SSLWantReadError:
            self._loop.remove_writer(self._fd)
            self._loop.add_reader(self._fd, self._handshake, done)
        except ssl.SSLWantWriteError:
            self._loop.remove_reader(self._fd)
            self._loop.add_writer(self._fd, self._handshake, done)
        except OSError as error:  # also ssl.SSLError
            self._forget()
            done.set_exception(error)
        else:
            self._loop.remove_writer(self._fd)
            self._made = True
            done.set_result(None)
            self._protocol.connection_made(self)
            self.resume_reading()

    def _give_up(self) -> None:
        """Close without having read all, and still let the peer have the alert that says why."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            socket.socket.recv(self._sock, RECORD)
        self._sock.close()

    def _too_slow(self, done: asyncio.Future[None]) -> None:
        if not done.done():
            done.set_exception(ConnectionAbortedError("no complete TLS handshake in time"))

    # -- reading ------------------------------------------------------------

    def pause_reading(self) -> None:
        if self._reading and not self._closing:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def resume_reading(self) -> None:
        if not self._reading and not self._closing:
            self._reading = True
            self._loop.add_reader(self._fd, self._read)

    def _read(self) -> None:
        """The socket is readable: take a record, or several if the peer sends several at a time.

        To look for another one and not to find it costs as much as a record. So after a vain look that is
        tried again later and later.
        """
        try:
            data = self._sock.recv(RECORD)
            self._until_next -= 1
            if data and self._until_next <= 0:
                data = self._more(data)
        except ssl.SSLWantReadError:
            return  # a part of a record, or one without data
        except ssl.SSLWantWriteError:
            self._stalled = True
            self._loop.remove_reader(self._fd)
            self._loop.add_writer(self._fd, self._writable)
            return
        except OSError as error:
            self._lost(error)
            return
        try:
            if data:
                self._protocol.data_received(data)
            else:
                self._loop.remove_reader(self._fd)
                self._reading = False
                self._protocol.eof_received()
                self.close()
        except BaseException:
            self.abort()
            raise

    def _more(self, data: bytes) -> bytes:
        """What follows a record that was read, if it is there already."""
        records = [data]
        try:
            while len(records) < RECORDS and data:
                data = self._sock.recv(RECORD)
                records.append(data)
        except OSError:
            pass  # nothing more, or an error that the next read has too
        self._interval = 1 if len(records) > 1 else min(self._interval * 2, SELDOM)
        self._until_next = self._interval
        return b"".join(records)

    # -- writing ------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        if self._closing or not data:
            return
        if not self._unsent:
            try:
                sent = self._sock.send(data)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                sent = 0
            except OSError as error:
                self._lost(error)
                return
            if sent == len(data):
                return
            data = memoryview(data)[sent:]
            self._loop.add_writer(self._fd, self._writable)
        self._unsent += data
        if len(self._unsent) > HIGH and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def _writable(self) -> None:
        """The socket takes more, or a read that had to write first can go on."""
        if self._stalled:
            self._stalled = False
            if self._reading:
                self._loop.add_reader(self._fd, self._read)
        try:
            while self._unsent:
                with memoryview(self._unsent) as view:
                    sent = self._sock.send(view)  # what did not go out comes again, at least as long
                del self._unsent[:sent]
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError as error:
            self._lost(error)
            return
        if not self._unsent:
            self._loop.remove_writer(self._fd)
        if self._paused and len(self._unsent) <= LOW:
            self._paused = False
            self._protocol.resume_writing()
        if self._closing and not self._unsent:
            self._say_goodbye()

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def can_write_eof(self) -> bool:
        return False

    # -- the end ------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._reading:
            self._loop.remove_reader(self._fd)
        if not self._unsent:
            self._say_goodbye()

    def abort(self) -> None:
        self._lost(None)

    def _say_goodbye(self) -> None:
        """Everything is sent: close_notify and FIN, then discard what still comes until the peer closes."""
        if self._over or self._linger is not None:
            return
        try:
            with contextlib.suppress(ssl.SSLError):  # sent, but the peer's is not there yet, or data is
                self._sock.unwrap()
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:  # the peer has gone
            self._lost(None)
            return
        self._linger = self._loop.call_later(LINGER, self._lost, None)
        self._loop.add_reader(self._fd, self._discard)

    def _discard(self) -> None:
        try:
            if not socket.socket.recv(self._sock, RECORD):
                self._lost(None)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._lost(None)

    def _lost(self, error: Exception | None) -> None:
        if self._over:
            return
        self._over = self._closing = True
        self._forget()
        self._unsent.clear()
        self._loop.call_soon(self._end, error)

    def _end(self, error: Exception | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._sock.close()

    def _forget(self) -> None:
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        if self._linger is not None:
            self._linger.cancel()

    # -- what is known of it ------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        match name:
            case "socket" | "ssl_object":
                return self._sock
            case "peername":
                return self._peer
            case _:
                return default


async def accept_tls(
    sock: socket.socket, context: ssl.SSLContext, protocol: asyncio.Protocol, timeout: float
) -> None:
    """Do the handshake on an accepted socket that does not block, and hand it to the protocol.

    The socket is closed if that fails. Raises ssl.SSLError, OSError, and after `timeout` seconds
    ConnectionAbortedError.
    """
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        secure = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    except BaseException:
        sock.close()
        raise
    await TlsTransport(secure, protocol).shake_hands(timeout)
