"""Exporter `s3Delivery`: objects as a delivery stream of Data Firehose writes them to S3.

An object contains only the payloads of messages, each followed by `delimiter`. It is named as Firehose names
objects (see `bridge.plugin.prefixes`); `version` is part of the name. An object is due at `sizeHintBytes` of
payloads and topics or when its first message is `timeHintMillis` old, whichever comes first. With
`compression` "gzip" it is compressed.

The same batch always gets the same name, and an object is written only if no object has its name; see
`bridge.plugin.objects`. `messages-sha256` in its metadata is the digest of its content before compression;
`first`, `last` and `epoch` say which messages it has.

CreateDeliveryStream of the Firehose API defines such exports. For other readers of S3, and for the ingest
job, use the exporter `s3`: its objects have the time, topic and number of each message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

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
    hookimpl,
)
from bridge.deflate import gzip
from bridge.model import MIB
from bridge.plugin.objects import ObjectWriter, probe_bucket
from bridge.plugin.prefixes import MAX_KEY, ObjectName, parse, time_zone

DIGEST = "messages-sha256"  # the key in an object's metadata


class S3DeliveryConfig(AwsConfig, frozen=True):
    """The destination, when objects are due, and what they look like."""

    bucket: Bucket
    prefix: Annotated[str, Meta(max_length=MAX_KEY)] = ""
    size_hint_bytes: Annotated[Bytes, Meta(ge=1, le=128 * MIB)] = 5 * MIB
    time_hint_millis: Annotated[Millis, Meta(ge=0, le=900_000)] = 300_000
    compression: Literal["none", "gzip"] = "none"
    delimiter: Annotated[str, Meta(max_length=1024)] = ""
    file_extension: Annotated[str, Meta(max_length=128, pattern=r"^$|^\.[0-9a-z!\-_.*'()]+\Z")] = ""
    time_zone: str = "UTC"
    kms_key_id: str | None = None
    checksum_algorithm: Literal["CRC32", "SHA1", "SHA256", "none"] = "CRC32"
    conditional_put: bool = True
    version: Annotated[int, Meta(ge=1)] = 1


class S3DeliveryExporter(Exporter):
    """Exports one stream to one bucket."""

    kind: ClassVar[str] = "s3Delivery"
    Config: ClassVar[type[ExportConfig]] = S3DeliveryConfig
    limits: ClassVar[BatchLimits] = BatchLimits(contiguous=True)

    config: S3DeliveryConfig

    def __init__(self, config: S3DeliveryConfig, context: Context) -> None:
        super().__init__(config, context)
        plain = config.checksum_algorithm == "none"
        client = context.client(
            "s3", config, request_checksum_calculation="when_required" if plain else "when_supported"
        )
        options: dict[str, Any] = {} if plain else {"ChecksumAlgorithm": config.checksum_algorithm}
        if config.kms_key_id:
            options |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": config.kms_key_id}
        self._objects = ObjectWriter(
            client,
            config.bucket,
            context,
            digest_key=DIGEST,
            conditional=config.conditional_put,
            options=options,
        )
        packed = ".gz" if config.compression == "gzip" else ""
        self._name = ObjectName(
            config.prefix,
            stream=context.stream,
            version=config.version,
            extension=config.file_extension or packed,
            zone=config.time_zone,
        )

    @classmethod
    def check(cls, config: S3DeliveryConfig) -> None:
        parse(config.prefix)
        time_zone(config.time_zone)

    @classmethod
    def probe(cls, config: S3DeliveryConfig, context: Context) -> str:
        return probe_bucket(context.client("s3", config), config.bucket, config.prefix.partition("!{")[0])

    @classmethod
    def batching(cls, config: S3DeliveryConfig) -> Batching:
        return Batching(size=config.size_hint_bytes, millis=config.time_hint_millis)

    def export(self, batch: Batch) -> Outcome:
        content = self._content(batch)
        body = gzip(content) if self.config.compression == "gzip" else content
        digest = hashlib.sha256(content).hexdigest()
        numbers = {"epoch": str(batch.epoch), "first": str(batch.first), "last": str(batch.last)}
        self._objects.put_once(self._key(batch), body, "application/octet-stream", digest, numbers)
        return ACCEPTED

    def landed(self, batch: Batch) -> bool | None:
        return self._objects.landed(self._key(batch), hashlib.sha256(self._content(batch)).hexdigest())

    def _content(self, batch: Batch) -> bytes:
        delimiter = self.config.delimiter.encode()
        return b"".join([record.payload + delimiter for record in batch.records])

    def _key(self, batch: Batch) -> str:
        identity = f"{batch.gateway}/{batch.stream}/{batch.epoch}/{batch.first}-{batch.last}"
        return self._name.name(batch.records[0].ingest_time, identity)


@hookimpl
def register_exporters(register: Callable[[type[Exporter]], None]) -> None:
    """Register the exporter of this file."""
    register(S3DeliveryExporter)
