"""The bucket in memory answers as S3 does; moto is the measure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from botocore.exceptions import ClientError, ParamValidationError

from bridge import ACCEPTED, Context, Retry
from bridge.plugin import discovery
from bridge.plugin.api import convert_config
from bridge.plugin.testing import make_batch

from .bucket import MIN_PART, Bucket, Faults

TASKS = discovery.load().exporters["s3TaskExecutor"]


class Link(Context):
    """A context with this client."""

    def __init__(self, client: Any) -> None:
        super().__init__()
        self._client = client

    def client(self, *args: Any, **options: Any) -> Any:
        return self._client


def opened(faults: Faults | None = None) -> Bucket:
    return Bucket(Random(1), lambda: 1_795_000_000.0, faults)


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import boto3
    from moto import mock_aws

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="landing")
        yield client


def outcome(client: Any, operation: str, options: dict[str, Any]) -> Any:
    """What a request comes to, without what differs for no reason."""
    try:
        answer = getattr(client, operation)(**options)
    except ClientError as error:
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        return error.response["Error"]["Code"], status, error.operation_name
    kept = {name: answer[name] for name in ("ETag", "ContentLength", "Metadata") if name in answer}
    if "Body" in answer:
        kept["Body"] = answer["Body"].read()
    if "Parts" in answer:
        kept["Parts"] = [(part["PartNumber"], part["ETag"]) for part in answer["Parts"]]
    return kept


def request(random: Random, etags: list[str], uploads: list[str]) -> tuple[str, dict[str, Any]]:
    """Any request of those that the exporters make; an upload is meant by its index."""
    where: dict[str, Any] = {"Bucket": "landing", "Key": f"key/{random.randrange(3)}"}
    match random.randrange(6):
        case 0 | 1:
            body = random.choice([b"one", b"two"])
            more = random.choice(
                [
                    {},
                    {},
                    {"IfNoneMatch": "*"},
                    {"IfMatch": random.choice(etags)},
                    {"ChecksumAlgorithm": "CRC32"},
                ]
            )
            return "put_object", where | {"Body": body, "Metadata": {"rows-sha256": "ab"}, **more}
        case 2:
            return "head_object", where
        case 3:
            span = random.choice([{}, {"Range": "bytes=0-0"}, {"Range": "bytes=-2"}])
            return "get_object", where | span
        case 4:
            where["Key"] = "key/0"  # moto does not look whether the upload is that of the key
            part = {"UploadId": uploads[0], "PartNumber": random.randint(1, 2), "Body": b"part"}
            return "upload_part", where | part
        case _:
            return "list_parts", where | {"Key": "key/0", "UploadId": random.choice(uploads)}


def test_every_answer_and_error_is_that_of_s3(moto: Any) -> None:
    bucket = opened()
    ours, random = bucket.client(), Random(7)
    begun = {"Bucket": "landing", "Key": "key/0"}
    pairs = [(client, client.create_multipart_upload(**begun)["UploadId"]) for client in (ours, moto)]
    etags = ['"0123"', '"f97c5d29941bfb1b2fdab0874906ab82"']  # the second is that of "one"
    for _ in range(300):
        operation, options = request(random, etags, ["upload", "none"])
        results = []
        for client, upload in pairs:
            named = options | ({"UploadId": upload} if options.get("UploadId") == "upload" else {})
            results.append(outcome(client, operation, named))
        assert results[0] == results[1], (operation, options)
    for client, upload in pairs:
        client.abort_multipart_upload(**begun, UploadId=upload)
    for operation in ("list_parts", "abort_multipart_upload"):
        found = [outcome(client, operation, begun | {"UploadId": upload}) for client, upload in pairs]
        assert found[0] == found[1]


def test_a_file_in_parts_has_the_content_and_the_etag_of_s3(moto: Any, tmp_path: Path) -> None:
    file, bucket = tmp_path / "file", opened()
    file.write_bytes(Random(3).randbytes(MIN_PART + 1000))
    task = {"inputUrl": file.as_uri(), "bucket": "landing", "key": "uploaded"}
    for client in (bucket.client(), moto):
        exporter = TASKS(convert_config(TASKS, {"identifier": "up"}), Link(client))
        assert exporter.export(make_batch([json.dumps(task).encode()])) == ACCEPTED
    assert bucket.objects["uploaded"].body == file.read_bytes()
    there = moto.head_object(Bucket="landing", Key="uploaded")
    assert f'"{bucket.objects["uploaded"].etag}"' == there["ETag"]


def test_parameters_that_botocore_would_refuse_are_refused() -> None:
    client = opened().client()
    for wrong in ({"Key": 1}, {"Key": ""}, {"Key": "a", "Bodi": b""}, {"Key": "a", "Metadata": {"a": 1}}):
        with pytest.raises(ParamValidationError):
            client.put_object(Bucket="landing", **wrong)
    with pytest.raises(AttributeError):
        client.put_objects()


def test_a_request_that_arrives_late_overwrites_nothing_if_it_is_conditional() -> None:
    bucket = opened(Faults(late=1.0))
    client = bucket.client()
    for body, more in ((b"report", {}), (b"rows", {"IfNoneMatch": "*"})):
        with pytest.raises(Exception, match=r"Connection was closed|Read timeout"):
            client.put_object(Bucket="landing", Key=body.decode(), Body=body, **more)
    bucket.faults = Faults()
    for key in ("report", "rows"):
        client.put_object(Bucket="landing", Key=key, Body=b"newer")
    assert [bucket.late(), bucket.late(), bucket.late()] == [True, True, False]
    assert {key: stored.body for key, stored in bucket.objects.items()} == {
        "report": b"report",
        "rows": b"newer",
    }


@pytest.mark.parametrize("fault", ["lost", "throttled", "failed", "denied", "conflict", "unanswered"])
def test_the_exporter_takes_every_fault_for_one_to_be_retried(fault: str) -> None:
    exporters, bucket = discovery.load().exporters, opened(Faults())
    config = convert_config(exporters["s3"], {"identifier": "up", "bucket": "landing"})
    exporter, batch = exporters["s3"](config, Link(bucket.client())), make_batch([b"a", b"b"], 1)
    exporter.export(make_batch([b"first"]))  # before it, the exporter lists what is there
    bucket.faults = Faults(**{fault: 1.0})
    with pytest.raises(Retry):
        exporter.export(batch)
    assert len(bucket.objects) == 1 + (fault == "unanswered")
    bucket.faults = Faults()
    assert exporter.export(batch) == ACCEPTED
    assert len(bucket.log) == 2
