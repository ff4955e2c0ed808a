"""Listeners side by side: each with its own users, rules, certificates and limits, also after a reload."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.testbed.certificates import Authority
from bridge.access.accounts import Account
from bridge.access.rules import AccessRule
from bridge.access.users import hash_password
from bridge.errors import ConfigError
from bridge.mqtt.settings import ListenerLimits, ListenerTable, MqttConfig, TlsSettings
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5
from bridge.net import proxyheader

from .harness import Bridge, Client, Packet, bridge_test, connect, publish, subscribe, until
from .test_access import open_tls, with_bridge

ANY = ["tcp://127.0.0.1:0"]
PROXY_CHECK = proxyheader.SIGNATURE + b"\x20\0\0\0"  # the header of a proxy that speaks for itself
LASTING = {p.SESSION_EXPIRY: 1000}


def users(path: Path, **passwords: str) -> Path:
    path.write_text("".join(f"{name}:{hash_password(word.encode())}\n" for name, word in passwords.items()))
    path.chmod(0o600)
    return path


def changed(bridge: Bridge, **settings: Any) -> None:
    config = msgspec.structs.replace(bridge.config, **settings)
    bridge.front.reload(config)
    bridge.config = config


async def log_in(bridge: Bridge, listener: int, client_id: str = "c", **options: Any) -> tuple[Client, int]:
    """A client at a listener, and the reason code of its CONNACK."""
    client = await bridge.open(listener)
    client.send(connect(client_id, level=V5, **options))
    client.level = V5
    return client, (await client.receive()).body[1]


async def publishes(client: Client, topic: str) -> bool:
    answer = await client.exchange(publish(topic, b"", 1, 1, level=V5))
    return answer.body[2:3] != b"\x87"


def test_each_listener_has_its_users_rules_and_anonymous_access(tmp_path: Path) -> None:
    staff, plant = users(tmp_path / "staff", ann="staff"), users(tmp_path / "plant", ann="plant", pump="p")
    table = [
        ListenerTable(name="plant", listen=ANY, users_file=plant, acl=[AccessRule(publish=["in/%u/#"])]),
        ListenerTable(
            name="guests", listen=ANY, allow_anonymous=True, acl=[AccessRule(user="", subscribe=["open/#"])]
        ),
        ListenerTable(name="more", listen=ANY, user=[Account(name="ann", client_ids=["ann-1"])]),
    ]

    async def test(bridge: Bridge) -> None:
        main, plant, guests, more = range(4)

        async def code(listener: int, client_id: str = "c", **options: Any) -> int:
            client, found = await log_in(bridge, listener, client_id, **options)
            client.disconnect()
            return found

        assert await code(main, user="ann", password=b"staff") == 0
        assert await code(main, user="ann", password=b"plant") == 0x86
        assert await code(main, user="pump", password=b"p") == 0x86
        assert await code(main) == 0x87, "allow_anonymous is that of [mqtt] only"
        assert await code(plant, "d", user="ann", password=b"staff") == 0x86
        assert await code(plant, "d", user="ann", password=b"plant") == 0
        assert await code(guests, "e") == 0
        assert await code(more, "f", user="ann", password=b"staff") == 0x85
        assert await code(more, "ann-1", user="ann", password=b"staff") == 0
        pump, _ = await log_in(bridge, plant, "pump", user="pump", password=b"p")
        assert await publishes(pump, "in/pump/x")
        assert not await publishes(pump, "in/ann/x")
        guest, _ = await log_in(bridge, guests, "guest")
        assert not await publishes(guest, "in/x")
        assert (await guest.exchange(subscribe(1, ("open/a", 0), ("in/#", 0), level=V5))).body[
            3:
        ] == b"\0\x87"
        ann, _ = await log_in(bridge, main, "ann", user="ann", password=b"staff")
        assert await publishes(ann, "in/anything"), "[mqtt] has no rules"

    with_bridge(tmp_path, test, users_file=staff, allow_anonymous=False, listener=table)


def test_a_user_of_the_same_name_at_another_listener_gets_neither_session_nor_id(tmp_path: Path) -> None:
    staff, plant = users(tmp_path / "staff", ann="1"), users(tmp_path / "plant", ann="2")
    table = [
        ListenerTable(name="plant", listen=ANY, users_file=plant),
        ListenerTable(name="same", listen=ANY, acl=[AccessRule(subscribe=["open/#"])]),
        ListenerTable(
            name="guests", listen=ANY, allow_anonymous=True, acl=[AccessRule(subscribe=["open/#"])]
        ),
    ]

    async def test(bridge: Bridge) -> None:
        main, plant, same, guests = range(4)
        ann, _ = await log_in(bridge, main, "id", user="ann", password=b"1", properties=LASTING)
        await ann.exchange(subscribe(1, ("secret/#", 1), ("open/#", 1), level=V5))
        ann.disconnect()
        sender, _ = await log_in(bridge, main, "sender")
        for topic in ("secret/a", "open/a"):
            await sender.exchange(publish(topic, b"1", 1, 1, level=V5))
        for listener, options in ((plant, {"user": "ann", "password": b"2"}), (guests, {})):
            _, code = await log_in(bridge, listener, "id", clean=False, properties=LASTING, **options)
            assert code == 0x87, "the id belongs to another user"
        await bridge.restart()
        _, code = await log_in(bridge, plant, "id", clean=False, user="ann", password=b"2")
        assert code == 0x87, "also after a restart"
        # With the same users, it is the same user, and gets the session with what waits.
        ann = await bridge.open(same)
        answer = await ann.connect("id", clean=False, user="ann", password=b"1", level=V5, properties=LASTING)
        assert answer.body[0] == 1
        assert {(await ann.message()).topic for _ in range(2)} == {"secret/a", "open/a"}
        sender, _ = await log_in(bridge, main, "sender")
        for topic in ("secret/b", "open/b"):
            await sender.exchange(publish(topic, b"1", 1, 1, level=V5))
        assert (await ann.message()).topic == "open/b", "with the rules of the listener where it is"
        # A bound id goes back to its user.
        thief, code = await log_in(bridge, guests, "taken", properties=LASTING)
        assert code == 0
        changed(bridge, user=[Account(name="ann", client_ids=["taken"])])
        _, code = await log_in(bridge, main, "taken", user="ann", password=b"1")
        assert code == 0
        assert await thief.closed()

    with_bridge(tmp_path, test, users_file=staff, listener=table)


@pytest.mark.parametrize("binding", ["listed", "user", "prefix"])
def test_two_users_with_the_same_client_id_never_end_each_others_session(
    tmp_path: Path, binding: Any
) -> None:
    staff, plant = users(tmp_path / "staff", ann="1"), users(tmp_path / "plant", ann="2")
    settings: dict[str, Any] = {"client_ids": binding}
    if binding == "listed":
        settings = {"user": [Account(name="ann", client_ids=["ann"])]}
    table = [ListenerTable(name="plant", listen=ANY, users_file=plant)]

    async def test(bridge: Bridge) -> None:
        first, code = await log_in(bridge, 0, "ann", user="ann", password=b"1", properties=LASTING)
        assert code == 0
        for clean in (True, False):
            _, code = await log_in(bridge, 1, "ann", clean=clean, user="ann", password=b"2")
            assert code == 0x87
        assert await first.alive()
        first.abort()
        await until(lambda: bridge.stat("connections") == 0)
        await bridge.restart()
        _, code = await log_in(bridge, 1, "ann", user="ann", password=b"2")
        assert code == 0x87, "the session waits for its client"
        first, code = await log_in(bridge, 0, "ann", user="ann", password=b"1")
        assert code == 0
        first.disconnect()
        await until(lambda: bridge.stat("sessions") == 0)
        second, code = await log_in(bridge, 1, "ann", user="ann", password=b"2")
        assert code == 0, "the first one's session is over"
        _, code = await log_in(bridge, 0, "ann", user="ann", password=b"1")
        assert code == 0x87
        assert await second.alive()

    with_bridge(tmp_path, test, users_file=staff, listener=table, **settings)


def test_the_will_of_an_absent_client_is_held_to_the_rules_of_its_listener(tmp_path: Path) -> None:
    rules = [AccessRule(publish=["a"])]
    table = [ListenerTable(name="narrow", listen=ANY, acl=rules)]

    async def test(bridge: Bridge) -> None:
        watcher, _ = await log_in(bridge, 0, "watcher")
        await watcher.exchange(subscribe(1, ("#", 0), level=V5))
        options: dict[str, Any] = {"properties": LASTING, "will": ("b", b"", 0)}
        client = await bridge.open(1)
        client.send(connect("c", level=V5, **options))
        assert (await client.receive()).body[1] == 0x87, "b is not a"
        changed(bridge, listener=[ListenerTable(name="narrow", listen=ANY)])
        client, code = await log_in(bridge, 1, "c", **options)
        assert code == 0
        changed(bridge, listener=table)
        client.abort()
        await until(lambda: bridge.stat("dropped_wills") == 1)
        assert await watcher.silent()

    with_bridge(tmp_path, test, listener=table)


def test_each_listener_has_its_client_ca(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours", "our-ca"), Authority(tmp_path / "theirs", "their-ca")
    server = ours.issue("server")
    mine, foreign = ours.issue("dev-1"), theirs.issue("dev-1")

    def tls(authority: Authority) -> TlsSettings:
        return TlsSettings(cert=server.cert, key=server.key, client_ca=authority.cert)

    secure = ["tls://127.0.0.1:0"]
    table = [ListenerTable(name="vendor", listen=secure, tls=tls(theirs))]

    async def test(bridge: Bridge) -> None:
        device = await open_tls(bridge, ours, mine)
        await device.connect("c", clean=False)
        for listener, pair in ((0, foreign), (1, mine)):
            with pytest.raises((OSError, AssertionError)):
                await (await open_tls(bridge, ours, pair, listener)).connect("x")
        vendor = await open_tls(bridge, ours, foreign, 1)
        await vendor.connect("c", clean=False, expect=5)
        vendor = await open_tls(bridge, ours, foreign, 1)
        await vendor.connect("d")
        assert await device.alive()

    with_bridge(tmp_path, test, listen=secure, tls=tls(ours), listener=table)


def test_limits_of_a_listener_are_its_own(tmp_path: Path) -> None:
    limits = ListenerLimits(connections=2, subscriptions=1, max_keep_alive=10)
    table = [ListenerTable(name="small", listen=ANY, limits=limits)]

    async def test(bridge: Bridge) -> None:
        client = await bridge.open(1)
        answer = await client.connect("a", level=V5)
        assert bytes((p.SERVER_KEEP_ALIVE, 0, 10)) in answer.body
        assert (await client.exchange(subscribe(1, ("a", 0), ("b", 0), level=V5))).body[3:] == b"\0\x97"
        second, _ = await log_in(bridge, 1, "b")
        third = await bridge.open(1)
        assert await third.closed()
        others = [await log_in(bridge, 0, f"d{n}") for n in range(3)]
        assert (await others[0][0].exchange(subscribe(1, ("a", 0), ("b", 0), level=V5))).body[3:] == b"\0\0"
        changed(bridge, listener=[ListenerTable(name="small", listen=ANY)])
        assert (await client.exchange(subscribe(2, ("b", 0), level=V5))).body[3:] == b"\0"
        last, _ = await log_in(bridge, 1, "e")
        changed(bridge, listener=table)
        refused = await bridge.open(1)
        assert await refused.closed(), "three are open, and stay"
        for one in (client, second):
            one.disconnect()
        await until(lambda: bridge.stat("connections") == 4)
        hasty = msgspec.structs.replace(limits, connect_timeout=500)
        changed(bridge, listener=[ListenerTable(name="small", listen=ANY, limits=hasty)])
        silent = await bridge.open(1)
        assert await silent.closed(), "no CONNECT in the time of this listener"
        assert await last.alive()

    with_bridge(tmp_path, test, listener=table)


@bridge_test
async def test_a_reload_opens_and_closes_listeners_and_what_was_read_is_stored(bridge: Bridge) -> None:
    async with asyncio.timeout(30):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        url = f"tcp://127.0.0.1:{port}"
        stays, _ = await log_in(bridge, 0, "stays")
        changed(bridge, listener=[ListenerTable(name="new", listen=[url])])
        bridge.urls.append(url)
        first, code = await log_in(bridge, 1, "c")
        old = await bridge.open(1)
        await old.connect("old")
        unfinished = await bridge.open(1)
        assert code == 0
        first.send(*[publish("in/a", b"x" * 100, 1, n, level=V5) for n in range(1, 51)])
        assert (await first.receive()).head == 0x40
        changed(bridge, listener=[])
        packets = [packet.head for packet in [await first.receive() for _ in range(50)]]
        assert packets == [0x40] * 49 + [0xE0]
        assert len(await bridge.stored()) == 50
        assert await old.closed()
        assert await unfinished.closed()
        assert await stays.alive()
        with pytest.raises(ConnectionError):
            await bridge.open(1)
        # The address goes to another listener, and is open all the time.
        changed(bridge, listener=[ListenerTable(name="new", listen=[url])])
        moving, _ = await log_in(bridge, 1, "m")
        changed(bridge, listener=[ListenerTable(name="other", listen=[url], acl=[AccessRule()])])
        assert await moving.receive() == Packet(0xE0, b"\x98\0")
        again, code = await log_in(bridge, 1, "m")
        assert code == 0
        assert not await publishes(again, "in/a")


@bridge_test
async def test_a_reload_with_any_mistake_opens_closes_and_changes_nothing(bridge: Bridge) -> None:
    stays, _ = await log_in(bridge, 0, "stays")
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as second:
        port = second.getsockname()[1]
        second.close()
        fine = ListenerTable(name="fine", listen=[f"tcp://127.0.0.1:{port}"])
        for broken, why in (
            (
                ListenerTable(name="b", listen=[f"tcp://127.0.0.1:{taken.getsockname()[1]}"]),
                "listener b.listen",
            ),
            (ListenerTable(name="b", listen=ANY, users_file=Path("/nowhere")), "/nowhere"),
            (ListenerTable(name="b", listen=ANY, user=[Account(name="a", roles=["x"])]), "no role 'x'"),
            (
                ListenerTable(
                    name="b", listen=["tls://127.0.0.1:0"], tls=TlsSettings(cert=Path("/no"), key=Path("/no"))
                ),
                "listener b.tls",
            ),
        ):
            with pytest.raises(ConfigError, match=why):
                bridge.front.reload(MqttConfig(listener=[fine, broken], acl=[AccessRule()]))
            with socket.create_server(("127.0.0.1", port)):
                pass
            assert await publishes(stays, "in/a")
    await (await bridge.open()).connect("still-open")


def test_sessions_of_a_listener_that_is_gone_end_and_those_of_shared_users_stay(tmp_path: Path) -> None:
    staff, plant = users(tmp_path / "staff", ann="1"), users(tmp_path / "plant", bob="2")
    table = [
        ListenerTable(name="plant", listen=ANY, users_file=plant),
        ListenerTable(name="same", listen=ANY),
    ]

    async def test(bridge: Bridge) -> None:
        watcher, _ = await log_in(bridge, 0, "watcher")
        await watcher.exchange(subscribe(1, ("will/#", 0), level=V5))
        for listener, client_id, user, password in (
            (1, "b", "bob", b"2"),
            (2, "a", "ann", b"1"),
            (2, "n", None, None),
        ):
            options: dict[str, Any] = {} if user is None else {"user": user, "password": password}
            await log_in(
                bridge, listener, client_id, properties=LASTING, will=(f"will/{client_id}", b"", 0), **options
            )
        assert bridge.stat("sessions") == 4
        changed(bridge, listener=[])
        await until(lambda: bridge.stat("connections") == 1)
        await until(lambda: bridge.stat("sessions") == 2, what="watcher and ann")
        ann = await bridge.open(0)
        answer = await ann.connect("a", clean=False, user="ann", password=b"1", level=V5, properties=LASTING)
        assert answer.body[0] == 1
        await bridge.restart()
        assert bridge.stat("sessions") == 1

    with_bridge(tmp_path, test, users_file=staff, listener=table)


def test_without_listen_a_listener_is_the_only_one_and_what_makes_no_sense_is_refused() -> None:
    assert MqttConfig().listen == ["tcp://127.0.0.1:1883"]
    assert MqttConfig(listener=[ListenerTable(name="a", listen=ANY)]).listen == []
    first, second = MqttConfig(listen=ANY, listener=[ListenerTable(name="a", listen=ANY)]).listeners()
    assert (first.name, second.name) == ("", "a")
    with pytest.raises(ValueError, match="listen"):
        MqttConfig(listen=[])


def test_clients_that_come_when_there_are_no_descriptors_are_accepted_once_there_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The event loop accepts the clients of TCP and TLS, and code of ours those behind a proxy."""
    authority = Authority(tmp_path / "ca")
    pair = authority.issue("server")
    tls = TlsSettings(cert=pair.cert, key=pair.key)
    table = [
        ListenerTable(name="tls", listen=["tls://127.0.0.1:0"], tls=tls, allow_anonymous=True),
        ListenerTable(name="proxied", listen=ANY, proxy_protocol=["127.0.0.1"], allow_anonymous=True),
    ]

    async def test(bridge: Bridge) -> None:
        trusted = ssl.create_default_context(cafile=str(authority.cert))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        waiting = [socket.socket() for _ in range(3)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            for number, sock in enumerate(waiting):
                sock.connect(("127.0.0.1", bridge.port_of(number)))
            await until(lambda: "Too many open files" in caplog.text)  # the proxy's, in the same turn
            assert bridge.stat("accepted") == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await until(lambda: bridge.stat("connections") == 3)
        for number, sock in enumerate(waiting):
            sock.setblocking(False)
            secure: dict[str, Any] = {"ssl": trusted, "server_hostname": "127.0.0.1"} if number == 1 else {}
            client = Client(*await asyncio.open_connection(sock=sock, **secure))
            if number == 2:
                client.send(PROXY_CHECK)
            await client.connect(f"c{number}")
            client.disconnect()
        await until(lambda: bridge.stat("connections") == 0)

    with_bridge(tmp_path, test, listener=table)


@pytest.mark.parametrize("proxied", [False, True], ids=["direct", "proxied"])
def test_the_kernel_finds_out_when_a_client_has_vanished(tmp_path: Path, proxied: bool) -> None:
    table = [ListenerTable(name="more", listen=ANY, proxy_protocol=["127.0.0.1"] if proxied else [])]

    async def test(bridge: Bridge) -> None:
        client = await bridge.open(1)
        client.send(PROXY_CHECK if proxied else b"")
        await until(lambda: bridge.server.connections.open)
        (conn,) = bridge.server.connections.open
        sock = conn.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        found = [
            sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{what}"))
            for what in ("IDLE", "INTVL", "CNT")
        ]
        assert found == [120, 20, 4]

    with_bridge(tmp_path, test, listener=table)
