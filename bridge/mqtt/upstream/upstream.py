"""One upstream: the messages of another broker, which are acknowledged there once they are stored here.

What it promises: a message is acknowledged to that broker only after everything that its `Intake` has touched
is committed, in the order of arrival. The session there is persistent, so messages queue at the broker while
we are disconnected. We can promise no more than that broker does. If it acknowledges its publishers from
memory (Mosquitto's default), a power cut there loses undelivered messages. If it limits its queues
(Mosquitto: 1,000 messages), it drops messages that do not fit. The session is checked after each connect. If
it is gone, messages may be lost, which is logged and counted (`sessions_lost`). Redelivered messages are
stored again, so delivery is at least once at QoS 1. At QoS 2 it is exactly once: our half of the session
(`joined`) outlives connections and kills.

Flow: what arrives waits in `_arrived`; while that is full, nothing is read, so that the broker's own flow
control applies. The intake gets the messages one by one, and an `Inbox` answers them, as it does for a client
of the embedded broker. A message that cannot be stored now is retried until it can, and no later message is
acknowledged before it.

A packet id is valid only in its session, and an acknowledgement only on its own connection. So each message
has the number of its connection. One of an earlier connection is stored too, without an acknowledgement: the
broker may have lost it. As soon as a commit has failed, nothing more is taken from that connection, and a new
one is made. Then the broker redelivers the unacknowledged messages in order.

Loops: a message that has already passed this gateway (by the user property `bridged-by`) is acknowledged and
dropped. The exporter `mqtt` and `IntoBroker` write that property. MQTT 3.1.1 has no properties, so
`streambridge check` refuses mappings that overlap with the topics that an export publishes to the same
broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from typing import TYPE_CHECKING

from bridge import books
from bridge.errors import RetainedFull, StreamBridgeError, StreamError, Unauthorized
from bridge.mqtt.broker.inbox import Batch, Inbox, reason_of
from bridge.mqtt.broker.joined import above
from bridge.mqtt.broker.line import Gone
from bridge.mqtt.broker.publishing import Brought
from bridge.mqtt.upstream.client import Client, reason_name
from bridge.mqtt.upstream.link import Link
from bridge.mqtt.upstream.subscribing import Subscriptions
from bridge.mqtt.wire import answers
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.client import BRIDGE
from bridge.mqtt.wire.packets import (
    BAD_CLIENT_ID,
    BAD_USER_OR_PASSWORD,
    CONNACK,
    NOT_AUTHORIZED,
    PACKET_ID_NOT_FOUND,
    PROTOCOL_ERROR,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    SUCCESS,
    UNSUPPORTED_VERSION,
    V5,
    V311,
)
from bridge.net.brokers import BRIDGED_BY, Named, hint_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bridge.mqtt.broker.joined import Joined
    from bridge.mqtt.broker.journal import Journal
    from bridge.mqtt.settings import BrokerSettings
    from bridge.mqtt.upstream.intake import Intake
    from bridge.mqtt.upstream.requests import Requests
    from bridge.mqtt.wire.client import Connack
    from bridge.mqtt.wire.packets import Publish
    from bridge.operations.manager import StreamManager
    from bridge.runtime import Runtime, Timer

log = logging.getLogger(__name__)

INBOX_BYTES = 8 * 1024 * 1024
RETRY_INTERVAL = 1.0
STOP_TIMEOUT = 10.0
LOGGED = 60.0  # seconds between two lines about dropped messages of one kind


class Upstream(Gone):
    """A subscriber at another broker that stores messages before it acknowledges them.

    It is the `Line` of its inbox.
    """

    gone = False

    def __init__(
        self,
        settings: BrokerSettings,
        intake: Intake,
        manager: StreamManager,
        runtime: Runtime,
        journal: Journal,
        joined: Joined,
        *,
        named: Named,
        client_id: str,
        gateway: str,
        requests: Requests | None = None,
    ) -> None:
        """`joined` is our session there, which `journal` keeps.

        Raises ConfigError for a file that cannot be used. Nothing happens until `start`.
        """
        self.settings, self._intake, self._manager, self._runtime = settings, intake, manager, runtime
        self._named, self._requests, self.journal, self.joined = named, requests, journal, joined
        self._client_id = client_id
        self._at = f"{settings.url} {client_id}"
        self.counts: Counter[str] = Counter()
        self._mark = (BRIDGED_BY.encode(), gateway.encode()) if gateway else None
        self._visit = 0  # the number of the newest connection
        self._began = 0  # the connection with which our present session there has begun
        # Up to these connections, nothing more is taken and acknowledged, because a commit has failed.
        self._failing = self._failed = 0
        self._was_doubtful = False
        mine = joined.at == self._at
        takes_bit = intake.wants_flags and not (mine and joined.refuses_bridges)
        older = [V311 | BRIDGE, V311] if takes_bit else [V311]
        protocols = {"5": [V5], "3.1.1": older, None: [V5, *older]}[settings.protocol]
        self._client = Client(settings, client_id, named, protocols, joined.accepts if mine else 0, self)
        if requests is not None:
            requests.attach(self._client, self.counts)
        self._subscriptions = Subscriptions(
            settings, client_id, intake, self._client, self.counts, runtime, journal, joined
        )
        intake.attach(self)
        self._link = Link(settings.url)
        self._arrived: deque[tuple[int, Publish]] = deque()  # with the number of the connection
        self._arrived_bytes = 0
        self._scheduled = self._stopping = self._connected = self._answered = self._waits = False
        self._held: str | None = None  # why the first message of the inbox cannot be stored
        self._inbox = Inbox(self, journal)
        self._inbox.session = joined
        self._retry: Timer | None = None
        self._logged: dict[str, float] = {}  # when a dropped message of a kind was logged
        books.opened(self)

    def recount(self) -> Iterable[books.Entry]:
        yield "arrived_bytes", self._arrived_bytes, sum(_room_for(packet) for _, packet in self._arrived)

    async def start(self) -> None:
        """Connect, and retry until the broker is reachable."""
        self.joined.uncommitted = self._inbox.uncommitted
        self._client.start()
        self._manager.on_bindings_changed.append(self.changed)

    async def stop(self) -> None:
        """Stop taking messages, commit and acknowledge those taken, and disconnect. The session stays."""
        self._manager.on_bindings_changed.remove(self.changed)
        self._stopping = True
        self._subscriptions.disconnected()
        self._arrived.clear()  # not acknowledged, so the broker keeps them
        self._arrived_bytes = 0
        if self._retry is not None:
            self._retry.cancel()
        settled = asyncio.Event()
        self._inbox.when_settled(settled.set)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(settled.wait(), STOP_TIMEOUT)
        if self._requests is not None:
            await self._requests.stop()
        await self._client.stop()

    def stats(self) -> dict[str, int]:
        """Counters since the start; connections and messages that wait now."""
        connected = int(self._connected)
        return {
            **self.counts,
            "connections": connected,
            "connected": connected,
            "waiting": len(self._arrived),
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

    def changed(self) -> None:
        """Apply changed streams or rules."""
        self._intake.changed()
        self._subscriptions.update()

    def leave(self, topic_filter: str) -> None:
        """End a subscription that an earlier run left in our session."""
        self._subscriptions.leave(topic_filter)

    # -- what the client reports -----------------------------------------------------------

    def failed(self, cause: str) -> None:
        """There is no connection."""
        self._link.failed(cause)

    def connecting(self, send: Callable[[StreamError | None], None]) -> None:
        """Call `send` when CONNECT may be sent, or with the reason why it may not."""
        joined = self.joined
        self._was_doubtful = joined.doubtful
        joined.doubtful = bool(joined.incoming or joined.granted)
        self.journal.joined(joined.record())
        self.journal.after_commit(send)

    def connected(self, connack: Connack, protocol: int) -> None:
        """The broker has answered CONNECT, for this protocol."""
        self._answered = True
        if connack.reason and self._client.again:
            log.info("%s; trying an older protocol", self._refusal(connack.reason, protocol))
            return
        if connack.reason:
            self.counts["refused_connects"] += 1
            self._link.failed(self._refusal(connack.reason, protocol))
            return
        self._link.recovered()
        self._connected = True
        self._visit += 1
        self.counts["connects"] += 1
        if self._requests is not None:
            self._requests.connected(connack.properties.get(p.MAXIMUM_PACKET_SIZE))
        joined, same = self.joined, self.joined.at == self._at
        if connack.present and same:
            joined.doubtful = self._was_doubtful and bool(joined.incoming)
            self._joined(connack, protocol, trusted=not self._was_doubtful)
            return
        if joined.granted and same:
            self.counts["sessions_lost"] += 1
            log.warning(
                "%s has lost our session, and with it all messages that it had not delivered; check its "
                "persistence",
                self.settings.url,
            )
        self._began = visit = self._visit

        def settled() -> None:
            joined.begin_anew(self._at, self.journal)
            if self._connected and visit == self._visit:
                self._joined(connack, protocol, trusted=False)

        self._inbox.when_settled(settled)

    def _joined(self, connack: Connack, protocol: int, *, trusted: bool) -> None:
        joined, url = self.joined, self.settings.url
        log.info("connected to %s", url)
        refuses = protocol == V311 and V311 | BRIDGE in self._client.protocols
        if refuses and not joined.refuses_bridges:
            log.warning(
                "%s does not take us for a bridge: what is published there with RETAIN comes without that "
                "flag, so retained messages here stay as they are when they change there",
                url,
            )
        joined.accepts, joined.refuses_bridges = protocol, joined.refuses_bridges or refuses
        self.journal.joined(joined.record())
        self._subscriptions.connected(connack.properties, trusted=trusted)

    def _refusal(self, code: int, protocol: int) -> str:
        user, name = self.settings.username, reason_name(CONNACK, code)
        who = "the connection"
        if code == UNSUPPORTED_VERSION:
            who = (
                "MQTT 5"
                if protocol == V5
                else "MQTT 3.1.1 of a bridge"
                if protocol & BRIDGE
                else "MQTT 3.1.1"
            )
        elif code == BAD_CLIENT_ID:
            who = f"the client id {self._client_id!r}"
        elif code in (BAD_USER_OR_PASSWORD, NOT_AUTHORIZED) and user is not None:
            who = f"user {user!r}"
        elif code == BAD_USER_OR_PASSWORD:
            who = "clients without a user name"
        hint = hint_for(code, self._named)
        return f"it refuses {who} ({name})" + (f"; {hint}" if hint else "")

    def lost(self, why: str) -> None:
        """A connection has ended, or was refused."""
        if not self._stopping and (self._connected or not self._answered):
            when = "it was lost" if self._connected else "it ended before the broker's answer to CONNECT"
            self._link.failed(f"{when} ({why})")
        self._connected = self._answered = False
        self._inbox.mute()
        self._subscriptions.disconnected()

    def subscribed(self, packet_id: int, failed: str | None) -> None:
        """SUBACK; `failed` has the reason of a refusal."""
        self._subscriptions.answered(packet_id, failed)

    def published(self, packet_id: int) -> None:
        """The broker has what we have published with this packet id."""
        if self._requests is not None:
            self._requests.replied(packet_id)

    def arrived(self, packet: Publish) -> None:
        """A PUBLISH or, with the first byte of one, a PUBREL. A malformed PUBLISH has no topic."""
        if self._stopping:
            return
        self._arrived.append((self._visit, packet))
        self._arrived_bytes += _room_for(packet)
        if self._arrived_bytes > INBOX_BYTES:
            self._client.hold()
        if not self._scheduled:
            self._scheduled = True
            self._runtime.soon(self._take)

    # -- what is stored ------------------------------------------------------------------------

    def _take(self) -> None:
        """Store arrived messages. One that cannot be stored now stays at the head of `_arrived`."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        batch, arrived = Batch(self._inbox), self._arrived
        self._scheduled = False
        while arrived and not (self._stopping or self._waits or self._manager.under_pressure):
            visit, packet = arrived[0]
            # After a failed message, those that need an acknowledgement are redelivered by the broker.
            if (visit > self._failing or not packet.qos) and not self._handle(batch, visit, packet):
                break
            arrived.popleft()
            self._arrived_bytes -= _room_for(packet)
        if self._arrived_bytes <= INBOX_BYTES:
            self._client.release()
        if arrived and not self._stopping:
            self._scheduled = True
            self._retry = self._runtime.later(RETRY_INTERVAL, self._take)
        self._inbox.put(batch)

    def _handle(self, batch: Batch, visit: int, packet: Publish) -> bool:
        """Process one packet. Returns False if it must be retried."""
        here = self._connected and visit == self._visit
        if packet.head == PUBREL:
            if visit >= self._began:
                self._release(batch, packet, here=here)
            return True
        own = packet.packet_id
        if packet.qos == 2 and visit < self._began:
            packet = packet._replace(head=packet.head & 9 | 2)  # its id was one of another session
        elif packet.qos == 2:
            packet = packet._replace(packet_id=above(own))
            if packet.number in self.joined.incoming and not self._is_new(packet):
                if here:
                    batch.acks += answers.ack(PUBREC, own)  # once per packet id (4.3.3)
                    batch.touched[self.journal] = None
                return True
        brought = self._store(packet)
        if brought is None:
            return False
        batch.touched.update(dict.fromkeys(brought.touched))
        if packet.qos == 2:
            self.joined.take_ids((packet.number,))
            if brought.places:
                stored = packet._replace(topic=brought.topic)
                batch.use_id(self.journal, stored, brought.places, delivered=brought.delivered)
            else:
                batch.use_id_alone(self.journal, packet.number)
        if packet.qos and here:
            batch.acks += answers.ack(PUBACK if packet.qos == 1 else PUBREC, own)
        return True

    def _is_new(self, packet: Publish) -> bool:
        """Whether a QoS 2 id is free after all: the broker has begun another session (see `joined`)."""
        joined = self.joined
        if packet.head & 8 or not joined.doubtful or self._inbox.is_unstored(packet.number):
            return False
        joined.free_ids((packet.number,))
        self.journal.released(joined, packet.number)
        return True

    def _release(self, batch: Batch, packet: Publish, *, here: bool) -> None:
        """PUBREL: the broker releases a QoS 2 id. It is answered even for an unknown id (4.3.3)."""
        joined, own = self.joined, packet.packet_id
        number, reason = int.from_bytes(above(own), "big"), SUCCESS
        if number in batch.ids or self._inbox.is_unstored(number):
            self._client.end(
                f"it sent a PUBREL for packet id {packet.number} before its PUBREC", PROTOCOL_ERROR
            )
            return
        joined.partial.pop(number, None)
        if number in joined.incoming:
            joined.free_ids((number,))
            self.journal.released(joined, number)
            if joined.doubtful and not joined.incoming:
                joined.doubtful = False
                self.journal.joined(joined.record())
        elif self._client.level == V5:
            reason = PACKET_ID_NOT_FOUND
        if here:
            batch.acks += answers.ack(PUBCOMP, own, reason)
            batch.touched[self.journal] = None

    def _store(self, packet: Publish) -> Brought | None:
        """Give one message to the intake. Returns None if it must be retried."""
        brought = Brought((), {}, packet.topic)
        if self._mark is not None and self._mark in (packet.properties or {}).get(p.USER_PROPERTY, ()):
            self.counts["looped"] += 1
        elif not packet.topic:
            self.dropped("malformed", packet.payload.decode())
        else:
            try:
                brought = self._intake.take(packet)
            except (StreamError, RetainedFull, Unauthorized) as error:
                if packet.qos:
                    self._hold(error)
                    return None
                self.dropped(reason_of(error)[0], str(error))
        self.counts["received"] += 1
        self._held = None
        return brought

    # -- the line of the inbox -------------------------------------------------------------------

    def acknowledge(self, acks: bytes | bytearray) -> None:
        """Send acknowledgements, unless an earlier message of the connection was not stored."""
        if self._failed < self._visit:
            self._client.send(acks)

    def hold(self, why: str) -> None:
        """Take nothing more: too much waits for its commit, or, from this connection, a commit has failed."""
        if why == "failed":
            self._failing = self._visit
        else:
            self._waits = True

    def release(self, why: str) -> None:
        """Take messages again."""
        self._waits = False
        if not self._scheduled and self._arrived:
            self._scheduled = True
            self._runtime.soon(self._take)

    def fail(self, counter: str, why: str, reason: int, told: str = "") -> None:
        """A message was not stored: it comes again on a new connection, with all later ones."""
        log.error("%s; reconnecting", why)
        self.counts[counter] += 1
        self._failing = self._failed = visit = self._visit

        def reconnect() -> None:
            if visit == self._visit and not self._stopping:
                self._client.end("a message was not stored")

        self._runtime.later(RETRY_INTERVAL, reconnect)

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
