"""The MQTT front end: devices publish, streams store, acknowledgements follow the commit.

Modules, each knowing only those before it: `properties`, `packets`, `answers` (the wire, pure functions);
`settings`, `headers`, `store` (contracts with the rest of the bridge); `access` (who may do what);
`message`, `outbox`, `sessions` (what subscribers are to be sent); `records`, `journal` (what of that
survives); `retained` (the newest message of a topic); `turns` (what costly packets get of a turn of the
event loop); `delivery` (amqtt: live copies of ordinary messages); `router` (where a message goes);
`requests` (the operations on streams); `batch` (acknowledgements that wait for commits); `publishing`,
`control`, `handshake` (packets and what they do); `connection` (one client), `websocket` (its transport in
a browser), `tls` (its way in when it is encrypted); `recovery` (what the journal tells), `lane` (all
clients); `external` (instead of all that, the messages of an existing broker); `frontend` (the door).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.mqtt.frontend import MqttFrontEnd

__all__ = ["MqttFrontEnd"]


def __getattr__(name: str) -> Any:
    # The configuration needs only `settings`; amqtt takes a while to import.
    if name == "MqttFrontEnd":
        from bridge.mqtt.frontend import MqttFrontEnd

        return MqttFrontEnd
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
