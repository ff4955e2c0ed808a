"""`StreamManagerClient`: the AWS SDK's client, over MQTT.

The methods, classes and exceptions are those of the package `stream-manager`, so a program only changes its
import line. In addition:

* `append_messages` appends many messages in one request, `tail` iterates over a stream as it grows, and
  `purge_message_stream` drops messages.
* `fetch_messages` and `ack_messages` are for the workers of a consumer; `consume` iterates over its messages.
* Appends are stored once. Each carries a message id, and is sent again with the same id if the connection was
  lost before its reply. The stream remembers ids for its deduplication window (two minutes without one); keep
  `request_timeout` shorter than that. An append that raises TimeoutError or ConnectionError may or may not be
  stored: call again with the same `message_id`, and it is stored once in either case.
* Calls wait for a lost connection to be restored, for up to `request_timeout`.
"""

from __future__ import annotations

import logging
import os
import secrets
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Self

from bridge.client.data import (
    Message,
    MessageStreamDefinition,
    MessageStreamInfo,
    ReadMessagesOptions,
    ResponseStatusCode,
)
from bridge.client.exceptions import (
    BY_STATUS,
    NotEnoughMessagesException,
    StreamManagerException,
    ValidationException,
)
from bridge.client.link import Link

PER_MESSAGE = 64  # bytes of a request for each message beside its payload: its id, and CBOR's lengths
PER_REQUEST = 1024


class StreamManagerClient:
    """A connection to streambridge. Threads may share it."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int | None = None,
        connect_timeout: float = 3,
        request_timeout: float = 60,
        logger: logging.Logger = logging.getLogger("StreamManagerClient"),  # noqa: B008 - as the SDK has it
        *,
        client_id: str | None = None,
        username: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
        reconnect_delay: tuple[float, float] = (1, 8),
    ) -> None:
        """Connect to the broker, by default on port 1883, or 8883 with `tls`; times are in seconds.

        `reconnect_delay` is the wait before the first attempt to reconnect, and the longest wait: it doubles
        with every attempt. Raises ConnectionError if there is no MQTT broker, ConnectFailedException if the
        broker refuses.
        """
        self.host, self.port = host, port or (1883 if tls is None else 8883)
        self.connect_timeout, self.request_timeout, self.logger = connect_timeout, request_timeout, logger
        self._closed = False
        self._link = Link(
            self.host,
            self.port,
            client_id=client_id or f"sm-{secrets.token_hex(8)}",
            username=username,
            password=password,
            tls=tls,
            connect_timeout=connect_timeout,
            reconnect_delay=reconnect_delay,
            logger=logger,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether the client is connected now."""
        return self._link.connected

    def close(self) -> None:
        """Disconnect; the client cannot be used again."""
        if not self._closed:
            self._closed = True
            self._link.close()

    # -- the SDK's operations -----------------------------------------------------------
    def create_message_stream(self, definition: MessageStreamDefinition) -> None:
        """Create a stream; raises InvalidRequestException if one has this name already."""
        self._call("createMessageStream", {"definition": _checked(definition)}, repeatable=False)

    def update_message_stream(
        self, definition: MessageStreamDefinition, *, if_version: str | None = None
    ) -> None:
        """Replace a stream's definition; with `if_version`, only if it has not been changed since.

        The version is that of `describe_message_stream`; raises UpdateFailedException if it has changed.
        """
        body: dict[str, Any] = {"definition": _checked(definition)}
        if if_version is not None:  # a repeated request would find the version changed by the first one
            self._call("updateMessageStream", body | {"ifVersion": if_version}, repeatable=False)
        else:
            self._call("updateMessageStream", body)

    def delete_message_stream(self, stream_name: str) -> None:
        """Delete a stream and its messages."""
        self._call("deleteMessageStream", {"name": stream_name}, repeatable=False)

    def describe_message_stream(self, stream_name: str) -> MessageStreamInfo:
        """Return a stream's definition, its storage status, and the status of its exports."""
        reply = self._call("describeMessageStream", {"name": stream_name})
        return MessageStreamInfo.from_dict(reply["messageStreamInfo"])

    def list_streams(self) -> list[str]:
        """Return the names of the streams."""
        names: list[str] = self._call("listStreams", {})["streams"]
        return names

    def describe_message_streams(self) -> Iterator[MessageStreamInfo]:
        """Describe all streams, by name, as many in each request as a reply holds."""
        after, more = "", True
        while more:
            reply = self._call("listStreams", {"details": True, "after": after})
            for raw in reply["messageStreamInfos"]:
                yield MessageStreamInfo.from_dict(raw)
            more = reply["more"]
            after = reply["streams"][-1] if reply["streams"] else ""

    def append_message(self, stream_name: str, data: bytes, *, message_id: bytes | None = None) -> int:
        """Append a message and return its sequence number once it is stored."""
        if not isinstance(data, bytes) or not data:
            raise ValidationException("data must be bytes, at least one")
        body = {"name": stream_name, "payload": data, "messageId": message_id or os.urandom(12)}
        number: int = self._call("appendMessage", body)["sequenceNumber"]
        return number

    def read_messages(self, stream_name: str, options: ReadMessagesOptions | None = None) -> list[Message]:
        """Read messages, by default the oldest one; raises NotEnoughMessagesException."""
        wait = 0
        if options is not None:
            if not isinstance(options, ReadMessagesOptions):
                raise ValidationException("options must be a ReadMessagesOptions")
            options.check()
            most, wait = options.max_message_count, options.read_timeout_millis or 0
            if most is not None and (options.min_message_count or 1) > most:
                raise ValidationException("min_message_count must be less than or equal to max_message_count")
            if wait > self.request_timeout * 1000:
                raise ValidationException("read_timeout_millis must not be more than request_timeout")
        body: dict[str, Any] = {"streamName": stream_name}
        if options is not None:
            body["readMessagesOptions"] = options.as_dict()
        return [Message(**_message(raw)) for raw in self._call("readMessages", body)["messages"]]

    # -- not in the SDK -------------------------------------------------------------------
    def append_messages(
        self, stream_name: str, data: Sequence[bytes], *, message_ids: Sequence[bytes] | None = None
    ) -> list[int]:
        """Append many messages in order and return their sequence numbers once all are stored.

        They are split into requests that fit into packets. If a message cannot be stored, those before it are
        stored and those after it are not; `sequence_numbers` of the exception has the numbers of the stored
        ones.
        """
        if not data or not all(isinstance(payload, bytes) and payload for payload in data):
            raise ValidationException("data must be a list of bytes, none of them empty")
        if message_ids is not None and len(message_ids) != len(data):
            raise ValidationException(f"{len(data)} messages, but {len(message_ids)} message_ids")
        run = os.urandom(12)
        ids = message_ids or [run + number.to_bytes(4, "big") for number in range(len(data))]
        numbers: list[int] = []
        while len(numbers) < len(data):
            first = last = len(numbers)
            size = PER_REQUEST
            while last < len(data):
                size += len(data[last]) + len(ids[last]) + PER_MESSAGE
                if last > first and size > self._link.most:
                    break
                last += 1
            body = {"name": stream_name, "payloads": data[first:last], "messageIds": ids[first:last]}
            try:
                numbers += self._call("appendMessages", body)["sequenceNumbers"]
            except StreamManagerException as error:
                error.sequence_numbers = numbers + error.sequence_numbers
                raise
        return numbers

    def tail(
        self,
        stream_name: str,
        start: int | None = None,
        *,
        topic: str | None = None,
        timeout: float | None = None,
    ) -> Iterator[Message]:
        """Iterate over a stream's messages from number `start`, waiting for new ones.

        Without `start`, from the next message that is appended. Ends when no message arrived for `timeout`
        seconds (None: never), and raises ResourceNotFoundException when the stream is deleted. Messages that
        limits have dropped are skipped. A lost connection does not end it.
        """
        if start is None:
            info = self._call("describeMessageStream", {"name": stream_name})["messageStreamInfo"]
            start = info["storageStatus"]["newestSequenceNumber"] + 1
        newest = time.monotonic()  # when the last message arrived
        while True:
            left = 10.0 if timeout is None else newest + timeout - time.monotonic()
            wait = max(1, int(min(left, 10.0, self.request_timeout / 2) * 1000))
            options = ReadMessagesOptions(start, 1, 1000, wait, topic)
            try:
                found = self.read_messages(stream_name, options)
            except (NotEnoughMessagesException, TimeoutError, ConnectionError):
                if timeout is not None and time.monotonic() - newest >= timeout:
                    return
                continue
            yield from found
            start = (found[-1].sequence_number or 0) + 1
            newest = time.monotonic()

    def purge_message_stream(
        self, stream_name: str, *, upto: int | None = None, topic: str | None = None
    ) -> int:
        """Drop all messages, those below number `upto`, or those on a topic filter; return how many."""
        body = {"name": stream_name, "upto": upto, "topic": topic}
        given = {k: v for k, v in body.items() if v is not None}
        reply = self._call("purgeMessageStream", given, repeatable=False)
        number: int = reply["purgedMessages"]
        return number

    def fetch_messages(
        self, stream_name: str, consumer: str, max_message_count: int = 1, timeout_millis: int = 0
    ) -> list[Message]:
        """Fetch messages of a consumer; waits up to `timeout_millis` for the first one, then returns none.

        They are this client's until the consumer's deadline: report to `ack_messages` what became of each. A
        message that is not acknowledged is delivered again; `deliveries` says how often it was.
        """
        if timeout_millis > self.request_timeout * 1000:
            raise ValidationException("timeout_millis must not be more than request_timeout")
        body = {
            "name": stream_name,
            "consumer": consumer,
            "maxMessageCount": max_message_count,
            "timeoutMillis": timeout_millis,
        }
        return [Message(**_message(raw)) for raw in self._call("fetchMessages", body)["messages"]]

    def ack_messages(
        self,
        stream_name: str,
        consumer: str,
        ack: Sequence[int] = (),
        *,
        nack: Sequence[int] = (),
        delay_millis: int = 0,
        in_progress: Sequence[int] = (),
        terminate: Sequence[int] = (),
        reason: str = "",
    ) -> list[int]:
        """Report what became of fetched messages, by sequence number; returns when that is stored.

        `ack`: done. `nack`: deliver again, after `delay_millis`. `in_progress`: the deadline begins anew.
        `terminate`: never deliver again, because of `reason`. Returns the numbers to which this did not
        apply: settled before, or another client's.
        """
        body = {
            "name": stream_name,
            "consumer": consumer,
            "ack": list(ack),
            "nack": list(nack),
            "delayMillis": delay_millis,
            "inProgress": list(in_progress),
            "terminate": list(terminate),
            "reason": reason,
        }
        numbers: list[int] = self._call("ackMessages", body)["notPending"]
        return numbers

    def consume(
        self,
        stream_name: str,
        consumer: str,
        *,
        max_message_count: int = 1,
        timeout: float | None = None,
    ) -> Iterator[Message]:
        """Iterate over the messages of a consumer, waiting for new ones; acknowledge each yourself.

        `max_message_count` are fetched at a time: their deadlines run while the first one is worked on. Ends
        when no message came for `timeout` seconds (None: never). A lost connection does not end it.
        """
        newest = time.monotonic()  # when the last message came
        while True:
            left = 10.0 if timeout is None else newest + timeout - time.monotonic()
            wait = max(1, int(min(left, 10.0, self.request_timeout / 2) * 1000))
            found: list[Message] = []
            with suppress(TimeoutError, ConnectionError):
                found = self.fetch_messages(stream_name, consumer, max_message_count, wait)
            if found:
                yield from found
                newest = time.monotonic()
            elif timeout is not None and time.monotonic() - newest >= timeout:
                return

    def _call(self, operation: str, body: dict[str, Any], *, repeatable: bool = True) -> dict[str, Any]:
        if self._closed:
            raise StreamManagerException("Client is closed. Create a new client first.")
        reply = self._link.call(operation, body, self.request_timeout, repeatable=repeatable)
        status = reply.get("status")
        if status == ResponseStatusCode.Success:
            return reply
        kind = BY_STATUS.get(status) if isinstance(status, int) else None
        failed = (kind or StreamManagerException)(
            str(reply.get("errorMessage", "")),
            status if isinstance(status, int) else None,
            reply["requestId"],
        )
        failed.sequence_numbers = list(reply.get("sequenceNumbers", ()))
        raise failed


def _checked(definition: MessageStreamDefinition) -> dict[str, Any]:
    if not isinstance(definition, MessageStreamDefinition):
        raise ValidationException("definition must be a MessageStreamDefinition")
    definition.check()
    return definition.as_dict()


def _message(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Message; by hand, because a read may return thousands."""
    return {
        "stream_name": raw["streamName"],
        "sequence_number": raw["sequenceNumber"],
        "ingest_time": raw["ingestTime"],
        "payload": raw["payload"],
        "topic": raw.get("topic"),
        "headers": raw.get("headers"),
        "deliveries": raw.get("deliveries"),
    }
