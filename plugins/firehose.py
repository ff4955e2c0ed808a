"""Exporter `firehose`: puts records to a Data Firehose delivery stream; see `bridge.plugin.firehose`.

`record` defines what is sent for a message; see `bridge.plugin.records`. `delimiter`, by default a newline,
follows each message, so that messages stay separate at the destination. `packBytes` packs messages into
records of up to that size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar

from msgspec import Meta

from bridge import (
    AwsBatchedConfig,
    Batch,
    Batching,
    BatchLimits,
    Bytes,
    Context,
    ExportConfig,
    Exporter,
    Outcome,
    hookimpl,
)
from bridge.plugin.firehose import MAX_BYTES, MAX_RECORD, MAX_RECORDS, FirehoseSender, probe_stream
from bridge.plugin.records import RecordEncoder

PACKED = 10_000  # messages per batch if they are packed


class FirehoseConfig(AwsBatchedConfig, frozen=True):
    """The delivery stream, and how messages become records."""

    delivery_stream_name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+\Z")]
    delimiter: str = "\n"
    pack_bytes: Annotated[Bytes, Meta(ge=0, le=MAX_RECORD)] = 0
    record: str = "payload"


class FirehoseExporter(Exporter):
    """Exports one stream to one delivery stream."""

    kind: ClassVar[str] = "firehose"
    Config: ClassVar[type[ExportConfig]] = FirehoseConfig
    timeout: ClassVar[float] = 3600.0  # a full request over a very slow link
    limits: ClassVar[BatchLimits] = BatchLimits(
        record_bytes=MAX_RECORD, batch_bytes=MAX_BYTES, by_record=True
    )
    any_order: ClassVar[bool] = True

    config: FirehoseConfig

    def __init__(self, config: FirehoseConfig, context: Context) -> None:
        super().__init__(config, context)
        self._sender = FirehoseSender(
            config,
            config.delivery_stream_name,
            context,
            delimiter=config.delimiter.encode(),
            pack=config.pack_bytes,
            record=config.record,
        )

    @classmethod
    def check(cls, config: FirehoseConfig) -> None:
        RecordEncoder(config.record)

    @classmethod
    def batching(cls, config: FirehoseConfig) -> Batching:
        base = super().batching(config)
        return Batching(
            records=base.records or (PACKED if config.pack_bytes else MAX_RECORDS), millis=base.millis
        )

    @classmethod
    def probe(cls, config: FirehoseConfig, context: Context) -> str:
        return probe_stream(config, config.delivery_stream_name, context)

    def export(self, batch: Batch) -> Outcome:
        return self._sender.send(batch)


@hookimpl
def register_exporters(register: Callable[[type[Exporter]], None]) -> None:
    """Register the exporter of this file."""
    register(FirehoseExporter)
