"""An MQTT client of raw packets.

`Client` writes and reads packets without a client library, so a test can send what no library would, and sees
exactly what arrives. `connect`, `publish`, `subscribe`, `unsubscribe` and `ack` encode packets.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from bridge.mqtt.wire.packets import V5, V311, packet, string
from bridge.mqtt.wire.properties import Properties, write_properties

DEADLINE = 60.0  # seconds that an answer may take, also on a machine that stands still for a while


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


class WebSocketClient(Client):
    """A connection of raw packets over WebSocket (RFC 6455): one binary frame for what is sent at once.

    The mask of its frames is zero. Frames of the server may be cut anywhere; pings are answered.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(asyncio.StreamReader(), writer)
        self._frames = reader
        self._pump: asyncio.Task[None] | None = None

    async def upgrade(self, port: int) -> None:
        """Open the WebSocket; raises ConnectionError, or asyncio.IncompleteReadError."""
        lines = ["GET /mqtt HTTP/1.1", f"Host: 127.0.0.1:{port}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += ["Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13"]
        lines += ["Sec-WebSocket-Protocol: mqtt", "", ""]
        self.writer.write("\r\n".join(lines).encode())
        answer = await self._frames.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 101 "):
            raise ConnectionError(f"no WebSocket: {answer[:80]!r}")
        self._pump = asyncio.create_task(self._receive_frames())

    def send(self, *packets: bytes) -> None:
        self._send_frame(2, b"".join(packets))

    def _send_frame(self, opcode: int, data: bytes) -> None:
        size = len(data)
        length = bytes((0x80 | size,)) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
        if size > 0xFFFF:
            length = b"\xff" + size.to_bytes(8, "big")
        if not self.writer.transport.is_closing():
            self.writer.write(bytes((0x80 | opcode,)) + length + bytes(4) + data)

    async def _receive_frames(self) -> None:
        try:
            while True:
                head, size = await self._frames.readexactly(2)
                if size >= 126:
                    size = int.from_bytes(await self._frames.readexactly(2 if size == 126 else 8), "big")
                data = await self._frames.readexactly(size)
                if head & 0x0F == 9:
                    self._send_frame(10, data)
                elif head & 0x0F <= 2:
                    self.reader.feed_data(data)
                elif head & 0x0F == 8:
                    break
        except (asyncio.IncompleteReadError, OSError):
            pass
        self.reader.feed_eof()

    def abort(self) -> None:
        super().abort()
        if self._pump is not None:
            self._pump.cancel()


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
