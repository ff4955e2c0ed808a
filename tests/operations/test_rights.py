"""Every operation asks for its right on its stream, whatever the transport."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pytest

from benchmarks.testbed.mosquitto import Mosquitto
from bridge.access.rules import AccessRule, Identity
from bridge.access.tokens import read_tokens
from bridge.errors import ConfigError
from bridge.mqtt.settings import MqttConfig
from bridge.mqtt.wire.packets import V5
from bridge.mqtt.wire.properties import RESPONSE_TOPIC
from bridge.operations.catalog import OPERATIONS
from tests.greengrass.harness import CONNECT, Raw, Server, frame
from tests.mqtt.harness import Bridge, Client, bridge_test, publish, run_async, running, until
from tests.mqtt.test_external import Device, connected, external

DEFINITION = {"name": "secret", "strategyOnFull": 0}
REQUESTS: dict[str, dict[str, Any]] = {
    "createMessageStream": {"definition": DEFINITION},
    "updateMessageStream": {"definition": DEFINITION | {"maxSize": 1 << 20, "streamSegmentSize": 1 << 20}},
    "deleteMessageStream": {"name": "secret"},
    "describeMessageStream": {"name": "secret"},
    "appendMessage": {"name": "secret", "payload": "YQ=="},
    "appendMessages": {"name": "secret", "payloads": ["YQ=="]},
    "readMessages": {"streamName": "secret"},
    "purgeMessageStream": {"name": "secret"},
    "fetchMessages": {"name": "secret", "consumer": "c"},
    "ackMessages": {"name": "secret", "consumer": "c", "ack": [0]},
    "pauseExports": {"name": "secret"},
    "resumeExports": {"name": "secret"},
    "retryExports": {"name": "secret"},
}
OF_CLIENTS: dict[str, dict[str, Any]] = {
    "listClients": {},
    "disconnectClients": {"client": "c"},
    "forgetClient": {"client": "c"},
}
ASK = AccessRule(publish=["streambridge/%c/+"])


async def ask(client: Client, operation: str, **fields: Any) -> dict[str, Any]:
    client.send(publish(f"streambridge/c/{operation}", json.dumps(fields).encode(), level=client.level))
    reply: dict[str, Any] = json.loads((await client.message()).payload)
    return reply


def test_every_operation_that_names_a_stream_declares_a_right() -> None:
    assert {*REQUESTS, *OF_CLIENTS, "listStreams"} == {*OPERATIONS}
    assert all(OPERATIONS[name].rights for name in REQUESTS)
    assert all(OPERATIONS[name].on for name in OF_CLIENTS)


@bridge_test(acl=[ASK, AccessRule(publish=["streams/mine"], subscribe=["streams/mine"])])
async def test_without_a_right_on_a_stream_nothing_can_be_done_or_learnt(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    before = {name: await ask(client, name, **fields) for name, fields in REQUESTS.items()}
    bridge.stream("secret", "secret/#")
    await bridge.manager.append("secret", b"x")
    after = {name: await ask(client, name, **fields) for name, fields in REQUESTS.items()}
    assert {reply["statusName"] for reply in after.values()} == {"Unauthorized"}
    assert before == after, "whether the stream exists cannot be seen"
    assert (await ask(client, "listStreams"))["streams"] == []
    assert await bridge.payloads("secret") == [b"x"]


@bridge_test(
    acl=[ASK, AccessRule(publish=["streams/mine"], read=["streams/mine", "in/+"], manage=["streams/mine"])]
)
async def test_what_the_rules_list_can_be_done_and_no_more(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    bridge.stream("other")

    async def status(operation: str, **fields: Any) -> str:
        return str((await ask(client, operation, **fields))["statusName"])

    mine = {"name": "mine", "strategyOnFull": 0, "topics": ["in/a"]}
    assert await status("createMessageStream", definition=mine) == "Success"
    assert await status("appendMessage", name="mine", payload="YQ==") == "Success"
    assert await status("readMessages", streamName="mine") == "Success"
    assert (await ask(client, "listStreams"))["streams"] == ["mine"]
    for topics in (["secret/#"], ["#"], ["in/#"], ["streams/other/#"]):
        reply = await ask(client, "updateMessageStream", definition=mine | {"topics": topics})
        assert reply["statusName"] == "Unauthorized", topics
        assert "`read`" in reply["errorMessage"]
    kinesis = {"identifier": "k", "kinesisStreamName": "x", "deadLetterStream": "other"}
    exporting = mine | {"exportDefinition": {"kinesis": [kinesis]}}
    assert await status("updateMessageStream", definition=exporting) == "Unauthorized"
    assert await status("updateMessageStream", definition=mine) == "Success"
    assert await status("purgeMessageStream", name="mine") == "Success"
    assert await status("deleteMessageStream", name="other") == "Unauthorized"
    assert await status("deleteMessageStream", name="mine") == "Success"
    assert bridge.manager.names() == ["other", "s"]


def test_without_rules_a_client_from_elsewhere_manages_no_stream() -> None:
    local, remote = (Identity("c", None, (), local=local) for local in (True, False))
    assert local.may("manage", "s")
    assert not remote.may("manage", "s")
    assert all(remote.may(right, "s") for right in ("publish", "read"))


def test_clients_of_8088_have_the_rights_of_their_user(tmp_path: Path) -> None:
    rules = [
        AccessRule(publish=["streams/open"], read=["streams/open"], manage=["streams/never"]),
        AccessRule(user="greengrass", manage=["streams/made"]),
    ]
    with Server(tmp_path, access=MqttConfig(acl=rules)) as server:
        for name in ("open", "secret"):
            server.stream(name)
            server.append(b"x", name=name)
        with Raw(server) as client:
            made = {"name": "made", "strategyOnFull": 0}
            assert client.ask(2, definition=made)["status"] == 0
            assert client.ask(15, definition=made | {"maxSize": 1 << 30})["status"] == 0
            assert client.ask(3, name="made")["status"] == 0
            assert client.ask(4, name="open", payload=b"y")["status"] == 0
            assert client.ask(5, streamName="open")["status"] == 0
            assert client.ask(11)["streams"] == ["open"]
            for op, fields in (
                (2, {"definition": made | {"name": "other"}}),
                (15, {"definition": made | {"name": "secret"}}),
                (3, {"name": "secret"}),
                (4, {"name": "secret", "payload": b"y"}),
                (5, {"streamName": "secret"}),
                (5, {"streamName": "secret", "readMessagesOptions": {"readTimeoutMillis": 1}}),
                (13, {"name": "secret"}),
            ):
                assert client.ask(op, **fields)["status"] == 2, op
        assert server.newest("secret") == 0


def test_each_token_of_8088_is_its_user_until_a_reload_without_it(tmp_path: Path) -> None:
    tokens, shared = tmp_path / "tokens", tmp_path / "token"
    texts = {"ann": "a" * 16, "bob": "b" * 16, "both": "c" * 16, "shared": "d" * 16}
    tokens.write_text(f"# user token\nann {texts['ann']}\nbob {texts['bob']}\nann {texts['both']}\n")
    tokens.chmod(0o600)
    shared.write_text(texts["shared"])
    rules = [
        AccessRule(user="ann", manage=["streams/a"]),
        AccessRule(user="bob", publish=["streams/a"], operations=["appendMessage"]),
        AccessRule(user="greengrass", read=["streams/a"]),
    ]
    access = MqttConfig(acl=rules)
    with Server(tmp_path, access=access, token_file=shared, tokens_file=tokens, owner=65534) as server:

        def shown(token: str) -> Raw:
            return Raw(server, connect={**CONNECT, "authToken": token})

        def status(client: Raw, op: int, **fields: Any) -> int:
            return int(client.ask(op, **fields)["status"])

        with (
            shown(texts["ann"]) as ann,
            shown(texts["both"]) as also_ann,
            shown(texts["bob"]) as bob,
            shown(texts["shared"]) as other,
        ):
            made = {"name": "a", "strategyOnFull": 0}
            assert (status(bob, 2, definition=made), status(ann, 2, definition=made)) == (2, 0)
            asked = {"name": "a", "payload": b"x"}
            assert [status(client, 4, **asked) for client in (ann, bob, other)] == [2, 0, 2]
            assert [status(client, 5, streamName="a") for client in (ann, bob, other)] == [2, 2, 0]
            assert status(also_ann, 13, name="a") == 0
            with pytest.raises((AssertionError, OSError)), shown("e" * 16):
                pass
            tokens.write_text(f"bob {texts['both']}\nbob {texts['bob']}\n")
            server.run(call(server.front.reload))
            assert status(bob, 4, **asked) == 0
            assert status(other, 5, streamName="a") == 0
            for gone in (ann, also_ann):
                assert gone.socket.recv(1) == b"", "its token is gone, or another user's"
            with shown(texts["both"]) as now_bob:
                assert (status(now_bob, 4, **asked), status(now_bob, 3, name="a")) == (0, 2)
            tokens.chmod(0o644)
            with shown(
                texts["bob"]
            ) as still_bob:  # of a file that is not in order, the last good content holds
                assert status(still_bob, 4, **asked) == 0
            with pytest.raises((AssertionError, OSError)), shown(texts["ann"]):
                pass
            with shown(texts["shared"]):
                pass


WAITS = {"readTimeoutMillis": 3_600_000}
READS = AccessRule(publish=["#"], read=["streams/s"])
READS_NOTHING = AccessRule(publish=["#"])


def test_a_read_of_8088_that_waits_gives_nothing_once_the_right_is_gone(tmp_path: Path) -> None:
    with Server(tmp_path, access=MqttConfig(acl=[READS])) as server, Raw(server) as client:
        server.stream()
        client.send(5, {"requestId": "r", "streamName": "s", "readMessagesOptions": WAITS})
        server.wait_until(lambda: len(server.manager._reads.waiting), "the read waits")
        server.call(server.front._access.load, MqttConfig(acl=[READS_NOTHING]))
        server.call(server.front.reload)
        server.append(b"secret")
        _, reply = client.receive()
        assert (reply["status"], "messages" in reply) == (2, False)


@bridge_test(acl=[READS])
async def test_a_read_over_mqtt_that_waits_gives_nothing_once_the_right_is_gone(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    body = json.dumps({"name": "s", "readMessagesOptions": WAITS}).encode()
    client.send(publish("streambridge/c/readMessages", body, level=client.level))
    await until(lambda: len(bridge.manager._reads.waiting) == 1)
    bridge.front.reload(msgspec.structs.replace(bridge.config, acl=[READS_NOTHING]))
    await bridge.manager.append("s", b"secret")
    reply = json.loads((await client.message()).payload)
    assert (reply["status"], "messages" in reply) == (2, False)


async def call(function: Any) -> None:
    function()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no tokens in it"),
        ("ann", "line 1: not `user token`"),
        ("# x\n\nann short", "line 3: a token has 16 to 256"),
        ("ann aaaaaaaaaaaaaaaa\nbob aaaaaaaaaaaaaaaa", "line 2: a token that another line has"),
    ],
)
def test_a_mistake_in_the_file_of_tokens_is_named_with_its_line_and_without_a_token(
    tmp_path: Path, text: str, why: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=re.escape(why)) as caught:
        read_tokens("greengrass.tokens_file", path)
    assert "aaaa" not in str(caught.value)


def test_a_token_is_needed_by_all_but_root_and_the_services_own_user(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be somebody else")
    file = tmp_path / "token"
    file.write_text("right\n")
    for token_file in (file, None):
        with Server(tmp_path / str(token_file is None), token_file=token_file) as server:
            for token, own, others in (("", 0, 2), ("right", 0, 0), ("wrong", 0, 2)):
                if token_file is None:
                    own, others = 0, 2
                assert _status_of(server.port, token, user=0) == own, token
                assert _status_of(server.port, token, user=65534) == others, token


def _status_of(port: int, token: str, user: int) -> int:
    """The status of a Connect by another user's process."""
    code = """if True:
        import encodings.idna, os, socket, sys
        os.setuid(int(sys.argv[3]))
        with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as peer:
            peer.sendall(bytes.fromhex(sys.argv[2]))
            sys.stdout.buffer.write(peer.recv(4096))"""
    hello = b"\x01" + frame(1, CONNECT | {"authToken": token})
    command = [sys.executable, "-c", code, str(port), hello.hex(), str(user)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=30).stdout
    status: int = cbor2.loads(answer[6:])["status"]
    return status


def test_in_external_mode_operations_are_off_unless_allowed(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), running(tmp_path, **external(broker.port)) as bridge:
            await connected(bridge)
            device = await asyncio.to_thread(Device, broker.port)
            device.client.subscribe("streambridge/c/+/reply")
            body = json.dumps({"name": "s"}).encode()
            await asyncio.to_thread(device.publish, "streambridge/c/deleteMessageStream", body)
            await asyncio.to_thread(device.publish, "in/a", b"after")
            await until(lambda: bridge.manager.describe("s").storage_status.newest_sequence_number == 0)
            assert not device.got
            device.close()

    with Mosquitto(tmp_path / "broker") as broker:
        run_async(main())


def test_in_external_mode_a_reply_goes_nowhere_else_and_the_level_is_the_caller(tmp_path: Path) -> None:
    acl = [AccessRule(publish=["streams/%c"], read=["streams/+"])]

    async def main() -> None:
        settings = external(broker.port, protocol="5", operations=True)
        async with asyncio.timeout(240), running(tmp_path, acl=acl, **settings) as bridge:
            await connected(bridge)
            bridge.stream("c")
            device = await asyncio.to_thread(Device, broker.port, v5=True)
            device.client.subscribe("#")

            async def asked(operation: str, reply_to: str = "", **fields: Any) -> tuple[str, str]:
                from paho.mqtt.packettypes import PacketTypes
                from paho.mqtt.properties import Properties

                properties = Properties(PacketTypes.PUBLISH)
                if reply_to:
                    properties.ResponseTopic = reply_to
                device.got.clear()
                topic, body = f"streambridge/c/{operation}", json.dumps(fields).encode()
                await asyncio.to_thread(device.publish, topic, body, properties=properties)
                await until(lambda: len(device.got) == 2)
                reply = next(message for message in device.got if message.topic != topic)
                return reply.topic, json.loads(reply.payload)["statusName"]

            payload = base64.b64encode(b"x").decode()
            own = "streambridge/c/appendMessage/reply"
            assert await asked("appendMessage", name="c", payload=payload) == (own, "Success")
            assert await asked("appendMessage", name="s", payload=payload) == (own, "Unauthorized")
            below = "streambridge/c/appendMessage/mine"
            assert await asked("appendMessage", below, name="c", payload=payload) == (below, "Success")
            for elsewhere in ("valves/open", "streambridge/c/appendMessages/reply", "streambridge/d/x/reply"):
                told = await asked("appendMessage", elsewhere, name="c", payload=payload)
                assert told == (own, "UnknownFailure"), elsewhere
            assert await bridge.payloads("c") == [b"x", b"x"]
            assert (await asked("deleteMessageStream", name="c"))[1] == "Unauthorized"
            device.close()

    with Mosquitto(tmp_path / "broker") as broker:
        run_async(main())


@bridge_test
async def test_on_the_embedded_broker_a_reply_reaches_only_the_client_that_asked(bridge: Bridge) -> None:
    spy, client = await bridge.connect("spy"), await bridge.connect("c", level=V5)
    await spy.subscribe(("#", 0))
    topic = "streambridge/c/listStreams"
    client.send(publish(topic, b"{}", level=V5, properties={RESPONSE_TOPIC: b"valves/open"}))
    assert (await client.message()).topic == "valves/open"
    assert await spy.silent()
