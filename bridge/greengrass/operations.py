"""Requests and results of the operations in the terms of the Stream Manager protocol.

Our extensions are hidden: a description has only the keys and the export kinds of the SDK. A client cannot
intend to delete what it does not see, so an update keeps the extensions (the SDK's way of updating is to
describe, change something, and send all of it back): topics, limits, retention, the deduplication window,
exports of other kinds, and our keys of the SDK's kinds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from bridge.errors import InvalidRequest, UpdateNotAllowed
from bridge.greengrass import wire
from bridge.greengrass.wire import Op
from bridge.model import DEFAULT_MAX_SIZE, problem
from bridge.operations.catalog import Define, Described, Listed, ListStreams, Named, Read, Update
from bridge.operations.reading import ReadMessagesOptions

if TYPE_CHECKING:
    from bridge.access.rules import Identity
    from bridge.model import MessageStreamDefinition, MessageStreamInfo
    from bridge.operations.catalog import Operations

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
_STATUS = frozenset((
    "exportConfigIdentifier", "lastExportedSequenceNumber", "lastExportTime", "errorMessage",
    "exportedBytesFromStream", "exportedMessagesCount",
))  # fmt: skip
_OPTIONS = frozenset(
    ("desiredStartSequenceNumber", "minMessageCount", "maxMessageCount", "readTimeoutMillis")
)
# The SDK gives up a request after 60 s by default, and a reply after that ends its client for good (issue 15
# of aws-greengrass-stream-manager-sdk-python). So a wait that may be its whole time ends this much earlier.
LONG_WAIT = 1_000  # ms


def control(
    operations: Operations, op: Op, request: dict[str, Any], version: str, caller: Identity, retention: str
) -> dict[str, Any]:
    """Carry out an operation other than an append or a read; returns the entries of the reply.

    A stream that is created gets this `retention`. Keys that the SDK does not have are ignored, as AWS does.
    Raises StreamBridgeError or OSError.
    """
    if op is Op.LIST:
        listed = operations.call_now("listStreams", ListStreams(), caller)
        assert isinstance(listed, Listed)
        return {"streams": listed.streams}
    if op is Op.DESCRIBE:
        found = operations.call_now("describeMessageStream", Named(name=text(request, "name")), caller)
        assert isinstance(found, Described)
        return {"messageStreamInfo": shown(found.message_stream_info, version)}
    if op is Op.DELETE:
        operations.call_now("deleteMessageStream", Named(name=text(request, "name")), caller)
        return {}
    definition = request.get("definition")
    if not isinstance(definition, dict):
        raise InvalidRequest("the request: `definition` is missing")
    definition = without_nulls({key: value for key, value in definition.items() if key in _DEFINITION})
    exports = definition.get("exportDefinition")
    if isinstance(exports, dict):
        definition["exportDefinition"] = {
            kind: _sdk_keys(exports[kind], known) for kind, known in EXPORTS.items() if kind in exports
        }
    if op is Op.CREATE:
        whole = definition | {"retention": retention}
        operations.call_now("createMessageStream", Define(definition=whole), caller)
    else:
        assert op is Op.UPDATE, op
        stored = operations.manager.definitions.get(str(definition.get("name")))
        whole = definition if stored is None else with_extensions(definition, stored)
        _ensure_fits(operations, whole)
        operations.call_now("updateMessageStream", Update(definition=whole), caller)
    return {}


def _ensure_fits(operations: Operations, definition: dict[str, Any]) -> None:
    """Raise UpdateNotAllowed if `maxSize` is below what is stored, as AWS's guide says ("update streams").

    The configuration and the command line may shrink a stream.
    """
    stream = operations.manager.store.streams.get(str(definition.get("name")))
    size = definition.get("maxSize", DEFAULT_MAX_SIZE)
    if stream is None or not isinstance(size, int):
        return  # the update says what is wrong
    if size < min(stream.total_bytes, stream.settings.max_size):
        raise UpdateNotAllowed(
            ("maxSize",),
            f"stream {stream.name!r} holds {stream.total_bytes} bytes, so its maxSize cannot be {size}",
            "give at least what it holds",
        )


def _sdk_keys(configs: Any, known: frozenset[str]) -> Any:
    """The exports of one kind with only the SDK's keys; anything but a list of maps is returned as it is."""
    if not isinstance(configs, list) or not all(isinstance(raw, dict) for raw in configs):
        return configs
    return [{key: value for key, value in raw.items() if key in known} for raw in configs]


def text(request: dict[str, Any], key: str) -> str:
    """The text at a key of a request; raises InvalidRequest if it is missing."""
    value = request.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"the request: `{key}` is missing; give the name of a stream")
    return value


def read(request: dict[str, Any]) -> tuple[Read, ReadMessagesOptions]:
    """A read, and its options; raises InvalidRequest."""
    name = text(request, "streamName")
    raw = request.get("readMessagesOptions") or {}
    if not isinstance(raw, dict):
        raise InvalidRequest("the request: `readMessagesOptions` is not a map")
    known = {key: value for key, value in raw.items() if key in _OPTIONS and value is not None}
    try:
        options = msgspec.convert(known, ReadMessagesOptions)
    except msgspec.ValidationError as error:
        raise InvalidRequest(problem(error, "readMessagesOptions")) from None
    if options.read_timeout_millis >= LONG_WAIT:
        spared = min(options.read_timeout_millis // 20 + 20, 1_000)
        options = msgspec.structs.replace(options, read_timeout_millis=options.read_timeout_millis - spared)
    return Read(name=name, read_messages_options=options), options


def shown(info: MessageStreamInfo, version: str) -> dict[str, Any]:
    """The SDK's MessageStreamInfo, with every part (clients assign to parts of it), without extensions."""
    found: dict[str, Any] = msgspec.to_builtins(info)
    definition = {key: value for key, value in found["definition"].items() if key in _DEFINITION}
    exports = definition["exportDefinition"] = {
        kind: _sdk_keys(definition["exportDefinition"].get(kind, []), known)
        for kind, known in (_OLD_EXPORTS if version == "1.0.0" else EXPORTS).items()
    }
    seen = {raw.get("identifier") for configs in exports.values() for raw in configs}
    statuses = [
        {key: value for key, value in status.items() if key in _STATUS and value != ""}
        for status in found["exportStatuses"]
        if status["exportConfigIdentifier"] in seen
    ]
    shown = {
        "definition": definition,
        "storageStatus": found["storageStatus"],
        "exportStatuses": statuses,
    }
    return without_nulls(shown)  # type: ignore[no-any-return]


def with_extensions(definition: dict[str, Any], stored: MessageStreamDefinition) -> dict[str, Any]:
    """A client's update, with the extensions that the stream has."""
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
    """The same without null entries: in this protocol null means absent."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value if item is not None]
    return value


assert set(wire.REPLY_TO) == set(Op)
