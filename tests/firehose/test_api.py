"""The operations of the Firehose API, as boto3 and botocore's model of the service know them."""

from __future__ import annotations

import base64
import errno
import json
import time
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from bridge.access.rules import AccessRule
from bridge.encryption import new_master
from bridge.model import MIB, Limits
from bridge.mqtt.settings import MqttConfig
from bridge.operations.deliveries import DELIVERIES, MAX_RECORD
from bridge.plugin.allow import Allow
from tests.firehose.harness import KEY, OTHER, ROLE, S3, Gateway, call_on, records
from tests.firehose.model import SERVICE

NEWLINE = {
    "Enabled": True,
    "Processors": [
        {
            "Type": "AppendDelimiterToRecord",
            "Parameters": [{"ParameterName": "Delimiter", "ParameterValue": "\\n"}],
        }
    ],
}


def code(error: pytest.ExceptionInfo[ClientError]) -> str:
    return str(error.value.response["Error"]["Code"])


def described(gateway: Gateway, name: str = "plant") -> dict[str, Any]:
    found: dict[str, Any] = gateway.client().describe_delivery_stream(DeliveryStreamName=name)
    return found["DeliveryStreamDescription"]  # type: ignore[no-any-return]


def test_all_operations_of_the_model_are_declared_with_a_right_and_no_others() -> None:
    assert set(DELIVERIES) == set(SERVICE.operation_names)
    assert [name for name, operation in DELIVERIES.items() if not operation.rights] == ["ListDeliveryStreams"]
    for name, operation in DELIVERIES.items():
        shape = SERVICE.operation_model(name).input_shape
        members = set(shape.members)
        known = set(operation.request.__struct_encode_fields__) - {"requestId"}
        assert known <= members, name
        assert members - known <= {"DirectPutSourceConfiguration"}, name


def test_a_delivery_stream_is_created_described_and_deleted(gateway: Gateway) -> None:
    client, before = gateway.client(), time.time()
    made = client.create_delivery_stream(
        DeliveryStreamName="plant",
        DeliveryStreamType="DirectPut",
        ExtendedS3DestinationConfiguration=S3
        | {
            "Prefix": "raw/!{timestamp:yyyy}/",
            "ErrorOutputPrefix": "errors/",
            "BufferingHints": {"SizeInMBs": 64, "IntervalInSeconds": 60},
            "CompressionFormat": "GZIP",
            "ProcessingConfiguration": NEWLINE,
            "FileExtension": ".json.gz",
            "CustomTimeZone": "Europe/Berlin",
            "CloudWatchLoggingOptions": {"Enabled": True, "LogGroupName": "g", "LogStreamName": "s"},
            "S3BackupMode": "Disabled",
        },
    )
    found = described(gateway)
    assert made["DeliveryStreamARN"] == found["DeliveryStreamARN"]
    assert found["DeliveryStreamStatus"] == "ACTIVE"
    assert (found["DeliveryStreamType"], found["VersionId"]) == ("DirectPut", "1")
    assert before - 1 <= found["CreateTimestamp"].timestamp() <= time.time() + 1
    assert found["DeliveryStreamEncryptionConfiguration"] == {"Status": "DISABLED"}
    (destination,) = found["Destinations"]
    extended = destination["ExtendedS3DestinationDescription"]
    assert extended["RoleARN"] == ROLE
    assert extended["BucketARN"] == S3["BucketARN"]
    assert extended["Prefix"] == "raw/!{timestamp:yyyy}/"
    assert extended["ErrorOutputPrefix"] == "errors/"
    assert extended["BufferingHints"] == {"SizeInMBs": 64, "IntervalInSeconds": 60}
    assert extended["CompressionFormat"] == "GZIP"
    assert extended["ProcessingConfiguration"] == NEWLINE
    assert (extended["FileExtension"], extended["CustomTimeZone"]) == (".json.gz", "Europe/Berlin")
    assert extended["CloudWatchLoggingOptions"] == {"Enabled": False}, "a gateway writes no such log"
    assert destination["S3DestinationDescription"]["Prefix"] == "raw/!{timestamp:yyyy}/"
    client.delete_delivery_stream(DeliveryStreamName="plant")
    with pytest.raises(client.exceptions.ResourceNotFoundException):
        client.describe_delivery_stream(DeliveryStreamName="plant")


def test_the_older_s3_destination_and_the_defaults_of_aws(gateway: Gateway) -> None:
    gateway.client().create_delivery_stream(DeliveryStreamName="plant", S3DestinationConfiguration=S3)
    found = described(gateway)["Destinations"][0]["S3DestinationDescription"]
    assert found["BufferingHints"] == {"SizeInMBs": 5, "IntervalInSeconds": 300}
    assert found["CompressionFormat"] == "UNCOMPRESSED"
    assert found["EncryptionConfiguration"] == {"NoEncryptionConfig": "NoEncryption"}


def test_objects_can_be_encrypted_by_s3(gateway: Gateway) -> None:
    key = {"KMSEncryptionConfig": {"AWSKMSKeyARN": "arn:aws:kms:eu-central-1:123456789012:key/abc"}}
    gateway.create(EncryptionConfiguration=key)
    found = described(gateway)["Destinations"][0]["ExtendedS3DestinationDescription"]
    assert found["EncryptionConfiguration"] == key
    (export,) = gateway.manager.definitions["plant"].export_definition["s3Delivery"]
    assert export["kmsKeyId"] == key["KMSEncryptionConfig"]["AWSKMSKeyARN"]


OTHER_DESTINATIONS: dict[str, dict[str, Any]] = {
    "HttpEndpointDestinationConfiguration": {
        "EndpointConfiguration": {"Url": "https://x.example"},
        "S3Configuration": S3,
    },
    "ElasticsearchDestinationConfiguration": {"RoleARN": ROLE, "IndexName": "i", "S3Configuration": S3},
    "SplunkDestinationConfiguration": {
        "HECEndpoint": "https://x.example",
        "HECEndpointType": "Raw",
        "S3Configuration": S3,
    },
    "RedshiftDestinationConfiguration": {
        "RoleARN": ROLE,
        "ClusterJDBCURL": "jdbc:redshift://a.redshift.amazonaws.com:5439/x",
        "CopyCommand": {"DataTableName": "t"},
        "S3Configuration": S3,
    },
    "AmazonOpenSearchServerlessDestinationConfiguration": {
        "RoleARN": ROLE,
        "IndexName": "i",
        "S3Configuration": S3,
    },
}
LAMBDA = {"Enabled": True, "Processors": [{"Type": "Lambda", "Parameters": []}]}


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        *((({name: value}), name) for name, value in OTHER_DESTINATIONS.items()),
        ({"ExtendedS3DestinationConfiguration": S3 | {"CompressionFormat": "Snappy"}}, "Snappy"),
        ({"ExtendedS3DestinationConfiguration": S3 | {"CompressionFormat": "ZIP"}}, "ZIP"),
        ({"ExtendedS3DestinationConfiguration": S3 | {"ProcessingConfiguration": LAMBDA}}, "Lambda"),
        ({"ExtendedS3DestinationConfiguration": S3 | {"S3BackupMode": "Enabled"}}, "S3BackupMode"),
        (
            {
                "ExtendedS3DestinationConfiguration": S3
                | {"DynamicPartitioningConfiguration": {"Enabled": True}}
            },
            "DynamicPartitioning",
        ),
        (
            {"ExtendedS3DestinationConfiguration": S3 | {"DataFormatConversionConfiguration": {}}},
            "DataFormatConversion",
        ),
        ({"ExtendedS3DestinationConfiguration": S3 | {"Prefix": "!{partitionKeyFromQuery:a}/"}}, "prefix"),
        ({"ExtendedS3DestinationConfiguration": S3 | {"Prefix": "!{timestamp:YYYY}/"}}, "YYYY"),
        ({"ExtendedS3DestinationConfiguration": S3 | {"CustomTimeZone": "Mars/Olympus"}}, "Mars"),
        ({"ExtendedS3DestinationConfiguration": S3, "S3DestinationConfiguration": S3}, "exactly one"),
        ({}, "exactly one"),
        (
            {
                "DeliveryStreamType": "KinesisStreamAsSource",
                "KinesisStreamSourceConfiguration": {
                    "KinesisStreamARN": "arn:aws:kinesis:eu-central-1:123456789012:stream/s",
                    "RoleARN": ROLE,
                },
                "ExtendedS3DestinationConfiguration": S3,
            },
            "KinesisStreamAsSource",
        ),
    ],
)
def test_what_a_gateway_cannot_do_is_refused_with_the_reason(
    gateway: Gateway, request_: dict[str, Any], reason: str
) -> None:
    client = gateway.client()
    with pytest.raises(client.exceptions.InvalidArgumentException, match=reason):
        client.create_delivery_stream(DeliveryStreamName="plant", **request_)
    assert client.list_delivery_streams()["DeliveryStreamNames"] == []


def test_a_stream_is_created_once(gateway: Gateway) -> None:
    gateway.create()
    with pytest.raises(ClientError) as error:
        gateway.create()
    assert code(error) == "ResourceInUseException"


def test_a_bucket_that_the_configuration_does_not_allow_is_refused(tmp_path: Path) -> None:
    with Gateway(tmp_path, allow=Allow(buckets=["other-*"])) as gateway, pytest.raises(ClientError) as error:
        gateway.create()
    assert code(error) == "AccessDeniedException"


def encryption(gateway: Gateway, name: str = "plant") -> dict[str, str]:
    found = gateway.client().describe_delivery_stream(DeliveryStreamName=name)["DeliveryStreamDescription"]
    shown: dict[str, str] = found["DeliveryStreamEncryptionConfiguration"]
    return shown


def test_without_a_key_and_with_a_key_of_kms_a_stream_is_not_encrypted(gateway: Gateway) -> None:
    gateway.create()
    client = gateway.client()
    own = {"KeyType": "CUSTOMER_MANAGED_CMK", "KeyARN": "arn:aws:kms:eu-central-1:123456789012:key/a"}
    owned = {"KeyType": "AWS_OWNED_CMK"}
    for given in (own, owned):
        with pytest.raises(client.exceptions.InvalidKMSResourceException):
            client.start_delivery_stream_encryption(
                DeliveryStreamName="plant", DeliveryStreamEncryptionConfigurationInput=given
            )
        with pytest.raises(client.exceptions.InvalidKMSResourceException):
            client.create_delivery_stream(
                DeliveryStreamName="other",
                ExtendedS3DestinationConfiguration=S3,
                DeliveryStreamEncryptionConfigurationInput=given,
            )
    client.stop_delivery_stream_encryption(DeliveryStreamName="plant")  # it is not encrypted: nothing to do
    with pytest.raises(client.exceptions.ResourceNotFoundException):
        client.stop_delivery_stream_encryption(DeliveryStreamName="other")
    assert encryption(gateway) == {"Status": "DISABLED"}


def test_encryption_is_started_and_stopped_and_described_in_the_words_of_aws(tmp_path: Path) -> None:
    secret, gateway = b"a-secret-that-nobody-may-read", Gateway(tmp_path)
    gateway.key_file = tmp_path / "key"
    gateway.key_file.write_text(new_master())
    enabled = {"Status": "ENABLED", "KeyType": "AWS_OWNED_CMK"}
    with gateway:
        client = gateway.client()
        gateway.create()
        put = client.put_record(DeliveryStreamName="plant", Record={"Data": b"before"})
        assert put["Encrypted"] is False
        client.start_delivery_stream_encryption(DeliveryStreamName="plant")
        client.start_delivery_stream_encryption(DeliveryStreamName="plant")
        assert encryption(gateway) == enabled
        assert client.put_record(DeliveryStreamName="plant", Record={"Data": secret})["Encrypted"] is True
        many = client.put_record_batch(DeliveryStreamName="plant", Records=[{"Data": secret}])
        assert many["Encrypted"] is True
        client.create_delivery_stream(
            DeliveryStreamName="other",
            ExtendedS3DestinationConfiguration=S3,
            DeliveryStreamEncryptionConfigurationInput={"KeyType": "AWS_OWNED_CMK"},
        )
        assert encryption(gateway, "other") == enabled
        assert gateway.stored() == [b"before", secret, secret]
        files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
        assert not [path for path in files if secret in path.read_bytes()]
        client.stop_delivery_stream_encryption(DeliveryStreamName="plant")
        assert encryption(gateway) == {"Status": "DISABLED"}
        gateway.manager.declared = frozenset(["other"])
        with pytest.raises(client.exceptions.InvalidArgumentException, match="set `encryption` there"):
            client.stop_delivery_stream_encryption(DeliveryStreamName="other")


def test_streams_are_listed_in_pages(gateway: Gateway) -> None:
    client = gateway.client()
    names = [f"s-{n:02d}" for n in range(12)]
    for name in reversed(names):
        gateway.create(name)
    gateway.stream("no-delivery-stream")
    first = client.list_delivery_streams()
    assert first == first | {"DeliveryStreamNames": names[:10], "HasMoreDeliveryStreams": True}
    rest = client.list_delivery_streams(ExclusiveStartDeliveryStreamName=names[9], Limit=2)
    assert rest == rest | {"DeliveryStreamNames": names[10:], "HasMoreDeliveryStreams": False}
    assert (
        client.list_delivery_streams(DeliveryStreamType="KinesisStreamAsSource")["DeliveryStreamNames"] == []
    )
    assert described(gateway, names[0])["HasMoreDestinations"] is False
    after = client.describe_delivery_stream(
        DeliveryStreamName=names[0], ExclusiveStartDestinationId="destinationId-000000000001"
    )
    assert after["DeliveryStreamDescription"]["Destinations"] == []


def test_tags_are_added_replaced_listed_in_pages_and_removed(gateway: Gateway) -> None:
    client = gateway.client()
    gateway.create()
    client.tag_delivery_stream(
        DeliveryStreamName="plant", Tags=[{"Key": "b", "Value": "1"}, {"Key": "Größe : x"}, {"Key": "a"}]
    )
    client.tag_delivery_stream(DeliveryStreamName="plant", Tags=[{"Key": "b", "Value": "2"}])
    page = client.list_tags_for_delivery_stream(DeliveryStreamName="plant", Limit=2)
    assert page["HasMoreTags"] is True
    assert page["Tags"] == [{"Key": "Größe : x", "Value": ""}, {"Key": "a", "Value": ""}]
    rest = client.list_tags_for_delivery_stream(DeliveryStreamName="plant", ExclusiveStartTagKey="a")
    assert (rest["Tags"], rest["HasMoreTags"]) == ([{"Key": "b", "Value": "2"}], False)
    client.untag_delivery_stream(DeliveryStreamName="plant", TagKeys=["a", "unknown"])
    left = client.list_tags_for_delivery_stream(DeliveryStreamName="plant")["Tags"]
    assert [tag["Key"] for tag in left] == ["Größe : x", "b"]
    for n in range(0, 48, 24):
        tags = [{"Key": f"t{i}"} for i in range(n, n + 24)]
        client.tag_delivery_stream(DeliveryStreamName="plant", Tags=tags)
    with pytest.raises(client.exceptions.LimitExceededException):
        client.tag_delivery_stream(DeliveryStreamName="plant", Tags=[{"Key": "one-too-many"}])
    for bad in ("aws:reserved", "emoji \U0001f600"):
        with pytest.raises(ClientError) as error:
            client.tag_delivery_stream(DeliveryStreamName="plant", Tags=[{"Key": bad}])
        assert code(error) == "ValidationException"


def test_an_update_changes_what_it_names_and_is_guarded_by_version_and_destination(gateway: Gateway) -> None:
    client = gateway.client()
    gateway.create(Prefix="old/", CompressionFormat="GZIP", ProcessingConfiguration=NEWLINE)
    this = {"DeliveryStreamName": "plant", "DestinationId": "destinationId-000000000001"}
    change = {"BufferingHints": {"IntervalInSeconds": 60}, "BucketARN": "arn:aws:s3:::other"}
    client.update_destination(**this, CurrentDeliveryStreamVersionId="1", ExtendedS3DestinationUpdate=change)
    found = described(gateway)
    extended = found["Destinations"][0]["ExtendedS3DestinationDescription"]
    assert found["VersionId"] == "2"
    assert found["LastUpdateTimestamp"] >= found["CreateTimestamp"]
    assert extended["BucketARN"] == "arn:aws:s3:::other"
    assert extended["BufferingHints"] == {"SizeInMBs": 5, "IntervalInSeconds": 60}
    assert (extended["Prefix"], extended["CompressionFormat"]) == ("old/", "GZIP")
    assert extended["ProcessingConfiguration"] == NEWLINE
    assert extended["RoleARN"] == ROLE
    with pytest.raises(client.exceptions.ConcurrentModificationException):
        client.update_destination(**this, CurrentDeliveryStreamVersionId="1", S3DestinationUpdate=change)
    with pytest.raises(client.exceptions.InvalidArgumentException):
        client.update_destination(
            **this | {"DestinationId": "other"},
            CurrentDeliveryStreamVersionId="2",
            S3DestinationUpdate=change,
        )
    with pytest.raises(client.exceptions.InvalidArgumentException, match="Splunk"):
        client.update_destination(
            **this, CurrentDeliveryStreamVersionId="2", SplunkDestinationUpdate={"HECEndpoint": "https://x"}
        )
    assert described(gateway)["VersionId"] == "2"


# -- records ------------------------------------------------------------


def test_records_get_ids_of_epoch_and_number_and_are_stored_as_they_are(gateway: Gateway) -> None:
    gateway.create()
    client = gateway.client()
    one = client.put_record(DeliveryStreamName="plant", Record={"Data": b"first"})
    odd = [b"\0\xff", b"", b"last\n"]
    many = client.put_record_batch(DeliveryStreamName="plant", Records=records(*odd))
    epoch = gateway.manager.store.streams["plant"].epoch
    assert one["RecordId"] == f"{epoch}-0"
    assert (many["FailedPutCount"], many["Encrypted"]) == (0, False)
    assert [found["RecordId"] for found in many["RequestResponses"]] == [f"{epoch}-{n}" for n in (1, 2, 3)]
    assert gateway.stored() == [b"first", *odd]


def test_a_batch_at_the_limits_is_stored_and_one_beyond_is_refused_as_a_whole(gateway: Gateway) -> None:
    gateway.create()
    client = gateway.client(parameter_validation=False)

    def put(*data: bytes) -> str:
        try:
            client.put_record_batch(DeliveryStreamName="plant", Records=records(*data))
        except ClientError as error:
            return str(error.response["Error"]["Code"])
        return "stored"

    assert put(*[b"x"] * 500) == "stored"
    assert put(*[b"x"] * 501) == "ValidationException"
    assert put() == "ValidationException"
    quarter = bytes(MIB)
    assert put(quarter[:MAX_RECORD]) == "stored"
    assert put(quarter[: MAX_RECORD + 1]) == "ValidationException"
    full = [quarter[:MAX_RECORD]] * 4 + [bytes(4 * MIB - 4 * MAX_RECORD)]
    assert put(*full) == "stored"
    assert put(*full, b"x") == "InvalidArgumentException"
    assert len(gateway.stored()) == 500 + 1 + 5


def test_records_for_which_there_is_no_room_fail_alone_and_can_be_sent_again(tmp_path: Path) -> None:
    with Gateway(tmp_path, max_size=MIB) as gateway:
        gateway.create()
        client = gateway.client()
        data = [bytes([n]) * 60_000 for n in range(30)]
        answer = client.put_record_batch(DeliveryStreamName="plant", Records=records(*data))
        results = answer["RequestResponses"]
        failed = [n for n, result in enumerate(results) if "ErrorCode" in result]
        assert answer["FailedPutCount"] == len(failed) > 0
        assert {results[n]["ErrorCode"] for n in failed} == {"ServiceUnavailableException"}
        assert "max_size" in results[failed[0]]["ErrorMessage"]
        assert gateway.stored() == [one for n, one in enumerate(data) if n not in failed]
        with pytest.raises(client.exceptions.ServiceUnavailableException):
            client.put_record(DeliveryStreamName="plant", Record={"Data": data[0]})
        # What is exported makes room.
        gateway.exports.passed["plant"] = len(data)
        gateway.run(gateway.manager.refresh())
        again = client.put_record_batch(
            DeliveryStreamName="plant", Records=records(*[data[n] for n in failed])
        )
        assert again["FailedPutCount"] == 0


def test_a_record_that_its_stream_can_never_store_is_not_to_be_sent_again(gateway: Gateway) -> None:
    gateway.stream(
        "plant",
        limits=Limits(max_message_size=100),
        export_definition={"s3Delivery": [{"identifier": "s3", "bucket": "archive"}]},
    )
    client, data = gateway.client(), [b"before", bytes(200), b"after"]
    answer = client.put_record_batch(DeliveryStreamName="plant", Records=records(*data))
    assert answer["FailedPutCount"] == 1
    results = answer["RequestResponses"]
    assert [result.get("ErrorCode") for result in results] == [None, "InvalidArgumentException", None]
    assert "limits.max_message_size 100" in results[1]["ErrorMessage"]
    assert gateway.stored() == [b"before", b"after"]
    with pytest.raises(client.exceptions.InvalidArgumentException):
        client.put_record(DeliveryStreamName="plant", Record={"Data": data[1]})


def test_a_stream_that_is_no_delivery_stream_is_not_found(gateway: Gateway) -> None:
    gateway.stream("s")
    client = gateway.client()
    for name in ("s", "nothing"):
        with pytest.raises(client.exceptions.ResourceNotFoundException):
            client.put_record(DeliveryStreamName=name, Record={"Data": b"x"})
        with pytest.raises(client.exceptions.ResourceNotFoundException):
            client.delete_delivery_stream(DeliveryStreamName=name)
    assert gateway.newest("s") == -1


# -- the end of a stream ------------------------------------------------------------


def test_a_deleted_stream_delivers_what_it_has_and_then_goes(gateway: Gateway) -> None:
    gateway.create()
    client = gateway.client()
    client.put_record_batch(DeliveryStreamName="plant", Records=records(b"a", b"b"))
    client.delete_delivery_stream(DeliveryStreamName="plant")
    client.delete_delivery_stream(DeliveryStreamName="plant")
    assert described(gateway)["DeliveryStreamStatus"] == "DELETING"
    with pytest.raises(client.exceptions.ResourceNotFoundException, match="deleted"):
        client.put_record(DeliveryStreamName="plant", Record={"Data": b"c"})
    with pytest.raises(client.exceptions.ResourceInUseException):
        client.tag_delivery_stream(DeliveryStreamName="plant", Tags=[{"Key": "a"}])
    with pytest.raises(client.exceptions.ResourceInUseException):
        gateway.create()
    gateway.exports.passed["plant"] = 1
    gateway.run(gateway.manager.refresh())
    assert described(gateway)["DeliveryStreamStatus"] == "DELETING"
    gateway.exports.passed["plant"] = 2
    gateway.run(gateway.manager.refresh())
    with pytest.raises(client.exceptions.ResourceNotFoundException):
        client.describe_delivery_stream(DeliveryStreamName="plant")


def test_with_force_a_stream_goes_at_once(gateway: Gateway) -> None:
    gateway.create()
    client = gateway.client()
    client.put_record(DeliveryStreamName="plant", Record={"Data": b"a"})
    client.delete_delivery_stream(DeliveryStreamName="plant", AllowForceDelete=True)
    assert client.list_delivery_streams()["DeliveryStreamNames"] == []


def test_a_stream_that_is_being_deleted_can_still_be_deleted_at_once(gateway: Gateway) -> None:
    gateway.create()
    client = gateway.client()
    client.put_record(DeliveryStreamName="plant", Record={"Data": b"a"})
    client.delete_delivery_stream(DeliveryStreamName="plant")
    assert described(gateway)["DeliveryStreamStatus"] == "DELETING"
    client.delete_delivery_stream(DeliveryStreamName="plant", AllowForceDelete=True)
    assert client.list_delivery_streams()["DeliveryStreamNames"] == []


@pytest.mark.parametrize("force", [False, True])
def test_a_stream_of_the_configuration_is_not_deleted(gateway: Gateway, force: bool) -> None:
    export = {"firehose": [{"identifier": "aws", "deliveryStreamName": "plant"}]}
    gateway.stream("plant", export_definition=export)
    gateway.call(gateway.manager.declare, {"plant": gateway.manager.definitions["plant"]})
    client = gateway.client()
    with pytest.raises(client.exceptions.ResourceInUseException) as error:
        client.delete_delivery_stream(DeliveryStreamName="plant", AllowForceDelete=force)
    message = "the gateway's configuration declares the delivery stream 'plant'; remove it there"
    assert error.value.response["Error"]["Message"] == message
    assert described(gateway)["DeliveryStreamStatus"] == "ACTIVE"
    gateway.call(gateway.manager.declare, {})
    client.delete_delivery_stream(DeliveryStreamName="plant", AllowForceDelete=force)
    assert client.list_delivery_streams()["DeliveryStreamNames"] == []


def test_a_destination_of_the_configuration_is_not_changed(gateway: Gateway) -> None:
    gateway.create()
    gateway.call(gateway.manager.declare, {"plant": gateway.manager.definitions["plant"]})
    client = gateway.client()
    with pytest.raises(client.exceptions.InvalidArgumentException, match="configuration declares"):
        client.update_destination(
            DeliveryStreamName="plant",
            CurrentDeliveryStreamVersionId="1",
            DestinationId="destinationId-000000000001",
            S3DestinationUpdate={"Prefix": "new/"},
        )


def test_a_stream_that_the_api_did_not_create_has_a_time_of_creation(gateway: Gateway) -> None:
    before = time.time()
    gateway.stream("plant", export_definition={"s3Delivery": [{"identifier": "s3", "bucket": "archive"}]})
    created = described(gateway)["CreateTimestamp"].timestamp()
    assert int(before) <= created <= time.time()


# -- rights ------------------------------------------------------------

REQUESTS: dict[str, dict[str, Any]] = {
    "CreateDeliveryStream": {"ExtendedS3DestinationConfiguration": S3},
    "DeleteDeliveryStream": {},
    "DescribeDeliveryStream": {},
    "ListTagsForDeliveryStream": {},
    "PutRecord": {"Record": {"Data": "YQ=="}},
    "PutRecordBatch": {"Records": [{"Data": "YQ=="}]},
    "StartDeliveryStreamEncryption": {},
    "StopDeliveryStreamEncryption": {},
    "TagDeliveryStream": {"Tags": [{"Key": "a"}]},
    "UntagDeliveryStream": {"TagKeys": ["a"]},
    "UpdateDestination": {
        "CurrentDeliveryStreamVersionId": "1",
        "DestinationId": "destinationId-000000000001",
        "S3DestinationUpdate": S3,
    },
}


def test_without_a_right_nothing_can_be_done_or_learnt(tmp_path: Path) -> None:
    rules = [AccessRule(user="other", publish=["#"], read=["#"], manage=["#"])]
    with Gateway(tmp_path, access=MqttConfig(acl=rules)) as gateway:
        assert {*REQUESTS, "ListDeliveryStreams"} == set(DELIVERIES)

        def answers() -> dict[str, tuple[int, Any]]:
            return {
                name: gateway.call_raw(name, {"DeliveryStreamName": "secret", **more})
                for name, more in REQUESTS.items()
            }

        before = answers()
        gateway.client(*OTHER[:2]).create_delivery_stream(
            DeliveryStreamName="secret", S3DestinationConfiguration=S3
        )
        after = answers()
        assert before == after, "whether the stream exists cannot be seen"
        assert {answer[1]["__type"] for answer in after.values()} == {"AccessDeniedException"}
        assert gateway.client().list_delivery_streams()["DeliveryStreamNames"] == []
        assert gateway.stored("secret") == []


def test_a_user_has_the_rights_of_its_rules(tmp_path: Path) -> None:
    rules = [AccessRule(user="plant", publish=["streams/mine"], read=["streams/mine"])]
    rules += [AccessRule(user="other", publish=["#"], read=["#"], manage=["#"])]
    with Gateway(tmp_path, access=MqttConfig(acl=rules)) as gateway:
        manager, producer = gateway.client(*OTHER[:2]), gateway.client()
        for name in ("mine", "secret"):
            manager.create_delivery_stream(DeliveryStreamName=name, S3DestinationConfiguration=S3)
        producer.put_record(DeliveryStreamName="mine", Record={"Data": b"x"})
        assert producer.list_delivery_streams()["DeliveryStreamNames"] == ["mine"]
        assert described(gateway, "mine")["DeliveryStreamStatus"] == "ACTIVE"
        with pytest.raises(ClientError) as error:
            producer.delete_delivery_stream(DeliveryStreamName="mine")
        assert code(error) == "AccessDeniedException"
        assert KEY in str(error.value)
        assert "'plant'" in str(error.value)


def test_a_right_that_a_reload_takes_away_is_gone_even_if_the_file_of_keys_is_wrong(tmp_path: Path) -> None:
    rule = AccessRule(
        user="plant", publish=["streams/plant"], read=["streams/plant"], manage=["streams/plant"]
    )
    with Gateway(tmp_path, access=MqttConfig(acl=[rule])) as gateway:
        gateway.create()
        client = gateway.client()
        client.put_record(DeliveryStreamName="plant", Record={"Data": b"before"})
        gateway.call(gateway.rights.load, MqttConfig(acl=[AccessRule(user="plant", read=["streams/plant"])]))
        path = gateway.settings.access_keys_file
        assert path is not None
        path.chmod(0o644)
        gateway.call(gateway.front.reload)  # the keys of before hold, and no more rights than the new ones
        with pytest.raises(ClientError) as error:
            client.put_record(DeliveryStreamName="plant", Record={"Data": b"after"})
        assert code(error) == "AccessDeniedException"
        with pytest.raises(ClientError) as error:
            client.delete_delivery_stream(DeliveryStreamName="plant")
        assert code(error) == "AccessDeniedException"
        assert gateway.stored() == [b"before"]


# -- requests that are wrong ------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "body", "expected"),
    [
        ("PutRecord", b"", "SerializationException"),
        ("PutRecord", b"{", "SerializationException"),
        ("PutRecord", b"[]", "SerializationException"),
        ("PutRecord", b'"x"', "SerializationException"),
        ("PutRecord", b"\xff\xfe{}", "SerializationException"),
        ("PutRecord", b"{}", "ValidationException"),
        ("PutRecord", b'{"DeliveryStreamName": 1}', "SerializationException"),
        ("PutRecord", b'{"DeliveryStreamName": "a/b", "Record": {"Data": ""}}', "ValidationException"),
        ("PutRecord", b'{"DeliveryStreamName": "a", "Record": {"Data": "%%%%"}}', "SerializationException"),
        ("PutRecord", b'{"DeliveryStreamName": "a", "Record": {"Data": "YQ"}}', "SerializationException"),
        ("PutRecord", b'{"DeliveryStreamName": "a", "Record": {"Data": null}}', "SerializationException"),
        ("PutRecord", b'{"DeliveryStreamName": "a", "Record": {}}', "ValidationException"),
        ("PutRecordBatch", b'{"DeliveryStreamName": "a", "Records": {}}', "SerializationException"),
        ("PutRecordBatch", b'{"DeliveryStreamName": "a", "Records": []}', "ValidationException"),
        ("ListDeliveryStreams", b'{"Limit": 0}', "ValidationException"),
        ("ListDeliveryStreams", b'{"Limit": "1"}', "SerializationException"),
        ("DeleteDeliveryStream", b'{"DeliveryStreamName": "' + b"a" * 65 + b'"}', "ValidationException"),
        ("PutRecord", b"[" * 5000, "SerializationException"),
        ("Nonsense", b"{}", "UnknownOperationException"),
        ("PutRecord.x", b"{}", "UnknownOperationException"),
        ("", b"{}", "UnknownOperationException"),
    ],
)
def test_a_wrong_request_gets_the_error_of_aws(
    gateway: Gateway, operation: str, body: bytes, expected: str
) -> None:
    status, answer = gateway.call_raw(operation, body)
    assert (status, answer["__type"]) == (400, expected)


def test_members_that_are_unknown_are_ignored_as_aws_does(gateway: Gateway) -> None:
    gateway.create()
    body = {"DeliveryStreamName": "plant", "Record": {"Data": "YQ==", "New": 1}, "Newer": {}}
    assert gateway.call_raw("PutRecord", body)[0] == 200
    assert gateway.stored() == [b"a"]


def test_one_connection_serves_one_request_after_the_other(gateway: Gateway) -> None:
    gateway.create()
    connection = gateway.connection()
    connection.connect()
    used = connection.sock
    for n in range(20):
        data = base64.b64encode(b"%d" % n).decode()
        record = {"DeliveryStreamName": "plant", "Record": {"Data": data}}
        assert call_on(connection, "PutRecord", record)[0] == 200
        assert call_on(connection, "DescribeDeliveryStream", {"DeliveryStreamName": "gone"})[0] == 400
    assert connection.sock is used
    connection.close()
    assert len(gateway.stored()) == 20


def test_what_a_client_sends_as_json_in_another_way_is_the_same(gateway: Gateway) -> None:
    gateway.create()
    data = base64.b64encode(b"\xff\xff\xff" * 1000).decode()
    body = json.dumps({"DeliveryStreamName": "plant", "Record": {"Data": data}}, indent=4).replace("/", "\\/")
    assert gateway.call_raw("PutRecord", body.encode())[0] == 200
    assert gateway.stored() == [b"\xff\xff\xff" * 1000]


def test_of_a_request_whose_commit_fails_no_record_has_an_id_also_if_others_had_no_room(
    tmp_path: Path,
) -> None:
    with Gateway(tmp_path, max_size=MIB) as gateway:
        gateway.create()
        client = gateway.client()

        def fail(*_: object) -> None:
            raise OSError(errno.EIO, "injected")

        files = gateway.store.files
        files.write, write = fail, files.write  # type: ignore[method-assign]
        try:
            data = [bytes(60_000)] * 30
            answer = client.put_record_batch(DeliveryStreamName="plant", Records=records(*data))
        finally:
            files.write = write  # type: ignore[method-assign]
        assert answer["FailedPutCount"] == 30
        results = answer["RequestResponses"]
        assert not any("RecordId" in one for one in results)
        assert len({one["ErrorMessage"] for one in results}) == 2  # the disk, and no room
        assert gateway.stored() == []
