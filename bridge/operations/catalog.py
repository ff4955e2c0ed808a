"""The operations on streams, each declared once: name, request, right, result.

    operation               request                                     right             result
    createMessageStream     definition                                  manage            -
    updateMessageStream     definition, [ifVersion]                     manage            -
    deleteMessageStream     name                                        manage            -
    describeMessageStream   name                                        read or manage    messageStreamInfo
    listStreams             [details], [after], [limit]                 -                 streams, [more],
                                                                                          [messageStreamInfos]
    appendMessage           name, payload, [messageId]                  publish           sequenceNumber
    appendMessages          name, payloads, [messageIds]                publish           sequenceNumbers
    readMessages            streamName, [readMessagesOptions]           read              messages
    purgeMessageStream      name, [upto], [topic]                       manage            purgedMessages
    pauseExports            name, [export]                              manage            exports: identifiers
    resumeExports           name, [export]                              manage            exports: identifiers
    retryExports            name, [export]                              manage            exports: identifiers
    fetchMessages           name, consumer, [maxMessageCount],          read              messages
                            [timeoutMillis]
    ackMessages             name, consumer, [ack], [nack],              read              notPending: numbers
                            [delayMillis], [inProgress], [terminate],
                            [reason]
    listClients             -                                           manage: clients   clients
    disconnectClients       [client], [user], [certificate],            manage: clients   clients: ids
                            [address]
    forgetClient            client                                      manage: clients   connected

What it promises:

* Rights are those on the stream and to the operation (`bridge.access.rules`). They are checked before the
  stream is looked up, so a refusal does not reveal whether it exists. A request that waits needs them at its
  end too, if the rules have changed.
* Denied topics cannot be read from a stream either: a caller that reads or updates a stream must not be
  denied any of its topics. Messages on denied topics are left out of reads wherever they are stored, dead
  letters about them too; a consumer does not deliver them to the caller, and exports that it defines never
  get them (`plugin.withheld`).
* A definition also needs `read` on everything that its topics cover, because the stream keeps copies, and
  `publish` on each other stream to which its exports append. Unless the caller is trusted, its exports may
  reach only what the configuration allows (`bridge.operations.allow`).
* listStreams returns the streams that the caller may describe.
* Operations on MQTT clients need `manage` on the topic `clients`.
* Each change is logged once, and each change and refusal is in the audit log, with who made it
  (`bridge.operations.changes`).
* An unknown key in a request is InvalidRequest: it is misspelt, or belongs to another version.

`name` and `streamName` mean the same in every request that names a stream.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from inspect import isawaitable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from bridge.consumers.consumer import Delivery, Verdicts
from bridge.errors import InvalidRequest, StreamNotFound, Unauthorized, UnknownOperation
from bridge.model import (
    DEFAULT_MAX_SIZE,
    MAX_INT32,
    MAX_MILLIS,
    MessageStreamDefinition,
    MessageStreamInfo,
)
from bridge.net.turns import Turns
from bridge.operations.allow import check_allowed
from bridge.operations.bounds import Bounds, owner_of
from bridge.operations.bounds import check as check_bounds
from bridge.operations.changes import Change, refused
from bridge.operations.definitions import with_secrets
from bridge.operations.reading import MOST_BYTES, ReadMessagesOptions, Turn
from bridge.plugin.allow import Allow
from bridge.plugin.api import appends_to
from bridge.plugin.consumer import DAY, MOST
from bridge.plugin.withheld import Withheld
from bridge.streams import headers
from bridge.streams.segment import StreamMessage

if TYPE_CHECKING:
    from bridge.access.rules import Identity, StreamRight
    from bridge.operations.manager import StreamManager
    from bridge.streams.stream import Stream

AT_ONCE = 5  # streams described at a time before other clients are served
NAMES = 500  # names of streams whose rights are looked up at a time


# -- requests ------------------------------------------------------------


class Request(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The base of all requests. `request_id` is repeated in the reply."""

    request_id: str = ""

    @property
    def stream(self) -> str:
        """The name of the stream; empty if the request names none."""
        return ""

    @property
    def about(self) -> str:
        """Return the subject of the request, for the logs."""
        return self.stream


class ListStreams(Request, kw_only=True, frozen=True):
    """listStreams: the names after `after`, at most `limit`; with `details` also their descriptions."""

    details: bool = False
    after: str = ""
    limit: Annotated[int, Meta(ge=1, le=MAX_INT32)] | None = None


class Named(Request, kw_only=True, frozen=True):
    """A request that names a stream."""

    name: str | None = None
    stream_name: str | None = None

    @property
    def stream(self) -> str:
        """The name; raises InvalidRequest if there is none."""
        name = self.name or self.stream_name
        if not name:
            raise InvalidRequest("the request: `name` is missing; give the name of the stream")
        return name


class Define(Request, kw_only=True, frozen=True):
    """createMessageStream."""

    definition: dict[str, Any] | None = None

    @property
    def stream(self) -> str:
        """The name in the definition, valid or not; raises InvalidRequest without a definition."""
        if self.definition is None:
            raise InvalidRequest("the request: `definition` is missing")
        return str(self.definition.get("name", ""))


class Update(Define, kw_only=True, frozen=True):
    """updateMessageStream. `if_version` is the version of the description that the change started from."""

    if_version: str | None = None


class Append(Named, kw_only=True, frozen=True):
    """appendMessage. A message whose id was seen in the deduplication window is not stored again."""

    payload: bytes | None = None
    message_id: bytes = b""


class AppendAll(Named, kw_only=True, frozen=True):
    """appendMessages."""

    payloads: list[bytes] | None = None
    message_ids: list[bytes] = []


class Read(Named, kw_only=True, frozen=True):
    """readMessages."""

    read_messages_options: ReadMessagesOptions | None = None


class Purge(Named, kw_only=True, frozen=True):
    """purgeMessageStream: all messages, those below number `upto`, or those on a topic filter."""

    upto: int | None = None
    topic: str | None = None


class OfExports(Named, kw_only=True, frozen=True):
    """pauseExports, resumeExports, retryExports: one export of the stream, or all of them."""

    export: str | None = None


Numbers = Annotated[list[int], Meta(max_length=MOST)]


class Fetch(Named, kw_only=True, frozen=True):
    """fetchMessages: lease messages of a consumer, waiting up to `timeout_millis` for the first one."""

    consumer: str = ""
    max_message_count: Annotated[int, Meta(ge=1, le=MAX_INT32)] = 1
    timeout_millis: Annotated[int, Meta(ge=0, le=MAX_MILLIS)] = 0


class Ack(Named, kw_only=True, frozen=True):
    """ackMessages: the results of fetched messages, by sequence number.

    `ack`: done. `nack`: deliver again after `delay_millis`. `in_progress`: restart the deadline. `terminate`:
    never deliver again, because of `reason`.
    """

    consumer: str = ""
    ack: Numbers = []
    nack: Numbers = []
    in_progress: Numbers = []
    terminate: Numbers = []
    delay_millis: Annotated[int, Meta(ge=0, le=DAY)] = 0
    reason: str = ""


class OfClients(Request, kw_only=True, frozen=True):
    """disconnectClients: the connected clients that match all given fields; at least one is required.

    `certificate` is the SHA-256 fingerprint or the serial number, in hexadecimal; `address` may be a network.
    """

    client: str | None = None
    user: str | None = None
    certificate: str | None = None
    address: str | None = None

    @property
    def about(self) -> str:
        """Return the given fields."""
        given = {name: getattr(self, name) for name in ("client", "user", "certificate", "address")}
        return ", ".join(f"{name} {value!r}" for name, value in given.items() if value is not None)


class OfClient(Request, kw_only=True, frozen=True):
    """forgetClient."""

    client: str

    @property
    def about(self) -> str:
        """The client."""
        return f"client {self.client!r}"


class OfAll(Request, kw_only=True, frozen=True):
    """listClients."""


# -- results ------------------------------------------------------------


class Done(Struct):
    """The operation has no result."""


class Described(Struct, rename="camel"):
    """A stream."""

    message_stream_info: MessageStreamInfo


class Listed(Struct, rename="camel"):
    """Sorted names. `more` only if not all streams were requested, or not all descriptions fit."""

    streams: list[str]
    more: bool | UnsetType = UNSET
    message_stream_infos: list[MessageStreamInfo] | UnsetType = UNSET


class Appended(Struct, rename="camel"):
    """The number of the message."""

    sequence_number: int


class AppendedAll(Struct, rename="camel"):
    """The numbers of the messages, in their order."""

    sequence_numbers: list[int]


class Found(Struct):
    """The messages of a read. The reply must have `least` of them, and the others as far as they fit."""

    messages: list[StreamMessage]
    stream: str
    least: int


class Fetched(Struct):
    """Leased messages; none if none arrived in time."""

    deliveries: list[Delivery]
    stream: str


class Acked(Struct, rename="camel"):
    """The numbers to which the request did not apply: already settled, or leased to another client."""

    not_pending: list[int]


class Purged(Struct, rename="camel"):
    """The number of messages that were dropped."""

    purged_messages: int


class Exports(Struct):
    """The identifiers of the exports concerned."""

    exports: list[str]


class ClientList(Struct):
    """Clients that are connected or have a session, by id; see `bridge.mqtt.server.clients.describe`.

    `unmatched` are the topics of their messages that no stream takes: see `bridge.mqtt.broker.unmatched`.
    """

    clients: list[dict[str, Any]]
    unmatched: list[dict[str, Any]]


class Disconnected(Struct):
    """The ids of the clients whose connections were closed."""

    clients: list[str]


class Forgotten(Struct):
    """Whether the client was connected."""

    connected: bool


OfStreams = Done | Described | Listed | Appended | AppendedAll | Found | Fetched | Acked | Purged | Exports
Result = OfStreams | ClientList | Disconnected | Forgotten
R = TypeVar("R", bound=Request)


class Clients(Protocol):
    """The MQTT clients of this gateway; `bridge.mqtt.server.clients` has them."""

    def known(self) -> list[dict[str, Any]]:
        """Return all clients that are connected or have a session."""

    def unmatched(self) -> list[dict[str, Any]]:
        """Return the topics on which they publish and that no stream takes, most messages first."""

    def disconnect(self, asked: OfClients) -> list[str]:
        """Close connections. Returns the ids of their clients. Raises InvalidRequest."""

    async def forget(self, client: str) -> bool:
        """End a session. Returns whether its client was connected. Raises InvalidRequest."""


class _Hidden:
    """What a caller is denied to read: at this moment, because the rules may change while it waits."""

    def __init__(self, caller: Identity) -> None:
        self._caller, self._withheld = caller, Withheld(caller.withheld)

    def __call__(self) -> Withheld | None:
        caller = self._caller.latest()
        if caller is not self._caller:
            self._caller = caller
            self._withheld = Withheld(self._caller.withheld)
        return self._withheld if self._caller.withheld else None


class Call(NamedTuple):
    """A request in progress. `room` and `turn` are those of `Operations.call`."""

    operations: Operations
    caller: Identity
    room: int = MOST_BYTES
    turn: Turn = nullcontext

    @property
    def manager(self) -> StreamManager:
        """The manager of all streams."""
        return self.operations.manager


class Operation(NamedTuple):
    """One operation. The caller needs one of `rights` on the stream; if there are none, it needs no right.

    An operation that is not on a stream needs `manage` on the topic `on`. For an operation that changes
    something, `audit` makes the text for both logs from its result. A request that `waits` ends with its
    connection. An operation that `looks` changes nothing.
    """

    request: type[Request]
    rights: tuple[StreamRight, ...]
    carry_out: Callable[[Call, Any], Struct | Awaitable[Struct]]
    audit: Callable[[Any], str] | None = None
    waits: bool = False
    looks: bool = False
    on: str = ""


class NewDeliveries(NamedTuple):
    """How streams created by the Firehose API are stored. `max_size` is in bytes."""

    max_size: int = DEFAULT_MAX_SIZE
    flush_on_write: bool = False


class Operations:
    """Carries out operations for the front ends. Must be used in the event loop's thread."""

    def __init__(
        self,
        manager: StreamManager,
        allow: Allow | None = None,
        most_bytes: int = MOST_BYTES,
        new_deliveries: NewDeliveries = NewDeliveries(),  # noqa: B008 - immutable
        turns: Turns | None = None,
        bounds: Bounds = Bounds(),  # noqa: B008 - immutable
    ) -> None:
        """`allow` is what clients' definitions may reach. A read returns up to `most_bytes` of messages.

        `turns` are those of all work that clients can make expensive; by default, new ones. `bounds` are what
        clients may create.
        """
        self.manager, self.allow, self._most_bytes = manager, allow or Allow(), most_bytes
        self.new_deliveries = new_deliveries
        self.bounds, self.turns = bounds, turns or Turns(manager.store.runtime)
        self.clients: Clients | None = None  # set by the MQTT front end

    async def call(
        self,
        name: str,
        request: Request,
        caller: Identity,
        *,
        room: int | None = None,
        turn: Turn = nullcontext,
    ) -> Result:
        """Carry out one operation. Raises StreamBridgeError or OSError.

        A read returns at most `room` bytes of messages. It enters `turn()` to read them once they are
        available.
        """
        room = self._most_bytes if room is None else room
        call = Call(self, caller, room, turn)
        return cast("Result", await self.carry_out(name, _operation(name), call, request))

    def call_now(self, name: str, request: Request, caller: Identity) -> Result:
        """The same, as one slice, for operations that do not wait: all except appends, reads and purges."""
        operation = _operation(name)
        _authorize(name, operation, request, caller, self.manager)
        with Change(name, caller, self.manager, request, operation.audit) as change:
            result = operation.carry_out(Call(self, caller), request)
            change.result = result = _at_once(result) if isawaitable(result) else result
        return cast("Result", result)

    async def carry_out(self, name: str, operation: Operation, call: Call, request: Request) -> Struct:
        """Carry out an operation of any table, by its name, in turns. Raises StreamBridgeError or OSError."""
        return await self.turns.work(call.caller.turn, self._carry_out(name, operation, call, request))

    async def _carry_out(self, name: str, operation: Operation, call: Call, request: Request) -> Struct:
        call = call._replace(caller=call.caller.latest())  # the request may have waited
        _authorize(name, operation, request, call.caller, call.manager)
        with Change(name, call.caller, self.manager, request, operation.audit) as change:
            result = operation.carry_out(call, request)
            change.result = result = (await result) if isawaitable(result) else result
        caller = call.caller.latest()
        if operation.waits and caller is not call.caller:  # the rules have changed meanwhile
            _authorize(name, operation, request, caller, call.manager)
        return result

    def submit(self, name: str, payload: bytes, caller: Identity) -> tuple[Stream, int]:
        """The first half of appendMessage: see `StreamManager.submit`."""
        try:
            caller.require_operation(APPEND, looks=False)
            caller.require(name, "publish")
        except Unauthorized as error:
            refused(APPEND, caller, name, error)
            raise
        return self.manager.submit(name, payload, headers=self.headers(name, caller))

    def headers(self, name: str, caller: Identity) -> bytes:
        """Return the headers of a message that a caller appends to a stream."""
        if not caller.client_id or not self.manager.wants_client(name):
            return b""
        return headers.encode(headers.Headers(client=caller.client_id))


def _operation(name: str) -> Operation:
    operation = OPERATIONS.get(name)
    if operation is None:
        raise UnknownOperation(f"there is no operation {name!r}; known: {', '.join(OPERATIONS)}")
    return operation


def _at_once(work: Awaitable[Struct]) -> Struct:
    """Return the result of work that does not wait, but only lets others go first."""
    steps = work.__await__()
    while True:
        try:
            waits = next(steps)
        except StopIteration as done:
            return cast("Struct", done.value)
        assert waits is None


def _authorize(
    name: str, operation: Operation, request: Request, caller: Identity, manager: StreamManager
) -> None:
    try:
        caller.require_operation(name, looks=operation.looks)
        if operation.on and not caller.may_manage(operation.on):
            raise Unauthorized(f"{caller.label} has no right `manage` on {operation.on}; see [[mqtt.acl]]")
        if operation.rights:
            caller.require(request.stream, *operation.rights)
        if operation.rights == ("read",):
            _ensure_nothing_denied(caller, request.stream, manager)
    except Unauthorized as error:
        refused(name, caller, request.about, error)
        raise


def _ensure_nothing_denied(caller: Identity, name: str, manager: StreamManager) -> None:
    """Raise Unauthorized if a stream stores topics that the caller is denied to read."""
    definition = manager.definitions.get(name)
    topics = [] if definition is None else definition.topics
    denied = caller.denied_to_read((*topics, f"streams/{name}", f"streams/{name}/#"))
    if denied is not None:
        raise Unauthorized(
            f"{caller.label} is denied `read` on {denied!r}, by `deny` of a rule or role, and the stream "
            f"{name!r} stores such topics"
        )


# -- operations ------------------------------------------------------------


def checked(
    call: Call,
    raw: Mapping[str, Any] | MessageStreamDefinition,
    old: MessageStreamDefinition | None,
) -> MessageStreamDefinition:
    """Return a valid definition that the caller may define. Raises InvalidDefinition or Unauthorized."""
    caller, manager = call.caller, call.manager
    definition = with_secrets(manager.check(raw), old)
    if old is not None:  # otherwise a caller could remove a topic and then read its stored messages
        _ensure_nothing_denied(caller, old.name, manager)
    for topic_filter in definition.topics:
        if not caller.may_read_all(topic_filter):
            raise Unauthorized(
                f"{caller.label} may not read all topics of {topic_filter!r}, which the stream would "
                "store; add `read` to a rule in [[mqtt.acl]]"
            )
    if caller.withheld:
        definition = manager.check(_withhold(definition, old, caller.withheld))
    exports = [raw for configs in definition.export_definition.values() for raw in configs]
    for name in sorted({name for raw in exports for name in appends_to(raw).values()}):
        caller.require(name, "publish")
    if not caller.trusted:
        check_allowed(call.operations.allow, manager.registry, definition, old)
        check_bounds(call.operations.bounds, manager, caller, definition, old)
    return definition


def _withhold(
    definition: MessageStreamDefinition, old: MessageStreamDefinition | None, filters: Sequence[str]
) -> MessageStreamDefinition:
    """Return a definition whose new and changed exports do not get messages on these topics."""
    exports: dict[str, list[dict[str, Any]]] = {}
    for kind, configs in definition.export_definition.items():
        known = {} if old is None else {raw["identifier"]: raw for raw in old.export_definition.get(kind, ())}
        exports[kind] = []
        for raw in configs:
            before = known.get(raw["identifier"])
            without = {key: value for key, value in raw.items() if key != "withheld"}
            if before is None or without != {key: one for key, one in before.items() if key != "withheld"}:
                before = without | {"withheld": sorted({*raw.get("withheld", ()), *filters})}
            exports[kind].append(before)
    return msgspec.structs.replace(definition, export_definition=exports)


def _create(call: Call, request: Define) -> Done:
    definition = checked(call, request.definition or {}, None)
    call.manager.create(definition, owner=owner_of(call.caller))
    return Done()


def _update(call: Call, request: Update) -> Done:
    old = call.manager.definitions.get(request.stream)
    call.manager.update(checked(call, request.definition or {}, old), request.if_version)
    return Done()


def _delete(call: Call, request: Named) -> Done:
    call.manager.delete(request.stream)
    return Done()


def _describe(call: Call, request: Named) -> Described:
    return Described(call.manager.describe(request.stream))


async def _list(call: Call, request: ListStreams) -> Listed:
    caller, every = call.caller, call.manager.names()
    names: list[str] = []
    for at in range(bisect_right(every, request.after), len(every), NAMES):
        some = every[at : at + NAMES]
        names += [name for name in some if caller.may("read", name) or caller.may("manage", name)]
        if len(names) > (request.limit or len(every)):
            break
        await asyncio.sleep(0)
    wanted = names[: request.limit]
    if request.details:
        return await _list_details(call, wanted, len(names) > len(wanted))
    return Listed(wanted, UNSET if request.limit is None else len(names) > len(wanted))


async def _list_details(call: Call, names: list[str], more: bool) -> Listed:
    """Return the descriptions that fit into a reply, at least one."""
    infos: list[MessageStreamInfo] = []
    room = call.room
    for number, name in enumerate(names, 1):
        if not number % AT_ONCE:
            await asyncio.sleep(0)
        with suppress(StreamNotFound):  # deleted in the meantime
            info = call.manager.describe(name)
            room -= len(msgspec.json.encode(info)) + len(name) + 3
            if room < 0 and infos:
                more = True
                break
            infos.append(info)
    return Listed([info.definition.name for info in infos], more, infos)


async def _append(call: Call, request: Append) -> Appended:
    name = request.stream
    if request.payload is None:
        raise InvalidRequest("the request: `payload` is missing")
    kept = call.operations.headers(name, call.caller)
    number = await call.manager.append(name, request.payload, message_id=request.message_id, headers=kept)
    return Appended(number)


async def _append_all(call: Call, request: AppendAll) -> AppendedAll:
    name, payloads, ids = request.stream, request.payloads or [], request.message_ids
    if ids and len(ids) != len(payloads):
        raise InvalidRequest(f"the request: {len(payloads)} payloads and {len(ids)} messageIds")
    kept = call.operations.headers(name, call.caller)
    return AppendedAll(await call.manager.append_all(name, payloads, ids, kept))


async def _read(call: Call, request: Read) -> Found:
    options = request.read_messages_options or ReadMessagesOptions()
    messages = await call.manager.read(
        request.stream, options, max_bytes=call.room, turn=call.turn, hidden=_Hidden(call.caller)
    )
    return Found(messages, request.stream, options.min_message_count)


async def _fetch(call: Call, request: Fetch) -> Fetched:
    name, wait = request.stream, request.timeout_millis / 1000
    deliveries = await call.manager.fetch(
        name,
        request.consumer,
        request.max_message_count,
        wait=wait,
        holder=call.caller.client_id,
        max_bytes=call.room,
        hidden=_Hidden(call.caller),
    )
    return Fetched(deliveries, name)


async def _ack(call: Call, request: Ack) -> Acked:
    verdicts = Verdicts(
        request.ack,
        request.nack,
        request.in_progress,
        request.terminate,
        request.delay_millis,
        request.reason,
    )
    caller = call.caller
    other = await call.manager.acknowledge(
        request.stream, request.consumer, verdicts, holder=caller.client_id, trusted=caller.trusted
    )
    return Acked(other)


async def _purge(call: Call, request: Purge) -> Purged:
    return Purged(await call.manager.purge(request.stream, upto=request.upto, topic=request.topic))


def _names(done: Exports) -> str:
    return ", ".join(done.exports) or "none"


def _pause(call: Call, request: OfExports) -> Exports:
    return Exports(call.manager.pause(request.stream, request.export, paused=True))


def _resume(call: Call, request: OfExports) -> Exports:
    return Exports(call.manager.pause(request.stream, request.export, paused=False))


def _retry(call: Call, request: OfExports) -> Exports:
    return Exports(call.manager.retry(request.stream, request.export))


def _clients(call: Call) -> Clients:
    clients = call.operations.clients
    if clients is None:
        raise InvalidRequest('there are no clients of ours: mode = "external"; ask that broker')
    return clients


def _list_clients(call: Call, _request: OfAll) -> ClientList:
    return ClientList(_clients(call).known(), _clients(call).unmatched())


def _disconnect(call: Call, request: OfClients) -> Disconnected:
    return Disconnected(_clients(call).disconnect(request))


async def _forget(call: Call, request: OfClient) -> Forgotten:
    return Forgotten(await _clients(call).forget(request.client))


CLIENTS = "clients"  # the topic on which operations on MQTT clients need a right
APPEND, READ = "appendMessage", "readMessages"
OPERATIONS: dict[str, Operation] = {
    "createMessageStream": Operation(Define, ("manage",), _create, lambda _: "created"),
    "updateMessageStream": Operation(Update, ("manage",), _update, lambda _: "updated"),
    "deleteMessageStream": Operation(Named, ("manage",), _delete, lambda _: "deleted"),
    "describeMessageStream": Operation(Named, ("read", "manage"), _describe, looks=True),
    "listStreams": Operation(ListStreams, (), _list, looks=True),
    APPEND: Operation(Append, ("publish",), _append),
    "appendMessages": Operation(AppendAll, ("publish",), _append_all),
    READ: Operation(Read, ("read",), _read, waits=True, looks=True),
    "fetchMessages": Operation(Fetch, ("read",), _fetch, waits=True),
    "ackMessages": Operation(Ack, ("read",), _ack),
    "purgeMessageStream": Operation(
        Purge, ("manage",), _purge, lambda done: f"purged, messages dropped: {done.purged_messages}"
    ),
    "pauseExports": Operation(OfExports, ("manage",), _pause, lambda done: f"exports paused: {_names(done)}"),
    "resumeExports": Operation(
        OfExports, ("manage",), _resume, lambda done: f"exports resumed: {_names(done)}"
    ),
    "retryExports": Operation(
        OfExports, ("manage",), _retry, lambda done: f"exports retried: {_names(done)}"
    ),
    "listClients": Operation(OfAll, (), _list_clients, on=CLIENTS, looks=True),
    "disconnectClients": Operation(
        OfClients, (), _disconnect, lambda done: f"clients disconnected: {len(done.clients)}", on=CLIENTS
    ),
    "forgetClient": Operation(OfClient, (), _forget, lambda _: "client forgotten", on=CLIENTS),
}
