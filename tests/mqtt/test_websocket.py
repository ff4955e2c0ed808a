"""MQTT over WebSocket: raw frames, and clients that nobody here wrote."""

from __future__ import annotations

import asyncio
import os
import ssl
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.testbed.certificates import Authority
from benchmarks.testbed.local import free_port
from bridge.access.users import hash_password
from bridge.mqtt.settings import ListenerTable, MqttConfig, TlsSettings

from .harness import (
    DEADLINE,
    PING,
    Bridge,
    Client,
    bridge_test,
    connect,
    publish,
    run_async,
    running,
    tool,
)

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


REFUSED = (
    (http("POST /mqtt HTTP/1.1"), 400, "no GET request"),
    (http("GET /mqtt HTTP/1.0"), 400, "no GET request"),
    (http(Upgrade="h2c"), 400, "`Upgrade: websocket` is missing"),
    (http(Sec_WebSocket_Protocol="chat"), 400, "offers none of mqtt and mqttv3.1"),
    (http(Sec_WebSocket_Protocol=None), 400, "offers none of mqtt and mqttv3.1"),
    (http(Authorization="Basic \u00fc"), 400, "not ASCII"),
    (http(Sec_WebSocket_Version="8"), 426, "Sec-WebSocket-Version is not 13"),
    (http(Sec_WebSocket_Key=None), 426, "Sec-WebSocket-Key is missing"),
    (http(Origin="https://evil.example"), 403, "'https://evil.example' may not come in here"),
    (http(Origin="https://127.evil.example"), 403, "add that to `origins`"),
    (http(Origin="null"), 403, "'null'"),
    (http(Origin="http://["), 403, "'http://['"),
    (http(Origin="http://evil.example", Host="evil.example"), 403, "'http://evil.example'"),
    (connect("plain"), 400, "no HTTP request"),
    (b"\x16\x03\x01", 400, "no HTTP request"),
    (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 30_000, 431, "more than 8192 bytes"),
)


def test_what_is_not_a_websocket_for_mqtt_is_refused_with_the_reason_everywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with running(tmp_path, **WS) as bridge:
            for number, (request, status, why) in enumerate(REFUSED, 1):
                client = await bridge.open()
                client.send(request)
                head, _, body = (await client.reader.read()).decode().partition("\r\n\r\n")
                assert head.split()[1] == str(status)
                assert f"Content-Length: {len(body)}\r\n" in head
                assert why in body
                assert body.startswith(f"{status} ")
                assert bridge.stat("refused_websocket") == number
                assert any(why in record.getMessage() for record in caplog.records)
                caplog.clear()
                client.abort()

    with caplog.at_level("INFO"):
        run_async(main())


@bridge_test(**WS)
async def test_frames_that_are_wrong_end_the_connection(bridge: Bridge) -> None:
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
async def test_clients_of_mqtt_3_1_offer_a_subprotocol_of_their_own(bridge: Bridge) -> None:
    for offered, chosen in (
        ("mqttv3.1", b"mqttv3.1"),
        ("chat, mqttv3.1", b"mqttv3.1"),
        ("mqttv3.1\r\nSec-WebSocket-Protocol: mqtt", b"mqtt"),
    ):
        client = await bridge.open()
        client.send(http(Sec_WebSocket_Protocol=offered))
        answer = await client.reader.readuntil(b"\r\n\r\n")
        assert b"\r\nSec-WebSocket-Protocol: " + chosen + b"\r\n" in answer
        client.send(frame(connect("old", level=3, name=b"MQIsdp")))
        assert await payload(client) == b"\x20\2\0\0"
        client.abort()


async def status_for(
    bridge: Bridge, origin: str | None, listener: int = 0, tls: ssl.SSLContext | None = None
) -> int:
    """The status that a page of an origin gets, whose own name leads to the gateway."""
    client = await bridge.open(listener, tls)
    client.send(http(Origin=origin, Host="app.example"))
    status = int((await client.reader.readline()).split()[1])
    client.abort()
    return status


LOCAL_PAGES = ("http://localhost:3000", "http://127.0.0.2", "http://[::1]:3000", "http://[::ffff:7f00:1]")
FOREIGN_PAGES = ("https://app.example", "http://192.0.2.1", "null", "https://localhost.app.example", "")


@bridge_test(**WS)
async def test_a_page_of_this_machine_may_come_in(bridge: Bridge) -> None:
    assert [await status_for(bridge, origin) for origin in LOCAL_PAGES] == [101] * len(LOCAL_PAGES)
    assert [await status_for(bridge, origin) for origin in FOREIGN_PAGES] == [403] * len(FOREIGN_PAGES)


NAMED = ["https://App.example:443", "http://localhost:3000"]
PAGES = ("https://app.example", "http://localhost:3000", "https://other.example", "null")
OPEN = {"allow_anonymous": True}
# The settings of a listener that others reach too, and the pages that come in there.
LISTENERS: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
    (OPEN, (403, 403, 403, 403)),
    ({"origins": NAMED, **OPEN}, (101, 101, 403, 403)),
    ({"origins": ["null"], **OPEN}, (403, 403, 403, 101)),
    ({}, (101, 101, 101, 101)),
    ({"origins": NAMED}, (101, 101, 403, 403)),
    ({"origins": []}, (403, 403, 403, 403)),
    ({"tls": None}, (403, 403, 403, 403)),
    ({"tls": None, "origins": NAMED}, (101, 101, 403, 403)),
)


def test_where_a_browser_alone_is_somebody_only_pages_that_are_named_come_in(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    pair, users = authority.issue("server"), tmp_path / "users"
    users.write_text(f"ann:{hash_password(b'a')}\n")
    users.chmod(0o600)
    certificates = TlsSettings(cert=pair.cert, key=pair.key, client_ca=authority.cert)
    trusted = ssl.create_default_context(cafile=authority.cert)
    trusted.load_cert_chain(pair.cert, pair.key)

    def listener(number: int, settings: dict[str, Any]) -> ListenerTable:
        scheme, more = ("wss", {"tls": certificates}) if "tls" in settings else ("ws", {})
        given = {"allow_anonymous": False, **settings, **more}
        return ListenerTable(name=f"n{number}", listen=[f"{scheme}://0.0.0.0:0"], **given)

    tables = [listener(number, settings) for number, (settings, _) in enumerate(LISTENERS)]

    async def main() -> None:
        async with running(tmp_path, listen=[], users_file=users, listener=tables) as bridge:
            for number, (settings, wanted) in enumerate(LISTENERS):
                tls = trusted if "tls" in settings else None
                found = [await status_for(bridge, origin, number, tls) for origin in PAGES]
                assert found == list(wanted), settings
                assert await status_for(bridge, None, number, tls) == 101, "a program is no page"

    run_async(main())


@pytest.mark.parametrize(
    "origin", ["https://app.example/", "https://app.example/x", "app.example", "*", "https://"]
)
def test_what_is_no_origin_is_a_mistake_in_the_configuration(origin: str) -> None:
    for settings in (MqttConfig, partial(ListenerTable, name="x", listen=["ws://127.0.0.1:0"])):
        with pytest.raises(ValueError, match="`origins`"):
            settings(origins=[origin])


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


NGINX = """
daemon off;
master_process off;
pid nginx.pid;
error_log stderr;
events {{ }}
http {{
    access_log off;
    client_body_temp_path t1; proxy_temp_path t2; fastcgi_temp_path t3; uwsgi_temp_path t4; scgi_temp_path t5;
    server {{
        listen 127.0.0.1:{port};
{location}
    }}
}}
"""


def test_behind_nginx_it_works_as_the_how_to_shows(tmp_path: Path) -> None:
    nginx, port = tool("nginx"), free_port()
    text = (Path(__file__).parents[2] / "docs" / "howto" / "listeners.md").read_text()
    location = text.partition("```nginx\n")[2].partition("```")[0]
    before = text.partition("```nginx\n")[0].rpartition("```toml\n")[2].partition("```")[0]
    (raw,) = tomllib.loads(before)["mqtt"]["listener"]
    users = tmp_path / "users"
    users.write_text(f"ann:{hash_password(b'a')}\n")
    users.chmod(0o600)
    assert raw["listen"] == ["ws://127.0.0.1:8080"]
    table = msgspec.convert(
        {**raw, "listen": ["ws://127.0.0.1:0"]}, ListenerTable, dec_hook=lambda t, v: t(v)
    )
    table = msgspec.structs.replace(table, users_file=users)

    async def reached() -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        return Client(reader, writer)

    async def listens() -> bool:
        try:
            (await reached()).abort()
        except OSError:
            return False
        return True

    async def come_in(bridge: Bridge) -> None:
        deadline = asyncio.get_running_loop().time() + DEADLINE
        while not await listens():
            assert asyncio.get_running_loop().time() < deadline
        page = {"Host": "plant.example", "Origin": "https://plant.example"}
        client = await reached()
        client.send(http(**page))
        assert b" 101 " in await client.reader.readuntil(b"\r\n\r\n")
        client.send(frame(connect("page", user="ann", password=b"a")))
        assert await payload(client) == b"\x20\2\0\0"
        client.send(frame(publish("commands/ann", b"on", 1, 1)))
        assert await payload(client) == b"\x40\2\0\1"
        client.abort()
        for sent, code in (({}, 5), ({"user": "ann", "password": b"b"}, 4)):
            client = await reached()
            client.send(http(**page))
            assert b" 101 " in await client.reader.readuntil(b"\r\n\r\n")
            client.send(frame(connect("page", **sent)))
            assert await payload(client) == bytes((0x20, 2, 0, code)), "whoever comes through it looks local"
        for origin in ("https://evil.example", "http://localhost", "null"):
            client = await reached()
            client.send(http(Host="plant.example", Origin=origin))
            head, _, body = (await client.reader.readuntil(b"`origins` of the listener\n")).partition(
                b"\r\n\r\n"
            )
            assert b" 403 " in head
            assert origin.encode() in body

    async def main() -> None:
        async with asyncio.timeout(240), running(tmp_path, listen=[], listener=[table]) as bridge:
            inside = location.replace("127.0.0.1:8080", f"127.0.0.1:{bridge.port}")
            (tmp_path / "nginx.conf").write_text(NGINX.format(port=port, location=inside))
            process = await asyncio.create_subprocess_exec(
                nginx, "-p", tmp_path, "-c", "nginx.conf", stderr=asyncio.subprocess.DEVNULL
            )
            try:
                await come_in(bridge)
            finally:
                process.kill()
                await process.wait()

    run_async(main())
