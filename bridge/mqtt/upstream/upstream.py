"""One upstream: the messages of another broker, which are acknowledged there once they are stored here.

What it promises: a message is acknowledged to that broker only after everything that its `Intake` has touched
is committed, in the order of arrival. The session there is persistent, so messages queue at the broker while
we are disconnected. We can promise no more than that broker does. If it acknowledges its publishers from
memory (Mosquitto's default), a power cut there loses undelivered messages. If it limits its queues
(Mosquitto: 1,000 messages), it drops messages that do not fit. The session is checked after each connect. If
it is gone, messages may be lost, which is logged and counted (`sessions_lost`). Redelivered messages are
stored again, so delivery is at least once.

Flow: paho's thread puts messages into `_inbox` and waits while it is full, so that the broker's own flow
control applies. The event loop gives them to the intake, and acknowledges them batch by batch. A message that
cannot be stored now is retried until it can, and no later message is acknowledged before it.

A packet id is valid only on its own connection. So each message has the number of its connection, which
paho's thread counts, and is acknowledged only while that connection exists. A message of an earlier
connection is stored too, because the broker may have lost it, and may be delivered again. After a failed
commit, nothing more is taken from that connection and a new one is made. Then the broker redelivers the
unacknowledged messages in order.

Loops: a message that has already passed this gateway (by the user property `bridged-by`) is acknowledged and
dropped. The exporter `mqtt` and `IntoBroker` write that property. MQTT 3.1.1 has no properties, so
`streambridge check` refuses mappings that overlap with the topics that an export publishes to the same
broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from bridge.errors import RetainedFull, StreamBridgeError, StreamError, Unauthorized
from bridge.mqtt.broker.inbox import reason_of
from bridge.mqtt.upstream.client import Client, begin, make_client
from bridge.mqtt.upstream.link import Link
from bridge.mqtt.upstream.subscribing import Subscriptions
from bridge.mqtt.wire import properties as p
from bridge.net.brokers import BRIDGED_BY, Named, cause_of, hint_for

if TYPE_CHECKING:
    from collections.abc import Collection

    from bridge.mqtt.broker.store import Committer
    from bridge.mqtt.settings import BrokerSettings
    from bridge.mqtt.upstream.intake import Intake
    from bridge.mqtt.upstream.requests import Requests
    from bridge.mqtt.wire.packets import Publish
    from bridge.operations.manager import StreamManager
    from bridge.runtime import Runtime, Timer

log = logging.getLogger(__name__)

INBOX_BYTES = 8 * 1024 * 1024
RETRY_INTERVAL = 1.0
STOP_TIMEOUT = 10.0
LOGGED = 60.0  # seconds between two lines about dropped messages of one kind


class _Batch:
    """Messages that are acknowledged together, and the number of pending commits.

    An ack consists of the number of the connection, the packet id there, and the QoS.
    """

    __slots__ = ("acks", "error", "source", "waiting")

    def __init__(self, source: Upstream) -> None:
        self.source = source
        self.acks: list[tuple[int, int, int]] = []
        self.waiting = 1
        self.error: StreamError | None = None

    def done(self, error: StreamError | None) -> None:
        self.error = self.error or error
        self.waiting -= 1
        if not self.waiting:
            self.source.settle()


class Upstream:
    """A subscriber at another broker that stores messages before it acknowledges them."""

    def __init__(
        self,
        settings: BrokerSettings,
        intake: Intake,
        manager: StreamManager,
        runtime: Runtime,
        *,
        named: Named,
        client_id: str,
        gateway: str,
        former: Collection[str] = (),
        requests: Requests | None = None,
    ) -> None:
        """`former` has filters of an earlier definition, which our session there still has.

        Raises ConfigError for a file that cannot be used. Nothing happens until `start`.
        """
        self.settings, self._intake, self._manager, self._runtime = settings, intake, manager, runtime
        self._named, self._requests = named, requests
        self._loop = asyncio.get_running_loop()
        self.counts: Counter[str] = Counter()
        self._mark = (BRIDGED_BY.encode(), gateway.encode()) if gateway else None
        self._connection = 0  # its number; set in paho's thread as soon as a connection ends or begins
        self._failed = -1  # up to this connection, messages could not be committed
        self._client = make_client(settings, client_id, named)
        self._set_callbacks(self._client)
        if requests is not None:
            requests.attach(self._client, self.counts)
        self._subscriptions = Subscriptions(
            settings, client_id, intake, self._client, self.counts, runtime, former
        )
        intake.attach(self)
        self._link = Link(settings.url)
        self._inbox: deque[tuple[int, Publish]] = deque()  # with the number of the connection
        self._inbox_bytes = 0
        self._room = threading.Condition()
        self._scheduled = self._stopping = self._connected = self._answered = False
        self._held: str | None = None  # why the first message of the inbox cannot be stored
        self._batches: deque[_Batch] = deque()
        self._retry: Timer | None = None
        self._idle: asyncio.Future[None] | None = None
        self._logged: dict[str, float] = {}  # when a dropped message of a kind was logged

    async def start(self) -> None:
        """Connect, and retry until the broker is reachable."""
        begin(self._client, self.settings)
        self._manager.on_bindings_changed.append(self.changed)

    async def stop(self) -> None:
        """Stop taking messages, commit and acknowledge those taken, and disconnect. The session stays."""
        self._manager.on_bindings_changed.remove(self.changed)
        with self._room:
            self._stopping = True
            self._subscriptions.disconnected()
            self._inbox.clear()  # not acknowledged, so the broker keeps them
            self._room.notify_all()
        if self._retry is not None:
            self._retry.cancel()
        if self._batches:
            self._idle = self._loop.create_future()
            await asyncio.wait([self._idle], timeout=STOP_TIMEOUT)
        if self._requests is not None:
            await self._requests.stop()
        self._client.disconnect()
        await asyncio.to_thread(self._client.loop_stop)

    def stats(self) -> dict[str, int]:
        """Counters since the start; connections and messages that wait now."""
        connected = int(self._connected)
        return {
            **self.counts,
            "connections": connected,
            "connected": connected,
            "waiting": len(self._inbox),
        }

    @property
    def unreachable(self) -> str | None:
        """Why there is no connection to the broker; None while there is one."""
        return self._link.why

    @property
    def refused(self) -> dict[str, str]:
        """Return the streams whose messages the broker withholds, at least in part, and why."""
        refused = self._subscriptions.refused
        lacking = self._intake.lacking(refused) if refused else {}
        return {name: self._subscriptions.refusal(filters) for name, filters in lacking.items()}

    @property
    def trouble(self) -> str | None:
        """Return the current problem; None without one."""
        if self._link.why is not None:
            return self._link.why
        refused = self._subscriptions.refused
        return self._held or (self._subscriptions.refusal(refused) if refused else None)

    @property
    def filters(self) -> Collection[str]:
        """Return the filters to which our session there is or may be subscribed."""
        return {*self._intake.wishes(), *self._subscriptions.held}

    def changed(self) -> None:
        """Apply changed streams or rules."""
        self._intake.changed()
        self._subscriptions.update()

    def leave(self, topic_filter: str) -> None:
        """End a subscription that an earlier run left in our session."""
        self._subscriptions.leave(topic_filter)

    def _set_callbacks(self, client: Client) -> None:
        client.on_connect = self._on_connect
        client.on_connect_fail = self._on_connect_fail
        client.on_disconnect = self._on_disconnect
        client.on_subscribe = self._on_subscribe
        client.on_packet = self._on_packet

    # -- in paho's thread ------------------------------------------------------------

    def _on_connect(self, client: Any, _data: Any, flags: Any, reason: Any, properties: Any) -> None:
        self._connection += 1  # here too, because paho does not report every end
        code = reason.value if reason.is_failure else 0
        present, largest = bool(flags.session_present), getattr(properties, "MaximumPacketSize", None)
        self._loop.call_soon_threadsafe(self._connect_ended, code, str(reason), present, largest)

    def _on_connect_fail(self, _client: Any, _data: Any) -> None:
        # paho gives no reason, but calls this while it handles the error.
        cause = cause_of(sys.exception(), self._named)
        self._loop.call_soon_threadsafe(self._link.failed, cause)

    def _on_disconnect(self, _client: Any, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        self._connection += 1
        self._loop.call_soon_threadsafe(self._disconnected, str(reason))

    def _on_subscribe(self, _client: Any, _data: Any, packet_id: int, reasons: Any, _properties: Any) -> None:
        for reason in reasons:  # just one, because each filter has its own request
            failed = str(reason) if reason.is_failure else None
            self._loop.call_soon_threadsafe(self._subscriptions.answered, packet_id, failed)

    def _on_packet(self, packet: Publish) -> None:
        with self._room:
            while self._inbox_bytes > INBOX_BYTES and not self._stopping:
                self._room.wait()
            if self._stopping:
                return
            self._inbox.append((self._connection, packet))
            self._inbox_bytes += _room_for(packet)
            wake, self._scheduled = not self._scheduled, True
        if wake:
            self._loop.call_soon_threadsafe(self._take)

    # -- in the event loop ------------------------------------------------------------

    def _connect_ended(self, code: int, reason: str, present: bool, largest: int | None) -> None:
        self._answered = True
        if code:
            self.counts["refused_connects"] += 1
            user = self.settings.username
            who = f"user {user!r}" if user else "clients without a user name"
            hint = hint_for(code, self._named)
            self._link.failed(f"it refuses {who} ({reason})" + (f"; {hint}" if hint else ""))
            return
        log.info("connected to %s", self.settings.url)
        self._link.recovered()
        self._connected = True
        self.counts["connects"] += 1
        if self._requests is not None:
            self._requests.connected(largest)
        if not self._subscriptions.connected(present):
            self.counts["sessions_lost"] += 1
            log.warning(
                "%s has lost our session, and with it all messages that it had not delivered; check its "
                "persistence",
                self.settings.url,
            )

    def _disconnected(self, reason: str) -> None:
        if not self._stopping and (self._connected or not self._answered):
            when = "it was lost" if self._connected else "it ended before the broker's answer to CONNECT"
            self._link.failed(f"{when} ({reason})")
        self._connected = self._answered = False
        self._subscriptions.disconnected()

    def _take(self) -> None:
        """Store arrived messages. One that cannot be stored now stays at the head of the inbox."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        batch = _Batch(self)
        touched: dict[Committer, None] = {}
        inbox = self._inbox
        with self._room:
            self._scheduled = False
            taken = 0
            while inbox and not self._stopping and not self._manager.under_pressure:
                connection, packet = inbox[0]
                # After a failed message, those that need an acknowledgement are redelivered by the broker.
                if connection > self._failed or not packet.qos:
                    if not self._store(packet, touched):
                        break
                    if packet.qos:
                        batch.acks.append((connection, packet.number, packet.qos))
                inbox.popleft()
                taken += _room_for(packet)
            self._inbox_bytes -= taken
            self._room.notify_all()
            if inbox and not self._stopping:
                self._scheduled = True
                self._retry = self._runtime.later(RETRY_INTERVAL, self._take)
        if not batch.acks:
            return
        self._batches.append(batch)
        batch.waiting += len(touched)
        for committer in touched:
            committer.after_commit(batch.done)
        batch.done(None)

    def _store(self, packet: Publish, touched: dict[Committer, None]) -> bool:
        """Give one message to the intake. Returns False if it must be retried."""
        if self._mark is not None and self._mark in (packet.properties or {}).get(p.USER_PROPERTY, ()):
            self.counts["looped"] += 1
        elif not packet.topic:
            self.dropped("malformed", packet.payload.decode())
        else:
            try:
                touched.update(dict.fromkeys(self._intake.take(packet)))
            except (StreamError, RetainedFull, Unauthorized) as error:
                if packet.qos:
                    self._hold(error)
                    return False
                self.dropped(reason_of(error)[0], str(error))
        self.counts["received"] += 1
        self._held = None
        return True

    def settle(self) -> None:
        """Acknowledge all leading batches that are committed."""
        while self._batches and not self._batches[0].waiting:
            batch = self._batches.popleft()
            if batch.error is not None:
                # It is not acknowledged, so it comes again on a new connection, with all later ones.
                log.error("not acknowledged: %s; reconnecting", batch.error)
                self.counts["rejected_storage"] += 1
                self._failed = batch.acks[-1][0]
                self._runtime.later(RETRY_INTERVAL, self._reconnect)
            else:
                for connection, packet_id, qos in batch.acks:
                    if self._failed < connection == self._connection:
                        self._client.ack(packet_id, qos)
        if not self._batches and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _reconnect(self) -> None:
        connection = self._client.socket()
        living = self._failed == self._connection and not self._stopping
        if living and isinstance(connection, socket.socket):
            # Shut down instead of close, below TLS: paho's thread uses the socket, and sees an orderly end.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def _hold(self, error: StreamBridgeError) -> None:
        self.counts["held"] += 1
        if self._held is None:
            log.warning("%s; retrying until it succeeds; nothing is acknowledged in the meantime", error)
        self._held = f"a message is held: {error}"

    def dropped(self, kind: str, why: str) -> None:
        """Count and log a message that can never be stored; `kind` is the suffix of its counter."""
        self.counts[f"dropped_{kind}"] += 1
        now = self._runtime.now()
        if now >= self._logged.get(kind, -LOGGED) + LOGGED:
            self._logged[kind] = now
            log.warning("dropped a message of %s: %s (counted in the metrics)", self.settings.url, why)


def _room_for(packet: Publish) -> int:
    """Return roughly the bytes that a message takes in the inbox."""
    size = len(packet.payload) + len(packet.topic) + 200
    for value in (packet.properties or {}).values():
        if isinstance(value, bytes):
            size += len(value)
        elif isinstance(value, list):  # user properties
            size += sum(len(name) + len(text) + 200 for name, text in value)
    return size
