"""paho for upstreams: connects as the settings say, and turns messages into PUBLISH packets.

The password and the certificates are read for each connection. If a file cannot be read, the last readable
content is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
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


class Client(paho.Client):
    """paho, but PUBLISH packets go to `on_packet`.

    paho takes some correct properties for malformed, such as those with U+FEFF, and ends the connection. The
    broker then delivers the same message again on each new one.
    """

    on_packet: Callable[[Publish], None]

    def _handle_publish(self) -> MQTTErrorCode:
        head, body = self._in_packet["command"], bytes(self._in_packet["packet"])
        if head & 4:  # no subscription asks for QoS 2
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        self.on_packet(packet_of(head, body, v5=self._protocol == paho.MQTTv5))
        return MQTTErrorCode.MQTT_ERR_SUCCESS


def make_client(settings: BrokerSettings, client_id: str, named: Named) -> Client:
    """Make a client that has not connected yet. Raises ConfigError for a file that cannot be used."""
    v5 = settings.protocol == "5"
    client = Client(
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


def packet_of(head: int, body: bytes, *, v5: bool) -> Publish:
    """Convert a PUBLISH of QoS 0 or 1. Its topic is that of the broker.

    It has no topic, and its payload says why, if its topic or its properties are malformed.
    """
    end = 2 + int.from_bytes(body[:2], "big")
    start = end + (2 if head & 6 else 0)
    topic, packet_id = body[2:end], body[end:start]
    properties: p.Properties = {}
    try:
        topic.decode()
        if v5:
            found, start = p.read_properties(body, start, len(body), PUBLISH)
            properties = {kind: value for kind, value in found.items() if kind in _KEPT}
    except (UnicodeDecodeError, p.PropertyError) as error:
        return Publish(head, b"", packet_id, str(error).encode())
    return Publish(head, topic, packet_id, body[start:], properties or None)


_KEPT = {
    p.PAYLOAD_FORMAT,
    p.MESSAGE_EXPIRY,
    p.CONTENT_TYPE,
    p.RESPONSE_TOPIC,
    p.CORRELATION_DATA,
    p.USER_PROPERTY,
}
