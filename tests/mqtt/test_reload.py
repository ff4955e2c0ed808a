"""After a reload a connected client may do what it could do if it connected now: neither more nor less."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bridge.access.rules import AccessRule
from bridge.access.users import hash_password
from bridge.mqtt.wire.packets import V5

from .harness import Bridge, Client, Packet, publish, subscribe, until
from .test_access import users, with_bridge
from .test_proxy import header, listener

HERE = "127.0.0.1"
TOPICS = ("in/a", "in/b", "plain/a", "plain/b")
FILTERS = ("in/#", "plain/#", "#")
REQUESTS: dict[str, dict[str, Any]] = {
    "describeMessageStream": {"name": "s"},
    "readMessages": {"streamName": "s"},
    "appendMessage": {"name": "s", "payload": "YQ=="},
    "purgeMessageStream": {"name": "s", "upto": 0},
}
EVERYBODY = [AccessRule(publish=["streambridge/%c/+"]), AccessRule(user="feeder", publish=["#"])]
RULES: dict[str, list[AccessRule]] = {
    "no rules": [],
    "everything": [*EVERYBODY, AccessRule(publish=["#"], subscribe=["#"], manage=["#"])],
    "a": [*EVERYBODY, AccessRule(publish=["+/a"], subscribe=["#"], read=["+/a", "streams/s"])],
    "b": [*EVERYBODY, AccessRule(publish=["+/b", "streams/s"], subscribe=["plain/#"], manage=["streams/s"])],
    "nothing": EVERYBODY,
}
# Each differs from the one before; the first comes after "no rules".
ORDER = ("a", "b", "nothing", "everything", "b", "no rules", "nothing", "a", "everything", "a")


class Tried:
    """A client that tries what it may do; what it is delivered meanwhile is put aside."""

    def __init__(self, client: Client, client_id: str) -> None:
        self.client, self.client_id = client, client_id
        self.received: list[str] = []

    async def answer(self, packet: bytes) -> Packet:
        """The answer to a packet: the next one that is no delivery of these topics."""
        self.client.send(packet)
        while (got := await self.client.receive()).head & 0xF0 == 0x30:
            topic = self.client.parse(*got).topic
            if topic not in TOPICS:
                break
            self.received.append(topic)
        return got

    async def subscriptions(self) -> dict[str, bool]:
        """Which filters are granted."""
        answers = [await self.answer(subscribe(1, (wanted, 0), level=V5)) for wanted in FILTERS]
        return {wanted: answer.body[-1] < 0x80 for wanted, answer in zip(FILTERS, answers, strict=True)}

    async def abilities(self, feeder: Tried) -> dict[str, object]:
        """What it can publish, ask for, and receive of what another client publishes."""
        can: dict[str, object] = {}
        for topic in TOPICS:
            can[f"publish {topic}"] = await self.answer(publish(topic, b"", 1, 9, level=V5))
        for name, fields in REQUESTS.items():
            request = publish(f"streambridge/{self.client_id}/{name}", json.dumps(fields).encode(), level=V5)
            reply = self.client.parse(*await self.answer(request))
            can[name] = json.loads(reply.payload)["statusName"]
        self.received.clear()
        for topic in TOPICS:
            await feeder.answer(publish(topic, b"", 1, 1, level=V5))
        await self.answer(b"\xc0\0")
        can["receive"] = self.received.copy()
        return can


async def connected(bridge: Bridge, client_id: str, address: str, **options: Any) -> Tried:
    """A client on this machine, or behind a proxy that names its address."""
    client = await bridge.open(address != HERE)
    if address != HERE:
        client.send(header(address))
    await client.connect(client_id, level=V5, **options)
    return Tried(client, client_id)


@pytest.mark.parametrize("address", [HERE, "192.0.2.7"], ids=["here", "elsewhere"])
def test_a_connected_client_has_the_rights_of_the_new_rules(tmp_path: Path, address: str) -> None:
    path = users(tmp_path, "feeder:" + hash_password(b"f"))

    async def test(bridge: Bridge) -> None:
        feeder = await connected(bridge, "feeder", address, user="feeder", password=b"f")
        stays = await connected(bridge, "stays", address)
        await stays.subscriptions()
        before = await stays.abilities(feeder)
        for name in ORDER:
            bridge.front.reload(msgspec.structs.replace(bridge.config, acl=RULES[name]))
            found = await stays.abilities(feeder)  # at once, on topics that it has used
            assert found != before, name
            before = found
            fresh = await connected(bridge, "fresh", address)
            assert await fresh.subscriptions() == await stays.subscriptions(), name
            assert await fresh.abilities(feeder) == found, name
            fresh.client.disconnect()
            await until(lambda: bridge.stat("connections") == 2)

    with_bridge(tmp_path, test, users_file=path, allow_anonymous=True, listener=[listener()])


def test_no_password_of_before_opens_anything_after_a_reload(tmp_path: Path) -> None:
    """Also not one that was used a moment ago, and is remembered as right."""
    path = users(tmp_path, "ann:" + hash_password(b"first"))

    async def test(bridge: Bridge) -> None:
        before = b"first"
        await bridge.connect("c", user="ann", password=before)
        for now in (b"second", b"third", b"first"):
            path.write_text("ann:" + hash_password(now))
            bridge.front.reload(bridge.config)
            client = await bridge.open()
            await client.connect("c", user="ann", password=before, expect=4)
            await bridge.connect("c", user="ann", password=now)
            before = now

    with_bridge(tmp_path, test, users_file=path)
