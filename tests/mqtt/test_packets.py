"""The wire format: any bytes are read or raise ProtocolError, and pieces make no difference."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.mqtt.broker.message import headers_of
from bridge.mqtt.wire import packets
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import ProtocolError
from bridge.streams import headers
from bridge.topics import FilterTree, is_topic_filter, matches

from .harness import connect, publish, subscribe, unsubscribe

LIMIT = 1 << 20
LEVELS = st.sampled_from((packets.V311, packets.V5))


@given(st.binary(max_size=300), LEVELS)
@settings(max_examples=500)
def test_any_bytes_are_read_or_are_a_protocol_error(raw: bytes, level: int) -> None:
    for read in (
        lambda: packets.parse_connect(raw),
        lambda: packets.parse_connect(b"\0\4MQTT" + bytes((level, raw[0] if raw else 0)) + b"\0\0" + raw[1:]),
        lambda: packets.parse_subscribe(raw, level),
        lambda: packets.parse_unsubscribe(raw, level),
        lambda: packets.parse_ack(0x40, raw, level),
        lambda: packets.parse_disconnect(raw, level),
        lambda: packets.properties_at(raw, 0, len(raw), packets.PUBLISH),
        lambda: packets.frame(b"\x30" + raw, 0, LIMIT),
    ):
        with contextlib.suppress(ProtocolError):
            read()


@given(st.integers(0, 268_435_455), st.integers(0, 5))
def test_a_frame_is_found_or_says_how_much_is_missing(length: int, cut: int) -> None:
    head = b"\x30" + p.varint(length)
    assert packets.frame(head, 0, 1 << 28) == (len(head), len(head) + length)
    piece = head[: max(1, len(head) - 1 - cut)]
    assert packets.frame(piece, 0, 1 << 28) == (0, len(piece) + 1)


@pytest.mark.parametrize(
    "raw", [b"\x30\x80\x80\x80\x80\x01", b"\x30\xff\xff\xff\xff\x7f", b"\x10\x80\x80\x80\x80"]
)
def test_a_fifth_byte_of_a_remaining_length_is_an_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        packets.frame(raw, 0, 1 << 28)


def test_a_length_above_the_limit_is_an_error_before_anything_is_read() -> None:
    with pytest.raises(ProtocolError, match="limit") as caught:
        packets.frame(b"\x30\xff\xff\xff\x7f", 0, 1 << 20)
    assert caught.value.reason == packets.PACKET_TOO_LARGE


TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20)
NAMES = TEXT.map(str.encode)
PROPERTIES = st.fixed_dictionaries(
    {},
    optional={
        p.PAYLOAD_FORMAT: st.integers(0, 1),
        p.MESSAGE_EXPIRY: st.integers(0, 2**32 - 1),
        p.CONTENT_TYPE: NAMES,
        p.RESPONSE_TOPIC: NAMES,
        p.CORRELATION_DATA: st.binary(max_size=20),
        p.SUBSCRIPTION_ID: st.lists(st.integers(1, 2**28 - 1), min_size=1, max_size=3),
        p.TOPIC_ALIAS: st.integers(0, 65_535),
        p.USER_PROPERTY: st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=3),
    },
)


@given(PROPERTIES)
def test_properties_are_read_as_they_were_written(properties: p.Properties) -> None:
    raw = p.write_properties(properties)
    assert p.read_properties(raw, 0, len(raw), packets.PUBLISH) == (properties, len(raw))


@given(PROPERTIES, st.integers(0, 15))
def test_headers_keep_what_a_message_came_with(properties: p.Properties, flags: int) -> None:
    kept = headers.decode(headers_of(flags & 9, properties, "c", 7))
    assert kept.retain == bool(flags & 1)
    assert kept.dup == bool(flags & 8)
    assert [(a.encode(), b.encode()) for a, b in kept.user] == properties.get(p.USER_PROPERTY, [])
    assert kept.type.encode() == properties.get(p.CONTENT_TYPE, b"")
    assert headers.decode(b"") == headers.Headers()


@given(
    TEXT, st.booleans(), st.integers(0, 65_535), LEVELS, st.none() | TEXT, st.none() | st.binary(max_size=9)
)
def test_a_connect_is_read_as_it_was_written(
    name: str, clean: bool, keep_alive: int, level: int, user: str | None, password: bytes | None
) -> None:
    password = None if user is None else password
    will = ("w", b"x", 1) if clean else None
    raw = connect(
        name, level=level, clean=clean, keep_alive=keep_alive, user=user, password=password, will=will
    )
    body, end = packets.frame(raw, 0, LIMIT)
    found = packets.parse_connect(raw[body:end])
    assert (found.client_id, found.clean, found.keep_alive, found.level) == (name, clean, keep_alive, level)
    assert (found.username, found.password) == (user, password)
    assert (found.will is None) == (will is None)


@given(st.lists(st.tuples(TEXT.filter(bool), st.integers(0, 2)), min_size=1, max_size=5), LEVELS)
def test_subscriptions_are_read_as_they_were_written(filters: list[tuple[str, int]], level: int) -> None:
    raw = subscribe(3, *filters, level=level)
    body, end = packets.frame(raw, 0, LIMIT)
    assert packets.parse_subscribe(raw[body:end], level)[:2] == (3, filters)
    raw = unsubscribe(3, *(name for name, _ in filters), level=level)
    body, end = packets.frame(raw, 0, LIMIT)
    assert packets.parse_unsubscribe(raw[body:end], level) == (3, [name for name, _ in filters])


TOPICS = st.lists(st.sampled_from(("a", "b", "", "$x")), min_size=1, max_size=4).map("/".join)
FILTERS = st.lists(st.sampled_from(("a", "b", "", "+", "#", "$x")), min_size=1, max_size=4).map("/".join)


@given(st.lists(FILTERS.filter(is_topic_filter), max_size=8), TOPICS)
def test_the_tree_of_filters_finds_what_matches_one_by_one_and_is_empty_in_the_end(
    filters: list[str], topic: str
) -> None:
    tree: FilterTree[int] = FilterTree()
    for number, topic_filter in enumerate(filters):
        tree.add(topic_filter, number)
    assert sorted(tree.match(topic)) == [n for n, f in enumerate(filters) if matches(f, topic)]
    for number, topic_filter in enumerate(filters):
        tree.remove(topic_filter, number)
    assert len(tree) == 0


def test_matching_a_hostile_filter_takes_no_time() -> None:
    import time

    hostile, topic = "/".join("+" * 60) + "/#", "/".join("a" * 60)
    began = time.perf_counter()
    for _ in range(1000):
        assert matches(hostile, topic + "/b")
        assert not matches("+" + "/+" * 59 + "/x", topic + "/b")
    assert time.perf_counter() - began < 30
    assert publish("a", b"") == b"\x30\3\0\1a"
