"""Delivery streams of a real gateway: what was acknowledged arrives, and what was defined stays."""

from __future__ import annotations

import gzip
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from benchmarks.testbed.aws import FakeAws
from benchmarks.testbed.forwarder import Forwarder
from benchmarks.testbed.local import free_port
from tests.export.harness import Bucket
from tests.export.process import DEADLINE, Running
from tests.firehose.harness import KEY, ROLE, SECRET, client, keys_file, records
from tests.http.conftest import eventually

HINTS = {"SizeInMBs": 1, "IntervalInSeconds": 1}


def config(port: int, aws: str, more: str = "") -> str:
    return f"""
[gateway]
id = "gw-1"
data_dir = "data"
memory_dir = "memory"
[mqtt]
listen = ["tcp://127.0.0.1:0"]
[greengrass]
listen = ""
[http]
listen = ""
[firehose]
listen = "127.0.0.1:{port}"
access_keys_file = "../keys"
[aws]
region = "eu-central-1"
endpoint_url = "{aws}"
{more}
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Running]]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    keys_file(tmp_path)
    started: list[Running] = []

    def start_it(aws: str, more: str = "") -> Running:
        port = free_port()
        started.append(Running(tmp_path / "gateway", config(port, aws, more), port))
        started[-1].start()
        return started[-1]

    yield start_it
    for one in started:
        one.kill()


def url(service: Running) -> str:
    return f"http://127.0.0.1:{service.port}"


def create(service: Running, bucket: Bucket, **more: Any) -> Any:
    made = client(url(service))
    destination = {
        "RoleARN": ROLE,
        "BucketARN": f"arn:aws:s3:::{bucket.name}",
        "BufferingHints": HINTS,
        **more,
    }
    made.create_delivery_stream(DeliveryStreamName="plant", ExtendedS3DestinationConfiguration=destination)
    return made


def lines(bucket: Bucket) -> list[bytes]:
    """What arrived, in the order of the names."""
    found = []
    for key in sorted(bucket.names()):
        body = bucket.body(key)
        found += (gzip.decompress(body) if key.endswith(".gz") else body).splitlines()
    return found


class Producer(threading.Thread):
    """Puts batches of numbered records until it is stopped, and sends again what was not acknowledged."""

    def __init__(self, service: Running) -> None:
        super().__init__()
        self.acknowledged: dict[str, bytes] = {}  # by record id
        self._client = client(url(service))
        self._ended = threading.Event()
        self._number = 0

    def run(self) -> None:
        pending: list[bytes] = []
        while not self._ended.is_set():
            while len(pending) < 50:
                pending.append(b"%08d" % self._number)
                self._number += 1
            try:
                data = [one + b"\n" for one in pending]
                answer = self._client.put_record_batch(DeliveryStreamName="plant", Records=records(*data))
            except (BotoCoreError, ClientError):
                self._ended.wait(0.05)
                continue
            failed = []
            for one, result in zip(pending, answer["RequestResponses"], strict=True):
                if "RecordId" in result:
                    assert result["RecordId"] not in self.acknowledged
                    self.acknowledged[result["RecordId"]] = one
                else:
                    failed.append(one)
            pending = failed

    def reach(self, number: int) -> None:
        deadline = time.monotonic() + DEADLINE
        while len(self.acknowledged) < number:
            assert self.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        self._ended.set()
        self.join()


@pytest.mark.slow(seconds=40)
def test_every_acknowledged_record_arrives_after_a_long_outage_and_a_kill(
    start: Callable[..., Running], bucket: Bucket
) -> None:
    link = Forwarder(bucket.url)
    try:
        service = start(link.url)
        create(service, bucket, CompressionFormat="GZIP")
        producer = Producer(service)
        producer.start()
        try:
            producer.reach(200)
            with link.shut():
                for _ in range(3):
                    producer.reach(len(producer.acknowledged) + 1000)
                    service.kill()
                    service.start()
                producer.reach(len(producer.acknowledged) + 1000)
            producer.reach(len(producer.acknowledged) + 200)
        finally:
            producer.stop()
        wanted = set(producer.acknowledged.values())
        deadline = time.monotonic() + DEADLINE
        while missing := wanted - set(lines(bucket)):
            assert time.monotonic() < deadline, f"{len(missing)} of {len(wanted)} did not arrive"
            time.sleep(0.2)
        assert service.stop() == 0
    finally:
        link.close()
    arrived = lines(bucket)
    assert all(len(line) == 8 and line.isdigit() for line in arrived), "nothing was torn"
    assert len({gzip.decompress(bucket.body(key)) for key in bucket.names()}) == len(bucket.names())
    numbers = sorted(tuple(map(int, one.split("-"))) for one in producer.acknowledged)
    assert len({epoch for epoch, _ in numbers}) == 1
    assert len(numbers) == len(set(numbers))


@pytest.mark.slow(seconds=10)
def test_what_a_client_has_defined_survives_a_kill_and_a_deletion_continues(
    start: Callable[..., Running], bucket: Bucket
) -> None:
    link = Forwarder(bucket.url)
    try:
        with link.shut():
            service = start(link.url)
            one = create(service, bucket, Prefix="raw/", ErrorOutputPrefix="errors/")
            one.tag_delivery_stream(DeliveryStreamName="plant", Tags=[{"Key": "site", "Value": "north"}])
            one.update_destination(
                DeliveryStreamName="plant",
                CurrentDeliveryStreamVersionId="1",
                DestinationId="destinationId-000000000001",
                ExtendedS3DestinationUpdate={"FileExtension": ".txt"},
            )
            one.put_record(DeliveryStreamName="plant", Record={"Data": b"kept\n"})
            before = one.describe_delivery_stream(DeliveryStreamName="plant")["DeliveryStreamDescription"]
            service.kill()
            service.start()
            after = one.describe_delivery_stream(DeliveryStreamName="plant")["DeliveryStreamDescription"]
            assert before == after
            assert after["VersionId"] == "2"
            assert one.list_tags_for_delivery_stream(DeliveryStreamName="plant")["Tags"] == [
                {"Key": "site", "Value": "north"}
            ]
            one.delete_delivery_stream(DeliveryStreamName="plant")
            service.kill()
            service.start()
            found = one.describe_delivery_stream(DeliveryStreamName="plant")["DeliveryStreamDescription"]
            assert found["DeliveryStreamStatus"] == "DELETING"
        eventually(lambda: not one.list_delivery_streams()["DeliveryStreamNames"], DEADLINE, 0.1)
    finally:
        link.close()
    assert lines(bucket) == [b"kept"]
    (name,) = bucket.names()
    assert name.startswith("raw/")
    assert name.endswith(".txt")


def test_a_declared_stream_is_a_gateway_in_front_of_the_delivery_stream_in_aws(
    start: Callable[..., Running],
) -> None:
    aws = FakeAws()
    try:
        service = start(
            aws.url,
            "[[streams.plant.export.firehose]]\n"
            'identifier = "aws"\ndelivery_stream_name = "plant"\ndelimiter = ""',
        )
        one = client(url(service))
        assert one.list_delivery_streams()["DeliveryStreamNames"] == ["plant"]
        found = one.describe_delivery_stream(DeliveryStreamName="plant")["DeliveryStreamDescription"]
        assert found["Destinations"] == [{"DestinationId": "destinationId-000000000001"}]
        one.tag_delivery_stream(DeliveryStreamName="plant", Tags=[{"Key": "site"}])
        with pytest.raises(one.exceptions.InvalidArgumentException, match="configuration"):
            one.update_destination(
                DeliveryStreamName="plant",
                CurrentDeliveryStreamVersionId="1",
                DestinationId="destinationId-000000000001",
                S3DestinationUpdate={"Prefix": "x/"},
            )
        one.put_record_batch(DeliveryStreamName="plant", Records=records(b"a", b"b"))
        service.kill()
        service.start()
        assert one.list_tags_for_delivery_stream(DeliveryStreamName="plant")["Tags"], "the start has kept it"
        eventually(lambda: {record["Data"] for record in aws.taken} == {b"a", b"b"}, DEADLINE)
        with pytest.raises(ClientError, match="UnrecognizedClientException"):
            client(url(service), KEY + "X", SECRET).list_delivery_streams()
    finally:
        aws.close()


@pytest.mark.slow(seconds=10)
def test_a_stream_of_the_configuration_stays_until_a_reload_removes_it(
    start: Callable[..., Running], bucket: Bucket
) -> None:
    link = Forwarder(bucket.url)
    try:
        with link.shut():
            service = start(link.url)
            one = create(service, bucket)
            one.put_record(DeliveryStreamName="plant", Record={"Data": b"kept\n"})
            one.delete_delivery_stream(DeliveryStreamName="plant")
            undeclared = service.config.read_text()
            service.config.write_text(
                f'{undeclared}\n[streams.plant]\ntopics = ["plant/#"]\n'
                '[[streams.plant.export.firehose]]\nidentifier = "aws"\ndelivery_stream_name = "plant"\n'
            )
            service.kill()
            service.start()
            found = one.describe_delivery_stream(DeliveryStreamName="plant")["DeliveryStreamDescription"]
            assert found["DeliveryStreamStatus"] == "ACTIVE"
            for force in (False, True):
                with pytest.raises(one.exceptions.ResourceInUseException, match="configuration declares"):
                    one.delete_delivery_stream(DeliveryStreamName="plant", AllowForceDelete=force)
            one.put_record(DeliveryStreamName="plant", Record={"Data": b"kept, too\n"})
            service.config.write_text(undeclared)
            assert service.process is not None
            service.process.send_signal(signal.SIGHUP)
            deadline = time.monotonic() + DEADLINE
            while one.list_delivery_streams()["DeliveryStreamNames"]:
                assert time.monotonic() < deadline
                try:
                    one.delete_delivery_stream(DeliveryStreamName="plant", AllowForceDelete=True)
                except one.exceptions.ResourceInUseException:
                    time.sleep(0.05)  # the reload is not over
    finally:
        link.close()
