"""The operations of the Firehose API on delivery streams, each declared once: request, right, result.

A delivery stream is a stream with one export to its destination: `s3Delivery`, made from the S3 destination
that a client names, or `firehose`, which the configuration declares. Other exports, such as consumers, do not
matter here. Everything else that the API stores is `delivery` in the stream's definition.

    operation                        right             on the stream
    CreateDeliveryStream             manage            create
    DeleteDeliveryStream             manage            delete; see below
    DescribeDeliveryStream           read or manage    describe
    ListDeliveryStreams              -                 those that the caller may describe
    ListTagsForDeliveryStream        read or manage    describe
    PutRecord, PutRecordBatch        publish           append
    StartDeliveryStreamEncryption    manage            update: new segments are encrypted
    StopDeliveryStreamEncryption     manage            update
    TagDeliveryStream                manage            update
    UntagDeliveryStream              manage            update
    UpdateDestination                manage            update, if the version is the current one

Names, ranges and defaults are those of the API reference of Data Firehose, version 2015-08-04. Where it is
silent, these rules apply:

* A stream is ACTIVE as soon as it is created: its records are stored from then on, whatever the destination
  does. The status CREATING does not occur.
* A deleted stream is DELETING until its exports have passed all of its records: this API puts no more records
  to it, and acknowledged ones still arrive. With AllowForceDelete it is deleted at once, with its records,
  even if it is already DELETING.
* A stream that the configuration declares can be neither deleted nor given another destination here. Its
  topics would lose their stream, and messages on them would be acknowledged but not stored.
* Encryption is that of the gateway, with its own key, which stands for AWS_OWNED_CMK. A stream is ENABLING or
  DISABLING until its newest segment complies, at most for the time of a commit. Older segments stay as they
  are until they are exported and dropped.
* A record id is `<epoch>-<number>`. It is unique on a gateway, and identifies the stored message.
* A result means that the records are stored; with `flush_on_write`, on the disk. A record that cannot be
  stored fails alone: with InvalidArgumentException if it is larger than its stream allows, else with
  ServiceUnavailableException, and then it can be sent again.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from bridge.errors import (
    InvalidRequest,
    KeyUnavailable,
    LimitReached,
    MessageTooLarge,
    StreamError,
    StreamInUse,
    StreamNotFound,
    UpdateFailed,
)
from bridge.model import (
    KIB,
    MIB,
    Delivery,
    LabelName,
    LabelValue,
    MessageStreamDefinition,
    StrategyOnFull,
    segment_for,
)
from bridge.operations import destinations
from bridge.operations.bindings import STREAM_TOPICS
from bridge.operations.bounds import owner_of
from bridge.operations.catalog import Call, Operation, Request, checked
from bridge.operations.destinations import DESTINATION, S3Destination
from bridge.operations.manager import StreamManager, committed
from bridge.streams.stream import Stream

MAX_RECORDS, MAX_RECORD, MAX_BYTES = 500, 1000 * KIB, 4 * MIB
MAX_TAGS = 50
KINDS = (destinations.KIND, "firehose")
ARN = "arn:aws:firehose:local:000000000000:deliverystream/"  # a gateway has no region and no account

StreamName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.\-]+\Z")]
StreamType = Literal["DirectPut", "KinesisStreamAsSource", "MSKAsSource", "DatabaseAsSource"]


# -- requests ------------------------------------------------------------


class List(Request, rename="pascal", kw_only=True, frozen=True, forbid_unknown_fields=False):
    """ListDeliveryStreams: the names after one, at most `limit`."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    delivery_stream_type: StreamType | None = None
    exclusive_start_delivery_stream_name: StreamName | None = None


class OfStream(Request, rename="pascal", kw_only=True, frozen=True, forbid_unknown_fields=False):
    """A request that names a delivery stream."""

    delivery_stream_name: StreamName

    @property
    def stream(self) -> str:
        return self.delivery_stream_name


class Tag(Struct, rename="pascal", frozen=True):
    """A tag of a delivery stream."""

    key: LabelName
    value: LabelValue | None = None


class Encryption(Struct, rename="pascal", frozen=True):
    """The owner of the key with which AWS encrypts the records of a stream."""

    key_type: Literal["AWS_OWNED_CMK", "CUSTOMER_MANAGED_CMK"]


Other = dict[str, Any] | None  # a destination or a source that is refused by its name


class Create(OfStream, kw_only=True, frozen=True):
    """CreateDeliveryStream."""

    delivery_stream_type: StreamType | None = None
    encryption: Encryption | None = field(default=None, name="DeliveryStreamEncryptionConfigurationInput")
    s3: S3Destination | None = field(default=None, name="S3DestinationConfiguration")
    extended_s3: S3Destination | None = field(default=None, name="ExtendedS3DestinationConfiguration")
    tags: Annotated[list[Tag], Meta(max_length=MAX_TAGS)] | None = None
    redshift_destination_configuration: Other = None
    elasticsearch_destination_configuration: Other = None
    amazonopensearchservice_destination_configuration: Other = None
    amazon_open_search_serverless_destination_configuration: Other = None
    splunk_destination_configuration: Other = None
    http_endpoint_destination_configuration: Other = None
    snowflake_destination_configuration: Other = None
    iceberg_destination_configuration: Other = None
    kinesis_stream_source_configuration: Other = None
    database_source_configuration: Other = None
    msk_source: Other = field(default=None, name="MSKSourceConfiguration")


class Delete(OfStream, kw_only=True, frozen=True):
    """DeleteDeliveryStream."""

    allow_force_delete: bool | None = None


class Describe(OfStream, kw_only=True, frozen=True):
    """DescribeDeliveryStream. A stream has one destination, so the limit changes nothing."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    exclusive_start_destination_id: Annotated[str, Meta(min_length=1, max_length=100)] | None = None


class ListTags(OfStream, kw_only=True, frozen=True):
    """ListTagsForDeliveryStream: the tags after a key, at most `limit`."""

    limit: Annotated[int, Meta(ge=1, le=MAX_TAGS)] | None = None
    exclusive_start_tag_key: LabelName | None = None


class Record(Struct, rename="pascal", frozen=True, gc=False):
    """The bytes of a record."""

    data: Annotated[bytes, Meta(max_length=MAX_RECORD)]


class Put(OfStream, kw_only=True, frozen=True):
    """PutRecord."""

    record: Record


class PutBatch(OfStream, kw_only=True, frozen=True):
    """PutRecordBatch."""

    records: Annotated[list[Record], Meta(min_length=1, max_length=MAX_RECORDS)]


class StartEncryption(OfStream, kw_only=True, frozen=True):
    """StartDeliveryStreamEncryption."""

    encryption: Encryption | None = field(default=None, name="DeliveryStreamEncryptionConfigurationInput")


class TagStream(OfStream, kw_only=True, frozen=True):
    """TagDeliveryStream."""

    tags: Annotated[list[Tag], Meta(min_length=1, max_length=MAX_TAGS)]


class UntagStream(OfStream, kw_only=True, frozen=True):
    """UntagDeliveryStream."""

    tag_keys: Annotated[list[LabelName], Meta(min_length=1, max_length=MAX_TAGS)]


class UpdateDestination(OfStream, kw_only=True, frozen=True):
    """UpdateDestination."""

    current_delivery_stream_version_id: Annotated[str, Meta(min_length=1, max_length=50, pattern=r"^\d+\Z")]
    destination_id: Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[a-zA-Z0-9\-]+\Z")]
    s3: S3Destination | None = field(default=None, name="S3DestinationUpdate")
    extended_s3: S3Destination | None = field(default=None, name="ExtendedS3DestinationUpdate")
    redshift_destination_update: Other = None
    elasticsearch_destination_update: Other = None
    amazonopensearchservice_destination_update: Other = None
    amazon_open_search_serverless_destination_update: Other = None
    splunk_destination_update: Other = None
    http_endpoint_destination_update: Other = None
    snowflake_destination_update: Other = None
    iceberg_destination_update: Other = None


# -- results ------------------------------------------------------------


class Done(Struct):
    """The operation has no result."""


class Created(Struct):
    """The name of the stream, as AWS writes it."""

    arn: str = field(name="DeliveryStreamARN")


class Deleted(Done):
    """No result for the client. `at_once`: the stream is gone; otherwise it goes once it is exported."""

    at_once: bool = True


class Described(Struct, rename="pascal"):
    """A delivery stream, as the API describes it."""

    delivery_stream_description: dict[str, Any]


class Listed(Struct, rename="pascal"):
    """Names, sorted."""

    delivery_stream_names: list[str]
    has_more_delivery_streams: bool


class ListedTags(Struct, rename="pascal"):
    """Tags, sorted by key."""

    tags: list[Tag]
    has_more_tags: bool


class PutDone(Struct, rename="pascal"):
    """The id of the record."""

    record_id: str
    encrypted: bool = False


class PutEntry(Struct, rename="pascal", omit_defaults=True, gc=False):
    """The result of a record: its id, or why it is not stored."""

    record_id: str = ""
    error_code: str = ""
    error_message: str = ""


class PutBatchDone(Struct, rename="pascal"):
    """The results of the records, in their order."""

    failed_put_count: int
    request_responses: list[PutEntry]
    encrypted: bool = False


# -- delivery streams ------------------------------------------------------------


def export_to(definition: MessageStreamDefinition) -> tuple[str, dict[str, Any]] | None:
    """Return the kind and the export of a delivery stream; None if the stream is not one."""
    found = [(kind, raw) for kind in KINDS for raw in definition.export_definition.get(kind, ())]
    return found[0] if len(found) == 1 else None


def _found(manager: StreamManager, name: str) -> tuple[MessageStreamDefinition, str, dict[str, Any]]:
    """A delivery stream's definition, and its export with the kind.

    Raises StreamNotFound or StorageFailed.
    """
    manager.stream(name)
    definition = manager.definitions[name]
    export = export_to(definition)
    if export is None:
        raise StreamNotFound(
            f"the stream {name!r} is not a delivery stream: it needs exactly one export of the kinds "
            f"{' and '.join(KINDS)}"
        )
    return definition, *export


def _change(call: Call, definition: MessageStreamDefinition, **changes: Any) -> None:
    """Store a changed definition."""
    new = msgspec.structs.replace(definition, **changes)
    call.manager.update(checked(call, new, definition))


def _active(definition: MessageStreamDefinition) -> Delivery:
    """Return the `delivery` of a delivery stream that is not being deleted. Raises StreamInUse."""
    delivery = definition.delivery or Delivery()
    if delivery.deleting:
        raise StreamInUse(f"the delivery stream {definition.name!r} is being deleted")
    return delivery


def _destination(request: Create | UpdateDestination) -> S3Destination:
    """Return the S3 destination of a request. Raises InvalidRequest unless there is exactly one, in S3."""
    for member, name in zip(request.__struct_fields__, request.__struct_encode_fields__, strict=True):
        if member.endswith(("_destination_configuration", "_destination_update")) and getattr(
            request, member
        ):
            raise InvalidRequest(
                f"{name} is not supported here: a gateway delivers to S3. To deliver to what Firehose can, "
                "declare the stream in the configuration with an export of the kind firehose"
            )
    given = [one for one in (request.s3, request.extended_s3) if one is not None]
    if len(given) != 1:
        raise InvalidRequest("exactly one S3 or ExtendedS3 destination is needed")
    return given[0]


# -- operations ------------------------------------------------------------


def _create(call: Call, request: Create) -> Created:
    if request.delivery_stream_type not in (None, "DirectPut"):
        raise InvalidRequest(
            f"DeliveryStreamType {request.delivery_stream_type} is not supported here; use DirectPut"
        )
    if (
        request.kinesis_stream_source_configuration
        or request.msk_source
        or request.database_source_configuration
    ):
        raise InvalidRequest("a gateway has no other sources; use DeliveryStreamType DirectPut")
    if request.encryption is not None:
        _check_key(request.encryption)
    new = _destination(request)
    if new.bucket_arn is None or new.role_arn is None:
        raise InvalidRequest("the destination needs BucketARN and RoleARN")
    storage = call.operations.new_deliveries
    definition = MessageStreamDefinition(
        name=request.stream,
        strategy_on_full=StrategyOnFull.RejectNewData,
        max_size=storage.max_size,
        stream_segment_size=segment_for(storage.max_size),
        flush_on_write=storage.flush_on_write,
        retention="exported",
        export_definition={destinations.KIND: [destinations.export_of(new, None)]},
        delivery=destinations.delivery_of(new, Delivery(tags=_tags(request.tags or ()), created=_now())),
        encryption=request.encryption is not None,
    )
    call.manager.create(checked(call, definition, None), owner=owner_of(call.caller))
    return Created(ARN + request.stream)


def _delete(call: Call, request: Delete) -> Deleted:
    manager = call.manager
    definition, _, _ = _found(manager, request.stream)
    if request.stream in manager.declared:
        raise StreamInUse(
            f"the gateway's configuration declares the delivery stream {request.stream!r}; remove it there"
        )
    if request.allow_force_delete or manager.is_exported(manager.stream(request.stream)):
        manager.delete(request.stream)
        return Deleted(at_once=True)
    delivery = definition.delivery or Delivery()
    if not delivery.deleting:
        _change(call, definition, delivery=msgspec.structs.replace(delivery, deleting=True))
    return Deleted(at_once=False)


def _describe(call: Call, request: Describe) -> Described:
    definition, kind, export = _found(call.manager, request.stream)
    delivery = definition.delivery or Delivery()
    # The destination of a delivery stream in AWS is unknown here.
    only_id = {"DestinationId": DESTINATION}
    destination = destinations.described(export, delivery) if kind == destinations.KIND else only_id
    after = request.exclusive_start_destination_id
    created = delivery.created
    if created is None:  # the epoch is the time of creation, or later if the clock was not synchronised
        created = min(call.manager.stream(request.stream).epoch, _now())
    times = {"CreateTimestamp": created, "LastUpdateTimestamp": delivery.updated}
    return Described(
        {
            "DeliveryStreamName": request.stream,
            "DeliveryStreamARN": ARN + request.stream,
            "DeliveryStreamStatus": "DELETING" if delivery.deleting else "ACTIVE",
            "DeliveryStreamEncryptionConfiguration": {
                "Status": call.manager.stream(request.stream).encryption().state,
                **({"KeyType": "AWS_OWNED_CMK"} if definition.encryption else {}),
            },
            "DeliveryStreamType": "DirectPut",
            "VersionId": str(export.get("version", 1)),
            **{name: millis / 1000 for name, millis in times.items() if millis is not None},
            "Destinations": [destination] if after is None or after < DESTINATION else [],
            "HasMoreDestinations": False,
        }
    )


def _list(call: Call, request: List) -> Listed:
    caller, manager = call.caller, call.manager
    names = [
        name
        for name, definition in sorted(manager.definitions.items())
        if export_to(definition) is not None and (caller.may("read", name) or caller.may("manage", name))
    ]
    if request.delivery_stream_type not in (None, "DirectPut"):
        names = []
    rest = names[bisect_right(names, request.exclusive_start_delivery_stream_name or "") :]
    limit = request.limit or 10  # AWS's default
    return Listed(rest[:limit], len(rest) > limit)


def _list_tags(call: Call, request: ListTags) -> ListedTags:
    delivery = _found(call.manager, request.stream)[0].delivery or Delivery()
    keys = sorted(delivery.tags)
    rest = keys[bisect_right(keys, request.exclusive_start_tag_key or "") :]
    limit = request.limit or MAX_TAGS
    return ListedTags([Tag(key, delivery.tags[key]) for key in rest[:limit]], len(rest) > limit)


def _tags(given: Sequence[Tag]) -> dict[str, str]:
    tags = {tag.key: tag.value or "" for tag in given}
    if len(tags) < len(given):
        raise InvalidRequest("a tag's key is given twice")
    return tags


def _tag(call: Call, request: TagStream) -> Done:
    definition, _, _ = _found(call.manager, request.stream)
    delivery = _active(definition)
    tags = delivery.tags | _tags(request.tags)
    if len(tags) > MAX_TAGS:
        raise LimitReached(f"the delivery stream {request.stream!r} would have more than {MAX_TAGS} tags")
    _change(call, definition, delivery=msgspec.structs.replace(delivery, tags=tags))
    return Done()


def _untag(call: Call, request: UntagStream) -> Done:
    definition, _, _ = _found(call.manager, request.stream)
    delivery = _active(definition)
    tags = {key: value for key, value in delivery.tags.items() if key not in request.tag_keys}
    _change(call, definition, delivery=msgspec.structs.replace(delivery, tags=tags))
    return Done()


def _update(call: Call, request: UpdateDestination) -> Done:
    definition, kind, export = _found(call.manager, request.stream)
    delivery = _active(definition)
    if request.destination_id != DESTINATION:
        raise InvalidRequest(f"DestinationId {request.destination_id} is not {DESTINATION}, the only one")
    if request.current_delivery_stream_version_id != str(export.get("version", 1)):
        raise UpdateFailed(
            f"the delivery stream {request.stream!r} has the version {export.get('version', 1)}, not "
            f"{request.current_delivery_stream_version_id}; describe it again"
        )
    new = _destination(request)
    if kind != destinations.KIND or request.stream in call.manager.declared:
        raise InvalidRequest(
            f"the gateway's configuration declares the destination of {request.stream!r}; change it there"
        )
    exports = definition.export_definition | {kind: [destinations.export_of(new, export)]}
    delivery = destinations.delivery_of(new, delivery)
    delivery = msgspec.structs.replace(delivery, updated=_now())
    _change(call, definition, export_definition=exports, delivery=delivery)
    return Done()


def _check_key(encryption: Encryption) -> None:
    if encryption.key_type == "CUSTOMER_MANAGED_CMK":
        raise KeyUnavailable(
            "a gateway has no access to keys of AWS KMS; use AWS_OWNED_CMK, which stands for its own key"
        )


def _start_encryption(call: Call, request: StartEncryption) -> Done:
    if request.encryption is not None:
        _check_key(request.encryption)
    return _encrypt(call, request.stream, wanted=True)


def _stop_encryption(call: Call, request: OfStream) -> Done:
    return _encrypt(call, request.stream, wanted=False)


def _encrypt(call: Call, name: str, *, wanted: bool) -> Done:
    definition, _, _ = _found(call.manager, name)
    _active(definition)
    if definition.encryption is not wanted:
        if name in call.manager.declared:
            raise InvalidRequest(
                f"the gateway's configuration declares the stream {name!r}; set `encryption` there"
            )
        _change(call, definition, encryption=wanted)
    return Done()


async def _put(call: Call, request: Put) -> PutDone:
    stream, (result,) = await _append(call, request.stream, [request.record])
    if isinstance(result, StreamError):
        raise result
    return PutDone(f"{stream.epoch}-{result}", stream.settings.encryption)


async def _put_batch(call: Call, request: PutBatch) -> PutBatchDone:
    if sum([len(record.data) for record in request.records]) > MAX_BYTES:
        raise InvalidRequest(
            f"Records size exceeds 4 MB limit: {MAX_BYTES // MIB} MiB are possible; put fewer records in "
            "each request"
        )
    stream, results = await _append(call, request.stream, request.records)
    epoch = f"{stream.epoch}-"
    entries = [
        _failed(result) if isinstance(result, StreamError) else PutEntry(epoch + str(result))
        for result in results
    ]
    failed = [entry for entry in entries if entry.error_code]
    return PutBatchDone(len(failed), entries, stream.settings.encryption)


def _failed(error: StreamError) -> PutEntry:
    """The result of a record that is not stored. A client sends those again that are unavailable."""
    is_invalid = isinstance(error, MessageTooLarge)
    code = "InvalidArgumentException" if is_invalid else "ServiceUnavailableException"
    return PutEntry(error_code=code, error_message=str(error))


async def _append(
    call: Call, name: str, records: Sequence[Record]
) -> tuple[Stream, list[int] | list[int | StreamError]]:
    """Append each record on its own. Returns its number once it is stored, or why it is not."""
    definition, _, _ = _found(call.manager, name)
    if definition.delivery is not None and definition.delivery.deleting:
        raise StreamNotFound(f"the delivery stream {name!r} is being deleted and takes no more records")
    stream = call.manager.stream(name)
    topic = f"{STREAM_TOPICS}{name}".encode()
    results: list[int | StreamError] = []
    append = stream.append
    for record in records:
        try:
            results.append(append(topic, record.data))
        except StreamError as error:
            results.append(error)
    if any(type(result) is int for result in results):
        try:
            await committed(stream)
        except StreamError as error:
            results = [error if type(result) is int else result for result in results]
    return stream, results


def _now() -> int:
    return time.time_ns() // 1_000_000


def _deletion(done: Deleted) -> str:
    return "deleted" if done.at_once else "will be deleted once it is exported"


DELIVERIES: dict[str, Operation] = {
    "CreateDeliveryStream": Operation(Create, ("manage",), _create, lambda _: "created"),
    "DeleteDeliveryStream": Operation(Delete, ("manage",), _delete, _deletion),
    "DescribeDeliveryStream": Operation(Describe, ("read", "manage"), _describe),
    "ListDeliveryStreams": Operation(List, (), _list),
    "ListTagsForDeliveryStream": Operation(ListTags, ("read", "manage"), _list_tags),
    "PutRecord": Operation(Put, ("publish",), _put),
    "PutRecordBatch": Operation(PutBatch, ("publish",), _put_batch),
    "StartDeliveryStreamEncryption": Operation(
        StartEncryption, ("manage",), _start_encryption, lambda _: "encrypted from now on"
    ),
    "StopDeliveryStreamEncryption": Operation(
        OfStream, ("manage",), _stop_encryption, lambda _: "no longer encrypted"
    ),
    "TagDeliveryStream": Operation(TagStream, ("manage",), _tag, lambda _: "updated"),
    "UntagDeliveryStream": Operation(UntagStream, ("manage",), _untag, lambda _: "updated"),
    "UpdateDestination": Operation(UpdateDestination, ("manage",), _update, lambda _: "updated"),
}
