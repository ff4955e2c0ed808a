"""Kinesis in gzip: what a message costs on the wire, what a record has inside, and the order of each key."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.testbed.aws import Answer, FakeAws, Request, error, partial
from benchmarks.testbed.forwarder import Forwarder
from benchmarks.wire import vibration
from bridge import Batch, Context, Exporter, Record
from bridge.plugin import discovery
from bridge.plugin.api import convert_config
from bridge.plugin.testing import deliver, make_batch
from tests.export.destinations import unpacked

EXPORTERS = discovery.load().exporters


@pytest.fixture
def fake() -> Iterator[FakeAws]:
    server = FakeAws()
    yield server
    server.close()


def kinesis(url: str, **options: Any) -> Exporter:
    base = {"identifier": "k", "kinesisStreamName": "plant", "compression": "gzip", "endpointUrl": url}
    return EXPORTERS["kinesis"](convert_config(EXPORTERS["kinesis"], base | options), Context())


def batch_of(rows: list[tuple[str, bytes]]) -> Batch:
    records = [Record(n, 1_795_000_000_000, topic, payload) for n, (topic, payload) in enumerate(rows)]
    return Batch("gw-1", "plant", 1, 0, len(records) - 1, records)


@pytest.mark.parametrize("messages", [80, 500])  # ten seconds of eight sensors, and a full batch
def test_a_message_of_200_bytes_takes_at_most_120_on_the_wire(fake: FakeAws, messages: int) -> None:
    rows = [(topic, json.dumps(row, separators=(",", ":")).encode()) for _, topic, row in vibration(2)]
    rows = rows[:messages]
    assert sum(len(payload) for _, payload in rows) / messages >= 200
    forwarder = Forwarder(fake.url)
    try:
        exporter = kinesis(forwarder.url)
        assert deliver(exporter, batch_of(rows)) == {}
        exporter.close()
        assert forwarder.passed / messages <= 120  # with the answer
    finally:
        forwarder.close()
    (record,) = fake.taken
    assert unpacked(record["Data"]) == [payload for _, payload in rows]


@pytest.mark.parametrize("record", ["json", '{"n":{sequence_number},"v":{payload}}'])
def test_messages_in_json_are_lines(fake: FakeAws, record: str) -> None:
    payloads = [b'{"a":\n1}', b"no json\n", b"\xc3\xa9"]
    deliver(kinesis(fake.url, record=record), make_batch(payloads))
    (taken,) = fake.taken
    lines = [json.loads(line) for line in gzip.decompress(taken["Data"]).splitlines()]
    assert [line.get("n", line.get("sequence_number")) for line in lines] == [0, 1, 2]


@pytest.mark.parametrize(
    ("record", "first"),
    [
        ("payload", b"\n\x00{"),
        ("cbor", {"payload": b"\n\x00{", "topic": "t"}),
        ("{topic}:{payload}", b"t:\n\x00{"),
    ],
)
def test_other_messages_are_a_sequence_of_cborunpacked(fake: FakeAws, record: str, first: Any) -> None:
    deliver(kinesis(fake.url, record=record), batch_of([("t", b"\n\x00{"), ("t", b"")]))
    (taken,) = fake.taken
    items = unpacked(taken["Data"])
    assert len(items) == 2
    assert items[0] == first or first.items() <= items[0].items()


def test_a_template_of_several_lines_is_refused() -> None:
    with pytest.raises(ValueError, match="record: the template has a line break"):
        kinesis("http://127.0.0.1:9", record='{"n":{sequence_number},\n"v":{payload}}')


def test_messages_of_one_key_share_a_record_in_order(fake: FakeAws) -> None:
    deliver(
        kinesis(fake.url, partitionKey="{topic}"), batch_of([(f"line/{n % 3}", b"%d" % n) for n in range(12)])
    )
    assert len(fake.requests) == 1
    found = {record["PartitionKey"]: unpacked(record["Data"]) for record in fake.taken}
    assert found == {f"line/{key}": [b"%d" % n for n in range(key, 12, 3)] for key in range(3)}


def test_a_record_stays_below_the_limit_of_a_stream(fake: FakeAws) -> None:
    payloads = [random.randbytes(size) for size in [300_000] * 10 + [2080] * 490]
    deliver(kinesis(fake.url), make_batch(payloads))
    assert [item for record in fake.taken for item in unpacked(record["Data"])] == payloads
    assert len(fake.taken) <= 6
    assert all(len(record["Data"]) <= 1 << 20 for record in fake.taken)


def test_a_bad_message_of_a_record_is_rejected_alone(fake: FakeAws) -> None:
    payloads = [b"poison" if n == 5 else b"message %d" % n for n in range(20)]
    assert deliver(kinesis(fake.url, partitionKey="{stream}"), make_batch(payloads)).keys() == {5}
    found = [item for record in fake.taken for item in unpacked(record["Data"])]
    assert found == [payload for payload in payloads if payload != b"poison"]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("compression", ["gzip", None], ids=["packed", "singly"])
def test_messages_of_one_key_stay_in_order_whatever_fails(
    fake: FakeAws, seed: int, compression: str | None
) -> None:
    """Records fail at random, whole requests fail, and messages are refused: five batches of 40."""
    chance = random.Random(seed)
    exporter = kinesis(fake.url, partitionKey="{topic}", compression=compression)
    bad = set(chance.sample(range(200), 3))

    def fault(request: Request) -> Answer:
        draw = chance.random()
        if draw < 0.1:
            return error(500, "InternalFailure")(request)
        contents = [unpacked(record["Data"]) for record in request.parameters["Records"]]
        if any(b"poison" in item for items in contents for item in items):
            return 400, {"__type": "InvalidArgumentException", "message": "poison"}
        code = "ProvisionedThroughputExceededException"
        return partial(fake, lambda n, record: chance.random() < 0.3, code)(request)

    fake.while_broken = fault
    rejected: set[int] = set()
    for first in range(0, 200, 40):
        records = [
            Record(n, 0, f"line/{chance.randrange(6)}", b"poison %d" % n if n in bad else b"%d" % n)
            for n in range(first, first + 40)
        ]
        rejected |= deliver(
            exporter, Batch("gw", "plant", 1, first, first + 39, records), attempts=100
        ).keys()
    exporter.close()
    by_key: dict[str, list[int]] = {}
    for record in fake.taken:
        by_key.setdefault(record["PartitionKey"], []).extend(int(item) for item in unpacked(record["Data"]))
    assert rejected == bad
    assert sorted(n for numbers in by_key.values() for n in set(numbers)) == [
        n for n in range(200) if n not in bad
    ]
    for numbers in by_key.values():
        newest = -1
        for number in numbers:  # again is allowed, after an answer that was an error; ahead of another is not
            assert number <= newest or number == min(n for n in numbers if n > newest)
            newest = max(newest, number)
