"""`topics` of an export: which messages it gets, and what it makes of the others."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.aws import FakeAws
from bridge.operations.manager import committed
from bridge.plugin import discovery
from bridge.plugin.api import convert_config
from tests.export.harness import Gateway, numbers, recorded, running, until

EXPORTERS = discovery.load().exporters


def config(root: Path, *topics: str, **more: Any) -> dict[str, Any]:
    return {"recorder": [{"identifier": "out", "path": str(root / "out"), "topics": list(topics), **more}]}


async def publish(gateway: Gateway, name: str, *topics: str, payload: bytes = b"x") -> None:
    """Append a message for each topic, in one commit group."""
    stream = gateway.store.streams[name]
    for topic in topics:
        stream.append(topic.encode(), payload)
    await committed(stream)


def test_an_export_gets_the_messages_that_match_one_of_its_topics(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", config(recorder, "plant/+/temp", "alarm/#"))
            await publish(
                gateway, "a", "plant/1/temp", "plant/1/hum", "alarm", "plant/2/temp/raw", "alarm/x/y"
            )
            await gateway.append("a", b"without a topic")  # streams/a
            await gateway.exported("a", 5)
            assert gateway.status("a").skipped_messages_count == 3
            assert gateway.status("a").exported_messages_count == 3

    asyncio.run(scenario())
    assert numbers(recorder / "out") == [0, 2, 4]


def test_an_export_of_other_topics_frees_what_it_does_not_want(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", config(recorder, "wanted", lingerMillis=60_000), retention="exported")
            await publish(gateway, "a", *["other"] * 1000)
            await gateway.exported("a", 999)  # at once: there is nothing to wait for
            assert gateway.exports.exported_upto("a") == 1000

    asyncio.run(scenario())
    assert recorded(recorder / "out") == []


def test_few_messages_among_many_make_full_batches(recorder: Path) -> None:
    topics = ["wanted" if n % 1000 == 7 else "other" for n in range(20_000)]

    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", config(recorder, "wanted", batchSize=5, disabled=True))
            await publish(gateway, "a", *topics)
            gateway.update("a", config(recorder, "wanted", batchSize=5))
            await gateway.exported("a", 19_999)

    asyncio.run(scenario())
    batches = [found for _, _, found, _ in recorded(recorder / "out")]
    assert numbers(recorder / "out") == list(range(7, 20_000, 1000))
    assert [len(batch) for batch in batches] == [5] * 4


def test_a_batch_lingers_for_messages_of_its_topics_alone(recorder: Path) -> None:
    async def scenario() -> float:
        async with running(recorder) as gateway:
            gateway.create("a", config(recorder, "wanted", batchSize=3, lingerMillis=3000))
            began = time.time()
            await publish(gateway, "a", "wanted", "other", "other", "other")
            await publish(gateway, "a", "other", "wanted")
            await until(lambda: recorded(recorder / "out"))
            gateway.update("a", config(recorder, "wanted", batchSize=3, lingerMillis=3_600_000))
            await publish(gateway, "a", "wanted", "wanted", "other", "wanted")
            await gateway.exported("a", 9)
            return began

    began = asyncio.run(scenario())
    (_, _, late, at), (_, _, full, _) = recorded(recorder / "out")
    assert (late, full) == ([0, 5], [6, 7, 9])
    assert at - began >= 3 - 0.05  # more than batchSize were pending, but not of its topics


@pytest.mark.parametrize("size", [10, 2_000_000])
def test_a_batch_is_the_same_after_the_worker_has_died(recorder: Path, size: int) -> None:
    once = recorder / "once"

    async def scenario() -> None:
        async with running(recorder) as gateway:
            more = {"fault": "leave", "once": str(once), "batchSize": 4}
            gateway.create("a", config(recorder, "wanted", disabled=True))
            for n in range(10):
                await publish(gateway, "a", *["other"] * (n % 3), "wanted", payload=bytes(size))
            gateway.update("a", config(recorder, "wanted", **more))
            await gateway.exported("a", gateway.store.streams["a"].next_sequence - 1)

    asyncio.run(scenario())
    tried = [tuple(map(int, line.split())) for line in (recorder / "out.attempts").read_text().splitlines()]
    batches = recorded(recorder / "out")
    assert (batches[0][0], batches[0][1]) == tried[0]
    assert numbers(recorder / "out") == [0, 2, 5, 6, 8, 11, 12, 14, 17, 18]


def test_other_topics_may_be_changed_at_any_time(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", config(recorder, "one"))
            await publish(gateway, "a", "one", "two")
            await gateway.exported("a", 1)
            gateway.update("a", config(recorder, "two"))
            await publish(gateway, "a", "one", "two")
            await gateway.exported("a", 3)
            gateway.update("a", config(recorder))
            await publish(gateway, "a", "one", "two")
            await gateway.exported("a", 5)

    asyncio.run(scenario())
    assert numbers(recorder / "out") == [0, 3, 4, 5]


def test_drops_among_other_topics_are_skipped_like_these(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", config(recorder, "wanted", disabled=True))
            await publish(gateway, "a", *["wanted", "other"] * 50)
            await gateway.manager.purge("a", upto=50)
            gateway.update("a", config(recorder, "wanted"))
            await gateway.exported("a", 99)
            assert gateway.status("a").skipped_messages_count == 50 + 25

    asyncio.run(scenario())
    assert numbers(recorder / "out") == list(range(50, 100, 2))


def test_upload_tasks_of_other_topics_are_no_tasks(tmp_path: Path) -> None:
    tasks = {
        "identifier": "up",
        "topics": ["tasks"],
        "statusConfig": {"statusStreamName": "status", "statusLevel": 4},
    }

    async def scenario() -> list[Any]:
        async with running(tmp_path) as gateway:
            gateway.create("status", {})
            gateway.create("a", {"s3TaskExecutor": [{**tasks, "disabled": True}]})
            await publish(gateway, "a", "other", "other", "tasks", "other", payload=b"no task")
            await gateway.manager.purge("a", upto=1)
            gateway.update("a", {"s3TaskExecutor": [tasks]})
            await gateway.exported("a", 3)
            return [json.loads(message) for message in gateway.read("status")]

    reported = asyncio.run(scenario())
    assert {message["statusContext"]["sequenceNumber"] for message in reported} <= {0, 2}
    assert 2 in {message["statusContext"]["sequenceNumber"] for message in reported}


@pytest.mark.parametrize("kind", ["kinesis", "firehose", "http", "IotSitewise", "consumer", "s3"])
def test_a_wrong_filter_is_refused_by_every_kind(kind: str) -> None:
    more = {
        "kinesis": {"kinesisStreamName": "s"},
        "firehose": {"deliveryStreamName": "s"},
        "http": {"uri": "http://127.0.0.1:1/"},
        "s3": {"bucket": "bucket"},
    }
    base = {"identifier": "x", **more.get(kind, {})}
    assert convert_config(EXPORTERS[kind], {**base, "topics": ["a/+", "#"]}).topics == ["a/+", "#"]
    with pytest.raises(ValueError, match="topics: 'a/#/b' is not a topic filter"):
        convert_config(EXPORTERS[kind], {**base, "topics": ["ok", "a/#/b"]})


def test_kinesis_gets_only_its_topics(tmp_path: Path) -> None:
    fake = FakeAws()
    kinesis = {"identifier": "k", "kinesisStreamName": "s", "endpointUrl": fake.url, "topics": ["plant/#"]}

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("a", {"kinesis": [{**kinesis, "partitionKey": "{topic}"}]})
            await publish(gateway, "a", "plant/1", "office/1", "plant/2", "plantation")
            await gateway.exported("a", 3)

    try:
        asyncio.run(scenario())
        assert [record["PartitionKey"] for record in fake.taken] == ["plant/1", "plant/2"]
    finally:
        fake.close()
