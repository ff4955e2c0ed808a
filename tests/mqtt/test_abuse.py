"""Crowds and bad manners: many connections, half packets, and what the advisories of others teach."""

from __future__ import annotations

import asyncio
import errno
import resource
import stat
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from bridge.mqtt.broker.memory import OF_ID
from bridge.mqtt.broker.recovery import find_stored_ids
from bridge.mqtt.broker.replay import FEW, ReplayPoint
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5
from bridge.streams.layout import Files

from ..fakes.measured import least_of
from .harness import (
    PLAIN,
    Bridge,
    Client,
    Packet,
    ack,
    bridge_test,
    connect,
    full_disk,
    publish,
    subscribe,
    until,
)


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.fixture(autouse=True, scope="module")
def _files() -> None:
    """Both ends of the connections are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 8192), hard), hard))


@bridge_test
async def test_a_thousand_connections_cost_little_memory_and_nobody_time(bridge: Bridge) -> None:
    async def fifty() -> float:
        """The CPU time of fifty messages."""
        began = time.process_time()
        for number in range(1, 51):
            await busy.exchange(publish("in/a", b"", 1, number))
        return time.process_time() - began

    busy = await bridge.connect("busy")
    alone = await fifty()
    before, clients, took = rss(), [], []
    for start in range(0, 1000, 50):
        began = time.process_time()
        group = await asyncio.gather(*(bridge.open() for _ in range(50)))
        for number, client in enumerate(group, start):
            client.send(connect(f"idle-{number}", keep_alive=600))
        for client in group:
            assert await client.receive() == Packet(0x20, b"\0\0")
        clients += group
        took.append(time.process_time() - began)
    assert bridge.stat("connections") == 1001
    assert (rss() - before) / 1000 < 60_000, "bytes for both ends of a connection"
    assert min(took[-5:]) < 5 * max(took[:5]), "each costs as much as the first ones"
    assert await least_of(fifty, 5 * alone) < 5 * alone
    for client in clients:
        client.abort()
    await until(lambda: bridge.stat("connections") == 1)
    assert bridge.stat("sessions") == 1


@bridge_test
async def test_half_a_packet_costs_no_more_than_what_was_sent(bridge: Bridge) -> None:
    before = rss()
    clients = [await bridge.connect(f"half-{number}") for number in range(200)]
    for client in clients:
        client.send(publish("in/a", b"x" * 1_000_000, 1, 1)[:100])
    good = await bridge.connect("good")
    assert await good.exchange(publish("in/a", b"", 1, 1)) == Packet(0x40, b"\0\1")
    assert rss() - before < 30 << 20, "CVE-2017-7651: nothing is reserved for an announced length"


@bridge_test(max_packet=16 << 20)
async def test_a_packet_in_very_many_pieces_takes_linear_time(bridge: Bridge) -> None:
    client = await bridge.connect("c")

    async def cost(packets: int, size: int) -> float:
        """The CPU time of packets of this size that come in pieces of 1000 bytes."""
        data = publish("plain", bytes(size), 1, 1)
        began = time.process_time()
        for _ in range(packets):
            for start in range(0, len(data), 1000):
                client.send(data[start : start + 1000])
                await asyncio.sleep(0)
            assert await client.receive() == Packet(0x40, b"\0\1")
        return time.process_time() - began

    bound = 3 * await cost(8, 1 << 20)
    assert await least_of(lambda: cost(1, 8 << 20), bound) < bound, (
        "if each piece copied all before it: 8 times"
    )


@bridge_test
async def test_qos_2_ids_that_are_never_released_are_bounded(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    for start in range(1, 65_536, 5_000):
        ids = range(start, min(start + 5_000, 65_536))
        client.send(*(publish("in/a", b"", 2, number) for number in ids))
        for _ in ids:
            assert (await client.receive()).head == 0x50
    client.send(*(publish("in/a", b"", 2, number, dup=True) for number in range(1, 101)))
    for _ in range(100):
        await client.receive()
    assert len(await bridge.stored()) == 65_535, "CVE-2023-28366: keyed by packet id, each stored once"


@bridge_test(subscriptions=10, retained_messages=10)
async def test_subscriptions_and_retained_messages_are_bounded(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    codes = await client.subscribe(*((f"t/{number}", 0) for number in range(15)))
    assert codes == b"\0" * 10 + b"\x80" * 5
    client = await bridge.open()
    await client.connect("new", level=V5, properties=PLAIN)
    for number in range(15):
        sent = publish(f"on/{number}", b"x", 1 + number % 2, number + 1, retain=True, level=V5)
        assert (await client.exchange(sent)).body[2:] == (b"\x10" if number < 10 else b"\x97"), number
    assert (bridge.stat("retained"), bridge.stat("rejected_retained")) == (10, 5)


def test_a_limit_of_retained_messages_stops_no_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @bridge_test(retained_messages=2)
    async def run(bridge: Bridge) -> None:
        watcher = await bridge.connect("watcher")
        await watcher.subscribe(("#", 0))
        old = await bridge.connect("old")
        for number in range(10):
            sent = publish(f"{'in' if number % 2 else 'on'}/{number}", b"%d" % number, 1, 1, retain=True)
            assert (await old.exchange(sent)).head == 0x40
        new = await bridge.connect("new", level=V5, properties=PLAIN)
        new.send(
            publish("in/qos0", b"10", retain=True, level=V5), publish("on/qos0", b"11", retain=True, level=V5)
        )
        assert (await new.exchange(publish("in/1", b"12", 2, 20, retain=True, level=V5))).body == b"\0\x14"
        assert (await new.exchange(publish("in/new", b"13", 1, 21, retain=True, level=V5))).body == b"\0\x15"
        will = await bridge.connect("w", will=("in/will", b"14", 1), will_retain=True)
        will.abort()
        assert [(await watcher.message()).payload for _ in range(15)] == [b"%d" % n for n in range(15)]
        assert await bridge.payloads() == [b"1", b"3", b"5", b"7", b"9", b"10", b"12", b"13", b"14"]
        assert (bridge.stat("retained"), bridge.stat("not_retained")) == (2, 12)
        assert (
            bridge.stat("dropped_wills") + bridge.stat("dropped_retained") + bridge.stat("rejected_retained")
            == 0
        )
        assert caplog.text.count("not retained: no room") == 1
        assert "retained_messages = 2 are in use" in caplog.text
        watcher = await bridge.connect("watcher")
        await watcher.subscribe(("#", 0))
        assert [(await watcher.message()).topic for _ in range(2)] == ["in/1", "on/0"]
        assert await watcher.silent()

    run(tmp_path)


@bridge_test(retained_bytes=10_000)
async def test_retained_messages_are_bounded_by_their_bytes(bridge: Bridge) -> None:
    async def retain(name: str, size: int) -> int:
        sent = publish(f"last/{name}", bytes(size), 1, 1, retain=True, level=V5)
        code = (await client.exchange(sent)).body[2]
        return 0 if code == 0x10 else code  # nobody subscribes

    client = await bridge.open()
    await client.connect("c", level=V5)
    assert [await retain(name, 4_000) for name in "abc"] == [0, 0, 0x97]
    assert await retain("a", 8_000) == 0x97, "and what was there stays"
    subscriber = await bridge.connect("s")
    await subscriber.subscribe(("last/#", 0))
    assert [len((await subscriber.message()).payload) for _ in "ab"] == [4_000, 4_000]
    assert await subscriber.silent()
    await bridge.restart()
    client = await bridge.open()
    await client.connect("c", level=V5)
    assert [await retain(name, size) for name, size in (("c", 5_000), ("b", 0), ("c", 5_000))] == [0x97, 0, 0]
    assert bridge.stat("retained") == 2


@bridge_test
async def test_what_is_kept_on_disk_is_nobody_elses_to_read(bridge: Bridge) -> None:
    client = await bridge.connect("c", clean=False)
    await client.subscribe(("t", 1))
    journal = bridge.root / "data" / "mqtt" / "sessions.journal"
    assert stat.S_IMODE(journal.stat().st_mode) == 0o600, "CVE-2017-9868"
    assert stat.S_IMODE(journal.parent.stat().st_mode) == 0o700


@bridge_test
async def test_a_damaged_journal_loses_its_end_and_nothing_else(bridge: Bridge) -> None:
    client = await bridge.connect("c", clean=False)
    await client.subscribe(("t", 1))
    await bridge.stop()
    journal = bridge.root / "data" / "mqtt" / "sessions.journal"
    whole = journal.read_bytes()
    for damaged in (whole + whole[:9], whole + b"\0" * 50, whole[:-1] + b"\xff"):
        journal.write_bytes(damaged)
        await bridge.start()
        client = await bridge.open()
        assert (await client.connect("c", clean=False)).body == b"\1\0"
        client.abort()
        await bridge.stop()
    await bridge.start()


@bridge_test
async def test_many_sessions_come_and_go_without_leaving_anything(bridge: Bridge) -> None:
    async def life(number: int) -> None:
        client = await bridge.connect(f"s{number}", clean=number % 3 > 0, will=("in/w", b"", 1))
        client.send(subscribe(1, (f"t/{number % 50}", number % 3)))
        while (await client.receive()).head != 0x90:
            pass  # a message of the others may come before the SUBACK (3.1.1 section 3.8.4)
        client.send(publish("in/s", b"x", 1, 2), publish("t/1", b"y", 2, 3))
        await client.receive()
        if number % 2:
            client.abort()
        else:
            client.disconnect()

    for start in range(0, 600, 50):
        await asyncio.gather(*(life(number) for number in range(start, start + 50)))
    await until(lambda: bridge.stat("connections") == 0)
    assert bridge.stat("sessions") == 200
    assert len(bridge.server.connections._tasks) == 0


@bridge_test(hurry=20)
async def test_qos_2_is_stored_once_also_while_its_id_cannot_be_written_to_the_journal(
    bridge: Bridge,
) -> None:
    client = await bridge.connect("c", clean=False)
    with full_disk():
        for again in (False, True, True):
            client.send(publish("in/a", b"x", 2, 6, dup=again))
            assert await client.closed(), "the id is not safe"
            client = await bridge.connect("c", clean=False)
    assert await client.exchange(publish("in/a", b"x", 2, 6, dup=True)) == Packet(0x50, b"\0\6")
    await bridge.restart()
    client = await bridge.connect("c", clean=False)
    assert await client.exchange(publish("in/a", b"x", 2, 6, dup=True)) == Packet(0x50, b"\0\6")
    assert await bridge.payloads() == [b"x"]


@bridge_test
async def test_qos_2_ids_that_the_journal_has_lost_are_found_behind_any_number_of_bytes(
    bridge: Bridge,
) -> None:
    client = await bridge.connect("c", clean=False)
    for number in range(1, 19):  # more bytes than one step reads
        assert (await client.exchange(publish("in/a", bytes(1_000_000), 1, number))).head == 0x40
    assert await client.exchange(publish("in/a", b"x", 2, 40)) == Packet(0x50, b"\0\x28")
    session = bridge.broker.sessions.get("c")
    assert session is not None
    session.outbox.hold(-OF_ID * len(session.incoming))
    session.incoming.clear()  # as after a start with a journal that ends before them
    bridge.broker.journal.replay_points["s"] = ReplayPoint(0)
    broker = bridge.broker
    await find_stored_ids(broker.journal, broker.store, lambda kept: broker.sessions.get(kept.client))
    assert await client.exchange(publish("in/a", b"x", 2, 40, dup=True)) == Packet(0x50, b"\0\x28")
    assert (await bridge.payloads()).count(b"x") == 1


async def refused_by(bridge: Bridge, name: str, client: Client, *packets: bytes) -> Client:
    """Send packets while a stream cannot be written; returns the client, connected anew."""
    with pytest.MonkeyPatch.context() as patch:

        def full(*_: Any, **_options: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(bridge.store.streams[name].log, "write", full)
        client.send(*packets)
        assert await client.closed()
    return await bridge.connect("c", clean=False)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("failing", ["s", "other"])
def test_qos_2_is_stored_once_in_each_stream_also_when_one_of_them_failed(
    tmp_path: Path, failing: str, restart: bool
) -> None:
    @bridge_test
    async def run(bridge: Bridge) -> None:
        bridge.stream("other", "in/both")
        client = await bridge.connect("c", clean=False)
        client = await refused_by(bridge, failing, client, publish("in/both", b"x", 2, 6))
        passer_by = await bridge.connect("passer-by", clean=False)  # its ids are looked for from here on
        await passer_by.exchange(publish("in/both", b"z", 2, 6))
        for _ in range(2 * restart):
            await bridge.restart()
            client = await bridge.connect("c", clean=False)
        assert await client.exchange(publish("in/both", b"x", 2, 6, dup=True)) == Packet(0x50, b"\0\6")
        assert await client.exchange(ack(0x62, 6)) == Packet(0x70, b"\0\6")
        assert await client.exchange(publish("in/both", b"y", 2, 6)) == Packet(0x50, b"\0\6")
        for name in ("s", "other"):
            assert sorted(await bridge.payloads(name)) == [b"x", b"y", b"z"]

    run(tmp_path)


@pytest.mark.parametrize("restart", [False, True])
def test_the_next_message_with_the_id_of_a_refused_one_is_stored_in_all_of_its_streams(
    tmp_path: Path, restart: bool
) -> None:
    """One stream has the refused one. The next is sent with DUP: its first attempt never arrived."""

    @bridge_test
    async def run(bridge: Bridge) -> None:
        bridge.stream("other", "in/both")
        options = {"level": V5, "clean": False, "properties": {p.SESSION_EXPIRY: 60, **PLAIN}}
        client = await bridge.connect("c", **options)
        await client.exchange(publish("in/a", bytes(5000), 1, 1, level=V5))
        await refused_by(bridge, "s", client, publish("in/both", b"refused", 2, 6, level=V5))
        definition = {"name": "s", "strategyOnFull": 0, "topics": ["in/#"]}
        bridge.manager.update(definition | {"maxSize": 5000, "streamSegmentSize": 5000})
        client = await bridge.connect("c", **options)
        answer = await client.exchange(publish("in/both", b"refused", 2, 6, dup=True, level=V5))
        assert answer == Packet(0x50, b"\0\6\x97")
        bridge.manager.update(definition)
        if restart:
            await bridge.restart()
            client = await bridge.connect("c", **options)
        answer = await client.exchange(publish("in/both", b"next", 2, 6, dup=True, level=V5))
        assert answer == Packet(0x50, b"\0\6")
        assert (await bridge.payloads("s"))[1:] == [b"next"]
        assert await bridge.payloads("other") == [b"refused", b"next"]

    run(tmp_path)


def test_messages_whose_topic_and_payload_are_the_same_together_are_told_apart(tmp_path: Path) -> None:
    @bridge_test
    async def run(bridge: Bridge) -> None:
        bridge.stream("other", "in/+")
        options = {"level": V5, "clean": False, "properties": {p.SESSION_EXPIRY: 60, **PLAIN}}
        client = await bridge.connect("c", **options)
        await refused_by(bridge, "s", client, publish("in/1", b"15", 2, 6, level=V5))
        client = await bridge.connect("c", **options)
        answer = await client.exchange(publish("in/11", b"5", 2, 6, dup=True, level=V5))
        assert answer == Packet(0x50, b"\0\6")
        assert await bridge.payloads("other") == [b"15", b"5"]

    run(tmp_path)


@bridge_test
async def test_a_client_that_sends_other_messages_with_one_id_takes_no_more_memory(bridge: Bridge) -> None:
    bridge.stream("other", "in/both")
    client = await bridge.connect("c", clean=False)
    for n in range(12):
        client = await refused_by(bridge, "s", client, publish("in/both", b"%d" % n, 2, 6, dup=True))
    for restart in (False, True):
        if restart:
            await bridge.restart()
        session = bridge.broker.sessions.get("c")
        assert session is not None
        assert len(session.partial[6]) <= FEW
    client = await bridge.connect("c", clean=False)
    assert await client.exchange(publish("in/both", b"11", 2, 6, dup=True)) == Packet(0x50, b"\0\6")
    assert (await bridge.payloads("other")).count(b"11") == 1


@bridge_test(hurry=5)
async def test_behind_a_message_that_failed_nothing_is_stored_also_while_an_earlier_one_waits(
    bridge: Bridge,
) -> None:
    client = await bridge.connect("c", clean=False)
    client.send(publish("in/a", b"0", 2, 9))  # QoS 2 messages of this stream are looked for from here on
    assert await client.receive() == Packet(0x50, b"\0\x09")

    def full(*_: Any, **_options: Any) -> None:
        raise OSError(28, "No space left on device")

    with full_disk():
        other = await bridge.connect("other", clean=False)  # finds that the journal is full
        bridge.broker.journal.ended(bridge.broker.sessions.get("other"))  # type: ignore[arg-type]
        await until(lambda: bridge.broker.journal.failed)
        client.send(publish("in/a", b"1", 2, 1))
        await until(lambda: bridge.store.streams["s"].next_sequence == 2)
        with pytest.MonkeyPatch.context() as disk:
            disk.setattr(bridge.store.streams["s"].log, "write", full)
            client.send(publish("in/a", b"2", 2, 2))
            await until(lambda: bridge.store.streams["s"].error is not None)
        client.send(publish("in/a", b"3", 2, 3))
        assert await client.closed()
        other.abort()
    client = await bridge.connect("c", clean=False)
    for number in (1, 2, 3):
        client.send(publish("in/a", b"%d" % number, 2, number, dup=True))
        assert await client.receive() == Packet(0x50, bytes((0, number)))
    assert await bridge.payloads() == [b"0", b"1", b"2", b"3"]


@bridge_test
async def test_a_message_that_one_of_its_streams_refuses_is_in_none_of_them(bridge: Bridge) -> None:
    bridge.stream("small", "in/both", max_size=4096, stream_segment_size=1024)
    for qos in (1, 2):
        client = await bridge.connect(f"c{qos}", clean=False)
        for _ in range(5):
            client.send(publish("in/both", b"x" * 5000, qos, 1, dup=True))
            assert await client.closed()
            client = await bridge.connect(f"c{qos}", clean=False)
    assert await bridge.payloads("s") == []


@bridge_test(hurry=20)
async def test_a_start_on_a_full_disk_serves_streams_and_gets_its_sessions_back_with_the_room(
    bridge: Bridge,
) -> None:
    subscriber = await bridge.connect("s", clean=False)
    await subscriber.subscribe(("plain", 1))
    subscriber.abort()
    publisher = await bridge.connect("p")
    assert await publisher.exchange(publish("plain", b"kept", 1, 1)) == Packet(0x40, b"\0\1")
    with full_disk():
        await bridge.restart()
        publisher = await bridge.connect("p")
        assert await publisher.exchange(publish("in/a", b"stored", 1, 1)) == Packet(0x40, b"\0\1")
        publisher.send(publish("plain", b"refused", 1, 2))
        assert await publisher.closed()
        await bridge.restart()  # what is on the disk stays as it was
    publisher = await bridge.connect("p")
    assert await publisher.exchange(publish("plain", b"again", 1, 2)) == Packet(0x40, b"\0\2")
    await bridge.restart()
    subscriber = await bridge.connect("s", clean=False)
    assert [(await subscriber.message()).payload for _ in range(2)] == [b"kept", b"again"]


@bridge_test(hurry=20)
async def test_a_full_disk_is_no_acknowledgement_and_no_end(bridge: Bridge) -> None:
    subscriber = await bridge.connect("s", clean=False)
    await subscriber.subscribe(("plain", 1))
    publisher = await bridge.connect("p")
    with full_disk():
        publisher.send(publish("plain", b"lost?", 1, 1))
        assert await publisher.closed()
        assert bridge.stat("rejected_storage") == 1
    publisher = await bridge.connect("p")
    publisher.send(publish("in/a", b"", 1, 1))
    assert await publisher.receive() == Packet(0x40, b"\0\1"), "streams have nothing to do with it"
    assert await publisher.exchange(publish("plain", b"again", 1, 2)) == Packet(0x40, b"\0\2")
    await bridge.restart()
    subscriber = await bridge.connect("s", clean=False)
    assert {(await subscriber.message()).payload for _ in range(2)} == {b"lost?", b"again"}


async def _with_a_mark(bridge: Bridge) -> list[Path]:
    """A stream of several segments that is read from its beginning at the next start; the closed ones."""
    bridge.stream("small", "small", stream_segment_size=1024)
    client = await bridge.connect("c", clean=False)
    await client.exchange(publish("small", b"", 2, 1))
    for number in range(2, 8):
        await client.exchange(publish("small", b"%d" % number * 600, 1, number))
    await bridge.stop()
    return sorted((bridge.root / "data" / "streams" / "small").glob("*.seg"))[1:-1]


@bridge_test
async def test_several_damaged_segments_do_not_keep_the_front_end_from_starting(bridge: Bridge) -> None:
    segments = await _with_a_mark(bridge)
    assert len(segments) > 2
    for path in segments:
        data = bytearray(path.read_bytes())
        data[500] ^= 1
        path.write_bytes(data)
    await bridge.start()
    assert len(await bridge.payloads("small")) == 7 - len(segments)


def test_a_segment_that_the_disk_does_not_give_back_does_not_keep_the_front_end_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @bridge_test
    async def run(bridge: Bridge) -> None:
        segments = await _with_a_mark(bridge)
        read = Files.read

        def failing(files: Files, fd: int, size: int, offset: int) -> bytes:
            if Path(f"/proc/self/fd/{fd}").readlink() == segments[0]:
                raise OSError(errno.EIO, "Input/output error")
            return read(files, fd, size, offset)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Files, "read", failing)
            await bridge.start()
        client = await bridge.connect("c", clean=False)
        assert (await client.exchange(publish("small", b"new", 2, 2))).head == 0x50
        assert "Input/output error" in caplog.text

    run(tmp_path)


@bridge_test(retained_messages=5)
async def test_retained_messages_that_have_expired_take_no_room_from_others(bridge: Bridge) -> None:
    client = await bridge.connect("c", level=V5)

    async def retain(topic: str, seconds: int) -> None:
        expiry = {p.MESSAGE_EXPIRY: seconds}
        await client.exchange(publish(topic, b"x", 1, 1, retain=True, level=V5, properties=expiry))

    for number in range(5):
        await retain(f"over/{number}", 0)
    for number in range(5):
        await retain(f"new/{number}", 1000)
    assert (bridge.stat("retained"), bridge.stat("dropped_retained")) == (5, 0)
    for _ in range(1000):
        await retain("new/0", 1000)
    assert len(bridge.broker.router.retained._expiring) < 150, "only what counts is kept"
    await retain("new/4", 0)
    await retain("new/5", 1000)
    assert (bridge.stat("retained"), bridge.stat("dropped_retained")) == (5, 0)
    await retain("new/5", 0)
    await bridge.restart()
    assert bridge.stat("retained") == 4
