"""What a user is denied to read, it gets from no stream, whatever the stream's topics are now."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bridge.access.rules import AccessRule, Deny
from bridge.errors import InvalidDefinition
from bridge.export.planning import Planner, Source
from bridge.mqtt.wire.packets import V5
from bridge.plugin.api import Batching, BatchLimits, Record, dead_letter
from tests.mqtt.harness import Bridge, Client, bridge_test, publish, subscribe

EVERYTHING = AccessRule(publish=["#"], subscribe=["#"], manage=["#"])
RULES = [EVERYTHING, AccessRule(deny=Deny(read=["payroll/#"]))]
SECRET, OPEN = b"secret", b"open"


async def ask(client: Client, operation: str, **fields: Any) -> dict[str, Any]:
    client.send(publish(f"streambridge/c/{operation}", json.dumps(fields).encode(), level=client.level))
    while (message := await client.message()).topic != f"streambridge/c/{operation}/reply":
        pass
    reply: dict[str, Any] = json.loads(message.payload)
    return reply


async def read(client: Client, stream: str, **options: Any) -> list[bytes]:
    options = {"maxMessageCount": 100} | options
    reply = await ask(client, "readMessages", streamName=stream, readMessagesOptions=options)
    assert reply["statusName"] in ("Success", "NotEnoughMessages"), reply
    return [base64.b64decode(one["payload"]) for one in reply.get("messages", ())]


def letter(topic: str, payload: bytes, stream: str = "wages") -> bytes:
    return dead_letter(stream, "export", Record(7, 0, topic, payload), "it was rejected")


async def filled(bridge: Bridge, *letters: bytes) -> None:
    """A stream whose topics have changed, with what was published before, and with dead letters."""
    bridge.manager.create({"name": "moved", "strategyOnFull": 0, "topics": ["payroll/#", "in/moved"]})
    stream = bridge.manager.stream("moved")
    for topic, payload in ((b"payroll/ann", SECRET), (b"in/moved", OPEN), (b"payroll", SECRET)):
        stream.append(topic, payload)
    for payload in letters:
        await bridge.manager.append("moved", payload)
    bridge.manager.update({"name": "moved", "strategyOnFull": 0, "topics": ["in/moved"]})


NESTED = letter("streams/moved", letter("payroll/x", SECRET), "moved")


@bridge_test(acl=RULES)
async def test_reads_leave_out_what_is_denied_wherever_it_is_stored(bridge: Bridge) -> None:
    good = letter("in/x", OPEN)
    await filled(bridge, letter("payroll/x", SECRET), good, NESTED)
    client = await bridge.connect("c", level=V5)
    assert await read(client, "moved") == [OPEN, good]
    assert await read(client, "moved", topic="payroll/#") == []
    assert await read(client, "moved", topic="streams/#") == [good]
    assert await read(client, "moved", minMessageCount=2) == [OPEN, good]
    assert await read(client, "moved", minMessageCount=3) == [], "there are not as many"
    trusted = await bridge.manager.read("moved")
    assert trusted[0].payload == SECRET, "they are stored, and those who may read get them"


@bridge_test(acl=RULES, refused_stream="refused")
async def test_refused_messages_are_denied_by_their_own_topic(bridge: Bridge) -> None:
    bridge.manager.create({"name": "refused", "strategyOnFull": 0})
    limits = {"maxMessageSize": 8}
    bridge.manager.create(
        {"name": "small", "strategyOnFull": 0, "topics": ["payroll/#", "in/small"], "limits": limits}
    )
    client = await bridge.connect("c", level=V5)
    for topic in ("payroll/ann", "in/small"):
        await client.exchange(publish(topic, topic.encode() * 9, 1, 1, level=V5))
    assert await read(client, "refused") == [b"in/small" * 9]
    reply = await ask(client, "readMessages", streamName="small")
    assert reply["statusName"] == "Unauthorized", "a stream that stores such topics now is refused"


@bridge_test(acl=RULES)
async def test_last_per_topic_leaves_out_what_is_denied(bridge: Bridge) -> None:
    limits = {"maxMessagesPerTopic": 1}
    bridge.manager.create({"name": "last", "strategyOnFull": 0, "topics": ["#"], "limits": limits})
    for topic, payload in ((b"payroll/ann", SECRET), (b"in/last", OPEN)):
        bridge.manager.stream("last").append(topic, payload)
    await bridge.manager.append("last", OPEN)
    bridge.manager.update({"name": "last", "strategyOnFull": 0, "limits": limits})
    client = await bridge.connect("c", level=V5)
    assert await read(client, "last", lastPerTopic=True) == [OPEN, OPEN]


@bridge_test(acl=RULES)
async def test_a_consumer_delivers_nothing_denied_and_keeps_it_for_others(bridge: Bridge) -> None:
    await filled(bridge, letter("payroll/x", SECRET))
    exports = {"consumer": [{"identifier": "theirs", "startSequenceNumber": 0}]}
    bridge.manager.update(
        {"name": "moved", "strategyOnFull": 0, "topics": ["in/moved"], "exportDefinition": exports}
    )
    client = await bridge.connect("c", level=V5)
    for _ in range(2):
        reply = await ask(client, "fetchMessages", name="moved", consumer="theirs", maxMessageCount=10)
        assert reply["statusName"] == "Unauthorized"
        assert "message 0" in reply["errorMessage"]
    others = await bridge.manager.fetch("moved", "theirs", 10, wait=0, holder="other")
    assert [(one.message.payload, one.deliveries) for one in others][:2] == [(SECRET, 1), (OPEN, 1)]


@bridge_test(acl=RULES)
async def test_a_consumer_that_a_client_defines_never_gets_what_the_client_is_denied(bridge: Bridge) -> None:
    await filled(bridge, letter("payroll/x", SECRET))
    client = await bridge.connect("c", level=V5)
    described = (await ask(client, "describeMessageStream", name="moved"))["messageStreamInfo"]["definition"]
    described["exportDefinition"] = {"consumer": [{"identifier": "own", "ackDeadlineMillis": 1000}]}
    assert (await ask(client, "updateMessageStream", definition=described))["statusName"] == "Success"
    reply = await ask(client, "fetchMessages", name="moved", consumer="own", maxMessageCount=10)
    assert [base64.b64decode(one["payload"]) for one in reply["messages"]] == [OPEN]
    described = (await ask(client, "describeMessageStream", name="moved"))["messageStreamInfo"]["definition"]
    (consumer,) = described["exportDefinition"]["consumer"]
    assert consumer["withheld"] == ["payroll/#"]
    for change in ({}, {"ackDeadlineMillis": 2000}):  # leaving it out changes nothing
        plain = {key: one for key, one in consumer.items() if key != "withheld"} | change
        described["exportDefinition"] = {"consumer": [plain]}
        assert (await ask(client, "updateMessageStream", definition=described))["statusName"] == "Success"
        (kept,) = bridge.manager.definitions["moved"].export_definition["consumer"]
        assert kept["withheld"] == ["payroll/#"]


@bridge_test(acl=RULES)
async def test_exports_that_a_client_defines_have_what_it_is_denied_withheld(bridge: Bridge) -> None:
    await filled(bridge)
    client = await bridge.connect("c", level=V5)
    definition = {"name": "moved", "strategyOnFull": 0, "topics": ["in/moved"]}
    kinesis = {"identifier": "k", "kinesisStreamName": "x"}
    exports = {"exportDefinition": {"kinesis": [kinesis]}}
    reply = await ask(client, "updateMessageStream", definition=definition | exports)
    assert reply["statusName"] == "Success", reply
    (stored,) = bridge.manager.definitions["moved"].export_definition["kinesis"]
    assert stored["withheld"] == ["payroll/#"]


@pytest.mark.parametrize(
    ("topics", "withheld", "left"),
    [
        ([], ["payroll/#"], ["in/moved", "streams/moved"]),
        (["payroll/ann", "in/#"], ["payroll/#"], ["in/moved"]),
        (["streams/#"], ["in/#", "payroll/#"], []),
    ],
)
def test_an_export_is_given_no_message_that_is_withheld(
    tmp_path: Path, topics: Sequence[str], withheld: Sequence[str], left: list[str]
) -> None:
    planner = Planner(Source("s", tmp_path, 1), None)
    planner.configure(BatchLimits(), Batching(), 1 << 20, [*topics, *(f"\0{one}" for one in withheld)])
    records = [
        Record(0, 0, "payroll/ann", SECRET),
        Record(1, 0, "in/moved", OPEN),
        Record(2, 0, "streams/moved", letter("payroll/x", SECRET)),
        Record(3, 0, "streams/moved", letter("in/x", OPEN)),
        Record(4, 0, "streams/moved", NESTED),
    ]
    assert [record.topic for record in planner.matching(records)] == left


@bridge_test(acl=RULES)
async def test_a_wrong_filter_of_withheld_is_a_mistake(bridge: Bridge) -> None:
    exports = {"consumer": [{"identifier": "c", "withheld": ["a#"]}]}
    with pytest.raises(InvalidDefinition, match="withheld"):
        bridge.manager.create({"name": "x", "strategyOnFull": 0, "exportDefinition": exports})


@bridge_test(acl=RULES)
async def test_subscriptions_deliver_nothing_denied_retained_or_not(bridge: Bridge) -> None:
    client = await bridge.connect("c", level=V5)
    await client.exchange(publish("payroll/kept", SECRET, 1, 1, retain=True, level=V5))
    assert (await client.exchange(subscribe(1, ("#", 0), level=V5))).body[3] == 0
    await client.exchange(publish("payroll/now", SECRET, 1, 2, level=V5))
    client.send(publish("open", OPEN, level=V5))
    assert (await client.message()).topic == "open"
