"""Exporter `s3`: writes batches of messages as objects, for the ingest job and other readers of S3.

An object covers the numbers first..last; `bridge.objectkeys` makes its name. It has all of their messages
except those that `topics` or `reduce` leaves out, and declares these (`bridge.filtered`). Where numbers were
dropped from the stream, the next message begins a new object. The same batch always gets the same name. An
object is written only if no object has its name (`If-None-Match: *`). `rows-sha256` in its metadata is the
SHA-256 of its rows as uncompressed `ndjson`. If an object with the same digest exists, an earlier attempt
has arrived. If a different one exists, another gateway has the same id or runs on a copy of the data
directory: the export stops, and overwrites nothing. The same goes for objects with other names that have
some of the numbers (`bridge.plugin.lineage`). `replaceEtag` names an object that may be replaced
nevertheless. With `conditionalPut` false, for stores without conditional requests, nothing is compared, and
objects are overwritten. Formats:

* `ndjson`: gzip of one JSON object per line with the keys gateway, stream, epoch (string),
  sequence_number, ingest_time (RFC 3339, UTC, milliseconds, `Z`), topic, payload (base64).
* `parquet` (needs the extra [parquet]): the same columns; ingest_time is timestamp[us, UTC], payload
  is binary; zstd, every page with its checksum.

An object is due at `sizeHintBytes` of payload and topics or when its first message is `timeHintMillis` old,
whichever comes first. After uploads, and after messages were dropped before their upload, the exporter
writes the gateway report, at most every `reportIntervalMillis` (see `bridge.plugin.reports`). During a
backlog it writes the report once a minute, and with `order` "newest first" once before the first object.
When an export is deleted, the report is written once more without it if the link is up; otherwise the next
report omits it.
"""

from __future__ import annotations

import base64
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Meta

from bridge import (
    ACCEPTED,
    AwsConfig,
    Batch,
    Batching,
    BatchLimits,
    Bucket,
    Bytes,
    Context,
    ExportConfig,
    Exporter,
    Millis,
    Outcome,
    Progress,
    Record,
    Retry,
    Stopped,
    hookimpl,
)
from bridge.deflate import compressor
from bridge.extras import how_to_install
from bridge.filtered import PARQUET_KEY, declaration, with_extra
from bridge.model import MAX_INT64, MAX_MILLIS, MIB
from bridge.objectkeys import data_key, epoch_prefix, report_key
from bridge.plugin.aws import failure
from bridge.plugin.lineage import Lineage
from bridge.plugin.objects import ObjectWriter, probe_bucket
from bridge.plugin.records import lines
from bridge.plugin.reports import gateway_report

AGAIN = 0.2  # seconds
BUSY_REPORT = 60.0  # minimum seconds between gateway reports while a backlog is uploaded
CHUNK = 250  # rows; their lines usually fit in a buffer that is not mapped anew (`bridge.process`)
DIGEST = "rows-sha256"  # the key in an object's metadata
Hint = Annotated[Millis, Meta(ge=1, le=MAX_MILLIS)]


class S3Config(AwsConfig, frozen=True):
    """The destination, when objects are due, and how they are stored."""

    bucket: Bucket
    prefix: str = ""
    format: Literal["ndjson", "parquet"] = "ndjson"
    size_hint_bytes: Annotated[Bytes, Meta(ge=1, le=256 * MIB)] = 5 * MIB
    time_hint_millis: Hint = 300_000
    report_interval_millis: Hint = 10_000
    start_sequence_number: Annotated[int, Meta(ge=0, le=MAX_INT64)] = 0
    storage_class: str | None = None
    server_side_encryption: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    kms_key_id: str | None = None
    checksum_algorithm: Literal["CRC32", "SHA1", "SHA256", "none"] = "CRC32"
    conditional_put: bool = True
    replace_etag: str | None = None


class S3Exporter(Exporter):
    """Exports one stream to one bucket."""

    kind: ClassVar[str] = "s3"
    Config: ClassVar[type[ExportConfig]] = S3Config
    limits: ClassVar[BatchLimits] = BatchLimits(contiguous=True, declares_filtered=True)
    any_order: ClassVar[bool] = True

    config: S3Config

    def __init__(self, config: S3Config, context: Context) -> None:
        super().__init__(config, context)
        plain = config.checksum_algorithm == "none"
        # Stores other than AWS often lack checksums.
        checksums = "when_required" if plain else "when_supported"
        self._client = context.client("s3", config, request_checksum_calculation=checksums)
        self._prefix = config.prefix.strip("/")
        self._encode, self._extension, self._type = _FORMATS[config.format]()
        options: dict[str, Any] = {} if plain else {"ChecksumAlgorithm": config.checksum_algorithm}
        if config.storage_class:
            options["StorageClass"] = config.storage_class
        if config.server_side_encryption:
            options["ServerSideEncryption"] = config.server_side_encryption
        if config.kms_key_id:
            options["SSEKMSKeyId"] = config.kms_key_id
        self._objects = ObjectWriter(
            self._client,
            config.bucket,
            context,
            digest_key=DIGEST,
            conditional=config.conditional_put,
            replace_etag=config.replace_etag,
            options=options,
        )
        self._lineage = Lineage(self._client, config.bucket, context)
        self._destination = (config.bucket, self._prefix)
        self._written = _written.setdefault(self._client, {})
        # When the last upload or drop was settled; an older report lacks it. `inf`: not settled yet, and also
        # at the start, because the previous worker may have died before it wrote a report.
        self._settled_at = math.inf
        self._busy_since = context.monotonic()

    @classmethod
    def check(cls, config: S3Config) -> None:
        if config.kms_key_id and not (config.server_side_encryption or "").startswith("aws:kms"):
            raise ValueError("kmsKeyId needs serverSideEncryption `aws:kms` or `aws:kms:dsse`")
        if config.replace_etag is not None and not config.conditional_put:
            raise ValueError("replaceEtag needs conditionalPut; without it, any object is replaced")

    @classmethod
    def lacks(cls, config: S3Config) -> str | None:
        if config.format == "parquet" and find_spec("pyarrow") is None:
            return f'`format = "parquet"` needs pyarrow; `{how_to_install("parquet")}`'
        return None

    @classmethod
    def probe(cls, config: S3Config, context: Context) -> str:
        return probe_bucket(context.client("s3", config), config.bucket, config.prefix)

    @classmethod
    def batching(cls, config: S3Config) -> Batching:
        return Batching(size=config.size_hint_bytes, millis=config.time_hint_millis)

    def export(self, batch: Batch) -> Outcome:
        self._announce()
        key = self._key(batch)
        if self.config.conditional_put:
            folder = self._under(epoch_prefix(batch.gateway, batch.stream, batch.epoch))
            but = self.config.replace_etag
            self._lineage.check(batch, key, folder, but=but, changed=bool(self.config.reduce))
        body, digest = self._encode(batch)
        self._objects.put_once(key, body, self._type, digest)
        self._settled_at = math.inf
        self._report_while_busy()
        return ACCEPTED

    def _announce(self) -> None:
        """Before newer messages are uploaded first, announce that in the gateway report. Raises Retry.

        Otherwise readers would take the numbers between the objects for lost. The state records the report.
        """
        destination = msgspec.json.encode((self.config.endpoint_url, *self._destination))
        state = hashlib.sha256(destination).digest() if self.config.newest_first else b""
        if state == self.context.state:
            return
        if state:
            with _reports_lock:
                now = self.context.monotonic()
                try:
                    exports = self.context.exports()
                except Retry as error:  # just started
                    raise Retry(str(error), after=AGAIN, unsent=True) from None
                self._write_report(exports, now)
        self.context.save_state(state)

    def _key(self, batch: Batch) -> str:
        epoch, first, last = batch.epoch, batch.first, batch.last
        since = batch.records[0].ingest_time
        return self._under(data_key(batch.gateway, batch.stream, epoch, first, last, since, self._extension))

    def _under(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def landed(self, batch: Batch) -> bool | None:
        found = self._objects.landed(self._key(batch), _digest(batch))
        if found:
            self._settled_at = math.inf
        return found

    def dropped(self, first: int, last: int, reason: str) -> None:
        self._settled_at = math.inf

    def cancelled(self, records: Sequence[Record]) -> None:
        self._settled_at = math.inf  # the current report lists this export

    def idle(self) -> float | None:
        """Write the gateway report if it is outdated; one export writes it for all with its destination."""
        if self._settled_at == math.inf:
            self._settled_at = self.context.monotonic()
        with _reports_lock:
            if not self._report_is_old():
                return None
            now, last = self.context.monotonic(), self._written.get(self._destination, -math.inf)
            wait = last + self.config.report_interval_millis / 1000 - now
            if wait > 0:
                return wait
            try:
                exports = self.context.exports()
            except Retry:  # just started: a report without one of them would be wrong
                return AGAIN
            self._write_report(exports, now)
        return None

    def _report_while_busy(self) -> None:
        """Write the gateway report during a backlog, when `idle` is not called.

        The report does not include the current batch. It tells readers where to look for new objects.
        """
        now = self.context.monotonic()
        every = max(BUSY_REPORT, self.config.report_interval_millis / 1000)
        with _reports_lock:
            if now - max(self._busy_since, self._written.get(self._destination, -math.inf)) < every:
                return
            self._busy_since = now  # even after a failure: `idle` retries, and reports the error
            try:
                self._write_report(self.context.exports(), now)
            except (Retry, Stopped) as error:
                self.context.log.warning("the gateway report is not up to date: %s", error)

    def close(self) -> None:
        with _reports_lock:
            if self._report_is_old():
                now = self.context.monotonic()
                try:
                    self._write_report(self.context.exports(), now)
                except Retry as error:  # the next worker writes it
                    self.context.log.warning("the gateway report is not up to date: %s", error)

    def _report_is_old(self) -> bool:
        return self._settled_at > self._written.get(self._destination, -math.inf)

    def _write_report(self, exports: list[Progress], now: float) -> None:
        """Write a report; `now` is from before these snapshots, for what comes later is not in them."""
        here = [_with_before_start(export) for export in exports if self._same_destination(export.config)]
        document = gateway_report(self.context.gateway, int(self.context.now() * 1000), here)
        key = self._under(report_key(self.context.gateway))
        try:
            self._objects.put(key, document, "application/json")
        except Exception as error:
            raise failure(error, f"uploading {self._objects.url(key)}") from error
        self._written[self._destination] = now

    def _same_destination(self, other: ExportConfig) -> bool:
        mine = self.config
        return (
            isinstance(other, S3Config)
            and (other.endpoint_url, other.bucket) == (mine.endpoint_url, mine.bucket)
            and other.prefix.strip("/") == self._prefix
        )


def _with_before_start(export: Progress) -> Progress:
    """Add the numbers before `startSequenceNumber` to the skipped ranges."""
    start, gaps = getattr(export.config, "start_sequence_number", 0), []
    after = 0  # the end of the range before
    for first, last, _ in [*export.skipped, (start, start, "")]:
        if after < (end := min(first, start)):
            gaps.append((after, end - 1, "before_start"))
        after = last + 1
    return msgspec.structs.replace(export, skipped=sorted(export.skipped + gaps)) if gaps else export


_reports_lock = threading.Lock()
# When each report was last written, by client, then by bucket and prefix.
_written: WeakKeyDictionary[Any, dict[tuple[str, str], float]] = WeakKeyDictionary()


Encode = Callable[[Batch], tuple[bytes, str]]  # an object's content and its `rows-sha256`


def _pieces(batch: Batch) -> Iterator[bytes]:
    """The rows as NDJSON, some at a time: all at once would copy the batch, twice as large."""
    for start in range(0, len(batch.records), CHUNK):
        yield lines(batch, batch.records[start : start + CHUNK])


def _digest(batch: Batch) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(batch):
        digest.update(piece)
    return digest.hexdigest()


def _declaration(batch: Batch) -> bytes:
    return declaration(batch.first, batch.last, [record.sequence_number for record in batch.records])


def _ndjson() -> tuple[Encode, str, str]:
    def encode(batch: Batch) -> tuple[bytes, str]:
        packer, digest, parts = compressor(), hashlib.sha256(), []
        for piece in _pieces(batch):
            digest.update(piece)
            parts.append(packer.compress(piece))
        packed, declared = b"".join([*parts, packer.flush()]), _declaration(batch)
        if declared:
            packed = with_extra(packed, declared)
        return packed, digest.hexdigest()

    return encode, "ndjson.gz", "application/x-ndjson"


def _parquet() -> tuple[Encode, str, str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("gateway", pa.string()),
            ("stream", pa.string()),
            ("epoch", pa.string()),
            ("sequence_number", pa.int64()),
            ("ingest_time", pa.timestamp("us", "UTC")),
            ("topic", pa.string()),
            ("payload", pa.binary()),
        ]
    )

    def encode(batch: Batch) -> tuple[bytes, str]:
        records, count = batch.records, len(batch.records)
        columns = [
            pa.repeat(pa.scalar(batch.gateway), count),
            pa.repeat(pa.scalar(batch.stream), count),
            pa.repeat(pa.scalar(str(batch.epoch)), count),
            pa.array([record.sequence_number for record in records], pa.int64()),
            pa.array([record.ingest_time * 1000 for record in records], pa.timestamp("us", "UTC")),
            pa.array([record.topic for record in records], pa.string()),
            pa.array([record.payload for record in records], pa.binary()),
        ]
        sink = pa.BufferOutputStream()
        # without checksums, most readers return wrong values after a flipped bit
        with pq.ParquetWriter(sink, schema, compression="zstd", write_page_checksum=True) as writer:
            writer.write_table(pa.table(columns, schema=schema))
            if declared := _declaration(batch):
                writer.add_key_value_metadata({PARQUET_KEY: base64.b64encode(declared)})
        content: bytes = sink.getvalue().to_pybytes()
        return content, _digest(batch)

    return encode, "parquet", "application/vnd.apache.parquet"


_FORMATS: dict[str, Callable[[], tuple[Encode, str, str]]] = {
    "ndjson": _ndjson,
    "parquet": _parquet,
}


@hookimpl
def register_exporters(register: Callable[[type[Exporter]], None]) -> None:
    """Register the exporter of this file."""
    register(S3Exporter)
