"""A stream's state in one request: descriptions in full, lists with details, the last value per topic."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import cbor2
import pytest

from bridge.access.rules import AccessRule
from tests.mqtt.harness import Bridge, Client, bridge_test, publish

DEFINITION = {"strategyOnFull": 0, "maxSize": 1 << 20, "streamSegmentSize": 1 << 16}


async def ask(client: Client, operation: str, **fields: Any) -> dict[str, Any]:
    client.send(publish(f"streambridge/c/{operation}", cbor2.dumps(fields), level=client.level))
    reply: dict[str, Any] = cbor2.loads((await client.message()).payload)
    return reply


async def last(client: Client, **options: Any) -> list[tuple[str, bytes]]:
    options = {"lastPerTopic": True, **options}
    reply = await ask(client, "readMessages", streamName="s", readMessagesOptions=options)
    assert reply["status"] == 0, reply
    return [(message["topic"], message["payload"]) for message in reply["messages"]]


@bridge_test
async def test_a_description_has_what_a_stream_holds_its_times_and_what_it_is_for(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    definition = {"name": "d", "topics": ["d/#"], **DEFINITION, "limits": {"maxMessagesPerTopic": 2}}
    more = {"description": "Pumps of line 3", "tags": {"site": "north", "line": "3"}}
    assert (await ask(client, "createMessageStream", definition=definition | more))["status"] == 0
    info = (await ask(client, "describeMessageStream", name="d"))["messageStreamInfo"]
    assert info["definition"]["description"] == "Pumps of line 3"
    assert info["definition"]["tags"] == {"site": "north", "line": "3"}
    assert (info["messages"], info["oldestIngestTime"], info["newestIngestTime"]) == (0, None, None)
    for number, topic in enumerate(("d/a", "d/b", "d/a", "d/a", "d/b"), 1):
        await client.exchange(publish(topic, b"x", 1, number))
    stored = await bridge.manager.read("d", max_bytes=1 << 20)
    info = (await ask(client, "describeMessageStream", name="d"))["messageStreamInfo"]
    assert (info["messages"], info["topicCount"]) == (4, 2), "the first a is gone"
    assert info["oldestIngestTime"] == stored[0].ingest_time
    newest = info["newestIngestTime"]
    assert newest >= info["oldestIngestTime"] > 1_600_000_000_000
    await bridge.manager.purge("d", topic="d/b")
    info = (await ask(client, "describeMessageStream", name="d"))["messageStreamInfo"]
    assert (info["messages"], info["topicCount"]) == (2, 1)
    assert info["storageStatus"]["newestSequenceNumber"] == 4
    assert info["newestIngestTime"] <= newest, "that of the newest message that is left"
    await bridge.manager.purge("d")
    info = (await ask(client, "describeMessageStream", name="d"))["messageStreamInfo"]
    assert (info["messages"], info["oldestIngestTime"], info["newestIngestTime"]) == (0, None, None)
    assert (await ask(client, "describeMessageStream", name="s"))["messageStreamInfo"]["topicCount"] is None
    for wrong in ({"tags": {"No": "x"}}, {"tags": {"a-b": "x"}}, {"description": "x" * 1001}):
        reply = await ask(client, "updateMessageStream", definition=definition | wrong)
        assert reply["statusName"] == "InvalidRequest"


@bridge_test(max_packet=64 * 1024, acl=[AccessRule(publish=["streambridge/%c/+"], read=["streams/+"])])
async def test_streams_are_listed_in_parts_with_their_descriptions_as_many_as_fit(bridge: Bridge) -> None:
    names = [f"n{number:03}" for number in range(150)]
    for name in names:
        bridge.stream(name, description="x" * 400)
    client = await bridge.connect("c")
    plain = await ask(client, "listStreams")
    assert plain == {"requestId": "", "status": 0, "statusName": "Success", "streams": [*names, "s"]}
    part = await ask(client, "listStreams", after="n147", limit=2)
    assert (part["streams"], part["more"]) == (["n148", "n149"], True)
    part = await ask(client, "listStreams", after="n148", limit=2)
    assert (part["streams"], part["more"]) == (["n149", "s"], False)
    seen, requests, after = list[str](), 0, ""
    while True:
        part = await ask(client, "listStreams", details=True, after=after)
        infos = part["messageStreamInfos"]
        assert [info["definition"]["name"] for info in infos] == part["streams"]
        seen += part["streams"]
        requests, after = requests + 1, seen[-1]
        if not part["more"]:
            break
    assert seen == [*names, "s"]
    assert 2 <= requests < 10
    assert infos[-1] == (await ask(client, "describeMessageStream", name="s"))["messageStreamInfo"]


@bridge_test(acl=[AccessRule(publish=["streambridge/%c/+"], read=["streams/mine"])])
async def test_details_are_those_of_the_streams_that_a_client_may_describe(bridge: Bridge) -> None:
    bridge.stream("mine")
    client = await bridge.connect("c")
    listed = await ask(client, "listStreams", details=True)
    assert (listed["streams"], listed["more"], len(listed["messageStreamInfos"])) == (["mine"], False, 1)


@bridge_test
async def test_the_state_of_all_devices_is_one_request(bridge: Bridge) -> None:
    bridge.manager.update(
        {"name": "s", "strategyOnFull": 0, "topics": ["in/#"], "limits": {"maxMessagesPerTopic": 2}}
    )
    client = await bridge.connect("c")
    sent = [("in/a/t", b"1"), ("in/b/t", b"2"), ("in/a/t", b"3"), ("in/a/h", b"4"), ("in/a/t", b"5")]
    for number, (topic, payload) in enumerate(sent, 1):
        await client.exchange(publish(topic, payload, 1, number))
    assert await last(client) == [("in/b/t", b"2"), ("in/a/h", b"4"), ("in/a/t", b"5")]
    assert await last(client, topic="in/+/t") == [("in/b/t", b"2"), ("in/a/t", b"5")]
    assert await last(client, maxMessageCount=2) == [("in/b/t", b"2"), ("in/a/h", b"4")]
    assert await last(client, desiredStartSequenceNumber=4) == [("in/a/t", b"5")]
    await bridge.manager.purge("s", topic="in/a/t")
    assert await last(client) == [("in/b/t", b"2"), ("in/a/h", b"4")]
    for options, text in (
        ({"topic": "in/x"}, "0 of the 1 requested topics"),
        ({"readTimeoutMillis": 5}, "does not wait"),
    ):
        options = {"lastPerTopic": True, **options}
        reply = await ask(client, "readMessages", streamName="s", readMessagesOptions=options)
        assert text in reply["errorMessage"]
    bridge.stream("other", "other")
    reply = await ask(client, "readMessages", streamName="other", readMessagesOptions={"lastPerTopic": True})
    assert "maxMessagesPerTopic" in reply["errorMessage"]


@bridge_test
async def test_every_topic_is_in_the_state_while_all_of_them_change(bridge: Bridge) -> None:
    limits = {"maxMessagesPerTopic": 1}
    bridge.manager.update({"name": "s", "strategyOnFull": 0, "topics": ["in/#"], "limits": limits})
    stream = bridge.store.streams["s"]
    topics = [b"in/%d" % number for number in range(300)]
    stop = False

    async def change() -> None:
        while not stop:
            for topic in topics:
                stream.append(topic, b"x")
            await asyncio.sleep(0)

    for topic in topics:
        stream.append(topic, b"x")
    client = await bridge.connect("c")
    task = asyncio.create_task(change())
    for _ in range(5):
        found = [topic for topic, _ in await last(client, maxMessageCount=1000)]
        assert {*found} == {topic.decode() for topic in topics}
        await asyncio.sleep(0)
    stop = True
    await task


@bridge_test
async def test_the_state_costs_topics_and_not_messages(bridge: Bridge) -> None:
    limits = {"maxMessagesPerTopic": 1000}
    bridge.manager.update({"name": "s", "strategyOnFull": 0, "topics": ["in/#"], "limits": limits})
    client = await bridge.connect("c")
    payloads = [b"x" * 400] * 100
    for _ in range(100):
        await bridge.manager.append_all("s", payloads)
    await client.exchange(publish("in/a", b"a", 1, 1))
    await last(client)  # opens the files
    read = 0
    pread = os.pread

    def counting(fd: int, size: int, offset: int) -> bytes:
        nonlocal read
        data = pread(fd, size, offset)
        read += len(data)
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", counting)
        assert [topic for topic, _ in await last(client)] == ["streams/s", "in/a"]
    assert bridge.store.streams["s"].live_messages() == 1001
    assert 0 < read < 200_000 < bridge.store.streams["s"].total_bytes
