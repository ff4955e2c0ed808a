"""What an exporter plugin is: the classes that plugin authors import from `bridge`.

An exporter is a class with a `kind` (its key in a stream's export definition), a `Config` and an
`export` method. streambridge makes one instance per export configuration, in the export worker
process, and uses it from one thread at a time. Everything else is done for it: reading, batching,
order, retries, positions.

What streambridge promises to an exporter
-----------------------------------------
* Batches come in sequence order, one at a time; the next one comes when every record of this one
  is accepted or rejected.
* A batch stays within `limits`; a record larger than `limits.record_bytes` is rejected for it.
* A batch that is tried again, also after a crash, has the same `first` and `last`. It may have fewer
  records: the others come in an attempt of their own. A batch of a `contiguous` exporter is cut short, with
  a lower `last`, only after `landed` has said that nothing of it is at the destination.

What an exporter promises to streambridge
-----------------------------------------
* A record counts as accepted only when the destination has confirmed it.
* `Outcome.rejected` is for what can never succeed. Network, throttling, missing rights and expired
  credentials are never a rejection: raise `Retry`, and it is tried again for ever.
* `Stopped` is for what an operator must look at before anything else is sent, such as a destination that
  holds other data under the name of this batch.
* Any other exception counts as `Retry` and is reported as a fault of the plugin.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar

import msgspec
from msgspec import Meta, Struct

from bridge.model import MAX_INT64, MAX_MILLIS, Name
from bridge.plugin.allow import Allow
from bridge.settingtypes import Endpoint, Millis


class Record(Struct, frozen=True, gc=False):
    """One message of a stream. `ingest_time` is Unix time in ms; `headers` is msgpack or empty."""

    sequence_number: int
    ingest_time: int
    topic: str
    payload: bytes
    headers: bytes = b""

    @property
    def client(self) -> str:
        """The client id of who published it; empty where that is not known, or was not kept.

        It is kept in streams that have `{client}` in the configuration of an export.
        """
        return msgspec.msgpack.decode(self.headers, type=_Headers).client if self.headers else ""


class _Headers(Struct):
    client: str = ""


class Batch(Struct, frozen=True):
    """Records of one stream in sequence order.

    `first` and `last` are the boundaries fixed before the first attempt. `records` may be fewer than
    first..last: numbers were legally dropped, or an earlier attempt has settled them (unless the
    exporter's limits say `contiguous`: then records are exactly first..last, and always all).
    """

    gateway: str
    stream: str
    epoch: int
    first: int
    last: int
    records: list[Record]
    attempt: int = 1


class BatchLimits(Struct, frozen=True, kw_only=True):
    """What the destination takes in one request. None is no limit.

    `record_bytes` counts the payload; `batch_bytes` counts payloads and topics. `contiguous` splits
    batches wherever numbers are missing and sends a batch as a whole or not at all.
    """

    records: int | None = None
    record_bytes: int | None = None
    batch_bytes: int | None = None
    contiguous: bool = False


class Outcome(Struct, frozen=True, kw_only=True):
    """What became of each record, by its index in `batch.records`. Not named means accepted.

    `error` says why records are to be tried again; `after` is the least wait in seconds; `cut` is that of
    `Retry`.
    """

    retry: Sequence[int] = ()
    rejected: Mapping[int, str] = {}
    error: str = ""
    after: float | None = None
    cut: bool = False


ACCEPTED = Outcome()


class Retry(Exception):  # noqa: N818 - named for what it asks for
    """Raise it to have the whole batch tried again, after `after` seconds at the earliest.

    `unsent` says that nothing was sent, such as without a connection: then the attempt does not count
    against the bandwidth ceiling. `cut` says that the link is the cause: no connection, or one that ended
    without an answer. Then it is tried again sooner, and in smaller batches if attempts are long beside
    the time for which the link stays up.
    """

    def __init__(
        self, reason: str, *, after: float | None = None, unsent: bool = False, cut: bool = False
    ) -> None:
        super().__init__(reason)
        self.after, self.unsent, self.cut = after, unsent, cut


class Stopped(Exception):  # noqa: N818 - named for what becomes of the export
    """Raise it when another attempt could do harm: the export stops, and keeps its position and its data.

    It goes on when its configuration changes. The reason is shown to operators, so it says what to do.
    """


class Refused(Exception):  # noqa: N818 - named for what the destination did
    """Raised within `send_split` when the destination refuses a request for its content."""


def send_split(indexes: Sequence[int], send: Callable[[Sequence[int]], None]) -> dict[int, str]:
    """Send records together; after `Refused` in halves, until the bad ones are alone.

    Returns the refused ones with the reason, so that one bad record costs no good one.
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
    """What every export configuration has. `priority` 1 is the most urgent; none comes last.

    Rejected records go to `dead_letter_stream` if one is named.
    """

    identifier: Name
    priority: Annotated[int, Meta(ge=1, le=10)] | None = None
    disabled: bool = False
    dead_letter_stream: Name | None = None


class BatchedConfig(ExportConfig, kw_only=True, frozen=True):
    """An export that sends batches: when there are `batch_size` messages, or the oldest has waited.

    With no interval and no linger, what is there goes at once.
    """

    batch_size: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    batch_interval_millis: Annotated[Millis, Meta(ge=60_000, le=MAX_MILLIS)] | None = None
    linger_millis: Annotated[Millis, Meta(ge=1, le=MAX_MILLIS)] | None = None
    start_sequence_number: Annotated[int, Meta(ge=0, le=MAX_INT64)] = 0


class AwsConfig(ExportConfig, kw_only=True, frozen=True):
    """An export to AWS; what is not given is that of the `[aws]` table.

    `context.client(service, config)` makes the client for it.
    """

    endpoint_url: Endpoint | None = None
    region: str | None = None


class AwsBatchedConfig(BatchedConfig, kw_only=True, frozen=True):
    """The same for an export that sends batches: a Struct has one base."""

    endpoint_url: Endpoint | None = None
    region: str | None = None


class Batching(Struct, frozen=True, kw_only=True):
    """When a batch is due: so many records or bytes wait, or the oldest is so many ms old."""

    records: int | None = None
    size: int | None = None
    millis: int | None = None


class Progress(Struct, frozen=True, kw_only=True):
    """How far one export is: a snapshot. `skipped` are ranges it never exported, with reasons.

    They are kept of exporters whose limits say `contiguous`, some thousand of them: older ones are joined,
    with the reason `joined:<count>`, which is how many numbers in such a range were skipped.
    """

    stream: str
    epoch: int
    identifier: str
    config: ExportConfig
    oldest: int
    newest: int
    exported: int
    skipped: list[tuple[int, int, str]]


class Context:
    """What an exporter may ask of the worker. This base works without one: tests use it."""

    def __init__(self, gateway: str = "gateway", stream: str = "stream", epoch: int = 0) -> None:
        self.gateway = gateway
        self.stream = stream
        self.epoch = epoch
        self.log = logging.getLogger("bridge.plugin")
        self.state = b""

    def client(self, service: str, config: AwsConfig | AwsBatchedConfig, **options: Any) -> Any:
        """An AWS client with the configured credentials, for the endpoint and region of an export.

        `options` are keywords of botocore.config.Config.
        """
        from bridge.plugin.aws import AwsSettings, client

        return client(AwsSettings(), service, config.region, config.endpoint_url, **options)

    def working(self) -> None:
        """Tell that a long export still makes progress, so that it is not taken for hung.

        From any thread.
        """

    def throttle(self, size: int) -> None:
        """Wait until `size` bytes beyond the batch's own may be sent under the bandwidth ceiling."""

    def append(self, stream: str, payload: bytes) -> None:
        """Append a message to another stream of the gateway, such as a status stream."""

    def save_state(self, state: bytes) -> None:
        """Keep up to 2,000 bytes durably with the position; `state` is what was kept last."""
        self.state = state

    def open(self, path: Path) -> BinaryIO:
        """Open a regular file that a message names.

        Raises OSError; ValueError if it is in none of the directories of [export.allow].
        """
        return Allow(directories=[Path("/")]).open(path)

    def may_write_to(self, bucket: str) -> bool:
        """Whether [export.allow] has a bucket that a message names."""
        return True

    def exports(self) -> list[Progress]:
        """The progress of all exports of this kind on the gateway, this one included.

        Raises Retry as long as it is not known of all: just after the start.
        """
        return []

    def now(self) -> float:
        """Unix time in seconds."""
        return time.time()


class Exporter:
    """The base of exporters: set the class variables and write `export`."""

    kind: ClassVar[str]
    Config: ClassVar[type[ExportConfig]] = BatchedConfig
    limits: ClassVar[BatchLimits] = BatchLimits()
    timeout: ClassVar[float] = 900.0  # seconds without `context.working()` after which it counts as hung

    def __init__(self, config: Any, context: Context) -> None:
        self.config = config
        self.context = context

    @classmethod
    def batching(cls, config: Any) -> Batching:
        """When a batch is due; the default follows BatchedConfig."""
        if not isinstance(config, BatchedConfig):
            return Batching()
        linger = config.linger_millis
        return Batching(
            records=config.batch_size,
            millis=config.batch_interval_millis if linger is None else linger,
        )

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ValueError for what the types of Config cannot say; called on create and update."""

    @classmethod
    def lacks(cls, config: Any) -> str | None:
        """What this machine lacks for a configuration, with the remedy; `streambridge check` reports it."""
        return None

    def export(self, batch: Batch) -> Outcome:
        """Send the batch; return when the destination has answered for every record."""
        raise Retry(f"{type(self).__name__} has no export method")

    def landed(self, batch: Batch) -> bool | None:
        """Whether a batch is at the destination: all of it, nothing of it, or None if that is unknown.

        Asked of a `contiguous` exporter before a batch is tried again whose attempt had no answer, or
        before it is cut short. It may raise Retry.
        """
        return None

    def idle(self) -> float | None:
        """Called when nothing is left to send; return seconds to be called again, or None."""
        return None

    def dropped(self, first: int, last: int, reason: str) -> None:
        """Called when numbers that were still to be exported are gone from the stream: expired, say.

        They may be part of a batch that was tried. After a crash the same may be told again.
        """

    def cancelled(self, records: Sequence[Record]) -> None:
        """Called when the export was deleted, with the first records that were still waiting."""

    def close(self) -> None:
        """Called once, when the export is updated, deleted, or the worker ends."""


def convert_config(exporter: type[Exporter], raw: Mapping[str, Any]) -> Any:
    """Read a wire configuration (camelCase) into the exporter's Config.

    Raises msgspec.ValidationError (with a path) or ValueError (from `check`).
    """
    config = msgspec.convert(raw, exporter.Config)
    exporter.check(config)
    return config


_APPENDS_TO = (("deadLetterStream",), ("statusConfig", "statusStreamName"))


def appends_to(raw: Mapping[str, Any]) -> dict[tuple[str, ...], str]:
    """The streams that an export (camelCase) appends to, by the path of the key that names each."""
    found: dict[tuple[str, ...], str] = {}
    for path in _APPENDS_TO:
        value: Any = raw
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, str):
            found[path] = value
    return found
