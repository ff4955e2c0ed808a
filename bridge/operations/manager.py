"""StreamManager: implements the operations on streams once, for all front ends.

Rules and errors are those of AWS IoT Greengrass Stream Manager (SDK `stream-manager` 1.1.2 and its developer
guide). Where AWS documents nothing, these rules apply:

* creating a name that exists is InvalidRequest, even with the same definition
* a full stream that rejects new data is UnknownFailure, and the message names the limit
* an empty stream has oldest = newest + 1: 0 and -1 when it is new
* a read's default maximum is its minimum; a start beyond the newest is NotEnoughMessages
* segment size over max size is InvalidRequest
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from bridge.consumers.consumer import Delivery, Host, Verdicts
from bridge.consumers.consumers import Consumers
from bridge.consumers.journal import highest_delivered
from bridge.errors import (
    ExportNotFound,
    InvalidDefinition,
    InvalidRequest,
    StorageFailed,
    StreamError,
    StreamInUse,
    StreamNotFound,
    UpdateFailed,
    UpdateNotAllowed,
)
from bridge.export.cursor import highest_exported
from bridge.model import (
    ExportStatus,
    MessageStreamDefinition,
    MessageStreamInfo,
    StorageStatus,
    identifiers,
    with_pauses,
)
from bridge.operations.bindings import STREAM_TOPICS, Bindings, Refusal
from bridge.operations.definitions import checked, settings_of, stored, without_secrets
from bridge.operations.reading import (
    MOST_BYTES,
    SLICE_BYTES,
    STEP,
    Hidden,
    ReadMessagesOptions,
    Reads,
    Turn,
    nothing,
)
from bridge.operations.validate import circles
from bridge.plugin.api import Record
from bridge.plugin.consumer import KIND
from bridge.plugin.discovery import Registry
from bridge.streams.dedup import SCOPED
from bridge.streams.segment import StreamMessage
from bridge.streams.store import StreamStore, in_slices
from bridge.streams.stream import Stream
from bridge.topics import filter_mistake, matches

PURGE_STEP = 2_000  # messages that a purge reads or drops at a time before others are served
APPENDED = 1_000  # messages of one request that are appended at a time
REPORT_INTERVAL = 0.05  # seconds between reports of commit positions to the export worker

log = logging.getLogger(__name__)


class Exports(Protocol):
    """The exports, as the manager uses them. The default methods export nothing."""

    def define(
        self,
        name: str,
        directory: Path,
        epoch: int,
        definition: MessageStreamDefinition,
        paused: Collection[str],
        begun: Mapping[str, int],
    ) -> None:
        """A stream was opened or created, or its definition or the exports that are paused have changed.

        `begun` is that of `streams.meta`: an export whose number there has changed starts over.
        """

    def retry(self, name: str, identifiers: Collection[str]) -> None:
        """Let these exports send what they have now."""
        return

    def pending(self, name: str) -> dict[str, list[Record]]:
        """Return the first pending records of each export. Called before a stream is deleted."""
        return {}

    def forget(self, name: str, pending: dict[str, list[Record]] | None = None) -> None:
        """A stream was deleted, with its pending records."""

    def committed(self, name: str, oldest: int, next_sequence: int) -> None:
        """A stream contains oldest..next_sequence-1."""

    def statuses(self, name: str) -> list[ExportStatus]:
        """The status of each of a stream's exports."""
        return []

    def exported_upto(self, name: str, holding: Collection[str] | None = None) -> int | None:
        """Return the lowest number that not all enabled exports have passed; 0: unknown, None: no exports.

        With `holding`, only these count.
        """
        return None


class StreamManager:
    """The operations. Must be used in the event loop's thread."""

    def __init__(
        self, store: StreamStore, registry: Registry, exports: Exports, read_step: int = STEP
    ) -> None:
        """`read_step` is how many bytes are read at a time before other clients are served."""
        self.store, self.registry, self._exports = store, registry, exports
        self.definitions: dict[str, MessageStreamDefinition] = {}
        # The streams that the configuration declares, each with the exports and the consumers that hold its
        # messages, by `retention`: what clients have added holds none.
        self.declared: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
        self.bindings = Bindings()
        self.on_bindings_changed = self.bindings.on_changed
        self.on_pressure = store.committer.on_pressure
        self._changed: dict[Stream, None] = {}
        self._times: dict[Stream, dict[int, int]] = {}  # of messages, by number
        self._reads = Reads(read_step)
        self.consumers = Consumers(
            Host(store.data_dir, store.files, store.runtime, self._reads.rows, self.keep)
        )
        for stream in store.streams.values():
            self._adopt(stream, stored(stream.name, stream.meta.definition))
        self._refuse_unopened()

    @property
    def under_pressure(self) -> bool:
        """Return whether too much is pending for the disk, so publishers must be held."""
        return self.store.committer.under_pressure

    def gather(self, do: Callable[[], None]) -> None:
        """Call `do`, which appends everything that has arrived, and commit that at once."""
        self.store.committer.gather(do)

    # -- bindings --------------------------------------------------------------------------------
    def bound(self, topic: str) -> tuple[Stream | Refusal, ...]:
        """The streams that a message on `topic` is appended to; see `Bindings.match`."""
        return self.bindings.match(topic)

    def wants_client(self, name: str) -> bool:
        """Return whether an export of the stream uses the publisher's client id, so headers must have it."""
        definition = self.definitions.get(name)
        return definition is not None and b"{client}" in msgspec.json.encode(definition.export_definition)

    def declare(self, definitions: Mapping[str, MessageStreamDefinition]) -> None:
        """Set what the configuration declares, and stop refusing messages for all other streams."""
        self.declared = {name: _enabled(definition) for name, definition in definitions.items()}
        self.bindings.refuse_only(self.declared)
        self._refuse_unopened()

    def _refuse_unopened(self) -> None:
        """Refuse messages for streams that could not be opened, as far as their topics are known."""
        for name, unopened in self.store.unopened.items():
            if name not in self.bindings.refused:
                self.bindings.refuse(stored(name, unopened.definition), unopened.why)

    def _adopt(self, stream: Stream, definition: MessageStreamDefinition) -> None:
        self.definitions[stream.name] = definition
        self.bindings.bind(stream, definition)
        stream.on_commit = [lambda: self._note(stream), lambda: self._reads.waiting.wake(stream)]
        self._define_exports(stream, definition)
        self._report(stream)
        self.bindings.changed()

    def _define_exports(self, stream: Stream, definition: MessageStreamDefinition) -> None:
        """Define the exports and consumers of a stream."""
        exports, paused, begun = definition.export_definition, stream.meta.paused, stream.meta.begun
        letters = {"deadLetterStream": definition.keeps_rejected_in}
        consumers = [
            raw if raw.get("deadLetterStream") is not None else raw | letters for raw in exports.get(KIND, ())
        ]
        self.consumers.define(stream, consumers, paused)
        if KIND in exports:
            stream.on_commit.append(lambda: self.consumers.wake(stream.name))
            others = {kind: configs for kind, configs in exports.items() if kind != KIND}
            definition = msgspec.structs.replace(definition, export_definition=others)
        self._exports.define(stream.name, stream.directory, stream.epoch, definition, paused, begun)

    def _unbind(self, stream: Stream) -> None:
        self.bindings.unbind(stream, self.definitions[stream.name])
        self._changed.pop(stream, None)
        self._times.pop(stream, None)
        self._reads.gone(stream)

    # -- positions, to and from the export side --------------------------------------------------
    def _note(self, stream: Stream) -> None:
        if not self._changed:
            asyncio.get_running_loop().call_later(REPORT_INTERVAL, self._report_changed)
        self._changed[stream] = None

    def _report_changed(self) -> None:
        changed, self._changed = self._changed, {}
        for stream in changed:
            self._report(stream)

    def _report(self, stream: Stream) -> None:
        self._exports.committed(stream.name, stream.oldest, stream.next_sequence)
        self._set_exported(stream)

    def _set_exported(self, stream: Stream) -> None:
        """Update how far all exports and consumers have got, and those that hold messages of the stream."""
        name = stream.name
        both = self._exports.exported_upto(name), self.consumers.settled_upto(name)
        stream.passed_upto = stream.exported_upto = _least(both)
        if (holding := self.declared.get(name)) is not None:
            both = (
                self._exports.exported_upto(name, holding[0]),
                self.consumers.settled_upto(name, holding[1]),
            )
            stream.exported_upto = _least(both)

    async def refresh(self) -> None:
        """Exchange positions with the exports. Called periodically, because limits also drop by age."""
        streams = list(self.store.streams.values())
        async for some in in_slices(streams):
            for stream in some:
                if not stream.closed:
                    self.consumers.refresh(stream.name)
                    self._report(stream)
                    self._delete_if_exported(stream)
        self.store.committer.reclaim_exported()
        self._reads.tidy()

    # -- the operations --------------------------------------------------------------------------
    def check(
        self,
        raw: Mapping[str, Any] | MessageStreamDefinition,
        among: Mapping[str, MessageStreamDefinition] = MappingProxyType({}),
    ) -> MessageStreamDefinition:
        """Read and validate a definition from the wire; raises InvalidDefinition.

        `among` are definitions that are about to apply too, such as those of a configuration.
        """
        definition = checked(raw, self.registry)
        for found in circles(definition, ChainMap(dict(among), self.definitions)):
            raise found
        return definition

    def owner(self, name: str) -> str:
        """Return who created a stream; empty for the configuration, and for streams of earlier versions."""
        stream = self.store.streams.get(name)
        return "" if stream is None else stream.meta.owner

    def version(self, name: str) -> str:
        """Return the version of a definition, for `update`. Each change changes it. Raises StreamNotFound."""
        meta = self.stream(name).meta
        return hashlib.sha256(b"%d %b" % (meta.epoch, meta.definition or b"")).hexdigest()[:16]

    def create(
        self,
        raw: Mapping[str, Any] | MessageStreamDefinition,
        *,
        among: Mapping[str, MessageStreamDefinition] = MappingProxyType({}),
        owner: str = "",
    ) -> Stream:
        """createMessageStream. Raises InvalidRequest, for example if the name exists, or StorageFailed.

        `among` is as in `check`; `owner` is who it counts for (`operations.bounds`).
        """
        definition = self.check(raw, among)
        if definition.name in self.store.streams:
            raise StreamInUse(f"a stream named {definition.name!r} exists already")
        self._check_opened(definition.name)
        encoded = msgspec.json.encode(definition)
        with _all_or_nothing("created", definition.name, self.store.data_dir):
            stream = self.store.create(definition.name, settings_of(definition), encoded, owner)
        self._adopt(stream, definition)
        return stream

    def update(
        self,
        raw: Mapping[str, Any] | MessageStreamDefinition,
        if_version: str | None = None,
        *,
        among: Mapping[str, MessageStreamDefinition] = MappingProxyType({}),
    ) -> None:
        """updateMessageStream: the whole definition is replaced, exports are matched by identifier.

        A paused export stays paused, as long as the definition has an export with its identifier. An export
        whose start or kind differs from the definition before starts over, whatever it was before that.

        A `maxSize` below the stored size takes effect at once: the messages that the new definition allows to
        drop (exported segments, or the oldest) are dropped, no others. The stream is then full until there is
        space.

        With `if_version`, only if that is still its `version`, so two clients that change one definition do
        not undo each other's changes. `among` is as in `check`.

        Raises StreamNotFound, InvalidRequest, UpdateNotAllowed, UpdateFailed or StorageFailed; then nothing
        has changed.
        """
        definition = self.check(raw, among)
        stream = self.stream(definition.name)
        if if_version is not None and if_version != self.version(definition.name):
            raise UpdateFailed(
                f"stream {definition.name!r} was changed since version {if_version!r}; describe it again, "
                "and apply the change to its current definition"
            )
        old = self.definitions[definition.name]
        if definition.persistence is not old.persistence:
            raise UpdateNotAllowed(
                ("persistence",),
                f"stream {stream.name!r} has persistence {old.persistence.name}, which cannot be changed",
                "delete the stream and create it again",
            )
        moved = self._moved(stream, old, definition)
        stream.exported_upto = None  # belongs to the old exports; `_report` sets that of the new ones
        with _all_or_nothing("updated", stream.name, self.store.data_dir):
            self.store.admit(settings_of(definition))
            known, meta = identifiers(definition), stream.meta
            paused = tuple(one for one in meta.paused if one in known)
            begun = {one: at for one, at in meta.begun.items() if one in known}
            begun |= dict.fromkeys(moved, meta.generation + 1)
            encoded = msgspec.json.encode(definition)
            stream.configure(settings_of(definition), encoded, paused=paused, begun=begun)
        # No notification in between, or front ends would take the stream and its topics for deleted.
        self._unbind(stream)
        self._adopt(stream, definition)

    def _moved(self, stream: Stream, old: MessageStreamDefinition, new: MessageStreamDefinition) -> list[str]:
        """Return the exports that are new or have another start, and check it. Raises InvalidDefinition."""
        before, newest = _starts(old), stream.next_sequence - 1
        moved = {one: start for one, start in _starts(new).items() if before.get(one) != start}
        for (kind, identifier), (start, _) in moved.items():
            if start >= max(newest, 1) and before.get((kind, identifier), (None,))[0] != start:
                raise InvalidDefinition(
                    ("exportDefinition", kind),
                    f"startSequenceNumber {start} of {identifier!r} must be less than the newest "
                    f"sequence number {newest}",
                )
        return [identifier for _, identifier in moved]

    def delete(self, name: str) -> None:
        """deleteMessageStream, with messages and export positions. Raises StreamNotFound or StorageFailed."""
        stream = self.stream(name)
        pending = self._exports.pending(name)
        with _all_or_nothing("deleted", name, self.store.data_dir):
            self.store.delete(name)
        self._unbind(stream)
        del self.definitions[name]
        self.bindings.changed()
        self._exports.forget(name, pending)
        self.consumers.forget(name)

    def report_deleting(self) -> None:
        """Log which streams are still being deleted, and what each one waits for. Called at the start."""
        for name, definition in self.definitions.items():
            if definition.delivery is not None and definition.delivery.deleting:
                log.warning(
                    "the stream is still being deleted, and waits until %s have passed all of it; to delete "
                    "it with its messages, call DeleteDeliveryStream with AllowForceDelete",
                    ", ".join(identifiers(definition)) or "its exports",
                    extra={"stream": name},
                )

    def _delete_if_exported(self, stream: Stream) -> None:
        """Delete a stream that is `deleting` once its exports and consumers have passed all of it."""
        delivery = self.definitions[stream.name].delivery
        if delivery is None or not delivery.deleting or not self.is_exported(stream):
            return
        try:
            self.delete(stream.name)
        except StorageFailed as error:
            log.error("%s", error, extra={"stream": stream.name})  # retried at the next refresh
        else:
            log.info("stream deleted, all of it was exported", extra={"stream": stream.name})

    def is_exported(self, stream: Stream) -> bool:
        """Whether a stream is empty, or all its exports and consumers have passed all of it."""
        if stream.pending_bytes:
            return False
        passed = stream.passed_upto
        return stream.oldest >= stream.next_sequence or (
            passed is not None and passed >= stream.next_sequence
        )

    def names(self) -> list[str]:
        """listStreams: the names, sorted."""
        return sorted(self.store.streams)

    def stream(self, name: str) -> Stream:
        """The stream of this name; raises StreamNotFound, or StorageFailed if it could not be opened."""
        stream = self.store.streams.get(name)
        if stream is None:
            self._check_opened(name)
            raise StreamNotFound(f"there is no stream named {name!r}")
        return stream

    def _check_opened(self, name: str) -> None:
        if name in self.store.unopened:
            why = self.store.unopened[name].why
            raise StorageFailed(f"stream {name!r} exists, but could not be opened: {why}")

    def describe(self, name: str) -> MessageStreamInfo:
        """describeMessageStream. Raises StreamNotFound."""
        stream = self.stream(name)
        newest, topics = stream.newest(), None
        with suppress(StreamError):  # the disk fails; everything else is known
            topics = stream.count_topics()
        return MessageStreamInfo(
            definition=without_secrets(self.definitions[name]),
            storage_status=StorageStatus(
                oldest_sequence_number=stream.oldest,
                newest_sequence_number=stream.next_sequence - 1,
                total_bytes=stream.total_bytes,
            ),
            export_statuses=self.export_statuses(name),
            version=self.version(name),
            messages=stream.live_messages(),
            oldest_ingest_time=self._time_of(stream, stream.oldest if newest is not None else None),
            newest_ingest_time=self._time_of(stream, newest),
            topic_count=topics,
            encryption=stream.encryption(),
        )

    def _time_of(self, stream: Stream, number: int | None) -> int | None:
        """Return when a message was received; recent results are cached."""
        if number is None:
            return None
        known = self._times.setdefault(stream, {})
        if number not in known:
            if len(known) > 1:  # it has the oldest and the newest message of the last call
                known.clear()
            time = stream.ingest_time(number)
            if time is None:
                return None
            known[number] = time
        return known[number]

    def export_statuses(self, name: str) -> list[ExportStatus]:
        """The status of each of a stream's exports and consumers, as `describe` returns it."""
        found = [*self._exports.statuses(name), *self.consumers.statuses(name).values()]
        paused = self.stream(name).meta.paused
        return with_pauses(found, paused) if paused else found

    def pause(self, name: str, export: str | None, *, paused: bool) -> list[str]:
        """pauseExports, resumeExports: one export of a stream, or all. Returns the exports concerned.

        The batch in flight ends first. A paused export keeps its position, and still holds data back
        (`retention`). Raises StreamNotFound, ExportNotFound or StorageFailed.
        """
        stream, wanted = self.stream(name), self._exports_of(name, export)
        known = set(stream.meta.paused)
        fresh = known.union(wanted) if paused else known.difference(wanted)
        if fresh != known:
            with _all_or_nothing("changed", name, self.store.data_dir):
                stream.pause(tuple(sorted(fresh)))
            self._define_exports(stream, self.definitions[name])
        return wanted if paused else [identifier for identifier in wanted if identifier in known]

    def retry(self, name: str, export: str | None) -> list[str]:
        """retryExports: let one export of a stream, or all that may, send now. Returns which.

        This includes exports that have stopped, or whose batch is not full yet. Raises StreamNotFound,
        ExportNotFound, or InvalidRequest for an export that is paused, disabled or a consumer.
        """
        stream = self.stream(name)
        paused = stream.meta.paused
        resting: dict[str, str] = {}
        for kind, configs in self.definitions[name].export_definition.items():
            for raw in configs:
                if kind == KIND:
                    resting[raw["identifier"]] = "is a consumer: its clients decide when they fetch"
                elif raw.get("disabled"):
                    resting[raw["identifier"]] = "is disabled by its definition"
        resting |= dict.fromkeys(paused, "is paused; resume it")
        wanted = self._exports_of(name, export)
        if export in resting:
            raise InvalidRequest(f"export {export!r} of stream {name!r} {resting[export]}")
        wanted = [identifier for identifier in wanted if identifier not in resting]
        self._report(stream)  # so that messages stored just now are sent too
        self._exports.retry(name, wanted)
        return wanted

    def _exports_of(self, name: str, export: str | None) -> list[str]:
        """Return the identifiers of all exports of a stream, or the requested one."""
        known = identifiers(self.definitions[name])
        if export is None:
            return known
        if export not in known:
            near = get_close_matches(export, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its exports are: {', '.join(known) or 'none'}"
            raise ExportNotFound(f"stream {name!r} has no export {export[:255]!r}; {hint}")
        return [export]

    async def append(
        self, name: str, payload: bytes, *, message_id: bytes = b"", headers: bytes = b""
    ) -> int:
        """appendMessage: returns the sequence number once the message is committed.

        Raises StreamNotFound, InvalidRequest (empty payload) or a StreamError.
        """
        return (await self.append_all(name, [payload], [message_id], headers))[0]

    async def keep(self, name: str, payload: bytes) -> int:
        """Append a status message or a dead letter of an export. Raises as `append`, and as `create`.

        The dead-letter stream that a stream has by default is created when it is needed.
        """
        if name not in self.store.streams:
            for definition in list(self.definitions.values()):
                if definition.keeps_rejected_in == name:
                    self.create(definition.for_rejected())
                    log.info("created for rejected messages of %s", definition.name, extra={"stream": name})
                    break
        return await self.append(name, payload)

    async def append_all(
        self,
        name: str,
        payloads: Sequence[bytes],
        message_ids: Iterable[bytes] = (),
        headers: bytes = b"",
    ) -> list[int]:
        """appendMessages: all in order, each with `headers`; returns their numbers once all are committed.

        If one cannot be appended, those before it are stored, and those after it are not. The error is
        raised once they are stored, and its `result` has their numbers.
        """
        stream = self.stream(name)
        if not payloads or not all(payloads):
            raise InvalidRequest(f"stream {name!r}: a message needs a payload of at least one byte")
        ids = list(message_ids) or [b""] * len(payloads)
        numbers: list[int] = []
        try:
            for payload, message_id in zip(payloads, ids, strict=True):
                numbers.append(self.submit(name, payload, message_id, headers)[1])
                if not len(numbers) % APPENDED:
                    await asyncio.sleep(0)
                    if stream.closed:  # another one may have its name now
                        raise StreamNotFound(f"stream {name!r} was deleted during the request")
        except StreamError as error:
            if numbers:
                await committed(stream)
            error.result = {"sequenceNumbers": numbers}
            raise
        await committed(stream)
        return numbers

    def submit(
        self, name: str, payload: bytes, message_id: bytes = b"", headers: bytes = b""
    ) -> tuple[Stream, int]:
        """The first half of an append: the message is in the next commit, but not yet stored.

        A message whose id was seen in the stream's deduplication window (by default, in the last two
        minutes) is not stored again, and gets the number of the first.

        Returns the stream, whose `after_commit` reports the result, and the number that the message has if
        the commit succeeds. Raises the errors of `append`.
        """
        stream = self.stream(name)
        if not payload:
            raise InvalidRequest(f"stream {name!r}: a message needs a payload of at least one byte")
        if message_id.startswith(SCOPED):
            raise InvalidRequest(f"stream {name!r}: a messageId must not begin with {SCOPED!r}")
        if message_id:
            stream.find(message_id)  # begins the window
        return stream, stream.append(f"{STREAM_TOPICS}{name}".encode(), payload, headers, message_id)

    async def read(
        self,
        name: str,
        options: ReadMessagesOptions | None = None,
        *,
        max_bytes: int = MOST_BYTES,
        turn: Turn = nullcontext,
        hidden: Hidden = nothing,
    ) -> list[StreamMessage]:
        """readMessages: at least the minimum, at most the maximum; with a time-out, waits for the minimum.

        Begins at the oldest message if the desired start was dropped. Raises StreamNotFound, InvalidRequest,
        NotEnoughMessages, CorruptData, or ResponseTooLarge if the minimum has more than `max_bytes`.
        """
        options = options or ReadMessagesOptions()
        return await self._reads.read(self.stream(name), options, max_bytes, turn, hidden)

    async def fetch(
        self,
        name: str,
        consumer: str,
        most: int,
        *,
        wait: float,
        holder: str,
        max_bytes: int = MOST_BYTES,
        hidden: Hidden = nothing,
    ) -> list[Delivery]:
        """fetchMessages: lease messages to the client `holder`. Waits up to `wait` seconds for the first one.

        Raises StreamNotFound, ConsumerNotFound, and the errors of `Consumer.fetch`.
        """
        self.stream(name)
        return await self.consumers.get(name, consumer).fetch(most, max_bytes, wait, holder, hidden)

    async def acknowledge(
        self, name: str, consumer: str, verdicts: Verdicts, *, holder: str, trusted: bool = False
    ) -> list[int]:
        """ackMessages: returns the numbers that were not pending; raises as `Consumer.acknowledge`."""
        stream = self.stream(name)
        other = await self.consumers.get(name, consumer).acknowledge(verdicts, holder, trusted=trusted)
        self._set_exported(stream)
        return other

    def close(self) -> None:
        """Close the files of the consumers. The store is closed separately."""
        self.consumers.close()

    async def sync(self, names: Iterable[str]) -> set[str]:
        """Sync the committed messages of these streams. Returns those that cannot be synced.

        Raises StreamNotFound.
        """
        streams = [self.stream(name) for name in names]
        await self.store.committer.sync(streams)
        return {stream.name for stream in streams if stream.unsynced()}

    async def purge(self, name: str, *, upto: int | None = None, topic: str | None = None) -> int:
        """purgeMessageStream: drop all messages, those below number `upto`, or those on a topic filter.

        Returns how many were dropped. Numbering continues. For a topic filter, the stream is read while other
        clients are served, and matching messages are dropped in steps. A stream with a limit of bytes or per
        topic counts its messages again after each drop, so there they are all dropped together at the end.

        Raises StreamNotFound, InvalidRequest, CorruptData, StorageFailed or OSError; then some may have been
        dropped.
        """
        stream = self.stream(name)
        end = stream.next_sequence if upto is None else min(upto, stream.next_sequence)
        if topic is None:
            return stream.purge([(stream.oldest, end - 1)])
        if (mistake := filter_mistake(topic)) is not None:
            raise InvalidRequest(f"topic: {mistake}")
        ranges: list[tuple[int, int]] = []
        position, dropped = stream.oldest, 0
        with closing(stream.reader()) as reader:
            while rows := reader.read(position, end=end, max_messages=PURGE_STEP, max_bytes=SLICE_BYTES):
                position = rows[-1].sequence_number + 1
                ranges += [(row.sequence_number,) * 2 for row in rows if matches(topic, row.topic.decode())]
                await asyncio.sleep(0)
                if stream.closed:
                    raise StreamNotFound(f"stream {name!r} was deleted during the purge")
                if len(ranges) >= PURGE_STEP and not (
                    stream.limits is not None and stream.limits.tracks_messages
                ):
                    dropped += stream.purge(ranges[:PURGE_STEP])
                    del ranges[:PURGE_STEP]
        return dropped + stream.purge(ranges)


def _enabled(definition: MessageStreamDefinition) -> tuple[frozenset[str], frozenset[str]]:
    """Return the identifiers of a definition's enabled exports, and of its enabled consumers."""
    found: tuple[set[str], set[str]] = set(), set()
    for kind, configs in definition.export_definition.items():
        found[kind == KIND].update(str(raw.get("identifier")) for raw in configs if not raw.get("disabled"))
    return frozenset(found[0]), frozenset(found[1])


def _least(numbers: Iterable[int | None]) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def _starts(definition: MessageStreamDefinition) -> dict[tuple[str, str], tuple[int, str | None]]:
    """Return the start of each export, as number and time, by kind and identifier."""
    return {
        (kind, raw["identifier"]): (
            raw.get("startSequenceNumber", 0),
            raw.get("startTime") if kind == KIND else None,
        )
        for kind, configs in definition.export_definition.items()
        for raw in configs
    }


@contextmanager
def _all_or_nothing(what: str, name: str, place: Path) -> Iterator[None]:
    """Raise StorageFailed if the disk refuses a change, which then changes nothing."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(
            f"stream {name!r} cannot be {what} in {error.filename or place}: {error.strerror or error}; "
            "nothing was changed. Free space there, or check the disk and its permissions, and try again"
        ) from error


def first_free(data_dir: Path, name: str, epoch: int) -> int:
    """Return the lowest number for the next message of a stream, which no export or consumer has seen."""
    return max(highest_exported(data_dir, name, epoch), highest_delivered(data_dir, name, epoch)) + 1


async def committed(stream: Stream) -> None:
    """Wait until all messages appended to a stream so far are committed; raises a StreamError."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def settle(error: StreamError | None) -> None:
        if not done.done():
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

    stream.after_commit(settle)
    await done
