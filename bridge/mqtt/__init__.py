"""MQTT: devices publish, streams store, acknowledgements follow the commit.

wire       packets and properties: bytes to values and back. Pure
broker     sessions, subscriptions, retained messages, wills, outgoing queues, journal: the state of MQTT
server     listeners, TLS, WebSocket, one Connection per client
upstream   other brokers: messages from them
settings   the sections [mqtt] and [[upstream]] of the configuration
mappings   topics of another broker, and where their messages go here
frontend   what the service starts and stops, in either mode
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.mqtt.frontend import MqttFrontEnd

__all__ = ["MqttFrontEnd"]


def __getattr__(name: str) -> Any:
    # The configuration needs only `settings`.
    if name == "MqttFrontEnd":
        from bridge.mqtt.frontend import MqttFrontEnd

        return MqttFrontEnd
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
