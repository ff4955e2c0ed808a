"""Consumers through MQTT requests: leases, acknowledgements, waiting, dead letters, limits, definitions."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import cbor2
import pytest

from bridge.consumers.journal import highest_delivered, path_of
from bridge.mqtt.wire import properties as p
from bridge.operations.manager import first_free
from tests.fakes.clock import Shifted
from tests.fakes.measured import least_of
from tests.mqtt.harness import Bridge, Client, bridge_test, copied, found_again, publish, until
from tests.mqtt.test_floods import no_stall

IDS = count()


class Worker:
    """A client that asks for one consumer's messages."""

    def __init__(self, client: Client, name: str, consumer: str = "c") -> None:
        self.client, self.name, self.consumer = client, name, consumer

    async def ask(self, operation: str, **fields: Any) -> dict[str, Any]:
        self.send(operation, **fields)
        return await self.reply()

    def send(self, operation: str, **fields: Any) -> None:
        body = cbor2.dumps({"name": "s", **fields})
        self.client.send(publish(f"streambridge/{self.name}/{operation}", body, level=self.client.level))

    async def reply(self) -> dict[str, Any]:
        reply: dict[str, Any] = cbor2.loads((await self.client.message()).payload)
        return reply

    async def fetch(self, most: int = 1, wait: int = 0) -> list[tuple[int, int]]:
        """Fetch; returns the number of each message, and how often it was delivered."""
        fields = {"consumer": self.consumer, "maxMessageCount": most, "timeoutMillis": wait}
        return numbers(await self.ask("fetchMessages", **fields))

    async def ack(self, **fields: Any) -> list[int]:
        """Acknowledge; returns what was not pending."""
        reply = await self.ask("ackMessages", consumer=self.consumer, **fields)
        assert reply["status"] == 0, reply
        found: list[int] = reply["notPending"]
        return found


def numbers(reply: dict[str, Any]) -> list[tuple[int, int]]:
    assert reply["status"] == 0, reply
    return [(message["sequenceNumber"], message["deliveries"]) for message in reply["messages"]]


def first(*found: int, times: int = 1) -> list[tuple[int, int]]:
    return [(number, times) for number in found]


def define(bridge: Bridge, *consumers: dict[str, Any], **more: Any) -> None:
    """Give the stream these consumers."""
    definition = {"name": "s", "strategyOnFull": 0, "topics": ["in/#"], **more}
    bridge.manager.update(definition | {"exportDefinition": {"consumer": list(consumers)}})


async def worker(bridge: Bridge, name: str = "w", **consumer: Any) -> Worker:
    """A worker on the consumer "c", which the stream gets with these options."""
    if consumer or not bridge.manager.consumers.statuses("s"):
        define(bridge, {"identifier": "c", **consumer})
    return Worker(await bridge.connect(name), name)


async def append(bridge: Bridge, *topics: str) -> None:
    client = await bridge.connect(f"p{next(IDS)}")
    for number, topic in enumerate(topics, 1):
        await client.exchange(publish(topic, b"%d" % number, 1, number))


def status(bridge: Bridge) -> Any:
    return bridge.manager.describe("s").export_statuses[0]


class Syncs:
    """The syncs of positions, counted, and held back until the end of `held_syncs`."""

    def __init__(self) -> None:
        self.number, self.waiting = 0, False
        self.go_on = threading.Event()


@contextmanager
def failing_syncs(stream: str) -> Iterator[Syncs]:
    """Hold the syncs of a stream's files back until `go_on`; then they fail."""
    syncs, fdatasync = Syncs(), os.fdatasync

    def fail(fd: int) -> None:
        if f"/streams/{stream}/" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            syncs.waiting = True
            syncs.go_on.wait(30)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fdatasync(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        try:
            yield syncs
        finally:
            syncs.go_on.set()


@contextmanager
def held_syncs(bridge: Bridge, *, held: bool = True) -> Iterator[Syncs]:
    """Count the syncs of positions, and hold them back if so wanted."""
    syncs, fdatasync = Syncs(), os.fdatasync

    def slow(fd: int) -> None:
        if "consumer" in Path(f"/proc/self/fd/{fd}").readlink().name:
            syncs.number += 1
            syncs.waiting = True
            if held:
                syncs.go_on.wait(30)
        fdatasync(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", slow)
        try:
            yield syncs
        finally:
            syncs.go_on.set()


@bridge_test
async def test_messages_are_leased_acknowledged_in_any_order_and_redelivered_after_the_deadline(
    bridge: Bridge,
) -> None:
    one = await worker(bridge, ackDeadlineMillis=30_000)
    await append(bridge, *["in/a"] * 6)
    reply = await one.ask("fetchMessages", consumer="c", maxMessageCount=4)
    assert numbers(reply) == first(0, 1, 2, 3)
    message = reply["messages"][1]
    assert (message["topic"], message["payload"], message["streamName"]) == ("in/a", b"2", "s")
    assert await one.ack(ack=[1, 3]) == []
    assert (status(bridge).last_exported_sequence_number, status(bridge).exported_messages_count) == (-1, 2)
    assert await one.fetch(9) == first(4, 5), "what is leased is not delivered again"
    bridge.system.sleep(20)
    assert await one.fetch(9) == [], "not before the deadline"
    bridge.system.sleep(10.1)
    assert await one.fetch(3) == first(0, 2, 4, times=2)
    assert await one.ack(ack=[0, 1, 2, 5]) == [1], "1 was acknowledged before; 5 in spite of its deadline"
    assert await one.ack(ack=[4]) == []
    shown = status(bridge)
    assert (shown.last_exported_sequence_number, shown.exported_messages_count) == (5, 6)
    assert (shown.exported_bytes_from_stream, shown.unacknowledged_messages_count) == (6, 0)
    assert shown.skipped_messages_count == shown.rejected_messages_count == 0


@bridge_test
async def test_json_requests_get_the_same_with_payloads_in_base64(bridge: Bridge) -> None:
    one = await worker(bridge)
    await append(bridge, "in/a")
    one.client.send(publish("streambridge/w/fetchMessages", b'{"streamName": "s", "consumer": "c"}'))
    reply = json.loads((await one.client.message()).payload)
    message = reply["messages"][0]
    assert (message["payload"], message["deliveries"]) == (base64.b64encode(b"1").decode(), 1)


@bridge_test
async def test_a_nack_delivers_again_after_its_delay_and_in_progress_begins_the_deadline_anew(
    bridge: Bridge,
) -> None:
    one = await worker(bridge, ackDeadlineMillis=100_000)
    await append(bridge, *["in/a"] * 3)
    assert await one.fetch(3) == first(0, 1, 2)
    assert await one.ack(nack=[0]) == []
    assert await one.fetch(3) == first(0, times=2)
    assert await one.ack(nack=[0], delayMillis=600_000) == []
    bridge.system.sleep(90)
    assert await one.ack(inProgress=[1]) == []
    bridge.system.sleep(90)
    assert await one.fetch(3) == first(2, times=2)
    bridge.system.sleep(11)
    assert await one.fetch(3) == first(1, times=2)
    bridge.system.sleep(410)
    assert (0, 3) in await one.fetch(3)


@bridge_test
async def test_several_workers_share_the_messages_and_wait_until_there_are_some(bridge: Bridge) -> None:
    workers = [await worker(bridge, f"w{number}") for number in range(3)]
    for one in workers:
        one.send("fetchMessages", consumer="c", maxMessageCount=1, timeoutMillis=20_000)
    await until(lambda: len(bridge.manager.consumers.get("s", "c")._waiting) == 3)
    await append(bridge, *["in/a"] * 3)
    found = [numbers(await one.reply()) for one in workers]
    assert sorted(found) == [first(0), first(1), first(2)]
    waiting = asyncio.create_task(workers[0].fetch(1, 20_000))
    await until(lambda: bridge.manager.consumers.get("s", "c")._waiting)
    await workers[1].ack(nack=[found[1][0][0]])
    assert await waiting == first(found[1][0][0], times=2), "a nack wakes who waits"
    assert await workers[0].fetch(1, 50) == [], "none in time is no error"


@bridge_test
async def test_a_waiting_fetch_gets_what_becomes_due_meanwhile(bridge: Bridge) -> None:
    one = await worker(bridge, ackDeadlineMillis=150)
    await append(bridge, "in/a")
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await one.fetch() == first(0)
    assert await one.fetch(1, 10_000) == first(0, times=2)
    assert loop.time() - began >= 0.15


@bridge_test
async def test_fetches_that_wait_get_messages_in_their_order_of_arrival(bridge: Bridge) -> None:
    workers = [await worker(bridge, f"w{number}") for number in range(6)]
    consumer = bridge.manager.consumers.get("s", "c")
    for number, one in enumerate(workers, 1):
        one.send("fetchMessages", consumer="c", maxMessageCount=2, timeoutMillis=60_000)
        await until(lambda number=number: len(consumer._waiting) == number)  # type: ignore[misc]
    await append(bridge, "in/a")
    assert numbers(await workers[0].reply()) == first(0)
    await append(bridge, "in/a")
    assert numbers(await workers[1].reply()) == first(1)
    workers[2].client.abort()
    await until(lambda: len(consumer._waiting) == 3)
    await bridge.manager.append_all("s", [b"x"] * 5)
    assert numbers(await workers[3].reply()) == first(2, 3), "one commit wakes as many as it has messages for"
    assert numbers(await workers[4].reply()) == first(4, 5)
    assert numbers(await workers[5].reply()) == first(6)
    assert not consumer._waiting


@bridge_test
async def test_a_fetch_that_is_woken_and_ends_before_it_has_looked_passes_the_message_on(
    bridge: Bridge,
) -> None:
    stays = await worker(bridge, "stays", ackDeadlineMillis=100)
    consumer = bridge.manager.consumers.get("s", "c")
    for number in range(20):
        gone = await worker(bridge, "gone")
        gone.send("fetchMessages", consumer="c", timeoutMillis=60_000)
        await until(lambda: len(consumer._waiting) == 1)
        stays.send("fetchMessages", consumer="c", timeoutMillis=60_000)
        await until(lambda: len(consumer._waiting) == 2)
        await bridge.manager.append("s", b"x")
        for task in list(next(iter(bridge.server.connections.reading.values()))):
            task.cancel()  # as the end of its connection does
        assert [found for found, _ in numbers(await stays.reply())] == [number]
        await stays.ack(ack=[number])
        gone.client.abort()
        await until(lambda: bridge.stat("connections") == 1)


@bridge_test(seconds=120)
async def test_a_message_costs_the_same_however_many_fetches_wait_for_others(bridge: Bridge) -> None:
    define(bridge, {"identifier": "c", "topics": ["in/other"]})
    consumer, sender = bridge.manager.consumers.get("s", "c"), await bridge.connect("sender")

    async def cost() -> float:
        began = time.thread_time()
        for number in range(1, 21):
            await sender.exchange(publish("in/a", b"x", 1, number))
        return time.thread_time() - began

    few = await least_of(cost, 0)
    workers = [await worker(bridge, f"w{number}") for number in range(60)]
    for one in workers:
        for _ in range(15):
            one.send("fetchMessages", consumer="c", timeoutMillis=10**9)
    await until(lambda: len(consumer._waiting) == 900)
    assert await least_of(cost, 5 * few) < 5 * few


@bridge_test(seconds=120)
async def test_thousands_of_terminated_messages_stall_nobody(bridge: Bridge) -> None:
    one = await worker(bridge, maxUnacknowledged=5_000)
    await bridge.manager.append_all("s", [b"x"] * 5_000)
    found: list[int] = []
    while len(found) < 5_000:
        found += [number for number, _ in await one.fetch(1_000)]
    async with no_stall("terminating", 12):
        assert await one.ack(terminate=found) == []
    assert status(bridge).rejected_messages_count == 5_000


@bridge_test
async def test_a_fetch_ends_with_its_connection_and_leases_nothing(bridge: Bridge) -> None:
    gone = await worker(bridge, "gone")
    gone.send("fetchMessages", consumer="c", timeoutMillis=60_000)
    await until(lambda: bridge.manager.consumers.get("s", "c")._waiting)
    gone.client.abort()
    await until(lambda: not bridge.manager.consumers.get("s", "c")._waiting)
    await append(bridge, "in/a")
    assert await (await worker(bridge)).fetch() == first(0)


@bridge_test
async def test_at_most_so_many_are_unacknowledged_and_the_position_has_no_more_holes(bridge: Bridge) -> None:
    one = await worker(bridge, maxUnacknowledged=4, ackDeadlineMillis=10_000)
    await append(bridge, *["in/a"] * 20)
    seen = []
    for _ in range(20):
        found = await one.fetch(20)
        seen += found
        await one.ack(ack=[number for number, _ in found if number % 5])
        assert len(list(bridge.manager.consumers.get("s", "c").position.settled)) <= 5
    assert seen == first(*range(16)), "with 0, 5, 10 and 15 open, no more"
    assert await one.fetch(20) == []
    bridge.system.sleep(11)
    assert await one.fetch(20) == first(0, 5, 10, 15, times=2)
    await one.ack(ack=[10])
    assert await one.fetch(20) == first(16)


@bridge_test
async def test_only_the_holder_shortens_or_extends_a_lease(bridge: Bridge) -> None:
    one, other = await worker(bridge, "one", ackDeadlineMillis=10_000), await worker(bridge, "other")
    await append(bridge, *["in/a"] * 2)
    assert await one.fetch() == first(0)
    assert (
        await other.ack(nack=[0]) == await other.ack(inProgress=[0]) == await other.ack(terminate=[0]) == [0]
    )
    bridge.system.sleep(11)
    assert await other.fetch() == first(0, times=2)
    assert await one.ack(nack=[0]) == [0], "it is the other's now"
    assert await other.fetch(9) == first(1)
    assert await one.ack(ack=[0]) == [], "but it has done the work"


@bridge_test
async def test_a_request_that_makes_no_sense_says_why_and_changes_nothing(bridge: Bridge) -> None:
    one = await worker(bridge)
    await append(bridge, *["in/a"] * 2)
    assert await one.fetch() == first(0)
    for operation, fields, text in (
        ("fetchMessages", {}, "has no consumer ''; its consumers are: c"),
        ("fetchMessages", {"consumer": "x"}, "has no consumer 'x'"),
        ("fetchMessages", {"consumer": "c", "maxMessageCount": 0}, "maxMessageCount"),
        ("ackMessages", {"consumer": "c", "ack": [0, 1]}, "message 1 was not delivered"),
        ("ackMessages", {"consumer": "c", "ack": [-1]}, "message -1 was not delivered"),
        ("ackMessages", {"consumer": "c", "delayMillis": -1}, "delayMillis"),
    ):
        reply = await one.ask(operation, **fields)
        assert text in reply["errorMessage"], reply
    assert status(bridge).unacknowledged_messages_count == 1
    define(bridge, {"identifier": "c", "disabled": True})
    assert "disabled" in (await one.ask("fetchMessages", consumer="c"))["errorMessage"]
    bridge.manager.delete("s")
    assert (await one.ask("fetchMessages", consumer="c"))["statusName"] == "ResourceNotFound"


@bridge_test
async def test_terminated_and_too_often_delivered_messages_are_in_the_dead_letter_stream(
    bridge: Bridge,
) -> None:
    options = {"maxDeliveries": 2, "ackDeadlineMillis": 60_000, "deadLetterStream": "dead"}
    one = await worker(bridge, **options)
    await append(bridge, *["in/a"] * 3)
    assert await one.fetch(3) == first(0, 1, 2)
    reply = await one.ask("ackMessages", consumer="c", terminate=[1], reason="not a number")
    assert "no stream named 'dead'" in reply["errorMessage"]
    assert status(bridge).unacknowledged_messages_count == 3, "it stays until its letter is stored"
    bridge.stream("dead")
    assert await one.ack(terminate=[1], reason="not a number") == []
    bridge.system.sleep(61)
    assert await one.fetch(3) == first(0, 2, times=2)
    assert await one.ack(ack=[2]) == []
    bridge.system.sleep(61)
    assert await one.fetch(3) == []
    await bridge.manager.refresh()
    await until(lambda: status(bridge).rejected_messages_count == 2)
    letters = [json.loads(payload) for payload in await bridge.payloads("dead")]
    assert [(letter["sequenceNumber"], letter["reason"]) for letter in letters] == [
        (1, "not a number"),
        (0, "delivered 2 times without an acknowledgement"),
    ]
    assert letters[0]["payload"] == base64.b64encode(b"2").decode()
    assert (letters[0]["stream"], letters[0]["export"], letters[0]["topic"]) == ("s", "c", "in/a")
    assert status(bridge).last_exported_sequence_number == 2


@bridge_test
async def test_a_dead_letter_too_large_for_its_stream_is_stored_without_the_payload(bridge: Bridge) -> None:
    one = await worker(bridge, deadLetterStream="dead")
    bridge.manager.create({"name": "dead", "strategyOnFull": 0, "limits": {"maxMessageSize": 1000}})
    client = await bridge.connect(f"p{next(IDS)}")
    await client.exchange(publish("in/a", bytes(900), 1, 1))
    assert await one.fetch(1) == first(0)
    assert await one.ack(terminate=[0], reason="not a number") == []
    (letter,) = (json.loads(payload) for payload in await bridge.payloads("dead"))
    assert (letter["payload"], letter["payloadBytes"], letter["reason"]) == ("", 900, "not a number")
    assert status(bridge).last_exported_sequence_number == 0


@bridge_test
async def test_the_last_delivery_lasts_until_its_deadline_as_all_others_do(bridge: Bridge) -> None:
    one = await worker(bridge, maxDeliveries=1, ackDeadlineMillis=60_000)
    await append(bridge, *["in/a"] * 2)
    assert await one.fetch(2) == first(0, 1)
    bridge.system.sleep(55)
    await bridge.manager.refresh()
    assert await one.ack(ack=[0]) == [], "it is still this worker's"
    bridge.system.sleep(6)
    await bridge.manager.refresh()
    await until(lambda: status(bridge).rejected_messages_count == 1)
    assert await one.ack(ack=[1]) == [1]


@bridge_test
async def test_a_message_that_cannot_be_rejected_is_delivered_again_although_it_was_due_meanwhile(
    bridge: Bridge,
) -> None:
    bridge.stream("dead", flush_on_write=True)
    one = await worker(bridge, ackDeadlineMillis=60_000, deadLetterStream="dead")
    other = await worker(bridge, "other")
    await append(bridge, "in/a")
    assert await one.fetch() == first(0)
    with failing_syncs("dead") as syncs:
        one.send("ackMessages", consumer="c", terminate=[0])
        await until(lambda: syncs.waiting)
        bridge.system.sleep(61)
        assert await other.fetch() == [], "it is being rejected"
        syncs.go_on.set()
        assert "cannot be written" in (await one.reply())["errorMessage"]
    assert await other.fetch() == first(0, times=2)


@bridge_test
async def test_a_consumer_has_the_topics_and_the_start_of_its_definition(bridge: Bridge) -> None:
    await append(bridge, "in/a", "in/b", "in/a/x", "in/b", "in/c")
    define(
        bridge,
        {"identifier": "c", "topics": ["in/a/#", "in/c"]},
        {"identifier": "third", "startSequenceNumber": 3},
        {"identifier": "later", "startTime": "2999-01-01T00:00:00Z"},
        {"identifier": "since", "startTime": "2020-01-01T00:00:00+02:00"},
    )
    client = await bridge.connect("w")
    assert await Worker(client, "w").fetch(9) == first(0, 2, 4)
    assert await Worker(client, "w", "third").fetch(9) == first(3, 4)
    assert await Worker(client, "w", "later").fetch(9) == []
    assert await Worker(client, "w", "since").fetch(9) == first(0, 1, 2, 3, 4)
    await append(bridge, "in/a", "in/b")
    assert await Worker(client, "w", "later").fetch(9) == first(5, 6)
    assert await Worker(client, "w").fetch(9) == first(5)
    assert status(bridge).skipped_messages_count == 3


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"topics": ["a/#/b"]}, "topic filter"),
        ({"startTime": "yesterday"}, "2026-01-31T12:00:00Z"),
        ({"startTime": "2026-01-31T12:00:00"}, "zone"),
        ({"startTime": "2026-01-31T12:00:00Z", "startSequenceNumber": 3}, "not both"),
        ({"priority": 3}, "a consumer has no priority"),
        ({"maxUnacknowledged": 10_001}, "maxUnacknowledged"),
        ({"deadLetterStream": "s"}, "exported stream itself"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_a_wrong_definition_is_refused_with_the_reason(tmp_path: Path, wrong: Any, text: str) -> None:
    @bridge_test
    async def check(bridge: Bridge) -> None:
        with pytest.raises(Exception, match=text):
            define(bridge, {"identifier": "c", **wrong})

    check(tmp_path)


@bridge_test
async def test_a_restart_keeps_leases_deliveries_and_what_was_acknowledged_out_of_order(
    bridge: Bridge,
) -> None:
    one = await worker(bridge, ackDeadlineMillis=30_000, topics=["in/a"])
    await append(bridge, *["in/a", "in/b"] * 5)
    assert await one.fetch(4) == first(0, 2, 4, 6)
    assert await one.ack(ack=[2, 6]) == []
    taken = copied(bridge)  # the files as SIGKILL would leave them
    async with found_again(bridge, taken) as again:
        one = Worker(await again.connect("w"), "w")
        assert await one.fetch(9) == first(8), "not before the deadline, also after a kill"
        bridge.system.sleep(31)
        assert await one.fetch(9) == [(0, 2), (4, 2), (8, 2)]
        assert await one.ack(ack=[0, 4, 8, 2]) == [2]
        assert status(again).exported_messages_count == 5
        assert status(again).last_exported_sequence_number == 9


@bridge_test
async def test_a_lease_lasts_its_time_after_a_power_cut_that_took_the_clock_back(bridge: Bridge) -> None:
    """The clock on the disk is older than the lease, and learns the time only from what is read after it."""
    one = await worker(bridge, ackDeadlineMillis=30_000)
    await append(bridge, "in/a")
    bridge.system.sleep(100)
    assert await one.fetch() == first(0)
    for name in ("away", "later"):  # what the second one is answered follows in the journal that one has gone
        client = await bridge.connect(name, level=5, properties={p.SESSION_EXPIRY: 1000})
        await client.subscribe(("x", 1))
        client.disconnect()
        assert await client.closed()
    async with found_again(bridge, copied(bridge), Shifted("another", synchronised=False)) as again:
        one = Worker(await again.connect("w"), "w")
        assert await one.fetch() == []
        again.system.sleep(29)
        assert await one.fetch() == []
        again.system.sleep(2)
        assert await one.fetch() == first(0, times=2)


@bridge_test
async def test_a_work_queue_frees_what_is_acknowledged_and_nothing_else(bridge: Bridge) -> None:
    size = {"maxSize": 64 * 1024, "streamSegmentSize": 16 * 1024, "retention": "exported"}
    define(bridge, {"identifier": "c"}, **size)
    one, other = Worker(await bridge.connect("w"), "w"), await bridge.connect("p")
    sent = 0

    async def fill() -> int:
        """Append until the stream is full; returns how many were stored."""
        nonlocal sent
        number = 0
        while True:
            reply = await Worker(other, "p").ask("appendMessage", payload=b"x" * 1000)
            if reply["status"]:
                assert "is full" in reply["errorMessage"], reply
                return number
            number, sent = number + 1, sent + 1

    whole = await fill()
    assert await fill() == 0
    found = await one.fetch(1000)
    assert found == first(*range(whole))
    assert await fill() == 0, "delivered is not done"
    await one.ack(ack=[number for number, _ in found[1:]])
    assert await fill() == 0, "the first one is still to be done"
    await one.ack(ack=[0])
    assert await fill() > whole // 2
    assert (await one.fetch(1000))[0] == (whole, 1)
    define(bridge, {"identifier": "c", "disabled": True}, **size)
    assert bridge.store.streams["s"].exported_upto is None, "a disabled one holds nothing"


@bridge_test
async def test_what_limits_and_purges_drop_is_skipped_also_if_it_is_leased(bridge: Bridge) -> None:
    one = await worker(bridge, ackDeadlineMillis=60_000)
    await append(bridge, "in/a", "in/b", "in/a", "in/b", "in/a", "in/b", "in/a")
    assert await one.fetch(4) == first(0, 1, 2, 3)
    await bridge.manager.purge("s", topic="in/b")
    await bridge.manager.purge("s", upto=1)
    bridge.system.sleep(61)
    assert await one.fetch(9) == [(2, 2), (4, 1), (6, 1)]
    assert await one.ack(ack=[1, 2, 4, 6]) == [1]
    assert (status(bridge).skipped_messages_count, status(bridge).last_exported_sequence_number) == (4, 6)
    await append(bridge, *["in/a"] * 3)
    assert await one.fetch(1) == first(7)
    await bridge.manager.purge("s")
    await bridge.manager.refresh()
    assert status(bridge).unacknowledged_messages_count == 0
    assert status(bridge).passed_sequence_number == 9
    assert status(bridge).last_exported_sequence_number == 6, "what was purged was not delivered"


@bridge_test
async def test_a_consumer_or_a_stream_that_is_made_again_begins_anew(bridge: Bridge) -> None:
    one = await worker(bridge)
    await append(bridge, *["in/a"] * 2)
    assert await one.fetch(2) == first(0, 1)
    assert await one.ack(ack=[0, 1]) == []
    one.send("fetchMessages", consumer="c", timeoutMillis=60_000)
    await until(lambda: bridge.manager.consumers.get("s", "c")._waiting)
    define(bridge, {"identifier": "d"})
    assert "was deleted" in (await one.reply())["errorMessage"]
    assert not path_of(bridge.root / "data", "s", "c").exists()
    define(bridge, {"identifier": "c"})
    assert await one.fetch(2) == first(0, 1), "another consumer"
    assert await one.ack(ack=[0, 1]) == []
    define(bridge, {"identifier": "c", "ackDeadlineMillis": 5, "maxUnacknowledged": 5000})
    assert await one.fetch(2) == [], "an update keeps the position"
    define(bridge, {"identifier": "c", "startSequenceNumber": 0, "startTime": "2020-01-01T00:00:00Z"})
    assert await one.fetch(2) == first(0, 1), "a new start moves it"
    taken = copied(bridge)
    bridge.manager.delete("s")
    bridge.stream("s", "in/#")
    define(bridge, {"identifier": "c"})
    await append(bridge, "in/a")
    assert await one.fetch(2) == first(0)
    async with found_again(bridge, taken) as again:
        assert status(again).unacknowledged_messages_count == 2


@bridge_test
async def test_a_start_that_was_moved_and_moved_back_holds_after_a_kill(bridge: Bridge) -> None:
    one = await worker(bridge)
    await append(bridge, *["in/a"] * 3)
    assert await one.fetch(3) == first(0, 1, 2)
    assert await one.ack(ack=[0, 1, 2]) == []
    define(bridge, {"identifier": "c", "startSequenceNumber": 1})
    define(bridge, {"identifier": "c"})
    async with found_again(bridge, copied(bridge)) as again:
        two = Worker(await again.connect("w"), "w")
        assert await two.fetch(3) == first(0, 1, 2)
        assert await two.ack(ack=[0, 1, 2]) == []
        define(again, {"identifier": "c", "ackDeadlineMillis": 5000})
        assert await two.fetch(3) == []
        async with found_again(again, copied(again)) as last:
            three = Worker(await last.connect("w"), "w")
            assert await three.fetch(3) == []


@bridge_test(max_packet=64 * 1024)
async def test_a_reply_leases_only_what_it_brings(bridge: Bridge) -> None:
    one = await worker(bridge)
    client = await bridge.connect("p")
    for number in range(1, 21):
        await client.exchange(publish("in/a", b"x" * 10_000, 1, number))
    seen: list[int] = []
    while found := await one.fetch(100):
        assert len(found) < 7
        seen += [number for number, _ in found]
        assert status(bridge).unacknowledged_messages_count == len(seen)
    assert seen == list(range(20))


@bridge_test(max_packet=64 * 1024)
async def test_a_message_that_no_reply_holds_is_reported_and_stops_no_other(bridge: Bridge) -> None:
    one = await worker(bridge, maxDeliveries=1, ackDeadlineMillis=60_000)
    await bridge.manager.append_all("s", [b"x" * 100_000, b"small"])
    reply = await one.ask("fetchMessages", consumer="c", maxMessageCount=9)
    assert reply["statusName"] == "ResponsePayloadTooLarge"
    assert await one.fetch(9) == first(1)
    bridge.system.sleep(61)
    await bridge.manager.refresh()
    await until(lambda: status(bridge).rejected_messages_count == 2)


@contextmanager
def failing_disk(error: int = errno.EIO) -> Iterator[None]:
    """A disk that takes nothing that is written to a consumer's file."""
    pwritev = os.pwritev

    def fail(fd: int, data: Any, offset: int) -> int:
        if "consumer" in Path(f"/proc/self/fd/{fd}").readlink().name:
            raise OSError(error, os.strerror(error))
        return pwritev(fd, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        yield


@bridge_test
async def test_while_the_disk_fails_nothing_is_delivered_or_reported_as_done_and_nothing_is_lost(
    bridge: Bridge,
) -> None:
    one = await worker(bridge, maxDeliveries=3)
    await append(bridge, *["in/a"] * 4)
    with failing_disk():
        for _ in range(5):
            reply = await one.ask("fetchMessages", consumer="c", maxMessageCount=2)
            assert "cannot be written" in reply["errorMessage"]
    assert await one.fetch(2) == first(0, 1), "a delivery that did not happen does not count"
    with failing_disk():
        reply = await one.ask("ackMessages", consumer="c", ack=[0])
        assert "cannot be written" in reply["errorMessage"]
        assert bridge.manager.consumers.settled_upto("s") == 0, "retention must wait"
        again = await one.ask("ackMessages", consumer="c", ack=[0])
        assert "cannot be written" in again["errorMessage"], "not because it is known to be settled"
    assert await one.ack(ack=[0]) == [0], "it is stored with this reply"
    async with found_again(bridge, copied(bridge)) as later:
        assert status(later).last_exported_sequence_number == 0
        assert status(later).unacknowledged_messages_count == 1


@bridge_test
async def test_on_a_full_disk_a_consumer_goes_on(bridge: Bridge) -> None:
    one = await worker(bridge, maxUnacknowledged=8)
    await append(bridge, *["in/a"] * 30)
    assert await one.fetch(8) == first(*range(8))
    before = path_of(bridge.root / "data", "s", "c").stat()
    for number in range(8, 30):
        await one.ack(ack=[number - 8])
        assert await one.fetch() == first(number)
    for _ in range(400):  # more than a half of the file holds
        await one.ack(inProgress=list(range(22, 30)))
    after = path_of(bridge.root / "data", "s", "c").stat()
    assert (before.st_size, before.st_blocks, before.st_ino) == (after.st_size, after.st_blocks, after.st_ino)
    async with found_again(bridge, copied(bridge)) as again:
        assert status(again).unacknowledged_messages_count == 8


@bridge_test
async def test_numbers_that_a_consumer_has_seen_are_not_given_again(bridge: Bridge) -> None:
    one = await worker(bridge)
    await append(bridge, *["in/a"] * 5)
    assert await one.fetch(3) == first(0, 1, 2)
    data, epoch = bridge.root / "data", bridge.store.streams["s"].epoch
    assert highest_delivered(data, "s", epoch) == 2
    assert first_free(data, "s", epoch) == 3
    assert highest_delivered(data, "s", epoch + 1) == -1


@bridge_test
async def test_a_consumer_that_is_made_again_while_the_old_one_is_written_begins_anew(bridge: Bridge) -> None:
    one = await worker(bridge)
    await append(bridge, *["in/a"] * 3)
    assert await one.fetch(3) == first(0, 1, 2)
    writing, go_on = threading.Event(), threading.Event()
    pwritev = os.pwritev

    def slow(fd: int, data: Any, offset: int) -> int:
        if "consumer" in Path(f"/proc/self/fd/{fd}").readlink().name:
            writing.set()
            go_on.wait(30)
        return pwritev(fd, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", slow)
        one.send("ackMessages", consumer="c", ack=[0, 1, 2])
        await until(writing.is_set)
        define(bridge, {"identifier": "other"})
        define(bridge, {"identifier": "c"})
        again = Worker(await bridge.connect("again"), "again")
        fetching = asyncio.create_task(again.fetch(2))
        await asyncio.sleep(0.05)
        assert not fetching.done(), "the file still belongs to the old one"
        go_on.set()
        assert await fetching == first(0, 1)
        assert "was deleted" in (await one.reply())["errorMessage"]
    async with found_again(bridge, copied(bridge)) as later:
        assert status(later).unacknowledged_messages_count == 2
        assert status(later).exported_messages_count == 0


@bridge_test
async def test_a_purge_by_limits_under_load_never_stops_a_consumer(bridge: Bridge) -> None:
    one = await worker(bridge, maxUnacknowledged=50)
    define(bridge, {"identifier": "c", "maxUnacknowledged": 50}, limits={"maxMessages": 30})
    seen: list[int] = []
    for _ in range(20):
        await bridge.manager.append_all("s", [b"x"] * 20)
        found = await one.fetch(10)
        seen += [number for number, _ in found]
        await one.ack(ack=[number for number, _ in found if number % 3])
        await bridge.manager.refresh()
        assert status(bridge).unacknowledged_messages_count <= 30, "what is dropped is not pending"
    assert seen == sorted(set(seen))
    assert len(seen) == 200
    assert status(bridge).skipped_messages_count > 0


@bridge_test
async def test_a_start_that_moves_during_a_write_ends_that_write_and_begins_there(bridge: Bridge) -> None:
    one = await worker(bridge)
    await append(bridge, *["in/a"] * 5)
    assert await one.fetch(3) == first(0, 1, 2)
    assert await one.ack(ack=[1]) == []
    with held_syncs(bridge) as syncs:
        one.send("ackMessages", consumer="c", ack=[0, 2])
        await until(lambda: syncs.waiting)
        define(bridge, {"identifier": "c", "startSequenceNumber": 3})
        syncs.go_on.set()
        assert (await one.reply())["status"] == 0
        assert await one.fetch(3) == first(3, 4)
        assert syncs.number == 2, "the old position is not written again and again"


@bridge_test
async def test_requests_that_come_together_share_a_sync(bridge: Bridge) -> None:
    one = await worker(bridge)
    await append(bridge, *["in/a"] * 40)
    assert await one.fetch(10) == first(*range(10))
    with held_syncs(bridge, held=False) as syncs:
        topic = "streambridge/w/"
        one.client.send(
            b"".join(
                publish(
                    topic + name,
                    cbor2.dumps({"name": "s", "consumer": "c", **fields}),
                    level=one.client.level,
                )
                for name, fields in (
                    ("ackMessages", {"ack": list(range(5))}),
                    ("ackMessages", {"ack": list(range(5, 10))}),
                    ("fetchMessages", {"maxMessageCount": 10}),
                    ("fetchMessages", {"maxMessageCount": 10}),
                )
            )
        )
        replies = [await one.reply() for _ in range(4)]
    assert [reply["status"] for reply in replies] == [0] * 4
    assert syncs.number == 1
    assert [numbers(reply) for reply in replies[2:]] == [first(*range(10, 20)), first(*range(20, 30))]


@bridge_test
async def test_what_a_killed_gateway_had_not_synced_is_on_the_disk_before_a_reply_depends_on_it(
    bridge: Bridge,
) -> None:
    one = await worker(bridge)
    await append(bridge, "in/a")
    assert await one.fetch() == first(0)
    with held_syncs(bridge) as syncs:
        one.send("ackMessages", consumer="c", ack=[0])
        await until(lambda: syncs.waiting)
        taken = copied(bridge)
    async with found_again(bridge, taken) as again:
        two = Worker(await again.connect("w"), "w")
        with held_syncs(again, held=False) as syncs:
            assert await two.ack(ack=[0]) == [0], "it was acknowledged"
            before = syncs.number
            assert before > 0
            assert await two.ack(ack=[0]) == [0]
            assert syncs.number == before
