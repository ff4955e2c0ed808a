"""The documents of the page, as JSON. The size of each is bounded, whatever the request asks for.

    /status.json                  sums, and at most `ROWS` streams and exports, those with problems first;
                                  `stream=TEXT`, `export=TEXT`: only those that contain it
    /history.json                 the last hour of the sums, and of the `CHARTS` exports with most pending
    /stream.json?name=NAME        one stream: its state, its exports, its last hour
    /tail.json?name=NAME          its newest messages, at most `MESSAGES`; `after=NUMBER`, `topic=FILTER`
    /clients.json                 `find=TEXT`, `sort=ORDER`, `offset=N`: connected clients (`clients`)
    /events.json[?after=NUMBER]   recent events (`events`)

Messages are read with the operation readMessages, with the rights of the visitor. A payload is shown in part,
as text if possible.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import msgspec
from msgspec import Struct

from bridge.errors import NotEnoughMessages, StreamBridgeError, StreamNotFound, Unauthorized
from bridge.http.clients import ORDERS
from bridge.http.state import LOSSES, ServiceState, lost
from bridge.net.httpserver import JSON, HttpRequest, HttpResponse, Route, json_response
from bridge.operations.catalog import Found, Read
from bridge.operations.reading import ReadMessagesOptions
from bridge.printable import printable
from bridge.topics import filter_mistake

if TYPE_CHECKING:
    from bridge.http.observer import Observer
    from bridge.http.visitors import Visitors
    from bridge.operations.catalog import Operations
    from bridge.streams.segment import StreamMessage

ROWS = 500
CHARTS = 6
MESSAGES = 50
LOOKED_THROUGH = 5_000  # messages that are searched for a topic filter
ROOM = 1024 * 1024  # bytes of messages that are read at a time
READS = 50  # of a stream with large messages for one document, and as many again for its newest
SHOWN = 500  # bytes of a payload
TEXT = 1_000  # characters of a parameter


class QueryError(ValueError):
    """Raised for a wrong parameter."""


class Totals(Struct, rename="camel", kw_only=True):
    """The sums of all streams and exports. `lost` is what `state.lost` counts,

    `dropped` the other messages that streams have dropped: by their limits and by purges.
    """

    streams: int
    exports: int
    rate: float
    stored: int
    messages: int
    size: int
    pending: int
    active: int
    failing: int
    stopped: int
    losing: int
    dropped: int
    lost: int


class Status(ServiceState, rename="camel", kw_only=True):
    """/status.json: a `ServiceState` with at most `ROWS` streams and exports, and the sums of all."""

    totals: Totals


class Tailed(Struct, rename="camel", kw_only=True):
    """A message in /tail.json: `payload` in part, as text, or in hexadecimal."""

    number: int
    time: int
    topic: str
    size: int
    payload: str
    hex: bool


class Documents:
    """The routes of the documents."""

    def __init__(self, observer: Observer, operations: Operations, visitors: Visitors) -> None:
        self._observer, self._operations, self._visitors = observer, operations, visitors
        self._status: tuple[ServiceState, bytes] | None = None

    def routes(self) -> dict[str, Route]:
        """The routes by path."""
        found: dict[str, Callable[[HttpRequest, dict[str, str]], Awaitable[bytes]]] = {
            "/status.json": self.status,
            "/history.json": self.history,
            "/stream.json": self.stream,
            "/tail.json": self.tail,
            "/clients.json": self.clients,
            "/events.json": self.events,
        }
        return {path: self._route(make) for path, make in found.items()}

    def _route(self, make: Callable[[HttpRequest, dict[str, str]], Awaitable[bytes]]) -> Route:
        async def route(request: HttpRequest) -> HttpResponse:
            await self._visitors.ensure_may_look(request)
            try:
                query = {key: values[0][:TEXT] for key, values in parse_qs(request.query).items()}
                return HttpResponse(HTTPStatus.OK, JSON, await make(request, query) + b"\n")
            except ValueError as error:
                return _failure(HTTPStatus.BAD_REQUEST, str(error))
            except StreamNotFound as error:
                return _failure(HTTPStatus.NOT_FOUND, str(error))
            except Unauthorized as error:
                return _failure(HTTPStatus.FORBIDDEN, str(error))
            except (StreamBridgeError, OSError) as error:
                return _failure(HTTPStatus.SERVICE_UNAVAILABLE, str(error))

        return route

    async def status(self, request: HttpRequest, query: dict[str, str]) -> bytes:
        state = self._observer.state()
        stream, export = query.get("stream", "").casefold(), query.get("export", "").casefold()
        if stream or export:
            return msgspec.json.encode(_bounded(state, stream, export))
        if self._status is None or self._status[0] is not state:
            self._status = state, msgspec.json.encode(_bounded(state))
        return self._status[1]

    async def history(self, request: HttpRequest, query: dict[str, str]) -> bytes:
        history = self._observer.history
        exports = [export for export in self._observer.state().exports if not export.disabled]
        shown = heapq.nlargest(CHARTS, exports, lambda export: (export.error is not None, export.lag))
        found = {
            "times": history.times(),
            **{name: history.column(name) for name in ("stored", "size", "pending", "lost")},
            "exports": [
                {
                    "stream": export.stream,
                    "export": export.identifier,
                    "pending": history.column("stream", export.stream, "pending", export.identifier),
                }
                for export in shown
            ],
        }
        return msgspec.json.encode(found)

    async def stream(self, request: HttpRequest, query: dict[str, str]) -> bytes:
        name = query.get("name", "")
        state, history = self._observer.state(), self._observer.history
        shown = next((stream for stream in state.streams if stream.name == name), None)
        if shown is None:
            raise StreamNotFound(f"there is no stream {name!r}")
        self._operations.manager.stream(name)  # raises StreamNotFound: the state is a moment old
        definition = self._operations.manager.definitions[name]
        times = await self._observer.times_of(name)
        columns = history.columns("stream", name)
        found = {
            "time": state.time,
            "stream": shown,
            "exports": [export for export in state.exports if export.stream == name],
            "topics": definition.topics,
            "firstTime": times.first,
            "lastTime": times.last,
            "times": history.times(),
            "stored": columns.get(("stored",), []),
            "series": [
                {"what": key[0], "name": key[1], "values": values}
                for key, values in sorted(columns.items())
                if len(key) == 2  # what, and the reason or the export
            ],
        }
        return msgspec.json.encode(found)

    async def tail(self, request: HttpRequest, query: dict[str, str]) -> bytes:
        caller = await self._visitors.reader(request)
        name, topic = query.get("name", ""), query.get("topic") or None
        after = _number(query, "after", -1)
        if topic is not None and (mistake := filter_mistake(topic)) is not None:
            raise QueryError(mistake)
        caller.require(name, "read")  # before the stream is looked up
        stream = self._operations.manager.stream(name)
        end = stream.next_sequence
        looked = MESSAGES if topic is None else LOOKED_THROUGH
        start = max(after + 1, end - looked, 0)
        left = max(0, start - after - 1) if after >= 0 else 0
        newest: deque[StreamMessage] = deque(maxlen=MESSAGES)
        at = start
        for number in range(2 * READS):
            if number == READS and at < end - MESSAGES:  # the messages are large: the newest come first
                left += end - MESSAGES - at
                at = end - MESSAGES
            options = ReadMessagesOptions(
                desired_start_sequence_number=at, max_message_count=looked, topic=topic
            )
            read = Read(stream_name=name, read_messages_options=options)
            try:
                result = at < end and await self._operations.call("readMessages", read, caller, room=ROOM)
            except NotEnoughMessages:
                break
            if not isinstance(result, Found) or not result.messages:
                break
            left += max(0, len(newest) + len(result.messages) - MESSAGES)
            newest.extend(result.messages)
            at = newest[-1].sequence_number + 1
        document = {
            "messages": [_tailed(message) for message in newest],
            "newest": max(end, at) - 1,
            "epoch": stream.epoch,
            "left": left,
        }
        return msgspec.json.encode(document)

    async def clients(self, request: HttpRequest, query: dict[str, str]) -> bytes:
        order = query.get("sort", "queued")
        if order not in ORDERS:
            raise QueryError(f"sort: use one of {', '.join(ORDERS)}")
        page = await self._observer.directory.page(query.get("find", ""), order, _number(query, "offset", 0))
        return msgspec.json.encode(page)

    async def events(self, request: HttpRequest, query: dict[str, str]) -> bytes:
        return self._observer.events.document(_number(query, "after", 0))


def _number(query: dict[str, str], name: str, default: int) -> int:
    """A parameter that is a number of at most 18 digits; raises QueryError."""
    text = query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise QueryError(f"{name}: give a number")
    return int(text)


def _tailed(message: StreamMessage) -> Tailed:
    """A message, shortened."""
    data = message.payload[:SHOWN]
    text: str | None = None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:  # the last character may have been cut
        if (
            len(message.payload) > SHOWN
            and error.start > SHOWN - 4
            and error.reason == "unexpected end of data"
        ):
            text = data[: error.start].decode()
    return Tailed(
        number=message.sequence_number,
        time=message.ingest_time,
        topic=printable(message.topic.decode()[:TEXT]),
        size=len(message.payload),
        payload=data[: SHOWN // 4].hex(" ") if text is None else printable(text),
        hex=text is None,
    )


def _bounded(state: ServiceState, stream: str = "", export: str = "") -> Status:
    """Return the streams and exports of a state that contain a text, those with problems first."""
    streams, exports = state.streams, state.exports
    if stream:
        streams = [s for s in streams if stream in f"{s.name}\n{s.description}".casefold()]
    if export:
        exports = [e for e in exports if export in f"{e.stream}\n{e.identifier}\n{e.kind}".casefold()]
    failing = state.readiness.failing
    if len(streams) > ROWS:
        streams = heapq.nsmallest(
            ROWS, streams, lambda s: (s.error is None and s.name not in failing, s.name)
        )
    if len(exports) > ROWS:
        exports = heapq.nsmallest(
            ROWS, exports, lambda e: (not e.lost_messages, not e.stopped, e.error is None, -e.lag)
        )
    active = [e for e in state.exports if not e.disabled and not e.paused]
    totals = Totals(
        streams=len(state.streams),
        exports=len(state.exports),
        rate=round(sum(s.rate or 0 for s in state.streams), 2),
        stored=sum(s.newest + 1 for s in state.streams),
        messages=sum(s.messages for s in state.streams),
        size=sum(s.size for s in state.streams),
        pending=sum(e.lag for e in active),
        active=len(active),
        failing=sum(e.error is not None for e in active),
        stopped=sum(e.stopped for e in active),
        losing=sum(e.lost_messages > 0 for e in state.exports),
        dropped=sum(
            max(0, sum(n for why, n in s.dropped.items() if why not in LOSSES) - s.lost)
            for s in state.streams
        ),
        lost=lost(state),
    )
    shown = msgspec.structs.asdict(state) | {"streams": streams, "exports": exports}
    return Status(**shown, totals=totals)


def _failure(status: HTTPStatus, why: str) -> HttpResponse:
    return json_response({"error": why}, status)
