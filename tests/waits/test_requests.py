"""What changes while a request waits: over HTTP and over the API of Firehose."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bridge.access.rules import AccessRule
from tests.mqtt.harness import until

from .house import KEY, SECRET, House, rule, waits_test
from .scheduler import Scheduler

BODY = "bridge/http/requests.py Requests._carry_out: await request.body"
PUT_BODY = "bridge/firehose/frontend.py FirehoseFrontEnd._answer: await request.body"
ROOM = "bridge/firehose/frontend.py FirehoseFrontEnd._wait_for_room: await self._room.wait"
DEVICE = AccessRule(user="plant", publish=["#"], page="none")


def removed(house: House) -> None:
    house.set_keys("AKIDOTHER anothersecretanothersecret plant")
    house.reload()


async def put_behind(house: House, data: bytes) -> tuple[int, dict[str, Any]]:
    """Put a record while the disk is behind, until the request waits for room."""
    committer, seen = house.store.committer, house.scheduler.seen[ROOM]
    committer.under_pressure = True
    answer = asyncio.ensure_future(house.put(data))
    await until(lambda: house.scheduler.seen[ROOM] > seen or answer.done())
    committer.under_pressure = False
    for notify in house.manager.on_pressure:
        notify(False)
    return await answer


@pytest.mark.parametrize("page", ["none", "look"])
def test_a_page_that_is_closed_while_a_body_arrives_carries_nothing_out(tmp_path: Path, page: str) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        closed = AccessRule(user="ann", publish=["#"], subscribe=["#"], manage=["#"], page=page)
        scheduler.at(BODY, lambda: house.reload(acl=[closed]))
        _, answer = await house.http("/requests/deleteMessageStream", {"name": "s"}, slow=BODY)
        assert answer["statusName"] == "Unauthorized"
        if page == "none":
            house.reload(acl=[rule("ann")])
            scheduler.at(BODY, lambda: house.reload(acl=[closed]))
            _, answer = await house.http("/requests/describeMessageStream", {"name": "s"}, slow=BODY)
            assert answer["statusName"] == "Unauthorized", "nor is anything shown"
        assert "s" in house.store.streams

    waits_test(test, tmp_path)


def test_a_key_that_is_removed_while_a_record_arrives_puts_nothing(tmp_path: Path) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        house.delivery()

        scheduler.at(PUT_BODY, lambda: removed(house))
        status, answer = await house.put(b"x", slow=PUT_BODY)
        assert (status, answer["__type"]) == (400, "UnrecognizedClientException")
        assert await house.stored("d") == []
        house.set_keys(f"{KEY} {SECRET} plant")
        house.reload()
        assert (await house.put(b"y"))[0] == 200
        scheduler.at(ROOM, lambda: removed(house))
        assert (await put_behind(house, b"z"))[1]["__type"] == "AccessDeniedException"
        assert await house.payloads("d") == [b"y"]

    waits_test(test, tmp_path)


def test_a_reload_in_between_takes_nothing_from_a_user_to_whom_only_the_page_is_closed(
    tmp_path: Path,
) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        house.delivery()
        scheduler.at(ROOM, house.reload)
        status, answer = await put_behind(house, b"x")
        assert (status, answer.get("message")) == (200, None)
        assert await house.payloads("d") == [b"x"]

    waits_test(test, tmp_path, acl=[DEVICE])
