"""Attacks on the MQTT ports, by strangers and by a device that was taken over.

20 s together.
"""

from __future__ import annotations

import base64
import json
import os
import struct

import pytest

from benchmarks.testbed.mqtt import connect, packet, publish, string, subscribe, unsubscribe
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5

from .conftest import PASSWORD, Attacker, Gateway


def test_a_second_connect_as_somebody_else_ends_the_connection(gateway: Gateway) -> None:
    attacker = gateway.attack()
    attacker.log_in()
    attacker.send(
        connect("pump-7", user="pump-7", password=b"guess") + publish("sensors/pump-7/x", b"f", 1, 1)
    )
    assert attacker.rest() == b""  # no CONNACK, no PUBACK


def test_what_is_sent_behind_a_refused_connect_is_never_looked_at(gateway: Gateway) -> None:
    attacker = gateway.attack()
    forged = publish("sensors/pump-7/forged-behind-connect", b"forged", 1, 1)
    attacker.send(connect("pump-7", user="pump-7", password=b"guess") + forged * 100)
    assert attacker.packet() == (0x20, b"\0\4")
    assert attacker.rest() == b""
    assert not stored(gateway, b"forged-behind-connect")


@pytest.mark.parametrize(
    "topic", ["sensors/pump-7/forged", "streambridge/pump-7/deleteMessageStream", "$SYS/broker/uptime"]
)
@pytest.mark.parametrize("retain", [False, True])
def test_a_will_cannot_do_what_its_client_may_not(gateway: Gateway, topic: str, retain: bool) -> None:
    attacker = gateway.attack()
    attacker.send(
        connect("x", user="pump-8", password=PASSWORD, will=(topic, b'{"name":"readings"}', 1),
                will_retain=retain, level=V5)
    )  # fmt: skip
    head, body = attacker.packet()
    assert (head, body[1]) == (0x20, 0x87)  # not authorized
    assert not stored(gateway, topic.encode())


def test_a_topic_alias_does_not_lead_around_the_rules(gateway: Gateway) -> None:
    attacker = gateway.attack()
    attacker.log_in("alias", level=V5)
    aliased = {p.TOPIC_ALIAS: 1}
    attacker.send(publish("sensors/pump-7/aliased", b"forged", 1, 1, level=V5, properties=aliased))
    assert attacker.packet()[1][:3] == b"\0\1\x87"
    attacker.send(publish("", b"forged", 1, 2, level=V5, properties=aliased))
    assert attacker.packet()[1][:3] == b"\0\2\x87"
    attacker.send(publish("sensors/pump-8/mine", b"mine", 1, 3, level=V5))
    assert attacker.packet() == (0x40, b"\0\3")


def test_request_and_reply_topics_of_another_client_are_closed_to_it(gateway: Gateway) -> None:
    attacker = gateway.attack()
    attacker.log_in("thief", level=V5)
    request = json.dumps({"name": "readings"}).encode()
    attacker.send(publish("streambridge/pump-7/describeMessageStream", request, 1, 1, level=V5))
    assert attacker.packet()[1][:3] == b"\0\1\x87"
    attacker.send(subscribe(2, ("streambridge/pump-7/#", 1), ("streambridge/+/+/reply", 1), level=V5))
    head, body = attacker.packet()
    assert (head, body[-2:]) == (0x90, b"\x87\x87")


def test_a_reply_cannot_be_sent_to_where_its_client_may_not_publish(gateway: Gateway) -> None:
    attacker = gateway.attack()
    attacker.log_in("loud", level=V5)
    reply_to = {p.RESPONSE_TOPIC: b"sensors/pump-7/forged-reply"}
    attacker.send(publish("streambridge/loud/listStreams", b"{}", 1, 1, level=V5, properties=reply_to))
    packets = [attacker.packet() for _ in range(2)]
    assert [head & 0xF0 for head, _ in packets].count(0x40) == 1  # acknowledged, and answered to it alone
    assert not stored(gateway, b"forged-reply")


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("nested arrays", b"[" * 900_000),
        ("nested objects", b'{"a":' * 150_000),
        ("nested CBOR", b"\x81" * 900_000),
        ("CBOR maps in CBOR maps", b"\xa1\x00" * 400_000),
        ("CBOR that announces 2^63 items", b"\x9b\x7f\xff\xff\xff\xff\xff\xff\xff"),
        ("CBOR that announces 2^40 bytes", b"\x5b\x00\x00\x01\x00\x00\x00\x00\x00"),
        ("a number of 900,000 digits", b'{"requestId": "1", "maxMessageCount": ' + b"9" * 900_000 + b"}"),
        ("text that is not UTF-8", b'{"name": "\xff\xfe"}'),
        ("a lone surrogate", b'{"name": "\\ud800"}'),
        ("not a number", b'{"name": NaN}'),
    ],
)
def test_a_request_that_is_a_bomb_is_answered_as_invalid(gateway: Gateway, what: str, body: bytes) -> None:
    before = gateway.memory()
    attacker = gateway.attack()
    attacker.log_in("bomber")
    attacker.send(publish("streambridge/bomber/describeMessageStream", body, 1, 1))
    heads = {}
    while len(heads) < 2:
        head, content = attacker.packet()
        assert head, what
        heads[head & 0xF0] = content
    assert b"InvalidRequest" in heads[0x30] or b"INVALID" in heads[0x30].upper(), heads[0x30][:300]
    assert gateway.memory() - before < 64 << 20


@pytest.mark.parametrize(
    "topic",
    [
        b"sensors/pump-8/\xc0\xaf",
        b"sensors/pump-8/\xed\xa0\x80",
        b"sensors/pump-8/a\0b",
        b"sensors/pump-8/\xff",
    ],
)
def test_a_topic_that_is_not_utf_8_ends_the_connection(gateway: Gateway, topic: bytes) -> None:
    attacker = gateway.attack()
    attacker.log_in(level=V5)
    attacker.send(publish(topic, b"x", 1, 1, level=V5))
    head, body = attacker.packet()
    assert head == 0xE0
    assert body[:1] in (b"\x81", b"\x82", b"\x90"), body


def test_topics_and_filters_of_thousands_of_levels_cost_nobody_time(gateway: Gateway) -> None:
    for number in range(20):
        attacker = gateway.attack()
        attacker.log_in(f"deep-{number}", level=V5)
        attacker.send(publish(b"sensors/pump-8" + b"/" * 32_000, b"", 1, 1, level=V5))
        attacker.send(subscribe(1, *((f"commands/pump-8/{'+/' * 2_000}{n}", 0) for n in range(12)), level=V5))
        assert attacker.packet()[0] in (0x40, 0xE0)
        attacker.close()


@pytest.mark.parametrize("owner", ["pump-7", "pump-8"])
def test_the_longest_topics_in_their_thousands_are_not_remembered(gateway: Gateway, owner: str) -> None:
    """They took 32 KB each, up to 50,000 of them, whether or not the client had a right on them."""
    before = gateway.memory()
    attacker = gateway.attack()
    attacker.log_in(level=V5)
    for number in range(10_000):
        topic = f"sensors/{owner}/{number}" + "\U0001f600" * 4_000
        attacker.send(publish(topic, b"", level=V5))
    attacker.send(b"\xc0\0")
    assert attacker.packet() == (0xD0, b"")
    assert gateway.memory() - before < 160 << 20


def test_thousands_of_filters_in_one_packet_are_bounded(gateway: Gateway) -> None:
    before = gateway.memory()
    attacker = gateway.attack()
    attacker.log_in(level=V5)
    for number in range(1, 3):
        filters = ((f"commands/pump-8/{number}/{n}/+", 0) for n in range(900))
        attacker.send(subscribe(number, *filters, level=V5))
    head, body = attacker.packet()
    assert (head, set(body[3:])) == (0x90, {0})
    head, body = attacker.packet()
    assert (head, set(body[3:])) == (0x90, {0, 0x97})  # quota exceeded
    attacker.send(subscribe(3, *(("#", 0) for n in range(200_000)), level=V5))
    assert attacker.packet() == (0xE0, b"\x97\0")
    assert attacker.rest() == b""
    assert gateway.memory() - before < 64 << 20


@pytest.mark.parametrize("kind", ["filters that are denied", "filters to give up", "properties"])
def test_a_packet_with_thousands_of_filters_or_properties_ends_its_connection(
    gateway: Gateway, kind: str
) -> None:
    """Each of them took a second, or a quarter of one, in which the gateway did nothing else."""
    data = {
        "filters that are denied": subscribe(1, *(("a", 0) for _ in range(200_000)), level=V5),
        "filters to give up": unsubscribe(1, *("a" for _ in range(200_000)), level=V5),
        "properties": publish("a", b"", 1, 1, level=V5, properties={p.USER_PROPERTY: [(b"", b"")] * 200_000}),
    }[kind]
    attacker = gateway.attack()
    attacker.log_in(level=V5)
    attacker.send(data)
    assert attacker.packet() == (0xE0, b"\x97\0")  # quota exceeded
    attacker.close()


def test_the_longest_filters_are_bounded_by_their_length_together(gateway: Gateway) -> None:
    before = gateway.memory()
    for number in range(20):
        attacker = gateway.attack()
        attacker.log_in(f"long-{number}", level=V5)
        for part in range(1, 6):
            filters = ((f"commands/pump-8/{'x' * 4_000}{part}-{n}", 0) for n in range(190))
            attacker.send(subscribe(part, *filters, level=V5))
            head, body = attacker.packet()
            assert head == 0x90
        assert body[3:].strip(b"\x97") == b"", "quota exceeded"
        attacker.send(subscribe(9, ("commands/pump-8/short", 0), level=V5))
        assert attacker.packet() == (0x90, b"\0\x09\0\0"), "usual ones are accepted"
        attacker.close()
    assert gateway.memory() - before < 32 << 20


def test_a_packet_full_of_properties_is_refused_or_bounded(gateway: Gateway) -> None:
    before = gateway.memory()
    attacker = gateway.attack()
    attacker.log_in(level=V5)
    many = {p.USER_PROPERTY: [(b"k%d" % n, b"v") for n in range(100_000)]}
    attacker.send(publish("sensors/pump-8/many", b"x", 1, 1, level=V5, properties=many))
    assert attacker.packet()[0] in (0x40, 0xE0)
    assert gateway.memory() - before < 64 << 20


def test_lengths_that_never_end_close_the_connection_at_once(gateway: Gateway) -> None:
    for junk in (b"\x30\xff\xff\xff\xff\x7f", b"\x10\xff\xff\xff\xff\x01", b"\x82\x80\x80\x80\x80\x00"):
        attacker = gateway.attack()
        attacker.send(junk)
        assert attacker.rest() == b""


def test_a_connect_that_announces_a_quarter_gigabyte_is_refused(gateway: Gateway) -> None:
    before = gateway.memory()
    attackers = [gateway.attack() for _ in range(20)]
    for attacker in attackers:
        attacker.send(b"\x10\xff\xff\xff\x7f\0\4MQTT\4\2\0\0")
    for attacker in attackers:
        assert attacker.rest() == b""
    assert gateway.memory() - before < 16 << 20


def test_names_forge_no_line_of_the_log(gateway: Gateway) -> None:
    name = "pump-8\nmsg=ready \x1b[2J\x1b]0;owned\x07 a\u202eb \x9b1m '; rm -rf /; ' %s%n{0}"
    attacker = gateway.attack()
    attacker.send(connect("x\nmsg=stopping", user=name, password=b"guess"))
    attacker.rest()
    gateway.device.next()
    for line in gateway.log().splitlines():
        assert line[:4].isdigit(), line  # each line begins with its time
        assert line.isprintable(), line


def test_a_session_full_of_ids_that_are_never_released_is_bounded(gateway: Gateway) -> None:
    before = gateway.memory()
    attacker = gateway.attack()
    attacker.log_in("hoarder", level=V5, clean=False, properties={p.SESSION_EXPIRY: 0xFFFFFFFF})
    for number in range(1, 65_536):
        attacker.send(publish("sensors/pump-8/q2", b"", 2, number, level=V5))
    head, _ = attacker.packet()
    assert head in (0x50, 0xE0)
    attacker.close()
    assert gateway.memory() - before < 64 << 20


def websocket(gateway: Gateway, more: str = "") -> Attacker:
    attacker = gateway.attack("ws")
    key = base64.b64encode(os.urandom(16)).decode()
    attacker.send(
        f"GET /mqtt HTTP/1.1\r\nHost: gateway\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: mqtt\r\n"
        f"{more}\r\n".encode()
    )
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        byte = attacker.read(1)
        if not byte:
            break
        answer += byte
    if b" 101 " in answer.split(b"\r\n")[0] + b" ":
        assert b"permessage-deflate" not in answer  # what is never inflated is no bomb
    return attacker


@pytest.mark.parametrize(
    ("what", "frame"),
    [
        ("not masked", b"\x82\x0e" + connect("ws")),
        ("an exabyte announced", b"\x82\xff" + struct.pack(">Q", 1 << 60) + b"mask" + b"x" * 100),
        ("a length with the top bit", b"\x82\xff" + struct.pack(">Q", 1 << 63) + b"mask"),
        ("a ping of 64 KiB", b"\x89\xfe\xff\xffmask" + b"x" * 65_535),
        ("a fragmented ping", b"\x09\x80mask"),
        ("reserved bits", b"\xf2\x80mask"),
        ("an unknown opcode", b"\x83\x80mask"),
        ("a continuation of nothing", b"\x80\x80mask"),
        ("text", b"\x81\x85\0\0\0\0hello"),
    ],
)
def test_a_websocket_frame_that_breaks_the_rules_ends_that_connection(
    gateway: Gateway, what: str, frame: bytes
) -> None:
    attacker = websocket(gateway, "Sec-WebSocket-Extensions: permessage-deflate\r\n")
    attacker.send(frame)
    rest = attacker.rest()
    assert not rest or rest[0] == 0x88, (what, rest[:50])  # a Close, or the end


def test_a_million_empty_fragments_hold_nobody_up(gateway: Gateway) -> None:
    attacker = websocket(gateway)
    attacker.send(b"\x02\x80mask")
    for _ in range(20):
        attacker.send(b"\x00\x80mask" * 10_000)
    gateway.device.next()
    attacker.close()


def test_renegotiating_and_rubbish_inside_tls_hurt_nobody(gateway: Gateway) -> None:
    for junk in (b"\x16\x03\x01" + b"\xff" * 500, b"GET / HTTP/1.0\r\n\r\n", os.urandom(4_000)):
        raw = Attacker(gateway.port["mqtts"])
        raw.send(junk)
        raw.rest()
    inside = gateway.attack("mqtts")
    inside.send(packet(0x10, string(b"MQTT") + b"\x09"))
    assert inside.rest()[:1] in (b"", b"\x20")


def stored(gateway: Gateway, needle: bytes) -> bool:
    """Whether a message that contains this is in the stream, once the device's next message is."""
    gateway.device.next()
    return any(needle in path.read_bytes() for path in gateway.data.rglob("*.seg"))
