"""Client ids: whose they are, and how an operator gives one back that somebody has taken."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import cbor2
import pytest

from bridge.access.rules import TRUSTED, AccessRule
from bridge.access.users import hash_password
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5
from bridge.operations.codec import answer

from .harness import Bridge, bridge_test, publish, until
from .test_access import users, with_bridge

USERS = f"dev-1:{hash_password(b'1')}\ndev-2:{hash_password(b'2')}\n"


@pytest.mark.parametrize(
    ("binding", "own", "foreign"),
    [
        ("user", ["dev-1", ""], ["dev-2", "dev-1:b", "dev", "x"]),
        ("prefix", ["dev-1", "dev-1:b", ""], ["dev-2", "dev-2:b", "dev-10", "dev-1-b", ":dev-1"]),
    ],
)
def test_a_user_gets_no_client_id_but_its_own(
    tmp_path: Path, binding: str, own: list[str], foreign: list[str]
) -> None:
    async def test(bridge: Bridge) -> None:
        for name in own:
            client = await bridge.connect(name, user="dev-1", password=b"1")
            assert not name or (await client.exchange(publish(f"in/{name}/x", b"", 1, 1))).head == 0x40
        for name in foreign:
            client = await bridge.open()
            await client.connect(name, user="dev-1", password=b"1", expect=2)
        stranger = await bridge.open()
        await stranger.connect("dev-1", expect=2)
        await bridge.connect("somebody")

    rules = [AccessRule(publish=["in/%c/#"])]
    with_bridge(tmp_path, test, users_file=users(tmp_path, USERS), client_ids=binding, acl=rules)


def test_a_client_id_that_a_stranger_had_taken_goes_back_to_its_user(tmp_path: Path) -> None:
    path = users(tmp_path, USERS)

    async def test(bridge: Bridge) -> None:
        thief = await bridge.connect("dev-1", clean=False, user="dev-2", password=b"2")
        await thief.subscribe(("secret", 1))
        victim = await bridge.open()
        await victim.connect("dev-1", clean=False, user="dev-1", password=b"1", expect=5)
        bridge.front.reload(type(bridge.config)(**{**_fields(bridge.config), "client_ids": "user"}))
        victim = await bridge.open()
        answer = await victim.connect("dev-1", clean=False, user="dev-1", password=b"1")
        assert answer.body == b"\0\0", "a session of its own"
        assert await thief.closed()
        await victim.exchange(publish("secret", b"x", 1, 1))
        assert await victim.silent(), "nothing of the thief's session"

    with_bridge(tmp_path, test, users_file=path)


def _fields(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


async def command(bridge: Bridge, operation: str, **fields: Any) -> dict[str, Any]:
    """An operation as the command line asks for it."""
    body = cbor2.dumps(fields)
    reply = await answer(bridge.operations, operation, body, 1 << 20, TRUSTED)
    found: dict[str, Any] = cbor2.loads(reply)
    return found


def test_an_operator_lists_disconnects_and_forgets_clients(tmp_path: Path) -> None:
    async def test(bridge: Bridge) -> None:
        watcher = await bridge.connect("watcher")
        await watcher.subscribe(("will/#", 0))
        squatter = await bridge.connect(
            "dev-1",
            user="dev-2",
            password=b"2",
            level=V5,
            will=("will/squatter", b"", 0),
            properties={p.SESSION_EXPIRY: 100_000},
        )
        await squatter.subscribe(("x", 1), ("y", 1))
        listed = (await command(bridge, "listClients"))["clients"]
        assert [(row["client"], row["user"], row["subscriptions"]) for row in listed] == [
            ("dev-1", "dev-2", 2),
            ("watcher", None, 1),
        ]
        assert listed[0]["protocol"] == "MQTT 5"
        assert listed[0]["left"] is None
        assert (await command(bridge, "disconnectClients", client="dev-1"))["clients"] == ["dev-1"]
        assert await squatter.receive() == (0xE0, b"\x98\0")
        assert (await watcher.message()).topic == "will/squatter"
        (away,) = [row for row in (await command(bridge, "listClients"))["clients"] if row["left"]]
        assert away["client"] == "dev-1"
        assert 90_000_000 < away["expires"] - away["left"] <= 100_000_000
        victim = await bridge.open()
        await victim.connect("dev-1", user="dev-1", password=b"1", expect=5)
        assert (await command(bridge, "forgetClient", client="dev-1"))["connected"] is False
        await bridge.connect("dev-1", user="dev-1", password=b"1")
        await bridge.restart()
        assert (await command(bridge, "listClients"))["clients"] == []

    with_bridge(tmp_path, test, users_file=users(tmp_path, USERS))


@bridge_test
async def test_a_forgotten_client_leaves_no_will_and_an_unknown_one_is_an_error(bridge: Bridge) -> None:
    client = await bridge.connect("c", clean=False, will=("in/will", b"x", 1))
    assert (await command(bridge, "forgetClient", client="c"))["connected"] is True
    assert await client.closed()
    await until(lambda: bridge.stat("connections") == bridge.stat("sessions") == 0)
    await asyncio.sleep(0)
    assert await bridge.payloads() == []
    for client_id in ("c", None, 7, b"c"):
        answer = await command(bridge, "forgetClient", client=client_id)
        assert (answer["status"], answer["statusName"]) == (3, "InvalidRequest")
