"""What a reload takes away ends at once: connections, TLS tickets and wills of what is replaced."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.testbed.certificates import Authority, Pair
from bridge.access.accounts import Account
from bridge.access.rules import AccessRule
from bridge.access.users import hash_password
from bridge.mqtt.server.server import SLICE
from bridge.mqtt.settings import TlsSettings
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5

from .harness import Bridge, Client, Packet, ack, bridge_test, connect, publish, until
from .test_access import open_tls, users, with_bridge

ANN, BOB = ("ann:" + hash_password(b"a"), "bob:" + hash_password(b"b"))
STAYS = {p.SESSION_EXPIRY: 1000}


def log_in(
    bridge: Bridge, authority: Authority, pair: Pair, version: ssl.TLSVersion, session: ssl.SSLSession | None
) -> tuple[bytes, bool, ssl.SSLSession | None]:
    """Connect as a blocking client; returns the return code, whether TLS was resumed, and its ticket.

    Raises OSError where the bridge refuses.
    """
    context = ssl.create_default_context(cafile=str(authority.cert))
    context.minimum_version = context.maximum_version = version
    context.load_cert_chain(pair.cert, pair.key)
    if session is not None:
        context = session_context[session.id]
    with (
        socket.create_connection(("127.0.0.1", bridge.port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as secured,
    ):
        secured.sendall(connect("c"))
        answer = secured.recv(4)
        if not answer:
            raise ConnectionResetError("closed by the bridge")
        ticket = secured.session
        if ticket is not None:
            session_context[ticket.id] = context
        return answer[3:], bool(secured.session_reused), ticket


session_context: dict[bytes, ssl.SSLContext] = {}  # a ticket is only taken by the context that got it


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_no_tls_ticket_of_a_replaced_client_ca_resumes(tmp_path: Path, version: ssl.TLSVersion) -> None:
    old, new = Authority(tmp_path / "old", "old-ca"), Authority(tmp_path / "new", "new-ca")
    server, device = old.issue("server"), old.issue("dev-1")
    renewed = new.issue("dev-1")
    tls = TlsSettings(cert=server.cert, key=server.key, client_ca=old.cert)

    async def test(bridge: Bridge) -> None:
        async def attempt(pair: Pair, ticket: ssl.SSLSession | None = None) -> Any:
            return await asyncio.to_thread(log_in, bridge, old, pair, version, ticket)

        code, resumed, ticket = await attempt(device)
        assert (code, resumed) == (b"\0", False)
        code, resumed, ticket = await attempt(device, ticket)
        assert (code, resumed) == (b"\0", True), "a ticket serves while the CA stays"
        bridge.front.reload(
            msgspec.structs.replace(bridge.config, tls=msgspec.structs.replace(tls, client_ca=new.cert))
        )
        for given in (ticket, None):
            with pytest.raises(OSError):
                await attempt(device, given)
        assert (await attempt(renewed))[:2] == (b"\0", False)

    with_bridge(tmp_path, test, listen=["tls://127.0.0.1:0"], tls=tls)


def test_connections_whose_certificate_no_longer_verifies_are_closed_and_others_stay(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "first", "first-ca"), Authority(tmp_path / "second", "second-ca")
    server = first.issue("server")
    both, one = tmp_path / "both.pem", tmp_path / "one.pem"
    both.write_text(first.cert.read_text() + second.cert.read_text())
    one.write_text(second.cert.read_text())
    tls = TlsSettings(cert=server.cert, key=server.key, client_ca=both)

    async def test(bridge: Bridge) -> None:
        watcher = await open_tls(bridge, first, second.issue("watcher"))
        await watcher.connect("watcher")
        await watcher.subscribe(("#", 0))
        leaving = await open_tls(bridge, first, first.issue("leaving"))
        await leaving.connect("leaving", will=("will/leaving", b"", 0))
        between = await open_tls(bridge, first, first.issue("between"))  # its CONNECT comes after the reload
        bridge.front.reload(bridge.config)
        assert await leaving.alive(), "nothing was taken away"
        bridge.front.reload(
            msgspec.structs.replace(bridge.config, tls=msgspec.structs.replace(tls, client_ca=one))
        )
        assert await leaving.closed()
        await between.connect("between", expect=5)
        assert await watcher.silent(), "no will of what is revoked"
        await until(lambda: bridge.stat("connections") == 1)
        assert bridge.stat("dropped_wills") == 1
        watcher.disconnect()

    with_bridge(tmp_path, test, listen=["tls://127.0.0.1:0"], tls=tls)


@pytest.mark.parametrize("taken_away", ["root", "intermediate"])
def test_every_authority_that_has_verified_a_client_must_stay(tmp_path: Path, taken_away: str) -> None:
    root = Authority(tmp_path / "root", "root-ca")
    inner, other = root.below("inner-ca"), Authority(tmp_path / "other", "other-ca")
    server, files = root.issue("server"), {}
    for name, kept in (
        ("all", (root, inner, other)),
        ("root", (inner, other)),
        ("intermediate", (root, other)),
    ):
        files[name] = tmp_path / f"{name}.pem"
        files[name].write_text("".join(one.cert.read_text() for one in kept))
    tls = TlsSettings(cert=server.cert, key=server.key, client_ca=files["all"])

    async def test(bridge: Bridge) -> None:
        stays = await open_tls(bridge, root, other.issue("stays"))
        await stays.connect("stays")
        leaving = await open_tls(bridge, root, inner.issue("leaving"))
        await leaving.connect("leaving")
        less = msgspec.structs.replace(tls, client_ca=files[taken_away])
        bridge.front.reload(msgspec.structs.replace(bridge.config, tls=less))
        assert await leaving.closed()
        assert await stays.alive()

    with_bridge(tmp_path, test, listen=["tls://127.0.0.1:0"], tls=tls)


def test_a_new_password_and_the_end_of_a_user_close_connections_and_drop_wills(tmp_path: Path) -> None:
    path = users(tmp_path, f"{ANN}\n{BOB}\n")

    async def client(bridge: Bridge, name: str, user: str, delay: int = 0) -> Client:
        options: dict[str, Any] = {
            "user": user,
            "password": user[:1].encode(),
            "level": V5,
            "properties": STAYS,
        }
        will = (f"will/{name}", b"", 0)
        return await bridge.connect(name, will=will, will_properties={p.WILL_DELAY: delay}, **options)

    async def test(bridge: Bridge) -> None:
        watcher = await bridge.connect("watcher")
        await watcher.subscribe(("#", 0))
        here = [await client(bridge, "ann-here", "ann"), await client(bridge, "bob-here", "bob")]
        for name, user in (("ann-away", "ann"), ("bob-away", "bob")):
            (await client(bridge, name, user, delay=1000)).abort()
        await until(lambda: bridge.stat("connections") == 3)
        bridge.front.reload(bridge.config)
        assert [await one.alive() for one in here] == [True, True]
        path.write_text("ann:" + hash_password(b"other") + "\n")
        bridge.front.reload(bridge.config)
        assert [await one.closed() for one in here] == [True, True]
        assert await watcher.silent(), "neither wills nor delayed wills"
        assert bridge.stat("dropped_wills") == 4
        left = {session.client_id for session in bridge.broker.sessions.all()}
        assert left == {"watcher", "ann-here", "ann-away"}, (
            "nobody could ever open those of a user who is gone"
        )
        back = await bridge.open()
        back.level = V5
        back.send(connect("ann-away", user="ann", password=b"other", level=V5, clean=False, properties=STAYS))
        assert (await back.receive()).body[:2] == b"\1\0"

    with_bridge(tmp_path, test, users_file=path)


def test_what_was_taken_away_during_a_stop_is_gone_at_the_start(tmp_path: Path) -> None:
    path = users(tmp_path, f"{ANN}\n{BOB}\n")

    async def test(bridge: Bridge) -> None:
        for user in ("ann", "bob"):
            options: dict[str, Any] = {"user": user, "password": user[:1].encode(), "level": V5}
            options["will_properties"] = {p.WILL_DELAY: 1000}
            client = await bridge.connect(user, will=("in/will", b"x", 1), properties=STAYS, **options)
            client.abort()
        await until(lambda: not bridge.stat("connections"))
        await bridge.stop()
        path.write_text(ANN + "\n")
        await bridge.start()
        (session,) = bridge.broker.sessions.all()
        assert session.client_id == "ann"
        assert session.will is not None
        await bridge.stop()
        path.write_text("ann:" + hash_password(b"other") + "\n")
        await bridge.start()
        (session,) = bridge.broker.sessions.all()
        assert session.will is None
        assert await bridge.payloads() == []

    with_bridge(tmp_path, test, users_file=path)


@bridge_test
async def test_a_will_on_a_topic_that_its_client_may_not_publish_on_any_more_is_dropped(
    bridge: Bridge,
) -> None:
    client = await bridge.connect("c", will=("in/will", b"x", 1))
    bridge.front.reload(msgspec.structs.replace(bridge.config, acl=[AccessRule(publish=["other"])]))
    client.abort()
    await until(lambda: not bridge.stat("connections"))
    assert await bridge.payloads() == []
    assert bridge.stat("dropped_wills") == 1


def test_a_client_whose_id_is_bound_to_others_now_loses_connection_session_and_will(tmp_path: Path) -> None:
    path = users(tmp_path, f"{ANN}\n{BOB}\n")
    wide = [Account(name="ann", client_ids=["pump-1", "pump-2", "pump-3"])]
    options: dict[str, Any] = {"user": "ann", "password": b"a", "level": V5, "properties": STAYS}

    async def test(bridge: Bridge) -> None:
        watcher = await bridge.connect("watcher", user="bob", password=b"b")
        await watcher.subscribe(("will/#", 0))
        kept, here, away = [
            await bridge.connect(
                name, will=(f"will/{name}", b"", 0), will_properties={p.WILL_DELAY: 1000}, **options
            )
            for name in ("pump-1", "pump-2", "pump-3")
        ]
        assigned = await bridge.connect("", user="ann", password=b"a", level=V5)
        away.abort()
        await until(lambda: bridge.stat("connections") == 4)
        narrow = [Account(name="ann", client_ids=["pump-1"])]
        bridge.front.reload(msgspec.structs.replace(bridge.config, user=narrow))
        assert await here.closed()
        assert [await kept.alive(), await assigned.alive()] == [True, True]
        assert await watcher.silent()
        assert bridge.stat("dropped_wills") == 2
        left = {session.client_id for session in bridge.broker.sessions.all()}
        assert left & {"pump-1", "pump-2", "pump-3"} == {"pump-1"}
        bound = [*narrow, Account(name="bob", client_ids=["auto-*"])]
        bridge.front.reload(msgspec.structs.replace(bridge.config, user=bound))
        assert await assigned.closed(), "what the server has assigned is another user's now"

    with_bridge(tmp_path, test, users_file=path, user=wide)


def test_a_reload_looks_up_many_clients_in_slices_and_forgets_none(tmp_path: Path) -> None:
    many = 2 * SLICE + 7

    async def test(bridge: Bridge) -> None:
        keeps = await bridge.connect("keeps")
        here = []
        for number in range(many):
            stays, will = number % 50 == 0, ("in/will", b"x", 1)
            client = await bridge.connect(f"c{number}", clean=False, will=will if stays else None)
            if stays:
                here.append(client)
            else:
                client.abort()
        bound = [Account(name="ann", client_ids=["c*"])]
        bridge.front.reload(msgspec.structs.replace(bridge.config, user=bound))
        assert await keeps.alive(), "in between"
        left = len(bridge.broker.sessions.all())
        assert left > 1, "not all at once"
        await until(lambda: bridge.stat("sessions") == 1)
        assert all([await one.closed() for one in here])
        assert await keeps.alive()
        assert await bridge.payloads() == []

    with_bridge(tmp_path, test)


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("when", ["connected", "away", "stopped"])
def test_what_was_in_flight_is_not_sent_again_to_a_client_that_may_not_read_it_any_more(
    tmp_path: Path, when: str, qos: int
) -> None:
    narrow = [AccessRule(publish=["#"], subscribe=["open/#"])]

    async def test(bridge: Bridge) -> None:
        feeder = await bridge.connect("feeder")
        options: dict[str, Any] = {"level": V5, "properties": STAYS, "clean": False}
        reader = await bridge.connect("reader", **options)
        await reader.subscribe(("open/#", qos), ("secret/#", qos))
        for number, topic in enumerate(("secret/a", "open/a", "secret/b"), 1):
            await feeder.exchange(publish(topic, b"", 2, number))
            await feeder.exchange(ack(0x62, number))
        for topic in ("secret/a", "open/a", "secret/b"):
            assert reader.parse(*await reader.receive()).topic == topic
        if when != "connected":
            reader.abort()
            await until(lambda: bridge.stat("connections") == 1)
        if when == "stopped":
            await bridge.stop()
            bridge.config = msgspec.structs.replace(bridge.config, acl=narrow)
            await bridge.start()
        else:
            bridge.front.reload(msgspec.structs.replace(bridge.config, acl=narrow))
        reader = await bridge.connect("reader", **options)
        reader.send(b"\xc0\0")
        got = [packet async for packet in _until_ping(reader)]
        assert [reader.parse(*one).topic for one in got if one.head >> 4 == 3] == ["open/a"]
        freed = [one for one in got if one.head == 0x62]
        while len(freed) < 2 * (qos == 2):  # so that the client forgets the ids
            freed.append(await reader.receive())
        assert {one.head for one in freed} <= {0x62}
        assert bridge.stat("dropped_unreadable") == 2

    with_bridge(tmp_path, test, acl=[AccessRule(publish=["#"], subscribe=["#"])])


async def _until_ping(client: Client) -> AsyncIterator[Packet]:
    while (packet := await client.receive()).head != 0xD0:
        yield packet
