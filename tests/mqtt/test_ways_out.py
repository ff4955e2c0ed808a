"""By each way that something leaves the broker, its room is free again, and whom it passes to keeps it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.access.rules import AccessRule, Deny
from bridge.mqtt.broker.reports import LOG_INTERVAL, Reports
from bridge.mqtt.broker.unmatched import OF_ONE
from bridge.mqtt.settings import MqttConfig
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5
from tests.fakes.byhand import Stream, Wire, World

from .harness import ack, connect, publish, subscribe, unsubscribe

LASTING = {p.SESSION_EXPIRY: 60}
ALL = AccessRule(publish=["#"], subscribe=["#"])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def lasting(world: World, name: str, *, clean: bool = False, **properties: int) -> Wire:
    """A client whose session outlives it; what it got after its CONNACK stays to be read."""
    asked = LASTING | {getattr(p, key): value for key, value in properties.items()}
    return world.connect(connect(name, level=V5, clean=clean, properties=asked))


def obey(world: World, *rules: AccessRule) -> None:
    """The rules become these, as at a reload."""
    accesses = world.broker.accesses
    accesses.first.load(MqttConfig(allow_anonymous=True, acl=list(rules)))
    for session in world.broker.sessions.all():
        session.identity = accesses.again(session.identity)
    for _ in world.broker.revoking():
        pass


def send(world: World, qos: int, count: int = 3, seconds: int | None = None) -> None:
    publisher = world.connect(connect("p", level=V5))
    expiry = None if seconds is None else {p.MESSAGE_EXPIRY: seconds}
    for number in range(1, count + 1):
        publisher.send(publish("t", b"x" * 1000, qos, number * (qos > 0), level=V5, properties=expiry))
        publisher.got()
        if qos == 2:
            publisher.send(ack(0x62, number))
            publisher.got()
    publisher.send(b"\xe0\0")
    publisher.got()


def acknowledged(world: World, wire: Wire) -> None:
    for qos in (1, 2):
        send(world, qos)
        wire.got()
        for number in range(1, 65):
            wire.send(ack(0x40 if qos == 1 else 0x50, number) if _flies(world, number) else b"\xc0\0")
            wire.got()
            wire.send(ack(0x70, number) if qos == 2 else b"\xc0\0")
            wire.got()


def _flies(world: World, number: int) -> bool:
    """Whether a message is under way to the subscriber with this packet id."""
    session = world.broker.sessions.get("s")
    assert session is not None
    return number in session.outbox._inflight


def refused(world: World, wire: Wire) -> None:
    send(world, 2)
    wire.got()
    for number in (1, 2, 3):
        wire.send(b"\x50\3\0" + bytes((number, 0x80)))
    wire.got()


def expired(world: World, wire: Wire) -> None:
    wire.lose()
    for qos in (1, 2):
        send(world, qos, seconds=5)
    world.run(10)
    lasting(world, "s").got()


def too_large(world: World, wire: Wire) -> None:
    wire.lose()
    for qos in (1, 2):
        send(world, qos)
    lasting(world, "s", MAXIMUM_PACKET_SIZE=500).got()


def too_large_now(world: World, wire: Wire) -> None:
    """They were under way before to a client that accepts less now, and must forget QoS 2 ids."""
    for qos in (1, 2):
        send(world, qos)
    wire.got()
    wire.lose()
    wire = lasting(world, "s", MAXIMUM_PACKET_SIZE=500)
    wire.got()
    for number in range(1, 7):
        wire.send(ack(0x70, number))
    wire.got()


def unread(world: World, wire: Wire) -> None:
    """Of QoS 0, for a client that does not read what it is sent, and goes; the others wait."""
    wire.connection.pause_writing()
    send(world, 0, count=2)
    send(world, 1, count=2)
    wire.lose()
    wire = lasting(world, "s")
    wire.got()
    wire.send(ack(0x40, 1) + ack(0x40, 2) + ack(0x40, 3) + ack(0x40, 4))
    wire.got()


def withdrawn_in_the_queue(world: World, wire: Wire) -> None:
    wire.lose()
    for qos in (1, 2):
        send(world, qos)
    obey(world, AccessRule(publish=["#"], subscribe=["other"]))


def withdrawn_in_flight(world: World, wire: Wire) -> None:
    for qos in (1, 2):
        send(world, qos)
    wire.got()
    wire.lose()
    obey(world, AccessRule(publish=["#"], subscribe=["other"]))


def withdrawn_under_way(world: World, wire: Wire) -> None:
    """The client is there, and gets nothing of it again when it is back."""
    for qos in (1, 2):
        send(world, qos)
    wire.got()
    obey(world, AccessRule(publish=["#"], subscribe=["other"]))
    wire.lose()
    lasting(world, "s").got()


def withdrawn_and_unsent(world: World, wire: Wire) -> None:
    """They wait behind others, for a client that reads nothing."""
    wire.connection.pause_writing()
    for qos in (0, 1, 2):
        send(world, qos)
    obey(world, AccessRule(publish=["#"], subscribe=["other"]))


def one_too_many(world: World, wire: Wire) -> None:
    wire.lose()
    send(world, 1, count=10)
    wire = lasting(world, "s")
    wire.got()
    for number in range(1, 10):
        wire.send(ack(0x40, number))
        wire.got()


def ended(world: World, wire: Wire) -> None:
    wire.got()
    wire.lose()
    send(world, 1)
    wire = lasting(world, "s", clean=True)
    wire.send(subscribe(1, ("t", 2), level=V5))
    wire.got()


WAYS: list[Callable[[World, Wire], None]] = [
    acknowledged, refused, expired, too_large, too_large_now, unread, withdrawn_in_the_queue,
    withdrawn_in_flight, withdrawn_under_way, withdrawn_and_unsent, one_too_many, ended,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_memory_of_a_message_is_free_once_it_has_left_its_queue(
    tmp_path: Path, way: Callable[[World, Wire], None]
) -> None:
    world = World(tmp_path, queued_messages=4)
    obey(world, ALL)
    wire = lasting(world, "s")
    wire.send(subscribe(1, ("t", 2), level=V5))
    wire.got()
    before = world.server.connections.stats()["session_bytes"]
    for _ in range(2):
        session = world.broker.sessions.get("s")
        assert session is not None
        if session.line is None:
            wire = lasting(world, "s")
            wire.got()
        obey(world, ALL)
        way(world, wire)
        session = world.broker.sessions.get("s")
        assert session is not None
        assert (len(session.outbox), session.outbox.size) == (0, 0)
        assert world.server.connections.stats()["session_bytes"] == before
        if session.line is not None:
            session.line.fail("test", "it goes", 0)
        world.run()


@pytest.mark.parametrize("reads", [1, 2, 3])
@pytest.mark.parametrize("how", ["in one read", "in several reads", "in turns with others"])
def test_a_removed_listener_closes_a_connection_once_all_that_it_sent_is_stored(
    world: World, reads: int, how: str
) -> None:
    stream, wire = world.streams.definitions["s"], world.connect(connect("c"))
    beside = world.connect(connect("beside"))
    other = world.connect(connect("other"))
    for one in (wire, beside):  # its route is known from now on
        one.got()
        one.send(publish("in/a", b"0", 1, 9))
        stream.commit()
        one.got()
    other.got()
    packets = [publish("in/a", b"%d" % number, 1, number) for number in range(1, reads + 1)]
    for data in [b"".join(packets)] if how == "in one read" else packets:
        if how == "in turns with others":
            beside.connection.data_received(data)
        wire.send(data)
    world.server.connections.end_all_of(world.endpoint, "the listener is gone")
    world.run()
    assert other.transport.closed, "it had sent nothing"
    assert not wire.transport.closed
    stream.commit()
    assert wire.got() == b"".join(ack(0x40, number) for number in range(1, reads + 1))
    assert wire.transport.closed
    assert {*stream.payloads} == {b"%d" % number for number in range(reads + 1)}


@pytest.mark.parametrize("topic", ["other", "in/other"], ids=["plain", "of a stream"])
@pytest.mark.parametrize("stays", [True, False], ids=["lasting", "not lasting"])
@pytest.mark.parametrize("way", ["chosen", "its session ends", "it may not read it any more"])
def test_a_shared_copy_that_a_member_gets_while_it_is_away_survives_a_kill(
    world: World, topic: str, way: str, stays: bool
) -> None:
    obey(world, ALL)
    world.streams.definitions["s"].by_itself = True
    member = lasting(world, "member")
    other = lasting(world, "other") if stays else world.connect(connect("other", level=V5))
    for wire in (member,) if way == "chosen" else (member, other):
        wire.send(subscribe(1, (f"$share/g/{topic}", 1), level=V5))
        wire.got()
    member.lose()
    if way == "it may not read it any more":
        other.connection.pause_writing()
    publisher = world.connect(connect("p", level=V5))
    publisher.send(publish(topic, b"x", 1, 1, level=V5))
    publisher.got()
    if way == "its session ends":
        assert publish(topic, b"x", 1, 1, level=V5) in other.got(), "who is there gets it"
        other.lose()
        if stays:
            lasting(world, "other", clean=True).got()
    elif way == "it may not read it any more":
        obey(world, ALL, AccessRule(deny=Deny(read=["%c", "in/%c"])))
    world.run()
    world.kill()
    member = lasting(world, "member")
    assert publish(topic, b"x", 1, 1, level=V5) in member.got()


@pytest.mark.parametrize("restart", [True, False], ids=["after a kill", "at once"])
@pytest.mark.parametrize("again", [True, False], ids=["and subscribes anew", "for good"])
def test_who_unsubscribes_before_it_has_all_retained_messages_gets_no_more_of_them(
    tmp_path: Path, restart: bool, again: bool
) -> None:
    world = World(tmp_path, in_flight=1)
    publisher = world.connect(connect("p"))
    for number in range(4):
        publisher.send(publish(f"r/{number}", b"x", 1, 1, retain=True))
        publisher.got()
    wire = lasting(world, "s")
    wire.send(subscribe(1, ("r/#", 1), level=V5))
    assert publish("r/0", b"x", 1, 1, retain=True, level=V5) in wire.got()
    wire.send(unsubscribe(2, "r/#", level=V5))
    wire.got()
    if again:  # 2: it wants none of what is retained
        wire.send(subscribe(3, ("r/#", 1 | 2 << 4), level=V5))
        wire.got()
    wire.lose()
    world.run()
    if restart:
        world.kill()
    wire = lasting(world, "s")
    got = wire.got()
    wire.send(ack(0x40, 1))
    assert got.count(b"r/") == 1, "what was under way"
    assert b"r/" not in wire.got()
    wire.send(publish("r/new", b"", 1, 1, level=V5))
    assert (b"r/new" in wire.got()) == again


@pytest.mark.parametrize(
    ("mine", "theirs", "size", "fits"),
    [
        ({"y": 10}, {"x": 30, "w": 30}, 70, False),
        ({"y": 10}, {"x": 30, "w": 30}, 45, True),
        ({"x": 45}, {"w": 52}, 50, True),
        ({"x": 45}, {"w": 52}, 54, False),
    ],
)
def test_what_replaces_a_retained_message_frees_the_room_of_whose_it_was(
    tmp_path: Path, mine: dict[str, int], theirs: dict[str, int], size: int, fits: bool
) -> None:
    """All of 100 kB; the message on x is replaced by one of mine."""
    world = World(tmp_path, retained_bytes=100_000)
    me = world.connect(connect("me", level=V5), address="10.0.0.1")
    them = world.connect(connect("them", level=V5), address="10.9.0.1")

    def keeps(wire: Wire, topic: str, kilobytes: int) -> bool:
        wire.send(publish(topic, bytes(kilobytes * 1000), 1, 1, retain=True, level=V5))
        wire.got()
        kept = world.broker.router.retained.get(topic)
        return (0 if kept is None else len(kept.payload)) == kilobytes * 1000

    for wire, messages in ((them, theirs), (me, mine)):
        assert all(keeps(wire, topic, kilobytes) for topic, kilobytes in messages.items())
    assert keeps(me, "x", size) == fits
    held = world.server.connections.stats()["retained_bytes"]
    assert held == sum(message.size for message in world.broker.router.retained.all()) <= 100_000
    assert all(keeps(me, topic, 0) for topic in "xyw")
    assert world.server.connections.stats()["retained_bytes"] == 0
    for one, other in ((them, me), (me, them)):  # nobody counts for what is gone
        assert keeps(one, "y", 60)
        assert keeps(other, "z", 55), "of who has most"
        assert keeps(other, "z", 0)
        assert keeps(one, "q", 20)
        assert keeps(one, "y", 50)
        assert keeps(one, "y", 20)
        assert keeps(other, "z", 58)
        assert keeps(one, "r", 10), "it has less than the other"
        assert all(keeps(other, topic, 0) for topic in "yzqr")


def test_topics_that_a_stream_takes_by_now_make_room_for_others_of_the_same_client(world: World) -> None:
    wires = [world.connect(connect(f"c{n}"), address=f"10.{n}.0.1") for n in range(2)]
    names = [chr(ord("a") + n // 26) + chr(ord("a") + n % 26) for n in range(OF_ONE)]
    unmatched = world.broker.publisher.unmatched

    def patterns(level: str, wire: Wire) -> set[str]:
        for name in names:
            wire.send(publish(f"{level}/{name}", b"x"))
            wire.got()
        return {one["topics"] for one in unmatched.listed()}

    for life, level in enumerate(("one", "two", "three")):
        mine = {f"{level}/{name}" for name in names}
        assert patterns(level, wires[0]) == mine
        both = patterns(f"other {level}", wires[1])
        assert mine < both
        assert "#" not in both
        assert patterns(f"more {level}", wires[0]) == both | {"#"}, "it has its share"
        world.streams.definitions[level] = Stream(level, "#")
        world.broker.router.forget_routes()
        assert unmatched.listed() == [], life
        del world.streams.definitions[level]
        world.broker.router.forget_routes()


def test_a_line_is_logged_once_in_each_interval_however_often_it_happens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [1000.0]
    reports, at = Reports(lambda: now[0]), list[float]()
    for step in range(300):
        now[0] = 1000 + step * LOG_INTERVAL / 100
        before = len(caplog.records)
        reports.log("kind", logging.WARNING, "it happened")
        at += [now[0]] * (len(caplog.records) - before)
        reports.log(f"another {step}", logging.DEBUG, "something else")
    assert at == [1000.0, 1000 + LOG_INTERVAL, 1000 + 2 * LOG_INTERVAL]
