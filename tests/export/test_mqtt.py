"""The exporter `mqtt`: what it says to a broker, what it makes of the answers, and its connection."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.testbed.certificates import Authority
from benchmarks.testbed.forwarder import Forwarder
from benchmarks.testbed.uplink import Answering, Published
from bridge import Batch, Context, Exporter, Record, Retry
from bridge.export.wire import Tuning
from bridge.mqtt.wire import properties as p
from bridge.plugin import discovery
from bridge.plugin.api import convert_config
from bridge.plugin.testing import attempt, deliver, make_batch
from tests.export.harness import running, until

EXPORTERS = discovery.load().exporters
PACKET_TOO_LARGE, TOPIC_INVALID, PAYLOAD_INVALID, QUOTA, NOT_AUTHORIZED = 0x95, 0x90, 0x99, 0x97, 0x87


@pytest.fixture
def broker() -> Iterator[Answering]:
    with Answering() as broker:
        yield broker


def mqtt(url: str, context: Context | None = None, **config: Any) -> Exporter:
    cls = EXPORTERS["mqtt"]
    raw = {"identifier": "up", "url": url, "timeoutMillis": 20_000, **config}
    return cls(convert_config(cls, raw), context or Context())


def batch_of(*records: Record) -> Batch:
    return Batch("gw", "plant", 17, records[0].sequence_number, records[-1].sequence_number, list(records))


def record(number: int = 0, topic: str = "plant/1/temp", payload: bytes = b"21", **headers: Any) -> Record:
    now = time.time_ns() // 1_000_000
    return Record(number, now, topic, payload, msgspec.msgpack.encode(headers) if headers else b"")


def text(properties: p.Properties) -> list[tuple[str, str]]:
    return [(name.decode(), value.decode()) for name, value in properties.get(p.USER_PROPERTY, ())]


# --- what it says


def test_the_connection_has_a_stable_name_and_leaves_no_session(broker: Answering, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hunter2\n")
    for _ in range(2):
        exporter = mqtt(broker.url, username="north", passwordFile=str(tmp_path / "password"))
        assert deliver(exporter, make_batch([b"1"])) == {}
        exporter.close()
    assert (
        broker.connects
        == [{"v5": True, "clean": True, "keep_alive": 20, "texts": ["gateway-stream-up", "north", "hunter2"]}]
        * 2
    )


@pytest.mark.parametrize(
    ("template", "topic"),
    [
        ("{topic}", "plant/7/temp"),
        ("sites/{gateway}/{stream}/{topic/1}/{topic/-1}", "sites/gw/plant/7/temp"),
        ("devices/{client}", "devices/press-7"),
        ("sites/north/{topic/1/#}", "sites/north/7/temp"),
        ("last/{topic/-1/#}", "last/temp"),
        ("{json:/device/id}/up", "d1/up"),
        ("fixed", "fixed"),
    ],
)
def test_the_topic_follows_its_template(broker: Answering, template: str, topic: str) -> None:
    exporter = mqtt(broker.url, topic=template)
    one = record(0, "plant/7/temp", b'{"device": {"id": "d1"}}', client="press-7")
    assert deliver(exporter, batch_of(one)) == {}
    exporter.close()
    assert [message.topic for message in broker.published] == [topic]


@pytest.mark.parametrize(
    "payload",
    [
        b"no json",
        b"{}",
        b'{"to": "a/#"}',
        b'{"to": "a+"}',
        b'{"to": ""}',
        b'{"to": "a\\u0000"}',
        b'{"to": "\\ud800"}',
    ],
)
def test_a_message_without_a_topic_that_can_be_published_is_rejected_alone(
    broker: Answering, payload: bytes
) -> None:
    exporter = mqtt(broker.url, topic="{json:/to}")
    batch = batch_of(
        record(0, payload=b'{"to": "a"}'), record(1, payload=payload), record(2, payload=b'{"to": "b"}')
    )
    assert deliver(exporter, batch).keys() == {1}
    exporter.close()
    assert [message.topic for message in broker.published] == ["a", "b"]


def test_messages_have_an_id_and_keep_the_properties_of_their_publisher(broker: Answering) -> None:
    exporter = mqtt(
        broker.url, userProperties={"site": "{gateway}", "line": "{topic/1}", "none": "{topic/9}"}
    )
    user = [("a", "1"), ("site", "spoofed"), ("message-id", "1")]
    one = record(5, user=user, type="text/plain", utf8=True, reply="answers/1", token=b"t")
    assert deliver(exporter, batch_of(one)) == {}
    exporter.close()
    (message,) = broker.published
    assert text(message.properties) == [
        ("a", "1"),
        ("site", "gw"),
        ("line", "1"),
        ("bridged-by", "gw"),
        ("message-id", "gw/plant/17/5"),
    ]
    assert message.properties[p.CONTENT_TYPE] == b"text/plain"
    assert message.properties[p.PAYLOAD_FORMAT] == 1
    assert message.properties[p.RESPONSE_TOPIC] == b"answers/1"
    assert message.properties[p.CORRELATION_DATA] == b"t"


def test_a_message_names_each_gateway_that_it_has_passed_once(broker: Answering) -> None:
    exporter = mqtt(broker.url, messageId=False)
    passed = [[("bridged-by", "south")], [("bridged-by", "gw"), ("bridged-by", "south")]]
    records = [record(number, user=user) for number, user in enumerate(passed)]
    assert deliver(exporter, batch_of(*records)) == {}
    exporter.close()
    names = [[name for _, name in text(message.properties)] for message in broker.published]
    assert names == [["south", "gw"], ["gw", "south"]]


def test_an_id_of_the_publisher_is_not_passed_on_without_ours_either(broker: Answering) -> None:
    exporter = mqtt(broker.url, messageId=False)
    assert deliver(exporter, batch_of(record(user=[("message-id", "1")]))) == {}
    exporter.close()
    assert text(broker.published[0].properties) == [("bridged-by", "gw")]


def test_two_messages_that_a_filter_made_of_one_have_different_ids(broker: Answering) -> None:
    exporter = mqtt(broker.url)
    assert deliver(exporter, batch_of(record(4), record(4), record(5))) == {}
    exporter.close()
    ids = [dict(text(message.properties))["message-id"] for message in broker.published]
    assert ids == ["gw/plant/17/4", "gw/plant/17/4.1", "gw/plant/17/5"]


def test_an_id_is_never_longer_than_a_hub_takes(broker: Answering) -> None:
    exporter = mqtt(broker.url)
    names = ["s" * 255, "t" * 255]
    for name in names:
        batch = msgspec.structs.replace(batch_of(record()), stream=name)
        assert deliver(exporter, batch) == {}
    exporter.close()
    ids = {dict(text(message.properties))["message-id"] for message in broker.published}
    assert len(ids) == 2
    assert all(len(one) <= 255 for one in ids)


def test_what_is_left_of_the_expiry_is_passed_on(broker: Answering) -> None:
    now = time.time_ns() // 1_000_000
    exporter = mqtt(broker.url, messageExpiryMillis=3_600_000)
    records = [record(0, expires=now + 500_000), record(1), record(2, expires=now - 1000)]
    assert deliver(exporter, batch_of(*records)) == {}
    exporter.close()
    own, ours, past = [message.properties[p.MESSAGE_EXPIRY] for message in broker.published]
    assert 400 <= own <= 500
    assert 3500 <= ours <= 3600
    assert past == 1


@pytest.mark.parametrize(
    ("retain", "retained"), [("never", [0, 0]), ("always", [1, 1]), ("as published", [1, 0])]
)
def test_messages_are_retained_as_configured(broker: Answering, retain: str, retained: list[int]) -> None:
    exporter = mqtt(broker.url, retain=retain)
    assert deliver(exporter, batch_of(record(0, retain=True), record(1))) == {}
    exporter.close()
    assert [message.retain for message in broker.published] == retained


def test_a_record_says_what_it_is(broker: Answering) -> None:
    for kind, content_type, utf8 in (("json", b"application/json", 1), ("cbor", b"application/cbor", None)):
        exporter = mqtt(broker.url, record=kind)
        assert deliver(exporter, batch_of(record(5, type="text/plain", utf8=True))) == {}
        exporter.close()
        assert broker.published[-1].properties[p.CONTENT_TYPE] == content_type
        assert broker.published[-1].properties.get(p.PAYLOAD_FORMAT) == utf8
    row = json.loads(broker.published[0].payload)
    assert (row["stream"], row["epoch"], row["sequence_number"]) == ("plant", "17", 5)


def test_a_message_that_the_record_cannot_hold_is_rejected_alone(broker: Answering) -> None:
    exporter = mqtt(broker.url, record='{"v":{payload}}')
    assert deliver(exporter, make_batch([b"1", b"\xff", b"2"])).keys() == {1}
    exporter.close()
    assert broker.payloads == [b'{"v":1}', b'{"v":2}']


def test_in_mqtt_3_1_1_there_are_no_properties(broker: Answering) -> None:
    exporter = mqtt(broker.url, protocol="3.1.1")
    assert deliver(exporter, batch_of(record(user=[("a", "1")], expires=1))) == {}
    exporter.close()
    assert not broker.connects[0]["v5"]
    assert broker.published[0].payload == b"21"


# --- the window, and what the broker allows


@pytest.mark.parametrize(("ours", "theirs", "window"), [(5, 100, 5), (100, 5, 5), (1, 100, 1)])
def test_no_more_messages_wait_for_their_puback_than_both_allow(
    broker: Answering, ours: int, theirs: int, window: int
) -> None:
    broker.connack = (0, {p.RECEIVE_MAXIMUM: theirs})
    broker.hold = window
    exporter = mqtt(broker.url, maxInFlight=ours)
    assert deliver(exporter, make_batch([b"%d" % n for n in range(20)])) == {}
    exporter.close()
    assert not broker.too_many
    assert broker.payloads == [b"%d" % n for n in range(20)]


def test_a_message_larger_than_the_broker_takes_is_rejected_and_not_sent(broker: Answering) -> None:
    exporter = mqtt(broker.url)
    deliver(exporter, make_batch([b"x" * 100]))
    exporter.close()
    broker.connack = (0, {p.MAXIMUM_PACKET_SIZE: broker.published[0].size})
    exporter = mqtt(broker.url)
    rejected = deliver(exporter, make_batch([b"a", b"x" * 100, b"x" * 101, b"b"]))
    exporter.close()
    assert rejected.keys() == {2}
    assert broker.payloads[1:] == [b"a", b"x" * 100, b"b"]


@pytest.mark.parametrize(
    ("property_", "config", "remedy"),
    [(p.MAXIMUM_QOS, {}, "qos = 0"), (p.RETAIN_AVAILABLE, {"retain": "always"}, 'retain = "never"')],
)
def test_what_the_broker_cannot_do_is_an_error_that_waits(
    broker: Answering, property_: int, config: dict[str, Any], remedy: str
) -> None:
    broker.connack = (0, {property_: 0})
    exporter = mqtt(broker.url, **config)
    with pytest.raises(Retry, match=remedy):
        exporter.export(make_batch([b"1"]))
    broker.connack = (0, {})
    assert deliver(exporter, make_batch([b"1"])) == {}
    exporter.close()


@pytest.mark.parametrize(
    ("code", "remedy"), [(0x84, "3.1.1"), (0x85, "client_id"), (0x86, "password_file"), (0x87, "rules")]
)
def test_a_refused_connection_says_what_to_look_at(broker: Answering, code: int, remedy: str) -> None:
    broker.connack = (code, {})
    exporter = mqtt(broker.url)
    with pytest.raises(Retry, match=remedy) as caught:
        exporter.export(make_batch([b"1"]))
    exporter.close()
    assert caught.value.unsent
    assert not caught.value.cut


# --- reason codes


@pytest.mark.parametrize("code", [TOPIC_INVALID, PAYLOAD_INVALID])
def test_a_message_that_the_broker_rejects_is_rejected_alone(broker: Answering, code: int) -> None:
    broker.code = lambda message: code if message.payload == b"3" else 0
    exporter = mqtt(broker.url)
    outcome = attempt(exporter, make_batch([b"%d" % n for n in range(10)]))
    exporter.close()
    assert outcome.rejected.keys() == {3}
    assert not outcome.retry
    assert len(broker.published) == 10


@pytest.mark.parametrize(
    ("code", "after"), [(QUOTA, 1.0), (NOT_AUTHORIZED, None), (0x80, None), (0x83, None)]
)
def test_what_the_broker_refuses_for_now_waits_and_nothing_is_sent_behind_it(
    broker: Answering, code: int, after: float | None
) -> None:
    broker.code = lambda message: code if message.payload == b"3" else 0
    exporter = mqtt(broker.url, maxInFlight=1)
    outcome = attempt(exporter, make_batch([b"%d" % n for n in range(10)]))
    assert (list(outcome.retry), dict(outcome.rejected), outcome.after) == (list(range(3, 10)), {}, after)
    assert broker.payloads == [b"0", b"1", b"2", b"3"]
    assert not outcome.cut
    broker.code = lambda message: 0
    again = make_batch([b"%d" % n for n in range(3, 10)], first=3)
    assert deliver(exporter, again) == {}
    exporter.close()
    assert broker.payloads[4:] == [b"%d" % n for n in range(3, 10)]
    assert len(broker.connects) == 1, "a refusal does not end the connection"


def test_of_several_in_flight_only_the_refused_one_is_sent_again(broker: Answering) -> None:
    broker.hold = 5
    broker.code = lambda message: QUOTA if message.payload == b"1" else 0
    exporter = mqtt(broker.url, maxInFlight=5)
    outcome = attempt(exporter, make_batch([b"%d" % n for n in range(10)]))
    exporter.close()
    assert list(outcome.retry) == [1, *range(5, 10)]


def test_no_matching_subscribers_is_a_success(broker: Answering) -> None:
    broker.code = lambda message: 0x10
    exporter = mqtt(broker.url)
    assert deliver(exporter, make_batch([b"1", b"2"]), attempts=1) == {}
    exporter.close()


@pytest.mark.parametrize("code", [TOPIC_INVALID, PACKET_TOO_LARGE, PAYLOAD_INVALID])
def test_the_message_for_which_a_broker_ends_the_connection_is_found_and_rejected(
    broker: Answering, code: int
) -> None:
    broker.hang_up = lambda message: code if message.payload == b"3" else None
    exporter = mqtt(broker.url)
    rejected = deliver(exporter, make_batch([b"%d" % n for n in range(6)]))
    exporter.close()
    assert rejected.keys() == {3}
    assert [int(payload) for payload in broker.payloads][-2:] == [4, 5]
    assert set(broker.payloads) == {b"%d" % n for n in range(6)}


@pytest.mark.parametrize("config", [{"protocol": "3.1.1"}, {"qos": 0}, {}], ids=["3.1.1", "QoS 0", "5"])
def test_a_message_at_which_the_broker_drops_each_connection_is_rejected_in_the_end(
    broker: Answering, config: dict[str, Any]
) -> None:
    broker.hang_up = lambda message: -1 if message.payload == b"3" else None
    exporter = mqtt(broker.url, **config)
    rejected = deliver(exporter, make_batch([b"%d" % n for n in range(6)]), attempts=20)
    exporter.close()
    assert rejected.keys() == {3}
    assert "10 connections in a row" in rejected[3]
    assert [int(payload) for payload in broker.payloads][-3:] == [3, 4, 5]


def test_connections_that_break_at_other_messages_reject_nothing(broker: Answering) -> None:
    """A link that breaks again and again, and lets a message pass now and then."""
    exporter = mqtt(broker.url, protocol="3.1.1", maxInFlight=1)
    batch = make_batch([b"%d" % n for n in range(30)])
    broker.hang_up = lambda message: -1 if message.connection % 5 or len(broker.published) % 7 == 0 else None
    assert deliver(exporter, batch, attempts=400) == {}
    exporter.close()


def test_a_link_that_goes_silent_at_a_message_does_not_reject_it(broker: Answering) -> None:
    broker.code = lambda message: None if message.payload == b"1" and message.connection < 15 else 0
    exporter = mqtt(broker.url, protocol="3.1.1", timeoutMillis=100)
    assert deliver(exporter, make_batch([b"0", b"1", b"2"]), attempts=30) == {}
    exporter.close()
    assert len(broker.connects) >= 15


def test_a_client_id_that_two_exports_share_is_named(broker: Answering) -> None:
    broker.hang_up = lambda message: 0x8E
    exporter = mqtt(broker.url)
    outcome = attempt(exporter, make_batch([b"1"]))
    exporter.close()
    assert "gateway-stream-up" in outcome.error


# --- the connection


def test_what_has_no_puback_is_sent_again_in_order_and_nothing_else_is(broker: Answering) -> None:
    broker.hang_up = lambda message: -1 if message.payload == b"7" and message.connection == 1 else None
    exporter = mqtt(broker.url, maxInFlight=3)
    outcome = attempt(exporter, make_batch([b"%d" % n for n in range(10)]))
    assert outcome.cut
    first = outcome.retry[0]
    assert list(outcome.retry) == list(range(first, 10))
    assert deliver(exporter, make_batch([b"%d" % n for n in outcome.retry], first)) == {}
    exporter.close()
    sent = [[int(m.payload) for m in broker.published if m.connection == n] for n in (1, 2)]
    assert sent == [list(range(8)), list(range(first, 10))]
    assert not any(message.dup for message in broker.published), "a clean session knows no repetitions"


def test_a_connection_lives_on_while_nothing_is_sent(broker: Answering) -> None:
    exporter = mqtt(broker.url, keepAliveMillis=1000)
    deliver(exporter, make_batch([b"1"]))
    deadline = time.monotonic() + 60
    while broker.pings < 2:
        wait = exporter.idle()
        assert wait is not None
        assert time.monotonic() < deadline
        threading.Event().wait(wait)
    deliver(exporter, make_batch([b"2"]), attempts=1)
    exporter.close()
    assert broker.payloads == [b"1", b"2"]


def test_a_connection_that_ended_meanwhile_costs_no_attempt(broker: Answering) -> None:
    forwarder = Forwarder(broker.url)
    exporter = mqtt(forwarder.url.replace("http", "mqtt"))
    deliver(exporter, make_batch([b"1"]))
    with forwarder.shut():
        assert exporter.idle() is None
        assert exporter.idle() is None, "there is nothing to keep alive"
    deliver(exporter, make_batch([b"2"]), attempts=1)
    with forwarder.shut():
        pass
    deliver(exporter, make_batch([b"3"]), attempts=1)
    exporter.close()
    forwarder.close()
    assert broker.payloads == [b"1", b"2", b"3"]


def test_a_broker_that_goes_silent_is_given_up(broker: Answering) -> None:
    broker.code = lambda message: None if message.connection == 1 and int(message.payload) > 2 else 0
    exporter = mqtt(broker.url, timeoutMillis=4000)
    outcome = attempt(exporter, make_batch([b"%d" % n for n in range(5)]))
    assert outcome.cut
    assert "has not answered" in outcome.error
    assert list(outcome.retry) == [3, 4]
    exporter.close()


def test_a_large_message_on_a_slow_link_is_not_a_dead_link(broker: Answering) -> None:
    # 6 MB take more than three seconds, in which the broker answers nothing.
    forwarder = Forwarder(broker.url, rate=2_000_000)
    exporter = mqtt(forwarder.url.replace("http", "mqtt"), timeoutMillis=1500, keepAliveMillis=1000)
    try:
        # Each attempt would fail. A few do on a machine that stands still.
        assert deliver(exporter, make_batch([bytes(6_000_000)]), attempts=5) == {}
    finally:
        exporter.close()
        forwarder.close()


@pytest.mark.parametrize(
    "nonsense",
    [b"\x40\x01\0", b"\x40\x02\0", b"\x40\x04\0\1\xff\0", b"\xe0\x7f", b"\0\0", b"\x20\xff\xff\xff\xff\xff"],
)
def test_a_broker_that_sends_nonsense_ends_the_connection_and_no_message(
    broker: Answering, nonsense: bytes
) -> None:
    broker.nonsense = nonsense
    exporter = mqtt(broker.url, timeoutMillis=500)
    outcome = attempt(exporter, make_batch([b"1", b"2"]))
    assert list(outcome.retry) == [0, 1]
    assert not outcome.rejected
    broker.nonsense = b""
    assert deliver(exporter, make_batch([b"1", b"2"])) == {}
    exporter.close()


# In a network of its own, whose only interface goes down: no packet is answered, and none is refused.
BLACK_HOLE = """
import subprocess
from benchmarks.testbed.uplink import Answering
from tests.export.test_mqtt import attempt, deliver, make_batch, mqtt

def link(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

link("up")
with Answering() as broker:
    exporter = mqtt(broker.url, keepAliveMillis=2000, timeoutMillis=600_000)
    deliver(exporter, make_batch([b"0"]))
    link("down")
    outcome = attempt(exporter, make_batch([b"1", b"2"], 1))
    assert outcome.cut and list(outcome.retry) == [0, 1], outcome
    link("up")
    deliver(exporter, make_batch([b"1", b"2"], 1))
    exporter.close()
    assert list(dict.fromkeys(broker.payloads)) == [b"0", b"1", b"2"]
print("noticed")
"""


def test_a_link_that_swallows_everything_is_noticed_by_the_keep_alive() -> None:
    isolated = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*isolated, "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        assert not os.environ.get("CI"), (
            "cannot make a network (needs unshare, ip and root or user namespaces)"
        )
        pytest.skip("cannot make a network here (needs unshare, ip and root or user namespaces)")
    done = subprocess.run(
        [*isolated, sys.executable, "-c", BLACK_HOLE],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "noticed\n", done.stderr


def test_closing_says_good_bye(broker: Answering) -> None:
    exporter = mqtt(broker.url)
    deliver(exporter, make_batch([b"1"]))
    exporter.close()
    exporter.close()
    deadline = time.monotonic() + 60
    while not broker.farewells:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_at_qos_0_a_batch_counts_as_delivered_when_the_broker_has_received_it(broker: Answering) -> None:
    exporter = mqtt(broker.url, qos=0)
    assert deliver(exporter, make_batch([b"%d" % n for n in range(500)]), attempts=1) == {}
    exporter.close()
    assert broker.payloads == [b"%d" % n for n in range(500)]
    assert {message.qos for message in broker.published} == {0}


# --- AWS IoT Core


def test_the_limits_of_iot_core_reject_what_it_would_not_take(broker: Answering) -> None:
    exporter = mqtt(broker.url, awsIotCore=True)
    records = [
        record(0, payload=bytes(128 * 1024)),
        record(1, payload=bytes(128 * 1024 + 1)),
        record(2, "/".join("12345678")),
        record(3, "/".join("123456789")),
        record(4, "t" * 256),
        record(5, "t" * 257),
        record(6, "$aws/rules/keep/" + "/".join("12345678")),
        record(7, "$aws/rules/keep/" + "t" * 257),
    ]
    assert deliver(exporter, batch_of(*records)).keys() == {1, 3, 5, 7}
    exporter.close()
    assert len(broker.published) == 4


def test_iot_core_gets_no_more_than_its_rate(broker: Answering) -> None:
    exporter = mqtt(broker.url, awsIotCore=True)
    began = time.monotonic()
    deliver(exporter, make_batch([b"x"] * 60), attempts=1)
    assert time.monotonic() - began >= 0.5  # 100 messages a second
    began = time.monotonic()
    deliver(exporter, make_batch([bytes(100_000)] * 6), attempts=1)
    assert time.monotonic() - began >= 0.9  # 512 KiB a second
    exporter.close()


@pytest.mark.parametrize(
    ("config", "records"), [({}, 95), ({"batchSize": 10}, 10), ({"awsIotCore": False}, None)]
)
def test_a_batch_for_iot_core_takes_about_a_second(config: dict[str, Any], records: int | None) -> None:
    cls = EXPORTERS["mqtt"]
    raw = {"identifier": "up", "url": "mqtts://a1-ats.iot.eu-central-1.amazonaws.com", **config}
    assert cls.batching(convert_config(cls, raw)).records == records


class Handshakes:
    """A TLS server that remembers the protocol that was agreed on, and the client's certificate."""

    def __init__(self, authority: Authority, broker: Answering) -> None:
        self.agreed: list[tuple[str | None, Any]] = []
        pair = authority.issue("server")
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*pair)
        self._context.load_verify_locations(authority.cert)
        self._context.verify_mode = ssl.CERT_OPTIONAL
        self._context.set_alpn_protocols(["x-amzn-mqtt-ca", "mqtt"])
        self._broker = broker

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._forward, "127.0.0.1", 0, ssl=self._context)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        layer = writer.get_extra_info("ssl_object")
        self.agreed.append((layer.selected_alpn_protocol(), writer.get_extra_info("peercert")))
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._broker.port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer), return_exceptions=True)


@pytest.mark.parametrize(("alpn", "agreed"), [({}, None), ({"alpn": "x-amzn-mqtt-ca"}, "x-amzn-mqtt-ca")])
def test_tls_with_a_client_certificate_and_alpn(
    broker: Answering, tmp_path: Path, alpn: dict[str, str], agreed: str | None
) -> None:
    authority = Authority(tmp_path)
    client = authority.issue("press-7")
    files = {"caFile": str(authority.cert), "certFile": str(client.cert), "keyFile": str(client.key)}

    async def scenario() -> None:
        server = Handshakes(authority, broker)
        async with await server.serve() as listening:
            url = f"mqtts://localhost:{listening.sockets[0].getsockname()[1]}"
            exporter = mqtt(url, **files, **alpn)
            batch = make_batch([b"x" * 500 for _ in range(300)])
            assert await asyncio.to_thread(deliver, exporter, batch, 1) == {}
            await asyncio.to_thread(exporter.close)
            untrusting = mqtt(url)
            with pytest.raises(Retry, match=r"not trusted.*ca_file"):
                await asyncio.to_thread(untrusting.export, batch)
        (protocol, certificate), *_ = server.agreed
        assert protocol == agreed
        assert "press-7" in json.dumps(certificate)

    asyncio.run(scenario())
    assert len(broker.published) == 300


# --- the configuration


@pytest.mark.parametrize(
    ("config", "path", "what"),
    [
        ({"url": "mqtt://"}, "endpointUrl", "mqtts://host:8883"),
        ({"url": "mqtt://host:99999"}, "endpointUrl", "mqtts://host:8883"),
        ({"url": "mqtt://me:secret@host"}, "endpointUrl", "without a user"),
        ({"url": "http://host"}, "url", "regex"),
        ({"url": "mqtt://host", "caFile": "/ca.pem"}, "caFile", "mqtts://host"),
        ({"keyFile": "/k.pem"}, "keyFile", "certFile"),
        ({"passwordFile": "/p"}, "passwordFile", "username"),
        ({"topic": "a/{nope}"}, "topic", "known fields"),
        ({"topic": "a/#"}, "topic", "wildcard"),
        ({"topic": ""}, "topic", "length"),
        ({"userProperties": {"a": "{"}}, "userProperties", "brace"),
        ({"record": "xml"}, "record", "cbor"),
        ({"userProperties": {"message-id": "1"}}, "userProperties", "messageId = false"),
        ({"protocol": "3.1.1", "messageExpiryMillis": 5000}, "messageExpiryMillis", 'protocol = "5"'),
        ({"qos": 2}, "qos", "<= 1"),
    ],
)
def test_a_mistake_is_found_with_its_key(config: dict[str, Any], path: str, what: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        mqtt(**{"url": "mqtts://host", **config})
    assert f"at `$.{path}" in str(caught.value)
    assert what in str(caught.value)
    assert "secret" not in str(caught.value)


def test_files_that_cannot_be_used_are_found_by_the_check_and_wait(tmp_path: Path) -> None:
    cls = EXPORTERS["mqtt"]
    pair, other = Authority(tmp_path / "a").issue("a"), Authority(tmp_path / "b").issue("b")
    good = {"username": "u", "passwordFile": str(tmp_path / "password"), "certFile": str(pair.cert)}
    good |= {"keyFile": str(pair.key)}
    (tmp_path / "password").write_text("hunter2")
    (tmp_path / "binary").write_bytes(b"hunter\xff")

    def lacks(**config: str) -> str | None:
        raw = {"identifier": "up", "url": "mqtts://127.0.0.1:1", **good, **config}
        with pytest.raises(Retry) as caught:
            cls(convert_config(cls, raw), Context()).export(make_batch([b"1"]))
        found = cls.lacks(convert_config(cls, raw))
        assert found is None or found == str(caught.value)
        return found

    assert lacks() is None
    for key, file in (
        ("passwordFile", tmp_path / "none"),
        ("passwordFile", tmp_path / "binary"),
        ("caFile", tmp_path / "none"),
        ("caFile", tmp_path / "password"),
        ("certFile", tmp_path / "none"),
        ("keyFile", other.key),
    ):
        found = lacks(**{key: str(file)})
        assert found is not None
        assert str(file) in found
        assert "hunter" not in found


# --- in the worker


def test_a_stream_goes_out_through_the_worker_and_a_kill_of_it_repeats_one_batch_at_most(
    broker: Answering, tmp_path: Path
) -> None:
    config = {"mqtt": [{"identifier": "up", "url": broker.url, "batchSize": 50}]}
    payloads = [b"%d" % n for n in range(600)]

    def kill(message: Published) -> int | None:
        if int(message.payload) == 300 and message.connection == 1:
            killed.set()
            return None
        return 0

    killed = threading.Event()
    broker.code = kill

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("a", config)
            await gateway.append("a", *payloads)
            await until(killed.is_set)
            process = gateway.exports.pid
            assert process is not None
            os.kill(process, signal.SIGKILL)
            await gateway.exported("a", 599, within=60)

    asyncio.run(scenario())
    first = [int(m.payload) for m in broker.published if m.connection == 1]
    second = [int(m.payload) for m in broker.published if m.connection == 2]
    assert first == list(range(len(first)))
    assert second == list(range(second[0], 600))
    assert 250 <= second[0] <= 300


def test_a_corrected_password_file_ends_the_wait(broker: Answering, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("wrong")
    broker.connack = (0x86, {})
    config = {"identifier": "up", "url": broker.url, "username": "u", "passwordFile": str(secret)}
    patient = Tuning(beat=0.1, silence=20.0, first_backoff=3000.0, max_backoff=3000.0, drain=1.0)

    async def scenario() -> None:
        async with running(tmp_path, tuning=patient) as gateway:
            gateway.create("a", {"mqtt": [config]})
            await gateway.append("a", b"1")
            await until(lambda: broker.connects)
            broker.connack = (0, {})
            secret.write_text("right")
            await gateway.exported("a", 0, within=120)

    asyncio.run(scenario())
    assert [connect["texts"][2] for connect in broker.connects] == ["wrong", "right"]
