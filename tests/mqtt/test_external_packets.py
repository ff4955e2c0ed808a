"""Mode "external", packet by packet: what a broker made of bytes is asked for and told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import StreamFull
from bridge.http import metrics
from bridge.http.observer import Observer
from bridge.model import Limits
from tests.fakes.brokers import BrokerOfBytes

from .harness import Bridge, NoWorker, run_async, running, until
from .test_external import connected, external, redefine, stored


def with_bytes(
    test: Callable[[BrokerOfBytes, Bridge], Awaitable[None]] | None = None, *, hurry: float = 1
) -> Any:
    """Make a test of a coroutine that takes a broker made of bytes and a bridge that has subscribed there."""
    if test is None:
        return partial(with_bytes, hurry=hurry)

    def run(tmp_path: Path) -> None:
        async def main() -> None:
            async with (
                asyncio.timeout(240),
                BrokerOfBytes() as broker,
                running(
                    tmp_path, hurry, **external(broker.port, operations=True, protocol="3.1.1")
                ) as bridge,
            ):
                await until(lambda: broker.got("SUBSCRIBE streams/s/#"))
                await test(broker, bridge)

        run_async(main())

    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    return run


@with_bytes
async def test_an_update_ends_no_subscription_that_a_stream_still_has(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    broker.log.clear()
    redefine(bridge, max_size=2**29)
    bridge.stream("end", "end")
    await until(lambda: broker.got("SUBSCRIBE streams/end/#"))
    assert broker.log == ["1 SUBSCRIBE end", "1 SUBSCRIBE streams/end/#"], "nothing for the other size"

    broker.log.clear()
    redefine(bridge, topics=["in/a", "new"])
    await until(lambda: broker.got("UNSUBSCRIBE"))
    assert broker.log == ["1 SUBSCRIBE in/a", "1 SUBSCRIBE new", "1 UNSUBSCRIBE in/#"], "never without in/a"


@with_bytes
async def test_a_topic_that_moves_from_one_stream_to_another_stays_subscribed(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    broker.log.clear()
    redefine(bridge, topics=[])  # as a reload does it: one stream after the other
    bridge.stream("heir", "in/#")
    bridge.stream("end", "end")
    await until(lambda: broker.got("SUBSCRIBE streams/end/#"))
    redefine(bridge, topics=["last"])
    await until(lambda: broker.got("SUBSCRIBE last"))
    assert not broker.got("UNSUBSCRIBE")


async def fill(bridge: Bridge, name: str) -> None:
    """A small stream bound to its own name, with no room left for 300 bytes."""
    bridge.stream(name, name, max_size=4096, stream_segment_size=1024)
    with pytest.raises(StreamFull):
        while True:
            await bridge.manager.append(name, bytes(200))


@with_bytes
async def test_what_came_on_an_earlier_connection_is_stored_and_not_acknowledged_on_the_next(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    await fill(bridge, "x")
    await fill(bridge, "y")
    broker.send("x", b"A" * 300, 1, 1)
    await until(lambda: bridge.stat("held"))
    broker.cut()
    await connected(bridge, 2)
    broker.send("y", b"B" * 300, 1, 1)  # another message with the same id: the session is new
    await until(lambda: bridge.stat("waiting") == 2)
    purged = await bridge.manager.purge("x")
    await until(lambda: bridge.store.streams["x"].next_sequence > purged)
    tries = bridge.stat("held")
    await until(lambda: bridge.stat("held") > tries + 1)
    assert not broker.got("PUBACK"), "B is not stored yet"
    await bridge.manager.purge("y")
    broker.send("in/a", b"C", 1, 2)
    await until(lambda: broker.got("PUBACK 2"))
    assert broker.got("PUBACK") == ["2 PUBACK 1", "2 PUBACK 2"]
    assert [(await bridge.payloads(name))[-1][:1] for name in ("x", "y")] == [b"A", b"B"]


@with_bytes
async def test_after_a_failed_commit_nothing_more_is_taken_from_that_connection(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    bridge.files.full.add("s")
    broker.session_present = True
    broker.send("in/a", b"first", 1, 1)
    await until(lambda: bridge.stat("rejected_storage"))
    bridge.files.full.clear()
    broker.send("in/a", b"second", 1, 2)
    broker.send("in/a", b"nobody brings it again")
    assert await stored(bridge, 1) == [b"nobody brings it again"], "QoS 0 has no second chance"
    await connected(bridge, 2)
    for number, payload in enumerate((b"first", b"second"), 1):
        broker.send("in/a", payload, 1, number)
    assert (await stored(bridge, 3))[1:] == [b"first", b"second"], "in their order, and once"
    await until(lambda: broker.got("PUBACK 2"))
    assert broker.got("PUBACK") == ["2 PUBACK 1", "2 PUBACK 2"]
    broker.send("in/a", b"third", 1, 3)
    await until(lambda: broker.got("PUBACK 3"))
    assert broker.connections == 2


@with_bytes
async def test_what_is_stored_behind_a_failed_message_is_not_acknowledged_either(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    """It is in another stream, whose commit is faster; it must come again behind the failed one."""
    bridge.stream("slow", "slow", flush_on_write=True)
    reached, gate = threading.Event(), threading.Event()

    def refuse() -> None:
        reached.set()
        gate.wait(30)

    bridge.files.full, bridge.files.refuse = {"slow"}, refuse
    broker.session_present = True
    await until(lambda: broker.got("SUBSCRIBE slow"))
    broker.send("slow", b"first", 1, 1)
    await until(reached.is_set)
    broker.send("in/a", b"second", 1, 2)
    assert await stored(bridge, 1) == [b"second"]
    gate.set()
    await until(lambda: bridge.stat("rejected_storage"))
    bridge.files.full.clear()
    await connected(bridge, 2)
    for number, (topic, payload) in enumerate((("slow", b"first"), ("in/a", b"second")), 1):
        broker.send(topic, payload, 1, number)
    await until(lambda: broker.got("PUBACK 2"))
    assert broker.got("PUBACK") == ["2 PUBACK 1", "2 PUBACK 2"]
    assert await bridge.payloads("slow") == [b"first"]


def test_a_refused_subscription_is_told_and_its_stream_shown_as_refused_until_it_is_granted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @with_bytes
    async def test(broker: BrokerOfBytes, bridge: Bridge) -> None:
        observer = Observer(
            "plant-7", bridge.root / "data", bridge.manager, NoWorker(), {"mqtt": bridge.front}
        )
        observer.phase = "running"
        try:
            assert observer.state(fresh=True).readiness.ok
            broker.refused = {"here/#": 0x80, "there/#": 0x80}
            bridge.stream("t", "here/#", "there/#", "everywhere/#")
            await until(lambda: bridge.stat("refused_subscriptions") == 2)
            assert "to 'here/#'" in caplog.text
            assert "allow that to client id 'streambridge'" in caplog.text
            state = observer.state(fresh=True)
            assert list(state.readiness.refused) == ["t"]
            assert "to 'here/#', 'there/#'" in state.readiness.refused["t"]
            assert not state.readiness.ok
            told = metrics.render(state).decode()
            assert 'streambridge_refused_total{front_end="mqtt",reason="subscriptions"} 2.0' in told
            assert "streambridge_streams_refused 1.0" in told

            broker.refused.clear()
            broker.session_present = True
            broker.cut()  # on the next connection it is asked for again; what was granted is not
            await until(lambda: bridge.stat("connects") == 2 and not bridge.front.refused)
            assert broker.got("2 SUBSCRIBE") == ["2 SUBSCRIBE here/#", "2 SUBSCRIBE there/#"]
            assert observer.state(fresh=True).readiness.ok
        finally:
            observer.close()

    test(tmp_path)


def test_a_refused_subscription_is_asked_for_again_from_time_to_time(tmp_path: Path) -> None:
    @with_bytes(hurry=1000)
    async def test(broker: BrokerOfBytes, bridge: Bridge) -> None:
        broker.refused = {"here": 0x80}
        bridge.stream("t", "here")
        await until(lambda: bridge.stat("refused_subscriptions") > 2)
        broker.refused.clear()
        await until(lambda: not bridge.front.refused)

    test(tmp_path)


@with_bytes
async def test_a_subscription_that_was_not_answered_is_asked_for_again_on_the_next_connection(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    broker.silent, broker.session_present = {"late"}, True
    bridge.stream("late", "late")
    bridge.stream("end", "end")
    await until(lambda: broker.got("SUBSCRIBE streams/end/#"))
    broker.cut()
    await until(lambda: "2 SUBSCRIBE late" in broker.log)


@with_bytes
async def test_requests_that_wait_are_bounded_and_hold_no_message_up(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    waiting = b'{"requestId": "w", "name": "s", "readMessagesOptions": {"readTimeoutMillis": 3600000}}'
    for number in range(1, 1001):
        broker.send("streambridge/dev/readMessages", waiting, 1, number)
    broker.send("in/a", b"x", 1, 1001)
    await until(lambda: broker.got("PUBACK 1001"))
    assert len(broker.got("PUBACK")) == 1001, "the broker keeps none of them"
    under_way = 1000 - bridge.stat("refused_requests")
    assert 16 <= under_way <= 256
    # The message has ended the waiting of those that were let in; the others were answered at once.
    await until(lambda: len(broker.got("PUBLISH streambridge/dev/readMessages/reply")) == 1000)
    replies = [json.loads(line.split(" ", 3)[3]) for line in broker.got("PUBLISH")]
    refused = [reply for reply in replies if "too many requests" in reply.get("errorMessage", "")]
    assert len(refused) == 1000 - under_way
    assert {reply["requestId"] for reply in refused} == {"w"}
    broker.send("streambridge/dev/listStreams", b'{"requestId": "l"}', 1, 1)
    await until(lambda: [line for line in broker.got("PUBLISH") if '"streams":["s"]' in line])


@with_bytes
async def test_a_message_with_a_malformed_topic_ends_one_connection_and_is_then_dropped_and_counted(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    broker.session_present = True
    for connection in (1, 2):
        await connected(bridge, connection)
        broker.send(b"in/\xff", b"1", 1, 1)
        broker.send("in/a", b"2", 1, 2)
    await until(lambda: broker.got("PUBACK 2"))
    assert broker.got("PUBACK") == ["2 PUBACK 1", "2 PUBACK 2"]
    assert await bridge.payloads() == [b"2"]
    assert bridge.stat("dropped_malformed") == 1


@with_bytes(hurry=20)
async def test_long_topics_of_messages_that_wait_take_no_more_memory_than_payloads(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    redefine(bridge, max_size=4096, stream_segment_size=1024)
    for number in range(1, 31):
        broker.send("in/a", bytes(200), 1, number)
    await until(lambda: bridge.stat("held"))
    for number in range(31, 531):
        broker.send("in/" + "x" * 60_000, b"", 1, number)
    await until(lambda: bridge.stat("waiting") > 100)
    tries = bridge.stat("held") + 10
    await until(lambda: bridge.stat("held") > tries)
    assert bridge.stat("waiting") < 170, "the broker keeps the others"


@with_bytes
async def test_whatever_becomes_of_messages_their_room_is_free_again(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    """More than fits into the inbox is stored, comes twice, is dropped, or follows a failed commit."""
    broker.session_present = True
    bridge.stream("tiny", "tiny", limits=Limits(max_message_size=10))
    await until(lambda: "1 SUBSCRIBE tiny" in broker.log)
    each = bytes(300_000)
    for number in range(1, 31):
        broker.send("in/stored", each, 1, number)
        broker.send("in/twice", each, 2, 31)
        broker.send("tiny", each, 1, number + 31)
        broker.send("in/nobody/knows", each)
    await until(lambda: broker.got("PUBACK 61"))
    bridge.files.full.add("s")
    for connection in range(1, 5):
        await connected(bridge, connection)
        broker.send("in/a", b"fails", 1, 1)
        await until(lambda connection=connection: bridge.stat("rejected_storage") == connection)
        for number in range(2, 12):
            broker.send("in/a", each, 1, number)
    await connected(bridge, 5)
    bridge.files.full.clear()
    broker.log.clear()
    broker.send("in/a", b"last", 1, 12)
    await until(lambda: broker.got("PUBACK 12"))
    assert broker.connections == 5


def test_a_broker_that_is_not_read_is_not_silent_and_a_new_connection_is_not_read_either(
    tmp_path: Path,
) -> None:
    """The inbox is full for many keep-alives, because a stream has no room."""

    async def main() -> None:
        broker.session_present = True
        settings = external(broker.port, protocol="3.1.1", keep_alive=1)
        async with asyncio.timeout(120), running(tmp_path, **settings) as bridge:
            await connected(bridge)
            await fill(bridge, "x")
            await until(lambda: "1 SUBSCRIBE x" in broker.log)
            for connection in (1, 2):
                await connected(bridge, connection)
                broker.send("x", b"held" * 100, 1, 1)
                await until(lambda: bridge.stat("held"))
                for number in range(2, 502):
                    broker.send("in/a", bytes(100_000), 1, number)
                pings = broker.pings
                await until(lambda pings=pings: broker.pings >= pings + 5)
                assert broker.connections == connection
                assert 0 < bridge.stat("waiting") < 200, "the broker keeps the others"
                if connection == 1:
                    broker.cut()
            await bridge.manager.purge("x")
            await until(lambda: broker.got("2 PUBACK 501"))
            assert broker.connections == 2

    async def served() -> None:
        async with broker:
            await main()

    broker = BrokerOfBytes()
    run_async(served())


@with_bytes
async def test_a_reply_that_a_wildcard_brings_back_is_not_answered(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    redefine(bridge, topics=["#"])
    await until(lambda: "1 SUBSCRIBE #" in broker.log)
    broker.send("streambridge/dev/listStreams/reply", b"{}", 1, 1)
    broker.send("streambridge/dev/listStreams", b"{}", 1, 2)
    await until(lambda: broker.got("PUBACK 2") and broker.got("PUBLISH"))
    assert len(broker.got("PUBLISH streambridge/dev/listStreams/reply {")) == 1
    assert len(broker.got("PUBLISH")) == bridge.stat("requests") == 1
    assert await bridge.payloads() == []


@with_bytes
async def test_replies_that_the_broker_does_not_take_count_as_requests_under_way(
    broker: BrokerOfBytes, bridge: Bridge
) -> None:
    broker.acknowledges = False
    for number in range(1, 1001):
        broker.send("streambridge/dev/listStreams", b"{}", 1, number)
    await until(lambda: len(broker.got("PUBACK")) == 1000)
    assert bridge.stat("refused_requests") >= 1000 - 256
    broker.acknowledges, broker.session_present = True, True
    broker.cut()
    await connected(bridge, 2)
    under_way = 1000 - bridge.stat("refused_requests")
    await until(lambda: len(broker.got("2 PUBLISH")) == under_way)
    for number in range(1, 101):  # the broker's acknowledgements may be on their way
        refused = bridge.stat("refused_requests")
        broker.send("streambridge/dev/listStreams", b"{}", 1, number)
        await until(lambda number=number: len(broker.got("2 PUBLISH")) == under_way + number)
        if bridge.stat("refused_requests") == refused:
            return
    pytest.fail("requests are still refused after all replies were acknowledged")
