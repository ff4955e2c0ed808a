"""The topics below `$SYS/broker/`: the state of the broker, with the names and units of Mosquitto.

Every `sys_interval` the averages are computed, and each topic whose value has changed is published to its
subscribers. Without subscribers only the averages are computed. A new subscription gets the current values as
retained messages, which are not stored.

    load/.../1min, 5min, 15min      exponential averages per minute, with two decimals
    clients/...                     connected and disconnected sessions
    store/messages/...              messages that are retained or queued for sessions; bytes include topics
    heap/...                        resident memory of the process, in bytes
    messages/..., bytes/...         MQTT packets of all types, after TLS and WebSocket
    publish/bytes/...               PUBLISH packets, with their topics

It differs from Mosquitto in three ways: the messages have QoS 0, because only the newest value matters;
`$SYS/broker/version` names this broker; publish/bytes/... count whole packets, not only payloads.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.mqtt.broker.message import Message

if TYPE_CHECKING:
    from bridge.mqtt.server.connections import Connections
    from bridge.runtime import Runtime, Timer

ROOT = "$SYS/broker/"
MINUTES = (1, 5, 15)
FRESH = 1.0  # seconds for which new subscriptions share the same values


class SysTopics:
    """Makes the messages. For a new subscription, the router asks it for the current values."""

    def __init__(self, connections: Connections, runtime: Runtime, interval: float) -> None:
        """`interval` in seconds; 0: there are no such topics."""
        self._connections, self._broker = connections, connections.broker
        self._runtime, self._interval = runtime, interval
        self._began = self._made = runtime.now()
        self._timer: Timer | None = None
        self._most_clients = 0
        self._last: dict[str, int] = {}
        self._loads: dict[str, float] = {}
        self._messages: dict[str, Message] = {}
        self._published: dict[str, bytes] = {}
        try:
            self._version = f"streambridge {version('streambridge')}"
        except PackageNotFoundError:
            self._version = "streambridge"

    def start(self) -> None:
        """Start publishing."""
        if self._interval:
            self._last = self._counted()
            self._broker.router.feeds.live = self
            self._timer = self._runtime.later(self._interval, self._tick)

    def stop(self) -> None:
        """Stop publishing."""
        self._broker.router.feeds.live = None
        if self._timer is not None:
            self._timer.cancel()

    # -- for the router ----------------------------------------------------------------------------------

    def names(self, topic_filter: str) -> list[str]:
        """Return the topics that a filter may match; none unless it begins with `$SYS/`."""
        if not topic_filter.startswith("$SYS/"):
            return []
        if not self._messages or self._runtime.now() - self._made >= FRESH:
            self._make()
        return list(self._messages)

    def get(self, name: str) -> Message | None:
        """Return the message of a topic."""
        return self._messages.get(name)

    # -- every interval ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._runtime.later(self._interval, self._tick)
        self._average()
        router = self._broker.router
        if not router.anyone_names("$SYS"):
            self._messages, self._published = {}, {}
            return
        self._make()
        for name, message in self._messages.items():
            if self._published.get(name) != message.payload:
                self._published[name] = message.payload
                router.publish(router.route(message.topic), message)

    def _average(self) -> None:
        """Update the averages as Mosquitto does in `sys_tree.c`."""
        counted, minutes = self._counted(), self._interval / 60
        for name, number in counted.items():
            per_minute = (number - self._last[name]) / minutes
            for length in MINUTES:
                key = f"load/{name}/{length}min"
                decay = math.exp(-minutes / length)
                self._loads[key] = per_minute + decay * (self._loads.get(key, 0.0) - per_minute)
        self._last = counted

    def _counted(self) -> dict[str, int]:
        """Return the counters that have averages."""
        traffic, counts = self._connections.traffic, self._broker.counts
        dropped = sum(number for what, number in counts.items() if what.startswith("dropped_"))
        self._most_clients = max(self._most_clients, len(self._broker.sessions))
        return {
            "messages/received": traffic.published + traffic.others,
            "messages/sent": traffic.sent_packets,
            "publish/dropped": dropped,
            "publish/received": traffic.published,
            "publish/sent": counts["delivered"],
            "bytes/received": traffic.received_bytes,
            "bytes/sent": traffic.all_sent_bytes,
            "sockets": counts["accepted"],
            "connections": traffic.connects,
        }

    def _make(self) -> None:
        self._made = self._runtime.now()
        self._messages = {
            f"{ROOT}{name}": Message(f"{ROOT}{name}".encode(), text.encode()) for name, text in self._values()
        }

    def _values(self) -> Iterator[tuple[str, str]]:
        """Yield all topics below `$SYS/broker/` with their payloads."""
        broker, traffic, counted = self._broker, self._connections.traffic, self._counted()
        sessions = broker.sessions.all()
        connected = sum(session.line is not None for session in sessions)
        queued = sum(len(session.outbox) for session in sessions)
        retained = broker.router.retained
        size = retained.size + sum(session.outbox.size for session in sessions)
        numbers = {
            "clients/total": len(sessions),
            "clients/maximum": self._most_clients,
            "clients/connected": connected,
            "clients/active": connected,
            "clients/disconnected": len(sessions) - connected,
            "clients/inactive": len(sessions) - connected,
            "clients/expired": broker.counts["expired_sessions"],
            "messages/received": counted["messages/received"],
            "messages/sent": counted["messages/sent"],
            "messages/stored": len(retained) + queued,
            "store/messages/count": len(retained) + queued,
            "store/messages/bytes": size,
            "retained messages/count": len(retained),
            "subscriptions/count": sum(len(session.subscriptions) for session in sessions),
            "shared_subscriptions/count": len(broker.router.groups),
            "bytes/received": counted["bytes/received"],
            "bytes/sent": counted["bytes/sent"],
            "publish/messages/received": counted["publish/received"],
            "publish/messages/sent": counted["publish/sent"],
            "publish/messages/dropped": counted["publish/dropped"],
            "publish/bytes/received": traffic.published_bytes,
            "publish/bytes/sent": broker.counts["delivered_bytes"],
            "heap/current": (heap := _resident()),
            # The kernel knows the present size exactly, but updates the maximum rarely.
            "heap/maximum": max(heap, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        }
        yield "version", self._version
        yield "uptime", f"{int(self._runtime.now() - self._began)} seconds"
        for name, number in numbers.items():
            yield name, str(number)
        for what in counted:
            for length in MINUTES:
                key = f"load/{what}/{length}min"
                yield key, f"{self._loads.get(key, 0.0):.2f}"


def _resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
