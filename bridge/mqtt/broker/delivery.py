"""Delivery of ordinary messages to the subscribers that are there: amqtt behind one small interface.

`Delivery` is what the lane needs: a table of live subscriptions, and a copy of a message to each
session whose subscriptions match. It is best effort and unacknowledged (QoS 0). What must not be lost
(QoS 1 and 2, sessions that are away, retained messages, wills) never passes through here: amqtt 0.12.1
forgets an unacknowledged message after 5 s or when its subscriber disconnects, so `outbox.py`
keeps those. Live copies of stream topics do not come here either: amqtt needs some 40 us for each, and
would slow down the ingest on the same event loop.

`AmqttDelivery` is the only module that knows amqtt. Each session with subscriptions is a client of an
amqtt broker through its external listener; amqtt sees a CONNECT that the lane wrote, then nothing but
subscriptions through `BrokerContext.add_subscription` (public; a SUBSCRIBE would log the whole table). They
are removed from the public table: amqtt would keep filters without subscribers, and look at each for each
message. What it broadcasts is an 8-byte ticket that names the message, so that
payload and MQTT 5 properties need not pass through it. Read beyond its public API, for bounds that it
does not have: the lengths of `Broker._broadcast_queue` and `Broker._tasks_queue`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Protocol

from amqtt.adapters import ReaderAdapter, WriterAdapter
from amqtt.broker import Broker
from amqtt.contexts import BrokerConfig, ListenerConfig, ListenerType
from amqtt.plugins.base import BaseAuthPlugin

from bridge.mqtt.wire.packets import CONNACK, CONNECT, PUBLISH, packet, string

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bridge.mqtt.broker.message import Message
    from bridge.mqtt.broker.sessions import Session

log = logging.getLogger(__name__)

WAITING_MESSAGES = 2_000  # not yet given to amqtt; above them live copies are dropped, and counted
BURST_MESSAGES = 256  # given to amqtt at a time
BURST_BYTES = 4 * 1024 * 1024
# Above so many filters amqtt is passed by: it compares each message with each filter, and makes a task for
# each that matches, without a turn for anybody else (0.5 s for 9,900 filters of 60 levels).
AMQTT_FILTERS = 500
FILTERS = 100  # given to amqtt before others have their turn
COPIES = 100  # sent without amqtt before others have their turn
BURST_TIMEOUT = 10.0  # it takes some ms; amqtt must have died inside
STOP_TIMEOUT = 5.0


class Delivery(Protocol):
    """Who is subscribed now, and a copy of each message to them, at QoS 0.

    While it is `crowded`, whoever publishes on ordinary topics should wait; the wait is short, for it is
    for this process alone, never for a subscriber.
    """

    @property
    def crowded(self) -> bool:
        """Whether so much waits that more would soon be dropped."""

    async def start(self) -> None:
        """Begin to deliver."""

    async def stop(self) -> None:
        """Stop; what has not been delivered is dropped."""

    async def subscribe(self, session: Session, filters: Iterable[str]) -> None:
        """From the return on, `session` gets what is published on topics that the filters match."""

    def unsubscribe(self, session: Session, topic_filter: str) -> None:
        """`session` no longer needs what a filter matches."""

    def leave(self, session: Session) -> None:
        """`session` has lost its connection: it gets nothing more."""

    def publish(self, message: Message) -> None:
        """Deliver a message to the sessions in `message.live`, soon."""


class _AcceptAll(BaseAuthPlugin):  # type: ignore[misc]
    """amqtt asks a plugin; the lane has authenticated the client before amqtt hears of it."""

    async def authenticate(self, *, session: Any) -> bool:
        return True


class _Link(ReaderAdapter, WriterAdapter):  # type: ignore[misc]
    """One session as amqtt sees it: a connection on which the lane sits at the other end."""

    def __init__(self, client_id: str, deliver: Callable[[int], None]) -> None:
        self.client_id, self._deliver = client_id, deliver
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.filters: set[str] = set()
        self.task: asyncio.Task[None] | None = None
        self._unread, self._more, self._ended = bytearray(), asyncio.Event(), False

    def feed(self, data: bytes) -> None:
        self._unread += data
        self._more.set()

    def feed_eof(self) -> None:
        self._ended = True
        self._more.set()

    async def read(self, n: int = -1) -> bytes:
        while len(self._unread) < n and not self._ended:
            self._more.clear()
            await self._more.wait()
        if len(self._unread) < n:
            await asyncio.sleep(0)  # amqtt misses an end that is there before its handler has started
        data = bytes(self._unread[:n])
        del self._unread[:n]
        return data

    def write(self, data: bytes) -> None:
        kind = data[0] & 0xF0
        if kind == PUBLISH:
            self._deliver(int.from_bytes(data[-8:], "big"))
        elif kind == CONNACK and not self.connected.done():
            self.connected.set_result(None)

    async def drain(self) -> None:
        return  # a connection that cannot be written to is the outbox's business, never amqtt's

    def get_peer_info(self) -> tuple[str, int]:
        return ("lane", 0)

    def get_ssl_info(self) -> None:
        return None

    async def close(self) -> None:
        self.feed_eof()


class AmqttDelivery:
    """`Delivery` by an amqtt broker in this process."""

    def __init__(
        self,
        deliver: Callable[[Session, Message], None],
        relieved: Callable[[], None],
        counts: Counter[str],
    ) -> None:
        """`deliver` gets each copy, `relieved` is called when it is no longer crowded."""
        for name, level in (("amqtt", logging.ERROR), ("transitions", logging.WARNING)):
            logging.getLogger(name).setLevel(level)  # amqtt reports every client's coming and going
        self._deliver, self._relieved, self._counts = deliver, relieved, counts
        self._broker: Any = Broker(
            BrokerConfig(
                listeners={"default": ListenerConfig(type=ListenerType.EXTERNAL)},
                plugins={f"{__name__}.{_AcceptAll.__name__}": {}},
            )
        )
        self._context: Any = self._broker.plugins_manager.get_plugin(_AcceptAll.__name__).context
        self._links: dict[Session, _Link] = {}
        self._made = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: deque[Message] = deque()
        self._tickets: dict[int, Message] = {}
        self._last_ticket = 0
        self._work = asyncio.Event()
        self._feeder: asyncio.Task[None] | None = None

    @property
    def crowded(self) -> bool:
        return len(self._waiting) >= WAITING_MESSAGES // 2

    async def start(self) -> None:
        await self._broker.start()
        self._feeder = asyncio.get_running_loop().create_task(self._feed())

    async def stop(self) -> None:
        if self._feeder is not None:
            self._feeder.cancel()
        for session in list(self._links):
            self.leave(session)
        # With the table empty amqtt's shutdown takes a time that grows with its sessions, not
        # with sessions times filters (11 s for 4,000).
        self._broker.subscriptions.clear()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT)
        await self._broker.shutdown()
        leftover = [*self._tasks, *([self._feeder] if self._feeder is not None else [])]
        for task in leftover:
            task.cancel()
        await asyncio.gather(*leftover, return_exceptions=True)

    async def subscribe(self, session: Session, filters: Iterable[str]) -> None:
        link = self._links.get(session)
        if link is None:
            link = await self._connect(session)
        for number, topic_filter in enumerate(filters, 1):
            if self._links.get(session) is not link:
                return  # gone meanwhile; amqtt would make a session that never ends
            link.filters.add(topic_filter)
            await self._context.add_subscription(link.client_id, topic_filter, 0)
            if number % FILTERS == 0:
                await asyncio.sleep(0)

    def unsubscribe(self, session: Session, topic_filter: str) -> None:
        link = self._links.get(session)
        if link is not None:
            self._remove(link, topic_filter)

    def leave(self, session: Session) -> None:
        link = self._links.pop(session, None)
        if link is not None:
            for topic_filter in list(link.filters):
                self._remove(link, topic_filter)
            link.feed_eof()

    def publish(self, message: Message) -> None:
        if len(self._waiting) >= WAITING_MESSAGES:
            self._counts["dropped_live"] += 1
            return
        self._waiting.append(message)
        self._work.set()

    async def _connect(self, session: Session) -> _Link:
        self._made += 1

        def deliver(ticket: int) -> None:
            message = self._tickets.get(ticket)
            if message is not None and self._links.get(session) is link:
                self._deliver(session, message)

        link = self._links[session] = _Link(f"lane-{self._made}", deliver)
        name = string(link.client_id.encode())
        link.feed(packet(CONNECT, string(b"MQTT") + b"\x04\x02\0\0" + name))
        link.task = asyncio.get_running_loop().create_task(self._run(link))
        self._tasks.add(link.task)
        link.task.add_done_callback(self._tasks.discard)
        await link.connected
        return link

    async def _run(self, link: _Link) -> None:
        try:
            await self._broker.external_connected(link, link, "default")
        except Exception:
            # Not only its own exceptions come out of amqtt. The session goes on without live copies.
            log.exception("amqtt gave up a subscriber; its QoS 0 messages are lost until it reconnects")
        finally:
            link.feed_eof()  # nothing is asked of it any more, nor waited for
            if not link.connected.done():
                link.connected.set_result(None)

    def _remove(self, link: _Link, topic_filter: str) -> None:
        link.filters.discard(topic_filter)
        table = self._broker.subscriptions
        left = [pair for pair in table.get(topic_filter, ()) if pair[0].client_id != link.client_id]
        if left:
            table[topic_filter][:] = left
        else:
            table.pop(topic_filter, None)

    async def _feed(self) -> None:
        """Give amqtt a burst of messages, wait until it has dealt with them, and so on.

        amqtt's queues have no bound of their own, and a task for each copy.
        """
        while True:
            await self._work.wait()
            try:
                async with asyncio.timeout(BURST_TIMEOUT):
                    await self._burst()
            except Exception:
                log.exception("amqtt failed on a burst of messages; their live copies are lost")
                self._counts["dropped_live"] += len(self._tickets)
            self._tickets.clear()
            if not self._waiting:
                self._work.clear()
                self._relieved()

    async def _burst(self) -> None:
        if len(self._broker.subscriptions) > AMQTT_FILTERS:
            await self._burst_without_amqtt()
            return
        queue, tasks = self._broker._broadcast_queue, self._broker._tasks_queue
        size = 0
        while self._waiting and len(self._tickets) < BURST_MESSAGES and size < BURST_BYTES:
            message = self._waiting.popleft()
            size += message.size
            self._last_ticket += 1
            self._tickets[self._last_ticket] = message
            ticket = self._last_ticket.to_bytes(8, "big")
            await self._context.broadcast_message(message.topic.decode(), ticket, 0)
        while queue.qsize() or any(not task.done() for task in tasks):  # noqa: ASYNC110  (no event in amqtt)
            await asyncio.sleep(0)

    async def _burst_without_amqtt(self) -> None:
        """Deliver a burst to the receivers that the router has found; bursts never overlap."""
        copies = 0
        for _ in range(min(BURST_MESSAGES, len(self._waiting))):
            message = self._waiting.popleft()
            for session in message.live:
                if session in self._links:
                    self._deliver(session, message)
                copies += 1
                if copies % COPIES == 0:
                    await asyncio.sleep(0)
        await asyncio.sleep(0)
