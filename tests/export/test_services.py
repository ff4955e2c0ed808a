"""What each exporter makes of its own service: partial failures, limits, conflicts, order."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import boto3
import msgspec
import paho.mqtt.client as paho
import pytest

from benchmarks.testbed.aws import Answer, FakeAws, Fault, Request, error, partial, reset
from benchmarks.testbed.forwarder import Forwarder
from benchmarks.testbed.web import Web
from bridge import Batch, Exporter, Record, Retry
from bridge.access.logins import Access
from bridge.mqtt import MqttFrontEnd
from bridge.mqtt.settings import MqttConfig
from bridge.operations.catalog import Operations
from bridge.plugin import discovery
from bridge.plugin.api import convert_config
from bridge.plugin.testing import attempt, check_outcome, deliver, make_batch
from tests.export.harness import Bucket, Impatient, certificate, running, until

EXPORTERS = discovery.load().exporters


@pytest.fixture
def fake() -> Iterator[FakeAws]:
    server = FakeAws()
    yield server
    server.close()


def make(kind: str, patience: float = 60, **config: Any) -> Exporter:
    cls = EXPORTERS[kind]
    return cls(convert_config(cls, {"identifier": "x", **config}), Impatient(patience))


def kinesis(fake: FakeAws, **config: Any) -> Exporter:
    return make("kinesis", kinesisStreamName="s", endpointUrl=fake.url, **config)


def batch_of(*rows: tuple[str, bytes]) -> Batch:
    records = [Record(n, 0, topic, payload) for n, (topic, payload) in enumerate(rows)]
    return Batch("gw", "plant", 1, 0, len(records) - 1, records)


# --- all


@pytest.mark.parametrize("kind", ["kinesis", "http"])
def test_a_large_request_over_a_slow_link_takes_long_but_gets_there(fake: FakeAws, kind: str) -> None:
    # 13 MB take more than three seconds; of these the kernel's 4 MB go out after the last was taken from us.
    web = Web()
    forwarder = Forwarder(web.url if kind == "http" else fake.url, rate=4_000_000)
    configs = {
        "kinesis": {"kinesisStreamName": "s", "endpointUrl": forwarder.url},
        "http": {"uri": forwarder.url, "timeoutMillis": 1800, "exportFormat": 1},
    }
    try:
        deliver(make(kind, 1.8, **configs[kind]), make_batch([bytes(975_000)] * 10), attempts=5)
    finally:
        forwarder.close()
        web.close()


@pytest.mark.parametrize("kind", ["kinesis", "firehose", "iotAnalytics"])
def test_a_name_that_the_service_does_not_allow_is_refused_before_it_costs_a_message(kind: str) -> None:
    key = "kinesisStreamName" if kind == "kinesis" else "deliveryStreamName"
    config = {"identifier": "x", "iotChannel": "c"} if kind == "iotAnalytics" else {"identifier": "x"}
    convert_config(EXPORTERS[kind], {**config, key: "press-hall_2.raw"})
    with pytest.raises(msgspec.ValidationError, match=key):
        convert_config(EXPORTERS[kind], {**config, key: "prüfstand"})


def several_requests(kind: str, fake: FakeAws) -> tuple[Exporter, Batch]:
    """An exporter, and a batch that it sends in three requests."""
    if kind == "kinesis":
        rows = [(f"line/{n % 2}", b"%d" % n) for n in range(6)]
        return kinesis(fake, partitionKey="{topic}"), batch_of(*rows)
    if kind == "firehose":
        return firehose(fake, delimiter=""), make_batch([b"%d" % n for n in range(1200)])
    now = int(time.time())
    return sitewise(fake), make_batch([entry("/a", now, integerValue=n) for n in range(3)])


@pytest.mark.parametrize(
    "fault",
    [error(500, "InternalFailure"), error(400, "ThrottlingException"), reset],
    ids=["an error", "throttled", "cut"],
)
@pytest.mark.parametrize("passing", [0, 1, 2])
@pytest.mark.parametrize("kind", ["kinesis", "firehose", "IotSitewise"])
def test_an_outage_at_any_request_of_a_batch_costs_no_record(
    fake: FakeAws, kind: str, passing: int, fault: Fault
) -> None:
    exporter, batch = several_requests(kind, fake)

    def outage(request: Request) -> Answer | None:
        if len(fake.requests) > passing:
            return fault(request)
        answer: Answer = getattr(fake, f"_{request.operation}")(request.parameters)
        return answer

    with fake.broken(outage):
        outcome = attempt(exporter, batch)
    check_outcome(outcome, batch)
    before = len(fake.taken)
    assert not outcome.rejected
    assert before + len(outcome.retry) == len(batch.records), "a record is neither taken nor retried"
    left = [batch.records[n] for n in outcome.retry]
    assert deliver(exporter, msgspec.structs.replace(batch, records=left)) == {}
    assert len(fake.taken) == len(batch.records)


# --- Kinesis


def test_only_the_failed_entries_are_sent_again(fake: FakeAws) -> None:
    code = "ProvisionedThroughputExceededException"
    fake.faults = [partial(fake, lambda n, _: n in (1, 3), code)]
    deliver(kinesis(fake), make_batch([b"%d" % n for n in range(5)]))
    assert [len(parameters["Records"]) for _, parameters in fake.requests] == [5, 2]
    assert [record["Data"] for record in fake.taken] == [b"0", b"2", b"4", b"1", b"3"]


def test_records_of_one_key_never_overtake_each_other(fake: FakeAws) -> None:
    rows = [(f"line/{n % 3}", b"%d" % n) for n in range(12)]
    # The first record of each request fails, four times over.
    fake.faults = [partial(fake, lambda n, _: n == 0, "InternalFailure")] * 4
    deliver(kinesis(fake, partitionKey="{topic}"), batch_of(*rows))
    by_key: dict[str, list[int]] = {}
    for record in fake.taken:
        by_key.setdefault(record["PartitionKey"], []).append(int(record["Data"]))
    assert by_key == {f"line/{k}": list(range(k, 12, 3)) for k in range(3)}


def test_without_order_per_key_a_batch_is_one_request(fake: FakeAws) -> None:
    exporter = kinesis(fake, partitionKey="{topic}", orderPerKey=False)
    deliver(exporter, batch_of(*[("t", b"%d" % n) for n in range(100)]))
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("template", "key"),
    [
        ("{topic}", "plant/7/temp"),
        ("{topic/1}", "7"),
        ("{topic/-1}-{stream}-{gateway}", "temp-plant-gw"),
        ("{json:/device/id}", "d1"),
        ("{json:/values/1}", "2.5"),
        ("fixed", "fixed"),
    ],
)
def test_partition_keys_follow_their_template(fake: FakeAws, template: str, key: str) -> None:
    payload = b'{"device": {"id": "d1"}, "values": [1, 2.5]}'
    deliver(kinesis(fake, partitionKey=template), batch_of(("plant/7/temp", payload)))
    assert [record["PartitionKey"] for record in fake.taken] == [key]


def test_records_without_a_key_get_random_ones_and_long_keys_are_hashed(fake: FakeAws) -> None:
    deep = b"[" * 10_000 + b"]" * 10_000
    deliver(kinesis(fake, partitionKey="{json:/id}"), batch_of(("t", b"no json"), ("t", b"{}"), ("t", deep)))
    deliver(kinesis(fake, partitionKey="{topic}"), batch_of(("x" * 300, b"1")))
    keys = [record["PartitionKey"] for record in fake.taken]
    assert len(set(keys)) == 4
    assert [len(key) for key in keys] == [32, 32, 32, 64]


@pytest.mark.parametrize("template", ["{nope}", "{topic", "", "{topic/x}"])
def test_a_wrong_template_is_refused_when_it_is_configured(template: str) -> None:
    with pytest.raises(ValueError, match=r"field|brace|empty"):
        convert_config(
            EXPORTERS["kinesis"],
            {"identifier": "x", "kinesisStreamName": "s", "partitionKey": template},
        )


def test_records_of_one_mqtt_client_have_its_id_as_their_key(fake: FakeAws, tmp_path: Path) -> None:
    def config(key: str) -> dict[str, Any]:
        base = {"identifier": "k", "kinesisStreamName": "s", "endpointUrl": fake.url}
        return {"kinesis": [{**base, "partitionKey": key}]}

    def keys() -> dict[bytes, str]:
        return {record["Data"]: record["PartitionKey"] for record in fake.taken}

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("a", config("{stream}"), topics=["in/#"])
            settings = MqttConfig(listen=["tcp://127.0.0.1:0"])
            front = MqttFrontEnd(settings, Operations(gateway.manager), Access(settings))
            (url,) = await front.start()
            client = paho.Client(paho.CallbackAPIVersion.VERSION2, client_id="press-7", protocol=paho.MQTTv5)
            client.will_set("in/will", b"will", 1)
            try:
                client.connect("127.0.0.1", int(url.rsplit(":", 1)[1]))
                client.loop_start()
                client.publish("in/x", b"before", 1)
                await until(lambda: b"before" in keys())
                gateway.update("a", config("line-{client}"), topics=["in/#"])
                for qos in (0, 1, 2):
                    client.publish("in/x", b"qos %d" % qos, qos)
                request = b'{"name": "a", "payload": "cmVxdWVzdA=="}'
                client.publish("streambridge/press-7/appendMessage", request, 1)
                await gateway.append("a", b"by nobody")
                await until(lambda: len(keys()) == 6, describe=lambda: str(keys()))
                client.socket().shutdown(socket.SHUT_RDWR)  # the will is its own too
                await until(lambda: b"will" in keys())
            finally:
                client.disconnect()
                client.loop_stop()
                await front.stop()

    asyncio.run(scenario())
    found = keys()
    assert found.pop(b"before") == "a"
    assert len(found.pop(b"by nobody")) == 32  # random
    assert found.keys() == {b"qos 0", b"qos 1", b"qos 2", b"request", b"will"}
    assert set(found.values()) == {"line-press-7"}


def test_pacing_spreads_records_over_what_the_shards_take(fake: FakeAws) -> None:
    exporter = kinesis(fake, pacing=True)  # the fake has two shards: 2 MB/s
    began = time.monotonic()
    for _ in range(3):
        deliver(exporter, make_batch([bytes(100_000) for _ in range(6)]))
    assert time.monotonic() - began > 0.55  # two waits of 0.3 s
    assert [name for name, _ in fake.requests].count("DescribeStreamSummary") == 1


def test_motos_kinesis_gives_back_what_was_sent(moto: str) -> None:
    client = boto3.client("kinesis", endpoint_url=moto)
    client.create_stream(StreamName="plant", ShardCount=1)
    exporter = make("kinesis", kinesisStreamName="plant", endpointUrl=moto, partitionKey="{topic}")
    assert deliver(exporter, make_batch([b"%d" % n for n in range(30)])) == {}
    shard = client.describe_stream(StreamName="plant")["StreamDescription"]["Shards"][0]["ShardId"]
    iterator = client.get_shard_iterator(StreamName="plant", ShardId=shard, ShardIteratorType="TRIM_HORIZON")[
        "ShardIterator"
    ]
    found = client.get_records(ShardIterator=iterator)["Records"]
    assert [record["Data"] for record in found] == [b"%d" % n for n in range(30)]


# --- Firehose


def test_motos_firehose_gives_back_what_was_sent(moto: str, bucket: Bucket) -> None:
    client = boto3.client("firehose", endpoint_url=moto)
    client.create_delivery_stream(
        DeliveryStreamName="plant",
        ExtendedS3DestinationConfiguration={
            "RoleARN": "arn:aws:iam::123456789012:role/r",
            "BucketARN": f"arn:aws:s3:::{bucket.name}",
        },
    )
    exporter = make("firehose", deliveryStreamName="plant", endpointUrl=moto)
    assert deliver(exporter, make_batch([b"a", b"b"])) == {}
    assert b"".join(bucket.body(key) for key in bucket.names()) == b"a\nb\n"


def firehose(fake: FakeAws, **config: Any) -> Exporter:
    return make("firehose", deliveryStreamName="s", endpointUrl=fake.url, **config)


def test_packed_messages_fill_records_and_fail_together(fake: FakeAws) -> None:
    fake.faults = [partial(fake, lambda n, _: n == 0, "ServiceUnavailableException")]
    exporter = firehose(fake, packBytes=40)
    deliver(exporter, make_batch([b"message %02d" % n for n in range(10)]))
    assert [len(parameters["Records"]) for _, parameters in fake.requests] == [4, 1]
    assert fake.taken[-1]["Data"] == b"message 00\nmessage 01\nmessage 02\n"


def test_without_packing_every_message_is_a_record_even_if_it_is_empty(fake: FakeAws) -> None:
    messages = [b"", b"", b"", b"x", b"", b""]
    deliver(firehose(fake, delimiter=""), make_batch(messages))
    assert [record["Data"] for record in fake.taken] == messages


def test_requests_stay_within_500_records_and_4_mib(fake: FakeAws) -> None:
    deliver(firehose(fake), make_batch([b"x"] * 1200))
    deliver(firehose(fake), make_batch([bytes(900_000)] * 9))
    assert [len(parameters["Records"]) for _, parameters in fake.requests] == [500, 500, 200, 4, 4, 1]


def test_a_message_too_large_for_firehose_is_rejected_alone(fake: FakeAws) -> None:
    rejected = deliver(firehose(fake), make_batch([b"a", bytes(1000 * 1024), b"b"]))
    assert list(rejected) == [1]
    assert [record["Data"] for record in fake.taken] == [b"a\n", b"b\n"]


def test_the_delimiter_can_be_left_out(fake: FakeAws) -> None:
    deliver(firehose(fake, delimiter=""), make_batch([b"a"]))
    assert fake.taken == [{"Data": b"a"}]


# --- SiteWise


def entry(alias: str, second: int | None = None, **value: Any) -> bytes:
    when = int(time.time()) if second is None else second
    point = {"value": value or {"doubleValue": 1.0}, "timestamp": {"timeInSeconds": when}}
    return json.dumps({"entryId": "1", "propertyAlias": alias, "propertyValues": [point]}).encode()


def sitewise(fake: FakeAws) -> Exporter:
    return make("IotSitewise", endpointUrl=fake.url)


def test_values_of_one_property_and_time_go_in_different_requests_in_order(fake: FakeAws) -> None:
    now = int(time.time())
    payloads = [entry("/a", now, integerValue=n) for n in range(3)] + [entry("/b", now)]
    assert deliver(sitewise(fake), make_batch(payloads)) == {}
    assert [len(parameters["entries"]) for _, parameters in fake.requests] == [1, 1, 2]
    values = [e["propertyValues"][0]["value"] for e in fake.taken if e["propertyAlias"] == "/a"]
    assert values == [{"integerValue": 0}, {"integerValue": 1}, {"integerValue": 2}]


def test_values_too_old_or_unknown_are_rejected_with_the_reason(fake: FakeAws) -> None:
    fake.properties = {"/known"}
    payloads = [entry("/known"), entry("/known", int(time.time()) - 8 * 86400), entry("/other")]
    rejected = deliver(sitewise(fake), make_batch(payloads))
    assert rejected.keys() == {1, 2}
    assert "TimestampOutOfRange" in rejected[1]
    assert "ResourceNotFound" in rejected[2]
    assert len(fake.taken) == 1


def test_entries_that_wait_are_tried_again_and_the_others_are_not(fake: FakeAws) -> None:
    def throttled(request: Any) -> tuple[int, dict[str, Any]]:
        wrong = {"errorCode": "ThrottlingException", "errorMessage": "slow", "timestamps": []}
        fake.taken += request.parameters["entries"][1:]
        return 200, {"errorEntries": [{"entryId": "0", "errors": [wrong]}]}

    fake.faults = [throttled]
    assert deliver(sitewise(fake), make_batch([entry(f"/{n}") for n in range(3)])) == {}
    assert [len(parameters["entries"]) for _, parameters in fake.requests] == [3, 1]


def test_a_request_refused_as_a_whole_costs_only_the_bad_entry(fake: FakeAws) -> None:
    def picky(request: Any) -> tuple[int, dict[str, Any]]:
        if any(e["propertyAlias"] == "/2" for e in request.parameters["entries"]):
            return 400, {"__type": "InvalidRequestException", "message": "no"}
        return fake._BatchPutAssetPropertyValue(request.parameters)

    with fake.broken(picky):
        rejected = deliver(sitewise(fake), make_batch([entry(f"/{n}") for n in range(5)]))
    assert list(rejected) == [2]
    assert len(fake.taken) == 4


PUMP = "12345678-1234-1234-1234-123456789012"


def conflict_of_ids(fake: FakeAws, *, whole: bool) -> Any:
    """/pump is the property PUMP, and a request, or each of its entries, is refused if both are in it."""

    def fault(request: Any) -> tuple[int, dict[str, Any]]:
        entries = request.parameters["entries"]
        points = [
            (
                e["propertyAlias"] if e.get("propertyAlias", "/pump") != "/pump" else PUMP,
                *v["timestamp"].items(),
            )
            for e in entries
            for v in e["propertyValues"]
        ]
        if len(set(points)) == len(points):
            fake.taken += entries
            return 200, {"errorEntries": []}
        if whole:
            return 409, {"__type": "ConflictingOperationException", "message": "same property"}
        wrong = {"errorCode": "ConflictingOperationException", "errorMessage": "same", "timestamps": []}
        return 200, {"errorEntries": [{"entryId": e["entryId"], "errors": [wrong]} for e in entries]}

    return fake.broken(fault)


@pytest.mark.parametrize("whole", [True, False])
def test_entries_of_one_property_by_two_names_go_one_after_the_other(fake: FakeAws, whole: bool) -> None:
    now = int(time.time())
    by_ids = json.loads(entry("/pump", now, integerValue=2)) | {"assetId": PUMP, "propertyId": PUMP}
    del by_ids["propertyAlias"]
    payloads = [entry("/pump", now, integerValue=1), json.dumps(by_ids).encode()]
    with conflict_of_ids(fake, whole=whole):
        assert deliver(sitewise(fake), make_batch(payloads), attempts=1) == {}
    values = [e["propertyValues"][0]["value"]["integerValue"] for e in fake.taken]
    assert values == [1, 2]


@pytest.mark.parametrize("whole", [True, False])
def test_an_entry_with_two_values_for_one_time_is_rejected_alone(fake: FakeAws, whole: bool) -> None:
    twice = json.loads(entry("/a"))
    twice["propertyValues"] *= 2
    payloads = [entry("/b"), json.dumps(twice).encode(), entry("/c")]
    with conflict_of_ids(fake, whole=whole):
        rejected = deliver(sitewise(fake), make_batch(payloads), attempts=1)
    assert rejected.keys() == {1}
    assert "ConflictingOperation" in rejected[1]
    assert [e["propertyAlias"] for e in fake.taken] == ["/b", "/c"]


@pytest.mark.parametrize("answer", [error(409, "ConflictingOperationException"), None])
def test_a_conflict_of_one_entry_with_another_client_is_retried(fake: FakeAws, answer: Any) -> None:
    def of_the_entry(request: Any) -> tuple[int, dict[str, Any]]:
        wrong = {"errorCode": "ConflictingOperationException", "errorMessage": "busy", "timestamps": []}
        return 200, {"errorEntries": [{"entryId": "0", "errors": [wrong]}]}

    fake.faults = [answer or of_the_entry]
    assert deliver(sitewise(fake), make_batch([entry("/a")])) == {}
    assert len(fake.requests) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"propertyAlias": None, "assetId": "pump-7", "propertyId": "temperature"},
        {"propertyValues": [{"value": {"nullValue": {}}, "timestamp": {"timeInSeconds": 1}}]},
        {"propertyValues": [{"value": {"nullValue": {"x": "D"}}, "timestamp": {"timeInSeconds": 1}}]},
    ],
)
def test_what_the_model_of_the_service_forbids_costs_only_its_own_entry(
    fake: FakeAws, change: dict[str, Any]
) -> None:
    payloads = [entry("/1"), json.dumps(json.loads(entry("/2")) | change).encode(), entry("/3")]
    rejected = deliver(sitewise(fake), make_batch(payloads), attempts=1)
    assert rejected.keys() == {1}
    assert [e["propertyAlias"] for e in fake.taken] == ["/1", "/3"]


def test_what_the_service_finds_invalid_in_one_entry_alone_is_rejected(fake: FakeAws) -> None:
    with fake.broken(error(400, "ValidationException")):
        assert deliver(sitewise(fake), make_batch([entry("/a")]), attempts=1).keys() == {0}


@pytest.mark.parametrize(
    "payload",
    [
        b"\xa0 no JSON",
        b'{"entryId": "1", "propertyValues": []}',
        entry("/a", None, doubleValue=1.0, integerValue=1),
        entry("/a", 0),
    ],
)
def test_messages_that_are_no_entries_are_rejected(fake: FakeAws, payload: bytes) -> None:
    assert list(deliver(sitewise(fake), make_batch([entry("/a"), payload]))) == [1]


# --- HTTP, IoT Analytics


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    yield server
    server.close()


def test_http_batches_are_the_sdks_messages(web: Web) -> None:
    deliver(make("http", uri=web.url, exportFormat=1), make_batch([b"\xff\x00"], first=7))
    ((message,),) = map(json.loads, web.bodies)
    now = message.pop("ingestTime")
    assert abs(now / 1000 - time.time()) < 60
    assert message == {"streamName": "stream", "sequenceNumber": 7, "payload": "/wA="}


def test_http_compresses_what_it_sends_if_it_is_told_to(web: Web) -> None:
    readings = [b'{"temperature": 21.%d, "humidity": 40.%d}' % (n, n) for n in range(100)]
    exporter = make("http", uri=web.url, exportFormat=1, record="json", compression="gzip")
    assert deliver(exporter, make_batch(readings)) == {}
    (body,), (head,) = web.bodies, web.headers
    assert head["content-encoding"] == "gzip"
    assert [base64.b64decode(row["payload"]) for row in json.loads(gzip.decompress(body))] == readings
    assert len(body) < 0.2 * sum(len(reading) + 150 for reading in readings)


def test_http_waits_for_a_server_that_does_not_take_gzip(web: Web) -> None:
    web.status = 415
    with pytest.raises(Retry, match="it may not take gzip; remove compression"):
        make("http", uri=web.url, compression="gzip").export(make_batch([b"x"]))
    assert deliver(make("http", uri=web.url), make_batch([b"x"])) == {0: f"{web.url} answered 415"}


def test_http_refuses_two_encodings() -> None:
    with pytest.raises(ValueError, match="compression sets Content-Encoding"):
        make("http", uri="http://host/", compression="gzip", headers={"content-encoding": "br"})


def test_http_sends_headers_and_a_token_that_may_change(web: Web, tmp_path: Path) -> None:
    token = tmp_path / "token"
    exporter = make("http", uri=web.url, headers={"X-Plant": "7"}, bearerTokenFile=str(token))
    with pytest.raises(Retry, match="cannot read the bearer token"):
        exporter.export(make_batch([b"x"]))
    for value in ("one", "two"):
        token.write_text(value + "\n", encoding="utf-8")
        deliver(exporter, make_batch([b"x"]))
    assert [head["authorization"] for head in web.headers] == ["Bearer one", "Bearer two"]
    assert web.headers[0]["x-plant"] == "7"


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("7", 7, 7),
        ("9" * 30, 300, 300),
        ("Wed, 21 Oct 2099 07:28:00 GMT", 300, 300),
        ("Wed, 21 Oct 2015 07:28:00 -0000", 0, 0),
        *((wrong, None, None) for wrong in ("1.5", "-1", "soon", "", "\u00b2")),
    ],
)
def test_http_waits_as_long_as_the_server_asks_for_in_seconds_or_as_a_date(
    web: Web, header: str, least: float | None, most: float | None
) -> None:
    web.status, web.retry_after = 503, header
    with pytest.raises(Retry) as caught:
        make("http", uri=web.url).export(make_batch([b"x"]))
    if least is None or most is None:
        assert caught.value.after is None
    else:
        assert caught.value.after is not None
        assert least <= caught.value.after <= most


def test_http_waits_until_the_date_that_the_server_names(web: Web) -> None:
    web.status, web.retry_after = 503, formatdate(time.time() + 250, usegmt=True)
    with pytest.raises(Retry) as caught:
        make("http", uri=web.url).export(make_batch([b"x"]))
    assert 0 < (caught.value.after or 0) <= 250


@pytest.mark.parametrize(
    "headers", [{"X": "a\r\nB: c"}, {"X": "\u20ac"}, {"X\n": "a"}, {"X A": "b"}, {"": "a"}]
)
def test_http_refuses_headers_that_cannot_be_sent(headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="headers: "):
        make("http", uri="http://host/", headers=headers)


@pytest.mark.parametrize("kind", ["kinesis", "firehose", "IotSitewise"])
def test_a_service_that_is_busy_at_one_of_several_requests_is_given_time(fake: FakeAws, kind: str) -> None:
    def taken(request: Any) -> Any:
        return getattr(fake, f"_{request.operation}")(request.parameters)

    options, payloads = {
        # Records of one key, and values for one time, go in a request each.
        "kinesis": ({"kinesisStreamName": "s", "partitionKey": "{topic}"}, [b"1", b"2"]),
        "firehose": ({"deliveryStreamName": "s"}, [b"x"] * 600),
        "IotSitewise": ({"propertyAlias": "/a", "time": str(int(time.time() * 1000))}, [b"1", b"2"]),
    }[kind]
    fake.faults = [taken, error(400, "ThrottlingException")]
    outcome = make(kind, endpointUrl=fake.url, **options).export(make_batch(payloads))
    assert outcome.retry
    assert (len(fake.requests), outcome.after) == (2, 1.0)


def test_http_speaks_tls_with_a_certificate_authority_of_its_own(web: Web, tmp_path: Path) -> None:
    key, cert = certificate(tmp_path, "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    web.server.socket = context.wrap_socket(web.server.socket, server_side=True)
    url = web.url.replace("http:", "https:")
    with pytest.raises(Retry, match=r"[Cc]ertificate|CERTIFICATE|SSL"):
        make("http", uri=url).export(make_batch([b"x"]))
    deliver(make("http", uri=url, caFile=str(cert)), make_batch([b"x"]))
    assert web.bodies == [b"x"]


def test_iot_analytics_without_a_redirection_waits_and_says_why() -> None:
    exporter = make("iotAnalytics", iotChannel="c")
    with pytest.raises(Retry, match="retired IoT Analytics") as caught:
        exporter.export(make_batch([b"x"]))
    assert (caught.value.after or 0) >= 60


def test_a_slow_answer_is_a_retry(fake: FakeAws) -> None:
    given_up = threading.Event()

    def slow(request: Any) -> None:
        given_up.wait(10)

    with fake.broken(slow), pytest.raises(Retry, match="no answer in time"):
        kinesis(fake, patience=0.2).export(make_batch([b"x"]))
    given_up.set()


@pytest.mark.parametrize("kind", ["kinesis", "firehose"])
def test_requests_are_filled_to_their_limits_in_order_and_not_beyond(fake: FakeAws, kind: str) -> None:
    """Whole and packed, at exactly the limit and a byte above it."""
    mib = 1024 * 1024
    if kind == "kinesis":
        most, largest = 10 * mib - 500 * 1024, 10 * mib - 1024
        exporters = [kinesis(fake)]
    else:
        most, largest = 4 * mib, 1000 * 1024
        exporters = [firehose(fake, delimiter=""), firehose(fake, delimiter="", packBytes=largest)]
    for exporter in exporters:
        for more in (0, 1):
            sizes = [largest // 2] * (most // (largest // 2))
            sizes += [most - sum(sizes) + more, 10]
            fake.requests.clear()
            fake.taken.clear()
            assert deliver(exporter, make_batch([bytes([n]) * size for n, size in enumerate(sizes)])) == {}
            sent = [
                b"".join(record["Data"] for record in parameters["Records"])
                for _, parameters in fake.requests
            ]
            assert b"".join(sent) == b"".join(bytes([n]) * size for n, size in enumerate(sizes))
            assert max(map(len, sent)) <= most
            assert len(sent) == 2
            assert max(len(record["Data"]) for record in fake.taken) <= largest
            if not more:
                assert len(sent[0]) == most, "as much as fits"
    fake.requests.clear()
    deliver(exporters[0], make_batch([bytes(most // 2 + 1)] * 3 if kind == "kinesis" else [bytes(10)] * 3))
    assert len(fake.requests) == (3 if kind == "kinesis" else 1)


@pytest.mark.parametrize(("fits", "more"), [(True, 0), (False, 1)])
def test_packed_records_are_filled_to_their_size(fake: FakeAws, fits: bool, more: int) -> None:
    deliver(firehose(fake, delimiter="", packBytes=100), make_batch([bytes(60), bytes(40 + more), b"x"]))
    sizes = [len(record["Data"]) for record in fake.taken]
    assert sizes == ([100, 1] if fits else [60, 42])


@pytest.mark.parametrize("kind", ["kinesis", "firehose"])
@pytest.mark.parametrize(
    ("code", "after"), [("ProvisionedThroughputExceededException", 1.0), ("InternalFailure", None)]
)
def test_an_error_of_one_batch_asks_for_its_wait_and_is_not_reported_for_the_next(
    fake: FakeAws, kind: str, code: str, after: float | None
) -> None:
    exporter = kinesis(fake) if kind == "kinesis" else firehose(fake)
    fake.faults = [partial(fake, lambda n, _: n in (2, 0), code)]
    first = attempt(exporter, make_batch([b"%d" % n for n in range(4)]))
    assert (list(first.retry), first.error, first.after) == ([0, 2], code, after)
    second = attempt(exporter, make_batch([b"a"]))
    assert (list(second.retry), second.error, second.after) == ([], "", None)
    if kind == "firehose":
        fake.faults = [partial(fake, lambda n, _: n == 0, "ServiceUnavailableException")]
        assert attempt(exporter, make_batch([b"a"])).after == 1.0
