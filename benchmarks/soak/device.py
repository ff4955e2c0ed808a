"""The devices of the soak, all in one process: `python -m benchmarks.soak.device PLAN RESULT SECONDS`.

Each device has a persistent session, publishes at its rate, and follows MQTT. After a lost connection it
sends unacknowledged messages again, in order, with the same packet id and the DUP flag, and PUBREL again for
received ones. A message that MQTT 5 rejects is sent later as a new message. For each device, RESULT has the
number of messages sent and the time of each acknowledgement (PUBACK or PUBREC; ms, 0 for never).
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import sys
import time
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.soak.plan import PASSWORD, USER, Device
from benchmarks.testbed.mqtt import Client, WebSocketClient, ack, connect, publish
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import PUBACK, PUBREC, PUBREL, V5

WINDOW = 20  # messages in flight
PATIENCE = 30.0  # seconds for an acknowledgement, before the device reconnects
SETTLE = 120.0  # seconds that the last acknowledgements may take


class Sending:
    """A message in flight."""

    def __init__(self, number: int) -> None:
        self.number, self.since, self.received = number, time.monotonic(), False


class Simulated:
    """One device at work."""

    def __init__(self, device: Device, port: int, tls: ssl.SSLContext | None, end: float) -> None:
        self.device, self.port, self.tls, self.end = device, port, tls, end
        self.acknowledged: list[int] = []
        self.flight: dict[int, Sending] = {}
        self.again: list[int] = []
        self.ids = cycle(range(1, 65536))
        self.counts = {"connects": 0, "sessions_lost": 0, "refused": 0, "stalls": 0}
        chance = random.Random(device.number)
        self.fill = chance.randbytes(device.size).hex()[: device.size]

    @property
    def done(self) -> bool:
        return time.time() >= self.end and not self.flight and not self.again

    async def run(self) -> None:
        while not self.done and time.time() < self.end + SETTLE:
            with suppress(OSError, TimeoutError, ssl.SSLError, asyncio.IncompleteReadError):
                await self.session()
            await asyncio.sleep(random.uniform(0.1, 1.0))

    async def session(self) -> None:
        """One connection, until it is lost or all is done."""
        kind = WebSocketClient if self.device.link.startswith("ws") else Client
        async with asyncio.timeout(PATIENCE):
            client = kind(*await asyncio.open_connection("127.0.0.1", self.port, ssl=self.tls))
        client.level = self.device.level
        try:
            options: dict[str, Any] = {}
            if self.device.level == V5:
                options["properties"] = {p.SESSION_EXPIRY: 3600}
            if isinstance(client, WebSocketClient):
                async with asyncio.timeout(PATIENCE):
                    await client.upgrade(self.port)
                options |= {"user": USER, "password": PASSWORD.encode()}
            client.send(connect(f"device{self.device.number}", level=client.level, clean=False, **options))
            answer = await client.receive(PATIENCE)
            if answer.head != 0x20 or answer.body[1]:
                raise ConnectionError(f"refused: {answer}")
            self.connected(client, bool(answer.body[0]))
            listening = asyncio.create_task(self.listen(client))
            try:
                await self.produce(client, listening)
            finally:
                listening.cancel()
                await asyncio.wait([listening])
                if not listening.cancelled():
                    listening.exception()  # seen by `produce`, or no matter any more
            client.disconnect()
        finally:
            client.abort()

    def connected(self, client: Client, present: bool) -> None:
        self.counts["connects"] += 1
        if not present and self.counts["connects"] > 1:
            self.counts["sessions_lost"] += 1
        for packet_id, sending in self.flight.items():
            sending.since = time.monotonic()
            if sending.received:
                client.send(ack(PUBREL, packet_id))
            else:
                self.send(client, packet_id, sending.number, dup=True)

    def send(self, client: Client, packet_id: int, number: int, dup: bool = False) -> None:
        device = self.device
        body = b'{"d":%d,"n":%d,"x":"%s"}' % (device.number, number, self.fill.encode())
        client.send(publish(device.topic, body, device.qos, packet_id, dup=dup, level=device.level))

    async def produce(self, client: Client, listening: asyncio.Task[None]) -> None:
        pause = 1 / self.device.rate
        due = time.monotonic() + random.uniform(0, pause)
        while not self.done:
            await asyncio.sleep(min(max(due - time.monotonic(), 0.001), 1.0))
            if listening.done():
                raise ConnectionError("the connection is lost")
            if any(time.monotonic() - one.since > PATIENCE for one in self.flight.values()):
                self.counts["stalls"] += 1
                raise ConnectionError("no acknowledgement")
            if time.monotonic() < due:
                continue
            if len(self.flight) >= WINDOW:
                due = time.monotonic() + 0.05
                continue
            due = max(due + pause, time.monotonic() - 1.0)  # after an outage: catch up by a second at most
            if self.again:
                number = self.again.pop(0)
            elif time.time() < self.end:
                number = len(self.acknowledged)
                self.acknowledged.append(0)
            else:
                due = time.monotonic() + 0.05
                continue
            packet_id = 0
            if self.device.qos:
                packet_id = next(one for one in self.ids if one not in self.flight)
                self.flight[packet_id] = Sending(number)
            self.send(client, packet_id, number)

    async def listen(self, client: Client) -> None:
        while True:
            head, body = await client.receive(3600)
            packet_id = int.from_bytes(body[:2], "big")
            sending = self.flight.get(packet_id)
            if sending is None or head not in (PUBACK, PUBREC, 0x70):
                continue
            if len(body) > 2 and body[2] >= 0x80 and head != 0x70:
                del self.flight[packet_id]
                self.again.append(sending.number)
                self.counts["refused"] += 1
            elif head == PUBREC:
                sending.received, sending.since = True, time.monotonic()
                self.note(sending.number)
                client.send(ack(PUBREL, packet_id))
            else:
                del self.flight[packet_id]
                self.note(sending.number)

    def note(self, number: int) -> None:
        if not self.acknowledged[number]:
            self.acknowledged[number] = int(time.time() * 1000)

    def result(self) -> dict[str, Any]:
        left = len(self.flight) + len(self.again)
        return {**self.device.to_json(), "acknowledged": self.acknowledged, "unfinished": left, **self.counts}


async def main(plan: str, result: str, seconds: str) -> None:
    given = json.loads(Path(plan).read_text())
    tls = ssl.create_default_context(cafile=given["ca"])
    end = time.time() + float(seconds)
    work = []
    for one in given["devices"]:
        device = Device(**one)
        secure = tls if device.link.startswith("tls") else None
        work.append(Simulated(device, given["ports"][device.link], secure, end))
    await asyncio.gather(*(one.run() for one in work))
    Path(result).write_text(json.dumps([one.result() for one in work]))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
