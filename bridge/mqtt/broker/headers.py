"""The headers that a stream keeps of a PUBLISH; their layout is in `bridge.streams.headers`."""

from __future__ import annotations

import time

from bridge.mqtt.wire import properties as p
from bridge.streams.headers import Headers, encode


def of_publish(flags: int, properties: p.Properties, client: str, packet_id: int, refused: str = "") -> bytes:
    """The headers of a PUBLISH: from its fixed header's flags, its MQTT 5 properties and who sent it."""
    expiry = properties.get(p.MESSAGE_EXPIRY)
    return encode(
        Headers(
            retain=bool(flags & 1),
            dup=bool(flags & 8),
            client=client,
            id=packet_id if flags & 6 == 4 else 0,
            user=[(name.decode(), value.decode()) for name, value in properties.get(p.USER_PROPERTY, ())],
            type=properties.get(p.CONTENT_TYPE, b"").decode(),
            utf8=bool(properties.get(p.PAYLOAD_FORMAT)),
            reply=properties.get(p.RESPONSE_TOPIC, b"").decode(),
            token=properties.get(p.CORRELATION_DATA, b""),
            expires=int((time.time() + expiry) * 1000) if expiry is not None else 0,
            refused=refused,
        )
    )
