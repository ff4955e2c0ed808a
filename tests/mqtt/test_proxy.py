"""The PROXY protocol: who may send a header, what one may be, and that limits see the device behind it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import random
import socket
import ssl
from pathlib import Path

import msgspec
import pytest

from benchmarks.testbed.certificates import Authority
from bridge.mqtt.settings import ListenerLimits, ListenerTable, TlsSettings
from bridge.net import proxyheader

from .harness import Bridge, Client, bridge_test, connect, publish, until
from .test_access import with_bridge

ANY = ["tcp://127.0.0.1:0"]
PROXY, LOCAL = 0x21, 0x20


def header(
    source: str = "203.0.113.7", command: int = PROXY, tlvs: bytes = b"", family: int | None = None
) -> bytes:
    address = ipaddress.ip_address(source)
    body = address.packed * 2 + b"\x04\xd2\x07\x5b" + tlvs
    kind = family if family is not None else 0x11 if address.version == 4 else 0x21
    return proxyheader.SIGNATURE + bytes((command, kind)) + len(body).to_bytes(2, "big") + body


def listener(**settings: object) -> ListenerTable:
    given: dict[str, object] = {"proxy_protocol": ["127.0.0.0/8"], "allow_anonymous": True, **settings}
    return ListenerTable(name="proxied", listen=ANY, **given)  # type: ignore[arg-type]


async def through(
    bridge: Bridge, head: bytes, client_id: str = "c", *, pieces: int = 0
) -> tuple[Client, int]:
    """A client behind a proxy, and the return code of its CONNACK; -1 if it was disconnected."""
    client = await bridge.open(1)
    data = head + connect(client_id)
    for start in range(0, len(data), pieces or len(data)):
        client.send(data[start : start + (pieces or len(data))])
        if pieces:
            await asyncio.sleep(0)
    try:
        return client, (await client.receive()).body[1]
    except (asyncio.IncompleteReadError, ConnectionError):
        return client, -1


def seen(bridge: Bridge) -> list[str]:
    return sorted(peer.address for peer in bridge.front.clients())


@bridge_test(listener=[listener()])
async def test_the_gateway_sees_the_device_and_not_the_proxy(bridge: Bridge) -> None:
    clients = []
    for number, head in enumerate(
        (
            header(),
            header("2001:db8::7"),
            header("::ffff:198.51.100.1"),
            header("10.0.0.1", tlvs=os.urandom(1000)),
            header("10.0.0.2", command=LOCAL),
            header("10.0.0.3", family=0x00),
            header("10.0.0.4", family=0x31),
            proxyheader.SIGNATURE + bytes((LOCAL, 0, 0, 0)),
        )
    ):
        client, code = await through(bridge, head, f"c{number}", pieces=number % 2)
        assert code == 0, number
        assert await client.exchange(publish("in/a", b"x", 1, 1))
        clients.append(client)
    expected = ["203.0.113.7", "2001:db8::7", "198.51.100.1", "10.0.0.1", *["127.0.0.1"] * 4]
    assert seen(bridge) == sorted(expected)


FIXED = proxyheader.SIGNATURE + bytes((PROXY, 0x11))


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"", "no PROXY header"),
        (b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n", "version 1"),
        (b"PROXY UNKNOWN\r\n", "version 1"),
        (header(command=0x11), "version and command 0x11"),
        (header(command=0x22), "version and command 0x22"),
        (header(family=0x12), "not TCP"),
        (header(family=0x13), "not TCP"),
        (header(family=0x21), "too few"),
        (FIXED + b"\x00\x0b" + b"x" * 11, "too few"),
        (FIXED + b"\xff\xff", "65535 bytes"),
        (FIXED + (4097).to_bytes(2, "big") + b"x" * 4097, "4097 bytes"),
        (b"\r\n\r\n\0\r\nQUIX\n", "no PROXY header"),
        (b"\x16\x03\x01", "no PROXY header"),
    ],
)
def test_anything_but_a_header_of_version_2_is_refused(
    tmp_path: Path, head: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bridge: Bridge) -> None:
        with caplog.at_level("INFO"):
            _, code = await through(bridge, head)
        assert code == -1
        await until(lambda: bridge.stat("connections") == 0)
        assert bridge.stat("refused_proxy") == 1
        assert why in caplog.text
        _, code = await through(bridge, header())
        assert code == 0

    with_bridge(tmp_path, test, listener=[listener()])


@bridge_test(listener=[listener()], seconds=120)
async def test_no_bytes_instead_of_a_header_do_harm(bridge: Bridge) -> None:
    rng = random.Random(7)
    whole = header("2001:db8::9", tlvs=b"\x04\0\3abc")
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        client = await bridge.open(1)
        client.send(bytes(data[: rng.randrange(1, len(data) + 1)]) + rng.randbytes(rng.randrange(40)))
        client.abort()
    kept, code = await through(bridge, header())
    assert code == 0
    await until(lambda: bridge.stat("connections") == 1)
    assert await kept.alive()


def test_a_header_counts_only_from_the_proxies_that_are_named(tmp_path: Path) -> None:
    table = [listener(proxy_protocol=["192.0.2.1", "2001:db8::/32"])]

    async def test(bridge: Bridge) -> None:
        _, code = await through(bridge, header())
        assert code == -1
        assert bridge.stat("refused_proxy") == 1
        direct = await bridge.open(0)
        direct.send(header() + connect("c"))
        assert await direct.closed(), "a listener without proxies takes no header"
        bridge.front.reload(type(bridge.config)(listen=bridge.config.listen, listener=[listener()]))
        _, code = await through(bridge, header())
        assert code == 0

    with_bridge(tmp_path, test, listener=table)


@bridge_test(listener=[listener(limits=ListenerLimits(connect_timeout=300))])
async def test_a_header_that_does_not_come_ends_like_a_connect_that_does_not(bridge: Bridge) -> None:
    for beginning in (b"", b"\r\n\r\n", header()[:20], header()):
        client = await bridge.open(1)
        client.send(beginning)
        assert await client.closed()
    await until(lambda: bridge.stat("connections") == 0)
    assert bridge.stat("refused_timeout") == 4


@pytest.mark.parametrize("turns", range(6))
def test_a_connection_that_has_just_been_accepted_ends_with_its_listener(tmp_path: Path, turns: int) -> None:
    async def test(bridge: Bridge) -> None:
        with socket.create_connection(("127.0.0.1", bridge.port_of(1))) as proxy:
            for _ in range(turns):  # of the event loop: it is accepted in one, its header awaited in the next
                await asyncio.sleep(0)
            bridge.front.reload(msgspec.structs.replace(bridge.config, listener=[]))
            proxy.setblocking(False)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.get_running_loop().sock_recv(proxy, 1) == b""
            await until(lambda: bridge.stat("connections") == 0)

    with_bridge(tmp_path, test, listener=[listener()])


def test_limits_count_devices_and_a_loopback_address_behind_a_proxy_is_not_this_machine(
    tmp_path: Path,
) -> None:
    table = [
        listener(limits=ListenerLimits(connections_per_address=2)),
    ]

    async def test(bridge: Bridge) -> None:
        held = []
        for number in range(6):
            client, code = await through(bridge, header(f"203.0.113.{number // 2}"), f"c{number}")
            assert code == 0
            held.append(client)
        _, code = await through(bridge, header("203.0.113.1"), "one-more")
        assert code == -1
        assert bridge.stat("refused_limit") == 1
        waiting = [await bridge.open(1) for _ in range(5)]  # nobody's yet, so of no address
        other, code = await through(bridge, header("203.0.113.9"), "other")
        assert code == 0
        for client in (*held, *waiting, other):
            client.abort()
        await until(lambda: bridge.stat("connections") == 0)
        client, code = await through(bridge, header("127.0.0.1"), "c")
        client.send(publish("streambridge/c/deleteMessageStream", b'{"name": "s"}'))
        assert b"Unauthorized" in (await client.message()).payload
        near = await bridge.connect("d")
        near.send(publish("streambridge/d/deleteMessageStream", b'{"name": "s"}'))
        assert b"Success" in (await near.message()).payload

    with_bridge(tmp_path, test, listener=table)


@bridge_test(listener=[listener(allow_anonymous=None, users_file=None)], allow_anonymous=True)
async def test_a_loopback_listener_behind_a_proxy_is_not_open_to_everybody(bridge: Bridge) -> None:
    _, code = await through(bridge, header())
    assert code == 5


def test_the_header_comes_before_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    server, device = authority.issue("server"), authority.issue("dev-1")
    tls = TlsSettings(cert=server.cert, key=server.key, client_ca=authority.cert)
    table = [listener(tls=tls)]
    table = [
        ListenerTable(name="proxied", listen=["tls://127.0.0.1:0"], proxy_protocol=["127.0.0.1"], tls=tls)
    ]

    async def test(bridge: Bridge) -> None:
        context = ssl.create_default_context(cafile=str(authority.cert))
        context.load_cert_chain(device.cert, device.key)
        client = await bridge.open(1)
        client.send(header())
        await client.writer.start_tls(context, server_hostname="localhost")
        await client.connect("c")
        (peer,) = bridge.front.clients()
        assert (peer.user, peer.address) == ("dev-1", "203.0.113.7")

    with_bridge(tmp_path, test, listener=table)
