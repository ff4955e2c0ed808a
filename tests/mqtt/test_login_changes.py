"""A change takes effect on a client that is connected, that is away, and that is just logging in."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from benchmarks.testbed.certificates import Authority, Pair
from bridge.access.accounts import Account
from bridge.access.logins import Access, Reason
from bridge.access.rules import AccessRule
from bridge.mqtt.settings import MqttConfig, TlsSettings
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5

from .harness import Bridge, Client, Packet, bridge_test, connect, publish, running, until
from .test_access import open_tls, run_async, users


def line(user: str, password: str, salt: bytes = b"salt") -> str:
    """A line of the users file whose password is fast to check, as mosquitto_passwd makes them."""
    made = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, 101)
    return f"{user}:$7$101${base64.b64encode(salt).decode()}${base64.b64encode(made).decode()}\n"


ANN, BOB = line("ann", "ann"), line("bob", "bob")


class Made(NamedTuple):
    """Two authorities, certificates of each, and their lists, which are slow to make."""

    first: Authority
    other: str  # the certificate of the second authority
    pairs: dict[str, Pair]
    none: str  # lists in which no certificate is
    one: str  # and one that has the certificate of "goes"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("authorities")
    first, second = Authority(root / "first", "first-ca"), Authority(root / "second", "second-ca")
    pairs = {name: first.issue(name) for name in ("server", "goes")} | {"second": second.issue("second")}
    lists = [first.revoke(name="none"), second.revoke(name="none"), first.revoke(pairs["goes"], name="one")]
    none, other, one = (path.read_text() for path in lists)
    return Made(first, second.cert.read_text(), pairs, none + other, none + other + one)


class Place(NamedTuple):
    """What a change may change: files, and the configuration."""

    bridge: Bridge
    root: Path
    made: Made

    def write(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)

    def set(self, **settings: Any) -> None:
        self.bridge.config = msgspec.structs.replace(self.bridge.config, **settings)


LISTED = [Account(name="ann", certificates=["cn:goes"])]
# How a client logs in, the accounts before, what is changed, and whether that holds for who is away.
CHANGES: dict[str, tuple[str, list[Account], Callable[[Place], object], bool]] = {
    "the password": (
        "ann", [], lambda place: place.write("users", BOB + line("ann", "other")), True,
    ),
    "the hash of the same password": (
        "ann", [], lambda place: place.write("users", BOB + line("ann", "ann", b"new")), True,
    ),
    "the user": ("ann", [], lambda place: place.write("users", BOB), True),
    "the user needs a certificate": ("ann", [], lambda place: place.set(user=LISTED), True),
    "the client ids": (
        "ann", [], lambda place: place.set(user=[Account(name="carl", client_ids=["here", "away", "opens"])]),
        True,
    ),
    "no client without a user": ("", [], lambda place: place.set(allow_anonymous=False), True),
    "the authority": ("goes", [], lambda place: place.write("roots.pem", place.made.other), True),
    "the authority of a listed one": (
        "goes", LISTED, lambda place: place.write("roots.pem", place.made.other), True,
    ),
    "the list of withdrawn ones": (
        "goes", [], lambda place: place.write("lists.pem", place.made.one), False,
    ),
    "the certificate is another user's": ("goes", [], lambda place: place.set(user=LISTED), False),
    "the certificate is another user's now": (
        "goes", LISTED, lambda place: place.set(user=[Account(name="carl", certificates=["cn:goes"])]), True,
    ),
    "the certificate is no longer listed": ("goes", LISTED, lambda place: place.set(user=[]), True),
    "the user has other certificates": (
        "goes", [], lambda place: place.set(user=[Account(name="goes", certificates=["cn:x"])]), True,
    ),
}  # fmt: skip


@asynccontextmanager
async def just_coming(
    bridge: Bridge, before: Client, client: Client, **known: Any
) -> AsyncIterator[asyncio.Future[Packet]]:
    """A client "opens" that has given its password, and waits for what its last connection has sent."""
    stuck, go_on = threading.Event(), threading.Event()
    bridge.stream("slow", "slow", flush_on_write=True)
    bridge.files.refuse = lambda: (stuck.set(), go_on.wait(60))
    bridge.files.full = {"slow"}
    try:
        before.send(publish("slow", b"x", 2, 1, level=V5))
        await until(stuck.is_set)
        before.abort()
        client.level = V5
        opens = asyncio.ensure_future(
            client.exchange(
                connect("opens", level=V5, clean=False, properties={p.SESSION_EXPIRY: 1000}, **known)
            )
        )
        connections = bridge.server.connections.open
        await until(lambda: any(one.who[0] and one.session is None for one in connections))
        yield opens
        assert not opens.done()
    finally:
        go_on.set()


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_login_rests_on_holds_for_who_is_here_who_is_away_and_who_is_just_coming(
    tmp_path: Path, made: Made, what: str
) -> None:
    login, accounts, change, also_away = CHANGES[what]
    pairs = made.pairs
    users(tmp_path, ANN + BOB)
    (tmp_path / "roots.pem").write_text(made.first.cert.read_text() + made.other)
    (tmp_path / "lists.pem").write_text(made.none)
    tls = TlsSettings(
        cert=pairs["server"].cert,
        key=pairs["server"].key,
        client_ca=tmp_path / "roots.pem",
        crl_file=tmp_path / "lists.pem",
    )

    async def opened(bridge: Bridge, login: str) -> tuple[Client, dict[str, Any]]:
        if login in pairs:
            return await open_tls(bridge, made.first, pairs[login], 1), {}
        known = {"user": login, "password": login.encode()} if login else {}
        return await bridge.open(), known

    async def come(bridge: Bridge, name: str, login: str) -> Client:
        client, known = await opened(bridge, login)
        await client.connect(
            name,
            level=V5,
            clean=False,
            properties={p.SESSION_EXPIRY: 1000},
            will=(f"will/{name}", b"", 0),
            will_properties={p.WILL_DELAY: 1000},
            **known,
        )
        return client

    async def main() -> None:
        settings: dict[str, Any] = {
            "listen": ["tcp://127.0.0.1:0", "tls://127.0.0.1:0"],
            "tls": tls,
            "user": accounts,
            "users_file": tmp_path / "users",
            "allow_anonymous": True,
        }
        async with asyncio.timeout(240), running(tmp_path, **settings) as bridge:
            here = await come(bridge, "here", login)
            (await come(bridge, "away", login)).abort()
            others = {one: await come(bridge, f"other {one}", one) for one in ("bob", "second")}
            client, known = await opened(bridge, login)
            async with just_coming(bridge, await come(bridge, "opens", login), client, **known) as opens:
                change(Place(bridge, tmp_path, made))
                bridge.front.reload(bridge.config)
            assert (await opens).body[1] not in (0, 0x89), "not let in, and not because it took too long"
            assert await here.closed()
            for one, other in others.items():
                assert await other.alive(), one
            known_here = {one.client_id: one for one in bridge.broker.sessions.all()}
            assert all(known_here[f"other {one}"].will is not None for one in others)
            away = known_here.get("away")
            assert also_away == (away is None or away.will is None)

    run_async(main())


@bridge_test
async def test_a_client_that_is_just_coming_comes_in_with_the_rights_of_the_new_rules(bridge: Bridge) -> None:
    before = await bridge.connect("opens", level=V5, clean=False, properties={p.SESSION_EXPIRY: 1000})
    await before.subscribe(("#", 1))
    client, feeder = await bridge.open(), await bridge.connect("feeder")
    rules = [AccessRule(publish=["#"], subscribe=["open"])]
    async with just_coming(bridge, before, client) as opens:
        bridge.front.reload(msgspec.structs.replace(bridge.config, acl=rules))
    assert (await opens).body[:2] == b"\1\0"
    for number, topic in enumerate(("secret", "open"), 1):
        await feeder.exchange(publish(topic, b"", 1, number))
    assert (await client.message()).topic == "open"


@pytest.mark.parametrize("replaced", [line("ann", "new"), BOB], ids=["password", "user"])
def test_nobody_comes_in_with_a_password_that_was_replaced_while_it_was_checked(
    tmp_path: Path, replaced: str
) -> None:
    """Nor is it remembered as right, here or because another listener has the old users."""
    path = users(tmp_path, ANN)
    config = MqttConfig(users_file=path)

    async def main() -> None:
        access = Access(config)
        elsewhere = Access(config, "elsewhere", beside=access)
        try:
            checked = asyncio.ensure_future(access.verify("ann", b"ann", "10.0.0.1"))
            await asyncio.sleep(0)  # the check has begun; its result needs a later turn
            assert not checked.done()
            path.write_text(replaced)
            access.load(config)
            denied = await checked
            assert denied is not None
            assert denied.reason is Reason.WRONG_CREDENTIALS
            assert await elsewhere.verify("ann", b"ann", "10.0.0.1") is None
            assert await access.verify("ann", b"ann", "10.0.0.1") is not None
        finally:
            access.close()

    run_async(main())
