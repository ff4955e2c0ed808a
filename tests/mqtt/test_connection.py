"""The life of a connection: malformed packets, take-over, keep-alive, limits, the clean stop."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import time
from pathlib import Path

import pytest

from bridge.access.logins import Access
from bridge.errors import ConfigError
from bridge.mqtt import MqttFrontEnd
from bridge.mqtt.server.connection import Connection
from bridge.mqtt.server.server import STOP_TIMEOUT
from bridge.mqtt.wire.packets import packet, string
from bridge.mqtt.wire.properties import varint

from .harness import (
    DEADLINE,
    PING,
    Bridge,
    Packet,
    ack,
    bridge_test,
    connect,
    publish,
    subscribe,
    unsubscribe,
    until,
)

MALFORMED = {
    "reserved type 0": b"\0\0",
    "AUTH from a 3.1.1 client": b"\xf0\0",
    "QoS 3": publish("in/t", b"x", 3, 1),
    "SUBSCRIBE flags": b"\x80\6\0\1\0\1t\0",
    "SUBSCRIBE without filters": b"\x82\2\0\1",
    "SUBSCRIBE at QoS 3": subscribe(1, ("a", 3)),
    "SUBSCRIBE with a filter beyond the packet": b"\x82\6\0\1\0\x20a\0",
    "SUBSCRIBE to a filter with # inside": subscribe(1, ("a/#/b", 0)),
    "packet id 0": publish("in/t", b"x", 1, 0),
    "a remaining length of five bytes": b"\x30\xff\xff\xff\xff\x01",
    "a topic that is not UTF-8": publish(b"in/\xff", b"x", 1, 5),
    "a topic with a surrogate": publish(b"in/\xed\xa0\x80", b"x", 1, 5),
    "a topic with NUL": publish(b"in/\0", b"x", 1, 5),
    "a second CONNECT": connect("z"),
    "SUBACK from a client": b"\x90\3\0\1\0",
    "an empty topic": publish("", b"x", 1, 1),
    "a wildcard topic with a packet as payload": publish("in/#", publish("in/inner", b"s")),
    "a topic below $": publish("$SYS/x", b"1", 1, 1),
    "a topic longer than the packet": b"\x30\4\0\x10ab",
    "QoS 1 without packet id": b"\x32\3\0\1t",
    "PUBACK of three bytes": b"\x40\3\0\1\0",
    "PINGREQ with a body": b"\xc0\1\0",
    "DISCONNECT with a body": b"\xe0\1\0",
    "DISCONNECT flags": b"\xe1\0",
    "a packet above the limit": b"\x30" + varint(5 << 20),
    "UNSUBSCRIBE without filters": b"\xa2\2\0\1",
    "PUBREL flags": b"\x60\2\0\1",
    "a PUBLISH without anything": b"\x30\0",
    "a PUBLISH of one byte": b"\x30\1\0",
    "a topic of very many levels": publish("a/" * 3000, b"", 1, 1),
}

FIRST = {
    "PINGREQ": PING,
    "PUBLISH": publish("in/x", b"y", 1, 1),
    "a CONNECT cut short": b"\x10\x02\0\4",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "the reserved CONNECT flag": packet(0x10, string(b"MQTT") + b"\4\1\0\0" + string(b"x")),
    "a password without user": packet(0x10, string(b"MQTT") + b"\4\x42\0\0" + string(b"x") + string(b"p")),
    "CONNECT flags in the header": packet(0x11, string(b"MQTT") + b"\4\2\0\0" + string(b"x")),
    "a will of QoS 3": packet(0x10, string(b"MQTT") + b"\4\x1e\0\0" + string(b"x") * 3),
    "bytes behind the CONNECT": packet(0x10, string(b"MQTT") + b"\4\2\0\0" + string(b"x") + b"rest"),
    "a CONNECT above the limit": b"\x10" + varint(200_000),
}


@bridge_test
async def test_malformed_packets_close_their_connection_and_no_other(bridge: Bridge) -> None:
    good = await bridge.connect("good")
    for number, (name, raw) in enumerate(MALFORMED.items(), 1):
        bad = await bridge.connect(f"bad-{number}")
        bad.send(raw)
        assert await bad.closed(), name
        answer = await good.exchange(publish("in/ok", b"", 1, number))
        assert answer == Packet(0x40, struct.pack(">H", number)), name
    for name, raw in FIRST.items():
        bad = await bridge.open()
        bad.send(raw)
        assert await bad.closed(), name
    assert {message.topic for message in await bridge.stored()} == {b"in/ok"}
    assert len(await bridge.stored()) == len(MALFORMED)
    await until(lambda: bridge.stat("connections") == 1)


@bridge_test
async def test_other_versions_of_the_protocol_are_refused_with_a_reason(bridge: Bridge) -> None:
    for level, name in ((3, b"MQTT"), (6, b"MQTT"), (0x85, b"MQTT"), (4, b"MQIsdp")):
        client = await bridge.open()
        client.send(connect("v", level=level, name=name))
        assert await client.receive() == Packet(0x20, b"\0\1")
        assert await client.closed()


@bridge_test
async def test_an_empty_client_id_gets_one_unless_its_session_is_to_stay(bridge: Bridge) -> None:
    await bridge.connect("")
    client = await bridge.open()
    await client.connect("", clean=False, expect=2)
    assert await client.closed()


@bridge_test
async def test_what_is_sent_behind_the_connect_waits_for_the_connack(bridge: Bridge) -> None:
    client = await bridge.open()
    client.send(connect("y"), publish("in/a", b"yes", 1, 1), subscribe(2, ("q", 0)), PING)
    got = [await client.receive() for _ in range(4)]
    assert got[0] == Packet(0x20, b"\0\0")
    assert sorted(got[1:]) == [Packet(0x40, b"\0\1"), Packet(0x90, b"\0\2\0"), Packet(0xD0, b"")]


@bridge_test(connect_timeout=200)
async def test_a_connection_without_a_connect_is_closed_in_time(bridge: Bridge) -> None:
    silent, half = await bridge.open(), await bridge.open()
    half.send(connect("x")[:8])
    assert await silent.closed()
    assert await half.closed()
    assert bridge.stat("refused_timeout") == 2


@bridge_test
async def test_a_silent_client_is_closed_after_one_and_a_half_times_its_keep_alive(bridge: Bridge) -> None:
    began = time.monotonic()
    # Who says something in time is not closed: see test_broker.py, whose clock does not run by itself.
    quiet, free = await bridge.connect("quiet", keep_alive=1), await bridge.connect("free", keep_alive=0)
    patient = await bridge.connect("patient", keep_alive=600)
    assert await quiet.closed()
    assert time.monotonic() - began > 1.4
    assert await free.alive()
    assert await patient.alive()
    assert bridge.stat("keep_alive_timeouts") == 1


@bridge_test
async def test_a_new_connection_takes_over_the_client_id_and_the_will_is_sent(bridge: Bridge) -> None:
    watcher = await bridge.connect("watcher")
    await watcher.subscribe(("w", 1))
    publisher = await bridge.connect("publisher")
    for clean in (True, False):
        old = await bridge.connect("same", clean=clean, will=("w", b"gone", 0))
        await old.subscribe(("t/#", 1))
        new = await bridge.connect("same", clean=clean)
        assert await old.closed()
        assert (await watcher.message()).payload == b"gone"
        if clean:
            await new.subscribe(("t/#", 1))
        await publisher.exchange(publish("t/1", b"hi", 1, 1))
        assert (await new.message()).payload == b"hi"
        new.disconnect()


@bridge_test
async def test_of_many_connections_with_one_client_id_exactly_one_survives(bridge: Bridge) -> None:
    clients = [await bridge.open() for _ in range(20)]
    for client in clients:
        client.send(connect("storm", clean=False))
    await until(lambda: bridge.stat("connections") == 1)
    alive = 0
    for client in clients:
        client.send(PING)
        try:
            while (await client.receive()).head != 0xD0:
                pass
            alive += 1
        except (ConnectionError, OSError):
            pass
    assert alive == 1
    assert bridge.stat("sessions") == 1


@bridge_test(connections=3, connections_per_address=3)
async def test_more_connections_than_allowed_are_closed_at_once(bridge: Bridge) -> None:
    first = [await bridge.connect(f"c{number}") for number in range(3)]
    extra = await bridge.open()
    assert await extra.closed()
    assert bridge.stat("refused_limit") == 1
    first[0].disconnect()
    await until(lambda: bridge.stat("connections") == 2)
    await bridge.connect("again")


@bridge_test
async def test_a_client_that_does_not_read_is_held_and_disturbs_nobody(bridge: Bridge) -> None:
    deaf = await bridge.connect("deaf")
    deaf.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.reader._transport.pause_reading()  # type: ignore[attr-defined]
    conn = next(iter(bridge.server.connections.open))
    packets = b"".join(publish("in/a", b"", 1, number) for number in range(1, 2001))
    end = time.monotonic() + DEADLINE
    while conn.writable and time.monotonic() < end:
        deaf.send(packets)
        await deaf.writer.drain()
        await asyncio.sleep(0)
    assert not conn.writable
    assert conn.transport.get_write_buffer_size() < 1 << 20
    other = await bridge.connect("other")
    assert await other.exchange(publish("in/b", b"", 1, 1)) == Packet(0x40, b"\0\1")
    deaf.abort()


@bridge_test
async def test_a_silent_client_that_reads_nothing_is_lost_after_its_keep_alive(bridge: Bridge) -> None:
    watcher, publisher = await bridge.connect("w"), await bridge.connect("p")
    await watcher.subscribe(("will", 0))
    deaf = await bridge.connect("deaf", keep_alive=1, will=("will", b"gone", 0))
    await deaf.subscribe(("t", 0))
    deaf.reader._transport.pause_reading()  # type: ignore[attr-defined]
    conn = next(one for one in bridge.server.connections.open if one.session.client_id == "deaf")
    end = time.monotonic() + DEADLINE
    while conn.writable and time.monotonic() < end:
        publisher.send(publish("t", bytes(60_000)))
        assert await publisher.alive()
    assert not conn.writable
    assert (await watcher.message()).payload == b"gone"


@pytest.mark.parametrize("keep_alive", [1, 7, 60, 3600])
def test_the_kernel_gives_a_client_that_reads_nothing_its_whole_keep_alive(
    tmp_path: Path, keep_alive: int
) -> None:
    @bridge_test
    async def run(bridge: Bridge) -> None:
        await bridge.connect("c", keep_alive=keep_alive)
        (conn,) = bridge.server.connections.open
        sock = conn.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == keep_alive * 1500  # ms

    run(tmp_path)


@bridge_test
async def test_publishers_are_held_while_too_much_waits_for_the_disk(bridge: Bridge) -> None:
    publisher, subscriber = await bridge.connect("p"), await bridge.connect("s")
    for told in bridge.manager.on_pressure:
        told(True)
    publisher.send(publish("in/a", b"x", 1, 1))
    assert await subscriber.alive(), "who does not publish is not held"
    await subscriber.subscribe(("x", 0))
    assert await bridge.payloads() == []
    for told in bridge.manager.on_pressure:
        told(False)
    assert await publisher.receive() == Packet(0x40, b"\0\1")


@bridge_test
async def test_a_stop_acknowledges_what_is_stored_and_sends_no_wills(bridge: Bridge) -> None:
    clients = [await bridge.connect(f"c{n}", clean=n % 2 == 0, will=("in/will", b"w", 1)) for n in range(20)]
    for client in clients:
        client.send(*(publish("in/a", b"x", 1, number) for number in range(1, 200)))
    await until(lambda: bridge.stat("received") > 0)
    began = time.monotonic()
    await bridge.stop()
    assert time.monotonic() - began < STOP_TIMEOUT, "for nobody it waits until it is too long"
    acknowledged = 0
    for client in clients:
        try:
            while (await client.receive()).head == 0x40:
                acknowledged += 1
        except ConnectionError:
            pass
    await bridge.start()
    stored = await bridge.stored()
    assert 0 < acknowledged <= len(stored)
    assert {message.topic for message in stored} == {b"in/a"}


@bridge_test
async def test_a_port_that_is_taken_is_an_error_that_names_it(bridge: Bridge) -> None:
    taken = bridge.urls[0].replace("mqtt", "tcp", 1)
    front = MqttFrontEnd(type(bridge.config)(listen=[taken]), bridge.operations, Access(bridge.config))
    with pytest.raises(ConfigError, match=str(bridge.port)):
        await front.start()


@bridge_test(messages_per_second=200)
async def test_a_connection_above_its_rate_is_read_more_slowly(bridge: Bridge) -> None:
    client = await bridge.connect("fast")
    began = time.monotonic()
    for start in range(1, 500, 50):
        client.send(*(publish("in/a", b"", 1, number) for number in range(start, start + 50)))
        for _ in range(50):
            await client.receive()
    assert time.monotonic() - began > 1.2
    assert await client.exchange(unsubscribe(1, "x")) == Packet(0xB0, b"\0\1")
    assert await client.exchange(ack(0x62, 1)) == Packet(0x70, b"\0\1")


@pytest.mark.parametrize("clean", [True, False])
def test_a_connection_that_has_ended_is_held_by_nothing(tmp_path: Path, clean: bool) -> None:
    @bridge_test
    async def run(bridge: Bridge) -> None:
        def connections() -> int:
            return sum(type(one) is Connection for one in gc.get_objects())

        gc.collect()
        gc.disable()  # a session that is away would hold it for ever, and the collector looks seldom
        try:
            before = connections()
            for number in range(20):
                client = await bridge.connect(f"c{number}", clean=clean)
                await client.exchange(publish("in/a", b"x", 1, 1))
                client.send(*(publish("in/a", b"x", 2, number) for number in range(1, 50)))
                client.abort() if number % 2 else client.disconnect()
            await until(lambda: bridge.stat("connections") == 0 and connections() == before)
        finally:
            gc.enable()

    run(tmp_path)
