"""The pending requests of one connection, also while it is interrupted.

    submit --> QUEUED --connected--> SENT --reply--> done
                 ^                    |
                 |                    | interrupted
                 +--- repeatable -----+---- not repeatable --> ConnectionError

* A request that is submitted while there is no connection is sent once there is one.
* When the connection is interrupted, a repeatable request is sent again on the next one, with the same
  requestId. Any other request fails: nobody knows whether the service carried it out.
* A request has no time-out here. The caller waits as long as it likes, then calls `forget`.

`MqttLink` and `StreamManagerLink` are the two transports. A link may be shared by threads; its requests are
completed by a thread of the transport.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import cbor2

from bridge.client.exceptions import ClientException, StreamManagerException

Reply = dict[str, Any]


class Reconnect(NamedTuple):
    """Seconds to wait before the first attempt to reconnect, and at most: the wait doubles each time."""

    first: float
    longest: float


class Request:
    """A request on its way. `reply` is completed with the body of the reply, or with an exception."""

    def __init__(self, operation: str, request_id: str, data: bytes, *, repeatable: bool) -> None:
        """`data` is the encoded body."""
        self.operation, self.request_id, self.data, self.repeatable = operation, request_id, data, repeatable
        self.sent = False
        self.reply: Future[Reply] = Future()

    def fail(self, error: StreamManagerException | ConnectionError) -> None:
        """Complete it with an exception, unless it is complete or its caller has gone."""
        with suppress(InvalidStateError):
            self.reply.set_exception(error)

    def done(self, reply: Reply) -> None:
        """Complete it with the body of the reply, unless it is complete or its caller has gone."""
        with suppress(InvalidStateError):
            self.reply.set_result(reply)


class Link(ABC):
    """One connection for requests and their replies. The transport is connected when it has been made."""

    EXTENDED: ClassVar[bool]  # whether the service understands everything that the AWS SDK lacks
    most: int  # bytes that an encoded body may have

    def __init__(self, log: logging.Logger) -> None:
        """Begin without a connection."""
        self._log = log
        self._lock = threading.Lock()
        self._pending: dict[str, Request] = {}
        self._up = self._closed = False
        self._first: Future[None] = Future()  # the result of the first attempt to connect

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._up and not self._closed

    def submit(self, operation: str, body: dict[str, Any], *, repeatable: bool) -> Request:
        """Send a request now, or as soon as there is a connection.

        Raises ClientException if the link is closed, and an exception of the transport for a request that it
        cannot carry.
        """
        request_id = os.urandom(8).hex()
        data = self._encoded(operation, {"requestId": request_id, **body})
        request = Request(operation, request_id, data, repeatable=repeatable)
        with self._lock:
            if self._closed:
                raise ClientException("the client is closed; make a new one")
            self._pending[request_id] = request
            if self._up:
                self._transmit(request)
        return request

    def forget(self, request: Request) -> None:
        """The caller no longer waits for this request."""
        with self._lock:
            self._pending.pop(request.request_id, None)

    def overdue(self, request: Request, timeout: float) -> OSError:
        """Return the exception for a request without a reply after `timeout` seconds."""
        if not request.sent:
            return ConnectionError(f"not connected for {timeout:g} s; {request.operation} was not sent")
        if not self.connected:
            return ConnectionError(f"the connection was lost, and no reply to {request.operation} arrived")
        return TimeoutError(f"no reply to {request.operation} in {timeout:g} s")

    def close(self) -> None:
        """Disconnect; pending requests fail."""
        with self._lock:
            self._closed = True
            pending = list(self._pending.values())
        for request in pending:
            request.fail(ClientException("the client was closed"))
        self._disconnect()

    # -- for the transports ---------------------------------------------------------------
    @abstractmethod
    def _send(self, request: Request) -> None:
        """Send a request without blocking, in the order of the calls."""

    @abstractmethod
    def _disconnect(self) -> None:
        """End the connection and the threads."""

    def _encoded(self, operation: str, body: dict[str, Any]) -> bytes:
        """Return the bytes of a body. A transport that carries less refuses the rest here."""
        return cbor2.dumps(body)

    def _transmit(self, request: Request) -> None:
        request.sent = True
        self._send(request)

    def _restored(self) -> None:
        """There is a connection: send what is pending."""
        with self._lock:
            for request in self._pending.values():
                if not request.reply.done():
                    self._transmit(request)
            self._up = True
        if not self._first.done():
            self._first.set_result(None)

    def _interrupted(self, reason: object) -> None:
        """There is no connection any more."""
        with self._lock:
            was_up, self._up = self._up, False
            lost = [one for one in self._pending.values() if one.sent and not one.repeatable]
        if was_up and not self._closed:
            self._log.warning("connection lost: %s; reconnecting", reason)
        for request in lost:
            request.fail(
                ConnectionError(
                    f"the connection was lost before the reply; check whether {request.operation} was "
                    "carried out"
                )
            )

    def _arrived(self, data: bytes) -> None:
        """Complete the request that these bytes reply to."""
        try:
            reply = cbor2.loads(data)
            with self._lock:
                request = self._pending.get(reply["requestId"])
        except Exception as error:  # whatever another client sends here must not end the transport's thread
            self._log.error("a malformed reply: %r", error)
            return
        if request is not None:
            request.done(reply)
