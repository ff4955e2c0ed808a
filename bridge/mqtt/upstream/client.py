"""paho for upstreams: connects as the settings say, and turns messages into PUBLISH packets.

The password and the certificates are read for each connection. If a file cannot be read, the last readable
content is used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties

from bridge.errors import ConfigError
from bridge.mqtt.settings import BrokerSettings
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import PUBLISH, Publish
from bridge.net.brokers import Named, host_and_port, load_certificates, read_password, tls_context

log = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 1, 60  # seconds between attempts to connect
# Messages that an MQTT 5 broker may send before the first is acknowledged. So while messages are held, the
# broker waits and the connection stays usable.
RECEIVE_MAXIMUM = 1_000


def make_client(settings: BrokerSettings, client_id: str, named: Named) -> paho.Client:
    """Make a client that has not connected yet. Raises ConfigError for a file that cannot be used."""
    v5 = settings.protocol == "5"
    client = paho.Client(
        CallbackAPIVersion.VERSION2,
        client_id,
        clean_session=None if v5 else False,
        protocol=paho.MQTTv5 if v5 else paho.MQTTv311,
        manual_ack=True,
    )
    client.reconnect_delay_set(FIRST_DELAY, LONGEST_DELAY)
    ca, cert, key = settings.ca, settings.cert, settings.key
    try:
        password = read_password(settings.password_file, named)
        tls = tls_context(settings.url, named, ca=ca, cert=cert, key=key, alpn=settings.alpn)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if settings.username is not None:
        client.username_pw_set(settings.username, password)
    if tls is not None:
        client.tls_set_context(tls)

    def renew(client: paho.Client, _data: Any) -> None:
        try:
            if settings.username is not None:
                client.username_pw_set(settings.username, read_password(settings.password_file, named))
            if tls is not None:
                load_certificates(tls, named, ca=ca, cert=cert, key=key)
        except ValueError as error:
            log.warning("%s; connecting with what was read before", error)

    client.on_pre_connect = renew
    return client


def begin(client: paho.Client, settings: BrokerSettings) -> None:
    """Connect, and reconnect without limit, in a thread of paho."""
    options: dict[str, Any] = {"keepalive": settings.keep_alive}
    if settings.protocol == "5":
        properties = PahoProperties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = settings.session_seconds
        properties.ReceiveMaximum = RECEIVE_MAXIMUM
        options.update(clean_start=False, properties=properties)
    host, port = host_and_port(settings.url)
    client.connect_async(host, port, **options)
    client.loop_start()


def packet_of(message: paho.MQTTMessage) -> Publish:
    """Convert a message that paho has received. Its topic is that of the broker."""
    head = PUBLISH | (8 if message.dup else 0) | message.qos << 1 | bool(message.retain)
    packet_id = message.mid.to_bytes(2, "big") if message.qos else b""
    return Publish(head, message.topic.encode(), packet_id, bytes(message.payload), _properties(message))


def _properties(message: paho.MQTTMessage) -> p.Properties | None:
    """Convert the MQTT 5 properties of a message."""
    given = getattr(message, "properties", None)
    if given is None:
        return None
    found: p.Properties = {}
    for kind, name in _NAMES:
        value = getattr(given, name, None)
        if value is not None:
            found[kind] = value.encode() if isinstance(value, str) else value
    if users := getattr(given, "UserProperty", None):
        found[p.USER_PROPERTY] = [(name.encode(), value.encode()) for name, value in users]
    return found or None


_NAMES: Iterable[tuple[int, str]] = (
    (p.PAYLOAD_FORMAT, "PayloadFormatIndicator"),
    (p.MESSAGE_EXPIRY, "MessageExpiryInterval"),
    (p.CONTENT_TYPE, "ContentType"),
    (p.RESPONSE_TOPIC, "ResponseTopic"),
    (p.CORRELATION_DATA, "CorrelationData"),
)
