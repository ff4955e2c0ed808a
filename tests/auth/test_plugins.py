"""Plugins that decide logins and rights: slow, hanging, dying, wrong; the others never notice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bridge.access.users import hash_password
from bridge.auth.settings import AuthSettings
from bridge.auth.supervisor import Auth
from bridge.mqtt.wire.packets import V5
from bridge.plugin import discovery
from tests.cli.conftest import streambridge
from tests.mqtt.harness import (
    Bridge,
    Client,
    Packet,
    connect,
    publish,
    run_async,
    running,
    subscribe,
    until,
)

DIRECTORY = """
import os, time
from pathlib import Path
from bridge import Accepted, AuthOptions, Denied, hookimpl

class Options(AuthOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    control: Path
    greeting: str = ""

def wait(options):
    while (options.control / "hang").exists():
        time.sleep(0.02)

@hookimpl
def authenticate(login, options):
    wait(options)
    if login.user == "crash":
        os._exit(1)
    if login.user == "raise":
        raise RuntimeError("the directory is down")
    if login.user == "nonsense":
        return True
    if login.user == "steal":
        return Accepted(user="ann")
    if login.user.startswith("dir-"):
        return Accepted(user=login.user) if login.password == b"right" else Denied(why="not in the directory")

@hookimpl
def authorize(question, options):
    wait(options)
    with (options.control / "asked").open("a") as file:
        file.write(f"{question.user} {question.action} {question.topic}\\n")
    return "secret" not in question.topic and not (options.control / "withdrawn").exists()
"""
ANN = "ann:" + hash_password(b"a") + "\n"


def with_plugin(
    root: Path,
    test: Callable[[Bridge, Auth], Awaitable[None]],
    source: str = DIRECTORY,
    mqtt: dict[str, Any] = {},  # noqa: B006 - never changed
    **settings: Any,
) -> None:
    """A bridge that asks a plugin; a test controls it by files in `root / "control"`."""
    plugins, control, users = root / "plugins", root / "control", root / "users"
    for directory in (plugins, control):
        directory.mkdir(mode=0o700)
    (plugins / "directory.py").write_text(source)
    (plugins / "directory.py").chmod(0o600)
    users.write_text(ANN)
    users.chmod(0o600)
    registry = discovery.load([plugins])
    options = msgspec.convert(
        {"control": control}, registry.auth_options["directory"], dec_hook=lambda kind, value: kind(value)
    )
    asked = AuthSettings(plugins={"directory": options}, **{"timeout": 30_000, **settings})

    async def main() -> None:
        auth = Auth(asked, [plugins], lambda: registry.with_hook("authorize"))
        settings = {"users_file": users, "allow_anonymous": False, **mqtt}
        async with asyncio.timeout(240), running(root, auth=auth, **settings) as bridge:
            await test(bridge, auth)

    run_async(main())


async def log_in(bridge: Bridge, user: str, password: bytes = b"right", client_id: str = "") -> int:
    """The return code of a CONNECT; it waits for the auth process to be there."""
    client = await bridge.open()
    client.send(connect(client_id or user, user=user, password=password))
    code = (await client.receive()).body[1]
    client.abort()
    return code


async def ready(bridge: Bridge) -> None:
    """Wait until the plugin answers."""
    for _ in range(100):
        if await log_in(bridge, "dir-ready") == 0:
            return
    raise AssertionError("the plugin never answers")


async def publish_while(bridge: Bridge, device: Client, others: Awaitable[Any]) -> int:
    """Publish at QoS 1, and count the acknowledgements that come while others are under way."""
    task, count = asyncio.ensure_future(others), 0
    while not task.done() or not count:
        await device.exchange(publish("in/a", b"x", 1, count % 65_000 + 1))
        count += 1
    await task
    return count


def test_users_of_the_plugin_come_in_and_those_of_the_file_are_not_its_business(tmp_path: Path) -> None:
    async def test(bridge: Bridge, auth: Auth) -> None:
        await ready(bridge)
        assert await log_in(bridge, "dir-7", b"wrong") == 4
        assert await log_in(bridge, "stranger") == 4
        assert await log_in(bridge, "ann", b"a") == 0
        assert await log_in(bridge, "steal") == 5, "a plugin's user has no name from the file"
        assert await log_in(bridge, "raise") == 3
        assert await log_in(bridge, "nonsense") == 3
        anonymous = await bridge.open()
        await anonymous.connect("nobody", expect=5)

    with_plugin(tmp_path, test)


def test_a_hanging_directory_refuses_in_time_and_acknowledgements_go_on(tmp_path: Path) -> None:
    async def test(bridge: Bridge, auth: Auth) -> None:
        await ready(bridge)
        device = await bridge.connect("device", user="ann", password=b"a")
        await device.exchange(publish("in/a", b"x", 1, 1))  # it is asked about this topic
        (tmp_path / "control" / "hang").touch()
        patient = auth.settings
        auth.reload(msgspec.structs.replace(patient, timeout=1_000))
        logins = [log_in(bridge, f"dir-{number}") for number in range(40)]
        codes: list[int] = []

        async def all_logins() -> None:
            codes.extend(await asyncio.gather(*logins))

        acknowledged = await publish_while(bridge, device, all_logins())
        assert codes == [3] * 40
        assert acknowledged > 100, "it was never waiting for the directory"
        (tmp_path / "control" / "hang").unlink()
        auth.reload(patient)
        await ready(bridge)
        assert len(await bridge.payloads()) == acknowledged + 1

    with_plugin(tmp_path, test)


def test_more_logins_than_may_wait_are_refused_at_once(tmp_path: Path) -> None:
    async def test(bridge: Bridge, auth: Auth) -> None:
        await ready(bridge)
        (tmp_path / "control" / "hang").touch()
        waiting = [asyncio.ensure_future(log_in(bridge, f"dir-{number}")) for number in range(5)]
        await until(lambda: auth.waiting == 5)
        assert await log_in(bridge, "dir-late") == 3
        assert not any(one.done() for one in waiting)
        (tmp_path / "control" / "hang").unlink()
        assert await asyncio.gather(*waiting) == [0] * 5

    with_plugin(tmp_path, test, timeout=30_000, pending=5)


def test_a_killed_or_crashed_process_is_back_and_nobody_else_notices(tmp_path: Path) -> None:
    async def test(bridge: Bridge, auth: Auth) -> None:
        await ready(bridge)
        device = await bridge.connect("device", user="dir-device", password=b"right")
        await device.exchange(publish("in/a", b"x", 1, 1))
        for kill in (lambda: os.kill(auth.pid or 0, signal.SIGKILL), None):
            before = auth.pid
            if kill is not None:
                kill()
            else:
                assert await log_in(bridge, "crash") == 3

            async def back(before: int | None = before) -> None:
                await until(lambda: auth.pid not in (None, before))
                await ready(bridge)

            assert await publish_while(bridge, device, back()) > 0
        assert auth.restarts == 2

    with_plugin(tmp_path, test, timeout=30_000)


def test_a_process_that_answers_nothing_is_replaced(tmp_path: Path) -> None:
    async def test(bridge: Bridge, auth: Auth) -> None:
        await ready(bridge)
        before = auth.pid
        (tmp_path / "control" / "hang").touch()
        while auth.pid == before:
            await log_in(bridge, "dir-1")
        (tmp_path / "control" / "hang").unlink()
        await ready(bridge)

    with_plugin(tmp_path, test, timeout=300)


def test_topics_are_asked_about_once_and_what_is_refused_is_refused(tmp_path: Path) -> None:
    async def test(bridge: Bridge, auth: Auth) -> None:
        await ready(bridge)
        client = await bridge.connect("c", user="ann", password=b"a", level=V5)
        for number in range(1, 51):
            await client.exchange(publish("in/a", b"x", 1, number, level=V5))
        denied = await client.exchange(publish("in/secret", b"x", 1, 60, level=V5))
        assert denied.body[2] == 0x87
        client.send(publish("in/b", b"1", 1, 61, level=V5) + publish("in/b", b"2", 1, 62, level=V5))
        assert [(await client.receive()).body[:2] for _ in range(2)] == [b"\0=", b"\0>"], "in their order"
        assert await client.subscribe(("in/#", 1), ("secret/#", 1)) == b"\x01\x87"
        asked = (tmp_path / "control" / "asked").read_text().splitlines()
        assert asked == [
            "ann publish in/a",
            "ann publish in/secret",
            "ann publish in/b",
            "ann subscribe in/#",
            "ann subscribe secret/#",
        ]
        assert len(await bridge.payloads()) == 52
        will = await bridge.open()
        await will.connect("w", user="ann", password=b"a", will=("in/secret", b"x", 1), expect=5)

    with_plugin(tmp_path, test)


def test_a_wrong_subscription_that_a_plugin_is_asked_about_closes_its_connection(tmp_path: Path) -> None:
    async def test(bridge: Bridge, auth: Auth) -> None:
        await ready(bridge)
        client = await bridge.connect("c", user="ann", password=b"a", level=V5)
        client.send(subscribe(1, ("$share/g/in/#", 4 | 1), level=V5))  # No Local
        assert await client.receive() == Packet(0xE0, b"\x82\0")
        client = await bridge.connect("c", user="ann", password=b"a")
        client.send(subscribe(1, ("in/#/a", 1)))
        with pytest.raises(ConnectionError):
            await client.receive()

    with_plugin(tmp_path, test)


def test_without_an_answer_a_topic_is_refused_and_asked_about_again_later(tmp_path: Path) -> None:
    async def test(bridge: Bridge, auth: Auth) -> None:
        await ready(bridge)
        client = await bridge.connect("c", user="ann", password=b"a", level=V5)
        other = await bridge.connect("d", user="ann", password=b"a", level=V5)
        await other.exchange(publish("in/d", b"x", 1, 1, level=V5))
        auth.reload(msgspec.structs.replace(auth.settings, timeout=500))
        await ready(bridge)

        async def refused(topic: str) -> None:
            packet = await client.exchange(publish(topic, b"x", 1, 1, level=V5))
            assert packet.body[2] == 0x87

        for number in range(5):  # on a machine that stands still, the moment may be over
            topic, tried = f"in/a{number}", 1
            (tmp_path / "control" / "hang").touch()
            assert await publish_while_v5(other, refused(topic)) > 10, "others are read meanwhile"
            (tmp_path / "control" / "hang").unlink()
            while (
                len((await client.exchange(publish(topic, b"x", 1, tried % 60_000 + 1, level=V5))).body) > 2
            ):
                tried += 1
            if tried > 1:
                break
        assert tried > 1, "the refusal holds for a moment"

    with_plugin(tmp_path, test)


def test_a_right_that_a_plugin_withdraws_is_gone_once_its_decision_is_too_old(tmp_path: Path) -> None:
    """As often as it changes its mind, and also for a client that never pauses."""

    async def test(bridge: Bridge, auth: Auth) -> None:
        await ready(bridge)
        client = await bridge.connect("c", user="ann", password=b"a", level=V5)

        async def becomes(allowed: bool) -> None:
            end = asyncio.get_running_loop().time() + 30
            for topic in ("in/a", "nobody/stores/this"):
                while True:
                    answer = await client.exchange(publish(topic, b"x", 1, 1, level=V5))
                    if (answer.body[2:3] != b"\x87") == allowed:
                        break
                    assert asyncio.get_running_loop().time() < end, (topic, allowed)

        for _ in range(2):
            await becomes(True)
            (tmp_path / "control" / "withdrawn").touch()
            await becomes(False)
            (tmp_path / "control" / "withdrawn").unlink()
        await becomes(True)

    with_plugin(tmp_path, test, decisions=200)


def test_nothing_is_acknowledged_because_a_plugin_has_not_answered(tmp_path: Path) -> None:
    """It may be allowed a moment later, so it is neither kept elsewhere nor dropped."""

    async def test(bridge: Bridge, auth: Auth) -> None:
        bridge.stream("refused")
        await ready(bridge)
        client = await bridge.connect("c", user="ann", password=b"a")
        for number, topic in enumerate(("in/secret", "secret"), 1):
            assert await client.exchange(publish(topic, b"x", 1, number)) == Packet(0x40, bytes((0, number)))
        assert bridge.stat("kept_not_allowed") == 2, "what the plugin refuses is refused for good"
        auth.reload(msgspec.structs.replace(auth.settings, timeout=300))
        await ready(bridge)
        for topic in ("in/new", "new"):
            other = await bridge.connect(topic, user="ann", password=b"a")
            (tmp_path / "control" / "hang").touch()
            other.send(publish(topic, b"x", 1, 1))
            assert await other.closed()
            (tmp_path / "control" / "hang").unlink()
            await ready(bridge)
        assert bridge.stat("kept_not_allowed") == 2
        assert bridge.stat("acknowledged_forbidden") == 0
        assert bridge.stat("rejected_not_allowed") == 2

    with_plugin(tmp_path, test, mqtt={"refused_stream": "refused", "forbidden": "acknowledge"})


async def publish_while_v5(device: Client, others: Awaitable[Any]) -> int:
    task, count = asyncio.ensure_future(others), 0
    while not task.done():
        await device.exchange(publish("in/d", b"x", 1, count % 65_000 + 1, level=V5))
        count += 1
    await task
    return count


def test_other_options_apply_on_reload_and_without_the_plugin_its_clients_go(tmp_path: Path) -> None:
    async def test(bridge: Bridge, auth: Auth) -> None:
        await ready(bridge)
        client = await bridge.connect("c", user="dir-1", password=b"right")
        ann = await bridge.connect("a", user="ann", password=b"a")
        options = msgspec.structs.replace(auth.settings.plugins["directory"], greeting="hello")
        auth.reload(msgspec.structs.replace(auth.settings, plugins={"directory": options}))
        bridge.front.reload(bridge.config)
        await ready(bridge)
        assert await client.alive()
        auth.reload(AuthSettings())
        bridge.front.reload(bridge.config)
        assert await client.closed()
        assert await ann.alive()
        await until(lambda: auth.pid is None)
        assert await log_in(bridge, "dir-1") == 4

    with_plugin(tmp_path, test)


def test_mistakes_in_the_section_are_reported_with_line_and_remedy(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir(mode=0o700)
    (plugins / "directory.py").write_text(DIRECTORY)
    (plugins / "directory.py").chmod(0o600)
    config = tmp_path / "c.toml"
    config.write_text(
        '[gateway]\ndata_dir = "d"\n[export]\nplugin_dirs = ["plugins"]\n[auth]\ntimeout = "1h"\n'
        '[auth.plugins.directroy]\n[auth.plugins.directory]\nhost = "x"\n'
        '[auth.plugins.jwt]\njwks_file = "none.json"\nissuer = ""\naudience = "a"\nalgorithms = ["none"]\n'
    )
    result = streambridge("check", "-c", config)
    text = result.stdout + result.stderr
    for wanted in ("c.toml:6", "c.toml:7", "directroy", "control", "c.toml:12", "`none`", "c.toml:14"):
        assert wanted.replace("`", "") in text, text


def test_a_stop_right_after_reloads_leaves_no_process_behind(tmp_path: Path) -> None:
    async def test(bridge: Bridge, auth: Auth) -> None:
        await ready(bridge)
        first = auth.pid or 0
        for greeting in ("a", "b", "c"):
            options = msgspec.structs.replace(auth.settings.plugins["directory"], greeting=greeting)
            auth.reload(msgspec.structs.replace(auth.settings, plugins={"directory": options}))
        await auth.stop()
        assert auth.pid is None
        assert not Path(f"/proc/{first}").exists()

    with_plugin(tmp_path, test)
