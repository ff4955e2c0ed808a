"""What another broker may send to us, and what it may not: a server made of bytes sends each packet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.mqtt import packet, publish
from bridge.mqtt.mappings import Mapping
from bridge.mqtt.settings import UpstreamSettings
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5, V311, string
from tests.fakes.brokers import BrokerOfBytes

from .harness import Bridge, decoded, run_async, running, until
from .test_external import external, redefine

MODES = ["external", "upstream"]
LEVELS = [V311, V5]
PROTOCOL = {V311: "3.1.1", V5: "5"}
FEFF = "\ufeff".encode()


@asynccontextmanager
async def served(
    root: Path, broker: BrokerOfBytes, level: int, mode: str = "external", **settings: Any
) -> AsyncIterator[Bridge]:
    """A bridge that has subscribed to in/# there, at one connection."""
    settings |= {"protocol": PROTOCOL[level]}
    if mode == "external":
        own: dict[str, Any] = external(broker.port, **settings)
    else:
        mapping = [Mapping(filter="in/#")]
        url = f"mqtt://127.0.0.1:{broker.port}"
        own = {"upstreams": [UpstreamSettings(name="cloud", url=url, mapping=mapping, **settings)]}
    broker.session_present = True
    async with running(root, **own) as bridge:
        await until(lambda: broker.got("SUBSCRIBE in/#"))
        yield bridge


def stat(bridge: Bridge, name: str) -> int:
    found = bridge.front.upstream_stats().get("upstream:cloud") or bridge.front.stats()
    return found.get(name, 0)


def legal(level: int) -> dict[str, tuple[bytes, str]]:
    """Packets that a server may send, and what it gets for each."""
    one = b"\0\x09"
    found: dict[str, tuple[bytes, str]] = {
        "QoS 0": (publish("in/a", b"x", level=level), ""),
        "QoS 0 retained": (publish("in/a", b"x", retain=True, level=level), ""),
        "QoS 1 repeated": (publish("in/a", b"x", 1, 9, dup=True, level=level), "PUBACK 9"),
        "QoS 2": (publish("in/a", b"x", 2, 9, level=level), "PUBREC 9"),
        "QoS 2 repeated, retained": (
            publish("in/a", b"x", 2, 10, dup=True, retain=True, level=level),
            "PUBREC 10",
        ),
        "a released id": (b"\x62\2\0\x09", "PUBCOMP 9"),
        "a released id again": (b"\x62\2\0\x09", "PUBCOMP 9"),
        "the largest id": (publish("in/a", b"x", 1, 65_535, level=level), "PUBACK 65535"),
        "an empty payload": (publish("in/a", b"", 1, 1, level=level), "PUBACK 1"),
        "an empty retained payload": (publish("in/a", b"", 1, 1, retain=True, level=level), "PUBACK 1"),
        "a byte order mark": (publish(b"in/" + FEFF, b"x", 1, 2, level=level), "PUBACK 2"),
        "a control character": (publish("in/\x01", b"x", 1, 2, level=level), "PUBACK 2"),
        "no character": (publish("in/\U0010ffff", b"x", 1, 2, level=level), "PUBACK 2"),
        "the longest topic": (publish("in/" + "x" * 65_532, b"x", 1, 3, level=level), "PUBACK 3"),
        "a large message": (publish("in/a", bytes(3_000_000), 1, 4, level=level), "PUBACK 4"),
        "a topic that nobody wants": (publish("$SYS/uptime", b"x", 1, 5, level=level), "PUBACK 5"),
        "an acknowledgement of an earlier client's message": (packet(0x40, one), ""),
        "PUBREC for an earlier client's message": (packet(0x50, one), "PUBREL 9"),
        "PUBCOMP for an earlier client's message": (packet(0x70, one), ""),
        "PINGRESP that was not asked for": (b"\xd0\0", ""),
    }
    none = p.write_properties({}) if level == V5 else b""
    for code in (0, 1, 2, 0x80):
        found[f"SUBACK {code}"] = packet(0x90, one + none + bytes((code,))), ""
    found["UNSUBACK"] = packet(0xB0, one + (b"\0\0" if level == V5 else b"")), ""
    return found | (legal_5() if level == V5 else {})


def legal_5() -> dict[str, tuple[bytes, str]]:
    one = b"\0\x09"
    text = p.write_properties({p.REASON_STRING: FEFF + b"why", p.USER_PROPERTY: [(b"a", FEFF), (b"a", b"")]})
    every = {
        p.PAYLOAD_FORMAT: 1, p.MESSAGE_EXPIRY: 60, p.CONTENT_TYPE: FEFF, p.RESPONSE_TOPIC: b"back",
        p.CORRELATION_DATA: b"\0", p.USER_PROPERTY: [(b"a", b"1"), (b"a", FEFF)],
        p.SUBSCRIPTION_ID: [1, 268_435_455],
    }  # fmt: skip
    found = {
        f"QoS {qos} with every property": (
            publish("in/a", b"x", qos, 30 + qos, level=V5, properties=every), answer
        )
        for qos, answer in enumerate(("", "PUBACK 31", "PUBREC 32"))
    }  # fmt: skip
    pairs = {p.USER_PROPERTY: [(b"a", b"b")] * 2_000}
    found["more user properties than we take"] = (
        publish("in/a", b"x", 1, 40, level=V5, properties=pairs), "PUBACK 40"
    )  # fmt: skip
    for kind, codes, answer in (
        (0x40, (0, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99), ""),
        (0x50, (0, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99), "PUBREL 9"),
        (0x62, (0, 0x92), "PUBCOMP 9"),
        (0x70, (0, 0x92), ""),
    ):
        for code in codes:
            found[f"{kind:#x} with {code:#x}"] = packet(kind, one + bytes((code,))), answer
            found[f"{kind:#x} with {code:#x} and text"] = packet(kind, one + bytes((code,)) + text), answer
    for code in (0, 1, 2, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2):
        found[f"SUBACK {code:#x} with text"] = packet(0x90, one + text + bytes((code,))), ""
    for code in (0, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91):
        found[f"UNSUBACK {code:#x} with text"] = packet(0xB0, one + text + bytes((code,))), ""
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_every_packet_that_a_server_may_send_is_taken_and_what_is_behind_it_is_stored(
    tmp_path: Path, level: int, mode: str
) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(240),
            BrokerOfBytes() as broker,
            served(tmp_path, broker, level, mode) as bridge,
        ):
            for number, (name, (data, answer)) in enumerate(legal(level).items(), 100):
                broker.log.clear()
                broker.raw(data)
                broker.send("in/behind", name.encode(), 1, number)
                await until(lambda number=number: broker.got(f" PUBACK {number}"), what=name)
                got = [line for line in broker.log if not line.endswith(f"PUBACK {number}")]
                assert got == ([f"1 {answer}"] if answer else []), name
            behind = [one.payload.decode() for one in await bridge.stored() if one.topic == b"in/behind"]
            assert behind == list(legal(level))
            assert broker.connections == 1

    run_async(main())


ILLEGAL = {
    "QoS 3": (b"\x36\x08\0\4in/a\0\1", "QoS 3"),
    "QoS 0 with DUP": (b"\x38\x06\0\4in/a", "QoS 0 with DUP"),
    "packet id 0": (publish("in/a", b"x", 1, 0), "packet id 0"),
    "no packet id": (b"\x32\x06\0\4in/a", "without its packet id"),
    "a topic beyond its packet": (b"\x30\x03\0\xffi", "beyond"),
    "no topic": (publish("", b"x", 1, 1), "without a topic"),
    "a wildcard": (publish("in/#", b"x", 1, 1), "has a wildcard"),
    "NUL": (publish("in/\0", b"x", 2, 1), "NUL"),
    "no UTF-8": (publish(b"in/\xff", b"x", 2, 1), "not UTF-8"),
    "PUBREL without its flags": (b"\x60\2\0\1", "PUBREL with the flags"),
    "PUBACK with flags": (b"\x4f\2\0\1", "PUBACK with the flags"),
    "an acknowledgement of nothing": (b"\x40\0", "without its packet id"),
    "SUBACK with a reserved code": (b"\x90\3\0\1\7", "reserved code"),
    "SUBACK without a code": (b"\x90\2\0\1", "0 codes"),
    "PINGRESP with a body": (b"\xd0\1x", "PINGRESP with a body"),
    "a second CONNACK": (b"\x20\2\0\0", "second CONNACK"),
    "SUBSCRIBE": (b"\x82\6\0\1\0\1a\0", "a SUBSCRIBE, which a server may not send"),
    "PINGREQ": (b"\xc0\0", "PINGREQ, which"),
    "DISCONNECT": (b"\xe0\0", "DISCONNECT, which"),
    "AUTH": (b"\xf0\0", "AUTH, which"),
    "packet type 0": (b"\0\0", "packet type 0, which"),
}
ILLEGAL_5 = {
    "a topic alias": (publish("in/a", b"x", 1, 1, level=V5, properties={p.TOPIC_ALIAS: 1}), "topic alias"),
    "a property of another packet": (packet(0x32, string(b"in/a") + b"\0\1\5\x11\0\0\0\1x"), "not allowed"),
    "a property twice": (packet(0x32, string(b"in/a") + b"\0\1\4\1\0\1\0x"), "twice"),
    "properties beyond the packet": (packet(0x34, string(b"in/a") + b"\0\1\x70x"), "beyond their packet"),
    "a wildcard in the Response Topic": (
        publish("in/a", b"x", 1, 1, level=V5, properties={p.RESPONSE_TOPIC: b"a/+"}), "Response Topic"
    ),
    "PUBREL with a reason of PUBACK": (b"\x62\3\0\1\x10", "reason code 0x10"),
    "AUTH": (b"\xf0\0", "AUTH, which was not asked for"),
    "DISCONNECT with a reason of clients": (b"\xe0\1\4", "reason code 0x04"),
}  # fmt: skip


def cases() -> list[Any]:
    found = [(V311, name, *one) for name, one in ILLEGAL.items()]
    return [*found, *((V5, name, *one) for name, one in ILLEGAL_5.items())]


@pytest.mark.parametrize(("level", "name", "data", "why"), cases(), ids=[f"{c[0]} {c[1]}" for c in cases()])
def test_what_a_server_may_not_send_ends_one_connection_with_the_reason_and_what_is_behind_is_stored(
    tmp_path: Path, level: int, name: str, data: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), BrokerOfBytes() as broker, served(tmp_path, broker, level) as bridge:
            for connection in (1, 2):
                await until(lambda n=connection: stat(bridge, "connects") == n)
                broker.raw(data)
                broker.send("in/behind", b"%d" % connection, 1, 7)
            await until(lambda: broker.got("PUBACK 7"))
            broker.raw(data)  # a third time
            broker.send("in/behind", b"3", 1, 8)
            await until(lambda: broker.got("PUBACK 8"))
            assert await bridge.payloads() == [b"2", b"3"]
            assert broker.connections == 2
            lost = [one.getMessage() for one in caplog.records if "it was lost" in one.getMessage()]
            assert len(lost) == 1
            assert why in lost[0]
            assert "what MQTT does not allow" in lost[0]

    run_async(main())


@pytest.mark.parametrize("level", LEVELS)
def test_what_comes_before_connack_or_is_no_packet_is_told_and_the_next_connection_works(
    tmp_path: Path, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), BrokerOfBytes() as broker:
            broker.greeting = publish("in/a", b"x", level=level)
            settings = external(broker.port, protocol=PROTOCOL[level])
            async with running(tmp_path, **settings) as bridge:
                await until(lambda: "a PUBLISH before CONNACK" in caplog.text)
                broker.greeting = b""
                await until(lambda: bridge.stat("connects") == 1)
                broker.raw(b"\x30\xff\xff\xff\xff\x7f")
                await until(lambda: bridge.stat("connects") == 2)
                assert "remaining length of more than four bytes" in caplog.text

    run_async(main())


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (1, "it refuses MQTT 3.1.1 (Unsupported protocol version)"),
        (2, "it refuses the client id 'streambridge' (Client identifier not valid)"),
        (3, "it refuses the connection (Server unavailable)"),
        (4, "it refuses clients without a user name (Bad user name or password)"),
        (5, "it refuses the connection (Not authorized)"),
        (6, "reserved return code 6"),
    ],
)
def test_a_refused_connection_is_told_with_its_own_reason(
    tmp_path: Path, code: int, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), BrokerOfBytes() as broker:
            broker.return_code = code
            async with running(tmp_path, **external(broker.port, protocol="3.1.1")):
                await until(lambda: what in caplog.text)
        assert set(broker.protocols) == {4}, "no other protocol is tried"

    run_async(main())


def test_every_property_of_connack_is_taken_and_its_limits_hold(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), BrokerOfBytes() as broker:
            broker.connack_properties = p.write_properties(
                {
                    p.SESSION_EXPIRY: 60, p.RECEIVE_MAXIMUM: 2, p.MAXIMUM_QOS: 1, p.RETAIN_AVAILABLE: 0,
                    p.MAXIMUM_PACKET_SIZE: 100_000, p.TOPIC_ALIAS_MAXIMUM: 3, p.REASON_STRING: FEFF,
                    p.USER_PROPERTY: [(b"a", b"b"), (b"a", b"c")], p.WILDCARDS_AVAILABLE: 1,
                    p.SUBSCRIPTION_IDS_AVAILABLE: 0, p.SHARED_AVAILABLE: 0, p.SERVER_KEEP_ALIVE: 1,
                    p.RESPONSE_INFO: b"x", p.SERVER_REFERENCE: b"other",
                }
            )[1:]  # fmt: skip
            async with served(tmp_path, broker, V5, operations=True) as bridge:
                broker.acknowledges = False
                for number in range(1, 6):
                    broker.send("streambridge/dev/listStreams", b"{}", 1, number)
                await until(lambda: len(broker.got("PUBACK")) == 5)
                await until(lambda: len(broker.got("PUBLISH")) == 2)
                pings = broker.pings
                await until(lambda: broker.pings > pings + 1, what="the keep-alive is the server's")
                assert len(broker.got("PUBLISH")) == 2, "Receive Maximum"
                broker.raw(packet(0x40, b"\0" + bytes((broker.published[0],))))
                await until(lambda: len(broker.got("PUBLISH")) == 3)
                assert broker.connections == 1
                assert bridge.stat("refused_subscriptions") == 0

    run_async(main())


def test_what_a_server_says_that_it_lacks_is_not_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), BrokerOfBytes() as broker:
            broker.connack_properties = b"\x28\0"
            async with running(tmp_path, **external(broker.port, protocol="5")) as bridge:
                redefine(bridge, topics=["a", "b/+"])
                await until(lambda: broker.got("SUBSCRIBE a"))
                await until(lambda: "to 'b/+'" in caplog.text)
                assert "Wildcard Subscriptions not supported" in caplog.text
                assert [one for one, _ in broker.options] == ["a"]

    run_async(main())


def test_each_reason_of_a_disconnect_is_in_the_log_and_the_next_connection_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        reference = p.write_properties({p.REASON_STRING: FEFF, p.SERVER_REFERENCE: b"other"})
        packets = [b"\xe0\0", b"\xe0\1\x8b", packet(0xE0, b"\x9c" + reference), packet(0xE0, b"\x8e\0")]
        names = ["Normal disconnection", "Server shutting down", "Use another server", "Session taken over"]
        async with asyncio.timeout(240), BrokerOfBytes() as broker, served(tmp_path, broker, V5) as bridge:
            for number, (data, name) in enumerate(zip(packets, names, strict=True), 1):
                await until(lambda number=number: stat(bridge, "connects") == number)
                broker.raw(data)
                await until(lambda name=name: f"the broker ended it: {name}" in caplog.text)
            await until(lambda: stat(bridge, "connects") == 5)
            assert not broker.got("DISCONNECT")

    run_async(main())


@pytest.mark.parametrize("mode", MODES)
def test_a_message_of_qos_2_is_acknowledged_after_the_commit_and_stored_once_whatever_breaks(
    tmp_path: Path, mode: str
) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(240),
            BrokerOfBytes() as broker,
            served(tmp_path, broker, V311, mode) as bridge,
        ):
            broker.send("in/a", b"1", 2, 5)
            await until(lambda: broker.got("PUBREC 5"))
            assert await bridge.payloads() == [b"1"], "stored before its PUBREC"
            broker.log.clear()
            broker.cut()
            await until(lambda: stat(bridge, "connects") == 2)
            broker.send("in/a", b"1", 2, 5, dup=True)
            await until(lambda: broker.got("2 PUBREC 5"))
            await bridge.restart()
            await until(lambda: stat(bridge, "connects") == 1)
            broker.send("in/a", b"1", 2, 5, dup=True)
            await until(lambda: broker.got("3 PUBREC 5"))
            broker.raw(b"\x62\2\0\5")
            await until(lambda: broker.got("3 PUBCOMP 5"))
            broker.send("in/a", b"2", 2, 5)
            await until(lambda: len(broker.got("3 PUBREC 5")) == 2)
            assert await bridge.payloads() == [b"1", b"2"]
            client = "upstream:cloud" if mode == "upstream" else "external"
            kept = decoded((await bridge.stored())[0].headers)
            assert (kept["client"], kept["id"]) == (client, 0x10005), "no client has such an id"

    run_async(main())


@pytest.mark.parametrize("mode", MODES)
def test_a_message_with_a_used_id_is_new_if_the_broker_has_lost_the_session(
    tmp_path: Path, mode: str
) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(240),
            BrokerOfBytes() as broker,
            served(tmp_path, broker, V311, mode) as bridge,
        ):
            broker.send("in/a", b"1", 2, 1)
            await until(lambda: broker.got("1 PUBREC 1"))
            broker.session_present = False
            broker.cut()
            await until(lambda: broker.got("2 SUBSCRIBE in/#"))
            assert stat(bridge, "sessions_lost") == 1
            broker.send("in/a", b"2", 2, 1)
            await until(lambda: broker.got("2 PUBREC 1"))
            assert await bridge.payloads() == [b"1", b"2"]

    run_async(main())


def test_a_release_before_its_message_is_acknowledged_ends_the_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), BrokerOfBytes() as broker, served(tmp_path, broker, V5) as bridge:
            broker.raw(publish("in/a", b"1", 2, 1, level=V5) + b"\x62\2\0\1")
            await until(lambda: stat(bridge, "connects") == 2)
            assert "a PUBREL for packet id 1 before its PUBREC" in caplog.text
            broker.send("in/a", b"1", 2, 1, dup=True)
            await until(lambda: broker.got("2 PUBREC 1"))
            assert await bridge.payloads() == [b"1"]

    run_async(main())
