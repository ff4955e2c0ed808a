"""What the Stream Manager protocol makes of requests and results of the StreamManager.

Extensions stay out of sight: a description holds the keys and the export kinds of the SDK, no others.
What a client cannot see it cannot mean to delete, so an update keeps the extensions as they are (the
SDK's recipe is: describe, change something, send all of it back): topics, limits, retention,
deduplication window, exports of kinds that the SDK has not, and the further keys of its own kinds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from bridge.changes import log_change
from bridge.errors import InvalidRequest
from bridge.greengrass import wire
from bridge.greengrass.wire import Op
from bridge.manager import ReadMessagesOptions
from bridge.model import problem

if TYPE_CHECKING:
    from bridge.manager import StreamManager
    from bridge.model import MessageStreamDefinition

_DEFINITION = frozenset((
    "name", "maxSize", "streamSegmentSize", "timeToLiveMillis", "strategyOnFull", "persistence",
    "flushOnWrite", "exportDefinition",
))  # fmt: skip
_BATCHED = frozenset((
    "identifier", "batchSize", "batchIntervalMillis", "priority", "startSequenceNumber", "disabled",
))  # fmt: skip
EXPORTS: dict[str, frozenset[str]] = {
    "http": _BATCHED | {"uri", "exportFormat"},
    "iotAnalytics": _BATCHED | {"iotChannel", "iotMsgIdPrefix"},
    "kinesis": _BATCHED | {"kinesisStreamName"},
    "IotSitewise": _BATCHED,
    "s3TaskExecutor": frozenset(
        ("identifier", "sizeThresholdForMultipartUploadBytes", "priority", "disabled", "statusConfig")
    ),
}
_OLD_EXPORTS = {kind: EXPORTS[kind] for kind in ("http", "iotAnalytics", "kinesis")}  # of protocol 1.0.0
_OPTIONS = frozenset(
    ("desiredStartSequenceNumber", "minMessageCount", "maxMessageCount", "readTimeoutMillis")
)


def control(manager: StreamManager, op: Op, request: dict[str, Any], version: str, by: str) -> dict[str, Any]:
    """Carry out an operation that is neither append nor read; returns the result's entries.

    `by` is who asks, for the log. Raises StreamBridgeError or OSError.
    """
    if op is Op.LIST:
        return {"streams": manager.names()}
    if op is Op.DESCRIBE:
        return {"messageStreamInfo": describe(manager, text(request, "name"), version)}
    if op is Op.DELETE:
        manager.delete(text(request, "name"))
        log_change("deleted", text(request, "name"), by)
        return {}
    definition = request.get("definition")
    if not isinstance(definition, dict):
        raise InvalidRequest("the request: `definition` is missing")
    definition = without_nulls({key: value for key, value in definition.items() if key in _DEFINITION})
    exports = definition.get("exportDefinition")
    if isinstance(exports, dict):
        definition["exportDefinition"] = {kind: exports[kind] for kind in EXPORTS if kind in exports}
    if op is Op.CREATE:
        manager.create(definition)
        log_change("created", str(definition["name"]), by)
    else:
        stored = manager.definitions.get(str(definition.get("name")))
        manager.update(definition if stored is None else with_extensions(definition, stored))
        log_change("updated", str(definition["name"]), by)
    return {}


def text(request: dict[str, Any], key: str) -> str:
    """The text at a key of a request; raises InvalidRequest if there is none."""
    value = request.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"the request: `{key}` is missing; give the name of a stream")
    return value


def options(request: dict[str, Any]) -> ReadMessagesOptions:
    """The options of a read; raises InvalidRequest."""
    raw = request.get("readMessagesOptions") or {}
    if not isinstance(raw, dict):
        raise InvalidRequest("readMessagesOptions is not a map")
    known = {key: value for key, value in raw.items() if key in _OPTIONS and value is not None}
    try:
        return msgspec.convert(known, ReadMessagesOptions)
    except msgspec.ValidationError as error:
        raise InvalidRequest(problem(error, "readMessagesOptions")) from None


def without_wait(asked: ReadMessagesOptions) -> ReadMessagesOptions:
    """The same read, of what is there now."""
    return msgspec.structs.replace(asked, read_timeout_millis=0)


def describe(manager: StreamManager, name: str, version: str) -> dict[str, Any]:
    """The SDK's MessageStreamInfo: whole (its users assign into parts of it), without extensions."""
    info = manager.describe(name)
    definition = info.definition
    kinds = _OLD_EXPORTS if version == "1.0.0" else EXPORTS
    exports = {
        kind: [
            without_nulls({key: value for key, value in raw.items() if key in known})
            for raw in definition.export_definition.get(kind, ())
        ]
        for kind, known in kinds.items()
    }
    seen = {raw.get("identifier") for configs in exports.values() for raw in configs}
    shown: dict[str, Any] = {
        "name": definition.name,
        "maxSize": definition.max_size,
        "streamSegmentSize": definition.stream_segment_size,
        "strategyOnFull": int(definition.strategy_on_full),
        "persistence": int(definition.persistence),
        "flushOnWrite": definition.flush_on_write,
        "exportDefinition": exports,
    }
    if definition.time_to_live_millis is not None:
        shown["timeToLiveMillis"] = definition.time_to_live_millis
    storage = info.storage_status
    return {
        "definition": shown,
        "storageStatus": {
            "oldestSequenceNumber": storage.oldest_sequence_number,
            "newestSequenceNumber": storage.newest_sequence_number,
            "totalBytes": storage.total_bytes,
        },
        "exportStatuses": [
            {
                "exportConfigIdentifier": status.export_config_identifier,
                "lastExportedSequenceNumber": status.last_exported_sequence_number,
                "lastExportTime": status.last_export_time,
                "exportedBytesFromStream": status.exported_bytes_from_stream,
                "exportedMessagesCount": status.exported_messages_count,
            }
            | ({"errorMessage": status.error_message} if status.error_message else {})
            for status in info.export_statuses
            if status.export_config_identifier in seen
        ],
    }


def with_extensions(definition: dict[str, Any], stored: MessageStreamDefinition) -> dict[str, Any]:
    """An update as it came, with the extensions that the stream has."""
    whole = msgspec.to_builtins(stored)
    kept = {key: value for key, value in whole.items() if key not in _DEFINITION}
    old: dict[str, list[dict[str, Any]]] = whole["exportDefinition"]
    exports = definition.get("exportDefinition", {})
    if not isinstance(exports, dict):
        return definition
    merged: dict[str, Any] = {kind: configs for kind, configs in old.items() if kind not in EXPORTS}
    for kind, configs in exports.items():
        hidden = {
            raw["identifier"]: {key: value for key, value in raw.items() if key not in EXPORTS[kind]}
            for raw in old.get(kind, ())
        }
        merged[kind] = configs
        if isinstance(configs, list) and all(isinstance(raw, dict) for raw in configs):
            merged[kind] = [hidden.get(str(raw.get("identifier")), {}) | raw for raw in configs]
    return kept | definition | {"exportDefinition": merged}


def without_nulls(value: Any) -> Any:
    """The same without entries that are null: on this protocol null and absent are one."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value if item is not None]
    return value


assert set(wire.REPLY_TO) == set(Op)
