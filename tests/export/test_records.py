"""The option `record`: what an export sends for a message."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from typing import Any

import boto3
import cbor2
import msgspec
import pytest

from benchmarks.testbed.aws import FakeAws, partial
from benchmarks.testbed.web import Web
from bridge import Batch, Context, Exporter, Record
from bridge.plugin import discovery
from bridge.plugin.api import convert_config
from bridge.plugin.records import RecordEncoder
from bridge.plugin.testing import deliver, make_batch
from tests.export.harness import Bucket

EXPORTERS = discovery.load().exporters
CLIENT = msgspec.msgpack.encode({"client": "press-7"})
BASE: dict[str, dict[str, Any]] = {
    "kinesis": {"kinesisStreamName": "s"},
    "firehose": {"deliveryStreamName": "s"},
    "http": {"uri": "http://127.0.0.1:1/"},
}


@pytest.fixture
def fake() -> Iterator[FakeAws]:
    server = FakeAws()
    yield server
    server.close()


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    yield server
    server.close()


def make(kind: str, **config: Any) -> Exporter:
    cls = EXPORTERS[kind]
    return cls(convert_config(cls, {"identifier": "x", **BASE.get(kind, {}), **config}), Context())


def batch_of(payload: bytes, topic: str = "plant/7/temp", headers: bytes = b"") -> Batch:
    record = Record(41, 1_767_225_600_123, topic, payload, headers)
    return Batch("gw", "plant", 1_700_000_000_000, 41, 41, [record])


def encoded(record: str, payload: bytes, **more: Any) -> bytes:
    (data,), rejected = RecordEncoder(record).encode(batch_of(payload, **more))
    assert not rejected
    return data


ROW = {
    "gateway": "gw",
    "stream": "plant",
    "epoch": "1700000000000",
    "sequence_number": 41,
    "ingest_time": "2026-01-01T00:00:00.123Z",
    "topic": "plant/7/temp",
}


def test_json_has_the_entries_and_cbor_the_same_with_the_payload_in_bytes() -> None:
    payload = b"\xff\x00{}"
    row = json.loads(encoded("json", payload))
    assert list(row) == [*ROW, "payload"]
    assert row == {**ROW, "payload": base64.b64encode(payload).decode()}
    assert cbor2.loads(encoded("cbor", payload)) == {**ROW, "payload": payload}
    assert encoded("payload", payload) == payload


def test_a_record_in_json_is_the_line_of_the_s3_exporter(bucket: Bucket) -> None:
    batch = make_batch([b"a", b"\xff", b"{}"])
    s3 = make("s3", bucket=bucket.name, endpointUrl=bucket.url)
    assert deliver(s3, batch) == {}
    (key,) = bucket.data_keys()
    lines, _ = RecordEncoder("json").encode(batch)
    assert gzip.decompress(bucket.body(key)).splitlines() == lines


@pytest.mark.parametrize(
    ("template", "payload", "made"),
    [
        ('{"t":"{topic}","v":{payload}}', b'{"t": 21.50}', '{"t":"plant/7/temp","v":{"t":21.50}}'),
        ('{"v":{payload}}', b"21.5", '{"v":21.5}'),
        ('{"v":{payload}}', b"on", '{"v":"on"}'),
        ('{"v":{payload}}', b'say "on"\n', '{"v":"say \\"on\\"\\n"}'),
        ('{"v":"{payload}"}', b'{"temp": 21.50}', '{"v":"{\\"temp\\": 21.50}"}'),
        ('{"v":"{base64}"}', b"\xff\x00", '{"v":"/wA="}'),
        ('{"v":{base64}}', b"\xff\x00", '{"v":"/wA="}'),
        ('{"t":{topic/1},"n":{sequence_number},"e":{epoch}}', b"", '{"t":"7","n":41,"e":"1700000000000"}'),
        ('{"a":{json:/a},"b":"{json:/a}"}', b'{"a": 2.5}', '{"a":2.5,"b":"2.5"}'),
        ('{"a":{json:/a},"b":"{json:/a}"}', b'{"a": [1, "x"]}', '{"a":[1,"x"],"b":"[1,\\"x\\"]"}'),
        ('{"a":{json:/a},"b":"{json:/a}"}', b'{"a": null}', '{"a":null,"b":""}'),
        ('{"a":{json:/a},"b":"{json:/a}"}', b"no json", '{"a":null,"b":""}'),
        ('{"a":{topic/9},"c":{client},"d":"{client}"}', b"", '{"a":null,"c":null,"d":""}'),
        ('{"a":{"b":{"c":{topic}},"d":{}}}', b"", '{"a":{"b":{"c":"plant/7/temp"},"d":{}}}'),
        ('{"say \\"{topic/0}\\"":1}', b"", '{"say \\"plant\\"":1}'),
        ('{"\\\\":{topic/0}}', b"", '{"\\\\":"plant"}'),
        ("[{ingest_time},{ingest_millis}]", b"", '["2026-01-01T00:00:00.123Z",1767225600123]'),
        ('{{topic}: {gateway}, "{stream}-x": 1}', b"", '{"plant/7/temp": "gw", "plant-x": 1}'),
    ],
)  # fmt: skip
def test_a_json_template_always_makes_json(template: str, payload: bytes, made: str) -> None:
    assert encoded(template, payload).decode() == made
    json.loads(made)


def test_values_from_outside_cannot_leave_their_quotes() -> None:
    evil = 'x","admin":true,"y":"\\'
    row = json.loads(encoded('{"t":"{topic}","v":"{json:/a}"}', json.dumps({"a": evil}).encode(), topic=evil))
    assert row == {"t": evil, "v": evil}


@pytest.mark.parametrize(
    "payload", [b"[" * 100_000 + b"]" * 100_000, b"1e999", b'"\\ud800"', b"NaN", b"1 2", b""]
)
def test_payloads_that_only_look_like_json_do_no_harm(payload: bytes) -> None:
    made = encoded('{"v":{payload},"m":{json:/a/0}}', payload)
    assert json.loads(made)["m"] is None


@pytest.mark.parametrize(
    ("template", "payload", "made"),
    [
        ("{payload}", b"\xff", b"\xff"),
        ("{topic/1};{payload}", b"a;\xff", b"7;a;\xff"),
        ("temp,press={topic/1} v={json:/t} {ingest_millis}", b'{"t":21}', b"temp,press=7 v=21 1767225600123"),
        ("{client}|{json:/a}|{}|}", b"", b"press-7||{}|}"),
    ],
)  # fmt: skip
def test_a_text_template_puts_values_in_as_they_are(template: str, payload: bytes, made: bytes) -> None:
    assert encoded(template, payload, headers=CLIENT) == made


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("jsn", "'jsn' is not `payload`, `json` or `cbor`, and has no field"),
        ("", "has no field"),
        ('{"t":"{topik}"}', r"\{topik\} is not a field; known fields: \{topic\}"),
        ('{"t":{Topic}}', r"\{Topic\} is not a field"),
        ('{"t":{topic/x}}', r"\{topic/x\} is not a field"),
        ('{"t":{json:a}}', r"\{json:a\} is not a field"),
        ('{"t":{topic}', "does not make JSON"),
        ('{"t":1{payload}}', "does not make JSON"),
        ("{{topic/1}:1}", "does not make JSON"),
        ("{{payload}:1}", "does not make JSON"),
        ('{"t":"\\{topic/0}"}', r"a backslash cannot escape the field \{topic/0\}"),
        ('{"t":{topic}\\', "does not make JSON"),
    ],
)
@pytest.mark.parametrize("kind", list(BASE))
def test_a_wrong_record_is_refused_when_it_is_configured(kind: str, record: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"record: .*{reason}"):
        make(kind, record=record)


def test_a_payload_that_is_not_text_is_rejected_where_json_needs_it() -> None:
    batch = make_batch([b"a", b"\xff", b"b"])
    made, rejected = RecordEncoder('{"v":{payload}}').encode(batch)
    assert made == [b'{"v":"a"}', b"", b'{"v":"b"}']
    assert rejected == {1: "{payload}: the payload is not UTF-8; {base64} takes any"}


# --- Kinesis


def test_kinesis_gives_back_what_tells_messages_apart(moto: str) -> None:
    client = boto3.client("kinesis", endpoint_url=moto)
    client.create_stream(StreamName="apart", ShardCount=1)
    exporter = make("kinesis", kinesisStreamName="apart", endpointUrl=moto, record="json")
    batch = make_batch([b"%d" % n for n in range(5)])
    for _ in range(2):
        assert deliver(exporter, batch) == {}
    shard = client.describe_stream(StreamName="apart")["StreamDescription"]["Shards"][0]["ShardId"]
    where = {"StreamName": "apart", "ShardId": shard, "ShardIteratorType": "TRIM_HORIZON"}
    iterator = client.get_shard_iterator(**where)["ShardIterator"]
    rows = [json.loads(record["Data"]) for record in client.get_records(ShardIterator=iterator)["Records"]]
    assert len(rows) == 10
    key = ("gateway", "stream", "epoch", "sequence_number")
    once = {tuple(row[name] for name in key): row["payload"] for row in rows}
    assert [base64.b64decode(payload) for payload in once.values()] == [b"%d" % n for n in range(5)]


def test_kinesis_splits_a_request_that_records_make_too_large(fake: FakeAws) -> None:
    exporter = make("kinesis", endpointUrl=fake.url, record="json")
    payloads = [bytes(900_000)] * 10 + [bytes(8 * 1024 * 1024)] + [b"last"]
    rejected = deliver(exporter, make_batch(payloads), attempts=1)
    assert list(rejected) == [10]
    assert "larger than 10484736 bytes" in rejected[10]
    assert [len(parameters["Records"]) for _, parameters in fake.requests] == [8, 3]


def test_kinesis_keeps_the_order_of_a_key_over_split_requests_that_fail_in_part(fake: FakeAws) -> None:
    records = [Record(n, 0, f"line/{n % 3}", b"%d" % n + bytes(1_500_000)) for n in range(24)]
    batch = Batch("gw", "plant", 1, 0, 23, records)
    fake.faults = [partial(fake, lambda n, _: n == 0, "InternalFailure")] * 6
    exporter = make("kinesis", endpointUrl=fake.url, record="json", partitionKey="{topic}")
    assert deliver(exporter, batch) == {}
    by_key: dict[str, list[int]] = {}
    for taken in fake.taken:
        by_key.setdefault(taken["PartitionKey"], []).append(json.loads(taken["Data"])["sequence_number"])
    assert by_key == {f"line/{k}": list(range(k, 24, 3)) for k in range(3)}


# --- Firehose


def test_firehose_rejects_what_is_too_large_as_a_record(fake: FakeAws) -> None:
    exporter = make("firehose", endpointUrl=fake.url, record="json")
    rejected = deliver(exporter, make_batch([b"a", bytes(800 * 1024), b"b"]))
    assert list(rejected) == [1]
    assert "larger than 1023999 bytes" in rejected[1]
    assert all(record["Data"].endswith(b"}\n") for record in fake.taken)
    assert len(fake.taken) == 2


# --- HTTP


@pytest.mark.parametrize(
    ("record", "content_type"),
    [
        ("payload", "application/octet-stream"),
        ("json", "application/json"),
        ("cbor", "application/cbor"),
        ('{"v":{payload}}', "application/json"),
        ("{topic} {payload}", "text/plain; charset=utf-8"),
    ],
)
def test_http_names_the_type_of_what_it_sends(web: Web, record: str, content_type: str) -> None:
    assert deliver(make("http", uri=web.url, record=record), make_batch([b"1"])) == {}
    assert [head["content-type"] for head in web.headers] == [content_type]


def test_http_sends_the_type_that_headers_name_and_no_other(web: Web) -> None:
    received: list[list[str]] = []
    handler = web.server.RequestHandlerClass
    original = handler.do_POST  # type: ignore[attr-defined]

    def noting(self: Any) -> None:
        received.append(self.headers.get_all("Content-Type"))
        original(self)

    handler.do_POST = noting  # type: ignore[attr-defined]
    exporter = make("http", uri=web.url, record="json", headers={"content-type": "application/x-plant"})
    assert deliver(exporter, make_batch([b"1"])) == {}
    assert received == [["application/x-plant"]]


def test_http_sends_a_batch_of_records_as_a_list(web: Web) -> None:
    batch = make_batch([b"1", b"\xff", b"x"])
    template = '{"n":{sequence_number},"v":{payload}}'
    assert list(deliver(make("http", uri=web.url, exportFormat=1, record=template), batch)) == [1]
    assert json.loads(web.bodies[0]) == [{"n": 0, "v": 1}, {"n": 2, "v": "x"}]
    assert deliver(make("http", uri=web.url, exportFormat=1, record="cbor"), batch) == {}
    assert [row["payload"] for row in cbor2.loads(web.bodies[1])] == [b"1", b"\xff", b"x"]
    assert [head["content-type"] for head in web.headers] == ["application/json", "application/cbor"]


def test_http_refuses_a_list_of_records_that_are_text() -> None:
    with pytest.raises(ValueError, match="record: the template makes text, and exportFormat 1 needs"):
        make("http", exportFormat=1, record="{topic} {payload}")
