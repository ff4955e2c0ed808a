"""The exporter API: the classes that plugin authors import from `bridge`.

An exporter is a class with a `kind` (its key in a stream's export definition), a `Config` and an
`export` method. streambridge makes one instance per export configuration, in the export worker
process, and uses it from one thread at a time. streambridge does everything else: reading, batching,
order, retries, positions.

What streambridge promises to an exporter
-----------------------------------------
* Batches come one at a time; the next one comes once every record of this one was accepted or rejected.
* Batches come in sequence order, unless the exporter sets `any_order` and its user wants the newest first.
* A batch stays within `limits`; streambridge rejects a record larger than `limits.record_bytes`.
* A retried batch, even after a crash, has the same `first` and `last` (with `by_record`, not always after a
  power cut). It may have fewer records: the others come in another attempt. A batch of a `contiguous`
  exporter is shortened, with a lower `last`, only after `landed` has returned False: nothing of it is at the
  destination.

What an exporter promises to streambridge
-----------------------------------------
* A record is accepted only when the destination has confirmed it.
* `Outcome.rejected` is for records that can never succeed. Network errors, throttling, missing rights and
  expired credentials are never a rejection: raise `Retry`, and the batch is retried without limit.
* `Stopped` is for problems that an operator must resolve before anything else is sent, such as a destination
  that has other data under the name of this batch.
* Any other exception counts as `Retry` and is reported as a defect of the plugin.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from bridge.model import MAX_INT64, MAX_MILLIS, Name
from bridge.plugin.allow import Allow
from bridge.plugin.failures import failed
from bridge.plugin.link import UNLIMITED, Link
from bridge.plugin.reduction import Reduction, check_effects, encoded
from bridge.settingtypes import Endpoint, Millis, as_stored
from bridge.topics import filter_mistake


class Record(Struct, frozen=True, gc=False):
    """One message of a stream. `ingest_time` is Unix time in ms; `headers` is msgpack or empty."""

    sequence_number: int
    ingest_time: int
    topic: str
    payload: bytes
    headers: bytes = b""

    @property
    def client(self) -> str:
        """The client id of the publisher; empty if it is unknown or was not stored.

        It is stored in streams that have `{client}` in the configuration of an export.
        """
        return msgspec.msgpack.decode(self.headers, type=_Headers).client if self.headers else ""


class _Headers(Struct):
    client: str = ""


class Batch(Struct, frozen=True):
    """Records of one stream in sequence order.

    `first` and `last` are the boundaries fixed before the first attempt. `records` may be fewer than
    first..last: the others were dropped by a limit, are already settled, or match none of the export's
    topics. With `contiguous` limits, records are always exactly first..last. If `declares_filtered` is set
    too, filters have left out the missing ones.
    """

    gateway: str
    stream: str
    epoch: int
    first: int
    last: int
    records: list[Record]
    attempt: int = 1


class BatchLimits(Struct, frozen=True, kw_only=True):
    """What the destination accepts in one request. None: no limit.

    `record_bytes` counts the payload; `batch_bytes` counts payloads and topics. `contiguous` splits
    batches wherever numbers are missing and never sends a batch in parts. An exporter that also has
    `declares_filtered` tells its destination which numbers of first..last filters have left out (`topics`,
    `reduce`, plugins): its batches end only where numbers were dropped from the stream.

    `by_record`: the destination takes each record separately and knows no batches. Then the boundaries
    survive a crash, but need not survive a power cut: the records of the last seconds before it are sent
    again, perhaps in other batches. This saves most writes of the position and so spares flash memory.
    """

    records: int | None = None
    record_bytes: int | None = None
    batch_bytes: int | None = None
    contiguous: bool = False
    declares_filtered: bool = False
    by_record: bool = False


class Outcome(Struct, frozen=True, kw_only=True):
    """The result of each record, by its index in `batch.records`. All other records are accepted.

    `rejected` has a reason for each record. `error` says why the records in `retry` must be
    retried. `after` is the minimum wait in seconds, up to a day. `cut` is as in `Retry`.
    """

    retry: Sequence[int] = ()
    rejected: Mapping[int, str] = {}
    error: str = ""
    after: float | None = None
    cut: bool = False

    def mistake(self, batch: Batch) -> str | None:
        """Return the mistake in the indexes or reasons of this outcome, with the remedy; None without one."""
        if not isinstance(self.rejected, Mapping):
            return f"rejected is {self.rejected!r:.100}, not a mapping from indexes to reasons"
        if isinstance(self.retry, str | bytes) or not isinstance(self.retry, Iterable):
            return f"retry is {self.retry!r:.100}, not a sequence of indexes"
        for name in ("retry", "rejected"):
            for index in getattr(self, name):
                if type(index) is not int:
                    return f"{name} has {index!r:.100}, which is not an index; use those of batch.records"
                if not 0 <= index < len(batch.records):
                    return f"{name} has the index {index}, {_outside(index, batch)}"
        for index, reason in self.rejected.items():
            if not (isinstance(reason, str) and reason):
                return f"rejected[{index}] is {reason!r:.100}; give the reason as a text"
        return None


def _outside(index: int, batch: Batch) -> str:
    count = len(batch.records)
    there = f"but batch.records has {count} records, with the indexes 0 to {count - 1}"
    if any(record.sequence_number == index for record in batch.records):
        return f"{there}; {index} is a sequence number, so use `enumerate(batch.records)`"
    return there


ACCEPTED = Outcome()


class Retry(Exception):  # noqa: N818 - named for what it asks for
    """Raise this to have the whole batch retried, no earlier than after `after` seconds, up to a day.

    `unsent`: nothing was sent, for example for lack of a connection, so the batch does not count against the
    bandwidth limit. `cut`: the link is the cause: there was no connection, or it ended without an answer.
    The retry comes sooner, and in smaller batches if attempts take long compared with the time for which the
    link stays up.
    """

    after: float | None = None  # also if a subclass does not call __init__
    unsent = cut = False

    def __init__(
        self, reason: str, *, after: float | None = None, unsent: bool = False, cut: bool = False
    ) -> None:
        super().__init__(reason)
        self.after, self.unsent, self.cut = after, unsent, cut


class Stopped(Exception):  # noqa: N818 - named for what happens to the export
    """Raise this when another attempt could do damage. The export stops and keeps its position and data.

    It resumes when its configuration changes, or when an operator retries it. Operators see the reason, which
    must say what to do.
    """


class Unproven(Exception):  # noqa: N818 - named for what is left open
    """Raise this in `probe` if it cannot find out whether the destination takes messages, with the reason."""


class Refused(Exception):  # noqa: N818 - named for what the destination did
    """Raise this in the `send` of `send_split` if the destination rejects the content of a request."""


def send_split(indexes: Sequence[int], send: Callable[[Sequence[int]], None]) -> dict[int, str]:
    """Send records together. After `Refused`, send halves until each bad record is alone.

    Returns the bad records with their reasons. All other records were sent.
    """
    try:
        send(indexes)
    except Refused as error:
        if len(indexes) == 1:
            return {indexes[0]: str(error)}
        middle = len(indexes) // 2
        return send_split(indexes[:middle], send) | send_split(indexes[middle:], send)
    return {}


class ExportConfig(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The base of export configurations. `priority` 1 is the most urgent; exports without one come last.

    The exporter gets the messages that match one of the topic filters `topics`; without filters, all
    messages. It never gets one that a filter of `withheld` matches, nor a dead letter about one: the gateway
    adds there what a client that defines an export is denied to read. With `contiguous` limits it always gets
    all, unless it has `declares_filtered`. Rejected records go to `dead_letter_stream` ("" for none), by
    default to `keeps_rejected_in` of the stream's definition. `reduce` has rules that make messages fewer and
    smaller before they are sent; the first rule whose topics match applies. With `order` "newest first", new
    messages go before a backlog, for example after an outage.
    """

    identifier: Name
    topics: list[str] = msgspec.field(default_factory=list)
    withheld: list[str] = []
    priority: Annotated[int, Meta(ge=1, le=10)] | None = None
    disabled: bool = False
    dead_letter_stream: Annotated[str, Meta(max_length=255, pattern=r"^[\w ,.\-]*\Z")] | None = None
    order: Literal["oldest first", "newest first"] = "oldest first"
    reduce: list[Reduction] = []

    def __post_init__(self) -> None:
        encoded(self.reduce)  # raises ValueError if they are too large
        check_effects(self.reduce)

    @property
    def filters(self) -> list[str]:
        """What selects its messages: `topics`, and those of `withheld` behind a NUL, which no filter has."""
        return [*self.topics, *(f"\0{one}" for one in self.withheld)]

    @property
    def newest_first(self) -> bool:
        """Whether new messages go before a backlog."""
        return self.order == "newest first"


class BatchedConfig(ExportConfig, kw_only=True, frozen=True):
    """An export in batches, sent when `batch_size` messages are pending or the oldest has waited long enough.

    `linger_millis` takes precedence over `batch_interval_millis`. Without either, messages are sent at once.
    """

    batch_size: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    batch_interval_millis: Annotated[Millis, Meta(ge=60_000, le=MAX_MILLIS)] | None = None
    linger_millis: Annotated[Millis, Meta(ge=1, le=MAX_MILLIS)] | None = None
    start_sequence_number: Annotated[int, Meta(ge=0, le=MAX_INT64)] = 0


class AwsConfig(ExportConfig, kw_only=True, frozen=True):
    """An export to AWS; the `[aws]` table has the defaults.

    `context.client(service, config)` returns the client for it.
    """

    endpoint_url: Endpoint | None = None
    region: str | None = None


class AwsBatchedConfig(BatchedConfig, kw_only=True, frozen=True):
    """An export to AWS in batches. (It repeats two fields, because a Struct can have only one base.)"""

    endpoint_url: Endpoint | None = None
    region: str | None = None


class Batching(Struct, frozen=True, kw_only=True):
    """When a batch is due: when enough records or bytes are pending, or the oldest is `millis` ms old."""

    records: int | None = None
    size: int | None = None
    millis: int | None = None


class Progress(Struct, frozen=True, kw_only=True):
    """A snapshot of one export. It has exported everything up to the number `exported`.

    `exported_ahead` has the exported ranges above it, ascending; only an export with the newest first has
    any. `skipped` has the ranges that were never exported, with reasons. Only exporters with `contiguous`
    limits have it. It keeps about a thousand ranges; older ones are joined into ranges with the reason
    `joined:<count>`, of which `count` numbers were skipped.
    """

    stream: str
    epoch: int
    identifier: str
    config: ExportConfig
    oldest: int
    newest: int
    exported: int
    skipped: list[tuple[int, int, str]]
    exported_ahead: list[tuple[int, int]] = []


class Context:
    """The services that an exporter may use. This base class works without a worker, for tests."""

    def __init__(
        self,
        gateway: str = "gateway",
        stream: str = "stream",
        epoch: int = 0,
        *,
        link: Link = UNLIMITED,
    ) -> None:
        self._link = link
        self.gateway = gateway
        self.stream = stream
        self.epoch = epoch
        self.log = logging.getLogger("bridge.plugin")
        self.state = b""

    def client(self, service: str, config: AwsConfig | AwsBatchedConfig, **options: Any) -> Any:
        """Return an AWS client with the configured credentials, for an export's endpoint and region.

        `options` are keywords of botocore.config.Config.
        """
        from bridge.plugin.aws import AwsSettings, client

        return client(AwsSettings(), service, config.region, config.endpoint_url, self.link, **options)

    @property
    def link(self) -> Link:
        """Return the link that all exporters share, for connections of `bridge.plugin.mqtt`.

        An exporter that uses none of `client`, `session` and `link` is charged with the payloads and topics
        of a batch, after the batch.
        """
        return self._link

    def session(self, **options: Any) -> Any:
        """Return an HTTP session: botocore's URLLib3Session with `options`, paced like the clients."""
        from botocore.httpsession import URLLib3Session

        from bridge.plugin.httplink import put_over

        made = URLLib3Session(**options)
        put_over(self.link, made)
        return made

    def working(self) -> None:
        """Report progress of a long export, so that it does not count as hung. Any thread may call it."""

    def throttle(self, size: int) -> None:
        """Wait until `size` more bytes may be sent under the bandwidth limit, and count them.

        Only for data that an exporter sends over its own connections in addition to the batches, which are
        charged anyway.
        """

    def append(self, stream: str, payload: bytes) -> None:
        """Append a message to another stream of the gateway, such as a status stream. Raises Retry.

        `payload` is bytes; anything else is a TypeError.
        """

    def save_state(self, state: bytes) -> None:
        """Store up to 2,000 bytes durably with the position. `state` has the stored bytes.

        Anything but bytes is a TypeError.
        """
        self.state = state

    def open(self, path: Path) -> BinaryIO:
        """Open a regular file that a message names.

        Raises OSError, or ValueError if it is in none of the directories of [export.allow].
        """
        return Allow(directories=[Path("/")]).open(path)

    def may_write_to(self, bucket: str) -> bool:
        """Return whether [export.allow] permits a bucket that a message names."""
        return True

    def exports(self) -> list[Progress]:
        """Return the progress of all exports of this kind on the gateway, including this one.

        Raises Retry just after the start, until all their positions are known.
        """
        return []

    def now(self) -> float:
        """Return Unix time in seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds of a clock that never goes back. Its zero is arbitrary."""
        return time.monotonic()


class Exporter:
    """The base of exporters: set the class variables and write `export`.

    `any_order` says that the destination does not rely on the order of messages. Then the option `order` may
    be "newest first", unless `check` refuses it because the configuration needs the order.
    """

    kind: ClassVar[str]
    Config: ClassVar[type[ExportConfig]] = BatchedConfig
    limits: ClassVar[BatchLimits] = BatchLimits()
    any_order: ClassVar[bool] = False
    timeout: ClassVar[float] = 900.0  # seconds without `context.working()` after which it counts as hung

    def __init__(self, config: Any, context: Context) -> None:
        self.config = config
        self.context = context

    @classmethod
    def batching(cls, config: Any) -> Batching:
        """Return when a batch is due; the default follows BatchedConfig."""
        if not isinstance(config, BatchedConfig):
            return Batching()
        linger = config.linger_millis
        return Batching(
            records=config.batch_size,
            millis=config.batch_interval_millis if linger is None else linger,
        )

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ValueError for a mistake that types cannot express.

        Called on create and update, and when the export worker starts. While it raises, the export makes no
        attempt. Any other exception is reported as a defect of the plugin.
        """

    @classmethod
    def lacks(cls, config: Any) -> str | None:
        """Return what this machine lacks for a configuration, and the remedy, for `streambridge check`."""
        return None

    @classmethod
    def probe(cls, config: Any, context: Context) -> str:
        """Try the destination with a call that changes nothing, for `streambridge check --connect`.

        Returns what it could do. Raises Retry with what is wrong and what to do, or Unproven.
        """
        raise Unproven(f"exporters of the kind {cls.kind} cannot try their destination")

    def export(self, batch: Batch) -> Outcome:
        """Send the batch; return when the destination has answered for every record."""
        raise Retry(f"{type(self).__name__} has no export method")

    def landed(self, batch: Batch) -> bool | None:
        """Return whether a batch is at the destination: True, False, or None if that is unknown.

        Called for a `contiguous` exporter before it retries a batch whose attempt got no answer, and before a
        batch is shortened. It may raise Retry.
        """
        return None

    def idle(self) -> float | None:
        """Called when nothing is pending; return the seconds until the next call, or None."""
        return None

    def dropped(self, first: int, last: int, reason: str) -> None:
        """Called when pending messages were dropped from the stream, for example because they expired.

        They may be part of a batch that was already attempted. After a crash, the same range may be reported
        again.
        """

    def cancelled(self, records: Sequence[Record]) -> None:
        """Called when the export was deleted, with the first pending records."""

    def close(self) -> None:
        """Called once, when the export is updated, deleted, or the worker ends."""


def convert_config(exporter: type[Exporter], raw: Mapping[str, Any]) -> Any:
    """Read a wire configuration (camelCase) into the exporter's Config.

    Raises msgspec.ValidationError (with a path) or ValueError (also from `check`). Any other exception of the
    plugin, even SystemExit, becomes a ValueError that names the plugin's line.
    """
    try:
        return _converted(exporter, raw)
    except (ValueError, msgspec.ValidationError):
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(failed(error)) from error


def _converted(exporter: type[Exporter], raw: Mapping[str, Any]) -> Any:
    config = msgspec.convert(as_stored(exporter.Config, raw), exporter.Config)
    for key, topics in (("topics", config.topics), ("withheld", config.withheld)):
        for topic in topics:
            if (mistake := filter_mistake(topic)) is not None:
                raise ValueError(f"{key}: {mistake}")
    if exporter.limits.declares_filtered:
        encoded(config.reduce, config.filters)  # raises ValueError if they are too large
    elif config.filters and exporter.limits.contiguous:
        raise ValueError(
            f"{'topics' if config.topics else 'withheld'}: an export of the kind {exporter.kind} has all "
            "messages of its stream, without gaps in their numbers; use a separate stream for these topics"
        )
    if config.newest_first:
        _check_newest_first(exporter, config)
    exporter.check(config)
    return config


def _check_newest_first(exporter: type[Exporter], config: ExportConfig) -> None:
    if not exporter.any_order:
        raise ValueError(
            f"order: an export of the kind {exporter.kind} hands out messages in the order of their numbers; "
            'use "oldest first"'
        )
    if config.reduce:
        raise ValueError(
            'order: rules of reduce compare a message with those before it; use "oldest first", or no reduce'
        )


def dead_letter(stream: str, export: str, record: Record, reason: str, *, with_payload: bool = True) -> bytes:
    """The message about a rejected record, for a dead-letter stream: JSON, its payload in base64.

    Without its payload, which the stream cannot store, it has the size of it.
    """
    size = {} if with_payload else {"payloadBytes": len(record.payload)}
    return msgspec.json.encode(
        {
            "stream": stream,
            "sequenceNumber": record.sequence_number,
            "ingestTime": record.ingest_time,
            "topic": record.topic,
            "payload": record.payload if with_payload else b"",
            **size,
            "export": export,
            "reason": reason,
        }
    )


_APPENDS_TO = (("deadLetterStream",), ("statusConfig", "statusStreamName"))


def appends_to(raw: Mapping[str, Any]) -> dict[tuple[str, ...], str]:
    """The streams to which an export (camelCase) appends, by the path of the key that names each."""
    found: dict[tuple[str, ...], str] = {}
    for path in _APPENDS_TO:
        value: Any = raw
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, str) and value:
            found[path] = value
    return found
