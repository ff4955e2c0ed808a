"""What a client can ask of streambridge: each operation once, for the blocking and the asyncio client.

The operations are coroutines. They wait for nothing but `_ask`, which sends a request and returns its reply.
`AsyncStreamManagerClient` awaits the reply there. `StreamManagerClient` blocks there, so its coroutines end
without ever being suspended.

What is repeated after an interruption is decided here, by `repeatable`:

* Reads, descriptions, lists, acknowledgements, and pausing, resuming and retrying exports have the same
  effect when they are carried out twice. They are repeated.
* Appends are repeated over MQTT, where each carries a message id: the stream stores an id once.
* Everything else is sent once: creating, deleting, purging, an update with `if_version`, and appends over the
  Stream Manager protocol, which has no message ids.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

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
from bridge.client.link import Link, Reply

PER_MESSAGE = 64  # bytes of a request for each message beside its payload: its id, and CBOR's lengths
PER_REQUEST = 1024
AT_ONCE = 10_000  # messages of one request; a gateway refuses one with too many items, however small
POLL = 10.0  # seconds that one request of `tail` and `consume` waits at most


class Operations(ABC):
    """The operations of a client."""

    request_timeout: float  # seconds

    @property
    @abstractmethod
    def _link(self) -> Link:
        """The connection."""

    @abstractmethod
    async def _ask(self, operation: str, body: dict[str, Any], *, repeatable: bool) -> Reply:
        """Send a request and return its reply, whatever its status.

        Raises ConnectionError or TimeoutError after `request_timeout` seconds.
        """

    # -- the operations of the AWS SDK ----------------------------------------------------
    async def create_message_stream(self, definition: MessageStreamDefinition) -> None:
        """Create a stream.

        Raises InvalidRequestException if a stream has this name already. Not repeated after an interruption.
        """
        await self._call("createMessageStream", {"definition": _checked(definition)}, repeatable=False)

    async def update_message_stream(
        self, definition: MessageStreamDefinition, *, if_version: str | None = None
    ) -> None:
        """Replace a stream's definition.

        With `if_version`, the `version` of a description, only if nobody has changed the definition since
        then; otherwise raises UpdateFailedException. An update with `if_version` is not repeated after an
        interruption. Raises UpdateNotAllowedException for a change of `persistence`.
        """
        body: dict[str, Any] = {"definition": _checked(definition)}
        if if_version is not None:  # a repeated request would find the version changed by the first one
            await self._call("updateMessageStream", body | {"ifVersion": if_version}, repeatable=False)
        else:
            await self._call("updateMessageStream", body)

    async def delete_message_stream(self, stream_name: str) -> None:
        """Delete a stream with its messages and the positions of its exports.

        Not repeated after an interruption.
        """
        await self._call("deleteMessageStream", {"name": stream_name}, repeatable=False)

    async def describe_message_stream(self, stream_name: str) -> MessageStreamInfo:
        """Return a stream's definition, its storage status, and the status of each export."""
        reply = await self._call("describeMessageStream", {"name": stream_name})
        return MessageStreamInfo.from_dict(reply["messageStreamInfo"])

    async def list_streams(self) -> list[str]:
        """Return the names of the streams that this client may describe, sorted."""
        names: list[str] = (await self._call("listStreams", {}))["streams"]
        return names

    async def append_message(self, stream_name: str, data: bytes, *, message_id: bytes | None = None) -> int:
        """Append a message and return its sequence number once it is stored.

        `data` has at least one byte. Over MQTT the append is repeated after an interruption, and stored once:
        the stream knows the messages of its deduplication window by their `message_id` (1 to 255 bytes;
        without one, the client makes a random one for each call). After ConnectionError or TimeoutError the
        message may or may not be stored: call again with the same `message_id`, and it is stored once.

        Over the Stream Manager protocol there are no message ids. The append is sent once, and
        after ConnectionError or TimeoutError it may be stored or not: a second call may store it twice.

        Raises UnknownFailureException if the stream is full, RequestPayloadTooLargeException, or
        ResourceNotFoundException.
        """
        if not isinstance(data, bytes) or not data:
            raise ValidationException("data must be bytes, at least one")
        body = {"name": stream_name, "payload": data}
        if self._link.EXTENDED:
            body["messageId"] = message_id or os.urandom(12)
        elif message_id is not None:
            raise ValidationException("the Stream Manager protocol has no message_id; use mqtt://")
        reply = await self._call("appendMessage", body, repeatable=self._link.EXTENDED)
        number: int = reply["sequenceNumber"]
        return number

    async def read_messages(
        self, stream_name: str, options: ReadMessagesOptions | None = None
    ) -> list[Message]:
        """Read messages, by default the oldest one.

        Raises NotEnoughMessagesException if there are fewer than `min_message_count` after
        `read_timeout_millis`, which must not be more than `request_timeout`.
        """
        if options is not None:
            if not isinstance(options, ReadMessagesOptions):
                raise ValidationException("options must be a ReadMessagesOptions")
            options.check()
            most = options.max_message_count
            if most is not None and (options.min_message_count or 1) > most:
                raise ValidationException("min_message_count must be less than or equal to max_message_count")
            if (options.read_timeout_millis or 0) > self.request_timeout * 1000:
                raise ValidationException("read_timeout_millis must not be more than request_timeout")
        body: dict[str, Any] = {"streamName": stream_name}
        if options is not None:
            body["readMessagesOptions"] = options.as_dict()
        return [Message(**_message(raw)) for raw in (await self._call("readMessages", body))["messages"]]

    # -- not in the SDK -------------------------------------------------------------------
    async def describe_message_streams(self) -> AsyncGenerator[MessageStreamInfo, None]:
        """Iterate over the descriptions of all streams, by name.

        Over MQTT, one reply carries as many descriptions as fit; over the Stream Manager protocol, one.
        """
        if not self._link.EXTENDED:
            for name in await self.list_streams():
                yield await self.describe_message_stream(name)
            return
        after, more = "", True
        while more:
            reply = await self._call("listStreams", {"details": True, "after": after})
            for raw in reply["messageStreamInfos"]:
                yield MessageStreamInfo.from_dict(raw)
            more = reply["more"]
            after = reply["streams"][-1] if reply["streams"] else ""

    async def append_messages(
        self, stream_name: str, data: Sequence[bytes], *, message_ids: Sequence[bytes] | None = None
    ) -> list[int]:
        """Append many messages in order, and return their sequence numbers once all are stored.

        Over MQTT one request has as many as fit into a packet, and at most 10,000. Over the Stream Manager
        protocol they go one by one.
        If a message cannot be stored, those before it are stored and those after it are not. The exception,
        also ConnectionError and TimeoutError, has the numbers of the stored ones in `sequence_numbers`.
        Message ids and repetitions are those of `append_message`.
        """
        if not data or not all(isinstance(payload, bytes) and payload for payload in data):
            raise ValidationException("data must be a list of bytes, none of them empty")
        if message_ids is not None and len(message_ids) != len(data):
            raise ValidationException(f"{len(data)} messages, but {len(message_ids)} message_ids")
        numbers: list[int] = []
        try:
            if self._link.EXTENDED:
                await self._append_packets(stream_name, data, message_ids, numbers)
            elif message_ids is not None:
                raise ValidationException("the Stream Manager protocol has no message_ids; use mqtt://")
            else:
                for payload in data:
                    numbers += [await self.append_message(stream_name, payload)]
        except (StreamManagerException, OSError) as error:
            stored = getattr(error, "sequence_numbers", [])
            error.sequence_numbers = numbers + stored  # type: ignore[union-attr] # ours, on any exception
            raise
        return numbers

    async def _append_packets(
        self, stream_name: str, data: Sequence[bytes], ids: Sequence[bytes] | None, numbers: list[int]
    ) -> None:
        """Append in requests that fit into packets; `numbers` grows with each reply."""
        run = os.urandom(12)
        ids = ids or [run + number.to_bytes(4, "big") for number in range(len(data))]
        while len(numbers) < len(data):
            first = last = len(numbers)
            size = PER_REQUEST
            while last < len(data):
                size += len(data[last]) + len(ids[last]) + PER_MESSAGE
                if last - first == AT_ONCE or (last > first and size > self._link.most):
                    break
                last += 1
            body = {"name": stream_name, "payloads": data[first:last], "messageIds": ids[first:last]}
            numbers += (await self._call("appendMessages", body))["sequenceNumbers"]

    async def tail(
        self,
        stream_name: str,
        start: int | None = None,
        *,
        topic: str | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[Message, None]:
        """Iterate over a stream's messages from number `start`, waiting for new ones.

        Without `start`, from the next message that is appended. `topic`, over MQTT only, is a topic filter.
        Messages that limits have dropped are skipped. An interruption does not end the iteration, and neither
        loses nor repeats a message. It ends when no message has arrived for `timeout` seconds (None: never);
        without a connection, up to `request_timeout` later. Raises ResourceNotFoundException when the stream
        is deleted.
        """
        if start is None:
            info = (await self._call("describeMessageStream", {"name": stream_name}))["messageStreamInfo"]
            start = info["storageStatus"]["newestSequenceNumber"] + 1
        newest = time.monotonic()  # when the last message arrived
        while True:
            options = ReadMessagesOptions(start, 1, 1000, self._wait(newest, timeout), topic)
            try:
                found = await self.read_messages(stream_name, options)
            except (NotEnoughMessagesException, TimeoutError, ConnectionError):
                if timeout is not None and time.monotonic() - newest >= timeout:
                    return
                continue
            for message in found:
                yield message
            start = (found[-1].sequence_number or 0) + 1
            newest = time.monotonic()

    async def purge_message_stream(
        self, stream_name: str, *, upto: int | None = None, topic: str | None = None
    ) -> int:
        """Drop all messages, those below number `upto`, or those on a topic filter; return how many.

        Numbering continues. Not repeated after an interruption. Over MQTT only.
        """
        body = {"name": stream_name, "upto": upto, "topic": topic}
        given = {k: v for k, v in body.items() if v is not None}
        reply = await self._call("purgeMessageStream", given, repeatable=False)
        number: int = reply["purgedMessages"]
        return number

    async def fetch_messages(
        self, stream_name: str, consumer: str, max_message_count: int = 1, timeout_millis: int = 0
    ) -> list[Message]:
        """Fetch messages of a consumer; wait up to `timeout_millis` for the first one, then return none.

        No other client gets them before the consumer's deadline. Report each result by `ack_messages`. A
        message that is not acknowledged is delivered again; `deliveries` says how often it was. If a reply is
        lost, so are its messages until their deadline. Over MQTT only.
        """
        if timeout_millis > self.request_timeout * 1000:
            raise ValidationException("timeout_millis must not be more than request_timeout")
        body = {
            "name": stream_name,
            "consumer": consumer,
            "maxMessageCount": max_message_count,
            "timeoutMillis": timeout_millis,
        }
        return [Message(**_message(raw)) for raw in (await self._call("fetchMessages", body))["messages"]]

    async def ack_messages(
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
        """Report the results of fetched messages, by sequence number; return when they are stored.

        `ack`: done. `nack`: deliver again, after `delay_millis`. `in_progress`: start the deadline again.
        `terminate`: never deliver again, because of `reason`. Returns the numbers to which this did not
        apply: settled before, perhaps by the first of two identical requests, or another client's. Over MQTT
        only.
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
        numbers: list[int] = (await self._call("ackMessages", body))["notPending"]
        return numbers

    async def consume(
        self,
        stream_name: str,
        consumer: str,
        *,
        max_message_count: int = 1,
        timeout: float | None = None,
    ) -> AsyncGenerator[Message, None]:
        """Iterate over the messages of a consumer, waiting for new ones; acknowledge each yourself.

        `max_message_count` are fetched at a time: their deadlines run while the first one is worked on. An
        interruption does not end the iteration. It ends when no message has arrived for `timeout` seconds
        (None: never); without a connection, up to `request_timeout` later. Over MQTT only.
        """
        newest = time.monotonic()  # when the last message arrived
        while True:
            found: list[Message] = []
            with suppress(TimeoutError, ConnectionError):
                wait = self._wait(newest, timeout)
                found = await self.fetch_messages(stream_name, consumer, max_message_count, wait)
            for message in found:
                yield message
            if found:
                newest = time.monotonic()
            elif timeout is not None and time.monotonic() - newest >= timeout:
                return

    async def pause_exports(self, stream_name: str, export: str | None = None) -> list[str]:
        """Pause an export of a stream, or all; return the names of those that are paused. Over MQTT only.

        A paused export keeps its position, over restarts and updates, until it is resumed.
        """
        return await self._exports("pauseExports", stream_name, export)

    async def resume_exports(self, stream_name: str, export: str | None = None) -> list[str]:
        """Resume an export of a stream, or all; return the names of those that were paused.

        Over MQTT only.
        """
        return await self._exports("resumeExports", stream_name, export)

    async def retry_exports(self, stream_name: str, export: str | None = None) -> list[str]:
        """Send the pending messages of one export of a stream, or of all, now; return their names. MQTT only.

        An export waits neither for a full batch nor after a failure. One that has stopped starts again.
        """
        return await self._exports("retryExports", stream_name, export)

    async def _exports(self, operation: str, stream_name: str, export: str | None) -> list[str]:
        body = {"name": stream_name} | ({} if export is None else {"export": export})
        names: list[str] = (await self._call(operation, body))["exports"]
        return names

    def _wait(self, newest: float, timeout: float | None) -> int:
        """Milliseconds that the next request of an iteration waits for messages."""
        left = POLL if timeout is None else newest + timeout - time.monotonic()
        return max(1, int(min(left, POLL, self.request_timeout / 2) * 1000))

    async def _call(self, operation: str, body: dict[str, Any], *, repeatable: bool = True) -> Reply:
        """Return the reply to a request; raises the exception of its status."""
        reply = await self._ask(operation, body, repeatable=repeatable)
        status = reply.get("status")
        if status == ResponseStatusCode.Success:
            return reply
        number = status if isinstance(status, int) else None
        kind = StreamManagerException if number is None else BY_STATUS.get(number, StreamManagerException)
        failed = kind(str(reply.get("errorMessage", "")), number, reply["requestId"])
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
