"""What changes while a request waits: over HTTP and over the API of Firehose."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.access.rules import AccessRule

from .house import KEY, SECRET, House, rule, waits_test
from .scheduler import Scheduler

BODY = "bridge/http/requests.py Requests._carry_out: await request.body"
PUT_BODY = "bridge/firehose/frontend.py FirehoseFrontEnd._answer: await request.body"
ROOM = "bridge/firehose/frontend.py FirehoseFrontEnd._wait_for_room: await self._room.wait"
DEVICE = AccessRule(user="plant", publish=["#"], page="none")


def removed(house: House) -> None:
    house.set_keys("AKIDOTHER anothersecretanothersecret plant")
    house.reload()


def behind(house: House) -> None:
    """The disk is behind for a moment: requests wait for room."""
    house.store.committer.under_pressure = True

    def over() -> None:
        house.store.committer.under_pressure = False
        for notify in house.manager.on_pressure:
            notify(False)

    house.store.runtime.later(0.01, over)


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
        behind(house)
        assert (await house.put(b"z"))[1]["__type"] == "AccessDeniedException"
        assert await house.payloads("d") == [b"y"]

    waits_test(test, tmp_path)


def test_a_reload_in_between_takes_nothing_from_a_user_to_whom_only_the_page_is_closed(
    tmp_path: Path,
) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        house.delivery()
        scheduler.at(ROOM, house.reload)
        behind(house)
        status, answer = await house.put(b"x")
        assert (status, answer.get("message")) == (200, None)
        assert await house.payloads("d") == [b"x"]

    waits_test(test, tmp_path, acl=[DEVICE])
