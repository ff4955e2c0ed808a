"""The S3 export task executor: order, parts that are resumed, keys, metadata, status messages."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.forwarder import Forwarder
from bridge import Context, Exporter, Retry
from bridge.plugin import discovery
from bridge.plugin.api import convert_config
from bridge.plugin.testing import deliver, make_batch
from bridge.plugin.uploads import TaskDefinition, resolve_key
from tests.export.harness import Bucket, Gateway, Impatient, running, until

CLS = discovery.load().exporters["s3TaskExecutor"]
MIB = 1024 * 1024


class Notes(Impatient):
    """A context that keeps the status messages."""

    def __init__(self, patience: float = 60) -> None:
        super().__init__(patience)
        self.messages: list[dict[str, Any]] = []
        self.clock = datetime(2026, 12, 31, 13, 5, 9, tzinfo=UTC).timestamp()

    def append(self, stream: str, payload: bytes) -> None:
        self.messages.append({"to": stream, **json.loads(payload)})

    def now(self) -> float:
        return self.clock


def make(bucket: Bucket, context: Context, level: int = 3, url: str = "") -> Exporter:
    status = {"statusLevel": level, "statusStreamName": "status"}
    config = {"identifier": "up", "endpointUrl": url or bucket.url, "statusConfig": status}
    return CLS(convert_config(CLS, config), context)


def task(bucket: Bucket, path: Path, key: str = "k", **more: Any) -> bytes:
    return json.dumps({"inputUrl": f"file:{path}", "bucket": bucket.name, "key": key, **more}).encode()


def statuses(context: Notes) -> list[int]:
    return [message["status"] for message in context.messages]


@pytest.mark.parametrize("there", [True, False], ids=["Success", "Failure"])
def test_awss_sample_ends_which_reads_the_oldest_status_until_it_is_final(
    tmp_path: Path, bucket: Bucket, there: bool
) -> None:
    path, context = tmp_path / "a.txt", Notes()
    if there:
        path.write_bytes(b"content")
    deliver(make(bucket, context, level=2), make_batch([task(bucket, path)]))
    ended = False
    for _ in range(3):  # `while not is_file_uploaded_to_s3` of samples/stream_manager_s3.py, without a cursor
        for message in context.messages[:1]:  # min_message_count=1, from the oldest on
            ended = ended or message["status"] in (0, 1, 4)  # Success, Failure, Canceled
    assert ended
    assert statuses(context) == [0 if there else 1]


def test_a_task_uploads_its_file_and_reports_its_status(tmp_path: Path, bucket: Bucket) -> None:
    path, context = tmp_path / "a b.txt", Notes()
    path.write_bytes(b"content")
    deliver(make(bucket, context), make_batch([task(bucket, path, userMetadata={"Plant": 7})], first=42))
    assert bucket.body("k") == b"content"
    found = bucket.client.head_object(Bucket=bucket.name, Key="k")
    assert found["Metadata"] == {"plant": "7"}
    begun, done = context.messages
    assert (begun["status"], done["status"]) == (2, 0)  # InProgress, Success
    assert done["to"] == "status"
    assert done["eventType"] == 0
    assert done["statusLevel"] == 2
    assert done["statusContext"]["sequenceNumber"] == 42
    assert done["statusContext"]["exportIdentifier"] == "up"
    assert done["statusContext"]["streamName"] == "stream"
    assert done["statusContext"]["s3ExportTaskDefinition"]["inputUrl"] == f"file:{path}"
    assert path.exists()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"inputUrl": "file:/no/such/file"}, "No such file"),
        ({"inputUrl": "http://example.org/f"}, "not a file of this machine"),
        ({"inputUrl": "relative"}, "absolute path"),
        ({"bucket": "no-such-bucket-anywhere"}, "NoSuchBucket"),
        ({"key": "!{timestamp:qq}"}, "not supported"),
        ({"key": "!{other:yyyy}"}, "only placeholder"),
        ({"userMetadata": {"$aws-gg-x": "1"}}, "reserved"),
        ({"userMetadata": {"operator": "Müller"}}, "'Müller' does not fit in an HTTP header"),
        ({"userMetadata": {"a": "two\nlines"}}, "in an HTTP header"),
        ({"userMetadata": {"a:b": "x"}}, "in an HTTP header"),
        ({"bucket": None}, "bucket"),
        ({"bucket": "My Bucket!"}, "Invalid bucket name"),
        ({"inputUrl": "file:/dev/null/below"}, "Not a directory"),
        ({"inputUrl": "file:/" + "a" * 300}, "File name too long"),
        ({"inputUrl": "file:{dir}/loop"}, "symbolic links"),
        ({"inputUrl": "file:{dir}"}, "not a regular file"),
        ({"inputUrl": "file:{dir}/fifo"}, "not a regular file"),
        ({"inputUrl": "file:/dev/zero"}, "not a regular file"),
        ({"inputUrl": "file:/proc/self/status"}, "does not have its size of 0 bytes"),
    ],
)
def test_a_task_that_can_never_succeed_fails_and_the_next_one_runs(
    tmp_path: Path, bucket: Bucket, change: dict[str, Any], word: str
) -> None:
    path, context = tmp_path / "f", Notes()
    path.write_bytes(b"x")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    bad = json.loads(task(bucket, path)) | change
    bad["inputUrl"] = bad["inputUrl"].replace("{dir}", str(tmp_path))
    exporter = make(bucket, context)
    rejected = deliver(exporter, make_batch([json.dumps(bad).encode()]))
    assert word in rejected[0]
    assert statuses(context)[-1] == 1
    assert context.messages[-1]["statusLevel"] == 0
    deliver(exporter, make_batch([task(bucket, path)], first=1))
    assert statuses(context)[-1] == 0


def test_a_large_file_goes_in_parts_whatever_the_threshold_since_one_part_is_held_in_memory(
    tmp_path: Path, bucket: Bucket
) -> None:
    path = tmp_path / "f"
    path.write_bytes(os.urandom(33 * MIB))
    config = {"identifier": "up", "endpointUrl": bucket.url}
    config["sizeThresholdForMultipartUploadBytes"] = 10 * 1024 * MIB  # type: ignore[assignment]
    deliver(CLS(convert_config(CLS, config), Notes()), make_batch([task(bucket, path)]))
    assert bucket.client.head_object(Bucket=bucket.name, Key="k")["ETag"].endswith('-7"')
    assert bucket.body("k") == path.read_bytes()


def test_a_file_rewritten_while_it_is_uploaded_arrives_as_it_is_at_the_end(
    tmp_path: Path, bucket: Bucket
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a" * (11 * MIB))

    class Rewriting(Notes):
        pieces = 0

        def working(self) -> None:
            self.pieces += 1
            if self.pieces == 100:  # of the 320 of the first part
                path.write_bytes(b"b" * (11 * MIB))

    context = Rewriting()
    exporter, batch = make(bucket, context), make_batch([task(bucket, path)])
    with pytest.raises(Retry, match="changed while it was uploaded"):
        exporter.export(batch)
    deliver(exporter, batch)
    assert bucket.body("k") == b"b" * (11 * MIB)
    assert not bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads")


def test_the_parts_of_a_task_that_fails_in_the_middle_are_removed(tmp_path: Path, bucket: Bucket) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(11 * MIB))

    class Vanishing(Notes):
        pieces = 0

        def working(self) -> None:
            self.pieces += 1
            if self.pieces == 100:  # of the 320 of the first part
                path.unlink()
                raise Retry("the link is down")

    context = Vanishing()
    exporter, batch = make(bucket, context), make_batch([task(bucket, path)])
    with pytest.raises(Retry):
        exporter.export(batch)
    assert bucket.client.list_multipart_uploads(Bucket=bucket.name)["Uploads"]
    assert "No such file" in deliver(exporter, batch)[0]
    assert statuses(context) == [2, 1]
    assert not bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads")


def test_files_in_one_part_count_against_the_bandwidth_ceiling(tmp_path: Path, bucket: Bucket) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(500_000))

    async def scenario() -> float:
        async with running(tmp_path, max_bandwidth=4_000_000) as gateway:  # 500 kB/s
            gateway.create("tasks", {"s3TaskExecutor": [{"identifier": "up", "endpointUrl": bucket.url}]})
            began = time.monotonic()
            await gateway.append("tasks", *(task(bucket, path, key=f"k{n}") for n in range(4)))
            await gateway.exported("tasks", 3)
            return time.monotonic() - began

    assert asyncio.run(scenario()) > 2.9  # a second for each but the last


def test_levels_are_thresholds(tmp_path: Path, bucket: Bucket) -> None:
    path, context = tmp_path / "f", Notes()
    path.write_bytes(b"x")
    exporter = make(bucket, context, level=0)
    deliver(exporter, make_batch([task(bucket, path)]))
    deliver(exporter, make_batch([task(bucket, tmp_path / "none")], first=1))
    assert statuses(context) == [1]


def test_an_interrupted_upload_resumes_after_its_last_part(tmp_path: Path, bucket: Bucket) -> None:
    path, context = tmp_path / "f", Notes()
    path.write_bytes(os.urandom(16 * MIB))
    forwarder = Forwarder(bucket.url)
    try:
        exporter = make(bucket, context, url=forwarder.url)
        real, sent = exporter._client.upload_part, []

        def counted(**options: Any) -> Any:
            sent.append(options["PartNumber"])
            if len(sent) == 3:
                with forwarder.shut():
                    return real(**options)
            return real(**options)

        exporter._client.upload_part = counted
        batch = make_batch([task(bucket, path, key="!{timestamp:HH/mm}/f")])
        with pytest.raises(Retry):
            exporter.export(batch)
        context.clock += 3600  # the key stays that of the first attempt
        again = make(bucket, context, url=forwarder.url)  # a new process, with the state that was kept
        again._client.upload_part = counted
        deliver(again, batch)
    finally:
        exporter._client.upload_part = real
        forwarder.close()
    assert sent == [1, 2, 3, 3, 4]
    assert bucket.body("13/05/f") == path.read_bytes()
    assert statuses(context) == [2, 0]


@pytest.mark.parametrize("kind", ["s3", "s3TaskExecutor"])
def test_a_slow_link_takes_long_but_gets_there(tmp_path: Path, bucket: Bucket, kind: str) -> None:
    content, forwarder, context = (
        os.urandom(24 * MIB),
        Forwarder(bucket.url, rate=12 * MIB),
        Notes(patience=1.0),
    )
    (tmp_path / "f").write_bytes(content)
    try:
        if kind == "s3":
            cls = discovery.load().exporters["s3"]
            exporter = cls(convert_config(cls, bucket.config(endpointUrl=forwarder.url)), context)
            deliver(exporter, make_batch([content]), attempts=5)
        else:
            config = {"identifier": "up", "endpointUrl": forwarder.url}
            config["sizeThresholdForMultipartUploadBytes"] = 100 * MIB  # type: ignore[assignment]
            exporter = CLS(convert_config(CLS, config), context)
            deliver(exporter, make_batch([task(bucket, tmp_path / "f")]), attempts=5)
    finally:
        forwarder.close()


def test_a_file_that_changed_between_attempts_is_uploaded_from_its_beginning(
    tmp_path: Path, bucket: Bucket
) -> None:
    path, context = tmp_path / "f", Notes()
    path.write_bytes(bytes(11 * MIB))
    exporter = make(bucket, context)
    exporter._client.complete_multipart_upload, real = _fail, exporter._client.complete_multipart_upload
    batch = make_batch([task(bucket, path)])
    try:
        with pytest.raises(Retry):
            exporter.export(batch)
    finally:
        exporter._client.complete_multipart_upload = real
    path.write_bytes(b"y" * (12 * MIB))
    deliver(make(bucket, context), batch)
    assert bucket.body("k") == path.read_bytes()
    assert not bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads")


def _fail(**options: Any) -> Any:
    raise ConnectionResetError("on demand")


def test_tasks_of_a_deleted_export_are_canceled(tmp_path: Path, bucket: Bucket) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x")

    def config(url: str) -> dict[str, Any]:
        status = {"statusLevel": 3, "statusStreamName": "status"}
        return {"s3TaskExecutor": [{"identifier": "up", "endpointUrl": url, "statusConfig": status}]}

    def seen(gateway: Gateway) -> list[tuple[int, int]]:
        messages = map(json.loads, gateway.read("status"))
        return [(m["statusContext"]["sequenceNumber"], m["status"]) for m in messages]

    async def scenario() -> None:
        forwarder = Forwarder(bucket.url)
        try:
            async with running(tmp_path) as gateway:
                gateway.create("status", {})
                gateway.create("tasks", config(forwarder.url))
                await gateway.append("tasks", task(bucket, path))
                await gateway.exported("tasks", 0)
                with forwarder.shut():
                    await gateway.append("tasks", task(bucket, path), task(bucket, path))
                    await until(lambda: gateway.status("tasks").error_message)
                    gateway.update("tasks", {})
                    await until(lambda: seen(gateway)[-1:] == [(2, 4)], describe=lambda: str(seen(gateway)))
                assert seen(gateway) == [(0, 2), (0, 0), (1, 2), (1, 4), (2, 4)]
        finally:
            forwarder.close()

    asyncio.run(scenario())


def test_tasks_of_a_deleted_stream_are_canceled(tmp_path: Path, bucket: Bucket) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x")

    async def scenario() -> list[dict[str, Any]]:
        forwarder = Forwarder(bucket.url)
        try:
            async with running(tmp_path) as gateway:
                status = {"statusLevel": 3, "statusStreamName": "status"}
                config = {"identifier": "up", "endpointUrl": forwarder.url, "statusConfig": status}

                def reported() -> list[dict[str, Any]]:
                    return [json.loads(message) for message in gateway.read("status")]

                gateway.create("status", {})
                gateway.create("tasks", {"s3TaskExecutor": [config]})
                await gateway.append("tasks", task(bucket, path))
                await gateway.exported("tasks", 0)
                with forwarder.shut():
                    await gateway.append("tasks", task(bucket, path), b"no task", task(bucket, path, key="z"))
                    await until(lambda: gateway.status("tasks").error_message)
                    gateway.manager.delete("tasks")
                    await until(lambda: len(reported()) >= 6, describe=lambda: str(reported()))
                return reported()
        finally:
            forwarder.close()

    reported = asyncio.run(scenario())
    seen = [(message["statusContext"]["sequenceNumber"], message["status"]) for message in reported]
    assert seen == [(0, 2), (0, 0), (1, 2), (1, 4), (2, 4), (3, 4)]
    canceled = [message["statusContext"].get("s3ExportTaskDefinition") for message in reported[3:]]
    assert [found and found["key"] for found in canceled] == ["k", None, "z"]
    assert {message["statusContext"]["streamName"] for message in reported} == {"tasks"}


@pytest.mark.parametrize(
    "change",
    [{"bucket": "b"}, {"key": "k" * 1025}, {"key": ""}, {"userMetadata": {"$aws-gg-x": "1"}}],
)
def test_the_status_of_an_invalid_task_has_its_definition(
    tmp_path: Path, bucket: Bucket, change: dict[str, Any]
) -> None:
    context = Notes()
    payload = json.dumps({**json.loads(task(bucket, tmp_path / "f")), **change}).encode()
    rejected = deliver(make(bucket, context), make_batch([payload]))
    assert rejected.keys() == {0}
    (message,) = context.messages
    assert message["status"] == 1
    found = message["statusContext"]["s3ExportTaskDefinition"]
    assert {"userMetadata": {}, **json.loads(payload)} == found


def test_an_upload_under_way_is_aborted_when_its_stream_is_deleted(tmp_path: Path, bucket: Bucket) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(11 * MIB))

    def uploads() -> list[Any]:
        return bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads", [])

    async def scenario() -> None:
        forwarder = Forwarder(bucket.url)
        try:
            async with running(tmp_path) as gateway:
                gateway.create(
                    "tasks", {"s3TaskExecutor": [{"identifier": "up", "endpointUrl": forwarder.url}]}
                )
                forwarder.close_at = 8 * MIB  # within the second part: the upload has begun
                await gateway.append("tasks", task(bucket, path))
                await until(lambda: gateway.status("tasks").error_message)
                assert uploads()
                forwarder.open = True  # the next attempt has to wait a little
                gateway.manager.delete("tasks")
                await until(lambda: not uploads())
                assert not bucket.names()
        finally:
            forwarder.close()

    asyncio.run(scenario())


def test_tasks_that_expire_before_they_are_done_are_canceled(tmp_path: Path, bucket: Bucket) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(bytes(11 * MIB))
    small.write_bytes(b"x")

    async def scenario() -> list[tuple[int, int, str]]:
        forwarder = Forwarder(bucket.url)
        try:
            async with running(tmp_path) as gateway:
                status = {"statusLevel": 3, "statusStreamName": "status"}
                config = {"identifier": "up", "endpointUrl": forwarder.url, "statusConfig": status}

                def reported() -> list[tuple[int, int, str]]:
                    messages = map(json.loads, gateway.read("status"))
                    return [
                        (m["statusContext"]["sequenceNumber"], m["status"], m["message"]) for m in messages
                    ]

                gateway.create("status", {})
                gateway.create("tasks", {"s3TaskExecutor": [config]}, timeToLiveMillis=60_000)
                forwarder.close_at = 8 * MIB  # within the second part: the upload has begun
                await gateway.append("tasks", task(bucket, large), task(bucket, small), task(bucket, small))
                await until(lambda: gateway.status("tasks").error_message)
                assert bucket.client.list_multipart_uploads(Bucket=bucket.name)["Uploads"]
                in_a_minute = gateway.store.clock.now() + 61_000
                gateway.store.streams["tasks"].maintain(in_a_minute)
                forwarder.open = True
                await gateway.manager.refresh()
                await until(lambda: len(reported()) >= 4, describe=lambda: str(reported()))
                await gateway.append("tasks", task(bucket, small))
                await gateway.exported("tasks", 3)
                return reported()
        finally:
            forwarder.close()

    reported = asyncio.run(scenario())
    assert [(number, status) for number, status, _ in reported] == [
        *((0, 2), (0, 4), (1, 4), (2, 4)),
        *((3, 2), (3, 0)),
    ]
    assert all("expired" in text for _, status, text in reported if status == 4)
    assert not bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads")
    assert bucket.body("k") == b"x"


def test_after_sigkill_a_task_is_finished_and_reported_at_least_once(tmp_path: Path, bucket: Bucket) -> None:
    path = tmp_path / "f"
    path.write_bytes(os.urandom(12 * MIB))
    status = {"statusLevel": 3, "statusStreamName": "status"}

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            config = {"identifier": "up", "endpointUrl": bucket.url, "statusConfig": status}
            gateway.create("status", {})
            gateway.create("tasks", {"s3TaskExecutor": [config]})
            await gateway.append("tasks", *(task(bucket, path, key=f"k{n}") for n in range(3)))
            for number in range(1, 4):
                await until(lambda n=number: len(gateway.read("status")) >= n)  # type: ignore[misc]
                if gateway.exports.pid:
                    os.kill(gateway.exports.pid, signal.SIGKILL)
                await until(lambda n=number: gateway.exports.restarts >= n)  # type: ignore[misc]
            await gateway.exported("tasks", 2)
            messages = [json.loads(message) for message in gateway.read("status")]
            done = {m["statusContext"]["sequenceNumber"] for m in messages if m["status"] == 0}
            assert done == {0, 1, 2}

    asyncio.run(scenario())
    assert all(bucket.body(f"k{n}") == path.read_bytes() for n in range(3))


def test_a_status_stream_that_is_missing_costs_no_task(tmp_path: Path, bucket: Bucket) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x")

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            status = {"statusLevel": 3, "statusStreamName": "nowhere"}
            config = {"identifier": "up", "endpointUrl": bucket.url, "statusConfig": status}
            gateway.create("tasks", {"s3TaskExecutor": [config]})
            await gateway.append("tasks", task(bucket, path))
            await gateway.exported("tasks", 0)

    asyncio.run(scenario())
    assert bucket.body("k") == b"x"


WHEN = datetime(2020, 12, 31, 13, 5, 9, 123456, tzinfo=UTC)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("yyyy/MM/dd", "2020/12/31"),
        ("YYYY", "2020"),  # Java would say 2021: the week-based year
        ("uu/D/DDD", "20/366/366"),
        ("HH/mm/ss/SSS", "13/05/09/123"),
        ("h/a/MMMM/EEE", "1/PM/December/Thu"),
        ("d/M/m", "31/12/5"),
    ],
)
def test_key_placeholders_follow_java(pattern: str, text: str) -> None:
    assert resolve_key(f"a/!{{timestamp:{pattern}}}/b", WHEN) == f"a/{text}/b"


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:/a/b", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("file://localhost/a%20b", "/a b"),
        ("/a%20b?c#d", "/a%20b?c#d"),
    ],
)
def test_input_urls_come_in_four_forms(url: str, path: str) -> None:
    assert TaskDefinition(input_url=url, bucket="bbb", key="k").path() == Path(path)
