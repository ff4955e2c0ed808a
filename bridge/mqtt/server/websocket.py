"""MQTT over WebSocket (MQTT section 6, RFC 6455): a transport between a socket and a `Connection`.

States: HTTP request --101--> frames --close frame or error--> closed. The MQTT packets are one stream of
bytes, and the borders of frames mean nothing. The payload in each read is passed on at once. So a client
cannot make us reserve memory by announcing a length, and tiny frames cost little. If a read has more than
`MANY` frames, later turns handle the rest.

A web page acts with the place in the network and the certificate of its browser. Where these alone let a
client in, only pages whose origin the listener names come in (`may_come_from`); Host proves nothing. A
refused request gets a body that says why. So does the log, and `refused_websocket` counts it.

No library, because a frame and its answer cost 2 us here, 5 us with the sans-I/O core of websockets and 14.5
us with wsproto.

Layout of a frame from a client (always masked, RFC 6455 section 5.2):

    | fin, rsv 3 bit, opcode 4 bit | 1, length 7 bit | 16 or 64 bit of length | mask 32 bit | payload |
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from bridge.mqtt.settings import origin_of
from bridge.mqtt.wire.packets import PACKET_TOO_LARGE
from bridge.net.addresses import is_loopback
from bridge.net.flow import QUIET

if TYPE_CHECKING:
    from bridge.mqtt.server.connection import Connection
    from bridge.mqtt.server.connections import Endpoint

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455 section 1.3
MAX_REQUEST = 8 * 1024
BAD = "400 Bad Request"
SUBPROTOCOLS = ("mqtt", "mqttv3.1")  # the second one is what clients of MQTT 3.1 offer
MANY = 1_000  # frames
CONTINUATION, BINARY, CLOSE, PING, PONG = 0, 2, 8, 9, 10
NORMAL, WRONG, UNACCEPTABLE, TOO_BIG = 1000, 1002, 1003, 1009  # close codes (section 7.4.1)
MAX_FRAME = 0xFFF_FFFF + 5  # bytes; the largest MQTT packet, whatever `max_packet` is


class WebSocket(asyncio.Protocol):
    """The server's side of one WebSocket: the protocol of a socket, and the transport of a `Connection`."""

    def __init__(self, inner: Connection) -> None:
        self._inner = inner
        self._transport: asyncio.Transport
        self._unread = b""
        self._open = self._closing = False
        self._over = False  # FIN was sent
        self._left = self._done = 0  # payload bytes of the current data frame: to come, and passed on
        self._mask = b"\0\0\0\0"
        self._begun = False  # whether the last frame of a message is still to come
        self._held = self._later = (
            False  # reading is paused: by the connection; because the rest of a read waits
        )

    # -- the protocol of the socket ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # At once, so that limits and the time-out apply to the HTTP request too.
        self._inner.connection_made(cast("asyncio.Transport", self))

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def eof_received(self) -> bool:
        return False

    def data_received(self, data: bytes) -> None:
        if self._over:
            self._inner.data_received(b"")  # the end goes on as long as the client sends
        if self._closing or self._over:
            return
        if not self._open:
            data, self._unread = self._unread + data, b""
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if not data[:1].isalpha():
                    self._refuse(BAD, "it is no HTTP request; this listener takes MQTT over WebSocket")
                elif len(data) > MAX_REQUEST:
                    why = f"the request has more than {MAX_REQUEST} bytes"
                    self._refuse("431 Request Header Fields Too Large", why)
                else:
                    self._unread = data
                    self._inner.wait_with(len(data))
                return
            self._inner.wait_with(0)
            if not self._upgrade(data[:end]):
                return
            data = data[end + 4 :]
        self._unread += data
        if not self._later:
            self._go_on()

    def _go_on(self) -> None:
        """Handle the frames that were read."""
        was_later, self._later = self._later, False
        if self._closing:
            return
        data, self._unread = self._unread, b""
        self._unread = data[self._frames(data) :]
        if was_later and not (self._later or self._held or self.is_closing()):
            self._transport.resume_reading()

    # -- the transport of the connection ------------------------------------------------------------

    def write(self, data: bytes | bytearray) -> None:
        """Send bytes as one binary frame."""
        self._transport.writelines((_frame_header(BINARY, len(data)), data))

    def close(self) -> None:
        """Send a close frame and close."""
        self._end(TOO_BIG if self._inner.reason == PACKET_TOO_LARGE else NORMAL)

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def write_eof(self) -> None:
        """Send a close frame and FIN. What comes after that is discarded, frames or not."""
        self._say_why(TOO_BIG if self._inner.reason == PACKET_TOO_LARGE else NORMAL)
        self._over = True
        self._transport.write_eof()

    def pause_reading(self) -> None:
        self._held = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._held = False
        if not self._later:
            self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    # -- the rules ------------------------------------------------------------

    def _upgrade(self, request: bytes) -> bool:
        """Answer the HTTP request (RFC 6455 section 4.2). Returns whether the WebSocket is open."""
        first, *lines = request.decode("latin-1").split("\r\n")
        fields: dict[str, str] = {}
        for name, _, value in (line.partition(":") for line in lines):
            key, text = name.strip().lower(), value.strip()
            fields[key] = f"{fields[key]}, {text}" if key in fields else text
        offered = [name.strip() for name in fields.get("sec-websocket-protocol", "").split(",")]
        chosen = next((name for name in SUBPROTOCOLS if name in offered), "")
        key = fields.get("sec-websocket-key", "")
        method, _, version = first.partition(" ")
        if method != "GET" or not version.endswith("HTTP/1.1"):
            return self._refuse(BAD, "it is no GET request of HTTP/1.1")
        if not fields.get("authorization", "").isascii():
            return self._refuse(BAD, "its Authorization is not ASCII")
        if "websocket" not in fields.get("upgrade", "").lower():
            return self._refuse(BAD, "it does not ask for a WebSocket: `Upgrade: websocket` is missing")
        if fields.get("sec-websocket-version") != "13" or not key:
            why = "Sec-WebSocket-Version is not 13, or Sec-WebSocket-Key is missing"
            return self._refuse("426 Upgrade Required", why, "Sec-WebSocket-Version: 13\r\n")
        if not chosen:  # MQTT-6.0.0-3
            return self._refuse(BAD, f"Sec-WebSocket-Protocol offers none of {' and '.join(SUBPROTOCOLS)}")
        origin = fields.get("origin")
        if origin is not None and not may_come_from(origin, self._inner.endpoint):
            why = f"pages of {origin[:200]!r} may not come in here; add that to `origins` of the listener"
            return self._refuse("403 Forbidden", why)
        accept = base64.b64encode(hashlib.sha1(key.encode() + _GUID, usedforsecurity=False).digest()).decode()
        self._transport.write(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept}\r\nSec-WebSocket-Protocol: {chosen}\r\n\r\n".encode()
        )
        self._open = True
        return True

    def _refuse(self, status: str, why: str, more: str = "") -> bool:
        """Answer the request, and close once the client has the answer: what it still sends is discarded."""
        body = f"{status}: {why}\n".encode()
        self._transport.write(
            f"HTTP/1.1 {status}\r\n{more}Content-Type: text/plain; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        self._closing = True
        self._inner.end("refused_websocket", f"no WebSocket: {why}")
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._inner.connections.runtime.later(QUIET, self._transport.close)
        else:
            self._transport.close()
        return False

    def _frames(self, data: bytes) -> int:
        """Pass on the payload of data frames and answer control frames. Returns the bytes that were used."""
        payload = bytearray()
        used, end = self._unframed(data, payload)
        if payload:
            self._inner.data_received(bytes(payload))
        if end:
            self._end(end)
        return used

    def _unframed(self, data: bytes, payload: bytearray) -> tuple[int, int]:
        """Put the payload of data frames into `payload`.

        Returns the number of bytes used, and the code to close with; 0: stay open.
        """
        pos, size, count = 0, len(data), 0
        while True:
            if self._left:
                piece = data[pos : pos + self._left]
                if not piece:
                    return pos, 0
                pos += len(piece)
                self._left -= len(piece)
                turn = self._done % 4
                self._done += len(piece)
                payload += _unmask(piece, self._mask[turn:] + self._mask[:turn])
                continue
            if size - pos < 2:
                return pos, 0
            count += 1
            if count > MANY:
                self._later = True
                self._transport.pause_reading()
                self._inner.connections.runtime.soon(self._go_on)
                return pos, 0
            head, length = data[pos], data[pos + 1]
            opcode, at = head & 0x0F, pos + 2
            if head & 0x70 or not length & 0x80:
                return size, WRONG
            length &= 0x7F
            wide = 2 if length == 126 else 8 if length == 127 else 0
            if size < at + wide + 4:
                return pos, 0
            if wide:
                length = int.from_bytes(data[at : at + wide], "big")
            at += wide + 4
            mask = data[at - 4 : at]
            if opcode == (CONTINUATION if self._begun else BINARY):  # section 5.4
                if length > MAX_FRAME:
                    return size, TOO_BIG
                self._begun = head < 0x80
                self._mask, self._left, self._done, pos = mask, length, 0, at
            elif opcode in (CLOSE, PING, PONG) and length < 126 and head & 0x80:
                if size < at + length:
                    return pos, 0
                pos = at + length
                if opcode == CLOSE:
                    return size, NORMAL
                if opcode == PING:
                    self._transport.write(_frame_header(PONG, length) + _unmask(data[at:pos], mask))
            else:
                return size, UNACCEPTABLE if opcode == 1 else WRONG

    def _end(self, code: int) -> None:
        if not self.is_closing():
            self._say_why(code)
            self._closing = True
            self._transport.close()

    def _say_why(self, code: int) -> None:
        if self._open and not self._over:
            self._transport.write(_frame_header(CLOSE, 2) + code.to_bytes(2, "big"))


def _frame_header(opcode: int, length: int) -> bytes:
    if length < 126:
        return bytes((0x80 | opcode, length))
    if length < 65_536:
        return bytes((0x80 | opcode, 126)) + length.to_bytes(2, "big")
    return bytes((0x80 | opcode, 127)) + length.to_bytes(8, "big")


def _unmask(data: bytes, mask: bytes) -> bytes:
    """XOR with the repeated mask (section 5.3). One long integer is faster than a loop in Python."""
    size = len(data)
    key = int.from_bytes((mask * (size // 4 + 1))[:size], "big")
    return (int.from_bytes(data, "big") ^ key).to_bytes(size, "big")


def may_come_from(origin: str, endpoint: Endpoint) -> bool:
    """Return whether web pages of an origin may use an endpoint. A page that hides its origin has `null`."""
    named = endpoint.listener.settings.origins
    try:
        found = origin_of(origin)
    except ValueError:
        return False
    if named is not None:
        return found in named
    if endpoint.loopback:  # a foreign page in a browser on this machine is not a local client
        return is_loopback((urlsplit(found).hostname or "").strip("[]"))
    anonymous = endpoint.listener.access.refuse_anonymous(loopback=False) is None
    return not (anonymous or endpoint.client_certificates)
