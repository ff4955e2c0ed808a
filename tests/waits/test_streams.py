"""What changes while a message is stored, read or settled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.access.rules import AccessRule, Deny
from bridge.errors import StreamBridgeError
from bridge.model import MessageStreamDefinition, StrategyOnFull
from bridge.mqtt.wire.packets import V5
from tests.mqtt.harness import Packet, publish, until

from .house import ALL, House, rule, waits_test
from .scheduler import Scheduler

SUBMIT = "bridge/streams/committer.py Committer._submit: self._runtime.work"
READS = "bridge/operations/reading.py Reads.read: await self.waiting.until"
FETCHES = "bridge/consumers/consumer.py Consumer.fetch: await self._until"
LETTER = "bridge/consumers/consumer.py Consumer._reject: await self._dead_letter"
SLICE = "bridge/operations/manager.py StreamManager.append_all: await asyncio.sleep"
WAIT = {"desiredStartSequenceNumber": 0, "minMessageCount": 2, "readTimeoutMillis": 30_000}


def consumer(start: int = 0) -> dict[str, Any]:
    return {"consumer": [{"identifier": "c", "startSequenceNumber": start, "deadLetterStream": "letters"}]}


def nothing(house: House) -> None:
    house.reload(acl=[rule("bob")])


def deleted(house: House) -> None:
    house.manager.delete("s")


@pytest.mark.parametrize(("change", "name"), [(nothing, "Unauthorized"), (deleted, "ResourceNotFound")])
@pytest.mark.parametrize("operation", ["readMessages", "fetchMessages"])
def test_a_read_that_waits_gives_nothing_once_its_right_or_its_stream_is_gone(
    tmp_path: Path, change: Callable[[House], None], name: str, operation: str
) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        house.manager.update(
            MessageStreamDefinition(
                name="s",
                strategy_on_full=StrategyOnFull.RejectNewData,
                topics=["in/#"],
                export_definition=consumer(),
            )
        )
        site = READS if operation == "readMessages" else FETCHES
        body = {"readMessages": {"streamName": "s", "readMessagesOptions": WAIT}}.get(
            operation, {"name": "s", "consumer": "c", "timeoutMillis": 30_000}
        )
        asked = asyncio.ensure_future(house.http(f"/requests/{operation}", body))
        await until(lambda: scheduler.seen[site])
        change(house)
        if "s" in house.store.streams:
            await house.manager.append_all("s", [b"1", b"2"])
        assert (await asked)[1]["statusName"] == name

    waits_test(test, tmp_path)


def withdrawn(house: House) -> None:
    house.reload(acl=[rule("ann", publish=["other/#"])])


def gone(house: House) -> None:
    house.set_users(ann=None)
    house.reload()


@pytest.mark.parametrize("change", [withdrawn, gone, deleted])
def test_what_changes_during_a_commit_neither_loses_a_message_nor_acknowledges_a_lost_one(
    tmp_path: Path, change: Callable[[House], None]
) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        house.stream("durable", "durable/#", flush_on_write=True)
        client = await house.open()
        client.level = V5
        await client.connect("c", user="ann", password=b"a", level=V5)

        def made() -> None:
            if change is deleted:
                house.manager.delete("durable")
            else:
                change(house)

        scheduler.at(SUBMIT, made)
        client.send(publish("durable/x", b"x", 1, 1, level=V5))
        answer = await client.receive()
        if change is deleted:
            assert answer.head == 0xE0
            assert b"was deleted before the message was stored" in answer.body
        elif change is withdrawn:
            assert answer == Packet(0x40, b"\0\1")
        else:
            assert answer.head == 0xE0, "its user is gone"
        if change is not deleted:
            assert await house.payloads("durable") == [b"x"]
        assert house.store.committer.under_pressure is False

    waits_test(test, tmp_path)


def test_a_topic_that_is_denied_while_a_read_waits_is_left_out(tmp_path: Path) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        client = await house.connect("c", user="bob", password=b"b")
        await client.exchange(publish("in/secret", b"secret", 1, 1))
        house.manager.update(
            MessageStreamDefinition(name="s", strategy_on_full=StrategyOnFull.RejectNewData, topics=["now/#"])
        )
        denied = AccessRule(user="ann", **ALL, deny=Deny(read=["in/secret"]))
        asked = asyncio.ensure_future(
            house.http("/requests/readMessages", {"streamName": "s", "readMessagesOptions": WAIT})
        )
        await until(lambda: scheduler.seen[READS])
        house.reload(acl=[denied, rule("bob")])
        for number in (2, 3):
            await client.exchange(publish(f"now/{number}", b"open", 1, number))
        answer = (await asked)[1]
        assert [one["topic"] for one in answer["messages"]] == ["now/2", "now/3"]

    waits_test(test, tmp_path)


def test_an_append_whose_stream_is_deleted_and_made_again_is_not_called_stored(tmp_path: Path) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        def again() -> None:
            house.manager.delete("s")
            house.stream("s", "in/#")

        scheduler.at(SLICE, again)
        with pytest.raises(StreamBridgeError, match="deleted"):
            await house.manager.append_all("s", [b"x"] * 1500)
        assert await house.payloads("s") == []

    waits_test(test, tmp_path)


def test_a_start_that_moves_while_a_dead_letter_is_stored_rejects_nothing_there(tmp_path: Path) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        def define(start: int) -> None:
            house.manager.update(
                MessageStreamDefinition(
                    name="s",
                    strategy_on_full=StrategyOnFull.RejectNewData,
                    topics=["in/#"],
                    export_definition=consumer(start),
                )
            )

        house.stream("letters")
        await house.manager.append_all("s", [b"0", b"1", b"2"])
        define(0)
        fetched = (await house.http("/requests/fetchMessages", fetch()))[1]
        assert [one["sequenceNumber"] for one in fetched["messages"]] == [0, 1, 2]

        async def moved() -> None:
            define(1)
            await house.manager.fetch("s", "c", 10, wait=0, holder="another")

        scheduler.at(LETTER, moved)
        body = {"name": "s", "consumer": "c", "terminate": [2]}
        await house.http("/requests/ackMessages", body)
        found = next(iter(house.manager.consumers.of("s"))).status()
        assert found.unacknowledged_messages_count == 2, "the new start still has what it delivered"
        assert [json.loads(one)["sequenceNumber"] for one in await house.payloads("letters")] == [2]

    waits_test(test, tmp_path)


def fetch() -> dict[str, Any]:
    return {"name": "s", "consumer": "c", "maxMessageCount": 10}
