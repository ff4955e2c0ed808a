"""What changes while a client logs in, over MQTT and over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.access.accounts import Account

from .house import House, rule, waits_test
from .scheduler import Scheduler

Change = Callable[[House], None]
HASH = "bridge/access/logins.py Access._is_right: await asyncio.shield"
MAPPED = [Account(name="ann", certificates=["cn:device-1"])]


def replaced(house: House) -> None:
    house.set_users(ann=b"other")
    house.reload()


def deleted(house: House) -> None:
    house.set_users(ann=None)
    house.reload()


def mapped(house: House) -> None:
    house.reload(user=MAPPED)


@pytest.mark.parametrize("change", [replaced, deleted, mapped])
def test_a_password_that_is_taken_away_while_it_is_hashed_lets_nobody_in(
    tmp_path: Path, change: Change
) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        client = await house.open()
        scheduler.at(HASH, lambda: change(house))
        await client.connect("c", user="ann", password=b"a", expect=4)
        assert house.broker.sessions.get("c") is None

    waits_test(test, tmp_path)


@pytest.mark.parametrize("change", [replaced, deleted, mapped])
def test_nor_does_it_let_in_a_request_over_http(tmp_path: Path, change: Change) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        scheduler.at(HASH, lambda: change(house))
        assert (await house.http("/requests/deleteMessageStream", {"name": "s"}))[0] == 401
        assert "s" in house.store.streams

    waits_test(test, tmp_path)


def test_a_right_that_is_withdrawn_while_the_password_is_hashed_is_gone_at_the_login(tmp_path: Path) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        client = await house.open()
        scheduler.at(HASH, lambda: house.reload(acl=[rule("ann", publish=["other/#"])]))
        await client.connect("c", user="ann", password=b"a")
        session = house.broker.sessions.get("c")
        assert session is not None
        assert not session.identity.may_publish("in/x")

    waits_test(test, tmp_path)
