"""The data classes of the AWS SDK (package `stream-manager`, module `data`), under their names.

Limits and defaults are the SDK's. In addition, `MessageStreamDefinition` has our extensions, and `Message`
and `ReadMessagesOptions` have `topic`. Export kinds of plugins, and their keys, go into `more`:

    ExportDefinition(kinesis=[KinesisConfig("k", "name", more={"partitionKey": "{topic}"})],
                     more={"firehose": [{"identifier": "f", "deliveryStreamName": "name"}]})
"""

from __future__ import annotations

import json
from enum import Enum, IntEnum
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta, field
from msgspec.structs import fields

from bridge.client.base import Data
from bridge.model import MAX_INT32, MAX_INT64, MAX_MILLIS, Limits, Name, Persistence, StrategyOnFull

D = TypeVar("D", bound=Data)
MIB = 1024 * 1024
DAY = 86_400_000  # ms
Keys = dict[str, Any]
Text = Annotated[str, Meta(min_length=1)]
Number = Annotated[int, Meta(ge=0, le=MAX_INT64)]
Interval = Annotated[int, Meta(ge=60_000, le=MAX_MILLIS)]
Priority = Annotated[int, Meta(ge=1, le=10)]
Count = Annotated[int, Meta(ge=1, le=MAX_INT32)]
Printable = r"^[^\u0000-\u001F\u007F]+\Z"


class ExportFormat(IntEnum):
    """How messages are sent over HTTP."""

    RAW_NOT_BATCHED = 0
    JSON_BATCHED = 1


class Status(IntEnum):
    """The status of an S3 export task."""

    Success = 0
    Failure = 1
    InProgress = 2
    Warning = 3
    Canceled = 4


class EventType(IntEnum):
    """What a status message is about."""

    S3Task = 0


class StatusLevel(IntEnum):
    """How much an export reports; ERROR is least."""

    ERROR = 0
    WARN = 1
    INFO = 2
    DEBUG = 3
    TRACE = 4


class Quality(Enum):
    """The quality of a SiteWise value."""

    GOOD = "GOOD"
    BAD = "BAD"
    UNCERTAIN = "UNCERTAIN"


class ResponseStatusCode(IntEnum):
    """The result of a request."""

    Success = 0
    UnknownFailure = 1
    Unauthorized = 2
    InvalidRequest = 3
    RequestPayloadTooLarge = 4
    ResourceNotFound = 5
    ServerTimeout = 6
    ResponsePayloadTooLarge = 7
    UnsupportedConnectVersion = 8
    UnexpectedOperation = 9
    UnsupportedProtocolVersion = 10
    InvalidProtocolVersion = 11
    FailedToConnect = 12
    NotEnoughMessages = 13
    MessageStoreReadError = 14
    OutOfMemoryError = 15
    UpdateFailed = 16
    UpdateNotAllowed = 17
    UnknownOperation = 18


# -- exports -------------------------------------------------------------------


class StatusConfig(Data):
    """Where an S3 export reports, and how much."""

    status_level: StatusLevel | None = None
    status_stream_name: Name | None = None
    more: Keys = field(default_factory=dict)


class S3ExportTaskExecutorConfig(Data):
    """Uploads the files that messages name."""

    identifier: Name | None = None
    size_threshold_for_multipart_upload_bytes: Annotated[int, Meta(ge=5 * MIB)] | None = None
    priority: Priority | None = None
    disabled: bool | None = None
    status_config: StatusConfig | None = None
    more: Keys = field(default_factory=dict)

    REQUIRED = ("identifier",)
    NESTED: ClassVar[dict[str, type[Data]]] = {"status_config": StatusConfig}


class HTTPConfig(Data):
    """Posts messages to an HTTP server."""

    identifier: Name | None = None
    uri: Text | None = None
    batch_size: Annotated[int, Meta(ge=1, le=500)] | None = None
    batch_interval_millis: Interval | None = None
    priority: Priority | None = None
    start_sequence_number: Number | None = None
    disabled: bool | None = None
    export_format: ExportFormat | None = None
    more: Keys = field(default_factory=dict)

    REQUIRED = ("identifier", "uri")


class IoTAnalyticsConfig(Data):
    """Exports to IoT Analytics, which AWS has retired."""

    identifier: Name | None = None
    iot_channel: Text | None = None
    iot_msg_id_prefix: Annotated[str, Meta(max_length=32)] | None = None
    batch_size: Annotated[int, Meta(ge=1, le=100)] | None = None
    batch_interval_millis: Interval | None = None
    priority: Priority | None = None
    start_sequence_number: Number | None = None
    disabled: bool | None = None
    more: Keys = field(default_factory=dict)

    REQUIRED = ("identifier", "iot_channel")


class IoTSiteWiseConfig(Data):
    """Exports to IoT SiteWise."""

    identifier: Name | None = None
    batch_size: Annotated[int, Meta(ge=1, le=10)] | None = None
    batch_interval_millis: Interval | None = None
    priority: Priority | None = None
    start_sequence_number: Number | None = None
    disabled: bool | None = None
    more: Keys = field(default_factory=dict)

    REQUIRED = ("identifier",)


class KinesisConfig(Data):
    """Exports to a Kinesis data stream."""

    identifier: Name | None = None
    kinesis_stream_name: Text | None = None
    batch_size: Annotated[int, Meta(ge=1, le=500)] | None = None
    batch_interval_millis: Interval | None = None
    priority: Priority | None = None
    start_sequence_number: Number | None = None
    disabled: bool | None = None
    more: Keys = field(default_factory=dict)

    REQUIRED = ("identifier", "kinesis_stream_name")


class ConsumerConfig(Data):
    """Our extension: clients fetch the messages with `fetch_messages` and acknowledge each."""

    identifier: Name | None = None
    topics: list[str] | None = None
    ack_deadline_millis: Annotated[int, Meta(ge=1, le=DAY)] | None = None
    max_unacknowledged: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    max_deliveries: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    dead_letter_stream: Name | None = None
    start_sequence_number: Number | None = None
    start_time: Text | None = None
    disabled: bool | None = None
    more: Keys = field(default_factory=dict)

    REQUIRED = ("identifier",)


class ExportDefinition(Data):
    """Where a stream is exported to; kinds that the SDK lacks go into `more`."""

    http: list[HTTPConfig] | None = None
    iot_analytics: list[IoTAnalyticsConfig] | None = None
    kinesis: list[KinesisConfig] | None = None
    iot_sitewise: list[IoTSiteWiseConfig] | None = field(default=None, name="IotSitewise")
    s3_task_executor: list[S3ExportTaskExecutorConfig] | None = None
    consumer: list[ConsumerConfig] | None = None
    more: Keys = field(default_factory=dict)

    NESTED: ClassVar[dict[str, type[Data]]] = {
        "http": HTTPConfig,
        "iot_analytics": IoTAnalyticsConfig,
        "kinesis": KinesisConfig,
        "iot_sitewise": IoTSiteWiseConfig,
        "s3_task_executor": S3ExportTaskExecutorConfig,
        "consumer": ConsumerConfig,
    }

    @classmethod
    def from_dict(cls, d: Keys) -> ExportDefinition:
        """Read the wire format; absent lists become empty ones, which programs append to and iterate over."""
        empty: Keys = {name.encode_name: [] for name in fields(cls) if name.name != "more"}
        return super().from_dict(empty | d)


# -- streams -------------------------------------------------------------------


class MessageStreamDefinition(Data):
    """The definition of a stream. Our extensions follow after `export_definition`."""

    name: Name | None = None
    max_size: Annotated[int, Meta(ge=1024, le=MAX_INT64)] | None = 256 * MIB
    stream_segment_size: Annotated[int, Meta(ge=1024, le=MAX_INT32)] | None = 16 * MIB
    time_to_live_millis: Interval | None = None
    strategy_on_full: StrategyOnFull | None = None
    persistence: Persistence | None = None
    flush_on_write: bool | None = None
    export_definition: ExportDefinition | None = None
    topics: list[str] | None = None
    limits: Limits | None = None
    retention: Literal["limits", "exported"] | None = None
    deduplication_window_millis: Annotated[int, Meta(ge=1, le=MAX_MILLIS)] | None = None
    description: str | None = None
    tags: dict[str, str] | None = None
    encryption: bool | None = None
    more: Keys = field(default_factory=dict)

    REQUIRED = ("name", "strategy_on_full")
    NESTED: ClassVar[dict[str, type[Data]]] = {"export_definition": ExportDefinition}


class StorageStatus(Data):
    """The messages that a stream holds."""

    oldest_sequence_number: int | None = None
    newest_sequence_number: int | None = None
    total_bytes: int | None = None


class ExportStatus(Data):
    """The progress of an export; what follows after the count of exported messages is our extension."""

    export_config_identifier: str | None = None
    last_exported_sequence_number: int | None = None
    last_export_time: int | None = None
    error_message: str | None = None
    exported_bytes_from_stream: int | None = None
    exported_messages_count: int | None = None
    rejected_messages_count: int | None = None
    skipped_messages_count: int | None = None
    stopped: bool | None = None
    unacknowledged_messages_count: int | None = None
    exported_ahead: list[list[int]] | None = None
    paused: bool | None = None
    error_since: int | None = None
    failed_attempts: int | None = None
    next_attempt_time: int | None = None
    passed_sequence_number: int | None = None
    lost_messages_count: int | None = None
    last_lost: list[int] | None = None
    last_lost_time: int | None = None


class EncryptionStatus(Data):
    """Our extension: whether a stream is encrypted, and how many of its segments with messages are.

    `state` is ENABLED or DISABLED, or ENABLING or DISABLING until a change has reached the newest segment.
    """

    state: str | None = None
    encrypted_segments: int | None = None
    unencrypted_segments: int | None = None


class MessageStreamInfo(Data):
    """A stream's definition and state."""

    definition: MessageStreamDefinition | None = None
    storage_status: StorageStatus | None = None
    export_statuses: list[ExportStatus] | None = None
    version: str | None = None
    messages: int | None = None
    oldest_ingest_time: int | None = None
    newest_ingest_time: int | None = None
    topic_count: int | None = None
    encryption: EncryptionStatus | None = None

    NESTED: ClassVar[dict[str, type[Data]]] = {
        "definition": MessageStreamDefinition,
        "storage_status": StorageStatus,
        "export_statuses": ExportStatus,
        "encryption": EncryptionStatus,
    }
    # The SDK's names for the classes inside.
    storageStatus: ClassVar[type[Data]] = StorageStatus  # noqa: N815
    exportStatuses: ClassVar[type[Data]] = ExportStatus  # noqa: N815


class ReadMessagesOptions(Data):
    """How to read. Our extensions: `topic` is an MQTT topic filter, `last_per_topic` reads only the newest
    message of each topic."""

    desired_start_sequence_number: Number | None = None
    min_message_count: Count | None = 1
    max_message_count: Count | None = None
    read_timeout_millis: Annotated[int, Meta(ge=0, le=MAX_MILLIS)] | None = 0
    topic: str | None = None
    last_per_topic: bool | None = None


class Message(Data):
    """A stored message; our extensions are `topic`, `headers` (MQTT 5) and `deliveries` (of a consumer)."""

    stream_name: str | None = None
    sequence_number: int | None = None
    ingest_time: int | None = None
    payload: bytes | None = None
    topic: str | None = None
    headers: dict[str, Any] | None = None
    deliveries: int | None = None


# -- message bodies for some exports -----------------------------------------


class S3ExportTaskDefinition(Data):
    """A file to be uploaded, as the body of a message."""

    input_url: str | None = None
    bucket: Annotated[str, Meta(min_length=3, max_length=63)] | None = None
    key: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    user_metadata: dict[str, Any] | None = None

    REQUIRED = ("input_url", "bucket", "key")


class StatusContext(Data):
    """What a status message is about."""

    s3_export_task_definition: S3ExportTaskDefinition | None = None
    export_identifier: str | None = None
    stream_name: str | None = None
    sequence_number: int | None = None

    NESTED: ClassVar[dict[str, type[Data]]] = {"s3_export_task_definition": S3ExportTaskDefinition}


class StatusMessage(Data):
    """The body of a message on a status stream."""

    event_type: EventType | None = None
    status_level: StatusLevel | None = None
    status: Status | None = None
    status_context: StatusContext | None = None
    message: str | None = None
    timestamp_epoch_ms: int | None = None

    REQUIRED = ("event_type", "status")
    NESTED: ClassVar[dict[str, type[Data]]] = {"status_context": StatusContext}


class TimeInNanos(Data):
    """A point in time."""

    time_in_seconds: Annotated[int, Meta(ge=1, le=31556889864403199)] | None = None
    offset_in_nanos: Annotated[int, Meta(ge=0, le=999999999)] | None = None

    REQUIRED = ("time_in_seconds",)


class Variant(Data):
    """A value of one of four kinds."""

    string_value: Annotated[str, Meta(min_length=1, max_length=1024, pattern=Printable)] | None = None
    integer_value: Annotated[int, Meta(ge=-(2**31), le=MAX_INT32)] | None = None
    double_value: float | None = None
    boolean_value: bool | None = None


class AssetPropertyValue(Data):
    """A value at a time."""

    value: Variant | None = None
    timestamp: TimeInNanos | None = None
    quality: Quality | None = None

    REQUIRED = ("value", "timestamp")
    NESTED: ClassVar[dict[str, type[Data]]] = {"value": Variant, "timestamp": TimeInNanos}


class PutAssetPropertyValueEntry(Data):
    """Values of one property, as the body of a message for SiteWise."""

    entry_id: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+\Z")] | None = None
    asset_id: str | None = None
    property_id: str | None = None
    property_alias: Annotated[str, Meta(min_length=1, max_length=2048, pattern=Printable)] | None = None
    property_values: Annotated[list[AssetPropertyValue], Meta(min_length=1, max_length=10)] | None = None

    REQUIRED = ("entry_id", "property_values")
    NESTED: ClassVar[dict[str, type[Data]]] = {"property_values": AssetPropertyValue}


class Util:
    """JSON bodies for SiteWise and S3 exports, and of status messages."""

    @staticmethod
    def validate_and_serialize_to_json_bytes(data: Data) -> bytes:
        """Return the JSON of a data object; raises ValidationException if it is invalid."""
        data.check()
        return json.dumps(_without_empty_lists(data.as_dict())).encode()

    @staticmethod
    def deserialize_json_bytes_to_obj(bytes: bytes, type: type[D]) -> D:  # noqa: A002 - the SDK's names
        """Return the data object of a JSON document."""
        return type.from_dict(json.loads(bytes))


def _without_empty_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_empty_lists(item) for key, item in value.items() if item != []}
    return value
