"""Exporter `s3TaskExecutor`: uploads files of this machine that the messages of a stream name.

A message is one S3ExportTaskDefinition in JSON. Tasks run one at a time, in the order of the stream; they
never change or delete the file. Files over `sizeThresholdForMultipartUploadBytes`, or over 32 MiB, are
uploaded in parts, and an interrupted upload resumes after its last part, even after a crash. The first
attempt stores the key, the upload's id, and the size and time of the file durably, so that all attempts are
the same upload.

A task begins with the status InProgress, at the level DEBUG. It ends with one status message: Success;
Failure for a task that can never succeed (no such file, a FIFO or a device, no such bucket, an invalid
definition), and then the next task runs; Canceled if the export or its stream is deleted, or if the task is
dropped from the stream before it is done: expired, overwritten or purged. If an export or a stream is
deleted, at most the first 1,000 of its pending tasks are reported, and none if the export is disabled or the
export worker is not running. A multipart upload in progress is aborted, except that of a disabled export. A
status message contains the task's definition if it can be read, which is not the case for an invalid
S3ExportTaskDefinition or a dropped task. Errors of the network, throttling, missing rights and credentials
are retried, and the task stays InProgress. If the status stream is missing or full, the status message is
lost, but never the task.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import IntEnum
from typing import Annotated, Any, BinaryIO, ClassVar

import msgspec
from msgspec import Meta, Struct

from bridge import (
    ACCEPTED,
    AwsConfig,
    Batch,
    BatchLimits,
    Bytes,
    Context,
    ExportConfig,
    Exporter,
    Outcome,
    Record,
    Retry,
    Unproven,
    hookimpl,
)
from bridge.model import MIB, Name
from bridge.plugin.aws import Body, cause, error_code, failure, is_invalid
from bridge.plugin.uploads import TaskDefinition, resolve_key

MIN_PART = 5 * MIB
MAX_PARTS = 10_000
MAX_SINGLE = 32 * MIB  # a larger file is uploaded in parts; a part is held in memory
PERMANENT = frozenset(
    {"EntityTooLarge", "InvalidArgument", "InvalidBucketName", "KeyTooLongError", "MetadataTooLarge"}
    | {"NoSuchBucket"}
)
# There is no such file; a retry would not help.
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})


class StatusLevel(IntEnum):
    """The SDK's StatusLevel; a level includes those before it."""

    ERROR = 0
    WARN = 1
    INFO = 2
    DEBUG = 3
    TRACE = 4


class TaskStatus(IntEnum):
    """The SDK's TaskStatus."""

    Success = 0
    Failure = 1
    InProgress = 2
    Warning = 3
    Canceled = 4


# AWS's samples for Java and JavaScript, and its own test component (aws-greengrass-testing), ask for INFO and
# read the oldest status message until it is a final one. So at INFO the first message of a task is its last.
LEVELS = {
    TaskStatus.Success: StatusLevel.INFO,
    TaskStatus.Failure: StatusLevel.ERROR,
    TaskStatus.InProgress: StatusLevel.DEBUG,
    TaskStatus.Warning: StatusLevel.WARN,
    TaskStatus.Canceled: StatusLevel.WARN,
}


class StatusConfig(Struct, rename="camel", kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The SDK's StatusConfig."""

    status_level: StatusLevel = StatusLevel.INFO
    status_stream_name: Name | None = None


class S3TasksConfig(AwsConfig, kw_only=True, frozen=True):
    """The SDK's S3ExportTaskExecutorConfig, with endpoint and region."""

    size_threshold_for_multipart_upload_bytes: Annotated[Bytes, Meta(ge=MIN_PART)] = MIN_PART
    status_config: StatusConfig = StatusConfig()


class Upload(Struct, frozen=True):
    """The state of a task's upload, stored before its first attempt."""

    number: int
    bucket: str
    key: str
    size: int
    changed: int
    upload_id: str = ""


class TaskError(Exception):
    """The task can never succeed."""


class S3TaskExporter(Exporter):
    """Executes the tasks of one stream."""

    kind: ClassVar[str] = "s3TaskExecutor"
    Config: ClassVar[type[ExportConfig]] = S3TasksConfig
    limits: ClassVar[BatchLimits] = BatchLimits(records=1)

    config: S3TasksConfig

    def __init__(self, config: S3TasksConfig, context: Context) -> None:
        super().__init__(config, context)
        self._client = context.client("s3", config)
        self._upload = msgspec.msgpack.decode(context.state, type=Upload) if context.state else None

    @classmethod
    def probe(cls, config: S3TasksConfig, context: Context) -> str:
        raise Unproven("each task names its bucket, so that there is none to try")

    def export(self, batch: Batch) -> Outcome:
        (record,) = batch.records
        task: TaskDefinition | None = None
        try:
            try:
                task = msgspec.json.decode(record.payload, type=TaskDefinition)
            except msgspec.MsgspecError as error:
                raise TaskError(f"not an S3ExportTaskDefinition: {error}") from error
            try:
                task.check()
            except ValueError as error:
                raise TaskError(str(error)) from error
            self._run(record, task)
        except TaskError as error:
            upload = self._upload
            if upload and upload.upload_id and upload.number == record.sequence_number:
                self._abort(task, upload)
            self._report(TaskStatus.Failure, record.sequence_number, task, str(error))
            return Outcome(rejected={0: str(error)})
        self._upload = None
        self._report(TaskStatus.Success, record.sequence_number, task, "the file was uploaded")
        return ACCEPTED

    def dropped(self, first: int, last: int, reason: str) -> None:
        for number in range(first, last + 1):
            self.context.working()
            self._cancel(number, None, f"the task was dropped from the stream before it was done: {reason}")

    def cancelled(self, records: Sequence[Record]) -> None:
        for record in records:
            task: TaskDefinition | None = None
            try:
                task = msgspec.json.decode(record.payload, type=TaskDefinition)
            except msgspec.MsgspecError:
                self.context.log.debug("message %d is not a task", record.sequence_number)
            self._cancel(record.sequence_number, task, "the export or its stream was deleted")
        upload = self._upload  # its task may be among those that are not reported
        if upload and upload.upload_id and upload.number not in {r.sequence_number for r in records}:
            self._abort(None, upload)

    def _cancel(self, number: int, task: TaskDefinition | None, why: str) -> None:
        if self._upload and self._upload.upload_id and self._upload.number == number:
            self._abort(task, self._upload)
        self._report(TaskStatus.Canceled, number, task, why)

    def _run(self, record: Record, task: TaskDefinition) -> None:
        upload = self._upload if self._upload and self._upload.number == record.sequence_number else None
        if upload is None:
            self._report(TaskStatus.InProgress, record.sequence_number, task, "the upload begins")
        try:
            if not self.context.may_write_to(task.bucket):
                raise TaskError(f"bucket {task.bucket!r} is not in the buckets of [export.allow]")
            with self.context.open(task.path()) as file:
                size, changed = _identity(file)
                now = datetime.fromtimestamp(self.context.now(), UTC)
                key = upload.key if upload else resolve_key(task.key, now)
                if upload is None or (upload.size, upload.changed) != (size, changed):
                    if upload and upload.upload_id:  # the file has changed: start again
                        self._abort(task, upload)
                    upload = self._keep(Upload(record.sequence_number, task.bucket, key, size, changed))
                if upload.size > min(self.config.size_threshold_for_multipart_upload_bytes, MAX_SINGLE):
                    self._put_parts(task, upload, file)
                else:
                    self._put(task, upload, file)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in ABSENT:
                raise Retry(f"reading {task.input_url}: {error}") from error
            raise TaskError(str(error)) from error

    def _put(self, task: TaskDefinition, upload: Upload, file: BinaryIO) -> None:
        body = _read(file, upload, 0, upload.size, more=True)
        self._call("put_object", task, upload, Body=Body(body, self.context), Metadata=task.metadata())

    def _put_parts(self, task: TaskDefinition, upload: Upload, file: BinaryIO) -> None:
        done: dict[int, str] = {}
        if upload.upload_id:
            known = self._parts(task, upload)
            if known is None:  # a lifecycle rule may have deleted it
                upload = msgspec.structs.replace(upload, upload_id="")
            else:
                done = known
        if not upload.upload_id:
            answer = self._call("create_multipart_upload", task, upload, Metadata=task.metadata())
            upload = self._keep(msgspec.structs.replace(upload, upload_id=answer["UploadId"]))
        size = max(MIN_PART, -(-upload.size // MAX_PARTS))
        for number in range(1, -(-upload.size // size) + 1):
            if number not in done:
                start = (number - 1) * size
                body = _read(file, upload, start, min(size, upload.size - start))
                part = {"UploadId": upload.upload_id, "PartNumber": number, "Body": Body(body, self.context)}
                done[number] = self._call("upload_part", task, upload, **part)["ETag"]
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(done.items())]
        request = {"UploadId": upload.upload_id, "MultipartUpload": {"Parts": parts}}
        self._call("complete_multipart_upload", task, upload, **request)

    def _parts(self, task: TaskDefinition, upload: Upload) -> dict[int, str] | None:
        """Return the parts that S3 has; None if it no longer knows the upload."""
        found: dict[int, str] = {}
        marker = 0
        while True:
            try:
                answer = self._client.list_parts(
                    Bucket=task.bucket, Key=upload.key, UploadId=upload.upload_id, PartNumberMarker=marker
                )
            except Exception as error:
                if error_code(error) == "NoSuchUpload":
                    return None
                raise failure(error, f"resuming the upload of {upload.key}") from error
            found |= {part["PartNumber"]: part["ETag"] for part in answer.get("Parts", ())}
            if not answer.get("IsTruncated"):
                return found
            marker = answer["NextPartNumberMarker"]

    def _call(self, name: str, task: TaskDefinition, upload: Upload, **options: Any) -> Any:
        self.context.working()
        try:
            return getattr(self._client, name)(Bucket=task.bucket, Key=upload.key, **options)
        except Exception as error:
            if error_code(error) in PERMANENT or is_invalid(error):
                raise TaskError(cause(error)) from error
            if error_code(error) == "NoSuchUpload":  # deleted since it was listed: start again
                self._keep(msgspec.structs.replace(upload, upload_id=""))
            raise failure(error, f"uploading {task.input_url} to s3://{task.bucket}/{upload.key}") from error

    def _abort(self, task: TaskDefinition | None, upload: Upload) -> None:
        where = {"Bucket": upload.bucket, "Key": upload.key, "UploadId": upload.upload_id}
        try:
            self._client.abort_multipart_upload(**where)
        except Exception as error:
            if error_code(error) != "NoSuchUpload":
                text = f"parts of an earlier attempt remain in S3: {cause(error)}"
                self._report(TaskStatus.Warning, upload.number, task, text)

    def _keep(self, upload: Upload) -> Upload:
        self._upload = upload
        self.context.save_state(msgspec.msgpack.encode(upload))
        return upload

    def _report(self, status: TaskStatus, number: int, task: TaskDefinition | None, text: str) -> None:
        """Append a status message, if the configuration asks for it."""
        wanted, level = self.config.status_config, LEVELS[status]
        if wanted.status_stream_name is None or level > wanted.status_level:
            return
        context: dict[str, Any] = {
            "exportIdentifier": self.config.identifier,
            "streamName": self.context.stream,
            "sequenceNumber": number,
        }
        if task is not None:
            context["s3ExportTaskDefinition"] = task
        message = {
            "eventType": 0,
            "statusLevel": level,
            "status": status,
            "statusContext": context,
            "message": text,
            "timestampEpochMs": time.time_ns() // 1_000_000,
        }
        try:
            self.context.append(wanted.status_stream_name, msgspec.json.encode(message))
        except Retry as error:
            self.context.log.warning("status message %s lost: %s", status.name, error)


def _identity(file: BinaryIO) -> tuple[int, int]:
    """Return the size in bytes and the time of the last change in ns, which identify a file's version."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _read(file: BinaryIO, upload: Upload, start: int, size: int, *, more: bool = False) -> bytes:
    """Read `size` bytes; with `more`, also check that nothing follows them.

    Raises Retry if the file changes, and TaskError if its size can never match.
    """
    file.seek(start)
    body = file.read(size + more)
    if _identity(file) != (upload.size, upload.changed):  # all parts are of one version of the file
        raise Retry("the file changed while it was uploaded")
    if len(body) != size:  # for example a file in /proc
        raise TaskError(f"the content of the file does not have its size of {upload.size} bytes")
    return body


@hookimpl
def register_exporters(register: Callable[[type[Exporter]], None]) -> None:
    """Register the exporter of this file."""
    register(S3TaskExporter)
