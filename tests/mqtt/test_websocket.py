"""MQTT over WebSocket: raw frames, and clients that nobody here wrote."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from benchmarks.testbed.certificates import Authority
from bridge.mqtt.settings import TlsSettings

from .harness import DEADLINE, PING, Bridge, Client, bridge_test, connect, publish, run_async, running

REQUEST = {
    "Host": "127.0.0.1",
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Protocol": "mqttv3.1, mqtt",
}
WS = {"listen": ["ws://127.0.0.1:0"]}


def http(first: str = "GET /mqtt HTTP/1.1", **changes: str | None) -> bytes:
    fields = {**REQUEST, **{name.replace("_", "-"): value for name, value in changes.items()}}
    lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join([first, *lines, "", ""]).encode()


def frame(payload: bytes, opcode: int = 2, *, fin: bool = True, masked: bool = True) -> bytes:
    length = len(payload)
    if length < 126:
        head = bytes((length | masked << 7,))
    elif length < 65536:
        head = bytes((126 | masked << 7,)) + length.to_bytes(2, "big")
    else:
        head = bytes((127 | masked << 7,)) + length.to_bytes(8, "big")
    mask = os.urandom(4) if masked else b""
    data = bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload)) if masked else payload
    return bytes((fin << 7 | opcode,)) + head + mask + data


async def upgraded(bridge: Bridge) -> Client:
    client = await bridge.open()
    client.send(http())
    answer = await client.reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 101 ")
    assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in answer, "the accept key of RFC 6455 section 1.3"
    assert b"Sec-WebSocket-Protocol: mqtt\r\n" in answer
    return client


async def payload(client: Client) -> bytes:
    """The payload of the next frame, which is a short data frame."""
    async with asyncio.timeout(DEADLINE):
        head, length = await client.reader.readexactly(2)
        assert (head, length < 126) == (0x82, True)
        return await client.reader.readexactly(length)


@bridge_test(**WS)
async def test_frames_and_packets_have_nothing_to_do_with_each_other(bridge: Bridge) -> None:
    client = await upgraded(bridge)
    client.send(frame(connect("w")))
    assert await payload(client) == b"\x20\2\0\0"
    packets = publish("in/a", b"x" * 70_000, 1, 1) + PING
    client.send(
        frame(packets[:10], fin=False), frame(packets[10:50_000], 0, fin=False), frame(packets[50_000:], 0)
    )
    assert {await payload(client), await payload(client)} == {b"\x40\2\0\1", b"\xd0\0"}
    raw = frame(publish("in/b", b"split", 1, 2)) + frame(b"are you there", 9) + frame(PING)
    for byte in raw:
        client.send(bytes((byte,)))
        await asyncio.sleep(0)
    got = [await payload(client)]
    async with asyncio.timeout(DEADLINE):
        assert await client.reader.readexactly(15) == b"\x8a\x0dare you there"
    assert [*got, await payload(client)] == [b"\x40\2\0\2", b"\xd0\0"]
    client.send(frame(b"\3\xe8", 8))
    assert await client.reader.read() == b"\x88\2\3\xe8"
    assert await bridge.payloads() == [b"x" * 70_000, b"split"]


@bridge_test(**WS)
async def test_what_is_not_a_websocket_for_mqtt_is_refused(bridge: Bridge) -> None:
    for request, status in (
        (http("POST /mqtt HTTP/1.1"), b"400"),
        (http(Upgrade="h2c"), b"400"),
        (http(Sec_WebSocket_Protocol="chat"), b"400"),
        (http(Sec_WebSocket_Protocol=None), b"400"),
        (http(Sec_WebSocket_Version="8"), b"426"),
        (http(Sec_WebSocket_Key=None), b"426"),
        (http(Origin="https://evil.example"), b"403"),
        (http(Origin="https://127.evil.example"), b"403"),
        (http(Origin="null"), b"403"),
        (http(Origin="http://["), b"403"),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 3000, b"431"),
    ):
        client = await bridge.open()
        client.send(request)
        assert (await client.reader.readline()).split()[1] == status
        assert await client.closed()
    for bad in (
        frame(connect("x"), masked=False),
        frame(connect("x"), 1),
        frame(connect("x"), 3),
        frame(b"x" * 126, 9),
        b"\xf2\x80",
        frame(b"not MQTT"),
        b"\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff\0\0\0\0" + b"\x30" * 100,
    ):
        client = await upgraded(bridge)
        client.send(bad)
        assert await client.closed(), bad


@bridge_test(**WS)
async def test_each_mistake_has_its_close_code(bridge: Bridge) -> None:
    whole = frame(connect("x"))
    for bad, code in (
        (frame(connect("x"), 0), 1002),  # a continuation of nothing
        (whole + frame(PING, fin=False) + frame(PING), 1002),  # another message within one
        (whole + frame(PING, fin=False) + frame(PING, 0) + frame(PING, 0), 1002),
        (frame(connect("x"), 1), 1003),
        (whole + frame(b"\x30\xff\xff\xff\x7f"), 1009),  # an MQTT packet above max_packet
        (b"\x82\xff\0\0\0\0\x10\0\0\5\0\0\0\0", 1009),  # a frame above any MQTT packet
    ):
        client = await upgraded(bridge)
        client.send(bad)
        assert (await client.reader.read())[-4:] == b"\x88\2" + code.to_bytes(2, "big"), bad


@bridge_test(**WS)
async def test_a_page_of_this_machine_may_come_in(bridge: Bridge) -> None:
    for origin in ("http://localhost:3000", "http://127.0.0.2", "http://[::1]:3000"):
        client = await bridge.open()
        client.send(http(Origin=origin))
        assert (await client.reader.readline()).split()[1] == b"101", origin


@bridge_test(connect_timeout=200, **WS)
async def test_the_time_for_a_connect_includes_the_http_request(bridge: Bridge) -> None:
    slow = await bridge.open()
    slow.send(http()[:50])
    assert await slow.closed()
    for closed in range(2, 7):  # a machine that stands still may be too slow for the request itself
        slow = await bridge.open()
        slow.send(http())
        answer = await slow.reader.read()
        assert bridge.stat("refused_timeout") == closed
        if answer:
            break
    assert answer.startswith(b"HTTP/1.1 101 ")


@pytest.mark.parametrize("scheme", ["ws", "wss"])
def test_paho_works_over_websockets(tmp_path: Path, scheme: str) -> None:
    import paho.mqtt.client as paho

    authority = Authority(tmp_path / "ca")
    pair = authority.issue("server")

    def use(port: int) -> list[bytes]:
        got: list[bytes] = []
        client = paho.Client(paho.CallbackAPIVersion.VERSION2, "p", transport="websockets")
        if scheme == "wss":
            client.tls_set(str(authority.cert))
        client.on_message = lambda _c, _u, message: got.append(message.payload)
        client.connect("127.0.0.1", port)
        client.loop_start()
        try:
            client.subscribe("in/#", 1)
            for number in range(20):
                client.publish("in/p", b"%d" % number * 1000, qos=1).wait_for_publish(60)
            for _ in range(1000):
                if len(got) == 20:
                    break
                client.publish("in/tick").wait_for_publish(60)
        finally:
            client.disconnect()
            client.loop_stop()
        return [payload for payload in got if payload]

    async def main() -> None:
        tls = TlsSettings(cert=pair.cert, key=pair.key)
        async with (
            asyncio.timeout(240),
            running(tmp_path, listen=[f"{scheme}://127.0.0.1:0"], tls=tls) as bridge,
        ):
            assert bridge.urls[0].startswith(f"{scheme}://")
            wanted = [b"%d" % number * 1000 for number in range(20)]
            assert await asyncio.to_thread(use, bridge.port) == wanted
            assert [payload for payload in await bridge.payloads() if payload] == wanted

    run_async(main())
