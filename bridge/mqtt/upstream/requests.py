"""Requests over an external broker: operations on streams for its clients.

The requests of all devices share one connection with their messages, and do not block them. The number of
requests in progress is bounded; a request counts until the broker's PUBACK for its reply, and one too many is
refused at once. The caller is the client in the topic of the request: the rules of that broker must ensure
that it is.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from bridge.audit import Origin
from bridge.mqtt.wire import properties as p
from bridge.operations.codec import answer, refusal
from bridge.topics import REQUEST_LEVEL

if TYPE_CHECKING:
    from collections import Counter

    from bridge.access.logins import Access
    from bridge.access.rules import Identity
    from bridge.mqtt.settings import ExternalSettings
    from bridge.mqtt.upstream.client import Client
    from bridge.mqtt.wire.packets import Publish
    from bridge.operations.catalog import Operations

log = logging.getLogger(__name__)

REQUEST_ROOM = 8 * 1024 * 1024  # bytes of requests in progress, each with this many for its processing:
REQUEST_COST = 32 * 1024
AROUND = 64  # more than what a PUBLISH has besides topic, payload and correlation data


class Requests:
    """The requests of one broker's clients. Must be used in the event loop's thread."""

    def __init__(
        self, settings: ExternalSettings, operations: Operations, access: Access, max_packet: int
    ) -> None:
        self._settings, self._operations, self._access = settings, operations, access
        self._max_packet = self._largest = max_packet
        self._client: Client
        self._counts: Counter[str]
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[asyncio.Task[None], int] = {}  # the requests in progress, with their bytes
        self._replies: dict[int, asyncio.Future[None]] = {}  # by packet id: replies without a PUBACK

    def attach(self, client: Client, counts: Counter[str]) -> None:
        """Reply through this client."""
        self._client, self._counts = client, counts

    def connected(self, largest: int | None) -> None:
        """Send no packet of more bytes on a new connection; None: the broker has set no limit."""
        self._largest = self._max_packet if largest is None else min(largest, self._max_packet)

    async def stop(self) -> None:
        """Cancel the requests in progress."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def take(self, packet: Publish) -> None:
        """Carry out a request, and reply to it."""
        topic, body, asked = packet.topic.decode(), packet.payload, packet.properties or {}
        level, _, operation = topic.removeprefix(f"{REQUEST_LEVEL}/").partition("/")
        default = f"{topic}/reply"
        reply_to = asked.get(p.RESPONSE_TOPIC, b"").decode() or default
        self._counts["requests"] += 1
        if reply_to != topic and not reply_to.startswith(f"{topic}/"):
            # We publish with our own rights, which the client must not use.
            self._counts["refused_requests"] += 1
            why = f"a reply goes below {topic}, not to the Response Topic {reply_to[:200]!r}"
            log.warning("refused a request: %s", why)
            self._publish(default, refusal(body, why), asked, 0)
            return
        cost = REQUEST_COST + len(body)
        if self._tasks and sum(self._tasks.values()) + cost > REQUEST_ROOM:
            self._counts["refused_requests"] += 1
            why = f"{operation}: too many requests are under way ({len(self._tasks)}); try again"
            log.warning("refused a request, to be answered on %s: %s", reply_to, why)
            self._publish(reply_to, refusal(body, why), asked, 0)  # at QoS 0, so nothing is kept
            return
        caller = self._access.identify(level, None, label=f"client {level!r} at {self._settings.url}")
        caller.origin = Origin("mqtt", self._settings.url)
        task = self._loop.create_task(self._reply(operation, body, reply_to, asked, caller))
        self._tasks[task] = cost
        task.add_done_callback(self._tasks.pop)

    async def _reply(
        self, operation: str, body: bytes, reply_to: str, asked: p.Properties, caller: Identity
    ) -> None:
        room = self._largest - _around(reply_to, asked)
        reply = await answer(self._operations, operation, body, room, caller)
        packet_id = self._publish(reply_to, reply, asked, 1)
        if packet_id is not None:
            taken = self._replies[packet_id] = self._loop.create_future()
            await taken

    def _publish(self, reply_to: str, reply: bytes, asked: p.Properties, qos: int) -> int | None:
        """Send a reply. Returns its packet id, or None if it cannot be sent."""
        size = len(reply) + _around(reply_to, asked)
        if size > self._largest:  # the broker would end this connection, and each on which it is sent again
            log.warning("cannot reply on %.200r: %d bytes are too large", reply_to, size)
            self._counts["dropped_replies"] += 1
            return None
        properties = {p.CORRELATION_DATA: asked[p.CORRELATION_DATA]} if p.CORRELATION_DATA in asked else {}
        return self._client.publish(reply_to, reply, qos, properties)

    def replied(self, packet_id: int) -> None:
        """The broker has acknowledged a reply."""
        taken = self._replies.pop(packet_id, None)
        if taken is not None and not taken.done():
            taken.set_result(None)


def _around(reply_to: str, asked: p.Properties) -> int:
    """Return at least the bytes that the packet of a reply has besides its payload."""
    return len(reply_to.encode()) + len(asked.get(p.CORRELATION_DATA, b"")) + AROUND
