"""Attacks on logins that plugins decide: guesses, floods of made-up names, plugins that answer nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from bridge.access.guesses import AT_A_TIME, LONGEST_DELAY
from bridge.auth.supervisor import Auth
from tests.auth.test_plugins import log_in, ready, with_plugin
from tests.mqtt.harness import Bridge, connect, publish, until
from tests.mqtt.test_login_floods import open_from

NONSENSE = """
import os
from pathlib import Path
from bridge import Accepted, AuthOptions, Denied, hookimpl

class Options(AuthOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    control: Path

ANSWERS = {
    "number": lambda: Accepted(user=7),
    "nobody": lambda: Accepted(user=None),
    "late": lambda: Accepted(user="dir-late", expires="tomorrow"),
    "surrogate": lambda: Accepted(user="\\ud800"),
    "object": lambda: Denied(why=object()),
    "exit": lambda: exit(),
}

@hookimpl
def authenticate(login, options):
    if login.user in ANSWERS:
        return ANSWERS[login.user]()
    return Accepted(user=login.user)
"""
SLOW = """
import time
from pathlib import Path
from bridge import Accepted, AuthOptions, Denied, hookimpl

class Options(AuthOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    control: Path

@hookimpl
def authenticate(login, options):
    with (options.control / "asked").open("a") as file:
        file.write(f"{login.user}\\n")
    if login.password == b"right":
        return Accepted(user=login.user)
    time.sleep(0.02)
    return Denied(why="not in the directory")
"""

SLOW_RIGHTS = """
import time
from pathlib import Path
from bridge import Accepted, AuthOptions, hookimpl

class Options(AuthOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    control: Path

@hookimpl
def authenticate(login, options):
    return Accepted(user=login.user)

@hookimpl
def authorize(question, options):
    with (options.control / "asked").open("a") as file:
        file.write(f"{question.user}\\n")
    time.sleep(0.01)
    return True
"""


def test_no_answer_of_a_plugin_stops_the_logins_of_others(tmp_path: Path) -> None:
    async def test(bridge: Bridge, auth: Auth) -> None:
        await ready(bridge)
        for _ in range(2):
            for user in ("number", "nobody", "late", "surrogate", "object", "exit"):
                assert await log_in(bridge, user) in (3, 4), user
                assert await log_in(bridge, "dir-7") == 0, f"after {user}"
        assert auth.restarts == 0

    with_plugin(tmp_path, test, NONSENSE, timeout=10_000)


def test_who_hangs_up_guesses_no_faster_at_a_directory(tmp_path: Path) -> None:
    asked = tmp_path / "control" / "asked"

    async def test(bridge: Bridge, auth: Auth) -> None:
        await ready(bridge)

        async def guess() -> None:
            """Without an answer in this time it was wrong: only good logins are answered so soon."""
            client = await bridge.open()
            client.send(connect("g", user="ann-2", password=b"guess"))
            with contextlib.suppress(TimeoutError, ConnectionError):
                await client.receive(0.2)
            client.abort()

        began = time.monotonic()
        for _ in range(15):
            await asyncio.gather(*(guess() for _ in range(16)))
        took = time.monotonic() - began
        guesses = asked.read_text().splitlines().count("ann-2")
        allowed = 40 + AT_A_TIME * took / LONGEST_DELAY
        assert guesses <= allowed, "so many at a time, until each one's answer would have been sent"

    with_plugin(tmp_path, test, SLOW, timeout=10_000)


def test_a_stop_refuses_the_logins_that_wait_for_a_turn(tmp_path: Path) -> None:
    async def test(bridge: Bridge, auth: Auth) -> None:
        await ready(bridge)
        clients = [await bridge.open() for _ in range(30)]
        for number, client in enumerate(clients):
            client.send(connect(f"f{number}", user=f"made-up-{number}", password=b"guess"))
        await until(lambda: auth.waiting > auth.settings.threads)  # some have no turn yet
        await auth.stop()
        await until(lambda: not auth.waiting)

    with_plugin(tmp_path, test, SLOW.replace("0.02", "200"), timeout=100_000)


def test_made_up_names_of_one_address_keep_nobody_else_from_the_directory(tmp_path: Path) -> None:
    async def test(bridge: Bridge, auth: Auth) -> None:
        await ready(bridge)  # 127.0.0.1 has logged in before
        flood = []
        for number in range(300):
            client = await open_from(bridge, "127.0.0.2")
            client.send(connect(f"f{number}", user=f"made-up-{number}", password=b"guess"))
            flood.append(client)
        asked = tmp_path / "control" / "asked"
        await until(lambda: len(asked.read_text().splitlines()) > 2)
        before = len(asked.read_text().splitlines())
        codes = await asyncio.gather(*(log_in(bridge, f"dir-{number}") for number in range(10)))
        assert codes == [0] * 10
        assert len(asked.read_text().splitlines()) - before < 100, "200 names wait before them"
        for client in flood:
            client.abort()

    with_plugin(tmp_path, test, SLOW, timeout=30_000, pending=200)


def test_who_asks_about_ever_new_topics_delays_neither_logins_nor_other_users(tmp_path: Path) -> None:
    asked = tmp_path / "control" / "asked"
    topics = 40  # of each connection, which asks about one after the other

    def questions() -> int:
        """How many the plugin was asked so far."""
        return asked.read_text().count("eve")

    async def test(bridge: Bridge, auth: Auth) -> None:
        await ready(bridge)
        other = await bridge.connect("other", user="other")
        flood = [await bridge.connect(f"e{number}", user="eve") for number in range(100)]
        for number, client in enumerate(flood):
            client.send(b"".join(publish(f"in/{number}/{topic}", b"") for topic in range(topics)))
        await until(lambda: asked.exists() and questions() > 10)
        before = questions()
        for number in range(10):
            assert await log_in(bridge, f"dir-{number}") == 0
            await other.exchange(publish(f"in/other/{number}", b"", 1, 1))
        # Each waits for the topics that have a turn; without turns it would wait for one of each connection.
        assert questions() - before < 10 * len(flood) / 2
        assert questions() < len(flood) * topics, "they ask all the time"
        for client in flood:
            client.abort()

    with_plugin(tmp_path, test, SLOW_RIGHTS, pending=100)
