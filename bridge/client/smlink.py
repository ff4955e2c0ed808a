"""Requests over the protocol of AWS IoT Greengrass Stream Manager, on port 8088.

    connection  = version byte 0x01, then frames, in either direction
    frame       = length i32 big-endian (of what follows) | operation i8 | body: one CBOR map

The first frame of a client is Connect; its reply says whether the client is admitted. The protocol has the
seven operations of the AWS SDK and their keys, and no message ids. Whatever else a caller asks for is refused
here with ValidationException or UnknownOperationException, because the service would ignore it.

The connection lives on an event loop in a thread of its own, so that neither a blocked caller nor a blocked
event loop of the application stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import cbor2
from msgspec.structs import fields

from bridge.client.data import ExportDefinition, MessageStreamDefinition, ReadMessagesOptions
from bridge.client.exceptions import (
    ConnectFailedException,
    RequestPayloadTooLargeException,
    UnknownOperationException,
    ValidationException,
)
from bridge.client.link import Link, Reconnect, Request

CONNECT, VERSION = 1, "1.1.0"
OPERATIONS: dict[str, tuple[int, frozenset[str]]] = {  # its number, and the keys of a request
    "createMessageStream": (2, frozenset({"definition"})),
    "deleteMessageStream": (3, frozenset({"name"})),
    "appendMessage": (4, frozenset({"name", "payload"})),
    "readMessages": (5, frozenset({"streamName", "readMessagesOptions"})),
    "listStreams": (11, frozenset()),
    "describeMessageStream": (13, frozenset({"name"})),
    "updateMessageStream": (15, frozenset({"definition"})),
}
HEAD = struct.Struct(">ib")
FRAME = 64 * 1024 * 1024  # bytes of a frame that the service accepts
LARGEST = 1 << 30  # bytes of a frame that the protocol allows
PROBE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))  # seconds, seconds, probes


def _names(data: type, upto: str) -> frozenset[str]:
    names = [field.encode_name for field in fields(data)]
    return frozenset(names[: names.index(upto) + 1])


_DEFINITION = _names(MessageStreamDefinition, "exportDefinition")  # our extensions follow after these
_EXPORTS = _names(ExportDefinition, "s3TaskExecutor")
_OPTIONS = _names(ReadMessagesOptions, "readTimeoutMillis")
_NESTED = {
    field.encode_name: {one.encode_name for one in fields(ExportDefinition.NESTED[field.name])} - {"more"}
    for field in fields(ExportDefinition)
    if field.encode_name in _EXPORTS
}


class StreamManagerLink(Link):
    """A connection to the Stream Manager listener."""

    EXTENDED = False
    most = FRAME - 1

    def __init__(
        self,
        host: str,
        port: int,
        *,
        auth_token: str | None,
        connect_timeout: float,
        reconnect: Reconnect,
        logger: logging.Logger,
    ) -> None:
        """Connect; raises ConnectionError (no service) or ConnectFailedException (refused)."""
        super().__init__(logger)
        self._host, self._port, self._token = host, port, auth_token
        self._connect_timeout, self._reconnect = connect_timeout, reconnect
        self._writer: asyncio.StreamWriter | None = None
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="stream-manager-client", daemon=True)
        self._thread.start()
        try:
            self._first.result(connect_timeout * 2 + 1)  # for the connection, for the reply, for the thread
        except FutureTimeout:
            self.close()
            raise ConnectionError(f"no answer from {host}:{port} in {connect_timeout:g} s") from None
        except (ConnectionError, ConnectFailedException):
            self.close()
            raise

    def _encoded(self, operation: str, body: dict[str, Any]) -> bytes:
        if operation not in OPERATIONS:
            raise UnknownOperationException(f"the Stream Manager protocol has no {operation}; use mqtt://")
        keys = OPERATIONS[operation][1]
        _refuse_others(operation, body, keys | {"requestId"})
        _refuse_others("ReadMessagesOptions", body.get("readMessagesOptions", {}), _OPTIONS)
        definition = body.get("definition", {})
        _refuse_others("MessageStreamDefinition", definition, _DEFINITION)
        exports = definition.get("exportDefinition", {})
        _refuse_others("ExportDefinition", exports, _EXPORTS)
        for kind, configs in exports.items():
            for config in configs if kind in _NESTED else ():
                _refuse_others(f"ExportDefinition.{kind}", config, _NESTED[kind])
        data = super()._encoded(operation, body)
        if len(data) > self.most:
            raise RequestPayloadTooLargeException(
                f"{operation}: the request has {len(data)} bytes, but the service accepts at most {self.most}"
            )
        return data

    def _send(self, request: Request) -> None:
        data = HEAD.pack(len(request.data) + 1, OPERATIONS[request.operation][0]) + request.data
        self._loop.call_soon_threadsafe(self._write, self._writer, data)

    def _disconnect(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: the first attempt failed
            self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()

    # -- on the event loop of the thread --------------------------------------------------
    def _write(self, writer: asyncio.StreamWriter | None, data: bytes) -> None:
        if writer is not None and writer is self._writer and not writer.is_closing():
            writer.write(
                data
            )  # else this connection has ended, and `_interrupted` decides what becomes of it

    def _work(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        """Keep connected until the link is closed or the first attempt fails."""
        delay = self._reconnect.first
        while not self._ending.is_set():
            serving = asyncio.create_task(self._serve())
            ending = asyncio.create_task(self._ending.wait())
            await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            serving.cancel()  # without effect if it has ended
            reason = (await asyncio.gather(serving, return_exceptions=True))[0]
            if self._writer is not None:
                delay, writer = self._reconnect.first, self._writer
                self._writer = None
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
                self._interrupted(reason)
            elif not self._first.done():
                self._first.set_exception(reason)
                return
            else:
                self._log.debug("cannot reconnect: %s", reason)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), delay)
            delay = min(delay * 2, self._reconnect.longest)

    async def _serve(self) -> None:
        """One connection; raises OSError or ConnectFailedException at its end."""
        place = f"{self._host}:{self._port}"
        try:
            async with asyncio.timeout(self._connect_timeout):
                reader, writer = await asyncio.open_connection(self._host, self._port)
        except TimeoutError:
            raise ConnectionError(f"no answer from {place} in {self._connect_timeout:g} s") from None
        except OSError as error:
            raise ConnectionError(f"cannot connect to {place}: {error}") from error
        try:
            async with asyncio.timeout(self._connect_timeout):
                await self._greet(reader, writer)
        except BaseException as error:
            writer.close()
            if isinstance(error, TimeoutError | asyncio.IncompleteReadError):
                raise ConnectionError(
                    f"{place} accepts connections, but does not answer in the Stream Manager protocol"
                ) from None
            raise
        _probe(writer.get_extra_info("socket"))
        self._writer = writer
        self._restored()
        try:
            while True:
                self._arrived((await _frame(reader))[1])
        except asyncio.IncompleteReadError:
            raise ConnectionError("the service has ended it") from None

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = {"requestId": "connect", "sdkVersion": "1.1.0", "protocolVersion": VERSION}
        if self._token:
            body["authToken"] = self._token
        data = cbor2.dumps(body)
        writer.write(b"\x01" + HEAD.pack(len(data) + 1, CONNECT) + data)
        await reader.readexactly(1)
        try:
            reply = cbor2.loads((await _frame(reader))[1])
            status, why = reply["status"], reply.get("errorMessage")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConnectionError(f"a malformed reply to Connect: {error!r}") from None
        if status != 0:
            raise ConnectFailedException(f"the service refuses the connection: {why}", status, "connect")


async def _frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read the operation and the body of a frame."""
    length, operation = HEAD.unpack(await reader.readexactly(HEAD.size))
    if not 1 <= length <= LARGEST:
        raise ConnectionError(f"a frame of {length} bytes")
    return operation, await reader.readexactly(length - 1)


def _refuse_others(where: str, given: dict[str, Any], known: frozenset[str] | set[str]) -> None:
    meant = {key for key, value in given.items() if value not in ([], {})}
    if others := ", ".join(sorted(meant - known)):
        raise ValidationException(f"{where}: the Stream Manager protocol has no {others}; use mqtt://")


def _probe(sock: socket.socket) -> None:
    """Let the kernel find out that the service is unreachable, as keep-alive does for MQTT."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
