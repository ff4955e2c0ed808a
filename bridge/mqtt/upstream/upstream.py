"""Mode "external": the messages of an existing broker, through paho-mqtt.

What it promises: a message is acknowledged to that broker only after it is committed to all its streams,
in the order of arrival. The session there is persistent, so messages queue at the broker while the bridge
is away. We can promise no more than that broker does. If it acknowledges its publishers from memory
(Mosquitto's default), a power cut there loses what it has not delivered. If it bounds its queues (Mosquitto:
1,000 messages), it drops what does not fit. After each connect the session is checked: if it is gone,
messages may be lost, which is logged and counted (`sessions_lost`). Redelivered messages are stored again: at
least once.

Flow: paho's thread puts messages into `_inbox` and waits while it is full, so that the broker's own flow
control applies. The event loop appends them, and acknowledges them batch by batch. A message for a full
stream is retried until there is room, and nothing behind it is acknowledged before it. A message that can
never be stored is dropped and counted. A message that comes by an old subscription, for a stream that is
gone, also ends that subscription.

A packet id is valid on its own connection only. So each message carries the number of its connection, which
paho's thread counts, and is acknowledged only while that connection lives. A message of an earlier connection
is stored as well, since the broker may have lost it, and is delivered again. After a failed commit nothing
more is taken from that connection, and a new one is made: the broker redelivers, in order, what was not
acknowledged.

The requests of all devices share one connection with their messages, and do not block them. The requests
under way, each up to the broker's PUBACK for its reply, are bounded; a request beyond the bound is refused at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import sys
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties

from bridge.errors import ConfigError, MessageTooLarge, NoStream, StreamError
from bridge.mqtt.broker.message import headers_of
from bridge.mqtt.upstream.link import Link, cause_of
from bridge.mqtt.upstream.subscribing import Subscriptions
from bridge.mqtt.wire import properties as p
from bridge.operations.codec import answer, refusal
from bridge.topics import REQUEST_LEVEL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bridge.access.logins import Access
    from bridge.access.rules import Identity
    from bridge.mqtt.broker.store import Stream
    from bridge.mqtt.settings import ExternalSettings
    from bridge.operations.catalog import Operations
    from bridge.runtime import Runtime, Timer

log = logging.getLogger(__name__)

INBOX_BYTES = 8 * 1024 * 1024
FIRST_DELAY, LONGEST_DELAY = 1, 60  # seconds between attempts to connect
RETRY_INTERVAL = 1.0
STOP_TIMEOUT = 10.0
REQUEST_ROOM = 8 * 1024 * 1024  # bytes of requests under way, each with this many for the work on it:
REQUEST_COST = 32 * 1024
ROUTES = 50_000
NEVER = 0xFFFFFFFF


class _Batch:
    """Messages that are acknowledged together, and how many streams are awaited.

    An ack is the number of the connection, the packet id there, and the QoS.
    """

    __slots__ = ("acks", "error", "source", "waiting")

    def __init__(self, source: ExternalBroker) -> None:
        self.source = source
        self.acks: list[tuple[int, int, int]] = []
        self.waiting = 1
        self.error: StreamError | None = None

    def done(self, error: StreamError | None) -> None:
        self.error = self.error or error
        self.waiting -= 1
        if not self.waiting:
            self.source.settle()


class ExternalBroker:
    """A subscriber at an existing broker that stores what it gets."""

    def __init__(
        self,
        settings: ExternalSettings,
        operations: Operations,
        access: Access,
        max_packet: int,
        runtime: Runtime,
    ) -> None:
        self._settings, self._operations, self._access = settings, operations, access
        self._manager, self._max_packet = operations.manager, max_packet
        self._loop, self._runtime = asyncio.get_running_loop(), runtime
        self.counts: Counter[str] = Counter()
        self._connection = 0  # its number; set in paho's thread, as soon as one has ended or begun
        self._failed = -1  # connections up to this one have brought a message that could not be committed
        self._v5 = settings.protocol == "5"
        self._client = self._make_client()
        self._subscriptions = Subscriptions(settings, self._manager, self._client, self.counts, runtime)
        self._link = Link(settings.url)
        self._inbox: deque[tuple[int, paho.MQTTMessage]] = deque()  # with the number of the connection
        self._inbox_bytes = 0
        self._room = threading.Condition()
        self._scheduled = self._stopping = self._connected = self._answered = self._held = False
        self._batches: deque[_Batch] = deque()
        self._routes: dict[str, tuple[Stream, ...]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked_bytes = 0  # of the requests under way
        self._replies: dict[int, asyncio.Future[None]] = {}  # by packet id: what the broker is to take
        self._retry: Timer | None = None
        self._idle: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Begin to connect, again and again until the broker is there."""
        parts = urlsplit(self._settings.url)
        port = parts.port or (8883 if parts.scheme == "mqtts" else 1883)
        options: dict[str, Any] = {"keepalive": self._settings.keep_alive}
        if self._v5:
            properties = PahoProperties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.SessionExpiryInterval = NEVER
            options.update(clean_start=False, properties=properties)
        self._client.connect_async(parts.hostname or "", port, **options)
        self._client.loop_start()
        self._manager.on_bindings_changed.append(self._rebind)

    async def stop(self) -> None:
        """Take no more, commit and acknowledge what was taken, disconnect; the session stays."""
        self._manager.on_bindings_changed.remove(self._rebind)
        with self._room:
            self._stopping = True
            self._subscriptions.disconnected()
            self._inbox.clear()  # not acknowledged: the broker keeps it
            self._room.notify_all()
        if self._retry is not None:
            self._retry.cancel()
        if self._batches:
            self._idle = self._loop.create_future()
            await asyncio.wait([self._idle], timeout=STOP_TIMEOUT)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
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
        """The streams whose messages the broker withholds, at least in part, and why."""
        return self._subscriptions.refused

    def _make_client(self) -> paho.Client:
        settings = self._settings
        client = paho.Client(
            CallbackAPIVersion.VERSION2,
            settings.client_id,
            clean_session=None if self._v5 else False,
            protocol=paho.MQTTv5 if self._v5 else paho.MQTTv311,
            manual_ack=True,
        )
        client.reconnect_delay_set(FIRST_DELAY, LONGEST_DELAY)
        try:
            if settings.username is not None:
                secret = settings.password_file.read_text().strip() if settings.password_file else None
                client.username_pw_set(settings.username, secret)
            if urlsplit(settings.url).scheme == "mqtts":
                cert, key = (str(path) if path else None for path in (settings.cert, settings.key))
                client.tls_set(str(settings.ca) if settings.ca else None, cert, key)
        except (OSError, ValueError, ssl.SSLError) as error:
            raise ConfigError(f"mqtt.external: password_file, ca, cert or key: {error}") from error
        client.on_connect = self._on_connect
        client.on_connect_fail = self._on_connect_fail
        client.on_disconnect = self._on_disconnect
        client.on_subscribe = self._on_subscribe
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        return client

    # -- in paho's thread ------------------------------------------------------------

    def _on_connect(self, client: Any, _data: Any, flags: Any, reason: Any, _properties: Any) -> None:
        self._connection += 1  # here too: paho does not report every end
        failed = bool(reason.is_failure)
        self._loop.call_soon_threadsafe(self._connect_ended, failed, str(reason), bool(flags.session_present))

    def _on_connect_fail(self, _client: Any, _data: Any) -> None:
        # paho gives no reason, but calls this while it handles the error.
        self._loop.call_soon_threadsafe(self._link.failed, cause_of(sys.exception()))

    def _on_disconnect(self, _client: Any, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        self._connection += 1
        self._loop.call_soon_threadsafe(self._disconnected, str(reason))

    def _on_subscribe(self, _client: Any, _data: Any, packet_id: int, reasons: Any, _properties: Any) -> None:
        for reason in reasons:  # one: each filter is asked for by itself
            failed = str(reason) if reason.is_failure else None
            self._loop.call_soon_threadsafe(self._subscriptions.answered, packet_id, failed)

    def _on_message(self, _client: Any, _data: Any, message: paho.MQTTMessage) -> None:
        with self._room:
            while self._inbox_bytes > INBOX_BYTES and not self._stopping:
                self._room.wait()
            if self._stopping:
                return
            self._inbox.append((self._connection, message))
            self._inbox_bytes += len(message.payload) + 200
            wake, self._scheduled = not self._scheduled, True
        if wake:
            self._loop.call_soon_threadsafe(self._take)

    def _on_publish(self, _client: Any, _data: Any, packet_id: int, _reason: Any, _properties: Any) -> None:
        self._loop.call_soon_threadsafe(self._replied, packet_id)

    # -- in the event loop ------------------------------------------------------------

    def _connect_ended(self, failed: bool, reason: str, present: bool) -> None:
        self._answered = True
        if failed:
            self.counts["refused_connects"] += 1
            user = self._settings.username
            who = f"user {user!r}" if user else "clients without a user name"
            self._link.failed(f"it refuses {who} ({reason}); see mqtt.external.username and password_file")
            return
        log.info("connected to %s", self._settings.url)
        self._link.recovered()
        self._connected = True
        self.counts["connects"] += 1
        if not self._subscriptions.connected(present):
            self.counts["sessions_lost"] += 1
            log.warning(
                "%s has lost our session: what it had not delivered is lost; check its persistence",
                self._settings.url,
            )

    def _disconnected(self, reason: str) -> None:
        if not self._stopping and (self._connected or not self._answered):
            when = "it was lost" if self._connected else "it ended before the broker's answer to CONNECT"
            self._link.failed(f"{when} ({reason})")
        self._connected = self._answered = False
        self._subscriptions.disconnected()

    def _rebind(self) -> None:
        self._routes.clear()
        self._subscriptions.update()

    def _take(self) -> None:
        """Append what has arrived; what a full stream refuses stays at the head of the inbox."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        batch = _Batch(self)
        touched: dict[Stream, None] = {}
        inbox = self._inbox
        with self._room:
            self._scheduled = False
            taken = 0
            while inbox and not self._stopping and not self._manager.under_pressure:
                connection, message = inbox[0]
                # What must be acknowledged and follows a failed message waits for its turn at the broker.
                if connection > self._failed or not message.qos:
                    if not self._append(message, touched):
                        break
                    if message.qos:
                        batch.acks.append((connection, message.mid, message.qos))
                inbox.popleft()
                taken += len(message.payload) + 200
            self._inbox_bytes -= taken
            self._room.notify_all()
            if inbox and not self._stopping:
                self._scheduled = True
                self._retry = self._runtime.later(RETRY_INTERVAL, self._take)
        if not batch.acks:
            return
        self._batches.append(batch)
        batch.waiting += len(touched)
        for stream in touched:
            stream.after_commit(batch.done)
        batch.done(None)

    def _append(self, message: paho.MQTTMessage, touched: dict[Stream, None]) -> bool:
        """Append one message to its streams; False if it must be tried again."""
        topic = message.topic
        if topic.startswith(REQUEST_LEVEL + "/"):
            if self._settings.operations:
                self._answer(message)
            else:
                self.counts["refused_requests"] += 1
                self._subscriptions.leave_requests()
        else:
            streams = self._routes.get(topic)
            if streams is None:
                if len(self._routes) >= ROUTES:
                    self._routes.clear()
                streams = self._routes[topic] = self._manager.bound(topic)
            raw, payload, kept = topic.encode(), bytes(message.payload), _headers(message)
            takers: list[Stream] = []
            for stream in streams:
                try:
                    stream.ensure_admits(raw, payload, kept)
                except MessageTooLarge as error:
                    self._dropped("too_large", error)
                except NoStream as error:
                    self._dropped("unbound", error)
                    self._subscriptions.leave(stream.name)
                except StreamError as error:
                    if message.qos:  # to none of them: it comes to all when it is tried again
                        self._hold(error)
                        return False
                    self._dropped("full", error)
                else:
                    takers.append(stream)
            for stream in takers:
                stream.append(raw, payload, kept)
                touched[stream] = None
            if not streams:
                self.counts["dropped_unbound"] += 1  # the broker still has a subscription of a former stream
        self.counts["received"] += 1
        self._held = False
        return True

    def settle(self) -> None:
        """Acknowledge all leading batches that are committed."""
        while self._batches and not self._batches[0].waiting:
            batch = self._batches.popleft()
            if batch.error is not None:
                # Unacknowledged, it comes again on a new connection, with all that followed.
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
            # Shut and not closed, and not by TLS: paho's thread is at work on it, and sees an orderly end.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def _hold(self, error: StreamError) -> None:
        self.counts["held"] += 1
        if not self._held:
            log.warning("%s; retrying until it succeeds, nothing is acknowledged meanwhile", error)
        self._held = True

    def _dropped(self, kind: str, error: StreamError) -> None:
        self.counts[f"dropped_{kind}"] += 1
        log.warning("dropped a message: %s", error)

    def _answer(self, message: paho.MQTTMessage) -> None:
        """Carry out a request for the client whose level its topic has: that broker's rules vouch for it."""
        level, _, operation = message.topic.removeprefix(f"{REQUEST_LEVEL}/").partition("/")
        body, asked = bytes(message.payload), _properties(message)
        default = f"{message.topic}/reply"
        reply_to = asked.get(p.RESPONSE_TOPIC, b"").decode() or default
        self.counts["requests"] += 1
        if reply_to != message.topic and not reply_to.startswith(f"{message.topic}/"):
            # We publish with our own rights, which are not the client's to use.
            self.counts["refused_requests"] += 1
            why = f"a reply goes below {message.topic}, not to the Response Topic {reply_to[:200]!r}"
            log.warning("refused a request: %s", why)
            self._publish(default, refusal(body, why), asked, 0)
            return
        cost = REQUEST_COST + len(body)
        if self._asked_bytes and self._asked_bytes + cost > REQUEST_ROOM:
            self.counts["refused_requests"] += 1
            why = f"{operation}: too many requests are under way ({len(self._tasks)}); try again"
            log.warning("refused a request, to be answered on %s: %s", reply_to, why)
            self._publish(reply_to, refusal(body, why), asked, 0)  # at QoS 0 nothing is kept of it
            return
        self._asked_bytes += cost
        caller = self._access.identify(level, None, label=f"client {level!r} at {self._settings.url}")
        task = self._loop.create_task(self._reply(operation, body, reply_to, asked, caller))

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._asked_bytes -= cost

        self._tasks.add(task)
        task.add_done_callback(ended)

    async def _reply(
        self, operation: str, body: bytes, reply_to: str, asked: p.Properties, caller: Identity
    ) -> None:
        reply = await answer(self._operations, operation, body, self._max_packet, caller)
        packet_id = self._publish(reply_to, reply, asked, 1)
        if packet_id is not None:
            taken = self._replies[packet_id] = self._loop.create_future()
            await taken

    def _publish(self, reply_to: str, reply: bytes, asked: p.Properties, qos: int) -> int | None:
        """Send a reply; returns its packet id, or None if it cannot be sent."""
        properties = None
        if self._v5:
            properties = PahoProperties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
            if p.CORRELATION_DATA in asked:
                properties.CorrelationData = asked[p.CORRELATION_DATA]
        try:
            sent = self._client.publish(reply_to, reply, qos, properties=properties)
        except ValueError as error:
            log.warning("cannot reply on %.200r: %s", reply_to, error)
        else:
            if sent.rc != paho.MQTT_ERR_QUEUE_SIZE:  # its packet id is in use
                return sent.mid
        self.counts["dropped_replies"] += 1
        return None

    def _replied(self, packet_id: int) -> None:
        taken = self._replies.pop(packet_id, None)
        if taken is not None and not taken.done():
            taken.set_result(None)


def _headers(message: paho.MQTTMessage) -> bytes:
    flags = message.retain | (8 if message.dup else 0)
    properties = _properties(message)
    if not flags and not properties:
        return b""
    return headers_of(flags, properties, "", 0)


def _properties(message: paho.MQTTMessage) -> p.Properties:
    """The MQTT 5 properties of a message, as we have them everywhere else."""
    given = getattr(message, "properties", None)
    if given is None:
        return {}
    found: p.Properties = {}
    for kind, name in _NAMES:
        value = getattr(given, name, None)
        if value is not None:
            found[kind] = value.encode() if isinstance(value, str) else value
    if users := getattr(given, "UserProperty", None):
        found[p.USER_PROPERTY] = [(name.encode(), value.encode()) for name, value in users]
    return found


_NAMES: Iterable[tuple[int, str]] = (
    (p.PAYLOAD_FORMAT, "PayloadFormatIndicator"),
    (p.MESSAGE_EXPIRY, "MessageExpiryInterval"),
    (p.CONTENT_TYPE, "ContentType"),
    (p.RESPONSE_TOPIC, "ResponseTopic"),
    (p.CORRELATION_DATA, "CorrelationData"),
)
