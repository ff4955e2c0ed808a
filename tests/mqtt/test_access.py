"""Who may come in and what they may do: users, certificates, rules; all of it closed when in doubt."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.testbed.certificates import Authority
from bridge.access.guesses import FIRST_DELAY
from bridge.access.rules import AccessRule, Identity
from bridge.access.users import hash_password, read_users
from bridge.errors import ConfigError
from bridge.mqtt.settings import Limits, MqttConfig, TlsSettings
from bridge.mqtt.wire.packets import V5

from .harness import (
    PLAIN,
    Bridge,
    Client,
    Packet,
    bridge_test,
    connect,
    publish,
    run_async,
    running,
    subscribe,
    tool,
    until,
)

BOB = "bob:" + hash_password(b"builder")


def with_bridge(root: Path, test: Any, **settings: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), running(root, **settings) as bridge:
            await test(bridge)

    run_async(main())


def users(root: Path, text: str) -> Path:
    path = root / "users"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_password_of_mosquitto_passwd_is_accepted_and_a_wrong_one_is_slow(tmp_path: Path) -> None:
    path = users(tmp_path, BOB + "\n")
    subprocess.run([tool("mosquitto_passwd"), "-b", path, "ann", "secret"], check=True, capture_output=True)

    async def test(bridge: Bridge) -> None:
        known = [await bridge.connect("a", user="ann", password=b"secret")]
        known.append(await bridge.connect("b", user="bob", password=b"builder"))
        took = []
        for user, password in (("bob", b"wrong"), ("nobody", b"x"), ("ann", None)):
            began = time.monotonic()
            client = await bridge.open()
            await client.connect("c", user=user, password=password, expect=4)
            assert await client.closed()
            took.append(time.monotonic() - began)
        assert took[0] >= FIRST_DELAY
        assert took[2] >= 4 * FIRST_DELAY, "later each time"
        anonymous = await bridge.open()
        await anonymous.connect("d", expect=5)
        assert bridge.stat("refused_connects") == 4
        assert bridge.stat("sessions") == len(known) == 2

    with_bridge(tmp_path, test, users_file=path, allow_anonymous=False)


def test_guessing_passwords_in_parallel_is_no_faster_and_holds_nobody_up(tmp_path: Path) -> None:
    path = users(tmp_path, BOB)

    async def test(bridge: Bridge) -> None:
        good = await bridge.connect("good", user="bob", password=b"builder")
        clients = [await bridge.open() for _ in range(40)]
        for number, client in enumerate(clients):
            client.send(connect(f"c{number}", user="bob", password=b"guess"))
        busy = [client for client in clients[16:] if (await client.receive()).body == b"\0\3"]
        assert len(busy) >= 20, "but for those that come in when one of the first 16 has been answered"
        again = await bridge.connect("again", user="bob", password=b"builder")
        assert await good.alive()
        assert await again.alive()

    with_bridge(tmp_path, test, users_file=path)


def test_a_refused_connect_with_a_foreign_client_id_disturbs_nobody(tmp_path: Path) -> None:
    path = users(tmp_path, BOB + "\nann:" + hash_password(b"a") + "\n")

    async def test(bridge: Bridge) -> None:
        victim = await bridge.connect("victim", clean=False, user="bob", password=b"builder")
        await victim.subscribe(("t/#", 1))
        for options in ({"user": "bob", "password": b"no"}, {}, {"user": "ann", "password": b"a"}):
            for clean in (True, False):
                thief = await bridge.open()
                expect = 4 if options.get("password") == b"no" else 5
                await thief.connect("victim", clean=clean, expect=expect, **options)
        publisher = await bridge.connect("p", user="bob", password=b"builder")
        await publisher.exchange(publish("t/1", b"hi", 1, 1))
        assert (await victim.message()).payload == b"hi"
        victim.abort()
        await until(lambda: bridge.stat("connections") == 1)
        thief = await bridge.open()
        await thief.connect("victim", clean=False, user="ann", password=b"a", expect=5)
        victim = await bridge.open()
        assert (await victim.connect("victim", clean=False, user="bob", password=b"builder")).body == b"\1\0"

    with_bridge(tmp_path, test, users_file=path, allow_anonymous=False)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no users"),
        ("# only a comment\n", "no users"),
        ("bob\n", "line 1"),
        ("bob:plain\n", "line 1"),
        ("bob:$7$0$YQ==$YQ==\n", "iterations"),
        ("bob:$7$101$YQ=$YQ==\n", "base64"),
        (f"{BOB}\n{BOB}\n", "line 2"),
    ],
)
def test_a_users_file_with_a_mistake_lets_nobody_in(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_users(users(tmp_path, text))


def test_a_users_file_that_is_missing_or_open_to_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_users(tmp_path / "nothing")
    path = users(tmp_path, BOB)
    for mode in (0o666, 0o606, 0o620):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod"):
            read_users(path)
    path.chmod(0o640)
    assert list(read_users(path)) == ["bob"]


def test_of_a_broken_users_file_the_last_good_content_holds(tmp_path: Path) -> None:
    path = users(tmp_path, BOB)

    async def test(bridge: Bridge) -> None:
        path.write_text("")
        bridge.front.reload(bridge.config)
        bob = await bridge.connect("a", user="bob", password=b"builder")
        anonymous = await bridge.connect("anonymous")
        path.write_text("ann:" + hash_password(b"a"))
        bridge.front.reload(bridge.config)
        assert await bob.closed()
        assert await anonymous.alive()
        await bridge.connect("b", user="ann", password=b"a")
        client = await bridge.open()
        await client.connect("c", user="bob", password=b"builder", expect=4)

    with_bridge(tmp_path, test, users_file=path)


@bridge_test
async def test_anonymous_clients_are_welcome_on_loopback_and_their_user_name_means_nothing(
    bridge: Bridge,
) -> None:
    client = await bridge.connect("a", user="admin", password=b"x")
    session = bridge.broker.sessions.get("a")
    assert session is not None
    assert session.identity.user is None
    assert await client.alive()


@bridge_test(listen=["tcp://0.0.0.0:0"], allow_anonymous=True)
async def test_anonymous_clients_are_welcome_elsewhere_only_if_allowed(bridge: Bridge) -> None:
    await bridge.connect("a")
    bridge.broker.accesses.first.load(MqttConfig())
    client = await bridge.open()
    await client.connect("b", expect=5)


def test_a_listener_that_nobody_could_log_in_at_is_a_mistake() -> None:
    def mistakes(url: str, *, plugin: bool = False) -> list[str]:
        return list(MqttConfig(listen=[url]).listeners()[0].mistakes(plugin=plugin))

    (closed,) = mistakes("tcp://0.0.0.0:1883")
    assert "nobody could log in" in closed
    assert mistakes("tcp://0.0.0.0:1883", plugin=True) == mistakes("tcp://127.0.0.1:1883") == []
    (bare,) = mistakes("wss://127.0.0.1:8443")
    assert "[mqtt.tls]" in bare


RULES = [
    AccessRule(publish=["in/%c/#", "plain/+"], subscribe=["open/#", "own/%u"]),
    AccessRule(user="ann", publish=["ann/#"], subscribe=["#"], read=["open/#", "ann/#"]),
]


@bridge_test(acl=RULES)
async def test_a_publish_that_is_not_allowed_is_refused(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    assert await client.exchange(publish("in/c/x", b"", 1, 1)) == Packet(0x40, b"\0\1")
    client.send(publish("in/other/x", b"no", 0), publish("ann/x", b"no", 0))
    assert await client.alive(), "QoS 0 is dropped"
    client.send(
        publish("plain/x", b"", 1, 2), publish("in/other/x", b"", 1, 3), publish("plain/x", b"", 1, 4)
    )
    assert await client.receive() == Packet(0x40, b"\0\2")
    assert await client.closed()
    assert [message.topic for message in await bridge.stored()] == [b"in/c/x"]
    assert (bridge.stat("dropped_not_allowed"), bridge.stat("rejected_not_allowed")) == (2, 1)
    will = await bridge.open()
    await will.connect("w", will=("in/other/w", b"", 0), expect=5)
    modern = await bridge.connect("m", level=V5, properties=PLAIN)
    answer = await modern.exchange(publish("in/other/x", b"", 1, 9, level=V5))
    assert answer == Packet(0x40, b"\0\x09\x87")
    answer = await modern.exchange(publish("in/other/x", b"", 2, 9, level=V5))
    assert answer == Packet(0x50, b"\0\x09\x87")


@bridge_test(acl=RULES)
async def test_a_subscription_wider_than_the_rules_is_refused(bridge: Bridge) -> None:
    client = await bridge.connect("c")
    codes = await client.subscribe(
        ("open/a", 1), ("open/#", 0), ("#", 0), ("+/a", 0), ("own/+", 0), ("own/", 0)
    )
    assert codes == b"\1\0\x80\x80\x80\x80"


def test_messages_are_checked_when_they_are_delivered_retained_and_queued(tmp_path: Path) -> None:
    path = users(tmp_path, "ann:" + hash_password(b"a") + "\nbob:" + hash_password(b"b"))
    rules = [*RULES, AccessRule(user="bob", publish=["#"])]

    async def test(bridge: Bridge) -> None:
        bob = await bridge.connect("bob", user="bob", password=b"b")
        for topic in ("open/r", "secret/r"):
            await bob.exchange(publish(topic, b"retained", 1, 1, retain=True))
        ann = await bridge.connect("ann", clean=False, user="ann", password=b"a")
        await ann.subscribe(("#", 1))
        assert (await ann.message()).topic == "open/r"
        for topic in ("secret/live", "open/live", "secret/live", "ann/live"):
            await bob.exchange(publish(topic, b"", 1, 1))
            bob.send(publish(topic, b""))
        got = [(await ann.message()).topic for _ in range(4)]
        assert sorted(got) == ["ann/live", "ann/live", "open/live", "open/live"]
        ann.abort()
        await until(lambda: bridge.stat("connections") == 1)
        await bob.exchange(publish("secret/away", b"", 1, 1))
        await bob.exchange(publish("open/away", b"", 1, 1))
        ann = await bridge.connect("ann", clean=False, user="ann", password=b"a")
        assert (await ann.message()).topic == "open/away"
        assert await ann.silent()

    with_bridge(tmp_path, test, users_file=path, acl=rules, allow_anonymous=False)


def test_a_name_that_is_a_wildcard_gets_nothing_from_a_placeholder() -> None:
    for name in ("#", "+", "a/b", "+/x"):
        assert not Identity(name, None, RULES).may_publish("in/victim/x")
        assert not Identity("c", name, RULES).may_subscribe("own/victim")
    assert Identity("c", "dora", RULES).may_subscribe("own/dora")
    assert not Identity("c", "%c", RULES).may_subscribe("own/c")


async def open_tls(bridge: Bridge, authority: Authority, pair: Any = None, listener: int = 0) -> Client:
    context = ssl.create_default_context(cafile=str(authority.cert))
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return await bridge.open(listener, context)


def test_tls_listeners_serve_and_take_a_new_certificate_on_reload(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    pair = authority.issue("server")

    def serial(client: Client) -> str:
        return str(client.writer.get_extra_info("peercert")["serialNumber"])

    async def test(bridge: Bridge) -> None:
        client = await open_tls(bridge, authority)
        await client.connect("a")
        assert await client.exchange(publish("in/a", b"x" * 100_000, 1, 1)) == Packet(0x40, b"\0\1")
        authority.issue("server")
        bridge.front.reload(bridge.config)
        renewed = await open_tls(bridge, authority)
        await renewed.connect("b")
        assert serial(client) != serial(renewed)
        assert await client.alive()
        pair.cert.write_text("rubbish")
        bridge.front.reload(bridge.config)
        assert serial(await open_tls(bridge, authority)) == serial(renewed)
        for open_client in (client, renewed):
            open_client.disconnect()

    with_bridge(tmp_path, test, listen=["tls://127.0.0.1:0"], tls=TlsSettings(cert=pair.cert, key=pair.key))


def test_the_name_in_a_client_certificate_is_the_user(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "ca"), Authority(tmp_path / "other", "other-ca")
    server, device, forged = authority.issue("server"), authority.issue("dev-1"), stranger.issue("dev-1")
    tls = TlsSettings(cert=server.cert, key=server.key, client_ca=authority.cert)

    async def test(bridge: Bridge) -> None:
        client = await open_tls(bridge, authority, device)
        await client.connect("c")
        assert await client.exchange(publish("by/dev-1", b"", 1, 1)) == Packet(0x40, b"\0\1")
        client.send(publish("by/dev-2", b"", 1, 2))
        assert await client.closed()
        other = await open_tls(bridge, authority, device)
        await other.connect("c", user="dev-2", expect=5)
        for pair in (None, forged):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                intruder = await open_tls(bridge, authority, pair)
                await intruder.connect("c")

    rules = [AccessRule(publish=["by/%u"])]
    with_bridge(tmp_path, test, listen=["tls://127.0.0.1:0"], tls=tls, acl=rules)


def test_a_listener_that_asks_for_certificates_or_no_longer_does_ends_its_connections(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    server, device = authority.issue("server"), authority.issue("dev-1")
    plain = TlsSettings(cert=server.cert, key=server.key)
    named = msgspec.structs.replace(plain, client_ca=authority.cert)

    async def test(bridge: Bridge) -> None:
        guest = await open_tls(bridge, authority)
        await guest.connect("guest", level=V5)
        asking = msgspec.structs.replace(bridge.config, tls=named)
        bridge.front.reload(asking)
        assert (await guest.receive()) == Packet(0xE0, b"\x98\0")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await (await open_tls(bridge, authority)).connect("c")
        known = await open_tls(bridge, authority, device)
        await known.connect("c", level=V5)
        bridge.front.reload(msgspec.structs.replace(asking, acl=[AccessRule(user="dev-1")]))
        assert await known.alive()
        bridge.front.reload(bridge.config)
        assert (await known.receive()) == Packet(0xE0, b"\x98\0")
        await (await open_tls(bridge, authority)).connect("guest")

    tls = {"tls": plain, "allow_anonymous": True}
    with_bridge(tmp_path, test, listen=["tls://127.0.0.1:0"], **tls)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="topic filter"):
        AccessRule(publish=["a/#/b"])
    for url in ("mqtt://x", "tcp://", "tcp://h:99999", "tcp://h/path"):
        with pytest.raises(ValueError, match="listen"):
            MqttConfig(listen=[url], allow_anonymous=True)
    assert Limits().connections == 10_000
    assert subscribe(1, ("a", 0))


def test_a_refused_subscription_is_told_from_time_to_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bridge: Bridge) -> None:
        client = await bridge.connect("c")
        for _ in range(3):
            assert await client.subscribe(("secret/#", 1)) == b"\x80"
        assert await client.subscribe(("open/a", 1), ("open/b", 1), ("open/c", 1)) == b"\1\1\x80"
        assert bridge.stat("refused_subscriptions") == 4

    with_bridge(tmp_path, test, acl=RULES, subscriptions=2)
    denied, one_too_many = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "client 'c' (anonymous) at 127.0.0.1: subscription to 'secret/#' refused" in denied
    assert "it may not subscribe there; see [[mqtt.acl]]" in denied
    assert "subscription to 'open/c' refused: it has 2 already; see [mqtt.limits]" in one_too_many


def test_a_refusal_names_the_user_that_the_rules_are_written_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = users(tmp_path, "ann:" + hash_password(b"a"))

    async def test(bridge: Bridge) -> None:
        for number, options in enumerate(({"user": "ann", "password": b"a"}, {})):
            client = await bridge.connect(f"c{number}", **options)
            client.send(publish("in/other/x", b"no", 1, 1))
            assert await client.closed()
            client = await bridge.open()
            await client.connect("w", will=("in/other/w", b"", 0), expect=5, **options)

    caplog.set_level("INFO")
    with_bridge(tmp_path, test, users_file=path, acl=RULES)
    why = "not acknowledged: it may not publish on 'in/other/x'; see [[mqtt.acl]]"
    assert f"client 'c0' (user 'ann') at 127.0.0.1 closed: {why}" in caplog.text
    assert f"client 'c1' (anonymous) at 127.0.0.1 closed: {why}" in caplog.text
    assert "client 'w' (user 'ann') may not publish its will on 'in/other/w'; see [[mqtt.acl]]" in caplog.text


def test_without_a_user_name_the_rules_for_everybody_and_for_anonymous_clients_hold(tmp_path: Path) -> None:
    path = users(tmp_path, BOB)
    rules = [AccessRule(user="*", publish=["all/#", "by/%u"]), AccessRule(user="", publish=["guests/#"])]

    async def test(bridge: Bridge) -> None:
        bob = {"user": "bob", "password": b"builder", "level": V5}
        for options, may in (
            ({"level": V5}, {"all/x": True, "guests/x": True, "by/": False}),
            (bob, {"all/x": True, "guests/x": False, "by/bob": True}),
        ):
            client = await bridge.connect("c", **options)
            for number, (topic, allowed) in enumerate(may.items(), 1):
                answer = await client.exchange(publish(topic, b"x", 1, number, level=V5))
                assert (answer.body[2:] in (b"", b"\0", b"\x10")) is allowed, topic
            client.disconnect()
            await until(lambda: not bridge.stat("connections"))

    with_bridge(tmp_path, test, users_file=path, acl=rules)
