"""The S3 destinations of the Firehose API, and the exports `s3Delivery` that they become.

`S3Destination` has the members that S3DestinationConfiguration, ExtendedS3DestinationConfiguration and their
updates have in common; one that is absent keeps its value, or gets AWS's default. Source: API reference of
Data Firehose, version 2015-08-04.

Features that a gateway lacks are refused with the reason, never accepted and ignored. The only exception is
logging to CloudWatch, which descriptions show as disabled.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from bridge.errors import InvalidRequest
from bridge.model import MIB, Delivery

KIND = "s3Delivery"
DESTINATION = "destinationId-000000000001"  # Firehose's id of a stream's only destination
SIZE, INTERVAL = 5, 300  # MiB and seconds: AWS's defaults
_NEWLINES = {
    r"\n": "\n",
    r"\r": "\r",
    r"\r\n": "\r\n",
    r"\t": "\t",
}  # as written in AWS's consoles and templates

RoleArn = Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^arn:.*:iam::\d{12}:role/.+\Z")]
BucketArn = Annotated[str, Meta(min_length=1, max_length=2048, pattern=r"^arn:.*:s3:::[\w.\-]{1,255}\Z")]
Prefix = Annotated[str, Meta(max_length=1024)]


class _Shape(Struct, rename="pascal", kw_only=True, frozen=True):
    """A structure of the API. Members that are unknown here are ignored, as AWS does."""


class BufferingHints(_Shape, frozen=True):
    """When an object is due."""

    size_in_mbs: Annotated[int, Meta(ge=1, le=128)] | None = field(default=None, name="SizeInMBs")
    interval_in_seconds: Annotated[int, Meta(ge=0, le=900)] | None = None


class KmsKey(_Shape, frozen=True):
    """The key with which S3 encrypts the objects."""

    arn: Annotated[str, Meta(min_length=1, max_length=512)] = field(name="AWSKMSKeyARN")


class ObjectEncryption(_Shape, frozen=True):
    """How S3 encrypts the objects."""

    no_encryption_config: Literal["NoEncryption"] | None = None
    kms: KmsKey | None = field(default=None, name="KMSEncryptionConfig")


class Parameter(_Shape, frozen=True):
    """A parameter of a processor."""

    parameter_name: str
    parameter_value: Annotated[str, Meta(min_length=1, max_length=5120)]


class Processor(_Shape, frozen=True):
    """A step that changes records before delivery."""

    type: str
    parameters: list[Parameter] | None = None


class Processing(_Shape, frozen=True):
    """The processors of a destination."""

    enabled: bool | None = None
    processors: list[Processor] | None = None


class Switch(_Shape, frozen=True):
    """A feature that can be enabled; only that flag is used."""

    enabled: bool | None = None


class S3Destination(_Shape, frozen=True):
    """An S3 or ExtendedS3 destination, or an update of one."""

    role_arn: RoleArn | None = field(default=None, name="RoleARN")
    bucket_arn: BucketArn | None = field(default=None, name="BucketARN")
    prefix: Prefix | None = None
    error_output_prefix: Prefix | None = None
    buffering_hints: BufferingHints | None = None
    compression_format: Literal["UNCOMPRESSED", "GZIP", "ZIP", "Snappy", "HADOOP_SNAPPY"] | None = None
    encryption_configuration: ObjectEncryption | None = None
    processing_configuration: Processing | None = None
    s3_backup_mode: Literal["Disabled", "Enabled"] | None = field(default=None, name="S3BackupMode")
    data_format_conversion_configuration: Switch | None = None
    dynamic_partitioning_configuration: Switch | None = None
    file_extension: str | None = None
    custom_time_zone: str | None = None


def export_of(new: S3Destination, old: dict[str, Any] | None) -> dict[str, Any]:
    """Return the export (camelCase) for a destination, or for the update of the export `old`.

    Raises InvalidRequest for features that a gateway lacks.
    """
    _refuse(new)
    export: dict[str, Any] = {"identifier": DESTINATION} if old is None else dict(old)
    export["version"] = 1 if old is None else old.get("version", 1) + 1
    hints = new.buffering_hints or BufferingHints()
    encryption = new.encryption_configuration
    given = {
        "bucket": None if new.bucket_arn is None else new.bucket_arn.rpartition(":")[2],
        "prefix": new.prefix,
        "sizeHintBytes": None if hints.size_in_mbs is None else hints.size_in_mbs * MIB,
        "timeHintMillis": None if hints.interval_in_seconds is None else hints.interval_in_seconds * 1000,
        "compression": _COMPRESSION.get(new.compression_format or ""),
        "fileExtension": new.file_extension,
        "timeZone": new.custom_time_zone or None,
        "delimiter": _delimiter(new.processing_configuration),
    }
    export |= {key: value for key, value in given.items() if value is not None}
    if encryption is not None:
        export["kmsKeyId"] = encryption.kms.arn if encryption.kms is not None else None
    return export


def delivery_of(new: S3Destination, old: Delivery) -> Delivery:
    """Return the values that are stored besides the export."""
    return msgspec.structs.replace(
        old,
        role_arn=old.role_arn if new.role_arn is None else new.role_arn,
        error_output_prefix=(
            old.error_output_prefix if new.error_output_prefix is None else new.error_output_prefix
        ),
    )


_COMPRESSION = {"UNCOMPRESSED": "none", "GZIP": "gzip"}


def _refuse(new: S3Destination) -> None:
    if new.compression_format is not None and new.compression_format not in _COMPRESSION:
        raise InvalidRequest(
            f"CompressionFormat {new.compression_format} is not supported here; use GZIP or UNCOMPRESSED"
        )
    if new.s3_backup_mode == "Enabled":
        raise InvalidRequest("S3BackupMode Enabled is not supported here: records are delivered as they are")
    for name, feature in (
        ("DataFormatConversionConfiguration", new.data_format_conversion_configuration),
        ("DynamicPartitioningConfiguration", new.dynamic_partitioning_configuration),
    ):
        if feature is not None and feature.enabled is not False:
            raise InvalidRequest(f"{name} is not supported here: records are delivered as they are")


def _delimiter(processing: Processing | None) -> str | None:
    """Return the delimiter of AppendDelimiterToRecord; None if processors are not mentioned."""
    if processing is None:
        return None
    delimiter = ""
    for processor in (processing.processors or ()) if processing.enabled else ():
        if processor.type != "AppendDelimiterToRecord":
            raise InvalidRequest(
                f"the processor {processor.type} is not supported here; only AppendDelimiterToRecord is"
            )
        values = {one.parameter_name: one.parameter_value for one in processor.parameters or ()}
        given = values.get("Delimiter", r"\n")
        delimiter = _NEWLINES.get(given, given)
    return delimiter


def described(export: dict[str, Any], delivery: Delivery) -> dict[str, Any]:
    """The DestinationDescription of an export. As in AWS, an ExtendedS3 destination is described twice."""
    prefix = {"Prefix": export["prefix"]} if export.get("prefix") else {}
    error = {"ErrorOutputPrefix": delivery.error_output_prefix} if delivery.error_output_prefix else {}
    key = export.get("kmsKeyId")
    plain = {
        "RoleARN": delivery.role_arn or "arn:aws:iam::000000000000:role/gateway",
        "BucketARN": f"arn:aws:s3:::{export['bucket']}",
        **prefix,
        **error,
        "BufferingHints": {
            "SizeInMBs": max(1, export.get("sizeHintBytes", SIZE * MIB) // MIB),
            "IntervalInSeconds": export.get("timeHintMillis", INTERVAL * 1000) // 1000,
        },
        "CompressionFormat": "GZIP" if export.get("compression") == "gzip" else "UNCOMPRESSED",
        "EncryptionConfiguration": (
            {"KMSEncryptionConfig": {"AWSKMSKeyARN": key}} if key else {"NoEncryptionConfig": "NoEncryption"}
        ),
        "CloudWatchLoggingOptions": {"Enabled": False},
    }
    delimiter = export.get("delimiter")
    given = next((name for name, text in _NEWLINES.items() if text == delimiter), delimiter)
    parameters = [{"ParameterName": "Delimiter", "ParameterValue": given}]
    processors = [{"Type": "AppendDelimiterToRecord", "Parameters": parameters}] if delimiter else []
    extended = {
        "ProcessingConfiguration": {"Enabled": bool(processors), "Processors": processors},
        "S3BackupMode": "Disabled",
        "DataFormatConversionConfiguration": {"Enabled": False},
        "FileExtension": export.get("fileExtension", ""),
        "CustomTimeZone": export.get("timeZone", "UTC"),
    }
    return {
        "DestinationId": DESTINATION,
        "S3DestinationDescription": plain,
        "ExtendedS3DestinationDescription": plain | extended,
    }
