"""What changes while a request waits: over HTTP and over the API of Firehose."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.access.rules import AccessRule

from .house import House, rule, waits_test
from .scheduler import Scheduler

BODY = "bridge/http/requests.py Requests._carry_out: await request.body"
DEVICE = AccessRule(user="plant", publish=["#"], page="none")


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


def test_a_reload_in_between_takes_nothing_from_a_user_to_whom_only_the_page_is_closed(
    tmp_path: Path,
) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        house.delivery()
        scheduler.at(
            "bridge/firehose/frontend.py FirehoseFrontEnd._wait_for_room: await self._room.wait", house.reload
        )
        house.store.committer.under_pressure = True
        house.store.runtime.later(0.01, lambda: [notify(False) for notify in house.manager.on_pressure])
        status, answer = await house.put(b"x")
        assert (status, answer.get("message")) == (200, None)
        assert await house.payloads("d") == [b"x"]

    waits_test(test, tmp_path, acl=[DEVICE])
