"""Exporter `kinesis`: puts records to a Kinesis data stream, with PutRecords.

Service limits: 500 records and 10 MiB per request, 10 MiB per record, keys included; 1,000 records
and 1 MB per second and shard.

Without `partitionKey` each record has a random key, and no order. With it, records of the same key
arrive in sequence order, even if some of them fail: PutRecords promises no order within a request, so a
request has at most one record of a key, and later records wait for a failed record of their key.
`orderPerKey: false` trades this order for throughput. Only failed records are sent again.

`record` defines what a record contains; see `bridge.plugin.records`. The limits apply to the result: a
larger record is rejected, and a larger request is split.

`compression` packs the messages of a batch into a few gzip records: one for each key, or a single one
without `partitionKey`, of up to 1 MB before compression. In a record, JSON messages (`record = "json"`, or a
JSON template) are lines. CBOR messages are a sequence of items (RFC 8742), and all others a sequence of CBOR
byte strings. A record succeeds or fails as a whole.

`pacing` keeps the rate within the capacity of the stream's shards, so that Kinesis does not throttle it
(needs the right kinesis:DescribeStreamSummary).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from bridge import (
    AwsBatchedConfig,
    Batch,
    BatchLimits,
    Context,
    ExportConfig,
    Exporter,
    Outcome,
    Refused,
    Retry,
    hookimpl,
    send_split,
)
from bridge.deflate import gzip
from bridge.model import MIB
from bridge.plugin.aws import cause, failure, is_permanent, is_throttled, probe, safe_code
from bridge.plugin.keys import KeyTemplate
from bridge.plugin.records import JSON, RecordEncoder

MAX_RECORD, MAX_BYTES = 10 * MIB - 1024, 10 * MIB - 500 * 1024  # without keys, of up to 1 KiB in UTF-8 each
PACKED = 1_000_000  # bytes of messages in a record: a stream takes 1 MiB, unless its maximum is raised
SHARD_RECORDS, SHARD_BYTES = 1000, 1_000_000  # per second
SHARDS_EVERY = 300.0  # seconds between two requests for the number of shards


class KinesisConfig(AwsBatchedConfig, kw_only=True, frozen=True):
    """The SDK's KinesisConfig, with extensions."""

    kinesis_stream_name: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+\Z")]
    batch_size: Annotated[int, Meta(ge=1, le=500)] | None = None
    partition_key: str | None = None
    order_per_key: bool = True
    pacing: bool = False
    record: str = "payload"
    compression: Literal["gzip"] | None = None


class KinesisExporter(Exporter):
    """Exports one stream to one Kinesis data stream."""

    kind: ClassVar[str] = "kinesis"
    Config: ClassVar[type[ExportConfig]] = KinesisConfig
    timeout: ClassVar[float] = 3600.0  # a full request over a very slow link
    limits: ClassVar[BatchLimits] = BatchLimits(
        records=500, record_bytes=MAX_RECORD, batch_bytes=MAX_BYTES, by_record=True
    )
    any_order: ClassVar[bool] = True

    config: KinesisConfig

    def __init__(self, config: KinesisConfig, context: Context) -> None:
        super().__init__(config, context)
        # Our records are always valid, and botocore's check of 500 would cost a quarter of the time.
        self._client = context.client("kinesis", config, parameter_validation=False)
        self._template = KeyTemplate(config.partition_key) if config.partition_key else None
        self._encoder = RecordEncoder(config.record)
        self._shards, self._shards_at = 1, -SHARDS_EVERY
        self._free_at = 0.0

    @classmethod
    def check(cls, config: KinesisConfig) -> None:
        if config.partition_key is not None:
            KeyTemplate(config.partition_key)
            if config.order_per_key and config.newest_first:
                raise ValueError(
                    'order: records of one partition key arrive in order; with "newest first", set '
                    "orderPerKey to false, or use no partitionKey"
                )
        encoder = RecordEncoder(config.record)
        if config.compression and encoder.content_type == JSON and "\n" in config.record:
            raise ValueError(
                "record: the template has a line break, and compression puts a message on a line"
            )

    @classmethod
    def probe(cls, config: KinesisConfig, context: Context) -> str:
        name, client = config.kinesis_stream_name, context.client("kinesis", config)
        probe(lambda: client.describe_stream_summary(StreamName=name), f"describing the stream {name}")
        return f"could describe the stream {name}"

    def export(self, batch: Batch) -> Outcome:
        data, rejected = self._encoder.encode(batch, MAX_RECORD)
        keys = [self._template.key(batch, record) if self._template else None for record in batch.records]
        retry: list[int] = []
        self._error, self._after = "", None
        held: set[str] = set()  # keys with a failed record: later records of the key wait
        cut = False
        requests = self._requests(data, keys, self._groups(data, keys, rejected))
        for request in requests:
            sending = [group for group in request if keys[group[0]] not in held]
            failed = [n for group in request if keys[group[0]] in held for n in group]
            try:
                again, refused = self._send(data, keys, sending)
            except Retry as problem:
                if len(requests) == 1:
                    raise
                again, refused = [n for group in sending for n in group], {}
                self._error, cut = str(problem), problem.cut
                self._after = problem.after or self._after
            failed += again
            rejected |= refused
            retry += failed
            held |= {key for n in failed if (key := keys[n]) is not None}
        return Outcome(
            retry=sorted(retry),
            rejected=rejected,
            error=self._error,
            after=self._after if retry else None,
            cut=cut,
        )

    def _groups(
        self, data: Sequence[bytes], keys: Sequence[str | None], without: Container[int]
    ) -> list[list[int]]:
        """The messages of each record, in order."""
        if not self.config.compression:
            return [[n] for n in range(len(data)) if n not in without]
        found: list[list[int]] = []
        open_: dict[str | None, tuple[list[int], int]] = {}  # the last group of a key, and its size
        for n, key in enumerate(keys):
            if n in without:
                continue
            group, size = open_.get(key, ([], 0))
            if not group or size + len(data[n]) > PACKED:
                group, size = [], 0
                found.append(group)
            group.append(n)
            open_[key] = group, size + len(data[n])
        return found

    def _requests(
        self, data: Sequence[bytes], keys: Sequence[str | None], groups: Sequence[list[int]]
    ) -> list[list[list[int]]]:
        """Requests within the limits, in order; with at most one record of a key if order matters."""
        is_ordered = self._template is not None and self.config.order_per_key
        waves: list[list[list[int]]] = []
        seen: dict[str, int] = {}
        for group in groups:
            key = keys[group[0]]
            wave = 0
            if is_ordered and key is not None:
                wave = seen.get(key, 0)
                seen[key] = wave + 1
            if wave == len(waves):
                waves.append([])
            waves[wave].append(group)
        return [request for wave in waves for request in _within_limits(data, wave)]

    def _send(
        self, data: Sequence[bytes], keys: Sequence[str | None], sending: Sequence[list[int]]
    ) -> tuple[list[int], dict[int, str]]:
        """Send one request; return the messages to retry, and the rejected ones with reasons."""
        failed: list[int] = []

        def put(part: Sequence[int]) -> None:
            late = {keys[n] for n in failed} - {None}  # refused records are sent again in halves, in order
            wanted = {n for n in part if keys[n] not in late}
            groups = [some for group in sending if (some := [n for n in group if n in wanted])]
            again = self._put(data, keys, groups) if groups else []
            failed.extend([*again, *(n for n in part if n not in wanted)])

        messages = [n for group in sending for n in group]
        return failed, send_split(messages, put) if messages else {}

    def _put(
        self, data: Sequence[bytes], keys: Sequence[str | None], groups: Sequence[list[int]]
    ) -> list[int]:
        """Send a record for each group; return the messages of those that failed.

        Raises Retry or Refused for all of them.
        """
        entries = [
            {"Data": self._record(data, group), "PartitionKey": keys[group[0]] or _random_key()}
            for group in groups
        ]
        if self.config.pacing:
            self._pace(len(entries), sum(len(entry["Data"]) for entry in entries))
        self.context.working()
        name = self.config.kinesis_stream_name
        try:
            answer = self._client.put_records(StreamName=name, Records=entries)
        except Exception as error:
            if is_permanent(error):
                raise Refused(cause(error)) from error
            raise failure(error, f"putting records to {name}") from error
        failed = []
        for group, result in zip(groups, answer["Records"], strict=True):
            if code := result.get("ErrorCode"):
                failed += group
                self._error = safe_code(code)
                self._after = 1.0 if is_throttled(code) else self._after
        return failed

    def _record(self, data: Sequence[bytes], group: Sequence[int]) -> Any:
        if self.config.compression:
            return gzip(self._encoder.packed([data[n] for n in group]))
        return data[group[0]]

    _error: str = ""
    _after: float | None = None

    def _pace(self, records: int, size: int) -> None:
        now = time.monotonic()
        if now - self._shards_at >= SHARDS_EVERY:
            try:
                answer = self._client.describe_stream_summary(StreamName=self.config.kinesis_stream_name)
                self._shards = max(answer["StreamDescriptionSummary"]["OpenShardCount"], 1)
            except Exception as error:
                raise failure(error, "asking for the number of shards") from error
            self._shards_at = now
        if (wait := self._free_at - now) > 0:
            time.sleep(wait)
        seconds = max(records / SHARD_RECORDS, size / SHARD_BYTES) / self._shards
        self._free_at = max(self._free_at, now) + seconds


def _within_limits(data: Sequence[bytes], groups: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Split records, in order, into requests of at most MAX_BYTES."""
    request: list[list[int]] = []
    size = 0
    for group in groups:
        more = sum([len(data[n]) for n in group])
        size += more
        if size > MAX_BYTES and request:
            yield request
            request, size = [], more
        request.append(group)
    yield request


def _random_key() -> str:
    # It only has to spread records evenly over the shards; a UUID would cost five times as much.
    return f"{random.getrandbits(128):032x}"


@hookimpl
def register_exporters(register: Callable[[type[Exporter]], None]) -> None:
    """Register the exporter of this file."""
    register(KinesisExporter)
