"""QoS 2 across kills, power cuts and new starts of the machine: never lost, and after a kill stored once."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from bridge.model import Persistence
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5, packet
from bridge.mqtt.wire.properties import write_properties

from ..fakes.clock import Shifted
from .harness import PLAIN, Bridge, Packet, ack, bridge_test, copied, found_again, full_disk, publish, until

RECEIVED, COMPLETE = 0x50, 0x70


def held(bridge: Bridge, name: str) -> threading.Event:
    """Let each write to a stream wait until this is set."""
    gate, log = threading.Event(), bridge.store.streams[name].log
    write = log.write

    def slow(*given: Any, **options: Any) -> None:
        gate.wait(30)
        write(*given, **options)

    log.write = slow  # type: ignore[method-assign]
    return gate


def sessions(root: Path) -> Path:
    return root / "data" / "mqtt" / "sessions.journal"


@pytest.mark.parametrize("boot", ["another", ""])  # a sandbox may hide what it is called
def test_a_message_whose_id_was_free_again_before_a_power_cut_is_stored(tmp_path: Path, boot: str) -> None:
    @bridge_test
    async def run(bridge: Bridge) -> None:
        client = await bridge.connect("c", clean=False)
        assert await client.exchange(publish("in/a", b"A", 2, 1)) == Packet(RECEIVED, b"\0\1")
        synced = sessions(bridge.root).read_bytes()
        assert await client.exchange(ack(0x62, 1)) == Packet(COMPLETE, b"\0\1")
        taken = copied(bridge)
        sessions(taken).write_bytes(synced)  # the power went before the journal's next sync
        async with found_again(bridge, taken, Shifted(boot)) as again:
            client = await again.connect("c", clean=False)
            # It was on its way at the power cut, under the lowest free id.
            assert (await client.exchange(publish("in/a", b"B", 2, 1, dup=True))).head == RECEIVED
            assert (await client.exchange(ack(0x62, 1))).head == COMPLETE
            assert await again.payloads() == [b"A", b"B"]

    run(tmp_path)


@bridge_test
async def test_a_message_found_at_a_start_is_on_the_disk_before_its_repetition_is_acknowledged(
    bridge: Bridge,
) -> None:
    bridge.stream("safe", "safe", flush_on_write=True)
    client = await bridge.connect("c", clean=False)
    assert (await client.exchange(publish("safe", b"A", 2, 1))).head == RECEIVED
    before = sessions(bridge.root).read_bytes()
    assert (await client.exchange(publish("safe", b"B", 2, 2))).head == RECEIVED
    taken = copied(bridge)
    sessions(taken).write_bytes(before)  # a kill after B was written, perhaps before it was synced
    async with found_again(bridge, taken) as again:
        assert again.store.streams["safe"].unsynced() == []
        client = await again.connect("c", clean=False)
        assert (await client.exchange(publish("safe", b"B", 2, 2, dup=True))).head == RECEIVED
        assert await again.payloads("safe") == [b"A", b"B"]


@pytest.mark.parametrize("how", ["killed", "machine started anew after a clean stop"])
def test_a_message_that_is_repeated_after_the_next_start_is_stored_once(tmp_path: Path, how: str) -> None:
    @bridge_test
    async def run(bridge: Bridge) -> None:
        client = await bridge.connect("c", clean=False)
        assert (await client.exchange(publish("in/a", b"A", 2, 1))).head == RECEIVED
        if how == "killed":
            taken = copied(bridge)
        else:
            await bridge.stop()
            taken = copied(bridge)
            await bridge.start()
        async with found_again(bridge, taken, Shifted(None if how == "killed" else "another")) as again:
            client = await again.connect("c", clean=False)
            assert (await client.exchange(publish("in/a", b"A", 2, 1, dup=True))).head == RECEIVED
            assert await again.payloads() == [b"A"]

    run(tmp_path)


@pytest.mark.parametrize("reused", [False, True])
def test_a_kill_while_a_message_waits_for_its_second_stream_doubles_and_loses_nothing_of_others(
    tmp_path: Path, *, reused: bool
) -> None:
    @bridge_test
    async def run(bridge: Bridge) -> None:
        bridge.stream("both", "in/both", flush_on_write=True)
        gate = held(bridge, "both")
        slow_one = await bridge.connect("c", clean=False)
        slow_one.send(publish("in/both", b"m1", 2, 1))
        await until(lambda: bridge.store.streams["s"].next_sequence == 1)
        quick_one = await bridge.connect("d", clean=False)
        assert await quick_one.exchange(publish("in/a", b"m2", 2, 7)) == Packet(RECEIVED, b"\0\7")
        if reused:
            assert (await quick_one.exchange(ack(0x62, 7))).head == COMPLETE
        taken = copied(bridge)
        gate.set()
        async with found_again(bridge, taken) as again:
            slow_one = await again.connect("c", clean=False)
            assert (await slow_one.exchange(publish("in/both", b"m1", 2, 1, dup=True))).head == RECEIVED
            quick_one = await again.connect("d", clean=False)
            payload = b"m3" if reused else b"m2"  # sent before the kill, and did not arrive
            assert (await quick_one.exchange(publish("in/a", payload, 2, 7, dup=True))).head == RECEIVED
            assert await again.payloads() == [b"m1", b"m2", b"m3"][: 2 + reused]
            assert await again.payloads("both") == [b"m1"]

    run(tmp_path)


@bridge_test
async def test_a_snapshot_in_the_middle_of_a_read_has_no_id_of_a_message_that_is_not_stored(
    bridge: Bridge,
) -> None:
    bridge.stream("both", "in/both", flush_on_write=True)
    bridge.stream("slow", "in/slow", flush_on_write=True)
    client = await bridge.connect("c", clean=False)
    assert (await client.exchange(publish("in/slow", b"0", 2, 1))).head == RECEIVED
    gate = held(bridge, "slow")
    other = await bridge.connect("o", clean=False)
    with full_disk(times=1):
        other.send(publish("in/a", b"x", 2, 1))
        assert await other.closed(), "the journal has failed, and is written anew with the next record"
    # The second message is the first one of its stream, which the journal has to know before it is stored.
    client.send(publish("in/slow", b"1", 2, 2) + publish("in/both", b"2", 2, 3))
    await until(lambda: not bridge.broker.journal.failed)
    taken = copied(bridge)
    gate.set()
    async with found_again(bridge, taken) as again:
        client = await again.connect("c", clean=False)
        assert (await client.exchange(publish("in/slow", b"1", 2, 2, dup=True))).head == RECEIVED
        assert await again.payloads("slow") == [b"0", b"1"]


@bridge_test
async def test_what_a_full_disk_has_refused_is_not_waited_for(bridge: Bridge) -> None:
    bridge.stream("other", "in/both")
    client = await bridge.connect("c", clean=False)
    with pytest.MonkeyPatch.context() as patch:

        def full(*_: Any, **_options: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(bridge.store.streams["s"].log, "write", full)
        for number in range(1, 20):  # of the other stream too, which has stored it
            client.send(publish("in/both" if number % 2 else "in/a", b"x", 2, number))
        assert await client.closed()
    client = await bridge.connect("c", clean=False)
    for number in range(100, 150):  # numbers that the refused ones had, and others
        await client.exchange(publish("in/a", b"y", 1 + number % 3 // 2, number))
    await client.exchange(publish("in/both", b"z", 2, 200))
    for name in ("s", "other"):
        point = bridge.broker.journal.replay_points[name]
        assert (point.upto, point.known) == (bridge.store.streams[name].next_sequence, set())


@bridge_test
async def test_what_only_a_stream_in_memory_had_is_stored_again_after_a_kill(bridge: Bridge) -> None:
    """It was read together with a message that could not be stored, so it was not acknowledged."""
    bridge.stream("ram", "ram", persistence=Persistence.Memory)
    client = await bridge.connect("c", clean=False)
    with pytest.MonkeyPatch.context() as patch:

        def full(*_: Any, **_options: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(bridge.store.streams["s"].log, "write", full)
        client.send(publish("in/a", b"x", 2, 1) + publish("ram", b"y", 2, 2))
        assert await client.closed()
    await until(lambda: bridge.broker.sessions.get("c").partial)
    taken = copied(bridge)
    client = await bridge.connect("c", clean=False)
    assert (await client.exchange(publish("ram", b"y", 2, 2, dup=True))).head == RECEIVED
    assert await bridge.payloads("ram") == [b"y"]
    async with found_again(bridge, taken) as again:
        client = await again.connect("c", clean=False)
        assert (await client.exchange(publish("ram", b"y", 2, 2, dup=True))).head == RECEIVED
        assert await again.payloads("ram") == [b"y"]


@bridge_test
async def test_messages_for_streams_that_do_not_exist_leave_nothing_behind(bridge: Bridge) -> None:
    client = await bridge.connect("c", level=V5, properties={p.SESSION_EXPIRY: 60, **PLAIN})
    for number in range(1, 100):
        answer = await client.exchange(publish(f"streams/x{number}", b"x", 2, number, level=V5))
        assert answer == Packet(RECEIVED, number.to_bytes(2, "big") + b"\x90")
    assert (await client.exchange(publish("in/a", b"x", 2, 100, level=V5))).head == RECEIVED
    assert b"x50" not in sessions(bridge.root).read_bytes()


@bridge_test
async def test_ids_of_a_clean_session_are_free_in_the_next_one_after_a_kill(bridge: Bridge) -> None:
    lasting = await bridge.connect("p", clean=False)
    assert (await lasting.exchange(publish("in/a", b"p", 2, 1))).head == RECEIVED
    client = await bridge.connect("c")
    assert (await client.exchange(publish("in/a", b"A", 2, 1))).head == RECEIVED
    assert (await client.exchange(ack(0x62, 1))).head == COMPLETE
    client.disconnect()
    assert await client.closed()
    await bridge.connect("c", clean=False)
    async with found_again(bridge, copied(bridge)) as again:
        client = await again.connect("c", clean=False)
        assert (await client.exchange(publish("in/a", b"B", 2, 1))).head == RECEIVED
        assert await again.payloads() == [b"p", b"A", b"B"]


@bridge_test
async def test_ids_of_a_session_that_ends_before_its_message_is_stored_are_free_in_the_next_one(
    bridge: Bridge,
) -> None:
    bridge.stream("slow", "slow", flush_on_write=True)
    gate = threading.Event()
    stream = bridge.store.streams["slow"]
    write = stream.log.write

    def slow(*given: Any, **options: Any) -> None:
        gate.wait(30)
        write(*given, **options)

    stream.log.write = slow  # type: ignore[method-assign]
    lasting = {p.SESSION_EXPIRY: 60}
    client = await bridge.connect("c", level=V5, properties=lasting)
    over = b"\0" + write_properties({p.SESSION_EXPIRY: 0})
    client.send(publish("slow", b"A", 2, 1, level=V5), packet(0xE0, over))
    assert await client.closed()
    returning = asyncio.create_task(bridge.connect("c", level=V5, clean=False, properties=lasting))
    other = await bridge.connect("other")
    for _ in range(20):
        assert await other.alive()  # time enough for a CONNACK that does not wait
    gate.set()
    client = await returning
    assert await client.subscribe(("x", 0)) == b"\0"  # the journal has what it was given
    async with found_again(bridge, copied(bridge)) as again:
        client = await again.connect("c", level=V5, clean=False, properties=lasting)
        assert (await client.exchange(publish("slow", b"B", 2, 1, level=V5))).head == RECEIVED
        assert await again.payloads("slow") == [b"A", b"B"]


@bridge_test
async def test_a_release_before_the_message_is_acknowledged_ends_the_connection(bridge: Bridge) -> None:
    client = await bridge.connect("c", clean=False)
    client.send(publish("in/a", b"1", 2, 1) + ack(0x62, 1) + publish("in/a", b"2", 2, 1) + ack(0x62, 1))
    assert await client.closed()
    client = await bridge.connect("c", clean=False)
    assert (await client.exchange(publish("in/a", b"3", 2, 2))).head == RECEIVED
    point = bridge.broker.journal.replay_points["s"]
    assert (point.upto, point.known) == (bridge.store.streams["s"].next_sequence, set())
