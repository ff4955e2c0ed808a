"""Exporter `iotAnalytics`, for definitions that still have it. AWS has retired the service.

AWS IoT Analytics ended on 2025-12-15. Its endpoints no longer answer, and boto3 has no client for it.
With `deliveryStreamName`, an export goes to that Firehose delivery stream instead. Otherwise it keeps its
position and reports the reason, without sending anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar

from msgspec import Meta

from bridge import (
    AwsBatchedConfig,
    Batch,
    BatchLimits,
    Context,
    ExportConfig,
    Exporter,
    Outcome,
    Retry,
    hookimpl,
)
from bridge.plugin.firehose import MAX_BYTES, MAX_RECORD, FirehoseSender, probe_stream

RETRY_AFTER = 300.0  # seconds


class IotAnalyticsConfig(AwsBatchedConfig, kw_only=True, frozen=True):
    """The SDK's IoTAnalyticsConfig, with a delivery stream."""

    iot_channel: Annotated[str, Meta(min_length=1)]
    iot_msg_id_prefix: Annotated[str, Meta(max_length=32)] | None = None
    batch_size: Annotated[int, Meta(ge=1, le=100)] | None = None
    delivery_stream_name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}\Z")] | None = None


class IotAnalyticsExporter(Exporter):
    """Exports one stream to the delivery stream that replaces a channel."""

    kind: ClassVar[str] = "iotAnalytics"
    Config: ClassVar[type[ExportConfig]] = IotAnalyticsConfig
    timeout: ClassVar[float] = 3600.0  # a full request over a very slow link
    limits: ClassVar[BatchLimits] = BatchLimits(
        records=100, record_bytes=MAX_RECORD, batch_bytes=MAX_BYTES, by_record=True
    )
    any_order: ClassVar[bool] = True

    config: IotAnalyticsConfig

    def __init__(self, config: IotAnalyticsConfig, context: Context) -> None:
        super().__init__(config, context)
        target = config.delivery_stream_name
        self._sender: FirehoseSender | None = None
        if target is not None:
            self._sender = FirehoseSender(config, target, context, delimiter=b"\n")

    @classmethod
    def probe(cls, config: IotAnalyticsConfig, context: Context) -> str:
        if config.delivery_stream_name is None:
            raise _retired(config)
        return probe_stream(config, config.delivery_stream_name, context)

    def export(self, batch: Batch) -> Outcome:
        if self._sender is None:
            raise _retired(self.config)
        return self._sender.send(batch)


def _retired(config: IotAnalyticsConfig) -> Retry:
    return Retry(
        "AWS retired IoT Analytics on 2025-12-15; remove this export, or set deliveryStreamName "
        f"to the Firehose delivery stream that replaces channel {config.iot_channel}",
        after=RETRY_AFTER,
    )


@hookimpl
def register_exporters(register: Callable[[type[Exporter]], None]) -> None:
    """Register the exporter of this file."""
    register(IotAnalyticsExporter)
