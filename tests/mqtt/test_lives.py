"""What the broker remembers over several lives, with clients away and with clients that are there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bridge.errors import StorageFailed
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5
from tests.fakes.byhand import Wire, World

from .harness import PLAIN, ack, connect, full_disk, publish, subscribe

PRESENT = b"\x20\2\1\0"
Restart = Callable[[World], None]


def stopped(world: World) -> None:
    world.run()
    world.broker.stop()
    world.start()


def killed(world: World) -> None:
    world.run()
    world.kill()


def journal(world: World) -> bytes:
    """What is in the journal's file at the end of a turn."""
    world.run()
    return (world.root / "mqtt" / "sessions.journal").read_bytes()


RESTARTS = pytest.mark.parametrize("restart", [stopped, killed])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def client(world: World, name: str, **options: object) -> Wire:
    """A client that has got its CONNACK."""
    wire = world.connect(connect(name, **options))  # type: ignore[arg-type]
    answer = wire.got()
    assert answer[:1] + answer[3:4] == b"\x20\0", answer
    return wire


def lasting(world: World, name: str, **options: object) -> Wire:
    """A client of MQTT 5 whose session outlives it by 60 s, but not if it is there already."""
    wire = world.connect(connect(name, level=V5, clean=False, properties={p.SESSION_EXPIRY: 60}, **options))  # type: ignore[arg-type]
    assert wire.got()[3:4] == b"\0"
    return wire


@RESTARTS
@pytest.mark.parametrize("topic", ["t", "in/t"], ids=["plain", "of a stream"])
def test_messages_that_were_queued_in_several_lives_all_come_in_their_order(
    world: World, restart: Restart, topic: str
) -> None:
    world.streams.definitions["s"].by_itself = True
    subscriber = client(world, "s", clean=False)
    subscriber.send(subscribe(5, (topic, 1)))
    subscriber.got()
    subscriber.lose()
    waiting: list[bytes] = []
    for life in range(4):
        publisher = client(world, "p")
        for number in range(3):
            publisher.send(publish(topic, b"%d-%d" % (life, number), 1, 1))
            assert publisher.got() == ack(0x40, 1)
            waiting.append(b"%d-%d" % (life, number))
        restart(world)
        subscriber = world.connect(connect("s", clean=False))
        queued = [publish(topic, payload, 1, n) for n, payload in enumerate(waiting, 1)]
        assert subscriber.got() == PRESENT + b"".join(queued)
        subscriber.send(ack(0x40, 1))  # it has the first of them
        subscriber.got()
        subscriber.lose()
        del waiting[0]
        restart(world)


@RESTARTS
def test_a_qos_2_message_of_a_stream_that_was_under_way_comes_again_with_its_id(
    world: World, restart: Restart
) -> None:
    world.streams.definitions["s"].by_itself = True
    publisher, subscriber = client(world, "p"), client(world, "s", clean=False)
    subscriber.send(subscribe(5, ("in/#", 2)))
    subscriber.got()
    publisher.send(publish("in/a", b"1", 2, 1) + publish("in/a", b"2", 2, 2))
    publisher.got()
    assert subscriber.got() == publish("in/a", b"1", 2, 1) + publish("in/a", b"2", 2, 2)
    subscriber.send(ack(0x50, 1))
    assert subscriber.got() == ack(0x62, 1)
    subscriber.lose()
    for _ in range(2):
        restart(world)
        subscriber = world.connect(connect("s", clean=False))
        assert subscriber.got() == PRESENT + ack(0x62, 1) + publish("in/a", b"2", 2, 2, dup=True)
        subscriber.lose()


@RESTARTS
def test_what_waits_outlives_its_stream_over_a_stop_and_is_counted_as_lost_after_a_kill(
    world: World, restart: Restart, caplog: pytest.LogCaptureFixture
) -> None:
    stream = world.streams.definitions["s"]
    stream.by_itself = True
    for name in ("s", "t"):
        subscriber = client(world, name, clean=False)
        subscriber.send(subscribe(5, ("in/#", 1), ("plain", 1)))
        subscriber.got()
        subscriber.lose()
    publisher = client(world, "p")
    for number, topic in enumerate(("in/a", "plain", "in/b"), 1):
        publisher.send(publish(topic, b"%d" % number, 1, 1))
        assert publisher.got() == ack(0x40, 1)
    publisher.lose()
    world.run()
    if restart is stopped:
        world.broker.stop()
    stream.stored.clear()
    world.kill()
    payloads = [b"1", b"2", b"3"] if restart is stopped else [b"2"]
    for name in ("s", "t"):
        got = world.connect(connect(name, clean=False)).got()
        assert re.findall(rb"(?:in/.|plain)..(\d)", got, re.DOTALL) == payloads
    assert world.broker.counts["dropped_queue_lost"] == (0 if restart is stopped else 4)
    assert ("2 messages that waited for client 's' are lost" in caplog.text) is (restart is killed)


@RESTARTS
def test_a_number_that_another_message_of_the_stream_has_got_brings_no_wrong_message(
    world: World, restart: Restart
) -> None:
    stream = world.streams.definitions["s"]
    subscriber, publisher = client(world, "s", clean=False), client(world, "p")
    subscriber.send(subscribe(5, ("in/#", 1)))
    subscriber.got()
    subscriber.lose()
    publisher.send(publish("in/a", b"not stored", 1, 1))
    publisher.got()
    stream.commit(StorageFailed("no"))
    publisher = client(world, "p")
    publisher.send(publish("in/a", b"stored", 1, 1))
    publisher.got()
    stream.commit()
    restart(world)
    got = world.connect(connect("s", clean=False)).got()
    assert got.count(b"in/a") == (2 if restart is stopped else 1)
    assert got.endswith(b"stored")


def test_a_kill_says_that_clients_were_connected_and_may_lack_what_was_under_way(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    client(world, "s", clean=False).send(subscribe(5, ("in/#", 1)))
    client(world, "t", clean=False).send(subscribe(5, ("in/#", 1)))
    stopped(world)
    assert world.broker.counts["interrupted_sessions"] == 0
    client(world, "s", clean=False)
    killed(world)
    assert world.broker.counts["interrupted_sessions"] == 1
    assert "while 1 clients with persistent sessions were connected" in caplog.text


@RESTARTS
def test_restarts_neither_lengthen_a_session_nor_the_delay_of_a_will(world: World, restart: Restart) -> None:
    watcher = client(world, "watcher", clean=False)
    watcher.send(subscribe(5, ("will/#", 1)))
    watcher.got()
    lasting(world, "c").lose()
    will = {"will": ("will/w", b"gone", 1), "will_properties": {p.WILL_DELAY: 40}}
    lasting(world, "w", **will).lose()
    watcher.lose()
    for second in range(10, 60, 10):
        world.run(10)
        restart(world)
        watcher = world.connect(connect("watcher", clean=False))
        got = watcher.got()
        assert (b"gone" in got) is (second == 40), f"after {second} s"
        watcher.send(ack(0x40, 1))
        watcher.got()
        watcher.lose()
        assert (world.broker.sessions.get("c") is None) is False, f"after {second} s"
    world.run(11)
    assert world.broker.sessions.get("c") is None


@RESTARTS
@pytest.mark.parametrize("failing", ["s", "other"])
def test_a_stream_that_has_a_message_does_not_get_it_again_after_a_restart(
    world: World, failing: str, restart: Restart
) -> None:
    streams = world.streams.definitions
    streams["s" if failing == "other" else "other"].by_itself = True
    wire = client(world, "c", clean=False)
    for attempt in range(3):
        wire.send(publish("in/both", b"x", 2, 7, dup=attempt > 0))
        wire.got()
        streams[failing].commit(StorageFailed("no"))
        wire.got()
        assert wire.transport.closed
        restart(world)
        wire = client(world, "c", clean=False)
    streams[failing].by_itself = True
    wire.send(publish("in/both", b"x", 2, 7, dup=True))
    assert wire.got() == b"\x50\2\0\7"
    assert (streams["s"].payloads, streams["other"].payloads) == ([b"x"], [b"x"])


def test_a_message_that_waits_while_the_journal_begins_anew_is_stored_after_a_kill(world: World) -> None:
    wire = client(world, "c", clean=False)
    wire.send(publish("in/a", b"x", 2, 7))
    assert wire.got() == b""
    other = client(world, "other", clean=False)
    with full_disk(1):
        other.send(subscribe(5, ("t", 1)))
        other.got()
    world.run(5)  # what could not be written is written as a whole
    world.kill()
    wire = world.connect(connect("c", clean=False) + publish("in/a", b"x", 2, 7, dup=True))
    assert wire.got() == PRESENT
    stream = world.streams.definitions["s"]
    stream.commit()
    assert wire.got() == b"\x50\2\0\7"
    assert stream.payloads == [b"x"]


def test_what_a_slow_subscriber_leaves_behind_takes_no_room(tmp_path: Path) -> None:
    """Messages of QoS 0 wait only while it is there; the others have all of the queue then."""
    world = World(tmp_path, queued_bytes=10_000)
    publisher, subscriber = client(world, "p"), client(world, "s", clean=False)
    subscriber.send(subscribe(5, ("live", 0), ("t", 1)))
    subscriber.got()
    for _ in range(5):
        subscriber.connection.pause_writing()
        publisher.send(publish("live", b"x" * 3000) * 3)
        publisher.got()
        subscriber.lose()
        subscriber = client(world, "s", clean=False)
    subscriber.lose()
    for number in range(4):
        publisher.send(publish("t", b"%d" % number * 2000, 1, 1))
        publisher.got()
    subscriber = world.connect(connect("s", clean=False))
    queued = [publish("t", b"%d" % number * 2000, 1, number + 1) for number in range(4)]
    assert subscriber.got() == PRESENT + b"".join(queued)


@pytest.mark.parametrize("topic", ["plain/{}", "in/{}", "in/both/{}"])
def test_no_more_is_retained_than_the_limit_whatever_else_becomes_of_it(tmp_path: Path, topic: str) -> None:
    world = World(tmp_path, retained_messages=3)
    stream = world.streams.definitions["s"]
    stream.by_itself = True
    wire = client(world, "c", level=V5, properties=PLAIN)
    world.streams.definitions["other"].by_itself = True
    plain = topic.startswith("plain")
    taken = b"\x40\3\0\x09\x10" if plain else ack(0x40, 9)  # nobody subscribes
    for number in range(6):
        wire.send(publish(topic.format(number), b"x", 1, 9, retain=True, level=V5))
        refused = number >= 3 and plain
        assert wire.got() == (b"\x40\3\0\x09\x97" if refused else taken)
        assert len(world.broker.router.retained) == min(number + 1, 3)
    assert len(stream.payloads) == (0 if plain else 6), "a stream stores what is not retained"
    for number, payload in ((0, b""), (9, b"x")):
        wire.send(publish(topic.format(number), payload, 1, 9, retain=True, level=V5))
        assert wire.got() == taken


@pytest.mark.parametrize("restart", [None, stopped, killed])
def test_who_leaves_before_it_has_all_retained_messages_gets_the_others_when_it_is_back(
    tmp_path: Path, restart: Restart | None
) -> None:
    world = World(tmp_path, in_flight=2, queued_messages=1)
    topics = [f"r/{number}" for number in range(5)]
    publisher = client(world, "p")
    for topic in topics:
        publisher.send(publish(topic, b"x", 1, 1, retain=True))
        assert publisher.got() == ack(0x40, 1)
    subscriber = client(world, "s", clean=False)
    subscriber.send(subscribe(5, ("r/#", 1)))
    sent = [publish(topic, b"x", 1, number, retain=True) for number, topic in enumerate(topics[:2], 1)]
    assert subscriber.got() == b"\x90\3\0\5\1" + b"".join(sent)
    subscriber.send(ack(0x40, 1))
    assert subscriber.got() == publish(topics[2], b"x", 1, 3, retain=True)
    subscriber.lose()
    if restart is not None:
        restart(world)
    subscriber = world.connect(connect("s", clean=False))
    again, found = subscriber.got(), []
    while published := again.removeprefix(PRESENT):
        found += re.findall(rb"r/\d", published)
        ids = re.findall(rb"r/\d(..)x", published, re.DOTALL)
        subscriber.send(b"".join(ack(0x40, int.from_bytes(number, "big")) for number in ids))
        again = subscriber.got()
    assert found == [b"r/1", b"r/2", b"r/3", b"r/4"], "each that it has not acknowledged, once and in order"
    assert world.broker.counts["dropped_queue_full"] == 0
    subscriber.lose()
    (restart or stopped)(world)
    assert world.connect(connect("s", clean=False)).got() == PRESENT


@contextmanager
def forgetful_disk() -> Iterator[Callable[[World], None]]:
    """A disk that loses what was not synced; yields what cuts its power and starts the broker again."""
    fdatasync, durable = os.fdatasync, dict[int, bytes]()

    def sync(fd: int) -> None:
        fdatasync(fd)
        durable[os.fstat(fd).st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

    def cut(world: World) -> None:
        journal = world.root / "mqtt" / "sessions.journal"
        journal.write_bytes(durable.get(journal.stat().st_ino, b""))
        world.machine.reboot(synchronised=True)
        world.kill()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", sync)
        yield cut


@pytest.mark.parametrize("then", [None, stopped, killed])
def test_a_power_cut_takes_the_last_second_of_the_journal_and_no_more(
    world: World, then: Restart | None
) -> None:
    """Also right after a start, which has written all of it again."""
    with forgetful_disk() as power_cut:
        subscriber = client(world, "s", clean=False)
        subscriber.send(subscribe(5, ("t", 1)))
        subscriber.got()
        subscriber.lose()
        publisher = client(world, "p")
        publisher.send(publish("t", b"before", 1, 1, retain=True))
        publisher.got()
        world.run(2)
        if then is not None:
            then(world)
            publisher = client(world, "p")
        publisher.send(publish("t", b"lost", 1, 2))
        assert publisher.got() == ack(0x40, 2)
        power_cut(world)
        subscriber = world.connect(connect("s", clean=False))
        assert subscriber.got() == PRESENT + publish("t", b"before", 1, 1)
        assert [message.payload for message in world.broker.router.retained.all()] == [b"before"]


@RESTARTS
def test_a_qos_2_message_comes_once_whenever_the_broker_ends(world: World, restart: Restart) -> None:
    subscriber = client(world, "s", clean=False)
    subscriber.send(subscribe(5, ("t", 2)))
    subscriber.got()
    publisher = client(world, "p")
    for number in (1, 2):
        publisher.send(publish("t", b"%d" % number, 2, number))
    assert subscriber.got() == publish("t", b"1", 2, 1) + publish("t", b"2", 2, 2)

    restart(world)
    subscriber = world.connect(connect("s", clean=False))
    again = [publish("t", b"%d" % number, 2, number, dup=True) for number in (1, 2)]
    assert subscriber.got() == PRESENT + b"".join(again)
    subscriber.send(ack(0x50, 1))
    assert subscriber.got() == ack(0x62, 1)

    restart(world)
    subscriber = world.connect(connect("s", clean=False))
    assert subscriber.got() == PRESENT + ack(0x62, 1) + again[1]
    publisher = client(world, "p")
    publisher.send(publish("t", b"3", 2, 3))
    assert subscriber.got() == publish("t", b"3", 2, 3), "1 is still in use"
    subscriber.send(ack(0x70, 1))
    subscriber.got()

    restart(world)
    subscriber = world.connect(connect("s", clean=False))
    assert subscriber.got() == PRESENT + again[1] + publish("t", b"3", 2, 3, dup=True)


def test_a_subscriber_gets_what_follows_a_power_cut_that_took_the_packet_ids_it_holds(world: World) -> None:
    """It would take a message with an id that it holds for a repetition (MQTT 3.1.1 section 4.3.3)."""
    with forgetful_disk() as power_cut:
        subscriber = client(world, "s", clean=False)
        subscriber.send(subscribe(5, ("t", 2), ("u", 1)))
        subscriber.got()
        world.run(2)
        publisher = client(world, "p")
        publisher.send(publish("t", b"unknown", 2, 1))
        assert subscriber.got() == publish("t", b"unknown", 2, 1)
        subscriber.send(ack(0x50, 1))
        power_cut(world)
        publisher = client(world, "p")
        publisher.send(publish("t", b"next", 2, 1))
        subscriber = world.connect(connect("s", clean=False))
        ids = range(1, world.config.limits.in_flight + 1)
        assert subscriber.got() == PRESENT + b"".join(ack(0x62, number) for number in ids)
        subscriber.send(b"".join(ack(0x70, number) for number in ids))
        assert subscriber.got() == publish("t", b"next", 2, 1)


def test_a_qos_2_message_and_its_pubrel_wait_for_the_journal(world: World) -> None:
    subscriber, publisher = client(world, "s", clean=False), client(world, "p")
    subscriber.send(subscribe(5, ("t", 2)))
    subscriber.got()
    publisher.send(publish("t", b"1", 2, 1))
    assert subscriber.got() == publish("t", b"1", 2, 1)
    with full_disk():
        publisher.send(publish("t", b"2", 2, 2))
        subscriber.send(ack(0x50, 1))
        assert subscriber.got() == b""
        subscriber.lose()
        subscriber = world.connect(connect("s", clean=False))
        world.run(3.0)
        assert subscriber.got() == PRESENT
    world.run(3.0)
    assert subscriber.got() == publish("t", b"2", 2, 2) + ack(0x62, 1)


@RESTARTS
def test_a_packet_id_of_a_message_that_no_restart_keeps_is_released(world: World, restart: Restart) -> None:
    subscriber = client(world, "s", clean=False)
    subscriber.send(subscribe(5, ("in/#", 2)))
    subscriber.got()
    world.streams.definitions["s"].by_itself = True
    publisher = client(world, "p")
    publisher.send(publish("in/a", b"x", 2, 1))  # it is in the stream, and not in the journal
    assert subscriber.got() == publish("in/a", b"x", 2, 1)
    subscriber.send(ack(0x50, 1))
    restart(world)
    subscriber = world.connect(connect("s", clean=False))
    assert subscriber.got() == PRESENT + ack(0x62, 1)
    subscriber.send(ack(0x70, 1))
    restart(world)
    subscriber = world.connect(connect("s", clean=False))
    assert subscriber.got() == PRESENT


@pytest.mark.parametrize("filters", [["t"], ["$share/g/t"], ["t", "$share/g/t"]])
def test_a_kill_in_the_middle_of_a_write_keeps_a_message_with_the_id_of_its_sender(
    world: World, filters: list[str]
) -> None:
    subscriber = client(world, "s", clean=False)
    subscriber.send(subscribe(5, *((one, 1) for one in filters)))
    subscriber.got()
    publisher = client(world, "p", clean=False)
    before = journal(world)
    publisher.send(publish("t", b"x", 2, 7))
    assert publisher.got() == ack(0x50, 7)
    after = journal(world)
    copies = set()
    for size in range(len(before), len(after) + 1):
        (world.root / "mqtt" / "sessions.journal").write_bytes(after[:size])
        world.kill()
        publisher = world.connect(connect("p", clean=False))
        publisher.got()
        publisher.send(publish("t", b"x", 2, 7, dup=True))
        assert publisher.got() == ack(0x50, 7)
        subscriber = world.connect(connect("s", clean=False))
        copies.add(subscriber.got().count(b"x"))
        world.broker.stop()
    assert copies == {len(filters)}


def test_a_message_that_a_start_finds_and_cannot_sync_is_stored_again(world: World) -> None:
    stream = world.streams.definitions["s"]
    publisher = client(world, "p", clean=False)
    publisher.send(publish("in/a", b"x", 2, 1))
    stream.commit()  # in the turn in which it was read: the journal does not have its id
    world.streams.unsyncable = {"s"}
    world.kill()
    world.streams.unsyncable = set()
    publisher = world.connect(connect("p", clean=False))
    publisher.got()
    publisher.send(publish("in/a", b"x", 2, 1, dup=True))
    stream.commit()
    assert publisher.got() == ack(0x50, 1)
    assert stream.payloads == [b"x", b"x"], "the first may be gone after the next start"


def test_a_message_of_a_stream_in_memory_is_stored_again_after_a_kill(world: World) -> None:
    stream = world.streams.definitions["s"]
    stream.lasting = False
    publisher = client(world, "p", clean=False)
    publisher.send(publish("in/a", b"x", 2, 1))
    stream.commit()
    world.run()
    stream.stored.clear()
    world.kill()
    publisher = world.connect(connect("p", clean=False))
    publisher.got()
    publisher.send(publish("in/a", b"x", 2, 1, dup=True))
    stream.commit()
    assert publisher.got() == ack(0x50, 1)
    assert stream.payloads == [b"x"]
