"""One client of the Stream Manager protocol: framing, handshake, requests and their replies.

    NEW --version byte, Connect, token--> OPEN --end of input, violation, silence, stop--> ENDING --> closed
     |                                                                                       ^
     +--- anything else, time-out, refusal: an answer if the SDK can read one ---------------+

What it promises, because the SDKs depend on it:
* A frame is written in one piece. A request is answered once, or not at all if the client has stopped waiting
  for the answer (`LATE`): an unexpected answer breaks the Python SDK.
* Appends are stored in the order of arrival. Those from one read of the socket form one commit group and are
  answered together after the commit. A waiting read delays nothing else.
* A frame that arrives in pieces is acknowledged to TCP at once: the Node.js SDK writes header and body
  separately, and its kernel sends the body only after that, otherwise 40 ms later at every call.
* The connection ends with FIN (`net.flow`): after a RST the Python SDK never works again.
* A request has a limited number of items (`cbor.MOST`). One with more is answered without being decoded.
* Memory is bounded: no announced length is allocated, a read begins only when earlier replies are nearly
  sent, and a client that does not read its replies is not read from.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import cbor2

from bridge import cbor
from bridge.audit import Origin, record
from bridge.errors import StreamBridgeError, StreamError
from bridge.greengrass import operations, wire
from bridge.greengrass.wire import HEADER, Op, ResponseStatus
from bridge.net.addresses import network_of, peer_of
from bridge.net.flow import Flow
from bridge.net.limits import descriptor_of
from bridge.operations.catalog import READ, Found

if TYPE_CHECKING:
    from bridge.access.rules import Identity
    from bridge.greengrass.frontend import GreengrassFrontEnd
    from bridge.net.turns import Who
    from bridge.operations.catalog import Read
    from bridge.operations.reading import ReadMessagesOptions
    from bridge.streams.stream import Stream

log = logging.getLogger(__name__)

LATE = 58.0  # seconds; the SDKs wait 60 by default
LINGER = 5.0  # seconds from our FIN until the connection is closed
MAX_CONNECT = 64 * 1024  # bytes of the first frame
CONNECT_ITEMS = 1000  # items of its body
MAX_FRAME = 64 * 1024 * 1024
PEEK = 4 * 1024  # bytes of a frame that is not decoded that are searched for its requestId
MAX_ID = 1024  # characters of a requestId; it is in memory until its request is answered
MAX_READS = 10_000  # reads of one client that wait or are being answered
UNSENT = 256 * 1024  # bytes written but not sent, above which no further read begins


class Admitted(NamedTuple):
    """Who a client is, and why: by the digest of its token, or, if that is empty, by its local user.

    `mapped`: by an entry of `greengrass.users`, so never without rules. `trusted`: root or the service's own
    user, which could read the tokens and the streams' files anyway.
    """

    user: str
    token: bytes
    why: str
    mapped: bool = False
    trusted: bool = False


class Phase(enum.Enum):
    """The phases of a connection."""

    NEW = enum.auto()
    OPEN = enum.auto()
    ENDING = enum.auto()


class Violation(Exception):  # noqa: N818  (named for what happened)
    """Raised when a client breaks the protocol and no answer makes sense; the connection ends."""


class Connection(Flow):
    """The server's side of one connection."""

    def __init__(self, front: GreengrassFrontEnd) -> None:
        super().__init__()
        self._front = front
        self._operations, self._manager = front.operations, front.operations.manager
        self.admitted: Admitted | None = None  # set by Connect, the first request
        self.caller: Identity  # likewise
        self._loop = asyncio.get_running_loop()
        self._phase, self._version = Phase.NEW, wire.VERSIONS[0]
        self._buffer = bytearray()
        self._need = 1  # bytes that make the next step possible
        self._skip = 0  # bytes of a too large frame that are still to be discarded
        self._skipped: tuple[int, bytes] = (0, b"")  # its operation and its first bytes
        self._reads: set[asyncio.Task[None]] = set()
        self.appends = 0  # not yet answered
        self._writable = asyncio.Event()
        self._writable.set()
        self._settled: asyncio.Future[None] | None = None
        self._heard = 0.0
        self._silence: asyncio.TimerHandle | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()

    # -- called by the transport ------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.host, port = peer_of(transport)
        self.address = f"{self.host}:{port}"
        self.socket = transport.get_extra_info("socket")
        self.transport.set_write_buffer_limits(high=UNSENT)
        self._timer = self._loop.call_later(
            self._front.bounds.handshake, self.end, "no whole Connect in time"
        )
        self._front.connections.add(self)
        if refused := self._front.limits.enter(self.host, descriptor_of(transport)):
            self._front.counts["refused_limit"] += 1
            self.end(f"refused: {refused}; see [greengrass] connections")
        else:
            self._front.guests.keep(self, self.host, 0)

    @property
    def turn(self) -> Who:
        """Who it takes turns as: its user, or its address before its Connect."""
        network = network_of(self.host)
        return (network, network) if self.admitted is None else self.caller.turn

    def data_received(self, data: bytes) -> None:
        if self._phase is Phase.ENDING:
            self.discard()
            return
        self._buffer += data
        self._heard = self._loop.time()
        if self._phase is Phase.NEW:
            self._front.guests.keep(self, self.host, len(self._buffer))
        if (len(self._buffer) >= self._need or self._skip) and not self.holds:
            if self._operations.turns.over:
                self._operations.turns.wait(self)
            else:
                self.proceed()
        if self._phase is Phase.OPEN:
            self._timer.cancel()
            if self._front.too_much(self, len(self._buffer)):
                self.end("too many bytes of unfinished frames")
            elif (self._buffer or self._skip) and not self.holds:
                stalled = self._front.bounds.stalled
                self._timer = self._loop.call_later(
                    stalled, self.end, "no byte of an unfinished frame in time"
                )
                self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def eof_received(self) -> bool:
        """The client has closed (no SDK closes only one direction): wait for its appends, then close too."""
        self._front.spawn(self.stop())
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = Phase.ENDING
        self._timer.cancel()
        if self._silence is not None:
            self._silence.cancel()
        self._buffer.clear()
        self._writable.set()
        for task in self._reads:
            task.cancel()
        self._settle()
        self._front.limits.leave(self.host)
        self._front.guests.leave(self, self.host)
        self.closed.set_result(None)
        self._front.gone(self)

    def pause_writing(self) -> None:
        self._writable.clear()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._writable.set()
        super().resume_writing()

    # -- frames ------------------------------------------------------------
    def proceed(self) -> None:
        try:
            self._frames()
        except Violation as error:
            self.end(str(error))

    def _frames(self) -> None:
        """Handle the whole frames that have arrived."""
        buffer, pos, turns = self._buffer, 0, self._operations.turns
        group: dict[Stream, list[tuple[str, int]]] = {}
        self._need = HEADER
        began = turns.begin()
        try:
            if self._phase is Phase.NEW and buffer and buffer[0] != wire.CONNECT_VERSION:
                self._refuse("", ResponseStatus.UNSUPPORTED_CONNECT_VERSION, f"connect version {buffer[0]}")
                return
            while self._phase is not Phase.ENDING and not self.holds:
                if self._skip and (pos := self._discard_frame(pos)) == len(buffer):
                    return
                at = pos + (self._phase is Phase.NEW)
                if len(buffer) - at < HEADER:
                    self._need = at - pos + HEADER
                    return
                length, op = int.from_bytes(buffer[at : at + 4], "big", signed=True), buffer[at + 4]
                limit = MAX_CONNECT if self._phase is Phase.NEW else MAX_FRAME
                if not 1 <= length <= (limit if self._phase is Phase.NEW else wire.LARGEST_LEGAL):
                    raise Violation(f"a frame of {length} bytes")
                end = at + HEADER - 1 + length
                if length > limit:
                    if len(buffer) - at < PEEK:
                        self._need = at - pos + PEEK
                        return
                    self._skip, self._skipped = end - at, (op, bytes(buffer[at + HEADER : at + PEEK]))
                    pos = at
                    continue
                if end > len(buffer):
                    self._need = end - pos
                    return
                if op == Op.APPEND and self._manager.under_pressure:
                    self._front.wait_for_room(self)
                    self.hold("pressure")
                    return
                turns.spend(began)
                if pos and turns.over:
                    turns.wait(self)
                    return
                body = bytes(buffer[at + HEADER : end])
                pos = end
                if self._phase is Phase.NEW:
                    self._connect(op, body)
                elif op == Op.APPEND:
                    self._append(body, group)
                else:
                    self._await_commit(group)
                    self._request(op, body)
        finally:
            del buffer[:pos]
            self._await_commit(group)
            turns.spend(began)

    def _discard_frame(self, pos: int) -> int:
        """Skip the rest of a too large frame, and answer it at its end."""
        step = min(self._skip, len(self._buffer) - pos)
        self._skip -= step
        if not self._skip:
            text = f"a request may have at most {MAX_FRAME} bytes; send smaller messages"
            self._too_large(*self._skipped, ResponseStatus.REQUEST_TOO_LARGE, text)
        return pos + step

    def _too_large(self, op: int, beginning: bytes, status: ResponseStatus, text: str) -> None:
        """Answer a request that is too large to be decoded. Raises Violation."""
        request_id = cbor.first_entries(beginning).get("requestId")
        if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_ID:
            raise Violation(f"{text}; this one does not begin with its requestId, and so has no answer")
        self._send(wire.failure(op, request_id, status, text, self._version))

    # -- the handshake ------------------------------------------------------------
    def _connect(self, op: int, body: bytes) -> None:
        request_id, request = "", {}
        if op != Op.CONNECT:
            self._refuse("", ResponseStatus.UNEXPECTED_OPERATION, f"the first operation is {op}, not Connect")
            return
        try:
            request = cbor.decode_map(body, CONNECT_ITEMS)
        except cbor.Malformed as error:
            raise Violation(f"a Connect that is not a CBOR map: {error}") from None
        given = request.get("requestId")
        request_id = given if isinstance(given, str) else ""
        offered = [request.get("protocolVersion")]
        others = request.get("otherSupportedProtocolVersions")
        offered += others if isinstance(others, list) else []
        if not isinstance(offered[0], str) or not offered[0]:
            self._refuse(request_id, ResponseStatus.INVALID_PROTOCOL_VERSION, "`protocolVersion` is missing")
            return
        version = next((text for text in offered if text in wire.VERSIONS), None)
        if version is None:
            known = " and ".join(wire.VERSIONS)
            self._refuse(
                request_id, ResponseStatus.UNSUPPORTED_PROTOCOL_VERSION, f"this server speaks {known}"
            )
            return
        self._version = version
        token = request.get("authToken")
        token = token if isinstance(token, str) and self._front.asks_for(token) else ""
        if not (token and self._is_proven(request_id, token)):
            self.hold("owner")
            self._front.spawn(self._identify(request_id, token))

    def _admit(self, request_id: str, admitted: Admitted) -> None:
        self.admitted = admitted
        self.identify()
        self._phase = Phase.OPEN
        self._timer.cancel()
        self._front.guests.leave(self, self.host)
        self._watch()
        answer = {"protocolVersion": self._version, "clientIdentifier": self.address}
        record("login", origin=self.caller.origin, user=self.caller.user, why=admitted.why)
        self._connected(request_id, {"status": 0, **answer})

    def _is_proven(self, request_id: str, token: str) -> bool:
        """Admit a client with a token that was right before, and still is.

        That is no guess, so wrong ones from the same address, such as loopback, do not keep its client out.
        If it has been removed since, it is like any other wrong one.
        """
        front, network = self._front, network_of(self.host)
        if not front.proven.has(network, token) or isinstance(found := front.admit(token), str):
            return False
        front.proven.add(network, token)
        self._admit(request_id, found)
        return True

    async def _identify(self, request_id: str, token: str) -> None:
        """Admit the client by its token or its owner, or refuse it; each wrong token delays the answer more.

        Any number of clients without a token are looked at: others must not keep root's own clients out. Nor
        does an unknown token keep out a client whose owner needs none, and it waits for nothing. But only so
        many of its tokens are looked at, unless it is trusted: otherwise it could guess those of other users.
        """
        front, network = self._front, network_of(self.host)
        owned, owner = await front.admit_owner(self)
        if self._phase is not Phase.NEW:
            return
        key, trusted = network, False
        if isinstance(owned, Admitted):
            key, trusted = f"local user {owner}", owned.trusted
        looks = bool(token) and (trusted or front.guesses.begin(key))
        found = front.admit(token) if looks else ""
        delay = 0.0
        if isinstance(found, Admitted):
            front.guesses.right(key)
            front.proven.add(network, token)
            self._admit(request_id, found)
        elif isinstance(owned, Admitted) and not found:
            delay = front.guesses.wrong(key) if looks and not trusted else 0.0
            self._admit(request_id, owned)
        elif token and not looks:
            text = "too many wrong tokens from this address; try later"
            self._refuse(request_id, ResponseStatus.UNAUTHORIZED, text)
        else:
            unknown = "the token is not in greengrass.token_file, nor in greengrass.tokens_file; "
            why = found or (unknown if token else "") + str(owned)
            delay = self._refuse_late(request_id, why, key)
        if looks and not trusted:
            front.guesses.end(key, delay)
        if self.admitted is not None:
            self.release("owner")

    def _refuse_late(self, request_id: str, why: str, key: str) -> float:
        """Refuse the client after a delay, which is returned."""
        delay = self._front.guesses.wrong(key)
        self.hold("token")
        self._loop.call_later(delay, self._refuse, request_id, ResponseStatus.UNAUTHORIZED, why)
        return delay

    def _watch(self) -> None:
        """Disconnect a client that is silent for too long and has no request under way."""
        busy = self._reads or self.appends or self.holds
        left = self._front.idle_timeout - (0.0 if busy else self._loop.time() - self._heard)
        if left > 0:
            self._silence = self._loop.call_later(left, self._watch)
        else:
            self._front.counts["idle"] += 1
            self.end("")

    def dismiss(self) -> None:
        """End the connection: clients that have not sent their Connect use too much memory, this one most."""
        self.end("too many bytes from clients that have not sent their Connect")
        self.transport.abort()

    def _refuse(self, request_id: str, status: ResponseStatus, why: str) -> None:
        record("login", "refused", origin=Origin("greengrass", self.host), proven=False, why=why)
        self._connected(request_id, {"status": int(status), "errorMessage": why})
        self.end(f"refused: {why}")

    def _connected(self, request_id: str, result: dict[str, Any]) -> None:
        body: dict[str, Any] = {"requestId": request_id} if request_id else {}
        body |= {
            **result,
            "supportedProtocolVersions": list(wire.VERSIONS),
            "serverVersion": wire.VERSIONS[0],
        }
        self._send(bytes((wire.CONNECT_VERSION,)) + wire.frame(wire.CONNECT_RESPONSE, cbor2.dumps(body)))

    def identify(self) -> None:
        """Look up the client's rights, at its Connect and again when the rules have changed."""
        if self.admitted is not None:
            self.caller = self._front.identify(self.admitted, self.host, self.address)

    # -- requests ------------------------------------------------------------
    def _decode(self, op: int, body: bytes) -> tuple[str, dict[str, Any]]:
        """The requestId and the request. Both are empty if the request was too large, and is answered."""
        try:
            request = cbor.decode_map(body)
        except cbor.TooMany:
            text = f"a request may have at most {cbor.MOST:,} items"
            self._too_large(op, body[:PEEK], ResponseStatus.INVALID_REQUEST, text)
            return "", {}
        except cbor.Malformed as error:
            raise Violation(f"a request that is not a CBOR map: {error}") from None
        request_id = request.get("requestId")
        if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_ID:
            raise Violation(f"a request without a requestId of 1 to {MAX_ID:,} characters")
        return request_id, request

    def _append(self, body: bytes, group: dict[Stream, list[tuple[str, int]]]) -> None:
        request_id, request = self._decode(Op.APPEND, body)
        if not request_id:
            return
        name, payload = request.get("name"), request.get("payload")
        if not isinstance(name, str) or not isinstance(payload, bytes):
            text = "the request: `name` (text) and `payload` (bytes) are needed"
            self._send(wire.failure(Op.APPEND, request_id, ResponseStatus.INVALID_REQUEST, text))
            return
        try:
            stream, number = self._operations.submit(name, payload, self.caller)
        except StreamBridgeError as error:
            self._failed(Op.APPEND, request_id, error)
            return
        self.appends += 1
        numbers = group.get(stream)
        if numbers is None:
            group[stream] = [(request_id, number)]
        else:
            numbers.append((request_id, number))

    def _await_commit(self, group: dict[Stream, list[tuple[str, int]]]) -> None:
        for stream, numbers in group.items():
            stream.after_commit(partial(self._committed, numbers, self._loop.time()))
        group.clear()

    def _committed(self, numbers: list[tuple[str, int]], since: float, error: StreamError | None) -> None:
        """The commit of these appends has succeeded or failed."""
        self.appends -= len(numbers)
        if self._loop.time() - since < LATE:
            if error is None:
                self._send(b"".join([wire.appended(request_id, number) for request_id, number in numbers]))
            else:
                for request_id, _ in numbers:
                    self._failed(Op.APPEND, request_id, error)
        self._settle()

    def _request(self, op: int, body: bytes) -> None:
        if op == Op.CONNECT:
            raise Violation("a second Connect")
        request_id, request = self._decode(op, body)
        if not request_id:
            return
        if op not in wire.REPLY_TO:
            text = f"protocol {self._version} has no operation {op}"
            self._send(wire.failure(op, request_id, ResponseStatus.UNKNOWN_OPERATION, text, self._version))
            return
        try:
            if op == Op.READ:
                self._begin_read(request_id, *operations.read(request))
                return
            retention = self._front.retention
            result = operations.control(
                self._operations, Op(op), request, self._version, self.caller, retention
            )
            self._send(wire.reply(Op(op), request_id, result))
        except (StreamBridgeError, OSError) as error:
            self._failed(op, request_id, error)

    def _begin_read(self, request_id: str, asked: Read, options: ReadMessagesOptions) -> None:
        task = self._loop.create_task(self._read(request_id, asked, options.read_timeout_millis / 1000))
        self._reads.add(task)
        task.add_done_callback(self._read_ended)
        if len(self._reads) >= MAX_READS:
            self.hold("reads")

    async def _read(self, request_id: str, asked: Read, wait: float) -> None:
        """Carry out a read and reply to it. It may wait, so it does not keep the request as it came."""
        began = self._loop.time()
        try:
            found = await self._operations.call(READ, asked, self.caller, turn=self._turn)
            assert isinstance(found, Found)
            answer: bytes | bytearray = wire.read(request_id, found.stream, found.messages)
        except (StreamBridgeError, OSError) as error:
            answer = self._failure(Op.READ, request_id, error)
        except asyncio.CancelledError:
            text = "the connection is closing"
            answer = wire.failure(Op.READ, request_id, ResponseStatus.NOT_ENOUGH_MESSAGES, text)
        if self._loop.time() - began < max(LATE, wait):
            self._send(answer)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Entered when earlier replies have been sent, by one read of all clients at a time.

        So at most one reply that is not yet written is in memory.
        """
        while True:
            await self._writable.wait()
            async with self._front.reading:
                if self._writable.is_set():
                    yield
                    return

    def _read_ended(self, task: asyncio.Task[None]) -> None:
        self._reads.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("internal error in a read of %s: %r", self.address, error, exc_info=error)
            self.end("an internal error")
        if len(self._reads) <= MAX_READS // 2:
            self.release("reads")
        self._settle()

    def _failed(self, op: int, request_id: str, error: StreamBridgeError | OSError) -> None:
        self._send(self._failure(op, request_id, error))

    def _failure(self, op: int, request_id: str, error: StreamBridgeError | OSError) -> bytes:
        status = error.status if isinstance(error, StreamBridgeError) else int(ResponseStatus.UNKNOWN_FAILURE)
        return wire.failure(op, request_id, status, str(error), self._version)

    def _send(self, data: bytes | bytearray) -> None:
        if self._phase is not Phase.ENDING and not self.transport.is_closing():
            self.transport.write(data)

    # -- the end ------------------------------------------------------------
    def end(self, why: str) -> None:
        """End the connection; `why`, unless empty, goes to the log."""
        if self._phase is Phase.ENDING:
            return
        if why:
            self._front.log_ended(self, why)
        self._phase = Phase.ENDING
        self._timer.cancel()
        self._buffer.clear()
        self._front.too_much(self, 0)
        self._skip = 0
        self.finish(LINGER)

    async def stop(self) -> None:
        """Stop reading, wait until all requests are answered (waiting reads at once), then send FIN."""
        self.hold("stop")
        for task in self._reads:
            task.cancel()
        while (self.appends or self._reads) and self._phase is not Phase.ENDING:
            self._settled = self._settled or self._loop.create_future()
            await asyncio.shield(self._settled)
        self.end("")

    def _settle(self) -> None:
        if self._settled is not None and (self._phase is Phase.ENDING or not (self.appends or self._reads)):
            self._settled.set_result(None)
            self._settled = None
