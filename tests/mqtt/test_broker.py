"""The broker by hand: no socket, no event loop, no real clock.

Bytes go in, whole or one by one; bytes come out. Costs 3 seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.errors import StorageFailed
from bridge.mqtt.server import control
from bridge.mqtt.server.states import NEXT, TRANSITIONS, State
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5, V311
from tests.fakes.byhand import Wire, World

from .harness import PING, PLAIN, ack, connect, full_disk, publish, subscribe, unsubscribe

CONNACK, PRESENT = b"\x20\2\0\0", b"\x20\2\1\0"
PONG = b"\xd0\0"
DISCONNECT = b"\xe0\0"
LASTING = {p.SESSION_EXPIRY: 60}


@pytest.fixture(params=[0, 1, 7], ids=["whole", "byte by byte", "seven bytes at a time"])
def pieces(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


Client = Callable[..., Wire]


@pytest.fixture
def client(world: World, pieces: int) -> Client:
    """Connects a client whose bytes come in pieces; it has got its CONNACK."""

    def make(name: str, *, present: bool = False, level: int = V311, **options: object) -> Wire:
        wire = world.connect(connect(name, level=level, **options), pieces)  # type: ignore[arg-type]
        answer = wire.got()
        if level == V5:
            assert answer[0] == 0x20, answer
            assert answer[2:4] == bytes((present, 0))
        else:
            assert answer == (PRESENT if present else CONNACK)
        return wire

    return make


def test_nothing_is_acknowledged_before_its_commit_and_then_all_in_order(
    world: World, client: Client
) -> None:
    stream, wire = world.streams.definitions["s"], client("c")
    wire.send(publish("in/a", b"1", 1, 1) + publish("in/a", b"2", 2, 2) + publish("in/a", b"3", 1, 3))
    wire.send(publish("plain", b"4", 1, 4))
    assert wire.got() == b"", "the last one needs no stream, and waits for those before it"
    stream.commit()
    assert wire.got() == b"\x40\2\0\1" + b"\x50\2\0\2" + b"\x40\2\0\3" + b"\x40\2\0\4"
    assert stream.payloads == [b"1", b"2", b"3"]


def test_a_commit_that_fails_acknowledges_nothing_behind_it_and_stores_nothing_behind_it(
    world: World, client: Client
) -> None:
    stream, wire = world.streams.definitions["s"], client("c")
    wire.send(publish("in/a", b"1", 1, 1))
    stream.commit()
    wire.send(publish("in/a", b"2", 1, 2))
    stream.commit(StorageFailed("the disk is gone"))
    wire.send(publish("in/a", b"3", 1, 3))
    assert wire.got() == b"\x40\2\0\1"
    assert wire.transport.closed
    stream.commit()
    assert stream.payloads == [b"1"]


def test_a_message_for_two_streams_waits_for_both(world: World, client: Client) -> None:
    wire = client("c")
    wire.send(publish("in/both", b"x", 1, 1))
    world.streams.definitions["s"].commit()
    assert wire.got() == b""
    world.streams.definitions["other"].commit()
    assert wire.got() == b"\x40\2\0\1"


def test_a_message_that_one_of_its_streams_refuses_is_in_none(world: World, client: Client) -> None:
    wire = client("c", level=V5, properties=PLAIN)
    world.streams.definitions["other"].full = True
    wire.send(publish("in/both", b"x", 1, 1, level=V5))
    assert wire.got() == b"\x40\3\0\1\x97"
    assert [one.pending for one in world.streams.definitions.values()] == [[], []]


def test_a_kill_right_after_the_first_qos_2_message_of_a_stream_is_stored_leaves_no_second_copy(
    world: World,
) -> None:
    stream = world.streams.definitions["s"]
    wire = world.connect(connect("c", clean=False))
    assert wire.got() == CONNACK
    wire.send(publish("in/a", b"x", 2, 7))
    stream.commit()  # in the turn in which it was read: nothing of the turn's end has been done
    world.kill()
    wire = world.connect(connect("c", clean=False))
    assert wire.got() == PRESENT
    wire.send(publish("in/a", b"x", 2, 7, dup=True))
    assert wire.got() == b"\x50\2\0\7"
    assert stream.payloads == [b"x"]


@pytest.mark.parametrize("level", [V311, V5])
def test_a_qos_2_message_that_a_start_could_not_find_again_is_not_stored(world: World, level: int) -> None:
    stream = world.streams.definitions["s"]
    stream.by_itself = True
    message = publish("in/a", b"x", 2, 7, level=level)
    lasting = LASTING if level == V5 else None
    one, two = (world.connect(connect(name, clean=False, level=level, properties=lasting)) for name in "ab")
    two.got()
    with full_disk():
        one.send(message)
        one.got()
        assert one.transport.closed
        assert stream.payloads == []
    two.send(message)  # the journal is written at once, not when it would try again
    assert stream.payloads == [b"x"]
    world.kill()
    two = world.connect(connect("b", clean=False, level=level, properties=lasting))
    two.send(publish("in/a", b"x", 2, 7, dup=True, level=level))
    two.got()
    assert stream.payloads == [b"x"]


def test_a_repeated_pubrel_is_not_answered_before_the_journal_has_the_release(world: World) -> None:
    stream = world.streams.definitions["s"]
    stream.by_itself = True
    wire = world.connect(connect("c", clean=False) + publish("in/a", b"x", 2, 7))
    assert wire.got() == CONNACK + b"\x50\2\0\7"
    with full_disk():
        for answer in (b"", PRESENT):  # the second time the packet id is free in memory
            wire.send(ack(0x62, 7))
            world.run(5)  # the journal tries again each second
            assert wire.got() == answer
            assert wire.transport.closed
            wire = world.connect(connect("c", clean=False))
    world.kill()
    wire = world.connect(connect("c", clean=False) + ack(0x62, 7) + publish("in/a", b"y", 2, 7, dup=True))
    assert wire.got() == PRESENT + b"\x70\2\0\7" + b"\x50\2\0\7"
    assert stream.payloads == [b"x", b"y"]


def test_qos_2_is_stored_once_however_often_it_is_sent_and_free_after_its_release(
    world: World, client: Client
) -> None:
    stream = world.streams.definitions["s"]
    stream.by_itself = True
    wire = client("c", clean=False)
    wire.send(publish("in/a", b"x", 2, 7))
    assert wire.got() == b"\x50\2\0\7"
    wire.lose()
    wire = client("c", clean=False, present=True)
    wire.send(publish("in/a", b"x", 2, 7, dup=True))
    assert wire.got() == b"\x50\2\0\7"
    wire.send(ack(0x62, 7))
    assert wire.got() == b"\x70\2\0\7"
    wire.send(publish("in/a", b"y", 2, 7))
    assert wire.got() == b"\x50\2\0\7"
    assert stream.payloads == [b"x", b"y"]


def test_a_release_before_its_message_is_acknowledged_closes(world: World, client: Client) -> None:
    wire = client("c")
    wire.send(publish("in/a", b"x", 2, 7) + ack(0x62, 7))
    wire.got()
    assert wire.transport.closed


def test_a_client_that_returns_waits_for_what_it_sent_before(world: World, client: Client) -> None:
    stream, wire = world.streams.definitions["s"], client("c", clean=False)
    wire.send(publish("in/a", b"x", 2, 7))
    again = world.connect(connect("c", clean=False))
    assert again.got() == b"", "whether the id is in use is not known yet"
    assert wire.got() == b""
    assert wire.transport.closed, "it was taken over"
    stream.commit()
    assert again.got() == PRESENT
    again.send(publish("in/a", b"x", 2, 7, dup=True))
    assert again.got() == b"\x50\2\0\7"
    assert stream.payloads == [b"x"]


def test_a_client_that_returns_waits_no_longer_than_five_seconds(world: World, client: Client) -> None:
    wire = client("c", clean=False)
    wire.send(publish("in/a", b"x", 2, 7))
    again = world.connect(connect("c", clean=False))
    world.run(4.9)
    assert again.got() == b""
    world.run(0.2)
    assert again.got() == b"\x20\2\0\3", "server unavailable"
    assert again.transport.closed


def test_of_many_takeovers_at_once_the_last_one_stays(world: World) -> None:
    wires = [world.connect(connect("c", clean=False)) for _ in range(5)]
    assert wires[-1].got() == PRESENT
    assert [wire.transport.closed for wire in wires] == [True] * 4 + [False]


def test_a_subscriber_gets_what_is_published_and_what_was_retained(world: World, client: Client) -> None:
    publisher, subscriber = client("p"), client("s")
    publisher.send(publish("t/old", b"kept", 0, retain=True))
    subscriber.send(subscribe(5, ("t/+", 1)))
    assert subscriber.got() == b"\x90\3\0\5\1" + publish("t/old", b"kept", 0, retain=True)
    publisher.send(publish("t/new", b"now", 1, 1))
    assert publisher.got() == b"\x40\2\0\1"
    assert subscriber.got() == publish("t/new", b"now", 1, 1)
    subscriber.send(ack(0x40, 1) + unsubscribe(6, "t/+"))
    assert subscriber.got() == b"\xb0\2\0\6"
    publisher.send(publish("t/new", b"later", 0))
    assert subscriber.got() == b""


def test_an_unacknowledged_message_comes_again_to_the_client_that_returns(
    world: World, client: Client
) -> None:
    publisher, subscriber = client("p"), client("s", clean=False)
    subscriber.send(subscribe(5, ("t", 2)))
    subscriber.got()
    publisher.send(publish("t", b"1", 1, 1) + publish("t", b"2", 2, 2))
    assert subscriber.got() == publish("t", b"1", 1, 1) + publish("t", b"2", 2, 2)
    subscriber.lose()
    publisher.send(publish("t", b"3", 1, 3))
    publisher.got()
    subscriber = world.connect(connect("s", clean=False))
    again = publish("t", b"1", 1, 1, dup=True) + publish("t", b"2", 2, 2, dup=True)
    assert subscriber.got() == PRESENT + again + publish("t", b"3", 1, 3)


def test_a_qos_2_message_that_a_subscriber_does_not_accept_holds_back_no_other(
    world: World, client: Client
) -> None:
    limits = {p.MAXIMUM_PACKET_SIZE: 100, p.RECEIVE_MAXIMUM: 1}
    publisher, subscriber = client("p"), client("s", level=V5, clean=False, properties=LASTING | limits)
    subscriber.send(subscribe(5, ("t", 2), level=V5))
    subscriber.got()
    publisher.send(publish("t", b"x" * 500, 2, 1) + publish("t", b"small", 2, 2))
    publisher.got()
    assert subscriber.got() == publish("t", b"small", 2, 1, level=V5)
    assert world.broker.counts["dropped_too_large"] == 1


@pytest.mark.parametrize("after", ["reconnect", "restart"])
def test_the_id_of_a_qos_2_message_that_is_not_sent_again_is_released_before_its_next_use(
    world: World, client: Client, after: str
) -> None:
    subscriber = client("s", level=V5, clean=False, properties=LASTING)
    subscriber.send(subscribe(5, ("t", 2), level=V5))
    subscriber.got()
    client("p").send(publish("t", b"x" * 500, 2, 1))
    assert subscriber.got() == publish("t", b"x" * 500, 2, 1, level=V5)
    subscriber.lose()
    if after == "restart":
        world.broker.stop()
        world.start()
    less = LASTING | {p.MAXIMUM_PACKET_SIZE: 100}
    subscriber = world.connect(connect("s", level=V5, clean=False, properties=less))
    assert subscriber.got().endswith(ack(0x62, 1))
    publisher = client("p")
    publisher.send(publish("t", b"2", 2, 2))
    assert subscriber.got() == publish("t", b"2", 2, 2, level=V5), "1 is in use until its PUBCOMP"
    subscriber.send(ack(0x70, 1))
    publisher.send(publish("t", b"3", 2, 3))
    assert subscriber.got() == publish("t", b"3", 2, 1, level=V5)


def test_a_client_that_returns_while_the_journal_fails_gets_what_waits_once_it_works(
    world: World, client: Client
) -> None:
    publisher, subscriber = client("p"), client("s", level=V5, clean=False, properties=LASTING)
    subscriber.send(subscribe(5, ("t", 2), level=V5))
    subscriber.got()
    publisher.send(publish("t", b"1", 2, 1))
    assert subscriber.got() == publish("t", b"1", 2, 1, level=V5)
    with full_disk():
        publisher.send(publish("t", b"2", 2, 2))
        publisher.got()
        subscriber.lose()
        one = LASTING | {p.RECEIVE_MAXIMUM: 1}
        subscriber = world.connect(connect("s", level=V5, clean=False, properties=one))
        world.run(1)
        assert subscriber.got()[:1] == b"\x20", "the journal is not waited for without end"
    world.run(1)
    assert subscriber.got() == publish("t", b"1", 2, 1, dup=True, level=V5)
    subscriber.send(ack(0x50, 1))
    assert subscriber.got() == ack(0x62, 1)
    subscriber.send(ack(0x70, 1))
    assert subscriber.got() == publish("t", b"2", 2, 2, level=V5)


def test_a_session_outlives_a_restart_with_its_subscriptions_and_messages(
    world: World, client: Client
) -> None:
    publisher, subscriber = client("p"), client("s", clean=False)
    subscriber.send(subscribe(5, ("t", 1)))
    subscriber.got()
    subscriber.lose()
    publisher.send(publish("t", b"1", 1, 1))
    assert publisher.got() == b"\x40\2\0\1"
    world.broker.stop()
    world.start()
    subscriber = world.connect(connect("s", clean=False))
    assert subscriber.got() == PRESENT + publish("t", b"1", 1, 1)


@pytest.mark.parametrize("limit", [{"queued_messages": 5}, {"queued_bytes": 6000}], ids=["number", "bytes"])
def test_a_restart_drops_nothing_of_a_full_queue_behind_messages_in_flight(
    tmp_path: Path, limit: dict[str, int]
) -> None:
    world = World(tmp_path, in_flight=3, **limit)
    messages = [publish("t", b"%d" % number * 900, 1, number) for number in range(1, 9)]
    subscriber = world.connect(connect("s", clean=False))
    subscriber.send(subscribe(5, ("t", 1)))
    subscriber.got()
    publisher = world.connect(connect("p"))
    publisher.send(b"".join(messages))
    publisher.got()
    assert subscriber.got() == b"".join(messages[:3])
    for _ in range(2):
        world.broker.stop()
        world.start()
    subscriber, got = world.connect(connect("s", clean=False)), b""
    for number in range(1, 9):
        got += subscriber.got()
        subscriber.send(ack(0x40, number))
    again = [publish("t", b"%d" % number * 900, 1, number, dup=True) for number in range(1, 4)]
    assert got == PRESENT + b"".join(again + messages[3:])
    assert not world.broker.counts["dropped_queue_full"]


@pytest.mark.parametrize("way", ["lost", "DISCONNECT"])
def test_a_will_is_published_when_its_client_is_lost_and_not_when_it_goes(
    world: World, client: Client, way: str
) -> None:
    subscriber = client("s")
    subscriber.send(subscribe(5, ("will/#", 0)))
    subscriber.got()
    wire = client("c", will=("will/c", b"gone", 0))
    if way == "lost":
        wire.lose()
    else:
        wire.send(DISCONNECT)
    assert subscriber.got() == (publish("will/c", b"gone", 0) if way == "lost" else b"")


def test_a_will_waits_for_its_delay_and_is_taken_back_by_the_client_that_returns(
    world: World, client: Client
) -> None:
    subscriber = client("s")
    subscriber.send(subscribe(5, ("will/#", 0)))
    subscriber.got()
    will = {
        "will": ("will/c", b"gone", 0),
        "will_properties": {p.WILL_DELAY: 10},
        "properties": LASTING,
        "level": V5,
        "clean": False,
    }
    client("c", **will).lose()
    world.run(9)
    assert subscriber.got() == b""
    client("c", present=True, **will).lose()
    world.run(9)
    assert subscriber.got() == b"", "the delay began anew"
    world.run(1)
    assert subscriber.got() == publish("will/c", b"gone", 0)


def test_no_local_also_keeps_its_own_will_from_a_client_that_returns(world: World, client: Client) -> None:
    will = {"will": ("t", b"gone", 1), "properties": LASTING, "level": V5, "clean": False}
    wire, other = client("c", **will), client("other", properties=LASTING, level=V5, clean=False)
    for each, options in ((wire, 4 | 1), (other, 1)):
        each.send(subscribe(5, ("t", options), level=V5))
        each.got()
    wire.lose()
    assert other.got() == publish("t", b"gone", 1, 1, level=V5)
    wire = world.connect(connect("c", properties=LASTING, level=V5, clean=False))
    assert b"gone" not in wire.got()


def test_a_will_needs_a_response_topic_without_wildcards_as_a_publish_does(world: World) -> None:
    for reply, answer in ((b"a/b", b"\x20\x11\0\0"), (b"a/#", b"\x20\3\0\x90")):
        will = {"will": ("t", b"gone", 0), "will_properties": {p.RESPONSE_TOPIC: reply}}
        assert world.connect(connect("c", level=V5, **will)).got()[:4] == answer


def test_a_client_that_does_not_accept_its_connack_changes_nothing(world: World, client: Client) -> None:
    subscriber, before = client("s"), client("c", level=V5, clean=False, properties=LASTING)
    subscriber.send(subscribe(5, ("will/#", 0)))
    subscriber.got()
    small = {p.MAXIMUM_PACKET_SIZE: 10}
    wire = world.connect(connect("c", level=V5, will=("will/c", b"gone", 0), properties=small))
    assert wire.got() == b"\x20\3\0\x95\0"
    assert wire.transport.closed
    assert subscriber.got() == b""
    before.send(PING)
    assert before.got() == PONG


@pytest.mark.parametrize("topic", ["plain", "in/a"])
def test_a_qos_2_id_that_the_journal_could_not_keep_is_not_acknowledged_as_a_duplicate(
    world: World, client: Client, topic: str
) -> None:
    """The next start would not know it, and would take the same message for a new one."""
    stream = world.streams.definitions["s"]
    stream.by_itself = True
    wire = client("c", clean=False)
    with full_disk():
        for dup in (False, True, True):
            wire.send(publish(topic, b"x", 2, 7, dup=dup))
            assert wire.got() == b""
            wire.lose()
            wire = world.connect(connect("c", clean=False))
            world.run(5)
            assert wire.got() == PRESENT
    world.run(5)
    wire.send(publish(topic, b"x", 2, 7, dup=True))
    assert wire.got() == b"\x50\2\0\7"
    world.kill()
    stream.by_itself = True
    wire = client("c", clean=False, present=True)
    wire.send(publish(topic, b"x", 2, 7, dup=True) + ack(0x62, 7))
    assert wire.got() == b"\x50\2\0\7" + b"\x70\2\0\7"
    assert stream.payloads == ([b"x"] if topic == "in/a" else [])


def test_a_session_ends_when_its_time_is_over(world: World, client: Client) -> None:
    client("c", level=V5, clean=False, properties=LASTING).lose()
    world.run(59)
    client("c", level=V5, clean=False, properties=LASTING, present=True).lose()
    world.run(61)
    client("c", level=V5, clean=False, properties=LASTING, present=False)


def test_a_silent_client_is_lost_after_one_and_a_half_keep_alives(world: World, client: Client) -> None:
    wire = client("c", keep_alive=10)
    world.run(14)
    wire.send(PING)
    assert wire.got() == PONG
    world.run(14)
    assert not wire.transport.closed
    world.run(2)
    assert wire.transport.closed


def test_a_client_that_the_gateway_does_not_read_is_not_silent(world: World, client: Client) -> None:
    wire, stream = client("c", keep_alive=10), world.streams.definitions["s"]
    world.server.connections.press(True)
    wire.send(publish("in/a", b"1", 1, 1))
    assert not wire.transport.reading
    for _ in range(10):
        world.run(10)
        assert not wire.transport.closed
    world.server.connections.press(False)
    stream.commit()
    assert wire.got() == b"\x40\2\0\1"
    world.run(32)
    assert wire.transport.closed, "it is read, and says nothing"


def test_a_client_that_sends_no_connect_in_time_is_closed(world: World) -> None:
    wire = world.connect(connect("c")[:-1])
    world.run(9.9)
    assert not wire.transport.closed
    world.run(0.2)
    assert wire.transport.closed


def test_every_packet_and_event_of_the_table_has_a_handler_and_an_outcome() -> None:
    assert all(hasattr(control, row.handler) for row in TRANSITIONS if row.handler)
    assert len(NEXT) == len(TRANSITIONS), "no row hides another"
    assert {row.state for row in TRANSITIONS} == set(State) - {State.CLOSED}


def test_a_packet_without_a_row_in_the_table_closes_and_one_with_a_row_is_handled(world: World) -> None:
    packets = {
        0x40: ack(0x40, 9), 0x50: ack(0x50, 9), 0x62: ack(0x62, 9), 0x70: ack(0x70, 9), 0xC0: PING,
        0x82: subscribe(1, ("a", 0)), 0xA2: unsubscribe(1, "a"), 0x30: publish("a", b"", 0),
        0x31: publish("a", b"", 0, retain=True), 0xE0: DISCONNECT,
    }  # fmt: skip
    for qos in (1, 2):
        for flags in (0, 1, 8, 9):
            head = 0x30 | qos << 1 | flags
            packets[head] = bytes((head,)) + publish("a", b"", qos, 3)[1:]
    for head in range(256):
        wire = world.connect(connect("c"))
        assert wire.got() == CONNACK
        wire.send(packets.get(head, bytes((head, 2, 0, 9))))
        wire.got()
        assert wire.transport.closed == (head not in packets or head == 0xE0), hex(head)
        wire.lose()


def test_a_connection_that_does_not_begin_with_connect_is_closed(world: World) -> None:
    wire = world.connect(PING)
    assert wire.got() == b""
    assert wire.transport.closed
