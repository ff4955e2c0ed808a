"""Requests over MQTT: a PUBLISH to `streambridge/<client id>/<operation>`, the reply on the same topic with
`/reply` appended.

MQTT 5 at QoS 0: within a connection the transport keeps order and completeness. What happens when it ends is
decided by `Link`, and not by a second mechanism in between. paho's thread reads, writes and reconnects.
"""

from __future__ import annotations

import logging
import ssl
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from bridge.client.exceptions import ConnectFailedException, RequestPayloadTooLargeException
from bridge.client.link import Link, Reconnect, Request

KEEP_ALIVE = 30  # seconds
PACKET = 1024 * 1024  # bytes of a packet, if the broker does not say
ENVELOPE = 1024  # bytes of a packet beside the body


class MqttLink(Link):
    """A connection to the MQTT listener."""

    EXTENDED = True

    def __init__(
        self,
        host: str,
        port: int,
        *,
        client_id: str,
        username: str | None,
        password: str | None,
        tls: ssl.SSLContext | None,
        connect_timeout: float,
        reconnect: Reconnect,
        logger: logging.Logger,
    ) -> None:
        """Connect; raises ConnectionError (no broker) or ConnectFailedException (refused)."""
        super().__init__(logger)
        self._client_id = client_id
        self.most = PACKET - ENVELOPE
        self._mqtt = mqtt = paho.Client(
            CallbackAPIVersion.VERSION2, client_id, protocol=paho.MQTTv5, reconnect_on_failure=True
        )
        mqtt.connect_timeout = connect_timeout
        mqtt.reconnect_delay_set(*reconnect)  # type: ignore[arg-type] # any number will do
        mqtt.on_connect, mqtt.on_subscribe = self._on_connect, lambda *_: self._restored()
        mqtt.on_disconnect, mqtt.on_message = self._on_disconnect, self._on_message
        if username is not None:
            mqtt.username_pw_set(username, password)
        if tls is not None:
            mqtt.tls_set_context(tls)
        try:
            mqtt.connect(host, port, KEEP_ALIVE)
        except TimeoutError as error:
            raise ConnectionError(f"no answer from {host}:{port} in {connect_timeout:g} s") from error
        except OSError as error:
            raise ConnectionError(f"cannot connect to {host}:{port}: {error}") from error
        mqtt.loop_start()
        try:
            self._first.result(connect_timeout)
        except FutureTimeout:
            self.close()
            raise ConnectionError(f"{host}:{port} accepts connections, but does not answer in MQTT") from None
        except ConnectFailedException:
            self.close()
            raise

    def _encoded(self, operation: str, body: dict[str, Any]) -> bytes:
        data = super()._encoded(operation, body)
        if len(data) > self.most:
            raise RequestPayloadTooLargeException(
                f"{operation}: the request has {len(data)} bytes, but the broker accepts at most {self.most}"
            )
        return data

    def _send(self, request: Request) -> None:
        self._mqtt.publish(f"streambridge/{self._client_id}/{request.operation}", request.data)

    def _disconnect(self) -> None:
        self._mqtt.disconnect()
        self._mqtt.loop_stop()

    # -- called by paho's thread ----------------------------------------------------------
    def _on_connect(
        self, mqtt: paho.Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Properties | None
    ) -> None:
        if reason.is_failure:
            error = f"the broker refuses the connection: {reason}"
            self._log.error("%s", error)
            if not self._first.done():
                self._first.set_exception(ConnectFailedException(error))
            return
        self.most = getattr(properties, "MaximumPacketSize", PACKET) - ENVELOPE
        # The embedded broker replies without a subscription; an external one needs it before the request.
        mqtt.subscribe(f"streambridge/{self._client_id}/+/reply")

    def _on_disconnect(
        self, mqtt: paho.Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Properties | None
    ) -> None:
        self._interrupted(reason)

    def _on_message(self, mqtt: paho.Client, userdata: Any, message: paho.MQTTMessage) -> None:
        self._arrived(bytes(message.payload))
