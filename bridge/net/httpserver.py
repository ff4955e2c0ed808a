"""An HTTP/1.1 server for front ends. h11 parses the heads of requests; the checks before it are ours.

An `HttpServer` is one listener: its routes, its `HttpLimits`, and TLS if it has a context. A route gets an
`HttpRequest` and returns an `HttpResponse`. The body is read only when the route asks for it, so a caller can
be rejected because of the head alone.

    HEAD --complete--> ANSWER --the route has returned--> HEAD of the next request, or FIN
                       |    ^
        request.body() v    | complete
                        BODY

Rejected before a route is called: heads that are too large or too slow or have too many fields, methods that
the listener does not allow, GET and HEAD with a body, chunked bodies, ambiguous lengths (RFC 9112 section
6.3), and, unless the listener allows `any_host`, a Host that is neither an IP address, nor localhost, nor
this machine's name. A web page can point its own name at our address (DNS rebinding), but its requests then
have that name as Host, never an address or our name.

Unless a listener says otherwise, the headers of every response forbid browsers to embed it, to guess its
type, to cache it, and to load anything from elsewhere.

`ConnectionLimits` limit the open connections, including those in a TLS handshake; idle ones are closed. With
`HttpLimits.displace`, a new one takes the place of one that is idle: who has most loses the one that was idle
for longest, so nobody who merely holds sockets keeps others from `/healthz`. The kernel tells users of this
machine apart. While
a request is being answered, nothing more is read, so a client has one request in memory and little of the
next. Only a route that may wait for long (`while_connected`) reads on, to notice that its client has gone.
`HttpLimits.bodies` limits the unfinished bodies of all clients together.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import h11
import msgspec

from bridge import books
from bridge.net.addresses import host_and_port, is_loopback, network_of, parse, peer_of
from bridge.net.flow import Flow
from bridge.net.guests import Guests
from bridge.net.limits import ConnectionLimits, descriptor_of
from bridge.net.listening import Listening, listen
from bridge.net.peer import Owners
from bridge.net.tlslayer import Handshakes, TlsLayer

JSON = "application/json"
FIELDS = 100  # of a head: thousands of small ones take h11 milliseconds
LINGER = 5.0  # the most seconds from our FIN until a connection is closed
TLS_HANDSHAKE = b"\x16"  # the first byte of a TLS client (RFC 8446, 5.1), and of no HTTP request

log = logging.getLogger("bridge.http")

_NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
BROWSER = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _NOTHING,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
# h11 accepts these (line feeds without CR, folded lines), and merges equal lengths.
_LOOSE = re.compile(rb"(?<!\r)\n|\n[ \t]")
_LENGTHS = re.compile(rb"\ncontent-length:([^\r]*)", re.IGNORECASE)


@dataclass(frozen=True)
class HttpLimits:
    """What one listener accepts. Sizes in bytes, times in seconds."""

    methods: tuple[str, ...] = ("GET", "HEAD")
    head: int = 8 * 1024  # request line and fields
    body: int = 0
    bodies: int = 64 * 1024 * 1024  # of all connections together, while they are incomplete
    displace: bool = False  # a new connection may take the place of an idle one
    any_host: bool = False  # for listeners with signed requests, which a web page cannot send
    head_timeout: float = 10.0  # for the TLS handshake and the complete first head
    body_timeout: float = 30.0  # for a complete body
    idle_timeout: float = 30.0  # from a response to the end of the next head


class HttpResponse(NamedTuple):
    """The result of a route. `fields` are added to those of every response, or replace them."""

    status: HTTPStatus
    content_type: str
    body: bytes
    fields: Mapping[str, str] = MappingProxyType({})


class HttpError(Exception):
    """Raised for a request that is rejected; the connection is closed after the response.

    `allow` has the methods of this path, if the method is the reason.
    """

    def __init__(self, status: HTTPStatus, allow: tuple[str, ...] = ()) -> None:
        super().__init__(status.phrase)
        self.status, self.allow = status, allow


@dataclass(frozen=True)
class HttpRequest:
    """The head of a request, a function that reads its body, and one for an answer that may wait for long.

    `headers` has lower-case names; the values of repeated fields are joined by ", ".
    """

    method: str
    path: str
    query: str
    headers: dict[str, str]
    address: str
    body: Callable[[], Awaitable[bytes]]  # raises HttpError if it is too large or too slow; once only
    while_connected: Callable[[Coroutine[Any, Any, bytes]], Awaitable[bytes]]  # after the body


Route = Callable[[HttpRequest], Awaitable[HttpResponse]]


def plain(status: HTTPStatus) -> HttpResponse:
    """The response to a rejected request: the status as text."""
    return HttpResponse(status, "text/plain; charset=utf-8", f"{status.value} {status.phrase}\n".encode())


def json_response(value: object, status: HTTPStatus = HTTPStatus.OK) -> HttpResponse:
    """Make a response with a value as JSON, followed by a newline."""
    return HttpResponse(status, JSON, msgspec.json.encode(value) + b"\n")


class HttpServer:
    """One listener with its `routes` by path. `tls` is the context of the handshakes from now on."""

    def __init__(
        self,
        option: str,
        listen: str,
        routes: Mapping[str, Route],
        connections: ConnectionLimits,
        limits: HttpLimits | None = None,
        tls: ssl.SSLContext | None = None,
        rejection: Callable[[HTTPStatus], HttpResponse] = plain,
        fields: Mapping[str, str] = MappingProxyType(BROWSER),
        owners: Owners | None = None,
    ) -> None:
        """`option` is the configuration's name for `listen`. Raises ValueError if that is no address.

        `rejection` makes the responses to requests that are rejected here; `fields` are in every response.
        """
        self._option = option
        self._host, self._port = host_and_port(listen)
        self._routes = routes
        self._names = _names(self._host)
        self._listening: Listening | None = None
        self.limits, self.counted = limits or HttpLimits(), connections
        self.tls, self.rejection, self.fields = tls, rejection, dict(fields)
        self.connections: set[HttpConnection] = set()
        self.owners = owners or Owners()
        self.guests: Guests[HttpConnection] = Guests(self.limits.bodies, HttpConnection.dismiss)
        self.stopping = False
        self._handshakes = Handshakes()
        books.opened(self)

    def recount(self) -> Iterable[books.Entry]:
        yield from self.counted.recount(one.address for one in self.connections)
        yield "guests that are gone", self.guests.peers() - self.connections, set()

    async def start(self) -> str:
        """Listen. Returns the URL with the actual port. Raises ConfigError."""
        self._listening = await listen(self._option, self._host, self._port)
        await self._listening.accept(self._connection)
        return f"{'http' if self.tls is None else 'https'}://{self._listening.place}/"

    async def stop(self, within: float = 0.0) -> None:
        """Close the listener and all connections. Requests have `within` seconds to be answered."""
        self.stopping = True
        if self._listening is not None:
            self._listening.close()
        busy = [connection.task for connection in self.connections if connection.task is not None]
        if busy and within:
            await asyncio.wait(busy, timeout=within)
        tasks = [task for connection in list(self.connections) if (task := connection.stop()) is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._handshakes.close()

    def _connection(self) -> asyncio.Protocol:
        connection = HttpConnection(self)
        if self.tls is None:
            return connection
        return TlsLayer(self.tls, connection, self._handshakes, _Handshake(connection))

    def make_room(self, new: HttpConnection) -> bool:
        """Close an idle connection, because there is one too many. Returns whether there was one.

        Whoever has most loses it, also if that is the holder of the new one.
        """
        network = network_of(new.address) if self.counted.crowded(new.address) else None
        rivals = [
            one
            for one in self.connections
            if not one.transport.is_closing() and network in (None, network_of(one.address))
        ]
        held = Counter(one.holder for one in rivals)
        most = max(held.values())
        idle = [one for one in rivals if one.idle is not None and held[one.holder] == most and one is not new]
        if idle:
            min(idle, key=lambda one: cast("tuple[bool, float]", one.idle)).transport.abort()
        return bool(idle)

    def check_host(self, host: str | None, version: bytes) -> None:
        """Raises HttpError for a name that is not this machine's."""
        if self.limits.any_host:
            return
        if host is None and version == b"1.0":  # no browser sends this
            return
        host = host or ""
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name.lower().rstrip(".") in self._names:
            return
        try:
            parse(name)
        except ValueError:
            log.warning("rejected a request for host %.80r: it is not a name of this machine", host)
            raise HttpError(HTTPStatus.MISDIRECTED_REQUEST) from None

    async def answer(self, request: HttpRequest) -> HttpResponse:
        """The response of the request's route. Raises HttpError."""
        route = self._routes.get(request.path)
        if route is None:
            return self.rejection(HTTPStatus.NOT_FOUND)
        try:
            return await route(request)
        except HttpError:
            raise
        except Exception:
            log.exception("a request for %s failed", request.path)
            return self.rejection(HTTPStatus.INTERNAL_SERVER_ERROR)


class _Handshake:
    """Handles the TLS handshake of a connection; see `bridge.net.tlslayer.Handshaking`."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection

    def turn(self) -> tuple[str, bool]:
        return network_of(self._connection.address), False

    def begins(self) -> None:
        pass

    def made(self) -> None:
        pass

    def failed(self, error: OSError) -> None:
        log.info("%s: TLS handshake failed: %s", self._connection.address, error)


class HttpConnection(Flow):
    """The server's side of one connection: one request at a time.

    h11 gets a head when it is complete and has passed our checks. These allow only bodies with a length,
    which are taken from the bytes that follow.
    """

    def __init__(self, server: HttpServer) -> None:
        super().__init__()
        self.address = self._holder = ""
        self._since = 0.0  # when it was made, or answered last
        self._server, self._limits = server, server.limits
        self._loop = asyncio.get_running_loop()
        self._unread = bytearray()
        self._length = 0  # bytes of the body that have not been read
        self._goes_on = False  # whether the client waits for `100 Continue`
        self._ends = False  # whether the client will send no further request on this connection
        self._head_only = False  # for HEAD: the response has no body
        self._awaited: asyncio.Future[None] | None = None  # the body
        self._waits = False  # the route waits, as long as the client is connected
        self._half_closed = False  # the client has closed its half
        self.task: asyncio.Task[None] | None = None  # answers the current request

    # -- called by the transport ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._timer = self._loop.call_later(self._limits.head_timeout, self.finish, LINGER)
        self._server.connections.add(self)
        descriptor = descriptor_of(transport)
        self.address, _ = peer_of(transport)
        self._since = self._loop.time()
        refused = self._server.counted.enter(self.address, descriptor)
        if refused and not (self._limits.displace and self._server.make_room(self)):
            self.transport.abort()

    @property
    def idle(self) -> tuple[bool, float] | None:
        """What of idle connections is closed first is less: whether its request waits here, and since when.

        None: a request is being answered. A body that is still to come makes nobody busy.
        """
        busy = self.task is not None and self._awaited is None and not self._waits
        return None if busy else (self._waits, self._since)

    @property
    def holder(self) -> str:
        """Whose connection it is: a user of this machine, or the network of an address."""
        if not self._holder:
            sock = self.transport.get_extra_info("socket")
            uid = self._server.owners.known(sock) if sock is not None and is_loopback(self.address) else None
            self._holder = network_of(self.address) if uid is None else f"user {uid}"
        return self._holder

    def data_received(self, data: bytes) -> None:
        if self._over:
            self.discard()
            return
        self._unread += data
        if self._awaited is not None:
            self._server.guests.keep(self, self.address, len(self._unread))
        if not self.holds:
            self.proceed()

    def dismiss(self) -> None:
        """Close it, because unfinished bodies take too much memory and this is one of the largest."""
        log.warning("%s: closed, the unfinished bodies of all clients take too much memory", self.address)
        self.transport.abort()

    def eof_received(self) -> bool:
        """Answer the current request of a client that has closed its half and may still read.

        A client that closes while its request waits has most likely given up.
        """
        self._half_closed = True
        if self._waits:
            return False
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(HttpError(HTTPStatus.BAD_REQUEST))
        if self.task is None:
            self.finish(LINGER)
        return self.task is not None

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._server.connections.discard(self)
        self._server.counted.leave(self.address)
        self._server.guests.leave(self, self.address)
        if self.task is not None:
            self.task.cancel()

    def stop(self) -> asyncio.Task[None] | None:
        """Close it. Returns the task to wait for."""
        self._timer.cancel()
        self.transport.close()
        if self.task is not None:
            self.task.cancel()
        return self.task

    # -- requests ------------------------------------------------------------

    def proceed(self) -> None:
        if self._waits:
            if len(self._unread) >= self._limits.head:
                self.hold("answer")
            return
        if self._awaited is not None:
            if len(self._unread) >= self._length and not self._awaited.done():
                self.hold("answer")
                self._awaited.set_result(None)
            return
        if self._unread[:1] == TLS_HANDSHAKE:
            log.info(
                "%s: closed, it speaks TLS where none is expected; use an http:// URL, or give the listener "
                "a certificate",
                self.address,
            )
            self.transport.close()
            return
        end = self._unread.find(b"\r\n\r\n", 0, self._limits.head) + 4
        if end >= 4 or len(self._unread) >= self._limits.head:
            self._timer.cancel()
            self.hold("answer")
            self.task = self._loop.create_task(self._serve(end if end >= 4 else 0))

    async def _serve(self, size: int) -> None:
        """Answer the request whose head has this many bytes; 0: it is too large."""
        rejected = False
        try:
            response = await self._server.answer(self._check(size))
        except HttpError as error:
            response, rejected = self._server.rejection(error.status), True
            if error.allow:
                response = response._replace(fields={**response.fields, "Allow": ", ".join(error.allow)})
        self.task = None
        if self.transport.is_closing():
            return
        ends = rejected or self._ends or self._length > 0 or self._half_closed or self._server.stopping
        self.transport.write(self._encode(response, ends))
        if ends:
            self._unread.clear()
            self.finish(LINGER)
            if self._half_closed:
                self.transport.close()  # the client can send nothing more
            return
        self._timer = self._loop.call_later(self._limits.idle_timeout, self.finish, LINGER)
        self._since = self._loop.time()
        self.release("answer")

    def _check(self, size: int) -> HttpRequest:
        """Check the head of so many bytes; raises HttpError."""
        self._head_only = False
        if not size:
            raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        head = bytes(self._unread[:size])
        del self._unread[:size]
        if head.count(b"\n") > FIELDS + 2:  # the request line and the empty one
            raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        lengths = _LENGTHS.findall(head)
        if len(lengths) > 1 or b"," in b"".join(lengths) or _LOOSE.search(head):
            raise HttpError(HTTPStatus.BAD_REQUEST)
        try:
            parser = h11.Connection(h11.SERVER)
            parser.receive_data(head)
            event = cast("h11.Request", parser.next_event())
        except h11.RemoteProtocolError as error:
            raise HttpError(HTTPStatus(error.error_status_hint)) from None
        fields: dict[str, str] = {}
        for name, value in event.headers:
            key, text = name.decode("ascii"), value.decode("latin-1")
            fields[key] = f"{fields[key]},{text}" if key in fields else text  # as signatures of AWS join them
        method, target = event.method.decode("ascii"), event.target.decode("ascii")
        if event.http_version not in (b"1.0", b"1.1") or not target.startswith("/"):
            raise HttpError(HTTPStatus.BAD_REQUEST)
        if not fields.get("authorization", "").isascii():  # as all schemes are (RFC 9110, section 11.4)
            raise HttpError(HTTPStatus.BAD_REQUEST)
        self._head_only = method == "HEAD"
        self._server.check_host(fields.get("host"), event.http_version)
        if method not in self._limits.methods:
            raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, self._limits.methods)
        self._length = int(fields.get("content-length", "0"))
        chunked = "transfer-encoding" in fields
        if (chunked or self._length) and method in ("GET", "HEAD"):
            raise HttpError(HTTPStatus.BAD_REQUEST)
        if chunked:
            raise HttpError(HTTPStatus.LENGTH_REQUIRED)
        if self._length > self._limits.body:
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        options = fields.get("connection", "").lower()
        self._ends = event.http_version == b"1.0" or "close" in options
        self._goes_on = parser.they_are_waiting_for_100_continue
        path, _, query = target.partition("?")
        return HttpRequest(method, path, query, fields, self.address, self._read_body, self._while_connected)

    async def _read_body(self) -> bytes:
        """Read the body of the current request; raises HttpError."""
        if not self._length:
            return b""
        if self._goes_on and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if len(self._unread) < self._length:
            await self._receive_body()
        with memoryview(self._unread) as unread, unread[: self._length] as part:
            body = bytes(part)
        del self._unread[: self._length]
        self._length = 0
        return body

    async def _receive_body(self) -> None:
        """Wait until the body is complete; raises HttpError."""
        if self._half_closed:
            raise HttpError(HTTPStatus.BAD_REQUEST)
        self._awaited = self._loop.create_future()
        self.release("answer")
        try:
            async with asyncio.timeout(self._limits.body_timeout):
                await self._awaited
        except TimeoutError:
            raise HttpError(HTTPStatus.REQUEST_TIMEOUT) from None
        finally:
            self.hold("answer")
            self._awaited = None
            self._server.guests.leave(self, self.address)

    async def _while_connected(self, work: Coroutine[Any, Any, bytes]) -> bytes:
        """Carry out what may wait for long; it is cancelled if the client closes the connection."""
        self._waits = True
        self.release("answer")
        try:
            return await work
        finally:
            self._waits = False
            self.hold("answer")

    def _encode(self, response: HttpResponse, ends: bool) -> bytes:
        """The bytes of a response; `ends`: the connection is closed after it. Raises ValueError."""
        fields = self._server.fields | {
            "Date": _date(int(time.time())),
            "Content-Type": response.content_type,
            "Content-Length": str(len(response.body)),
        }
        if ends:
            fields["Connection"] = "close"
        fields |= response.fields
        values = "".join([f"\n{name}: {value}" for name, value in fields.items()])
        if values.count("\n") != len(fields) or "\r" in values:  # a value would begin a field of its own
            raise ValueError("a line break in a field of a response")
        head = f"HTTP/1.1 {response.status.value} {response.status.phrase}{values}\n\n"
        encoded = head.replace("\n", "\r\n").encode("latin-1")
        return encoded if self._head_only else encoded + response.body


@lru_cache(maxsize=4)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)


def _names(host: str) -> set[str]:
    """Return the names of this machine that a Host may have, besides addresses."""
    own = socket.gethostname().lower()
    short = own.partition(".")[0]
    return {"localhost", host.lower(), own, short, f"{short}.local"}
