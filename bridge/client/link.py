"""One MQTT connection for requests and their replies, across interruptions.

    caller -- request --> pending --reply--> done
                            |  ^
       connection is lost   |  |  reconnected: sent again, if repeatable
                            v  |
                          (still pending)

* A request that is safe to repeat is sent again after each reconnect, with the same requestId, until it times
  out. Appends are safe, because a stream stores a message id once. Any other request (create, delete, purge)
  fails with ConnectionError: it is unknown whether it was carried out.
* MQTT 5 at QoS 0: within a connection the transport keeps order and completeness. What happens when it ends
  is decided here, and not by a second mechanism in between.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, NamedTuple

import cbor2
import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from bridge.client.exceptions import (
    ClientException,
    ConnectFailedException,
    RequestPayloadTooLargeException,
    StreamManagerException,
)

KEEP_ALIVE = 30
PACKET = 1024 * 1024  # bytes of a packet, if the broker does not say
ENVELOPE = 1024  # bytes of a packet beside the body


class _Request(NamedTuple):
    topic: str
    body: bytes
    repeatable: bool
    reply: Future[dict[str, Any]]


class Link:
    """The connection. Threads may share it; replies are matched by requestId."""

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
        reconnect_delay: tuple[float, float],
        logger: logging.Logger,
    ) -> None:
        """Connect; raises ConnectionError (no broker) or ConnectFailedException (refused)."""
        self._log = logger
        self._lock = threading.Lock()
        self._pending: dict[str, _Request] = {}
        self._up = threading.Event()
        self._first: Future[None] = Future()
        self._closed = False
        self.client_id = client_id
        self.most = PACKET - ENVELOPE  # bytes of a request
        self._mqtt = mqtt = paho.Client(
            CallbackAPIVersion.VERSION2, client_id, protocol=paho.MQTTv5, reconnect_on_failure=True
        )
        mqtt.connect_timeout = connect_timeout
        mqtt.reconnect_delay_set(*reconnect_delay)  # type: ignore[arg-type] # any number will do
        mqtt.on_connect, mqtt.on_subscribe = self._connected, self._subscribed
        mqtt.on_disconnect, mqtt.on_message = self._lost, self._arrived
        if username is not None:
            mqtt.username_pw_set(username, password)
        if tls is not None:
            mqtt.tls_set_context(tls)
        try:
            mqtt.connect(host, port, KEEP_ALIVE)
        except TimeoutError as error:
            raise ConnectionError(f"no answer from {host}:{port} in {connect_timeout} s") from error
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

    @property
    def connected(self) -> bool:
        """Whether the client is connected now."""
        return self._up.is_set() and not self._closed

    def call(
        self, operation: str, body: dict[str, Any], timeout: float, *, repeatable: bool
    ) -> dict[str, Any]:
        """Send a request and wait for its reply, for `timeout` seconds.

        Raises TimeoutError or, if the connection is lost, ConnectionError; and
        RequestPayloadTooLargeException for a request larger than the broker accepts.
        """
        until = time.monotonic() + timeout
        if not self._up.wait(timeout):
            raise ConnectionError(f"not connected for {timeout} s; {operation} was not sent")
        request_id = os.urandom(8).hex()
        data = cbor2.dumps({"requestId": request_id, **body})
        if len(data) > self.most:
            raise RequestPayloadTooLargeException(
                f"{operation}: the request has {len(data)} bytes, but the broker accepts at most {self.most}"
            )
        topic = f"streambridge/{self.client_id}/{operation}"
        request = _Request(topic, data, repeatable, Future())
        with self._lock:
            if self._closed:
                raise ClientException("the client is closed; make a new one")
            self._pending[request_id] = request
            if self._up.is_set():
                self._mqtt.publish(topic, data)
            elif not repeatable:
                del self._pending[request_id]
                raise ConnectionError(f"the connection was lost; {operation} was not sent")
        try:
            return request.reply.result(max(0.0, until - time.monotonic()))
        except FutureTimeout:
            if not self._up.is_set():
                raise ConnectionError(f"the connection was lost, and no reply to {operation} came") from None
            raise TimeoutError(f"no reply to {operation} in {timeout} s") from None
        finally:
            with self._lock:
                self._pending.pop(request_id, None)

    def close(self) -> None:
        """Disconnect; pending requests fail."""
        with self._lock:
            self._closed = True
            pending = list(self._pending.values())
        for request in pending:
            _fail(request, ClientException("the client was closed"))
        self._mqtt.disconnect()
        self._mqtt.loop_stop()
        self._up.set()  # wakes the calls that wait for a connection, and find the client closed

    # -- called by paho's thread ----------------------------------------------------------
    def _connected(
        self, mqtt: paho.Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Properties | None
    ) -> None:
        if reason.is_failure:
            self._log.error("the broker refuses the connection: %s", reason)
            if not self._first.done():
                self._first.set_exception(
                    ConnectFailedException(f"the broker refuses the connection: {reason}")
                )
            return
        self.most = getattr(properties, "MaximumPacketSize", PACKET) - ENVELOPE
        # The embedded broker replies without a subscription; an external one needs it before the request.
        mqtt.subscribe(f"streambridge/{self.client_id}/+/reply")

    def _subscribed(self, mqtt: paho.Client, *_: Any) -> None:
        with self._lock:
            for request in self._pending.values():
                mqtt.publish(request.topic, request.body)
            self._up.set()
        if not self._first.done():
            self._first.set_result(None)

    def _lost(
        self, mqtt: paho.Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Properties | None
    ) -> None:
        with self._lock:
            self._up.clear()
            lost = [request for request in self._pending.values() if not request.repeatable]
        if not self._closed:
            self._log.warning("connection lost: %s; reconnecting", reason)
        for request in lost:
            operation = request.topic.rsplit("/", 1)[1]
            _fail(
                request,
                ConnectionError(
                    f"the connection was lost before the reply; check whether {operation} was carried out"
                ),
            )

    def _arrived(self, mqtt: paho.Client, userdata: Any, message: paho.MQTTMessage) -> None:
        try:
            reply = cbor2.loads(message.payload)
            request_id = reply["requestId"]
        except (ValueError, KeyError, TypeError, EOFError) as error:
            self._log.error("a malformed reply on %s: %r", message.topic, error)
            return
        with self._lock:
            request = self._pending.get(request_id)
        if request is not None and not request.reply.done():
            request.reply.set_result(reply)


def _fail(request: _Request, error: StreamManagerException | ConnectionError) -> None:
    if not request.reply.done():
        request.reply.set_exception(error)
