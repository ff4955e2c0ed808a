"""A broker made of bytes, which does on request what no real broker would."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from benchmarks.testbed.mqtt import Client, packet, publish
from bridge.mqtt.wire.packets import V5

_ACKS = {0x40: "PUBACK", 0x50: "PUBREC", 0x60: "PUBREL", 0x70: "PUBCOMP"}


class BrokerOfBytes:
    """Takes one client at a time.

    `log` has the packets that came, in order, each with the number of its connection: "1 SUBSCRIBE a/#".
    """

    def __init__(self) -> None:
        self.port = 0
        self.log: list[str] = []
        self.connections = 0
        self.session_present = False
        self.silent_to_connects = False  # no CONNACK
        self.refused: dict[str, int] = {}  # topic filters, and the code that answers for them
        self.silent: set[str] = set()  # topic filters that are not answered at all
        self.acknowledges = True  # what the client publishes at QoS 1
        self.protocols: list[int] = []  # the protocol byte of each CONNECT
        self.refused_protocols: set[int] = set()  # refused with return code 1
        self.closed_protocols: set[int] = set()  # refused by closing the connection
        self.ignored_protocols: set[int] = set()  # not answered
        self.return_code = self.pings = 0
        self.greeting = b""  # sent before CONNACK
        self.published: list[int] = []  # packet ids of what the client has published
        self.connack_properties = b""  # of MQTT 5
        self.options: list[tuple[str, int]] = []  # filters that were subscribed to, with their options byte
        self._client: Client | None = None
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> BrokerOfBytes:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def send(
        self, topic: str | bytes, payload: bytes, qos: int = 0, packet_id: int = 0, **options: Any
    ) -> None:
        """Deliver a message."""
        assert self._client is not None
        self._client.send(publish(topic, payload, qos, packet_id, level=self._client.level, **options))

    def raw(self, data: bytes) -> None:
        """Send any bytes."""
        assert self._client is not None
        self._client.send(data)

    def cut(self) -> None:
        """End the connection without a word."""
        if self._client is not None:
            self._client.abort()

    def got(self, word: str) -> list[str]:
        """What came with this word in it."""
        return [line for line in self.log if word in line]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number, self._client = self.connections, (client := Client(reader, writer))
        with contextlib.suppress(ConnectionError, TimeoutError):
            while True:
                head, body = await client.receive(60)
                self._answer(client, number, head, body)
        client.abort()

    def _answer(self, client: Client, number: int, head: int, body: bytes) -> None:
        v5 = client.level == V5
        packet_id, kind, rest = body[:2], head & 0xF0, body[2:]
        if kind == 0x10:
            self._connect(client, body)
        elif kind == 0x30:
            published = client.parse(head, body)
            self.published.append(published.packet_id)
            self.log.append(f"{number} PUBLISH {published.topic} {published.payload.decode()}")
            if published.qos and self.acknowledges:
                client.send(packet(0x40, published.packet_id.to_bytes(2, "big")))
        elif kind in _ACKS:
            self.log.append(f"{number} {_ACKS[kind]} {int.from_bytes(packet_id, 'big')}")
        elif kind == 0x80:
            topic_filter = rest[2 + v5 : -1].decode()  # the bridge sends one at a time
            self.log.append(f"{number} SUBSCRIBE {topic_filter}")
            self.options.append((topic_filter, rest[-1]))
            if topic_filter not in self.silent:
                none = b"\0" if v5 else b""
                client.send(packet(0x90, packet_id + none + bytes((self.refused.get(topic_filter, 1),))))
        elif kind == 0xA0:
            self.log.append(f"{number} UNSUBSCRIBE {rest[2 + v5 :].decode()}")
            client.send(packet(0xB0, packet_id + (b"\0\0" if v5 else b"")))
        elif kind == 0xC0:
            self.pings += 1
            client.send(b"\xd0\0")
        elif kind == 0xE0:
            self.log.append(f"{number} DISCONNECT {body[0] if body else 0:#04x}")

    def _connect(self, client: Client, body: bytes) -> None:
        protocol = body[6]
        client.send(self.greeting)
        client.level = protocol & 0x7F
        self.protocols.append(protocol)
        if protocol in self.closed_protocols:
            client.abort()
        elif protocol in self.refused_protocols:
            client.send(b"\x20\x02\x00\x01")
        elif not self.silent_to_connects and protocol not in self.ignored_protocols:
            properties = packet(0, self.connack_properties)[1:] if client.level == V5 else b""
            present = self.session_present and not self.return_code
            client.send(packet(0x20, bytes((present, self.return_code)) + properties))
