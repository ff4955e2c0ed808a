"""`StreamManagerClient`: the AWS SDK's client, over MQTT.

The methods, classes and exceptions are those of the package `stream-manager`, so that a program needs
another import line and nothing else. Beyond it:

* `append_messages` appends many messages in one request, `tail` iterates over a stream as it grows,
  `purge_message_stream` drops messages.
* Appends are stored once. Each carries a message id, and is sent again with the same id if the
  connection was lost before its reply came; the stream remembers ids for its deduplication window (two
  minutes without one), and that is longer than `request_timeout` should be. An append that raises
  TimeoutError or ConnectionError may or may not be stored: call again with the same `message_id` to
  find out and to have it stored once in either case.
* Calls wait for a lost connection to come back, for as long as `request_timeout` allows.
"""

from __future__ import annotations

import logging
import os
import secrets
import ssl
import time
from collections.abc import Iterator, Sequence
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

PER_MESSAGE = 64  # bytes of a request beside each payload: its id, and how CBOR says their lengths
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
    ) -> None:
        """Connect to the broker, port 1883 or with `tls` 8883; times are seconds.

        Raises ConnectionError if nobody is there, ConnectFailedException if the broker refuses.
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
            logger=logger,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether the connection is there now."""
        return self._link.connected

    def close(self) -> None:
        """Disconnect; the client cannot be used again."""
        if not self._closed:
            self._closed = True
            self._link.close()

    # -- the SDK's operations -----------------------------------------------------------
    def create_message_stream(self, definition: MessageStreamDefinition) -> None:
        """Create a stream; raises InvalidRequestException if there is one of this name."""
        self._ask("createMessageStream", {"definition": _checked(definition)}, repeatable=False)

    def update_message_stream(
        self, definition: MessageStreamDefinition, *, if_version: str | None = None
    ) -> None:
        """Replace a stream's definition; with `if_version` only if nobody has changed it since.

        The version is that of `describe_message_stream`; raises UpdateFailedException if it is another now.
        """
        body: dict[str, Any] = {"definition": _checked(definition)}
        if if_version is not None:  # a second try would find what the first one has changed
            self._ask("updateMessageStream", body | {"ifVersion": if_version}, repeatable=False)
        else:
            self._ask("updateMessageStream", body)

    def delete_message_stream(self, stream_name: str) -> None:
        """Delete a stream and its messages."""
        self._ask("deleteMessageStream", {"name": stream_name}, repeatable=False)

    def describe_message_stream(self, stream_name: str) -> MessageStreamInfo:
        """A stream's definition, what it holds, and how far its exports are."""
        reply = self._ask("describeMessageStream", {"name": stream_name})
        return MessageStreamInfo.from_dict(reply["messageStreamInfo"])

    def list_streams(self) -> list[str]:
        """The names of the streams."""
        names: list[str] = self._ask("listStreams", {})["streams"]
        return names

    def append_message(self, stream_name: str, data: bytes, *, message_id: bytes | None = None) -> int:
        """Append a message; returns its sequence number once it is stored."""
        if not isinstance(data, bytes) or not data:
            raise ValidationException("data must be bytes, at least one")
        body = {"name": stream_name, "payload": data, "messageId": message_id or os.urandom(12)}
        number: int = self._ask("appendMessage", body)["sequenceNumber"]
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
        return [Message(**_message(raw)) for raw in self._ask("readMessages", body)["messages"]]

    # -- beyond the SDK -----------------------------------------------------------------
    def append_messages(
        self, stream_name: str, data: Sequence[bytes], *, message_ids: Sequence[bytes] | None = None
    ) -> list[int]:
        """Append many messages in order; returns their sequence numbers once all are stored.

        As many requests are made as packets need. If a message cannot be stored, those before it are, and
        those behind it are not: `sequence_numbers` of the exception has the numbers of those that are stored.
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
                numbers += self._ask("appendMessages", body)["sequenceNumbers"]
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
        """Iterate over a stream's messages from number `start`, waiting for those to come.

        Without `start`, from the next one that is appended. Ends when nothing came for `timeout`
        seconds (None: never), and raises ResourceNotFoundException when the stream is deleted.
        Messages that limits have dropped are passed over; a lost connection is waited for.
        """
        if start is None:
            info = self._ask("describeMessageStream", {"name": stream_name})["messageStreamInfo"]
            start = info["storageStatus"]["newestSequenceNumber"] + 1
        heard = time.monotonic()
        while True:
            left = 10.0 if timeout is None else heard + timeout - time.monotonic()
            wait = max(1, int(min(left, 10.0, self.request_timeout / 2) * 1000))
            options = ReadMessagesOptions(start, 1, 1000, wait, topic)
            try:
                found = self.read_messages(stream_name, options)
            except (NotEnoughMessagesException, TimeoutError, ConnectionError):
                if timeout is not None and time.monotonic() - heard >= timeout:
                    return
                continue
            yield from found
            start = (found[-1].sequence_number or 0) + 1
            heard = time.monotonic()

    def purge_message_stream(
        self, stream_name: str, *, upto: int | None = None, topic: str | None = None
    ) -> int:
        """Drop all messages, those below number `upto`, or those on a topic filter; returns how many."""
        body = {"name": stream_name, "upto": upto, "topic": topic}
        given = {k: v for k, v in body.items() if v is not None}
        reply = self._ask("purgeMessageStream", given, repeatable=False)
        number: int = reply["purgedMessages"]
        return number

    def _ask(self, operation: str, body: dict[str, Any], *, repeatable: bool = True) -> dict[str, Any]:
        if self._closed:
            raise StreamManagerException("Client is closed. Create a new client first.")
        reply = self._link.ask(operation, body, self.request_timeout, repeatable=repeatable)
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
    """The arguments of a Message; by hand, since a read may bring thousands."""
    return {
        "stream_name": raw["streamName"],
        "sequence_number": raw["sequenceNumber"],
        "ingest_time": raw["ingestTime"],
        "payload": raw["payload"],
        "topic": raw.get("topic"),
        "headers": raw.get("headers"),
    }
