"""A broker made of bytes, which does on request what no real broker would."""

from __future__ import annotations

import asyncio
import contextlib

from benchmarks.testbed.mqtt import Client, packet, publish


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

    def send(self, topic: str | bytes, payload: bytes, qos: int = 0, packet_id: int = 0) -> None:
        """Deliver a message."""
        assert self._client is not None
        self._client.send(publish(topic, payload, qos, packet_id))

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
        packet_id, kind, rest = body[:2], head & 0xF0, body[2:]
        if kind == 0x10 and not self.silent_to_connects:
            client.send(bytes((0x20, 2, self.session_present, 0)))
        elif kind == 0x30:
            published = client.parse(head, body)
            self.log.append(f"{number} PUBLISH {published.topic} {published.payload.decode()}")
            if published.qos and self.acknowledges:
                client.send(packet(0x40, published.packet_id.to_bytes(2, "big")))
        elif kind == 0x40:
            self.log.append(f"{number} PUBACK {int.from_bytes(packet_id, 'big')}")
        elif kind == 0x80:
            topic_filter = rest[2:-1].decode()  # the bridge sends one at a time
            self.log.append(f"{number} SUBSCRIBE {topic_filter}")
            if topic_filter not in self.silent:
                client.send(packet(0x90, packet_id + bytes((self.refused.get(topic_filter, 1),))))
        elif kind == 0xA0:
            self.log.append(f"{number} UNSUBSCRIBE {rest[2:].decode()}")
            client.send(packet(0xB0, packet_id))
        elif kind == 0xC0:
            client.send(b"\xd0\0")
