"""Roles, `deny`, and what an account binds to its user: client ids and certificates."""

from __future__ import annotations

import hashlib
import json
import ssl
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.testbed.certificates import Authority, Pair
from bridge.access.accounts import Account, Accounts
from bridge.access.rules import AccessRule, Deny, Identity, Role
from bridge.access.users import hash_password
from bridge.errors import ConfigError
from bridge.mqtt.settings import TlsSettings
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5

from .harness import Bridge, Client, Packet, bridge_test, connect, publish, subscribe
from .test_access import open_tls, users, with_bridge

USERS = "".join(f"{name}:{hash_password(name.encode())}\n" for name in ("ann", "bob", "carl"))
STREAMS = Role(
    name="streams", publish=["streambridge/%c/+", "streams/s"], read=["streams/s"], manage=["streams/#"]
)


def changed(bridge: Bridge, **settings: Any) -> None:
    bridge.config = msgspec.structs.replace(bridge.config, **settings)
    bridge.front.reload(bridge.config)


async def status(client: Client, client_id: str, operation: str, **fields: Any) -> str:
    client.send(publish(f"streambridge/{client_id}/{operation}", json.dumps(fields).encode()))
    return str(json.loads((await client.message()).payload)["statusName"])


def test_a_role_is_what_its_users_may_do_and_changes_for_those_who_are_connected(tmp_path: Path) -> None:
    operator = Role(name="operator", publish=["in/%u/#"], subscribe=["out/#"])
    watcher = Role(name="watcher", subscribe=["out/#"])
    accounts = [Account(name="ann", roles=["operator", "watcher"]), Account(name="bob", roles=["watcher"])]

    async def test(bridge: Bridge) -> None:
        ann = await bridge.connect("a", user="ann", password=b"ann", level=V5)
        bob = await bridge.connect("b", user="bob", password=b"bob", level=V5)
        carl = await bridge.connect("c", user="carl", password=b"carl", level=V5)
        assert (await ann.exchange(publish("in/ann/x", b"", 1, 1, level=V5))).body[2:] in (b"", b"\0")
        assert (await ann.exchange(publish("in/bob/x", b"", 1, 2, level=V5))).body[2] == 0x87
        assert (await bob.exchange(publish("in/bob/x", b"", 1, 1, level=V5))).body[2] == 0x87
        assert (await bob.exchange(subscribe(1, ("out/#", 0), level=V5))).body[3] == 0
        assert (await carl.exchange(subscribe(1, ("out/#", 0), level=V5))).body[3] == 0x87, "no role at all"
        changed(bridge, user=[Account(name="bob", roles=["operator"])])
        assert (await ann.exchange(publish("in/ann/x", b"", 1, 3, level=V5))).body[2] == 0x87
        assert (await bob.exchange(publish("in/bob/x", b"", 1, 2, level=V5))).body[2:] in (b"", b"\0")
        with pytest.raises(ConfigError, match=r"mqtt\.user\[0\]\.roles: there is no role 'boss'"):
            changed(bridge, user=[Account(name="ann", roles=["boss"])])
        assert (await bob.exchange(publish("in/bob/x", b"", 1, 3, level=V5))).body[2:] in (b"", b"\0")

    with_bridge(tmp_path, test, users_file=users(tmp_path, USERS), role=[operator, watcher], user=accounts)


@bridge_test(role=[Role(name="nobody-has-it", publish=["#"])])
async def test_roles_that_nobody_has_leave_nothing_open(bridge: Bridge) -> None:
    client = await bridge.connect("c", level=V5)
    assert (await client.exchange(publish("in/a", b"", 1, 1, level=V5))).body[2] == 0x87
    assert (await client.exchange(subscribe(1, ("#", 0), level=V5))).body[3] == 0x87


EVERYTHING = AccessRule(publish=["#"], subscribe=["#"], manage=["#"])


@bridge_test(
    acl=[
        AccessRule(deny=Deny(publish=["in/keys/#", "streams/s"], read=["keys/#"], manage=["streams/audit"])),
        EVERYTHING,
    ]
)
async def test_what_is_denied_no_other_rule_gives_whatever_the_order(bridge: Bridge) -> None:
    client = await bridge.connect("c", level=V5)
    watcher = await bridge.connect("w", level=V5)
    assert (await watcher.exchange(subscribe(1, ("#", 0), level=V5))).body[3] == 0
    for topic, code in (("in/keys", 0x87), ("in/keys/a", 0x87), ("streams/s", 0x87), ("keys/a", 0)):
        answer = await client.exchange(publish(topic, b"", 1, 1, level=V5))
        assert answer.body[2:3] == bytes((code or 0x10,)), topic  # nobody may read it
    await client.exchange(publish("in/a", b"1", 1, 1, level=V5))
    assert (await watcher.message()).topic == "in/a", "nothing of keys/a came before"
    assert (await bridge.payloads()) == [b"1"]


@bridge_test
async def test_a_denied_filter_refuses_all_that_overlap_and_ends_what_was_subscribed_before(
    bridge: Bridge,
) -> None:
    client = await bridge.connect("c", level=V5)
    assert (await client.exchange(subscribe(1, ("#", 0), level=V5))).body[3] == 0
    changed(bridge, acl=[EVERYTHING, AccessRule(deny=Deny(subscribe=["secret/+/x"]))])
    for topic_filter, code in (
        ("#", 0x87), ("secret/#", 0x87), ("+/+/+", 0x87), ("secret/a/x", 0x87), ("$share/g/secret/#", 0x87),
        ("secret/a/y", 0), ("open/#", 0),
    ):  # fmt: skip
        answer = await client.exchange(subscribe(2, (topic_filter, 0), level=V5))
        assert answer.body[3] == code, topic_filter
    for topic in ("secret/a/x", "secret/a/z"):
        client.send(publish(topic, b"", level=V5))
    assert (await client.message()).topic == "secret/a/z", "the old subscription delivers nothing denied"


@bridge_test(
    acl=[
        AccessRule(publish=["streambridge/%c/+"]),
        AccessRule(subscribe=["streams/#"], manage=["streams/#"], operations=["readMessages", "listStreams"]),
        AccessRule(
            publish=["streams/#"], operations=["appendMessage"], deny=Deny(operations=["listStreams"])
        ),
    ]
)
async def test_operations_are_those_that_the_rules_list_without_those_that_one_denies(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    assert await status(client, "c", "appendMessage", name="s", payload="YQ==") == "Success"
    assert await status(client, "c", "readMessages", streamName="s") == "Success"
    for operation in ("listStreams", "describeMessageStream", "deleteMessageStream", "purgeMessageStream"):
        assert await status(client, "c", operation, name="s") in ("Unauthorized", "InvalidRequest"), operation
    assert await status(client, "c", "deleteMessageStream", name="s") == "Unauthorized"
    assert bridge.manager.names() == ["s"]


@pytest.mark.parametrize("name", ["", "a/b", "#", "+"])
def test_a_placeholder_that_cannot_be_filled_denies_all_that_it_could_stand_for(name: str) -> None:
    denied = Deny(publish=["own/%u/x/+"], read=["%c/keys"])
    identity = Identity(name, name or None, [EVERYTHING, AccessRule(deny=denied)])
    assert not identity.may_publish("own/a/b/x/y")
    assert not identity.may_publish("own/a")
    assert not identity.may_read("a/keys")
    assert identity.may_publish("other/x")
    safe = Identity("c", "dora", [EVERYTHING, AccessRule(deny=denied)])
    assert safe.may_publish("own/carl/x/y")
    assert not safe.may_publish("own/dora/x/y")
    assert safe.may_read("d/keys")
    assert not safe.may_read("c/keys")
    assert not safe.may_read_all("+/keys")
    assert safe.is_denied("publish", "own/dora/x/y")
    assert not safe.is_denied("publish", "own/carl/x/y")
    assert safe.may_read_all("c/other")


def test_client_ids_of_an_account_are_its_users_alone_and_its_only_ones(tmp_path: Path) -> None:
    accounts = [
        Account(name="ann", client_ids=["pump-7", "pump-7:*"]),
        Account(name="bob", client_ids=["pump-*"]),
    ]

    async def test(bridge: Bridge) -> None:
        async def answer(client_id: str, user: str | None = None) -> int:
            client = await bridge.open()
            password = None if user is None else user.encode()
            client.send(connect(client_id, user=user, password=password))
            return (await client.receive()).body[1]

        for client_id, user in (
            ("pump-7", "ann"), ("pump-7:a", "ann"), ("pump-8", "bob"), ("other", "carl"), ("else", None),
            ("", "ann"),
        ):  # fmt: skip
            assert await answer(client_id, user) == 0, (client_id, user)
        for client_id, user in (
            ("pump-7", "bob"), ("pump-7:a", "bob"), ("pump-8", "ann"), ("ann", "ann"), ("pump-7", "carl"),
            ("pump-9", None), ("pump-7", None),
        ):  # fmt: skip
            assert await answer(client_id, user) == 2, (client_id, user)

    with_bridge(tmp_path, test, users_file=users(tmp_path, USERS), user=accounts, allow_anonymous=True)


def test_an_id_that_somebody_had_before_it_was_bound_goes_to_its_user(tmp_path: Path) -> None:
    async def test(bridge: Bridge) -> None:
        thief = await bridge.connect("pump-7", clean=False, user="bob", password=b"bob")
        await thief.subscribe(("secret", 1))
        changed(bridge, user=[Account(name="ann", client_ids=["pump-7"])])
        owner = await bridge.open()
        answer = await owner.connect("pump-7", clean=False, user="ann", password=b"ann")
        assert answer.body == b"\0\0", "a session of its own"
        assert await thief.closed()

    with_bridge(tmp_path, test, users_file=users(tmp_path, USERS))


SAN = "subjectAltName=DNS:Pump-7.plant.example,URI:urn:pump:7,IP:10.0.0.7\n"


def fingerprint(pair: Pair) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pair.cert.read_text())).hexdigest().upper()


@pytest.mark.parametrize(
    "by", ["dns:pump-7.plant.EXAMPLE", "uri:urn:pump:7", "ip:10.0.0.7", "cn:dev-1", "sha256"]
)
def test_a_certificate_is_its_accounts_user_by_name_or_fingerprint(tmp_path: Path, by: str) -> None:
    authority = Authority(tmp_path / "ca")
    server, device, impostor = (
        authority.issue("server"),
        authority.issue("dev-1", SAN),
        authority.issue("ann"),
    )
    digits = fingerprint(device)
    listed = f"sha256:{':'.join(digits[n : n + 2] for n in range(0, 64, 2))}" if by == "sha256" else by
    tls = TlsSettings(cert=server.cert, key=server.key, client_ca=authority.cert)

    async def test(bridge: Bridge) -> None:
        client = await open_tls(bridge, authority, device)
        await client.connect("c")
        assert await client.exchange(publish("by/ann", b"", 1, 1)) == Packet(0x40, b"\0\1")
        other = await open_tls(bridge, authority, impostor)  # its common name is the user's
        await other.connect("d", expect=5)
        bridge.front.reload(bridge.config)
        assert await client.alive()

    rules = [AccessRule(publish=["by/%u"])]
    accounts = [Account(name="ann", certificates=[listed])]
    with_bridge(tmp_path, test, listen=["tls://127.0.0.1:0"], tls=tls, acl=rules, user=accounts)


def test_a_certificate_that_becomes_another_users_is_revoked_with_its_will(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    server, device = authority.issue("server"), authority.issue("dev-1")
    mine = [f"sha256:{fingerprint(device)}"]
    tls = TlsSettings(cert=server.cert, key=server.key, client_ca=authority.cert)
    lasting = {p.SESSION_EXPIRY: 1000}

    async def test(bridge: Bridge) -> None:
        def stays(client: Client) -> Any:
            return client.connect("c", level=V5, properties=lasting, will=("will", b"", 0), clean=False)

        watcher = await open_tls(bridge, authority, server)
        await watcher.connect("watcher")
        await watcher.subscribe(("#", 0))
        named = await open_tls(bridge, authority, device)
        await stays(named)
        changed(bridge, user=[Account(name="ann", certificates=mine)])
        assert (await named.receive()).body[0] == 0x87, "it was dev-1, and is ann now"
        mapped = await open_tls(bridge, authority, device)
        answer = await mapped.connect("d", level=V5, properties=lasting, will=("will", b"", 0), clean=False)
        assert answer.body[1] == 0
        bridge.front.reload(bridge.config)
        assert await mapped.alive()
        changed(bridge, user=[])
        assert (await mapped.receive()).body[0] == 0x87
        assert await watcher.silent(), "no will of what is revoked"
        await bridge.restart()
        assert bridge.stat("sessions") == 2

    with_bridge(tmp_path, test, listen=["tls://127.0.0.1:0"], tls=tls)


def test_the_most_precise_of_what_accounts_list_decides() -> None:
    certificate = {"subject": ((("commonName", "x"),),), "subjectAltName": (("DNS", "x.example"),)}
    ann, bob = Account(name="ann", certificates=["cn:x"]), Account(name="bob", certificates=["DNS:X.example"])
    carl = Account(name="carl", certificates=["sha256:" + hashlib.sha256(b"der").hexdigest()])
    found = [
        Accounts(known).user_of(certificate, b"der") for known in ([], [ann], [ann, bob], [ann, bob, carl])
    ]
    assert [user and user[0] for user in found] == ["x", "ann", "bob", "carl"]
    two = {"subject": ((("commonName", "x"),), (("commonName", "y"),))}
    assert Accounts().user_of(two, b"") is None
    assert Accounts().user_of({}, b"") is None
