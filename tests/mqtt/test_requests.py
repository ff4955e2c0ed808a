"""The operations on streams as requests over MQTT."""

from __future__ import annotations

import base64
import json
from typing import Any

import cbor2

from bridge.access.rules import AccessRule
from bridge.mqtt.wire.packets import V5
from bridge.mqtt.wire.properties import CORRELATION_DATA, RESPONSE_TOPIC

from .harness import Bridge, Client, bridge_test, publish, until


async def ask(client: Client, name: str, operation: str, body: bytes) -> bytes:
    client.send(publish(f"streambridge/{name}/{operation}", body, level=client.level))
    reply = await client.message()
    assert reply.topic == f"streambridge/{name}/{operation}/reply"
    return reply.payload


async def in_json(client: Client, operation: str, **fields: Any) -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(await ask(client, "c", operation, json.dumps(fields).encode()))
    return reply


async def in_cbor(client: Client, operation: str, **fields: Any) -> dict[str, Any]:
    reply: dict[str, Any] = cbor2.loads(await ask(client, "c", operation, cbor2.dumps(fields)))
    return reply


@bridge_test
async def test_every_operation_works_in_json_and_in_cbor(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    for request, raw in ((in_json, lambda data: base64.b64encode(data).decode()), (in_cbor, bytes)):
        name = request.__name__
        definition = {"name": name, "strategyOnFull": 1, "topics": [f"bound/{name}"]}
        reply = await request(client, "createMessageStream", requestId="1", definition=definition)
        assert reply == {"requestId": "1", "status": 0, "statusName": "Success"}
        reply = await request(client, "appendMessage", requestId="2", name=name, payload=raw(b"\0\xff"))
        assert reply["sequenceNumber"] == 0
        reply = await request(client, "appendMessages", name=name, payloads=[raw(b"a"), raw(b"b")])
        assert reply["sequenceNumbers"] == [1, 2]
        options = {"desiredStartSequenceNumber": 0, "minMessageCount": 3}
        reply = await request(client, "readMessages", streamName=name, readMessagesOptions=options)
        assert [(m["sequenceNumber"], m["payload"]) for m in reply["messages"]] == [
            (0, raw(b"\0\xff")), (1, raw(b"a")), (2, raw(b"b")),
        ]  # fmt: skip
        assert reply["messages"][0]["streamName"] == name
        reply = await request(client, "describeMessageStream", name=name)
        assert reply["messageStreamInfo"]["storageStatus"]["newestSequenceNumber"] == 2
        assert name in (await request(client, "listStreams"))["streams"]
        reply = await request(client, "updateMessageStream", definition={**definition, "maxSize": 1 << 30})
        assert reply["status"] == 0
        assert (await request(client, "purgeMessageStream", name=name, upto=2))["purgedMessages"] == 2
        assert (await request(client, "deleteMessageStream", name=name))["status"] == 0
        assert (await request(client, "describeMessageStream", name=name))["statusName"] == "ResourceNotFound"


@bridge_test
async def test_nonsense_gets_an_error_reply_that_says_what_is_wrong(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    for operation, body, status, text in (
        ("listStreams", b"{", 3, "truncated"),
        ("listStreams", b"\xa1", 3, "CBOR"),
        ("listStreams", b"\xbf" * 5000, 3, "CBOR"),
        ("listStreams", b"\xa1\x61a\xd8\x1e\x82\x01\x02", 3, "tags"),
        ("listStreams", b"[1]", 3, "object"),
        ("listStreams", b'{"requestId": "\xff"}', 3, "utf-8"),
        ("noSuchThing", b"{}", 18, "createMessageStream"),
        ("appendMessage", b'{"name": "s"}', 3, "payload"),
        ("appendMessage", b'{"name": "s", "payload": "YQ==", "mesageId": "YQ=="}', 3, "`mesageId`"),
        ("listStreams", b'{"name": "s"}', 3, "known are: requestId"),
        ("createMessageStream", b'{"definition": {"name": "x", "strategyOnFull": 0, "a": 1}}', 3, "`a`"),
        ("readMessages", b'{"streamName": "s", "readMessagesOptions": {"min": 1}}', 3, "`min`"),
        ("purgeMessageStream", b'{"name": "s", "topics": "x"}', 3, "`topics`"),
        ("appendMessage", b'{"name": "s", "payload": "%%"}', 3, "payload"),
        ("appendMessage", b'{"name": "nope", "payload": "YQ=="}', 5, "nope"),
        ("createMessageStream", b'{"definition": {"name": "x"}}', 3, "strategyOnFull"),
        (
            "readMessages",
            b'{"streamName": "s", "readMessagesOptions": {"minMessageCount": 0}}',
            3,
            "minMessageCount",
        ),
        ("readMessages", b'{"streamName": "s"}', 13, "greater than the last sequence number"),
    ):
        raw = await ask(client, "c", operation, body)
        reply = cbor2.loads(raw) if body[:1] in (b"\xa1", b"\xbf") else json.loads(raw)
        assert reply["status"] == status, reply
        assert text in reply["errorMessage"], reply


@bridge_test
async def test_a_request_is_nested_sixteen_deep_at_most_in_json_and_in_cbor(bridge: Bridge) -> None:
    client = await bridge.connect("c")

    async def error(body: bytes) -> str:
        raw = await ask(client, "c", "createMessageStream", body)
        return str((cbor2.loads(raw) if body[:1] == b"\xa1" else json.loads(raw))["errorMessage"])

    for inner in (14, 15, 400, 50_000):  # 14 in a definition in the request are 16
        arrays = b"[" * inner + b"]" * inner
        told = "unknown field" if inner == 14 else "nested deeper than 16"
        assert told in await error(b'{"definition": {"a": ' + arrays + b"}}")
        assert told in await error(b"\xa1\x6adefinition\xa1\x61a" + b"\x81" * (inner - 1) + b"\x80")
    assert "unknown field `unknown`" in await error(b'{"unknown": ' + arrays + b"}")


@bridge_test
async def test_a_request_has_twenty_thousand_items_at_most(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    for request in (in_json, in_cbor):
        for many, told in ((19_990, "unknown field `x`"), (20_000, "has more than 20,000 items; send less")):
            fits = {"definition": {"name": "x", "strategyOnFull": 1, "x": [""] * many}}
            reply = await request(client, "createMessageStream", requestId="1", **fits)
            assert (reply["requestId"], reply["status"]) == ("1", 3)
            assert told in reply["errorMessage"]
    # The largest requests that are useful have less: a packet full of small messages, each with an id ...
    many = 20_000
    payloads, ids = [b"21.5"] * many, [b"%019d" % number for number in range(many)]
    reply = await in_cbor(client, "appendMessages", name="s", payloads=payloads, messageIds=ids)
    assert reply["sequenceNumbers"] == list(range(many))
    # ... and the results of as many messages as a consumer may have delivered.
    numbers = [list(range(1 << 40, (1 << 40) + 10_000))] * 4
    results = dict(zip(("ack", "nack", "inProgress", "terminate"), numbers, strict=True))
    reply = await in_cbor(client, "ackMessages", name="s", consumer="none", **results)
    assert reply["statusName"] == "ResourceNotFound"


@bridge_test(max_packet=64 * 1024)
async def test_a_reply_is_never_larger_than_a_packet(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    for number in range(1, 41):
        await client.exchange(publish("in/a", b"x" * 5_000, 1, number))
    options = {"minMessageCount": 1, "maxMessageCount": 40}
    for request in (in_json, in_cbor):
        reply = await request(client, "readMessages", streamName="s", readMessagesOptions=options)
        assert 5 < len(reply["messages"]) < 14
    await client.exchange(publish("in/a", b"x" * 60_000, 1, 41))
    reply = await in_json(
        client, "readMessages", streamName="s", readMessagesOptions={"desiredStartSequenceNumber": 40}
    )
    assert (reply["status"], reply["statusName"]) == (7, "ResponsePayloadTooLarge")


@bridge_test
async def test_request_topics_are_private_to_each_client(bridge: Bridge) -> None:
    spy, client = await bridge.connect("spy"), await bridge.connect("c")
    await spy.subscribe(("#", 0), ("streambridge/#", 0), ("streambridge/c/listStreams/reply", 1))
    assert (await in_json(client, "listStreams"))["streams"] == ["s"]
    assert await spy.silent()
    for topic in ("streambridge/c/listStreams", "streambridge/spy/listStreams/reply", "streambridge/x"):
        intruder = await bridge.connect("spy")
        intruder.send(publish(topic, b"{}", 1, 1))
        assert await intruder.closed(), topic
    assert bridge.stat("rejected_not_allowed") == 3
    refused = await bridge.open()
    await refused.connect("w", will=("streambridge/c/listStreams", b"{}", 0), expect=5)


@bridge_test(
    acl=[
        AccessRule(publish=["streambridge/%c/appendMessage", "streambridge/%c/readMessages", "streams/a"]),
        AccessRule(user="", subscribe=["#"], read=["streams/b"]),
    ]
)
async def test_access_rules_hold_for_requests_too(bridge: Bridge) -> None:
    bridge.stream("a")
    bridge.stream("b")
    client = await bridge.connect("c")
    assert (await in_json(client, "appendMessage", name="a", payload="YQ=="))["status"] == 0
    assert (await in_json(client, "appendMessage", name="b", payload="YQ=="))["statusName"] == "Unauthorized"
    assert (await in_json(client, "readMessages", streamName="a"))["statusName"] == "Unauthorized"
    assert (await in_json(client, "readMessages", streamName="b"))["statusName"] == "NotEnoughMessages"
    client.send(publish("streambridge/c/deleteMessageStream", b'{"name": "a"}', 1, 1))
    assert await client.closed()
    assert "a" in bridge.manager.names()


@bridge_test
async def test_response_topic_and_correlation_data_are_honoured(bridge: Bridge) -> None:
    client = await bridge.connect("c", level=V5)
    properties = {RESPONSE_TOPIC: b"answers/here", CORRELATION_DATA: b"\1\2"}
    topic = "streambridge/c/listStreams"
    client.send(publish(topic, b"{}", 1, 5, level=V5, properties=properties))
    got = [await client.receive(), await client.receive()]
    assert got[0] == (0x40, b"\0\5")
    reply = client.parse(*got[1])
    assert (reply.topic, reply.qos) == ("answers/here", 1)
    assert reply.properties == b"\x09\0\2\1\2"
    assert json.loads(reply.payload)["streams"] == ["s"]


@bridge_test
async def test_a_read_that_waits_holds_nothing_up(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    wait = json.dumps({"streamName": "s", "readMessagesOptions": {"readTimeoutMillis": 60_000}}).encode()
    client.send(*(publish("streambridge/c/readMessages", wait) for _ in range(15)))
    assert await client.exchange(publish("in/a", b"now", 1, 1)) == (0x40, b"\0\1")
    for _ in range(15):
        reply = json.loads((await client.message()).payload)
        assert reply["messages"][0]["payload"] == base64.b64encode(b"now").decode()


@bridge_test
async def test_a_request_that_may_wait_is_not_large(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    await client.exchange(publish("in/a", b"x", 1, 1))
    for request in (in_json, in_cbor):
        for size, status in ((60_000, 0), (70_000, 3)):
            reply = await request(client, "readMessages", streamName="s", requestId="x" * size)
            assert reply["status"] == status
        assert "at most 65536 are possible" in reply["errorMessage"]
    assert (await in_json(client, "listStreams", requestId="x" * 70_000))["status"] == 0


@bridge_test
async def test_a_request_that_ends_before_it_begins_gives_its_memory_back(bridge: Bridge) -> None:
    (await bridge.connect("c", clean=False)).disconnect()
    await until(lambda: bridge.stat("connections") == 0)
    memory = bridge.broker.sessions.memory
    before = memory.total
    client = await bridge.connect("c", clean=False)
    options = {"desiredStartSequenceNumber": 1_000_000, "readTimeoutMillis": 9_000_000_000_000}
    wait = json.dumps({"streamName": "s", "readMessagesOptions": options, "requestId": "x" * 10_000}).encode()
    client.send(*[publish("streambridge/c/readMessages", wait)] * 3, b"\xe0\0")
    await until(lambda: bridge.stat("connections") == 0)
    await until(lambda: memory.total == before)


@bridge_test
async def test_reads_that_wait_end_with_their_connection_and_appends_go_on(bridge: Bridge) -> None:
    options = {"desiredStartSequenceNumber": 1_000_000, "readTimeoutMillis": 9_000_000_000_000}
    wait = json.dumps({"streamName": "s", "readMessagesOptions": options}).encode()
    append = json.dumps({"name": "s", "payloads": ["YQ==", "Yg==", "Yw=="]}).encode()
    reading = bridge.server.connections.reading
    stays = await bridge.connect("stays")
    stays.send(publish("streambridge/stays/readMessages", wait))
    for number in range(30):
        clean = number % 2 == 0  # what a session is sent at QoS 1 while it is away would wait for it
        client = await bridge.connect("c", clean=clean)
        reads = [publish("streambridge/c/readMessages", wait, 1, n) for n in range(1, 15)]
        client.send(*reads, publish("streambridge/c/appendMessages", append))
        if number % 3 == 0:
            client.disconnect()
        elif number % 3 == 1:
            client.abort()  # as it may be: before anything is read of it, or later
        else:
            await until(lambda: sum(map(len, reading.values())) == 15, what="the reads of both wait")
            taker = await bridge.connect("c", clean=clean)
            assert await client.closed()
            taker.abort()
    await until(lambda: bridge.stat("connections") == 1)
    await until(lambda: len(bridge.server.connections._tasks) == 1, what="the read of who stays waits alone")
    assert reading.keys() == bridge.server.connections.open.keys()
    stored = await bridge.payloads()
    assert stored == [b"a", b"b", b"c"] * (len(stored) // 3)
    assert len(stored) >= 3 * 20
    stays.abort()
    await until(lambda: not bridge.server.connections._tasks and not reading, what="nothing is left")
