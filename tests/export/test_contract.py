"""All shipped exporters pass the published contract suite."""

from __future__ import annotations

import base64
import gzip
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import cbor2
import pytest

from benchmarks.testbed.aws import Answer, FakeAws, Request, error, partial, reset
from benchmarks.testbed.forwarder import Forwarder
from benchmarks.testbed.uplink import Answering, Published
from benchmarks.testbed.web import Refusing, Web
from bridge import Context
from bridge.plugin import discovery
from bridge.plugin.testing import ExporterContract
from tests.export.destinations import unpacked
from tests.export.harness import Bucket, Impatient

GIVE_UP = 0.5  # seconds without an answer
EXPORTERS = discovery.load().exporters


@pytest.fixture
def fake() -> Iterator[FakeAws]:
    server = FakeAws()
    yield server
    server.close()


class LinkFaults(ExporterContract):
    """The faults of the link, for every destination: it is behind a forwarder."""

    faults: ClassVar = ("link_down", "no_answer", "answers_lost")
    delays: ClassVar = ("late_answers",)
    forwarder: Forwarder
    patience: float = 60

    @pytest.fixture
    def behind(self, request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
        """Put a forwarder before a URL; gives the forwarder's."""
        forwarders = []
        hasty = "faults" in request.node.name or "closing" in request.node.name
        self.patience = GIVE_UP if hasty else 60

        def behind(url: str) -> str:
            self.forwarder = Forwarder(url)
            forwarders.append(self.forwarder)
            return self.forwarder.url

        yield behind
        for forwarder in forwarders:
            forwarder.close()

    def context(self) -> Context:
        return Impatient(self.patience)

    def link_down(self) -> Any:
        return self.forwarder.shut()

    def no_answer(self) -> Any:
        return self.forwarder.trouble("silent")

    def answers_lost(self) -> Any:
        return self.forwarder.trouble("deaf")

    def late_answers(self) -> Any:
        return self.forwarder.trouble("late")


class AwsFaults(LinkFaults):
    """The faults that the services of the fake have in common."""

    fake: FakeAws
    url: str
    faults: ClassVar = (
        *LinkFaults.faults,
        *("throttled", "internal", "unavailable", "expired", "denied", "wrong_signature", "cut"),
    )

    @pytest.fixture(autouse=True)
    def _server(self, fake: FakeAws, behind: Callable[[str], str]) -> None:
        self.fake, self.url = fake, behind(fake.url)

    def throttled(self) -> Any:
        return self.fake.broken(error(400, "ProvisionedThroughputExceededException"))

    def internal(self) -> Any:
        return self.fake.broken(error(500, "InternalFailure"))

    def unavailable(self) -> Any:
        return self.fake.broken(error(503, "ServiceUnavailableException"))

    def expired(self) -> Any:
        return self.fake.broken(error(400, "ExpiredTokenException"))

    def denied(self) -> Any:
        return self.fake.broken(error(400, "AccessDeniedException"))

    def wrong_signature(self) -> Any:
        return self.fake.broken(error(400, "UnrecognizedClientException"))

    def cut(self) -> Any:
        return self.fake.broken(reset)


class TestKinesis(AwsFaults):
    exporter = EXPORTERS["kinesis"]
    ordered = False  # random keys
    poison = b"poison"
    faults: ClassVar = (*AwsFaults.faults, "partly", "missing")

    def config(self) -> dict[str, Any]:
        return {"identifier": "k", "kinesisStreamName": "s", "endpointUrl": self.url}

    def delivered(self) -> list[int]:
        return [int(record["Data"].split()[1]) for record in self.fake.taken]

    def partly(self) -> Any:
        return self.fake.broken(partial(self.fake, lambda n, _: n % 3 == 0, "InternalFailure"))

    def missing(self) -> Any:
        return self.fake.broken(error(400, "ResourceNotFoundException"))


class TestKinesisWithKeys(TestKinesis):
    ordered = True

    def config(self) -> dict[str, Any]:
        return {**super().config(), "partitionKey": "{topic}", "pacing": True}


class TestKinesisWithJson(TestKinesis):
    poison = bytes(8 * 1024 * 1024)  # too large in base64

    def config(self) -> dict[str, Any]:
        return {**super().config(), "record": "json"}

    def delivered(self) -> list[int]:
        rows = [json.loads(record["Data"]) for record in self.fake.taken]
        return [int(base64.b64decode(row["payload"]).split()[1]) for row in rows]


class TestKinesisInGzip(TestKinesis):
    """All messages of a batch in one record."""

    def config(self) -> dict[str, Any]:
        return {**super().config(), "compression": "gzip"}

    def delivered(self) -> list[int]:
        found = [item for record in self.fake.taken for item in unpacked(record["Data"])]
        return [int(item.split()[1]) for item in found]


class TestKinesisInGzipWithKeys(TestKinesisInGzip):
    """As many records as levels in the topics, each a line of JSON a message."""

    def config(self) -> dict[str, Any]:
        template = '{"n":{sequence_number},"v":{payload}}'
        return {**super().config(), "record": template, "partitionKey": "{topic/0}"}

    def delivered(self) -> list[int]:
        lines = [line for record in self.fake.taken for line in gzip.decompress(record["Data"]).splitlines()]
        return [int(json.loads(line)["v"].split()[1]) for line in lines]


class TestFirehose(AwsFaults):
    exporter = EXPORTERS["firehose"]
    poison = bytes(1000 * 1024)  # too large with its delimiter
    faults: ClassVar = (*AwsFaults.faults, "partly", "another_source")

    def config(self) -> dict[str, Any]:
        return {"identifier": "f", "deliveryStreamName": "s", "endpointUrl": self.url}

    def delivered(self) -> list[int]:
        lines = b"".join(record["Data"] for record in self.fake.taken).splitlines()
        return [int(line.split()[1]) for line in lines]

    def partly(self) -> Any:
        return self.fake.broken(partial(self.fake, lambda n, _: n % 3 == 0, "ServiceUnavailableException"))

    def another_source(self) -> Any:
        """The delivery stream is there, but a Kinesis stream feeds it."""
        return self.fake.broken(error(400, "InvalidArgumentException"))


class TestPackedFirehose(TestFirehose):
    def config(self) -> dict[str, Any]:
        return {**super().config(), "packBytes": 100}


class TestFirehoseWithATemplate(TestFirehose):
    poison = b"\xff"  # JSON cannot hold it

    def config(self) -> dict[str, Any]:
        return {**super().config(), "record": '{"n":{sequence_number},"of":"{topic/0}","v":{payload}}'}

    def delivered(self) -> list[int]:
        rows = map(json.loads, b"".join(record["Data"] for record in self.fake.taken).splitlines())
        return [row["n"] for row in rows if row["v"] == f"message {row['n']}"]


class TestRedirectedIotAnalytics(TestFirehose):
    exporter = EXPORTERS["iotAnalytics"]

    def config(self) -> dict[str, Any]:
        base = {"identifier": "a", "iotChannel": "c", "deliveryStreamName": "s"}
        return {**base, "endpointUrl": self.url}


class TestSitewise(AwsFaults):
    exporter = EXPORTERS["IotSitewise"]
    faults: ClassVar = (*AwsFaults.faults, "partly")
    poison = b'{"entryId": "no values"}'

    def config(self) -> dict[str, Any]:
        return {"identifier": "w", "endpointUrl": self.url}

    def payload(self, number: int) -> bytes:
        value = {
            "value": {"doubleValue": number + 0.5},
            "timestamp": {"timeInSeconds": int(time.time())},
            "quality": "GOOD",
        }
        entry = {"entryId": "same", "propertyAlias": f"/plant/{number}", "propertyValues": [value]}
        return json.dumps(entry).encode()

    def delivered(self) -> list[int]:
        return [int(entry["propertyAlias"].split("/")[2]) for entry in self.fake.taken]

    def partly(self) -> Any:
        """Two of the entries of each request fail."""

        def fault(request: Request) -> Answer:
            wrong = [{"errorCode": "InternalFailureException", "errorMessage": "no", "timestamps": []}]
            entries = request.parameters["entries"]
            self.fake.taken += entries[2:]
            return 200, {"errorEntries": [{"entryId": e["entryId"], "errors": wrong} for e in entries[:2]]}

        return self.fake.broken(fault)


class TestSitewiseWithReadings(TestSitewise):
    poison = b'{"temperature": 21.5}'

    def config(self) -> dict[str, Any]:
        return {**super().config(), "propertyAlias": "/{topic/0}/{json:/pump}", "value": "{json:/temp}"}

    def payload(self, number: int) -> bytes:
        return json.dumps({"pump": number, "temp": 21.5}).encode()


class S3Faults(LinkFaults):
    """A bucket of moto's server; in its place another one answers that refuses everything."""

    faults: ClassVar = (
        *LinkFaults.faults,
        *("throttled", "internal", "expired", "denied", "wrong_key", "wrong_signature", "too_slow"),
    )
    bucket: Bucket
    path: Path

    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: Bucket, tmp_path: Path, behind: Callable[[str], str]) -> Iterator[None]:
        self.bucket, self.path, self.url = bucket, tmp_path, behind(bucket.url)
        self.refusing = Refusing()
        yield
        self.refusing.close()

    def _answering(self, status: int, code: str) -> Any:
        self.refusing.status = status
        self.refusing.body = f"<Error><Code>{code}</Code><Message>on demand</Message></Error>".encode()
        return self.forwarder.leading_to(self.refusing.port)

    def throttled(self) -> Any:
        return self._answering(503, "SlowDown")

    def internal(self) -> Any:
        return self._answering(500, "InternalError")

    def expired(self) -> Any:
        return self._answering(400, "ExpiredToken")

    def denied(self) -> Any:
        return self._answering(403, "AccessDenied")

    def wrong_key(self) -> Any:
        return self._answering(403, "InvalidAccessKeyId")

    def wrong_signature(self) -> Any:
        return self._answering(403, "SignatureDoesNotMatch")

    def too_slow(self) -> Any:
        return self._answering(400, "RequestTimeout")


class TestS3(S3Faults):
    exporter = EXPORTERS["s3"]

    faults: ClassVar = (*S3Faults.faults, "no_bucket")

    def config(self) -> dict[str, Any]:
        return self.bucket.config(endpointUrl=self.url)

    @contextmanager
    def no_bucket(self) -> Iterator[None]:
        """Not a reason to drop data: the bucket can still be created."""
        kept = {key: self.bucket.body(key) for key in self.bucket.names()}
        self.bucket.remove()
        yield
        self.bucket.make()
        for key, body in kept.items():
            self.bucket.client.put_object(Bucket=self.bucket.name, Key=key, Body=body)

    def delivered(self) -> list[int]:
        rows = [row for key in sorted(self.bucket.data_keys()) for row in self._rows(key)]
        return [int(payload.split()[1]) for payload in rows]

    def _rows(self, key: str) -> list[bytes]:
        lines = gzip.decompress(self.bucket.body(key)).splitlines()
        return [base64.b64decode(json.loads(line)["payload"]) for line in lines]


class TestS3Tasks(S3Faults):
    exporter = EXPORTERS["s3TaskExecutor"]
    poison = b'{"inputUrl": "file:/nowhere"}'

    def config(self) -> dict[str, Any]:
        return {"identifier": "t", "endpointUrl": self.url}

    def payload(self, number: int) -> bytes:
        path = self.path / f"file{number}"
        path.write_bytes(b"content")
        task = {"inputUrl": f"file:{path}", "bucket": self.bucket.name, "key": f"up/{number}"}
        return json.dumps(task).encode()

    def delivered(self) -> list[int]:
        return [int(key.split("/")[1]) for key in self.bucket.names()]


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    yield server
    server.close()


class TestHttpRaw(LinkFaults):
    exporter = EXPORTERS["http"]
    faults: ClassVar = (*LinkFaults.faults, "server_error", "throttled", "unauthorized", "moved", "partly")
    poison = b"poison"
    web: Web

    @pytest.fixture(autouse=True)
    def _web(self, web: Web, behind: Callable[[str], str]) -> None:
        self.web, self.uri = web, behind(web.url) + "/in"

    def config(self) -> dict[str, Any]:
        return {"identifier": "h", "uri": self.uri, "timeoutMillis": int(self.patience * 1000)}

    def delivered(self) -> list[int]:
        return [int(body.split()[1]) for body in self.web.bodies]

    def server_error(self) -> Any:
        return self._answering(503)

    def throttled(self) -> Any:
        return self._answering(429)

    def unauthorized(self) -> Any:
        return self._answering(401)

    def moved(self) -> Any:
        return self._answering(302)

    @contextmanager
    def partly(self) -> Iterator[None]:
        self.web.room = 3
        yield
        self.web.room = None

    @contextmanager
    def _answering(self, status: int) -> Iterator[None]:
        self.web.status = status
        yield
        self.web.status = 204


class TestHttpBatched(TestHttpRaw):
    faults: ClassVar = TestHttpRaw.faults[:-1]  # a batch is one request

    def config(self) -> dict[str, Any]:
        return {**super().config(), "exportFormat": 1}

    def delivered(self) -> list[int]:
        messages = [message for body in self.web.bodies for message in json.loads(body)]
        return [int(base64.b64decode(message["payload"]).split()[1]) for message in messages]


class TestHttpWithJson(TestHttpRaw):
    def config(self) -> dict[str, Any]:
        return {**super().config(), "record": "json"}

    def delivered(self) -> list[int]:
        rows = map(json.loads, self.web.bodies)
        return [int(base64.b64decode(row["payload"]).split()[1]) for row in rows]


class TestHttpBatchedWithCbor(TestHttpBatched):
    def config(self) -> dict[str, Any]:
        return {**super().config(), "record": "cbor"}

    def delivered(self) -> list[int]:
        return [int(row["payload"].split()[1]) for body in self.web.bodies for row in cbor2.loads(body)]


class TestHttpBatchedInGzip(TestHttpBatched):
    def config(self) -> dict[str, Any]:
        return {**super().config(), "compression": "gzip"}

    def delivered(self) -> list[int]:
        messages = [message for body in self.web.bodies for message in json.loads(gzip.decompress(body))]
        return [int(base64.b64decode(message["payload"]).split()[1]) for message in messages]


class Broker(LinkFaults):
    """A broker of bytes, and all that it may answer."""

    exporter = EXPORTERS["mqtt"]
    faults: ClassVar = (
        *LinkFaults.faults,
        *(
            "refused",
            "over_quota",
            "not_authorized",
            "no_acknowledgement",
            "partly",
            "ended",
            "shutting_down",
        ),
    )
    poison = b"poison"
    broker: Answering

    @pytest.fixture(autouse=True)
    def _broker(self, behind: Callable[[str], str]) -> Iterator[None]:
        with Answering() as self.broker:
            self.broker.code = lambda message: 0x99 if message.payload == b"poison" else 0
            self.url = behind(self.broker.url).replace("http:", "mqtt:")
            yield

    def config(self) -> dict[str, Any]:
        return {"identifier": "up", "url": self.url, "timeoutMillis": int(self.patience * 1000)}

    def delivered(self) -> list[int]:
        return [int(payload.split()[1]) for payload in self.broker.payloads if payload != b"poison"]

    @contextmanager
    def _answering(self, code: int | None, beyond: int = 0) -> Iterator[None]:
        before, self.broker.code = (
            self.broker.code,
            lambda message: code if self._count(message) >= beyond else 0,
        )
        yield
        self.broker.code = before

    def _count(self, message: Published) -> int:
        return int(message.payload.split()[1]) % 20

    @contextmanager
    def refused(self) -> Iterator[None]:
        self.broker.connack = (0x87, {})
        yield
        self.broker.connack = (0, {})

    def over_quota(self) -> Any:
        return self._answering(0x97)

    def not_authorized(self) -> Any:
        return self._answering(0x87)

    def no_acknowledgement(self) -> Any:
        return self._answering(None)

    def partly(self) -> Any:
        return self._answering(0x97, beyond=5)

    @contextmanager
    def _ending(self, code: int) -> Iterator[None]:
        self.broker.hang_up = lambda message: code
        yield
        self.broker.hang_up = lambda message: None

    def ended(self) -> Any:
        return self._ending(-1)

    def shutting_down(self) -> Any:
        return self._ending(0x8B)


class TestMqtt5(Broker):
    pass


class TestMqtt5Singly(Broker):
    """One message in flight: not even a refusal changes the order."""

    def config(self) -> dict[str, Any]:
        return {**super().config(), "maxInFlight": 1}


class TestMqtt311(Broker):
    faults: ClassVar = (*LinkFaults.faults, "no_acknowledgement", "ended")
    poison = None  # no reason codes

    def config(self) -> dict[str, Any]:
        return {**super().config(), "protocol": "3.1.1"}


class TestMqttQos0(TestMqtt311):
    faults: ClassVar = (*LinkFaults.faults, "ended")

    def config(self) -> dict[str, Any]:
        return {**super().config(), "qos": 0}
