"""New objects by the notifications of S3 through SQS, as moto provides both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import pytest
from botocore.exceptions import ClientError

from bridge.ingest.errors import BadOption
from bridge.ingest.job import Summary, ingest
from bridge.ingest.listing import DAY
from bridge.ingest.notifications import Notifications
from bridge.ingest.report import survey
from bridge.ingest.store import StorageLocation
from bridge.objectkeys import report_key
from tests.ingest.gateway import START, Gateway, reported
from tests.ingest.test_listing import upload
from tests.ingest.test_verdict import InProcess

Sink = Callable[[], Any]


@pytest.fixture
def sqs(s3_endpoint: str) -> Any:
    return boto3.client("sqs", endpoint_url=s3_endpoint, region_name="us-east-1")


@pytest.fixture
def s3(s3_endpoint: str) -> Any:
    return boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1")


class Queue:
    """A queue, and the bucket whose notifications it gets while `connected`."""

    def __init__(self, sqs: Any, s3: Any, bucket: str) -> None:
        self._sqs, self._s3, self._bucket = sqs, s3, bucket
        self.url: str = sqs.create_queue(QueueName=f"news-{uuid4().hex[:12]}")["QueueUrl"]
        self.connected(True)

    def attribute(self, name: str) -> str:
        found = self._sqs.get_queue_attributes(QueueUrl=self.url, AttributeNames=[name])
        return str(found["Attributes"][name])

    def connected(self, yes: bool) -> None:
        target = {"QueueArn": self.attribute("QueueArn"), "Events": ["s3:ObjectCreated:*"]}
        self._s3.put_bucket_notification_configuration(
            Bucket=self._bucket, NotificationConfiguration={"QueueConfigurations": [target] if yes else []}
        )

    def send(self, body: str) -> None:
        self._sqs.send_message(QueueUrl=self.url, MessageBody=body)

    def left(self) -> int:
        """Return how many messages were not deleted."""
        names = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible")
        return sum(int(self.attribute(name)) for name in names)


@pytest.fixture
def queue(sqs: Any, s3: Any, bucket: StorageLocation) -> Queue:
    return Queue(sqs, s3, bucket.url.split("/")[2])


@pytest.fixture
def run(bucket: StorageLocation, iceberg: Sink, queue: Queue) -> Callable[[float], Summary]:
    """Run the job with the queue, so many seconds after the start."""

    def go(at: float) -> Summary:
        notifications = Notifications(queue.url, bucket)
        clock = lambda: int((START + at * 1000) * 1_000_000)  # noqa: E731 # a line of its own for the time
        return ingest(InProcess, bucket, iceberg(), clock=clock, notifications=notifications)

    return go


def test_new_objects_are_taken_from_the_queue_and_nothing_is_listed(
    bucket: StorageLocation, iceberg: Sink, queue: Queue, run: Callable[[float], Summary]
) -> None:
    reporting, silent = Gateway(bucket, "gw é+1"), Gateway(bucket, "gw-silent")
    upload(reporting, 0, 99)
    assert run(0).report.in_full
    assert queue.left() == 0
    upload(reporting, 100, 149)
    silent.export(0, 9)  # it has no report, so a listing would find this, and only that or the queue
    summary = run(1)
    assert (summary.rows, summary.listed, summary.report.in_full) == (60, 2, False)
    assert queue.left() == 0
    queue.connected(False)
    silent.export(10, 19)
    assert run(2).rows == 0
    assert run(DAY).rows == 10
    assert survey(bucket, iceberg())[1].total("rows") == 170


def test_a_lost_notification_is_found_by_the_report_of_the_gateway(
    bucket: StorageLocation, queue: Queue, run: Callable[[float], Summary]
) -> None:
    gateway = Gateway(bucket)
    upload(gateway, 0, 99)
    run(0)
    queue.connected(False)
    gateway.export(100, 149)
    queue.connected(True)
    gateway.report(reported(149), updated=START + 1)
    summary = run(1)
    assert (summary.rows, summary.report.complete) == (50, True)


def test_messages_of_what_is_not_settled_stay_in_the_queue(
    bucket: StorageLocation, iceberg: Sink, queue: Queue, run: Callable[[float], Summary], s3: Any
) -> None:
    gateway = Gateway(bucket)
    upload(gateway, 0, 99)
    run(0)
    gateway.report(reported(199, exported=99), updated=START + 1)  # with nothing new, nothing is committed
    assert run(1).report.total("waiting") == 100
    assert queue.left() == 1
    key = gateway.export(100, 149)
    _, _, name, prefix = bucket.url.split("/", 3)
    s3.put_object(
        Bucket=name, Key=f"{prefix}/{key}", Body=b"kept cold", StorageClass="GLACIER"
    )  # S3 refuses to return it
    with pytest.raises(ClientError, match="InvalidObjectState"):
        s3.get_object(Bucket=name, Key=f"{prefix}/{key}")
    gateway.export(0, 9, stream="other")
    summary = run(2)
    assert (summary.rows, summary.report.total("unreadable")) == (10, 50)
    assert queue.left() == 3  # the report, and the two uploads of the unreadable object


def test_a_report_counts_in_each_run_until_it_is_recorded(
    bucket: StorageLocation, iceberg: Sink, queue: Queue
) -> None:
    """The queue hides its message meanwhile."""
    notifications = Notifications(queue.url, bucket)

    def cycle(at: float) -> Summary:
        clock = lambda: int((START + at * 1000) * 1_000_000)  # noqa: E731 # a line of its own for the time
        return ingest(InProcess, bucket, iceberg(), clock=clock, notifications=notifications)

    gateway = Gateway(bucket)
    upload(gateway, 0, 99)
    assert cycle(0).report.complete
    gateway.report(reported(149), updated=START + 1000)  # but somebody has deleted the object
    for at in range(1, 4):
        assert cycle(at).report.total("missing") == 50
    gateway.export(0, 9, stream="other")
    assert (cycle(4).rows, cycle(5).report.total("missing")) == (10, 50)


def test_an_old_notification_that_comes_late_makes_no_report_older(
    bucket: StorageLocation, queue: Queue, run: Callable[[float], Summary]
) -> None:
    gateway = Gateway(bucket)
    upload(gateway, 0, 99)
    gateway.report(reported(99), reported(9, exported=-1, stream="other"), updated=START + 500)
    run(0)
    gateway.report(reported(109), updated=START + 1000)
    gateway.export(100, 109)
    assert run(1).report.total("missing") == 10
    _, _, name, prefix = bucket.url.split("/", 3)
    report = {"key": f"{prefix}/{report_key(gateway.name)}", "size": 1, "eTag": "old"}
    record = {"eventName": "ObjectCreated:Put", "eventTime": "2020-01-01T00:00:00.000Z"}
    queue.send(json.dumps({"Records": [record | {"s3": {"bucket": {"name": name}, "object": report}}]}))
    gateway.export(110, 119)
    assert (run(2).report.total("missing"), run(3).report.total("missing")) == (10, 10)


def test_strange_messages_are_a_note_and_stop_nothing(
    bucket: StorageLocation, queue: Queue, run: Callable[[float], Summary]
) -> None:
    upload(Gateway(bucket), 0, 9)
    nothing = '{"Records": [{"eventName": "ObjectCreated:Put", "s3": {}}]}'
    for body in ("?", "[]", '{"Records": 1}', nothing, "[" * 5000):
        queue.send(body)
    queue.send('{"Service": "Amazon S3", "Event": "s3:TestEvent"}')
    summary = run(0)
    assert (summary.rows, queue.left()) == (10, 0)
    (note,) = summary.report.problems
    assert note.startswith("5 messages of")


def test_a_queue_must_be_one_and_the_objects_in_s3(bucket: StorageLocation, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="give the URL of an SQS queue"):
        Notifications("exports", bucket)
    with pytest.raises(BadOption, match="for objects in S3"):
        Notifications("https://sqs.eu-central-1.amazonaws.com/1/q", StorageLocation(str(tmp_path)))
