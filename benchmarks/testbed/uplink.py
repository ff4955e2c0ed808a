"""A broker made of bytes for one that only publishes: it answers what a test asks for.

It has threads of its own, for clients that block.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from bridge.mqtt.wire.packets import packet
from bridge.mqtt.wire.properties import Properties, read_properties, write_properties


class Published(NamedTuple):
    """A PUBLISH that came; `connection` is its number, from 1."""

    connection: int
    topic: str
    payload: bytes
    qos: int
    retain: bool
    dup: bool
    packet_id: int
    properties: Properties
    size: int


class Answering:
    """The broker. Change its attributes at any time."""

    def __init__(self, port: int = 0) -> None:
        self.published: list[Published] = []
        self.connects: list[dict[str, Any]] = []  # `texts`: client id, user, password
        self.connack: tuple[int, Properties] = (0, {})
        self.code: Callable[[Published], int | None] = lambda message: 0  # of PUBACK; None: no answer
        self.hang_up: Callable[[Published], int | None] = lambda message: None  # code of DISCONNECT; -1: none
        self.nonsense = b""  # is sent instead of any PUBACK
        self.hold = 1  # PUBACKs are sent so many at a time
        self.too_many = False  # more messages came before they were
        self.pings = self.farewells = 0
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    @property
    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.published]

    def close(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                self._threads.append(threading.Thread(target=self._serve, args=(client,)))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        number, v5, held = 0, False, list[bytes]()
        with suppress(OSError, IndexError), client:
            while True:
                head = client.recv(1)[0]
                length = shift = 0
                while (byte := client.recv(1)[0]) & 0x80:
                    length, shift = length | (byte & 0x7F) << shift, shift + 7
                length |= byte << shift
                body = _exactly(client, length)
                kind = head & 0xF0
                if kind == 0x10:
                    v5 = body[6] == 5
                    number = self._connected(client, body, v5)
                elif kind == 0x30:
                    message = _published(number, head, body, v5)
                    self.published.append(message)
                    if (ending := self.hang_up(message)) is not None:
                        client.sendall(packet(0xE0, bytes((ending, 0))) if ending >= 0 else b"")
                        return
                    if self.nonsense:
                        client.sendall(self.nonsense)
                        continue
                    code = self.code(message)
                    if message.qos and code is not None:
                        rest = bytes((code, 0)) if v5 and code else b""
                        held.append(packet(0x40, message.packet_id.to_bytes(2, "big") + rest))
                    if len(held) >= self.hold:
                        self.too_many |= self.hold > 1 and bool(select.select([client], [], [], 0.1)[0])
                        client.sendall(b"".join(held))
                        held.clear()
                elif kind == 0xA0:
                    client.sendall(packet(0xB0, body[:2] + (b"\0\x11" if v5 else b"")))
                elif kind == 0xC0:
                    self.pings += 1
                    client.sendall(b"\xd0\0")
                elif kind == 0xE0:
                    self.farewells += 1
                    return

    def _connected(self, client: socket.socket, body: bytes, v5: bool) -> int:
        flags, keep_alive = body[7], int.from_bytes(body[8:10], "big")
        rest = body[10:]
        if v5:
            rest = rest[1 + rest[0] :]
        texts = []
        while rest:
            size = int.from_bytes(rest[:2], "big")
            texts.append(rest[2 : 2 + size].decode())
            rest = rest[2 + size :]
        self.connects.append({"v5": v5, "clean": bool(flags & 2), "keep_alive": keep_alive, "texts": texts})
        code, properties = self.connack
        client.sendall(packet(0x20, bytes((0, code)) + (write_properties(properties) if v5 else b"")))
        return len(self.connects)


def _exactly(client: socket.socket, size: int) -> bytes:
    """So many bytes; MSG_WAITALL gives fewer when the process is stopped meanwhile. IndexError at the end."""
    data = bytearray()
    while len(data) < size:
        more = client.recv(size - len(data))
        if not more:
            raise IndexError("the connection has ended within a packet")
        data += more
    return bytes(data)


def _published(number: int, head: int, body: bytes, v5: bool) -> Published:
    end = 2 + int.from_bytes(body[:2], "big")
    topic, qos, packet_id = body[2:end].decode(), head >> 1 & 3, 0
    properties: Properties = {}
    if qos:
        packet_id, end = int.from_bytes(body[end : end + 2], "big"), end + 2
    if v5:
        properties, end = read_properties(body, end, len(body), 0x30)
    size = len(packet(0x30, body))
    return Published(
        number, topic, body[end:], qos, bool(head & 1), bool(head & 8), packet_id, properties, size
    )
