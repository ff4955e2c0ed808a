"""Attacks on who a client is, and on what it was once allowed: sessions, certificates, rules, streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.testbed.certificates import Authority
from bridge.access.accounts import Account
from bridge.access.rules import AccessRule, Deny
from bridge.access.users import hash_password
from bridge.mqtt.settings import TlsSettings
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5
from tests.mqtt.harness import Bridge, Client, bridge_test, connect, publish, subscribe, until
from tests.mqtt.test_access import open_tls, users, with_bridge

STAYS = {p.SESSION_EXPIRY: 3600}
ANY = ["tcp://127.0.0.1:0"]


async def answer(client: Client, client_id: str, **options: Any) -> bytes:
    """The body of CONNACK: whether the session was there, and the code."""
    client.level = V5
    client.send(connect(client_id, level=V5, **options))
    return (await client.receive()).body


@pytest.mark.parametrize("binding", ["any", "user", "prefix"])
def test_a_client_without_a_name_gets_no_session_of_a_device_with_a_certificate(
    tmp_path: Path, binding: str
) -> None:
    authority = Authority(tmp_path, "ca")
    server, device = authority.issue("server"), authority.issue("pump-7")
    tls = TlsSettings(cert=server.cert, key=server.key, client_ca=authority.cert)

    async def test(bridge: Bridge) -> None:
        pump = await open_tls(bridge, authority, device)
        pump.level = V5
        assert (await answer(pump, "pump-7", clean=False, properties=STAYS))[:2] == b"\0\0"
        await pump.exchange(subscribe(1, ("commands/pump-7", 1), level=V5))
        pump.disconnect()
        await until(lambda: not bridge.stat("connections"))
        thief = await bridge.open(1)
        body = await answer(thief, "pump-7", clean=False, properties=STAYS)
        assert body[1] == 0x87, body
        back = await open_tls(bridge, authority, device)
        assert (await answer(back, "pump-7", clean=False, properties=STAYS))[:2] == b"\1\0"

    with_bridge(
        tmp_path, test, listen=["tls://127.0.0.1:0", "tcp://127.0.0.1:0"], tls=tls, client_ids=binding
    )


def test_a_user_with_certificates_does_not_log_in_with_a_password(tmp_path: Path) -> None:
    path = users(tmp_path, f"pump-7:{hash_password(b'old')}\nann:{hash_password(b'ann')}\n")
    accounts = [Account(name="pump-7", certificates=["cn:plc-1"])]

    async def test(bridge: Bridge) -> None:
        client = await bridge.open()
        assert (await answer(client, "pump-7", user="pump-7", password=b"old"))[1] == 0x86
        client = await bridge.open()
        assert (await answer(client, "ann", user="ann", password=b"ann"))[1] == 0

    with_bridge(tmp_path, test, users_file=path, user=accounts, allow_anonymous=False)


def test_who_opens_session_after_session_ends_none_of_others(tmp_path: Path) -> None:
    names = ("ann", "bob", "pump-7")
    path = users(tmp_path, "".join(f"{name}:{hash_password(name.encode())}\n" for name in names))

    async def leave(bridge: Bridge, client_id: str, user: str) -> None:
        client = await bridge.open()
        options: dict[str, Any] = {"user": user, "password": user.encode(), "properties": STAYS}
        assert (await answer(client, client_id, clean=False, **options))[1] == 0
        if user == "pump-7":
            await client.exchange(subscribe(1, ("commands/pump-7", 1), level=V5))
        client.disconnect()
        assert await client.closed()

    async def test(bridge: Bridge) -> None:
        await leave(bridge, "pump-7", "pump-7")
        await leave(bridge, "bob", "bob")
        for number in range(10):
            await leave(bridge, f"made-up-{number}", "ann")
        assert bridge.stat("ended_sessions") == 8
        left = {session.client_id for session in bridge.broker.sessions.all()}
        assert left == {"pump-7", "bob", "made-up-8", "made-up-9"}
        await bridge.restart()
        sender = await bridge.connect("s", user="bob", password=b"bob")
        await sender.exchange(publish("commands/pump-7", b"open", 1, 1))
        pump = await bridge.open()
        body = await answer(pump, "pump-7", clean=False, user="pump-7", password=b"pump-7", properties=STAYS)
        assert body[:2] == b"\1\0", "its session is there, with what was sent to it"
        assert (await pump.message()).payload == b"open"

    with_bridge(tmp_path, test, users_file=path, sessions=4)


def test_who_comes_in_without_a_name_leaves_no_will_when_that_is_forbidden(tmp_path: Path) -> None:
    path = users(tmp_path, f"ann:{hash_password(b'ann')}\n")

    async def test(bridge: Bridge) -> None:
        here = await bridge.connect("here", will=("in/here", b"x", 1))
        away = await bridge.connect(
            "away", level=V5, clean=False, properties=STAYS, will=("in/away", b"x", 1),
            will_properties={p.WILL_DELAY: 1000},
        )  # fmt: skip
        away.abort()
        await until(lambda: bridge.stat("connections") == 1)
        assert await here.alive()
        bridge.config = msgspec.structs.replace(bridge.config, allow_anonymous=False)
        bridge.front.reload(bridge.config)
        await until(lambda: not bridge.stat("connections"))
        assert await here.closed()
        await until(lambda: bridge.stat("dropped_wills") == 2)
        assert bridge.stat("sessions") == 0, "nobody could ever open them"
        assert await bridge.payloads() == []

    with_bridge(tmp_path, test, users_file=path, allow_anonymous=True)


EVERYTHING = AccessRule(publish=["#"], subscribe=["#"], manage=["#"])


async def status(client: Client, client_id: str, operation: str, /, **fields: Any) -> str:
    client.send(publish(f"streambridge/{client_id}/{operation}", json.dumps(fields).encode()))
    return str(json.loads((await client.message()).payload)["statusName"])


@bridge_test(acl=[EVERYTHING, AccessRule(deny=Deny(read=["pay/#"]))])
async def test_a_stream_does_not_lead_around_what_is_denied_to_read(bridge: Bridge) -> None:
    bridge.stream("all", "open/#", "pay/#")
    client = await bridge.connect("c")
    await client.exchange(publish("pay/ann", b"1", 1, 1))
    await client.exchange(publish("in/x", b"1", 1, 2))
    assert await status(client, "c", "readMessages", streamName="s") == "Success"
    assert await status(client, "c", "readMessages", streamName="all") == "Unauthorized"
    assert await status(client, "c", "readMessages", streamName="all",
                        readMessagesOptions={"topic": "open/#"}) == "Unauthorized"  # fmt: skip
    definition = {"name": "all", "topics": ["open/#"]}
    await status(client, "c", "updateMessageStream", definition=definition)
    assert await status(client, "c", "readMessages", streamName="all") == "Unauthorized"


@bridge_test(acl=[EVERYTHING, AccessRule(deny=Deny(read=["pay/#"]))])
async def test_a_consumer_does_not_lead_around_what_is_denied_to_read(bridge: Bridge) -> None:
    export = {"consumer": [{"identifier": "work"}]}
    bridge.stream("all", "pay/#", export_definition=export)
    client = await bridge.connect("c")
    await client.exchange(publish("pay/ann", b"1", 1, 1))
    for operation in ("fetchMessages", "ackMessages"):
        assert await status(client, "c", operation, name="all", consumer="work") == "Unauthorized"


@bridge_test(acl=[EVERYTHING, AccessRule(deny=Deny(read=["pay/#"], publish=["alarm/#"]))])
async def test_neither_retained_nor_shared_messages_lead_around_a_deny(bridge: Bridge) -> None:
    client = await bridge.connect("c", level=V5)
    for number, topic in enumerate(("pay/a", "open/a"), 1):
        await client.exchange(publish(topic, b"1", 1, number, retain=True, level=V5))
    client.send(subscribe(3, ("#", 0), level=V5))
    assert (await client.receive()).body[3] == 0
    assert (await client.message()).topic == "open/a"
    member = await bridge.connect("m", level=V5)
    assert (await member.exchange(subscribe(1, ("$share/g/+/b", 0), level=V5))).body[3] == 0
    for topic in ("pay/b", "open/b"):
        client.send(publish(topic, b"2", level=V5))
    assert (await member.message()).topic == "open/b"


@bridge_test(acl=[EVERYTHING, AccessRule(deny=Deny(publish=["alarm/#"]))])
async def test_neither_a_will_nor_a_reply_leads_around_a_deny(bridge: Bridge) -> None:
    watcher = await bridge.connect("w", level=V5)
    await watcher.exchange(subscribe(1, ("alarm/#", 0), level=V5))
    will = await bridge.open()
    assert (await answer(will, "x", will=("alarm/fire", b"", 1)))[1] == 0x87
    client = await bridge.connect("c", level=V5)
    reply_to = {p.RESPONSE_TOPIC: b"alarm/fire"}
    client.send(publish("streambridge/c/listStreams", b"{}", 1, 1, level=V5, properties=reply_to))
    await client.receive()
    assert await watcher.silent()


@bridge_test(
    acl=[AccessRule(publish=["streambridge/%c/+"], manage=["streams/#"], operations=["listClients"])]
)
async def test_who_manages_streams_does_not_see_or_disconnect_clients(bridge: Bridge) -> None:
    victim = await bridge.connect("victim")
    client = await bridge.connect("c")
    assert await status(client, "c", "listClients") == "Unauthorized"
    assert await status(client, "c", "disconnectClients", client="victim") == "Unauthorized"
    assert await status(client, "c", "forgetClient", client="victim") == "Unauthorized"
    assert await victim.alive()


@bridge_test(acl=[AccessRule(publish=["%c/#"], subscribe=["%c/#"])])
async def test_no_client_id_turns_a_rule_into_rights_of_the_service(bridge: Bridge) -> None:
    for client_id in ("streambridge", "streams", "clients", "$share", "$SYS", "#", "a/b", "+"):
        client = await bridge.connect(client_id, level=V5)
        filters = tuple((f"{client_id}/{rest}", 0) for rest in ("#", "s", "broker/uptime"))
        answer = await client.exchange(subscribe(8, *filters, level=V5))
        assert all(code >= 0x80 for code in answer.body[3:]), "refused, or no valid filter"
        for number, topic in enumerate(("streambridge/v/listStreams", "$SYS/broker/uptime", "a/b/c"), 1):
            packet = await client.exchange(publish(topic, b"{}", 1, number, level=V5))
            assert (packet.head, packet.body[2:3]) == (0x40, b"\x87"), (client_id, topic)
        assert (await client.exchange(subscribe(9, ("#", 0), ("a/b/#", 0), level=V5))).body[3:] == b"\x87\x87"


@bridge_test(acl=[AccessRule(publish=["%c/#", "streambridge/%c/+"], subscribe=["%c/#"])])
async def test_no_client_id_turns_a_rule_into_rights_on_streams(bridge: Bridge) -> None:
    for client_id in ("pump-7", "streams"):
        client = await bridge.connect(client_id)
        for operation, fields in (("readMessages", {}), ("appendMessage", {"payload": "eA=="})):
            assert await status(client, client_id, operation, name="s", **fields) == "Unauthorized"


def test_what_waits_for_a_client_is_dropped_with_its_right_to_read_it(tmp_path: Path) -> None:
    path = users(tmp_path, "".join(f"{name}:{hash_password(name.encode())}\n" for name in ("ann", "bob")))
    denied = AccessRule(user="ann", deny=Deny(read=["pay/#"]))

    async def log_in(bridge: Bridge, user: str, client_id: str = "") -> Client:
        options: dict[str, Any] = {"level": V5, "clean": False, "properties": STAYS}
        client_id = client_id or user
        return await bridge.connect(client_id, user=user, password=user.encode(), **options)

    async def test(bridge: Bridge) -> None:
        for client_id, user, topics in (
            ("ann", "ann", ("pay/#", "open/#")),
            ("m1", "ann", ("$share/g/pay/#",)),
        ):
            client = await log_in(bridge, user, client_id)
            await client.exchange(subscribe(1, *((name, 1) for name in topics), level=V5))
            client.disconnect()
            assert await client.closed()
        sender = await log_in(bridge, "bob")
        for topic in ("pay/1", "open/1"):
            await sender.exchange(publish(topic, b"secret", 1, 1, level=V5))
        member = await log_in(bridge, "bob", "m2")
        await member.exchange(subscribe(1, ("$share/g/pay/#", 1), level=V5))
        bridge.config = msgspec.structs.replace(bridge.config, acl=[EVERYTHING, denied])
        bridge.front.reload(bridge.config)
        assert (await member.message()).topic == "pay/1", "another member gets what it waited for"
        assert bridge.stat("dropped_unreadable") == 1
        await bridge.restart()
        ann = await log_in(bridge, "ann")
        assert (await ann.message()).topic == "open/1"
        assert await ann.silent()

    with_bridge(tmp_path, test, users_file=path, acl=[EVERYTHING])


def test_what_was_denied_during_a_stop_is_not_delivered_after_it(tmp_path: Path) -> None:
    async def test(bridge: Bridge) -> None:
        client = await bridge.connect("c", clean=False)
        await client.subscribe(("#", 1))
        client.disconnect()
        assert await client.closed()
        sender = await bridge.connect("s")
        for topic in ("pay/1", "open/1"):
            await sender.exchange(publish(topic, b"secret", 1, 1))
        denied = AccessRule(deny=Deny(read=["pay/#"]))
        bridge.config = msgspec.structs.replace(bridge.config, acl=[EVERYTHING, denied])
        await bridge.restart()
        client = await bridge.connect("c", clean=False)
        assert (await client.message()).topic == "open/1"
        assert await client.silent()

    with_bridge(tmp_path, test, acl=[EVERYTHING])
